"""Training on several nodes: weights cross a border once for each update, and no way changes a bit."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import BudgetError
from infinity.engine.runtime import runtime_of
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import streaming, train
from tests.shards.test_resume import interrupt, overrides, run, same, start, state
from tests.test_ranks import digest

NODES = "partition.ranks_per_node=2"
WAYS = ("world", "host", "nvme", "part")


def freeze(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1." in name)


#: What is trained on 2 x 2 ranks; in each case every way to gather gives the same bits.
CASES: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 3},
    "frozen": {"change": freeze},
    "clip": {},
    "free": {"rule": Rule(max_grad_norm=None)},
    "fp32": {"dtype": "fp32"},
}


def ways(folder: str) -> dict[str, list[str]]:
    return {
        "world": ["partition.gather=world"],
        "host": ["memory.host=64MiB"],
        "nvme": streaming(f"{folder}/a", "memory.host=64MiB"),
        "part": streaming(f"{folder}/b", "memory.host=240KiB"),  # of a few units what came is kept
    }


def least_device(run: Callable[..., Any]) -> str:
    """The smallest device budget, as the error says it."""
    with pytest.raises(BudgetError) as raised:
        run(["memory.device=1KiB"])
    [nbytes] = re.findall(r"at least .* \((\d+) bytes\)", str(raised.value))
    return f"memory.device={nbytes}"


def play(folder: str, case: str, names: tuple[str, ...]) -> dict[str, tuple[str, list[int]]]:
    """Digests, and the bytes that crossed in each step, by way to gather."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    factory, batch = models.build("llama", seed=1)
    training.small_units = partial(training.small_units, 2000)  # a window has room for a few of them
    run = partial(train, factory, batch, steps=3, rank=rank, world=world, **CASES[case])
    tight, given = least_device(run), ways(folder)
    out = {}
    for name in names:
        trained = run([NODES, tight, *given[name]])
        out[name] = digest(trained), [report.nbytes_crossed for report in trained.reports]
    return out


@pytest.mark.parametrize(
    ("case", "names"),
    few([("accumulate", WAYS[:2]), ("frozen", WAYS[:3:2])], [(case, WAYS) for case in CASES]),
)
def test_weights_cross_once_for_each_update_and_every_way_gives_the_same_bits(
    tmp_path: Path, case: str, names: tuple[str, ...]
):
    for found in run_ranks(play, 4, str(tmp_path), case, names):
        assert len({bits for bits, _ in found.values()}) == 1
        crossed = {name: nbytes[-1] for name, (_, nbytes) in found.items()}
        kept = crossed.pop("host", None) or crossed.pop("nvme")
        assert all(nbytes > kept for nbytes in crossed.values() if nbytes != kept)
        assert crossed["world"] >= 1.5 * kept
        if case in ("accumulate", "clip", "fp32"):  # one gather, and a reduction for each micro-batch
            weights, rest = divmod(kept, 1 + CASES[case].get("accumulate", 1))
            assert rest == 0
            assert crossed["world"] > kept + weights // 2


def through_layers() -> list[tuple[list[float], dict[str, Any], int]]:
    """Losses, weights and bytes that crossed, of a layer schedule, by way to gather."""
    factory, batch = models.build("llama", seed=1)
    training.small_units = partial(training.small_units, 2000)
    out = []
    for way in ("world", "auto"):
        model = training.build(factory, "bf16", [NODES, "memory.device=720KiB", f"partition.gather={way}"])
        optimizer = training.optimizer_for(model, Rule())
        called = infinity.layer_schedule(model, 2)
        losses = []
        for step in range(3):
            losses.append(called(**batch(step)).loss)
            losses[-1].backward()
            optimizer.step()
        crossed = optimizer.report().nbytes_crossed
        out.append(([loss.item() for loss in losses], infinity.state_dict(model, every_rank=True), crossed))
        optimizer.close()
    return out


@pytest.mark.slow
def test_a_layer_schedule_gathers_within_nodes_and_gives_the_same_bits():
    for world, auto in run_ranks(through_layers, 4):
        assert auto[0] == world[0]
        assert all(torch.equal(auto[1][name], weight) for name, weight in world[1].items())
        assert auto[2] <= world[2]


def go_on(folder: str, layout: str, expected: int, steps: int) -> Any:
    """Go on with a run on these ranks, for some steps; what rank 0 gathers."""
    rule = Rule(max_grad_norm=None)
    model, optimizer, batch = start(
        "gpt", "fp32", overrides(folder, "nvme", *([layout] if layout else [])), rule
    )
    assert infinity.resume(model, optimizer) == expected
    run(model, optimizer, batch, range(expected, expected + steps))
    found, collectives = state(model, optimizer), runtime_of(model).ranks.collectives
    assert collectives is not None
    assert (collectives.nodes.nbytes_crossed > 0) is bool(layout)
    interrupt(model)
    return found


@pytest.mark.slow
def test_states_stay_what_they_are_with_other_ranks_on_a_node(tmp_path: Path):
    [wanted, *_] = run_ranks(go_on, 4, str(tmp_path), NODES, 0, 2)
    for world, layout in ((2, ""), (4, NODES)):
        same(run_ranks(go_on, world, str(tmp_path), layout, 2, 0)[0], wanted)
