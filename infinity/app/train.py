"""``infinity train``: from a recipe to a trained model, using only the public API, as any training loop."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.api.export import ADAPTERS_FOLDER, MODEL_FOLDER, check_room, export_run
from infinity.api.schedule import LayerSchedule
from infinity.app.checkpoints import Checkpoints
from infinity.app.data.loader import BatchShape, Data, HeldOut, open_data
from infinity.app.data.sequences import Batch, join
from infinity.app.models.causal import CausalLoss, require_causal
from infinity.app.models.gpt import GPT
from infinity.app.recipe import Recipe, TrainConfig
from infinity.app.runs import (
    METRICS,
    SUMMARY,
    Run,
    find_run,
    how_to_go_on,
    interrupted_run,
    is_interrupted,
    locked,
    opened,
    write_recipe,
)
from infinity.app.views import ActivationView, Views, add_files, open_display
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.model import is_ours, longest_sequence, model_class, read_config, vocabulary_size
from infinity.checkpoint.publish import tokenizer_files
from infinity.comm.ranks import join_ranks, peer_errors
from infinity.core.errors import (
    BudgetError,
    CheckpointError,
    InfinityError,
    RecipeError,
    first_line,
    library_errors,
)
from infinity.core.files import user_path
from infinity.core.launch import launched
from infinity.core.nbytes import format_nbytes
from infinity.device.accelerator import memory_nbytes
from infinity.device.machine import local_ranks, total_host_nbytes, usable_cores
from infinity.observe.metrics import StepReport, read_metrics
from infinity.observe.summary import PredictedStep, Summary, SummaryBuilder, show_summary
from infinity.observe.timeline import write_trace
from infinity.optim.config import OptimConfig
from infinity.optim.threads import set_rank_threads

#: Runs whose steps take less in all are not predicted, since that takes some seconds (s).
_PREDICTED_S = 60.0
#: Threads that wait for each other cost time; many more than that, and the system refuses to start them.
_MOST_THREADS_PER_CORE = 8
_Found = TypeVar("_Found")


def train(recipe: Recipe) -> Summary | None:
    """Train the recipe's model on its data; a run of its name that was interrupted goes on.

    Every rank must call. Rank 0 shows progress, writes the run's folder and returns the summary; other
    ranks return None. An exception that leaves a run which can go on has a note that says how.

    Raises:
        InfinityError: The recipe or the data is invalid, a budget is too small, or a disk or rank failed.
    """
    with ExitStack() as stack:
        device = stack.enter_context(process_group(recipe))
        run = on_rank_0(lambda: find_run(recipe))
        recipe, folder = run.recipe, run.folder
        set_threads(recipe.train)
        check_sizes(recipe, device)
        if run.before is None and recipe.checkpoint.load is not None:
            DistributedCheckpoint(Path(recipe.checkpoint.load)).close()  # it is one, before all the work
        data = open_inputs(recipe, _log_before_views(recipe))
        views, totals, activations = Views(), SummaryBuilder(), None
        if rank() == 0:
            stack.enter_context(opened(run))
            stack.enter_context(_telling_how_to_go_on(run))
            views = open_display(recipe, folder, world_size())
        stack.enter_context(_file_errors(recipe))
        stack.callback(views.close)
        model, optimizer = stack.enter_context(built(recipe, folder.name, views))
        runtime = optimizer.runtime
        if rank() == 0:
            runtime.say.attach(views.log)
        loop = Loop(recipe, model, optimizer, data, views, folder)
        if rank() == 0:
            write_recipe(recipe.with_dtype(runtime.config.dtype), folder)
            for note in notes_on(run, data, loop):
                views.log(note)
            after = -1 if run.before is None else loop.step
            add_files(views, recipe, folder, after=after)
            for line, _ in read_metrics(folder / METRICS, after):
                if isinstance(line, StepReport):
                    totals.step(line)
                else:
                    totals.evaluated(line.step, line.loss)
            activations = ActivationView(runtime.activations, folder, recipe.train.accumulate, views.log)
            views.add(totals)
            views.add(activations)
            for saved in (MODEL_FOLDER, ADAPTERS_FOLDER):  # by a run that was interrupted just then
                shutil.rmtree(folder / saved, ignore_errors=True)
            if _saves(recipe) and recipe.lora.rank is None:
                check_room(model, folder)
        loop.run()
        if _saves(recipe):
            _save(recipe, model, folder, views)
        summary = None
        if activations is not None:
            summary = totals.result(
                folder=folder,
                world_size=world_size(),
                budgets=optimizer.budgets,
                activations=activations.result(),
                predicted=_predicted(recipe, totals, optimizer.budgets),
                dtype=runtime.config.dtype,
                notes=[*runtime.notes, *notes_on_commits(runtime.recorded_every)],
            )
            if recipe.observe.timeline:
                write_trace(optimizer.timeline.spans(), folder / "timeline.json")
            summary.write(folder / SUMMARY)
        loop.meet()  # the run is finished: now each rank removes what it could have gone on from
    if summary is not None and recipe.observe.progress:
        show_summary(summary, Console())
    return summary


def _predicted(
    recipe: Recipe, totals: SummaryBuilder, budgets: Mapping[str, int | None]
) -> PredictedStep | None:
    """Return what a plan says of the run's steps; None: the run was short, or cannot be planned."""
    if totals.total_s < _PREDICTED_S or local_ranks() < world_size():
        return None
    from infinity.app.plan_recipe import predict

    try:
        return predict(recipe, world_size(), budgets)
    except InfinityError:
        return None


class Loop:
    """Training steps and evaluations of one model; goes on after the last committed step.

    Construction is collective.

    [Note: the metrics of a committed step]
    The optimizer commits the place in the data and the learning rate's with each step. That of a scheduler
    is taken when the next forward pass begins, and the step is committed after it: when the step's lines
    have been written. So a run that goes on after a step has all lines up to it, and cuts later ones.

    Args:
        optimizer: :class:`infinity.AdamW`, which follows this object and its scheduler.
        views: Receive the figures of each step; on rank 0 only.
        folder: The run's, for its checkpoints; None: there are none.

    Attributes:
        step: The step that the loop has come to.
        division: How a step divides its sequences; ``before``: how it did before the interruption.
    """

    def __init__(
        self, recipe: Recipe, model: Any, optimizer: Any, data: Data, views: Views,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._recipe, self._model, self._optimizer, self._views = recipe, model, optimizer, views
        self._data = data
        self._device = next(model.parameters()).device
        self._summed_loss = CausalLoss(model, packed=data.packed)
        self._mean = RankMean(optimizer, recipe.partition.timeout_s)
        self._has_run = False  # the model, forward
        self._copied: list[torch.Tensor] = []  # page-locked, while copies of it to the device are in flight
        self.step = 0
        self.division = Division(recipe.train.batch_size, recipe.train.accumulate, world_size())
        self.before = self.division
        self._scheduler = LambdaLR(optimizer, self._lr_factor)
        self._resume()
        self._checkpoints: Checkpoints | None = None
        if folder is not None and recipe.checkpoint.every is not None:
            self._checkpoints = Checkpoints(
                recipe.checkpoint, model, optimizer, folder, step=self.step, steps=recipe.train.steps,
                agree=self._mean, say=views.log,
            )  # fmt: skip
        self._scheduled: LayerSchedule | None = None
        if recipe.train.schedule == "layer":
            self._scheduled = infinity.layer_schedule(model, recipe.train.accumulate, self.loss)
            views.log(f"layer schedule: all micro-batches through each block of {self._scheduled.blocks}")

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the run: what the optimizer commits with the step."""
        return {"step": self.step, "data": self._data.train.state_dict(), "division": tuple(self.division)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a place.

        Raises:
            DataError: The data is not what it was.
            RecipeError: A step would take other sequences.
        """
        self.step, self.before = int(state["step"]), Division(*state["division"])
        self.division.check(self.before)
        self._data.train.load_state_dict(state["data"])

    def _resume(self) -> None:
        """Go on after the last committed step, if the run was interrupted. Every rank must call."""
        self._optimizer.follow(loop=self, scheduler=self._scheduler)
        if not infinity.resume(self._model, self._optimizer) and self._recipe.checkpoint.load is not None:
            self._load(Path(self._recipe.checkpoint.load))
        for group in self._optimizer.param_groups:  # train.steps may be another one now
            group["lr"] = group["initial_lr"] * self._lr_factor(self.step)

    def _load(self, path: Path) -> None:
        """Start from a portable checkpoint; learning rate, weight decay and the like stay the recipe's."""
        groups = self._optimizer.param_groups
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        steps = infinity.load_checkpoint(self._model, self._optimizer, path)
        self._optimizer.restart(numbers, 0)  # the run counts its own steps
        self._views.log(f"starts from {path}, after {steps} steps of its optimizer")

    def _lr_factor(self, step: int) -> float:
        return lr_factor(step, self._recipe.optim, steps=self._recipe.train.steps)

    def run(self) -> None:
        """Run all steps; evaluate every ``eval_every`` steps, after the last, and optionally at first."""
        train = self._recipe.train
        if train.eval_first and self.step == 0:
            self._evaluate(0)
        for step in range(self.step + 1, train.steps + 1):
            self.step = step
            batches = list(islice(self._data.train, train.accumulate))
            loss = self._mean(self._step(batches))
            tokens = sum(batch.token_count for batch in batches)
            report = self._optimizer.report(loss=loss, tokens=tokens)
            self._views.step(replace(report, step=step))
            if train.eval_every and (step % train.eval_every == 0 or step == train.steps):
                self._evaluate(step)
            if self._checkpoints is not None and self._checkpoints.after(step, report.step_s):
                self._optimizer.report()  # excludes its time and bytes from the next step's report
        self._optimizer.synchronize()  # the last step's updates may fail on any rank;
        self.meet()  # then no rank may return successfully

    def meet(self) -> None:
        """Return when every rank has come here."""
        self._mean(0.0)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over this rank's targets."""
        positions, mask = (each if each is None else self._to_device(each) for each in batch[2:4])
        tokens, targets = self._to_device(batch.tokens), self._to_device(batch.targets)
        with self._first_forward():
            return self._summed_loss(tokens, targets, positions, mask)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a part of a batch to the device; does not wait for an accelerator."""
        if self._device.type == "cpu":
            return values
        self._copied.append(values.pin_memory())
        return self._copied[-1].to(self._device, non_blocking=True)

    def _value(self, loss: torch.Tensor) -> float:
        """Wait for a loss and return it; what was copied to the device until now is there."""
        value = float(loss)
        self._copied.clear()
        return value

    @contextmanager
    def _first_forward(self) -> Iterator[None]:
        """A forward pass of the model, which is the first to see many values of a ``config.json``.

        Raises:
            CheckpointError: It is the first, and the model of ``model.path`` raised.
        """
        path = self._recipe.model.path
        if self._has_run or path is None:
            yield
            return
        what = f"the model in {path}, with its config.json, cannot run"
        with library_errors(CheckpointError, what), enough_memory(self._recipe):
            yield
        self._has_run = True

    def _step(self, batches: Sequence[Batch]) -> float:
        """Run one optimizer step and return this rank's share of the loss; the mean over ranks is the loss.

        The loss is the mean over all targets of the step, in all micro-batches of all ranks. Gradients are
        averaged over ranks, so each rank divides by the number of targets per rank.
        """
        targets_per_rank = sum(batch.target_count for batch in batches) / world_size()
        backward = self._step_schedule if self._scheduled is None else self._layer_schedule
        with enough_memory(self._recipe):
            total = backward(batches, targets_per_rank)
        self._optimizer.step()
        self._scheduler.step()
        return self._value(total)

    def _step_schedule(self, batches: Sequence[Batch], targets_per_rank: float) -> torch.Tensor:
        """Run forward and backward of each micro-batch and return the sum of their losses."""
        total = torch.zeros((), device=self._device)
        for micro, batch in enumerate(batches, start=1):
            with infinity.no_sync(self._model) if micro < len(batches) else nullcontext():
                loss = self.loss(batch) / targets_per_rank
                self._optimizer.scale(loss).backward()
                total += loss.detach()
        return total

    def _layer_schedule(self, batches: Sequence[Batch], targets_per_rank: float) -> torch.Tensor:
        """Run forward and backward of all micro-batches through a block before the next block."""
        assert self._scheduled is not None
        loss = self._scheduled(join(batches)).losses.sum() / targets_per_rank
        self._optimizer.scale(loss).backward()
        return loss.detach()

    def _evaluate(self, step: int) -> None:
        """Show the held-out loss after ``step`` steps. Every rank must call."""
        if self._data.held_out is None:
            return
        loss = self._held_out_loss(self._data.held_out)
        self._optimizer.report()  # excludes the evaluation's time and bytes from the next step's report
        self._views.evaluated(step, loss)

    @torch.no_grad()
    def _held_out_loss(self, held_out: HeldOut) -> float:
        """Return the mean loss over the held-out targets of all ranks. Every rank must call."""
        total, count = 0.0, 0
        self._model.eval()
        try:
            for batch in held_out.batches(self._recipe.train.eval_batches):
                with enough_memory(self._recipe):
                    total += self._value(self.loss(batch))
                count += batch.target_count
        finally:
            self._model.train()
        return self._mean(total) * world_size() / count


class Division(NamedTuple):
    """How the sequences of a step are divided."""

    batch_size: int
    accumulate: int
    ranks: int

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.batch_size * self.accumulate * self.ranks

    def check(self, before: "Division") -> None:
        """Refuse other sequences per step than before, unless only the number of ranks is another.

        Raises:
            RecipeError: The run would go on with other numbers.
        """
        if self[:2] != before[:2] and (self.ranks == before.ranks or self.sequences != before.sequences):
            raise RecipeError(
                f"the run was interrupted with train.batch_size={before.batch_size}, train.accumulate="
                f"{before.accumulate} and ranks: {before.ranks}; now they are {self.batch_size}, "
                f"{self.accumulate} and {self.ranks}: give the values that it had, or with another number of "
                f"ranks such that a step takes {before.sequences} sequences"
            )


class RankMean:
    """Mean of a number over all ranks; construction and calls are collective.

    It uses a process group of its own, because another thread may have queued gathers on the model's.

    Args:
        optimizer: Knows why a rank does not respond.
        timeout_s: Seconds to wait for a silent rank.
    """

    def __init__(self, optimizer: Any, timeout_s: float) -> None:
        self._optimizer, self._group = optimizer, None
        if dist.is_initialized() and world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def __call__(self, value: float) -> float:
        if self._group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device="cpu")
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise self._optimizer.runtime.peer_error("the mean of the loss over ranks", error) from error
        return float(total) / world_size()


def lr_factor(step: int, optim: OptimConfig, *, steps: int) -> float:
    """Return the learning rate of ``step`` (from 0) as a fraction of ``optim.lr``.

    It rises linearly over ``warmup_steps``, the last of which has the full rate, then decays to
    ``min_lr_ratio``, which it reaches at the last of ``steps``.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step + 1 - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left


# --- ranks ---------------------------------------------------------------------------------------


def rank() -> int:
    """Return this process's rank, from torch.distributed or, before it is initialised, the launcher."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


@contextmanager
def process_group(recipe: Recipe) -> Iterator[torch.device]:
    """The ranks that the launcher started, joined in this block unless they are; yields this one's device."""
    owns_group = not dist.is_initialized()
    device = join_ranks(recipe.partition.timeout_s, recipe.train.device)
    try:
        yield device
    finally:
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()


def on_rank_0(find: Callable[[], _Found]) -> _Found:
    """Return what ``find`` returns on rank 0, or raise its error, on every rank. Every rank must call."""
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = find()
        except InfinityError as error:
            if world_size() == 1:
                raise
            outcome[1] = str(error)
    if world_size() > 1:
        with peer_errors("finding the run"):
            dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise RecipeError(outcome[1])
    found: _Found = outcome[0]
    return found


def world_size() -> int:
    """Return the number of ranks, from torch.distributed or, before it is initialised, the launcher."""
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


def set_threads(config: TrainConfig) -> None:
    """Give each rank of this machine its share of the cores; more threads would only wait for each other.

    Raises:
        RecipeError: So many that the system may not start them, which would end the process.
    """
    most = _MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.threads is not None and config.threads > most:
        raise RecipeError(
            f"train.threads: got {config.threads}; wanted at most {most} ({_MOST_THREADS_PER_CORE} for each "
            "core of this machine), or null for one per core"
        )
    set_rank_threads(config.threads or max(1, usable_cores() // local_ranks()))


# --- memory --------------------------------------------------------------------------------------


def check_sizes(recipe: Recipe, device: torch.device) -> None:
    """Refuse what cannot fit this machine whatever the budgets: allocating it might end the process.

    Args:
        device: Where this rank computes.

    Raises:
        BudgetError: A parameter of a new model, or the logits of a micro-batch, exceed the memory.
    """
    model, train, host = recipe.model, recipe.train, total_host_nbytes()
    if model.path is not None:
        return
    nbytes = host if device.type == "cpu" else memory_nbytes(device)[1]
    ways = "the embedding", "the feed-forward weights", "the attention's weights"
    numels = model.vocab_size * model.d_model, model.ff_width * model.d_model, 3 * model.d_model**2
    numel, what = max(zip(numels, ways))
    _check_fits(
        4 * numel, host, f"{what} of model.d_model={model.d_model}", "lower model.d_model, vocab_size or d_ff"
    )
    _check_fits(
        4 * train.batch_size * model.seq_len * model.vocab_size, nbytes,
        f"the logits of train.batch_size={train.batch_size} x model.seq_len={model.seq_len} tokens",
        "lower train.batch_size or model.seq_len",
    )  # fmt: skip


def _check_fits(nbytes: int, most: int, what: str, advice: str) -> None:
    if nbytes > most:
        raise BudgetError(
            f"{what} take {format_nbytes(nbytes)} in fp32; this machine has {format_nbytes(most)}: {advice}"
        )


@contextmanager
def enough_memory(recipe: Recipe) -> Iterator[None]:
    """Say what to lower where an allocation is refused.

    Raises:
        BudgetError: It was.
    """
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


# --- inputs --------------------------------------------------------------------------------------


def open_inputs(recipe: Recipe, log: Callable[[str], object]) -> Data:
    """Check the checkpoint's config and open the data, before any weight is read. Every rank must call.

    Args:
        log: Called with a progress line now and then while tokens are written.

    Raises:
        CheckpointError: ``model.path`` is not the directory of a model.
        RecipeError: Its model does not predict next tokens, or not in sequences of this length.
        DataError: The data is missing, malformed or too short.
    """
    shape = BatchShape(
        seq_len=recipe.model.seq_len,
        batch_size=recipe.train.batch_size,
        rank=rank(),
        world_size=world_size(),
    )
    config, vocab_size = recipe.data, recipe.model.vocab_size
    path = _checkpoint(recipe)
    if path is not None:
        _check_checkpoint(path, recipe.model.seq_len)
        vocab_size = vocabulary_size(path)
        if config.tokenizer is None and is_ours(path) and not tokenizer_files(path):
            config = replace(config, tokenizer="bytes")  # a GPT that was exported without a tokenizer
    return open_data(config, shape, vocab_size=vocab_size, model_path=recipe.model.path, log=log)


def notes_on_commits(every: int) -> Iterator[str]:
    """Yield a line if an interruption can cost more than the step in flight."""
    if every > 1:
        yield (
            f"one step in {every} was recorded, since the states in host memory must be written for that: "
            f"an interruption would have cost up to {every} steps (durability.every)"
        )


def notes_on(run: Run, data: Data, loop: "Loop") -> Iterator[str]:
    """Yield lines about the data that the user should see before the first step, and how the run goes on."""
    recipe, before = run.recipe, run.before
    if run.lost:
        yield f"the run was interrupted after {run.lost} steps, none of which was recorded: it begins anew"
    if before is not None:
        yield f"goes on after step {loop.step}, where the run was interrupted"
        if before.train.steps != recipe.train.steps and recipe.optim.schedule != "constant":
            yield (
                f"train.steps was {before.train.steps}, is {recipe.train.steps}: from here on the learning "
                f"rate follows optim.schedule={recipe.optim.schedule} over the new number of steps"
            )
        if loop.before.sequences != loop.division.sequences:
            ranks = f"{loop.division.ranks} rank{'s' if loop.division.ranks > 1 else ''}"
            yield (
                f"a step takes {loop.division.sequences} sequences on {ranks}; it took "
                f"{loop.before.sequences} on {loop.before.ranks} (train.batch_size is per rank)"
            )
    yield from data.notes
    steps, epoch_steps = recipe.train.steps, data.train.micro_batches_per_epoch / recipe.train.accumulate
    epochs = _short(steps / epoch_steps)
    yield f"one epoch is {_short(epoch_steps)} steps; train.steps={steps} are {epochs} epochs"
    path = _checkpoint(recipe)
    longest = None if path is None else longest_sequence(path)
    if longest is not None and recipe.model.seq_len > longest:
        yield f"model.seq_len={recipe.model.seq_len} exceeds the checkpoint's {longest} positions"


def _checkpoint(recipe: Recipe) -> Path | None:
    return None if recipe.model.path is None else Path(recipe.model.path)


def _check_checkpoint(path: Path, seq_len: int) -> None:
    config, longest = read_config(path), longest_sequence(path)
    if not is_ours(path):
        require_causal(model_class(config), config)
    elif longest is not None and seq_len > longest:
        raise RecipeError(
            f"model.seq_len={seq_len}: the model in {path} was built for at most {longest} tokens per "
            f"sequence; set model.seq_len={longest}"
        )


def _short(value: float) -> str:
    if value < 0.01:
        return "less than 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- the model and what is saved of it -----------------------------------------------------------


@contextmanager
def built(recipe: Recipe, name: str | None, views: Views, *, keep: bool = False) -> Iterator[tuple[Any, Any]]:
    """Build model and optimizer; on exit close them.

    Args:
        name: Of the run's directories on NVMe; None: a new one, and an interruption keeps nothing.
        keep: The run can go on, also without an interruption.
    """
    recipe = replace(recipe, run=replace(recipe.run, name=name))
    model = _new_model(recipe) if recipe.model.path is None else _loaded_model(recipe, views)
    try:
        if recipe.lora.rank is not None:
            torch.manual_seed(recipe.run.seed)
            model = infinity.add_lora(model, **asdict(recipe.lora))
        optim = recipe.optim
        yield (
            model,
            infinity.AdamW(
                model,
                lr=optim.lr,
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                max_grad_norm=optim.max_grad_norm,
            ),
        )
    finally:
        infinity.close(model, keep=keep)


def _new_model(recipe: Recipe) -> Any:
    with infinity.Init(recipe):
        torch.manual_seed(recipe.run.seed)
        return GPT(recipe.model)


def _loaded_model(recipe: Recipe, views: Views) -> Any:
    """Load the model of ``model.path``; parameters that the checkpoint lacks are drawn with ``run.seed``."""
    path = _checkpoint(recipe)
    assert path is not None
    torch.manual_seed(recipe.run.seed)
    model = infinity.from_pretrained(
        path,
        recipe,
        new=recipe.model.new,
        ignore=recipe.model.ignore,
        frozen=recipe.lora.rank is not None,
        on_progress=views.loading,
    )
    return model.train()


def _saves(recipe: Recipe) -> bool:
    return recipe.model.path is not None if recipe.run.save is None else recipe.run.save


def _save(recipe: Recipe, model: Any, folder: Path, views: Views) -> None:
    """Write the trained model into the run's folder. Every rank must call."""
    out = folder / (MODEL_FOLDER if recipe.lora.rank is None else ADAPTERS_FOLDER)
    _write_model(recipe, model, out)
    views.log(f"saved {out}; publish it with: infinity export {out.parent} DIR")


def _write_model(recipe: Recipe, model: Any, out: Path) -> None:
    source = Path(recipe.data.tokenizer or recipe.model.path or "bytes")
    if recipe.lora.rank is None:
        infinity.export(model, out, tokenizer=source if tokenizer_files(source) else None)
    else:
        infinity.save_lora(model, out)


def publish_run(path: str | Path, out: str | Path) -> str:
    """Publish the trained model, or the adapters, of a run as ``out``; return a description of it.

    Of a run that was interrupted it is the model after the last committed step, and the run can still go
    on; every rank must call.

    Raises:
        CheckpointError: The run has no model, or ``out`` is not free.
        InfinityError: It is running, what it keeps cannot be used, or a drive failed.
    """
    folder = user_path(path, "RUN")
    if not is_interrupted(folder):
        if rank() == 0:
            export_run(path, out)
        return f"the model of {path}"
    with _last_commit(folder) as (recipe, model, _, step):
        _write_model(recipe, model, user_path(out, "OUT"))
    return f"the model of {path} after step {step}"


def save_run(path: str | Path, out: str | Path) -> str:
    """Write the last commit of an interrupted run as a portable checkpoint; return a description of it.

    The run can still go on. Every rank must call.

    Raises:
        CheckpointError: There is no commit, or ``out`` is not free.
        InfinityError: The run is running, what it keeps cannot be used, or a drive failed.
    """
    folder = user_path(path, "RUN")
    if not is_interrupted(folder):
        raise CheckpointError(
            f"{path} is not the folder of a run that was interrupted, and only such a one keeps all of its "
            "states; for checkpoints of a run while it trains set checkpoint.every"
        )
    with _last_commit(folder) as (_, model, optimizer, step):
        infinity.save_checkpoint(model, optimizer, user_path(out, "DIR"))
    return f"step {step} of {path}"


@contextmanager
def _last_commit(folder: Path) -> Iterator[tuple[Recipe, Any, Any, int]]:
    """Recipe, model, optimizer and last committed step of an interrupted run, which keeps all that it has."""
    recipe = interrupted_run(folder)
    with ExitStack() as stack:
        stack.enter_context(process_group(recipe))
        found = on_rank_0(lambda: find_run(recipe))
        if found.before is None:
            raise CheckpointError(f"{folder}: the run was interrupted before its first step was committed")
        recipe = found.recipe
        if rank() == 0:
            stack.enter_context(locked(folder))
        set_threads(recipe.train)
        model, optimizer = stack.enter_context(built(recipe, folder.name, Views(), keep=True))
        optimizer.follow(loop=_Unused(), scheduler=_Unused())
        yield recipe, model, optimizer, infinity.resume(model, optimizer)


class _Unused:
    """Takes what a training loop follows where there is no loop."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _log_before_views(recipe: Recipe) -> Callable[[str], object]:
    """Return a printer for lines before views are open, on any rank: one tokenises while others wait."""
    if not recipe.observe.progress:
        return lambda line: None
    return lambda line: Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _file_errors(recipe: Recipe) -> Iterator[None]:
    """Raise errors of files in the run's folder as ours, which name the file and say what to do."""
    try:
        yield
    except InfinityError:
        raise
    except OSError as error:
        raise InfinityError(
            f"{error.filename or recipe.run.dir}: {error.strerror}; the run's folder must stay where it is, "
            "with room to write, until the run has ended"
        ) from error


@contextmanager
def _telling_how_to_go_on(run: Run) -> Iterator[None]:
    """Note on what interrupts the run which step is kept, and how to go on."""
    try:
        yield
    except BaseException as error:
        if line := how_to_go_on(run, error):
            error.add_note(line)
        raise
