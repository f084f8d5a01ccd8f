"""The numbers with which parameters are updated in a step, read once from the optimizer's groups.

[Note: step counts]
The bias correction of a parameter depends on how often it was updated itself. So its segment has a count of
its own, which grows when an update of it is committed, and a shard is updated by runs of segments that have
both group and count in common: one run, or one for each group, as long as every step uses every parameter.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinity.optim.rules import UpdateRule
from infinity.partition.unit import Segment, Unit


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of the shard, updated with one group's ``hyper``.

    Elements in no run are frozen or padding: their weights and state are carried over unchanged.
    """

    start: int
    stop: int
    hyper: Tensor


class StepHypers:
    """The hyperparameters of a step, read once from the optimizer's groups for all of its updates.

    Args:
        rule: Reads the groups.

    Attributes:
        groups: The optimizer's ``param_groups``.
        loss_scale: Of the gradients.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self.groups: Sequence[Mapping[str, Any]] = ()
        self.loss_scale = 1.0
        self._read: list[dict[str, Any]] | None = None  # the options of each group; None: not in this step
        self._group_of: dict[int, int] = {}  # by id of the parameter
        self._tensors: dict[tuple[int, int, float], Tensor] = {}  # by group, step count and gradient scale
        self._read_from: object = None  # the groups that were read
        self._lock = threading.Lock()

    def runs(self, unit: Unit, used: Iterable[Segment], grad_scale: float) -> tuple[Run, ...]:
        """Return the parts of a shard that are updated: see [Note: step counts]. Any thread.

        Args:
            used: Parameters that have a gradient; those in no group are left alone, too.
            grad_scale: What gradients are multiplied by, beside the loss scale.
        """
        self.begin_step()
        with self._lock:
            hyper_of: dict[int, Tensor] = {}
            for segment in used:
                group = self._group_of.get(id(segment.whole))
                if group is not None:
                    hyper_of[segment.index] = self._tensor(group, segment.steps + 1, grad_scale)
        return runs_of(unit, hyper_of)

    def begin_step(self) -> None:
        """Read the groups, unless this step has done so."""
        with self._lock:
            if self._read is None:
                self._read_from, self._tensors = self.groups, {}
                self._read = [deepcopy({**group, "params": ()}) for group in self.groups]
                self._group_of = {id(p): i for i, group in enumerate(self.groups) for p in group["params"]}

    def _tensor(self, group: int, step: int, grad_scale: float) -> Tensor:
        assert self._read is not None
        key = group, step, grad_scale
        if key not in self._tensors:
            scale = grad_scale / self.loss_scale
            self._tensors[key] = self._rule.hyper(self._read[group], step=step, grad_scale=scale)
        return self._tensors[key]

    def count(self, used: Iterable[Segment]) -> None:
        """Take note that the update of these parameters is committed; after :meth:`runs`."""
        for segment in used:
            segment.steps += id(segment.whole) in self._group_of

    @property
    def changed(self) -> bool:
        """Whether the groups are not what they were when this step read them."""
        if self._read is None:
            return False
        return self._read_from is not self.groups or self._numbers(self._read) != self._numbers(self.groups)

    def end_step(self) -> None:
        """Read the groups anew when the next update starts."""
        self._read = None

    def _numbers(self, groups: Iterable[Mapping[str, Any]]) -> list[tuple[float, ...]]:
        return [self._rule.numbers(group, 1, 1.0) for group in groups]


def runs_of(unit: Unit, hyper_of: Mapping[int, Tensor]) -> tuple[Run, ...]:
    """The shard's elements by the numbers of their update.

    Frozen parameters, those without a gradient, and padding are in none.

    Args:
        hyper_of: By index of the segment; parameters that have all numbers in common share the tensor.
    """
    runs: list[Run] = []
    low, high = unit.shard_start, unit.shard_start + unit.shard_numel
    joined = False  # only padding lies between the last run and this segment; it stays zero
    for segment in unit.segments:
        hyper = hyper_of.get(segment.index)
        start, stop = max(low, segment.offset) - low, min(high, segment.stop) - low
        if hyper is None:
            joined = False
        elif start < stop:
            if joined and runs[-1].hyper is hyper:
                runs[-1] = Run(runs[-1].start, stop, hyper)
            else:
                runs.append(Run(start, stop, hyper))
            joined = True
    return tuple(runs)
