"""The chunk queue, event by event: what is read, computed and written next, and what is read ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planner.updates import RESERVE, ChunkInFlight, ChunkQueue, Job, Move, Moves


class Driver:
    """Carries out actions when a test says so; every transfer is one that a test ends."""

    def __init__(self, depth: int, buffers: int = 99) -> None:
        self.queue, self.buffers = ChunkQueue(depth), buffers
        self.read: list[tuple[str, int]] = []
        self.written: list[tuple[str, int]] = []
        self.told: list[tuple[str, str]] = []
        self.moving: list[ChunkInFlight] = []
        self.computing: list[ChunkInFlight] = []

    def on(self, moves: Moves) -> None:
        for move, target in moves:
            match move:
                case Move.READ if self.buffers:
                    self.buffers -= 1
                    self.read.append((target.name, target.index))
                    self.move(target)
                case Move.READ:
                    self.on(self.queue.refuse(target))
                case Move.REST:
                    self.move(target)
                case Move.COMPUTE:
                    self.computing.append(target)
                case Move.WRITE:
                    self.written.append((target.job.name, target.index))
                    self.move(target)
                case Move.FREE:
                    self.buffers += 1
                case Move.COMPUTED | Move.ENDED:
                    self.told.append((move.name.lower(), target.name))

    def move(self, chunk: ChunkInFlight) -> None:
        chunk.moving += 1
        self.moving.append(chunk)

    def begin(self) -> None:
        while moves := self.queue.next():
            self.on(moves)

    def end_move(self, at: int = 0) -> None:
        self.on(self.queue.moved(self.moving.pop(at)))

    def compute(self) -> None:
        self.on(self.queue.computed(self.computing.pop()))

    def run(self) -> None:
        """Let all that is under way end, in order."""
        self.begin()
        while self.moving or self.computing:
            self.compute() if self.computing else self.end_move()
            self.begin()


def expected(name: str, chunks: int = 3, **more: object) -> Job:
    return Job(name=name, chunks=chunks, **more)


def test_reads_are_ahead_of_the_rule_and_writes_behind_it():
    driver = Driver(3)
    driver.on(driver.queue.submit(Job(name="a", chunks=5)))
    driver.begin()
    assert driver.read == [("a", 0), ("a", 1), ("a", 2)]
    driver.end_move()
    driver.begin()
    assert [chunk.index for chunk in driver.computing] == [0]
    driver.compute()
    assert driver.written == [("a", 0)]
    driver.begin()
    assert len(driver.read) == 3  # a buffer is free when its write has landed
    driver.end_move(driver.moving.index(driver.queue.in_flight[0]))
    driver.begin()
    assert len(driver.read) == 4
    driver.run()
    assert driver.told == [("computed", "a"), ("ended", "a")]
    assert driver.queue.idle


def test_a_more_urgent_job_goes_before_chunks_that_have_not_started():
    driver = Driver(2)
    driver.on(driver.queue.submit(Job(name="slow", chunks=4, priority=9)))
    driver.begin()
    driver.on(driver.queue.submit(Job(name="urgent", chunks=1, priority=1)))
    driver.run()
    assert driver.read[2] == ("urgent", 0)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 9])
def test_what_is_read_ahead_leaves_buffers_for_jobs_that_come_in_another_order(depth: int):
    driver = Driver(depth)
    driver.on(driver.queue.expect([expected("a"), expected("b"), expected("c")]))
    driver.begin()
    assert len(driver.read) == max(0, depth - RESERVE)
    driver.on(driver.queue.submit(Job(name="other", chunks=2)))
    driver.run()
    assert ("ended", "other") in driver.told


def test_fewer_chunks_that_read_a_gradient_are_read_ahead():
    driver = Driver(9)
    driver.on(driver.queue.expect([expected("a", 9, fits=5)]))
    driver.begin()
    assert len(driver.read) == 5 - RESERVE


def test_nothing_is_read_ahead_before_the_update_that_writes_it_has_ended():
    driver = Driver(9)
    driver.on(driver.queue.submit(Job(name="a", chunks=1)))
    driver.on(driver.queue.expect([expected("a"), expected("b")]))
    driver.begin()
    assert driver.read == [("a", 0)]
    driver.run()
    assert driver.read == [("a", 0), *(("a", i) for i in range(3)), *(("b", i) for i in range(3))]


@pytest.mark.parametrize("same", [True, False])
def test_a_job_takes_what_was_read_for_it_from_the_same_place(same: bool):
    driver = Driver(9)
    driver.on(driver.queue.expect([expected("a", source="here")]))
    driver.run()
    driver.on(driver.queue.submit(Job(name="a", chunks=3, source="here" if same else "there")))
    driver.run()
    assert driver.read == [("a", i) for i in range(3)] * (1 if same else 2)
    assert driver.written == [("a", i) for i in range(3)]
    assert driver.queue.idle
    assert driver.buffers == 99


def test_a_job_that_has_come_gets_the_buffer_of_what_was_read_ahead():
    driver = Driver(9, buffers=1)
    driver.on(driver.queue.expect([expected("late")]))
    driver.begin()
    driver.on(driver.queue.submit(Job(name="early", chunks=1)))
    driver.run()
    driver.on(driver.queue.submit(Job(name="late", chunks=3)))
    driver.run()
    assert driver.written == [("early", 0), *(("late", i) for i in range(3))]


def test_a_cancelled_job_says_what_it_did_not_move_and_ends_with_its_writes():
    driver = Driver(3)
    job = Job(name="a", chunks=6)
    driver.on(driver.queue.submit(job))
    driver.begin()
    driver.end_move()
    driver.begin()
    driver.compute()  # chunk 0 is written, 1 and 2 are read, 3 to 5 wait
    driver.on(driver.queue.cancel(job))
    assert (job.unread, job.unwritten) == (range(3, 6), (3, 4, 5, 1, 2))
    assert driver.told == []
    driver.run()
    assert driver.told == [("ended", "a")]
    driver.on(driver.queue.cancel(job))
    assert driver.queue.idle
    assert driver.buffers == 99


@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_in_any_order_of_events_every_chunk_is_written_once_within_the_depth(
    data: st.DataObject, depth: int, buffers: int
):
    driver, names = Driver(depth, buffers), ["a", "b", "c", "d"]
    driver.on(driver.queue.expect([expected(each) for each in data.draw(st.permutations(names))]))
    jobs = [Job(name=name, chunks=3, priority=data.draw(st.integers(0, 2))) for name in names]
    coming, cancelled = list(jobs), set()
    while coming or driver.moving or driver.computing:
        driver.begin()
        assert len(driver.queue.in_flight) <= depth
        can = [
            c for c, on in (("come", coming), ("move", driver.moving), ("compute", driver.computing)) if on
        ]
        if not can:
            break
        match data.draw(st.sampled_from([*can, "cancel"])):
            case "come":
                driver.on(driver.queue.submit(coming.pop()))
            case "move":
                driver.end_move(data.draw(st.integers(0, len(driver.moving) - 1)))
            case "compute":
                driver.compute()
            case "cancel" if data.draw(st.integers(0, 9)) == 0:
                job = data.draw(st.sampled_from(jobs))
                cancelled |= {job.name} & {each.name for each in driver.queue.jobs}
                driver.on(driver.queue.cancel(job))
    driver.run()
    assert not driver.queue.jobs
    assert sorted(name for what, name in driver.told if what == "ended") == names
    for job in jobs:
        written = [index for name, index in driver.written if name == job.name]
        assert sorted([*written, *job.unwritten]) == [0, 1, 2]
        assert job.name in cancelled or (("computed", job.name) in driver.told and written)
    driver.on(driver.queue.expect(()))
    driver.run()
    assert driver.queue.idle
    assert driver.buffers == buffers
