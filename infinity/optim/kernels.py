"""CPU loops compiled by numba: those of update rules, written from formula and state; sums; FP8.

Imported when first needed, because numba takes 0.3 s to import; :mod:`infinity.device.machine` compiles
ahead.

[Note: the same bits] A function here gives what numpy's elementwise float32 gives, on every CPU, vectorized
or not: without ``fastmath`` numba neither reorders nor contracts, and ``+ - * /`` and the square root are
correctly rounded everywhere.

[Note: 16-bit floats] numba has no bfloat16 and no float16 on CPUs. They arrive as the integers of their bits,
and their types tell them apart: bfloat16 is int16, float16 is uint16.

[Note: in place] LLVM vectorizes a loop if its outputs overlap none of its inputs, and checks the addresses
first. Weights updated in place would fail that check, so a flag chooses a second copy of the loop, made by
numba's inlining, in which both are one array. (Comparing addresses instead would not help: LLVM would use one
for the other, and check again.)
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from infinity.device.machine import LEAST_NUMEL, in_slices
from infinity.optim.formula import Formula, element_lines
from infinity.optim.state import Quantized, StateLayout

Array = Any  # numpy's, of one dimension and contiguous
F = TypeVar("F", bound=Callable[..., Any])

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}


def array(tensor: Tensor) -> Array:
    """Return a CPU tensor's memory as loops take it: see [Note: 16-bit floats]."""
    return tensor.detach().view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def run(
    loop: Callable[..., object], tensors: Sequence[Tensor], threads: int, *numbers: object,
    least: int = LEAST_NUMEL, pers: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Call ``loop(*arrays, *numbers)`` for slices of ``tensors`` on several threads.

    They have a value for every element, ``(n,)``, or one for as many as ``pers`` says.
    """
    arrays = [*zip(map(array, tensors), pers or [1] * len(tensors), strict=True)]

    def call(begin: int, end: int) -> None:
        loop(*(a[begin // per : -(-end // per)] for a, per in arrays), *numbers)

    in_slices(call, len(arrays[0][0]), threads, least=least, per=int(np.lcm.reduce(pers or [1])))


@functools.cache
def converts_half() -> bool:
    """Return whether the CPU converts float16; else LLVM calls C functions, which may be missing."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features or triple.startswith(("aarch64", "arm64"))


class _Cache(FunctionCache):
    """Caches compiled code on disk, with a file for each signature and CPU; on errors numba compiles.

    Two processes that write numba's own single index at the same time can leave it pointing to the other's
    code.
    """

    source = ""  # of which the function is made, besides its file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(Exception):
            target_context.refresh()
            self._choose_file(sig, target_context.codegen())
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):
            self._choose_file(sig, data.target_context.codegen())
            super().save_overload(sig, data)

    def _choose_file(self, sig: Any, codegen: Any) -> None:
        digest = hashlib.sha256(repr((self._index_key(sig, codegen), self.source)).encode()).hexdigest()
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(
            self.cache_path, f"{self._impl.filename_base}-{digest[:16]}", stamp
        )


def jit(function: F, source: str = "") -> F:
    """Compile ``function`` for the types that it is called with; cached on disk where possible.

    ``source`` is what it is made of besides this file.
    """
    jitted = numba.njit(function, nogil=True, error_model="numpy")
    with contextlib.suppress(Exception):  # no directory to write to: it is compiled in every process
        if not numba.config.CACHE_DIR:
            Path.home()  # raises where there is none: numba would make a directory named ~
        jitted._cache = _Cache(function)
        jitted._cache.source = source
    return cast(F, jitted)


def inlined(function: F) -> F:
    """Compile ``function`` as a part of the functions that call it."""
    return cast(F, numba.njit(function, nogil=True, error_model="numpy", forceinline=True))


@intrinsic
def widen(_: Any, value: Any) -> Any:
    """Return the float32 of a bfloat16, float16 or float32: see [Note: 16-bit floats]."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if value == types.int16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        if value == types.uint16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return types.float32(value), generate


@intrinsic
def rounded_as(_: Any, like: Any, value: Any) -> Any:
    """Round a float32 to the dtype of ``like``, ties to even: see [Note: 16-bit floats]."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if like == types.float32:
            return args[1]
        if like == types.uint16:
            return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), ir.IntType(16))
        word = ir.IntType(32)
        bits = builder.bitcast(args[1], word)
        upper = builder.lshr(bits, ir.Constant(word, 16))
        up = builder.add(builder.and_(upper, ir.Constant(word, 1)), ir.Constant(word, 0x7FFF))
        nearest = builder.trunc(builder.lshr(builder.add(bits, up), ir.Constant(word, 16)), ir.IntType(16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        return builder.select(is_nan, ir.Constant(ir.IntType(16), 0x7FC0), nearest)

    return like(like, types.float32), generate


@inlined
def sign(x: Any) -> Any:
    return np.float32(x > np.float32(0)) - np.float32(x < np.float32(0))


@inlined
def where(condition: Any, x: Any, y: Any) -> Any:
    return x if condition else y


@inlined
def bits(value: Any) -> Any:
    return np.float32(value).view(np.int32)


@inlined
def join(weight: Any, remainder: Any) -> Any:
    return np.int32(np.int32(np.int32(weight) << 16) + np.int32(remainder)).view(np.float32)


@inlined
def upper(master: Any) -> Any:
    """Return a float32 as bfloat16, rounded to nearest with ties up."""
    return np.int16((bits(master) + 0x8000) >> 16)


@inlined
def lower(master: Any) -> Any:
    """Return what :func:`upper` leaves of the bits of a float32."""
    return np.int16(bits(master))


@inlined
def stochastic(master: Any, seed: Any) -> Any:
    """Return a float32 as bfloat16, as :func:`infinity.optim.state.stochastic` rounds it."""
    bits = np.float32(master).view(np.uint32)
    first = np.uint32(bits ^ np.uint32(np.float32(seed).view(np.uint32) * np.uint32(0x9E3779B9)))
    second = np.uint32(np.uint32(first ^ np.uint32(first >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    third = np.uint32(np.uint32(second ^ np.uint32(second >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    added = np.uint32(np.uint32(third ^ np.uint32(third >> np.uint32(16))) & np.uint32(0xFFFF))
    up = np.uint32(bits + added) if master == master else np.uint32(0x7FC00000)
    return np.int16(np.uint32(up) >> np.uint32(16))


@inlined
def lost(like: Any, master: Any) -> Any:
    """Return what rounding a float32 to the dtype of ``like`` takes from it, 0 of an infinite one."""
    wide = widen(rounded_as(like, master))
    return rounded_as(like, np.float32(0) if abs(wide) == np.float32(np.inf) else master - wide)


@inlined
def sum_kept(like: Any, master: Any) -> Any:
    """Return the sum that :func:`infinity.optim.state.compensated` keeps of a float32."""
    return widen(rounded_as(like, master)) + widen(lost(like, master))


@inlined
def magnitude(value: Any) -> Any:
    """Return the bits of a float32 without its sign."""
    return np.int32(bits(value) & np.int32(0x7FFFFFFF))


@inlined
def signed(size: Any, value: Any) -> Any:
    """Return the float32 of a magnitude with the sign of a value."""
    return np.int32(size | np.int32(bits(value) & np.int32(-0x80000000))).view(np.float32)


@inlined
def decoded(code: Any, most: Any, shift: Any, largest: Any) -> Any:
    """Return the value of a code, as :class:`infinity.optim.state.Quantized` has it."""
    share = np.int32(np.int32(magnitude(code) - most) << shift)
    return signed(np.int32(share + largest) if code != 0 else np.int32(0), code)


@inlined
def encoded(values: Array, codes: Array, biggest: Any, most: Any, shift: Any, signs: bool) -> Any:
    """Write codes of a block's values, whose ``biggest`` magnitude is known, and return its scale.

    A share is rounded by a float32 whose last place is 1: its lowest byte is the code, in two's complement.
    """
    finite = min(max(biggest, np.int32(0x10000000)), np.int32(0x7F7FFFFF))
    largest = np.int32(finite if biggest <= 0x7F800000 else 0x7FC00000)
    base = np.int32(most - np.int32(largest >> shift))
    if biggest > largest:
        for i in range(codes.size):
            values[i] = signed(min(magnitude(values[i]), largest), values[i])
    for i in range(codes.size):
        size = magnitude(values[i])
        share = np.int32(np.int32(size >> shift) + base)
        if signs:
            share = share if shift else np.int32(max(share, np.int32(0)))
            codes[i] = bits(signed(share, values[i]) + np.float32(1.5 * 2**23))
        else:  # what is above 0 stays so
            share = np.int32(max(share, np.int32(0x3F800000)))
            codes[i] = bits(share.view(np.float32) + np.float32(2.0**23)) if size > 0 else np.int32(0)
    return np.int32(largest if biggest > 0 else np.int32(0)).view(np.float32)


@inlined
def unpacked(bytes_: Array, pairs: Array) -> None:
    """Write the 4-bit codes of each byte, the lower half first, times 16, into the bytes of a uint16."""
    for i in range(bytes_.size):
        both = np.uint16(bytes_[i])
        pairs[i] = np.uint16(np.uint16(both << 4) & 0xF0) | np.uint16(np.uint16(both << 8) & 0xF000)


@inlined
def packed(pairs: Array, bytes_: Array) -> None:
    """Write the lower halves of both bytes of each uint16 into a byte."""
    for i in range(bytes_.size):
        bytes_[i] = np.uint16(pairs[i] & 0xF) | np.uint16(np.uint16(pairs[i] >> 4) & 0xF0)


@jit
def block_sums(words: Array, salt: int, first: int, sums: Array) -> None:
    """Write a 32-bit sum, not 0, of each block of ``words``, ``(blocks, rows, lanes)`` uint32, to ``sums``.

    Every step is a bijection of the lane and of the word, so a change of one word always changes the sum.
    Salt and block number are mixed in, so that blocks that changed places have other sums.
    """
    lanes = np.empty(words.shape[2], np.uint32)
    for block in range(words.shape[0]):
        for lane in range(lanes.size):
            lanes[lane] = lane
        for row in range(words.shape[1]):
            for lane in range(lanes.size):
                mixed = np.uint32((lanes[lane] ^ words[block, row, lane]) * np.uint32(0x9E3779B1))
                lanes[lane] = mixed ^ (mixed >> np.uint32(15))
        total = np.uint32((first + block) * 0x85EBCA77 + salt * 0xC2B2AE3D)
        for lane in range(lanes.size):
            total = np.uint32((total ^ lanes[lane]) * np.uint32(0x27D4EB2F))
            total = np.uint32(total ^ (total >> np.uint32(16)))
        sums[block] = total if total else np.uint32(1)


@inlined
def e4m3(code: Any) -> Any:
    """Return the exact float32 of the bits of a float8 (e4m3fn)."""
    size = np.int32(code & 0x7F)
    normal = np.int32(np.int32(size << 20) + np.int32(120 << 23)).view(np.float32)
    value = np.float32(size) * np.float32(2.0**-9) if size < 8 else normal
    value = np.float32(np.nan) if size == 0x7F else value
    return -value if code & 0x80 else value


@jit
def decode_fp8(codes: Array, scales: Array, out: Array, columns: int, block: Any, first_row: int) -> None:
    """Multiply rows of float8 by the scales of their blocks; the first row is ``first_row`` of its block.

    ``codes`` (uint8) and ``out`` are ``(n * columns,)``, ``scales`` (float32) ``(rows, columns)`` of blocks.
    """
    for row in range(codes.size // columns):
        for number in range(scales.shape[1]):
            begin, end = number * block[1], min((number + 1) * block[1], columns)
            scale = scales[(first_row + row) // block[0], number]
            given, made = codes[row * columns :][begin:end], out[row * columns :][begin:end]
            for i in range(given.size):
                made[i] = rounded_as(made[i], e4m3(given[i]) * scale)


@jit
def squares(table: Array, sums: Array) -> None:
    """Add the squares of ``table``, ``(rows, n, lanes)``, over ``n`` into ``sums``, ``(rows, lanes)``."""
    for row in range(sums.shape[0]):
        for i in range(table.shape[1]):
            for lane in range(sums.shape[1]):
                x = np.float64(widen(table[row, i, lane]))
                sums[row, lane] += x * x


@functools.cache
def update_loop(formula: Formula, layout: StateLayout) -> Callable[..., object]:
    """Return the jitted ``update(weight, grad, out, *fields, hyper, in_place)`` of one rule and dtype.

    Moments that are quantized are encoded block by block, when their largest magnitude is known.
    """
    quantized = {m.name: m.form for m in layout.moments if isinstance(m.form, Quantized)}
    (load, *loads), stores = element_lines(layout)
    numbers = [f"hyper[{n}]" for n in range(len(formula.parameters) - 2 - len(layout.moments))]
    scaled = f"widen(grad[at]) * hyper[{len(numbers)}]"
    made = "".join(f"{name}_, " for name in ("master", *(moment.name for moment in layout.moments)))
    element = [
        f"seed_ = hyper[{len(numbers) + 1}]",
        *(f"{name}_code = {name}_codes[i]" for name in quantized),
        f"{made} = step({', '.join((load, scaled, *loads, *numbers))})",
        *stores,
        *(f"{name}_values[i] = {name}_" for name in quantized),
        *(f"{name}_biggest = max({name}_biggest, magnitude({name}_))" for name in quantized),
    ]
    taken = ", ".join(["weight", "grad", "out", *(f"{field.name}_field" for field in layout.fields), "hyper"])
    lines = _blocks(element, quantized) if quantized else ["for at in range(grad.size):", *_inner(element)]
    update = f"""def update({taken}, in_place):
    if in_place:
        elements({taken.replace("out", "weight", 1)})
    else:
        elements({taken})
"""
    elements = "\n".join([f"def elements({taken}):", *_inner(lines), ""])
    source = [formula.python("step"), elements, update]
    known = globals() | {
        "root": np.sqrt, "f32": np.float32, "i32": np.int32, "int32": np.int32, "i8": np.int8, "u8": np.uint8,
        "u16": np.uint16, "u64": np.uint64, "empty": np.empty,
    }  # fmt: skip
    known["step"] = inlined(_function(source[0], known))
    # see [Note: in place]
    known["elements"] = numba.njit(_function(source[1], known), inline="always")
    return jit(_function(source[-1], known), "".join(source))


def _inner(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _blocks(element: list[str], quantized: Mapping[str, Quantized]) -> list[str]:
    """Return lines that run those of an element in blocks, with values of quantized moments."""
    [block] = {form.block for form in quantized.values()}
    made, before, after = list[str](), list[str](), list[str]()
    for name, form in quantized.items():
        made.append(f"{name}_values = empty({block}, f32)")
        stored, codes = f"{name}_field[begin : begin + count]", f"{name}_codes"
        if form.bits == 4:
            stored = f"{name}_field[begin // u64(2) : (begin + count + u64(1)) // u64(2)]"
            made += [
                f"{name}_pairs = empty({block // 2 + 1}, u16)",
                f"{name}_all = {name}_pairs.view({'i8' if form.signed else 'u8'})",
            ]
            before += [f"unpacked({stored}, {name}_pairs)", f"{codes} = {name}_all[:count]"]
            after += [f"{name}_all[count] = 0", f"packed({name}_pairs, {stored})"]
        else:
            before.append(f"{codes} = {stored}")
        before.append(f"{name}_largest = f32({name}_scale_field[block]).view(int32)")
        before.append(f"{name}_biggest = i32(0)")
        curve = f"i32({form.most_bits}), i32({form.shift}), {form.signed}"
        scale = f"encoded({name}_values, {codes}, {name}_biggest, {curve})"
        after.insert(0, f"{name}_scale_field[block] = {scale}")
    return [
        *made,
        f"for block in range(u64((grad.size + {block - 1}) // {block})):",
        f"    begin = block * u64({block})",
        f"    count = min(u64({block}), u64(grad.size) - begin)",
        *_inner(before),
        "    for i in range(count):",
        "        at = begin + i",
        *_inner(_inner(element)),
        *_inner(after),
    ]


def _function(source: str, known: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that a source defines; its code is cached beside that of kernels."""
    [code] = [each for each in compile(source, __file__, "exec").co_consts if isinstance(each, CodeType)]
    return FunctionType(code, known)
