"""Provides ``offload_activations``, which moves activations of a plain PyTorch model out of memory."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from infinity.activations.codecs import coding_of
from infinity.activations.controller import ActivationBudget, Activations, Policy
from infinity.activations.recompute import in_backward, untraced
from infinity.activations.store import measure_hardware, open_stores
from infinity.activations.tensor_cache import TensorCache
from infinity.api.init import is_served
from infinity.comm.ranks import Ranks
from infinity.core.budget import piece_nbytes
from infinity.core.config import MemoryConfig
from infinity.core.errors import StateError
from infinity.core.files import user_path
from infinity.core.nbytes import parse_nbytes
from infinity.core.process import OwnedStack, uninterrupted
from infinity.device.accelerator import heap_line
from infinity.device.machine import free_host_nbytes
from infinity.device.memory import HostPool
from infinity.nvme.engines import make_engine
from infinity.nvme.probe import stripe_weights
from infinity.nvme.run_directory import RunDirectory, new_run_id
from infinity.nvme.volume import Volume
from infinity.observe.timeline import log


@contextlib.contextmanager
def offload_activations(
    model: nn.Module, budget: int | str | None = None, *, policy: Policy = "plan",
    nvme: str | Path | Sequence[str | Path] = (), host: int | str | None = None, codec: str = "auto",
    first_step: int = 0,
) -> Iterator[Activations]:  # fmt: skip
    """Move the activations of ``model`` out of memory until backward needs them.

    Around the loop of a plain PyTorch model, whatever trains it::

        with infinity.offload_activations(model, budget="6GiB", nvme="/mnt/nvme0"):
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Losses and gradients stay bitwise the same, but with a ``codec`` that loses precision. The first steps
    store all they can; one of them is profiled for the plan.

    Args:
        model: Any module. Blocks that can be recomputed are members of its ``nn.ModuleList``.
        budget: Device memory for activations and working memory of operators. Bytes, or text such as
            ``"6GiB"``. None: the least that is predicted to cost at most 3 % of the step's time.
        policy: ``plan``; or ``keep``, ``offload`` or ``recompute`` for everything.
        nvme: One directory for each drive; by default the system's directory for temporary files.
        host: Pinned host memory beside an accelerator; by default half of what is free.
        codec: As ``memory.codec`` of a recipe: ``auto``, ``never``, ``int8`` or ``2bit``.
        first_step: Optimizer steps before this loop, for the random numbers of ``2bit``.

    Yields what has the plan as ``planning``, its cost as ``measured()``, and bytes in ``cache.stats``.

    Raises:
        BudgetError: In the model's call: no plan meets the budget; says which one could be met.
        DiskError: A directory cannot be written, or its file system is full.
        StateError: The model was built under ``Init``, whose recipe says ``memory.activations``.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy: got {policy!r}; wanted {' | '.join(get_args(Policy))}")
    if is_served(model):
        raise StateError(
            f"{type(model).__name__} was built under infinity.Init, which serves its activations too: say "
            "memory.activations in its recipe"
        )
    if codec not in (codecs := get_args(get_type_hints(MemoryConfig)["codec"])):
        raise ValueError(f"codec: got {codec!r}; wanted {' | '.join(codecs)}")
    given = [nvme] if isinstance(nvme, (str, Path)) else nvme or [tempfile.gettempdir()]
    directories = [user_path(each, "nvme") for each in given]
    host_nbytes = free_host_nbytes() // 2 if host is None else parse_nbytes(host)
    capacity = None if budget is None else parse_nbytes(budget)
    with OwnedStack() as stack:
        activations = _serve(stack, model, policy, directories, host_nbytes, capacity)
        rank, passes = dist.get_rank() if dist.is_initialized() else 0, activations.passes
        activations.cache.coding = coding_of(codec, policy, lambda: first_step + passes.steps, rank, log.info)
        yield activations


def _serve(
    stack: OwnedStack, model: nn.Module, policy: Policy, directories: Sequence[Path], host_nbytes: int,
    capacity_nbytes: int | None,
) -> Activations:  # fmt: skip
    """Open what activations need until ``stack`` is closed, and let the model's calls use it."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = Ranks(*place, device)
    notes = [heap_line()] if policy != "keep" and device.type == "cpu" else []
    run_id, paths = new_run_id(), []
    for root in directories:
        directory = RunDirectory(root, run_id, ranks.rank)
        stack.callback(directory.remove)
        paths.append(directory.file(f"rank{ranks.rank}.bin"))
    volume = Volume(paths, stripe_weights([path.parent for path in paths]))
    stack.callback(volume.close)
    notes += volume.notes
    engine = make_engine("auto", volume, notes.append)
    stack.callback(engine.close)
    for line in notes:
        if line and ranks.rank == 0:
            log.info("%s", line)
    pool = stack.enter_context(contextlib.closing(HostPool(host_nbytes, device=device)))
    stores = open_stores(device, pool, piece_nbytes(host_nbytes), volume, engine)
    activations = Activations(
        TensorCache(device, stores, lambda wait: wait()), policy,
        lambda: measure_hardware(device, directories, host_nbytes), ActivationBudget(capacity_nbytes),
        partial(ranks.decide, where="agreeing on the plan for activations"),
    )  # fmt: skip
    stack.callback(activations.close)
    stack.enter_context(_served(model, activations, volume))
    return activations


@contextlib.contextmanager
def _served(model: nn.Module, activations: Activations, volume: Volume) -> Iterator[None]:
    """Treat every call of ``model`` that autograd records as a pass; a step of any optimizer ends a step."""
    passes: list[contextlib.ExitStack] = []

    def before(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            while passes:
                passes.pop().close()  # of a call that was left without its hook (Ctrl-C)
            stack = activations.open(model)
            passes.append(stack)
            cache = activations.cache
            pack, unpack = uninterrupted(cache.pack), uninterrupted(cache.unpack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if passes:
            passes.pop().close()

    def end_step() -> None:
        activations.end_step()
        volume.check()

    handles: list[RemovableHandle] = [
        model.register_forward_pre_hook(untraced(before), prepend=True),
        model.register_forward_hook(untraced(after), always_call=True),
        register_optimizer_step_post_hook(lambda *_: end_step()),
    ]
    try:
        yield
    finally:
        while passes:
            passes.pop().close()
        for handle in handles:
            handle.remove()
