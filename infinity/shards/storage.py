"""Storage of a rank's shards: a pool of host memory, and room on NVMe with an engine to reach it.

[Note: the layout of a unit on disk] A version of a unit is its shard's weights, end to end, and its shard's
state, chunk by chunk, the fields of a chunk one after the other. So a forward pass reads the weights in one
sweep, and an update reads and writes each chunk's state in one request sequence.

[Note: room as it is needed] A unit begins with one version of its weights. A chunk's exact part gets room
when it is first not zero, which never happens for a checkpoint in the compute dtype. Moments and the second
version get room when the unit is first trained.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.errors import StateError
from infinity.core.nbytes import Extent, Transfer, TransferEngine, rounded
from infinity.device.machine import missing_huge_pages
from infinity.device.memory import HostPool, Lease, Pool
from infinity.nvme.engines import make_engine
from infinity.nvme.probe import stripe_weights
from infinity.nvme.volume import Volume
from infinity.observe.timeline import Timeline, WatchedEngine
from infinity.optim.rule import Rule
from infinity.optim.rules import CHUNK_NUMEL
from infinity.optim.state import StateLayout, store_master
from infinity.shards.copies import clear_copies, open_copies
from infinity.shards.journal import ChunkExtents, DurabilityConfig, Journal, Resume, Version
from infinity.shards.saved import RunFiles, SavedRun
from infinity.shards.verified import VerifiedEngine, load_sums


def chunk_places(shard_numel: int, chunk_numel: int) -> list[tuple[int, int]]:
    """Return the first element and the number of elements of every chunk of a shard."""
    starts = range(0, shard_numel, chunk_numel)
    return [(start, min(chunk_numel, shard_numel - start)) for start in starts]


class ShardStore:
    """Room on NVMe for the shards of this rank; moves their chunks through memory of ``pool``."""

    def __init__(
        self, volume: Volume, engine: WatchedEngine, pool: Pool, layout: StateLayout, *,
        versions: int, chunk_numel: int,
    ) -> None:  # fmt: skip
        self.volume, self.engine, self.pool, self.layout = volume, engine, pool, layout
        self.versions, self.chunk_numel = versions, chunk_numel  # versions: places of a newly trained unit

    def weights(self, places: Iterable[tuple[int, int]], name: str) -> Version:
        """Make room for the weights of one version; DiskError: the file system is full."""
        return Version(
            tuple(
                ChunkExtents(start, numel, self.volume.allocate(self.layout.weight_nbytes(numel), what=name))
                for start, numel in places
            )
        )

    def with_state(self, chunk: ChunkExtents, name: str, *, moments: bool) -> ChunkExtents:
        """Return ``chunk`` with extents of zeros for its exact part, if it has none, and for ``moments``."""
        room = partial(self.volume.allocate, what=name, zeroed=True)
        _, of_exact, of_moments = self.layout.parts_nbytes(chunk.numel)
        if of_exact and not chunk.exact.pieces:
            chunk = replace(chunk, exact=room(of_exact))
        return replace(chunk, moments=room(of_moments)) if moments and of_moments else chunk

    def free_versions(self, versions: Iterable[Version]) -> None:
        """Give back extents that no unit uses any more."""
        for chunk in (chunk for version in versions for chunk in version.chunks):
            self.volume.free(chunk.weight)
            self.volume.free(chunk.state)

    @contextmanager
    def reading(self, chunk: ChunkExtents, room: Lease | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Yield weights and state of a chunk, valid in the context; in ``room``, or in memory of the pool."""
        nbytes = self.layout.nbytes(chunk.numel)
        with nullcontext(room) if room is not None else self.pool.lease(nbytes, who="saved states") as lease:
            weight, state = self.read(chunk, lease)
            yield weight, *state

    def read(self, chunk: ChunkExtents, lease: Lease) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Read a chunk, and derive or zero the fields that it does not have on NVMe; blocking."""
        weight, state = self.layout.chunk_views(lease.tensor, chunk.numel)
        for transfer in [self.engine.read(*part) for part in self._parts(chunk, lease.memory)]:
            transfer.wait()
        if not chunk.exact.pieces:
            store_master(self.layout, weight.float(), weight, state)
        if not chunk.moments.pieces:
            self.layout.store_moments(state, None)
        return weight, state

    def write(self, chunk: ChunkExtents, lease: Lease) -> list[Transfer]:
        """Start to write the fields for which a chunk has room on NVMe."""
        return [self.engine.write(*part) for part in self._parts(chunk, lease.memory)]

    def _parts(self, chunk: ChunkExtents, memory: memoryview) -> Iterator[tuple[Extent, memoryview]]:
        begin = 0
        for extent, nbytes in zip(chunk.parts, self.layout.parts_nbytes(chunk.numel), strict=True):
            if extent.pieces:
                yield extent, memory[begin : begin + nbytes]
            begin += nbytes


class Storage:
    """Host memory and files of one rank; opened before the model is built, and closed with the run.

    The host budget is the same on every rank; its memory is page-locked for an accelerator.
    """

    def __init__(
        self, memory: MemoryConfig, host_nbytes: int, dtype: torch.dtype, device: torch.device, rule: Rule
    ) -> None:
        self.memory, self.host_nbytes, self.on_accelerator = memory, host_nbytes, device.type != "cpu"
        self.rule, self.layout = rule, rule.layout(dtype)
        self.stack = contextlib.ExitStack()  # closes the engine, removes the files, releases the memory
        self.host_pool = self.stack.enter_context(contextlib.closing(HostPool(host_nbytes, device=device)))
        self.volume: Volume | None = None  # files on NVMe; None without a directory, as what follows
        self.engine: TransferEngine | None = None
        self.store: ShardStore | None = None
        self.files: RunFiles | None = None  # this rank's directories of the run
        self.saved: SavedRun | None = None  # the last commit of the interrupted run that this one continues
        self.commits: Journal | None = None  # None if no process could go on with the run
        self.sums: VerifiedEngine | None = None  # checks every read; None: without memory.verify
        # Elements of a staged chunk; bytes for shards that stay, and beside an accelerator their gradients.
        self.chunk_numel, self.resident_nbytes = CHUNK_NUMEL, host_nbytes
        if memory.nvme:
            share = 2 if memory.resident else 1  # residents get at least the other half
            share *= 2 if self.on_accelerator else 1  # gradients wait in host memory, too
            self.chunk_numel = budget.chunk_numel(
                host_nbytes, share, self.layout.bytes_per_element, CHUNK_NUMEL, self.layout.quantum
            )
            room = host_nbytes - budget.STAGED_CHUNKS * self.chunk_nbytes
            self.resident_nbytes = (room // 2 if self.on_accelerator else room) if memory.resident else 0

    def use(self, rule: Rule) -> None:
        """Let another rule update the shards, none of which has moments yet; SettingError: no room for it."""
        layout, room_nbytes = rule.layout(self.layout.dtype), self.host_nbytes - self.resident_nbytes
        staged_nbytes = budget.STAGED_CHUNKS * rounded(layout.nbytes(self.chunk_numel))
        if self.memory.nvme and (self.chunk_numel % layout.quantum or staged_nbytes > room_nbytes):
            raise SettingError(
                "optim.name", self.rule.name, f"{rule.name}, named before the model is built, as memory.host "
                "is small"
            )  # fmt: skip
        self.rule, self.layout = rule, layout
        if self.store is not None:
            self.store.layout = layout

    def settled_nbytes(self, trained: Iterable[tuple[int, int]], *, planned: bool) -> int:
        """Return the bytes for shards that stay, given those of gradients and weights of what trains.

        ``planned``: a plan says which activations leave device memory.
        """
        if planned or not (self.on_accelerator and self.memory.nvme and self.memory.resident):
            return self.resident_nbytes
        room = self.host_nbytes - budget.STAGED_CHUNKS * self.chunk_nbytes
        gradients, weights = (sum(map(rounded, each)) for each in zip((0, 0), *trained, strict=True))
        return budget.settled_nbytes(room, gradients, weights)

    def open_files(
        self, run_id: str, ranks: Ranks, resume: Resume | None, timeline: Timeline,
        durability: DurabilityConfig, note: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Make or find this rank's files in every directory of ``memory.nvme``; see :class:`RunFiles`."""
        if not self.memory.nvme:
            if resume == "must":
                raise StateError(f"run.resume=must, but the run {run_id} has no directory in memory.nvme")
            return
        synced = durability.survives == "power"
        files = RunFiles(self.memory, run_id, ranks, resume, self.stack, synced=synced, note=note)
        self.files, self.saved = files, files.saved
        weights = stripe_weights(files.folders)
        self.volume = Volume(list(files.paths), weights, None if files.own is None else files.own.spaces)
        self.stack.callback(self.volume.close)
        for line in (*self.volume.notes, missing_huge_pages()):
            if line:
                note(line)
        self.engine = make_engine(self.memory.engine, self.volume, note)
        if self.memory.verify:
            self.engine = self.sums = VerifiedEngine(self.engine, self.volume)
            self.sums.add(0, ranks.rank, len(files.paths))
            if files.own is not None:
                load_sums(self.sums, files.own, 0, note)
        self.stack.callback(self.engine.close)
        units_engine = WatchedEngine(self.engine, timeline)
        if timeline.enabled:
            self.engine = WatchedEngine(self.engine, timeline)
        if files.journal is not None and resume != "never" and self.memory.versions == 2:
            self.commits = files.journal
            self.commits.landed = partial(self._land_commit, len(files.paths), synced=synced)
            if durability.copies == 1:
                clear_copies(files.folders)
            else:
                check = (lambda extent, memory: None) if self.sums is None else self.sums.check
                self.commits.copies = open_copies(files, ranks, self.volume, check, note, synced=synced)
            if self.commits.copies is not None:
                self.stack.callback(self.commits.copies.close)
            self.stack.callback(self.commits.close)  # before the files that it syncs
        elif durability.copies > 1:
            note(
                "durability.copies=2: no step of this run is kept, so none is copied; name the run (run.name)"
            )
        self.store = ShardStore(
            self.volume, units_engine, self.host_pool, self.layout,
            versions=self.memory.versions, chunk_numel=self.chunk_numel,
        )  # fmt: skip

    def _land_commit(self, drives: int, *, synced: bool) -> list[bytes]:
        """Make what was written durable, and return each drive's sums of blocks; see :class:`Journal`."""
        if synced and self.volume is not None:
            self.volume.sync()
        return [] if self.sums is None else self.sums.snapshot(drives)

    @property
    def keep(self) -> bool:
        """Return whether a named run's files stay on disk at the end, so that it can be resumed."""
        return self.files is not None and self.files.keep

    @keep.setter
    def keep(self, keep: bool) -> None:
        if self.files is not None:
            self.files.keep = keep

    def staged_chunks(self) -> int:
        """Return how many chunks of updates may be in flight: on the CPU, what residents leave room for."""
        room = 0 if self.on_accelerator else self.host_nbytes - self.host_pool.leased_nbytes
        return max(budget.STAGED_CHUNKS, room // self.chunk_nbytes)

    @property
    def piece_nbytes(self) -> int:
        """The most bytes of one buffer that moves activations to and from NVMe."""
        nbytes = budget.piece_nbytes(self.host_nbytes - self.resident_nbytes)
        return min(nbytes, self.chunk_nbytes) if self.memory.nvme else nbytes

    @property
    def chunk_nbytes(self) -> int:
        """The bytes of the buffer of one chunk of an update."""
        return rounded(self.layout.nbytes(self.chunk_numel))
