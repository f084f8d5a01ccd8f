"""Compiles the simulated accelerator, once for each release of torch and version of its source."""

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("sim.cpp")
#: Unoptimised: it compiles in half of the time, and all that takes long is in torch.
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")


class CannotBuildError(Exception):
    """Why there is no simulated accelerator here, in one line."""


@functools.cache
def library() -> Path:
    """The compiled library; compiled now if it was not, which takes half a minute. Any process may call.

    Raises:
        CannotBuildError: There is no compiler, or it fails.
    """
    import torch
    from torch.utils import cpp_extension

    compiler = _compiler()
    lib = Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    command = [
        *compiler, *_FLAGS, abi, *includes, str(SOURCE), f"-L{lib}", "-lc10", "-ltorch_cpu",
        f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
    key = hashlib.sha256(f"{torch.__version__} {command}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"infinity-sim-{key}.so"
        with (folder / f"infinity-sim-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of the suite come here together
            if not target.exists():
                _compile(command, target)
    except OSError as error:
        raise CannotBuildError(f"no simulated accelerator: {folder} cannot be written: {error}") from error
    return target


def _compiler() -> list[str]:
    named = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++"
    for each in (shlex.split(named), ["g++"], ["c++"]):
        if each and shutil.which(each[0]):
            return each
    raise CannotBuildError("no simulated accelerator: no C++ compiler (install g++, or set CXX)")


def _compile(command: list[str], target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    ended = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = [line for line in ended.stderr.splitlines() if "error" in line] or ended.stderr.splitlines()
        raise CannotBuildError(f"no simulated accelerator: {command[0]} fails: {(lines or ['?'])[0][:300]}")
    partial.rename(target)
