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
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from infinity.api.optimizer import Optimizer
from infinity.checkpoint.directory import Stored, StoredPart
from infinity.checkpoint.distcp import METADATA, DistributedCheckpoint, common_prefix, numbers_of
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.writer import Publication, RangeWriter, TensorSpec, check_room, reserve, writing
from infinity.comm.ranks import Ranks, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError, StateError, library_errors
from infinity.core.files import user_path
from infinity.core.nbytes import Box, Transfer, boxes
from infinity.device.accelerator import trim_heap
from infinity.engine.runtime import Runtime, runtime_of
from infinity.optim.dictionaries import RULE, carried
from infinity.optim.rule import OFFSET
from infinity.optim.rules import find_rule
from infinity.partition.unit import Segment, Unit

#: The most elements of a record.
BOX_NUMEL = 4 * 2**20
#: The most that torch.save adds to the values of a record (bytes).
_AROUND_NBYTES = 2048
OPTIMIZER = "optimizer"

#: Yields exact weights and moments of this rank's shard of a unit, fp32, on the CPU, in ascending chunks: the
#: first element in the shard, and the fields, valid until the next chunk is asked for.
ReadFields: TypeAlias = Callable[[Unit], Generator[tuple[int, tuple[Tensor, ...]]]]
#: The path of a value in nested dictionaries and lists; its key joins the items with dots.
Place: TypeAlias = tuple[str | int, ...]
Keys: TypeAlias = tuple[str, ...]
#: A value in a rank's file: the keys that share it, its box of their tensor (None: no tensor), and its place.
Record: TypeAlias = tuple[Keys, Box | None, _StorageInfo]
#: What a rank has written, and what it knows of all values, if it is the first of its stage.
Written: TypeAlias = tuple[list[Record], dict[str, TensorSpec], dict[str, Place]]


def save_checkpoint(
    model: nn.Module, optimizer: Optimizer | None, path: str | Path, *, background: bool = False,
    trained_only: bool = False,
) -> "PortableSave":  # fmt: skip
    """Write weights, moments and hyperparameters to a new directory of ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads it on any number of ranks, into FSDP2, torchtitan or a plain
    model: exact fp32 weights under the model's own names, and the state of ``torch.optim.AdamW`` as
    ``{"optimizer": get_optimizer_state_dict(...)}``, with or without ``flatten_optimizer_state_dict``. It
    appears when it is whole; a save that fails or is killed leaves nothing under its name, and training can
    go on. Beside a few buffers, memory holds a part of one unit. Every rank must call, between two steps.

    With ``background`` it returns when all is planned. A thread of each rank then writes the present states
    while training goes on, and the directory appears in ``wait()`` of the returned object, which raises the
    errors below. Every rank must call that between two later steps, before the next save and before the model
    is closed; ``done`` says whether this rank has written its part.

    Args:
        optimizer: None: only weights are saved.
        path: On a file system that all ranks see; new, or empty; rank 0's value is used.
        trained_only: Leave out units in which all parameters are frozen, as those of a base are.

    Raises:
        CheckpointError: ``path`` is not free.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
        StateError: There are gradients of a step that is not over, another save has not ended, or the states
            of an interrupted run are not in their places yet: call :func:`infinity.resume` first.
    """
    save = begin_save(model, optimizer, path, background=background, trained_only=trained_only)
    if not background:
        save.wait()
    return save


def begin_save(
    model: nn.Module, optimizer: Optimizer | None, path: str | Path, *, background: bool,
    then: Callable[[], object] = lambda: None, trained_only: bool = False,
) -> "PortableSave":  # fmt: skip
    """Begin :func:`save_checkpoint`; ``then`` is called on rank 0 when it is published."""
    runtime = _between_steps(model, settled=not background)
    if not all(save.ended for save in runtime.saves):
        raise StateError("a checkpoint is being saved in the background: call wait() of it before the next")
    subject = Subject(model, optimizer, trained_only=trained_only)
    save = PortableSave(user_path(path, "path"), subject, beside=background, then=then)
    runtime.saves[:] = [save]
    return save


def load_checkpoint(
    model: nn.Module, optimizer: Optimizer | None, path: str | Path, *, trained_only: bool = False
) -> int:
    """Load weights and the optimizer's state from a directory of ``torch.distributed.checkpoint``.

    Written by :func:`save_checkpoint`, or by ``torch.distributed.checkpoint.save`` from FSDP2, torchtitan or
    a plain model with the same names of parameters, on any number of ranks. Each rank reads its own ranges of
    elements, chunk by chunk. No code of the directory runs. Every rank must call, before training.

    Args:
        optimizer: Moments and step counts that the checkpoint lacks become zero. None: weights only.
        trained_only: As in :func:`save_checkpoint`: units that are frozen stay as they are.

    Returns:
        How many steps the optimizer had done; 0 if the checkpoint has no state of an optimizer.

    Raises:
        CheckpointError: It is damaged, or does not fit; lists every missing, unknown and wrongly shaped key.
        DiskError: A drive failed or is full.
        StateError: There are gradients of a step that is not over, or the states of an interrupted run are
            not in their places yet: call :func:`infinity.resume` first.
    """
    runtime, where = _between_steps(model), user_path(path, "path")
    runtime.ranks.least(1, f"loading {where}")  # no rank uses what is replaced
    if runtime.started:
        runtime.executor().prefetcher.forget()
    with all_ranks_or_raise(runtime.ranks, f"loading {where}"), DistributedCheckpoint(where) as checkpoint:
        values = PortableValues(checkpoint, Subject(model, optimizer, trained_only=trained_only))
        for unit in filter(values.holds, runtime.units):
            runtime.tiers.put(unit, partial(values.field, unit, 0), partial(values.moments, unit))
            unit.renew()
            for segment in unit.segments:
                segment.steps = values.steps.get(id(segment.whole), 0)
        values.fill_whole()
        if optimizer is not None:
            scaler = {key: values.extra("loss_scaler", key) for key in ("scale", "good_steps")}
            if optimizer.scaler is not None and None not in scaler.values():
                optimizer.scaler.load_state_dict(scaler)
            optimizer.load_sums(values.sums)
            optimizer.restart(values.numbers, values.done)
    return values.done


def _between_steps(model: nn.Module, *, settled: bool = True) -> Runtime:
    """Return the model's runtime, with states in their places if ``settled``; a StateError inside a step."""
    runtime = runtime_of(model)
    runtime.check_between_steps()
    if settled:
        runtime.synchronize()
    return runtime


class Subject:
    """Says what of a model and its optimizer is saved and loaded, the same on every rank.

    Parameters of units that are frozen as a whole are left out if ``trained_only``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *, trained_only: bool) -> None:
        self.runtime, self.optimizer, self.kind = runtime_of(model), optimizer, type(model).__name__
        units = self.runtime.units
        wholes = [[segment.whole for segment in unit.segments] for unit in units if trained_only]
        frozen = {id(each) for unit in wholes for each in unit if not any(p.requires_grad for p in unit)}
        #: Parameters and persistent buffers, each with its names, by id; optimizer state uses the first.
        self.named: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in named_targets(model):
            if id(tensor) not in frozen:
                self.named.setdefault(id(tensor), (tensor, []))[1].append(name)
        self.sharded = {id(segment.whole): segment for _, segment in units.segments()}
        self.moments = self.runtime.tiers.layout.full_names[1:]
        self.groups = () if optimizer is None else optimizer.param_groups
        self.parts, self.staged = units.parts, units.parts.staged

    def shape(self, tensor: Tensor) -> torch.Size:
        """Return the shape of a tensor of the model, of which this rank may have a part."""
        part = self.parts.get(id(tensor))
        return tensor.shape if part is None else part.spec.shape

    def members(self, group: dict[str, Any]) -> list[tuple[nn.Parameter, list[str]]]:
        return [(p, self.named[id(p)][1]) for p in group["params"] if id(p) in self.named]


class Contents:
    """Lists the values of a checkpoint, the same on every rank."""

    def __init__(self, subject: Subject) -> None:
        self.tensors: dict[str, TensorSpec] = {}
        self.paths: dict[str, Place] = {}
        self.rest: list[tuple[Any, Keys]] = []  # what rank 0 writes: first tensors
        self.units, optimizer, sharded = subject.runtime.units, subject.optimizer, subject.sharded
        self._fields: dict[int, list[Keys]] = {}  # keys of weight and moments, by id of the parameter
        for tensor, names in subject.named.values():
            places: list[Place] = [(name,) for name in names]
            if id(tensor) in sharded:
                self._fields[id(tensor)] = [self._enter(places, torch.float32, subject.shape(tensor))]
            else:
                self._keep(tensor, *places)
        steps: dict[int, list[Place]] = {}
        sums = {} if optimizer is None else optimizer.sums
        for place, param in enumerate(p for group in subject.groups for p in group["params"]):
            segment = sharded.get(id(param)) if id(param) in subject.named else None
            if segment is not None and (param.requires_grad or segment.steps):  # is trained now, or was
                state = OPTIMIZER, "state", subject.named[id(param)][1][0]
                for moment in subject.moments:
                    keys = self._enter([(*state, moment)], torch.float32, subject.shape(param))
                    self._fields[id(param)].append(keys)
                for name, values in sums.get(place, {}).items():
                    self._keep(values, (*state, name))
                steps.setdefault(segment.steps, []).append((*state, "step"))
        for count, paths in steps.items():
            self._keep(torch.tensor(float(count), device="cpu"), *paths)
        usual: dict[str, Any] = {}
        if optimizer is not None and optimizer.rule.name.startswith("adam"):  # torch's own defaults
            usual = torch.optim.AdamW([torch.zeros(1, device="cpu")]).param_groups[0]
        for index, group in enumerate(subject.groups):  # in both forms of [Note: names]
            first = [names[0] for _, names in subject.members(group)]
            for name, value in {**usual, "initial_lr": group["lr"], **group, "params": first}.items():
                value = value.item() if isinstance(value, Tensor) else value
                at: list[Place] = [] if subject.staged else [(OPTIMIZER, "param_groups", index, name)]
                at += [(OPTIMIZER, f"param_groups.{each}.{name}") for each in first if name != "params"]
                self._keep(value, *at)
        if optimizer is not None:
            for name, value in optimizer.scaler.state_dict().items() if optimizer.scaler is not None else ():
                self._keep(value, (OPTIMIZER, "loss_scaler", name))
            self._keep(optimizer.rule.name, (OPTIMIZER, RULE))
        for segment in sharded.values():
            if not segment.numel:  # no shard has a part of it
                self.rest += [(torch.empty(segment.shape, device="cpu"), each) for each in self.keys(segment)]
        self.rest.sort(key=lambda each: not isinstance(each[0], Tensor))

    def _keep(self, value: Any, *paths: Place) -> None:
        """Register a value that rank 0 writes."""
        described = (value.dtype, value.shape) if isinstance(value, Tensor) else ()
        self.rest.append((value, self._enter(paths, *described)))

    def keys(self, segment: Segment) -> list[Keys]:
        """Return the keys of a parameter's weight and moments; empty if it is not the saved model's."""
        return self._fields.get(id(segment.whole), [])

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
        start, counts = unit.shard_start, self.units.parts.counts
        for segment, low, first, numel in unit.within(start, start + unit.shard_numel):
            stop = first + numel if self.keys(segment) and counts(segment.whole) else first
            for box in boxes(segment.whole_shape, first, stop, BOX_NUMEL):
                yield segment, box, low - start
                low += box.numel

    def nbytes(self, ranks: Ranks) -> int:
        found = [getattr(value, "nbytes", 0) for value, _ in self.rest] if ranks.rank == ranks.first else []
        for unit in self.units:
            for segment, box, _ in self.shard_boxes(unit):
                found += [box.numel * torch.float32.itemsize] * len(self.keys(segment))
        return sum(found) + len(found) * _AROUND_NBYTES


class PortableSave:
    """Writes a portable checkpoint, on a thread if ``beside`` training; every rank must make one.

    ``then`` is called on rank 0 when the directory is published, on the same thread:
    see [Note: a save beside training].
    """

    def __init__(self, out: Path, subject: Subject, *, beside: bool, then: Callable[[], object]) -> None:
        self._ranks = ranks = subject.runtime.ranks
        self._records: list[Record] = []
        self._threads, self._then = list[threading.Thread](), then
        self._publishing = self.ended = False  # ended: published, or failed
        with all_ranks_or_raise(ranks, f"planning {out}"):
            contents = self._contents = Contents(subject)
        tiers = subject.runtime.tiers
        work = partial(self._write, tiers.chunk_fields, lambda: None)
        with contextlib.ExitStack() as stack:
            self._place = stack.enter_context(Publication(out, ranks, "save"))
            self.out = self._place.out
            needed = int(ranks.sum(self._contents.nbytes(ranks), f"bytes of {self.out}"))
            # all ranks check before one reserves its part
            with all_ranks_or_raise(ranks, f"making room for {self.out}"):
                check_room(self._place.path, needed)
            stack.callback(self.join)
            if beside:  # all is as it is now, whatever training writes
                stack.callback(tiers.unpin)  # may be called twice
                with all_ranks_or_raise(ranks, f"keeping the states for {self.out}"):
                    snapshot = subject.runtime.records.snapshot()
                    contents.rest = [
                        (value.detach().clone() if isinstance(value, Tensor) else value, keys)
                        for value, keys in contents.rest
                    ]
                work = partial(self._write, lambda unit: snapshot.read(unit.index), tiers.unpin)
            self._stack = stack.pop_all()
        self._run(work, beside)

    def _run(self, work: Callable[[], None], beside: bool) -> None:
        running = self._running = Transfer()
        if beside:
            self._threads.append(threading.Thread(target=running.run, args=(work,), name="infinity-save"))
            self._threads[-1].start()
        else:
            running.run(work)

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
                contents, ranks = self._contents, self._ranks
                specs = (contents.tensors, contents.paths) if ranks.rank == ranks.first else ({}, {})
                written = gather((self._records, *specs), ranks, f"the list of what is in {self.out}")
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
                file = stack.enter_context(_DataFile(self._place.path, rank, contents.nbytes(self._ranks)))
                for unit in contents.units:
                    _write_unit(unit, contents, read_fields, file)
            for value, keys in contents.rest if rank == self._ranks.first else ():
                box = None
                if isinstance(value, Tensor):
                    value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
                    box = Box((0,) * value.ndim, tuple(value.shape))
                file.add(keys, box, value)
            file.finish()
        self._records = file.records

    def _publish(self, written: Sequence[Written]) -> None:
        path = self._place.path / METADATA
        with writing(f"writing {path}", path):
            path.write_bytes(pickle.dumps(_metadata(written, self._place.token)))
        self._place.publish()
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
            part = contents.units.parts.get(id(segment.whole))
            place = box if part is None else part.box(box)
            while values:  # one after the other, so that no two boxes are in memory
                file.add(keys[-len(values)], place, values.pop(0).view(box.sizes))
            trim_heap()  # of what torch.save left
            file.writer.check()


class _DataFile(contextlib.AbstractContextManager["_DataFile"]):
    """Owns a rank's file of records of torch.save while it is written, in ``nbytes`` of reserved room."""

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


def _metadata(written: Sequence[Written], token: str) -> dcp.Metadata:
    found: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    tensors, paths = dict[str, TensorSpec](), dict[str, Place]()
    for _, of_stage, its_paths in written:
        if twice := tensors.keys() & of_stage.keys():
            raise CheckpointError(f"two stages have {min(twice)}: names are to be those of the whole model")
        tensors, paths = tensors | of_stage, paths | its_paths
    for keys, box, info in itertools.chain(*(records for records, _, _ in written)):
        for key in keys:
            if box is None:
                found[key] = dcp.BytesStorageMetadata()
                storage[dcp.MetadataIndex(key)] = info
                continue
            spec = tensors[key]
            properties, shape = dcp.TensorProperties(dtype=spec.dtype), torch.Size(spec.shape)
            entry = found.setdefault(key, dcp.TensorStorageMetadata(properties, shape, []))
            storage[dcp.MetadataIndex(key, box.offsets, len(entry.chunks))] = info
            entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    for key, spec in tensors.items():
        numel = sum(chunk.sizes.numel() for chunk in found[key].chunks)
        assert numel == torch.Size(spec.shape).numel(), f"{key}: {numel} of {spec.shape} were written"
    return dcp.Metadata(found, paths, storage, dcp.StorageMeta(save_id=token), CURRENT_DCP_VERSION)


class PortableValues:
    """Matches a checkpoint with a model and its optimizer, and then reads values.

    The model's names are looked for behind any prefix that all of them share (``model.``). The checkpoint
    stays open while values are read.

    Raises:
        CheckpointError: Weights are missing, left over, of another shape, or differ though the model ties
            them; lists all of them.
        StateError: The model is only a part of the one that was built.
    """

    def __init__(self, checkpoint: DistributedCheckpoint, subject: Subject) -> None:
        self._checkpoint, self._subject, self._rule = checkpoint, subject, subject.runtime.storage.rule
        self._scratch = [torch.empty(0, device="cpu")] * (1 + len(subject.moments))
        self._fields: dict[int, list[Stored | None]] = {}  # by id of the tensor: its values and moments
        self._complaints: list[str] = []
        self.steps: dict[int, int] = {}  # by id of the parameter; empty without an optimizer's state
        self.done = 0  # steps, also where another rule cannot go on with their states
        # the hyperparameters that the checkpoint has of each group
        self.numbers: list[dict[str, Any]] = [{} for _ in subject.groups]
        self.sums: dict[int, dict[str, Tensor]] = {}  # as Optimizer.load_sums takes them
        # A weight that was tied to another one is in no model any more.
        in_use = {id(p) for model in subject.runtime.construction.roots for p in model.parameters()}
        for unit in subject.runtime.units:
            wholes = {id(segment.whole) for segment in unit.segments} & in_use
            if len({each in subject.named for each in wholes}) > 1:  # it is written as a whole
                raise StateError(
                    f"{unit.name} has parameters of this model and others: give load_checkpoint the whole "
                    "model that was built under infinity.Init"
                )
        every = [name for _, names in subject.named.values() for name in names]
        prefix = common_prefix(every, checkpoint)
        for tensor, names in subject.named.values():
            found = [name for name in names if prefix + name in checkpoint]
            if found:
                first, *others = (prefix + name for name in found)
                self._take(tensor, first)
                # Only if it fits: what a damaged file says of sizes is not read.
                fits = checkpoint[first].shape == subject.shape(tensor)
                self._complaints += [
                    f"{first} and {other} differ, and are one (tied) tensor of the model"
                    for other in others if fits and not checkpoint[first].equals(checkpoint[other])
                ]  # fmt: skip
            else:
                self._complaints.append(f"missing: {prefix}{names[0]}")
        parts = tuple({f"{prefix}{name.partition('.')[0]}." for name in every})
        others = [] if subject.staged else sorted(checkpoint.keys() - {prefix + name for name in every})
        self._complaints += [f"unknown to the model: {key}" for key in others if key.startswith(parts)]
        self._find_state()
        if self._complaints:
            lines = "\n  ".join(self._complaints)
            raise CheckpointError(
                f"{checkpoint.path} does not fit {subject.kind}:\n  {lines}\n"
                "Build the model that was saved; keys are its parameters' names, with or without a prefix"
            )

    def _take(self, tensor: Tensor, key: str) -> None:
        """Append an entry to the fields of ``tensor``: its values first, then its moments, or None."""
        found = self._of_shape(key, self._subject.shape(tensor)) if key in self._checkpoint else None
        part = self._subject.parts.get(id(tensor))
        found = found if found is None or part is None else StoredPart(found, part)
        self._fields.setdefault(id(tensor), []).append(found)

    def _of_shape(self, key: str, shape: Sequence[int]) -> Stored:
        if tuple((stored := self._checkpoint[key]).shape) != tuple(shape):
            self._complaints.append(f"{key} has shape {tuple(stored.shape)}, the model {tuple(shape)}")
        return stored

    def _find_state(self) -> None:
        subject = self._subject
        members = [subject.members(group) for group in subject.groups]
        with library_errors(CheckpointError, f"{self._checkpoint.path}: {OPTIMIZER}.{RULE} is no rule here"):
            before = find_rule(self.extra(RULE) or self._rule.name)  # what others wrote is of this one
        first = f".{[*(moment.name for moment in before.moments), 'step'][0]}"
        prefix = common_prefix(
            [f"state.{name}{first}" for group in members for _, names in group for name in names],
            {key for key in self._checkpoint if key.endswith(first)},
        )
        numbers = numbers_of(self._checkpoint, prefix, before)
        for options, group, found in zip(subject.groups, members, self.numbers, strict=True):
            for param, names in group:
                held = [name for name in names if f"{prefix}state.{name}{first}" in self._checkpoint]
                if not held or not param.requires_grad or id(param) not in subject.sharded:
                    continue
                state = f"{prefix}state.{held[0]}."
                steps = self._count(state + "step")
                self.done = max(self.done, steps)
                way = self._rule.way(options, 0, param.shape)
                wanted = *subject.moments, *way.sums
                missing = [name for name in wanted if state + name not in self._checkpoint]
                had = before.kept(numbers.get(held[0], {}), param.shape)
                if before.name != self._rule.name and not way.goes_on_from(had):
                    continue
                if before.name == self._rule.name and missing not in ([], [OFFSET]):
                    self._complaints += [f"missing: {state}{moment}" for moment in missing]
                    continue
                for moment in subject.moments:
                    self._take(param, state + moment)  # an average that is missing begins with the weights
                sums = {n: self._of_shape(state + n, s) for n, s in way.sums.items()}
                self.sums[id(param)] = {n: each.whole(torch.float32) for n, each in sums.items()}
                self.steps[id(param)] = steps
                theirs = numbers.get(held[0], {}) if before.name == self._rule.name else {}
                if any(name in found and found[name] != value for name, value in theirs.items()):
                    self._complaints.append(f"{held[0]} has other hyperparameters than its parameter group")
                found.update(theirs)
        if before.name != self._rule.name:
            trained = sum(param.requires_grad for group in members for param, _ in group)
            subject.runtime.note(carried(before, self._rule, len(self.steps), trained))

    def _count(self, key: str) -> int:
        value: Any = 0
        if key in self._checkpoint.objects:
            value = self._checkpoint.value(key)
        elif key not in self._checkpoint:
            self._complaints.append(f"missing: {key}")
        elif self._checkpoint[key].shape.numel() == 1:
            value = self._checkpoint[key].read()
        with library_errors(CheckpointError, f"{self._checkpoint.path}: {key} is no count of steps"):
            return max(0, int(value))

    def extra(self, *path: str) -> Any:
        """Return a further value of the optimizer, by its path; None: there is none."""
        key = ".".join((OPTIMIZER, *path))
        return self._checkpoint.value(key) if key in self._checkpoint.objects else None

    def moments(self, unit: Unit, start: int, stop: int) -> list[Tensor]:
        return [self.field(unit, 1 + moment, start, stop) for moment in range(len(self._subject.moments))]

    def field(self, unit: Unit, field: int, start: int, stop: int) -> Tensor:
        """Return elements of the unit's flat buffer (field 0) or of a moment, fp32; zero where none are.

        They are valid until the field's next ones are asked for.
        """
        if len(self._scratch[field]) < stop - start:  # reused: fresh memory would fault in its pages
            self._scratch[field] = torch.empty(stop - start, device="cpu")
        out = self._scratch[field][: stop - start].zero_()
        for s, low, first, numel in unit.within(start, stop):
            stored = dict(enumerate(self._fields.get(id(s.whole), ()))).get(field)
            if stored is not None:
                stored.fill(first, out[low - start :][:numel])
        return out

    def holds(self, unit: Unit) -> bool:
        return any(id(s.whole) in self._fields for s in unit.segments)

    def fill_whole(self) -> None:
        with torch.no_grad():
            for tensor, _ in self._subject.named.values():
                if id(tensor) not in self._subject.sharded:
                    stored = self._fields[id(tensor)][0]
                    assert stored is not None
                    tensor.copy_(stored.whole(tensor.dtype))
