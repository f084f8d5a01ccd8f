"""An update rule: the arithmetic of one optimizer, and the layout of the state that it keeps.

Nothing outside a rule knows how many moments it has, of what dtype, or what they are called. A second
optimizer is a subclass in a file of its own and a row in :data:`infinity.optim.rules.RULES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.optim.layout import StateField, StateLayout, exact_fields, master_of, store_master

#: Elements that the torch form takes at one time: bounds its temporaries.
PIECE_NUMEL = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The numbers of one update of one parameter group; a rule's subclass adds its own.

    Attributes:
        step: Of this update, from 1.
        grad_scale: The gradient is multiplied by this first: clip coefficient over loss scale.
    """

    lr: float
    step: int = 1
    grad_scale: float = 1.0

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the rule reads, computed in float64."""
        raise NotImplementedError

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the numbers that the rule reads, rounded once: float32, ``(n,)``."""
        return torch.tensor(self.numbers(), dtype=torch.float32, device=device)


class UpdateRule(ABC):
    """The arithmetic of one optimizer, element by element.

    Attributes:
        name: In commit records, so that a run goes on with the rule that it began with.
        moments: The state that it keeps beside the exact weight: one field or more, of 2 bytes or more each.
    """

    name: str
    moments: tuple[StateField, ...]

    def layout(self, dtype: torch.dtype) -> StateLayout:
        """Return the state that goes with weights of ``dtype``.

        Raises:
            ValueError: Not bfloat16, float16 or float32.
        """
        return StateLayout(dtype, exact_fields(dtype), self.moments)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Read the numbers of a parameter group."""

    @abstractmethod
    def step(
        self, master: Tensor, grad: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new master and the new moments of ``n`` elements, by elementwise torch.

        Only ``+ - * /`` and :func:`root` are rounded alike everywhere: see [Note: two forms of a rule] in
        :mod:`infinity.optim.rules`.

        Args:
            master: float32, ``(n,)``; stays as it is, as do the moments.
            grad: float32, ``(n,)``, not scaled.
            numbers: Those of :meth:`Hyper.tensor`, each without dimensions.
        """

    def loop(self, dtype: torch.dtype) -> Callable[..., object] | None:
        """Return a jitted loop that does the same on the CPU; None: torch does it."""
        return None

    def update_by_kernel(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor
    ) -> bool:
        """Start the same in place on an accelerator by one kernel; False: there is none, nothing was done."""
        return False

    def update_by_torch(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update by elementwise torch on any device; see :meth:`infinity.optim.rules.HostRule.update`.

        Args:
            piece_numel: Elements that are updated at one time.
        """
        layout, numbers = self.layout(weight.dtype), hyper.unbind()
        for begin in range(0, weight.numel(), piece_numel):
            part = slice(begin, begin + piece_numel)
            fields = tuple(field[part] for field in state)
            moments = layout.moments_of(fields)
            master = master_of(layout, weight[part], fields, eager=True)
            master, *new = self.step(master, grad[part].to(torch.float32), moments, numbers)
            store_master(layout, master, weight_out[part], fields, eager=True)
            for moment, value in zip(moments, new, strict=True):
                moment.copy_(value)

    @torch.no_grad()
    def update_on_device(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], hyper: Tensor,
        *, piece_numel: int = PIECE_NUMEL,
    ) -> None:  # fmt: skip
        """Update tensors in an accelerator's memory in their places, by the calling thread's stream.

        Args:
            hyper: ``Hyper.tensor()``, in host memory.
            piece_numel: Elements that are updated at one time, where elementwise torch does it.
        """
        if not self.update_by_kernel(weight, grad, state, hyper):
            there = _there(hyper, weight.device)
            self.update_by_torch(weight, grad, state, weight, there, piece_numel=piece_numel)


def _there(hyper: Tensor, device: torch.device) -> Tensor:
    """``hyper`` on an accelerator. A copy from host memory would wait for the stream, kernels do not."""
    there = torch.empty(len(hyper), device=device)
    for place, number in zip(there.unbind(), hyper.tolist(), strict=True):
        place.fill_(number)
    return there
