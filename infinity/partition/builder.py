"""Cuts a model into units while it is being constructed.

[Note: where a unit ends]
A unit should be large enough for full-speed I/O and should not mix two blocks, because a unit
that mixes them is needed twice as long. The builder learns what a block is from repetition: a
module of a class that has been built before, and that has children with parameters, begins a
new block, and the open unit closes before it. Inside a block a unit closes when it holds enough
bytes; small newcomers (norms, biases) may still join a full unit, so that they do not become
units of their own.

[Note: a unit that memory can hold]
Of several units at one time there are a gradient, its reduction and two in flight. On many ranks units of
full-speed shards would take all of a device's memory for these (8 GiB each on 512 ranks). So units become no
larger than half of the memory has room for, if their parameters are not, and the other half is for
activations. Shards are smaller then: two at one time still keep a drive busy.

[Note: a leaf]
Experts are used by some ranks and not by others, but gathers must come in the same order everywhere.
So the module that holds them is a *leaf*: with several ranks all its units are gathered when it is
used, and reduced when its backward has passed. Its units are cut at its own bounds. Which classes are
leaves is known before the first is built, from ``partition.leaf`` or from the name; whether one that
only has the name really keeps its experts in a list is seen when it is complete.

[Note: what is tiled]
Parameters of experts that are packed (``[experts, out, in]``, as transformers has them), of linear layers and
of embeddings, if they are larger than :class:`CutSizes` allows. Each tile is a unit. A tile of experts is
read if a batch is routed to one of them. So on one rank without an accelerator, where a tile costs the host
less time than reading it, a tile is one expert, or as many as a drive reads at its speed.
"""

import difflib
import re
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import RecipeError, StateError
from infinity.core.nbytes import parse_nbytes
from infinity.partition.unit import Segment, Unit, UnitIndex, layout, layout_tiles


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(Config):
    """Collectives between ranks."""

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
    timeout_s: float = option(
        300.0, "a rank that is silent for this long ends the run (s)", Valid(0.1, 10**7)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile not in ("auto", "never"):
            try:
                valid = self.tile_nbytes > 0
            except ValueError:
                valid = False
            if not valid:
                raise SettingError("tile", self.tile, "auto, never, or a size such as 64MiB")

    @property
    def tile_nbytes(self) -> int:
        """The size of ``tile``, where it is one."""
        return parse_nbytes(self.tile)


#: A unit is full when a rank's shard of it holds this much: several requests of the size at
#: which drives reach their full speed (bytes).
TARGET_SHARD_NBYTES = 16 * 2**20
#: The least, where memory has no room for that. Two such shards at one time are read as fast as larger ones
#: (0.99), two of half the size more slowly (0.90); and volumes divide no smaller ones among drives.
LEAST_SHARD_NBYTES = 2 * 2**20
#: Beside an accelerator, what all ranks hold of a full unit is at least so much: each unit costs the host
#: about a millisecond, in which a fast link moves as many bytes.
TARGET_ACCELERATOR_NBYTES = 64 * 2**20

Close = Callable[[Unit], None]

#: Names of classes that may hold experts; see [Note: a leaf].
_EXPERTS = re.compile(r"moe(?![a-z])|MoE|Moe|Expert|Mixture")


#: Tiles are whole numbers of these rows, if one has as many: blocks of quantized weights end there.
_BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class CutSizes:
    """The largest units and tiles (bytes in the compute dtype); see [Note: a unit that memory can hold].

    Attributes:
        full_nbytes: A unit that holds as much is full.
        most_nbytes: A large parameter that would make a unit larger than that begins another one.
        tile_nbytes: A tile takes at most as much, or is one row.
        expert_tile_nbytes: The largest tile of packed experts, unless it is one expert.
        most_weight_nbytes: A linear layer or an embedding whose weight takes more is tiled; None: none is.
        most_experts_nbytes: The largest packed experts that are not cut into tiles.
    """

    full_nbytes: int
    most_nbytes: int
    tile_nbytes: int = 0
    expert_tile_nbytes: int = 0
    most_weight_nbytes: int | None = None
    most_experts_nbytes: int | None = None

    @classmethod
    def of(
        cls, tile: str, device_nbytes: int | None, world_size: int, *, on_accelerator: bool = False
    ) -> "CutSizes":
        """Return the sizes that follow from ``partition.tile`` and the memory of a device.

        A linear layer is tiled only where it could not be gathered at all (its gradient and update, and two
        units in flight), because the gradient of its input is rounded otherwise. Experts in tiles give the
        same bits. What a full unit would hold is not tiled.

        Args:
            device_nbytes: Bytes of ``memory.device``, or of the device; None: unknown.
        """
        full = TARGET_SHARD_NBYTES * world_size
        if on_accelerator:
            full = max(full, TARGET_ACCELERATOR_NBYTES)
        copies = 2 + (2 if world_size == 1 else 4)  # as infinity.core.budget counts them
        most = sys.maxsize
        if device_nbytes is not None:
            most = max(device_nbytes // (2 * copies), LEAST_SHARD_NBYTES * world_size)
            full = min(full, most)
        if tile == "never" or (tile == "auto" and device_nbytes is None):
            return cls(full, most)
        if tile != "auto":
            nbytes = parse_nbytes(tile)
            return cls(full, most, nbytes, nbytes, nbytes, nbytes)
        assert device_nbytes is not None
        tile_nbytes = max(full, device_nbytes // 32)
        return cls(
            full, most, tile_nbytes=tile_nbytes,
            expert_tile_nbytes=tile_nbytes if on_accelerator or world_size > 1 else LEAST_SHARD_NBYTES,
            most_weight_nbytes=max(full, device_nbytes // copies),
            most_experts_nbytes=max(full, device_nbytes // (2 * copies)),
        )  # fmt: skip

    def rows(self, module: nn.Module, param: nn.Parameter, itemsize: int) -> int:
        """Rows of a tile of a parameter of ``module``; 0: it is not tiled."""
        experts = is_packed(module, param)
        linear = isinstance(module, nn.Linear) or (
            isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not (module.sparse or module.scale_grad_by_freq)
        )
        nbytes = param.numel() * itemsize
        most = self.most_experts_nbytes if experts else self.most_weight_nbytes
        if most is None or nbytes <= most or not (experts or (linear and param.ndim == 2)):
            return 0
        tile_nbytes = self.expert_tile_nbytes if experts else self.tile_nbytes
        rows = max(1, tile_nbytes * len(param) // nbytes)
        if not experts and rows > _BLOCK_ROWS:
            rows = rows // _BLOCK_ROWS * _BLOCK_ROWS
        return rows if rows < len(param) else 0


def is_packed(module: nn.Module, param: nn.Parameter) -> bool:
    """Return whether ``param`` has the weights of all experts of ``module``, as transformers packs them."""
    known = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    return known and param.ndim == 3 and len(param) == getattr(module, "num_experts", None)


class _Joined(NamedTuple):
    """A parameter of the open unit.

    Attributes:
        made_for: The module that made it; None: it has another module now.
        rows: Rows of a tile; 0: it is not tiled.
        routed: It has packed experts.
    """

    name: str
    param: nn.Parameter
    made_for: weakref.ref[nn.Module] | None
    rows: int
    routed: bool


class _OpenUnit(dict[int, _Joined]):
    """The parameters of the unit that is not closed yet, by id.

    Attributes:
        nbytes: Bytes that its parameters take in it; tiles are units of their own.
    """

    nbytes = 0

    def join(self, joined: _Joined, itemsize: int) -> None:
        self[id(joined.param)] = joined
        self.nbytes += 0 if joined.rows else joined.param.numel() * itemsize


class _LeafClasses:
    """Classes whose modules are leaves: see [Note: a leaf].

    Attributes:
        names: The class names in ``partition.leaf``.
        built: Names of all classes that were built.
        current: The outermost leaf that is built, perhaps, and its first unit; None: none is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.built = tuple(names), set[str]()
        self.current: tuple[nn.Module, int] | None = None

    def may_be(self, name: str) -> bool:
        """Return whether a module of this class may be a leaf, before it is complete."""
        return name in self.names or _EXPERTS.search(name) is not None

    def check(self) -> None:
        """Every class that was named a leaf was built.

        Raises:
            RecipeError: One was not; names the nearest.
        """
        for name in self.names:
            if name not in self.built:
                near = difflib.get_close_matches(name, self.built, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"built were {', '.join(sorted(self.built))}"
                raise RecipeError(f"partition.leaf: no module of class {name!r} was built; {hint}")


class UnitBuilder:
    """Collects parameters in order of construction and closes units.

    Args:
        dtype: The compute dtype.
        rank: This rank.
        world_size: Ranks that share each unit.
        close: Called with each unit when it closes, its parameters still whole.
        leaf: Names of classes whose modules are leaves.
        sizes: The largest units and tiles; None: those of a device without bound.
        without_values: Parameters are on the meta device: only their places are wanted.

    Attributes:
        units: The units that closed.
        leaves: The units of each leaf.
    """

    def __init__(
        self, dtype: torch.dtype, rank: int, world_size: int, close: Close, leaf: Sequence[str] = (),
        *, sizes: CutSizes | None = None, without_values: bool = False,
    ) -> None:  # fmt: skip
        self.dtype, self.rank, self.world_size = dtype, rank, world_size
        self._close, self.sizes = close, sizes or CutSizes.of("never", None, world_size)
        self.units = UnitIndex()
        self._open = _OpenUnit()
        self._blocks: set[type[nn.Module]] = set()
        self._stack: list[nn.Module] = []
        self.leaves: weakref.WeakKeyDictionary[nn.Module, tuple[Unit, ...]] = weakref.WeakKeyDictionary()
        self._leaf_classes, self._without_values = _LeafClasses(leaf), without_values

    def begin(self, module: nn.Module) -> None:
        """``module.__init__`` begins: perhaps a new block."""
        if type(module) in self._blocks:
            outermost = not any(type(parent) in self._blocks for parent in self._stack)
            if outermost or self._open.nbytes >= self.sizes.full_nbytes / 2:
                self.close()
        name, leaf = type(module).__name__, self._leaf_classes
        leaf.built.add(name)
        if leaf.current is None and leaf.may_be(name):
            self.close()
            leaf.current = module, len(self.units)
        self._stack.append(module)

    def end(self, module: nn.Module) -> None:
        """``module.__init__`` returned: its own parameters join the open unit."""
        leaf = self._leaf_classes
        while self._stack and (left := self._stack.pop()) is not module:
            if leaf.current is not None and leaf.current[0] is left:
                leaf.current = None  # an __init__ that raised and was caught by its caller
        self.join(module)
        if leaf.current is not None and leaf.current[0] is module:
            self._end_leaf(module, leaf.current[1])
        container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not container and any(True for child in module.children() for _ in child.parameters()):
            self._blocks.add(type(module))

    def _end_leaf(self, module: nn.Module, first: int) -> None:
        self._leaf_classes.current = None
        self.close()
        if type(module).__name__ in self._leaf_classes.names or _has_experts(module):
            self.leaves[module] = tuple(unit for unit in self.units[first:] if not unit.routed)

    def check_leaf(self) -> None:
        """Raise :class:`RecipeError` unless every class that was named a leaf was built."""
        self._leaf_classes.check()

    def join(self, module: nn.Module) -> None:
        """Add the parameters that ``module`` itself owns and that no unit has."""
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
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
            if self._ends_before(nbytes):
                self.close()
            full_name, routed = f"{type(module).__name__}.{name}", is_packed(module, param)
            joined = _Joined(full_name, param, weakref.ref(module), rows, routed)
            self._open.join(joined, self.dtype.itemsize)

    def _ends_before(self, nbytes: int) -> bool:
        """Return whether a parameter of so many bytes belongs to another unit than the open one."""
        held, small = self._open.nbytes, self.sizes.full_nbytes / 8
        too_much = held > small and held + nbytes > self.sizes.most_nbytes
        return nbytes > small and (held >= self.sizes.full_nbytes or too_much)

    def has(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` joined a unit, open or closed."""
        return id(param) in self._open or bool(self.units.places(param))

    def rejoin(self, unit: Unit, segment: Segment) -> None:
        """Take a parameter, which has another shape now, out of its closed unit into the open one."""
        param, places = segment.whole, [*self.units.places(segment.whole)]
        rows = len(places[0][1].rows) if segment.is_tile else 0  # as large as they were
        for each in places:
            self.units.drop(*each)
        joined = _Joined(segment.whole_name, param, None, rows, unit.routed)
        self._open.join(joined, self.dtype.itemsize)

    def close(self, used: Container[int] | None = None) -> None:
        """Close the open unit, without the parameters of modules that were dropped.

        Args:
            used: Ids of the parameters that a model has, at the end; those whose module was dropped may have
                found another one.
        """
        kept = [
            each
            for each in self._open.values()
            if (
                each.made_for is None or each.made_for() is not None
                if used is None
                else id(each.param) in used
            )
        ]
        self._open = _OpenUnit()
        if params := [(each.name, each.param) for each in kept if not each.rows]:
            self._add(layout(params, self.dtype.itemsize))
        for each in kept:
            tiles = layout_tiles(each.name, each.param, each.rows, self.dtype) if each.rows else []
            for tile in tiles:
                self._add([tile], routed=each.routed)

    def _add(self, segments: list[Segment], *, routed: bool = False) -> None:
        unit = Unit(len(self.units), segments, self.dtype, self.rank, self.world_size)
        unit.routed = routed
        unit.rename({})
        self.units.add(unit)
        self._close(unit)

    def adopt(self, roots: list[nn.Module]) -> None:
        """Take in modules at the end that saw no ``__init__`` of their own; drop those that were replaced."""
        for module in chain.from_iterable(root.modules() for root in roots):
            self.join(module)
        used = {id(p) for root in roots for p in root.parameters()}
        self.close(used)


def _has_experts(module: nn.Module) -> bool:
    """Return whether the module keeps alternatives in a list: two or more of one class, with parameters.

    A list of what has packed experts is one of layers, not of alternatives.
    """
    lists = (list(each) for each in module.modules() if isinstance(each, nn.ModuleList))
    return any(
        len(items) > 1
        and len({type(item) for item in items}) == 1
        and any(True for item in items for _ in item.parameters())
        and not any(_packs_experts(each) for item in items for each in item.modules())
        for items in lists
    )


def _packs_experts(module: nn.Module) -> bool:
    return any(param is not None and is_packed(module, param) for param in module._parameters.values())
