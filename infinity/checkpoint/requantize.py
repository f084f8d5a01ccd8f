"""Writes a trained model in the stored form of a quantized checkpoint: its files, keys, dtypes and scales.

[Note: from files to files]
Weights that share a scale may lie in several shards, units and ranks. So the model is exported first, in the
compute dtype, to the hidden directory (a finished run has such an export already), and every rank reads its
share of the tensors from there and encodes them piece by piece.

[Note: the same layout]
Every file has the header of the checkpoint's file of that name. What the checkpoint does not quantize keeps
its dtype. Tensors that the model does not have (layers that predict further tokens, scales of activations)
are copied. A matrix that the files have twice (tied weights), and the model once, is written twice.
"""

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infinity.checkpoint.directory import INDEX, SAFETENSORS, Checkpoint, FileTensor, Stored, read_json_object
from infinity.checkpoint.forms import HF_QUANT_CONFIG, declared, decode_checkpoint, read_quantization
from infinity.checkpoint.load import OnProgress
from infinity.checkpoint.quantized import Decoded, unchanged
from infinity.checkpoint.writer import FilePlan, Publication, RangeWriter, create_files, writing
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError, library_errors, listed
from infinity.core.nbytes import format_nbytes

#: The folder of the export in the compute dtype.
_PLAIN = "plain"
#: The most misfitting tensors that an error names.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Requantized:
    """Reports what :func:`export_stored` quantized."""

    form: str  # such as FP8
    weights: int  # how many are quantized
    mean_error: float  # of weights: the root mean square of what encoding changes, over that of values
    largest_error: float
    worst: str  # key of the weight with the largest error
    copied: int  # tensors of the checkpoint that the model does not have
    left_nbytes: tuple[int, ...] = ()  # of experts in one tensor, for which the form has no place

    def __str__(self) -> str:
        text = f"{self.weights} weights in {self.form}, relative error {self.mean_error:.2g} in the mean"
        if self.largest_error:
            text += f", {self.largest_error:.2g} at most, of {self.worst}"
        if self.left_nbytes:
            nbytes = format_nbytes(sum(self.left_nbytes))
            text += f"; {len(self.left_nbytes)} weights ({nbytes}) stay as they are: there is no form for "
            text += "experts in one tensor"
        return text + (f"; {self.copied} tensors of the checkpoint are copied" if self.copied else "")


class QuantizedLayout(Checkpoint):
    """Opens a quantized checkpoint as a template: its tensors appear as if they were not quantized."""

    def _open(self) -> None:
        quantization = read_quantization(self.path)
        if quantization is None:
            raise CheckpointError(
                f"{self.path} is not quantized (its config.json has no quantization_config), so there is no "
                "stored form to export in: leave stored_as out (infinity export without --stored)"
            )
        super()._open()
        if self.pickled:
            raise CheckpointError(
                f"{self.path} holds pickled weights, not safetensors in a stored form: export without it"
            )
        stored = list(self.values())
        decode_checkpoint(self, quantization)
        self.form = str(quantization)
        used = {id(part) for tensor in self.values() for part in _stored_parts(tensor)}
        # Decoding needs none of these, so they are copied.
        self.others = [tensor for tensor in stored if id(tensor) not in used]

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str | None]:
        """Map each key to the model's tensor that gives its values; None: the stored tensor is copied.

        ``shapes`` are the model's, by the keys of an export. Raises a CheckpointError that lists misfits.
        """
        wrong = [
            f"{key} has shape {tuple(shape)}, there {tuple(self[key].shape)}"
            if key in self
            else f"{key} is not in the checkpoint"
            for key, shape in shapes.items()
            if key not in self or self[key].shape != torch.Size(shape)
        ]
        if wrong:
            raise CheckpointError(
                f"the model does not fit the stored form of {self.path}: {listed(wrong, _MOST_NAMED)}. "
                "Export it without quantization, or name the checkpoint that it was loaded from"
            )

        def twin(mine: Stored) -> str | None:
            if len(mine.shape) < 2 or not isinstance(mine, FileTensor):
                return None
            return next((k for k in shapes if isinstance(self[k], FileTensor) and mine.equals(self[k])), None)

        return {key: key if key in shapes else twin(tensor) for key, tensor in self.items()}


def _stored_parts(tensor: Stored) -> list[Stored]:
    return [part.tensor for part in tensor.parts] if isinstance(tensor, Decoded) else [tensor]


def _companions(plain: Path) -> list[Path]:
    """Return the files of an export but those of weights."""
    files = (path for path in plain.rglob("*") if path.is_file())
    return [path for path in files if path.suffix != ".safetensors" and path.name != SAFETENSORS + INDEX]


def export_stored(
    like: Path, out: Path, *, shapes: Callable[[], Mapping[str, tuple[int, ...]]],
    export: Callable[[Path], Path], ranks: Ranks, companions: Callable[[Path], Iterable[Path]] = _companions,
    on_progress: OnProgress | None = None,
) -> Requantized:  # fmt: skip
    """Write a model to ``out`` in the stored form of ``like``; every rank must call.

    ``export`` returns the directory of a plain export, made at the given path or elsewhere, and is called on
    every rank; ``shapes`` returns the shapes of what it writes, by key, and ``companions`` the other files
    there that are copied.
    """
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"planning {out}"):
            form = stack.enter_context(QuantizedLayout(like))
            sources = form.match(shapes())
            seen = [(f.path.name, hashlib.blake2b(f.header).hexdigest(), f.sample()) for f in form.files]
        on_first = agree(seen, ranks.world_size, f"comparing the files of {like}")
        with all_ranks_or_raise(ranks, f"planning {out}"):
            if seen != on_first:
                raise CheckpointError(
                    f"{like} holds other files on rank {ranks.rank} than on rank 0: give one that all see"
                )
        place = stack.enter_context(Publication(out, ranks))
        out, folder = place.out, place.path
        with all_ranks_or_raise(ranks, f"making {out}"):
            if ranks.rank == 0:
                create_files(folder, [FilePlan(f.path.name, f.header, {}, f.nbytes) for f in form.files])
        plain = export(folder / _PLAIN)
        with all_ranks_or_raise(ranks, f"writing {out}"):
            mine = _write_tensors(form, sources, plain, folder, ranks, on_progress)
        errors: dict[str, float] = {}
        for each in gather(mine, ranks, f"errors of {out}"):
            errors |= each
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if ranks.rank == 0:
                _write_stored_companions(form, plain, companions(plain), folder)
                if plain == folder / _PLAIN:
                    with writing(f"removing {plain}", plain):
                        shutil.rmtree(plain)
            place.publish()
        largest, worst = max(((error, key) for key, error in errors.items()), default=(0.0, ""))
        mean, copied = sum(errors.values()) / max(1, len(errors)), list(sources.values()).count(None)
        result = Requantized(form.form, len(errors), mean, largest, worst, copied)
        return agree(result, ranks.world_size, f"errors of {out}")


def _write_tensors(
    form: QuantizedLayout, sources: Mapping[str, str | None], plain: Path, folder: Path, ranks: Ranks,
    on_progress: OnProgress | None,
) -> dict[str, float]:  # fmt: skip
    """Write this rank's share of the tensors; return the errors of its weights, by key."""
    mine, errors = slice(ranks.rank, None, ranks.world_size), dict[str, float]()
    with RangeWriter() as writer, Checkpoint(plain) as values:
        outputs = [writer.open(folder / file.path.name) for file in form.files]
        parts = [part for tensor in list(form.values())[mine] for part in _stored_parts(tensor)]
        nbytes = sum(each.shape.numel() * each.dtype.itemsize for each in (*parts, *form.others[mine]))

        def put(tensor: Stored, start: int, new: Tensor) -> None:
            for place in tensor.ranges(start, len(new)):
                writer.write(outputs[place.file], place.offset, new.contiguous())
            if on_progress is not None:
                on_progress("quantizing", writer.nbytes, nbytes)

        copied = list(form.others[mine])
        for key, tensor in list(form.items())[mine]:
            source = sources[key]
            if source is None:
                copied += _stored_parts(tensor)
            elif isinstance(tensor, Decoded):
                what = f"{key} cannot be quantized as {form.form}"
                with library_errors(CheckpointError, what):
                    lost, total = tensor.encode(values[source], put)
                errors[key] = math.sqrt(lost / total) if lost else 0.0
            else:
                for start, held in values[source].pieces():
                    put(tensor, start, _rounded(form, key, start, held))
            writer.check()
        for tensor in copied:
            for start, held in tensor.pieces():
                put(tensor, start, held)
        writer.finish()
    return errors


def _rounded(form: QuantizedLayout, key: str, start: int, held: Tensor) -> Tensor:
    """Cast a piece of an unquantized tensor to its stored dtype; unchanged values keep their bits."""
    tensor = form[key]
    new = held.to(tensor.dtype)
    finite = new.float().isfinite()
    if not tensor.dtype.is_floating_point or (held.dtype == tensor.dtype and finite.all()):
        return new
    before = tensor.read(start, len(held))
    same = unchanged(before.float(), held)
    if not (same | finite).all():
        raise CheckpointError(
            f"{key}: a value is NaN or infinite, or becomes so in {tensor.dtype}, which it has in {form.path}"
        )
    return torch.where(same, before, new)


def _write_stored_companions(form: QuantizedLayout, plain: Path, files: Iterable[Path], folder: Path) -> None:
    """Write the index, the model's config with its quantization, and the export's other files."""
    with writing(f"writing to {folder}", folder):
        if not (form.path / SAFETENSORS).exists():  # the index of one file is not read
            shutil.copyfile(form.path / (SAFETENSORS + INDEX), folder / (SAFETENSORS + INDEX))
        for path in sorted(files):
            target = folder / path.relative_to(plain)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        stored, config = (read_json_object(each / "config.json") for each in (form.path, plain))
        if "dtype" in stored or "torch_dtype" in stored:
            config["dtype"] = stored.get("dtype", stored.get("torch_dtype"))
        if stored.get("quantization_config"):
            config["quantization_config"] = stored["quantization_config"]
        elif declared(form.path)[0] == HF_QUANT_CONFIG:
            shutil.copyfile(form.path / HF_QUANT_CONFIG, folder / HF_QUANT_CONFIG)
        else:
            inner = {"quantization_config": stored["text_config"]["quantization_config"]}
            config["text_config"] = config.get("text_config", {}) | inner
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
