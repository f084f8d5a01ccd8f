"""Record one step: its operators, the storages that they touch, and what autograd saves; or only its peak.

[Note: a step as if everything were kept]
The recorded step may already send activations away. Then a saved storage vanishes in forward, and backward
reads another with the same bytes: :meth:`Profiler.unpacked` says for which one it stands, and the profile
gives that one the life that it has when nothing moves.

[Note: storages]
A storage, which views share, is known by a weak reference, which ends when its memory is given back.

[Note: the block of a backward operator]
Autograd numbers nodes in the order of forward, so the numbers at a block's ends tell whose forward made the
node that runs an operator. Those that accumulate gradients, or recompute, belong to the node before.
"""

import itertools
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.activations.recompute import in_backward, must_run, written_by
from infinity.core.plan import (
    BlockCall,
    CodedForm,
    Kind,
    Operator,
    Phase,
    Profile,
    SlotKey,
    SlotUse,
    StorageUse,
    Traffic,
)
from infinity.device.accelerator import synchronize, timed_event

#: The number of the autograd node outside backward; others are numbered from 0.
NO_NODE = -1


def storages_of(tensors: Iterable[Tensor]) -> "weakref.WeakSet[torch.UntypedStorage]":
    """Return the storages of ``tensors``, held weakly; see [Note: identity]."""
    return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors if is_plain(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Return whether storage, offset, sizes and strides describe all of a tensor."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.device.type != "meta"
    )


@dataclass(slots=True)
class Life:
    """Records the life of a storage; a moment is the number of operators that had ended."""

    name: str
    nbytes: int
    kind: Kind
    born: int
    died: int | None = None  # its memory was given back
    returned: int | None = None  # the memory of a storage that stood for it was
    held: bool = False  # it still lived when another storage came to stand for it


class _Storages:
    """Numbers the storages of the step; see [Note: storages]."""

    def __init__(self, position: Callable[[], int]) -> None:
        self.lives: list[Life] = []
        self._position = position  # operators that have ended; called on any thread
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def find(self, tensor: Tensor, kind: Kind, name: str) -> int:
        """Return the index of the storage of ``tensor``, which is added if it is new."""
        known, storage = self.index(tensor), tensor.untyped_storage()
        if known is None:
            known, born = len(self.lives), self._position() if kind is Kind.WORKING else 0
            self.lives.append(Life(name, storage.nbytes(), kind, born))
            self._remember(storage, known, "died")
        return known

    def index(self, tensor: Tensor) -> int | None:
        """Return the index of the storage of ``tensor``; None: it is not known."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def stand_in(self, tensor: Tensor, index: int) -> None:
        """Let the storage of ``tensor`` count as storage ``index`` from now on."""
        if self.index(tensor) != index:
            self.lives[index].held |= self.lives[index].died is None
            self._remember(tensor.untyped_storage(), index, "returned")

    def _remember(self, storage: Any, index: int, end: str) -> None:
        address = storage._cdata

        def ended(ref: weakref.ref[Any]) -> None:
            setattr(self.lives[index], end, self._position())
            if address in self._known and self._known[address][0] is ref:
                del self._known[address]

        self._known[address] = weakref.ref(storage, ended), index


class Call(NamedTuple):
    """Records an operator that ran; ``node`` is the number of the autograd node that ran it."""

    name: str
    times: tuple[Any, Any]  # seconds, or CUDA events
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    region: int
    node: int
    may_stay: bool


@dataclass(slots=True)
class RegionMark:
    """Marks a block's forward: its operators ``[begin, end)``, autograd nodes ``[first_node, end_node)``."""

    region: int
    name: str
    begin: int
    first_node: int
    end: int = 0
    end_node: int = 0
    inputs: tuple[int, ...] = ()
    saved: int = 0  # operators that had ended when autograd saved something last


@dataclass(slots=True)
class SlotMark:
    """Marks when a slot was packed and first unpacked (operators that had ended), and by which nodes."""

    storage: int
    packed: int
    coded: CodedForm | None = None
    unpacked: int | None = None
    nodes: list[int] = field(default_factory=list)


class Recording:
    """Holds the operators, storages and marks of one step, and makes the profile from them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.storages = _Storages(self.calls.__len__)
        self.phase, self.region = Phase.FORWARD, 0
        self.regions: list[RegionMark] = []
        self.slots: dict[SlotKey, SlotMark] = {}
        self.forward_end_node = 0
        self.backward_end = -1  # operators that had ended then; below 0: it has not ended
        self.alive_after: frozenset[int] = frozenset()  # storages in memory then
        self.traffic: list[tuple[int, int, int]] = []  # units: operators ended, bytes read, written

    def profile(self, seconds: Sequence[float], step_s: float) -> Profile:
        """Return the profile of a step of ``step_s`` whose operators took ``seconds``, after backward."""
        last = max(0, len(self.calls) - 1)
        slots = self._slots(last)
        operators = (
            Operator(call.name, time_s, call.inputs, call.outputs, call.phase, call.region, call.may_stay)
            for call, time_s in zip(self.calls, seconds)
        )
        traffic = (Traffic(min(at, last), read, written) for at, read, written in self.traffic)
        step_s, lifetimes = max(step_s, sum(seconds)), tuple(self._lifetimes(slots, last))
        blocks = tuple(self.blocks())
        return Profile(step_s, tuple(operators), lifetimes, tuple(slots), blocks, tuple(traffic))

    def _slots(self, last: int) -> list[SlotUse]:
        """Return the slots that backward asked for; the others need not be loaded."""
        reads: dict[int, int] = {}  # for each storage the last operator of backward that reads it
        for at, call in enumerate(self.calls[: self.backward_end]):
            if call.phase is Phase.BACKWARD:
                reads.update(dict.fromkeys((*call.inputs, *call.outputs), at))
        ends = {call.node: at for at, call in enumerate(self.calls)}
        slots = []
        for key, saved in self.slots.items():
            if saved.unpacked is None:
                continue
            life, unpacked_at = self.storages.lives[saved.storage], min(saved.unpacked, last)
            held = life.held or life.kind is not Kind.WORKING or saved.storage in self.alive_after
            needed = [unpacked_at, reads.get(saved.storage, 0)]
            needed += [ends.get(node, 0) for node in saved.nodes if node != NO_NODE]
            if not held:
                needed += [end - 1 for end in (life.died, life.returned) if end and end <= self.backward_end]
            packed_at = max(0, saved.packed - 1)
            until = max(needed)
            slots.append(
                SlotUse(key, saved.storage, life.nbytes, packed_at, unpacked_at, until, held, saved.coded)
            )
        return slots

    def _lifetimes(self, slots: Sequence[SlotUse], last: int) -> Iterator[StorageUse]:
        saved = {slot.storage: slot for slot in slots}
        packed = {saved.storage for saved in self.slots.values()}
        for index, life in enumerate(self.storages.lives):
            dies = last if life.died is None else max(life.born, life.died - 1)
            slot = saved.get(index)
            if slot is not None:
                dies = max(dies, slot.released_at) if slot.held else slot.released_at
            saves = index in packed and life.kind is Kind.WORKING
            kind = Kind.ACTIVATION if saves else life.kind
            yield StorageUse(f"{index} {life.name}", life.nbytes, kind, min(life.born, last), min(dies, last))

    def blocks(self) -> Iterator[BlockCall]:
        """Yield calls of blocks that backward goes through; see [Note: the block of a backward operator]."""
        regions = [mark for mark in self.regions if mark.end]
        first_nodes = [mark.first_node for mark in regions]
        spans: dict[int, tuple[int, int]] = {}
        current = -1
        for at, call in enumerate(self.calls[: self.backward_end]):
            if 0 <= call.node < self.forward_end_node:
                current = bisect_right(first_nodes, call.node) - 1
                if current >= 0 and call.node >= regions[current].end_node:
                    current = -1
            if call.phase is Phase.BACKWARD and current >= 0:
                spans[current] = spans.get(current, (at, at))[0], at + 1
        for index, mark in enumerate(regions):
            if index in spans:
                forward, saved = (mark.begin, mark.end), min(mark.saved, mark.end)
                yield BlockCall(mark.name, mark.region, forward, spans[index], mark.inputs, saved)


class _Mode(TorchDispatchMode):
    """Sees the operators inside ``with``, also of what is compiled, which runs eagerly there only."""

    def __enter__(self) -> Any:
        self._stance = torch.compiler.set_stance("force_eager")  # or torch would never compile it again
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.__exit__(*error)


class Profiler(_Mode):
    """Records the operators inside ``with``: one micro-batch, with its update or without.

    CPU operators are timed by the clock, those of an accelerator by events that :meth:`finish` reads.
    Autograd's own threads are recorded, other threads are not. The tensor cache calls the marks.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Iterable[Tensor] = (), device: torch.device | str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = list(weights)
        self._device = torch.device(device)
        self._on_cpu = self._device.type == "cpu"
        self._recorded = Recording()
        self._compiled = False  # the block that runs
        self._pauses = 0
        self._own_s = 0.0  # seconds that a plain step would not take
        self._wall_s = 0.0

    def __enter__(self) -> "Profiler":
        for weight in self._weights:
            self._recorded.storages.find(weight, Kind.WEIGHT, "weight")
        self._find_gradients()
        super().__enter__()
        synchronize(self._device)
        self._wall_s -= time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        synchronize(self._device)
        self._wall_s += time.perf_counter()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._pauses:
            return func(*args, **kwargs)
        came_s, recorded = time.perf_counter(), self._recorded
        if recorded.phase is Phase.FORWARD and in_backward():
            self.backward_begins()
        positions, names = written_by(func)
        reads = (*args, *(value for name, value in kwargs.items() if name not in names))
        writes = [args[position] for position in positions if position < len(args)]
        writes += [kwargs[name] for name in names if name in kwargs]
        read, written = (self._indices(each, Kind.INPUT, "input") for each in (reads, writes))
        begin = self._tick()
        result = func(*args, **kwargs)
        times = begin, self._tick()
        name, phase = str(func), recorded.phase
        made = self._indices((result,), Kind.WORKING, name)
        if written or not made or not set(made) <= set(read):
            node = running_node() if phase is Phase.BACKWARD else NO_NODE
            region = recorded.region if phase is Phase.FORWARD else -1
            outputs = tuple(dict.fromkeys((*written, *made)))
            stays = not (self._compiled or must_run(func, args, kwargs))
            recorded.calls.append(Call(name, times, read, outputs, phase, region, node, stays))
        self._own_s += time.perf_counter() - came_s - (times[1] - times[0] if self._on_cpu else 0.0)
        return result

    def enter_region(self, region: int, name: str, compiled: bool = False) -> None:
        """Begin a block's forward; operators of a ``compiled`` one cannot be told apart in other steps."""
        self._recorded.region, self._compiled = region, compiled
        self._recorded.regions.append(RegionMark(region, name, len(self._recorded.calls), nodes_made()))

    def leave_region(self, region: int, inputs: Sequence[Tensor]) -> None:
        """End a block's forward; ``inputs`` came from outside, in the order of a plan's ordinals."""
        mark = next(mark for mark in reversed(self._recorded.regions) if mark.region == region)
        mark.end, mark.end_node = len(self._recorded.calls), nodes_made()
        found = self._indices(inputs, Kind.INPUT, "input")
        mark.inputs = tuple(i for i in found if self._recorded.storages.lives[i].kind is not Kind.WEIGHT)
        self._recorded.region, self._compiled = region + 1, False

    def saves(self) -> None:
        """Mark that autograd saves something now."""
        marks = self._recorded.regions
        if marks and not marks[-1].end:
            marks[-1].saved = len(self._recorded.calls)

    def packed(self, key: SlotKey, tensor: Tensor, coded: CodedForm | None = None) -> None:
        """Mark that autograd saves ``tensor``, whose storage is slot ``key``; only the first time counts."""
        if key not in self._recorded.slots:
            index = self._recorded.storages.find(tensor, Kind.INPUT, "input")
            self._recorded.slots[key] = SlotMark(index, len(self._recorded.calls), coded)

    def unpacked(self, key: SlotKey, tensor: Tensor) -> None:
        """Mark that backward needs slot ``key`` next, for which the storage of ``tensor`` stands now."""
        saved = self._recorded.slots.get(key)
        if saved is not None:
            saved.nodes.append(running_node())
            if saved.unpacked is None:
                saved.unpacked = len(self._recorded.calls)
            self._recorded.storages.stand_in(tensor, saved.storage)

    def units_move(self, nbytes_read: int, nbytes_written: int) -> None:
        """Record that units begin to move bytes on the channels that activations share; on any thread."""
        self._recorded.traffic.append((len(self._recorded.calls), nbytes_read, nbytes_written))

    def backward_begins(self) -> None:
        """Mark the beginning of backward; its first operator does so, too."""
        if self._recorded.phase is Phase.FORWARD:
            self._recorded.forward_end_node = nodes_made()
        self._recorded.phase = Phase.BACKWARD

    def update_begins(self) -> None:
        lives = self._recorded.storages.lives
        self._recorded.backward_end = len(self._recorded.calls)
        self._recorded.alive_after = frozenset(i for i, life in enumerate(lives) if life.died is None)
        self._find_gradients()
        self._recorded.phase = Phase.UPDATE

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what runs inside, and its time, out of the profile."""
        began_s = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._own_s += time.perf_counter() - began_s

    def finish(self) -> Profile:
        """Return the profile of a step that takes the time inside ``with``, less recording and pauses."""
        if self._recorded.backward_end < 0:
            self.update_begins()
        times = [call.times for call in self._recorded.calls]
        if self._on_cpu:
            seconds = [end_s - begin_s for begin_s, end_s in times]
        else:
            synchronize(self._device)
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in times]
        return self._recorded.profile(seconds, self._wall_s - self._own_s)

    def _find_gradients(self) -> None:
        for weight in self._weights:
            if type(weight.grad) is Tensor:  # not a placeholder of one that is elsewhere
                index = self._recorded.storages.find(weight.grad, Kind.GRADIENT, "gradient")
                self._recorded.storages.lives[index].kind = Kind.GRADIENT

    def _indices(self, values: Sequence[Any], kind: Kind, name: str) -> tuple[int, ...]:
        find, found = self._recorded.storages.find, dict[int, None]()
        for leaf in filter(_has_storage, tensors_in(values)):
            weight = kind is Kind.INPUT and isinstance(leaf, nn.Parameter)
            found[find(leaf, Kind.WEIGHT if weight else kind, name)] = None
        return tuple(found)

    def _tick(self) -> Any:
        return time.perf_counter() if self._on_cpu else timed_event(self._device)


def nodes_made() -> int:
    """Return how many autograd nodes this thread made, by the number that the next one gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node() -> int:
    """Return the number of the autograd node that runs, since the node itself would keep its graph alive."""
    node = torch._C._current_autograd_node()
    return NO_NODE if node is None else int(node._sequence_nr())


class MemoryMeter(_Mode):
    """Measures the peak of storages that operators make inside ``with``; a unit's buffers do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = _Storages(itertools.count().__next__)  # events are numbered, in place of operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = filter(_has_storage, tensors_in((args, kwargs)))
        there = {leaf.untyped_storage()._cdata for leaf in given}
        result = func(*args, **(kwargs or {}))
        for leaf in tensors_in(result):
            if _has_storage(leaf) and leaf.untyped_storage()._cdata not in there:
                self._storages.find(leaf, Kind.WORKING, "")
        return result

    def peak_nbytes(self, without: Sequence[Tensor] = ()) -> int:
        """Return the most bytes at one time, without the storages of ``without`` (gradients)."""
        left_out = {self._storages.index(tensor) for tensor in without}
        lives = [life for i, life in enumerate(list(self._storages.lives)) if i not in left_out]
        events = [(life.born, life.nbytes) for life in lives]
        events += [(life.died, -life.nbytes) for life in lives if life.died is not None]
        return max(itertools.accumulate((nbytes for _, nbytes in sorted(events)), initial=0))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def _has_storage(leaf: Tensor) -> bool:
    return leaf.layout is torch.strided
