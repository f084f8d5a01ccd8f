"""A test of the tests: each wait and each event of the product that is left out is noticed."""

from pathlib import Path

import pytest

from tests.accelerator.mutate import UNCHANGED, Mutation, mutations, play_without
from tests.accelerator.process import needs_simulator
from tests.accelerator.scenarios import ALL
from tests.helpers.cases import LONG
from tests.helpers.launch import RanksError, run_ranks

#: What no training on this device can show, by the beginning of its name, and why.
EXEMPT = {
    "activations/codecs.py Coding._measure": "only times are read there",
    "activations/profiler.py": "only times are read there",
    "checkpoint/quantized.py _Kernel.compile": "it shows an error of the trial, whose values nobody reads",
    "comm/collectives.py Collectives._end: work.wait (2)": "without it the thread looks again and again",
    "comm/collectives.py Collectives._end: work.wait (3)": "only of errors; test_dying_peers.py shows it",
    "comm/nodes.py Nodes._fetch_across: kept.lease.record_use (1)": (
        "only of slices that are given up for room before their unit is reduced, on the same stream"
    ),
    "device/memory.py HostBuffer.unlock": "copies have ended before a pool closes; test_pool.py shows it",
    "device/memory.py _unlock_pages": "only of a model that was dropped; test_device.py shows it",
    "device/memory.py Lease.idle": "only which gradient leaves first; test_leaving.py shows it",
    "device/memory.py Pool._await_lease": "without it the thread looks again and again",
    "device/memory.py DevicePool.unmap_leased": "only training that has failed leaves leases",
    "engine/gradients.py GradientPath._show: total.lease.record_use (1)": "only of watched gradients",
    "nvme/engines/gds_engine.py": "needs GPUDirect Storage",
    "partition/mover.py UnitMover._decode: stored.lease.record_use (1)": (
        "only of tiles that are not used; test_device.py shows it"
    ),
    "predict/": "only times are read there",
}
#: Scenarios in which a call is looked for, by the beginning of its place.
SCENARIOS = {
    "activations/": ("gpt2 with activations stored", "activations stored in host memory"),
    "comm/ranks.py": ("two ranks that share host memory",),
    "partition/mover.py Staging.wait_for_uploads": ("two ranks that share host memory",),
    "shards/homes.py HostHome.updated_in_place": ("two ranks that share host memory",),
    "comm/": ("two ranks, accumulated",),
    "engine/gradients.py GradientPath._reduce": ("two ranks, accumulated",),
    "engine/gradients.py GradientPath._add_up": ("two ranks, accumulated and forgotten",),
    "engine/accumulation.py": ("llama, accumulated on nvme", "llama, accumulated in host memory"),
    "optim/rules.py": ("updated on the accelerator",),
    "partition/mover.py UnitMover._decode": ("quantized base",),
    "shards/homes.py": ("on the device, clipped", "on the device, out and in again"),
    "": (
        "llama on nvme",
        "two ranks, accumulated",
        "gpt2 with activations stored",
        "t5 in host memory, clipped",
        "llama on nvme, clipped",
    ),
}


def place(mutation: Mutation) -> str:
    return f"{mutation.file} {mutation.function}"


def tried() -> list[Mutation]:
    return [m for m in mutations() if not str(m).startswith(tuple(EXEMPT))]


def scenarios_for(mutation: Mutation) -> tuple[str, ...]:
    return next(names for start, names in SCENARIOS.items() if place(mutation).startswith(start))


def noticed(mutation: Mutation | None, name: str, folder: Path) -> str:
    """How training shows that the call is left out; empty: it does not."""
    world = ALL[name].world
    digests = []
    for schedule in (("eager", 0), ("lazy", 0)):  # most show as races under the first
        folder.mkdir(exist_ok=True, parents=True)
        given = mutation, name, str(folder), (schedule,)
        try:
            ranks = run_ranks(play_without, world, *given, group=False, imported=False)
        except RanksError as error:
            if UNCHANGED in str(error):
                raise
            return f"it fails: {str(error).strip().splitlines()[-1][:200]}"
        for [run] in ranks:
            if run.faults:
                return f"{run.schedule}: {run.faults[0]}"
        digests.append([run.digest for [run] in ranks])
    return "" if digests[0] == digests[1] else "other numbers under another schedule"


def check(mutation: Mutation, folder: Path) -> str:
    needs_simulator()
    for number, name in enumerate(scenarios_for(mutation)):
        found = noticed(mutation, name, folder / str(number))
        if found:
            return f"{name}: {found}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", tried() if LONG else [], ids=str)  # the package is read, which takes 1 s
def test_a_wait_that_is_left_out_is_noticed(tmp_path: Path, mutation: Mutation):
    assert check(mutation, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for names in SCENARIOS.values() for name in names}))
def test_where_nothing_is_left_out_nothing_is_noticed(tmp_path: Path, name: str):
    needs_simulator()
    assert not noticed(None, name, tmp_path)


@pytest.mark.slow
def test_the_wait_of_a_buffers_next_user_is_noticed_if_it_is_left_out(tmp_path: Path):
    [mutation] = [m for m in tried() if place(m) == "device/memory.py Lease.tensor"]
    assert "host to device" in check(mutation, tmp_path)


def test_every_wait_is_found_and_what_is_exempt_exists():
    found = [str(m) for m in mutations()]
    assert len(found) >= 30
    for start in EXEMPT:
        assert any(each.startswith(start) for each in found), start
    for start, names in SCENARIOS.items():
        assert any(each.startswith(start) for each in found), start
        assert not {*names} - {*ALL}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("wait_on_stream(event, device)", 1),
        ("self.lease.record_use()", 1),
        ("torch.accelerator.current_stream().wait_event(e)", 1),
        ("if not event.query(): event.synchronize()", 2),
        ("runtime.synchronize(); future.wait(); files.record(step)", 0),
    ],
)
def test_calls_that_order_work_are_told_from_others(tmp_path: Path, source: str, count: int):
    (tmp_path / "part.py").write_text(source)
    assert len(mutations(tmp_path)) == count
