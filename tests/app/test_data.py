"""``infinity data``: examples with their mask, figures of every source, and what is left out."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.app.data import show_data
from infinity.cli import main
from tests.helpers.models import build
from tests.helpers.tokenizers import write_tokenizer

CHAT = [{"role": "user", "content": "a \x1b[31mred one?"}, {"role": "assistant", "content": "the end"}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", *({"messages": CHAT} for _ in range(12)), {"question": 1})
    write(tmp_path / "b.jsonl", *({"prompt": "p" * i, "completion": "c" * 9} for i in range(40)))
    (tmp_path / "recipe.yaml").write_text(
        "data: {files: [a.jsonl, b.jsonl], cache: cache, skip_malformed: true, eval_fraction: 0.1}\n"
        "model: {seq_len: 40}\ntrain: {batch_size: 2}"
    )
    return tmp_path


def shown(*overrides: str) -> str:
    out = io.StringIO()
    show_data("recipe.yaml", overrides, Console(file=out, width=150))
    return out.getvalue()


def test_examples_of_each_source_have_what_counts_in_the_loss_in_brackets(folder: Path) -> None:
    said = shown()
    assert "example 1 of a.jsonl, 41 tokens\nuser: a \\x1b[31mred one?\nassistant: \u27e6the end\\x00" in said
    assert "example 2 of b.jsonl, 10 tokens\n\u27e6ccccccccc\\x00\u27e7\n" in said
    assert "example 3 of a.jsonl" in said
    assert "\x1b" not in said  # nothing of what the data would do to a terminal


def test_every_source_has_its_figures(folder: Path) -> None:
    rows = {words[0]: words[1:] for words in map(str.split, shown().splitlines()) if words}
    # documents, tokens, in the loss, median, p95, longest, truncated, without target, malformed
    assert rows["a.jsonl"] == ["12", "492", "20%", "41", "41", "41", "0", "0", "1"]
    # 41 tokens are 40 inputs and their targets; of the longest prompt, with 39, one target is left
    assert rows["b.jsonl"] == ["40", "1,180", "34%", "29", "47", "49", "8", "0", "0"]
    assert rows["all"][:2] == ["52", "1,672"]


def test_notes_say_how_the_rest_is_used(folder: Path) -> None:
    said = shown("data.weights=[1,3]")
    assert "data.files: skipped 1 malformed rows; the first: " in said
    assert "75.0% of each batch; as many steps as an epoch has without weights take each of them" in said
    assert "an epoch is " in said


def test_documents_without_a_target_are_counted(folder: Path) -> None:
    write(folder / "b.jsonl", *({"prompt": "p" * 20 * i, "completion": "c"} for i in range(5)))
    said = shown("data.eval_fraction=0")
    rows = {words[0]: words[1:] for words in map(str.split, said.splitlines()) if words}
    assert rows["b.jsonl"][6:] == ["3", "2", "0"]
    assert "2 skipped, since none of their tokens counts in the loss" in said


def test_of_data_that_is_streamed_a_part_of_each_source_is_shown(folder: Path) -> None:
    said = shown("data.streaming=true", "data.eval_fraction=0", "data.shuffle_buffer=2KiB")
    assert "example 2 of b.jsonl" in said
    assert "of files, tokenized while training goes on, in windows of 2 KiB (data.shuffle_buffer)" in said
    assert "an epoch is about " in said


def test_a_model_directory_gives_its_tokenizer_and_no_weight_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = build("llama", seed=0)[0]()
    model.resize_token_embeddings(264)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    (folder / "model/model.safetensors").write_bytes(b"")
    command = ["data", "recipe.yaml", "model.path=model", "data.files=[a.jsonl]"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "the end" in said
    assert said.count("\u27e6") == said.count("\u27e7") == 4  # three examples, and what they mean


def test_several_adapters_show_their_own_data(folder: Path) -> None:
    model: Any = build("llama", seed=0)[0]()
    model.resize_token_embeddings(264)
    model.save_pretrained(folder / "model")
    own = "{x: {data: {files: [a.jsonl]}}, y: {data: {files: [b.jsonl]}}}"
    said = shown("model.path=model", "data.tokenizer=bytes", "lora.rank=2", f"adapters={own}")
    assert (
        said.index("adapter x")
        < said.index("of a.jsonl")
        < said.index("adapter y")
        < said.index("of b.jsonl")
    )


def test_a_pair_is_shown_with_both_of_its_answers(folder: Path) -> None:
    write(folder / "p.jsonl", *({"prompt": f"{i}?", "chosen": "y", "rejected": "n"} for i in range(40)))
    said = shown("data.files=[p.jsonl]", "train.task=dpo")
    assert "example 1 of p.jsonl, 4 tokens\n0?\u27e6y\\x00\u27e7\n" in said
    assert "example 1 of p.jsonl, 4 tokens\n0?\u27e6n\\x00\u27e7\n" in said
    assert said.count("of p.jsonl, ") == 6


def test_what_training_would_refuse_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "recipe.yaml", "data.skip_malformed=false"]) == 1
    assert "a.jsonl:13: wanted 'messages'" in capsys.readouterr().err


def test_no_document_is_shown_twice(folder: Path) -> None:
    write(folder / "two.jsonl", *({"prompt": f"{i}?", "completion": "y"} for i in range(2)))
    said = shown("data.files=[two.jsonl]", "data.eval_fraction=0", "train.batch_size=1")
    assert said.count("of two.jsonl, ") == said.count("0?") + said.count("1?") == 2
    assert "1?" in said
