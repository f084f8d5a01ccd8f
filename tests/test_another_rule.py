"""A state of one rule that another goes on from: in an interrupted run, a checkpoint, a dictionary."""

from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of
from infinity.optim.dictionaries import Parameter, carried, fitted
from infinity.optim.rule import RULES
from infinity.optim.rules import find_rule
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.training import build
from tests.optim.test_each_rule import dynamic_map
from tests.shards.test_resume import interrupt, run, same, state
from tests.test_optimizers import place

#: From one rule to another, the moments that carry over, and of which share of the parameters.
CHANGES = {
    ("adamw", "adamw8bit"): ("exp_avg, exp_avg_sq", "all"),
    ("adamw8bit", "adamw"): ("exp_avg, exp_avg_sq", "all"),
    ("adamw", "lion"): ("exp_avg", "all"),
    ("lion", "adamw"): ("", "none"),
    ("adamw", "muon"): ("exp_avg, exp_avg_sq", "all"),
    ("muon", "adamw"): ("exp_avg, exp_avg_sq", "some"),
    ("muon", "lion"): ("exp_avg", "all"),
    ("lion", "muon"): ("exp_avg", "some"),
    ("adamw", "schedulefree"): ("", "none"),
    ("adamw", "adamw+ema"): ("exp_avg, exp_avg_sq", "all"),
    ("adamw", "adamw+kahan"): ("exp_avg, exp_avg_sq", "all"),
    ("sgd", "lion"): ("", "none"),
    ("adamw", "adafactor"): ("", "none"),
    ("adafactor", "adamw8bit"): ("", "none"),
    ("adamw", "apollo-mini"): ("", "none"),
    ("apollo-mini", "soap"): ("", "none"),
}  # fmt: skip


def start(folder: Any, where: str, name: str) -> tuple[Any, Any]:
    plain, *variants = name.split("+")
    chosen = {"ema": "optim.ema=0.9", "kahan": "optim.master=kahan"}
    more = [f"optim.name={plain}", "memory.host=256MiB", *(chosen[each] for each in variants)]
    model = build(models.build("gpt", seed=3)[0], "bf16", [*place(folder, where), *more])
    options = {"ema": 0.9} if "ema" in variants else {}
    return model, infinity.optim.Optimizer(model, plain, lr=1e-3, max_grad_norm=1.0, **options)


FEW = [("adamw", "adamw8bit"), ("adamw", "muon"), ("muon", "adamw"), ("lion", "muon")]


@pytest.mark.parametrize(("before", "now"), few(FEW, CHANGES))
def test_a_run_a_checkpoint_and_a_dictionary_go_on_alike(tmp_path, before, now):
    names, share = CHANGES[before, now]
    _, batch = models.build("gpt", seed=3)
    model, optimizer = start(tmp_path / "run", "nvme", before)
    run(model, optimizer, batch, range(2))
    saved = optimizer.state_dict()
    infinity.save_checkpoint(model, optimizer, tmp_path / "saved")
    interrupt(model)
    found = []
    for way in ("run", "checkpoint", "dictionary"):
        model, optimizer = start(tmp_path / way, "nvme" if way == "run" else "host", now)
        rates = [group["lr"] for group in optimizer.param_groups]
        if way == "run":
            assert infinity.resume(model, optimizer) == 2
        elif way == "checkpoint":
            assert infinity.load_checkpoint(model, optimizer, tmp_path / "saved") == 2
        else:
            optimizer.load_state_dict(saved)
        [note] = [each for each in runtime_of(model).notes if "goes on with" in each]
        assert f"the state is of {before} and goes on with {now}: " in note
        assert ("carry over" in note) == (share != "none")
        assert share == "none" or f": {names} of " in note
        assert rates == [group["lr"] for group in optimizer.param_groups]
        begun = optimizer.state_dict()["state"]
        counts = [int(each["step"]) for each in begun.values()]
        assert {2 if share == "all" else 0} == {*counts} or (share == "some" and {*counts} == {0, 2})
        by_name = dict(zip(saved["names"], saved["state"].values(), strict=True))
        for name, each in zip(optimizer.state_dict()["names"], begun.values(), strict=True):
            assert torch.equal(each["master"], by_name[name]["master"]) or "kahan" in now
            for moment in (m.name for m in optimizer.rule.moments):
                carries = each["step"] > 0 and moment in by_name[name]
                wanted = by_name[name][moment] if carries else torch.zeros(())
                tolerance = 0.2 * float(wanted.abs().max()) if "bit" in now else 0
                assert (each[moment] - wanted).abs().max() <= tolerance
        run(model, optimizer, batch, range(2, 4))
        found.append(state(model, optimizer))
        infinity.close(model)
    same(found[0], found[1])
    same(found[0], found[2])


def test_a_scheduler_goes_on_with_another_number_of_groups(tmp_path):
    _, batch = models.build("gpt", seed=3)
    found = []
    for name in ("muon", "lion"):
        model, optimizer = start(tmp_path, "nvme", name)
        found.append(
            (model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at)))
        )
        optimizer.follow(scheduler=found[-1][2])
        if name == "muon":
            run(model, optimizer, batch, range(1))
            found[-1][2].step()
            run(model, optimizer, batch, range(1, 2))
            interrupt(model)
    before, now = (scheduler for _, _, scheduler in found)
    assert len(now.base_lrs) < len(before.base_lrs)
    assert infinity.resume(model, optimizer) == 2
    assert now.last_epoch == 1
    run(model, optimizer, batch, range(2, 3))
    now.step()
    assert now.get_last_lr() == [rate / 3 for rate in now.base_lrs]
    infinity.close(model)


def test_a_line_says_what_carries_over():
    line = carried(find_rule("adamw"), find_rule("lion"), 3, 3)
    assert line == (
        "the state is of adamw and goes on with lion: exp_avg of 3 of 3 parameters carry over; exp_avg_sq is "
        "dropped"
    )
    line = carried(find_rule("lion"), find_rule("adamw"), 0, 3)
    assert line == "the state is of lion and goes on with adamw: moments begin at zero"


def as_bitsandbytes(values: torch.Tensor, signed: bool, block: int) -> dict[str, Any]:
    """Codes, table and largest values of blocks, as its 8-bit optimizers keep a state."""
    table = dynamic_map(signed)
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % block)).view(-1, block)
    largest = flat.abs().amax(1)
    codes = torch.bucketize(flat / largest[:, None], (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return {"state": codes.view(-1)[: values.numel()].view(values.shape), "qmap": table, "absmax": largest}


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("nested", [True, False])
def test_a_state_of_bitsandbytes_is_loaded(block, nested):
    rule, shape = RULES["adamw8bit"], torch.Size((70, 90))
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    kept = {
        f"{key}{number}": value
        for number, moment in ((1, first), (2, second))
        for key, value in as_bitsandbytes(moment, number == 1, block).items()
    }
    small = {"state1": first[0], "state2": second[0]}
    states = {i: {"step": 3, **({"__bnb_optimizer_quant_state__": each} if nested else each)}
              for i, each in enumerate((kept, small))}  # fmt: skip
    group = {**rule.defaults, "alpha": 0.0, "t_alpha": None, "params": [0, 1]}
    params = [Parameter(str(i), s, True, rule.way({}, 0, s)) for i, s in enumerate((shape, shape[1:]))]
    made = fitted(rule, {"state": states, "param_groups": [group]}, params, [group], {}.__getitem__)
    assert [each["step"] for each in made.state.values()] == [3, 3]
    assert torch.equal(made.state[1]["exp_avg"], first[0])
    assert (made.state[0]["exp_avg"] - first).abs().mean() < 0.02
    assert (made.state[0]["exp_avg_sq"] - second).abs().mean() < 0.005
    del states[0].get("__bnb_optimizer_quant_state__", states[0])["absmax1"]
    with pytest.raises(StateError, match="8-bit state without a largest value for each block"):
        fitted(rule, {"state": states, "param_groups": [group]}, params, [group], {}.__getitem__)


@pytest.mark.parametrize(
    ("name", "rule"), [("AdamW8bit", "adamw8bit"), ("Lion8bit", "lion"), ("AdamW", "adamw")]
)
def test_bitsandbytes_own_optimizers_give_such_states(name, rule):
    package = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(64, 80)), torch.nn.Parameter(torch.randn(64))]
    theirs = getattr(package.optim, name)(weights, lr=1e-3, weight_decay=0.0)
    plain, means = 0.9, [torch.zeros_like(weight) for weight in weights]
    for _ in range(5):
        for weight, mean in zip(weights, means, strict=True):
            weight.grad = torch.randn_like(weight)
            mean.mul_(plain if rule != "lion" else 0.99).add_(
                weight.grad, alpha=0.1 if rule != "lion" else 0.01
            )
        theirs.step()
    packed = theirs.state_dict()
    params = [
        Parameter(str(i), w.shape, True, find_rule(rule).way({}, 0, w.shape)) for i, w in enumerate(weights)
    ]
    made = fitted(find_rule(rule), packed, params, packed["param_groups"], {}.__getitem__)
    for i, mean in enumerate(means):
        assert (made.state[i]["exp_avg"] - mean).abs().mean() < 0.02 * mean.abs().mean()
