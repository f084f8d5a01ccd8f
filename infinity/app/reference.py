"""Log-probabilities of a run's reference: computed before the first step, and kept in its folder."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.comm.ranks import rank
from infinity.core.errors import RecipeError
from infinity.core.files import create_file, open_regular, sync
from infinity.data.opening import Data
from infinity.data.sequences import Batch, BatchShape, Examples, Ints, Sequences
from infinity.recipes.recipe import Recipe

#: The file in a run's folder: by part of the data, a number for each document, NaN where it was not needed.
REFERENCE = "reference.npz"
#: Seconds between lines about the progress.
_LINES_EVERY_S = 10.0


class Part(NamedTuple):
    """A part of a run's data: its name, its sequences, and those of them whose reference is needed."""

    name: str
    sequences: Sequences
    needed: Ints
    shape: BatchShape

    @property
    def examples(self) -> Examples:
        assert self.sequences.examples is not None
        return self.sequences.examples


def parts_of(name: str, data: Data, micro_batches: int, evaluated: int) -> Iterator[Part]:
    """Yield the parts of the data of task ``name``: what will be trained and evaluated on."""
    train = data.train  # a recipe refuses data.streaming with it
    for number, (stream, needed) in enumerate(train.upcoming(micro_batches)):
        yield Part(f"{name}:train{number or ''}", stream.sequences, needed, train.shape)
    for each, held_out in data.evaluated.items():
        used = np.unique(held_out.order(evaluated))
        yield Part(f"{name}:{each}:held_out", held_out.sequences, used, held_out.shape)


@dataclass(frozen=True, slots=True)
class Reference:
    """Fills in what the reference says of documents; every rank calls, before the first step."""

    recipe: Recipe
    model: Any
    log_probs: Callable[[Batch], torch.Tensor]  # of each document of a batch's rows, (rows, documents)
    total: Callable[[torch.Tensor], torch.Tensor]  # the sum of each value over ranks
    say: Callable[[str], object]

    def fill(self, parts: Sequence[Part], folder: Path | None, *, step: int) -> None:
        """Take from the run's folder what it has, and compute what is missing.

        Raises:
            RecipeError: Something is missing after ``step``, when the model is the reference no more.
        """
        kept = _read(folder / REFERENCE) if step and folder is not None and rank() == 0 else {}
        missing = [part._replace(needed=self._take(part, kept)) for part in parts]
        count = sum(len(part.needed) for part in missing)
        if not count:
            return
        if step and not self.recipe.trains_adapters:
            raise RecipeError(
                f"train.task={self.recipe.train.task}: for {count} sequences it is not known what the model "
                f"said before its first step, and step {step} was made since: train.steps, train.batch_size, "
                "train.eval_batches and the ranks must be those that the run began with"
            )
        began_s, done = time.monotonic(), 0
        self.model.eval()
        adapters = self.recipe.trains_adapters and not self.recipe.adapters  # of several none is used then
        with torch.no_grad(), self.model.disable_adapter() if adapters else nullcontext():
            for part in missing:
                done = self._compute(part, done, count)
        self.model.train()
        if folder is not None and rank() == 0:
            _write(folder / REFERENCE, {part.name: part.examples.reference for part in parts})
        took_s = time.monotonic() - began_s
        self.say(f"the reference: {count:,} sequences in {took_s:.1f} s; later steps need no second model")

    def _take(self, part: Part, kept: dict[str, NDArray[Any]]) -> Ints:
        """Take from ``kept``, which rank 0 has, and return the sequences that it lacks."""
        examples = part.examples
        found = kept.get(part.name, np.zeros(0))
        if found.shape != examples.reference.shape:
            found = np.full(examples.reference.shape, np.nan)
        known = ~np.isnan(found) & (rank() == 0)
        values = np.stack([np.where(known, found, 0), known]).astype(np.float64)
        values, known = self.total(torch.from_numpy(values)).numpy()
        examples.reference[:] = np.where(known > 0, values, np.nan)
        pieces = np.add.reduceat(np.isnan(examples.reference), part.sequences.first_pieces)
        return part.needed[pieces[part.needed] > 0]

    def _compute(self, part: Part, done: int, count: int) -> int:
        """Compute the values of a part's needed sequences; return how many of ``count`` are done then."""
        examples, size = part.examples, part.shape.global_batch_size
        found, logged_s = np.zeros((2, len(examples.reference))), time.monotonic()
        for begin in range(0, len(part.needed), size):
            together = np.resize(part.needed[begin : begin + size], size)  # as many on each rank
            own = part.shape.share(together)
            values = self.log_probs(part.sequences.batch(own, together)).double().numpy()
            pieces = part.sequences.pieces(own)
            found[:, pieces[pieces >= 0]] = np.stack([values, np.ones_like(values)])[:, pieces >= 0]
            done += min(size, len(part.needed) - begin)
            if time.monotonic() - logged_s >= _LINES_EVERY_S:
                logged_s = time.monotonic()
                self.say(f"the reference: {done:,} of {count:,} sequences")
        sums, times = self.total(torch.from_numpy(found)).numpy()
        new = times > 0
        examples.reference[new] = (sums[new] / times[new]).astype(np.float32)
        return done


def _read(path: Path) -> dict[str, NDArray[Any]]:
    if not path.exists():
        return {}
    with open(open_regular(path), "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a file that replaces what had its name; it survives a power cut."""
    draft = path.with_name(f"{path.name}.new")
    with open(create_file(draft), "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    sync(draft)
    draft.replace(path)
