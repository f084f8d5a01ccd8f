"""Update rules, CPU loops, gradient norm, loss scale; and ``infinity.optim``, the optimizers of each rule.

Those are of :mod:`infinity.api`, which this room does not know: a name is looked up when it is used.
"""

from importlib import import_module
from typing import Any

#: Public names of this room, by module; the others are optimizers, by the class of their rule.
_HOMES = {
    "Form": "state", "MatrixRule": "matrix", "Moment": "state", "Quantized": "state", "Rule": "rule",
    "root": "formula", "sign": "formula", "where": "formula",
}  # fmt: skip
_OPTIMIZERS = {
    "Adafactor": "adafactor", "Adam": "adam", "AdamW4bit": "adamw4bit", "AdamW8bit": "adamw8bit",
    "Lion": "lion", "Muon": "muon", "SGD": "sgd", "ScheduleFree": "schedulefree",
}  # fmt: skip

__all__ = ["AdamW", "Optimizer", *sorted(_OPTIMIZERS), *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        optimizers = import_module("infinity.api.optimizer")
        rule = _OPTIMIZERS.get(name)
        value = getattr(optimizers, name) if rule is None else optimizers.optimizer_of(find(rule))
    globals()[name] = value
    return value


def find(name: str) -> Any:
    return import_module(f"{__name__}.rules").find_rule(name)
