"""``layer_schedule``: the layer schedule of a model that was built under ``Init``, and its room in memory."""

from torch import nn

from infinity.core.config import SettingError
from infinity.engine.runtime import runtime_of
from infinity.engine.schedule import Blocks, LayerSchedule, Loss
from infinity.partition.unit import UnitIndex


def layer_schedule(model: nn.Module, micro_batches: int, loss: Loss | None = None) -> LayerSchedule:
    """Wrap ``model`` so that a step reads every weight at most twice, however many micro-batches it has.

    All micro-batches of a step go through a block before the next block is read (tiles of a parameter that is
    too large to be gathered whole are read for each micro-batch, but for those that stay in memory)::

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
        SettingError: ``memory.activations`` is offload: the schedule holds what blocks return, so nothing
            would leave memory.
        StateError: No blocks were found.
    """
    schedule, runtime = LayerSchedule(model, micro_batches, loss), runtime_of(model)
    if runtime.activations.policy == "offload":
        wanted = "null with a layer schedule, which recomputes by itself and holds what blocks return"
        raise SettingError("memory.activations", "offload", wanted)
    runtime.executor().hold_blocks(*units_of(schedule.blocks, runtime.units), str(schedule.blocks))
    return schedule


def units_of(blocks: Blocks, units: UnitIndex) -> tuple[list[set[int]], list[set[int]]]:
    """Return the indices of each block's units, and of its tiles."""
    whole, tiles = [], []
    for block in blocks.modules:
        places = [(units.places(param), units.find(param)) for param in block.parameters()]
        whole.append({place[0].index for _, place in places if place is not None})
        tiles.append({unit.index for parts, place in places if place is None for unit, _ in parts})
    return whole, tiles
