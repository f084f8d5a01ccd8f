"""Ranks of one machine hold weights in host memory once, with the numbers of ranks that gather them."""

import contextlib
import hashlib
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.comm import shared
from infinity.comm.nodes import Nodes
from infinity.core.errors import BudgetError
from infinity.core.nbytes import HUGE_NBYTES, rounded
from infinity.device.memory import HostPool
from infinity.engine.runtime import runtime_of
from tests.helpers import models
from tests.helpers.launch import mark, run_ranks, several, start_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for

OVERRIDES = ["memory.host=64MiB", "memory.activations=keep"]


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def opened(*more: str, name: str = "llama", dtype: str = "bf16"):
    """A model, what gives its batches, and its runtime."""
    factory, batch = models.build(name, seed=3)
    model = build(factory, dtype, [*OVERRIDES, *more])
    try:
        yield model, batch, runtime_of(model)
    finally:
        infinity.close(model)


def digest(values: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for key in sorted(values):
        sha.update(key.encode() + values[key].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def taken_nbytes(memory: Any) -> int:
    """What the file of the node's memory takes, for all ranks together."""
    return os.fstat(memory._file).st_blocks * 512


def trains(how: str, frozen: bool) -> Any:
    """Two micro-batches a step, and between steps what one rank does alone, and what all do."""
    (rank, world), losses, gathers = place(), list[float](), list[int]()
    with (
        opened(f"memory.shared={how}", dtype="fp32") as (model, batch, runtime),
        pytest.MonkeyPatch.context() as patch,
    ):
        gather = Nodes.gather
        patch.setattr(Nodes, "gather", lambda self, *args: (gathers.append(1), gather(self, *args))[1])
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or "norm" in name)
        optimizer = optimizer_for(model, Rule())
        for step in range(3):
            for micro in range(2):
                with contextlib.nullcontext() if micro else infinity.no_sync(model):
                    loss = model(**batch(2 * step + micro, rank, world)).loss
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            if rank == world - 1:  # the others go on meanwhile
                with torch.no_grad():
                    losses.append(model(**batch(step, rank, world)).loss.item())
            assert bool(gathers) == (how == "never")
            if step == 1:
                with infinity.gathered(list(model.parameters())[:1]):
                    losses.append(float(next(model.parameters()).sum()))
                state = optimizer.state_dict()
                told = [state]
                dist.broadcast_object_list(told, src=0)
                optimizer.load_state_dict(told[0])
                gathers.clear()  # of exact values
        weights = infinity.state_dict(model, every_rank=True)
        assert (runtime.ranks.memory is not None) == (how == "auto")
        if runtime.ranks.memory is not None:
            nbytes = sum(unit.nbytes for unit in runtime.units)
            assert nbytes <= taken_nbytes(runtime.ranks.memory) <= nbytes + 2**21
        # Gradients that are open at one time borrow of a window, also where no weights come and go.
        room = 0 if frozen else runtime.executor().device_pool.capacity_nbytes
    return losses, digest(weights), room


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_weights_are_there_once_and_train_to_the_bits_of_gathered_ones(world):
    calls = [(trains, how, frozen) for frozen in (False, True) for how in ("auto", "never")]
    for all_shared, all_gathered, shared_base, gathered_base in run_ranks(several, world, *calls):
        assert all_shared == all_gathered
        assert shared_base == gathered_base


def writes() -> Any:
    rank, _ = place()
    with opened() as (model, batch, _):
        param = next(model.parameters())
        with infinity.gathered([param], modify=True):
            param.fill_(float(rank))
            dist.barrier()
            assert bool((param == rank).all())  # not what the other rank wrote meanwhile
            if rank == 0:
                param[0] = 7.0
        with infinity.gathered([param]):
            first = param[0, 0].item(), param[-1, -1].item()
        with contextlib.suppress(KeyError), infinity.gathered([param], modify=True):
            param.fill_(9.0)
            raise KeyError
        state = {
            name: torch.ones_like(value)
            for name, value in infinity.state_dict(model, every_rank=True).items()
        }
        with infinity.gathered([param]):
            second = param[0, 0].item(), param[-1, -1].item()
        model.load_state_dict(state)
        with torch.no_grad():
            loss = model(**batch(0, 0, 1)).loss.item()
        return first, second, param.data.mean().item(), loss


def test_every_rank_reads_what_rank_0_wrote_and_none_what_was_dropped():
    one, other = run_ranks(writes, 2)
    assert one == other
    assert one[:3] == ((7.0, 0.0), (7.0, 0.0), 1.0)


def copies(room: int | None) -> Any:
    """What a block that writes all weights takes of the host's budget, which has ``room`` (bytes) for it."""
    with opened() as (model, _, runtime):
        pool, units = runtime.storage.host_pool, [*runtime.units]
        before = pool.leased_nbytes
        if room is not None:
            pool.resize(before + room)
        for param in model.parameters():
            with infinity.gathered([param], modify=True):
                param.fill_(3.0)
        assert pool.leased_nbytes == before
        try:
            with infinity.gathered(model, modify=True):
                told: Any = pool.leased_nbytes - before
                assert told == sum(rounded(unit.nbytes) + rounded(unit.shard_nbytes) for unit in units)
        except BudgetError as error:
            told = str(error)
        assert pool.leased_nbytes == before
        with infinity.gathered(model):
            assert all(bool((param == 3).all()) for param in model.parameters())
        return told


def test_copies_of_weights_that_a_block_may_write_are_in_the_host_budget():
    for free, *bounded in run_ranks(several, 2, (copies, None), (copies, 2**16), (copies, 0)):
        assert free > 2**16
        for said in bounded:  # also without any room a unit alone can be written
            assert "no room for a copy of " in said
            assert "raise memory.host" in said


def leaves_averages(how: str) -> Any:
    """Every rank leaves the block of averages by an exception, rank 1 later, and goes on with training."""
    (rank, world), losses = place(), list[float]()
    with opened(f"memory.shared={how}") as (model, batch, _):
        optimizer = infinity.AdamW(model, lr=0.1, ema=0.9, max_grad_norm=1.0)
        for step in range(3):
            loss = model(**batch(step, rank, world)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with contextlib.suppress(KeyError), infinity.ema(model):
                for number in range(1 + 2 * rank):
                    losses.append(model(**batch(number, rank, world)).loss.item())
                    time.sleep(0.1 * rank)
                raise KeyError
        return losses, digest(infinity.state_dict(model, every_rank=True))


def test_weights_are_back_on_every_rank_when_an_exception_leaves_their_averages():
    for shared_weights, gathered in run_ranks(
        several, 2, (leaves_averages, "auto"), (leaves_averages, "never")
    ):
        assert shared_weights == gathered


def test_a_slice_that_is_given_back_is_not_lent_for_something_else():
    nbytes = HUGE_NBYTES + 4096  # in whole pages as much as two huge ones
    with open(os.memfd_create("test"), "r+b") as file, contextlib.closing(HostPool(2**30)) as pool:
        os.ftruncate(file.fileno(), 2**30)
        memory = shared.NodeMemory(0, 2, os.dup(file.fileno()))
        lease = pool.lease(nbytes, who="weights", made=memory.slice)
        lease.tensor.fill_(1)
        lease.release()
        assert os.fstat(file.fileno()).st_blocks * 512 < nbytes  # its pages have gone
        with pool.lease(2 * HUGE_NBYTES, who="a chunk") as other:
            assert len(other.tensor) == len(other.memory) == 2 * HUGE_NBYTES
        memory.close()


def leaves() -> Any:
    """Rank 1 closes its model, and rank 0 evaluates with all weights; then rank 0 closes, too."""
    rank, _ = place()
    with opened() as (model, batch, runtime), torch.no_grad():
        before = model(**batch(0, 0, 1)).loss.item()
        file = os.dup(runtime.ranks.memory._file)
        dist.barrier()
        if rank == 1:
            infinity.close(model)
        dist.barrier()
        after = model(**batch(0, 0, 1)).loss.item() if rank == 0 else before
    dist.barrier()
    left = os.fstat(file).st_blocks  # though this rank still has it open
    os.close(file)
    return before == after, left


def test_the_last_rank_to_close_gives_the_memory_back_and_none_before():
    assert run_ranks(leaves, 2) == [(True, 0)] * 2


def forks() -> bool:
    """A forked child unwinds through the parent's ``finally``, which closes the model, and ends."""
    with opened() as (model, batch, _), torch.no_grad():
        before = model(**batch(0, 0, 1)).loss.item()
        if (child := os.fork()) == 0:
            try:
                infinity.close(model)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return model(**batch(0, 0, 1)).loss.item() == before


def test_a_forked_child_that_closes_the_model_leaves_the_weights_to_its_parent():
    assert run_ranks(forks, 2) == [True, True]


def cannot_open() -> Any:
    """Rank 1 reads another word than rank 0 wrote, as in a container with other processes."""
    rank, _ = place()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared.os, "pread", lambda *_: b"")
        with opened() as (model, batch, runtime):
            model(**batch(0)).loss.backward()
            return runtime.ranks.memory is None


def test_ranks_that_cannot_share_memory_gather():
    assert run_ranks(cannot_open, 2) == [True, True]


def endless(in_step: bool) -> None:
    rank, world = place()
    with opened("partition.timeout_s=200") as (model, batch, runtime):
        optimizer = optimizer_for(model, Rule())
        update, step = type(runtime.ranks).wait_for_writes, 0
        if in_step and rank == 1:  # it has written some of its part, and then

            def killed(ranks: Any, where: str) -> None:
                if step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                update(ranks, where)

            type(runtime.ranks).wait_for_writes = killed
        for step in range(10_000):
            model(**batch(step % 4, rank, world)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                mark("there")


@pytest.mark.parametrize("in_step", [True, False])
def test_a_killed_rank_ends_the_others_which_name_it(in_step):
    with start_ranks(endless, 2, in_step) as ranks:
        if not in_step:
            ranks.reached("there", 1)
            ranks.kill(1, signal.SIGKILL)
        other, killed = ranks.wait()
    assert killed.exit_code == -signal.SIGKILL
    assert other.error_type == "PeerError", other
    assert "rank 1" in other.message
    assert not other.hung


def test_a_slice_that_is_given_back_leaves_those_of_other_ranks():
    """Slices are no whole pages: the last page of one has the first bytes of the next."""
    with open(os.memfd_create("test"), "r+b") as file, contextlib.closing(HostPool(2**30)) as pool:
        os.ftruncate(file.fileno(), 2**30)
        memories = [shared.NodeMemory(rank, 3, os.dup(file.fileno())) for rank in range(3)]
        leases = [pool.lease(9000, who="weights", made=memory.slice) for memory in memories]
        for lease in leases:
            lease.tensor.fill_(1)
        for gone in (0, 1):
            leases[gone].release()
            assert all(bool((lease.tensor == 1).all()) for lease in leases[gone + 1 :])
        assert int(shared.np.frombuffer(memories[2].map, "u1", 27000, HUGE_NBYTES)[:8192].max()) == 0
        for memory in memories:
            memory.close()
