"""The frozen base of a fine-tune, kept once on NVMe for every run of the same checkpoint.

[Note: what is hashed, and what is trusted]
A base is made of the bytes of its checkpoint's files. To hash those for each run would cost what loading
them costs, so they are not read: the key has each file's inode, size and times of its last change, which
the file system sets anew whenever a file is written, copied or replaced. The run that makes a base looks at
them before and after the files are read, and shares nothing if they differ. All else that decides what the
bytes are is in the key, too: names, shapes and places of all parameters, dtype, ranks, chunks, the model's
config, and the versions of the libraries that convert tensors. What is hashed is the base: every chunk while
it is written, and again by each run that shares it, before it is used. That reads every byte once, past the
page cache, while the chunks before it are hashed, and writes nothing.

So trusted are the file system's times, and every program that may write this user's files not to forge a
base together with its digests.

[Note: what lies in a base]
Units that have all their values from the checkpoint and found no room in host memory when the base was
made. A later run takes of them what it needs, and keeps what the base lacks in its own files, as ever.
"""

import contextlib
import hashlib
import json
import os
import shlex
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from infinity.core.errors import DiskError
from infinity.core.extent import Extent, Piece
from infinity.core.nbytes import format_nbytes
from infinity.core.transfer import Lease, Pool, TransferEngine
from infinity.nvme.base import BaseChunk, BaseFiles, Chunks, DamagedBaseError, SealedBase
from infinity.observe.messages import log
from infinity.partition.unit import Unit
from infinity.shards.storage import Storage
from infinity.shards.store import ChunkExtents, ShardStore, Version

#: Chunks that are read and hashed at one time: with two that are loaded they fit the room for staging.
_READ_AHEAD = 3
#: Changed whenever the meaning of a base's bytes changes.
_FORMAT = 2
_DIFFERS = "has another SHA-256 than when it was written"


class SharedBase:
    """Places units in extents that runs share, while a checkpoint is loaded.

    Args:
        storage: Of the run.
        stamp: Says which bytes the checkpoint's files hold; see [Note: what is hashed, and what is trusted].
        rank: This rank.
        world_size: Ranks that share each unit.
    """

    def __init__(self, storage: Storage, stamp: Callable[[], str], rank: int, world_size: int) -> None:
        self._storage, self._rank, self._world_size = storage, rank, world_size
        self._stamp, self._began = stamp, stamp()
        self._wanted: Mapping[int, Unit] = {}
        self._part: _BaseReader | _BaseWriter | None = None
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """Lines for people about the base that was read or written."""
        return self._notes

    @contextlib.contextmanager
    def sharing(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, places of ``units`` may be asked for; afterwards the base is whole, and read only.

        Raises:
            DiskError: It could not be written; nothing has its name then.
        """
        self._wanted = {unit.index: unit for unit in units}
        try:
            yield
            if self._part is not None:
                self._notes += self._part.end()
        finally:
            part, self._part, self._wanted = self._part, None, {}
            if part is not None:
                part.close()

    def place(self, unit: Unit) -> bool:
        """Place a new unit in the base; False if it has no place there.

        If the store calls the unit shared, its values are there, too, and were compared with their digests.

        Raises:
            DiskError: There is no room.
        """
        if unit.index not in self._wanted or self._storage.store is None:
            return False
        if self._part is None:
            self._part = self._find()
        return self._part.place(unit)

    def wrote(self, unit: Unit, memory: Sequence[memoryview]) -> None:
        """Take in the next chunk of ``unit``, which is on its way to the disk; blocking."""
        if isinstance(self._part, _BaseWriter):
            self._part.wrote(unit, memory)

    def _find(self) -> "_BaseReader | _BaseWriter":
        """The base to read or to write; blocking while another run writes it."""
        storage = self._storage
        assert storage.store is not None
        files = BaseFiles(storage.memory.nvme, self._make_key(storage.store), self._rank, self._world_size)
        try:
            sealed = files.find()
        except DamagedBaseError as error:
            log.warning("%s; it is written anew", error)
            sealed = None
        if sealed is not None:
            return _BaseReader(storage, files, sealed, self._wanted)
        return _BaseWriter(storage, files, lambda: self._stamp() == self._began)

    def _make_key(self, store: ShardStore) -> str:
        """Return the base's key, 32 hexadecimal digits: see [Note: what is hashed, and what is trusted]."""
        units = [
            [unit.index, unit.numel, *([s.name, s.offset, list(s.shape)] for s in unit.segments)]
            for unit in self._wanted.values()
        ]
        dtype = str(self._storage.layout.dtype)
        of = [_FORMAT, os.getuid(), self._began, dtype, self._world_size, store.chunk_numel, units]
        return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]


class _BaseReader:
    """Shares what a sealed base holds, once it was compared with its digests.

    Args:
        files: Where the base lies.
        sealed: Goes with the volume of ``storage``.
        wanted: Units that may lie in it.
    """

    def __init__(
        self, storage: Storage, files: BaseFiles, sealed: SealedBase, wanted: Mapping[int, Unit]
    ) -> None:
        assert storage.volume is not None
        assert storage.engine is not None
        assert storage.store is not None
        self._files, self._sealed, self._store = files, sealed, storage.store
        first = storage.volume.add_sealed(sealed.files)
        self._versions = {
            index: version
            for index, chunks in sorted(sealed.shards.items())
            if index in wanted and (version := self._version(wanted[index], chunks, first))
        }
        digests = {index: [chunk.sha256 for chunk in sealed.shards[index]] for index in self._versions}
        self._compared = _compare(storage.engine, storage.host_pool, self._versions, digests)
        self._damaged = [f"unit {index}" for index in sealed.shards if index not in self._versions]
        self._shared_nbytes = 0

    def place(self, unit: Unit) -> bool:
        version = self._versions.get(unit.index)
        if version is None:
            return False
        error = next(error for index, error in self._compared if index == unit.index)
        if error:
            self._damaged.append(f"{unit.name}: {error}")
            return False
        self._store.share(unit.index, unit.name, version)
        self._shared_nbytes += sum(c.weight.nbytes + c.exact.nbytes for c in version.chunks)
        return True

    def end(self) -> list[str]:
        path = self._files.paths[0]
        if self._damaged:
            self._files.unlink(self._sealed.files)
            log.warning(
                "%s is damaged (%s). What differs was read from the checkpoint again and lies in this run's "
                "own files; the base is forgotten, and the next run makes a new one. Check the drive (dmesg, "
                "smartctl)",
                path,
                "; ".join(self._damaged),
            )
        nbytes = format_nbytes(self._shared_nbytes)
        return [
            f"the frozen base was there: {nbytes} of {path.parent} compared with their hashes, none written"
        ]

    def close(self) -> None:
        self._compared.close()

    def _version(self, unit: Unit, chunks: Chunks, first: int) -> Version | None:
        """Return the version of ``unit`` in the base; None where its chunks are not those of this run."""
        places = self._store.places(unit.shard_numel)
        version = Version(
            tuple(
                ChunkExtents(start, numel, _moved(chunk.weight, first), _moved(chunk.exact, first))
                for (start, numel), chunk in zip(places, chunks, strict=False)
            )
        )
        return version if len(chunks) == len(places) and self._store.fits(version) else None


class _BaseWriter:
    """Takes in units while they are loaded; seals the base at the end.

    Args:
        files: Where it will lie, if they are claimed; else nothing is taken in.
        unchanged: Whether the checkpoint is what it was.
    """

    def __init__(self, storage: Storage, files: BaseFiles, unchanged: Callable[[], bool]) -> None:
        assert storage.volume is not None
        assert storage.store is not None
        self._files, self._unchanged = files, unchanged
        self._volume, self._store = storage.volume, storage.store
        self._first = self._volume.add(storage.draft_paths()) if files.claimed else 0
        self._digests: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}

    def place(self, unit: Unit) -> bool:
        if not self._files.claimed:
            return False
        self._files.heartbeat()
        self._store.allocate(unit.index, unit.shard_numel, unit.name, self._first)
        self._digests[unit.index], self._names[unit.index] = [], unit.name
        return True

    def wrote(self, unit: Unit, memory: Sequence[memoryview]) -> None:
        if unit.index in self._digests:
            self._digests[unit.index].append(_digest(memory))

    def end(self) -> list[str]:
        if not self._digests:
            return []
        if not self._unchanged():
            return ["the checkpoint's files changed while they were read: the frozen base is not shared"]
        versions = {index: self._store.version(index, 0) for index in self._digests}
        shards = {
            index: tuple(
                BaseChunk(_moved(c.weight, -self._first), _moved(c.exact, -self._first), digest)
                for c, digest in zip(version.chunks, self._digests[index], strict=True)
            )
            for index, version in versions.items()
        }
        drafts = self._volume.cut(self._first)
        self._volume.seal(self._first, self._files.publish(drafts, shards))
        for index, version in versions.items():
            self._store.share(index, self._names[index], version)
        nbytes = format_nbytes(sum(nbytes for _, nbytes in drafts))
        folders = " ".join(shlex.quote(str(folder)) for folder in self._files.folders)
        line = (
            f"the frozen base, {nbytes} per rank, stays in {self._files.folders[0]}: the next run of this "
            f"checkpoint starts from it, and runs at the same time share it; to remove it: rm -r {folders}"
        )
        return [line]

    def close(self) -> None:
        self._files.release()


def _compare(
    engine: TransferEngine, pool: Pool, versions: Mapping[int, Version], digests: Mapping[int, Sequence[str]]
) -> Generator[tuple[int, str]]:
    """Read units from disk, in order, and yield what is wrong with each; empty: nothing.

    While chunks are hashed the next are read, also of the next unit. Close it to give back its memory.

    Args:
        engine: Reads them.
        pool: Lends the memory of one chunk, and of more if it can.
        versions: Their places, by index.
        digests: The SHA-256 of each chunk, as hexadecimal digits.
    """
    to_read = deque(chunk for version in versions.values() for chunk in version.chunks)
    reading: deque[Future[str]] = deque()
    with ThreadPoolExecutor(_READ_AHEAD, "infinity-hash") as hashers:
        for index, version in versions.items():
            errors = []
            for number, sha256 in enumerate(digests[index]):
                while to_read and len(reading) < _READ_AHEAD:
                    nbytes = to_read[0].weight.nbytes + to_read[0].exact.nbytes
                    take = pool.try_lease if reading else pool.lease
                    lease = take(nbytes, who="comparing the frozen base")
                    if lease is None:
                        break
                    reading.append(hashers.submit(_hash_stored, engine, lease, to_read.popleft()))
                try:
                    error = "" if reading.popleft().result() == sha256 else _DIFFERS
                except DiskError as failure:
                    error = f"cannot be read ({failure})"
                errors += [f"chunk {number} of {len(version.chunks)} {error}"] if error else []
            yield index, ", ".join(errors)


def _hash_stored(engine: TransferEngine, lease: Lease, chunk: ChunkExtents) -> str:
    """Return the SHA-256 of a chunk on disk, read into ``lease``, which is released; blocking.

    Raises:
        DiskError: It cannot be read.
    """
    with lease, contextlib.ExitStack() as transfers:  # all end before the lease does, also after an error
        memory, begin = [], 0
        for extent in (chunk.weight, chunk.exact):
            if extent.pieces:
                memory.append(lease.memory[begin : begin + extent.nbytes])
                transfers.callback(engine.read(extent, memory[-1]).wait)
                begin += extent.nbytes
        transfers.close()
        return _digest(memory)


def _digest(memory: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in memory:
        digest.update(part)
    return digest.hexdigest()


def _moved(extent: Extent, by: int) -> Extent:
    """The same places in files that have other numbers."""
    return Extent(tuple(Piece(piece.file + by, piece.offset, piece.nbytes) for piece in extent.pieces))
