"""Update rules as kernels in CUDA C, compiled without fused multiply-adds."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.device.accelerator import compile_kernel
from infinity.optim.formula import Formula
from infinity.optim.state import Quantized, StateLayout

#: Threads of a block of a kernel, and elements of one launch: its numbers are 32 bits wide.
_BLOCK, _LAUNCH_NUMEL = 256, 2**30

#: Conversions of 16-bit floats, which CUDA's own headers are not needed for.
_CONVERSIONS = """
typedef unsigned short half_bits;
__device__ float from_float(float x) { return x; }
__device__ float from_bf16(half_bits x) { return __uint_as_float((unsigned)x << 16); }
__device__ float from_half(half_bits x)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ float to_float(float x) { return x; }
__device__ half_bits to_bf16(float f)
{
    unsigned bits = __float_as_uint(f);
    return f != f ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
__device__ half_bits upper(float f) { return (__float_as_uint(f) + 0x8000) >> 16; }
__device__ half_bits to_half(float f)
{
    half_bits x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
    return x;
}
"""
#: By dtype: the type of a value, and the end of the names of what makes a float of it, and it of a float.
_TYPES = {
    torch.bfloat16: ("half_bits", "bf16"),
    torch.float16: ("half_bits", "half"),
    torch.float32: ("float", "float"),
    torch.int16: ("short", ""),
}
#: By the dtype of weights: the master of weight and exact field, and how it is stored.
_MASTERS = {
    torch.bfloat16: (
        "__int_as_float((int)((unsigned)weight[i] << 16) + (int)remainder_field[i])",
        "remainder_field[i] = __float_as_uint(master_); weight[i] = upper(master_);",
    ),
    torch.float16: ("master_field[i]", "master_field[i] = master_; weight[i] = to_half(master_);"),
}


def elementwise_source(formula: Formula, layout: StateLayout, grad_dtype: torch.dtype) -> str:
    """Return the source of a kernel of weight, gradient, fields, numbers as integers, and ``n``."""
    kind, name = _TYPES[layout.dtype]
    load, store = f"from_{name}(weight[i])", f"weight[i] = to_{name}(master_);"
    if layout.exact:
        load, store = _MASTERS[layout.dtype]
    taken = formula.parameters[2 + len(layout.moments) :]
    fields = [f"{_TYPES[field.dtype][0]} *{field.name}_field" for field in layout.fields]
    numbers = [f"int {name}_bits" for name in (*taken, "scale")]
    names = [moment.name for moment in layout.moments]
    loaded = [f"from_{_TYPES[m.form.dtype][1]}({m.name}_field[i])" for m in layout.moments]
    floats = [f"__int_as_float({name}_bits)" for name in taken]
    grad = f"from_{_TYPES[grad_dtype][1]}(grad[i]) * __int_as_float(scale_bits)"
    arguments = [
        f"{kind} *weight",
        f"const {_TYPES[grad_dtype][0]} *grad",
        *fields,
        *numbers,
        "int n",
    ]
    made = ["master_", *(f"{name}_" for name in names)]
    stored = [f"{m.name}_field[i] = to_{_TYPES[m.form.dtype][1]}({m.name}_);" for m in layout.moments]
    call = ", ".join([load, grad, *loaded, *floats, *(f"&{name}" for name in made)])
    lines = [
        "int i = blockIdx.x * blockDim.x + threadIdx.x;", "if (i >= n) return;",
        f"float {', '.join(made)};", f"step({call});", store, *stored,
    ]  # fmt: skip
    return (
        f"{_CONVERSIONS}\n{formula.cuda('step')}\n"
        f'extern "C" __global__ void update({", ".join(arguments)})\n{{\n    '
        + "\n    ".join(lines)
        + "\n}\n"
    )


@functools.cache
def elementwise_kernel(
    formula: Formula | None, layout: StateLayout, grad_dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor, tuple[Tensor, ...], Tensor], None] | None:
    """Return what starts an update in place on ``device``; None: there is no kernel."""
    if formula is None or any(isinstance(moment.form, Quantized) for moment in layout.moments):
        return None
    source = elementwise_source(formula, layout, grad_dtype)
    kernel = compile_kernel(source, "update", device)
    if kernel is None:
        return None

    def update(weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor) -> None:
        # As integers: which type a float of Python becomes depends on torch's version.
        numbers = hyper.view(torch.int32).tolist()
        for begin in range(0, weight.numel(), _LAUNCH_NUMEL):
            parts = [each[begin : begin + _LAUNCH_NUMEL] for each in (weight, grad, *state)]
            n = parts[0].numel()
            kernel(grid=(-(-n // _BLOCK), 1, 1), block=(_BLOCK, 1, 1), args=[*parts, *numbers, n])

    return update
