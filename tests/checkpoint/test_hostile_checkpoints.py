"""Whatever a directory of a checkpoint holds, there is a run, or one error of ours.

A long run is ``pytest -m slow tests/checkpoint/test_hostile_checkpoints.py``.
"""

import contextlib
import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from infinity.app.recipe import load_recipe
from infinity.app.train import train
from infinity.core.errors import CheckpointError, InfinityError
from tests.helpers.tokenizers import MARKED, write_tokenizer

FEW, MANY = 40, int(os.environ.get("MANY", "2000"))
QUICK = settings(max_examples=FEW, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=MANY, suppress_health_check=list(HealthCheck))

#: JSON of any type; none is a number of layers that would take for ever to build.
VALUES = [
    None, True, False, 0, -1, 1, 2, 3, 7, 0.5, 5.0, -0.5, 1e400, float("nan"), 2**31, 2**63, 10**30, "", "a", "3",
    "\ud800", "\0", "../../etc", "x" * 5000, "auto", "bfloat16", "int8", "gelu", "{{ 1 / 0 }}", "{% endfor %}",
    [], [3], [[]], ["\ud800"], ["LlamaForCausalLM", 3], ["BertModel"], {}, {"a": 3}, {"\ud800": None},
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
KINDS = ("whole", "sharded", "pickled")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a checkpoint of each kind, a text and chats."""
    folder, before, threads = tmp_path_factory.mktemp("place"), Path.cwd(), torch.get_num_threads()
    transformers.utils.logging.disable_progress_bar()
    os.chdir(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=272, num_key_value_heads=1, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    for kind in KINDS:
        model.save_pretrained(folder / kind, max_shard_size="20KB" if kind == "sharded" else "1GB")
        write_tokenizer(folder / kind, chat_template=MARKED)
        if kind == "pickled":
            torch.save(dict(model.state_dict()), folder / kind / "pytorch_model.bin")
            (folder / kind / "model.safetensors").unlink()
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
            "data.eval_fraction=0", "train.threads=1", "train.steps=1", "train.batch_size=2", "train.dtype=fp32",
            "train.eval_every=null", "observe.progress=false", "run.save=false", "run.dir=runs", *more,
        ]
    )  # fmt: skip
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            train(recipe)
    except InfinityError as error:
        assert str(error)
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
