"""A base is found whole or not at all, is never written again, and goes only when nobody reads it."""

import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.errors import DiskError, UnsafePathError
from infinity.core.extent import BLOCK_NBYTES, Extent
from infinity.nvme import base
from infinity.nvme.base import BaseChunk, BaseFiles, DamagedBaseError, SealedBase
from infinity.nvme.run_directory import find_leftovers, find_unused_bases, leftovers_line
from infinity.nvme.volume import SealedFile, Volume
from tests.helpers.limits import file_limit

KEY = "0123456789abcdef" * 2
#: Three blocks of one unit, and one of another.
SHARDS = {0: (b"a", b"b", b"c"), 5: (b"d",)}


def place(*roots: Path, key: str = KEY) -> BaseFiles:
    return BaseFiles(roots, key, 0, 1)


def write(files: BaseFiles, folder: Path) -> tuple[SealedFile, ...]:
    """Publish SHARDS under a claim of ``files``, from drafts in ``folder``."""
    assert files.find() is None
    assert files.claimed
    folder.mkdir(exist_ok=True)
    volume = Volume([folder / f"draft{number}" for number in range(len(files.paths))])
    shards = {
        index: tuple(_write_block(volume, content * BLOCK_NBYTES) for content in contents)
        for index, contents in SHARDS.items()
    }
    try:
        return files.publish(volume.cut(0), shards)
    finally:
        volume.close()
        files.release()


def _write_block(volume: Volume, content: bytes) -> BaseChunk:
    extent = volume.allocate(len(content), what="a chunk")
    with volume.path(extent.pieces[0].file).open("r+b") as file:
        file.seek(extent.pieces[0].offset)
        file.write(content)
    return BaseChunk(extent, Extent(()), hashlib.sha256(content).hexdigest())


def close(files: Sequence[SealedFile]) -> None:
    for file in files:
        os.close(file.fd)


def read(sealed: SealedBase) -> dict[int, tuple[bytes, ...]]:
    """What a base holds, by name."""
    return {
        index: tuple(
            sealed.files[piece.file].path.read_bytes()[piece.offset : piece.offset + piece.nbytes]
            for chunk in chunks
            for piece in chunk.weight.pieces
        )
        for index, chunks in sealed.shards.items()
    }


@pytest.fixture
def published(tmp_path: Path) -> BaseFiles:
    """A base that nobody reads now."""
    files = place(tmp_path)
    close(write(files, tmp_path / "run"))
    return files


def found(files: BaseFiles) -> SealedBase:
    sealed = files.find()
    assert sealed is not None
    return sealed


# --- one copy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_published_is_found_as_it_was_by_every_reader(tmp_path: Path, count: int) -> None:
    roots = [tmp_path / f"drive{number}" for number in range(count)]
    for root in roots:
        root.mkdir()
    close(write(place(*roots), tmp_path / "run"))
    readers = [found(place(*roots)) for _ in range(3)]
    for sealed in readers:
        contents = {i: tuple(c * BLOCK_NBYTES for c in blocks) for i, blocks in SHARDS.items()}
        assert read(sealed) == contents
        for file in sealed.files:
            assert file.path.parent.parent in roots
            assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o400
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(file.fd, b"x", 0)
    assert len({os.fstat(file.fd).st_ino for sealed in readers for file in sealed.files}) == count
    assert not [path for root in roots for path in root.rglob("*.lock")]
    for sealed in readers:
        close(sealed.files)


def test_another_key_finds_nothing_and_leaves_nothing(published: BaseFiles, tmp_path: Path) -> None:
    other = place(tmp_path, key="f" * 32)
    assert other.find() is None
    assert other.claimed
    other.release()
    assert not other.folders[0].exists()
    close(found(published).files)


def test_directories_in_another_order_are_another_base(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    close(write(place(one, two), tmp_path / "run"))
    for roots in ((two, one), (one,), (two,)):
        other = place(*roots)
        assert other.find() is None
        other.release()
    close(found(place(one, two)).files)


# --- damage --------------------------------------------------------------------------------------


def change_manifest(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Let ``change`` edit the manifest, which then has a digest of its own: a lie."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[-24:-16], "little")
    manifest = json.loads(data[-56 - nbytes : -56])
    body = json.dumps(change(manifest) or manifest).encode()
    path.chmod(0o600)
    tail = hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + data[-16:]
    path.write_bytes(data[: -56 - nbytes] + body + tail)


def lying(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: change_manifest(path, lambda manifest: manifest.update({key: value}))


def moved(*piece: object) -> Callable[[Path], None]:
    """The first unit is said to lie somewhere else."""
    return lying("shards", {"0": [[[list(piece)], [], "00"]]})


def cut(nbytes: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.chmod(0o600)
        os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)

    return damage


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)

    return damage


def append(path: Path) -> None:
    path.chmod(0o600)
    with path.open("ab") as file:
        file.write(b"x")


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGE = {
    "cut by a byte": cut(-1),
    "cut to a few bytes": cut(10),
    "emptied": cut(0),
    "longer": append,
    "a link": link,
    "magic": flip(-1),
    "size of the manifest": flip(-20),
    "digest of the manifest": flip(-40),
    "manifest": flip(-60),
    "another key": lying("key", "f" * 32),
    "other sizes": lying("nbytes", [4096]),
    "no shards": lying("shards", None),
    "a list": lambda path: change_manifest(path, lambda manifest: [manifest]),
    "no number": lying("shards", {"x": []}),
    "outside its file": moved(0, 4 * BLOCK_NBYTES, BLOCK_NBYTES),
    "in no file": moved(1, 0, BLOCK_NBYTES),
    "before its file": moved(0, -BLOCK_NBYTES, BLOCK_NBYTES),
    "between blocks": moved(0, 1, BLOCK_NBYTES),
    "empty": moved(0, 0, 0),
    "fractions": moved(0, 0.5, BLOCK_NBYTES),
    "too few numbers": moved(0, 0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_not_what_was_sealed_is_refused_and_written_anew(
    published: BaseFiles, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(published.paths[0])
    with pytest.raises(DamagedBaseError, match=r"the frozen base is damaged: .*rank0-of-1\.1-of-1\.base"):
        published.find()
    assert published.claimed
    assert not published.paths[0].exists()
    published.release()
    close(write(place(tmp_path), tmp_path / "again"))
    close(found(place(tmp_path)).files)


def test_files_of_two_bases_are_never_mixed(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    files = place(one, two)
    close(write(files, tmp_path / "run"))
    change_manifest(files.paths[1], lambda manifest: manifest.update({"made": "by somebody else"}))
    with pytest.raises(DamagedBaseError, match="not that of the first file"):
        files.find()
    files.release()


@settings(max_examples=30, deadline=None)
@given(at=st.integers(-400, -1), value=st.integers(0, 255))
def test_no_byte_after_the_extents_can_change_unseen(at: int, value: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("base")
    files = place(folder)
    close(write(files, folder / "run"))
    data = bytearray(files.paths[0].read_bytes())
    at = max(at, 4 * BLOCK_NBYTES - len(data))
    same = data[at] == value
    data[at] = value
    files.paths[0].chmod(0o600)
    files.paths[0].write_bytes(data)
    if same:
        close(found(files).files)
    else:
        with pytest.raises(DamagedBaseError):
            files.find()
        files.release()
    shutil.rmtree(folder)


# --- who reads, who writes -----------------------------------------------------------------------


def test_a_base_goes_only_when_nobody_reads_it_and_is_offered_then(
    published: BaseFiles, tmp_path: Path
) -> None:
    folder = published.folders[0]
    sealed = found(published)
    assert find_unused_bases(tmp_path) == []
    assert leftovers_line([tmp_path]) == ""
    close(sealed.files)
    assert find_unused_bases(tmp_path) == [folder]
    assert find_leftovers(tmp_path) == []
    line = leftovers_line([tmp_path])
    assert "no run uses now" in line
    assert f"rm -r {folder}" in line
    shutil.rmtree(folder)
    assert leftovers_line([tmp_path]) == ""


def test_a_removed_base_stays_readable_for_those_who_have_it(published: BaseFiles, tmp_path: Path) -> None:
    sealed = found(published)
    shutil.rmtree(published.folders[0])
    plain = os.open(f"/proc/self/fd/{sealed.files[0].fd}", os.O_RDONLY)
    assert os.pread(plain, BLOCK_NBYTES, 0) == b"a" * BLOCK_NBYTES
    os.close(plain)
    close(write(place(tmp_path), tmp_path / "again"))
    published.unlink(sealed.files)  # of those that are there no more: the new one stays
    close(found(place(tmp_path)).files)
    close(sealed.files)


def test_a_base_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    writer, reader = place(tmp_path), place(tmp_path)
    assert writer.find() is None
    assert find_unused_bases(tmp_path) == []
    got: list[SealedBase] = []
    thread = threading.Thread(target=lambda: got.append(found(reader)))
    thread.start()
    writer.heartbeat()
    time.sleep(0.3)
    assert thread.is_alive()
    draft = tmp_path / "draft"
    volume = Volume([draft])
    chunk = _write_block(volume, b"z" * BLOCK_NBYTES)
    close(writer.publish(volume.cut(0), {0: (chunk,)}))
    volume.close()
    writer.release()
    thread.join(20)
    assert read(got[0]) == {0: (b"z" * BLOCK_NBYTES,)}
    assert not reader.claimed
    close(got[0].files)


def test_a_writer_that_does_not_get_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = place(tmp_path), place(tmp_path)
    assert writer.find() is None
    monkeypatch.setattr(base, "_PATIENCE_S", 0.1)
    time.sleep(0.2)
    assert other.find() is None
    assert not other.claimed
    writer.release()


def test_a_clock_that_was_set_back_makes_nobody_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = place(tmp_path), place(tmp_path)
    assert writer.find() is None
    writer.heartbeat()
    os.utime(writer._lock, (time.time() + 10**6, time.time() + 10**6))  # before the clock was set back
    monkeypatch.setattr(base, "_PATIENCE_S", 0.1)
    assert other.find() is None
    assert not other.claimed
    writer.release()


def test_the_claim_of_a_dead_writer_is_free_and_its_folder_is_offered(tmp_path: Path) -> None:
    dead = place(tmp_path)
    assert dead.find() is None
    os.close(dead._lock)  # as the kernel does when a process ends
    assert find_unused_bases(tmp_path) == dead.folders
    close(write(place(tmp_path), tmp_path / "run"))
    close(found(place(tmp_path)).files)


# --- a full disk ---------------------------------------------------------------------------------


def test_a_full_disk_while_a_base_is_sealed_is_a_typed_error_and_nothing_has_its_name(tmp_path: Path) -> None:
    files = place(tmp_path)
    with file_limit(4 * BLOCK_NBYTES), pytest.raises(DiskError, match=r"sealing of the base.*make room"):
        write(files, tmp_path / "run")
    assert not files.folders[0].exists()
    close(write(files, tmp_path / "run"))


# --- nobody else's files ---------------------------------------------------------------------------


def test_a_planted_directory_in_the_bases_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / f"base-{KEY}").symlink_to("home")
    with pytest.raises(UnsafePathError, match=rf"base-{KEY} is a symbolic link"):
        place(tmp_path).find()
    (tmp_path / f"base-{KEY}").unlink()
    (tmp_path / f"base-{KEY}").mkdir()
    (tmp_path / f"base-{KEY}").chmod(0o777)
    with pytest.raises(UnsafePathError, match="is writable by all users"):
        place(tmp_path).find()
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_base_that_another_user_wrote_is_not_read(published: BaseFiles) -> None:
    os.chown(published.folders[0], 12345, -1)
    with pytest.raises(UnsafePathError, match=r"belongs to another user \(uid 12345\)"):
        place(published.folders[0].parent).find()


def test_links_in_place_of_the_bases_files_lead_nowhere(tmp_path: Path, published: BaseFiles) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    published.paths[0].unlink()
    published.paths[0].symlink_to(victim)
    with pytest.raises(DamagedBaseError):
        published.find()
    published.release()
    close(write(place(tmp_path), tmp_path / "run"))
    assert victim.read_text() == "precious"
