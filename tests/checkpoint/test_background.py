"""Portable checkpoints that are written while training goes on."""

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.api import portable
from infinity.core.errors import DiskError, PeerError, StateError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import Extent
from infinity.core.process import close_collected
from infinity.device.memory import HostPool, Lease
from infinity.engine.runtime import runtime_of
from infinity.optim.elementwise import ADAMW
from infinity.shards.homes import DiskHome, HostHome, Snapshot
from infinity.shards.journal import ChunkExtents, Version
from infinity.shards.records import Records
from tests.checkpoint.test_export import left_in
from tests.checkpoint.test_portable import assert_same, state_of, steps_of
from tests.helpers import training
from tests.helpers.launch import run_ranks
from tests.helpers.limits import HANG_S, collected, comes_true
from tests.helpers.saves import go_on_when_closed, held

HOST = ["memory.host=64MiB"]
BOTH = ["memory.host=260KiB", "run.name=mine"]
NVME = ["memory.host=200KiB", "memory.resident=false"]


class Net(nn.Module):
    """Several units, dropout, a frozen block, an unused parameter, and a buffer that steps write."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(32)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("mean", torch.zeros(32))
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        self.mean.lerp_(torch.arange(32.0), 0.1)  # the same on every rank
        logits = self.norm(x) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def made(overrides: list[str], dtype: str, **more: Any) -> tuple[nn.Module, infinity.AdamW]:
    torch.manual_seed(3)
    model = training.build(Net, dtype, overrides)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    return model, infinity.AdamW(model, lr=0.01, params=groups, **more)


@contextlib.contextmanager
def gated(patch: pytest.MonkeyPatch, *, waits: bool = False) -> Iterator[threading.Event]:
    """Nothing is written before the event is set or training waits for it, which it must if ``waits``."""
    wait, waited = Snapshot.wait_for, []
    with held(patch) as opened:

        def opening(self: Snapshot, index: int) -> None:
            if index in self.kept:
                waited.append(index)
                opened.set()
            wait(self, index)

        patch.setattr(Snapshot, "wait_for", opening)
        yield opened
    assert bool(waited) == waits


def play(
    tmp_path: Path, overrides: list[str], dtype: str, opened: threading.Event | None, **more: Any
) -> dict[str, Any]:
    """Two steps, a save (in the background if there is an event), and three steps; the state at the end."""
    model, optimizer = made(overrides, dtype, **more)
    runtime = runtime_of(model)
    if "memory.host=260KiB" in overrides:
        assert {unit.home.tier for unit in runtime.units} == set(Tier)
    steps_of(model, optimizer, 2)
    out = tmp_path / ("one" if opened is None else "two")
    save = infinity.save_checkpoint(model, optimizer, out, background=opened is not None)
    assert save.ended == (opened is None)
    optimizer.param_groups[0]["lr"] = 0.02  # of later steps
    steps_of(model, optimizer, 3)
    if opened is not None:
        assert not out.exists()
        opened.set()
        save.wait()
        assert not runtime.tiers.snapshot.kept
    state = state_of(model, optimizer)
    infinity.close(model)
    return state


def compare(tmp_path: Path, overrides: list[str], dtype: str, *, waits: bool = False, **more: Any) -> None:
    """A save in the background is that of the same step without, and training does not see it."""
    overrides = [f"memory.nvme=[{tmp_path / 'nvme'}]", *overrides]
    wanted = play(tmp_path, overrides, dtype, None, **more)
    with pytest.MonkeyPatch.context() as patch, gated(patch, waits=waits) as opened:
        assert_same(play(tmp_path, overrides, dtype, opened, **more), wanted)
    one, two = ((tmp_path / name / "__0_0.distcp").read_bytes() for name in ("one", "two"))
    assert one == two
    assert left_in(tmp_path) == {"one", "two"}


PLACES = {
    "nvme": NVME, "nvme-commits": [*NVME, "run.name=mine"], "host": HOST, "both": BOTH,
    "both-every-step": [*BOTH, "durability.every=1"], "both-every-third": [*BOTH, "durability.every=3"],
    "nvme-verified": [*NVME, "run.name=mine", "memory.verify=true"],
}  # fmt: skip
#: Every kind of place, and both dtypes; the rest are long tests.
FEW = (("nvme-commits", "fp32"), ("both-every-third", "bf16"))
CASES = [(place, dtype) for place in PLACES for dtype in ("bf16", "fp32")]


@pytest.mark.parametrize(
    ("place", "dtype"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in FEW)],
)
def test_a_save_has_the_states_of_its_step_whatever_training_does_meanwhile(
    tmp_path: Path, place: str, dtype: str
) -> None:
    compare(tmp_path, PLACES[place], dtype)


def test_updates_that_are_clipped_and_redone_leave_it_as_it_is(tmp_path: Path) -> None:
    compare(tmp_path, [*NVME, "run.name=mine"], "bf16", max_grad_norm=1e-3)


def test_with_one_version_an_update_waits_until_its_unit_is_read(tmp_path: Path) -> None:
    compare(tmp_path, [*NVME, "memory.versions=1"], "bf16", waits=True)


def test_without_room_for_a_copy_an_update_in_memory_waits_until_its_unit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = HostPool.try_lease

    def refusing(pool: HostPool, nbytes: int, *, who: str, **more: Any) -> Lease | None:
        return None if who == "a checkpoint" else lease(pool, nbytes, who=who, **more)

    monkeypatch.setattr(HostPool, "try_lease", refusing)
    compare(tmp_path, HOST, "bf16", waits=True)


@pytest.mark.parametrize(("pages", "copied"), [(8, True), (7, False)])
def test_copies_of_units_in_memory_leave_room_for_the_chunk_that_reads_the_others(
    pages: int, copied: bool
) -> None:
    layout = ADAMW.layout(torch.bfloat16)
    values = (torch.zeros(8, dtype=torch.bfloat16), *(torch.zeros(8, dtype=f.dtype) for f in layout.fields))
    assert len(values) == 4  # a page each, and as many for a chunk
    pool, rooms = HostPool(pages * 4096), []
    pool.patience_s = 0

    def reading(chunk: ChunkExtents, room: Lease | None) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
        rooms.append(room)
        return contextlib.nullcontext(values)

    class InMemory(HostHome):
        def __init__(self) -> None:
            self.places, self.recorded = [(0, 8)], False

        def values(self) -> tuple[torch.Tensor, ...]:
            return values

    class OnDisk(DiskHome):
        def __init__(self) -> None:
            self.versions, self.version = [Version((ChunkExtents(0, 8, Extent(())),))], 0

    storage: Any = SimpleNamespace(layout=layout, host_pool=pool, store=SimpleNamespace(reading=reading))
    units: Any = [SimpleNamespace(index=i, home=home) for i, home in enumerate((InMemory(), OnDisk()))]
    snapshot = Snapshot(storage, units, {0: (), 1: ()})
    writer = threading.Thread(target=snapshot.preserve, args=(0,))
    writer.start()
    assert comes_true(lambda: pool.leased_nbytes == (8 if copied else 4) * 4096)
    if copied:
        writer.join(HANG_S)
    assert writer.is_alive() is not copied  # without a copy it waits until its unit is read
    assert len(list(snapshot.read(0))) == 1
    writer.join(HANG_S)
    assert not writer.is_alive()
    assert len(list(snapshot.read(1))) == 1
    assert rooms[0] is not None
    snapshot.close()
    assert not pool.leased_nbytes


def test_without_room_for_another_place_an_update_waits_until_its_unit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: DiskHome) -> None:
        raise DiskError(errno.ENOSPC, "making room", tmp_path, offset=0, nbytes=0)

    monkeypatch.setattr(DiskHome, "add_version", full)
    compare(tmp_path, [*NVME, "run.name=mine"], "bf16", waits=True)


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Let the checkpoint's files have no room; those of the run's states have."""
    real = os.pwrite

    def write(fd: int, data: Any, offset: int) -> int:
        if "distcp" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, "")
        return real(fd, data, offset)

    patch.setattr(os, "pwrite", write)


def test_a_full_disk_leaves_nothing_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME], "bf16")
    steps_of(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch)
        save = infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
        steps_of(model, optimizer, 2)
        with pytest.raises(DiskError, match="ENOSPC"):
            save.wait()
    assert save.ended
    assert left_in(tmp_path) == set()
    save = infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
    steps_of(model, optimizer, 1)
    save.wait()
    assert left_in(tmp_path) == {"out"}
    infinity.close(model)


def test_an_update_does_not_wait_for_a_save_whose_file_cannot_be_made(tmp_path: Path) -> None:
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME, "memory.versions=1"], "bf16")
    steps_of(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "reserve", lambda *args: os.posix_fallocate(-1, 0, 1))
        save = infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
        steps_of(model, optimizer, 2)
        with pytest.raises(DiskError, match="EBADF"):
            save.wait()
    assert left_in(tmp_path) == set()
    infinity.close(model)


@pytest.mark.slow
def test_a_place_that_was_read_while_another_one_was_sought_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, next_place, asked, sought = Snapshot.place, Records.next_place, [], []

    def begin(self: Records, unit: Any) -> int:
        asked.clear()
        return next_place(self, unit)

    def late(self: Snapshot, index: int) -> int | None:
        asked.append(index)
        if len(asked) == 3:  # no place was free, also when all records but the last had been given up
            sought.append(index)
            self.wait_for(index)
        return place(self, index)

    monkeypatch.setattr(Records, "next_place", begin)
    monkeypatch.setattr(Snapshot, "place", late)
    compare(tmp_path, NVME, "bf16", waits=True)
    assert sought


def test_values_are_written_in_place_when_the_save_is_over(tmp_path: Path) -> None:
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME], "bf16")
    steps_of(model, optimizer, 2)
    infinity.save_checkpoint(model, optimizer, tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch, gated(patch, waits=True):
        save = infinity.save_checkpoint(model, optimizer, tmp_path / "two", background=True)
        with infinity.gathered(model, modify=True):
            for param in model.parameters():
                param.data.zero_()
        save.wait()
    infinity.close(model)
    assert (tmp_path / "one/__0_0.distcp").read_bytes() == (tmp_path / "two/__0_0.distcp").read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        None,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (KeyboardInterrupt(), RuntimeError("x"))),
    ],
    ids=repr,
)
def test_closing_the_model_ends_a_save_and_leaves_nothing(
    tmp_path: Path, error: BaseException | None
) -> None:
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME], "bf16")
    steps_of(model, optimizer, 1)
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch, gated(patch) as opened:
        go_on_when_closed(patch, opened)
        save = infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
        with pytest.raises(StateError, match="a checkpoint is being saved in the background"):
            infinity.save_checkpoint(model, optimizer, tmp_path / "other", background=True)
        runtime_of(model).close(error)
    assert left_in(tmp_path) == set()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "infinity-save"]
    with pytest.raises(StateError, match="the model was closed"):
        save.advance()


def test_a_model_that_is_dropped_during_a_save_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME], "bf16")
    steps_of(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch, gated(patch) as opened:
        infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
        assert left_in(tmp_path)
        runtime = weakref.ref(runtime_of(model))
        del model, optimizer
        assert collected(runtime)
        opened.set()
        close_collected()
    assert left_in(tmp_path) == set()


@pytest.mark.slow
def test_what_is_taken_of_the_drive_is_taken_once(tmp_path: Path) -> None:
    """A third place of each unit, however many saves there are."""
    model, optimizer = made([f"memory.nvme=[{tmp_path / 'nvme'}]", *NVME, "run.name=mine"], "fp32")
    steps_of(model, optimizer, 2)
    volume, found = runtime_of(model).storage.volume, []
    assert volume is not None
    for number in range(3):
        found.append(volume.allocated_nbytes)
        with pytest.MonkeyPatch.context() as patch, gated(patch) as opened:
            save = infinity.save_checkpoint(model, optimizer, tmp_path / str(number), background=True)
            steps_of(model, optimizer, 3)
            opened.set()
            save.wait()
    found.append(volume.allocated_nbytes)
    infinity.close(model)
    assert found[0] < found[1] < 1.6 * found[0]
    assert found[1] == found[2] == found[3]


def saved_on_two_ranks(folder: str) -> None:
    """Steps during the save; then rank 1's disk is full."""
    overrides = [f"memory.nvme=[{folder}/nvme]", *NVME, "run.name=mine"]
    model, optimizer = made(overrides, "bf16")
    rank = dist.get_rank()
    steps_of(model, optimizer, 2, rank=rank)
    infinity.save_checkpoint(model, optimizer, Path(folder, "one"))
    with pytest.MonkeyPatch.context() as patch, gated(patch) as opened:
        save = infinity.save_checkpoint(model, optimizer, Path(folder, "two"), background=True)
        steps_of(model, optimizer, 3, rank=rank)
        opened.set()
        save.wait()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            fill_disk(patch)
        save = infinity.save_checkpoint(model, optimizer, Path(folder, "three"), background=True)
        steps_of(model, optimizer, 1, rank=rank)
        with pytest.raises(DiskError if rank == 1 else PeerError, match="ENOSPC"):
            save.wait()
    steps_of(model, optimizer, 1, rank=rank)
    infinity.close(model)


def test_several_ranks_save_beside_training_and_all_learn_of_a_full_disk(tmp_path: Path) -> None:
    run_ranks(saved_on_two_ranks, 2, str(tmp_path))
    assert left_in(tmp_path) == {"one", "two"}
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_run_that_was_killed_while_its_places_were_four_goes_on(tmp_path: Path) -> None:
    """Every third step is recorded: the recorded, the committed, the next and the saved version are apart."""
    overrides = [f"memory.nvme=[{tmp_path / 'nvme'}]", *BOTH, "durability.every=3"]
    ends = []
    for again in (False, True):
        model, optimizer = made(overrides, "fp32")
        start = infinity.resume(model, optimizer)
        assert start == (6 if again else 0)
        if not again:
            steps_of(model, optimizer, 4)
            with pytest.MonkeyPatch.context() as patch, gated(patch) as opened:
                save = infinity.save_checkpoint(model, optimizer, tmp_path / "out", background=True)
                steps_of(model, optimizer, 2)
                opened.set()
                save.wait()
        ends.append(state_of(model, optimizer))
        infinity.close(model, keep=not again)
    assert_same(*ends)
    assert left_in(tmp_path) == {"out"}
