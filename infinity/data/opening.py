"""Opens the data of a run: the settings of ``data``, tokens of the entries of its files, and sequences."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import RecipeError, did_you_mean
from infinity.core.nbytes import format_nbytes
from infinity.data.formats import COLUMNS, SUPERVISED, Reading
from infinity.data.helpers import make_together
from infinity.data.loader import HeldOut, Loader, PartTokens, Windows
from infinity.data.sequences import BatchShape, Layout, Sequences, joined
from infinity.data.sources import Source, find_files
from infinity.data.tokenizer import DataError, Tokenizer, open_tokenizer
from infinity.data.tokens import JUDGED, TEXTS, Kind, Log, Part, TokenCache, Tokens
from infinity.data.tokens import joined as joined_tokens

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
            wanted = f"the name of a column that a format has: {', '.join(COLUMNS)}"
            raise SettingError("fields", unknown, wanted + did_you_mean(unknown, COLUMNS))
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


@dataclass(frozen=True, slots=True)
class Data:
    """Training and held-out data of a run."""

    train: Loader
    evaluated: Mapping[str, HeldOut]  # held-out data by the names of data.eval_sets; the other one has ""
    packed: bool  # sequences hold several documents each, which must not attend to each other
    sources: Sources  # what train is of
    layout: Layout
    notes: tuple[str, ...] = ()  # lines for the user: how documents were laid out, truncated or skipped


def open_data(
    config: DataConfig, shape: BatchShape, *, vocab_size: int, model_path: str | None = None,
    log: Log = lambda line: None, kind: Kind = TEXTS, labels: int | None = None,
) -> Data:  # fmt: skip
    """Open the data of a run. All ranks may call at the same time.

    Args:
        vocab_size: The model's; DataError: the data has a token beyond it.
        model_path: The model's directory, whose tokenizer is used if the recipe names none.
        log: Called with a progress line now and then, while this process tokenizes.
        labels: The model's; RecipeError: the data has a label beyond them.
    """
    check = partial(checked, vocab_size=vocab_size, model_path=model_path, kind=kind, labels=labels)
    given = open_sources(config, vocab_size, model_path, log, kind, check)
    train, others = given[TRAIN], {key: each for key, each in given.items() if key != TRAIN}
    packing, notes = _packing(config, given, kind), list[str]()
    for each in given.values():
        notes += each.notes(mixed=bool(config.weights) and each is train)
    layout = Layout(shape, packing, kind)
    held = {key: joined(layout.of(each.tokens, [each.whole])) for key, each in others.items()}
    hold_out = not held and config.eval_fraction > 0
    if train.streamed:
        loader, held_out, more = _streamed(config, layout, train, hold_out, log, check)
    else:
        loader, held_out, more = _stored(config, layout, train, hold_out)
    held |= {} if held_out is None else {HELD_OUT: held_out}
    for key, found in held.items():
        if not len(found):
            raise DataError(
                f"the {_called(key)} has no target that counts in the loss, in sequences of "
                f"{shape.seq_len} tokens; give more of it or raise model.seq_len"
            )
    notes += [*more, *(f"{_called(key)}: {each}" for key, each in held.items() if packing is not None)]
    evaluated = {
        "" if key == HELD_OUT else key.removeprefix(EVAL_SETS): HeldOut(each, shape)
        for key, each in held.items()
    }
    return Data(loader, evaluated, packing is True, train, layout, tuple(notes))


_Opened: TypeAlias = tuple[Loader, Sequences | None, list[str]]
_Check: TypeAlias = Callable[[Tokens], Tokens]


def _stored(config: DataConfig, layout: Layout, train: Sources, hold_out: bool) -> _Opened:
    """Return the loader of tokens that are all there, what is held out of them, and notes."""
    parts, held, notes = train.parts if config.weights else [train.whole], None, list[str]()
    if hold_out:
        cut = [_hold_out(config, layout, part) for part in parts]
        parts, held_parts, notes = (list(each) for each in zip(*cut))
        held = joined(layout.of(train.tokens, held_parts))
    by_part = layout.of(train.tokens, parts)
    sequences = joined(by_part)
    if layout.packing is not None:
        notes.append(f"training data: {sequences}")
    identity = f"{train.tokens.digest}:{sequences.identity}"
    if config.weights:
        identity += f":{list(config.weights)} of each batch"
        notes += _notes_on(config.weights, parts, by_part)
    given = by_part if config.weights else [sequences]
    if (of := sequences.examples) is not None:  # a batch may have rows of several parts
        given = [replace(each, examples=replace(each.examples, width=of.width)) for each in given]  # type: ignore[type-var]
    return Loader.of(given, layout.shape, config.seed, config.shuffle, identity, config.weights), held, notes


def _streamed(
    config: DataConfig, layout: Layout, train: Sources, hold_out: bool, log: Log, check: _Check
) -> _Opened:
    """Return the loader of tokens that are made while training goes on, some that are held out, and notes."""
    mixed = bool(config.weights)
    entries = train.streamed if mixed else [[*chain(*train.streamed)]]
    names = [part.name for part in train.parts] if mixed else [train.whole.name]
    first = layout.of_part(train.tokens, train.whole)
    held, notes = None, list[str]()
    if hold_out:
        apart = {part for each in zip(names, entries) for part in _parts_held_out(config, *each)}
        entries = [[part for part in parts if part not in apart] for parts in entries]
        tokens = check(joined_tokens([train.cache.open([part], log) for part in sorted(apart)]))
        held = layout.of_part(tokens, Part(HELD_OUT, 0, len(tokens.values), tokens.documents))
        notes.append(f"held out: {len(apart):,} parts of files (data.eval_fraction={config.eval_fraction:g})")
    nbytes, window = sum(part.nbytes for part in chain(*entries)), config.shuffle_buffer
    parts = PartTokens(train.cache, layout, log, check, train.streamed)
    streams = [
        Windows(name, each, parts, window, first, (config.seed, number), shuffle=config.shuffle)
        for number, (name, each) in enumerate(zip(names, entries))
    ]
    seen: list[Any] = [train.cache.tokenizer.fingerprint, train.cache.reading.formats, layout.packing]
    seen += [config.weights, window, [(part.nbytes, *part[1:]) for part in chain(*entries)]]
    identity: dict[str, Any] = {"tokens": hashlib.sha256(json.dumps(seen).encode()).hexdigest()}
    identity |= {"seed": config.seed, "shuffle": config.shuffle}
    notes.append(
        f"training data: {format_nbytes(nbytes)} of files, tokenized while training goes on, in windows of "
        f"{format_nbytes(window)} (data.shuffle_buffer); in a part of them: {first}"
    )
    per_epoch = len(first) * nbytes / max(1, sum(each[0].nbytes for each in train.streamed))
    loader = Loader(streams, config.weights or (1.0,), layout.shape, identity, per_epoch, estimated=True)
    return loader, held, notes


def _parts_held_out(config: DataConfig, name: str, parts: Sequence[Source]) -> list[Source]:
    """Return ``data.eval_fraction`` of parts, spread over all, but no more than a window has."""
    if len(parts) < 2:
        raise DataError(
            f"{name}: too little to hold {config.eval_fraction:g} of it out, as a part of a file: give "
            "data.eval_files, or data.eval_fraction=0 (hold nothing out)"
        )
    most = max(1, config.shuffle_buffer // max(1, parts[0].nbytes))
    count = max(1, min(round(len(parts) * config.eval_fraction), most, len(parts) - 1))
    return [parts[(2 * each + 1) * len(parts) // (2 * count)] for each in range(count)]


def _packing(config: DataConfig, given: Mapping[str, Sources], kind: Kind) -> bool | None:
    """Return whether rows are packed; None: tokens are one stream."""
    if kind.whole:
        if config.packing:
            wanted = "false or null for a task whose model scores whole documents"
            raise SettingError("data.packing", True, wanted)
        return False
    if config.packing is None and not kind.documents:
        return True if any(each.tokens.loss_mask is not None for each in given.values()) else None
    return config.packing is not False


def _called(key: str) -> str:
    return "held-out data" if key == HELD_OUT else key


def _notes_on(weights: Sequence[float], parts: Sequence[Part], by_part: Sequence[Sequences]) -> Iterator[str]:
    for part, weight, sequences in zip(parts, weights, by_part):
        if not len(sequences):
            raise DataError(f"{part.name}: no sequence to mix in (data.weights)")
        share = weight / sum(weights)
        times = share * sum(map(len, by_part)) / len(sequences)
        yield (
            f"{part.name}: {len(sequences):,} sequences, {share:.1%} of each batch; as many steps as an "
            f"epoch has without weights take each of them {times:.3g} times"
        )


def _hold_out(config: DataConfig, layout: Layout, part: Part) -> tuple[Part, Part, str]:
    """Hold out the last tokens, or whole documents; return the others, these, and a line about it.

    Documents of an example stay together.
    """
    kind, whole, least, together = "tokens", part.end - part.begin, layout.seq_len + 1, 1
    if layout.packing is not None:
        together = max(1, layout.kind.documents)
        kind, whole, least = "documents", len(part.documents), together
    count = max(round(whole * config.eval_fraction / together) * together, least)
    if whole - count < least:
        raise DataError(
            f"{part.name}: {whole} {kind} are too few to hold {count} out "
            f"and train on a sequence of {layout.seq_len}; give more data, lower data.eval_fraction (0: hold "
            "nothing out), or lower model.seq_len"
        )
    if layout.packing is None:
        train, held_out = part._replace(end=part.end - count), part._replace(begin=part.end - count)
    else:
        train, held_out = (part._replace(documents=each) for each in np.split(part.documents, [-count]))
    fraction = f"(data.eval_fraction={config.eval_fraction:g})"
    of = f" of {part.name}" if config.weights else ""
    return train, held_out, f"held out: the last {count:,} of {whole:,} {kind}{of} {fraction}"
