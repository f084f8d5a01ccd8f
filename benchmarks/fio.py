"""What the disk gives, by fio: the rate of a mix of reads and writes, and a load beside a run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from infinity.device.machine import missing_huge_pages

BLOCK = "1M"
_COMMON = ["--direct=1", f"--bs={BLOCK}", "--group_reporting", "--output-format=json", "--thread"]


def available() -> bool:
    return shutil.which("fio") is not None


@dataclass(frozen=True, slots=True)
class Pages:
    """What fio's buffers lie on; with pages of 4 KiB it may reach a third of what the drive can do.

    Attributes:
        title: For people.
        args: Of fio.
        environment: Of its process, beside our own.
    """

    title: str
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@cache
def pages() -> Pages:
    """Transparent huge pages, as the engine's buffers have, where fio can get them; else the best there is.

    fio's option ``thp`` is for files that its engine mmap maps. Its buffers come from malloc, which glibc
    (2.35 and later) puts on huge pages when it is told so.
    """
    name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    recent = name == "glibc" and tuple(int(part) for part in number.split(".")[:2]) >= (2, 35)
    if recent and not missing_huge_pages():
        return Pages("transparent huge pages", environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("HugePages_Free:") and int(line.split()[1]) >= 40:
            return Pages("reserved huge pages", ("--iomem=shmhuge",))
    return Pages("pages of 4 KiB, which slow it down")


def environment() -> dict[str, str]:
    """Of a process of fio."""
    return {**os.environ, **pages().environment}


def file_nbytes(folder: Path) -> int:
    """Bytes of a test file: 4 GiB, or an eighth of what is free."""
    return min(4 << 30, shutil.disk_usage(folder).free // 8) >> 20 << 20


def prepare(folder: Path, nbytes: int | None = None) -> None:
    """Write the files that the other functions use, so that no job meets unwritten extents.

    Args:
        folder: On the drive to measure.
        nbytes: Of each file; None: ``file_nbytes``.
    """
    nbytes = nbytes or file_nbytes(folder)
    for name in ("mixed", "read", "write"):
        path = folder / f"fio.{name}"
        if not path.exists():
            _run([f"--name={name}", f"--filename={path}", f"--size={nbytes}", "--rw=write"])


def mixed_bytes_per_s(folder: Path, read: float, written: float, seconds: float = 5) -> float:
    """Bytes per second, both ways together, at the mix of ``read`` to ``written`` bytes."""
    share = round(100 * read / (read + written))
    mix = ["--rw=rw", f"--rwmixread={share}", "--time_based", "--ramp_time=1", f"--runtime={seconds}"]
    job = _run(["--name=mixed", f"--filename={folder / 'fio.mixed'}", *mix])
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def read_bytes_per_s(files: Sequence[Path], seconds: float) -> float:
    """Bytes per second that are read from ``files``, one after the other."""
    names = ":".join(str(file).replace(":", "\\:") for file in files)
    how = ["--rw=read", "--file_service_type=sequential", "--time_based", f"--runtime={seconds}"]
    return float(_run(["--name=read", f"--filename={names}", *how])["read"]["bw_bytes"])


def seconds_for(folder: Path, read: int, written: int) -> float:
    """Time to read ``read`` bytes of an old file while ``written`` bytes become a new one (s)."""
    old, new = folder / "fio.old", folder / "fio.new"
    if not old.exists() or old.stat().st_size < read:
        _run(["--name=old", f"--filename={old}", f"--size={read}", "--rw=write"])
    new.unlink(missing_ok=True)
    jobs = ["--name=read", f"--filename={old}", f"--size={read}", "--rw=read"]
    jobs += ["--name=write", f"--filename={new}", f"--size={written}", "--rw=write"]
    done = _jobs([*_COMMON[:2], "--thread", "--fallocate=native", "--end_fsync=1", *jobs])
    new.unlink()
    return max(done[0]["read"]["runtime"], done[1]["write"]["runtime"]) / 1000


@contextlib.contextmanager
def beside(folder: Path, read_per_s: float, written_per_s: float) -> Iterator[dict[str, float]]:
    """Move bytes at these rates while the block runs; afterwards the dict says what was moved.

    Keys: ``read_per_s`` and ``written_per_s``, as fio counted them.
    """
    moved: dict[str, float] = {}
    with tempfile.NamedTemporaryFile(prefix="fio-", suffix=".json") as out:
        # Of this load only the rate matters; a shallow queue keeps it smooth.
        args = [
            "fio",
            *_COMMON[:2],
            *pages().args,
            "--ioengine=libaio",
            "--iodepth=8",
            "--thread",
            "--time_based",
        ]
        args += ["--runtime=7200", "--output-format=json", f"--output={out.name}"]
        args += ["--name=read", f"--filename={folder / 'fio.read'}", "--rw=read"]
        args += [f"--rate={max(1, int(read_per_s))}"]
        args += ["--name=write", f"--filename={folder / 'fio.write'}", "--rw=write"]
        args += [f"--rate={max(1, int(written_per_s))}"]
        process = subprocess.Popen(
            args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
        )
        try:
            time.sleep(1.0)  # fio forks, opens and maps before it moves the first byte
            yield moved
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        moved.update(_moved(Path(out.name).read_text(encoding="utf-8")))


def _moved(text: str) -> dict[str, float]:
    jobs = {job["jobname"]: job for job in json.loads(text[text.index("{") :])["jobs"]}
    return {
        "read_per_s": float(jobs["read"]["read"]["bw_bytes"]),
        "written_per_s": float(jobs["write"]["write"]["bw_bytes"]),
    }


def _run(args: list[str]) -> dict[str, Any]:
    return _jobs([*_COMMON, *args])[0]


def _jobs(args: list[str]) -> list[dict[str, Any]]:
    command = ["fio", *pages().args, "--ioengine=libaio", "--iodepth=32", "--output-format=json", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return jobs
