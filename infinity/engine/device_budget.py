"""Division of one model's budgets, and when they are divided again.

[Note: more gradients than before]
A step is foreseen as: one backward, in which what was trainable when the optimizer was made gets a
gradient. Under ``no_sync`` the gradients of all units wait for the last micro-batch, and a unit that is
thawed has a gradient that was not counted. Both are known before the forward: the first ``no_sync``, and
the first forward with thawed weights, divide the budget anew, or say there what is required.

[Note: units in use at one time]
A module's units are in use while those that it contains run, and a block that is recomputed in backward
uses its units from there on until their gradients are complete, or backward has passed them. So the window
holds at least what the call of a module inside others uses, and, where blocks are recomputed, the largest
block. That is known beforehand for ``memory.activations`` (a plan may recompute any block) and for
transformers' ``gradient_checkpointing``, which the next forward sees. What other code recomputes is not
counted. A recomputed unit that is frozen in part has its weights and its gradient until backward ends.

[Note: units beside activations]
Where activations are planned, ``memory.device`` holds both. Until the step has been profiled units get at
most half of it, or what they cannot do without. The plan is made for the rest, or, where that is too
little, for what the least that units need leaves. What the plan does not use, units get: their states come to
the accelerator then, not before.

[Note: states beside activations that nothing plans]
With a ``memory.device`` of the recipe, what units leave of it is for states. Where it was derived, what
activations take shows after the first step: then states get at most what it left of the device's memory.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from infinity.activations.blocks import recomputable_blocks
from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.config import MemoryConfig
from infinity.core.errors import BudgetError
from infinity.core.lifecycle import Tier
from infinity.core.nbytes import format_nbytes
from infinity.device.accelerator import memory_nbytes
from infinity.device.machine import local_ranks, total_host_nbytes
from infinity.optim.rules import scratch_nbytes
from infinity.partition.unit import Unit, UnitIndex
from infinity.shards.homes import HostHome
from infinity.shards.tiers import Tiers, stored_form


class UnitsInUse:
    """Tells which units of a model are in use at one time: see [Note: units in use at one time].

    Args:
        models: Modules that are not inside others.
        units: All units of the model.
        recomputes: Blocks may be recomputed in backward, whatever the model says.
    """

    def __init__(self, models: Iterable[nn.Module], units: UnitIndex, *, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._nested: set[frozenset[int]] = set()
        self._blocks: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        for model in models:
            self._find_nested(model, frozenset(), units)
            for block in recomputable_blocks(model):
                self._blocks[block.module] = _used_together(block.module.parameters(), units)

    def _find_nested(self, module: nn.Module, outer: frozenset[int], units: UnitIndex) -> None:
        own = (param for param in module._parameters.values() if param is not None)
        inner = outer | _used_together(own, units)
        if len(inner) > 2:  # any two have room
            self._nested.add(inner)
        for child in module.children():
            self._find_nested(child, inner, units)

    def recomputes(self) -> bool:
        """Return whether blocks are recomputed, as far as is known now."""
        return self._recomputes or any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in self._blocks
        )

    @property
    def recomputed(self) -> frozenset[int]:
        """Indices of units in blocks."""
        return frozenset().union(*self._blocks.values())

    def sets(self, *, recomputed: bool) -> set[frozenset[int]]:
        """Return indices of units in use at one time, where blocks are ``recomputed`` and where not."""
        return self._nested.union(self._blocks.values() if recomputed else ())


def _used_together(params: Iterable[nn.Parameter], units: UnitIndex) -> frozenset[int]:
    """Indices of units that hold ``params``: of the tiles of one, which are used one by one, the first."""
    return frozenset(unit.index for unit in units.holding(params) if not any(s.first for s in unit.segments))


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The gradients and blocks that a division counts on; see [Note: more gradients than before].

    Attributes:
        trained: Indices of units that get a gradient.
        accumulates: Gradients wait for later micro-batches.
        recomputes: Blocks are recomputed in backward.
        block_nbytes: The least window, for a layer schedule.
    """

    trained: frozenset[int]
    accumulates: bool
    recomputes: bool
    block_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Limits:
    """The most of ``memory.device`` that units may be given (bytes).

    Attributes:
        total: The recipe's; None: derived.
        ceiling: The most that a derived budget may be, or that planned activations leave.
        shared: Planned activations take a part of ``total``.
        planned: The part of planned activations is known.
        after_step: The most that the total may become, as the first step shows; None: unknown.
        states: Whether states may be in an accelerator's memory.
    """

    total: int | None
    ceiling: int
    shared: bool
    planned: bool = False
    after_step: int | None = None
    states: bool = False

    @property
    def spill_above(self) -> int | None:
        """Gradients spill if they would make a derived budget larger than this; None: the ceiling."""
        return self.total if self.shared and not self.planned else None

    @property
    def most(self) -> int | None:
        """Return the most that units may take with states; None: what activations take is not known yet."""
        if self.shared:
            return self.ceiling if self.planned else None
        if self.total is not None or self.after_step is None:
            return self.total
        return min(self.ceiling, self.after_step)


class UnitBudget:
    """Divides ``memory.device`` among gradients, updates and gathered units of one model.

    Args:
        units: All units of the model.
        leaves: Units that are gathered as one, by module.
        in_use: Tells which units are in use at one time.
        ranks: The ranks that share the model.
        tiers: Know what each unit takes, and ``memory.host``.
        device_nbytes: ``memory.device``; None: derived from the model and ``ceiling_nbytes``.
        ceiling_nbytes: The most that a derived budget may be.
        shared: Planned activations take a part of ``device_nbytes``.
        early: Whether an update inside backward is done with its gradient.
        updates_nbytes: Memory of an accelerator that updates take beside pools.
        states: Whether states may be in an accelerator's memory: see [Note: states on an accelerator] of
            :mod:`infinity.core.budget`.

    Attributes:
        division: The present division of the device budget.
        host: The division of ``memory.host`` beside an accelerator; None: there is no accelerator.

    Raises:
        BudgetError: ``memory.device`` or ``memory.host`` is too small; the message has the arithmetic.
    """

    def __init__(
        self, units: UnitIndex, leaves: Mapping[nn.Module, tuple[Unit, ...]], in_use: UnitsInUse,
        ranks: Ranks, tiers: Tiers, device_nbytes: int | None, ceiling_nbytes: int, *, shared: bool,
        early: bool, updates_nbytes: int, states: bool,
    ) -> None:  # fmt: skip
        self._units, self._leaves, self._ranks, self._tiers = units, leaves, ranks, tiers
        self._in_use, self._early, self._updates_nbytes = in_use, early, updates_nbytes
        self.host: budget.HostBudget | None = None
        if shared and device_nbytes is not None:
            ceiling_nbytes = min(ceiling_nbytes, device_nbytes // 2)
        self._limits = _Limits(
            device_nbytes, ceiling_nbytes, shared and device_nbytes is not None,
            states=states and ranks.on_accelerator,
        )  # fmt: skip
        self._foreseen = _Foreseen(self._trained_now(), False, in_use.recomputes())
        self.division = self._divide(self._foreseen)

    @property
    def device_nbytes(self) -> int | None:
        """``memory.device`` of the recipe; None: it is derived."""
        return self._limits.total

    @property
    def pool_nbytes(self) -> int:
        """Bytes that gradients, updates and gathered units have together."""
        return self.division.total - self.division.states - self._updates_nbytes - self._decoding_nbytes

    @property
    def states_nbytes(self) -> int:
        """Bytes that states have on the accelerator, without what their updates take."""
        return self.division.states - self._scratch_nbytes if self.division.on_device else 0

    @property
    def _scratch_nbytes(self) -> int:
        return scratch_nbytes(max((unit.shard_numel for unit in self._units), default=0))

    @property
    def _decoding_nbytes(self) -> int:
        """Bytes that decoding takes of an accelerator's memory, beside pools."""
        scratch = (unit.stored.scratch_nbytes for unit in self._units if unit.stored is not None)
        return max(scratch, default=0) if self._ranks.on_accelerator else 0

    @property
    def spilled(self) -> frozenset[int]:
        """Indices of units whose gradients wait on NVMe."""
        return frozenset(self.division.spilled if self.host is None else self.host.spilled)

    @property
    def hold_weights(self) -> bool:
        """Return whether there is room for the weights that updates start from."""
        return self.division.hold_weights if self.host is None else self.host.weights > 0

    def divide_again(self, *, accumulates: bool) -> bool:
        """Divide anew where more gradients wait than were counted: see [Note: more gradients than before].

        Returns:
            Whether ``division`` changed.

        Raises:
            BudgetError: ``memory.device`` is too small for it; the old division stays.
        """
        before = self._foreseen
        foreseen = replace(
            before, trained=before.trained | self._trained_now(),
            accumulates=before.accumulates or accumulates,
            recomputes=before.recomputes or self._in_use.recomputes(),
        )  # fmt: skip
        if foreseen == before:
            return False
        self.division = self._divide(foreseen)
        self._foreseen = foreseen
        return True

    def divide_beside(self, activations_nbytes: int) -> None:
        """Divide what planned activations leave of ``memory.device``."""
        assert self.device_nbytes is not None
        ceiling_nbytes = self.device_nbytes - activations_nbytes
        self._limits = replace(self._limits, ceiling=ceiling_nbytes, planned=True)
        self.division = self._divide(self._foreseen)

    @property
    def asks_what_a_step_leaves(self) -> bool:
        """Return whether :meth:`divide_after_step` would tell what is not known."""
        limits = self._limits
        return limits.states and limits.total is None and limits.after_step is None

    def divide_after_step(self, left_nbytes: int) -> None:
        """Divide anew, since a whole step has left so much of the device's memory; the same on every rank."""
        self._limits = replace(self._limits, after_step=self.division.total + left_nbytes)
        self.division = self._divide(self._foreseen)

    def window_for(self, blocks: Sequence[set[int]], described: str) -> int:
        """Return the window that holds the largest of ``blocks`` while micro-batches go through it (bytes).

        Early updates lag less where that takes it, and more gradients wait on NVMe: ``division`` may change.

        Args:
            blocks: Indices of each block's units.
            described: The name of the blocks in messages.

        Raises:
            BudgetError: The device budget cannot hold it; the message has the arithmetic.
        """
        division, weights, largest = self.division, 0, 0
        for block in blocks:
            sizes = [self._units[i].gathered_nbytes for i in block if self._tiers.streams(self._units[i])]
            weights, largest = max(weights, sum(sizes)), max(largest, *sizes, 0)
        # A block's gradients come together, after its last micro-batch. Of gradients that come one by one,
        # or wait as shards only, the budget has room for one unit's.
        full_gradients_wait = not division.early and self._ranks.world_size == 1
        gradients = 0 if full_gradients_wait and not division.spilled else weights - largest
        more_may_spill = division.total - division.least if division.spilled else 0
        free = division.window + division.lag + more_may_spill
        if weights + gradients > free and division.on_device:  # states give way
            self._limits = replace(self._limits, states=False)
            self.division = self._divide(self._foreseen)
            return self.window_for(blocks, described)
        if weights + gradients > free:
            missing = weights + gradients - free
            raise BudgetError(
                f"micro-batches that go through a block together ({described}) need {format_nbytes(weights)} "
                f"for its weights and {format_nbytes(gradients)} more for its gradients; memory.device, "
                f"{format_nbytes(division.total)}, has {format_nbytes(free)} for them. Raise it by "
                f"{format_nbytes(missing)} ({missing} bytes), or use the ordinary schedule"
                + _BESIDE_A_PLAN
                * self._limits.shared
            )
        if division.spilled and weights + gradients > division.window:
            self._foreseen = replace(self._foreseen, block_nbytes=weights + gradients)
            division = self.division = self._divide(self._foreseen)
            free = division.window
        return max(weights, min(division.window, free - gradients))

    def _trained_now(self) -> frozenset[int]:
        """Indices of units with a trainable parameter."""
        return frozenset(unit.index for unit in self._units if unit.trainable)

    def _divide(self, foreseen: _Foreseen) -> budget.DeviceBudget:
        trained, limits = foreseen.trained, self._limits
        sizes = [self._sizes(unit, unit.index in trained, foreseen.accumulates) for unit in self._units]
        in_use = self._in_use.sets(recomputed=foreseen.recomputes)
        if foreseen.recomputes:
            again = self._in_use.recomputed
            sizes = [
                replace(each, lingers=i in again and _in_part(self._units[i])) for i, each in enumerate(sizes)
            ]
            lingering = {i for i, each in enumerate(sizes) if each.lingers}
            in_use = {each | lingering for each in in_use}
        host = self._divide_host(sizes, trained) if self._ranks.on_accelerator else None
        made = budget.divide_device(
            None if limits.shared else limits.total, limits.ceiling, sizes,
            early=self._early, world_size=self._ranks.world_size,
            together=[[unit.index for unit in leaf] for leaf in self._leaves.values()],
            in_use=in_use, in_host=self._ranks.on_accelerator, updates=self._updates_nbytes,
            decoding=self._decoding_nbytes, spill_above=limits.spill_above, block=foreseen.block_nbytes,
        )  # fmt: skip
        if limits.total is not None and made.total > limits.total:
            raise BudgetError(
                f"memory.device is {format_nbytes(limits.total)}; units alone require "
                f"{format_nbytes(made.least)} ({made.least} bytes), and what a step makes beside them comes "
                "on top. Raise memory.device"
            )
        self.host = host
        if not limits.states or limits.most is None:
            return made
        return budget.place_states(made, limits.most, sizes, self._scratch_nbytes)

    def _divide_host(self, sizes: Sequence[budget.UnitSizes], trained: frozenset[int]) -> budget.HostBudget:
        tiers, storage = self._tiers, self._tiers.storage
        aside = {u.index for u in self._units if isinstance(u.home, HostHome) and u.home.set_aside}
        residents = sum(
            tiers.resident_nbytes_of(unit, moments=unit.index in aside | trained)
            for unit in self._units
            if unit.home.tier is Tier.HOST or stored_form(unit) is not None
        )
        chunks = budget.STAGED_CHUNKS * storage.chunk_nbytes if storage.memory.nvme else 0
        return budget.divide_host(
            storage.host_nbytes, residents, chunks, sizes, resident=storage.memory.resident
        )

    def _sizes(self, unit: Unit, trainable: bool, accumulates: bool) -> budget.UnitSizes:
        # A thawed unit leaves its stored form, also where that is in host memory, for a home on NVMe.
        stored, thawed = unit.stored, trainable and unit.stored is not None
        on_nvme = unit.home.tier is Tier.NVME or thawed
        until_step, in_host = not (self._early and on_nvme), self._ranks.on_accelerator
        largest = max(((s.numel, s.name) for s in unit.segments), default=(0, ""))
        return budget.UnitSizes(
            name=unit.name,
            full=unit.nbytes,
            shard_grad=self._tiers.gradient_nbytes(unit),
            shard_weight=unit.shard_nbytes if stored is None or thawed else stored.shard_nbytes,
            streams=self._tiers.streams(unit),
            on_nvme=on_nvme,
            trainable=trainable,
            waits=trainable and (accumulates or (until_step and not in_host)),
            waits_in_host=trainable and until_step and in_host,
            spills=trainable and until_step and on_nvme and (in_host or not accumulates),
            parameter=largest[1],
            parameter_nbytes=largest[0] * unit.dtype.itemsize,
            stored=0 if stored is None else stored.nbytes,
            states=self._tiers.on_device_nbytes_of(unit) if trainable and not on_nvme else 0,
        )


def _in_part(unit: Unit) -> bool:
    """Return whether a unit is frozen in part."""
    return 0 < len(unit.trainable) < len(unit.segments)


_BESIDE_A_PLAN = (
    "; or set memory.activations=keep: a plan gives activations a share of memory.device, and this "
    "schedule keeps little more than each block's input"
)


def check_memory(memory: MemoryConfig, ranks: Ranks) -> None:
    """Refuse budgets of memory that this machine does not have: nothing else would, until it is used up.

    Raises:
        BudgetError: A budget exceeds the machine's memory.
    """
    host = total_host_nbytes() // local_ranks()
    device = memory_nbytes(ranks.device)[1] if ranks.on_accelerator else host
    for key, wanted, most in (("host", memory.host, host), ("device", memory.device, device)):
        if wanted is not None and wanted > most:
            raise BudgetError(
                f"memory.{key} is {format_nbytes(wanted)}; this machine has {format_nbytes(most)} "
                f"({most} bytes) for a rank. Lower memory.{key}, or leave it out: it then follows from the "
                "free memory"
            )
