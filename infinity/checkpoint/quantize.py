"""Writes quantized checkpoints: of plain weights, and of trained ones in the form that they came in.

[Note: from files to files]
Weights that share a scale may lie in several shards, units and ranks. So a model in memory is exported first,
in the compute dtype, to a hidden directory; a finished run has such an export, and what is merged is read
from the files of its base. Every rank reads its share of the tensors, and encodes them piece by piece.

[Note: the same layout]
Every file has the header of the file of that name in the checkpoint that says the form. What that does not
quantize keeps its dtype. Tensors that the model does not have (layers that predict further tokens, scales of
activations) are copied. A matrix that the files have twice (tied weights), and the model once, is written
twice.

[Note: a template]
For a form of our choice, which says which tensors a matrix becomes, that is a directory without values: files
with headers and holes, and a ``config.json``. It takes no room, and is opened as any quantized checkpoint: a
plan is made from it, and quantizing is an export in its form.

[Note: which weights]
Those of linear layers and of packed experts, but for the head and routers; the model says which they are, and
its conversions which stored matrices they are made of. What the form has no blocks for stays as it is.

[Note: experts in one tensor]
compressed-tensors has no place for a tensor with the weights of all experts. So a checkpoint with such ones
(Llama 4, gpt-oss) is written as the program does that has: FP8 as transformers' ``FP8Experts``, MXFP4 as
gpt-oss is published (experts only), NVFP4 as ModelOpt, but with a scale of scales for each expert instead of
one for all, so that one expert is encoded at a time. No program has one for INT8.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import (
    INDEX,
    SAFETENSORS,
    Checkpoint,
    FileTensor,
    Stored,
    read_json_object,
    tokenizer_files,
)
from infinity.checkpoint.forms import HF_QUANT_CONFIG, declared, decode_checkpoint, read_quantization
from infinity.checkpoint.load import OnProgress, sources_of
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.quantized import Decoded, unchanged
from infinity.checkpoint.writer import (
    FilePlan,
    TensorSpec,
    copy_files,
    create_files,
    new_directory,
    plan_files,
)
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise, gather
from infinity.core.errors import CheckpointError, library_errors, listed
from infinity.core.nbytes import format_nbytes
from infinity.partition.builder import routers

#: The most misfitting tensors that an error names.
_MOST_NAMED = 10
#: What is encoded, and how: to be changed when a form's tensors or rules change.
_VERSION = b"2"
#: Matrices with fewer rows or columns are left, such as gates.
_LEAST_ROWS = 16
_FP8_BLOCK, _NF4_BLOCK = 128, 64

_Shape: TypeAlias = tuple[int, ...]


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
        stored, self.keys_of = list(self.values()), {id(each): key for key, each in self.items()}
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


def export_stored(
    like: Path, out: Path, tensors: Mapping[str, Stored | TensorSpec],
    values: AbstractContextManager[Mapping[str, Stored]], prepare: Callable[[Path], object], *, ranks: Ranks,
    on_progress: OnProgress | None = None,
) -> Requantized:  # fmt: skip
    """Write a model to ``out`` in the stored form of ``like``; every rank must call.

    ``tensors`` describes the model's by key. ``values``, entered on every rank when there is room for all,
    gives their values. On rank 0 ``prepare(folder)`` makes the model's other files.
    """
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"planning {out}"):
            form = stack.enter_context(QuantizedLayout(like))
            sources = form.match({key: tuple(each.shape) for key, each in tensors.items()})
            seen = [(f.path.name, hashlib.blake2b(f.header).hexdigest(), f.sample()) for f in form.files]
        on_first = agree(seen, ranks.world_size, f"comparing the files of {like}")
        with all_ranks_or_raise(ranks, f"planning {out}"):
            if seen != on_first:
                raise CheckpointError(
                    f"{like} holds other files on rank {ranks.rank} than on rank 0: give one that all see"
                )
        files = [
            FilePlan(f.path.name, f.header, {key: each.offset for key, each in f.tensors.items()}, f.nbytes)
            for f in form.files
        ]

        def prepare_all(folder: Path) -> None:
            prepare(folder)
            _declare(form, folder)

        how: dict[str, Any] = {"doing": "quantizing", "on_progress": on_progress}
        with new_directory(files, out, ranks, prepare_all, **how) as put, values as given:
            with all_ranks_or_raise(ranks, f"writing {out}"):
                mine = _write_tensors(form, sources, given, put, ranks)
            everyone = gather(mine, ranks, f"errors of {out}")
        errors = {key: error for each in everyone for key, error in each.items()}
        largest, worst = max(((error, key) for key, error in errors.items()), default=(0.0, ""))
        mean, copied = sum(errors.values()) / max(1, len(errors)), list(sources.values()).count(None)
        kept = (each for each in form.values() if isinstance(each, FileTensor) and len(each.shape) == 3)
        left = [
            each.shape.numel() * each.dtype.itemsize for each in kept if min(each.shape[-2:]) >= _LEAST_ROWS
        ]
        result = Requantized(form.form, len(errors), mean, largest, worst, copied, tuple(left))
        return agree(result, ranks.world_size, f"errors of {out}")


def _write_tensors(
    form: QuantizedLayout, sources: Mapping[str, str | None], values: Mapping[str, Stored],
    write: Callable[[str, int, Tensor], None], ranks: Ranks,
) -> dict[str, float]:  # fmt: skip
    """Write this rank's share of the tensors; return the errors of its weights, by key."""
    mine, errors = slice(ranks.rank, None, ranks.world_size), dict[str, float]()

    def put(tensor: Stored, start: int, new: Tensor) -> None:
        write(form.keys_of[id(tensor)], start, new.contiguous())

    copied = list(form.others[mine])
    order: dict[str | None, int] = {key: at for at, key in enumerate(values)}
    # As the values come: those that are made of one tensor are made once.
    for key, tensor in sorted([*form.items()][mine], key=lambda each: order.get(sources[each[0]], -1)):
        source = sources[key]
        if source is None:
            copied += _stored_parts(tensor)
        elif isinstance(tensor, Decoded):
            with library_errors(CheckpointError, f"{key} cannot be quantized as {form.form}"):
                lost, total = tensor.encode(values[source], put)
            errors[key] = math.sqrt(lost / total) if lost else 0.0
        else:
            for start, held in values[source].pieces():
                put(tensor, start, _rounded(form, key, start, held))
    for tensor in copied:
        for start, held in tensor.pieces():
            put(tensor, start, held)
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


def _declare(form: QuantizedLayout, folder: Path) -> None:
    """Write the index, and what says in ``config.json`` how weights are quantized."""
    if not (form.path / SAFETENSORS).exists():  # the index of one file is not read
        shutil.copyfile(form.path / (SAFETENSORS + INDEX), folder / (SAFETENSORS + INDEX))
    stored, config = (read_json_object(each / "config.json") for each in (form.path, folder))
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


@dataclass(frozen=True, slots=True)
class _Weight:
    """Describes a stored weight; a ``down`` one has inputs in dimension 1 of three, others in the last."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    down: bool = False

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def is_large(self) -> bool:
        floats = self.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return floats and len(self.shape) in (2, 3) and min(self.shape[-2:]) >= _LEAST_ROWS

    @property
    def inputs(self) -> int:
        return self.shape[1] if self.down else self.shape[-1]

    def divided(self, by: int) -> _Shape:
        """Return the shape with the inputs divided."""
        if self.down:
            return (self.shape[0], self.shape[1] // by, self.shape[2])
        return (*self.shape[:-1], self.shape[-1] // by)


#: By ending of the key: dtype and shape, or values that do not depend on the matrix.
_Tensors: TypeAlias = Mapping[str, tuple[torch.dtype, _Shape] | Tensor]


@dataclass(frozen=True, slots=True)
class _Form:
    """Describes how weights are stored, and how a config says so."""

    tensors: Callable[[_Weight], _Tensors]  # that a weight becomes
    fits: Callable[[_Weight], bool]  # whether there is a place, and whole blocks, for a weight
    config: Mapping[str, Any]  # the ``quantization_config``, to which is added
    left_in: str = ""  # the entry with the names of linear layers that are left; empty: none
    replaces: str = ""  # the end of a weight's key that the endings of tensors replace
    leaves: Callable[[str], bool] = lambda name: False  # whether a config leaves out what has this name
    name: str = ""  # for people

    def __str__(self) -> str:
        return self.name


def _fp8(weight: _Weight) -> _Tensors:
    *experts, rows, columns = weight.shape
    blocks = (*experts, -(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
    return {"": (torch.float8_e4m3fn, weight.shape), "_scale_inv": (torch.float32, blocks)}


def _mxfp4_experts(weight: _Weight) -> _Tensors:
    experts, inputs, outputs = weight.shape
    groups = (experts, outputs, inputs // 32)
    return {"_blocks": (torch.uint8, (*groups, 16)), "_scales": (torch.uint8, groups)}


def _nvfp4(weight: _Weight) -> _Tensors:
    groups = (torch.float8_e4m3fn, weight.divided(16))
    return {
        "_packed": (torch.uint8, weight.divided(2)), "_scale": groups, "_global_scale": (torch.float32, (1,)),
    }  # fmt: skip


def _nvfp4_modelopt(weight: _Weight) -> _Tensors:
    scale, of_scales = ("_scale", ()) if weight.is_matrix else ("_weight_scale", weight.shape[:1])
    groups = (torch.float8_e4m3fn, weight.divided(16))
    return {"": (torch.uint8, weight.divided(2)), scale: groups, f"{scale}_2": (torch.float32, of_scales)}


def _nf4(weight: _Weight) -> _Tensors:
    numel, name = math.prod(weight.shape), str(weight.dtype).removeprefix("torch.")
    state = {"quant_type": "nf4", "blocksize": _NF4_BLOCK, "dtype": name, "shape": list(weight.shape)}
    return {
        "": (torch.uint8, (numel // 2, 1)),
        ".absmax": (torch.float32, (numel // _NF4_BLOCK,)),
        ".quant_map": torch.tensor(codecs.NF4, device="cpu"),
        ".quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs, "format": kind}
    said = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return said | {"config_groups": {"group_0": group}}


_INT8 = {"num_bits": 8, "type": "int"}
_PER_TOKEN = _INT8 | {"strategy": "token", "symmetric": True, "dynamic": True}
_E2M1 = {"num_bits": 4, "type": "float"}
#: By the name of each form.
FORMS: dict[str, _Form] = {
    "fp8": _Form(
        _fp8, lambda weight: weight.is_matrix or weight.shape[1] % min(weight.shape[1], _FP8_BLOCK) == 0,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK]}, "modules_to_not_convert",
    ),
    "int8": _Form(
        lambda weight: {"": (torch.int8, weight.shape), "_scale": (torch.float32, (weight.shape[0], 1))},
        lambda weight: weight.is_matrix,
        _compressed("int-quantized", _INT8 | {"strategy": "channel"}, _PER_TOKEN), "ignore",
    ),
    "mxfp4": _Form(
        lambda weight: {k: (torch.uint8, weight.divided(n)) for k, n in (("_packed", 2), ("_scale", 32))},
        lambda weight: weight.is_matrix and weight.inputs % 32 == 0,
        _compressed("mxfp4-pack-quantized", _E2M1 | {"strategy": "group", "group_size": 32}), "ignore",
    ),
    "nvfp4": _Form(
        _nvfp4, lambda weight: weight.is_matrix and weight.inputs % 16 == 0,
        _compressed("nvfp4-pack-quantized", _E2M1 | {"strategy": "tensor_group", "group_size": 16}), "ignore",
    ),
    "nf4": _Form(
        _nf4, lambda weight: math.prod(weight.shape) % _NF4_BLOCK == 0,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
         "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
         "bnb_4bit_use_double_quant": False}, "llm_int8_skip_modules",
    ),
}  # fmt: skip
#: Those of checkpoints that have experts in one tensor, where they differ.
WITH_EXPERTS: dict[str, _Form] = {
    "mxfp4": _Form(
        _mxfp4_experts, lambda weight: weight.down and weight.inputs % 32 == 0,
        {"quant_method": "mxfp4"}, "modules_to_not_convert",
    ),
    "nvfp4": _Form(
        _nvfp4_modelopt, lambda weight: weight.inputs % 16 == 0,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "ignore",
    ),
}  # fmt: skip


def published(form: str, said: Mapping[str, Any], bits: int, size: int, left: Sequence[str]) -> _Form:
    """Return a form of whole numbers that is read and not written: pack-quantized, gptq or awq.

    ``said`` is its ``quantization_config``, ``size`` the weights along the inputs that share a scale, 0: all;
    ``left`` are names of layers, or patterns that begin with ``re:``.
    """
    whole, zeros = torch.int32, not said.get("sym", True) or bool(said.get("zero_point"))

    def words(numel: int) -> int:
        return -(-numel * bits // 32)

    def packed(weight: _Weight) -> _Tensors:
        (rows, columns), groups = weight.shape, weight.inputs // (size or weight.inputs)
        if form == "pack-quantized":
            point: _Tensors = {"_zero_point": (whole, (words(rows), groups))} if zeros else {}
            return {
                **point,
                "_packed": (whole, (rows, words(columns))),
                "_scale": (weight.dtype, (rows, groups)),
                "_shape": torch.tensor(weight.shape, device="cpu"),
            }
        order: _Tensors = {"g_idx": (whole, (columns,))} if form == "gptq" else {}
        return {
            **order,
            "qweight": (whole, (words(columns), rows) if form == "gptq" else (columns, words(rows))),
            "qzeros": (whole, (groups, words(rows))),
            "scales": (torch.float16, (groups, rows)),
        }

    def fits(weight: _Weight) -> bool:
        return weight.is_matrix and not (weight.inputs % (size or 1) or weight.shape[0] * bits % 32)

    def leaves(name: str) -> bool:
        return any(
            re.match(each.removeprefix("re:"), name) if each.startswith("re:") else f".{each}." in f".{name}."
            for each in left
        )

    replaces = "" if form == "pack-quantized" else "weight"
    return _Form(packed, fits, said, "", replaces, leaves, f"INT{bits} ({form})")


def quantize_checkpoint(
    source: Path, like: Path, out: Path, ranks: Ranks, on_progress: OnProgress | None = None,
    companions: Sequence[Path] = (),
) -> Requantized:  # fmt: skip
    """Write the checkpoint ``source`` to ``out`` in the form of ``like``, its template; every rank must call.

    ``companions`` are the files that are copied beside; empty: configs, and the tokenizer's. Memory holds a
    piece of a matrix at a time (of NVFP4 a whole one). Raises errors of an export.
    """
    configs = [source / name for name in ("config.json", "generation_config.json")]
    companions = companions or [path for path in configs if path.is_file()] + tokenizer_files(source)
    prepare = partial(copy_files, source, companions)
    with all_ranks_or_raise(ranks, f"opening {source}"):
        plain = Checkpoint(source)
    with plain:
        values = contextlib.nullcontext(plain)
        return export_stored(like, out, plain, values, prepare, ranks=ranks, on_progress=on_progress)


def fingerprint(source: Path, like: Path) -> str:
    """Return a digest of samples of ``source`` and of its template, the same for the same result."""
    digest = hashlib.blake2b(_VERSION, digest_size=8)
    with Checkpoint(source) as plain, Checkpoint(like) as empty:
        for file in plain.files:
            digest.update(f"{file.path.name} {file.sample()} ".encode())
        for file in empty.files:
            digest.update(file.header)
    digest.update((like / "config.json").read_bytes())
    return digest.hexdigest()


@contextmanager
def template(
    source: Path, form: str | _Form, *, auto_class: Any = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> Iterator[Path]:  # fmt: skip
    """Make the template of ``source`` in ``form``, a directory without values that goes with the context.

    CheckpointError: the form is unknown, or ``source`` is quantized, not of transformers, or has no matrix
    that the form has whole blocks for.
    """
    if not isinstance(form, _Form) and form not in (*FORMS,):
        raise CheckpointError(f"stored_as: got {form!r}; wanted {', '.join(FORMS)}")
    with Checkpoint(source) as plain, tempfile.TemporaryDirectory(prefix="infinity-") as folder:
        if (found := read_quantization(source)) is not None:
            raise CheckpointError(
                f"{source} is quantized already ({found}), and is read in that form: leave {form} out"
            )
        if is_ours(source):
            raise CheckpointError(f"{source}: stored_as={form} is for models of transformers")
        config = read_config(source, dict(config_overrides or {}))
        with torch.device("meta"), library_errors(CheckpointError, f"building the model of {source}"):
            model = build_model(config, auto_class, torch.bfloat16)
        weights = _weights(model, plain)
        packed = any(not weight.is_matrix for keys in weights.values() for weight in keys.values())
        made = form if isinstance(form, _Form) else (WITH_EXPERTS if packed else FORMS).get(form, FORMS[form])
        chosen, left = dict[str, _Weight](), list[str]()
        for name, keys in weights.items():
            left_out = any(made.leaves(key.removesuffix(".weight")) for key in keys)
            whole = all(each.is_large and made.fits(each) for each in keys.values())
            if keys and whole and not left_out:
                chosen |= keys
            elif name.endswith(".weight"):
                left.append(name.removesuffix(".weight"))
        if not chosen:
            raise CheckpointError(f"{source} has no linear layer that {form} has whole blocks for")
        _write_template(Path(folder), plain, made, chosen, left)
        yield Path(folder)


def _weights(model: Any, plain: Checkpoint) -> dict[str, dict[str, _Weight]]:
    """Return the stored weights that each linear layer and packed expert is made of; the head's: none."""
    sources, found = sources_of(model, plain), dict[str, dict[str, _Weight]]()
    kept = {id(param) for param in _kept(model)}
    for module_name, module in model.named_modules():
        down = getattr(module, "is_transposed", True)  # as transformers has experts that do not say
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}"
            experts = param.ndim == 3 and len(param) == getattr(module, "num_experts", None)
            if experts or (isinstance(module, nn.Linear) and name == "weight"):
                keys = set[str]() if id(param) in kept else sources.get(full_name, set())
                tensors = ((key, plain[key]) for key in keys)
                found[full_name] = {
                    key: _Weight(tuple(each.shape), each.dtype, down and len(each.shape) == 3)
                    for key, each in tensors
                }
    return found


def _kept(model: Any) -> Iterator[nn.Parameter]:
    """Yield parameters of embeddings, of the head, and of linear layers that choose experts beside them."""
    for each in (model.get_input_embeddings(), model.get_output_embeddings()):
        yield from () if each is None else each.parameters()
    for _, router in routers(model):
        yield from router.parameters()


def _write_template(
    folder: Path, plain: Checkpoint, form: _Form, chosen: Mapping[str, _Weight], left: list[str]
) -> None:
    specs, constants = list[TensorSpec](), dict[str, Tensor]()
    for key, tensor in plain.items():
        if key not in chosen:
            specs.append(TensorSpec(key, tensor.dtype, tuple(tensor.shape)))
            continue
        stem = key.removesuffix(form.replaces)
        for ending, made in form.tensors(chosen[key]).items():
            if isinstance(made, Tensor):
                constants[stem + ending], made = made, (made.dtype, tuple(made.shape))
            specs.append(TensorSpec(stem + ending, *made))
    create_files(folder, plan_files(specs), constants)
    said = dict(form.config) | ({form.left_in: left} if form.left_in else {})
    config = read_json_object(plain.path / "config.json") | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
