"""``layer_schedule``: the layer schedule of a model that was built under ``Init``, and its room in memory."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from infinity.api.schedule import Blocks, LayerSchedule, Loss
from infinity.core.errors import BudgetError
from infinity.core.nbytes import format_nbytes
from infinity.engine.registry import runtime_of
from infinity.engine.runtime import Runtime


def layer_schedule(model: nn.Module, micro_batches: int, loss: Loss | None = None) -> LayerSchedule:
    """What takes the model's place in a loop in which a step reads every weight twice, whatever its batch.

    All micro-batches of a step go through a block before the next block is read::

        scheduled = infinity.layer_schedule(model, micro_batches=8)  # once, after the optimizer
        for batch in loader:  # of 8 micro-batches, row after row
            scheduled(**batch).loss.backward()
            optimizer.step()

    Args:
        model: Built under ``Init``. Its blocks are found: the largest ``nn.ModuleList``.
        micro_batches: Slices of each batch.
        loss: The loss of one slice, given its part of the arguments; by default the model's own ``loss``.

    Raises:
        BudgetError: ``memory.device`` cannot keep a block while the micro-batches go through it; the
            message has the arithmetic.
        StateError: No blocks were found.
    """
    schedule, runtime = LayerSchedule(model, micro_batches, loss), runtime_of(model)
    make_room = partial(_make_room, runtime, str(schedule.blocks), _units(runtime, schedule.blocks))
    make_room()
    runtime.on_division.append(make_room)  # a new division knows nothing of blocks
    return schedule


#: Indices of the units of each block. The blocks themselves would keep the model, and so its runtime, alive.
Units = Sequence[set[int]]


def _units(runtime: Runtime, blocks: Blocks) -> Units:
    of = {id(segment.param): unit.index for unit in runtime.units for segment in unit.segments}
    return [{of[id(param)] for param in block.parameters() if id(param) in of} for block in blocks.modules]


def _make_room(runtime: Runtime, blocks: str, units: Units) -> None:
    """Let the window hold a block; early updates lag less where that takes it."""
    connection = runtime.connected()
    window, division = connection.prefetcher, connection.division
    weights = largest = 0
    for block in units:
        sizes = [window.nbytes.get(index, 0) for index in block]
        weights, largest = max(weights, sum(sizes)), max(largest, *sizes)
    # A block's gradients come together, after its last micro-batch. Of gradients that come one by one, or
    # wait as shards only, the budget has room for one unit's.
    full_gradients_wait = not division.early and runtime.world_size == 1
    gradients = 0 if full_gradients_wait else weights - largest
    free = division.window + division.lag
    if weights + gradients > free:
        missing = weights + gradients - free
        raise BudgetError(
            f"micro-batches that go through a block together ({blocks}) need {format_nbytes(weights)} for "
            f"its weights and {format_nbytes(gradients)} more for its gradients; memory.device, "
            f"{format_nbytes(division.total)}, has {format_nbytes(free)} for them. Raise it by "
            f"{format_nbytes(missing)} ({missing} bytes), or use the ordinary schedule" + _beside(runtime)
        )
    window.capacity_nbytes = max(weights, min(window.capacity_nbytes, free - gradients))


def _beside(runtime: Runtime) -> str:
    if runtime.activations.policy != "plan":
        return ""
    return (
        "; or say memory.activations=keep: a plan gives activations a share of memory.device, and this "
        "schedule keeps little more than each block's input"
    )
