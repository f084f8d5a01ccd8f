"""Parameters in tiles: never gathered whole, and the bits of those that are."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.runtime import runtime_of
from tests.helpers import models, zoo
from tests.helpers.launch import run_ranks
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


def ranks_in_tiles(folder: str, case: str) -> list[tuple[Any, ...]]:
    """Losses, norms and weights of a rank, with whole experts and with tiles."""
    import os

    rank, found = int(os.environ["RANK"]), []
    factory, batch = zoo.build(case.split()[0], seed=4)
    options = {"steps": 3, **CASES[case]}
    for tile in ("partition.tile=never", TILED[options["dtype"]]):
        ours = train(factory, batch, streaming(folder, tile), rank=rank, world=2, **options)
        found.append((ours.losses, ours.norms, ours.weights))
    return found


@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3", "qwen2_moe frozen"])
def test_two_ranks_in_tiles_give_the_bits_of_whole_experts(tmp_path, case):
    for whole, tiled in run_ranks(ranks_in_tiles, 2, str(tmp_path), case):
        assert tiled[0] == whole[0]
        assert tiled[1] == pytest.approx(whole[1], rel=1e-12)
        assert [name for name in whole[2] if not torch.equal(whole[2][name], tiled[2][name])] == []


# --- what no batch is routed to ----------------------------------------------------------------------


def route_to(model: Any, experts: set[int]) -> None:
    """Let every token go to two of ``experts``."""
    for layer in model.model.layers:
        with infinity.gathered([layer.mlp.gate.weight], modify=True):
            weight = layer.mlp.gate.weight
            weight.zero_()
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: _chosen(out, experts))


def _chosen(out: Any, experts: set[int]) -> Any:
    first, second = sorted(experts)[:2]
    logits, weights, index = out
    return logits, weights, torch.tensor([first, second]).expand_as(index)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_tile_without_tokens_is_not_read_and_has_a_gradient_of_zeros_if_it_is_trained(tmp_path, frozen):
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model = build(factory, "bf16", streaming(tmp_path, "partition.tile=2KiB"))
    if frozen:
        freeze_experts(model)
    optimizer, runtime = optimizer_for(model, Rule(max_grad_norm=None)), runtime_of(model)
    route_to(model, {1, 2})
    started = []
    mover = runtime.executor().mover
    start = mover.start
    mover.start = lambda index: (started.append(index), start(index))[1]
    before = {name: value.clone() for name, value in infinity.state_dict(model).items()}
    started.clear()
    routed = [unit for unit in runtime.units if unit.routed]
    assert len(routed) == 2 * 2 * 4  # layers, parameters, experts
    for step in range(2):
        model(**batch(step)).loss.backward()
        optimizer.step()
    rows = {runtime.units[index].segments[0].rows.start for index in started if runtime.units[index].routed}
    assert rows == {1, 2}
    after = infinity.state_dict(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changed = [not torch.equal(a, b) for a, b in zip(after[name], before[name], strict=True)]
    assert changed == [False] * 4 if frozen else changed == [True] * 4  # decay acts on all
    infinity.close(model)
