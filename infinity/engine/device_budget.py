"""Divides one model's device and host memory, and divides it again when more is known.

[Note: more gradients than before]
The first division expects one backward pass, in which the parameters that were trainable when the optimizer
was made get gradients. Under ``no_sync`` the gradients of all units wait for the next micro-batch, in device
memory or elsewhere, and a thawed unit has a gradient that was not counted. So the first ``no_sync``, and the
first forward with thawed weights, divide again, or raise with what is required.

[Note: units in use at one time]
A module's units are in use while the modules inside it run. A block that is recomputed in backward uses its
units until their gradients are complete or backward has passed them; one that is frozen in part has its
weights and its gradient until backward ends. So the window holds at least a module's own units with those of
the modules around it, and, where blocks are recomputed, the largest block. What is recomputed is known for
``memory.activations`` (a plan may recompute any block) and for transformers' ``gradient_checkpointing``,
which the next forward sees; what other code recomputes is not counted.

[Note: units beside activations]
Where activations are planned, ``memory.device`` holds both. Until a step has been profiled, units get at most
half of it, or the least that they need. The plan gets the rest, or, where that is too little, all but the
least that units need; units get back what the plan does not use, and only then do states move to the
accelerator. Where nothing is planned, states get what units leave of the recipe's ``memory.device``, or, if
that was derived, what the first step has left of the device's memory.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from infinity.activations.controller import recomputable_blocks
from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.config import MemoryConfig
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import format_nbytes, rounded
from infinity.device.accelerator import memory_nbytes
from infinity.device.machine import local_ranks, total_host_nbytes
from infinity.optim.rules import scratch_nbytes
from infinity.partition.unit import Unit, UnitIndex
from infinity.shards.tiers import Tiers


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Holds what a division counts on (bytes, and indices of units)."""

    ceiling: int  # the most that a derived budget may be, or that planned activations leave
    most: int | None  # that units may take with states; None: what activations take is not known yet
    shared: bool  # planned activations take a part of the total
    states: bool  # may be in an accelerator's memory
    trained: frozenset[int]  # units that get a gradient
    recomputes: bool  # blocks are recomputed in backward
    early: bool  # updates inside backward free their gradients
    accumulates: bool = False  # gradients wait for later micro-batches
    block: int = 0  # the least window, for a layer schedule


class UnitBudget:
    """Divides ``memory.device`` among gradients, updates and gathered units of one model.

    ``leaves`` are units that are gathered as one, by module, ``models`` modules that are not inside others. A
    derived ``memory.device`` is at most ``ceiling_nbytes``; activations with the ``policy`` plan take a part
    of it. If they are clipped (``clips``), gradients are kept until the step.
    ``updates_nbytes`` of an accelerator's memory are for updates, beside pools.
    """

    division: budget.DeviceBudget
    host: budget.HostBudget | None  # beside an accelerator

    def __init__(
        self, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]], models: Iterable[nn.Module],
        tiers: Tiers, ceiling_nbytes: int, *, policy: str, clips: bool, updates_nbytes: int,
    ) -> None:  # fmt: skip
        memory, self._updates_nbytes = tiers.storage.memory, updates_nbytes
        self._units, self._leaves, self._ranks, self._tiers = units, leaves, tiers.ranks, tiers
        self._nested: set[frozenset[int]] = set()  # in use at one time: see the note
        self._blocks: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        for model in models:
            self._find_nested(model, frozenset())
            for block in recomputable_blocks(model):
                self._blocks[block.module] = self._used_together(block.module.parameters())
        self.device_nbytes = total = memory.device  # None: derived
        shared = policy == "plan" and total is not None
        given = _Given(
            most=None if shared else total, shared=shared,
            states=memory.updates != "host" and self._ranks.on_accelerator and self._on_one_rank,
            ceiling=min(ceiling_nbytes, (total or 0) // 2) if shared else ceiling_nbytes,
            trained=self._trained_now(),
            recomputes=policy in ("recompute", "plan") or self._recomputes_now(),
            early=self._early(clips),
        )  # fmt: skip
        self._divide(given)

    def _find_nested(self, module: nn.Module, outer: frozenset[int]) -> None:
        inner = outer | self._used_together(module._parameters.values())
        if len(inner) > 2:  # any two have room
            self._nested.add(inner)
        for child in module.children():
            self._find_nested(child, inner)

    def _used_together(self, params: Iterable[nn.Parameter | None]) -> frozenset[int]:
        """Return the units that hold ``params``; of tiles, which are used one by one, only the first."""
        holding = self._units.holding(param for param in params if param is not None)
        return frozenset(unit.index for unit in holding if not any(s.first for s in unit.segments))

    def _recomputes_now(self) -> bool:
        return any(m.training and getattr(m, "gradient_checkpointing", False) for m in self._blocks)

    @property
    def pool_nbytes(self) -> int:
        """Return the bytes that gradients, updates and gathered units have together."""
        return self.division.total - self.division.states - self._updates_nbytes - self._decoding_nbytes

    @property
    def states_nbytes(self) -> int:
        """Return the bytes that states have on the accelerator, without what their updates take."""
        return self.division.states - self._scratch_nbytes if self.division.on_device else 0

    @property
    def _scratch_nbytes(self) -> int:
        return scratch_nbytes(max((unit.shard_numel for unit in self._units), default=0))

    @property
    def _decoding_nbytes(self) -> int:
        scratch = (unit.stored.scratch_nbytes for unit in self._units if unit.stored is not None)
        return max(scratch, default=0) if self._ranks.on_accelerator else 0

    @property
    def spilled(self) -> frozenset[int]:
        """Return units whose gradients wait on NVMe."""
        return frozenset(self.division.spilled if self.host is None else self.host.spilled)

    @property
    def hold_weights(self) -> bool:
        return self.division.hold_weights if self.host is None else self.host.weights > 0

    def divide_again(self, *, accumulates: bool) -> bool:
        """Divide anew if more gradients wait than were counted, and return whether ``division`` changed."""
        before = self._given
        now = replace(
            before, trained=before.trained | self._trained_now(),
            accumulates=before.accumulates or accumulates,
            recomputes=before.recomputes or self._recomputes_now(),
        )  # fmt: skip
        if now != before:
            self._divide(now)
        return now != before

    def _early(self, clips: bool) -> bool:
        return not clips and self._tiers.storage.memory.versions == 2 and self._on_one_rank

    @property
    def _on_one_rank(self) -> bool:
        """Whether a unit's update needs neither another rank nor the step's end."""
        rule = self._tiers.storage.rule
        return rule.in_one_pass or (self._ranks.world_size == 1 and not rule.in_turn)

    def clip(self, clips: bool) -> None:
        self._divide(replace(self._given, early=self._early(clips)))

    def divide_beside(self, activations_nbytes: int) -> None:
        """Divide what planned activations leave of ``memory.device``."""
        assert self.device_nbytes is not None
        left_nbytes = self.device_nbytes - activations_nbytes
        self._divide(replace(self._given, ceiling=left_nbytes, most=left_nbytes))

    @property
    def asks_what_a_step_leaves(self) -> bool:
        """Return whether :meth:`divide_after_step` would learn anything."""
        return self._given.states and self.device_nbytes is None and self._given.most is None

    def divide_after_step(self, left_nbytes: int) -> None:
        """Divide again with the device memory that a whole step has left, the same number on every rank."""
        most = min(self._given.ceiling, self.division.total + left_nbytes)
        self._divide(replace(self._given, most=most))

    def window_for(self, blocks: Sequence[set[int]], described: str) -> int:
        """Return the bytes of a window that holds any of ``blocks`` while all micro-batches go through it.

        Early updates lag less where that takes it, and more gradients wait on NVMe: ``division`` may change.
        """
        division, weights, trained, largest = self.division, 0, 0, 0
        for block in blocks:
            sizes = {i: unit.gathered_nbytes for i in block if self._tiers.streams(unit := self._units[i])}
            takes = (
                i for i in block & self._given.trained if self._takes_window(self._units[i], trainable=True)
            )
            own = [self._units[i].gathered_nbytes for i in takes]
            weights, trained = max(weights, sum(sizes.values())), max(trained, sum(own))
            largest = max(largest, *own, 0)
        # A block's gradients come together, after its last micro-batch. Of gradients that come one by one,
        # or wait as shards only, the budget has room for one unit's.
        full_gradients_wait = not division.early and self._ranks.world_size == 1
        gradients = 0 if full_gradients_wait and not division.spilled else trained - largest
        more_may_spill = division.total - division.least if division.spilled else 0
        free = division.window + division.lag + more_may_spill
        if weights + gradients > free and division.on_device:  # states give way
            self._divide(replace(self._given, states=False))
            return self.window_for(blocks, described)
        if weights + gradients > free:
            missing = weights + gradients - free
            beside_a_plan = (
                "; or set memory.activations=keep: a plan gives activations a share of memory.device, and "
                "this schedule keeps little more than each block's input"
            )
            raise BudgetError(
                f"micro-batches that go through a block together ({described}) need {format_nbytes(weights)} "
                f"for its weights and {format_nbytes(gradients)} more for its gradients; memory.device, "
                f"{format_nbytes(division.total)}, has {format_nbytes(free)} for them. Raise it by "
                f"{format_nbytes(missing)} ({missing} bytes), or use the ordinary schedule"
                + (beside_a_plan if self._given.shared else ""),
                "memory.device",
            )
        if division.spilled and weights + gradients > division.window:
            self._divide(replace(self._given, block=weights + gradients))
            division, free = self.division, self.division.window
        return max(weights, min(division.window, free - gradients))

    def keep_states_home(self) -> None:
        """Let no states move to the accelerator, since their units would be gathered."""
        self._divide(replace(self._given, states=False))

    def _takes_window(self, unit: Unit, *, trainable: bool) -> bool:
        """Whether a unit is in the window, or, on several ranks, a gradient that borrows of it."""
        return self._tiers.streams(unit) or (trainable and self._ranks.world_size > 1)

    def _trained_now(self) -> frozenset[int]:
        return frozenset(unit.index for unit in self._units if unit.trainable)

    def _divide(self, given: _Given) -> None:
        """Divide by what is ``given``; where there is no room the old division stays."""
        sizes = [self._sizes(unit, given) for unit in self._units]
        in_use = set(self._nested)
        if given.recomputes:
            in_use.update(self._blocks.values())
            for index in frozenset().union(*self._blocks.values()):
                unit = self._units[index]
                in_part = 0 < len(unit.trainable) < len(unit.segments)
                sizes[index] = replace(sizes[index], lingers=in_part)
            lingering = {i for i, each in enumerate(sizes) if each.lingers}
            in_use = {each | lingering for each in in_use}
        sharing = budget.Sharing(
            early=given.early, world_size=self._ranks.world_size,
            together=[[unit.index for unit in leaf] for leaf in self._leaves.values()],
            in_use=in_use, in_host=self._ranks.on_accelerator, accumulates=given.accumulates,
            updates=self._updates_nbytes, decoding=self._decoding_nbytes, block=given.block,
        )  # fmt: skip
        made = budget.divide_device(
            None if given.shared else self.device_nbytes, given.ceiling, sizes, sharing,
            spill_above=self.device_nbytes if given.shared and given.most is None else None,
        )  # fmt: skip
        if self.device_nbytes is not None and made.total > self.device_nbytes:
            raise BudgetError(
                f"memory.device is {format_nbytes(self.device_nbytes)}; units alone require "
                f"{format_nbytes(made.least)} ({made.least} bytes), without activations. Raise memory.device",
                "memory.device",
            )
        host = None
        if self._ranks.on_accelerator:
            left = [replace(u, waits_in_host=True) if i in made.spilled else u for i, u in enumerate(sizes)]
            host = self._divide_host(left, given)
        if given.states and given.most is not None:
            made = budget.place_states(made, given.most, sizes, self._scratch_nbytes)
        self._given, self.host, self.division = given, host, made

    def _divide_host(self, sizes: Sequence[budget.UnitSizes], given: _Given) -> budget.HostBudget:
        tiers, storage, residents = self._tiers, self._tiers.storage, 0
        for unit in self._units:
            if unit.home.tier is Tier.HOST or unit.home.stored_form is not None:
                bare = tiers.resident_nbytes_of(unit, moments=False)
                moments = unit.index in given.trained or tiers.taken.get(unit.index, 0) > bare  # set aside
                residents += tiers.resident_nbytes_of(unit, moments=moments)
        chunks = budget.STAGED_CHUNKS * storage.chunk_nbytes if storage.memory.nvme else 0
        resident = bool(storage.memory.resident)
        return budget.divide_host(storage.host_nbytes, residents, chunks, sizes, resident=resident)

    def _sizes(self, unit: Unit, given: _Given) -> budget.UnitSizes:
        trainable = unit.index in given.trained
        # A thawed unit leaves its stored form, also where that is in host memory, for a home on NVMe.
        stored, thawed = unit.stored, trainable and unit.stored is not None
        on_nvme = unit.home.tier is Tier.NVME or thawed
        until_step, in_host = not (given.early and on_nvme), self._ranks.on_accelerator
        waits = trainable and (given.accumulates or (until_step and not in_host))
        # What waits for the step on NVMe is read by chunks, which has to be the update's only pass.
        spills = trainable and on_nvme and (not until_step or self._tiers.storage.rule.in_one_pass)
        numel, largest = max(((s.numel, s.name) for s in unit.segments), default=(0, ""))
        state_nbytes = self._tiers.layout.state_nbytes(unit.shard_numel)
        states = rounded(unit.shard_nbytes) + rounded(state_nbytes)
        return budget.UnitSizes(
            name=unit.name,
            full=unit.nbytes,
            shard_grad=self._tiers.gradient_nbytes(unit),
            shard_weight=unit.shard_nbytes if stored is None or thawed else stored.shard_nbytes,
            streams=self._takes_window(unit, trainable=trainable),
            on_nvme=on_nvme,
            trainable=trainable,
            waits=waits,
            waits_in_host=trainable and until_step and in_host,
            spills=spills,
            parameter=largest,
            parameter_nbytes=numel * unit.dtype.itemsize,
            stored=0 if stored is None else stored.nbytes,
            states=states if trainable and not on_nvme else 0,
        )


def check_memory(memory: MemoryConfig, ranks: Ranks) -> None:
    """Raise if a memory budget is more than this machine has: otherwise nothing would until it is used up."""
    host = total_host_nbytes() // local_ranks()
    device = memory_nbytes(ranks.device)[1] if ranks.on_accelerator else host
    for key, wanted, most in (("host", memory.host, host), ("device", memory.device, device)):
        if wanted is not None and wanted > most:
            raise BudgetError(
                f"memory.{key} is {format_nbytes(wanted)}; this machine has {format_nbytes(most)} ({most} "
                f"bytes) for a rank. Lower memory.{key}, or leave it out, to be derived from the free memory",
                f"memory.{key}",
            )
