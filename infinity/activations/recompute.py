"""Recomputes a part of a model in backward, with the choices that were made when it ran first."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint


class Choice:
    """Holds what modules look up when they run, such as the adapters that are used.

    Backward recomputes a part of the model under the value that it ran with first.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        _choices.add(self)

    @contextmanager
    def made(self, value: Any) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


_choices: weakref.WeakSet[Choice] = weakref.WeakSet()


def recomputed(function: Callable[..., Any], *leaves: Any) -> Any:
    """Return ``function(*leaves)``, which backward computes again from ``leaves``.

    ``leaves`` are positional, because checkpoint looks there for devices whose generators it restores, and
    hooks of saved tensors see them.
    """
    made = [(choice, choice.value) for choice in _choices]

    def call(*leaves: Any) -> Any:
        with ExitStack() as stack:
            for choice, value in made:
                stack.enter_context(choice.made(value))
            return function(*leaves)

    return checkpoint(call if made else function, *leaves, use_reentrant=False)
