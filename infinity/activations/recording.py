"""What a profiler writes down while a step runs, and the profile that it makes of it.

[Note: which storage]
A storage is known by a weak reference, whose end is the moment in which its memory is given back. Addresses
are used again at once, so an address alone says nothing. Views share a storage.

[Note: which block a backward operator belongs to]
Autograd numbers its nodes in the order of forward. The numbers at a block's beginning and end tell, for the
node that runs an operator of backward, whose forward made it. Gradients that are accumulated, and what a
recomputed forward makes anew, belong to the node before.
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from infinity.core.profile import Block, Kind, Operator, Phase, Profile, Slot, SlotKey, StorageUse, Traffic


@dataclass(slots=True)
class Life:
    """A storage of the step.

    Attributes:
        died: Operators that had ended when its memory was given back; None: it lives.
        returned: The same of a storage that stood for it.
        held: It was still there when another storage came to stand for it.
    """

    name: str
    nbytes: int
    kind: Kind
    born: int
    died: int | None = None
    returned: int | None = None
    held: bool = False


class Storages:
    """Every storage of the step by its index; see [Note: which storage]."""

    def __init__(self, position: Callable[[], int]) -> None:
        self.lives: list[Life] = []
        self._position = position
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def find(self, tensor: Tensor, kind: Kind, name: str) -> int:
        """The index of the storage of ``tensor``; ``kind`` and ``name`` if it was not known."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        born = self._position() if kind is Kind.WORKING else 0
        self.lives.append(Life(name, storage.nbytes(), kind, born))
        self._remember(storage, len(self.lives) - 1, self._died)
        return len(self.lives) - 1

    def stand_in(self, tensor: Tensor, index: int) -> None:
        """From now on the storage of ``tensor`` is storage ``index``."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0]() is not storage or known[1] != index:
            self.lives[index].held |= self.lives[index].died is None
            self._remember(storage, index, self._returned)

    def _remember(self, storage: Any, index: int, ended: Callable[..., None]) -> None:
        address = storage._cdata
        self._known[address] = weakref.ref(storage, partial(ended, address, index)), index

    def _died(self, address: int, index: int, ref: weakref.ref[Any]) -> None:
        self.lives[index].died = self._position()
        self._forget(address, ref)

    def _returned(self, address: int, index: int, ref: weakref.ref[Any]) -> None:
        self.lives[index].returned = self._position()
        self._forget(address, ref)

    def _forget(self, address: int, ref: weakref.ref[Any]) -> None:
        if address in self._known and self._known[address][0] is ref:
            del self._known[address]


#: Outside backward.
NO_NODE = -1


class Call(NamedTuple):
    """An operator as it ran; ``node`` is the number of the autograd node that ran it."""

    name: str
    times: tuple[Any, Any]  # seconds, or CUDA events
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    region: int
    node: int


@dataclass(slots=True)
class Region:
    """A block's forward: the operators and the autograd nodes ``[begin, end)`` that it made."""

    region: int
    name: str
    begin: int
    first_node: int
    end: int = 0
    end_node: int = 0
    inputs: tuple[int, ...] = ()


@dataclass(slots=True)
class Saved:
    """A slot: the operators that had ended when it was packed and first unpacked, and who unpacked it."""

    storage: int
    packed: int
    unpacked: int | None = None
    nodes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Marks:
    """What the cache told."""

    phase: Phase = Phase.FORWARD
    region: int = 0
    regions: list[Region] = field(default_factory=list)
    saved: dict[SlotKey, Saved] = field(default_factory=dict)
    forward_end_node: int = 0
    backward_end: int | None = None
    alive_after: frozenset[int] = frozenset()  # storages, when backward had ended
    #: Of units: operators that had ended, bytes read, bytes written.
    traffic: list[tuple[int, int, int]] = field(default_factory=list)


class Finished:
    """Turns what was recorded into a profile."""

    def __init__(self, calls: Sequence[Call], lives: Sequence[Life], marks: Marks) -> None:
        self.calls, self.lives, self.marks = calls, lives, marks
        self.last = max(0, len(calls) - 1)
        self.backward_end = len(calls) if marks.backward_end is None else marks.backward_end

    def profile(self, seconds: list[float], step_s: float) -> Profile:
        slots = self._slots()
        return Profile(
            max(step_s, sum(seconds)),
            tuple(self._operator(call, s) for call, s in zip(self.calls, seconds)),
            tuple(self._lifetimes(slots)),
            tuple(slots),
            tuple(self._blocks()),
            tuple(self._traffic()),
        )

    def _operator(self, call: Call, time_s: float) -> Operator:
        return Operator(call.name, time_s, call.inputs, call.outputs, call.phase, call.region)

    def _slots(self) -> list[Slot]:
        """Those that backward asked for; what it never needs, nobody has to bring back."""
        reads, ends = self._last_reads(), {call.node: at for at, call in enumerate(self.calls)}
        slots = []
        for key, saved in self.marks.saved.items():
            if saved.unpacked is None:
                continue
            life, unpacked_at = self.lives[saved.storage], min(saved.unpacked, self.last)
            held = life.held or life.kind is not Kind.WORKING or saved.storage in self.marks.alive_after
            given_back = [e - 1 for e in (life.died, life.returned) if e and e <= self.backward_end]
            node_ends = [ends.get(node, 0) for node in saved.nodes if node != NO_NODE]
            needed = [unpacked_at, reads.get(saved.storage, 0), *node_ends]
            released_at = max(needed if held else needed + given_back)
            packed_at = max(0, saved.packed - 1)
            slots.append(Slot(key, saved.storage, life.nbytes, packed_at, unpacked_at, released_at, held))
        return slots

    def _last_reads(self) -> dict[int, int]:
        """For each storage the last operator of backward that reads it."""
        return {
            storage: at
            for at, call in enumerate(self.calls[: self.backward_end])
            if call.phase is Phase.BACKWARD
            for storage in (*call.inputs, *call.outputs)
        }

    def _lifetimes(self, slots: Sequence[Slot]) -> Iterator[StorageUse]:
        saved = {slot.storage: slot for slot in slots}
        packed = {saved.storage for saved in self.marks.saved.values()}
        for index, life in enumerate(self.lives):
            dies = self.last if life.died is None else max(life.born, life.died - 1)
            slot = saved.get(index)
            if slot is not None:
                dies = max(dies, slot.released_at) if slot.held else slot.released_at
            saves = index in packed and life.kind is Kind.WORKING
            kind = Kind.ACTIVATION if saves else life.kind
            born = min(life.born, self.last)
            yield StorageUse(f"{index} {life.name}", life.nbytes, kind, born, min(dies, self.last))

    def _traffic(self) -> Iterator[Traffic]:
        """What units move, by the operator beside which it began."""
        read, written = Counter[int](), Counter[int]()
        for position, nbytes_read, nbytes_written in self.marks.traffic:
            at = min(position, self.last)
            read[at] += nbytes_read
            written[at] += nbytes_written
        for at in sorted(read.keys() | written.keys()):
            yield Traffic(at, read[at], written[at])

    def _blocks(self) -> Iterator[Block]:
        """Calls that backward goes through; see [Note: which block a backward operator belongs to]."""
        regions = [mark for mark in self.marks.regions if mark.end]
        first_nodes = [mark.first_node for mark in regions]
        spans: dict[int, tuple[int, int]] = {}
        current = -1
        for at, call in enumerate(self.calls[: self.backward_end]):
            if 0 <= call.node < self.marks.forward_end_node:
                current = bisect_right(first_nodes, call.node) - 1
                if current >= 0 and call.node >= regions[current].end_node:
                    current = -1
            if call.phase is Phase.BACKWARD and current >= 0:
                spans[current] = spans.get(current, (at, at))[0], at + 1
        for index, mark in enumerate(regions):
            if index in spans:
                yield Block(mark.name, mark.region, (mark.begin, mark.end), spans[index], mark.inputs)
