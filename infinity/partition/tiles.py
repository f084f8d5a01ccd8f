"""Computes operators that read a parameter in tiles tile by tile, in unmodified models.

A parameter in tiles (see [Note: tiles]) becomes a :class:`TiledParameter`. An operator of the model's own
forward that reads it comes to ``__torch_function__``, which gathers one tile after the other:

    linear layers, heads    an output for each tile, which are joined: ``F.linear``
    embeddings              the rows of each tile, which are put in order: ``F.embedding``
    experts, grouped        the tokens of each tile's experts: ``F.grouped_mm``
    experts, one by one     the expert of a loop: ``F.linear(x, weight[expert])``, ``x @ weight[expert]``

Any other operator would read the parameter as a whole, and raises.

[Note: the same bits]
Outputs of tiles and gradients of weights are products over the same elements as those of the whole parameter:
bitwise the same where a product of fewer rows gives the same bits, as on CPUs, except perhaps for a last tile
of one row. Experts are multiplied one by one either way. The input gradient of a linear layer is a sum over
tiles and differs within rounding.

[Note: only those that are used]
A tile of experts to which no rank's batch is routed is not read, gathered or computed; ranks agree for each
call which ones are. A grouped product without tokens has a gradient of zeros, so backward is the same on all
ranks. Tiles of the module's next packed parameter, which multiplies the same tokens, begin to arrive while
the last ones of this are computed.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from infinity.core.errors import StateError
from infinity.core.nbytes import format_nbytes
from infinity.partition.unit import Segment, Unit, UnitIndex

#: Gathers a unit while a context is open, and begins to bring those that follow; what autograd saves of it
#: meanwhile is a handle, not its memory.
Using = Callable[[Unit, Sequence[Unit]], AbstractContextManager[None]]
#: Experts that some rank's batch is routed to, of those that this rank's is; every rank must call.
Unite = Callable[[Sequence[bool]], Sequence[bool]]

#: What a tensor tells without its values.
METADATA = frozenset(
    [
        "shape", "size", "dim", "ndim", "numel", "nelement", "stride", "dtype", "device", "layout",
        "element_size", "itemsize", "is_floating_point", "is_complex", "is_sparse", "is_sparse_csr",
        "is_quantized", "is_nested", "is_meta", "is_cpu", "is_cuda", "is_mkldnn", "is_mps", "is_xla",
        "is_leaf", "is_contiguous", "_has_compatible_shallow_copy_type", "is_inference", "is_conj",
        "is_neg", "requires_grad", "grad_fn", "get_device", "storage_offset", "names", "has_names",
        "_is_view", "__repr__", "__hash__", "__len__",
    ]
)  # fmt: skip
#: What may be asked of a tiled parameter: nothing that reads its values, but of its placeholder.
_PLAIN = METADATA.union([
    "__get__", "__set__", "__format__", "ndimension", "untyped_storage", "data_ptr", "is_pinned", "is_shared",
    "requires_grad_", "detach", "detach_", "type", "_has_symbolic_sizes_strides", "empty_like", "zeros_like",
    "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "is_tensor",
])  # fmt: skip
#: What moves a parameter, or casts it.
_MOVES = frozenset(["to", "cpu", "cuda", "type", "type_as", "half", "bfloat16", "float", "double"])
_TRANSPOSED = ("T", "mT", "H", "mH")


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """Holds the tiles of a parameter, and how to use them."""

    places: Sequence[tuple[Unit, Segment]]  # of each tile, in order
    using: Using
    unite: Unite
    after: Sequence[tuple[Unit, Segment]] = ()  # tiles of packed experts that the same module uses next
    several_ranks: bool = False  # have the same units
    #: Where tensors have no values: the experts to which some of so many rows are routed, of so many experts.
    routed: Callable[[int, int], Sequence[int]] | None = None
    coming: list[Unit] = field(default_factory=list)  # tiles that are used after those of this product
    within: list[int] = field(default_factory=list)  # experts that have rows; empty: all

    @property
    def name(self) -> str:
        return self.places[0][1].whole_name

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = []
        for unit, segment in self.places:
            part = None if bias is None else bias[segment.rows.start : segment.rows.stop]
            with self.using(unit, ()):
                outputs.append(functional.linear(inputs, segment.param, part))
        return torch.cat(outputs, -1)

    def embedding(
        self, tokens: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq or sparse:
            self.refuse("an embedding with max_norm, scale_grad_by_freq or sparse")
        flat = tokens.reshape(-1)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.places[0][1].whole_shape[0]
        rows, order = [], []
        for number, (unit, segment) in enumerate(self.places):
            first, stop = segment.rows.start, segment.rows.stop
            if self.routed is not None:
                parts = [len(flat) * each // len(self.places) for each in (number, number + 1)]
                here = torch.arange(*parts, device=flat.device)
            else:
                here = ((flat >= first) & (flat < stop)).nonzero().squeeze(1)
            padding = None
            if padding_idx is not None and first <= padding_idx < stop:
                padding = padding_idx - first
            with self.using(unit, ()):
                rows.append(functional.embedding(flat[here] - first, segment.param, padding))
            order.append(here)
        places = torch.cat(order)
        if len(places) != len(flat):
            raise IndexError(f"index out of range: {self.name} has {stop} rows")
        back = torch.empty_like(places)
        back[places] = torch.arange(len(places), device=places.device)
        return torch.cat(rows).index_select(0, back).view(*tokens.shape, -1)

    def grouped(
        self, product: Callable[..., Tensor], inputs: Tensor, offs: Tensor, transposed: bool, **options: Any
    ) -> Tensor:
        """Compute ``F.grouped_mm`` of ``inputs``, ``(tokens, in)``; each expert's tokens end at ``offs``."""
        stops, hit = self.rows_of(len(inputs), len(offs), offs.tolist)
        ends = [stops[segment.rows.stop - 1] for _, segment in self.places]
        begins = [0, *ends[:-1]]
        used, coming = _hit(self.places, hit), [self.after[i][0] for i in _hit(self.after, hit)]
        numels = [ends[i] - begins[i] for i in used]
        *parts, rest = torch.split(inputs, [*numels, len(inputs) - sum(numels)])
        outputs = []
        for at, (i, part) in enumerate(zip(used, parts, strict=True)):
            unit, segment = self.places[i]
            own = offs[segment.rows.start : segment.rows.stop] - begins[i]
            later = [self.places[j][0] for j in used[at + 1 :]]
            with self.using(unit, [*later, *coming, *self.coming]):
                weight = segment.param.transpose(-2, -1) if transposed else segment.param
                outputs.append(product(part, weight, offs=own, **options))
        if len(rest):
            outputs.append(outputs[0].new_zeros(len(rest), *outputs[0].shape[1:]))
        return torch.cat(outputs)

    def rows_of(
        self, rows: int, experts: int, ends: Callable[[], list[int]]
    ) -> tuple[list[int], Sequence[bool]]:
        """Return where each expert's rows end, as ``ends`` does, and which experts have some on some rank.

        Without values ``rows`` are divided equally.
        """
        if self.routed is None:
            stops = ends()
            return stops, self.unite([begin < end for begin, end in zip([0, *stops], stops, strict=False)])
        routed = self.within or self.routed(rows, experts)
        before = [bisect_right(routed, each) for each in range(experts)]
        return [rows * each // len(routed) for each in before], [each in routed for each in range(experts)]

    def with_expert(self, row: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if self.several_ranks:
            self.refuse("experts one by one, with several ranks,")
        row += self.places[0][1].whole_shape[0] * (row < 0)
        for unit, segment in self.places:
            if row in segment.rows:
                with self.using(unit, self.coming):
                    return compute(segment.param[row - segment.rows.start])
        raise IndexError(f"expert {row} of {self.name}, which has {self.places[0][1].whole_shape[0]}")

    def refuse(self, what: str) -> NoReturn:
        """Raise: ``what`` would read the parameter as a whole."""
        unit, segment = self.places[0]
        nbytes = segment.whole_shape.numel() * unit.dtype.itemsize
        raise StateError(
            f"{what} on {self.name}, which is too large to be gathered whole and is computed in "
            f"{len(self.places)} tiles: linear layers, embeddings, and experts of transformers (their "
            "grouped_mm implementation, or eager with one rank) can be. To gather it whole set "
            f"partition.tile=never, or to a size above the {format_nbytes(nbytes)} that it takes; to read "
            "its values use infinity.gathered or infinity.state_dict"
        )


def tiles_of(param: object) -> TiledWeight | None:
    """Return the tiles of a parameter, or of what stands for it; None: it has none."""
    if isinstance(param, TileView):
        return param.weight
    return param.tiled if isinstance(param, TiledParameter) else None


def used_after(units: UnitIndex, places: Sequence[tuple[Unit, Segment]]) -> Sequence[tuple[Unit, Segment]]:
    """Return the tiles of the packed experts that follow those of ``places`` in the same module."""
    (unit, last), module = places[-1], places[-1][1].whole_name.rpartition(".")[0]
    if not unit.routed or unit.index + 1 >= len(units):
        return ()
    following = units[unit.index + 1]
    first = following.segments[0]
    same = following.routed and first.whole_name.rpartition(".")[0] == module
    return units.places(first.whole) if same and first.whole_shape[0] == last.whole_shape[0] else ()


def _hit(places: Sequence[tuple[Unit, Segment]], hit: Sequence[bool]) -> Sequence[int]:
    """Return the tiles with experts that are ``hit``; the first one if there are none."""
    used = [i for i, (_, segment) in enumerate(places) if any(hit[row] for row in segment.rows)]
    return used or range(min(1, len(places)))


@dataclass(frozen=True, slots=True, eq=False)
class TileView:
    """Stands for a view of packed experts that is not made: operators read tiles through it."""

    weight: TiledWeight
    row: int | None = None  # the expert; None: all
    transposed: bool = False  # the last two dimensions are

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.weight.places[0][1].whole_shape)[0 if self.row is None else 1 :]
        if self.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.places[0][0].dtype

    @property
    def device(self) -> torch.device:
        return self.weight.places[0][1].whole.device

    @property
    def requires_grad(self) -> bool:
        return self.weight.places[0][1].whole.requires_grad

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def data_ptr(self) -> int:
        """Return an address as aligned as that of every tile."""
        return 0

    def transpose(self, dim0: int, dim1: int) -> "TileView":
        if {dim0 % self.ndim, dim1 % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            self.weight.refuse("transposing experts")
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, index: Any) -> "TileView":
        scalar = isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point()
        is_row = scalar or isinstance(index, int)
        if not is_row or self.row is not None or self.transposed or self.ndim != 3:
            self.weight.refuse("indexing")
        return replace(self, row=int(index))

    def is_floating_point(self) -> bool:
        return True

    def t(self) -> "TileView":
        return self.transpose(-2, -1)

    T = mT = property(t)  # noqa: N815  (torch's names)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        view = next((each for each in (*args, *kwargs.values()) if isinstance(each, cls)), None)
        assert view is not None, "torch found it"
        if len(args) > 1 and args[1] is view and isinstance(args[0], Tensor):
            inputs, rest = args[0], args[2:]
            if view.row is None and "grouped_mm" in name:
                options = dict(kwargs)
                offs = options.pop("offs", None)
                if offs is not None and not rest:
                    return view.weight.grouped(func, inputs, offs, view.transposed, **options)
            elif view.row is None and name in ("linear", "embedding") and not view.transposed:
                return getattr(view.weight, name)(inputs, *rest, **kwargs)
            elif view.row is None and name in ("matmul", "mm") and view.transposed and view.ndim == 2:
                return view.weight.linear(inputs)
            elif view.row is not None and name in ("linear", "matmul", "mm"):

                def compute(values: Tensor) -> Any:
                    return func(inputs, values.mT if view.transposed else values, *rest, **kwargs)

                return view.weight.with_expert(view.row, compute)
        return view.weight.refuse(name)


class TiledParameter(nn.Parameter):
    """A parameter of the model whose values are in tiles; see the module's docstring."""

    tiled: TiledWeight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name == "__get__":  # a property, such as requires_grad, which is asked of every tile in every step
            if func.__self__.__name__ in _TRANSPOSED:
                return TileView(args[0].tiled, transposed=True)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        own = next((each for each in (*args, *kwargs.values()) if isinstance(each, cls)), None)
        moves = name in _MOVES and len(args) + len(kwargs) > (name == "type")
        if moves and args[0] is own:
            moved = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **kwargs)
            loses_values = moved.is_meta and not own.is_meta  # the model of a plan has none
            if moved.dtype != own.dtype or loses_values:
                raise StateError(
                    f"{name} on {own.tiled.name}, which is {own.dtype} in its units: choose the dtype with "
                    "train.dtype in the recipe before building the model; .half(), .float() and .to(dtype) "
                    'cannot change it, and .to("meta") cannot drop its values'
                )
            return own  # not moved: a copy would be whole
        inputs = (func is torch.autograd.backward and kwargs.get("inputs")) or ()
        if any(isinstance(each, cls) for each in inputs):  # autograd knows the tiles
            tiles = ([s.param for _, s in p.tiled.places] if isinstance(p, cls) else [p] for p in inputs)
            return func(*args, **{**kwargs, "inputs": list(chain.from_iterable(tiles))})
        if own is None:  # in a list: torch.cat, torch.autograd.grad
            lists = (each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple))
            own = next((each for values in lists for each in values if isinstance(each, cls)), None)
        if own is None or moves or name in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        whole = TileView(own.tiled)
        if args and args[0] is own and name in ("transpose", "t", "__getitem__"):
            return getattr(whole, name)(*args[1:], **kwargs)
        if len(args) > 1 and args[1] is own:
            return TileView.__torch_function__(func, types, (args[0], whole, *args[2:]), kwargs)
        return own.tiled.refuse(name)

    def __deepcopy__(self, memo: Any) -> Any:
        self.tiled.refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.tiled.refuse("pickling")


def compute_in_tiles(param: nn.Parameter, weight: TiledWeight | None = None) -> None:
    """Let operators on ``param`` read its tiles; None: those from before :func:`compute_whole`."""
    if weight is not None:
        param.tiled = weight  # type: ignore[attr-defined]
    param.__class__ = TiledParameter
    if param._backward_hooks or param._post_accumulate_grad_hooks:  # which no gradient would reach
        param.tiled.refuse("register_hook")  # type: ignore[attr-defined]


def compute_whole(param: nn.Parameter) -> None:
    """Let ``param`` be an ordinary parameter, for as long as its data is whole."""
    param.__class__ = nn.Parameter
