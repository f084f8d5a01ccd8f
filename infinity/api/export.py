"""``infinity.export``: what an export asks of the runtime, and the public functions around it."""

import contextlib
import errno
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from infinity.checkpoint.export import MAX_SHARD_NBYTES, export_model
from infinity.checkpoint.publish import publish_directory
from infinity.checkpoint.tensor_writer import WriteError
from infinity.comm.ranks import agree
from infinity.core.errors import CheckpointError, PeerError
from infinity.core.transfer import Lease, Transfer
from infinity.engine.runtime import Runtime, runtime_of
from infinity.partition.unit import Unit

#: Chunks of weights that are read at one time.
_READ_AHEAD = 8
#: Where a run keeps its trained model, or only its adapters.
MODEL_FOLDER, ADAPTERS_FOLDER = "model", "adapters"


def export(
    model: nn.Module,
    out: str | Path,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    tokenizer: Any = None,
) -> None:
    """Write ``model`` to a new Hugging Face directory, from which ``from_pretrained`` loads it.

    Streamed: beside a few staging buffers, memory holds at most one unit, and that only for weights that
    transformers converts on saving. Weights are in the compute dtype, bitwise those of
    ``model.state_dict()``. The directory appears when it is whole; an export that fails or is killed
    leaves nothing under its name. Every rank must call, and ``out`` lies on a file system that all see.

    Args:
        model: Built under :class:`infinity.Init`. If it is not a model of transformers, its config is
            written when it is a dataclass, and keys are those of ``state_dict``.
        out: Must not exist, or be empty; rank 0's counts.
        max_shard_nbytes: Values in one file, at most (bytes); a larger tensor has a file to itself.
        tokenizer: A directory whose tokenizer's files are copied, a ``tokenizer.json``, or an object
            with ``save_pretrained``; rank 0's counts.

    Raises:
        CheckpointError: ``out`` is not free, there is no tokenizer, or the model cannot be saved.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
    """
    weights = RuntimeWeights(runtime_of(model))
    export_model(model, weights, Path(out), max_shard_nbytes=max_shard_nbytes, tokenizer=tokenizer)


def check_room(model: nn.Module, folder: Path) -> None:
    """Fail now if :func:`export` would find the file system of ``folder`` too small.

    Raises:
        DiskError: The model is larger than what is free.
    """
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    if shutil.disk_usage(folder).free < nbytes:
        raise WriteError(errno.ENOSPC, f"finding room for the trained model in {folder}", folder, 0, nbytes)


def export_run(run: str | Path, out: str | Path) -> None:
    """Let the model, or the adapters, that a run of ``infinity train`` kept appear as ``out``.

    Raises:
        CheckpointError: The run has none, or ``out`` is not free.
        DiskError: A drive failed or is full.
    """
    run, out = Path(run).expanduser(), Path(out).expanduser()
    source = run / MODEL_FOLDER
    if (run / ADAPTERS_FOLDER).is_dir():
        source = run / ADAPTERS_FOLDER
    if not source.is_dir():
        what = f"no folder {MODEL_FOLDER}" if run.is_dir() else "no such folder"
        newest = _newest_run(run)
        raise CheckpointError(
            f"{run}: {what}; wanted the folder of a run that came to its last step with run.save: true, "
            f"with its trained model in {MODEL_FOLDER}/"
            + ("" if newest is None else f". It is a folder of runs; the newest with a model is {newest}")
        )
    publish_directory(source, out.absolute(), secrets.token_hex(4))


def _newest_run(folder: Path) -> Path | None:
    """Of the runs in ``folder``, the one that kept its model last."""
    kept = [path for name in (MODEL_FOLDER, ADAPTERS_FOLDER) for path in folder.glob(f"*/{name}")]
    return max(kept, key=lambda path: path.stat().st_mtime).parent if kept else None


class RuntimeWeights:
    """The shards of one runtime's models; see :class:`infinity.checkpoint.export.Weights`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.rank, self.world_size = runtime.ranks.rank, runtime.ranks.world_size

    @property
    def units(self) -> Sequence[Unit]:
        return self.runtime.units

    def pieces(self, wanted: Callable[[Unit, int, int], bool]) -> Iterator[tuple[Unit, int, Tensor]]:
        self.runtime.synchronize()
        reading: deque[_Reading] = deque()
        try:
            for unit in self.units:
                for piece in self._start(unit, wanted):
                    reading.append(piece)
                    if len(reading) == _READ_AHEAD:
                        yield from reading[0].values()
                        reading.popleft()
            while reading:
                yield from reading[0].values()
                reading.popleft()
        finally:
            for piece in reading:
                piece.give_back()

    def _start(self, unit: Unit, wanted: Callable[[Unit, int, int], bool]) -> Iterator["_Reading"]:
        """Start reading what is wanted of ``unit``, chunk by chunk."""
        tiers, first = self.runtime.tiers, unit.shard_start
        resident = tiers.residents.get(unit.index)
        if resident is not None:
            if wanted(unit, first, first + unit.shard_numel):
                yield _Reading(unit, first, resident.weight)
            return
        engine, store = tiers.engine, tiers.store
        assert engine is not None, "a unit that is not resident is on NVMe"
        assert store is not None
        for chunk in store.version(unit.index, unit.version).chunks:
            start = first + chunk.start
            if wanted(unit, start, start + chunk.numel):
                lease = tiers.pool.lease(chunk.weight.nbytes, who="exporting weights")
                transfer = engine.read(chunk.weight, lease.memory)
                yield _Reading(unit, start, lease.tensor.view(unit.dtype), lease, transfer)

    def gathered(self, params: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        return self.runtime.values.gathered(params, modify=False)  # type: ignore[arg-type]

    def agree(self, text: str) -> str:
        return agree(text, self.world_size)

    def sum(self, value: int) -> int:
        collectives = self.runtime.ranks.collectives
        return value if collectives is None else int(collectives.sum([value], "bytes that were exported")[0])

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.world_size > 1 and not isinstance(failure, PeerError):
            told = self._tell(failure, what)
            failure = failure or (PeerError(f"{what} failed: {told}") if told else None)
        if failure is not None:
            raise failure

    def _tell(self, failure: Exception | None, what: str) -> str:
        """How ``what`` failed on the ranks where it did; empty when it did nowhere."""
        assert self.runtime.ranks.collectives is not None
        if self.runtime.ranks.collectives.least([failure is None], what)[0]:
            return ""
        told: list[str] = [""] * self.world_size
        dist.all_gather_object(told, "" if failure is None else f"{type(failure).__name__}: {failure}")
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)


class _Reading:
    """Values that are in memory, or on their way there."""

    def __init__(
        self,
        unit: Unit,
        start: int,
        tensor: Tensor,
        lease: Lease | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self.unit, self.start, self.tensor = unit, start, tensor
        self._lease, self._transfer = lease, transfer

    def values(self) -> Iterator[tuple[Unit, int, Tensor]]:
        """The piece, until the next is asked for."""
        if self._transfer is not None:
            self._transfer.wait()
        yield self.unit, self.start, self.tensor
        self.give_back()

    def give_back(self) -> None:
        """Release the memory; nobody may write into it any more."""
        if self._transfer is not None:
            with contextlib.suppress(OSError):  # it has surfaced, or nobody waits for it any more
                self._transfer.wait()
        if self._lease is not None:
            self._lease.release()
