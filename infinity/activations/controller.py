"""Decide what a model's activations do: by a fixed policy, or by a plan made from a profile of its own step.

[Note: the first passes]
Under ``plan`` nothing is known before the model has run, so the first passes store all they can. The fifth is
profiled as if everything were kept. Then rank 0 makes the plan for all, since ranks that recompute different
blocks would gather different units. The second pass under the plan is metered, to compare predictions.

[Note: what codecs gain]
In the profiled pass codecs are tried on parts of each saved storage. Without a plan that is the second pass,
and a storage is coded where that takes less time than the bytes that it saves on their way to NVMe and back.

[Note: the time of a pass]
A pass lasts from its forward to the next one, or to the end of its step; only passes that end as the profiled
one did are compared with it. The profiled pass is slow, since its operators go through Python. So the plan
takes a step to last as long as the quickest pass that found everything compiled and every buffer made,
without its waits and without the time that moving its bytes cost.

[Note: wrapped forwards]
``forward`` of each block is wrapped, only while a forward pass runs: to tell the tensor cache the position of
the pass, and to put a block that is to be recomputed under ``torch.utils.checkpoint``.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from infinity.activations import tensor_cache
from infinity.activations.profiler import MemoryMeter, Profiler, storages_of
from infinity.activations.recompute import (
    KeptOperators,
    KeptOutputs,
    Watch,
    in_backward,
    is_compiled,
    patched,
    recomputed,
    untraced,
)
from infinity.activations.tensor_cache import (
    ActivationStats,
    PassRecord,
    TensorCache,
    planned,
    uniform,
)
from infinity.core.errors import BudgetError
from infinity.core.plan import ActivationPlan, Hardware, Outcome, Phase, Place, Planning, Profile
from infinity.observe.timeline import WatchedEngine
from infinity.planner.search import budget_error
from infinity.planner.search import plan as make_plan
from infinity.planner.simulator import play

Policy = Literal["keep", "offload", "recompute", "plan"]
#: Passes: codecs are tried, warm, profiled, metered under a plan; see [Note: the first passes].
_TRIED, _WARM, PROFILED, METERED = 1, 2, 4, 6
#: Passes that are remembered.
REMEMBERED = 1000


class NamedBlock(NamedTuple):
    """Names a block of the model."""

    name: str
    module: nn.Module


def recomputable_blocks(model: nn.Module) -> list[NamedBlock]:
    """Return the members of every ``nn.ModuleList`` that have parameters and are in no other block, in order.

    A block may be compiled. A model compiled as a whole has none: the pass's position in it is unknown.
    """

    def blocks_in(module: nn.Module, name: str, listed: bool) -> Iterator[NamedBlock]:
        is_list = isinstance(module, nn.ModuleList)
        if listed and not is_list and next(module.parameters(), None) is not None:
            yield NamedBlock(name, module)
        elif not is_compiled(module):
            for child_name, child in module.named_children():
                yield from blocks_in(child, f"{name}.{child_name}" if name else child_name, is_list)

    return list(blocks_in(model, "", False))


@contextmanager
def tracked(blocks: Sequence[NamedBlock], cache: TensorCache) -> Iterator[None]:
    """Make the blocks tell ``cache`` the position of a pass; see [Note: wrapped forwards]."""
    with ExitStack() as stack:
        for block in blocks:
            name = "forward" if block.module._compiled_call_impl is None else "_compiled_call_impl"
            own = getattr(block.module, name)
            stack.enter_context(patched(block.module, name, partial(_forward, block, own, cache)))
        yield


@untraced
def _forward(
    block: NamedBlock, own: Callable[..., Any], cache: TensorCache, *args: Any, **kwargs: Any
) -> Any:
    record = cache.record
    if record is None or in_backward() or not torch.is_grad_enabled():
        return own(*args, **kwargs)
    region, profiler = record.enter(), cache.profiler
    leaves = tree_leaves((args, kwargs), is_leaf=_is_kv_cache)
    # Asked of every block's cache, recomputed or not: it is filled after the pass came to it first.
    empty = [record.was_empty(leaf) for leaf in leaves if _is_kv_cache(leaf)]
    kept = record.policy.kept.get(region)
    # What is compiled runs again as a whole, and is not looked into.
    compiled = (profiler is not None or kept is not None) and any(map(is_compiled, block.module.modules()))
    if profiler is not None:
        profiler.enter_region(region, block.name, compiled)
    try:
        if record.policy.recomputes(region) and all(empty):
            return _recomputed(block.module, own, None if compiled else kept, args, kwargs)
        return own(*args, **kwargs)
    finally:
        record.leave()
        if profiler is not None:
            profiler.leave_region(region, [leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _is_kv_cache(leaf: object) -> bool:
    return hasattr(leaf, "get_seq_length")


def _recomputed(
    module: nn.Module,
    own: Callable[..., Any],
    kept: KeptOperators | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if "use_cache" in kwargs:
        kwargs = {**kwargs, "use_cache": False}
    leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_kv_cache)
    runs_again, outputs = False, None if kept is None else KeptOutputs(kept)

    def call(*leaves: Any) -> Any:
        nonlocal runs_again
        args, kwargs = tree_unflatten(leaves, spec)
        again, runs_again = runs_again, True
        restored = _restored_buffers(module) if again else nullcontext()
        watched = nullcontext() if outputs is None else Watch(outputs, again=again)
        with restored, watched:
            return own(*args, **kwargs)

    # Twice through a cache of keys and values would put them there twice.
    leaves = [None if _is_kv_cache(leaf) else leaf for leaf in leaves]
    return recomputed(call, *leaves)


@contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Put the buffers of ``module`` back at the end, so that running statistics count a batch once."""
    buffers = [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items()]
    before = [(among, name, b, b.detach().clone()) for among, name, b in buffers if b is not None]
    try:
        yield
    finally:
        for among, name, buffer, values in before:
            buffer.data.copy_(values)  # not counted as a write
            among[name] = buffer


class ActivationBudget:
    """Tells how much device memory a step itself may allocate; by itself ``capacity_nbytes``, unshared."""

    def __init__(self, capacity_nbytes: int | None = None) -> None:
        self.capacity_nbytes = capacity_nbytes

    def capacities(self) -> Sequence[int | None]:
        """Return the bytes that activations may have, the best division of memory first; None: no bound."""
        return [self.capacity_nbytes]

    def settle(self, capacity_nbytes: int | None, kept_nbytes: int) -> None:
        """Take note that the plan was made for one of the capacities, and takes at most ``kept_nbytes``."""

    def refuse(self, profile: Profile, hardware: Hardware) -> BudgetError:
        """Return the error to raise when no plan for a profile fits any capacity."""
        return budget_error(profile, hardware, self.capacity_nbytes or 0)


@dataclass(frozen=True, slots=True)
class PassTime:
    """Records how long a forward pass with its backward took; ``updates``: the step ended with it."""

    number: int
    time_s: float
    nbytes_stored: int
    nbytes_loaded: int
    waited_s: float
    moves: int
    handled_s: float  # its share in starting so many stores and loads, and in reading what came
    updates: bool

    def moving_share(self, s_per_byte: float) -> float:
        """Return the share of compute's time that moved bytes took, at ``s_per_byte`` of a core."""
        # Bytes also move while compute waits: a larger share than half is an error of the estimate.
        return min(0.5, s_per_byte * (self.nbytes_stored + self.nbytes_loaded) / self.time_s)

    def compute_s(self, s_per_byte: float) -> float:
        """Return the seconds that the pass takes when nothing moves and nothing is waited for."""
        return (self.time_s - self.waited_s - self.handled_s) * (1 - self.moving_share(s_per_byte))


class PassTimer:
    """Times the passes of one model: how many have ``begun``, and the latest that have ``ended``."""

    def __init__(self, stats: ActivationStats) -> None:
        self.begun = self.steps = 0  # passes; steps that have ended
        self.ended = deque[PassTime](maxlen=REMEMBERED)
        self._stats = stats
        self._mark: tuple[float, ...] | None = None

    def begin(self) -> None:
        self.begun += 1
        self._mark = self._figures()

    def end(self, *, updates: bool) -> None:
        if self._mark is not None:
            time_s, stored, loaded, waited_s, moves, handled_s = (
                now - was for now, was in zip(self._figures(), self._mark)
            )
            self._mark = None
            self.steps += updates
            moved = int(stored), int(loaded), waited_s, int(moves), handled_s
            self.ended.append(PassTime(self.begun - 1, time_s, *moved, updates))

    def alike(self, first: int, *, updates: bool) -> list[PassTime]:
        """Return passes from number ``first`` on, either those with the step's updates or those without."""
        return [each for each in self.ended if each.number >= first and each.updates is updates]

    def _figures(self) -> tuple[float, ...]:
        stats = self._stats
        moved = stats.nbytes_stored, stats.nbytes_loaded, stats.waited_s, stats.moves, stats.handled_s
        return time.perf_counter(), *moved


class Activations:
    """Begins and ends the recorded passes of a model, and plans its activations.

    ``hardware`` measures the channels, once a profile exists; ``decide`` gives all ranks, which must call it,
    the text that rank 0 makes; ``units`` moves shards of units on the channels that activations share.
    """

    def __init__(
        self, cache: TensorCache, policy: Policy, hardware: Callable[[], Hardware],
        budget: ActivationBudget | None = None,
        decide: Callable[[Callable[[], str]], str] = lambda make: make(),
        units: WatchedEngine | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.policy = cache, policy
        self.planning: Planning | None = None
        self.passes = PassTimer(cache.stats)
        self.budget = budget or ActivationBudget()
        self.meters = policy == "plan"  # one pass, which is slower
        self.metered_nbytes: int | None = None  # the peak of that pass
        self._hardware, self._decide, self._units = hardware, decide, units
        self._updates = False  # the step ended with the profiled pass
        # What measures the pass that runs, and the model's weights.
        self._attached: tuple[Profiler | MemoryMeter, list[nn.Parameter]] | None = None

    def open(self, model: nn.Module) -> ExitStack:
        """Begin a forward pass of ``model``, until the returned stack closes; BudgetError: no plan fits."""
        self._end_pass(updates=False)
        if self.planning is not None and self.planning.plan.capacity_nbytes is not None:
            self.cache.queue.wait_below(0)  # what an earlier pass was still storing when it ended
        stack = ExitStack()
        weights = list(model.parameters()) if self.policy != "keep" else []
        self._attach(weights)
        self.passes.begin()
        if self.policy != "keep":
            blocks = recomputable_blocks(model)
            self.cache.exempt = storages_of([*weights, *model.buffers()])
            place = next((p for p in (Place.NVME, Place.HOST) if p in self.cache.stores), Place.KEEP)
            coding = self.cache.coding
            policy = uniform(place, last=2 * len(blocks) - 1, codecs=coding.chosen if coding else {})
            if self.cache.planned is not None:
                policy = self.cache.planned
            elif self.policy == "recompute":
                policy = uniform(Place.KEEP, recompute=True)
            self.cache.record = PassRecord(policy)
            if coding is not None:
                first = self.policy == "offload" and self.passes.begun == _TRIED + 1
                coding.begin_pass(measures=first or self.cache.profiler is not None)
            stack.callback(setattr, self.cache, "record", None)
            stack.enter_context(tracked(blocks, self.cache))
        return stack

    def end_step(self) -> None:
        """End the step, as far as it is profiled; called again, nothing happens."""
        self._end_pass(updates=True)

    def measured(self) -> Outcome | None:
        """Return the measured cost of a pass under the plan; None: too few passes.

        Time and bytes are medians, see [Note: the time of a pass]; the peak is that of the metered pass.
        Stalls and recomputation, which cannot be told from other compute, are the predicted ones.
        """
        alike = self.passes.alike(METERED + 1, updates=self._updates)
        if self.planning is None or self.metered_nbytes is None or not alike:
            return None
        return replace(
            self.planning.predicted,
            step_s=median(each.time_s for each in alike),
            peak_nbytes=self.metered_nbytes,
            nbytes_stored=round(median(each.nbytes_stored for each in alike)),
            nbytes_loaded=round(median(each.nbytes_loaded for each in alike)),
        )

    def close(self) -> None:
        """Give back what stored activations hold; a pass that is still recorded is forgotten."""
        self._detach()
        self.cache.close()

    def _attach(self, weights: list[nn.Parameter]) -> None:
        """Enter the profiler or the meter if the next pass is the one for it."""
        attached: Profiler | MemoryMeter
        plans = self.policy == "plan" and self.planning is None
        if plans and self.passes.begun >= PROFILED:  # again, where one was left without its backward
            attached = self.cache.profiler = Profiler(weights, self.cache.device)
            if self._units is not None:
                self._units.listener = attached.units_move
        elif self.meters and self.metered_nbytes is None and self.passes.begun >= METERED:
            attached = MemoryMeter()
        else:
            return
        attached.__enter__()
        self._attached = attached, weights

    def _detach(self) -> tuple[Profiler | MemoryMeter | None, list[nn.Parameter]]:
        (attached, weights), self._attached = self._attached or (None, []), None
        self.cache.profiler = None
        if self._units is not None:
            self._units.listener = None
        if attached is not None:
            attached.__exit__(None, None, None)
        return attached, weights

    def _end_pass(self, *, updates: bool) -> None:
        """End the pass, with its step or before the next one; called again, nothing happens."""
        self.cache.stats.free_dropped()
        self.passes.end(updates=updates)
        attached, weights = self._detach()
        if self.cache.coding is not None:
            self.cache.coding.end_pass(self._hardware if self.policy == "offload" else None)
        if isinstance(attached, Profiler):
            profile = attached.finish()
            if any(operator.phase is Phase.BACKWARD for operator in profile.operators):
                self._updates = updates
                self._make_plan(profile)
        elif attached is not None:
            gradients = [weight.grad for weight in weights if type(weight.grad) is Tensor]
            self.metered_nbytes = attached.peak_nbytes(without=gradients)

    def _make_plan(self, profile: Profile) -> None:
        began_s, hardware = time.perf_counter(), self._hardware()
        # Seconds of a pass when everything is kept, without waits: see [Note: the time of a pass].
        alike = self.passes.alike(_WARM, updates=self._updates)
        per_move_s = min(each.handled_s / max(1, each.moves) for each in alike)
        hardware = replace(hardware, compute_s_per_move=per_move_s)
        recorded_s = profile.step_s * (1 - alike[-1].moving_share(hardware.compute_s_per_byte))
        pace_s = min(recorded_s, *(each.compute_s(hardware.compute_s_per_byte) for each in alike))
        padding_nbytes = max((store.padding_nbytes for store in self.cache.stores.values()), default=0)
        profile = replace(
            profile.at_pace(pace_s), padding_nbytes=padding_nbytes, least_nbytes=tensor_cache.LEAST_NBYTES
        )
        plan = ActivationPlan.from_json(self._decide(lambda: self._choose(profile, hardware).to_json()))
        self.cache.planned = planned(plan)
        kept, predicted = (play(profile, p, hardware) for p in (ActivationPlan("keep"), plan))
        self.planning = Planning(profile, hardware, plan, kept, predicted, time.perf_counter() - began_s)
        # What is never stored needs what was predicted; stores that end late need up to the plan's capacity.
        late = plan.places and plan.capacity_nbytes
        self.budget.settle(plan.capacity_nbytes, max(predicted.peak_nbytes, late or 0))

    def _choose(self, profile: Profile, hardware: Hardware) -> ActivationPlan:
        for capacity_nbytes in self.budget.capacities():
            with suppress(BudgetError):
                return make_plan(profile, hardware, capacity_nbytes)
        raise self.budget.refuse(profile, hardware)
