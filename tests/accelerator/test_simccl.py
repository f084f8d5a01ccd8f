"""Collectives between simulated devices have NCCL's order: on a stream of their own, and no host waits."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.process import needs_simulator
from tests.accelerator.simulator import Schedule
from tests.helpers.launch import run_ranks, start_ranks
from tests.helpers.limits import HANG_S, comes_true

SCHEDULES: list[tuple[Schedule, int]] = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]


def join() -> tuple[Any, Any, torch.device]:
    """Start the simulator and the ranks' groups: the simulator, a group, this rank's device."""
    from tests.accelerator import device

    simulator = device.start()
    where = torch.device("sim", int(os.environ["RANK"]))
    torch.accelerator.set_device_index(where)
    assert dist.get_default_backend_for_device(where) == "simccl"
    dist.init_process_group("cpu:gloo,sim:simccl", timeout=timedelta(seconds=HANG_S))
    return simulator, dist.new_group(backend="simccl"), where


def exchange(group: Any, where: torch.device, *, wait: bool) -> list[float]:
    """An all-gather and an all-to-all of what a kernel made; another kernel reads what came."""
    rank = dist.get_rank()
    mine = torch.full((1000,), float(rank + 1), device=where)
    everyone = torch.empty(2000, device=where)
    gathered = dist.all_gather_into_tensor(everyone, mine, group=group, async_op=True)
    if wait:
        gathered.wait()
    given = everyone * 10
    came = torch.empty_like(given)
    sent = dist.all_to_all_single(came, given, group=group, async_op=True)
    if wait:
        sent.wait()
    return came[::1000].tolist()


def play() -> list[tuple[list[float], int, int, bool]]:
    simulator, group, where = join()
    found = []
    for schedule, seed in SCHEDULES:
        for wait in (True, False):
            simulator.reset(schedule, seed + dist.get_rank())
            values = exchange(group, where, wait=wait)
            torch.accelerator.synchronize()
            dist.barrier()
            found.append((values, len(simulator.races), sum(simulator.waits.values()), wait))
    found += [cross(simulator, schedule) for schedule, _ in SCHEDULES]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})  # by the default group's gloo
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.destroy_process_group()
    return found


def cross(simulator: Any, schedule: Schedule) -> Any:
    """Two groups, whose collectives the ranks wait for in opposite orders."""
    groups = [dist.new_group(backend="simccl") for _ in range(2)]
    simulator.reset(schedule)
    where = torch.device("sim", dist.get_rank())
    values = [torch.ones(10, device=where) for _ in groups]
    works = [dist.all_reduce(v, group=g, async_op=True) for v, g in zip(values, groups)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    total = 0.0
    for each in order:
        works[each].wait()
        total += values[each].sum().item()
    return [total], len(simulator.races), 0, True


def test_collectives_are_ordered_by_wait_alone_and_a_missing_one_is_a_race():
    needs_simulator()
    for rank in run_ranks(play, 2, group=False):
        for values, races, _, wait in rank:
            assert bool(races) is not wait
            assert not wait or values in ([10.0, 10.0], [20.0, 20.0], [40.0]), values


def lose_the_peer(how: str) -> str:
    simulator, group, where = join()
    simulator.reset("lazy")
    exchange(group, where, wait=True)
    torch.accelerator.synchronize()
    if dist.get_rank() == 1:
        os._exit(3)
    everyone = torch.empty(2000, device=where)
    work = dist.all_gather_into_tensor(everyone, torch.ones(1000, device=where), group=group, async_op=True)
    if how == "timeout":
        with pytest.raises(RuntimeError, match="took longer than"):
            work.wait(timedelta(seconds=0.2))
        return how
    work.wait()
    assert not comes_true(work.is_completed, 0.5)  # it spins for ever, as a kernel of NCCL
    assert not torch.accelerator.current_stream().query()
    group.abort()
    assert work.is_completed()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()
    return how


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_a_collective_without_its_peer_never_ends_until_it_is_aborted(how: str):
    needs_simulator()
    with start_ranks(lose_the_peer, 2, how, group=False) as ranks:
        alone, gone = ranks.wait()
    assert gone.exit_code == 3
    assert alone.result == how, alone
