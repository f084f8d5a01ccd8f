"""When storages are in memory, and when nobody uses them.

Source: TeraIO (arXiv:2506.06472), section 2 (active tensors, inactive periods) and 3.2 (gaps of weights
and optimizer states wrap around the step).
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from infinity.core.profile import Kind, Profile

#: What the step itself makes in device memory, and what a budget for activations is about.
MADE = frozenset({Kind.ACTIVATION, Kind.WORKING})
#: What outlives the step: its gaps go on in the next one.
LASTING = frozenset({Kind.WEIGHT, Kind.STATE})


@dataclass(frozen=True, slots=True)
class InactivePeriod:
    """No operator from ``begin`` up to ``end`` uses the storage.

    Attributes:
        storage: Its index in the profile.
        nbytes: Its size.
        begin: The first operator of the gap.
        end: The first operator that uses the storage again; past the number of operators, counting on,
            when that is in the next step.
    """

    storage: int
    nbytes: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Character:
    """How much of a step's memory is at rest (TeraIO's characterisation).

    Attributes:
        active_share: Bytes that the running operator uses, of all that are in memory; mean over time.
        most_active_share: The largest such share.
        long_share: Bytes of storages with a gap longer than ``long_s``, of the bytes of all storages.
        long_s: The length that counts as long (s).
    """

    active_share: float
    most_active_share: float
    long_share: float
    long_s: float


def operator_times(profile: Profile) -> np.ndarray:
    """Seconds of each operator, ``(operators,)``; what lies between operators is spread over them."""
    times = np.array([operator.time_s for operator in profile.operators], dtype=float)
    measured = float(times.sum())
    if measured <= 0:
        return np.full(len(times), profile.step_s / max(len(times), 1))
    return times * (max(profile.step_s, measured) / measured)


def memory(profile: Profile, kinds: Collection[Kind] = MADE) -> np.ndarray:
    """Bytes in memory during each operator when everything is kept, ``(operators,)``."""
    change = np.zeros(len(profile.operators) + 1, dtype=np.int64)
    for storage in profile.storages:
        if storage.kind in kinds:
            change[storage.born] += storage.nbytes
            change[storage.dies + 1] -= storage.nbytes
    return np.cumsum(change[:-1])


def uses(profile: Profile) -> list[list[int]]:
    """For each storage the operators that read or write it, in order."""
    found: list[list[int]] = [[] for _ in profile.storages]
    for at, operator in enumerate(profile.operators):
        for storage in dict.fromkeys((*operator.inputs, *operator.outputs)):
            found[storage].append(at)
    return found


def inactive_periods(profile: Profile, kinds: Collection[Kind] | None = None) -> tuple[InactivePeriod, ...]:
    """Every gap between two uses of a storage; those of weights and states wrap into the next step.

    Args:
        kinds: Whose gaps; None: those of activations, weights and states.
    """
    wanted = kinds if kinds is not None else LASTING | {Kind.ACTIVATION}
    length = len(profile.operators)
    found = []
    for index, (storage, at) in enumerate(zip(profile.storages, uses(profile), strict=True)):
        if storage.kind not in wanted or not at or not storage.nbytes:
            continue
        following = [*at[1:], at[0] + length] if storage.kind in LASTING else at[1:]
        found += [
            InactivePeriod(index, storage.nbytes, use + 1, after)
            for use, after in zip(at, following)
            if after > use + 1
        ]
    return tuple(found)


def characterise(profile: Profile, long_s: float = 0.01) -> Character:
    """How active the memory is; ``long_s`` is TeraIO's 10^4 microseconds, longer than a round trip."""
    times = operator_times(profile)
    everything = memory(profile, frozenset(Kind))
    sizes = [storage.nbytes for storage in profile.storages]
    active = np.array(
        [sum(sizes[s] for s in {*operator.inputs, *operator.outputs}) for operator in profile.operators]
    )
    shares = np.divide(active, everything, out=np.zeros(len(active)), where=everything > 0)
    until = np.concatenate([[0.0], np.cumsum(times), np.cumsum(times) + times.sum()])
    long = {
        period.storage
        for period in inactive_periods(profile, frozenset(Kind))
        if until[period.end] - until[period.begin] > long_s
    }
    step_s = float(times.sum())
    return Character(
        active_share=float(shares @ times) / step_s if step_s else 0.0,
        most_active_share=float(shares.max(initial=0.0)),
        long_share=sum(sizes[s] for s in long) / max(sum(sizes), 1),
        long_s=long_s,
    )
