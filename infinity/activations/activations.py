"""What one model's activations do: by a rule, or by a plan made from a profile of its own step.

[Note: the first passes]
Under ``plan`` nothing is known before the model has run, and everything kept may not fit. So the first
passes store all they can. The fifth one is profiled, as if everything were kept; then a plan is made: rank
0's for all, since ranks that recompute different blocks would gather different units. The second pass under
the plan is metered, so that what was predicted can be told beside what was measured.

[Note: the pace of a step]
A recorded pass is slower than others: operators pass through Python there, and wait for its lock while
other threads store and load. So the step is taken to last as long as the quickest of the passes that end
alike, from the first one on that found everything compiled and every buffer made; each without its waits
and without what moving its bytes cost it.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, Protocol

from torch import Tensor, nn

from infinity.activations.blocks import NamedBlock, find_blocks, watched
from infinity.activations.cache import Record, TensorCache
from infinity.activations.identity import storages_of
from infinity.activations.memory_meter import MemoryMeter
from infinity.activations.passes import Passes
from infinity.activations.profiler import Profiler
from infinity.activations.script import Alike, Planned, Script
from infinity.core.errors import BudgetError
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place
from infinity.core.profile import Phase, Profile
from infinity.observe.timeline import WatchedEngine
from infinity.planner.planning import Planning
from infinity.planner.player import bounded, play
from infinity.planner.policies import plan as make_plan

Policy = Literal["keep", "offload", "recompute", "plan"]
#: Passes: warm, profiled, metered under a plan; see [Note: the first passes].
_WARM, PROFILED, METERED = 2, 4, 6


class Room(Protocol):
    """The memory that a step has for what it makes."""

    def capacities(self) -> Sequence[int | None]:
        """Bytes that activations may have, the best division of memory first; None: no bound."""
        ...

    def settle(self, capacity_nbytes: int | None, peak_nbytes: int) -> None:
        """A plan was made for one of the capacities, and needs ``peak_nbytes``."""
        ...

    def refuse(self, error: BudgetError) -> BudgetError:
        """What to raise when no plan fits any of them; ``error`` is what the last one said."""
        ...


class Activations:
    """Serves every forward pass that autograd records, from its outermost module on.

    Args:
        cache: Packs and unpacks.
        policy: Keep, store or recompute everything, or plan.
        hardware: Measures the channels, when a profile is there.
        room: What a plan may use.
        decide: Gives all ranks the text that rank 0 makes.
        units: Moves the shards of units on the channels that activations share; None: nothing does.

    Attributes:
        planning: The plan, once it is made.
        passes: How long they took, and what they moved.
        meters: One pass is metered, which takes longer than the others; see [Note: the first passes].
        metered_nbytes: Peak of what it made, as counted; None: not yet.
    """

    def __init__(
        self, cache: TensorCache, policy: Policy, hardware: Callable[[], Hardware], room: Room | None = None,
        decide: Callable[[Callable[[], str]], str] = lambda make: make(),
        units: WatchedEngine | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.policy = cache, policy
        self.planning: Planning | None = None
        self.passes = Passes(cache.ledger)
        self.room: Room = room  # type: ignore[assignment]
        self.meters = policy == "plan"
        self.metered_nbytes: int | None = None
        self._hardware, self._decide, self._units = hardware, decide, units
        self._blocks: weakref.WeakKeyDictionary[nn.Module, list[NamedBlock]] = weakref.WeakKeyDictionary()
        self._profile_updates = False  # the step ended with the profiled pass
        self._instrument: Profiler | MemoryMeter | None = None
        self._weights: list[Tensor] = []

    def open(self, model: nn.Module) -> ExitStack:
        """A forward pass of ``model`` begins; it ends when the stack is closed.

        Raises:
            BudgetError: No plan meets the budget; says which one could be met, and what holds it there.
        """
        self._end_pass(updates=False)
        if model not in self._blocks:
            self._blocks[model] = find_blocks(model)
        blocks = self._blocks[model]
        self._weights = list(model.parameters())
        self._equip()
        self.passes.begin()
        stack = ExitStack()
        if self.policy != "keep":
            self.cache.exempt = storages_of([*self._weights, *model.buffers()])
            self.cache.record = Record(self._script(blocks))
            stack.callback(self._leave)
            stack.enter_context(watched(blocks, self.cache))
        return stack

    def end_step(self) -> None:
        """The step is over, as far as it is profiled; called again, nothing happens."""
        self._end_pass(updates=True)

    def measured(self) -> Outcome | None:
        """What a pass under the plan took, to be compared with what was predicted; None: too few of them.

        Time and bytes are medians, see [Note: passes that can be compared] in
        :mod:`infinity.activations.passes`; the peak is that of the metered pass. Stalls and recomputation
        cannot be told from other compute here: they are those that were predicted.
        """
        typical = self.passes.typical(METERED + 1, updates=self._profile_updates)
        if self.planning is None or self.metered_nbytes is None or typical is None:
            return None
        return replace(
            self.planning.predicted,
            step_s=typical.time_s,
            peak_nbytes=self.metered_nbytes,
            nbytes_stored=typical.nbytes_stored,
            nbytes_loaded=typical.nbytes_loaded,
        )

    def close(self) -> None:
        """Give back what stored activations hold. A pass that is still recorded is forgotten."""
        self._unequip()
        self.cache.close()

    # --- parts -------------------------------------------------------------------------------

    def _end_pass(self, *, updates: bool) -> None:
        """The pass is over, with its step or before the next one; called again, nothing happens."""
        self.cache.ledger.tidy()
        self.passes.end(updates=updates)
        instrument = self._unequip()
        if isinstance(instrument, Profiler):
            profile = instrument.finish()
            if any(operator.phase is Phase.BACKWARD for operator in profile.operators):
                self._profile_updates = updates
                self._make_plan(profile)
        elif instrument is not None:
            gradients = [weight.grad for weight in self._weights if type(weight.grad) is Tensor]
            self.metered_nbytes = instrument.peak_nbytes(without=gradients)

    def _script(self, blocks: list[NamedBlock]) -> Script:
        if self.planning is not None:
            return Planned(self.planning.plan)
        if self.policy == "recompute":
            return Alike(Place.KEEP, recompute=True)
        place = next((p for p in (Place.NVME, Place.HOST) if p in self.cache.shelves), Place.KEEP)
        last = 2 * len(blocks) - 1
        return Alike(Place.KEEP if self.policy == "keep" else place, last=last)

    def _equip(self) -> None:
        """Enter what records or meters this pass and what follows it."""
        plans = self.policy == "plan" and self.planning is None
        if plans and self.passes.begun >= PROFILED:  # again, where one was left without its backward
            profiler = Profiler(weights=self._weights, device=self.cache.device)
            self._instrument = profiler.__enter__()
            self.cache.observer = profiler
            if self._units is not None:
                self._units.listener = profiler.units_move
        elif self.meters and self.metered_nbytes is None and self.passes.begun >= METERED:
            meter = MemoryMeter()
            meter.__enter__()  # type: ignore[no-untyped-call]
            self._instrument = meter

    def _unequip(self) -> Profiler | MemoryMeter | None:
        """Leave it: what it was."""
        instrument, self._instrument = self._instrument, None
        self.cache.observer = None
        if self._units is not None:
            self._units.listener = None
        if instrument is not None:
            instrument.__exit__(None, None, None)
        return instrument

    def _leave(self) -> None:
        self.cache.record = None

    def _make_plan(self, profile: Profile) -> None:
        began_s, hardware = time.perf_counter(), self._hardware()
        profile = profile.at_pace(self._pace_s(profile.step_s, hardware.compute_s_per_byte))
        plan = ActivationPlan.from_json(self._decide(lambda: self._choose(profile, hardware).to_json()))
        kept, predicted = (play(profile, p, hardware) for p in (ActivationPlan("keep"), plan))
        self.planning = Planning(profile, hardware, plan, kept, predicted, time.perf_counter() - began_s)
        self.room.settle(plan.capacity_nbytes, predicted.peak_nbytes)
        self.cache.backlog_nbytes = plan.backlog_nbytes

    def _pace_s(self, recorded_s: float, s_per_byte: float) -> float:
        """How long a pass takes when everything is kept; see [Note: the pace of a step]."""
        alike = self.passes.alike(_WARM, updates=self._profile_updates)
        recorded_s *= 1 - alike[-1].moving_share(s_per_byte)  # its waits are left out
        return min(recorded_s, *(each.compute_s(s_per_byte) for each in alike))

    def _choose(self, profile: Profile, hardware: Hardware) -> ActivationPlan:
        """The plan for the first of the room's capacities that one meets."""
        refused = None
        for capacity_nbytes in self.room.capacities():
            try:
                return bounded(profile, make_plan(profile, hardware, capacity_nbytes), hardware)
            except BudgetError as error:
                refused = error
        assert refused is not None
        raise self.room.refuse(refused)
