"""``layer_schedule``: the layer schedule of a model that was built under ``Init``, and its room in memory."""

from torch import nn

from infinity.api.schedule import LayerSchedule, Loss
from infinity.core.config import SettingError
from infinity.engine.runtime import runtime_of


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
    blocks, tiles = [], []
    for block in schedule.blocks.modules:
        places = [(runtime.units.places(param), runtime.units.find(param)) for param in block.parameters()]
        blocks.append({whole[0].index for _, whole in places if whole is not None})
        tiles.append({unit.index for parts, whole in places if whole is None for unit, _ in parts})
    runtime.executor().hold_blocks(blocks, tiles, str(schedule.blocks))
    return schedule
