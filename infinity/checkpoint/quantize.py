"""Quantizes a checkpoint of plain weights: a new directory in a form that other programs read, too.

[Note: a template]
A form says which tensors a matrix becomes. From them follows a directory without values, the template: files
with headers and holes, and a ``config.json``. It takes no room, and is opened as any quantized checkpoint: a
plan is made from it, and quantizing is an export in its form (:mod:`infinity.checkpoint.requantize`).

[Note: which weights]
Those of linear layers and of packed experts, but for the head and routers; the model says which they are, and
its conversions which stored matrices they are made of. What the form has no blocks for stays as it is.

[Note: experts in one tensor]
compressed-tensors has no place for a tensor with the weights of all experts. So a checkpoint with such ones
(Llama 4, gpt-oss) is written as the program does that has: FP8 as transformers' ``FP8Experts``, MXFP4 as
gpt-oss is published (experts only), NVFP4 as ModelOpt, but with a scale of scales for each expert instead of
one for all, so that one expert is encoded at a time. No program has one for INT8.
"""

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from infinity.checkpoint.forms import read_quantization
from infinity.checkpoint.load import OnProgress, sources_of
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.requantize import Requantized, export_stored
from infinity.checkpoint.writer import TensorSpec, plan_files
from infinity.comm.ranks import Ranks
from infinity.core.errors import CheckpointError, library_errors
from infinity.partition.builder import routers

#: What is encoded, and how: to be changed when a form's tensors or rules change.
_VERSION = b"2"
#: The most bytes of values in one file.
_MOST_FILE_NBYTES = 4 * 2**30
#: Matrices with fewer rows or columns are left, such as gates.
_LEAST_ROWS = 16
_FP8_BLOCK, _NF4_BLOCK = 128, 64

_Shape: TypeAlias = tuple[int, ...]


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
_WITH_EXPERTS: dict[str, _Form] = {
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
    source: Path, like: Path, out: Path, ranks: Ranks, on_progress: OnProgress | None = None
) -> Requantized:
    """Write the checkpoint ``source`` to ``out`` in the form of ``like``, its template; every rank must call.

    Memory holds a piece of a matrix at a time (of NVFP4 a whole one). Raises errors of an export.
    """

    def shapes() -> dict[str, _Shape]:
        with Checkpoint(source) as plain:
            return {key: tuple(tensor.shape) for key, tensor in plain.items()}

    def companions(plain: Path) -> list[Path]:
        found = [plain / name for name in ("config.json", "generation_config.json")]
        return [path for path in found if path.is_file()] + tokenizer_files(plain)

    result = export_stored(
        like, out, shapes=shapes, export=lambda path: source, companions=companions, ranks=ranks,
        on_progress=on_progress,
    )  # fmt: skip
    with Checkpoint(source) as plain, Checkpoint(like) as made:
        packed = [(made.get(key), each) for key, each in plain.items() if len(each.shape) == 3]
        left = [
            each.shape.numel() * each.dtype.itemsize
            for like, each in packed
            if min(each.shape[-2:]) >= _LEAST_ROWS and like is not None and like.dtype == each.dtype
        ]
    return replace(result, left_nbytes=tuple(left))


def fingerprint(source: Path, like: Path) -> str:
    """Return a digest of samples of ``source`` and of its template, the same for the same result."""
    digest = hashlib.blake2b(_VERSION, digest_size=8)
    with Checkpoint(source) as plain, Checkpoint(like) as empty:
        for file in plain.files:
            digest.update(f"{file.path.name} {file.sample()} ".encode())
        for path in sorted(source.glob("*.bin")) if plain.pickled else ():
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns} ".encode())
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
        made = (
            form if isinstance(form, _Form) else (_WITH_EXPERTS if packed else FORMS).get(form, FORMS[form])
        )
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
    for key, tensor in sorted(plain.items(), key=lambda each: _place(each[1])):
        if key not in chosen:
            specs.append(TensorSpec(key, tensor.dtype, tuple(tensor.shape)))
            continue
        stem = key.removesuffix(form.replaces)
        for ending, made in form.tensors(chosen[key]).items():
            if isinstance(made, Tensor):
                constants[stem + ending], made = made, (made.dtype, tuple(made.shape))
            specs.append(TensorSpec(stem + ending, *made))
    write_holes(folder, specs, constants)
    said = dict(form.config) | ({form.left_in: left} if form.left_in else {})
    config = read_json_object(plain.path / "config.json") | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def _place(tensor: Stored) -> tuple[int, int]:
    [piece] = tensor.ranges(0, 1) if isinstance(tensor, FileTensor) else [None]
    return (0, 0) if piece is None else (piece.file, piece.offset)


def write_holes(folder: Path, specs: Sequence[TensorSpec], constants: Mapping[str, Tensor]) -> None:
    """Write the files of a checkpoint with holes for values, but those of ``constants``."""
    plans = plan_files(specs, _MOST_FILE_NBYTES)
    for plan in plans:
        with (folder / plan.name).open("xb") as file:
            file.truncate(plan.nbytes)
            file.write(plan.header)
            for key in plan.starts.keys() & constants.keys():
                file.seek(plan.starts[key])
                file.write(constants[key].numpy().tobytes())
    if len(plans) > 1:
        index = {"weight_map": {key: plan.name for plan in plans for key in plan.starts}}
        (folder / (SAFETENSORS + INDEX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
