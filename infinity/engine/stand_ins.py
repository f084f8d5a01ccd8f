"""Lets a schedule decide what calls of a module's inner modules do, in unmodified models.

[Note: stand-ins]
A module runs its own forward, with stand-ins in the places of the modules that it calls. What a call does is
up to a *caller*, which the schedule gives: run the module, give back what it returned before, or leave the
forward by raising.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Decides what a call of a module, with these arguments, does.
Caller = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Calls:
    """Hands calls to the modules that ``module`` itself calls to a caller, inside :meth:`handed_to`.

    Those are all members of ``apart``, and the largest modules that contain none of them. ``module`` and the
    modules between it and members of ``apart`` run as ever.
    """

    def __init__(self, module: nn.Module, apart: set[nn.Module]) -> None:
        self.module = module
        #: Where stand-ins take the places of modules, as ``parent._modules[name]``.
        self._places = [(parent, name, StandIn(inner, self)) for parent, name, inner in called(module, apart)]
        self.caller: Caller | None = None

    @contextmanager
    def handed_to(self, caller: Caller) -> Iterator[None]:
        before = [(parent, name, parent._modules[name]) for parent, name, _ in self._places]
        outer, self.caller = self.caller, caller
        try:
            for parent, name, stand_in in self._places:
                parent._modules[name] = stand_in
            yield
        finally:
            for parent, name, module in before:
                parent._modules[name] = module
            self.caller = outer


class StandIn(nn.Module):
    """Stands in for a module: calls go to the caller, all else to the module."""

    def __init__(self, module: nn.Module, calls: Calls) -> None:
        super().__init__()
        # not registered: the module keeps its place in the model
        self.__dict__.update(module=module, calls=calls)
        del self.__dict__["training"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["calls"].caller(self.__dict__["module"], args, kwargs)


def called(parent: nn.Module, apart: set[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield parent, name and module for each of those that :class:`Calls` is about."""
    for name, module in parent._modules.items():
        if module is None:
            continue
        around = module not in apart and not apart.isdisjoint(module.modules())
        if around or isinstance(module, nn.ModuleList | nn.ModuleDict):  # those are never called themselves
            yield from called(module, apart)
        else:
            yield parent, name, module
