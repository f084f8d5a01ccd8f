"""State dictionaries of torch, transformers and schedulefree that keep the same under other names."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Size, Tensor

from infinity.core.errors import StateError
from infinity.optim.rule import OFFSET, Rule

#: Returns the exact weights of a parameter, by its index, on the CPU.
Weights = Callable[[int], Tensor]


class Foreign(NamedTuple):
    """Optimizers outside this package whose state a rule goes on from."""

    of: str
    mark: str  # a number of parameter groups that only theirs have
    names: Mapping[str, str]  # of what is kept: theirs and the rule's
    numbers: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # of the rule, given theirs
    unlike: Callable[[Mapping[str, Any]], str | None]  # what the rule has not; None: it has all
    dropped: Sequence[str] = ()  # entries that say nothing of the next step
    note: str | None = None


#: Of torch's Muon, which infinity's has as constants.
_MUON = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7}
_RATE = "; its learning rates do not: theirs are scaled by weights or steps, so those of this optimizer count"


def _plain(number: Any) -> Any:
    return tuple(number) if isinstance(number, list) else number


def _torchs_adafactor(group: Mapping[str, Any]) -> Mapping[str, Any]:
    decay_rate, clip_threshold = -group["beta2_decay"], group["d"]
    return {
        "decay_rate": decay_rate, "clip_threshold": clip_threshold, "weight_decay": group["weight_decay"],
    }  # fmt: skip


def _transformers_adafactor(group: Mapping[str, Any]) -> Mapping[str, Any]:
    names = ["clip_threshold", "weight_decay"]
    names += ["lr"] * (not (group["scale_parameter"] or group["relative_step"]))
    return {n: group[n] for n in names} | {"decay_rate": -group["decay_rate"], "eps": group["eps"][0]}


def _schedulefree(group: Mapping[str, Any]) -> str | None:
    """Return what makes shares of iterates others than those that follow from a count of steps."""
    if group["r"] or group["weight_lr_power"] != 2 or not group["betas"][0]:
        return "r=0, weight_lr_power=2 and a first beta above 0"
    rises = max(1, group["warmup_steps"])
    squares = sum((min(k, rises) / rises) ** 2 for k in range(1, group["k"] + 1))
    same = math.isclose(group["weight_sum"], group["lr"] ** 2 * squares, rel_tol=1e-4)
    return None if same else "one learning rate in all steps"


FOREIGN = (
    Foreign(
        "adafactor", "beta2_decay",
        {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"},
        _torchs_adafactor, lambda group: None,
        note=f"the state is of torch's Adafactor: its second moments carry over{_RATE}, and their eps",
    ),
    Foreign(
        "adafactor", "scale_parameter", {}, _transformers_adafactor,
        lambda group: None if group["beta1"] is None else "beta1=None: no first moment", ("RMS",),
    ),
    Foreign(
        "muon", "ns_coefficients", {"momentum_buffer": "exp_avg"},
        lambda group: {
            **{name: group[name] for name in ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")},
            "match_rms_adamw": group["adjust_lr_fn"] == "match_rms_adamw",
        },
        lambda group: next((f"{n}={v}" for n, v in _MUON.items() if _plain(group[n]) != v), None),
    ),
    Foreign(
        "schedulefree", "weight_lr_power", {}, dict, _schedulefree, ("z",),
    ),
)  # fmt: skip


def translated(
    rule: Rule, packed: Mapping[str, Any], shapes: Sequence[Mapping[str, Sequence[int]]],
    groups: Sequence[Mapping[str, Any]], weights: Weights,
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
    of: Foreign, packed: Mapping[str, Any], shapes: Sequence[Mapping[str, Sequence[int]]],
    groups: Sequence[Mapping[str, Any]], weights: Weights,
) -> tuple[Mapping[str, Any], str | None]:  # fmt: skip
    saved, note, state = packed["param_groups"], of.note, dict[int, dict[str, Any]]()
    for own, group in zip(groups, saved, strict=True):
        wanted = "maximize=False" if group.get("maximize") else of.unlike(group)
        if of.of == "muon" and not own["matrix"]:
            wanted = "second moments of a group with matrix: false"
        if wanted:
            raise StateError(f"the state is of another {of.of}: infinity's has only {wanted}")
    made = [
        {**own, **{n: v for n, v in of.numbers(group).items() if n in own}, "params": group["params"]}
        for own, group in zip(groups, saved, strict=True)
    ]
    if of.mark == "scale_parameter" and any(g["scale_parameter"] or g["relative_step"] for g in saved):
        note = f"the state is of transformers' Adafactor: its second moments carry over{_RATE}"
    kept = ((group, i) for group in saved for i in group["params"] if packed["state"].get(i))
    for group, i in kept:
        entry = packed["state"][i]
        state[i] = each = {of.names.get(n, n): v for n, v in entry.items() if n not in of.dropped}
        for name, shape in shapes[i].items():
            if isinstance(each.get(name), Tensor) and each[name].numel() == Size(shape).numel():
                each[name] = each[name].reshape(shape)
        if of.of == "muon":  # second moments are of what is no matrix
            each |= {n: each["exp_avg"].new_zeros(shape) for n, shape in shapes[i].items() if n not in each}
        if of.of == "schedulefree":
            each |= _iterates(group, entry["z"].cpu().float(), weights(i))
    return {**packed, "state": state, "param_groups": made}, note


def _iterates(group: Mapping[str, Any], z: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return what y and x - y are, given z and the weights: y, or x after their ``eval()``."""
    beta1 = group["betas"][0]
    if group["train_mode"]:
        return {"step": group["k"], OFFSET: (weight - z) * ((1 - beta1) / beta1)}
    apart = (weight - z) * (1 - beta1)
    return {"step": group["k"], "master": weight - apart, OFFSET: apart}
