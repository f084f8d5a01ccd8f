"""State dictionaries that a rule goes on from: its own, another's, and those of torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from infinity.core.config import Valid
from infinity.core.errors import StateError
from infinity.optim.rule import EMA, OFFSET, Rule, Way, is_number
from infinity.optim.rules import find_rule

#: Entries of a dictionary beside those of torch: the rule, and names of parameters in order.
RULE, NAMES = "rule", "names"


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
    rule: Rule, packed: Mapping[str, Any], params: Sequence[Parameter], groups: Sequence[dict[str, Any]]
) -> Fitted:
    """Return what a rule loads of a dictionary; a StateError says what does not fit ``params``.

    Moments of another rule carry over where a parameter needs no others, and begin at zero elsewhere, with a
    step count of 0; ``groups``, of the optimizer, then keep their numbers.
    """
    before = find_rule(packed.get(RULE, rule.name))
    if before.name != rule.name:
        made = dict(_carried(before, rule, packed, params))
        count = sum(each["step"] > 0 for each in made.values())
        return Fitted(groups, made, carried(before, rule, count, len(made)))
    here = {param.name for param in params if param.name}
    for i, (was, param) in enumerate(zip(packed.get(NAMES, ()), params, strict=False)):
        if was != param.name and was in here:
            raise StateError(
                f"parameter {i} of the state is {was}, of this optimizer {param.name}: make parameter groups "
                "with the same parameters in the same order; nothing was loaded"
            )
    # torch's SGD has no counts.
    counted = {} if RULE in packed else {"step": 1}
    state: dict[int, dict[str, Any]] = {i: counted | each for i, each in packed["state"].items()}
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
    return Fitted(saved, state)


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
                f"the state is not of infinity's {rule.name}: its parameter groups have no "
                f"{', '.join(sorted(lacking))}; leave load_state_dict out, and moments begin at zero"
            )
        rule.check_numbers(group)
