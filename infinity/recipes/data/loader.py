"""Batches of a run: training data in a shuffled order that is shared by all ranks, and held-out data.

Each epoch has one global order of sequences, the same on every rank, which makes the ranks' shares
disjoint by construction: micro-batch ``n`` is the n-th run of ``global_batch_size`` sequences, and each
rank takes its slice of it. So a position is one number that is valid for any number of ranks, and every
rank knows the number of targets on all ranks without communication.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.recipes.data.documents import DataError, find_files
from infinity.recipes.data.sequences import Batch, DocumentRows, Ints, Sequences, TokenStream
from infinity.recipes.data.tokenizer import Tokenizer, open_tokenizer
from infinity.recipes.data.tokens import Tokens, open_tokens


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Files, tokenizer, and how documents are laid out as sequences."""

    files: tuple[str, ...] = option(
        ("stdlib",),
        "text and .jsonl files, globs or directories; stdlib: the sources of Python's standard library",
        path=True,
    )
    eval_files: tuple[str, ...] = option(
        (), "held-out files, excluded from training; empty: hold out eval_fraction of the data", path=True
    )
    eval_fraction: float = setting(
        0.01, "fraction at the end of the data that is held out", Valid(least=0, below=1)
    )
    tokenizer: str | None = option(
        None,
        "bytes, a tokenizer.json, or a Hugging Face directory; null: that of model.path, else bytes",
        path=True,
    )
    packing: bool | None = setting(
        None,
        "true: several whole documents per sequence, attending only to themselves; false: one per sequence; "
        "null: text as one stream, prompts and chats as true",
    )
    skip_malformed: bool = setting(False, "count and skip malformed lines of .jsonl")
    cache: str = option("runs/tokens", "directory in which tokens are cached between runs", path=True)
    shuffle: bool = setting(True, "shuffle sequences anew every epoch; false: keep their order")
    seed: int = setting(0, "seed of the shuffling", Valid(0, 2**63 - 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or not all(self.files):
            raise SettingError("files", self.files, "at least one path, glob or 'stdlib'")
        if self.tokenizer == "":
            raise SettingError("tokenizer", self.tokenizer, "bytes, a path, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sequence length, sequences per rank and micro-batch, and this rank's place among all ranks."""

    seq_len: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        """Sequences in one micro-batch of all ranks together."""
        return self.batch_size * self.world_size

    def share(self, together: Ints) -> Ints:
        """Return this rank's slice of a micro-batch of all ranks."""
        return together[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]


class TokenLoader:
    """Endless iterator over one rank's training batches.

    Args:
        sequences: The training data.
        identity: Identifies the tokens; a position saved with other tokens is rejected.

    Raises:
        DataError: There are fewer sequences than one micro-batch needs.
    """

    def __init__(
        self,
        sequences: Sequences,
        shape: BatchShape,
        *,
        seed: int = 0,
        shuffle: bool = True,
        identity: str = "",
    ) -> None:
        self._sequences, self._shape, self._shuffle = sequences, shape, shuffle
        self._identity: dict[str, Any] = {
            "tokens": identity,
            "seq_len": shape.seq_len,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._count = len(sequences)
        if self._count < shape.global_batch_size:
            raise DataError(
                f"the training data has {self._count} sequences of {shape.seq_len} tokens; a micro-batch "
                f"needs {shape.global_batch_size} ({shape.world_size} ranks with "
                f"train.batch_size={shape.batch_size}): give more data, or lower train.batch_size or "
                "model.seq_len"
            )
        self._seek(0, 0)

    @property
    def micro_batches_per_epoch(self) -> int:
        return self._count // self._shape.global_batch_size

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size = self._shape.global_batch_size
        if self._position + size > self._count:
            self._seek(self._epoch + 1, 0)
        together = self._order[self._position : self._position + size]
        self._position += size
        return self._sequences.batch(self._shape.share(together), together)

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the next batch; the same on every rank."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another number of ranks or batch size.

        Raises:
            DataError: The position was saved with other tokens, or another order of them.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"data: the saved position has {key}={state.get(key)!r}; this run has {value!r}"
                )
        self._seek(int(state["epoch"]), int(state["position"]))

    def _seek(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if self._shuffle:
            self._order = np.random.default_rng((self._identity["seed"], epoch)).permutation(self._count)
        else:
            self._order = np.arange(self._count)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Sequences that are excluded from training; the same ones in every evaluation."""

    sequences: Sequences
    shape: BatchShape

    def batches(self, limit: int) -> Iterator[Batch]:
        """Yield at most ``limit`` batches of this rank, spread over all held-out sequences.

        Every rank gets the same number. Sequences repeat if there are fewer than one micro-batch needs.
        """
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        order = np.arange(number * size) * count // (number * size)
        for together in order.reshape(number, size):
            yield self.sequences.batch(self.shape.share(together), together)


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a run.

    Attributes:
        held_out: None: the recipe holds nothing out.
        packed: Sequences hold several documents each, which must not attend to each other.
        notes: Lines for the user: how documents were laid out, and which were truncated or skipped.
    """

    train: TokenLoader
    held_out: HeldOut | None
    packed: bool = False
    notes: tuple[str, ...] = ()


def open_data(
    config: DataConfig,
    shape: BatchShape,
    *,
    vocab_size: int,
    model_path: str | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> Data:
    """Open the data of a run. All ranks may call at the same time.

    Args:
        vocab_size: The model's; the data may contain no token beyond it.
        model_path: The model's directory, whose tokenizer is used if the recipe names none.
        log: Called with a progress line now and then, while this process tokenizes.

    Raises:
        DataError: No file matches, a file is malformed, or there are too few tokens or too large ones.
    """
    tokenizer = open_tokenizer(config.tokenizer or model_path or "bytes")
    if model_path is None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    eval_files = find_files(config.eval_files, key="data.eval_files") if config.eval_files else ()
    files = tuple(path for path in find_files(config.files) if path not in eval_files)
    if not files:
        raise DataError(
            f"data.files ({', '.join(config.files)}): each of them is one of data.eval_files, too, so none "
            "is left to train on; name others, or hold a part of them out with data.eval_fraction"
        )
    tokens = _open(files, tokenizer, config, log)
    held_out = _open(eval_files, tokenizer, config, log) if eval_files else None
    largest = max(tokens.largest, -1 if held_out is None else held_out.largest)
    if largest >= vocab_size:
        raise DataError(
            f"the data contains the token {largest}; the model in {model_path} has {vocab_size} tokens; "
            "data.tokenizer=null selects the model's own tokenizer"
        )
    split = _Split(config, shape.seq_len, tokens, held_out)
    train, held_out_sequences = split.sequences()
    identity = f"{tokens.digest}:{train.identity}"
    loader = TokenLoader(train, shape, seed=config.seed, shuffle=config.shuffle, identity=identity)
    held = None if held_out_sequences is None else HeldOut(held_out_sequences, shape)
    notes = split.notes(train, held_out_sequences)
    return Data(loader, held, packed=split.packing is True, notes=notes)


def _open(
    files: tuple[Path, ...], tokenizer: Tokenizer, config: DataConfig, log: Callable[[str], object]
) -> Tokens:
    cache = Path(config.cache)
    return open_tokens(files, tokenizer, cache, skip_malformed=config.skip_malformed, log=log)


@dataclass(frozen=True, slots=True)
class _Split:
    """Divides tokens into training and held-out sequences."""

    config: DataConfig
    seq_len: int
    tokens: Tokens
    held_out: Tokens | None  # from data.eval_files

    @property
    def packing(self) -> bool | None:
        """True: documents share a sequence; False: one document each; None: one stream of tokens."""
        if self.config.packing is not None:
            return self.config.packing
        parts = (self.tokens, self.held_out)
        return True if any(part is not None and part.loss_mask is not None for part in parts) else None

    @property
    def _is_fraction(self) -> bool:
        """A fraction of the training files is held out."""
        return self.held_out is None and bool(self.config.eval_fraction)

    @property
    def _count(self) -> int:
        """Number of tokens (stream) or documents (rows)."""
        return len(self.tokens.values if self.packing is None else self.tokens.documents)

    @property
    def _held_out_count(self) -> int:
        least = self.seq_len + 1 if self.packing is None else 1
        return max(round(self._count * self.config.eval_fraction), least)

    def sequences(self) -> tuple[Sequences, Sequences | None]:
        """Return training and held-out sequences, which share no token."""
        tokens, held_out = self._divide()
        train = self._sequences("data.files", self.config.files, tokens)
        if held_out is None:
            return train, None
        evaluated = self._sequences("data.eval_files", self.config.eval_files, held_out)
        if not len(evaluated):
            raise DataError(
                "the held-out data has no target that counts in the loss, in sequences of "
                f"{self.seq_len} tokens; give more of it or raise model.seq_len"
            )
        return train, evaluated

    def notes(self, *all_sequences: Sequences | None) -> tuple[str, ...]:
        notes = []
        for key, tokens in (("data.files", self.tokens), ("data.eval_files", self.held_out)):
            if tokens is not None and tokens.malformed[0]:
                number, first = tokens.malformed
                notes.append(f"{key}: skipped {number} malformed lines; the first: {first}")
        if self._is_fraction:
            kind = "tokens" if self.packing is None else "documents"
            notes.append(
                f"held out: the last {self._held_out_count:,} of {self._count:,} {kind} "
                f"(data.eval_fraction={self.config.eval_fraction:g})"
            )
        for name, sequences in zip(("training", "held-out"), all_sequences):
            if isinstance(sequences, DocumentRows):
                notes.append(f"{name} data: {sequences.describe()}")
        return tuple(notes)

    def _divide(self) -> tuple[Tokens, Tokens | None]:
        """Return the tokens to train on and those that are held out."""
        tokens = self.tokens
        if not self._is_fraction:
            return tokens, self.held_out
        total, count = self._count, self._held_out_count
        if self.packing is not None and total > count:
            return tokens.part(0, total - count), tokens.part(total - count, total)
        if self.packing is None and total - count > self.seq_len:
            values = tokens.values
            return replace(tokens, values=values[:-count]), replace(tokens, values=values[-count:])
        kind = "documents" if self.packing is not None else "tokens"
        raise DataError(
            f"data.files ({', '.join(self.config.files)}): {total} {kind} are too few to hold {count} out "
            f"and train on a sequence of {self.seq_len}; give more data, lower data.eval_fraction (0: hold "
            "nothing out), or lower model.seq_len"
        )

    def _sequences(self, key: str, names: tuple[str, ...], tokens: Tokens) -> Sequences:
        if self.packing is not None:
            return DocumentRows(tokens, self.seq_len, packing=self.packing)
        if len(tokens.values) <= self.seq_len:
            raise DataError(
                f"{key} ({', '.join(names)}): {len(tokens.values)} tokens, fewer than one sequence of "
                f"{self.seq_len} and its target; give more data or lower model.seq_len"
            )
        return TokenStream(tokens.values, self.seq_len)
