"""Recipes: the configuration of a run, read from a YAML file and the command line.

:class:`Recipe` is composed of the configs that live beside the parts they configure. A file lists
only what differs from the defaults::

    memory: {host: 8GiB, nvme: [/mnt/nvme0, /mnt/nvme1]}
    train: {steps: 1000, dtype: bf16}

OmegaConf parses files and overrides and resolves ``${...}``; this is the only module that imports it.
Types are checked by the configs (:mod:`infinity.core.config`), because OmegaConf's structured configs convert
what should be an error (``1`` to ``true``, ``1.5`` to text), know no sizes such as ``8GiB``, and cannot say
which file or argument a value came from.
"""

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from infinity.api.portable import CheckpointConfig
from infinity.core.config import (
    MemoryConfig,
    SettingError,
    Valid,
    check,
    describe,
    setting,
    settings_of,
    shown,
)
from infinity.core.errors import RecipeError, first_line
from infinity.core.files import read_file, user_path
from infinity.engine.config import Dtype, EngineConfig
from infinity.observe.metrics import ObserveConfig
from infinity.optim.rules import OptimConfig
from infinity.partition.builder import PartitionConfig
from infinity.recipes.data.loader import DataConfig
from infinity.recipes.models.causal import ModelConfig
from infinity.shards.store import DurabilityConfig

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


def translate(given: Mapping[str, Any]) -> str | None:
    """Say where a recipe has what ``given``, a configuration of another tool, says; None if of none known."""
    tool = next((tool for tool, marks in _MARKS.items() if marks & given.keys()), None)
    if tool is None:
        return None
    keys_at: dict[str, list[str]] = {}
    for key, place in _PLACES.items():
        section, _, name = key.partition(".")
        inner = given.get(section)
        if section in given and (not name or (isinstance(inner, Mapping) and name in inner)):
            keys_at.setdefault(place, []).append(key)
    places = "; ".join(f"{', '.join(keys)} -> {place}" for place, keys in keys_at.items())
    return f"this is a configuration of {tool}, not a recipe, which says it so: {places}"


COMMAND_LINE = "on the command line"
#: The longest recipe that is read; one with every key has 5 kB.
_MOST_NBYTES = 2**20
#: What YAML may contain: tags, levels, and values with those that aliases repeat.
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value"}
_MOST_LEVELS, _MOST_VALUES = 16, 100_000
_MOST_PROBLEM_CHARS = 300
#: The longest name of a run (bytes); files and temporary names beside its folder are a little longer.
_NAME_NBYTES = 200
#: What names something else than a path, by setting.
_NO_PATHS = {"files": "stdlib", "eval_files": "stdlib", "tokenizer": "bytes"}
_Sections = TypeVar("_Sections")
#: Removed keys, and what to do about each.
_REMOVED = {
    "optim.compile": "updates are always compiled (by numba, which needs no C++ compiler); drop the key",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, directory and seed of a run."""

    dir: str = setting("runs", "directory of the run folders", path=True, numeric=False)
    name: str | None = setting(
        None, "name of the run's folder in run.dir; null: date, time and process id", numeric=False
    )
    resume: Literal["auto", "never", "must"] = setting(
        "auto",
        "go on with an interrupted run of this name; never: begin one of which nothing is kept; must: an "
        "error if there is none",
        numeric=False,
        valid=Valid(choices=("auto", "never", "must")),
    )
    seed: int = setting(0, "seed of the initial weights", valid=Valid(least=0, most=2**63 - 1))
    save: bool | None = setting(
        None,
        "save the trained model in the run's folder, as model/; null: if model.path is given",
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)
        name = self.name
        if name is not None and (
            name in ("", ".", "..")
            or "/" in name
            or name.startswith("-")  # which commands take for an option
            or not name.isprintable()
            or len(name.encode()) > _NAME_NBYTES
        ):
            wanted = f"a printable folder name without / and no - in front, of at most {_NAME_NBYTES} bytes"
            raise SettingError("name", name, wanted)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    steps: int = setting(1000, "optimizer steps", valid=Valid(least=1, most=10**9), numeric=False)
    batch_size: int = setting(
        8, "sequences per rank and micro-batch", valid=Valid(least=1, most=10**6), numeric=False
    )
    accumulate: int = setting(1, "micro-batches per step", valid=Valid(least=1, most=10**6), numeric=False)
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto",
        "compute dtype; states stay exact fp32; auto: bf16 where every rank's device multiplies it fast, "
        "else fp32",
        valid=Valid(choices=("auto", "bf16", "fp16", "fp32")),
    )
    device: str | None = setting(
        None,
        "where a rank computes, such as cpu or cuda:1; null: on the accelerator with the rank's number, if "
        "there is one",
        numeric=False,
    )
    eval_every: int | None = setting(
        100,
        "steps between held-out evaluations; null: never",
        valid=Valid(least=1, most=10**9),
        numeric=False,
    )
    eval_first: bool = setting(False, "evaluate before the first step, too", numeric=False)
    eval_batches: int = setting(
        8, "micro-batches per rank in one evaluation", valid=Valid(least=1, most=10**6), numeric=False
    )
    schedule: Literal["step", "layer"] = setting(
        "step",
        "micro-batches one by one, or all through a block before the next: weights are read twice",
        valid=Valid(choices=("step", "layer")),
    )
    log_every: int = setting(
        1, "steps between lines of progress", valid=Valid(least=1, most=10**9), numeric=False
    )
    threads: int | None = setting(
        None,
        "compute threads per rank; null: cores / local ranks",
        valid=Valid(least=1, most=1024),
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters on a frozen base model."""

    rank: int | None = setting(
        None, "rank of each adapter; null: train all weights", valid=Valid(least=1, most=2**16)
    )
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", valid=Valid(least=1e-6, most=10**6))
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
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        if self.data.tokenizer in (None, "bytes") and self.model.path is None and self.model.vocab_size < 256:
            raise SettingError(
                "model.vocab_size", self.model.vocab_size, "at least 256 for the bytes tokenizer"
            )
        activations = self.memory.activations
        if self.train.schedule == "layer" and activations in ("recompute", "offload"):
            wanted = "null with train.schedule=layer, which recomputes by itself and holds what blocks return"
            raise SettingError("memory.activations", activations, wanted)
        if self.lora.rank is not None and self.model.path is None:
            raise SettingError("lora.rank", self.lora.rank, "null without model.path, the frozen base")

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
        """Return the same recipe with the compute dtype that was chosen for ``auto``."""
        return replace(self, train=replace(self.train, dtype=dtype))

    def with_absolute_paths(self) -> "Recipe":
        """Return the same recipe with paths that are found from any directory; ``run.dir`` stays.

        So do all where no recipe can have the name of the current directory, or that is gone.
        """
        changed: dict[str, Any] = {}
        for section, spec, _ in _settings(Recipe):
            if spec.metadata["path"] and (section, spec.name) != ("run", "dir"):
                config = changed.get(section, getattr(self, section))
                with suppress(SettingError, OSError):
                    value = _absolute(getattr(config, spec.name), spec.name)
                    changed[section] = replace(config, **{spec.name: value})
        return replace(self, **changed)

    def to_yaml(self) -> str:
        """Return every key as YAML, which :func:`load_recipe` reads back to an equal recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(asdict(self)))


def _absolute(value: Any, setting: str) -> Any:
    """Return the path, or paths, without ``..`` at its beginning; inside, one may follow a link."""
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
    """Describe each key that changes a run's numbers and differs; the dtype ``auto`` is what was chosen."""
    changes = []
    before, now = before.with_absolute_paths(), now.with_absolute_paths()
    for section, spec, _ in _settings(Recipe):
        was, got = (_plain(getattr(getattr(each, section), spec.name)) for each in (before, now))
        chosen = (section, spec.name, got) == ("train", "dtype", "auto")
        if spec.metadata["numeric"] and was != got and not chosen:
            changes.append(f"{section}.{spec.name} was {shown(was)}, is {shown(got)}")
    return changes


class Row(NamedTuple):
    """One key in the table of ``infinity recipe``."""

    key: str
    type: str  # and range
    default: str
    meaning: str


def recipe_table() -> tuple[Row, ...]:
    """Return every key with its type and range, default and meaning, section by section."""
    default = Recipe()
    rows = []
    for section, spec, hint in _settings(Recipe):
        value = _plain(getattr(getattr(default, section), spec.name))
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        rows.append(Row(f"{section}.{spec.name}", describe(spec, hint), text, spec.metadata["help"]))
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
    return load_sections(Recipe, path, overrides)


def load_sections(cls: type[_Sections], path: str | Path | None, overrides: Sequence[str] = ()) -> _Sections:
    """Load a dataclass whose fields are sections; arguments and errors as :func:`load_recipe`."""
    file = "the defaults" if path is None else str(path)
    given = {} if path is None else _read(user_path(path, "the recipe"), cls)
    origin = _Origin(file, [override.partition("=")[0].strip() for override in overrides])
    for override in overrides:
        _put(given, override, origin)
    return _build(_resolve(given, origin), origin, cls)


class _Origin(NamedTuple):
    """Where each key was written."""

    file: str
    overridden: Sequence[str]

    def of(self, key: str) -> str:
        """``on the command line`` if an override sets ``key``, else the file."""
        if any(other == key or other.startswith(f"{key}.") for other in self.overridden):
            return COMMAND_LINE
        return f"in {self.file}"


# --- text to plain values ------------------------------------------------------------------------


def _read(path: Path, cls: type) -> dict[str, Any]:
    """Read the sections of a file, in which references are not resolved."""
    try:
        given = _parse(read_file(path, _MOST_NBYTES).decode("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; give the path of a recipe, as in configs/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except _YamlError as error:
        raise RecipeError(f"{path}{error.line}: not valid YAML: {error}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RecipeError(f"{path}: got {shown(given)}; wanted sections: {', '.join(_sections(cls))}")
    return given


def _put(given: dict[str, Any], override: str, origin: _Origin) -> None:
    """Put the value of ``section.key=value`` into its section of ``given``."""
    key, equals, text = override.partition("=")
    section, *names = key.strip().split(".")
    if not (equals and section and names and all(names)):
        raise RecipeError(f"{shown(override)} {COMMAND_LINE}: wanted section.key=value, as in train.steps=10")
    try:
        override.encode()
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"{override!a} {COMMAND_LINE}: not text in the locale's encoding; set PYTHONUTF8=1"
        ) from error
    try:
        value = _parse(text)
    except _YamlError as error:
        raise RecipeError(
            f"{shown(override)} {COMMAND_LINE}: the value is not valid YAML: {error}; quote text that "
            "contains brackets, stars or commas, as in data.files='[\"a[0-9].txt\"]'"
        ) from error
    if given.get(section) is None:
        given[section] = {}
    inside = given[section]
    if not isinstance(inside, dict):
        raise _invalid(section, inside, "keys and values", _Origin(origin.file, ()))
    name, *below = names
    for each in reversed(below):  # of a key that has no keys: the error shows them
        value = {each: value}
    inside[name] = value


class _YamlError(ValueError):
    """Text is not YAML, or more than a recipe may be; ``line`` is where, as in ``:3``, or empty."""

    def __init__(self, problem: object, line: str = "") -> None:
        super().__init__(str(problem)[:_MOST_PROBLEM_CHARS])
        self.line = line


def _parse(text: str) -> Any:
    """Parse YAML as OmegaConf does, into plain values; ``${...}`` stays.

    Raises:
        _YamlError: See there.
    """
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.to_container(parsed, resolve=False)["value"]  # type: ignore[call-overload, index]
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise _YamlError(problem or error, f":{mark.line + 1}" if mark else "") from error
    except RecursionError as error:
        raise _YamlError(f"nested deeper than {_MOST_LEVELS} levels") from error
    except Exception as error:  # parsers raise many types: ValueError of numbers and dates, those of ${
        key = str(getattr(error, "full_key", None) or "").removeprefix("value").removeprefix(".")
        reason = first_line(error)
        raise _YamlError(f"{key}: {reason}" if key else reason) from error


def _check_nodes(root: Any) -> None:
    """Check that YAML has only what a recipe may have, and not more, before values are made of it.

    Aliases count as often as they are used: a few lines of them may stand for billions of values.
    """
    left, count = [(root, 0)] if root is not None else [], 0
    while left:
        node, level = left.pop()
        count += 1
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if level > _MOST_LEVELS:
            raise _marked(node, f"nested deeper than {_MOST_LEVELS} levels")
        if count > _MOST_VALUES:
            raise _marked(node, f"more than {_MOST_VALUES} values")
        if kind not in _KINDS:
            raise _marked(node, f"wanted text, numbers, true, false, null, lists and keys; got {kind[:50]}")
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "merge"):
                    got = shown(key.value) if isinstance(key, yaml.ScalarNode) else "a list, or keys"
                    raise _marked(key, f"wanted the name of a key; got {got}")
                left.append((value, level + 1))
        elif isinstance(node, yaml.SequenceNode):
            left += [(item, level + 1) for item in node.value]


def _marked(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _resolve(given: Mapping[str, Any], origin: _Origin) -> dict[str, Any]:
    """Resolve references such as ``${train.steps}`` and ``${oc.env:HOME}``."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(given)), resolve=True)
    except Exception as error:  # a reference may name a resolver, which may raise any type
        key = getattr(error, "full_key", None)
        where = f"{key} {origin.of(str(key))}" if key else origin.file
        reason = first_line(error)
        raise RecipeError(f"{where}: {reason[:_MOST_PROBLEM_CHARS]}") from error
    return typing.cast("dict[str, Any]", resolved)


# --- plain values to a recipe --------------------------------------------------------------------


def _build(merged: Mapping[str, Any], origin: _Origin, cls: type[_Sections]) -> _Sections:
    sections = _sections(cls)
    if cls is Recipe and (translation := translate(merged)):
        raise RecipeError(f"{origin.file}: {translation}")
    for name, given in merged.items():
        if name not in sections:
            inner = next(iter(given), None) if isinstance(given, Mapping) else None
            raise _unknown(f"{name}.{inner}" if inner else str(name), origin, cls)
    parts = {
        name: _build_section(name, part, merged.get(name), origin, cls) for name, part in sections.items()
    }
    try:
        return cls(**parts)
    except SettingError as error:
        raise _invalid(error.key, error.got, error.wanted, origin) from error


def _build_section(section: str, cls: type, given: Any, origin: _Origin, whole: type) -> Any:
    if given is None:
        return cls()
    if not isinstance(given, Mapping):
        raise _invalid(section, given, "keys and values", origin)
    known = {spec.name for spec, _ in settings_of(cls)}
    for name in given:
        if name not in known:
            raise _unknown(f"{section}.{name}", origin, whole)
    try:
        return cls(**given)
    except SettingError as error:
        raise _invalid(f"{section}.{error.key}", error.got, error.wanted, origin) from error


def _sections(cls: type) -> dict[str, type]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if isinstance(hint, type)}


def _settings(cls: type = Recipe) -> Iterator[tuple[str, "Field[Any]", Any]]:
    """The section, field and type of every key, in order."""
    for section, part in _sections(cls).items():
        for spec, hint in settings_of(part):
            yield section, spec, hint


def _invalid(key: str, got: object, wanted: str, origin: _Origin) -> RecipeError:
    words = "null" if got is None else str(got).lower() if isinstance(got, bool) else shown(_plain(got))
    return RecipeError(f"{key} {origin.of(key)}: got {words}; wanted {wanted}")


def _unknown(key: str, origin: _Origin, cls: type) -> RecipeError:
    """Suggest the same name in another section, a similar one in this section, or a similar one anywhere."""
    known = [f"{section}.{spec.name}" for section, spec, _ in _settings(cls)]
    if key in _REMOVED:
        return RecipeError(f"{key} {origin.of(key)}: no longer a key; {_REMOVED[key]}")
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}")]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *_sections(cls)], n=1, cutoff=0.6)
    )
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(siblings or _sections(cls))}"
    return RecipeError(f"{key} {origin.of(key)}: unknown key; {hint}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
