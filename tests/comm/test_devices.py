"""Each rank computes on a device of its own, whatever started it; no accelerator is needed for the choice."""

import os
import socket

import pytest
import torch

import infinity
from infinity.comm import ranks
from infinity.comm.ranks import backend_of, choose_device
from infinity.core.errors import LaunchError
from tests.helpers.launch import free_port, run_ranks
from tests.helpers.limits import HANG_S


class Accelerators:
    """``torch.accelerator`` on a machine that has some."""

    def __init__(self, count: int, current: int = 0) -> None:
        self.count, self.current = count, current

    def current_accelerator(self, check_available: bool) -> torch.device | None:
        assert check_available  # torch may be built for one that is not there
        return torch.device("cuda") if self.count else None

    def device_count(self) -> int:
        return self.count

    def current_device_index(self) -> int:
        return self.current

    def set_device_index(self, index: int) -> None:
        self.current = index


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def make(count: int, current: int = 0) -> Accelerators:
        monkeypatch.setattr(torch, "accelerator", found := Accelerators(count, current))
        return found

    return make


@pytest.mark.parametrize(
    ("count", "wanted", "local_rank", "chosen"),
    [
        (0, None, 1, "cpu"),
        (8, None, 5, "cuda:5"),
        (8, "cuda", 5, "cuda:5"),
        (8, "cuda:1", 5, "cuda:1"),
        (8, "cpu", 5, "cpu"),
        (1, None, 5, "cuda:0"),
        (8, None, None, "cuda:3"),
    ],
    ids=[
        "no accelerator", "by number", "by type", "as told", "though there is one",
        "each rank sees one", "the current one",
    ],
)  # fmt: skip
def test_a_rank_computes_on_its_own_device(machine, count, wanted, local_rank, chosen):
    found = machine(count, current=3)
    assert choose_device(wanted, local_rank) == torch.device(chosen)
    assert found.current == (3 if chosen == "cpu" else torch.device(chosen).index)


@pytest.mark.parametrize(
    ("count", "wanted", "local_rank", "told"),
    [
        (2, None, 2, "rank 2 of this machine.*2 cuda devices are visible.*--nproc-per-node 2"),
        (2, "cuda:4", 0, "device='cuda:4' has no device: 2 cuda"),
        (2, "xpu", 0, "this machine has no xpu.*its accelerator is cuda"),
        (0, "cuda", 0, "this machine has no cuda.*it has no accelerator"),
        (2, "gpu", 0, "device='gpu': wanted cpu, cuda"),
    ],
)
def test_a_rank_without_a_device_is_told_why(machine, count, wanted, local_rank, told):
    machine(count)
    with pytest.raises(LaunchError, match=told):
        choose_device(wanted, local_rank)


def test_a_process_group_has_the_back_end_of_its_device():
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert backend_of(torch.device("xpu")) == "cpu:gloo,xpu:xccl"


def share(uuids: list[str]) -> str:
    """On each of two ranks: what is said of devices with these names."""
    own = uuids[int(os.environ["RANK"])]
    ranks.hardware_id = lambda device: own
    ranks.choose_device = lambda *_: torch.device("cuda", 0)
    ranks.backend_of = lambda device: "gloo"
    try:
        ranks.join_ranks(HANG_S, None)
    except LaunchError as error:
        return str(error)
    return ""


def test_two_ranks_on_one_device_are_refused():
    for told in run_ranks(share, 2, ["one", "one"], group=False):
        assert f"ranks 0, 1 on {socket.gethostname()} have the same device (one)" in told
    assert run_ranks(share, 2, ["one", "another"], group=False) == ["", ""]


def joined_by_srun(port: int) -> tuple[int, int, str]:
    """As SLURM starts a rank: without torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.pop(name) for name in names}
    rank, world, local, several = before.values()
    os.environ |= {
        "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": world, "SLURM_LOCALID": local,
        "SLURM_STEP_TASKS_PER_NODE": several, "MASTER_PORT": str(port),
    }  # fmt: skip
    with infinity.Init(infinity.load_recipe(None, ["memory.host=1MiB"]), device="cpu") as init:
        model = torch.nn.Linear(4, 4)
    ours = init.runtime.ranks
    infinity.close(model)
    os.environ |= before  # whoever started this process reads them
    return ours.rank, ours.world_size, str(ours.device)


def test_srun_starts_ranks_without_torchrun():
    assert run_ranks(joined_by_srun, 2, free_port(), group=False) == [(0, 2, "cpu"), (1, 2, "cpu")]


def test_init_refuses_a_device_that_is_not_there():
    with pytest.raises(infinity.InfinityError, match="device='xpu'"):
        infinity.Init(infinity.load_recipe(None, ["train.device=xpu"]))
