"""Measures this machine: memory, cores, huge pages, and how fast it multiplies each dtype; runs its threads.

[Note: threads beside training]
Updates have a pool of their own: numba's parallel loops must not be started from two threads at one time, and
torch's pool belongs to training. Slices are whole pieces of an elementwise loop, or rows that are summed one
by one, so their number changes no bit.

[Note: the node of an accelerator]
Threads that run on the cores of a NUMA node allocate and page-lock memory there: Linux takes a page from the
node of the thread that touches it first, and a driver touches what it locks. So cores are all that has to be
chosen, before threads and pools are made.
"""

import functools
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

from infinity.core.config import SettingError
from infinity.core.process import launched
from infinity.device.accelerator import least_s, pci_address, sum_in_fp16, summing_in_fp16

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: A dtype of 16 bits is fast if it is multiplied at this share of fp32's speed, or faster. Processors lie far
#: from it on either side: 0.02 where the dtype is emulated, 1.5 to 8 where they know it.
_FAST = 0.7
#: What ``auto`` tries, in order, and from which share of fp32's speed on: fp16 has a narrow range.
_AUTO: tuple[tuple[Dtype, float], ...] = (("bf16", _FAST), ("fp16", 2.0))
#: A dtype below this share at the small size is not measured at the large one: it would take too long.
_HOPELESS = 0.25
#: Rows and columns of the matrices, small and large. At 128 a product takes 3 ms where bf16 is emulated.
CPU_SIZES, ACCELERATOR_SIZES = (128, 256), (512, 2048)
_TRIES = 4
#: Sums in fp16 that are not so many times as fast are refused: they only cost precision.
FP16_SUMS_GAIN = 1.3

_ROOT = Path("/")
#: By version of control groups: files with limits, the file with the use, and idle page cache's name.
_MEMORY_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_NODES = "sys/devices/system/node/node[0-9]*"
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


def free_host_nbytes(root: Path = _ROOT) -> int:
    """Return the host memory that is free for one rank of this machine, or of this container (bytes)."""
    available = _read_field(root / "proc/meminfo", "MemAvailable:") * 1024
    free = [available or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for version, group, limit_nbytes in _memory_limits(root):
        _, used, idle_cache = _MEMORY_FILES[version]
        if (used_nbytes := read(group / used)).isdigit():
            # The kernel drops idle page cache before it holds a group to its limit.
            free.append(limit_nbytes - int(used_nbytes) + _read_field(group / "memory.stat", idle_cache))
    return max(0, min(free)) // local_ranks()


def total_host_nbytes(root: Path = _ROOT) -> int:
    """Return the host memory of this machine, or of this container, for all of its ranks (bytes)."""
    installed = _read_field(root / "proc/meminfo", "MemTotal:") * 1024
    installed = installed or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit_nbytes for _, _, limit_nbytes in _memory_limits(root))])


def local_ranks() -> int:
    return launched().local_world_size or 1


def usable_cores(root: Path = _ROOT) -> int:
    """Return the cores that this process may run on, or fewer if its container's quota is worth fewer."""
    cores = len(os.sched_getaffinity(0))
    for version, group in _control_groups(root, "cpu"):
        if version == 2:
            quota, period = [*read(group / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # else "max", -1 or nothing: no limit
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def missing_huge_pages(root: Path = _ROOT) -> str:
    """Return, in one line for people, why this machine has no transparent huge pages; empty: it has them."""
    if "[never]" in read(root / _HUGE_PAGES):
        why = f"/{_HUGE_PAGES} is never"
    else:
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
                return ""
            except (OSError, AttributeError):  # a kernel, or a C library, that does not know them
                why = "the kernel refuses MADV_HUGEPAGE"
    return f"no huge pages ({why}): ordinary ones are used, and bytes to and from the disk cost more CPU time"


def _memory_limits(root: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield version, directory and limit of every control group that limits this process's memory."""
    for version, group in _control_groups(root, "memory"):
        for name in _MEMORY_FILES[version][0]:
            if (limit_nbytes := read(group / name)).isdigit():  # else "max"
                yield version, group, int(limit_nbytes)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of every control group that limits this process, parents included."""
    own = [line.split(":", 2)[1:] for line in read(root / "proc/self/cgroup").splitlines()]
    for line in read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind != "cgroup2" and not (kind == "cgroup" and controller in options.split(",")):
            continue
        mounted, point = mount.split(" ")[3:5]
        top = root / point.lstrip("/")
        for controllers, name in own:
            if (not controllers) if kind == "cgroup2" else (controller in controllers.split(",")):
                path = PurePosixPath(name)
                # A container may see its own group at the mount point, whatever the path says.
                shown = path.is_relative_to(mounted) and ".." not in path.parts
                group = top / path.relative_to(mounted) if shown else top
                chain = (each for each in (group, *group.parents) if each.is_relative_to(top))
                yield from ((2 if kind == "cgroup2" else 1, each) for each in chain)


def read(path: Path) -> str:
    """Return the text of a small file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_field(path: Path, name: str) -> int:
    """Return the number in the line that begins with ``name``; 0 if there is none."""
    lines = (line.split() for line in read(path).splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)


def bind_to_node(device: torch.device, directories: Iterable[str], root: Path = _ROOT) -> str:
    """Let all threads of this process run on the NUMA node of ``device``; return a line for people, or none.

    Nothing changes where there is one node, where the device's is unknown, or where its cores are fewer than
    the shares of its ranks (one rank has all cores). ``directories`` on drives of other nodes are named.
    """
    nodes = {_number(each.name[4:]): each for each in root.glob(_NODES)}
    node = node_of_device(device, root)
    there = nodes[node].glob("cpu[0-9]*") if node in nodes else ()
    cores = {_number(each.name[3:]) for each in there} & os.sched_getaffinity(0)
    visible = range(min(local_ranks(), torch.accelerator.device_count()))
    ranks = sum(node_of_device(torch.device(device.type, index), root) == node for index in visible)
    if len(nodes) < 2 or len(cores) < max(1, ranks) * share_of_cores():
        return ""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            allowed = os.sched_getaffinity(int(task.name)) & cores  # a thread may have been put on a few
            os.sched_setaffinity(int(task.name), allowed or cores)
    far = [each for each in directories if _node_of_drive(each, root) in nodes.keys() - {node}]
    line = f"{device} is on NUMA node {node}: its rank runs on the {len(cores)} cores there"
    return f"{line}; drives of other nodes: {', '.join(far)}" if far else line


def count_nodes(root: Path = _ROOT) -> int:
    return len([*root.glob(_NODES)])


def node_of_device(device: torch.device, root: Path = _ROOT) -> int:
    """Return the node of an accelerator; -1: unknown."""
    return _number(read(root / "sys/bus/pci/devices" / pci_address(device) / "numa_node"))


def _node_of_drive(directory: str, root: Path) -> int:
    """Return the node of the drive that holds ``directory``; -1: unknown."""
    path = Path(directory)
    existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    number = existing.stat().st_dev
    drive = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return _number(next(filter(None, (read(each / "numa_node") for each in (drive, *drive.parents))), ""))


def _number(text: str) -> int:
    return int(text) if text.removeprefix("-").isdigit() else -1


@dataclass(frozen=True, slots=True)
class DtypeSpeed:
    """Records the speed at which one CPU thread, or the accelerator, multiplies matrices."""

    name: Dtype  # of 16 bits: bf16 or fp16
    flops_per_s: float
    fp32_flops_per_s: float
    on_cpu: bool = True

    @property
    def ratio(self) -> float:
        return self.flops_per_s / self.fp32_flops_per_s

    def __str__(self) -> str:
        speeds = self.flops_per_s / 1e9, self.fp32_flops_per_s / 1e9
        own, fp32 = (f"{gflops:,.0f}" if gflops >= 10 else f"{gflops:.2g}" for gflops in speeds)
        who = "this CPU" if self.on_cpu else "this accelerator"
        return f"{who} multiplies {self.name} at {own} GFLOP/s and fp32 at {fp32}"


def auto_dtype(ratio: Callable[[Dtype], float]) -> Dtype:
    """Return the dtype that ``auto`` stands for; ``ratio`` gives a dtype's speed as a share of fp32's."""
    return next((name for name, least in _AUTO if ratio(name) >= least), "fp32")


def choose_dtype(
    wanted: Literal[Dtype, "auto"], device: torch.device, least: Callable[[float], float]
) -> tuple[Dtype, str]:
    """Return the dtype to compute in, and a line about it for people, or none.

    For ``wanted`` ``auto`` every rank must call; ``least`` gives the smallest number of all ranks.
    """
    if wanted == "fp32":
        return wanted, ""
    if wanted == "auto":
        of_all: dict[Dtype, float] = {}

        def slowest(name: Dtype) -> float:
            of_all[name] = least(measure_dtype(name, device).ratio)
            return of_all[name]

        chosen = auto_dtype(slowest)
        # What is told of fp32 is why it is not bf16.
        name = "bf16" if chosen == "fp32" else chosen
        speed = measure_dtype(name, device)
        here = chosen != "fp32" or auto_dtype(lambda name: measure_dtype(name, device).ratio) == "fp32"
        other = f"another rank multiplies {name} at {of_all[name]:.2g} times the speed of fp32"
        return chosen, f"dtype: {chosen} ({speed if here else other})"
    speed = measure_dtype(wanted, device)
    if speed.ratio >= _FAST:
        return wanted, ""
    times = f"{1 / speed.ratio:.2g}"
    return wanted, f"train.dtype={wanted} is slow here: {speed}; train.dtype=fp32 is {times} times as fast"


@functools.cache
def measure_dtype(name: Dtype, device: torch.device) -> DtypeSpeed:
    """Multiply matrices in a dtype and in fp32, in turns; takes some milliseconds, once in a process.

    One thread multiplies: several would wait for each other where other ranks use the same cores.
    """
    threads, on_cpu, both = torch.get_num_threads(), device.type == "cpu", (torch.float32, DTYPES[name])
    torch.set_num_threads(1)
    try:
        for size in CPU_SIZES if on_cpu else ACCELERATOR_SIZES:
            taken_s = [[multiply_s(dtype, size, device) for dtype in both] for _ in range(_TRIES)]
            fp32_s, own_s = map(min, zip(*taken_s[1:], strict=True))  # the first makes kernels ready
            speed = DtypeSpeed(name, 2 * size**3 / own_s, 2 * size**3 / fp32_s, on_cpu)
            if speed.ratio < _HOPELESS:
                break
    finally:
        torch.set_num_threads(threads)
    return speed


@torch.no_grad()
def multiply_s(dtype: torch.dtype, size: int, device: torch.device) -> float:
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return least_s(lambda: torch.mm(matrix, matrix), device, 1)


def accumulate_in_fp16(device: torch.device, least: Callable[[float], float]) -> Callable[[], None]:
    """Let products of fp16 add up in fp16 until the function returned is called.

    Every rank must call; ``least`` gives the smallest number of all ranks.

    Raises:
        SettingError: Some rank's products are no faster so.
    """
    gain = fp16_sums_gain(device)
    slowest = least(gain)
    if slowest >= FP16_SUMS_GAIN:
        return sum_in_fp16(device)
    here = f"are {gain:.2g} times as fast" if gain else "cannot be had (torch 2.7 has them for CUDA)"
    other = f", on another rank {slowest:.2g} times" if gain >= FP16_SUMS_GAIN else ""
    raise SettingError("train.accumulate_dtype", "fp16", f"fp32, since sums in fp16 {here}{other}")


@functools.cache
def fp16_sums_gain(device: torch.device) -> float:
    """Return how many times as fast products of fp16 are that add up in fp16; 0: they cannot.

    Takes some milliseconds, once in a process.
    """
    size, times_s = ACCELERATOR_SIZES[-1], list[float]()
    for wanted in (False, True):
        before = summing_in_fp16(device, wanted)
        if before is None:
            return 0.0
        try:
            times_s.append(min(multiply_s(torch.float16, size, device) for _ in range(_TRIES)))
        finally:
            summing_in_fp16(device, before)
    return times_s[0] / times_s[1]


#: A slice takes at least this many elements: some 50 us of work, several times what handing it over costs.
LEAST_NUMEL = 2**16

#: A fork waits as long for code that is being compiled (s): on a busy machine that has taken more than 30.
_FORK_WAIT_S = 300.0

_compiling: dict[object, threading.Thread] = {}
_rank_threads: int | None = None  # threads that were chosen for this rank


def set_rank_threads(threads: int) -> None:
    """Let PyTorch and the updates of this rank compute on ``threads`` threads."""
    global _rank_threads
    _rank_threads = threads
    torch.set_num_threads(threads)


def rank_threads() -> int:
    """Return this rank's threads: PyTorch's, or a share of the cores where torchrun set one by default."""
    threads = torch.get_num_threads()
    if threads > 1 or threads == _rank_threads or not _by_torchrun():
        return threads
    return share_of_cores()


def default_threads() -> int:
    """Return ``OMP_NUM_THREADS`` if a user set it, or a share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) and not _by_torchrun() else share_of_cores()


def _by_torchrun() -> bool:
    """Return whether torchrun set ``OMP_NUM_THREADS``, as it does for ranks whose user has not."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"


@functools.cache  # every update asks, and system files are read
def share_of_cores() -> int:
    return max(1, usable_cores() // local_ranks())


def background_threads() -> int:
    return max(1, rank_threads() // 2)


def in_slices(
    run: Callable[[int, int], object], numel: int, threads: int, *, least: int = LEAST_NUMEL, per: int = 1
) -> None:
    """Call ``run(begin, end)`` for slices of ``range(numel)``, on this thread and ``threads - 1`` others.

    ``run`` releases the interpreter lock, and is called at least once, with an empty slice if ``numel`` is 0.
    No slice but the last is smaller than ``least``; each begins a block of ``per`` elements.
    """
    size = max(least, -(-numel // threads))
    size += -size % math.lcm(64, per)  # slices of whole cache lines: no two threads write one
    others = [_submit(run, begin, min(begin + size, numel)) for begin in range(size, numel, size)]
    try:
        run(0, min(size, numel))
    finally:
        wait(others)
    for other in others:
        other.result()


class OrderedThreads:
    """Runs calls on ``count`` threads: of those that wait, the one of the least order that came first."""

    def __init__(self, count: int, name: str, initializer: Any = None, *args: object) -> None:
        self._threads = ThreadPoolExecutor(count, name, initializer, args)
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []  # a heap, of which no two are equal
        self._numbers = itertools.count()

    def submit(self, call: Callable[[], object], order: int) -> None:
        heappush(self._waiting, (order, next(self._numbers), call))
        self._threads.submit(lambda: heappop(self._waiting)[-1]())

    def close(self) -> None:
        """Wait for the calls that were submitted, and end the threads. May be called twice."""
        self._threads.shutdown()


def compile_ahead(key: object, run: Callable[[], object]) -> None:
    """Call ``run``, which calls jitted functions, on a thread of its own; once for each ``key``.

    A caller that needs such a function earlier waits for numba's lock, and raises what ``run`` raises.
    """

    def quietly() -> None:
        with suppress(Exception):  # it meets who needs the function, too, on a thread that can tell of it
            run()

    # not a daemon: an interpreter that ends while LLVM compiles may crash
    thread = threading.Thread(target=quietly, name="infinity-compile")
    if _compiling.setdefault(key, thread) is thread:
        thread.start()


@functools.cache
def _slice_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="infinity-slice")


def _submit(run: Callable[[int, int], object], begin: int, end: int) -> "Future[object]":
    try:
        return _slice_threads().submit(run, begin, end)
    except RuntimeError:  # the interpreter ends: the updates in flight are finished without new threads
        done: Future[object] = Future()
        done.set_result(run(begin, end))
        return done


def _before_fork() -> None:
    """Wait for compilation: a child would inherit numba's lock, held by a thread that it does not have."""
    for thread in list(_compiling.values()):
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(_FORK_WAIT_S)


os.register_at_fork(before=_before_fork, after_in_child=_slice_threads.cache_clear)
