"""Promises of blocks with experts in the layer schedule: these run once for all micro-batches of a step."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.activations.profiler import MemoryMeter
from infinity.core.errors import StateError
from infinity.engine.expert_blocks import experts_of
from infinity.engine.expert_parts import PartsOfExperts
from infinity.engine.runtime import runtime_of
from infinity.engine.schedule import LayerSchedule
from tests.api.test_expert_lora import built
from tests.api.test_schedule import assert_same, by_layer, one_by_one
from tests.helpers import zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming
from tests.test_tiles import TILED, _chosen

SLICES, WIDTH, EXPERTS = 4, 6, 3


def calls_of(modules: dict[str, nn.Module]) -> list[tuple[str, int]]:
    """The names of modules as they are called, with the rows of the first argument; it grows."""
    called: list[tuple[str, int]] = []
    for name, module in modules.items():

        def note(_: nn.Module, args: Any, name: str = name) -> None:
            called.append((name, len(args[0])))

        module.register_forward_pre_hook(note)
    return called


# --- transformers' models ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(("qwen2_moe",), ("mixtral", "qwen2_moe", "deepseek_v3")))
@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
def test_experts_run_once_for_all_micro_batches_in_forward_and_once_in_backward(name: str, way: str) -> None:
    factory, batch = zoo.build(name, seed=4)
    model: Any = factory()
    model.set_experts_implementation(way)
    plain = one_by_one(model, batch(0), SLICES)
    modules = {key: each for key, each in model.named_modules() if key.endswith("mlp.experts")}
    called = calls_of(modules)
    assert_same(by_layer(model, batch(0), SLICES), plain)
    rows = batch(0)["input_ids"].numel() * model.config.num_experts_per_tok
    assert called == [*((key, rows) for key in modules), *((key, rows) for key in reversed(modules))]


@pytest.mark.parametrize("group", few((3,), (1, 2, 3)))
def test_groups_of_micro_batches_go_through_the_experts_of_a_block_one_after_another(group: int) -> None:
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model: Any = factory()
    model.set_experts_implementation("grouped_mm")
    plain = one_by_one(model, batch(0), SLICES)
    modules = {key: each for key, each in model.named_modules() if key.endswith("mlp.experts")}
    called = calls_of(modules)
    assert_same(by_layer(model, batch(0), SLICES, group), plain)
    rows = batch(0)["input_ids"].numel() * model.config.num_experts_per_tok // SLICES
    groups = [rows * min(group, SLICES - first) for first in range(0, SLICES, group)]
    forward = [(key, each) for key in modules for each in groups]
    assert called == forward + forward[::-1]


def test_a_group_without_micro_batches_is_an_error() -> None:
    model: Any = zoo.build("qwen2_moe", seed=4)[0]()
    with pytest.raises(ValueError, match="group: got 0; wanted at least 1"):
        LayerSchedule(model, SLICES, group=0)


@pytest.mark.parametrize("family", few(("GptOss",), ("Qwen3Moe", "DeepseekV3", "GptOss")))
def test_adapters_of_experts_run_with_them(tmp_path: Path, family: str) -> None:
    model = built(family, streaming(tmp_path))
    blocks = infinity.layer_schedule(model, SLICES).expert_blocks
    found = [module for run in blocks.values() for module in run.experts]
    assert {type(module).__name__ for module in found} == {"ParamWrapper"}
    assert all("experts" not in name for each in found for name, _ in _around(model, each))
    infinity.close(model)


def _around(model: nn.Module, inner: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in model.named_modules() if inner in set(each.modules()) - {each}]


def test_experts_that_do_not_tell_which_rows_are_whose_run_for_each_micro_batch() -> None:
    """Llama 4 sorts tokens by experts before it calls them."""
    import transformers

    sizes = {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 40, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**zoo._TEXT | sizes)
    model = transformers.Llama4ForCausalLM(config).train()
    _, batch = zoo.build("mixtral", seed=4)
    assert_same(by_layer(model, batch(0), SLICES), one_by_one(model, batch(0), SLICES))


def tiles_read(
    folder: Path, micro_batches: int, tiles: int, group: int | None = None
) -> tuple[list[int], list[float]]:
    """How many tiles of experts each step fetches or has from the last one, and the losses.

    Memory has room for ``tiles`` beside a block.
    """
    factory, batch = zoo.build("qwen2_moe", seed=4)
    device = "memory.device=96KiB" if group is None else "memory.device=128KiB"
    places = streaming(folder, "partition.tile=2KiB", device)
    model, read, losses = build(factory, "bf16", places), [], []
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)
    with contextlib.closing(optimizer_for(model, Rule(max_grad_norm=None))) as optimizer:
        runtime: Any = runtime_of(model)
        prefetcher, started = runtime.executor().prefetcher, Counter[int]()
        mover, start = prefetcher.mover, prefetcher.mover.start
        mover.start = lambda unit: (started.update([unit]), start(unit))[1]
        routed = {unit.index for unit in runtime.units if unit.routed}
        scheduled = infinity.layer_schedule(model, micro_batches, group=group)
        if group is None:
            prefetcher.hold_blocks((7 + tiles) * 4096, [])  # 7: what else of the block
        for _ in range(4):
            started.clear()
            started.update(
                routed & {*prefetcher.residents}
            )  # in backward many micro-batches leave room for fewer
            loss = scheduled(**batch(0)).loss
            loss.backward()
            optimizer.step()
            read.append(sum(started[unit] for unit in routed))
            losses.append(loss.item())
    return read, losses


def test_a_tile_is_read_as_often_for_many_micro_batches_as_for_one(tmp_path: Path) -> None:
    (one, loss), (many, losses) = (tiles_read(tmp_path, count, 4) for count in (1, 4))
    tiles = 2 * 2 * 4  # layers, parameters, experts
    assert many[-1] == one[-1]
    assert tiles < many[-1] <= 2 * tiles  # once in forward and once in backward, which runs it again
    assert losses == pytest.approx(loss, rel=1e-3)


def test_a_tile_is_read_once_for_all_groups(tmp_path: Path) -> None:
    read, losses = tiles_read(tmp_path, 4, 0, group=1)
    assert read[-1] <= 2 * 2 * 2 * 4  # twice: layers, parameters, experts
    assert losses == pytest.approx(tiles_read(tmp_path, 4, 4)[1], rel=1e-3)


def test_of_the_rows_of_all_experts_only_results_exist_at_once() -> None:
    """Not what parts take, nor what they have computed; in backward the gradients of what they took."""
    import transformers

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "moe_intermediate_size": 16}
    tokens, count, top_k = 256, 16, 8
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=8, num_experts=count, num_experts_per_tok=top_k)
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    experts = model.model.layers[0].mlp.experts.requires_grad_(False)
    used = count - 2  # the last part has no rows
    index = torch.stack([torch.randperm(used)[:top_k] for _ in range(tokens)])
    given = torch.randn(tokens, config.hidden_size), torch.rand(tokens, top_k)
    parts: list[int] = []
    experts.register_forward_pre_hook(lambda _, args: parts.append(len(args[0])))

    def run(call: Callable[..., Tensor]) -> tuple[list[Tensor], int]:
        hidden, weights = (each.clone().requires_grad_() for each in given)
        with MemoryMeter() as meter:
            output = call(hidden, index, weights)
            output.square().sum().backward()
        found = [output.detach(), hidden.grad, weights.grad]
        return [each for each in found if each is not None], meter.peak_nbytes()

    whole, _ = run(experts)
    each, peak_nbytes = run(lambda *args: PartsOfExperts(experts, lambda unit: 0.0, *args)())
    assert len(each) == len(whole) == 3
    assert all(map(torch.equal, each, whole))
    assert len(parts) == 1 + 2 * 8  # in forward, and again in backward
    assert parts[8] == 0
    rows_nbytes = tokens * top_k * config.hidden_size * 4
    assert peak_nbytes < 3 * rows_nbytes  # with what is there for each token, and one part


def on_two_ranks(folder: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of a rank, whose experts are others than the other one's, whole and in tiles."""
    rank, found = int(os.environ["RANK"]), []
    for tile in ("partition.tile=never", TILED["bf16"]):
        factory, batch = zoo.build("qwen2_moe", seed=4)
        model: Any = build(factory, "bf16", streaming(folder, tile))
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda gate, args, out: _chosen(out, {rank, rank + 1}))
        losses = []
        with contextlib.closing(optimizer_for(model, Rule(max_grad_norm=None))) as optimizer:
            scheduled = infinity.layer_schedule(model, 2)
            for step in range(3):
                loss = scheduled(**batch(step, rank, 2)).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            found.append((losses, infinity.state_dict(model, every_rank=True)))
    return found


@pytest.mark.slow
def test_ranks_that_use_other_experts_train_in_parts_as_on_whole_experts(tmp_path: Path) -> None:
    for whole, tiled in run_ranks(on_two_ranks, 2, str(tmp_path)):
        assert tiled[0] == whole[0]
        assert [name for name in whole[1] if not torch.equal(whole[1][name], tiled[1][name])] == []


# --- blocks of one's own -------------------------------------------------------------------------------


class Experts(nn.Module):
    """Multiplies each row by the matrix of its expert."""

    packs_experts, num_experts = True, EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.stack([row @ self.weight[i] for row, i in zip(x, index, strict=True)])


def index_of(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % EXPERTS


class Block(nn.Module):
    """A residual around experts, as ``way`` has it."""

    def __init__(self, way: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.experts, self.way = nn.Linear(WIDTH, WIDTH), Experts(), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


class Model(nn.Module):
    def __init__(self, way: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def scheduled_of(way: Callable[[Block, Tensor], Tensor]) -> tuple[Model, LayerSchedule, Tensor]:
    torch.manual_seed(1)
    model = Model(way)
    return model, LayerSchedule(model, SLICES, lambda x: model(x)), torch.randn(2 * SLICES, WIDTH)


def test_experts_that_a_block_calls_twice_run_once_for_each_call() -> None:
    def twice(block: Block, x: Tensor) -> Tensor:
        once = x + block.experts(block.inner(x), index_of(x))
        return once + block.experts(block.inner(once), index=index_of(x))

    model, scheduled, x = scheduled_of(twice)
    called = calls_of({"experts": model.blocks[0].experts, "inner": model.blocks[0].inner})
    given = x.clone().requires_grad_()
    scheduled(given).loss.backward()
    inner = [("inner", 2)] * SLICES
    assert called == 2 * [*inner, ("experts", 2 * SLICES), *inner, ("experts", 2 * SLICES)]
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    plain = x.clone().requires_grad_()
    torch.stack([model(part) for part in plain.split(2)]).mean().backward()
    torch.testing.assert_close(given.grad, plain.grad)
    torch.testing.assert_close(grads, {name: param.grad for name, param in model.named_parameters()})


def test_what_a_block_draws_around_its_experts_is_drawn_once() -> None:
    """Experts that change nothing: what was dropped before them is what the residual has dropped."""
    drawn: list[tuple[Tensor, Tensor]] = []

    def around(block: Block, x: Tensor) -> Tensor:
        before = functional.dropout(x, 0.5)
        after = block.experts(before, index_of(x))
        late = functional.dropout(torch.ones_like(x), 0.5)
        drawn.append((before.detach() - after.detach(), late))
        return x + before - after + block.inner(late)

    model, scheduled, x = scheduled_of(around)
    with torch.no_grad():
        for block in model.blocks:
            block.experts.weight.copy_(torch.eye(WIDTH).expand(EXPERTS, WIDTH, WIDTH))
    scheduled(x).loss.backward()
    forward, again = drawn[: 2 * SLICES], drawn[2 * SLICES :]
    assert all(not each.any() for each, _ in drawn)
    first, late = (torch.cat([each for _, each in forward[i : i + SLICES]]) for i in (0, SLICES))
    assert len({tuple(row.tolist()) for row in torch.cat([first, late])}) > SLICES  # no mask came twice
    assert len(again) == 2 * SLICES
    torch.testing.assert_close(torch.cat([each for _, each in again[:SLICES]]), late, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([each for _, each in again[SLICES:]]), first, rtol=0, atol=0)


def test_experts_run_once_without_gradients_too() -> None:
    model, scheduled, x = scheduled_of(lambda block, x: x + block.experts(block.inner(x), index_of(x)))
    called = calls_of({"experts": model.blocks[1].experts})
    with torch.no_grad():
        losses = scheduled(x).losses
        assert losses.tolist() == pytest.approx([model(part).item() for part in x.split(2)])
    assert called[0] == ("experts", 2 * SLICES)


def test_only_modules_that_hold_packed_experts_run_once() -> None:
    model, scheduled, _ = scheduled_of(lambda block, x: x)
    assert [experts_of(block) for block in model.blocks] == [{block.experts} for block in model.blocks]
    assert experts_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == set()
    assert len(scheduled.expert_blocks) == 2


def writes_output(block: Block, x: Tensor) -> Tensor:
    inner = block.inner(x)
    inner.mul_(2)
    return block.experts(inner, index_of(x))


def writes_input(block: Block, x: Tensor) -> Tensor:
    x.add_(1)
    return block.experts(block.inner(x), index_of(x))


def skips_experts(block: Block, x: Tensor) -> Tensor:
    inner = block.inner(x)
    return block.experts(inner, index_of(x)) if x[0, 0] > 0 else inner


def differs(block: Block, x: Tensor) -> Tensor:
    block.number = getattr(block, "number", 0) + 1  # type: ignore[assignment]
    if block.number <= SLICES:
        x = block.inner(x)
    return block.experts(x, index_of(x)) if block.number <= SLICES else block.experts(x, index_of(x)) + x


REFUSED = {
    writes_output: "writes into what its Linear returned, and runs again",
    writes_input: "writes into what it was given, and runs again",
    skips_experts: "calls experts for some micro-batches, and for others none",
    differs: "calls other modules when it runs again",
}


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_a_block_whose_slices_cannot_go_together_is_an_error_that_says_why(way: Any) -> None:
    _, scheduled, x = scheduled_of(way)
    with pytest.raises(StateError, match=f"Block {REFUSED[way]}.*train.schedule=step"):
        scheduled(x)


def test_experts_that_return_other_rows_than_they_were_given_are_an_error() -> None:
    model, scheduled, x = scheduled_of(lambda block, x: block.experts(x, index_of(x)))
    model.blocks[0].experts.register_forward_hook(lambda *call: call[-1][1:])
    with pytest.raises(StateError, match=r"Block has experts that return a tensor \(7, 6\) for 8 rows"):
        scheduled(x)
