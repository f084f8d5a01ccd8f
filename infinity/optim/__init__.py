"""Update rules, CPU loops, gradient norm, loss scale; and ``infinity.optim``, the optimizers of each rule.

Those are of :mod:`infinity.api`, which this room does not know: a name is looked up when it is used.
"""

from importlib import import_module
from typing import Any

from infinity.optim import rules as rules  # defines each of them
from infinity.optim.formula import root, sign, where
from infinity.optim.matrix import MatrixRule
from infinity.optim.rule import RULES, Rule
from infinity.optim.state import Form, Moment, Quantized

_RULES = {type(rule).__name__.removesuffix("Rule"): rule for rule in RULES.values()}

__all__ = [
    "Form", "MatrixRule", "Moment", "Optimizer", "Quantized", "Rule", "root", "sign", "where",
    *sorted(_RULES),
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    optimizers = import_module("infinity.api.optimizer")
    made = getattr(optimizers, name, None) or optimizers.optimizer_of(_RULES[name])
    return globals().setdefault(name, made)
