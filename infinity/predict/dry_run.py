"""Runs a recipe's model without values, for its units, its budgets and one recorded micro-batch.

[Note: nothing is read and nothing computed]
The model is built on the meta device from ``config.json`` alone, and cut by the runtime's own builder. One
micro-batch then runs on fake tensors, which have shapes and no memory: torch says what operators would make,
the runtime's own hooks and prefetcher which units they use. A model whose forward depends on values (experts
in a Python loop) cannot be planned.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from infinity.activations.logits import Mode, find_head, least_nbytes
from infinity.activations.store import directly_moved_nbytes
from infinity.activations.tensor_cache import LEAST_NBYTES
from infinity.comm.ranks import Ranks, shares_host
from infinity.comm.shared import NodeMemory
from infinity.core.budget import STAGED_CHUNKS, DeviceBudget, left_for_states, piece_nbytes
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import aligned, format_nbytes
from infinity.core.plan import ActivationPlan, Hardware, Phase, Place, Profile
from infinity.device.machine import DTYPES
from infinity.device.memory import Lease
from infinity.engine.device_budget import UnitBudget
from infinity.engine.executor import EngineConfig, reduction_dtype
from infinity.engine.schedule import Blocks, check_model
from infinity.partition.builder import CutSizes
from infinity.partition.unit import Home
from infinity.planner.passing import PassingPlan, Rooms, plan_passing
from infinity.planner.search import device_error, simple_plan
from infinity.planner.simulator import play
from infinity.predict.machines import Machine, RankRates, rank_rates
from infinity.predict.model import ModelWithoutValues
from infinity.predict.operators import times_of_rank
from infinity.predict.play import play_step
from infinity.predict.recording import MANY_TOKENS, Batch, Record, moves
from infinity.predict.step import StepCost, StepSetup, StepTrace, Stored, UnitShape, choose_homes
from infinity.recipes.objectives import OBJECTIVES
from infinity.recipes.recipe import Recipe
from infinity.shards.base import BaseBuffers
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

#: Device memory that the runtime's context and libraries take beside budgets (bytes).
CONTEXT_NBYTES = 2**30
DAY_S = 86_400.0
#: What a plan may lack.
DEVICE_MEMORY, HOST_MEMORY, DRIVES = "of device memory", "of host memory", "on the drives of a node"


class Layout:
    """Holds a model's units with their homes on one rank, and its budgets, divided as the runtime does."""

    def __init__(self, model: ModelWithoutValues, recipe: Recipe, machine: Machine) -> None:
        self.model, self.recipe, self.machine = model, recipe, machine
        memory, dtype, ranks = recipe.memory, DTYPES[model.dtype], model.ranks
        self.local = max(1, ranks // machine.nodes.count)  # ranks of a node
        self.host_nbytes = memory.host or machine.host.memory // self.local // 2
        #: Device memory that budgets may have.
        self.device_nbytes = machine.host.memory // self.local
        if machine.on_accelerator:
            self.device_nbytes = (machine.devices.memory or 0) - CONTEXT_NBYTES
        #: Policy of activations.
        self.policy = memory.policy
        beside = self.layered and machine.on_accelerator  # in host memory there is a place, too
        if memory.activations == "offload" and not (memory.nvme or beside):
            wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
            raise SettingError("memory.activations", "offload", wanted)
        if self.layered:
            check_model(model.module, Blocks.of(model.module))
            self.policy = "recompute"
        #: Times that a step goes through the trace; a layer schedule takes all micro-batches at once.
        self.micro_batches = 1 if self.layered else recipe.micro_batches
        rank = Ranks(
            0, ranks, torch.device("cuda" if machine.on_accelerator else "cpu"),
            memory=NodeMemory(0, ranks) if self.shares and ranks > 1 else None,
        )  # fmt: skip
        self.storage = Storage(memory, self.host_nbytes, dtype, rank.device, recipe.optim.rule)
        self.storage.stack.close()  # its arithmetic alone is wanted
        reduced = reduction_dtype(EngineConfig(partition=recipe.partition), dtype)
        self.reduce_itemsize = (reduced if ranks > 1 else dtype).itemsize
        tiers = Tiers(self.storage, rank, reduced)
        self.placed = self._place_units(tiers, rank)
        self.budget = UnitBudget(
            model.units, model.leaves, [model.module], tiers, self.device_nbytes // 2,
            policy="keep" if self.layered else self.policy,  # the layer schedule has whole blocks
            clips=recipe.clips, updates_nbytes=0,
        )  # fmt: skip
        if self.micro_batches > 1:
            self.budget.divide_again(accumulates=True)

    @property
    def rates(self) -> RankRates:
        train, state = self.recipe.train, self.storage.layout
        sums = train.accumulate_dtype
        return rank_rates(self.machine, self.model.ranks, self.model.dtype, train.threads, state, sums)

    @property
    def shares(self) -> bool:
        """Return whether ranks of a node have weights in host memory once."""
        return shares_host(self.recipe.memory.shared, self.machine.nodes.count, peers=self.machine.peers)

    @property
    def layered(self) -> bool:
        """Return whether each block takes all micro-batches before the next one."""
        return self.recipe.train.schedule == "layer"

    @property
    def group(self) -> int:
        """Return how many micro-batches go through a block with experts together."""
        accumulate = self.recipe.train.accumulate
        return min(self.recipe.train.group or accumulate, accumulate)

    def _place_units(self, tiers: Tiers, rank: Ranks) -> tuple[UnitShape, ...]:
        model, layout, drives = self.model, self.storage.layout, bool(self.recipe.memory.nvme)
        shapes = []
        for unit in model.units:
            numel, weight_nbytes = unit.shard_numel, layout.weight_nbytes(unit.shard_numel)
            stored = model.values.stored.get(unit.index) if drives else None
            form, read_nbytes, decode_nbytes, operators = stored or (None, weight_nbytes, 0, 0)
            unit.stored, unit.home = form, Home(Tier.HOST)
            unit.home.bare = drives and model.values.mapped.get(unit.index, False)
            shape = UnitShape(
                name=unit.name,
                shard_numel=numel,
                nbytes=unit.nbytes,
                weight_nbytes=weight_nbytes,
                state_nbytes=layout.state_nbytes(numel),
                moved_nbytes=weight_nbytes if form is None else form.shard_nbytes,
                read_nbytes=read_nbytes,
                kept_nbytes=tiers.resident_nbytes_of(unit, moments=False),
                trained_nbytes=tiers.trained_nbytes(unit),
                params=sum(segment.numel for segment in unit.segments),
                trainable=bool(unit.trainable),
                routed=unit.routed,
                in_checkpoint=form is not None,
                stored_nbytes=0 if form is None else form.nbytes,
                decode_nbytes=decode_nbytes,
                decode_operators=operators,
            )
            shapes.append(shape)
        trained = [(tiers.gradient_nbytes(u), u.shard_nbytes) for u in model.units if u.trainable]
        planned, buffers = self.policy in ("plan", "offload"), self._base_buffers
        aside = tiers.set_aside_sums(model.units) + (0 if buffers is None else buffers.all_nbytes)
        if aside > self.host_nbytes:
            raise BudgetError(
                f"what {self.storage.rule.name} keeps of matrices, and buffers, take {format_nbytes(aside)} "
                f"of host memory on every rank; memory.host is {format_nbytes(self.host_nbytes)}",
                "memory.host",
            )
        built = max(0, self.storage.resident_nbytes - aside)
        settled = max(0, self.storage.settled_nbytes(trained, planned=planned) - aside)
        in_place = rank.host_is_whole and not rank.on_accelerator
        placed = choose_homes(shapes, built, settled, drives=drives, in_place=in_place)
        for unit, shape in zip(model.units, placed, strict=True):
            unit.home = Home(Tier.NVME if shape.on_nvme else Tier.HOST)
            unit.home.bare = model.values.mapped.get(unit.index, False) and not unit.trainable
            if unit.stored is not None and not shape.on_nvme:
                unit.home.stored_form = cast(Lease, SimpleNamespace(nbytes=unit.stored.shard_nbytes))
        return placed

    @property
    def _base_buffers(self) -> BaseBuffers | None:
        has_base = self.model.values.base is not None and self.recipe.memory.nvme
        return BaseBuffers.within(self.host_nbytes) if has_base else None

    def read_where_they_lie(self) -> tuple[UnitShape, ...]:
        """Return the units, with the bytes that fetches read of those that lie in a checkpoint."""
        model, host, buffers = self.model, self.budget.host, self._base_buffers
        if buffers is None:
            return self.placed
        found = list(self.placed)
        for index in model.values.mapped:
            unit = model.units[index]
            if unit.home.tier is Tier.NVME and not unit.trainable:
                piece = unit.shard_nbytes if host is None else min(unit.shard_nbytes, host.piece)
                nbytes = model.values.read_nbytes(unit, piece, buffers.nbytes)
                found[index] = replace(found[index], read_nbytes=nbytes, in_checkpoint=True)
        return tuple(found)

    def divide(self) -> DeviceBudget:
        """Return the division of the device budget, with the window that a layer schedule needs."""
        if not self.layered:
            return self.budget.division
        whole, _, described = self._held
        return replace(self.budget.division, window=self.budget.window_for(whole, described))

    @property
    def _held(self) -> tuple[list[set[int]], list[set[int]], str]:
        """Return what :meth:`infinity.engine.schedule.Blocks.held` says of a layer schedule."""
        model, groups = self.model, self.group < self.recipe.train.accumulate
        return Blocks.of(model.module).held(model.units, model.expert_blocks, groups=groups)

    def channels(self) -> Hardware:
        """Return the channels of activations, and the host memory that they may take."""
        given = self.rates.channels
        if not self.recipe.memory.nvme:
            given = replace(given, read_bytes_per_s=0.0, write_bytes_per_s=0.0, mixed_bytes_per_s=0.0)
        on_accelerator = self.machine.on_accelerator
        host_nbytes = self.host_nbytes - self.storage.resident_nbytes if on_accelerator else 0
        return replace(given, host_nbytes=max(0, host_nbytes))


class DryRun(Layout):
    """Holds the model, its budgets and its trace: all that a plan is made from, and what its step costs.

    ``trace`` is one micro-batch, or all of them where they go through each block together; ``profile`` one.

    ``sequences``: of a micro-batch that is recorded, and scaled; None: as many as it has. ``like``: a run of
    the same model, near whose plan for activations theirs is searched, and whose record of it is scaled.
    """

    passing: PassingPlan | None = None  # where what blocks return waits, in a layer schedule
    _micro_batch: Record

    def __init__(
        self, model: ModelWithoutValues, recipe: Recipe, machine: Machine, sequences: int | None = None,
        like: "DryRun | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(model, recipe, machine)
        self._sequences = sequences or recipe.rows
        self._again: int = like._again if like else self._sequences  # of a record in which blocks run again
        self.activations = ActivationPlan("recompute" if self.policy == "recompute" else "keep")
        with model.faked():
            self._unplanned, self._profile = self._record(self._sequences)
            if self.policy in ("plan", "offload"):
                self.activations = self._choose_plan(like.activations if like else None)
                if self.policy == "plan" and self.budget.device_nbytes is not None:  # units get the rest
                    self.budget.divide_beside(self._planned_peak_nbytes)
        if self.budget.asks_what_a_step_leaves:
            left = self.device_nbytes - self.budget.division.total - self.peak_nbytes
            states = left_for_states(left, self.device_nbytes, self.peak_nbytes)
            self.budget.divide_after_step(states)
        # Now: the next plan of the same model gives its units other homes.
        self.units, self.division = self.read_where_they_lie(), self.divide()

    @functools.cached_property
    def trace(self) -> StepTrace:
        """Return the trace; what a plan for activations recomputes is recorded only now."""
        trace, recorded, more = self._unplanned, self._profile, 1.0
        if self.activations.recomputed:
            with self.model.faked():
                trace, recorded = self._record(self._again)
            more = self._sequences / self._again
        if self.activations.places:
            stored = tuple(self._stored(recorded(), trace.position, more))
            trace = replace(trace, stored=stored, peak_nbytes=self._planned_peak_nbytes)
        return self._taken_together(trace) if self.layered else trace

    @property
    def peak_nbytes(self) -> int:
        """Return the most that the step's own storages take of device memory at one time."""
        return self._planned_peak_nbytes if self.activations.places else self.trace.peak_nbytes

    @functools.cached_property
    def profile(self) -> Profile:
        """Return the profile of a micro-batch; of one whose blocks recompute by a plan, without that."""
        return self._profile()

    def changed(self, recipe: Recipe, machine: Machine) -> "DryRun":
        """Return the same model under another recipe, or on a machine with as many devices.

        Another number of sequences in a micro-batch is scaled from those that were recorded, but where
        activations are planned, whose true sizes count. Units are those that the device's memory had made.
        """
        if recipe.memory.device != self.recipe.memory.device and not machine.on_accelerator:
            return dry_run(recipe, machine, self.model.ranks, self, here=self.model.times is not None)
        planned = recipe.memory.policy in ("plan", "offload")
        like = self if self.policy == "plan" and planned else None
        return DryRun(self.model, recipe, machine, None if planned else self._sequences, like)

    def least_host_nbytes(self) -> int:
        """Return the least ``memory.host`` with which the model can be trained (bytes)."""
        if not self.recipe.memory.nvme:
            return sum(unit.built_nbytes for unit in self.units)
        low, high = 0, self.host_nbytes
        while high - low > max(4096, high // 256):
            middle = (low + high) // 2
            memory = replace(self.recipe.memory, host=max(1, middle), resident=False)
            try:
                Layout(self.model, replace(self.recipe, memory=memory), self.machine)
            except BudgetError:
                low = middle
            else:
                high = middle
        return high

    @property
    def setup(self) -> StepSetup:
        """Return what the clock needs besides the trace."""
        memory, storage, on_accelerator = self.recipe.memory, self.storage, self.machine.on_accelerator
        room = 0
        if not on_accelerator:
            room = self.host_nbytes - sum(unit.resident_nbytes for unit in self.units if not unit.on_nvme)
        return StepSetup(
            units=self.units, rates=self.rates, division=self.division, ranks=self.model.ranks,
            on_accelerator=on_accelerator, micro_batches=self.micro_batches, early=memory.versions == 2,
            clips=self.recipe.clips, chunk_numel=storage.chunk_numel,
            staged_chunks=max(STAGED_CHUNKS, room // storage.chunk_nbytes),
            piece_nbytes=piece_nbytes(self.host_nbytes - storage.resident_nbytes) if on_accelerator else None,
            reduce_itemsize=self.reduce_itemsize, spilled=self.budget.spilled,
            together=tuple(map(frozenset, self._held[1])) if self.layered else (),
            of_others=self.model.of_others, whole=self.shares or self.model.ranks == 1,
        )  # fmt: skip

    @property
    def spilled_nbytes(self) -> int:
        """Return the bytes of gradients that wait on NVMe in each step."""
        return sum(self.units[index].shard_numel for index in self.budget.spilled) * self.reduce_itemsize

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)

    @functools.cached_property
    def cost(self) -> StepCost:
        return play_step(self.trace, self.setup)

    def least_s(self, compute_s: float | None = None, passes: int | None = None) -> float:
        """Return a bound on the seconds of a step, without playing it.

        It takes at least its compute, and what each channel takes for its bytes: weights that do not fit the
        window come once for each pass, states once a step. ``compute_s``: of a micro-batch, None: that of the
        plan, or what of it is sure; ``passes``: over the weights, None: two for each.
        """
        rates, times, setup = self.rates, self.micro_batches, self.setup
        if compute_s is None:
            compute_s = float(self._unplanned.times_s(rates).sum()) * self.recipe.micro_batches / times
        streaming = [unit for unit in self.units if unit.streams]
        all_nbytes = sum(unit.gathered_nbytes for unit in streaming) or 1
        # Between two passes what fits the window stays.
        weights = max(0.0, 1 - self.division.window / all_nbytes) * (passes or 2 * times)
        trained = [unit for unit in self.units if unit.trainable and unit.on_nvme]
        states = sum(unit.state_nbytes for unit in trained)
        read = weights * sum(unit.read_nbytes for unit in streaming if unit.on_nvme) + states
        wrote = states + sum(unit.weight_nbytes for unit in trained)
        gathering = [self.units[i] for i, unit in enumerate(self.units) if unit.streams and setup.gathers(i)]
        gathered = weights * sum(unit.stored_nbytes or unit.nbytes for unit in gathering)
        channels = [
            (read, rates.channels.read_bytes_per_s),
            (wrote, rates.channels.write_bytes_per_s),
            (gathered, rates.links_bytes_per_s),
        ]
        if self.machine.on_accelerator and not self.division.on_device:
            uploaded = weights * sum(setup.uploaded_nbytes(i) for i, u in enumerate(self.units) if u.streams)
            channels.append((uploaded, rates.channels.host_bytes_per_s))
        return max([compute_s * times, *(nbytes / rate for nbytes, rate in channels if rate > 0)])

    @property
    def tokens(self) -> int:
        """Return the tokens of a step on all ranks."""
        return self._unplanned.tokens * self.recipe.micro_batches * self.model.ranks

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.cost.step_s

    @property
    def flops_per_s(self) -> float:
        """Return the flops per second of one rank, without those of recomputation."""
        return self.trace.model_flops * self.micro_batches / self.cost.step_s

    @property
    def mfu(self) -> float:
        """Return ``flops_per_s`` as a share of the device's datasheet figure."""
        devices = self.machine.devices
        peak = devices.flops_per_s(self.model.dtype, self.recipe.train.accumulate_dtype) / devices.efficiency
        return self.flops_per_s / (peak * (1.0 if devices.per_node else 1 / self.model.ranks))

    def disk_nbytes(self) -> int:
        """Return the bytes on a node's drives: versions, commits, waiting gradients and activations."""
        memory = self.recipe.memory
        if not memory.nvme:
            return 0
        stays = any(not unit.on_nvme and unit.trainable for unit in self.units)
        places = memory.versions + (stays and memory.versions == 2)
        stored = (each for each in self.trace.stored if each.on_nvme and each.has_room)
        total = self.spilled_nbytes + sum(aligned(each.nbytes) for each in stored)
        for unit in self.units:
            if not unit.trainable:
                total += unit.weight_nbytes * (unit.on_nvme and not unit.in_checkpoint)
            elif unit.on_nvme:
                total += places * (unit.weight_nbytes + unit.state_nbytes)
            elif memory.versions == 2:
                total += 2 * (unit.weight_nbytes + unit.state_nbytes)
        return total * self.local

    def written_per_day(self) -> float:
        """Return the bytes written to the drives of a node in a day of training."""
        return self.cost.nbytes.get("NVMe write", 0) * self.local * DAY_S / self.cost.step_s

    def drives_last_s(self) -> float | None:
        """Return the seconds until the drives' endurance is used up; None: unknown, or never."""
        drives, written = self.machine.drives, self.written_per_day()
        if drives.written_bytes is None or not written or not drives.per_node:
            return None
        return drives.per_node * drives.written_bytes / written * DAY_S

    def over_nbytes(self) -> int:
        """Return the bytes of device memory that units and activations need beyond what there is."""
        return self.division.total + self.peak_nbytes - self.device_nbytes

    def missing(self) -> Iterator[str]:
        """Yield a line about each thing that the plan needs beyond what its machine has."""
        for part, nbytes in self.lacks().items():
            yield f"{format_nbytes(nbytes)} {part}"

    def lacks(self) -> dict[str, int]:
        """Return the bytes that the plan needs beyond what its machine has, by part."""
        drives, on_accelerator = self.machine.drives, self.machine.on_accelerator
        over = {DEVICE_MEMORY: self.over_nbytes() if on_accelerator else 0}
        host_nbytes = self.host_nbytes
        if not on_accelerator:  # what computes is there, too
            states = sum(unit.resident_nbytes for unit in self.units if not unit.on_nvme)
            host_nbytes = max(host_nbytes, states + self.division.total + self.peak_nbytes)
        over[HOST_MEMORY] = host_nbytes * self.local - self.machine.host.memory
        over[DRIVES] = self.disk_nbytes() - drives.per_node * drives.memory
        return {part: nbytes for part, nbytes in over.items() if nbytes > 0}

    def _choose_plan(self, like: ActivationPlan | None) -> ActivationPlan:
        profile, hardware, budget = self.profile, self.channels(), self.budget
        if self.policy == "offload":
            return simple_plan("offload", profile, hardware)
        if budget.device_nbytes is None:
            return self.model.planned(profile, hardware, None, like)
        for units_nbytes in dict.fromkeys((budget.division.total, budget.division.least)):
            with suppress(BudgetError):
                return self.model.planned(profile, hardware, budget.device_nbytes - units_nbytes, like)
        raise device_error(
            profile, hardware, budget.device_nbytes, budget.division.least, self._auto_logits()
        )

    @functools.cached_property
    def _planned_peak_nbytes(self) -> int:
        return play(self.profile, self.activations, self.channels()).peak_nbytes

    def _stored(self, recorded: Profile, position: np.ndarray, more: float) -> Iterator[Stored]:
        """Yield the activations that leave device memory, by what was recorded, scaled by ``more``."""
        slots = {slot.key: slot for slot in recorded.slots}
        after = {load.slot: load.after for load in self.activations.loads}
        backward = [operator.phase for operator in recorded.operators].index(Phase.BACKWARD)
        for key, place in self.activations.places.items():
            if place is Place.KEEP or key not in slots:
                continue
            slot, nbytes, tied = slots[key], round(more * slots[key].nbytes), after.get(key, key)
            if place is Place.NVME and not self.machine.on_accelerator:
                nbytes = directly_moved_nbytes(nbytes)
            load_at = slots[tied].unpacked_at if tied in slots else backward
            yield Stored(
                nbytes, int(position[slot.packed_at]), int(position[load_at]),
                int(position[slot.unpacked_at]), place is Place.NVME,
            )  # fmt: skip

    def _record(self, sequences: int) -> tuple[StepTrace, Callable[[], Profile]]:
        model, train = self.model, self.recipe.train
        logits = self._auto_logits() or self.recipe.memory.logits
        tokens = sequences, self.recipe.model.seq_len // train.sequence_ranks
        together = train.schedule == "layer" and model.has_experts
        routed = self.recipe.tokens * (self.group if together else 1)
        batch = Batch(
            tokens, logits, self.recipe.packing, self.machine.on_accelerator, model.times is not None,
            together, OBJECTIVES[train.task].head,
            routed=min(routed, MANY_TOKENS) if any(unit.routed for unit in model.units) else MANY_TOKENS,
        )  # fmt: skip
        record = model.record(batch, self.activations)
        streaming = {u.index: u.gathered_nbytes for u, s in zip(model.units, self.placed) if s.streams}
        trace = model.trace(record, streaming, self.divide().window)
        self._micro_batch = record
        times = trace.operator_s(self.rates)
        if model.times is not None:
            operations = [operation for *_, operation in record.rows]
            model.times.measure(zip(operations, times.tolist(), trace.nbytes.tolist(), strict=True))
            trace = replace(trace, measured_s=np.array([model.times.of(each) for each in operations]))
            times = trace.operator_s(self.rates)
        more = self.recipe.rows / sequences
        if more != 1:
            trace = replace(trace.scaled(more), peak_nbytes=round(more * trace.peak_nbytes))
        return trace, functools.partial(model.profile, record, tuple(times.tolist()))

    def _taken_together(self, trace: StepTrace) -> StepTrace:
        """Return the trace of all micro-batches, which go through each block together."""
        record, micro_batches, group = self._micro_batch, self.recipe.micro_batches, self.group
        spans, more = record.block_spans, trace.tokens / math.prod(record.batch.tokens)
        nbytes = round(more * max((span.returned for span in spans), default=0))
        rooms = self._rooms_between_blocks() if nbytes >= LEAST_NBYTES else Rooms(None)
        self.passing = passing = plan_passing(len(spans), micro_batches, nbytes, rooms)
        positions = trace.position.tolist()
        made = moves(spans, passing, positions.__getitem__, on_accelerator=self.machine.on_accelerator)
        as_recorded = replace(passing, nbytes=round(nbytes / more))
        return replace(
            trace.scaled(micro_batches, calls=micro_batches), stored=tuple(made),
            peak_nbytes=round(more * record.peak_nbytes(as_recorded, group)),
        )  # fmt: skip

    def _rooms_between_blocks(self) -> Rooms:
        """Return the room for what blocks return, from budgets; the runtime asks what is free."""
        memory, storage, host = self.recipe.memory, self.storage, self.budget.host
        device, free = self.device_nbytes - self.budget.division.total, 0
        if host is None:
            device -= self.host_nbytes
        else:
            chunks = STAGED_CHUNKS * storage.chunk_nbytes if memory.nvme else 0
            residents = sum(unit.resident_nbytes for unit in self.placed if not unit.on_nvme)
            free = self.host_nbytes - host.gradients - host.weights - host.staging - residents - chunks
        together = self.model.has_experts
        return Rooms.within(memory.activations, device, free, nvme=bool(memory.nvme), together=together)

    def _auto_logits(self) -> Mode | None:
        """Return how memory lets logits be computed; None: the recipe says it, or there is no head."""
        recipe, head = self.recipe, find_head(self.model.module)
        if recipe.memory.logits != "auto" or head is None:
            return None
        rows, width = recipe.tokens, cast(int, head.out_features)
        least = least_nbytes(rows, width, DTYPES[self.model.dtype].itemsize, trains=True)
        of_pass = self.device_nbytes  # what a pass may take beside units, as in the runtime's executor
        if self.policy == "plan" and self.budget.device_nbytes is not None:
            of_pass = self.budget.device_nbytes - self.budget.division.least
        return "whole" if least <= of_pass else "slices"


def dry_run(
    recipe: Recipe, machine: Machine, ranks: int | None = None, like: DryRun | None = None, *,
    here: bool = False, built: Recipe | None = None,
) -> DryRun:  # fmt: skip
    """Build and record the model of ``recipe`` on one of ``ranks`` ranks of ``machine``.

    Args:
        ranks: None: one for each device.
        like: A dry run; if its model is the same, that is not built and recorded again.
        here: It is this machine: operators are timed, in some seconds.
        built: The recipe whose budgets sizes of units follow from, if those of ``recipe`` were derived later.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built, or its forward depends on values.
    """
    if ranks is not None:
        machine = machine.with_ranks(ranks)
    before = None if like is None else like.model
    model = model_for(recipe, machine, ranks or machine.devices_in_all, before, here=here, built=built)
    return DryRun(model, recipe, machine)


def model_for(
    recipe: Recipe, machine: Machine, ranks: int, like: ModelWithoutValues | None = None, *,
    here: bool = False, built: Recipe | None = None,
) -> ModelWithoutValues:  # fmt: skip
    """Build the model of :func:`dry_run`, for plans of it; arguments and errors as there."""
    built = built or recipe
    dtype = machine.choose_dtype() if recipe.train.dtype == "auto" else recipe.train.dtype
    nbytes, on_accelerator = built.memory.device, machine.on_accelerator
    if nbytes is None and on_accelerator:
        nbytes = machine.devices.memory
    sizes = CutSizes.of(built.partition.tile, nbytes, ranks, on_accelerator=on_accelerator)
    cut = replace(recipe.partition, tile="auto")  # sizes follow from it
    adapters = [(name, task.lora) for name, task in recipe.tasks.items()]
    key = recipe.model, adapters, cut, bool(recipe.memory.nvme), ranks, dtype, on_accelerator
    if like is not None and like.key == (key, sizes):
        return like
    if like is not None and like.key[0] != key:
        like = None
    local = max(1, ranks // machine.nodes.count)
    times = times_of_rank(local, recipe.train.threads) if here else None
    model = ModelWithoutValues(recipe, ranks, dtype, sizes, times, on_accelerator=on_accelerator, like=like)
    model.key = key, sizes
    return model
