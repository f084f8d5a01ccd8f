"""Policies of other systems: each keeps its budget or says that it cannot, and does what its paper says."""

from dataclasses import replace

import pytest

from infinity.core.plan import ActivationPlan, Hardware, Phase, Place, Profile
from infinity.planner.lifetimes import lifetimes_of, memory
from infinity.planner.search import simple_plan
from infinity.planner.simulator import play
from tests.helpers.profiles import MIB, Tape, budget_between, hardware, transformer
from tests.helpers.scripts import script

pytest.importorskip("scipy", reason="an extra: bound")
with script("rivals") as rivals, script("replay") as replay:
    pass

#: A link that moves a step's activations in the time of forward, and a drive of a quarter of that.
LINKED = replace(hardware(0.5), host_bytes_per_s=2.0 * 2**30, host_nbytes=2**40)


def chain(layers: int = 4, *, name: str = "convolution", nbytes: int = MIB) -> Profile:
    """A heavy layer and two light ones, ``layers`` times; the light ones save what they make."""
    tape = Tape()
    x = tape.given(nbytes)
    for layer in range(layers):
        with tape.block(f"layers.{layer}"):
            x = tape.run(name, 0.010, [x], nbytes, saves=[x], saves_output=True)
            x = tape.run("relu", 0.001, [x], nbytes, saves_output=True)
            x = tape.run("max_pool", 0.001, [x], nbytes, saves_output=True)
    return tape.finish()


SEARCHING = ("Checkmate", "SwapAdvisor")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SEARCHING else ()) for n in rivals.BUDGETED]
)
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_each_policy_keeps_its_budget_or_says_that_it_cannot(name: str, share: float) -> None:
    profile = transformer(4)
    capacity = budget_between(profile, LINKED, share)
    try:
        choice = rivals.BUDGETED[name](profile, LINKED, capacity)
    except rivals.CannotError:
        return
    peak = play(*choice, LINKED).peak_nbytes
    # What its rule leaves nothing else to do for, it takes; nothing that could still leave stays.
    if peak > capacity:
        assert name in ("SuperNeurons", "vDNN dynamic")
        assert peak < play(profile, ActivationPlan("keep"), LINKED).peak_nbytes


def test_a_replay_of_whole_blocks_has_the_peak_and_time_of_recomputing_them() -> None:
    profile = transformer(6)
    inputs = {s for block in profile.blocks for s in block.inputs}
    regions = {block.region for block in profile.blocks}
    slots = replay.droppable(profile)
    dropped = [s for s, slot in slots.items() if slot.key.region in regions and s not in inputs]
    again = play(replay.replayed(profile, dropped), ActivationPlan("replay"), hardware())
    blocks = play(profile, simple_plan("recompute", profile, hardware()), hardware())
    assert again.peak_nbytes == blocks.peak_nbytes
    # What a block makes after its last saved storage need not run again.
    assert 0.8 * blocks.recompute_s < again.step_s - profile.step_s <= blocks.recompute_s * (1 + 1e-9)


def test_a_replay_makes_a_dropped_storage_from_what_is_saved_and_frees_it_in_between() -> None:
    profile = chain(3)
    relu = next(o.outputs[0] for o in profile.operators if o.name == "relu")
    step = replay.replayed(profile, [relu])
    names = [operator.name for operator in step.operators]
    assert names.count("replayed relu") == 1  # from the output of the convolution, which is saved
    assert names[names.index("replayed relu") + 1] == "relu_backward"
    assert step.step_s == pytest.approx(profile.step_s + 0.001)
    first_backward = next(at for at, o in enumerate(step.operators) if o.phase is Phase.BACKWARD)
    assert memory(step)[first_backward] == memory(profile)[first_backward] - MIB


def test_a_dropped_storage_that_nothing_replays_is_an_error() -> None:
    profile = chain(2)
    relu = next(o.outputs[0] for o in profile.operators if o.name == "relu")
    with pytest.raises(ValueError, match=r"relu_backward needs relu.1, which was dropped"):
        replay.with_runs(profile, [relu], [])


def test_vdnn_waits_for_each_layers_offload_and_conv_moves_only_inputs_of_convolutions() -> None:
    profile = chain(4)
    slow = replace(LINKED, host_bytes_per_s=float(50 * MIB))  # 20 ms for each storage, 10 of a convolution
    all_, conv = (policy(profile, slow, 0) for policy in (rivals.vdnn_all, rivals.vdnn_conv))
    slots = {slot.key: slot.storage for slot in profile.slots}
    read = {s for o in profile.operators if o.name == "convolution" for s in o.inputs}
    assert conv.plan.places
    assert {slots[key] for key in conv.plan.places} <= read
    assert len(all_.plan.places) > len(conv.plan.places)
    moved_s = len(all_.plan.places) * MIB / slow.host_bytes_per_s
    assert play(*all_, slow).stall_s > 0.5 * moved_s  # it hides at most a layer


def test_chen_keeps_a_checkpoint_for_each_root_of_the_blocks_and_replays_all_but_the_last_segment() -> None:
    profile = chain(9)
    step = rivals.chen(profile, LINKED, 0).profile
    replays = [operator.name for operator in step.operators if operator.name.startswith("replayed")]
    assert replays.count("replayed convolution") == 6  # of nine, in segments of three
    # The last pooling of a segment is the checkpoint of the next one.
    assert replays.count("replayed max_pool") == 4
    assert memory(step).max() < 0.7 * memory(profile).max()


def test_superneurons_replays_light_layers_and_never_a_convolution() -> None:
    profile = chain(4)
    names = [o.name for o in rivals.superneurons(profile, LINKED, 2**40).profile.operators]
    assert "replayed relu" in names
    assert "replayed convolution" not in names


def test_flashneuron_stores_from_the_first_on_and_codes_only_what_is_sparse() -> None:
    profile = chain(6)
    channels = Hardware(*(3 * [float(100 * MIB)]), 0.0)  # 10 ms each: late
    capacity = int(0.5 * memory(profile).max())
    plain = rivals.flashneuron(profile, channels, capacity)
    order = [p.key for p in sorted(lifetimes_of(profile).periods, key=lambda p: p.key) if p.is_worth_storing]
    assert sorted(plain.plan.places) == order[: len(plain.plan.places)]
    coded = rivals.flashneuron_coded(profile, channels, capacity)
    moved, less = (play(*choice, channels) for choice in (plain, coded))
    assert less.step_s < moved.step_s
    assert less.nbytes_stored < moved.nbytes_stored
    assert less.peak_nbytes <= capacity


def test_capuchin_swaps_what_is_free_long_enough_and_replays_what_a_slow_link_would_delay() -> None:
    profile = chain(5)
    capacity = int(0.6 * memory(profile).max())
    fast, slow = (replace(LINKED, host_bytes_per_s=float(rate * MIB)) for rate in (10_000, 5))
    assert rivals.capuchin(profile, fast, capacity).profile is profile
    names = [o.name for o in rivals.capuchin(profile, slow, capacity).profile.operators]
    assert any(name.startswith("replayed") for name in names)
    assert "replayed convolution" not in names  # it frees the fewest bytes a second


def test_teraio_fills_the_drive_first_and_the_host_when_that_is_saturated() -> None:
    profile = transformer(8)
    capacity = budget_between(profile, LINKED, 0.3)
    fast = replace(LINKED, read_bytes_per_s=1e12, write_bytes_per_s=1e12, mixed_bytes_per_s=2e12)
    assert set(rivals.teraio(profile, fast, capacity).plan.places.values()) == {Place.NVME}
    assert set(rivals.teraio(profile, LINKED, capacity).plan.places.values()) == {Place.NVME, Place.HOST}


@pytest.mark.slow
def test_checkmate_replays_the_cheap_half_and_is_never_slower_than_recomputing_blocks() -> None:
    profile = chain(3)
    recomputed = play(profile, simple_plan("recompute", profile, LINKED), LINKED)
    step = rivals.checkmate_plan(profile, LINKED, recomputed.peak_nbytes).profile
    assert step.step_s <= recomputed.step_s * (1 + 1e-9)
    half = rivals.checkmate_plan(profile, LINKED, (recomputed.peak_nbytes + int(memory(profile).max())) // 2)
    assert profile.step_s < half.profile.step_s < step.step_s
    with pytest.raises(rivals.CannotError, match="no schedule keeps the budget"):
        rivals.checkmate_plan(profile, LINKED, MIB)


def test_selective_recomputation_wants_attention() -> None:
    with pytest.raises(rivals.CannotError, match="no attention"):
        rivals.selective(chain(2), LINKED, 0)


def test_operators_of_a_name_and_size_take_their_median() -> None:
    profile = chain(3)
    late = [replace(o, time_s=1.0) if at == 3 else o for at, o in enumerate(profile.operators)]
    found = replay.steadied(replace(profile, operators=tuple(late)))
    assert found.operators == profile.operators
    assert found.step_s == pytest.approx(profile.step_s)
