"""Builds models, and reads, changes and closes them between steps: public functions."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import infinity.api.init  # noqa: F401  # registers hooks
from infinity.api.adamw import AdamW
from infinity.core.config import SettingError
from infinity.core.errors import StateError
from infinity.core.process import UninterruptedExit, uninterrupted
from infinity.engine.config import EngineConfig, HasEngineConfig, engine_config
from infinity.engine.runtime import Runtime, open_runtimes, runtime_of, runtimes, served
from infinity.engine.schedule import LayerSchedule, Loss
from infinity.shards.journal import unpack


def is_served(model: nn.Module) -> bool:
    """Return whether ``model``, or a model that it wraps, was built under ``infinity.Init``."""
    return any(module in served for module in model.modules())


def _refuse_other_optimizers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before another optimizer writes to a parameter that a unit holds."""
    if not open_runtimes or hasattr(optimizer, "runtime"):
        return
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if any(runtime.units.places(param) for runtime in open_runtimes):
            raise StateError(
                f"{type(optimizer).__name__}.step() on parameters that were made under infinity.Init, whose "
                "gradients and states are sharded: write optimizer = infinity.AdamW(model, lr=...)"
            )


def _refuse_wrappers(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise before a wrapper that copies or reduces parameters itself writes to those that a unit holds."""
    kinds = ("DistributedDataParallel", "DeepSpeedEngine")
    if type(wrapper).__name__ in kinds and module is not None and is_served(module):
        raise StateError(
            f"{type(wrapper).__name__} around a model that was built under infinity.Init, which shards "
            "weights and reduces gradients itself: use the model as it is (with Accelerate, the Trainer or "
            "Lightning as in examples/)"
        )


# Public hooks of torch, for all optimizers and modules: nothing is patched.
register_optimizer_step_pre_hook(_refuse_other_optimizers)
register_module_module_registration_hook(_refuse_wrappers)


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


class Init:
    """Context manager that shards and stores parameters as they are created.

    With more than one process, torch.distributed is initialized from the variables of torchrun, srun or
    mpirun unless it is already. Every rank must build the same model with the same seed. An error in the
    block closes the model.

    Args:
        recipe: Budgets, dtype and directories: a recipe (see ``infinity recipe``), or the
            :class:`~infinity.engine.config.EngineConfig` that it contains. Or a model that was built under
            ``Init`` or loaded with ``from_pretrained`` and has no optimizer yet: modules that are added to
            it, or embeddings that are resized, in the block join it.
        device: The device of this rank, such as ``"cpu"`` or ``"cuda:1"``; None: as the recipe says, by
            default the accelerator with the rank's number on its machine.

    Raises:
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
        LaunchError: There is no such device, or none for this rank.
    """

    def __init__(
        self, recipe: EngineConfig | HasEngineConfig | nn.Module | None = None, *,
        device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        if isinstance(recipe, nn.Module):
            self.runtime = runtime_of(recipe)
            return
        config = engine_config(recipe)
        self.runtime = Runtime(config if device is None else replace(config, device=str(device)))

    def __enter__(self) -> "Init":
        self.runtime.reopen()
        try:
            self.runtime.construction.__enter__()
        except StateError:
            if not self.runtime.units:  # nothing was built: no one else will close it
                self.runtime.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = False
        try:
            self.runtime.construction.__exit__(kind, error, trace)
            if error is None:
                self.runtime.meet()
                done = True
        finally:
            if not done:
                self.runtime.close()


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager that accumulates gradients; the first backward pass after it completes them.

    Raises:
        BudgetError: ``memory.device`` cannot hold gradients that wait; the message has the arithmetic.
    """
    executor = runtime_of(model).executor()
    with uninterrupted:
        executor.divide_again(accumulates=True)
    completions = executor.gradients.completions
    before, completions.syncing = completions.syncing, False
    try:
        yield
    finally:
        completions.syncing = before


@contextlib.contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False
) -> Iterator[None]:
    """Context manager in which parameters hold their full values; every rank must enter it.

    Args:
        params: A module (all its parameters), a parameter, or several.
        modify: Values that were written are stored at the end; with several ranks, rank 0's.

    Raises:
        StateError: ``modify`` while gradients of a step wait for ``step()``; or inside the model's ``Init``.
    """
    several = params.parameters() if isinstance(params, nn.Module) else params
    listed = [several] if isinstance(several, nn.Parameter) else list(several)
    if any(runtime.construction.is_building(listed) for runtime in runtimes()):
        raise StateError(
            "infinity.gathered inside the infinity.Init block of its model, where parameters are whole when "
            "they are asked for: write to them as in plain PyTorch, with the same values on every rank; or "
            "call infinity.gathered after the block"
        )
    served = [runtime for runtime in runtimes() if runtime.units.holding(listed)]
    with UninterruptedExit() as stack:
        for runtime in served:
            stack.enter_context(runtime.values.gathered(listed, modify))
        yield


def state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Any]:
    """Return ``model.state_dict()`` with full values on rank 0, or on every rank; every rank must call."""
    values = runtime_of(model).values
    before, values.every_rank = values.every_rank, every_rank
    try:
        return model.state_dict()
    finally:
        values.every_rank = before


def close(model: nn.Module, *, keep: bool = False) -> None:
    """Release the files, memory and threads that serve ``model``; its weights are lost.

    Waits for updates in flight, needs no other rank, and may be called after any error, and twice. On the way
    out of an exception, or with ``keep``, the files of a named run stay on disk after its first step, and the
    run can go on: see :func:`infinity.resume`.

    Raises:
        DiskError: With ``keep``, and not on the way out of an exception: the last step could not be kept.
            Where an error of that step was caught before, it is raised again.
    """
    runtime_of(model, ended=True).close(keep=keep)


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
        BudgetError: ``memory.device`` cannot keep a block while the micro-batches go through it.
        SettingError: ``memory.activations`` is offload: the schedule holds what blocks return.
        StateError: No blocks were found.
    """
    schedule, runtime = LayerSchedule(model, micro_batches, loss), runtime_of(model)
    if runtime.activations.policy == "offload":
        wanted = "null with a layer schedule, which recomputes by itself and holds what blocks return"
        raise SettingError("memory.activations", "offload", wanted)
    runtime.executor().hold_blocks(*schedule.blocks.units(runtime.units), str(schedule.blocks))
    return schedule
