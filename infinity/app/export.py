"""``infinity export``, ``save`` and ``chat``: what runs have trained, finished or interrupted ones."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import infinity
from infinity.api.adapters import CONFIG, VALUES
from infinity.api.saved import MergedModel, split_experts
from infinity.api.saved import merge as merge_adapters
from infinity.app import runs
from infinity.app.loop import best_of
from infinity.app.samples import Writer, Writing, end_answers, tokenizer_of
from infinity.app.train import Wanted, built, process_group, set_threads, write_model
from infinity.checkpoint.directory import Checkpoint, read_json_object, tokenizer_files
from infinity.checkpoint.load import OnProgress
from infinity.checkpoint.model import read_config
from infinity.checkpoint.quantize import Requantized, quantize_checkpoint
from infinity.checkpoint.writer import Publication, copy_files
from infinity.comm.ranks import ALONE, rank, world_size
from infinity.core.errors import CheckpointError, RecipeError
from infinity.core.files import user_path
from infinity.data.tokenizer import ASSISTANT, Chat, Message
from infinity.device.machine import DTYPES
from infinity.observe.metrics import View
from infinity.recipes.recipe import Recipe, with_values


def publish_run(
    path: str | Path, out: str | Path, *, on_progress: OnProgress | None = None, **options: Any
) -> str:
    """Publish the trained model, or the adapters, of a run as ``out``; return a description of it.

    An interrupted run gives the model after its last committed step, and can still continue; every rank must
    call. ``options`` are those of :class:`infinity.app.train.Wanted`. With ``merge`` and ``per_expert``
    ``path`` may be a directory of adapters.
    """
    wanted, target = Wanted(**options), user_path(out, "OUT")
    folder, adapter = folder_of(path, wanted.adapter)
    is_run, flag = adapter is not None or not (folder / CONFIG).is_file(), wanted.merge or wanted.per_expert
    if is_run and wanted.base is not None and not wanted.per_expert:
        raise CheckpointError(
            f"--base {wanted.base}: that is for a directory of adapters; the base of a run is its model.path"
        )
    recipe, result, after = None, None, ""
    if is_run and (wanted.stored or flag or adapter is not None):
        named = "--merge" if wanted.merge else "--per-expert" if wanted.per_expert else ""
        recipe = of_adapter(runs.recipe_of(folder), adapter, named)
        if why := _why_plain(recipe, wanted):
            raise CheckpointError(f"{folder} trained {why}")
    if is_run and not wanted.best and runs.is_interrupted(folder):
        with last_commit(folder) as (now, model, _, step):
            now = of_adapter(now, adapter)
            result = write_model(now, model, target, wanted, on_progress)
        alone, after = not wanted.merge and now.trains_adapters, f" after step {step}"
    else:
        source = _source(folder, wanted)
        saved = runs.saved_folder(source) if is_run or not flag else folder
        alone = not wanted.merge and (not is_run or saved.name == runs.ADAPTERS_FOLDER)
        after = f" after step {source.name.removeprefix('step-')}, the best" if wanted.best else ""
        if rank() == 0:
            result = _publish(saved / (adapter or ""), target, wanted, recipe, on_progress)
    kind = "model" if not alone else "adapters" if adapter is None else f"adapter {adapter}"
    what = f"the {'average of the ' if wanted.ema else ''}{kind} of {path}{after}"
    if wanted.merge and not is_run:
        what = f"{path} merged into {base_of(folder, wanted.base)}"
    return what if result is None else f"{what} ({result})"


def _publish(
    saved: Path, out: Path, wanted: Wanted, recipe: Recipe | None, on_progress: OnProgress | None
) -> Requantized | None:
    """Publish a directory with a model or adapters, which a run with ``recipe`` has saved, if any has."""
    if wanted.merge:
        base = base_of(saved, wanted.base if recipe is None else recipe.model.path)
        dtype, tokenizer = None, base if tokenizer_files(base) else None
        if recipe is not None:
            dtype = None if recipe.train.dtype == "auto" else DTYPES[recipe.train.dtype]
            tokenizer = tokenizer_of(recipe)
        with MergedModel(base, saved, dtype) as merged:
            end_answers(merged.model, tokenizer)
            how: dict[str, Any] = {"stored_as": base if wanted.stored else None, "on_progress": on_progress}
            return merge_adapters(merged, out, tokenizer=tokenizer, **how)
    if wanted.per_expert:
        config = read_config(base_of(saved, wanted.base))
        _copy(saved, out, lambda copied: split_experts(saved, copied, config))
        return None
    values = [path.with_name(VALUES) for path in saved.rglob(CONFIG)]
    for needed in values or [saved / "config.json"]:
        if not needed.is_file():
            raise CheckpointError(f"{needed.parent} holds no {needed.name}, so it is no saved model")
    if not values:
        Checkpoint(saved).close()  # every file is there, and as long as it says
    if values or recipe is None or not wanted.stored:
        _copy(saved, out)
        return None
    others = [p for p in saved.rglob("*") if p.is_file() and ".safetensors" not in p.suffixes]
    return quantize_checkpoint(saved, Path(str(recipe.model.path)), out, ALONE, on_progress, others)


def _copy(source: Path, out: Path, change: Callable[[Path], None] = lambda copied: None) -> None:
    """Publish the files of ``source`` as the directory ``out``, by links if the drive has them.

    ``change`` is given the copy before it is published; it may replace files, but not write to them.
    """
    with Publication(out) as publication:
        copy_files(source, (path for path in source.rglob("*") if path.is_file()), publication.path)
        change(publication.path)
        publication.publish()


def _source(folder: Path, wanted: Wanted) -> Path:
    """Return the folder of a finished run that has the values to publish: its own, or one inside."""
    if wanted.best:
        return best_of(folder)
    kept = folder / runs.EMA_FOLDER
    if wanted.ema and not kept.is_dir():
        raise CheckpointError(
            f"{folder} keeps no average of the weights: wanted a run with optim.ema, such as 0.999"
        )
    return kept if wanted.ema else folder


def of_adapter(recipe: Recipe, adapter: str | None, needed_for: str = "") -> Recipe:
    """Return the recipe of one of several adapters alone; RecipeError: it is not named, or there is none."""
    if adapter is not None:
        return recipe.alone(adapter)
    if needed_for and recipe.adapters:
        names = ", ".join(recipe.adapters)
        raise RecipeError(f"{needed_for} takes one of the adapters {names}: add --adapter NAME")
    return recipe


def folder_of(path: str | Path, adapter: str | None) -> tuple[Path, str | None]:
    """Return the folder of a run, and ``adapter``; or that of one of several which were exported together."""
    folder = user_path(path, "RUN")
    inside = folder / (adapter or "")
    return (inside, None) if (inside / CONFIG).is_file() else (folder, adapter)


def base_of(adapters: Path, given: str | Path | None) -> Path:
    """Return the directory of the base of ``adapters``, which is ``given`` or the one that they name."""
    named = given or read_json_object(adapters / CONFIG).get("base_model_name_or_path")
    if not named:
        raise CheckpointError(f"{adapters}: the adapters name no base: give --base DIR")
    base = user_path(str(named), "--base")
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"{adapters}: their base is {str(base)!r}, which is no directory with config.json; name it with "
            "--base DIR"
        )
    return base


def _why_plain(recipe: Recipe, wanted: Wanted) -> str:
    """Return why a run's model cannot be exported with these options; empty: it can."""
    if wanted.merge and not recipe.lora.active:
        return "all weights, which have no adapters to merge: export without --merge"
    if wanted.per_expert and not recipe.lora.active:
        return "all weights: export without --per-expert"
    if wanted.stored and recipe.model.path is None:
        return (
            "a new model (model.path is null), so no checkpoint has a stored form for it: export without "
            "--stored"
        )
    if wanted.stored and recipe.lora.active and not wanted.merge:
        return "adapters, which are not quantized: export without --stored, or the merged model with --merge"
    return ""


def save_run(path: str | Path, out: str | Path) -> str:
    """Save an interrupted run's last commit as a portable checkpoint, and describe it; all must call."""
    folder = user_path(path, "RUN")
    if not runs.is_interrupted(folder):
        what = "not the folder of an interrupted run" if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{path}: {what}. Only an interrupted run keeps all of its states; for checkpoints of a run "
            "while it trains set checkpoint.every"
        )
    with last_commit(folder) as (_, model, optimizer, step):
        infinity.save_checkpoint(model, optimizer, user_path(out, "DIR"))
    return f"step {step} of {path}"


@contextlib.contextmanager
def last_commit(folder: Path) -> Iterator[tuple[Recipe, Any, Any, int]]:
    """Yield recipe, model, optimizer and last committed step of an interrupted run, which stays whole."""
    recipe = runs.interrupted_run(folder)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(process_group(recipe))
        found = ranks.decide(lambda: runs.find_run(recipe), "finding the run")
        if found.before is None:
            raise CheckpointError(f"{folder}: the run was interrupted before its first step was committed")
        recipe = found.recipe
        if ranks.rank == 0:
            stack.enter_context(runs.locked(folder))
        set_threads(recipe.train)
        model, optimizer = stack.enter_context(built(recipe, folder.name, View(), before=folder, keep=True))
        unused = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # there is no loop
        follows = recipe.train.keep_best is not None or recipe.train.patience is not None
        optimizer.follow(loop=unused, scheduler=unused, **({"best": unused} if follows else {}))
        yield recipe, model, optimizer, infinity.resume(model, optimizer)


def chat(
    path: str | Path, prompts: Iterable[str], how: Writing, *, plain: bool = False,
    adapter: str | None = None, out: TextIO | None = None,
) -> None:  # fmt: skip
    """Answer ``prompts`` with the model of the run in ``path``, or of an exported directory.

    Prompts are turns of one conversation, written with the tokenizer's chat template; ``plain``: each is a
    text that the model continues. Of several adapters ``adapter`` answers. Answers are written to ``out``, or
    standard output, as they come.
    """
    if world_size() > 1:
        raise RecipeError("infinity chat: wanted one process; it runs a model of any number of ranks")
    out = out or sys.stdout
    with _newest(*folder_of(path, adapter)) as (recipe, model, name):
        writer, messages = Writer(model, recipe), list[Message]()
        for text in prompts:
            messages.append({"role": "user", "content": text})
            answer, prompt = "", text if plain else Chat([*messages], None)
            with infinity.adapter(model, name) if name is not None else contextlib.nullcontext():
                for piece in writer.write(prompt, how):
                    out.write(piece)
                    out.flush()
                    answer += piece
            out.write("\n")
            out.flush()
            messages.append({"role": ASSISTANT, "content": answer})


@contextlib.contextmanager
def _newest(folder: Path, adapter: str | None) -> Iterator[tuple[Recipe, Any, str | None]]:
    """Yield recipe and model of a run or a directory, and the name of its adapter if it has several."""
    is_adapter, is_model = ((folder / name).is_file() for name in (CONFIG, "config.json"))
    if is_adapter or is_model:
        path = base_of(folder, None) if is_adapter else folder
        recipe, saved = with_values(Recipe(), {"model.path": str(path)}), folder
    else:
        recipe = of_adapter(runs.recipe_of(folder), adapter, "infinity chat")
        if runs.is_interrupted(folder):
            with last_commit(folder) as (recipe, model, _, _):
                yield of_adapter(recipe, adapter), model, adapter
            return
        saved = runs.saved_folder(folder) / (adapter or "")
        is_adapter = (saved / CONFIG).is_file()
    source = str(saved) if not is_adapter else recipe.model.path
    assert source is not None
    set_threads(recipe.train)
    engine = replace(recipe.engine, run_name=None, resume="auto")
    stored_as = recipe.model.stored_as if is_adapter else None
    model = infinity.from_pretrained(source, engine, frozen=True, stored_as=stored_as)
    try:
        if is_adapter:
            model = infinity.add_lora(model, adapter=str(saved))
        if recipe.model.path is not None:
            recipe = with_values(recipe, {"model.path": source})
        yield recipe, model, None
    finally:
        infinity.close(model)
