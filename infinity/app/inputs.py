"""What a run of ``infinity train`` starts from: checkpoint and data, checked before any weight is read."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from infinity.app.data import Data, open_data
from infinity.app.data.config import DataConfig
from infinity.app.data.loader import Shape
from infinity.app.data.tokens import Say
from infinity.app.models.causal import require_causal
from infinity.app.recipe import Recipe
from infinity.checkpoint.model import is_ours, longest_sequence, model_class, read_config, vocabulary_size
from infinity.checkpoint.publish import tokenizer_files
from infinity.core.errors import RecipeError


def open_inputs(recipe: Recipe, shape: Shape, say: Say) -> Data:
    """The data of a run, for a model that it can train. Every rank calls.

    Args:
        say: Gets a line for people now and then, while tokens are written.

    Raises:
        CheckpointError: ``model.path`` is no directory of a model.
        RecipeError: Its model does not predict next tokens, or not of such long sequences.
        DataError: The data is missing, malformed or too short.
    """
    _check_checkpoint(recipe)
    return open_data(
        _data_config(recipe), shape, vocab_size=_vocabulary(recipe), model_path=recipe.model.path, say=say
    )


def notes_on(recipe: Recipe, data: Data) -> Iterator[str]:
    """What a person should know before the first step, a line each."""
    yield from data.notes
    yield _epoch_note(recipe, data)
    yield from _length_notes(recipe)


def _check_checkpoint(recipe: Recipe) -> None:
    """The model in ``model.path`` is one that this loop can train: known before any weight is read.

    Raises:
        CheckpointError: The directory is none of a model.
        RecipeError: It does not predict next tokens, or not of such long sequences.
    """
    if recipe.model.path is None:
        return
    path = Path(recipe.model.path).expanduser()
    config, longest = read_config(path), longest_sequence(path)
    if not is_ours(path):
        require_causal(model_class(config), config)
    elif longest is not None and recipe.model.seq_len > longest:
        raise RecipeError(
            f"model.seq_len={recipe.model.seq_len}: the model in {path} was built for {longest} tokens in a "
            f"sequence; set model.seq_len={longest}"
        )


def _data_config(recipe: Recipe) -> DataConfig:
    """Bytes are the tokens of a model of ours that was exported without a tokenizer."""
    if recipe.data.tokenizer is None and recipe.model.path is not None:
        path = Path(recipe.model.path).expanduser()
        if is_ours(path) and not tokenizer_files(path):
            return replace(recipe.data, tokenizer="bytes")
    return recipe.data


def _epoch_note(recipe: Recipe, data: Data) -> str:
    """How often this run sees its data."""
    steps, epoch_steps = recipe.train.steps, data.train.micro_batches_per_epoch / recipe.train.accumulate
    epochs = _short(steps / epoch_steps)
    return f"one epoch is {_short(epoch_steps)} steps; train.steps={steps} are {epochs} epochs"


def _short(value: float) -> str:
    if value < 0.01:
        return "less than 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _vocabulary(recipe: Recipe) -> int:
    """Tokens that the model knows."""
    path = recipe.model.path
    return recipe.model.vocab_size if path is None else vocabulary_size(Path(path).expanduser())


def _length_notes(recipe: Recipe) -> Iterator[str]:
    """What a person should know who trains on longer sequences than the checkpoint was made for."""
    if recipe.model.path is not None:
        longest = longest_sequence(Path(recipe.model.path).expanduser())
        if longest is not None and recipe.model.seq_len > longest:
            yield f"model.seq_len={recipe.model.seq_len} is beyond the checkpoint's {longest} positions"
