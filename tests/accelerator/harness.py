"""Runs training of the product on an accelerator: a real one, or the simulated one under several schedules."""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import infinity
from infinity.activations import tensor_cache
from tests.accelerator.simulator import Schedule
from tests.helpers import models
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, train


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One way to train a tiny model.

    Attributes:
        model: A name of :mod:`tests.helpers.models`.
        overrides: Of the recipe; ``{folder}`` is a directory of the test.
        clip: The rule's ``max_grad_norm``.
        dropout: Of the model.
    """

    model: str = "llama"
    overrides: tuple[str, ...] = ("memory.nvme=[{folder}]", "memory.host=4MiB", "memory.resident=false")
    dtype: str = "bf16"
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run gave, and what the simulator saw of it.

    Attributes:
        digest: Of every bit of the losses, the norms and the weights.
        races: Pairs of accesses that nothing orders.
        early: Memory that was given back while something in flight used it.
        waits: How often the host waited for the device, by place and thread.
    """

    schedule: str
    losses: list[float]
    digest: str
    races: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    waits: Counter[Any] = field(default_factory=Counter)
    kernels: int = 0


def digest(trained: Trained) -> str:
    sha = hashlib.sha256(repr((trained.losses, trained.norms)).encode())
    for name in sorted(trained.weights):
        sha.update(name.encode() + trained.weights[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train_once(scenario: Scenario, folder: str) -> Trained:
    """Train on this process's accelerator, or the CPU if it has none."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    tensor_cache.LEAST_NBYTES = 512  # tiny models have tiny activations
    factory, batch = models.build(scenario.model, seed=1, dropout=scenario.dropout)

    def on_device(*args: int) -> dict[str, torch.Tensor]:
        return {key: value.to(device) for key, value in batch(*args).items()}

    torch.manual_seed(7)
    return train(
        factory, on_device, [each.format(folder=folder) for each in scenario.overrides],
        dtype=scenario.dtype, steps=scenario.steps, accumulate=scenario.accumulate,
        rule=Rule(max_grad_norm=scenario.clip), rank=rank, world=world,
    )  # fmt: skip


def simulated(scenario: Scenario, folder: str, schedules: Sequence[tuple[Schedule, int]]) -> list[Run]:
    """Train under each schedule in turn; in a process of its own, on each rank."""
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    runs = []
    for schedule, seed in schedules:
        simulator.reset(schedule, seed + int(os.environ["RANK"]))
        trained = train_once(scenario, folder)
        runs.append(
            Run(
                schedule=f"{schedule} {seed}", losses=trained.losses, digest=digest(trained),
                races=simulator.races, early=simulator.early, waits=simulator.waits, kernels=simulator.kernels,
            )  # fmt: skip
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return runs
