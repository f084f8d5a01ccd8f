"""A peer that dies inside an accelerator's collective, which would wait for ever, ends in a PeerError."""

import json
import os
import signal
import subprocess
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from infinity.comm import peers
from infinity.comm.ranks import open_ranks
from infinity.core.errors import PeerError
from tests.helpers.launch import run_ranks, start_ranks
from tests.helpers.limits import HANG_S

CPU = torch.device("cpu")


class Group:
    """What a group of accelerators is to the host: its collectives are kernels, which here do not end."""

    def __init__(self, dies: bool) -> None:
        self.aborted, self.watched, self._dies = threading.Event(), threading.Event(), dies

    def all_gather_single(self, *_: Any) -> "Group":
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self

    _allgather_base = all_gather_single  # in older releases of torch

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    def is_completed(self) -> bool:
        self.watched.set()
        return self.aborted.is_set()

    def wait(self) -> None:
        """NCCL lets the stream wait, not the host."""

    def abort(self) -> None:
        self.aborted.set()


def gather(dies: bool, timeout_s: float, closes: bool = False) -> tuple[str, bool]:
    """Gather over a group whose work never ends.

    Args:
        dies: Rank 1 is killed inside.
        closes: The ranks fail, and close at once.
        timeout_s: For collectives; ranks may meet as slowly as a busy machine lets them.
    """
    failed, errors = threading.Event(), list[BaseException]()

    def on_failure(error: BaseException) -> None:
        errors.append(error)
        failed.set()

    stuck = Group(dies and dist.get_rank() == 1)

    ranks = open_ranks(CPU, HANG_S, on_failure)
    assert ranks.collectives is not None
    ranks.collectives.nodes._inner = stuck
    ranks.collectives._in_flight.groups.append(stuck)
    ranks.collectives.peers.timeout_s = timeout_s
    ranks.collectives.gather(0, "layers.0", lambda: torch.zeros(4))
    if closes:
        assert stuck.watched.wait(HANG_S)
        ranks.collectives.peers.tell(ValueError("no disk"))
        ranks.collectives.close()
    failed.wait(HANG_S / 2)
    aborted = stuck.aborted.wait(HANG_S / 2)
    ranks.collectives.close()
    if not dies:
        dist.barrier()  # a rank that leaves takes the connections of the other one with it
    dist.destroy_process_group()  # before the helper waits for the other rank
    return f"{type(errors[0]).__name__}: {errors[0]}", aborted


def test_a_peer_that_dies_inside_a_collective_is_named_long_before_the_time_is_over():
    with start_ranks(gather, 2, True, 10_000.0) as running:
        survivor, _ = running.wait()
    told, aborted = survivor.result
    assert told.startswith("PeerError")
    assert "rank 1 (process" in told
    assert "was killed or crashed" in told
    assert aborted


def test_a_collective_that_does_not_end_is_given_up_when_the_time_is_over():
    with start_ranks(gather, 2, False, 1.0) as running:
        for ended in running.wait():
            assert ended.exit_code == 0, ended
            told, aborted = ended.result
            assert told.startswith("PeerError")
            assert aborted


def test_a_rank_that_fails_and_closes_at_once_leaves_no_collective_on_its_accelerator():
    with start_ranks(gather, 2, False, 10_000.0, True) as running:
        for ended in running.wait():
            assert ended.exit_code == 0, ended
            assert ended.result[1]


class Broken:
    """A group whose collectives end with an error, as when a connection is lost."""

    def all_gather_single(self, *_: Any) -> "Broken":
        return self

    _allgather_base = all_gather_single

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def gather_badly() -> str:
    ranks = open_ranks(CPU, HANG_S, lambda error: None)
    assert ranks.collectives is not None
    ranks.collectives.nodes._inner = Broken()
    gathered = ranks.collectives.gather(0, "layers.0", lambda: torch.zeros(4))
    try:
        gathered.wait()
    except PeerError as error:
        return str(error)
    finally:
        ranks.collectives.close()
        dist.barrier()
    return ""


def test_a_collective_that_ended_badly_fails_on_every_rank():
    assert all("connection closed by peer" in told for told in run_ranks(gather_badly, 2))


class Store(PrefixStore):
    """Where ranks leave their entries; knows those that were asked for."""

    def __init__(self, prefix: str, store: dist.Store) -> None:
        super().__init__(prefix, store)
        self.asked: list[str] = []
        stores.append(self)

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return super().get(key)


stores: list[Store] = []


def look_for_the_dead(no_process: int) -> list[tuple[str, list[str]]]:
    """On rank 0 of four: who is dead, and whose entries were asked for, before and after one is alive."""
    peers.PrefixStore = Store
    here = peers.Peers(0, 4, HANG_S, lambda error: None)
    [store], found = stores, []
    mine = json.loads(store.get("0"))
    gone = {**mine, "pid": no_process, "host": "a"}
    for rank, more in (1, {"end": "closed its model"}), (2, {"machine": "another"}), (3, {}):
        store.set(f"{rank}", json.dumps({**gone, "rank": rank, **more}))
    for _ in range(2):
        store.asked.clear()
        found.append((here.dead(), [*store.asked]))
        store.set("3", json.dumps({**mine, "rank": 3}))
    here.close()
    return found


def test_a_rank_that_said_how_it_ended_is_not_taken_for_one_that_died():
    ended = subprocess.Popen(["true"])
    ended.wait()
    [((told, first), (then, later))] = run_ranks(look_for_the_dead, 1, ended.pid)
    assert told.startswith(f"rank 3 (process {ended.pid} on a) was killed")
    assert (then, first, later) == ("", ["1", "2", "3"], ["1", "3"])  # other machines' are asked for once
