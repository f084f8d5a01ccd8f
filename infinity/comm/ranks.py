"""The ranks of a run: joining them, agreeing on a value, deciding something once."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from infinity.core.errors import BudgetError, PeerError


def join_ranks(timeout_s: float) -> torch.device:
    """Initialise torch.distributed from torchrun's environment; this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        with typed("meeting the other ranks"):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return device


def agree(value: str, world_size: int, what: str = "agreeing on the run's id") -> str:
    """Rank 0's ``value``, on every rank."""
    if world_size == 1:
        return value
    values = [value]
    with typed(what):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def decide(make: Callable[[], str], rank: int, share: Callable[[str], str]) -> str:
    """What rank 0 makes, on every rank; only rank 0 makes it.

    Args:
        make: Makes it.
        share: Gives rank 0's text to all ranks.

    Raises:
        BudgetError: Rank 0 found none that fits; raised on every rank alike.
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
def typed(what: str) -> Iterator[None]:
    """Errors of torch.distributed as ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{what}: another rank ended or was silent ({str(error).strip().splitlines()[0]}). The first "
            "error of the other ranks is the cause; raise partition.timeout_s if they are only slow"
        ) from error
