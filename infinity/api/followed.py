"""The small state of a commit: what belongs to a step beside its shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler

from infinity.core.errors import StateError, library_errors
from infinity.device.generators import generator_states, set_generator_states

#: Of buffers up to this size a first copy is kept (bytes).
_SMALL_NBYTES = 2**20


class Followed:
    """Random generators, buffers, and what an optimizer was asked to follow.

    Learning-rate schedulers are stepped after the optimizer, so their state is taken late: when the next
    forward pass begins.

    Args:
        model: Its buffers that are written while it trains (running means) belong to the state.
        device: Where the model computes.
        follow: By name.
    """

    def __init__(self, model: nn.Module, device: torch.device, follow: Mapping[str, Stateful]) -> None:
        self._model, self._device = model, device
        self._now: dict[str, Stateful] = {}
        self._late: dict[str, Stateful] = {}
        self._unwritten = {name: _Buffer(each) for name, each in self._buffers().items()}
        self.add(follow)

    def add(self, follow: Mapping[str, Stateful]) -> None:
        """Follow more objects.

        Raises:
            StateError: A name is taken.
            TypeError: An object has no state.
        """
        for name, each in follow.items():
            if not isinstance(each, Stateful):
                raise TypeError(
                    f"follow[{name!r}]: wanted an object with state_dict() and load_state_dict(); got "
                    f"{type(each).__name__}"
                )
            if name in self._now or name in self._late:
                raise StateError(f"follow[{name!r}] is followed already: give this object another name")
            (self._late if _is_scheduler(each) else self._now)[name] = each

    @property
    def is_late(self) -> bool:
        """Whether something is stepped after the optimizer."""
        return bool(self._late)

    def state(self) -> dict[str, Any]:
        """Return what belongs to the step, without the schedulers."""
        written = {}
        for name, each in self._buffers().items():
            if name not in self._unwritten or self._unwritten[name].written(each):
                self._unwritten.pop(name, None)
                written[name] = each.detach().to("cpu", copy=True)
        follow = {name: each.state_dict() for name, each in self._now.items()}
        return {"generators": generator_states(self._device), "buffers": written, "follow": follow}

    def late_state(self) -> dict[str, Any]:
        """Return the states of the schedulers."""
        return {"late": {name: each.state_dict() for name, each in self._late.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` and :meth:`late_state` returned.

        Raises:
            StateError: Something else was followed, or a buffer has another shape.
        """
        saved, followed = {**state["follow"], **state.get("late", {})}, {**self._now, **self._late}
        if saved.keys() != followed.keys():
            raise StateError(
                f"the interrupted run committed the states of {_names(saved)}; this one follows "
                f"{_names(followed)}: give AdamW the same names in follow={{...}}"
            )
        for name, each in followed.items():
            with library_errors(StateError, f"the committed state of follow[{name!r}] cannot be loaded"):
                each.load_state_dict(saved[name])
        buffers = self._buffers()
        for name, values in state["buffers"].items():
            if name not in buffers or buffers[name].shape != values.shape:
                raise StateError(
                    f"the interrupted run has a buffer {name} of shape {tuple(values.shape)}, "
                    "which this model has not: build it as before"
                )
            buffers[name].copy_(values)
        set_generator_states(state["generators"], self._device)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._model.named_buffers())


class _Buffer:
    """A buffer as it was first.

    Batch norm writes its running means without torch counting it, so small buffers are compared, too.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._mark = id(buffer), buffer._version
        self._copy = buffer.detach().clone() if buffer.nbytes <= _SMALL_NBYTES else None

    def written(self, buffer: Tensor) -> bool:
        if self._mark != (id(buffer), buffer._version):
            return True
        return self._copy is not None and not torch.equal(buffer, self._copy)


def _is_scheduler(each: Stateful) -> bool:
    """Whether it sets learning rates; Accelerate wraps one."""
    return isinstance(getattr(each, "scheduler", each), LRScheduler)


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"
