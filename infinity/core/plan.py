"""The measured saved tensors of a step, and the plan for them that the runtime and the simulator follow.

The planner reads nothing else of a model. Positions are indices of operators.

[Note: regions]
A forward pass is cut into stretches: region ``2 * b + 1`` is the b-th call of a block, the even regions lie
before, between and after the calls. A storage that autograd saves gets a key, its region and its ordinal
there, which is the same in every micro-batch: a plan names it by that key.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.errors import RecipeError
from infinity.core.files import read_file, write_file

#: The longest profile or plan that is read, a hundred times that of a large model (bytes).
MOST_NBYTES = 2**28
#: Of the format. Another one is refused: what it lacks (waits, padding) a plan cannot do without.
_VERSION = 2


class SlotKey(NamedTuple):
    """Name of a saved storage in every micro-batch; see [Note: regions]."""

    region: int
    ordinal: int


class Phase(StrEnum):
    """The part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(StrEnum):
    """The content of a storage."""

    ACTIVATION = "activation"  # autograd saves it
    WORKING = "working"  # made inside the step, and not saved
    WEIGHT = "weight"
    GRADIENT = "gradient"
    INPUT = "input"  # was there before the step


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The lifetime of one storage if everything is kept.

    Attributes:
        name: The name in error messages.
        nbytes: Size.
        kind: Content.
        born: The operator that makes it; 0 if it was there before the step.
        dies: The last operator during which it is in memory.
    """

    name: str
    nbytes: int
    kind: Kind
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step, in the order of execution.

    Attributes:
        name: The name that torch has for it.
        time_s: Time of its computation (s).
        inputs: Storages that it reads.
        outputs: Storages that it writes.
        phase: The part of the step in which it runs.
        region: See [Note: regions]; in backward and update -1.
    """

    name: str
    time_s: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    region: int


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A storage that autograd saves, and when backward uses it; in the order of packing.

    Attributes:
        key: The name of the slot in a plan.
        storage: Index of the storage.
        nbytes: Size.
        packed_at: The last operator before it may be stored.
        unpacked_at: The first operator of backward that needs it.
        released_at: The last one.
        held: Other code holds the storage until backward: storing it frees nothing.
    """

    key: SlotKey
    storage: int
    nbytes: int
    packed_at: int
    unpacked_at: int
    released_at: int
    held: bool


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block, which may be recomputed.

    Attributes:
        name: The module's name.
        region: The region of its forward.
        forward: First operator of its forward, and the first after it.
        backward: First operator of its backward, and the first after it.
        inputs: Storages that its forward reads from outside, without parameters, in order.
    """

    name: str
    region: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that units start to move while operator ``at`` runs, on the channels that activations share."""

    at: int
    nbytes_read: int
    nbytes_written: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured operators and storages of one micro-batch with its update.

    Attributes:
        step_s: Time of the step when everything is kept (s); at least the sum of its operators.
        padding_nbytes: Bytes that a storage takes beyond its size once it has been loaded.
    """

    step_s: float
    operators: tuple[Operator, ...]
    storages: tuple[StorageUse, ...]
    slots: tuple[SlotUse, ...]
    blocks: tuple[BlockCall, ...]
    traffic: tuple[Traffic, ...] = field(default=())
    padding_nbytes: int = 0

    def at_pace(self, step_s: float) -> "Profile":
        """Scale the step to ``step_s``; operators that would take longer shrink in proportion."""
        operators_s = sum(operator.time_s for operator in self.operators)
        shrink = min(1.0, step_s / operators_s) if operators_s else 1.0
        operators = tuple(replace(operator, time_s=operator.time_s * shrink) for operator in self.operators)
        return replace(self, step_s=step_s, operators=operators)

    def save(self, path: Path) -> None:
        """Write JSON that :meth:`load` reads on any machine."""
        write_file(path, json.dumps({"version": _VERSION, **asdict(self)}))

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read what :meth:`save` wrote.

        Raises:
            RecipeError: No such file, or not a profile.
        """
        try:
            given = json.loads(read_file(path, MOST_NBYTES))
            version = given["version"]
            found = cls._of(given) if version == _VERSION else None
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}; wanted a profile that infinity wrote") from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecipeError(f"{path}: not a profile that infinity wrote: {error}") from error
        if found is None:
            raise RecipeError(
                f"{path}: another release of infinity wrote it, in version {version} of the format; this one "
                f"reads version {_VERSION}. Use that release, or train again for a new plan"
            )
        return found

    @classmethod
    def _of(cls, given: dict[str, Any]) -> "Profile":
        return cls(
            float(given["step_s"]),
            tuple(Operator(**_tuples(o) | {"phase": Phase(o["phase"])}) for o in given["operators"]),
            tuple(StorageUse(**s | {"kind": Kind(s["kind"])}) for s in given["storages"]),
            tuple(SlotUse(**s | {"key": SlotKey(*s["key"])}) for s in given["slots"]),
            tuple(BlockCall(**_tuples(b)) for b in given["blocks"]),
            tuple(Traffic(**t) for t in given["traffic"]),
            int(given["padding_nbytes"]),
        )


def _tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class Place(StrEnum):
    """The place in which a saved storage waits for backward."""

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
        mixed_bytes_per_s: Bytes per second of reads and writes together, when both are busy.
        host_bytes_per_s: Device to host memory and back, each way.
        latency_s: Time from submitting a transfer to its first byte (s).
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
            inputs, numbered in the order of :attr:`infinity.core.plan.BlockCall.inputs`, without those
            that an earlier region packed.
        loads: The loads of slots, in the order in which backward needs them.
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
