"""The state fields of each element of a shard, and how an fp32 master is kept in them.

A state is what makes the weight exact, which depends on the compute dtype, and then the moments of the update
rule (:attr:`infinity.optim.rules.UpdateRule.moments`):

| compute dtype | weight | exact (bytes per element) |
|---------------|--------|---------------------------|
| bfloat16      | 2      | remainder 2               |
| float16       | 2      | master 4                  |
| float32       | 4      | none                      |

[Note: exact split] A float32 is split into the bfloat16 of its upper half and a signed 16-bit remainder, both
taken as integers: ``bits = (weight << 16) + remainder``. Rounding to nearest with ties up, ``weight = (bits +
0x8000) >> 16``, makes the remainder fit for all 2**32 patterns: nothing is lost. (``Tensor.to(bfloat16)``
differs only in sending ties to even.) Where rounding carries the largest finite values to infinity, the model
computes with an infinite weight, as after any cast to bfloat16, but the master stays finite. A NaN may come
back with another payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infinity.device.machine import compiling, rank_threads

#: Elements that the update pipeline reads, updates and writes at one time.
CHUNK_NUMEL = 2 * 2**20


class StateField(NamedTuple):
    """One value per element: its name and stored dtype."""

    name: str
    dtype: torch.dtype


_EXACT = {
    torch.bfloat16: (StateField("remainder", torch.int16),),
    torch.float16: (StateField("master", torch.float32),),
    torch.float32: (),
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """State fields that go with weights of ``dtype``, in the order of their bytes."""

    dtype: torch.dtype
    exact: tuple[StateField, ...]  # they make the weight exact
    moments: tuple[StateField, ...]  # the update rule keeps them; zeros before the first update

    @classmethod
    def of(cls, dtype: torch.dtype, moments: tuple[StateField, ...]) -> "StateLayout":
        """Return the layout for weights of ``dtype``; ValueError: not bfloat16, float16 or float32."""
        if dtype not in _EXACT:
            allowed = ", ".join(str(known) for known in _EXACT)
            raise ValueError(f"no update rule for weights of {dtype}; allowed: {allowed}")
        return cls(dtype, _EXACT[dtype], moments)

    @property
    def fields(self) -> tuple[StateField, ...]:
        return self.exact + self.moments

    @property
    def full_names(self) -> tuple[str, ...]:
        """Names of the fp32 values that a state stands for: the master weight, then each moment."""
        return "master", *(field.name for field in self.moments)

    def only(self, *, exact: bool = False, moments: bool = False) -> "StateLayout":
        """Return the layout of a part of the state."""
        return StateLayout(self.dtype, self.exact if exact else (), self.moments if moments else ())

    def moments_of(self, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the moments among the fields of a whole state."""
        return tuple(state[len(self.exact) :])

    def full_values(self, weight: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the fp32 master and each moment as fp32, ``(n,)``; views where they are stored so."""
        state = tuple(state)
        return master_of(self, weight, state), *(moment.float() for moment in self.moments_of(state))

    def complete(self, state: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        """Return a state with zeros for the last fields, which a state that was never trained lacks."""
        missing = self.fields[len(state) :]
        return *state, *(torch.zeros(numel, dtype=field.dtype, device="cpu") for field in missing)

    def weight_nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def state_nbytes(self, numel: int) -> int:
        return numel * sum(field.dtype.itemsize for field in self.fields)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of weights and state of ``numel`` elements."""
        return self.weight_nbytes(numel) + self.state_nbytes(numel)

    def views(self, buffer: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Cut ``buffer``, uint8, ``(state_nbytes(numel),)``, into one view ``(numel,)`` per field."""
        sizes = [numel * field.dtype.itemsize for field in self.fields]
        parts = zip(torch.split(buffer, sizes), self.fields, strict=True)
        return tuple(part.view(field.dtype) for part, field in parts)

    def chunk_views(self, buffer: Tensor, numel: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return views of weights and state of ``numel`` elements at the beginning of ``buffer``, uint8."""
        middle, end = self.weight_nbytes(numel), self.nbytes(numel)
        return buffer[:middle].view(self.dtype), self.views(buffer[middle:end], numel)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 master into bfloat16 weight and int16 remainder, by torch, on any device."""
    bits = master.view(torch.int32)
    weight = (((bits + 0x8000) >> 16) << 16).view(torch.float32).to(torch.bfloat16)
    return weight, bits.to(torch.int16)


def master_of(
    layout: StateLayout, weight: Tensor, state: tuple[Tensor, ...], *, eager: bool = False
) -> Tensor:
    """Return the float32 master of ``weight``, ``(n,)``; a view with float32 and float16 weights.

    If ``eager``, torch does it on the CPU, too, instead of waiting until numba has compiled its loop.
    """
    if layout.dtype != torch.bfloat16:
        return state[0] if layout.dtype == torch.float16 else weight
    if eager or weight.device.type != "cpu" or compiling():
        return (weight.to(torch.float32).view(torch.int32) + state[0]).view(torch.float32)
    from infinity.optim import kernels

    master = torch.empty(weight.numel(), device="cpu")
    kernels.run(kernels.join_all, (weight, state[0], master), rank_threads())
    return master


def store_master(
    layout: StateLayout, master: Tensor, weight: Tensor, state: tuple[Tensor, ...], *, eager: bool = False
) -> None:
    """Write exact values into ``weight`` and the fields of ``state`` that keep them, all ``(n,)``.

    ``master`` is float32, or bfloat16 where that is the compute dtype; ``eager`` is as for :func:`master_of`.
    """
    if layout.dtype != torch.bfloat16:
        weight.copy_(master)
        if layout.dtype == torch.float16:
            state[0].copy_(master)
    elif master.dtype == torch.bfloat16:
        weight.copy_(master)
        state[0].zero_()
    elif eager or weight.device.type != "cpu" or compiling():
        for target, value in zip((weight, state[0]), split(master), strict=True):
            target.copy_(value)
    else:
        from infinity.optim import kernels

        kernels.run(kernels.split_all, (master.contiguous(), weight, state[0]), rank_threads())
