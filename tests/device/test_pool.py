"""Pools: bounded, counted, shared by threads."""

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import BudgetError, StateError
from infinity.device.memory import Buffer, CountingPool, DevicePool, HostPool, Lease
from infinity.observe.timeline import Timeline
from tests.helpers.cases import examples
from tests.helpers.limits import HANG_S

MIB = 2**20


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(16 * MIB)
    pool.patience_s = 0.1
    yield pool
    pool.close()


def test_a_lease_is_exactly_what_was_asked_and_accounts_for_whole_pages(pool: HostPool) -> None:
    with pool.lease(5 * MIB + 1, who="a") as large, pool.lease(3, who="b") as small:
        assert (large.nbytes, len(large.memory), large.tensor.shape) == (
            5 * MIB + 1,
            5 * MIB + 1,
            (5 * MIB + 1,),
        )
        assert large.tensor.data_ptr() % (2 * MIB) == 0
        assert small.tensor.data_ptr() % 4096 == 0
        assert pool.leased_nbytes == 6 * MIB + 4096
        assert pool.held == {"a": 6 * MIB, "b": 4096}
    assert pool.leased_nbytes == 0
    assert pool.held == {}
    assert pool.peak_nbytes == 6 * MIB + 4096


def test_tensor_and_memory_are_the_same_bytes(pool: HostPool) -> None:
    with pool.lease(10_000, who="a") as lease:
        lease.tensor.fill_(7)
        assert bytes(lease.memory) == b"\7" * 10_000
        lease.memory[5] = 9
        assert lease.tensor[5] == 9


def test_a_deferred_release_takes_effect_when_it_may_in_either_order(pool: HostPool) -> None:
    for first in ("released", "allowed"):
        lease = pool.lease(MIB, who="a")
        lease.defer_release(True)
        for each in ("released", "allowed") if first == "released" else ("allowed", "released"):
            assert pool.leased_nbytes == MIB
            lease.release() if each == "released" else lease.defer_release(False)
        assert pool.leased_nbytes == 0


def test_what_is_held_back_gives_way_to_what_does_not_fit_beside_it(pool: HostPool) -> None:
    timeline = Timeline(enabled=False)
    counting = CountingPool(pool, timeline.stall)
    passed, used = (counting.lease(6 * MIB, who=who) for who in ("passed", "used"))
    for each in (passed, used):
        counting.hold_back(each)
    passed.release()
    assert pool.leased_nbytes == 12 * MIB
    fitting = counting.lease(4 * MIB, who="fits")  # beside all
    assert pool.leased_nbytes == pool.peak_nbytes == 16 * MIB
    assert not timeline.stall_s
    next_one = counting.lease(6 * MIB, who="needs the room of what has passed")
    assert pool.held.keys() == {"used", "fits", "needs the room of what has passed"}
    for each in (used, fitting, next_one):
        each.release()
    assert pool.leased_nbytes == 0


def test_every_lease_of_a_buffer_shares_one_storage(pool: HostPool) -> None:
    pointers = set()
    for nbytes in (3 * MIB, 4 * MIB, 3 * MIB + 5):
        with pool.lease(nbytes, who="a") as lease:
            pointers |= {lease.tensor.untyped_storage().data_ptr(), lease.tensor.data_ptr()}
            pointers.add(lease.tensor.untyped_storage().data_ptr())
    assert len(pointers) == 1


def test_releasing_twice_is_harmless_and_use_after_release_is_an_error(pool: HostPool) -> None:
    lease = pool.lease(MIB, who="the reader")
    lease.release()
    other = pool.lease(MIB, who="other")
    lease.release()
    assert pool.held == {"other": MIB}
    with pytest.raises(StateError, match="the reader"):
        lease.tensor.zero_()
    other.release()


def test_what_can_never_fit_is_refused_at_once_with_the_arithmetic() -> None:
    pool = HostPool(16 * MIB)
    pool.patience_s = 10 * HANG_S
    with pytest.raises(BudgetError, match=r"layers\.3 needs .*Raise memory\.host by at least 2097152 bytes"):
        pool.lease(18 * MIB, who="layers.3")
    pool.close()


def test_an_exhausted_pool_names_who_holds_it_and_what_to_raise(pool: HostPool) -> None:
    with pool.lease(10 * MIB, who="reader"), pool.lease(4 * MIB, who="writer"):
        message = r"no buffer of 4 MiB for late in 0\.1 s.*reader: 10 MiB, writer: 4 MiB.*raise memory\.host"
        with pytest.raises(BudgetError, match=message):
            pool.lease(4 * MIB, who="late")
        assert pool.try_lease(4 * MIB, who="late") is None
        again = pool.try_lease(2 * MIB, who="small")
        assert again is not None
        again.release()


def test_a_lease_waits_until_a_buffer_comes_back() -> None:
    pool = HostPool(4 * MIB)
    pool.patience_s = HANG_S
    first = pool.lease(4 * MIB, who="first")
    timer = threading.Timer(0.05, first.release)
    timer.start()
    with pool.lease(2 * MIB, who="second") as second:
        assert second.nbytes == 2 * MIB
    timer.join()
    pool.close()


def test_patience_starts_anew_whenever_something_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes 0.2 s of 0.3 s, and gives one of three buffers back."""
    pool = HostPool(4 * MIB)
    pool.patience_s = 0.3
    large, *small = (pool.lease(n * MIB, who="x") for n in (2, 1, 1))
    held, now = [*small, large], [0.0]

    def wait(timeout: float) -> bool:
        now[0] += 0.2
        held.pop(0).release()
        return True

    monkeypatch.setattr("infinity.device.memory.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pool.changed, "wait", wait)
    pool.lease(4 * MIB, who="whole").release()  # after 0.6 s
    assert (held, now) == ([], [pytest.approx(0.6)])
    pool.close()


def test_a_kept_buffer_gives_way_to_another_size(pool: HostPool) -> None:
    for nbytes in (6 * MIB, 8 * MIB, 10 * MIB, 16 * MIB):
        pool.lease(nbytes, who="a").release()
        assert pool.leased_nbytes + pool.kept_nbytes <= pool.capacity_nbytes
    assert pool.kept_nbytes == 16 * MIB


def test_memory_that_is_not_leased_goes_back_to_the_system() -> None:
    pool = HostPool(64 * MIB)
    with pool.lease(64 * MIB, who="a") as lease:
        lease.tensor.fill_(1)
        view = lease.tensor
    with_it = int(_smaps(view.data_ptr())["Rss"][0])  # KiB; the kernel may join neighbouring mappings
    pool.close()
    assert with_it - int(_smaps(view.data_ptr())["Rss"][0]) == 64 * 1024
    assert int(view[5]) == 0  # a view that outlives everything is safe to read


def test_a_forked_child_does_not_copy_the_buffers(pool: HostPool) -> None:
    with pool.lease(8 * MIB, who="a") as lease:
        lease.tensor.fill_(1)
        flags = _smaps(lease.tensor.data_ptr())["VmFlags"]
        pid = os.fork()
        if pid == 0:
            os._exit(any(lease.memory[:4096]))
        assert os.waitpid(pid, 0)[1] == 0  # zeros, and no fault
        assert all(lease.memory[:4096])
    assert "wf" in flags  # wiped in a fork


def test_a_process_that_is_stopped_uses_up_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(4 * MIB)
    pool.patience_s = HANG_S
    first = pool.lease(4 * MIB, who="first")
    timer = threading.Timer(0.05, first.release)
    now = itertools.count(step=3600)
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))  # an hour between two looks
    monkeypatch.setattr("infinity.device.memory.time", clock)
    timer.start()
    pool.lease(2 * MIB, who="second").release()
    timer.join()
    pool.close()


def test_a_closed_pool_refuses_and_still_takes_back() -> None:
    pool = HostPool(4 * MIB)
    lease = pool.lease(MIB, who="a")
    pool.close()
    lease.release()
    assert (pool.leased_nbytes, pool.kept_nbytes) == (0, 0)
    with pytest.raises(StateError, match="closed"):
        pool.lease(MIB, who="b")


def test_a_device_pool_has_tensors_and_no_host_memory() -> None:
    pool = DevicePool(4 * MIB, torch.device("cpu"))
    pool.patience_s = 0.05
    with pool.lease(3 * MIB, who="a") as lease:
        assert lease.tensor.shape == (3 * MIB,)
        with pytest.raises(StateError, match="no host memory"):
            lease.memory[0]
        with pytest.raises(BudgetError, match=r"raise memory\.device"):
            pool.lease(2 * MIB, who="b")


def test_device_memory_is_given_back_before_other_memory_takes_its_place(monkeypatch) -> None:
    pool = DevicePool(8 * MIB, torch.device("cpu"))
    with pool.lease(5 * MIB, who="a") as lease:
        before = weakref.ref(lease.tensor.untyped_storage())
    make, alive = pool.make, []
    monkeypatch.setattr(pool, "make", lambda nbytes: (alive.append(before() is not None), make(nbytes))[1])
    pool.lease(8 * MIB, who="b").release()
    assert alive == [False]


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=25),
    st.integers(MIB, 8 * MIB),
)
def test_never_above_capacity_and_no_two_live_buffers_overlap(
    steps: list[tuple[int, bool]], capacity: int
) -> None:
    pool = HostPool(capacity)
    live: list[Lease] = []
    for nbytes, release_first in steps:
        if release_first and live:
            live.pop(nbytes % len(live)).release()
        lease = pool.try_lease(nbytes, who=str(nbytes))
        if lease is not None:
            live.append(lease)
        assert pool.leased_nbytes + pool.kept_nbytes <= capacity
        assert pool.leased_nbytes == sum(pool.held.values())
        assert pool.peak_nbytes <= capacity
        spans = sorted((a.tensor.data_ptr(), a.tensor.data_ptr() + a.nbytes) for a in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for lease in live:
        lease.release()
    assert pool.leased_nbytes == 0
    pool.close()


def test_many_threads_share_a_pool_without_sharing_bytes() -> None:
    pool = HostPool(4 * MIB)
    pool.patience_s = HANG_S
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(60):
            with pool.lease((1 + (i + number) % 3) * 300_000, who=str(number)) as lease:
                lease.tensor.fill_(number)
                if not bool((lease.tensor == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.leased_nbytes == 0
    assert pool.peak_nbytes <= pool.capacity_nbytes
    pool.close()


class Copy:
    """An event of a copy that ends when the test says so."""

    def __init__(self, buffer: Buffer) -> None:
        self._ended = threading.Event()
        buffer.events.append(self)  # type: ignore[arg-type]

    def end(self) -> None:
        self._ended.set()

    def query(self) -> bool:
        return self._ended.is_set()

    def synchronize(self) -> None:
        assert self._ended.wait(HANG_S)


def test_host_memory_that_a_copy_uses_is_lent_again_when_the_copy_has_ended(pool: HostPool) -> None:
    lease = pool.lease(9 * MIB, who="a")
    address, copy = lease.tensor.data_ptr(), Copy(lease.buffer)
    lease.release()
    assert pool.try_lease(8 * MIB, who="b") is None
    assert pool.leased_nbytes == 10 * MIB
    threading.Timer(0.05, copy.end).start()  # what it waits for, longer than the patience that it would have
    with pool.lease(9 * MIB, who="b") as again:
        assert copy.query()
        assert again.tensor.data_ptr() == address
    assert pool.leased_nbytes == 0
    pool.close()


@pytest.mark.parametrize("take", [lambda lease: lease.tensor, lambda lease: lease.memory])
def test_the_host_does_not_touch_memory_that_a_copy_uses(pool: HostPool, take: Any) -> None:
    lease = pool.lease(MIB, who="a")
    copy = Copy(lease.buffer)
    threading.Timer(0.05, copy.end).start()
    assert len(take(lease)) == MIB
    assert copy.query()
    lease.release()
    assert pool.leased_nbytes == 0
    pool.close()


def test_a_closed_pool_unmaps_what_a_copy_uses_when_it_has_ended(pool: HostPool) -> None:
    lease = pool.lease(MIB, who="a")
    copy = Copy(lease.buffer)
    lease.release()
    threading.Timer(0.05, copy.end).start()
    pool.close()
    assert copy.query()
    assert pool.leased_nbytes == 0


class SlowPool(HostPool):
    """Makes a buffer when the test says so: page-locking takes long, and may be refused."""

    def __init__(self) -> None:
        super().__init__(8 * MIB)
        self.patience_s = HANG_S
        self.asked, self.may_make, self.refuses = threading.Event(), threading.Event(), False

    def make(self, nbytes: int) -> Buffer:
        self.asked.set()
        assert self.may_make.wait(HANG_S)
        if self.refuses:
            raise BudgetError("the limit of locked memory")
        return super().make(nbytes)


def test_a_buffer_is_made_while_others_are_lent_and_given_back() -> None:
    pool = SlowPool()
    pool.may_make.set()
    first = pool.lease(2 * MIB, who="a")
    pool.may_make.clear()
    pool.asked.clear()
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(pool.lease, 3 * MIB, who="b")
        assert pool.asked.wait(HANG_S)
        assert pool.leased_nbytes == 6 * MIB  # its bytes are taken already
        first.release()
        pool.lease(2 * MIB, who="a").release()
        pool.may_make.set()
        second.result().release()
    assert pool.leased_nbytes == 0
    pool.close()


def test_a_buffer_that_cannot_be_made_takes_no_bytes() -> None:
    pool = SlowPool()
    pool.refuses = True
    pool.may_make.set()
    with pytest.raises(BudgetError, match="the limit of locked memory"):
        pool.lease(8 * MIB, who="a")
    pool.refuses = False
    pool.lease(8 * MIB, who="a").release()
    assert (pool.leased_nbytes, pool.held) == (0, {})
    pool.close()


@pytest.mark.gpu
def test_pinned_buffers_are_page_locked_and_exact() -> None:
    pool = HostPool(16 * MIB, device=torch.accelerator.current_accelerator())
    with pool.lease(5 * MIB, who="a") as lease:
        assert lease.tensor.is_pinned()
        assert pool.leased_nbytes == 6 * MIB
    pool.close()


def _smaps(address: int) -> dict[str, list[str]]:
    """What the kernel says of the mapping at ``address``."""
    inside, found = False, {}
    with open("/proc/self/smaps") as file:
        for line in file:
            head, *rest = line.split()
            if not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside:
                found[head[:-1]] = rest
    return found
