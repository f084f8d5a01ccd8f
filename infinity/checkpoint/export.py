"""A trained model as a Hugging Face directory, streamed: plan, write, publish.

[Note: which rank writes what]
Where a saved tensor is some parameter's own values, each rank writes the part that its shards hold,
straight from where they are: nothing is gathered. Tensors that transformers converts are gathered unit
by unit and converted on every rank, and each writes an equal part. Rank 0 writes the rest: headers,
buffers, configs, the tokenizer. So the directory lies on a file system that every rank sees. What may
be refused comes first: room, configs and tokenizer are checked before the first value is read.

[Note: where it is made]
Everything is written into a hidden sibling, ``.NAME.xxxxxxxx.part``, brought to the drive, and renamed.
The process that makes it holds a lock on the sibling itself: see :mod:`infinity.core.files`. So what a killed
export left behind is recognized, and removed by the next one to the same place.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from torch import Tensor, nn

from infinity.checkpoint.conversions import SavedTensor, converted, is_transformers, saved_tensors
from infinity.checkpoint.directory import INDEX, SAFETENSORS, Checkpoint
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.writer import (
    FilePlan,
    OutputFile,
    RangeWriter,
    TensorSpec,
    check_room,
    plan_files,
    writing,
)
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise
from infinity.core.errors import CheckpointError
from infinity.core.files import open_locked, sync
from infinity.partition.unit import Unit

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY

#: What makes up a tokenizer or processor in a directory of a Hugging Face model, as patterns of names.
#: Code (``*.py``) is not among them.
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json",
    "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm", "*.tiktoken", "bpe.codes",
    "normalizer.json", "chat_template*.json", "chat_template*.jinja", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class Publication:
    """The directory ``out`` while it is made; a context manager that leaves nothing half done.

    Args:
        out: Must not exist, or be empty.
        token: Makes the sibling's name unlike any other's.

    Raises:
        CheckpointError: ``out`` is not free.
        WriteError: The directory above it cannot be written.
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
        """Bring everything to the drive, then let ``out`` appear.

        Raises:
            CheckpointError: Something has appeared there meanwhile.
            WriteError: The drive refuses.
        """
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Series:
    """Numbered directories that are published one after the other, of which the newest stay.

    ``latest`` is a symbolic link to the newest one, replaced in one step.

    Args:
        folder: The folder of the directories.
        name: The name of the directories, before the number.
        keep: The number of directories that stay.
    """

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self._name, self._keep = folder, name, keep

    def path(self, number: int) -> Path:
        """The directory of this number."""
        return self.folder / f"{self._name}-{number}"

    def publish(self, number: int) -> None:
        """Let ``latest`` be this directory, which is complete, and remove those that are too many.

        Raises:
            WriteError: The file system refuses.
        """
        latest = self.folder / "latest"
        with writing(f"writing {latest}", latest):
            self.remove_leftovers()
            draft = self.folder / ".latest.new"
            draft.unlink(missing_ok=True)
            draft.symlink_to(self.path(number).name)
            draft.replace(latest)
            sync(self.folder)
            others = sorted(set(self._numbers()) - {number})
            for old in others[: max(0, len(others) - self._keep + 1)]:
                removed = partial_path(self.path(old), "old")
                self.path(old).rename(removed)  # first, so that none is there in part
                shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left of others that they made or removed."""
        _remove_leftovers(self.folder, f"{glob.escape(self._name)}-*")

    def _numbers(self) -> list[int]:
        found = (path.name.removeprefix(f"{self._name}-") for path in self.folder.glob(f"{self._name}-*"))
        return [int(number) for number in found if number.isdecimal()]


def partial_path(out: Path, token: str) -> Path:
    """Return the path at which ``out`` is made."""
    return out.parent / f".{out.name}.{token}.part"


def check_free(out: Path) -> None:
    """Raise unless a directory can appear at ``out`` without replacing anything.

    Raises:
        CheckpointError: Something is there.
    """
    link = out.is_symlink()  # also to an empty directory: what is renamed does not replace a link
    if not link and out.is_dir() and not any(out.iterdir()):
        return
    if link or out.exists():
        what = "is a symbolic link" if link else "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"{out} exists and {what}; wanted a new directory: name another")


def publish_directory(source: Path, out: Path, token: str) -> None:
    """Publish a saved model at ``source`` as ``out``, too.

    Weights become hard links where the file system allows it, and copies elsewhere; small files are
    copied, so that they may be edited.

    Raises:
        CheckpointError: ``source`` holds no whole model, or ``out`` is not free.
        WriteError: The drive refuses.
    """
    _check_whole(source)
    with Publication(out, token) as publication:
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            target = publication.path / path.relative_to(source)
            with writing(f"writing {target}", target):
                target.parent.mkdir(exist_ok=True)
                if path.suffix != ".safetensors" or not _linked(path, target):
                    shutil.copyfile(path, target)
        publication.publish()


def tokenizer_files(source: Path) -> list[Path]:
    """The files in ``source`` that belong to a tokenizer or processor; ``source`` itself if it is a file."""
    if source.is_file():
        return [source]
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy a tokenizer's files without running anything of it.

    Args:
        source: A directory, or a ``tokenizer.json``.

    Raises:
        CheckpointError: There are none.
        WriteError: The drive refuses.
    """
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


def _check_whole(source: Path) -> None:
    adapter = (source / "adapter_config.json").is_file()
    for name in ("adapter_model.safetensors",) if adapter else ("config.json",):
        if not (source / name).is_file():
            raise CheckpointError(f"{source} holds no {name}, so it is no saved model")
    if not adapter:
        Checkpoint(source).close()  # every file is there, and as long as it says


def _linked(path: Path, target: Path) -> bool:
    """Return whether ``target`` is now another name of the file at ``path``."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        return False  # another file system, or one without hard links
    return True


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed exports to names of this pattern left; those that still run hold their locks."""
    for path in folder.glob(f".{pattern}.*.part"):
        with suppress(OSError):
            lock = open_locked(path, _DIRECTORY, patience_s=0)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


#: Values in one file of a directory, at most (bytes).
MAX_SHARD_NBYTES = 5 * 10**9

#: Called with a function that says whether elements ``[start, stop)`` of a unit's flat buffer are needed at
#: all. Yields this rank's newest weights, unit by unit, ascending: the unit, where the piece begins in its
#: flat buffer (elements), and the values, on the CPU, which stay until the next piece is asked for.
ReadWeights: TypeAlias = Callable[[Callable[[Unit, int, int], bool]], Iterator[tuple[Unit, int, Tensor]]]
#: Gives a context inside which parameters hold their full values. Every rank must enter.
Gathered: TypeAlias = Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]


# --- the plan: which tensor goes where, decided before the first byte moves ---------------------------


class FilePosition(NamedTuple):
    """The position of values: a file by number, and the first byte in it."""

    file: int
    start: int


class SavedRange(NamedTuple):
    """Elements ``[offset, stop)`` of a unit's flat buffer, or of a whole tensor, and where they belong."""

    offset: int
    stop: int
    place: FilePosition


@dataclass(frozen=True, slots=True)
class ConversionGroup:
    """Tensors that are converted together, by the model's own names, and those that are made of them."""

    sources: frozenset[str]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The plan by which the tensors of one unit are saved.

    Attributes:
        spans: Ranges of its flat buffer that are written as they are, ascending.
        members: Names of its tensors that are converted.
        groups: Groups of which it holds the last member.
    """

    spans: tuple[SavedRange, ...]
    members: tuple[str, ...]
    groups: tuple[ConversionGroup, ...]

    def within(self, start: int, stop: int) -> tuple[SavedRange, ...]:
        """The spans that elements ``[start, stop)`` of the flat buffer meet; spans meet no other span."""
        first = bisect_right(self.spans, start, key=lambda span: span.stop)
        return self.spans[first : bisect_left(self.spans, stop, key=lambda span: span.offset)]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The place of each tensor in the files; the same on every rank.

    Attributes:
        places: Positions by key.
        units: A plan for each unit of the model.
        whole: Ranges, by name, of tensors that every rank has whole.
        groups: Groups without a member in any unit.
    """

    files: tuple[FilePlan, ...]
    places: Mapping[str, FilePosition]
    units: tuple[UnitPlan, ...]
    whole: Mapping[str, tuple[SavedRange, ...]]
    groups: tuple[ConversionGroup, ...]

    @property
    def values_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes - len(file.header) for file in self.files)


class _Location(NamedTuple):
    """The location of elements ``[first, stop)`` of a tensor: a unit, or (-1) whole on every rank.

    Attributes:
        offset: The offset of the first one in the unit's flat buffer.
    """

    unit: int = -1
    offset: int = 0
    first: int = 0
    stop: int = 0


def plan_export(
    model: nn.Module, named: Mapping[str, Tensor], units: Sequence[Unit], max_shard_nbytes: int
) -> ExportPlan:
    """Plan the files of ``model``, in the order in which its values come from the drive.

    Args:
        named: The model's tensors by its own names.
        units: Units with its sharded parameters; its other tensors are whole on every rank.
        max_shard_nbytes: Values in one file, at most.

    Raises:
        CheckpointError: The model cannot be saved.
    """
    tiles: dict[int, list[_Location]] = {}  # in order, by id of the parameter
    for unit in units:
        for s in unit.segments:
            home = _Location(unit.index, s.offset, s.first, s.first + s.numel)
            tiles.setdefault(id(s.whole), []).append(home)
    places_of = {
        name: tiles.get(id(tensor), [_Location(stop=tensor.numel())]) for name, tensor in named.items()
    }
    homes = {name: found[-1] for name, found in places_of.items()}
    saved = sorted(saved_tensors(model, named), key=lambda item: max(homes[name] for name in item.sources))
    files = plan_files([item.spec for item in saved], max_shard_nbytes)
    places = {
        key: FilePosition(i, start) for i, file in enumerate(files) for key, start in file.starts.items()
    }

    spans: list[list[SavedRange]] = [[] for _ in units]
    whole: dict[str, list[SavedRange]] = {}
    for item in saved:
        place = places[item.spec.key]
        for part in item.parts or ():
            for home in places_of[part.source]:
                low, high = max(part.offset, home.first), min(part.offset + part.numel, home.stop)
                if low >= high:
                    continue
                target = whole.setdefault(part.source, []) if home.unit < 0 else spans[home.unit]
                begin = place.start + (part.start + low - part.offset) * item.spec.dtype.itemsize
                shift = home.offset - home.first
                target.append(SavedRange(low + shift, high + shift, FilePosition(place.file, begin)))
    members, groups = _conversions(saved, homes, len(units))
    of_units = zip(spans, members[:-1], groups[:-1], strict=True)
    plans = (UnitPlan(tuple(sorted(s)), tuple(m), tuple(g)) for s, m, g in of_units)
    return ExportPlan(files, places, tuple(plans), {n: tuple(s) for n, s in whole.items()}, tuple(groups[-1]))


def _conversions(
    saved: Sequence[SavedTensor], homes: Mapping[str, _Location], units: int
) -> tuple[list[list[str]], list[list[ConversionGroup]]]:
    """For each unit, and then for whole tensors: the members of conversions, and those that end there."""
    members: list[list[str]] = [[] for _ in range(units + 1)]
    groups: list[list[ConversionGroup]] = [[] for _ in members]
    specs: dict[frozenset[str], list[TensorSpec]] = {}
    for item in saved:
        if item.parts is None:
            specs.setdefault(item.sources, []).append(item.spec)
    for sources, made in specs.items():
        groups[max(homes[name] for name in sources).unit].append(ConversionGroup(sources, tuple(made)))
        for name in sorted(sources):
            members[homes[name].unit].append(name)
    return members, groups


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
    """Write ``model`` to ``out``; see :func:`infinity.export`. Every rank must call.

    Args:
        units: Units with the model's sharded parameters.
        read_weights: Reads this rank's shards.
        gathered: Gathers parameters for conversions.
        ranks: The ranks that share the model.
    """
    out, token = agree_on_place(out, ranks)
    folder = partial_path(out, token)
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"planning {out}"):
            named = dict(named_targets(model))
            plan = plan_export(model, named, units, max_shard_nbytes)
            if ranks.rank == 0:
                publication = stack.enter_context(Publication(out, token))
                check_room(folder, sum(file.nbytes for file in plan.files))
                _write_companions(model, plan, folder, tokenizer)
                for file in plan.files:
                    OutputFile.create(folder, file)
        with _ValueWriter(plan, named, model, ranks) as values:
            with all_ranks_or_raise(ranks, f"writing {out}"):
                values.open(folder)
                values.write_as_they_are(read_weights)
            values.write_converted(units, gathered)
            with all_ranks_or_raise(ranks, f"writing {out}"):
                values.finish()
            values.check_whole()
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if ranks.rank == 0:
                publication.publish()


def agree_on_place(out: Path, ranks: Ranks, what: str = "an export") -> tuple[Path, str]:
    """Rank 0's ``out``, absolute, and a token for the directory in which it is made. Every rank must call."""
    text = json.dumps([str(out.absolute()), secrets.token_hex(4)])
    place, token = json.loads(agree(text, ranks.world_size, f"agreeing on the directory of {what}"))
    return Path(place), token


def require_visible(folder: Path, rank: int, verb: str) -> None:
    """Raise if ``rank`` does not see the directory that rank 0 has made.

    Raises:
        CheckpointError: It lies on a file system of rank 0 alone.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {folder}, which rank 0 has just made; {verb} to a directory on a file "
            "system that every rank sees"
        )


class _ValueWriter:
    """Brings values to their places; a context manager."""

    def __init__(self, plan: ExportPlan, named: Mapping[str, Tensor], model: nn.Module, ranks: Ranks) -> None:
        self._plan, self._named, self._model, self._ranks = plan, named, model, ranks
        self._writer = RangeWriter()
        self._files: list[OutputFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.__exit__(*exc)

    def open(self, folder: Path) -> None:
        require_visible(folder, self._ranks.rank, "export")
        self._files = [self._writer.open(folder / plan.name) for plan in self._plan.files]

    def write_as_they_are(self, read_weights: ReadWeights) -> None:
        """Write what needs no conversion: this rank's shards; on rank 0 tensors that are whole, too.

        Raises:
            DiskError: A read or a write failed.
        """
        for name, spans in self._plan.whole.items() if self._ranks.rank == 0 else ():
            values = self._named[name].detach().cpu().contiguous().reshape(-1)
            for span in spans:
                self._write(span.place, 0, values[span.offset : span.stop])
        for unit, start, values in read_weights(self._is_wanted):
            for span in self._plan.units[unit.index].within(start, start + len(values)):
                low, high = max(start, span.offset), min(start + len(values), span.stop)
                self._write(span.place, low - span.offset, values[low - start : high - start])
            self._writer.check()

    def _is_wanted(self, unit: Unit, start: int, stop: int) -> bool:
        return bool(self._plan.units[unit.index].within(start, stop))

    def write_converted(self, units: Sequence[Unit], gathered: Gathered) -> None:
        """Write what transformers converts, unit by unit; members of groups that end later are kept aside.

        Raises:
            DiskError: A write failed.
            PeerError: The same on another rank.
        """
        aside: dict[str, Tensor] = {}
        for group in self._plan.groups:
            self._convert(group, aside)
        for unit, plan in zip(units, self._plan.units, strict=True):
            if not plan.members:
                continue
            with all_ranks_or_raise(self._ranks, f"converting {unit.name}"):
                params = [self._named[name] for name in plan.members]
                with gathered(params):
                    here = {n: p.detach().cpu() for n, p in zip(plan.members, params, strict=True)}
                    for group in plan.groups:
                        self._convert(group, aside | here)
                    done = {name for group in plan.groups for name in group.sources}
                    aside |= {name: value.clone() for name, value in here.items()}
                    aside = {name: value for name, value in aside.items() if name not in done}
                self._writer.check()

    def _convert(self, group: ConversionGroup, values: Mapping[str, Tensor]) -> None:
        """Write this rank's part of what comes of ``group``."""
        rank, ranks = self._ranks.rank, self._ranks.world_size
        sources = {n: values[n] if n in values else self._named[n].detach().cpu() for n in group.sources}
        for key, value in converted(self._model, sources, group.specs).items():
            flat = value.contiguous().reshape(-1)
            start, stop = len(flat) * rank // ranks, len(flat) * (rank + 1) // ranks
            self._write(self._plan.places[key], start, flat[start:stop])

    def _write(self, place: FilePosition, start: int, values: Tensor) -> None:
        """Hand over ``values`` for the elements of a tensor from ``start`` on."""
        self._writer.write(self._files[place.file], place.start + start * values.itemsize, values)

    def finish(self) -> None:
        """Return when what this rank wrote is on the drive.

        Raises:
            WriteError: It is not.
        """
        self._writer.finish()

    def check_whole(self) -> None:
        """Every byte was written by some rank, and once. Every rank must call."""
        wanted = self._plan.values_nbytes
        written = int(self._ranks.sum(self._writer.nbytes, "bytes that were exported"))
        assert written == wanted, f"{written} bytes of values were written; the files hold {wanted}"


def _write_companions(model: nn.Module, plan: ExportPlan, folder: Path, tokenizer: Any) -> None:
    """Index, configs and tokenizer."""
    with writing(f"writing to {folder}", folder):
        if len(plan.files) > 1:
            numel = sum(p.numel() for p in model.parameters())
            index = {
                "metadata": {"total_parameters": numel, "total_size": plan.values_nbytes},
                "weight_map": {key: plan.files[place.file].name for key, place in plan.places.items()},
            }
            (folder / (SAFETENSORS + INDEX)).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        _write_config(model, folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        elif tokenizer is not None:
            copy_tokenizer(Path(tokenizer).expanduser(), folder)


def _write_config(model: Any, folder: Path) -> None:
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
