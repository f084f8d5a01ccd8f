"""The loop: data, step, log. It uses nothing but the public API, as any loop of a user's own."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
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
from infinity.app.activation_view import ActivationView
from infinity.app.data import Batch, Data
from infinity.app.data.loader import HeldOut, Shape
from infinity.app.data.sequences import join
from infinity.app.inputs import notes_on, open_inputs
from infinity.app.models.causal import CausalLoss
from infinity.app.models.gpt import GPT
from infinity.app.recipe import Recipe, TrainConfig
from infinity.checkpoint.publish import tokenizer_files
from infinity.core.errors import InfinityError, RecipeError
from infinity.device.machine import usable_cores
from infinity.observe.metrics import MetricsFile, TensorBoard, View
from infinity.observe.progress import ProgressDisplay
from infinity.observe.summary import Summary, SummaryBuilder, show_summary
from infinity.observe.timeline import write_trace
from infinity.optim.config import OptimConfig

#: In a run's folder: every key, with what was chosen where the recipe leaves it open.
RECIPE = "recipe.yaml"


def train(recipe: Recipe) -> Summary | None:
    """Train a model from its first weights to the recipe's last step.

    Every rank calls; rank 0 shows progress, keeps the run's folder and returns the summary.

    Raises:
        InfinityError: The recipe, the data, a budget, a disk or another rank is at fault.
    """
    set_threads(recipe.train)
    data = open_inputs(recipe, shape_of(recipe), _say_lines(recipe))
    with ExitStack() as stack:
        folder = make_folder(recipe) if rank() == 0 else None
        totals = SummaryBuilder()
        views = [totals, *open_views(recipe, folder, stack)] if folder else []
        model, optimizer = stack.enter_context(built(recipe, folder, views))
        runtime = optimizer.runtime
        if folder:
            keep_recipe(recipe.with_dtype(runtime.config.dtype), folder)  # with the dtype that was chosen
        for display in views:
            if isinstance(display, ProgressDisplay):
                runtime.say.attend(display.say)
                for note in notes_on(recipe, data):
                    display.say(note)
        if _saves(recipe) and folder and recipe.lora.rank is None:
            check_room(model, folder)
        activations = None
        if folder:
            say = partial(_tell, tuple(views))
            activations = ActivationView(runtime.activations, folder, recipe.train.accumulate, say)
            views.append(activations)
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
    """Steps and evaluations of one model.

    Args:
        optimizer: :class:`infinity.AdamW`.
        views: What shows the run, on rank 0; empty elsewhere.
    """

    def __init__(self, recipe: Recipe, model: Any, optimizer: Any, data: Data, views: Sequence[View]) -> None:
        self._recipe, self._model, self._optimizer, self._views = recipe, model, optimizer, views
        self._data = data
        self._sum = CausalLoss(model, packed=data.packed)
        self._device = device()
        self._mean = RankMean(optimizer, recipe.partition.timeout_s)
        self._scheduled: LayerSchedule | None = None
        if recipe.train.schedule == "layer":
            self._scheduled = infinity.layer_schedule(model, recipe.train.accumulate, self.loss)
            for view in views:
                if isinstance(view, ProgressDisplay):
                    view.say(f"all micro-batches through a block before the next: {self._scheduled.blocks}")
        self._scheduler = LambdaLR(
            optimizer, lambda step: lr_factor(step, recipe.optim, steps=recipe.train.steps)
        )

    def run(self) -> None:
        """Every step; held-out loss each ``eval_every`` steps, after the last and, if asked, before all."""
        train = self._recipe.train
        if train.eval_first:
            self._show_held_out(0)
        for step in range(1, train.steps + 1):
            batches = list(islice(self._data.train, train.accumulate))
            loss = self._mean(self._step(batches))
            tokens = sum(batch.token_count for batch in batches)
            report = replace(self._optimizer.report(loss=loss, tokens=tokens), step=step)
            for view in self._views:
                view.step(report)
            if train.eval_every and (step % train.eval_every == 0 or step == train.steps):
                self._show_held_out(step)
        self._optimizer.synchronize()  # the updates of the last step may fail, too,
        self._mean(0.0)  # on any rank, and then no rank ends as if all were well

    def _step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step; returns this rank's part of the loss, of which all ranks' mean is the loss.

        That is the mean over every target of the step that counts, in whichever micro-batch, on
        whichever rank: gradients are averaged over ranks, so each divides by a rank's share of them.
        """
        share = sum(batch.target_count for batch in batches) / world_size()
        backward = self._one_by_one if self._scheduled is None else self._layer_by_layer
        total = backward(batches, share)
        self._optimizer.step()
        self._scheduler.step()
        return float(total)

    def _one_by_one(self, batches: Sequence[Batch], share: float) -> torch.Tensor:
        """Forward and backward of each micro-batch; the sum of their losses."""
        total = torch.zeros((), device=self._device)
        for micro, batch in enumerate(batches, start=1):
            with infinity.no_sync(self._model) if micro < len(batches) else nullcontext():
                loss = self.loss(batch) / share
                self._optimizer.scale(loss).backward()
                total += loss.detach()
        return total

    def _layer_by_layer(self, batches: Sequence[Batch], share: float) -> torch.Tensor:
        """The same, every block on all micro-batches before the next."""
        assert self._scheduled is not None
        loss = self._scheduled(join(batches)).losses.sum() / share
        self._optimizer.scale(loss).backward()
        return loss.detach()

    def _show_held_out(self, step: int) -> None:
        """The held-out loss after ``step`` steps, to every view. Every rank must call."""
        if self._data.held_out is None:
            return
        loss = self._evaluate(self._data.held_out)
        self._optimizer.report()  # an evaluation's time and bytes are not the next step's
        for view in self._views:
            view.evaluated(step, loss)

    @torch.no_grad()
    def _evaluate(self, held_out: HeldOut) -> float:
        """The mean held-out loss over all targets of all ranks. Every rank must call."""
        total, count = 0.0, 0
        self._model.eval()
        try:
            for batch in held_out.batches(self._recipe.train.eval_batches):
                total += float(self.loss(batch))
                count += batch.target_count
        finally:
            self._model.train()
        return self._mean(total) * world_size() / count

    def loss(self, batch: Batch) -> torch.Tensor:
        """The sum over this rank's targets that count."""
        here = [None if each is None else each.to(self._device) for each in (batch.positions, batch.mask)]
        return self._sum(batch.tokens.to(self._device), batch.targets.to(self._device), *here)


class RankMean:
    """The mean of a number over all ranks; making one, and calling it, is collective.

    It has a process group of its own, because the model's may carry prefetched gathers that
    another thread ordered.

    Args:
        optimizer: Knows why a rank does not answer.
        timeout_s: How long a silent rank is waited for.
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
    """Learning rate of ``step`` (from 0) as a share of ``optim.lr``.

    It rises over ``warmup_steps``, whose last has the full rate, then falls to ``min_lr_ratio``,
    which the last of ``steps`` reaches.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step + 1 - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left


def rank() -> int:
    """This process's number among all, from torch.distributed or the launcher's environment."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """Where this rank computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def set_threads(config: TrainConfig) -> None:
    """Give each rank of this machine its share of the cores: more threads only wait for each other."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, usable_cores() // local))


def make_folder(recipe: Recipe) -> Path:
    """The run's new folder, ``run.dir/<run id>``, with its recipe in it.

    Raises:
        RecipeError: A run of that name exists, or the folder cannot be made.
    """
    folder = Path(recipe.run.dir).expanduser() / (recipe.run.name or _run_id())
    try:
        folder.mkdir(parents=True)
        keep_recipe(recipe, folder)
    except FileExistsError as error:
        raise RecipeError(f"run.name: {folder} exists; give the run another name, or none") from error
    except OSError as error:
        raise RecipeError(f"run.dir: {error.filename or folder}: {error.strerror}") from error
    return folder


def keep_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the recipe into the run's folder."""
    (folder / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")


def open_views(recipe: Recipe, folder: Path, stack: ExitStack) -> list[View]:
    """The views that the recipe asks for, closed with ``stack``."""
    observe, views = recipe.observe, list[View]()
    try:
        if observe.metrics:
            views.append(MetricsFile(folder / "metrics.jsonl"))
        if observe.tensorboard:
            views.append(TensorBoard(folder / "tensorboard"))
        if observe.progress:
            display = ProgressDisplay(recipe.train.steps, log_every=recipe.train.log_every)
            ranks = f"{world_size()} rank{'s' if world_size() > 1 else ''}"
            what = recipe.model.path or f"{recipe.model.numel:,} parameters"
            display.say(f"{what} on {ranks}; files in {folder}")
            views.append(display)
    except OSError as error:
        raise InfinityError(f"{error.filename or folder}: {error.strerror}") from error
    finally:
        for view in views:
            stack.callback(view.close)
    return views


@contextmanager
def built(recipe: Recipe, folder: Path | None, views: Sequence[View]) -> Iterator[tuple[Any, Any]]:
    """Model and optimizer; afterwards their files are released, and the process group if we made it.

    The run's directories on NVMe get the name of its ``folder``, which rank 0 knows.
    """
    ours = not dist.is_initialized()
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
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def _new_model(recipe: Recipe) -> Any:
    with infinity.Init(recipe):
        torch.manual_seed(recipe.run.seed)
        return GPT(recipe.model)


def _loaded_model(recipe: Recipe, views: Sequence[View]) -> Any:
    """The model in ``model.path``; ``run.seed`` draws what its checkpoint lacks."""
    display = next((view for view in views if isinstance(view, ProgressDisplay)), None)
    torch.manual_seed(recipe.run.seed)
    config, path = recipe.model, recipe.model.path
    assert path is not None
    model = infinity.from_pretrained(
        Path(path).expanduser(),
        recipe,
        new=config.new,
        ignore=config.ignore,
        frozen=recipe.lora.rank is not None,
        on_progress=None if display is None else display.loading,
    )
    return model.train()


def _saves(recipe: Recipe) -> bool:
    return recipe.model.path is not None if recipe.run.save is None else recipe.run.save


def _save(recipe: Recipe, model: Any, folder: Path | None, views: Sequence[View]) -> None:
    """Write the trained model into the run's folder, which rank 0 knows. Every rank must call."""
    out = (folder or Path(recipe.run.dir)) / (MODEL_FOLDER if recipe.lora.rank is None else ADAPTERS_FOLDER)
    source = Path(recipe.data.tokenizer or recipe.model.path or "bytes").expanduser()
    if recipe.lora.rank is None:
        infinity.export(model, out, tokenizer=source if tokenizer_files(source) else None)
    else:
        infinity.save_lora(model, out)
    for display in views:
        if isinstance(display, ProgressDisplay):
            display.say(f"what was trained is in {out}; publish it: infinity export {out.parent} DIR")


def _say_lines(recipe: Recipe) -> Callable[[str], object]:
    """Lines for people before there is a display; from any rank, as one of them does what all wait for."""
    if not recipe.observe.progress:
        return lambda line: None
    return lambda line: Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def _tell(views: Sequence[View], line: str) -> None:
    """A line for people, where the run is shown."""
    for display in views:
        if isinstance(display, ProgressDisplay):
            display.say(line)


@contextmanager
def _interruptible(recipe: Recipe) -> Iterator[None]:
    """Whoever interrupts a run that was to keep its model learns that it has not."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not _saves(recipe):
            raise
        raise KeyboardInterrupt("no model was kept, as the last step was not reached") from interrupt


def shape_of(recipe: Recipe) -> Shape:
    """What this rank takes of the data."""
    return Shape(
        seq_len=recipe.model.seq_len,
        batch_size=recipe.train.batch_size,
        rank=rank(),
        world_size=world_size(),
    )


def _run_id() -> str:
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
