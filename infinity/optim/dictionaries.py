"""State dictionaries that a rule goes on from: its own, another's, and those of other libraries."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from infinity.core.config import Valid
from infinity.core.errors import StateError, library_errors
from infinity.optim.rule import EMA, OFFSET, Rule, Way, is_number
from infinity.optim.rules import find_rule

#: Entries of a dictionary beside those of torch: the rule, and names of parameters in order.
RULE, NAMES = "rule", "names"
#: Where bitsandbytes puts what has another shape than the parameter, and the sizes of its blocks.
_QUANTIZED, _BLOCKS = "__bnb_optimizer_quant_state__", (256, 2048)

#: Returns the exact weights of a parameter, by its index, on the CPU.
Weights = Callable[[int], Tensor]
_Group = Mapping[str, Any]
_Shapes = Mapping[str, Sequence[int]]
_Entry = dict[str, Any]


class Parameter(NamedTuple):
    """A parameter as an optimizer has it."""

    name: str
    shape: torch.Size
    trained: bool
    way: Way


class Fitted(NamedTuple):
    """Parameter groups, fp32 values by index of a parameter and name, and what carries over, in a line."""

    groups: Sequence[dict[str, Any]]
    state: dict[int, dict[str, Any]]
    note: str | None = None


def fitted(
    rule: Rule, packed: Mapping[str, Any], params: Sequence[Parameter], groups: Sequence[dict[str, Any]],
    weights: Weights,
) -> Fitted:  # fmt: skip
    """Return what a rule loads of a dictionary; a StateError says what does not fit ``params``.

    Moments of another rule carry over where a parameter needs no others, and begin at zero elsewhere, with a
    step count of 0; ``groups``, of the optimizer, then keep their numbers.
    """
    before = find_rule(packed.get(RULE, rule.name))
    if before.name != rule.name:
        made = dict(_carried(before, rule, packed, params))
        count = sum(each["step"] > 0 for each in made.values())
        return Fitted(groups, made, carried(before, rule, count, len(made)))
    here, note = {param.name for param in params if param.name}, None
    for i, (was, param) in enumerate(zip(packed.get(NAMES, ()), params, strict=False)):
        if was != param.name and was in here:
            raise StateError(
                f"parameter {i} of the state is {was}, of this optimizer {param.name}: make parameter groups "
                "with the same parameters in the same order; nothing was loaded"
            )
    if RULE not in packed:
        packed, note = translated(rule, packed, [_shapes(rule, param) for param in params], groups, weights)
    # torch's SGD has no counts.
    counted = {} if RULE in packed else {"step": 1}
    state = {i: counted | _plain(each, rule) for i, each in packed["state"].items()}
    saved = packed["param_groups"]
    if EMA in rule.defaults:
        saved = [{EMA: groups[0][EMA], **group} for group in saved]
    if rule.averages:
        zero = torch.zeros((), device="cpu")
        state = {i: {OFFSET: zero.expand(params[i].shape), **each} for i, each in state.items()}
    _check_groups(rule, saved, groups)
    missing = [i for i, param in enumerate(params) if param.trained and i not in state]
    if RULE not in packed or (state and not any("master" in each for each in state.values())):
        for i in missing:  # torch's rules begin a state with the first gradient
            shapes = _shapes(rule, params[i])
            state[i] = {"step": 0} | {name: torch.zeros(of, device="cpu") for name, of in shapes.items()}
    elif missing:
        raise StateError(
            f"optimizer state has no entry for {len(missing)} of {len(params)} parameters "
            f"(first: {missing[0]}); every rank must load the dictionary that rank 0 saved"
        )
    for i, each in ((i, state[i]) for i in range(len(params)) if i in state):
        _check_state(rule, i, each, params[i])
    return Fitted(saved, state, note)


def carried(before: Rule, now: Rule, count: int, of: int) -> str:
    """Return a line on what carries over of a state: the moments of ``count`` parameters."""
    names = {moment.name for moment in now.moments}
    kept = ", ".join(moment.name for moment in before.moments if moment.name in names)
    dropped = ", ".join(moment.name for moment in before.moments if moment.name not in names)
    found = [f"{kept} of {count} of {of} parameters carry over"] if count and kept else []
    others = ["other moments begin at zero" if found else "moments begin at zero"] if count < of else []
    rest = [*others, f"{dropped} is dropped"] if dropped else others
    return f"the state is of {before.name} and goes on with {now.name}: {'; '.join(found + rest)}"


def _carried(
    before: Rule, rule: Rule, packed: Mapping[str, Any], params: Sequence[Parameter]
) -> Iterator[tuple[int, dict[str, Any]]]:
    if NAMES not in packed:
        raise StateError(f"the state is of {before.name}, and has no {NAMES!r} of its parameters")
    place = {name: i for i, name in enumerate(packed[NAMES])}
    group_of = {i: group for group in packed["param_groups"] for i in group["params"]}
    for i, param in enumerate(params):
        each = packed["state"].get(place.get(param.name, -1))
        if each is None and param.trained:
            raise StateError(f"optimizer state has no entry for {param.name}, which is trained")
        if each is not None:
            kept = before.kept(group_of[place[param.name]], param.shape)
            goes_on, shapes = param.way.goes_on_from(kept), _shapes(rule, param)
            given = each if goes_on else {}
            moments = {n: given.get(n, torch.zeros(of, device="cpu")) for n, of in shapes.items()}
            made = {"step": each["step"] if goes_on else 0, "master": each["master"], **moments}
            _check_state(rule, i, made, param)
            yield i, made


def _plain(each: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """Return the entry of a parameter with fp32 moments by name; those of bitsandbytes may have 8 bits."""
    each = {**each, **each.get(_QUANTIZED, {})}
    each.pop(_QUANTIZED, None)
    if "state1" not in each:
        return each
    found: dict[str, Any] = {"step": each["step"]}
    for number, moment in enumerate(rule.moments, 1):
        values = each.get(f"state{number}")
        if values is not None and values.dtype == torch.uint8:
            values = _decoded(values, each[f"qmap{number}"], each.get(f"absmax{number}"))
        if values is not None:
            found[moment.name] = values
    return found


def _decoded(codes: Tensor, table: Tensor, largest: Tensor | None) -> Tensor:
    """Return values of codes, each a place in ``table``, which has shares of the largest of a block."""
    sizes = [size for size in _BLOCKS if largest is not None and -(-codes.numel() // size) == len(largest)]
    if largest is None or not sizes:
        raise StateError("8-bit state without a largest value for each block of 256 or 2,048 elements")
    scales = largest.float().repeat_interleave(sizes[0])[: codes.numel()]
    return (table.float()[codes.reshape(-1).long()] * scales).view(codes.shape)


def _shapes(rule: Rule, param: Parameter) -> dict[str, Sequence[int]]:
    """Return the shapes of what a rule keeps of a parameter, by name."""
    return {moment.name: param.shape for moment in rule.moments} | dict(param.way.sums)


def _check_state(rule: Rule, i: int, each: Mapping[str, Any], param: Parameter) -> None:
    shapes, step = _shapes(rule, param), each.get("step")
    if step is None or not is_number(step, Valid(least=0)) or step % 1:
        raise StateError(
            f"optimizer state of parameter {i}: step is {step!r}; wanted a whole number from 0 on; nothing "
            "was loaded"
        )
    for name, shape in (shapes | ({"master": param.shape} if "master" in each else {})).items():
        got = getattr(each.get(name), "shape", None)
        if got is None or tuple(got) != tuple(shape):
            how = f"has shape {tuple(got)}" if got else "is missing" if name not in each else "is no tensor"
            raise StateError(
                f"optimizer state of parameter {i}: {name} {how}; wanted {tuple(shape)}, from "
                f"{rule.name} on the same parameters in the same order"
            )
        if bool(each[name].isnan().any()):
            raise StateError(f"optimizer state of parameter {i}: {name} has NaN; nothing was loaded")
    if others := each.keys() - {"step", "master", *shapes}:
        raise StateError(
            f"optimizer state of parameter {i} has {', '.join(sorted(others))}, which "
            f"{rule.name} does not keep (it keeps {', '.join(shapes)})"
        )


def _check_groups(rule: Rule, saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raise unless the groups of a saved dictionary are of the rule and match the optimizer's."""
    theirs, ours = ([len(group["params"]) for group in each] for each in (saved, groups))
    if theirs != ours:
        raise StateError(
            f"the state has parameter groups of {theirs} parameters, this optimizer of {ours} (matrices, "
            "which decay, and vectors); for the state of torch.optim.AdamW(model.parameters()) make it "
            'with params=[{"params": list(model.parameters())}]'
        )
    for group in saved:
        if lacking := rule.defaults.keys() - group.keys():
            raise StateError(
                f"the state is not of {rule.name}: its parameter groups have no {', '.join(sorted(lacking))}"
            )
        rule.check_numbers(group)


class Foreign(NamedTuple):
    """Optimizers outside this package whose state a rule goes on from."""

    of: str
    mark: str  # a number of parameter groups that only theirs have
    names: Mapping[str, str]  # of what is kept: theirs and the rule's
    numbers: Callable[[_Group], _Group]  # of the rule, given theirs
    unlike: Callable[[_Group, _Group], str | None]  # what the rule has, given theirs and its own; None: all
    #: What else the rule keeps of a parameter: given the entry, their group, shapes and exact weights.
    more: Callable[[_Entry, _Group, _Shapes, Callable[[], Tensor]], _Entry] = lambda *given: {}
    dropped: Sequence[str] = ()  # entries that say nothing of the next step
    note: Callable[[_Group], str | None] = lambda group: None  # what does not carry over


#: Of torch's Muon, which infinity's has as constants.
_MUON = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7}
_RATE = "; its learning rates do not: theirs are scaled by weights or steps, so those of this optimizer count"


def _torchs_adafactor(group: _Group) -> _Group:
    decay_rate, clip_threshold = -group["beta2_decay"], group["d"]
    return {
        "decay_rate": decay_rate, "clip_threshold": clip_threshold, "weight_decay": group["weight_decay"],
    }  # fmt: skip


def _transformers_adafactor(group: _Group) -> _Group:
    names = ["clip_threshold", "weight_decay"]
    names += ["lr"] * (not (group["scale_parameter"] or group["relative_step"]))
    return {n: group[n] for n in names} | {"decay_rate": -group["decay_rate"], "eps": group["eps"][0]}


def _schedulefree(group: _Group, own: _Group) -> str | None:
    """Return what makes shares of iterates others than those that follow from a count of steps."""
    if group["r"] or group["weight_lr_power"] != 2 or not group["betas"][0]:
        return "r=0, weight_lr_power=2 and a first beta above 0"
    rises = max(1, group["warmup_steps"])
    squares = sum((min(k, rises) / rises) ** 2 for k in range(1, group["k"] + 1))
    same = math.isclose(group["weight_sum"], group["lr"] ** 2 * squares, rel_tol=1e-4)
    return None if same else "one learning rate in all steps"


def _iterates(entry: _Entry, group: _Group, shapes: _Shapes, weights: Callable[[], Tensor]) -> _Entry:
    """Return what y and x - y are, given z and the weights: y, or x after their ``eval()``."""
    z, weight, beta1 = entry["z"].cpu().float(), weights(), group["betas"][0]
    if group["train_mode"]:
        return {"step": group["k"], OFFSET: (weight - z) * ((1 - beta1) / beta1)}
    apart = (weight - z) * (1 - beta1)
    return {"step": group["k"], "master": weight - apart, OFFSET: apart}


def _unlike_muon(group: _Group, own: _Group) -> str | None:
    if not own["matrix"]:
        return "second moments of a group with matrix: false"
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in group.items()}  # perhaps of JSON
    return next((f"{n}={v}" for n, v in _MUON.items() if given[n] != v), None)


def _moments(entry: _Entry, group: _Group, shapes: _Shapes, weights: Callable[[], Tensor]) -> _Entry:
    """Return empty second moments, which are of what is no matrix."""
    momentum = entry["momentum_buffer"]
    return {name: momentum.new_zeros(shape) for name, shape in shapes.items() if name != "exp_avg"}


FOREIGN = (
    Foreign(
        "adafactor", "beta2_decay",
        {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"},
        _torchs_adafactor, lambda group, own: None,
        note=lambda group: (
            f"the state is of torch's Adafactor: its second moments carry over{_RATE}, and their eps"
        ),
    ),
    Foreign(
        "adafactor", "scale_parameter", {}, _transformers_adafactor,
        lambda group, own: None if group["beta1"] is None else "beta1=None: no first moment",
        dropped=("RMS",),
        note=lambda group: (
            f"the state is of transformers' Adafactor: its second moments carry over{_RATE}"
            if group["scale_parameter"] or group["relative_step"] else None
        ),
    ),
    Foreign(
        "muon", "ns_coefficients", {"momentum_buffer": "exp_avg"},
        lambda group: {
            **{name: group[name] for name in ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")},
            "match_rms_adamw": group["adjust_lr_fn"] == "match_rms_adamw",
        },
        _unlike_muon, _moments,
    ),
    Foreign("schedulefree", "weight_lr_power", {}, dict, _schedulefree, _iterates, dropped=("z",)),
)  # fmt: skip


def translated(
    rule: Rule, packed: Mapping[str, Any], shapes: Sequence[_Shapes], groups: Sequence[_Group],
    weights: Weights,
) -> tuple[Mapping[str, Any], str | None]:  # fmt: skip
    """Return a dictionary as of ``rule``, and a line on what it lacks; one that is not foreign as it is.

    ``shapes`` are of what the rule keeps of each parameter, and ``groups`` its own. StateError: the numbers
    of theirs are of another rule, or it is not whole.
    """
    plain, saved = rule.name.partition("+")[0], packed["param_groups"]
    of = next((f for f in FOREIGN if f.of == plain and saved and f.mark in saved[0]), None)
    if of is None or len(saved) != len(groups):
        return packed, None
    what = f"the state has {of.mark!r}, but is not whole, or of another optimizer than infinity's {plain}"
    made, state = list[_Group](), dict[int, _Entry]()
    with library_errors(StateError, what):
        for own, group in zip(groups, saved, strict=True):
            if wanted := "maximize=False" if group.get("maximize") else of.unlike(group, own):
                raise StateError(f"the state is of another {of.of}: infinity's has only {wanted}")
            numbers = {name: value for name, value in of.numbers(group).items() if name in own}
            made.append({**own, **numbers, "params": group["params"]})
            for i in (i for i in group["params"] if packed["state"].get(i)):
                entry = packed["state"][i]
                state[i] = each = {of.names.get(n, n): v for n, v in entry.items() if n not in of.dropped}
                for name, shape in shapes[i].items():
                    if isinstance(each.get(name), Tensor) and each[name].numel() == Size(shape).numel():
                        each[name] = each[name].reshape(shape)
                each |= of.more(entry, group, shapes[i], partial(weights, i))
        note = next(filter(None, map(of.note, saved)), None)
    return {**packed, "state": state, "param_groups": made}, note
