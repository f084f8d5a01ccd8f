"""A record that is derived from a few blocks is the record of the whole model, to the last number."""

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.app import repeats
from infinity.app.dry_run import DryRun, dry_run
from infinity.app.machines import load_machine
from infinity.app.models.gpt import GPT, Output
from infinity.app.recipe import Recipe, load_recipe
from infinity.app.recording import Record
from infinity.planner.clock import play_step

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 8, "max_position_embeddings": 512, **SIZES,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 512, "n_embd": 64,
        "n_layer": 8, "n_head": 4, "n_positions": 512,
    },
    "deepseek": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 9, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, **SIZES, "num_key_value_heads": 4,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "head_dim": 16, "decoder_sparse_step": 1, "max_position_embeddings": 512, **SIZES,
    },
    # attention alternates between a window and all tokens, each with a mask of its own
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 16, "head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 8, "max_position_embeddings": 512, **SIZES,
    },
}  # fmt: skip
#: Long enough for the planner to see what blocks save: smaller storages than 256 KiB are always kept.
SHAPE = ["model.seq_len=256", "train.batch_size=8"]


def recipe_for(folder: Path, model: str, *overrides: str) -> Recipe:
    given = [
        f"memory.nvme=[{folder / 'nvme'}]", "train.dtype=bf16", "memory.host=64MiB", "memory.device=256MiB",
        "memory.activations=keep", "observe.progress=false", "memory.resident=false", *SHAPE,
    ]  # fmt: skip
    if model == "gpt":
        given += ["model.n_layers=8", "model.d_model=64", "model.n_heads=4"]
    else:
        (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
        # classes that are imported while a model is built are cut into other units than those that were there
        kind = str(CONFIGS[model]["model_type"]).removesuffix("_text")
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        given.append(f"model.path={folder}")
    return load_recipe(None, [*given, *overrides])


def whole(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, ranks: int) -> DryRun:
    """A dry run in which every block is recorded."""
    with monkeypatch.context() as patched:
        patched.setattr(repeats, "choose", lambda kinds, margin: None)
        return dry_run(recipe, load_machine("vm-2core"), ranks)


class Spy:
    """Counts the blocks that were recorded, and those that were derived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded, self.derived, self.why = [], 0, ""
        derive = repeats.derive

        def spied(some: Record, chosen: repeats.Chosen, *rest: Any) -> Record:
            try:
                found = derive(some, chosen, *rest)
            except repeats.UnderivableError as error:
                self.why = str(error)
                raise
            self.recorded.append(len(chosen.kept))
            self.derived += len(chosen.sources)
            return found

        monkeypatch.setattr(repeats, "derive", spied)


def assert_same(some: DryRun, every: DryRun) -> None:
    for field in fields(some.trace):
        one, other = getattr(some.trace, field.name), getattr(every.trace, field.name)
        same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
        assert same, f"{field.name} differs"
    for field in fields(some.profile):
        assert getattr(some.profile, field.name) == getattr(every.profile, field.name), field.name
    assert some.activations == every.activations
    assert some.division == every.division
    assert some.units == every.units
    assert play_step(some.trace, some.setup) == play_step(every.trace, every.setup)


CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "gpt": ("gpt", 1, ()),
    "gpt-tied": ("gpt", 2, ("model.tied=true",)),
    "gpt-tight": ("gpt", 1, ("memory.device=8MiB", "optim.max_grad_norm=null")),
    "gpt-recomputed": ("gpt", 1, ("memory.activations=recompute",)),
    "gpt-accumulated": ("gpt", 2, ("train.accumulate=3",)),
    "gpt-half-resident": ("gpt", 1, ("memory.host=8MiB", "memory.resident=true")),
    "llama": ("llama", 1, ()),
    "llama-two-ranks": ("llama", 2, ()),
    "llama-recomputed": ("llama", 2, ("memory.activations=recompute",)),
    "llama-offloaded": ("llama", 1, ("memory.activations=offload",)),
    "llama-lora": ("llama", 2, ("lora.rank=2",)),
    "llama-lora-recomputed": ("llama", 1, ("lora.rank=2", "memory.activations=recompute")),
    "llama-layers": ("llama", 1, ("train.schedule=layer", "train.accumulate=2")),
    "gpt2": ("gpt2", 1, ()),
    "deepseek": ("deepseek", 1, ()),
    "deepseek-two-ranks": ("deepseek", 2, ("memory.activations=recompute",)),
    "deepseek-lora": ("deepseek", 2, ("lora.rank=2", "lora.target_modules=[q_a_proj,o_proj]")),
    "qwen3-moe": ("qwen3-moe", 2, ()),
    "gemma3": ("gemma3", 1, ()),
    "gemma3-recomputed": ("gemma3", 2, ("memory.activations=recompute",)),
}


#: The others differ in what is played, or are of models that resemble these.
FAST = {"gpt-tight", "deepseek-two-ranks"}


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_is_derived_from_some_blocks_is_what_all_of_them_record(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ranks, overrides = CASES[case]
    recipe = recipe_for(tmp_path, model, *overrides)
    every = whole(monkeypatch, recipe, ranks)
    spy = Spy(monkeypatch)
    some = dry_run(recipe, load_machine("vm-2core"), ranks)
    assert spy.derived > 0, f"all blocks were recorded: {spy.why}"
    assert_same(some, every)


class Peeking(GPT):
    """Reads a weight of a block that is left out."""

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        logits, loss = super().forward(*args, **kwargs)
        return Output(logits + self.blocks[3].attention_norm.weight.sum(), loss)


def test_a_block_whose_parameter_is_read_elsewhere_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.app.dry_run.GPT", Peeking)
    recipe = recipe_for(tmp_path, "gpt")
    every = whole(monkeypatch, recipe, 1)
    spy = Spy(monkeypatch)
    some = dry_run(recipe, load_machine("vm-2core"), 1)
    assert "a block that is left out" in spy.why
    assert_same(some, every)
