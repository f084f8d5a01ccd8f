"""Locks: exclusive or shared, named after their holder, and free when the holder has ended."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infinity.core.errors import LockedError
from infinity.core.files import is_locked, is_named, lock_file, open_locked, sync, try_lock

_HOLD = """
import sys, time
from pathlib import Path
from infinity.core.files import lock_file
lock_file(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_held_lock_names_its_process_and_is_free_after_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=rf"locked by process {process.pid} on .*, started "):
        lock_file(path, patience_s=0.1)
    assert is_locked(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
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
    thread.join(10)
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
