"""Starts processes as forks of one that has imported torch, transformers and the package already.

Importing them takes many times longer than most tests. A fork server imports them once and forks for
every request; it serves every worker of the suite and ends with it. A fork is a process like any other:
its own pid, process group, environment and log, an ordinary end of the interpreter, and an exit status
that its starter learns. The server itself never starts a thread, so a fork inherits no lock that is held.

Two servers differ in the seed of Python's hashes, as processes that are started one by one would: ranks that
rely on the order of a set still diverge.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

from tests.helpers.limits import HANG_S, comes_true

ROOT = Path(__file__).parent.parent.parent

#: Set by the first process of the suite and inherited by its workers: its pid.
OWNER = "INFINITY_TEST_OWNER"
#: Of Python's hashes, one for each server.
SEEDS = (1, 2)

#: Third-party modules that take long to import; none of them starts a thread.
IMPORTS = (
    "numpy", "scipy.optimize", "torch", "torch.distributed", "torch.utils.checkpoint", "torch.testing",
    "torch._dynamo", "numba", "safetensors.torch", "omegaconf", "yaml", "einops", "rich.live", "rich.table",
    "rich.progress", "pytest", "hypothesis", "transformers",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5", "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a fork runs: ``module.function(argument)``, whose result is its exit code."""

    module: str
    function: str
    argument: str
    environment: dict[str, str]
    path: list[str]  # sys.path
    log: str  # file for stdout and stderr
    imported: bool = True  # the package is; else it is imported anew, changed maybe

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background ignores it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one under nohup this one
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        if not self.imported:
            for name in [name for name in sys.modules if name.partition(".")[0] == "infinity"]:
                del sys.modules[name]
        os.chdir(ROOT)
        code = getattr(importlib.import_module(self.module), self.function)(self.argument)
        return int(code)


class Fork:
    """A running fork, with the members of ``subprocess.Popen`` that tests use."""

    def __init__(self, job: Job, seed: int) -> None:
        self._server = _connect(seed)
        self._server.send(job)
        self.pid = int(self._server.recv())  # EOFError: the server is dead; its log lies beside its socket
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._server.poll():
            self.returncode = int(self._server.recv())
            self._server.close()
        return self.returncode

    def wait(self, timeout: float = HANG_S) -> int:
        if self.returncode is None and not self._server.poll(timeout):
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def own() -> None:
    """Make this process the owner of the fork servers, unless it is a worker of one."""
    os.environ.setdefault(OWNER, str(os.getpid()))


def _connect(seed: int) -> Connection:
    """A connection to the server of this hash seed; the first who asks starts all servers."""
    own()
    folder = Path(tempfile.gettempdir(), f"forks-{os.getuid()}-{os.environ[OWNER]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for each in SEEDS:
            if not _address(folder, each).exists():
                _start(folder, each)
    return Client(str(_address(folder, seed)), "AF_UNIX")


def _address(folder: Path, seed: int) -> Path:
    return folder / f"server.{seed}"


def _start(folder: Path, seed: int) -> None:
    """Start a server with a socket that listens already: who connects waits until it has imported."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(_address(folder, seed)))
        listener.listen(64)
        listener.set_inheritable(True)
        log = folder / f"log.{seed}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", __name__, str(folder), str(listener.fileno()), os.environ[OWNER]],
            {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # Ctrl-C is for the suite, which then ends ranks and server
        )


def serve(folder: str, listener: socket.socket, owner: int) -> Job | None:
    """Fork for every connection until ``owner`` has ended; a fork returns with its job."""
    owner_fd = os.pidfd_open(owner)
    for name in IMPORTS:
        importlib.import_module(name)
    # It starts programs to find its library, which a machine may lack.
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("libaio")
    _import_package()
    _load_loops()
    if not comes_true(lambda: len(list(Path("/proc/self/task").iterdir())) == 1, 60):
        raise RuntimeError("an import has started a thread: forks would inherit the locks that it holds")
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch unregisters each of its operators: most of what a short fork would do
    gc.freeze()  # a collection in a fork would write to, and so copy, every page with an object
    forks: dict[int, Connection] = {}
    while True:
        ready = wait([listener, owner_fd], timeout=0.01 if forks else None)
        if owner_fd in ready:
            for pid in forks:  # the suite was killed: its ranks would wait for ever
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        if listener in ready:
            starter = Connection(listener.accept()[0].detach())
            job = starter.recv()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                for each in (listener, starter, *forks.values()):
                    each.close()
                os.close(owner_fd)
                log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                return job
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # here, too: it must be true when the starter learns the pid
            starter.send(pid)
            forks[pid] = starter
        _reap(forks)


def _import_package() -> None:
    import infinity

    for module in pkgutil.walk_packages(infinity.__path__, "infinity."):
        # other packages' trainers import what they find, and that may start threads
        if not module.name.endswith("__main__") and ".integrations." not in module.name:
            importlib.import_module(module.name)


def _load_loops() -> None:
    """Load the compiled updates of most tests, which would take longer than some of them."""
    import torch

    from infinity.optim.rules import RULES, prepare

    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, grad_dtype in ((fp32, fp32), (bf16, bf16), (bf16, fp32)):  # several ranks add up in fp32
        prepare(RULES["adamw"], dtype, grad_dtype)


def _reap(forks: dict[int, Connection]) -> None:
    """Tell the starters of the forks that have ended how they did."""
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        starter = forks.pop(pid)
        with contextlib.suppress(OSError):  # who started it may be gone
            starter.send(os.waitstatus_to_exitcode(status))
        starter.close()


if __name__ == "__main__":
    _job = serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    sys.exit(0 if _job is None else _job.run())
