"""The contract of an engine: the same promises, faults included, over every one of them."""

import errno
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.core.config import SettingError
from infinity.core.errors import DiskError, StateError
from infinity.core.nbytes import Extent, Piece
from infinity.device.memory import HostPool, Lease
from infinity.nvme.engines import Move, QueuedEngine, Request, ThreadsEngine, libaio_engine, make_engine
from infinity.nvme.volume import Volume
from tests.helpers.engines import hide_libaio
from tests.helpers.launch import mark, start_ranks
from tests.helpers.limits import HANG_S

MIB = 2**20
Hold = Callable[..., Lease]


def fault(engine: QueuedEngine, change: Callable[[Request, int], int]) -> list[int]:
    """Let ``change`` replace the result of every request; the results that the kernel gave."""
    settle, results = engine.settle, []

    def faulty(request: Request, result: int) -> None:
        results.append(result)
        settle(request, change(request, result))

    engine.settle = faulty  # type: ignore[method-assign]
    return results


@pytest.mark.parametrize("nbytes", [4096, 2 * MIB, 3 * MIB + 4096, 20 * MIB, 33 * MIB + 8192])
def test_what_was_written_is_read(engine: QueuedEngine, volume: Volume, lease: Hold, nbytes: int) -> None:
    extent = volume.allocate(nbytes, what="unit")
    out, back = lease(nbytes), lease(nbytes)
    out.tensor.random_(0, 256)
    engine.write(extent, out.memory).wait()
    engine.read(extent, back.memory).wait()
    assert torch.equal(out.tensor, back.tensor)
    assert (engine.nbytes_read, engine.nbytes_written, engine.in_flight_nbytes) == (nbytes, nbytes, 0)


@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [
        (4096, [4096]),
        (MIB + 4096, [MIB + 4096]),
        (2 * MIB, [MIB, MIB]),
        (3 * MIB + 4096, [MIB + 4096, MIB + 4096, MIB - 4096]),
        (3 * MIB // 2, [3 * MIB // 4, 3 * MIB // 4]),
    ],
)
def test_no_request_is_left_with_a_few_blocks(volume: Volume, nbytes: int, sizes: list[int]) -> None:
    engine, move = QueuedEngine(volume, MIB), Move(memoryview(bytearray(nbytes)), writes=False)
    requests = engine.cut(move, Extent((Piece(0, 8192, nbytes),)))
    assert [request.nbytes for request in requests] == sizes
    ends = list(itertools.accumulate(sizes))
    assert [request.start for request in requests] == [0, *ends[:-1]]
    assert [request.offset for request in requests] == [8192, *(8192 + end for end in ends[:-1])]


def test_a_fresh_extent_reads_as_zeros(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    extent, back = volume.allocate(5 * MIB, what="unit"), lease(5 * MIB, 1)
    engine.read(extent, back.memory).wait()
    assert not back.tensor.any()


def test_parts_of_a_buffer_fly_to_joined_extents(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    first, second = (volume.allocate(8 * MIB + 4096, what="unit") for _ in range(2))
    out, back = lease(16 * MIB + 8192), lease(16 * MIB + 8192)
    out.tensor.random_(0, 256)
    middle = first.nbytes
    moves = [engine.write(first, out.memory[:middle]), engine.write(second, out.memory[middle:])]
    for move in moves:
        move.wait()
    engine.read(first + second, back.memory, urgent=True).wait()
    assert torch.equal(out.tensor, back.tensor)


def test_an_empty_extent_moves_nothing(engine: QueuedEngine, lease: Hold) -> None:
    move = engine.read(Extent(()), lease(4096).memory[:0])
    move.wait()
    assert move.done()


def test_memory_of_another_size_is_refused(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    with pytest.raises(ValueError, match="4096 bytes and memory of 8192"):
        engine.read(volume.allocate(4096, what="unit"), lease(8192).memory)


def test_waiting_again_and_from_other_threads_is_the_same(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    out = lease(20 * MIB)
    move = engine.write(volume.allocate(20 * MIB, what="unit"), out.memory)
    threads = [threading.Thread(target=move.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    move.wait()
    move.wait()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_then_runs_once_after_the_end_whenever_it_is_asked(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    extent, out = volume.allocate(64 * 1024, what="unit"), lease(64 * 1024)
    for _ in range(100):
        move, called, threads = engine.write(extent, out.memory), [], []
        for _ in range(3):
            ended = threading.Event()
            move.then(lambda m=move, e=ended, c=called: (c.append(m.done()), e.set()))
            threads.append(ended)
        assert all(ended.wait(HANG_S) for ended in threads)
        assert called == [True] * 3
        move.then(lambda called=called: called.append(True))
        assert len(called) == 4


def test_then_may_start_the_next_transfer(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    extent, out, back = volume.allocate(8 * MIB, what="unit"), lease(8 * MIB, 3), lease(8 * MIB)
    ended = threading.Event()
    engine.write(extent, out.memory).then(
        lambda: engine.read(extent, back.memory, urgent=True).then(ended.set)
    )
    assert ended.wait(HANG_S)
    assert torch.equal(out.tensor, back.tensor)


def test_a_call_that_raises_does_not_end_the_engine(
    engine: QueuedEngine, volume: Volume, lease: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value))
    extent, out = volume.allocate(4096, what="unit"), lease(4096)
    done, told, take = threading.Event(), threading.Event(), engine.take
    # Held back until the call is registered, or it would run, and raise, right here.
    engine.take = lambda: take() if told.is_set() else None  # type: ignore[method-assign]
    move = engine.write(extent, out.memory)
    move.then(lambda: 1 // 0)
    move.then(done.set)
    told.set()
    with engine.lock:
        engine.wake()
    assert done.wait(HANG_S)
    assert isinstance(shown[0], ZeroDivisionError)
    engine.read(extent, out.memory).wait()


def test_short_completions_are_resumed_until_every_byte_moved(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    extent = volume.allocate(12 * MIB, what="unit")
    out, back = lease(12 * MIB), lease(12 * MIB)
    out.tensor.random_(0, 256)
    engine.write(extent, out.memory).wait()

    def short(request: Request, result: int) -> int:
        if request.move.writes or result <= 8192:
            return result
        kept = result // 2 + 700  # not even a whole block
        request.memory()[kept:] = bytes(result - kept)
        return kept

    results = fault(engine, short)
    engine.read(extent, back.memory).wait()
    assert torch.equal(out.tensor, back.tensor)
    assert sum(results) > 12 * MIB
    assert (engine.nbytes_read, engine.in_flight_nbytes) == (12 * MIB, 0)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_requests_are_asked_for_again(
    engine: QueuedEngine, volume: Volume, lease: Hold, code: int
) -> None:
    extent, out, back = volume.allocate(9 * MIB, what="unit"), lease(9 * MIB, 5), lease(9 * MIB)
    seen: set[int] = set()

    def interrupted(request: Request, result: int) -> int:
        first = id(request) not in seen
        seen.add(id(request))
        return -code if first else result

    results = fault(engine, interrupted)
    engine.write(extent, out.memory).wait()
    engine.read(extent, back.memory).wait()
    assert torch.equal(out.tensor, back.tensor)
    assert len(results) == 2 * len(seen) or len(results) > len(seen)


def test_a_request_that_is_interrupted_for_ever_is_an_error(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    fault(engine, lambda request, result: -errno.EAGAIN)
    with pytest.raises(DiskError, match="EAGAIN"):
        engine.write(volume.allocate(4096, what="unit"), lease(4096).memory).wait()


def test_an_error_names_path_offset_bytes_and_errno_and_waits_for_the_rest(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    extent, out = volume.allocate(40 * MIB, what="unit"), lease(40 * MIB)
    hit: list[Request] = []

    def failing(request: Request, result: int) -> int:
        if not hit:
            hit.append(request)
            return -errno.EIO
        return result

    fault(engine, failing)
    move = engine.write(extent, out.memory)
    with pytest.raises(DiskError, match=r"write of \d+ bytes at offset \d+ .*\(EIO\).*bytes free") as error:
        move.wait()
    assert error.value.errno == errno.EIO
    assert error.value.path == str(volume.path(hit[0].file))
    assert (error.value.offset, error.value.nbytes) == (hit[0].offset, hit[0].nbytes)
    assert engine.in_flight_nbytes == 0
    assert engine.nbytes_written == 0
    with pytest.raises(DiskError):
        move.wait()
    engine.write(extent, out.memory).wait()  # the engine lives on


def test_a_file_that_ends_too_early_is_an_error_not_a_short_read(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    extent, out = volume.allocate(10 * MIB, what="unit"), lease(10 * MIB)
    engine.write(extent, out.memory).wait()
    os.truncate(volume.path(0), MIB)
    with pytest.raises(DiskError, match=r"read of .* failed after \d+ bytes"):
        engine.read(extent, out.memory).wait()
    assert engine.nbytes_read == 0


def test_a_closed_file_is_a_disk_error(
    engine: QueuedEngine, volume: Volume, lease: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    monkeypatch.setattr(volume, "fd", lambda file: fd)
    with pytest.raises(DiskError, match="EBADF"):
        engine.write(Extent((Piece(0, 0, 4096),)), lease(4096).memory).wait()


def test_urgent_reads_go_before_what_is_queued(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    writes = [volume.allocate(MIB, what="unit") for _ in range(4)]
    wanted, back = volume.allocate(64 * 1024, what="wanted"), lease(64 * 1024)
    out = lease(MIB)
    take, taken, asked = engine.take, [], threading.Event()

    def taking() -> Request | None:
        request = take() if asked.is_set() else None
        taken.extend([] if request is None else [request.move])
        return request

    engine.take = taking  # type: ignore[method-assign]
    moves = [engine.write(extent, out.memory) for extent in writes]
    urgent = engine.read(wanted, back.memory, urgent=True)
    asked.set()
    with engine.lock:
        engine.wake()
    for move in [*moves, urgent]:
        move.wait()
    assert taken[0] is urgent
    assert set(taken) == {*moves, urgent}


def test_many_threads_move_their_own_bytes(engine: QueuedEngine, volume: Volume, lease: Hold) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        nbytes = 5 * MIB
        extents = [volume.allocate(nbytes, what=str(number)) for _ in range(3)]
        out, back = lease(nbytes), lease(nbytes)
        for _ in range(8):
            extent, value = rng.choice(extents), rng.randrange(256)
            out.tensor.fill_(value)
            engine.write(extent, out.memory).wait()
            engine.read(extent, back.memory, urgent=rng.random() < 0.5).wait()
            if not bool((back.tensor == value).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert not wrong
    assert engine.nbytes_read == engine.nbytes_written == 5 * 8 * 5 * MIB


@pytest.mark.parametrize("name", ["libaio", "threads", pytest.param("gds", marks=pytest.mark.gpu)])
def test_close_waits_for_what_is_in_flight_and_gives_threads_back(
    name: str, volume: Volume, lease: Hold
) -> None:
    before = set(threading.enumerate())
    engine: Any = make_engine(name, volume)
    threads, out = set(threading.enumerate()) - before, lease(64 * MIB)
    assert threads
    moves = [engine.write(volume.allocate(64 * MIB, what="unit"), out.memory) for _ in range(2)]
    engine.close()
    assert all(move.done() for move in moves)
    assert not any(thread.is_alive() for thread in threads)
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.read(Extent((Piece(0, 0, 4096),)), lease(4096).memory)


def test_auto_falls_back_with_one_line_that_says_what_is_missing(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_libaio(monkeypatch)
    monkeypatch.setattr(Volume, "notes", ())  # as on a file system with O_DIRECT
    notes: list[str] = []
    engine = make_engine("auto", volume, notes.append)
    assert engine.name == "threads"
    [line] = notes
    assert "libaio.so.1: cannot open" in line
    assert "the engine threads" in line
    assert "\n" not in line
    engine.close()
    with pytest.raises(SettingError, match=r"memory\.engine: got 'libaio'; .*the system's package is called"):
        make_engine("libaio", volume)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'libaio'", name="libaio"), "pip install libaio"),
        (AttributeError("undefined symbol: io_setup"), "undefined symbol: io_setup"),
        (BlockingIOError(errno.EAGAIN, "io_queue_init"), "raise fs.aio-max-nr"),
        (OSError(errno.ENOSYS, "io_queue_init"), "the kernel refuses: Function not implemented"),
    ],
)
def test_whatever_keeps_libaio_from_working_threads_move_the_bytes(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def refuse(self: libaio_engine.LibaioEngine, volume: Volume) -> None:
        raise error

    monkeypatch.setattr(libaio_engine.LibaioEngine, "__init__", refuse)
    monkeypatch.setattr(Volume, "notes", ())  # as on a file system with O_DIRECT
    notes: list[str] = []
    engine = make_engine("auto", volume, notes.append)
    assert engine.name == "threads"
    assert [why in note for note in notes] == [True]
    engine.close()


def wait_until_interrupted(name: str, path: str) -> str:
    volume = Volume([Path(path)])
    engine = make_engine(name, volume)
    assert isinstance(engine, QueuedEngine)
    memory = HostPool(16 * MIB).lease(8 * MIB, who="test").memory
    extent, settle, stop = volume.allocate(8 * MIB, what="unit"), engine.settle, []

    def more(request: Request, result: int) -> None:  # no transfer ends before the interrupt
        request.tries = 0
        settle(request, result if stop else -errno.EAGAIN)

    engine.settle = more  # type: ignore[method-assign]
    try:
        mark("waiting")
        while True:
            engine.write(extent, memory).wait()
    except KeyboardInterrupt:
        stop.append(1)
        engine.close()
        return "closed"


@pytest.mark.parametrize("name", ["libaio", "threads"])
def test_ctrl_c_ends_a_wait_and_the_engine_still_closes(name: str, tmp_path: Path) -> None:
    with start_ranks(wait_until_interrupted, 1, name, str(tmp_path / "c.bin"), group=False) as ranks:
        ranks.reached("waiting", 0)
        ranks.kill(0, signal.SIGINT)
        [ended] = ranks.wait()
    assert (ended.result, ended.exit_code) == ("closed", 0), ended


def test_memory_may_have_any_shape_and_must_be_writable(
    engine: QueuedEngine, volume: Volume, lease: Hold
) -> None:
    extent, out, back = volume.allocate(3 * MIB, what="unit"), lease(3 * MIB, 3), lease(3 * MIB)
    engine.write(extent, out.memory.cast("f")).wait()
    engine.read(extent, back.memory.cast("i")).wait()
    assert torch.equal(out.tensor, back.tensor)
    with pytest.raises(ValueError, match="writable"):
        engine.write(extent, out.memory.toreadonly())


def test_what_a_library_says_beyond_an_errno_reaches_who_waits(
    volume: Volume, lease: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("cuFile: the driver went away")

    engine, extent = ThreadsEngine(volume), volume.allocate(4096, what="unit")
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(DiskError, match="EIO") as error:
        engine.read(extent, lease(4096).memory).wait()
    assert error.value.__notes__ == ["RuntimeError: cuFile: the driver went away"]
    engine.close()


@pytest.mark.gpu
def test_gds_moves_bytes_of_the_accelerator(volume: Volume) -> None:
    pytest.importorskip("kvikio")
    engine = make_engine("gds", volume)
    extent = volume.allocate(20 * MIB, what="unit")
    out = torch.randint(0, 256, (20 * MIB,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(out)
    torch.cuda.synchronize()
    engine.write(extent, out).wait()  # type: ignore[arg-type]
    engine.read(extent, back).wait()  # type: ignore[arg-type]
    assert torch.equal(out, back)
    engine.close()
