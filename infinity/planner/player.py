"""Play a plan on the planner's clock, and write down what happens when."""

from dataclasses import replace

from infinity.core.plan import ActivationPlan, Hardware, Outcome
from infinity.core.profile import Profile
from infinity.planner.clock import Clock
from infinity.planner.lanes import NAMES, Recorder
from infinity.planner.moves import moves_of
from infinity.planner.script import Script, script_of
from infinity.planner.timeline import Interval, Sample, Timeline


def play(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> Outcome:
    """What one micro-batch with its update costs under ``plan``.

    Raises:
        RecipeError: The plan was made for another profile, or needs a channel that ``hardware`` lacks.
    """
    return _clock(profile, plan, hardware).play()


def play_in_detail(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> tuple[Outcome, Timeline]:
    """The same, and what happened when; errors as :func:`play`."""
    script = script_of(profile, plan.recomputed)
    notes = _Notes(script)
    clock = Clock(script, moves_of(script, plan), hardware, notes)
    outcome = clock.play()
    return outcome, notes.timeline(clock)


def bounded(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> ActivationPlan:
    """``plan`` with a bound on what may wait to be stored: on a slower drive compute waits, and memory holds.

    As much may wait as does when nothing is slower than measured, and what the budget has to spare. A plan
    that has a bound keeps it.
    """
    if plan.backlog_nbytes is not None:
        return plan
    clock = _clock(profile, plan, hardware)
    outcome = clock.play()
    most_nbytes = clock.most_backlog_nbytes
    spare_nbytes = most_nbytes if plan.capacity_nbytes is None else plan.capacity_nbytes - outcome.peak_nbytes
    return replace(plan, backlog_nbytes=most_nbytes + max(0, spare_nbytes))


def _clock(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> Clock:
    script = script_of(profile, plan.recomputed)
    return Clock(script, moves_of(script, plan), hardware)


class _Notes(Recorder):
    """What the clock tells of one play."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._memory = [Sample(0.0, 0)]
        self._channels: dict[str, list[Interval]] = {}
        self._stalls: list[Interval] = []
        self._recomputed: list[Interval] = []
        self._backward_s = 0.0

    def holds(self, at_s: float, nbytes: int) -> None:
        if nbytes != self._memory[-1].nbytes:
            self._memory.append(Sample(at_s, nbytes))

    def moved(self, lane: int, name: int | None, begin_s: float, end_s: float) -> None:
        called = "units" if name is None else self._name(name)
        self._channels.setdefault(NAMES[lane], []).append(Interval(begin_s, end_s, called))

    def waited(self, name: int | None, begin_s: float, end_s: float) -> None:
        called = "stores" if name is None else self._name(name)
        self._stalls.append(Interval(begin_s, end_s, called))

    def recomputed(self, at: int, begin_s: float, end_s: float) -> None:
        self._recomputed.append(Interval(begin_s, end_s, self._script.again[at].block.name))

    def began_backward(self, at_s: float) -> None:
        self._backward_s = at_s

    def timeline(self, clock: Clock) -> Timeline:
        """All of it, after the play."""
        channels = {name: tuple(self._channels[name]) for name in NAMES if name in self._channels}
        return Timeline(
            tuple(self._memory), channels, tuple(self._stalls), tuple(self._recomputed),
            self._backward_s, clock.most_backlog_nbytes,
        )  # fmt: skip

    def _name(self, index: int) -> str:
        key = self._script.saved[index].key
        return f"{key.region}.{key.ordinal}"
