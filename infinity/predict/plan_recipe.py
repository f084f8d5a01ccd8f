"""``infinity plan RECIPE``: what a run would need, take and cost, before anything is bought or written."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.core.errors import BudgetError, RecipeError, StateError
from infinity.core.nbytes import format_nbytes
from infinity.engine.config import Dtype
from infinity.observe.summary import PredictedStep
from infinity.planner.clock import play_step
from infinity.planner.events import COMPUTE, StepCost
from infinity.planner.machines import Machine
from infinity.predict.machines import describe_machine, load_machine, probe
from infinity.recipes.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from infinity.predict.dry_run import DryRun


#: A change is shown if it makes a step faster by this share, at least.
_LEAST_GAIN = 0.01
_DAY_S, _YEAR_S = 86_400.0, 365.25 * 86_400


@dataclass(frozen=True)
class PlannedRun:
    """A dry run and what its step costs.

    Attributes:
        run: The model, its budgets and its trace.
        cost: The cost of a step.
        planning_s: Time that planning took (s).
    """

    run: "DryRun"
    cost: StepCost
    planning_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return int(self.run.trace.tokens * self.run.micro_batches * self.run.ranks)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.cost.step_s

    @property
    def model_flops(self) -> float:
        """Flops of a step on one rank, without recomputation."""
        return float(self.run.trace.model_flops * self.run.micro_batches)

    @property
    def flops_per_s(self) -> float:
        """Model flops per second of one rank."""
        return self.model_flops / self.cost.step_s

    @property
    def mfu(self) -> float:
        """Model flops per second as a share of what the device's datasheet says."""
        devices = self.run.machine.devices
        peak = devices.flops_per_s(self.run.dtype) / devices.efficiency
        return self.flops_per_s / (peak * (1.0 if devices.per_node else 1 / self.run.ranks))

    @property
    def ideal_s(self) -> float:
        """Time of a step with all states in device memory."""
        return self.cost.busy_s.get(COMPUTE, 0.0)

    def disk_nbytes(self) -> int:
        """Bytes on a node's drives: versions, commits of host memory; gradients and activations that wait."""
        memory, units = self.run.recipe.memory, self.run.units
        if not memory.nvme:
            return 0
        stays = any(not unit.on_nvme and unit.trainable for unit in units)
        places = memory.versions + (stays and memory.versions == 2)
        total = self.run.spilled_nbytes + self.run.offloaded_nbytes
        for unit in units:
            if not unit.trainable:
                total += unit.weight_nbytes * (
                    unit.on_nvme and unit.stored is None and unit.base_nbytes is None
                )
            elif unit.on_nvme:
                total += places * (unit.weight_nbytes + unit.state_nbytes)
            elif memory.versions == 2:
                total += 2 * (unit.weight_nbytes + unit.state_nbytes)
        return total * self.run.local

    def written_per_day(self) -> float:
        """Bytes written to the drives of a node in a day of training."""
        return self.cost.nbytes.get("NVMe write", 0) * self.run.local * _DAY_S / self.cost.step_s

    def drives_last_s(self) -> float | None:
        """Time until the drives' endurance is used up; None: nothing is written, or it is not known."""
        drives, written = self.run.machine.drives, self.written_per_day()
        if drives.written_bytes is None or not written or not drives.per_node:
            return None
        return drives.per_node * drives.written_bytes / written * _DAY_S

    def watts(self) -> float:
        """Power of all nodes; 0: not known."""
        machine = self.run.machine
        each = machine.devices.per_node * machine.devices.watts + machine.host.watts
        return each * machine.nodes.count

    def over_nbytes(self) -> int:
        """Bytes of device memory that units and activations take beyond what there is."""
        run = self.run
        return int(run.division.total + run.trace.peak_nbytes - run.device_nbytes)

    def missing(self) -> Iterator[str]:
        """Yield what the plan takes beyond what its machine has."""
        run, drives = self.run, self.run.machine.drives
        if run.machine.on_accelerator and (over := self.over_nbytes()) > 0:
            yield f"{format_nbytes(over)} of device memory"
        host_nbytes = run.host_nbytes
        if not run.machine.on_accelerator:  # what computes is there, too
            states = sum(unit.resident_nbytes for unit in run.units if not unit.on_nvme)
            host_nbytes = max(host_nbytes, states + run.division.total + run.trace.peak_nbytes)
        if (over := host_nbytes * run.local - run.machine.host.memory) > 0:
            yield f"{format_nbytes(over)} of host memory"
        if (over := self.disk_nbytes() - drives.per_node * drives.memory) > 0:
            yield f"{format_nbytes(over)} on the drives of a node"


def plan_recipe(
    recipe: Recipe, machine: Machine, ranks: int | None = None, like: "DryRun | None" = None, *,
    here: bool = False, built: Recipe | None = None,
) -> PlannedRun:  # fmt: skip
    """Plan a recipe on a machine.

    Args:
        here: It is this machine: operators are timed, in some seconds.
        built: The recipe with the budgets that the model was built with; None: ``recipe``.
        like: A dry run; if it has the same model, on as many ranks, that is not built and recorded again.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: The recipe's model cannot be built from its config.
    """
    from infinity.predict.dry_run import dry_run

    began_s = time.perf_counter()
    if ranks is not None:
        machine = machine.with_ranks(ranks)
    count = ranks or machine.devices_in_all
    run = dry_run(recipe, machine, count, like, here=here, built=built)
    return PlannedRun(run, play_step(run.trace, run.setup), time.perf_counter() - began_s)


def show_recipe(
    path: str, overrides: Sequence[str], console: Console, *, on: str | None = None,
    ranks: int | None = None, budget: str | None = None, tokens: float | None = None,
) -> None:  # fmt: skip
    """Print the plan of a recipe.

    Args:
        overrides: Overrides of the recipe, and of the hardware file.
        on: A hardware file, or the name of a shipped one; None: this machine, which is measured.
        ranks: Ranks in all; None: one for each device, or as the launcher says.
        budget: ``memory.device``.
        tokens: Tokens to train on, for time and energy; None: as many as ``train.steps`` take.

    Raises:
        InfinityError: The recipe, the hardware file or the model is invalid, or a budget is too small.
    """
    if budget is not None:
        overrides = [*overrides, f"memory.device={budget}"]
    sections = tuple(f"{each.name}." for each in fields(Machine))
    of_machine = [each for each in overrides if each.startswith(sections)]
    if of_machine and on is None:
        raise RecipeError(
            f"{of_machine[0]}: a key of hardware files; name one with --on, such as the file that infinity "
            "probe --output writes of this machine"
        )
    recipe = load_recipe(path, [each for each in overrides if each not in of_machine])
    machine = load_machine(on, of_machine) if on is not None else probe(_measurable(recipe.memory.nvme))
    if ranks is None and "WORLD_SIZE" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    planned = plan_recipe(recipe, machine, ranks, here=on is None)
    for section in (_model_table, _tier_table, _channel_table):
        console.print(section(planned))
        console.print()
    for line in cost_lines(planned, tokens):
        console.print(Text(line), soft_wrap=True)
    for title, rows in (("to fit", ways_to_fit(planned)), ("to be faster", changes(planned))):
        if shown := list(rows):
            console.print()
            console.print(_change_table(planned, shown, title))


def predict(recipe: Recipe, ranks: int, budgets: Mapping[str, int | None], dtype: Dtype) -> PredictedStep:
    """Predict the steps of a run on this machine, which is measured; takes some seconds.

    Args:
        budgets: Budgets that the run had, by tier.
        dtype: The one that it had: measured again, ``auto`` may be another one.

    Raises:
        InfinityError: The run cannot be planned.
    """
    policy = recipe.memory.activations or ("keep" if recipe.memory.device is None else "plan")
    if recipe.train.schedule == "layer":
        policy = "keep"
    memory = replace(
        recipe.memory,
        host=budgets.get("host") or recipe.memory.host,
        device=recipe.memory.device or budgets.get("device"),
        activations=policy,
    )
    machine = probe(_measurable(memory.nvme))
    built = replace(recipe, train=replace(recipe.train, dtype=dtype))
    planned = plan_recipe(replace(built, memory=memory), machine, ranks, here=True, built=built)
    best, cost = next(changes(planned), None), planned.cost
    advice = None
    if best is not None:
        advice = f"{best.what}: {best.planned.tokens_per_s / planned.tokens_per_s - 1:+.0%} tokens/s"
    return PredictedStep(
        step_s=cost.step_s, nbytes_read=cost.nbytes.get("NVMe read", 0),
        nbytes_written=cost.nbytes.get("NVMe write", 0), bottleneck=cost.bottleneck, advice=advice,
    )  # fmt: skip


def _measurable(directories: Sequence[str]) -> list[Path]:
    """The directories, or the nearest ones above them that exist."""
    found = []
    for each in directories:
        path = Path(each).absolute()
        while not path.is_dir() and path != path.parent:
            path = path.parent
        if not os.access(path, os.W_OK):
            raise RecipeError(
                f"memory.nvme: {path} cannot be written, so its drive cannot be measured; name the hardware "
                "with --on"
            )
        found.append(path)
    return found


# --- what to change ----------------------------------------------------------------------------------

#: Keys of a recipe and of a hardware file, with other values.
Keys = Mapping[str, int | str | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A plan of its own, of a recipe or a machine in which some keys differ.

    Attributes:
        what: The change in words, with the keys.
    """

    what: str
    planned: PlannedRun


def changes(planned: PlannedRun) -> Iterator[Change]:
    """Yield changes that gain something, the best first."""
    found = []
    for what, keys in _faster(planned.run):
        changed = _changed(planned, keys)
        if changed is None or changed.over_nbytes() > max(0, planned.over_nbytes()):
            continue
        if changed.tokens_per_s > (1 + _LEAST_GAIN) * planned.tokens_per_s:
            found.append(Change(f"{what} ({_written(keys)})", changed))
    yield from sorted(found, key=lambda change: -change.planned.tokens_per_s)


def ways_to_fit(planned: PlannedRun) -> Iterator[Change]:
    """Yield changes with which a plan that does not fit its machine does, the fastest first.

    Where no single one is enough, several are made together.
    """
    single = list(_smaller(planned))
    together = {key: value for keys in single for key, value in keys.items()}
    for tried in (single, [together] if len(single) > 1 else []):
        plans = [(keys, _changed(planned, keys)) for keys in tried]
        found = [
            Change(_written(keys), changed)
            for keys, changed in plans
            if changed is not None and not any(changed.missing())
        ]
        if found:
            yield from sorted(found, key=lambda change: -change.planned.tokens_per_s)
            return


def _changed(planned: PlannedRun, keys: Keys) -> PlannedRun | None:
    """Plan with other keys; None: that cannot be."""
    sections: dict[str, Any] = {"recipe": planned.run.recipe, "machine": planned.run.machine}
    for key, value in keys.items():
        section, name = key.split(".")
        whole = "machine" if hasattr(sections["machine"], section) else "recipe"
        changed = replace(getattr(sections[whole], section), **{name: value})
        sections[whole] = replace(sections[whole], **{section: changed})
    try:
        run = planned.run.changed(**sections)
    except (BudgetError, StateError):  # or no blocks were found for a layer schedule
        return None
    return PlannedRun(run, play_step(run.trace, run.setup))


def _written(keys: Keys) -> str:
    """Keys as a person writes them on the command line, or in a file."""
    return " ".join(f"{key}={_value(key, value)}" for key, value in keys.items())


def _value(key: str, value: int | str | None) -> str:
    if value is None:
        return "null"
    if key in ("memory.host", "memory.device", "host.memory") and isinstance(value, int):
        units = ((2**30, "GiB"), (2**20, "MiB"))
        return next((f"{value // unit}{name}" for unit, name in units if value % unit == 0), str(value))
    return str(value)


def _whole(nbytes: int) -> int:
    """The next smaller size that a person writes: of whole GiB, or MiB if it is small."""
    unit = 2**30 if nbytes >= 2**33 else 2**20 if nbytes >= 2**20 else 1
    return nbytes // unit * unit


def _faster(run: "DryRun") -> Iterator[tuple[str, Keys]]:
    """Yield changes that may make steps faster, in words and as keys."""
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
            yield "half of the host memory", {"memory.host": _whole(half)}
        host = _whole(2 * max(half, run.host_nbytes))
        yield "twice the host memory", {"host.memory": 2 * machine.host.memory, "memory.host": host}
    if machine.on_accelerator and memory.device is None and 4 * run.division.total < 3 * run.device_nbytes:
        # Planned activations have a part of it; others are beside it.
        beside = 0 if memory.activations in (None, "plan") and not run.layered else run.trace.peak_nbytes
        most = _whole(max(run.division.total, run.device_nbytes - beside))
        yield "all of the device's memory", {"memory.device": most}
    yield "a larger batch", {"train.batch_size": 2 * train.batch_size}
    yield "more micro-batches a step", {"train.accumulate": 2 * train.accumulate}
    if train.accumulate > 1 and train.schedule == "step":
        yield (
            "weights read once for all micro-batches",
            {"memory.activations": None, "train.schedule": "layer"},
        )
    if recipe.optim.max_grad_norm is not None:
        yield "no clipping", {"optim.max_grad_norm": None}
    if run.ranks > 1 and recipe.partition.reduce_dtype == "fp32" and run.dtype != "fp32":
        yield "gradients added in the compute dtype", {"partition.reduce_dtype": "compute"}


def _smaller(planned: PlannedRun) -> Iterator[Keys]:
    """Yield changes that take less of what a machine lacks."""
    run = planned.run
    memory, train, machine = run.recipe.memory, run.recipe.train, run.machine
    missing = " ".join(planned.missing())
    if "device memory" in missing or (not machine.on_accelerator and "host memory" in missing):
        if run.policy not in ("recompute", "plan"):
            yield {"memory.activations": "recompute"}
        if not run.layered:
            share = 1 if machine.on_accelerator else 2  # beside the cores there are states in host memory
            yield {"memory.activations": "plan", "memory.device": _whole(run.device_nbytes // share)}
        if train.batch_size > 1:
            yield {"train.batch_size": train.batch_size // 2}
        elif run.recipe.model.seq_len > 1:
            yield {"model.seq_len": run.recipe.model.seq_len // 2}
    if "host memory" in missing and memory.nvme:
        yield {"memory.host": _whole(machine.host.memory // run.local // 2)}
    drives = machine.drives
    if "drives" in missing:
        if memory.versions == 2:
            yield {"memory.versions": 1}
        if drives.per_node:
            yield {"drives.per_node": -(-planned.disk_nbytes() // drives.memory)}


# --- output ------------------------------------------------------------------------------------------


def _table(*columns: str, title: str = "") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title or None, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _model_table(planned: PlannedRun) -> Table:
    run = planned.run
    trained = sum(unit.params for unit in run.units if unit.trainable)
    table = _table("", "")
    table.show_header = False
    table.columns[0].style = "bold"
    table.columns[1].justify = "left"
    table.columns[1].no_wrap = False
    path = run.recipe.model.path
    parts = f"{count(run.params)} parameters" + (
        f", {count(trained)} trained" if trained < run.params else ""
    )
    rows = [
        ("model", f"{path or 'a new GPT'}: {parts}, in {len(run.units)} units"),
        ("machine", describe_machine(run.machine)),
        (
            "step",
            (
                f"{run.ranks} rank{'s' if run.ranks > 1 else ''}, {run.dtype}, "
                f"{run.recipe.train.accumulate} x {run.recipe.train.batch_size * run.recipe.model.seq_len:,} "
                f"tokens a rank{', through each block together' * run.layered}, activations: {run.policy}"
            ),
        ),
        *(("note", note) for note in run.notes),
    ]
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def _tier_table(planned: PlannedRun) -> Table:
    run, machine = planned.run, planned.run.machine
    table = _table("tier", "units", "parameters", "needed", "least", "budget", "there", title="each rank")
    homes = {True: [u for u in run.units if u.on_nvme], False: [u for u in run.units if not u.on_nvme]}
    resident = sum(unit.resident_nbytes for unit in homes[False])
    budget = _size(run.recipe.memory.device or run.division.total)
    rows = [
        (
            "device", "", "",
            f"{_size(run.division.total)} + {_size(run.trace.peak_nbytes)} of activations",
            f"{_size(run.division.least)} + {_size(run.least_activations_nbytes())}",
            budget if run.policy == "plan" else f"{budget} + activations",
            _size(run.device_nbytes),
        ),
        (
            "host", f"{len(homes[False])}", count(sum(u.params for u in homes[False])),
            f"{_size(resident)} of states", _size(run.least_host_nbytes()), _size(run.host_nbytes),
            _size(machine.host.memory // planned.run.local),
        ),
        (
            "NVMe", f"{len(homes[True])}", count(sum(u.params for u in homes[True])),
            _size(planned.disk_nbytes() // planned.run.local), "", "",
            _size(machine.drives.per_node * machine.drives.memory // planned.run.local),
        ),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _channel_table(planned: PlannedRun) -> Table:
    cost = planned.cost
    table = _table("channel", "bytes a step", "busy", "of the step", title="each rank, each step")
    names = [name for name in sorted(cost.busy_s, key=lambda n: -cost.busy_s[n]) if cost.busy_s[name]]
    for name in names:
        moved = cost.nbytes.get(name)
        table.add_row(
            Text(name + ("  <- bottleneck" if name == cost.bottleneck else "")),
            Text("" if moved is None else f"{moved:,}"),
            Text(seconds(cost.busy_s[name])),
            Text(f"{cost.busy_s[name] / cost.step_s:.0%}"),
        )
    return table


def cost_lines(planned: PlannedRun, tokens: float | None = None) -> Iterator[str]:
    """Yield lines about time, energy and the drives."""
    run, cost = planned.run, planned.cost
    if missing := list(planned.missing()):
        yield f"does not fit: it lacks {', '.join(missing)}; the times are those of a machine that has it"
    yield (
        f"a step takes {seconds(cost.step_s)}: {planned.tokens_per_s:,.0f} tokens/s, "
        f"{planned.flops_per_s / 1e12:.3g} Tflop/s a rank, MFU {planned.mfu:.1%}; "
        f"{planned.ideal_s / cost.step_s:.0%} of the ideal step (all states in device memory)"
    )
    waits = ", ".join(f"{cause} {seconds(s)}" for cause, s in cost.stall_s.items() if s > 0.005 * cost.step_s)
    yield f"compute waits for: {waits or 'nothing'}; the bottleneck is {cost.bottleneck}"
    if run.division.on_device:
        yield (
            f"{len(run.division.on_device)} of {len(run.units)} units have their states in device memory, "
            f"{format_nbytes(run.division.states)}, and are updated there"
        )
    if run.spilled_nbytes:
        yield (
            f"{format_nbytes(run.spilled_nbytes)} of gradients wait on NVMe in each step; "
            f"{'memory.host' if run.machine.on_accelerator else 'memory.device'} is too small for them"
        )
    drives = run.machine.drives
    total = tokens or planned.tokens * run.recipe.train.steps
    total_s = total / planned.tokens_per_s
    energy = f", {planned.watts() * total_s / 3.6e6:,.3g} kWh" if planned.watts() else ""
    price = run.machine.nodes.price_per_h
    price_of_all = ""
    if price is not None:
        price_of_all = f", at a cost of {price * run.machine.nodes.count * total_s / 3600:,.4g}"
    yield f"{count(total)} tokens take {seconds(total_s)}{energy}{price_of_all}"
    if written := planned.written_per_day():
        last = planned.drives_last_s()
        per_day = written / max(1, drives.per_node) / drives.memory
        life = f"; the drives last {seconds(last)}" if last is not None else ""
        yield (
            f"{format_nbytes(written)} are written to a node's drives a day, {per_day:.2g} drive writes per "
            f"day{life}"
        )
    yield f"planned in {planned.planning_s:.2g} s, without reading a weight"


def _change_table(planned: PlannedRun, rows: Sequence[Change], title: str) -> Table:
    table = _table(title, "tokens/s", "gain", "bottleneck then")
    for row in rows:
        gain = row.planned.tokens_per_s / planned.tokens_per_s - 1
        table.add_row(
            Text(row.what),
            Text(f"{row.planned.tokens_per_s:,.0f}"),
            Text(f"{gain:+.0%}"),
            Text(row.planned.cost.bottleneck),
        )
    return table


def count(number: float) -> str:
    """Return a number with three digits and a letter: 1.04 T."""
    for limit, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= limit * 0.9995:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.0f}"


def seconds(time_s: float) -> str:
    """Return a time in the unit that people would use."""
    if not math.isfinite(time_s):
        return "for ever"
    for limit, name in ((_YEAR_S, "years"), (_DAY_S, "days"), (3600.0, "h"), (120.0, "min")):
        if time_s >= limit:
            return f"{time_s / (60.0 if name == 'min' else limit):.3g} {name}"
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1e3 * time_s:.3g} ms"


def _size(nbytes: float) -> str:
    return format_nbytes(nbytes) if nbytes else "0"
