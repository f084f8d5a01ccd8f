"""Streams a checkpoint into the tiers of a model that was built under ``Init`` without values.

[Note: one pass, one chunk]
Each unit's home asks for this rank's slice, chunk by chunk; a chunk is read from the files when it is
asked for, so an element is read once, by the rank that keeps it, and host memory holds one chunk.

[Note: what the checkpoint lacks]
Parameters that the checkpoint lacks are initialised by the model's own ``initialize_weights``, run over
all modules as transformers does it, so the same random numbers are drawn. What it touches of other
units is scratch memory.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.directory import INDEX, Checkpoint
from infinity.checkpoint.plan import Choice, LoadPlan, Values, named_targets, plan_loading
from infinity.core.errors import CheckpointError
from infinity.partition.init_context import Masters
from infinity.partition.unit import Segment, Unit

#: How files of weights and their indexes end.
_OF_WEIGHTS = (".safetensors", ".bin", INDEX)
#: Called with the bytes of this rank that are done, and all of them.
OnProgress = Callable[[int, int], object]


def _nothing_shared(units: Sequence[Unit]) -> AbstractContextManager[None]:
    return nullcontext()


def stamp_files(directory: Path) -> str:
    """What the file system says of every file of weights: as long as it does, they hold the same bytes.

    Inode, size, and the times of the last change, which are set anew whenever somebody writes or replaces
    a file; symbolic links are followed.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    try:
        stats = [(path.name, path.stat()) for path in directory.iterdir() if path.name.endswith(_OF_WEIGHTS)]
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: {error.strerror}") from error
    return json.dumps(sorted([n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for n, s in stats))


class Loading:
    """Values of one model from one checkpoint; see :class:`infinity.partition.init_context.LateValues`.

    Args:
        checkpoint: Stays open until :meth:`fill` returns.
        choice: What need not fit.
        on_progress: Called after each range that was read.

    Attributes:
        sharing: A context for the units that have all their values from the checkpoint, in which all
            are stored: some may get shared extents that have their values already.
    """

    def __init__(self, checkpoint: Checkpoint, choice: Choice, on_progress: OnProgress | None = None) -> None:
        self._checkpoint, self._choice, self._on_progress = checkpoint, choice, on_progress
        self.sharing: Callable[[Sequence[Unit]], AbstractContextManager[None]] = _nothing_shared
        self.plan = LoadPlan({}, {}, ())
        self._model: Any = None
        self._values: dict[int, Values] = {}  # by id of the tensor
        self._twins: dict[int, list[tuple[str, Values]]] = {}
        self._initialising: set[int] = set()  # ids of parameters
        self._done_nbytes = self._total_nbytes = 0
        self._scratch = torch.empty(0, dtype=torch.float32)

    def prepare(self, model: Any) -> None:
        """Decide what goes where, when ``model`` is built.

        Raises:
            CheckpointError: The checkpoint does not fit it; lists everything that does not.
        """
        self._model, self.plan = model, plan_loading(model, self._checkpoint, self._choice)
        targets = dict(named_targets(model))
        self._values = {id(targets[name]): values for name, values in self.plan.values.items()}
        for name, values in self.plan.twins.items():
            self._twins.setdefault(id(targets[name]), []).append((name, values))

    def notes(self) -> list[str]:
        """What people should know of this load, a line each."""
        lines = []
        if self.plan.new:
            lines.append(f"initialised, as the checkpoint lacks them: {', '.join(self.plan.new)}")
        if self._checkpoint.pickled:
            lines.append(
                f"{self._checkpoint.path} holds pickled weights; save_pretrained writes them as safetensors, "
                "which load faster"
            )
        return lines

    def counts(self, unit: Unit) -> bool:
        return any(id(s.param) in self._initialising for s in unit.segments)

    def fill(self, units: Sequence[Unit], masters: Masters) -> None:
        """Give every unit, buffer and parameter its values; see [Note: one pass, one chunk].

        Raises:
            CheckpointError: A file cannot be read, or tied weights differ.
        """
        self._total_nbytes = sum(self._nbytes(unit) for unit in units)
        with self.sharing([unit for unit in units if self.gives(unit)]):
            done_nbytes = 0
            for unit in units:
                masters.put(unit, functools.partial(self._range, unit))
                done_nbytes += self._nbytes(unit)
                if self._done_nbytes < done_nbytes:  # its values were there
                    self._show_progress(done_nbytes)
        in_units = {id(s.param) for unit in units for s in unit.segments}
        with torch.no_grad():
            for _, tensor in named_targets(self._model):
                if id(tensor) in self._values and id(tensor) not in in_units:
                    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
                    self._values[id(tensor)].fill(0, flat)
                    tensor.copy_(flat.view(tensor.shape))
        self._initialise()

    def gives(self, unit: Unit) -> bool:
        """Whether the checkpoint has all values of ``unit``."""
        return all(id(s.param) in self._values for s in unit.segments)

    def freeze(self, units: Sequence[Unit]) -> None:
        """Let nobody train what the checkpoint gives."""
        for segment in (s for unit in units for s in unit.segments if id(s.param) in self._values):
            segment.param.requires_grad_(False)

    def _range(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the unit's full flat buffer, gaps as zeros.

        In fp32, or in bf16 where the files and the model have nothing else.
        """
        if len(self._scratch) < stop - start:  # one for all: new memory for each would be touched anew
            self._scratch = torch.empty(stop - start, dtype=torch.float32)
        out = self._scratch.view(self._dtype(unit))[: stop - start].zero_()
        for s in unit.segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            values = self._values.get(id(s.param))
            if low < high and values is not None:
                part = out[low - start : high - start]
                values.fill(low - s.offset, part)
                self._compare_twins(s, low - s.offset, part)
                self._done_nbytes += len(part) * self._itemsize(s)
        self._show_progress(self._done_nbytes)
        return out

    def _show_progress(self, done_nbytes: int) -> None:
        self._done_nbytes = done_nbytes
        if self._on_progress is not None:
            self._on_progress(done_nbytes, self._total_nbytes)

    def _compare_twins(self, segment: Segment, start: int, part: Tensor) -> None:
        """A tied weight that the checkpoint has twice must be twice the same."""
        for name, values in self._twins.get(id(segment.param), ()):
            other = torch.empty_like(part)
            values.fill(start, other)
            if not torch.equal(other.view(torch.uint8), part.view(torch.uint8)):
                raise CheckpointError(
                    f"{self._checkpoint.path}: {name} and {segment.name} are one parameter of the model, but "
                    "the checkpoint has different values for them. If they should be two, override the "
                    "config: tie_word_embeddings=False"
                )

    def _dtype(self, unit: Unit) -> torch.dtype:
        """In which the unit's values are exact and need no cast of what is stored."""
        if unit.dtype != torch.bfloat16:
            return torch.float32
        stored = {dtype for s in unit.segments for dtype in self._dtypes(s)}
        return torch.bfloat16 if stored <= {torch.bfloat16} else torch.float32

    def _dtypes(self, segment: Segment) -> Iterator[torch.dtype]:
        """Of every stored tensor that is read for a parameter."""
        key = id(segment.param)
        for values in (self._values.get(key), *(values for _, values in self._twins.get(key, ()))):
            yield from () if values is None else values.dtypes

    def _nbytes(self, unit: Unit) -> int:
        """Bytes of files that this rank reads for ``unit``."""
        first, last = unit.shard_start, unit.shard_start + unit.shard_numel
        return sum(
            max(0, min(last, s.stop) - max(first, s.offset)) * self._itemsize(s)
            for s in unit.segments
            if id(s.param) in self._values
        )

    def _itemsize(self, segment: Segment) -> int:
        """Bytes that are read for an element, of all its names together."""
        key = id(segment.param)
        every = [self._values[key], *(values for _, values in self._twins.get(key, ()))]
        return sum(max(dtype.itemsize for dtype in values.dtypes) for values in every)

    def _initialise(self) -> None:
        """See [Note: what the checkpoint lacks]; also buffers that no checkpoint holds."""
        targets = dict(named_targets(self._model))
        self._initialising = {id(targets[name]) for name in self.plan.new}
        marked = [tensor for tensor in targets.values() if id(tensor) not in self._initialising]
        for tensor in marked:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # how transformers says "loaded"
        try:
            self._model.initialize_weights()
        finally:
            for carrier in (*marked, *self._model.modules()):
                vars(carrier).pop("_is_hf_initialized", None)
