"""Where updates run follows from the recipe and from what is measured."""

import contextlib
import math
from functools import partial
from itertools import chain
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.comm.ranks import Ranks
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.lifecycle import Tier
from infinity.engine import executor as update_rules
from infinity.engine.executor import device_nbytes, is_faster, make_rules
from infinity.nvme.probe import Speed
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import DeviceRule, HostRule, ResidentRules
from tests.helpers import models
from tests.helpers.training import build

ACCELERATOR, CPU = Ranks(0, 1, torch.device("cuda", 0)), Ranks(0, 1, torch.device("cpu"))
BF16 = torch.bfloat16


rates = st.floats(1e6, 1e12)


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is measured: elements in a second on the CPU and there, and the drives."""
    monkeypatch.setattr(torch, "Stream", Stream)

    def given(cpu: float, device: float, drive: float = 1e12) -> None:
        monkeypatch.setattr(update_rules, "measure_rates", lambda *_: (cpu, device))
        monkeypatch.setattr(update_rules, "measure", lambda directory: Speed(24 * drive, 24 * drive))

    return given


def places(memory: MemoryConfig, ranks: Ranks = ACCELERATOR) -> set[Tier]:
    """Homes of which the accelerator updates some units, at least."""
    made = make_rules(ADAMW, memory, ranks, BF16).items()
    return {home for home, rules in made if any(isinstance(rule, DeviceRule) for rule in rules)}


def test_updates_run_where_they_are_faster(measured, tmp_path):
    memory = MemoryConfig(nvme=(str(tmp_path),))
    measured(cpu=1e9, device=3e9)
    assert places(memory) == {Tier.HOST, Tier.NVME}
    assert places(MemoryConfig()) == {Tier.HOST}
    measured(cpu=1e9, device=0.2e9)
    assert places(memory) == set()
    measured(cpu=1e9, device=3e9, drive=0.5e9)  # the drive sets the pace
    assert places(memory) == {Tier.HOST}


def test_cpu_and_accelerator_share_the_units_in_host_memory_unless_one_is_far_slower(measured):
    def who(cpu: float, device: float) -> set[type]:
        measured(cpu, device)
        return {type(rule) for rule in make_rules(ADAMW, MemoryConfig(), ACCELERATOR, BF16)[Tier.HOST]}

    assert who(5e9, 3e9) == who(3e9, 5e9) == who(1e9, 4e9) == {HostRule, DeviceRule}
    assert who(5e9, 1e9) == {HostRule}
    assert who(1e9, 5e9) == {DeviceRule}


def test_a_shard_that_waits_goes_to_the_rule_that_is_free():
    began, ends, took = [Event() for _ in range(3)], [Event() for _ in range(3)], dict[int, Any]()

    def update(number: int, rule: Any) -> None:
        took[number] = rule
        began[number].set()
        assert ends[number].wait(30)

    slow, fast = HostRule(ADAMW, BF16), HostRule(ADAMW, BF16)
    with contextlib.closing(ResidentRules([slow, fast], beside=True)) as rules:
        for number in range(3):
            rules.run(partial(update, number))
        assert began[0].wait(30)
        assert began[1].wait(30)
        assert not began[2].is_set()
        ends[1].set()
        assert began[2].wait(30)
        ends[0].set(), ends[2].set()
    assert {took[0], took[1]} == {slow, fast}
    assert took[2] is took[1]


def test_the_recipe_may_say_where_updates_run(measured):
    measured(cpu=1e9, device=0.2e9)
    assert places(MemoryConfig(updates="device")) == {Tier.HOST}
    measured(cpu=1e9, device=3e9)
    assert places(MemoryConfig(updates="host")) == set()
    assert places(MemoryConfig(), CPU) == set()


def test_a_small_device_budget_is_left_to_the_model(measured):
    measured(cpu=1e9, device=3e9)
    nbytes = device_nbytes(chain(*make_rules(ADAMW, MemoryConfig(), ACCELERATOR, BF16).values()), ACCELERATOR)
    assert 0 < nbytes < 2**28
    assert places(MemoryConfig(device=8 * nbytes - 1)) == set()
    assert places(MemoryConfig(device=8 * nbytes)) == {Tier.HOST}


def test_without_an_accelerator_the_setting_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"memory\.updates.*there is no accelerator"):
        make_rules(ADAMW, MemoryConfig(updates="device"), CPU, BF16)
    rules = make_rules(ADAMW, MemoryConfig(), CPU, BF16)
    assert {home: [type(each) for each in of] for home, of in rules.items()} == {
        Tier.HOST: [HostRule], Tier.NVME: [HostRule],
    }  # fmt: skip
    model = build(models.build("llama", seed=1)[0], "bf16", ["memory.host=64MiB", "memory.updates=device"])
    with pytest.raises(infinity.RecipeError, match=r"memory\.updates"):
        infinity.AdamW(model)
    infinity.close(model)


def test_a_link_that_is_faster_than_the_cpu_takes_updates():
    # 14 bytes of weight, gradient and state go, 12 come back; a CPU passes over 26 bytes
    assert is_faster(cpu=300e9 / 26, device=450e9 / 14)
    assert not is_faster(cpu=100e9 / 26, device=25e9 / 14)
    assert is_faster(cpu=20e9 / 26, device=25e9 / 14)


def test_an_update_that_waits_for_its_drive_stays_on_the_cpu():
    drive = 14e9 / 26
    assert not is_faster(cpu=20e9 / 26, device=450e9 / 14, drive=drive)
    assert is_faster(cpu=10e9 / 26, device=450e9 / 14, drive=drive)


@given(rates, rates, rates | st.just(math.inf))
def test_only_a_gain_moves_an_update(cpu, device, drive):
    chosen = is_faster(cpu, device, drive)
    assert not chosen or min(device, drive) > min(cpu, drive)
    assert is_faster(cpu, 2 * device, drive) >= chosen
