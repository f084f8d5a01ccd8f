"""Runs a test's function in a process of its own, whose accelerator is the simulated one."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import pytest

from tests.accelerator.harness import needs_simulator
from tests.helpers.launch import RanksError, run_ranks

P = ParamSpec("P")


def simulated(test: Callable[P, None]) -> Callable[P, None]:
    """Run ``test`` in a fork that has started the simulator; it skips where there is no compiler.

    The test's body is looked up by name in the fork, so it may not use fixtures other than plain values.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        needs_simulator()
        run_ranks(_body, 1, test.__module__, test.__name__, args, kwargs, group=False, timeout_s=120)

    return run


def _body(module: str, name: str, args: Any, kwargs: Any) -> None:
    import importlib

    from tests.accelerator import device

    device.start()
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)


__all__ = ["RanksError", "pytest", "simulated"]
