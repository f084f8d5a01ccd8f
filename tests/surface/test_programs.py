"""Random programs, modules called in any order or not at all, train bitwise as without infinity."""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.errors import StateError
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import optimizer_for, small_units

WIDTH, CLASSES = 8, 12
RULE = Rule(max_grad_norm=None)


class Net(nn.Module):
    """Blocks that are called in the order of ``plan``, one of them recomputed; weights beside them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.scale, self.weights = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))
        self.table, self.tied = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.tied.weight = self.table.weight
        self.wide = nn.Linear(WIDTH, 300)
        self.plan: list[int] = []
        self.recomputed = -1

    def forward(self, x: Tensor) -> Tensor:
        for index in self.plan:
            block = self.blocks[index]
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputed == index else block(x))
        return self.head(x)


def batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))


def square(model: Any, number: int) -> Tensor:
    return model(batch(number)).pow(2).mean()


LOSSES: dict[str, Callable[[Any, int], Tensor]] = {
    "square": square,
    "scaled": lambda m, n: (m(batch(n)) * m.scale.exp()).pow(2).mean(),
    "weighted": lambda m, n: (torch.stack([square(m, n)] * 3) * (-m.weights).exp() + m.weights).sum(),
    "fused head": lambda m, n: F.cross_entropy(
        F.linear(m.blocks[0](batch(n)), m.head.weight), torch.arange(3)
    ),
    "penalty of vectors": lambda m, n: (m.scale - 3).pow(2) + m.weights.sum() * 0.5,
    "penalty of a matrix": lambda m, n: m.blocks[n % 4][0].weight.pow(2).sum(),
    "a block": lambda m, n: m.blocks[n % 4](batch(n)).sum(),
    "tied": lambda m, n: m.tied(m.table(torch.tensor([n % CLASSES, 3, 3]))).pow(2).mean(),
    "wide": lambda m, n: m.wide(batch(n)).pow(2).mean(),
    "a block twice": lambda m, n: m.blocks[1](m.blocks[1](batch(n))).sum() + square(m, n + 1),
    "forward alone": lambda m, n: m.blocks[2][0].forward(batch(n)).sum(),
    "gradient of the input": lambda m, n: m(batch(n).requires_grad_()).sum(),
}
FREEZE = "blocks.0.0.weight", "blocks.1.0", "scale", "head", "table", "blocks.2", "weights"


def run(seed: int, model: Any, step: Callable[[], object], no_sync: Callable[[Any], Any]) -> list[Any]:
    """Run the program of ``seed``; return the losses, and what else it read."""
    draw, found = random.Random(seed), []
    for _ in range(draw.randint(3, 6)):
        micro_batches = draw.choice([1, 1, 2, 3])
        for number in range(micro_batches):
            model.plan, model.recomputed = draw.choices(range(4), k=draw.randint(0, 5)), draw.randint(-3, 3)
            if draw.random() < 0.25:
                start, trains = draw.choice(FREEZE), draw.random() < 0.5
                for name, param in model.named_parameters():
                    if name.startswith(start):
                        param.requires_grad_(trains)
            if draw.random() < 0.15:
                loss = LOSSES[draw.choice(list(LOSSES))](model, draw.randrange(100))
                params = [param for param in model.parameters() if param.requires_grad][:6]
                if loss.requires_grad:
                    found += torch.autograd.grad(loss, params, allow_unused=True)
            if draw.random() < 0.15:
                with torch.no_grad():
                    found.append(model(batch(draw.randrange(100))).clone())
            if draw.random() < 0.1 and model.weights.requires_grad:
                model.weights.register_hook(lambda grad: grad * 2)
            names, at = draw.choices(list(LOSSES), k=draw.choice([1, 1, 2])), draw.randrange(100)
            graph = {"create_graph": draw.random() < 0.12, "retain_graph": draw.random() < 0.1 or None}
            if number == micro_batches - 1:
                names.append("scaled")  # a step whose last backward has no gradient is none of ours
                model.head.requires_grad_(True)
            with contextlib.nullcontext() if number == micro_batches - 1 else no_sync(model):
                loss = sum((LOSSES[name](model, at) for name in names), torch.zeros(()))
                if loss.requires_grad:
                    loss.backward(**graph)
            found.append(loss.detach().clone())
        step()
    return found


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning", "ignore:Converting a tensor:UserWarning")
@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 100))])
def test_a_random_program_is_bitwise_that_without_infinity(tmp_path: Path, where: str, seed: int) -> None:
    plain = Reference(Net(seed), torch.float32, RULE)
    wanted = run(seed, plain.model, lambda: plain.finish([]), lambda _: contextlib.nullcontext())
    keys = [f"memory.nvme=[{tmp_path}]", "memory.resident=false"] if where == "nvme" else []
    units = small_units() if seed % 2 else contextlib.nullcontext()
    with units, infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", *keys])):
        model = Net(seed)
    optimizer = optimizer_for(model, RULE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for ours, theirs in zip(run(seed, model, step, infinity.no_sync), wanted, strict=True):
        assert (ours is theirs is None) or torch.equal(ours, theirs)
    values = infinity.state_dict(model)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(values[name], value), name
    infinity.close(model)


def train(where: str, folder: Path, run: Callable[[Any, Callable[[], object]], object]) -> dict[str, Tensor]:
    """Run a program under infinity; return the weights that it leaves."""
    keys = [f"memory.nvme=[{folder}]", "memory.resident=false"] if where == "nvme" else []
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", *keys])):
        model = Net(0)
    model.plan = [0, 1, 2]
    model.optimizer = optimizer_for(model, RULE)
    run(model, model.optimizer.step)
    values = infinity.state_dict(model)
    infinity.close(model)
    return dict(values)


def check(where: str, folder: Path, program: Callable[[Any, Callable[[], object]], object]) -> None:
    """Check that a program gives the weights that it gives without infinity."""
    plain = Reference(Net(0), torch.float32, RULE)
    plain.model.plan = [0, 1, 2]
    program(plain.model, lambda: plain.finish([]))
    wanted = plain.model.state_dict()
    for key, value in train(where, folder, program).items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning", "ignore:Converting a tensor:UserWarning")
@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("name", ["head.weight", "blocks.0.0.weight", "blocks.2.2.weight", "table.weight"])
def test_a_backward_inside_another_adds_its_gradients(tmp_path: Path, where: str, name: str) -> None:
    """With create_graph autograd puts a sum in the place of what was in ``p.grad``."""

    def program(model: Any, step: Callable[[], object]) -> None:
        param = dict(model.named_parameters())[name]
        inner = False

        def penalty(grad: Tensor) -> None:
            nonlocal inner
            if not inner:
                inner = True
                with torch.enable_grad():
                    (param - 3).pow(3).sum().backward(create_graph=True)
                inner = False

        model.blocks[1].register_forward_hook(lambda _, __, output: output.register_hook(penalty) and None)
        for number in range(5):
            with infinity.no_sync(model) if hasattr(model, "optimizer") else contextlib.nullcontext():
                square(model, number + 5).backward()
            square(model, number).backward()
            step()

    check(where, tmp_path, program)


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, held: object) -> Tensor:
        ctx.held = held
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Held:
    """Lives as long as the graph of a step."""


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_step_lets_go_of_graphs_that_its_gradients_have(tmp_path: Path, where: str) -> None:
    graphs: weakref.WeakSet[_Held] = weakref.WeakSet()
    counts = []

    def program(model: Any, step: Callable[[], object]) -> None:
        for number in range(4):
            graphs.add(held := _Held())
            loss = _Holds.apply(model(batch(number)), held).pow(2).mean()
            loss.backward(create_graph=number < 3)
            del held, loss
            step()
            gc.collect()
            counts.append(len(graphs))

    train(where, tmp_path, program)
    assert counts == [0] * 4


def test_reading_a_gradient_in_a_hook_or_a_list_says_where_it_is(tmp_path: Path) -> None:
    def program(model: Any, step: Callable[[], object]) -> None:
        weight = model.head.weight
        handles = [weight.register_hook(lambda grad: grad * weight.grad.norm())]
        for _ in range(2):
            with pytest.raises(StateError, match=r"norm on a parameter's \.grad.*register_hook"):
                square(model, 0).backward()
            handles.pop().remove()
            model.optimizer.zero_grad()
            handles.append(weight.register_post_accumulate_grad_hook(lambda param: param.grad.norm()))
        handles.pop().remove()
        for number in range(2):
            square(model, number).backward()
            for change in (
                lambda grad: torch._foreach_mul_([grad], 2.0), lambda grad: torch.ops.aten.mul_(grad, 2.0),
            ):  # fmt: skip
                with pytest.raises(StateError, match=r"on a parameter's \.grad"):
                    change(weight.grad)
            step()

    train("host", tmp_path, program)


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_gradient_from_before_the_next_forward_is_not_lost_with_a_backward_that_failed(
    tmp_path: Path, where: str
) -> None:
    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    def program(model: Any, step: Callable[[], object]) -> None:
        ours = hasattr(model, "optimizer")
        for number in range(3):
            if number:
                inner = model.blocks[1](batch(9).requires_grad_())
                inner.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    model.head(inner).sum().backward()
                model.zero_grad()
                with infinity.no_sync(model) if ours and number == 1 else contextlib.nullcontext():
                    (model.scale - 3).pow(2).backward()
            LOSSES["scaled"](model, number).backward()
            step()

    check(where, tmp_path, program)


@pytest.mark.parametrize("name", ["head.weight", "blocks.1.0.weight", "blocks.1.2.bias"])
def test_a_gradient_that_is_replaced_inside_backward_is_refused_by_name(tmp_path: Path, name: str) -> None:
    def program(model: Any, step: Callable[[], object]) -> None:
        param = dict(model.named_parameters())[name]

        def replace(grad: Tensor) -> None:
            param.grad = torch.ones_like(param)

        for number in range(3):
            inner = model.blocks[0](batch(number))
            if number == 2:
                inner.register_hook(replace)
            model.head(model.blocks[1](inner)).sum().backward()
            if number < 2:
                step()
        with pytest.raises(StateError, match=rf"{name}\.grad was replaced"):
            step()

    train("host", tmp_path, program)


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_may_be_set_to_zero_until_one_has_come(tmp_path: Path, where: str) -> None:
    def program(model: Any, step: Callable[[], object]) -> None:
        ours = hasattr(model, "optimizer")
        for number in range(3):
            loss = LOSSES["scaled"](model, number)
            model.zero_grad(set_to_none=False)
            loss.backward()
            if ours and number == 1:
                with pytest.raises(StateError, match=r"on a parameter's \.grad"):
                    model.zero_grad(set_to_none=False)
            step()
            if ours:
                model.optimizer.zero_grad()
                with infinity.no_sync(model):  # no module tells of this one
                    (model.scale - 3).pow(2).backward()
                with pytest.raises(StateError, match=r"on a parameter's \.grad"):
                    model.scale.grad.zero_()
                model.optimizer.zero_grad()

    check(where, tmp_path, program)


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_weight_that_trains_since_the_forward_pass_has_its_gradient(tmp_path: Path, where: str) -> None:
    def program(model: Any, step: Callable[[], object]) -> None:
        weight = model.blocks[1][0].weight
        for number in range(3):
            weight.requires_grad_(False)
            loss = square(model, number)
            weight.requires_grad_(True)
            (loss + (weight - 3).pow(2).mean()).backward()
            step()

    check(where, tmp_path, program)
