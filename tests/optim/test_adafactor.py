"""Adafactor is transformers' own to rounding."""

import pytest
import torch
from transformers import Adafactor

from infinity.core.config import SettingError
from infinity.optim.rules import find_rule


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (7,), (1, 9), (3, 8, 10)])
def test_twenty_steps_are_those_of_transformers_to_rounding(shape):
    rule, generator = find_rule("adafactor"), torch.Generator().manual_seed(1)
    threshold = 1.0 if len(shape) < 3 else 1e9  # which it takes of all packed matrices together
    group = {**rule.defaults, "lr": 0.02, "weight_decay": 0.1, "clip_threshold": threshold}
    weight = torch.randn(shape, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    theirs = Adafactor(
        [parameter], lr=0.02, weight_decay=0.1, clip_threshold=threshold, scale_parameter=False,
        relative_step=False,
    )  # fmt: skip
    sums = {name: torch.zeros(*of) for name, of in rule.sums(shape).items()}
    for step in range(1, 21):
        grad = torch.randn(shape, generator=generator) * 10.0 ** (step % 3)
        parameter.grad = grad.clone()
        theirs.step()
        packed = torch.Size(shape[:-2]).numel()
        kept = [{name: each.view(packed, -1)[n] for name, each in sums.items()} for n in range(packed)]
        way = rule.way(group, 0, shape, lambda n, step=step, kept=kept: (step, kept[n], None))
        made = torch.empty(weight.numel())
        for place in way.matrices:
            matrix = grad.view(-1)[place.start : place.stop].view(place.rows, place.columns)
            made[place.start : place.stop] = place.transform(matrix).view(-1)
        hyper = way.last.hyper({**group, **way.numbers}, step=step)
        [weight] = way.last.update(weight, made.view(shape), *hyper[:-2])
    torch.testing.assert_close(weight, parameter.detach(), rtol=2e-5, atol=2e-6)
    for name, kept in sums.items():
        torch.testing.assert_close(kept, theirs.state[parameter][name], rtol=2e-5, atol=1e-6)


def test_a_matrix_in_tiles_is_refused():
    with pytest.raises(SettingError, match=r"embed, which is in tiles .* set partition\.tile=never$"):
        find_rule("adafactor").check_place({"lr": 0.1}, "embed", (4, 4), tiled=True)
    find_rule("adafactor").check_place({"lr": 0.1}, "experts", (2, 4, 4), tiled=True)
