"""The dictionary in place of a module's ``_parameters``.

A module that reads ``self.weight`` asks its ``_parameters`` by key. Asking for a parameter
that was released, outside its own module's forward (a parent's forward, a tied weight, a
model's own ``_init_weights``), serves it: the touch gathers the unit and is written into the
trace. Iterating (``named_parameters``, ``state_dict``, an optimizer) touches nothing.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from infinity.core.errors import StateError

Touch = Callable[[nn.Parameter], None]
DeepCopy = Callable[[nn.Parameter], nn.Parameter]


class ServedParameters(dict[str, nn.Parameter | None]):
    """``module._parameters`` that serves parameters when they are touched by key.

    Args:
        values: The dictionary that it replaces.
        touch: Called with each parameter that is asked for by key.
        deep_copy: Makes the plain copy of a parameter for ``copy.deepcopy``, or raises.
    """

    def __init__(self, values: dict[str, Any], touch: Touch, deep_copy: DeepCopy) -> None:
        super().__init__(values)
        self.touch = touch
        self.deep_copy = deep_copy

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self.touch(param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        copied: dict[str, nn.Parameter | None] = {}
        for name, param in self.items():
            if param is not None and id(param) not in memo:
                memo[id(param)] = self.deep_copy(param)
            copied[name] = None if param is None else memo[id(param)]
        return copied

    def __copy__(self) -> "ServedParameters":
        return ServedParameters(dict(self.items()), self.touch, self.deep_copy)

    def __reduce__(self) -> tuple[Any, ...]:
        raise StateError(
            "pickling a model whose parameters are sharded (torch.save(model), multiprocessing). Save "
            "model.state_dict() with torch.save, or call model.save_pretrained()"
        )


def install_parameter_dict(module: nn.Module, touch: Touch, deep_copy: DeepCopy) -> None:
    """Put a :class:`ServedParameters` in place of ``module._parameters``."""
    if not isinstance(module._parameters, ServedParameters):
        module.__dict__["_parameters"] = ServedParameters(module._parameters, touch, deep_copy)
