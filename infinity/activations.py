"""What one model's activations do: by a rule, or by a plan made from a profile of its own step.

[Note: the first passes]
Under ``plan`` nothing is known before the model has run, and everything kept may not fit. So the first
passes store all they can. The second one is profiled, as if everything were kept; then a plan is made: rank
0's for all, since ranks that recompute different blocks would gather different units. The second pass under
the plan is metered, so that what was predicted can be told beside what was measured.
"""

import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from infinity.activation.blocks import NamedBlock, find_blocks, watched
from infinity.activation.cache import Record, TensorCache
from infinity.activation.identity import storages_of
from infinity.activation.script import Alike, Planned, Script
from infinity.core.errors import BudgetError
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Place
from infinity.core.profile import Profile
from infinity.observe.memory_meter import MemoryMeter
from infinity.observe.profiler import Profiler
from infinity.planner.policies import plan as make_plan
from infinity.simulate import play

Policy = Literal["keep", "offload", "recompute", "plan"]
#: Passes of a plan: profiled, made, metered; see [Note: the first passes].
_PROFILED, _METERED = 1, 3


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


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan, what it was made from, and what it was expected to cost."""

    profile: Profile
    hardware: Hardware
    plan: ActivationPlan
    kept: Outcome
    predicted: Outcome
    planning_s: float

    def save(self, folder: Path) -> None:
        """Write ``profile.json`` and ``plan.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.profile.save(folder / "profile.json")
        given = {
            "plan": json.loads(self.plan.to_json()),
            "hardware": asdict(self.hardware),
            "planning_s": self.planning_s,
        }
        (folder / "plan.json").write_text(json.dumps(given))


class Activations:
    """Serves every forward pass that autograd records, from its outermost module on.

    Args:
        cache: Packs and unpacks.
        policy: Keep, store or recompute everything, or plan.
        hardware: Measures the channels, when a profile is there.
        room: What a plan may use.
        agree: Gives rank 0's text to all ranks.

    Attributes:
        planning: The plan, once it is made.
        metered_nbytes: Peak of what a planned step made, as counted; None: not yet.
        pass_s: Seconds of each pass under the plan with what follows it, up to the next one.
    """

    def __init__(
        self, cache: TensorCache, policy: Policy, hardware: Callable[[], Hardware], room: Room,
        agree: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self.cache, self.policy = cache, policy
        self.planning: Planning | None = None
        self.metered_nbytes: int | None = None
        self.pass_s: list[float] = []
        self._hardware, self._room, self._agree = hardware, room, agree
        self._blocks: weakref.WeakKeyDictionary[nn.Module, list[NamedBlock]] = weakref.WeakKeyDictionary()
        self._passes, self._began_s = 0, 0.0
        self._instrument: Profiler | MemoryMeter | None = None
        self._weights: list[Tensor] = []

    def open(self, model: nn.Module) -> ExitStack:
        """A forward pass of ``model`` begins; it ends when the stack is closed.

        Raises:
            BudgetError: No plan meets the budget; says which one could be met, and what holds it there.
        """
        self.end_step()
        if model not in self._blocks:
            self._blocks[model] = find_blocks(model)
        blocks = self._blocks[model]
        self.cache.script = self._script(blocks)
        self._weights = list(model.parameters())
        self._equip()
        self._passes += 1
        self._began_s = time.perf_counter()
        stack = ExitStack()
        if self.policy != "keep":
            self.cache.exempt = storages_of([*self._weights, *model.buffers()])
            self.cache.record = Record()
            stack.callback(self._leave)
            stack.enter_context(watched(blocks, self.cache))
        return stack

    def end_step(self) -> None:
        """The step is over, as far as it is profiled; called again, nothing happens."""
        instrument, self._instrument = self._instrument, None
        self.cache.observer = None
        if self._began_s and self._passes > _METERED + 1:
            self.pass_s.append(time.perf_counter() - self._began_s)
        self._began_s = 0.0
        if instrument is None:
            return
        instrument.__exit__(None, None, None)
        if isinstance(instrument, Profiler):
            self._make_plan(instrument.finish())
        else:
            gradients = [weight.grad for weight in self._weights if type(weight.grad) is Tensor]
            self.metered_nbytes = instrument.peak_nbytes(without=gradients)

    def measured(self) -> Outcome | None:
        """What the plan's passes took, to be compared with what was predicted; None: too few of them."""
        if self.planning is None or self.metered_nbytes is None or not self.pass_s:
            return None
        step_s = sorted(self.pass_s)[len(self.pass_s) // 2]
        return replace(self.planning.predicted, step_s=step_s, peak_nbytes=self.metered_nbytes)

    def close(self) -> None:
        """Give back what stored activations hold."""
        self.end_step()
        self.cache.close()

    # --- parts -------------------------------------------------------------------------------

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
        if self.policy == "plan" and self._passes == _PROFILED:
            profiler = Profiler(weights=self._weights, device=self.cache.device)
            self._instrument = profiler.__enter__()
            self.cache.observer = profiler
        elif self.policy == "plan" and self._passes == _METERED:
            meter = MemoryMeter()
            meter.__enter__()  # type: ignore[no-untyped-call]
            self._instrument = meter

    def _leave(self) -> None:
        self.cache.record = None

    def _make_plan(self, profile: Profile) -> None:
        hardware, began_s = self._hardware(), time.perf_counter()
        plan = ActivationPlan.from_json(self._agree(self._choose(profile, hardware).to_json()))
        kept, predicted = (play(profile, p, hardware) for p in (ActivationPlan("keep"), plan))
        self.planning = Planning(profile, hardware, plan, kept, predicted, time.perf_counter() - began_s)
        self._room.settle(plan.capacity_nbytes, predicted.peak_nbytes)
        self.cache.backlog_nbytes = plan.backlog_nbytes

    def _choose(self, profile: Profile, hardware: Hardware) -> ActivationPlan:
        """The plan for the first of the room's capacities that one meets."""
        refused = None
        for capacity_nbytes in self._room.capacities():
            try:
                return make_plan(profile, hardware, capacity_nbytes)
            except BudgetError as error:
                refused = error
        assert refused is not None
        raise self._room.refuse(refused)
