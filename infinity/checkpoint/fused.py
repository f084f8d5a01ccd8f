"""Compiles decoders for an accelerator: one kernel for each format, which torch makes of the same operators.

[Note: the eager operators decide]
A kernel is used only if the first piece that it decodes has the bits that the eager operators give. Else, or
without Triton or a C compiler, these go on, and one line says why.

[Note: when it is compiled]
While the model is made, by a thread, from zeros in the shapes of a piece. A first decode waits for that, and
compiles nothing. A kernel is for all sizes but 1, which torch takes as a constant. On a CPU the eager
operators are faster: they look up both values of a byte at once.
"""

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from infinity.core.errors import first_line
from infinity.device.accelerator import synchronize, use_own_stream
from infinity.device.machine import compile_ahead

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
