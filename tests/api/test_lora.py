"""LoRA through peft: bitwise the plain loop's numbers, a base that is only read, adapters saved alone."""

import contextlib
import functools
import itertools
import json
import os
import re
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity import (
    BudgetError,
    CheckpointError,
    DiskError,
    PeerError,
    RecipeError,
    StateError,
    add_lora,
    save_lora,
)
from infinity.app.train import train as train_recipe
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Reference, Rule, compute_weight
from tests.helpers.training import DTYPES, Trained, assert_bitwise, optimizer_for, small_units, streaming
from tests.test_bytes import settled
from tests.test_optimizers import rule_of

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

RANK, ALPHA = 4, 8.0
WEIGHT, STATE = 2, 10  # bytes per element: bf16; its remainder and both moments
#: In host memory; the base on NVMe and the adapters in host memory; all on NVMe.
PLACES = ("host", "adapters", "nvme")


def overrides(place: str, folder: Any, *more: str) -> list[str]:
    if place == "host":
        return ["memory.host=256MiB", *more]
    resident = ["memory.resident=true", "memory.host=520KiB"] if place == "adapters" else []
    return [*streaming(folder), *resident, *more]


def built(factory: Any, recipe: infinity.Recipe, **options: Any) -> Any:
    """A model under infinity with adapters."""
    with small_units():
        with infinity.Init(recipe):
            model = factory()
        torch.manual_seed(5)
        return add_lora(model, rank=RANK, alpha=ALPHA, **options)


def plain(factory: Any, dtype: str, **options: Any) -> Any:
    """The same model in plain PyTorch and peft: a base in the compute dtype, as people load one."""
    model = factory()
    for param in model.parameters():
        param.data = compute_weight(param.data, DTYPES[dtype])
    torch.manual_seed(5)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**(settings | options)))


def train(model: Any, batch: Any, rule: Rule, steps: int = 4, rank: int = 0, world: int = 1) -> Trained:
    out = Trained()
    optimizer = optimizer_for(model, rule)
    for step in range(steps):
        loss = model(**batch(step, rank, world)).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        out.losses.append(loss.item())
        out.norms.append(optimizer.grad_norm or 0.0)
        out.reports.append(optimizer.report())
    out.weights = infinity.state_dict(model, every_rank=True)
    return out


def train_plain(model: Any, batch: Any, dtype: str, rule: Rule, steps: int = 4) -> Trained:
    loop, out = Reference(model, DTYPES[dtype], rule), Trained()
    for step in range(steps):
        outcome = loop.step([batch(step)])
        out.losses += [float(loss) for loss in outcome.losses]
        out.norms.append(outcome.grad_norm)
    out.weights = {name: param.detach() for name, param in model.named_parameters()}
    return out


@contextlib.contextmanager
def closing(model: Any):
    try:
        yield model
    finally:
        infinity.close(model)


def base_units(model: nn.Module) -> list[Any]:
    return [unit for unit in runtime_of(model).units if not unit.trainable]


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    few((("adamw8bit", "nvme"),), itertools.product(("adamw8bit", "lion", "sgd"), ("host", "nvme"))),
)
def test_adapters_trained_by_other_rules_equal_the_plain_loop_to_the_bit(tmp_path, name, place):
    rule, (factory, batch) = rule_of(name, max_grad_norm=0.01), models.build("llama", seed=1)
    more = [f"optim.name={name}", "memory.host=16MiB"]
    with closing(built(factory, training.recipe("bf16", overrides(place, tmp_path, *more)))) as model:
        ours = train(model, batch, rule)
    assert_bitwise(ours, train_plain(plain(factory, "bf16"), batch, "bf16", rule))


@functools.cache
def plain_loop(clip: float | None) -> Trained:
    """What plain PyTorch gives; every placement is compared with the same."""
    factory, batch = models.build("llama", seed=1)
    return train_plain(plain(factory, "bf16"), batch, "bf16", Rule(max_grad_norm=clip))


@pytest.mark.parametrize(
    ("place", "clip"),
    few((("host", None), ("adapters", None), ("nvme", 1.0)), itertools.product(PLACES, (1.0, None))),
)
def test_one_rank_equals_plain_pytorch_with_peft_to_the_bit(tmp_path, place, clip):
    factory, batch = models.build("llama", seed=1)
    rule = Rule(max_grad_norm=clip)
    with closing(built(factory, training.recipe("bf16", overrides(place, tmp_path)))) as model:
        ours = train(model, batch, rule)
    assert_bitwise(ours, plain_loop(clip))
    assert len(set(ours.losses)) == 4


@pytest.mark.parametrize(
    ("name", "targets"), [("gpt2", ["c_attn"]), pytest.param("t5", ["q", "v"], marks=pytest.mark.slow)]
)
def test_other_models_and_chosen_layers_equal_plain_pytorch_too(tmp_path, name, targets):
    factory, batch = models.build(name, seed=1)
    recipe = training.recipe("bf16", overrides("nvme", tmp_path))
    with closing(built(factory, recipe, target_modules=targets)) as model:
        ours = train(model, batch, Rule())
    theirs = plain(factory, "bf16", target_modules=targets, task_type=None if name == "t5" else "CAUSAL_LM")
    assert_bitwise(ours, train_plain(theirs, batch, "bf16", Rule()))


@pytest.mark.parametrize("recompute", few((True,), (False, True)))
def test_micro_batches_and_recomputation_equal_plain_pytorch(tmp_path, recompute):
    factory, batch = models.build("llama", seed=1)

    def recomputed():
        model: Any = factory()
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    theirs = Reference(plain(recomputed, "bf16"), torch.bfloat16, Rule())
    with closing(built(recomputed, training.recipe("bf16", overrides("nvme", tmp_path)))) as model:
        optimizer = optimizer_for(model, Rule())
        for step in range(4):
            micro = [batch(3 * step + i) for i in range(3)]
            losses = []
            for i, each in enumerate(micro):
                with contextlib.nullcontext() if i == 2 else infinity.no_sync(model):
                    loss = model(**each).loss
                    loss.backward()
                    losses.append(loss.item())
            optimizer.step()
            assert losses == [float(loss) for loss in theirs.step(micro).losses]


@pytest.mark.parametrize("dtype", few(("fp16",), ("fp16", "fp32")))
def test_other_dtypes_equal_plain_pytorch_too(tmp_path, dtype):
    factory, batch = models.build("llama", seed=2)
    with closing(built(factory, training.recipe(dtype, overrides("nvme", tmp_path)))) as model:
        ours = train(model, batch, Rule())
    assert_bitwise(ours, train_plain(plain(factory, dtype), batch, dtype, Rule()))


@pytest.mark.slow
def test_dropout_before_the_adapters_draws_the_same_numbers(tmp_path):
    factory, batch = models.build("llama", seed=3)
    with closing(built(factory, training.recipe("bf16", overrides("nvme", tmp_path)), dropout=0.2)) as model:
        ours = train(model, batch, Rule())
    assert_bitwise(ours, train_plain(plain(factory, "bf16", lora_dropout=0.2), batch, "bf16", Rule()))


def test_get_peft_model_inside_init_trains_the_same_numbers(tmp_path):
    factory, batch = models.build("llama", seed=4)
    targets = ["q_proj", "down_proj"]
    recipe = training.recipe("fp32", overrides("nvme", tmp_path))
    with small_units(), infinity.Init(recipe):
        model = plain(factory, "fp32", target_modules=targets)
    with closing(model):
        ours = train(model, batch, Rule())
    assert_bitwise(ours, train_plain(plain(factory, "fp32", target_modules=targets), batch, "fp32", Rule()))


# --- bytes ---------------------------------------------------------------------------------------


def tight(model: Any, rule: Rule) -> Any:
    """An optimizer with the least device budget, and room for the adapters' updates and one more unit."""
    runtime = runtime_of(model)
    runtime.storage.memory = replace(runtime.storage.memory, device=1024)
    with pytest.raises(BudgetError) as error:
        optimizer_for(model, rule)
    [nbytes] = re.findall(r"\((\d+) bytes\)", str(error.value))
    updates = 2 * sum(unit.nbytes for unit in runtime.units if unit.trainable and unit.home.tier is Tier.NVME)
    room = int(nbytes) + updates + min(unit.nbytes for unit in base_units(model))
    runtime.storage.memory = replace(runtime.storage.memory, device=room)
    return optimizer_for(model, rule)


@pytest.mark.parametrize(
    ("place", "clip"),
    few((("adapters", 1.0), ("nvme", None)), itertools.product(("adapters", "nvme"), (1.0, None))),
)
def test_a_step_reads_the_base_twice_at_most_and_writes_nothing_but_adapters(tmp_path, place, clip):
    factory, batch = models.build("llama", seed=5)
    with closing(built(factory, training.recipe("bf16", overrides(place, tmp_path)))) as model:
        optimizer = tight(model, Rule(max_grad_norm=clip))
        runtime: Any = optimizer.runtime
        home = Tier.HOST if place == "adapters" else Tier.NVME
        assert {unit.home.tier for unit in runtime.units if unit.trainable} == {home}
        base = sum(unit.nbytes for unit in base_units(model) if unit.home.tier is Tier.NVME)
        adapters = sum(unit.numel for unit in runtime.units if unit.trainable and unit.home.tier is Tier.NVME)
        assert base > runtime.executor().budget.division.window
        for step in range(6):
            model(**batch(step)).loss.backward()
            optimizer.step()
            settled(runtime)  # the next step's first reads are counted when they end
            seen = optimizer.report()
            if step > 2:
                fetches = Counter(runtime.executor().prefetcher.training.plan.fetched())
                assert max(fetches[unit.index] for unit in base_units(model)) <= 2
                assert seen.on_demand == 0
                assert seen.nbytes_read == seen.planned_nbytes_read
                assert 0.5 * base <= seen.nbytes_read <= 2 * base + (2 * WEIGHT + STATE + WEIGHT) * adapters
                assert seen.nbytes_written == seen.planned_nbytes_written == (WEIGHT + STATE) * adapters


def test_the_base_takes_the_bytes_of_its_weights_on_disk_and_no_more(tmp_path):
    factory, batch = models.build("llama", seed=6)

    def in_bf16():
        torch.set_default_dtype(torch.bfloat16)  # as a checkpoint's values are
        try:
            return factory()
        finally:
            torch.set_default_dtype(torch.float32)

    for make, base_itemsize in ((in_bf16, WEIGHT), (factory, 2 * WEIGHT)):
        with closing(built(make, training.recipe("bf16", overrides("nvme", tmp_path)))) as model:
            optimizer = optimizer_for(model, Rule())
            for step in range(2):
                model(**batch(step)).loss.backward()
                optimizer.step()
            optimizer.synchronize()
            base = sum(unit.numel for unit in base_units(model))
            adapters = sum(unit.numel for unit in optimizer.runtime.units) - base
            assert 2 * base > 3 * adapters  # whose small matrices take a block of 256 elements each
            versions = 2 * (WEIGHT + STATE) * adapters
            assert optimizer.report().peak_nbytes["nvme"] == base_itemsize * base + versions


@pytest.mark.slow
def test_host_memory_that_a_frozen_base_does_not_need_takes_in_more_of_it(tmp_path):
    factory, batch = models.build("llama", seed=7)
    places = overrides("nvme", tmp_path, "memory.resident=true", "memory.host=700KiB")
    with small_units(), infinity.Init(training.recipe("bf16", places)):
        model = factory()
    with closing(model):
        before = sum(unit.numel for unit in runtime_of(model).units if unit.home.tier is Tier.HOST)
        with small_units():
            torch.manual_seed(5)
            model = add_lora(model, rank=RANK, alpha=ALPHA)
        ours = train(model, batch, Rule())
        runtime = runtime_of(model)
        assert all(unit.home.tier is Tier.HOST for unit in runtime.units if unit.trainable)
        after = sum(unit.numel for unit in base_units(model) if unit.home.tier is Tier.HOST)
        assert after > 1.25 * before > 0  # of 12 bytes for each weight that was to be trained 4 stay
        assert ours.reports[-1].peak_nbytes["host"] <= runtime.storage.host_nbytes
    assert_bitwise(ours, train_plain(plain(factory, "bf16"), batch, "bf16", Rule()))


def test_adding_adapters_moves_no_byte_of_the_base(tmp_path):
    factory, _ = models.build("llama", seed=8)
    with small_units(), infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
        model = factory()
    with closing(model):
        engine: Any = runtime_of(model).tiers.store.engine
        before = engine.nbytes_read, engine.nbytes_written
        with small_units():
            model = add_lora(model, rank=RANK)
        adapters = sum(u.numel for u in runtime_of(model).units if u.trainable)
        assert engine.nbytes_read == before[0]
        assert engine.nbytes_written <= before[1] + 2 * WEIGHT * adapters


@contextlib.contextmanager
def small_files(nbytes: int = 4096):
    """Let every file that grows beyond ``nbytes`` be refused, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_adapters_that_find_no_room_leave_nothing_and_say_where(tmp_path):
    factory, _ = models.build("llama", seed=14)
    with closing(built(factory, training.recipe("bf16", overrides("host", tmp_path / "run")))) as model:
        with small_files(), pytest.raises(DiskError, match=r"writing adapters to .*out.* failed: .* free"):
            save_lora(model, tmp_path / "out")
        assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]
        save_lora(model, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


# --- ranks ---------------------------------------------------------------------------------------


def rank_trains(folder: str) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    rank = int(os.environ["RANK"])
    factory, batch = models.build("llama", seed=9)
    with closing(
        built(factory, training.recipe("fp32", overrides("adapters", folder, "memory.host=240KiB")))
    ) as model:
        out = train(model, batch, Rule(), rank=rank, world=2)
        save_lora(model, Path(folder, "saved"))
        homes = [unit.home.tier.name for unit in runtime_of(model).units]
    return out.losses, out.weights, homes


def rank_finds_no_room(folder: str) -> str:
    factory, _ = models.build("llama", seed=14)
    with closing(built(factory, training.recipe("fp32", overrides("host", folder)))) as model:
        with small_files(), pytest.raises((DiskError, PeerError)) as raised:
            save_lora(model, Path(folder, "out"))
        save_lora(model, Path(folder, "again"))
    return f"{raised.type.__name__}: {raised.value}"


def test_every_rank_learns_that_adapters_found_no_room(tmp_path):
    first, second = run_ranks(rank_finds_no_room, 2, str(tmp_path))
    assert first.startswith("WriteError: writing adapters")
    assert second.startswith("PeerError")
    assert "writing adapters" in second
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "again" / "adapter_config.json").is_file()


def test_two_ranks_train_and_save_the_adapters_of_one(tmp_path):
    (first, weights, homes), (second, other, same_homes) = run_ranks(rank_trains, 2, str(tmp_path))
    assert homes == same_homes
    assert set(homes) == {"HOST", "NVME"}
    factory, batch = models.build("llama", seed=9)
    whole = train_plain(plain(factory, "fp32"), batch, "fp32", Rule())
    for a, b, loss in zip(first, second, whole.losses, strict=True):
        assert (a + b) / 2 == pytest.approx(loss, rel=1e-5)
    for name, value in whole.weights.items():
        assert torch.equal(weights[name], other[name])
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
    loaded = peft.PeftModel.from_pretrained(factory(), str(tmp_path / "saved"))
    for name, value in loaded.named_parameters():
        assert torch.equal(value, weights[name]), name


# --- saving --------------------------------------------------------------------------------------


def test_saved_adapters_are_loaded_by_peft_and_name_and_sample_their_base(tmp_path):
    factory, batch = models.build("llama", seed=10)
    base = tmp_path / "base"
    saved: Any = factory()
    for param in saved.parameters():
        param.data = compute_weight(param.data, torch.bfloat16)
    saved.save_pretrained(base)

    with small_units():
        model = infinity.from_pretrained(base, training.recipe("bf16", overrides("nvme", tmp_path / "run")))
    with closing(model), small_units():
        model = add_lora(model, rank=RANK, alpha=ALPHA)
        train(model, batch, Rule())
        engine: Any = runtime_of(model).tiers.store.engine
        before = engine.nbytes_read
        save_lora(model, tmp_path / "adapters")
        adapters = sum(unit.nbytes for unit in runtime_of(model).units if unit.trainable)
        assert engine.nbytes_read - before <= adapters  # the base is not gathered
        model.eval()
        with torch.no_grad():
            ours = model(**batch(99)).logits
    loaded = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    again = peft.PeftModel.from_pretrained(loaded, str(tmp_path / "adapters"), autocast_adapter_dtype=False)
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch(99)).logits, ours)
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapters"))
    assert (config.base_model_name_or_path, config.r, config.lora_alpha) == (str(base), RANK, ALPHA)
    card = ModelCard.load(tmp_path / "adapters" / "README.md")
    assert card.text.strip().startswith(f"# Adapters of {base}\n")
    assert f'from_pretrained("{base}", dtype=torch.bfloat16)' in card.text
    assert "More Information Needed" not in card.content


def test_a_recipe_trains_adapters_of_a_checkpoint_and_keeps_them_alone(tmp_path):
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question: " * 200)
    recipe = infinity.load_recipe(
        overrides=[
            f"model.path={tmp_path}/base", f"data.files=[{tmp_path}/text.txt]", "data.tokenizer=bytes",
            f"data.cache={tmp_path}/tokens", "model.seq_len=32", "lora.rank=4", "lora.alpha=8",
            "lora.target_modules=[q_proj, v_proj]", f"run.dir={tmp_path}", "run.name=run", "optim.lr=1e-2",
            f"memory.nvme=[{tmp_path}/nvme]", "train.steps=8", "train.eval_every=4", "observe.progress=false",
            "train.threads=1",
        ]
    )  # fmt: skip
    train_recipe(recipe)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if line["kind"] == "step"]
    assert losses[-1] < losses[0]
    saved = {path.name for path in (tmp_path / "run" / "adapters").iterdir()}
    assert saved == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapters"))
    changed = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(changed) == 4
    assert all(p.abs().sum() > 0 for p in changed)


def test_adapters_without_a_base_are_an_error_of_the_recipe():
    with pytest.raises(RecipeError, match=r"lora.rank.*model.path"):
        infinity.load_recipe(overrides=["lora.rank=8"])


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["inside", "after a forward", "after the optimizer"])
def test_adding_adapters_at_a_wrong_moment_is_an_error_that_says_when(tmp_path, when):
    factory, batch = models.build("llama", seed=11)
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_units())
        with infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
            model = factory()
            stack.enter_context(closing(model))
            if when == "inside":
                with pytest.raises(StateError, match=r"after the `with.*before infinity"):
                    add_lora(model)
        if when == "after a forward":
            model(**batch(0))
        if when == "after the optimizer":
            infinity.AdamW(model)
        with contextlib.nullcontext() if when == "inside" else pytest.raises(StateError, match="add_lora"):
            add_lora(model)


def test_layers_that_do_not_exist_are_an_error_that_names_them(tmp_path):
    factory, _ = models.build("llama", seed=12)
    with infinity.Init(training.recipe("bf16", overrides("nvme", tmp_path))):
        model = factory()
    with closing(model), pytest.raises(RecipeError, match=r"adapters for LlamaForCausalLM.*nowhere"):
        add_lora(model, target_modules=["nowhere"])


def test_adapters_are_never_saved_over_other_files(tmp_path):
    factory, _ = models.build("llama", seed=13)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with closing(built(factory, training.recipe("bf16", overrides("nvme", tmp_path / "run")))) as model:
        with pytest.raises(CheckpointError, match="full"):
            save_lora(model, tmp_path / "full")
        save_lora(model, tmp_path / "free")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "full", "run"]
