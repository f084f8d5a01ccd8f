"""The launcher itself: results, failures, kills and hangs are told apart."""

import os
import subprocess

import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import RanksError, mark, run_ranks, several, start_ranks
from tests.helpers.limits import hang


def total(value: int) -> float:
    tensor = torch.tensor(float(value * dist.get_rank()))
    dist.all_reduce(tensor)
    return float(tensor)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no second rank today")
    dist.barrier()


def hang_marked() -> None:
    mark("hanging")
    hang()


def leave_a_child() -> None:
    subprocess.Popen(["sleep", "600"])


def test_ranks_return_values_of_several_checks_in_one_start() -> None:
    assert run_ranks(several, 2, (total, 1), (total, 10)) == [[1.0, 10.0], [1.0, 10.0]]


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksError, match=r"(?s)rank 1 ended with 1.*no second rank today"):
        run_ranks(fail_on_one, 2)


def test_killed_hung_and_ended_ranks_are_told_apart() -> None:
    with start_ranks(hang_marked, 3, group=False) as ranks:
        for rank in range(3):
            ranks.reached("hanging", rank)
        ranks.kill(0)
        ranks.kill(2, signum=2)
        for rank in (0, 2):
            ranks.processes[rank].wait()
        ended = ranks.wait(timeout_s=0.2)
    assert ended[0].exit_code == -9
    assert ended[1].hung
    assert "hang_marked" in ended[1].traceback
    assert ended[2].error_type == "KeyboardInterrupt"
    assert not ended[2].hung
    assert all(not _alive(process.pid) for process in ranks.processes)


def test_a_process_left_behind_is_seen_and_ended() -> None:
    with start_ranks(leave_a_child, 1, group=False) as ranks:
        (ended,) = ranks.wait()
    assert ended.left_behind == 1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
