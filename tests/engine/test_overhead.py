"""The host's work in a step grows with the modules of a model, and modules without parameters stay plain."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import infinity
from tests.helpers.training import recipe

PACKAGE = str(Path(infinity.__file__).parent)


def work_of(run: Any) -> int:
    """Return how many opcodes of the package ``run`` executes on this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


def work(layers: int) -> tuple[int, int]:
    """Return the work of building a model of ``layers`` in one unit, and of a step of it."""

    model: Any = None

    def build() -> None:
        nonlocal model
        with infinity.Init(recipe("fp32", [])):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()

    built = work_of(build)
    optimizer = infinity.AdamW(model, lr=1e-3)
    for _ in range(2):
        step()
        optimizer.step()
    return built, work_of(step)


def test_the_work_of_the_host_is_linear_in_the_modules():
    once, twice = work(30), work(60)
    assert twice[0] < 2.1 * once[0]
    assert twice[1] < 2.1 * once[1]


def test_a_module_without_parameters_may_be_in_other_models():
    shared = nn.ReLU()
    with infinity.Init(recipe("fp32", [])):
        model = nn.Sequential(nn.Linear(4, 4), shared)
    plain, x = nn.Sequential(nn.Linear(4, 4), shared), torch.ones(1, 4)
    assert not shared._forward_hooks
    model(x).sum().backward()
    plain(x).sum().backward()
    infinity.close(model)
    plain(x).sum().backward()
    with infinity.Init(recipe("fp32", [])):
        other = nn.Sequential(nn.Linear(4, 4), shared)
    other(x).sum().backward()
