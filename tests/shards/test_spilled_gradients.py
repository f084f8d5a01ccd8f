"""Gradients that wait for ``step()`` and do not fit memory wait on NVMe: the same bits, and exact bytes."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import BudgetError, DiskError
from infinity.core.nbytes import Extent, Transfer
from infinity.engine.runtime import runtime_of, runtimes
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.faulty import Fault, FaultyEngine
from tests.helpers.launch import run_ranks
from tests.helpers.limits import file_limit
from tests.helpers.lockstep import Lockstep
from tests.helpers.reference import Rule
from tests.helpers.training import UNTILED, build, optimizer_for, streaming
from tests.shards.test_resume import interrupt, overrides, run, same, start, state
from tests.shards.test_speculation import CLIPPED, FREE, POISONED, jitter, limit, on_nvme, play, trained
from tests.test_bytes import settled
from tests.test_faults import breakable

#: The moves of :func:`play`; without those that accumulate, for which memory must hold all gradients.
MOVES = "...ccc..c.zirlL"
VERSIONS = ("memory.versions=2", "memory.versions=1")


def needed(make: Callable[[], object], match: str = "memory.device is 1 KiB") -> int:
    """Bytes that ``make`` asks for, as its error tells them; what it had made is closed."""
    with pytest.raises(BudgetError, match=match) as raised:
        make()
    for runtime in runtimes():
        runtime.close()
    return int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])


@contextlib.contextmanager
def lockstep(
    directory: Any, *overrides: str, extra: int = 0, dtype: str = "bf16", **options: Any
) -> Iterator[Lockstep]:
    """A model in the least memory with which it can be clipped, and ``extra`` bytes."""
    rule = Rule(max_grad_norm=FREE)
    where = streaming(directory, UNTILED, *overrides)

    def make(device_nbytes: int) -> Lockstep:
        given = [*where, f"memory.device={device_nbytes}"]
        return Lockstep(given, dtype=dtype, rule=rule, roomy=True, **options)

    pair = make(needed(lambda: make(1024)) + extra)
    try:
        yield pair
    finally:
        pair.optimizer.close()


def train(pair: Lockstep, moves: str) -> None:
    """Train until all that was begun has landed."""
    play(pair, moves)
    pair.optimizer.synchronize()


def gradients_nbytes(pair: Lockstep) -> int:
    runtime = pair.optimizer.runtime
    return sum(runtime.tiers.gradient_nbytes(unit) for unit in runtime.units)


def spilled_nbytes(optimizer: Any) -> int:
    nbytes: int = optimizer.runtime.executor().updates.stored_gradients.nbytes
    return nbytes


# --- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "extra", "versions"),
    [
        pytest.param("bf16", 0, VERSIONS[0], marks=pytest.mark.slow),
        pytest.param("bf16", 3 * 8192, VERSIONS[0], marks=pytest.mark.slow),
        ("fp16", 2 * 8192, VERSIONS[0]),
        ("fp32", 0, VERSIONS[1]),
        pytest.param("bf16", 3 * 8192, VERSIONS[1], marks=pytest.mark.slow),
    ],
)
def test_clipped_and_free_steps_give_the_plain_loops_bits(tmp_path, dtype, extra, versions):
    with lockstep(tmp_path, versions, extra=extra, dtype=dtype) as pair:
        waiting = spilled_nbytes(pair.optimizer)
        assert waiting == gradients_nbytes(pair) if not extra else 0 < waiting < gradients_nbytes(pair)
        seen = play(pair, MOVES)
        if versions == VERSIONS[0] and dtype != "fp16":  # which overflows at first
            n = on_nvme(pair)
            assert seen[:6] == [(n, 0)] * 3 + [(n, n)] * 2 + [(0, 0)]
        pair.check()
        budget = pair.optimizer.budgets["device"]
        assert pair.optimizer.runtime.peak_nbytes()["device"] <= budget


@pytest.mark.parametrize(("dtype", "versions"), [("bf16", VERSIONS[0]), ("fp16", VERSIONS[1])])
def test_steps_with_gradients_that_are_not_finite_are_forgotten(tmp_path, dtype, versions):
    with lockstep(tmp_path, versions, dtype=dtype, **POISONED) as pair:
        play(pair, "..c.c......c..")
        assert pair.plain.steps <= 12
        pair.check()


def test_parts_that_are_frozen_now_and_then(tmp_path):
    with lockstep(tmp_path, extra=8192) as pair:  # a unit that is frozen in part is open for longer
        for part, train in [("blocks.1", False), ("blocks.1.up", True), ("last.bias", False), ("", True)]:
            for model in (pair.model, pair.plain.model):
                for name, param in model.named_parameters():
                    if name.startswith(part):
                        param.requires_grad_(train)
            play(pair, "..c.")
        pair.check()


@pytest.mark.parametrize("seed", few((1,), range(20)))
def test_random_delays_give_the_same_bits(tmp_path, seed):
    with jitter(seed), lockstep(tmp_path, VERSIONS[seed % 2], extra=8192 * (seed % 5), **POISONED) as pair:
        play(pair, MOVES)
        pair.check()


def test_a_drive_that_is_slower_than_backward_holds_it_up_and_no_more(tmp_path):
    """Every gradient waits for the one before to be written, with room for one."""
    with breakable() as engines, lockstep(tmp_path) as pair:
        engines[-1].delay_s = 0.01
        play(pair, "..c.")
        pair.check()


def test_every_block_that_is_read_is_compared_also_of_gradients(tmp_path):
    with lockstep(tmp_path, "memory.verify=true") as pair:
        play(pair, "..cc")
        pair.check()
        gradients = pair.optimizer.runtime.executor().updates.stored_gradients
        volume, write = pair.optimizer.runtime.storage.volume, gradients.write

        def damaged(unit: Any, memory: memoryview) -> Transfer:
            stored = write(unit, memory)
            stored.wait()
            [piece, *_] = gradients.place_of(unit).pieces
            with volume.path(piece.file).open("r+b") as file:
                file.seek(piece.offset + 64)
                file.write(b"damaged")
            return stored

        gradients.write = damaged
        with pytest.raises(DiskError):
            train(pair, "cc")


# --- with ranks, adapters and by layer ---------------------------------------------------------------


def compared(kind: str, folder: str, moves: str, device_nbytes: int) -> None:
    """In little memory, and in enough."""
    small, speculated, rolled_back = trained(kind, folder, moves, f"memory.device={device_nbytes}", UNTILED)
    large, *others = trained(kind, folder, moves, "memory.device=8MiB")
    assert small == large
    assert others == [speculated, rolled_back]
    assert speculated > rolled_back > 0


def least(kind: str, folder: str) -> int:
    """The least memory, as the error tells it (bytes)."""
    return needed(lambda: trained(kind, folder, "", "memory.device=1KiB", UNTILED))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_give_the_same_bits(tmp_path):
    torch.manual_seed(0)
    compared("lora", str(tmp_path), "..c.z.", least("lora", str(tmp_path)))


def test_the_layer_schedule_gives_the_same_bits_in_what_it_says_it_needs(tmp_path):
    folder = str(tmp_path)
    small = least("layer", folder)
    more = needed(
        lambda: trained("layer", folder, "..c.z.", f"memory.device={small}", UNTILED), "Raise it by"
    )
    compared("layer", folder, "..c.z.", small + more)


def two_ranks(folder: str) -> None:
    compared("whole", folder, "..c.z.", least("whole", folder))


def test_two_ranks_give_the_same_bits(tmp_path):
    run_ranks(two_ranks, 2, str(tmp_path))


# --- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "versions"),
    few(
        ((9 * 8192, VERSIONS[0]),),
        [(0, VERSIONS[0]), (9 * 8192, VERSIONS[0]), (0, VERSIONS[1])],
    ),
)
def test_bytes_are_the_planned_ones_and_gradients_are_among_them(tmp_path, versions, extra):
    factory, batches = models.build("gpt", seed=0)
    where = streaming(tmp_path, versions, UNTILED)
    least = needed(lambda: optimizer_for(build(factory, "bf16", [*where, "memory.device=1KiB"]), Rule()))
    model = build(factory, "bf16", [*where, f"memory.device={least + extra}"])
    optimizer = optimizer_for(model, Rule(max_grad_norm=FREE))
    with contextlib.closing(optimizer):
        updated = sum(12 * unit.shard_numel for unit in optimizer.runtime.units)
        waiting = spilled_nbytes(optimizer)
        assert waiting == updated // 6 if not extra else 0 < waiting < updated // 6
        before: tuple[int, int] = (0, 0)
        planned, moved = [], []
        for step, move in enumerate("...c.ccc...."):
            optimizer.max_grad_norm = CLIPPED if move == "c" else FREE
            model(**batches(step)).loss.backward()
            optimizer.step()
            report = optimizer.report()
            assert report.spilled_nbytes == waiting
            planned.append((report.planned_nbytes_read, report.planned_nbytes_written))
            after = settled(optimizer.runtime)
            moved.append(tuple(b - a for a, b in zip(before, after, strict=True)))
            before = after
            if step >= 3 and not report.rolled_back:
                assert moved[-1][1] == updated + waiting
        assert moved[3:] == planned[3:]
        read = [nbytes for nbytes, _ in moved]
        if versions == VERSIONS[1]:
            assert read[4] == read[5]  # every step reads them
        else:
            assert read[3] > read[4] == read[-1]  # a step that is rolled back reads them, and states again
            assert read[7] == read[-1] + waiting  # one that waits for the norm reads them


def test_their_room_on_the_drive_is_taken_when_the_optimizer_is_made_and_used_again(tmp_path):
    with lockstep(tmp_path) as pair:
        volume = pair.optimizer.runtime.storage.volume
        taken = volume.allocated_nbytes
        play(pair, "..c.")
        assert volume.allocated_nbytes == taken
    with lockstep(tmp_path, extra=2**22) as pair:
        assert not spilled_nbytes(pair.optimizer)
        assert pair.optimizer.runtime.storage.volume.allocated_nbytes == taken - gradients_nbytes(pair)


def test_a_model_that_only_runs_has_no_room_taken_for_them(tmp_path):
    factory, batches = models.build("gpt", seed=0)
    where = streaming(tmp_path, UNTILED)
    least = needed(lambda: optimizer_for(build(factory, "bf16", [*where, "memory.device=1KiB"]), Rule()))
    model = build(factory, "bf16", [*where, f"memory.device={least}"])
    runtime = runtime_of(model)
    volume, taken = runtime.storage.volume, runtime.storage.volume.allocated_nbytes
    with torch.no_grad():
        model(**batches(0))
    assert runtime.executor().budget.spilled
    assert volume.allocated_nbytes == taken
    optimizer = optimizer_for(model, Rule(max_grad_norm=None))  # never clips: no gradient waits
    assert not runtime.executor().budget.spilled
    optimizer.close()


@pytest.mark.parametrize("clip", few((CLIPPED,), (FREE, CLIPPED)))
def test_a_run_that_is_interrupted_goes_on_with_them(tmp_path, clip):
    def begin(folder: str, memory: str) -> tuple[Any, Any, Any]:
        return start(
            "gpt", "bf16", overrides(tmp_path / folder, "nvme", memory, UNTILED), Rule(max_grad_norm=clip)
        )

    least = needed(lambda: begin("least", "memory.device=1KiB"))
    large, optimizer, batches = begin("whole", "memory.device=8MiB")
    losses = run(large, optimizer, batches, range(6))
    wanted = state(large, optimizer)
    infinity.close(large)
    for steps in ([0, 1, 2], [3, 4], [5]):
        model, optimizer, batches = begin("parts", f"memory.device={least}")
        assert infinity.resume(model, optimizer) == steps[0]
        assert spilled_nbytes(optimizer)
        assert run(model, optimizer, batches, steps) == [losses[step] for step in steps]
        if steps[-1] < 5:
            interrupt(model)
    same(state(model, optimizer), wanted)
    infinity.close(model)


# --- faults --------------------------------------------------------------------------------------------


class BadPlaces(FaultyEngine):
    """Writes to ``extents`` fail from the ``nth`` on."""

    extents: frozenset[Extent] = frozenset()
    nth = 0

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        self.nth -= extent in self.extents
        if extent in self.extents and self.nth < 0:
            return FaultyEngine(self.engine, Fault(on="write", nth=1)).write(extent, memory)
        return super().write(extent, memory)


@pytest.mark.parametrize(
    ("moves", "versions"),
    [("....", VERSIONS[0]), (".c..", VERSIONS[0]), ("cccc", VERSIONS[0]), ("cccc", VERSIONS[1])],
)
def test_a_gradient_that_cannot_be_written_is_a_disk_error_and_the_committed_step_stays(
    tmp_path, monkeypatch, moves, versions
):
    monkeypatch.setattr("tests.helpers.faulty.FaultyEngine", BadPlaces)
    with breakable() as engines, lockstep(tmp_path, versions) as pair:
        play(pair, "..")
        runtime = pair.optimizer.runtime
        pair.optimizer.synchronize()
        before = {unit.index: runtime.tiers.shard_fields(unit) for unit in runtime.units}
        engines[-1].extents = frozenset(
            map(runtime.executor().updates.stored_gradients.place_of, runtime.units)
        )
        engines[-1].nth = 2
        limit(pair, CLIPPED if moves[0] == "c" else FREE)
        with pytest.raises(DiskError, match=r"memory\.nvme"):
            train(pair, moves)
        if versions == VERSIONS[1]:  # no update has begun
            for unit in runtime.units:
                after = runtime.tiers.shard_fields(unit)
                assert all(torch.equal(a, b) for a, b in zip(before[unit.index], after, strict=True))


def test_a_disk_that_has_no_room_for_them_is_an_error_before_the_first_step(tmp_path):
    with lockstep(tmp_path, extra=2**22) as pair:
        enough = pair.optimizer.runtime.storage.volume.allocated_nbytes
    with file_limit(enough), pytest.raises(DiskError, match=r"memory\.nvme"), lockstep(tmp_path):
        pass
    with file_limit(enough), lockstep(tmp_path, extra=2**22) as pair:
        play(pair, "..c")
        pair.check()
