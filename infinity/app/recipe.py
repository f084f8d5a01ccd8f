"""Recipes: the configuration of a run, read from a YAML file and the command line.

:class:`Recipe` is composed of the configs that live beside the parts they configure. A file lists
only what differs from the defaults::

    memory: {host: 8GiB, nvme: [/mnt/nvme0, /mnt/nvme1]}
    train: {steps: 1000, dtype: bf16}

OmegaConf parses files and overrides and resolves ``${...}``; this is the only module that imports it.
Types are checked here, because its structured configs convert what should be an error (``1`` to ``true``,
``1.5`` to text), know no sizes such as ``8GiB``, and cannot say which file or argument a value came from.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from infinity.app.data.loader import DataConfig
from infinity.app.models.config import ModelConfig
from infinity.app.other_tools import translate
from infinity.core.config import MemoryConfig, SettingError, Valid, check, setting
from infinity.core.errors import RecipeError
from infinity.core.files import read_file
from infinity.core.nbytes import parse_nbytes
from infinity.engine.config import Dtype, EngineConfig
from infinity.observe.metrics import ObserveConfig
from infinity.optim.config import OptimConfig
from infinity.partition.config import PartitionConfig

COMMAND_LINE = "on the command line"
#: The longest recipe that is read; one with every key has 5 kB.
_MOST_NBYTES = 2**20
#: Removed keys, and what to do about each.
_REMOVED = {
    "optim.compile": "updates are always compiled (by numba, which needs no C++ compiler); drop the key",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, directory and seed of a run."""

    dir: str = setting("runs", "directory of the run folders")
    name: str | None = setting(None, "name of the run's folder in run.dir; null: date, time and process id")
    seed: int = setting(0, "seed of the initial weights", valid=Valid(least=0))
    save: bool | None = setting(
        None, "save the trained model in the run's folder, as model/; null: if model.path is given"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise SettingError("name", self.name, "a folder name without /")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    steps: int = setting(1000, "optimizer steps", valid=Valid(least=1))
    batch_size: int = setting(8, "sequences per rank and micro-batch", valid=Valid(least=1))
    accumulate: int = setting(1, "micro-batches per step", valid=Valid(least=1))
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto",
        "compute dtype; states stay exact fp32; auto: bf16 where every rank's device multiplies it fast, "
        "else fp32",
        valid=Valid(choices=("auto", "bf16", "fp16", "fp32")),
    )
    eval_every: int | None = setting(
        100, "steps between held-out evaluations; null: never", valid=Valid(least=1)
    )
    eval_first: bool = setting(False, "evaluate before the first step, too")
    eval_batches: int = setting(8, "micro-batches per rank in one evaluation", valid=Valid(least=1))
    schedule: Literal["step", "layer"] = setting(
        "step",
        "micro-batches one by one, or all through a block before the next: weights are read twice",
        valid=Valid(choices=("step", "layer")),
    )
    log_every: int = setting(1, "steps between lines of progress", valid=Valid(least=1))
    threads: int | None = setting(
        None, "compute threads per rank; null: cores / local ranks", valid=Valid(least=1)
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters on a frozen base model."""

    rank: int | None = setting(None, "rank of each adapter; null: train all weights", valid=Valid(least=1))
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", valid=Valid(above=0))
    target_modules: tuple[str, ...] = setting(
        (), "layers that get adapters, such as q_proj; empty: every linear layer except the head"
    )
    dropout: float = setting(0.0, "dropout on the input of each adapter", valid=Valid(least=0, below=1))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete configuration of a run. Every field has a default."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        if self.data.tokenizer in (None, "bytes") and self.model.path is None and self.model.vocab_size < 256:
            raise SettingError(
                "model.vocab_size", self.model.vocab_size, "at least 256 for the bytes tokenizer"
            )
        if self.train.schedule == "layer" and self.memory.activations == "recompute":
            wanted = "null with train.schedule=layer, which recomputes by itself"
            raise SettingError("memory.activations", "recompute", wanted)
        if self.lora.rank is not None and self.model.path is None:
            raise SettingError("lora.rank", self.lora.rank, "null without model.path, the frozen base")

    @property
    def engine(self) -> EngineConfig:
        """The settings that ``infinity.Init`` takes."""
        return EngineConfig(
            memory=self.memory,
            partition=self.partition,
            dtype=self.train.dtype,
            loss_scale=self.optim.loss_scale,
            run_name=self.run.name,
            timeline=self.observe.timeline,
            layer_schedule=self.train.schedule == "layer",
        )

    def with_dtype(self, dtype: Dtype) -> "Recipe":
        """Return the same recipe with the compute dtype that was chosen for ``auto``."""
        return replace(self, train=replace(self.train, dtype=dtype))

    def to_yaml(self) -> str:
        """Return every key as YAML, which :func:`load_recipe` reads back to an equal recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(asdict(self)))


class Row(NamedTuple):
    """One key in the table of ``infinity recipe``."""

    key: str
    type: str
    default: str
    meaning: str


def recipe_table() -> tuple[Row, ...]:
    """Return every key with its type, default and meaning, section by section."""
    default = Recipe()
    rows = []
    for section, spec, hint in _settings():
        value = _plain(getattr(getattr(default, section), spec.name))
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        rows.append(Row(f"{section}.{spec.name}", _describe(hint, spec), text, spec.metadata["help"]))
    return tuple(rows)


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file and apply ``section.key=value`` overrides.

    Args:
        path: The file; None: only the defaults.
        overrides: As on the command line; values are YAML: ``memory.nvme=[/a,/b]``.

    Raises:
        RecipeError: The file does not exist or is not valid YAML, a key is unknown, or a value has the
            wrong type or is out of range. Names the key, where it was written, and what is accepted.
    """
    file = "the defaults" if path is None else str(path)
    given = OmegaConf.create() if path is None else _read(Path(path))
    typed = _parse_overrides(overrides)
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(given, typed), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{file}: {str(error).splitlines()[0]}") from error
    origin = _Origin(file, [override.partition("=")[0].strip() for override in overrides])
    return _build(typing.cast("dict[str, Any]", merged), origin)


class _Origin(NamedTuple):
    """Where each key was written."""

    file: str
    overridden: Sequence[str]

    def of(self, key: str) -> str:
        """``on the command line`` if an override sets ``key``, else the file."""
        if any(other == key or other.startswith(f"{key}.") for other in self.overridden):
            return COMMAND_LINE
        return f"in {self.file}"


def _read(path: Path) -> Any:
    """Parse the file with OmegaConf, which resolves ``${train.steps}`` and ``${oc.env:HOME}``."""
    try:
        text = read_file(path, _MOST_NBYTES).decode("utf-8")
        given = yaml.safe_load(text)
        if given is None:
            return OmegaConf.create()
        if isinstance(given, Mapping):
            return OmegaConf.create(text)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, as in configs/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{line}: not valid YAML: {problem}") from error
    raise RecipeError(f"{path}: got {given!r}; wanted sections: {', '.join(_sections())}")


def _parse_overrides(overrides: Sequence[str]) -> Any:
    for override in overrides:
        if "=" not in override or "." not in override.partition("=")[0]:
            raise RecipeError(f"{override!r} {COMMAND_LINE}: wanted section.key=value, as in train.steps=10")
        try:
            OmegaConf.from_dotlist([override])
        except UnicodeEncodeError as error:
            raise RecipeError(
                f"{override!a} {COMMAND_LINE}: not text in the locale's encoding; set PYTHONUTF8=1"
            ) from error
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise RecipeError(
                f"{override!r} {COMMAND_LINE}: the value is not valid YAML; quote text that contains "
                "brackets, stars or commas, as in data.files='[\"a[0-9].txt\"]'"
            ) from error
    return OmegaConf.from_dotlist(list(overrides))


def _build(merged: Mapping[str, Any], origin: _Origin) -> Recipe:
    sections = _sections()
    if translation := translate(merged):
        raise RecipeError(f"{origin.file}: {translation}")
    for name, given in merged.items():
        if name not in sections:
            inner = next(iter(given), None) if isinstance(given, Mapping) else None
            raise _unknown(f"{name}.{inner}" if inner else str(name), origin)
    parts = {name: _build_section(name, cls, merged.get(name), origin) for name, cls in sections.items()}
    try:
        return Recipe(**parts)
    except SettingError as error:
        raise _invalid(error.key, error.got, error.wanted, origin) from error


def _build_section(section: str, cls: type, given: Any, origin: _Origin) -> Any:
    if given is None:
        return cls()
    if not isinstance(given, Mapping):
        raise _invalid(section, given, "keys and values", origin)
    specs = {spec.name: (spec, hint) for name, spec, hint in _settings() if name == section}
    values = {}
    for name, value in given.items():
        key = f"{section}.{name}"
        if name not in specs:
            raise _unknown(key, origin)
        try:
            values[name] = _convert(value, *specs[name])
        except ValueError as error:
            raise _invalid(key, value, _wanted(*specs[name]), origin) from error
    try:
        return cls(**values)
    except SettingError as error:
        raise _invalid(f"{section}.{error.key}", error.got, error.wanted, origin) from error


def _convert(value: Any, spec: "Field[Any]", hint: Any) -> Any:
    """Convert ``value`` to the type ``hint``; YAML's own types stay apart, so ``steps: 1.5`` is an error."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return None if value is None else _convert(value, spec, args[0])
    if kind is tuple:
        items = value if isinstance(value, list) else [value]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError(value)
        return tuple(_convert(item, spec, args[0]) for item in items)
    if spec.metadata["nbytes"]:
        return parse_nbytes(value)
    choices = args if kind is Literal else ()
    if (value in choices and not isinstance(value, bool)) or type(value) is hint:
        return value
    if type(value) is int and hint in (float, str):
        return hint(value)
    raise ValueError(value)


def _sections() -> dict[str, type]:
    return {name: hint for name, hint in typing.get_type_hints(Recipe).items() if isinstance(hint, type)}


def _settings() -> Iterator[tuple[str, "Field[Any]", Any]]:
    """The section, field and type of every key, in order."""
    for section, cls in _sections().items():
        hints = typing.get_type_hints(cls)
        for spec in fields(cls):
            yield section, spec, hints[spec.name]


def _describe(hint: Any, spec: "Field[Any]") -> str:
    """Describe a type, as in ``size or null``."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return f"{_describe(args[0], spec)} or null"
    if kind is Literal:
        return " | ".join(str(choice) for choice in args)
    if kind is tuple:
        return "list of text" if args[-1] is Ellipsis else f"[{', '.join(_describe(a, spec) for a in args)}]"
    if spec.metadata["nbytes"]:
        return "size"
    return {bool: "true | false", int: "int", float: "float", str: "text"}[hint]


def _wanted(spec: "Field[Any]", hint: Any) -> str:
    kind = _describe(hint, spec).replace("size", "a size such as 8GiB or 512MiB")
    bounds = str(spec.metadata["valid"])
    return kind if not bounds or bounds in kind else f"{kind}, {bounds}"


def _invalid(key: str, got: object, wanted: str, origin: _Origin) -> RecipeError:
    return RecipeError(f"{key} {origin.of(key)}: got {_plain(got)!r}; wanted {wanted}")


def _unknown(key: str, origin: _Origin) -> RecipeError:
    """Suggest the same name in another section, a similar one in this section, or a similar one anywhere."""
    known = [f"{section}.{spec.name}" for section, spec, _ in _settings()]
    if key in _REMOVED:
        return RecipeError(f"{key} {origin.of(key)}: no longer a key; {_REMOVED[key]}")
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}")]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *_sections()], n=1, cutoff=0.6)
    )
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(siblings or _sections())}"
    return RecipeError(f"{key} {origin.of(key)}: unknown key; {hint}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
