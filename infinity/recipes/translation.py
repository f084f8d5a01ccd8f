"""``infinity recipe --from``: another tool's configuration as a recipe, and what of it no recipe says."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

from infinity.core.config import SettingError, shown
from infinity.core.errors import RecipeError, library_errors
from infinity.core.files import read_file, user_path
from infinity.data.sources import may_be_of_hub
from infinity.optim.rules import known_rule
from infinity.recipes.other_tools import Tool, Why, table, tool_of, tools
from infinity.recipes.recipe import Recipe, keys_of, with_values
from infinity.recipes.text import ProblemError, parse, resolved

_MOST_NBYTES = 2**20
_UNKNOWN = Why(
    "not translated (buffers, sharding, recomputed activations, workers, logs and resuming need no key here)"
)
#: Values by the recipe's keys; _lora: whether adapters are trained.
Values: TypeAlias = dict[str, Any]
#: Conversions of values, by the recipe's key.
_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "checkpoint.every": lambda steps: f"{steps} steps" if steps else None,
    "data.weights": lambda shares: parse(f"[{shares}]") if isinstance(shares, str) else shares,
    "optim.name": lambda name: known_rule(str(name)).name,
    "train.keep_best": lambda name: str(name).removeprefix("eval_"),
}


class Translation(NamedTuple):
    """A recipe, the keys that it names, and what of the tool's configuration is not in it: keys, and why."""

    tool: str
    recipe: Recipe
    keys: frozenset[str]
    said: list[tuple[str, str]]

    def lines(self) -> Iterator[str]:
        """Yield lines for people: the tool's keys that are not in the recipe, by reason."""
        yield from ["not in the recipe:"] if self.said else []
        for why in dict.fromkeys(why for _, why in self.said):
            yield f"  {', '.join(key for key, each in self.said if each == why)}: {why}"


def translate(name: str) -> Translation:
    """Translate the configuration file of another tool, which is recognized by its keys.

    RecipeError: the file cannot be read, or is of no tool that is known here.
    """
    path = user_path(name, "--from")
    given = _read(path)
    tool = tool_of(given)
    if not tool:
        keys = ", ".join([*map(str, given)][:8])
        raise RecipeError(
            f"--from {name}: wanted a configuration of {', '.join(tools())}; got the keys {keys}"
        )
    values, said = _values(_with_data_sets(given), tools()[tool])
    said += _combine(values)
    said += _not_here(values)
    while True:
        try:
            return Translation(tool, with_values(Recipe(), values), frozenset(values), said)
        except SettingError as error:
            if error.key not in values:
                raise
            said.append((error.key, f"got {shown(error.got)}; wanted {error.wanted}"))
            del values[error.key]


def _read(path: Path) -> dict[str, Any]:
    """Read JSON or YAML."""
    with library_errors(RecipeError, f"{path}: cannot be read"):
        text = read_file(path, _MOST_NBYTES).decode()
    try:
        given = parse(text)
        given = resolved(given) if isinstance(given, dict) else given
    except ProblemError as error:
        raise RecipeError(f"{path}{error.line}: not valid YAML or JSON: {error}") from error
    if not isinstance(given, dict) or not given:
        raise RecipeError(f"{path}: wanted keys and values; got {shown(given)}")
    return given


def _with_data_sets(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with what LLaMA-Factory's dataset_info.json says of its data sets."""
    if not isinstance(names := given.get("dataset"), str):
        return given
    root, known = Path(str(given.get("dataset_dir", "data"))), dict[str, Any]()
    if (file := root / "dataset_info.json").is_file():
        with library_errors(RecipeError, str(file)):
            known = json.loads(read_file(file, _MOST_NBYTES))
            for each in known.values():
                each |= {"file_name": str(root / each["file_name"])} if "file_name" in each else {}
    found = (name.strip() for name in names.split(","))
    return {**given, "dataset": [known.get(name, {"hf_hub_url": name}) for name in found]}


def _values(given: Mapping[str, Any], tool: Tool) -> tuple[Values, list[tuple[str, str]]]:
    """Return values, by the tool's rows in their order, and keys without any, each with the reason."""
    leaves, order = [*_leaves(given, tool.rows)], {key: number for number, key in enumerate(tool.rows)}
    named = {key for key, value, _ in leaves if value not in (None, "")}
    leaves += [
        (key, each, tool.rows.get(key, key)) for key, each in tool.defaults.items() if key not in named
    ]
    values, said = Values(), list[tuple[str, str]]()
    for key, value, row in sorted(leaves, key=lambda leaf: order.get(leaf[0], -1)):
        try:
            if value == "auto":
                said.append((key, "auto: the program that reads this file chooses; the default is taken"))
            elif value not in (None, "", [], {}, "none"):
                said += [(key, why) for why in _put(values, row, value)]
        except (SettingError, ProblemError) as error:
            said.append((key, str(error)))
        except (TypeError, AttributeError):  # a value of another kind
            said.append((key, f"got {shown(value)}, which is no value that is known here"))
    return values, said


def _leaves(
    given: Mapping[str, Any], rows: Mapping[str, Any], prefix: str = "", above: Why = _UNKNOWN
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that have no rows below, with value and row: the nearest one above."""
    for name, value in given.items():
        key, several = f"{prefix}{name}", isinstance(value, list)
        row, begin = rows.get(key, above), f"{key}.*." if several else f"{key}."
        below = any(each.startswith(begin) for each in rows)
        inner = [each for each in (value if several else [value]) if below and isinstance(each, Mapping)]
        for each in inner:
            yield from _leaves(each, rows, begin, row if isinstance(row, Why) else _UNKNOWN)
        left = [each for each in value if each not in inner] if several else [] if inner else value
        if left or not inner:
            yield key, left, row


def _put(values: Values, row: Any, value: Any) -> Iterator[Why]:
    """Set what ``value`` means by a row, or yield why a recipe does not have it."""
    if isinstance(row, Why) or (isinstance(row, str) and " " in row):
        yield from [Why(row)] if value else []
    elif isinstance(row, dict):
        cases = {str(case).lower(): each for case, each in row.items()}
        for each in value if isinstance(value, list) else [value]:
            other = cases.get("true", cases.get("else", Why(f"got {shown(each)}; known: {', '.join(cases)}")))
            found = cases.get(str(each).lower(), other if each else {})
            if isinstance(found, dict):
                values |= found
            else:
                yield from _put(values, found, each)
    else:
        for key in [row] if isinstance(row, str) else row:
            _set(values, key, value)


def _set(values: Values, key: str, value: Any) -> None:
    """Set a key of a recipe, or an item of one; a list gets what it does not have yet."""
    section, name, *item = key.split(".", 2)
    key = f"{section}.{name}"
    if item:
        if item[0] != value:  # a column by its own name
            values[key] = {**values.get(key, {}), item[0]: value}
        return
    setting, called = keys_of(Recipe)[key], table()["values"].get(key, {})

    def ours(each: Any) -> Any:
        return called.get(str(each).lower(), each)

    value = _CONVERTED[key](value) if key in _CONVERTED else value
    if get_origin(setting.hint) is tuple:
        items = [each.strip() for each in value.split(",")] if isinstance(value, str) else [*value]
        before = values.get(key, [])
        values[key] = [
            *before,
            *(ours(each) for each in items if each not in before and ours(each) is not None),
        ]
    elif isinstance(value, int | float) and value <= 0 and type(None) in get_args(setting.hint):
        values[key] = value if setting.valid.accepts(value) else None  # 0 and less mean none
    else:
        values[key] = ours(value)


def _combine(values: Values) -> Iterator[tuple[str, str]]:
    """Change values of keys that decide together; yield what is missing for one."""
    if values.get("train.steps") is not None:
        values.pop("train.epochs", None)
    elif "train.epochs" in values:
        values["train.steps"] = None
    if isinstance(warmup := values.get("optim.warmup_steps"), float):  # a share of all steps, or their number
        values |= {"optim.warmup_steps": int(warmup)} | ({"optim.warmup_ratio": warmup} if warmup < 1 else {})
    if values.get("optim.warmup_steps"):
        values.pop("optim.warmup_ratio", None)
    if isinstance(betas := values.get("optim.betas"), dict):
        values["optim.betas"] = [*betas.values()]
    trained, has_settings = values.pop("_lora", "lora.rank" in values), bool(values.get("lora.adapter"))
    kept = {"lora.adapter", "lora.lr_ratio"} if has_settings else {*keys_of(Recipe)}
    for key in [key for key in values if key.startswith("lora.") and not (trained and key in kept)]:
        del values[key]
    if trained and not has_settings:
        values.setdefault("lora.alpha", 2 * values.setdefault("lora.rank", 8))
    if (form := values.get("model.stored_as")) and not (trained and values.get("memory.nvme")):
        del values["model.stored_as"]
        if trained:
            yield "quantization", f"it is kept on a drive: add model.stored_as={form} and memory.nvme=[DIR]"


def _not_here(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the model and the data that are not said, or not there."""
    for key, kind in (("model.path", "--local-dir DIR"), ("data.files", "--repo-type dataset")):
        given = values.get(key, ())
        if not given:
            yield key, "the file does not say it: give it, or the default is taken"
        for name in map(str, given if isinstance(given, (list, tuple)) else [given]):
            if not Path(name).expanduser().exists() and "*" not in name:
                hub = f"; of the hub: hf download {kind} {name}" if may_be_of_hub(name) else ""
                yield f"{key}={name}", f"there is no such file here{hub}"
