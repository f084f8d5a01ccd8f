"""Portable checkpoints that cannot be written or do not fit, the memory that they take, and adapters."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.api import portable
from infinity.checkpoint.writer import RangeWriter
from infinity.core.errors import CheckpointError, DiskError, PeerError, StateError
from infinity.engine.runtime import runtime_of
from tests.checkpoint.test_export import fail_writes, left_in
from tests.checkpoint.test_export_ranks import memory_nbytes
from tests.checkpoint.test_portable import Small, assert_same, exact_weights, sharded, state_of, steps_of
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.limits import file_limit

# --- what cannot be written ----------------------------------------------------------------------


def test_a_file_that_does_not_fit_is_a_disk_error_and_the_model_trains_on(tmp_path: Path) -> None:
    model, optimizer = sharded("bf16", "memory", tmp_path)
    steps_of(model, optimizer, 1)
    infinity.save_checkpoint(model, optimizer, tmp_path / "before")
    with file_limit(20_000), pytest.raises(DiskError, match=r"__0_0.distcp .*File too large \(EFBIG\)") as e:
        infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    assert "Nothing of it stays, and the model is unharmed" in str(e.value)
    assert left_in(tmp_path) == {"before"}
    steps_of(model, optimizer, 1)
    infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    assert left_in(tmp_path) == {"before", "out"}
    infinity.close(model)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, ""), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 1])
def test_a_save_that_ends_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int
) -> None:
    model, optimizer = sharded("bf16", "memory", tmp_path)
    with monkeypatch.context() as patch:
        fail_writes(patch, error, after=after)
        with pytest.raises(DiskError if isinstance(error, OSError) else KeyboardInterrupt):
            infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    assert left_in(tmp_path) == set()
    infinity.close(model)


def test_a_disk_without_room_is_an_error_before_the_first_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = sharded("bf16", "memory", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    monkeypatch.setattr(RangeWriter, "write_bytes", lambda *args: pytest.fail("a value was written"))
    with pytest.raises(DiskError, match="making room") as raised:
        infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    assert (raised.value.errno, raised.value.nbytes > 50_000) == (errno.ENOSPC, True)
    assert left_in(tmp_path) == set()
    infinity.close(model)


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".out.1234.part").mkdir()
    (tmp_path / ".out.1234.part/__0_0.distcp").touch()
    model, optimizer = sharded("bf16", "memory", tmp_path)
    infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    assert left_in(tmp_path) == {"out"}
    infinity.close(model)


def one_rank_fails(folder: str) -> tuple[str, set[str]]:
    """Rank 1's disk is full; how the save ended here, and what it left; then it works."""
    model, optimizer = sharded("bf16", "nvme", Path(folder))
    rank = dist.get_rank()
    steps_of(model, optimizer, 1, rank=rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            fail_writes(patch, OSError(errno.ENOSPC, ""), after=0)
        with pytest.raises((DiskError, PeerError)) as raised:
            infinity.save_checkpoint(model, optimizer, Path(folder, "out"))
    dist.barrier()
    left = left_in(Path(folder))
    dist.barrier()
    steps_of(model, optimizer, 1, rank=rank)
    infinity.save_checkpoint(model, optimizer, Path(folder, "out"))
    wanted = state_of(model, optimizer)
    infinity.load_checkpoint(model, optimizer, Path(folder, "out"))
    if rank == 0:
        assert_same(state_of(model, optimizer), wanted)
    else:
        state_of(model, optimizer)
    infinity.close(model)
    return f"{type(raised.value).__name__}: {raised.value}", left


def test_a_full_disk_on_one_rank_is_an_error_on_every_rank_and_training_goes_on(tmp_path: Path) -> None:
    (on_first, left), (on_second, _) = run_ranks(one_rank_fails, 2, str(tmp_path))
    assert on_first.startswith("PeerError: writing ")
    assert "rank 1: WriteError" in on_first
    assert on_second.startswith("WriteError: ")
    assert left == set()
    assert left_in(tmp_path) == {"out"}


# --- what does not fit ---------------------------------------------------------------------------


def test_gradients_of_a_step_that_is_not_over_are_an_error(tmp_path: Path) -> None:
    model, optimizer = sharded("bf16", "memory", tmp_path)
    model(torch.arange(24).view(4, 6)).backward()
    for call in (infinity.save_checkpoint, infinity.load_checkpoint):
        with pytest.raises(StateError, match="gradients of a step that is not over"):
            call(model, optimizer, tmp_path / "out")
    infinity.close(model)


def test_an_interrupted_run_is_resumed_before_it_is_saved_or_loaded(tmp_path: Path) -> None:
    ends = []
    for again in (False, True):
        overrides = training.streaming(tmp_path / "nvme", "run.name=one")
        model = training.build(Small, "bf16", overrides)
        optimizer = infinity.AdamW(model, lr=0.01)
        if again:
            for call in (infinity.save_checkpoint, infinity.load_checkpoint):
                with pytest.raises(StateError, match="was interrupted after step 2: call"):
                    call(model, optimizer, tmp_path / "out")
        assert infinity.resume(model, optimizer) == (2 if again else 0)
        if not again:
            steps_of(model, optimizer, 2)
        infinity.save_checkpoint(model, optimizer, tmp_path / f"out{again}")
        ends.append(state_of(model, optimizer))
        infinity.close(model, keep=not again)
    assert_same(*ends)
    assert left_in(tmp_path) == {"outFalse", "outTrue"}


class Other(Small):
    """One parameter less, one more, one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused
        self.scale = nn.Parameter(torch.ones(2))
        self.blocks.append(nn.Linear(17, 17))


def test_every_key_that_does_not_fit_is_in_one_error_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = sharded("bf16", "memory", tmp_path)
    infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    infinity.close(model)
    other, its_optimizer = sharded("bf16", "memory", tmp_path, Other)
    before = exact_weights(other)
    with pytest.raises(CheckpointError) as raised:
        infinity.load_checkpoint(other, its_optimizer, tmp_path / "out")
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("out does not fit Other:")
    assert lines[1:-1] == [
        "  scale has shape (), the model (2,)",
        "  missing: blocks.4.weight",
        "  missing: blocks.4.bias",
        "  optimizer.state.scale.exp_avg has shape (), the model (2,)",
        "  optimizer.state.scale.exp_avg_sq has shape (), the model (2,)",
    ]
    assert_same(exact_weights(other), before)
    infinity.save_checkpoint(other, its_optimizer, tmp_path / "other")
    infinity.close(other)
    model, optimizer = sharded("bf16", "memory", tmp_path)
    with pytest.raises(CheckpointError, match=r"unknown to the model: blocks\.4\.bias"):
        infinity.load_checkpoint(model, optimizer, tmp_path / "other")
    infinity.close(model)


def test_weights_alone_are_saved_and_loaded_without_an_optimizer(tmp_path: Path) -> None:
    model = training.build(Small, "bf16", ["memory.host=64MiB"])
    infinity.save_checkpoint(model, None, tmp_path / "out")
    wanted = exact_weights(model)
    infinity.close(model)
    torch.manual_seed(0)
    other = training.build(
        lambda: Small().requires_grad_(True), "fp32", training.streaming(tmp_path / "nvme")
    )
    with infinity.gathered(other, modify=True):
        other.embedding.weight.data.zero_()
    assert infinity.load_checkpoint(other, None, tmp_path / "out") == 0
    assert_same(exact_weights(other), wanted)
    optimizer = infinity.AdamW(other)
    steps_of(other, optimizer, 1)
    infinity.close(other)


def test_adapters_and_their_frozen_base_are_saved_with_state_for_what_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    factory, batch = models.build("llama", seed=1)
    ends = []
    for load in (False, True):
        model = training.build(factory, "bf16", training.streaming(tmp_path / "nvme"))
        model.requires_grad_(False)
        model = infinity.add_lora(model, rank=2)
        optimizer = infinity.AdamW(model, lr=0.1)
        if load:
            assert infinity.load_checkpoint(model, optimizer, tmp_path / "out") == 2
        else:
            for step in range(2):
                model(**batch(step, 0, 1)).loss.backward()
                optimizer.step()
            infinity.save_checkpoint(model, optimizer, tmp_path / "out")
        ends.append(state_of(model, optimizer))
        infinity.close(model)
    assert_same(*ends)
    assert any(".lora_A." in key and key.endswith(" exp_avg") for key in ends[0])
    assert not any("base_layer" in key and key.endswith(" exp_avg") for key in ends[0])


# --- memory --------------------------------------------------------------------------------------


def peak_growth(folder: str) -> tuple[int, int, int]:
    """Bytes of a model's states, and by how much a save and a load raised resident memory at the most."""
    from transformers import LlamaConfig, LlamaForCausalLM

    overrides = [f"memory.nvme=[{folder}/nvme]", "memory.host=96MiB", "memory.resident=false"]
    sizes = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    with infinity.Init(training.recipe("bf16", overrides)):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4))
    optimizer = infinity.AdamW(model)
    nbytes = 12 * sum(p.numel() for p in model.parameters())
    infinity.save_checkpoint(model, optimizer, Path(folder, "first"))  # what it imports is not what it keeps
    infinity.load_checkpoint(model, optimizer, Path(folder, "first"))
    grown = []
    for call, name in ((infinity.save_checkpoint, "second"), (infinity.load_checkpoint, "second")):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory_nbytes("VmRSS")
        call(model, optimizer, Path(folder, name))
        grown.append(memory_nbytes("VmHWM") - before)
    assert runtime_of(model).storage.host_pool.peak_nbytes <= 96 << 20
    infinity.close(model)
    return nbytes, grown[0], grown[1]


@pytest.mark.slow
def test_a_save_and_a_load_take_memory_for_their_buffers_however_large_the_model(tmp_path: Path) -> None:
    [(nbytes, saving, loading)] = run_ranks(peak_growth, 1, str(tmp_path), group=False)
    assert nbytes > 900 << 20
    # Three fields of a record, four blocks being written, a chunk, and what Python and torch allocate.
    assert saving < 3 * 4 * portable.BOX_NUMEL + (64 << 20)
    assert loading < 96 << 20  # three fields of a chunk, and what is read ahead
    assert (tmp_path / "second/__0_0.distcp").stat().st_size == pytest.approx(nbytes, rel=0.01)
