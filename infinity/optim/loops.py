"""Loops of update rules on the CPU, written from a rule's formula and its state, and compiled by numba."""

import functools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

import numba
import numpy as np

from infinity.optim import kernels
from infinity.optim.formula import Formula
from infinity.optim.kernels import inlined, jit
from infinity.optim.state import Quantized, StateLayout

#: By :attr:`StateLayout.master`: the master of element i, and how a new one is stored.
_MASTERS = {
    "remainder": ("join(weight[i], remainder_field[i])", "out[i], remainder_field[i] = split(master_)"),
    "master": ("master_field[i]", "master_field[i] = master_; out[i] = rounded_as(out[i], master_)"),
    "compensation": (
        "widen(weight[i]) + widen(compensation_field[i])",
        "out[i], compensation_field[i] = compensated(out[i], master_)",
    ),
    "stochastic": ("widen(weight[i])", "out[i] = stochastic(master_, hyper[SEED])"),
    "weight": ("widen(weight[i])", "out[i] = rounded_as(out[i], master_)"),
}


@functools.cache
def update_loop(formula: Formula, layout: StateLayout) -> Callable[..., object]:
    """Return the jitted ``update(weight, grad, out, *fields, hyper, in_place)`` of one rule and dtype.

    Each element is loaded, updated and stored by lines that are written here from the rule's formula; moments
    that are quantized are decoded and encoded block by block.
    """
    master, store = _MASTERS[layout.master]
    moments = {moment.name: moment.form for moment in layout.moments}
    quantized = {name: form for name, form in moments.items() if isinstance(form, Quantized)}
    places = {name: f"{name}_values[i]" if name in quantized else f"{name}_field[i]" for name in moments}
    loaded = [
        f"decoded({name}_field[i], {_curve(quantized[name])}, {name}_largest)" if name in quantized
        else f"widen({place})" for name, place in places.items()
    ]  # fmt: skip
    numbers = [f"hyper[{n}]" for n in range(len(formula.parameters) - 2 - len(moments))]
    scaled = f"widen(grad[i]) * hyper[{len(numbers)}]"
    made = "".join(f"{name}_, " for name in ("master", *moments))
    element = [
        f"{made} = step({', '.join((master, scaled, *loaded, *numbers))})",
        store.replace("SEED", str(len(numbers) + 1)),
        *(f"{place} = rounded_as({place}, {name}_)" for name, place in places.items()),
    ]
    fields = [f"{field.name}_field" for field in layout.fields]
    given = ["weight", "grad", "out", *fields, "hyper"]
    more = [f"{name}_{of}" for name in quantized for of in ("values", "largest")]
    source = [formula.python("step"), _lines("elements", [*given, *more], element)]
    if quantized:
        source.append(_blocks(layout, quantized))
    loop, taken = "blocks" if quantized else "elements", ", ".join(given)
    source.append(
        f"def update({taken}, in_place):\n"
        f"    if in_place:\n        {loop}({taken.replace('out', 'weight', 1)})\n"
        f"    else:\n        {loop}({taken})\n"
    )
    known = vars(kernels) | {
        "sqrt": np.sqrt, "f32": np.float32, "i32": np.int32, "int32": np.int32, "i8": np.int8, "u8": np.uint8,
        "empty": np.empty,
    }  # fmt: skip
    known["step"] = inlined(_function(source[0], known))
    for text in source[1:-1]:  # see [Note: in place] of kernels
        known[text[4 : text.index("(")]] = numba.njit(_function(text, known), inline="always")
    return jit(_function(source[-1], known), "".join(source))


def _lines(name: str, parameters: list[str], lines: list[str]) -> str:
    """Return the source of a function that runs ``lines`` for each element ``i``."""
    body = "".join(f"        {line}\n" for line in lines)
    return f"def {name}({', '.join(parameters)}):\n    for i in range(grad.size):\n{body}"


def _curve(form: Quantized) -> str:
    return f"i32({form.most_bits}), i32({form.shift})"


def _blocks(layout: StateLayout, quantized: Mapping[str, Quantized]) -> str:
    """Return the source of a function that takes blocks of elements, with values of quantized moments."""
    [block] = {form.block for form in quantized.values()}
    scales = {f"{name}_scale" for name in quantized}
    cut = ["weight", "grad", "out", *(f"{f.name}_field" for f in layout.fields if f.name not in scales)]
    taken = ["weight", "grad", "out", *(f"{f.name}_field" for f in layout.fields), "hyper"]
    given = [f"{name}_part" if name in cut else name for name in taken]
    packed = {name: form for name, form in quantized.items() if form.bits == 4}
    inner, after = list[str](), list[str]()
    for name, form in quantized.items():
        of, codes = f"{name}_field", f"{name}_field_part"
        if name in packed:
            pairs = f"{of}[begin // 2 : (end + 1) // 2]"
            inner += [
                f"{codes} = {name}_codes[: grad_part.size]",
                f"unpacked({pairs}, {codes}, {form.signed})",
            ]
            cut.remove(of)
        inner.append(f"{name}_largest = f32({name}_scale_field[block]).view(int32)")
        made = f"encoded({name}_values, {codes}, {_curve(form)}, {form.signed})"
        after += [f"{name}_scale_field[block] = {made}"]
        after += [f"packed({codes}, {pairs})"] if name in packed else []
        given += [f"{name}_values", f"{name}_largest"]
    lines = [
        *(f"{name}_values = empty({block}, f32)" for name in quantized),
        *(f"{name}_codes = empty({block}, {'i8' if form.signed else 'u8'})" for name, form in packed.items()),
        f"for block in range((grad.size + {block - 1}) // {block}):",
        f"    begin, end = {block} * block, min({block} * (block + 1), grad.size)",
        *(f"    {name}_part = {name}[begin:end]" for name in cut),
        *(f"    {line}" for line in (*inner, f"elements({', '.join(given)})", *after)),
    ]
    return f"def blocks({', '.join(taken)}):\n" + "".join(f"    {line}\n" for line in lines)


def _function(source: str, known: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that a source defines; its code is cached beside that of kernels."""
    [code] = [
        each for each in compile(source, kernels.__file__, "exec").co_consts if isinstance(each, CodeType)
    ]
    return FunctionType(code, known)
