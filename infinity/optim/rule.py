"""The update rule: an optimizer's moments, numbers and arithmetic, from which everything else follows.

[Note: forms of a rule] :meth:`Rule.update` is called with tensors where torch runs it; traced as a
:class:`infinity.optim.formula.Formula` it is compiled for one element, by numba on the CPU and by CUDA. All
have the same operations in the same order, each of which every implementation rounds correctly (``+ - * /``
and the square root; no multiply-add is fused). So all give the same bits, whole or in slices, on any number
of threads, in place or not. CUDA has a kernel because the host would take longer to launch thirty operators
than the accelerator to run them.

[Note: averages] An exponential moving average of the weights is one more moment of any rule. What is kept is
the average minus the weight: zero for a parameter that was never updated, so that both are equal. As in
``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``, the average of a parameter begins with
the weight after its first update.
"""

import math
import numbers
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infinity.core.config import SettingError, Valid
from infinity.core.errors import did_you_mean
from infinity.optim.formula import Formula, elementwise_kernel
from infinity.optim.state import EXACT, STOCHASTIC, Moment, StateLayout, master_of, store_master

#: Elements that the torch form takes at one time, and its float32 temporaries of that size.
PIECE_NUMEL, TEMPORARIES = 2**18, 8
#: The moment that is an average minus the weight, and the number of a group that is its decay.
OFFSET, EMA = "ema_offset", "ema"
#: Every update rule, by the name that commit records give it. Rules keep nothing between updates.
RULES: "dict[str, Rule]" = {}
#: The numbers of a parameter group; and what a rule keeps of a whole matrix, by name: fp32, on the CPU.
Group = Mapping[str, Any]
Sums = Mapping[str, Tensor]


class Place(NamedTuple):
    """A matrix in a flat buffer: its first element there, and what is made of it as a whole."""

    start: int
    rows: int
    columns: int
    transform: Callable[[Tensor], Tensor]
    sums: Sums = MappingProxyType({})  # that its transform changes; empty where another rank has them
    owner: int | None = None  # the rank that has them; None: any may transform it

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def work(self) -> int:
        """Multiplications of a transform, but for a factor."""
        return self.rows * self.columns * min(self.rows, self.columns)

    def within(self, low: int, high: int) -> int:
        """Return how many of its elements are in ``[low, high)``."""
        return max(0, min(high, self.stop) - max(low, self.start))


#: Of a matrix of a parameter or tile, by its number: that of this update, what is kept of it, and its owner.
Kept = Callable[[int], tuple[int, Sums, int | None]]


class Way(NamedTuple):
    """How a parameter is updated: in one pass, or in two around a transform of its matrices."""

    last: "Rule"
    numbers: Mapping[str, Any] = MappingProxyType({})  # that the last pass takes beside the group's
    first: "Rule | None" = None
    matrices: Sequence[Place] = ()
    sums: Mapping[str, Sequence[int]] = MappingProxyType({})  # shapes of what is kept of these, by name

    def goes_on_from(self, names: Container[str]) -> bool:
        """Return whether moments of these names are all that it needs.

        The average of ``ema`` begins with the weight at any step; one that is the rule's own does not.
        """
        moments = (*(self.first.moments if self.first is not None else ()), *self.last.moments)
        beside = {OFFSET} if EMA in self.last.defaults else set()
        needed = [moment.name for moment in moments if moment.name not in beside]
        return not self.sums and all(name in names for name in needed)


class Rule(ABC):
    """Arithmetic of one optimizer, element by element, on the fp32 master of a weight.

    A subclass with a ``name`` is a rule that recipes and resumed runs know by it.
    """

    name: str  # in commit records, so that a run goes on with the rule that it began with
    moments: tuple[Moment, ...]  # beside the exact weight: one or more
    #: Numbers of a parameter group and their defaults, in the order of an optimizer's arguments.
    defaults: Mapping[str, Any] = MappingProxyType({"lr": 1e-3})
    #: Those that are others in a recipe that does not name them.
    recipe: Mapping[str, Any] = MappingProxyType({})
    master: str = EXACT  # see [Note: masters] of infinity.optim.state
    in_one_pass = True  # an update of a shard's elements needs no others; False: see infinity.optim.matrix
    in_turn = False  # its transforms run at step(), since what they keep of matrices is small state of a step
    of_gradients = False  # its weights are gradients, whose place it takes
    scheduled = True  # its learning rate follows a schedule
    #: Numbers, whole ones above 0, from which shapes of :meth:`sums` follow: all groups have the rule's own.
    sizes: Sequence[str] = ()
    ranges: Mapping[str, Valid] = MappingProxyType({})  # of numbers that may not be any from 0 on

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            known = type(RULES[cls.name]) if cls.name in RULES else cls
            if _identity(cls) != _identity(known):
                raise SettingError(
                    f"{cls.__qualname__}.name", cls.name,
                    f"another name: it is that of {known.__module__}.{known.__qualname__}",
                )  # fmt: skip
            RULES[cls.name] = cls()

    @abstractmethod
    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        """Return the numbers :meth:`update` takes from a parameter group, in float64; steps count from 1."""

    @staticmethod
    @abstractmethod
    def update(weight: Any, grad: Any, *moments_and_numbers: Any) -> tuple[Any, ...]:
        """Return the new weight and the new moments; the arguments do not change.

        Weight (the exact one), gradient (clipped, and without a loss scale) and moments are float32 of equal
        shape, and each number is one of float32. Use only ``+ - * /`` and what
        :mod:`infinity.optim.formula` has: see [Note: forms of a rule]. That is compiled; where it does
        something else, torch runs what is written, which takes longer on the CPU.
        """

    @cached_property
    def formula(self) -> Formula | None:
        """What :meth:`update` computes of one element; None: torch runs it."""
        count = 2 + len(self.moments) + len(self.numbers(self.idle, 1))
        return Formula.of(self.update, count)

    @property
    def elementwise(self) -> "tuple[Rule, ...]":
        """The rules that update elements; the first is the one by which rates of updates are measured."""
        return (self,)

    def like(self, **changes: Any) -> "Rule":
        """Return a rule like this one, with other attributes."""
        kind, other = type(self), copy(self)
        kept = {k: v for k, v in vars(self).items() if type(getattr(kind, k, None)) is not cached_property}
        vars(other).clear()
        vars(other).update(kept, **changes)
        return other

    def with_master(self, master: str) -> "Rule":
        """Return the rule like this one for ``optim.master``; a SettingError says that there is none."""
        if master == STOCHASTIC and self.averages:
            wanted = "exact or kahan beside an average, whose distance cannot follow the rounding of weights"
            raise SettingError("optim.master", master, wanted)
        plain = self.name.removesuffix(f"+{self.master}")
        return self.like(name=plain if master == EXACT else f"{plain}+{master}", master=master)

    def sized(self, numbers: Mapping[str, Any]) -> "Rule":
        """Return the rule like this one whose sums have the sizes that ``numbers`` name, as its name says."""
        given, whole = {**self.defaults, **numbers}, Valid(least=1)
        sizes = {n: int(given[n]) for n in self.sizes if is_number(given[n], whole) and given[n] % 1 == 0}
        changed = {n: value for n, value in sizes.items() if value != self.defaults[n]}
        if not changed:
            return self
        plain, *variants = (v for v in self.name.split("+") if v.partition("=")[0] not in changed)
        name = "+".join([plain, *(f"{n}={v}" for n, v in changed.items()), *variants])
        return self.like(name=name, defaults={**self.defaults, **changed})

    def kept(self, group: Group, shape: Sequence[int]) -> list[str]:
        """Return the names of the moments that it keeps of a parameter of a group."""
        return [moment.name for moment in self.moments]

    @property
    def averages(self) -> bool:
        """Whether it keeps an average of the weights."""
        return any(moment.name == OFFSET for moment in self.moments)

    @cached_property
    def averaged(self) -> "Rule":
        """This rule with an exponential moving average of the weights: see [Note: averages]."""
        return Averaged(self)

    @cached_property
    def idle(self) -> Mapping[str, Any]:
        """A parameter group whose update changes no weight: for measuring, and to compile ahead."""
        return {**self.defaults, "lr": 0.0, "weight_decay": 0.0}

    def check_numbers(self, group: Group) -> None:
        """Raise a SettingError that names a number of a parameter group that is impossible."""
        positive, beta = Valid(least=0, below=math.inf), Valid(least=0, below=1)
        for name, default in self.defaults.items():
            value: Any = group.get(name)  # a caller may have taken it out
            if isinstance(default, tuple):
                several = value if isinstance(value, tuple | list) else ()
                if [is_number(each, beta) for each in several] != [True] * len(default):
                    raise SettingError(name, value, f"{len(default)} numbers {beta}".replace("2", "two"))
            elif isinstance(default, bool):
                if value not in (False, True):
                    raise SettingError(name, value, "true or false")
            else:
                valid = self.ranges.get(name, beta if name == EMA else positive)
                whole = isinstance(default, int)
                if not is_number(value, valid) or (whole and value % 1):
                    raise SettingError(name, value, f"a {'whole ' * whole}number {valid}")
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise SettingError(name, group[name], f"False: infinity's {self.name} is plain")

    def check_names(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``given``; a SettingError names a number that the rule does not have, and the nearest."""
        for name in (each for each in given if each not in self.defaults):
            wanted = f"a number of {self.name}: {', '.join(self.defaults)}"
            raise SettingError(name, given[name], wanted + did_you_mean(name, self.defaults))
        return given

    def check_place(self, group: Group, name: str, shape: Sequence[int], *, tiled: bool) -> None:
        """Raise a SettingError if a parameter of a group is not as the rule needs it."""
        return

    def numbers_of(self, model: nn.Module) -> Callable[[str, nn.Parameter], Mapping[str, Any]]:
        """Return a function of a parameter's name and the parameter: what it has instead of defaults."""
        return lambda name, param: {}

    def sums(self, shape: Sequence[int], group: Group | None = None) -> Mapping[str, Sequence[int]]:
        """Return the shapes of what it keeps of a parameter's matrices, rather than of elements, by name.

        ``group`` is the parameter's; None: its defaults.
        """
        return {}

    def way(self, group: Group, start: int, shape: Sequence[int], kept: Kept | None = None) -> Way:
        """Return how a parameter is updated that begins at ``start`` of a flat buffer."""
        return Way(self)

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        """Return a jitted loop over weights of ``dtype`` on the CPU; None: torch does it."""
        from infinity.optim import kernels  # late: numba takes 0.3 s to import

        return None if self.formula is None else kernels.update_loop(self.formula, self.layout(dtype))

    def layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the state that goes with weights of ``dtype``; ValueError: there is none."""
        return StateLayout.of(dtype, self.moments, self.master)

    def hyper(self, group: Group, *, step: int = 1, grad_scale: float = 1.0) -> Tensor:
        """Return :meth:`numbers`, the scale and a seed, rounded once: float32, ``(n,)``, in host memory.

        The gradient is multiplied by ``grad_scale`` first: clip coefficient over loss scale. The seed of
        stochastic rounding is the step.
        """
        numbers = (*self.numbers(group, step), grad_scale, float(step))
        return torch.tensor(numbers, dtype=torch.float32, device="cpu")

    def update_by_torch(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update by elementwise torch on any device, ``piece_numel`` elements at a time."""
        layout, (*numbers, scale, seed) = self.layout(weight.dtype), hyper.unbind()
        for begin in range(0, weight.numel(), piece_numel):
            part = slice(begin, min(begin + piece_numel, weight.numel()))
            fields = layout.part(state, part.start, part.stop)
            master = master_of(layout, weight[part], fields)
            scaled, moments = grad[part].to(torch.float32) * scale, layout.load_moments(fields, len(master))
            master, *new = self.update(master, scaled, *moments, *numbers)
            store_master(layout, master, weight_out[part], fields, seed)
            layout.store_moments(fields, new)

    @torch.no_grad()
    def update_on_device(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update tensors on an accelerator in place, on the current stream; ``hyper`` is in host memory."""
        layout = self.layout(weight.dtype)
        kernel = elementwise_kernel(self.formula, layout, grad.dtype, weight.device)
        if kernel is not None:
            kernel(weight, grad, state, hyper)
            return
        # By kernels that fill it: a copy from host memory would wait for the stream.
        there = torch.empty(len(hyper), device=weight.device)
        for place, number in zip(there.unbind(), hyper.tolist(), strict=True):
            place.fill_(number)
        self.update_by_torch(weight, grad, state, weight, there, piece_numel=piece_numel)


def is_number(value: Any, valid: Valid) -> bool:
    """Return whether ``value`` is a number in a range (no bool, no text), or a tensor of one such element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return type(value) is not bool and isinstance(value, numbers.Real) and valid.accepts(value)


def _identity(rule: type[Rule]) -> tuple[str, str]:
    """Return what a class keeps if it is made again: in a notebook, or of a script that is imported, too."""
    return getattr(sys.modules.get(rule.__module__), "__file__", None) or rule.__module__, rule.__qualname__


class Averaged(Rule):
    """Another rule, and an exponential moving average of the weights: see [Note: averages]."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self.name, self.master = rule, f"{rule.name}+{EMA}", rule.master
        self.moments = (*rule.moments, Moment(OFFSET))
        self.defaults, self.recipe = {**rule.defaults, EMA: 0.999}, rule.recipe

    def numbers(self, group: Group, step: int) -> tuple[float, ...]:
        toward = 1.0 if step == 1 else 1 - float(group[EMA])
        return *self._rule.numbers(group, step), toward

    def update(self, weight: Any, grad: Any, *moments_and_numbers: Any) -> tuple[Any, ...]:  # type: ignore[override]
        *rest, toward = moments_and_numbers
        offset = rest.pop(len(self._rule.moments))
        after, *moments = self._rule.update(weight, grad, *rest)
        offset = offset + (weight - after)
        return after, *moments, offset - toward * offset
