"""Portable checkpoints, in: the values of a directory of ``torch.distributed.checkpoint`` for a model.

[Note: names] is in :mod:`infinity.checkpoint.portable`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.directory import Stored
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.portable import OPTIMIZER, tensor_names
from infinity.core.errors import CheckpointError, StateError, library_errors
from infinity.partition.unit import Unit

#: Hyperparameters that are loaded.
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "initial_lr")


class PortableValues:
    """The values of a checkpoint for a model and its optimizer; decided before the first one is read.

    Args:
        checkpoint: Stays open while values are read.
        model: The model; its tensors' names are looked for, behind any prefix that all of them share
            (``model.``).
        units: Units with its sharded parameters; its other tensors are whole on every rank.
        groups: The optimizer's ``param_groups``; none: only weights are loaded.

    Attributes:
        steps: Step counts by id of the parameter; empty if the checkpoint has no state of an optimizer.
        numbers: The hyperparameters of each group; those that the checkpoint has.

    Raises:
        CheckpointError: Weights are missing, left over or of another shape; lists all of them.
    """

    def __init__(
        self, checkpoint: DistributedCheckpoint, model: nn.Module, units: Iterable[Unit],
        groups: Sequence[Mapping[str, Any]], moments: Sequence[str],
    ) -> None:  # fmt: skip
        self._moments = moments
        self._checkpoint = checkpoint
        self._named = tensor_names(model)
        self._sharded = {id(s.whole): s for unit in units for s in unit.segments}
        _require_whole_units(units, {id(tensor) for tensor, _ in self._named})
        self._fields: dict[int, tuple[Stored, ...]] = {}  # by id of the tensor: its values and moments
        self._complaints: list[str] = []
        self._find_weights()
        self.steps: dict[int, int] = {}
        self.numbers: list[dict[str, Any]] = [{} for _ in groups]
        self._find_state(groups)
        if self._complaints:
            lines = "\n  ".join(self._complaints)
            raise CheckpointError(
                f"{checkpoint.path} does not fit {type(model).__name__}:\n  {lines}\n"
                "Build the model that was saved; keys are its parameters' names, with or without a prefix"
            )

    def _find_weights(self) -> None:
        every = [name for _, names in self._named for name in names]
        prefix = _prefix(every, self._checkpoint)
        for tensor, names in self._named:
            found = [name for name in names if prefix + name in self._checkpoint]
            if found:
                self._take(tensor, [prefix + found[0]])
            else:
                self._complaints.append(f"missing: {prefix}{names[0]}")
        parts = {prefix + name.partition(".")[0] for name in every}
        known = {prefix + name for name in every}
        for key in sorted(self._checkpoint.keys() - known):
            if any(key.startswith(part + ".") for part in parts):
                self._complaints.append(f"unknown to the model: {key}")

    def _take(self, tensor: Tensor, keys: Sequence[str]) -> None:
        """Let these entries be the values, and moments, of ``tensor``."""
        for key in keys:
            shape = tuple(self._checkpoint[key].shape)
            if shape != tuple(tensor.shape):
                self._complaints.append(f"{key} has shape {shape}, the model {tuple(tensor.shape)}")
        self._fields[id(tensor)] = (*self._fields.get(id(tensor), ()), *(self._checkpoint[k] for k in keys))

    def _find_state(self, groups: Sequence[Mapping[str, Any]]) -> None:
        name_of = {id(tensor): names for tensor, names in self._named}
        members = [[(p, name_of[id(p)]) for p in group["params"] if id(p) in name_of] for group in groups]
        first = f".{self._moments[0]}"
        prefix = _prefix(
            [f"state.{name}{first}" for group in members for _, names in group for name in names],
            {key for key in self._checkpoint if key.endswith(first)},
        )
        numbers = _numbers(self._checkpoint, prefix)
        for group, found in zip(members, self.numbers, strict=True):
            for param, names in group:
                held = [name for name in names if f"{prefix}state.{name}{first}" in self._checkpoint]
                if not held or not param.requires_grad or id(param) not in self._sharded:
                    continue
                state = f"{prefix}state.{held[0]}."
                if missing := [m for m in self._moments if state + m not in self._checkpoint]:
                    self._complaints += [f"missing: {state}{moment}" for moment in missing]
                    continue
                self._take(param, [state + moment for moment in self._moments])
                self.steps[id(param)] = self._count(state + "step")
                theirs = numbers.get(held[0], {})
                if any(name in found and found[name] != value for name, value in theirs.items()):
                    self._complaints.append(f"{held[0]} has other hyperparameters than its parameter group")
                found.update(theirs)

    def _count(self, key: str) -> int:
        """A count of steps that was saved as a number, or as a tensor."""
        value: Any = torch.zeros(1, device="cpu")
        if key in self._checkpoint.objects:
            value = self._checkpoint.value(key)
        elif key not in self._checkpoint:
            self._complaints.append(f"missing: {key}")
        elif self._checkpoint[key].shape.numel() == 1:
            self._checkpoint[key].fill(0, value)
        with library_errors(CheckpointError, f"{self._checkpoint.path}: {key} is no count of steps"):
            return max(0, int(value))

    def extra(self, *path: str) -> Any:
        """Return a further value of the optimizer, by its path; None: there is none."""
        key = ".".join((OPTIMIZER, *path))
        return self._checkpoint.value(key) if key in self._checkpoint.objects else None

    # --- values ------------------------------------------------------------------------------

    def master(self, unit: Unit) -> Callable[[int, int], Tensor]:
        """Return a function that gives elements of the unit's flat buffer, fp32; gaps are zero."""
        return lambda start, stop: self._range(unit, 0, start, stop)

    def moments(self, unit: Unit) -> Callable[[int, int], Sequence[Tensor]]:
        """The same of its moments, which are zero where the checkpoint has none."""
        return lambda start, stop: [
            self._range(unit, field, start, stop) for field in range(1, 1 + len(self._moments))
        ]

    def _range(self, unit: Unit, field: int, start: int, stop: int) -> Tensor:
        out = torch.zeros(stop - start, device="cpu")
        for s in unit.segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            fields = self._fields.get(id(s.whole), ())
            if low < high and field < len(fields):
                fields[field].fill(s.first + low - s.offset, out[low - start : high - start])
        return out

    def holds(self, unit: Unit) -> bool:
        """Return whether the model has the parameters of ``unit``."""
        return any(id(s.whole) in self._fields for s in unit.segments)

    def fill_whole(self) -> None:
        """Give tensors that every rank has whole their values."""
        with torch.no_grad():
            for tensor, _ in self._named:
                if id(tensor) not in self._sharded:
                    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
                    self._fields[id(tensor)][0].fill(0, flat)
                    tensor.copy_(flat.view(tensor.shape))


def _require_whole_units(units: Iterable[Unit], given: Collection[int]) -> None:
    """Raise if a model has only some parameters of a unit: all of a unit is written at one time.

    Raises:
        StateError: It does.
    """
    for unit in units:
        held = [id(s.whole) in given for s in unit.segments]
        if any(held) and not all(held):
            raise StateError(
                f"{unit.name} has parameters of this model and others: give load_checkpoint the whole model "
                "that was built under infinity.Init"
            )


def _prefix(names: Sequence[str], keys: Collection[str]) -> str:
    """Return the prefix that most of ``names`` have among ``keys``; the shortest of several."""
    found = Counter[str]()
    for name in names:
        for key in keys:
            if key.endswith(name) and (key == name or key[-len(name) - 1] == "."):
                found[key.removesuffix(name)] += 1
        if found:  # all names have the same
            break
    counts = {each: sum(each + name in keys for name in names) for each in found}
    return min(found, key=lambda each: (-counts[each], len(each)), default="")


def _numbers(checkpoint: DistributedCheckpoint, prefix: str) -> dict[str, dict[str, Any]]:
    """Hyperparameters by name of the parameter, from either form: see [Note: names]."""
    found: dict[str, dict[str, Any]] = {}
    groups = f"{prefix}param_groups."
    listed: dict[str, list[str]] = {}
    for key in sorted(checkpoint.objects):
        if key.startswith(groups) and key.endswith(".params"):
            names = checkpoint.value(key)
            listed[key.removeprefix(groups).removesuffix(".params")] = (
                names if isinstance(names, list) else []
            )
    for key in checkpoint.objects:
        name, _, number = key.removeprefix(groups).rpartition(".")
        if key.startswith(groups) and number in _NUMBERS and (name in listed or not listed):
            value = checkpoint.value(key)
            for each in listed.get(name, [name]):
                found.setdefault(str(each), {})[number] = value
    return found
