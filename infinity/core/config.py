"""Fields of configuration classes with their meaning and valid values; the memory budgets.

A config is a frozen dataclass beside the part that it configures. :func:`setting` makes a field and stores
its meaning and valid values in the field's metadata, which :func:`check` enforces and ``infinity recipe``
prints.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from infinity.core.errors import RecipeError


class SettingError(RecipeError):
    """A field of a config has an invalid value.

    Attributes:
        key: Name of the field.
        got: Its value.
        wanted: Description of the valid values.
    """

    def __init__(self, key: str, got: object, wanted: str) -> None:
        self.key, self.got, self.wanted = key, got, wanted
        super().__init__(f"{key}: got {got!r}; wanted {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Valid values of a field: bounds of a number, or a list of choices."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Sequence[object] = ()

    def accepts(self, value: Any) -> bool:
        """Return True if ``value``, which has the field's type, is valid; NaN and infinity never are."""
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


def setting(default: Any, help: str, *, valid: Valid | None = None, nbytes: bool = False) -> Any:
    """Make a field of a config.

    Args:
        default: The default value; None usually means "derived" or "off".
        help: The meaning, in one line.
        valid: Valid values; for a tuple, of each item.
        nbytes: The value is a size in bytes, written ``8GiB`` in a recipe.
    """
    metadata = {"help": help, "valid": valid or Valid(), "nbytes": nbytes}
    return field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Validate every field of ``config``; called in ``__post_init__``.

    Raises:
        SettingError: A field has an invalid value; names the first such field.
    """
    for each in fields(config):
        valid: Valid = each.metadata["valid"]
        value = getattr(config, each.name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and not valid.accepts(item):
                raise SettingError(each.name, value, str(valid) or "a finite number")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memory budgets of one rank. The number and size of all buffers follow from them and the model."""

    device: int | None = setting(
        None,
        "accelerator memory per rank, for model states and activations; null: the free memory",
        valid=Valid(least=1),
        nbytes=True,
    )
    host: int | None = setting(
        None,
        "host memory per rank, for model states and staging buffers; null: derived from the free memory",
        valid=Valid(least=1),
        nbytes=True,
    )
    nvme: tuple[str, ...] = setting(
        (), "directories for states that host memory cannot hold; empty: memory only"
    )
    versions: Literal[1, 2] = setting(
        2,
        "versions of each unit on disk; 2: a crash leaves the last step intact; 1: half the disk space",
        valid=Valid(choices=(1, 2)),
    )
    resident: bool = setting(
        True, "keep states in host memory as far as the budget allows; false: stream all of them from NVMe"
    )
    engine: Literal["auto", "libaio", "threads", "gds"] = setting(
        "auto",
        "I/O engine; auto: the fastest that works on this machine",
        valid=Valid(choices=("auto", "libaio", "threads", "gds")),
    )
    activations: Literal["keep", "offload", "recompute", "plan"] | None = setting(
        None,
        "keep, store or recompute activations, or follow a plan that keeps memory.device; null: plan if "
        "memory.device is set, else keep",
        valid=Valid(choices=("keep", "offload", "recompute", "plan")),
    )

    def __post_init__(self) -> None:
        check(self)
        if any(not path for path in self.nvme) or len(set(self.nvme)) < len(self.nvme):
            raise SettingError("nvme", self.nvme, "different, non-empty directories")
