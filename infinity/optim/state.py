"""What lies beside a weight: what makes it exact, and the moments of an update rule, in the forms they have.

A state is what makes the weight exact, which depends on the compute dtype, and then the moments of the rule:

| compute dtype | weight | exact (bytes per element) | kahan          | bf16-stochastic |
|---------------|--------|---------------------------|----------------|-----------------|
| bfloat16      | 2      | remainder 2               | compensation 2 | none            |
| float16       | 2      | master 4                  | compensation 2 |                 |
| float32       | 4      | none                      |                |                 |

[Note: exact split] A float32 is split into the bfloat16 of its upper half and a signed 16-bit remainder, both
taken as integers: ``bits = (weight << 16) + remainder``. Rounding to nearest with ties up, ``weight = (bits +
0x8000) >> 16``, makes the remainder fit for all 2**32 patterns: nothing is lost. (``Tensor.to(bfloat16)``
differs only in sending ties to even.) Where rounding carries the largest finite values to infinity, the model
computes with an infinite weight, as after any cast to bfloat16, but the master stays finite. A NaN may come
back with another payload.

[Note: masters] What a rule updates in fp32, ``optim.master``, is the exact weight; or, by ``kahan``, the sum
of the weight and what rounding took from it, rounded to the same dtype: twice its digits; or, by
``bf16-stochastic``, the weight itself, which an update rounds up or down, right on average. Which, is a hash
of the step and of the new fp32 value: no place, slice or number of ranks can change it. Elements with equal
new values are rounded alike in a step, and otherwise in the next. For ``kahan`` a new value is split, and the
sum is split again, which rounding may have left half a step from the weight: so equal sums have equal parts,
and a state that is loaded from sums is the one that was saved. An infinite weight has no compensation.

[Note: moments and fields] A rule has moments, fp32 values with a name. What is stored of one is its
:class:`Form`: one field or more, each with a value of some dtype for so many elements. Bytes, extents,
budgets, plans and copies follow from the fields; checkpoints and state dictionaries have the moments. Each
field of a chunk begins on a block of the drive, so that it can be moved from where it lies.

[Note: quantized moments] Blocks of 256 elements (128 of 4 bits) are counted from the first element of each
parameter, so the division into units, tiles and shards changes no number. Of a block the largest magnitude
is kept, and of each value a code for its share of it, on a scale that is finer near zero, as dynamic
quantization has it (8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861). Theirs is a table of
decimal exponents and linear fractions. Here it is integer arithmetic on the bits of float32, which are
nearly a logarithm: the code of a value is ``bits(code) = bits(most) - (bits(largest) - bits(value)) / 4``,
about the fourth root of its share, piecewise linear, of which the inverse is exact (4 is ``2**shift``: in 4
bits it is 2, and 1 without a sign). That needs neither table nor root, and is the same on every processor.
In 8 bits shares down to 4e-9 of the largest (2e-10 without a sign) are told apart, with a relative step of
about 4 / n, and a value that was stored is stored as the same code again. A second moment above 0 stays so,
since its root divides: what is far smaller than the rest of its block then moves too little, never too
much.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from infinity.core.config import SettingError
from infinity.core.nbytes import BLOCK_NBYTES, aligned

#: Elements of a block of quantized values, of which every parameter's first begins one.
BLOCK_NUMEL = 256
#: As bits of float32: the least scale of a block that is not all 0, infinity, and NaN.
_LEAST, _INFINITE, _NAN = 0x10000000, 0x7F800000, 0x7FC00000


class StateField(NamedTuple):
    """What is stored under a name: a value of a dtype for every ``per`` elements."""

    name: str
    dtype: torch.dtype
    per: int = 1

    def numel(self, elements: int) -> int:
        return -(-elements // self.per)

    def nbytes(self, elements: int) -> int:
        """Return the bytes of a shard's or chunk's values, in whole blocks."""
        return aligned(self.numel(elements) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Form:
    """How fp32 values are stored: each rounded to ``dtype``."""

    dtype: torch.dtype = torch.float32

    def fields(self, name: str) -> tuple[StateField, ...]:
        return (StateField(name, self.dtype),)

    def load(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        """Return the fp32 values, ``(numel,)``; a view where they are stored so."""
        return fields[0].float()

    def store(self, values: Tensor, fields: Sequence[Tensor]) -> None:
        fields[0].copy_(values)


@dataclass(frozen=True, slots=True)
class Quantized(Form):
    """A code of 8 or 4 bits for the share of the block's largest: see [Note: quantized moments].

    Codes go up with about the ``2**shift``-th root of the share. Two codes of 4 bits are in one byte, the
    first in its lower half.
    """

    signed: bool = True
    bits: int = 8
    shift: int = 2
    block: int = BLOCK_NUMEL

    @property
    def most(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - self.signed)) - 1

    @property
    def most_bits(self) -> int:
        """The bits of the largest code as a float32."""
        return int(torch.tensor(float(self.most), device="cpu").view(torch.int32))

    def fields(self, name: str) -> tuple[StateField, ...]:
        per = 8 // self.bits
        codes = StateField(name, torch.int8 if self.signed and per == 1 else torch.uint8, per)
        return codes, StateField(f"{name}_scale", torch.float32, self.block)

    def load(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        codes, scale = fields[0].to(torch.int32), fields[1].view(torch.int32)
        if self.bits == 4:
            codes = torch.stack([codes % 16, codes >> 4], 1).view(-1)[:numel]
            codes = torch.where(codes > self.most, codes - 16, codes)
        share = (codes.abs().float().view(torch.int32) - self.most_bits) << self.shift
        size = torch.where(codes != 0, share + scale.repeat_interleave(self.block)[:numel], 0)
        value = size.view(torch.float32)
        return torch.where(codes < 0, -value, value)

    def store(self, values: Tensor, fields: Sequence[Tensor]) -> None:
        numel, (codes, scale) = len(values), fields
        values = nn.functional.pad(values, (0, -numel % self.block))
        sizes = values.abs().view(torch.int32).view(-1, self.block)
        biggest = sizes.amax(1)
        largest = torch.where(biggest <= _INFINITE, biggest.clamp(_LEAST, _INFINITE - 1), _NAN)
        scale.copy_(torch.where(biggest > 0, largest, 0).view(torch.float32))
        base = (self.most_bits - (largest >> self.shift))[:, None]
        share = (torch.minimum(sizes, largest[:, None]) >> self.shift) + base
        whole = share.clamp(min=0).view(torch.float32).round().to(torch.int32).view(-1)
        sizes = sizes.view(-1)
        if self.signed:
            whole = torch.where(values < 0, -whole, whole)
        else:  # what is above 0 stays so
            whole = torch.where(sizes > 0, whole.clamp(min=1), 0)
        if self.bits == 4:
            low, high = (whole[: numel + numel % 2] % 16).view(-1, 2).unbind(1)
            codes.copy_(low + 16 * high)
        else:
            codes.copy_(whole[:numel])


class Moment(NamedTuple):
    """An fp32 value that a rule keeps of every element; zero before the first update."""

    name: str
    form: Form = Form()

    @property
    def fields(self) -> tuple[StateField, ...]:
        return self.form.fields(self.name)


#: Fields beside weights of each dtype, by ``optim.master``: see [Note: masters].
EXACT, KAHAN, STOCHASTIC = "exact", "kahan", "bf16-stochastic"
MASTERS: dict[str, dict[torch.dtype, tuple[StateField, ...]]] = {
    EXACT: {
        torch.bfloat16: (StateField("remainder", torch.int16),),
        torch.float16: (StateField("master", torch.float32),),
        torch.float32: (),
    },
    KAHAN: {dtype: (StateField("compensation", dtype),) for dtype in (torch.bfloat16, torch.float16)},
    STOCHASTIC: {torch.bfloat16: ()},
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """State that goes with weights of ``dtype``: its fields in the order of their bytes."""

    dtype: torch.dtype
    exact: tuple[StateField, ...]  # they make the weight exact
    moments: tuple[Moment, ...]  # the update rule keeps them
    stochastic: bool = False  # updates round weights so

    @classmethod
    def of(cls, dtype: torch.dtype, moments: Sequence[Moment] = (), master: str = EXACT) -> "StateLayout":
        """Return the layout for weights of ``dtype``; ValueError: there is none."""
        if dtype not in MASTERS[EXACT]:
            allowed = ", ".join(str(known) for known in MASTERS[EXACT])
            raise ValueError(f"no update rule for weights of {dtype}; allowed: {allowed}")
        if dtype not in MASTERS[master]:
            wanted = " or ".join(name for name, fields in MASTERS.items() if dtype in fields)
            raise SettingError("optim.master", master, f"{wanted} for weights of {dtype}")
        return cls(dtype, MASTERS[master][dtype], tuple(moments), master == STOCHASTIC)

    @property
    def master(self) -> str:
        """What keeps the digits of a master: a field's name, ``stochastic`` rounding, or ``weight``."""
        return self.exact[0].name if self.exact else "stochastic" if self.stochastic else "weight"

    @property
    def fields(self) -> tuple[StateField, ...]:
        return (*self.exact, *(field for moment in self.moments for field in moment.fields))

    @property
    def full_names(self) -> tuple[str, ...]:
        """Names of the fp32 values that a state stands for: the master weight, then each moment."""
        return "master", *(moment.name for moment in self.moments)

    @property
    def quantum(self) -> int:
        """Elements of which every field, and 16-bit weights, are whole blocks."""
        sizes = (BLOCK_NBYTES * field.per // field.dtype.itemsize for field in self.fields)
        return math.lcm(BLOCK_NBYTES // 2, *sizes)

    def only(self, *, exact: bool = False, moments: bool = False) -> "StateLayout":
        """Return the layout of a part of the state."""
        return replace(self, exact=self.exact if exact else (), moments=self.moments if moments else ())

    def _by_moment(self, state: Sequence[Tensor]) -> Iterator[tuple[Form, list[Tensor]]]:
        rest = iter(state[len(self.exact) :])
        return ((moment.form, [next(rest) for _ in moment.fields]) for moment in self.moments)

    def load_moments(self, state: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        """Return each moment as fp32, ``(n,)``; views where they are stored so."""
        return tuple(form.load(fields, numel) for form, fields in self._by_moment(state))

    def store_moments(self, state: Sequence[Tensor], values: Sequence[Tensor] | None) -> None:
        """Write each moment into the fields of a whole state; None: zeros."""
        if values is None:
            for field in state[len(self.exact) :]:
                field.zero_()
            return
        for (form, fields), each in zip(self._by_moment(state), values, strict=True):
            form.store(each, fields)

    def full_values(self, weight: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the fp32 master and each moment as fp32, ``(n,)``; views where they are stored so."""
        state = tuple(state)
        return master_of(self, weight, state), *self.load_moments(state, weight.numel())

    def complete(self, state: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        """Return a state with zeros for the last fields, which a state that was never trained lacks."""
        missing = self.fields[len(state) :]
        zeros = (torch.zeros(f.numel(numel), dtype=f.dtype, device="cpu") for f in missing)
        return *state, *zeros

    def select(self, state: Sequence[Tensor], other: "StateLayout") -> tuple[Tensor, ...]:
        """Return the fields of ``other``, by name, among those of a whole state."""
        if other == self:
            return tuple(state)
        named = {field.name: values for field, values in zip(self.fields, state, strict=True)}
        return tuple(named[field.name] for field in other.fields)

    def part(self, state: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the fields of elements ``[start, stop)``, which begin where every field has a new value."""
        return tuple(
            values[start // field.per : field.numel(stop)]
            for values, field in zip(state, self.fields, strict=False)  # the last ones may be missing
        )

    def weight_nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def state_nbytes(self, numel: int) -> int:
        return sum(field.nbytes(numel) for field in self.fields)

    def parts_nbytes(self, numel: int) -> tuple[int, int, int]:
        """Return the bytes of weights, of what makes them exact, and of moments, in the order of a chunk."""
        exact = sum(field.nbytes(numel) for field in self.exact)
        return self.weight_nbytes(numel), exact, self.state_nbytes(numel) - exact

    def nbytes(self, numel: int) -> int:
        """Return the bytes of weights and state of ``numel`` elements."""
        return sum(self.parts_nbytes(numel))

    @property
    def bytes_per_element(self) -> float:
        """Bytes of weight and state, as in whole blocks."""
        return self.nbytes(self.quantum) / self.quantum

    def views(self, buffer: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Return each field of ``numel`` elements in ``buffer``, uint8, ``(state_nbytes(numel),)``."""
        views, begin = list[Tensor](), 0
        for field in self.fields:
            values = buffer.narrow(0, begin, field.numel(numel) * field.dtype.itemsize)
            views.append(values.view(field.dtype))
            begin += field.nbytes(numel)
        return tuple(views)

    def chunk_views(self, buffer: Tensor, numel: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return views of weights and state of ``numel`` elements at the beginning of ``buffer``, uint8."""
        middle, end = self.weight_nbytes(numel), self.nbytes(numel)
        return buffer[:middle].view(self.dtype), self.views(buffer[middle:end], numel)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 master into bfloat16 weight and int16 remainder."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def compensated(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a float32 master into a weight of ``dtype`` and its compensation: see [Note: masters]."""
    for _ in range(2):
        weight = master.to(dtype)
        lost = torch.where(weight.isinf(), 0, master - weight.float()).to(dtype)
        master = weight.float() + lost.float()
    return weight, lost


def stochastic(master: Tensor, seed: Tensor) -> Tensor:
    """Return a float32 master as bfloat16, rounded by a hash of it and of the bits of ``seed``, float32."""
    bits = master.view(torch.int32)
    mixed = bits ^ (seed.view(torch.int32) * -0x61C88647)
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        mixed = (mixed ^ ((mixed >> shift) % 2 ** (32 - shift))) * factor
    up = torch.where(master.isnan(), _NAN, bits + (mixed ^ (mixed >> 16)) % 2**16)
    return ((up >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def master_of(layout: StateLayout, weight: Tensor, state: Sequence[Tensor]) -> Tensor:
    """Return the float32 master of ``weight``, ``(n,)``, which is a view where it is stored so."""
    match layout.master:
        case "remainder":
            return (weight.to(torch.float32).view(torch.int32) + state[0]).view(torch.float32)
        case "compensation":
            return weight.float() + state[0].float()
        case "master":
            return state[0]
    return weight.float()


def store_master(
    layout: StateLayout, master: Tensor, weight: Tensor, state: Sequence[Tensor],
    seed: Tensor | None = None,
) -> None:  # fmt: skip
    """Write exact values into ``weight`` and the fields of ``state`` that keep them, all ``(n,)``.

    ``master`` is float32, or bfloat16 where that is the compute dtype. ``seed`` is that of an update: see
    [Note: masters]; without one weights are rounded to nearest.
    """
    if layout.master == "remainder" and master.dtype == torch.bfloat16:
        weight.copy_(master)
        state[0].zero_()
        return
    parts: tuple[Tensor, ...] = (master,)
    match layout.master:
        case "remainder":
            parts = split(master)
        case "compensation":
            parts = compensated(master.float(), layout.dtype)
        case "master":
            parts = master, master
        case "stochastic" if seed is not None:
            parts = (stochastic(master, seed),)
    for target, values in zip((weight, *state), parts, strict=False):  # moments are behind
        target.copy_(values)
