"""Sequences that are divided over ranks train as whole ones do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    FlintConfig,
    FlintForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import infinity
from infinity.app.train import train
from infinity.core.errors import InfinityError, PeerError, RecipeError, StateError
from infinity.engine import sequence
from infinity.engine.runtime import runtime_of
from infinity.recipes.models import GPT, CausalLoss, GPTConfig
from tests.helpers.launch import run_ranks
from tests.helpers.limits import comes_true

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 8}),
    "few key heads": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "sliding": (MistralForCausalLM, MistralConfig, {"num_key_value_heads": 4, "sliding_window": 5}),
    "experts": (
        Qwen3MoeForCausalLM, Qwen3MoeConfig,
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "long rope": (  # which each rank would choose by its own longest position
        Phi3ForCausalLM, Phi3Config,
        {
            "num_key_value_heads": 4, "original_max_position_embeddings": 10,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.0],
                "long_factor": [3.0, 5.0], "original_max_position_embeddings": 10,
            },
        },
    ),
    "convolution": (
        Lfm2ForCausalLM, Lfm2Config, {"num_key_value_heads": 4, "layer_types": ["conv", "full_attention"]}
    ),
    "recurrent": (MiniMaxForCausalLM, MiniMaxConfig, {"num_key_value_heads": 4, "num_local_experts": 2}),
    "own attention": (FalconForCausalLM, FalconConfig, {"head_dim": None}),
    "positions of padding": (RobertaForCausalLM, RobertaConfig, {"is_decoder": True}),
    "one head": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "uneven heads": (
        LlamaForCausalLM, LlamaConfig, {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "sinks": (
        GptOssForCausalLM, GptOssConfig,
        {"num_key_value_heads": 4, "num_local_experts": 4, "sliding_window": 5},
    ),
    "packed sinks": (
        FlintForCausalLM, FlintConfig,
        {
            "num_key_value_heads": 4, "sliding_window": 5, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
    ),
    "other widths": (  # a value has fewer features than a key
        MiMoV2FlashForCausalLM, MiMoV2FlashConfig,
        {
            "num_key_value_heads": 2, "v_head_dim": 2, "sliding_window": 5, "n_routed_experts": 4,
            "moe_intermediate_size": 16, "num_experts_per_tok": 2, "pad_token_id": None,
        },
    ),
    "wider values": (  # than keys, also with a score of sinks
        MiMoV2FlashForCausalLM, MiMoV2FlashConfig,
        {
            "num_key_value_heads": 2, "v_head_dim": 7, "sliding_window": 5, "n_routed_experts": 4,
            "moe_intermediate_size": 16, "num_experts_per_tok": 2, "pad_token_id": None,
        },
    ),
    "soft caps": (
        Gemma2ForCausalLM, Gemma2Config,
        {
            "num_key_value_heads": 4, "sliding_window": 5, "attn_logit_softcapping": 0.3,
            "query_pre_attn_scalar": 1, "initializer_range": 0.1,  # scores beyond the cap
        },
    ),
    "not of torch": (type("OfItsOwn", (LlamaForCausalLM,), {"_supports_sdpa": False}), LlamaConfig, {}),
    "state": (MambaForCausalLM, MambaConfig, {}),
}  # fmt: skip
SEQ_LEN = 16


def model_of(name: str) -> Any:
    cls, config, more = MODELS[name]
    torch.manual_seed(1)
    return cls(config(**{key: value for key, value in (SIZES | more).items() if value is not None}))


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets and positions of documents, most of which cross a border of parts."""
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 64, (4, SEQ_LEN), generator=made)
    targets = torch.randint(1, 64, (4, SEQ_LEN), generator=made)
    targets[0, :9] = targets[:, -1] = -100
    lengths = [[16], [5, 11], [3, 6, 7], [8, 8]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    return tokens, targets, positions


def whole(name: str, packed: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of plain PyTorch, on one process."""
    model, (tokens, targets, positions) = model_of(name), rows()
    given = positions if packed else torch.arange(SEQ_LEN).expand_as(positions)
    loss = CausalLoss(model, packed=packed)(tokens, targets, given) / (targets >= 0).sum()
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def divided(name: str, packed: bool, count: int, folder: str | None, checkpointed: bool = False) -> Any:
    memory = [f"memory.nvme=[{folder}]"] if folder else []
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", "memory.host=1GiB", *memory])):
        model = model_of(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
    optimizer = infinity.optim.SGD(model, lr=1.0, momentum=0.0)
    before = full(model)
    of, ranks = CausalLoss(model, packed=packed), infinity.SequenceRanks(model, count)
    sequence._SCORES = 400  # of some queries at a time
    group, groups = dist.get_rank() // count, dist.get_world_size() // count
    tokens, targets, positions = rows()
    given = positions if packed else torch.arange(SEQ_LEN).expand_as(positions)
    mine = [ranks.part(each.chunk(groups)[group]) for each in (tokens, targets, given)]
    loss = of(*mine) / ((targets >= 0).sum() / dist.get_world_size())
    loss.backward()
    with torch.no_grad():
        rows_of_group = (each.chunk(groups)[group] for each in (tokens, targets.roll(1, 1)))
        by_model = model(**ranks.split(*rows_of_group), use_cache=False).loss
    optimizer.step()
    after = full(model)
    losses = torch.stack([loss.detach(), by_model])
    dist.all_reduce(losses)
    infinity.close(model)
    return (losses / dist.get_world_size()).tolist(), {key: before[key] - after[key] for key in before}


def scheduled(name: str, packed: bool) -> Any:
    """Like :func:`divided`, of two micro-batches in the layer schedule, whose rows have other documents."""
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", "memory.host=1GiB"])):
        model = model_of(name)
    optimizer = infinity.optim.SGD(model, lr=1.0, momentum=0.0)
    before, ranks, (tokens, targets, positions) = full(model), infinity.SequenceRanks(model, 2), rows()
    given = ranks.split(tokens, targets.roll(1, 1)) | (
        {"position_ids": ranks.part(positions)} if packed else {}
    )
    loss = infinity.layer_schedule(model, micro_batches=2)(**given).loss
    loss.backward()
    optimizer.step()
    after, total = full(model), loss.detach().clone()
    dist.all_reduce(total)
    infinity.close(model)
    return total.item() / 2, {key: before[key] - after[key] for key in before}


@pytest.mark.parametrize(
    ("name", "packed"), [("few key heads", True), ("wider values", False), ("soft caps", True)]
)
def test_micro_batches_of_the_layer_schedule_have_their_own_documents(name: str, packed: bool) -> None:
    loss, gradients = whole(name, packed)
    for total, found in run_ranks(scheduled, 2, name, packed):
        assert total == pytest.approx(loss, rel=1e-6)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=2e-4, atol=2e-6)


def full(model: Any) -> dict[str, torch.Tensor]:
    with infinity.gathered(model):
        return {key: p.detach().clone() for key, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "packed", "world", "count"),
    [
        ("few key heads", True, 2, 2),
        pytest.param("few key heads", True, 4, 4, marks=pytest.mark.slow),
        ("long rope", False, 2, 2),
        ("one head", True, 2, 2),
        ("sinks", False, 2, 2),
        ("soft caps", False, 2, 2),
        pytest.param("soft caps", True, 4, 4, marks=pytest.mark.slow),
        pytest.param("packed sinks", True, 4, 4, marks=pytest.mark.slow),
        pytest.param("other widths", False, 2, 2, marks=pytest.mark.slow),
        pytest.param("uneven heads", False, 4, 4, marks=pytest.mark.slow),
        pytest.param("sliding", True, 4, 2, marks=pytest.mark.slow),
        pytest.param("sliding", False, 2, 2, marks=pytest.mark.slow),
        pytest.param("experts", False, 4, 2, marks=pytest.mark.slow),
        pytest.param("llama", False, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_divided_sequences_have_the_loss_and_gradients_of_whole_ones(
    name: str, packed: bool, world: int, count: int, tmp_path: Path
) -> None:
    loss, gradients = whole(name, packed)
    folder = str(tmp_path) if count == 2 else None
    for (total, by_model), found in run_ranks(divided, world, name, packed, count, folder, count == 2):
        assert total == pytest.approx(loss, rel=1e-6)
        if not packed and count == world:
            assert by_model == pytest.approx(loss, rel=1e-6)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=2e-4, atol=2e-6)


def refused() -> list[str]:
    """Return why sequences of several models are not divided over two ranks."""
    said = list[str]()
    names = "not of torch", "state", "convolution", "recurrent", "own attention", "positions of padding"
    for name, count in (("llama", 3), *((each, 2) for each in names), ("llama", 2)):
        with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", "memory.host=1GiB"])):
            model = model_of(name)
        tokens = rows()[0][:1, :8]
        try:
            ranks = infinity.SequenceRanks(model, count)
            model(tokens, **({} if name == "llama" else {"position_ids": ranks.part(torch.arange(16)[None])}))
        except InfinityError as error:
            said.append(str(error))
        if len(said) == len(names) + 2:  # the last one, which was divided
            with pytest.raises(StateError, match="divides this model's sequences already"):
                infinity.SequenceRanks(model, count)
            with pytest.raises(StateError, match="takes no attention_mask"):
                model(tokens, position_ids=ranks.part(torch.arange(16)[None]), attention_mask=tokens)
        infinity.close(model)
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", "memory.host=1GiB"])):
        gpt = GPT(GPTConfig(n_layers=1, d_model=16, n_heads=2, seq_len=16))
    infinity.SequenceRanks(gpt, 2)
    with pytest.raises(StateError, match="part of the sequences with their positions; nothing"):
        gpt(tokens, tokens)
    infinity.close(gpt)
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        assert not [each for each in functions if each.startswith("infinity")]  # those of closed models
    return said


def test_what_cannot_be_divided_is_refused_with_what_would() -> None:
    for said in run_ranks(refused, 2):
        wrong_count, not_of_torch, state, convolution, recurrent, own, padding, no_positions = said
        assert "train.sequence_ranks: got 3; wanted a number that divides the 2 ranks: 1, 2" in wrong_count
        assert "OfItsOwn has attention that torch's" in not_of_torch
        assert "MambaForCausalLM cannot separate the documents" in state
        assert "Lfm2ForCausalLM cannot separate the documents" in convolution
        assert "MiniMaxForCausalLM cannot separate the documents" in recurrent
        assert "FalconForCausalLM computes its attention itself" in own
        assert "RobertaForCausalLM cannot separate the documents" in padding
        assert "infinity.SequenceRanks(model, ...).split" in no_positions


def trained(folder: str, name: str, *overrides: str) -> list[float]:
    """Return the losses of a run of the command line, of steps and evaluations."""
    text = Path(folder) / "text.jsonl"
    documents = ("the quick brown fox jumps over the lazy dog"[: 3 + each % 40] for each in range(120))
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents), encoding="utf-8")
    given = [
        f"run.dir={folder}/runs", f"run.name={name}", f"data.files={text}", f"memory.nvme=[{folder}/nvme]",
        "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "train.steps=4",
        "train.accumulate=2", "train.eval_every=2", "train.threads=1", "train.dtype=fp32",
        "data.eval_fraction=0.2", "observe.progress=false", "optim.lr=1e-2",
    ]  # fmt: skip
    train(infinity.load_recipe(overrides=[*given, *overrides]))
    lines = map(json.loads, (Path(folder) / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train.schedule=layer", "memory.activations=recompute", "data.packing=true"])
def test_a_recipe_with_divided_sequences_trains_as_one_rank_does(how: str, tmp_path: Path) -> None:
    whole = trained(str(tmp_path), "whole", how, "train.batch_size=2")
    ranks = (str(tmp_path), "divided", how, "train.batch_size=2", "train.sequence_ranks=2")
    for divided in run_ranks(trained, 2, *ranks):
        assert divided == pytest.approx(whole, rel=1e-5)


def fails_alone(folder: str) -> str:
    """Rank 1 cannot go on, and lives; returns what rank 0, which waits for it, is told meanwhile."""
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=fp32", "memory.host=1GiB"])):
        gpt = GPT(GPTConfig(n_layers=1, d_model=16, n_heads=2, seq_len=16))
    ranks, told = infinity.SequenceRanks(gpt, 2), Path(folder) / "told"
    if dist.get_rank() == 1:
        runtime_of(gpt).fail(RecipeError("this rank's own"))
        comes_true(told.exists, 30)
    else:
        with pytest.raises(PeerError) as raised:
            ranks.exchange(torch.zeros(2, 1))
        told.write_text(str(raised.value))
    infinity.close(gpt)
    return told.read_text() if told.exists() else ""


def test_a_rank_that_waits_for_heads_is_told_that_another_one_failed(tmp_path: Path) -> None:
    for said in run_ranks(fails_alone, 2, str(tmp_path), group=True):
        assert "rank 1 failed with RecipeError: this rank's own" in said
