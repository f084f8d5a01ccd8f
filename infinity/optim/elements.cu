// What kernels of update rules are made of: functions of the names in infinity/optim/kernels.py;
// infinity/optim/cuda.py writes the rest. A bfloat16 is a short, a float16 an unsigned short.

typedef float f32;
typedef int i32;
__device__ float root(float x) { return sqrtf(x); }
__device__ float sign(float x) { return (float)(x > 0.0f) - (float)(x < 0.0f); }
__device__ float where(bool condition, float x, float y) { return condition ? x : y; }

__device__ float widen(float x) { return x; }
__device__ float widen(short x) { return __uint_as_float((unsigned)x << 16); }
__device__ float widen(unsigned short x)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
__device__ float rounded_as(float like, float x) { return x; }
__device__ short rounded_as(short like, float f)
{
    unsigned bits = __float_as_uint(f);
    return f != f ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
__device__ unsigned short rounded_as(unsigned short like, float f)
{
    unsigned short x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
    return x;
}
__device__ float join(short weight, short remainder)
{
    return __int_as_float((int)((unsigned)weight << 16) + remainder);
}
__device__ short upper(float f) { return (__float_as_uint(f) + 0x8000) >> 16; }
__device__ short lower(float f) { return __float_as_uint(f); }
template <typename T> __device__ T lost(T like, float f)
{
    const float wide = widen(rounded_as(like, f));
    const bool infinite = (__float_as_int(wide) & 0x7FFFFFFF) == 0x7F800000;
    return rounded_as(like, infinite ? 0.0f : f - wide);
}
template <typename T> __device__ float sum_kept(T like, float f)
{
    return widen(rounded_as(like, f)) + widen(lost(like, f));
}
__device__ short stochastic(float f, float seed)
{
    unsigned bits = __float_as_uint(f), mixed = bits ^ (__float_as_uint(seed) * 0x9E3779B9u);
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
    return f != f ? 0x7FC0 : (bits + ((mixed ^ (mixed >> 16)) & 0xFFFF)) >> 16;
}

// Codes of quantized moments: as `decoded` and `encoded` of infinity/optim/kernels.py. Each block of threads has
// one block of elements, whose largest magnitude is found in its shared memory; older devices cannot.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ float decoded(int code, int most, int shift, int largest)
{
    int share = __float_as_int((float)(code < 0 ? -code : code)) - most;
    int size = code ? (int)((unsigned)share << shift) + largest : 0;
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
    int code = __float_as_int(__int_as_float(share < 0 ? 0 : share) + 8388608.0f) & 0xFF;
    if (is_signed) return __float_as_int(value) < 0 ? -code : code;
    return size ? (code > 1 ? code : 1) : 0;
}
#endif
