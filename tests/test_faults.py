"""Promises 4 and 6: faults end every rank, soon, with an error that says who and what to do.

Faults that leave processes alive share one start of the ranks; those that end processes have one each.
"""

import atexit
import contextlib
import errno
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.comm import peers
from infinity.core.errors import DiskError
from infinity.core.lifecycle import Tier
from infinity.engine import runtime as runtime_module
from infinity.nvme.run_directory import find_leftovers
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.faulty import Fault, FaultyEngine, breakable
from tests.helpers.launch import mark, run_ranks, start_ranks
from tests.helpers.limits import file_limit, hang
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming

#: How long a rank waits for a silent one (s): far beyond what a busy machine keeps a rank from its processor.
TIMEOUT_S = 200
#: What ends sooner has not waited for that (s). On an idle machine it takes seconds.
SOON_S = 150
#: How long a rank waits for one that is silent for good (s), where just this is tested.
SILENT_S = 10


@dataclass(frozen=True)
class Outcome:
    """How one rank fared in one scenario."""

    kinds: tuple[str, ...]  # the error's class and its bases; empty when there was none
    message: str
    elapsed_s: float
    files: tuple[str, ...]  # of this rank, left after close


Each = Callable[[int, Any, Any], object]


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def loop(
    folder: Path,
    *overrides: str,
    clip: float | None = 1.0,
    steps: int = 6,
    before: Each = lambda step, model, optimizer: None,
) -> None:
    """The plain loop, with what goes wrong in ``before``."""
    rank, world = rank_and_world()
    factory, batch = models.build("gpt", seed=0)
    settings = [*streaming(folder, f"partition.timeout_s={TIMEOUT_S}", "memory.engine=threads"), *overrides]
    model = build(factory, "bf16", settings)
    optimizer = optimizer_for(model, Rule(max_grad_norm=clip))
    with contextlib.closing(optimizer):
        for step in range(steps):
            before(step, model, optimizer)
            model(**batch(step, rank, world)).loss.backward()
            optimizer.step()
        optimizer.synchronize()


# --- what goes wrong -----------------------------------------------------------------------------


def written_alone(folder: Path, guilty: bool) -> None:
    def before(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            with infinity.gathered(model), infinity.gathered(model, modify=guilty):
                pass

    loop(folder, before=before)


def another_model(folder: Path, guilty: bool) -> None:
    with infinity.Init(infinity.load_recipe(overrides=streaming(folder))):
        model = torch.nn.Linear(64, 65 if guilty else 64)
    infinity.close(model)


def own_error(folder: Path, guilty: bool) -> None:
    def before(step: int, model: Any, optimizer: Any) -> None:
        if guilty and step == 2:
            raise LookupError("the data of this rank ended")

    loop(folder, before=before)


def own_error_while_building(folder: Path, guilty: bool) -> None:
    with infinity.Init(infinity.load_recipe(overrides=streaming(folder))):
        torch.nn.Linear(64, 64)
        if guilty:
            raise LookupError("no such model")


def left_early(folder: Path, guilty: bool) -> None:
    loop(folder, steps=2 if guilty else 6)


def full_disk_at_construction(folder: Path, guilty: bool) -> None:
    with file_limit(100_000) if guilty else contextlib.nullcontext():
        loop(folder)


def full_disk_in_training(folder: Path, guilty: bool) -> None:
    with contextlib.ExitStack() as stack:

        def before(step: int, model: Any, optimizer: Any) -> None:
            if guilty and step == 2:
                stack.enter_context(file_limit(100_000))

        loop(folder, before=before)


def unwritable(folder: Path, guilty: bool) -> None:
    file = folder / f"file{rank_and_world()[0]}"
    file.touch()
    loop(file / "below" if guilty else folder)


def broken(on: str, clip: float | None, folder: Path, guilty: bool) -> None:
    with breakable() as engines:

        def before(step: int, model: Any, optimizer: Any) -> None:
            if guilty and step == 2:
                [engine] = engines
                count = engine.writes if on == "write" else engine.reads
                engine.faults = (Fault(on=on, nth=count + 3, forever=True),)

        loop(folder, before=before, clip=clip)


def broken_writes(folder: Path, guilty: bool) -> None:
    broken("write", 1.0, folder, guilty)


def broken_early_writes(folder: Path, guilty: bool) -> None:
    broken("write", None, folder, guilty)


def broken_reads(folder: Path, guilty: bool) -> None:
    broken("read", 1.0, folder, guilty)


def broken_early_reads(folder: Path, guilty: bool) -> None:
    broken("read", None, folder, guilty)


def broken_probe(folder: Path, guilty: bool) -> None:
    """The drive fails while it is measured for the plan of activations, which rank 0 makes for all."""
    measure = runtime_module.measure_hardware

    def failing(*args: Any) -> Any:
        raise DiskError(errno.EIO, "read", folder, offset=0, nbytes=4096)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_module, "measure_hardware", failing if guilty else measure)
        loop(folder, "memory.activations=plan", steps=8)


def changed(change: Callable[[Path], object], folder: Path, guilty: bool) -> None:
    """Another program touches a file of states where no read of this step would notice."""

    def before(step: int, model: Any, optimizer: Any) -> None:
        if guilty and step == 2:
            change(optimizer.runtime.storage.volume.path(0))

    loop(folder, before=before)


def cut_file(folder: Path, guilty: bool) -> None:
    changed(lambda path: os.truncate(path, path.stat().st_size - 4096), folder, guilty)


def replaced_file(folder: Path, guilty: bool) -> None:
    def replace(path: Path) -> None:
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.rename(path)

    changed(replace, folder, guilty)


def removed_file(folder: Path, guilty: bool) -> None:
    changed(Path.unlink, folder, guilty)


def interrupted_hook(folder: Path, guilty: bool) -> None:
    """An error of the user's own code, deep inside backward."""

    def before(step: int, model: Any, optimizer: Any) -> None:
        def hook(grad: torch.Tensor) -> None:
            raise LookupError("in backward")

        if guilty and step == 2:
            block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[0]
            block.register_forward_hook(lambda m, a, out: out.register_hook(hook) and None)

    loop(folder, before=before)


#: What goes wrong, the error of the rank where it does, that of the others, and what messages must say.
SCENARIOS: tuple[tuple[Callable[[Path, bool], None], str, str, str], ...] = (
    (written_alone, "DivergenceError", "DivergenceError", "rank 1 wants write"),
    (another_model, "DivergenceError", "DivergenceError", "rank 1 wants check of the model"),
    (own_error, "LookupError", "PeerError", "rank 1 failed with LookupError: the data of this rank ended"),
    (own_error_while_building, "LookupError", "PeerError", "rank 1 failed with LookupError: no such model"),
    (interrupted_hook, "LookupError", "PeerError", "rank 1 failed with LookupError: in backward"),
    (left_early, "", "PeerError", "rank 1 closed its model"),
    (full_disk_at_construction, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (full_disk_in_training, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (unwritable, "DiskError", "PeerError", "rank 1 failed with DirectoryError"),
    (broken_writes, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (broken_early_writes, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (broken_reads, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (broken_early_reads, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (broken_probe, "DiskError", "PeerError", "rank 1 failed with DiskError"),
    (cut_file, "DiskError", "PeerError", "rank 1 failed with ChangedFileError"),
    (replaced_file, "DiskError", "PeerError", "rank 1 failed with ChangedFileError"),
    (removed_file, "DiskError", "PeerError", "rank1-1-0.bin was removed or replaced"),
)


def attempt(scenario: Callable[[Path, bool], None], folder: Path, guilty: bool) -> Outcome:
    begin, error = time.monotonic(), None
    try:
        scenario(folder, guilty)
    except Exception as raised:
        error = raised
    elapsed_s = time.monotonic() - begin
    files = tuple(str(path) for path in folder.rglob(f"rank{rank_and_world()[0]}.*"))
    kinds = () if error is None else tuple(cls.__name__ for cls in type(error).__mro__)
    return Outcome(kinds, str(error), elapsed_s, files)


#: How one rank learns of the other's end is the same in these as in others.
ALIKE = (
    full_disk_at_construction, broken_early_writes, broken_reads, broken_early_reads, broken_probe, cut_file,
    replaced_file, removed_file,
)  # fmt: skip


def play_all(folder: str, scenarios: list[Callable[[Path, bool], None]]) -> dict[str, Outcome]:
    import torch.distributed as dist

    peers.BEAT_S = 0.2  # learn sooner of each other's end
    outcomes = {}
    for scenario in scenarios:
        place = Path(folder) / scenario.__name__
        place.mkdir(exist_ok=True)
        outcomes[scenario.__name__] = attempt(scenario, place, dist.get_rank() == 1)
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("alike", few((False,), (False, True)))
def test_a_fault_of_one_rank_ends_both_with_typed_errors(tmp_path, alike):
    played = [each for each in SCENARIOS if (each[0] in ALIKE) == alike]
    ranks = run_ranks(play_all, 2, str(tmp_path), [each[0] for each in played])
    for scenario, here, there, says in played:
        name = scenario.__name__
        other, guilty = (outcomes[name] for outcomes in ranks)
        assert here in guilty.kinds or (not here and not guilty.kinds), (name, guilty)
        assert there in other.kinds, (name, other)
        assert says in other.message, (name, other)
        assert "InfinityError" in other.kinds, name
        for outcome in (guilty, other):
            assert outcome.elapsed_s < SOON_S, name
            assert not outcome.files, name


#: Where the other rank does not matter.
PLAYED_BY_TWO = (own_error, own_error_while_building, full_disk_in_training, unwritable, broken_writes)
ALONE = [s for s in SCENARIOS if s[1] == "DiskError" or "own" in s[0].__name__ or "hook" in s[0].__name__]


@pytest.mark.parametrize(
    ("scenario", "here"),
    few([s[:2] for s in ALONE if s[0] not in PLAYED_BY_TWO], [s[:2] for s in ALONE]),
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_fault_with_one_rank_is_a_typed_error(tmp_path, scenario, here):
    outcome = attempt(scenario, tmp_path, True)
    assert here in outcome.kinds, outcome
    assert outcome.elapsed_s < SOON_S
    assert not outcome.files
    if here == "DiskError":
        assert "memory.nvme" in outcome.message


# --- the committed step --------------------------------------------------------------------------


def masters(optimizer: infinity.AdamW) -> dict[int, tuple[torch.Tensor, ...]]:
    runtime = optimizer.runtime
    stored = [unit for unit in runtime.units if unit.home.tier is Tier.NVME]
    assert len(stored) > 2
    return {unit.index: runtime.tiers.shard_fields(unit) for unit in stored}


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fail_in_step_3(
    model: Any, optimizer: infinity.AdamW, batch: Callable[..., Any], engines: list[FaultyEngine],
    steps: list[dict[int, tuple[torch.Tensor, ...]]], on: str, nth: int,
) -> None:  # fmt: skip
    """Keep the exact values before each step; from step 3 on the ``nth`` transfer fails."""
    for step in range(5):
        if step <= 3:
            optimizer.synchronize()
            steps.append(masters(optimizer))
        if step == 3:
            [engine] = engines
            count = engine.writes if on == "write" else engine.reads
            engine.faults = (Fault(on=on, nth=count + nth),)
        model(**batch(step)).loss.backward()
        optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize(
    ("on", "clip", "nth"),
    few(
        (("write", 1.0, 1), ("write", None, 6), ("read", 1.0, 11), ("read", None, 1)),
        itertools.product(("write", "read"), (1.0, None), (1, 6, 11)),
    ),
)
def test_after_a_disk_error_a_whole_committed_step_can_be_read(tmp_path, on, clip, nth):
    factory, batch = models.build("gpt", seed=0)
    steps: list[dict[int, tuple[torch.Tensor, ...]]] = []
    with breakable() as engines:
        model = build(factory, "bf16", streaming(tmp_path))
        optimizer = optimizer_for(model, Rule(max_grad_norm=clip))
        with contextlib.closing(optimizer):
            with pytest.raises(DiskError):
                fail_in_step_3(model, optimizer, batch, engines, steps, on, nth)
            versions = []
            for ahead in range(2):
                for unit in optimizer.runtime.units:
                    unit.home.version += ahead
                versions.append(masters(optimizer))
    whole = [
        step
        for step, saved in enumerate(steps)
        if all(any(same(version[index], fields) for version in versions) for index, fields in saved.items())
    ]
    assert 3 in whole  # what step() had committed when the disk failed


# --- processes that end --------------------------------------------------------------------------


def endless(folder: str, how: str) -> None:
    """Train until something happens to rank 1; says at each step that it lives."""
    peers.BEAT_S = 0.2  # as in play_all
    rank, world = rank_and_world()

    def stop_here(*args: Any) -> None:
        mark("there")
        if rank == world - 1:
            hang()

    def before(step: int, model: Any, optimizer: Any) -> None:
        if how == "stopped" and step == 1:  # the other rank must have come here, too, when this one stops
            wait_no_longer_than(SILENT_S, optimizer)
        if step != 3:
            return
        if how == "exit" and rank == world - 1:
            sys.exit(0)
        if how == "raise" and rank == world - 1:
            raise LookupError("out of data")
        block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[1]
        if how == "forward":
            block.register_forward_hook(stop_here)
        elif how == "backward":
            block.register_forward_hook(lambda m, a, out: out.register_hook(stop_here) and None)
        elif how == "waiting":
            mark("there")
        elif how == "idle":
            stop_here()
        elif how == "stopped" and rank == world - 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with contextlib.ExitStack() as stack:
        if how == "waiting":
            engines = stack.enter_context(breakable())

            def slow(step: int, model: Any, optimizer: Any) -> None:
                if step == 3:
                    engines[0].delay_s = 2.0
                before(step, model, optimizer)

            loop(Path(folder), before=slow, steps=1000)
        else:
            loop(Path(folder), before=before, steps=1000)


def wait_no_longer_than(seconds: float, optimizer: infinity.AdamW) -> None:
    """Lower ``partition.timeout_s`` of ranks that run; to start may take them long on a busy machine."""
    collectives = optimizer.runtime.ranks.collectives
    assert collectives is not None
    collectives.peers.timeout_s = seconds
    for group in torch.distributed.distributed_c10d._world.pg_map:
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def ends_of(folder: Path, how: str, signum: int | None, world: int) -> list[Any]:
    with start_ranks(endless, world, str(folder), how, group=False) as ranks:
        if signum is not None:
            for rank in range(world):
                ranks.reached("there", rank)
            ranks.kill(world - 1, signum)
        ends = ranks.wait()
    for end in ends:
        assert not end.hung, end
        assert not end.left_behind, end
        assert end.ended_s < SOON_S
        assert end.exit_code in (0, 1, -signal.SIGKILL), end
    return ends


def files(folder: Path) -> list[Path]:
    return list(folder.rglob("rank*.bin"))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("forward", marks=pytest.mark.slow),
        "backward",
        pytest.param("idle", marks=pytest.mark.always),
    ],
)
def test_a_killed_rank_ends_the_other_which_names_it(tmp_path, how):
    other, killed = ends_of(tmp_path, how, signal.SIGKILL, 2)
    assert killed.exit_code == -signal.SIGKILL
    assert other.error_type == "PeerError", other
    assert "rank 1" in other.message
    assert "was killed or crashed" in other.message
    assert [path.name for path in files(tmp_path)] == ["rank1-1-0.bin"]
    if how == "idle":
        leftovers_are_told(tmp_path)


def leftovers_are_told(folder: Path) -> None:
    """The next run says what the dead one left and how to remove it, and removes nothing."""
    [left] = find_leftovers(folder)
    lines: list[str] = []
    model = build(models.build("gpt", seed=0)[0], "bf16", streaming(folder))
    infinity.engine.runtime.runtime_of(model).say.attach(lines.append)
    infinity.close(model)
    [line] = [line for line in lines if "rm -r" in line]
    assert f"rm -r {left}" in line
    assert files(folder)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("exit", "SystemExit", "rank 1 closed its model"),
        # Above, own_error is the same but for the end of the process.
        pytest.param("raise", "LookupError", "LookupError: out of data", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_leaves_ends_the_other(tmp_path, how, error, says):
    other, left = ends_of(tmp_path, how, None, 2)
    assert left.error_type == error
    assert other.error_type == "PeerError", other
    assert says in other.message
    assert not files(tmp_path)


#: A rank that waits for another one, and one that computes; the others are long tests.
FEW_INTERRUPTS = {("waiting", 2), ("backward", 1)}
INTERRUPTS = [
    pytest.param(how, world, marks=[] if (how, world) in FEW_INTERRUPTS else pytest.mark.slow)
    for how in ("forward", "backward", "waiting")
    for world in (1, 2)
]


@pytest.mark.parametrize(("how", "world"), INTERRUPTS)
def test_ctrl_c_ends_every_rank_and_removes_the_files(tmp_path, how, world):
    *others, interrupted = ends_of(tmp_path, how, signal.SIGINT, world)
    assert interrupted.error_type == "KeyboardInterrupt", interrupted
    for other in others:
        assert other.error_type == "PeerError", other
        assert "rank 1 was interrupted (Ctrl-C)" in other.message
    assert not files(tmp_path)


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_the_timeout(tmp_path):
    with start_ranks(endless, 2, str(tmp_path), "stopped", group=False) as ranks:
        ranks.processes[0].wait()
        ranks.kill(1, signal.SIGKILL)
        other, _ = ranks.wait()
    assert other.error_type == "PeerError", other
    assert "rank 1" in other.message
    assert "is stopped" in other.message
    assert "partition.timeout_s" in other.message


def test_the_errno_of_a_full_disk_is_kept(tmp_path):
    with pytest.raises(DiskError) as caught:
        full_disk_in_training(tmp_path, True)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert "make room" in str(caught.value)


def no_thread_is_left() -> None:
    """At exit: a thread that asks for Python later may abort the process from within C++ code."""
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        print(f"threads are left at exit: {left}", file=sys.stderr, flush=True)
        os._exit(3)


def without_close(folder: str) -> None:
    """A loop that ends with updates and gathers in flight."""
    atexit.register(no_thread_is_left)
    rank, world = rank_and_world()
    factory, batch = models.build("gpt", seed=0)
    model = build(factory, "bf16", streaming(folder, f"partition.timeout_s={TIMEOUT_S}"))
    optimizer = optimizer_for(model, Rule(max_grad_norm=None))
    for step in range(4):
        model(**batch(step, rank, world)).loss.backward()
        optimizer.step()


def test_an_interpreter_that_ends_without_close_ends_cleanly(tmp_path):
    with start_ranks(without_close, 2, str(tmp_path), group=False, to_the_end=True) as ranks:
        ends = ranks.wait()
    for end in ends:
        assert end.exit_code == 0, end
        assert end.ended_s < SOON_S, end
    assert not files(tmp_path)
