"""Numbers of parameter groups that are set later are checked at each step; a wrong one changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.core.config import SettingError
from infinity.core.errors import StateError
from tests.helpers.training import small_units
from tests.test_matrix_rules import begin, place, run, same, state, trained

#: By rule: numbers it is made with, one set later, and what the error says.
WRONG: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "adamw": ({}, "betas", None, "two numbers >= 0 and < 1"),
    "sgd": ({}, "lr", -0.5, "a number >= 0"),
    "muon": ({}, "matrix", False, "as it was when the optimizer was made"),
    "muon parts": ({}, "parts", 0, "a whole number"),
    "apollo": ({"rank": 4}, "rank", 2, "4, as all parameters have"),
    "galore": ({"rank": 4}, "update_proj_gap", 0, "a whole number >= 1"),
    "soap": ({}, "matrix", False, "as it was when the optimizer was made"),
}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_number_is_named_by_step_and_once_it_is_right_all_is_as_if_it_had_been(tmp_path, case, clip):
    made, key, value, wanted = WRONG[case]
    name = case.split()[0]
    where = "host" if name == "soap" else "nvme"
    model, optimizer = begin(tmp_path, where, clip=clip, name=name, **made)
    run(model, optimizer, range(1))
    group = next(each for each in optimizer.param_groups if each.get("matrix", True))
    before, right = state(model, optimizer), group[key]
    group[key] = value
    with pytest.raises(SettingError, match=f"{key}.*{wanted}"):
        run(model, optimizer, range(1, 2))
    assert same(before, state(model, optimizer))
    group[key] = right
    optimizer.step()  # the gradients are there
    optimizer.zero_grad()
    run(model, optimizer, range(2, 3))
    found = state(model, optimizer)
    optimizer.close()
    plain = trained(tmp_path, where, clip=clip, name=name, **made)
    assert all(torch.equal(each, plain[name]) for name, each in found.items())


def test_a_number_that_is_set_right_before_the_step_counts(tmp_path):
    """Also if it was wrong while gradients came."""
    found = []
    for wrong in (0.01, -1.0):
        model, optimizer = begin(tmp_path, "nvme", clip=1.0, name="adamw")
        optimizer.param_groups[0]["lr"] = wrong
        model(torch.arange(12).view(1, -1)).backward()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        found.append(state(model, optimizer))
        optimizer.close()
    assert same(*found)


def test_a_scheduler_that_makes_a_rate_negative_is_stopped(tmp_path):
    model, optimizer = begin(tmp_path, "host", name="adamw")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)
    for step in range(2):
        run(model, optimizer, range(step, step + 1))
        scheduler.step()
    with pytest.raises(SettingError, match="lr"):
        run(model, optimizer, range(2, 3))
    optimizer.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        *(("step", StateError), ("fraction", StateError), ("no step", StateError), ("no tensor", StateError)),
        *(("rank", SettingError), ("matrix", SettingError), ("scaler", StateError)),
    ],
)
def test_a_dictionary_that_is_wrong_anywhere_changes_nothing(tmp_path, wrong, error):
    model, optimizer = begin(tmp_path, "host", dtype="fp16", name="galore", rank=4)
    run(model, optimizer, range(1))
    given = optimizer.state_dict()
    run(model, optimizer, range(1, 2))
    before, numbers, scale = state(model, optimizer), optimizer.param_groups[0]["lr"], optimizer.scaler.scale
    last = max(given["state"])
    given["param_groups"][0]["lr"] = 0.5
    match wrong:
        case "step":
            given["state"][last]["step"] = "many"
        case "fraction":
            given["state"][last]["step"] = torch.tensor(1.5)
        case "no step":
            del given["state"][last]["step"]
        case "no tensor":
            given["state"][last]["exp_avg"] = 0.0
        case "rank":
            given["param_groups"][-1]["rank"] = 3
        case "matrix":
            given["param_groups"][0]["matrix"] = False
        case "scaler":
            given["loss_scaler"] = {"scale": "large", "good_steps": 0}
    with pytest.raises(error, match={"fraction": "step is", "no step": "step is None"}.get(wrong, wrong)):
        optimizer.load_state_dict(given)
    assert (optimizer.param_groups[0]["lr"], optimizer.scaler.scale) == (numbers, scale)
    assert same(before, state(model, optimizer))
    run(model, optimizer, range(2, 3))
    optimizer.close()


@pytest.mark.parametrize("name", ["adafactor", "soap"])
def test_a_group_may_have_numbers_of_another_rule(tmp_path, name):
    found = []
    for more in ({}, {"parts": 2, **({"matrix": False} if name == "adafactor" else {})}):
        model, optimizer = begin(tmp_path, "host", name=name)
        for group in optimizer.param_groups:
            group |= more
        run(model, optimizer, range(2))
        found.append(state(model, optimizer))
        optimizer.close()
    assert same(*found)


class Filtered(nn.Module):
    """A weight of an image's convolution, and the same as a matrix with a row for each output channel."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        values = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(values.flatten(1) if flat else values)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, images: Tensor) -> Tensor:
        made = nn.functional.conv2d(images, self.weight.view(6, 2, 3, 3), self.bias)
        return (made.flatten(1) ** 2).mean()


@pytest.mark.parametrize("name", ["adafactor", "apollo+rank=3", "galore+rank=3", "soap", "muon"])
def test_a_convolution_is_one_matrix_with_a_row_for_each_output_channel(tmp_path, name):
    found: list[dict[str, Tensor]] = []
    for flat, where in ((False, "host"), (True, "host"), (False, "nvme")):
        recipe = infinity.load_recipe(overrides=[*place(tmp_path, where), "train.dtype=fp32"])
        with small_units(), infinity.Init(recipe):
            model = Filtered(flat=flat)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]  # as matrices: no convolution by kind
        optimizer = infinity.optim.Optimizer(model, name, lr=0.02, params=groups)
        for step in range(3):
            images = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(step))
            model(images).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = optimizer.state_dict()
        optimizer.load_state_dict(kept)
        found.append({k: v.flatten() for k, v in infinity.state_dict(model).items()})
        optimizer.close()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
