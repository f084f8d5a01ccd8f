"""A plan for activations: frozen decisions of a planner, followed by the runtime and by the simulator."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from infinity.core.profile import SlotKey


class Place(StrEnum):
    """Where a saved storage waits for backward."""

    KEEP = "keep"  # in device memory
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Load:
    """Start to load ``slot`` when backward first asks for ``after``; None: when backward begins."""

    after: SlotKey | None
    slot: SlotKey


@dataclass(frozen=True, slots=True)
class StoreWait:
    """Wait until ``slot`` and all that were packed before it have been stored, or need not be any more.

    Attributes:
        at: The wait is when this slot is packed; with ``backward``, when backward first asks for it.
    """

    at: SlotKey
    backward: bool
    slot: SlotKey


@dataclass(frozen=True, slots=True)
class Hardware:
    """The channels of one rank, as measured.

    Attributes:
        read_bytes_per_s: NVMe to memory, alone.
        write_bytes_per_s: Memory to NVMe, alone.
        mixed_bytes_per_s: Both together, when both are busy.
        host_bytes_per_s: Device to host memory and back, each way.
        latency_s: From submitting a transfer to its first byte (s).
        host_nbytes: Host memory that activations may take.
        compute_s_per_byte: Delay of compute for each byte that moves beside it (s); on a machine without an
            accelerator I/O takes its share of the cores.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    host_bytes_per_s: float
    latency_s: float = 0.0
    host_nbytes: int = 0
    compute_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Decisions for every micro-batch of a step.

    Attributes:
        policy: Name of the policy that made it: keep, offload, recompute, adaptive or plan.
        places: Where each slot goes; slots that are not named are kept. A recomputed block's slots are its
            inputs, numbered in the order of :attr:`infinity.core.profile.BlockCall.inputs`, without those
            that an earlier region packed.
        loads: When each slot is loaded, in the order in which backward needs them.
        recomputed: Regions of blocks that run their forward again in backward.
        capacity_nbytes: The budget that it keeps, of device memory that the step allocates itself, without
            units, gradients and optimizer states. None: no budget.
        backlog_nbytes: Bytes that may wait in memory to be stored; packing waits for stores beyond it.
            None: no bound.
        waits: Without them a store that ends later than predicted would hold memory beyond the budget.
    """

    policy: str
    places: Mapping[SlotKey, Place] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()
    recomputed: frozenset[int] = frozenset()
    capacity_nbytes: int | None = None
    backlog_nbytes: int | None = None
    waits: tuple[StoreWait, ...] = ()

    def place(self, key: SlotKey) -> Place:
        return self.places.get(key, Place.KEEP)

    def to_json(self) -> str:
        """Return text that equal plans share; ranks compare it, and runs save it."""
        given = asdict(self) | {
            "places": sorted((*key, place) for key, place in self.places.items()),
            "recomputed": sorted(self.recomputed),
        }
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str) -> "ActivationPlan":
        """Read what :meth:`to_json` wrote."""
        given = json.loads(text)
        return cls(
            given["policy"],
            {SlotKey(region, ordinal): Place(place) for region, ordinal, place in given["places"]},
            tuple(
                Load(None if load["after"] is None else SlotKey(*load["after"]), SlotKey(*load["slot"]))
                for load in given["loads"]
            ),
            frozenset(given["recomputed"]),
            given["capacity_nbytes"],
            given["backlog_nbytes"],
            tuple(
                StoreWait(SlotKey(*wait["at"]), wait["backward"], SlotKey(*wait["slot"]))
                for wait in given["waits"]
            ),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Cost of a plan, predicted or measured, for one micro-batch with its update.

    Attributes:
        step_s: Time of the step (s).
        stall_s: Part of it that waits for transfers (s).
        recompute_s: Part of it that recomputes (s).
        peak_nbytes: The most that the step's own storages take of device memory at one time.
        host_peak_nbytes: The most that stored slots take of host memory.
        nbytes_stored: Activations written to NVMe.
        nbytes_loaded: Activations read from NVMe.
    """

    step_s: float
    stall_s: float
    recompute_s: float
    peak_nbytes: int
    host_peak_nbytes: int
    nbytes_stored: int
    nbytes_loaded: int
