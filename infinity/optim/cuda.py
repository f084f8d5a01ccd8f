"""AdamW as one CUDA kernel: one pass over memory, where elementwise torch has thirty.

It has the operations of :mod:`infinity.optim.kernels` in the same order, each rounded as IEEE 754 wants it:
no fused multiply-add, and the compiler's defaults for division, root and denormals. So the bits are those
of every other form.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from infinity.device.accelerator import compile_kernel

_THREADS = 256
#: Elements of one launch: its numbers are 32 bits wide.
_MOST_NUMEL = 2**30

_SOURCE = """
typedef unsigned short half_bits;
__device__ float from_bf16(half_bits x) { return __uint_as_float((unsigned)x << 16); }
__device__ float from_half(half_bits x)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ half_bits to_half(float f)
{
    half_bits x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
    return x;
}

extern "C" __global__ void adamw(
    WEIGHT *weight, const GRAD *grad, EXACT *exact, float *exp_avg, float *exp_avg_sq,
    int decay_bits, int toward_bits, int beta2_bits, int fresh_bits,
    int rate_bits, int correction_bits, int eps_bits, int scale_bits, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float decay = __int_as_float(decay_bits), toward = __int_as_float(toward_bits);
    float beta2 = __int_as_float(beta2_bits), fresh = __int_as_float(fresh_bits);
    float rate = __int_as_float(rate_bits), correction = __int_as_float(correction_bits);
    float eps = __int_as_float(eps_bits), scale = __int_as_float(scale_bits);
    float g = FROM_GRAD(grad[i]) * scale;
    float m = exp_avg[i] + toward * (g - exp_avg[i]);
    float v = exp_avg_sq[i] * beta2 + fresh * (g * g);
    float master = MASTER * decay;
    master = master - rate * (m / (sqrtf(v) / correction + eps));
    STORE
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
}
"""
#: By the dtype of a weight: its type, that of what makes it exact, the master of both, how they are written.
_WEIGHTS = {
    torch.bfloat16: (
        "half_bits", "short", "__int_as_float((int)((unsigned)weight[i] << 16) + (int)exact[i])",
        "unsigned bits = __float_as_uint(master); exact[i] = bits; weight[i] = (bits + 0x8000) >> 16;",
    ),
    torch.float16: ("half_bits", "float", "exact[i]", "exact[i] = master; weight[i] = to_half(master);"),
    torch.float32: ("float", "float", "weight[i]", "weight[i] = master;"),
}  # fmt: skip
#: By the dtype of a gradient: its type, and what makes a float of it.
_GRADS = {
    torch.bfloat16: ("half_bits", "from_bf16"),
    torch.float16: ("half_bits", "from_half"),
    torch.float32: ("float", ""),
}


@functools.cache
def _kernel(dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> Callable[..., None] | None:
    names = ("WEIGHT", "EXACT", "MASTER", "STORE", "GRAD", "FROM_GRAD")
    meanings = (*_WEIGHTS[dtype], *_GRADS[grad_dtype])
    defines = "".join(f"#define {name} {meaning}\n" for name, meaning in zip(names, meanings, strict=True))
    return compile_kernel(defines + _SOURCE, "adamw", device)


def adamw_by_cuda(weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor) -> bool:
    """Start to update ``weight`` and ``state`` in their places, all ``(n,)``, by the calling thread's stream.

    Args:
        hyper: ``Hyper.tensor()``, in host memory.

    Returns:
        False: There is no such kernel for this device; nothing was done.
    """
    kernel = _kernel(weight.dtype, grad.dtype, weight.device)
    if kernel is None:
        return False
    exact = state[0] if len(state) > 2 else weight
    # As integers: which type a float of Python becomes depends on torch's version.
    numbers = hyper.view(torch.int32).tolist()
    for begin in range(0, weight.numel(), _MOST_NUMEL):
        parts = [each[begin : begin + _MOST_NUMEL] for each in (weight, grad, exact, *state[-2:])]
        n = parts[0].numel()
        kernel(grid=(-(-n // _THREADS), 1, 1), block=(_THREADS, 1, 1), args=[*parts, *numbers, n])
    return True
