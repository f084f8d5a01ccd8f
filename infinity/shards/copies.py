"""Keeps a copy of each rank's commits on the next node's drives (``durability.copies``), and brings it back.

[Note: the same bytes at the same offsets]
A copy is a journal and files of another name, which have the committed versions at the offsets of the rank's
own files. Before a commit enters the rank's journal, what changed since the last one is read back from the
drive, beside training, and written there; then the copy's journal gets the record. So a copy has every commit
that its rank has, and neither loses a version before the next commit is whole in both: the barrier of
:mod:`infinity.shards.journal` holds for both.
"""

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from infinity.comm.ranks import Ranks, own_address, peer_errors
from infinity.core.errors import DiskError, InfinityError, PeerError, first_line
from infinity.core.files import create_file, open_found
from infinity.core.nbytes import Extent, Piece
from infinity.nvme.volume import Volume, open_direct, read_piece
from infinity.shards.journal import (
    CommitRecord,
    CorruptJournalError,
    Journal,
    RankFiles,
    commit_of_parts,
    parts_of_commit,
    read_journal,
)
from infinity.shards.saved import PART_NBYTES, files_in, parts_of, pieces_of, write_piece

#: What a message is: its kind, the file, and the offset there, and the bytes that follow.
_MESSAGE = struct.Struct("!BIQQ")
_BEGIN, _WRITE, _RETIRE, _COMMIT, _INVALIDATE = range(5)
_TOKEN_NBYTES = 32
#: The longest silence of the rank whose copy is here, at the end, that is waited for (s).
_FAREWELL_S = 5.0


class Copies:
    """Copies this rank's commits to the rank one node further, and keeps those of the rank one node before.

    All ranks construct one together. The journal's thread calls what sends; another thread keeps.
    ``check`` compares bytes that were read back with their sums; ``held`` is the commit that the run went on
    with in the rank's own files.
    """

    def __init__(
        self, ranks: Ranks, per_node: int, volume: Volume, folders: Sequence[Path], owner: RankFiles, *,
        held: CommitRecord | None, check: Callable[[Extent, memoryview], object], synced: bool,
    ) -> None:  # fmt: skip
        self.nbytes = 0  # that were sent
        self._volume, self._owner, self._check, self._held = volume, owner, check, held
        self._sent: set[tuple[int, Piece]] | None = None  # what the copy has, by unit; None: not begun
        self._buffer = mmap.mmap(-1, PART_NBYTES)
        token, server = secrets.token_hex(_TOKEN_NBYTES // 2), socket.create_server(("", 0), backlog=4)
        self._keeper = _Keeper(server, token.encode(), folders, synced=synced)
        everyone: list[Any] = [None] * ranks.world_size
        with peer_errors("meeting for copies of commits"):
            dist.all_gather_object(everyone, (own_address(), server.getsockname()[1], token))
        self._target = (ranks.rank + per_node) % ranks.world_size
        address, port, token = everyone[self._target]
        assert ranks.collectives is not None
        with self._talking():
            patience_s = ranks.collectives.peers.timeout_s
            self._to = socket.create_connection((address, port), timeout=patience_s)
            self._to.sendall(token.encode())

    def commit(self, record: CommitRecord, sums: Sequence[bytes], *, retires: bool) -> None:
        """Copy what ``record`` has and the copy lacks, then the record; ``retires``: older ones may go."""
        with self._talking():
            sent = self._begin(record) if self._sent is None else self._sent
            if retires:
                self._ask(_RETIRE, {})
            now = pieces_of(record)
            for _, piece in sorted(now - sent, key=lambda each: (each[1].file, each[1].offset)):
                self._send(piece)
            parts = [*parts_of_commit(record), *sums]
            sizes = [os.fstat(self._volume.fd(drive)).st_size for drive in range(record.drives)]
            self._ask(_COMMIT, {"sizes": sizes, "parts": [*map(len, parts)]}, *parts)
            self._sent = now

    def invalidate(self) -> None:
        """Give up the copy's commits, before versions are written in place."""
        if self._sent is None and self._held is None:
            return  # there is none
        with self._talking():
            if self._sent is None and self._held is not None:
                self._begin(self._held)
            self._ask(_INVALIDATE, {})
            self._sent = set()

    def _begin(self, record: CommitRecord) -> set[tuple[int, Piece]]:
        """Return what the copy has: all of the commit with which this rank went on, or nothing."""
        held, owner = self._held, self._owner
        about = {
            "owner": [owner.rank, owner.generation, owner.run], "drives": record.drives,
            "step": -1 if held is None else held.step, "crc": 0 if held is None else _crc(held),
        }  # fmt: skip
        has_it = self._ask(_BEGIN, about)
        return pieces_of(held) if has_it and held is not None else set()

    def _send(self, piece: Piece) -> None:
        for part in parts_of(piece):
            with memoryview(self._buffer) as memory, memory[: part.nbytes] as view:
                read_piece(self._volume.fd(part.file), self._volume.path(part.file), part, view)
                self._check(Extent((part,)), view)
                self._to.sendall(_MESSAGE.pack(_WRITE, part.file, part.offset, part.nbytes))
                self._to.sendall(view)
            self.nbytes += part.nbytes

    def _ask(self, kind: int, about: dict[str, Any], *more: bytes) -> bool:
        """Send a message, and return what the other rank answers; raise what it could not do."""
        text = json.dumps(about).encode()
        self._to.sendall(_MESSAGE.pack(kind, 0, 0, len(text)) + text)
        for part in more:
            self._to.sendall(part)
        told = _received(self._to, int.from_bytes(_received(self._to, 4)))
        answer = json.loads(told)
        if isinstance(answer, str):
            raise PeerError(f"rank {self._target} could not keep the copy of this rank's commit: {answer}")
        return bool(answer)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except InfinityError:
            raise
        except (OSError, EOFError) as error:
            raise PeerError(
                f"rank {self._target} keeps the copy of this rank's commits (durability.copies), and cannot "
                f"be reached: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """End the connections and the thread; the copy stays. May be called twice."""
        with contextlib.suppress(OSError):
            self._to.shutdown(socket.SHUT_RDWR)  # the other rank's thread ends
        self._to.close()
        self._keeper.close()


class _Keeper:
    """Keeps the copy that another rank sends, in files of its own in ``folders``, on a thread."""

    def __init__(self, server: socket.socket, token: bytes, folders: Sequence[Path], *, synced: bool) -> None:
        self._server, self._token, self._folders, self._synced = server, token, folders, synced
        self._from: socket.socket | None = None
        self._heard_s = 0.0  # when the other rank sent something
        self._journal: Journal | None = None
        self._fds: list[int] = []
        self._thread = threading.Thread(target=self._main, name="infinity-copies", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the other rank ended, or this one closes
            while True:
                self._from, _ = self._server.accept()
                if hmac.compare_digest(_received(self._from, _TOKEN_NBYTES), self._token):
                    break
                self._from.close()
            self._keep(self._from)

    def _keep(self, other: socket.socket) -> None:
        memory, failed = memoryview(mmap.mmap(-1, PART_NBYTES)), ""  # aligned, for O_DIRECT
        while True:
            kind, file, offset, nbytes = _MESSAGE.unpack(_received(other, _MESSAGE.size))
            self._heard_s = time.monotonic()
            if kind == _WRITE:
                _receive_into(other, memory[:nbytes])
                failed = failed or self._write(file, offset, memory[:nbytes])
                continue
            about = json.loads(_received(other, nbytes))
            parts = [_received(other, each) for each in about.get("parts", ())]
            answer: bool | str = failed
            if not failed:
                try:
                    answer = self._do(kind, about, parts)
                except (InfinityError, OSError) as error:
                    answer = failed = str(error)
            told = json.dumps(answer).encode()
            other.sendall(len(told).to_bytes(4, "big") + told)

    def _write(self, file: int, offset: int, view: memoryview) -> str:
        folder = self._folders[file % len(self._folders)]
        try:
            write_piece(self._fds[file], folder, Piece(file, offset, len(view)), view)
        except DiskError as error:
            return str(error)
        return ""

    def _do(self, kind: int, about: dict[str, Any], parts: Sequence[bytes]) -> bool:
        if kind == _BEGIN:
            return self._begin(**about)
        assert self._journal is not None
        if kind in (_RETIRE, _INVALIDATE):
            if self._journal.numbers:
                self._journal.retire() if kind == _RETIRE else self._journal.invalidate()
            return True
        for fd, size in zip(self._fds, about["sizes"], strict=True):
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            if self._synced:
                os.fdatasync(fd)
        self._journal.append(commit_of_parts(0, *parts[:2]), parts[2:])
        return True

    def _begin(self, owner: Sequence[int], drives: int, step: int, crc: int) -> bool:
        """Open the copy, which stays if it has this commit; else it begins anew."""
        files, found = RankFiles(owner[0], owner[1], owner[2], "copy"), None
        with contextlib.suppress(CorruptJournalError, OSError):
            found = read_journal(self._folders[0] / files.journal).commits.get(step)
        names = [self._folders[drive % len(self._folders)] / files.data(drive) for drive in range(drives)]
        has_it = found is not None and _crc(found) == crc and all(name.exists() for name in names)
        if not has_it:
            for old in (each for folder in self._folders for each in folder.glob(f"{files.stem}[-.]*")):
                old.unlink(missing_ok=True)
        open_file, how = (open_found, "opening") if has_it else (create_file, "making")
        self._fds = [open_direct(name, open_file, how)[0] for name in names]
        self._journal = Journal(self._folders[0], files, synced=self._synced)
        if has_it and found is not None:
            self._journal.take_over(found)
        return has_it

    def close(self) -> None:
        """End once the other rank has ended, whose last commit may be on its way, or is silent."""
        self._heard_s = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < self._heard_s + _FAREWELL_S:
            self._thread.join(0.1)
        for each in (self._server, self._from):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self._thread.join()
        if self._journal is not None:
            self._journal.close()
        while self._fds:
            os.close(self._fds.pop())


def _crc(record: CommitRecord) -> int:
    return zlib.crc32(b"".join(parts_of_commit(record)))


def _receive_into(other: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        if (count := other.recv_into(view[got:])) == 0:
            raise EOFError("the connection ended")
        got += count


def _received(other: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    _receive_into(other, memoryview(found))
    return bytes(found)


def clear_copies(folders: Sequence[Path], kept: Container[int] = ()) -> None:
    """Remove copies that no rank of this node keeps any more: old ones never win over what came since.

    For when every rank has its own files of the commit with which it goes on.
    """
    for path, files in files_in(folders, "copy*"):
        if files.rank not in kept:
            path.unlink(missing_ok=True)


def open_copies(
    owner: RankFiles, held: CommitRecord | None, folders: Sequence[Path], ranks: Ranks, volume: Volume,
    check: Callable[[Extent, memoryview], object], note: Callable[[str], object], *, synced: bool,
) -> Copies | None:  # fmt: skip
    """Return this rank's :class:`Copies`; None, and a note, where there is no second node. All ranks call."""
    per_node = 1 if ranks.collectives is None else ranks.collectives.nodes.per_node
    here = range(ranks.rank // per_node * per_node, ranks.world_size)[:per_node]
    clear_copies(folders, {(each - per_node) % ranks.world_size for each in here} - {*here})
    if per_node == ranks.world_size:
        note("durability.copies=2: there is one node, so commits are on its drives only")
        return None
    return Copies(ranks, per_node, volume, folders, owner, held=held, check=check, synced=synced)
