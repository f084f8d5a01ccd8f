"""Runs the core of the suite and the quickstart under poor conditions: one by one, or all at once.

    python tests/bare.py                    each condition by itself
    python tests/bare.py --all-at-once      all together
    python tests/bare.py compiler shm       these two, one by one
    python tests/bare.py --list

A condition changes a process of its own before it becomes the program: its environment, its limits, what is
mounted for it. Nothing of the machine is changed and nothing has to be put back. Most conditions need no
privilege; what cannot be made here is said, and is no failure. A program fails if it exits with an error,
and the quickstart also if it warns: what falls back says so in a line, and is no warning.
"""

import argparse
import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The promises that a machine could break: the same bits, transfers, ranks, recipes, training, faults.
CORE = (
    "tests/test_parity.py", "tests/nvme", "tests/engine/test_leaves.py", "tests/recipes/test_recipe.py",
    "tests/app/test_train.py", "tests/test_faults.py", "tests/shards/test_pipeline.py",
)  # fmt: skip
QUICKSTART_STEPS = 3
TIMEOUT_S = 1200

#: A user and group of no name, as in containers that run with any uid.
STRANGER = 54321
NOT_HERE = "   not possible here: "
MEMORY_NBYTES = 4 << 30
SHM_NBYTES = 1 << 20
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|c89|c99|clang|clang\+\+|icx|icpx|nvcc)(-[0-9.]+)?")

#: From linux/prctl.h, linux/capability.h, linux/sched.h and linux/mount.h.
PR_SET_THP_DISABLE, PR_CAPBSET_DROP, CAP_IPC_LOCK = 41, 24, 14
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


class NotHereError(Exception):
    """This condition cannot be made on this machine; the message says why."""


@dataclass
class Scene:
    """What conditions change: the environment, what is mounted, and where the program may write."""

    environment: dict[str, str]
    folder: Path  # for what a condition needs
    private_mounts: bool = False

    @property
    def files(self) -> Path:
        """Where all files of the program lie."""
        return self.folder / "files"

    def mount(
        self, kind: str, target: Path | str, *, flags: int = 0, data: str = "", source: str = "none"
    ) -> None:
        """Mount for this process and its children alone."""
        if not self.private_mounts:
            _unshare_mounts()
            self.private_mounts = True
        words = [source.encode(), str(target).encode(), kind.encode()]
        _call("mount", *words, ctypes.c_ulong(flags), data.encode())


Condition = Callable[[Scene], None]
CONDITIONS: dict[str, Condition] = {}


def condition(function: Condition) -> Condition:
    CONDITIONS[function.__name__] = function
    return function


# --- the conditions, in the order in which they are made -----------------------------------------


@condition
def environment(scene: Scene) -> None:
    """an empty environment (env -i)"""
    scene.environment.clear()


@condition
def direct(scene: Scene) -> None:
    """a file system without O_DIRECT"""
    for kind in ("tmpfs", "ramfs"):  # newer kernels take O_DIRECT on tmpfs
        scene.mount(kind, scene.files, flags=MS_NOSUID | MS_NODEV, data="mode=755")
        if not _takes_direct(scene.files):
            return
    raise NotHereError("tmpfs and ramfs take O_DIRECT")


@condition
def shm(scene: Scene) -> None:
    """/dev/shm of 1 MiB"""
    scene.mount("tmpfs", "/dev/shm", flags=MS_NOSUID | MS_NODEV, data=f"mode=1777,size={SHM_NBYTES}")


@condition
def memory(scene: Scene) -> None:
    """a cgroup with 4 GiB of memory"""
    group, limit = _new_cgroup()
    try:
        limit.write_text(str(MEMORY_NBYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise NotHereError(f"{limit}: {error.strerror}") from None


@condition
def core(scene: Scene) -> None:
    """one core"""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@condition
def hugepages(scene: Scene) -> None:
    """no huge pages"""
    _call("prctl", PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0)))


@condition
def memlock(scene: Scene) -> None:
    """64 KiB of lockable memory"""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.geteuid() == 0:  # the capability exempts root from the limit
        _call("prctl", PR_CAPBSET_DROP, *map(ctypes.c_ulong, (CAP_IPC_LOCK, 0, 0, 0)))


@condition
def isa(scene: Scene) -> None:
    """a CPU without AVX-512"""
    if os.uname().machine != "x86_64":
        raise NotHereError(f"this is {os.uname().machine}")
    scene.environment |= {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2,+ssse3",
    }


@condition
def libaio(scene: Scene) -> None:
    """no libaio"""
    shadow = scene.folder / "shadow"
    (shadow / "libaio").mkdir(parents=True)
    # What the package does where the system's library is missing.
    (shadow / "libaio/__init__.py").write_text(
        "raise OSError('libaio.so.1: cannot open shared object file: No such file or directory')\n"
    )
    scene.environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(shadow), scene.environment.get("PYTHONPATH")])
    )


@condition
def compiler(scene: Scene) -> None:
    """no compiler"""
    programs = scene.folder / "bin"
    programs.mkdir()
    for folder in scene.environment.get("PATH", os.defpath).split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            link = programs / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    scene.environment["PATH"] = str(programs)
    for name in ("CC", "CXX"):
        scene.environment.pop(name, None)


@condition
def language(scene: Scene) -> None:
    """LANG=C, and output in ASCII"""
    scene.environment |= {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@condition
def home(scene: Scene) -> None:
    """a home that cannot be written"""
    for name in [name for name in scene.environment if name.startswith("XDG_")]:
        del scene.environment[name]
    scene.environment["HOME"] = os.devnull  # not even root can make a file below it


@condition
def user(scene: Scene) -> None:
    """another user, who has no name and may write nothing but temporary files"""
    if os.geteuid() != 0:
        return  # no root to begin with
    os.chown(scene.files, STRANGER, STRANGER)
    _open_ways(scene, {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT})
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


# --- how they are made ---------------------------------------------------------------------------


def _call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise NotHereError(f"{name}: {errno.errorcode.get(code, code)}")


def _unshare_mounts() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS) != 0:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def _takes_direct(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def _cgroups() -> list[tuple[Path, str]]:
    """Where a group with limited memory may be made, below this process's own: v2, then v1."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    hierarchies = [
        ("/sys/fs/cgroup", "", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes"),
    ]
    # In a container the path is the host's, and the container's own group is what is mounted.
    return [
        (above, limit)
        for mounted, controller, limit in hierarchies
        if controller in own
        for above in (Path(mounted + own[controller]), Path(mounted))
    ]


def _new_cgroup() -> tuple[Path, Path]:
    """A new group, and the file with its limit."""
    for above, limit in _cgroups():
        group = above / f"bare-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                return group, group / limit
            group.rmdir()
    raise NotHereError("no cgroup with its own limit may be made")


def _remove_cgroups(pid: int) -> None:
    for above, _ in _cgroups():
        group, until = above / f"bare-{pid}", time.monotonic() + 30
        while group.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # busy until its last process, a fork server, has ended
                group.rmdir()
            time.sleep(0.1)


def _open_ways(scene: Scene, paths: set[Path]) -> None:
    """Let every user reach ``paths``, for this process and its children."""
    closed = {path: [above for above in path.parents if not above.stat().st_mode & 0o001] for path in paths}
    asides = {path: scene.folder / f"aside{nth}" for nth, path in enumerate(sorted(paths)) if closed[path]}
    for path, aside in asides.items():
        aside.mkdir()
        scene.mount("none", aside, flags=MS_BIND | MS_REC, source=str(path))
    for outermost in {closed[path][-1] for path in asides}:
        scene.mount("tmpfs", outermost, data="mode=755")
    for path, aside in asides.items():
        path.mkdir(parents=True, exist_ok=True)
        scene.mount("none", path, flags=MS_BIND | MS_REC, source=str(aside))


def become(names: list[str], folder: Path, command: list[str]) -> None:
    """Make the conditions, then become the program; its files lie in ``folder``."""
    scene = Scene(dict(os.environ), folder)
    scene.files.mkdir()
    for name in CONDITIONS:  # in their order
        if name in names:
            try:
                CONDITIONS[name](scene)
            except NotHereError as why:
                print(f"{NOT_HERE}{CONDITIONS[name].__doc__} ({why})", flush=True)
    scene.environment["TMPDIR"] = str(scene.files)
    scene.environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scene.files / "hypothesis")
    os.chdir(ROOT)
    os.execve(command[0], [word.replace("{}", str(scene.files)) for word in command], scene.environment)


# --- the programs --------------------------------------------------------------------------------


def programs(jobs: int) -> dict[str, list[str]]:
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "{}/pytest"]
    parallel = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    return {
        "quickstart": [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infinity", "train",
            "configs/quickstart.yaml", f"train.steps={QUICKSTART_STEPS}", "train.threads=1",
            "run.dir={}/runs", "data.cache={}/tokens", "memory.nvme=[{}/nvme]",
        ],
        "suite": [*suite, "-o", "tmp_path_retention_policy=failed", *parallel, *CORE],
    }  # fmt: skip


def run(names: list[str], program: str, command: list[str]) -> bool:
    """Run one program under these conditions; say how it ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bare-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        arguments = [sys.executable, __file__, "--become", ",".join(names), folder, *command]
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output = process.communicate(timeout=TIMEOUT_S)[0].decode(errors="replace")
        finally:
            _end(process)
            _remove_cgroups(process.pid)
    lines = output.splitlines()
    warned = program == "quickstart" and any("Warning" in line for line in lines)
    good = process.returncode == 0 and not warned
    missing = [line for line in lines if line.startswith(NOT_HERE)]
    print("\n".join([*missing, f"   {program}: {_closing(program, lines)}"]))
    if not good:
        print("\n".join(f"   | {line}" for line in lines[-100:]))
    print(f"   {'passed' if good else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return good


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a program that still runs; asked first, so that launchers end their ranks."""
    for signum, patience_s in ((signal.SIGTERM, 30), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def _closing(program: str, lines: list[str]) -> str:
    """The line that says most: pytest's last one, the quickstart's last step."""
    said = [line for line in lines if program == "suite" or "loss" in line]
    return said[-1].strip("= ") if said else "nothing was said"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="condition", help="those to make; none: each")
    parser.add_argument("--all-at-once", action="store_true", help="together, in one run")
    parser.add_argument("--only", choices=["suite", "quickstart"], help="run this program alone")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes of the suite"
    )
    parser.add_argument("--list", action="store_true", help="list the conditions")
    options = parser.parse_args()
    if options.list:
        for name, each in CONDITIONS.items():
            print(f"{name:12} {each.__doc__}")
        return 0
    if unknown := set(options.names) - set(CONDITIONS):
        parser.error(f"no condition {', '.join(unknown)}; there are {', '.join(CONDITIONS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bare: ended by SIGTERM"))  # and with it what it runs
    names = options.names or list(CONDITIONS)
    failed = []
    for together in [names] if options.all_at_once else [[name] for name in names]:
        title = "; ".join(str(CONDITIONS[name].__doc__) for name in together)
        print(f"== {title}", flush=True)
        for program, command in programs(1 if "core" in together else options.jobs).items():
            if options.only in (None, program) and not run(together, program, command):
                failed.append(f"{program} with {title}")
    print("bare: " + ("; ".join(f"FAILED: {each}" for each in failed) or "passed under every condition"))
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--become"]:
        become(sys.argv[2].split(","), Path(sys.argv[3]), sys.argv[4:])
    sys.exit(main())
