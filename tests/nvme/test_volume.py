"""Volumes: no two extents share a byte, full disks show before anything is lost."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import ChangedCheckpointError, ChangedFileError, DirectoryError, DiskError
from infinity.core.nbytes import Extent, Piece
from infinity.device.memory import HostPool, Lease
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Space, Volume, open_own, open_sealed
from tests.helpers.cases import examples
from tests.helpers.limits import file_limit

MIB = 2**20


def test_large_extents_are_striped_in_proportion_and_small_ones_lie_whole(volume: Volume) -> None:
    large = volume.allocate(30 * MIB + 4096, what="unit")
    assert [(piece.file, piece.nbytes) for piece in large.pieces] == [(0, 20 * MIB), (1, 10 * MIB + 4096)]
    small = [volume.allocate(3 * MIB, what="unit") for _ in range(6)]
    assert all(len(extent.pieces) == 1 for extent in small)
    on_first = sum(extent.pieces[0].file == 0 for extent in small)
    assert on_first == 4  # weights 2 : 1


def test_bytes_are_counted(volume: Volume) -> None:
    first, second = volume.allocate(8 * MIB, what="a"), volume.allocate(4096, what="b")
    assert volume.allocated_nbytes == 8 * MIB + 4096
    volume.free(first)
    assert (volume.allocated_nbytes, volume.peak_nbytes) == (4096, 8 * MIB + 4096)
    volume.free(second)
    with pytest.raises(ValueError, match="not taken"):
        volume.free(second)


def test_files_of_others_are_read_past_the_cache_and_never_written_synced_or_counted(
    volume: Volume, tmp_path: Path, lease: Callable[..., Lease]
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"7" * 8192 + b"end")
    os.utime(path, (1, 1))  # a file system's clock may stand still for as long as this test takes
    engine = make_engine("threads", volume)
    with path.open("rb") as file:
        sealed = open_sealed(path, file.fileno())
    assert (sealed.nbytes, sealed.direct) == (8195, not volume.notes)
    number = volume.add_sealed([sealed])
    assert volume.allocated_nbytes == 0
    extent, read = Extent((Piece(number, 0, 8192),)), lease(8192)
    engine.read(extent, read.memory).wait()
    assert bytes(read.memory) == b"7" * 8192
    with pytest.raises(DiskError, match="EBADF"):
        engine.write(extent, read.memory).wait()
    volume.sync()
    volume.check()
    path.write_bytes(b"8" * 8195)
    with pytest.raises(ChangedCheckpointError, match="was written"):
        volume.check()
    engine.close()


def test_freed_bytes_are_used_again_and_zeroed_when_asked(
    volume: Volume, lease: Callable[..., Lease]
) -> None:
    engine = make_engine("threads", volume)
    extent, ones = volume.allocate(6 * MIB, what="a"), lease(6 * MIB, 1)
    engine.write(extent, ones.memory).wait()
    volume.free(extent)
    again = volume.allocate(6 * MIB, what="b", zeroed=True)
    assert again == extent
    engine.read(again, ones.memory).wait()
    assert not ones.tensor.any()
    engine.close()


def test_files_are_reserved_private_and_not_much_larger_than_asked(volume: Volume) -> None:
    volume.allocate(70 * MIB, what="unit")
    for file in range(2):
        stat = os.fstat(volume.fd(file))
        assert stat.st_mode & 0o777 == 0o600
        assert stat.st_blocks * 512 >= stat.st_size
        assert stat.st_size % (64 * MIB) == 0
    total = sum(os.fstat(volume.fd(file)).st_size for file in range(2))
    assert total <= 70 * MIB + 2 * 64 * MIB


@pytest.mark.parametrize("nbytes", [0, -4096, 100, 4097])
def test_sizes_that_are_not_whole_blocks_are_refused(volume: Volume, nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 4096"):
        volume.allocate(nbytes, what="unit")


def test_a_directory_that_cannot_hold_files_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match=r"ENOTDIR.*give memory\.nvme a directory"):
        Volume([tmp_path / "ok.bin", tmp_path / "file" / "x.bin"])


def test_a_file_system_without_o_direct_is_used_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: Callable[..., Lease]
) -> None:
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT", path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    volume = Volume([tmp_path / "a.bin", tmp_path / "b.bin"])
    [line] = volume.notes
    assert line.startswith(f"{tmp_path}: this file system has no O_DIRECT")
    engine = make_engine("auto", volume)
    assert engine.name == "threads"
    extent, out, back = volume.allocate(3 * MIB, what="unit"), lease(3 * MIB, 7), lease(3 * MIB)
    engine.write(extent, out.memory).wait()
    engine.read(extent, back.memory).wait()
    assert (out.tensor == back.tensor).all()
    engine.close()
    volume.close()


def test_a_full_disk_shows_at_allocation_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume([tmp_path / "a.bin", tmp_path / "b.bin"])
    kept = volume.allocate(8 * MIB, what="first")
    fallocate = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if fd == volume.fd(1):
            raise OSError(errno.ENOSPC, "full")
        fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"reservation of room for layers\.7 .*ENOSPC.*bytes free.*make room"):
        volume.allocate(300 * MIB, what="layers.7")
    assert volume.allocated_nbytes == kept.nbytes
    monkeypatch.undo()
    again = volume.allocate(300 * MIB, what="layers.7")
    assert not _overlapping([kept, again])
    volume.close()


def test_the_last_room_of_a_disk_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume([tmp_path / "a.bin"])
    fallocate = os.posix_fallocate

    def nearly_full(fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > 10 * MIB:
            raise OSError(errno.ENOSPC, "full")
        fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    assert volume.allocate(9 * MIB, what="unit").nbytes == 9 * MIB
    volume.close()


# --- what other programs do to the files -----------------------------------------------------------


def test_files_that_were_cut_replaced_or_removed_are_a_disk_error_that_names_them(volume: Volume) -> None:
    volume.allocate(30 * MIB, what="unit")
    volume.check()
    path, size = volume.path(1), volume.path(1).stat().st_size
    os.truncate(path, 5 * MIB)
    with pytest.raises(ChangedFileError, match=rf"{path} was cut to {5 * MIB} bytes of at least {size}"):
        volume.check()
    os.truncate(path, size)
    volume.check()
    kept = path.rename(path.with_name("kept"))
    with pytest.raises(ChangedFileError, match="was removed or replaced"):
        volume.check()
    path.write_bytes(bytes(size))
    with pytest.raises(ChangedFileError, match="by another program") as raised:
        volume.check()
    assert raised.value.path == str(path)
    kept.rename(path)
    volume.check()


def test_a_file_system_that_does_not_answer_is_a_disk_error(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(path: Path) -> os.stat_result:
        raise OSError(errno.EIO, "gone", str(path))

    monkeypatch.setattr(os, "lstat", vanish)
    with pytest.raises(DiskError, match=r"a\.bin") as raised:
        volume.check()
    assert raised.value.errno == errno.EIO


def test_a_file_that_grew_is_still_ours(volume: Volume) -> None:
    volume.allocate(4096, what="unit")
    volume.allocate(100 * MIB, what="another")
    volume.check()


def test_a_sealed_file_may_lose_its_name_but_none_of_its_bytes(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.write_bytes(bytes(8192))
    volume.add_sealed([open_own(path)])
    other = path.rename(tmp_path / "base2")
    volume.check()
    os.truncate(other, 4096)
    with pytest.raises(ChangedFileError, match="was cut to 4096 bytes of at least 8192"):
        volume.check()


@pytest.mark.parametrize("name", ["auto", "threads"])
def test_a_full_disk_raises_and_keeps_what_was_written(name: str, tmp_path: Path) -> None:
    volume = Volume([tmp_path / "v.bin"])
    engine = make_engine(name, volume)
    lease = HostPool(32 * MIB).lease(16 * MIB, who="test")
    lease.tensor.fill_(1)
    first, second = volume.allocate(16 * MIB, what="a"), volume.allocate(16 * MIB, what="b")
    engine.write(first, lease.memory).wait()
    with file_limit(19 * MIB + 1000):
        with pytest.raises(DiskError, match=r"bin: write of .*EFBIG") as write:
            engine.write(second, lease.memory).wait()
        with pytest.raises(DiskError, match=r"bin: reservation of room for c of "):
            volume.allocate(100 * MIB, what="c")
        lease.tensor.zero_()
        engine.read(first, lease.memory).wait()
    assert "EFBIG" in str(write.value)
    assert "make room" in str(write.value)
    assert (lease.tensor == 1).all()
    engine.close()


def test_a_write_of_which_only_a_part_fits_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without O_DIRECT the kernel writes up to the limit, the same part of a block each time it is asked.
    monkeypatch.setattr(os, "pwritev", lambda *_: 1000)
    volume = Volume([tmp_path / "v.bin"])
    engine, memory = make_engine("threads", volume), HostPool(MIB).lease(MIB, who="test").memory
    extent = volume.allocate(MIB, what="a")
    with file_limit(MIB // 2), pytest.raises(DiskError, match=r"EFBIG.*make room"):
        engine.write(extent, memory).wait()
    with pytest.raises(DiskError, match="EIO"):
        engine.write(extent, memory).wait()
    engine.close()


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=40))
def test_ranges_never_overlap_and_all_room_comes_back(steps: list[tuple[int, bool]]) -> None:
    space, live = Space(), list[tuple[int, int]]()  # offset and bytes
    for nbytes, free_first in steps:
        if free_first and live:
            space.give(*live.pop(nbytes % len(live)))
        fits = space.fits(nbytes)
        offset, fresh = space.take(nbytes)
        live.append((offset, nbytes))
        assert fresh != fits
        spans = sorted((offset, offset + nbytes) for offset, nbytes in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert space.taken_nbytes == sum(nbytes for _, nbytes in live)
    for taken in live:
        space.give(*taken)
    if space.end:
        assert space.take(space.end)[0] == 0


def _overlapping(extents: list[Extent]) -> bool:
    spans = sorted((p.file, p.offset, p.offset + p.nbytes) for extent in extents for p in extent.pieces)
    return any(a[0] == b[0] and a[2] > b[1] for a, b in itertools.pairwise(spans))
