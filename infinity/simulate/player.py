"""Play a plan on a clock: what a step under it takes, and what it holds.

[Note: a play]
Compute runs the operators in order, and between them it does what the tensor cache does. A slot is stored
when it has been packed; while more than the plan's backlog is not stored, compute waits. Its memory is free
when the store has ended and forward has used it for the last time. When backward asks for a slot, the loads
that the plan ties to it start, and take memory from then on. A slot that has not left is served from where
it is, and its store is called off if it has not begun. A slot that other code holds is stored in vain.

Units' reads and writes (:class:`infinity.core.profile.Traffic`) keep the channels busy; compute does not
wait for them, since the measured step has waited already.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from infinity.core.plan import ActivationPlan, Hardware, Outcome
from infinity.core.profile import Phase, Profile, SlotKey, Traffic
from infinity.simulate.cache import Cache
from infinity.simulate.clock import Channel, Clock
from infinity.simulate.events import events_of
from infinity.simulate.saved import MADE, Recomputation, saved_under
from infinity.simulate.timeline import Interval, Timeline


def play(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> Outcome:
    """What one micro-batch with its update costs under ``plan``.

    Raises:
        ValueError: The plan was made for another profile, or needs a channel that ``hardware`` lacks.
    """
    return play_in_detail(profile, plan, hardware)[0]


def play_in_detail(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> tuple[Outcome, Timeline]:
    """The same, and what happened when; errors as :func:`play`."""
    return _Play(profile, plan, hardware).run()


def bounded(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> ActivationPlan:
    """``plan`` with a bound on what may wait to be stored: on a slower drive compute waits, and memory holds.

    As much may wait as does when nothing is slower than measured, and what the budget has to spare.
    """
    outcome, timeline = play_in_detail(profile, plan, hardware)
    most_nbytes = timeline.most_backlog_nbytes
    spare_nbytes = most_nbytes if plan.capacity_nbytes is None else plan.capacity_nbytes - outcome.peak_nbytes
    return replace(plan, backlog_nbytes=most_nbytes + max(0, spare_nbytes))


class _Play:
    """See [Note: a play]."""

    def __init__(self, profile: Profile, plan: ActivationPlan, hardware: Hardware) -> None:
        self.profile, self.plan = profile, plan
        saved = saved_under(profile, plan)
        self.events = events_of(profile, plan, saved)
        self.clock = Clock(hardware)
        self.cache = Cache(self.clock, plan, saved)
        self.stalls: list[Interval] = []
        self.recomputed: list[Interval] = []
        self.work_s = _work_s(profile)
        self.traffic = defaultdict[int, list[Traffic]](list)
        for traffic in profile.traffic:
            self.traffic[traffic.at].append(traffic)

    def run(self) -> tuple[Outcome, Timeline]:
        operators = self.profile.operators
        begin = next((at for at, o in enumerate(operators) if o.phase is Phase.BACKWARD), len(operators))
        for at in range(begin):
            self._operate(at)
        backward_s = self.clock.now_s
        self.cache.foresee(None)
        for at in range(begin, len(operators)):
            self._operate(at)
        step_s = self.clock.now_s
        self.clock.drain()
        return self._outcome(step_s), self._timeline(backward_s)

    def _operate(self, at: int) -> None:
        event, cache = self.events[at], self.cache
        for key in event.asks:
            self._ask(key)
        for recomputation in event.recomputes:
            self._recompute(recomputation)
        cache.device.add(event.comes_nbytes)
        for traffic in self.traffic.get(at, ()):
            self._move_units(traffic)
        self.clock.compute(self.work_s[at])
        cache.device.add(-event.goes_nbytes)
        for key in event.packs:
            self._pack(key)
        for key in event.used_up:
            cache.use_up(key)
        for key in event.releases:
            cache.release(key)

    def _pack(self, key: SlotKey) -> None:
        self.cache.pack(key)
        most_nbytes = self.plan.backlog_nbytes
        if most_nbytes is not None:
            self._wait(lambda: self.cache.backlog_nbytes <= most_nbytes, "stores")

    def _ask(self, key: SlotKey) -> None:
        move = self.cache.ask(key)
        if move is not None:
            self._wait(lambda: move.ended, move.name)

    def _wait(self, until: Callable[[], bool], name: str) -> None:
        began_s = self.clock.now_s
        self.clock.wait(until)
        if self.clock.now_s > began_s:
            self.stalls.append(Interval(began_s, self.clock.now_s, name))

    def _recompute(self, recomputation: Recomputation) -> None:
        """Run a block's forward again; what it made for the rest of forward is made once more, in vain."""
        storages, (first, end) = self.profile.storages, recomputation.block.forward
        device, began_s = self.cache.device, self.clock.now_s
        device.add(sum(storages[index].nbytes for index in recomputation.dropped))
        comes, goes = [0] * (end - first), [0] * (end - first)
        dropped = set(recomputation.dropped)
        for index, storage in enumerate(storages):
            if first <= storage.born < end and storage.kind in MADE and index not in dropped:
                comes[storage.born - first] += storage.nbytes
                goes[min(storage.dies, end - 1) - first] += storage.nbytes
        for at in range(first, end):
            device.add(comes[at - first])
            self.clock.compute(self.work_s[at])
            device.add(-goes[at - first])
        self.recomputed.append(Interval(began_s, self.clock.now_s, recomputation.block.name))

    def _move_units(self, traffic: Traffic) -> None:
        for channel, nbytes in (
            (Channel.READ, traffic.nbytes_read),
            (Channel.WRITE, traffic.nbytes_written),
        ):
            if nbytes:
                self.clock.submit(channel, "units", nbytes, lambda: None, slows=False)

    def _outcome(self, step_s: float) -> Outcome:
        return Outcome(
            step_s=step_s,
            stall_s=_length_s(self.stalls),
            recompute_s=_length_s(self.recomputed),
            peak_nbytes=self.cache.device.peak_nbytes,
            host_peak_nbytes=self.cache.host.peak_nbytes,
            nbytes_stored=self.cache.nbytes_stored,
            nbytes_loaded=self.cache.nbytes_loaded,
        )

    def _timeline(self, backward_s: float) -> Timeline:
        channels = {str(channel): tuple(moves) for channel, moves in self.clock.busy.items() if moves}
        memory = tuple(self.cache.device.samples)
        return Timeline(
            memory, channels, tuple(self.stalls), tuple(self.recomputed), backward_s,
            self.cache.most_backlog_nbytes,
        )  # fmt: skip


def _work_s(profile: Profile) -> list[float]:
    """Seconds of each operator; what the step took between operators is spread over them."""
    times_s = [operator.time_s for operator in profile.operators]
    total_s, step_s = sum(times_s), profile.step_s
    if total_s <= 0:
        return [step_s / len(times_s)] * len(times_s)
    return [time_s * max(1.0, step_s / total_s) for time_s in times_s]


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(interval.end_s - interval.begin_s for interval in intervals)
