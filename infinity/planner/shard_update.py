"""The update of one shard in one step: a state machine that owns no thread and moves no byte.

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

from enum import Enum

from infinity.core.lifecycle import Lifecycle, UpdateState


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
