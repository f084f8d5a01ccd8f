"""Knows the quantized forms of checkpoints: what names them in a config, and which stored tensors they have.

[Note: what is quantized]
``quantization_config`` names the method. Which tensors have it, and in which form, follows from the keys,
dtypes and shapes: methods list modules that were left out in different ways, but a weight with scales is
always quantized. So files in which layers have several forms need no more.

[Note: plain weights only]
A form is decoded only if its values are the weights themselves. Where a library multiplies activations by
something when it runs the model (``pre_quant_scale``, rotations), a decoded weight would be another model's.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import Checkpoint, Stored, read_json_object
from infinity.checkpoint.quantized import Decoded, Kept, SlabPart
from infinity.core.config import shown
from infinity.core.errors import CheckpointError, first_line, library_errors
from infinity.device.machine import compile_ahead

#: ModelOpt's file beside a ``config.json`` that does not name the quantization.
HF_QUANT_CONFIG = "hf_quant_config.json"
#: Formats of compressed-tensors and algorithms of ModelOpt, with the names of their numbers.
_COMPRESSED = {
    "pack-quantized": "INT4", "int-quantized": "INT8", "float-quantized": "FP8", "naive-quantized": "FP8",
    "nvfp4-pack-quantized": "NVFP4", "mxfp4-pack-quantized": "MXFP4", "mxfp8-quantized": "MXFP8",
}  # fmt: skip
_MODELOPT = {
    "FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8", "MXFP8": "MXFP8",
    "NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4", "MIXED_PRECISION": "mixed forms",
}  # fmt: skip
#: The largest description of a bitsandbytes matrix that is read (bytes), and the sizes of its blocks.
_MOST_STATE_NBYTES, _BLOCKS = 2**16, (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Holds the contents of ``quantization_config``."""

    method: str  # of ``_METHODS``
    form: str  # for people, such as NVFP4
    block: tuple[int, int] | None = None  # rows and columns that share an FP8 scale; None: all
    bits: int = 0  # of a whole number; 0: they follow from its shape
    group_size: int = 0  # whole numbers that share a scale, along the inputs; 0: all, or they follow from it
    less_one: bool = True  # zeros are stored so: see codecs.decode_gptq
    power_of_two: bool = False  # FP8 scales are, whatever their dtype

    def __str__(self) -> str:
        return self.form


def read_quantization(path: Path) -> Quantization | None:
    """Return the quantization that ``path`` declares, or None; a CheckpointError if it cannot be decoded."""
    file, given = declared(path)
    if not given:
        return None
    try:
        if not isinstance(given, dict):
            raise ValueError(f"it is {shown(given)}; wanted a map")
        return _parse(given)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"{path} holds quantized weights that cannot be decoded: quantization_config in {file}: "
            f"{first_line(error)}. Decoded are fp8 (e4m3 with block scales), mxfp4, compressed-tensors "
            f"({', '.join(_COMPRESSED)}), modelopt ({', '.join(_MODELOPT)}), awq (gemm), gptq (4 or 8 bits) "
            "and bitsandbytes. Save another one as bf16 once, with the library that wrote it"
        ) from error


def declared(path: Path) -> tuple[str, Any]:
    """Return the name of the file of ``path`` that declares a quantization, and what it says, if anything."""
    raw = read_json_object(path / "config.json")
    inner = raw["text_config"] if isinstance(raw.get("text_config"), dict) else {}
    given = raw.get("quantization_config") or inner.get("quantization_config")
    if given or not (path / HF_QUANT_CONFIG).is_file():
        return "config.json", given
    said = read_json_object(path / HF_QUANT_CONFIG).get("quantization")
    if not isinstance(said, dict):
        return HF_QUANT_CONFIG, said  # which is an error, unless it is nothing
    return HF_QUANT_CONFIG, said.get("quant_algo") and {"quant_method": "modelopt"} | said


def _parse(given: Mapping[str, Any]) -> Quantization:
    loads = [bits for bits in ("4bit", "8bit") if given.get(f"load_in_{bits}")]
    method = given.get("quant_method") or ("bitsandbytes" if loads else given["quant_method"])
    if method == "fp8":
        block = given.get("weight_block_size")
        block = None if block is None else (_count(block[0]), _count(block[1]))
        return Quantization(method, "FP8", block, power_of_two=given.get("scale_fmt") == "ue8m0")
    if method == "mxfp4":
        return Quantization(method, "MXFP4")
    if method == "gptq":
        form = given.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format is {json.dumps(form)}")
        bits = _bits(given["bits"])
        return Quantization(method, f"INT{bits} of gptq", bits=bits, less_one=form == "gptq")
    if method == "awq":
        version, bits = given.get("version") or given.get("format") or "gemm", given.get("bits", 4)
        if str(version).lower() != "gemm" or bits != 4:
            raise ValueError(f"version is {json.dumps(version)[:100]} with {bits} bits; wanted gemm with 4")
        return Quantization(method, "INT4 of awq", bits=4)
    if method == "bitsandbytes":
        if len(loads) != 1:
            raise ValueError("wanted either load_in_4bit or load_in_8bit")
        form = str(given.get("bnb_4bit_quant_type", "fp4")).upper() if loads == ["4bit"] else "LLM.int8"
        return Quantization(method, f"{form[:100]} of bitsandbytes")
    if method == "modelopt":
        algorithm = given["quant_algo"]
        if algorithm not in _MODELOPT:
            raise ValueError(f"quant_algo is {json.dumps(algorithm)[:100]}")
        return Quantization(method, f"{_MODELOPT[algorithm]} of modelopt")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method is {json.dumps(method)[:100]}")
    return _parse_compressed(method, given)


def _parse_compressed(method: str, given: Mapping[str, Any]) -> Quantization:
    if (sparsity := (given.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise ValueError(f"weights are sparse ({sparsity})")
    if given.get("transform_config"):
        raise ValueError("its layers are rotated (transform_config)")
    names, packed = set[str](), set[tuple[int, int]]()
    for scheme in given["config_groups"].values():
        weights, kind = scheme["weights"], scheme.get("format") or given.get("format")
        if kind not in _COMPRESSED:
            raise ValueError(f"format is {kind}")
        name = _COMPRESSED[kind]
        if kind == "naive-quantized" and weights.get("type", "int") == "int":
            name = "INT8"
        if kind == "pack-quantized":
            if weights.get("type", "int") != "int":
                raise ValueError(f"weights are of type {weights['type']}")
            if weights.get("strategy", "group") not in ("group", "channel"):
                raise ValueError(f"the strategy of weights is {weights['strategy']}")
            if weights.get("actorder") not in (None, False, "weight", "static"):
                raise ValueError("columns are grouped in another order (actorder)")
            bits, size = _bits(weights["num_bits"]), weights.get("group_size")
            packed.add((bits, 0 if size in (None, -1) else _count(size)))
            name = f"INT{bits}"
        names.add(name)
    bits, size = packed.pop() if len(packed) == 1 else (0, 0)
    return Quantization(
        method, f"{' and '.join(sorted(names))} of {method}", bits=bits, group_size=size
    )  # fmt: skip


def _bits(given: Any) -> int:
    if given not in (4, 8):
        raise ValueError(f"whole numbers have {given} bits")
    return int(given)


def _count(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"got {given!r}, wanted a positive whole number")
    return given


def decode_checkpoint(checkpoint: Checkpoint, form: Quantization, dtype: torch.dtype | None = None) -> int:
    """Replace the stored tensors of each quantized weight by one under its unquantized key; return how many.

    ``checkpoint`` stays open while tensors are read. Values are rounded to ``dtype``; None: they stay exact
    (see :mod:`infinity.checkpoint.quantized`, dtype). Raises a CheckpointError that names the key if tensors
    do not go together.
    """
    stored, found, kept = dict(checkpoint), dict[str, Stored](), Kept()
    rows = _METHODS[form.method]
    for key in stored:
        for ending, plain_ending, make in rows:
            if not key.endswith(ending):
                continue
            name = key.removesuffix(ending)
            group = _Group(stored, name)
            with library_errors(CheckpointError, f"{checkpoint.path}: {key} cannot be decoded as {form}"):
                made = make(group, form)
            if made is not None:
                made.dtype, made.kept = dtype or made.dtype, kept
                for used in group.used:
                    checkpoint.pop(used, None)
                found[name + plain_ending] = made
            break
    if not found:
        endings = " or ".join(ending for ending, _, _ in rows)
        raise CheckpointError(
            f"{checkpoint.path}: quantization_config in config.json says {form}, but no tensor ends "
            f"with {endings} and has scales: its weights are not quantized, or not so"
        )
    for key in [key for key in checkpoint if key.endswith(_NEEDLESS)]:
        del checkpoint[key]
    for key, tensor in checkpoint.items():
        if tensor.dtype == torch.float8_e4m3fn:
            raise CheckpointError(
                f"{checkpoint.path}: {key} has {_plain(tensor.dtype)} numbers of shape "
                f"{tuple(tensor.shape)}, and no scales that {form} knows. Download or copy it again"
            )
    checkpoint.update(found)
    return len(found)


#: Endings of tensors that only quantized activations and caches need, or readers of another program.
_NEEDLESS = (
    ".activation_scale", ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".weight_format", "_proj_input_scale",
)  # fmt: skip


@dataclass(slots=True)
class _Group:
    """Gives access to the stored tensors of one quantized weight, and records which are ``used``."""

    stored: Mapping[str, Stored]
    name: str
    used: list[str] = field(default_factory=list)

    def __contains__(self, ending: str) -> bool:
        return self.name + ending in self.stored

    def take(self, ending: str, dtypes: tuple[torch.dtype, ...], ndim: int | None = None) -> Stored:
        """Return the tensor whose key ends so, or raise a ValueError if it has another dtype or ``ndim``."""
        key = self.name + ending
        tensor = self.stored[key]
        if tensor.dtype not in dtypes or ndim not in (None, len(tensor.shape)):
            wanted = " or ".join(map(_plain, dtypes)) + ("" if ndim is None else f" of {ndim} dimensions")
            raise ValueError(f"{key}: {_plain(tensor.dtype)} of shape {tuple(tensor.shape)}; wanted {wanted}")
        self.used.append(key)
        return tensor


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _misfit(weight: Stored, scales: Stored, more: str = "") -> ValueError:
    return ValueError(f"its shape is {tuple(weight.shape)}, that of its scales {tuple(scales.shape)}{more}")


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)


def _fp8(group: _Group, quantization: Quantization) -> Decoded | None:
    if "weight_scale_inv" not in group and group.stored[group.name + "weight"].dtype != torch.float8_e4m3fn:
        return None  # was left out of the quantization
    weight = group.take("weight", (torch.float8_e4m3fn,), 2)
    scales = group.take("weight_scale_inv", (*_FLOATS, *_EXPONENTS))
    return _e4m3(weight, scales, torch.float32, quantization)


def _fp8_experts(group: _Group, quantization: Quantization) -> Decoded | None:
    """Return experts of one parameter, as transformers stores them (``FP8Experts``)."""
    if group.name.endswith("weight"):
        return None  # the scales of a matrix: see _fp8
    weight = group.take("", (torch.float8_e4m3fn,), 3)
    scales = group.take("_scale_inv", (*_FLOATS, *_EXPONENTS))
    return _e4m3(weight, scales, torch.float32, quantization)


def _e4m3(weight: Stored, scales: Stored, dtype: torch.dtype, quantization: Quantization) -> Decoded:
    """Return an FP8 matrix, or one of each expert, whose products are rounded to ``dtype``."""
    matrices, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    blocks, given = scales.shape, quantization.block
    if blocks.numel() == 1:  # one number for all
        matrices, rows, blocks = torch.Size(), weight.shape[:-1].numel(), torch.Size((1, 1))
    elif matrices and blocks[:1] == matrices:
        blocks = blocks[1:] if blocks[1:].numel() > 1 else torch.Size((1, 1))
    if blocks == (rows,):
        blocks = torch.Size((rows, 1))
    if len(blocks) != 2:
        raise _misfit(weight, scales, "; wanted one number, one for each row, or one for each block")
    if given is not None and blocks == (-(-rows // given[0]), -(-columns // given[1])):
        block = min(rows, given[0]) or 1, min(columns, given[1]) or 1
    elif blocks.numel() and not (rows % blocks[0] or columns % blocks[1]):  # the file's own
        block = rows // blocks[0], columns // blocks[1]
    else:
        raise _misfit(weight, scales, f", that of a block {given}")
    if matrices and rows % block[0]:
        raise ValueError(f"each expert has {rows} rows, which are no whole number of blocks of {block[0]}")

    decode = partial(codecs.decode_fp8, block=block, dtype=dtype)

    def decode_into(out: Tensor, first: int, codes: Tensor, scales: Tensor) -> None:
        """Decode with a compiled loop, to the same values."""
        from infinity.optim import kernels

        factors = codecs.as_float(scales)
        if isinstance(out, FakeTensor):  # a dry run counts the bytes that operators move
            out.copy_(codes.view(torch.uint8).flatten())
        elif (out.dtype == torch.float16 and not kernels.converts_half()) or dtype not in (
            torch.float32,
            out.dtype,
        ):  # this CPU has no such loop, or products are rounded twice
            out.copy_(decode(first, codes, scales).flatten())
        else:

            def run(codes: Tensor, out: Tensor) -> None:
                stored, by = kernels.array(codes.view(torch.uint8).flatten()), kernels.array(factors)
                kernels.decode_fp8(stored, by, kernels.array(out), columns, block, first)

            compile_ahead(("decode_fp8", out.dtype), partial(run, codes[:0], out[:0]))
            run(codes, out)

    parts = SlabPart(weight, (columns,)), SlabPart(scales, (blocks[1],), block[0])
    encode = partial(codecs.encode_fp8, block=block, dtype=dtype, power_of_two=quantization.power_of_two)
    return Decoded(weight.shape, dtype, columns, parts, decode, encode, decode_into)


def _mxfp4(group: _Group, quantization: Quantization) -> Decoded:
    blocks = group.take("_blocks", (torch.uint8,), 4)
    scales = group.take("_scales", (torch.uint8,), 3)
    experts, rows, groups, width = blocks.shape
    if scales.shape != blocks.shape[:-1] or width != 16:
        raise _misfit(blocks, scales)
    shape = torch.Size((experts, 2 * groups * width, rows))
    parts = SlabPart(blocks, blocks.shape[1:]), SlabPart(scales, scales.shape[1:])
    numel, decode, encode = shape[1:].numel(), codecs.decode_mxfp4, codecs.encode_mxfp4
    return Decoded(shape, torch.bfloat16, numel, parts, decode, encode)


def _compressed(group: _Group, quantization: Quantization) -> Decoded:
    """Return a packed matrix of compressed-tensors: whole numbers, or e2m1 with one or two scales."""
    packed = group.take("weight_packed", (torch.int32, torch.uint8), 2)
    if packed.dtype == torch.int32:
        return _packed(group, packed, quantization)
    if "weight_zero_point" in group:
        raise ValueError("its e2m1 numbers have zero points (weight_zero_point)")
    scales = group.take("weight_scale", (torch.float8_e4m3fn, *_EXPONENTS), 2)
    if scales.dtype != torch.float8_e4m3fn:
        return _e2m1(packed, scales, 32)
    return _e2m1(packed, scales, 16, group.take("weight_global_scale", (torch.float32,)), divides=True)


def _e2m1(
    packed: Stored, scales: Stored, size: int, whole: Stored | None = None, *, divides: bool = False
) -> Decoded:
    """Return a matrix of e2m1 numbers, of which ``size`` share a scale: see codecs.decode_e2m1."""
    rows, width = packed.shape
    if scales.shape != (rows, 2 * width // size) or 2 * width % size:
        raise _misfit(packed, scales, f"; wanted one for {size} of {2 * width} columns")
    parts = [SlabPart(packed, (width,)), SlabPart(scales, (2 * width // size,))]
    dtype = torch.bfloat16 if whole is None else torch.float32
    if whole is not None:
        if whole.shape.numel() != 1:
            raise ValueError(f"its scale of scales has shape {tuple(whole.shape)}; wanted one number")
        parts.append(SlabPart(whole, (1,), max(1, rows)))
    decode = partial(codecs.decode_e2m1, divides=divides)
    encode = partial(codecs.encode_e2m1, divides=divides)
    return Decoded(torch.Size((rows, 2 * width)), dtype, 2 * width, parts, decode, encode)


def _modelopt_experts(group: _Group, quantization: Quantization) -> Decoded:
    """Return experts of one parameter, as ModelOpt stores them: e4m3, or pairs of e2m1 along inputs.

    Inputs are dimension 1 in models with transposed weights (Llama 4, gpt-oss), and 2 in others.
    """
    weight = group.take("", (torch.float8_e4m3fn, torch.uint8), 3)
    if weight.dtype == torch.float8_e4m3fn:
        scales = group.take("_weight_scale", _FLOATS)
        return _e4m3(weight, scales, scales.dtype, quantization)
    scales = group.take("_weight_scale", (torch.float8_e4m3fn,), 3)
    whole = group.take("_weight_scale_2", (torch.float32,))
    experts, rows, columns = weight.shape
    down = scales.shape == (experts, rows // 8, columns)
    along = down or scales.shape == (experts, rows, columns // 8)
    if not along or (rows if down else columns) % 8:
        raise _misfit(weight, scales, "; wanted one for 16 numbers along dimension 1 or 2")
    if whole.shape.numel() not in (1, experts):
        raise ValueError(f"its scales of scales have shape {tuple(whole.shape)}; wanted one, or {experts}")
    if down:
        shape, slab, slabs = torch.Size((experts, 2 * rows, columns)), (8, columns), rows // 8
    else:
        shape, slab, slabs = torch.Size((experts, rows, 2 * columns)), (1, columns), rows
    together = max(1, slabs * experts // max(1, whole.shape.numel()))
    groups = (math.prod(slab) // 8,)
    parts = SlabPart(weight, slab), SlabPart(scales, groups), SlabPart(whole, (1,), together)
    decode = partial(codecs.decode_e2m1_experts, together=together, down=down)
    encode = partial(codecs.encode_e2m1_experts, down=down)
    return Decoded(shape, torch.float32, 2 * math.prod(slab), parts, decode, encode)


def _packed(group: _Group, packed: Stored, quantization: Quantization) -> Decoded:
    scales = group.take("weight_scale", _FLOATS, 2)
    size = group.take("weight_shape", (torch.int64, torch.int32), 1)
    bits, (rows, words), groups = quantization.bits, packed.shape, scales.shape[1]
    columns = groups * quantization.group_size
    if not columns:  # the config does not say
        columns = int(size.read(1, 1))
        fitting = [each for each in (4, 8) if words == -(-columns * each // 32)]
        bits = bits or (fitting[0] if fitting else 4)
    in_word = 32 // bits
    parts = [SlabPart(packed, (words,)), SlabPart(scales, (groups,))]
    if "weight_zero_point" in group:  # a word holds several rows
        parts.append(SlabPart(group.take("weight_zero_point", (torch.int32,), 2), (groups,), in_word))
    if "weight_g_idx" in group:
        raise ValueError("its columns are grouped in another order (weight_g_idx)")
    if (
        scales.shape[0] != rows
        or not groups
        or -(-columns // in_word) != words
        or columns % max(1, groups)
        or any(part.tensor.shape != (-(-rows // in_word), groups) for part in parts[2:])
    ):
        raise _misfit(packed, scales)

    spare = words * in_word - columns
    decode = partial(codecs.decode_packed, bits=bits, spare=spare)
    encode = partial(codecs.encode_packed, bits=bits, spare=spare)
    return Decoded(torch.Size((rows, columns)), scales.dtype, columns, parts, decode, encode)


def _scaled(group: _Group, quantization: Quantization) -> Decoded | None:
    """Return a matrix with ``weight_scale``; the dtype of its numbers says what it is."""
    if "pre_quant_scale" in group:
        raise ValueError(
            f"its inputs are multiplied by {group.name}pre_quant_scale, which no plain model has"
        )
    dtype = group.stored[group.name + "weight"].dtype
    if dtype.is_floating_point and dtype.itemsize > 1 and "weight_scale" not in group:
        return None  # was left out of the quantization
    weight = group.take("weight", (torch.float8_e4m3fn, torch.int8, torch.uint8), 2)
    if dtype == torch.uint8:
        whole = group.take("weight_scale_2", (torch.float32,))
        return _e2m1(weight, group.take("weight_scale", (torch.float8_e4m3fn,), 2), 16, whole)
    if dtype == torch.int8:
        return _int8(group, weight, group.take("weight_scale", _FLOATS))
    scales = group.take("weight_scale", (*_FLOATS, *_EXPONENTS))
    return _e4m3(weight, scales, torch.bfloat16 if scales.dtype.itemsize == 1 else scales.dtype, quantization)


def _int8(group: _Group, weight: Stored, scales: Stored) -> Decoded:
    rows, columns = weight.shape
    groups = 1 if len(scales.shape) < 2 else scales.shape[-1]
    each_row = scales.shape in ((rows,), (rows, groups))
    if not (each_row or scales.shape.numel() == 1) or columns % max(1, groups) or not groups:
        raise _misfit(weight, scales)
    slabs = 1 if each_row else max(1, rows)
    parts = [SlabPart(weight, (columns,)), SlabPart(scales, (groups,), slabs)]
    if "weight_zero_point" in group:
        zeros = group.take("weight_zero_point", (torch.int8,))
        if zeros.shape != scales.shape:
            raise ValueError(
                f"its zero points have shape {tuple(zeros.shape)}, its scales {tuple(scales.shape)}"
            )
        parts.append(SlabPart(zeros, (groups,), slabs))
    return Decoded(weight.shape, scales.dtype, columns, parts, codecs.decode_int8, codecs.encode_int8)


def _gptq(group: _Group, quantization: Quantization) -> Decoded:
    packed = group.take("qweight", (torch.int32,), 2)
    zeros = group.take("qzeros", (torch.int32,), 2)
    scales = group.take("scales", _FLOATS, 2)
    order = group.take("g_idx", (torch.int32, torch.int64), 1)
    bits = quantization.bits
    rows, [columns] = packed.shape[1], order.shape
    if (
        scales.shape[1] != rows
        or packed.shape[0] != -(-columns * bits // 32)
        or zeros.shape != (scales.shape[0], -(-rows * bits // 32))
    ):
        more = f", of qzeros {tuple(zeros.shape)}, of g_idx {tuple(order.shape)}"
        raise _misfit(packed, scales, more)
    numbers = order.read()  # here, since an accelerator that decodes would not say what is wrong
    if bool(((numbers < 0) | (numbers >= scales.shape[0])).any()):
        raise ValueError(f"{group.used[-1]} names groups that {group.used[-2]} does not have")

    parts = [SlabPart(each, tuple(each.shape)) for each in (packed, zeros, scales, order)]
    decode = partial(codecs.decode_gptq, bits=bits, less_one=quantization.less_one)
    return Decoded(
        torch.Size((rows, columns)), scales.dtype, rows * columns, parts, decode, None, chosen_by="GPTQ"
    )  # fmt: skip


def _awq(group: _Group, quantization: Quantization) -> Decoded:
    packed = group.take("qweight", (torch.int32,), 2)
    zeros = group.take("qzeros", (torch.int32,), 2)
    scales = group.take("scales", _FLOATS, 2)
    columns, words = packed.shape
    groups, rows = scales.shape
    if words * 8 != rows or zeros.shape != (groups, words) or not groups or columns % groups:
        raise _misfit(packed, scales, f", of qzeros {tuple(zeros.shape)}")
    parts = [SlabPart(each, tuple(each.shape)) for each in (packed, zeros, scales)]
    return Decoded(
        torch.Size((rows, columns)), scales.dtype, rows * columns, parts, codecs.decode_awq, None,
        chosen_by="AWQ",
    )  # fmt: skip


def _llm_int8(group: _Group, quantization: Quantization) -> Decoded:
    weight, sizes = group.take("weight", (torch.int8,), 2), group.take("SCB", (torch.float32,), 1)
    if sizes.shape != weight.shape[:1]:
        raise _misfit(weight, sizes)
    if "weight_format" in group:
        order = group.take("weight_format", (torch.uint8,))
        if order.shape.numel() != 1 or int(order.read()):
            raise ValueError(
                f"{group.used[-1]}: its rows are in the order of a kernel; wanted row by row (0)"
            )
    columns = weight.shape[1]
    parts = SlabPart(weight, (columns,)), SlabPart(sizes, (1,))
    decode = partial(codecs.decode_int8, factor=codecs.LLM_INT8)
    return Decoded(weight.shape, torch.float32, columns, parts, decode, codecs.encode_llm_int8)


def _4bit(group: _Group, quantization: Quantization) -> Decoded:
    """Return a matrix that bitsandbytes packed; ``quant_state`` in its files is JSON."""
    packed = group.take("", (torch.uint8, *_FLOATS))
    kinds = [kind for kind in ("nf4", "fp4") if f".quant_state.bitsandbytes__{kind}" in group]
    if len(kinds) != 1:
        raise ValueError(f"wanted one of {group.name}.quant_state.bitsandbytes__nf4 and __fp4")
    state = group.take(f".quant_state.bitsandbytes__{kinds[0]}", (torch.uint8,), 1)
    if state.shape.numel() > _MOST_STATE_NBYTES:
        raise ValueError(f"{group.used[-1]} has {state.shape.numel()} bytes; wanted JSON of a few lines")
    said = json.loads(state.read().numpy().tobytes())
    size, dtype = said["blocksize"], {_plain(each): each for each in _FLOATS}[str(said["dtype"])]
    shape = torch.Size(map(_count, said["shape"]))
    nbytes = packed.shape.numel() * packed.dtype.itemsize
    if size not in _BLOCKS or said["quant_type"] != kinds[0]:
        raise ValueError(f"{group.used[-1]} says {json.dumps(said)[:300]}")
    if len(shape) < 2 or nbytes != -(-shape.numel() // 2):
        raise ValueError(f"{group.name} has {nbytes} bytes, for a matrix of shape {tuple(shape)}")
    if shape.numel() % size:
        raise ValueError(f"a matrix of shape {tuple(shape)} is no whole number of blocks of {size}")
    blocks, parts = shape.numel() // size, [SlabPart(packed, (size // 2 // packed.dtype.itemsize,))]
    how: dict[str, Any] = {"numbers": codecs.NF4 if kinds == ["nf4"] else codecs.FP4, "dtype": dtype}
    if ".nested_absmax" in group:
        together = min(_count(said["nested_blocksize"]), blocks)
        parts.append(SlabPart(group.take(".absmax", (torch.uint8,), 1), (1,)))
        second = group.take(".nested_absmax", (torch.float32,), 1)
        parts.append(SlabPart(second, (1,), together))
        table = group.take(".nested_quant_map", (torch.float32,), 1)
        if table.shape != (256,) or second.shape != (-(-blocks // together),):
            raise ValueError(f"its scales of scales have shapes {tuple(second.shape)}, {tuple(table.shape)}")
        how |= {"of_sizes": tuple(table.read().tolist()), "together": together}
        how["offset"] = float(said["nested_offset"])
    else:
        parts.append(SlabPart(group.take(".absmax", (torch.float32,), 1), (1,)))
    if parts[1].tensor.shape != (blocks,):
        raise _misfit(packed, parts[1].tensor, f"; wanted {blocks}")
    if ".quant_map" in group:
        group.take(".quant_map", (torch.float32,), 1)  # is that of the type, which kernels know
    decode, encode = partial(codecs.decode_4bit, **how), partial(codecs.encode_4bit, **how)
    return Decoded(shape, dtype, size, parts, decode, encode)


_Make = Callable[[_Group, Quantization], Decoded | None]
#: For each method: endings of a quantized key, the ending that replaces each, and the maker of the tensor.
_METHODS: dict[str, tuple[tuple[str, str, _Make], ...]] = {
    "fp8": (("weight", "weight", _fp8), ("_scale_inv", "", _fp8_experts)),
    "mxfp4": (("_blocks", "", _mxfp4),),
    "compressed-tensors": (("weight_packed", "weight", _compressed), ("weight", "weight", _scaled)),
    "modelopt": (("weight", "weight", _scaled), ("_weight_scale", "", _modelopt_experts)),
    "gptq": (("qweight", "weight", _gptq),),
    "awq": (("qweight", "weight", _awq),),
    "bitsandbytes": ((".absmax", "", _4bit), ("SCB", "weight", _llm_int8)),
}
