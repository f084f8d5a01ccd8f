"""The measured saved tensors of a step, the plan for them, and what a plan chose for a run; their files.

Runtime and simulator follow the plan; the planner reads nothing else of a model. Positions are of operators.

[Note: regions]
A forward pass is cut into stretches: region ``2 * b + 1`` is the b-th call of a block, the even regions lie
before, between and after the calls. A saved storage's key, by which a plan names it, is its region and its
ordinal there: the same in every micro-batch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from infinity.core.errors import InfinityError, RecipeError, StateError, library_errors
from infinity.core.files import built, read_file, record_of, write_file
from infinity.core.nbytes import format_nbytes

#: The longest plan that is read, a hundred times that of a large model (bytes).
_MOST_NBYTES = 2**28
#: Version of the format. Others are refused: a plan needs what they lack (codecs, kept operators).
_VERSION = 6
#: The files in a run's folder.
FOLDER, PLAN, CHOICE = "activations", "plan.json", "choice.json"


class SlotKey(NamedTuple):
    """Names a saved storage in every micro-batch; see [Note: regions]."""

    region: int
    ordinal: int


class OperatorKey(NamedTuple):
    """Names an operator of a block's forward in every micro-batch: the n-th of its name in the region."""

    region: int
    name: str
    ordinal: int


class Phase(StrEnum):
    """Lists the parts of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(StrEnum):
    """Lists the kinds of content of a storage."""

    ACTIVATION = "activation"  # autograd saves it
    WORKING = "working"  # made inside the step, and not saved
    WEIGHT = "weight"
    GRADIENT = "gradient"
    INPUT = "input"  # was there before the step


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Records the lifetime of one storage if everything is kept."""

    name: str
    nbytes: int
    kind: Kind
    born: int  # the operator that makes it; 0 if it was there before the step
    dies: int  # the last operator during which it is in memory


@dataclass(frozen=True, slots=True)
class Operator:
    """Records one operator of the step, in the order of execution."""

    name: str
    time_s: float
    inputs: tuple[int, ...]  # storages
    outputs: tuple[int, ...]
    phase: Phase
    region: int  # in backward and update -1
    may_stay: bool = True  # or recomputation has to run it: it draws from a generator, or makes views


@dataclass(frozen=True, slots=True)
class CodedForm:
    """Records what a codec makes of one storage, as measured."""

    codec: str
    nbytes: int
    encode_s: float  # of one core
    decode_s: float
    exact: bool = True  # or the storage is coded wherever it waits, so that this changes no number

    @property
    def is_fixed(self) -> bool:
        """Return whether a code is as long in every step; zeros become fewer or more."""
        return not self.exact or self.codec == "bits"

    def pays(self, nbytes: int, hardware: "Hardware") -> bool:
        """Return whether coding takes less time than what it saves of ``nbytes`` on their way to NVMe."""
        if min(hardware.read_bytes_per_s, hardware.write_bytes_per_s) <= 0:
            return False
        s_per_byte = 1 / hardware.read_bytes_per_s + 1 / hardware.write_bytes_per_s
        s_per_byte += 2 * hardware.compute_s_per_byte
        return self.encode_s + self.decode_s < (nbytes - self.nbytes) * s_per_byte


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Records a storage that autograd saves, and when backward uses it; in the order of packing."""

    key: SlotKey
    storage: int
    nbytes: int
    packed_at: int  # the last operator before it may be stored
    unpacked_at: int  # the first operator of backward that needs it
    released_at: int  # the last one
    held: bool  # other code holds the storage until backward: storing it frees nothing
    coded: CodedForm | None = None  # None: no codec makes it smaller


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Records one call of a block, which may be recomputed."""

    name: str
    region: int
    forward: tuple[int, int]  # its first operator, and the first after it
    backward: tuple[int, int]
    inputs: tuple[int, ...]  # storages that forward reads from outside, without parameters, in order
    #: The first operator after all that autograd saves of forward, which need not run again; 0: all do.
    saved: int = 0

    @property
    def again(self) -> tuple[int, int]:
        """Return the operators of forward that run again if the block is recomputed, as ``forward``."""
        return self.forward[0], self.saved or self.forward[1]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts bytes that units start to move during operator ``at``, on channels shared with activations."""

    at: int
    nbytes_read: int
    nbytes_written: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Records the measured operators and storages of one micro-batch with its update."""

    step_s: float  # when everything is kept; at least the sum of the operators
    operators: tuple[Operator, ...]
    storages: tuple[StorageUse, ...]
    slots: tuple[SlotUse, ...]
    blocks: tuple[BlockCall, ...]
    traffic: tuple[Traffic, ...] = ()
    padding_nbytes: int = 0  # what a storage takes beyond its size once it has been loaded
    least_nbytes: int = 0  # smaller storages are no slots

    def at_pace(self, step_s: float) -> "Profile":
        """Scale the step to ``step_s``; operators that would take longer shrink in proportion."""
        operators_s = sum(operator.time_s for operator in self.operators)
        shrink = min(1.0, step_s / operators_s) if operators_s else 1.0
        operators = tuple(replace(operator, time_s=operator.time_s * shrink) for operator in self.operators)
        return replace(self, step_s=step_s, operators=operators)


class Place(StrEnum):
    """Lists the places in which a saved storage may wait for backward."""

    KEEP = "keep"  # in device memory
    CODED = "coded"  # there, in the form of a codec
    HOST = "host"
    NVME = "nvme"
    CODED_NVME = "coded-nvme"  # on NVMe, in the form of a codec

    @property
    def is_coded(self) -> bool:
        return self in (Place.CODED, Place.CODED_NVME)

    @property
    def on_nvme(self) -> bool:
        return self in (Place.NVME, Place.CODED_NVME)

    def as_coded(self, coded: bool) -> "Place":
        """Return the same place for a storage that is ``coded`` or not; in host memory none is."""
        if self.on_nvme:
            return Place.CODED_NVME if coded else Place.NVME
        return self if self is Place.HOST else Place.CODED if coded else Place.KEEP


@dataclass(frozen=True, slots=True)
class Load:
    """Start to load ``slot`` when backward first asks for ``after``; None: when backward begins."""

    after: SlotKey | None
    slot: SlotKey


@dataclass(frozen=True, slots=True)
class StoreWait:
    """Wait until ``slot`` and all that were packed before it have been stored, or need not be any more."""

    at: SlotKey  # the wait is when this slot is packed,
    backward: bool  # or when backward first asks for it
    slot: SlotKey


@dataclass(frozen=True, slots=True)
class Hardware:
    """Records the channels of one rank, as measured."""

    read_bytes_per_s: float  # NVMe to memory, alone
    write_bytes_per_s: float  # memory to NVMe, alone
    mixed_bytes_per_s: float  # reads and writes together, when both are busy
    host_bytes_per_s: float  # device to host memory and back, each way
    latency_s: float = 0.0  # from submitting a transfer to its first byte
    host_nbytes: int = 0  # host memory that activations may take
    #: Delay of compute per byte that moves beside it: without an accelerator I/O takes a part of the cores.
    compute_s_per_byte: float = 0.0
    #: Delay of compute per second in which a core encodes or decodes beside it.
    coding_delay: float = 0.0
    compute_s_per_move: float = 0.0  # delay of compute for each store or load


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Decides what happens to saved storages, in every micro-batch of a step."""

    policy: str  # that made it: keep, offload, recompute, adaptive or plan
    #: Where each slot goes; slots that are not named are kept. A recomputed block's slots are its inputs,
    #: numbered as in ``BlockCall.inputs``, without those that an earlier region packed, and what is kept.
    places: Mapping[SlotKey, Place] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()  # in the order in which backward needs them
    recomputed: frozenset[int] = frozenset()  # regions of blocks that run their forward again in backward
    #: Of these the operators that do not run again, with the bytes that they make: these are saved.
    kept: Mapping[OperatorKey, int] = field(default_factory=dict)
    #: Budget for what the step allocates on the device, beside units, gradients and optimizer states.
    capacity_nbytes: int | None = None  # None: no budget
    #: Without them a store that ends later than predicted would hold memory beyond the budget.
    waits: tuple[StoreWait, ...] = ()
    codecs: Mapping[SlotKey, str] = field(default_factory=dict)  # of the slots whose place says that

    def place(self, key: SlotKey) -> Place:
        return self.places.get(key, Place.KEEP)

    def to_json(self) -> str:
        """Return text that is the same for equal plans; ranks compare it, and runs save it."""
        given = asdict(self) | {
            "places": sorted((*key, place) for key, place in self.places.items()),
            "codecs": sorted((*key, codec) for key, codec in self.codecs.items()),
            "recomputed": sorted(self.recomputed),
            "kept": sorted((*key, nbytes) for key, nbytes in self.kept.items()),
        }
        return json.dumps(given)

    @classmethod
    def from_json(cls, text: str) -> "ActivationPlan":
        plan: ActivationPlan = built(cls, json.loads(text))
        return plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records the cost of a plan, predicted or measured, for one micro-batch with its update."""

    step_s: float
    stall_s: float  # the part of it that waits for transfers
    recompute_s: float  # the part of it that recomputes
    peak_nbytes: int  # the most that the step's own storages take of device memory at one time
    host_peak_nbytes: int  # the most that stored slots take of host memory
    nbytes_stored: int  # activations written to NVMe
    nbytes_loaded: int  # activations read from NVMe


@dataclass(frozen=True, slots=True)
class Planning:
    """Holds a plan with the profile and the hardware that it was made from, and its predicted cost."""

    profile: Profile
    hardware: Hardware
    plan: ActivationPlan
    kept: Outcome  # predicted if everything is kept
    predicted: Outcome  # of the plan
    planning_s: float  # time that planning took
    measured: Outcome | None = None  # cost of the plan; None: the run did not get that far

    def save(self, folder: Path) -> None:
        """Write ``plan.json`` into ``folder``, which :meth:`load` reads on any machine."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        given = {"version": _VERSION, **asdict(self), "plan": json.loads(self.plan.to_json())}
        write_file(folder / PLAN, json.dumps(given))

    @classmethod
    def load(cls, folder: Path) -> "Planning":
        """Read what :meth:`save` wrote; raise a RecipeError for a file that is missing or another one."""
        path = folder / PLAN
        with library_errors(RecipeError, f"{path}: wanted a plan that infinity wrote"):
            given = json.loads(read_file(path, _MOST_NBYTES))
            if (version := given.pop("version")) == _VERSION:
                found: Planning = built(cls, given)
                return found
        raise RecipeError(
            f"{path}: another release of infinity wrote it, in version {version} of the format; this one "
            f"reads version {_VERSION}. Use that release, or train again for a new plan"
        )

    def describe(self) -> str:
        counts = count_blocks(self.profile, self.plan)
        peaks = " -> ".join(format_nbytes(outcome.peak_nbytes) for outcome in (self.kept, self.predicted))
        return f"activations: {counts}: peak {peaks}, predicted {self.predicted.step_s:.3g} s a micro-batch"


def count_blocks(profile: Profile, plan: ActivationPlan) -> str:
    """Return in words how many blocks a plan treats in which way; with any byte stored: as stored."""
    regions = {block.region for block in profile.blocks}
    recomputed = regions & plan.recomputed
    placed = [(key.region, place) for key, place in plan.places.items() if key.region in regions - recomputed]
    nvme = {region for region, place in placed if place.on_nvme}
    host = {region for region, place in placed if place is Place.HOST} - nvme
    coded = {region for region, place in placed if place is Place.CODED} - nvme - host
    counts = {"to NVMe": len(nvme), "to host memory": len(host), "coded": len(coded)}
    in_part = recomputed & {key.region for key in plan.kept}
    counts |= {"recomputed": len(recomputed - in_part), "recomputed in part": len(in_part)}
    counts["kept"] = len(regions) - sum(counts.values())
    parts = [(count, words) for words, count in counts.items() if count]
    if not parts:
        return "no blocks"
    (first, words), rest = parts[0], parts[1:]
    named = f"{first} of {len(regions)} block{'s' if len(regions) > 1 else ''} {words}"
    return ", ".join([named, *(f"{count} {words}" for count, words in rest)])


Value = int | str | bool | None


class Choice(NamedTuple):
    """Holds values of keys that a recipe left to ``auto``; its file is a run's own, or that of a cache."""

    values: Mapping[str, Value]  # empty: nothing is better than what they stand for without a plan
    line: str  # for people: what was chosen, and what that gains
    host_nbytes: int = 0  # free memory that it was planned for
    device_nbytes: int = 0

    def how_to_do_without(self, error: BaseException) -> str | None:
        """Return what to change where ``error`` may come from a choice that this model does not bear."""
        of_model = isinstance(error, StateError) or not isinstance(error, InfinityError | OSError)
        if self.values.get("train.schedule") != "layer" or not (of_model and isinstance(error, Exception)):
            return None
        return (
            "auto chose train.schedule=layer, which runs the model's blocks in another order; a model that "
            "cannot run so needs train.schedule=step, in a new run (run.name)"
        )

    def write(self, path: Path) -> None:
        write_file(path, json.dumps(self._asdict(), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Choice | None":
        """Return the choice in a file; None: there is none, or it is something else."""
        try:
            found: Choice = record_of(cls, json.loads(read_file(path, _MOST_NBYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return found if found.line.isprintable() else None
