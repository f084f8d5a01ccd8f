"""Two runs never touch each other's files; leftovers of dead ones are found."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.core.errors import DiskError, LockedError
from infinity.nvme.run_directory import RunDirectory, find_leftovers, new_run_id

_HOLD = """
import sys, time
from pathlib import Path
from infinity.nvme.run_directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
run.file("data.bin").write_text("theirs")
print("held", flush=True)
time.sleep(60)
"""


def hold(root: Path, run_id: str, rank: int = 0) -> subprocess.Popen[str]:
    """A process that holds a place in a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(root), run_id, str(rank)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


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


def test_a_name_with_folders_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "run", 0)
    for name in ("../x", "a/b", "", ".", "..", "/etc/x"):
        with pytest.raises(ValueError, match="without folders"):
            run.file(name)
    run.remove()


def test_a_second_run_of_the_same_id_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    process = hold(tmp_path, "run")
    try:
        with pytest.raises(LockedError, match=rf"in use by process {process.pid} on .*run\.name"):
            RunDirectory(tmp_path, "run", 0)
        assert (tmp_path / "run" / "data.bin").read_text() == "theirs"
    finally:
        kill(process)


def test_leftovers_of_dead_runs_are_found_and_can_be_taken_over(tmp_path: Path) -> None:
    assert find_leftovers(tmp_path / "missing") == []
    dead, live = hold(tmp_path, "dead"), hold(tmp_path, "live", rank=1)
    mine = RunDirectory(tmp_path, "mine", 0)
    (tmp_path / "not a run").mkdir()
    try:
        assert find_leftovers(tmp_path) == []
        kill(dead)
        assert find_leftovers(tmp_path) == [tmp_path / "dead"]
        RunDirectory(tmp_path, "dead", 0).remove()
    finally:
        mine.remove()
        kill(live)


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
