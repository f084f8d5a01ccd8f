"""Opens the data of a run: training and held-out sequences, from the settings of ``data``."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from infinity.core.config import SettingError
from infinity.core.nbytes import format_nbytes
from infinity.data.entries import EVAL_SETS, HELD_OUT, TRAIN, DataConfig, Part, Sources, checked, open_sources
from infinity.data.examples import TEXTS, Kind
from infinity.data.loader import HeldOut, Loader
from infinity.data.sequences import BatchShape, Layout, Sequences, joined
from infinity.data.sources import Source
from infinity.data.stream import PartTokens, Windows
from infinity.data.tokenizer import DataError
from infinity.data.tokens import Log, Tokens
from infinity.data.tokens import joined as joined_tokens


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
