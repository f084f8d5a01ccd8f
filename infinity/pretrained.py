"""``from_pretrained``: a Hugging Face checkpoint directory as a model under ``Init``, streamed."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.api import Init
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.load import Loading, OnProgress
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.plan import Choice
from infinity.recipe import Recipe


def from_pretrained(
    path: str | Path,
    recipe: Recipe | None = None,
    *,
    auto_class: Any = None,
    new: Sequence[str] = (),
    ignore: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    **config_overrides: Any,
) -> Any:
    """The model in a directory, its weights streamed from the files into this rank's tiers.

    Every rank must call. Each reads its own slices of each weight, so a file's bytes are read once per
    machine, and needs host memory for a chunk beside its budgets, however large the model. The weights
    become exact fp32 masters of the recipe's compute dtype, whatever the dtype of the files. Parameters that
    the model freezes when it is built stay frozen. No code of the directory's runs.

    Args:
        path: A directory with ``config.json`` and safetensors files (or, slower, pickled weights).
        recipe: Budgets, dtype and directories, as for :class:`infinity.Init`.
        auto_class: Builds the model: a class such as ``AutoModelForSequenceClassification`` or
            ``BertForMaskedLM``; None: the one that ``config.json`` names, else ``AutoModelForCausalLM``.
        new: Patterns (``classifier.*``) of parameters that the model initialises itself where the
            checkpoint lacks them or has them in another shape.
        ignore: Patterns of keys of the checkpoint that the model does not have.
        on_progress: Called with the bytes that this rank has read, and all that it will.
        config_overrides: Replace values of ``config.json``: ``attn_implementation="eager"``.

    Returns:
        The model in evaluation mode, as transformers gives it: call ``train()`` before training.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model; lists every missing,
            unknown and wrongly shaped key.
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
    """
    with contextlib.ExitStack() as files:
        with Init(recipe) as init:
            runtime = init.runtime
            config = read_config(Path(path), config_overrides)
            checkpoint = files.enter_context(Checkpoint(Path(path)))
            loading = Loading(checkpoint, Choice(new, ignore), on_progress)
            runtime.construction.late = loading
            model = build_model(config, auto_class, runtime.dtype)
            loading.prepare(model)
        runtime.construction.late = None  # the plan and its files are not needed any more
        if runtime.rank == 0:
            for line in loading.notes():
                runtime._say(line)
    return model.eval()
