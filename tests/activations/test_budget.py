"""``memory.device`` holds units and activations: one budget, kept by a plan, and never a wrong bit."""

import contextlib
import re
import time
from dataclasses import replace

import pytest
import torch

import infinity
from infinity.activations import controller, tensor_cache
from infinity.activations.controller import METERED, PROFILED
from infinity.activations.profiler import Profiler
from infinity.activations.store import open_stores
from infinity.activations.tensor_cache import StoreQueue
from infinity.core.nbytes import Transfer
from infinity.core.plan import Hardware
from infinity.engine import runtime as runtime_module
from infinity.planner.search import plan as make_plan
from infinity.recipes.models import GPT, GPTConfig
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.profiles import smallest_budget
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, assert_bitwise, build, optimizer_for, reference, streaming

STEPS = METERED + 2

LEAST_NBYTES = 8 * 2**10


#: What is measured on a busy machine may say that nothing is worth storing.
FAST = Hardware(1e10, 1e10, 1e10, 0.0)


@pytest.fixture(autouse=True, scope="module")
def _small_slots():
    """Small models have small activations; the drive is fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_cache, "LEAST_NBYTES", LEAST_NBYTES)
        patch.setattr(runtime_module, "measure_hardware", lambda *args: FAST)
        yield


def factory():
    """Four blocks; 256 tokens make activations of 16 KiB to 64 KiB."""
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=96, seq_len=32, n_layers=4, d_model=64, n_heads=2)).train()


def batch(step, rank=0, world=1):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(96, (8 // world, 33), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


def steps(overrides, count=STEPS, *, lag=True, trained=None):
    """The activations of a runtime after some steps, and what its units need (bytes)."""
    model = build(factory, "bf16", overrides)
    optimizer = optimizer_for(model, Rule())
    try:
        for step in range(count):
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            if not lag:
                optimizer.synchronize()
            if trained is not None:
                trained.losses.append(loss.item())
                trained.norms.append(optimizer.grad_norm)
        if trained is not None:
            trained.weights = infinity.state_dict(model)
        return optimizer.runtime.activations, optimizer.runtime.executor().budget.division
    finally:
        optimizer.close()


@pytest.fixture(scope="module")
def measured(_small_slots, tmp_path_factory):
    """Peak of what a step makes when all is kept, the least that a plan can do, and what units need."""
    activations, division = steps(
        streaming(tmp_path_factory.mktemp("measured"), "memory.activations=plan"), PROFILED + 2
    )
    planning = activations.planning
    return planning.kept.peak_nbytes, smallest_budget(planning.profile, planning.hardware), division.least


# 1: no move is worth a second of a CPU, so everything that does not fit is recomputed
@pytest.mark.parametrize("per_move_s", [0.0, 1.0])
def test_a_budget_that_cannot_keep_everything_is_kept_and_changes_no_bit(
    tmp_path, measured, monkeypatch, per_move_s
):
    def plan(profile, hardware, capacity_nbytes):
        return make_plan(profile, replace(hardware, compute_s_per_move=per_move_s), capacity_nbytes)

    monkeypatch.setattr(controller, "make_plan", plan)
    kept, least, units = measured
    assert least < kept
    activations_nbytes = (kept + least) // 2
    overrides = streaming(tmp_path, f"memory.device={units + activations_nbytes}", "memory.activations=plan")
    trained = Trained()
    activations, division = steps(overrides, trained=trained)
    assert bool(activations.planning.plan.places) is not bool(per_move_s)
    assert activations.planning.predicted.peak_nbytes <= activations_nbytes
    assert activations.metered_nbytes <= activations_nbytes
    assert division.total + activations.metered_nbytes <= units + activations_nbytes
    assert_bitwise(trained, reference(factory, batch, steps=STEPS))


class LateEngine:
    """An engine whose writes end as late as possible: when the training thread waits for one."""

    def __init__(self, engine):
        self.name, self.read, self._engine, self._held = engine.name, engine.read, engine, []

    def write(self, extent, memory):
        late = Transfer()
        self._held.append((late, self._engine.write(extent, memory)))
        return late

    def end(self):
        while self._held:
            late, write = self._held.pop()
            late.run(write.wait)


# 0: the least that a plan can do, to the byte
@pytest.mark.parametrize("share", few((0.0,), (0.0, 0.5)))
def test_stores_that_end_as_late_as_possible_take_nothing_beyond_the_budget(
    tmp_path, measured, monkeypatch, share
):
    kept, least, units = measured
    device_nbytes = units + int(least + share * (kept - least))
    overrides = streaming(tmp_path, f"memory.device={device_nbytes}", "memory.activations=plan")
    engines = []

    def open_late(device, pool, piece_nbytes, volume, engine):
        engines.append(LateEngine(engine))
        return open_stores(device, pool, piece_nbytes, volume, engines[-1])

    def ending_first(wait):
        return lambda queue, *args: (engines[-1].end(), wait(queue, *args))[1]

    monkeypatch.setattr(runtime_module, "open_stores", open_late)
    for name in ("wait_until", "drain"):
        monkeypatch.setattr(StoreQueue, name, ending_first(getattr(StoreQueue, name)))
    activations, division = steps(overrides)
    assert division.total + activations.metered_nbytes <= device_nbytes
    assert activations.planning.plan.waits


def test_a_budget_alone_is_enough_to_be_planned_for():
    for given, policy in (("memory.device=1GiB", "plan"), ("memory.host=1GiB", "keep")):
        with infinity.Init(infinity.load_recipe(overrides=[given])) as init:
            assert init.runtime.activations.policy == policy
        init.runtime.close()


@pytest.mark.slow
def test_a_budget_that_no_plan_meets_is_an_error_that_says_which_one_is(tmp_path, measured):
    _, least, units = measured
    overrides = streaming(tmp_path, f"memory.device={units + least // 2}", "memory.activations=plan")
    with pytest.raises(infinity.BudgetError, match=r"memory.device is .* for units, and") as refused:
        steps(overrides)
    assert "because of operator" in str(refused.value)
    [said] = re.findall(r"at least .*?\((\d+) bytes\)", str(refused.value))
    assert int(said) == pytest.approx(units + least, rel=0.05)
    activations, division = steps(streaming(tmp_path, f"memory.device={said}", "memory.activations=plan"))
    assert division.total + activations.metered_nbytes <= int(said)
    with pytest.raises(infinity.BudgetError, match=said):
        steps(streaming(tmp_path, f"memory.device={int(said) - 1}", "memory.activations=plan"))


@pytest.mark.slow
def test_every_run_packs_the_same_slots(tmp_path):
    """Else a plan, which names them, would be another run's on every rank but the first."""
    overrides = streaming(tmp_path, "memory.activations=plan")
    runs = [steps(overrides, PROFILED + 2)[0].planning.profile for _ in range(2)]
    first, second = ([(slot.key, slot.nbytes) for slot in profile.slots] for profile in runs)
    assert first == second


@pytest.mark.slow
def test_recording_does_not_make_the_predicted_step_longer(tmp_path, monkeypatch):
    """The profiled pass is slowed by 0.3 s; the passes before it tell how long the step takes."""
    packed, later_s, clock = Profiler.packed, [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later_s[0])

    def slowly(profiler, *marked):
        later_s[0] += 0.01
        packed(profiler, *marked)

    monkeypatch.setattr(Profiler, "packed", slowly)
    monkeypatch.setattr(Profiler, "paused", lambda self: contextlib.nullcontext())
    activations, _ = steps(streaming(tmp_path, "memory.activations=plan"), PROFILED + 2)
    *_, before, recorded, _ = activations.passes.ended
    assert recorded.number == PROFILED
    assert recorded.time_s > 0.3
    kept_s = activations.planning.kept.step_s
    assert kept_s <= before.time_s
    assert kept_s < recorded.time_s


def test_a_slow_drive_does_not_make_the_predicted_step_vanish(tmp_path, monkeypatch):
    """Where bytes are said to cost more than the passes took, half of their time is left."""
    costly = replace(FAST, compute_s_per_byte=1.0)
    monkeypatch.setattr(runtime_module, "measure_hardware", lambda *args: costly)
    activations, _ = steps(streaming(tmp_path, "memory.activations=plan"), PROFILED + 2)
    profile, recorded = activations.planning.profile, activations.passes.ended[PROFILED]
    assert 0.0 < profile.step_s <= recorded.time_s
    assert 0.0 < sum(operator.time_s for operator in profile.operators) <= 1.001 * profile.step_s


@pytest.mark.slow
def test_what_a_plan_does_not_need_is_left_to_units(tmp_path, measured):
    kept, _, units = measured
    device = 20 * (units + kept)
    activations, division = steps(streaming(tmp_path, f"memory.device={device}", "memory.activations=plan"))
    assert activations.planning.plan.places == {}
    assert units < division.total <= device - activations.planning.predicted.peak_nbytes


def test_ranks_play_one_plan(tmp_path, measured):
    _, least, units = measured
    overrides = streaming(tmp_path, f"memory.device={2 * units + least + 40_000}", "memory.activations=plan")
    ranks = run_ranks(_plan_of_rank, 2, overrides)
    assert ranks[0] == ranks[1]


@pytest.mark.slow
def test_a_budget_that_no_plan_meets_is_the_same_error_on_every_rank(tmp_path, measured):
    _, least, units = measured
    overrides = streaming(tmp_path, f"memory.device={2 * units + least // 2}", "memory.activations=plan")
    ranks = run_ranks(_refusal_of_rank, 2, overrides)
    assert ranks[0] == ranks[1]
    assert "at least" in ranks[0]


def _refusal_of_rank(overrides):
    tensor_cache.LEAST_NBYTES = LEAST_NBYTES
    with pytest.raises(infinity.BudgetError) as refused:
        steps(overrides)
    return str(refused.value)


def _plan_of_rank(overrides):
    tensor_cache.LEAST_NBYTES = LEAST_NBYTES
    activations, _ = steps(overrides, PROFILED + 2)
    return activations.planning.plan.to_json()


@pytest.mark.slow
def test_a_profile_has_what_units_move_beside_activations(tmp_path):
    activations, _ = steps(streaming(tmp_path, "memory.activations=plan"), PROFILED + 2, lag=False)
    traffic = activations.planning.profile.traffic
    # A step writes 12 bytes a parameter and reads up to 16; some updates may be rolled back.
    numel = factory().config.numel
    assert 6 * numel <= sum(each.nbytes_written for each in traffic) <= (18 + 12) * numel
    assert 6 * numel <= sum(each.nbytes_read for each in traffic) <= (22 + 12) * numel
