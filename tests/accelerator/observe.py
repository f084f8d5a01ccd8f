"""What the product's host code does to memory that devices reach, told to the simulator. The only such place.

Wraps the few functions through which infinity's drives and update threads read and write host memory, and
through which leases are given back. The product knows nothing of this.

[Note: seen]
A move of an engine is in flight until a thread of the product has seen its end: ``wait`` returned, ``done``
said so, or a call that follows it began. That the drive happened to be quick orders nothing.
"""

import ctypes
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.comm.shared import NodeMemory, SharedSlice
from infinity.device.memory import Pool
from infinity.nvme.engines import Move, QueuedEngine
from infinity.optim import rules
from infinity.partition.mover import UnitMover
from tests.accelerator.device import is_sim, simulator, span
from tests.accelerator.simulator import Flight, Range

_shared: list[weakref.ref[SharedSlice]] = []
_flights: dict[int, Flight] = {}  # of moves whose end nobody has seen, by id


def install() -> None:
    """Wrap the product's functions, once in a process."""
    if hasattr(QueuedEngine.read, "__wrapped__"):
        return
    _shared.clear()
    for owner, name, around in (
        (Ranks, "least", _exchanges), (Ranks, "each", _exchanges), (NodeMemory, "slice", _slices),
        (UnitMover, "_upload", _uploads),
        (QueuedEngine, "read", _reads), (QueuedEngine, "write", _writes), (Move, "wait", _sees),
        (Move, "done", _asks), (Move, "then", _follows), (rules.HostRule, "update", _updates),
        (Pool, "take_back", _takes_back),
    ):  # fmt: skip
        _wrap(owner, name, around)
    _wrap(rules, "sum_of_squares", _sums)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


# --- engines -----------------------------------------------------------------------------------


def _reads(read: Any, engine: Any, extent: Any, memory: Any, *, urgent: bool = False) -> Move:
    return _starts(engine, memory, lambda: read(engine, extent, memory, urgent=urgent), writes=False)


def _writes(write: Any, engine: Any, extent: Any, memory: Any) -> Move:
    return _starts(engine, memory, lambda: write(engine, extent, memory), writes=True)


def _starts(engine: Any, memory: Any, start: Callable[[], Move], *, writes: bool) -> Move:
    if not isinstance(memory, memoryview) or not memory.nbytes:
        return start()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ranges = [(address, address + memory.nbytes)]
    told = simulator.flight(
        f"{engine.name} {'write' if writes else 'read'}", ranges if writes else (), () if writes else ranges
    )
    try:
        move = start()
    except BaseException:
        simulator.landed(told)
        raise
    _flights[id(move)] = told
    return move


def _seen(move: Move) -> None:
    flight = _flights.pop(id(move), None)
    if flight is not None:
        simulator.landed(flight)


def _sees(wait: Any, move: Move) -> None:
    try:
        wait(move)
    finally:
        move.done()  # which sees the end; a wait that Ctrl-C ended has seen none


def _asks(done: Any, move: Move) -> bool:
    ended = done(move)
    if ended:
        _seen(move)
    return ended


def _follows(then: Any, move: Move, call: Callable[[], None]) -> None:
    def after() -> None:
        _seen(move)
        call()

    then(move, after)


# --- threads of the host -------------------------------------------------------------------------


@contextmanager
def _in_flight(what: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> Iterator[None]:
    flight = simulator.flight(what, _host(reads), _host(writes))
    try:
        yield
    finally:
        simulator.landed(flight)


def _host(tensors: Sequence[Tensor]) -> list[Range]:
    return [span(t) for t in tensors if t.device.type == "cpu"]


def _updates(
    update: Any, rule: Any, weight: Tensor, grad: Tensor, state: Any, weight_out: Tensor, *more: Any
) -> None:
    with _in_flight("AdamW", [weight, grad, *state], [*state, weight_out]):
        time.sleep(simulator.pause_s * len(_shared))  # other ranks come to what this one writes
        update(rule, weight, grad, state, weight_out, *more)


def _sums(sum_of_squares: Any, grad: Tensor) -> float:
    with _in_flight("norm", [grad]):
        return sum_of_squares(grad)


# --- memory of several ranks ---------------------------------------------------------------------


def _slices(make: Any, memory: Any, nbytes: int) -> Any:
    made = make(memory, nbytes)
    _shared.append(weakref.ref(made))
    return made


def _exchanges(exchange: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
    """After any exchange other ranks may write their parts of what all of them share, and copies read it."""
    told = exchange(ranks, *args, **kwargs)
    places = [found for ref in _shared if (found := ref()) is not None]
    for access in simulator.in_flight([span(each.whole) for each in places]):
        if access.flight is None:  # else an update here, of this rank's part
            simulator.early.append(f"other ranks may write memory that they share before {access}")
    return told


def _uploads(upload: Any, mover: Any, updated: Any, shard: Any, *more: Any) -> None:
    """A copy of what other ranks write, which no clock here knows, begins when they have written it."""
    upload(mover, updated, shard, *more)
    buffer = None if shard is None else shard.lent
    if isinstance(buffer, SharedSlice) and buffer.written.min() < buffer.begun:
        simulator.early.append(f"{shard.who} is uploaded before all ranks have written it")


# --- leases ------------------------------------------------------------------------------------


def _takes_back(take_back: Any, pool: Any, lease: Any) -> None:
    """Host memory that is given back may be written at once, but after the events that it carries."""
    with pool.changed:  # else another thread could give it back now, and a third one use it
        buffer = lease.lent
        if buffer is not None and not is_sim(buffer.tensor):
            events = [event.event_id for event in buffer.events]
            simulator.released(lease.who, [span(buffer.tensor)], after=events)
    take_back(pool, lease)
