"""Reading of recipes, and of other dataclasses of sections, from YAML files and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from infinity.core.config import SettingError, settings_of, shown
from infinity.core.errors import RecipeError
from infinity.core.files import read_file, user_path
from infinity.recipes.other_tools import near, tool_of
from infinity.recipes.recipe import Recipe, keys_of, plain, sections_of
from infinity.recipes.text import ProblemError, parse, resolved

#: The longest recipe that is read; one with every key has 5 kB.
_MOST_NBYTES = 2**20
_COMMAND_LINE = "on the command line"
_Sections = TypeVar("_Sections")
#: Pairs of keys that say the same in two ways: an override replaces what a file says in the other.
_ALTERNATIVES = (
    ("train.steps", "train.epochs"),
    ("train.eval_every", "train.evals_per_epoch"),
    ("optim.warmup_steps", "optim.warmup_ratio"),
)


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file, or the defaults, and apply overrides such as ``memory.nvme=[/a,/b]``.

    Raises:
        RecipeError: The file does not exist or is not valid YAML, a key is unknown, or a value has the
            wrong type or is out of range. Names the key, where it was written, and what is accepted.
    """
    return load_sections(Recipe, path, overrides)


def named_keys(path: str | Path | None, overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys that a file or overrides name; arguments and errors as of :func:`load_recipe`."""
    given, _ = _read(Recipe, path, overrides)
    return frozenset(f"{section}.{name}" for section, values in given.items() for name in values or ())


def load_sections(cls: type[_Sections], path: str | Path | None, overrides: Sequence[str] = ()) -> _Sections:
    """Load a dataclass whose fields are sections; arguments and errors are those of :func:`load_recipe`."""
    file = "the defaults" if path is None else str(path)
    given, overridden = _read(cls, path, overrides)
    try:
        return _build(given, cls)
    except ProblemError as error:
        by_override = any(f"{other}.".startswith(f"{error.key}.") for other in overridden)
        where = _COMMAND_LINE if by_override else f"in {file}"
        raise RecipeError(f"{f'{error.key} {where}' if error.key else file}: {error}") from error


def _read(cls: type, path: str | Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what a file and overrides say, by section, and the keys of the overrides."""
    given = {} if path is None else read_sections(user_path(path, "the recipe"), cls)
    file = "the defaults" if path is None else str(path)
    overridden = [_put(given, override, file) for override in overrides]
    for pair in _ALTERNATIVES if cls is Recipe else ():
        for key, other in (pair, pair[::-1]):
            section, name = key.split(".")
            if key in overridden and other not in overridden and given[section][name] is not None:
                given[section].pop(other.rpartition(".")[2], None)
    return given, overridden


def read_sections(path: Path, cls: type) -> dict[str, Any]:
    try:
        given = parse(read_file(path, _MOST_NBYTES).decode("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, as in configs/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except ProblemError as error:
        raise RecipeError(f"{path}{error.line}: not valid YAML: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise RecipeError(f"{path}: got {shown(given)}; wanted sections: {', '.join(sections_of(cls))}")
    return given or {}


def _put(given: dict[str, Any], override: str, file: str) -> str:
    """Put the value of ``section.key=value`` into ``given``, and return the key."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    problem = "wanted section.key=value, as in train.steps=10"
    try:
        if not (equals and (len(names) > 1 or names == ["adapters"]) and all(names)):
            raise ValueError(problem)
        problem = "not text in the locale's encoding; set PYTHONUTF8=1"
        override.encode()
        value = parse(text)
    except ValueError as error:
        if isinstance(error, ProblemError):
            problem = f"the value is not valid YAML: {error}; quote text that contains brackets, stars or "
            problem += "commas, as in data.files='[\"a[0-9].txt\"]'"
        raise RecipeError(f"{shown(override)} {_COMMAND_LINE}: {problem}") from error
    for at, name in enumerate(names[:-1], start=1):
        if given.get(name) is None:
            given[name] = {}
        if not isinstance(given[name], dict):
            raise RecipeError(f"{'.'.join(names[:at])} in {file}: {_wanted(given[name], 'keys and values')}")
        given = given[name]
    given[names[-1]] = value
    return key.strip()


def _build(given: Mapping[str, Any], cls: type[_Sections]) -> _Sections:
    """Resolve references such as ``${train.steps}`` and ``${oc.env:HOME}``, and make the sections."""
    merged, sections = resolved(given), sections_of(cls)
    unknown = merged.keys() - sections.keys() - {"adapters"} if cls is Recipe else ()
    if unknown and (tool := tool_of(merged)):
        raise ProblemError(
            f"this is a configuration of {tool}, not a recipe; infinity recipe --from FILE writes one from it"
        )
    parts, prefix = dict[str, Any](), ""
    if cls is Recipe:
        parts["adapters"] = merged.pop("adapters", None) or {}
    for name, values in merged.items():
        if name not in sections:
            inner = next(iter(values), None) if isinstance(values, Mapping) else None
            raise _unknown(f"{name}.{inner}" if inner else str(name), cls)
        if values is not None and not isinstance(values, Mapping):
            raise ProblemError(_wanted(values, "keys and values"), key=name)
    try:
        for section, part in sections.items():
            values, prefix = merged.get(section) or {}, f"{section}."
            known = {each.name for each in settings_of(part)}
            if unknown := [name for name in values if name not in known]:
                raise _unknown(f"{section}.{unknown[0]}", cls)
            parts[section] = part(**values)
        prefix = ""
        made = cls(**parts)
        if isinstance(made, Recipe) and made.train.schedule == "step" and made.train.group is not None:
            wanted = "null with train.schedule=step, which takes micro-batches one by one; layer has groups"
            raise SettingError("train.group", made.train.group, wanted)
        return made
    except SettingError as error:
        raise ProblemError(_wanted(error.got, error.wanted), key=f"{prefix}{error.key}") from error


def _wanted(got: object, wanted: str) -> str:
    words = "null" if got is None else str(got).lower() if isinstance(got, bool) else shown(plain(got))
    return f"got {words}; wanted {wanted}"


def _unknown(key: str, cls: type) -> ProblemError:
    """Return an error that suggests a key: this name elsewhere, or a similar one here or anywhere."""
    known = [*keys_of(cls)]
    siblings = [other for other in known if other.startswith(f"{key.rpartition('.')[0]}.")]
    names = [each.name for each in fields(cls)]
    hint = near(key, known, names) or f"known: {', '.join(siblings or names)}"
    return ProblemError(f"unknown key; {hint}", key=key)
