"""Presents the stored tensors of each quantized weight as one tensor, which is decoded when it is read.

A weight and its scales become one tensor with the weight's key, of which any range can be read. So
transformers' conversions (experts stacked into one parameter, renamed keys) see a checkpoint as it would be
without quantization. The same tensors encode other values, such as trained ones (:meth:`Decoded.encode`).

[Note: what is quantized]
``quantization_config`` names the format. Which tensors have it follows from the keys: formats list modules
that were left out in different ways, but a weight with scales is always quantized.

[Note: dtype]
FP8 times an fp32 scale needs 28 bits: masters get the fp32 product. The other formats give values of the
scales' dtype, or exact in bf16. Frozen weights need no more than the compute dtype, and are rounded to it as
transformers rounds them when it loads them in that dtype (to nearest, ties to even).

[Note: encoded again]
A value that equals the decoded one, rounded to the dtype in which the model holds it, counts as unchanged
(:func:`unchanged`). Where a whole piece is unchanged, its stored bytes are taken; the rest is encoded to the
nearest values (:mod:`infinity.checkpoint.codecs`, which scale). So what training left alone comes back bit by
bit, whatever dtype it was held in.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import Checkpoint, FileTensor, Stored, View, read_json_object
from infinity.core.errors import CheckpointError, library_errors
from infinity.core.nbytes import Piece
from infinity.device.machine import compile_ahead
from infinity.optim.rules import split

#: Elements that are decoded at a time: what the caches of a CPU hold, and what keeps an accelerator busy.
_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 2**18, 2**22
#: The most memory of decoding beside its result (bytes): for tables, and for each element.
_TABLES_NBYTES, _SCRATCH_ITEMSIZE = 2**16, 16

#: The slab of a checkpoint that was decoded last, by its tensor and number.
Kept: TypeAlias = dict[tuple["Decoded", int], Tensor]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Holds the contents of ``quantization_config``."""

    method: str  # fp8, mxfp4, compressed-tensors or gptq
    block: tuple[int, int] | None = None  # rows and columns that share an FP8 scale; None: all
    bits: int = 0  # of a whole number; 0: the format has none
    group_size: int = 0  # whole numbers that share a scale, along the inputs; 0: all
    less_one: bool = True  # zeros are stored so: see codecs.decode_gptq
    power_of_two: bool = False  # FP8 scales are, whatever their dtype

    def __str__(self) -> str:
        return f"INT{self.bits} of {self.method}" if self.bits else self.method.upper()


def read_quantization(path: Path) -> Quantization | None:
    """Return the quantization that ``path`` declares, or None; a CheckpointError if it cannot be decoded."""
    file = path / "config.json"
    raw = read_json_object(file)
    inner = raw["text_config"] if isinstance(raw.get("text_config"), dict) else {}
    given = raw.get("quantization_config") or inner.get("quantization_config")
    if not given:
        return None
    try:
        return _parse(given)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"{path} holds quantized weights that cannot be decoded: quantization_config in config.json: "
            f"{error}. Decoded are fp8 (e4m3 with block scales), mxfp4, compressed-tensors "
            "(pack-quantized, 4 or 8 bits) and gptq (4 or 8 bits). Save another one as bf16 once, with the "
            "library that wrote it"
        ) from error


def _parse(given: Mapping[str, Any]) -> Quantization:
    method = given["quant_method"]
    if method == "fp8":
        block = given.get("weight_block_size")
        block = None if block is None else (_count(block[0]), _count(block[1]))
        return Quantization(method, block, power_of_two=given.get("scale_fmt") == "ue8m0")
    if method == "mxfp4":
        return Quantization(method)
    if method == "gptq":
        form = given.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format is {json.dumps(form)}")
        return Quantization(method, bits=_bits(given["bits"]), less_one=form == "gptq")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method is {json.dumps(method)[:100]}")
    schemes = list(given["config_groups"].values())
    formats = {scheme.get("format") or given.get("format") for scheme in schemes}
    if formats != {"pack-quantized"}:
        raise ValueError(f"format is {', '.join(sorted(map(str, formats)))}")
    found = set()
    for scheme in schemes:
        weights = scheme["weights"]
        if weights.get("type", "int") != "int":
            raise ValueError(f"weights are of type {weights['type']}")
        if weights.get("strategy", "group") not in ("group", "channel"):
            raise ValueError(f"the strategy of weights is {weights['strategy']}")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError("columns are grouped in another order (actorder)")
        size = weights.get("group_size")
        found.add((_bits(weights["num_bits"]), 0 if size in (None, -1) else _count(size)))
    if len(found) > 1:
        raise ValueError("config_groups have more than one scheme")
    [(bits, group_size)] = found
    return Quantization(method, bits=bits, group_size=group_size)


def _bits(given: Any) -> int:
    if given not in (4, 8):
        raise ValueError(f"whole numbers have {given} bits")
    return int(given)


def _count(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"got {given!r}, wanted a positive whole number")
    return given


class SlabPart(NamedTuple):
    """Describes a stored tensor of which every ``slabs`` slabs need a piece of this shape."""

    tensor: Stored
    shape: tuple[int, ...]
    slabs: int = 1

    def range(self, first: int, last: int) -> tuple[int, int]:
        numel = math.prod(self.shape)
        return first // self.slabs * numel, -(-last // self.slabs) * numel


@dataclass(eq=False, slots=True)
class Decoded(Stored):
    """Represents a tensor that is decoded from several stored ones, in slabs that need no other slab."""

    shape: torch.Size
    dtype: torch.dtype  # in which values are exact, or rounded as transformers rounds them
    numel: int  # of a slab
    parts: Sequence[SlabPart]
    #: Called with the number of the first slab among those that share stored elements, and with the pieces of
    #: ``parts``, ``(n, *shape)``; returns values.
    decode: Callable[..., Tensor]
    #: Called with fp32 values of slabs, and the pieces before; returns new ones. Slabs that share stored
    #: elements are encoded together. None: the format does not choose the nearest codes.
    encode_slabs: Callable[..., Sequence[Tensor]] | None
    decode_into: Callable[..., None] | None = None  # into a CPU tensor in ``dtype``, without other memory
    kept: Kept = field(default_factory=dict)  # the slab decoded last, of all tensors of a checkpoint

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        size, stop = self.numel, start + len(out)
        plain = view is not None and out.is_cpu and out.dtype == self.dtype
        if self.decode_into is not None and plain and not (start % size or stop % size):
            first, last = start // size, stop // size
            self.decode_into(out, first % self.together, *self._read(first, last, view))
            return
        at_once = max(1, (_PIECE_NUMEL if out.is_cpu else _DEVICE_PIECE_NUMEL) // size)
        for first in range(start // size, -(-stop // size), at_once):
            last = min(first + at_once, -(-stop // size))
            low, high = max(start, first * size), min(stop, last * size)
            decoded = self._values(first, last, view)
            values = decoded[low - first * size : high - first * size]
            if out.dtype != self.dtype:
                values = values.to(self.dtype)
            out[low - start : high - start].copy_(values)

    def ranges(self, start: int, numel: int) -> Iterable[Piece]:
        first, last = start // self.numel, -(-(start + numel) // self.numel)
        for part in self.parts:
            low, high = part.range(first, last)
            yield from part.tensor.ranges(low, high - low)

    @property
    def scratch_nbytes(self) -> int:
        numel = min(self.shape.numel(), max(self.numel, _DEVICE_PIECE_NUMEL))
        return _TABLES_NBYTES + _SCRATCH_ITEMSIZE * numel

    @property
    def together(self) -> int:
        """The number of consecutive slabs, from a multiple of it on, that share stored elements."""
        return max(part.slabs for part in self.parts)

    def encode(self, values: Stored, put: Callable[[Stored, int, Tensor], None]) -> tuple[float, float]:
        """Encode ``values``, of its shape; see [Note: encoded again].

        Returns sums of squares, of what encoding changes and of the values. ``put`` is called with every
        stored tensor, the index of an element, and the new values from there on. Raises a ValueError if a
        value is NaN or infinite, or too large for the format.
        """
        size, lost, total = max(1, self.numel), 0.0, 0.0
        slabs = self.shape.numel() // size
        at_once = max(1, _PIECE_NUMEL // size // self.together) * self.together
        for first in range(0, slabs, at_once):
            last = min(first + at_once, slabs)
            parts = self._read(first, last)
            decoded = self._decode(first, parts).float()
            held = values.read(first * size, len(decoded))
            same, wanted = unchanged(decoded, held), decoded
            if not same.all():
                wanted = torch.where(same, decoded, held.float())
                if not wanted.isfinite().all():
                    raise ValueError("a value is NaN or infinite, and has no number in this form")
                if self.encode_slabs is None:
                    raise ValueError(
                        "it was trained, and GPTQ chooses numbers with data for calibration: export without "
                        "--stored (stored_as), and quantize that with a library that has such data"
                    )
                encoded = zip(self.encode_slabs(wanted, *parts), parts, strict=True)
                parts = [new.reshape(old.shape) for new, old in encoded]
                decoded = self._decode(first, parts).float()
                lost += (decoded - wanted).double().square().sum().item()
            total += wanted.double().square().sum().item()
            for part, piece in zip(self.parts, parts, strict=True):
                put(part.tensor, part.range(first, last)[0], piece.reshape(-1))
        return lost, total

    def _values(self, first: int, last: int, view: View | None) -> Tensor:
        if view is not None or last - first > 1:
            return self._decode(first, self._read(first, last, view))
        if (self, first) not in self.kept:
            self.kept.clear()
            self.kept[self, first] = self._decode(first, self._read(first, last))
        return self.kept[self, first]

    def _decode(self, first: int, parts: Sequence[Tensor]) -> Tensor:
        return self.decode(first % self.together, *parts).reshape(-1)

    def _read(self, first: int, last: int, view: View | None = None) -> list[Tensor]:
        pieces = []
        for part in self.parts:
            low, high = part.range(first, last)
            if view is not None:
                assert isinstance(part.tensor, FileTensor)
                piece = part.tensor.view(low, high - low, view)
            else:
                piece = part.tensor.read(low, high - low)
            pieces.append(piece.view(-1, *part.shape))
        return pieces


def unchanged(source: Tensor, held: Tensor) -> Tensor:
    """Return which values of ``held`` equal those of ``source``, fp32, rounded to the dtype of ``held``.

    Trained weights are rounded with ties up, as their masters are split, others with ties to even.
    """
    same = source.to(held.dtype) == held
    return same | (split(source)[0] == held) if held.dtype == torch.bfloat16 else same


def decode_checkpoint(checkpoint: Checkpoint, form: Quantization, dtype: torch.dtype | None = None) -> int:
    """Replace the stored tensors of each quantized weight by one under its unquantized key; return how many.

    ``checkpoint`` stays open while tensors are read. Values are rounded to ``dtype``; None: they stay exact
    (see [Note: dtype]). Raises a CheckpointError that names the key if tensors do not go together.
    """
    ending, plain_ending, make = _FORMATS[form.method]
    stored, found, kept = dict(checkpoint), dict[str, Stored](), Kept()
    for key in stored:
        if not key.endswith(ending):
            continue
        name = key.removesuffix(ending)
        group = _Group(stored, name)
        what = f"{checkpoint.path}: {key} cannot be decoded as {form}"
        with library_errors(CheckpointError, what):
            made = make(group, form)
        if made is not None:
            made.dtype, made.kept = dtype or made.dtype, kept
            for used in (*group.used, *(name + each for each in _NEEDLESS)):
                checkpoint.pop(used, None)
            found[name + plain_ending] = made
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: quantization_config in config.json says {form}, but no tensor ends "
            f"with {ending} and has scales: its weights are not quantized, or not so"
        )
    checkpoint.update(found)
    return len(found)


#: Endings of tensors that only quantized activations need.
_NEEDLESS = ("activation_scale", "input_scale")


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


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fp8(group: _Group, quantization: Quantization) -> Decoded | None:
    if "weight_scale_inv" not in group and group.stored[group.name + "weight"].dtype != torch.float8_e4m3fn:
        return None  # was left out of the quantization
    weight = group.take("weight", (torch.float8_e4m3fn,), 2)
    scales = group.take("weight_scale_inv", (*_FLOATS, torch.float8_e8m0fnu, torch.uint8))
    rows, columns = weight.shape
    blocks, given = torch.Size((1, 1)) if scales.shape.numel() == 1 else scales.shape, quantization.block
    if len(blocks) != 2:
        raise ValueError(f"its scales have shape {tuple(blocks)}")
    if given is not None and blocks == (-(-rows // given[0]), -(-columns // given[1])):
        block = min(rows, given[0]) or 1, min(columns, given[1]) or 1
    elif blocks.numel() and not (rows % blocks[0] or columns % blocks[1]):  # the file's own
        block = rows // blocks[0], columns // blocks[1]
    else:
        found = f"{(rows, columns)}, that of its scales {tuple(blocks)}, that of a block {given}"
        raise ValueError(f"its shape is {found}")

    decode = partial(codecs.decode_fp8, block=block)

    def decode_into(out: Tensor, first: int, codes: Tensor, scales: Tensor) -> None:
        """Decode with a compiled loop, to the same values."""
        from infinity.optim import kernels

        scales = codecs.as_float(scales)
        if isinstance(out, FakeTensor):  # a dry run counts the bytes that operators move
            out.copy_(codes.view(torch.uint8).flatten())
        elif out.dtype == torch.float16 and not kernels.converts_half():  # this CPU has no such loop
            out.copy_(decode(first, codes, scales).flatten())
        else:

            def run(codes: Tensor, out: Tensor) -> None:
                stored, factors = kernels.array(codes.view(torch.uint8).flatten()), kernels.array(scales)
                kernels.decode_fp8(stored, factors, kernels.array(out), columns, block, first)

            compile_ahead(("decode_fp8", out.dtype), partial(run, codes[:0], out[:0]))
            run(codes, out)

    parts = SlabPart(weight, (columns,)), SlabPart(scales, (blocks[1],), block[0])
    encode = partial(codecs.encode_fp8, block=block, power_of_two=quantization.power_of_two)
    return Decoded(weight.shape, torch.float32, columns, parts, decode, encode, decode_into)


def _mxfp4(group: _Group, quantization: Quantization) -> Decoded:
    blocks = group.take("_blocks", (torch.uint8,), 4)
    scales = group.take("_scales", (torch.uint8,), 3)
    experts, rows, groups, width = blocks.shape
    if scales.shape != blocks.shape[:-1] or width != 16:
        raise ValueError(f"its shape is {tuple(blocks.shape)}, that of its scales {tuple(scales.shape)}")
    shape = torch.Size((experts, 2 * groups * width, rows))
    parts = SlabPart(blocks, blocks.shape[1:]), SlabPart(scales, scales.shape[1:])
    numel, decode, encode = shape[1:].numel(), codecs.decode_mxfp4, codecs.encode_mxfp4
    return Decoded(shape, torch.bfloat16, numel, parts, decode, encode)


def _packed(group: _Group, quantization: Quantization) -> Decoded:
    packed = group.take("weight_packed", (torch.int32,), 2)
    scales = group.take("weight_scale", _FLOATS, 2)
    size = group.take("weight_shape", (torch.int64, torch.int32), 1)
    bits, in_word = quantization.bits, 32 // quantization.bits
    rows, words = packed.shape
    groups = scales.shape[1]
    columns = groups * quantization.group_size
    if not columns:
        columns = int(size.read(1, 1))
    parts = [SlabPart(packed, (words,)), SlabPart(scales, (groups,))]
    if "weight_zero_point" in group:  # a word holds several rows
        parts.append(SlabPart(group.take("weight_zero_point", (torch.int32,), 2), (groups,), in_word))
    if "weight_g_idx" in group:
        raise ValueError("its columns are grouped in another order (weight_g_idx)")
    if (
        scales.shape[0] != rows
        or -(-columns // in_word) != words
        or columns % max(1, groups)
        or any(part.tensor.shape != (-(-rows // in_word), groups) for part in parts[2:])
    ):
        raise ValueError(f"its shape is {tuple(packed.shape)}, that of its scales {tuple(scales.shape)}")

    decode = partial(codecs.decode_packed, bits=bits, columns=columns)
    encode = partial(codecs.encode_packed, bits=bits, columns=columns)
    return Decoded(torch.Size((rows, columns)), scales.dtype, columns, parts, decode, encode)


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
        raise ValueError(
            f"its shape is {tuple(packed.shape)}, that of scales {tuple(scales.shape)}, of qzeros "
            f"{tuple(zeros.shape)}, of g_idx {tuple(order.shape)}"
        )
    numbers = order.read()  # here, since an accelerator that decodes would not say what is wrong
    if bool(((numbers < 0) | (numbers >= scales.shape[0])).any()):
        raise ValueError(f"{group.used[-1]} names groups that {group.used[-2]} does not have")

    parts = [SlabPart(each, tuple(each.shape)) for each in (packed, zeros, scales, order)]
    decode = partial(codecs.decode_gptq, bits=bits, less_one=quantization.less_one)
    return Decoded(torch.Size((rows, columns)), scales.dtype, rows * columns, parts, decode, None)


#: For each method: the ending of a quantized key, the ending that replaces it, and the maker of the tensor.
_FORMATS: dict[str, tuple[str, str, Callable[[_Group, Quantization], Decoded | None]]] = {
    "fp8": ("weight", "weight", _fp8),
    "mxfp4": ("_blocks", "", _mxfp4),
    "compressed-tensors": ("weight_packed", "weight", _packed),
    "gptq": ("qweight", "weight", _gptq),
}
