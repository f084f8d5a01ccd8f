"""Packed expert weights, one parameter larger than any unit and any staging: in pieces from end to end."""

from typing import Any

import pytest
import torch

import infinity
from infinity import BudgetError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers.cases import few
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import SMALL_UNIT, optimizer_for, recipe, small_units, streaming

KIB = 2**10
HOST_NBYTES = 200 * KIB
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 8, "intermediate_size": 256},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {
            "num_experts": 8, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 64,
            "intermediate_size": 64,
        },
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            "n_routed_experts": 8, "moe_intermediate_size": 256, "intermediate_size": 64, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
}  # fmt: skip


def save(name: str, folder: Any) -> Any:
    """The plain model, saved to ``folder``."""
    import transformers

    cls, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**TEXT | sizes))
    model.save_pretrained(folder)
    return model.train()


def load(folder: Any, nvme: Any, *more: str) -> Any:
    """The same under infinity, with little host memory."""
    where = streaming(nvme, f"memory.host={HOST_NBYTES}", *more)
    with small_units():
        return infinity.from_pretrained(folder, recipe("bf16", where)).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def packed(model: Any) -> tuple[str, torch.nn.Parameter]:
    """The largest 3-D weight, and its name."""
    return max(((n, p) for n, p in model.named_parameters() if p.ndim == 3), key=lambda item: item[1].numel())


@pytest.mark.parametrize("name", few(("mixtral", "deepseek"), MODELS))
def test_experts_larger_than_staging_are_loaded_trained_and_exported_in_pieces(tmp_path, name):
    plain = save(name, tmp_path / "base")
    model, rule = load(tmp_path / "base", tmp_path / "nvme"), Rule(max_grad_norm=None)
    runtime, (_, experts) = runtime_of(model), packed(model)
    [unit] = [u for u in runtime.units if any(s.param is experts for s in u.segments)]
    assert unit.home.tier is Tier.NVME
    assert unit.nbytes > HOST_NBYTES > SMALL_UNIT
    assert len(unit.home.at(0).chunks) > 8
    optimizer, loop = optimizer_for(model, rule), Reference(plain, torch.bfloat16, rule)
    for step in range(3):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        assert [loss.item()] == [float(each) for each in loop.step([batch(step)]).losses]
    infinity.export(model, tmp_path / "tuned")
    assert runtime.peak_nbytes()["host"] <= HOST_NBYTES
    infinity.close(model)
    tuned = type(plain).from_pretrained(tmp_path / "tuned", dtype=torch.bfloat16).state_dict()
    for key, weight in loop.parameters.items():
        assert torch.equal(tuned[key], weight.detach()), key


def test_an_expert_weight_that_does_not_fit_the_device_is_named_with_its_size_and_what_to_turn(tmp_path):
    save("mixtral", tmp_path / "base")
    model = load(tmp_path / "base", tmp_path / "nvme", "memory.device=700KiB", "partition.tile=never")
    name, experts = packed(model)
    with pytest.raises(BudgetError) as raised:
        optimizer_for(model, Rule(max_grad_norm=None))
    text = str(raised.value)
    assert f"{name} alone takes {experts.numel() * 2 // KIB} KiB" in text
    assert "Raise memory.device" in text
    infinity.close(model)
