"""Results of operators without values are those that torch's own mode makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from infinity.predict import model
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.fakes import FakeTensors
from infinity.predict.machines import load_machine
from infinity.recipes.loading import load_recipe

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "elements": lambda a: a * 2 + 1,
    "another dtype": lambda a: a.to(torch.bfloat16),
    "a view": lambda a: a.view(2, 2, 6)[:, 1],
    "a view of a view": lambda a: a.t()[1:],
    "several views": lambda a: a.split(2),
    "several results": lambda a: torch.topk(a, 2),
    "a result with a name": lambda a: functional.nll_loss(a, torch.zeros(4, dtype=torch.int64)),
    "into itself": lambda a: a.add_(1),
    "a product": lambda a: a @ a.t(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_known_has_the_result_of_the_first_one(name: str) -> None:
    call, quick, own = CALLS[name], FakeTensors(), FakeTensorMode()

    def results(mode: FakeTensorMode) -> list[tuple[Any, ...]]:
        with mode:
            given = torch.empty(4, 6)
            made = call(given)
            leaves = made if isinstance(made, tuple | list) else [made]
            return [
                (
                    type(made), each.shape, each.stride(), each.dtype, each.device, each.storage_offset(),
                    each.untyped_storage()._cdata == given.untyped_storage()._cdata,
                )
                for each in leaves
            ]  # fmt: skip

    wanted = results(own)
    assert [results(quick) for _ in range(3)] == [wanted] * 3


@pytest.mark.parametrize("policy", ["recompute", "plan"])
def test_a_step_is_recorded_as_with_fake_tensors_of_torch(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        f"memory.nvme=[{tmp_path}]", "train.dtype=bf16", "memory.host=64MiB", f"memory.activations={policy}",
        "model.n_layers=3", "model.d_model=64", "model.n_heads=4", "model.seq_len=256", "train.batch_size=8",
        "memory.device=64MiB",
    ]  # fmt: skip

    def planned() -> DryRun:
        return dry_run(load_recipe(None, given), load_machine("vm-2core"), 1)

    quick = planned()
    monkeypatch.setattr(model, "FakeTensors", lambda: FakeTensorMode(allow_non_fake_inputs=False))
    own = planned()
    for name in ("events", "begun", "completed", "position", "flops", "nbytes", "fp32", "peak_nbytes"):
        assert np.array_equal(getattr(quick.trace, name), getattr(own.trace, name)), name
    assert quick.profile == own.profile
