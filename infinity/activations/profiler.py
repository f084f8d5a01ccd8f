"""Record one step: its operators, the storages that they touch, and what autograd keeps of them.

[Note: a step as if everything were kept]
The step that is recorded may already send its activations away. Then a saved storage vanishes in forward,
and backward reads another one with the same bytes. :meth:`Profiler.loaded` says which one stands for which
slot, what the cache itself does is left out by :meth:`Profiler.paused`, and a slot's storage is given the
life that it has when nobody moves it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.activations.recording import NO_NODE, Call, Finished, Marks, Region, Saved, Storages
from infinity.core.profile import Kind, Phase, Profile, SlotKey


class _Signature(NamedTuple):
    """What an operator writes of its arguments: positions, and names (``out=``, which it does not read)."""

    name: str
    positions: tuple[int, ...]
    names: tuple[str, ...]


class Profiler(TorchDispatchMode):
    """Records what runs inside ``with``, which is one micro-batch, with its update or without.

    CPU operators are timed by the clock, CUDA operators by events, which are read in :meth:`finish`.
    The autograd engine carries the mode into its own threads. Other threads are not recorded. Marks come
    from the tensor cache, in the order of execution.

    Args:
        weights: Parameters, whose gradients are found too. Every ``nn.Parameter`` counts as one.
        states: Of the optimizer.
        device: Whose operators are timed.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        weights: Iterable[Tensor] = (),
        states: Iterable[Tensor] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._states = list(weights), list(states)
        self._cuda = torch.device(device).type == "cuda"
        self._calls: list[Call] = []
        self._storages = Storages(self._calls.__len__)
        self._marks = Marks()
        self._signatures: dict[Any, _Signature] = {}
        self._pauses = 0
        self._own_s = 0.0  # what a plain step would not take
        self._wall_s = 0.0

    def __enter__(self) -> "Profiler":
        for kind, tensors in ((Kind.WEIGHT, self._weights), (Kind.STATE, self._states)):
            for tensor in tensors:
                self._storages.find(tensor, kind, kind.value)
        self._find_gradients()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._wall_s -= self._now_s()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wall_s += self._now_s()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._pauses:
            return func(*args, **kwargs)
        came_s = time.perf_counter()
        if self._marks.phase is Phase.FORWARD and torch._C._current_graph_task_id() != -1:
            self.backward_begins()
        signature = self._signatures.get(func) or self._learn(func)
        read, written = self._arguments(signature, args, kwargs)
        begin = self._tick()
        result = func(*args, **kwargs)
        times = begin, self._tick()
        made = self._indices((result,), Kind.WORKING, signature.name)
        if written or not made or not set(made) <= set(read):
            node = _node() if self._marks.phase is Phase.BACKWARD else NO_NODE
            region = self._marks.region if self._marks.phase is Phase.FORWARD else -1
            outputs = tuple(dict.fromkeys((*written, *made)))
            phase = self._marks.phase
            self._calls.append(Call(signature.name, times, read, outputs, phase, region, node))
        self._own_s += time.perf_counter() - came_s - (0.0 if self._cuda else times[1] - times[0])
        return result

    # --- marks -------------------------------------------------------------------------------

    def enter_region(self, region: int, name: str) -> None:
        """The forward of block ``name`` begins."""
        self._marks.region = region
        self._marks.regions.append(Region(region, name, len(self._calls), _nodes_made()))

    def leave_region(self, region: int, inputs: Sequence[Tensor]) -> None:
        """It ended; ``inputs`` it read from outside, in the order in which a plan numbers them."""
        mark = next(mark for mark in reversed(self._marks.regions) if mark.region == region)
        mark.end, mark.end_node = len(self._calls), _nodes_made()
        found = self._indices(inputs, Kind.INPUT, "input")
        mark.inputs = tuple(i for i in found if self._storages.lives[i].kind is not Kind.WEIGHT)
        self._marks.region = region + 1

    def packed(self, key: SlotKey, tensor: Tensor) -> None:
        """Autograd saves ``tensor``, whose storage is slot ``key``; only the first time counts."""
        if key not in self._marks.saved:
            index = self._storages.find(tensor, Kind.INPUT, "input")
            self._marks.saved[key] = Saved(index, len(self._calls))

    def unpacked(self, key: SlotKey) -> None:
        """The next operator of backward needs slot ``key``."""
        saved = self._marks.saved.get(key)
        if saved is not None:
            saved.nodes.append(_node())
            if saved.unpacked is None:
                saved.unpacked = len(self._calls)

    def loaded(self, key: SlotKey, tensor: Tensor) -> None:
        """The storage of ``tensor`` is slot ``key`` from now on; call before backward reads it."""
        if key in self._marks.saved:
            self._storages.stand_in(tensor, self._marks.saved[key].storage)

    def units_move(self, nbytes_read: int, nbytes_written: int) -> None:
        """Units begin to move bytes on the channels that activations share; on any thread."""
        self._marks.traffic.append((len(self._calls), nbytes_read, nbytes_written))

    def backward_begins(self) -> None:
        """The backward pass begins; the first operator of one tells it too."""
        if self._marks.phase is Phase.FORWARD:
            self._marks.forward_end_node = _nodes_made()
        self._marks.phase = Phase.BACKWARD

    def update_begins(self) -> None:
        """The backward pass has ended."""
        self._end_backward()
        self._marks.phase = Phase.UPDATE

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the step; this thread only."""
        began_s = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._own_s += time.perf_counter() - began_s

    def finish(self) -> Profile:
        """The profile; call after ``with``.

        The step takes the time inside ``with``, less the time spent in the recording and the pauses.
        """
        if self._marks.backward_end is None:
            self._end_backward()
        return Finished(self._calls, self._storages.lives, self._marks).profile(
            self._seconds(), self._wall_s - self._own_s
        )

    # --- recording ---------------------------------------------------------------------------

    def _end_backward(self) -> None:
        lives = self._storages.lives
        self._marks.backward_end = len(self._calls)
        self._marks.alive_after = frozenset(i for i, life in enumerate(lives) if life.died is None)
        self._find_gradients()

    def _find_gradients(self) -> None:
        for weight in self._weights:
            if type(weight.grad) is Tensor:  # not what stands for one that is elsewhere
                index = self._storages.find(weight.grad, Kind.GRADIENT, "gradient")
                self._storages.lives[index].kind = Kind.GRADIENT

    def _learn(self, func: Any) -> _Signature:
        schema = getattr(func, "_schema", None)  # operators of higher order, as flex_attention, have none
        written = [
            (position, argument)
            for position, argument in enumerate(schema.arguments if schema else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        signature = _Signature(
            str(func),
            tuple(position for position, argument in written if not argument.kwarg_only),
            tuple(argument.name for _, argument in written),
        )
        self._signatures[func] = signature
        return signature

    def _arguments(
        self, signature: _Signature, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Storages that the call reads, and those of its arguments that it writes."""
        names = signature.names
        reads = (*args, *(value for name, value in kwargs.items() if name not in names))
        writes = [args[position] for position in signature.positions if position < len(args)]
        writes += [kwargs[name] for name in names if name in kwargs]
        read = self._indices(reads, Kind.INPUT, "input")
        return read, self._indices(writes, Kind.INPUT, "input") if writes else ()

    def _indices(self, values: Sequence[Any], kind: Kind, name: str) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for value in values:
            if isinstance(value, Tensor):
                if value.layout is torch.strided:
                    weight = kind is Kind.INPUT and isinstance(value, nn.Parameter)
                    found[self._storages.find(value, Kind.WEIGHT if weight else kind, name)] = None
            elif isinstance(value, (list, tuple)):
                found.update(dict.fromkeys(self._indices(value, kind, name)))
        return tuple(found)

    def _now_s(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _tick(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self) -> list[float]:
        """How long each operator took."""
        if not self._cuda:
            return [call.times[1] - call.times[0] for call in self._calls]
        torch.cuda.synchronize()
        return [call.times[0].elapsed_time(call.times[1]) / 1e3 for call in self._calls]


def _nodes_made() -> int:
    """How many autograd nodes this thread made, by the number that the next one gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _node() -> int:
    """The number of the autograd node that runs."""
    node = torch._C._current_autograd_node()
    return NO_NODE if node is None else int(node._sequence_nr())
