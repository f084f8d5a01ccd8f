"""Runs experts part by part, so that backward needs the weights of each part once.

[Note: part by part]
Backward computes experts again, and then their gradients: all of their weights would be read for the first,
and again for the second. So they run in parts, ranges of experts whose tiles memory holds together. A part's
products run again, then come its gradients, and then another part. What experts compute exists for one part.

A part gets the rows of its experts in the order of these, each with one expert and a weight of one. Then rows
are multiplied by their weights, put in order and added: what transformers' grouped experts do. So the results
are theirs to the bit, in any parts.

[Note: what is saved before]
A recomputation under ``torch.utils.checkpoint`` ends when it has all tensors that autograd saved. What parts
are made of is saved before the first of them runs, and they save nothing beside that. So if what uses their
results in a block saves nothing either, as a residual, the block's recomputation ends without its experts:
these run twice, in forward and in their own backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from infinity.activations.recompute import recomputed, saving_hooks
from infinity.partition.builder import is_packed
from infinity.partition.tiles import TiledWeight, equal_stops, tiles_of
from infinity.partition.unit import Unit

#: The share of the room for tiles of one part that a tile takes.
Share = Callable[[Unit], float]
#: Reads what all rows have in common, beside the parts.
_SUM = -1


class Part(NamedTuple):
    """Describes a range of experts: its first and last row but one, and the tiles that it uses."""

    begin: int
    end: int
    tiles: list[Unit]
    experts: list[int]  # first and last but one; empty: all


def weighs_rows(experts: nn.Module) -> bool:
    """Return whether ``experts`` multiply each row's result by a weight, as all of transformers' do."""
    return any(
        hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") for module in experts.modules()
    )


def runs_in_parts(experts: nn.Module, given: Sequence[Any]) -> bool:
    """Return whether ``experts`` weigh rows and are ``given`` them, each with its experts and weights."""
    if len(given) != 3 or not all(isinstance(each, Tensor) and each.dim() == 2 for each in given):
        return False
    return weighs_rows(experts) and given[1].shape == given[2].shape and given[2].is_floating_point()


class PartsOfExperts:
    """Runs ``experts(hidden, index, weights)`` part by part; see [Note: part by part].

    Args:
        experts: Packed, with their adapters.
        share: Of each tile.
        hidden: ``(rows, width)``.
        index: ``(rows, top_k)``, the experts of each row.
        weights: Of these, of the same shape.
    """

    def __init__(
        self, experts: nn.Module, share: Share, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> None:
        self._experts, self._top_k, self._dtype = experts, index.shape[1], hidden.dtype
        chosen, self._order = index.reshape(-1).sort(stable=True)
        scales, rows = weights.reshape(-1)[self._order], hidden[self._order // self._top_k]
        self._parts = _parts(experts, chosen, share)
        self._kept = _Kept((hidden, chosen, self._order, scales), [_SUM, *range(len(self._parts))])
        cuts = [slice(part.begin, part.end) for part in self._parts]
        self._given = [[(rows[cut], chosen[cut], scales[cut])] for cut in cuts]

    def __call__(self) -> Tensor:
        tiled, results = tiles(self._experts), []
        for number, given in enumerate(self._given):
            call = partial(_run, self._experts, self._kept, self._parts, number, given, tiled)
            results.append(recomputed(call))
        rows = torch.cat(results)
        added: Tensor = _Added.apply(rows, self._order, self._kept, self._top_k)  # type: ignore[no-untyped-call]
        return added.to(self._dtype)


def packed(module: nn.Module) -> list[nn.Parameter]:
    """Return the packed parameters of ``module`` itself."""
    own = (param for param in module._parameters.values() if param is not None)
    return [param for param in own if is_packed(module, param)]


def tiles(experts: nn.Module) -> list[TiledWeight]:
    """Return the tiles of packed parameters, in the order of their use, with those of adapters."""
    params = (param for module in experts.modules() for param in packed(module))
    return [found for param in params if (found := tiles_of(param)) is not None]


def _run(
    experts: nn.Module, kept: "_Kept", parts: Sequence[Part], number: int,
    given: list[tuple[Tensor, Tensor, Tensor]], tiled: Sequence[TiledWeight],
) -> Tensor:  # fmt: skip
    """Run part ``number`` on what is ``given``; when it runs again, on what was kept."""
    again = not given
    rows, chosen, scales = kept.rows(number, parts[number]) if again else given.pop()
    following = reversed(parts[:number]) if again else parts[number + 1 :]
    own = reversed(parts[number].tiles) if again else ()  # which their gradients need next
    coming = [*own, *(tile for part in following for tile in part.tiles)]
    for weight in tiled:
        weight.coming[:], weight.within[:] = coming, parts[number].experts
    try:
        output = experts(rows, chosen.unsqueeze(-1), rows.new_ones(len(rows), 1))
    finally:
        for weight in tiled:
            weight.coming.clear()
            weight.within.clear()
    return output * scales.unsqueeze(-1)  # type: ignore[no-any-return]


def _parts(experts: nn.Module, chosen: Tensor, share: Share) -> list[Part]:
    """Return the parts that have rows, on some rank; ``chosen`` are the experts of all rows, sorted."""
    tiled = tiles(experts)
    if not tiled:
        return [Part(0, len(chosen), [], [])]
    common = set.intersection(*({segment.rows.stop for _, segment in each.places} for each in tiled))
    count = max(common)
    if tiled[0].without_values:
        ends = equal_stops(len(chosen), count)
    else:
        each = torch.arange(count, device=chosen.device)
        ends = torch.searchsorted(chosen, each, right=True).tolist()
    begins = [0, *ends[:-1]]
    hit = tiled[0].unite([begin < end for begin, end in zip(begins, ends, strict=True)])
    parts: list[Part] = []
    first, taken = 0, 0.0
    for stop in sorted(common):
        used = [
            unit for weight in tiled for unit, segment in weight.places
            if first <= segment.rows.start < stop and any(hit[row] for row in segment.rows)
        ]  # fmt: skip
        begin, end = begins[first], ends[stop - 1]
        taken += sum(map(share, used))
        if used and parts and taken <= 1.0:
            before = parts[-1]
            parts[-1] = Part(before.begin, end, before.tiles + used, [before.experts[0], stop])
        elif used:
            parts.append(Part(begin, end, used, [first, stop]))
            taken = sum(map(share, used))
        first = stop
    return parts or [Part(0, len(chosen), [], [])]


class _Kept:
    """Holds what parts are made of as autograd holds what it saves: under checkpoint not before backward.

    ``readers`` ask for it, each once in a backward pass.
    """

    def __init__(self, tensors: Sequence[Tensor], readers: Sequence[int]) -> None:
        pack, self._unpack = saving_hooks()
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._packed = [pack(tensor.detach()) for tensor in tensors]
        self._readers = frozenset(readers)
        self._left: set[int] = set()  # who has not read
        self._values: list[Tensor] = []  # while some have

    def read(self, reader: int) -> list[Tensor]:
        if reader not in self._left:
            self._left, self._values = {*self._readers}, [self._unpack(each) for each in self._packed]
        values = self._values
        self._left.remove(reader)
        if not self._left:
            self._values = []
        return values

    def rows(self, number: int, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, experts and weights of a part, leaves of a graph of its own."""
        hidden, chosen, order, scales = self.read(number)
        top_k, here = len(order) // len(hidden), slice(part.begin, part.end)
        with torch.no_grad():
            rows, scale = hidden[order[here] // top_k], scales[here].clone()
        return (
            rows.requires_grad_(self._needs_grad[0]),
            chosen[here],
            scale.requires_grad_(self._needs_grad[3]),
        )


class _Added(Function):
    """Puts rows back in the order before they were sorted, and adds those of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, kept: _Kept, top_k: int) -> Tensor:
        ctx.kept, ctx.top_k = kept, top_k
        sorted_back = torch.empty_like(rows)
        sorted_back[order] = rows
        return sorted_back.view(-1, top_k, rows.shape[-1]).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order = ctx.kept.read(_SUM)[2]
        return grad[order // ctx.top_k], None, None, None
