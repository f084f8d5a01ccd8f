"""Accelerate, the Trainer and Lightning around the loop's three lines: the losses of the plain loop."""

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, get_cosine_schedule_with_warmup

import infinity
from tests.helpers.cases import few
from tests.helpers.launch import ROOT, run_ranks

STEPS = 3
#: What other packages warn their own callers of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]


def run(name: str, *more: str, interrupted: bool = False) -> list[str]:
    """Every loss that the example prints, as it is printed."""
    out, argv = io.StringIO(), sys.argv
    with contextlib.ExitStack() as stack:
        nvme = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(out))
        sys.argv = [name, "--steps", str(STEPS), "--nvme", nvme, *more]
        if interrupted:
            stack.enter_context(pytest.raises((KeyboardInterrupt, SystemExit)))  # Lightning makes it that
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        finally:
            sys.argv = argv
    return re.findall(r"^(?:batch|step) +\d+  loss ([0-9.]+)$", out.getvalue(), re.MULTILINE)


def plain(
    name: str, losses_of: Callable[..., float], *, rows: int = 4, interleaved: bool = False
) -> list[float]:
    """The plain loop on this rank's batches of the example's data, which ranks share batch- or row-wise."""
    example = runpy.run_path(str(ROOT / "examples" / name))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    data = example["stretches"](STEPS * 8 * world)
    stride = (1, rows * world) if not interleaved else (world, rows * world)
    starts = range(rank * (1 if interleaved else rows), len(data), stride[1])
    batches = [
        {key: torch.stack([data[i + k * stride[0]][key] for k in range(rows)]) for key in data[0]}
        for i in starts
    ]
    torch.manual_seed(0)
    out = []
    with tempfile.TemporaryDirectory() as nvme:
        recipe = infinity.load_recipe(overrides=[f"memory.nvme=[{nvme}]", "memory.host=64MiB"])
        with infinity.Init(recipe):
            model: Any = LlamaForCausalLM(example["CONFIG"])
        optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
        for step in range(STEPS):
            micro = batches[step * 8 // rows : (step + 1) * 8 // rows]
            for number, batch in enumerate(micro, start=1):
                last = number == len(micro)
                with contextlib.nullcontext() if last else infinity.no_sync(model):
                    out.append(losses_of(model, batch, len(micro), world))
            optimizer.step()
            scheduler.step()
        optimizer.close()
    return out


def mean_loss(model: Any, batch: Any, micro: int, world: int) -> float:
    loss = model(**batch).loss
    (loss / micro).backward()
    return float(loss.detach())


def share_of_the_step(model: Any, batch: Any, micro: int, world: int) -> float:
    """The Trainer's way: the sum over a batch, as a part of all tokens of the step."""
    count = batch["labels"][:, 1:].numel() * micro * world
    loss = model(**batch, num_items_in_batch=torch.tensor(count)).loss * world
    loss.backward()
    return float(loss.detach())


def pairs(losses: list[float]) -> Iterator[float]:
    """The loss of each step of two micro-batches."""
    for first, second in zip(losses[::2], losses[1::2], strict=True):
        yield float(torch.tensor(first) + torch.tensor(second))


def printed(losses: Any) -> list[str]:
    return [f"{loss:.6f}" for loss in losses]


def expected(name: str) -> list[str]:
    """What an example prints that nothing interrupts: the plain loop's losses, but of the plain loop."""
    if name == "plain_loop.py":
        return run(name)
    if name == "trainer_loop.py":
        return printed(pairs(plain(name, share_of_the_step)))
    return printed(plain(name, mean_loss))


@pytest.mark.parametrize(
    ("name", "count"),
    few(
        [("trainer_loop.py", STEPS), ("lightning_loop.py", 2 * STEPS)],
        [
            ("accelerate_loop.py", 2 * STEPS),
            ("plain_loop.py", 2),
            ("trainer_loop.py", STEPS),
            ("lightning_loop.py", 2 * STEPS),
        ],
    ),
)
def test_a_loop_that_was_interrupted_goes_on_and_gives_the_losses_of_the_plain_loop(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = infinity.AdamW.step

    def interrupt(self: infinity.AdamW, *args: Any, **given: Any) -> Any:
        if self.steps == 2:
            try:
                raise KeyboardInterrupt
            finally:
                infinity.close(self.model)  # as at the end of an interpreter
        return step(self, *args, **given)

    whole, given = expected(name), ("--nvme", str(tmp_path), "--name", "mine")
    assert len(whole) == count
    with monkeypatch.context() as patch:
        patch.setattr(infinity.AdamW, "step", interrupt)
        first = run(name, *given, interrupted=True)
    second = run(name, *given)
    committed = len(whole) * 2 // STEPS
    assert first[:committed] + second == whole
    assert len(second) == len(whole) - committed
    assert list(tmp_path.iterdir()) == []


def test_the_trainer_saves_the_model(tmp_path: Path):
    assert len(run("trainer_loop.py", "--out", str(tmp_path / "trained"), "--save-every", "2")) == STEPS
    last, earlier = (
        LlamaForCausalLM.from_pretrained(tmp_path / "trained" / name) for name in ("model", "checkpoint-2")
    )
    assert last.num_parameters() > 700_000
    assert not torch.equal(last.lm_head.weight, earlier.lm_head.weight)


def on_a_rank(folder: str) -> dict[str, Any]:
    return {
        "accelerate": run("accelerate_loop.py"),
        "trainer": run("trainer_loop.py", "--out", f"{folder}/trained", "--save-every", "2"),
        "mean": plain("accelerate_loop.py", mean_loss),
        "share": plain("trainer_loop.py", share_of_the_step),
        "interleaved": plain("lightning_loop.py", mean_loss, interleaved=True),
        "lightning": run("lightning_loop.py"),  # the last one: it takes WORLD_SIZE out of the environment
    }


@pytest.mark.slow
def test_two_ranks_of_each_give_the_losses_of_the_plain_loop(tmp_path: Path):
    first, second = run_ranks(on_a_rank, 2, str(tmp_path), group=False)
    means = [(a + b) / 2 for a, b in zip(first["mean"], second["mean"], strict=True)]
    assert [float(loss) for loss in first["accelerate"]] == pytest.approx(means, abs=1e-6)
    steps = [(a + b) / 2 for a, b in zip(pairs(first["share"]), pairs(second["share"]), strict=True)]
    assert [float(loss) for loss in first["trainer"]] == pytest.approx(steps, abs=1e-6)
    assert first["lightning"] == printed(first["interleaved"])  # rank 0 prints its own
    assert [len(first[each]) for each in ("accelerate", "trainer", "lightning")] == [
        2 * STEPS, STEPS, 2 * STEPS,
    ]  # fmt: skip
    for each in ("trained/model", "trained/checkpoint-2"):
        assert LlamaForCausalLM.from_pretrained(tmp_path / each).num_parameters() > 700_000
