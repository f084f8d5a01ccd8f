"""A model under infinity and the plain reference loop, trained side by side on the same batches."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine.runtime import runtime_of
from tests.helpers import training
from tests.helpers.cases import few
from tests.helpers.reference import Reference, Rule

WIDTH = 32
#: So small that the units of a toy do not all fit the memory for gathered ones (bytes).
TINY_UNIT = 3000
#: In host memory, on NVMe, and on NVMe with one version (no update inside backward).
PLACES = ("host", "nvme", "one-version")
#: A place where weights come and go at each use, in memory in the long suite only; and both places.
NVME = pytest.mark.parametrize("place", few(("nvme",), ("host", "nvme")))
BOTH = pytest.mark.parametrize("place", ["host", "nvme"])


def place(name: str, directory: Any) -> list[str]:
    """The overrides of one of ``PLACES``."""
    if name == "host":
        return ["memory.host=256MiB"]
    return training.streaming(directory, *(["memory.versions=1"] if name == "one-version" else []))


class Block(nn.Module):
    """A residual block with everything that a unit may hold: matrices, biases, a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Blocks between two projections; a scalar and a direct parameter, an fp32 buffer."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 4)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.gain.dtype)) * self.gain + self.shift
        for block in self.blocks:
            x = block(x)
        return x + self.offset.to(x.dtype)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        out = self.last(self.hidden(x))
        return SimpleNamespace(loss=nn.functional.mse_loss(out.float(), y), out=out)


def toy() -> nn.Module:
    torch.manual_seed(1)
    return Toy().train()


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``make`` that draws the same numbers every time."""

    def factory() -> nn.Module:
        torch.manual_seed(1)
        return make().train()

    return factory


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(5, 6, generator=generator)
    return {"x": x, "y": torch.stack([x.sum(1), x.prod(1), x[:, 0], x[:, 1] - x[:, 2]], 1)}


class Lockstep:
    """One model twice, and the comparison of everything that training changes."""

    def __init__(
        self,
        overrides: Sequence[str],
        factory: Callable[[], nn.Module] = toy,
        dtype: str = "bf16",
        rule: Rule | None = None,
        batches: Callable[[int], dict[str, Any]] = batch,
        *,
        roomy: bool = False,
    ) -> None:
        self.rule = rule or Rule()
        with training.small_units(TINY_UNIT), infinity.Init(training.recipe(dtype, overrides)):
            self.model = factory()
        if not roomy:
            _tighten(self.model)
        self.optimizer = training.optimizer_for(self.model, self.rule)
        self.plain = Reference(factory(), training.DTYPES[dtype], self.rule)
        self.batches, self.number = batches, 0

    def backward(self, number: int) -> Tensor:
        """Forward and backward of our model alone."""
        loss = self.model(**self.batches(number)).loss
        self.optimizer.scale(loss).backward()
        return loss.detach()

    def step(self, count: int = 1, *, lr: float | None = None) -> None:
        """Train both for ``count`` steps; their losses and norms must agree."""
        for _ in range(count):
            self.number += 1
            mine = self.backward(self.number)
            self.optimizer.step()
            self.follow(mine, lr=lr)

    def follow(self, *losses: Tensor, lr: float | None = None, number: int | None = None) -> None:
        """The plain loop makes the step that ours has just made."""
        outcome = self.plain.step([self.batches(number or self.number)], lr=lr)
        assert [float(loss) for loss in losses] == [float(loss) for loss in outcome.losses]
        assert self.optimizer.skipped == outcome.skipped
        if not outcome.skipped:
            assert self.optimizer.grad_norm is not None
            assert abs(self.optimizer.grad_norm - outcome.grad_norm) <= 1e-12 * outcome.grad_norm

    def require_grad(self, part: str, train: bool) -> None:
        """Train, or freeze, the parameters of both models whose names begin with ``part``."""
        for model in (self.model, self.plain.model):
            for name, param in model.named_parameters():
                if name.startswith(part):
                    param.requires_grad_(train)

    def check(self) -> None:
        """Weights, exact weights, moments and step counts are the plain loop's, to the bit."""
        weights = infinity.state_dict(self.model)
        for name, param in self.plain.parameters.items():
            assert torch.equal(weights[name], param.detach()), name
        names = {id(p): name for name, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        state = self.optimizer.state_dict()["state"]
        for i, name in enumerate(order):
            if i in state:
                assert torch.equal(state[i]["master"], self.plain.masters[name]), name
                assert torch.equal(state[i]["exp_avg"], self.plain.m[name]), name
                assert torch.equal(state[i]["exp_avg_sq"], self.plain.v[name]), name
                assert state[i]["step"] == self.plain.counts[name], name


def _tighten(model: nn.Module) -> None:
    """Let device memory hold all gradients, but so few weights that passes must fetch and release."""
    runtime = runtime_of(model)
    memory = runtime.config.memory
    if not memory.nvme:
        return
    sizes = [-(-unit.nbytes // 4096) * 4096 for unit in runtime.units]
    tight = dataclasses.replace(memory, device=sum(sizes) + 5 * max(sizes))
    runtime.config = dataclasses.replace(runtime.config, memory=tight)


@contextlib.contextmanager
def lockstep(where: str, directory: Any, *args: Any, **kwargs: Any) -> Iterator[Lockstep]:
    """A :class:`Lockstep` in one of ``PLACES``, closed at the end."""
    pair = Lockstep(place(where, directory), *args, **kwargs)
    try:
        yield pair
    finally:
        pair.optimizer.close()
