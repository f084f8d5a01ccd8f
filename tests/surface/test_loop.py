"""What people do in their training loops: schedulers, zero_grad, accumulation, mistakes."""

import dataclasses
import itertools

import pytest
import torch
from torch.optim import lr_scheduler

import infinity
from infinity import StateError
from tests.helpers import training
from tests.helpers.cases import few
from tests.helpers.lockstep import BOTH, NVME, PLACES, batch, lockstep
from tests.helpers.reference import Rule

FREE = Rule(max_grad_norm=None)


def _transformers_cosine(optimizer):
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=8),
    "transformers": _transformers_cosine,
}


@pytest.mark.parametrize("name", SCHEDULES)
@NVME
def test_learning_rate_schedulers_work_as_they_are(tmp_path, name, place):
    with lockstep(place, tmp_path, rule=FREE) as pair:
        scheduler = SCHEDULES[name](pair.optimizer)
        rates = set()
        for _ in range(6):
            group = pair.optimizer.param_groups[0]
            rates.add(group["lr"])
            pair.plain.rule = dataclasses.replace(FREE, betas=tuple(group["betas"]))
            pair.step(lr=group["lr"])
            scheduler.step()
        assert len(rates) > 3
        pair.check()


def test_a_learning_rate_set_between_backward_and_step_is_used_when_no_update_has_started(tmp_path):
    for place in ("host", "one-version"):
        with lockstep(place, tmp_path, rule=FREE) as pair:
            pair.step(2)
            loss = pair.backward(3)
            for group in pair.optimizer.param_groups:
                group["lr"] = 2e-3
            pair.optimizer.step()
            pair.follow(loss, lr=2e-3, number=3)
            pair.check()


def test_a_learning_rate_set_between_backward_and_step_is_an_error_when_updates_have_started(tmp_path):
    with lockstep("nvme", tmp_path, rule=FREE) as pair:
        pair.step(2)
        pair.backward(3)
        pair.optimizer.param_groups[0]["lr"] = 2e-3
        with pytest.raises(StateError, match="between backward\\(\\) and step\\(\\)"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()  # and it can be repaired
        pair.optimizer.param_groups[0]["lr"] = FREE.lr
        pair.step(2)
        pair.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [1.0, None])
def test_zero_grad_in_place_of_step_forgets(tmp_path, place, clip):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=clip)) as pair:
        pair.step(2)
        for wrong in (50, 51):
            pair.backward(wrong)
            pair.optimizer.zero_grad()
        pair.step(2)
        pair.backward(52)
        pair.optimizer.zero_grad()
        pair.check()


@BOTH
def test_zero_grad_forgets_micro_batches(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            pair.backward(50)
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


@NVME
def test_zero_grad_before_backward_or_after_step_changes_nothing(tmp_path, place):
    with lockstep(place, tmp_path, rule=FREE) as pair:
        for _ in range(3):
            pair.optimizer.zero_grad()
            pair.step()
            pair.optimizer.zero_grad(set_to_none=False)
            pair.model.zero_grad()
            pair.step()
            pair.model.zero_grad(set_to_none=False)
        pair.check()


def test_gradients_that_went_with_a_failed_backward_are_an_error_of_the_step(tmp_path):
    def fail(grad):
        raise torch.OutOfMemoryError("no memory")

    with lockstep("host", tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            pair.backward(50)
        last = next(module for module in pair.model.modules() if isinstance(module, torch.nn.Linear))
        handle = last.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
        with pytest.raises(torch.OutOfMemoryError):
            pair.backward(51)
        handle.remove()
        pair.backward(51)  # tried again, without zero_grad
        with pytest.raises(StateError, match="those before it in this step were dropped"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


def test_a_step_whose_gradients_all_wait_for_another_backward_is_an_error(tmp_path):
    with lockstep("host", tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            pair.backward(50)
        with pytest.raises(StateError, match=r"step\(\): every backward pass was inside infinity\.no_sync"):
            pair.optimizer.step()
        with pytest.raises(StateError, match=r"optimizer\.grad_norm"):
            pair.model.zero_grad(set_to_none=False)
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


@NVME
def test_after_that_error_a_backward_outside_no_sync_completes_the_same_step(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            pair.backward(50)
            pair.backward(51)
        with pytest.raises(StateError, match="run the last one outside"):
            pair.optimizer.step()
        pair.backward(52)
        pair.optimizer.step()
        outcome = pair.plain.step([pair.batches(number) for number in (50, 51, 52)])
        assert pair.optimizer.grad_norm == pytest.approx(outcome.grad_norm, rel=1e-12)
        pair.step(2)
        pair.check()


@NVME
def test_model_zero_grad_in_place_of_step_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        pair.backward(50)
        pair.model.zero_grad()
        with pytest.raises(StateError, match=r"optimizer\.zero_grad"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


def test_model_zero_grad_between_micro_batches_is_an_error(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        pair.step()
        with infinity.no_sync(pair.model):
            pair.backward(50)
        pair.model.zero_grad()
        with pytest.raises(StateError, match=r"optimizer\.zero_grad"):
            pair.backward(51)
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


@NVME
def test_a_gradient_that_was_replaced_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.backward(1)
        pair.model.last.weight.grad = torch.zeros(4, 32, dtype=torch.bfloat16)
        with pytest.raises(StateError, match=r"last.weight.*grad"):
            pair.optimizer.step()


@BOTH
def test_a_second_backward_is_an_error_that_says_what_to_write(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        pair.backward(2)
        with pytest.raises(StateError, match=r"infinity\.no_sync"):
            pair.backward(3)
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


def test_step_without_backward_does_nothing(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        pair.optimizer.step()
        pair.step(2)
        pair.optimizer.step()
        pair.check()
        assert pair.optimizer.steps == 2


def test_step_takes_a_closure(tmp_path):
    with lockstep("host", tmp_path) as pair:
        loss = pair.optimizer.step(lambda: pair.backward(1))
        pair.follow(loss, number=1)
        pair.check()


@pytest.mark.parametrize(
    ("place", "clip", "dtype"),
    few(
        (("nvme", 1.0, "bf16"), ("nvme", None, "fp16"), ("host", 1.0, "fp16"), ("host", None, "bf16")),
        itertools.product(("host", "nvme"), (1.0, None), ("bf16", "fp16")),
    ),
)
def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path, place, clip, dtype):
    def batches(number):
        made = batch(number)
        return made if number != 3 else {"x": made["x"], "y": made["y"] * float("inf")}

    with lockstep(place, tmp_path, dtype=dtype, rule=Rule(max_grad_norm=clip), batches=batches) as pair:
        pair.step(2)
        pair.step()
        assert pair.optimizer.skipped
        assert pair.optimizer.grad_norm != pair.optimizer.grad_norm or pair.optimizer.grad_norm == float(
            "inf"
        )
        pair.step(2)
        assert not pair.optimizer.skipped
        assert pair.optimizer.steps == pair.plain.steps >= 2
        pair.check()


def test_fp16_without_a_scaled_loss_is_an_error(tmp_path):
    with lockstep("host", tmp_path, dtype="fp16") as pair:
        pair.model(**batch(1)).loss.backward()
        with pytest.raises(StateError, match=r"optimizer\.scale"):
            pair.optimizer.step()


@NVME
def test_grad_norm_is_the_norm_before_clipping(tmp_path, place):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=1e-3)) as pair:
        assert pair.optimizer.grad_norm is None
        pair.step()  # compares the norm with the plain loop's
        assert pair.optimizer.grad_norm > 1e-3


@BOTH
def test_parameters_frozen_and_thawed_between_steps(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for part, train in [("blocks.1", False), ("blocks.1.up", True), ("last.bias", False), ("", True)]:
            pair.require_grad(part, train)
            pair.step(2)
        pair.check()


@NVME
def test_optimizer_state_round_trip_continues_bitwise(tmp_path, place):
    with lockstep(place, tmp_path / "a") as pair:
        pair.step(3)
        weights, state = pair.model.state_dict(), pair.optimizer.state_dict()
        with lockstep(place, tmp_path / "b") as other:
            other.backward(77)
            other.optimizer.step()
            other.model.load_state_dict(weights)
            other.optimizer.load_state_dict(state)
            other.plain, other.number = pair.plain, pair.number
            other.step(3)
            other.check()
            assert other.optimizer.steps == 6


def test_optimizer_state_of_another_model_is_an_error(tmp_path):
    with lockstep("host", tmp_path) as pair:
        state = pair.optimizer.state_dict()
        del state["state"][2]
        with pytest.raises(StateError, match="no entry for 1 of"):
            pair.optimizer.load_state_dict(state)


@pytest.mark.parametrize("place", ["host", "nvme", "one-version"])
def test_a_second_optimizer_begins_with_moments_and_step_counts_of_zero(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(3)
        pair.optimizer = training.optimizer_for(pair.model, pair.rule)
        for name, master in pair.plain.masters.items():
            pair.plain.m[name], pair.plain.v[name] = torch.zeros_like(master), torch.zeros_like(master)
            pair.plain.counts[name] = 0
        pair.check()
        pair.step(3)
        pair.check()


def test_a_parameter_group_added_later_is_trained(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        held = pair.optimizer.param_groups.pop(1)["params"]
        pair.optimizer.add_param_group({"params": held, "weight_decay": 0.0})
        pair.step(2)
        pair.check()
