"""Writes a trained model to a Hugging Face directory, streamed: plan, write, publish.

[Note: which rank writes what]
A saved tensor that is made of parameters' own values is written by each rank in the part that its shards
hold: nothing is gathered. Tensors that transformers computes are gathered unit by unit and converted on every
rank, and each writes an equal part. Rank 0 writes the rest: headers, buffers, configs, the tokenizer. So
every rank must see the directory's file system. What may be refused (room, configs, tokenizer) comes first.

[Note: where it is made]
Everything is written into a hidden sibling, ``.NAME.xxxxxxxx.part``, synced to the drive, and renamed. The
process that makes it holds a lock on the sibling itself (:mod:`infinity.core.files`), so the next export to
the same place recognizes and removes what a killed one left.
"""

import contextlib
import copy
import dataclasses
import errno as errno_names
import glob
import json
import os
import secrets
import shutil
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from infinity.checkpoint.conversions import converted, is_transformers, saved_tensors
from infinity.checkpoint.directory import INDEX, SAFETENSORS, Checkpoint
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.writer import (
    FilePlan,
    OutputFile,
    RangeWriter,
    TensorSpec,
    create_files,
    plan_files,
    writing,
)
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise
from infinity.core.errors import CheckpointError
from infinity.core.files import open_locked, sync
from infinity.partition.unit import Unit

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY

#: Patterns of the files of a tokenizer or processor in a Hugging Face directory; code (``*.py``) is left out.
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json",
    "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm", "*.tiktoken", "bpe.codes",
    "normalizer.json", "chat_template*.json", "chat_template*.jinja", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class Publication(contextlib.AbstractContextManager["Publication"]):
    """Makes the directory ``out``, which must be free, and removes what was written unless it is published.

    ``token`` makes the sibling's name unique. Raises CheckpointError if ``out`` is taken, else WriteError.
    """

    def __init__(self, out: Path, token: str) -> None:
        self.out, self.path = out, partial_path(out, token)
        self._lock = -1
        check_free(out)
        with writing(f"making a directory beside {out}", self.path):
            out.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        try:
            with suppress(OSError):  # a file system without locks: what is left behind stays there
                self._lock = open_locked(self.path, _DIRECTORY)
            with writing(f"looking for what a killed export left beside {out}", self.path):
                _remove_leftovers(out.parent, glob.escape(out.name))
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Sync everything to the drive, then let ``out`` appear, unless something has taken its name."""
        with writing(f"publishing {self.out}", self.path):
            for path in [*self.path.rglob("*"), self.path]:
                sync(path)
            try:
                self.path.rename(self.out)
            except OSError as error:
                if error.errno in (errno_names.ENOTEMPTY, errno_names.EEXIST, errno_names.ENOTDIR):
                    check_free(self.out)
                raise
            sync(self.out.parent)

    def close(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, *exc: object) -> None:
        self.close()


class Series:
    """Publishes directories called ``NAME-NUMBER`` one after the other, and keeps the newest ``keep``.

    ``latest`` is a symbolic link to the newest one, replaced atomically.
    """

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self._name, self._keep = folder, name, keep

    def path(self, number: int) -> Path:
        return self.folder / f"{self._name}-{number}"

    def publish(self, number: int) -> None:
        """Let ``latest`` point to this directory, which is complete, and remove those beyond ``keep``."""
        latest = self.folder / "latest"
        with writing(f"writing {latest}", latest):
            self.remove_leftovers()
            draft = self.folder / ".latest.new"
            draft.unlink(missing_ok=True)
            draft.symlink_to(self.path(number).name)
            draft.replace(latest)
            sync(self.folder)
            found = (each.name.removeprefix(f"{self._name}-") for each in self.folder.glob(f"{self._name}-*"))
            others = sorted({int(each) for each in found if each.isdecimal()} - {number})
            for old in others[: max(0, len(others) - self._keep + 1)]:
                removed = partial_path(self.path(old), "old")
                self.path(old).rename(removed)  # first, so that none is there in part
                shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left of directories that they made or removed."""
        _remove_leftovers(self.folder, f"{glob.escape(self._name)}-*")


def partial_path(out: Path, token: str) -> Path:
    return out.parent / f".{out.name}.{token}.part"


def check_free(out: Path) -> None:
    """Raise a CheckpointError unless a directory can appear at ``out`` without replacing anything."""
    link = out.is_symlink()  # also to an empty directory: what is renamed does not replace a link
    if not link and out.is_dir() and not any(out.iterdir()):
        return
    if link or out.exists():
        what = "is a symbolic link" if link else "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"{out} exists and {what}; wanted a new directory: name another")


def publish_directory(source: Path, out: Path, token: str) -> None:
    """Publish a copy of the saved model at ``source`` as ``out``.

    Weights become hard links where the file system allows it, else copies; small files are copied, so that
    they may be edited. Raises a CheckpointError if ``source`` holds no whole model.
    """
    adapter = (source / "adapter_config.json").is_file()
    needed = "adapter_model.safetensors" if adapter else "config.json"
    if not (source / needed).is_file():
        raise CheckpointError(f"{source} holds no {needed}, so it is no saved model")
    if not adapter:
        Checkpoint(source).close()  # every file is there, and as long as it says
    with Publication(out, token) as publication:
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            target = publication.path / path.relative_to(source)
            with writing(f"writing {target}", target):
                target.parent.mkdir(exist_ok=True)
                if path.suffix == ".safetensors":
                    with suppress(OSError):  # another file system, or one without hard links
                        os.link(path.resolve(), target)
                        continue
                shutil.copyfile(path, target)
        publication.publish()


def tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a tokenizer or processor in ``source``; ``source`` itself if it is a file."""
    if source.is_file():
        return [source]
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})


def _copy_tokenizer(source: Path, out: Path) -> None:
    files = tokenizer_files(source)
    if not files:
        raise CheckpointError(
            f"{source} holds no tokenizer; wanted a directory with tokenizer.json or the like, or such a file"
        )
    for path in files:
        target = out / ("tokenizer.json" if path == source else path.relative_to(source))
        with writing(f"writing {target}", target):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed exports to names of this pattern left; running ones hold their locks."""
    for path in folder.glob(f".{pattern}.*.part"):
        with suppress(OSError):
            lock = open_locked(path, _DIRECTORY, patience_s=0)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


#: The most bytes of values in one file of a directory.
MAX_SHARD_NBYTES = 5 * 10**9

#: Given a function that says whether elements ``[start, stop)`` of a unit's flat buffer are needed, yields
#: this rank's newest weights, ascending: the unit, the first element in its flat buffer, and the values, on
#: the CPU, valid until the next piece is asked for.
ReadWeights: TypeAlias = Callable[[Callable[[Unit, int, int], bool]], Iterator[tuple[Unit, int, Tensor]]]
#: Returns a context in which parameters hold their full values. Every rank must enter.
Gathered: TypeAlias = Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]


# --- the plan: which tensor goes where, decided before the first byte moves ---------------------------

#: Stands for a unit's index where every rank has the whole tensor.
_WHOLE = -1


class SavedRange(NamedTuple):
    """Maps elements ``[offset, stop)`` of a unit's flat buffer, or of a whole tensor, to bytes of a file."""

    offset: int
    stop: int
    file: int
    start: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Holds the place of each tensor in the files; the same on every rank.

    Attributes:
        places: The file by number, and the first byte in it, of each key.
        spans: Ranges that are written unchanged, ascending, by a unit's index, or by name where every rank
            has the whole tensor.
        members: Names of tensors that are converted, by the index of their last unit.
        groups: Names of tensors that are converted together, and the results, by the index of their last
            unit.
    """

    files: tuple[FilePlan, ...]
    places: Mapping[str, tuple[int, int]]
    spans: Mapping[int | str, list[SavedRange]]
    members: Mapping[int, list[str]]
    groups: Mapping[int, list[tuple[frozenset[str], list[TensorSpec]]]]

    @property
    def values_nbytes(self) -> int:
        return sum(file.nbytes - len(file.header) for file in self.files)

    def within(self, unit: Unit, start: int, stop: int) -> Sequence[SavedRange]:
        """Return the spans that elements ``[start, stop)`` of the flat buffer meet; spans do not overlap."""
        spans = self.spans.get(unit.index, [])
        first = bisect_right(spans, start, key=lambda span: span.stop)
        return spans[first : bisect_left(spans, stop, key=lambda span: span.offset)]


class _Location(NamedTuple):
    """Locates elements ``[first, stop)`` of a tensor: from ``offset`` on in a unit's flat buffer."""

    unit: int = _WHOLE
    offset: int = 0
    first: int = 0
    stop: int = 0


def plan_export(
    model: nn.Module, named: Mapping[str, Tensor], units: Sequence[Unit], max_shard_nbytes: int
) -> ExportPlan:
    """Plan the files of ``model``, in the order in which its values come from the drive.

    ``named`` are its tensors by its own names; those without a segment in ``units`` are whole on every rank.
    """
    tiles: dict[int, list[_Location]] = {}  # in order, by id of the parameter
    for unit in units:
        for s in unit.segments:
            home = _Location(unit.index, s.offset, s.first, s.first + s.numel)
            tiles.setdefault(id(s.whole), []).append(home)
    homes = {name: tiles.get(id(tensor), [_Location(stop=tensor.numel())]) for name, tensor in named.items()}
    saved = sorted(
        saved_tensors(model, named), key=lambda item: max(homes[name][-1] for name in item.sources)
    )
    files = plan_files([item.spec for item in saved], max_shard_nbytes)
    places = {key: (i, start) for i, file in enumerate(files) for key, start in file.starts.items()}
    spans: defaultdict[int | str, list[SavedRange]] = defaultdict(list)
    together: dict[frozenset[str], list[TensorSpec]] = {}
    for item in saved:
        file, start = places[item.spec.key]
        if item.parts is None:
            together.setdefault(item.sources, []).append(item.spec)
        for part in item.parts or ():
            for home in homes[part.source]:
                low, high = max(part.offset, home.first), min(part.offset + part.numel, home.stop)
                if low < high:
                    begin = start + (part.start + low - part.offset) * item.spec.dtype.itemsize
                    source = part.source if home.unit == _WHOLE else home.unit
                    shift = home.offset - home.first
                    spans[source].append(SavedRange(low + shift, high + shift, file, begin))
    members: defaultdict[int, list[str]] = defaultdict(list)
    groups: defaultdict[int, list[tuple[frozenset[str], list[TensorSpec]]]] = defaultdict(list)
    for sources, specs in together.items():
        groups[max(homes[name][-1].unit for name in sources)].append((sources, specs))
        for name in sorted(sources):
            members[homes[name][-1].unit].append(name)
    return ExportPlan(files, places, {key: sorted(each) for key, each in spans.items()}, members, groups)


# --- writing -----------------------------------------------------------------------------------------


def export_model(
    model: nn.Module,
    units: Sequence[Unit],
    out: Path,
    *,
    read_weights: ReadWeights,
    gathered: Gathered,
    ranks: Ranks,
    max_shard_nbytes: int,
    tokenizer: Any,
) -> None:
    """Write ``model``, whose sharded parameters are in ``units``, to ``out``; every rank must call."""
    out, token = agree_on_place(out, ranks)
    folder = partial_path(out, token)
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"planning {out}"):
            named = dict(named_targets(model))
            plan = plan_export(model, named, units, max_shard_nbytes)
            if ranks.rank == 0:
                publication = stack.enter_context(Publication(out, token))
                create_files(folder, plan.files)
                _write_companions(model, plan, folder, tokenizer)
        with RangeWriter() as writer:
            with all_ranks_or_raise(ranks, f"writing {out}"):
                require_visible(folder, ranks.rank, "export")
                values = _ValueWriter(
                    plan, named, ranks, writer, [writer.open(folder / f.name) for f in plan.files]
                )
                values.write_as_they_are(read_weights)
            values.write_converted(model, units, gathered)
            with all_ranks_or_raise(ranks, f"writing {out}"):
                writer.finish()
            written = int(ranks.sum(writer.nbytes, "bytes that were exported"))
            assert written == plan.values_nbytes, f"{written} bytes of {plan.values_nbytes} were written"
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if ranks.rank == 0:
                publication.publish()


def agree_on_place(out: Path, ranks: Ranks, what: str = "an export") -> tuple[Path, str]:
    """Return rank 0's ``out``, absolute, and a token for :class:`Publication`. Every rank must call."""
    place = out.absolute(), secrets.token_hex(4)
    return agree(place, ranks.world_size, f"agreeing on the directory of {what}")


def require_visible(folder: Path, rank: int, verb: str) -> None:
    """Raise a CheckpointError if this rank does not see the directory that rank 0 has made."""
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {folder}, which rank 0 has just made; {verb} to a directory on a file "
            "system that every rank sees"
        )


@dataclass(frozen=True, slots=True)
class _ValueWriter:
    plan: ExportPlan
    named: Mapping[str, Tensor]
    ranks: Ranks
    writer: RangeWriter
    files: Sequence[OutputFile]

    def write_as_they_are(self, read_weights: ReadWeights) -> None:
        """Write what needs no conversion: this rank's shards, and on rank 0 whole tensors."""
        for name, spans in self.plan.spans.items() if self.ranks.rank == 0 else ():
            if isinstance(name, str):
                values = self.named[name].detach().cpu().contiguous().reshape(-1)
                for span in spans:
                    self._write(span.file, span.start, 0, values[span.offset : span.stop])
        for unit, start, values in read_weights(lambda *elements: bool(self.plan.within(*elements))):
            for span in self.plan.within(unit, start, start + len(values)):
                low, high = max(start, span.offset), min(start + len(values), span.stop)
                self._write(span.file, span.start, low - span.offset, values[low - start : high - start])
            self.writer.check()

    def write_converted(self, model: nn.Module, units: Sequence[Unit], gathered: Gathered) -> None:
        """Write what transformers converts, unit by unit, keeping members of groups that end later."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        aside: dict[str, Tensor] = {}
        for unit, names in sorted(self.plan.members.items()):
            what = "buffers" if unit == _WHOLE else units[unit].name
            with all_ranks_or_raise(self.ranks, f"converting {what}"):
                tensors = [self.named[name] for name in names]
                with contextlib.nullcontext() if unit == _WHOLE else gathered(tensors):
                    here = {name: each.detach().cpu() for name, each in zip(names, tensors, strict=True)}
                    for group, specs in self.plan.groups.get(unit, ()):
                        sources = {name: here[name] if name in here else aside.pop(name) for name in group}
                        for key, value in converted(model, sources, specs).items():
                            flat = value.contiguous().reshape(-1)
                            start, stop = (len(flat) * each // world_size for each in (rank, rank + 1))
                            self._write(*self.plan.places[key], start, flat[start:stop])
                        for name in sources.keys() & here.keys():
                            del here[name]
                    aside |= {name: value.clone() for name, value in here.items()}
                self.writer.check()

    def _write(self, file: int, offset: int, first: int, values: Tensor) -> None:
        self.writer.write(self.files[file], offset + first * values.itemsize, values)


def _write_companions(model: Any, plan: ExportPlan, folder: Path, tokenizer: Any) -> None:
    with writing(f"writing to {folder}", folder):
        if len(plan.files) > 1:
            numel = sum(p.numel() for p in model.parameters())
            index = {
                "metadata": {"total_parameters": numel, "total_size": plan.values_nbytes},
                "weight_map": {key: plan.files[file].name for key, (file, _) in plan.places.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / (SAFETENSORS + INDEX)).write_text(text + "\n", encoding="utf-8")
        name = type(model).__name__
        if is_transformers(model):
            config = copy.deepcopy(model.config)
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.architectures = [name]
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        elif dataclasses.is_dataclass(config := getattr(model, "config", None)):
            text = json.dumps({"architectures": [name]} | dataclasses.asdict(config), indent=2)  # type: ignore[arg-type]
            (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        elif tokenizer is not None:
            _copy_tokenizer(Path(tokenizer).expanduser(), folder)
