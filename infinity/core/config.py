"""Fields of configuration classes with their types, meaning and valid values; the memory budgets.

A config is a frozen dataclass beside the part that it configures: :func:`setting` makes a field, and
:class:`Config` converts and validates values from a recipe or from Python.
"""

import functools
import operator
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from infinity.core.errors import RecipeError
from infinity.core.files import expand_user
from infinity.core.nbytes import parse_nbytes

#: The most that a message shows of a wrong value (characters).
_SHOWN_CHARS = 200
#: The longest text of a setting (bytes); of a path, the system says more.
_TEXT_NBYTES = 4095


class SettingError(RecipeError):
    """Raised when the field ``key`` of a config is ``got``, which is not what is ``wanted``."""

    def __init__(self, key: str, got: object, wanted: str) -> None:
        self.key, self.got, self.wanted = key, got, wanted
        super().__init__(f"{key}: got {shown(got)}; wanted {wanted}")


class Valid(NamedTuple):
    """Bounds a number; without bounds, all numbers are valid."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether ``value`` is within the bounds; NaN never is."""
        holds = operator.ge, operator.le, operator.gt, operator.lt
        return all(bound is None or holds(value, bound) for holds, bound in zip(holds, self))

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{_bound(self.least)} to {_bound(self.most)}"
        bounds = {">=": self.least, ">": self.above, "<=": self.most, "<": self.below}
        return " and ".join(f"{sign} {_bound(bound)}" for sign, bound in bounds.items() if bound is not None)


def _bound(bound: Any) -> str:
    if isinstance(bound, float):
        return f"{bound:g}"
    for number, rest in ((bound, ""), (bound + 1, " - 1")):
        if number >= 2**20 and number.bit_count() == 1:
            return f"2**{number.bit_length() - 1}{rest}"
    return f"{bound:,}"


_ANY = Valid()


class Setting(NamedTuple):
    """Describes a field of a config: its name, its type, and what :func:`setting` was given."""

    name: str
    hint: Any
    help: str
    valid: Valid
    nbytes: bool
    path: bool
    numeric: bool

    def __str__(self) -> str:
        bounds = f"{self.valid}{' bytes' if self.nbytes else ''}"
        return f"{self._kind()}, {bounds}" if bounds else self._kind()

    def _kind(self) -> str:
        kind, args = typing.get_origin(self.hint), typing.get_args(self.hint)
        if kind in (types.UnionType, typing.Union):
            other = " or null" if type(None) in args else " | true | false"
            return f"{self._replace(hint=args[0])._kind()}{other}"
        if kind is Literal:
            return " | ".join(str(choice).lower() for choice in args)
        if kind is tuple:
            items = [self._replace(hint=arg)._kind() for arg in args if arg is not Ellipsis]
            return f"list of {items[0]}s" if Ellipsis in args else f"[{', '.join(items)}]"
        if kind is Mapping:
            return f"map from text to {self._replace(hint=args[1])._kind()}"
        if self.nbytes:
            return "size such as 8GiB"
        return "path" if self.path else {bool: "true | false", str: "text"}.get(self.hint, self.hint.__name__)

    def converted(self, value: Any) -> Any:
        """Return ``value`` as the type, or a ValueError; sizes may be text, lists an item, floats an int."""
        kind, args = typing.get_origin(self.hint), typing.get_args(self.hint)
        if kind in (types.UnionType, typing.Union):
            as_it_is = type(value) in args and (value is None or type(value) is bool)
            return value if as_it_is else self._replace(hint=args[0]).converted(value)
        if kind is tuple:
            items = value if isinstance(value, (list, tuple)) else (value,)
            if args[-1] is not Ellipsis and len(items) != len(args):
                raise ValueError(value)
            if "???" in items:  # OmegaConf's mark of a mandatory value, which it does not write in a list
                raise _TextError("??? marks a value that must be given")
            return tuple(self._replace(hint=args[0]).converted(item) for item in items)
        if kind is Mapping:
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise ValueError(value)
            return {name: self._replace(hint=args[1]).converted(item) for name, item in value.items()}
        if self.hint is str:
            return _text(value, path=self.path)
        if kind is Literal:
            valid = any(value == choice and type(value) is type(choice) for choice in args)
        else:
            value = parse_nbytes(value) if self.nbytes else value
            value = float(value) if self.hint is float and type(value) is int else value
            valid = isinstance(value, self.hint) and (self.hint is bool or not isinstance(value, bool))
        if not valid or not self.valid.accepts(value):
            raise ValueError(value)
        return value


def setting(
    default: Any, help: str, valid: Valid = _ANY, *, nbytes: bool = False, path: bool = False,
    numeric: bool = True,
) -> Any:  # fmt: skip
    """Make a field of a config.

    Args:
        valid: Bounds of a number; for a tuple or a dictionary, of each item.
        nbytes: The value is a size in bytes, which may be written ``8GiB``.
        path: The value is a path or a pattern of paths, in which ``~`` is expanded.
        numeric: The value changes the numbers of a run, so a resumed run must keep it.
    """
    return field(default=default, metadata={"setting": (help, valid, nbytes, path, numeric)})


#: Makes a setting that changes no number of a run.
option = functools.partial(setting, numeric=False)
_budget = functools.partial(option, None, valid=Valid(1, 2**60), nbytes=True)


@functools.cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return every :func:`setting` of a config, in order."""
    hints = typing.get_type_hints(cls)
    specs = (spec for spec in fields(cls) if "setting" in spec.metadata)
    return tuple(Setting(spec.name, hints[spec.name], *spec.metadata["setting"]) for spec in specs)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of configs: converts and validates every :func:`setting`, or raises a SettingError."""

    def __post_init__(self) -> None:
        cls: type = type(self)
        for each in settings_of(cls):
            value = getattr(self, each.name)
            try:
                object.__setattr__(self, each.name, each.converted(value))
            except (ValueError, OverflowError) as error:
                why = f"; {error}" if isinstance(error, _TextError) else ""
                raise SettingError(each.name, value, f"{each}{why}") from error


def shown(value: object) -> str:
    """Return ``value`` as text of bounded length, for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits or levels
        return f"{type(value).__name__} of unprintable length"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


class _TextError(ValueError):
    """The message says why a text cannot be used."""


def _text(value: Any, *, path: bool) -> str:
    if isinstance(value, os.PathLike) or type(value) is int:
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


#: Values of ``memory.codec`` by which activations lose precision.
LOSSY_CODECS = ("int8", "2bit")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Config):
    """Sets the memory budgets of one rank; number and size of all buffers follow from them and the model."""

    device: int | None = _budget(
        help="accelerator memory per rank, for model states and activations; null: the free memory"
    )
    host: int | None = _budget(
        help="host memory per rank, for model states and staging buffers; null: derived from the free memory"
    )
    nvme: tuple[str, ...] = option(
        (), "directories for states that host memory cannot hold; empty: memory only", path=True
    )
    versions: Literal[1, 2] = option(
        2, "versions of each unit on disk; 2: a crash leaves the last step intact; 1: half the disk space"
    )
    resident: Literal["auto", True, False] = option(
        "auto",
        "keep states in host memory as far as the budget allows; false: stream all of them from NVMe; auto: "
        "true, unless only false fits",
    )
    engine: Literal["auto", "libaio", "threads", "gds"] = option(
        "auto", "I/O engine; auto: the fastest that works on this machine"
    )
    activations: Literal["auto", "keep", "offload", "recompute", "plan"] = option(
        "auto",
        "keep, store or recompute activations, or follow a plan that keeps memory.device; auto: the fastest "
        "that fits, where infinity train plans; else plan if memory.device is set, or keep (with "
        "train.schedule=layer: but for what does not fit)",
    )
    codec: Literal["auto", "never", "int8", "2bit"] = setting(
        "auto",
        "code activations that are stored; auto: exactly, where that is measured to pay; int8, 2bit: "
        "with less precision, all that gradients flow through",
    )
    logits: Literal["auto", "whole", "slices"] = setting(
        "auto",
        "compute logits whole, or, in training, in slices of rows for the loss, within rounding; auto: in "
        "slices where whole logits cannot fit",
    )
    updates: Literal["auto", "host", "device"] = option(
        "auto",
        "where updates run; device, auto: states of units in host memory are in memory.device, too, as far "
        "as it has room, and are updated there; others run on the accelerator and back (auto: from host "
        "memory on both, from NVMe where that is faster); host: all on the CPU",
    )
    shared: Literal["auto", "always", "never"] = option(
        "auto",
        "always: ranks of one machine have weights in host memory once, for all of them, and each uploads "
        "whole units; never: each has its part, and gathers the others; auto: never, if there are "
        "accelerators that reach each other's memory, else always",
    )
    numa: Literal["auto", "never"] = option(
        "auto",
        "auto: where memory has several nodes a rank runs on the cores next to its accelerator",
    )
    verify: bool = option(
        False, "compare each block read from NVMe with a sum made when it was written; commits keep the sums"
    )

    def __post_init__(self) -> None:
        given: object = self.activations
        if given is None:  # another way to write it
            object.__setattr__(self, "activations", "auto")
        super().__post_init__()
        if self.verify and self.engine == "gds":
            wanted = "auto, libaio or threads with memory.verify=true, which needs bytes in host memory"
            raise SettingError("engine", "gds", wanted)
        # one directory may have several names, in which a run's files would have the same one
        different = len({*map(os.path.realpath, self.nvme)}) == len(self.nvme)
        if not all(self.nvme) or not different:
            raise SettingError("nvme", self.nvme, "different, non-empty directories")

    @property
    def policy(self) -> Literal["keep", "offload", "recompute", "plan"]:
        """Return what ``activations`` is, or what ``auto`` stands for where nothing else is chosen."""
        if self.activations != "auto":
            return self.activations
        return "keep" if self.device is None else "plan"
