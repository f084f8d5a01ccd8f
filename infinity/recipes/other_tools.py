"""Configuration files of other tools as recipes: for each tool rows from its keys to a recipe's.

A row says which key of a recipe has the same meaning, and how the value is converted; or that nothing has to
be said here (``Needless``), or that nothing can be (``Missing``), and why. It covers the keys below its own.
Rows are in ``other_tools.yaml``; values are converted by the recipe's key, in every tool alike, or by what
else a key means (``_MEANINGS``). The same rows give the hint in an error about an unknown key of a recipe.
"""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

import yaml  # type: ignore[import-untyped]

from infinity.core.config import SettingError
from infinity.optim.rules import known_rule


class Needless(NamedTuple):
    """A key that a recipe does not need."""

    why: str


class Missing(NamedTuple):
    """A key, or a value of it, that no recipe can say."""

    why: str


UNKNOWN = Missing("no key here has this meaning")
Values: TypeAlias = dict[str, Any]
#: Gives a value of a recipe's key, or several by their keys.
Convert: TypeAlias = Callable[[Any], Any]


class To(NamedTuple):
    """A recipe's key, and its value; for several keys it is the nearest one, and the values are by key."""

    key: str
    convert: Convert = lambda value: value


Row: TypeAlias = To | Needless | Missing

_SINKS = "tensorboard", "wandb", "mlflow"
_TRACKERS = Missing("what there is: observe.tensorboard, observe.wandb and observe.mlflow")


def _among(key: str, accepted: str, **known: str) -> Convert:
    """Return what takes the names of ``accepted``, and those that are ``known`` for one of them."""

    def convert(name: Any) -> Any:
        found = known.get(str(name).lower().rpartition(".")[2], name)
        if found in accepted.split():
            return found
        return Missing(f"{key} is one of {', '.join(accepted.split())}, not {name}")

    return convert


def _optimizer(name: Any) -> Any:
    try:
        return known_rule(str(name)).name
    except SettingError as error:
        return Missing(f"optim.name: got {name}; wanted {error.wanted}")


def _dtype(name: str) -> Convert:
    return lambda on: "auto" if on == "auto" else name if _is_on(on) else {}


def _seed(seed: Any) -> Values:
    return {"run.seed": seed, "data.seed": seed}


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", True) if isinstance(value, Mapping) else value)


def _positive(value: Any) -> Any:
    """Return a count, of which 0 and less mean none."""
    return value if isinstance(value, int | float) and value > 0 else {}


def _warmup(value: Any) -> Any:
    return {"optim.warmup_ratio": value} if isinstance(value, float) and 0 < value < 1 else int(value)


def _steps(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return f"{value} steps"
    return Missing("checkpoint.every takes steps or a time, such as '500 steps' or 2h") if value else {}


def _every(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return value
    return Missing("it is a number of steps here") if value else {}


def _texts(value: Any) -> Any:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return {} if names in (["all"], ["all-linear"], None) else names


def _fraction(value: Any) -> Any:
    if isinstance(value, int | float) and 0 <= value < 1:
        return float(value)
    return Missing("data.eval_fraction is a share of the data, not a number of rows")


def _reports(value: Any) -> Any:
    names = {value} if isinstance(value, str) else set(value or ())
    if names - {*_SINKS, "none"}:
        return _TRACKERS
    return {f"observe.{name}": True for name in _SINKS if name in names}


def _tracker(sink: str, variable: str) -> To:
    """Return the row of a project's name, which the tracker takes from the environment."""
    key = f"observe.{sink}"
    return To(
        key,
        lambda name: {key: True, "_said": {"": Missing(f"set {variable}={name} in the environment")}},
    )


def _axolotl_data(key: str) -> Convert:
    """Return what converts a list of data sets, each with a path and a type."""

    def convert(given: Any) -> Any:
        files, formats, fields, said = list[str](), set[str](), dict[str, str](), dict[str, Row]()
        for each in given if isinstance(given, list) else [given]:
            each = {"path": each} if isinstance(each, str) else dict(each)
            path, found = each.pop("path", None), each.pop("data_files", None)
            files += [name] if isinstance(name := found or path, str) else list(name or ())
            if isinstance(kind := each.pop("type", None), Mapping):  # of a prompt of its own the columns
                each, kind = each | dict(kind), "alpaca"
            formats.add(_AXOLOTL_TYPES.get(str(kind).partition(".")[0], "auto"))
            columns = {name: each.pop(name, None) for name in _AXOLOTL_FIELDS}
            fields |= {_AXOLOTL_FIELDS[name]: column for name, column in columns.items() if column}
            left = [name for name, value in each.items() if value and (name, value) != ("split", "train")]
            said |= {name: _OF_A_DATA_SET.get(name, UNKNOWN) for name in left}
        changed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
        values: Values = {key: files, "_said": said}
        if key == "data.files":  # which says it for all data
            values |= {"data.fields": changed} if changed else {}
            values |= {"data.format": formats.pop()} if len(formats) == 1 else {}
        return values

    return convert


SPLIT = Missing("files are read whole: give those of this part")
#: What is beside the path, the type and the columns of a data set.
_OF_A_DATA_SET: dict[str, "Row"] = {
    "split": SPLIT,
    "ds_type": Needless("the suffix of a file says how it is read"),
    "chat_template": Needless("chats are rendered with the checkpoint's own template"),
}


_AXOLOTL_TYPES = {"alpaca": "alpaca", "alpaca_chat": "alpaca", "sharegpt": "sharegpt", "completion": "text"}
_AXOLOTL_FIELDS = {
    "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_system": "system", "field_messages": "messages", "field": "text",
}  # fmt: skip


def _bits(bits: Any) -> Any:
    return {"_stored_as": {4: "nf4", 8: "int8"}[bits]} if bits in (4, 8) else Missing("4 or 8")


def _finetuning(name: Any) -> Any:
    return {"_lora": name == "lora"} if name in ("lora", "full") else Missing("lora or all weights")


#: Columns of torchtune's input and output data, and its names of layers.
_OF_TUNE, _LAYERS = {"input": "prompt", "output": "completion"}, {"output_proj": "o_proj"}

#: What keys of tools mean, where values are converted: a recipe's key, or (with _ in front) something else.
_MEANINGS: dict[str, To] = {
    **{each.key: each for each in (
        To("checkpoint.every", _steps), To("data.eval_files", _texts),
        To("data.eval_fraction", _fraction), To("data.files", _texts), To("data.packing", bool),
        To("data.weights", lambda text: [float(each) for each in str(text).split(",")] if text else {}),
        To("lora.modules_to_save", _texts), To("lora.target_modules", _texts), To("memory.nvme", _texts),
        To("observe.mlflow", _is_on), To("observe.tensorboard", _is_on), To("observe.wandb", _is_on),
        To("optim.max_grad_norm", lambda norm: norm or None),  # 0 never clips
        To("optim.name", _optimizer), To("optim.warmup_steps", _warmup), To("run.seed", _seed),
        To("train.device", lambda name: name if name == "cpu" else {}), To("train.epochs", _positive),
        To("train.eval_every", _every), To("train.evals_per_epoch", _positive),
        To("train.keep_best", lambda name: str(name).removeprefix("eval_")), To("train.log_every", _every),
        To("train.patience", _positive), To("train.steps", _positive),
        To("optim.schedule", _among(
            "optim.schedule", "constant cosine linear", constant_with_warmup="constant", warmuplr="constant",
            warmupdecaylr="linear", cosine_with_min_lr="cosine", warmupcosinelr="cosine",
            cosineannealinglr="cosine", get_cosine_schedule_with_warmup="cosine",
        )),
        To("partition.reduce_dtype", lambda name: "fp32" if name in ("fp32", "float32") else "compute"),
        To("train.dtype", _among(
            "train.dtype", "bf16 fp16 fp32", no="fp32", bfloat16="bf16", float16="fp16", float32="fp32"
        )),
        To("train.task", _among("train.task", "sft pretrain dpo kto reward", pt="pretrain", rm="reward")),
    )},
    "_4bit": To("model.stored_as", lambda on: {"_stored_as": "nf4"} if on else {}),
    "_8bit": To("model.stored_as", lambda on: {"_stored_as": "int8"} if on else {}),
    # DeepSpeed's Adam decouples the decay, too
    "_adam": To("optim.name", lambda name: _optimizer("adamw" if str(name).lower() == "adam" else name)),
    "_adapter": To(
        "", lambda name: {"_lora": bool(name)} | ({"_stored_as": "nf4"} if name == "qlora" else {})
    ),
    "_all_linear": To("lora.target_modules", lambda on: {"_linear": bool(on)}),
    "_all_tokens": To("train.task", lambda on: "pretrain" if on else {}),
    "_attention": To("lora.target_modules", lambda names: [_LAYERS.get(name, name) for name in names]),
    "_best": To("train.keep_best", lambda on: "loss" if on else {}),
    "_beta1": To("optim.betas", lambda beta: {"_beta1": beta}),
    "_beta2": To("optim.betas", lambda beta: {"_beta2": beta}),
    "_bf16": To("train.dtype", _dtype("bf16")),
    "_bits": To("model.stored_as", _bits),
    "_columns": To("data.fields", lambda names: {_OF_TUNE.get(k, k): v for k, v in names.items()}),
    "_cpu": To("train.device", lambda on: "cpu" if on else {}),
    "_data": To("data.files", _axolotl_data("data.files")),
    "_eval": To("", lambda name: {"_eval": name}),
    "_eval_data": To("data.eval_files", _axolotl_data("data.eval_files")),
    "_finetuning": To("", _finetuning),
    "_fp16": To("train.dtype", _dtype("fp16")),
    "_keep": To("checkpoint.keep", _positive),
    "_lora_rank": To("lora.rank", lambda rank: {"lora.rank": rank, "_lora": True}),
    "_loss_scale": To("optim.loss_scale", lambda power: 2.0**power),
    "_mlflow": _tracker("mlflow", "MLFLOW_EXPERIMENT_NAME"),
    "_momentum": To("optim.options", lambda momentum: {"optim.options": {"momentum": momentum}}),
    "_muon": To("optim.name", lambda on: {"_rule": "muon"} if on else {}),  # whatever optim says
    "_names": To("data.files", lambda names: {"_names": _texts(names)}),
    "_names_in": To("data.files", lambda folder: {"_names_in": folder}),
    "_neat_packing": To("data.packing", lambda on: True if on else {}),
    "_preference": To(
        "",
        lambda name: Needless("it is that of dpo") if name == "sigmoid" else Missing("dpo has the sigmoid"),
    ),
    "_reports": To("observe.tensorboard", _reports),
    "_reward": To("train.task", lambda on: "reward" if on else {}),
    "_save": To("", lambda name: {"_save": name}),
    "_source": To("data.files", lambda name: {} if name in ("json", "csv", "parquet") else [name]),
    "_split": To("", lambda part: {} if part == "train" else SPLIT),
    "_wandb": _tracker("wandb", "WANDB_PROJECT"),
}  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A tool's rows, keys that only its files have, and what its defaults are where a recipe's differ."""

    marks: frozenset[str] = frozenset()
    rows: Mapping[str, Row] = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)


@functools.cache
def tools() -> Mapping[str, Tool]:
    """Return the tools of ``other_tools.yaml`` by their names.

    A file has one of a tool's marks; of several tools, it is that of which it has the most keys.
    """
    given = yaml.safe_load(files("infinity.recipes").joinpath("other_tools.yaml").read_text("utf-8"))
    reasons, found = given.pop("reasons"), {"": Tool()}
    for name, each in given.items():
        base = found[each.get("as", "")]
        rows: dict[str, Row] = {
            key: _MEANINGS.get(ours) or To(ours) for key, ours in each.get("to", {}).items()
        }
        for kind in (Needless, Missing):
            for why, keys in each.get(kind.__name__.lower(), {}).items():
                rows |= dict.fromkeys(keys.split(), kind(reasons.get(why, why)))
        defaults = base.defaults | each.get("defaults", {})
        found[name] = Tool(frozenset(each.get("marks", ())), {**base.rows, **rows}, defaults)
    return {name: tool for name, tool in found.items() if tool.marks}


@functools.cache
def known_as() -> Mapping[str, str]:
    """Return the key of a recipe by its name in any tool."""
    rows = (item for tool in tools().values() for item in tool.rows.items())
    return {name.rpartition(".")[2]: row.key for name, row in rows if isinstance(row, To) and row.key}


def tool_of(given: Mapping[str, Any]) -> str:
    """Return the name of the tool whose configuration this is; empty: of none of them."""
    known = {
        name: sum(key in tool.rows or any(each.startswith(f"{key}.") for each in tool.rows) for key in given)
        for name, tool in tools().items()
        if tool.marks & given.keys()
    }
    return max(known, key=lambda name: known[name], default="")


def near(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a question that suggests a key in place of an unknown one; empty: none is near."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}")]
        or [other for other in known if other == known_as().get(name or key)]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *sections], n=1, cutoff=0.6)
    )
    return f"did you mean {near[0]}?" if near else ""
