"""The host's work in a step grows with the modules of a model, and modules without parameters stay plain."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.helpers.training import build, recipe

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


def test_calls_inside_a_block_do_nothing():
    def calls(layers: int) -> Counter[str]:
        with infinity.Init(recipe("fp32", [])):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer, x, found = infinity.AdamW(model, lr=1e-3), torch.ones(1, 4), Counter[str]()
        model(x).sum().backward()
        optimizer.step()
        sys.setprofile(lambda frame, event, _: found.update([frame.f_code.co_name] * (event == "call")))
        try:
            model(x)
        finally:
            sys.setprofile(None)
        return found

    more = calls(40) - calls(20)
    assert more["before"] == more["after"] == 0
    assert more["enter"] == more["leave"] == more["touch"] == 0


def two_blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))


@pytest.mark.parametrize("place", [(), ("memory.resident=false",)])
def test_modules_inside_a_block_may_be_called_on_their_own(place: tuple[str, ...], tmp_path: Path):
    model, plain = build(two_blocks, "fp32", [*place, f"memory.nvme=[{tmp_path}]"]), two_blocks()
    optimizer = infinity.AdamW(model, lr=0.1, weight_decay=0.0)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    x = torch.ones(1, 4)
    for _ in range(3):
        losses = [each[1](each[0][0](x)).sum() + each[0](x).sum() for each in (model, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        sum(losses).backward()
        optimizer.step()
        reference.step()
        reference.zero_grad()


@pytest.mark.parametrize("place", [(), ("memory.resident=false",)])
def test_a_weight_that_is_shared_after_the_first_call_is_the_one_that_is_used(
    place: tuple[str, ...], tmp_path: Path
):
    model: Any = build(two_blocks, "fp32", [*place, f"memory.nvme=[{tmp_path}]"])
    x = torch.ones(1, 4)
    model[0](x)
    wanted = model[1][0](x)
    model[0][0].weight, model[0][0].bias = model[1][0].weight, model[1][0].bias
    assert torch.equal(model[0][0](x), wanted)
    assert torch.equal(model[0](x), model[0][1](wanted))
