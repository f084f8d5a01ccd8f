"""Portable checkpoints, out: directories of ``torch.distributed.checkpoint``, streamed from shards.

[Note: names]
Weights have the plain model's names, without a prefix, as torchtitan has them; the optimizer's entries begin
with ``optimizer.``, as ``get_optimizer_state_dict`` gives them. That function has two forms of parameter
groups: a list, and (``flatten_optimizer_state_dict``, torchtitan) every number once for each parameter. Both
are written, since entries of equal value share their bytes. So do the names of a tied weight.

[Note: which rank writes what]
Each rank writes one file, and in it what its shards hold: ranges of a parameter's elements, cut into boxes,
because the format knows no others. Nothing is gathered. Rank 0 writes the rest: buffers, step counts, the
optimizer's numbers, and last the metadata, for which the ranks send it what they wrote, and where.

[Note: the writer]
torch's own ``FileSystemWriter`` keeps every tensor of a file until the file is complete, hence all of the
state. The records here are torch's (``torch.save``, one after the other); they are copied into blocks that
threads write past the page cache. So memory holds one box of each field, and those blocks.
"""

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

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

from infinity.checkpoint.distcp import METADATA
from infinity.checkpoint.export import Publication, agree_on_place, partial_path, require_visible
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.writer import RangeWriter, TensorSpec, check_room, reserve, writing
from infinity.comm.ranks import Ranks, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError
from infinity.core.intervals import Box, boxes
from infinity.core.transfer import Transfer
from infinity.partition.unit import Segment, Unit

#: Elements of one record, at most.
BOX_NUMEL = 4 * 2**20
#: What torch.save adds to the values of a record, at most (bytes).
_AROUND_NBYTES = 2048
OPTIMIZER = "optimizer"

#: Yields exact weights and moments of this rank's shard of a unit, fp32, on the CPU, chunk by chunk in
#: ascending order: the first element in the shard, and the fields, which stay until the next chunk is
#: asked for.
ReadFields: TypeAlias = Callable[[Unit], Generator[tuple[int, tuple[Tensor, ...]]]]
#: Where a value is in nested dictionaries and lists; its key has the items joined by dots.
Place: TypeAlias = tuple[str | int, ...]


class Record(NamedTuple):
    """A record: one value in a rank's file.

    Attributes:
        keys: Entries of the checkpoint that have this value.
        box: The box of their tensor; None: the value is no tensor.
        start: First byte in the file.
    """

    keys: tuple[str, ...]
    box: Box | None
    start: int
    nbytes: int


class Contents:
    """The contents of a checkpoint of one model, the same on every rank.

    Args:
        model: Whose.
        units: Units with its sharded parameters; its other tensors are whole on every rank.
        groups: The optimizer's ``param_groups``; none: only weights are saved.
        extra: Further values of the optimizer, by path.

    Attributes:
        units: The same.
        tensors: Tensors by key.
        paths: The path of every key.
        whole: Tensors that rank 0 writes, with their keys.
        objects: Values that are no tensors, with their keys; rank 0 writes them.

    Raises:
        CheckpointError: Two values have one key.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], groups: Sequence[Mapping[str, Any]],
        extra: Mapping[Place, Any], moments: Sequence[str],
    ) -> None:  # fmt: skip
        self.tensors: dict[str, TensorSpec] = {}
        self.paths: dict[str, Place] = {}
        self.whole: list[tuple[Tensor, tuple[str, ...]]] = []
        self.objects: list[tuple[Any, tuple[str, ...]]] = []
        self.units = units
        self._weights: dict[int, tuple[str, ...]] = {}  # keys by id of the parameter
        self._moments: dict[int, tuple[tuple[str, ...], ...]] = {}
        sharded = {id(s.whole): s for unit in units for s in unit.segments}
        names = tensor_names(model)
        for tensor, (first, *others) in names:
            exact = id(tensor) in sharded
            dtype = torch.float32 if exact else tensor.dtype
            self._weights[id(tensor)] = self._add_tensor(
                dtype, tensor.shape, *((n,) for n in (first, *others))
            )
            if not exact:
                self.whole.append((tensor, self._weights[id(tensor)]))
        name_of = {id(tensor): first for tensor, (first, *_) in names}
        trained = [s for g in groups for p in g["params"] if (s := sharded.get(id(p)))]
        self._add_state(trained, name_of, moments)
        for index, group in enumerate(groups):
            self._add_group(index, group, [name_of[id(p)] for p in group["params"] if id(p) in name_of])
        for path, value in extra.items():
            self._add_object(value, (OPTIMIZER, *path))
        for segment in sharded.values():
            if not segment.numel:  # no shard has a part of it
                self.whole += [
                    (torch.empty(segment.shape, device="cpu"), keys) for keys in self.keys(segment)
                ]

    def keys(self, segment: Segment) -> list[tuple[str, ...]]:
        """The keys of a parameter's exact weight and, if it has an optimizer's state, of its moments."""
        if id(segment.whole) not in self._weights:  # the model is a part of another
            return []
        return [self._weights[id(segment.whole)], *self._moments.get(id(segment.whole), ())]

    def _add_state(
        self, segments: Sequence[Segment], name_of: Mapping[int, str], moments: Sequence[str]
    ) -> None:
        """Add moments and step counts of what is trained now, or was."""
        steps: dict[int, list[Place]] = {}
        for segment in segments:
            if id(segment.whole) in name_of and (segment.whole.requires_grad or segment.steps):
                path = OPTIMIZER, "state", name_of[id(segment.whole)]
                self._moments[id(segment.whole)] = tuple(
                    self._add_tensor(torch.float32, segment.whole_shape, (*path, moment))
                    for moment in moments
                )
                steps.setdefault(segment.steps, []).append((*path, "step"))
        for count, paths in steps.items():
            step = torch.tensor(float(count), device="cpu")
            self.whole.append((step, self._add_tensor(step.dtype, step.shape, *paths)))

    def _add_group(self, index: int, group: Mapping[str, Any], names: list[str]) -> None:
        """Add the numbers of a parameter group, in both forms: see [Note: names]."""
        usual = torch.optim.AdamW([torch.zeros(1, device="cpu")]).param_groups[0]
        numbers = {**usual, "initial_lr": group["lr"], **group}
        del numbers["params"]
        groups = "param_groups"
        for name, value in numbers.items():
            value = value.item() if isinstance(value, Tensor) else value
            flat = ((OPTIMIZER, f"{groups}.{each}.{name}") for each in names)
            self._add_object(value, (OPTIMIZER, groups, index, name), *flat)
        self._add_object(names, (OPTIMIZER, groups, index, "params"))

    def _add_tensor(self, dtype: torch.dtype, shape: torch.Size, *paths: Place) -> tuple[str, ...]:
        keys = self._add_keys(paths)
        self.tensors.update((key, TensorSpec(key, dtype, tuple(shape))) for key in keys)
        return keys

    def _add_object(self, value: Any, *paths: Place) -> None:
        self.objects.append((value, self._add_keys(paths)))

    def _add_keys(self, paths: Sequence[Place]) -> tuple[str, ...]:
        keys = tuple(".".join(map(str, path)) for path in paths)
        for key, path in zip(keys, paths, strict=True):
            if key in self.paths:
                raise CheckpointError(
                    f"the checkpoint would have two values called {key}: rename the parameter or module of "
                    f"that name ({OPTIMIZER}. begins the entries of the optimizer)"
                )
            self.paths[key] = path
        return keys

    # --- what one rank writes ----------------------------------------------------------------

    def copy_whole(self) -> None:
        """Let ``whole`` be as it is now, whatever training writes."""
        self.whole = [(tensor.detach().clone(), keys) for tensor, keys in self.whole]

    def shard_boxes(self, unit: Unit) -> Iterator[tuple[Segment, Box, int]]:
        """Cut this rank's shard: the parameter, a box of it, and its first element in the shard."""
        low, high = unit.shard_start, unit.shard_start + unit.shard_numel
        for segment in filter(self.keys, unit.segments):
            start, stop = max(low, segment.offset), min(high, segment.stop)
            shift = segment.first - segment.offset
            for box in boxes(segment.whole_shape, start + shift, stop + shift, BOX_NUMEL):
                yield segment, box, start - low
                start += box.numel

    def nbytes(self, rank: int) -> int:
        """Bytes that the file of this rank takes, roughly."""
        found = [
            box.numel * torch.float32.itemsize
            for unit in self.units
            for segment, box, _ in self.shard_boxes(unit)
            for _ in self.keys(segment)
        ]
        if rank == 0:
            found += [tensor.nbytes for tensor, _ in self.whole] + [0 for _ in self.objects]
        return sum(found) + len(found) * _AROUND_NBYTES


def tensor_names(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Parameters and persistent buffers, each with its names; an optimizer's state has the first."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named_targets(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


class _Work:
    """Pieces of work, one after the other, each on a thread of its own if training goes on beside.

    Attributes:
        transfer: Ends with the piece that was started last.
    """

    def __init__(self) -> None:
        self.transfer, self.beside = Transfer(), False
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work``, or begin to."""
        self.transfer = Transfer()
        if not self.beside:
            self.transfer.run(work)
            return
        thread = threading.Thread(target=self.transfer.run, args=(work,), name="infinity-save")
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Return when no thread runs."""
        for thread in self._threads:
            thread.join()


class PortableSave:
    """A portable checkpoint on its way; see :func:`infinity.save_checkpoint`. Every rank must make one.

    [Note: a save beside training]
    A thread of each rank writes the rank's own file, then one of rank 0 publishes the directory. Collectives
    are left to the threads that train: in :meth:`advance`, which goes from the one to the other.

    Args:
        units: Units with the model's sharded parameters.
        groups: The optimizer's ``param_groups``; none: only weights are saved.
        extra: Further values of the optimizer, by path.
        ranks: The ranks that share the model.
        moments: Names of the fields that the update rule keeps of each parameter.

    Attributes:
        out: The directory that is made.
        ended: It is published, or has failed.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], out: Path, *, groups: Sequence[Mapping[str, Any]],
        extra: Mapping[Place, Any], ranks: Ranks, moments: Sequence[str],
    ) -> None:  # fmt: skip
        self.out, self._token = agree_on_place(out, ranks, "a checkpoint")
        self._ranks = ranks
        self._publication: Publication | None = None  # on rank 0
        self._records: list[Record] = []
        self._work = _Work()
        self._then: Callable[[], object] = lambda: None
        self._publishing = self.ended = False
        with contextlib.ExitStack() as stack:
            with all_ranks_or_raise(ranks, f"planning {self.out}"):
                self._contents = Contents(model, units, groups, extra, moments)
                if ranks.rank == 0:
                    self._publication = stack.enter_context(Publication(self.out, self._token))
            needed = int(ranks.sum(self._contents.nbytes(ranks.rank), f"bytes of {self.out}"))
            # all look before one takes its part
            with all_ranks_or_raise(ranks, f"making room for {self.out}"):
                require_visible(self._folder, ranks.rank, "save")
                check_room(self._folder, needed)
            stack.callback(self._work.join)
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
            read_fields: Reads this rank's shards, one unit after the other.
            beside: Write on a thread, while training goes on.
            end: Called when no shard is read any more, however that ends.
            then: Called on rank 0 when the directory is published, on the same thread.
        """
        self._work.beside, self._then = beside, then
        self._stack.callback(end)
        if beside:
            self._contents.copy_whole()
        self._work.start(partial(self._write, read_fields, end))

    @property
    def done(self) -> bool:
        """Return whether :meth:`advance` would not wait for this rank."""
        return self._work.transfer.done()

    def advance(self) -> bool:
        """Wait for what runs, then start what comes next. Every rank must call, between two steps.

        Returns:
            True: the checkpoint is published, and there is nothing more to do.

        Raises:
            DiskError: A drive failed or is full; nothing stays of the checkpoint. Likewise on every error.
            PeerError: The same on another rank.
        """
        try:
            what = "publishing" if self._publishing else "writing"
            with all_ranks_or_raise(self._ranks, f"{what} {self.out}"):
                self._work.transfer.wait()
            if not self._publishing:
                self._publishing = True
                written = gather(self._records, self._ranks, f"the list of what is in {self.out}")
                if self._ranks.rank == 0:
                    self._work.start(partial(self._publish, written))
                return False
        except BaseException:
            self.close()
            raise
        self.close()
        return True

    def wait(self) -> None:
        """Return when the checkpoint is published. Every rank must call, between two steps.

        Raises:
            DiskError: See :meth:`advance`; likewise PeerError.
        """
        while not self.ended and not self.advance():
            pass

    def close(self) -> None:
        """Remove what was not published, and let nothing run any more. May be called twice."""
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
            if rank == 0:
                for tensor, keys in contents.whole:
                    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                    file.add(keys, Box((0,) * tensor.ndim, tuple(tensor.shape)), values)
                for value, keys in contents.objects:
                    file.add(keys, None, value)
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
    """Write what this rank's shard of ``unit`` holds.

    Raises:
        DiskError: A read or a write failed.
    """
    with contextlib.closing(read_fields(unit)) as chunks:
        shard = _ShardReader(chunks)
        for segment, box, start in contents.shard_boxes(unit):
            keys = contents.keys(segment)
            values = shard.read(start, box.numel, len(keys))
            while values:  # one after the other, so that no two boxes are in memory
                file.add(keys[-len(values)], box, values.pop(0).view(box.sizes))
            file.check()


class _ShardReader:
    """Ranges of a shard, in ascending order, from the chunks in which it is read."""

    def __init__(self, chunks: Iterator[tuple[int, tuple[Tensor, ...]]]) -> None:
        self._chunks = chunks
        self._start, self._fields = 0, tuple[Tensor, ...]((torch.empty(0, device="cpu"),))

    def read(self, start: int, numel: int, fields: int) -> list[Tensor]:
        """Return the first ``fields`` fields of elements from ``start`` on, in memory of their own."""
        values, done = [torch.empty(numel, device="cpu") for _ in range(fields)], 0
        while done < numel:
            while start + done >= self._start + len(self._fields[0]):
                self._start, self._fields = next(self._chunks)
            low = start + done - self._start
            taken = min(numel - done, len(self._fields[0]) - low)
            for value, field in zip(values, self._fields, strict=False):
                value[done : done + taken] = field[low : low + taken]
            done += taken
        return values


class _DataFile:
    """A rank's file while it is written: records of torch.save, end to end; a context manager.

    Args:
        nbytes: Room that is set aside for it.

    Attributes:
        records: The records that were written so far.
    """

    def __init__(self, folder: Path, rank: int, nbytes: int) -> None:
        self.records: list[Record] = []
        self._path, self._nbytes = folder / file_name(rank), 0
        with writing(f"making {self._path}", self._path, nbytes), self._path.open("xb") as file:
            reserve(file.fileno(), nbytes)
        self._writer = RangeWriter()
        self._file = self._writer.open(self._path)  # no thread runs before the first range

    def add(self, keys: tuple[str, ...], box: Box | None, value: Any) -> None:
        """Write a value; a tensor owns all its memory. Raises nothing about the disk: see :meth:`check`."""
        start = self._nbytes
        torch.save(value, self)  # type: ignore[arg-type]
        self.records.append(Record(keys, box, start, self._nbytes - start))

    def write(self, data: Any) -> int:
        """Take bytes of torch.save."""
        flat = np.frombuffer(data, dtype=np.uint8)
        self._writer.write_bytes(self._file, self._nbytes, flat)
        self._nbytes += len(flat)
        return len(flat)

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""

    def check(self) -> None:
        """Raise the first error so far.

        Raises:
            WriteError: Something could not be written.
        """
        self._writer.check()

    def finish(self) -> None:
        """Return when everything is on the drive.

        Raises:
            WriteError: It is not.
        """
        self._writer.flush()
        with writing(f"writing {self._path}", self._path):
            os.truncate(self._path, self._nbytes)
        self._writer.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.__exit__()


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0.distcp"


def _metadata(contents: Contents, written: Sequence[Sequence[Record]], token: str) -> Metadata:
    """Describe all that the ranks have written, as torch does."""
    found: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for rank, records in enumerate(written):
        for record in records:
            info = _StorageInfo(file_name(rank), record.start, record.nbytes)
            for key in record.keys:
                if record.box is None:
                    found[key] = BytesStorageMetadata()
                    storage[MetadataIndex(key)] = info
                    continue
                spec = contents.tensors[key]
                properties = TensorProperties(dtype=spec.dtype)
                entry = found.setdefault(key, TensorStorageMetadata(properties, torch.Size(spec.shape), []))
                index = MetadataIndex(key, record.box.offsets, len(entry.chunks))
                storage[index] = info
                entry.chunks.append(
                    ChunkStorageMetadata(torch.Size(record.box.offsets), torch.Size(record.box.sizes))
                )
    for key, spec in contents.tensors.items():
        numel = sum(chunk.sizes.numel() for chunk in found[key].chunks)
        assert numel == torch.Size(spec.shape).numel(), (
            f"{key}: {numel} elements of {spec.shape} were written"
        )
    return Metadata(found, contents.paths, storage, StorageMeta(save_id=token), CURRENT_DCP_VERSION)
