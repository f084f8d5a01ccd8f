"""Cuts a model into units while it is being constructed.

[Note: where a unit ends]
A unit should be large enough for full-speed I/O and should not mix two blocks, because then it is needed
twice as long. A new block, before which the open unit closes, begins with a module that has children with
parameters and whose class has been built before. Inside a block a unit closes when it holds enough bytes;
small newcomers (norms, biases) may still join a full unit.

[Note: a unit that memory can hold]
A gradient, its reduction and two units in flight are in memory at one time. On many ranks units of full-speed
shards would take all of a device's memory (8 GiB each on 512 ranks). So units are no larger than half of the
memory has room for, unless one parameter is.

[Note: a leaf]
Experts are used by some ranks and not by others, but gathers must come in the same order everywhere. So the
module that holds them is a *leaf*: with several ranks all its units, cut at its own bounds, are gathered when
it is used and reduced when its backward has passed. Classes that may be leaves are known by name before the
first is built; that a module really keeps experts in a list is seen when it is complete.

[Note: what is tiled]
Packed experts (``[experts, out, in]``), linear layers and embeddings, if larger than :class:`CutSizes`
allows. On one rank without an accelerator, a tile has as few experts as a drive still reads at full speed.
"""

import difflib
import functools
import math
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import RecipeError, StateError
from infinity.core.nbytes import parse_nbytes
from infinity.optim.state import BLOCK_NUMEL
from infinity.partition.unit import Segment, Unit, UnitIndex, layout, layout_tiles


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(Config):
    """Configures collectives between ranks."""

    reduce_dtype: Literal["fp32", "compute"] = setting(
        "fp32", "dtype in which gradients are summed over ranks; compute: half the bytes, more rounding"
    )
    leaf: tuple[str, ...] = option(
        (), "classes gathered as one: ranks may use different parts of them; lists of experts are found"
    )
    tile: str = setting(
        "auto",
        "gather weights of experts, linear layers and embeddings in tiles; auto: where memory.device cannot "
        "hold them whole; never; or a size such as 64MiB: all that are larger, in tiles of that size",
    )
    gather: Literal["auto", "world"] = option(
        "auto",
        "how weights are gathered again before their next update: auto, within a node, as far as memory.host "
        "has room for what other nodes sent; world, from all nodes",
    )
    ranks_per_node: int | None = setting(
        None,
        "as many consecutive ranks are a node, which adds its own gradients first; null: those on one host",
        Valid(1, 10**5),
    )
    timeout_s: float = option(
        300.0, "a rank that is silent for this long ends the run (s)", Valid(0.1, 10**7)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        with suppress(ValueError):
            if self.tile in ("auto", "never") or parse_nbytes(self.tile) > 0:
                return
        raise SettingError("tile", self.tile, "auto, never, or a size such as 64MiB")


#: Bytes of a rank's shard of a full unit: several requests of the size at which drives reach full speed.
TARGET_SHARD_NBYTES = 16 * 2**20
#: The least, where memory has no room for that: two of half the size at one time are read more slowly (0.90),
#: and volumes divide no smaller ones among drives.
LEAST_SHARD_NBYTES = 2 * 2**20
#: Beside an accelerator, the least of a full unit on all ranks: each unit costs the host about a millisecond,
#: in which a fast link moves as many bytes.
TARGET_ACCELERATOR_NBYTES = 64 * 2**20
#: Names of classes that may hold experts; see [Note: a leaf].
_EXPERTS = re.compile(r"moe(?![a-z])|MoE|Moe|Expert|Mixture")
#: Tiles are whole numbers of these rows, if one has as many: blocks of quantized weights end there.
_BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class CutSizes:
    """Bounds units and tiles (bytes in the compute dtype); see [Note: a unit that memory can hold]."""

    full_nbytes: int  # a unit that holds as much is full
    most_nbytes: int  # a large parameter that would make a unit larger than that begins another one
    tile_nbytes: int = 0  # a tile takes at most as much, or is one row
    expert_tile_nbytes: int = 0  # the largest tile of packed experts, unless it is one expert
    most_weight_nbytes: int | None = None  # the largest linear layer or embedding that is not; None: any
    most_experts_nbytes: int | None = None  # the largest packed experts that are not tiled

    @classmethod
    def of(
        cls, tile: str, device_nbytes: int | None, world_size: int, *, on_accelerator: bool = False
    ) -> "CutSizes":
        """Return the sizes that follow from ``partition.tile`` and the memory of a device.

        A linear layer, whose input gradient is rounded otherwise in tiles, is tiled only if it could not be
        gathered at all. Experts in tiles give the same bits. What a full unit would hold is not tiled.
        """
        full = TARGET_SHARD_NBYTES * world_size
        if on_accelerator:
            full = max(full, TARGET_ACCELERATOR_NBYTES)
        copies = 2 + (2 if world_size == 1 else 4)  # as infinity.core.budget counts them
        most = sys.maxsize
        if device_nbytes is not None:
            most = max(device_nbytes // (2 * copies), LEAST_SHARD_NBYTES * world_size)
            full = min(full, most)
        if tile not in ("auto", "never"):
            nbytes = parse_nbytes(tile)
            return cls(full, most, nbytes, nbytes, nbytes, nbytes)
        if tile == "never" or device_nbytes is None:
            return cls(full, most)
        tile_nbytes = max(full, device_nbytes // 32)
        return cls(
            full, most, tile_nbytes=tile_nbytes,
            expert_tile_nbytes=tile_nbytes if on_accelerator or world_size > 1 else LEAST_SHARD_NBYTES,
            most_weight_nbytes=max(full, device_nbytes // copies),
            most_experts_nbytes=max(full, device_nbytes // (2 * copies)),
        )  # fmt: skip

    def rows(self, module: nn.Module, param: nn.Parameter, itemsize: int) -> int:
        """Return the rows of a tile of a parameter of ``module``; 0: it is not tiled."""
        nbytes = param.numel() * itemsize
        if is_packed(module, param):
            most, tile_nbytes, block = self.most_experts_nbytes, self.expert_tile_nbytes, 1
            own = (each for each in dict.values(module._parameters) if each is not None)
            largest = max((each for each in own if is_packed(module, each)), key=torch.Tensor.numel)
            if largest is not param:  # its tiles end where others do, so that a part of experts is as small
                block = max(1, self.rows(module, largest, itemsize))
        else:
            most, tile_nbytes, block = self.most_weight_nbytes, self.tile_nbytes, _BLOCK_ROWS
            looked_up = isinstance(module, nn.Embedding) and not (
                module.max_norm is not None or module.sparse or module.scale_grad_by_freq
            )
            if param.ndim != 2 or not (looked_up or isinstance(module, nn.Linear)):
                return 0
        if most is None or nbytes <= most:
            return 0
        rows = max(1, tile_nbytes * len(param) // nbytes)
        rows -= rows % block if rows > block else 0
        whole = BLOCK_NUMEL // math.gcd(BLOCK_NUMEL, param.shape[1:].numel())  # rows of whole blocks
        rows = max(whole, rows - rows % whole)
        return rows if rows < len(param) else 0


def is_packed(module: nn.Module, param: nn.Parameter) -> bool:
    """Return whether ``param`` has the weights, or the adapters, of all experts of ``module``."""
    known = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")  # by transformers
    known = known or hasattr(module, "packs_experts")
    return known and param.ndim == 3 and len(param) == getattr(module, "num_experts", None)


def routers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that choose experts: those beside packed ones, with an output for each."""
    for name, module in model.named_modules():
        counts = {len(param) for param in module.parameters(recurse=False) if is_packed(module, param)}
        block = name.rpartition(".")[0]
        for inner, each in model.get_submodule(block).named_modules(prefix=block) if counts else ():
            if isinstance(each, nn.Linear) and each.out_features in counts:
                yield inner, each


class _Joined(NamedTuple):
    name: str
    param: nn.Parameter
    made_for: weakref.ref[nn.Module] | None  # the module that made it; None: it has another module now
    rows: int  # of a tile; 0: it is not tiled
    routed: bool  # it has packed experts


class _OpenUnit(dict[int, _Joined]):
    """Holds the parameters of the unit that is not closed yet, by id."""

    numel = 0  # of those that are not tiled

    def join(self, joined: _Joined) -> None:
        self[id(joined.param)] = joined
        self.numel += 0 if joined.rows else joined.param.numel()


class UnitBuilder:
    """Collects parameters in order of construction and closes units.

    ``close`` is called with each unit when it closes, its parameters still whole. ``leaf`` names classes
    whose modules are leaves. ``without_values``: parameters are on the meta device, only their places are
    wanted.
    """

    def __init__(
        self, dtype: torch.dtype, rank: int, world_size: int, close: Callable[[Unit], None],
        leaf: Sequence[str] = (), *, sizes: CutSizes | None = None, without_values: bool = False,
    ) -> None:  # fmt: skip
        self.dtype, self._without_values = dtype, without_values
        self._make_unit = functools.partial(Unit, dtype=dtype, rank=rank, world_size=world_size)
        self._close, self.sizes = close, sizes or CutSizes.of("never", None, world_size)
        self.units = UnitIndex()  # those that closed
        self._open = _OpenUnit()
        self._built: dict[type[nn.Module], bool] = {}  # every class, and whether its modules are blocks
        self.building: list[nn.Module] = []  # whose ``__init__`` goes on, the outermost first
        self.leaves: weakref.WeakKeyDictionary[nn.Module, tuple[Unit, ...]] = weakref.WeakKeyDictionary()
        self._leaf_names = tuple(leaf)
        #: The outermost leaf that is built, perhaps, and its first unit.
        self._leaf: tuple[nn.Module, int] | None = None

    def begin(self, module: nn.Module) -> None:
        """Take note that ``module.__init__`` begins: perhaps a new block."""
        if self._built.setdefault(type(module), False):
            outermost = not any(self._built[type(parent)] for parent in self.building)
            if outermost or self._open.numel * self.dtype.itemsize >= self.sizes.full_nbytes / 2:
                self.close()
        name = type(module).__name__
        if self._leaf is None and (name in self._leaf_names or _EXPERTS.search(name)):
            self.close()
            self._leaf = module, len(self.units)
        self.building.append(module)

    def abandon(self) -> None:
        left = self.building.pop()
        if self._leaf is not None and self._leaf[0] is left:
            self._leaf = None

    def end(self) -> None:
        """Add the own parameters of the innermost module, whose ``__init__`` returned, to the open unit."""
        module = self.building[-1]
        self.join(module)
        if self._leaf is not None and self._leaf[0] is module:
            first = self._leaf[1]
            self._leaf = None
            self.close()
            if type(module).__name__ in self._leaf_names or _has_experts(module):
                self.leaves[module] = tuple(unit for unit in self.units[first:] if not unit.routed)
        container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not container and any(True for child in module.children() for _ in child.parameters()):
            self._built[type(module)] = True
        self.building.pop()

    def join(self, module: nn.Module) -> None:
        """Add the parameters that ``module`` itself owns and that no unit has."""
        own = [(n, p) for n, p in dict.items(module._parameters) if p is not None]
        fresh = [(n, p) for n, p in own if not self.has(p) and p.is_floating_point()]
        for name, param in fresh:
            if param.device.type == "meta" and not self._without_values:
                raise StateError(
                    f"{type(module).__name__}.{name} is built on the meta device, without values, as "
                    "from_pretrained of transformers does: inside infinity.Init build the model from its "
                    "config; load a checkpoint with infinity.from_pretrained(directory, recipe), outside"
                )
            rows = self.sizes.rows(module, param, self.dtype.itemsize)
            nbytes = 0 if rows else param.numel() * self.dtype.itemsize
            held, small = self._open.numel * self.dtype.itemsize, self.sizes.full_nbytes / 8
            too_much = held > small and held + nbytes > self.sizes.most_nbytes
            if nbytes > small and (held >= self.sizes.full_nbytes or too_much):
                self.close()
            full_name, routed = f"{type(module).__name__}.{name}", is_packed(module, param)
            self._open.join(_Joined(full_name, param, weakref.ref(module), rows, routed))

    def has(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` joined a unit, open or closed."""
        return id(param) in self._open or bool(self.units.places(param))

    def is_tiled(self, param: nn.Parameter) -> bool:
        joined = self._open.get(id(param))
        return any(s.is_tile for _, s in self.units.places(param)) or bool(joined and joined.rows)

    def rejoin(self, unit: Unit, segment: Segment) -> None:
        """Move a parameter that has another shape now from its closed unit into the open one."""
        param, places = segment.whole, [*self.units.places(segment.whole)]
        rows = len(places[0][1].rows) if segment.is_tile else 0  # as large as they were
        for each in places:
            self.units.drop(*each)
        self._open.join(_Joined(segment.whole_name, param, None, rows, unit.routed))

    def close(self, used: Container[int] | None = None) -> None:
        """Close the open unit, without the parameters of modules that were dropped.

        At the end ``used`` has the ids of all models' parameters, as a dropped module's may be among them.
        """
        joined, self._open = self._open.values(), _OpenUnit()
        if used is None:
            kept = [each for each in joined if each.made_for is None or each.made_for() is not None]
        else:
            kept = [each for each in joined if id(each.param) in used]
        if params := [(each.name, each.param) for each in kept if not each.rows]:
            self._add(layout(params))
        for each in kept:
            if each.rows:
                for tile in layout_tiles(each.name, each.param, each.rows, self.dtype):
                    self._add([tile], routed=each.routed)

    def _add(self, segments: list[Segment], *, routed: bool = False) -> None:
        unit = self._make_unit(len(self.units), segments)
        unit.routed = routed
        unit.rename({})
        self.units.add(unit)
        self._close(unit)

    def adopt(self, roots: list[nn.Module]) -> None:
        """Add, at the end, modules whose ``__init__`` was not seen; drop those that were replaced."""
        for module in chain.from_iterable(root.modules() for root in roots):
            self.join(module)
        self.close({id(p) for root in roots for p in root.parameters()})
        built = {cls.__name__ for cls in self._built}
        for name in self._leaf_names:
            if name not in built:
                near = difflib.get_close_matches(name, built, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"built were {', '.join(sorted(built))}"
                raise RecipeError(f"partition.leaf: no module of class {name!r} was built; {hint}")


def _has_experts(module: nn.Module) -> bool:
    """Return whether the module has a list of two or more modules of one class, with parameters: experts.

    A list of what has packed experts is one of layers.
    """
    for items in (each for each in module.modules() if isinstance(each, nn.ModuleList)):
        if len(items) < 2 or len(set(map(type, items))) > 1:
            continue
        inner = [(m, p) for item in items for m in item.modules() for p in m._parameters.values()]
        params = [(m, p) for m, p in inner if p is not None]
        if params and not any(is_packed(m, p) for m, p in params):
            return True
    return False
