"""A second optimizer is one subclass and one row: with any state, training is bitwise the plain loop."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.optim import rules
from infinity.optim.rule import RULES
from infinity.optim.rule import Rule as UpdateRule
from infinity.optim.state import Form, Moment
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.reference import Reference, Rule, compute_weight
from tests.helpers.training import assert_bitwise, reference, train
from tests.shards.test_resume import interrupt, overrides, run, same, start, state

FREE = Rule(max_grad_norm=None)


class Momentum(UpdateRule):
    """Stochastic gradient descent with momentum: one moment."""

    name = "momentum"
    moments: tuple[Moment, ...] = (Moment("velocity"),)

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        return float(group["lr"]), step

    @staticmethod
    def update(weight, grad, velocity, lr, step):
        velocity = velocity * 0.5 + grad
        return weight - lr * velocity, velocity


class Three(Momentum):
    """Three moments of two dtypes, the last of which counts the updates."""

    name = "three"
    moments = (
        Moment("last"),
        Moment("mean"),
        Moment("count", Form(torch.bfloat16)),
    )

    @staticmethod
    def update(weight, grad, last, mean, count, lr, step):
        mean = mean * 0.75 + (grad - last) * 0.25
        count += 1
        return weight - lr * (grad + mean) / (count + step), grad, mean, count


class Plain(Reference):
    """The plain loop by one of these rules, on whole fp32 tensors."""

    update_rule: UpdateRule

    def _update(self, norm: Tensor, lr: float) -> None:
        for name, p in self.parameters.items():
            if p.grad is None:
                continue
            fields = self.update_rule.moments
            kept = self.__dict__.setdefault("kept", {})
            moments = kept.setdefault(name, [torch.zeros(p.shape) for f in fields])
            self.counts[name] += 1
            *numbers, _ = self.update_rule.hyper({"lr": lr}, step=self.counts[name]).unbind()
            self.masters[name], *new = self.update_rule.update(
                self.masters[name], p.grad.float(), *(each.clone() for each in moments), *numbers
            )
            kept[name] = [value.to(f.form.dtype).float() for value, f in zip(new, fields, strict=True)]
            p.data = compute_weight(self.masters[name], self.dtype)


@pytest.fixture(params=[Momentum(), Three()], ids=lambda rule: rule.name)
def rule(request, monkeypatch) -> UpdateRule:
    """Every run trains by this rule: its row, and its name as the default."""
    monkeypatch.setitem(RULES, request.param.name, request.param)
    monkeypatch.setattr(rules, "DEFAULT", request.param.name)
    plain = type("PlainOfRule", (Plain,), {"update_rule": request.param})
    monkeypatch.setattr("tests.helpers.training.Reference", plain)
    return request.param


@pytest.mark.parametrize(
    ("place", "dtype"),
    few((("host", "fp32"), ("nvme", "bf16")), itertools.product(("host", "nvme"), ("bf16", "fp32"))),
)
def test_any_state_trains_bitwise_in_every_place(tmp_path, rule, place, dtype):
    factory, batch = models.build("gpt", seed=3)
    plain = reference(factory, batch, dtype=dtype, steps=4, rule=FREE)
    assert_bitwise(train(factory, batch, overrides(tmp_path, place), dtype=dtype, steps=4, rule=FREE), plain)


@pytest.mark.parametrize("place", few(("nvme",), ("host", "nvme")))
def test_a_run_goes_on_bitwise_with_any_state(tmp_path, rule, place):
    given = overrides(tmp_path, place)
    model, optimizer, batch = start("gpt", "bf16", given, FREE)
    losses, final = run(model, optimizer, batch, range(4)), state(model, optimizer)
    infinity.close(model)
    model, optimizer, batch = start("gpt", "bf16", given, FREE)
    assert run(model, optimizer, batch, range(2)) == losses[:2]
    interrupt(model)
    model, optimizer, _ = start("gpt", "bf16", given, FREE, seed=99)
    assert infinity.resume(model, optimizer) == 2
    assert run(model, optimizer, batch, range(2, 4)) == losses[2:]
    same(state(model, optimizer), final)
    names = {"step", "master", *(field.name for field in rule.moments)}
    assert all(set(each) == names for each in optimizer.state_dict()["state"].values())
    infinity.close(model)


def test_a_run_by_another_rule_is_refused(tmp_path, rule, monkeypatch):
    model, optimizer, batch = start("gpt", "bf16", overrides(tmp_path, "nvme"), FREE)
    run(model, optimizer, batch, range(2))
    interrupt(model)
    monkeypatch.setattr(rules, "DEFAULT", "adamw")
    model, optimizer, _ = start("gpt", "bf16", overrides(tmp_path, "nvme"), FREE)
    with pytest.raises(infinity.StateError, match=f"was updated by {rule.name}, this one by adamw"):
        infinity.resume(model, optimizer)
    infinity.close(model)
