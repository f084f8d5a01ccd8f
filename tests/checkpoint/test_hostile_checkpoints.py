"""Whatever a directory of a checkpoint holds, there is a run, or one error of ours.

A long run is ``pytest -m slow tests/checkpoint/test_hostile_checkpoints.py``.
"""

import contextlib
import io
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from infinity.app.train import train
from infinity.core.errors import InfinityError
from infinity.recipes.loading import load_recipe
from tests.helpers.tokenizers import MARKED, write_tokenizer

FEW, MANY = 10, 2000
QUICK = settings(max_examples=FEW, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=MANY, suppress_health_check=list(HealthCheck))

#: JSON of any type; none is a number of layers that would take for ever to build.
VALUES = [
    None, True, False, 0, -1, 1, 2, 3, 7, 0.5, 5.0, -0.5, 1e400, float("nan"), 2**31, 2**63, 10**30, "",
    "a", "3", "\ud800", "\0", "../../etc", "x" * 5000, "auto", "bfloat16", "int8", "gelu", "{{ 1 / 0 }}",
    "{% endfor %}", [], [3], [[]], ["\ud800"], ["LlamaForCausalLM", 3], ["BertModel"], {}, {"a": 3},
    {"\ud800": None},
]  # fmt: skip
#: The same, where a model is built of as many parts.
COUNTS = [
    value for value in VALUES if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 10
]


def values_of(key: object) -> list[Any]:
    return COUNTS if any(word in str(key) for word in ("layers", "num_labels", "heads")) else VALUES


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside JSON."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from paths_of(each, (*path, key))


def changed_json(draw: st.DrawFn, text: str) -> str:
    """JSON with one value replaced, removed or added."""
    whole = [json.loads(text)]
    *way, last = draw(st.sampled_from([(0, *path) for path in list(paths_of(whole[0]))[:400]]))
    inside = whole
    for key in way:
        inside = inside[key]
    how = draw(st.integers(0, 9))
    if how == 0:
        del inside[last]
    elif how == 1 and isinstance(inside, dict):
        inside[draw(st.sampled_from(["a", "\ud800", "quantization_config", "auto_map", "is_decoder"]))] = (
            draw(st.sampled_from(VALUES))
        )
    else:
        inside[last] = draw(st.sampled_from(values_of(last)))
    return json.dumps(whole[0] if whole else None)


def changed_bytes(draw: st.DrawFn, content: bytes, most: int = 3000) -> bytes:
    """Bytes of which some near the beginning differ, or which end early, or late."""
    raw = bytearray(content)
    how = draw(st.integers(0, 3))
    if how == 0:
        return bytes(raw[: draw(st.integers(0, len(raw)))])
    if how == 1:
        return bytes(raw) + draw(st.binary(min_size=1, max_size=20))
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, min(most, len(raw)) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


def changed_header(draw: st.DrawFn, content: bytes) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", content[:8])
    header = changed_json(draw, content[8 : 8 + length].decode()).encode()
    if draw(st.booleans()):
        header = header.ljust(length)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


@st.composite
def change(draw: st.DrawFn, kind: str) -> tuple[str, bytes]:
    """The name of a file in a directory of ``kind``, and its new content."""
    names = sorted(FILES[kind])
    name = draw(st.sampled_from(names))
    content = FILES[kind][name]
    if name.endswith(".safetensors") and draw(st.booleans()):
        return name, changed_header(draw, content)
    if name.endswith(".json") and draw(st.integers(0, 4)):
        return name, changed_json(draw, content.decode()).encode()
    return name, changed_bytes(draw, content)


#: Small files of each kind of directory, by name; see :func:`place`.
FILES: dict[str, dict[str, bytes]] = {}
KINDS = ("whole", "sharded")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a checkpoint of each kind, a text and chats."""
    folder, before, threads = tmp_path_factory.mktemp("place"), Path.cwd(), torch.get_num_threads()
    transformers.utils.logging.disable_progress_bar()
    os.chdir(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=272, num_key_value_heads=1, max_position_embeddings=32, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    for kind in KINDS:
        model.save_pretrained(folder / kind, max_shard_size="20KB" if kind == "sharded" else "1GB")
        write_tokenizer(folder / kind, chat_template=MARKED)
        FILES[kind] = {path.name: path.read_bytes() for path in (folder / kind).iterdir()}
    (folder / "text.txt").write_text("the quick brown fox\n" * 40)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the b"}]}
    (folder / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 20)
    yield folder
    FILES.clear()
    os.chdir(before)
    torch.set_num_threads(threads)


def run(directory: str, data: str = "text.txt", *more: str) -> str:
    """Train the checkpoint for a step; how it ended."""
    shutil.rmtree("runs", ignore_errors=True)
    recipe = load_recipe(
        overrides=[
            f"model.path={directory}", "model.seq_len=16", f"data.files=[{data}]", "data.cache=runs/cache",
            "data.eval_fraction=0", "train.threads=1", "train.steps=1", "train.batch_size=2",
            "train.dtype=fp32", "train.eval_every=null",
            "observe.progress=false", "run.save=false", "run.dir=runs", *more,
        ]
    )  # fmt: skip
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            train(recipe)
    except InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "a run"


def check_changes(kind: str, changes: list[tuple[str, bytes]], data: str) -> None:
    shutil.rmtree("changed", ignore_errors=True)
    Path("changed").mkdir()
    for name, content in (FILES[kind] | dict(changes)).items():
        (Path("changed") / name).write_bytes(content)
    event(run("changed", data).partition(":")[0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[tuple[str, bytes]], str]:
    kind = draw(st.sampled_from(KINDS))
    changes = draw(st.lists(change(kind), min_size=1, max_size=2))
    return kind, changes, draw(st.sampled_from(["text.txt", "chat.jsonl"]))


@QUICK
@given(case=st.data())
def test_any_change_of_a_checkpoint_is_a_run_or_an_error(place: Path, case: st.DataObject) -> None:
    check_changes(*case.draw(cases()))


@pytest.mark.slow
@LONG
@given(case=st.data())
def test_many_changes_of_a_checkpoint_are_runs_or_errors(place: Path, case: st.DataObject) -> None:
    check_changes(*case.draw(cases()))


# --- what went wrong once --------------------------------------------------------------------------


def changed(kind: str, **files: bytes | dict[str, Any]) -> str:
    """Make a directory of ``kind`` with some files changed: JSON by its keys; how a run of it ended."""
    shutil.rmtree("changed", ignore_errors=True)
    shutil.copytree(kind, "changed")
    for stem, change in files.items():
        path = next(Path("changed").glob(f"{stem}.*"))
        if isinstance(change, dict):
            change = json.dumps(json.loads(path.read_text()) | change).encode()
        path.write_bytes(change)
    return run("changed")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": [3]}, "a run"),
        ({"architectures": 3}, "a run"),
        ({"architectures": ["\ud800"]}, "a run"),
        ({"hidden_act": "\ud800"}, "config.json"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "config.json"),
        ({"rms_norm_eps": "x"}, "config.json"),
        ({"pad_token_id": 10**30}, "config.json"),
        ({"initializer_range": -1}, "initializer_range"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"num_key_value_heads": 3}, "k_proj.weight: the checkpoint has shape"),
        ({"vocab_size": "\ud800"}, "config.json"),
        ({"model_type": ["llama"]}, "config.json"),
        ({"model_type": "\ud800"}, "config.json"),
        ({"text_config": 3}, "config.json: its part on text is 3, which LlamaConfig does not read"),
        ({"text_config": {"vocab_size": 3}}, "config.json: "),
        ({"hidden_act": "nope"}, "'nope' is unknown, or missing"),
    ],
)
def test_a_config_that_was_a_traceback_is_an_error(
    place: Path, entries: dict[str, Any], message: str
) -> None:
    assert message in changed("whole", config=entries)


def test_a_config_of_ours_has_the_ranges_of_the_schema(place: Path) -> None:
    config = {"architectures": ["GPT"], "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16}
    for wrong in (
        {"n_layers": 2.5},
        {"n_layers": True},
        {"n_layers": 2**40},
        {"d_ff": "x"},
        {"tied": 1},
        {"d_model": None},
    ):
        key = next(iter(wrong))
        assert re.search(rf"config\.json: {key}: got .*; wanted ", changed("whole", config=config | wrong))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ValueError("dropout probability has to be between 0 and 1"),
            "CheckpointError: the model in whole, with its config.json, cannot run: dropout prob",
        ),
        (torch.OutOfMemoryError("out of memory"), "BudgetError: a micro-batch of train.batch_size="),
    ],
)
def test_a_first_forward_pass_that_fails_names_the_checkpoint_or_the_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
    assert run("whole").startswith(message)


#: Parts of a tokenizer at which the library, which is written in Rust, panics: opening it, and encoding.
PANICS = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}},
    {
        "post_processor": {
            "type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
        }
    },
    {"normalizer": {"type": "Prepend", "prepend": ""}},
]  # fmt: skip


@pytest.mark.parametrize("entries", PANICS)
@pytest.mark.parametrize("of_file", [False, True])
def test_a_tokenizer_that_panics_is_an_error_or_a_run(
    place: Path, entries: dict[str, Any], of_file: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    said = changed("whole", tokenizer=entries)
    if of_file:
        said = run("whole", "text.txt", "data.tokenizer=changed/tokenizer.json")
    assert said == "a run" or said.startswith("DataError: data.")


def test_the_library_of_tokenizers_still_panics(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads(Path("whole/tokenizer.json").read_text()) | PANICS[0]
    with pytest.raises(BaseException, match="charsmap") as raised:
        tokenizers.Tokenizer.from_str(json.dumps(content))
    assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize(
    "template", ["\ud800", "{{ '\ud800' }}", "{{ 1 / 0 }}", "{% for %}", "{{ messages[9].a.b }}"]
)
def test_a_template_that_cannot_be_rendered_or_encoded_is_an_error(place: Path, template: str) -> None:
    changed("whole", tokenizer_config={"chat_template": template})
    Path("changed/chat_template.jinja").unlink(missing_ok=True)
    assert run("changed", "chat.jsonl").startswith("DataError: ")


def test_tokens_beyond_the_tokenizers_own_number_are_an_error(place: Path) -> None:
    whole = json.loads(Path("whole/tokenizer.json").read_text())
    entries = {
        "added_tokens": [*whole["added_tokens"], whole["added_tokens"][0] | {"id": 10**6, "content": "the"}]
    }
    said = changed("whole", tokenizer=entries)
    assert said.startswith(("DataError", "a run"))
