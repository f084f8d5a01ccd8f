"""Finds single changes of a recipe, or of its machine, that make a plan faster or make it fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, StateError
from infinity.predict.dry_run import DEVICE_MEMORY, DRIVES, HOST_MEMORY, DryRun
from infinity.predict.machines import Machine
from infinity.recipes.recipe import Recipe, with_values

#: A change is shown if it makes a step faster by at least this share.
LEAST_GAIN = 0.01

#: Keys of a recipe and of a hardware file, with new values.
Keys = Mapping[str, int | str | None]


class Candidate(NamedTuple):
    """Pairs changed keys of a recipe or a machine with their plan, or the error that there is none."""

    keys: Keys
    planned: DryRun | None
    lacks: Mapping[str, int]  # bytes, by part of the machine; 0: not known
    error: str = ""


class Change(NamedTuple):
    """Pairs a change, in words, with the plan that has it."""

    what: str
    planned: DryRun


def attempt(keys: Keys, plan: Callable[[], DryRun]) -> Candidate:
    """Return ``keys`` with what ``plan`` returns, or with the error that there is none."""
    try:
        planned = plan()
    except BudgetError as error:
        lacks = HOST_MEMORY if error.part == "memory.host" else DEVICE_MEMORY
        return Candidate(keys, None, {lacks: 0}, str(error))
    except (StateError, SettingError) as error:  # no blocks for a layer schedule, no drives to store on
        return Candidate(keys, None, {"": 0}, str(error))
    return Candidate(keys, planned, planned.lacks())


def gain(run: DryRun, planned: DryRun) -> str:
    return f"{run.tokens_per_s / planned.tokens_per_s - 1:+.0%}"


def ranked(
    planned: DryRun, rows: Iterable[tuple[str, Keys]], fits: Callable[[DryRun], bool], least: float = 0.0
) -> list[Change]:
    """Return the changes whose plan fits and has more than ``least`` tokens per second, the fastest first."""
    found = []
    for what, keys in rows:
        run = attempt(keys, partial(_changed, planned, keys)).planned
        # What a bound rules out is not played.
        if run is not None and fits(run) and run.tokens / run.least_s() > least and run.tokens_per_s > least:
            found.append(Change(what, run))
    return sorted(found, key=lambda change: -change.planned.tokens_per_s)


def changes(planned: DryRun) -> list[Change]:
    """Return changes that make the plan better, the best first."""
    rows = ((f"{what} ({written(keys)})", keys) for what, keys in _faster(planned))
    most, least = max(0, planned.over_nbytes()), (1 + LEAST_GAIN) * planned.tokens_per_s
    return ranked(planned, rows, lambda run: run.over_nbytes() <= most, least)


def ways_to_fit(planned: DryRun) -> list[Change]:
    """Return changes that make a plan fit, the fastest first; several together where no single one does."""
    single = list(_smaller(planned))
    together = {key: value for keys in single for key, value in keys.items()}
    for tried in (single, [together] if len(single) > 1 else []):
        if found := ranked(planned, ((written(keys), keys) for keys in tried), lambda run: not run.lacks()):
            return found
    return []


def with_keys(recipe: Recipe, machine: Machine, keys: Keys) -> tuple[Recipe, Machine]:
    """Return a recipe and a machine with other values of ``keys``."""
    of_recipe = {key: value for key, value in keys.items() if hasattr(recipe, key.partition(".")[0])}
    of_machine = {key: value for key, value in keys.items() if key not in of_recipe}
    return with_values(recipe, of_recipe), with_values(machine, of_machine)


def _changed(planned: DryRun, keys: Keys) -> DryRun:
    return planned.changed(*with_keys(planned.recipe, planned.machine, keys))


def written(keys: Keys) -> str:
    found = []
    for key, value in keys.items():
        text = "null" if value is None else str(value)
        if key in ("memory.host", "memory.device", "host.memory") and isinstance(value, int):
            units = ((2**30, "GiB"), (2**20, "MiB"))
            text = next((f"{value // unit}{name}" for unit, name in units if value % unit == 0), text)
        found.append(f"{key}={text}")
    return " ".join(found)


def whole(nbytes: int) -> int:
    """Return the next smaller size that a person writes: whole GiB, or MiB if it is small."""
    unit = 2**30 if nbytes >= 2**33 else 2**20 if nbytes >= 2**20 else 1
    return nbytes // unit * unit


def _faster(run: DryRun) -> Iterator[tuple[str, Keys]]:
    recipe, machine, drives = run.recipe, run.machine, run.machine.drives
    memory, train = recipe.memory, recipe.train
    if memory.nvme and drives.per_node:
        for more in sorted({1, drives.per_node}):
            what = "one more drive in each node" if more == 1 else f"{more} more drives in each node"
            what += f", {more * drives.price:,.0f} a node" if drives.price else ""
            yield what, {"drives.per_node": drives.per_node + more}
    if memory.nvme and memory.resident and any(unit.on_nvme for unit in run.units):
        half = machine.host.memory // run.local // 2
        if run.host_nbytes < half:
            yield "half of the host memory", {"memory.host": whole(half)}
        host = whole(2 * max(half, run.host_nbytes))
        yield "twice the host memory", {"host.memory": 2 * machine.host.memory, "memory.host": host}
    if machine.on_accelerator and memory.device is None and 4 * run.division.total < 3 * run.device_nbytes:
        # Planned activations have a part of it; others are beside it.
        beside = 0 if memory.activations in ("auto", "plan") and not run.layered else run.trace.peak_nbytes
        most = whole(max(run.division.total, run.device_nbytes - beside))
        yield "all of the device's memory", {"memory.device": most}
    yield "a larger batch", {"train.batch_size": 2 * train.batch_size}
    yield "more micro-batches a step", {"train.accumulate": 2 * train.accumulate}
    if recipe.micro_batches > 1 and train.schedule != "layer":
        layers: Keys = {"memory.activations": "auto", "train.schedule": "layer"}
        yield "weights read once for all micro-batches", layers
    if recipe.optim.max_grad_norm is not None:
        yield "no clipping", {"optim.max_grad_norm": None}
    if run.model.ranks > 1 and recipe.partition.reduce_dtype == "fp32" and run.model.dtype != "fp32":
        yield "gradients added in the compute dtype", {"partition.reduce_dtype": "compute"}


def _smaller(planned: DryRun) -> Iterator[Keys]:
    recipe, machine = planned.recipe, planned.machine
    memory, train = recipe.memory, recipe.train
    lacks = planned.lacks()
    if DEVICE_MEMORY in lacks or (not machine.on_accelerator and HOST_MEMORY in lacks):
        if planned.policy not in ("recompute", "plan"):
            yield {"memory.activations": "recompute"}
        if planned.layered and planned.group > 1 and planned.model.has_experts:
            yield {"train.group": max(1, planned.group // 4)}
        if not planned.layered:
            share = 1 if machine.on_accelerator else 2  # beside the cores there are states in host memory
            yield {"memory.activations": "plan", "memory.device": whole(planned.device_nbytes // share)}
        if train.batch_size > 1:
            yield {"train.batch_size": train.batch_size // 2}
        elif recipe.model.seq_len > 1:
            yield {"model.seq_len": recipe.model.seq_len // 2}
    if HOST_MEMORY in lacks and memory.nvme:
        yield {"memory.host": whole(machine.host.memory // planned.local // 2)}
    if DRIVES in lacks and memory.versions == 2:
        yield {"memory.versions": 1}
    if DRIVES in lacks and machine.drives.per_node:
        yield {"drives.per_node": -(-planned.disk_nbytes() // machine.drives.memory)}
