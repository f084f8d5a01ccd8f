"""The processes that train together: how they meet, and what each knows of itself."""

import contextlib
import fcntl
import os
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from infinity.comm.collectives import Collectives
from infinity.comm.peers import Peers
from infinity.comm.shared import NodeMemory
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, InfinityError, LaunchError, PeerError, RecipeError, first_line
from infinity.core.process import find_meeting_point, launched
from infinity.device.accelerator import hardware_id, reaches_others

T = TypeVar("T")
#: Whether ranks of one machine share host memory: values of ``memory.shared``.
Sharing = Literal["auto", "always", "never"]
#: Time between two looks for ranks that have not come (s).
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that share a model."""

    rank: int
    world_size: int
    device: torch.device
    collectives: Collectives | None = None  # None: one process, or the ranks have not met
    memory: NodeMemory | None = None  # None: each has host memory of its own
    note: str = ""  # on that, for a run's start
    mesh: str = ""  # the sizes of its dimensions, where ranks are in one
    first: int = 0  # of the ranks that run the same program
    everywhere: bool = False  # what its stage's ranks decide, those of all stages do together

    @property
    def share(self) -> tuple[int, int]:
        """This rank's place among the ranks that share units, each of which has a shard, and their number."""
        row = range(self.world_size) if self.collectives is None else self.collectives.nodes.row
        return row.index(self.rank), len(row)

    @property
    def on_accelerator(self) -> bool:
        return self.device.type != "cpu"

    @property
    def host_is_whole(self) -> bool:
        """Whether host memory has all of a unit that lives there: of one rank, or of ranks that share it.

        Without an accelerator it is the unit's flat buffer; to one it is uploaded, with no collective.
        """
        return self.world_size == 1 or self.memory is not None

    @property
    def of_stages(self) -> Peers | None:
        """The watch of all ranks, where they are in a pipeline, so that some reduce without others."""
        return self.collectives.peers if self.collectives is not None and f"{STAGES}=" in self.mesh else None

    @property
    def nodes(self) -> int:
        return 1 if self.collectives is None else self.collectives.nodes.count

    def least(self, value: int, where: str) -> int:
        """Return the smallest ``value`` of a stage's ranks, so that they decide alike; all must call."""
        if self.collectives is None:
            return value
        if self.everywhere:
            return int(self.each(lambda: [value], 1, where).amin())
        return int(self._exchange("least", [value], where).amin())

    def wait_for_writes(self, where: str) -> None:
        """Where ranks share memory, return when all have come here: see :mod:`infinity.comm.shared`."""
        if self.memory is not None:
            self.least(1, where)

    def sum(self, value: float, where: str) -> float:
        """Return the sum of ``value`` over all ranks, in float64; all must call."""
        return float(self.each(lambda: [value], 1, where).sum())

    def each(self, values: Callable[[], Sequence[float]], count: int, where: str) -> torch.Tensor:
        """Return all ranks' ``count`` values, ``(world_size, count)``; see :meth:`Collectives.exchange`."""
        if self.collectives is None:
            return torch.tensor([[*values()]], dtype=torch.float64, device="cpu")
        return self._exchange("sum", values, where, count)

    def _exchange(self, *args: Any) -> torch.Tensor:
        assert self.collectives is not None
        if self.memory is not None:  # where others may write after this exchange
            self.memory.wait_for_reads()
        return self.collectives.exchange(*args)

    def decide(self, make: Callable[[], T], where: str) -> T:
        """Return what ``make`` returns on rank 0, or raise its error, on every rank; all must call."""
        made: Any = None
        mine: InfinityError | None = None
        if self.rank == 0:
            try:
                made = make()
            except InfinityError as error:
                mine = error
        told: Any = made, BudgetError if isinstance(mine, BudgetError) else RecipeError, mine and str(mine)
        if self.collectives is None:
            made, kind, refused = agree(told, self.world_size, where)
        else:
            made, kind, refused = self.collectives.share_all(told, where)[0]
        if refused is not None:
            raise mine or kind(refused)
        return made  # type: ignore[no-any-return]


#: One process that shares with none, and needs no accelerator.
ALONE = Ranks(0, 1, torch.device("cpu"))


def rank() -> int:
    """Return this process's rank, from torch.distributed or, before it is initialized, the launcher."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


def join_ranks(timeout_s: float, device: str | None = None) -> torch.device:
    """Join the launcher's ranks, waiting ``timeout_s`` for silent ones; return this rank's device."""
    found = launched()
    chosen = choose_device(device, found.local_rank)
    if found.world_size == 1 or dist.is_initialized():
        return chosen
    find_meeting_point(found)
    backend, timeout = backend_of(chosen), timedelta(seconds=timeout_s)
    with peer_errors("meeting the other ranks"):
        store = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_this_start(found.rank, found.world_size, timeout)
        dist.init_process_group(
            backend, store=store, rank=found.rank, world_size=found.world_size, timeout=timeout
        )
    if chosen.type != "cpu":
        _check_own_devices(chosen)
    return chosen


def choose_device(wanted: str | None, local_rank: int | None) -> torch.device:
    """Return the device on which this rank computes, which becomes the current one; or raise a LaunchError.

    That is the ``wanted`` one, such as ``cuda:1``, else the accelerator with the number ``local_rank`` (None:
    the current one; 0 where a launcher shows each rank a single device), else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(wanted or accelerator or "cpu")
    except RuntimeError as error:
        raise LaunchError(
            f"device={wanted!r}: wanted cpu, cuda, cuda:1 or the like ({first_line(error)})"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        has = f"its accelerator is {accelerator.type}" if accelerator else "it has no accelerator"
        raise LaunchError(f"device={wanted!r}: this machine has no {device.type}, as torch sees it; {has}")
    count, given = torch.accelerator.device_count(), ":" in (wanted or "")
    if given:
        index = device.index
    elif local_rank is None:
        index = torch.accelerator.current_device_index()
    else:
        index = local_rank if count > 1 else 0  # whether another rank has it, too, is seen when they meet
    if index >= count:
        who = f"device={wanted!r}" if given else f"rank {index} of this machine (from 0)"
        raise LaunchError(
            f"{who} has no device: {count} {device.type} "
            f"{'device is' if count == 1 else 'devices are'} visible. Start at most as many ranks as devices "
            f"(torchrun --nproc-per-node {count}), or show more of them"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def own_address() -> str:
    """Return the address at which gloo listens: its interface's, that of this host's name, or loopback."""
    with contextlib.suppress(OSError):
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                request = struct.pack("256s", interface.encode()[:15])
                answer = fcntl.ioctl(any_socket, 0x8915, request)  # SIOCGIFADDR
                return socket.inet_ntoa(answer[20:24])
        for *_, place in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            with socket.socket() as trial:
                trial.bind((place[0], 0))
                return str(place[0])
    return "127.0.0.1"


def backend_of(device: torch.device) -> str:
    """Return the back ends of a process group for values on the CPU and on ``device``."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _check_own_devices(device: torch.device) -> None:
    """Refuse two ranks with the same device. Every rank must call."""
    uuid, everyone = hardware_id(device), list[Any]([None] * dist.get_world_size())
    with peer_errors("comparing the devices of all ranks"):
        dist.all_gather_object(everyone, (socket.gethostname(), uuid))
    sharing = [rank for rank, each in enumerate(everyone) if uuid and each == everyone[dist.get_rank()]]
    if len(sharing) > 1:
        raise LaunchError(
            f"ranks {', '.join(map(str, sharing))} on {socket.gethostname()} have the same device ({uuid}): "
            f"each needs one of its own. Start at most as many ranks as devices, or show each rank another "
            "one (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES)"
        )


def _store_of_this_start(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return torchrun's store, with a prefix that the ranks of this start share.

    torchrun keeps one store when it starts all ranks again (``--max-restarts``), with the addresses of ranks
    that are gone. The number of the restart may differ between machines, so rank 0 tells each rank the
    prefix, under a random word that the rank asks with.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    word, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"infinity/asks/{rank}", word)
        prefix = store.get(f"infinity/answer/{word}").decode()
        store.set(f"infinity/{prefix}/heard/{rank}", "")
        return PrefixStore(prefix, store)
    waiting = set(range(1, world_size))
    while waiting:
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(waiting)} did not come")
        for other in waiting:
            asks = f"infinity/asks/{other}"  # perhaps a word of the start before: then it is asked again
            if store.check([asks]):
                store.set(f"infinity/answer/{store.get(asks).decode()}", word)
        waiting = {other for other in waiting if not store.check([f"infinity/{word}/heard/{other}"])}
        time.sleep(_PAUSE_S)
    return PrefixStore(word, store)


def open_ranks(
    device: torch.device, timeout_s: float, on_failure: Callable[[BaseException], None],
    ranks_per_node: int | None = None, *, shares: Sharing = "never", mesh: Any = None,
) -> Ranks:  # fmt: skip
    """Return this process's :class:`Ranks`, with :class:`Collectives` where there are several.

    Those of one node have weights in one host memory, if they are to share it and all can open it. In a
    ``mesh`` ranks share units along one dimension, and host memory never.
    """
    rows, stages = (None, None) if mesh is None else (_rows_of(mesh), stages_of(mesh))
    if not dist.is_initialized() or (world_size := dist.get_world_size()) == 1:
        return Ranks(0, 1, device)
    if ranks_per_node and world_size % ranks_per_node:
        wanted = f"a number that divides that of ranks, {world_size}; or null: as hosts say"
        raise SettingError("partition.ranks_per_node", ranks_per_node, wanted)
    with peer_errors("meeting the other ranks"):
        collectives = Collectives(device, timeout_s, on_failure, ranks_per_node, rows, stages)
    if mesh is not None:
        sizes = ", ".join(f"{name}={n}" for name, n in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        first = next(stage[0] for stage in stages_of(mesh) if collectives.rank in stage)
        return Ranks(collectives.rank, world_size, device, collectives, mesh=sizes, first=first)
    peers = device.type != "cpu" and bool(
        collectives.exchange("least", [reaches_others(device)], "access between devices").all()
    )
    if not shares_host(shares, collectives.nodes.count, peers=peers):
        return Ranks(collectives.rank, world_size, device, collectives)
    memory = NodeMemory.open(collectives, device)
    note = _NOT_SHARED if memory is None else "" if device.type == "cpu" else _SHARED
    return Ranks(collectives.rank, world_size, device, collectives, memory, note)


#: The dimensions of a mesh along which units are cut into shards, and batches differ; and modules do.
SHARDING, STAGES = "dp", "pp"


def stages_of(mesh: Any) -> Any:
    """Return the ranks of each stage, of which a mesh without such a dimension is one."""
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh
    stages = ranks.movedim(names.index(STAGES), 0) if STAGES in names else ranks.flatten()[None]
    return stages.flatten(1).tolist()


def _rows_of(mesh: Any) -> list[list[int]]:
    """Return the ranks of each line of a ``DeviceMesh`` along ``dp``, or raise a LaunchError."""
    names, everyone = getattr(mesh, "mesh_dim_names", None) or (), [*range(dist.get_world_size())]
    if SHARDING not in names or mesh.mesh.flatten().tolist() != everyone:
        ranks = mesh.mesh.tolist() if hasattr(mesh, "mesh") else f"{mesh!r}, which is no DeviceMesh"
        raise LaunchError(
            f"mesh of dimensions {names} with ranks {ranks}: wanted all {len(everyone)} ranks "
            f"in order, and a dimension {SHARDING!r} along which batches differ and weights are sharded, "
            "such as init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))"
        )
    dim = names.index(SHARDING)
    lines: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
    return lines


_SHARED = (
    "weights in host memory are there once for all ranks of this machine, and each uploads whole units "
    "(memory.shared=never: each has a part of them there, and devices gather the others)"
)
_NOT_SHARED = (
    "ranks of this machine cannot open memory of rank 0 (by memfd_create and /proc/PID/fd: are they in other "
    "containers, or limited by ulimit -v or -f?), so each has a part of the weights and gathers the others, "
    "as with memory.shared=never"
)


def shares_host(choice: Sharing, nodes: int, *, peers: bool) -> bool:
    """Return whether ranks are to have weights in host memory once: see ``memory.shared``.

    Of devices that reach each other (``peers``) each uploads a part, and they gather the rest.
    """
    return nodes == 1 and (choice == "always" or (choice == "auto" and not peers))


def agree(value: T, world_size: int, what: str = "agreeing on the run's id") -> T:
    """Return rank 0's ``value`` on every rank."""
    if world_size == 1:
        return value
    values = [value]
    with peer_errors(what):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: T, ranks: Ranks, what: str) -> list[T]:
    """Return every rank's ``value``, in order, on rank 0, and only its own elsewhere; all must call."""
    if ranks.world_size == 1:
        return [value]
    found: list[T] | None = [value] * ranks.world_size if ranks.rank == 0 else None
    with peer_errors(what):
        dist.gather_object(value, found, dst=0)
    return [value] if found is None else found


@contextlib.contextmanager
def all_ranks_or_raise(ranks: Ranks, what: str) -> Iterator[None]:
    """Raise on every rank if the block raises on any, as a PeerError on the others; all must enter."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    several = ranks.world_size > 1 and not isinstance(failure, PeerError)
    if several and ranks.sum(failure is not None, what):
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        told = [own] if ranks.collectives is None else ranks.collectives.share_all(own, what)
        how = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
        failure = failure or PeerError(f"{what} failed: {how}")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Raise errors of torch.distributed as :class:`PeerError`, without lines of its C++ stack."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{what}: another rank ended or was silent ({first_line(error)}). The first "
            "error of the other ranks is the cause; raise partition.timeout_s if they are only slow"
        ) from None


def measure_exchange(nbytes: int = 2**24, tries: int = 8) -> tuple[float, float]:
    """Measure how fast two ranks gather and exchange bytes by gloo, and what that costs the CPU.

    Both are threads of this process; each sends a half of a unit of ``nbytes``. Returns the bytes per second
    that each rank sends, and the CPU time (s, of all cores) per byte that it sends and receives.
    """
    store, half = torch._C._distributed_c10d.HashStore(), nbytes // 2

    def exchange(number: int) -> list[tuple[float, float]]:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=30))
        full, other = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        taken_s = []
        for _ in range(tries):
            began_s, core_s = time.perf_counter(), time.process_time()
            group._allgather_base(full, full[number * half : (number + 1) * half].clone()).wait()
            group.alltoall_base(other, full, [], []).wait()
            taken_s.append((time.perf_counter() - began_s, time.process_time() - core_s))
        return taken_s[1:]  # the first makes pages ready

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(exchange, range(2))
    wall_s, core_s = (statistics.median(map(max, a, b)) for a, b in zip(zip(*first), zip(*second)))
    return 2 * half / wall_s, core_s / 2 / (2 * half)
