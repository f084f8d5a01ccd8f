"""Training steps and evaluations of one model, its reference, its best state, and the place of the run.

[Note: two of the best]
A best model is published in the run's folder, ``best/step-N``, before its step is committed. The one before
it stays until there is another: a run that is killed between goes on from the step before, and has that one.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.api.checkpoints import Checkpoints
from infinity.app.samples import Samples
from infinity.comm.ranks import rank, world_size
from infinity.core.errors import (
    BudgetError,
    CheckpointError,
    InfinityError,
    RecipeError,
    first_line,
    library_errors,
)
from infinity.core.files import create_file, open_regular, sync
from infinity.data.loader import HeldOut
from infinity.data.opening import Data
from infinity.data.sequences import Batch, BatchShape, Examples, Ints, Sequences, join
from infinity.engine.schedule import LayerSchedule
from infinity.observe.metrics import AdapterReport, Evaluation, HeldOutFigures, StepReport, View, mean_of
from infinity.optim.rules import OptimConfig
from infinity.recipes.objectives import OBJECTIVES, TaskLoss
from infinity.recipes.recipe import Recipe

#: The file in a run's folder: by part of the data, a number for each document, NaN where it was not needed.
REFERENCE = "reference.npz"
#: The folder of the best models in the run's folder.
BEST_FOLDER = "best"
#: The best models that stay: see [Note: two of the best].
_KEPT = 2
#: Ends of the names of metrics that are better when they are lower.
_LOWER = ("loss", "kl")
#: Seconds between lines about the progress.
_LINES_EVERY_S = 10.0


class Best:
    """Follows a metric of evaluations; its state is committed with each step, after its evaluation.

    Args:
        folder: The run's; None: no model is kept.
        write: Publishes the trained model as a directory; every rank calls.
    """

    steps_after_optimizer = True

    def __init__(
        self, recipe: Recipe, folder: Path | None, write: Callable[[Path], object], *, leads: bool,
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.metric = recipe.train.keep_best or "loss"
        self._patience = recipe.train.patience
        keeps = folder is not None and recipe.train.keep_best is not None
        self._folder = folder / BEST_FOLDER if folder is not None and keeps else None
        self._write, self._leads, self._say = write, leads, say
        self.step, self.value = 0, math.nan  # of the best evaluation
        self.since = 0  # evaluations after it

    @property
    def is_over(self) -> bool:
        """Return whether so many evaluations were no better that training is to end."""
        return self._patience is not None and self.since >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.value, self.since = int(state["step"]), float(state["value"]), int(state["since"])
        kept = best_steps(self._folder) if self._folder is not None and self._leads else []
        if self._folder is not None and self.step in kept:
            for later in kept[kept.index(self.step) + 1 :]:  # of steps that are made again
                shutil.rmtree(self._folder / f"step-{later}")

    def begin(self) -> None:
        """Remove what an earlier process of a run that begins has left."""
        if self._folder is not None and self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)

    def seen(self, found: Evaluation) -> None:
        """Take note of an evaluation, and keep the model if it is the best; every rank calls."""
        value = found.figures.get(self.metric, math.nan)
        sign = 1 if self.metric.endswith(_LOWER) else -1
        if not math.isnan(value) and not sign * value >= sign * self.value:
            self.step, self.value, self.since = found.step, value, 0
            self._keep()
            return
        self.since += 1
        if self.is_over:
            times = f"{self.since} evaluation{'s' if self.since > 1 else ''}"
            self._say(
                f"training ends after step {found.step}: no better {self.metric} in {times} since step "
                f"{self.step} (train.patience)"
            )

    def _keep(self) -> None:
        if self._folder is None:
            return
        out = self._folder / f"step-{self.step}"
        if self.step not in best_steps(self._folder):
            self._write(out)
        if self._leads:
            self._say(f"best {self.metric} so far, {self.value:.4f}: saved {out}")
            for old in best_steps(self._folder)[:-_KEPT]:
                shutil.rmtree(self._folder / f"step-{old}", ignore_errors=True)


def best_steps(folder: Path) -> list[int]:
    """Return the steps of the best models in a folder, ascending: the last one is the best."""
    whole = folder.glob("step-*/[!.]*")  # what is being written, or was when a process was killed, has a dot
    found = {each.parent.name.removeprefix("step-") for each in whole}
    return sorted(int(step) for step in found if step.isdecimal())


def best_of(run: Path) -> Path:
    """Return the folder of the best model of a run; CheckpointError: it keeps none."""
    steps = best_steps(run / BEST_FOLDER)
    if not steps:
        raise CheckpointError(
            f"{run} keeps no best model: wanted a run with train.keep_best (such as loss) that came to an "
            "evaluation"
        )
    return run / BEST_FOLDER / f"step-{steps[-1]}"


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Describes what is trained on data of its own: an adapter that has a name, or all that a run trains."""

    name: str  # empty: it has none
    recipe: Recipe
    data: Data

    def within(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which ``model`` works for this task."""
        return infinity.adapter(model, self.name) if self.name else nullcontext()

    def lr_factor(self, step: int) -> float:
        return lr_factor(step, self.recipe.optim, steps=self.recipe.steps)


class Loop:
    """Training steps and evaluations of one model; continues after the last committed step.

    [Note: the metrics of a committed step] A step is committed, with the place in the data and the state of
    the scheduler, when the next forward pass has begun, after its lines were written. So a run that continues
    after a step has all lines up to it, and cuts later ones.
    """

    def __init__(
        self, recipe: Recipe, model: Any, optimizer: Any, data: Mapping[str, Data], views: View,
        folder: Path | None = None, best: Best | None = None,
    ) -> None:  # fmt: skip
        self._recipe, self._model, self._optimizer, self._views = recipe, model, optimizer, views
        self.tasks = [Task(name, each, data[name]) for name, each in recipe.tasks.items()]
        packed = any(task.data.packed for task in self.tasks)
        mean = RankMean(optimizer, recipe.partition.timeout_s)
        self.loss = BatchLoss(model, recipe, packed=packed, mean=mean)
        infinity.SequenceRanks(model, recipe.train.sequence_ranks)
        self.step = 0  # the last one that has begun
        self.before = self.division  # the interruption
        by_name = {task.name: task for task in self.tasks}
        own = [by_name[group.get("adapter", "")] for group in optimizer.param_groups]
        self._scheduler = LambdaLR(optimizer, [task.lr_factor for task in own])
        self.best = best
        optimizer.follow(loop=self, scheduler=self._scheduler, **({} if best is None else {"best": best}))
        if not infinity.resume(model, optimizer):
            if best is not None:
                best.begin()
            if recipe.checkpoint.load is not None:
                self._load(Path(recipe.checkpoint.load))
        for task, group in zip(own, optimizer.param_groups):  # train.steps may be another one now
            group["lr"] = group["initial_lr"] * task.lr_factor(self.step)
        if OBJECTIVES[recipe.train.task].reference:
            parts = [
                part for task in self.tasks
                for part in parts_of(
                    task.name, task.data, (recipe.steps - self.step) * recipe.train.accumulate,
                    recipe.train.eval_batches,
                )
            ]  # fmt: skip
            reference = Reference(recipe, model, self.loss.log_probs, self._mean.total, views.log)
            reference.fill(parts, folder, step=self.step)
            optimizer.report()  # excludes its time and bytes from the first step's report
        #: What follows a step, given its number and seconds; each returns whether it took time.
        self._after: list[Callable[[int, float], bool]] = []
        if recipe.train.sample_every is not None:
            tasks = {task.name: partial(task.within, model) for task in self.tasks}
            self._after.append(Samples(recipe, model, tasks, self._mean, views).after)
        if folder is not None and recipe.checkpoint.every is not None:
            checkpoints = Checkpoints(
                recipe.checkpoint, optimizer, folder, step=self.step, steps=recipe.steps, agree=self._mean,
                say=views.log,
            )  # fmt: skip
            self._after.append(checkpoints.after)
        self._scheduled: LayerSchedule | None = None
        if recipe.train.schedule == "layer":
            names = [task.name for task in self.tasks for _ in range(recipe.train.accumulate)]
            self._scheduled = infinity.layer_schedule(
                model, len(names), self.loss.sum, names if recipe.adapters else None, recipe.train.group
            )
            views.log(f"layer schedule: all micro-batches through each block of {self._scheduled.blocks}")

    @property
    def _mean(self) -> "RankMean":
        return self.loss.mean

    @property
    def division(self) -> "Division":
        train = self._recipe.train
        return Division(train.batch_size, train.accumulate, world_size() // train.sequence_ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the run, which the optimizer commits with the step."""
        places = {task.name: task.data.train.state_dict() for task in self.tasks}
        return {"step": self.step, "data": places, "division": tuple(self.division)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a place; refuse other data, or a division into other sequences per step."""
        self.step, self.before = int(state["step"]), Division(*state["division"])
        self.division.check(self.before)
        for task in self.tasks:
            task.data.train.load_state_dict(state["data"][task.name])

    def _load(self, path: Path) -> None:
        """Start from a portable checkpoint; the recipe's learning rate, weight decay and the like stay."""
        groups = self._optimizer.param_groups
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        steps = infinity.load_checkpoint(self._model, self._optimizer, path)
        self._optimizer.restart(numbers, 0)  # the run counts its own steps
        self._views.log(f"starts from {path}, after {steps} steps of its optimizer")

    def run(self) -> None:
        """Run all steps; evaluate every ``eval_every`` steps, after the last, and optionally at first."""
        train = self._recipe.train
        if train.eval_first and self.step == 0:
            self._evaluate(0)
        first = self.step + 1
        for step in range(first, self._recipe.steps + 1):
            if self.best is not None and self.best.is_over:
                break
            self.step = step
            batches = [[*islice(task.data.train, train.accumulate)] for task in self.tasks]
            losses = [self._mean(loss) for loss in self._step(batches)]
            report = self._report(step, batches, losses)
            self._views.step(report)
            if step == first and self._scheduled is not None and (plan := self._scheduled.passing.plan):
                self._views.log(plan.describe())
            if train.eval_every and (step % train.eval_every == 0 or step == self._recipe.steps):
                self._evaluate(step)
            took = [after(step, report.step_s) for after in self._after]
            if any(took):
                self._optimizer.report()  # excludes their time and bytes from the next step's report
        self._optimizer.synchronize()  # the last step's updates may fail on any rank;
        self.meet()  # then no rank may return successfully

    def meet(self) -> None:
        """Block until every rank calls this."""
        self._mean(0.0)

    def _step(self, batches: Sequence[Sequence[Batch]]) -> list[float]:
        """Run one optimizer step on each task's ``batches``; return this rank's loss of each task.

        The mean over ranks is the mean over all of a task's targets, in all micro-batches of all ranks.
        Gradients are averaged over ranks, so each rank divides by the number of targets per rank.
        """
        each = [sum(batch.target_count for batch in own) / world_size() for own in batches]
        totals = [torch.zeros((), device=self.loss.device) for _ in self.tasks]
        turns = [(at, batch) for at, own in enumerate(batches) for batch in own]
        with enough_memory(self._recipe):
            if self._scheduled is not None:  # all micro-batches through a block before the next block
                with self.loss.first_forward():  # around it: inside, the schedule leaves forwards by raising
                    losses = self._scheduled(join([batch for _, batch in turns])).losses
                parts = torch.split(losses, len(losses) // len(self.tasks))
                totals = [part.sum() / targets for part, targets in zip(parts, each, strict=True)]
                self._optimizer.scale(torch.stack(totals).sum()).backward()
            for micro, (at, batch) in enumerate(turns if self._scheduled is None else (), start=1):
                waits = infinity.no_sync(self._model) if micro < len(turns) else nullcontext()
                with self.tasks[at].within(self._model), waits:
                    loss = self.loss(batch) / each[at]
                    self._optimizer.scale(loss).backward()
                    totals[at] += loss.detach()
        self._optimizer.step()
        self._scheduler.step()
        return [self.loss.value(total.detach()) for total in totals]

    def _report(self, step: int, batches: Sequence[Sequence[Batch]], losses: Sequence[float]) -> StepReport:
        """Return the figures of a step and, where tasks have names, of each."""
        tokens = [sum(batch.token_count for batch in own) for own in batches]
        targets = [sum(batch.target_count for batch in own) for own in batches]
        report: StepReport = self._optimizer.report(loss=mean_of(losses, targets), tokens=sum(tokens))
        norms = self._optimizer.grad_norms
        rates = {group.get("adapter"): group["lr"] for group in reversed(self._optimizer.param_groups)}
        adapters = {
            task.name: AdapterReport(
                loss=loss, lr=float(rates[task.name]), grad_norm=norms.get(task.name), tokens=count,
                skipped=not math.isfinite(norms.get(task.name, 0.0)),
            )
            for task, loss, count in zip(self.tasks, losses, tokens, strict=True)
            if task.name
        }  # fmt: skip
        return replace(report, step=step, adapters=adapters, metrics=self._metrics())

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        """Evaluate the model, or the average of its weights where the optimizer keeps one."""
        sets = [(task, *each) for task in self.tasks for each in task.data.evaluated.items()]
        if not sets:
            return
        self.loss.metrics()  # those of a step before
        with infinity.ema(self._model) if self._recipe.optim.rule.averages else nullcontext():
            self._model.eval()
            try:
                parts = [self._figures(*each) for each in sets]
            finally:
                self._model.train()
            per_token = not OBJECTIVES[self._recipe.train.task].data.documents
            found = Evaluation.of(step, parts, per_token=per_token)
            self._views.evaluated(found)
            if self.best is not None and step > 0:
                self.best.seen(found)
        self._optimizer.report()  # excludes the time and bytes of this from the next step's report

    def _figures(self, task: Task, name: str, held_out: HeldOut) -> HeldOutFigures:
        total, count = 0.0, 0
        with task.within(self._model):
            for batch in held_out.batches(self._recipe.train.eval_batches):
                with enough_memory(self._recipe):
                    total += self.loss.value(self.loss(batch))
                count += batch.target_count
        loss = self._mean(total) * world_size() / count
        return HeldOutFigures(task.name, name, loss, count, self._metrics())

    def _metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the examples of all ranks, since this was last called."""
        found = self.loss.metrics()
        if not found:
            return {}
        totals = self._mean.of(torch.stack([*found.values()]).double())
        means = {name: float(total / count) for name, (total, count) in zip(found, totals)}
        return {name: mean for name, mean in means.items() if not math.isnan(mean)}


class BatchLoss(TaskLoss):
    """Loss of one micro-batch, which is copied to the model's device."""

    def __init__(self, model: Any, recipe: Recipe, *, packed: bool, mean: "RankMean") -> None:
        objective = OBJECTIVES[recipe.train.task]
        super().__init__(model, objective, recipe.train, packed=packed, over_ranks=mean.of)
        self._recipe, self.mean = recipe, mean
        self.device = next(model.parameters()).device
        self._has_run = recipe.model.path is None  # the first forward shows whether a config.json works
        self._copied: list[torch.Tensor] = []  # page-locked sources of copies that may be in flight

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over this rank's examples; does not wait for an accelerator."""
        with self.first_forward():
            return self.sum(batch)

    def sum(self, batch: Batch) -> torch.Tensor:
        """Return the loss as a call does, in a :meth:`first_forward` of the caller's."""
        return super().__call__(self._on_device(batch))

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each document of each row, on the CPU, ``(rows, documents)``."""
        with self.first_forward():
            found = self.documents(self._on_device(batch))[0].cpu()
        self._copied.clear()
        return found

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        """Explain errors in the block, if no forward has shown before that the checkpoint's config works."""
        if self._has_run:
            yield
            return
        what = f"the model in {self._recipe.model.path}, with its config.json, cannot run"
        with library_errors(CheckpointError, what), enough_memory(self._recipe):
            yield
        self._has_run = True

    def value(self, loss: torch.Tensor) -> float:
        """Wait for a loss and return it; this frees the page-locked sources of earlier copies."""
        value = float(loss)
        self._copied.clear()
        return value

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        tensors = {name: each for name, each in batch._asdict().items() if isinstance(each, torch.Tensor)}
        pinned = {name: each.pin_memory() for name, each in tensors.items()}
        self._copied += pinned.values()
        moved: Any = {name: each.to(self.device, non_blocking=True) for name, each in pinned.items()}
        return batch._replace(**moved)


class Division(NamedTuple):
    """Sequences of a step, divided into ranks and micro-batches."""

    batch_size: int
    accumulate: int
    ranks: int

    @property
    def sequences(self) -> int:
        return self.batch_size * self.accumulate * self.ranks

    def check(self, before: "Division") -> None:
        """Refuse other sequences per step than before, with which the run's numbers would differ."""
        if self[:2] != before[:2] and (self.ranks == before.ranks or self.sequences != before.sequences):
            raise RecipeError(
                f"the run was interrupted with train.batch_size={before.batch_size}, train.accumulate="
                f"{before.accumulate} and ranks: {before.ranks}; now they are {self.batch_size}, "
                f"{self.accumulate} and {self.ranks}: give the values that it had, or with another number of "
                f"ranks such that a step takes {before.sequences} sequences"
            )


class RankMean:
    """Mean of a number over all ranks; every rank must construct and call it.

    It has a process group of its own: behind gathers that are queued on the model's it would wait.
    """

    def __init__(self, optimizer: Any, timeout_s: float) -> None:
        self._optimizer, self._group = optimizer, None
        if dist.is_initialized() and world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def __call__(self, value: float) -> float:
        return float(self.of(torch.tensor(value, dtype=torch.float64, device="cpu")))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of each value; of one rank ``values`` themselves."""
        return values if self._group is None else self.total(values) / world_size()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each value over all ranks."""
        if self._group is None:
            return values
        total = values.to("cpu", copy=True)
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise self._optimizer.runtime.peer_error("the mean of the loss over ranks", error) from error
        return total.to(values.device)


def lr_factor(step: int, optim: OptimConfig, *, steps: int) -> float:
    """Return the learning rate of ``step`` (from 0) as a fraction of ``optim.lr``.

    The last step of the warm-up has the full rate, and the last of ``steps`` has ``min_lr_ratio`` of it.
    """
    if not optim.rule.scheduled:
        return 1.0
    warmup = optim.warmup_steps or math.ceil(optim.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left


@contextmanager
def enough_memory(recipe: Recipe) -> Iterator[None]:
    """Turn a refused allocation in the block into a BudgetError that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, InfinityError) or not (
            isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
        ):
            raise
        raise BudgetError(
            f"a micro-batch of train.batch_size={recipe.train.batch_size} x "
            f"model.seq_len={recipe.model.seq_len} tokens needs more memory than is free "
            f"({first_line(error)}): lower one of them, or set memory.activations=plan"
        ) from error


class Part(NamedTuple):
    """A part of a run's data: its name, its sequences, and those of them whose reference is needed."""

    name: str
    sequences: Sequences
    needed: Ints
    shape: BatchShape

    @property
    def examples(self) -> Examples:
        assert self.sequences.examples is not None
        return self.sequences.examples


def parts_of(name: str, data: Data, micro_batches: int, evaluated: int) -> Iterator[Part]:
    """Yield the parts of the data of task ``name``: what will be trained and evaluated on."""
    train = data.train  # a recipe refuses data.streaming with it
    for number, (stream, needed) in enumerate(train.upcoming(micro_batches)):
        yield Part(f"{name}:train{number or ''}", stream.sequences, needed, train.shape)
    for each, held_out in data.evaluated.items():
        used = np.unique(held_out.order(evaluated))
        yield Part(f"{name}:{each}:held_out", held_out.sequences, used, held_out.shape)


@dataclass(frozen=True, slots=True)
class Reference:
    """Fills in what the reference says of documents; every rank calls, before the first step."""

    recipe: Recipe
    model: Any
    log_probs: Callable[[Batch], torch.Tensor]  # of each document of a batch's rows, (rows, documents)
    total: Callable[[torch.Tensor], torch.Tensor]  # the sum of each value over ranks
    say: Callable[[str], object]

    def fill(self, parts: Sequence[Part], folder: Path | None, *, step: int) -> None:
        """Take from the run's folder what it has, and compute what is missing.

        Raises:
            RecipeError: Something is missing after ``step``, when the model is the reference no more.
        """
        kept = _read(folder / REFERENCE) if step and folder is not None and rank() == 0 else {}
        missing = [part._replace(needed=self._take(part, kept)) for part in parts]
        count = sum(len(part.needed) for part in missing)
        if not count:
            return
        if step and not self.recipe.trains_adapters:
            raise RecipeError(
                f"train.task={self.recipe.train.task}: for {count} sequences it is not known what the model "
                f"said before its first step, and step {step} was made since: train.steps, train.batch_size, "
                "train.eval_batches and the ranks must be those that the run began with"
            )
        began_s, done = time.monotonic(), 0
        self.model.eval()
        adapters = self.recipe.trains_adapters and not self.recipe.adapters  # of several none is used then
        with torch.no_grad(), self.model.disable_adapter() if adapters else nullcontext():
            for part in missing:
                done = self._compute(part, done, count)
        self.model.train()
        if folder is not None and rank() == 0:
            _write(folder / REFERENCE, {part.name: part.examples.reference for part in parts})
        took_s = time.monotonic() - began_s
        self.say(f"the reference: {count:,} sequences in {took_s:.1f} s; later steps need no second model")

    def _take(self, part: Part, kept: dict[str, NDArray[Any]]) -> Ints:
        """Take from ``kept``, which rank 0 has, and return the sequences that it lacks."""
        examples = part.examples
        found = kept.get(part.name, np.zeros(0))
        if found.shape != examples.reference.shape:
            found = np.full(examples.reference.shape, np.nan)
        known = ~np.isnan(found) & (rank() == 0)
        values = np.stack([np.where(known, found, 0), known]).astype(np.float64)
        values, known = self.total(torch.from_numpy(values)).numpy()
        examples.reference[:] = np.where(known > 0, values, np.nan)
        pieces = np.add.reduceat(np.isnan(examples.reference), part.sequences.first_pieces)
        return part.needed[pieces[part.needed] > 0]

    def _compute(self, part: Part, done: int, count: int) -> int:
        """Compute the values of a part's needed sequences; return how many of ``count`` are done then."""
        examples, size = part.examples, part.shape.global_batch_size
        found, logged_s = np.zeros((2, len(examples.reference))), time.monotonic()
        for begin in range(0, len(part.needed), size):
            together = np.resize(part.needed[begin : begin + size], size)  # as many on each rank
            own = part.shape.share(together)
            values = self.log_probs(part.sequences.batch(own, together)).double().numpy()
            pieces = part.sequences.pieces(own)
            found[:, pieces[pieces >= 0]] = np.stack([values, np.ones_like(values)])[:, pieces >= 0]
            done += min(size, len(part.needed) - begin)
            if time.monotonic() - logged_s >= _LINES_EVERY_S:
                logged_s = time.monotonic()
                self.say(f"the reference: {done:,} of {count:,} sequences")
        sums, times = self.total(torch.from_numpy(found)).numpy()
        new = times > 0
        examples.reference[new] = (sums[new] / times[new]).astype(np.float32)
        return done


def _read(path: Path) -> dict[str, NDArray[Any]]:
    if not path.exists():
        return {}
    with open(open_regular(path), "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a file that replaces what had its name; it survives a power cut."""
    draft = path.with_name(f"{path.name}.new")
    with open(create_file(draft), "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    sync(draft)
    draft.replace(path)
