"""Two runs never touch each other's files; leftovers of dead ones are found."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from infinity.core import files
from infinity.core.errors import DiskError, LockedError, UnsafePathError
from infinity.nvme.run_directory import RunDirectory, find_leftovers, leftovers_line, new_run_id
from infinity.nvme.volume import Volume
from tests.helpers.launch import holding
from tests.helpers.limits import HANG_S


def hold(root: Path, run_id: str, rank: int = 0) -> RunDirectory:
    """Take a place in a run; in another process."""
    run = RunDirectory(root, run_id, rank)
    run.file("data.bin").write_text("theirs")
    return run


def test_a_run_makes_a_private_directory_and_removes_what_it_made(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "deep" / "root", "run", 0)
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.file("a.bin").write_text("x")
    (run.path / "notes.txt").write_text("the user's")
    run.remove()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]
    (run.path / "notes.txt").unlink()
    run.remove()  # twice is harmless
    assert run.path.exists()


def test_the_directory_goes_with_the_last_rank(tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path, "run", rank) for rank in range(3)]
    for run in runs:
        run.file(f"rank{run.rank}.bin").write_text("x")
    runs[1].remove()
    assert runs[0].path.exists()
    assert (runs[0].path / "rank0.bin").exists()
    runs[0].remove()
    runs[2].remove()
    assert not runs[0].path.exists()


def test_the_files_of_a_finished_run_go_however_its_last_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds that 1 still holds its lock; before 0 has given back those that it took, 1 looks, too."""
    runs = [RunDirectory(tmp_path, "run", rank) for rank in range(2)]
    for run in runs:
        run.file(f"rank{run.rank}-1.bin").write_text("x")
        run.finish()
    last = threading.Thread(target=runs[1].remove_finished, args=(2,))
    real = files.open_locked

    def taken(path: Path, *args: Any, **given: Any) -> int:
        try:
            return real(path, *args, **given)
        except LockedError:
            if last.ident is None:
                last.start()
                last.join(0.2)  # it ends, or waits for its turn
            raise

    monkeypatch.setattr(files, "open_locked", taken)
    runs[0].remove_finished(2)
    last.join(HANG_S)
    assert not runs[0].path.exists()


@pytest.mark.parametrize("directory_locks", [True, False])
def test_ranks_that_end_at_the_same_time_remove_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory_locks: bool
) -> None:
    real = files.open_locked

    def without(path: Path, *args: Any, **given: Any) -> int:
        if path.is_dir():
            raise OSError(errno.EBADF, "as NFS says")
        return real(path, *args, **given)

    if not directory_locks:
        monkeypatch.setattr(files, "open_locked", without)
    for number in range(20 if directory_locks else 1):
        runs = [RunDirectory(tmp_path, f"run{number}", rank) for rank in range(4)]
        for run in runs:
            run.finish()
        threads = [threading.Thread(target=run.remove_finished, args=(4,)) for run in runs]
        for thread in threads:
            thread.start()
            if not directory_locks:
                thread.join(HANG_S)
        for thread in threads:
            thread.join(HANG_S)
        assert not runs[0].path.exists()


def test_a_second_run_of_the_same_id_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with holding(hold, tmp_path, "run") as other:
        pid = other.processes[0].pid
        with pytest.raises(LockedError, match=rf"in use by process {pid} on .*run\.name"):
            RunDirectory(tmp_path, "run", 0)
        assert (tmp_path / "run" / "data.bin").read_text() == "theirs"


def test_leftovers_of_dead_runs_are_found_and_can_be_taken_over(tmp_path: Path) -> None:
    assert find_leftovers(tmp_path / "missing") == []
    mine = RunDirectory(tmp_path, "mine", 0)
    (tmp_path / "not a run").mkdir()
    with holding(hold, tmp_path, "live", 1):
        with holding(hold, tmp_path, "dead"):
            assert find_leftovers(tmp_path) == []
        assert find_leftovers(tmp_path) == [tmp_path / "dead"]
        RunDirectory(tmp_path, "dead", 0).remove()
    mine.remove()


def test_a_run_that_can_go_on_is_told_how_and_never_of_itself(tmp_path: Path) -> None:
    for name in ("left", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.lock").touch()
        (tmp_path / name / "rank0-1-0.bin").write_bytes(b"x" * 8192)
    (tmp_path / "kept" / "rank0-1.commits-head").touch()
    kept, left = leftovers_line([tmp_path]).splitlines()
    assert kept.startswith(
        "an interrupted run keeps 8 KiB to go on from (kept): start the same program again"
    )
    assert kept.endswith(f"rm -r {tmp_path}/kept")
    assert left.endswith(f"which no run uses; to remove them: rm -r {tmp_path}/left")
    assert leftovers_line([tmp_path], "kept") == left


# --- in a directory that others write, too ---------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "victim"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp: everybody may write, and nobody may replace what others have there."""
    path = tmp_path / "nvme"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.mark.parametrize("name", ["rank0.bin", "rank0.base", "rank0.commit"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_replaced_and_its_target_stays(shared, victim, name, link) -> None:
    (shared / "run").mkdir(mode=0o700)
    link(victim, shared / "run" / name)
    run = RunDirectory(shared, "run", 0)
    volume = Volume([run.file(name)])
    volume.allocate(4096, what="unit")
    assert victim.read_text() == "precious"
    assert (run.path / name).lstat().st_mode & 0o170777 == 0o100600
    volume.close()
    run.remove()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_lock_is_refused_and_its_target_stays(shared, victim, link) -> None:
    (shared / "run").mkdir(mode=0o700)
    link(victim, shared / "run" / "rank0.lock")
    with pytest.raises(UnsafePathError, match=r"rank0\.lock is a .*link.*remove it"):
        RunDirectory(shared, "run", 0)
    assert victim.read_text() == "precious"


def test_a_planted_run_directory_is_refused(shared, victim) -> None:
    (shared / "linked").symlink_to(victim.parent)
    with pytest.raises(UnsafePathError, match="linked is a symbolic link"):
        RunDirectory(shared, "linked", 0)
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    with pytest.raises(UnsafePathError, match="open is writable by all users"):
        RunDirectory(shared, "open", 0)
    assert sorted(path.name for path in victim.parent.iterdir()) == ["victim"]


def test_a_directory_in_which_everybody_may_replace_files_is_refused(shared) -> None:
    shared.chmod(0o777)
    with pytest.raises(UnsafePathError, match=r"nvme is writable by all users \(mode 777\).*of your own"):
        RunDirectory(shared, "run", 0)
    assert list(shared.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_other_users_own_is_refused_and_their_leftovers_are_not_offered_for_removal(shared) -> None:
    (shared / "theirs").mkdir(mode=0o700)
    (shared / "theirs" / "rank0.lock").touch()
    assert find_leftovers(shared) == [shared / "theirs"]
    os.chown(shared / "theirs", 12345, -1)
    assert find_leftovers(shared) == []
    with pytest.raises(UnsafePathError, match=r"theirs belongs to another user \(uid 12345\)"):
        RunDirectory(shared, "theirs", 0)
    os.chown(shared, 12345, -1)
    with pytest.raises(UnsafePathError, match=r"nvme belongs to another user \(uid 12345\).*of your own"):
        RunDirectory(shared, "run", 0)


def test_a_pipe_in_place_of_a_lock_is_not_waited_for(shared) -> None:
    (shared / "run").mkdir(mode=0o700)
    os.mkfifo(shared / "run" / "rank0.lock")
    assert "ended without removing" in leftovers_line([shared])
    with pytest.raises(UnsafePathError, match="or no file"):
        RunDirectory(shared, "run", 0)


def test_an_unwritable_root_is_a_disk_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"making the run's directory .*give memory\.nvme a directory"):
        RunDirectory(tmp_path / "file" / "root", "run", 0)
    with pytest.raises(DiskError):
        RunDirectory(Path("/proc/infinity"), "run", 0)


def test_ids_differ_and_sort_by_time() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(run_id[:8].isdigit() for run_id in ids)
