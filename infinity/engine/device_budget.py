"""How one model's device budget is divided now, and when it has to be divided again.

[Note: more gradients than before]
A step is foreseen as: one backward, in which what was trainable when the optimizer was made gets a
gradient. Under ``no_sync`` the gradients of all units wait for the last micro-batch, and a unit that is
thawed has a gradient that nobody counted. Both are known before the forward: the first ``no_sync``, and
the first forward with thawed weights, divide the budget anew, or say there what is needed.

[Note: units beside activations]
Where activations are planned, ``memory.device`` holds both. Until the step has been profiled units get at
most half of it, or what they cannot do without. The plan is made for the rest, or, where that is too
little, for what the least that units need leaves. What the plan does not use, units get.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinity.core import budget
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.core.tier import Tier
from infinity.partition.unit import Unit

if TYPE_CHECKING:
    from infinity.engine.runtime import Runtime


class Division:
    """Divides ``memory.device`` for the units of one runtime.

    Args:
        runtime: Has the units.
        ceiling: What a derived budget may be at most (bytes).
        early: Whether updates start inside backward.

    Attributes:
        budget: How it is divided now.

    Raises:
        BudgetError: ``memory.device`` is too small; the message has the arithmetic.
    """

    def __init__(self, runtime: "Runtime", ceiling: int, *, early: bool) -> None:
        self._runtime, self._ceiling, self._early = runtime, ceiling, early
        self._trained, self._accumulates = self._trained_now(), False
        self._total = runtime.recipe.memory.device
        if self._total is not None and runtime.activations.policy == "plan":
            self._ceiling, self._total = min(ceiling, self._total // 2), None
        self.budget = self._divide(self._trained, self._accumulates)

    def again(self, *, accumulates: bool) -> bool:
        """Divide anew where more gradients wait than were counted: see [Note: more gradients than before].

        Returns:
            Whether ``budget`` is another now.

        Raises:
            BudgetError: ``memory.device`` is too small for it; the old division stays.
        """
        trained, accumulates = self._trained | self._trained_now(), self._accumulates or accumulates
        if (trained, accumulates) == (self._trained, self._accumulates):
            return False
        self.budget = self._divide(trained, accumulates)
        self._trained, self._accumulates = trained, accumulates
        return True

    def beside(self, activations_nbytes: int) -> None:
        """Divide anew what activations leave of ``memory.device``."""
        device_nbytes = self._runtime.recipe.memory.device
        assert device_nbytes is not None
        self._ceiling = device_nbytes - activations_nbytes
        self.budget = self._divide(self._trained, self._accumulates)

    def _trained_now(self) -> frozenset[int]:
        """Indices of units with a trainable parameter."""
        units = self._runtime.units
        return frozenset(u.index for u in units if any(s.param.requires_grad for s in u.segments))

    def _divide(self, trained: frozenset[int], accumulates: bool) -> budget.DeviceBudget:
        runtime = self._runtime
        sizes = [self._sizes(unit, unit.index in trained, accumulates) for unit in runtime.units]
        if runtime.on_gpu:
            storage = runtime.storage
            itemsize = storage.layout.weight_nbytes(1) + storage.layout.state_nbytes(1)
            chunk_nbytes = storage.chunk_numel * itemsize if storage.volume else 0
            staging_nbytes = storage.host_nbytes - storage.resident_nbytes
            budget.check_gradients_fit_host(staging_nbytes, chunk_nbytes, sizes)
        made = budget.divide_device(
            self._total, self._ceiling, sizes,
            early=self._early, world_size=runtime.world_size,
            together=[[unit.index for unit in leaf] for leaf in runtime.leaves().values()],
        )  # fmt: skip
        device_nbytes = runtime.recipe.memory.device
        if device_nbytes is not None and made.total > device_nbytes:
            raise BudgetError(
                f"memory.device is {format_nbytes(device_nbytes)}; units alone need "
                f"{format_nbytes(made.least)} ({made.least} bytes). Raise memory.device"
            )
        return made

    def _sizes(self, unit: Unit, trainable: bool, accumulates: bool) -> budget.UnitSizes:
        runtime, alone, on_nvme = self._runtime, self._runtime.world_size == 1, unit.home is Tier.NVME
        largest = max(unit.segments, key=lambda s: s.numel)
        return budget.UnitSizes(
            name=unit.name,
            full=unit.nbytes,
            shard_grad=unit.nbytes if alone else unit.shard_numel * runtime.reduce_dtype.itemsize,
            shard_weight=unit.nbytes if alone else unit.shard_nbytes,
            streams=runtime.streams(unit),
            on_nvme=on_nvme,
            trainable=trainable,
            waits=trainable and (accumulates or not (self._early and on_nvme)),
            parameter=largest.name,
            parameter_nbytes=largest.numel * unit.dtype.itemsize,
        )


class Beside:
    """What units leave of ``memory.device``; see :class:`infinity.activations.activations.Room`.

    Args:
        runtime: Has the division.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def capacities(self) -> Sequence[int | None]:
        device_nbytes, division = self._runtime.recipe.memory.device, self._runtime.connected().division
        if device_nbytes is None:
            return [None]
        return [device_nbytes - total for total in dict.fromkeys((division.total, division.least))]

    def settle(self, capacity_nbytes: int | None, peak_nbytes: int) -> None:
        if capacity_nbytes is not None:
            self._runtime.connected().divide_beside(peak_nbytes)

    def refuse(self, error: BudgetError) -> BudgetError:
        device_nbytes, least = self._runtime.recipe.memory.device, self._runtime.connected().division.least
        if device_nbytes is None:
            return error
        return BudgetError(
            f"memory.device is {format_nbytes(device_nbytes)}, of which units need at least "
            f"{format_nbytes(least)} ({least} bytes). For the rest: {error}"
        )
