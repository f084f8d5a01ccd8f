"""Find the blocks of a model, which cut a forward pass into regions, and recompute them in backward.

[Note: wrapped forwards]
``forward`` of each block is wrapped, only while a forward pass runs. The wrapper tells the tensor cache the
position of the pass, and puts a block that is to be recomputed under ``torch.utils.checkpoint``; there, and
in the recomputation, the block's own forward runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from infinity.activations.tensor_cache import TensorCache, untraced


class NamedBlock(NamedTuple):
    """Names a block of the model."""

    name: str
    module: nn.Module


def recomputable_blocks(model: nn.Module) -> list[NamedBlock]:
    """Return the members of every ``nn.ModuleList`` that have parameters and are in no other block, in order.

    A block may be compiled. A model compiled as a whole has none: the pass's position in it is unknown.
    """

    def blocks_in(module: nn.Module, name: str, listed: bool) -> Iterator[NamedBlock]:
        is_list = isinstance(module, nn.ModuleList)
        if listed and not is_list and next(module.parameters(), None) is not None:
            yield NamedBlock(name, module)
        elif module._compiled_call_impl is None and "_orig_mod" not in module._modules:
            for child_name, child in module.named_children():
                yield from blocks_in(child, f"{name}.{child_name}" if name else child_name, is_list)

    return list(blocks_in(model, "", False))


@contextmanager
def patched(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set the attribute ``name`` of ``module`` to ``value``, hiding its class's, until the context ends."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


@contextmanager
def tracked(blocks: Sequence[NamedBlock], cache: TensorCache) -> Iterator[None]:
    """Make the blocks tell ``cache`` the position of a pass; see [Note: wrapped forwards]."""
    with ExitStack() as stack:
        for block in blocks:
            name = "forward" if block.module._compiled_call_impl is None else "_compiled_call_impl"
            own = getattr(block.module, name)
            stack.enter_context(patched(block.module, name, partial(_forward, block, own, cache)))
        yield


@untraced
def _forward(
    block: NamedBlock, own: Callable[..., Any], cache: TensorCache, *args: Any, **kwargs: Any
) -> Any:
    record = cache.record
    in_backward = torch._C._current_graph_task_id() != -1
    if record is None or in_backward or not torch.is_grad_enabled():
        return own(*args, **kwargs)
    region, profiler = record.enter(), cache.profiler
    leaves = tree_leaves((args, kwargs), is_leaf=_is_kv_cache)
    # Asked of every block's cache, recomputed or not: it is filled after the pass came to it first.
    empty = [record.was_empty(leaf) for leaf in leaves if _is_kv_cache(leaf)]
    if profiler is not None:
        profiler.enter_region(region, block.name)
    try:
        if record.policy.recomputes(region) and all(empty):
            return _recomputed(block.module, own, args, kwargs)
        return own(*args, **kwargs)
    finally:
        record.leave()
        if profiler is not None:
            profiler.leave_region(region, [leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _is_kv_cache(leaf: object) -> bool:
    return hasattr(leaf, "get_seq_length")


def _recomputed(
    module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if "use_cache" in kwargs:
        kwargs = {**kwargs, "use_cache": False}
    leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_kv_cache)
    runs_again = False

    def call(*leaves: Any) -> Any:
        nonlocal runs_again
        args, kwargs = tree_unflatten(leaves, spec)
        restored, runs_again = _restored_buffers(module) if runs_again else nullcontext(), True
        with restored:
            return own(*args, **kwargs)

    # Twice through a cache of keys and values would put them there twice.
    leaves = [None if _is_kv_cache(leaf) else leaf for leaf in leaves]
    # Positional, because checkpoint saves what it finds there, and our hooks see it.
    return checkpoint(call, *leaves, use_reentrant=False)


@contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Put the buffers of ``module`` back at the end, so that running statistics count a batch once."""
    buffers = [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items()]
    before = [(among, name, b, b.detach().clone()) for among, name, b in buffers if b is not None]
    try:
        yield
    finally:
        for among, name, buffer, values in before:
            buffer.data.copy_(values)  # not counted as a write
            among[name] = buffer
