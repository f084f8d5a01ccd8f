"""More tiny models from transformers, of every kind that checkpoints come in; see :mod:`models`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.models import HIDDEN, VOCABULARY, Batch, Factory

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}

#: Class, config's class and its arguments.
_CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _TEXT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _TEXT | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _TEXT | {"head_dim": 8, "sliding_window": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", _TEXT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _TEXT | _EXPERTS | {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _TEXT
        | _EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _TEXT
        | {
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "state_size": 4,
            "use_cache": False,
        },
    ),
}


def build(name: str, seed: int) -> tuple[Factory, Callable[..., Batch]]:
    """As :func:`models.build`, for the names there and here."""
    if name in models.NAMES:
        return models.build(name, seed)
    return models.seeded(partial(make, name), _speech if name == "whisper" else _tokens, seed)


def make(name: str) -> nn.Module:
    """A new model of that name."""
    import transformers

    if name == "whisper":
        return _whisper()
    model, config, arguments = _CAUSAL[name]
    return getattr(transformers, model)(getattr(transformers, config)(**arguments))


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (models.SEQUENCES_PER_STEP, models.SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            num_mel_bins=8,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            use_cache=False,
        )
    )


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    """32 frames of sound, which the encoder halves, and their words."""
    return {
        "input_features": torch.randn(models.SEQUENCES_PER_STEP, 8, 32, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (models.SEQUENCES_PER_STEP, 6), generator=generator),
    }


#: Decoders, encoders, encoder-decoders, images, sound, experts, state space.
NAMES = (*(name for name in models.NAMES if name != "gpt"), *_CAUSAL, "whisper")
