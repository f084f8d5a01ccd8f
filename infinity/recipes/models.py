"""The built-in GPT, and the next-token loss of it or any causal model of transformers.

The GPT is a small decoder-only transformer: pre-norm, rotary attention, SwiGLU. Its modules initialize their
weights in ``__init__``, so that these can be sharded as soon as they exist. Shapes: ``b`` batch, ``s``
sequence, ``h`` heads, ``d`` width of a head.

The loss is a sum over targets, not a mean: micro-batches and ranks have different numbers of targets, so a
mean of means would weigh tokens differently. The training loop divides by the number in the step.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from infinity.checkpoint.model import ARCHITECTURES, Architecture
from infinity.core.config import Config, SettingError, Valid, setting
from infinity.core.errors import RecipeError
from infinity.engine.sequence import unseparated

INIT_STD = 0.02
#: Attention implementations of transformers whose masks separate packed documents at any batch size.
_PACKING_ATTENTION = ("sdpa", "eager", "flex_attention")


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

    @property
    def ff_width(self) -> int:
        return self.d_ff or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def numel(self) -> int:
        """Number of parameters."""
        block = 4 * self.d_model**2 + 3 * self.d_model * self.ff_width + 2 * self.d_model
        vocab = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.n_layers * block + vocab + self.d_model


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GPTConfig):
    """A new GPT, or the model of a Hugging Face checkpoint directory."""

    path: str | None = setting(
        None, "directory of a Hugging Face checkpoint to fine-tune; null: a new GPT of these sizes", path=True
    )
    new: tuple[str, ...] = setting(
        (), "patterns of parameters that the checkpoint lacks, such as a new head: classifier.*"
    )
    ignore: tuple[str, ...] = setting(
        (), "patterns of checkpoint keys to ignore, which the model does not have"
    )
    num_labels: int | None = setting(
        None, "labels of train.task=classify; null: as the checkpoint's config.json says", Valid(1, 10**6)
    )
    stored_as: Literal["fp8", "int8", "mxfp4", "nvfp4", "nf4"] | None = setting(
        None,
        "form in which the linear layers of a frozen base are kept, encoded once into memory.nvme; null: as "
        "the checkpoint has them",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", "???"):  # OmegaConf's mark of a mandatory value
            raise SettingError("path", self.path, "the directory of a checkpoint (model.path=DIR), or null")
        for each in fields(GPTConfig):
            value = getattr(self, each.name)
            if self.path is not None and each.name != "seq_len" and value != each.default:
                raise SettingError(
                    each.name, value, "no value together with model.path, whose config.json has the sizes"
                )
        if self.path is None and (self.new or self.ignore or self.stored_as):
            needs = "model.new, model.ignore or model.stored_as"
            raise SettingError("path", None, f"the directory of a checkpoint for {needs}")


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
    """Rotary position embedding (RoFormer, arXiv:2104.09864, 3.2) with the two halves of a head as pairs."""

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

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b s (three h d) -> three b h s d", three=3, h=self.n_heads)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if callable(mask):  # of sequences that are divided over ranks
            x = mask(q, k, v)
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(
                1, 2
            )
        return self.out(x.flatten(2))  # type: ignore[no-any-return]


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

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
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
        #: Gives who attends to whom, of positions: a mask, None, or what attends by itself.
        self.document_mask: Callable[[Tensor], Any] = _document_mask

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
            raise ValueError(f"got {tokens.shape[1]} tokens; the model takes at most {self.config.seq_len}")
        mask = None if positions is None else self.document_mask(positions)
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
    planned = isinstance(positions, FakeTensor)  # without values: several documents, which take more
    if not planned and torch.equal(positions, places.expand_as(positions)):
        return None
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & (places.unsqueeze(1) >= places)).unsqueeze(1)


def _residual_std(config: GPTConfig) -> float:
    """Scale the initialization so that the residual stream's variance does not grow with depth (GPT-2)."""
    return INIT_STD / math.sqrt(2 * config.n_layers)


class CausalLoss:
    """Summed cross-entropy of a model's next-token predictions.

    The model is a GPT, or a causal model of transformers, with or without adapters. ``packed`` sequences hold
    several documents, which must not attend to each other; RecipeError: the model cannot separate them.
    """

    def __init__(self, model: nn.Module, *, packed: bool = False) -> None:
        self._model = model
        unwrap: Any = getattr(model, "get_base_model", None)  # peft wraps the model
        base: Any = unwrap() if unwrap else model
        self._is_gpt = isinstance(base, GPT)
        self._base, self._unseen = base, packed and not self._is_gpt
        accepted = inspect.signature(base.forward).parameters
        more = any(each.kind is each.VAR_KEYWORD for each in accepted.values())  # goes to the model within
        self._accepted = frozenset(accepted) | ({"use_cache"} if more else set())
        if not self._is_gpt:
            require_causal(type(base), getattr(base, "config", None))
            if packed:
                _require_separation(base)
        self._aux_share = float(getattr(getattr(base, "config", None), "router_aux_loss_coef", 0.0) or 0.0)

    def __call__(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the cross-entropy in fp32, summed over targets other than -100; arguments are ``(b, s)``.

        In training, the auxiliary loss of a mixture of experts is added with its configured weight (if the
        model's config asks for it), multiplied by the number of targets. ``positions`` are those of tokens in
        their documents; None: every sequence is one document. The mask is 0 for padding.
        """
        logits, balance = self._logits(tokens, positions, mask)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        if balance is not None:
            loss = loss + balance * (targets >= 0).sum()
        return loss

    def log_probs(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | float]:
        """Return each target's log-probability, ``(b, s)``, 0 where it is -100; and the auxiliary loss."""
        logits, balance = self._logits(tokens, positions, mask)
        each = -F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        return each, 0.0 if balance is None else balance

    def _logits(
        self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits in fp32, ``(b * s, vocabulary)``, and in training the weighted auxiliary loss."""
        given: dict[str, Any] = {"tokens": tokens, "positions": positions}
        if not self._is_gpt:
            # Training needs no cache of keys, and transformers separates packed documents only without one.
            names = "input_ids", "position_ids", "attention_mask", "use_cache"
            known = zip(names, (tokens, positions, mask, False))
            given = {name: x for name, x in known if x is not None and name in self._accepted}
        begins = None if positions is None or not self._unseen else (positions[:, 1:] == 0).nonzero()[:1]
        if begins is None or not len(begins):
            output = self._model(**given)
        else:
            with _separating(self._base, *begins[0].tolist()):
                output = self._model(**given)
            self._unseen = False
        balance = getattr(output, "aux_loss", None)
        if balance is not None:
            trains = self._aux_share and self._model.training
            balance = self._aux_share * balance if trains else None
        return output.logits.float().flatten(0, 1), balance


def require_causal(cls: Any, config: Any) -> None:
    """Refuse a model of class ``cls`` (None: unknown) with ``config`` that does not predict next tokens."""
    can_generate = getattr(cls, "can_generate", None)
    causal = config is not None and can_generate is not None and can_generate()
    if causal and not getattr(config, "is_encoder_decoder", False):
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        # BERT-like models have bidirectional attention, unless they are configured as decoders
        is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if not is_encoder or getattr(config, "is_decoder", True):
            return
    raise RecipeError(
        f"model.path: {(cls or type(config)).__name__} does not predict next tokens, as infinity train "
        "requires; train it in your own loop, with infinity.from_pretrained and infinity.AdamW"
    )


@contextmanager
def _separating(model: Any, row: int, last: int) -> Iterator[None]:
    """Refuse a forward, within, in whose masks what follows ``last`` of a row attends to it."""
    from transformers import AttentionMaskInterface

    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name not in _PACKING_ATTENTION:  # attention over ranks, which separates documents itself
        yield
        return

    makes, asked = AttentionMaskInterface()[name], list[bool]()

    def watched(*args: Any, **how: Any) -> Any:
        places = torch.tensor([row, 0, last + 1, last], device=how.get("device"))
        asked.append(bool(how["mask_function"](*places)))
        return makes(*args, **how)

    AttentionMaskInterface.register(name, watched)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, makes)
    if not asked or any(asked):
        raise _inseparable(f"{type(model).__name__} does not separate documents by their positions")


def _require_separation(model: Any) -> None:
    """Refuse a model that does not separate packed documents by positions, as transformers' masks do."""
    kind, attention = type(model).__name__, model.config._attn_implementation
    if why := unseparated(model):
        what = why
    elif attention not in _PACKING_ATTENTION:
        what = f"{kind} with {attention} attention separates documents only at batch size 1"
    else:
        return
    raise _inseparable(what)


def _inseparable(what: str) -> RecipeError:
    return RecipeError(
        f"data.packing: {what}; set data.packing=false (one document per sequence) "
        f"or use a model with {', '.join(_PACKING_ATTENTION)} attention"
    )
