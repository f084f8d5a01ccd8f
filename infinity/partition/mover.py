"""Moves the full values of units: fetch, upload, gather; release.

[Note: where the shard lands]
The full buffer is leased first, and this rank's shard is read straight into its slice; with several ranks an
in-place all-gather fills the other slices. On an accelerator the shard is staged in pinned host memory and
uploaded by a thread with a stream of its own, so that fetch, upload and gather of different units overlap
each other and compute. The thread waits for the disk, the accelerator for events: a unit counts as present
when its copies are on the way. A shard that is already in accelerator memory is copied by the thread that
asks for it.

[Note: decoded after the gather]
A unit in a stored form is brought in that form into memory beside its full buffer, and a thread decodes it on
the device, on a stream of its own. The stored bytes of a tile of experts may be an item of their own, which
comes far ahead and stays: a few full buffers take turns, and a tile can be decoded again.

[Note: a unit that stays]
A unit that the next pass begins with keeps its full buffer during its update, which writes this rank's new
weights into their slice (on an accelerator: into a copy of it in pinned host memory).

[Note: slices of other nodes]
Those that came across a node's border for a gather stay in host memory, if there is room, and are current
until the unit's weights change. That and the order of gathers are the same on all ranks.

[Note: staging]
A shard larger than a piece of staging is read in pieces: while one is uploaded, the next is read into a
second buffer if there is room. Shards are uploaded in the order in which they were asked for, but one in host
memory not before its update has ended: others go first. One that found no buffer gets one at its turn; until
then no later shard takes one, which would come back only after it.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from infinity.comm.collectives import Collectives
from infinity.comm.nodes import PART_NBYTES, Kept
from infinity.comm.shared import SharedSlice
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier, UnitState
from infinity.core.nbytes import Transfer, rounded, stream
from infinity.device.accelerator import new_stream, on_stream, record, use_own_stream, wait_on_host
from infinity.device.machine import OrderedThreads, background_threads
from infinity.device.memory import CountingPool, HostBuffer, Lease, Pool
from infinity.partition.unit import StoredForm, Unit, UnitIndex

_CPU = torch.device("cpu")
S = UnitState
P = ParamSpec("P")
R = TypeVar("R")
#: Puts bytes, ``(n,)`` uint8, where the shard belongs, from the given byte on; blocking.
Upload = Callable[[Tensor, int], object]
#: Runs what compute waits for, and counts the seconds by cause.
Waits = Callable[[str, Callable[[], Any]], Any]

#: Units that are decoded on a CPU at one time, at most.
_MOST_DECODED = 4
#: The least on a CPU: while compute waits for one, its core decodes another.
_LEAST_DECODED = 2


class Stored(NamedTuple):
    """Names the stored bytes of a tile, from which its full values are decoded."""

    unit: int


#: What memory holds: the full values of a unit, by its index, or stored bytes.
Item = int | Stored


class Staging:
    """Brings shards to a device through a pool of host memory, in pieces of whole blocks."""

    def __init__(self, pool: Pool, piece_nbytes: int, device: torch.device = _CPU) -> None:
        self.pool, self.piece_nbytes, self.device = pool, piece_nbytes, device
        #: The thread that waits for the disk and for updates, and copies to the device.
        self.uploads = OrderedThreads(1, "infinity-upload", use_own_stream, device)
        self._numbers = itertools.count()
        self.leaving = new_stream(device)  # of copies to host memory, after compute and beside it
        self.within = new_stream(device)  # of copies inside the device's memory
        self._without = 0  # shards on their way that have no buffer
        self._lock = threading.Lock()

    def wait_for_uploads(self) -> None:
        """Block until the copies to the device that were asked for have read host memory."""
        self.upload(lambda: wait_on_host(record(self.device)))()

    def upload(self, call: Callable[[], object], after: Transfer | None = None) -> Callable[[], None]:
        """Let the thread make ``call`` at its turn, but not before ``after``; return what waits for it."""
        given, order = Transfer(), next(self._numbers)
        submit = partial(self.uploads.submit, partial(given.run, call), order)
        submit() if after is None else after.then(submit)
        return given.wait

    def bring(
        self, nbytes: int, who: str, fetch: Callable[[memoryview, int], Transfer], upload: Upload
    ) -> Callable[[], None]:
        """Start to bring a shard of ``nbytes`` bytes; return the call that completes it.

        Call it once, on the thread that completes every shard, in order. ``fetch`` starts to read the shard's
        bytes, from the given one on, into memory.
        """
        size = min(nbytes, self.piece_nbytes)
        with self._lock:
            lease = None if self._without else self.pool.try_lease(size, who=who)
            if lease is None:
                self._without += 1
        reading = None if lease is None else fetch(lease.memory, 0)

        def read(start: int, buffer: Lease) -> Transfer:
            if start == 0 and reading is not None:
                return reading
            return fetch(buffer.memory[: min(size, nbytes - start)], start)

        def ready() -> None:
            with ExitStack() as held:
                try:
                    buffers = [lease or self.pool.lease(size, who=who)]
                finally:
                    with self._lock:
                        if lease is None:
                            self._without -= 1
                held.callback(buffers[0].release)
                if nbytes > size and (second := self.pool.try_lease(size, who=who)) is not None:
                    held.callback(second.release)
                    buffers.append(second)
                landed = held.enter_context(closing(stream(range(0, nbytes, size), buffers, read)))
                for start, buffer in landed:
                    upload(buffer.tensor[: min(size, nbytes - start)], start)
                    buffer.record_use()

        return ready


class Arriving(NamedTuple):
    """Brings a unit: calls that wait until it has arrived, and until it is decoded."""

    ready: Callable[[], object]
    decoded: Callable[[], object] | None
    gathers: bool  # from other ranks


class KeptSlices:
    """Keeps slices that came from other ``nodes``, in memory of ``pool``: see [Note: slices of other nodes].

    It is for as many units as ``room_nbytes()`` says, on all ranks the same, frozen ones first.
    """

    def __init__(self, units: Sequence[Unit], pool: Pool, nodes: int, room_nbytes: Callable[[], int]) -> None:
        self._units, self._pool, self._others, self._room_nbytes = units, pool, nodes - 1, room_nbytes
        self._leases: dict[int, Lease] = {}
        self._weights: dict[int, object] = {}  # which ones are there, or will be once they are gathered
        self.choose()

    def choose(self) -> None:
        """Choose units anew. Nothing may be on its way; every rank must call."""
        self.close()
        left_nbytes = self._room_nbytes()
        for unit in sorted(self._units, key=lambda unit: bool(unit.trainable)):
            if rounded(nbytes := self._nbytes(unit)) <= left_nbytes:
                left_nbytes -= rounded(nbytes)
                self._leases[unit.index] = self._pool.lease(nbytes, who=f"{unit.name} from other nodes")

    def of(self, unit: Unit) -> Kept | None:
        """Return what the next gather of a unit uses, or keeps; None: nothing is kept."""
        lease, now = self._leases.get(unit.index), (unit.updates, unit.stored, unit.home.averaged)
        if lease is None or lease.nbytes != self._nbytes(unit):  # it has thawed
            return None
        current, self._weights[unit.index] = self._weights.get(unit.index) == now, now
        return Kept(lease, current)

    def forget(self, units: Iterable[int] | None = None) -> None:
        """Forget the slices of these units; None: of all."""
        for index in [*self._weights] if units is None else units:
            self._weights.pop(index, None)

    def close(self) -> None:
        self.forget()
        while self._leases:
            self._leases.popitem()[1].release()

    def _nbytes(self, unit: Unit) -> int:
        return self._others * (unit.shard_nbytes if unit.stored is None else unit.stored.shard_nbytes)


class Staying(NamedTuple):
    """Holds a unit's full buffer while the unit is updated; see [Note: a unit that stays]."""

    full: Lease
    shard: Lease | None  # on an accelerator, of this rank's slice, which is updated


@dataclass(slots=True)
class _Stored:
    lease: Lease
    ready: Callable[[], object]  # waits until they are here; may be called again
    stays: bool  # they are not given back as soon as they are decoded
    resident: bool = False  # the lease is that of host memory
    failed: bool = False  # they could not be read, and the use of the unit has raised the error


def _whole(lease: Lease | None) -> SharedSlice | None:
    """Return the memory of all ranks that a shard lies in; None: it is this rank's own."""
    buffer = None if lease is None else lease.lent
    return buffer if isinstance(buffer, SharedSlice) else None


def _never_inference(method: Callable[P, R]) -> Callable[P, R]:
    """Run outside ``torch.inference_mode`` and ``torch.func``, so that training can use the buffers."""

    @wraps(method)
    def normal(*args: P.args, **kwargs: P.kwargs) -> R:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if not (transformed or torch.is_inference_mode_enabled()):  # each tile comes here several times
            grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                return method(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(grad)
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
            if transformed:
                stack.enter_context(temporarily_clear_interpreter_stack())
            return method(*args, **kwargs)

    return normal


class UnitMover:
    """Moves the full values of units; the prefetcher says when.

    Full buffers are leased from ``pool`` (the device tier); ``staging`` exists only with an accelerator.
    ``wait_until_unused`` returns when no update reads or writes the weights that a unit stayed with.
    """

    def __init__(
        self, units: UnitIndex, pool: Pool | CountingPool, staging: Staging | None,
        collectives: Collectives | None, waits: Waits, wait_until_unused: Callable[[Unit], object],
        kept: KeptSlices | None = None,
    ) -> None:  # fmt: skip
        self.units, self.pool, self.staging = units, pool, staging
        self.collectives, self.waits, self._wait_until_unused = collectives, waits, wait_until_unused
        self.kept = kept
        self.attached: dict[int, Unit] = {}  # by the address of the flat buffer's storage
        self._arriving: dict[int, Arriving | Exception] = {}  # the error of a unit that failed
        self._stored: dict[int, _Stored] = {}  # of units whose stored bytes came first
        self._staying: dict[int, Staying] = {}
        decoders = 1 if staging else min(_MOST_DECODED, max(_LEAST_DECODED, background_threads()))
        device = staging.device if staging else _CPU
        self._decoding = ThreadPoolExecutor(decoders, "infinity-decode", use_own_stream, (device,))

    @_never_inference
    def start(self, item: Item) -> None:
        """Begin to bring an item; wait neither for the disk nor for other ranks.

        Full values are decoded from the unit's stored bytes if these are present or on their way; those of a
        unit that stayed follow its update.
        """
        if isinstance(item, Stored):
            unit = self.units[item.unit]
            assert unit.stored is not None
            self._stored[item.unit] = self._bring_stored(unit, unit.stored, stays=True)
            return
        unit, staying = self.units[item], self._staying.pop(item, None)
        lease = unit.lease = staying.full if staying else self.pool.lease(unit.nbytes, who=unit.name)
        gathers = self.collectives is not None and _whole(unit.home.lease) is None
        if staying is not None or unit.stored is None:
            ready = self._bring(unit, lease, unit.shard_nbytes, staying)
            self._arriving[item] = Arriving(self._gather(unit, lease, ready), None, gathers)
        else:
            stored = self._stored.get(item) or self._bring_stored(unit, unit.stored, stays=False)
            if unit.state in (S.ON_NVME, S.ON_HOST):  # decoded before
                unit.lifecycle.move(S.FETCHING if unit.home.tier is Tier.NVME else S.UPLOADING)
            decoded = self._decoding.submit(self._decode, unit, unit.stored, stored, lease)
            self._arriving[item] = Arriving(stored.ready, decoded.result, gathers)

    def shard(self, index: int) -> tuple[int, Callable[[int, int], Tensor]]:
        """Return the bytes of this rank's shard of a unit, and what reads a part of it for other ranks."""
        unit, lease = self.units[index], self.units[index].home.lease
        nbytes = unit.shard_nbytes if unit.stored is None else unit.stored.shard_nbytes
        if lease is not None:
            unit.home.updated_in_place()()
            return nbytes, partial(lease.tensor.narrow, 0)
        buffer = HostBuffer(min(nbytes, PART_NBYTES))
        device = _CPU if self.staging is None else self.staging.device

        def read(start: int, size: int) -> Tensor:
            unit.home.read(buffer.memory[:size], start).wait()
            return buffer.tensor[:size].to(device)

        return nbytes, read

    def stored_nbytes(self, index: int) -> int:
        """Return what the unit takes before it is decoded (bytes); 0: it comes in one step."""
        form = self.units[index].stored
        return 0 if form is None else rounded(form.nbytes)

    def _gather(self, unit: Unit, lease: Lease, ready: Callable[[], object]) -> Callable[[], object]:
        """Complete a buffer with other ranks' shards when this rank's is ``ready``; return the wait.

        Where host memory has those of all ranks, ``ready`` brings them.
        """
        if self.staging is not None and unit.home.is_on_device:  # there is nothing to wait for
            given = Transfer()
            with on_stream(self.staging.within):
                given.run(ready)
            ready = given.wait
        elif self.staging is not None:
            updating, whole = unit.home.updating, _whole(unit.home.lease)
            holds = updating is not None and updating.update.holds_fetches and whole is None
            ready = self.staging.upload(ready, updating if holds and unit.home.tier is Tier.HOST else None)
        if self.collectives is None or _whole(unit.home.lease) is not None:
            return ready

        def bring() -> Tensor:
            ready()
            full: Tensor = lease.tensor
            return full

        kept = None if self.kept is None else self.kept.of(unit)
        return self.collectives.gather(unit.index, unit.name, bring, kept=kept).wait

    def _bring_stored(self, unit: Unit, form: StoredForm, *, stays: bool) -> _Stored:
        """Begin to bring the stored form, unless it is here: see [Note: decoded after the gather]."""
        held = unit.home.lease
        if held is not None and self.staging is None and len(held.whole) >= form.nbytes:
            unit.lifecycle.move(S.UPLOADING)
            return _Stored(held, lambda: None, stays=True, resident=True)
        lease = self.pool.lease(form.nbytes, who=f"stored form of {unit.name}")
        ready = self._gather(unit, lease, self._bring(unit, lease, form.shard_nbytes))
        return _Stored(lease, ready, stays)

    def _decode(self, unit: Unit, form: StoredForm, stored: _Stored, full: Lease) -> None:
        with ExitStack() as held:
            if self.collectives is None and not stored.stays:  # a peer may write on after a failure
                held.callback(stored.lease.release)
            stored.ready()
            form.decode(stored.lease.whole[: form.nbytes], full.tensor.view(unit.dtype))
            full.record_use()
            if stored.stays:
                stored.lease.record_use()
            else:
                held.callback(stored.lease.release)

    def _bring(
        self, unit: Unit, lease: Lease, nbytes: int, staying: Staying | None = None
    ) -> Callable[[], object]:
        """Start to bring this rank's shard into its slice of ``lease``; return the call that completes it.

        From memory that ranks share, all shards come.
        """
        begin, source = unit.rank * nbytes, staying.shard if staying else unit.home.lease
        unit.lifecycle.move(S.FETCHING if staying or source is None else S.UPLOADING)
        if staying or source is not None:
            updated = unit.home.updated_in_place()
            return partial(self._upload, updated, source, lease, begin, staying is not None)
        if self.staging is None:
            return unit.home.read(lease.memory[begin : begin + nbytes]).wait

        def upload(piece: Tensor, start: int) -> None:
            lease.tensor.narrow(0, begin + start, len(piece)).copy_(piece, non_blocking=True)

        bring = self.staging.bring(nbytes, unit.name, unit.home.read, upload)

        def ready() -> None:
            bring()
            lease.record_use()

        return ready

    def _upload(
        self, updated: Callable[[], object], shard: Lease | None, lease: Lease, begin: int, gives_back: bool
    ) -> None:
        """Copy a shard in memory, once it is ``updated``; None: that has written to the slice itself."""
        updated()
        if shard is not None:
            if (shared := _whole(shard)) is None:
                lease.tensor.narrow(0, begin, shard.nbytes).copy_(shard.tensor, non_blocking=True)
            else:
                shared.lock_whole()
                lease.tensor.copy_(shared.whole[: lease.nbytes], non_blocking=True)
            shard.record_use()
            lease.record_use()
            if gives_back:
                shard.release()

    def finish(self, index: int) -> None:
        """Wait until the full values are there and the parameters view them."""
        arriving = self._arriving.get(index)
        if arriving is not None:  # most uses find the unit here
            self._finish(self.units[index], arriving)

    @_never_inference
    def _finish(self, unit: Unit, arriving: Arriving | Exception) -> None:
        try:
            if isinstance(arriving, Exception):
                raise arriving
            updating = unit.home.updating
            cause = "update" if updating is not None and updating.update.holds_fetches else "read"
            try:
                self.waits("collective" if arriving.gathers else cause, arriving.ready)
            finally:
                if arriving.decoded is not None:
                    self.waits("decode", arriving.decoded)
        except Exception as error:  # the next use raises it, too
            self._arriving[unit.index] = error
            if unit.index in self._stored:
                self._stored[unit.index].failed = True
            raise
        del self._arriving[unit.index]
        assert unit.lease is not None
        if arriving.gathers:
            unit.lifecycle.move(S.GATHERING)
        unit.lifecycle.move(S.GATHERED)
        flat: Tensor = unit.lease.tensor.view(unit.dtype)
        self.attached[flat.untyped_storage().data_ptr()] = unit
        unit.attach(flat)

    def release(self, item: Item) -> None:
        """Drop an item; of a tile the full values before the stored bytes."""
        if isinstance(item, Stored):
            unit, stored = self.units[item.unit], self._stored.pop(item.unit)
            if unit.state in (S.FETCHING, S.UPLOADING):
                unit.lifecycle.move(unit.home.resting_state)
            if not stored.resident:
                told = (Exception,) if stored.failed else ()
                with suppress(*told):  # the error of a use is not that of the release, too
                    self._wait_for_writers(stored.ready, stored.lease)
                    stored.lease.release()
        elif (staying := self._staying.pop(item, None)) is not None:
            self._wait_until_unused(self.units[item])
            staying.full.release()
            if staying.shard is not None:
                staying.shard.release()
        elif (lease := self.take(item)) is not None:
            lease.release()

    def _wait_for_writers(self, wait: Callable[[], object], lease: Lease) -> None:
        """Wait until nothing more is written to a buffer; release one that could not be filled."""
        try:
            wait()
        except Exception:
            if self.collectives is None:  # else one that has failed may still write there
                lease.release()
            raise

    def stay(self, index: int) -> Callable[[], Tensor]:
        """Keep a released unit's full buffer; return a call that gives the slice to update (host memory)."""
        unit, full = self.units[index], self.take(index)
        assert full is not None, "who stays is present"
        if self.staging is None:
            self._staying[index] = Staying(full, None)
            return lambda: unit.shard_of(full.tensor.view(unit.dtype))
        shard = self.staging.pool.lease(unit.shard_nbytes, who=f"weights of {unit.name}")
        self.copy_to_host(unit, full, shard)
        self._staying[index] = Staying(full, shard)
        return lambda: shard.tensor.view(unit.dtype)

    @_never_inference
    def copy_to_host(self, unit: Unit, full: Lease, shard: Lease) -> None:
        """Copy this rank's slice of a full buffer to pinned memory, after compute and beside it."""
        full.record_use()
        with on_stream(None if self.staging is None else self.staging.leaving):
            own = unit.shard_of(full.tensor.view(unit.dtype))
            shard.tensor.view(unit.dtype).copy_(own, non_blocking=True)
            shard.record_use()
            full.record_use()

    @_never_inference
    def take(self, index: int) -> Lease | None:
        """Release a unit but keep its full buffer; the caller must release the lease that is returned.

        If the unit could not be read, release the buffer, too, and raise the error.
        """
        unit, arriving = self.units[index], self._arriving.get(index)
        if isinstance(arriving, Arriving):
            assert unit.lease is not None
            try:
                self._wait_for_writers(arriving.decoded or arriving.ready, unit.lease)
            except Exception:
                del self._arriving[index]
                if index in self._stored:
                    self._stored[index].failed = True
                self._detach(unit)
                raise
        failed, lease = isinstance(self._arriving.pop(index, None), Exception), self._detach(unit)
        return None if failed and self.collectives is not None else lease  # a peer may still write there

    def _detach(self, unit: Unit) -> Lease | None:
        if unit.lease is None:
            return None
        unit.check_memory()
        lease, unit.lease = unit.lease, None
        try:
            if unit.flat is not None:
                del self.attached[unit.flat.untyped_storage().data_ptr()]
                unit.detach()
        except StateError:  # a parameter was written: the stored values are fetched when they are used next
            lease.release()
            raise
        finally:
            home = unit.home.resting_state
            if unit.state is not home:  # else its start raised
                unit.lifecycle.move(home)
        return lease

    def close(self) -> None:
        self._decoding.shutdown()
        if self.staging is not None:
            self.staging.uploads.close()
        if self.kept is not None:
            self.kept.close()
