"""How a config says what it accepts, and the budgets of memory.

A config is a frozen dataclass beside its owner. Each field is made with :func:`setting`, which
keeps its meaning and its valid values with it, so that one :func:`check` serves all of them
and ``infinity recipe`` can print them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from infinity.core.errors import RecipeError


class SettingError(RecipeError):
    """A field of a config has a value that it does not accept.

    Attributes:
        key: Name of the field.
        got: Its value.
        wanted: What it accepts, for people.
    """

    def __init__(self, key: str, got: object, wanted: str) -> None:
        self.key, self.got, self.wanted = key, got, wanted
        super().__init__(f"{key}: got {got!r}; wanted {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Which values a field accepts: bounds of a number, or a list of choices."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Sequence[object] = ()

    def accepts(self, value: Any) -> bool:
        """Whether ``value``, which already has the field's type, is inside; NaN never is."""
        if self.choices:
            return value in self.choices
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return " | ".join(str(choice) for choice in self.choices)
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def setting(
    default: Any, help: str, *, valid: Valid | None = None, nbytes: bool = False, many: bool = False
) -> Any:
    """A field of a config.

    Args:
        default: Its value where the recipe says nothing; None stands for "derived" or "off".
        help: What it means, one line.
        valid: What it accepts; also of each item, where the field is a tuple.
        nbytes: A size in bytes, written ``8GiB`` in a recipe.
        many: A tuple of any length, which a recipe may write as its only item.
    """
    metadata = {"help": help, "valid": valid or Valid(), "nbytes": nbytes, "many": many}
    return field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Compare every field of ``config`` with what it accepts; for ``__post_init__``.

    Raises:
        SettingError: The first field that is outside.
    """
    for each in fields(config):
        valid: Valid = each.metadata["valid"]
        value = getattr(config, each.name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and not valid.accepts(item):
                raise SettingError(each.name, value, str(valid) or "a finite number")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Budgets of one rank. Every buffer's size and number is derived from them and the model."""

    device: int | None = setting(
        None,
        "bytes of accelerator memory per rank, for model states and activations; null: what is free",
        valid=Valid(least=1),
        nbytes=True,
    )
    host: int | None = setting(
        None,
        "bytes of host memory per rank for model states and staging; null: from what is free",
        valid=Valid(least=1),
        nbytes=True,
    )
    nvme: tuple[str, ...] = setting(
        (), "directories for states that host memory cannot hold; none: memory only", many=True
    )
    versions: Literal[1, 2] = setting(
        2,
        "places per unit on disk; 2: a crash leaves the last step whole; 1: half the disk",
        valid=Valid(choices=(1, 2)),
    )
    resident: bool = setting(
        True, "keep in host memory what fits there; false: every state streams, host memory only stages"
    )
    engine: Literal["auto", "libaio", "threads", "gds"] = setting(
        "auto",
        "how bytes reach the disk; auto picks the fastest that works here",
        valid=Valid(choices=("auto", "libaio", "threads", "gds")),
    )
    activations: Literal["keep", "offload", "recompute", "plan"] | None = setting(
        None,
        "what waits for backward stays, is stored, is computed again, or what a plan says that keeps "
        "memory.device; null: plan if memory.device is given, else keep",
        valid=Valid(choices=("keep", "offload", "recompute", "plan")),
    )

    def __post_init__(self) -> None:
        check(self)
        if any(not path for path in self.nvme) or len(set(self.nvme)) < len(self.nvme):
            raise SettingError("nvme", self.nvme, "different, non-empty directories")
