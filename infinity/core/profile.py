"""One step as it was measured: operators, the storages that they touch, and what autograd keeps of them.

The planner and the simulator read nothing else of a model. Positions are indices of operators.

[Note: regions]
A forward pass is cut into stretches: region ``2 * b + 1`` is the b-th call of a block, the even regions lie
before, between and after the calls. What autograd saves gets a key, its region and its number there, and
has the same key in every micro-batch: that is how a plan names it.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.errors import RecipeError


class SlotKey(NamedTuple):
    """Which saved storage of a micro-batch; see [Note: regions]."""

    region: int
    ordinal: int


class Phase(StrEnum):
    """The part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(StrEnum):
    """What a storage holds."""

    ACTIVATION = "activation"  # autograd saves it
    WORKING = "working"  # made inside the step, and not saved
    WEIGHT = "weight"
    GRADIENT = "gradient"
    STATE = "state"  # of the optimizer
    INPUT = "input"  # was there before the step


@dataclass(frozen=True, slots=True)
class StorageUse:
    """One storage, and when it is in memory if everything is kept.

    Attributes:
        name: For people.
        nbytes: Its size.
        kind: What it holds.
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
        name: As torch names it.
        time_s: How long it computes (s).
        inputs: Storages that it reads.
        outputs: Storages that it writes.
        phase: Where in the step it runs.
        region: See [Note: regions]; in backward and update -1.
    """

    name: str
    time_s: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    region: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A storage that autograd saves, in the order of packing.

    Attributes:
        key: How a plan names it.
        storage: Which storage.
        nbytes: Its size.
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
class Block:
    """One call of a block, which may be recomputed.

    Attributes:
        name: The module's name.
        region: Of its forward.
        forward: First operator of its forward, and the first after it.
        backward: The same of its backward.
        inputs: Storages that its forward reads from outside, parameters left out, in order.
    """

    name: str
    region: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that units move while operator ``at`` runs, on the channels that activations share."""

    at: int
    nbytes_read: int
    nbytes_written: int


@dataclass(frozen=True, slots=True)
class Profile:
    """One micro-batch with its update.

    Attributes:
        step_s: How long it takes when everything is kept (s); at least the sum of its operators.
    """

    step_s: float
    operators: tuple[Operator, ...]
    storages: tuple[StorageUse, ...]
    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]
    traffic: tuple[Traffic, ...] = field(default=())

    def at_pace(self, step_s: float) -> "Profile":
        """The same step when it takes ``step_s``; operators that would take longer shrink in proportion."""
        operators_s = sum(operator.time_s for operator in self.operators)
        shrink = min(1.0, step_s / operators_s) if operators_s else 1.0
        operators = tuple(replace(operator, time_s=operator.time_s * shrink) for operator in self.operators)
        return replace(self, step_s=step_s, operators=operators)

    def save(self, path: Path) -> None:
        """Write it as JSON, which :meth:`load` reads on any machine."""
        path.write_text(json.dumps({"version": 1, **asdict(self)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read what :meth:`save` wrote.

        Raises:
            RecipeError: No such file, or not a profile.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            return cls._of(given)
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}; wanted a profile that infinity wrote") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{path}: not a profile that infinity wrote: {error}") from error

    @classmethod
    def _of(cls, given: dict[str, Any]) -> "Profile":
        if given["version"] != 1:
            raise ValueError(f"version {given['version']}; this infinity reads version 1")
        return cls(
            float(given["step_s"]),
            tuple(Operator(**_tuples(o) | {"phase": Phase(o["phase"])}) for o in given["operators"]),
            tuple(StorageUse(**s | {"kind": Kind(s["kind"])}) for s in given["storages"]),
            tuple(Slot(**s | {"key": SlotKey(*s["key"])}) for s in given["slots"]),
            tuple(Block(**_tuples(b)) for b in given["blocks"]),
            tuple(Traffic(**t) for t in given["traffic"]),
        )


def _tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
