"""``save_checkpoint`` and ``load_checkpoint``: directories of ``torch.distributed.checkpoint``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infinity.api.adamw import AdamW
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.portable import PortableSave
from infinity.checkpoint.portable_values import PortableValues
from infinity.comm.ranks import all_ranks_or_raise
from infinity.core.errors import StateError
from infinity.core.files import user_path
from infinity.engine.runtime import Runtime, runtime_of


def save_checkpoint(
    model: nn.Module, optimizer: AdamW | None, path: str | Path, *, background: bool = False
) -> PortableSave:
    """Write weights, moments and hyperparameters to a new directory of ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads it on any number of ranks, into FSDP2, torchtitan or a plain
    model: exact fp32 weights under the model's own names, and beside them the state of ``torch.optim.AdamW``
    as ``{"optimizer": get_optimizer_state_dict(...)}``, with or without ``flatten_optimizer_state_dict``.

    Streamed: beside a few buffers, memory holds a part of one unit. The directory appears when it is whole; a
    save that fails or is killed leaves nothing under its name, and training can go on. Every rank must call,
    between two steps, and ``path`` lies on a file system that all see.

    With ``background`` it returns when all is planned. A thread of each rank then writes what the states are
    now, while training goes on, and the directory appears in ``wait()`` of what is returned. Every rank must
    call that between two later steps, before the next save and before the model is closed. It raises the
    errors below; ``done`` says whether this rank has written its part.

    Args:
        model: Built under :class:`infinity.Init`.
        optimizer: Of this model; None: only weights are saved.
        path: Must not exist, or be empty; rank 0's value is used.
        background: Return before it is written.

    Raises:
        CheckpointError: ``path`` is not free.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
        StateError: There are gradients of a step that is not over, another save has not ended, or the states
            of an interrupted run are not in their places yet: call :func:`infinity.resume` first.
    """
    save = begin_save(model, optimizer, path, background=background)
    if not background:
        save.wait()
    return save


def begin_save(
    model: nn.Module, optimizer: AdamW | None, path: str | Path, *, background: bool,
    then: Callable[[], object] = lambda: None,
) -> PortableSave:  # fmt: skip
    """Begin what :func:`save_checkpoint` does.

    Args:
        then: Called on rank 0 when the directory is published.
    """
    runtime = _between_steps(model, settled=not background)
    tiers, ranks = runtime.tiers, runtime.ranks
    if not all(save.ended for save in runtime.saves):
        raise StateError("a checkpoint is being saved in the background: call wait() of it before the next")
    extra: dict[tuple[str | int, ...], Any] = {}
    if optimizer is not None and optimizer.scaler is not None:
        extra = {("loss_scaler", key): value for key, value in optimizer.scaler.state_dict().items()}
    groups = () if optimizer is None else optimizer.param_groups
    save = PortableSave(
        model,
        runtime.units,
        user_path(path, "path"),
        groups=groups,
        extra=extra,
        ranks=ranks,
        moments=tiers.layout.full_names[1:],
    )
    runtime.saves[:] = [save]
    if not background:
        save.start(tiers.chunk_fields, then=then)
        return save
    try:
        with all_ranks_or_raise(ranks, f"keeping the states for {save.out}"):
            snapshot = runtime.records.snapshot()
    except BaseException:
        tiers.unpin()
        save.close()
        raise
    save.start(lambda unit: snapshot.read(unit.index), beside=True, end=tiers.unpin, then=then)
    return save


def load_checkpoint(model: nn.Module, optimizer: AdamW | None, path: str | Path) -> int:
    """Load weights and the optimizer's state from a directory of ``torch.distributed.checkpoint``.

    Written by :func:`save_checkpoint`, or by ``torch.distributed.checkpoint.save`` from FSDP2, torchtitan or
    a plain model with the same names of parameters, on any number of ranks. Streamed: each rank reads its own
    ranges of elements, chunk by chunk. No code of the directory's runs. Every rank must call, before
    training.

    Args:
        model: Built under :class:`infinity.Init`.
        optimizer: Of this model. Moments and step counts that the checkpoint lacks become zero. None: only
            weights are loaded.
        path: The directory.

    Returns:
        How many steps the optimizer had done; 0 if the checkpoint has no state of an optimizer.

    Raises:
        CheckpointError: It is damaged, or does not fit; lists every missing, unknown and wrongly shaped key.
        DiskError: A drive failed or is full.
        StateError: There are gradients of a step that is not over, or the states of an interrupted run are
            not in their places yet: call :func:`infinity.resume` first.
    """
    runtime = _between_steps(model)
    if runtime.started:
        runtime.executor().prefetcher.forget()
    where = user_path(path, "path")
    groups = () if optimizer is None else optimizer.param_groups
    with all_ranks_or_raise(runtime.ranks, f"loading {where}"), DistributedCheckpoint(where) as checkpoint:
        values = PortableValues(checkpoint, model, runtime.units, groups, runtime.tiers.layout.full_names[1:])
        for unit in filter(values.holds, runtime.units):
            runtime.tiers.put(unit, values.master(unit), values.moments(unit))
            unit.updates += 1
            for segment in unit.segments:
                segment.steps = values.steps.get(id(segment.whole), 0)
        values.fill_whole()
        if optimizer is not None:
            scaler = {key: values.extra("loss_scaler", key) for key in ("scale", "good_steps")}
            if optimizer.scaler is not None and None not in scaler.values():
                optimizer.scaler.load_state_dict(scaler)
            optimizer.restart(values.numbers, max(values.steps.values(), default=0))
    return max(values.steps.values(), default=0)


def _between_steps(model: nn.Module, *, settled: bool = True) -> Runtime:
    """Return the model's runtime when all of its states are in their places.

    Args:
        settled: Wait for the updates of the last step.

    Raises:
        StateError: There are gradients of a step that is not over, or an interrupted run was not resumed.
    """
    runtime = runtime_of(model)
    runtime.check_resumed()
    if runtime.started:
        runtime.values.check_step_over()
    if settled:
        runtime.synchronize()
    return runtime
