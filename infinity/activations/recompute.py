"""Recomputes a part of a model in backward, with the choices that were made when it ran first."""

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

F = TypeVar("F", bound=Callable[..., Any])
#: Returns what torch.compile runs frames by on this thread, or None.
_tracing: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


def untraced(function: F) -> F:
    """Return ``function`` as torch.compile leaves it alone, at no cost where nothing is compiled."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _tracing() is None else disabled)(*args, **kwargs)

    return cast(F, torch.compiler.disable(call, recursive=False))  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Return whether autograd runs this thread's code now, such as a recomputation."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return how tensors that autograd saves now are packed and unpacked; without hooks they stay."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (hooks if torch.is_grad_enabled() else None) or (_same, _same)


def _same(value: Any) -> Any:
    return value


class Unwritten:
    """Watches the tensors of a tree for writes from now on; those of inference mode do not count them."""

    def __init__(self, tree: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        counted = (leaf for leaf in tensors if not (hasattr(leaf, "stands_in") or leaf.is_inference()))
        self._versions = [(leaf, leaf._version) for leaf in counted]

    def __bool__(self) -> bool:
        return all(leaf._version == version for leaf, version in self._versions)


class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Tensor], back: Callable[[Tensor], Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.back, ctx.count = back, len(inputs)
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *[ctx.back(grad)] * ctx.count


def node(make: Callable[[], Tensor], back: Callable[[Tensor], Tensor], *inputs: Tensor) -> Tensor:
    """Return ``make()``, which autograd takes to be made of ``inputs``, each of gradient ``back(gradient)``.

    A loss that is still referred to after backward holds ``back`` and what that refers to.
    """
    made: Tensor = _Node.apply(make, back, *inputs)  # type: ignore[no-untyped-call]
    return made


class Choice:
    """Holds names that modules look up when they run, such as those of the adapters that are used.

    Modules have the list ``names``, whose items change; what is recomputed has those that it ran with first.
    """

    def __init__(self, *names: str) -> None:
        self.names = [*names]
        self._among: list[tuple[list[str], Container[str]]] = []
        _choices.add(self)

    def among(self, known: Container[str]) -> list[str]:
        """Return a list that always has those of the names that are in ``known``."""
        names = [name for name in self.names if name in known]
        self._among.append((names, known))
        return names

    @contextmanager
    def made(self, *names: str) -> Iterator[None]:
        before = [*self.names]
        self._set(names)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, names: Sequence[str]) -> None:
        self.names[:] = names
        for each, known in self._among:
            each[:] = [name for name in names if name in known]


_choices: weakref.WeakSet[Choice] = weakref.WeakSet()


def recomputed(function: Callable[..., Any], *leaves: Any) -> Any:
    """Return ``function(*leaves)``, which backward computes again from ``leaves``.

    ``leaves`` are positional, because checkpoint looks there for devices whose generators it restores, and
    hooks of saved tensors see them.
    """
    made = [(choice, [*choice.names]) for choice in _choices]

    def call(*leaves: Any) -> Any:
        with ExitStack() as stack:
            for choice, names in made:
                stack.enter_context(choice.made(*names))
            return function(*leaves)

    return checkpoint(call if made else function, *leaves, use_reentrant=False)
