"""Training that is killed at any moment, and started again, ends bitwise as if it had not been."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.crashes import PLACES, POINTS, Kill, Trial, play
from tests.helpers.launch import run_ranks
from tests.helpers.limits import HANG_S

RECORDED = Kill("the record", 3, after=True)
#: Where a process goes on with a run, and where it ends: reached once in a life.
ONCE = (
    "finding the commit", "clearing", "restore", "adopting", "taking over", "loading the small state",
    "close", "settle", "finishing", "removing files",
)  # fmt: skip


def fast_and_slow(fast: list[Trial], slow: list[Trial]) -> list[Any]:
    """Trials of the fast suite, and others of the same kind for the long one."""
    return [pytest.param(fast, id="some"), pytest.param(slow, id="others", marks=pytest.mark.slow)]


def check(
    folder: Path, trials: list[Trial], *, all_reached: bool = True, timeout_s: float = 1.6 * HANG_S
) -> None:
    [outcomes] = run_ranks(play, 1, str(folder), trials, group=False, timeout_s=timeout_s)
    wrong = [f"{each.trial}: {each.wrong}" for each in outcomes if each.wrong]
    assert not wrong, "\n\n".join(wrong)
    missed = [f"{each.trial}: {each.reached}" for each in outcomes if not each.reached[-1]]
    assert not all_reached or not missed, missed


KILLED = [
    Trial((Kill("placing a unit", 2), Kill("a write", 55)), place="both"),
    Trial((Kill("an update", 7), Kill("an update", 5, after=True))),
    Trial((Kill("the commit", 3, after=True), Kill("handing the record over", 3)), clip=True),
    Trial((Kill("in the transaction", 3, after=True), Kill("the head", 3)), place="both"),
    Trial((RECORDED, Kill("restore", after=True), Kill("taking over"), Kill("taking over", after=True))),
    Trial((Kill("close"), Kill("finishing", after=True), Kill("removing files", after=True))),
    Trial((Kill("the record", 2),), more=("durability.survives=power",)),
    Trial((Kill("an update", 7), Kill("the record", 3)), more=("memory.host=16MiB",), rule="adamw8bit"),
]
KILLED_ELSEWHERE = [
    Trial((Kill("the rename", 3, after=True), Kill("a removal", 9, after=True))),
    Trial((Kill("the head", after=True), Kill("retire", 9, after=True)), place="host"),
    Trial((RECORDED, Kill("adopting", 2), Kill("adopting", 2)), place="both"),
    Trial((Kill("an update", 5, after=True), Kill("the commit", 2)), clip=True, rule="lion"),
]


@pytest.mark.parametrize(
    "trials",
    [
        pytest.param([KILLED[-1]], id="one", marks=pytest.mark.always),
        *fast_and_slow(KILLED[:-1], KILLED_ELSEWHERE),
    ],
)
def test_a_killed_process_goes_on_bitwise(tmp_path, trials):
    check(tmp_path, trials)


SAVING = [
    Trial((Kill("a spare place", 2, after=True), Kill("a saved unit", 4)), saves=True),
    Trial((Kill("publishing"), Kill("publishing", after=True)), place="both", saves=True),
]
SAVING_ON_RANKS = [
    Trial((Kill("a saved unit", 4, rank=1),), 2, "both", more=("durability.every=2",), saves=True)
]


@pytest.mark.slow
@pytest.mark.parametrize("trials", fast_and_slow(SAVING, SAVING_ON_RANKS))
def test_a_process_that_is_killed_while_it_saves_beside_training_goes_on_bitwise(tmp_path, trials):
    """What was saved has the bytes that it has without a kill."""
    check(tmp_path, trials)


RANKS = [
    Trial((Kill("the record", 2, rank=0), Kill("retire", 6, rank=1)), 2, "both"),
    Trial((Kill("taking over", rank=1), Kill("restore", rank=0, after=True)), 2, clip=True),
]
RANKS_ELSEWHERE = [
    Trial((Kill("the rename", 3, after=True, rank=1), Kill("an update", 6, rank=0)), 2),
    Trial((Kill("close", rank=0), Kill("finishing", after=True, rank=1)), 2, "host"),
]


@pytest.mark.parametrize("trials", fast_and_slow(RANKS, RANKS_ELSEWHERE))
def test_killed_ranks_go_on_bitwise(tmp_path, trials):
    """One rank is killed, and the other ends by itself; or both are."""
    check(tmp_path, trials, all_reached=False)


OTHER_RANKS = [
    Trial(
        (Kill(keep=3, world=2), Kill("discard"), Kill("discard", after=True)),
        more=("durability.survives=power",),
    ),
    Trial((Kill(keep=3, world=1), Kill("making anew", 2, rank=1), Kill("the record", rank=0)), 2),
]
OTHER_RANKS_ELSEWHERE = [
    Trial((Kill(keep=3, world=2), Kill("making anew", 2), Kill("the record", after=True)), 1, "both"),
    Trial((Kill(keep=3, world=1), Kill("discard", after=True, rank=0)), 2, "host"),
    Trial(
        (Kill(keep=3, world=1), Kill("making anew", 2, rank=1)),
        2,
        more=("memory.host=16MiB",),
        rule="adamw8bit",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "trials",
    [OTHER_RANKS, pytest.param(OTHER_RANKS_ELSEWHERE, marks=pytest.mark.slow)],
    ids=["", "elsewhere"],
)
def test_a_process_that_is_killed_as_it_goes_on_with_other_ranks_goes_on_bitwise(tmp_path, trials):
    check(tmp_path, trials, all_reached=False)


# --- many ----------------------------------------------------------------------------------------------


def at_random(rng: random.Random) -> Trial:
    """A trial of one to three kills, some at a time, some on the way to another number of ranks."""
    world = rng.choice((1, 1, 2))
    kills = [_kill(rng, world) for _ in range(rng.choice((1, 2, 3)))]
    mores = [(), (), ("durability.survives=power",), ("durability.every=2",)]
    if rng.random() < 0.3:
        kills.insert(0, Kill(keep=rng.randrange(1, 5), world=3 - world))
        del mores[-1]  # a step that is not recorded would be made by another number of ranks
    more = rng.choice(mores)
    place, clip, saves = rng.choice(list(PLACES)), rng.random() < 0.3, rng.random() < 0.3
    return Trial(tuple(kills), world, place, clip, more, saves)


def _kill(rng: random.Random, world: int) -> Kill:
    rank = rng.choice((None, *range(world))) if world > 1 else None
    if rng.random() < 0.4:
        return Kill(seconds=rng.uniform(0.01, 1.0), rank=rank)
    nth = rng.choice((1, 1, 2, 3, rng.randrange(1, 120)))
    return Kill(rng.choice(list(POINTS)), nth, rng.random() < 0.5, rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world", [1, 2])
def test_every_named_point(tmp_path, world, place):
    nth = {"a write": 55, "an update": 5, "retire": 9, "a removal": 9, "making anew": 2, "adopting": 2}
    trials = []
    for point in POINTS:
        for after in (False, True):
            kill = Kill(point, nth.get(point, 1 if point in ONCE else 3), after, rank=len(trials) % 3 - 1)
            if world == 1 or kill.rank == -1:
                kill = Kill(point, kill.nth, after)
            before = Kill("the record", 3, after=True)
            trials.append(Trial((before, kill, kill) if point in ONCE[:6] else (kill, kill), world, place))
    check(tmp_path, trials, all_reached=False, timeout_s=1500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_at_random(tmp_path, seed):
    rng = random.Random(seed)
    check(tmp_path, [at_random(rng) for _ in range(50)], all_reached=False, timeout_s=1500)
