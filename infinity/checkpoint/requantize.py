"""A trained model in the stored form of a quantized checkpoint: its files, keys, dtypes and scales.

[Note: from files to files]
A block of weights that share a scale may lie in several shards, units and ranks, and a stored tensor may be a
part of a parameter that transformers packs. So the model is exported first, in the compute dtype, and every
rank reads what it needs from there: tensors are dealt out, and each is encoded piece by piece. A finished run
has such an export already; any other one is made in the hidden directory, and removed before it is published.

[Note: the same layout]
Every file begins with the header of the checkpoint's file of that name, and each tensor has its place in it.
What the checkpoint does not quantize has its dtype. Tensors that the model does not have (layers that predict
further tokens, scales of activations) are copied. A matrix that the files have twice (tied weights), and the
model once, is written twice.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from infinity.checkpoint.directory import (
    INDEX,
    SAFETENSORS,
    Checkpoint,
    FileTensor,
    ReadableFile,
    Stored,
    TensorFile,
    read_json_object,
)
from infinity.checkpoint.export import Publication, agree_on_place, partial_path
from infinity.checkpoint.quantized import Decoded, decode_checkpoint, read_quantization, unchanged
from infinity.checkpoint.writer import FilePlan, OutputFile, RangeWriter, check_room, writing
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError

#: Elements that are compared, rounded or copied at one time.
_PIECE_NUMEL = 2**18
#: Where the export in the compute dtype is made.
_PLAIN = "plain"
#: Of tensors that do not fit, so many are named.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Requantized:
    """Figures of the weights that :func:`export_stored` quantized.

    The error of a weight is the root mean square of what encoding changes, over that of its values.

    Attributes:
        form: Such as ``FP8``.
        weights: The number of weights that are quantized.
        mean_error: The mean error of all weights.
        largest_error: The largest error of all weights.
        worst: The key of the weight that has it.
        copied: Tensors of the checkpoint that the model does not have.
    """

    form: str
    weights: int
    mean_error: float
    largest_error: float
    worst: str
    copied: int

    def __str__(self) -> str:
        text = f"{self.weights} weights in {self.form}, relative error {self.mean_error:.2g} in the mean"
        if self.largest_error:
            text += f", {self.largest_error:.2g} at most, of {self.worst}"
        return text + (f"; {self.copied} tensors of the checkpoint are copied" if self.copied else "")


class QuantizedLayout:
    """A quantized checkpoint whose form other values take; a context manager.

    Args:
        path: The directory.

    Attributes:
        form: The quantization, in words.
        files: Files of a directory that has this form.
        opened: The layout's own files, in the same order.
        tensors: Tensors by key, as they would be without quantization.
        others: The remaining tensors, by key: they belong to quantized weights, and stay as they are.

    Raises:
        CheckpointError: It cannot be read, is not quantized, or not in a form that is known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        quantization = read_quantization(path)
        if quantization is None:
            raise CheckpointError(
                f"{path} is not quantized (its config.json has no quantization_config), so there is no "
                "stored form to export in: leave stored_as out (infinity export without --stored)"
            )
        self._checkpoint = Checkpoint(path)
        try:
            if self._checkpoint.pickled:
                raise CheckpointError(
                    f"{path} holds pickled weights; a stored form is taken from safetensors files: export "
                    "without it"
                )
            stored = dict(self._checkpoint)
            decode_checkpoint(self._checkpoint, quantization)
        except BaseException:
            self.close()
            raise
        self.form = str(quantization)
        self.opened = self._checkpoint.files
        self.files = tuple(map(_file_plan, self.opened))
        self.tensors: Mapping[str, Stored] = dict(self._checkpoint)
        used = {id(each) for tensor in self.tensors.values() for each in _parts(tensor)}
        self.others = {key: tensor for key, tensor in stored.items() if id(tensor) not in used}

    def close(self) -> None:
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str | None]:
        """Return the model's tensor, by key, that gives each of :attr:`tensors` its values; None: a copy.

        Args:
            shapes: Shapes of the model's tensors, by the keys under which it is exported.

        Raises:
            CheckpointError: The checkpoint has no place for some of them; lists them.
        """
        wrong = [
            f"{key} has shape {tuple(shape)}, there {tuple(self.tensors[key].shape)}"
            if key in self.tensors
            else f"{key} is not in the checkpoint"
            for key, shape in shapes.items()
            if key not in self.tensors or self.tensors[key].shape != torch.Size(shape)
        ]
        if wrong:
            more = "" if len(wrong) <= _MOST_NAMED else f", and {len(wrong) - _MOST_NAMED} more"
            raise CheckpointError(
                f"the model does not fit the stored form of {self.path}: {'; '.join(wrong[:_MOST_NAMED])}"
                f"{more}. Export it without quantization, or name the checkpoint that it was loaded from"
            )
        return {key: key if key in shapes else self._twin(key, shapes) for key in self.tensors}

    def sample(self) -> list[tuple[str, str, str]]:
        """Name of each file, and digests of its header and of a sample of its bytes."""
        headers = (hashlib.blake2b(plan.header).hexdigest() for plan in self.files)
        return [
            (file.path.name, header, file.sample()) for file, header in zip(self.opened, headers, strict=True)
        ]

    def _twin(self, key: str, shapes: Iterable[str]) -> str | None:
        """The key, among ``shapes``, of the matrix that has the values of this one."""
        mine = self.tensors[key]
        if len(mine.shape) < 2 or not isinstance(mine, FileTensor):
            return None
        alike = (each for each in shapes if _alike(mine, self.tensors[each]))
        return next(alike, None)


def _parts(tensor: Stored) -> Iterable[Stored]:
    return tensor.stored if isinstance(tensor, Decoded) else [tensor]


def _alike(one: Stored, other: Stored) -> bool:
    """Return whether two tensors of files have the same bytes."""
    if not isinstance(other, FileTensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    for start in range(0, one.shape.numel(), _PIECE_NUMEL):
        a, b = (_read(each, start).view(torch.uint8) for each in (one, other))
        if not torch.equal(a, b):
            return False
    return True


def _read(tensor: Stored, start: int) -> torch.Tensor:
    """A piece of a tensor, in its dtype."""
    values = torch.empty(min(_PIECE_NUMEL, tensor.shape.numel() - start), dtype=tensor.dtype, device="cpu")
    tensor.fill(start, values)
    return values


def _file_plan(file: TensorFile) -> FilePlan:
    """The plan of a file that differs from ``file`` in its values only."""
    nbytes = os.fstat(file.fd).st_size
    starts = {key: tensor.offset for key, tensor in file.tensors.items()}
    header = bytearray(min(starts.values(), default=nbytes))
    file.read_bytes(0, memoryview(header))
    return FilePlan(file.path.name, bytes(header), starts, nbytes)


# --- writing -----------------------------------------------------------------------------------------


def export_stored(
    like: Path,
    out: Path,
    *,
    shapes: Callable[[], Mapping[str, tuple[int, ...]]],
    export: Callable[[Path], Path],
    ranks: Ranks,
) -> Requantized:
    """Write a model to ``out`` in the stored form of ``like``. Every rank must call.

    Args:
        like: A quantized checkpoint.
        out: Must not exist, or be empty; rank 0's value is used.
        shapes: Returns the shapes of what ``export`` writes, by key.
        export: Returns the directory of a plain export, which it may make where it is told. Every rank calls.
        ranks: The ranks that share the model.

    Raises:
        CheckpointError: A value is not finite; or see :class:`QuantizedLayout` and its ``match``.
        DiskError: A drive failed or is full.
        PeerError: Another rank failed; says which and why.
    """
    out, token = agree_on_place(out, ranks)
    folder = partial_path(out, token)
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"planning {out}"):
            form = stack.enter_context(QuantizedLayout(like))
            sources, seen = form.match(shapes()), form.sample()
        on_first = agree(seen, ranks.world_size, f"comparing the files of {like}")
        with all_ranks_or_raise(ranks, f"planning {out}"):
            if seen != on_first:
                raise CheckpointError(
                    f"{like} holds other files on rank {ranks.rank} than on rank 0: give one that all see"
                )
            if ranks.rank == 0:
                publication = stack.enter_context(Publication(out, token))
                check_room(folder, sum(file.nbytes for file in form.files))
                for file in form.files:
                    OutputFile.create(folder, file)
        plain = export(folder / _PLAIN)
        with all_ranks_or_raise(ranks, f"writing {out}"), _FormWriter(form, folder, ranks) as writer:
            errors = writer.write(sources, plain)
        everyone = gather(errors, ranks, f"errors of {out}")
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if ranks.rank == 0:
                _write_companions(form, plain, folder)
                if plain == folder / _PLAIN:
                    with writing(f"removing {plain}", plain):
                        shutil.rmtree(plain)
                publication.publish()
        copied = sum(source is None for source in sources.values())
        result = _summary(form.form, {key: error for each in everyone for key, error in each.items()}, copied)
        return agree(result, ranks.world_size, f"errors of {out}")


def _summary(form: str, errors: Mapping[str, float], copied: int) -> Requantized:
    """Sum up the errors of weights, by key."""
    largest, worst = max(((error, key) for key, error in errors.items()), default=(0.0, ""))
    return Requantized(form, len(errors), sum(errors.values()) / max(1, len(errors)), largest, worst, copied)


class _FormWriter:
    """Brings this rank's tensors to their places; a context manager."""

    def __init__(self, form: QuantizedLayout, folder: Path, ranks: Ranks) -> None:
        self._form, self._folder, self._ranks = form, folder, ranks
        self._writer = RangeWriter()
        self._outputs: dict[ReadableFile, OutputFile] = {}  # by the checkpoint's own file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.__exit__(*exc)

    def write(self, sources: Mapping[str, str | None], plain: Path) -> dict[str, float]:
        """Write every tensor that is dealt out to this rank.

        Returns:
            The errors of those that are quantized, by key.

        Raises:
            CheckpointError: A file cannot be read, or a value is not finite.
            WriteError: A file cannot be written.
        """
        rank, world_size = self._ranks.rank, self._ranks.world_size
        errors: dict[str, float] = {}
        for plan, file in zip(self._form.files, self._form.opened, strict=True):
            self._outputs[file] = self._writer.open(self._folder / plan.name)
        with Checkpoint(plain) as values:
            for key, tensor in list(self._form.tensors.items())[rank::world_size]:
                source = sources[key]
                if source is None:
                    for part in _parts(tensor):
                        self._copy(part)
                elif isinstance(tensor, Decoded):
                    errors[key] = self._encode(key, tensor, values[source])
                else:
                    self._round(key, tensor, values[source])
                self._writer.check()
        for tensor in list(self._form.others.values())[rank::world_size]:
            self._copy(tensor)
        self._writer.finish()
        return errors

    def _encode(self, key: str, tensor: Decoded, values: Stored) -> float:
        try:
            lost, total = tensor.encode(values, self._put)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{key} cannot be quantized again as {self._form.form}: {error}") from error
        return math.sqrt(lost / total) if lost else 0.0

    def _round(self, key: str, tensor: Stored, values: Stored) -> None:
        """Write what is not quantized, in the checkpoint's dtype; values that did not change are its own."""
        for start in range(0, tensor.shape.numel(), _PIECE_NUMEL):
            held = _read(values, start)
            new = held.to(tensor.dtype)
            finite = new.float().isfinite()
            if tensor.dtype.is_floating_point and (held.dtype != tensor.dtype or not finite.all()):
                before = _read(tensor, start)
                same = unchanged(before.float(), held)
                if not (same | finite).all():
                    raise CheckpointError(
                        f"{key}: a value is NaN or infinite, or becomes so in {tensor.dtype}, "
                        f"which it has in {self._form.path}"
                    )
                new = torch.where(same, before, new)
            self._put(tensor, start, new)

    def _copy(self, tensor: Stored) -> None:
        for start in range(0, tensor.shape.numel(), _PIECE_NUMEL):
            self._put(tensor, start, _read(tensor, start))

    def _put(self, tensor: Stored, start: int, values: torch.Tensor) -> None:
        """Hand over ``values`` for the elements of a tensor from ``start`` on."""
        assert isinstance(tensor, FileTensor)
        for place in tensor.ranges(start, len(values)):
            self._writer.write(self._outputs[place.file], place.offset, values.contiguous())


def _write_companions(form: QuantizedLayout, plain: Path, folder: Path) -> None:
    """The checkpoint's index, the model's config with its quantization, and what else lies beside weights."""
    with writing(f"writing to {folder}", folder):
        if not (form.path / SAFETENSORS).exists():  # the index of one file is not read
            shutil.copyfile(form.path / (SAFETENSORS + INDEX), folder / (SAFETENSORS + INDEX))
        for path in sorted(path for path in plain.rglob("*") if path.is_file()):
            if path.suffix != ".safetensors" and path.name != SAFETENSORS + INDEX:
                target = folder / path.relative_to(plain)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        config = _config(read_json_object(form.path / "config.json"), read_json_object(plain / "config.json"))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(stored: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The model's ``config``, with the dtype and quantization of the checkpoint's."""
    if "dtype" in stored or "torch_dtype" in stored:
        config["dtype"] = stored.get("dtype", stored.get("torch_dtype"))
    if stored.get("quantization_config"):
        return config | {"quantization_config": stored["quantization_config"]}
    inner = {"quantization_config": stored["text_config"]["quantization_config"]}
    return config | {"text_config": config.get("text_config", {}) | inner}
