"""Promise 1: placement never changes numbers. One rank against the plain loop, bit by bit."""

import functools
import itertools
from typing import Any

import pytest

from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, assert_bitwise, reference, small_units, streaming, train

NAMES = ("llama", "gpt2", "t5", "bert", "vit", "gpt")

#: Enough for every path: the step that is recorded, the first that is planned, and what its updates left.
STEPS = 6
#: Place, dtype and clip of those that take many more, for what differs in a bit only now and then.
MANY_STEPS, LONG = 20, [("nvme", "bf16", 1.0), ("nvme", "fp32", None), ("nvme", "fp16", None)]


@functools.cache
def plain_loop(name: str, seed: int, **options: Any) -> Trained:
    """What the plain loop gives; every placement is compared with the same."""
    return reference(*models.build(name, seed=seed), **options)


def placements(tmp_path):
    """Every kind of placement, by name."""
    return {
        "host": ["memory.host=1GiB"],
        "nvme": streaming(tmp_path, "memory.engine=threads"),
        "part": [f"memory.nvme=[{tmp_path}]", "memory.host=400KiB"],
        "tight": streaming(tmp_path, "memory.device=600KiB"),
        "striped": [
            f"memory.nvme=[{tmp_path}/a,{tmp_path}/b]",
            "memory.host=400KiB",
            "memory.resident=false",
        ],
        "one-version": streaming(tmp_path, "memory.versions=1"),
        "auto": streaming(tmp_path, "memory.engine=auto"),  # libaio where there is one
    }


#: Each model, in memory or in as little as it can; every place in every dtype, clipped or not.
IN_HOST, TIGHT = ("llama", "bert", "vit"), ("gpt2", "t5", "gpt")
FAST = (*(("host", name) for name in IN_HOST), *(("tight", name) for name in TIGHT))
FAST_DTYPES = (
    (*LONG[0], MANY_STEPS), ("nvme", "fp32", None, STEPS), ("nvme", "fp16", None, STEPS),
    ("host", "fp16", 1.0, STEPS), ("host", "bf16", None, STEPS),
)  # fmt: skip


@pytest.mark.always
@pytest.mark.parametrize(
    ("place", "name"), few(FAST, [(place, name) for place in ("host", "nvme", "tight") for name in NAMES])
)
def test_one_rank_equals_the_plain_loop_to_the_bit(tmp_path, name, place):
    ours = train(*models.build(name, seed=1), placements(tmp_path)[place], steps=STEPS)
    assert_bitwise(ours, plain_loop(name, 1, steps=STEPS))


@pytest.mark.always
@pytest.mark.parametrize("place", ["part", "striped", "one-version", "auto"])
def test_placements_do_not_change_numbers(tmp_path, place):
    ours = train(*models.build("llama", seed=2), placements(tmp_path)[place], steps=STEPS)
    assert_bitwise(ours, plain_loop("llama", 2, steps=STEPS))


def test_how_a_model_is_cut_into_units_changes_the_gradient_norm_within_rounding_of_float64(
    tmp_path, monkeypatch
):
    norms = []
    for nbytes in (2000, 8000, 50_000):
        monkeypatch.setattr(training, "small_units", functools.partial(small_units, nbytes))
        norms.append(train(*models.build("llama", 2), streaming(tmp_path), dtype="fp32", steps=STEPS).norms)
    for each in norms[1:]:
        assert each == pytest.approx(norms[0], rel=1e-14)


DTYPES = (
    *itertools.product(("host", "nvme"), ("bf16", "fp16", "fp32"), (1.0, None), (STEPS,)),
    *((*each, MANY_STEPS) for each in LONG),
)


@pytest.mark.parametrize(("place", "dtype", "clip", "steps"), few(FAST_DTYPES, DTYPES))
def test_dtypes_with_and_without_clipping(tmp_path, dtype, clip, place, steps):
    factory, batch = models.build("gpt2", seed=3)
    rule = Rule(max_grad_norm=clip)
    ours = train(factory, batch, placements(tmp_path)[place], dtype=dtype, rule=rule, steps=steps)
    assert_bitwise(ours, plain_loop("gpt2", 3, dtype=dtype, rule=rule, steps=steps))


@pytest.mark.parametrize(
    ("place", "clip"),
    few(
        (("host", None), ("nvme", 1.0), ("one-version", None)),
        itertools.product(("host", "nvme", "one-version"), (1.0, None)),
    ),
)
def test_accumulated_micro_batches(tmp_path, place, clip):
    factory, batch = models.build("llama", seed=4)
    rule = Rule(max_grad_norm=clip)
    ours = train(factory, batch, placements(tmp_path)[place], accumulate=3, steps=5, rule=rule)
    assert_bitwise(ours, plain_loop("llama", 4, accumulate=3, steps=5, rule=rule))


def test_frozen_parameters_get_no_gradient_and_no_update(tmp_path):
    factory, batch = models.build("llama", seed=6)

    def freeze(model):
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1" not in name and "q_proj" not in name)

    plain = reference(factory, batch, change=freeze, steps=STEPS)
    for place in ("host", "nvme"):
        ours = train(factory, batch, placements(tmp_path)[place], change=freeze, steps=STEPS)
        assert_bitwise(ours, plain)


def test_dropout_draws_the_same_numbers(tmp_path):
    factory, batch = models.build("gpt2", seed=7, dropout=0.1)
    plain = reference(factory, batch, steps=STEPS)
    assert_bitwise(train(factory, batch, placements(tmp_path)["nvme"], steps=STEPS), plain)


@pytest.mark.parametrize(
    ("reentrant", "clip"),
    few(((True, 1.0), (False, None)), [(r, c) for r in (True, False) for c in (1.0, None)]),
)
def test_recomputation_of_blocks(tmp_path, reentrant, clip):
    factory, batch = models.build("llama", seed=8)
    rule = Rule(max_grad_norm=clip)

    def recompute(model):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    options = {"change": recompute, "rule": rule, "steps": STEPS}
    plain = reference(factory, batch, **options)
    for place in ("host", "tight"):
        assert_bitwise(train(factory, batch, placements(tmp_path)[place], **options), plain)
