"""Storage of a rank's shards: a pool of host memory, and files on NVMe with an engine to reach them."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch

from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.config import MemoryConfig
from infinity.core.errors import StateError
from infinity.core.transfer import TransferEngine
from infinity.device.machine import missing_huge_pages
from infinity.device.memory import HostPool
from infinity.nvme.engines import make_engine
from infinity.nvme.probe import stripe_weights
from infinity.nvme.volume import Volume
from infinity.observe.timeline import Timeline, WatchedEngine
from infinity.optim.layout import CHUNK_NUMEL, StateLayout
from infinity.optim.rules import UpdateRule, default_rule
from infinity.shards.commits import Commits
from infinity.shards.saved import RunFiles, SavedRun
from infinity.shards.store import Resume, ShardStore
from infinity.shards.verified import BlockSums, VerifiedEngine, load_sums, salt_of


class Storage:
    """Host memory and files of one rank; opened before the model is built, and closed with the run.

    Args:
        memory: Budgets and directories.
        host_nbytes: The host budget, the same on every rank.
        dtype: The compute dtype.
        device: The device of this rank. For an accelerator host memory is pinned, and holds gradients too.

    Attributes:
        rule: Updates the shards, whose states have its ``layout``.
        host_pool: Staging buffers, and shards that stay in host memory.
        volume: Files on NVMe, which ``engine`` reaches and ``store`` divides; None without a directory.
        units_engine: The same engine for shards, which can be watched.
        commits: Writes this rank's commit records; None if no process could go on with the run.
        files: This rank's directories of the run; None without one.
        sums: Sums of the blocks in the files, by which every read is checked; None: without
            ``memory.verify``.
        chunk_numel: Elements of a shard that are staged at one time.
        resident_nbytes: The part of the budget that shards may take which stay; on an accelerator with their
            gradients.
    """

    def __init__(
        self, memory: MemoryConfig, host_nbytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.memory, self.host_nbytes, self.on_accelerator = memory, host_nbytes, device.type != "cpu"
        self.rule: UpdateRule = default_rule()
        self.layout: StateLayout = self.rule.layout(dtype)
        self._stack = contextlib.ExitStack()
        self.host_pool = self._stack.enter_context(contextlib.closing(HostPool(host_nbytes, device=device)))
        self.volume: Volume | None = None
        self.engine: TransferEngine | None = None
        self.units_engine: WatchedEngine | None = None
        self.store: ShardStore | None = None
        self.chunk_numel = CHUNK_NUMEL
        self.commits: Commits | None = None
        self.files: RunFiles | None = None
        self.sums: BlockSums | None = None
        staging = 0
        if memory.nvme:
            share = 2 if memory.resident else 1  # residents get at least the other half
            share *= 2 if self.on_accelerator else 1  # gradients wait in host memory, too
            self.chunk_numel = budget.chunk_numel(host_nbytes, share, self._itemsize, CHUNK_NUMEL)
            staging = budget.STAGED_CHUNKS * self.chunk_nbytes
        self.resident_nbytes = self._room_for_residents(staging)

    def open_files(
        self, run_id: str, ranks: Ranks, resume: Resume | None, timeline: Timeline, *, synced: bool,
        note: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Make this rank's files in every directory of ``memory.nvme``, or find them; none: do nothing.

        Args:
            resume: Whether an interrupted run of this id goes on; None: the id is new, and no process will
                look for it again.
            synced: Commits survive a power cut.
            note: Gets a line for people about each thing that the machine lacks.

        Raises:
            DiskError: A directory cannot be written.
            SettingError: ``memory.engine`` cannot be used here.
            StateError: The run cannot go on; says why.
        """
        if not self.memory.nvme:
            if resume == "must":
                raise StateError(f"run.resume=must, but the run {run_id} has no directory in memory.nvme")
            return
        files = RunFiles(self.memory, run_id, ranks, resume, self._stack, synced=synced, note=note)
        self.files = files
        own = None if files.saved is None else files.saved.own
        weights = stripe_weights([path.parent for path in files.paths])
        self.volume = Volume(list(files.paths), weights, None if own is None else own.spaces())
        self._stack.callback(self.volume.close)
        for line in (*self.volume.notes, missing_huge_pages()):
            if line:
                note(line)
        self.engine = make_engine(self.memory.engine, self.volume, note)
        if self.memory.verify:
            self.sums = BlockSums()
            for drive in range(len(files.paths)):
                self.sums.add(drive, salt_of(ranks.rank, drive))
            self.volume.on_zeros = self.sums.set_zeros
            self.engine = VerifiedEngine(self.engine, self.sums, self.volume)
            if own is not None:
                load_sums(self.sums, own, 0, note)
        self._stack.callback(self.engine.close)
        self.units_engine = WatchedEngine(self.engine, timeline)
        if timeline.enabled:
            self.engine = WatchedEngine(self.engine, timeline)
        if files.journal is not None and resume != "never" and self.memory.versions == 2:
            sums = tuple if self.sums is None else partial(self.sums.snapshot, len(files.paths))
            self.commits = Commits(files.journal, self.volume.sync if synced else None, sums)
            self._stack.callback(self.commits.close)
        self.store = ShardStore(
            self.volume, self.units_engine, self.host_pool, self.layout,
            versions=self.memory.versions, chunk_numel=self.chunk_numel,
        )  # fmt: skip

    @property
    def saved(self) -> SavedRun | None:
        """The last commit of an interrupted run, with which this one goes on."""
        return None if self.files is None else self.files.saved

    @property
    def keep(self) -> bool:
        """Return whether the files stay on disk at the end, if a process can go on with the run."""
        return self.files is not None and self.files.keep

    @keep.setter
    def keep(self, keep: bool) -> None:
        if self.files is not None:
            self.files.keep = keep

    def before_close(self, call: Callable[[], object]) -> None:
        """Run ``call`` when this is closed, before files and memory go."""
        self._stack.callback(call)

    def staged_chunks(self) -> int:
        """Chunks of updates in flight: all that residents leave room for, where nothing else is staged."""
        room = 0 if self.on_accelerator else self.host_nbytes - self.host_pool.leased_nbytes
        return max(budget.STAGED_CHUNKS, room // self.chunk_nbytes)

    @property
    def piece_nbytes(self) -> int:
        """The most that one buffer takes through which activations go to and from NVMe (bytes)."""
        nbytes = budget.piece_nbytes(self.host_nbytes - self.resident_nbytes)
        return min(nbytes, self.chunk_nbytes) if self.memory.nvme else nbytes

    def close(self) -> None:
        """Close the engine, remove the files, give back the memory. May be called twice."""
        self._stack.close()

    @property
    def _itemsize(self) -> int:
        return self.layout.weight_nbytes(1) + self.layout.state_nbytes(1)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that one chunk of an update takes."""
        return budget.rounded(self.chunk_numel * self._itemsize)

    def _room_for_residents(self, staging_nbytes: int) -> int:
        """The host budget but for staging, and beside an accelerator for what comes and goes (bytes)."""
        if not self.memory.nvme:
            return self.host_nbytes
        if not self.memory.resident:
            return 0
        room = self.host_nbytes - staging_nbytes
        return room // 2 if self.on_accelerator else room
