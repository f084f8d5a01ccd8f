"""Tiny models from transformers, built from their configs: unmodified, deterministic, fast.

factory, batch = build("llama", seed=0)
model = factory()                 # plain, or under infinity.Init
loss = model(**batch(step=0, rank=0, world=1)).loss
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Factory = Callable[[], nn.Module]
Batch = dict[str, Tensor]

VOCABULARY = 97
HIDDEN = 32
SEQUENCE = 12
SEQUENCES_PER_STEP = 4


def build(name: str, seed: int, *, dropout: float = 0.0) -> tuple[Factory, Callable[..., Batch]]:
    """The maker of one model, and its batches.

    Args:
        name: One of ``NAMES``.
        seed: Of the model's weights and of the batches.
        dropout: Probability of every dropout of the model (Llama has none).

    Returns:
        ``factory()`` seeds torch and makes the module in training mode.
        ``batch(step, rank=0, world=1)`` gives this rank's part of the step's batch: the
        keyword arguments of ``forward``, labels among them. The parts of all ranks are the
        one rank's batch, in rank order, and every part has the same number of labels.
    """
    make, whole = _MODELS[name]
    return seeded(lambda: make(dropout), whole, seed)


def seeded(
    make: Factory, whole: Callable[[torch.Generator], Batch], seed: int
) -> tuple[Factory, Callable[..., Batch]]:
    """What :func:`build` returns, of a model that ``make`` makes and one rank's batches."""

    def factory() -> nn.Module:
        torch.manual_seed(seed)
        return make().train()

    def batch(step: int, rank: int = 0, world: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        count = SEQUENCES_PER_STEP // world
        return {key: v[rank * count : (rank + 1) * count].clone() for key, v in whole(generator).items()}

    return factory, batch


def _tokens(generator: torch.Generator) -> Tensor:
    """Runs of consecutive numbers from a random start: easy to learn, never quite the same."""
    start = torch.randint(VOCABULARY - 1, (SEQUENCES_PER_STEP, 1), generator=generator)
    return 1 + (start + torch.arange(SEQUENCE)) % (VOCABULARY - 1)


def _causal(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _translation(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.flip(1)[:, : SEQUENCE // 2].contiguous()}


def _masked(generator: torch.Generator) -> Batch:
    tokens = 1 + _tokens(generator) % 8
    labels = torch.full_like(tokens, -100)
    labels[:, ::3] = tokens[:, ::3]
    return {
        "input_ids": tokens.masked_fill(labels != -100, 0),
        "attention_mask": torch.ones_like(tokens),
        "labels": labels,
    }


def _images(generator: torch.Generator) -> Batch:
    labels = torch.randint(4, (SEQUENCES_PER_STEP,), generator=generator)
    pixels = 0.3 * torch.randn(SEQUENCES_PER_STEP, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels + (labels.float() - 1.5)[:, None, None, None], "labels": labels}


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=HIDDEN,
            n_layer=3,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=4,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _gpt(dropout: float) -> nn.Module:
    from infinity.recipes.models import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=VOCABULARY, seq_len=SEQUENCE, n_layers=3, d_model=HIDDEN, n_heads=4))


def _next(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


_MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[torch.Generator], dict[str, Any]]]] = {
    "llama": (_llama, _causal),
    "gpt2": (_gpt2, _causal),
    "t5": (_t5, _translation),
    "bert": (_bert, _masked),
    "vit": (_vit, _images),
    "gpt": (_gpt, _next),
}

#: Llama (untied), GPT-2 (tied), T5 (encoder-decoder, tied), BERT (masked), ViT (images), and ours.
NAMES = tuple(_MODELS)
