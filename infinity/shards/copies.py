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
import mmap
import os
import pickle
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.comm.ranks import Ranks, own_address
from infinity.core.errors import InfinityError, PeerError, first_line
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
from infinity.shards.saved import PART_NBYTES, RunFiles, files_in, parts_of, pieces_of, write_piece

_TOKEN_NBYTES = 32
#: The longest wait for what a connection has to begin with (s).
_GREETING_S = 2.0
#: The longest silence of the rank whose copy is here, at the end, that is waited for (s).
_FAREWELL_S = 5.0


class Copies:
    """Copies this rank's commits to the rank one node further, and keeps those of the rank one node before.

    All ranks construct one together. The journal's thread calls what sends; another thread keeps.
    ``check`` compares bytes that were read back with their sums.
    """

    def __init__(
        self, ranks: Ranks, per_node: int, volume: Volume, files: RunFiles, *,
        check: Callable[[Extent, memoryview], object], synced: bool,
    ) -> None:  # fmt: skip
        self.nbytes = 0  # that were sent
        self._volume, self._owner, self._check = volume, files.owner, check
        self._held = None if files.own is None else files.own.record  # with which the own files go on
        self._sent: set[tuple[int, Piece]] | None = None  # what the copy has, by unit; None: not begun
        self._buffer = mmap.mmap(-1, PART_NBYTES)
        token, server = secrets.token_hex(_TOKEN_NBYTES // 2), socket.create_server(("", 0), backlog=4)
        self._keeper = _Keeper(server, token.encode(), files.folders, synced=synced)
        self._target = (ranks.rank + per_node) % ranks.world_size
        own = own_address(), server.getsockname()[1], token
        assert ranks.collectives is not None
        address, port, token = ranks.collectives.share_all(own, "copies of commits")[self._target]
        with self._talking():
            patience_s = ranks.collectives.peers.timeout_s
            self._to = socket.create_connection((address, port), timeout=patience_s)
            self._to.sendall(token.encode())

    def commit(self, record: CommitRecord, sums: Sequence[bytes], *, retires: bool) -> None:
        """Copy what ``record`` has and the copy lacks, then the record; ``retires``: older ones may go."""
        with self._talking():
            sent = self._begin(record) if self._sent is None else self._sent
            if retires:
                self._ask("give_up", "retire")
            now = pieces_of(record)
            for _, piece in sorted(now - sent, key=lambda each: (each[1].file, each[1].offset)):
                self._send(piece)
            sizes = [os.fstat(self._volume.fd(drive)).st_size for drive in range(record.drives)]
            self._ask("commit", sizes, *parts_of_commit(record), *sums)
            self._sent = now

    def invalidate(self) -> None:
        """Give up the copy's commits, before versions are written in place."""
        if self._sent is None and self._held is None:
            return  # there is none
        with self._talking():
            if self._sent is None and self._held is not None:
                self._begin(self._held)
            self._ask("give_up", "invalidate")
            self._sent = set()

    def _begin(self, record: CommitRecord) -> set[tuple[int, Piece]]:
        """Return what the copy has: all of the commit with which this rank went on, or nothing."""
        held, files = self._held, replace(self._owner, kind="copy")
        found = -1 if held is None else held.step, 0 if held is None else _crc(held)
        has_it = self._ask("begin", files, record.drives, *found)
        return pieces_of(held) if has_it and held is not None else set()

    def _send(self, piece: Piece) -> None:
        for part in parts_of(piece):
            with memoryview(self._buffer) as memory, memory[: part.nbytes] as view:
                read_piece(self._volume.fd(part.file), self._volume.path(part.file), part, view)
                self._check(Extent((part,)), view)
                _send(self._to, ("write", part))
                self._to.sendall(view)
            self.nbytes += part.nbytes

    def _ask(self, what: str, *given: Any) -> bool:
        """Have the other rank's keeper do something, and return what it answers; raise what it could not."""
        _send(self._to, (what, *given))
        answer = _received(self._to)
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
        self._buffer = mmap.mmap(-1, PART_NBYTES)  # aligned, for O_DIRECT
        self._thread = threading.Thread(target=self._main, name="infinity-copies", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the other rank ended, or this one closes
            while True:
                self._from, _ = self._server.accept()
                self._from.settimeout(_GREETING_S)
                with contextlib.suppress(OSError, EOFError):  # of what is no rank, such as a port scanner
                    if hmac.compare_digest(_bytes(self._from, _TOKEN_NBYTES), self._token):
                        break
                self._from.close()
            self._from.settimeout(None)
            self._keep(self._from)

    def _keep(self, other: socket.socket) -> None:
        failed = ""
        while True:
            what, *given = _received(other)
            self._heard_s = time.monotonic()
            if what == "write":
                _receive_into(other, memoryview(self._buffer)[: given[0].nbytes])
            answer: bool | str = failed
            if not failed:
                try:
                    answer = getattr(self, f"_{what}")(*given)
                except (InfinityError, OSError) as error:
                    answer = failed = str(error)
            if what != "write":
                _send(other, answer)

    def _write(self, part: Piece) -> bool:
        folder = self._folders[part.file % len(self._folders)]
        with memoryview(self._buffer) as memory, memory[: part.nbytes] as view:
            write_piece(self._fds[part.file], folder, part, view)
        return True

    def _give_up(self, how: str) -> bool:
        """Retire or invalidate commits, if there are any."""
        if self._journal is not None and self._journal.numbers:
            getattr(self._journal, how)()
        return True

    def _commit(self, sizes: Sequence[int], body: bytes, state: bytes, *sums: bytes) -> bool:
        assert self._journal is not None
        for fd, size in zip(self._fds, sizes, strict=True):
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            if self._synced:
                os.fdatasync(fd)
        self._journal.append(commit_of_parts(0, body, state), sums)
        return True

    def _begin(self, files: RankFiles, drives: int, step: int, crc: int) -> bool:
        """Open the copy, which stays if it has this commit; else it begins anew."""
        found = None
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


def _bytes(other: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    _receive_into(other, memoryview(found))
    return bytes(found)


def _send(to: socket.socket, message: Any) -> None:
    told = pickle.dumps(message)
    to.sendall(len(told).to_bytes(8) + told)


def _received(other: socket.socket) -> Any:
    """Return a message of a rank, which has shown that it is one."""
    return pickle.loads(_bytes(other, int.from_bytes(_bytes(other, 8))))


def clear_copies(folders: Sequence[Path], kept: Container[int] = ()) -> None:
    """Remove copies that no rank of this node keeps any more: old ones never win over what came since.

    For when every rank has its own files of the commit with which it goes on.
    """
    for path, files in files_in(folders, "copy*"):
        if files.rank not in kept:
            path.unlink(missing_ok=True)


def open_copies(
    files: RunFiles, ranks: Ranks, volume: Volume, check: Callable[[Extent, memoryview], object],
    note: Callable[[str], object], *, synced: bool,
) -> Copies | None:  # fmt: skip
    """Return this rank's :class:`Copies`; None, and a note, where there is no second node. All ranks call."""
    per_node = 1 if ranks.collectives is None else ranks.collectives.nodes.per_node
    here = range(ranks.rank // per_node * per_node, ranks.world_size)[:per_node]
    clear_copies(files.folders, {(each - per_node) % ranks.world_size for each in here} - {*here})
    if per_node == ranks.world_size:
        note("durability.copies=2: there is one node, so commits are on its drives only")
        return None
    return Copies(ranks, per_node, volume, files, check=check, synced=synced)
