"""A directory appears whole or not at all: what is there already, full disks, kills, tokenizers."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.api.export import check_room_for
from infinity.app.export import publish_run
from infinity.checkpoint import writer
from infinity.checkpoint.writer import Publication
from infinity.core.errors import CheckpointError, DiskError
from tests.helpers import models, training
from tests.helpers.launch import mark, start_ranks
from tests.helpers.limits import file_limit


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    """A tiny Llama on NVMe."""
    factory, _ = models.build("llama", seed=1)
    built = training.build(factory, "bf16", training.streaming(tmp_path / "nvme"))
    yield built
    infinity.close(built)


def left_in(folder: Path) -> set[str]:
    """What is in ``folder``, hidden things too, but for the tiers' own."""
    return {path.name for path in folder.iterdir()} - {"nvme"}


def test_nothing_but_the_directory_stays_and_its_parents_are_made(model: nn.Module, tmp_path: Path) -> None:
    infinity.export(model, tmp_path / "a/b/out")
    assert left_in(tmp_path / "a/b") == {"out"}
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert left_in(tmp_path / "a/b/out") == names


def test_a_tilde_is_the_home(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    infinity.export(model, "~/out")
    assert left_in(tmp_path) == {"out"}


def test_a_place_that_is_taken_is_refused_before_any_work(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a value was written")

    monkeypatch.setattr(writer.RangeWriter, "write", never)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "to empty").symlink_to("empty")
    taken = {"full": "is not empty", "file": "is a file"} | dict.fromkeys(
        ["link", "to empty"], "is a symbolic"
    )
    for name, what in taken.items():
        with pytest.raises(CheckpointError, match=f"{name} exists and {what}.*; .*name another"):
            infinity.export(model, tmp_path / name)
    assert left_in(tmp_path) == {"full", "file", "link", "empty", "to empty"}
    assert (tmp_path / "full/file").read_text() == (tmp_path / "file").read_text() == "mine"


def test_an_empty_directory_is_a_free_place(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    infinity.export(model, tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


def test_a_place_that_is_taken_meanwhile_stays_as_it_is(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Publication.publish

    def after_somebody_else(publication: Publication) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").write_text("mine")
        publish(publication)

    monkeypatch.setattr(Publication, "publish", after_somebody_else)
    with pytest.raises(CheckpointError, match="out exists and is not empty"):
        infinity.export(model, tmp_path / "out")
    assert left_in(tmp_path) == {"out"}
    assert left_in(tmp_path / "out") == {"file"}


def test_a_parent_that_cannot_be_written_is_a_disk_error(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"making a directory beside .*out failed: File exists"):
        infinity.export(model, tmp_path / "file/out")
    with pytest.raises(DiskError, match=r"making a directory beside /proc/out failed"):
        infinity.export(model, "/proc/out")


def test_a_file_that_does_not_fit_is_a_disk_error_and_leaves_nothing(
    model: nn.Module, tmp_path: Path
) -> None:
    with file_limit(20_000), pytest.raises(DiskError, match=r"File too large \(EFBIG\); \d+ bytes free") as e:
        infinity.export(model, tmp_path / "out")
    assert e.value.errno == errno.EFBIG
    assert e.value.path.endswith("model.safetensors")
    assert left_in(tmp_path) == set()
    infinity.export(model, tmp_path / "out")  # the model is unharmed
    assert left_in(tmp_path) == {"out"}


def test_a_disk_without_room_is_an_error_before_the_first_file(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=50_000))
    with pytest.raises(DiskError, match="making room") as raised:
        infinity.export(model, tmp_path / "out")
    assert (raised.value.errno, raised.value.nbytes > 50_000) == (errno.ENOSPC, True)
    with pytest.raises(DiskError, match="finding room for the trained model"):
        check_room_for(model, tmp_path)
    assert left_in(tmp_path) == set()


def fail_writes(patch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    real, calls = os.pwrite, []

    def write(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > after:
            raise error
        return real(fd, data, offset)

    patch.setattr(os, "pwrite", write)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, ""), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_an_export_that_ends_in_the_middle_leaves_nothing(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with monkeypatch.context() as patch:
        if isinstance(error, OSError):
            fail_writes(patch, error, after=3)
        else:  # signals arrive on the main thread

            def interrupt(*args: Any) -> None:
                raise error

            patch.setattr(writer.RangeWriter, "check", interrupt)
        with pytest.raises(DiskError if isinstance(error, OSError) else type(error)):
            infinity.export(model, tmp_path / "out", max_shard_nbytes=20_000)
    assert left_in(tmp_path) == set()
    infinity.export(model, tmp_path / "out")
    want = infinity.state_dict(model)
    got = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(got[key], value) for key, value in want.items())


def test_a_disk_that_fails_to_read_is_a_disk_error_and_leaves_nothing(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.engine.runtime import runtime_of

    engine, reads = runtime_of(model).tiers.store.engine, []
    assert engine is not None
    real = engine.read

    class Failing:
        def wait(self) -> None:
            raise DiskError(errno.EIO, "read", "/some/file", offset=4096, nbytes=8192)

    def read(extent: Any, memory: memoryview, **options: Any) -> Any:
        reads.append(extent)
        return Failing() if len(reads) == 3 else real(extent, memory, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "read", read)
        with pytest.raises(DiskError, match="read of 8192 bytes at offset 4096"):
            infinity.export(model, tmp_path / "out")
    assert left_in(tmp_path) == set()
    infinity.export(model, tmp_path / "out")
    pool = runtime_of(model).storage.host_pool
    assert pool.leased_nbytes == 0


def export_until_killed(folder: str, stop_at: str) -> None:
    factory, _ = models.build("llama", seed=1)
    model = training.build(factory, "bf16", [f"memory.nvme=[{folder}/nvme]", "memory.host=32MiB"])

    def wait(*args: Any) -> None:
        mark("here")
        signal.pause()

    if stop_at == "values":
        writer.RangeWriter.flush = wait  # type: ignore[method-assign]
    else:
        os.rename = Path.rename = wait  # type: ignore[assignment, method-assign]
    infinity.export(model, Path(folder, "out"))


@pytest.mark.parametrize("stop_at", ["values", pytest.param("rename", marks=pytest.mark.slow)])
def test_a_killed_export_leaves_nothing_under_its_name_and_the_next_one_removes_the_rest(
    stop_at: str, model: nn.Module, tmp_path: Path
) -> None:
    with start_ranks(export_until_killed, 1, str(tmp_path), stop_at, group=False) as ranks:
        ranks.reached("here", 0)
        [half] = left_in(tmp_path)
        assert half.startswith(".out.")
        infinity.export(model, tmp_path / "another")
        infinity.export(model, tmp_path / "out")  # beside one that runs
        assert left_in(tmp_path) == {"out", "another", half}
        ranks.kill(0)
        ranks.wait()
    assert left_in(tmp_path) == {"out", "another", half}
    (tmp_path / "out").rename(tmp_path / "kept")
    infinity.export(model, tmp_path / "out")
    assert left_in(tmp_path) == {"out", "another", "kept"}


# --- tokenizers, and models that are not of transformers ---------------------------------------


def make_tokenizer(folder: Path) -> dict[str, str]:
    """A directory as of a downloaded model, with files that are no tokenizer's beside it."""
    folder.mkdir()
    files = {
        "tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "special_tokens_map.json": "{}",
        "vocab.json": "{}", "merges.txt": "a b", "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tools.jinja": "{{ y }}", "spiece.model": "binary",
    }  # fmt: skip
    others = {"config.json": '{"not": "this"}', "modeling.py": "raise SystemExit", "model.safetensors": "no",
              "tokenization_custom.py": "raise SystemExit", "README.md": "no"}  # fmt: skip
    for name, text in (files | others).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return files


def test_a_tokenizers_files_are_copied_and_nothing_else(model: nn.Module, tmp_path: Path) -> None:
    files = make_tokenizer(tmp_path / "source")
    infinity.export(model, tmp_path / "out", tokenizer=tmp_path / "source")
    out = tmp_path / "out"
    got = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    assert {name: got.pop(name).read_text() for name in files} == files
    assert set(got) == {"config.json", "generation_config.json", "model.safetensors"}
    assert "not" not in json.loads((out / "config.json").read_text())


def test_a_tokenizer_may_be_a_file_or_an_object(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    infinity.export(model, tmp_path / "a", tokenizer=str(tmp_path / "mine.json"))
    assert (tmp_path / "a/tokenizer.json").read_text() == "{}"

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            Path(folder, "tokenizer.json").write_text("object")

    infinity.export(model, tmp_path / "b", tokenizer=Tokenizer())
    assert (tmp_path / "b/tokenizer.json").read_text() == "object"


def test_a_directory_without_a_tokenizer_is_an_error_before_any_value_is_read(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.RangeWriter, "write", lambda *args: pytest.fail("a value was written"))
    with pytest.raises(CheckpointError, match="nvme holds no tokenizer; wanted a directory"):
        infinity.export(model, tmp_path / "out", tokenizer=tmp_path / "nvme")
    assert left_in(tmp_path) == set()


def test_the_built_in_model_is_exported_with_its_sizes(tmp_path: Path) -> None:
    factory, _ = models.build("gpt", seed=1)
    model = training.build(factory, "bf16", training.streaming(tmp_path / "nvme"))
    infinity.export(model, tmp_path / "out")
    want = infinity.state_dict(model)
    infinity.close(model)
    got = load_file(tmp_path / "out/model.safetensors")
    assert set(got) == set(want)
    assert all(torch.equal(got[key], value) for key, value in want.items())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["GPT"]
    assert (config["n_layers"], config["vocab_size"]) == (3, models.VOCABULARY)


def test_a_plain_modules_tied_weight_is_written_once_under_its_first_name(tmp_path: Path) -> None:
    from tests.surface.test_saving import Tied

    with infinity.Init(training.recipe("bf16", ["memory.host=64MiB"])):
        model = Tied()
    infinity.export(model, tmp_path / "out")
    want = infinity.state_dict(model)
    infinity.close(model)
    got = load_file(tmp_path / "out/model.safetensors")
    assert set(got) == set(want) - {"forth.weight"}
    assert left_in(tmp_path / "out") == {"model.safetensors"}


def test_a_model_with_adapters_is_an_error_that_says_how_to_save_them(
    model: nn.Module, tmp_path: Path
) -> None:
    with torch.no_grad():
        adapted = infinity.add_lora(model, rank=2)
    with pytest.raises(CheckpointError, match=r"has adapters.*infinity\.save_lora"):
        infinity.export(adapted, tmp_path / "out")
    assert left_in(tmp_path) == set()


def test_a_model_that_was_not_built_under_init_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(infinity.StateError, match="not built under"):
        infinity.export(nn.Linear(2, 2), tmp_path / "out")


# --- infinity export RUN OUT -------------------------------------------------------------------


def test_a_runs_model_is_published_by_links_and_its_small_files_are_copies(
    model: nn.Module, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path / "source")
    infinity.export(model, tmp_path / "run/model", tokenizer=tmp_path / "source", max_shard_nbytes=30_000)
    publish_run(tmp_path / "run", tmp_path / "out")
    source = tmp_path / "run/model"
    for path in (path for path in source.rglob("*") if path.is_file()):
        twin = tmp_path / "out" / path.relative_to(source)
        assert twin.read_bytes() == path.read_bytes()
        assert twin.samefile(path) == (path.suffix == ".safetensors")
    assert left_in(tmp_path) == {"run", "out", "source"}


def test_a_run_that_kept_adapters_publishes_them(tmp_path: Path) -> None:
    adapters = tmp_path / "run/adapters"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        publish_run(tmp_path / "run", tmp_path / "out")
    (adapters / "adapter_model.safetensors").write_text("values")
    publish_run(tmp_path / "run", tmp_path / "out")
    assert left_in(tmp_path / "out") == {"adapter_config.json", "adapter_model.safetensors"}


def test_where_links_are_impossible_weights_are_copied(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    infinity.export(model, tmp_path / "run/model")
    publish_run(tmp_path / "run", tmp_path / "out")
    first, second = (tmp_path / name / "model.safetensors" for name in ("run/model", "out"))
    assert first.read_bytes() == second.read_bytes()
    assert not first.samefile(second)
    (tmp_path / "out").rename(tmp_path / "kept")
    with file_limit(20_000), pytest.raises(DiskError, match="File too large"):
        publish_run(tmp_path / "run", tmp_path / "out")
    assert left_in(tmp_path) == {"run", "kept"}


def test_a_run_without_a_whole_model_is_an_error_that_says_what_is_missing(
    model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="none: no such folder; wanted the folder of a run"):
        publish_run(tmp_path / "none", tmp_path / "out")
    (tmp_path / "run").mkdir()
    with pytest.raises(
        CheckpointError, match=r"run: no folder model; wanted .*last step with run.save: true"
    ):
        publish_run(tmp_path / "run", tmp_path / "out")
    (tmp_path / "runs/b").mkdir(parents=True)
    for number, name in enumerate(["b/adapters", "c/model", "a/model"]):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (number, number))
    with pytest.raises(CheckpointError, match=r"a folder of runs; the newest with a model is \S+/runs/a$"):
        publish_run(tmp_path / "runs", tmp_path / "out")
    shutil.rmtree(tmp_path / "runs")
    infinity.export(model, tmp_path / "run/model", max_shard_nbytes=30_000)
    [lost, *_] = sorted((tmp_path / "run/model").glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        publish_run(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run/model/model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        publish_run(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run/model/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        publish_run(tmp_path / "run", tmp_path / "out")
    assert left_in(tmp_path) == {"run"}
