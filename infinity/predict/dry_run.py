"""A recipe's model without values: its units, its budgets and one recorded micro-batch.

[Note: nothing is read and nothing computed]
The model is built on the meta device, from ``config.json`` alone, and cut by the runtime's own builder. One
micro-batch then runs on fake tensors, which have shapes and no memory: torch's own operators say what they
would make, the runtime's own hooks and prefetcher what units they use. So the trace is that of the runtime,
whatever the model does. A model whose forward depends on values (experts in a Python loop) cannot.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from infinity.activations.logits import Mode, find_head, least_nbytes
from infinity.activations.store import directly_moved_nbytes
from infinity.comm.ranks import Ranks
from infinity.core.budget import STAGED_CHUNKS, DeviceBudget, left_for_states, piece_nbytes
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import aligned
from infinity.core.plan import ActivationPlan, Hardware, Phase, Place, Profile
from infinity.device.machine import DTYPES
from infinity.engine.config import EngineConfig
from infinity.engine.device_budget import UnitBudget
from infinity.engine.executor import reduction_dtype
from infinity.engine.schedule import Blocks
from infinity.partition.builder import CutSizes
from infinity.partition.unit import Home, Unit
from infinity.planner.machines import Dtype, Machine, RankRates, rank_rates
from infinity.planner.search import POLICIES, device_error, smallest_budget
from infinity.planner.simulator import play
from infinity.planner.step import (
    StepSetup,
    StepTrace,
    Stored,
    StoredShape,
    UnitShape,
    all_resident_nbytes,
    choose_homes,
)
from infinity.predict.model import ModelWithoutValues
from infinity.predict.operators import Candidate, OperatorTimes
from infinity.predict.recording import Batch
from infinity.predict.recording import play as play_record
from infinity.recipes.recipe import Recipe
from infinity.shards.base import BaseBuffers
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

#: Device memory that the runtime's context and libraries take beside budgets (bytes).
CONTEXT_NBYTES = 2**30


@dataclass
class Target:
    """A recipe on one of the ranks of a machine; what a rank has follows from that.

    Attributes:
        dtype: The dtype in which the model computes.
    """

    recipe: Recipe
    machine: Machine
    ranks: int
    dtype: Dtype

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return max(1, self.ranks // self.machine.nodes.count)

    @property
    def host_nbytes(self) -> int:
        """``memory.host``."""
        return self.recipe.memory.host or self.machine.host.memory // self.local // 2

    @property
    def device_nbytes(self) -> int:
        """Memory of the device that budgets may have."""
        if not self.machine.on_accelerator:
            return self.machine.host.memory // self.local
        return (self.machine.devices.memory or 0) - CONTEXT_NBYTES

    @property
    def rates(self) -> RankRates:
        return rank_rates(self.machine, self.ranks, self.dtype, self.recipe.train.threads)

    @property
    def layered(self) -> bool:
        """Return whether each block takes all micro-batches before the next one."""
        return self.recipe.train.schedule == "layer"

    @property
    def policy(self) -> str:
        """Return the policy of activations."""
        memory = self.recipe.memory
        if self.layered:
            return "recompute"
        return memory.activations or ("keep" if memory.device is None else "plan")

    @property
    def micro_batches(self) -> int:
        """Times that a step goes through the trace; a layer schedule takes all micro-batches at once."""
        return 1 if self.layered else self.recipe.train.accumulate

    @property
    def reduce_itemsize(self) -> int:
        """Bytes per element of a reduced gradient."""
        return (self.reduce_dtype if self.ranks > 1 else DTYPES[self.dtype]).itemsize

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Return the dtype of the gradient reduction, if there are several ranks."""
        return reduction_dtype(EngineConfig(partition=self.recipe.partition), DTYPES[self.dtype])


class Layout(Target):
    """A target's units with their homes, and its budgets, divided as the runtime does.

    Attributes:
        placed: The units, with their homes.
        budget: Divided anew when more is known of a step.
        storage: Its arithmetic alone is wanted.
    """

    def __init__(self, target: Target, model: ModelWithoutValues) -> None:
        super().__init__(target.recipe, target.machine, target.ranks, target.dtype)
        memory, dtype = self.recipe.memory, DTYPES[self.dtype]
        self.model = model
        self._rank = Ranks(0, self.ranks, torch.device("cuda" if self.machine.on_accelerator else "cpu"))
        self.storage = Storage(memory, self.host_nbytes, dtype, self._rank.device)
        self.storage.close()
        self._tiers = Tiers(self.storage, self._rank, self.reduce_dtype)
        self.placed = self._place_units()
        self.budget = UnitBudget(
            model.units, model.leaves, [model.module], self._rank, self._tiers, self.device_nbytes // 2,
            policy=self.policy, clips=self.recipe.optim.max_grad_norm is not None, updates_nbytes=0,
            recomputes=self.policy in ("recompute", "plan") and not self.layered,  # that has whole blocks
        )  # fmt: skip
        if self.micro_batches > 1:
            self.budget.divide_again(accumulates=True)

    def _place_units(self) -> tuple[UnitShape, ...]:
        model, layout, drives = self.model, self.storage.layout, bool(self.recipe.memory.nvme)
        stored = model.values.stored if drives else {}
        for unit in model.units:
            unit.stored = stored[unit.index][0] if unit.index in stored else None
        shapes = [
            UnitShape(
                name=unit.name,
                shard_numel=unit.shard_numel,
                nbytes=unit.nbytes,
                weight_nbytes=layout.weight_nbytes(unit.shard_numel),
                state_nbytes=layout.state_nbytes(unit.shard_numel),
                moments_nbytes=layout.only(moments=True).state_nbytes(unit.shard_numel),
                host_gradient_nbytes=self._tiers.gradient_nbytes(unit) if self.machine.on_accelerator else 0,
                params=sum(segment.numel for segment in unit.segments),
                trainable=bool(unit.trainable),
                stored=self._stored_shape(unit),
            )
            for unit in model.units
        ]
        resident_nbytes = self.storage.resident_nbytes
        if self._has_base:
            resident_nbytes = max(0, resident_nbytes - self._base_buffers.all_nbytes)
        placed = choose_homes(shapes, resident_nbytes, drives=drives, alone_on_cpu=self._rank.alone_on_cpu)
        for unit, shape in zip(model.units, placed, strict=True):
            unit.home = Home(Tier.NVME if shape.on_nvme else Tier.HOST)
        return placed

    def _stored_shape(self, unit: Unit) -> StoredShape | None:
        form, values = unit.stored, self.model.values
        if form is None:
            return None
        decode = values.decoding(unit.index, on_accelerator=self.machine.on_accelerator)
        return StoredShape(form.nbytes, form.shard_nbytes, values.stored[unit.index][1], *decode)

    @property
    def _has_base(self) -> bool:
        return self.model.values.base is not None and bool(self.recipe.memory.nvme)

    @property
    def _base_buffers(self) -> BaseBuffers:
        return BaseBuffers.within(self.host_nbytes)

    def read_where_they_lie(self) -> tuple[UnitShape, ...]:
        """Return the units, with what is read of those that lie in a checkpoint."""
        model, host = self.model, self.budget.host
        found = list(self.placed)
        for index in model.values.mapped if self._has_base else ():
            unit = model.units[index]
            if unit.home.tier is Tier.NVME and not unit.trainable:
                piece = unit.shard_nbytes if host is None else min(unit.shard_nbytes, host.piece)
                nbytes = model.values.read_nbytes(unit, piece, self._base_buffers.nbytes)
                found[index] = replace(found[index], base_nbytes=nbytes)
        return tuple(found)

    def divide(self) -> DeviceBudget:
        """Return how the device budget is divided, with the window that a layer schedule has."""
        if not self.layered:
            return self.budget.division
        blocks = Blocks.of(self.model.module)
        window = self.budget.window_for(blocks.units(self.model.units)[0], str(blocks))
        return replace(self.budget.division, window=window)

    def channels(self) -> Hardware:
        """Return the channels of activations, and the host memory that they may take."""
        given = self.rates.channels
        if not self.recipe.memory.nvme:
            given = replace(given, read_bytes_per_s=0.0, write_bytes_per_s=0.0, mixed_bytes_per_s=0.0)
        on_accelerator = self.machine.on_accelerator
        host_nbytes = self.host_nbytes - self.storage.resident_nbytes if on_accelerator else 0
        return replace(given, host_nbytes=max(0, host_nbytes))


class DryRun(Layout):
    """The model, its budgets and its trace: all that a plan is made from.

    Attributes:
        units: The units, with their homes.
        trace: One micro-batch, or all of them where they go through each block together.
        profile: The storages and blocks of one micro-batch.
        division: The division of the device budget.
        activations: The plan that follows from ``policy``.
    """

    def __init__(self, target: Target, model: ModelWithoutValues) -> None:
        super().__init__(target, model)
        self.activations = ActivationPlan("recompute" if self.policy == "recompute" else "keep")
        with model.faked():
            self.trace, recorded = self._record()
            self.profile = recorded
            if self.policy in ("plan", "offload"):
                self.activations = self._choose_plan()
                if self.policy == "plan" and self.budget.device_nbytes is not None:  # units get the rest
                    self.budget.divide_beside(self._planned_peak_nbytes())
                if self.activations.recomputed:
                    self.trace, recorded = self._record()
        if self.activations.places:
            peak_nbytes = self._planned_peak_nbytes()  # without what has left
            self.trace = replace(self.trace, stored=tuple(self._stored(recorded)), peak_nbytes=peak_nbytes)
        peak_nbytes = self.trace.peak_nbytes
        if self.layered:
            scaled = self.trace.scaled(self.recipe.train.accumulate)
            self.trace = replace(scaled, peak_nbytes=peak_nbytes)
        if self.budget.asks_what_a_step_leaves:
            left = self.device_nbytes - self.budget.division.total - peak_nbytes
            self.budget.divide_after_step(left_for_states(left, self.device_nbytes, peak_nbytes))
        # Now: the next plan of the same model gives its units other homes.
        self.units, self.division = self.read_where_they_lie(), self.divide()

    def changed(self, recipe: Recipe, machine: Machine) -> "DryRun":
        """Return the same model under another recipe, or on a machine with as many devices.

        Raises:
            BudgetError: A budget is too small for it.
        """
        if recipe.memory.device != self.recipe.memory.device:  # sizes of units may follow from it
            return dry_run(recipe, machine, self.ranks, self, here=self.model.times is not None)
        return DryRun(Target(recipe, machine, self.ranks, self.dtype), self.model)

    def least_host_nbytes(self) -> int:
        """Return the least ``memory.host`` with which the model can be trained."""
        if not self.recipe.memory.nvme:
            return all_resident_nbytes(self.units)
        low, high = 0, self.host_nbytes
        while high - low > max(4096, high // 256):
            middle = (low + high) // 2
            memory = replace(self.recipe.memory, host=max(1, middle), resident=False)
            target = Target(replace(self.recipe, memory=memory), self.machine, self.ranks, self.dtype)
            try:
                Layout(target, self.model)
            except BudgetError:
                low = middle
            else:
                high = middle
        return high

    def least_activations_nbytes(self) -> int:
        """Return the least that activations take beside units under the policy."""
        if self.policy != "plan":
            return self.trace.peak_nbytes
        return smallest_budget(self.profile, self.channels())

    @property
    def setup(self) -> StepSetup:
        """Return what the clock needs besides the trace."""
        memory, storage, on_accelerator = self.recipe.memory, self.storage, self.machine.on_accelerator
        room = 0
        if not on_accelerator:
            room = self.host_nbytes - sum(unit.resident_nbytes for unit in self.units if not unit.on_nvme)
        return StepSetup(
            units=self.units, rates=self.rates, division=self.division, ranks=self.ranks,
            on_accelerator=on_accelerator, micro_batches=self.micro_batches, early=memory.versions == 2,
            clips=self.recipe.optim.max_grad_norm is not None, chunk_numel=storage.chunk_numel,
            staged_chunks=max(STAGED_CHUNKS, room // storage.chunk_nbytes),
            piece_nbytes=piece_nbytes(self.host_nbytes - storage.resident_nbytes) if on_accelerator else None,
            reduce_itemsize=self.reduce_itemsize, spilled=self.budget.spilled,
        )  # fmt: skip

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of gradients that wait on NVMe in each step."""
        return sum(self.units[index].shard_numel for index in self.budget.spilled) * self.reduce_itemsize

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of activations that are on NVMe when backward begins."""
        return sum(aligned(each.nbytes) for each in self.trace.stored if each.on_nvme)

    @property
    def notes(self) -> Sequence[str]:
        """Lines for people about what the plan takes for granted."""
        return self.model.notes

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)

    # --- activations -------------------------------------------------------------------------

    def _choose_plan(self) -> ActivationPlan:
        """Return the plan that the runtime would make from this profile."""
        profile, hardware, budget = self.profile, self.channels(), self.budget
        if self.policy == "offload":
            if not self.recipe.memory.nvme:
                wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
                raise SettingError("memory.activations", "offload", wanted)
            return POLICIES["offload"](profile, hardware, None)
        if budget.device_nbytes is None:
            return POLICIES["plan"](profile, hardware, None)
        for units_nbytes in dict.fromkeys((budget.division.total, budget.division.least)):
            with suppress(BudgetError):
                return POLICIES["plan"](profile, hardware, budget.device_nbytes - units_nbytes)
        raise device_error(
            profile, hardware, budget.device_nbytes, budget.division.least, self._auto_logits()
        )

    def _planned_peak_nbytes(self) -> int:
        return play(self.profile, self.activations, self.channels()).peak_nbytes

    def _stored(self, recorded: Profile) -> Iterator[Stored]:
        """Yield the activations that leave device memory, and when; ``recorded`` is the trace's profile."""
        slots, position = {slot.key: slot for slot in recorded.slots}, self.trace.position
        after = {load.slot: load.after for load in self.activations.loads}
        backward = [operator.phase for operator in recorded.operators].index(Phase.BACKWARD)
        for key, place in self.activations.places.items():
            if place is Place.KEEP or key not in slots:
                continue
            slot, nbytes, tied = slots[key], slots[key].nbytes, after.get(key, key)
            if place is Place.NVME and not self.machine.on_accelerator:
                nbytes = directly_moved_nbytes(nbytes)
            load_at = slots[tied].unpacked_at if tied in slots else backward
            yield Stored(
                nbytes, int(position[slot.packed_at]), int(position[load_at]),
                int(position[slot.unpacked_at]), place is Place.NVME,
            )  # fmt: skip

    # --- the record --------------------------------------------------------------------------

    def _record(self) -> tuple[StepTrace, Profile]:
        """Return one micro-batch: its trace, and its profile."""
        model, train = self.model, self.recipe.train
        logits = self._auto_logits() or self.recipe.memory.logits
        batch = Batch((train.batch_size, self.recipe.model.seq_len), logits, self.recipe.data.packing)
        record = model.record(batch, self.activations)
        streaming = {u.index: u.gathered_nbytes for u, s in zip(model.units, self.placed) if s.streams}
        together = train.accumulate if self.layered else 1
        trace = play_record(record, model.units, model.of_leaves, streaming, self.divide().window, together)
        times = trace.operator_s(self.rates)
        if model.times is not None:
            operations = [row.operation for row in record.rows]
            model.times.measure(map(Candidate, operations, times.tolist(), trace.nbytes.tolist()))
            trace = replace(trace, measured_s=np.array([model.times.of(each) for each in operations]))
            times = trace.operator_s(self.rates)
        return trace, record.profile(times.tolist())

    def _auto_logits(self) -> Mode | None:
        """Return how the logits of a micro-batch are computed; None: that is not left to memory."""
        recipe, head = self.recipe, find_head(self.model.module)
        if recipe.memory.logits != "auto" or head is None:
            return None
        rows, width = recipe.train.batch_size * recipe.model.seq_len, cast(int, head.out_features)
        least = least_nbytes(rows, width, DTYPES[self.dtype].itemsize, trains=True)
        of_pass = self.device_nbytes  # what a pass may take beside units, as in the runtime's executor
        if self.policy == "plan" and self.budget.device_nbytes is not None:
            of_pass = self.budget.device_nbytes - self.budget.division.least
        return "whole" if least <= of_pass else "slices"


def dry_run(
    recipe: Recipe, machine: Machine, ranks: int, like: DryRun | None = None, *, here: bool = False,
    built: Recipe | None = None,
) -> DryRun:  # fmt: skip
    """Build and record the model of ``recipe`` on one of ``ranks`` ranks of ``machine``.

    Args:
        here: It is this machine: operators are timed.
        built: The recipe with the budgets that the sizes of units follow from, where ``recipe`` has budgets
            that were derived later; None: ``recipe``.
        like: A dry run; if it has the same model, on as many ranks, that is not built and recorded again.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built, or its forward depends on values.
    """
    return DryRun(*_built(recipe, machine, ranks, like, here, built or recipe))


def shapes_of(recipe: Recipe, machine: Machine, ranks: int) -> tuple[UnitShape, ...]:
    """Return the units of :func:`dry_run`, without recording a step.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built.
    """
    return Layout(*_built(recipe, machine, ranks, None, False, recipe)).read_where_they_lie()


def _built(
    recipe: Recipe, machine: Machine, ranks: int, like: DryRun | None, here: bool, built: Recipe
) -> tuple[Target, ModelWithoutValues]:
    """Return what is planned for, and the model: that of ``like`` if it is the same one."""
    dtype = machine.choose_dtype() if recipe.train.dtype == "auto" else recipe.train.dtype
    target, nbytes = Target(recipe, machine, ranks, dtype), built.memory.device
    if nbytes is None and machine.on_accelerator:
        nbytes = machine.devices.memory
    sizes = CutSizes.of(built.partition.tile, nbytes, ranks, on_accelerator=machine.on_accelerator)
    if like is not None and like.model.sizes == sizes and _model_of(like) == _model_of(target):
        return target, like.model
    times = OperatorTimes.of_rank(target.local, recipe.train.threads) if here else None
    return target, ModelWithoutValues(recipe, ranks, DTYPES[dtype], sizes, times)


def _model_of(target: Target) -> tuple[object, ...]:
    """Return all that a model follows from, besides the sizes of units."""
    recipe = target.recipe
    where = target.ranks, target.dtype, target.machine.on_accelerator
    return recipe.model, recipe.lora, recipe.partition, *where
