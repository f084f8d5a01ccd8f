"""A run as one frozen value, read from YAML and the command line.

:class:`Recipe` composes the config that each part keeps beside itself; this is the only module
that knows OmegaConf. Files say only what differs from the defaults::

    memory: {host: 8GiB, nvme: [/mnt/nvme0, /mnt/nvme1]}
    train: {steps: 1000, dtype: bf16}
"""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from infinity.app.data.config import DataConfig
from infinity.app.models.config import ModelConfig
from infinity.core.config import MemoryConfig, SettingError, Valid, check, setting
from infinity.core.errors import RecipeError
from infinity.core.nbytes import parse_nbytes
from infinity.observe.config import ObserveConfig
from infinity.optim.config import OptimConfig
from infinity.partition.config import PartitionConfig

COMMAND_LINE = "on the command line"
#: Of a type and None, as Python gives them for types and for literals.
_UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, place and seed of a run."""

    dir: str = setting("runs", "where runs keep their folders")
    name: str | None = setting(None, "the run's folder in run.dir; null: date, time and a number")
    seed: int = setting(0, "seed of the weights", valid=Valid(least=0))
    save: bool | None = setting(
        None, "keep the trained model in the run's folder, as model/; null: when model.path is given"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise SettingError("name", self.name, "a folder's name, without /")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

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
    """Adapters beside a frozen base."""

    rank: int | None = setting(
        None, "columns of each adapter's first matrix; null: all weights are trained", valid=Valid(least=1)
    )
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", valid=Valid(above=0))
    target_modules: tuple[str, ...] = setting(
        (), "layers with adapters, as q_proj; none: every linear layer but the head"
    )
    dropout: float = setting(0.0, "dropout before each adapter", valid=Valid(least=0, below=1))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Every field has a default."""

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
            raise SettingError("model.vocab_size", self.model.vocab_size, "at least 256 for bytes")
        if self.train.schedule == "layer" and self.memory.activations == "recompute":
            wanted = "null with train.schedule=layer, which recomputes by itself"
            raise SettingError("memory.activations", "recompute", wanted)
        if self.lora.rank is not None and self.model.path is None:
            raise SettingError("lora.rank", self.lora.rank, "null without model.path, the frozen base")

    def to_yaml(self) -> str:
        """Every key, as YAML that :func:`load_recipe` reads back to an equal recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(asdict(self)))


class Row(NamedTuple):
    """One key of a recipe, for people."""

    key: str
    type: str
    default: str
    meaning: str


def recipe_table() -> tuple[Row, ...]:
    """Every key with type, default and meaning, section by section."""
    default = Recipe()
    rows = []
    for section, name, spec, hint in _settings():
        value = getattr(getattr(default, section), name)
        text = yaml.safe_dump(_plain(value), default_flow_style=True).removesuffix("...\n").strip()
        rows.append(Row(f"{section}.{name}", _describe(hint, spec), text, spec.metadata["help"]))
    return tuple(rows)


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, with ``section.key=value`` overrides on top.

    Args:
        path: None stands for the defaults.
        overrides: As on the command line; values are YAML: ``memory.nvme=[/a,/b]``.

    Raises:
        RecipeError: No such file, not YAML, an unknown key, a wrong type, or a value that is
            impossible; names the key, where it was written, and what is wanted.
    """
    file = "the defaults" if path is None else str(path)
    given = OmegaConf.create() if path is None else _read(Path(path))
    typed = _parse_overrides(overrides)
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(given, typed), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{file}: {str(error).splitlines()[0]}") from error
    overridden = [override.partition("=")[0].strip() for override in overrides]
    return _build(typing.cast("dict[str, Any]", merged), _Origin(file, overridden))


class _Origin(NamedTuple):
    """Where each key was written."""

    file: str
    overridden: Sequence[str]

    def of(self, key: str) -> str:
        """In the file, or on the command line where an override touches ``key``."""
        if any(other == key or other.startswith(f"{key}.") for other in self.overridden):
            return COMMAND_LINE
        return f"in {self.file}"


def _read(path: Path) -> Any:
    """The file as OmegaConf, which resolves ``${train.steps}`` and ``${oc.env:HOME}``."""
    try:
        text = path.read_text("utf-8")
        given = yaml.safe_load(text)
        if given is None:
            return OmegaConf.create()
        if isinstance(given, Mapping):
            return OmegaConf.create(text)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, as in configs/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{path}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {error}") from error
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
                f"{override!r} {COMMAND_LINE}: the value is no YAML; a text with brackets, stars or commas "
                "needs quotes of its own, as in data.files='[\"a[0-9].txt\"]'"
            ) from error
    return OmegaConf.from_dotlist(list(overrides))


def _build(merged: Mapping[str, Any], origin: _Origin) -> Recipe:
    sections = _sections()
    for name, given in merged.items():
        if name not in sections:
            inner = next(iter(given), None) if isinstance(given, Mapping) else None
            raise _unknown(f"{name}.{inner}" if inner else str(name), origin)
    parts = {name: _build_section(name, cls, merged.get(name), origin) for name, cls in sections.items()}
    try:
        return Recipe(**parts)
    except SettingError as error:
        raise _impossible(error.key, error.got, error.wanted, origin) from error


def _build_section(section: str, cls: type, given: Any, origin: _Origin) -> Any:
    if given is None:
        return cls()
    if not isinstance(given, Mapping):
        raise _impossible(section, given, "keys and values", origin)
    hints, specs = typing.get_type_hints(cls), {spec.name: spec for spec in fields(cls)}
    values = {}
    for name, value in given.items():
        key = f"{section}.{name}"
        if name not in specs:
            raise _unknown(key, origin)
        try:
            values[name] = _convert(value, hints[name], specs[name])
        except ValueError as error:
            raise _impossible(key, value, _wanted(hints[name], specs[name]), origin) from error
    try:
        return cls(**values)
    except SettingError as error:
        raise _impossible(f"{section}.{error.key}", error.got, error.wanted, origin) from error


def _convert(value: Any, hint: Any, spec: "Field[Any]") -> Any:
    """``value`` as ``hint``; YAML's own types are kept apart, so ``steps: 1.5`` is an error."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in _UNIONS:
        return None if value is None else _convert(value, args[0], spec)
    if kind is Literal:
        if value in args and not isinstance(value, bool):
            return value
    elif kind is tuple:
        return _convert_tuple(value, args, spec)
    elif spec.metadata["nbytes"]:
        return parse_nbytes(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is str and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    elif type(value) is hint:
        return value
    raise ValueError(value)


def _convert_tuple(value: Any, args: tuple[Any, ...], spec: "Field[Any]") -> tuple[Any, ...]:
    many = args[-1] is Ellipsis
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not many and len(items) != len(args):
        raise ValueError(value)
    return tuple(_convert(item, args[0], spec) for item in items)


def _sections() -> dict[str, type]:
    return {name: hint for name, hint in typing.get_type_hints(Recipe).items() if isinstance(hint, type)}


def _settings() -> Iterator[tuple[str, str, "Field[Any]", Any]]:
    """Section, name, field and type of every key, in order."""
    for section, cls in _sections().items():
        hints = typing.get_type_hints(cls)
        for spec in fields(cls):
            yield section, spec.name, spec, hints[spec.name]


def _describe(hint: Any, spec: "Field[Any]") -> str:
    """A type for people."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in _UNIONS:
        return f"{_describe(args[0], spec)} or null"
    if kind is Literal:
        return " | ".join(str(choice) for choice in args)
    if kind is tuple:
        many = args[-1] is Ellipsis
        return "list of text" if many else "[" + ", ".join(_describe(arg, spec) for arg in args) + "]"
    if spec.metadata["nbytes"]:
        return "size"
    return {bool: "true | false", int: "int", float: "float", str: "text"}[hint]


def _wanted(hint: Any, spec: "Field[Any]") -> str:
    kind = _describe(hint, spec).replace("size", "a size such as 8GiB or 512MiB")
    bounds = str(spec.metadata["valid"])
    return kind if not bounds or bounds in kind else f"{kind}, {bounds}"


def _impossible(key: str, got: object, wanted: str, origin: _Origin) -> RecipeError:
    return RecipeError(f"{key} {origin.of(key)}: got {_plain(got)!r}; wanted {wanted}")


def _unknown(key: str, origin: _Origin) -> RecipeError:
    """Names the nearest valid key: the same name elsewhere, a near one here, a near one anywhere."""
    known = [f"{section}.{name}" for section, name, _, _ in _settings()]
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
