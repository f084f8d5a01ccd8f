"""Batches of fixed-length sequences, and the position in them.

Tokens are cut into sequences of ``seq_len`` that follow each other; a sequence's targets are its
tokens moved by one, so the next sequence's first token is a target too. One global order of
sequences per epoch, the same on every rank, makes shards disjoint by construction: micro-batch
``n`` is the n-th run of ``world_size * batch_size`` sequences, and rank r takes the r-th slice
of it. A position is therefore one number for all ranks, and means the same to any number of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.data.config import DataConfig
from infinity.data.files import DataError, find_files
from infinity.data.tokenizer import open_tokenizer
from infinity.data.tokens import open_tokens


class Batch(NamedTuple):
    """Both ``(batch_size, seq_len)``, int64, on the CPU."""

    tokens: Tensor
    targets: Tensor


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


class TokenLoader:
    """An endless iterator over one rank's training batches.

    Args:
        tokens: ``(tokens,)`` of any unsigned integer dtype.
        identity: Names the tokens; a saved position is refused by other tokens.

    Raises:
        DataError: Fewer sequences than one micro-batch takes.
    """

    def __init__(
        self, tokens: NDArray[Any], shape: Shape, *, seed: int = 0, shuffle: bool = True, identity: str = ""
    ) -> None:
        self._tokens, self._shape, self._shuffle = tokens, shape, shuffle
        self._identity: dict[str, Any] = {
            "tokens": identity,
            "seq_len": shape.seq_len,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._count = count_sequences(tokens, shape.seq_len)
        if self._count < shape.taken:
            ranks = f"{shape.world_size} ranks of train.batch_size={shape.batch_size}"
            raise DataError(
                f"{len(tokens)} training tokens are {self._count} sequences of {shape.seq_len}; a "
                f"micro-batch takes {shape.taken} ({ranks}): "
                "give more data, or lower train.batch_size or model.seq_len"
            )
        self._seek(0, 0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._taken + self._shape.taken > self._count:
            self._seek(self._epoch + 1, 0)
        first = self._taken + self._shape.rank * self._shape.batch_size
        self._taken += self._shape.taken
        return cut(self._tokens, self._order[first : first + self._shape.batch_size], self._shape.seq_len)

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

    tokens: NDArray[Any]
    shape: Shape

    def batches(self, limit: int) -> Iterator[Batch]:
        """This rank's batches, at most ``limit``, spread over all held-out sequences.

        Every rank gets the same number. Where there are fewer sequences than one batch on every
        rank takes, some repeat.
        """
        count = count_sequences(self.tokens, self.shape.seq_len)
        number = max(1, min(limit, count // self.shape.taken))
        order = np.arange(number * self.shape.taken) * count // (number * self.shape.taken)
        slices = order.reshape(number, self.shape.world_size, self.shape.batch_size)
        for index in range(number):
            yield cut(self.tokens, slices[index, self.shape.rank], self.shape.seq_len)


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads; ``held_out`` is None where the recipe holds nothing out."""

    train: TokenLoader
    held_out: HeldOut | None


def open_data(config: DataConfig, shape: Shape, *, vocab_size: int) -> Data:
    """The batches of a run, from its files. Every rank may call at the same time.

    Args:
        vocab_size: The model's; the tokenizer may not have more tokens.

    Raises:
        DataError: No files, malformed files, too few tokens, or too many kinds of them.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    cache = Path(config.cache).expanduser()
    apart = find_files(config.eval_files, key="data.eval_files") if config.eval_files else ()
    files = tuple(path for path in find_files(config.files) if path not in apart)
    tokens, digest = open_tokens(files, tokenizer, cache)
    _require_sequence(tokens, shape.seq_len, f"{len(files)} training files ({', '.join(config.files)})")
    held_out: NDArray[Any] | None = None
    if apart:
        held_out = open_tokens(apart, tokenizer, cache).values
        _require_sequence(held_out, shape.seq_len, f"data.eval_files ({', '.join(config.eval_files)})")
    elif config.eval_fraction:
        tokens, held_out = _split(tokens, shape.seq_len, config.eval_fraction)
    identity = f"{digest}:{len(tokens)}"
    train = TokenLoader(tokens, shape, seed=config.seed, shuffle=config.shuffle, identity=identity)
    return Data(train, None if held_out is None else HeldOut(held_out, shape))


def count_sequences(tokens: NDArray[Any], seq_len: int) -> int:
    """Sequences that ``tokens`` make; the last one needs a token after it, as its last target."""
    return max(0, (len(tokens) - 1) // seq_len)


def cut(tokens: NDArray[Any], which: NDArray[Any], seq_len: int) -> Batch:
    """The sequences ``which``, ``(n,)``, as tokens and targets, each ``(n, seq_len)``."""
    rows = np.stack([tokens[i * seq_len : (i + 1) * seq_len + 1] for i in which]).astype(np.int64)
    both = torch.from_numpy(rows)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def _split(tokens: NDArray[Any], seq_len: int, fraction: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training and held-out tokens, without a common one; each at least one sequence."""
    apart = max(round(len(tokens) * fraction), seq_len + 1)
    if len(tokens) - apart < seq_len + 1:
        raise DataError(
            f"{len(tokens)} tokens are too few to hold {apart} out and train on a sequence of {seq_len}; "
            "give more data, lower data.eval_fraction (0: hold nothing out), or lower model.seq_len"
        )
    return tokens[:-apart], tokens[-apart:]


def _require_sequence(tokens: NDArray[Any], seq_len: int, what: str) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"{what}: {len(tokens)} tokens, fewer than one sequence of {seq_len} and its target; "
            "give more data or lower model.seq_len"
        )
