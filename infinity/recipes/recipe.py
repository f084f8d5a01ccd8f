"""A recipe: every setting of a run, its table of keys, and its reading from YAML and command line."""

import difflib
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from infinity.api.adapters import NAMES, LoraConfig
from infinity.api.checkpoints import CheckpointConfig
from infinity.core.config import (
    Config,
    MemoryConfig,
    Setting,
    SettingError,
    Valid,
    option,
    setting,
    settings_of,
    shown,
)
from infinity.core.errors import RecipeError, first_line
from infinity.core.files import read_file, user_path
from infinity.engine.executor import Dtype, EngineConfig
from infinity.observe.metrics import ObserveConfig
from infinity.optim.rules import OptimConfig
from infinity.partition.builder import PartitionConfig
from infinity.recipes.data.loader import DataConfig
from infinity.recipes.models import ModelConfig
from infinity.recipes.other_names import KNOWN_AS
from infinity.shards.journal import DurabilityConfig

#: The longest recipe that is read; one with every key has 5 kB.
_MOST_NBYTES = 2**20
#: What YAML may contain: tags, levels, and values (as often as aliases repeat them).
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value"}
_MOST_LEVELS, _MOST_VALUES = 16, 100_000
_TOO_DEEP = f"nested deeper than {_MOST_LEVELS} levels"
_MOST_PROBLEM_CHARS = 300
_COMMAND_LINE = "on the command line"
#: The longest name of a run (bytes); files and temporary names beside its folder are a little longer.
_NAME_NBYTES = 200
#: Values that are not paths, by setting.
_NO_PATHS = {"files": "stdlib", "eval_files": "stdlib", "tokenizer": "bytes"}
_Sections = TypeVar("_Sections")
#: Keys that ``infinity train`` chooses by a plan, with the value that leaves them to it.
_CHOSEN: dict[str, str | None] = {
    "train.schedule": "auto", "memory.activations": "auto", "memory.resident": "auto",
    "memory.updates": "auto", "partition.tile": "auto", "memory.device": None,
}  # fmt: skip
#: Sections of which each of several adapters may have keys of its own, and a key that all have in common.
_OF_ADAPTERS, _IN_COMMON = ("data", "lora", "optim"), ("optim.loss_scale",)
_OWN = "keys of its own in sections " + ", ".join(_OF_ADAPTERS)
#: Removed keys, and what to do about each.
_REMOVED = {
    "optim.compile": "updates are always compiled (by numba, which needs no C++ compiler); drop the key"
}


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Name, directory and seed of a run."""

    dir: str = option("runs", "directory of the run folders", path=True)
    name: str | None = option(None, "name of the run's folder in run.dir; null: date, time and process id")
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "go on with an interrupted run of this name; never: begin one of which nothing is kept; must: an "
        "error if there is none",
    )
    seed: int = setting(0, "seed of the initial weights", Valid(0, 2**63 - 1))
    save: bool | None = option(
        None, "save the trained model in the run's folder, as model/; null: if model.path is given"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.name
        is_no_name = name in ("", ".", "..") or (name is not None and ("/" in name or not name.isprintable()))
        # commands take what begins with - for an option
        if name is not None and (is_no_name or name.startswith("-") or len(name.encode()) > _NAME_NBYTES):
            wanted = f"a printable folder name without / and no - in front, of at most {_NAME_NBYTES} bytes"
            raise SettingError("name", name, wanted)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The training loop."""

    steps: int = option(1000, "optimizer steps", Valid(1, 10**9))
    batch_size: int = option(8, "sequences per rank and micro-batch", Valid(1, 10**6))
    accumulate: int = option(1, "micro-batches per step", Valid(1, 10**6))
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto",
        "compute dtype; states stay exact fp32; auto: bf16 where every rank's device multiplies it fast, "
        "fp16 where that alone is fast (V100), else fp32",
    )
    device: str | None = option(
        None,
        "where a rank computes, such as cpu or cuda:1; null: on the accelerator with the rank's number, if "
        "there is one",
    )
    eval_every: int | None = option(100, "steps between held-out evaluations; null: never", Valid(1, 10**9))
    eval_first: bool = option(False, "evaluate before the first step, too")
    eval_batches: int = option(8, "micro-batches per rank in one evaluation", Valid(1, 10**6))
    schedule: Literal["auto", "step", "layer"] = setting(
        "auto",
        "micro-batches one by one, or all through a block before the next: weights are read twice; auto: the "
        "faster one, where infinity train plans; else step",
    )
    log_every: int = option(1, "steps between lines of progress", Valid(1, 10**9))
    threads: int | None = option(None, "compute threads per rank; null: cores / local ranks", Valid(1, 1024))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete configuration of a run. Every field has a default."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    #: Several adapters on one base: by name, section and key what each has of its own.
    adapters: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, part in _sections(Recipe).items():
            if not isinstance(given := getattr(self, name), part):
                raise SettingError(name, given, f"a {part.__name__}, as of infinity.load_recipe")
        if self.adapters:  # then what has to be true is true of each alone
            object.__setattr__(self, "adapters", dict(self._checked_adapters()))
            return
        if self.data.tokenizer in (None, "bytes") and self.model.path is None and self.model.vocab_size < 256:
            raise SettingError(
                "model.vocab_size", self.model.vocab_size, "at least 256 for the bytes tokenizer"
            )
        for name in ("rank", "adapter"):
            value = getattr(self.lora, name)
            if value is not None and self.model.path is None:
                raise SettingError(f"lora.{name}", value, "null without model.path, the frozen base")
        form = self.model.stored_as
        if form is not None and not (self.lora.active and self.memory.nvme):
            wanted = "null without adapters (lora.rank), for which the base is frozen, and memory.nvme"
            raise SettingError("model.stored_as", form, wanted)

    def _checked_adapters(self) -> Iterator[tuple[str, Mapping[str, Mapping[str, Any]]]]:
        """Yield the name of each adapter with its own keys, converted to their types."""
        if not isinstance(self.adapters, Mapping):
            raise SettingError("adapters", self.adapters, f"names of adapters, each with {_OWN}")
        for name, given in self.adapters.items():
            if not isinstance(name, str) or not re.fullmatch(NAMES, name):
                wanted = "a name that a folder can have: letters, digits, _ and -, with no - in front"
                raise SettingError("adapters", name, wanted)
            own = dict(_own_keys(f"adapters.{name}", {} if given is None else given))
            try:
                alone = with_values(replace(self, adapters={}), own)
            except SettingError as error:
                key = f"adapters.{name}.{error.key}" if error.key in own else error.key
                raise SettingError(key, error.got, error.wanted) from error
            if not alone.lora.active:
                wanted = "its rank, or lora.rank for all adapters, or a directory in lora.adapter"
                raise SettingError(f"adapters.{name}.lora.rank", None, wanted)
            yield name, alone.of_keys(own)

    def of_keys(self, keys: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the values of keys such as ``train.steps``, by section and name."""
        found: dict[str, dict[str, Any]] = {}
        for key in keys:
            section, name = key.split(".")
            found.setdefault(section, {})[name] = self.value(key)
        return found

    def alone(self, name: str) -> "Recipe":
        """Return the recipe of one of ``adapters``, a run of which trains this adapter to the same bits."""
        if name not in self.adapters:
            raise RecipeError(f"adapters: no {shown(name)}; there are: {', '.join(self.adapters) or 'none'}")
        return with_values(replace(self, adapters={}), _flat(self.adapters[name]))

    @property
    def tasks(self) -> Mapping[str, "Recipe"]:
        """Return what is trained: the recipe of each adapter by its name, or of a run without names by ""."""
        return {name: self.alone(name) for name in self.adapters} or {"": self}

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step, those of all tasks."""
        return self.train.accumulate * max(1, len(self.adapters))

    @property
    def packing(self) -> bool | None:
        """Return ``data.packing`` of the task that packs most."""
        given = [task.data.packing for task in self.tasks.values()]
        return True if True in given else False if False in given else None

    @property
    def clips(self) -> bool:
        """Return whether gradients of any task are clipped."""
        return any(task.optim.max_grad_norm is not None for task in self.tasks.values())

    @property
    def trains_adapters(self) -> bool:
        """Return whether adapters are trained on a frozen base, and not all weights."""
        return bool(self.adapters) or self.lora.active

    @property
    def engine(self) -> EngineConfig:
        """The settings that ``infinity.Init`` takes."""
        return EngineConfig(
            memory=self.memory,
            partition=self.partition,
            durability=self.durability,
            dtype=self.train.dtype,
            device=self.train.device,
            loss_scale=self.optim.loss_scale,
            run_name=self.run.name,
            resume=self.run.resume,
            timeline=self.observe.timeline,
            layer_schedule=self.train.schedule == "layer",
        )

    def with_dtype(self, dtype: Dtype) -> "Recipe":
        return replace(self, train=replace(self.train, dtype=dtype))

    def value(self, key: str) -> Any:
        """Return the value of a key such as ``train.steps``."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    @property
    def left_open(self) -> frozenset[str]:
        """Return the keys that ``infinity train`` may choose, since the recipe says ``auto``."""
        return frozenset(key for key, value in _CHOSEN.items() if self.value(key) == value)

    def as_without_plan(self) -> "Recipe":
        """Return the recipe with the schedule that ``auto`` stands for where nothing is planned."""
        return with_values(self, {"train.schedule": "step"} if self.train.schedule == "auto" else {})

    def with_absolute_paths(self) -> "Recipe":
        """Return the same recipe with absolute paths, where a recipe can have them; ``run.dir`` stays."""
        recipe = self
        for section, each in keys_of(Recipe):
            if each.path and (section, each.name) != ("run", "dir"):
                config = getattr(recipe, section)
                with suppress(SettingError, OSError):
                    value = _absolute(getattr(config, each.name), each.name)
                    recipe = replace(recipe, **{section: replace(config, **{each.name: value})})
        own = {
            name: self.alone(name).with_absolute_paths().of_keys([*_flat(given)])
            for name, given in self.adapters.items()
        }
        return replace(recipe, adapters=own)

    def to_yaml(self, keys: Collection[str] | None = None) -> str:
        """Return every key as YAML, which :func:`load_recipe` reads back to an equal recipe.

        With ``keys``: those and all that differ from their default, which give an equal recipe, too.
        """
        given = asdict(self)
        if keys is not None:
            default = asdict(Recipe())
            for section, values in given.items():
                given[section] = {
                    name: value
                    for name, value in values.items()
                    if f"{section}.{name}" in keys or value != default[section].get(name)
                }
            given = {section: values for section, values in given.items() if values}
        return OmegaConf.to_yaml(OmegaConf.create(given))


def _absolute(value: Any, setting: str) -> Any:
    """Return absolute paths, without ``..`` at the beginning; inside, one may follow a link."""
    if isinstance(value, tuple):
        return tuple(_absolute(each, setting) for each in value)
    if value is None or value == _NO_PATHS.get(setting):
        return value
    path = Path(value)
    if not path.is_absolute():
        base = Path.cwd()  # has no links
        while path.parts[:1] == ("..",):
            path, base = Path(*path.parts[1:]), base.parent
        path = base / path
    return str(path)


def changed_numbers(before: Recipe, now: Recipe) -> list[str]:
    """Describe each differing key that changes a run's numbers; ``auto`` now is what it was before."""
    tasks = [recipe.with_absolute_paths().tasks for recipe in (before, now)]
    names = [", ".join(each) or "none" for each in tasks]
    if names[0] != names[1]:  # their order, too, is that of what lies on the drives
        return [f"adapters were {names[0]}, are {names[1]}"]
    changes: dict[str, list[str]] = {}  # with the names of tasks
    for name, section, each in ((name, *key) for name in tasks[0] for key in keys_of(Recipe)):
        was, got = (_plain(recipes[name].value(f"{section}.{each.name}")) for recipes in tasks)
        if each.numeric and was != got and got != "auto":
            text = f"{section}.{each.name} was {shown(was)}, is {shown(got)}"
            changes.setdefault(text, []).append(name)
    return [
        text if len(of) == len(tasks[0]) else f"adapters.{name}.{text}"
        for text, of in changes.items()
        for name in (of if len(of) < len(tasks[0]) else of[:1])
    ]


def keeping(before: Recipe, now: Recipe, chosen: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a run that goes on: what it leaves to ``auto`` is as it was ``before``.

    ``chosen`` was, at its beginning.
    """
    keys = {f"{section}.{each.name}" for section, each in keys_of(Recipe) if each.numeric} | _CHOSEN.keys()
    kept = {key: before.value(key) for key in keys if now.value(key) == "auto"}
    return with_values(now, kept | {key: chosen[key] for key in now.left_open & chosen.keys()})


def with_values(given: _Sections, values: Mapping[str, Any]) -> _Sections:
    """Return a dataclass of sections with other values of keys, all at once: some go together only."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changes: Any = {}
    for name, new in sections.items():
        try:
            changes[name] = replace(getattr(given, name), **new)
        except SettingError as error:
            raise SettingError(f"{name}.{error.key}", error.got, error.wanted) from error
    return replace(given, **changes)  # type: ignore[type-var]


def _flat(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return values by key, such as ``train.steps``."""
    return {f"{section}.{name}": value for section, values in given.items() for name, value in values.items()}


def _own_keys(where: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all that an adapter has of its own; SettingError: it cannot have that."""
    known = [f"{section}.{each.name}" for section, each in keys_of(Recipe) if section in _OF_ADAPTERS]
    for section, values in ({"": given} if not isinstance(given, Mapping) else given).items():
        if section in _sections(Recipe) and section not in _OF_ADAPTERS:
            raise SettingError(f"{where}.{section}", values, f"{_OWN}; all adapters of a run share {section}")
        if section in _OF_ADAPTERS and values is None:
            continue
        if section not in _OF_ADAPTERS or not isinstance(values, Mapping):
            hint = _near(section, known, _OF_ADAPTERS)
            wanted = "keys and values" if section in _OF_ADAPTERS else _OWN + (hint and f"; {hint}")
            raise SettingError(f"{where}.{section}".removesuffix("."), values, wanted)
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in known:
                hint = _near(key, known, ()) or f"known: {', '.join(known)}"
                raise SettingError(f"{where}.{key}", value, f"a key of {section}; {hint}")
            if key in _IN_COMMON:
                raise SettingError(f"{where}.{key}", value, f"no value: all adapters of a run share {key}")
            yield key, value


class Row(NamedTuple):
    """Row of the table of ``infinity recipe``."""

    key: str
    type: str  # and range
    default: str
    meaning: str


def recipe_table() -> tuple[Row, ...]:
    """Return a row for every key, section by section."""
    default, rows = Recipe(), []
    for section, each in keys_of(Recipe):
        value = _plain(getattr(getattr(default, section), each.name))
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        rows.append(Row(f"{section}.{each.name}", str(each), text, each.help))
    meaning = "several adapters on one base: what each has of its own, as adapters.NAME.optim.lr=1e-4"
    return *rows, Row("adapters", f"map from names to {_OWN}", "{}", meaning)


def keys_of(cls: type) -> Iterator[tuple[str, Setting]]:
    """Yield section and setting of every key of a dataclass of sections, in order."""
    for section, part in _sections(cls).items():
        for each in settings_of(part):
            yield section, each


def _sections(cls: type) -> dict[str, type]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if isinstance(hint, type)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file, or the defaults, and apply overrides such as ``memory.nvme=[/a,/b]``.

    Raises:
        RecipeError: The file does not exist or is not valid YAML, a key is unknown, or a value has the
            wrong type or is out of range. Names the key, where it was written, and what is accepted.
    """
    return load_sections(Recipe, path, overrides)


def named_keys(path: str | Path | None, overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys that a file or overrides name; arguments and errors as of :func:`load_recipe`."""
    given = {} if path is None else _read(user_path(path, "the recipe"), Recipe)
    for override in overrides:
        _put(given, override, str(path))
    return frozenset(f"{section}.{name}" for section, values in given.items() for name in values or ())


def load_sections(cls: type[_Sections], path: str | Path | None, overrides: Sequence[str] = ()) -> _Sections:
    """Load a dataclass whose fields are sections; arguments and errors are those of :func:`load_recipe`."""
    file = "the defaults" if path is None else str(path)
    given = {} if path is None else _read(user_path(path, "the recipe"), cls)
    overridden = [_put(given, override, file) for override in overrides]
    try:
        return _build(given, cls)
    except _ProblemError as error:
        by_override = any(f"{other}.".startswith(f"{error.key}.") for other in overridden)
        where = _COMMAND_LINE if by_override else f"in {file}"
        raise RecipeError(f"{f'{error.key} {where}' if error.key else file}: {error}") from error


class _ProblemError(ValueError):
    """Raised for a wrong key or, if ``key`` is empty, a wrong recipe; ``line`` is as in ``:3``."""

    def __init__(self, problem: object, *, key: str = "", line: str = "") -> None:
        super().__init__(str(problem))
        self.key, self.line = key, line


def _read(path: Path, cls: type) -> dict[str, Any]:
    try:
        given = _parse(read_file(path, _MOST_NBYTES).decode("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, as in configs/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except _ProblemError as error:
        raise RecipeError(f"{path}{error.line}: not valid YAML: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise RecipeError(f"{path}: got {shown(given)}; wanted sections: {', '.join(_sections(cls))}")
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
        value = _parse(text)
    except ValueError as error:
        if isinstance(error, _ProblemError):
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


def _parse(text: str) -> Any:
    """Parse YAML into plain values, or raise a _ProblemError; ``${...}`` stays."""
    line, problem = "", _TOO_DEEP
    cause: Exception
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.to_container(parsed, resolve=False)["value"]  # type: ignore[call-overload, index]
    except yaml.YAMLError as error:
        mark, cause = getattr(error, "problem_mark", None), error
        problem, line = str(getattr(error, "problem", None) or error), f":{mark.line + 1}" if mark else ""
    except RecursionError as error:
        cause = error
    except Exception as error:  # parsers raise many types: ValueError of numbers and dates, those of ${
        key = str(getattr(error, "full_key", None) or "").removeprefix("value").removeprefix(".")
        problem, cause = f"{key}: {first_line(error)}" if key else first_line(error), error
    raise _ProblemError(problem[:_MOST_PROBLEM_CHARS], line=line) from cause


def _check_nodes(root: Any) -> None:
    """Refuse YAML with more than a recipe may have; aliases count as often as they are used."""
    left, count = [] if root is None else [(root, 0)], 0
    while left:
        (node, level), count = left.pop(), count + 1
        kind, problem = _tag(node), ""
        if level > _MOST_LEVELS:
            problem = _TOO_DEEP
        elif count > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES} values"
        elif kind not in _KINDS:
            problem = f"wanted text, numbers, true, false, null, lists and keys; got {kind[:50]}"
        elif isinstance(node, yaml.SequenceNode):
            left += [(item, level + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            left += [(value, level + 1) for _, value in node.value]
            wrong = next((key for key, _ in node.value if _tag(key) not in ("str", "merge")), None)
            if wrong is not None:
                got = shown(wrong.value) if isinstance(wrong, yaml.ScalarNode) else "a list, or keys"
                node, problem = wrong, f"wanted the name of a key; got {got}"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _tag(node: Any) -> str:
    return str(node.tag).removeprefix("tag:yaml.org,2002:")


def _build(given: Mapping[str, Any], cls: type[_Sections]) -> _Sections:
    """Resolve references such as ``${train.steps}`` and ``${oc.env:HOME}``, and make the sections."""
    try:
        merged: Any = OmegaConf.to_container(OmegaConf.create(dict(given)), resolve=True)
    except Exception as error:  # a reference may name a resolver, which may raise any type
        key = getattr(error, "full_key", None)
        raise _ProblemError(first_line(error)[:_MOST_PROBLEM_CHARS], key=str(key or "")) from error
    tool = next((tool for tool, marks in _MARKS.items() if marks & merged.keys()), None)
    if cls is Recipe and tool is not None:
        raise _ProblemError(
            f"this is a configuration of {tool}, not a recipe, which says it so: {_translated(merged)}"
        )
    sections, parts, prefix = _sections(cls), dict[str, Any](), ""
    if cls is Recipe:
        parts["adapters"] = merged.pop("adapters", None) or {}
    for name, values in merged.items():
        if name not in sections:
            inner = next(iter(values), None) if isinstance(values, Mapping) else None
            raise _unknown(f"{name}.{inner}" if inner else str(name), cls)
        if values is not None and not isinstance(values, Mapping):
            raise _ProblemError(_wanted(values, "keys and values"), key=name)
    try:
        for section, part in sections.items():
            values, prefix = merged.get(section) or {}, f"{section}."
            known = {each.name for each in settings_of(part)}
            if unknown := [name for name in values if name not in known]:
                raise _unknown(f"{section}.{unknown[0]}", cls)
            parts[section] = part(**values)
        prefix = ""
        return cls(**parts)
    except SettingError as error:
        raise _ProblemError(_wanted(error.got, error.wanted), key=f"{prefix}{error.key}") from error


def _wanted(got: object, wanted: str) -> str:
    words = "null" if got is None else str(got).lower() if isinstance(got, bool) else shown(_plain(got))
    return f"got {words}; wanted {wanted}"


def _unknown(key: str, cls: type) -> _ProblemError:
    """Return an error that suggests a key: this name elsewhere, or a similar one here or anywhere."""
    if key in _REMOVED:
        return _ProblemError(f"no longer a key; {_REMOVED[key]}", key=key)
    known = [f"{section}.{each.name}" for section, each in keys_of(cls)]
    siblings = [other for other in known if other.startswith(f"{key.rpartition('.')[0]}.")]
    names = [each.name for each in fields(cls)]
    hint = _near(key, known, names) or f"known: {', '.join(siblings or names)}"
    return _ProblemError(f"unknown key; {hint}", key=key)


def _near(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a question that suggests a key in place of an unknown one; empty: none is near."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}") or other == KNOWN_AS.get(name or key)]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *sections], n=1, cutoff=0.6)
    )
    return f"did you mean {near[0]}?" if near else ""


#: Top-level keys that only this tool has.
_MARKS = {
    "Accelerate": {"compute_environment", "distributed_type", "fsdp_config", "mixed_precision"},
    "DeepSpeed": {
        "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
        "bf16", "fp16", "aio", "activation_checkpointing", "wall_clock_breakdown",
    },
}  # fmt: skip
_BUDGETS = "memory.device, memory.host and memory.nvme (budgets; sizes of buffers follow from them)"
_ALWAYS = "nothing (weights, gradients and states are always sharded)"
_SAME = "nothing (derived from the budgets and the model)"
#: What a recipe says in place of each key.
_PLACES = {
    "zero_optimization.stage": _ALWAYS,
    "zero_optimization.offload_param": _BUDGETS,
    "zero_optimization.offload_optimizer": _BUDGETS,
    "zero_optimization": _SAME,
    "aio": "memory.engine",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "train_batch_size": "train.batch_size (x train.accumulate x ranks)",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_clipping": "optim.max_grad_norm",
    "bf16": "train.dtype=bf16",
    "fp16": "train.dtype=fp16 and optim.loss_scale",
    "mixed_precision": "train.dtype",
    "optimizer": "optim.lr, optim.betas, optim.eps and optim.weight_decay",
    "scheduler": "optim.schedule and optim.warmup_steps",
    "activation_checkpointing": "memory.activations=recompute",
    "steps_per_print": "train.log_every",
    "wall_clock_breakdown": "observe.timeline",
    "tensorboard": "observe.tensorboard",
    "deepspeed_config": _BUDGETS,
    "fsdp_config.fsdp_offload_params": _BUDGETS,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "nothing (checkpoints are always streamed)",
    "fsdp_config.fsdp_activation_checkpointing": "memory.activations=recompute",
    "fsdp_config": _ALWAYS,
    "num_processes": "torchrun --nproc-per-node",
    "num_machines": "torchrun --nnodes",
}


def _translated(given: Mapping[str, Any]) -> str:
    """Say which keys replace those of another tool's configuration."""
    keys_at: dict[str, list[str]] = {}
    for key, place in _PLACES.items():
        section, _, name = key.partition(".")
        inner = given.get(section)
        if section in given and (not name or (isinstance(inner, Mapping) and name in inner)):
            keys_at.setdefault(place, []).append(key)
    return "; ".join(f"{', '.join(keys)} -> {place}" for place, keys in keys_at.items())
