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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import Checkpoint, Latest, Stored, read_json_object
from infinity.checkpoint.quantized import Decoded, SlabPart
from infinity.core.config import shown
from infinity.core.errors import CheckpointError, library_errors
from infinity.device.machine import compile_ahead

#: ModelOpt's file beside a ``config.json`` that does not name the quantization.
HF_QUANT_CONFIG = "hf_quant_config.json"
#: Formats of compressed-tensors and algorithms of ModelOpt, with the names of their numbers.
_COMPRESSED = {
    "pack-quantized": "INT4", "int-quantized": "INT8", "float-quantized": "FP8", "naive-quantized": "FP8",
    "nvfp4-pack-quantized": "NVFP4", "mxfp4-pack-quantized": "MXFP4", "mxfp8-quantized": "MXFP8",
}  # fmt: skip
#: Inputs that share a scale in those of one size.
_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
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
    zeros: bool = False  # whole numbers have zero points
    less_one: bool = True  # zeros are stored so: see codecs.decode_gptq
    power_of_two: bool = False  # FP8 scales are, whatever their dtype

    def __str__(self) -> str:
        return self.form


def read_quantization(path: Path) -> Quantization | None:
    """Return the quantization that ``path`` declares, or None; a CheckpointError if it cannot be decoded."""
    file, given = declared(path)
    if not given:
        return None
    what = (
        f"{path} holds quantized weights that cannot be decoded. Decoded are fp8 (e4m3 with block scales), "
        f"mxfp4, compressed-tensors ({', '.join(_COMPRESSED)}), modelopt ({', '.join(_MODELOPT)}), awq, "
        "gptq (4 or 8 bits) and bitsandbytes; save another one as bf16 once, with the library that wrote it. "
        f"quantization_config in {file}"
    )
    with library_errors(CheckpointError, what):
        if not isinstance(given, dict):
            raise ValueError(f"it is {shown(given)}; wanted a map")
        return _parse(given)


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
        if block is not None:
            if not isinstance(block, list) or len(block) != 2:
                raise ValueError(f"weight_block_size is {shown(block)}; wanted rows and columns")
            block = _count(block[0], "weight_block_size"), _count(block[1], "weight_block_size")
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
        if loads == ["4bit"] and (kind := given.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            raise ValueError(f"bnb_4bit_quant_type is {shown(kind)}; wanted nf4, whose errors are smaller")
        return Quantization(method, f"{'NF4' if loads == ['4bit'] else 'LLM.int8'} of bitsandbytes")
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
    names, packed, zeros = set[str](), set[tuple[int, int]](), set[bool]()
    for scheme in given["config_groups"].values():
        weights, kind = scheme["weights"], scheme.get("format") or given.get("format")
        if kind not in _COMPRESSED:
            raise ValueError(f"format is {kind}")
        name, size = _COMPRESSED[kind], weights.get("group_size")
        if kind == "naive-quantized" and weights.get("type", "int") == "int":
            name = "INT8"
        if kind == "pack-quantized":
            if weights.get("type", "int") != "int":
                raise ValueError(f"weights are of type {weights['type']}")
            if weights.get("strategy", "group") not in ("group", "channel"):
                raise ValueError(f"the strategy of weights is {weights['strategy']}")
            if weights.get("actorder") not in (None, False, "weight", "static"):
                raise ValueError("columns are grouped in another order (actorder)")
            bits = _bits(weights["num_bits"])
            packed.add((bits, 0 if size in (None, -1) else _count(size)))
            name = f"INT{bits}"
        elif size not in (None, -1, _GROUPS.get(kind, size)):
            raise ValueError(f"group_size is {size}; wanted {_GROUPS[kind]} in {kind}")
        elif name == "INT8" and weights.get("num_bits", 8) != 8:
            raise ValueError(f"num_bits is {weights['num_bits']}; wanted 8 in {kind}")
        elif name == "INT8" and weights.get("strategy") == "group":
            packed.add((0, _count(size)))
        names.add(name)
        zeros.add(name.startswith("INT") and weights.get("symmetric") is False)
    bits, size = packed.pop() if len(packed) == 1 else (0, 0)
    form = f"{' and '.join(sorted(names))} of {method}"
    return Quantization(method, form, bits=bits, group_size=size, zeros=zeros == {True})


def _bits(given: Any) -> int:
    if given not in (4, 8):
        raise ValueError(f"whole numbers have {given} bits")
    return int(given)


def _count(given: Any, key: str = "group_size") -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"{key}: got {given!r}, wanted a positive whole number")
    return given


def decode_checkpoint(checkpoint: Checkpoint, form: Quantization, dtype: torch.dtype | None = None) -> int:
    """Replace the stored tensors of each quantized weight by one under its unquantized key; return how many.

    ``checkpoint`` stays open while tensors are read. Values are rounded to ``dtype``; None: they stay exact
    (see :mod:`infinity.checkpoint.quantized`, dtype). Raises a CheckpointError that names the key if tensors
    do not go together.
    """
    stored, found, latest = dict(checkpoint), dict[str, Stored](), Latest[Tensor]()
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
                made.dtype, made.latest = dtype or made.dtype, latest
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
        if tensor.dtype in _CODES and len(tensor.shape) in (2, 3):
            raise CheckpointError(
                f"{checkpoint.path}: {key} cannot be decoded as {form}: got {_plain(tensor.dtype)} of shape "
                f"{_sizes(tensor.shape)} alone; wanted its numbers or scales beside it: copy it again"
            )
    checkpoint.update(found)
    return len(found)


#: Dtypes of matrices that no model has as they are.
_CODES = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.int32
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

    def take(self, ending: str, dtypes: tuple[torch.dtype, ...], *shapes: Sequence[int]) -> Stored:
        """Return the tensor whose key ends so; a ValueError unless it has one of these dtypes and shapes."""
        key, wanted = self.name + ending, " or ".join(map(_plain, dtypes))
        if shapes:
            wanted += f" of shape {' or '.join(_sizes(shape) for shape in shapes)}"
        if (tensor := self.stored.get(key)) is None:
            raise ValueError(f"{key} is missing; wanted {wanted}")
        fits = not shapes or any(_fits(tensor.shape, shape) for shape in shapes)
        if tensor.dtype not in dtypes or not fits:
            raise ValueError(
                f"{key}: got {_plain(tensor.dtype)} of shape {_sizes(tensor.shape)}; wanted {wanted}"
            )
        self.used.append(key)
        return tensor

    def misfit(self, wanted: str) -> ValueError:
        """Return the error that the tensor taken last has another shape than is ``wanted``."""
        return ValueError(
            f"{self.used[-1]}: got shape {_sizes(self.stored[self.used[-1]].shape)}; wanted {wanted}"
        )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(shape: Sequence[int]) -> str:
    return str(tuple(shape)).replace("-1", "any")


def _fits(shape: torch.Size, wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(b in (-1, a) for a, b in zip(shape, wanted, strict=True))


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
_WHOLE = (torch.int64, torch.int32)
_MATRIX = (-1, -1)


def _fp8(group: _Group, quantization: Quantization) -> Decoded:
    """Return a matrix, or experts of one parameter, as transformers stores them (``FP8Experts``)."""
    weight = group.take("", (torch.float8_e4m3fn,), _MATRIX, (-1, *_MATRIX))
    scales = group.take("_scale_inv", (*_FLOATS, *_EXPONENTS))
    return _e4m3(group, weight, scales, torch.float32, quantization)


def _e4m3(
    group: _Group, weight: Stored, scales: Stored, dtype: torch.dtype, quantization: Quantization
) -> Decoded:
    """Return an FP8 matrix, or one of each expert, whose products are rounded to ``dtype``."""
    matrices, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    blocks, given = scales.shape, quantization.block
    if blocks.numel() == 1:  # one number for all
        matrices, rows, blocks = torch.Size(), weight.shape[:-1].numel(), torch.Size((1, 1))
    elif matrices and blocks[:1] == matrices:
        blocks = blocks[1:] if blocks[1:].numel() > 1 else torch.Size((1, 1))
    if blocks == (rows,):
        blocks = torch.Size((rows, 1))
    divides = len(blocks) == 2 and blocks.numel() > 0 and not (rows % blocks[0] or columns % blocks[1])
    if given is not None and blocks == (-(-rows // given[0]), -(-columns // given[1])):
        block = min(rows, given[0]) or 1, min(columns, given[1]) or 1
    elif blocks.numel() == 1 or (given is None and divides):
        block = rows // blocks[0], columns // blocks[1]  # the file's own
    else:
        each = f"block of {given}" if given else "row, or for each of equal blocks,"
        raise group.misfit(f"one number, or one for each {each} of a weight of shape {_sizes(weight.shape)}")
    if matrices and rows % block[0]:
        raise group.misfit(f"whole blocks of the {rows} rows of each expert; one has {block[0]}")

    decode = partial(codecs.decode_fp8, block=block, dtype=dtype)

    def decode_into(out: Tensor, first: int, codes: Tensor, scales: Tensor) -> None:
        """Decode with a compiled loop, to the same values."""
        from infinity.optim import kernels

        factors = codecs.as_float(scales)
        has_loop = out.dtype != torch.float16 or kernels.converts_half()
        if isinstance(out, FakeTensor):  # a dry run counts the bytes that operators move
            out.copy_(codes.view(torch.uint8).flatten())
        elif not has_loop or dtype not in (torch.float32, out.dtype):  # or products are rounded twice
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
    blocks = group.take("_blocks", (torch.uint8,), (-1, -1, -1, 16))
    scales = group.take("_scales", (torch.uint8,), blocks.shape[:-1])
    experts, rows, groups, width = blocks.shape
    shape = torch.Size((experts, 2 * groups * width, rows))
    parts = SlabPart(blocks, blocks.shape[1:]), SlabPart(scales, scales.shape[1:])
    numel, decode, encode = shape[1:].numel(), codecs.decode_mxfp4, codecs.encode_mxfp4
    return Decoded(shape, torch.bfloat16, numel, parts, decode, encode)


def _compressed(group: _Group, quantization: Quantization) -> Decoded:
    """Return a packed matrix of compressed-tensors: whole numbers, or e2m1 with one or two scales."""
    packed = group.take("weight_packed", (torch.int32, torch.uint8), _MATRIX)
    if packed.dtype == torch.int32:
        return _packed(group, packed, quantization)
    if "weight_zero_point" in group:
        raise ValueError(f"{group.name}weight_zero_point: got zero points; e2m1 numbers have none")
    scales = group.take("weight_scale", (torch.float8_e4m3fn, *_EXPONENTS))
    if scales.dtype != torch.float8_e4m3fn:
        return _e2m1(group, packed, scales, 32)
    return _e2m1(group, packed, scales, 16, "weight_global_scale", divides=True)


def _e2m1(
    group: _Group, packed: Stored, scales: Stored, size: int, ending: str = "", *, divides: bool = False
) -> Decoded:
    """Return a matrix of e2m1 numbers, ``size`` of which share a scale; ``ending``: of a scale of scales."""
    rows, width = packed.shape
    if scales.shape != (rows, 2 * width // size) or 2 * width % size:
        raise group.misfit(f"{rows} rows of one for each {size} of {2 * width} columns")
    whole = group.take(ending, (torch.float32,), (), (1,), (1, 1)) if ending else None
    parts = [SlabPart(packed, (width,)), SlabPart(scales, (2 * width // size,))]
    dtype = torch.bfloat16 if whole is None else torch.float32
    if whole is not None:
        parts.append(SlabPart(whole, (1,), max(1, rows)))
    decode = partial(codecs.decode_e2m1, divides=divides)
    encode = partial(codecs.encode_e2m1, divides=divides)
    return Decoded(torch.Size((rows, 2 * width)), dtype, 2 * width, parts, decode, encode)


def _modelopt_experts(group: _Group, quantization: Quantization) -> Decoded:
    """Return experts of one parameter, as ModelOpt stores them: e4m3, or pairs of e2m1 along inputs.

    Inputs are dimension 1 in models with transposed weights (Llama 4, gpt-oss), and 2 in others.
    """
    weight = group.take("", (torch.float8_e4m3fn, torch.uint8), (-1, *_MATRIX))
    experts, rows, columns = weight.shape
    if weight.dtype == torch.float8_e4m3fn:
        scales = group.take("_weight_scale", _FLOATS)
        return _e4m3(group, weight, scales, scales.dtype, quantization)
    across, along = (experts, rows // 8, columns), (experts, rows, columns // 8)
    scales = group.take("_weight_scale", (torch.float8_e4m3fn,), across, along)
    down = scales.shape == across
    if (rows if down else columns) % 8:
        raise group.misfit(
            f"one for 16 numbers along dimension 1 or 2 of a weight of shape {_sizes(weight.shape)}"
        )
    whole = group.take(
        "_weight_scale_2", (torch.float32,), (), (1,), (experts,), (experts, 1), (experts, 1, 1)
    )
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
    (rows, words), size = packed.shape, quantization.group_size
    said = [int(each) for each in group.take("weight_shape", _WHOLE, (2,)).read()]
    columns = said[1]
    bits = quantization.bits or next((each for each in (4, 8) if words == -(-columns * each // 32)), 4)
    in_word = 32 // bits
    if said[0] != rows or words != -(-columns // in_word):
        raise ValueError(
            f"{group.used[-1]}: got {said}; wanted {rows} rows, in {words} words of {in_word} numbers"
        )
    scales = group.take("weight_scale", _FLOATS, (rows, columns // size if size else -1))
    groups = scales.shape[1]
    if not groups or columns % groups or size not in (0, columns // groups):
        raise group.misfit(f"one for each {size or 'of equal groups'} of {columns} columns")
    parts = [SlabPart(packed, (words,)), SlabPart(scales, (groups,))]
    if quantization.zeros or "weight_zero_point" in group:  # a word holds several rows
        zeros = group.take("weight_zero_point", (torch.int32,), (-(-rows // in_word), groups))
        parts.append(SlabPart(zeros, (groups,), in_word))
    if "weight_g_idx" in group:
        raise ValueError(f"{group.name}weight_g_idx: got columns in another order; wanted that of the matrix")
    spare = words * in_word - columns
    decode = partial(codecs.decode_packed, bits=bits, spare=spare)
    encode = partial(codecs.encode_packed, bits=bits, spare=spare)
    return Decoded(torch.Size((rows, columns)), scales.dtype, columns, parts, decode, encode)


def _scaled(group: _Group, quantization: Quantization) -> Decoded | None:
    """Return a matrix with ``weight_scale``; the dtype of its numbers says what it is."""
    if "pre_quant_scale" in group:
        raise ValueError(
            f"{group.name}pre_quant_scale: got a factor of inputs, which no plain model has; wanted none"
        )
    dtype = group.stored[group.name + "weight"].dtype
    if dtype.is_floating_point and dtype.itemsize > 1 and "weight_scale" not in group:
        return None  # was left out of the quantization
    weight = group.take("weight", (torch.float8_e4m3fn, torch.int8, torch.uint8), _MATRIX)
    if dtype == torch.uint8:
        scales = group.take("weight_scale", (torch.float8_e4m3fn,))
        return _e2m1(group, weight, scales, 16, "weight_scale_2")
    if dtype == torch.int8:
        return _int8(group, weight, quantization)
    scales = group.take("weight_scale", (*_FLOATS, *_EXPONENTS))
    rounded = torch.bfloat16 if scales.dtype.itemsize == 1 else scales.dtype
    return _e4m3(group, weight, scales, rounded, quantization)


def _int8(group: _Group, weight: Stored, quantization: Quantization) -> Decoded:
    rows, columns = weight.shape
    scales = group.take("weight_scale", _FLOATS, (), (1,), (1, 1), (rows,), (rows, -1))
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    said = 0 if quantization.bits else quantization.group_size  # with bits it is that of packed numbers
    size = said or columns // max(1, groups)
    if groups * size != columns:
        raise group.misfit(f"one for each {size} of {columns} columns")
    slabs = 1 if scales.shape[:1] == (rows,) else max(1, rows)
    parts = [SlabPart(weight, (columns,)), SlabPart(scales, (groups,), slabs)]
    if quantization.zeros or "weight_zero_point" in group:
        parts.append(SlabPart(group.take("weight_zero_point", (torch.int8,), scales.shape), (groups,), slabs))
    return Decoded(weight.shape, scales.dtype, columns, parts, codecs.decode_int8, codecs.encode_int8)


def _gptq(group: _Group, quantization: Quantization) -> Decoded:
    bits, order = quantization.bits, group.take("g_idx", _WHOLE, (-1,))
    [columns] = order.shape
    packed = group.take("qweight", (torch.int32,), (-(-columns * bits // 32), -1))
    rows = packed.shape[1]
    scales = group.take("scales", _FLOATS, (-1, rows))
    zeros = group.take("qzeros", (torch.int32,), (scales.shape[0], -(-rows * bits // 32)))
    numbers = order.read()  # here, since an accelerator that decodes would not say what is wrong
    if bool(((numbers < 0) | (numbers >= scales.shape[0])).any()):
        raise ValueError(
            f"{group.name}g_idx: got groups {int(numbers.min())} to {int(numbers.max())}; wanted some of the "
            f"{scales.shape[0]} of {group.name}scales"
        )

    parts = [SlabPart(each, tuple(each.shape)) for each in (packed, zeros, scales, order)]
    decode = partial(codecs.decode_gptq, bits=bits, less_one=quantization.less_one)
    return Decoded(torch.Size((rows, columns)), scales.dtype, rows * columns, parts, decode, None)


def _awq(group: _Group, quantization: Quantization) -> Decoded:
    packed = group.take("qweight", (torch.int32,), _MATRIX)
    columns, words = packed.shape
    scales = group.take("scales", _FLOATS, (-1, words * 8))
    groups, rows = scales.shape
    if not groups or columns % groups:
        raise group.misfit(f"one for each of equal groups of {columns} inputs")
    zeros = group.take("qzeros", (torch.int32,), (groups, words))
    parts = [SlabPart(each, tuple(each.shape)) for each in (packed, zeros, scales)]
    return Decoded(torch.Size((rows, columns)), scales.dtype, rows * columns, parts, codecs.decode_awq, None)


def _llm_int8(group: _Group, quantization: Quantization) -> Decoded:
    weight = group.take("weight", (torch.int8,), _MATRIX)
    sizes = group.take("SCB", (torch.float32,), weight.shape[:1])
    if "weight_format" in group:
        order = int(group.take("weight_format", (torch.uint8,), (), (1,)).read())
        if order:
            raise ValueError(
                f"{group.used[-1]}: got {order}, rows in the order of a kernel; wanted 0, row by row"
            )
    columns = weight.shape[1]
    parts = SlabPart(weight, (columns,)), SlabPart(sizes, (1,))
    decode = partial(codecs.decode_int8, factor=codecs.LLM_INT8)
    return Decoded(weight.shape, torch.float32, columns, parts, decode, codecs.encode_llm_int8)


def _4bit(group: _Group, quantization: Quantization) -> Decoded:
    """Return a matrix that bitsandbytes packed as NF4; ``quant_state`` in its files is JSON."""
    packed = group.take("", (torch.uint8, *_FLOATS))
    state = group.take(".quant_state.bitsandbytes__nf4", (torch.uint8,), (-1,))
    where, nested, said = group.used[-1], ".nested_absmax" in group, b""
    try:
        if state.shape.numel() <= _MOST_STATE_NBYTES:
            said = state.read().numpy().tobytes()
        found = json.loads(said)
        size, dtype = found["blocksize"], {_plain(each): each for each in _FLOATS}[found["dtype"]]
        shape = torch.Size(map(_count, found["shape"]))
        together, offset = (found["nested_blocksize"], found["nested_offset"]) if nested else (1, 0.0)
        blocks, more = divmod(shape.numel(), size)
        together = min(_count(together), blocks)
        known = size in _BLOCKS and found["quant_type"] == "nf4" and math.isfinite(offset)
        if not known or more or len(shape) < 2:
            raise ValueError
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{where}: got {state.shape.numel()} bytes, {said[:200]!r}; wanted JSON of a few lines with "
            f"quant_type nf4, dtype ({', '.join(map(_plain, _FLOATS))}), blocksize (32 to 4096) "
            "and a shape of whole blocks (where absmax is quantized, also nested_blocksize and nested_offset)"
        ) from error
    nbytes = packed.shape.numel() * packed.dtype.itemsize
    if nbytes != shape.numel() // 2:
        raise ValueError(
            f"{group.name}: got {nbytes} bytes; wanted {shape.numel() // 2}, for the shape {_sizes(shape)}"
        )
    sizes = group.take(".absmax", (torch.uint8 if nested else torch.float32,), (blocks,))
    parts = [SlabPart(packed, (size // 2 // packed.dtype.itemsize,)), SlabPart(sizes, (1,))]
    how: dict[str, Any] = {"numbers": codecs.NF4, "dtype": dtype}
    if nested:
        second = group.take(".nested_absmax", (torch.float32,), (-(-blocks // together),))
        parts.append(SlabPart(second, (1,), together))
        table = group.take(".nested_quant_map", (torch.float32,), (256,)).read()
        how |= {"of_sizes": tuple(table.tolist()), "together": together, "offset": float(offset)}
    if ".quant_map" in group:
        group.take(".quant_map", (torch.float32,), (16,))  # is that of the type, which kernels know
    decode, encode = partial(codecs.decode_4bit, **how), partial(codecs.encode_4bit, **how)
    return Decoded(shape, dtype, size, parts, decode, encode)


_Make = Callable[[_Group, Quantization], Decoded | None]
#: For each method: endings of a quantized key, the ending that replaces each, and the maker of the tensor.
_METHODS: dict[str, tuple[tuple[str, str, _Make], ...]] = {
    "fp8": (("_scale_inv", "", _fp8),),
    "mxfp4": (("_blocks", "", _mxfp4),),
    "compressed-tensors": (("weight_packed", "weight", _compressed), ("weight", "weight", _scaled)),
    "modelopt": (("weight", "weight", _scaled), ("_weight_scale", "", _modelopt_experts)),
    "gptq": (("qweight", "weight", _gptq),),
    "awq": (("qweight", "weight", _awq),),
    "bitsandbytes": ((".absmax", "", _4bit), ("SCB", "weight", _llm_int8)),
}
