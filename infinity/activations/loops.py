"""CPU loops of codecs, compiled by numba: see :mod:`infinity.activations.codecs`.

Imported when first needed, because numba takes 0.3 s to import. ``encode_NAME(words, out, at)`` writes the
code of whole blocks to ``out``, uint8, with as many bytes, and returns its bytes, or 0 if it does not fit;
``decode_NAME(coded, words)`` is the inverse. Loops are over neighbours, without branches, so that LLVM makes
vector instructions of them; 32-bit sums are cut to 32 bits again, since numba makes them wider.
"""

from typing import Any

import numpy as np

from infinity.optim.kernels import inlined, jit

Array = Any  # numpy's, of one dimension and contiguous

BLOCK = 256  # elements
_F32, _U8, _U32, _I32 = np.float32, np.uint8, np.uint32, np.int32
#: A group whose largest magnitude is smaller counts as zero: its inverse would be infinite.
LEAST = np.float32(1e-30)


@jit
def encode_bits(words: Array, out: Array, at: Any) -> Any:
    """Write a bit for each word, which of two values it has, behind the two."""
    first, end, n, more = words[0], 0, words.size // 8, _U32(0)
    while end < words.size and words[end] == first:
        end += 1
    other = words[end] if end < words.size else first
    for i in range(words.size):
        more |= _U32((words[i] != first) & (words[i] != other))
    if more:
        return 0
    ends, bits = out[:16].view(words.dtype), out[16 : 16 + n]
    ends[0], ends[1], bits[:] = first, other, 0
    for bit in range(8):  # each of an eighth of the words
        for i in range(n):
            bits[i] |= _U8(words[n * bit + i] == other) << _U8(bit)
    return 16 + n


@jit
def decode_bits(coded: Array, words: Array) -> None:
    ends, bits, n = coded[:16].view(words.dtype), coded[16:], words.size // 8
    first, other = ends[0], ends[1]
    for bit in range(8):
        for i in range(n):
            words[n * bit + i] = other if bits[i] & (1 << bit) else first


@jit
def encode_zeros(words: Array, out: Array, at: Any) -> Any:
    """Write a bit for each word, whether it is not zero, and those that are not."""
    n, count = words.size // 8, np.int64(0)
    kept = out[n:].view(words.dtype)
    for group in range(n):
        if count + 9 > kept.size:  # with one word behind the last, which the inverse reads
            return 0
        byte = _U32(0)
        for bit in range(8):
            word = words[8 * group + bit]
            kept[count] = word
            there = _U32(word != 0)
            byte |= there << _U32(bit)
            count += np.int64(there)
        out[group] = byte
    return n + (count + 1) * words.itemsize


@jit
def decode_zeros(coded: Array, words: Array) -> None:
    n, count = words.size // 8, np.int64(0)
    kept = coded[n:].view(words.dtype)
    for group in range(n):
        byte = _U32(coded[group])
        for bit in range(8):
            there = (byte >> _U32(bit)) & _U32(1)
            words[8 * group + bit] = kept[count] & (_U32(0) - there)
            count += np.int64(there)


@inlined
def _largest(x: Array) -> Any:
    """Return the largest magnitude; infinite if a value is not finite."""
    most, bits = np.zeros(1, _I32), x.view(_I32)
    for i in range(x.size):  # as integers, which are compared in vectors
        most[0] = max(most[0], bits[i] & _I32(0x7FFFFFFF))
    return most.view(_F32)[0] if most[0] < 0x7F800000 else _F32(np.inf)


@jit
def encode_int8(x: Array, out: Array, at: Any) -> Any:
    """Round to 127 steps of each group's largest, to nearest."""
    groups = x.size // BLOCK
    scales, codes = out[: 4 * groups].view(_F32), out[4 * groups :]
    for group in range(groups):
        part, code = x[BLOCK * group : BLOCK * (group + 1)], codes[BLOCK * group : BLOCK * (group + 1)]
        most = _largest(part)
        if not (most + most / _F32(127)) < np.inf:  # also what 127 steps, rounded, would make infinite
            return 0
        scales[group] = most / _F32(127) if most > LEAST else _F32(0)
        factor = _F32(127) / most if most > LEAST else _F32(0)
        for i in range(BLOCK):
            code[i] = _I32(np.rint(part[i] * factor)) + _I32(128)
    return 4 * groups + x.size


@jit
def decode_int8(coded: Array, x: Array) -> None:
    groups = x.size // BLOCK
    scales, codes = coded[: 4 * groups].view(_F32), coded[4 * groups :]
    for group in range(groups):
        for i in range(BLOCK * group, BLOCK * (group + 1)):
            x[i] = _F32(_I32(codes[i]) - _I32(128)) * scales[group]


@jit
def encode_2bit(x: Array, out: Array, at: Any) -> Any:
    """Round to one of four steps; in front are each group's least value and its step.

    ``at`` is the seed, and the number of the first word.
    """
    groups, quarter, seed, keys = x.size // BLOCK, BLOCK // 4, _U32(at[0]), np.empty(2, _I32)
    ends, codes = out[: 8 * groups].view(_F32), out[8 * groups : 8 * groups + x.size // 4]
    codes[:] = 0
    for group in range(groups):
        part, code = x[BLOCK * group : BLOCK * (group + 1)], codes[quarter * group : quarter * (group + 1)]
        bits, least, most = part.view(_I32), _I32(0x7FFFFFFF), _I32(-0x80000000)
        for i in range(BLOCK):  # integers in the order of their floats
            key = _I32(bits[i] ^ ((bits[i] >> _I32(31)) & _I32(0x7FFFFFFF)))
            least, most = min(least, key), max(most, key)
        keys[0], keys[1] = least, most
        for i in range(2):
            keys[i] ^= (keys[i] >> _I32(31)) & _I32(0x7FFFFFFF)
        low, high = keys.view(_F32)
        step = (high - low) / _F32(3)
        if not (_largest(part) + step) < np.inf:
            return 0
        factor = _F32(1) / step if step > LEAST else _F32(0)
        ends[2 * group], ends[2 * group + 1] = low, step if step > LEAST else _F32(0)
        for k in range(4):
            for i in range(quarter):
                h = _U32(_U32(at[1] + BLOCK * group + quarter * k + i) * _U32(0x9E3779B9)) ^ seed
                h = _U32((h ^ _U32(h >> _U32(16))) * _U32(0x7FEB352D))
                h = _U32((h ^ _U32(h >> _U32(15))) * _U32(0x846CA68B))
                chance = _F32(_I32(_U32(h ^ _U32(h >> _U32(16))) >> _U32(8))) * _F32(2**-24)
                steps = _I32((part[quarter * k + i] - low) * factor + chance)
                code[i] |= _U8(min(steps, _I32(3))) << _U8(2 * k)
    return 8 * groups + x.size // 4


@jit
def decode_2bit(coded: Array, x: Array) -> None:
    groups, quarter = x.size // BLOCK, BLOCK // 4
    ends, codes = coded[: 8 * groups].view(_F32), coded[8 * groups :]
    for group in range(groups):
        low, step = ends[2 * group], ends[2 * group + 1]
        for k in range(4):
            for i in range(quarter):
                steps = _I32((codes[quarter * group + i] >> _U8(2 * k)) & _U8(3))
                x[BLOCK * group + quarter * k + i] = low + step * _F32(steps)
