"""``infinity recipe --from``: another tool's configuration as a recipe, and what of it no recipe says."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.config import SettingError, shown
from infinity.core.errors import RecipeError, library_errors
from infinity.core.files import read_file, user_path
from infinity.data.sources import may_be_of_hub
from infinity.recipes.other_tools import (
    SPLIT,
    UNKNOWN,
    Missing,
    Needless,
    Row,
    To,
    Tool,
    Values,
    tool_of,
    tools,
)
from infinity.recipes.recipe import Recipe, keys_of, with_values
from infinity.recipes.text import ProblemError, parse, resolved

_MOST_NBYTES = 2**20
#: Names of columns in LLaMA-Factory's dataset_info.json.
_LLAMA_FACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "conversations",
    "system": "system", "history": "history", "tools": "tools", "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip


class Said(NamedTuple):
    """A key of the tool that the recipe does not have, and why."""

    key: str
    why: Needless | Missing


class Translation(NamedTuple):
    """A recipe, the keys that it names, and what of the tool's configuration is not in it."""

    tool: str
    recipe: Recipe
    keys: frozenset[str]
    said: list[Said]

    def lines(self) -> Iterator[str]:
        """Yield lines for people: what is needless, and what has no counterpart, by reason."""
        for kind, title in ((Needless, "not needed"), (Missing, "without a counterpart")):
            by_reason: dict[str, list[str]] = {}
            for each in self.said:
                if isinstance(each.why, kind):
                    by_reason.setdefault(each.why.why, []).append(each.key)
            if by_reason:
                yield f"{title}:"
                yield from (f"  {', '.join(keys)}: {why}" for why, keys in by_reason.items())


def translate(name: str) -> Translation:
    """Translate the configuration file of another tool, which is recognized by its keys.

    RecipeError: the file cannot be read, or is of no tool that is known here.
    """
    path = user_path(name, "--from")
    given = _read(path)
    tool = tool_of(given)
    if not tool:
        raise RecipeError(
            f"--from {name}: wanted a configuration of {', '.join(tools())}; got the keys {_keys(given)}"
        )
    said = list[Said]()
    values = _combined(tools()[tool], _values(given, tools()[tool], said), path.parent, said)
    recipe, keys = _built(values, said)
    return Translation(tool, recipe, keys, said)


def _read(path: Path) -> Mapping[str, Any]:
    """Read JSON, YAML or (by its suffix) TOML."""
    with library_errors(RecipeError, f"{path}: cannot be read"):
        text = read_file(path, _MOST_NBYTES).decode()
        given: Any = tomllib.loads(text) if path.suffix == ".toml" else None
    if given is None:
        try:
            given = parse(text)
            given = resolved(given) if isinstance(given, dict) else given
        except ProblemError as error:
            raise RecipeError(f"{path}{error.line}: not valid YAML or JSON: {error}") from error
    if not isinstance(given, dict) or not given:
        raise RecipeError(f"{path}: wanted keys and values; got {shown(given)}")
    return given


def _keys(given: Mapping[str, Any]) -> str:
    names = [*map(str, given)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _values(given: Mapping[str, Any], tool: Tool, said: list[Said]) -> Values:
    """Return values by the recipe's keys, and others with _ in front for :func:`_combined`."""
    values: Values = {}
    for key, value, row in _walk(given, tool.rows):
        if value in (None, "", [], {}, "none") or not (value or isinstance(row, To)):
            continue
        if value == "auto" and not (isinstance(row, To) and row.key == "train.dtype"):
            said.append(Said(key, Needless("auto: the program that reads this file says it")))
            values["_auto"] = {*values.get("_auto", ()), getattr(row, "key", "")}
            continue
        found: Any = row
        if isinstance(row, To):
            try:
                found = row.convert(value)
            except (TypeError, ValueError, KeyError, AttributeError):
                found = Missing(f"got {shown(value)}, which is no value that is known here")
        if isinstance(found, Needless | Missing):
            said.append(Said(key, found))
        elif isinstance(found, dict) and all("." in name or name[:1] == "_" for name in found):
            more = found.pop("_said", {})
            said += [Said(f"{key}[].{name}" if name else key, why) for name, why in more.items()]
            values |= found
        elif isinstance(row, To):
            values[row.key] = found
    return values


def _walk(
    given: Mapping[str, Any], rows: Mapping[str, Row], prefix: str = "", above: Row = UNKNOWN
) -> Iterator[tuple[str, Any, Row]]:
    """Yield the keys that have no keys of their own, or rows, with value and row: the nearest one above."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        row = rows.get(key, above)
        inner = isinstance(value, Mapping) and any(each.startswith(f"{key}.") for each in rows)
        if not inner or isinstance(row, To):
            yield key, value, row
        if inner:
            yield from _walk(
                value, rows, f"{key}.", Needless(f"it belongs to {key}") if isinstance(row, To) else row
            )


def _combined(tool: Tool, values: Values, folder: Path, said: list[Said]) -> Values:
    """Return values with the tool's defaults, where several keys decide together."""
    auto = values.pop("_auto", ())
    v = {key: value for key, value in tool.defaults.items() if key not in auto} | values
    if "_rule" in v:
        v["optim.name"] = v.pop("_rule")
    if "train.epochs" in v:
        v.setdefault("train.steps", None)
        if v["train.steps"] is not None:
            del v["train.epochs"]
    if v.get("optim.warmup_steps"):
        v.pop("optim.warmup_ratio", None)
    first, second = v.get("optim.betas", (0.9, 0.999))
    if "_beta1" in v or "_beta2" in v:
        v["optim.betas"] = [v.pop("_beta1", first), v.pop("_beta2", second)]
    if (strategy := v.pop("_eval", "steps")) not in ("steps", True):
        v["train.eval_every"] = None
        if strategy == "epoch":
            v["train.evals_per_epoch"] = 1.0
    if v.pop("_save", "steps") != "steps":
        v.pop("checkpoint.every", None)
    _combine_lora(v, said)
    if "_names" in v:
        v |= _named(v.pop("_names"), v.pop("_names_in", "data"), folder, said)
    v.pop("_names_in", None)
    said += _not_here(v)
    return v


def _not_here(values: Values) -> Iterator[Said]:
    """Yield the model and the data that are not said, or not there."""
    for key, kind in (("model.path", "model"), ("data.files", "dataset")):
        given = values.get(key, ())
        if not given:
            yield Said(key, Missing("the file does not say it: give it, or the default is taken"))
        for name in [given] if isinstance(given, str) else given:
            path = Path(name).expanduser()
            if path.exists() or "*" in name:
                continue
            why = "there is no such file here"
            if may_be_of_hub(name):
                fetch = f"hf download --repo-type {kind} {name}"
                more = " --local-dir DIR, and DIR in its place" if kind == "model" else ""
                why += f"; of the hub: {fetch}{more}"
            yield Said(f"{key}={name}", Missing(why))


def _combine_lora(v: Values, said: list[Said]) -> None:
    """Keep adapters and the form of their base if adapters are trained, else remove them."""
    if v.pop("_linear", False):  # all of them, whatever is listed beside
        v.pop("lora.target_modules", None)
    stored, settings = v.pop("_stored_as", None), [key for key in v if key.startswith("lora.")]
    if not v.pop("_lora", False):
        for key in settings:
            del v[key]
        return
    if v.get("lora.adapter"):  # which has the settings
        for key in set(settings) - {"lora.adapter", "lora.lr_ratio"}:
            del v[key]
    else:
        v["lora.alpha"] = v.get("lora.alpha", 2 * v.setdefault("lora.rank", 8))
    if stored and v.get("memory.nvme"):
        v["model.stored_as"] = stored
    elif stored:
        why = f"the quantized base is kept on a drive: add model.stored_as={stored} and memory.nvme=[DIR]"
        said.append(Said("quantization", Missing(why)))


def _named(names: list[str], where: str, folder: Path, said: list[Said]) -> Values:
    """Return the files and columns of names in LLaMA-Factory's dataset_info.json, if it is there."""
    info: Any = {}
    root = next(
        (each for each in (Path(where), folder / where) if (each / "dataset_info.json").is_file()), None
    )
    if root is not None:
        with library_errors(RecipeError, f"{root}/dataset_info.json"):
            info = json.loads(read_file(root / "dataset_info.json", _MOST_NBYTES))
    files, fields = list[str](), dict[str, str]()
    for name in names:
        about = info.get(name, {})
        file = about.get("file_name")
        files.append(str((root or folder) / file) if file else about.get("hf_hub_url", name))
        parts = [key for key in ("split", "subset", "num_samples") if about.get(key, "train") != "train"]
        said += [Said(f"dataset_info.json: {name}.{key}", SPLIT) for key in parts]
        for theirs, column in about.get("columns", {}).items():
            ours = _LLAMA_FACTORY_COLUMNS.get(theirs)
            if ours is not None and column and column != ours:
                fields[ours] = column
    return {"data.files": files} | ({"data.fields": fields} if fields else {})


def _built(values: Values, said: list[Said]) -> tuple[Recipe, frozenset[str]]:
    """Return the recipe of values, but for those that it refuses, and the keys that it says."""
    assert values.keys() <= keys_of(Recipe).keys()
    while True:
        try:
            return with_values(Recipe(), values), frozenset(values)
        except SettingError as error:
            if error.key not in values:
                raise
            said.append(Said(error.key, Missing(f"got {shown(error.got)}; wanted {error.wanted}")))
            values = {key: value for key, value in values.items() if key != error.key}
