"""Loops of update rules on the CPU, written from a rule's formula and its state, and compiled by numba."""

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numba
import numpy as np
import torch

from infinity.optim import kernels
from infinity.optim.formula import Formula
from infinity.optim.kernels import inlined, jit, join, rounded_as, split, widen
from infinity.optim.state import StateLayout

#: By the dtype of weights: the master of element i, and how a new one is stored.
_MASTERS = {
    torch.bfloat16: ("join(weight[i], remainder_field[i])", "out[i], remainder_field[i] = split(master_)"),
    torch.float16: (
        "master_field[i]", "master_field[i] = master_; out[i] = rounded_as(out[i], master_)",
    ),
    torch.float32: ("weight[i]", "out[i] = master_"),
}  # fmt: skip


@functools.cache
def update_loop(formula: Formula, layout: StateLayout) -> Callable[..., object]:
    """Return the jitted ``update(weight, grad, out, *fields, hyper, in_place)`` of one rule and dtype.

    Each element is loaded, updated and stored by lines that are written here from the rule's formula.
    """
    load, store = _MASTERS[layout.dtype]
    names = [moment.name for moment in layout.moments]
    numbers = [f"hyper[{n}]" for n in range(len(formula.parameters) - 2 - len(names))]
    call = ", ".join(
        (
            load,
            f"widen(grad[i]) * hyper[{len(numbers)}]",
            *(f"widen({each}_field[i])" for each in names),
            *numbers,
        )
    )
    made = ", ".join(("master_", *(f"{each}_" for each in names)))
    fields = "".join(f", {field.name}_field" for field in layout.fields)
    stored = "".join(f"\n        {n}_field[i] = rounded_as({n}_field[i], {n}_)" for n in names)
    loop = f"""
def loop(weight, grad, out{fields}, hyper):
    for i in range(grad.size):
        {made}, = step({call})
        {store}{stored}
"""
    update = f"""
def update(weight, grad, out{fields}, hyper, in_place):
    if in_place:
        loop(weight, grad, weight{fields}, hyper)
    else:
        loop(weight, grad, out{fields}, hyper)
"""
    source = formula.python("step"), loop, update
    known = {"sqrt": np.sqrt, "f32": np.float32}
    known |= {each.__name__: each for each in (join, split, widen, rounded_as)}
    known["step"] = inlined(_function(source[0], "step", known))
    known["loop"] = numba.njit(_function(loop, "loop", known), inline="always")
    return jit(_function(update, "update", known), "".join(source))


def _function(source: str, name: str, known: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that a source defines; its code is cached beside that of kernels."""
    [code] = [
        each for each in compile(source, kernels.__file__, "exec").co_consts if isinstance(each, CodeType)
    ]
    return FunctionType(code, known, name)
