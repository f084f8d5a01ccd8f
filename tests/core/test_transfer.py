"""Transfers that many threads wait for, and transfers that follow each other."""

import contextlib
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.nbytes import Transfer, chained, stream
from tests.helpers.fakes import FakePool
from tests.helpers.limits import HANG_S


def test_every_call_runs_once_whenever_the_transfer_ends():
    for _ in range(200):
        transfer, ran, start = Transfer(), [], threading.Barrier(4)

        def register(number, transfer=transfer, ran=ran, start=start):
            start.wait()
            for i in range(20):
                transfer.then(lambda i=i: ran.append((number, i)))

        def finish(transfer=transfer, start=start):
            start.wait()
            transfer.finish()

        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(register, n) for n in range(3)] + [threads.submit(finish)]
            for job in jobs:
                job.result()
        assert sorted(ran) == [(n, i) for n in range(3) for i in range(20)]


def test_an_error_surfaces_at_every_wait_and_nowhere_else():
    transfer, ran = Transfer(), []
    transfer.then(lambda: ran.append(1))
    transfer.finish(OSError("disk"))
    assert transfer.done()
    assert ran == [1]
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            transfer.wait()


def test_only_the_first_end_counts():
    transfer, ran = Transfer(), []
    transfer.then(lambda: ran.append(1))
    transfer.finish()
    transfer.finish(OSError("late"))
    transfer.wait()
    assert ran == [1]


def test_waiting_again_shows_nothing_of_earlier_waits():
    def fails_here():
        raise OSError("disk")

    transfer, frames = Transfer(), []
    transfer.run(fails_here)
    for _ in range(3):
        with pytest.raises(OSError, match="disk") as raised:
            transfer.wait()
        frames.append([frame.name for frame in traceback.extract_tb(raised.value.__traceback__)])
    assert "fails_here" not in frames[0]
    assert frames[0] == frames[2]


def test_every_call_runs_and_a_mistake_in_one_is_shown_as_that_of_a_thread(monkeypatch):
    shown, ran = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(str(args.exc_value)))

    def mistake():
        raise ValueError("mistake")

    transfer = Transfer()
    transfer.then(mistake)
    transfer.then(lambda: ran.append(1))
    transfer.finish()
    assert (ran, shown) == ([1], ["mistake"])


def test_run_ends_with_what_becomes_of_the_call():
    well, failed = Transfer(), Transfer()
    well.run(lambda: None)
    well.wait()
    failed.run(lambda: [][0])
    with pytest.raises(IndexError):
        failed.wait()


def test_ctrl_c_gets_through_to_a_thread_that_waits():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])

    def wait():
        timer.start()
        Transfer().wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()
    signal.signal(signal.SIGINT, before)


def test_a_chained_transfer_begins_only_when_the_first_has_ended():
    first, second, begun = Transfer(), Transfer(), []
    chain = chained(first, lambda: begun.append(1) or second)
    called = []
    chain.then(lambda: called.append(1))
    assert not begun
    assert not chain.done()
    first.finish()
    assert begun == [1]
    assert not chain.done()
    assert not called
    second.finish()
    assert chain.done()
    assert called == [1]
    chain.wait()


@pytest.mark.parametrize("where", ["first", "begin", "second"])
def test_an_error_anywhere_in_a_chain_is_raised_by_wait(where):
    first, second, begun, called = Transfer(), Transfer(), [], []

    def begin():
        begun.append(1)
        if where == "begin":
            raise OSError("begin")
        return second

    chain = chained(first, begin)
    chain.then(lambda: called.append(1))
    first.finish(OSError("first") if where == "first" else None)
    second.finish(OSError("second"))
    assert chain.done()
    assert called == [1]
    assert begun == ([] if where == "first" else [1])
    with pytest.raises(OSError, match=where):
        chain.wait()


def test_waiting_for_a_chain_that_has_not_begun_ends_with_it():
    for _ in range(200):
        first, second, start = Transfer(), Transfer(), threading.Barrier(3)
        chain = chained(first, lambda second=second: second)
        called = threading.Event()

        def end(transfer, start=start):
            start.wait()
            transfer.finish()

        with ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(end, first), threads.submit(end, second)]
            start.wait()
            chain.then(called.set)
            chain.wait()
            for job in jobs:
                job.result()
        assert called.wait(HANG_S)
        assert chain.done()


# --- streams of pieces ---------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 9), st.sampled_from(["all", "fails", "closed"]))
def test_pieces_stream_in_order_through_buffers_that_nothing_writes_to_afterwards(number, depth, at, how):
    pool, flying, free = FakePool(2**20), dict[int, Transfer](), []

    def read(piece, lease):
        assert lease not in free  # which a reader may still use
        flying[piece] = Transfer()
        if len(flying) == min(depth, number - len(seen)) or len(seen) + len(flying) == number:
            for each in [*flying]:  # the latest ends first
                error = OSError("disk") if how == "fails" and each == at else None
                flying[each].finish(error)
        return flying[piece]

    seen: list[int] = []
    buffers = [pool.lease(4096, who="a stream") for _ in range(depth)]
    fails = how == "fails" and at < number
    expected = pytest.raises(OSError, match="disk") if fails else contextlib.nullcontext()
    with expected, contextlib.closing(stream(range(number), buffers, read)) as landed:
        for piece, lease in landed:
            free[:] = [lease]
            assert flying.pop(piece).done()
            seen.append(piece)
            if how == "closed" and piece == at:
                break
            free.clear()
            for each in flying.values():
                each.finish()
    wanted = number if how == "all" or at >= number else at + (how == "closed")
    assert seen == [*range(wanted)]
    assert all(transfer.done() for transfer in flying.values())
