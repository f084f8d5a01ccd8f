"""Whatever a recipe says, there is a run, or one error of ours that names the key and what it accepts.

The cases are made from the schema, so that a new key is covered by itself. A long run is
``pytest -m slow tests/recipes/test_hostile_recipes.py``.
"""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from infinity.app.loop import enough_memory
from infinity.app.train import train
from infinity.core.config import MemoryConfig, Setting, SettingError
from infinity.core.errors import BudgetError, InfinityError, RecipeError
from infinity.core.files import user_path
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe, keys_of, recipe_table
from tests.helpers.models import build

#: Each setting by its key.
KEYS = keys_of(Recipe)
#: The fewest cases in which a fault shows soon, and many.
FEW, MANY = 12, 2000
QUICK = settings(max_examples=FEW, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
#: Cases of which most are a run, of a third of a second.
RUNS = settings(max_examples=MANY // 4, suppress_health_check=list(HealthCheck))

#: YAML of no key's type, of some keys' types, and of a type but out of range.
VALUES = [
    "null", "~", "true", "on", "0", "-1", "1", "1.0", "1.5", "3", "2147483648", "9223372036854775808",
    "-0.0", "1e400", "-.inf", ".nan", "1e-400", "0x" + "f" * 9000, "9" * 400, "9" * 5000, "1" * 400 + ".5",
    "1:99:99", "0o17", "''", "' '", "a", "'3'", "'null'", "2001-99-99", "2026-01-31", "=", "<<", "???",
    "[]", "[null]", "[[a]]", "[a, 3]", "[0.9, 0.9]", "[1e400, 0.5]", "{}", "{a: 3}", "{a: {b: 3}}",
    "[" * 300, "{a: " * 300, "!!set {a, b}", "!!int foo", "!!binary aGk=", "!!python/name:os.system",
    "!!timestamp x", "!foo 3", "&a [*a]", "*a", "'${'", "'${a'", "${train.steps}", "${run.name}",
    "${memory}", "${oc.env:}", "${oc.env:NOPE}", "'\\${a}'", "${nope:3}", "${oc.decode:'['}", "8GiB",
    "8Gb3", "1.5TiB", f"{'9' * 400}GiB", "-1GiB", "1e3GiB", "2**60", r'"\0"', r'"a\0b"', r'"\ud800"',
    r'"\x7f\x1b[2J\n"', "x" * 5000, f"{'x' * 300}/a", "a/b", "..", "./~", "~nosuchuser", "~nosuchuser/x",
    "~/x", "loop", "loop/a", "file", "file/a", "none/a", "[nv, nv/]", "[nv, link]", "[loop, a]", "**",
    "**a", "'[*a'", "'*/*'", "'['", "'[z-a]'", "'('", "stdlib", "bytes", "a=b", "'a: b'", "a#b", "null ",
    "\u2028", "\U0001f600", "a\tb", "- a", "a: b", "? [a]", "%", "@", "`",
]  # fmt: skip


def numbers(setting: Setting) -> list[str]:
    """The bounds of a number, and what lies just outside."""
    valid, texts = setting.valid, []
    for bound in (valid.least, valid.above, valid.most, valid.below):
        if bound is not None:
            texts += [f"{bound}", f"{bound - 1}", f"{bound + 1}"]
    return [*texts, *map(str, choices(setting.hint))]


def choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


@st.composite
def hostile(draw: st.DrawFn) -> tuple[str, str]:
    """A key of the schema, sometimes misspelt, and YAML for its value."""
    key = draw(st.sampled_from(sorted(KEYS)))
    setting = KEYS[key]
    own = [text for text in numbers(setting) if "float" in str(setting.hint) or "." not in text]
    value = draw(
        st.one_of(
            st.sampled_from(VALUES),
            st.sampled_from(own or VALUES),
            st.integers().map(str),
            st.floats().map(lambda number: repr(number).replace("inf", ".inf").replace("nan", ".nan")),
            st.text(max_size=8).map(json.dumps),
            st.text(alphabet="{}[]:,&*!|>'\"%@`#?-\\$ a0\n", max_size=8),
        )
    )
    if draw(st.integers(0, 9)) == 0:
        key = draw(
            st.sampled_from([key.upper(), key[1:], key[:-1], key + ".a", key + "[0]", "", "~", "${a}", "."])
        )
    return key, value


@st.composite
def plausible(draw: st.DrawFn) -> tuple[str, str]:
    """A key of the schema, and YAML for a value of its type and in its range, as far as the schema says."""
    key = draw(st.sampled_from(sorted(KEYS)))
    hint = KEYS[key].hint
    if get_origin(hint) in (UnionType, Union):
        hint = draw(st.sampled_from([get_args(hint)[0], None]))
    return key, "null" if hint is None else draw(_value_of(hint, KEYS[key]))


def _value_of(hint: Any, setting: Setting) -> st.SearchStrategy[str]:
    valid = setting.valid
    if choices(hint):
        return st.sampled_from([str(choice) for choice in choices(hint)])
    if get_origin(hint) is tuple:
        items = [_value_of(item, setting) for item in get_args(hint) if item is not Ellipsis]
        several = st.lists(items[0], max_size=3) if Ellipsis in get_args(hint) else st.tuples(*items)
        return several.map(lambda texts: f"[{', '.join(texts)}]")
    if get_origin(hint) is Mapping:
        names, values = (_value_of(each, setting) for each in get_args(hint))
        return st.tuples(names, values).map(lambda item: f"{{{item[0]}: {item[1]}}}")
    if setting.path:
        return st.sampled_from(
            ["file", "nv", "nv/a", "link", "loop", "~/b", "none", "llama", "llama/config.json", "*"]
        )
    if hint is str:
        return st.sampled_from(["a", "q_proj", "'*'", "'['", "'model.layers.*'", "LlamaMLP", "'(a'"])
    if hint is bool:
        return st.sampled_from(["true", "false"])
    least, most = (
        (valid.above if valid.least is None else valid.least),
        (valid.below if valid.most is None else valid.most),
    )
    if hint is float:
        return st.floats(least, most, exclude_max=valid.most is None).map(repr)
    near = st.integers(least, min(most, least + 20)) | st.integers(max(least, most - 2), most)
    return (near | near | st.integers(least, most)).map(str)


def refusal(path: Path | None, overrides: list[str]) -> str | None:
    """The error of a recipe; None if it is valid. Any other exception fails the test."""
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        return str(error)
    again = Path("again.yaml")
    again.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(again) == recipe
    return None


def check_override(case: tuple[str, str]) -> None:
    key, value = case
    said = refusal(None, [f"{key}={value}"])
    assert said is None or (len(said) < 2500 and ("on the command line" in said or "wanted" in said))


def check_file(cases: list[tuple[str, str]], separator: str) -> None:
    path, sections = Path("recipe.yaml"), dict[str, list[str]]()
    for key, value in cases:
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name}: {value}")
    text = "\n".join(f"{section}:\n  " + separator.join(lines) for section, lines in sections.items())
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    said = refusal(path, [])
    assert said is None or str(path) in said or "wanted" in said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory, which is also the home, with a text, a checkpoint, and links that lead nowhere."""
    folder, before, threads = tmp_path_factory.mktemp("place"), Path.cwd(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.delenv("INFINITY_TRACEBACK", raising=False)
        os.chdir(folder)
        (folder / "loop").symlink_to("loop")
        (folder / "nv").mkdir()
        (folder / "link").symlink_to("nv")
        (folder / "file").write_text("the quick brown fox\n" * 40)
        build("llama", seed=0)[0]().save_pretrained(folder / "llama")
        yield folder
        os.chdir(before)
        torch.set_num_threads(threads)


@QUICK
@given(case=hostile())
def test_any_override_is_a_recipe_or_an_error_that_says_where(place: Path, case: tuple[str, str]) -> None:
    check_override(case)


@pytest.mark.slow
@LONG
@given(case=hostile())
def test_many_overrides_are_recipes_or_errors(place: Path, case: tuple[str, str]) -> None:
    check_override(case)


@QUICK
@given(cases=st.lists(hostile(), min_size=1, max_size=3), separator=st.sampled_from(["\n  ", "\n", ", "]))
def test_any_file_is_a_recipe_or_an_error_that_says_where(
    place: Path, cases: list[tuple[str, str]], separator: str
) -> None:
    check_file(cases, separator)


@pytest.mark.slow
@LONG
@given(cases=st.lists(hostile(), min_size=1, max_size=3), separator=st.sampled_from(["\n  ", "\n", ", "]))
def test_many_files_are_recipes_or_errors(place: Path, cases: list[tuple[str, str]], separator: str) -> None:
    check_file(cases, separator)


@settings(max_examples=200)
@given(
    data=st.binary(max_size=60) | st.text(alphabet="{}[]:,&*!|>'\"%@`#?-\\$~ atrain.steps0\n").map(str.encode)
)
def test_any_bytes_are_a_recipe_or_an_error(place: Path, data: bytes) -> None:
    path = Path("bytes.yaml")
    path.write_bytes(data)
    refusal(path, [])


# --- a run, or an error --------------------------------------------------------------------------

#: A run of a moment; of a new model or of a checkpoint.
SMALL = [
    "data.files=[file]", "data.cache=cache", "model.seq_len=16", "train.steps=2", "train.batch_size=2",
    "train.eval_batches=1", "train.eval_every=null", "train.threads=1", "train.dtype=fp32", "run.dir=runs",
    "observe.progress=false",
]  # fmt: skip
NEW = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"]
LOADED = ["model.path=llama", "data.tokenizer=bytes", "run.save=false"]
#: What only makes a run longer or larger, or reads what is not ours.
MOST = {"steps": 2, "accumulate": 2, "threads": 2, "eval_batches": 2, "warmup_steps": 10}


def bounded(recipe: Recipe) -> Recipe:
    """The recipe with a duration that a test can wait for."""
    most = {
        name: min(getattr(recipe.train, name) or 1, MOST[name])
        for name in ("steps", "accumulate", "eval_batches")
    }
    threads = None if recipe.train.threads is None else min(recipe.train.threads, 2)
    return replace(recipe, train=replace(recipe.train, **most, threads=threads))


def is_heavy(recipe: Recipe) -> bool:
    """It would run, for a long time."""
    config = recipe.model
    tokens = recipe.train.batch_size * config.seq_len
    fits = (
        4 * max(tokens * config.vocab_size, config.vocab_size * config.d_model, 3 * config.d_model**2) < 2**33
    )
    small = config.numel < 2**22 and tokens < 2**14 and config.n_layers <= 4
    return fits and config.path is None and not small


def check_run(cases: list[tuple[str, str]], base: list[str]) -> None:
    shutil.rmtree("runs", ignore_errors=True)
    given_keys = {key for key, _ in cases}
    usual = [each for each in base if each.partition("=")[0] not in given_keys]
    output = io.StringIO()
    try:
        recipe = load_recipe(None, [*usual, *(f"{key}={value}" for key, value in cases)])
    except RecipeError:
        event("not a recipe")
        return
    assume(not is_heavy(recipe))
    assume(recipe.data.files != ("stdlib",) and "/" not in recipe.data.files)
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            train(bounded(recipe))
        event("a run")
    except InfinityError as error:
        event(type(error).__name__)


@settings(QUICK, max_examples=8)
@given(case=plausible())
def test_a_recipe_that_is_valid_runs_or_says_what_to_change(place: Path, case: tuple[str, str]) -> None:
    check_run([case], [*SMALL, *NEW])


@pytest.mark.slow
@RUNS
@given(cases=st.lists(plausible(), min_size=1, max_size=2), loaded=st.booleans())
def test_many_recipes_that_are_valid_run_or_say_what_to_change(
    place: Path, cases: list[tuple[str, str]], loaded: bool
) -> None:
    check_run(cases, [*SMALL, *(LOADED if loaded else NEW)])


# --- what went wrong once --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: !!int foo}", "not valid YAML: invalid literal"),
        ("run: {name: !!timestamp x}", "not valid YAML"),
        ("train: " + "[" * 5000, "recipe.yaml:2: not valid YAML"),
        ("train: " + "{a: " * 3000, "recipe.yaml:2: not valid YAML"),
        ("train: &a {steps: *a}", "recursive aliases"),
        ("~: 3", "not valid YAML: Incompatible key type 'NoneType'"),
        ("train:\n  ~: 3", "not valid YAML: train: Incompatible key type 'NoneType'"),
        ("? [a]\n: 3", "recipe.yaml:1: not valid YAML: found unhashable key"),
        ("train: !!set {a, b}", "not valid YAML: train: Value 'set' is not a supported"),
        ("run: {name: !!binary aGk=}", "run.name in recipe.yaml: got b'hi'; wanted text or null"),
        ("run: {name: !!python/object/apply:os.system [ls]}", "could not determine a constructor"),
        ("run: {name: '${'}", "run.name: no viable alternative"),
        ("train: {steps: '${train.steps}'}", "train.steps in recipe.yaml: Recursive interpolation"),
        ("train: {steps: '${oc.env:}'}", "train.steps in recipe.yaml: TypeError raised while resolving"),
        (
            r"run: {name: '\${a}'}",
            "run.name in recipe.yaml: got '${a}'; wanted text or null; ${ is for references",
        ),
        (f"train: {{steps: {'9' * 400}}}", "... (400 characters); wanted int or null, 1 to 1,000,000,000"),
        (f"train: {{steps: {'9' * 5000}}}", "not valid YAML: Exceeds the limit"),
        (f"train: {{steps: 0x{'f' * 9000}}}", "got int of unprintable length; wanted int or null, 1 to"),
        (f"optim: {{lr: {'9' * 400}}}", "wanted float, 0 to 1,000,000"),
        (f"memory: {{host: {'9' * 400}}}", "wanted size such as 8GiB or null, 1 to 2**60 bytes"),
        (f"memory: {{host: {'9' * 400}GiB}}", "wanted size such as 8GiB or null, 1 to 2**60 bytes"),
        (f"data: {{seed: {2**63}}}", "got 9223372036854775808; wanted int, 0 to 2**63 - 1"),
        ("lora: {target_modules: ['???', a]}", "wanted list of texts; ??? marks a value that must be given"),
        ("memory: {versions: 1.0}", "got 1.0; wanted 1 | 2"),
        ("train: {steps: [1]}", "got [1]; wanted int or null, 1 to 1,000,000,000"),
        ("run: {name: {a: 1}}", "got {'a': 1}; wanted text or null"),
        ("train: {threads: 100000}", "got 100000; wanted int or null, 1 to 1,024"),
        (
            "memory: {nvme: ['~nosuchuser/x']}",
            "there is no home directory ~nosuchuser; a file of that name is ./",
        ),
        (r'memory: {nvme: ["a\0b"]}', "the character NUL cannot be in it"),
        (f"run: {{dir: {'x' * 300}}}", "a path has at most 4095 bytes, and each name in it 255"),
        (
            f"run: {{name: {'x' * 300}}}",
            "a printable folder name without / and no - in front, of at most 200 bytes",
        ),
        (r'run: {name: "a\nb"}', "a printable folder name without /"),
        ("memory: {nvme: [nv, nv/]}", "wanted different, non-empty directories"),
        ("memory: {nvme: [nv, none/../nv]}", "wanted different, non-empty directories"),
        ("memory: {nvme: [nv, link]}", "wanted different, non-empty directories"),
        ("memory: {nvme: [new, ./new]}", "wanted different, non-empty directories"),
        (
            "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}' if n else 'a'] * 9)}]\n" for n in range(9)),
            "expansion exceeds",
        ),
    ],
)
def test_a_recipe_that_was_a_traceback_is_an_error(place: Path, text: str, message: str) -> None:
    Path("recipe.yaml").write_text(text)
    said = refusal(Path("recipe.yaml"), [])
    assert said is not None
    assert message in said


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "~nosuchuser/a", "\ud800"])
def test_a_recipes_own_path_may_be_anything(place: Path, path: str) -> None:
    with pytest.raises(RecipeError, match="the recipe "):
        load_recipe(path)


def test_a_tilde_is_the_home_in_every_path_and_in_python_too(place: Path) -> None:
    recipe = load_recipe(
        overrides=["memory.nvme=[~/x]", "run.dir='~'", "data.files=[~/*.txt]", "data.cache=~/c"]
    )
    assert recipe.memory.nvme == (f"{place}/x",)
    assert (recipe.run.dir, recipe.data.files, recipe.data.cache) == (
        f"{place}",
        (f"{place}/*.txt",),
        f"{place}/c",
    )
    assert MemoryConfig(nvme=(Path("~/x"),)).nvme == (f"{place}/x",)  # type: ignore[arg-type]
    assert load_recipe(overrides=["run.dir=./~"]).run.dir == "./~"
    assert user_path("~/a", "RUN") == place / "a"


def test_configs_take_from_python_what_a_recipe_takes() -> None:
    given: Any = {"host": "1GiB", "nvme": ["/a", "/b"]}
    assert MemoryConfig(**given) == MemoryConfig(host=2**30, nvme=("/a", "/b"))
    for wrong in (
        {"host": "x"},
        {"host": 1.5},
        {"host": True},
        {"nvme": 1.5},
        {"versions": 1.0},
        {"resident": 1},
    ):
        with pytest.raises(SettingError, match=f"^{next(iter(wrong))}: got .*; wanted "):
            MemoryConfig(**wrong)  # type: ignore[arg-type]


def test_every_number_of_the_schema_has_a_range_on_both_sides() -> None:
    for row in recipe_table()[:-1]:  # the last one, adapters, has keys of others
        valid = KEYS[row.key].valid
        if re.search(r"\b(int|float)\b", str(KEYS[row.key].hint)):
            assert (valid.least, valid.above) != (None, None), row.key
            assert (valid.most, valid.below) != (None, None), row.key
            assert str(valid) in row.type, row.key


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["memory.host=100TiB"], r"memory\.host is 100 TiB; this machine has .* Lower memory\.host"),
        (["memory.device=100TiB"], r"memory\.device is 100 TiB; this machine has .* Lower memory\.device"),
        (["memory.engine=gds", "memory.nvme=nv"], r"memory\.engine.*got 'gds'.*kvikio|needs a CUDA device"),
        (["model.d_model=1000000"], r"model\.d_model=1000000 take 10\.9 TiB in fp32; this machine has"),
        (["model.vocab_size=2000000000"], r"the embedding of model\.d_model=16 take 119 GiB"),
        (
            ["model.seq_len=1000000000", "memory.logits=whole"],
            r"the logits of train\.batch_size=2 x model\.seq_len=1000000000 tokens take",
        ),
        (
            ["model.seq_len=1000000000"],
            r"a layer's outputs of train\.batch_size=2 x model\.seq_len=10* ",
        ),
        (["train.threads=1024"], r"train\.threads: got 1024; wanted at most \d+ \(8 for each core"),
        (["data.files=['**a']"], r"data\.files: '\*\*a'(: Invalid pattern| matches no file)"),
        (["data.files=['loop/*']"], r"data\.files: 'loop/\*' matches no file"),
        (["data.files=[loop]"], r"data\.files: 'loop' matches no file"),
        ([f"data.files=['{'*/' * 400}']"], r"data\.files: .*; give a path, a glob"),
        (["data.cache=loop"], r"data\.cache: "),
        (["data.cache=file"], r"data\.cache: "),
        (["data.tokenizer=loop"], r"data\.tokenizer: loop: Too many levels of symbolic links"),
        (["run.dir=loop"], r"run\.dir: loop/.*: Too many levels of symbolic links"),
        (["run.dir=file"], r"run\.dir: file/.*: Not a directory"),
        (["memory.nvme=file"], r"making the run's directory .*file.* failed: File exists|Not a directory"),
    ],
)
def test_a_run_that_was_a_traceback_is_an_error(place: Path, overrides: list[str], message: str) -> None:
    if "memory.engine=gds" in overrides and torch.cuda.is_available():
        pytest.skip("this machine may have it")
    keys = {each.partition("=")[0] for each in overrides}
    usual = [each for each in (*SMALL, *NEW) if each.partition("=")[0] not in keys]
    shutil.rmtree("runs", ignore_errors=True)
    with pytest.raises(InfinityError, match=message):
        train(load_recipe(overrides=[*usual, *overrides]))


def test_an_allocation_that_the_system_refuses_says_what_to_lower(place: Path) -> None:
    recipe = load_recipe(overrides=["train.batch_size=3"])
    with (
        pytest.raises(
            BudgetError, match=r"train\.batch_size=3 x model\.seq_len=256 tokens needs more memory"
        ),
        enough_memory(recipe),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(BudgetError, match=r"\(MemoryError\)"), enough_memory(recipe):
        raise MemoryError  # of Python, which has no message
    with pytest.raises(RuntimeError, match="must match"), enough_memory(recipe):
        torch.zeros(2) + torch.zeros(3)
