"""Gathers and reductions in two steps give the values of one, and each byte crosses a border once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.comm.collectives import _ranks_per_node
from infinity.comm.nodes import Kept
from infinity.comm.ranks import open_ranks
from infinity.device.memory import HostPool
from tests.helpers.cases import few
from tests.helpers.launch import RanksError, run_ranks, several
from tests.helpers.limits import HANG_S

CPU = torch.device("cpu")
SHARD = 24


def opened(per_node: int | None) -> Any:
    ours = open_ranks(CPU, HANG_S, lambda error: None, per_node).collectives
    assert ours is not None
    return ours


def unit_of(world: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(world * SHARD, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gather(per_node: int, dtype: torch.dtype) -> int:
    """Gather three units, whose slices are not there before; return the bytes that crossed."""
    ours = opened(per_node)
    for seed in range(3):
        wanted = unit_of(ours.world_size, seed, dtype)
        full = torch.full_like(wanted, float("nan"))
        mine = slice(ours.rank * SHARD, (ours.rank + 1) * SHARD)
        full[mine] = wanted[mine]
        assert torch.equal(ours.gather(seed, f"unit {seed}", lambda full=full: full).value(), wanted)
    ours.close()
    return ours.nodes.nbytes_crossed


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def reduce(per_node: int, dtype: torch.dtype) -> int:
    """Reduce gradients, and compare the mean bit by bit with the documented order of its sum."""
    ours = opened(per_node)
    world, flat = ours.world_size, per_node in (1, ours.world_size)
    grads = [unit_of(world, rank, dtype) for rank in range(world)]
    nodes = [summed(grads[first : first + per_node]).to(dtype) for first in range(0, world, per_node)]
    wanted = summed(grads if flat else nodes) / world
    full, out = grads[ours.rank].clone(), torch.empty(SHARD)
    buffers = full, torch.full_like(full, float("nan")), out
    ours.reduce(0, "unit 0", lambda: buffers, b"\1", lambda used, ends: None).wait()
    assert torch.equal(out, wanted[ours.rank * SHARD : (ours.rank + 1) * SHARD])
    ours.close()
    return ours.nodes.nbytes_crossed


def keep(per_node: int) -> list[int]:
    """Gather a unit three times with memory for what came: anew, as it was, and after an update."""
    dist.new_group([0, 1])  # a program's own
    ours, crossed = opened(per_node), []
    world, dtype = ours.world_size, torch.bfloat16
    pool = HostPool(2**20)
    lease = pool.lease((ours.nodes.count - 1) * SHARD * dtype.itemsize, who="a test")
    for seed, current in ((0, False), (0, True), (1, False), (1, True)):
        before, wanted = ours.nodes.nbytes_crossed, unit_of(world, seed, dtype)
        full = torch.full_like(wanted, float("nan"))
        mine = slice(ours.rank * SHARD, (ours.rank + 1) * SHARD)
        full[mine] = wanted[mine]
        kept = Kept(lease, current)
        assert torch.equal(ours.gather(0, "unit 0", lambda full=full: full, kept=kept).value(), wanted)
        crossed.append(ours.nodes.nbytes_crossed - before)
    ours.close()
    lease.release()
    pool.close()
    return crossed


@pytest.mark.parametrize(("world", "per_node"), few([(4, 2)], [(4, 2), (6, 2), (6, 3)]))
def test_two_steps_give_each_rank_the_same_values_and_each_byte_crosses_once(world: int, per_node: int):
    calls = [
        (call, local, dtype)
        for local in (per_node, 1)
        for dtype in (torch.float32, torch.bfloat16)
        for call in (gather, reduce)
    ]
    others = (world // per_node - 1) * SHARD
    for crossed in run_ranks(several, world, *calls):
        assert crossed == [3 * others * 4, others * 4, 3 * others * 2, others * 2, 0, 0, 0, 0]


def test_what_came_across_is_not_fetched_again_while_it_is_current():
    nbytes = SHARD * 2
    for crossed in run_ranks(keep, 4, 2):
        assert crossed == [nbytes, 0, nbytes, 0]


def test_nodes_are_the_hosts_of_as_many_ranks_side_by_side():
    wanted = {"aabb": 2, "aaaa": 4, "abab": 1, "aabbb": 1, "aaba": 1, "abcd": 1, "aabbaa": 1}
    assert {hosts: _ranks_per_node([*hosts]) for hosts in wanted} == wanted


def found() -> int:
    ours = opened(None)
    ours.close()
    return int(ours.nodes.local)


def test_ranks_of_one_host_are_one_node_unless_a_recipe_says_otherwise():
    assert run_ranks(found, 2) == [2, 2]
    with pytest.raises(RanksError, match=r"partition\.ranks_per_node"):
        run_ranks(opened, 2, 3)
