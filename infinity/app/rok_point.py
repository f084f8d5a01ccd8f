"""One point of the recompute-offload-keep curve, in its own process: ``python -m infinity.app.rok_point``."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import infinity
from infinity.activations.activations import METERED, Activations
from infinity.api.offload_activations import Bound
from infinity.app.data import Batch
from infinity.app.inputs import open_inputs
from infinity.app.recipe import Recipe
from infinity.app.rok_plot import RokPoint
from infinity.app.train import RECIPE, Loop, built, keep_recipe, set_threads, shape_of
from infinity.core.errors import InfinityError
from infinity.observe.events import StepReport
from infinity.planner.planning import FOLDER, save_measured

POINT, RESULT = "point.json", "result.json"


def warmup_steps(accumulate: int) -> int:
    """Steps until a plan is made, and one of its passes is metered."""
    return math.ceil((METERED + 1) / accumulate)


def measure(folder: Path) -> RokPoint:
    """Train for the steps of ``recipe.yaml`` as ``point.json`` says; what they took.

    A plan is kept in ``folder``, for ``infinity plan``, and the recipe with the dtype that was chosen.

    Raises:
        InfinityError: What a run may raise.
    """
    point = RokPoint(**json.loads((folder / POINT).read_text(encoding="utf-8")))
    recipe = infinity.load_recipe(folder / RECIPE)
    set_threads(recipe.train)
    data = open_inputs(recipe, shape_of(recipe), lambda line: None)
    with built(recipe, None, []) as (model, optimizer):
        keep_recipe(
            recipe.with_dtype(optimizer.runtime.config.dtype), folder
        )  # with the dtype that was chosen
        activations: Activations = optimizer.runtime.activations
        activations.meters = True
        if point.budget_nbytes is not None:
            activations.room = Bound(point.budget_nbytes)
        steps = Steps(warmup_steps(recipe.train.accumulate), activations)
        loop = Loop(recipe, model, optimizer, data, [steps])
        loop.run()
        _keep_plan(folder, activations)
        flops = _flops(loop, model, next(iter(data.train)), recipe)
        return replace(steps.result(point), peak_nbytes=activations.metered_nbytes or 0, flops=flops)


class Steps:
    """Takes the medians of the steps after the first ones; a :class:`~infinity.observe.metrics.View`."""

    def __init__(self, warmup: int, activations: Activations) -> None:
        self._warmup, self._ledger = warmup, activations.cache.ledger
        self._moved = 0, 0
        self._taken: list[tuple[float, int, int, int]] = []

    def step(self, report: StepReport) -> None:
        moved = self._ledger.nbytes_stored, self._ledger.nbytes_loaded
        stored, loaded = (now - before for now, before in zip(moved, self._moved))
        self._moved = moved
        if report.step > self._warmup:
            self._taken.append((report.step_s, report.tokens, stored, loaded))

    def evaluated(self, step: int, loss: float) -> None:
        pass

    def close(self) -> None:
        pass

    def result(self, point: RokPoint) -> RokPoint:
        """The point with its figures."""
        step_s, tokens, stored, loaded = (median(figures) for figures in zip(*self._taken))
        whole = {"tokens": tokens, "nbytes_stored": stored, "nbytes_loaded": loaded}
        return replace(point, step_s=step_s, **{name: round(figure) for name, figure in whole.items()})


def _keep_plan(folder: Path, activations: Activations) -> None:
    planning, measured = activations.planning, activations.measured()
    if planning is not None:
        planning.save(folder / FOLDER)
        if measured is not None:
            save_measured(folder / FOLDER, planning.predicted, measured)


def _flops(loop: Loop, model: Any, batch: Batch, recipe: Recipe) -> int:
    """Of a step's algorithm: the forward is counted, backward takes twice as many.

    Frozen weights have no gradients: then it takes as many.
    """
    # torch counts attention for accelerators only.
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=attention) as counter:
        loop.loss(batch)
    factor = 3 if recipe.lora.rank is None else 2
    return int(counter.get_total_flops()) * factor * recipe.train.accumulate


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def main(folder: str) -> int:
    try:
        result = measure(Path(folder))
    except InfinityError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    (Path(folder) / RESULT).write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
