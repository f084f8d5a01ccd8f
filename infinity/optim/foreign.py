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


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RATE = "; its learning rates do not: theirs are scaled by weights or steps, so those of this optimizer count"


def _adafactor(group: Mapping[str, Any]) -> Mapping[str, Any]:
    own = group["lr"] if group.get("scale_parameter") is group.get("relative_step") is False else None
    found = {
        "decay_rate": abs(group.get("beta2_decay", group.get("decay_rate"))),
        "clip_threshold": group.get("d", group.get("clip_threshold")), "eps": group["eps"][0],
        "weight_decay": group["weight_decay"], "lr": own,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _schedulefree(group: Mapping[str, Any]) -> str | None:
    """Return what makes shares of iterates others than those that follow from a count of steps."""
    if group["r"] or group["weight_lr_power"] != 2:
        return "r=0 and weight_lr_power=2"
    rises = max(1, group["warmup_steps"])
    squares = sum((min(k, rises) / rises) ** 2 for k in range(1, group["k"] + 1))
    same = math.isclose(group["weight_sum"], group["lr"] ** 2 * squares, rel_tol=1e-4)
    return None if same else "one learning rate in all steps"


FOREIGN = (
    Foreign(
        "adafactor", "beta2_decay",
        {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"},
        _adafactor, lambda group: None,
        note=f"the state is of torch's Adafactor: its second moments carry over{_RATE}",
    ),
    Foreign(
        "adafactor", "scale_parameter", {}, _adafactor,
        lambda group: None if group["beta1"] is None else "beta1=None: no first moment", ("RMS",),
    ),
    Foreign(
        "muon", "ns_coefficients", {"momentum_buffer": "exp_avg"},
        lambda group: {
            **{name: group[name] for name in ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")},
            "match_rms_adamw": group["adjust_lr_fn"] == "match_rms_adamw",
        },
        lambda group: (
            None if tuple(group["ns_coefficients"]) == _COEFFICIENTS else f"ns_coefficients={_COEFFICIENTS}"
        ),
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
    of theirs are of another rule.
    """
    plain, saved = rule.name.partition("+")[0], packed["param_groups"]
    of = next((f for f in FOREIGN if f.of == plain and saved and f.mark in saved[0]), None)
    if of is None or len(saved) != len(groups):
        return packed, None
    for group in saved:
        if wanted := of.unlike(group):
            raise StateError(f"the state is of another {rule.name}, which has only {wanted}")
    made, note = [{**own, **of.numbers(theirs)} for own, theirs in zip(groups, saved, strict=True)], of.note
    if of.mark == "scale_parameter" and any(g["scale_parameter"] or g["relative_step"] for g in saved):
        note = f"the state is of transformers' Adafactor: its second moments carry over{_RATE}"
    state = dict[int, dict[str, Any]]()
    for place, group in enumerate(saved):
        made[place]["params"] = group["params"]
        for i in (i for i in group["params"] if i in packed["state"]):
            entry = packed["state"][i]
            state[i] = each = {of.names.get(n, n): v for n, v in entry.items() if n not in of.dropped}
            for name, shape in shapes[i].items():
                if isinstance(each.get(name), Tensor) and each[name].numel() == Size(shape).numel():
                    each[name] = each[name].reshape(*shape)
            if plain == "muon":  # second moments are of what is no matrix
                each |= {n: each["exp_avg"].new_zeros(of) for n, of in shapes[i].items() if n not in each}
            if plain == "schedulefree":
                each |= _iterates(group, entry["z"].cpu().float(), weights(i))
    return {**packed, "state": state, "param_groups": made}, note


def _iterates(group: Mapping[str, Any], z: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return what y and x - y are, given z and the weights: y, or x after their ``eval()``."""
    beta1 = group["betas"][0]
    if group["train_mode"]:
        return {"step": group["k"], OFFSET: (weight - z) * ((1 - beta1) / beta1)}
    apart = (weight - z) * (1 - beta1)
    return {"step": group["k"], "master": weight - apart, OFFSET: apart}
