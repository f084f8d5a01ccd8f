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


def meet_by_srun(job: int) -> list[str]:
    """On each rank, as ``srun`` starts it, without one variable of torch."""
    before, rank = dict(os.environ), os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
    }  # fmt: skip
    join_ranks(HANG_S)
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, f"task {dist.get_rank()}")
    dist.destroy_process_group()
    os.environ |= before
    return words


def test_ranks_that_srun_starts_meet_without_a_word_of_the_user() -> None:
    assert run_ranks(meet_by_srun, 2, os.getpid(), group=False) == [["task 0", "task 1"]] * 2


def test_a_rank_that_does_not_come_is_named(launcher: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(meet, 2, launcher.port, "first", group=False)  # what rank 1 of it asked is still there
    names = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": launcher.port}
    for name, number in names.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(InfinityError, match=r"ranks \[1, 2\] did not come"):
        join_ranks(1.0)
