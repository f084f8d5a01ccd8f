"""From a recipe's data section to the batches of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from infinity.app.data.config import DataConfig
from infinity.app.data.files import DataError, find_files
from infinity.app.data.loader import HeldOut, Shape, TokenLoader
from infinity.app.data.sequences import Rows, Sequences, Stream
from infinity.app.data.tokenizer import Tokenizer, open_tokenizer
from infinity.app.data.tokens import Say, Tokens, open_tokens, silent


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads.

    Attributes:
        held_out: None where the recipe holds nothing out.
        packed: Sequences hold several documents each, which must not see each other.
        notes: Lines for people: what was laid out how, cut short or left out.
    """

    train: TokenLoader
    held_out: HeldOut | None
    packed: bool = False
    notes: tuple[str, ...] = ()


def open_data(
    config: DataConfig, shape: Shape, *, vocab_size: int, model_path: str | None = None, say: Say = silent
) -> Data:
    """The batches of a run, from its files. Every rank may call at the same time.

    Args:
        vocab_size: Tokens that the model knows; the data may have no other.
        model_path: The model's directory, whose tokenizer is used where the recipe names none.
        say: Gets a line for people now and then, while this process writes tokens for long.

    Raises:
        DataError: No files, malformed files, too few tokens, or too many kinds of them.
    """
    tokenizer = open_tokenizer(config.tokenizer or model_path or "bytes")
    if model_path is None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    apart = find_files(config.eval_files, key="data.eval_files") if config.eval_files else ()
    files = tuple(path for path in find_files(config.files) if path not in apart)
    tokens = _open(files, tokenizer, config, say)
    held_out = _open(apart, tokenizer, config, say) if apart else None
    largest = max(tokens.largest, -1 if held_out is None else held_out.largest)
    if largest >= vocab_size:
        raise DataError(
            f"the data has the token {largest}, the model in {model_path} knows {vocab_size}; "
            "data.tokenizer=null takes the model's own"
        )
    layout = _Layout(config, shape.seq_len, tokens, held_out)
    train, apart_sequences = layout.sequences()
    identity = f"{tokens.digest}:{train.identity}"
    loader = TokenLoader(train, shape, seed=config.seed, shuffle=config.shuffle, identity=identity)
    held = None if apart_sequences is None else HeldOut(apart_sequences, shape)
    notes = layout.notes(train, apart_sequences)
    return Data(loader, held, packed=layout.packing is True, notes=notes)


def _open(files: tuple[Path, ...], tokenizer: Tokenizer, config: DataConfig, say: Say) -> Tokens:
    cache = Path(config.cache).expanduser()
    return open_tokens(files, tokenizer, cache, skip_malformed=config.skip_malformed, say=say)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How training and held-out tokens become sequences."""

    config: DataConfig
    seq_len: int
    tokens: Tokens
    held_out: Tokens | None  # of files of their own

    @property
    def packing(self) -> bool | None:
        """Whether documents share a sequence; None: they run on, as one stream."""
        if self.config.packing is not None:
            return self.config.packing
        parts = (self.tokens, self.held_out)
        return True if any(part is not None and part.counts is not None for part in parts) else None

    @property
    def _shares(self) -> bool:
        """Whether what is held out is a part of the training files."""
        return self.held_out is None and bool(self.config.eval_fraction)

    @property
    def _count(self) -> int:
        """Tokens of the stream, or documents."""
        return len(self.tokens.values if self.packing is None else self.tokens.documents)

    @property
    def _apart(self) -> int:
        """How many of them are held out."""
        least = self.seq_len + 1 if self.packing is None else 1
        return max(round(self._count * self.config.eval_fraction), least)

    def sequences(self) -> tuple[Sequences, Sequences | None]:
        """Training and held-out sequences, without a common token."""
        return self._streams() if self.packing is None else self._rows(packing=self.packing)

    def notes(self, *all_sequences: Sequences | None) -> tuple[str, ...]:
        notes = []
        for key, tokens in (("data.files", self.tokens), ("data.eval_files", self.held_out)):
            if tokens is not None and tokens.malformed[0]:
                number, first = tokens.malformed
                notes.append(f"{key}: {number} lines left out as malformed; the first: {first}")
        if self._shares:
            kind = "tokens" if self.packing is None else "documents"
            notes.append(
                f"held out: the last {self._apart:,} of {self._count:,} {kind} "
                f"(data.eval_fraction={self.config.eval_fraction:g})"
            )
        for name, sequences in zip(("training", "held-out"), all_sequences):
            if isinstance(sequences, Rows):
                notes.append(f"{name} data: {_describe(sequences)}")
        return tuple(notes)

    def _streams(self) -> tuple[Sequences, Sequences | None]:
        values, wanted = self.tokens.values, self.seq_len + 1
        self._require(values, self.config.files, "data.files")
        if self.held_out is not None:
            self._require(self.held_out.values, self.config.eval_files, "data.eval_files")
            return Stream(values, self.seq_len), Stream(self.held_out.values, self.seq_len)
        if not self._shares:
            return Stream(values, self.seq_len), None
        apart = self._apart
        if len(values) - apart < wanted:
            raise DataError(
                f"{len(values)} tokens are too few to hold {apart} out and train on a sequence of "
                f"{self.seq_len}; give more data, lower data.eval_fraction (0: hold nothing out), "
                "or lower model.seq_len"
            )
        return Stream(values[:-apart], self.seq_len), Stream(values[-apart:], self.seq_len)

    def _require(self, values: NDArray[Any], names: tuple[str, ...], key: str) -> None:
        if len(values) < self.seq_len + 1:
            raise DataError(
                f"{key} ({', '.join(names)}): {len(values)} tokens, fewer than one sequence of "
                f"{self.seq_len} and its target; give more data or lower model.seq_len"
            )

    def _rows(self, *, packing: bool) -> tuple[Sequences, Sequences | None]:
        tokens, held_out = self.tokens, self.held_out
        if self._shares:
            count, apart = self._count, self._apart
            if count <= apart:
                raise DataError(
                    f"data.files ({', '.join(self.config.files)}): {count} documents are too few to hold "
                    f"{apart} out; give more data, or data.eval_fraction=0 to hold nothing out"
                )
            held_out, tokens = tokens.part(count - apart, count), tokens.part(0, count - apart)
        rows = Rows(tokens, self.seq_len, packing=packing)
        if held_out is None:
            return rows, None
        apart_rows = Rows(held_out, self.seq_len, packing=packing)
        if not len(apart_rows):
            raise DataError(
                "the held-out data has no target that counts in a sequence of "
                f"{self.seq_len}; give more of it or raise model.seq_len"
            )
        return rows, apart_rows


def _describe(rows: Rows) -> str:
    plan, slots = rows.plan, max(1, len(rows) * rows.seq_len)
    used = int(rows.token_counts.sum())
    pieces = len(plan.pieces.starts)
    cut = pieces > rows.document_count
    what = f"{rows.document_count:,} documents, {pieces:,} pieces," if cut else f"{pieces:,} documents"
    text = (
        f"{what} in {len(rows):,} sequences of {rows.seq_len:,} "
        f"({used / slots:.0%} full, {int(rows.target_counts.sum()) / max(1, used):.0%} learned)"
    )
    if plan.truncated:
        text += f"; {plan.truncated:,} were longer and lost their end"
    if plan.empty:
        text += f"; {plan.empty:,} left out, since nothing in them is learned"
    return text
