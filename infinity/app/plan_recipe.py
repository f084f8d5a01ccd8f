"""``infinity plan RECIPE``: what a run would need, take and cost, before anything is bought or written."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.app.machines import describe_machine, load_machine, probe
from infinity.app.recipe import Recipe, load_recipe
from infinity.core.errors import BudgetError, RecipeError
from infinity.core.nbytes import format_nbytes
from infinity.engine.config import Dtype
from infinity.observe.summary import PredictedStep
from infinity.planner.clock import COMPUTE, StepCost, play_step
from infinity.planner.machines import Machine

if TYPE_CHECKING:  # torch is imported when a recipe is planned
    from infinity.app.dry_run import DryRun

#: A change is shown if it makes a step faster by this share, at least.
_LEAST_GAIN = 0.01
_DAY_S, _YEAR_S = 86_400.0, 365.25 * 86_400


@dataclass(frozen=True)
class PlannedRun:
    """A dry run and what its step costs.

    Attributes:
        run: The model, its budgets and its trace.
        cost: Of a step.
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


def plan_recipe(
    recipe: Recipe, machine: Machine, ranks: int | None = None, like: "DryRun | None" = None, *,
    here: bool = False, built: Recipe | None = None,
) -> PlannedRun:  # fmt: skip
    """Plan a recipe on a machine.

    Args:
        here: It is this machine: operators are timed, in some seconds.
        built: With the budgets that the model was built with; None: those of ``recipe``.
        like: If it has the same model, on as many ranks, that is not built and recorded again.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: The recipe's model cannot be built from its config.
    """
    from infinity.app.dry_run import dry_run

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
        on: A hardware file, or the name of a shipped one; None: this machine, which is measured.
        ranks: Ranks in all; None: one for each device, or as the launcher says.
        budget: ``memory.device``.
        tokens: Tokens to train on, for time and energy; None: as many as ``train.steps`` take.

    Raises:
        InfinityError: The recipe, the hardware file or the model is invalid, or a budget is too small.
    """
    if budget is not None:
        overrides = [*overrides, f"memory.device={budget}"]
    recipe = load_recipe(path, overrides)
    machine = load_machine(on) if on is not None else probe(_measurable(recipe.memory.nvme))
    if ranks is None and "WORLD_SIZE" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    planned = plan_recipe(recipe, machine, ranks, here=on is None)
    for section in (_model_table, _tier_table, _channel_table):
        console.print(section(planned))
        console.print()
    for line in cost_lines(planned, tokens):
        console.print(Text(line), soft_wrap=True)
    rows = list(changes(planned))
    if rows:
        console.print()
        console.print(_change_table(planned, rows))


def predict(recipe: Recipe, ranks: int, budgets: Mapping[str, int | None], dtype: Dtype) -> PredictedStep:
    """Predict the steps of a run on this machine, which is measured; takes some seconds.

    Args:
        budgets: Those that the run had, by tier.
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
        advice = f"{best.what}: {best.tokens_per_s / planned.tokens_per_s - 1:+.0%} tokens/s"
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


@dataclass(frozen=True, slots=True)
class Change:
    """What would make the run faster, and its predicted cost."""

    what: str
    tokens_per_s: float
    bottleneck: str


def changes(planned: PlannedRun) -> Iterator[Change]:
    """Yield changes that gain something, the best first; each is a plan of its own."""
    found = []
    for what, make in _candidates(planned):
        try:
            changed = make()
        except BudgetError:
            continue
        if changed.over_nbytes() > max(0, planned.over_nbytes()):
            continue
        if changed.tokens_per_s > (1 + _LEAST_GAIN) * planned.tokens_per_s:
            found.append(Change(what, changed.tokens_per_s, changed.cost.bottleneck))
    yield from sorted(found, key=lambda change: -change.tokens_per_s)


def _candidates(planned: PlannedRun) -> Iterator[tuple[str, Callable[[], PlannedRun]]]:
    run = planned.run
    recipe, machine, trace = run.recipe, run.machine, run.trace
    memory, train = recipe.memory, recipe.train

    def again(changed: "DryRun") -> PlannedRun:
        return PlannedRun(changed, play_step(changed.trace, changed.setup))

    if memory.nvme and machine.drives.per_node:
        drives = machine.drives
        for more in (1, drives.per_node):
            many = replace(machine, drives=replace(drives, per_node=drives.per_node + more))
            price = f", {more * drives.price:,.0f} a node" if drives.price else ""
            what = "one more drive" if more == 1 else f"{more} more drives"
            if more == 1 or drives.per_node > 1:
                yield f"{what} in each node{price}", lambda many=many: again(run.changed(machine=many))  # type: ignore[misc]
    if memory.nvme and memory.resident and any(unit.on_nvme for unit in run.units):
        twice = replace(recipe, memory=replace(memory, host=2 * run.host_nbytes))
        host = replace(machine, host=replace(machine.host, memory=2 * machine.host.memory))
        yield (
            f"twice the host memory (memory.host={2 * run.host_nbytes >> 20}MiB)",
            lambda: again(run.changed(recipe=twice, machine=host)),
        )
    if machine.on_accelerator and memory.device is None and 4 * run.division.total < 3 * run.device_nbytes:
        most = max(run.division.total, run.device_nbytes - trace.peak_nbytes)
        more_device = replace(recipe, memory=replace(memory, device=most, activations=memory.activations))
        yield (
            f"all of the device's memory (memory.device={most // 2**30}GiB)",
            lambda: again(run.changed(recipe=more_device)),
        )
    batch = replace(recipe, train=replace(train, batch_size=2 * train.batch_size))
    yield (
        f"a larger batch (train.batch_size={2 * train.batch_size})",
        lambda: again(run.changed(recipe=batch, trace=trace.scaled(2))),
    )
    if train.schedule == "step":
        accumulate = replace(recipe, train=replace(train, accumulate=2 * train.accumulate))
        yield (
            f"more micro-batches a step (train.accumulate={2 * train.accumulate})",
            lambda: again(run.changed(recipe=accumulate)),
        )
    if recipe.optim.max_grad_norm is not None:
        free = replace(recipe, optim=replace(recipe.optim, max_grad_norm=None))
        yield "no clipping (optim.max_grad_norm=null)", lambda: again(run.changed(recipe=free))
    if run.ranks > 1 and recipe.partition.reduce_dtype == "fp32" and run.dtype != "fp32":
        half = replace(recipe, partition=replace(recipe.partition, reduce_dtype="compute"))
        yield (
            "gradients added in the compute dtype (partition.reduce_dtype=compute)",
            lambda: again(run.changed(recipe=half)),
        )


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
                f"{run.micro_batches} x {run.trace.tokens:,} tokens a rank, "
                f"activations: {run.policy}"
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
    least = run.division.least + run.trace.peak_nbytes
    rows = [
        (
            "device", "", "",
            f"{_size(run.division.total)} + {_size(run.trace.peak_nbytes)} of activations",
            _size(least),
            _size(run.recipe.memory.device or run.division.total),
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
    if (over := planned.over_nbytes()) > 0:
        yield (
            f"does not fit: units and activations take {format_nbytes(over)} more than a device has; lower "
            "train.batch_size or model.seq_len, or set memory.activations=recompute, or memory.device to plan"
        )
    if run.spilled_nbytes:
        yield (
            f"{format_nbytes(run.spilled_nbytes)} of gradients wait on NVMe in each step; "
            f"{'memory.host' if run.machine.on_accelerator else 'memory.device'} is too small for them"
        )
    disk, drives = planned.disk_nbytes(), run.machine.drives
    if disk > drives.per_node * drives.memory:
        yield (
            f"does not fit: the drives of a node need {format_nbytes(disk)}, and have "
            f"{format_nbytes(drives.per_node * drives.memory)}; memory.versions=1 takes half"
        )
    total = tokens or planned.tokens * run.recipe.train.steps
    total_s = total / planned.tokens_per_s
    energy = f", {planned.watts() * total_s / 3.6e6:,.3g} kWh" if planned.watts() else ""
    yield f"{count(total)} tokens take {seconds(total_s)}{energy}"
    if written := planned.written_per_day():
        last = planned.drives_last_s()
        per_day = written / max(1, drives.per_node) / drives.memory
        life = f"; the drives last {seconds(last)}" if last is not None else ""
        yield (
            f"{format_nbytes(written)} are written to a node's drives a day, {per_day:.2g} drive writes per "
            f"day{life}"
        )
    yield f"planned in {planned.planning_s:.2g} s, without reading a weight"


def _change_table(planned: PlannedRun, rows: Sequence[Change]) -> Table:
    table = _table("to be faster", "tokens/s", "gain", "bottleneck then")
    for row in rows:
        gain = row.tokens_per_s / planned.tokens_per_s - 1
        table.add_row(
            Text(row.what), Text(f"{row.tokens_per_s:,.0f}"), Text(f"{gain:+.0%}"), Text(row.bottleneck)
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
