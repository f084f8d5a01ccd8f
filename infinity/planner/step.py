"""A training step before it runs: what it uses in which order, and what that takes.

A :class:`StepTrace` is one micro-batch as the hooks of a model see it, recorded without values. With the
sizes of its units and a division of the memory budgets it is everything that the runtime's own plan follows
from, and that :mod:`infinity.planner.clock` needs to play it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from infinity.core.budget import rounded
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.planner.machines import RankRates
from infinity.planner.prefetch_plan import Event, Kind


@dataclass(frozen=True, slots=True)
class StoredShape:
    """Sizes of a frozen unit that travels as it lies in a checkpoint, and is decoded after the gather.

    Attributes:
        nbytes: Of all ranks' shards.
        shard_nbytes: Of one; of which ``read_nbytes`` are read from drives.
        decode_nbytes: What the operators that decode all shards read and write; ``decode_operators`` of them.
    """

    nbytes: int
    shard_nbytes: int
    read_nbytes: int
    decode_nbytes: int = 0
    decode_operators: int = 0

    def decode_s(self, rates: RankRates) -> float:
        """Seconds of decoding, by the roofline."""
        return max(self.decode_nbytes / rates.decode_bytes_per_s, self.decode_operators * rates.operator_s)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Sizes of a unit on one rank.

    Attributes:
        shard_numel: Elements of the shard, padding included.
        nbytes: Of the full buffer, in the compute dtype.
        weight_nbytes: Of the shard; ``state_nbytes`` of its state, of which ``moments_nbytes`` are moments.
        params: Parameters of the unit in all.
        on_nvme: Its home; else host memory.
        streams: Its full values come and go.
        host_gradient_nbytes: Beside an accelerator, of its gradient, which waits in host memory.
        stored: The form in which it travels; None: the compute dtype.
        base_nbytes: Of a frozen unit that is read where it lies in a checkpoint: what a fetch reads, in whole
            blocks; None: it lies in the run's own files.
    """

    name: str
    shard_numel: int
    nbytes: int
    weight_nbytes: int
    state_nbytes: int
    moments_nbytes: int
    params: int
    trainable: bool
    on_nvme: bool = True
    streams: bool = True
    host_gradient_nbytes: int = 0
    stored: StoredShape | None = None
    base_nbytes: int | None = None

    @property
    def read_nbytes(self) -> int:
        """What a fetch reads from drives."""
        if self.stored is not None:
            return self.stored.read_nbytes
        return self.weight_nbytes if self.base_nbytes is None else self.base_nbytes

    @property
    def moved_nbytes(self) -> int:
        """Of the shard as it is uploaded and gathered."""
        return self.weight_nbytes if self.stored is None else self.stored.shard_nbytes

    @property
    def gathered_nbytes(self) -> int:
        """Device memory of the full buffer, and of what it is decoded from."""
        return rounded(self.nbytes) + (0 if self.stored is None else rounded(self.stored.nbytes))

    @property
    def resident_nbytes(self) -> int:
        """Host memory that the shard takes with all that training needs of it."""
        kept = rounded(self.weight_nbytes) + rounded(self.state_nbytes - self.moments_nbytes)
        if self.stored is not None:
            kept = rounded(self.stored.shard_nbytes)
        return kept + (self.trained_nbytes if self.trainable else 0)

    @property
    def trained_nbytes(self) -> int:
        """What it takes more of the host budget while it is trained."""
        return rounded(self.moments_nbytes) + rounded(self.host_gradient_nbytes)


def choose_homes(
    units: Sequence[UnitShape], resident_nbytes: int, *, drives: bool, alone_on_cpu: bool
) -> tuple[UnitShape, ...]:
    """Return the units with their homes, as :class:`infinity.shards.tiers.Tiers` gives them.

    While a model is built it is unknown what will be trained, so room for the moments of each unit is set
    aside; when the optimizer is made, what frozen units do not need goes to others, trained ones first.

    Raises:
        BudgetError: They do not fit host memory, and there are no drives.
    """
    used, resident = 0, set()
    for index, unit in enumerate(units):
        nbytes = replace(unit, trainable=True).resident_nbytes
        if used + nbytes <= resident_nbytes:
            used += nbytes
            resident.add(index)
        elif not drives:
            total = sum(replace(each, trainable=True).resident_nbytes for each in units)
            raise BudgetError(
                f"weights and optimizer states take {format_nbytes(total)} of host memory per rank, of which "
                f"memory.host leaves {format_nbytes(resident_nbytes)} for them. Raise memory.host to "
                f"{total} bytes or more, or give memory.nvme one or more directories"
            )
    used -= sum(units[i].trained_nbytes for i in resident if not units[i].trainable)
    for index in sorted(range(len(units)), key=lambda i: not units[i].trainable):
        nbytes = units[index].resident_nbytes
        if index not in resident and used + nbytes <= resident_nbytes:
            used += nbytes
            resident.add(index)
    return tuple(
        replace(
            unit,
            on_nvme=index not in resident,
            streams=index not in resident or not alone_on_cpu or unit.stored is not None,
        )
        for index, unit in enumerate(units)
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """An activation that leaves device memory.

    Attributes:
        packed_at: Events before forward has made it.
        asked_at: Events before backward needs it.
        load_at: Events before its load starts.
        on_nvme: It goes to NVMe; else to host memory.
    """

    nbytes: int
    packed_at: int
    load_at: int
    asked_at: int
    on_nvme: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One micro-batch: its forward and its backward.

    Operators are given by arrays of equal length; an operator at position ``p`` runs after ``p`` events.

    Attributes:
        events: Uses of units in order, as the last micro-batch of a step has them.
        begun: Positions at which a unit's first gradient comes, with the unit.
        completed: Likewise its last one.
        flops: Of matrix products, by operator; likewise ``nbytes`` read and written.
        fp32: Whether an operator computes in fp32, in place of the compute dtype.
        model_flops: Of the algorithm, without recomputation.
        tokens: Of the micro-batch.
        peak_nbytes: The most that the step's own storages take of device memory at one time.
        stored: Activations that leave device memory.
        measured_s: Seconds that operators take on the machine that is planned for; not a number: unknown.
    """

    events: tuple[Event, ...]
    begun: tuple[tuple[int, int], ...]
    completed: tuple[tuple[int, int], ...]
    position: np.ndarray
    flops: np.ndarray
    nbytes: np.ndarray
    fp32: np.ndarray
    model_flops: float
    tokens: int
    peak_nbytes: int
    stored: tuple[Stored, ...] = ()
    measured_s: np.ndarray | None = None

    def operator_s(self, rates: RankRates) -> np.ndarray:
        """Seconds of each operator: as measured, or by the roofline."""
        rate = np.where(self.fp32, rates.fp32_flops_per_s, rates.flops_per_s)
        each = np.maximum(self.flops / rate, self.nbytes / rates.memory_bytes_per_s)
        each = np.maximum(each, rates.operator_s)
        if self.measured_s is None:
            return each
        return np.where(np.isnan(self.measured_s), each, self.measured_s + rates.operator_s)

    def times_s(self, rates: RankRates) -> np.ndarray:
        """Seconds of compute at each position, ``(events + 1,)``."""
        each = self.operator_s(rates)
        return np.bincount(self.position, weights=each, minlength=len(self.events) + 1)

    def accumulated(self) -> tuple[tuple[Event, ...], list[int]]:
        """Events of a micro-batch that another one follows: units are released, not updated.

        Returns:
            The events, and for each position of this trace the position among them.
        """
        pins: dict[int, int] = {}
        events: list[Event] = []
        places = [0]
        for event in self.events:
            count = pins.get(event.unit, 0)
            if event.kind is Kind.DONE:
                pins[event.unit] = 0
                if count:
                    events.append(Event(Kind.UNPIN, event.unit))
            else:
                pins[event.unit] = count + 1 if event.kind is Kind.USE else max(0, count - 1)
                events.append(event)
            places.append(len(events))
        return tuple(events), places

    def scaled(self, factor: float) -> "StepTrace":
        """A micro-batch of ``factor`` times as many tokens: every operator takes so much longer."""
        return replace(
            self,
            flops=self.flops * factor,
            nbytes=self.nbytes * factor,
            model_flops=self.model_flops * factor,
            tokens=round(self.tokens * factor),
            peak_nbytes=round(self.peak_nbytes * factor),
            stored=tuple(replace(each, nbytes=round(each.nbytes * factor)) for each in self.stored),
            measured_s=None if self.measured_s is None else self.measured_s * factor,
        )
