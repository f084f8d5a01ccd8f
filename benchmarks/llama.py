"""Llama-shaped models from their configs, and the batches that the measurements use."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 32_000
SEQUENCE = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an untied Llama; frozen and plain, so that it travels as JSON."""

    name: str
    hidden: int
    layers: int
    inner: int
    vocabulary: int = VOCABULARY
    checkpoint: bool = False  # blocks under torch.utils.checkpoint, not reentrant

    @property
    def block_numel(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def numel(self) -> int:
        return 2 * self.vocabulary * self.hidden + self.layers * self.block_numel + self.hidden

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


TINY = Shape("tiny", 256, 4, 688, vocabulary=8_000)
MEDIUM = Shape("134M", 768, 12, 2048)
LARGE = Shape("367M", 1024, 24, 2720)


def shape_near(numel: float) -> Shape:
    """A checkpointed shape of about ``numel`` parameters, for what no memory here holds."""
    hidden, inner = (2048, 5504) if numel < 2.5e9 else (3072, 8192)
    block = Shape("", hidden, 1, inner).block_numel
    layers = max(1, round((numel - 2 * VOCABULARY * hidden) / block))
    return Shape(f"{numel / 1e9:g}B", hidden, layers, inner, checkpoint=True)


def make(shape: Shape) -> nn.Module:
    """The model, unmodified, in training mode and torch's default dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ).train()
    if shape.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batch(
    shape: Shape, tokens: int, step: int, rank: int = 0, world: int = 1, length: int = SEQUENCE
) -> dict[str, Tensor]:
    """This rank's part of a step's ``tokens`` random tokens, in sequences of ``length``."""
    generator = torch.Generator().manual_seed(step)
    count = max(1, tokens // length)
    ids = torch.randint(shape.vocabulary, (count, length), generator=generator)
    ids = ids[rank * count // world : (rank + 1) * count // world]
    return {"input_ids": ids, "labels": ids.clone()}
