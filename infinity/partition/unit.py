"""Defines units, parameters that are stored, moved and updated as one flat buffer, and homes of shards.

[Note: the flat buffer]
Parameters lie end to end, each start aligned to a block of quantized moments (256 elements), matrices first
and vectors (biases, norms) last, so that one set of hyperparameters covers a long run. Rank r owns slice r,
its shard: a whole number of 2,048 elements, so that the weights begin on a block of 4,096 bytes. The
all-gather output *is* the flat buffer, and the parameters are views of it.

[Note: the released parameter]
A released parameter keeps its shape, dtype and device; its data is one NaN expanded to the shape (stride 0).
A mistaken read gives NaN, and a mistaken write raises, because the elements share one place in memory.

[Note: stored form]
The weights of a frozen unit may travel as they are stored (quantized, say). Rank r's shard is then slice r of
the stored bytes; what is gathered from all ranks is decoded into the flat buffer.

[Note: tiles]
A parameter too large to be gathered whole is divided by rows over several units, its tiles. Autograd sees a
parameter for each tile, alone in its unit. The model's own parameter is always a placeholder.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from infinity.core.errors import StateError
from infinity.core.lifecycle import Lifecycle, Tier, UnitState
from infinity.core.nbytes import Transfer, aligned, chained, rounded
from infinity.device.memory import Lease
from infinity.optim.state import BLOCK_NUMEL
from infinity.partition.divided import Parts
from infinity.planner.updates import ShardUpdate


class UpdateFuture(Transfer):
    """Tracks an update in flight; ends when its last write has landed."""

    __slots__ = ("computed", "update")

    def __init__(self, update: ShardUpdate) -> None:
        super().__init__()
        self.update = update
        self.computed = Transfer()  # ends when the new weights exist; it reads what it was given no more

    def wait_computed(self) -> None:
        """Return when the new weights exist, though they may not be on disk yet; raise the update's error."""
        self.computed.wait()
        if self.done():
            self.wait()

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self.computed.finish()


#: The first element of a chunk in its shard, its weights, and the fields of its state.
Chunk = tuple[int, Tensor, tuple[Tensor, ...]]


class Home:
    """Says where a unit's shard lives; subclasses store it, chunk by chunk."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.version = 0  # the number of the committed one among its places on NVMe
        self.updating: UpdateFuture | None = None  # the last update, in flight or landed
        self.reloadable = False  # its values are those of a checkpoint, from which they can be had again
        self.averaged = False  # averages are in the place of its weights, for a while
        self.bare = False  # its weights are exact: nothing lies beside them, or will in host memory
        self.stored_form: Lease | None = None  # in host memory; kept while a copy of it may be on its way

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def resting_state(self) -> UnitState:
        """The state of a unit whose values are only in this home."""
        return UnitState.ON_HOST if self.tier is Tier.HOST else UnitState.ON_NVME

    @property
    def lease(self) -> Lease | None:
        """The lease of the memory that holds the shard as it travels; None: nothing holds it."""
        return None

    @property
    def is_on_device(self) -> bool:
        """Whether the newest weights are in accelerator memory, or it was given the work that makes them."""
        return False

    def updated_in_place(self) -> Callable[[], object]:
        """Return a call that waits until an update in flight has computed the new weights in place."""
        return (lambda: None) if self.updating is None else self.updating.wait_computed

    def read(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading the newest committed shard, after the update in flight that makes it.

        ``memory`` takes weights, or the unit's stored form if any; ``start``, in bytes, is whole blocks.
        """
        update = self.updating
        if update is None or update.update.speculated:  # which writes the next version
            return self.fetch(memory, start)
        return chained(update, lambda: self.fetch(memory, start))

    def fetch(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading the shard, in the form that it travels in, from byte ``start`` on."""
        raise NotImplementedError

    def fetched_nbytes(self, piece_nbytes: int | None) -> int:
        """Return the bytes that a fetch reads, in pieces of ``piece_nbytes``; None: as a whole."""
        return 0

    @property
    def trains(self) -> bool:
        """Whether the shard has moments."""
        return False

    def read_weight(self, memory: memoryview, start: int = 0) -> Transfer:
        """Start reading the committed weights, in the compute dtype, from byte ``start`` on."""
        raise NotImplementedError

    def chunks(self, *, read: bool = True, write: bool = False) -> Iterator[Chunk]:
        """Yield every chunk in memory, valid until the next one; ``write`` stores it again.

        Moments that a unit lacks are zeros, and are not stored.
        """
        raise NotImplementedError


#: A shard is a whole number of these (elements): see [Note: the flat buffer].
SHARD_QUANTUM = 2048
#: The element of a placeholder.
_NAN_BYTES = {
    dtype: bytes(torch.full((1,), math.nan, dtype=dtype, device="cpu").view(torch.uint8).tolist())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


@dataclass(slots=True, eq=False)
class Segment:
    """The place of a parameter in its unit (elements of the flat buffer), and its step count."""

    param: nn.Parameter
    name: str
    #: Position among the unit's segments; a parameter without elements shares its offset with the next.
    index: int
    offset: int
    shape: torch.Size
    created_dtype: torch.dtype
    whole: nn.Parameter  # the model's own parameter: ``param``, or what it is a tile of
    whole_shape: torch.Size
    first: int = 0  # the first element of ``whole`` that is here
    writes: int = 0  # autograd's count of writes to the parameter when it was attached
    steps: int = 0  # updates that the parameter has had
    released: Tensor | None = None  # the parameter's placeholder, made once

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def is_tile(self) -> bool:
        return self.param is not self.whole

    @property
    def is_last(self) -> bool:
        """Whether no tile of the parameter follows."""
        return self.first + self.numel == self.whole_shape.numel()

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the segment of a unit's flat buffer in its shape, by one operator: steps need many."""
        return flat.as_strided(self.shape, _strides(self.shape), flat.storage_offset() + self.offset)

    @property
    def rows(self) -> range:
        width = self.whole_shape[1:].numel()
        return range(self.first // width, (self.first + self.numel) // width)

    @property
    def whole_name(self) -> str:
        return self.name.rpartition("[")[0] if self.is_tile else self.name


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Describes the stored bytes of a unit, all ranks' shards of equal size: see [Note: stored form]."""

    nbytes: int  # of all shards
    shard_nbytes: int  # in whole blocks
    scratch_nbytes: int  # the most that decoding takes of an accelerator's memory, beside both buffers
    #: Decodes gathered bytes, ``(nbytes,)`` uint8, into a flat buffer on their device, ``(numel,)``.
    decode: Callable[[Tensor, Tensor], None]


class Unit:
    """Describes the layout of a unit on every rank, and where its weights are on this one."""

    def __init__(
        self, index: int, segments: Sequence[Segment], dtype: torch.dtype, rank: int, world_size: int
    ) -> None:
        self.index, self.dtype, self.rank, self.world_size = index, dtype, rank, world_size
        self.place(segments)
        self.home = Home(Tier.NVME)
        self.stored: StoredForm | None = None  # the form in which shards travel; None: the compute dtype
        self.device = torch.device("cpu")  # of the flat buffer and its placeholders
        self.routed = False  # a tile of experts: used where a batch is routed to one, which no plan foresees
        self.lifecycle: Lifecycle[UnitState] = Lifecycle(f"unit {index}", UnitState.ON_NVME)
        self.updates = 0  # committed ones in the weights; a handle packed under another count is stale
        self.flat: Tensor | None = None  # the full values, ``(numel,)``, while GATHERED
        self.lease: Lease | None = None  # of ``flat``'s memory; None where the home is the flat buffer
        self._address = 0  # of the flat buffer when it was attached

    def place(self, segments: Sequence[Segment]) -> None:
        """Let these be the unit's parameters."""
        self.segments = list(segments)  # in the order of the flat buffer
        used = max((s.stop for s in segments), default=0)
        quantum = SHARD_QUANTUM * self.world_size
        self.numel = max(1, math.ceil(used / quantum)) * quantum  # of the flat buffer, with padding

    @property
    def name(self) -> str:
        return self.lifecycle.name

    @property
    def state(self) -> UnitState:
        return self.lifecycle.state

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def shard_start(self) -> int:
        return self.rank * self.shard_numel

    @property
    def nbytes(self) -> int:
        """Bytes of the full flat buffer in the compute dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    def within(self, start: int, stop: int) -> Iterator[tuple[Segment, int, int, int]]:
        """Yield the segments that elements ``[start, stop)`` of the flat buffer meet.

        Each with the first such element there, the same one's index in the whole parameter, and their number.
        """
        for segment in self.segments:
            low, high = max(start, segment.offset), min(stop, segment.stop)
            if low < high:
                yield segment, low, segment.first + low - segment.offset, high - low

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that a pool takes for the flat buffer, and for what it is decoded from."""
        return rounded(self.nbytes) + (0 if self.stored is None else rounded(self.stored.nbytes))

    @property
    def trainable(self) -> list[Segment]:
        with torch._C.DisableTorchFunctionSubclass():  # asked of all units in every step
            return [s for s in self.segments if s.whole.requires_grad]

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's slice of a full flat tensor, ``(shard_numel,)``."""
        return flat.narrow(0, self.shard_start, self.shard_numel)

    def rename(self, names: dict[int, str]) -> None:
        """Name the segments after the model's own names, by parameter identity, and the unit after them."""
        for segment in self.segments:
            segment.name = names.get(id(segment.whole), segment.whole_name)
            if segment.is_tile:
                segment.name += f"[{segment.rows.start}:{segment.rows.stop}]"
        if self.segments:
            own = [segment.name for segment in self.segments]
            pieces = zip(*(name.split(".") for name in own), strict=False)
            module = ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, pieces))
            self.lifecycle.name = f"unit {self.index} ({module or f'{own[0]} .. {own[-1]}'})"

    def move_to(self, home: Home) -> None:
        """Let ``home`` be where the shard lives; a unit that is nowhere else is there now."""
        at_home = self.state is self.home.resting_state
        self.home = home
        if at_home and self.state is not home.resting_state:
            self.lifecycle.move(home.resting_state)

    def attach(self, flat: Tensor) -> None:
        """Let every parameter view ``flat``, ``(numel,)``, even if :meth:`check_data` raises."""
        try:
            self.check_data(self.segments)
        finally:
            self.flat, self._address = flat, flat.data_ptr()
            self._place(self.segments)
            self.allow_writes()

    def renew(self) -> None:
        """Take note of new weights: a graph from before must not read them in its backward."""
        self.updates += 1
        self._refuse_old_graphs()

    def _refuse_old_graphs(self) -> None:
        """Let torch refuse graphs that saved these weights as they are: other units' are behind handles."""
        if self.lease is None and self.flat is not None:
            torch.autograd.graph.increment_version([segment.param for segment in self.segments])
            self.allow_writes()

    def allow_writes(self) -> None:
        """Accept the writes to the parameters until now: they are stored."""
        for segment in self.segments:
            segment.writes = segment.param._version

    def detach(self) -> None:
        """Give every parameter its placeholder, even if :meth:`check_data` raises."""
        try:
            self.check_data(self.segments)
        finally:
            self.drop()

    def drop(self) -> None:
        """Give every parameter its placeholder, whatever was written."""
        self._refuse_old_graphs()
        attached, self.flat, self.lease = self.flat is not None, None, None
        if attached:
            self._place(self.segments)

    def _place(self, segments: Iterable[Segment]) -> None:
        """Give parameters their data: views of the flat buffer, or placeholders where there is none."""
        for each in segments:
            if self.flat is not None:
                each.param.data = each.view_of(self.flat)
                continue
            had = each.released  # another one only where an alias of it was written
            if had is None or had.shape != each.shape or not is_placeholder(had) or _filled(had):
                had = each.released = placeholder(each.shape, self.dtype, self.device)
            each.param.data = had

    def check_data(self, segments: Iterable[Segment]) -> None:
        """Raise unless these parameters' data is what the unit's state says, and was not written."""
        address, dtype, there = self._address, self.dtype, self.flat is not None
        for segment in segments:  # in each forward, of all parameters, mostly in vain
            param, had = segment.param, segment.released
            if param is segment.whole and param.dtype is dtype:
                if there:
                    place = address + segment.offset * dtype.itemsize
                    right = param._version == segment.writes and param.data_ptr() == place
                else:
                    right = had is not None and param.data_ptr() == had.data_ptr() and not _filled(had)
                if right:
                    continue
            self.restore_place(segment)
            if self.flat is None:
                if _filled(param.data):
                    self._refuse(segment.name, segment.shape, param.data)
            elif param._version != segment.writes:
                raise StateError(
                    f"{segment.name} was written outside `with infinity.gathered(params, modify=True)`: what "
                    "was written would be lost, or would not agree with the exact weights. Write inside that "
                    "context"
                )

    def restore_place(self, segment: Segment) -> None:
        """Undo ``model.cpu()`` and the like; raise unless the parameter's data is in its place now."""
        param = segment.param
        # Once for all its tiles; a parameter of torch's own class has its full values now.
        if segment.is_tile and not segment.first and type(segment.whole) is not nn.Parameter:
            self._check_whole(segment)
        if self._was_moved(segment):  # others may have been given other values
            self._place([each for each in self.segments if self._was_moved(each)])
            return
        if self.flat is None:
            right = is_placeholder(param)
        else:
            self.check_memory()
            place = self._address + segment.offset * self.dtype.itemsize
            right = param.data_ptr() == place or not segment.numel
        if param.dtype != self.dtype or not right:
            self._refuse(segment.name, segment.shape, param.data)

    def check_memory(self) -> None:
        """Raise if the flat buffer's storage was moved: an engine would read into its old place for ever."""
        if self.flat is not None and self.flat.data_ptr() != self._address:
            raise StateError(
                f"{self.name}: its memory was moved by model.share_memory(), so this model cannot go on; "
                "close it and build it again, and share plain tensors (infinity.state_dict) in place of it"
            )

    def _was_moved(self, segment: Segment) -> bool:
        """Return whether the parameter has the same values as before, on another device."""
        if segment.param.device == self.device:
            return False
        data = segment.param.data
        if data.is_meta or data.dtype != self.dtype or data.shape != segment.shape:
            return False
        if self.flat is None:
            return bool(data.isnan().all())
        here = segment.view_of(self.flat).to(data.device)  # by bytes, which are equal for a NaN, too
        return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (data, here)))

    def _check_whole(self, segment: Segment) -> None:
        """Raise if the model's parameter, whose tile this is, was given other data than its placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            data = segment.whole.data
        wanted = self.dtype, segment.param.device, segment.whole_shape
        kept = (data.dtype, data.device, data.shape) == wanted
        if not kept or not is_placeholder(data) or _filled(data):
            segment.whole.data = placeholder(segment.whole_shape, self.dtype, self.device)
            self._refuse(segment.whole_name, segment.whole_shape, data)

    def _refuse(self, name: str, shape: torch.Size, data: Tensor) -> NoReturn:
        """Put all parameters back in their places, and raise for one that had other ``data``."""
        self._place(self.segments)
        if data.shape != shape:
            raise StateError(
                f"{name}: its data was given the shape {tuple(data.shape)} outside infinity; it has "
                f"{tuple(shape)} again. Change shapes (resize_token_embeddings) inside "
                "`with infinity.Init(recipe)`, or, of a finished model, `with infinity.Init(model)`"
            )
        raise StateError(
            f"{name}: its data was replaced outside infinity, or written ({data.dtype} on "
            f"{data.device}); it is {self.dtype} in its unit again, as it was. Choose the dtype with "
            "train.dtype in the recipe before building the model: .half(), .float() and .to(dtype) cannot "
            "change it. Write values inside `with infinity.gathered(params, modify=True)`"
        )


class UnitIndex(list[Unit]):
    """Lists the units of one model in order and finds those of a parameter; shared by all parts of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, tuple[Unit, Segment]] = {}  # by id; the segments keep the parameters alive
        self._tiles: dict[int, list[tuple[Unit, Segment]]] = {}  # by id of the model's parameter
        self.parts = Parts()

    def add(self, unit: Unit) -> None:
        """Append ``unit``, whose index is the number of units before it."""
        self.append(unit)
        for segment in unit.segments:
            self._places[id(segment.param)] = unit, segment
            if segment.is_tile:
                self._tiles.setdefault(id(segment.whole), []).append((unit, segment))

    def replace(self, units: Iterable[Unit]) -> None:
        for had in (self, self._places, self._tiles):
            had.clear()
        for unit in units:
            self.add(unit)

    def drop(self, unit: Unit, segment: Segment) -> None:
        """Forget a parameter, or a tile, whose place in ``unit`` stays empty."""
        unit.segments.remove(segment)
        if segment.is_tile:
            self._tiles[id(segment.whole)].remove((unit, segment))
        for index, other in enumerate(unit.segments):
            other.index = index
        del self._places[id(segment.param)]

    def lay_out(self, unit: Unit) -> None:
        """Place the parameters of ``unit``, some of which have another shape now, anew; none is a tile."""
        unit.place(layout([(segment.name, segment.whole) for segment in unit.segments]))
        self._places.update({id(segment.param): (unit, segment) for segment in unit.segments})

    def find(self, param: nn.Parameter) -> tuple[Unit, Segment] | None:
        """Return the unit and the segment of ``param``; None when no unit holds it, or it is in tiles."""
        return self._places.get(id(param))

    def place_of(self, param: int) -> tuple[Unit, Segment]:
        """Return the unit and the segment of a parameter, or of a tile, that one holds; by its id."""
        return self._places[param]

    def places(self, param: nn.Parameter) -> Sequence[tuple[Unit, Segment]]:
        """Return the unit and the segment of ``param``, or those of all its tiles, in order."""
        place = self.find(param)
        return self._tiles.get(id(param), ()) if place is None else (place,)

    def holding(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units that hold any of ``params``, each once, in order."""
        found = {unit.index for param in params for unit, _ in self.places(param)}
        return [self[index] for index in sorted(found)]

    def segments(self) -> Iterator[tuple[Unit, Segment]]:
        return ((unit, segment) for unit in self for segment in unit.segments)


def layout(params: Iterable[tuple[str, nn.Parameter]]) -> list[Segment]:
    """Return places for ``params`` in a flat buffer: matrices first, each at the start of a block."""
    segments: list[Segment] = []
    offset = 0
    for name, param in sorted(params, key=lambda item: item[1].ndim < 2):
        index, shape = len(segments), param.shape
        segments.append(Segment(param, name, index, offset, shape, param.dtype, param, shape))
        offset += aligned(param.numel(), BLOCK_NUMEL)
    return segments


def layout_tiles(name: str, param: nn.Parameter, rows: int, dtype: torch.dtype) -> list[Segment]:
    """Return places for the tiles of ``param``, ``rows`` rows each, every one in a unit of its own."""
    tiles, width = [], param.shape[1:].numel()
    for first in range(0, len(param), rows):
        shape = torch.Size((min(rows, len(param) - first), *param.shape[1:]))
        tile = nn.Parameter(placeholder(shape, dtype, param.device), requires_grad=param.requires_grad)
        called = f"{name}[{first}:{first + shape[0]}]"
        tiles.append(Segment(tile, called, 0, 0, shape, param.dtype, param, param.shape, first * width))
    return tiles


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one NaN expanded to ``shape``: see [Note: the released parameter].

    It is hidden from profilers of operators: when units are released differs from pass to pass, and the bytes
    that a step itself makes must be the same in each.
    """
    with no_dispatch(), torch.inference_mode(False):  # parameters keep it for training
        if device.type == "cpu":
            nan = torch.full((), math.nan, dtype=dtype, device=device)
        else:  # each would take a kernel
            nan = _shared_nan(dtype, device)
        return nan.expand(shape) if shape.numel() else nan.as_strided(shape, _strides(shape))


@functools.cache
def _shared_nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), math.nan, dtype=dtype, device=device)


def is_placeholder(data: Tensor) -> bool:
    """Return whether ``data`` has one element in storage, whatever its shape."""
    return data.untyped_storage().nbytes() == data.dtype.itemsize


def _filled(placeholder: Tensor) -> bool:
    """Return whether ``zero_`` or ``fill_``, which torch does not refuse, wrote to a host placeholder."""
    if not placeholder.is_cpu:
        return False
    if not (address := placeholder.data_ptr()):  # its storage was made empty, unless it has no elements
        return placeholder.numel() > 0
    if ctypes.string_at(address, placeholder.itemsize) == _NAN_BYTES.get(placeholder.dtype):
        return False  # asked of each unit in each step, where an operator would take many times as long
    return not math.isnan(placeholder.as_strided((), ()).item())


@functools.cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))
