"""What lies on disk for each element of a shard, by compute dtype.

| compute dtype | state fields (bytes per element)                              | weight |
|---------------|---------------------------------------------------------------|--------|
| bfloat16      | remainder_high 1, remainder_low 1, exp_avg 4, exp_avg_sq 4    | 2      |
| float16       | master 4, exp_avg 4, exp_avg_sq 4                             | 2      |
| float32       | exp_avg 4, exp_avg_sq 4                                       | 4      |

[Note: two byte planes] The signed 16-bit remainder of a bfloat16 weight is stored as two int8
planes, high bytes then low bytes, not as one int16 array: the compiler of the update rule
turns loads and stores of int8 into vector instructions and those of int16 into scalar ones,
which would make the update five times slower.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

#: Elements that the update pipeline reads, updates and writes at one time.
CHUNK_NUMEL = 2 * 2**20

#: Numels are multiples of this, so that weights and states are whole blocks of 4096 bytes.
GRAIN_NUMEL = 2048


@dataclass(frozen=True, slots=True)
class StateField:
    """One value per element: its name, and the type it is stored in."""

    name: str
    dtype: torch.dtype


_EXP_AVG = StateField("exp_avg", torch.float32)
_EXP_AVG_SQ = StateField("exp_avg_sq", torch.float32)
_FIELDS = {
    torch.bfloat16: (
        StateField("remainder_high", torch.int8),
        StateField("remainder_low", torch.int8),
        _EXP_AVG,
        _EXP_AVG_SQ,
    ),
    torch.float16: (StateField("master", torch.float32), _EXP_AVG, _EXP_AVG_SQ),
    torch.float32: (_EXP_AVG, _EXP_AVG_SQ),
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state fields that go with weights of ``dtype``, in the order of their bytes."""

    dtype: torch.dtype
    fields: tuple[StateField, ...]

    @classmethod
    def of(cls, dtype: torch.dtype) -> "StateLayout":
        """The layout for compute dtype ``dtype``.

        Raises:
            ValueError: Not bfloat16, float16 or float32.
        """
        if dtype not in _FIELDS:
            allowed = ", ".join(str(known) for known in _FIELDS)
            raise ValueError(f"no update rule for weights of {dtype}; allowed: {allowed}")
        return cls(dtype, _FIELDS[dtype])

    @property
    def state_itemsize(self) -> int:
        """Bytes of state per element."""
        return sum(field.dtype.itemsize for field in self.fields)

    def weight_nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` weights in the compute dtype."""
        return numel * self.dtype.itemsize

    def state_nbytes(self, numel: int) -> int:
        """Bytes of the state of ``numel`` elements."""
        return numel * self.state_itemsize

    def views(self, buffer: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Cut ``buffer`` into one typed view of shape ``(numel,)`` per field.

        Args:
            buffer: uint8, ``(state_nbytes(numel),)``.
            numel: A multiple of ``GRAIN_NUMEL``.

        Raises:
            ValueError: The buffer has another size, or ``numel`` is not a multiple.
        """
        wanted = self.state_nbytes(numel)
        if numel % GRAIN_NUMEL or buffer.numel() != wanted or buffer.dtype != torch.uint8:
            raise ValueError(
                f"the state of {numel} elements (a multiple of {GRAIN_NUMEL}) lies in {wanted} bytes of "
                f"uint8, got {buffer.numel()} of {buffer.dtype}"
            )
        sizes = [numel * field.dtype.itemsize for field in self.fields]
        begins = accumulate(sizes, initial=0)
        return tuple(
            buffer[begin : begin + size].view(field.dtype)
            for field, begin, size in zip(self.fields, begins, sizes, strict=False)
        )
