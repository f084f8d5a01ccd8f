"""Entries of ``data.files`` and ``data.eval_files``: the settings of data, and the tokens of each entry."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import RecipeError
from infinity.core.nbytes import format_nbytes
from infinity.data.examples import JUDGED, Kind
from infinity.data.formats import COLUMNS, SUPERVISED, Reading
from infinity.data.helpers import make_together
from infinity.data.sources import Source, find_files
from infinity.data.tokenizer import DataError, Tokenizer, open_tokenizer
from infinity.data.tokens import Log, TokenCache, Tokens

#: The largest file that is a part, where it cannot be cut.
_MOST_PART_NBYTES = 1 << 30
#: Keys of data, the last one followed by a name.
TRAIN, HELD_OUT, EVAL_SETS = "data.files", "data.eval_files", "data.eval_sets."


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Files, tokenizer, and how documents are laid out as sequences."""

    files: tuple[str, ...] = option(
        ("stdlib",),
        "files (.jsonl, .json, .csv, .tsv, .parquet, .arrow; others are text), globs, directories, data sets "
        "that save_to_disk wrote, or names of those that hf download --repo-type dataset NAME has fetched; "
        "stdlib: the sources of Python's standard library",
        path=True,
    )
    weights: tuple[float, ...] = setting(
        (),
        "share of each entry of data.files in every batch; empty: as much as each has",
        Valid(above=0, most=10**6),
    )
    fields: Mapping[str, str] | None = setting(
        None, "other names that columns have in the data, as in {prompt: question, completion: answer}"
    )
    format: Literal["auto", "messages", "sharegpt", "preference", "prompt-completion", "alpaca", "text"] = (
        setting("auto", "format of rows; auto: the one that their columns say")
    )
    eval_files: tuple[str, ...] = option(
        (), "held-out files, excluded from training; empty: hold out eval_fraction of the data", path=True
    )
    eval_sets: Mapping[str, tuple[str, ...]] | None = option(
        None, "further held-out files, by a name, each evaluated by itself: {code: [code.jsonl]}", path=True
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
    skip_malformed: bool = setting(False, "count and skip malformed rows")
    streaming: bool = setting(
        False, "make tokens while training goes on, in place of all before the first step"
    )
    shuffle_buffer: int = setting(
        2**23,
        "with data.streaming: bytes of files whose documents are packed, and sequences shuffled, together",
        Valid(2**10, 2**40), nbytes=True,
    )  # fmt: skip
    cache: str = option("runs/tokens", "directory in which tokens are cached between runs", path=True)
    shuffle: bool = setting(True, "shuffle sequences anew every epoch; false: keep their order")
    seed: int = setting(0, "seed of the shuffling", Valid(0, 2**63 - 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or not all(self.files):
            raise SettingError("files", self.files, "at least one path, glob or 'stdlib'")
        if self.weights and len(self.weights) != len(self.files):
            wanted = f"one for each entry of data.files, which has {len(self.files)}"
            raise SettingError("weights", self.weights, wanted)
        if unknown := next((name for name in self.fields or () if name not in COLUMNS), None):
            near = difflib.get_close_matches(unknown, COLUMNS, n=1)
            wanted = f"the name of a column that a format has: {', '.join(COLUMNS)}"
            raise SettingError("fields", unknown, wanted + (f"; did you mean {near[0]}?" if near else ""))
        if self.tokenizer == "":
            raise SettingError("tokenizer", self.tokenizer, "bytes, a path, or null")
        for name, files in (self.eval_sets or {}).items():
            if not files or not name or "/" in name:
                wanted = "names without / of held-out sets, each with files: {code: [code.jsonl]}"
                raise SettingError("eval_sets", self.eval_sets, wanted)

    def reading(self, accepted: Sequence[str] = SUPERVISED) -> Reading:
        """Return how rows are read, of those formats that are ``accepted``."""
        if self.format == "auto":
            return Reading(tuple(accepted), self.fields or {})
        if self.format not in accepted:
            raise SettingError("data.format", self.format, f"auto or one of {', '.join(accepted)}")
        return Reading((self.format,), self.fields or {})


class Part(NamedTuple):
    """Tokens ``begin`` to ``end`` (exclusive) and documents of one source, or of several together."""

    name: str  # for messages: the recipe's key and entries
    begin: int
    end: int
    documents: NDArray[np.int64]
    malformed: int = 0  # rows that were skipped


@dataclass(frozen=True, slots=True)
class Sources:
    """Tokens of the entries of ``data.files`` or ``data.eval_files``, and the part of each entry."""

    key: str
    tokenizer: Tokenizer
    tokens: Tokens  # of a stream those of a part of each entry
    parts: list[Part]
    cache: TokenCache
    streamed: list[list[Source]] = field(default_factory=list)  # of a stream the parts of each entry's files

    @property
    def whole(self) -> Part:
        names = ", ".join(part.name for part in self.parts)
        return Part(f"{self.key} ({names})", 0, len(self.tokens.values), self.tokens.documents)

    def notes(self, *, mixed: bool) -> Iterator[str]:
        """Yield a line about rows that were skipped; DataError: all of them, or of an entry to be mixed."""
        number, first = self.tokens.malformed
        why = f"{number:,} rows are malformed; the first: {first}" if number else "it is empty"
        for part in self.parts if mixed else [self.whole]:
            if not len(part.documents):
                raise DataError(f"{part.name}: nothing is left to train on: {why}")
        if number:
            yield f"{self.key}: skipped {number:,} malformed rows; the first: {first}"


def open_sources(
    config: DataConfig, vocab_size: int, model_path: str | None, log: Log, kind: Kind,
    check: Callable[[Tokens], Tokens],
) -> dict[str, Sources]:  # fmt: skip
    """Tokenize training data and held-out files, each if it is not cached; return them by their keys.

    Of a stream the tokens are those of a part of each entry. ``check`` returns tokens as they are trained on,
    or raises; other arguments are those of ``open_data``.
    """
    tokenizer = open_tokenizer(config.tokenizer or model_path or "bytes")
    if model_path is None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size}"
        )
    cache = TokenCache(
        folder=Path(config.cache), tokenizer=tokenizer, skip_malformed=config.skip_malformed,
        reading=config.reading(kind.formats), encode=kind.encode,
    )  # fmt: skip
    cache.sweep()
    seen = set[Path]()

    def opened(key: str, names: Sequence[str]) -> Sources:
        files, ends, streamed = list[Source](), list[int](), list[list[Source]]()
        for name in names:
            others = seen if key == TRAIN else {file.path for file in files}  # held-out sets may share files
            found = [Source(path) for path in find_files([name], key=key) if path not in others]
            files += found
            seen.update(file.path for file in found)
            ends.append(len(files))
        if key == TRAIN and config.streaming and files:
            streamed = cut(files, ends, config)
            files, ends = [parts[0] for parts in streamed], [*range(1, 1 + len(names))]
        elif kind is not JUDGED:  # of which a row has the next one's completion
            make_together(cache, files, log)
        tokens = check(cache.open(files, log))
        return Sources(key, tokenizer, tokens, parts_of(tokens, names, ends), cache, streamed)

    sets = {f"{EVAL_SETS}{name}": files for name, files in (config.eval_sets or {}).items()}
    held_out = {HELD_OUT: config.eval_files, **sets}
    found = {key: opened(key, files) for key, files in held_out.items() if files}
    train = opened(TRAIN, config.files)
    found = {TRAIN: train, **found}
    if not len(train.tokens.sources):
        raise DataError(
            f"data.files ({', '.join(config.files)}): each of them is one of data.eval_files, too, so none "
            "is left to train on; name others, or hold a part of them out with data.eval_fraction"
        )
    return found


def parts_of(tokens: Tokens, names: Sequence[str], ends: Sequence[int]) -> list[Part]:
    """Return the part of each entry, whose sources end before ``ends``."""
    found, first = [], 0
    for name, end in zip(names, ends):
        before = tokens.sources[first - 1] if first else np.zeros(3, np.int64)
        last = tokens.sources[end - 1] if end > first else before
        documents = tokens.documents[before[0] : last[0]]
        malformed = int(tokens.sources[first:end, 2].sum())
        found.append(Part(name, int(before[1]), int(last[1]), documents, malformed))
        first = end
    return found


def checked(
    tokens: Tokens, *, vocab_size: int, model_path: str | None, kind: Kind, labels: int | None
) -> Tokens:
    """Return tokens as they are trained on; DataError, RecipeError: the model lacks a token, or a label."""
    if tokens.largest >= vocab_size:
        raise DataError(
            f"the data contains the token {tokens.largest}; the model in {model_path} has {vocab_size} "
            "tokens; data.tokenizer=null selects the model's own tokenizer"
        )
    largest = int(tokens.documents[:, 3].max(initial=0))
    if labels is not None and largest >= labels:
        raise RecipeError(
            f"model.num_labels: the data has labels up to {largest}, and the model {labels} labels (null: "
            f"those of its config.json); set model.num_labels={largest + 1}"
        )
    return tokens.all_counted() if kind.all_tokens else tokens


def cut(files: Sequence[Source], ends: Sequence[int], config: DataConfig) -> list[list[Source]]:
    """Return the parts of each entry's files, which end before ``ends``; DataError: an entry has none.

    They are small, so that a window has something of many places, and a few can be held out.
    """
    most = min(config.shuffle_buffer // 8, 2**24)
    if config.eval_fraction:
        total = sum(file.nbytes for file in files)
        most = min(most, max(2**16, math.ceil(total * config.eval_fraction)))
    found = []
    for name, begin, end in zip(config.files, (0, *ends), ends):
        found.append([part for file in files[begin:end] for part in file.parts(most)])
        for part in found[-1]:
            if part.of == 1 and part.nbytes > max(most, _MOST_PART_NBYTES):
                raise DataError(
                    f"{part.path}: with data.streaming such a file may have "
                    f"{format_nbytes(_MOST_PART_NBYTES)}, since it is read whole; give several, or .jsonl or "
                    ".parquet"
                )
        if not found[-1]:
            raise DataError(f"data.files: {name}: all of its files are those of other entries, or held out")
    return found
