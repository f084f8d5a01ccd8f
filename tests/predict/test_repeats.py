"""A record that is derived from a few blocks is that of the whole model, to the last number."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.activations.controller import recomputable_blocks
from infinity.core.plan import ActivationPlan
from infinity.predict import repeats
from infinity.predict.derive import Run
from infinity.predict.dry_run import DryRun, dry_run, model_for
from infinity.predict.machines import load_machine
from infinity.predict.operators import Operation
from infinity.predict.play import play_step
from infinity.predict.recording import Batch, Record
from infinity.predict.repeats import find_run
from infinity.recipes.loading import load_recipe
from infinity.recipes.models import GPT
from tests.helpers.cases import few

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 7, "max_position_embeddings": 512, **SIZES,
    },
    "deepseek": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 8, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, **SIZES, "num_key_value_heads": 4,
    },
    # Attention alternates between a window and all tokens, each with a mask of its own.
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 12, "head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 6, "max_position_embeddings": 512, **SIZES,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "gpt": ("gpt", 1, ()),
    "gpt-tied": ("gpt", 2, ("model.tied=true",)),
    "gpt-in-tiles": ("gpt", 1, ("partition.tile=16KiB", "memory.device=8MiB", "memory.activations=keep")),
    "gpt-recomputed": ("gpt", 1, ("memory.activations=recompute", "train.accumulate=3")),
    "gpt-layers": ("gpt", 1, ("train.schedule=layer", "train.accumulate=2")),
    "gpt-planned": ("gpt", 1, ("memory.activations=plan", "memory.device=64MiB")),
    "llama-two-ranks": ("llama", 2, ("memory.activations=recompute",)),
    "llama-padded": ("llama", 1, ("data.packing=false",)),
    "llama-lora": ("llama", 1, ("lora.rank=2", "memory.activations=recompute")),
    "llama-offloaded": ("llama", 1, ("memory.activations=offload",)),
    "llama-in-slices": ("llama", 1, ("memory.logits=slices",)),
    "deepseek": ("deepseek", 1, ()),
    "deepseek-two-ranks": ("deepseek", 2, ("memory.activations=recompute",)),
    "deepseek-lora-in-tiles": ("deepseek", 1, (
        "lora.rank=8", "partition.tile=4KiB", "memory.device=2MiB", "train.schedule=layer",
        "train.accumulate=2",
    )),
    "gemma3": ("gemma3", 1, ()),
    "gemma3-recomputed": ("gemma3", 2, ("memory.activations=recompute",)),
}  # fmt: skip


def planned(folder: Path, case: str) -> tuple[DryRun, Record]:
    model, ranks, overrides = CASES[case]
    # Long enough for the planner to see what blocks save: smaller storages than 256 KiB are always kept.
    given = [
        f"memory.nvme=[{folder / 'nvme'}]", "train.dtype=bf16", "memory.host=64MiB", "memory.resident=false",
        "memory.activations=keep", "model.seq_len=256", "train.batch_size=8", "memory.device=256MiB",
    ]  # fmt: skip
    if model == "gpt":
        given += ["model.n_layers=7", "model.d_model=64", "model.n_heads=4"]
    else:
        (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
        given.append(f"model.path={folder}")
    run = dry_run(load_recipe(None, [*given, *overrides]), load_machine("vm-2core"), ranks)
    return run, run._micro_batch


def assert_same(some: DryRun, every: DryRun) -> None:
    for name in [field.name for field in fields(some.trace)]:
        one, other = getattr(some.trace, name), getattr(every.trace, name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, name
    for name in [field.name for field in fields(some.profile)]:
        assert getattr(some.profile, name) == getattr(every.profile, name), name
    assert (some.activations, some.division, some.units) == (every.activations, every.division, every.units)
    assert play_step(some.trace, some.setup) == play_step(every.trace, every.setup)


#: The others are long tests.
FEW = "gpt-tied", "llama-lora"


@pytest.mark.parametrize("case", few(FEW, CASES))
def test_what_is_derived_from_some_blocks_is_what_all_of_them_record(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, record = planned(tmp_path, case)
    assert len(record.cuts) < len(recomputable_blocks(some.model.module)), "all blocks were recorded"
    monkeypatch.setattr(repeats, "find_run", lambda kinds: None)
    every, whole = planned(tmp_path, case)
    assert len(whole.cuts) == len(recomputable_blocks(every.model.module))
    assert_same(some, every)


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("aaaaaa", Run(0, 6, 1)),
        ("dddmmmmmm", Run(3, 6, 1)),
        ("absabababababab", Run(3, 12, 2)),
        ("aaaaa", None),
        ("abcdefgh", None),
        ("", None),
    ],
)
def test_the_run_that_leaves_out_the_most_blocks_is_found(kinds: str, run: Run | None) -> None:
    assert find_run(kinds) == run
    if run is not None:
        kept = run.kept(len(kinds))
        assert len(kept) + run.left_out == len(kinds)
        # What is left out is like a block that is recorded, and its neighbours are like that block's.
        for at in range(len(kinds)):
            source = kept[run.source(at)]
            assert kinds[source] == kinds[at]
            assert not run.is_left_out(source)


class Peeking(GPT):
    """Reads a weight of a block in the middle."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return found._replace(logits=found.logits + self.blocks[3].attention_norm.weight.sum())


class Between(GPT):
    """Computes something between two blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks[4].register_forward_pre_hook(lambda block, given: (given[0] * 2, *given[1:]))


class Different(GPT):
    """Has a block that is not trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks[3].requires_grad_(False)


@pytest.mark.parametrize("kind", few((Peeking,), (Peeking, Between, Different)))
def test_a_model_whose_blocks_are_not_alike_to_others_is_recorded_as_a_whole(
    kind: type[GPT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.predict.model.GPT", kind)
    _, record = planned(tmp_path, "gpt-recomputed")
    assert len(record.cuts) == 7


def test_operators_that_are_timed_are_derived_where_no_cache_holds_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, sizes = load_machine("vm-2core"), ["model.n_layers=7", "model.d_model=64", "model.n_heads=4"]
    recipe = load_recipe(None, [*sizes, "model.seq_len=256", "train.batch_size=8"])
    model = model_for(recipe, machine, 1, here=True)
    keep = ActivationPlan("keep")
    with model.faked():
        small = model.record(Batch((8, 256), timed=True), keep)
        monkeypatch.setattr(repeats, "COLD", 2**20)
        model._made.clear()
        large = model.record(Batch((8, 256), timed=True), keep)
    assert (len(small.cuts), len(large.cuts)) == (7, 5)
    assert {type(row[-1]) for row in large.rows} == {Operation}
