"""The accelerator of a rank: streams, memory, generators. The only module that tells one kind from another.

By torch's generic interface CUDA, ROCm, XPU and other back ends take the same path; what it lacks, the
device's own module has.

[Note: the stream of a thread]
Kernels and copies go to the calling thread's current stream, and wait for nothing on other streams. A thread
that moves bytes has a stream of its own; what one thread makes for another travels with an event.

[Note: remainders]
torch wants blocks at multiples of 64 bytes, so glibc cuts off what lies around them. Before version 2.39
these remainders go to a cache of small chunks (``tcache``): a freed block leaves a hole too small for the
next of its size, and the heap grows (https://sourceware.org/bugzilla/show_bug.cgi?id=30723). The cache can be
turned off only before a process starts.
"""

import ctypes
import functools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from infinity.core.nbytes import Transfer

_module: Callable[[torch.device], Any] = torch.get_device_module


def use_own_stream(device: torch.device) -> None:
    """Let the calling thread work on ``device``, on a new stream; on the CPU do nothing."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        torch.accelerator.set_stream(torch.Stream(device))  # which belongs to this thread, as the device does


def new_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.Stream(device)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context in which the calling thread works on ``stream``; None: on its current one."""
    if stream is None:
        yield
        return
    # Not ``with stream``: that keeps the stream from before in ``stream``, which threads may share.
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def record(device: torch.device) -> torch.Event | None:
    """Return an event after all work that the calling thread has given its stream; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def wait_on_stream(event: torch.Event | None, device: torch.device) -> None:
    """Let later work on the calling thread's stream wait for ``event``; does not block."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


def wait_on_host(event: torch.Event | None) -> None:
    if event is not None:
        event.synchronize()


class StreamTransfer(Transfer):
    """A move that ends when a stream was given the last of it; ``wait`` makes the caller's stream wait."""

    __slots__ = ("_device", "_given")

    def __init__(self) -> None:
        super().__init__()
        self._given: torch.Event | None = None
        self._device = torch.device("cpu")

    def record(self, device: torch.device) -> None:
        """End the move with the work so far on the calling thread's stream; call before :meth:`finish`."""
        self._given, self._device = record(device), device

    def wait(self) -> None:
        """Return when the calling thread may give its stream work on what was moved."""
        super().wait()
        wait_on_stream(self._given, self._device)


def timed_event(device: torch.device) -> torch.Event:
    """Record and return an event whose time can be compared with that of others."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Block until the device has done all work that it was given; on the CPU do nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def least_s(run: Callable[[], object], device: torch.device, tries: int) -> float:
    """Return the least seconds of ``tries`` runs, of which the first may compile and allocate."""
    times_s = []
    for _ in range(tries):
        synchronize(device)
        began_s = time.perf_counter()
        run()
        synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)


def memory_nbytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of an accelerator (bytes)."""
    ask = getattr(torch.accelerator, "get_memory_info", None) or _module(device).mem_get_info
    free, total = ask(device)
    return int(free), int(total)


def cached_nbytes(device: torch.device) -> int:
    """Return the accelerator memory that torch's allocator keeps but nothing uses (bytes)."""
    module = _module(device) if hasattr(_module(device), "memory_reserved") else torch.accelerator
    return int(module.memory_reserved(device) - module.memory_allocated(device))


def name_of(device: torch.device) -> str:
    """Return the accelerator's name from its maker, or the device's if its kind has none."""
    return str(getattr(_module(device), "get_device_name", str)(device))


def rounds_roots(device: torch.device) -> bool:
    """Return whether ``Tensor.sqrt`` of float32 is correctly rounded: CUDA's is, as IEEE 754 wants it."""
    return device.type == "cuda" and torch.version.hip is None


def summing_in_fp16(device: torch.device, wanted: bool) -> bool | None:
    """Tell torch whether products of fp16 add up in fp16 in this process; return what it was told before.

    None: this torch, or this kind of device, has no such sums.
    """
    products: Any = getattr(getattr(torch.backends, device.type, None), "matmul", None)
    if not hasattr(products, "allow_fp16_accumulation"):
        return None
    before = bool(products.allow_fp16_accumulation)
    products.allow_fp16_accumulation = wanted
    return before


#: What torch was told before each of those who let products of fp16 add up in fp16 now.
_told: list[bool] = []


def sum_in_fp16(device: torch.device) -> Callable[[], None]:
    """Let products of fp16 add up in fp16 until the function returned is called, and those of others, too."""
    _told.append(bool(summing_in_fp16(device, True)))

    def end() -> None:
        before = _told[0]
        _told.pop()
        if not _told:
            summing_in_fp16(device, before)

    return end


def compile_kernel(source: str, name: str, device: torch.device) -> Callable[..., None] | None:
    """Compile a kernel in CUDA C that fuses no multiply-add; None: this device or this torch has no compiler.

    The function returned takes ``grid``, ``block`` and ``args`` (tensors, and integers of 32 bits), and runs
    the kernel on the calling thread's stream.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    try:
        torch.accelerator.set_device_index(device)
        cpp_extension.CUDA_HOME = home or "/usr"  # torch names the folder of its headers, which nothing reads
        kernel: Callable[..., None] = _module(device)._compile_kernel(
            source, name, nvcc_options=["--fmad=false"]
        )
        return kernel
    except Exception:  # an older torch, or a driver without its compiler
        return None
    finally:
        cpp_extension.CUDA_HOME = home


def hardware_id(device: torch.device) -> str:
    """Return an id that no other accelerator has; empty if its kind has none."""
    properties = getattr(_module(device), "get_device_properties", lambda _: None)(device)
    return str(getattr(properties, "uuid", ""))


def reaches_others(device: torch.device) -> bool:
    """Return whether an accelerator reads the memory of all others that this process sees.

    True if its kind does not say, or if it sees no other.
    """
    can_access = getattr(_module(device), "can_device_access_peer", lambda *_: True)
    others = {*range(torch.accelerator.device_count())} - {device.index}
    return all(can_access(device, torch.device(device.type, other)) for other in others)


def pci_address(device: torch.device) -> str:
    """Return an accelerator's address on the PCI bus, as sysfs names it; empty if its kind tells none."""
    properties = getattr(_module(device), "get_device_properties", lambda _: None)(device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = (-1 if each is None else int(each) for each in numbers)
    return "" if None in numbers else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def page_lock(address: int, nbytes: int, device: torch.device) -> int:
    """Page-lock host memory for ``device``; return 0, or the error code of its driver."""
    with _current(device):
        if device.type == "cuda":
            code = int(_module(device).cudart().cudaHostRegister(address, nbytes, 0))
        else:
            register = getattr(_module(device), "host_register", None)
            code = 0 if register is None else int(register(address, nbytes) or 0)  # else copies are slower
        if code != 0:
            # CUDA returns the code of a call that failed once more, from whichever launch is looked at next.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


def page_unlock(address: int, device: torch.device) -> None:
    with _current(device):
        if device.type == "cuda":
            _module(device).cudart().cudaHostUnregister(address)
        elif (unregister := getattr(_module(device), "host_unregister", None)) is not None:
            unregister(address)


def _current(device: torch.device) -> AbstractContextManager[object]:
    # A thread without a device would begin to use the first, with some hundred MB of its memory.
    if hasattr(torch.accelerator, "device_index"):  # torch 2.8
        return torch.accelerator.device_index(device.index)
    torch.accelerator.set_device_index(device)
    return nullcontext()


#: Turn that cache off, and another one.
_TUNABLES = ("glibc.malloc.tcache_count", "glibc.malloc.mxfast")
_VARIABLE = "GLIBC_TUNABLES"
#: Free bytes in the heap that stay there.
_MOST_FREE_NBYTES = 64 * 2**20
#: Files that drivers of accelerators make; beside an accelerator activations are not in host memory.
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")


def tunables(environment: Mapping[str, str]) -> str | None:
    """Return the ``GLIBC_TUNABLES`` that let a process reuse what torch frees; None: no change is needed."""
    version, given = glibc_version(), environment.get(_VARIABLE, "")
    if version is None or version >= (2, 39) or any(name in given for name in _TUNABLES):
        return None
    return ":".join([*filter(None, [given]), *(f"{name}=0" for name in _TUNABLES)])


def bound_kernels() -> None:
    """Let oneDNN keep 64 of the kernels that it compiles for bf16 and fp16 on CPUs, unless it began before.

    It makes one of half a MiB for each shape, and by default keeps 1,024: rows of experts have hundreds of
    shapes, whose kernels would take as much memory as activations. One that is made again takes 0.3 ms.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def trim_heap() -> None:
    """Give free memory inside the C library's heap back to the system, if it is much.

    What stays of a block, such as its output, lies where large tensors were freed, and those of the next
    block no longer fit there: without this the heap grows with every block.
    """
    libc = _libc()
    if libc is not None and libc.mallinfo2().fordblks >= _MOST_FREE_NBYTES:
        libc.malloc_trim(0)


class _HeapInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc; ``fordblks`` are free bytes inside the heap."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


@functools.cache
def _libc() -> Any:
    """Return glibc; None: the C library has no ``mallinfo2``."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _HeapInfo
    return libc


def heap_line() -> str:
    """A line for users whose process will not reuse what torch frees; empty if it will."""
    wanted = tunables(os.environ)
    if wanted is None:
        return ""
    version = ".".join(map(str, glibc_version() or ()))
    return (
        f"glibc {version} reuses little of the memory that torch frees, so the process takes more than its "
        f"budget for activations: start Python with {_VARIABLE}={wanted}, or use glibc 2.39 or later"
    )


def restart_with_tunables(program: str, arguments: Sequence[str]) -> None:
    """Replace this process, which has only begun, by one that reuses what torch frees.

    Returns if nothing would change, if there is an accelerator, or if the interpreter was not started as
    ``program`` with ``arguments`` (``sys.argv``): then it is unknown how to start it again.
    """
    wanted, started = tunables(os.environ), sys.orig_argv
    is_ours = Path(program).name in ("infinity", "__main__.py") and started[-len(arguments) :] == [*arguments]
    if wanted is None or not (is_ours and sys.executable) or any(map(os.path.exists, DEVICE_FILES)):
        return
    os.execve(sys.executable, [sys.executable, *started[1:]], {**os.environ, _VARIABLE: wanted})


def glibc_version() -> tuple[int, ...] | None:
    """Return the version of this process's glibc; None: it has another C library."""
    with suppress(ValueError, OSError):
        found = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
        return (int(found[1]), int(found[2])) if found else None
    return None


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all random generators that a model may use: tensors, numbers and text."""
    kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(kind), keys.tolist(), *rest],
    }
    if device.type != "cpu":
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`generator_states` returned; the device's only on a device that has a generator."""
    torch.set_rng_state(states["cpu"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)
