"""Batches of sequences, and the position in them.

One global order of sequences per epoch, the same on every rank, makes shards disjoint by
construction: micro-batch ``n`` is the n-th run of ``world_size * batch_size`` sequences, and rank
r takes the r-th slice of it. A position is therefore one number for all ranks, and means the same
to any number of them; and every rank knows, without asking, how many targets all ranks have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from infinity.app.data.files import DataError
from infinity.app.data.packing import Ints
from infinity.app.data.sequences import Batch, Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a rank takes sequences: ``batch_size`` at a time, its slice of ``world_size``."""

    seq_len: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def taken(self) -> int:
        """Sequences that one micro-batch takes, on all ranks together."""
        return self.batch_size * self.world_size

    def share(self, together: Ints) -> Ints:
        """This rank's part of what all ranks take."""
        return together[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


class TokenLoader:
    """An endless iterator over one rank's training batches.

    Args:
        sequences: What is trained on.
        identity: Names the tokens; a saved position is refused by other tokens.

    Raises:
        DataError: Fewer sequences than one micro-batch takes.
    """

    def __init__(
        self, sequences: Sequences, shape: Shape, *, seed: int = 0, shuffle: bool = True, identity: str = ""
    ) -> None:
        self._sequences, self._shape, self._shuffle = sequences, shape, shuffle
        self._identity: dict[str, Any] = {
            "tokens": identity,
            "seq_len": shape.seq_len,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._count = len(sequences)
        if self._count < shape.taken:
            ranks = f"{shape.world_size} ranks of train.batch_size={shape.batch_size}"
            raise DataError(
                f"the training data is {self._count} sequences of {shape.seq_len}; a "
                f"micro-batch takes {shape.taken} ({ranks}): "
                "give more data, or lower train.batch_size or model.seq_len"
            )
        self._seek(0, 0)

    @property
    def micro_batches_per_epoch(self) -> int:
        return self._count // self._shape.taken

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._taken + self._shape.taken > self._count:
            self._seek(self._epoch + 1, 0)
        together = self._order[self._taken : self._taken + self._shape.taken]
        self._taken += self._shape.taken
        return self._sequences.batch(self._shape.share(together), together)

    def state_dict(self) -> dict[str, Any]:
        """The position before the next batch; the same on every rank."""
        return {**self._identity, "epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, also with another number of ranks or batch size.

        Raises:
            DataError: The position is one in other tokens, or in another order of them.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(f"data: the saved position has {key}={state.get(key)!r}; this run {value!r}")
        self._seek(int(state["epoch"]), int(state["taken"]))

    def _seek(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken
        if self._shuffle:
            self._order = np.random.default_rng((self._identity["seed"], epoch)).permutation(self._count)
        else:
            self._order = np.arange(self._count)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Sequences that training never sees; the same ones at every evaluation."""

    sequences: Sequences
    shape: Shape

    def batches(self, limit: int) -> Iterator[Batch]:
        """This rank's batches, at most ``limit``, spread over all held-out sequences.

        Every rank gets the same number. Where there are fewer sequences than one batch on every
        rank takes, some repeat.
        """
        count, taken = len(self.sequences), self.shape.taken
        number = max(1, min(limit, count // taken))
        order = np.arange(number * taken) * count // (number * taken)
        for together in order.reshape(number, taken):
            yield self.sequences.batch(self.shape.share(together), together)
