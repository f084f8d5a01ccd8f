"""The processes that train together: how they meet, and what each of them knows of itself."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from infinity.comm.collectives import Collectives
from infinity.core.errors import BudgetError, PeerError, first_line

T = TypeVar("T")
#: Between two looks for ranks that have not come (s).
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        device: Where this rank computes.
        collectives: Of this rank; None with one process.
    """

    rank: int
    world_size: int
    device: torch.device
    collectives: Collectives | None = None

    @property
    def on_accelerator(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.type != "cpu"

    @property
    def alone_on_cpu(self) -> bool:
        """One rank without an accelerator: a unit in host memory is its own flat buffer."""
        return self.world_size == 1 and not self.on_accelerator

    def least(self, value: int, where: str) -> int:
        """Return the smallest ``value`` of all ranks, so that they decide alike. Every rank must call."""
        return value if self.collectives is None else self.collectives.least([value], where)[0]

    def sum(self, value: float, where: str) -> float:
        """Return the sum of ``value`` over all ranks, in float64. Every rank must call."""
        return value if self.collectives is None else self.collectives.sum([value], where)[0]

    def decide(self, make: Callable[[], str], where: str) -> str:
        """Return the text that ``make`` gives on rank 0, on every rank. Every rank must call.

        Raises:
            BudgetError: ``make`` raised it on rank 0; raised on every rank alike.
        """
        collectives = self.collectives
        if collectives is None:
            return make()
        return decide(make, self.rank, lambda text: collectives.share(text, where))


def join_ranks(timeout_s: float) -> torch.device:
    """Initialise torch.distributed from the launcher's environment; return this rank's device."""
    device = torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend, timeout = "gloo", timedelta(seconds=timeout_s)
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        with peer_errors("meeting the other ranks"):
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
                store = _store_of_this_start(rank, world_size, timeout)
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world_size, timeout=timeout
                )
            else:
                dist.init_process_group(backend, timeout=timeout)
    return device


def _store_of_this_start(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return torchrun's store, with a prefix that the ranks of this start have in common.

    torchrun keeps one store when it starts all ranks again (``--max-restarts``), and without a prefix they
    would find the addresses of ranks that are gone. The number of the restart is not the same on all
    machines. So each rank asks with a word of its own, and rank 0 tells it the prefix under that word.
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


def open_ranks(device: torch.device, timeout_s: float, on_failure: Callable[[BaseException], None]) -> Ranks:
    """Return this process's :class:`Ranks`, with collectives where there are several.

    Args:
        device: As :func:`join_ranks` gave it.
        timeout_s: How long a silent rank is waited for (s).
        on_failure: Called once with the error after which no collective ends well, on any thread.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(0, 1, device)
    with peer_errors("meeting the other ranks"):
        collectives = Collectives(device, timeout_s, on_failure)
    return Ranks(collectives.rank, collectives.world_size, device, collectives)


def agree(value: T, world_size: int, what: str = "agreeing on the run's id") -> T:
    """Return rank 0's ``value`` on every rank."""
    if world_size == 1:
        return value
    values = [value]
    with peer_errors(what):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: T, ranks: Ranks, what: str) -> list[T]:
    """Return every rank's ``value`` on rank 0, in order; other ranks get their own. Every rank must call."""
    if ranks.world_size == 1:
        return [value]
    found: list[T] | None = [value] * ranks.world_size if ranks.rank == 0 else None
    with peer_errors(what):
        dist.gather_object(value, found, dst=0)
    return [value] if found is None else found


def decide(make: Callable[[], str], rank: int, share: Callable[[str], str]) -> str:
    """Return the text that rank 0 makes, on every rank.

    Args:
        make: Called on rank 0 only.
        rank: This rank.
        share: Gives rank 0's text to all ranks.

    Raises:
        BudgetError: ``make`` raised it on rank 0; raised on every rank alike.
    """
    made, refused = "", ""
    if rank == 0:
        try:
            made = make()
        except BudgetError as error:
            refused = str(error)
    made, refused = json.loads(share(json.dumps((made, refused))))
    if refused:
        raise BudgetError(refused)
    return str(made)


@contextlib.contextmanager
def all_ranks_or_raise(ranks: Ranks, what: str) -> Iterator[None]:
    """A block that ends well on every rank, or raises on every rank. Every rank must enter.

    Raises:
        PeerError: It failed on another rank; says how.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if not isinstance(failure, PeerError) and not ranks.least(failure is None, what):
        told = ["" if failure is None else f"{type(failure).__name__}: {failure}"] * ranks.world_size
        if ranks.world_size > 1:
            with peer_errors(what):
                dist.all_gather_object(told, told[0])
        how = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
        failure = failure or PeerError(f"{what} failed: {how}")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Raise errors of torch.distributed as :class:`PeerError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{what}: another rank ended or was silent ({first_line(error)}). The first "
            "error of the other ranks is the cause; raise partition.timeout_s if they are only slow"
        ) from None  # its other lines are torch's C++ stack
