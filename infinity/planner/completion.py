"""When the gradient of each unit is complete: decisions that know units by number, and no tensor.

[Note: when gradients are complete]
When every trainable parameter of the unit has fired, or when the backward pass ends. Then the unit's weights
have no reader left in this step and go to the update with the gradient. Where there may be one, it is later:

- What is gathered as one (a leaf) is complete when backward leaves its module.
- A recomputed forward reads all parameters of a unit, also those whose gradients have come. If some of them
  are frozen, the last gradient is not the last read: such a unit waits for the end of the pass.
- Under ``no_sync`` no gradient of the step is complete, only that of a micro-batch.
"""

from collections.abc import Callable, Collection, Iterable


class Completions:
    """Decides when gradients of a step are complete.

    Args:
        leaves: Units that are complete when backward leaves their module.
        parameters: Returns how many parameters of a unit train, and how many it has.
        recomputed: Whether a recomputed forward reads a unit.

    Attributes:
        syncing: False under ``no_sync``: backward completes no gradients of the step.
        synced: A backward pass has completed the gradients of this step.
        in_backward: A backward pass gave gradients and has not ended.
        accumulated: A backward pass has given gradients that wait for a later one.
        passed: Units that are complete in this backward pass.
        delivered: Units whose gradients of this step are complete.
    """

    def __init__(
        self, leaves: frozenset[int], parameters: Callable[[int], tuple[int, int]],
        recomputed: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._leaves, self._parameters, self._recomputed = leaves, parameters, recomputed
        self.syncing, self.synced = True, False
        self.in_backward = self.accumulated = False
        self.passed: set[int] = set()
        self.delivered: set[int] = set()
        self._fired: dict[int, set[int]] = {}  # parameters, by unit, in this pass
        self._counts: dict[int, tuple[int, int]] = {}  # as ``parameters`` gave them in this pass

    def fire(self, unit: int, parameter: int) -> bool:
        """Take note of one parameter's gradient; return whether the unit's is complete with it."""
        self.in_backward = True
        if unit not in self._fired:
            self._fired[unit], self._counts[unit] = set(), self._parameters(unit)
        self._fired[unit].add(parameter)
        trainable, parameters = self._counts[unit]
        if len(self._fired[unit]) < trainable or unit in self._leaves:
            return False
        return trainable == parameters or not self._recomputed(unit)

    def left(self, units: Iterable[int]) -> list[int]:
        """Return those of the units that are complete now, whatever has not fired: backward leaves them.

        None are where a pass accumulates nothing (``torch.autograd.grad``).
        """
        return [unit for unit in units if self.in_backward and unit not in self.delivered]

    def left_at_end(self, trained: Iterable[int], opened: Collection[int]) -> list[int]:
        """Return the units that the end of the pass completes, in order.

        Args:
            trained: Units with trainable parameters.
            opened: Units that have a gradient which was not sent on its way.
        """
        return sorted({*opened, *(self.left(trained) if self.syncing else ())})

    def complete(self, unit: int) -> None:
        """Take note that a unit's gradient of this pass is complete, and of the step unless more follow."""
        self.passed.add(unit)
        self._fired.pop(unit, None)
        if self.syncing:
            self.delivered.add(unit)

    def end_backward(self) -> None:
        """Take note of the end of a pass whose gradients are all complete."""
        self.synced, self.accumulated = self.syncing, not self.syncing
        self.in_backward = False
        self._begin_pass()

    def reset(self) -> None:
        """Begin a step."""
        self.synced = self.in_backward = self.accumulated = False
        self.delivered = set()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.passed.clear()
        self._fired.clear()
        self._counts.clear()
