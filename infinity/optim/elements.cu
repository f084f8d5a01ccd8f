// What kernels of update rules are made of; infinity/optim/cuda.py writes the rest.

// Conversions of 16-bit floats, which CUDA's own headers are not needed for.
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

// Codes of quantized moments: as `decoded` and `encoded` of infinity/optim/kernels.py. Each block of threads has
// one block of elements, whose largest magnitude is found in its shared memory; older devices cannot.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
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
#endif
