"""An update on the accelerator gives the bits of one on the CPU."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.engine import executor
from infinity.optim import rules
from infinity.optim.rules import DeviceRule, HostRule, find_rule
from infinity.optim.state import MASTERS
from tests.accelerator.test_on_device import begin, make, same, state, steps
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks

harness = pytest.importorskip("tests.accelerator.harness")

NAMES = ("adamw", "adamw8bit", "adamw4bit", "adam", "lion", "sgd", "adamw8bit+kahan", "lion+bf16-stochastic")


def compare(name: str) -> list[str]:
    """What differs between both ways, in each dtype, by name; and what there is besides."""
    from tests.accelerator import device

    simulator, wrong, rule = device.start(), [], find_rule(name)
    hyper = rule.hyper({**rule.defaults, "lr": 1e-3, "weight_decay": 0.1}, step=3, grad_scale=0.7)
    for schedule in ("eager", "lazy"):
        simulator.reset(schedule, 0)
        for dtype in MASTERS[rule.master]:
            layout = rule.layout(dtype)
            torch.manual_seed(5)
            weight, grad = (torch.randn(5 * 2**12 + 2048).to(dtype) for _ in range(2))
            state = layout.complete((), weight.numel())
            for field in state:
                field.copy_(torch.rand(field.numel()) * 9)
            other, states = weight.clone(), tuple(field.clone() for field in state)
            there = torch.device("sim", 0)
            pinned = [each.pin_memory(there) for each in (other, grad, *states)]
            HostRule(rule, dtype).update(weight, grad, state, weight, hyper)
            DeviceRule(rule, dtype, there, 2**13).update(
                pinned[0], pinned[1], tuple(pinned[2:]), pinned[0], hyper
            )
            for name, one, two in zip(
                ("weight", *(field.name for field in layout.fields)),
                (weight, *state),
                (pinned[0], *pinned[2:]),
            ):
                if not torch.equal(one, two):
                    wrong.append(f"{schedule} {dtype} {name}: {int((one != two).sum())} of {one.numel()}")
        wrong += simulator.races
    rules._MEASURED, rules._TRIES = 1, 1  # of this process: a simulator has no speed to be measured
    assert min(rules.measure_rates(rule, torch.bfloat16, there, 1)) > 0
    return wrong


@pytest.mark.parametrize("name", few(("adamw", "adamw8bit", "lion"), NAMES))
def test_the_rule_gives_the_same_bits_on_the_accelerator(name: str) -> None:
    harness.needs_simulator()
    assert run_ranks(compare, 1, name, group=False) == [[]]


STREAMED = ("memory.host=16MiB", "memory.resident=false")


@pytest.mark.parametrize(
    ("name", "place"),
    few(
        [("adamw8bit", STREAMED)],
        itertools.product(NAMES, (("memory.host=64MiB",), STREAMED)),
    ),
)
def test_training_with_updates_on_the_accelerator_gives_the_same_bits(
    tmp_path: Path, name: str, place: tuple[str, ...]
) -> None:
    harness.needs_simulator()
    place = (*place, "memory.nvme=[{folder}]", "memory.engine=threads", f"optim.name={name}")
    digests = []
    for where, schedules in (("host", [("eager", 0)]), ("device", [("eager", 0), ("random", 1)])):
        scenario = harness.Scenario(place=(*place, f"memory.updates={where}"), clip=1.0, steps=2, update=name)
        [runs] = harness.simulate(scenario, tmp_path / where, schedules)
        assert [run.faults for run in runs] == [[]] * len(schedules)
        digests += [run.digest for run in runs]
    assert digests == digests[:1] * 3


def train_on_several_threads(scenario: Any, folder: str) -> tuple[str, str, list[str]]:
    """Digests with one thread that updates units in host memory, and with four; and what went wrong."""
    from infinity.engine import executor as update_rules
    from infinity.engine.runtime import runtime_of
    from tests.accelerator import device

    simulator, workers, digests = device.start(), list[int](), list[str]()

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        workers.append(runtime_of(model).executor().updates.rules.threads._max_workers)

    for threads in (1, 6):
        simulator.reset("random", 1)
        update_rules.rank_threads = lambda given=threads: given
        digests.append(harness.digest(harness.train(scenario, folder, before)))
    assert set(workers) == {1, 4}
    return digests[0], digests[1], [*simulator.races, *simulator.early]


@pytest.mark.slow
def test_several_updates_at_a_time_give_the_same_bits(tmp_path: Path) -> None:
    harness.needs_simulator()
    scenario = harness.Scenario(place=(*harness.HOST, "memory.updates=host"), clip=1.0, accumulate=2)
    [(one, four, faults)] = run_ranks(train_on_several_threads, 1, scenario, str(tmp_path), group=False)
    assert (one, faults) == (four, [])


def shared() -> tuple[list[str], dict[str, int], bool]:
    """Races; updates by each kind of rule; whether the bits are those of updates on the CPU."""
    simulator = begin("random", 3)
    count = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        # As if both were as fast, and the device had room for pieces of a shard alone.
        patch.setattr(executor, "measure_rates", lambda *_: (1.0, 1.0))
        patch.setattr(executor, "device_nbytes", lambda *_: 0)
        patch.setattr(executor, "_LEAST_SHARE", 0)
        patch.setattr(executor, "SHARD_PIECE_NUMEL", 2**13)
        for kind in (HostRule, DeviceRule):
            patch.setattr(kind, "update", counting(kind.update, kind.__name__, count))
        found = trained("memory.device=192KiB")
        races, updates = [*simulator.races, *simulator.early], dict(count)
        expected = trained("memory.updates=host")
    return races, updates, same(found, expected)


def counting(update: Callable[..., None], name: str, count: Counter[str]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        count[name] += 1
        update(*args)

    return call


def trained(*more: str) -> dict[str, Tensor]:
    model, optimizer = make(["memory.host=64MiB", "memory.activations=keep", *more])
    steps(model, optimizer, range(4))
    final = state(model, optimizer)
    optimizer.close()
    return final


def test_cpu_and_accelerator_update_units_of_one_model_side_by_side():
    harness.needs_simulator()
    [(races, updates, right)] = run_ranks(shared, 1, group=False)
    assert (races, right) == ([], True)
    assert min(updates["HostRule"], updates["DeviceRule"]) > 4
