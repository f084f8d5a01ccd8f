"""A state of one rule that another goes on from: in an interrupted run, a checkpoint, a dictionary."""

from typing import Any

import pytest
import torch

import infinity
from infinity.core.config import SettingError
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of
from infinity.optim.dictionaries import Parameter, carried, fitted
from infinity.optim.rule import RULES
from infinity.optim.rules import find_rule
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.training import build
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
    ("adamw", "adamw+bf16-stochastic"): ("exp_avg, exp_avg_sq", "all"),
    ("sgd", "lion"): ("", "none"),
    ("adamw", "adafactor"): ("", "none"),
    ("adafactor", "adamw8bit"): ("", "none"),
    ("adamw", "apollo-mini"): ("", "none"),
    ("apollo-mini", "soap"): ("", "none"),
}  # fmt: skip


def start(folder: Any, where: str, name: str) -> tuple[Any, Any]:
    plain, *variants = name.split("+")
    chosen = {"ema": "optim.ema=0.9", "bf16-stochastic": "optim.master=bf16-stochastic"}
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
            assert torch.equal(each["master"], by_name[name]["master"]) or "stochastic" in now
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


@pytest.mark.parametrize(
    ("name", "numbers", "kept", "wanted"),
    [
        ("adafactor", {"lr": 1e-3, "beta2_decay": -0.8, "d": 1.0}, {}, "no clip_threshold, decay_rate, eps"),
        (
            "adafactor",
            {**RULES["adafactor"].defaults, "eps": (1e-30, 1e-3)},
            {"exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(3)},
            r"eps: got \(1e-30, 0.001\)",
        ),
        ("muon", {"lr": 1e-3, "momentum": 0.9, "ns_coefficients": (3.4, -4.8, 2.0)}, {}, "begin at zero"),
        ("adamw8bit", RULES["adamw8bit"].defaults, {"state1": torch.ones(4, 3)}, "has state1, which"),
        ("schedulefree", RULES["schedulefree"].defaults, {"z": torch.ones(4, 3)}, "has z, which"),
    ],
)  # fmt: skip
def test_states_that_other_libraries_keep_in_another_way_are_refused(name, numbers, kept, wanted):
    rule, shape = RULES[name], torch.Size((4, 3))
    group = {**rule.defaults, "params": [0]}
    params = [Parameter("w", shape, True, rule.way(group, 0, shape))]
    moments = {moment.name: torch.ones(shape) for moment in rule.moments}
    packed = {"state": {0: {"step": 3, **moments, **kept}}, "param_groups": [{**numbers, "params": [0]}]}
    with pytest.raises((StateError, SettingError), match=wanted):
        fitted(rule, packed, params, [group])
