"""Runs one scenario under infinity and as the plain reference loop, and compares them bit by bit."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import infinity
from infinity.partition import builder
from tests.helpers.reference import Reference, Rule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Units of this size make several of a tiny model (bytes of a rank's shard).
SMALL_UNIT = 8000
Change = Callable[[nn.Module], object]
#: Which weights are tiled depends on the budget, and the least budget on what is tiled.
UNTILED = "partition.tile=never"


@dataclass(slots=True)
class Trained:
    """What a run gave: every loss, every norm, the final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def small_units(nbytes: int = SMALL_UNIT):
    """Cut tiny models into several units."""
    before = builder.TARGET_SHARD_NBYTES, builder.TARGET_ACCELERATOR_NBYTES
    builder.TARGET_SHARD_NBYTES, builder.TARGET_ACCELERATOR_NBYTES = nbytes, 0
    try:
        yield
    finally:
        builder.TARGET_SHARD_NBYTES, builder.TARGET_ACCELERATOR_NBYTES = before


def streaming(directory: Any, *more: str) -> list[str]:
    """Overrides with which a tiny model lives on NVMe."""
    return [f"memory.nvme=[{directory}]", "memory.host=200KiB", "memory.resident=false", *more]


def recipe(dtype: str, overrides: Sequence[str]) -> infinity.Recipe:
    given = {override.partition("=")[0] for override in overrides}
    usual = {"memory.activations": "keep"}  # memory.device alone would plan
    rest = [f"{key}={value}" for key, value in usual.items() if key not in given]
    return infinity.load_recipe(overrides=[f"train.dtype={dtype}", *rest, *overrides])


def build(factory: Callable[[], nn.Module], dtype: str, overrides: Sequence[str]) -> nn.Module:
    with small_units(), infinity.Init(recipe(dtype, overrides)):
        return factory()


def optimizer_for(model: nn.Module, rule: Rule) -> Any:
    if rule.name != "adamw":
        limit, numbers = rule.max_grad_norm, dict(rule.numbers)
        return infinity.optim.Optimizer(model, rule.name, lr=rule.lr, max_grad_norm=limit, **numbers)
    return infinity.AdamW(
        model, lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay,
        max_grad_norm=rule.max_grad_norm,
    )  # fmt: skip


def train(
    factory: Callable[[], nn.Module],
    batch: Callable[..., dict[str, Any]],
    overrides: Sequence[str],
    *,
    dtype: str = "bf16",
    steps: int = 20,
    accumulate: int = 1,
    rule: Rule | None = None,
    change: Change = lambda model: None,
    rank: int = 0,
    world: int = 1,
) -> Trained:
    """The plain three-line loop under infinity."""
    model = build(factory, dtype, overrides)
    change(model)
    optimizer = optimizer_for(model, rule or Rule())
    out = Trained()
    try:
        for step in range(steps):
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else infinity.no_sync(model):
                    loss = model(**batch(step * accumulate + micro, rank, world)).loss
                    optimizer.scale(loss).backward()
                    out.losses.append(loss.item())
            optimizer.step()
            assert optimizer.grad_norm is not None
            out.norms.append(optimizer.grad_norm)
            out.reports.append(optimizer.report(loss=out.losses[-1], tokens=1))
        out.weights = infinity.state_dict(model, every_rank=True)
        assert model.training
    finally:
        optimizer.close()
    return out


def reference(
    factory: Callable[[], nn.Module],
    batch: Callable[..., dict[str, Any]],
    *,
    dtype: str = "bf16",
    steps: int = 20,
    accumulate: int = 1,
    rule: Rule | None = None,
    change: Change = lambda model: None,
) -> Trained:
    """The plain PyTorch loop with the same rule, in memory."""
    model = factory()
    change(model)
    loop = Reference(model, DTYPES[dtype], rule or Rule())
    out = Trained()
    for step in range(steps):
        outcome = loop.step([batch(step * accumulate + micro) for micro in range(accumulate)])
        out.losses += [float(loss) for loss in outcome.losses]
        out.norms.append(outcome.grad_norm)
    out.weights = {name: p.detach() for name, p in loop.parameters.items()}
    return out


def assert_bitwise(ours: Trained, plain: Trained) -> None:
    """Same losses, same final weights, to the bit; the same norms to float64's rounding."""
    assert ours.losses == plain.losses
    for mine, theirs in zip(ours.norms, plain.norms, strict=True):
        assert mine == theirs or abs(mine - theirs) <= 1e-12 * abs(theirs)
    for name, weight in plain.weights.items():
        assert torch.equal(ours.weights[name], weight), name
