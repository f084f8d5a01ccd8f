"""Quantized checkpoints: stored tensors that belong together, as one tensor each, decoded when they are read.

The same tensors encode other values, such as trained ones, in the same form (:meth:`Decoded.encode`).

[Note: where decoding stands]
It comes before everything else: a weight and its scales become one tensor with the weight's key, of which
any range can be read. So transformers' conversions (experts stacked into one parameter, renamed keys) see
a checkpoint as it would be without quantization, and what they cut into ranges is read as such.

[Note: what is quantized]
``quantization_config`` names the format. Which tensors have it is seen from the keys: lists of modules that
were left out differ from format to format in their syntax, and a weight with scales is quantized, whatever
they say.

[Note: dtype]
FP8 times an fp32 scale needs 28 bits: masters get the fp32 product. The other formats give values of the
scales' dtype, or exact in bf16. Weights that are not trained need no more than the compute dtype: they are
rounded to it as transformers rounds them when it loads them in that dtype (to nearest, ties to even).

[Note: encoded again]
A value that is still the decoded one, rounded to the dtype in which the model holds it, counts as exactly
that one (:func:`unchanged`). Where all of a piece are so, its stored bytes are taken as they are; what is
encoded anew is nearest to the values (:mod:`infinity.checkpoint.codecs`, which scale). So what training left
alone comes back bit by bit, whatever dtype it was held in.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from infinity.checkpoint import codecs
from infinity.checkpoint.directory import (
    ByteRange,
    Checkpoint,
    FileTensor,
    Stored,
    View,
    read_json_object,
)
from infinity.core.errors import CheckpointError
from infinity.device.machine import compile_ahead
from infinity.optim.layout import split

#: Elements that are decoded at one time, where a format's rows can be decoded by themselves: what the caches
#: of a CPU hold, and what keeps an accelerator busy.
_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 2**18, 2**22
#: The most that decoding takes beside its result: for tables, and for each of these elements (bytes).
_TABLES_NBYTES, _SCRATCH_ITEMSIZE = 2**16, 16

#: Says which elements of which stored tensors make slabs ``[first, last)``: tensor, start, stop.
Needs = Callable[[int, int], Sequence[tuple[Stored, int, int]]]
#: Decodes slabs ``[first, last)`` from these, flat, as ``(last - first, numel of a slab)``.
Decode = Callable[[int, int, Sequence[Tensor]], Tensor]
#: Decodes the same into ``out``, on the CPU, in the dtype of the tensor.
DecodeInto = Callable[[int, int, Sequence[Tensor], Tensor], None]
#: Encodes slabs from ``first`` on, fp32 and flat; given and returns what they are decoded from.
Encode = Callable[[int, Tensor, Sequence[Tensor]], Sequence[Tensor]]
#: Called with a stored tensor, an element's number, and the new values from there on.
Put: TypeAlias = Callable[[FileTensor, int, Tensor], None]
#: The slab that was decoded last, of all tensors of a checkpoint, by its tensor and number.
Kept: TypeAlias = dict[tuple["Decoded", int], Tensor]


@dataclass(frozen=True, slots=True)
class Quantization:
    """The contents of ``quantization_config``.

    Attributes:
        method: ``fp8``, ``mxfp4``, ``compressed-tensors`` or ``gptq``.
        block: Rows and columns that share an FP8 scale; None: all.
        bits: Bits of a whole number; 0: the format has none.
        group_size: Whole numbers that share a scale, along the inputs; 0: all.
        zeros_less_one: See :func:`infinity.checkpoint.codecs.decode_gptq`.
        power_of_two: FP8 scales are, whatever their dtype.
    """

    method: str
    block: tuple[int, int] | None = None
    bits: int = 0
    group_size: int = 0
    zeros_less_one: bool = True
    power_of_two: bool = False

    def __str__(self) -> str:
        return f"INT{self.bits} of {self.method}" if self.bits else self.method.upper()


def read_quantization(path: Path) -> Quantization | None:
    """Return the ``quantization_config`` of the ``config.json`` in ``path``; None: there is none.

    Raises:
        CheckpointError: It cannot be read, or names a format that cannot be decoded here.
    """
    file = path / "config.json"
    raw = read_json_object(file)
    inner = raw.get("text_config")
    given = raw.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, dict) else None
    )
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
        return Quantization(
            method,
            block=None if block is None else (_count(block[0]), _count(block[1])),
            power_of_two=given.get("scale_fmt") == "ue8m0",
        )
    if method == "mxfp4":
        return Quantization(method)
    if method == "gptq":
        form = given.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format is {json.dumps(form)}")
        return Quantization(method, bits=_bits(given["bits"]), zeros_less_one=form == "gptq")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method is {json.dumps(method)[:100]}")
    schemes = list(given["config_groups"].values())
    formats = {scheme.get("format") or given.get("format") for scheme in schemes}
    if formats != {"pack-quantized"}:
        raise ValueError(f"format is {', '.join(sorted(map(str, formats)))}")
    found = {_scheme(scheme["weights"]) for scheme in schemes}
    if len(found) > 1:
        raise ValueError("config_groups have more than one scheme")
    [(bits, group_size)] = found
    return Quantization(method, bits=bits, group_size=group_size)


def _scheme(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size of compressed-tensors' weights."""
    if weights.get("type", "int") != "int":
        raise ValueError(f"weights are of type {weights['type']}")
    if weights.get("strategy", "group") not in ("group", "channel"):
        raise ValueError(f"the strategy of weights is {weights['strategy']}")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ValueError("columns are grouped in another order (actorder)")
    size = weights.get("group_size")
    return _bits(weights["num_bits"]), 0 if size in (None, -1) else _count(size)


def _bits(given: Any) -> int:
    if given not in (4, 8):
        raise ValueError(f"whole numbers have {given} bits")
    return int(given)


def _count(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"got {given!r}, wanted a positive whole number")
    return given


@dataclass(frozen=True, slots=True)
class Slabs:
    """The slabs in which a tensor is decoded and encoded, each without the others.

    Attributes:
        numel: Elements of a slab.
        needs: Stored tensors that slabs are decoded from.
        decode: Decodes them.
        encode: The way back; None: the format's numbers are not those nearest to the values.
        together: Slabs that share stored elements, and are encoded at one time, from a multiple of it on.
        decode_into: Decodes without memory of its own; None: the format has no such loop.
    """

    numel: int
    needs: Needs
    decode: Decode
    encode: Encode | None
    together: int = 1
    decode_into: DecodeInto | None = None


class Decoded:
    """A tensor that is decoded from several stored ones; see :class:`infinity.checkpoint.directory.Stored`.

    Args:
        shape: The shape of the values.
        dtype: The dtype in which values are exact, or rounded as transformers rounds them.
        slabs: The slabs in which they are decoded.
        kept: Shared by all tensors of a checkpoint; serves the next range of a slab.
    """

    __slots__ = ("_kept", "_slabs", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, slabs: Slabs, kept: Kept) -> None:
        self.shape, self.dtype, self._slabs, self._kept = torch.Size(shape), dtype, slabs, kept

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        """See :class:`infinity.checkpoint.directory.Stored`.

        Args:
            view: Gives the bytes of :meth:`ranges`, on ``out``'s device; None: they are read from the files.
        """
        size, stop = self._slabs.numel, start + len(out)
        plain = view is not None and out.is_cpu and out.dtype == self.dtype
        into = self._slabs.decode_into
        if into is not None and plain and not (start % size or stop % size):
            first, last = start // size, stop // size
            into(first, last, self._parts(first, last, view), out)
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

    def ranges(self, start: int, numel: int) -> Iterable[ByteRange]:
        """The bytes that :meth:`fill` reads for ``numel`` elements from ``start`` on."""
        size = self._slabs.numel
        for tensor, low, high in self._slabs.needs(start // size, -(-(start + numel) // size)):
            assert isinstance(tensor, FileTensor)
            yield from tensor.ranges(low, high - low)

    def encode(self, values: Stored, put: Put) -> tuple[float, float]:
        """Encode ``values``, of its shape, and hand over all that it would be decoded from; blocks.

        Returns:
            Sums of squares: of what encoding changes, and of the values. See [Note: encoded again].

        Raises:
            CheckpointError: A file cannot be read.
            ValueError: A value is NaN or infinite, or larger than the form has numbers for.
        """
        numel, size, lost, total = self.shape.numel(), self._slabs.numel, 0.0, 0.0
        together = self._slabs.together
        at_once = max(1, _PIECE_NUMEL // max(1, size) // together) * together
        for first in range(0, numel // max(1, size), at_once):
            last = min(first + at_once, numel // size)
            parts = self._parts(first, last)
            decoded = self._decode(first, last, parts).float()
            held = torch.empty(len(decoded), dtype=values.dtype, device="cpu")
            values.fill(first * size, held)
            same, wanted = unchanged(decoded, held), decoded
            if not same.all():
                if self._slabs.encode is None:
                    raise ValueError(
                        "it was trained, and GPTQ chooses numbers with data for calibration: export without "
                        "--stored (stored_as), and quantize that with a library that has such data"
                    )
                wanted = torch.where(same, decoded, held.float())
                if not wanted.isfinite().all():
                    raise ValueError("a value is NaN or infinite, and has no number in this form")
                parts = [each.reshape(-1) for each in self._slabs.encode(first, wanted, parts)]
                decoded = self._decode(first, last, parts).float()
                lost += (decoded - wanted).double().square().sum().item()
            total += wanted.double().square().sum().item()
            for (tensor, start, _), part in zip(self._slabs.needs(first, last), parts, strict=True):
                assert isinstance(tensor, FileTensor)
                put(tensor, start, part)
        return lost, total

    @property
    def stored(self) -> list[Stored]:
        """Return the stored tensors that it is decoded from."""
        return [tensor for tensor, _, _ in self._slabs.needs(0, 1)]

    @property
    def in_files(self) -> bool:
        """Return whether everything that it is decoded from lies in files as it is."""
        return all(isinstance(tensor, FileTensor) for tensor in self.stored)

    @property
    def scratch_nbytes(self) -> int:
        """The most that :meth:`fill` takes of an accelerator's memory beside what it is given."""
        numel = min(self.shape.numel(), max(self._slabs.numel, _DEVICE_PIECE_NUMEL))
        return _TABLES_NBYTES + _SCRATCH_ITEMSIZE * numel

    def _values(self, first: int, last: int, view: View | None) -> Tensor:
        """Decode slabs, or take the one that was read last; flat."""
        if view is not None or last - first > 1:
            return self._decode(first, last, self._parts(first, last, view))
        if (self, first) not in self._kept:
            self._kept.clear()
            self._kept[self, first] = self._decode(first, last, self._parts(first, last))
        return self._kept[self, first]

    def _decode(self, first: int, last: int, parts: Sequence[Tensor]) -> Tensor:
        return self._slabs.decode(first, last, parts).reshape(-1)

    def _parts(self, first: int, last: int, view: View | None = None) -> list[Tensor]:
        """Return the stored tensors that slabs are decoded from."""
        parts = []
        for tensor, start, stop in self._slabs.needs(first, last):
            if view is not None:
                assert isinstance(tensor, FileTensor)
                parts.append(tensor.view(start, stop - start, view))
            else:
                parts.append(torch.empty(stop - start, dtype=tensor.dtype, device="cpu"))
                tensor.fill(start, parts[-1])
        return parts


def unchanged(source: Tensor, held: Tensor) -> Tensor:
    """Return which values are still those of ``source``, fp32, rounded to ``held``'s dtype.

    To nearest: weights that are trained with ties up, as their masters are split, others with ties to even.
    """
    same = source.to(held.dtype) == held
    return same | (split(source)[0] == held) if held.dtype == torch.bfloat16 else same


def decode_checkpoint(
    checkpoint: Checkpoint, quantization: Quantization, dtype: torch.dtype | None = None
) -> int:
    """Replace tensors that belong together by one each, under the key that it has without quantization.

    Args:
        checkpoint: Changed in place; stays open while tensors are read.
        quantization: The quantization of its weights.
        dtype: The dtype to which values are rounded; None: they stay exact. See [Note: dtype].

    Returns:
        How many tensors are decoded.

    Raises:
        CheckpointError: Some do not go together; names the key.
    """
    make = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _packed, "gptq": _gptq}[quantization.method]
    stored, found = dict(checkpoint), dict[str, Stored]()
    kept: Kept = {}
    for key in stored:
        if not key.endswith(_WEIGHTS[quantization.method]):
            continue
        name = key.removesuffix(_WEIGHTS[quantization.method])
        group = _Group(stored, name, quantization, dtype, kept)
        try:
            made = make(group)
        except (KeyError, ValueError) as error:
            why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{checkpoint.path}: {key} cannot be decoded as {quantization}: {why}"
            ) from error
        if made is not None:
            for used in (*group.used, *(name + each for each in _NEEDLESS)):
                checkpoint.pop(used, None)
            found[name + _DECODED[quantization.method]] = made
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: quantization_config in config.json says {quantization}, but no tensor ends "
            f"with {_WEIGHTS[quantization.method]} and has scales: its weights are not quantized, or not so"
        )
    checkpoint.update(found)
    return len(found)


#: How the key of quantized values ends, and what stands there when they are decoded.
_WEIGHTS = {"fp8": "weight", "mxfp4": "_blocks", "compressed-tensors": "weight_packed", "gptq": "qweight"}
_DECODED = {"fp8": "weight", "mxfp4": "", "compressed-tensors": "weight", "gptq": "weight"}
#: Endings of tensors that only computing with quantized activations needs.
_NEEDLESS = ("activation_scale", "input_scale")


class _Group:
    """Stored tensors of one quantized weight.

    Attributes:
        used: Keys that were asked for.
    """

    def __init__(
        self, stored: Mapping[str, Stored], name: str, quantization: Quantization, dtype: torch.dtype | None,
        kept: Kept,
    ) -> None:  # fmt: skip
        self._stored, self._name, self._dtype, self._kept = stored, name, dtype, kept
        self.quantization = quantization
        self.used: list[str] = []

    def __call__(self, ending: str, dtypes: tuple[torch.dtype, ...], ndim: int | None = None) -> Stored:
        """Return the tensor whose key ends so.

        Raises:
            KeyError: There is none.
            ValueError: It has another dtype or number of dimensions.
        """
        key = self._name + ending
        tensor = self._stored[key]
        if tensor.dtype not in dtypes or ndim not in (None, len(tensor.shape)):
            wanted = " or ".join(map(_plain, dtypes)) + ("" if ndim is None else f" of {ndim} dimensions")
            raise ValueError(
                f"{key} is {_plain(tensor.dtype)} of shape {tuple(tensor.shape)}; wanted {wanted}"
            )
        self.used.append(key)
        return tensor

    def has(self, ending: str) -> bool:
        return self._name + ending in self._stored

    def dtype_of(self, ending: str) -> torch.dtype:
        return self._stored[self._name + ending].dtype

    def decoded(self, shape: tuple[int, ...], exact: torch.dtype, slabs: Slabs) -> Decoded:
        """Return the weight, in the dtype that was asked for, or else in that in which it is ``exact``."""
        return Decoded(shape, self._dtype or exact, slabs, self._kept)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fp8(group: _Group) -> Decoded | None:
    if not group.has("weight_scale_inv") and group.dtype_of("weight") != torch.float8_e4m3fn:
        return None  # was left out of the quantization
    weight = group("weight", (torch.float8_e4m3fn,), 2)
    of_scales = (*_FLOATS, torch.float8_e8m0fnu, torch.uint8)
    scales = group("weight_scale_inv", of_scales)
    rows, columns = weight.shape
    blocks = torch.Size((1, 1)) if scales.shape.numel() == 1 else scales.shape
    block = _block_size((rows, columns), blocks, group.quantization.block)

    def needs(first: int, last: int) -> Sequence[tuple[Stored, int, int]]:
        low, high = first // block[0], -(-last // block[0])
        return (weight, first * columns, last * columns), (scales, low * blocks[1], high * blocks[1])

    def decode(first: int, last: int, needed: Sequence[Tensor]) -> Tensor:
        values, of_rows = needed[0].view(-1, columns), needed[1].view(-1, blocks[1])
        return codecs.decode_fp8(values, of_rows, block, first % block[0])

    def encode(first: int, values: Tensor, had: Sequence[Tensor]) -> Sequence[Tensor]:
        matrix, codes = (each.view(-1, columns) for each in (values, had[0]))
        of_rows, power_of_two = had[1].view(-1, blocks[1]), group.quantization.power_of_two
        return codecs.encode_fp8(matrix, codes, of_rows, block, power_of_two=power_of_two)

    def decode_into(first: int, last: int, needed: Sequence[Tensor], out: Tensor) -> None:
        of_rows = codecs.as_float(needed[1].view(-1, blocks[1]))
        if not _decode_fp8_into(needed[0], of_rows, out, columns, block, first % block[0]):
            out.copy_(decode(first, last, needed).flatten())

    slabs = Slabs(columns, needs, decode, encode, block[0], decode_into)
    return group.decoded((rows, columns), torch.float32, slabs)


def _decode_fp8_into(
    codes: Tensor, scales: Tensor, out: Tensor, columns: int, block: tuple[int, int], first_row: int
) -> bool:
    """See ``decode_fp8`` in :mod:`infinity.optim.kernels`; values are those of the one in ``codecs``.

    Returns:
        Whether this CPU has the loop.
    """
    from infinity.optim import kernels

    if isinstance(out, FakeTensor):  # a dry run counts the bytes that operators move
        out.copy_(codes.view(torch.uint8))
        return True
    if out.dtype == torch.float16 and not kernels.converts_half():
        return False

    def run(codes: Tensor, out: Tensor) -> None:
        stored, factors = kernels.array(codes.view(torch.uint8)), kernels.array(scales)
        kernels.decode_fp8(stored, factors, kernels.array(out), columns, block, first_row)

    compile_ahead(("decode_fp8", out.dtype), partial(run, codes[:0], out[:0]))
    run(codes, out)
    return True


def _block_size(shape: tuple[int, int], blocks: torch.Size, given: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of a block; the file's own where it has other ones than ``quantization_config``.

    Raises:
        ValueError: The scales are not those of such a matrix.
    """
    if len(blocks) != 2:
        raise ValueError(f"its scales have shape {tuple(blocks)}")
    if given is not None and blocks == (-(-shape[0] // given[0]), -(-shape[1] // given[1])):
        return min(shape[0], given[0]) or 1, min(shape[1], given[1]) or 1
    if not blocks.numel() or shape[0] % blocks[0] or shape[1] % blocks[1]:
        raise ValueError(f"its shape is {shape}, that of its scales {tuple(blocks)}, that of a block {given}")
    return shape[0] // blocks[0], shape[1] // blocks[1]


def _mxfp4(group: _Group) -> Decoded:
    blocks = group("_blocks", (torch.uint8,), 4)
    scales = group("_scales", (torch.uint8,), 3)
    experts, rows, groups, width = blocks.shape
    if scales.shape != blocks.shape[:-1] or width != 16:
        raise ValueError(f"its shape is {tuple(blocks.shape)}, that of its scales {tuple(scales.shape)}")
    nbytes, of_expert = rows * groups * width, rows * groups

    def needs(first: int, last: int) -> Sequence[tuple[Stored, int, int]]:
        return (blocks, first * nbytes, last * nbytes), (scales, first * of_expert, last * of_expert)

    def decode(first: int, last: int, needed: Sequence[Tensor]) -> Tensor:
        values, exponents = needed[0].view(-1, rows, groups, width), needed[1].view(-1, rows, groups)
        return codecs.decode_mxfp4(values, exponents)

    def encode(first: int, values: Tensor, had: Sequence[Tensor]) -> Sequence[Tensor]:
        codes, exponents = had[0].view(-1, rows, groups, width), had[1].view(-1, rows, groups)
        return codecs.encode_mxfp4(values.view(-1, *shape[1:]), codes, exponents)

    shape = (experts, 2 * groups * width, rows)
    return group.decoded(shape, torch.bfloat16, Slabs(2 * nbytes, needs, decode, encode))


def _packed(group: _Group) -> Decoded:
    packed = group("weight_packed", (torch.int32,), 2)
    scales = group("weight_scale", _FLOATS, 2)
    size = group("weight_shape", (torch.int64, torch.int32), 1)
    bits, group_size = group.quantization.bits, group.quantization.group_size
    rows, words = packed.shape
    groups = scales.shape[1]
    columns = groups * group_size
    if not columns:
        stored_shape = torch.empty(2, dtype=size.dtype, device="cpu")
        size.fill(0, stored_shape)
        columns = int(stored_shape[1])
    zeros = None
    if group.has("weight_zero_point"):
        zeros = group("weight_zero_point", (torch.int32,), 2)
    if group.has("weight_g_idx"):
        raise ValueError("its columns are grouped in another order (weight_g_idx)")
    if (
        scales.shape[0] != rows
        or -(-columns * bits // 32) != words
        or columns % max(1, groups)
        or (zeros is not None and zeros.shape != (-(-rows * bits // 32), groups))
    ):
        raise ValueError(f"its shape is {tuple(packed.shape)}, that of its scales {tuple(scales.shape)}")

    def needs(first: int, last: int) -> Sequence[tuple[Stored, int, int]]:
        of_rows = (packed, first * words, last * words), (scales, first * groups, last * groups)
        if zeros is None:
            return of_rows
        low, high = first * bits // 32, -(-last * bits // 32)  # a word holds several rows
        return *of_rows, (zeros, low * groups, high * groups)

    def decode(first: int, last: int, needed: Sequence[Tensor]) -> Tensor:
        values, of_rows, centres = needed[0].view(-1, words), needed[1].view(-1, groups), None
        if zeros is not None:
            unpacked = codecs.unpack_zeros(needed[2].view(-1, groups), bits)
            centres = unpacked[first % (32 // bits) :][: last - first]
        return codecs.decode_packed(values, of_rows, centres, bits, columns)

    def encode(first: int, values: Tensor, had: Sequence[Tensor]) -> Sequence[Tensor]:
        codes, of_rows, centres = had[0].view(-1, words), had[1].view(-1, groups), None
        if zeros is not None:
            centres = codecs.unpack_zeros(had[2].view(-1, groups), bits)[: len(codes)]
        matrix = values.view(-1, columns)
        codes, of_rows, *points = codecs.encode_packed(matrix, codes, of_rows, centres, bits)
        return codes, of_rows, *(codecs.pack_zeros(each, bits) for each in points)

    together = 1 if zeros is None else 32 // bits
    return group.decoded((rows, columns), scales.dtype, Slabs(columns, needs, decode, encode, together))


def _gptq(group: _Group) -> Decoded:
    packed = group("qweight", (torch.int32,), 2)
    zeros = group("qzeros", (torch.int32,), 2)
    scales = group("scales", _FLOATS, 2)
    order = group("g_idx", (torch.int32, torch.int64), 1)
    bits = group.quantization.bits
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

    numbers = torch.empty(columns, dtype=order.dtype, device="cpu")
    order.fill(0, numbers)  # here, since an accelerator that decodes would not say what is wrong
    if bool(((numbers < 0) | (numbers >= scales.shape[0])).any()):
        raise ValueError(f"{group.used[-1]} names groups that {group.used[-2]} does not have")
    parts = packed, zeros, scales, order

    def needs(first: int, last: int) -> Sequence[tuple[Stored, int, int]]:
        return [(part, 0, part.shape.numel()) for part in parts]

    def decode(first: int, last: int, needed: Sequence[Tensor]) -> Tensor:
        words, points, factors, groups = (
            values.view(part.shape) for values, part in zip(needed, parts, strict=True)
        )
        less_one = group.quantization.zeros_less_one
        return codecs.decode_gptq(words, points, factors, groups, bits, zeros_less_one=less_one)

    # Its numbers are chosen with data, so that errors of a column make up for those before it.
    return group.decoded((rows, columns), scales.dtype, Slabs(rows * columns, needs, decode, None))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
