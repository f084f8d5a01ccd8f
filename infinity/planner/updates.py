"""Decisions about updates, without threads: when a gradient is complete, what follows, and where.

[Note: when gradients are complete]
When every trainable parameter of the unit has fired, or when the backward pass ends. Then the unit's weights
have no reader left in this step and go to the update with the gradient. Where there may be one, it is later:

- What is gathered as one (a leaf) is complete when backward leaves its module.
- A recomputed forward reads all parameters of a unit, also those whose gradients have come. If some of them
  are frozen, the last gradient is not the last read: such a unit waits for the end of the pass.
- Under ``no_sync`` no gradient of the step is complete, only that of a micro-batch.

Training drives it with threads, streams and engines (:mod:`infinity.shards.updates`), a plan with a virtual
clock (:mod:`infinity.planner.clock`). Both tell it what has happened, and carry out the actions it returns.

[Note: when an update starts]
With two versions a unit's update starts as soon as its gradient exists, inside backward: it reads the
committed version and writes the next. ``step`` then only publishes them: what was next is committed.
Otherwise gradients are held, and the updates start at ``step``. Either way they lag into the next forward,
where the next fetch of a unit waits for that unit's own update, and they run in the order in which the next
forward will need them.

[Note: speculation]
What an update needs to know is known at ``step`` only: the clip coefficient, which depends on the norm of all
gradients. An update inside backward takes it to be 1. Where it is, ``step`` validates the updates. Where it
is not, or ``param_groups`` changed meanwhile, they are rolled back: the next version is void, and they start
again from the committed one, with the right numbers. So gradients are kept until ``step``, as they are
without speculation; an optimizer that never clips gives them back as soon as they were read.

Every step tells whether speculation was right, or would have been. While the prediction is that it will not
be (see :class:`Predictor`), updates start at ``step``.

[Note: gradients on NVMe]
Where memory is too small for all gradients that wait for ``step``, some units' are written to NVMe as soon
as they are complete. An update inside backward reads its gradient from memory meanwhile, and memory is given
back when both are done. One that starts at ``step``, for the first time or again, reads it from NVMe, by
chunks. Each gradient has one place, which no commit names. The next write to it waits for all that reads or
writes it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum

from infinity.core.lifecycle import Lifecycle, UpdateState
from infinity.planner.prefetch_plan import Event, Kind


class StepOrder:
    """The order in which a training step uses its units and completes their gradients.

    Written by the prefetcher when a plan is made, read by whatever schedules updates.

    Attributes:
        gradients: Units in the order in which a step completes their gradients; empty while unknown.
    """

    def __init__(self) -> None:
        self._first_uses: dict[int, int] = {}
        self.gradients: tuple[int, ...] = ()

    def learn(self, events: Sequence[Event]) -> None:
        """Take in a training pass's trace."""
        self._first_uses = {e.unit: i for i, e in reversed([*enumerate(events)]) if e.kind is Kind.USE}
        self.gradients = tuple(event.unit for event in events if event.kind is Kind.DONE)

    def expect_only(self, units: Collection[int]) -> None:
        """Leave out units that completed without a gradient; until the order changes."""
        self.gradients = tuple(unit for unit in self.gradients if unit in units)

    def forget_gradients(self) -> None:
        """The plan that the order of gradients came from is not followed any more."""
        self.gradients = ()

    def first_use(self, unit: int) -> int:
        """Return the position of a unit's first use in the next step; its index while unknown."""
        return self._first_uses.get(unit, unit)


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


class Predictor:
    """Whether updates that start inside backward will be right: a saturating counter of two bits.

    Source: J. E. Smith, A study of branch prediction strategies (ISCA 1981).

    Attributes:
        counter: 0 to 3.
    """

    def __init__(self) -> None:
        self.counter = 2

    @property
    def right(self) -> bool:
        """The prediction for this step; the same all through it."""
        return self.counter >= 2

    def learn(self, right: bool) -> None:
        """Take in what this step showed."""
        self.counter = min(3, self.counter + 1) if right else max(0, self.counter - 1)


class Speculation:
    """Whether the updates of a step start before its norm is known: see [Note: speculation].

    Args:
        two_versions: An update may start inside backward.
        clips: The step may scale gradients, so they are kept until then.

    Attributes:
        started: Updates of the last step that started before its norm was known.
        rolled_back: Those of them that were void.
    """

    def __init__(self, *, two_versions: bool, clips: bool) -> None:
        self._two_versions, self.clips = two_versions, clips
        self.predictor = Predictor()
        self.started = self.rolled_back = 0

    @property
    def early(self) -> bool:
        """Whether updates of this step start inside backward, if there is an optimizer."""
        return self._two_versions and self.predictor.right

    def learn(self, started: int, *, right: bool) -> None:
        """Take in what a step showed: whether its updates had, or would have had, the right numbers."""
        self.predictor.learn(right)
        self.started, self.rolled_back = started, 0 if right else started

    def forget(self, started: int) -> None:
        """Take note of a step without an end, whose updates are void."""
        self.started = self.rolled_back = started


class Do(Enum):
    """An action that the driver of an update carries out when the update returns it."""

    STORE = "write the gradient to its place on NVMe; then call stored()"
    START = "compute the new weights and state; call computed() when they exist, landed() when it has ended"
    CANCEL = "start no further part of the computation; landed() follows as ever"
    FREE_GRADIENT = "give back the gradient's memory: nothing reads it any more"
    FREE_WEIGHTS = "give back the memory of the weights that were kept for the update"


class ShardUpdate:
    """One shard's update, from its complete gradient to the end of its step.

    Args:
        name: Of the unit, for messages.
        early: It starts inside backward: see [Note: when an update starts].
        keeps: The step may clip, so the gradient is kept until then: see [Note: speculation].
        spills: See [Note: gradients on NVMe].

    Attributes:
        in_flight: It was started and has not landed.
    """

    def __init__(self, name: str, *, early: bool, keeps: bool, spills: bool) -> None:
        self._lifecycle = Lifecycle(f"update of {name}", UpdateState.HELD)
        self._early, self._keeps, self._spills = early, keeps, spills
        self.in_flight = False
        self._storing = self._reading = self._rolling_back = False
        self._has_gradient = self._has_weights = True  # in memory

    # --- what a driver asks -----------------------------------------------------------------------

    @property
    def state(self) -> UpdateState:
        return self._lifecycle.state

    @property
    def speculated(self) -> bool:
        """Whether it started before the norm was known, and is neither validated nor rolled back."""
        return self.state is UpdateState.SPECULATED

    @property
    def reads_stored_gradient(self) -> bool:
        """Whether it reads its gradient from NVMe, once it has started: see [Note: gradients on NVMe]."""
        return self._spills and not self.speculated

    @property
    def holds_fetches(self) -> bool:
        """Whether the unit's next fetch waits until it has landed: it writes the committed version."""
        return self.in_flight and not self.speculated

    # --- what has happened ------------------------------------------------------------------------

    def complete(self, *, finite: bool = True) -> tuple[Do, ...]:
        """The gradient is complete.

        Args:
            finite: Its norm is; otherwise the step will be skipped, and the gradient is not read.
        """
        if not finite:
            return self.drop()
        self._storing = self._spills
        actions = (Do.STORE,) if self._spills else ()
        return actions + (self._start(UpdateState.SPECULATED) if self._early else ())

    def stored(self) -> tuple[Do, ...]:
        """The gradient is on NVMe, or the write has failed."""
        self._storing = False
        return self._free()

    def computed(self) -> tuple[Do, ...]:
        """The new weights exist, and what the update was given is read no more."""
        self._reading = False
        weights = (Do.FREE_WEIGHTS,) if self._has_weights else ()
        self._has_weights = False
        return weights + self._free()

    def landed(self) -> tuple[Do, ...]:
        """The last byte is written; of an update that is rolled back: the last one in flight."""
        self.in_flight = self._reading = False
        return self.roll_back() if self._rolling_back else self._free()

    def validate(self) -> tuple[Do, ...]:
        """The step has the numbers that the update took for granted."""
        self._lifecycle.move(UpdateState.VALIDATED)
        return self._free()

    def roll_back(self) -> tuple[Do, ...]:
        """The step has other numbers, or is forgotten: what was written to the next version is void."""
        self._rolling_back = self.in_flight
        if self.in_flight:
            return (Do.CANCEL,)
        self._lifecycle.move(UpdateState.ROLLED_BACK)
        return self._free()

    def commit(self) -> tuple[Do, ...]:
        """The step is committed: an update that does not stand starts, for the first time or again."""
        return () if self.state is UpdateState.VALIDATED else self._start(UpdateState.VALIDATED)

    def drop(self) -> tuple[Do, ...]:
        """The step is forgotten, and nothing is in flight."""
        freed = [Do.FREE_WEIGHTS] if self._has_weights else []
        freed += [Do.FREE_GRADIENT] if self._has_gradient and not self._storing else []
        self._has_weights, self._has_gradient = False, self._has_gradient and self._storing
        return tuple(freed)

    def _start(self, state: UpdateState) -> tuple[Do, ...]:
        self._lifecycle.move(state)
        self.in_flight = True
        self._reading = not self.reads_stored_gradient
        return (Do.START,)

    def _free(self) -> tuple[Do, ...]:
        """Return what gives the gradient's memory back, once, when nothing will read it there."""
        read_again = self.state in (UpdateState.HELD, UpdateState.ROLLED_BACK)
        read_again |= self._keeps and self.speculated
        read_again &= not self._spills  # then NVMe has it
        if not self._has_gradient or self._storing or self._reading or read_again:
            return ()
        self._has_gradient = False
        return (Do.FREE_GRADIENT,)
