"""``infinity export`` and ``save``: what runs have trained, finished or interrupted ones."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import infinity
from infinity.api.adapters import CONFIG
from infinity.api.export import ADAPTERS_FOLDER, EMA_FOLDER, copy_saved, export_run, saved_folder
from infinity.api.merge import MergedModel
from infinity.api.merge import merge as merge_adapters
from infinity.api.save_lora import split_experts
from infinity.app import runs
from infinity.app.best import best_of
from infinity.app.samples import end_answers
from infinity.app.train import built, process_group, set_threads, tokenizer_of, write_model
from infinity.checkpoint.directory import read_json_object, tokenizer_files
from infinity.checkpoint.load import OnProgress
from infinity.checkpoint.model import read_config
from infinity.checkpoint.quantize import Requantized
from infinity.comm.ranks import rank
from infinity.core.errors import CheckpointError, RecipeError
from infinity.core.files import user_path
from infinity.device.machine import DTYPES
from infinity.observe.metrics import View
from infinity.recipes.recipe import Recipe


def publish_run(
    path: str | Path, out: str | Path, *, stored: bool = False, merge: bool = False, per_expert: bool = False,
    base: str | Path | None = None, adapter: str | None = None, best: bool = False, ema: bool = False,
    on_progress: OnProgress | None = None,
) -> str:  # fmt: skip
    """Publish the trained model, or the adapters, of a run as ``out``; return a description of it.

    ``best``: those of the best evaluation (``train.keep_best``), in place of the last ones. ``ema``: the
    average that the run keeps (``optim.ema``).

    An interrupted run gives the model after its last committed step, and can still continue; every rank must
    call. If ``stored``, the model is quantized again, as the checkpoint of ``model.path`` is. With ``merge``
    adapters are merged into the weights of their base, and with ``per_expert`` they have a layer for each
    expert (:mod:`infinity.api.save_lora`); then ``path`` may be a directory of adapters, and ``base`` that of
    their base, if it is not where they say. Of several adapters, which have a folder each, ``adapter`` is
    published alone.
    """
    (folder, adapter), target = folder_of(path, adapter), user_path(out, "OUT")
    is_run = adapter is not None or not (folder / CONFIG).is_file()
    flag = "--merge" if merge else "--per-expert" if per_expert else ""
    if merge and not is_run:
        found, result = base_of(folder, base), None
        if rank() == 0:
            result = _merge(folder, found, target, stored, on_progress)
        return f"{path} merged into {found}" + ("" if result is None else f" ({result})")
    if base is not None and not per_expert:
        raise CheckpointError(
            f"--base {base}: that is for a directory of adapters; the base of a run is its model.path"
        )
    recipe = runs.recipe_of(folder) if is_run and (stored or flag or adapter is not None) else None
    if recipe is not None:
        recipe = of_adapter(recipe, adapter, flag)
        if why := _why_plain(recipe, stored, merge, per_expert):
            raise CheckpointError(f"{folder} trained {why}")
    stored_as = recipe.model.path if recipe is not None and stored else None
    source, result, after = _source(folder, best, ema), None, ""
    alone = per_expert or (not merge and (source / ADAPTERS_FOLDER).is_dir())
    if best:
        after = f" after step {source.name.removeprefix('step-')}, the best"
    if is_run and not best and runs.is_interrupted(folder):
        with last_commit(folder) as (now, model, _, step):
            now = of_adapter(now, adapter)
            how: dict[str, Any] = {"merge": merge, "per_expert": per_expert, "adapter": adapter, "ema": ema}
            result = write_model(now, model, target, stored_as, on_progress=on_progress, **how)
        alone, after = not merge and now.trains_adapters, f" after step {step}"
    elif rank() == 0 and recipe is not None and merge:
        adapters = saved_folder(source) / (adapter or "")
        found = base_of(adapters, recipe.model.path)
        result = _merge(adapters, found, target, stored, on_progress, recipe)
    elif rank() == 0 and per_expert:
        adapters = saved_folder(source) / (adapter or "") if is_run else source
        config = read_config(base_of(adapters, base))
        copy_saved(adapters, target, lambda copied: split_experts(adapters, copied, config))
    elif rank() == 0:
        result = export_run(source, out, stored_as, adapter, on_progress)
    kind = "model" if not alone else "adapters" if adapter is None else f"adapter {adapter}"
    what = f"the {'average of the ' if ema else ''}{kind} of {path}{after}"
    return what if result is None else f"{what} ({result})"


def _source(folder: Path, best: bool, ema: bool) -> Path:
    """Return the folder of a run that has the values to publish: its own, or one inside."""
    if best:
        return best_of(folder)
    kept = folder / EMA_FOLDER
    if not ema or runs.is_interrupted(folder):
        return folder
    if not kept.is_dir():
        raise CheckpointError(
            f"{folder} keeps no average of the weights: wanted a run with optim.ema, such as 0.999"
        )
    return kept


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


def _merge(
    adapters: Path, base: Path, out: Path, stored: bool, on_progress: OnProgress | None,
    recipe: Recipe | None = None,
) -> Requantized | None:  # fmt: skip
    """Write the model of ``base`` with adapters merged to ``out``, in the dtype of a run's ``recipe``."""
    dtype = None if recipe is None or recipe.train.dtype == "auto" else DTYPES[recipe.train.dtype]
    tokenizer = base if tokenizer_files(base) else None
    if recipe is not None:
        tokenizer = tokenizer_of(recipe)
    with MergedModel(base, adapters, dtype) as merged:
        end_answers(merged.model, tokenizer)
        stored_as = base if stored else None
        return merge_adapters(merged, out, tokenizer=tokenizer, stored_as=stored_as, on_progress=on_progress)


def _why_plain(recipe: Recipe, stored: bool, merge: bool, per_expert: bool) -> str:
    """Return why a run's model cannot be exported with these options; empty: it can."""
    if merge and not recipe.lora.active:
        return "all weights, which have no adapters to merge: export without --merge"
    if per_expert and not recipe.lora.active:
        return "all weights: export without --per-expert"
    if stored and recipe.model.path is None:
        return (
            "a new model (model.path is null), so no checkpoint has a stored form for it: export without "
            "--stored"
        )
    if stored and recipe.lora.active and not merge:
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


@contextmanager
def last_commit(folder: Path) -> Iterator[tuple[Recipe, Any, Any, int]]:
    """Yield recipe, model, optimizer and last committed step of an interrupted run, which stays whole."""
    recipe = runs.interrupted_run(folder)
    with ExitStack() as stack:
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
