"""Two ranks write one directory together, or none; one start of them serves every test here."""

import errno
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.core.errors import CheckpointError, DiskError, PeerError
from tests.checkpoint.test_export import fail_writes, left_in
from tests.checkpoint.test_export_models import (
    SMALL_FILES,
    assert_as_saved,
    assert_equal,
    plain_twin,
    sharded,
    streamed,
    tensors_of,
    train_a_step,
    turned,
)
from tests.checkpoint.test_load_parity import load
from tests.helpers import models, quantized, training, zoo
from tests.helpers.launch import run_ranks, several


def export_one(folder: str, name: str) -> dict[str, Tensor]:
    """Each rank trains on its part; both export; the values, on rank 0."""
    factory, batch = zoo.build(name, seed=5)
    out, rank = Path(folder), torch.distributed.get_rank()
    with sharded(factory, training.streaming(out / "nvme")) as model:
        train_a_step(model, lambda step: batch(step, rank, 2))
        infinity.export(model, out / f"out-{name}" if rank == 0 else "unused", max_shard_nbytes=SMALL_FILES)
        assert_equal(streamed(model), tensors_of(out / f"out-{name}"))
        if name == "mixtral":
            turned(model)
            infinity.export(model, out / "turned", max_shard_nbytes=SMALL_FILES)
        return infinity.state_dict(model)


def export_stored(folder: str, out: str) -> Any:
    """What the export of a gpt-oss, of which some weights were changed, says of its error."""
    directory = Path(folder, "gpt_oss")
    model = load(directory, training.streaming(f"{folder}/nvme"))
    for name, param in model.named_parameters():
        if "layers.1." in name or "embed" in name:
            with infinity.gathered([param], modify=True):
                param.mul_(1.01)
    try:
        return infinity.export(model, directory.with_name(out), stored_as=directory)
    finally:
        infinity.close(model)


def other_files(folder: str) -> str:
    """Rank 1 has another revision of the checkpoint under the same name; how the export ended here."""
    directory = Path(folder, "gpt_oss")
    model = load(directory, training.streaming(f"{folder}/nvme"))
    source = directory
    if torch.distributed.get_rank() == 1:
        source = Path(folder, "revision")
        shutil.copytree(directory, source)
        with (source / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
    try:
        with pytest.raises((CheckpointError, PeerError)) as raised:
            infinity.export(model, directory.with_name("never"), stored_as=source)
    finally:
        infinity.close(model)
        if source != directory:
            shutil.rmtree(source)
    return str(raised.value)


def one_rank_fails(folder: str) -> tuple[str, set[str]]:
    """Rank 1's disk is full in the middle; how the export ended here, and what it left."""
    factory, batch = models.build("llama", seed=1)
    rank = torch.distributed.get_rank()
    Path(folder).mkdir(exist_ok=True)
    model = training.build(factory, "bf16", training.streaming(f"{folder}/nvme"))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            fail_writes(patch, OSError(errno.ENOSPC, ""), after=2)
        with pytest.raises((DiskError, PeerError)) as raised:
            infinity.export(model, Path(folder, "out"), max_shard_nbytes=20_000)
    torch.distributed.barrier()
    left = left_in(Path(folder))
    torch.distributed.barrier()
    optimizer = infinity.AdamW(model)
    model(**batch(0, rank, 2)).loss.backward()
    optimizer.step()
    infinity.export(model, Path(folder, "out"))
    infinity.close(model)
    return f"{type(raised.value).__name__}: {raised.value}", left


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the ranks worked, and what each returned from all of it."""
    folder = tmp_path_factory.mktemp("ranks")
    fails = (one_rank_fails, str(folder / "fails"))
    calls = [(export_one, str(folder), name) for name in ("gpt2", "mixtral")]
    quantized.write("gpt_oss", folder / "stored/gpt_oss")
    stored = (export_stored, str(folder / "stored"), "two")
    others = (other_files, str(folder / "stored"))
    return folder, run_ranks(several, 2, *calls, stored, others, fails)


@pytest.mark.parametrize(("at", "name"), [(0, "gpt2"), (1, "mixtral")])
def test_two_ranks_write_what_plain_save_pretrained_saves(
    at: int, name: str, ended: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, [first, _] = ended
    plain = plain_twin(zoo.build(name, seed=5)[0], first[at])
    assert_as_saved(folder / f"out-{name}", plain, tmp_path / "plain")
    if name == "mixtral":
        turned(plain)
        assert_as_saved(folder / "turned", plain, tmp_path / "turned")


def test_rank_0_says_where_and_nothing_else_stays(ended: tuple[Path, list[Any]]) -> None:
    folder, _ = ended
    assert left_in(folder) == {"out-gpt2", "out-mixtral", "turned", "stored", "fails"}


def test_two_ranks_quantize_again_as_one_does(ended: tuple[Path, list[Any]]) -> None:
    folder, [first, second] = ended[0] / "stored", ended[1]
    alone = export_stored(str(folder), "one")
    assert alone.largest_error > 0
    assert first[2] == second[2] == alone
    one, two = ((folder / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two
    assert left_in(folder) == {"gpt_oss", "one", "two"}


def test_ranks_that_have_other_files_of_the_stored_form_say_so(ended: tuple[Path, list[Any]]) -> None:
    assert all("holds other files on rank 1 than on rank 0" in each[3] for each in ended[1])


def test_a_full_disk_on_one_rank_is_an_error_on_every_rank_and_training_goes_on(
    ended: tuple[Path, list[Any]],
) -> None:
    folder, [first, second] = ended
    (on_first, left), (on_second, _) = first[-1], second[-1]
    assert on_first.startswith("PeerError: writing ")
    assert "rank 1: WriteError" in on_first
    assert "No space left on device (ENOSPC)" in on_first
    assert on_second.startswith("WriteError: ")
    assert left == set()
    assert left_in(folder / "fails") == {"out"}


def peak_growth(folder: str, kind: str) -> tuple[int, int]:
    """Bytes of a model's values, and by how much its export raised resident memory at the most."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    overrides = [f"memory.nvme=[{folder}/nvme]", "memory.host=96MiB", "memory.resident=false"]
    with infinity.Init(training.recipe("bf16", overrides)):
        if kind == "dense":
            model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12))
        else:
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=8))
    infinity.export(model, Path(folder, "first"))  # what it imports is not what it keeps in memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_nbytes("VmRSS")
    infinity.export(model, Path(folder, "second"))
    grown = memory_nbytes("VmHWM") - before
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    infinity.close(model)
    return nbytes, grown


def memory_nbytes(name: str) -> int:
    """A figure of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def peak_growth_stored(folder: str) -> tuple[int, int]:
    """The same of an export in the stored form, when every weight was changed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    source = Path(folder, "source")
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=5)).save_pretrained(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "BLOCK", 128)
        quantized.fp8(source)
    overrides = [f"memory.nvme=[{folder}/nvme]", "memory.host=96MiB", "memory.resident=false"]
    model = infinity.from_pretrained(source, training.recipe("bf16", overrides))
    for param in model.parameters():
        with infinity.gathered([param], modify=True):
            param.mul_(1.01)
    infinity.export(model, Path(folder, "first"), stored_as=source)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_nbytes("VmRSS")
    infinity.export(model, Path(folder, "second"), stored_as=source)
    grown = memory_nbytes("VmHWM") - before
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    infinity.close(model)
    return nbytes, grown


@pytest.mark.slow
def test_an_export_in_the_stored_form_takes_memory_for_pieces_of_tensors(tmp_path: Path) -> None:
    [(nbytes, grown)] = run_ranks(peak_growth_stored, 1, str(tmp_path), group=False)
    assert nbytes > 120 << 20
    assert grown < 48 << 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_an_export_takes_memory_for_its_buffers_however_large_the_model(kind: str, tmp_path: Path) -> None:
    [(nbytes, grown)] = run_ranks(peak_growth, 1, str(tmp_path), kind, group=False)
    assert nbytes > 250 << 20
    # Four blocks being written, four chunks being read, and what Python and torch allocate on the way.
    assert grown < 48 << 20
