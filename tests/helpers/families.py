"""Tiny models of the families that people fine-tune, made from their configs, and their forms as files.

Sizes are multiples of 32, so that each form has whole blocks for every matrix.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.helpers import quantized
from tests.helpers.quantized import Values

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS = {"head_dim": 16}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

#: Model's and config's class, the sizes that are its own.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _HEADS),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEADS | {"tie_word_embeddings": True}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _HEADS | {"sliding_window": 8}),
    "Phi-4": ("Phi3ForCausalLM", "Phi3Config", {}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _HEADS | _ROUTED | {"num_experts": 4}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _MLA | _ROUTED | _DEEPSEEK),
    "GLM-4-MoE": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        _HEADS | _ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
#: Those with experts, and those whose checkpoints have all experts of a layer in one tensor.
MIXTURES = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GLM-4-MoE", "gpt-oss", "Llama 4")
IN_ONE_TENSOR = ("gpt-oss", "Llama 4")


def make(family: str) -> Any:
    """A new model with small weights."""
    model, config, sizes = FAMILIES[family]
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**_TEXT | sizes))
    for path, module in made.named_modules():
        if "experts" in path or "gate" in path or "router" in path:  # some are not initialized
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                nn.init.normal_(getattr(module, name), std=0.05)
    return made


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _int4(directory: Path) -> Values:
    return quantized.packed(directory, only="")


#: What writes each form, given a directory in bf16; None: nothing is to be done.
FORMS: dict[str, Callable[[Path], Values] | None] = {
    "bf16": None,
    "FP8": quantized.fp8,
    "MXFP4": quantized.mxfp4_rows,
    "NVFP4": quantized.nvfp4,
    "INT4": _int4,
    "GPTQ": quantized.gptq,
    "AWQ": quantized.awq,
    "NF4": quantized.nf4,
}
#: Those that have a place for experts in one tensor, as they are then written.
WITH_EXPERTS: dict[str, Callable[[Path], Values]] = {
    "FP8": quantized.fp8,
    "MXFP4": quantized.mxfp4,
    "NVFP4": quantized.modelopt_experts,
    "NF4": quantized.nf4,
}


def write(family: str, form: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Values:
    """Write a checkpoint; return what its quantized weights stand for, by key."""
    make(family).to(dtype).save_pretrained(directory)
    writer = (WITH_EXPERTS if family in IN_ONE_TENSOR else {}).get(form, FORMS[form])
    return {} if writer is None else writer(directory)


def plain(directory: Path, values: Values, target: Path) -> Path:
    """The checkpoint with the values that its quantized weights stand for; itself if it has none."""
    if not values:
        return directory
    return target if target.exists() else quantized.without_quantization(directory, values, target)
