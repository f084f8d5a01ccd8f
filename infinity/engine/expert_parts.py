"""Runs experts part by part, so that backward needs the weights of each part once.

[Note: part by part]
Backward computes experts again, and then their gradients: all of their weights would be read for the first,
and again for the second. So they run in parts, ranges of experts whose tiles memory holds together. A part's
products run again, then come its gradients, and then another part. What experts compute exists for one part.

Experts that are whole run in parts, too, if they are frozen.

A part gets the rows of its experts in the order of these, each with one expert and a weight of one. Then rows
are multiplied by their weights, put in order and added: what transformers' grouped experts do. So the results
are theirs to the bit, in any parts.

[Note: rows of one part]
Each token has ``top_k`` rows, and a step has those of all micro-batches. So a part takes its rows when it
runs, and puts its results where they are added. Of all rows at once only those results exist, and in backward
gradients of what was taken. Autograd sees tickets in their place, one element without meaning.

[Note: what is saved before]
A recomputation under ``torch.utils.checkpoint`` ends when it has all tensors that autograd saved. What parts
are made of is saved before the first of them runs, and they save nothing beside that. So if what uses their
results in a block saves nothing either, as a residual, the block's recomputation ends without its experts:
these run twice, in forward and in their own backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from infinity.activations.recompute import node, recomputed, saving_hooks
from infinity.partition.builder import is_packed
from infinity.partition.tiles import TiledWeight, tiles_of
from infinity.partition.unit import Unit

#: The share of the room for tiles of one part that a tile takes.
Share = Callable[[Unit], float]
#: Parts of experts that are not in tiles.
_PARTS = 8
#: Reads what parts are made of when the gradients of all have been taken.
_LAST = -1


class Part(NamedTuple):
    """Describes a range of experts: its first and last row but one, and the tiles that it uses."""

    begin: int
    end: int
    tiles: list[Unit]
    experts: list[int]  # that have rows, on some rank; empty: all


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
        self._experts, self._hidden, self._top_k = experts, hidden, index.shape[1]
        self._chosen, self._order = index.reshape(-1).sort(stable=True)
        self._scales = weights.reshape(-1)[self._order]
        self._parts = _parts(experts, self._chosen, share)
        tensors = hidden, self._chosen, self._order, self._scales
        self._kept = _Kept(tensors, len(self._parts))

    def __call__(self) -> Tensor:
        hidden, tiled, tickets = self._hidden, tiles(self._experts), list[Tensor]()
        rows = _Rows(self._kept, self._parts, self._top_k)
        taken = rows.hand(hidden)
        scales = torch.split(self._scales, [part.end - part.begin for part in self._parts])
        for number, part in enumerate(self._parts):
            order = self._order[part.begin : part.end]
            own = rows.take(taken, hidden.detach(), order, number)
            given = [(own, self._chosen[part.begin : part.end], scales[number])]
            del own
            call = partial(_run, self._experts, self._kept, self._parts, number, given, tiled)
            result = recomputed(call)
            tickets.append(rows.put(result, order, number))
            del result
        return rows.added(tickets).to(hidden.dtype)


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
        return _of_whole(experts, chosen)
    common = set.intersection(*({segment.rows.stop for _, segment in each.places} for each in tiled))
    count = max(common)

    def counted() -> list[int]:
        each = torch.arange(count, device=chosen.device)
        return torch.searchsorted(chosen, each, right=True).tolist()

    ends, hit = tiled[0].rows_of(len(chosen), count, counted)
    begins = [0, *ends[:-1]]
    parts: list[Part] = []
    first, taken = 0, 0.0
    for stop in sorted(common):
        used = [
            unit for weight in tiled for unit, segment in weight.places
            if first <= segment.rows.start < stop and any(hit[row] for row in segment.rows)
        ]  # fmt: skip
        begin, end, own = begins[first], ends[stop - 1], [row for row in range(first, stop) if hit[row]]
        taken += sum(map(share, used))
        if used and parts and taken <= 1.0:
            before = parts[-1]
            parts[-1] = Part(before.begin, end, before.tiles + used, before.experts + own)
        elif used:
            parts.append(Part(begin, end, used, own))
            taken = sum(map(share, used))
        first = stop
    return parts or [Part(0, len(chosen), [], [])]


def _of_whole(experts: nn.Module, chosen: Tensor) -> list[Part]:
    """Return the parts of experts that are not in tiles, in which they take less memory.

    All ranks have as many, some of them without rows. Of experts that are trained there is one part, as each
    would give gradients of all.
    """
    rows, count = len(chosen), next(len(param) for each in experts.modules() for param in packed(each))
    if any(param.requires_grad for param in experts.parameters()):
        return [Part(0, rows, [], [])]
    number = min(_PARTS, count)
    firsts = [count * each // number for each in range(1, number)]
    if isinstance(chosen, FakeTensor):
        stops = [rows * first // count for first in firsts]
    else:
        stops = torch.searchsorted(chosen, chosen.new_tensor(firsts)).tolist()
    return [Part(begin, end, [], []) for begin, end in pairwise([0, *stops, rows])]


class _Kept:
    """Holds what parts are made of as autograd holds what it saves: under checkpoint not before backward.

    Readers ask for it, each once in a backward pass: each of ``parts`` for its gradient and then its rows,
    and at last the first tensor's gradient, if that needs one.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int) -> None:
        pack, self._unpack = saving_hooks()
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._packed = [pack(tensor.detach()) for tensor in tensors]
        last = [_LAST] * self._needs_grad[0]
        self._readers = frozenset([*last, *range(2 * parts)])
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
        hidden, chosen, order, scales = self.read(2 * number)
        top_k, here = len(order) // len(hidden), slice(part.begin, part.end)
        with torch.no_grad():
            rows, scale = hidden[order[here] // top_k], scales[here].clone()
        return (
            rows.requires_grad_(self._needs_grad[0]),
            chosen[here],
            scale.requires_grad_(self._needs_grad[3]),
        )


class _Rows:
    """Holds what is added of all rows, and in backward the gradients; see [Note: rows of one part]."""

    def __init__(self, kept: _Kept, parts: Sequence[Part], top_k: int) -> None:
        self._kept, self._parts, self._top_k = kept, parts, top_k
        self._results: Tensor | None = None  # of all rows, in the order before they were sorted
        self._grads: Tensor | None = None  # of tokens' sums of them
        self._taken: Tensor | None = None  # gradients of rows

    def hand(self, hidden: Tensor) -> Tensor:
        """Return a ticket for the rows of all parts; backward adds their gradients."""

        def back(_: Tensor) -> Tensor:
            hidden, _, order, _ = self._kept.read(_LAST)
            taken, self._taken = self._taken, None
            assert taken is not None
            return torch.zeros_like(hidden).index_put_((order // self._top_k,), taken, accumulate=True)

        return node(lambda: hidden.new_empty(()), back, hidden)

    def take(self, ticket: Tensor, hidden: Tensor, order: Tensor, number: int) -> Tensor:
        """Return a part's rows; backward puts their gradients beside those of other parts."""

        def back(grad: Tensor) -> Tensor:
            part = self._parts[number]
            if self._taken is None:
                self._taken = grad.new_empty(self._parts[-1].end, grad.shape[-1])
            self._taken[part.begin : part.end] = grad
            return grad.new_zeros(())

        return node(lambda: hidden[order // self._top_k], back, ticket)

    def put(self, result: Tensor, order: Tensor, number: int) -> Tensor:
        """Put what a part computed in the order before rows were sorted; backward gives it its gradient."""

        def make() -> Tensor:
            if not number or self._results is None:
                self._results = result.new_empty(self._parts[-1].end, result.shape[-1])
            self._results[order] = result
            return result.new_empty(())

        def back(_: Tensor) -> Tensor:
            grads, part, order = self._grads, self._parts[number], self._kept.read(2 * number + 1)[2]
            assert grads is not None
            if not number:  # backward comes to it last
                self._grads = None
            return grads[order[part.begin : part.end] // self._top_k]

        return node(make, back, result)

    def added(self, tickets: Sequence[Tensor]) -> Tensor:
        """Return the sum of each token's rows, for tickets of all parts."""

        def make() -> Tensor:
            results, self._results = self._results, None
            assert results is not None
            return results.view(-1, self._top_k, results.shape[-1]).sum(1)

        def back(grad: Tensor) -> Tensor:
            self._grads = grad
            return grad.new_zeros(())

        return node(make, back, *tickets)
