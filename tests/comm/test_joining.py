"""Ranks that torchrun starts again meet each other, not those of the start before."""

import os

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from infinity.comm.ranks import join_ranks
from infinity.core.errors import InfinityError
from tests.helpers.launch import run_ranks
from tests.helpers.limits import HANG_S


@pytest.fixture
def launcher() -> TCPStore:
    """The store of a launcher, which outlives the ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(port: int, word: str) -> list[str]:
    """On each rank, as torchrun starts it: the words of all ranks."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    join_ranks(HANG_S)
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, word)
    dist.destroy_process_group()
    return words


def test_each_start_has_keys_of_its_own(launcher: TCPStore) -> None:
    for word in ("first", "second"):
        assert run_ranks(meet, 3, launcher.port, word, group=False) == [[word] * 3] * 3


def test_a_rank_that_does_not_come_is_named(launcher: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(meet, 2, launcher.port, "first", group=False)  # what rank 1 of it asked is still there
    names = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": launcher.port}
    for name, number in names.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(InfinityError, match=r"ranks \[1, 2\] did not come"):
        join_ranks(1.0)
