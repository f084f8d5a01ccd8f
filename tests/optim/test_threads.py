"""How many threads an update takes, whoever started the ranks."""

import os
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from infinity.device import machine as threads
from infinity.device.machine import background_threads, rank_threads, set_rank_threads
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import HostRule


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Sixteen cores for two ranks."""
    before = torch.get_num_threads()
    asked = Mock(return_value=16)
    monkeypatch.setattr(threads, "usable_cores", asked)
    threads.share_of_cores.cache_clear()
    monkeypatch.setattr(threads, "_rank_threads", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield asked
    torch.set_num_threads(before)
    threads.share_of_cores.cache_clear()


def start_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does for ranks whose user has set nothing."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def test_torchrun_does_not_leave_a_loop_of_ones_own_with_a_single_thread_for_its_updates(monkeypatch):
    start_with_torchrun(monkeypatch)
    assert (rank_threads(), background_threads()) == (8, 4)
    assert HostRule(ADAMW, torch.float32).threads == 4


def test_the_system_is_asked_for_its_cores_once_and_not_at_every_update(monkeypatch, cores):
    start_with_torchrun(monkeypatch)
    for _ in range(3):
        background_threads()
    assert cores.call_count == 1


@pytest.mark.parametrize(("chosen", "background"), [(1, 1), (6, 3)])
def test_what_was_chosen_for_the_rank_holds_under_torchrun_too(monkeypatch, chosen, background):
    start_with_torchrun(monkeypatch)
    set_rank_threads(chosen)
    assert (rank_threads(), background_threads(), torch.get_num_threads()) == (chosen, background, chosen)


def test_without_torchrun_updates_take_pytorchs_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    assert (rank_threads(), background_threads()) == (1, 1)
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    assert rank_threads() == torch.get_num_threads()


def test_a_user_who_sets_more_threads_gets_them(monkeypatch):
    start_with_torchrun(monkeypatch)
    torch.set_num_threads(2)
    assert rank_threads() == 2
