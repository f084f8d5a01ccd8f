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
__device__ half_bits stochastic(float f, unsigned seed)
{
    unsigned bits = __float_as_uint(f), mixed = bits ^ (seed * 0x9E3779B9u);
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
    return f != f ? 0x7FC0 : (bits + ((mixed ^ (mixed >> 16)) & 0xFFFF)) >> 16;
}
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
    torch.int8: ("signed char", ""),
    torch.uint8: ("unsigned char", ""),
}
#: By :attr:`StateLayout.master`: the master of an element, and how it is stored; DTYPE is that of weights.
_MASTERS = {
    "remainder": (
        "__int_as_float((int)((unsigned)weight[i] << 16) + (int)remainder_field[i])",
        "remainder_field[i] = __float_as_uint(master_); weight[i] = upper(master_);",
    ),
    "master": ("master_field[i]", "master_field[i] = master_; weight[i] = to_half(master_);"),
    "compensation": (
        "from_DTYPE(weight[i]) + from_DTYPE(compensation_field[i])",
        """for (int pass = 0; pass < 2; ++pass) {
        weight[i] = to_DTYPE(master_);
        const float wide_ = from_DTYPE(weight[i]);
        const int infinite_ = (__float_as_int(wide_) & 0x7FFFFFFF) == 0x7F800000;
        compensation_field[i] = to_DTYPE(infinite_ ? 0.0f : master_ - wide_);
        master_ = wide_ + from_DTYPE(compensation_field[i]);
    }""",
    ),
    "stochastic": ("from_bf16(weight[i])", "weight[i] = stochastic(master_, seed_bits);"),
    "weight": ("from_DTYPE(weight[i])", "weight[i] = to_DTYPE(master_);"),
}


#: Codes of quantized moments: as ``decoded`` and ``encoded`` of :mod:`infinity.optim.kernels`. Each block of
#: threads has one block of elements, whose largest magnitude is found in its shared memory.
_CODES = """
__device__ float decoded(int code, int most, int shift, float scale)
{
    int share = __float_as_int((float)(code < 0 ? -code : code)) - most;
    int size = code ? (int)((unsigned)share << shift) + __float_as_int(scale) : 0;
    return __int_as_float(size | (code & 0x80000000));
}
__device__ int largest_of(float value, int *biggest)
{
    if (threadIdx.x == 0) *biggest = 0;
    __syncthreads();
    int of_warp = __reduce_max_sync(0xFFFFFFFFu, __float_as_int(value) & 0x7FFFFFFF);
    if (threadIdx.x % 32 == 0) atomicMax(biggest, of_warp);
    __syncthreads();
    int finite = *biggest < 0x10000000 ? 0x10000000 : *biggest > 0x7F7FFFFF ? 0x7F7FFFFF : *biggest;
    return *biggest <= 0x7F800000 ? finite : 0x7FC00000;
}
__device__ int encoded(float value, int largest, int most, int shift, int is_signed)
{
    int size = __float_as_int(value) & 0x7FFFFFFF;
    int share = ((size < largest ? size : largest) >> shift) + (most - (largest >> shift));
    int code = __float_as_int(__int_as_float(share) + 8388608.0f) & 0xFF;
    if (is_signed) return __float_as_int(value) < 0 ? -code : code;
    return size ? (code > 1 ? code : 1) : 0;
}
"""


def elementwise_source(formula: Formula, layout: StateLayout, grad_dtype: torch.dtype) -> str:
    """Return the source of a kernel of weight, gradient, fields, numbers as integers, and ``n``."""
    kind, name = _TYPES[layout.dtype]
    load, store = (line.replace("DTYPE", name) for line in _MASTERS[layout.master])
    taken = formula.parameters[2 + len(layout.moments) :]
    fields = [f"{_TYPES[field.dtype][0]} *{field.name}_field" for field in layout.fields]
    numbers = [f"int {name}_bits" for name in (*taken, "scale", "seed")]
    quantized = {m.name: m.form for m in layout.moments if isinstance(m.form, Quantized)}
    loaded, stored, after = list[str](), list[str](), list[str]()
    for name, form in layout.moments:
        if name in quantized:
            stored_as = quantized[name]
            curve = f"{stored_as.most_bits}, {stored_as.shift}"
            loaded.append(f"decoded({_code(name, stored_as)}, {curve}, {name}_scale_field[blockIdx.x])")
            after += _encode(name, stored_as)
        else:
            loaded.append(f"from_{_TYPES[form.dtype][1]}({name}_field[i])")
            stored.append(f"{name}_field[i] = to_{_TYPES[form.dtype][1]}({name}_);")
    floats = [f"__int_as_float({name}_bits)" for name in taken]
    grad = f"from_{_TYPES[grad_dtype][1]}(grad[i]) * __int_as_float(scale_bits)"
    arguments = [
        f"{kind} *weight", f"const {_TYPES[grad_dtype][0]} *grad", *fields, *numbers,
        "int n",
    ]  # fmt: skip
    made = ["master_", *(f"{name}_" for name, _ in layout.moments)]
    call = ", ".join([load, grad, *loaded, *floats, *(f"&{name}" for name in made)])
    lines = [
        "int i = blockIdx.x * blockDim.x + threadIdx.x;",
        f"float {', '.join(f'{name} = 0' for name in made)};",
        f"if (i < n) {{ step({call}); {' '.join([store, *stored])} }}", *after,
    ]  # fmt: skip
    return (
        f"{_CONVERSIONS}\n{_CODES if quantized else ''}\n{formula.cuda('step')}\n"
        f'extern "C" __global__ void update({", ".join(arguments)})\n{{\n    '
        + "\n    ".join(lines)
        + "\n}\n"
    )


def _code(name: str, form: Quantized) -> str:
    """Return the expression of the code of element i."""
    if form.bits == 8:
        return f"(int){name}_field[i]"
    nibble = f"(({name}_field[i / 2] >> (4 * (i & 1))) & 15)"
    return f"(({nibble} ^ 8) - 8)" if form.signed else nibble


def _encode(name: str, form: Quantized) -> list[str]:
    """Return lines that store a quantized moment, which every thread of a block runs."""
    code = f"encoded({name}_, {name}_largest, {form.most_bits}, {form.shift}, {int(form.signed)})"
    scale = f"{name}_scale_field[blockIdx.x] = __int_as_float({name}_most ? {name}_largest : 0);"
    pair = f"{name}_codes[threadIdx.x] | ({name}_codes[threadIdx.x + 1] << 4)"
    lines = [
        f"__shared__ int {name}_most;", f"int {name}_largest = largest_of({name}_, &{name}_most);",
        f"if (threadIdx.x == 0) {scale}",
    ]  # fmt: skip
    if form.bits == 8:
        return [*lines, f"if (i < n) {name}_field[i] = {code};"]
    return [
        *lines, f"__shared__ unsigned char {name}_codes[{form.block}];",
        f"{name}_codes[threadIdx.x] = i < n ? {code} & 15 : 0;", "__syncthreads();",
        f"if (i < n && i % 2 == 0) {name}_field[i / 2] = {pair};",
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
