"""Plans what waits between blocks while all micro-batches go through a block: its memory, and its moves.

[Note: moves in a stretch of a step]
A trace has one micro-batch, whose operators take as long as those of all. So values that leave in a block's
forward leave when it begins, and what a block needs comes while it runs: its end waits for the last of it.
The runtime moves one micro-batch after the other, each beside the compute of another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infinity.activations.store import directly_moved_nbytes
from infinity.core.plan import Place
from infinity.planner.passing import ON_THEIR_WAY, PassingPlan
from infinity.predict.step import Stored


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Records a block's forward and backward, as operators ``[begin, end)`` and ``[backward, done)``."""

    begin: int
    end: int
    backward: int
    done: int
    given: int  # bytes of one micro-batch that no other block is given
    returned: int  # bytes that it returns for one micro-batch


def waiting(spans: Sequence[BlockSpan], plan: PassingPlan) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and bytes of what waits in device memory for all micro-batches but the running one.

    Without values that are kept for backward, whose lives a record knows.
    """
    others = plan.slices - 1
    held = min(others, plan.held)
    for block, span in enumerate(spans):
        # Gradients of what the block returned make place for those of what it was given.
        yield span.backward, span.done, max(held * span.returned, (held if block else others) * span.given)
        last = span is spans[-1]
        until = spans[-1].backward if last else spans[block + 1].end
        # What tails take make place for its gradient.
        beyond = held - min(others, kept_of(plan, block))
        if last or beyond > 0:
            number = held if last else beyond
            yield span.end, until, number * span.returned
    if spans and plan.leaves:
        yield spans[0].begin, spans[0].done, ON_THEIR_WAY * plan.nbytes


def kept_of(plan: PassingPlan, block: int) -> int:
    """Return for how many micro-batches a block's output stays in device memory until backward."""
    return sum(plan.value(block * plan.slices + index) is Place.KEEP for index in range(plan.slices))


def moves(
    spans: Sequence[BlockSpan], plan: PassingPlan, position: Callable[[int], int], *, on_accelerator: bool
) -> Iterator[Stored]:
    """Yield the moves of values and gradients; ``position`` returns the place of an operator in the trace."""
    nbytes = plan.nbytes if on_accelerator else directly_moved_nbytes(plan.nbytes)

    def moved(
        places: list[Place], leaves: int | None, comes: tuple[int, int], has_room: bool
    ) -> Iterator[Stored]:
        load_at, asked_at = map(position, comes)
        packed_at = None if leaves is None else position(leaves)
        for place in (Place.HOST, Place.NVME):
            if number := places.count(place):
                on_nvme = place is Place.NVME
                yield Stored(number * nbytes, packed_at, load_at, asked_at, on_nvme, has_room)

    indices = range(plan.slices)
    gradients = [plan.gradient(index) for index in indices]
    for block, span in enumerate(spans):
        values = [plan.value(block * plan.slices + index) for index in indices]
        above = spans[block + 1] if block + 1 < len(spans) else None
        # The tails take what the last block returned, in forward and in backward.
        used = (span.end, span.backward - 1) if above is None else (above.backward, above.done - 1)
        yield from moved(values, span.begin, used, True)
        again = [place for index, place in enumerate(values) if not plan.is_held(index)]
        yield from moved(again, None, used if above is None else (above.begin, above.end - 1), False)
        yield from moved(gradients, used[0], (span.backward, span.done - 1), False)
