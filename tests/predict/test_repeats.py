"""What is repeated of a few blocks is the record of the whole model, to the last number."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.predict import recording, repeats
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import load_machine
from infinity.predict.play import play_step
from infinity.predict.recording import Record
from infinity.predict.repeats import Rounds, find_rounds
from infinity.recipes.loading import load_recipe
from tests.helpers.cases import few
from tests.helpers.training import small_units

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 9, "max_position_embeddings": 512, **SIZES,
    },
    "deepseek": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 10, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, **SIZES, "num_key_value_heads": 4,
    },
    # Attention alternates between a window and all tokens, each with a mask of its own.
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "intermediate_size": 128,
        "num_hidden_layers": 18, "head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 9, "max_position_embeddings": 512, **SIZES,
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


def planned(folder: Path, case: str) -> DryRun:
    model, ranks, overrides = CASES[case]
    # Long enough for the planner to see what blocks save: smaller storages than 256 KiB are always kept.
    given = [
        f"memory.nvme=[{folder / 'nvme'}]", "train.dtype=bf16", "memory.host=64MiB", "memory.resident=false",
        "memory.activations=keep", "model.seq_len=256", "train.batch_size=8", "memory.device=256MiB",
    ]  # fmt: skip
    if model == "gpt":
        given += ["model.n_layers=10", "model.d_model=64", "model.n_heads=4"]
    else:
        (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
        given.append(f"model.path={folder}")
    with small_units():
        return dry_run(load_recipe(None, [*given, *overrides]), load_machine("vm-2core"), ranks)


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
def test_what_is_repeated_of_some_blocks_is_what_all_of_them_record(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def noted(*args: Any) -> Record:
        ran.append(len(args[6]) if len(args) > 6 else 0)
        return recording.record_step(*args)

    monkeypatch.setattr(repeats, "record_step", noted)
    some = planned(tmp_path, case)
    assert all(ran), "all blocks ran"
    marks = (block.forward[0] < block.saved <= block.forward[1] for block in some.profile.blocks)
    assert all(marks) or some.policy == "recompute", "what autograd saves is not marked"
    monkeypatch.setattr(repeats, "find_rounds", lambda kinds: [])
    every = planned(tmp_path, case)
    assert not ran[-1]
    assert_same(some, every)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("aaaaaa", [Rounds(1, 1, 2)]),
        ("dddmmmmmm", [Rounds(4, 1, 2)]),
        ("absabababababab", [Rounds(5, 2, 2)]),
        ("aaaaabbbbbbbb", [Rounds(1, 1, 1), Rounds(6, 1, 4)]),
        ("aaaa", []),
        ("abcdefgh", []),
        ("", []),
    ],
)
def test_equal_rounds_are_found(kinds: str, found: list[Rounds]) -> None:
    assert find_rounds(kinds) == found


@pytest.mark.parametrize("what", ["an operator", "a unit", "an argument"])
def test_rounds_that_are_not_alike_all_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: Any) -> Record:
        made = recording.record_step(*args)
        if len(args) > 6 and what == "an operator":
            at = made.recorded.regions[3].begin
            made.rows[at] = (made.rows[at][0] + 1, *made.rows[at][1:])
        elif len(args) > 6:
            at = next(i for i, call in enumerate(made.calls) if call[0] > made.recorded.regions[3].begin)
            position, part, method, given, options = made.calls[at]
            more = (given[0] + 1, *given[1:]) if what == "a unit" else (*given, 5)
            made.calls[at] = position, part, method, more, options
        return made

    monkeypatch.setattr(repeats, "record_step", changed)
    some = planned(tmp_path, "gpt")
    monkeypatch.setattr(repeats, "find_rounds", lambda kinds: [])
    assert_same(some, planned(tmp_path, "gpt"))
