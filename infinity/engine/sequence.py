"""Sequences divided over ranks: attention by heads, all else by tokens (Ulysses, arXiv:2309.14509).

The ranks of a group have the same sequences, of which each computes an equal, contiguous part. Only attention
looks at other tokens: before it, an all-to-all gives each rank the whole sequence for its share of the heads;
after it, another returns all heads of the rank's own tokens. Backward does the same the other way around. So
no rank holds activations of more than ``seq_len / ranks`` tokens but in attention, of ``1 / ranks`` of heads.
"""

import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import register_pytree_node

from infinity.activations.recompute import node, recomputed
from infinity.comm.ranks import rank, world_size
from infinity.core.config import SettingError
from infinity.core.errors import RecipeError, StateError
from infinity.engine.runtime import runtime_of

#: First and last (exclusive) token of each document, of each row.
Documents = tuple[tuple[tuple[int, int], ...], ...]
_NAME = "infinity_sequence_"
#: Scores of attention that are in memory at one time where no fused kernel computes them.
_SCORES = 2**24
_numbers = itertools.count()


class SequenceRanks:
    """Divides sequences over groups of ``count`` neighbouring ranks; all ranks must construct it.

    Attributes:
        count: Ranks of a group.
        at: This rank's place in its group: which part of each sequence it computes.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        if count < 1 or world_size() % count:
            fit = [each for each in range(1, world_size() + 1) if world_size() % each == 0]
            wanted = f"a number that divides the {world_size()} ranks: {', '.join(map(str, fit))}"
            raise SettingError("train.sequence_ranks", count, wanted)
        self.count, self.at = count, rank() % count
        if count == 1:
            return
        self._runtime = runtime_of(model)
        if mesh := self._runtime.ranks.mesh:
            raise SettingError("train.sequence_ranks", count, f"1 with a mesh of ranks ({mesh})")
        collectives = self._runtime.ranks.collectives
        assert collectives is not None  # there are several ranks
        self._collectives = collectives
        every = [collectives.apart([*range(first, first + count)]) for first in range(0, world_size(), count)]
        self._group = every[rank() // count]
        base: Any = getattr(model, "get_base_model", lambda: model)()
        if hasattr(base, "document_mask"):  # a model of infinity's own
            base.document_mask = self.reach
            base.register_forward_pre_hook(self._refuse_unplaced, with_kwargs=True)
        else:
            self._serve(base)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's columns of ``whole``, ``(rows, seq_len)``."""
        if whole.shape[1] % self.count:
            raise SettingError(
                "model.seq_len", whole.shape[1], f"a multiple of train.sequence_ranks={self.count}"
            )
        return whole.chunk(self.count, dim=1)[self.at].contiguous()

    def split(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what this rank gives to a causal model of transformers, of whole rows of its group.

        Each row is one document, padded, if at all, at its end; labels of padding are -100. The mean of the
        losses over all ranks is the mean over all targets of this group, and so are gradients.
        """
        targets = pad(labels[:, 1:], (0, 1), value=-100)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mine = self.part(targets)
        return {
            "input_ids": self.part(input_ids), "position_ids": self.part(positions),
            "labels": mine, "shift_labels": mine,
            "num_items_in_batch": (targets != -100).sum() / self.count,
        }  # fmt: skip

    def reach(self, positions: Tensor, allowed: Callable[..., Any] | None = None) -> "Reach":
        """Return who attends to whom; ``positions`` are those of this rank's tokens in their documents."""
        return Reach(self, _documents(self._gathered(positions)), allowed, _rows(len(positions)))

    def _gathered(self, positions: Tensor) -> Tensor:
        """Return the positions of all tokens, ``(rows, seq_len)``."""
        mine = positions.contiguous()
        every = [torch.empty_like(mine) for _ in range(self.count)]
        self._call("positions of documents", partial(dist.all_gather, every, mine))
        return torch.cat(every, 1)

    def exchange(self, given: Tensor) -> Tensor:
        """Return what the group's ranks give to this one, ``(count, ...)``; ``given`` is for each of them."""
        given = given.contiguous()
        arrived = torch.empty_like(given)
        self._call("heads of attention", partial(dist.all_to_all_single, arrived, given))
        return arrived

    def _call(self, what: str, collective: Callable[..., Any]) -> None:
        """Issue a collective and wait; PeerError: another rank failed, died or stalls, also if it lives."""
        work = collective(group=self._group, async_op=True)
        self._collectives.end_apart(work, self._group, f"{what} between ranks of a sequence")

    def _unplaced(self, positions: str) -> StateError:
        return StateError(
            f"with train.sequence_ranks={self.count} a forward takes a rank's part of the sequences with "
            f"their {positions}; nothing is generated"
        )

    def _refuse_unplaced(self, _: nn.Module, args: Any, given: dict[str, Any]) -> None:
        if len(args) < 3 and given.get("positions") is None:
            raise self._unplaced("positions")

    def _serve(self, model: Any) -> None:
        """Make a model of transformers attend over the group."""
        if str(model.config._attn_implementation).startswith(_NAME):
            raise StateError("infinity.SequenceRanks divides this model's sequences already")
        if why := unseparated(model):
            raise RecipeError(f"train.sequence_ranks={self.count}: {why}; wanted 1")
        computed_here = "sinks", "attn_logit_softcapping"
        found = (getattr(each, name, None) for each in model.modules() for name in computed_here)
        if not (model._supports_sdpa or any(each is not None for each in found)):
            raise RecipeError(
                f"train.sequence_ranks={self.count}: {type(model).__name__} has attention that torch's "
                "scaled_dot_product_attention does not compute; wanted 1"
            )
        from transformers import AttentionInterface, AttentionMaskInterface

        name, documents, longest = f"{_NAME}{next(_numbers)}", list[Documents](), list[Tensor]()

        def begin(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            positions = given.get("position_ids")
            if positions is None or positions.ndim != 2:
                raise self._unplaced("position_ids, as infinity.SequenceRanks(model, ...).split returns them")
            if given.get("attention_mask") is not None:
                raise StateError(
                    f"with train.sequence_ranks={self.count} a forward takes no attention_mask: position_ids "
                    "separate documents, and padding is at the end of a row"
                )
            whole = self._gathered(positions)
            documents[:], longest[:] = [_documents(whole)], [whole.max()]
            # Documents are separated by positions; a mask keeps the library from doing so within the part.
            return args, given | {"attention_mask": torch.ones_like(positions)}

        own: Any = weakref.ref(self)  # what the library has does not keep the model alive
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(
            name,
            lambda *_, **how: Reach(own(), documents[0], how["mask_function"], _rows(len(documents[0]))),
        )
        for interface in (AttentionInterface, AttentionMaskInterface):
            self._runtime.stack.callback(interface._global_mapping.pop, name)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise RecipeError(
                f"train.sequence_ranks={self.count}: {type(model).__name__} computes its attention itself, "
                "not by transformers' AttentionInterface; wanted 1"
            )
        _lengthen(model, longest)
        model.register_forward_pre_hook(begin, with_kwargs=True)


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Which tokens attend to which, in the whole sequences of a micro-batch: stands for its mask.

    Attributes:
        documents: Those of the whole sequences, of all rows.
        allowed: Whether a token attends to another within its document, as transformers' masks say it of
            row, head and both positions; None: to all before it.
        rows: Which rows of ``documents`` are here. A tensor, and this a node of trees: the layer schedule,
            which cuts tensors, gives each micro-batch its rows.
    """

    ranks: SequenceRanks
    documents: Documents
    allowed: Callable[..., Any] | None
    rows: Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"train.sequence_ranks={self.ranks.count}: the model looks at {name} of its attention's mask, "
            "which no rank has as a tensor; wanted 1"
        )

    def __getitem__(self, _: Any) -> Any:
        return self.__getattr__("values")

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, **how: Any
    ) -> Tensor:
        """Return attention of this rank's tokens, ``(b, s, heads, d)``; inputs are ``(b, heads, s, d)``.

        ``sinks``, ``(heads,)``: one more score of each token, which takes a share and gives nothing.
        """
        heads, few, count = query.shape[1], key.shape[1], self.ranks.count
        even = heads % count == 0 and (few % count == 0 or count % few == 0)
        # Each rank has a copy of the head that its queries look at.
        key, value = (_repeated(each, max(count, few) if even else heads) for each in (key, value))
        query, key, value = (
            pad(each, (0, 0, 0, 0, 0, -each.shape[1] % count)) for each in (query, key, value)
        )
        if sinks is not None:
            sinks = pad(sinks, (0, -heads % count)).chunk(count)[self.ranks.at].to(query.dtype)
        query, key, value = (_by_heads(each, self.ranks) for each in (query, key, value))
        return _by_tokens(self._attended(query, key, value, how | {"sinks": sinks}), self.ranks)[:, :, :heads]

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, how: Mapping[str, Any]) -> Tensor:
        """Return attention of some heads over whole sequences, ``(b, heads, seq_len, d)``."""
        of_rows = [self.documents[row] for row in self.rows.flatten().tolist()]
        rows = [(slice(None), of_rows[0])]
        if len(set(of_rows)) > 1:  # not all rows are alike
            rows = [(slice(row, row + 1), each) for row, each in enumerate(of_rows)]
        parts = [
            torch.cat([self._within(query[row], key[row], value[row], a, b, how) for a, b in documents], 2)
            for row, documents in rows
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _within(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, last: int, how: Mapping[str, Any]
    ) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import causal_mask_function

        mask = None
        if self.allowed is not None and self.allowed is not causal_mask_function:
            places = torch.arange(last - first, device=query.device)
            zero = places.new_zeros(())
            try:
                mask = self.allowed(zero, zero, places[:, None], places[None, :])[None, None]
            except IndexError as error:
                raise RecipeError(
                    f"train.sequence_ranks={self.ranks.count}: the model's mask depends on what tokens are, "
                    "of which a rank has only its part; wanted 1"
                ) from error
        of = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        query, key, value = (each[:, :, first:last] for each in (query, key, value))
        width, scaling = value.shape[3], how.get("scaling") or query.shape[3] ** -0.5
        dropout = how.get("dropout", 0.0)
        if how.get("softcap") is not None:
            return _capped(query, key, value, mask, scaling, how["softcap"], dropout)
        if how["sinks"] is not None:
            query, key, value, mask = _with_sinks(query, key, value, how["sinks"] / scaling, mask)
        how = {"dropout": dropout, "scaling": scaling}
        found: Tensor = sdpa_attention_forward(of, query, key, value, mask, **how)[0]
        return found.transpose(1, 2)[:, :, first - last :, :width]


register_pytree_node(
    Reach, lambda reach: ([reach.rows], reach), lambda rows, reach: replace(reach, rows=next(iter(rows)))
)


def _rows(count: int) -> Tensor:
    return torch.arange(count, device="cpu")[:, None, None, None]  # of as many dimensions as a mask


def _documents(whole: Tensor) -> "Documents":
    """Return the documents of rows of positions: each begins where positions do not go on."""
    whole = whole.cpu()
    begins = torch.ones_like(whole, dtype=torch.bool)
    begins[:, 1:] = whole[:, 1:] != whole[:, :-1] + 1
    rows = [[*row.nonzero().flatten().tolist(), whole.shape[1]] for row in begins]
    return tuple(tuple(itertools.pairwise(row)) for row in rows)


#: Arguments of attention that change which tokens attend to which, and how much.
_UNDIVIDED = "sinks", "position_bias", "indices", "block_indices"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, s_aux: Tensor | None = None, softcap: float | None = None, **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as functions that are registered with transformers do."""
    unknown = [name for name in _UNDIVIDED if given.get(name) is not None]
    if unknown or not isinstance(attention_mask, Reach):
        raise RecipeError(
            f"train.sequence_ranks: {type(module).__name__} attends with {', '.join(unknown) or 'no mask'}, "
            "which is not divided over ranks; wanted 1"
        )
    how = {"dropout": dropout, "scaling": scaling, "softcap": softcap}
    return attention_mask(query, key, value, s_aux, **how), None


def _repeated(given: Tensor, heads: int) -> Tensor:
    return given.repeat_interleave(heads // given.shape[1], dim=1) if heads > given.shape[1] else given


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return inputs with which plain attention computes attention with sinks: one more token and feature.

    The token is the first. Its key is one in that feature only, in which queries have the ``scores`` of their
    head; its value is zero. Values get as many features as keys have, which fused kernels want.
    """
    width = query.shape[3]
    query = torch.cat([query, scores[None, :, None, None].expand(*query.shape[:3], 1)], 3)
    widest = max(width + 1, value.shape[3])
    query = pad(query, (0, widest - width - 1, 1, 0))
    key, value = (pad(each, (0, widest - each.shape[3], 1, 0)) for each in (key, value))
    key[:, :, 0, width] = 1
    return query, key, value, None if mask is None else pad(mask, (1, 0, 1, 0), value=True)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, cap: float, dropout: float
) -> Tensor:  # fmt: skip
    """Return attention whose scores are ``cap * tanh(score / cap)``, which no fused kernel of torch computes.

    It is computed for some queries at a time, and again in backward, so scores of all are never in memory.
    """

    def some(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = cap * torch.tanh(query @ key.transpose(2, 3) * scaling / cap)
        shares = scores.masked_fill(~mask, -torch.inf).softmax(3, dtype=torch.float32)
        return torch.dropout(shares.to(query.dtype), dropout, train=dropout > 0) @ value

    key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    count = query.shape[2]
    places, parts = torch.arange(count, device=query.device), list[Tensor]()
    for few in torch.split(places, max(1, _SCORES // (count * query.shape[:2].numel()))):
        first, last = int(few[0]), int(few[-1]) + 1
        seen = last if mask is None else count
        near = few[:, None] >= places[:seen] if mask is None else mask[:, :, first:last]
        parts.append(recomputed(some, query[:, :, first:last], key[:, :, :seen], value[:, :, :seen], near))
    return torch.cat(parts, 2)


def _exchanged(given: Tensor, ranks: SequenceRanks) -> Tensor:
    """Exchange values of each rank for each rank, ``(ranks, ...)``; gradients take the same way back."""
    return node(lambda: ranks.exchange(given), ranks.exchange, given)


def _by_heads(given: Tensor, ranks: SequenceRanks) -> Tensor:
    """From all heads of some tokens, ``(b, heads, s, d)``, to some heads of all tokens."""
    apart = rearrange(given, "b (r h) s d -> r b h s d", r=ranks.count)
    return rearrange(_exchanged(apart, ranks), "r b h s d -> b h (r s) d")


def _by_tokens(given: Tensor, ranks: SequenceRanks) -> Tensor:
    """From some heads of all tokens, ``(b, heads, s, d)``, to all of some, ``(b, s, heads, d)``."""
    apart = rearrange(given, "b h (r s) d -> r b s h d", r=ranks.count)
    return rearrange(_exchanged(apart, ranks), "r b s h d -> b s (r h) d")


def _lengthen(model: nn.Module, longest: list[Tensor]) -> None:
    """Let rotary frequencies that depend on the longest position depend on that of whole sequences."""

    def lengthen(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = given | dict(zip(("x", "position_ids", "layer_type"), args))
        mine = named["position_ids"]
        also = longest[0].expand(*mine.shape[:-1], 1)
        return (), named | {"position_ids": torch.cat([mine, also], -1)}

    def shorten(_: nn.Module, args: Any, found: Any) -> Any:
        return tuple(each[..., :-1, :] for each in found)

    for each in model.modules():
        if re.search("dynamic|longrope", str(getattr(each, "rope_type", ""))):
            each.register_forward_pre_hook(lengthen, with_kwargs=True)
            each.register_forward_hook(shorten)


def unseparated(model: Any) -> str | None:
    """Return why a model of transformers does not separate packed documents by positions; None: it does."""
    stateful = any(getattr(each, "_is_stateful", False) for each in model.modules())
    modules = {sys.modules[cls.__module__] for each in model.modules() for cls in type(each).__mro__}
    makes_masks = any(hasattr(module, "create_causal_mask") for module in modules)
    text = model.config.get_text_config(decoder=True)
    layers = [each for each in getattr(text, "layer_types", None) or () if isinstance(each, str)]
    mixes = any(not each.endswith("attention") or each.startswith("linear") for each in layers)
    own = any(  # positions that are counted from the padding token
        isinstance(each, nn.Embedding) and each.padding_idx is not None and "position" in name
        for name, each in model.named_modules()
    )
    takes = "position_ids" in inspect.signature(model.forward).parameters
    if stateful or mixes or own or not takes or not makes_masks:
        return f"{type(model).__name__} cannot separate the documents of a packed sequence"
    return None
