"""Provides ``infinity.export``, and the export of a model that a run of ``infinity train`` kept."""

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.conversions import saved_tensors
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.export import MAX_SHARD_NBYTES, export_model, publish_directory
from infinity.checkpoint.load import named_targets
from infinity.checkpoint.requantize import Requantized, export_stored
from infinity.checkpoint.writer import check_room
from infinity.comm.ranks import Ranks
from infinity.core.errors import CheckpointError
from infinity.core.files import user_path
from infinity.core.nbytes import Transfer, stream
from infinity.device.memory import Lease
from infinity.engine.runtime import Runtime, runtime_of
from infinity.partition.unit import Unit
from infinity.shards.homes import HostHome
from infinity.shards.storage import chunk_places

#: Chunks of weights that are read at a time.
_READ_AHEAD = 8
#: Folders in which a run keeps its trained model, or only its adapters.
MODEL_FOLDER, ADAPTERS_FOLDER = "model", "adapters"


def export(
    model: nn.Module,
    out: str | Path,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    tokenizer: Any = None,
    stored_as: str | Path | None = None,
) -> Requantized | None:
    """Write ``model`` to a new Hugging Face directory, from which ``from_pretrained`` loads it.

    Streamed: beside a few staging buffers, memory holds at most one unit, and that only for weights that
    transformers converts on saving. Weights are in the compute dtype, bitwise those of
    ``model.state_dict()``. The directory appears when it is whole; an export that fails or is killed leaves
    nothing under its name. Every rank must call, and ``out`` lies on a file system that all see.

    Args:
        model: Of transformers, or with a dataclass as its config, if any; then keys are ``state_dict``'s.
        out: Must not exist, or be empty; rank 0's value is used.
        max_shard_nbytes: The most bytes of values in one file; a larger tensor has a file to itself.
        tokenizer: A directory whose tokenizer's files are copied, a ``tokenizer.json``, or an object with
            ``save_pretrained``; rank 0's value is used.
        stored_as: The quantized checkpoint that the model was loaded from. Weights are quantized again, into
            the same files, keys, dtypes and ``quantization_config``; unchanged ones keep their bytes. This
            needs room for the compute dtype, too, until ``out`` is complete.

    Returns:
        With ``stored_as``, what quantization changed; its ``str`` is one line.

    Raises:
        CheckpointError: ``out`` is not free, there is no tokenizer, or the model cannot be saved or does not
            fit the stored form.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
    """
    runtime = runtime_of(model)

    def write(out: Path) -> Path:
        gathered = partial(runtime.values.gathered, modify=False)
        export_model(
            model, runtime.units, out, read_weights=partial(_read_weights, runtime), gathered=gathered,
            ranks=runtime.ranks, max_shard_nbytes=max_shard_nbytes, tokenizer=tokenizer,
        )  # fmt: skip
        return out

    def shapes() -> dict[str, tuple[int, ...]]:
        saved = saved_tensors(model, dict(named_targets(model)))
        return {item.spec.key: item.spec.shape for item in saved}

    if stored_as is None:
        write(Path(out))
        return None
    return export_stored(Path(stored_as), Path(out), shapes=shapes, export=write, ranks=runtime.ranks)


def check_room_for(model: nn.Module, folder: Path) -> None:
    """Raise a DiskError if :func:`export` would find the file system of ``folder`` too small."""
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    check_room(folder, nbytes, f"finding room for the trained model in {folder}")


def export_run(run: str | Path, out: str | Path, stored_as: str | Path | None = None) -> Requantized | None:
    """Publish the model, or the adapters, that a run of ``infinity train`` kept; raises as :func:`export`."""
    run, out = user_path(run, "RUN"), user_path(out, "OUT")
    source = run / MODEL_FOLDER
    if (run / ADAPTERS_FOLDER).is_dir():
        source = run / ADAPTERS_FOLDER
    if not source.is_dir():
        what = f"no folder {MODEL_FOLDER}" if run.is_dir() else "no such folder"
        found = [path for name in (MODEL_FOLDER, ADAPTERS_FOLDER) for path in run.glob(f"*/{name}")]
        newest = max(found, key=lambda path: path.stat().st_mtime).parent if found else None
        raise CheckpointError(
            f"{run}: {what}; wanted the folder of a run that came to its last step with run.save: true, "
            f"with its trained model in {MODEL_FOLDER}/"
            + ("" if newest is None else f". It is a folder of runs; the newest with a model is {newest}")
        )
    if stored_as is None:
        publish_directory(source, out.absolute(), secrets.token_hex(4))
        return None
    with Checkpoint(source) as kept:
        shapes = {key: tuple(tensor.shape) for key, tensor in kept.items()}
    alone = Ranks(0, 1, torch.device("cpu"))
    return export_stored(
        Path(stored_as), out, shapes=lambda: shapes, export=lambda scratch: source, ranks=alone
    )


def _read_weights(
    runtime: Runtime, wanted: Callable[[Unit, int, int], bool]
) -> Iterator[tuple[Unit, int, Tensor]]:
    """Yield this rank's newest weights, from the drive chunk by chunk, as export's ``ReadWeights``."""
    tiers = runtime.tiers
    runtime.synchronize()  # when all ranks can agree on its error

    def read(chunk: tuple[Unit, int, int], lease: Lease) -> Transfer:
        unit, begin, nbytes = chunk
        return unit.home.read_weight(lease.memory[:nbytes], begin * unit.dtype.itemsize)

    for resident, group in itertools.groupby(runtime.units, lambda unit: isinstance(unit.home, HostHome)):
        if resident:
            for unit in group:
                tiers.at_home(unit)
                assert isinstance(unit.home, HostHome)
                if wanted(unit, unit.shard_start, unit.shard_start + unit.shard_numel):
                    yield unit, unit.shard_start, unit.home.weight
            continue
        chunks = [
            (unit, begin, numel * unit.dtype.itemsize)
            for unit in group
            for begin, numel in chunk_places(unit.shard_numel, tiers.store.chunk_numel)
            if wanted(unit, unit.shard_start + begin, unit.shard_start + begin + numel)
        ]
        size = max((nbytes for _, _, nbytes in chunks), default=0)
        with contextlib.ExitStack() as held:
            leases = (tiers.storage.host_pool.lease(size, who="exporting") for _ in chunks[:_READ_AHEAD])
            buffers = [held.enter_context(lease) for lease in leases]
            reading = held.enter_context(contextlib.closing(stream(chunks, buffers, read)))
            for (unit, begin, nbytes), lease in reading:
                yield unit, unit.shard_start + begin, lease.tensor[:nbytes].view(unit.dtype)
