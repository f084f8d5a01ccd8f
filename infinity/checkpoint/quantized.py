"""Presents the stored tensors of each quantized weight as one tensor, which is decoded when it is read.

A weight and its scales become one tensor with the weight's key, of which any range can be read: transformers'
conversions see a checkpoint as it would be without quantization. The same tensors encode other values, such
as trained ones. What each format stores, and what names it, is in :mod:`infinity.checkpoint.forms`.

[Note: dtype]
FP8 times an fp32 scale needs 28 bits, NVFP4 times two scales 30: masters get the fp32 product. Other formats
give values of the scales' dtype, exact in bf16, or of the dtype that the weight had. Frozen weights need no
more than the compute dtype, and are rounded to it as transformers rounds them when it loads them in that
dtype (to nearest, ties to even).

[Note: encoded again]
A value that equals the decoded one, rounded to the dtype in which the model holds it, counts as unchanged.
Of an unchanged piece the stored bytes are taken; the rest is encoded to the nearest values. So what training
left alone comes back bit by bit, whatever dtype it was held in.

[Note: one kernel]
For an accelerator a decoder is compiled to one kernel, which torch makes of the same operators: while the
model is made, by a thread, from zeros in the shapes of a piece, for all sizes but 1, which torch takes as a
constant. A first decode waits for that, and compiles nothing. The kernel is used only if the first piece that
it decodes has the bits that the eager operators give. Else, or without Triton or a C compiler, these go on,
and one line says why. On a CPU the eager operators are faster: they look up both values of a byte at once.
"""

import functools
import importlib.util
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from infinity.checkpoint.directory import FileTensor, Latest, Stored, View
from infinity.core.errors import first_line
from infinity.core.nbytes import Piece
from infinity.device.accelerator import synchronize, use_own_stream
from infinity.device.machine import compile_ahead
from infinity.optim.state import split

#: Elements that are decoded at a time: what the caches of a CPU hold, and what keeps an accelerator busy.
_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 2**18, 2**22
#: As many of those does one kernel decode: it has no memory beside, but for parts at odd places in files.
_FUSED_PIECES = 8
#: The most memory of decoding beside its result (bytes): for tables, and for each element.
_TABLES_NBYTES, _SCRATCH_ITEMSIZE = 2**16, 16

#: Dtypes that the compiler does not know for each accelerator, and integers that the codecs take for them.
_BITS = {torch.float8_e4m3fn: torch.int8, torch.float8_e8m0fnu: torch.uint8}
#: The most kernels of a process.
_MOST_KERNELS = 32
#: Round where eager operators do, divide exactly, fuse no multiply-add; split no kernel; start no process to
#: compile in. An older torch has not all of them: then the bits may differ.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True, "eager_numerics.division_rounding": True,
    "realize_opcount_threshold": 10_000, "realize_reads_threshold": 1_000, "compile_threads": 1,
}  # fmt: skip


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
    latest: Latest[Tensor] = field(default_factory=Latest)  # slab, of all tensors of a checkpoint

    def fill(self, start: int, out: Tensor, view: View | None = None) -> None:
        size, stop = max(1, self.numel), start + len(out)
        plain = view is not None and out.is_cpu and out.dtype == self.dtype
        if self.decode_into is not None and plain and not (start % size or stop % size):
            first, last = start // size, stop // size
            self.decode_into(out, first % self.together, *self._read(first, last, view))
            return
        at_once = max(1, (_PIECE_NUMEL if out.is_cpu else _DEVICE_PIECE_NUMEL) // size)
        if not (out.is_cpu or start % size or stop % size) and view is not None:
            places = range(start // size, stop // size, _FUSED_PIECES * at_once)
            if all(self._fill_fused(first, at_once, out, start, view) for first in places):
                return
        for first in range(start // size, -(-stop // size), at_once):
            last = min(first + at_once, -(-stop // size))
            low, high = max(start, first * size), min(stop, last * size)
            decoded = self._values(first, last, view)
            values = decoded[low - first * size : high - first * size]
            if out.dtype != self.dtype:
                values = values.to(self.dtype)
            out[low - start : high - start].copy_(values)

    def _fill_fused(self, first: int, at_once: int, out: Tensor, start: int, view: View) -> bool:
        """Fill ``out`` with some slabs from ``first`` on by one kernel; return whether there is one."""
        low = first * self.numel - start
        target = out[low : low + _FUSED_PIECES * at_once * self.numel]
        last = first + len(target) // self.numel

        def reference() -> Tensor:
            return self._values(first, min(last, first + at_once), view)

        parts = self._read(first, last, view)
        return fill(self.decode, first % self.together, parts, target, reference)

    def compile_ahead(self, device: torch.device, say: Callable[[str], object]) -> None:
        last = min(self.shape.numel(), max(self.numel, _DEVICE_PIECE_NUMEL)) // max(1, self.numel)
        if last:
            sizes = ((part, part.range(0, last)) for part in self.parts)
            parts = [
                torch.empty(stop - start, dtype=part.tensor.dtype, device="meta").view(-1, *part.shape)
                for part, (start, stop) in sizes
            ]
            out = torch.empty(last * self.numel, dtype=self.dtype, device="meta")
            prepare(self.decode, parts, out, device, say)

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

        Returns sums of squares, of what encoding changes and of the values. ``put`` gets each stored tensor,
        an index and new values from there on. ValueError: one is NaN, infinite or too large for the form.
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
                        "it was trained, and numbers of this form are chosen with data for calibration: "
                        "export without --stored (stored_as), and quantize that with a library that has data"
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
        return self.latest.get((self, first), lambda: self._decode(first, self._read(first, last)))

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


_kernels: dict[object, "_Kernel"] = {}
_told, _lock = set[str](), threading.Lock()


def why_not() -> str:
    """Return why nothing can be compiled here, in one line; empty: it is to be tried."""
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def prepare(
    decode: Callable[..., Tensor], parts: Sequence[Tensor], out: Tensor, device: torch.device,
    say: Callable[[str], object],
) -> None:  # fmt: skip
    """Compile a decoder for ``device``, for pieces like ``parts`` and values like ``out``, both on meta."""
    key = _key(decode, parts, out.dtype, device)
    if key not in _kernels and len(_kernels) < _MOST_KERNELS:
        kernel = _kernels[key] = _Kernel(say)
        compile_ahead(key, partial(kernel.compile, decode, parts, out, device))


def fill(
    decode: Callable[..., Tensor], first: int, parts: Sequence[Tensor], out: Tensor,
    reference: Callable[[], Tensor],
) -> bool:  # fmt: skip
    """Fill ``out`` with ``decode(first, *parts)`` by a kernel, if its first values are ``reference()``."""
    kernel = _kernels.get(_key(decode, parts, out.dtype, out.device))
    return kernel is not None and kernel.fill(decode, first, parts, out, reference)


class _Kernel:
    """One decoder, compiled, for one accelerator, in given dtypes."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._tried, self._checked = say, threading.Event(), False
        self._run: Callable[..., object] | None = None

    def compile(
        self, decode: Callable[..., Tensor], parts: Sequence[Tensor], out: Tensor, device: torch.device
    ) -> None:
        func, constants, _ = _arguments(decode)
        # Of all integers torch takes only the defaults of keywords as constants.
        bound = FunctionType(func.__code__, func.__globals__, argdefs=func.__defaults__)
        bound.__kwdefaults__ = {**(func.__kwdefaults__ or {}), **constants}

        def fill(out: Tensor, first: int, *parts: Tensor, **tables: Tensor) -> None:
            values = bound(first - 2, *parts, **tables)
            out.view(values.shape).copy_(values)

        fill.__code__ = fill.__code__.replace(co_name=func.__name__)  # torch counts what it compiled by code
        try:
            with _lock:
                if why := why_not():
                    raise RuntimeError(why)
                from torch import _inductor
                from torch.fx.experimental import _config as tracing

                use_own_stream(device)
                options = {k: v for k, v in _OPTIONS.items() if k in _inductor.list_options()}
                self._run = torch.compile(fill, fullgraph=True, dynamic=True, options=options)
                zeros = [torch.zeros_like(part, device=device) for part in parts]
                with cast(Any, tracing).patch(
                    use_duck_shape=False
                ):  # sizes that are equal here may differ elsewhere
                    self._call(decode, 0, zeros, torch.empty_like(out, device=device))
                synchronize(device)
        except Exception as error:
            self._give_up(first_line(error))
        finally:
            self._tried.set()

    def fill(
        self, decode: Callable[..., Tensor], first: int, parts: Sequence[Tensor], out: Tensor,
        reference: Callable[[], Tensor],
    ) -> bool:  # fmt: skip
        self._tried.wait()
        if self._run is not None:
            try:
                self._call(decode, first, parts, out)
                if not self._checked:
                    expected = reference().to(out.dtype).view(torch.uint8)
                    if not torch.equal(out.view(torch.uint8)[: len(expected)], expected):
                        raise ValueError(f"{_arguments(decode)[0].__name__} gives other bits when compiled")
                    self._checked = True
            except Exception as error:
                self._give_up(first_line(error))
        return self._run is not None

    def _call(self, decode: Callable[..., Tensor], first: int, parts: Sequence[Tensor], out: Tensor) -> None:
        assert self._run is not None
        _, _, given = _arguments(decode)
        tables = {name: _table(value, out.device) for name, value in given.items()}
        bits = [part.view(_BITS.get(part.dtype, part.dtype)) for part in parts]
        self._run(out, first + 2, *bits, **tables)  # torch takes 0 and 1 as constants

    def _give_up(self, why: str) -> None:
        self._run = None
        if why not in _told:
            _told.add(why)
            self._say(f"weights are decoded on the accelerator by several kernels, not one: {why}")


def _arguments(
    decode: Callable[..., Tensor],
) -> tuple[FunctionType, dict[str, Any], dict[str, Any]]:
    """Return the function, its constants, and numbers that may be others for each matrix."""
    func: FunctionType = decode.func if isinstance(decode, partial) else decode  # type: ignore[assignment]
    given = getattr(decode, "keywords", {})
    tables = {
        name: value for name, value in given.items()
        if isinstance(value, float) or (isinstance(value, tuple) and isinstance((*value, 0)[0], float))
    }  # fmt: skip
    return func, {name: value for name, value in given.items() if name not in tables}, tables


def _key(
    decode: Callable[..., Tensor], parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> object:
    func, constants, _ = _arguments(decode)
    kinds = tuple((part.dtype, *(min(size, 2) for size in part.shape)) for part in parts)
    return func, tuple(constants.items()), kinds, dtype, device


@functools.cache
def _table(value: float | tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers on ``device``; a single one on the CPU, from where kernels take it as an argument."""
    where = device if isinstance(value, tuple) else "cpu"
    return torch.tensor(value, dtype=torch.float32, device=where)
