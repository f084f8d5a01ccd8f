"""A dry run is the runtime's own: its units, homes, budgets and trace, without values."""

import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.activations.profiler import MemoryMeter
from infinity.activations.store import directly_moved_nbytes
from infinity.app.train import built
from infinity.core import budget
from infinity.core.budget import DeviceBudget
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import rounded
from infinity.observe.metrics import View
from infinity.partition.builder import LEAST_SHARD_NBYTES
from infinity.predict.dry_run import DryRun, Layout, dry_run, model_for
from infinity.predict.machines import load_machine
from infinity.predict.play import play_step
from infinity.predict.recording import Batch, Record
from infinity.predict.step import DECODE, plan_of
from infinity.recipes.loading import load_recipe
from infinity.recipes.models import CausalLoss
from infinity.recipes.objectives import OBJECTIVES
from infinity.recipes.recipe import Recipe
from tests.helpers import quantized
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.training import small_units

GPT = ["model.n_layers=4", "model.d_model=64", "model.n_heads=4", "model.seq_len=32", "train.batch_size=2"]
MACHINE = load_machine("vm-2core")


def recipe_for(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [
        f"memory.nvme=[{folder / 'nvme'}]", "train.dtype=bf16", "memory.host=64MiB", "memory.device=64MiB",
        "memory.activations=keep", "observe.progress=false",
        "optim.max_grad_norm=1e6",  # what is clipped is updated twice, which no plan foresees
        *overrides,
    ])  # fmt: skip


def llama(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return f"model.path={folder / 'llama'}"


def half_llama(folder: Path) -> str:
    from transformers import LlamaForCausalLM

    path = llama(folder)
    LlamaForCausalLM.from_pretrained(folder / "llama").bfloat16().save_pretrained(folder / "llama")
    return path


def quantized_llama(folder: Path) -> str:
    path = llama(folder)
    quantized.fp8(folder / "llama")
    return path


def mixtral(folder: Path) -> str:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=264, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder / "mixtral")
    return f"model.path={folder / 'mixtral'}"


def run(
    recipe: Recipe, steps: int = 4
) -> tuple[dict[str, Any], list[tuple[int | None, int | None, int, int]]]:
    """Train ``recipe`` for some steps; what the runtime decided, and bytes planned and moved by step."""
    with built(recipe, None, View()) as (model, optimizer):
        model.train()
        tokens, moved = torch.randint(256, (recipe.rows, recipe.model.seq_len)), []
        scores = partial(model, attention_mask=torch.ones_like(tokens))
        scored = OBJECTIVES[recipe.train.task].head
        loss = (lambda tokens, _: scores(tokens).logits.float().sum()) if scored else CausalLoss(model)
        runtime = optimizer.runtime
        for _ in range(steps):
            for micro in range(recipe.train.accumulate):
                last = micro + 1 == recipe.train.accumulate
                with contextlib.nullcontext() if last else infinity.no_sync(model):
                    optimizer.scale(loss(tokens, tokens)).backward()
            optimizer.step()
            report = optimizer.report()
            planned = report.planned_nbytes_read, report.planned_nbytes_written
            moved.append((*planned, report.nbytes_read, report.nbytes_written))
        executor = runtime.executor()
        plan = executor.prefetcher.training.plan
        return {
            "units": [(u.name, u.numel, u.home.tier is Tier.NVME) for u in runtime.units],
            "division": executor.budget.division,
            "events": () if plan is None else plan.events,
            "fetched": [] if plan is None else list(plan.fetched()),
            "peak_nbytes": runtime.peak_nbytes()["device"],
        }, moved


def micro_batches(run: DryRun) -> tuple[Any, ...]:
    """The events of a whole step."""
    accumulated = run.trace.accumulated()[0]
    return accumulated * (run.recipe.train.accumulate - 1) + run.trace.events


CASES = {
    "gpt-tied": ["model.tied=true"],
    "gpt-tight": ["memory.device=3MiB", "optim.max_grad_norm=null"],
    "gpt-spilled": ["memory.device=1MiB"],
    "gpt-spilled-and-held": ["memory.device=640KiB", "memory.versions=1"],
    "gpt-accumulated": ["train.accumulate=3"],
    "gpt-accumulated-and-spilled": ["train.accumulate=4", "memory.device=1MiB", "optim.max_grad_norm=null"],
    "gpt-accumulated-clipped-and-spilled": ["train.accumulate=2", "memory.device=640KiB"],
    "gpt-recomputed": ["memory.activations=recompute"],
    "gpt-half-resident": ["memory.host=12MiB", "memory.resident=true"],
    "llama-recomputed": ["llama", "memory.activations=recompute", "memory.device=3MiB"],
    "llama-lora": ["llama", "lora.rank=2"],
    "llama-scoring": ["llama", "train.task=reward", "data.packing=false", "memory.device=1MiB"],
    "llama-lora-read-where-it-lies": ["llama", "lora.rank=2", "memory.device=300KiB"],
    "quantized-lora": ["quantized", "lora.rank=2", "memory.device=440KiB"],
    "quantized-lora-in-host-memory": [
        "quantized",
        "lora.rank=2",
        "memory.device=500KiB",
        "memory.host=2MiB",
        "memory.resident=true",
    ],
    "half-lora-in-host-memory": [
        "half",
        "lora.rank=2",
        "memory.device=300KiB",
        "memory.host=768KiB",
        "memory.resident=true",
    ],
    "llama-lora-stored-as-nf4": ["llama", "lora.rank=2", "memory.device=560KiB", "model.stored_as=nf4"],
    "llama-logits-in-slices": ["llama", "memory.logits=slices"],
    "gpt-in-tiles": ["partition.tile=8KiB"],
    "gpt-in-tiles-recomputed": ["partition.tile=8KiB", "memory.activations=recompute"],
    "experts-fp32": ["mixtral", "train.dtype=fp32"],
    "experts-fp16": ["mixtral", "train.dtype=fp16", "optim.loss_scale=1"],
    "experts-bf16": ["mixtral"],
    "experts-lora": ["mixtral", "lora.rank=8", "memory.device=500KiB"],
    "experts-lora-of-any-rank": ["mixtral", "lora.rank=3"],
}


#: Each way that units, homes and budgets are decided, once; the others are long tests.
FEW = (
    "gpt-tight", "gpt-accumulated-and-spilled", "gpt-accumulated", "llama-lora-read-where-it-lies",
    "quantized-lora-in-host-memory", "half-lora-in-host-memory", "llama-logits-in-slices",
    "gpt-in-tiles-recomputed", "experts-lora", "llama-scoring",
)  # fmt: skip


#: In which device memory takes as much as planned while updates, drives and decoding keep up; else more.
EXACT = (
    "gpt-tied", "gpt-accumulated", "gpt-recomputed", "gpt-half-resident", "llama-recomputed",
    "quantized-lora-in-host-memory", "llama-logits-in-slices", "gpt-in-tiles", "gpt-in-tiles-recomputed",
)  # fmt: skip


@pytest.mark.parametrize("case", few(FEW, CASES))
def test_the_trace_units_homes_and_budgets_are_those_of_the_runtime(case: str, tmp_path: Path) -> None:
    overrides = ["memory.resident=false", *CASES[case]]
    made = {"llama": llama, "half": half_llama, "quantized": quantized_llama, "mixtral": mixtral}.get(
        overrides[1]
    )
    if made is not None:
        del overrides[1]
        overrides += [made(tmp_path), "model.seq_len=32", "train.batch_size=2"]
    else:
        overrides += GPT
    recipe = recipe_for(tmp_path, *overrides)
    planned = dry_run(recipe, MACHINE, 1)
    real, moved = run(recipe)
    named = [(u.name, u.shard_numel, u.on_nvme) for u in planned.units]
    assert named == real["units"]
    assert planned.division == real["division"]
    assert bool(planned.division.spilled) == ("spilled" in case or case == "quantized-lora")
    assert micro_batches(planned) == tuple(real["events"])
    plan, cost = (
        plan_of(planned.trace, planned.setup, planned.micro_batches - 1),
        play_step(planned.trace, planned.setup),
    )
    assert list(plan.fetched()) == real["fetched"]
    assert cost.device_peak_nbytes <= planned.division.total
    if case in EXACT:
        assert cost.device_peak_nbytes <= real["peak_nbytes"] <= planned.division.total
    assert real["fetched"] or case not in ("quantized-lora", "llama-lora-read-where-it-lies")
    if case == "quantized-lora":
        assert cost.busy_s[DECODE] > 0
    if real["events"]:
        assert (cost.nbytes.get("NVMe read", 0), cost.nbytes.get("NVMe write", 0)) == moved[-1][:2]


@pytest.mark.parametrize("case", ["gpt-in-tiles-recomputed", "quantized-lora"])
def test_units_are_known_without_a_record(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["model.seq_len=32", "train.batch_size=2"] if case == "quantized-lora" else GPT
    model = [quantized_llama(tmp_path)] if case == "quantized-lora" else []
    recipe = recipe_for(
        tmp_path, "memory.resident=false", *model, *sizes, *(each for each in CASES[case] if "=" in each)
    )
    planned = dry_run(recipe, MACHINE, 1)
    monkeypatch.setattr("infinity.predict.model.record", None)  # it would be called
    layout = Layout(model_for(recipe, MACHINE, 1), recipe, MACHINE)
    assert layout.read_where_they_lie() == planned.units


def experts(folder: Path) -> str:
    """A model of one layer whose packed experts take 256 MiB and 128 MiB, as its ``config.json``."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512,
        "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "num_local_experts": 64,
        "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return f"model.path={folder}"


def test_experts_that_the_device_cannot_hold_are_planned_in_tiles(tmp_path: Path) -> None:
    more = [experts(tmp_path), "memory.device=384MiB", "memory.host=1GiB", "memory.resident=false"]
    sizes = ["model.seq_len=32", "train.batch_size=2", "optim.max_grad_norm=null"]
    with pytest.raises(BudgetError, match=r"experts\.gate_up_proj alone takes 256 MiB"):
        dry_run(recipe_for(tmp_path, *more, *sizes, "partition.tile=never"), MACHINE, 1)
    planned = dry_run(recipe_for(tmp_path, *more, *sizes), MACHINE, 1)
    tiles = [unit for unit in planned.units if "experts" in unit.name]
    assert [unit.nbytes for unit in tiles] == [4 * 2**20] * 64 + [2 * 2**20] * 64  # one expert each
    used = {event.unit for event in planned.trace.events}
    assert {planned.units.index(unit) for unit in tiles} <= used
    assert play_step(planned.trace, planned.setup).nbytes["NVMe read"] > 2 * 384 * 2**20
    assert any("tiles" in note for note in planned.model.notes)
    frozen = dry_run(
        recipe_for(tmp_path, *more, *sizes, "lora.rank=4", "lora.target_modules=[q_proj]"), MACHINE, 1
    )
    assert all(frozen.setup.units[unit].trainable for _, unit in frozen.trace.begun)
    assert play_step(frozen.trace, frozen.setup).device_peak_nbytes <= 384 * 2**20


def peak_beside_slow_ranks(folder: str, accumulate: int) -> int:
    """The peak of device memory on one of two ranks whose reductions end long after they were asked for."""
    exchange = dist.all_to_all_single

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return exchange(*args, **kwargs)

    recipe = recipe_for(Path(folder), *GPT, "memory.resident=false", f"train.accumulate={accumulate}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", slowly)
        return int(run(recipe)[0]["peak_nbytes"])


@pytest.mark.parametrize("accumulate", few((3,), (1, 3)))
def test_gradients_of_slow_ranks_take_what_was_planned(accumulate: int, tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, *GPT, "memory.resident=false", f"train.accumulate={accumulate}")
    planned = dry_run(recipe, MACHINE.with_ranks(2), 2)
    cost = play_step(planned.trace, planned.setup)
    peaks = run_ranks(peak_beside_slow_ranks, 2, str(tmp_path), accumulate)
    assert peaks == [cost.device_peak_nbytes] * 2


def metered(recipe: Recipe) -> int:
    """The most that storages of a step take at one time in a run (bytes)."""
    with built(recipe, None, View()) as (model, optimizer):
        model.train()
        loss, shape = CausalLoss(model), (recipe.train.batch_size, recipe.model.seq_len)
        tokens = torch.randint(256, shape)
        halves = torch.arange(shape[1]).remainder(shape[1] // 2).expand(shape)
        padded = (torch.arange(shape[1]) < shape[1] - 1).long().expand(shape)
        for _ in range(2):  # the first makes what stays
            with MemoryMeter() as meter:
                loss(
                    tokens, tokens, halves if recipe.data.packing is True else None,
                    padded if recipe.data.packing is False else None,
                ).backward()  # fmt: skip
            optimizer.step()
        return meter.peak_nbytes()


@pytest.mark.parametrize(
    "overrides",
    [
        GPT,
        # most: gradients
        pytest.param(
            ["model.n_layers=2", "model.d_model=256", "model.n_heads=4", "model.seq_len=32"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["llama"], marks=pytest.mark.slow),
        ["llama", "memory.activations=recompute", "lora.rank=2"],
        ["llama", "data.packing=true"],
        pytest.param(["llama", "data.packing=false"], marks=pytest.mark.slow),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_the_peak_of_activations_is_that_of_a_run(overrides: list[str], tmp_path: Path) -> None:
    """A gradient that autograd makes is there beside the unit's own buffer, and counted once."""
    if overrides[0] == "llama":
        overrides = [llama(tmp_path), "model.seq_len=32", "train.batch_size=2", *overrides[1:]]
    recipe = recipe_for(tmp_path, "memory.resident=false", *overrides)
    planned, real = dry_run(recipe, MACHINE, 1).trace.peak_nbytes, metered(recipe)
    assert planned == pytest.approx(real, abs=64)


@dataclass(frozen=True)
class Layered:
    """A run whose micro-batches go through a block together.

    Attributes:
        peak_nbytes: The most that storages of a step take at one time.
        moved: Bytes that the plan of the last step says are read and written.
        window_nbytes: What gathered units may take.
    """

    peak_nbytes: int
    moved: tuple[int, int]
    window_nbytes: int
    division: DeviceBudget


def layered(recipe: Recipe) -> Layered:
    """Train ``recipe`` for three steps of the layer schedule."""
    rows, length = recipe.train.accumulate * recipe.train.batch_size, recipe.model.seq_len
    with built(recipe, None, View()) as (model, optimizer):
        model.train()
        train = recipe.train
        scheduled = infinity.layer_schedule(model, train.accumulate, CausalLoss(model), group=train.group)
        tokens = torch.randint(256, (rows, length))
        halves = torch.arange(length).remainder(length // 2).expand(rows, length).contiguous()
        given = (tokens, tokens, halves) if recipe.data.packing else (tokens, tokens)
        for step in range(3):  # the last one has a plan
            with MemoryMeter() if step == 2 else contextlib.nullcontext() as meter:
                scheduled(*given).losses.sum().backward()
            optimizer.step()
            report = optimizer.report()
        executor = optimizer.runtime.executor()
        moved = report.planned_nbytes_read, report.planned_nbytes_written
        window_nbytes = executor.prefetcher.residents.capacity_nbytes
        assert meter is not None
        return Layered(meter.peak_nbytes(), moved, window_nbytes, executor.budget.division)


@pytest.mark.parametrize(
    "overrides",
    few(
        (["model.n_layers=4"],),
        [
            ["model.n_layers=4"], ["llama"], ["llama", "data.packing=true"], ["llama", "lora.rank=2"],
            ["model.n_layers=6", "memory.device=1MiB"], ["mixtral"], ["mixtral", "lora.rank=2"],
        ],
    ),
    ids=" ".join,
)  # fmt: skip
def test_of_a_layer_schedule_all_micro_batches_are_planned_for(overrides: list[str], tmp_path: Path) -> None:
    """In memory there are the inputs of all blocks, for all of them; units are read as for one."""
    more = [*GPT, "model.seq_len=128", "train.schedule=layer"]
    if overrides[0] in ("llama", "mixtral"):
        make = llama if overrides[0] == "llama" else mixtral
        more += [make(tmp_path), "model.n_layers=6", "model.d_model=384", "model.n_heads=6", *overrides[1:]]
    else:
        more += overrides
    peaks = []
    for accumulate in (2, 5):
        recipe = recipe_for(tmp_path, "memory.resident=false", *more, f"train.accumulate={accumulate}")
        planned, real = dry_run(recipe, MACHINE, 1), layered(recipe)
        cost = play_step(planned.trace, planned.setup)
        assert (cost.nbytes["NVMe read"], cost.nbytes["NVMe write"]) == real.moved
        assert planned.division.window == real.window_nbytes
        assert replace(planned.division, window=0) == replace(real.division, window=0)
        assert planned.trace.peak_nbytes == pytest.approx(real.peak_nbytes, rel=0.06)
        peaks.append(planned.trace.peak_nbytes)
    given = 2 * 128 * 64 * 2  # what a block is given of a micro-batch
    assert peaks[1] - peaks[0] >= 3 * (len(planned.profile.blocks) + 1) * given


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("accumulate", "more"), [
    (2, ["memory.device=400KiB"]), pytest.param(8, ["memory.device=400KiB"], marks=pytest.mark.slow),
    (4, ["memory.device=1300KiB", "train.group=2"]),
])  # fmt: skip
def test_tiles_of_experts_are_planned_to_be_read_twice_whatever_the_number_of_micro_batches(
    accumulate: int, more: list[str], tmp_path: Path
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    more += [f"model.path={tmp_path / 'mixture'}", "model.n_layers=6", "model.d_model=384", "model.n_heads=6"]
    more += ["model.seq_len=64", "train.batch_size=1", "train.schedule=layer", "train.dtype=fp32"]
    more += ["memory.resident=false", "partition.tile=32KiB", "lora.rank=2"]
    more += ["lora.target_modules=[q_proj,o_proj]", f"train.accumulate={accumulate}"]
    recipe = recipe_for(tmp_path, *more)
    planned, real = dry_run(recipe, MACHINE, 1), layered(recipe)
    moved = play_step(planned.trace, planned.setup).nbytes["NVMe read"]
    assert moved == pytest.approx(real.moved[0], rel=0.05)
    assert planned.trace.peak_nbytes == pytest.approx(real.peak_nbytes, rel=0.15)
    assert moved < 2.5 * sum(unit.nbytes for unit in planned.model.units if unit.routed)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("tokens", "schedule"), [
    (4, "layer"), *(pytest.param(each, "step", marks=pytest.mark.slow) for each in (4, 12)),
])  # fmt: skip
def test_few_tokens_are_planned_to_read_the_experts_that_they_are_routed_to(
    tokens: int, schedule: str, tmp_path: Path
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=2,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # tokens are all there is in a block's input: experts are equally likely
        made.model.embed_tokens.weight *= 100.0
    made.save_pretrained(tmp_path / "mixture")
    accumulate = 2 if schedule == "layer" else 1
    more = [f"model.path={tmp_path / 'mixture'}", f"model.seq_len={tokens}", f"train.accumulate={accumulate}"]
    more += ["train.batch_size=1", f"train.schedule={schedule}", "train.dtype=fp32", "memory.device=400KiB"]
    more += ["memory.resident=false", "partition.tile=32KiB", "lora.rank=2", "data.packing=false"]
    recipe = recipe_for(tmp_path, *more, "lora.target_modules=[q_proj,o_proj]")
    planned, read = dry_run(recipe, MACHINE, 1), list[int]()
    with built(recipe, None, View()) as (model, optimizer):
        model.train()
        loss = CausalLoss(model)
        scheduled = infinity.layer_schedule(model, accumulate, loss) if schedule == "layer" else loss
        for _ in range(6):
            ids = torch.randint(256, (accumulate, tokens))
            found = scheduled(ids, ids)
            (found.losses.sum() if schedule == "layer" else found).backward()
            optimizer.step()
            read.append(optimizer.report().nbytes_read)
    moved = play_step(planned.trace, planned.setup).nbytes["NVMe read"]
    assert moved == pytest.approx(statistics.mean(read[2:]), rel=0.25)  # others each step
    assert moved < 1.7 * sum(unit.read_nbytes for unit in planned.units if unit.routed)


@pytest.mark.parametrize("activations", ["offload", pytest.param("keep", marks=pytest.mark.slow)])
def test_what_blocks_return_is_planned_where_it_waits(activations: str, tmp_path: Path) -> None:
    more = ["model.n_layers=3", "model.d_model=128", "model.n_heads=2", "model.seq_len=256"]
    more += ["train.batch_size=2", "train.schedule=layer", f"memory.activations={activations}"]
    more += ["train.dtype=fp32"]  # some machines multiply bf16 50 times slower
    value = 2 * 256 * 128 * 4  # the least that leaves
    for accumulate in (2, 4):
        recipe = recipe_for(tmp_path, "memory.resident=false", *more, f"train.accumulate={accumulate}")
        planned, real = dry_run(recipe, MACHINE, 1), layered(recipe)
        on_their_way = 8 * value * (activations == "offload")  # if drives are slow
        assert 0.94 * real.peak_nbytes <= planned.trace.peak_nbytes <= 1.06 * real.peak_nbytes + on_their_way
        if activations == "offload" and accumulate == 2:  # of more blocks no more is there
            deeper = replace(recipe, model=replace(recipe.model, n_layers=6))
            assert dry_run(deeper, MACHINE, 1).trace.peak_nbytes == planned.trace.peak_nbytes
        assert planned.passing is not None
        assert planned.passing.nbytes == value
        cost = play_step(planned.trace, planned.setup)
        moves = 3 * accumulate * (activations == "offload") * directly_moved_nbytes(value)
        weights = real.moved
        assert cost.nbytes["NVMe write"] - weights[1] == 2 * moves
        assert cost.nbytes["NVMe read"] - weights[0] == 3 * moves  # a value for the next block, too
        assert sum(each.nbytes for each in planned.trace.stored if each.has_room) == moves


def test_micro_batches_that_device_memory_cannot_hold_between_blocks_leave_it() -> None:
    def made(accumulate: int, *more: str) -> DryRun:
        shape = ["model.n_layers=6", "model.d_model=4096", "model.n_heads=32", "model.seq_len=1024"]
        step = ["train.batch_size=1", "train.schedule=layer", f"train.accumulate={accumulate}"]
        recipe = load_recipe(None, [*shape, *step, "train.dtype=fp16", "memory.nvme=[nvme]", *more])
        return dry_run(recipe, load_machine("dgx-2"), like=like)

    like = None
    like = small = made(4)
    large, kept = made(600), made(600, "memory.activations=keep")
    assert small.passing is not None
    assert large.passing is not None
    assert not small.passing.leaves
    assert not small.trace.stored
    assert large.passing.leaves
    assert "in host memory" in large.passing.describe()
    assert any("device" in line for line in kept.missing())
    assert not any("device" in line for line in large.missing())
    assert large.tokens_per_s > small.tokens_per_s
    moved = large.cost.nbytes["device to host"] - kept.cost.nbytes["device to host"]
    assert moved == sum(each.nbytes for each in large.trace.stored if each.packed_at is not None)


def test_a_window_that_cannot_keep_a_block_is_the_error_of_a_run_and_of_its_plan(tmp_path: Path) -> None:
    more = [*GPT, "memory.resident=false", "train.schedule=layer", "train.accumulate=2"]
    more += ["partition.tile=never"]

    def refused(nbytes: int, act: Callable[[Recipe], object]) -> int:
        """By how much ``memory.device`` must be raised."""
        try:
            with small_units(4000):
                act(recipe_for(tmp_path, *more, f"memory.device={nbytes}"))
        except BudgetError as error:
            [least] = re.findall(r"(?:at least|Raise it by) .*?\((\d+) bytes\)", str(error))
            return int(least) - nbytes if "at least" in str(error) else int(least)
        return 0

    def plan(recipe: Recipe) -> DryRun:
        return dry_run(recipe, MACHINE, 1)

    nbytes = 1024
    for _ in range(2):  # of units in flight, then of a block
        missing = refused(nbytes, plan)
        assert missing == refused(nbytes, layered) > 0
        assert refused(nbytes + missing - 1, plan) > 0
        nbytes += missing
    assert refused(nbytes, plan) == refused(nbytes, layered) == 0


@pytest.mark.parametrize("kind", few(("gpt_oss",), ("qwen3_fp8", "gpt_oss", "gptq")))
def test_decoding_costs_what_its_operators_read_and_write(kind: str, tmp_path: Path) -> None:
    quantized.write(kind, tmp_path / "model")
    overrides = [f"model.path={tmp_path / 'model'}", "lora.rank=2", "model.seq_len=32", "train.batch_size=2"]
    recipe = recipe_for(tmp_path, "memory.resident=false", *overrides)
    on_cpu, on_device = (dry_run(recipe, load_machine(name), 1) for name in ("vm-2core", "hgx-h100"))
    for planned in (on_cpu, on_device):
        stored = [unit for unit in planned.units if unit.stored_nbytes]
        assert stored
        for unit in stored:
            # once read and once written at the least, and no more than some passes in fp32
            assert unit.stored_nbytes // 2 + unit.nbytes < unit.decode_nbytes < 24 * unit.nbytes
            assert 5 < unit.decode_operators < 500


#: A dense model of a trillion parameters, in 128 such layers (ZeRO-Infinity, table 1).
TRILLION = [
    "model.d_model=25600", "model.n_heads=256", "model.seq_len=1024", "train.batch_size=1",
    "train.dtype=fp16", "memory.nvme=[nvme]",
]  # fmt: skip


@pytest.mark.parametrize("layers", [3, pytest.param(128, marks=pytest.mark.slow)])
def test_units_of_a_trillion_parameters_leave_a_32_gib_device_room_for_activations_on_512_ranks(
    layers: int,
) -> None:
    recipe = load_recipe(None, [
        *TRILLION, f"model.n_layers={layers}", "memory.device=31GiB", "memory.activations=plan",
    ])  # fmt: skip
    made = dry_run(recipe, load_machine("dgx-2").with_ranks(512), 512)
    qkv = 3 * 25600**2 * 2  # what cannot be divided without rounding otherwise
    assert max(unit.nbytes for unit in made.units) <= 1.01 * qkv
    assert min(unit.shard_numel * 2 for unit in made.units) >= LEAST_SHARD_NBYTES
    assert made.division.total + made.trace.peak_nbytes <= 31 * 2**30 <= made.device_nbytes
    assert made.activations.places  # what has left is not in the peak
    assert made.trace.peak_nbytes <= (made.activations.capacity_nbytes or 0)


def test_smaller_tiles_of_a_trillion_parameters_leave_more_room() -> None:
    recipe = load_recipe(None, [
        *TRILLION, "model.n_layers=2", "memory.activations=recompute", "partition.tile=1GiB",
    ])  # fmt: skip
    made = dry_run(recipe, load_machine("dgx-2").with_ranks(512), 512)
    assert max(unit.nbytes for unit in made.units) <= 1.01 * 2**30
    assert made.division.least <= 8 * 2**30


def test_attention_with_narrow_values_is_planned_in_one_kernel_on_an_accelerator(tmp_path: Path) -> None:
    """As accelerators compute it; the CPU writes a matrix of all pairs of tokens."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for activations in ("keep", "recompute"):  # a recomputed forward is the same
        sizes = [f"model.path={tmp_path}", "model.seq_len=512", "train.batch_size=1"]
        recipe = load_recipe(None, [*sizes, "train.dtype=bf16", f"memory.activations={activations}"])
        pairs_nbytes = 8 * 512 * 512 * 4  # heads x tokens x tokens, in fp32
        there = dry_run(recipe, load_machine("desktop-4090"), 1).trace.peak_nbytes
        assert there < pairs_nbytes < dry_run(recipe, MACHINE, 1).trace.peak_nbytes


def test_a_base_in_stored_form_takes_its_own_bytes_of_host_memory_beside_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(
        tmp_path, quantized_llama(tmp_path), "model.seq_len=32", "train.batch_size=2", "lora.rank=2",
        "memory.resident=true", "memory.device=4MiB",
    )  # fmt: skip
    counted: list[int] = []
    divide_host = budget.divide_host

    def divided(total: int, residents: int, *args: Any, **options: Any) -> Any:
        counted.append(residents)
        return divide_host(total, residents, *args, **options)

    monkeypatch.setattr(budget, "divide_host", divided)
    units = dry_run(recipe, load_machine("desktop-4090"), 1).units
    assert not any(unit.on_nvme for unit in units)
    assert any(unit.stored_nbytes and unit.kept_nbytes < unit.nbytes for unit in units)
    gradients = sum(rounded(2 * unit.shard_numel) for unit in units if unit.trainable)  # counted apart
    assert set(counted) == {sum(unit.resident_nbytes for unit in units) - gradients}


def test_devices_that_do_not_reach_each_other_get_whole_units_by_their_links_and_gather_none(tmp_path: Path):
    """Each byte that is gathered goes by host memory, on the link that shards and gradients take, too."""
    cost, wide = {}, ["model.n_layers=8", "model.d_model=1024", "model.n_heads=8", "model.seq_len=32"]
    for peers in ("null", "25e9"):
        machine = load_machine(
            "server-4090-800g", ["devices.per_node=4", f"links.device_bytes_per_s={peers}"]
        )
        for shared in ("auto", "always", "never"):
            more = [*wide, f"memory.shared={shared}", "memory.host=8GiB", "memory.updates=host"]
            planned = dry_run(recipe_for(tmp_path, *more, "memory.nvme=[]"), machine, 4)
            gradients = sum(unit.nbytes for unit in planned.units if unit.trainable)
            cost[peers, shared] = found = planned.cost
            gathered = found.nbytes["links"] - gradients
            uploaded = found.nbytes["host to device"]
            if shared == "always":
                assert gathered == 0
                assert uploaded >= gradients
            if shared == "never":
                assert gathered == 4 * uploaded == cost[peers, "always"].nbytes["host to device"]
        assert cost[peers, "auto"] == cost[peers, "always" if peers == "null" else "never"]
    assert cost["null", "always"].step_s < cost["null", "never"].step_s


def test_of_rows_that_are_read_or_written_their_own_bytes_count_not_those_of_the_whole() -> None:
    made = Record([], torch.float32, Batch((1, 1)), lambda region: False)
    table, rows, at = torch.zeros(1000, 8), torch.ones(2, 8), torch.tensor([1, 5])
    with made:
        table[at]
        table.index_put_((at,), rows)
        table.index_add_(0, at, rows)
        torch.empty(1000, 8)
    assert [nbytes for _, nbytes, *_ in made.rows] == [2 * 64 + 16, 3 * 64 + 16, 3 * 64 + 16, 0]
