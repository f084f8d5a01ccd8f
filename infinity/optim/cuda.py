"""Update rules as kernels in CUDA C, compiled without fused multiply-adds."""

import functools
from collections.abc import Callable
from importlib.resources import files

import torch
from torch import Tensor

from infinity.device.accelerator import compile_kernel
from infinity.optim.formula import Formula
from infinity.optim.state import Quantized, StateLayout

#: Threads of a block of a kernel, and elements of one launch: its numbers are 32 bits wide.
_BLOCK, _LAUNCH_NUMEL = 256, 2**30

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
        f"{files('infinity.optim').joinpath('elements.cu').read_text('utf-8')}\n{formula.cuda('step')}\n"
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
