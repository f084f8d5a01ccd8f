"""``infinity train``: from a recipe to a trained model, by the public API."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import infinity
from infinity.activations.controller import Activations
from infinity.api.adapters import CONFIG, VALUES
from infinity.api.export import check_room_for
from infinity.api.optimizer import Optimizer
from infinity.app import runs
from infinity.app.loop import Best, Loop
from infinity.app.samples import SAMPLES, SamplesFile, end_answers, read_prompts, tokenizer_of
from infinity.checkpoint.directory import tokenizer_files
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.load import OnProgress
from infinity.checkpoint.model import is_ours, longest_sequence, model_class, read_config, vocabulary_size
from infinity.checkpoint.quantize import Requantized
from infinity.comm.ranks import Ranks, join_ranks, peer_errors, rank, world_size
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, InfinityError, PeerError, RecipeError
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import FOLDER, Choice
from infinity.data.opening import Data, open_data
from infinity.data.sequences import BatchShape
from infinity.data.tokens import Log
from infinity.device.accelerator import memory_nbytes
from infinity.device.machine import default_threads, local_ranks, set_rank_threads, total_host_nbytes
from infinity.observe import metrics
from infinity.observe.metrics import View
from infinity.observe.sinks import SINKS, Sink
from infinity.observe.timeline import write_trace
from infinity.recipes.models import GPT, require_causal
from infinity.recipes.objectives import OBJECTIVES, loaded_as
from infinity.recipes.recipe import Recipe, TrainConfig, keys_of, with_values

#: Runs whose steps take less in all are not predicted, since that takes some seconds (s).
_PREDICTED_S = 60.0
#: The folder in which a run keeps the adapters of lora.adapter.
_GIVEN = "given-adapters"
#: Threads that wait for each other cost time; many more than that, and the system refuses to start them.
_MOST_THREADS_PER_CORE = 8


def train(recipe: Recipe) -> metrics.Summary | None:
    """Train the recipe's model on its data; every rank must call, and rank 0 returns the summary.

    An interrupted run of its name continues; of one that is finished None is returned. An exception has a
    note that says how the run can continue.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group(recipe))
        recipe = _with_steps(recipe)
        run = ranks.decide(partial(runs.find_run, recipe, runs.kept_by_any(recipe, ranks)), "finding the run")
        if run.ended:
            _say_nothing_is_left(run)
            return None
        run, recipe, data = _prepared(run, recipe, ranks)
        folder = run.folder
        views, totals, activations = View(), metrics.SummaryBuilder(), None
        if rank() == 0:
            stack.enter_context(runs.opened(run))
            _open_display(run, recipe, views, ranks.world_size)
        stack.enter_context(_explained(run))
        stack.callback(views.close)
        before = None if run.before is None else folder
        model, optimizer = stack.enter_context(built(recipe, folder.name, views, before=before))
        runtime = optimizer.runtime
        if rank() == 0:
            runtime.say.attach(views.log)
        best = _best(recipe, model, folder, views)
        loop = Loop(recipe, model, optimizer, data, views, folder, best)
        if rank() == 0:
            runs.write_recipe(with_values(recipe, {"train.dtype": runtime.config.dtype}), folder)
            for note in _notes_on(run, loop):
                views.log(note)
            after = loop.step or -1  # perhaps only some ranks had recorded the first step
            _open_files(recipe, model, folder, views, after)
            for line in metrics.read_metrics(folder / runs.METRICS, after):
                totals.take(line)
            activations = ActivationView(runtime.activations, folder, recipe.micro_batches, views.log)
            views.add(totals, activations)
        loop.run()
        if _saves(recipe):
            out = folder / _folder_of(recipe)
            write_model(recipe, model, out, on_progress=views.progress)
            if recipe.optim.rule.averages:
                write_model(recipe, model, folder / runs.EMA_FOLDER / out.name, Wanted(ema=True))
            views.log(f"saved {out}; publish it with: infinity export {folder} DIR")
        summary = None
        if activations is not None:
            summary = totals.result(
                folder=folder, world_size=ranks.world_size, budgets=optimizer.budgets,
                activations=activations.result(), predicted=_predicted(recipe, totals.total_s, optimizer),
                dtype=runtime.config.dtype,
                notes=[*runtime.notes, *notes_on_commits(runtime.records.interval.every)],
            )  # fmt: skip
            if recipe.observe.timeline:
                write_trace(optimizer.timeline.spans(), folder / "timeline.json")
            summary.write(folder / runs.SUMMARY)
        loop.meet()  # the run is finished: now each rank removes what it could have gone on from
    if summary is not None and recipe.observe.progress:
        metrics.show_summary(summary, Console())
    return summary


def _with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with the steps that epochs of its data are; all ranks call."""
    train = recipe.train
    if train.epochs is None and train.evals_per_epoch is None:
        return recipe
    data = open_inputs(recipe, _sayer(recipe)).values()  # of several adapters, that of most counts
    epoch = max(each.train.micro_batches_per_epoch for each in data) / train.accumulate
    values: dict[str, Any] = {"train.epochs": None, "train.evals_per_epoch": None}
    if train.epochs is not None:
        values["train.steps"] = ceil(train.epochs * epoch)
    if train.evals_per_epoch is not None:
        values["train.eval_every"] = max(1, round(epoch / train.evals_per_epoch))
    return with_values(recipe, values)


def _open_display(run: runs.Run, recipe: Recipe, views: View, ranks: int) -> None:
    """Add the display that the recipe asks for to ``views``, and say what runs."""
    if recipe.observe.progress:
        views.add(metrics.ProgressDisplay(recipe.steps, log_every=recipe.train.log_every))
    on = f"{ranks} rank{'s' if ranks > 1 else ''}; files in {run.folder}"
    views.log(f"{recipe.model.path or f'{recipe.model.numel:,} parameters'} on {on}")
    if run.choice is not None:
        views.log(run.choice.line)


def _say_nothing_is_left(run: runs.Run) -> None:
    if rank() == 0:
        _sayer(run.recipe)(
            f"{run.folder} is finished after {run.recipe.steps} steps: nothing is left to do. To train "
            "again give the run another name (run.name)"
        )


def _sayer(recipe: Recipe) -> Log:
    """Return what takes lines for people before there are views."""
    console = Console(stderr=True, quiet=not recipe.observe.progress)
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def _prepared(run: runs.Run, recipe: Recipe, ranks: Ranks) -> tuple[runs.Run, Recipe, dict[str, Data]]:
    """Return the run with what is chosen, its recipe on this node, whose own is ``recipe``, and its data."""
    drives = recipe.memory.nvme  # of this node; all else is rank 0's
    recipe = with_values(run.recipe, {"memory.nvme": drives})
    set_threads(recipe.train)
    _check_sizes(recipe, ranks.device)
    if run.before is None and recipe.checkpoint.load is not None:
        DistributedCheckpoint(Path(recipe.checkpoint.load)).close()  # it is one, before all the work
    # Such lines come from any rank: one tokenizes while others wait.
    say = _sayer(recipe)
    data = open_inputs(recipe, say)
    _check_best(recipe, data)  # before weights are read
    if recipe.train.sample_prompts is not None:
        read_prompts(recipe.train.sample_prompts)
    if run.before is None:
        run = run.choosing(ranks.decide(lambda: _choose(run.recipe, data, ranks, say), "the plan"))
    return run, with_values(run.recipe, {"memory.nvme": drives}), data


def _choose(recipe: Recipe, data: Mapping[str, Data], ranks: Ranks, say: Log) -> Choice | None:
    """Return what a plan chooses of what ``recipe`` leaves to ``auto``; rank 0 calls."""
    if not recipe.left_open:
        return None
    from infinity.predict.auto import choose  # it loads what most runs do without

    packing = recipe.packing or any(each.packed for each in data.values()) or None  # now it is known
    return choose(with_values(recipe, {"data.packing": packing}), ranks.world_size, ranks.device, say)


def _open_files(recipe: Recipe, model: Any, folder: Path, views: View, after: int) -> None:
    """Open the files of figures that the recipe asks for, cut after step ``after`` (-1: empty), as views.

    What an earlier process of the run has saved is removed; raises now if there is no room to save.
    """
    for saved in (runs.MODEL_FOLDER, runs.ADAPTERS_FOLDER, runs.EMA_FOLDER):
        shutil.rmtree(folder / saved, ignore_errors=True)
    if _saves(recipe) and not recipe.trains_adapters:
        check_room_for(model, folder, 2 if recipe.optim.rule.averages else 1)
    if after < 0:
        _keep_adapters(recipe, folder / _GIVEN)
    if recipe.observe.metrics:
        synced = recipe.durability.survives == "power"
        views.add(metrics.MetricsFile(folder / runs.METRICS, after=after, synced=synced))
    if recipe.train.sample_every is not None:
        views.add(SamplesFile(folder / SAMPLES, after=after))
    settings = {key: recipe.value(key) for key in keys_of(Recipe)}
    for key in SINKS:
        if getattr(recipe.observe, key):
            views.add(Sink(key, folder, after=after, settings=settings, say=views.log))


def _predicted(recipe: Recipe, total_s: float, optimizer: Any) -> metrics.PredictedStep | None:
    """Return the plan's prediction for the run's steps; None: the run was short, or cannot be planned."""
    if total_s < _PREDICTED_S or local_ranks() < world_size():
        return None
    from infinity.predict.plan_recipe import predict

    try:
        return predict(recipe, world_size(), optimizer.budgets, optimizer.runtime.config.dtype)
    except InfinityError:
        return None


def _check_sizes(recipe: Recipe, device: torch.device) -> None:
    """Refuse tensors that exceed this machine's memory: allocating them might end the process."""
    model, train, host = recipe.model, recipe.train, total_host_nbytes()
    if model.path is not None:
        return
    numel, weights = max(
        (model.vocab_size * model.d_model, "the embedding"),
        (model.ff_width * model.d_model, "the feed-forward weights"),
        (3 * model.d_model**2, "the attention's weights"),
    )
    # Logits that do not fit are computed in slices, but for a tied head.
    whole = recipe.memory.logits == "whole" or model.tied
    width, outputs = (model.vocab_size, "the logits") if whole else (model.d_model, "a layer's outputs")
    batch = f"train.batch_size={train.batch_size} x model.seq_len={model.seq_len} tokens"
    for count, most, what, advice in (
        (numel, host, f"{weights} of model.d_model={model.d_model}", "model.d_model, vocab_size or d_ff"),
        (
            recipe.tokens * width,
            host if device.type == "cpu" else memory_nbytes(device)[1],
            f"{outputs} of {batch}",
            "train.batch_size or model.seq_len",
        ),
    ):
        if 4 * count > most:
            raise BudgetError(
                f"{what} take {format_nbytes(4 * count)} in fp32; this machine has {format_nbytes(most)}: "
                f"lower {advice}"
            )


@contextmanager
def process_group(recipe: Recipe) -> Iterator[Ranks]:
    """Join the launched ranks, unless they are joined; yields them."""
    owns_group = not dist.is_initialized()
    device = join_ranks(recipe.partition.timeout_s, recipe.train.device)
    try:
        yield Ranks(rank(), world_size(), device)
        if owns_group and dist.is_initialized():
            # Rank 0 may keep the store, so it waits for the others: on those that still use it when it goes,
            # torch would print its C++ stack. A rank that failed says so itself.
            with suppress(PeerError), peer_errors("leaving"):
                dist.gather_object(None, [None] * world_size() if rank() == 0 else None)
    finally:
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()


def set_threads(config: TrainConfig) -> None:
    """Give each rank ``train.threads``, or what is usual; RecipeError: those are too many."""
    most = _MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.threads is not None and config.threads > most:
        raise RecipeError(
            f"train.threads: got {config.threads}; wanted at most {most} ({_MOST_THREADS_PER_CORE} for each "
            "core of this machine), or null for one per core"
        )
    set_rank_threads(config.threads or default_threads())


def open_inputs(recipe: Recipe, log: Log) -> dict[str, Data]:
    """Check the checkpoint's config and open the data of each task, before weights are read; all call."""
    found = {}
    for name, task in recipe.tasks.items():
        try:
            found[name] = _open_inputs(task, log)
        except InfinityError as error:
            if name:
                error.add_note(f"it is about the data of adapter {name} (adapters.{name}.data)")
            raise
    return found


def _open_inputs(recipe: Recipe, log: Log) -> Data:
    objective, padding = OBJECTIVES[recipe.train.task], 0
    if objective.head and (recipe.model.path is None or is_ours(Path(recipe.model.path))):
        raise RecipeError(
            f"train.task={recipe.train.task} scores whole documents, with a model of transformers: give its "
            "directory as model.path"
        )
    seq_len, config, vocab_size = recipe.model.seq_len, recipe.data, recipe.model.vocab_size
    if recipe.model.path is not None:
        path = Path(recipe.model.path)
        model_config, longest = read_config(path), longest_sequence(path)
        if not is_ours(path) and not objective.head:
            require_causal(model_class(model_config), model_config)
        elif objective.head:
            padding = loaded_as(recipe.train.task, recipe.model)["pad_token_id"]
        elif longest is not None and seq_len > longest:
            raise RecipeError(
                f"model.seq_len={seq_len}: the model in {path} was built for at most {longest} tokens per "
                f"sequence; set model.seq_len={longest}"
            )
        vocab_size = vocabulary_size(path)
        if config.tokenizer is None and is_ours(path) and not tokenizer_files(path):
            config = replace(config, tokenizer="bytes")  # a GPT that was exported without a tokenizer
    shape = BatchShape(
        seq_len=seq_len, batch_size=recipe.train.batch_size, rank=rank(), world_size=world_size(),
        padding=padding, parts=recipe.train.sequence_ranks,
    )  # fmt: skip
    how = loaded_as(recipe.train.task, recipe.model) if recipe.train.task == "classify" else {}
    return open_data(
        config, shape, vocab_size=vocab_size, model_path=recipe.model.path, log=log, kind=objective.data,
        labels=how.get("num_labels"),
    )  # fmt: skip


def notes_on_commits(every: int) -> Iterator[str]:
    """Yield a line if an interruption can cost more than the step in flight."""
    if every > 1:
        yield (
            f"one step in {every} was recorded, since the states in host memory must be written for that: "
            f"an interruption would have cost up to {every} steps (durability.every)"
        )


def _notes_on(run: runs.Run, loop: "Loop") -> Iterator[str]:
    recipe, before = run.recipe, run.before
    if run.lost:
        yield f"the run was interrupted in step {run.lost + 1}, before one was recorded: it begins anew"
    if before is not None:
        yield (
            f"goes on after step {loop.step}, where the run was interrupted" if loop.step
            else "the run was interrupted before all ranks had recorded a step: it begins anew"
        )  # fmt: skip
        if before.steps != recipe.steps and recipe.optim.schedule != "constant":
            yield (
                f"train.steps was {before.steps}, is {recipe.steps}: from here on the learning "
                f"rate follows optim.schedule={recipe.optim.schedule} over the new number of steps"
            )
        if loop.before.sequences != loop.division.sequences:
            ranks = f"{loop.division.ranks} rank{'s' if loop.division.ranks > 1 else ''}"
            yield (
                f"a step takes {loop.division.sequences} sequences on {ranks}; it took "
                f"{loop.before.sequences} on {loop.before.ranks} (train.batch_size is per rank)"
            )
    steps = recipe.steps
    for task in loop.tasks:
        whose, data = f"{task.name}: " if task.name else "", task.data
        yield from (f"{whose}{note}" for note in data.notes)
        epoch_steps = data.train.micro_batches_per_epoch / recipe.train.accumulate
        epochs = _short(steps / epoch_steps)
        epoch = "about " * data.train.estimated + _short(epoch_steps)
        yield f"{whose}one epoch is {epoch} steps; train.steps={steps} are {epochs} epochs"
    longest = None if recipe.model.path is None else longest_sequence(Path(recipe.model.path))
    if longest is not None and recipe.model.seq_len > longest:
        yield f"model.seq_len={recipe.model.seq_len} exceeds the checkpoint's {longest} positions"


def _short(value: float) -> str:
    if value < 0.01:
        return "less than 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _keep_adapters(recipe: Recipe, folder: Path) -> None:
    """Copy the adapters of lora.adapter, from which the run begins and whose config a resumed run reads."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that begins anew
    for name, task in recipe.tasks.items():
        if (source := task.lora.adapter) is not None:
            (folder / name).mkdir(parents=True)
            for file in (VALUES, CONFIG):
                shutil.copyfile(Path(source).expanduser() / file, folder / name / file)


@contextmanager
def built(
    recipe: Recipe, name: str | None, views: View, *, before: Path | None = None, keep: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Build model and optimizer; on exit close them.

    ``name`` is that of the run's directories on NVMe; None: a new one, and an interruption keeps nothing. A
    run that goes on was in the folder ``before``. With ``keep`` it can continue even after a normal exit.
    """
    recipe = replace(recipe, run=replace(recipe.run, name=name))
    if recipe.model.path is None:
        with infinity.Init(recipe):
            torch.manual_seed(recipe.run.seed)
            model: Any = GPT(recipe.model)
    else:
        torch.manual_seed(recipe.run.seed)  # for parameters that the checkpoint lacks
        model = infinity.from_pretrained(
            recipe.model.path, recipe, **loaded_as(recipe.train.task, recipe.model),
            frozen=recipe.trains_adapters, stored_as=recipe.model.stored_as, on_progress=views.progress,
        ).train()  # fmt: skip
    try:
        for adapter, task in recipe.tasks.items() if recipe.trains_adapters else ():
            torch.manual_seed(recipe.run.seed)  # as if it were alone
            lora, kept = asdict(task.lora), None if before is None else before / _GIVEN / adapter
            if task.lora.adapter is not None and kept is not None and (kept / CONFIG).is_file():
                lora["adapter"] = str(kept)  # a run that goes on reads those that it kept
            model = infinity.add_lora(model, **lora, **({"name": adapter} if adapter else {}))
        yield model, _optimizer(recipe, model)
    finally:
        infinity.close(model, keep=keep)


def _optimizer(recipe: Recipe, model: Any) -> Optimizer:
    """Return the optimizer of all tasks, with parameter groups for each."""
    groups: list[dict[str, Any]] = []
    for name, task in recipe.tasks.items() if recipe.trains_adapters else ():
        optim = task.optim
        own = infinity.lora_groups(
            model, lr=optim.lr, lr_ratio=task.lora.lr_ratio or 1.0, name=name or None,
            weight_decay=optim.numbers.get("weight_decay", 0.0),
        )  # fmt: skip
        groups += [{**optim.numbers, **group} for group in own]
    optim, limits = recipe.optim, {name: task.optim.max_grad_norm for name, task in recipe.tasks.items()}
    return Optimizer(
        model, optim.rule, max_grad_norm=limits if recipe.adapters else optim.max_grad_norm,
        params=groups or None, groups=optim.groups, **optim.numbers,
    )  # fmt: skip


def _saves(recipe: Recipe) -> bool:
    return recipe.model.path is not None if recipe.run.save is None else recipe.run.save


def _check_best(recipe: Recipe, data: Mapping[str, Data]) -> None:
    """Raise if ``train.keep_best`` or ``train.patience`` asks for what no evaluation says."""
    train = recipe.train
    if train.keep_best is None and train.patience is None:
        return
    key = "train.patience" if train.keep_best is None else "train.keep_best"
    of_each = dict.fromkeys(OBJECTIVES[train.task].metric_names(train), 0.0)
    sets = [(name, each) for name, own in data.items() for each in own.evaluated]
    if train.eval_every is None or not sets:
        wanted = "null without evaluations: set train.eval_every, and data.eval_files or data.eval_fraction"
        raise SettingError(key, recipe.value(key), wanted)
    known = metrics.Evaluation.of(
        0, [metrics.HeldOutFigures(*each, 0.0, 1, of_each) for each in sets]
    ).figures
    if train.keep_best not in (None, *known):
        raise SettingError(key, train.keep_best, f"null, or a metric of evaluations: {', '.join(known)}")


def _best(recipe: Recipe, model: Any, folder: Path, views: View) -> Best | None:
    """Return what follows the metric of ``train.keep_best``; None: nothing asks for it."""

    def write(out: Path) -> None:
        write_model(recipe, model, out / _folder_of(recipe))

    if recipe.train.keep_best is None and recipe.train.patience is None:
        return None
    return Best(recipe, folder, write, leads=rank() == 0, say=views.log)


def _folder_of(recipe: Recipe) -> str:
    return runs.ADAPTERS_FOLDER if recipe.trains_adapters else runs.MODEL_FOLDER


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Says what is written of a trained model, by the options of ``infinity export``."""

    stored: bool = False  # quantized again, in the form of the checkpoint in model.path
    merge: bool = False  # adapters merged into the weights of their base
    per_expert: bool = False  # adapters with a layer for each expert: see infinity.api.saved
    base: str | Path | None = None  # that of a directory of adapters, if it is not where they say
    adapter: str | None = None  # this one of several
    best: bool = False  # those of the best evaluation (train.keep_best), in place of the last ones
    ema: bool = False  # the average that the run keeps (optim.ema), in place of the last ones

    def __post_init__(self) -> None:
        if self.base is not None and not (self.merge or self.per_expert):
            raise RecipeError("--base is for --merge and --per-expert")
        if self.ema and (self.best or self.per_expert):
            raise RecipeError("--ema is without --best and --per-expert")
        if self.per_expert and (self.merge or self.stored):
            raise RecipeError("--per-expert is for adapters: leave out --merge and --stored")


def write_model(
    recipe: Recipe, model: Any, out: Path, wanted: Wanted | None = None, on_progress: OnProgress | None = None
) -> Requantized | None:
    """Write the trained model (by :func:`infinity.export`) or adapters as ``out``; all must call."""
    wanted = wanted or Wanted()
    if not recipe.trains_adapters or wanted.merge:
        tokenizer = tokenizer_of(recipe)
        end_answers(model, tokenizer)
        return infinity.export(
            model, out, stored_as=recipe.model.path if wanted.stored else None, tokenizer=tokenizer,
            merge=wanted.merge, adapter=wanted.adapter, ema=wanted.ema, on_progress=on_progress,
        )  # fmt: skip
    infinity.save_lora(model, out, per_expert=wanted.per_expert, name=wanted.adapter, ema=wanted.ema)
    return None


@contextmanager
def _explained(run: runs.Run) -> Iterator[None]:
    """Add to errors of files what to do, and on rank 0 to any interruption how to continue."""
    try:
        yield
    except BaseException as error:
        if rank() == 0 and (line := runs.how_to_go_on(run, error)):
            error.add_note(line)
        if run.choice is not None and (advice := run.choice.how_to_do_without(error)):
            error.add_note(advice)
        if isinstance(error, OSError) and not isinstance(error, InfinityError):
            raise InfinityError(
                f"{error.filename or run.recipe.run.dir}: {error.strerror}; the run's folder must stay where "
                "it is, with room to write, until the run has ended"
            ) from error
        raise


class ActivationView(View):
    """View that saves the plan for activations, logs it, and collects figures for the summary."""

    def __init__(self, activations: Activations, folder: Path, accumulate: int, log: Log) -> None:
        self._activations, self._folder = activations, folder / FOLDER
        self._accumulate, self._log = accumulate, log
        self._planned = False
        self._moved = 0, 0
        self._steps: list[tuple[int, int, float]] = []  # stored, loaded, stall

    def step(self, report: metrics.StepReport) -> None:
        stats = self._activations.cache.stats
        moved = stats.nbytes_stored, stats.nbytes_loaded
        if self._planned or self._activations.policy != "plan":
            stored, loaded = (now - before for now, before in zip(moved, self._moved))
            self._steps.append((stored, loaded, report.stall_s.get("activation", 0.0)))
        self._moved = moved
        planning = self._activations.planning
        if planning is not None and not self._planned:
            self._planned = True
            planning.save(self._folder)
            self._log(planning.describe())

    def result(self) -> metrics.ActivationSummary | None:
        """Return the figures so far and write the measured ones; None: all activations were kept."""
        activations, planning = self._activations, self._activations.planning
        if activations.policy == "keep":
            return None
        stored, loaded, stall_s = (median(figures) for figures in zip(*self._steps or [(0, 0, 0.0)]))
        summary = metrics.ActivationSummary(
            policy=activations.policy, nbytes_stored=round(stored), nbytes_loaded=round(loaded),
            stall_s=stall_s, saved_peak_nbytes=activations.cache.stats.peak_nbytes,
        )  # fmt: skip
        if planning is None:
            return summary
        measured = activations.measured()
        if measured is not None:
            measured = replace(measured, stall_s=stall_s / self._accumulate)
            replace(planning, measured=measured).save(self._folder)
        return replace(
            summary, plan=planning.describe().removeprefix("activations: "), planning_s=planning.planning_s,
            predicted=planning.predicted, measured=measured,
        )  # fmt: skip
