"""Runs functions of tests in processes of their own, whose accelerator is the simulated one."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec

import pytest

from tests.accelerator import build
from tests.helpers.launch import run_ranks

P = ParamSpec("P")


def needs_simulator() -> None:
    """Skip the test where the simulated device cannot be built; build it where it was not."""
    try:
        build.library()
    except build.CannotBuildError as error:
        pytest.skip(str(error))


def simulated(test: Callable[P, None]) -> Callable[P, None]:
    """Let ``test``, without fixtures, run in a fork that has started the simulator."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        needs_simulator()
        run_ranks(_body, 1, test.__module__, test.__name__, args, kwargs, group=False)

    return run


def _body(module: str, name: str, args: Any, kwargs: Any) -> None:
    from tests.accelerator import device

    device.start()
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
