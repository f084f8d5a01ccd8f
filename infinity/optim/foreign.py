"""State dictionaries of torch, transformers and schedulefree that keep the same under other names."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Size, Tensor

from infinity.core.errors import StateError
from infinity.optim.rule import OFFSET, Rule

#: Returns the exact weights of a parameter, by its index, on the CPU.
Weights = Callable[[int], Tensor]
_Group = Mapping[str, Any]
_Shapes = Mapping[str, Sequence[int]]
_Entry = dict[str, Any]


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


def _plain(number: Any) -> Any:
    return tuple(number) if isinstance(number, list) else number


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
    return next((f"{n}={v}" for n, v in _MUON.items() if _plain(group[n]) != v), None)


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
    try:
        return _translated(of, packed, shapes, groups, weights)
    except StateError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(
            f"the state has {of.mark!r}, but is not whole, or of another optimizer than infinity's {plain}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _translated(
    of: Foreign, packed: Mapping[str, Any], shapes: Sequence[_Shapes], groups: Sequence[_Group],
    weights: Weights,
) -> tuple[Mapping[str, Any], str | None]:  # fmt: skip
    saved, made, state = packed["param_groups"], list[_Group](), dict[int, _Entry]()
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
