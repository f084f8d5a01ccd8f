"""Batches of a run: training data in a shuffled order that all ranks share, and held-out data.

Each epoch has one global order of sequences, the same on every rank. Micro-batch ``n`` is the n-th run of
``global_batch_size`` sequences, of which each rank takes its slice. So shares are disjoint, a position is one
number that is valid for any number of ranks, and every rank knows the number of targets on all ranks without
communication.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.recipes.data.documents import DataError, find_files
from infinity.recipes.data.sequences import Batch, Ints, Sequences, document_rows, token_stream
from infinity.recipes.data.tokenizer import open_tokenizer
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
    """Endless iterator over one rank's training batches; positions of another ``identity`` are refused."""

    def __init__(
        self,
        sequences: Sequences,
        shape: BatchShape,
        *,
        seed: int = 0,
        shuffle: bool = True,
        identity: str = "",
    ) -> None:
        self._sequences, self._shape = sequences, shape
        seq_len, count, size = shape.seq_len, len(sequences), shape.global_batch_size
        self._identity: dict[str, Any] = {"tokens": identity, "seq_len": seq_len}
        self._identity |= {"seed": seed, "shuffle": shuffle}
        self.micro_batches_per_epoch = count // size
        if count < size:
            raise DataError(
                f"the training data has {count} sequences of {seq_len} tokens; a micro-batch needs {size} "
                f"({shape.world_size} ranks with train.batch_size={shape.batch_size}): give more data, or "
                "lower train.batch_size or model.seq_len"
            )
        self._seek(0, 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size = self._shape.global_batch_size
        if self._position + size > len(self._order):
            self._seek(self.epoch + 1, 0)
        together = self._order[self._position : self._position + size]
        self._position += size
        return self._sequences.batch(self._shape.share(together), together)

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the next batch; the same on every rank."""
        return {**self._identity, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another number of ranks or batch size."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"data: the saved position has {key}={state.get(key)!r}; this run has {value!r}"
                )
        self._seek(int(state["epoch"]), int(state["position"]))

    def _seek(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        self._order = np.arange(len(self._sequences))
        if self._identity["shuffle"]:
            self._order = np.random.default_rng((self._identity["seed"], epoch)).permutation(
                len(self._sequences)
            )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Sequences excluded from training; the same in every evaluation."""

    sequences: Sequences
    shape: BatchShape

    def batches(self, limit: int) -> Iterator[Batch]:
        """Yield at most ``limit`` batches of this rank, spread over all held-out sequences.

        Every rank gets the same number. Sequences repeat if they do not fill one micro-batch.
        """
        count, size = len(self.sequences), self.shape.global_batch_size
        number = max(1, min(limit, count // size))
        order = np.arange(number * size) * count // (number * size)
        for together in order.reshape(number, size):
            yield self.sequences.batch(self.shape.share(together), together)


@dataclass(frozen=True, slots=True)
class Data:
    """Training and held-out data of a run."""

    train: TokenLoader
    held_out: HeldOut | None
    packed: bool = False  # sequences hold several documents each, which must not attend to each other
    notes: tuple[str, ...] = ()  # lines for the user: how documents were laid out, truncated or skipped


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
        vocab_size: The model's; DataError: the data has a token beyond it.
        model_path: The model's directory, whose tokenizer is used if the recipe names none.
        log: Called with a progress line now and then, while this process tokenizes.
    """
    tokens, held_out = _open_tokens(config, vocab_size, model_path, log)
    found = [("data.files", config.files, tokens)]
    found += [("data.eval_files", config.eval_files, held_out)] if held_out is not None else []
    packing, notes = config.packing, []
    if packing is None and any(each.loss_mask is not None for _, _, each in found):
        packing = True
    for key, _, each in found:
        if each.malformed[0]:
            number, first = each.malformed
            notes.append(f"{key}: skipped {number} malformed lines; the first: {first}")
    if held_out is None and config.eval_fraction:
        tokens, held_out, note = _hold_out(config, shape.seq_len, packing, tokens)
        notes.append(note)
    elif packing is None:
        for key, names, each in found:
            if len(each.values) <= shape.seq_len:
                raise DataError(
                    f"{key} ({', '.join(names)}): {len(each.values)} tokens, fewer than one sequence of "
                    f"{shape.seq_len} and its target; give more data or lower model.seq_len"
                )

    def laid_out(tokens: Tokens) -> Sequences:
        if packing is None:
            return token_stream(tokens.values, shape.seq_len)
        return document_rows(tokens, shape.seq_len, packing=packing)

    train, held = laid_out(tokens), None if held_out is None else laid_out(held_out)
    if held is not None and not len(held):
        raise DataError(
            "the held-out data has no target that counts in the loss, in sequences of "
            f"{shape.seq_len} tokens; give more of it or raise model.seq_len"
        )
    if packing is not None:
        notes.append(f"training data: {train}")
        notes += [f"held-out data: {held}"] if held is not None else []
    identity = f"{tokens.digest}:{train.identity}"
    loader = TokenLoader(train, shape, seed=config.seed, shuffle=config.shuffle, identity=identity)
    return Data(loader, None if held is None else HeldOut(held, shape), packing is True, tuple(notes))


def _open_tokens(
    config: DataConfig, vocab_size: int, model_path: str | None, log: Callable[[str], object]
) -> tuple[Tokens, Tokens | None]:
    tokenizer = open_tokenizer(config.tokenizer or model_path or "bytes")
    if model_path is None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    eval_files = find_files(config.eval_files, key="data.eval_files")
    files = [path for path in find_files(config.files) if path not in eval_files]
    if not files:
        raise DataError(
            f"data.files ({', '.join(config.files)}): each of them is one of data.eval_files, too, so none "
            "is left to train on; name others, or hold a part of them out with data.eval_fraction"
        )
    options: Any = {"cache": Path(config.cache), "skip_malformed": config.skip_malformed, "log": log}
    tokens = open_tokens(files, tokenizer, **options)
    held_out = open_tokens(eval_files, tokenizer, **options) if eval_files else None
    largest = max(tokens.largest, -1 if held_out is None else held_out.largest)
    if largest >= vocab_size:
        raise DataError(
            f"the data contains the token {largest}; the model in {model_path} has {vocab_size} tokens; "
            "data.tokenizer=null selects the model's own tokenizer"
        )
    return tokens, held_out


def _hold_out(
    config: DataConfig, seq_len: int, packing: bool | None, tokens: Tokens
) -> tuple[Tokens, Tokens, str]:
    """Hold out the last tokens, or whole documents; return the others, these, and a line about it."""
    kind, field, least = ("tokens", "values", seq_len + 1)
    if packing is not None:
        kind, field, least = ("documents", "documents", 1)
    whole = getattr(tokens, field)
    count = max(round(len(whole) * config.eval_fraction), least)
    if len(whole) - count < least:
        raise DataError(
            f"data.files ({', '.join(config.files)}): {len(whole)} {kind} are too few to hold {count} out "
            f"and train on a sequence of {seq_len}; give more data, lower data.eval_fraction (0: hold "
            "nothing out), or lower model.seq_len"
        )
    train, held_out = (replace(tokens, **{field: part}) for part in (whole[:-count], whole[-count:]))
    fraction = f"(data.eval_fraction={config.eval_fraction:g})"
    return train, held_out, f"held out: the last {count:,} of {len(whole):,} {kind} {fraction}"
