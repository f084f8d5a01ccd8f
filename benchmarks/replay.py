"""Steps that replay single operators, and steps that code what they move, as profiles for the same clock.

A plan names whole blocks to recompute. What other systems recompute (an operator, a segment of several
blocks, the same value twice) is written into the profile instead: backward gets the replayed operators, and
what they make lives from there to its last use. So the simulator plays them like any other operators.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from infinity.core.plan import Kind, Operator, Phase, Profile, SlotUse, StorageUse
from infinity.planner.lifetimes import MADE, operator_times


class Run(NamedTuple):
    """Operators of forward that run again, in order, right before operator ``before`` of backward."""

    before: int
    operators: tuple[int, ...]


def droppable(profile: Profile) -> dict[int, SlotUse]:
    """Return the slots whose storage a replay can make again, by storage."""
    made = {s for o in profile.operators if o.phase is Phase.FORWARD for s in o.outputs}
    return {
        slot.storage: slot
        for slot in profile.slots
        if not slot.held and profile.storages[slot.storage].kind in MADE and slot.storage in made
    }


def runs_for(profile: Profile, dropped: Collection[int], kept: Collection[int] | None = None) -> list[Run]:
    """Return the replays that make ``dropped`` storages again when backward first asks for them.

    A replay begins at what is in memory or saved. Storages of ``kept`` (None: all) that it makes on its way
    stay until backward is done with them; the others are made again for each place that asks.
    """
    dropped, slots, storages = set(dropped), droppable(profile), profile.storages
    writers: defaultdict[int, list[int]] = defaultdict(list)
    for at, operator in enumerate(profile.operators):
        if operator.phase is Phase.FORWARD:
            for s in operator.outputs:
                writers[s].append(at)
    saved = {slot.storage for slot in profile.slots} - dropped
    asked: defaultdict[int, list[int]] = defaultdict(list)
    for s in sorted(dropped):
        asked[slots[s].unpacked_at].append(s)
    there: dict[int, int] = {}  # replayed storages, and until when they live
    found = []
    for at, wanted in sorted(asked.items()):
        operators: set[int] = set()
        waiting = [s for s in wanted if there.get(s, -1) < at]
        seen = set(waiting)
        while waiting:
            for k in writers[waiting.pop()]:
                operators.add(k)
                for s in profile.operators[k].inputs:
                    use = storages[s]
                    alive = use.kind not in MADE or s in saved or there.get(s, -1) >= at
                    alive = alive or (s not in dropped and use.dies >= at) or not writers[s]
                    if not alive and s not in seen:
                        seen.add(s)
                        waiting.append(s)
        if operators:
            found.append(Run(at, tuple(sorted(operators))))
            made = {s for k in operators for s in profile.operators[k].outputs} & dropped
            stay = made if kept is None else {*(made & set(kept)), *wanted}
            there.update((s, slots[s].released_at) for s in stay)
    return found


def with_runs(profile: Profile, dropped: Collection[int], runs: Iterable[Run]) -> Profile:
    """Return the step that saves no ``dropped`` storage and replays ``runs``.

    Raises:
        ValueError: Backward needs a dropped storage that no run before it has made.
    """
    return _Replaying(profile, set(dropped), sorted(runs)).profile()


def replayed(profile: Profile, dropped: Collection[int], kept: Collection[int] | None = None) -> Profile:
    """Return the step that drops storages and replays them when they are needed; see :func:`runs_for`."""
    return with_runs(profile, dropped, runs_for(profile, dropped, kept))


class _Replaying:
    """Writes the operators of a step with its replays; each replayed output is a new storage."""

    def __init__(self, profile: Profile, dropped: set[int], runs: Sequence[Run]) -> None:
        self._given, self._dropped = profile, dropped
        self._times = operator_times(profile).tolist()
        self._operators: list[Operator] = []
        self._storages = list(profile.storages)
        self._version: dict[int, int] = {}  # of a storage that was replayed, the latest
        self._of: dict[int, int] = {}  # a version's storage
        self._used: dict[int, list[int]] = {}  # positions at which replays read a storage
        self._position: list[int] = []
        self._kept = {slot.storage for slot in profile.slots} - dropped
        before: defaultdict[int, list[int]] = defaultdict(list)
        for run in runs:
            before[run.before] += run.operators
        for at, operator in enumerate(profile.operators):
            for k in before[at]:
                self._replay(profile.operators[k], self._times[k])
            self._position.append(len(self._operators))
            self._run(operator, self._times[at])

    def _run(self, operator: Operator, time_s: float) -> None:
        inputs, outputs = operator.inputs, operator.outputs
        if operator.phase is not Phase.FORWARD:
            if lacking := self._dropped.intersection(inputs) - self._version.keys():
                names = ", ".join(self._given.storages[s].name for s in sorted(lacking))
                raise ValueError(f"{operator.name} needs {names}, which was dropped and not replayed")
            now = {
                s: self._version[s] for s in (*inputs, *outputs) if s in self._dropped & set(self._version)
            }
            inputs, outputs = (tuple(now.get(s, s) for s in each) for each in (inputs, outputs))
        self._add(replace(operator, inputs=inputs, outputs=outputs, time_s=time_s))

    def _replay(self, operator: Operator, time_s: float) -> None:
        inputs = tuple(self._version.get(s, s) for s in operator.inputs)
        outputs = []
        for s in operator.outputs:
            use = self._given.storages[s]
            if use.kind not in MADE:
                outputs.append(s)
            elif s in operator.inputs and s in self._version:
                outputs.append(self._version[s])  # in place
            else:
                outputs.append(len(self._storages))
                at = len(self._operators)
                self._storages.append(StorageUse(f"{use.name} again", use.nbytes, Kind.WORKING, at, at))
                self._of[outputs[-1]] = s
                if s not in self._kept:
                    self._version[s] = outputs[-1]
        name = f"replayed {operator.name}"
        self._add(Operator(name, time_s, inputs, tuple(outputs), Phase.BACKWARD, -1))
        for s in inputs:
            self._used.setdefault(s, []).append(len(self._operators) - 1)

    def _add(self, operator: Operator) -> None:
        at = len(self._operators)
        self._operators.append(operator)
        for s in (*operator.inputs, *operator.outputs):
            if s in self._of:
                self._storages[s] = replace(self._storages[s], dies=at)

    def profile(self) -> Profile:
        given, position = self._given, self._position
        last_use: dict[int, int] = {}
        for at, operator in enumerate(given.operators):
            if operator.phase is Phase.FORWARD:
                last_use.update(dict.fromkeys((*operator.inputs, *operator.outputs), at))
        slots = []
        for slot in given.slots:
            used = self._used.get(slot.storage, [len(self._operators), 0])
            at, until = position[slot.unpacked_at], position[slot.released_at]
            if slot.storage in self._dropped:
                version = self._version[slot.storage]
                dies = max(self._storages[version].dies, until)
                self._storages[version] = replace(self._storages[version], dies=dies)
                continue
            slots.append(
                replace(
                    slot,
                    packed_at=position[slot.packed_at],
                    unpacked_at=min(at, used[0]),
                    released_at=max(until, used[-1]),
                )
            )
        for s, use in enumerate(given.storages):
            dies = max([position[use.dies], *self._used.get(s, [])[-1:]])
            if s in self._dropped:
                dies = position[max(last_use.get(s, 0), use.born)]
            self._storages[s] = replace(use, born=position[use.born], dies=dies)
        traffic = tuple(replace(unit, at=position[unit.at]) for unit in given.traffic)
        return Profile(
            sum(operator.time_s for operator in self._operators), tuple(self._operators),
            tuple(self._storages), tuple(slots), (), traffic, given.padding_nbytes,
        )  # fmt: skip


def coded(profile: Profile, shares: Mapping[int, float]) -> Profile:
    """Return the step in which storages move as a share of their bytes, by storage; decoding takes no time.

    What need not move is a storage of its own: there in forward, and again when backward asks for it.
    """
    storages, slots = list(profile.storages), list(profile.slots)
    forward_end = sum(o.phase is Phase.FORWARD for o in profile.operators)
    for number, slot in enumerate(slots):
        if (share := shares.get(slot.storage, 1.0)) >= 1 or slot.held:
            continue
        use = storages[slot.storage]
        moved = int(use.nbytes * share)
        touched = (k for k in range(forward_end) if slot.storage in profile.operators[k].inputs)
        last = max([use.born, slot.packed_at, *touched])
        rest = replace(use, name=f"{use.name} not coded", nbytes=use.nbytes - moved, kind=Kind.WORKING)
        storages += [replace(rest, dies=last), replace(rest, born=slot.unpacked_at)]
        storages[slot.storage] = replace(use, nbytes=moved)
        slots[number] = replace(slot, nbytes=moved)
    return replace(profile, storages=tuple(storages), slots=tuple(slots))


def steadied(profile: Profile) -> Profile:
    """Return the profile with the median time of operators of the same name, phase and bytes.

    On a shared machine an operator may be interrupted for longer than it takes.
    """

    def kind(operator: Operator) -> tuple[object, ...]:
        sizes = (
            tuple(profile.storages[s].nbytes for s in each) for each in (operator.inputs, operator.outputs)
        )
        return (operator.name, operator.phase, *sizes)

    times: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for operator in profile.operators:
        times[kind(operator)].append(operator.time_s)
    medians = {each: median(found) for each, found in times.items()}
    operators = tuple(replace(o, time_s=medians[kind(o)]) for o in profile.operators)
    return replace(profile, operators=operators, step_s=sum(o.time_s for o in operators))
