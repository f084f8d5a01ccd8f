"""Plays on a clock: what must hold for any profile, plan and hardware, and cases counted by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.lifecycle import EDGES, SlotState
from infinity.core.plan import (
    ActivationPlan,
    BlockCall,
    CodedForm,
    Hardware,
    Kind,
    Load,
    Operator,
    OperatorKey,
    Phase,
    Place,
    Profile,
    SlotKey,
    SlotUse,
    StorageUse,
    StoreWait,
    Traffic,
)
from infinity.planner import lifetimes, simulator
from infinity.planner.lifetimes import InactivePeriod, least_memory, lifetimes_of
from infinity.planner.queues import Job
from infinity.planner.search import places_within, with_loads, within
from infinity.planner.search import plan as make_plan
from infinity.planner.simulator import Channel, Simulator, StepTimeline, play
from tests.helpers.profiles import (
    Tape,
    hardware,
    play_in_detail,
    random_hardware,
    random_profiles,
    transformer,
)

KEEP = ActivationPlan("keep")
MADE = (Kind.ACTIVATION, Kind.WORKING)
ENDLESS = Hardware(1e30, 1e30, 2e30, 1e30)


def saved_under(profile: Profile, plan: ActivationPlan) -> list[InactivePeriod]:
    """What a plan may name."""
    return [period for period in lifetimes_of(profile, plan.recomputed).periods if period.is_named]


@st.composite
def random_plans(draw: st.DrawFn, profile: Profile) -> ActivationPlan:
    """Any decisions that the profile allows, wise or not; some slots have no load, some loads no use."""
    recomputed = frozenset(block.region for block in profile.blocks if draw(st.booleans()))
    bare = ActivationPlan("random", recomputed=recomputed)
    slots = saved_under(profile, bare)
    places = {
        slot.key: draw(st.sampled_from([p for p in Place if slot.coded is not None or not p.is_coded]))
        for slot in slots
    }
    loads = []
    for slot in slots:
        if draw(st.integers(0, 4)):
            after = draw(st.sampled_from([None, *(s.key for s in slots if s.end <= slot.end)]))
            loads.append(Load(after, slot.key))
    return replace(bare, places=places, loads=tuple(loads))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, ActivationPlan, Hardware]:
    profile = draw(random_profiles())
    return profile, draw(random_plans(profile)), draw(random_hardware())


def sizes_of(profile: Profile, plan: ActivationPlan, place: Place) -> list[int]:
    """Bytes of each slot that the plan sends to ``place``."""
    return [slot.nbytes for slot in saved_under(profile, plan) if plan.place(slot.key) is place]


def kept_peak(profile: Profile) -> int:
    return max(
        sum(s.nbytes for s in profile.storages if s.kind in MADE and s.born <= at <= s.dies)
        for at in range(len(profile.operators))
    )


def offload(profile: Profile, *, ahead: int = 8, place: Place = Place.NVME) -> ActivationPlan:
    """Everything but the last block goes, and is loaded when backward asks ``ahead`` slots before."""
    asked = sorted(profile.slots, key=lambda slot: slot.unpacked_at)
    last = profile.blocks[-1].region
    places, loads = {}, []
    for number, slot in enumerate(asked):
        if slot.key.region < last and not slot.held:
            places[slot.key] = place
            loads.append(Load(asked[number - ahead].key if number >= ahead else None, slot.key))
    return ActivationPlan("offload", places, tuple(loads))


# --- properties ----------------------------------------------------------------------------------


@given(random_profiles(), random_hardware())
def test_keeping_takes_the_measured_step_and_its_peak(profile: Profile, channels: Hardware) -> None:
    outcome = play(profile, KEEP, channels)
    assert outcome.step_s == pytest.approx(profile.step_s)
    assert outcome.peak_nbytes == kept_peak(profile)
    assert (outcome.stall_s, outcome.recompute_s, outcome.host_peak_nbytes) == (0, 0, 0)
    assert (outcome.nbytes_stored, outcome.nbytes_loaded) == (0, 0)


@given(cases())
def test_memory_is_never_negative_and_nothing_is_left(case: tuple[Profile, ActivationPlan, Hardware]) -> None:
    outcome, timeline = play_in_detail(*case)
    assert min(sample.nbytes for sample in timeline.memory) == 0
    assert max(sample.nbytes for sample in timeline.memory) == outcome.peak_nbytes
    assert timeline.memory[-1].nbytes == 0
    times = [sample.at_s for sample in timeline.memory]
    assert times == sorted(times)


@given(cases())
def test_a_step_is_compute_recomputation_and_stalls(case: tuple[Profile, ActivationPlan, Hardware]) -> None:
    profile, plan, channels = case
    plain = replace(channels, compute_s_per_byte=0.0, compute_s_per_move=0.0)
    outcome, timeline = play_in_detail(profile, plan, plain)
    parts_s = profile.step_s + outcome.recompute_s + outcome.stall_s
    assert outcome.step_s == pytest.approx(parts_s)
    assert play(profile, plan, channels).step_s >= profile.step_s * (1 - 1e-9)
    for before, after in itertools.pairwise(timeline.stalls):
        assert before.begin_s < before.end_s <= after.begin_s


@given(random_profiles().flatmap(lambda p: st.tuples(st.just(p), random_plans(p))))
def test_endless_channels_never_stall(case: tuple[Profile, ActivationPlan]) -> None:
    profile, plan = case  # codecs are as slow as they are
    plain = replace(plan, places={key: place.as_coded(False) for key, place in plan.places.items()})
    assert play(profile, plain, ENDLESS).stall_s == pytest.approx(0, abs=1e-15)


@given(cases())
def test_bytes_are_conserved(case: tuple[Profile, ActivationPlan, Hardware]) -> None:
    profile, plan, channels = case
    outcome, timeline = play_in_detail(profile, plan, channels)
    slots = saved_under(profile, plan)
    sizes = {f"{s.key.region}.{s.key.ordinal}": s.moved(plan.place(s.key)) for s in slots}
    moved = {name: [sizes[i.name] for i in moves] for name, moves in timeline.channels.items()}
    assert outcome.nbytes_stored == sum(moved.get("NVMe write", ()))
    assert outcome.nbytes_loaded == sum(moved.get("NVMe read", ())) <= outcome.nbytes_stored
    assert sum(moved.get("host to device", ())) <= sum(moved.get("device to host", ()))
    on_host = sum(sizes_of(profile, plan, Place.HOST))
    assert sum(moved.get("device to host", ())) <= on_host
    assert outcome.host_peak_nbytes <= on_host
    for moves in timeline.channels.values():
        assert len({i.name for i in moves}) == len(moves)  # each slot once
        for before, after in itertools.pairwise(moves):
            assert before.end_s <= after.begin_s  # one after the other


@given(cases(), st.sampled_from([1.5, 4.0, 100.0]))
def test_slower_reads_never_make_a_step_faster(
    case: tuple[Profile, ActivationPlan, Hardware], factor: float
) -> None:
    profile, plan, channels = case
    apart = replace(channels, mixed_bytes_per_s=channels.read_bytes_per_s + channels.write_bytes_per_s)
    slower = replace(
        apart,
        read_bytes_per_s=apart.read_bytes_per_s / factor,
        mixed_bytes_per_s=apart.read_bytes_per_s / factor + apart.write_bytes_per_s,
    )
    assert play(profile, plan, slower).step_s >= play(profile, plan, apart).step_s * (1 - 1e-9)


@given(cases())
def test_a_timeline_changes_nothing_but_rounding(case: tuple[Profile, ActivationPlan, Hardware]) -> None:
    outcome, (detailed, _) = play(*case), play_in_detail(*case)
    assert outcome.peak_nbytes >= detailed.peak_nbytes
    for name in ("host_peak_nbytes", "nbytes_stored", "nbytes_loaded"):
        assert getattr(detailed, name) == getattr(outcome, name)
    for name in ("step_s", "stall_s", "recompute_s"):
        assert getattr(detailed, name) == pytest.approx(getattr(outcome, name), rel=1e-6, abs=1e-9)


@given(cases())
def test_a_play_is_the_same_every_time(case: tuple[Profile, ActivationPlan, Hardware]) -> None:
    assert play_in_detail(*case) == play_in_detail(*case)


@given(cases())
def test_every_load_has_ended_before_backward_uses_the_slot(
    case: tuple[Profile, ActivationPlan, Hardware],
) -> None:
    profile, plan, channels = case
    channels = replace(channels, compute_s_per_byte=0.0, compute_s_per_move=0.0)
    outcome, timeline = play_in_detail(profile, plan, channels)
    # Compute reaches an operator after all that comes before it, and not before its slots are there.
    work_s = outcome.step_s - outcome.stall_s - outcome.recompute_s
    lifetimes = lifetimes_of(profile, plan.recomputed)
    forward_s = lifetimes.until_s[lifetimes.backward]
    assert work_s == pytest.approx(profile.step_s)
    for name in ("NVMe read", "host to device"):
        for load in timeline.channels.get(name, ()):
            store = {"NVMe read": "NVMe write", "host to device": "device to host"}[name]
            (stored,) = [move for move in timeline.channels[store] if move.name == load.name]
            assert forward_s * (1 - 1e-12) <= load.begin_s
            assert stored.end_s <= load.begin_s
            assert load.end_s <= outcome.step_s * (1 + 1e-12)


# --- by hand -------------------------------------------------------------------------------------


def chain(*, held: bool = False) -> Profile:
    """Three operators of 1 s, each saves 100 bytes that its backward, 1 s too, reads."""
    storages = [StorageUse(f"x{i}", 100, Kind.ACTIVATION, i, 5 - i) for i in range(3)]
    forward = [
        Operator("op", 1.0, () if not i else (i - 1,), (i,), Phase.FORWARD, 2 * i + 1) for i in range(3)
    ]
    backward = [Operator("op_backward", 1.0, (2 - i,), (), Phase.BACKWARD, -1) for i in range(3)]
    slots = [SlotUse(SlotKey(2 * i + 1, 0), i, 100, i, 5 - i, 5 - i, held) for i in range(3)]
    blocks = [
        BlockCall(f"blocks.{i}", 2 * i + 1, (i, i + 1), (5 - i, 6 - i), (i - 1,) if i else ())
        for i in range(3)
    ]
    return Profile(6.0, (*forward, *backward), tuple(storages), tuple(slots), tuple(blocks))


FIRST = SlotKey(1, 0)
#: 100 bytes take a second to be written, two to be read, one to the host or back.
SLOW = Hardware(50.0, 100.0, 150.0, 100.0)


def send(after: SlotKey | None, **more: object) -> ActivationPlan:
    return ActivationPlan("hand", {FIRST: Place.NVME}, (Load(after, FIRST),), **more)  # type: ignore[arg-type]


def times(timeline: StepTimeline, channel: str) -> list[tuple[float, float]]:
    return [(move.begin_s, move.end_s) for move in timeline.channels.get(channel, ())]


def test_a_load_that_starts_early_enough_does_not_stall() -> None:
    outcome, timeline = play_in_detail(chain(), send(None), SLOW)
    assert times(timeline, "NVMe write") == [(1.0, 2.0)]
    assert times(timeline, "NVMe read") == [(3.0, 5.0)]
    assert outcome.step_s == 6.0
    assert outcome.peak_nbytes == 300  # x2 and its load beside x1


def test_a_load_that_starts_late_stalls_as_long_as_it_lacks() -> None:
    outcome, timeline = play_in_detail(chain(), send(SlotKey(3, 0)), SLOW)
    assert times(timeline, "NVMe read") == [(4.0, 6.0)]
    assert [(stall.begin_s, stall.end_s, stall.name) for stall in timeline.stalls] == [(5.0, 6.0, "1.0")]
    assert (outcome.step_s, outcome.stall_s, outcome.peak_nbytes) == (7.0, 1.0, 200)


def test_a_slot_that_nobody_loads_ahead_is_loaded_when_backward_asks() -> None:
    outcome = play(chain(), ActivationPlan("hand", {FIRST: Place.NVME}), SLOW)
    assert (outcome.step_s, outcome.stall_s, outcome.nbytes_loaded) == (8.0, 2.0, 100)


def test_starting_a_move_takes_compute_its_time() -> None:
    dear = replace(SLOW, compute_s_per_move=0.125)
    outcome, timeline = play_in_detail(chain(), send(None), dear)
    assert times(timeline, "NVMe write") == [(1.0, 2.0)]
    assert times(timeline, "NVMe read") == [(3.125, 5.125)]  # backward began later, by the store
    assert (outcome.step_s, outcome.stall_s) == (6.25, 0.0)
    assert play(chain(), KEEP, dear).step_s == 6.0


def test_what_is_not_stored_when_backward_asks_is_served_from_memory() -> None:
    crawl = replace(SLOW, write_bytes_per_s=10.0, mixed_bytes_per_s=1e9)
    outcome = play(chain(), ActivationPlan("hand", {FIRST: Place.NVME}), crawl)
    assert (outcome.step_s, outcome.nbytes_stored, outcome.nbytes_loaded) == (6.0, 100, 0)
    assert outcome.peak_nbytes == 300
    both = {FIRST: Place.NVME, SlotKey(3, 0): Place.NVME}
    outcome = play(chain(), ActivationPlan("hand", both), crawl)
    assert outcome.nbytes_stored == 100  # the second had not begun: it was called off


@pytest.mark.parametrize(
    ("wait", "stall"),
    [
        (StoreWait(SlotKey(3, 0), False, SlotKey(1, 0)), (2.0, 3.0)),
        (StoreWait(SlotKey(5, 0), True, SlotKey(3, 0)), (3.0, 5.0)),
    ],
)
def test_a_wait_holds_compute_back_until_all_stores_up_to_a_slot_have_ended(
    wait: StoreWait, stall: tuple[float, float]
) -> None:
    stored = {SlotKey(region, 0): Place.NVME for region in (1, 3)}
    half = replace(SLOW, write_bytes_per_s=50.0)
    _, timeline = play_in_detail(chain(), ActivationPlan("hand", stored, waits=(wait,)), half)
    assert times(timeline, "NVMe write")[:2] == [(1.0, 3.0), (3.0, 5.0)]
    assert (timeline.stalls[0].begin_s, timeline.stalls[0].end_s) == stall


def test_reads_and_writes_together_share_what_the_drive_moves() -> None:
    profile = replace(chain(), traffic=(Traffic(3, 0, 1000),))
    mixed = replace(SLOW, mixed_bytes_per_s=60.0)  # 30 each
    _, timeline = play_in_detail(profile, send(None), mixed)
    assert times(timeline, "NVMe read") == [(3.0, pytest.approx(3 + 100 / 30))]


def test_what_moves_slows_compute_and_what_units_move_does_not() -> None:
    slowed = replace(SLOW, compute_s_per_byte=0.002)
    outcome = play(chain(), send(None), slowed)
    assert outcome.step_s == pytest.approx(6.0 + 200 * 0.002)
    units = replace(chain(), traffic=(Traffic(0, 100, 100),))
    assert play(units, KEEP, slowed).step_s == 6.0


def test_latency_delays_the_first_byte() -> None:
    _, timeline = play_in_detail(chain(), send(None), replace(SLOW, latency_s=0.25))
    assert times(timeline, "NVMe write") == [(1.25, 2.25)]
    assert times(timeline, "NVMe read") == [(3.25, 5.25)]


def test_the_host_has_its_own_channels_and_its_own_peak() -> None:
    plan = ActivationPlan("hand", {FIRST: Place.HOST}, (Load(SlotKey(3, 0), FIRST),))
    outcome, timeline = play_in_detail(chain(), plan, SLOW)
    assert times(timeline, "device to host") == [(1.0, 2.0)]
    assert times(timeline, "host to device") == [(4.0, 5.0)]
    assert (outcome.step_s, outcome.host_peak_nbytes) == (6.0, 100)
    assert (outcome.nbytes_stored, outcome.nbytes_loaded) == (0, 0)


def test_a_recomputed_block_pays_its_forward_and_its_slot_is_gone_meanwhile() -> None:
    outcome, timeline = play_in_detail(chain(), ActivationPlan("hand", recomputed=frozenset({1})), SLOW)
    assert (outcome.step_s, outcome.recompute_s) == (7.0, 1.0)
    assert [(again.begin_s, again.end_s) for again in timeline.recomputed] == [(5.0, 6.0)]
    assert outcome.peak_nbytes == 200  # x0 goes when block 1 has read it, and x2 comes


def test_the_input_of_a_recomputed_block_is_its_slot() -> None:
    plan = ActivationPlan("hand", {SlotKey(3, 0): Place.NVME}, recomputed=frozenset({1, 3}))
    saved = saved_under(chain(), plan)
    # The last block's before all, then x0 when block 3 runs again, which is position 4.
    assert [(each.key, each.end) for each in saved] == [((5, 0), 3), ((3, 0), 4)]
    outcome = play(chain(), plan, SLOW)
    assert outcome.nbytes_stored == outcome.nbytes_loaded == 100
    assert outcome.step_s == 6.0 + 2 + 2  # both blocks again, and the read at the second one's beginning


def test_memory_goes_when_it_is_stored_and_forward_is_done_with_it() -> None:
    reads_both = replace(chain().operators[2], inputs=(0, 1))
    late = replace(chain(), operators=(*chain().operators[:2], reads_both, *chain().operators[3:]))
    plan = send(SlotKey(3, 0))
    assert play(chain(), plan, SLOW).peak_nbytes == 200
    assert play(late, plan, SLOW).peak_nbytes == 300
    assert play(chain(), plan, replace(SLOW, write_bytes_per_s=50.0)).peak_nbytes == 300


def test_the_inputs_of_a_recomputed_block_are_there_when_it_runs_again() -> None:
    plan = ActivationPlan("hand", {FIRST: Place.NVME}, recomputed=frozenset({3}))
    (saved,) = [saved for saved in saved_under(chain(), plan) if saved.key == FIRST]
    assert saved.end == 4  # block 3 reads it before its own backward
    outcome, timeline = play_in_detail(chain(), plan, SLOW)
    assert times(timeline, "NVMe read") == [(4.0, 6.0)]
    assert timeline.recomputed[0].begin_s == 6.0
    assert outcome.step_s == 6.0 + 2 + 1


def test_what_another_block_needs_or_other_code_holds_stays_when_a_block_is_recomputed() -> None:
    def peak(profile: Profile) -> int:
        return play(profile, ActivationPlan("hand", recomputed=frozenset({1})), SLOW).peak_nbytes

    early = replace(chain().slots[0], unpacked_at=4)  # block 3 saved it, too
    assert peak(chain()) == 200
    assert peak(replace(chain(), slots=(early, *chain().slots[1:]))) == 300
    assert peak(replace(chain(), slots=(replace(early, unpacked_at=5, held=True), *chain().slots[1:]))) == 300


def test_an_input_that_nobody_saved_stays_for_the_block_that_is_recomputed() -> None:
    working = replace(chain().storages[0], kind=Kind.WORKING, dies=1)
    profile = replace(chain(), storages=(working, *chain().storages[1:]), slots=chain().slots[1:])
    assert play(profile, KEEP, SLOW).peak_nbytes == 200
    assert play(profile, ActivationPlan("hand", recomputed=frozenset({3})), SLOW).peak_nbytes == 300


def test_a_recomputed_forward_needs_its_working_memory_again() -> None:
    storages = (
        StorageUse("w", 100, Kind.WORKING, 0, 1),
        StorageUse("v", 40, Kind.WORKING, 1, 2),
        StorageUse("x", 100, Kind.ACTIVATION, 2, 4),
    )
    operators = (
        Operator("w", 1.0, (), (0,), Phase.FORWARD, 1),
        Operator("v", 1.0, (0,), (1,), Phase.FORWARD, 1),
        Operator("x", 1.0, (1,), (2,), Phase.FORWARD, 1),
        Operator("head_backward", 1.0, (), (), Phase.BACKWARD, -1),
        Operator("x_backward", 1.0, (2,), (), Phase.BACKWARD, -1),
    )
    slots = (SlotUse(FIRST, 2, 100, 2, 4, 4, False),)
    profile = Profile(5.0, operators, storages, slots, (BlockCall("block", 1, (0, 3), (4, 5), ()),))
    outcome, timeline = play_in_detail(profile, ActivationPlan("hand", recomputed=frozenset({1})), SLOW)
    assert play(profile, KEEP, SLOW).peak_nbytes == 140
    assert outcome.peak_nbytes == 140  # w and v, then v and x
    there = [(sample.at_s, sample.nbytes) for sample in timeline.memory if sample.at_s >= 4.0]
    assert there == [(4.0, 100), (5.0, 140), (7.0, 100), (8.0, 0)]


def test_storing_what_other_code_holds_frees_nothing_and_loads_nothing() -> None:
    outcome = play(chain(held=True), send(None), SLOW)
    assert (outcome.peak_nbytes, outcome.nbytes_stored, outcome.nbytes_loaded) == (300, 100, 0)


def test_a_plan_that_cannot_be_played_says_why() -> None:
    with pytest.raises(ValueError, match=r"slot 7\.0.*another one"):
        play(chain(), ActivationPlan("hand", {SlotKey(7, 0): Place.NVME}), SLOW)
    with pytest.raises(ValueError, match="block 9"):
        play(chain(), ActivationPlan("hand", recomputed=frozenset({9})), SLOW)
    plan = ActivationPlan("hand", {FIRST: Place.HOST})
    with pytest.raises(ValueError, match="device to host, whose bandwidth"):
        play(chain(), plan, replace(SLOW, host_bytes_per_s=0.0))


def test_offloading_a_transformer_halves_its_peak_at_no_cost_where_compute_hides_it() -> None:
    profile = transformer(8)
    kept, sent = (play(profile, plan, hardware(4.0)) for plan in (KEEP, offload(profile)))
    assert sent.peak_nbytes < 0.5 * kept.peak_nbytes
    assert sent.step_s == pytest.approx(kept.step_s)
    again = play(
        profile,
        ActivationPlan("recompute", recomputed=frozenset(b.region for b in profile.blocks)),
        hardware(),
    )
    assert again.peak_nbytes < 0.5 * kept.peak_nbytes
    forward_s = sum(o.time_s for o in profile.operators if o.phase is Phase.FORWARD and o.region % 2)
    assert again.recompute_s == pytest.approx(forward_s)


def test_what_may_wait_to_be_stored_is_what_waits_on_the_drive_that_was_measured() -> None:
    profile = transformer(6)
    made = make_plan(profile, hardware())
    free = replace(made, waits=())
    assert made.places
    assert made.capacity_nbytes is None
    assert play(profile, made, hardware()) == play(profile, free, hardware())
    slow = replace(hardware(), write_bytes_per_s=hardware().write_bytes_per_s / 50)
    waiting = play(profile, made, slow)
    assert waiting.stall_s > 0
    assert waiting.peak_nbytes < play(profile, free, slow).peak_nbytes


def test_what_loses_precision_takes_all_its_bytes_in_host_memory() -> None:
    """There it is as it was: so it does not go where only its code has room."""
    form = CodedForm("2bit", 10, 0.0, 0.0, exact=False)
    coded = replace(chain(), slots=tuple(replace(slot, coded=form) for slot in chain().slots))
    found = lifetimes_of(coded, frozenset())
    for host_nbytes in (99, 100):
        places = places_within(found, Hardware(0.0, 0.0, 0.0, 100.0, host_nbytes=host_nbytes), 0, [0])
        assert (Place.HOST in places.values()) == (host_nbytes == 100)


# --- the parts: queues of transfers, stops, waits ------------------------------------------------

#: A byte per second to write, two to read, both together as fast as alone; a second until the first byte.
MIXED = Hardware(2.0, 1.0, 3.0, 1.0, latency_s=1.0)


def simulated(hardware: Hardware) -> tuple[Simulator, StepTimeline]:
    timeline = StepTimeline()
    lifetimes = lifetimes_of(chain(), frozenset())
    return Simulator(lifetimes, ActivationPlan("hand"), hardware, timeline), timeline


def move(simulator: Simulator, channel: Channel, name: str, nbytes: int) -> Job:
    return simulator._move(channel, channel, nbytes, name, lambda: None)


def pass_all(simulator: Simulator) -> None:
    while simulator._queues.pass_on():
        pass


def test_the_latency_of_a_transfer_passes_while_others_move() -> None:
    simulator, timeline = simulated(MIXED)
    move(simulator, Channel.NVME_WRITE, "0", 3)
    move(simulator, Channel.NVME_WRITE, "1", 2)
    pass_all(simulator)
    assert timeline.channels["NVMe write"] == [(1.0, 4.0, "0"), (4.0, 6.0, "1")]


def test_what_units_move_goes_before_what_is_on_its_way() -> None:
    simulator, timeline = simulated(MIXED)
    move(simulator, Channel.NVME_READ, "0", 4)
    simulator._queues.pass_on()
    assert not simulator._queues.compute(1.0)  # two of the four bytes
    simulator._move_units(Traffic(0, 6, 0))
    pass_all(simulator)
    assert timeline.channels["NVMe read"] == [(2.0, 5.0, "units"), (1.0, 6.0, "0")]


def test_a_transfer_that_waits_for_others_can_be_cancelled_and_the_first_one_cannot() -> None:
    simulator, timeline = simulated(MIXED)
    jobs = [move(simulator, Channel.NVME_WRITE, str(index), 1) for index in range(3)]
    queues = simulator._queues
    assert [queues.cancel(Channel.NVME_WRITE, job) for job in jobs[:2]] == [False, True]
    pass_all(simulator)
    assert [name for _, _, name in timeline.channels["NVMe write"]] == ["0", "2"]


@given(cases())
def test_a_simulation_with_a_timeline_has_the_same_outcome(
    case: tuple[Profile, ActivationPlan, Hardware],
) -> None:
    quick, (detailed, _) = play(*case), play_in_detail(*case)
    assert detailed.step_s == pytest.approx(quick.step_s)
    assert detailed.stall_s == pytest.approx(quick.stall_s, abs=1e-9)
    assert (detailed.nbytes_stored, detailed.nbytes_loaded) == (quick.nbytes_stored, quick.nbytes_loaded)
    assert (detailed.peak_nbytes, detailed.host_peak_nbytes) == (quick.peak_nbytes, quick.host_peak_nbytes)


class CheckedSlot(simulator._Slot):
    """A simulated slot that goes along the edges of the tensor cache's table only."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "state" and isinstance(before := getattr(self, "state", None), SlotState):
            assert value in EDGES[before], f"{before} -> {value}"
        super().__setattr__(name, value)


@given(cases())
def test_simulated_slots_have_the_states_of_the_tensor_cache(
    case: tuple[Profile, ActivationPlan, Hardware],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "_Slot", CheckedSlot)
        checked = play(*case)
    assert checked == play(*case)


def test_waits_keep_a_budget_that_stores_are_too_slow_for() -> None:
    lifetimes, slow = lifetimes_of(transformer(8)), hardware(0.2)
    places = {i: Place.NVME for i, period in enumerate(lifetimes.periods) if period.can_leave}
    capacity = int(least_memory(lifetimes, places).max()) * 3 // 2
    plan = with_loads(lifetimes, places, slow, capacity)
    free = Simulator(lifetimes, plan, slow).run()
    assert free.peak_nbytes > capacity
    bound, outcome = within(lifetimes, plan, slow, capacity)
    assert bound.waits
    assert outcome == Simulator(lifetimes, bound, slow).run()
    assert outcome.peak_nbytes <= capacity
    assert outcome.stall_s > free.stall_s


def test_an_operator_that_stays_is_not_paid_for_again_and_its_bytes_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifetimes, "WATCHED_S", 0.0)
    tape = Tape()
    x = tape.run("start", 1.0, [tape.given(0)], 10, saves_output=True)
    with tape.block("block"):
        dear = tape.run("dear", 8.0, [x], 100, saves=[x])  # which nobody saves
        cheap = tape.run("cheap", 2.0, [dear], 1000, saves_output=True)
        x = tape.run("end", 1.0, [cheap], 10)
    tape.run("loss", 1.0, [tape.run("head", 1.0, [x], 5000)], 0)
    profile, none = tape.finish(), Hardware(0.0, 0.0, 0.0, 0.0)
    whole = ActivationPlan("plan", recomputed=frozenset([1]))
    kept = replace(whole, kept={OperatorKey(1, "dear", 0): 100})
    first, second = (play(profile, each, none) for each in (whole, kept))
    assert first.recompute_s - second.recompute_s == 8.0
    assert second.recompute_s == 3.0
    assert second.peak_nbytes == first.peak_nbytes + 100  # in the head
