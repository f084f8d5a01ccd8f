"""A small decoder-only transformer: pre-norm, rotary attention, SwiGLU.

Modules initialize their weights in ``__init__``, so that these can be sharded as soon as they exist. Shapes:
``b`` batch, ``s`` sequence, ``h`` heads, ``d`` width of a head.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from infinity.checkpoint.model import ARCHITECTURES, Architecture
from infinity.core.config import Config, SettingError, Valid, setting

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """Sizes of a :class:`GPT`."""

    kind: Literal["gpt"] = setting("gpt", "architecture")
    vocab_size: int = setting(256, "vocabulary size", Valid(2, 2**31 - 1))
    seq_len: int = setting(256, "sequence length", Valid(1, 2**31 - 1))
    n_layers: int = setting(6, "transformer blocks", Valid(1, 2**20))
    d_model: int = setting(384, "width of the residual stream", Valid(2, 2**24))
    n_heads: int = setting(6, "attention heads", Valid(1, 2**20))
    d_ff: int | None = setting(
        None,
        "width of the feed-forward layer; null: 8/3 d_model, rounded up to a multiple of 64",
        Valid(1, 2**24),
    )
    tied: bool = setting(False, "use the embedding as the output layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % (2 * self.n_heads):
            wanted = f"a number for which d_model={self.d_model} gives heads of equal, even width"
            raise SettingError("n_heads", self.n_heads, wanted)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ff_width(self) -> int:
        return self.d_ff or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def numel(self) -> int:
        """Number of parameters."""
        block = 4 * self.d_model**2 + 3 * self.d_model * self.ff_width + 2 * self.d_model
        vocab = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.n_layers * block + vocab + self.d_model


class Output(NamedTuple):
    """Logits, ``(b, s, vocab_size)``, and the mean cross-entropy in fp32 if targets were given."""

    logits: Tensor
    loss: Tensor | None


class Linear(nn.Linear):
    """Linear layer without bias, initialized from a normal distribution."""

    def __init__(self, d_in: int, d_out: int, *, std: float = INIT_STD) -> None:
        self._std = std
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class Embedding(nn.Embedding):
    """Token embedding, ``(vocab_size, d_model)``."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys.

    Source: RoFormer (arXiv:2104.09864), section 3.2, with the two halves of a head as pairs.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, d_head: int) -> None:
        super().__init__()
        frequency = 10_000.0 ** -(torch.arange(0, d_head, 2, dtype=torch.float32) / d_head)
        angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate ``x``, ``(b, h, s, d)``, in fp32, by ``positions``, ``(b, s)``; default: counted from 0."""
        if positions is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.rotary = Rotary(config.seq_len, config.d_model // config.n_heads)
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.out = Linear(config.d_model, config.d_model, std=_residual_std(config))

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b s (three h d) -> three b h s d", three=3, h=self.n_heads)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(rearrange(x, "b h s d -> b s (h d)"))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU feed-forward network (arXiv:2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.ff_width)
        self.down = Linear(config.ff_width, config.d_model, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Decoder-only transformer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = None if config.tied else Linear(config.d_model, config.vocab_size)

    def get_output_embeddings(self) -> Linear | None:
        """Return the output layer, as models of transformers do; None: it is the embedding."""
        return self.head

    def initialize_weights(self) -> None:
        """Do nothing: modules initialize their own weights, or a checkpoint has all of them."""

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Output:
        """Predict each next token; arguments are ``(b, s)`` int64, ``s`` at most ``config.seq_len``.

        Args:
            targets: The next tokens; -100 is ignored.
            positions: The position of each token in its document. A document begins where they restart at 0,
                and tokens attend only to their own document.
        """
        if tokens.shape[1] > self.config.seq_len:
            raise ValueError(
                f"got {tokens.shape[1]} tokens; the model was built for at most {self.config.seq_len}"
            )
        mask = None if positions is None else _document_mask(positions)
        if mask is None:
            positions = None  # one document per sequence: the faster causal attention
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, mask)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        if targets is None:
            return Output(logits, None)
        loss = F.cross_entropy(rearrange(logits.float(), "b s v -> (b s) v"), targets.flatten())
        return Output(logits, loss)


ARCHITECTURES["GPT"] = Architecture(GPTConfig, GPT, longest="seq_len")


def _document_mask(positions: Tensor) -> Tensor | None:
    """Return the attention mask, ``(b, 1, s, s)`` bool; None if every sequence is one document."""
    places = torch.arange(positions.shape[1], device=positions.device)
    if torch.equal(positions, places.expand_as(positions)):
        return None
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & (places.unsqueeze(1) >= places)).unsqueeze(1)


def _residual_std(config: GPTConfig) -> float:
    """Scale the initialization so that the residual stream's variance does not grow with depth (GPT-2)."""
    return INIT_STD / math.sqrt(2 * config.n_layers)
