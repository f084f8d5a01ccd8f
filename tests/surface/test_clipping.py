"""``AdamW.clip_grad_norm_``: the norm before ``step()``, and clipping to a norm that the loop chooses."""

import contextlib
import math

import pytest
import torch

import infinity
from tests.helpers.launch import run_ranks
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


@BOTH
def test_a_hook_sees_the_gradients_of_a_step(tmp_path, place):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=0.25)) as pair:
        seen: dict[str, torch.Tensor] = {}
        handle = infinity.on_gradient(pair.model, lambda name, grad: seen.update({name: grad.clone()}))
        for number in range(1, 3):
            loss = pair.backward(number)
            pair.optimizer.step()
            assert pair.optimizer.grad_norm == pytest.approx(
                math.sqrt(sum(float(grad.float().square().sum()) for grad in seen.values())), rel=1e-6
            )
            wanted = {name: param.numel() for name, param in pair.model.named_parameters()}
            assert {name: grad.numel() for name, grad in seen.items()} == wanted
            pair.follow(loss, number=number)
        handle.remove()
        seen.clear()
        loss = pair.backward(3)
        pair.optimizer.step()
        pair.follow(loss, number=3)
        assert not seen
        pair.check()


def watched(folder: str) -> tuple[dict[str, float], float]:
    recipe = infinity.load_recipe(overrides=["train.dtype=fp32", f"memory.nvme=[{folder}]"])
    torch.manual_seed(0)
    with infinity.Init(recipe):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with pytest.raises(infinity.StateError, match=r"make infinity\.AdamW first"):
        infinity.on_gradient(model, lambda name, grad: None)
    optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    squares: dict[str, float] = {}
    infinity.on_gradient(
        model, lambda name, grad: squares.update({name: float(grad.double().square().sum())})
    )
    for number in range(2):
        torch.manual_seed(1 + number)
        with infinity.no_sync(model) if not number else contextlib.nullcontext():
            model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    norm = optimizer.grad_norm
    infinity.close(model)
    assert norm is not None
    return squares, norm


def test_each_rank_sees_its_shard_of_the_averaged_gradient(tmp_path):
    alone, norm = watched(str(tmp_path / "alone"))
    ranks = run_ranks(watched, 2, str(tmp_path / "two"))
    for name in alone:
        assert sum(squares.get(name, 0.0) for squares, _ in ranks) == pytest.approx(alone[name], rel=1e-5)
    assert ranks[0][1] == pytest.approx(norm, rel=1e-5)


def test_torchs_function_and_a_gradients_values_say_what_to_write(tmp_path):
    with lockstep("nvme", tmp_path, rule=Rule(max_grad_norm=1.0)) as pair:
        loss, params = pair.backward(1), [*pair.model.parameters()]
        assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in params)
        for read in (
            lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
            lambda: torch.nn.utils.clip_grad_value_(params, 1.0),
            lambda: params[0].grad.norm().item(),
            lambda: params[0].grad.data.norm(2),
        ):
            with pytest.raises(infinity.StateError, match=r"max_grad_norm, or call\s+optimizer.clip_grad"):
                read()
        assert repr(params[0].grad).startswith("ReleasedGradient(shape=")
        pair.optimizer.step()
        pair.follow(loss, number=1)
        pair.check()
