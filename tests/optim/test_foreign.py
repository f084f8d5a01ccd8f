"""States of other libraries' optimizers of the same rule: both train on alike, to rounding."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import infinity
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of


class Net(nn.Module):
    def __init__(self, matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(6, 10, bias=not matrices), nn.Linear(10, 4, bias=not matrices)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


class ScheduleFree:
    """arXiv:2405.15682, algorithm 1, with y in place of the weights, and the state of its authors' code."""

    def __init__(self, params: Any, lr: float, warmup_steps: int) -> None:
        self.params = list(params)
        self.x, self.z = ([p.detach().clone() for p in self.params] for _ in range(2))
        self.v = [torch.zeros_like(p) for p in self.params]
        self.group: dict[str, Any] = {
            "lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "r": 0.0, "k": 0,
            "warmup_steps": warmup_steps, "weight_lr_power": 2.0, "train_mode": True, "weight_sum": 0.0,
        }  # fmt: skip

    @torch.no_grad()
    def step(self) -> None:
        group, (b1, b2) = self.group, self.group["betas"]
        group["k"] += 1
        lr = group["lr"] * min(1, group["k"] / group["warmup_steps"])
        group["weight_sum"] += lr**2
        share = lr**2 / group["weight_sum"]
        for y, x, z, v in zip(self.params, self.x, self.z, self.v, strict=True):
            v.lerp_(y.grad**2, 1 - b2)
            root = (v / (1 - b2 ** group["k"])).sqrt() + 1e-8
            z -= lr * (y.grad / root + group["weight_decay"] * y)
            x.lerp_(z, share)
            y.copy_((1 - b1) * z + b1 * x)

    def state_dict(self) -> dict[str, Any]:
        state = {i: {"z": z, "exp_avg_sq": v} for i, (z, v) in enumerate(zip(self.z, self.v, strict=True))}
        return {"state": state, "param_groups": [{**self.group, "params": [*range(len(self.z))]}]}


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss = model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.zero_grad()


def ours(theirs: nn.Module, name: str, **numbers: Any) -> tuple[nn.Module, Any]:
    with infinity.Init(infinity.load_recipe(overrides=["memory.host=64MiB", "train.dtype=fp32"])):
        model = Net(matrices=theirs.up.bias is None)
    with infinity.gathered(model, modify=True):
        for mine, wanted in zip(model.parameters(), theirs.parameters(), strict=True):
            mine.data.copy_(wanted.detach())
    groups = [{"params": [*model.parameters()], **({"matrix": True} if name == "muon" else {})}]
    return model, infinity.optim.Optimizer(model, name, params=groups, max_grad_norm=None, **numbers)


def go_on(theirs: nn.Module, optimizer: Any, name: str, atol: float = 1e-5, **numbers: Any) -> Any:
    """Train ours from the state of theirs, and both on; return our optimizer's numbers."""
    model, mine = ours(theirs, name, **numbers)
    try:
        mine.load_state_dict(optimizer.state_dict())
        for each, steps in ((mine, model), (optimizer, theirs)):
            train(steps, each, range(3, 6))
        for key, wanted in theirs.state_dict().items():
            torch.testing.assert_close(infinity.state_dict(model)[key], wanted, rtol=1e-4, atol=atol)
        return {k: v for k, v in mine.param_groups[0].items() if k != "params"}
    finally:
        mine.close()


def test_transformers_adafactor():
    net = Net()
    theirs = transformers.Adafactor(
        net.parameters(), lr=0.02, scale_parameter=False, relative_step=False, decay_rate=-0.7,
        clip_threshold=0.9, weight_decay=0.1,
    )  # fmt: skip
    train(net, theirs, range(3))
    numbers = go_on(net, theirs, "adafactor", lr=1.0)
    assert numbers == {
        "lr": 0.02, "eps": 1e-30, "clip_threshold": 0.9, "decay_rate": 0.7, "weight_decay": 0.1,
    }  # fmt: skip
    theirs.param_groups[0]["beta1"] = 0.9
    _, mine = ours(net, "adafactor")
    with pytest.raises(StateError, match="of another adafactor: infinity's has only beta1=None"):
        mine.load_state_dict(theirs.state_dict())
    mine.close()


@pytest.mark.parametrize("whose", ["torch's", "transformers'"])
def test_second_moments_of_an_adafactor_with_other_rates_carry_over_and_a_line_says_so(whose, monkeypatch):
    net, notes = Net(), list[str]()
    theirs: Any = (
        torch.optim.Adafactor(net.parameters(), lr=0.05, beta2_decay=-0.7)
        if whose == "torch's"
        else transformers.Adafactor(net.parameters(), decay_rate=-0.7)
    )
    train(net, theirs, range(3))
    model, mine = ours(net, "adafactor", lr=0.03)
    monkeypatch.setattr(runtime_of(model), "note", notes.append)
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == 0.03
    assert mine.param_groups[0]["decay_rate"] == 0.7
    kept = {name for each in mine.sums.values() for name, v in each.items() if v.any()}
    assert kept == {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"}
    [line] = notes
    assert f"of {whose} Adafactor" in line
    assert "those of this optimizer count" in line
    mine.close()


def test_torchs_muon():
    net = Net(matrices=True)
    theirs = torch.optim.Muon(net.parameters(), lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    train(net, theirs, range(3))
    numbers = go_on(net, theirs, "muon", atol=2e-2)  # Newton-Schulz is in bfloat16
    assert (numbers["lr"], numbers["momentum"], numbers["match_rms_adamw"]) == (0.02, 0.9, True)
    theirs.param_groups[0]["ns_coefficients"] = (1.0, 2.0, 3.0)
    _, mine = ours(net, "muon")
    with pytest.raises(StateError, match=r"of another muon: infinity's has only ns_coefficients=\(3\.4445"):
        mine.load_state_dict(theirs.state_dict())
    mine.close()


def torchs(name: str, **numbers: Any) -> dict[str, Any]:
    net = Net(matrices=True)
    optimizer = getattr(torch.optim, name)(net.parameters(), **numbers)
    train(net, optimizer, range(2))
    return optimizer.state_dict()


def scheduled(betas: tuple[float, float] = (0.9, 0.99), **changed: Any) -> dict[str, Any]:
    optimizer = ScheduleFree(Net(matrices=True).parameters(), 0.02, 2)
    optimizer.group |= {"betas": betas, **changed}
    return optimizer.state_dict()


def without(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        **saved,
        "state": {i: {k: v for k, v in e.items() if k != name} for i, e in saved["state"].items()},
    }


@pytest.mark.parametrize(
    ("name", "saved", "wanted"),
    [
        (
            "adafactor",
            lambda: torchs("Adafactor", maximize=True),
            "^the state is of another adafactor: infinity's has only maximize=False$",
        ),
        ("muon", lambda: torchs("Muon", eps=10.0), "has only eps=1e-07"),
        ("schedulefree", lambda: without(scheduled(), "z"), "is not whole, or of another .*'z'"),
        ("schedulefree", lambda: scheduled(betas=(0.0, 0.99)), "a first beta above 0"),
        (
            "schedulefree",
            lambda: {"state": {}, "param_groups": [{"weight_lr_power": 2.0, "params": [0, 1]}]},
            "is not whole, or of another .*'r'",
        ),
    ],
)
def test_states_that_would_train_otherwise_are_refused(name, saved, wanted):
    _, mine = ours(Net(matrices=True), name)
    before = mine.state_dict()
    with pytest.raises(StateError, match=wanted):
        mine.load_state_dict(saved())
    assert mine.state_dict()["param_groups"] == before["param_groups"]
    mine.close()


def test_momentum_is_not_for_a_group_without_matrices():
    _, mine = ours(Net(matrices=True), "muon")
    mine.param_groups[0]["matrix"] = False
    with pytest.raises(StateError, match="second moments of a group with matrix: false"):
        mine.load_state_dict(torchs("Muon"))
    mine.close()


def test_what_has_not_made_a_step_is_loaded():
    saved = scheduled(k=0)
    _, mine = ours(Net(matrices=True), "schedulefree")
    mine.load_state_dict({**saved, "state": {0: {}, 1: {}}})
    assert not any(each["step"] for each in mine.state_dict()["state"].values())
    mine.close()


@pytest.mark.parametrize("evaluated", [False, True])
def test_schedulefree_in_training_and_after_its_eval(evaluated):
    net = Net()
    theirs = ScheduleFree(net.parameters(), 0.02, 2)
    train(net, theirs, range(3))
    if evaluated:  # weights are x then
        with torch.no_grad():
            for p, x in zip(net.parameters(), theirs.x, strict=True):
                p.copy_(x)
        theirs.group["train_mode"] = False
    model, mine = ours(net, "schedulefree")
    mine.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for p, x, z in zip(net.parameters(), theirs.x, theirs.z, strict=True):
            p.copy_(0.1 * z + 0.9 * x)
    for each, trained in ((mine, model), (theirs, net)):
        train(trained, each, range(3, 6))
    for key, wanted in net.state_dict().items():
        torch.testing.assert_close(infinity.state_dict(model)[key], wanted, rtol=1e-4, atol=1e-5)
    with infinity.ema(model):
        for x, average in zip(theirs.x, infinity.state_dict(model).values(), strict=True):
            torch.testing.assert_close(average, x, rtol=1e-4, atol=1e-5)
    mine.load_state_dict(own := mine.state_dict())
    assert "weight_lr_power" not in own["param_groups"][0]
    theirs.group["weight_sum"] *= 2
    with pytest.raises(
        StateError, match="of another schedulefree: infinity's has only one learning rate in all"
    ):
        mine.load_state_dict(theirs.state_dict())
    mine.close()
