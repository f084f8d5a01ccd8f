"""A clock of queues, on which simulated steps and whole training steps are played."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NEVER_S = float("inf")
#: Work that takes less has ended, and what begins in less than this begins now (s).
NOTHING_S = 1e-12


@dataclass(slots=True, eq=False)
class Job:
    """Waits in a queue of the clock, or goes on as its first one."""

    left_s: float  # at full speed
    then: Callable[[], object]
    threads: float = 0.0  # that it keeps busy
    ready_s: float = 0.0  # before that it holds its queue, and does not go on
    began_s: float | None = None  # when it went on for the first time
    order: int = 0  # it goes before those that wait with a larger one


class Queues:
    """Advances time for what does one job after the other, beside compute.

    The first job of each queue goes on. When it ends is known when it begins, or when what slows it begins or
    ends: so time goes from one end to the next.

    Args:
        names: One for each queue.
        speeds_of: Returns the speed of each queue's first job, and of compute as the last, while those go on
            whose bits are set, with so many threads.
        threads: Of compute.
        coupled: Bits of the queues whose jobs change the speed of others.
    """

    def __init__(
        self, names: Sequence[str], speeds_of: Callable[[int, float], tuple[float, ...]],
        threads: float = 0.0, coupled: int = -1,
    ) -> None:  # fmt: skip
        self.now_s, self._names, self._speeds_of = 0.0, names, speeds_of
        self.jobs: tuple[deque[Job], ...] = tuple(deque() for _ in names)
        self.ends_s = [NEVER_S] * len(names)  # when the first job ends, or (if it has not) begins
        self._since_s = [0.0] * len(names)  # and since when it goes on at its speed
        self._going = 0  # bits of the queues whose first job goes on, and of the training thread's compute
        self._known: dict[tuple[int, float], tuple[float, ...]] = {(0, 0.0): speeds_of(0, 0.0)}
        self.speeds = self._known[0, 0.0]
        self._threads, self._coupled = threads, coupled
        self.busy_s: defaultdict[str, float] = defaultdict(float)  # for which each queue's jobs went on

    def add(self, queue: int, job: Job) -> None:
        jobs = self.jobs[queue]
        at = len(jobs)
        while at > 1 and jobs[at - 1].order > job.order:
            at -= 1
        jobs.insert(at, job)
        if jobs[0] is job:
            self._begin(queue)

    def pass_on(self) -> bool:
        """Let time pass until something ends or begins, and call what follows; False: nothing will."""
        at_s = min(self.ends_s)
        if at_s == NEVER_S:
            return False
        queue, self.now_s = self.ends_s.index(at_s), at_s
        if self._going >> queue & 1:
            job = self.jobs[queue].popleft()
            self.busy_s[self._names[queue]] += at_s - self._since_s[queue]
            self._begin(queue)
            job.then()
        else:
            self._begin(queue)
        return True

    def compute(self, work_s: float) -> float:
        """Compute what takes ``work_s`` alone, until something ends or begins; return what is left."""
        speed, next_s = self.speeds[-1], min(self.ends_s)
        end_s = self.now_s + work_s / speed
        if end_s < next_s:
            self.now_s = end_s
            return 0.0
        work_s -= speed * (next_s - self.now_s)
        self.pass_on()
        return work_s if work_s > NOTHING_S else 0.0

    def cancel(self, queue: int, job: Job) -> bool:
        """Cancel a job that waits for another one; False: it is the first, so on its way, or has ended."""
        jobs = self.jobs[queue]
        if job not in jobs or jobs[0] is job:
            return False
        jobs.remove(job)
        return True

    def _begin(self, queue: int) -> None:
        """Let the first job of a queue go on, if there is one that is ready."""
        bit, jobs, end_s = 1 << queue, self.jobs[queue], NEVER_S
        self._going &= ~bit
        if jobs:
            end_s = max(self.now_s, jobs[0].ready_s)
            # One whose beginning changes nothing else may begin later.
            if end_s <= self.now_s + NOTHING_S or (end_s < NEVER_S and not self._coupled & bit):
                self._going |= bit
                self._since_s[queue] = end_s
        if self._coupled & bit:
            self._settle()
        if self._going & bit:
            end_s = self._end_s(queue, end_s)
        self.ends_s[queue] = end_s

    def _end_s(self, queue: int, from_s: float) -> float:
        """Return when a queue's first job ends that goes on from a time at the speed that it has."""
        speed, job = self.speeds[queue], self.jobs[queue][0]
        if not speed:
            return NEVER_S
        if job.began_s is None:
            job.began_s = from_s
        return from_s + job.left_s / speed

    def let_on(self, queue: int, job: Job) -> None:
        """Let a job go on that was not ready."""
        job.ready_s = self.now_s
        if self.jobs[queue][0] is job:
            self._begin(queue)

    def set_computing(self, *, goes_on: bool) -> None:
        """Take note that the training thread computes from now on, or no longer."""
        bit = 1 << len(self.jobs)
        self._going = self._going & ~bit | bit * goes_on
        self._settle()

    def _settle(self) -> None:
        """Give what goes on the speed that it has beside the rest."""
        going, before, now_s, threads = self._going, self.speeds, self.now_s, 0.0
        if self._threads:
            first = [jobs[0].threads for i, jobs in enumerate(self.jobs) if going >> i & 1]
            threads = sum(first, self._threads * (going >> len(self.jobs) & 1))
        if (going, threads) not in self._known:
            self._known[going, threads] = self._speeds_of(going, threads)
        self.speeds = self._known[going, threads]
        if self.speeds != before:
            for i, jobs in enumerate(self.jobs):
                if self.speeds[i] != before[i] and going >> i & 1:
                    passed_s, self._since_s[i] = now_s - self._since_s[i], now_s
                    self.busy_s[self._names[i]] += passed_s
                    jobs[0].left_s = max(0.0, jobs[0].left_s - before[i] * passed_s)
                    self.ends_s[i] = self._end_s(i, now_s)

    def busy_until_now(self) -> dict[str, float]:
        found = self.busy_s.copy()
        for i, name in enumerate(self._names):
            if self._going >> i & 1:
                found[name] += max(0.0, self.now_s - self._since_s[i])
        return found
