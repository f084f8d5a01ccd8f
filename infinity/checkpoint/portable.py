"""Saves and loads portable checkpoints: directories of ``torch.distributed.checkpoint``, streamed.

[Note: names]
Weights have the plain model's names, without a prefix, as in torchtitan; the optimizer's entries begin with
``optimizer.``, as ``get_optimizer_state_dict`` gives them. That function has two forms of parameter groups: a
list, and (``flatten_optimizer_state_dict``, torchtitan) every number once for each parameter. Both are
written, and so are all names of a tied weight, since entries of equal value share their bytes.

[Note: a rank's file]
Each rank writes one file with what its shards hold: ranges of a parameter's elements, cut into boxes, the
only form that the format knows. Nothing is gathered. Rank 0 writes the rest: buffers, step counts, the
optimizer's numbers, and last the metadata, for which the ranks send it what they wrote, and where.

[Note: the writer]
torch's own ``FileSystemWriter`` keeps every tensor of a file until the file is complete. Here ``torch.save``
writes record after record into blocks that threads write past the page cache. So memory holds one box of each
field, and those blocks.

[Note: a save beside training]
A thread of each rank writes the rank's own file, then one of rank 0 publishes the directory. Collectives are
left to the threads that train: :meth:`PortableSave.advance` runs them between the two.
"""

import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from infinity.checkpoint.directory import Stored
from infinity.checkpoint.distcp import METADATA, DistributedCheckpoint
from infinity.checkpoint.export import Publication, agree_on_place, partial_path, require_visible
from infinity.checkpoint.load import named_targets, read_whole
from infinity.checkpoint.writer import RangeWriter, TensorSpec, check_room, reserve, writing
from infinity.comm.ranks import Ranks, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError, StateError, library_errors
from infinity.core.nbytes import Box, Transfer, boxes
from infinity.partition.unit import Segment, Unit

#: The most elements of a record.
BOX_NUMEL = 4 * 2**20
#: The most that torch.save adds to the values of a record (bytes).
_AROUND_NBYTES = 2048
OPTIMIZER = "optimizer"
#: Names of the hyperparameters that are loaded.
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "initial_lr")

#: Yields exact weights and moments of this rank's shard of a unit, fp32, on the CPU, in ascending chunks: the
#: first element in the shard, and the fields, valid until the next chunk is asked for.
ReadFields: TypeAlias = Callable[[Unit], Generator[tuple[int, tuple[Tensor, ...]]]]
#: The path of a value in nested dictionaries and lists; its key joins the items with dots.
Place: TypeAlias = tuple[str | int, ...]
Keys: TypeAlias = tuple[str, ...]
#: A value in a rank's file: the keys that share it, its box of their tensor (None: no tensor), and its place.
Record: TypeAlias = tuple[Keys, Box | None, _StorageInfo]


class Contents:
    """Lists the values of a checkpoint of one model, the same on every rank.

    Args:
        units: Units with its sharded parameters; its other tensors are whole on every rank.
        groups: The optimizer's ``param_groups``; none: only weights are saved.
        extra: Further values of the optimizer, by path.
        moments: Names of the fields that the update rule keeps of each parameter.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], groups: Sequence[Mapping[str, Any]],
        extra: Mapping[Place, Any], moments: Sequence[str],
    ) -> None:  # fmt: skip
        self.tensors: dict[str, TensorSpec] = {}
        self.paths: dict[str, Place] = {}
        self.rest: list[tuple[Any, Keys]] = []  # what rank 0 writes: first tensors
        self.units = units
        self._fields: dict[int, list[Keys]] = {}  # keys of weight and moments, by id of the parameter
        sharded = {id(s.whole): s for unit in units for s in unit.segments}
        name_of: dict[int, str] = {}
        for tensor, names in tensor_names(model):
            name_of[id(tensor)], exact = names[0], id(tensor) in sharded
            keys = self._enter(
                [(name,) for name in names], torch.float32 if exact else tensor.dtype, tensor.shape
            )
            if exact:
                self._fields[id(tensor)] = [keys]
            else:
                self.rest.append((tensor, keys))
        steps: dict[int, list[Place]] = {}
        for param in (param for group in groups for param in group["params"]):
            segment = sharded.get(id(param)) if id(param) in name_of else None
            if segment is not None and (param.requires_grad or segment.steps):  # is trained now, or was
                state = OPTIMIZER, "state", name_of[id(param)]
                for moment in moments:
                    keys = self._enter([(*state, moment)], torch.float32, segment.whole_shape)
                    self._fields[id(param)].append(keys)
                steps.setdefault(segment.steps, []).append((*state, "step"))
        for count, paths in steps.items():
            step = torch.tensor(float(count), device="cpu")
            self.rest.append((step, self._enter(paths, step.dtype)))
        for index, group in enumerate(groups):
            self._add_group(index, group, [name_of[id(p)] for p in group["params"] if id(p) in name_of])
        self.rest += [(value, self._enter([(OPTIMIZER, *path)])) for path, value in extra.items()]
        for segment in sharded.values():
            if not segment.numel:  # no shard has a part of it
                self.rest += [(torch.empty(segment.shape, device="cpu"), each) for each in self.keys(segment)]
        self.rest.sort(key=lambda each: not isinstance(each[0], Tensor))

    def keys(self, segment: Segment) -> list[Keys]:
        """Return the keys of a parameter's weight and moments; empty if it is not the saved model's."""
        return self._fields.get(id(segment.whole), [])

    def _add_group(self, index: int, group: Mapping[str, Any], names: list[str]) -> None:
        """Add the numbers of a parameter group, in both forms of [Note: names]."""
        usual = torch.optim.AdamW([torch.zeros(1, device="cpu")]).param_groups[0]
        numbers = {**usual, "initial_lr": group["lr"], **group}
        del numbers["params"]
        groups = "param_groups"
        for name, value in numbers.items():
            value = value.item() if isinstance(value, Tensor) else value
            flat = ((OPTIMIZER, f"{groups}.{each}.{name}") for each in names)
            self.rest.append((value, self._enter([(OPTIMIZER, groups, index, name), *flat])))
        self.rest.append((names, self._enter([(OPTIMIZER, groups, index, "params")])))

    def _enter(
        self, paths: Sequence[Place], dtype: torch.dtype | None = None, shape: Sequence[int] = ()
    ) -> Keys:
        """Register a value under ``paths`` and return its keys; with a dtype it is a tensor."""
        keys = tuple(".".join(map(str, path)) for path in paths)
        for key, path in zip(keys, paths, strict=True):
            if key in self.paths:
                raise CheckpointError(
                    f"the checkpoint would have two values called {key}: rename the parameter or module of "
                    f"that name ({OPTIMIZER}. begins the entries of the optimizer)"
                )
            self.paths[key] = path
            if dtype is not None:
                self.tensors[key] = TensorSpec(key, dtype, tuple(shape))
        return keys

    def shard_boxes(self, unit: Unit) -> Iterator[tuple[Segment, Box, int]]:
        """Cut this rank's shard; yield the parameter, a box of it, and its first element in the shard."""
        low, high = unit.shard_start, unit.shard_start + unit.shard_numel
        for segment in filter(self.keys, unit.segments):
            start, stop = max(low, segment.offset), min(high, segment.stop)
            shift = segment.first - segment.offset
            for box in boxes(segment.whole_shape, start + shift, stop + shift, BOX_NUMEL):
                yield segment, box, start - low
                start += box.numel

    def nbytes(self, rank: int) -> int:
        found = [
            box.numel * torch.float32.itemsize
            for unit in self.units
            for segment, box, _ in self.shard_boxes(unit)
            for _ in self.keys(segment)
        ]
        if rank == 0:
            found += [value.nbytes if isinstance(value, Tensor) else 0 for value, _ in self.rest]
        return sum(found) + len(found) * _AROUND_NBYTES


def tensor_names(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return parameters and persistent buffers, each with its names; optimizer state uses the first."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named_targets(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


class PortableSave:
    """Writes a portable checkpoint; every rank must make one. See [Note: a save beside training]."""

    def __init__(self, out: Path, ranks: Ranks, plan: Callable[[], Contents]) -> None:
        self.out, self._token = agree_on_place(out, ranks, "a checkpoint")
        self._ranks = ranks
        self._publication: Publication | None = None  # on rank 0
        self._records: list[Record] = []
        self._running, self._threads = Transfer(), list[threading.Thread]()
        self._then: Callable[[], object] = lambda: None
        self._publishing = self.ended = False  # ended: published, or failed
        with contextlib.ExitStack() as stack:
            with all_ranks_or_raise(ranks, f"planning {self.out}"):
                self._contents = plan()
                if ranks.rank == 0:
                    self._publication = stack.enter_context(Publication(self.out, self._token))
            needed = int(ranks.sum(self._contents.nbytes(ranks.rank), f"bytes of {self.out}"))
            # all ranks check before one reserves its part
            with all_ranks_or_raise(ranks, f"making room for {self.out}"):
                require_visible(self._folder, ranks.rank, "save")
                check_room(self._folder, needed)
            stack.callback(self.join)
            self._stack = stack.pop_all()

    @property
    def _folder(self) -> Path:
        return partial_path(self.out, self._token)

    def start(
        self, read_fields: ReadFields, *, beside: bool = False, end: Callable[[], object] = lambda: None,
        then: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Write this rank's file.

        Args:
            beside: Write on a thread, while training goes on.
            end: Called when no shard is read any more, also after an error.
            then: Called on rank 0 when the directory is published, on the same thread.
        """
        self._then = then
        self._stack.callback(end)
        if beside:  # as it is now, whatever training writes
            rest = self._contents.rest
            self._contents.rest = [
                (value.detach().clone() if isinstance(value, Tensor) else value, keys) for value, keys in rest
            ]
        self._run(partial(self._write, read_fields, end), beside)

    def _run(self, work: Callable[[], None], beside: bool) -> None:
        running = self._running = Transfer()
        if not beside:
            running.run(work)
            return
        self._threads.append(threading.Thread(target=running.run, args=(work,), name="infinity-save"))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    @property
    def done(self) -> bool:
        return self._running.done()

    def advance(self) -> None:
        """Wait for what runs, then start what comes next. Every rank must call, between two steps.

        Raises:
            DiskError: A drive failed or is full; nothing stays of the checkpoint, as after every error.
            PeerError: The same on another rank.
        """
        try:
            what = "publishing" if self._publishing else "writing"
            with all_ranks_or_raise(self._ranks, f"{what} {self.out}"):
                self._running.wait()
            if not self._publishing:
                self._publishing = True
                written = gather(self._records, self._ranks, f"the list of what is in {self.out}")
                if self._ranks.rank == 0:
                    self._run(partial(self._publish, written), beside=bool(self._threads))
                return
        except BaseException:
            self.close()
            raise
        self.close()

    def wait(self) -> None:
        """Return when the checkpoint is published, or raise as :meth:`advance`. Every rank must call."""
        while not self.ended:
            self.advance()

    def close(self) -> None:
        """Wait for threads, and remove what was not published. May be called twice."""
        self.ended = True
        self._stack.close()

    def _write(self, read_fields: ReadFields, end: Callable[[], object]) -> None:
        contents, rank = self._contents, self._ranks.rank
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as reading:  # training may wait for its end, also if no file is made
                reading.callback(end)
                file = stack.enter_context(_DataFile(self._folder, rank, contents.nbytes(rank)))
                for unit in contents.units:
                    _write_unit(unit, contents, read_fields, file)
            for value, keys in contents.rest if rank == 0 else ():
                box = None
                if isinstance(value, Tensor):
                    value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
                    box = Box((0,) * value.ndim, tuple(value.shape))
                file.add(keys, box, value)
            file.finish()
        self._records = file.records

    def _publish(self, written: Sequence[Sequence[Record]]) -> None:
        path = self._folder / METADATA
        with writing(f"writing {path}", path):
            path.write_bytes(pickle.dumps(_metadata(self._contents, written, self._token)))
        assert self._publication is not None
        self._publication.publish()
        self._then()


def _write_unit(unit: Unit, contents: Contents, read_fields: ReadFields, file: "_DataFile") -> None:
    begin, fields = 0, tuple[Tensor, ...]((torch.empty(0, device="cpu"),))  # the chunk that was read last
    with contextlib.closing(read_fields(unit)) as chunks:
        for segment, box, start in contents.shard_boxes(unit):
            keys, done = contents.keys(segment), 0
            values = [torch.empty(box.numel, device="cpu") for _ in keys]
            while done < box.numel:
                while start + done >= begin + len(fields[0]):
                    begin, fields = next(chunks)
                low = start + done - begin
                taken = min(box.numel - done, len(fields[0]) - low)
                for value, field in zip(values, fields, strict=False):
                    value[done : done + taken] = field[low : low + taken]
                done += taken
            while values:  # one after the other, so that no two boxes are in memory
                file.add(keys[-len(values)], box, values.pop(0).view(box.sizes))
            file.writer.check()


class _DataFile(contextlib.AbstractContextManager["_DataFile"]):
    """Owns a rank's file while it is written, in ``nbytes`` of reserved room: records of torch.save."""

    def __init__(self, folder: Path, rank: int, nbytes: int) -> None:
        self.records: list[Record] = []
        self._path, self._nbytes = folder / f"__{rank}_0.distcp", 0
        with writing(f"making {self._path}", self._path, nbytes), self._path.open("xb") as file:
            reserve(file.fileno(), nbytes)
        self.writer = RangeWriter()
        self._file = self.writer.open(self._path)  # no thread runs before the first range

    def add(self, keys: Keys, box: Box | None, value: Any) -> None:
        """Write a value; a tensor must own all its memory. ``writer.check`` raises errors of the disk."""
        start = self._nbytes
        torch.save(value, self)  # type: ignore[arg-type]
        self.records.append((keys, box, _StorageInfo(self._path.name, start, self._nbytes - start)))

    def write(self, data: Any) -> int:
        flat = np.frombuffer(data, dtype=np.uint8)
        self.writer.write_bytes(self._file, self._nbytes, flat)
        self._nbytes += len(flat)
        return len(flat)

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""

    def finish(self) -> None:
        self.writer.flush()
        with writing(f"writing {self._path}", self._path):
            os.truncate(self._path, self._nbytes)
        self.writer.finish()

    def __exit__(self, *exc: object) -> None:
        self.writer.__exit__()


def _metadata(contents: Contents, written: Sequence[Sequence[Record]], token: str) -> Metadata:
    found: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for keys, box, info in itertools.chain(*written):
        for key in keys:
            if box is None:
                found[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = info
                continue
            spec = contents.tensors[key]
            properties = TensorProperties(dtype=spec.dtype)
            entry = found.setdefault(key, TensorStorageMetadata(properties, torch.Size(spec.shape), []))
            storage[MetadataIndex(key, box.offsets, len(entry.chunks))] = info
            entry.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    for key, spec in contents.tensors.items():
        numel = sum(chunk.sizes.numel() for chunk in found[key].chunks)
        assert numel == torch.Size(spec.shape).numel(), (
            f"{key}: {numel} elements of {spec.shape} were written"
        )
    return Metadata(found, contents.paths, storage, StorageMeta(save_id=token), CURRENT_DCP_VERSION)


# --- in ----------------------------------------------------------------------------------------------


class PortableValues:
    """Matches a checkpoint with a model and its optimizer, and then reads values.

    The model's names are looked for behind any prefix that all of them share (``model.``). The checkpoint
    stays open while values are read; for ``groups`` and ``moments`` see :class:`Contents`.

    Raises:
        CheckpointError: Weights are missing, left over or of another shape; lists all of them.
        StateError: The model is only a part of the one that was built.
    """

    def __init__(
        self, checkpoint: DistributedCheckpoint, model: nn.Module, units: Sequence[Unit],
        groups: Sequence[Mapping[str, Any]], moments: Sequence[str],
    ) -> None:  # fmt: skip
        self._moments = moments
        self._checkpoint = checkpoint
        self._named = tensor_names(model)
        self._sharded = {id(s.whole): s for unit in units for s in unit.segments}
        self._fields: dict[int, list[Stored]] = {}  # by id of the tensor: its values and moments
        self._complaints: list[str] = []
        self.steps: dict[int, int] = {}  # by id of the parameter; empty without an optimizer's state
        # the hyperparameters that the checkpoint has of each group
        self.numbers: list[dict[str, Any]] = [{} for _ in groups]
        given = {id(tensor) for tensor, _ in self._named}
        for unit in units:
            held = {id(s.whole) in given for s in unit.segments}
            if len(held) > 1:  # all of a unit is written at one time
                raise StateError(
                    f"{unit.name} has parameters of this model and others: give load_checkpoint the whole "
                    "model that was built under infinity.Init"
                )
        self._find_weights()
        self._find_state(groups)
        if self._complaints:
            lines = "\n  ".join(self._complaints)
            raise CheckpointError(
                f"{checkpoint.path} does not fit {type(model).__name__}:\n  {lines}\n"
                "Build the model that was saved; keys are its parameters' names, with or without a prefix"
            )

    def _find_weights(self) -> None:
        every = [name for _, names in self._named for name in names]
        prefix = _prefix(every, self._checkpoint)
        for tensor, names in self._named:
            found = [name for name in names if prefix + name in self._checkpoint]
            if found:
                self._take(tensor, prefix + found[0])
            else:
                self._complaints.append(f"missing: {prefix}{names[0]}")
        parts = tuple({f"{prefix}{name.partition('.')[0]}." for name in every})
        known = {prefix + name for name in every}
        for key in sorted(self._checkpoint.keys() - known):
            if key.startswith(parts):
                self._complaints.append(f"unknown to the model: {key}")

    def _take(self, tensor: Tensor, key: str) -> None:
        """Append an entry to the fields of ``tensor``: its values first, then its moments."""
        shape = tuple(self._checkpoint[key].shape)
        if shape != tuple(tensor.shape):
            self._complaints.append(f"{key} has shape {shape}, the model {tuple(tensor.shape)}")
        self._fields.setdefault(id(tensor), []).append(self._checkpoint[key])

    def _find_state(self, groups: Sequence[Mapping[str, Any]]) -> None:
        name_of = {id(tensor): names for tensor, names in self._named}
        members = [[(p, name_of[id(p)]) for p in group["params"] if id(p) in name_of] for group in groups]
        first = f".{self._moments[0]}"
        prefix = _prefix(
            [f"state.{name}{first}" for group in members for _, names in group for name in names],
            {key for key in self._checkpoint if key.endswith(first)},
        )
        numbers = _numbers(self._checkpoint, prefix)
        for group, found in zip(members, self.numbers, strict=True):
            for param, names in group:
                held = [name for name in names if f"{prefix}state.{name}{first}" in self._checkpoint]
                if not held or not param.requires_grad or id(param) not in self._sharded:
                    continue
                state = f"{prefix}state.{held[0]}."
                if missing := [m for m in self._moments if state + m not in self._checkpoint]:
                    self._complaints += [f"missing: {state}{moment}" for moment in missing]
                    continue
                for moment in self._moments:
                    self._take(param, state + moment)
                self.steps[id(param)] = self._count(state + "step")
                theirs = numbers.get(held[0], {})
                if any(name in found and found[name] != value for name, value in theirs.items()):
                    self._complaints.append(f"{held[0]} has other hyperparameters than its parameter group")
                found.update(theirs)

    def _count(self, key: str) -> int:
        value: Any = torch.zeros(1, device="cpu")
        if key in self._checkpoint.objects:
            value = self._checkpoint.value(key)
        elif key not in self._checkpoint:
            self._complaints.append(f"missing: {key}")
        elif self._checkpoint[key].shape.numel() == 1:
            self._checkpoint[key].fill(0, value)
        with library_errors(CheckpointError, f"{self._checkpoint.path}: {key} is no count of steps"):
            return max(0, int(value))

    def extra(self, *path: str) -> Any:
        """Return a further value of the optimizer, by its path; None: there is none."""
        key = ".".join((OPTIMIZER, *path))
        return self._checkpoint.value(key) if key in self._checkpoint.objects else None

    def moments(self, unit: Unit, start: int, stop: int) -> list[Tensor]:
        """Return elements of the unit's moments, which are zero where the checkpoint has none."""
        return [self.field(unit, 1 + moment, start, stop) for moment in range(len(self._moments))]

    def field(self, unit: Unit, field: int, start: int, stop: int) -> Tensor:
        """Return elements of the unit's flat buffer (field 0) or of a moment, fp32; gaps are zero."""
        out = torch.zeros(stop - start, device="cpu")
        for s in unit.segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            fields = self._fields.get(id(s.whole), ())
            if low < high and field < len(fields):
                fields[field].fill(s.first + low - s.offset, out[low - start : high - start])
        return out

    def holds(self, unit: Unit) -> bool:
        return any(id(s.whole) in self._fields for s in unit.segments)

    def fill_whole(self) -> None:
        with torch.no_grad():
            for tensor, _ in self._named:
                if id(tensor) not in self._sharded:
                    tensor.copy_(read_whole(self._fields[id(tensor)][0], tensor.dtype))


def _prefix(names: Sequence[str], keys: Collection[str]) -> str:
    """Return the prefix that most of ``names`` have among ``keys``; the shortest of several."""
    for name in names:
        found = {key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")}
        if found:  # all names have the same
            counts = {each: sum(each + name in keys for name in names) for each in sorted(found)}
            return min(counts, key=lambda each: (-counts[each], len(each)))
    return ""


def _numbers(checkpoint: DistributedCheckpoint, prefix: str) -> dict[str, dict[str, Any]]:
    """Return hyperparameters by name of the parameter, from either form of [Note: names]."""
    found: dict[str, dict[str, Any]] = {}
    groups = f"{prefix}param_groups."
    keys = [
        (key, *key.removeprefix(groups).rpartition("."))
        for key in checkpoint.objects
        if key.startswith(groups)
    ]
    listed: dict[str, list[str]] = {}
    for key, name, _, number in keys:
        if number == "params":
            names = checkpoint.value(key)
            listed[name] = names if isinstance(names, list) else []
    for key, name, _, number in keys:
        if number in _NUMBERS and (name in listed or not listed):
            value = checkpoint.value(key)
            for each in listed.get(name, [name]):
                found.setdefault(str(each), {})[number] = value
    return found
