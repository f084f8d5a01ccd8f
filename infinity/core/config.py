"""Fields of configuration classes with their types, meaning and valid values; the memory budgets.

A config is a frozen dataclass beside the part that it configures. :func:`setting` makes a field and stores
its meaning and valid values in the field's metadata. :func:`check` converts and validates the values, from a
recipe or from Python; :func:`describe` says what it accepts, in errors and in ``infinity recipe``.
"""

import errno
import functools
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from infinity.core.errors import RecipeError
from infinity.core.files import expand_user
from infinity.core.nbytes import parse_nbytes

#: The most that a message shows of a wrong value (characters).
_SHOWN_CHARS = 200
_PLURALS = {"path": "paths", "text": "texts"}
#: The longest text of a setting (bytes); of a path, the system says more.
_TEXT_NBYTES = 4095


class SettingError(RecipeError):
    """A field of a config has an invalid value.

    Attributes:
        key: Name of the field.
        got: The value of the field.
        wanted: Description of the valid values.
    """

    def __init__(self, key: str, got: object, wanted: str) -> None:
        self.key, self.got, self.wanted = key, got, wanted
        super().__init__(f"{key}: got {shown(got)}; wanted {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Valid values of a field: bounds of a number, or a list of choices."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Sequence[object] = ()

    def accepts(self, value: Any) -> bool:
        """Return True if ``value``, which has the field's type, is valid; NaN is not if there are bounds."""
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return " | ".join(str(choice) for choice in self.choices)
        if self.least is not None and self.most is not None:
            return f"{_bound(self.least)} to {_bound(self.most)}"
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        return " and ".join(f"{sign} {_bound(bound)}" for sign, bound in bounds if bound is not None)


def setting(
    default: Any,
    help: str,
    *,
    valid: Valid | None = None,
    nbytes: bool = False,
    path: bool = False,
    numeric: bool = True,
) -> Any:
    """Make a field of a config; a number has bounds on both sides.

    Args:
        default: The default value; None usually means "derived" or "off".
        help: The meaning, in one line.
        valid: Valid values; for a tuple, of each item.
        nbytes: The value is a size in bytes, which may be written ``8GiB``.
        path: The value is a path or a pattern of paths, in which ``~`` is expanded.
        numeric: The value changes the numbers of a run, so one that is gone on with must keep it.
    """
    metadata = {"help": help, "valid": valid or Valid(), "nbytes": nbytes, "path": path, "numeric": numeric}
    return field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Convert and validate every :func:`setting` of ``config``; called in ``__post_init__``.

    A size may be text, a list may be its only item, and a float or a text may be an int, as in a recipe.

    Raises:
        SettingError: A field has an invalid value; names the first such field.
    """
    cls: type = type(config)
    for spec, hint in settings_of(cls):
        value = getattr(config, spec.name)
        try:
            object.__setattr__(config, spec.name, _converted(value, spec, hint))
        except (ValueError, OverflowError) as error:
            why = f"; {error}" if isinstance(error, _TextError) else ""
            raise SettingError(spec.name, value, describe(spec, hint) + why) from error


@functools.cache
def settings_of(cls: type) -> tuple[tuple["Field[Any]", Any], ...]:
    """Return every :func:`setting` of a config with its type, in order."""
    hints = typing.get_type_hints(cls)
    return tuple((spec, hints[spec.name]) for spec in fields(cls) if "valid" in spec.metadata)


def describe(spec: "Field[Any]", hint: Any) -> str:
    """Describe the values that a setting accepts, as in ``int or null, 1 to 1024``."""
    kind, bounds = _describe_type(hint, spec), str(spec.metadata["valid"])
    if spec.metadata["nbytes"]:
        bounds += " bytes"
    return kind if not bounds or bounds in kind else f"{kind}, {bounds}"


def shown(value: object) -> str:
    """Return ``value`` as it stands in a message, which has a bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits or levels
        return f"{type(value).__name__} of unprintable length"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


class _TextError(ValueError):
    """The message says why a text cannot be used."""


def _converted(value: Any, spec: "Field[Any]", hint: Any) -> Any:
    """Return ``value`` as a ``hint``; YAML's own types stay apart, so ``steps: 1.5`` is an error."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return None if value is None else _converted(value, spec, args[0])
    if kind is tuple:
        items = value if isinstance(value, (list, tuple)) else (value,)
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError(value)
        if "???" in items:  # OmegaConf's mark of a mandatory value, which it does not write in a list
            raise _TextError("??? marks a value that must be given")
        return tuple(_converted(item, spec, args[0]) for item in items)
    if spec.metadata["nbytes"]:
        value = parse_nbytes(value)
    elif hint is str:
        value = _text(value, path=spec.metadata["path"])
    elif hint is float and type(value) is int:
        value = float(value)
    elif kind is not Literal and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise ValueError(value)
    if not spec.metadata["valid"].accepts(value):
        raise ValueError(value)
    return value


def _text(value: Any, *, path: bool) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(value)
    try:
        nbytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise _TextError(f"half of a surrogate pair at character {error.start} is not text") from error
    if "\0" in value:
        raise _TextError("the character NUL cannot be in it")
    if nbytes > _TEXT_NBYTES:
        raise _TextError(f"at most {_TEXT_NBYTES} bytes, got {nbytes}")
    if "${" in value:  # a recipe with it could not be read again
        raise _TextError("${ is for references, which are resolved")
    try:
        return expand_user(value) if path else value
    except ValueError as error:
        raise _TextError(str(error)) from error


def _bound(bound: Any) -> str:
    """A bound as text: large powers of two as such."""
    if isinstance(bound, float):
        return f"{bound:g}"
    for number, rest in ((bound, ""), (bound + 1, " - 1")):
        if number >= 2**20 and number.bit_count() == 1:
            return f"2**{number.bit_length() - 1}{rest}"
    return f"{bound:,}"


def _describe_type(hint: Any, spec: "Field[Any]") -> str:
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return f"{_describe_type(args[0], spec)} or null"
    if kind is Literal:
        return " | ".join(str(choice) for choice in args)
    if kind is tuple:
        items = [_describe_type(arg, spec) for arg in args if arg is not Ellipsis]
        return f"list of {_PLURALS[items[0]]}" if Ellipsis in args else f"[{', '.join(items)}]"
    if spec.metadata["nbytes"]:
        return "size such as 8GiB"
    if spec.metadata["path"]:
        return "path"
    return {bool: "true | false", int: "int", float: "float", str: "text"}[hint]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memory budgets of one rank. The number and size of all buffers follow from them and the model."""

    device: int | None = setting(
        None,
        "accelerator memory per rank, for model states and activations; null: the free memory",
        valid=Valid(least=1, most=2**60),
        nbytes=True,
        numeric=False,
    )
    host: int | None = setting(
        None,
        "host memory per rank, for model states and staging buffers; null: derived from the free memory",
        valid=Valid(least=1, most=2**60),
        nbytes=True,
        numeric=False,
    )
    nvme: tuple[str, ...] = setting(
        (),
        "directories for states that host memory cannot hold; empty: memory only",
        path=True,
        numeric=False,
    )
    versions: Literal[1, 2] = setting(
        2,
        "versions of each unit on disk; 2: a crash leaves the last step intact; 1: half the disk space",
        valid=Valid(choices=(1, 2)),
        numeric=False,
    )
    resident: bool = setting(
        True,
        "keep states in host memory as far as the budget allows; false: stream all of them from NVMe",
        numeric=False,
    )
    engine: Literal["auto", "libaio", "threads", "gds"] = setting(
        "auto",
        "I/O engine; auto: the fastest that works on this machine",
        valid=Valid(choices=("auto", "libaio", "threads", "gds")),
        numeric=False,
    )
    activations: Literal["keep", "offload", "recompute", "plan"] | None = setting(
        None,
        "keep, store or recompute activations, or follow a plan that keeps memory.device; null: plan if "
        "memory.device is set, else keep",
        valid=Valid(choices=("keep", "offload", "recompute", "plan")),
        numeric=False,
    )
    logits: Literal["auto", "whole", "slices"] = setting(
        "auto",
        "compute logits whole, or, in training, in slices of rows for the loss, within rounding; auto: in "
        "slices where whole logits cannot fit",
        valid=Valid(choices=("auto", "whole", "slices")),
    )
    updates: Literal["auto", "host", "device"] = setting(
        "auto",
        "where updates run; device, auto: states of units in host memory are in memory.device, too, as far "
        "as it has room, and are updated there; other updates run on the accelerator and back (auto: where "
        "that is faster, as measured); host: all on the CPU",
        valid=Valid(choices=("auto", "host", "device")),
        numeric=False,
    )
    verify: bool = setting(
        False,
        "compare each block read from NVMe with a sum made when it was written; commits keep the sums",
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.verify and self.engine == "gds":
            wanted = "auto, libaio or threads with memory.verify=true, which needs bytes in host memory"
            raise SettingError("engine", "gds", wanted)
        try:
            # one directory may have several names, in which a run's files would have the same one
            different = len({_identity(path) for path in self.nvme}) == len(self.nvme)
        except OSError as error:
            raise SettingError(
                "nvme", self.nvme, f"directories; {error.filename}: {error.strerror}"
            ) from error
        if not all(self.nvme) or not different:
            raise SettingError("nvme", self.nvme, "different, non-empty directories")


def _identity(path: str) -> object:
    """Return what all names of a directory have in common; it need not exist.

    Raises:
        OSError: It cannot exist, as for a symbolic link to itself.
    """
    real = os.path.realpath(path)
    try:
        found = Path(real).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return real  # who opens it says what is wrong
    return found.st_dev, found.st_ino
