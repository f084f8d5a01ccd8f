"""Promises of ``train.schedule: layer``: two reads of a weight per step, and the numbers of any placement."""

import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

import infinity
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import rounded
from infinity.engine.runtime import runtime_of
from infinity.engine.schedule import LayerSchedule
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Reference, Rule
from tests.helpers.runs import metrics_of
from tests.helpers.training import (
    DTYPES,
    UNTILED,
    Trained,
    assert_bitwise,
    build,
    optimizer_for,
    small_units,
    streaming,
)
from tests.helpers.training import recipe as training_recipe
from tests.test_bytes import WEIGHT, settled

WARM_UP, STEPS = 3, 3
FREE, CLIPPED = Rule(max_grad_norm=None), Rule()


def whole(batch: Any, step: int, micro_batches: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """The micro-batches of a step, row after row."""
    parts = [batch(step * micro_batches + micro, rank, world) for micro in range(micro_batches)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def train_by_layer(
    name: str, overrides: list[str], *, micro_batches: int, dtype: str = "bf16", rule: Rule = FREE,
    steps: int = 4, dropout: float = 0.0, frozen: str = "",
) -> Trained:  # fmt: skip
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    factory, batch = models.build(name, seed=3, dropout=dropout)
    model = build(factory, dtype, overrides)
    for each in model.get_submodule(frozen).parameters() if frozen else ():
        each.requires_grad_(False)
    optimizer, out = optimizer_for(model, rule), Trained()
    with contextlib.closing(optimizer):
        scheduled = infinity.layer_schedule(model, micro_batches)
        for step in range(steps):
            losses = scheduled(**whole(batch, step, micro_batches, rank, world))
            losses.loss.backward()
            optimizer.step()
            out.losses += losses.losses.tolist()
            out.norms.append(optimizer.grad_norm)
        out.weights = infinity.state_dict(model, every_rank=True)
    return out


def reference_by_layer(
    name: str, *, micro_batches: int, dtype: str = "bf16", rule: Rule = FREE, steps: int = 4,
    dropout: float = 0.0,
) -> Trained:  # fmt: skip
    """Plain PyTorch in memory, with the same schedule."""
    factory, batch = models.build(name, seed=3, dropout=dropout)
    loop, out = Reference(factory(), DTYPES[dtype], rule), Trained()
    scheduled = LayerSchedule(loop.model, micro_batches)

    def noted(**given: Tensor) -> Any:
        losses = scheduled(**given)
        out.losses += losses.losses.tolist()
        return losses

    loop.model = noted
    for step in range(steps):
        out.norms.append(loop.step([whole(batch, step, micro_batches)]).grad_norm)
    out.weights = {name: p.detach() for name, p in loop.parameters.items()}
    return out


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"),
    few(
        (("gpt2", FREE),),
        [("llama", FREE), ("llama", CLIPPED), ("gpt2", FREE), ("bert", CLIPPED), ("gpt", FREE)],
    ),
)
def test_placement_never_changes_the_numbers_of_the_layer_schedule(
    tmp_path: Path, name: str, rule: Rule
) -> None:
    plain = reference_by_layer(name, micro_batches=4, rule=rule)
    for overrides in (["memory.host=1GiB"], streaming(tmp_path)):
        assert_bitwise(train_by_layer(name, overrides, micro_batches=4, rule=rule), plain)


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_wherever_weights_are(tmp_path: Path) -> None:
    plain = reference_by_layer("gpt2", micro_batches=2, dropout=0.1)
    assert_bitwise(train_by_layer("gpt2", streaming(tmp_path), micro_batches=2, dropout=0.1), plain)


def test_frozen_weights_stay_no_longer_than_their_block_in_backward(tmp_path: Path) -> None:
    factory, batch = models.build("llama", seed=3)

    def freeze(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        model.model.layers[0].requires_grad_()
        return model

    loop = Reference(freeze(factory()), DTYPES["bf16"], CLIPPED)
    loop.model = LayerSchedule(loop.model, 2)
    plain = [loop.step([whole(batch, step, 2)]).losses[0].item() for step in range(4)]
    model = freeze(build(factory, "bf16", streaming(tmp_path, "memory.device=96KiB")))
    with contextlib.closing(optimizer_for(model, CLIPPED)) as optimizer:
        window: Any = optimizer.runtime.executor().prefetcher
        assert sum(window.nbytes.values()) > 2 * window.residents.capacity_nbytes
        scheduled = infinity.layer_schedule(model, 2)
        for step in range(4):
            loss = scheduled(**whole(batch, step, 2)).loss
            assert loss.item() == plain[step]
            loss.backward()
            optimizer.step()
        assert window.training.plan.peak_nbytes <= window.residents.capacity_nbytes


@pytest.mark.parametrize("rule", few((CLIPPED,), (FREE, CLIPPED)))
def test_a_block_keeps_its_room_when_more_is_trained_later(tmp_path: Path, rule: Rule) -> None:
    """``memory.device`` is the smallest for which all is trained: blocks are as tight as they may be."""
    device = room_for_a_block(str(tmp_path), "llama", rule)
    factory, batch = models.build("llama", seed=3)
    model: Any = build(factory, "bf16", streaming(tmp_path, UNTILED, f"memory.device={device}"))
    model.model.layers[1].requires_grad_(False)
    groups = [{"params": list(model.parameters())}]
    optimizer = infinity.AdamW(model, rule.lr, rule.betas, max_grad_norm=rule.max_grad_norm, params=groups)
    with contextlib.closing(optimizer):
        scheduled, runtime = infinity.layer_schedule(model, 2), optimizer.runtime
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            scheduled(**whole(batch, step, 2)).loss.backward()
            optimizer.step()
        for block in scheduled.blocks.modules:
            room = sum(rounded(unit.nbytes) for unit in _units(runtime, block))
            assert room <= runtime.executor().prefetcher.residents.capacity_nbytes
        assert optimizer.report().peak_nbytes["device"] <= device


def _units(runtime: Any, block: nn.Module) -> list[Any]:
    inside = {id(param) for param in block.parameters()}
    return [unit for unit in runtime.units if any(id(s.param) in inside for s in unit.segments)]


# --- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What ``STEPS`` steps read of one rank's shards, and how the plan has one of them."""

    read: int
    planned: list[int | None]
    fetches: Counter[int]  # of each unit, in one step
    fetched: int  # bytes of them
    on_demand: int
    losses: list[float]


def count(
    folder: str, name: str, micro_batches: int, schedule: str, device: int, rule: Rule = CLIPPED
) -> Counted:
    """Steps of the same batch in so many micro-batches, everything on NVMe."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    factory, batch = models.build(name, seed=0)
    model = build(factory, "bf16", streaming(folder, UNTILED, f"memory.device={device}"))
    optimizer = optimizer_for(model, rule)
    with contextlib.closing(optimizer):
        runtime: Any = optimizer.runtime
        assert all(unit.home.tier is Tier.NVME for unit in runtime.units)
        scheduled = infinity.layer_schedule(model, micro_batches) if schedule == "layer" else None
        planned, losses, on_demand, before = [], [], 0, (0, 0)
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                before = settled(runtime)
            given = whole(batch, step, 8 // world, rank, world)
            losses.append(backward(model, scheduled, given, micro_batches))
            optimizer.step()
            report = optimizer.report()
            if step >= WARM_UP:
                planned.append(report.planned_nbytes_read)
                on_demand += report.on_demand
        fetches = Counter(runtime.executor().prefetcher.training.plan.fetched())
        numel = {unit.index: unit.shard_numel for unit in runtime.units}
        return Counted(
            settled(runtime)[0] - before[0], planned, fetches,
            sum(WEIGHT * numel[unit] * times for unit, times in fetches.items()),
            on_demand, losses,
        )  # fmt: skip


def backward(
    model: Any, scheduled: LayerSchedule | None, given: dict[str, Tensor], micro_batches: int
) -> float:
    """The loss of a batch, and its gradients."""
    if scheduled is not None:
        loss = scheduled(**given).loss
        loss.backward()
        return loss.item()
    parts = {key: value.chunk(micro_batches) for key, value in given.items()}
    total = 0.0
    for micro in range(micro_batches):
        with infinity.no_sync(model) if micro < micro_batches - 1 else contextlib.nullcontext():
            loss = model(**{key: value[micro] for key, value in parts.items()}).loss / micro_batches
            loss.backward()
            total += loss.item()
    return total


def room_for_a_block(folder: str, name: str, rule: Rule = CLIPPED) -> int:
    """The least ``memory.device`` (bytes) with which the layer schedule runs, as the errors say it."""
    device = least(folder, name, rule, 1024, r"at least .*?\((\d+) bytes")
    return device + least(folder, name, rule, device, r"Raise it by .*?\((\d+) bytes")


def least(folder: str, name: str, rule: Rule, device: int, said: str) -> int:
    """The bytes of which the ``BudgetError`` speaks; 0 without one."""
    factory, _ = models.build(name, seed=0)
    model = build(factory, "bf16", streaming(folder, UNTILED, f"memory.device={device}"))
    with contextlib.closing(runtime_of(model)):
        try:
            optimizer_for(model, rule)
            infinity.layer_schedule(model, 2)
        except BudgetError as error:
            [nbytes] = re.findall(said, str(error))
            return int(nbytes)
    return 0


def check(counted: Counted, name: str) -> None:
    assert counted.on_demand == 0, name
    assert None not in counted.planned, name
    assert counted.read == sum(read for read in counted.planned if read is not None), name
    assert max(counted.fetches.values(), default=0) <= 2, name


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_step_reads_every_weight_twice_whatever_the_number_of_micro_batches(
    tmp_path: Path, name: str
) -> None:
    device = room_for_a_block(str(tmp_path), name)
    layer = {m: count(str(tmp_path), name, m, "layer", device) for m in (1, 4)}
    for micro_batches, counted in layer.items():
        check(counted, f"{micro_batches} micro-batches")
        assert counted.fetches == layer[1].fetches
        assert counted.read == layer[1].read
    assert max(layer[1].fetches.values()) == 2  # the window drops what backward needs again
    step = {m: count(str(tmp_path), name, m, "step", device) for m in (1, 4)}
    assert step[4].fetched > 3 * step[1].fetched
    for ours, plain in zip(layer[4].losses, step[4].losses, strict=True):
        assert ours == pytest.approx(plain, rel=2e-3)  # bf16 gradients, added in another order


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_updates_inside_backward_leave_a_block_the_room_it_needs(tmp_path: Path, name: str) -> None:
    device = room_for_a_block(str(tmp_path), name, FREE)
    one, several = (count(str(tmp_path), name, m, "layer", device, FREE) for m in (1, 4))
    check(one, "1 micro-batch")
    check(several, "4 micro-batches")
    assert several.read == one.read


def on_two_ranks(folder: str) -> tuple[list[Counted], Trained]:
    rooms = {rule: room_for_a_block(folder, "llama", rule) for rule in (CLIPPED, FREE)}
    counted = [count(folder, "llama", 4, "layer", room, rule) for rule, room in rooms.items()]
    counted.append(count(folder, "llama", 4, "layer", 2**22, FREE))
    trained = train_by_layer("llama", streaming(folder), micro_batches=2, dtype="fp32", rule=CLIPPED)
    return counted, trained


@pytest.mark.slow
def test_two_ranks_read_every_weight_twice_and_train_as_one(tmp_path: Path) -> None:
    ranks = run_ranks(on_two_ranks, 2, str(tmp_path))
    plain = reference_by_layer("llama", micro_batches=2, dtype="fp32", rule=CLIPPED)
    for counts, trained in ranks:
        for counted in counts:  # bytes are the plan's when nothing is in flight, also of updates that lag
            check(counted, "4 micro-batches")
        most = [max(counted.fetches.values(), default=0) for counted in counts]
        assert (most[0], most[-1]) == (2, 0)
        assert trained.norms == pytest.approx(plain.norms, rel=1e-3)
        for name, weight in plain.weights.items():
            torch.testing.assert_close(trained.weights[name], weight, rtol=1e-3, atol=1e-3)


def test_a_window_that_cannot_keep_a_block_is_an_error_with_the_arithmetic(tmp_path: Path) -> None:
    device = room_for_a_block(str(tmp_path), "gpt")
    factory, _ = models.build("gpt", seed=0)
    model = build(factory, "bf16", streaming(tmp_path, UNTILED, f"memory.device={device - 4096}"))
    with (
        contextlib.closing(optimizer_for(model, CLIPPED)),
        pytest.raises(BudgetError, match=r"\(blocks, 3 x Block\) need .* Raise it by 4 KiB \(4096 bytes\)"),
    ):
        infinity.layer_schedule(model, 2)


# --- the recipe --------------------------------------------------------------------------------------


def test_a_recipe_chooses_the_schedule_and_the_loss_stays_the_same(tmp_path: Path) -> None:
    def losses(schedule: str) -> list[float]:
        lines = metrics_of(tmp_path, schedule, f"train.schedule={schedule}", "train.accumulate=4")
        return [line["loss"] for line in lines if line["kind"] == "step"]

    step, layer = losses("step"), losses("layer")
    assert layer == pytest.approx(step, rel=1e-5)
    assert step[-1] < step[0]


def test_recomputation_is_what_the_schedule_does_by_itself(tmp_path: Path) -> None:
    factory, batch = models.build("gpt", seed=0)
    losses = []
    for activations in ("recompute", "null"):
        settings = streaming(tmp_path, "train.schedule=layer", f"memory.activations={activations}")
        model = build(factory, "bf16", settings)
        with contextlib.closing(optimizer_for(model, FREE)) as optimizer:
            assert optimizer.runtime.activations.policy == "keep"
            losses.append(backward(model, infinity.layer_schedule(model, 2), whole(batch, 0, 2), 2))
    assert losses[0] == losses[1]


def with_alibi(folder: Path, kind: Any, config: Any) -> Any:
    with small_units(), infinity.Init(training_recipe("fp32", [*streaming(folder), "train.schedule=layer"])):
        torch.manual_seed(3)
        return kind(config).train()


def test_biases_of_the_heads_of_each_row_are_cut_with_their_rows(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    tokens = torch.randint(97, (6, 12), generator=torch.Generator().manual_seed(1))
    model = with_alibi(tmp_path, BloomForCausalLM, config)
    with contextlib.closing(SimpleNamespace(close=lambda: infinity.close(model))):
        infinity.AdamW(model)
        with torch.no_grad():
            want = [model(input_ids=part, labels=part).loss for part in tokens.split(2)]
        losses = infinity.layer_schedule(model, 3)(input_ids=tokens, labels=tokens).losses
        assert torch.equal(losses.detach(), torch.stack(want))


def test_a_bias_of_heads_that_could_be_one_of_rows_is_an_error_and_no_wrong_number(tmp_path: Path) -> None:
    config = MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=32)
    model = with_alibi(tmp_path, MptForCausalLM, config)
    tokens = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(1))
    with contextlib.closing(SimpleNamespace(close=lambda: infinity.close(model))):
        infinity.AdamW(model)
        scheduled = infinity.layer_schedule(model, 4)
        with pytest.raises(ValueError, match="belongs to rows or to heads cannot be told"):
            scheduled(input_ids=tokens[:4], labels=tokens[:4])
        with torch.no_grad():
            want = [model(input_ids=part, labels=part).loss for part in tokens.split(2)]
        assert torch.equal(scheduled(input_ids=tokens, labels=tokens).losses.detach(), torch.stack(want))
