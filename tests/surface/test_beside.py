"""Parameters that losses use beside the model's call, of which no output tells, are as in plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import infinity
from tests.helpers.training import small_units

WIDTH, CLASSES = 16, 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.scale, self.weights = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.trunk(x)))


def batch(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def scaled(model: Net, number: int) -> Tensor:
    """As CLIP's temperature."""
    return (model(batch(number)) * model.scale.exp()).pow(2).mean()


def weighted(model: Net, number: int) -> Tensor:
    """As the uncertainties of several tasks."""
    out = model(batch(number)).pow(2).mean()
    return (torch.stack([out, out**2, out**3]) * (-model.weights).exp() + model.weights).sum()


def fused(model: Net, number: int) -> Tensor:
    """As a head that is a part of the loss's kernel."""
    x = model.mix(model.trunk(batch(number)))
    return F.cross_entropy(F.linear(x, model.head.weight), torch.arange(4) + number)


def regularized(model: Net, number: int) -> Tensor:
    """Only of a weight, in every second backward pass."""
    if number % 2:
        return (model.scale - 3).pow(2)
    return scaled(model, number)


@pytest.mark.parametrize("loss", [scaled, weighted, fused, regularized], ids=lambda each: each.__name__)
@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_loss_that_uses_weights_beside_the_call_is_that_without_infinity(
    tmp_path: Path, where: str, loss: Callable[[Net, int], Tensor]
) -> None:
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for number in range(8):
        loss(plain, number).backward()
        if number % 2:
            theirs.step()
            theirs.zero_grad()
    place = {"host": [], "nvme": [f"memory.nvme=[{tmp_path}]", "memory.resident=false"]}[where]
    with small_units(), infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", *place])):
        model = Net()
    optimizer = infinity.AdamW(model, lr=1e-2, weight_decay=0.0)
    for number in range(0, 8, 2):
        with infinity.no_sync(model):
            loss(model, number).backward()
        loss(model, number + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = infinity.state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    infinity.close(model)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_with_a_graph_are_taken_without_it() -> None:
    with small_units(), infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32"])):
        model = Net()
    optimizer = infinity.AdamW(model, lr=1e-2)
    for number in range(3):
        before = infinity.state_dict(model)["head.weight"].clone()
        scaled(model, number).backward(create_graph=number != 1)
        optimizer.step()
        assert not torch.equal(infinity.state_dict(model)["head.weight"], before)
    infinity.close(model)
