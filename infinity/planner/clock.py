"""A plan on a clock: step time, stalls, peaks and bytes, as the planner counts them.

[Note: when memory is free and when it is taken]
A stored storage's memory is free when its store has ended and forward has used it for the last time; it is
taken again from the moment its load is asked for. Where an operator finds no room, it waits for stores. A
storage whose store has not ended when its load is asked for stays where it is, and is not loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from infinity.core.errors import RecipeError
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place
from infinity.core.profile import Profile
from infinity.planner.lanes import LOADING, STORING, TO_HOST, WRITE, Lanes
from infinity.planner.script import Saved, Script, script_of


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan stores, in the numbers of a script.

    Attributes:
        places: Where the script's saved storages go; those that are not named are kept.
        loads: Position at which each load starts and its storage, in order of need.
    """

    places: Mapping[int, Place] = field(default_factory=dict)
    loads: Sequence[tuple[int, int]] = ()


def predict(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> Outcome:
    """What ``plan`` costs on ``hardware``.

    Raises:
        RecipeError: The plan is not for this profile.
    """
    outcome, _ = trace_of(profile, plan, hardware)
    return outcome


def trace_of(profile: Profile, plan: ActivationPlan, hardware: Hardware) -> tuple[Outcome, np.ndarray]:
    """The same, and the bytes of device memory at each position of the script that the plan plays."""
    script = script_of(profile, plan.recomputed)
    clock = _Clock(script, moves_of(script, plan), hardware, plan.capacity_nbytes)
    return clock.play(), np.array(clock.resident)


def play(script: Script, moves: Moves, hardware: Hardware, capacity_nbytes: int | None) -> Outcome:
    """One micro-batch with its update; see [Note: when memory is free and when it is taken]."""
    return _Clock(script, moves, hardware, capacity_nbytes).play()


def moves_of(script: Script, plan: ActivationPlan) -> Moves:
    """The plan's decisions in the numbers of ``script``."""
    index = {saved.key: i for i, saved in enumerate(script.saved)}
    named = {*plan.places, *(load.slot for load in plan.loads), *(load.after for load in plan.loads)} - {None}
    strange = sorted(key for key in named if key is not None and key not in index)
    if strange:
        raise RecipeError(f"the plan names saved storages that the profile lacks: {strange[:5]}; plan again")
    loads = [
        (
            script.backward if load.after is None else script.saved[index[load.after]].needed_at,
            index[load.slot],
        )
        for load in plan.loads
    ]
    away = {index[key]: place for key, place in plan.places.items() if place is not Place.KEEP}
    return Moves(away, loads)


class _Clock:
    def __init__(self, script: Script, moves: Moves, hardware: Hardware, capacity_nbytes: int | None) -> None:
        self._script, self._moves = script, moves
        self._capacity = capacity_nbytes
        self._lanes = Lanes(hardware)
        self._packs = _by(lambda saved: saved.packed_at, script.saved, moves.places)
        self._needs = _by(lambda saved: saved.needed_at, script.saved, moves.places)
        self._starts: dict[int, list[int]] = {}
        for at, index in moves.loads:
            self._starts.setdefault(at, []).append(index)
        self._storing: set[int] = set()
        self._stored: set[int] = set()  # whose store has ended, and memory is not yet free
        self._loading: set[int] = set()
        self._away = self._on_host = self._at = 0
        self._now_s = self._stall_s = 0.0
        self._host_peak = 0
        self._moved = [0, 0]  # stored on NVMe, loaded from it
        self.resident: list[int] = []

    def play(self) -> Outcome:
        script = self._script
        memory, times = script.memory.tolist(), script.times.tolist()
        for at in range(len(times)):
            self._at = at
            self._free_used()
            for index in self._starts.get(at, ()):
                self._load(index)
            if at in script.traffic:
                self._lanes.submit_units(*script.traffic[at])
            self._wait_for_room(memory[at])
            self._wait_for_loads(self._needs.get(at, ()))
            self.resident.append(memory[at] - self._away)
            self._compute(times[at])
            for index in self._packs.get(at, ()):
                self._store(index)
        return Outcome(
            step_s=self._now_s,
            stall_s=self._stall_s,
            recompute_s=script.recompute_s,
            peak_nbytes=max(self.resident, default=0),
            host_peak_nbytes=self._host_peak,
            nbytes_stored=self._moved[0],
            nbytes_loaded=self._moved[1],
        )

    def _store(self, index: int) -> None:
        place, nbytes = self._moves.places[index], self._script.saved[index].nbytes
        self._storing.add(index)
        self._lanes.submit(STORING[place], index, nbytes)
        if place is Place.HOST:
            self._on_host += nbytes
            self._host_peak = max(self._host_peak, self._on_host)

    def _load(self, index: int) -> None:
        """Start a load; what is still being stored is forwarded: it stays, and needs none."""
        place, nbytes = self._moves.places[index], self._script.saved[index].nbytes
        if index in self._storing:
            self._storing.discard(index)
            if self._lanes.cancel(STORING[place], index):
                self._on_host -= nbytes if place is Place.HOST else 0
            return
        if index in self._stored:  # its memory was not free yet
            self._stored.discard(index)
            self._on_host -= nbytes if place is Place.HOST else 0
            return
        self._away -= nbytes
        self._loading.add(index)
        self._lanes.submit(LOADING[place], index, nbytes)

    def _free_used(self) -> None:
        """Forward is done with some of what is stored."""
        for index in [i for i in self._stored if self._script.saved[i].free_at <= self._at]:
            self._stored.discard(index)
            self._away += self._script.saved[index].nbytes

    def _wait_for_room(self, nbytes: int) -> None:
        while self._capacity is not None and nbytes - self._away > self._capacity and self._storing:
            if not self._stall():
                return

    def _wait_for_loads(self, indices: Sequence[int]) -> None:
        while any(index in self._loading for index in indices):
            if not self._stall():
                raise RecipeError("the plan loads from a channel that moves no bytes; plan again")

    def _stall(self) -> bool:
        """Let time pass until something ends; False if nothing moves."""
        passed_s = self._lanes.next_s()
        if passed_s == float("inf"):
            return False
        self._pass(passed_s)
        self._stall_s += passed_s
        return True

    def _compute(self, work_s: float) -> None:
        while work_s > 0 and not self._lanes.is_idle():
            speed = self._lanes.speed()
            passed_s = min(work_s / speed, self._lanes.next_s())
            self._pass(passed_s)
            work_s = work_s - passed_s * speed if passed_s < work_s / speed else 0.0
        self._now_s += work_s

    def _pass(self, passed_s: float) -> None:
        self._now_s += passed_s
        for lane, index in self._lanes.advance(passed_s):
            saved = self._script.saved[index]
            if lane in (WRITE, TO_HOST):
                self._moved[0] += saved.nbytes if lane == WRITE else 0
                if index in self._storing:
                    self._storing.discard(index)
                    self._stored.add(index)
                elif lane == TO_HOST:  # it was forwarded
                    self._on_host -= saved.nbytes
            else:
                self._loading.discard(index)
                self._count_loaded(index, saved)
        self._free_used()

    def _count_loaded(self, index: int, saved: Saved) -> None:
        if self._moves.places[index] is Place.HOST:
            self._on_host -= saved.nbytes
        else:
            self._moved[1] += saved.nbytes


def _by(
    position: Callable[[Saved], int], saved: Sequence[Saved], indices: Iterable[int]
) -> dict[int, list[int]]:
    """Indices by position, what is packed first first."""
    found: dict[int, list[int]] = {}
    for index in sorted(indices, key=lambda i: saved[i].key):
        found.setdefault(position(saved[index]), []).append(index)
    return found
