"""A recipe's model without values: its units, its budgets and one recorded micro-batch.

[Note: nothing is read and nothing computed]
The model is built on the meta device, from ``config.json`` alone, and cut by the runtime's own builder. One
micro-batch then runs on fake tensors, which have shapes and no memory: torch's own operators say what they
would make, the runtime's own hooks and prefetcher what units they use. So the trace is that of the runtime,
whatever the model does. A model whose forward depends on values (experts in a Python loop) cannot.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from infinity.activations.logits import Mode, find_head, least_nbytes
from infinity.activations.store import directly_moved_nbytes
from infinity.api.init import units_of
from infinity.comm.ranks import Ranks
from infinity.core.budget import STAGED_CHUNKS, DeviceBudget, left_for_states, piece_nbytes
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import aligned
from infinity.core.plan import ActivationPlan, Hardware, Place, Profile
from infinity.device.machine import DTYPES
from infinity.engine.config import EngineConfig
from infinity.engine.device_budget import UnitBudget, UnitsInUse
from infinity.engine.executor import reduction_dtype
from infinity.engine.schedule import find_blocks
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
from infinity.predict.recording import Played, Subject
from infinity.predict.recording import play as play_record
from infinity.recipes.recipe import Recipe
from infinity.shards.base import BaseBuffers
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

#: Device memory that the runtime's context and libraries take beside budgets (bytes).
CONTEXT_NBYTES = 2**30


@dataclass(frozen=True)
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
    def reduce_dtype(self) -> torch.dtype:
        """Return the dtype of the gradient reduction, if there are several ranks."""
        return reduction_dtype(EngineConfig(partition=self.recipe.partition), DTYPES[self.dtype])


@dataclass(frozen=True)
class DryRun(Target):
    """The model, its budgets and its trace: all that a plan is made from.

    Attributes:
        units: The units, with their homes.
        division: The division of the device budget.
        resident_nbytes: Host memory that shards may take, of ``host_nbytes``.
        chunk_numel: Elements that an update stages at one time; ``staged_chunks`` of them.
        spilled: Units whose gradients wait on NVMe.
        activations: The plan that follows from ``policy``.
    """

    units: tuple[UnitShape, ...]
    trace: StepTrace
    division: DeviceBudget
    resident_nbytes: int
    chunk_numel: int
    staged_chunks: int
    spilled: frozenset[int]
    profile: Profile
    activations: ActivationPlan
    _model: ModelWithoutValues

    def changed(self, recipe: Recipe, machine: Machine) -> "DryRun":
        """Return the same model under another recipe, or on a machine with as many devices.

        Raises:
            BudgetError: A budget is too small for it.
        """
        if recipe.memory.device != self.recipe.memory.device:  # sizes of units may follow from it
            return dry_run(recipe, machine, self.ranks, self, here=self._model.times is not None)
        return _Planner(Target(recipe, machine, self.ranks, self.dtype), self._model).result()

    def least_host_nbytes(self) -> int:
        """The least ``memory.host`` with which the model can be trained."""
        if not self.recipe.memory.nvme:
            return all_resident_nbytes(self.units)
        low, high = 0, self.host_nbytes
        while high - low > max(4096, high // 256):
            middle = (low + high) // 2
            memory = replace(self.recipe.memory, host=max(1, middle), resident=False)
            try:
                recipe = replace(self.recipe, memory=memory)
                _Planner(Target(recipe, self.machine, self.ranks, self.dtype), self._model)
            except BudgetError:
                low = middle
            else:
                high = middle
        return high

    def least_activations_nbytes(self) -> int:
        """The least that activations take beside units under the policy."""
        if self.policy != "plan":
            return self.trace.peak_nbytes
        return smallest_budget(self.profile, _Planner(self, self._model).channels())

    @property
    def setup(self) -> StepSetup:
        """Return what the clock needs besides the trace."""
        memory = self.recipe.memory
        piece = piece_nbytes(self.host_nbytes - self.resident_nbytes)
        return StepSetup(
            units=self.units, rates=self.rates, division=self.division, ranks=self.ranks,
            on_accelerator=self.machine.on_accelerator,
            micro_batches=self.micro_batches, early=memory.versions == 2,
            clips=self.recipe.optim.max_grad_norm is not None, chunk_numel=self.chunk_numel,
            staged_chunks=self.staged_chunks, piece_nbytes=piece if self.machine.on_accelerator else None,
            reduce_itemsize=self.reduce_itemsize, spilled=self.spilled,
        )  # fmt: skip

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of gradients that wait on NVMe in each step."""
        return sum(self.units[index].shard_numel for index in self.spilled) * self.reduce_itemsize

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of activations that are on NVMe when backward begins."""
        return sum(aligned(each.nbytes) for each in self.trace.stored if each.on_nvme)

    @property
    def reduce_itemsize(self) -> int:
        """Bytes per element of a reduced gradient."""
        return (self.reduce_dtype if self.ranks > 1 else DTYPES[self.dtype]).itemsize

    @property
    def notes(self) -> Sequence[str]:
        """Lines for people about what the plan takes for granted."""
        return self._model.notes

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)


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
    return _planner(recipe, machine, ranks, like, here, built or recipe).result()


def shapes_of(recipe: Recipe, machine: Machine, ranks: int) -> tuple[UnitShape, ...]:
    """Return the units of :func:`dry_run`, without recording a step.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built.
    """
    return _planner(recipe, machine, ranks, None, False, recipe).read_where_they_lie()


def _planner(
    recipe: Recipe, machine: Machine, ranks: int, like: DryRun | None, here: bool, built: Recipe
) -> "_Planner":
    dtype = machine.choose_dtype() if recipe.train.dtype == "auto" else recipe.train.dtype
    target, sizes = Target(recipe, machine, ranks, dtype), _cut_sizes(built, machine, ranks)
    if like is not None and like._model.sizes == sizes and _model_of(like) == _model_of(target):
        return _Planner(target, like._model)
    times = OperatorTimes.of_rank(target.local, recipe.train.threads) if here else None
    return _Planner(target, ModelWithoutValues(target.recipe, target.ranks, DTYPES[dtype], sizes, times))


def _model_of(target: Target) -> tuple[object, ...]:
    """Return all that a model follows from, besides the sizes of units."""
    recipe = target.recipe
    where = target.ranks, target.dtype, target.machine.on_accelerator
    return recipe.model, recipe.lora, recipe.partition, *where


def _cut_sizes(recipe: Recipe, machine: Machine, ranks: int) -> CutSizes:
    nbytes = recipe.memory.device
    if nbytes is None and machine.on_accelerator:
        nbytes = machine.devices.memory
    return CutSizes.of(recipe.partition.tile, nbytes, ranks, on_accelerator=machine.on_accelerator)


# --- budgets and the record --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One micro-batch: its trace and its profile, and its slots as the prefetcher's events place them."""

    trace: StepTrace
    profile: Profile
    played: Played


class _Planner:
    """Divides budgets and records, as the runtime does.

    Attributes:
        units: The units, with their homes.
        budget: Divided anew when more is known of a step.
    """

    def __init__(self, target: Target, model: ModelWithoutValues) -> None:
        self._target, self._model = target, model
        device = torch.device("cuda" if target.machine.on_accelerator else "cpu")
        self._ranks = Ranks(0, target.ranks, device)
        self._storage = Storage(target.recipe.memory, target.host_nbytes, DTYPES[target.dtype], device)
        self._storage.close()  # only its arithmetic is wanted
        self._tiers = Tiers(self._storage, self._ranks, target.reduce_dtype)
        self.units = self._place_units()
        self.budget = self._divide()

    def result(self) -> DryRun:
        """Record a step, and plan its activations."""
        target = self._target
        plan = ActivationPlan("recompute" if target.policy == "recompute" else "keep")
        with self._model.faked() as module:
            recorded = self._record(module, plan)
            profile = recorded.profile
            if target.policy in ("plan", "offload"):
                plan = self._choose(profile)
                self.divide_beside(profile, plan)
                if plan.recomputed:
                    recorded = self._record(module, plan)
        trace = recorded.trace
        if plan.places:
            peak = play(profile, plan, self.channels()).peak_nbytes  # without what has left
            trace = replace(self._with_stored(trace, recorded.played, plan), peak_nbytes=peak)
        if target.layered:
            trace = replace(trace.scaled(target.recipe.train.accumulate), peak_nbytes=trace.peak_nbytes)
        budget, storage = self.budget, self._storage
        if budget.asks_what_a_step_leaves:
            left = target.device_nbytes - budget.division.total - trace.peak_nbytes
            budget.divide_after_step(left_for_states(left, target.device_nbytes, trace.peak_nbytes))
        room = 0
        if not target.machine.on_accelerator:
            room = target.host_nbytes - sum(u.resident_nbytes for u in self.units if not u.on_nvme)
        return DryRun(
            target.recipe, target.machine, target.ranks, target.dtype,
            units=self.read_where_they_lie(), trace=trace, division=self._division,
            resident_nbytes=storage.resident_nbytes, chunk_numel=storage.chunk_numel,
            staged_chunks=max(STAGED_CHUNKS, room // storage.chunk_nbytes), spilled=budget.spilled,
            profile=profile, activations=plan, _model=self._model,
        )  # fmt: skip

    # --- units and budgets -------------------------------------------------------------------

    def _place_units(self) -> tuple[UnitShape, ...]:
        model, layout, drives = self._model, self._storage.layout, bool(self._target.recipe.memory.nvme)
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
                host_gradient_nbytes=self._tiers.gradient_nbytes(unit) if self._ranks.on_accelerator else 0,
                params=sum(segment.numel for segment in unit.segments),
                trainable=bool(unit.trainable),
                stored=self._stored_shape(unit),
            )
            for unit in model.units
        ]
        resident_nbytes = self._storage.resident_nbytes
        if self._has_base:
            resident_nbytes = max(0, resident_nbytes - self._base_buffers.all_nbytes)
        placed = choose_homes(shapes, resident_nbytes, drives=drives, alone_on_cpu=self._ranks.alone_on_cpu)
        for unit, shape in zip(model.units, placed, strict=True):
            unit.home = Home(Tier.NVME if shape.on_nvme else Tier.HOST)
        return placed

    def _stored_shape(self, unit: Unit) -> StoredShape | None:
        form, values = unit.stored, self._model.values
        if form is None:
            return None
        decode = values.decoding(unit.index, on_accelerator=self._ranks.on_accelerator)
        return StoredShape(form.nbytes, form.shard_nbytes, values.stored[unit.index][1], *decode)

    @property
    def _has_base(self) -> bool:
        return self._model.values.base is not None and bool(self._target.recipe.memory.nvme)

    @property
    def _base_buffers(self) -> BaseBuffers:
        return BaseBuffers.within(self._target.host_nbytes)

    def read_where_they_lie(self) -> tuple[UnitShape, ...]:
        """The units, and what is read of those that lie in a checkpoint."""
        model, host = self._model, self.budget.host
        found = list(self.units)
        for index in model.values.mapped if self._has_base else ():
            unit = model.units[index]
            if unit.home.tier is Tier.NVME and not unit.trainable:
                piece = unit.shard_nbytes if host is None else min(unit.shard_nbytes, host.piece)
                nbytes = model.values.read_nbytes(unit, piece, self._base_buffers.nbytes)
                found[index] = replace(found[index], base_nbytes=nbytes)
        return tuple(found)

    def _divide(self) -> UnitBudget:
        target, model = self._target, self._model
        memory, clips = target.recipe.memory, target.recipe.optim.max_grad_norm is not None
        recomputes = target.policy in ("recompute", "plan") and not target.layered  # that has whole blocks
        budget = UnitBudget(
            model.units, model.leaves, UnitsInUse([model.module], model.units, recomputes=recomputes),
            self._ranks, self._tiers, memory.device, target.device_nbytes // 2,
            shared=target.policy == "plan", early=not clips and memory.versions == 2, updates_nbytes=0,
            states=memory.updates != "host",
        )  # fmt: skip
        if target.micro_batches > 1:
            budget.divide_again(accumulates=True)
        return budget

    @property
    def _division(self) -> DeviceBudget:
        """Return how the device budget is divided, with the window that a layer schedule has."""
        if not self._target.layered:
            return self.budget.division
        blocks = find_blocks(self._model.module)
        window = self.budget.window_for(units_of(blocks, self._model.units)[0], str(blocks))
        return replace(self.budget.division, window=window)

    def divide_beside(self, profile: Profile, plan: ActivationPlan) -> None:
        """Give units what planned activations leave of ``memory.device``."""
        if self.budget.device_nbytes is not None and self._target.policy == "plan":
            self.budget.divide_beside(play(profile, plan, self.channels()).peak_nbytes)

    # --- activations -------------------------------------------------------------------------

    def channels(self) -> Hardware:
        """The channels of activations, and the host memory that they may take."""
        target, given = self._target, self._target.rates.channels
        if not target.recipe.memory.nvme:
            given = replace(given, read_bytes_per_s=0.0, write_bytes_per_s=0.0, mixed_bytes_per_s=0.0)
        host_nbytes = target.host_nbytes - self._storage.resident_nbytes if self._ranks.on_accelerator else 0
        return replace(given, host_nbytes=max(0, host_nbytes))

    def _choose(self, profile: Profile) -> ActivationPlan:
        """The plan that the runtime would make from this profile."""
        hardware, budget = self.channels(), self.budget
        if self._target.policy == "offload":
            if not self._target.recipe.memory.nvme:
                wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
                raise SettingError("memory.activations", "offload", wanted)
            return POLICIES["offload"](profile, hardware, None)
        if budget.device_nbytes is None:
            return POLICIES["plan"](profile, hardware, None)
        for units_nbytes in dict.fromkeys((budget.division.total, budget.division.least)):
            with suppress(BudgetError):
                return POLICIES["plan"](profile, hardware, budget.device_nbytes - units_nbytes)
        least, logits = budget.division.least, self._auto_logits()
        raise device_error(profile, hardware, budget.device_nbytes, least, logits)

    def _with_stored(self, trace: StepTrace, played: Played, plan: ActivationPlan) -> StepTrace:
        after = {load.slot: load.after for load in plan.loads}
        stored = []
        for key, place in plan.places.items():
            if place is Place.KEEP or key not in played.packs or key not in played.asks:
                continue
            packed_at, nbytes = played.packs[key]
            if place is Place.NVME and not self._ranks.on_accelerator:
                nbytes = directly_moved_nbytes(nbytes)
            tied = after.get(key, key)
            load_at = played.backward_at if tied is None else played.asks.get(tied, played.backward_at)
            stored.append(Stored(nbytes, packed_at, load_at, played.asks[key], place is Place.NVME))
        return replace(trace, stored=tuple(stored))

    # --- the record --------------------------------------------------------------------------

    def _record(self, module: Any, plan: ActivationPlan) -> _Recorded:
        target, model, train = self._target, self._model, self._target.recipe.train
        tokens = train.batch_size, target.recipe.model.seq_len
        subject = Subject(
            model=module, units=model.units, leaves=model.leaves, dtype=DTYPES[target.dtype],
            nbytes={u.index: u.gathered_nbytes for u, s in zip(model.units, self.units) if s.streams},
            window_nbytes=self._division.window, tokens=tokens,
            logits=self._auto_logits() or target.recipe.memory.logits, packing=target.recipe.data.packing,
        )  # fmt: skip
        record = model.record(subject, plan)
        played = play_record(record, subject)
        flops, nbytes = (np.array(column, dtype=float) for column in zip(*(row[:2] for row in record.rows)))
        trace = StepTrace(
            events=played.events, begun=played.begun, completed=played.completed,
            position=played.position, flops=flops, nbytes=nbytes,
            fp32=np.array([row.fp32 for row in record.rows], dtype=bool),
            model_flops=float(flops.sum()) - record.again_flops, tokens=math.prod(tokens),
            peak_nbytes=record.peak_nbytes(
                train.accumulate if target.layered else 1, apart=target.recipe.data.packing is not None
            ),
        )  # fmt: skip
        times = trace.operator_s(target.rates).tolist()
        if model.times is not None:
            operations = [row.operation for row in record.rows]
            model.times.measure(map(Candidate, operations, times, nbytes.tolist()))
            trace = replace(trace, measured_s=np.array([model.times.of(each) for each in operations]))
            times = trace.operator_s(target.rates).tolist()
        return _Recorded(trace, record.profiled.profile(times, 0.0), played)

    def _auto_logits(self) -> Mode | None:
        """Return how the logits of a micro-batch are computed; None: that is not left to memory."""
        recipe, head = self._target.recipe, find_head(self._model.module)
        if recipe.memory.logits != "auto" or head is None:
            return None
        rows, width = recipe.train.batch_size * recipe.model.seq_len, cast(int, head.out_features)
        least = least_nbytes(rows, width, DTYPES[self._target.dtype].itemsize, trains=True)
        return "whole" if least <= self._pass_nbytes() else "slices"

    def _pass_nbytes(self) -> int:
        """Return what a pass may take beside units, as the runtime's executor does."""
        if self._target.policy != "plan" or self.budget.device_nbytes is None:
            return self._target.device_nbytes
        return self.budget.device_nbytes - self.budget.division.least
