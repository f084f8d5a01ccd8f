"""What serves the units of one model once its optimizer is known, and what a step does with it.

[Note: two connections]
Without an optimizer a model runs, too: then it is connected as for clipped gradients. An optimizer that
says otherwise has it connected anew, before the first step. Modules keep their hooks.
"""

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinity.comm.machine import free_host_nbytes
from infinity.core import budget
from infinity.core.lifecycle import UnitState
from infinity.core.tier import Tier
from infinity.core.transfer import Transfer
from infinity.device.pool import BufferPool, DevicePool, HostPool
from infinity.engine.device_budget import Division
from infinity.engine.gradients import Backward
from infinity.engine.hooks import Hooks
from infinity.observe.stalls import CountingPool
from infinity.observe.timeline import TimedRule
from infinity.optim.norm import clip_coefficient
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.rules import AdamWRule
from infinity.partition.mover import UnitMover
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.staging import Staging
from infinity.partition.unit import Unit
from infinity.shards.updates import Updates

if TYPE_CHECKING:
    from infinity.engine.runtime import Runtime


class Connection:
    """Mover, prefetcher, gradients and updates, under one division of the device budget.

    To the mover it is where shards come from; see :class:`infinity.partition.mover.Shards`.

    Args:
        runtime: Has the units, their tiers and the ranks.
        clips: Whether gradients are clipped: then updates start at ``step()``.
        hooks: Those that the model has; None: none yet.

    Attributes:
        on_demand: Uses of the last pass that no plan foresaw.
        planned: Bytes that the last pass was to read and to write; None: it had no plan.

    Raises:
        BudgetError: ``memory.device`` is too small; the message has the arithmetic.
    """

    def __init__(self, runtime: "Runtime", *, clips: bool, hooks: Hooks | None) -> None:
        self.clips, self._runtime = clips, runtime
        self.on_demand = 0
        self.planned: tuple[int, int] | None = None
        self._update_mark = 0, 0
        self._stack = runtime.stack.enter_context(contextlib.ExitStack())
        early = not clips and runtime.recipe.memory.versions == 2
        self._dividing = Division(runtime, runtime.least(self._ceiling(), "memory.device"), early=early)
        self.device_pool = self._make_pool()
        self._stack.callback(self.device_pool.close)
        pool = CountingPool(self.device_pool, runtime.stalls)
        host = runtime.storage.host_pool if runtime.on_gpu else None
        staging = None if host is None else Staging(host, runtime.piece_nbytes)
        units, collectives = runtime.units, runtime.collectives
        self.mover = UnitMover(units, self, pool, staging, collectives, runtime.stalls)
        self._stack.callback(self.mover.close)
        streaming = {u.index: budget.rounded(u.nbytes) for u in units if runtime.streams(u)}
        can_stay = {u.index for u in units if u.home is Tier.NVME and self._fits_staging(u)}
        self.prefetcher = Prefetcher(self.mover, streaming, self.division.window, can_stay)
        self.updates = self._make_updates(early)
        self.backward = Backward(
            units, pool, host, self.mover, self.updates,
            collectives, runtime.reduce_dtype, self._divide_again, hold_weights=self.division.hold_weights,
        )  # fmt: skip
        self.hooks = self._hook_up(hooks)

    # --- building ----------------------------------------------------------------------------

    def _ceiling(self) -> int:
        """What a device budget may be if the recipe has none."""
        if self._runtime.on_gpu:
            return torch.cuda.mem_get_info(self._runtime.device)[0] // 2
        return free_host_nbytes() // 2

    def _make_pool(self) -> BufferPool:
        if self._runtime.on_gpu:
            return DevicePool(self.division.total, self._runtime.device)
        return HostPool(self.division.total, key="memory.device")

    def _fits_staging(self, unit: Unit) -> bool:
        """On an accelerator, a unit that stays has a copy of its shard in pinned host memory."""
        return not self._runtime.on_gpu or unit.shard_nbytes <= self._runtime.piece_nbytes

    def _make_updates(self, early: bool) -> Updates:
        runtime = self._runtime
        storage, timeline, pipeline = runtime.storage, runtime.timeline, None
        commits = storage.open_commits()
        if commits is not None:
            self._stack.callback(commits.close)
        if storage.units_engine is not None:
            background = self._make_rule()
            timed: Any = TimedRule(background, timeline) if timeline.enabled else background
            pipeline = UpdatePipeline(
                storage.units_engine, storage.host_pool, storage.layout, timed, depth=storage.staged_chunks()
            )
            self._stack.callback(pipeline.close)
        return Updates(
            runtime.tiers, self._make_rule(threads=torch.get_num_threads()), pipeline, early=early,
            next_use=self.prefetcher.first_use, order_of_gradients=self.prefetcher.order_of_gradients,
            units=runtime.units, commits=commits, on_failure=runtime.fail,
        )  # fmt: skip

    def _make_rule(self, **options: int) -> AdamWRule:
        runtime = self._runtime
        on_compile = runtime.say if runtime.rank == 0 else None
        return AdamWRule(
            runtime.dtype, compiled=runtime.recipe.optim.compile, on_compile=on_compile, **options
        )

    def _hook_up(self, hooks: Hooks | None) -> Hooks:
        runtime, attached = self._runtime, self.mover.attached
        if hooks is None:
            hooks = Hooks(self.prefetcher, self.backward, attached, runtime.activations)
        else:
            hooks.connect(self.prefetcher, self.backward, attached)
        self.backward.hooks = hooks
        hooks.learn(runtime.units, runtime.leaves())
        for unit in runtime.units:
            if not runtime.streams(unit):
                if not unit.gathered:
                    unit.lifecycle.move(UnitState.GATHERED)
                    unit.attach(runtime.tiers.residents[unit.index].weight)
                assert unit.flat is not None
                attached[unit.flat.untyped_storage().data_ptr()] = unit
        return hooks

    # --- the device budget -------------------------------------------------------------------

    @property
    def division(self) -> budget.DeviceBudget:
        """How the device budget is divided now."""
        return self._dividing.budget

    def accumulate(self) -> None:
        """Gradients will wait for later micro-batches.

        Raises:
            BudgetError: ``memory.device`` cannot hold all of them; the message has the arithmetic.
        """
        self._divide_again(accumulates=True)

    def _divide_again(self, *, accumulates: bool = False) -> None:
        """Before a forward: make room for gradients that did not wait until now."""
        if self._dividing.again(accumulates=accumulates):
            self._runtime.tiers.settle(self._runtime.units)  # what was thawed gets its moments
            self._apply_division()

    def divide_beside(self, activations_nbytes: int) -> None:
        """A plan for activations was made: units have the rest, on all ranks alike."""
        self._dividing.beside(-self._runtime.least(-activations_nbytes, "memory.device"))
        self._apply_division()

    def _apply_division(self) -> None:
        self.device_pool.capacity_nbytes = self.division.total
        self.backward.hold_weights = self.division.hold_weights
        self.prefetcher.resize(self.division.window)
        for make_room in self._runtime.on_division:
            make_room()

    # --- what the mover asks -----------------------------------------------------------------

    def fetch(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        return self.updates.fetch(unit, memory, start)

    def resident(self, unit: Unit) -> Tensor | None:
        resident = self._runtime.tiers.residents.get(unit.index)
        return None if resident is None else resident.weight

    def fetch_waits_for(self, unit: Unit) -> str:
        return self.updates.fetch_waits_for(unit)

    def updated_in_place(self, unit: Unit) -> Callable[[], object]:
        return self.updates.updated_in_place(unit)

    def leave_in_peace(self, unit: Unit) -> None:
        self.backward.finish()  # its gradient may still be on its way to the update
        self.updates.leave_in_peace(unit)

    # --- the step ----------------------------------------------------------------------------

    def step(self, max_grad_norm: float | None) -> float | None:
        """Commit the gradients of this step: their global norm, or None when there were none."""
        collectives = self._runtime.collectives
        self.hooks.let_go()
        self._runtime.stalls("collective", self.backward.finish)
        if not self.backward.synced:
            self._count_step()
            return None
        self.hooks.check_gradients()
        total = self.updates.total_sum_of_squares()
        if collectives is not None:
            [total] = collectives.sum([total], "the gradient norm")
        norm = math.sqrt(total) / self.updates.loss_scale if math.isfinite(total) else total
        if math.isfinite(norm):
            updated = list(self.updates.ready)
            self.updates.commit(1.0 if max_grad_norm is None else clip_coefficient(norm, max_grad_norm))
            # copies fetched after the unit's gradients were complete
            self.prefetcher.forget(set(updated) - self.prefetcher.staying)
        self._count_step()
        self.backward.reset()
        self._runtime.activations.end_step()
        self._conclude_pass()
        return norm

    def _count_step(self) -> None:
        """From now on collectives belong to the next step: a rank that is a step behind is found."""
        if self._runtime.collectives is not None:
            self._runtime.collectives.step += 1

    def _conclude_pass(self) -> None:
        """Keep the figures of the pass that ended; begin the next."""
        read, written = self.updates.planned_read, self.updates.planned_written
        before, self._update_mark = self._update_mark, (read, written)
        self.on_demand = self.prefetcher.on_demand
        self.planned = None
        fetched = self.prefetcher.planned
        if fetched is not None:
            units = (self._runtime.units[index] for index in fetched)
            read_weights = sum(unit.shard_nbytes for unit in units if unit.home is Tier.NVME)
            self.planned = (read_weights + read - before[0], written - before[1])
        self.prefetcher.end_training_pass()

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what is held: another connection takes its place."""
        self.prefetcher.forget()
        self._stack.close()
