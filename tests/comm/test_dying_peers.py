"""A peer that dies inside an accelerator's collective, which would wait for ever, ends in a PeerError."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from infinity.comm import collectives
from infinity.comm.ranks import open_ranks
from tests.helpers.launch import start_ranks
from tests.helpers.limits import HANG_S

CPU = torch.device("cpu")


class Group:
    """What a group of accelerators is to the host: its collectives are kernels, which here do not end."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    def is_completed(self) -> bool:
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

    ranks = open_ranks(CPU, HANG_S, on_failure)
    assert ranks.collectives is not None
    ranks.collectives.peers.timeout_s = timeout_s
    stuck, gloo = Group(), collectives._all_gather

    def issue(full: torch.Tensor, shard: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        if group is not stuck:
            return gloo(full, shard, group=group, async_op=async_op)
        if dies and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return stuck

    collectives._all_gather, ranks.collectives._data.group = issue, stuck
    ranks.collectives.gather(0, "layers.0", lambda: torch.zeros(4))
    if closes:
        while not ranks.collectives._data._issued:
            time.sleep(0.01)
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


def test_a_rank_that_said_how_it_ended_is_not_taken_for_one_that_died(monkeypatch):
    monkeypatch.setattr(collectives, "_process_state", lambda pid: "X")
    looked: list[Iterable[int] | None] = []
    mine = collectives.Entry(rank=0, pid=0, host="a", machine="a")
    died = replace(mine, rank=3)
    entries = [replace(mine, rank=1, end="closed its model"), replace(mine, rank=2, machine="b"), died]

    def others(ranks: Iterable[int] | None) -> list[collectives.Entry]:
        looked.append(ranks)
        return entries

    here = object.__new__(collectives.Peers)
    here._me, here._here, here._thread = mine, None, threading.Thread()  # has not begun
    monkeypatch.setattr(here, "_others", others)
    assert here.dead().startswith("rank 3 (process 0 on a) was killed")
    entries.remove(died)
    assert here.dead() == ""
    assert looked == [None, [1, 3]]  # those of other machines are asked once
