"""Loops of update rules on the CPU, written from a rule's formula and its state, and compiled by numba."""

import functools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

import numba
import numpy as np

from infinity.optim import kernels
from infinity.optim.formula import Formula, element_lines
from infinity.optim.kernels import inlined, jit
from infinity.optim.state import Quantized, StateLayout


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
    known = vars(kernels) | {
        "root": np.sqrt, "f32": np.float32, "i32": np.int32, "int32": np.int32, "i8": np.int8, "u8": np.uint8,
        "u16": np.uint16, "u64": np.uint64, "empty": np.empty,
    }  # fmt: skip
    known["step"] = inlined(_function(source[0], known))
    # see [Note: in place] of kernels
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
    [code] = [
        each for each in compile(source, kernels.__file__, "exec").co_consts if isinstance(each, CodeType)
    ]
    return FunctionType(code, known)
