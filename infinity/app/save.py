"""``infinity export`` and ``infinity save``: write a run's trained model, or all of its states."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import infinity
from infinity.api.export import export_run
from infinity.app.process_group import on_rank_0, process_group, rank, set_threads
from infinity.app.runs import find_run, interrupted_run, is_interrupted, locked, recipe_of
from infinity.app.train import built, write_model
from infinity.core.errors import CheckpointError
from infinity.core.files import user_path
from infinity.observe.metrics import View
from infinity.recipes.recipe import Recipe


def publish_run(path: str | Path, out: str | Path, *, stored: bool = False) -> str:
    """Publish the trained model, or the adapters, of a run as ``out``; return a description of it.

    An interrupted run gives the model after its last committed step, and can still continue; every rank must
    call. If ``stored``, the model is quantized again, as the checkpoint of ``model.path`` is.
    """
    folder, result, stored_as = user_path(path, "RUN"), None, None
    if stored:
        recipe = recipe_of(folder)
        stored_as, what = recipe.model.path, f"{folder} trained adapters, which are not quantized"
        if stored_as is None:
            what = (
                f"{folder} trained a new model (model.path is null), so there is no checkpoint whose stored "
            )
            what += "form it could take"
        if stored_as is None or recipe.lora.rank is not None:
            raise CheckpointError(f"{what}: export without --stored")
    what = f"the model of {path}"
    if is_interrupted(folder):
        with _last_commit(folder) as (recipe, model, _, step):
            result = write_model(recipe, model, user_path(out, "OUT"), stored_as)
        what += f" after step {step}"
    elif rank() == 0:
        result = export_run(path, out, stored_as)
    return what if result is None else f"{what} ({result})"


def save_run(path: str | Path, out: str | Path) -> str:
    """Save an interrupted run's last commit as a portable checkpoint, and describe it; all must call."""
    folder = user_path(path, "RUN")
    if not is_interrupted(folder):
        what = "not the folder of an interrupted run" if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{path}: {what}. Only an interrupted run keeps all of its states; for checkpoints of a run "
            "while it trains set checkpoint.every"
        )
    with _last_commit(folder) as (_, model, optimizer, step):
        infinity.save_checkpoint(model, optimizer, user_path(out, "DIR"))
    return f"step {step} of {path}"


@contextmanager
def _last_commit(folder: Path) -> Iterator[tuple[Recipe, Any, Any, int]]:
    """Yield recipe, model, optimizer and last committed step of an interrupted run, which stays whole."""
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
        model, optimizer = stack.enter_context(built(recipe, folder.name, View(), keep=True))
        unused = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # there is no loop
        optimizer.follow(loop=unused, scheduler=unused)
        yield recipe, model, optimizer, infinity.resume(model, optimizer)
