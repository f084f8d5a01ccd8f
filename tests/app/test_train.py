"""The training loop over plain PyTorch: its calls, its files, and how it ends."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.app.loop import BatchLoss, RankMean, lr_factor
from infinity.app.train import notes_on_commits, process_group, set_threads, train
from infinity.comm.ranks import rank, world_size
from infinity.core.errors import InfinityError, RecipeError
from infinity.device import machine
from infinity.observe.metrics import StepReport
from infinity.observe.timeline import MessageBuffer, Timeline
from infinity.optim.rules import OptimConfig
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe
from tests.helpers.launch import run_ranks, start_ranks
from tests.helpers.limits import comes_true
from tests.helpers.timeline import read_trace

#: All activations are kept.
KEPT = SimpleNamespace(
    policy="keep",
    planning=None,
    cache=SimpleNamespace(stats=SimpleNamespace(nbytes_stored=0, nbytes_loaded=0)),
)


class Plain:
    """The public API over plain PyTorch; records the loop's calls."""

    def __init__(self) -> None:
        self.unsynced: list[bool] = []  # of every micro-batch
        self.open = 0
        self.init_recipe: Recipe | None = None
        self.fail_at: tuple[int, BaseException] | None = None
        api = self

        class AdamW(torch.optim.AdamW):
            def __init__(
                self, model: nn.Module, rule: str, *, max_grad_norm: float | None, params: Any = None,
                groups: Any = None, **numbers: Any,
            ) -> None:  # fmt: skip
                super().__init__(model.parameters() if params is None else params, **numbers)
                config = SimpleNamespace(dtype=(api.init_recipe or load_recipe()).train.dtype)
                records = SimpleNamespace(interval=SimpleNamespace(every=1))
                self.runtime = SimpleNamespace(
                    activations=KEPT, say=MessageBuffer(), notes=["-"], config=config, records=records
                )
                self.timeline = Timeline(clock=lambda: 1.0)
                self.timeline.add("compute", "forward", 0.0, 1.0)
                self.budgets = {"host": 100}
                self.steps = 0
                self.grad_norms: dict[str, float] = {}
                self.lrs: list[float] = []
                self.reports: list[int] = []
                api.optimizer = self

            def follow(self, **more: Any) -> None:
                pass

            def scale(self, loss: torch.Tensor) -> torch.Tensor:
                api.unsynced.append(api.in_no_sync)
                return loss

            def step(self, closure: Any = None) -> None:
                self.steps += 1
                self.lrs.append(self.param_groups[0]["lr"])
                if api.fail_at and api.fail_at[0] == self.steps:
                    raise api.fail_at[1]
                super().step()
                super().zero_grad()

            def synchronize(self) -> None:
                pass

            def report(self, *, loss: float | None = None, tokens: int = 0) -> StepReport:
                self.reports.append(tokens)
                return StepReport(
                    step=self.steps, loss=loss, lr=self.lrs[-1], grad_norm=1.0, skipped=False,
                    step_s=1.0, tokens=tokens, peak_nbytes={"host": 90},
                )  # fmt: skip

        self.in_no_sync = False
        self.optimizer: Any = None
        self.adamw = AdamW

    @contextmanager
    def init(self, recipe: Recipe) -> Iterator[None]:
        self.init_recipe = recipe
        self.open += 1
        yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.in_no_sync = True
        yield
        self.in_no_sync = False

    def close(self, model: nn.Module, *, keep: bool) -> None:
        self.open -= 1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        names = {
            "Init": self.init, "no_sync": self.no_sync, "close": self.close,
            "resume": lambda model, optimizer: 0,
        }  # fmt: skip
        patch.setattr("infinity.app.train.Optimizer", self.adamw)
        for name, value in names.items():
            patch.setattr(infinity, name, value, raising=False)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plain]:
    api, threads = Plain(), torch.get_num_threads()
    api.install(monkeypatch)
    yield api
    torch.set_num_threads(threads)


def recipe(folder: Path, *overrides: str) -> Recipe:
    text = folder / "text.txt"
    if not text.exists():  # one rank must not empty it while another reads
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    small = [
        f"run.dir={folder}/runs", "run.name=one", "observe.progress=false",
        f"data.files={folder}/text.txt", f"data.cache={folder}/tokens", "data.eval_fraction=0.2",
        "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "train.steps=5",
        "train.batch_size=4", "train.eval_every=2", "train.threads=1", "optim.lr=1e-2",
    ]  # fmt: skip
    return load_recipe(overrides=[*small, *overrides])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/one/metrics.jsonl").read_text().splitlines()]


def test_a_run_lowers_the_loss_and_saves_its_recipe_figures_and_summary(plain: Plain, tmp_path: Path) -> None:
    wanted = recipe(tmp_path, "train.steps=20", "train.eval_every=5")
    summary = train(wanted)
    assert summary is not None
    folder = tmp_path / "runs/one"
    assert load_recipe(folder / "recipe.yaml") == wanted.as_without_plan()
    assert json.loads((folder / "summary.json").read_text())["last_loss"] == summary.last_loss
    assert not (folder / "timeline.json").exists()
    assert summary.last_loss < summary.first_loss
    assert summary.last_held_out < summary.first_held_out
    assert (summary.budgets, summary.peak_nbytes) == ({"host": 100}, {"host": 90})
    steps = [line for line in lines(tmp_path) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert steps[0]["tokens"] == 4 * 16
    assert plain.open == 0


def test_held_out_loss_comes_every_few_steps_and_after_the_last(plain: Plain, tmp_path: Path) -> None:
    train(recipe(tmp_path))
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "evaluation"] == [2, 4, 5]
    # After each of them figures start anew, so that the next step's are its own.
    assert plain.optimizer.reports == [64, 64, 0, 64, 64, 0, 64, 0]


@pytest.mark.parametrize("override", ["train.eval_every=null", "data.eval_fraction=0"])
def test_evaluation_can_be_disabled(plain: Plain, tmp_path: Path, override: str) -> None:
    summary = train(recipe(tmp_path, override))
    assert summary is not None
    assert summary.first_held_out is None


def test_evaluation_changes_neither_weights_nor_mode(plain: Plain, tmp_path: Path) -> None:
    losses = []
    for name, every in (("a", "1"), ("b", "null")):
        train(recipe(tmp_path, f"run.name={name}", f"train.eval_every={every}"))
        metrics = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([x["loss"] for x in map(json.loads, metrics) if x["kind"] == "step"])
    assert losses[0] == losses[1]


def test_micro_batches_add_up_to_the_batch_and_only_the_last_is_synchronised(
    plain: Plain, tmp_path: Path
) -> None:
    train(recipe(tmp_path))
    whole = [line["loss"] for line in lines(tmp_path) if line["kind"] == "step"]
    assert plain.unsynced == [False] * 5
    plain.unsynced.clear()
    other = tmp_path / "other"
    other.mkdir()
    train(recipe(other, "train.batch_size=1", "train.accumulate=4"))
    parts = [line for line in lines(other) if line["kind"] == "step"]
    assert plain.unsynced == [True, True, True, False] * 5
    assert [line["loss"] for line in parts] == pytest.approx(whole, rel=1e-4)
    assert parts[0]["tokens"] == 4 * 16


def test_the_optimizer_gets_the_recipes_numbers_and_schedule(plain: Plain, tmp_path: Path) -> None:
    train(
        recipe(
            tmp_path,
            "optim.schedule=linear",
            "optim.warmup_steps=2",
            "optim.min_lr_ratio=0",
            "optim.eps=1e-7",
        )
    )
    assert plain.optimizer.lrs == pytest.approx([5e-3, 1e-2, 2e-2 / 3, 1e-2 / 3, 0])
    assert plain.optimizer.defaults["eps"] == 1e-7
    assert plain.optimizer.defaults["betas"] == (0.9, 0.95)


def test_a_timeline_is_written_if_the_recipe_asks_for_it(plain: Plain, tmp_path: Path) -> None:
    train(recipe(tmp_path, "observe.timeline=true"))
    assert [span.name for span in read_trace(tmp_path / "runs/one/timeline.json")] == ["forward"]


def test_a_run_without_a_name_and_its_files_on_nvme_get_the_same_generated_name(
    plain: Plain, tmp_path: Path
) -> None:
    summary = train(recipe(tmp_path, "run.name=null"))
    assert summary is not None
    assert plain.init_recipe is not None
    assert Path(summary.folder).name == plain.init_recipe.run.name
    assert load_recipe(Path(summary.folder) / "recipe.yaml").run.name is None


def test_a_run_folder_is_closed_to_other_users(plain: Plain, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(recipe(tmp_path))
    finally:
        os.umask(before)
    folder = tmp_path / "runs/one"
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "summary.json"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_two_runs_of_one_name_never_share_a_folder(plain: Plain, tmp_path: Path) -> None:
    train(recipe(tmp_path))
    before = lines(tmp_path)
    with pytest.raises(
        RecipeError, match=r"run\.name: .*one is finished after 5 steps; give .* another name"
    ):
        train(recipe(tmp_path, "optim.lr=0.5"))
    assert lines(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_an_error(plain: Plain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run\.dir: .*Not a directory"):
        train(recipe(tmp_path, f"run.dir={tmp_path}/file"))


@pytest.mark.parametrize("error", [InfinityError("disk"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_failed_run_closes_its_files_and_keeps_its_figures(
    plain: Plain, tmp_path: Path, error: BaseException
) -> None:
    plain.fail_at = (3, error)
    with pytest.raises(type(error)):
        train(recipe(tmp_path))
    assert plain.open == 0
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "step"] == [1, 2]


def test_a_folder_that_is_removed_during_the_run_is_an_error_that_names_the_file(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = plain.adamw.step

    def remove(self: Any) -> None:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        step(self)

    monkeypatch.setattr(plain.adamw, "step", remove)
    with pytest.raises(infinity.InfinityError, match=r"metrics\.jsonl.*No such file.*must stay where it is"):
        train(recipe(tmp_path))


def test_an_error_in_the_optimizer_closes_the_model(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise InfinityError("no")

    monkeypatch.setattr("infinity.app.train.Optimizer", refuse)
    with pytest.raises(InfinityError, match="no"):
        train(recipe(tmp_path))
    assert plain.open == 0


def test_a_missing_file_is_an_error_before_the_model_is_built(plain: Plain, tmp_path: Path) -> None:
    with pytest.raises(InfinityError, match="matches no file"):
        train(recipe(tmp_path, "data.files=/none/*.txt"))
    assert plain.init_recipe is None


def test_the_learning_rate_rises_then_falls_to_its_floor() -> None:
    cosine = OptimConfig(schedule="cosine", warmup_steps=4, min_lr_ratio=0.1)
    rates = [lr_factor(step, cosine, steps=20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[11] == pytest.approx(0.55)  # half way
    assert rates[-1] == pytest.approx(0.1)
    assert lr_factor(25, cosine, steps=20) == pytest.approx(0.1)
    share = OptimConfig(schedule="cosine", warmup_ratio=0.16, min_lr_ratio=0.1)
    assert [lr_factor(step, share, steps=20) for step in range(20)] == rates
    assert {lr_factor(step, OptimConfig(), steps=20) for step in range(20)} == {1.0}


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    for ranks, threads, torchrun in (("3", "", ""), ("16", "", ""), ("1", "3", ""), ("2", "1", "by default")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        machine.share_of_cores.cache_clear()
        set_threads(load_recipe().train)
    set_threads(load_recipe(overrides=["train.threads=5"]).train)
    machine.share_of_cores.cache_clear()
    assert chosen == [2, 1, 3, 4, 5]


def two_ranks_train(folder: str) -> tuple[float, bool, list[float], list[int]]:
    """On each of two ranks: the mean of the ranks' numbers, and what a run looked like."""
    api = Plain()
    with pytest.MonkeyPatch.context() as patch:
        api.install(patch)
        seen: list[float] = []
        value = BatchLoss.value

        def valued(self: BatchLoss, loss: torch.Tensor) -> float:
            found = value(self, loss)
            seen.extend([found] if torch.is_grad_enabled() else [])  # else it is an evaluation's
            return found

        patch.setattr(BatchLoss, "value", valued)
        summary = train(recipe(Path(folder)))
    mean = RankMean(None, 60.0)(float(torch.distributed.get_rank()))
    return mean, summary is None, seen, api.optimizer.reports


def test_two_ranks_show_the_mean_of_their_losses_and_only_rank_0_writes(tmp_path: Path) -> None:
    recipe(tmp_path)
    first, second = run_ranks(two_ranks_train, 2, str(tmp_path))
    assert first[0] == second[0] == 0.5
    assert (first[1], second[1]) == (False, True)
    steps = [line for line in lines(tmp_path) if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == [(a + b) / 2 for a, b in zip(first[2], second[2])]
    assert first[2] != second[2]  # they saw different sequences
    assert first[3] == second[3]
    assert first[3][0] == 2 * 4 * 16
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_number_of_steps_per_epoch_is_shown_before_the_first_step(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(tmp_path, "observe.progress=true", "train.accumulate=2"))
    said = capsys.readouterr().err
    sequences = (44 * 60 + 1) * 8 // 10 // 16
    wanted = f"one epoch is {sequences // 4 / 2:.3g} steps; train.steps=5 are "
    assert wanted in said
    assert "held out: the last 528 of 2,641 tokens (data.eval_fraction=0.2)" in said
    assert said.index(wanted) < said.index("step 1/5")


@pytest.mark.parametrize(
    ("length", "accumulate", "text"),
    [
        (132 * 16, 1, "one epoch is 26 steps; train.steps=5 are 0.192 epochs"),
        (132 * 16, 16, "one epoch is 1.62 steps; train.steps=5 are 3.08 epochs"),
        (21 * 16, 1, "one epoch is 4 steps; train.steps=5 are 1.25 epochs"),
        (80_002 * 16, 1, "one epoch is 16,000 steps; train.steps=5 are less than 0.01 epochs"),
    ],
)
def test_numbers_of_steps_and_epochs_are_short(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, accumulate: int, text: str
) -> None:
    plain.fail_at = (1, InfinityError("enough"))
    (tmp_path / "text.txt").write_text("x" * (length - 1))
    with pytest.raises(InfinityError, match="enough"):
        train(recipe(tmp_path, "observe.progress=true", f"train.accumulate={accumulate}"))
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143), InfinityError("disk")], ids=repr)
def test_an_interrupted_run_of_which_nothing_is_kept_says_why(
    plain: Plain, tmp_path: Path, stop: BaseException
) -> None:
    plain.fail_at = (3, stop)
    with pytest.raises(type(stop)) as raised:
        train(recipe(tmp_path, "run.save=true"))
    wanted = f"without memory.nvme no step is kept; to remove the run: infinity runs {tmp_path}"
    notes = getattr(raised.value, "__notes__", [])
    assert [note.partition("/runs --remove one")[0] for note in notes] == (
        [] if isinstance(stop, InfinityError) else [wanted]
    )
    assert not (tmp_path / "runs/one/model").exists()


def test_without_a_launcher_there_is_one_rank() -> None:
    assert world_size() == 1


def test_the_summary_says_what_an_interruption_can_cost_if_not_every_step_was_recorded() -> None:
    assert not list(notes_on_commits(1))
    (line,) = notes_on_commits(3)
    assert line.startswith("one step in 3 was recorded")
    assert "up to 3 steps (durability.every)" in line


def test_rank_0_leaves_last_for_it_may_keep_the_store(tmp_path: Path) -> None:
    assert run_ranks(leave_late, 2, str(tmp_path), group=False) == [True, True]


def leave_late(folder: str) -> bool:
    """Whether rank 1 had come to its end when this rank left."""
    leaves, ended = Path(folder, "leaves"), Path(folder, "ended")
    with process_group(load_recipe()):
        if rank() == 1:
            assert comes_true(leaves.exists)
            ended.touch()
        leaves.touch()
    return ended.exists()


def test_a_rank_that_fails_at_the_end_holds_no_other(tmp_path: Path) -> None:
    with start_ranks(fail_late, 2, group=False) as ranks:
        ends = ranks.wait()
    assert ends[0].result == "ended"
    assert ends[1].message == "too late"


def fail_late() -> str:
    with process_group(load_recipe()):
        if rank() == 1:
            raise ValueError("too late")
    return "ended"
