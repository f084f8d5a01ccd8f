"""Errors of a recipe name the key, its origin, its value and what is accepted; recipes round-trip."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from infinity.core.config import MemoryConfig, SettingError, Valid
from infinity.core.errors import RecipeError
from infinity.recipes.loading import load_recipe, named_keys
from infinity.recipes.models import GPTConfig
from infinity.recipes.other_tools import known_as
from infinity.recipes.recipe import Recipe, RunConfig, keys_of, recipe_table

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def refused(path: Path | None, *overrides: str) -> str:
    with pytest.raises(RecipeError) as raised:
        load_recipe(path, overrides)
    return str(raised.value)


def test_an_empty_file_and_no_file_are_the_defaults(tmp_path: Path) -> None:
    assert load_recipe() == Recipe()
    assert load_recipe(write(tmp_path, "")) == Recipe()
    assert load_recipe(write(tmp_path, "# only words\ntrain:\n")) == Recipe()


def test_a_file_says_only_what_differs_and_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    path = write(
        tmp_path, "memory: {host: 8GiB, nvme: [/a]}\ntrain: {steps: 7, dtype: fp32}\noptim: {lr: 1e-3}"
    )
    recipe = load_recipe(path, ["memory.nvme=[/x,/y]", "train.steps=9", "optim.betas=[0.8, 0.9]"])
    assert recipe.memory == MemoryConfig(host=8 * 2**30, nvme=("/x", "/y"))
    assert (recipe.train.steps, recipe.train.dtype) == (9, "fp32")
    assert (recipe.optim.lr, recipe.optim.betas) == (1e-3, (0.8, 0.9))


def test_what_runs_of_before_have_in_their_folders_is_read(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "model: {kind: gpt}")) == Recipe()


def test_a_list_may_be_written_as_its_only_item() -> None:
    recipe = load_recipe(overrides=["memory.nvme=/x", "data.files=stdlib"])
    assert recipe.memory.nvme == ("/x",)
    assert recipe.data.files == ("stdlib",)


def test_values_may_refer_to_others_and_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    path = write(
        tmp_path, "memory: {nvme: ['${oc.env:SCRATCH}/nvme']}\ntrain: {eval_every: '${train.steps}'}"
    )
    recipe = load_recipe(path, ["train.steps=5"])
    assert recipe.memory.nvme == ("/scratch/nvme",)
    assert recipe.train.eval_every == 5
    assert "Interpolation key 'train.none' not found" in refused(None, "train.steps=${train.none}")


def test_a_recipe_round_trips_through_its_yaml(tmp_path: Path) -> None:
    recipe = load_recipe(
        overrides=[
            "run.name=123", "memory.host=1.5GiB", "memory.nvme=[/x,'/a b']", "optim.eps=1e-12",
            "optim.max_grad_norm=null", "model.tied=true", "data.eval_files=['*.txt']",
        ]
    )  # fmt: skip
    assert recipe.run.name == "123"
    assert recipe.memory.host == 3 * 2**29
    assert recipe.optim.max_grad_norm is None
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("optm.lr", "did you mean optim.lr?"),
        ("train.stpes", "did you mean train.steps?"),
        ("model.steps", "did you mean train.steps?"),
        ("memory.nvmes", "did you mean memory.nvme?"),
        ("optim.learning_rate", "did you mean optim.lr?"),
        ("train.per_device_train_batch_size", "did you mean train.batch_size?"),
        ("lora.lora_alpha", "did you mean lora.alpha?"),
        (
            "memory.zzz",
            (
                "known: memory.device, memory.host, memory.nvme, memory.versions, memory.resident, "
                "memory.engine, memory.activations, memory.codec, memory.logits, memory.updates, "
                "memory.shared, memory.numa, memory.verify"
            ),
        ),
        (
            "x.zzz",
            (
                "known: run, model, data, memory, partition, durability, optim, train, lora, checkpoint, "
                "observe, adapters"
            ),
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path: Path, key: str, near: str) -> None:
    assert refused(None, f"{key}=1") == f"{key} on the command line: unknown key; {near}"
    section, name = key.split(".")
    path = write(tmp_path, f"{section}: {{{name}: 1}}")
    assert refused(path) == f"{key} in {path}: unknown key; {near}"


def test_a_key_outside_any_section_is_named_with_its_section(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "lr: 3")).endswith("unknown key; did you mean optim.lr?")
    assert refused(write(tmp_path, "num_epochs: 3")).endswith("unknown key; did you mean train.epochs?")
    assert refused(write(tmp_path, "base_model: DIR")).endswith("unknown key; did you mean model.path?")


def test_a_run_is_as_long_as_its_steps_or_its_epochs(tmp_path: Path) -> None:
    assert load_recipe().steps == load_recipe(overrides=["train.steps=null"]).steps == 1000
    epochs = load_recipe(overrides=["train.epochs=2.5"])
    assert (epochs.train.steps, epochs.train.epochs) == (None, 2.5)
    assert load_recipe(write(tmp_path, epochs.to_yaml())) == epochs
    with pytest.raises(RecipeError, match=r"train\.epochs=2\.5: the data says how many steps those are"):
        _ = epochs.steps
    file = write(tmp_path, "train: {steps: 200, evals_per_epoch: 2}")
    given = load_recipe(file, ["train.epochs=3", "train.eval_every=7"]).train
    assert (given.steps, given.epochs, given.eval_every, given.evals_per_epoch) == (None, 3, 7, None)
    assert named_keys(file, ["train.epochs=3"]) == {"train.epochs", "train.evals_per_epoch"}
    file = write(tmp_path, "train: {epochs: 3}")
    assert load_recipe(file, ["train.steps=20"]).steps == 20
    assert load_recipe(file, ["train.steps=null"]).train.epochs == 3
    file = write(tmp_path, "optim: {warmup_steps: 10}")
    assert load_recipe(file, ["optim.warmup_ratio=0.1"]).optim.warmup_steps == 0
    assert "got 0.1; wanted 0, or warmup_steps=0" in refused(
        file, "optim.warmup_ratio=0.1", "optim.warmup_steps=3"
    )
    said = refused(None, "train.epochs=2", "train.steps=10")
    assert "train.epochs on the command line: got 2.0; wanted null, since train.steps=10: one of both" in said


def test_names_of_other_tools_stand_for_keys_that_there_are() -> None:
    assert set(known_as().values()) <= keys_of(Recipe).keys()
    assert {"learning_rate", "micro_batch_size", "cutoff_len"} <= known_as().keys()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.dtype=bf17", "got 'bf17'; wanted auto | bf16 | fp16 | fp32"),
        ("train.steps=1.5", "got 1.5; wanted int or null, 1 to 1,000,000,000"),
        ("train.steps=0", "got 0; wanted int or null, 1 to 1,000,000,000"),
        ("train.steps=true", "got true; wanted int or null, 1 to 1,000,000,000"),
        ("train.epochs=0", "got 0; wanted float or null, > 0 and <= 1,000,000"),
        ("memory.resident=1", "got 1; wanted auto | true | false"),
        ("memory.versions=3", "got 3; wanted 1 | 2"),
        ("memory.versions=true", "got true; wanted 1 | 2"),
        ("memory.host=8Gb3", "got '8Gb3'; wanted size such as 8GiB or null, 1 to 2**60 bytes"),
        ("memory.host=0", "got 0; wanted size such as 8GiB or null, 1 to 2**60 bytes"),
        ("memory.nvme=[/x,/x]", "got ['/x', '/x']; wanted different, non-empty directories"),
        ("memory.nvme=[1.5]", "got [1.5]; wanted list of paths"),
        ("train.log_every={x: 1}", "got {'x': 1}; wanted int, 1 to 1,000,000,000"),
        ("optim.lr=-1", "got -1; wanted float, 0 to 1,000,000"),
        ("optim.lr=.inf", "got inf; wanted float, 0 to 1,000,000"),
        ("optim.betas=[0.9,1]", "got [0.9, 1]; wanted [float, float] or null, >= 0 and < 1"),
        ("optim.betas=[0.9]", "got [0.9]; wanted [float, float] or null, >= 0 and < 1"),
        ("model.n_heads=5", "got 5; wanted a number for which d_model=384 gives heads of equal, even width"),
        ("model.vocab_size=100", "got 100; wanted at least 256 for the bytes tokenizer"),
        ("run.resume=yes", "got true; wanted auto | never | must"),
        ("run.resume=nver", "got 'nver'; wanted auto | never | must"),
        (
            "run.name=a/b",
            "got 'a/b'; wanted a printable folder name without / and no - in front, of at most 200 bytes",
        ),
        (
            "run.name=-rf",
            "got '-rf'; wanted a printable folder name without / and no - in front, of at most 200 bytes",
        ),
        ("data.files=[]", "got []; wanted at least one path, glob or 'stdlib'"),
        (
            "lora.target_modules=[all-linear,lm_head]",
            (
                "got ['all-linear', 'lm_head']; wanted all-linear alone, or names of layers; "
                "lora.modules_to_save trains a head beside them"
            ),
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_is_wanted(
    tmp_path: Path, override: str, message: str
) -> None:
    key, _, value = override.partition("=")
    assert refused(None, override) == f"{key} on the command line: {message}"
    section, _, name = key.partition(".")
    path = write(tmp_path, f"{section}:\n  {name}: {value}\n")
    assert refused(path) == f"{key} in {path}: {message}"


def test_groups_of_micro_batches_need_the_schedule_that_has_them() -> None:
    message = "train.group on the command line: got 4; wanted null with train.schedule=step, which takes"
    assert refused(None, "train.schedule=step", "train.group=4").startswith(message)
    recipe = load_recipe(overrides=["train.group=4"])
    assert recipe.train.group == 4
    assert recipe.as_without_plan().train.group is None  # where no plan chooses the schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 3", ": not valid YAML"),
        ("train:\n  steps: 3\n  steps: 4\n", ":3: not valid YAML: found duplicate key"),
        ("- train\n", "wanted sections: run, model"),
        ("just words", "got 'just words'; wanted sections"),
        ("train: 3", "train in {path}: got 3; wanted keys and values"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    found = refused(path)
    assert message.format(path=path) in found
    assert str(path) in found


def test_what_is_no_file_and_what_is_too_long_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert f"{path}: not a regular file; give the path of a recipe" in refused(path)
    assert "has 1048577 bytes; at most 1048576 are read" in refused(write(tmp_path, "#" * (2**20 + 1)))


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "none.yaml")
    assert "Is a directory" in refused(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"run: {name: \xff}")
    assert "not UTF-8 text at byte 12" in refused(path)


def test_what_the_locale_cannot_read_is_an_error_and_no_traceback() -> None:
    with pytest.raises(RecipeError, match=r"run\.name=.*on the command line: .*set PYTHONUTF8=1"):
        load_recipe(overrides=[os.fsdecode(b"run.name=\xff\xfe")])


@pytest.mark.parametrize("override", ["train", "train=3", "=3", "steps=3"])
def test_an_override_is_section_key_value(override: str) -> None:
    assert refused(None, override) == (
        f"'{override}' on the command line: wanted section.key=value, as in train.steps=10"
    )


def test_the_table_has_every_key_with_a_meaning_and_its_default() -> None:
    rows = {row.key: row for row in recipe_table()}
    sections = {spec.name: getattr(Recipe(), spec.name) for spec in fields(Recipe) if spec.name != "adapters"}
    keys = [f"{name}.{key.name}" for name, part in sections.items() for key in fields(part)]
    assert list(rows) == [*keys, "adapters"]
    assert all(row.meaning and row.type for row in rows.values())
    assert rows["memory.host"][1:3] == ("size such as 8GiB or null, 1 to 2**60 bytes", "null")
    assert rows["train.dtype"][1:3] == ("auto | bf16 | fp16 | fp32", "auto")
    assert rows["optim.betas"][1:3] == ("[float, float] or null, >= 0 and < 1", "null")
    for row in rows.values():  # what the table shows can be written
        assert load_recipe(overrides=[f"{row.key}={row.default}"]) == Recipe()


def test_configs_check_themselves_without_a_file() -> None:
    with pytest.raises(SettingError, match=r"versions: got 3; wanted 1 \| 2"):
        MemoryConfig(versions=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_layers"):
        GPTConfig(n_layers=0)
    with pytest.raises(RecipeError, match="name"):
        replace(RunConfig(), name="..")


def test_bounds_say_what_they_accept() -> None:
    half_open = Valid(above=0, most=1)
    assert [half_open.accepts(x) for x in (0, 0.5, 1, 1.5, float("nan"))] == [False, True, True, False, False]
    assert str(half_open) == "> 0 and <= 1"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_with_the_project_are_valid(path: Path) -> None:
    needs = ["model.path=DIR"] if path.stem in ("finetune", "adapters") else []
    assert load_recipe(path, needs) != Recipe()


def test_an_override_below_a_key_is_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "memory: {host: 1GiB}")
    assert refused(path, "memory.device.x=3").startswith("memory.device on the command line: got {'x': 3}")
    assert refused(path, "optim.momentum.x=3").startswith("optim.momentum on the command line: unknown key")


def test_a_value_that_is_no_yaml_names_its_override_and_how_to_quote_it() -> None:
    with pytest.raises(
        RecipeError, match=r"'data\.files=\[/x/\[ab\]\*\.py\]' on the command line.*quote text"
    ):
        load_recipe(overrides=["train.steps=3", "data.files=[/x/[ab]*.py]"])
    assert load_recipe(overrides=['data.files=["/x/[ab]*.py"]']).data.files == ("/x/[ab]*.py",)


@pytest.mark.parametrize("name", ["finetune", "adapters"])
def test_a_recipe_that_fine_tunes_asks_for_the_checkpoint(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    with pytest.raises(RecipeError, match=r"model\.path.*model\.path=DIR"):
        load_recipe(path)
    assert load_recipe(path, ["model.path=base"]).model.path == "base"


def test_a_section_that_is_no_section_is_refused_from_python_too() -> None:
    with pytest.raises(RecipeError, match=r"^train: got 'fast'; wanted a TrainConfig, as of infinity"):
        Recipe(train="fast")  # type: ignore[arg-type]


BASE = "model: {path: /x}\nlora: {rank: 16}\noptim: {lr: 1e-4}\n"


def test_each_adapter_has_a_recipe_of_its_own_and_is_written_and_read_again(tmp_path: Path) -> None:
    text = "adapters: {fox: {data: {files: a.txt}, lora: {rank: 8, rank_pattern: {q: 3}}}, owl: }"
    path = write(tmp_path, BASE + text)
    recipe = load_recipe(path, ["adapters.owl.optim.lr=1e-3", "adapters.fox.lora.rank_pattern.k=5"])
    fox, owl = recipe.tasks.values()
    assert (fox.data.files, fox.lora.rank, fox.lora.rank_pattern) == (("a.txt",), 8, {"q": 3, "k": 5})
    assert (owl.data.files, owl.lora.rank, owl.optim.lr) == (("stdlib",), 16, 1e-3)
    assert fox == recipe.alone("fox")
    assert fox.tasks == {"": fox}
    assert (fox.adapters, fox.optim, fox.memory) == ({}, recipe.optim, recipe.memory)
    assert recipe.micro_batches == 2 * recipe.train.accumulate
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe
    absolute = recipe.with_absolute_paths()
    assert absolute.adapters["fox"]["data"] == {"files": (f"{Path.cwd()}/a.txt",)}
    assert load_recipe(path, ["adapters=null"]).tasks.keys() == {""}


_SECTIONS = "wanted keys of its own in sections data, lora, optim"


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("fox.lora.rnak=3", ".fox.lora.rnak", "got 3; wanted a key of lora; did you mean lora.rank?"),
        ("fox.rank=3", ".fox.rank", f"got 3; {_SECTIONS}; did you mean lora.rank?"),
        ("fox.lora.rank=0", ".fox.lora.rank", "got 0; wanted int or null, 1 to 65,536"),
        ("fox.train.steps=4", ".fox.train", f"{_SECTIONS}; all adapters of a run share train"),
        ("fox.optim.loss_scale=4", ".fox.optim.loss_scale", "all adapters of a run share optim.loss_scale"),
        ("a/b.lora.rank=3", "", "got 'a/b'; wanted a name that a folder can have: letters, digits, _ and -"),
        ("fox.lora.rank=null", ".fox.lora.rank", "got null; wanted its rank, or lora.rank for all adapters"),
        ("fox=3", ".fox", f"got 3; {_SECTIONS}"),
        ("fox.lora=3", ".fox.lora", "got 3; wanted keys and values"),
    ],
)
def test_what_an_adapter_cannot_have_is_named(tmp_path: Path, override: str, key: str, message: str) -> None:
    said = refused(write(tmp_path, BASE), f"adapters.{override}")
    assert said.startswith(f"adapters{key} on the command line: got ")
    assert message in said


def test_adapters_need_a_base_and_a_recipe_says_which_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, "adapters: {fox: {lora: {rank: 4}}}")
    assert refused(path).endswith(
        f"adapters.fox.lora.rank in {path}: got 4; wanted null without model.path, the frozen base"
    )
    with pytest.raises(RecipeError, match="adapters: no 'owl'; there are: fox"):
        load_recipe(path, ["model.path=/x"]).alone("owl")


def test_numbers_that_a_recipe_does_not_name_are_those_of_its_rule() -> None:
    for given, wanted in (
        ("adamw", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("adamw8bit", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("adam", {"betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
        ("sgd", {"momentum": 0.0, "weight_decay": 0.0}),
    ):
        numbers = load_recipe(overrides=[f"optim.name={given}", "optim.lr=0.5"]).optim.numbers
        assert {**numbers, **wanted, "lr": 0.5} == numbers
    own = ["optim.name=sgd", "optim.weight_decay=0.1", "optim.options={momentum: 0.9}"]
    named = load_recipe(overrides=own).optim.numbers
    assert (named["weight_decay"], named["momentum"]) == (0.1, 0.9)
    with pytest.raises(RecipeError, match=r"numbers without a key of their own; set optim\.lr=0\.5"):
        load_recipe(overrides=["optim.options={lr: 0.5}"])
