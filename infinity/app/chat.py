"""``infinity chat``: what a run's model answers, from its newest weights, or a model that was exported."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import infinity
from infinity.api.adapters import CONFIG
from infinity.api.export import saved_folder
from infinity.app import runs
from infinity.app.export import base_of, folder_of, last_commit, of_adapter
from infinity.app.samples import Writer, Writing
from infinity.app.train import set_threads
from infinity.comm.ranks import world_size
from infinity.core.errors import RecipeError
from infinity.data.tokenizer import ASSISTANT, Chat, Message
from infinity.recipes.recipe import Recipe, with_values


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
            with infinity.adapter(model, name) if name is not None else ExitStack():
                for piece in writer.write(prompt, how):
                    out.write(piece)
                    out.flush()
                    answer += piece
            out.write("\n")
            out.flush()
            messages.append({"role": ASSISTANT, "content": answer})


@contextmanager
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
        saved = saved_folder(folder) / (adapter or "")
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
