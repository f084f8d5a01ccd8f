"""Training loops of every kind go on bitwise, from whatever step they are interrupted after.

A loop runs to its end, and what a kill after each step would have left on disk is copied on the way. Then each
copy is gone on with.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import infinity
from tests.helpers.crashes import PLACES, Loader, Net
from tests.helpers.training import build, recipe, small_units

STEPS = 5


@dataclass
class Loop:
    """One process of a run; a subclass says what its loop does."""

    nvme: Path
    place: str = "nvme"
    more: tuple[str, ...] = ()
    dtype: str = "fp32"
    losses: dict[int, str] = field(default_factory=dict)
    clip: float | None = None

    def settings(self) -> list[str]:
        return [f"memory.nvme=[{self.nvme}]", *PLACES[self.place], "run.name=mine", *self.more]

    def make(self) -> nn.Module:
        return Net()

    def build(self) -> nn.Module:
        return build(self.make, self.dtype, self.settings())

    def groups(self) -> list[dict[str, Any]] | None:
        return None

    def follow(self) -> dict[str, Any]:
        return {"loader": self.loader}

    def schedule(self) -> None:
        pass

    def start(self, seed: int) -> int:
        torch.manual_seed(seed)
        self.model = self.build()
        self.loader = Loader(0, 1)
        self.optimizer = infinity.AdamW(
            self.model, lr=0.01, params=self.groups(), max_grad_norm=self.clip
        )
        self.schedule()
        self.optimizer = infinity.AdamW(
            self.model, lr=0.01, params=self.groups(), max_grad_norm=self.clip, follow=self.follow()
        ) if False else self.optimizer  # fmt: skip
        return infinity.resume(self.model, self.optimizer)
