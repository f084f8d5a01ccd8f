"""``infinity.resume``: going on with an interrupted run, in a training loop of one's own."""

from torch import nn

from infinity.api.adamw import AdamW
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of
from infinity.shards.journal import unpack


def resume(model: nn.Module, optimizer: AdamW) -> int:
    """Restore all states of the interrupted run that the model's recipe names, and go on with it.

    Weights and optimizer states become those of the last committed step, bitwise; so do learning rates, the
    loss scale, buffers, random generators, and what the optimizer follows. Every rank must call, once, before
    the first forward pass. The number of ranks, the budgets and the directories may be others than before.

    The recipe needs ``run.name`` and directories in ``memory.nvme``. The files of the run stay on disk until
    ``infinity.close(model)``, or ``optimizer.close()``, says that it is over.

    Returns:
        Number of committed steps, after which the loop goes on; 0: the run is new.

    Raises:
        StateError: The model, or what the optimizer follows, differs from the interrupted run's.
        DiskError: States cannot be read.
    """
    runtime = runtime_of(model)
    if not isinstance(optimizer, AdamW) or optimizer.runtime is not runtime:
        raise StateError("infinity.resume(model, optimizer): wanted the model's infinity.AdamW")
    saved = runtime.resume()
    if saved is None:
        return 0
    optimizer.load_committed(unpack(saved.state(runtime.ranks.rank)))
    return saved.step
