"""The ranks of one command: joined, numbered, each with its share of the machine's cores."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from infinity.comm.ranks import agree, decide, join_ranks, peer_errors
from infinity.core.errors import PeerError, RecipeError
from infinity.core.process import launched
from infinity.device.machine import local_ranks, set_rank_threads, usable_cores
from infinity.recipes.recipe import Recipe, TrainConfig

#: Threads that wait for each other cost time; many more than that, and the system refuses to start them.
_MOST_THREADS_PER_CORE = 8
_Found = TypeVar("_Found")


def rank() -> int:
    """Return this process's rank, from torch.distributed or, before it is initialized, the launcher."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


@contextmanager
def process_group(recipe: Recipe) -> Iterator[torch.device]:
    """Join the launched ranks, unless they are joined; yields this rank's device."""
    owns_group = not dist.is_initialized()
    device = join_ranks(recipe.partition.timeout_s, recipe.train.device)
    try:
        yield device
        if owns_group and dist.is_initialized():
            # Rank 0 may keep the store, so it waits for the others: on those that still use it when it goes,
            # torch would print its C++ stack. A rank that failed says so itself.
            with suppress(PeerError), peer_errors("leaving"):
                dist.gather_object(None, [None] * world_size() if rank() == 0 else None)
    finally:
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()


def on_rank_0(find: Callable[[], _Found]) -> _Found:
    """Return what ``find`` returns on rank 0, or raise its error, on every rank; all must call."""
    if world_size() == 1:
        return find()
    return decide(find, rank(), partial(agree, world_size=world_size(), what="finding the run"))


def set_threads(config: TrainConfig) -> None:
    """Give each rank ``train.threads``, or its share of the cores; RecipeError: those are too many."""
    most = _MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.threads is not None and config.threads > most:
        raise RecipeError(
            f"train.threads: got {config.threads}; wanted at most {most} ({_MOST_THREADS_PER_CORE} for each "
            "core of this machine), or null for one per core"
        )
    set_rank_threads(config.threads or max(1, usable_cores() // local_ranks()))
