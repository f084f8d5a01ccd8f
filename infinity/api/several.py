"""Several adapters on one base: which of them is used, whose a parameter is, and their random generators.

[Note: as if alone]
A model with several adapters is its base, and inside ``with infinity.adapter(model, name)`` the base with
that adapter alone. Only its parameters get gradients there. Each adapter has its own parameter groups, so
gradients are clipped by its own norm, and an adapter whose gradient is not finite is skipped without the
others. Its random generators go on where its last block left them. So each is trained to the bit as if it
were alone.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from infinity.activations.recompute import Choice
from infinity.core.config import shown
from infinity.core.errors import StateError
from infinity.device.accelerator import generator_states, set_generator_states
from infinity.engine.runtime import Runtime, runtime_of

#: What peft calls an adapter without a name.
DEFAULT = "default"


class Adapters:
    """The adapters of one model, of which one at a time is used: see [Note: as if alone]."""

    def __init__(self, runtime: Runtime) -> None:
        self._device = runtime.ranks.device
        self.choice = Choice()
        #: The states of the random generators, by name of the adapter.
        self.generators: dict[str, dict[str, Any]] = {}

    def add(self, name: str, model: nn.Module) -> None:
        """Take note of a new adapter, drawn just now; from the second one on the base is used without any."""
        self.generators[name] = generator_states(self._device)
        if len(self.generators) > 1:
            self.choice = Choice()
            follow(model, self.choice)
            model.__dict__.update(set_adapter=_refused, disable_adapter=_refused)  # they freeze others

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        if names := self.choice.names:
            raise StateError(f"adapter {name!r} inside a block of adapter {names[0]!r}: end that block first")
        before = generator_states(self._device)
        set_generator_states(self.generators[name], self._device)
        try:
            with self.choice.made(name):
                yield
        finally:
            self.generators[name] = generator_states(self._device)
            set_generator_states(before, self._device)


def _refused(*args: Any, **kwargs: Any) -> None:
    raise StateError(
        "set_adapter or disable_adapter of a model with several adapters: run what one of them does inside "
        "`with infinity.adapter(model, name)`; outside the model is its base"
    )


_adapters: weakref.WeakKeyDictionary[Runtime, Adapters] = weakref.WeakKeyDictionary()


def adapters_of(model: nn.Module) -> Adapters:
    """Return what is known of a model's adapters; it has no names if there are none."""
    runtime = runtime_of(model)
    if runtime not in _adapters:
        _adapters[runtime] = Adapters(runtime)
    return _adapters[runtime]


def check_adapter(model: nn.Module, name: str) -> None:
    """Raise a StateError unless the model has an adapter called ``name``."""
    names = adapters_of(model).generators
    if not isinstance(name, str) or name not in names:
        known = ", ".join(map(repr, names)) or "none: call infinity.add_lora first"
        raise StateError(f"the model has no adapter {shown(name)}; it has {known}")


@contextmanager
def adapter(model: nn.Module, name: str) -> Iterator[None]:
    """Context manager in which one of a model's several adapters is used, and trained.

    Run both forward and backward inside::

        for name, batch in batches:
            with infinity.adapter(model, name), infinity.no_sync(model) if more else nullcontext():
                model(**batch).loss.backward()
        optimizer.step()  # each adapter is clipped by its own norm

    Several backward passes before ``step`` are micro-batches, so all but the last go under
    ``infinity.no_sync``. Outside the block a model with several adapters is its base. Every rank must use the
    same ones in the same order.

    Raises:
        StateError: The model has no such adapter, or the block is inside another one.
    """
    check_adapter(model, name)
    adapters = adapters_of(model)
    with adapters.used(name) if len(adapters.generators) > 1 else nullcontext():
        yield


def follow(model: nn.Module, choice: Choice) -> None:
    """Let peft's modules use the adapters that ``choice`` names."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in layers_of(model):
        names = choice.names
        if isinstance(module, TrainableTokensLayer):  # which takes it that it has all of them
            names = choice.among(module.token_indices)
        module.__dict__["_active_adapter"] = names


def layers_of(model: nn.Module) -> list[Any]:
    """Return peft's modules that hold adapters, by their names, in containers ``adapter_layer_names``."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    return [module for module in model.modules() if isinstance(module, kinds)]


def parameters_by_adapter(model: nn.Module) -> Mapping[str, list[nn.Parameter]]:
    """Return the parameters of each adapter, in the order of the model's."""
    found: dict[int, str] = {}
    for module in layers_of(model):
        for each in module.adapter_layer_names:
            held: Any = getattr(module, each, None)
            if held is None:
                continue
            # Not read: values may be those of a run that has not gone on yet.
            for name, part in (held._parameters | held._modules).items():
                params = part.parameters() if isinstance(part, nn.Module) else [part]
                found |= {id(param): name for param in params}
    by_name: dict[str, list[nn.Parameter]] = {}
    for param in model.parameters():
        if id(param) in found:
            by_name.setdefault(found[id(param)], []).append(param)
    return by_name
