"""A recipe: every setting of a run, checked together, and its table of keys."""

import itertools
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]

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
from infinity.core.errors import RecipeError
from infinity.data.opening import DataConfig
from infinity.data.sources import downloaded
from infinity.engine.executor import EngineConfig
from infinity.observe.sinks import ObserveConfig
from infinity.optim.rules import OptimConfig
from infinity.partition.builder import PartitionConfig
from infinity.recipes.models import ModelConfig
from infinity.recipes.objectives import OBJECTIVES
from infinity.recipes.other_tools import near
from infinity.recipes.text import written
from infinity.shards.journal import DurabilityConfig

#: The longest name of a run (bytes); files and temporary names beside its folder are a little longer.
_NAME_NBYTES = 200
#: Values that are not paths, by setting.
_NO_PATHS = {"files": "stdlib", "eval_files": "stdlib", "tokenizer": "bytes"}
_Sections = TypeVar("_Sections")
#: Keys that ``infinity train`` chooses by a plan, with the value that leaves them to it.
_CHOSEN: dict[str, str | None] = {
    "train.schedule": "auto", "memory.activations": "auto", "memory.resident": "auto",
    "memory.updates": "auto", "partition.tile": "auto", "memory.device": None, "train.group": None,
}  # fmt: skip
#: Sections of which each of several adapters may have keys of its own, and keys that all have in common.
_OF_ADAPTERS, _IN_COMMON = ("data", "lora", "optim"), ("optim.loss_scale", "optim.ema")
_OWN = "keys of its own in sections " + ", ".join(_OF_ADAPTERS)


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

    task: Literal["sft", "pretrain", "dpo", "kto", "reward", "classify"] = setting(
        "sft",
        "what is learned: chats, prompts with completions and texts (sft), every token of them (pretrain), "
        "preferences (dpo), judged completions (kto), a reward model of preferences, or labels of texts",
    )
    beta: float = setting(0.1, "how strongly dpo and kto keep to the reference", Valid(1e-6, 1e6))
    desirable_weight: float = setting(1.0, "kto: weight of desirable completions", Valid(0, 1e6))
    undesirable_weight: float = setting(1.0, "kto: weight of undesirable completions", Valid(0, 1e6))
    steps: int | None = option(
        None, "optimizer steps; null: as train.epochs says, or 1000 without it", Valid(1, 10**9)
    )
    epochs: float | None = option(
        None, "times that the data is gone through, in place of train.steps", Valid(above=0, most=10**6)
    )
    batch_size: int = option(
        8, "sequences per rank and micro-batch; of pairs that are not packed, pairs", Valid(1, 10**6)
    )
    accumulate: int = option(1, "micro-batches per step", Valid(1, 10**6))
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto",
        "compute dtype; states stay exact fp32; auto: bf16 where every rank's device multiplies it fast, "
        "fp16 where that alone is fast (V100), else fp32",
    )
    accumulate_dtype: Literal["fp32", "fp16"] = setting(
        "fp32",
        "dtype in which products of fp16 add up; fp16: twice as fast on a GeForce, with less precision, and "
        "refused where it is no faster",
    )
    device: str | None = option(
        None,
        "where a rank computes, such as cpu or cuda:1; null: on the accelerator with the rank's number, if "
        "there is one",
    )
    eval_every: int | None = option(100, "steps between held-out evaluations; null: never", Valid(1, 10**9))
    evals_per_epoch: float | None = option(
        None,
        "held-out evaluations while the data is gone through once, in place of train.eval_every; null: as "
        "that says",
        Valid(above=0, most=10**6),
    )
    eval_first: bool = option(False, "evaluate before the first step, too")
    eval_batches: int = option(8, "micro-batches per rank in one evaluation", Valid(1, 10**6))
    keep_best: str | None = setting(
        None,
        "keep the model of the best evaluation, by its loss, a metric such as accuracy, or NAME/loss of one "
        "of data.eval_sets; infinity export --best publishes it; null: none",
    )
    patience: int | None = setting(
        None,
        "end training after so many evaluations without a better train.keep_best (null: loss); null: never",
        Valid(1, 10**9),
    )
    sample_every: int | None = option(
        None, "steps between samples, what the model writes after train.sample_prompts", Valid(1, 10**9)
    )
    sample_prompts: str | None = option(
        None,
        "file with a prompt in each line, or (.jsonl) a record with prompt, or with messages, which are "
        "written with the chat template",
        path=True,
    )
    sample_tokens: int = option(64, "tokens that a sample has at most", Valid(1, 10**6))
    schedule: Literal["auto", "step", "layer"] = setting(
        "auto",
        "micro-batches one by one, or all through a block before the next: weights are read twice; auto: the "
        "faster one, where infinity train plans; else step",
    )
    group: int | None = setting(
        None,
        "micro-batches that go through packed experts together with train.schedule=layer, a block's experts "
        "staying in memory.device for the next ones; null: all (infinity train: as many as fit)",
        Valid(1, 10**6),
    )
    stages: bool = setting(
        False,
        "with train.schedule=layer: the ranks of a node compute the blocks in turn, for the micro-batches of "
        "all; a block's weights come to one rank, what it returns goes from rank to rank",
    )
    sequence_ranks: int = option(
        1,
        "neighbouring ranks that divide each sequence, which may be as many times longer, and in attention "
        "its heads (sft, pretrain)",
        Valid(1, 2**16),
    )
    log_every: int = option(1, "steps between lines of progress", Valid(1, 10**9))
    threads: int | None = option(
        None, "compute threads per rank; null: OMP_NUM_THREADS, or cores / local ranks", Valid(1, 1024)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 1000)
        elif self.steps is not None and self.epochs is not None:
            wanted = f"null, since train.steps={self.steps}: one of both (train.steps=null for epochs)"
            raise SettingError("epochs", self.epochs, wanted)
        if self.accumulate_dtype == "fp16" and self.dtype != "fp16":
            wanted = f"fp32 with train.dtype={self.dtype}: only products of fp16 add up in fp16"
            raise SettingError("accumulate_dtype", "fp16", wanted)
        if self.sample_every is not None and self.sample_prompts is None:
            wanted = f"a file of prompts, since train.sample_every={self.sample_every}"
            raise SettingError("sample_prompts", None, wanted)
        if self.stages and (self.schedule != "layer" or self.sequence_ranks > 1):
            raise SettingError("stages", True, "false, or train.schedule=layer and train.sequence_ranks=1")
        if self.sequence_ranks > 1:
            if OBJECTIVES[self.task].losses is not None:
                wanted = f"1 with train.task={self.task}, which compares or labels whole documents"
                raise SettingError("sequence_ranks", self.sequence_ranks, wanted)
            if self.sample_every is not None:
                wanted = (
                    f"null with train.sequence_ranks={self.sequence_ranks}, with which nothing is generated"
                )
                raise SettingError("sample_every", self.sample_every, wanted)


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
        for name, part in sections_of(Recipe).items():
            if not isinstance(given := getattr(self, name), part):
                raise SettingError(name, given, f"a {part.__name__}, as of infinity.load_recipe")
        if self.adapters:  # then what has to be true is true of each alone
            object.__setattr__(self, "adapters", dict(self._checked_adapters()))
            return
        if self.data.tokenizer in (None, "bytes") and self.model.path is None and self.model.vocab_size < 256:
            raise SettingError(
                "model.vocab_size", self.model.vocab_size, "at least 256 for the bytes tokenizer"
            )
        if self.data.streaming and OBJECTIVES[self.train.task].reference:
            wanted = f"false: the reference of train.task={self.train.task} is computed for all data at first"
            raise SettingError("data.streaming", True, wanted)
        for name in ("rank", "adapter"):
            value = getattr(self.lora, name)
            if value is not None and self.model.path is None:
                raise SettingError(f"lora.{name}", value, "null without model.path, the frozen base")
        if self.optim.groups and self.lora.active:
            wanted = "null with adapters, of which lora.lr_ratio makes groups"
            raise SettingError("optim.groups", self.optim.groups, wanted)
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
        return _by_section({key: self.value(key) for key in keys})

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
    def steps(self) -> int:
        """Return ``train.steps``; RecipeError: they follow from ``train.epochs`` once the data is open."""
        if self.train.steps is None:
            raise RecipeError(f"train.epochs={self.train.epochs:g}: the data says how many steps those are")
        return self.train.steps

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step, those of all tasks."""
        return self.train.accumulate * max(1, len(self.adapters))

    @property
    def packing(self) -> bool | None:
        """Return ``data.packing`` of the task that packs most."""
        given = [task.data.packing for task in self.tasks.values()]
        examples = OBJECTIVES[self.train.task].data
        if examples.documents:
            return not examples.whole and given != [False] * len(given)
        return True if True in given else False if False in given else None

    @property
    def rows(self) -> int:
        """Return the sequences of a micro-batch on a rank: of pairs that are not packed, both documents."""
        examples = OBJECTIVES[self.train.task].data
        return self.train.batch_size * (1 if self.packing else max(1, examples.documents))

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a rank, with padding."""
        return self.rows * (self.model.seq_len // self.train.sequence_ranks)

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
            memory=self.memory, partition=self.partition, durability=self.durability, dtype=self.train.dtype,
            accumulate_dtype=self.train.accumulate_dtype, device=self.train.device, rule=self.optim.rule.name,
            loss_scale=self.optim.loss_scale, run_name=self.run.name, resume=self.run.resume,
            timeline=self.observe.timeline, layer_schedule=self.train.schedule == "layer",
            stages=self.train.stages,
        )  # fmt: skip

    def value(self, key: str) -> Any:
        """Return the value of a key such as ``train.steps``."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    @property
    def left_open(self) -> frozenset[str]:
        """Return the keys that ``infinity train`` may choose, since the recipe says ``auto``."""
        needless = {"train.group"} if self.train.schedule == "step" else set()
        return frozenset(key for key, value in _CHOSEN.items() if self.value(key) == value) - needless

    def as_without_plan(self) -> "Recipe":
        """Return the recipe with the schedule that ``auto`` stands for where nothing is planned."""
        layer = self.train.schedule == "layer"
        return self if layer else with_values(self, {"train.schedule": "step", "train.group": None})

    def with_absolute_paths(self) -> "Recipe":
        """Return the same recipe with absolute paths, where a recipe can have them; ``run.dir`` stays."""
        recipe = self
        for key, each in keys_of(Recipe).items():
            if each.path and key != "run.dir":
                with suppress(SettingError, OSError):
                    recipe = with_values(recipe, {key: _absolute(self.value(key), each.name)})
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
        return written(given)


def _absolute(value: Any, setting: str) -> Any:
    """Return absolute paths, without ``..`` at the beginning; inside, one may follow a link."""
    if isinstance(value, tuple):
        return tuple(_absolute(each, setting) for each in value)
    if isinstance(value, Mapping):
        return {name: _absolute(each, setting) for name, each in value.items()}
    if value is None or value == _NO_PATHS.get(setting):
        return value
    path = Path(value)
    if not path.is_absolute() and not (setting in _NO_PATHS and downloaded(path)):
        base = Path.cwd()  # has no links
        while path.parts[:1] == ("..",):
            path, base = Path(*path.parts[1:]), base.parent
        path = base / path
    return str(path)


#: Numbers of ``optim`` that do not depend on the update rule.
_OF_EVERY_RULE = {"optim.max_grad_norm", "optim.loss_scale"}


def changed_numbers(before: Recipe, now: Recipe) -> list[str]:
    """Describe each differing key that changes a run's numbers; ``auto`` now is what it was before.

    Another update rule, master or average has numbers of its own, and a schedule that suits it.
    """
    tasks = [recipe.with_absolute_paths().tasks for recipe in (before, now)]
    names = [", ".join(each) or "none" for each in tasks]
    if names[0] != names[1]:  # their order, too, is that of what lies on the drives
        return [f"adapters were {names[0]}, are {names[1]}"]
    changes: dict[str, list[str]] = {}  # with the names of tasks
    numeric = [key for key, each in keys_of(Recipe).items() if each.numeric]
    if before.optim.rule.name != now.optim.rule.name:
        numeric = [key for key in numeric if not key.startswith("optim.") or key in _OF_EVERY_RULE]
    for name, key in itertools.product(tasks[0], numeric):
        was, got = (plain(recipes[name].value(key)) for recipes in tasks)
        if was != got and got != "auto":
            text = f"{key} was {shown(was)}, is {shown(got)}"
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
    keys = {key for key, each in keys_of(Recipe).items() if each.numeric} | _CHOSEN.keys()
    kept = {key: before.value(key) for key in keys if now.value(key) == "auto"}
    return with_values(now, kept | {key: chosen[key] for key in now.left_open & chosen.keys()})


def with_values(given: _Sections, values: Mapping[str, Any]) -> _Sections:
    """Return a dataclass of sections with other values of keys, all at once: some go together only."""
    changes: Any = {}
    for name, new in _by_section(values).items():
        try:
            changes[name] = replace(getattr(given, name), **new)
        except SettingError as error:
            raise SettingError(f"{name}.{error.key}", error.got, error.wanted) from error
    return replace(given, **changes)  # type: ignore[type-var]


def _by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        found.setdefault(section, {})[name] = value
    return found


def _flat(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return values by key, such as ``train.steps``."""
    return {f"{section}.{name}": value for section, values in given.items() for name, value in values.items()}


def _own_keys(where: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all that an adapter has of its own; SettingError: it cannot have that."""
    known = [key for key in keys_of(Recipe) if key.partition(".")[0] in _OF_ADAPTERS]
    for section, values in ({"": given} if not isinstance(given, Mapping) else given).items():
        if section in sections_of(Recipe) and section not in _OF_ADAPTERS:
            raise SettingError(f"{where}.{section}", values, f"{_OWN}; all adapters of a run share {section}")
        if section in _OF_ADAPTERS and values is None:
            continue
        if section not in _OF_ADAPTERS or not isinstance(values, Mapping):
            hint = near(section, known, _OF_ADAPTERS)
            wanted = "keys and values" if section in _OF_ADAPTERS else _OWN + (hint and f"; {hint}")
            raise SettingError(f"{where}.{section}".removesuffix("."), values, wanted)
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in known:
                hint = near(key, known, ()) or f"known: {', '.join(known)}"
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
    for key, each in keys_of(Recipe).items():
        text = yaml.safe_dump(plain(default.value(key)), default_flow_style=True)
        rows.append(Row(key, str(each), text.removesuffix("...\n").strip(), each.help))
    meaning = "several adapters on one base: what each has of its own, as adapters.NAME.optim.lr=1e-4"
    return *rows, Row("adapters", f"map from names to {_OWN}", "{}", meaning)


def keys_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a dataclass of sections, in order, by keys such as ``train.steps``."""
    parts = sections_of(cls).items()
    return {f"{section}.{each.name}": each for section, part in parts for each in settings_of(part)}


def sections_of(cls: type) -> dict[str, type]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if isinstance(hint, type)}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
