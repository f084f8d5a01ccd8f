"""The arithmetic of an update rule, traced from its Python function, as source for numba and for CUDA C++.

A rule's ``update`` is called with tensors where torch runs it. If it does no more to what it is given than
:data:`_SPELLED` and the functions here name, which torch.fx tells, the same operations are compiled for one
element, on the CPU and by CUDA. Constants are float32 there, as torch takes them beside a float32 tensor.

[Note: one spelling] Expressions, and what loads and stores an element, are spelled so that numba and C++ both
read them: functions of these names are in :mod:`infinity.optim.kernels` and in ``elements.cu``.
"""

import functools
import math
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._python_dispatch import _disable_current_modes

from infinity.device.accelerator import compile_kernel, rounds_roots
from infinity.optim.state import Quantized, StateLayout

F = TypeVar("F", bound=Callable[..., Any])


def _operation(function: F) -> F:
    """Let ``function`` be one operation of a formula."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        traced = next((each for each in args if isinstance(each, fx.Proxy)), None)
        if traced is None:
            return function(*args, **named)
        return traced.tracer.create_proxy("call_function", call, args, {})

    return cast(F, call)


@_operation
def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; ``Tensor.sqrt`` on a CPU may be off by one in the last place.

    On an accelerator whose root is not known to be rounded correctly, that in float64 gives the same bits.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.sqrt() if rounds_roots(x.device) else root_in_float64(x)


def root_in_float64(x: Tensor) -> Tensor:
    return x.double().sqrt_().float()


@_operation
def sign(x: Tensor) -> Tensor:
    """Return 1, 0 or -1, fp32; 0 for NaN."""
    return (x > 0).float() - (x < 0).float()


@_operation
def where(condition: Any, x: Any, y: Any) -> Any:
    """Return ``x`` where ``condition``, a comparison, holds, and ``y`` elsewhere."""
    return torch.where(condition, x, y)


#: What an update rule may do to numbers, and how it is spelled.
_SPELLED: Mapping[Any, str] = {
    operator.add: "({} + {})", operator.sub: "({} - {})", operator.mul: "({} * {})",
    operator.truediv: "({} / {})", operator.lt: "({} < {})", operator.le: "({} <= {})",
    operator.gt: "({} > {})", operator.ge: "({} >= {})", operator.neg: "(-{})",
    root: "root({})", sign: "sign({})", where: "where({}, {}, {})",
}  # fmt: skip
_COMPARISONS = operator.lt, operator.le, operator.gt, operator.ge


@dataclass(frozen=True, slots=True)
class Formula:
    """Parameters, assignments in order, and results: see [Note: one spelling]."""

    parameters: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]  # name, assigned once, and expression
    results: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., tuple[Any, ...]], count: int) -> "Formula | None":
        """Return what a function of ``count`` numbers computes; None: something that is not spelled."""
        graph = fx.Graph()
        given = [graph.placeholder(f"given{number}") for number in range(count)]
        try:
            made = function(*(fx.Proxy(each, GraphAppendingTracer(graph)) for each in given))
            made = tuple(each.node if isinstance(each, fx.Proxy) else each for each in made)
            results = tuple(map(_name, made))
            lines = ((node, _SPELLED[node.target]) for node in graph.nodes if node not in given)
            spelled = tuple((_name(node), how.format(*map(_name, node.args))) for node, how in lines)
            _check(function, graph, made)
        except Exception:  # of torch.fx, or of a function that asks more of what it is given
            return None
        return cls(tuple(map(_name, given)), spelled, results)

    def python(self, name: str) -> str:
        """Return the source of a function of float32 numbers for numba."""
        body = [f"{target} = {expression}" for target, expression in self.lines]
        body.append(f"return {', '.join(self.results)},")
        return f"def {name}({', '.join(self.parameters)}):\n" + textwrap.indent("\n".join(body), "    ")

    def cuda(self, name: str) -> str:
        """Return the source of a device function that takes the parameters and pointers to the results."""
        body = [f"float {target} = {expression};" for target, expression in self.lines]
        outs = [f"out{number}_" for number in range(len(self.results))]
        body += [f"float new_{out} = {result};" for out, result in zip(outs, self.results, strict=True)]
        body += [f"*{out} = new_{out};" for out in outs]
        given = [*(f"float {each}" for each in self.parameters), *(f"float *{out}" for out in outs)]
        return "\n".join([f"__device__ void {name}({', '.join(given)})\n{{", *body, "}\n"])


#: By :attr:`StateLayout.master`: the master of the element ``at``, and lines that store a new one.
_MASTERS = {
    "remainder": (
        "join(weight[at], remainder_field[at])",
        ["out[at] = upper(master_)", "remainder_field[at] = lower(master_)"],
    ),
    "master": ("master_field[at]", ["master_field[at] = master_", "out[at] = rounded_as(out[at], master_)"]),
    "compensation": (
        "widen(weight[at]) + widen(compensation_field[at])",
        [
            "master_ = sum_kept(out[at], master_)",
            "out[at] = rounded_as(out[at], master_)",
            "compensation_field[at] = lost(out[at], master_)",
        ],
    ),
    "stochastic": ("widen(weight[at])", ["out[at] = stochastic(master_, seed_)"]),
    "weight": ("widen(weight[at])", ["out[at] = rounded_as(out[at], master_)"]),
}


def element_lines(layout: StateLayout) -> tuple[list[str], list[str]]:
    """Return expressions of an element's master and moments, and lines that store new ones.

    Those are ``master_`` and the moments' names with an underscore. A quantized moment is decoded from its
    ``_code``, times 16 if it has 4 bits, and the bits of the ``_largest`` of its block; it is stored later.
    """
    master, stored = _MASTERS[layout.master]
    loads, stores = [master], [*stored]
    for name, form in layout.moments:
        place = f"{name}_field[at]"
        if isinstance(form, Quantized):
            most = form.most_bits + (4 << 23) * (form.bits == 4)
            loads.append(f"decoded({name}_code, i32({most}), i32({form.shift}), {name}_largest)")
        else:
            loads.append(f"widen({place})")
            stores.append(f"{place} = rounded_as({place}, {name}_)")
    return loads, stores


def _name(value: Any) -> str:
    """Return the name of a node, or a constant; ValueError or TypeError: it is no finite number."""
    if isinstance(value, fx.Node):
        return f"own_{value.name}"
    with np.errstate(over="raise"):
        if not math.isfinite(rounded := np.float32(value).item()):
            raise ValueError(value)
    return f"f32({rounded!r})"


def _check(function: Callable[..., Any], graph: fx.Graph, made: Sequence[Any]) -> None:
    """Raise a ValueError if what was traced is not what ``function`` does to tensors.

    It may ask for a type, draw random numbers, or add comparisons, which are no numbers to torch.
    """
    with _disable_current_modes(), np.errstate(all="ignore"):  # some are negative
        places = [node for node in graph.nodes if node.op == "placeholder"]
        given = torch.arange(1, 1 + 8 * len(places), dtype=torch.float32, device="cpu").sin().view(-1, 8)
        known: dict[Any, Any] = dict(zip(places, given.unbind(), strict=True))
        for node in graph.nodes:
            if node not in known:
                known[node] = node.target(*fx.node.map_arg(node.args, known.__getitem__))
                if known[node].dtype not in (torch.float32, torch.int64) and node.target not in _COMPARISONS:
                    raise ValueError(node)
        eager = function(*given.clone().unbind())
        for one, other in zip(eager, fx.node.map_arg(tuple(made), known.__getitem__), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


#: Threads of a block of a kernel, and elements of one launch: its numbers are 32 bits wide.
_BLOCK, _LAUNCH_NUMEL = 256, 2**30

#: Types of values; those of 16-bit floats tell them apart, as in :mod:`infinity.optim.kernels`.
_TYPES = {
    torch.bfloat16: "short",
    torch.float16: "unsigned short",
    torch.float32: "float",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}


def elementwise_source(formula: Formula, layout: StateLayout, grad_dtype: torch.dtype) -> str:
    """Return the source of a kernel of weight, gradient, fields, numbers as integers, and ``n``."""
    kind = _TYPES[layout.dtype]
    taken = formula.parameters[2 + len(layout.moments) :]
    fields = [f"{_TYPES[field.dtype]} *{field.name}_field" for field in layout.fields]
    numbers = [f"int {name}_bits" for name in (*taken, "scale", "seed")]
    quantized = {m.name: m.form for m in layout.moments if isinstance(m.form, Quantized)}
    (load, *loads), stores = element_lines(layout)
    grad = "widen(grad[at]) * __int_as_float(scale_bits)"
    floats = [f"__int_as_float({name}_bits)" for name in taken]
    made = ["master_", *(f"{name}_" for name, _ in layout.moments)]
    call = ", ".join([load, grad, *loads, *floats, *(f"&{name}" for name in made)])
    arguments = [f"{kind} *weight", f"const {_TYPES[grad_dtype]} *grad", *fields, *numbers, "int n"]
    codes = [line for name, form in quantized.items() for line in _code(name, form)]
    lines = [
        "int at = blockIdx.x * blockDim.x + threadIdx.x;",
        f"{kind} *out = weight;",
        "float seed_ = __int_as_float(seed_bits);",
        f"float {', '.join(f'{name} = 0' for name in made)};",
        f"if (at < n) {{ {' '.join(codes)} step({call}); {'; '.join(stores)}; }}",
        *(line for name, form in quantized.items() for line in _encode(name, form)),
    ]
    return (
        f"{files('infinity.optim').joinpath('elements.cu').read_text('utf-8')}\n{formula.cuda('step')}\n"
        f'extern "C" __global__ void update({", ".join(arguments)})\n{{\n    '
        + "\n    ".join(lines)
        + "\n}\n"
    )


def _code(name: str, form: Quantized) -> list[str]:
    """Return lines that read what an element is decoded from: see :func:`element_lines`."""
    code = f"{name}_field[at]"
    if form.bits == 4:
        kind = "signed char" if form.signed else "unsigned char"
        code = f"({kind})(({name}_field[at / 2] << (at & 1 ? 0 : 4)) & 0xF0)"
    largest = f"__float_as_int({name}_scale_field[blockIdx.x])"
    return [f"const int {name}_code = {code}, {name}_largest = {largest};"]


def _encode(name: str, form: Quantized) -> list[str]:
    """Return lines that store a quantized moment, which every thread of a block runs."""
    code = f"encoded({name}_, {name}_biggest, {form.most_bits}, {form.shift}, {int(form.signed)})"
    scale = f"{name}_scale_field[blockIdx.x] = __int_as_float({name}_most ? {name}_biggest : 0);"
    pair = f"{name}_codes[threadIdx.x] | ({name}_codes[threadIdx.x + 1] << 4)"
    lines = [
        f"__shared__ int {name}_most;", f"int {name}_biggest = largest_of({name}_, &{name}_most);",
        f"if (threadIdx.x == 0) {scale}",
    ]  # fmt: skip
    if form.bits == 8:
        return [*lines, f"if (at < n) {name}_field[at] = {code};"]
    return [
        *lines, f"__shared__ unsigned char {name}_codes[{form.block}];",
        f"{name}_codes[threadIdx.x] = at < n ? {code} & 15 : 0;", "__syncthreads();",
        f"if (at < n && at % 2 == 0) {name}_field[at / 2] = {pair};",
    ]  # fmt: skip


@functools.cache
def elementwise_kernel(
    formula: Formula | None, layout: StateLayout, grad_dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor, tuple[Tensor, ...], Tensor], None] | None:
    """Return what starts an update in place on ``device``; None: there is no kernel."""
    if formula is None:
        return None
    [block] = {m.form.block for m in layout.moments if isinstance(m.form, Quantized)} or {_BLOCK}
    source = elementwise_source(formula, layout, grad_dtype)
    kernel = compile_kernel(source, "update", device)
    if kernel is None:
        return None

    def update(weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor) -> None:
        # As integers: which type a float of Python becomes depends on torch's version.
        numbers = hyper.view(torch.int32).tolist()
        for begin in range(0, weight.numel(), _LAUNCH_NUMEL):
            end = min(begin + _LAUNCH_NUMEL, weight.numel())
            parts = weight[begin:end], grad[begin:end], *layout.part(state, begin, end)
            args = [*parts, *numbers, end - begin]
            kernel(grid=(-(-(end - begin) // block), 1, 1), block=(block, 1, 1), args=args)

    return update
