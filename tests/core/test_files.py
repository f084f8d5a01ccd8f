"""Locks are free when their holder has ended, and nobody else's file is written or waited for."""

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.core.errors import LockedError, UnsafePathError
from infinity.core.files import (
    append_file,
    create_file,
    is_locked,
    is_named,
    lock_file,
    lock_owner,
    open_locked,
    own_directory,
    read_file,
    shared_directory,
    sync,
    try_lock,
    write_file,
)
from tests.helpers.launch import holding
from tests.helpers.limits import HANG_S


def test_a_held_lock_names_its_process_and_is_free_after_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holding(lock_file, path) as other:
        pid = other.processes[0].pid
        with pytest.raises(LockedError, match=rf"locked by process {pid} on .*, started "):
            lock_file(path, patience_s=0.1)
        assert is_locked(path)
    os.close(lock_file(path))


def test_shared_locks_go_together_and_an_exclusive_one_with_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    one, two = (open_locked(path, os.O_RDONLY, shared=True) for _ in range(2))
    assert is_locked(path)
    assert not is_locked(path, shared=True)
    with pytest.raises(LockedError, match="locked by another process"):
        open_locked(path, os.O_RDONLY, patience_s=0)
    os.close(one)
    assert is_locked(path)
    os.close(two)
    assert not is_locked(path)
    assert is_locked(tmp_path / "gone")


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_new_file(tmp_path: Path) -> None:
    path, got = tmp_path / "lock", []
    first = lock_file(path)
    thread = threading.Thread(target=lambda: got.append(lock_file(path, patience_s=math.inf)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    path.unlink()
    os.close(first)
    thread.join(HANG_S)
    assert is_named(got[0], path)
    os.close(got[0])


def test_a_directory_can_be_locked_and_synced(tmp_path: Path) -> None:
    fd = open_locked(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    other = os.open(tmp_path, os.O_RDONLY)
    assert not try_lock(other)
    sync(tmp_path)
    os.close(fd)
    assert try_lock(other)
    os.close(other)


# --- nobody else's files ---------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that nobody may write through another name."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def plant(kind: str, path: Path, victim: Path) -> Path:
    """Put something that leads to ``victim``, or blocks, at ``path``."""
    if kind == "symbolic link":
        path.symlink_to(victim)
    elif kind == "hard link":
        path.hardlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("made by us"))
    else:
        os.mkfifo(path)
    return path


PLANTED = ["symbolic link", "hard link", "dangling link", "pipe"]


@pytest.mark.parametrize("kind", PLANTED)
def test_a_new_file_takes_the_place_of_what_was_planted_and_leads_nowhere(
    tmp_path: Path, victim: Path, kind: str
) -> None:
    path = plant(kind, tmp_path / "rank0.bin", victim)
    os.close(create_file(path))
    assert (path.is_file(), path.is_symlink(), path.stat().st_mode & 0o777) == (True, False, 0o600)
    path.unlink()
    write_file(plant(kind, path, victim), "ours")
    assert (victim.read_text(), path.read_text()) == ("precious", "ours")
    assert not victim.with_name("made by us").exists()


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("make", [lock_file, append_file])
def test_a_file_that_is_found_is_not_written_through_a_link(
    tmp_path: Path, victim: Path, kind: str, make: Callable[[Path], object]
) -> None:
    path = plant(kind, tmp_path / "rank0.lock", victim)
    with pytest.raises((UnsafePathError, OSError)) as raised:
        make(path)
    assert str(path) in str(raised.value)
    assert victim.read_text() == "precious"
    assert not victim.with_name("made by us").exists()
    link = "a link in the place of rank0.lock, which is to be removed"
    assert lock_owner(path) == (link if path.is_symlink() else "another process")
    is_locked(path)  # does not block


def test_a_directory_of_our_own_is_closed_to_others(tmp_path: Path) -> None:
    own_directory(tmp_path / "new")
    (tmp_path / "old").mkdir(mode=0o755)
    own_directory(tmp_path / "old")
    for name in ("new", "old"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("check", [own_directory, shared_directory])
def test_a_directory_that_everybody_may_write_is_refused_with_advice(
    tmp_path: Path, check: Callable[[Path], None]
) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(UnsafePathError, match=rf"{path} is writable by all users \(mode 777\)"):
        check(path)
    assert path.stat().st_mode & 0o777 == 0o777


def test_a_sticky_directory_of_everybodys_can_be_shared(tmp_path: Path) -> None:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    shared_directory(path)
    shared_directory(tmp_path / "made" / "with parents")
    assert (tmp_path / "made" / "with parents").is_dir()


def test_what_another_user_owns_is_refused(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, os.getuid(), -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    own_is_root = os.getuid() == 0
    for check in (own_directory, *([] if own_is_root else [shared_directory])):
        with pytest.raises(UnsafePathError, match=rf"belongs to another user \(uid {os.getuid()}\)"):
            check(tmp_path)
    for make in (lock_file, append_file):
        with pytest.raises(UnsafePathError, match="belongs to another user"):
            make(victim)
    assert victim.read_text() == "precious"


def test_a_directory_in_which_another_user_could_replace_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    found = os.stat_result((0o40755, *tmp_path.stat()[1:4], other, *tmp_path.stat()[5:]))
    monkeypatch.setattr(Path, "stat", lambda path, **_: found)
    with pytest.raises(UnsafePathError, match=rf"another user \(uid {other}\).*directory of your own"):
        shared_directory(tmp_path)


def test_the_tmp_of_a_container_without_root_can_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o41777, 0o40755):
        found = os.stat_result((mode, *tmp_path.stat()[1:4], 65534, *tmp_path.stat()[5:]))
        monkeypatch.setattr(Path, "stat", lambda path, found=found, **_: found)
        with contextlib.nullcontext() if mode == 0o41777 else pytest.raises(UnsafePathError):
            shared_directory(tmp_path)
        monkeypatch.undo()


def test_a_link_to_a_directory_is_not_our_own(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to("theirs")
    with pytest.raises(UnsafePathError, match="is a symbolic link"):
        own_directory(tmp_path / "run")


def test_only_regular_files_of_some_size_are_read(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    assert read_file(tmp_path / "link", 8) == b"precious"
    with pytest.raises(OSError, match="has 8 bytes; at most 7 are read"):
        read_file(victim, 7)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "socket", Path("a\0b")):
            with pytest.raises(OSError, match=r"not a regular file|No such device|embedded null"):
                read_file(path, 8)
