"""A plan in the numbers of a script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infinity.core.errors import RecipeError
from infinity.core.plan import ActivationPlan, Load, Place
from infinity.planner.script import Script


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan stores; storages are indices into the script's saved ones.

    Attributes:
        places: Where storages go; those that are not named are kept.
        loads: In order of need; the storage whose asking starts each, None: the beginning of backward.
        backlog_nbytes: What may wait to be stored, as in :class:`~infinity.core.plan.ActivationPlan`.
    """

    places: Mapping[int, Place] = field(default_factory=dict)
    loads: Sequence[tuple[int | None, int]] = ()
    backlog_nbytes: int | None = None


def moves_of(script: Script, plan: ActivationPlan) -> Moves:
    """The plan's decisions in the numbers of ``script``.

    Raises:
        RecipeError: The plan names a storage or a block that the script lacks.
    """
    index = {saved.key: i for i, saved in enumerate(script.saved) if saved.is_named}
    named = {*plan.places, *(load.slot for load in plan.loads), *(load.after for load in plan.loads)} - {None}
    lacking = [
        f"slot {key.region}.{key.ordinal}" for key in sorted(k for k in named if k) if key not in index
    ]
    again = {recomputation.block.region for recomputation in script.again.values()}
    lacking += [f"block {region}" for region in sorted(plan.recomputed - again)]
    if lacking:
        raise RecipeError(
            f"the plan ({plan.policy}) names {', '.join(lacking[:5])}, which this profile lacks: "
            "it was made for another one; plan again"
        )
    places = {index[key]: place for key, place in plan.places.items() if place is not Place.KEEP}
    loads = [(None if load.after is None else index[load.after], index[load.slot]) for load in plan.loads]
    return Moves(places, loads, plan.backlog_nbytes)


def plan_of(policy: str, script: Script, moves: Moves, recomputed: frozenset[int]) -> ActivationPlan:
    """The plan that plays ``moves``; without a budget."""
    saved = script.saved
    return ActivationPlan(
        policy,
        {saved[index].key: moves.places[index] for index in sorted(moves.places)},
        tuple(
            Load(None if after is None else saved[after].key, saved[index].key)
            for after, index in moves.loads
        ),
        recomputed,
        backlog_nbytes=moves.backlog_nbytes,
    )
