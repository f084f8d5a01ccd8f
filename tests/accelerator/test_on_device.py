"""States in accelerator memory: where they are, and all that needs their values in host memory meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.core.errors import StateError
from infinity.core.nbytes import aligned
from infinity.device.accelerator import cached_nbytes
from infinity.engine.executor import StepExecutor
from infinity.engine.runtime import runtime_of
from infinity.optim import rule as update_rule
from infinity.optim.rules import HostRule
from infinity.optim.state import BLOCK_NUMEL
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.limits import comes_true
from tests.helpers.reference import Rule
from tests.helpers.saves import held
from tests.helpers.training import optimizer_for

harness = pytest.importorskip("tests.accelerator.harness")

ALL = ("memory.device=64MiB",)
#: Two units fit.
PART = ("memory.device=512KiB",)
SCHEDULES = (("eager", 0), ("random", 1))


def executor_of(model: nn.Module) -> StepExecutor:
    return runtime_of(model).executor()


def make(overrides: list[str], seed: int = 1, clip: float | None = 1.0) -> tuple[nn.Module, infinity.AdamW]:
    model = training.build(models.build("llama", seed=seed)[0], "bf16", overrides)
    return model, optimizer_for(model, Rule(max_grad_norm=clip))


def steps(model: nn.Module, optimizer: infinity.AdamW, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = model(**harness.batch_of(harness.Scenario(), number)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: infinity.AdamW) -> dict[str, Tensor]:
    """Every weight and every moment."""
    found = dict(infinity.state_dict(model))
    for key, fields in optimizer.state_dict()["state"].items():
        found |= {f"{key} {name}": torch.as_tensor(value) for name, value in fields.items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def begin(schedule: str = "eager", seed: int = 0) -> Any:
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    simulator.reset(schedule, seed)
    torch.manual_seed(7)
    return simulator


def run(body: Callable[..., Any], *args: Any) -> Any:
    """What ``body`` returns in a process whose accelerator is the simulated one."""
    harness.needs_simulator()
    [found] = run_ranks(body, 1, *args, group=False)
    return found


# --- where they are --------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[int]]:
    """Inside the context: the elements of each update on the CPU."""
    updated, update = [], HostRule.update

    def counting(self: HostRule, weight: Tensor, *args: Any) -> None:
        updated.append(weight.numel())
        update(self, weight, *args)

    HostRule.update = counting  # type: ignore[method-assign]
    try:
        yield updated
    finally:
        HostRule.update = update  # type: ignore[method-assign]


#: Overrides of the recipe, by what they say about states on the device.
BUDGETS = {
    "all": ALL,
    "after a step": (),
    "in part": PART,
    "none wanted": ("memory.updates=host",),
    "no room": ("memory.device=64KiB",),
}


def places() -> dict[str, dict[str, Any]]:
    begin()
    return {name: place(more) for name, more in BUDGETS.items()}


def place(more: tuple[str, ...]) -> dict[str, Any]:
    """After two steps: which units are on the device, and what the host has to do with the others."""
    model, optimizer = make(["memory.host=64MiB", *more])
    steps(model, optimizer, range(1))
    optimizer.synchronize()
    with counted() as updated:
        steps(model, optimizer, range(1, 2))
        optimizer.synchronize()
    executor = executor_of(model)
    on_device, units = executor.tiers.on_device, executor.units
    assert on_device is not None
    assert executor.host is not None
    on_cpu = [unit for unit in units if unit.home.there is None]
    # between two parameters of a run there may be padding, as each begins on a block
    sizes = [s.numel for unit in on_cpu for s in unit.segments]
    numel, padded = sum(sizes), sum(aligned(size, BLOCK_NUMEL) for size in sizes)
    found = {
        "here": [unit.home.there is not None for unit in units],
        "on the cpu": numel <= sum(updated) <= padded,
        "gradients in host memory": executor.host.gradients.peak_nbytes,
        "states": on_device.pool.leased_nbytes,
        "most": on_device.pool.capacity_nbytes,
        "total": sum(pool.capacity_nbytes for pool in executor.device_pools),
        "budget": executor.budget.division.total,
        "peak": optimizer.report(loss=0.0, tokens=1).peak_nbytes["device"],
    }
    optimizer.close()
    return found


@pytest.fixture(scope="module")
def placed() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run(places)
    return found


def test_states_are_on_the_device_where_it_has_room_and_are_updated_there(placed: dict[str, dict[str, Any]]):
    found = placed["all"]
    assert all(found["here"])
    assert found["on the cpu"]
    assert found["gradients in host memory"] == 0
    assert found["states"] == found["most"]
    assert found["peak"] <= found["budget"]


def test_without_a_budget_of_the_recipe_states_come_to_the_device_after_the_first_step(
    placed: dict[str, dict[str, Any]],
):
    found = placed["after a step"]
    assert all(found["here"])
    assert found["on the cpu"]
    assert found["gradients in host memory"] > 0  # of the first step
    assert found["peak"] <= found["budget"]


def test_as_many_units_as_fit_are_on_the_device_and_the_others_in_host_memory(
    placed: dict[str, dict[str, Any]],
):
    found = placed["in part"]
    assert found["here"][0]  # backward comes to it last
    assert 0 < sum(found["here"]) < len(found["here"])
    assert found["on the cpu"]
    assert found["gradients in host memory"] > 0
    assert found["states"] == found["most"]
    assert found["total"] < found["budget"] == 512 * 1024
    assert found["peak"] <= found["budget"]


def left_by_a_step(spare_nbytes: int) -> tuple[int, int]:
    """Cached bytes after a step that left as many again, and what pools may still take, free; units there."""
    from infinity.engine import executor as module

    begin()
    model, optimizer = make(["memory.host=64MiB"])
    executor, cached = executor_of(model), []

    def free(device: torch.device) -> tuple[int, int]:
        pool = executor.device_pool
        cached.append(cached_nbytes(device))
        return cached[-1] + pool.capacity_nbytes - pool.leased_nbytes - pool.kept_nbytes + spare_nbytes, 16

    module.memory_nbytes = free
    steps(model, optimizer, range(2))
    there = executor.tiers.on_device.elsewhere(frozenset())
    optimizer.close()
    return cached[0], len(there)


@pytest.mark.slow
@pytest.mark.parametrize("spare_nbytes", few((0,), (0, 512 * 1024)))
def test_what_activations_took_and_pools_may_take_stays_free_of_states(spare_nbytes: int):
    cached, there = run(left_by_a_step, spare_nbytes)
    assert cached > 0
    assert bool(there) == bool(spare_nbytes)


@pytest.mark.parametrize("why", ["none wanted", "no room"])
def test_states_stay_in_host_memory_if_the_recipe_says_so_or_there_is_no_room(
    placed: dict[str, dict[str, Any]], why: str
):
    found = placed[why]
    assert not any(found["here"])
    assert found["on the cpu"]
    assert found["most"] == 0


# --- what needs their values in host memory --------------------------------------------------


def interrupted(folder: str, schedule: str, seed: int) -> tuple[list[str], bool, list[int]]:
    """Races; whether a run that was interrupted twice has the bits of one that was not; where it went on."""
    simulator = begin(schedule, seed)
    whole = ["memory.host=64MiB", "memory.updates=host"]
    model, optimizer = make(whole)
    losses = steps(model, optimizer, range(6))
    final = state(model, optimizer)
    optimizer.close()
    named = [f"memory.nvme=[{folder}]", "memory.host=64MiB", "memory.engine=threads", "run.name=mine"]
    again, went_on = [], []
    for stop, more in ((2, PART), (4, ALL), (6, PART)):
        model, optimizer = make([*named, "durability.every=1", *more], seed=1 if stop == 2 else 99)
        went_on.append(infinity.resume(model, optimizer))
        again += steps(model, optimizer, range(went_on[-1], stop))
        assert executor_of(model).tiers.on_device.elsewhere(frozenset())
        ended = state(model, optimizer) if stop == 6 else {}
        infinity.close(model, keep=stop < 6)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return [*simulator.races, *simulator.early], again == losses and same(ended, final), went_on


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [SCHEDULES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SCHEDULES[1:])],
)
def test_a_run_whose_states_are_on_the_device_goes_on_after_every_step(
    tmp_path: Path, schedule: str, seed: int
):
    assert run(interrupted, str(tmp_path), schedule, seed) == ([], True, [0, 2, 4])


@pytest.mark.slow
def test_a_run_of_two_ranks_whose_states_are_on_the_device_goes_on_after_every_step(tmp_path: Path):
    harness.needs_simulator()
    found = run_ranks(interrupted, 2, str(tmp_path), "random", 3, group=False)
    assert found == [([], True, [0, 2, 4])] * 2


def saved(folder: str, named: bool) -> tuple[list[str], bool]:
    """Races, and whether a checkpoint that was written beside later steps has the values of its own step."""
    simulator = begin("random", 3)
    place = ["memory.host=64MiB", *PART]
    if named:
        place += [f"memory.nvme=[{folder}/nvme]", "memory.engine=threads", "run.name=mine"]
        place += ["durability.every=1"]
        Path(folder, "nvme").mkdir()
    model, optimizer = make(place)
    steps(model, optimizer, range(2))
    with pytest.MonkeyPatch.context() as patch, held(patch) as opened:
        save = infinity.save_checkpoint(model, optimizer, Path(folder, "saved"), background=True)
        steps(model, optimizer, range(2, 3))
        opened.set()
        steps(model, optimizer, range(3, 5))
        save.wait()
    optimizer.close()
    model, optimizer = make(["memory.host=64MiB", "memory.updates=host"])
    steps(model, optimizer, range(2))
    expected = state(model, optimizer)
    optimizer.close()
    model, optimizer = make(["memory.host=64MiB"], seed=5)
    infinity.load_checkpoint(model, optimizer, Path(folder, "saved"))
    right = same(state(model, optimizer), expected)
    optimizer.close()
    return [*simulator.races, *simulator.early], right


@pytest.mark.slow
@pytest.mark.parametrize("named", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_is_written_beside_training_from_states_on_the_device(tmp_path: Path, named: bool):
    assert run(saved, str(tmp_path), named) == ([], True)


def played(overrides: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Weights read and written between steps, a step skipped, one forgotten, a layer thawed."""
    model, optimizer = make(overrides)
    layers: Any = model.get_submodule("model.layers")
    layers[0].requires_grad_(False)
    losses = steps(model, optimizer, range(2))
    with infinity.gathered(layers[1].parameters(), modify=True), torch.no_grad():
        for param in layers[1].parameters():
            param.mul_(1.5)
    losses += steps(model, optimizer, range(2, 4))
    loss = model(**harness.batch_of(harness.Scenario(), 4)).loss
    (loss * float("inf")).backward()
    optimizer.step()
    assert optimizer.skipped
    model(**harness.batch_of(harness.Scenario(), 5)).loss.backward()
    optimizer.zero_grad()
    layers[0].requires_grad_(True)
    losses += steps(model, optimizer, range(6, 8))
    weights = {name: value.clone() for name, value in infinity.state_dict(model).items()}
    losses += steps(model, optimizer, range(8, 9))
    model.load_state_dict(weights)
    losses += steps(model, optimizer, range(9, 11))
    final = state(model, optimizer)
    optimizer.close()
    return losses, final


def play_both(more: tuple[str, ...]) -> tuple[list[str], bool]:
    simulator = begin("random", 5)
    losses, final = played(["memory.host=64MiB", *more])
    races = [*simulator.races, *simulator.early]
    expected_losses, expected = played(["memory.host=64MiB", "memory.updates=host"])
    return races, losses == expected_losses and same(final, expected)


@pytest.mark.parametrize("more", [PART, *(pytest.param(more, marks=pytest.mark.slow) for more in ((), ALL))])
def test_weights_are_read_and_written_between_steps_and_steps_are_skipped(more: tuple[str, ...]):
    assert run(play_both, more) == ([], True)


def accumulating() -> tuple[int, int, bool]:
    """Units on the device before and with gradients that wait for micro-batches; whether bits are right."""
    begin()
    counts, finals = [], []
    for more in (PART, ("memory.updates=host",)):
        model, optimizer = make(["memory.host=64MiB", *more])
        steps(model, optimizer, range(2))
        on_device = executor_of(model).tiers.on_device
        counts.append(len(on_device.elsewhere(frozenset())))
        for number in range(2, 6):
            with infinity.no_sync(model):
                model(**harness.batch_of(harness.Scenario(), number)).loss.backward()
            steps(model, optimizer, range(number, number + 1))
            counts.append(len(on_device.elsewhere(frozenset())))
        finals.append(state(model, optimizer))
        optimizer.close()
    return counts[0], counts[4], same(*finals)


@pytest.mark.slow
def test_units_leave_the_device_for_gradients_that_need_the_room():
    before, after, right = run(accumulating)
    assert before > after >= 0
    assert right


def through_all_blocks() -> tuple[int, int, bool]:
    """Units on the device before and after a window for all blocks is wanted; whether bits are right."""
    begin()
    counts, finals = [], []
    for more in ((), ("memory.updates=host",)):
        model, optimizer = make(["memory.host=64MiB", *PART, *more], clip=None)
        steps(model, optimizer, range(2))
        executor = executor_of(model)
        counts.append(len(executor.tiers.on_device.elsewhere(frozenset())))
        executor.hold_blocks([{unit.index for unit in executor.units}], [], "all of them")
        steps(model, optimizer, range(2, 4))
        counts.append(len(executor.tiers.on_device.elsewhere(frozenset())))
        finals.append(state(model, optimizer))
        optimizer.close()
    return counts[0], counts[1], same(*finals)


@pytest.mark.slow
def test_states_give_way_to_a_window_that_a_layer_schedule_needs():
    before, after, right = run(through_all_blocks)
    assert before > after == 0
    assert right


def take_from_device(executor: Any) -> None:
    """Let all units leave the device at the next forward pass; a copy of one waits until they have left."""
    budget, on_device, prefetcher = executor.budget, executor.tiers.on_device, executor.prefetcher
    gate, leave, forget = threading.Event(), on_device.leave, prefetcher.forget
    prefetcher.forget()
    executor.mover.staging.upload(gate.wait)
    prefetcher.begin_inference(visit=True)
    unit = executor.units[0].index
    prefetcher.residents.add(unit, prefetcher.nbytes[unit])
    prefetcher.mover.start(unit)

    def left(index: int) -> None:
        leased_nbytes = on_device.pool.leased_nbytes
        leave(index)
        assert comes_true(lambda: on_device.pool.leased_nbytes < leased_nbytes)
        gate.set()

    def forgotten(units: Any = None) -> None:
        gate.set()
        forget(units)

    on_device.leave, prefetcher.forget = left, forgotten
    budget.division = replace(budget.division, on_device=())


def leaving_while_copied() -> bool:
    """Whether bits are right when units leave the device whose next copies have been asked for."""
    begin()
    finals = []
    for more in (ALL, ("memory.updates=host",)):
        model, optimizer = make(["memory.host=64MiB", *more])
        steps(model, optimizer, range(2))
        if more == ALL:
            take_from_device(executor_of(model))
        steps(model, optimizer, range(2, 4))
        assert not executor_of(model).tiers.on_device.elsewhere(frozenset())
        finals.append(state(model, optimizer))
        optimizer.close()
    return same(*finals)


def test_units_leave_the_device_whose_next_copies_have_been_asked_for():
    assert run(leaving_while_copied)


def failing(where: str) -> tuple[str, bool]:
    """The error of an update on the device, as training meets it; whether every update has ended."""
    begin()
    model, optimizer = make(["memory.host=64MiB", *ALL])
    steps(model, optimizer, range(2 if where != "lease" else 0))
    executor = executor_of(model)

    def fail(*args: Any, **options: Any) -> None:
        raise StateError("no update")

    if where == "lease":
        executor.tiers.on_device.pool.make = fail
    else:
        update_rule.Rule.update_on_device = fail  # type: ignore[method-assign]
    with pytest.raises(StateError) as raised:
        steps(model, optimizer, range(2, 6))
    updates = [unit.home.updating for unit in executor.units if unit.home.updating is not None]
    ended = comes_true(lambda: all(update.done() for update in updates))
    infinity.close(model)
    return str(raised.value), ended


@pytest.mark.parametrize("where", few(("update",), ("lease", "update")))
def test_an_update_that_fails_on_the_device_ends_training_with_its_error(where: str):
    error, ended = run(failing, where)
    assert "no update" in error
    assert ended


def busy_threads() -> list[set[str]]:
    """By step: the pools of threads that were given work in it."""
    from concurrent.futures import ThreadPoolExecutor

    begin()
    submit, found = ThreadPoolExecutor.submit, list[set[str]]()

    def seen(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        found[-1].add(pool._thread_name_prefix)
        return submit(pool, *args, **kwargs)

    ThreadPoolExecutor.submit = seen  # type: ignore[method-assign]
    model, optimizer = make([*harness.HOST[:1], *ALL])
    for number in range(5):
        found.append(set())
        steps(model, optimizer, range(number, number + 1))
    found.append(set())
    optimizer.close()
    return found[:-1]


def test_with_all_states_on_the_device_no_thread_competes_with_the_one_that_computes() -> None:
    first, *_, last = run(busy_threads)
    assert "infinity-device-update" in first  # which brings the states there
    assert last == set()


def averaged() -> dict[str, bool]:
    begin("random", 3)
    model = training.build(models.build("llama", seed=1)[0], "bf16", ["memory.host=64MiB", *PART])
    optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0, ema=0.5)
    steps(model, optimizer, range(2))
    before, inside = state(model, optimizer), dict[str, Tensor]()
    average = {
        name: (fields["master"] + fields["ema_offset"]).bfloat16()
        for name, fields in zip(dict(model.named_parameters()), optimizer.state_dict()["state"].values())
    }
    on_device = executor_of(model).tiers.on_device
    assert on_device is not None
    were = on_device.pool.leased_nbytes
    with infinity.ema(model):
        inside = infinity.state_dict(model)
    found = {
        "on the device": were > 0,
        "averages": all(bool((inside[n].cpu() != before[n].cpu()).any()) for n in inside if "proj" in n),
        "in order": sorted(float(v.float().sum()) for v in average.values())
        == sorted(float(inside[n].float().sum()) for n in average),
        "undone": same(state(model, optimizer), before),
    }
    steps(model, optimizer, range(2, 3))
    optimizer.close()
    return found


def test_averages_take_the_place_of_weights_that_are_on_the_device():
    found = run(averaged)
    assert found == dict.fromkeys(found, True)
