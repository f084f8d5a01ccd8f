"""Who decides what happens to activations: four simple rules, and our own plan.

Each policy is ``policy(profile, hardware, capacity_nbytes) -> ActivationPlan``. A budget that its plan does
not keep is a BudgetError that says what would be enough.
"""

from collections.abc import Callable
from dataclasses import replace

from infinity.core.plan import ActivationPlan, Hardware, Place
from infinity.core.profile import Profile
from infinity.planner.channels import Channels
from infinity.planner.clock import play
from infinity.planner.floor import budget_error, smallest_budget
from infinity.planner.frontier import frontier, keep_point, without_slowdown
from infinity.planner.loading import with_loads, within
from infinity.planner.moves import Moves, plan_of
from infinity.planner.script import Script, script_of

Policy = Callable[[Profile, Hardware, int | None], ActivationPlan]


def keep_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Every saved storage stays in device memory."""
    return _fixed("keep", profile, hardware, capacity_nbytes)


def recompute_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Every block runs its forward again in backward; only its inputs stay."""
    regions = frozenset(block.region for block in profile.blocks)
    return _fixed("recompute", profile, hardware, capacity_nbytes, recomputed=regions)


def offload_all(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """Everything that frees memory goes to NVMe, and comes back just in time."""
    saved = script_of(profile).saved
    leaving = {i: Place.NVME for i, s in enumerate(saved) if s.can_leave and s.free_at < s.needed_at}
    return _fixed("offload", profile, hardware, capacity_nbytes, places=leaving)


def adaptive(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """As many blocks as NVMe can take, from the first one on, so that no store or load is waited for.

    Source: SSDTrain (arXiv:2408.10013), section 3.3.3: the last module such that everything before it is
    written before its backward starts, and it can itself be written and read back by then.
    """
    script = script_of(profile)
    last = _last_block(profile, script, hardware)
    leaving = {
        i: Place.NVME
        for i, s in enumerate(script.saved)
        if s.can_leave and s.free_at < s.needed_at and s.key.region <= last
    }
    return _fixed("adaptive", profile, hardware, capacity_nbytes, places=leaving)


def plan(profile: Profile, hardware: Hardware, capacity_nbytes: int | None = None) -> ActivationPlan:
    """The fastest plan that was found within the budget; without one, the lowest peak for 3 % of the step.

    The plan's ``capacity_nbytes`` is the rung of the ladder that it was made for, at most the budget: see
    [Note: one ladder for every budget] in :mod:`infinity.planner.frontier`.

    Raises:
        BudgetError: No plan keeps the budget; says the smallest that can be kept, and what holds it there.
    """
    if capacity_nbytes is None:
        return without_slowdown(profile, hardware).plan
    keep = keep_point(profile, hardware)
    if keep.outcome.peak_nbytes <= capacity_nbytes:
        return replace(keep.plan, capacity_nbytes=capacity_nbytes)
    if smallest_budget(profile, hardware) > capacity_nbytes:
        raise budget_error(profile, hardware, capacity_nbytes)
    points = frontier(profile, hardware, capacity_nbytes)
    return min(points, key=lambda p: (p.outcome.step_s, p.outcome.nbytes_stored, p.outcome.peak_nbytes)).plan


#: By the name that a recipe gives.
POLICIES: dict[str, Policy] = {
    "keep": keep_all,
    "offload": offload_all,
    "recompute": recompute_all,
    "adaptive": adaptive,
    "plan": plan,
}


def _fixed(
    policy: str,
    profile: Profile,
    hardware: Hardware,
    capacity_nbytes: int | None,
    *,
    places: dict[int, Place] | None = None,
    recomputed: frozenset[int] = frozenset(),
) -> ActivationPlan:
    """A plan whose places are given; checked against the budget."""
    script = script_of(profile, recomputed)
    moves = with_loads(script, places, hardware, capacity_nbytes) if places else Moves()
    if capacity_nbytes is not None:
        found = within(script, moves, hardware, capacity_nbytes)
        if found is None:
            needed_nbytes = play(script, moves, hardware).peak_nbytes
            raise budget_error(profile, hardware, capacity_nbytes, policy, needed_nbytes)
        moves, _ = found
    return replace(plan_of(policy, script, moves, recomputed), capacity_nbytes=capacity_nbytes)


def _last_block(profile: Profile, script: Script, hardware: Hardware) -> int:
    """Region of the last block that SSDTrain's rule offloads; -1 if it offloads none."""
    channels = Channels.of(script.times, hardware, script.units())
    written, last = 0, -1
    for block in sorted(profile.blocks, key=lambda b: b.region):
        own = [s for s in script.saved if s.key.region == block.region and s.can_leave]
        own.sort(key=lambda s: s.packed_at)
        before, begins = written, block.backward[0]
        for saved in own:
            end = channels.nvme_write.earliest_end(saved.packed_at + 1, saved.nbytes)
            channels.nvme_write.take_from(saved.packed_at + 1, saved.nbytes)
            written = len(script.times) if end is None else max(written, end)
        back = channels.nvme_read.latest_start(begins, sum(s.nbytes for s in own))
        if before > begins or back is None or written > back:
            break
        last = block.region
    return last


__all__ = ["POLICIES", "adaptive", "keep_all", "offload_all", "plan", "recompute_all", "smallest_budget"]
