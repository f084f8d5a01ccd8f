"""Update rules as kernels in CUDA C, compiled without fused multiply-adds."""

import functools
from collections.abc import Callable
from importlib.resources import files

import torch
from torch import Tensor

from infinity.device.accelerator import compile_kernel
from infinity.optim.formula import Formula, element_lines
from infinity.optim.state import Quantized, StateLayout

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
