"""``infinity train``: from a recipe to a trained model, using only the public API, as any training loop."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.api.export import ADAPTERS_FOLDER, MODEL_FOLDER, check_room
from infinity.api.schedule import LayerSchedule
from infinity.app.data.loader import BatchShape, Data, HeldOut, open_data
from infinity.app.data.sequences import Batch, join
from infinity.app.models.causal import CausalLoss, require_causal
from infinity.app.models.gpt import GPT
from infinity.app.recipe import Recipe, TrainConfig
from infinity.app.views import ActivationView, Views, open_views
from infinity.checkpoint.model import is_ours, longest_sequence, model_class, read_config, vocabulary_size
from infinity.checkpoint.publish import tokenizer_files
from infinity.core.errors import (
    BudgetError,
    CheckpointError,
    InfinityError,
    RecipeError,
    first_line,
    library_errors,
)
from infinity.core.files import write_file
from infinity.core.nbytes import format_nbytes
from infinity.device.machine import local_ranks, total_host_nbytes, usable_cores
from infinity.observe.summary import Summary, SummaryBuilder, show_summary
from infinity.observe.timeline import write_trace
from infinity.optim.config import OptimConfig

#: File in the run's folder with every key of the recipe; the dtype is the one that was chosen for ``auto``.
RECIPE = "recipe.yaml"
#: Threads that wait for each other cost time; many more than that, and the system refuses to start them.
_MOST_THREADS_PER_CORE = 8


def train(recipe: Recipe) -> Summary | None:
    """Train the recipe's model on its data.

    Every rank must call. Rank 0 shows progress, writes the run's folder and returns the summary; other
    ranks return None.

    Raises:
        InfinityError: The recipe or the data is invalid, a budget is too small, or a disk or rank failed.
    """
    set_threads(recipe.train)
    check_sizes(recipe)
    data = open_inputs(recipe, _log_before_views(recipe))
    with ExitStack() as stack:
        folder = make_folder(recipe) if rank() == 0 else None
        stack.enter_context(_file_errors(recipe))
        views = open_views(recipe, folder, world_size()) if folder else Views()
        stack.callback(views.close)
        model, optimizer = stack.enter_context(built(recipe, folder, views))
        runtime, totals, activations = optimizer.runtime, SummaryBuilder(), None
        if folder:
            write_recipe(recipe.with_dtype(runtime.config.dtype), folder)
            runtime.say.attach(views.log)
            for note in notes_on(recipe, data):
                views.log(note)
            activations = ActivationView(runtime.activations, folder, recipe.train.accumulate, views.log)
            views.add(totals)
            views.add(activations)
            if _saves(recipe) and recipe.lora.rank is None:
                check_room(model, folder)
        with _interruptible(recipe):
            Loop(recipe, model, optimizer, data, views).run()
        if _saves(recipe):
            _save(recipe, model, folder, views)
        if folder is None or activations is None:
            return None
        summary = totals.result(
            folder=folder,
            world_size=world_size(),
            budgets=optimizer.budgets,
            activations=activations.result(),
            dtype=runtime.config.dtype,
            notes=runtime.notes,
        )
        summary.write(folder / "summary.json")
        if recipe.observe.timeline:
            write_trace(optimizer.timeline.spans(), folder / "timeline.json")
    if recipe.observe.progress:
        show_summary(summary, Console())
    return summary


class Loop:
    """Training steps and evaluations of one model.

    Args:
        optimizer: :class:`infinity.AdamW`.
        views: Receive the figures of each step; on rank 0 only.
    """

    def __init__(self, recipe: Recipe, model: Any, optimizer: Any, data: Data, views: Views) -> None:
        self._recipe, self._model, self._optimizer, self._views = recipe, model, optimizer, views
        self._data = data
        self._device = next(model.parameters()).device
        self._summed_loss = CausalLoss(model, packed=data.packed)
        self._mean = RankMean(optimizer, recipe.partition.timeout_s)
        self._has_run = False  # the model, forward
        self._scheduled: LayerSchedule | None = None
        if recipe.train.schedule == "layer":
            self._scheduled = infinity.layer_schedule(model, recipe.train.accumulate, self.loss)
            views.log(f"layer schedule: all micro-batches through each block of {self._scheduled.blocks}")
        self._scheduler = LambdaLR(
            optimizer, lambda step: lr_factor(step, recipe.optim, steps=recipe.train.steps)
        )

    def run(self) -> None:
        """Run all steps; evaluate every ``eval_every`` steps, after the last, and optionally at first."""
        train = self._recipe.train
        if train.eval_first:
            self._evaluate(0)
        for step in range(1, train.steps + 1):
            batches = list(islice(self._data.train, train.accumulate))
            loss = self._mean(self._step(batches))
            tokens = sum(batch.token_count for batch in batches)
            report = self._optimizer.report(loss=loss, tokens=tokens)
            self._views.step(replace(report, step=step))
            if train.eval_every and (step % train.eval_every == 0 or step == train.steps):
                self._evaluate(step)
        self._optimizer.synchronize()  # the last step's updates may fail on any rank;
        self._mean(0.0)  # then no rank may return successfully

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over this rank's targets."""
        positions, mask = (each if each is None else each.to(self._device) for each in batch[2:4])
        with self._first_forward():
            return self._summed_loss(
                batch.tokens.to(self._device), batch.targets.to(self._device), positions, mask
            )

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
        return float(total)

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
                    total += float(self.loss(batch))
                count += batch.target_count
        finally:
            self._model.train()
        return self._mean(total) * world_size() / count


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
        total = torch.tensor(value, dtype=torch.float64)
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
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks, from torch.distributed or, before it is initialised, the launcher."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


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
    torch.set_num_threads(config.threads or max(1, usable_cores() // local_ranks()))


# --- memory --------------------------------------------------------------------------------------


def check_sizes(recipe: Recipe) -> None:
    """Refuse what cannot fit this machine whatever the budgets: allocating it might end the process.

    Raises:
        BudgetError: A parameter of a new model, or the logits of a micro-batch, exceed the memory.
    """
    model, train, host = recipe.model, recipe.train, total_host_nbytes()
    if model.path is not None:
        return
    device = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else host
    ways = "the embedding", "the feed-forward weights", "the attention's weights"
    numels = model.vocab_size * model.d_model, model.ff_width * model.d_model, 3 * model.d_model**2
    numel, what = max(zip(numels, ways))
    _check_fits(
        4 * numel, host, f"{what} of model.d_model={model.d_model}", "lower model.d_model, vocab_size or d_ff"
    )
    _check_fits(
        4 * train.batch_size * model.seq_len * model.vocab_size, device,
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


def notes_on(recipe: Recipe, data: Data) -> Iterator[str]:
    """Yield lines about the data that the user should see before the first step."""
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


# --- the run's folder, model and results ---------------------------------------------------------


def make_folder(recipe: Recipe) -> Path:
    """Make the run's folder, ``run.dir/<run id>``, and write its recipe.

    Raises:
        RecipeError: A run of that name exists, or the folder cannot be made.
    """
    run_id = recipe.run.name or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    folder = Path(recipe.run.dir) / run_id
    try:
        folder.mkdir(mode=0o700, parents=True)  # a run may be as private as its data
        write_recipe(recipe, folder)
    except FileExistsError as error:
        raise RecipeError(f"run.name: {folder} exists; give the run another name, or none") from error
    except OSError as error:
        raise RecipeError(f"run.dir: {error.filename or folder}: {error.strerror}") from error
    return folder


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the recipe into the run's folder."""
    write_file(folder / RECIPE, recipe.to_yaml())


@contextmanager
def built(recipe: Recipe, folder: Path | None, views: Views) -> Iterator[tuple[Any, Any]]:
    """Build model and optimizer; on exit close them, and the process group if it was made here.

    The run's directories on NVMe are named like its ``folder``, which only rank 0 knows.
    """
    owns_group = not dist.is_initialized()
    named = recipe if folder is None else replace(recipe, run=replace(recipe.run, name=folder.name))
    try:
        model = _new_model(named) if recipe.model.path is None else _loaded_model(named, views)
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
            infinity.close(model)
    finally:
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()


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


def _save(recipe: Recipe, model: Any, folder: Path | None, views: Views) -> None:
    """Write the trained model into the run's folder, which only rank 0 knows. Every rank must call."""
    out = (folder or Path(recipe.run.dir)) / (MODEL_FOLDER if recipe.lora.rank is None else ADAPTERS_FOLDER)
    source = Path(recipe.data.tokenizer or recipe.model.path or "bytes")
    if recipe.lora.rank is None:
        infinity.export(model, out, tokenizer=source if tokenizer_files(source) else None)
    else:
        infinity.save_lora(model, out)
    views.log(f"saved {out}; publish it with: infinity export {out.parent} DIR")


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
def _interruptible(recipe: Recipe) -> Iterator[None]:
    """Add to a Ctrl-C that no model was saved, if the run was going to save one."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not _saves(recipe):
            raise
        raise KeyboardInterrupt("no model was saved, since the last step was not reached") from interrupt
