"""The meter counts what operators make, as long as it lives, and nothing else."""

import gc
import threading

import torch
from torch import Tensor

from infinity.activations.profiler import MemoryMeter

KIB = 1024


def kib(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_lives_at_one_time():
    with MemoryMeter() as meter:
        first = kib(10)
        second = kib(20)
        del first
        third = kib(5)
        del second
        fourth = kib(8)
    assert meter.peak_nbytes() == 30 * KIB
    assert third.numel() + fourth.numel() < 30 * KIB


def test_what_was_there_before_views_and_writes_in_place_are_not_counted():
    before = kib(100)
    with MemoryMeter() as meter:
        views = [before[1:], before.view(10, -1), before.detach()]
        before.add_(1)
        made = kib(7)
        more = [made.view(7, -1).t(), made.add_(1)]
    assert (len(views), len(more)) == (3, 2)
    assert meter.peak_nbytes() == 7 * KIB


def test_a_storage_that_is_left_out_counts_for_nothing():
    with MemoryMeter() as meter:
        gradient = kib(50)
        working = kib(3)
        del working
        other = kib(2)
    assert meter.peak_nbytes() == 53 * KIB
    assert meter.peak_nbytes(without=[gradient[5:]]) == 3 * KIB
    assert meter.peak_nbytes(without=[gradient, other]) == 3 * KIB
    assert meter.peak_nbytes(without=[kib(1)]) == 53 * KIB


def test_addresses_that_are_used_again_are_new_storages():
    with MemoryMeter() as meter:
        for _ in range(50):
            kib(4)
        held = kib(4)
    assert meter.peak_nbytes() == 4 * KIB
    assert meter.peak_nbytes(without=[held]) == 4 * KIB


def test_a_step_costs_what_its_graph_and_its_gradients_take():
    weight = torch.zeros(16, 16, requires_grad=True)
    inputs = torch.zeros(32, 16)
    with MemoryMeter() as meter:
        hidden = inputs @ weight  # 2 KiB, kept by sigmoid's result only
        loss = hidden.sigmoid().sum()
        del hidden
        loss.backward()
    # Product and sigmoid; then sigmoid, its gradient and the weight's gradient (1 KiB).
    assert 4 * KIB <= meter.peak_nbytes() <= 4 * KIB + 1 * KIB + 64
    assert meter.peak_nbytes(without=[weight.grad]) <= meter.peak_nbytes()


def test_storages_that_go_on_other_threads_and_by_the_garbage_collector_are_counted_off():
    with MemoryMeter() as meter:
        handed = [kib(10)]
        thread = threading.Thread(target=handed.clear)
        thread.start()
        thread.join()
        ring: list = [kib(10)]
        ring.append(ring)
        del ring
        gc.collect()
        kib(10)
    assert meter.peak_nbytes() == 10 * KIB


def test_sparse_and_empty_results_do_no_harm():
    with MemoryMeter() as meter:
        torch.eye(4).to_sparse()
        torch.empty(0)
    assert meter.peak_nbytes() >= 64
