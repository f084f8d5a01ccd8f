"""``AdamW.clip_grad_norm_``: the norm before ``step()``, and clipping to a norm that the loop chooses."""

import math

import pytest
import torch

import infinity
from tests.helpers.lockstep import BOTH, lockstep
from tests.helpers.reference import Rule


@BOTH
def test_a_step_is_clipped_to_the_norm_that_the_loop_gives(tmp_path, place):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=0.25)) as pair:
        pair.optimizer.max_grad_norm = 1e9  # which the loop overrides
        for number in range(1, 4):
            loss = pair.backward(number)
            norm = pair.optimizer.clip_grad_norm_(0.25)
            assert norm.shape == ()
            pair.optimizer.step()
            assert float(norm) == pytest.approx(pair.optimizer.grad_norm, rel=1e-6)
            pair.follow(loss, number=number)
        pair.check()


def test_of_several_calls_the_least_norm_counts(tmp_path):
    with lockstep("nvme", tmp_path, rule=Rule(max_grad_norm=0.25)) as pair:
        loss = pair.backward(1)
        norms = [float(pair.optimizer.clip_grad_norm_(each)) for each in (0.25, math.inf, 0.5)]
        pair.optimizer.step()
        assert norms == pytest.approx([pair.optimizer.grad_norm, 0.25, 0.25], rel=1e-6)
        pair.follow(loss, number=1)
        pair.check()


def test_a_norm_that_clips_nothing_is_known_without_max_grad_norm(tmp_path):
    with lockstep("nvme", tmp_path, rule=Rule(max_grad_norm=None)) as pair:
        loss = pair.backward(1)
        norm = pair.optimizer.clip_grad_norm_(math.inf)
        pair.optimizer.step()
        pair.follow(loss, number=1)
        assert float(norm) == pytest.approx(pair.optimizer.grad_norm, rel=1e-6)
        loss = pair.backward(2)
        with pytest.raises(infinity.StateError, match=r"make it with max_grad_norm=0\.5"):
            pair.optimizer.clip_grad_norm_(0.5)
        pair.optimizer.step()
        pair.follow(loss, number=2)
        pair.check()


def test_what_is_no_norm_and_what_has_none(tmp_path):
    with lockstep("host", tmp_path, rule=Rule(max_grad_norm=1.0)) as pair:
        for wrong in (0, -1.0, math.nan, "1", True):
            with pytest.raises(ValueError, match="max_norm"):
                pair.optimizer.clip_grad_norm_(wrong)
        with pytest.raises(infinity.StateError, match="call it right before step"):
            pair.optimizer.clip_grad_norm_(1.0)
        pair.backward(1)
        pair.optimizer.clip_grad_norm_(1.0)
        pair.optimizer.zero_grad()  # forgets the norm, too
        pair.step()
        assert torch.isfinite(torch.tensor(pair.optimizer.grad_norm))
        pair.check()
