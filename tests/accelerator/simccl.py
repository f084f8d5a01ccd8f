"""``simccl``: collectives between simulated devices, with NCCL's order; the bytes travel over gloo.

A collective is an entry of a stream of its own, which waits for what the caller's stream was given before.
``work.wait()`` blocks nobody: it makes the caller's stream wait. A peer that is gone leaves the entry unended
for ever, as a kernel of NCCL would spin for ever, until the group is aborted.

[Note: who wants it]
Under the schedule ``lazy`` a collective runs once somebody waits for it, on any rank: what only one rank
starts ends nowhere. So each rank tells the others, in a few shared bytes, how many collectives of the group
it has started, and a thread of each (one for all groups) starts its own.

[Note: straight to gloo]
A worker of gloo drops what it has done while it holds the lock of its queue, and needs the GIL where that
holds tensors of Python. A collective of a ``ProcessGroup`` that is a class of Python takes this lock with the
GIL held, and both wait for ever. So those on the CPU go to gloo's own bindings, which release it.
"""

import contextlib
import mmap
import os
import queue
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import device as sim
from tests.accelerator.device import is_sim, kernel_view, simulator, span
from tests.accelerator.simulator import Entry

_POLL_S = 0.001


class SimWork(dist.Work):
    """A collective in flight."""

    def __init__(
        self, group: "SimGroup", entry: Entry, stream: int, device: int, held: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._group, self._entry, self._device = group, entry, device
        self._mark = simulator.mark(stream)
        self._held: Sequence[Tensor] = held  # not given back before the caller's stream waits
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        with simulator.lock:
            if not self._entry.done:
                simulator.advance(self._entry)
            return self._entry.done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the caller's stream wait; with a timeout the host waits, too."""
        with simulator.lock, torch.accelerator.device_index(self._device):
            simulator.wait_for(self._mark, sim.current_stream())
        until = time.monotonic() + (timeout.total_seconds() if timeout else 0)
        while timeout is not None and not self.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"{self._entry.what} took longer than {timeout}")
            time.sleep(_POLL_S)
        self._held = ()
        if self.error is not None:
            raise RuntimeError(f"simccl: {self._entry.what}: {self.error}")
        return True

    synchronize = wait


class SimGroup(dist.ProcessGroup):
    """A process group whose tensors are on simulated devices; those on the CPU go to gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        wire = dist.PrefixStore("wire", store)
        self._wire = dist.ProcessGroupGloo(wire, rank, size, timedelta(hours=1))
        self._cpu = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        self._cpu._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._cpu)
        self._started = _Started(store, rank, size)
        self._streams: dict[int, int] = {}
        self._waiting: list[tuple[int, Entry]] = []  # guarded by the simulator's lock
        self._works: dict[int, SimWork] = {}
        self._count = 0
        self._aborted = False
        self._jobs: queue.SimpleQueue[tuple[Entry, int, Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name="simccl-carry", daemon=True).start()
        _watcher.groups.append(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "simccl"

    # --- collectives ---------------------------------------------------------------------------

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not is_sim(output):
            return self._cpu._allgather_base(output, input, *_given(opts))
        out, given = kernel_view(output), kernel_view(input)
        return self.issue(
            "all-gather", lambda: self._wire._allgather_base(out, given.clone()), [input], [output]
        )

    all_gather_single = _allgather_base

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        if not is_sim(output):
            return self._cpu.alltoall_base(output, input, output_sizes, input_sizes, *_given(opts))
        out, given = kernel_view(output), kernel_view(input)
        return self.issue(
            "all-to-all",
            lambda: self._wire.alltoall_base(out, given, output_sizes, input_sizes),
            [input], [output],
        )  # fmt: skip

    all_to_all_single = alltoall_base

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if not is_sim(tensors[0]):
            return self._cpu.allreduce(tensors, *_given(opts))
        views = [kernel_view(t) for t in tensors]
        return self.issue("all-reduce", lambda: self._wire.allreduce(views, *_given(opts)), tensors, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if not is_sim(tensors[0]):
            return self._cpu.broadcast(tensors, *_given(opts))
        views = [kernel_view(t) for t in tensors]
        return self.issue("broadcast", lambda: self._wire.broadcast(views, *_given(opts)), tensors, tensors)

    # Those that only the CPU has; see [Note: straight to gloo].

    def allgather(self, *args: Any, **options: Any) -> Any:
        return self._cpu.allgather(*args, **options)

    def barrier(self, *args: Any, **options: Any) -> Any:
        return self._cpu.barrier(*args, **options)

    def gather(self, *args: Any, **options: Any) -> Any:
        return self._cpu.gather(*args, **options)

    def scatter(self, *args: Any, **options: Any) -> Any:
        return self._cpu.scatter(*args, **options)

    def issue(
        self, what: str, carry: Callable[[], Any], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> SimWork:
        """As NCCL: on a stream of the group, after all that the caller's stream was given."""
        index = writes[0].device.index
        held = [*reads, *writes]
        with simulator.lock, torch.accelerator.device_index(index):
            if index not in self._streams:
                self._streams[index] = torch.Stream(torch.device("sim", index)).stream_id
            stream, number = self._streams[index], self._count
            self._count += 1
            simulator.wait_for(simulator.mark(sim.current_stream()), stream)

            def start(entry: Entry) -> None:
                held  # noqa: B018 - alive until it has ended
                self._started.tell(number + 1)
                self._jobs.put((entry, number, carry))

            entry = simulator.enqueue(stream, what, None, map(span, reads), map(span, writes), external=start)
            if not entry.done:
                self._waiting.append((number, entry))
                _watcher.wake()
            work = self._works[number] = SimWork(self, entry, stream, index, held)
            if self._aborted:
                self._end(entry, number, RuntimeError("the group was aborted"))
            return work

    # --- threads -------------------------------------------------------------------------------

    def _carry(self) -> None:
        """Moves the bytes of one collective after the other."""
        while (job := self._jobs.get()) is not None:
            entry, number, carry = job
            try:
                with torch.no_grad(), torch._C._DisableTorchDispatch():
                    carry().wait()
            except RuntimeError as error:  # the peer is gone: what a kernel would wait for never comes
                print(f"simccl: {entry.what} will not end: {str(error).splitlines()[0]}", flush=True)
                return
            self._end(entry, number, None)
            del job, entry, carry

    def start_wanted(self) -> bool:
        """Start what other ranks wait for; whether there is something that nobody has started."""
        unstarted = [each for each in self._waiting if not each[1].started]
        wanted = self._started.most() if unstarted else 0
        for number, entry in unstarted:
            if number < wanted:
                with simulator.lock:
                    if not entry.done:
                        simulator.advance(entry)
        return bool(unstarted)

    def _end(self, entry: Entry, number: int, error: BaseException | None) -> None:
        with simulator.lock:
            self._waiting = [each for each in self._waiting if each[1] is not entry]
            work = self._works.pop(number, None)
            if work is not None:
                work.error = error
            simulator.finish(entry)

    def abort(self) -> None:
        """End what will not end, with an error."""
        with simulator.lock:
            self._aborted = True
            for number, entry in list(self._waiting):
                self._end(entry, number, RuntimeError("the group was aborted"))
        self._jobs.put(None)
        with contextlib.suppress(ValueError):  # aborted before
            _watcher.groups.remove(self)

    def shutdown(self) -> None:
        self.abort()


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


class _Watcher:
    """A thread that polls while a group has a collective that was not started; see [Note: who wants it]."""

    def __init__(self) -> None:
        self.groups: list[SimGroup] = []
        self._thread: threading.Thread | None = None
        self._something = threading.Event()

    def wake(self) -> None:
        """Something may have to be started; the simulator's lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="simccl-watch", daemon=True)
            self._thread.start()
        self._something.set()

    def _watch(self) -> None:
        while self._something.wait():
            self._something.clear()
            while sum(group.start_wanted() for group in list(self.groups)):  # all of them, every time
                time.sleep(_POLL_S)


_watcher = _Watcher()


class _Started:
    """How many collectives each rank has started: shared memory of the ranks of one machine."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        if rank == 0:
            fd, path = tempfile.mkstemp(prefix="simccl-")
            os.ftruncate(fd, 8 * size)
            os.close(fd)
            store.set("started", path)
        path = store.get("started").decode()
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * size)
        store.set(f"opened/{rank}", "")
        if rank == 0:
            store.wait([f"opened/{each}" for each in range(size)])
            Path(path).unlink()

    def tell(self, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * self._rank, number)

    def most(self) -> int:
        return max(struct.unpack_from(f"{self._size}q", self._memory))


def register() -> None:
    """Make ``simccl`` the back end of torch.distributed for simulated devices."""
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", SimGroup, devices=["sim"])
