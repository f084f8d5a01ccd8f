"""Parameters in tiles: never gathered whole, and the bits of those that are."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.runtime import runtime_of
from tests.helpers import models, zoo
from tests.helpers.reference import Rule
from tests.helpers.training import (
    Trained,
    assert_bitwise,
    build,
    optimizer_for,
    reference,
    streaming,
    train,
)

#: Tiles of one or two experts of the tiny models; their heads and embeddings are smaller.
TILED = {"bf16": "partition.tile=7KiB", "fp32": "partition.tile=14KiB"}


def tiles_of(model: nn.Module) -> dict[str, int]:
    """The number of tiles of each parameter that has some."""
    units = runtime_of(model).units
    found = {name: len(units.places(param)) for name, param in model.named_parameters()}
    return {name: count for name, count in found.items() if count > 1}


def eager(model: Any) -> None:
    model.set_experts_implementation("eager")


def recompute(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def recompute_reentrant(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def freeze_experts(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)


# --- experts -----------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"dtype": "bf16"},
    "qwen2_moe": {"dtype": "fp32", "accumulate": 2},
    "deepseek_v3": {"dtype": "bf16", "change": recompute, "rule": Rule(max_grad_norm=None)},
    "mixtral eager": {"dtype": "fp32", "change": eager},
    "mixtral reentrant": {"dtype": "fp32", "change": recompute_reentrant},
    "qwen2_moe frozen": {"dtype": "bf16", "change": freeze_experts},
}


@pytest.mark.parametrize("case", CASES)
def test_experts_in_tiles_give_the_plain_loops_bits(tmp_path, case):
    factory, batch = zoo.build(case.split()[0], seed=4)
    options = {"steps": 4, **CASES[case]}
    plain = reference(factory, batch, **options)
    tiled = TILED[options["dtype"]]
    assert_bitwise(train(factory, batch, streaming(tmp_path, tiled), **options), plain)
    assert_bitwise(train(factory, batch, ["memory.host=1GiB", tiled], **options), plain)
