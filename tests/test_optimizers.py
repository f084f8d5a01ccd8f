"""Every optimizer, wherever its states are: bitwise the plain loop, on any number of ranks."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.config import SettingError
from infinity.engine.runtime import runtime_of
from infinity.optim import Form, Moment
from infinity.optim import Rule as UpdateRule
from infinity.optim.rule import RULES
from infinity.optim.rules import HostRule, find_rule
from infinity.partition.unit import SHARD_QUANTUM
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import UPDATES, Rule
from tests.helpers.training import assert_bitwise, build, optimizer_for, reference, train
from tests.shards.test_resume import interrupt, run, same, state
from tests.test_ranks import digest

ADAM = (("betas", (0.9, 0.95)), ("eps", 1e-8), ("weight_decay", 0.1))
#: Numbers of each rule; of the user's own, too.
NUMBERS: dict[str, tuple[float, tuple[tuple[str, Any], ...]]] = {
    "adafactor": (
        1e-2, (("eps", 1e-30), ("clip_threshold", 1.0), ("decay_rate", 0.8), ("weight_decay", 0.1)),
    ),
    "adam": (1e-2, ADAM),
    "adamw8bit": (1e-2, ADAM),
    "adamw4bit": (1e-2, ADAM),
    "apollo": (
        1e-2, (*ADAM, ("rank", 4), ("update_proj_gap", 3), ("scale", 1.0), ("per_tensor", False),
               ("growth", 1.01), ("seed", 5)),
    ),
    "apollo-mini": (
        1e-2, (*ADAM, ("rank", 1), ("update_proj_gap", 3), ("scale", 8.0), ("per_tensor", True),
               ("growth", 1.5), ("seed", 0)),
    ),
    "galore": (1e-2, (*ADAM, ("rank", 4), ("update_proj_gap", 3), ("scale", 0.5))),
    "soap": (1e-2, (*ADAM, ("precondition_frequency", 2))),
    "lion": (1e-3, (("betas", (0.9, 0.99)), ("weight_decay", 0.1))),
    "schedulefree": (1e-2, (*ADAM, ("warmup_steps", 2))),
    "sgd": (
        0.1, (("momentum", 0.9), ("dampening", 0.5), ("weight_decay", 0.1), ("nesterov", False)),
    ),
    "signed mean": (1e-2, (("beta", 0.9),)),
    "three": (1e-2, ()),
}  # fmt: skip


class SignedMean(UpdateRule):
    """A rule from outside: the sign of a mean, whose state is kept in bfloat16."""

    name = "signed mean"
    moments = (Moment("mean", Form(torch.bfloat16)),)
    defaults: Mapping[str, Any] = {"lr": 1e-3, "beta": 0.9}

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        return group["lr"], group["beta"]

    @staticmethod
    def update(weight: Any, grad: Any, mean: Any, lr: Any, beta: Any) -> tuple[Any, ...]:
        mean = beta * mean + (1 - beta) * grad
        return weight - lr * infinity.optim.sign(mean), mean


class Three(UpdateRule):
    """Three moments, the last of which counts the updates; its source has what torch alone runs."""

    name = "three"
    moments = Moment("last"), Moment("mean"), Moment("count", Form(torch.bfloat16))

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        return (group["lr"],)

    @staticmethod
    def update(weight: Any, grad: Any, last: Any, mean: Any, count: Any, lr: Any) -> tuple[Any, ...]:
        mean = mean * 0.75 + (grad - last).clone() * 0.25
        return weight - lr * (grad + mean) / (count + 1), grad, mean, count + 1


def signed_mean_(p, m, _, g, t, group):
    beta = torch.tensor(group["beta"])
    mean = beta * m + (1 - beta) * g
    p.sub_(torch.tensor(group["lr"]) * mean.sign())
    m.copy_(mean.bfloat16())


def three_(p, m, last, g, t, group):
    m.copy_(m * 0.75 + (g - last) * 0.25)
    last.copy_(g)
    p.sub_(torch.tensor(group["lr"]) * (g + m) / (torch.tensor(float(t - 1)) + 1))


UPDATES.update({"signed mean": signed_mean_, "three": three_})


#: Those whose updates need no whole matrices, so that they may begin before a step is clipped.
ELEMENTWISE = [name for name in NUMBERS if find_rule(name).in_one_pass]


def rule_of(name: str, **more: Any) -> Rule:
    lr, numbers = NUMBERS[name]
    return Rule(name=name, lr=lr, numbers=numbers, **more)


def place(folder: Path | str, name: str) -> list[str]:
    if name == "host":
        return ["memory.host=64MiB"]
    return [f"memory.nvme=[{folder}]", "memory.host=128MiB", "memory.resident=false", "run.name=mine"]


@pytest.mark.parametrize(
    ("name", "where", "dtype"),
    few(
        [(n, "nvme", "bf16") for n in NUMBERS if n != "adamw4bit"]
        + [("adamw8bit", "host", "fp32"), ("sgd", "host", "fp16")],
        itertools.product(NUMBERS, ("host", "nvme"), ("bf16", "fp16", "fp32")),
    ),
)
def test_training_is_bitwise_the_plain_loop(tmp_path, name, where, dtype):
    factory, batch = models.build("gpt", seed=3)
    how: dict[str, Any] = {"dtype": dtype, "steps": 4, "accumulate": 2, "rule": rule_of(name)}
    plain = reference(factory, batch, **how)
    assert_bitwise(train(factory, batch, place(tmp_path, where), **how), plain)


@pytest.mark.parametrize("name", few(("adamw8bit", "lion"), ELEMENTWISE))
def test_updates_that_began_before_a_step_was_clipped_are_undone_and_made_again(tmp_path, name):
    factory, batch = models.build("gpt", seed=3)
    how: dict[str, Any] = {"steps": 3, "rule": rule_of(name, max_grad_norm=0.01)}
    ours = train(factory, batch, place(tmp_path, "nvme"), **how)
    assert_bitwise(ours, reference(factory, batch, **how))
    assert min(ours.norms) > 1
    assert sum(each.rolled_back for each in ours.reports) > 0


class LookedUp(nn.Module):
    """Rows of 24 elements, of which 32 are three blocks of quantized moments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(400, 24), nn.Linear(24, 8)

    def forward(self, tokens: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.out(self.embed(tokens)).square().mean())


@pytest.mark.parametrize("name", few(("adamw8bit",), ELEMENTWISE))
def test_tiles_change_no_bit(tmp_path, name):
    def factory() -> nn.Module:
        torch.manual_seed(1)
        return LookedUp()

    def batch(number: int, *_: int) -> dict[str, Any]:
        return {"tokens": torch.randint(400, (64,), generator=torch.Generator().manual_seed(number))}

    how: dict[str, Any] = {"steps": 4, "rule": rule_of(name)}
    tiles: list[Any] = []
    ours = train(
        factory, batch, [*place(tmp_path, "nvme"), "partition.tile=4KiB"], **how,
        change=lambda model: tiles.extend(each for _, each in runtime_of(model).units.segments()),
    )  # fmt: skip
    assert [each.rows for each in tiles if each.is_tile] == [
        range(n, min(n + 64, 400)) for n in range(0, 400, 64)
    ]
    assert_bitwise(ours, reference(factory, batch, **how))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", NUMBERS)
def test_many_steps_are_bitwise_the_plain_loop(tmp_path, name, dtype):
    factory, batch = models.build("llama", seed=2)
    how: dict[str, Any] = {"dtype": dtype, "steps": 20, "rule": rule_of(name)}
    assert_bitwise(train(factory, batch, place(tmp_path, "nvme"), **how), reference(factory, batch, **how))


def test_a_run_of_a_rule_that_is_not_here_is_refused(tmp_path, monkeypatch):
    factory, batch = models.build("gpt", seed=3)
    model = build(factory, "bf16", place(tmp_path, "nvme"))
    run(model, optimizer_for(model, rule_of("three")), batch, range(1))
    interrupt(model)
    monkeypatch.delitem(RULES, "three")
    with pytest.raises(infinity.StateError, match=r"by three, which is no rule here: .*optim\.name=module"):
        build(factory, "bf16", place(tmp_path, "nvme"))


@pytest.mark.parametrize("name", few(("adamw8bit", "three"), NUMBERS))
def test_a_killed_run_goes_on_bitwise(tmp_path, name):
    rule, (factory, batch) = rule_of(name), models.build("gpt", seed=3)

    def start() -> tuple[Any, Any]:
        model = build(factory, "bf16", place(tmp_path, "nvme"))
        return model, optimizer_for(model, rule)

    model, optimizer = start()
    losses, final = run(model, optimizer, batch, range(4)), state(model, optimizer)
    infinity.close(model)
    model, optimizer = start()
    assert run(model, optimizer, batch, range(2)) == losses[:2]
    interrupt(model)
    model, optimizer = start()
    assert infinity.resume(model, optimizer) == 2
    assert run(model, optimizer, batch, range(2, 4)) == losses[2:]
    same(state(model, optimizer), final)
    moments, rule = {"step", "master", *(moment.name for moment in optimizer.rule.moments)}, optimizer.rule
    for each in optimizer.state_dict()["state"].values():
        assert set(each) == moments | rule.sums(each["master"].shape).keys()
    infinity.close(model)


@pytest.mark.parametrize("master", few(("bf16-stochastic",), ("bf16-stochastic", "kahan")))
def test_weights_of_another_master_train_alike_anywhere_and_go_on_bitwise(tmp_path, master):
    rule, (factory, batch), chosen = rule_of("lion"), models.build("gpt", seed=3), f"optim.master={master}"
    host = train(factory, batch, [*place(tmp_path, "host"), chosen], steps=3, rule=rule)
    exact = train(factory, batch, place(tmp_path, "host"), steps=3, rule=rule)
    assert any(not torch.equal(host.weights[name], exact.weights[name]) for name in host.weights)

    def start() -> tuple[Any, Any]:
        model = build(factory, "bf16", [*place(tmp_path, "nvme"), chosen])
        return model, optimizer_for(model, rule)

    model, optimizer = start()
    assert optimizer.rule.name == f"lion+{master}"
    assert run(model, optimizer, batch, range(2)) == host.losses[:2]
    interrupt(model)
    model, optimizer = start()
    assert infinity.resume(model, optimizer) == 2
    assert run(model, optimizer, batch, range(2, 3)) == host.losses[2:]
    found = optimizer.state_dict()
    for each in found["state"].values():  # nothing but a weight, and what is beside it
        kept = each["master"].bfloat16().float()
        assert torch.equal(kept, each["master"]) == (master == "bf16-stochastic")
    before = state(model, optimizer)
    optimizer.load_state_dict(found)
    same(state(model, optimizer), before)
    infinity.close(model)


def play(folder: str, names: list[str]) -> list[list[str]]:
    """Digests of each rule in each place, on this rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    factory, batch = models.build("gpt", seed=3)
    how: dict[str, Any] = {"dtype": "bf16", "steps": 3, "rank": rank, "world": world}
    return [
        [
            digest(train(factory, batch, place(folder, w)[:3], rule=rule_of(n), **how))
            for w in ("host", "nvme")
        ]
        for n in names
    ]


@pytest.mark.parametrize("names", [["adamw8bit"], pytest.param([*NUMBERS], marks=pytest.mark.slow)])
def test_two_ranks_give_the_same_bits_in_every_place(tmp_path, names):
    for digests in run_ranks(play, 2, str(tmp_path), names):
        assert all(host == nvme for host, nvme in digests)


def play_alike(folder: str, names: list[str]) -> list[tuple[list[str], list[str]]]:
    """Losses, and weights, of each rule; every rank is given the same batch."""
    factory, batch = models.build("gpt", seed=3)
    out = []
    for name, _, master in (each.partition("+") for each in names):
        how: dict[str, Any] = {"steps": 3, "rule": rule_of(name, max_grad_norm=None)}
        where = [*place(folder, "nvme")[:3], f"optim.master={master or 'exact'}"]
        found = train(factory, lambda n, *_: batch(n), where, **how)
        weights = [f"{key} {each.float().sum().item().hex()}" for key, each in found.weights.items()]
        out.append(([loss.hex() for loss in found.losses], weights))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["adamw8bit", "adamw8bit+bf16-stochastic"], pytest.param(ELEMENTWISE, marks=pytest.mark.slow)]
)
def test_two_ranks_with_equal_gradients_train_as_one(tmp_path, names):
    one, two = (run_ranks(play_alike, n, str(tmp_path / str(n)), names) for n in (1, 2))
    assert one == two[:1] == two[1:]


def test_shards_of_ranks_change_no_quantized_number():
    """Blocks are whole in every shard, so all ranks' updates are those of one."""
    rule, n, world = RULES["adamw8bit"], 4 * SHARD_QUANTUM, 4
    layout, hyper, results = rule.layout(torch.bfloat16), rule.hyper(rule.defaults), []
    for shards in (1, world):
        generator = torch.Generator().manual_seed(1)
        weight, state = torch.ones(n, dtype=torch.bfloat16), layout.complete((), n)
        for _ in range(3):
            grad = torch.randn(n, generator=generator).bfloat16()
            for start in range(0, n, n // shards):
                stop = start + n // shards
                part = layout.part(state, start, stop)
                placed = HostRule(rule, torch.bfloat16)
                placed.update(weight[start:stop], grad[start:stop], part, weight[start:stop], hyper)
        results.append([weight, *state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_groups_by_patterns_train_as_groups_of_parameters(tmp_path):
    factory, batch = models.build("gpt", seed=3)
    trained = []
    for by_pattern in (True, False):
        model = build(factory, "bf16", [])
        if by_pattern:
            patterns = {"*.bias|*norm*": {"weight_decay": 0.0}, "*embed*": {"lr": 1e-3}}
            optimizer = infinity.optim.Lion(model, lr=1e-2, weight_decay=0.1, groups=patterns)
        else:
            groups: dict[tuple[float, float], list[Any]] = {}
            for name, param in model.named_parameters():
                plain = param.ndim < 2 or name.endswith(".bias") or "norm" in name
                key = 1e-3 if "embed" in name else 1e-2, 0.0 if plain else 0.1
                groups.setdefault(key, []).append(param)
            made = [{"params": p, "lr": lr, "weight_decay": decay} for (lr, decay), p in groups.items()]
            optimizer = infinity.optim.Lion(model, params=made)
        trained.append([run(model, optimizer, batch, range(3)), infinity.state_dict(model)])
        infinity.close(model)
    assert trained[0][0] == trained[1][0]
    assert all(torch.equal(trained[0][1][name], each) for name, each in trained[1][1].items())


def test_what_is_wrong_with_an_optimizer_is_said():
    model = build(models.build("gpt", seed=3)[0], "bf16", [])
    for make, message in (
        (lambda: infinity.optim.Optimizer(model, "adamw8"), r"did you mean adamw or adamw8bit"),
        (lambda: infinity.optim.Optimizer(model, "nowhere:Rule"), r"module:Class.*nowhere"),
        (lambda: infinity.optim.Optimizer(model, "math:pi"), r"subclass of infinity\.optim\.Rule"),
        (lambda: infinity.optim.Lion(model, momentun=0.9), r"momentun.*a number of lion: lr, betas"),
        (lambda: infinity.optim.SGD(model, momentun=0.9), r"did you mean momentum"),
        (lambda: infinity.optim.SGD(model, nesterov=3), r"nesterov.*true or false"),
        (lambda: infinity.optim.SGD(model, nesterov=True), r"nesterov.*False, or a momentum > 0"),
        (lambda: infinity.optim.Adam(model, betas=(0.9, 1.0)), r"betas.*two numbers"),
        (
            lambda: infinity.optim.Lion(model, groups={"nothing.*": {"lr": 1}}),
            r"nothing.*a pattern of trained",
        ),
        (lambda: infinity.optim.Lion(model, groups={"*": {"eps": 1}}), r"eps.*a number of lion"),
    ):
        with pytest.raises(infinity.RecipeError, match=message):
            make()
    optimizer = infinity.optim.Lion(model)
    batch = models.build("gpt", seed=3)[1]
    run(model, optimizer, batch, range(1))
    with pytest.raises(infinity.StateError, match=r"states of lion.*optim\.name=adamw"):
        infinity.AdamW(model)
    infinity.close(model)


SCHEDULERS = {
    "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [1]}, "ConstantLR": {}, "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9}, "PolynomialLR": {}, "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}, "ReduceLROnPlateau": {"patience": 0},
    "LambdaLR": {"lr_lambda": [lambda s: 1 / (s + 1)] * 2}, "MultiplicativeLR": {"lr_lambda": lambda s: 0.9},
}  # fmt: skip


def test_every_scheduler_of_torch_drives_an_optimizer():
    theirs = torch.nn.Linear(2, 2)
    other = torch.optim.SGD([{"params": [p]} for p in theirs.parameters()], lr=0.1, momentum=0.9)
    model = build(models.build("gpt", seed=3)[0], "bf16", [])
    batch = models.build("gpt", seed=3)[1]
    optimizer = infinity.optim.SGD(model, lr=0.1, momentum=0.9, weight_decay=0.1)
    for name, options in SCHEDULERS.items():
        rates = []
        for each in (optimizer, other):
            for group in each.param_groups:
                group["lr"] = 0.1
                group.pop("initial_lr", None)
            scheduler = getattr(torch.optim.lr_scheduler, name)(each, **options)
            for step in range(3):
                if each is optimizer:
                    run(model, optimizer, batch, [step])
                else:
                    other.step()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                rates.append([(group["lr"], group["momentum"]) for group in each.param_groups])
        assert rates[:3] == rates[3:], name
    infinity.close(model)


def test_the_state_of_torchs_sgd_is_loaded_and_that_of_another_rule_is_refused():
    factory, batch = models.build("gpt", seed=3)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    plain = factory()
    theirs = torch.optim.SGD(plain.parameters(), **options)
    for step in range(2):
        plain(**batch(step)).loss.backward()
        theirs.step()
        theirs.zero_grad()
    model = build(factory, "fp32", [])
    optimizer = infinity.optim.SGD(model, params=[{"params": [*model.parameters()]}], **options)
    other = torch.optim.AdamW(plain.parameters())
    for step in range(2, 4):
        plain(**batch(step)).loss.backward()
        other.step()
        other.zero_grad()
    with pytest.raises(infinity.StateError, match="not of sgd: its parameter groups have no dampening"):
        optimizer.load_state_dict(other.state_dict())
    plainest = torch.optim.SGD(plain.parameters(), lr=0.1).state_dict()  # which keeps nothing
    optimizer.load_state_dict(plainest)
    assert not any(each["momentum_buffer"].any() for each in optimizer.state_dict()["state"].values())
    state = theirs.state_dict()
    optimizer.load_state_dict(state)
    got = optimizer.state_dict()["state"]
    assert all(
        torch.equal(got[i]["momentum_buffer"], each["momentum_buffer"]) for i, each in state["state"].items()
    )
    state["state"][0] = {"momentum_buffer": state["state"][0]["momentum_buffer"] * float("nan")}
    with pytest.raises(infinity.StateError, match="momentum_buffer has NaN; nothing was loaded"):
        optimizer.load_state_dict(state)
    state["state"][0] = dict.fromkeys(
        ("momentum_buffer", "exp_avg_sq"), torch.zeros_like(state["state"][0]["momentum_buffer"])
    )
    with pytest.raises(infinity.StateError, match="has exp_avg_sq, which sgd does not keep"):
        optimizer.load_state_dict(state)
    own = optimizer.state_dict()
    own["state"][1]["master"][0] = float("nan")
    with pytest.raises(infinity.StateError, match="parameter 1: master has NaN; nothing was loaded"):
        optimizer.load_state_dict(own)
    own = optimizer.state_dict()
    own["names"][:2] = own["names"][1::-1]
    with pytest.raises(
        infinity.StateError, match=r"parameter 0 of the state is .*in the same order; nothing"
    ):
        optimizer.load_state_dict(own)
    with pytest.raises(infinity.StateError, match="the state is of lion, and has no 'names'"):
        optimizer.load_state_dict({"rule": "lion", "state": {}, "param_groups": []})
    infinity.close(model)


@pytest.mark.parametrize("name", few(("adamw8bit", "signed mean"), NUMBERS))
def test_a_portable_checkpoint_and_a_state_dict_go_on_bitwise(tmp_path, name):
    factory, batch = models.build("gpt", seed=3)
    rule, path = rule_of(name), tmp_path / "saved"
    model = build(factory, "bf16", place(tmp_path / "a", "nvme")[:3])
    optimizer = optimizer_for(model, rule)
    run(model, optimizer, batch, range(2))
    infinity.save_checkpoint(model, optimizer, path)
    saved = optimizer.state_dict()
    losses, final = run(model, optimizer, batch, range(2, 4)), state(model, optimizer)
    infinity.close(model)
    for way in ("checkpoint", "dict"):
        model = build(factory, "bf16", [])
        optimizer = optimizer_for(model, rule)
        if way == "checkpoint":
            assert infinity.load_checkpoint(model, optimizer, path) == 2
        else:
            optimizer.load_state_dict(saved)
        assert run(model, optimizer, batch, range(2, 4)) == losses
        same(state(model, optimizer), final)
        infinity.close(model)


def test_a_name_belongs_to_one_rule() -> None:
    """A class that is made again keeps it, as in a notebook; another one would be used in its place."""
    with pytest.raises(SettingError, match=r"Mine\.name: got 'adamw'; wanted another name.*AdamWRule"):
        type("Mine", (SignedMean,), {"name": "adamw", "__module__": __name__})
    again = type("SignedMean", (SignedMean,), {"name": "signed mean", "__module__": __name__})
    assert type(RULES["signed mean"]) is again
    RULES["signed mean"] = SignedMean()
