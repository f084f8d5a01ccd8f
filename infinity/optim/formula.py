"""The arithmetic of an update rule, read from its Python function, as source for numba and for CUDA C.

A rule's ``update`` is called with tensors where torch runs it. If it is a list of assignments and a return of
what :data:`_ALLOWED` names, the same lines are compiled for one element, on the CPU and by CUDA. Constants
are float32 there, as torch takes them beside a float32 tensor.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.device.accelerator import rounds_roots


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; ``Tensor.sqrt`` on a CPU may be off by one in the last place.

    On an accelerator whose root is not known to be rounded correctly, that in float64 gives the same bits.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.sqrt() if rounds_roots(x.device) else root_in_float64(x)


def root_in_float64(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()


def sign(x: Tensor) -> Tensor:
    """Return 1, 0 or -1, fp32; 0 for NaN."""
    return (x > 0).float() - (x < 0).float()


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return ``x`` where ``condition``, a comparison, holds, and ``y`` elsewhere."""
    return torch.where(condition, x, y)


#: In expressions of update rules, beside ``+ - * /``, comparisons, names and numbers: by torch, numba and C.
_ALLOWED: Mapping[Callable[..., Any], tuple[str, str]] = {
    root: ("sqrt({})", "sqrtf({})"),
    sign: ("(f32({0} > f32(0)) - f32({0} < f32(0)))", "((float)({0} > 0.0f) - (float)({0} < 0.0f))"),
    where: ("({1} if {0} else {2})", "({0} ? {1} : {2})"),
}
_OPERATORS: Mapping[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


class NotElementwiseError(Exception):
    """Raised for a construct that is no arithmetic of one element."""


@dataclass(frozen=True, slots=True)
class Formula:
    """Parameters, assignments in order, and results; expressions are in numba's form and in C's."""

    parameters: tuple[str, ...]
    lines: tuple[tuple[str, str, str], ...]  # name, numba, C
    results: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Formula":
        """Read a function; NotElementwiseError says what cannot be compiled."""
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise NotElementwiseError("its source is not in a file") from error
        [definition] = ast.parse(source).body
        if not isinstance(definition, ast.FunctionDef):
            raise NotElementwiseError("it is no function")
        reader = _Reader(function.__globals__)
        lines: list[tuple[str, str, str]] = []
        for statement in definition.body:
            match statement:
                case ast.Expr(ast.Constant(str())):
                    continue
                case ast.Assign([ast.Name(name)], value):
                    lines.append((name, *reader.both(value)))
                case ast.AugAssign(ast.Name(name) as target, operator, value):
                    left = ast.Name(target.id, ast.Load())
                    lines.append((name, *reader.both(ast.BinOp(left, operator, value))))
                case ast.Return(ast.Tuple(values)):
                    results = tuple(reader.both(value) for value in values)
                case ast.Return(value) if value is not None:
                    results = (reader.both(value),)
                case _:
                    raise NotElementwiseError(ast.unparse(statement).splitlines()[0])
        return cls(tuple(argument.arg for argument in definition.args.args), tuple(lines), results)

    def python(self, name: str) -> str:
        """Return the source of a function of float32 numbers for numba: ``sqrt`` and ``f32`` are global."""
        body = [f"{target} = {expression}" for target, expression, _ in self.lines]
        body.append(f"return {', '.join(result for result, _ in self.results)},")
        return f"def {name}({', '.join(self.parameters)}):\n" + textwrap.indent("\n".join(body), "    ")

    def cuda(self, name: str) -> str:
        """Return the source of a device function that takes the parameters and pointers to the results."""
        known, body = set(self.parameters), list[str]()
        for target, _, expression in self.lines:
            body.append(f"{'' if target in known else 'float '}{target} = {expression};")
            known.add(target)
        for number, (_, expression) in enumerate(self.results):
            body.append(f"float result{number}_ = {expression};")
        body += [f"*out{number}_ = result{number}_;" for number in range(len(self.results))]
        given = [f"float {each}" for each in self.parameters]
        given += [f"float *out{number}_" for number in range(len(self.results))]
        return f"__device__ void {name}({', '.join(given)})\n{{\n" + textwrap.indent(
            "\n".join(body) + "\n}\n", "    "
        ).replace("    }", "}")


class _Reader:
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def both(self, node: ast.expr) -> tuple[str, str]:
        """Return an expression for numba and for C."""
        match node:
            case ast.Name(name):
                return name, name
            case ast.Constant(int() | float() as value):
                rounded = np.float32(value).item()
                return f"f32({rounded!r})", f"{rounded!r}f"
            case ast.UnaryOp(ast.USub(), operand):
                x, y = self.both(operand)
                return f"(-{x})", f"(-{y})"
            case ast.BinOp(left, operator, right) | ast.Compare(left, [operator], [right]) if (
                type(operator) in _OPERATORS
            ):
                pairs = zip(self.both(left), self.both(right), strict=True)
                x, y = (f"({a} {_OPERATORS[type(operator)]} {b})" for a, b in pairs)
                return x, y
            case ast.Call(function, arguments, []) if (called := self._called(function)) in _ALLOWED:
                given = [self.both(argument) for argument in arguments]
                x, y = (
                    form.format(*values)
                    for form, values in zip(_ALLOWED[called], zip(*given, strict=True), strict=True)
                )
                return x, y
        raise NotElementwiseError(ast.unparse(node))

    def _called(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(name):
                return self._names.get(name)
            case ast.Attribute(ast.Name(module), name):
                return getattr(self._names.get(module), name, None)
        return None
