"""Which runtime serves which module, and which of them are still open."""

import atexit
import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

from torch import nn

from infinity.core.errors import StateError

if TYPE_CHECKING:
    from infinity.engine.runtime import Runtime

#: Which runtime serves a module that was built under ``Init``.
served: "weakref.WeakKeyDictionary[nn.Module, Runtime]" = weakref.WeakKeyDictionary()
#: Those that were not closed.
opened: "weakref.WeakSet[Runtime]" = weakref.WeakSet()


def runtimes() -> "set[Runtime]":
    """Those that serve a module that still exists."""
    return set(served.values())


def is_served(model: nn.Module) -> bool:
    """Whether ``model``, or a model that it wraps, was built under ``infinity.Init``."""
    return any(module in served for module in model.modules())


def runtime_of(model: nn.Module) -> "Runtime":
    """The runtime that serves ``model``, or a model that ``model`` wraps.

    Raises:
        StateError: It was not built under ``infinity.Init``.
    """
    for module in model.modules():
        runtime = served.get(module)
        if runtime is not None:
            return runtime
    raise StateError(
        f"{type(model).__name__} was not built under infinity.Init; "
        "write `with infinity.Init(recipe): model = ...`"
    )


def _close_all() -> None:
    """No thread of ours may run while the interpreter goes, and no files of a run stay."""
    for runtime in list(opened):
        with contextlib.suppress(Exception):
            runtime.close()


# Before the pools of concurrent.futures close, which updates in flight use: atexit would be too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
