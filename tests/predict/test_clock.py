"""The clock: bytes are exact, a step is never faster than what it needs, and cost grows like the model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinity.core.budget import DeviceBudget
from infinity.planner.prefetch_plan import Event, Kind
from infinity.predict.machines import (
    DevicesConfig,
    DrivesConfig,
    HostConfig,
    LinksConfig,
    Machine,
    NodesConfig,
    rank_rates,
)
from infinity.predict.play import _Player, play_step
from infinity.predict.step import (
    COMPUTE,
    DECODE,
    LINKS,
    UPDATE,
    Queues,
    StepCost,
    StepSetup,
    StepTrace,
    Stored,
    UnitShape,
    VirtualClock,
)

NUMEL = 2048 * 4096
MACHINE = Machine(
    devices=DevicesConfig(per_node=2, memory=2**35, fp16_flops_per_s=1e14, memory_bytes_per_s=1e12),
    links=LinksConfig(host_bytes_per_s=1e10, device_bytes_per_s=1e11),
    host=HostConfig(cores=8, memory=2**38, bytes_per_s=1e11),
    drives=DrivesConfig(per_node=2, read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1.5e9),
)


def trace(units: int, *, flops: float = 1e12, stored: tuple[Stored, ...] = ()) -> StepTrace:
    """Forward through all units, and backward through them."""
    events: list[Event] = []
    for unit in range(units):
        events += [Event(Kind.USE, unit), Event(Kind.UNPIN, unit)]
    done = []
    for unit in reversed(range(units)):
        events.append(Event(Kind.USE, unit))
        done.append((len(events), unit))
        events.append(Event(Kind.DONE, unit))
    n = len(events) + 1
    return StepTrace(
        tuple(events), tuple(done), tuple(done), np.arange(n), np.full(n, flops), np.zeros(n),
        np.zeros(n, bool), flops * n, 1024, 0, stored,
    )  # fmt: skip


def setup(
    units: int, *, ranks: int = 1, window: int = 4, micro_batches: int = 1, machine: Machine = MACHINE
) -> StepSetup:
    full = 2 * NUMEL
    sizes = {"nbytes": full, "weight_nbytes": full // ranks, "state_nbytes": 10 * NUMEL // ranks}
    sizes |= {"kept_nbytes": 0, "trained_nbytes": 0, "shard_numel": NUMEL // ranks, "params": NUMEL}
    sizes |= {"moved_nbytes": full // ranks, "read_nbytes": full // ranks}
    shapes = tuple(UnitShape(name=f"unit {i}", trainable=True, **sizes) for i in range(units))
    division = DeviceBudget((window + 16) * full, window * full, True, True, 0, 0)
    return StepSetup(
        units=shapes, rates=rank_rates(machine.with_ranks(ranks), ranks, "fp16"), division=division,
        ranks=ranks, on_accelerator=True, micro_batches=micro_batches, early=True, clips=False,
        chunk_numel=2**21, staged_chunks=8, piece_nbytes=2**40, reduce_itemsize=4 if ranks > 1 else 2,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [3, 40])
def test_each_byte_of_a_step_is_moved_once(ranks: int, window: int) -> None:
    units = 12
    made = setup(units, ranks=ranks, window=window)
    cost = play_step(trace(units), made)
    shard = NUMEL // ranks
    assert cost.nbytes["NVMe write"] == units * 12 * shard
    read = cost.nbytes["NVMe read"]
    if window == 40:  # all weights stay
        assert read == units * 10 * shard
    else:
        assert units * 12 * shard < read <= units * 14 * shard
    assert cost.nbytes["device to host"] >= units * shard * made.reduce_itemsize
    if ranks > 1:
        assert cost.nbytes[LINKS] >= 2 * units * 2 * NUMEL


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("on_accelerator", [True, False])
def test_units_without_a_gradient_are_not_updated(ranks: int, on_accelerator: bool) -> None:
    units, without = 12, {3, 4, 11}
    made = replace(setup(units, ranks=ranks, window=3), on_accelerator=on_accelerator)
    every = trace(units)
    some = replace(every, begun=tuple(each for each in every.begun if each[1] not in without))
    all_updated, cost = play_step(every, made), play_step(some, made)
    shard = len(without) * NUMEL // ranks
    assert all_updated.nbytes["NVMe write"] - cost.nbytes["NVMe write"] == 12 * shard
    assert all_updated.nbytes["NVMe read"] - cost.nbytes["NVMe read"] >= 10 * shard
    assert cost.device_peak_nbytes <= all_updated.device_peak_nbytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_on_nvme_are_written_once_and_read_by_updates_that_wait(ranks: int) -> None:
    units, spilled = 12, frozenset({0, 3, 4, 11})
    for early in (True, False):
        inside = replace(setup(units, ranks=ranks, window=3), clips=True, early=early)
        plain, cost = (play_step(trace(units), replace(inside, spilled=each)) for each in ((), spilled))
        nbytes = len(spilled) * NUMEL // ranks * inside.reduce_itemsize
        assert cost.nbytes["NVMe write"] - plain.nbytes["NVMe write"] == nbytes
        assert cost.nbytes["NVMe read"] - plain.nbytes["NVMe read"] == (0 if early else nbytes)


@pytest.mark.parametrize("early", [True, False])
def test_gradients_that_wait_on_nvme_take_no_memory_for_long(early: bool) -> None:
    units = 12
    made = replace(setup(units, window=3), clips=True, early=early, on_accelerator=False, piece_nbytes=None)
    made = replace(made, division=replace(made.division, total=40 * 2 * NUMEL, hold_weights=False))
    plain, cost = (play_step(trace(units), replace(made, spilled=frozenset(range(n)))) for n in (0, units))
    assert cost.device_peak_nbytes < plain.device_peak_nbytes
    tight = replace(made.division, total=7 * 2 * NUMEL)
    cost = play_step(trace(units), replace(made, division=tight, spilled=frozenset(range(units))))
    assert cost.device_peak_nbytes <= tight.total
    assert cost.step_s >= plain.step_s


def test_a_step_takes_at_least_what_its_busiest_part_needs() -> None:
    for flops in (1e9, 1e12, 1e14):
        cost = play_step(trace(8, flops=flops), setup(8, window=3))
        assert cost.step_s >= 0.999 * max(cost.busy_s.values())
        assert cost.step_s <= sum(cost.busy_s.values())
    assert cost.bottleneck == COMPUTE
    assert cost.step_s == pytest.approx(cost.busy_s[COMPUTE], rel=0.05)  # all else is hidden
    assert cost.device_peak_nbytes <= setup(8, window=3).division.total


def test_a_faster_drive_a_link_and_more_memory_never_make_a_step_slower() -> None:
    slow = play_step(trace(12), setup(12, window=3)).step_s
    drives = replace(MACHINE, drives=replace(MACHINE.drives, per_node=4))
    link = replace(MACHINE, links=replace(MACHINE.links, host_bytes_per_s=4e10))
    assert play_step(trace(12), setup(12, window=3, machine=drives)).step_s < slow
    assert play_step(trace(12), setup(12, window=3, machine=link)).step_s <= 1.001 * slow
    assert play_step(trace(12), setup(12, window=40)).step_s <= 1.001 * slow


def test_many_micro_batches_cost_what_the_last_ones_do() -> None:
    few = [play_step(trace(6), setup(6, window=3, micro_batches=n)) for n in (3, 4)]
    many = play_step(trace(6), setup(6, window=3, micro_batches=64))
    each = few[1].step_s - few[0].step_s
    assert many.step_s == pytest.approx(few[1].step_s + 60 * each)
    assert many.nbytes["NVMe write"] == few[0].nbytes["NVMe write"]
    read = few[1].nbytes["NVMe read"] - few[0].nbytes["NVMe read"]
    assert many.nbytes["NVMe read"] == few[1].nbytes["NVMe read"] + 60 * read


@st.composite
def steps(draw) -> tuple[StepTrace, StepSetup]:
    """Units with any homes, some of them frozen, of few to many micro-batches in tight or wide memory."""
    units = draw(st.integers(1, 8))
    made = setup(
        units, ranks=draw(st.sampled_from([1, 2])), window=draw(st.integers(3, units + 3)),
        micro_batches=draw(st.integers(1, 9)),
    )  # fmt: skip
    shapes = [
        replace(unit, on_nvme=draw(st.booleans()), trainable=draw(st.sampled_from([True, True, False])))
        for unit in made.units
    ]
    total = int(made.division.total * draw(st.sampled_from([0.4, 0.7, 1, 1.5])))
    made = replace(
        made, units=tuple(shapes), early=draw(st.booleans()), clips=draw(st.booleans()),
        on_accelerator=draw(st.booleans()), piece_nbytes=draw(st.sampled_from([None, 0, 2**40])),
        staged_chunks=draw(st.sampled_from([4, 8])),
        spilled=frozenset(draw(st.sets(st.integers(0, units - 1), max_size=2))),
        division=replace(made.division, total=max(made.division.window, total)),
    )  # fmt: skip
    stored = tuple(
        Stored(nbytes, packed_at=at, load_at=3 * units, asked_at=4 * units - at, on_nvme=draw(st.booleans()))
        for at, nbytes in enumerate(draw(st.lists(st.integers(1, 10**9), max_size=min(3, units))))
    )
    return trace(units, flops=draw(st.sampled_from([1e8, 1e10, 1e12, 3e13])), stored=stored), made


def collectives_that_lag(micro_batches: int) -> tuple[StepTrace, StepSetup]:
    """As many wait at the end of each of the first micro-batches, each time for longer; then for memory."""
    made = setup(1, ranks=2, window=3, micro_batches=micro_batches)
    made = replace(made, units=(replace(made.units[0], on_nvme=False),), early=False, piece_nbytes=None)
    return trace(1, flops=1e8), replace(made, division=replace(made.division, total=223136972))


@settings(deadline=None, max_examples=60)
@given(steps())
@example(collectives_that_lag(6))
@example(collectives_that_lag(9))
def test_a_step_whose_micro_batches_repeat_takes_what_playing_each_of_them_says(
    step: tuple[StepTrace, StepSetup],
) -> None:
    cost = play_step(*step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.predict.step.takewhile", lambda alike, turns: ())  # none is left out
        patch.setattr(VirtualClock, "waiting", property(lambda self: object()))
        every = play_step(*step)
    assert cost.step_s == pytest.approx(every.step_s, rel=1e-6)
    assert cost.busy_s == pytest.approx(every.busy_s, rel=1e-6)
    assert cost.stall_s == pytest.approx(every.stall_s, rel=1e-6, abs=1e-6 * every.step_s)
    assert (cost.nbytes, cost.device_peak_nbytes) == (every.nbytes, every.device_peak_nbytes)


def test_a_step_that_ends_as_it_began_is_not_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played, play = [], _Player._play
    monkeypatch.setattr(_Player, "_play", lambda self, first: played.append(1) or play(self, first))
    step = trace(8, flops=1e13), setup(8, window=3)
    cost, few = play_step(*step), len(played)
    assert few == 2  # one of them for what earlier steps leave
    monkeypatch.setattr(VirtualClock, "waiting", property(lambda self: object()))  # it never does
    every = play_step(*step)
    assert len(played) - few > few
    assert (cost.step_s, cost.nbytes) == (pytest.approx(every.step_s, rel=1e-9), every.nbytes)
    assert cost.busy_s == pytest.approx(every.busy_s, rel=1e-9)


@pytest.mark.parametrize("units", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_64_micro_batches_are_planned_by_playing_a_few(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    compute = VirtualClock.compute
    monkeypatch.setattr("infinity.predict.step._MANY_EVENTS", 1000)
    monkeypatch.setattr(VirtualClock, "compute", lambda self, s: played.append(1) or compute(self, s))
    made = setup(units, ranks=2, window=units // 10, micro_batches=64)
    cost = play_step(trace(units), made)
    assert cost.step_s >= 64 * 4 * units * 1e12 / made.rates.flops_per_s
    assert len(played) <= 5 * (5 * units + 1)  # of 64 in a step: positions of the trace, and gradients


def test_activations_that_leave_move_their_bytes_and_hold_backward_until_they_are_back() -> None:
    plain = play_step(trace(8), setup(8, window=40))
    nbytes = 10**9
    # packed after the first unit, loaded when the last unit's backward begins, needed right then
    away = (Stored(nbytes, packed_at=2, load_at=16, asked_at=16, on_nvme=True),)
    cost = play_step(trace(8, stored=away), setup(8, window=40))
    for channel in ("NVMe write", "NVMe read", "device to host", "host to device"):
        assert cost.nbytes[channel] - plain.nbytes.get(channel, 0) == nbytes
    assert cost.stall_s["activation"] > 0.2  # at 4 GB/s from two drives, and over the link
    assert cost.step_s > plain.step_s


def test_units_in_host_memory_move_nothing_to_drives() -> None:
    made = setup(6, window=3)
    made = replace(made, units=tuple(replace(unit, on_nvme=False) for unit in made.units))
    cost = play_step(trace(6), made)
    assert "NVMe read" not in cost.nbytes
    assert cost.nbytes["host to device"] >= 6 * 2 * NUMEL
    assert cost.busy_s[UPDATE] > 0


def test_beside_an_accelerator_updates_in_host_memory_lag_into_the_next_forward() -> None:
    units = 6
    made = setup(units, window=3)
    made = replace(made, units=tuple(replace(unit, on_nvme=False) for unit in made.units))
    moved = units * NUMEL * 2 * (2 * 12 + 2) // 2
    compute_s = play_step(trace(units), made).busy_s["compute"]
    for share in (0.1, 0.3, 3.0):  # of the step's compute; forward is half of it
        rates = replace(made.rates, update_bytes_per_s=moved / (share * compute_s))
        cost = play_step(trace(units), replace(made, rates=rates))
        assert cost.busy_s[UPDATE] == pytest.approx(share * compute_s)
        if share < 0.5:
            assert cost.step_s < 1.02 * compute_s
        else:  # backward, all updates, and the last unit's forward, whose upload waits for its update
            least = (share + 0.5) * compute_s
            assert least < cost.step_s < least + 2 * compute_s / units
            assert cost.stall_s["update"] > 0
    # Without an accelerator it is the training thread that updates them.
    alone = play_step(trace(units), replace(made, on_accelerator=False))
    assert alone.stall_s["update"] == pytest.approx(alone.busy_s[UPDATE])


def test_gradients_of_units_in_host_memory_go_on_leaving_while_the_next_forward_computes() -> None:
    units, share = 24, 0.9  # of the step's compute, half of it forward: what the link takes each way
    made = setup(units, window=40)
    made = replace(made, units=tuple(replace(unit, on_nvme=False) for unit in made.units))
    compute_s = play_step(trace(units), made).busy_s["compute"]
    channels = replace(made.rates.channels, host_bytes_per_s=2 * units * NUMEL / (share * compute_s))
    made = replace(made, rates=replace(made.rates, channels=channels, update_bytes_per_s=1e15))
    cost = play_step(trace(units), made)
    # All uploads, and backward: gradients, which take longer than backward, have all of the step.
    least = (share + 0.5) * compute_s
    assert least < cost.step_s < least + 4 * share * compute_s / units
    assert cost.busy_s["device to host"] == pytest.approx(share * compute_s)
    clipped = play_step(trace(units), replace(made, clips=True))
    assert clipped.step_s == pytest.approx(cost.step_s)  # the norm waits for no gradient to leave


def test_units_whose_states_are_on_the_device_move_nothing_at_all() -> None:
    made = setup(6, window=3)
    in_host = replace(made, units=tuple(replace(unit, on_nvme=False) for unit in made.units))
    states = 2 * 12 * NUMEL
    division = replace(made.division, total=made.division.total + states, on_device=(0, 1), states=states)
    part, host = (play_step(trace(6), replace(in_host, division=each)) for each in (division, made.division))
    for channel in ("host to device", "device to host"):
        assert part.nbytes[channel] == pytest.approx(host.nbytes[channel] * 4 / 6, rel=0.2)
    assert part.busy_s[UPDATE] < host.busy_s[UPDATE]
    # An update in host memory has the next forward; one on the device takes its time from compute.
    assert host.step_s < part.step_s < 1.01 * host.step_s
    slow = replace(made.rates, update_bytes_per_s=2e9)
    part, host = (
        play_step(trace(6), replace(in_host, division=each, rates=slow)) for each in (division, made.division)
    )
    assert part.step_s < host.step_s
    assert states < part.device_peak_nbytes <= division.total
    every = replace(division, on_device=tuple(range(6)), states=3 * states, total=division.total + 2 * states)
    cost = play_step(trace(6), replace(in_host, division=every))
    assert not cost.nbytes.get("host to device")
    assert not cost.nbytes.get("device to host")
    moved = 6 * (2 * 12 + made.reduce_itemsize) * NUMEL
    assert cost.busy_s[UPDATE] == pytest.approx(moved / made.rates.memory_bytes_per_s)


def test_cost_grows_like_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in events of the clock, since times of a busy machine say nothing."""
    counts, events = [], []
    pass_on = Queues.pass_on
    monkeypatch.setattr(Queues, "pass_on", lambda self: events.append(1) or pass_on(self))
    for units in (50, 100, 200):
        events.clear()
        play_step(trace(units), setup(units, window=units // 5, micro_batches=2))
        counts.append(len(events))
    assert counts[2] / counts[1] < 1.2 * 2
    assert counts[1] / counts[0] < 1.2 * 2


def test_512_ranks_are_played_as_one() -> None:
    machine = replace(
        MACHINE, nodes=NodesConfig(count=256), links=replace(MACHINE.links, network_bytes_per_s=1e11)
    )
    made = replace(setup(8, ranks=2), rates=rank_rates(machine, 512, "fp16"), ranks=512)
    cost = play_step(trace(8), made)
    assert 0 < cost.step_s < 60


def test_stored_weights_are_decoded_after_each_gather_and_before_their_use() -> None:
    units, full = 8, 2 * NUMEL
    plain = setup(units, window=6)  # both forms of four units

    def frozen(decode_nbytes: int) -> StepSetup:
        form = {"moved_nbytes": full // 2, "read_nbytes": full // 2, "stored_nbytes": full // 2}
        form |= {"decode_nbytes": decode_nbytes, "decode_operators": 5}
        return replace(plain, units=tuple(replace(u, trainable=False, **form) for u in plain.units))

    events = tuple(e if e.kind is not Kind.DONE else Event(Kind.UNPIN, e.unit) for e in trace(units).events)
    steps = replace(trace(units, flops=1e9), events=events, begun=(), completed=())
    free, cost = (play_step(steps, frozen(nbytes)) for nbytes in (0, 10 * full))
    gathers = cost.nbytes["host to device"] / (full // 2)
    assert units <= gathers <= 2 * units
    each_s = 10 * full / 1e12
    assert cost.busy_s[DECODE] == pytest.approx(gathers * each_s)
    assert free.busy_s[DECODE] == pytest.approx(gathers * 5 * MACHINE.devices.operator_s)
    assert cost.nbytes == free.nbytes
    slow = replace(plain.rates, decode_bytes_per_s=1e9)
    slowest = play_step(steps, replace(frozen(10 * full), rates=slow))
    assert slowest.bottleneck == DECODE
    assert slowest.step_s >= slowest.busy_s[DECODE] == pytest.approx(1000 * cost.busy_s[DECODE])


ON_CORES = replace(
    MACHINE, devices=DevicesConfig(bf16_flops_per_s=1e12, memory_bytes_per_s=1e12, efficiency=1.0),
    links=LinksConfig(device_bytes_per_s=1e10), host=HostConfig(cores=4, memory=2**38, bytes_per_s=1e12),
)  # fmt: skip


def on_cores(units: int, *, machine: Machine = ON_CORES, ranks: int = 1, window: int = 4) -> StepSetup:
    made = setup(units, ranks=ranks, window=window)
    rates = rank_rates(machine, ranks, "bf16")
    return replace(made, rates=rates, on_accelerator=False, piece_nbytes=None)


def test_updates_beside_compute_take_their_share_of_the_cores() -> None:
    """Two of four cores update: while they do, compute has four of six shares."""
    made = on_cores(8, window=40)
    fast = replace(made.rates, background_bytes_per_s=1e15)
    free, cost = (play_step(trace(8, flops=1e12), replace(made, rates=r)) for r in (fast, made.rates))
    copied_s = 8 * 3 * 2 * NUMEL / 1e12
    assert free.step_s == pytest.approx(free.busy_s[COMPUTE], rel=0.01)
    assert free.busy_s[COMPUTE] == pytest.approx(33 + copied_s, rel=0.01)
    assert cost.busy_s[UPDATE] > free.busy_s[UPDATE]
    assert cost.step_s - free.step_s == pytest.approx(cost.busy_s[UPDATE] / 3, rel=0.05)


def test_more_ranks_or_threads_than_cores_compute_no_faster() -> None:
    two = replace(ON_CORES, host=replace(ON_CORES.host, cores=2))

    def compute_s(ranks: int, threads: int | None = None) -> float:
        rates = rank_rates(two, ranks, "bf16", threads)
        made = replace(on_cores(2, window=40), rates=replace(rates, background_bytes_per_s=1e15))
        return play_step(trace(2, flops=1e12), made).step_s

    assert compute_s(4) == pytest.approx(2 * compute_s(2), rel=0.01)
    assert compute_s(4, threads=2) == pytest.approx(compute_s(4), rel=0.01)
    assert compute_s(1, threads=8) == pytest.approx(compute_s(1), rel=0.01)
    assert compute_s(1, threads=1) == pytest.approx(2 * compute_s(1), rel=0.01)


def test_what_io_takes_of_the_cores_it_takes_from_compute() -> None:
    drives = replace(ON_CORES.drives, core_s_per_byte=1e-10)
    plain, cost = (
        play_step(trace(8, flops=1e12), on_cores(8, machine=replace(ON_CORES, drives=each)))
        for each in (ON_CORES.drives, drives)
    )
    assert cost.nbytes == plain.nbytes
    moved = cost.nbytes["NVMe read"] + cost.nbytes["NVMe write"]
    assert cost.step_s - plain.step_s == pytest.approx(moved * 1e-10, rel=0.1)


def test_a_gather_whose_shard_is_late_holds_the_reductions_behind_it() -> None:
    """So their gradients wait in device memory, as they do in the runtime's queue of collectives."""
    ended: list[str] = []
    clock = VirtualClock(on_cores(1).rates, on_accelerator=False)
    let_on = clock.serve(LINKS, 1.0, lambda: ended.append("gather"), ready=False)
    clock.serve(LINKS, 2.0, lambda: ended.append("reduction"))
    assert not clock.pass_on()  # nothing goes on
    let_on()
    assert [clock.pass_on() and clock.queues.now_s for _ in range(2)] == [1.0, 3.0]
    assert ended == ["gather", "reduction"]
    assert clock.mark(0).busy_s[LINKS] == 3.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_of_a_gradient_counts_until_the_next_one_has_begun(ranks: int) -> None:
    """However fast drives, links and updates are; and one unit is reduced at a time, however slow."""
    units, full = 6, 2 * NUMEL
    made = replace(on_cores(units, ranks=ranks, window=40), clips=True, reduce_itemsize=2)
    made = replace(made, spilled=frozenset(range(units)), division=replace(made.division, hold_weights=False))
    at_once = replace(
        made.rates, background_bytes_per_s=1e18, links_bytes_per_s=1e18,
        channels=replace(made.rates.channels, write_bytes_per_s=1e18, mixed_bytes_per_s=1e18),
    )  # fmt: skip
    cost = play_step(trace(units), replace(made, rates=at_once))
    shard = full // ranks
    gradients = 2 * full if ranks == 1 else 3 * full + shard  # the next one, beside one with its reduction
    assert cost.device_peak_nbytes == units * full + gradients
    if ranks > 1:
        held = replace(made, spilled=frozenset(), rates=replace(at_once, links_bytes_per_s=1e8))
        slow = play_step(trace(units, flops=1e10), held)
        assert slow.device_peak_nbytes == units * (full + shard) + 2 * full + (full - shard)
        assert slow.stall_s[LINKS] > 0


def test_collectives_take_as_much_of_the_cores_as_they_keep_busy() -> None:
    """Two ranks with two cores each: what a collective takes of the cores, compute does not have."""
    base = on_cores(8, ranks=2, window=40)
    rates = replace(base.rates, background_bytes_per_s=1e15, memory_bytes_per_s=1e15, links_bytes_per_s=1e9)
    links_s = 8 * 2 * NUMEL / 1e9

    def cost(threads: float) -> StepCost:
        return play_step(trace(8, flops=1e12), replace(base, rates=replace(rates, link_threads=threads)))

    none, half, whole = cost(0.0), cost(0.5), cost(1.0)
    assert none.step_s < half.step_s < whole.step_s
    assert whole.step_s - none.step_s == pytest.approx(2 * (half.step_s - none.step_s), rel=0.15)
    assert none.busy_s[LINKS] > links_s


def test_measured_operators_take_the_place_of_the_roofline() -> None:
    made, steps = setup(6, window=40), trace(6, flops=1e12)
    known = np.full(len(steps.position), 0.5)
    known[::2] = np.nan
    mixed = replace(steps, measured_s=known)
    rates = made.rates
    roofline = steps.times_s(rates)
    each = mixed.times_s(rates)
    assert each[1::2] == pytest.approx(0.5 + rates.operator_s)
    assert each[::2] == pytest.approx(roofline[::2])
    assert mixed.scaled(2).times_s(rates)[1] == pytest.approx(1.0 + rates.operator_s)
