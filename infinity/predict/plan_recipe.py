"""Implements ``infinity plan RECIPE``: what a run would need, take and cost, before it runs."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infinity.core.errors import RecipeError, library_errors, quiet_libraries
from infinity.core.files import write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.process import launched
from infinity.engine.executor import Dtype
from infinity.observe.metrics import PredictedStep
from infinity.planner.search import PlanSearch
from infinity.predict.best import SPLIT, Best, changes, find_best, gain, ways_to_fit, written
from infinity.predict.dry_run import DAY_S, DryRun, dry_run
from infinity.predict.machines import Machine, describe_machine, load_machine, measurable, probe
from infinity.predict.plan_run import make_table, print_line
from infinity.predict.step import COMPUTE
from infinity.recipes.loading import load_recipe, named_keys
from infinity.recipes.objectives import OBJECTIVES
from infinity.recipes.recipe import Recipe

_YEAR_S = 365.25 * DAY_S


@quiet_libraries()
def show_recipe(
    path: str, overrides: Sequence[str], console: Console, *, on: str | None = None,
    ranks: int | None = None, budget: str | None = None, tokens: float | None = None, best: bool = False,
    tokens_per_step: int | None = None, output: Path | None = None,
) -> None:  # fmt: skip
    """Print the plan of a recipe, or of the best one that follows from it.

    Args:
        overrides: Overrides of the recipe, and of the hardware file.
        on: A hardware file, or the name of a shipped one; None: this machine, which is measured.
        ranks: Ranks in all; None: one for each device, or as the launcher says.
        budget: ``memory.device``.
        tokens: Tokens to train on, for time and energy; None: as ``train.steps`` says, if given.
        best: Find the fastest recipe that fits; see :func:`infinity.predict.best.find_best`.
        tokens_per_step: Its tokens of a step on all ranks; None: as many as the recipe has.
        output: A file that it is written to.
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
    overrides = [each for each in overrides if each not in of_machine]
    recipe = load_recipe(path, overrides)
    machine = load_machine(on, of_machine) if on is not None else probe(measurable(recipe.memory.nvme))
    if ranks is None and launched().launcher:
        ranks = launched().world_size
    began_s = time.perf_counter()
    if best:
        named = named_keys(path, overrides)
        fixed = named if tokens_per_step is None else named - SPLIT | named_keys(None, overrides)
        with console.status("looking for the fastest recipe that fits") as status:
            here = on is None
            found = find_best(
                recipe, machine, ranks, fixed, tokens=tokens_per_step, here=here, say=status.update
            )
        planned = found.planned
        _show_best(found, console)
    else:
        planned = dry_run(recipe, machine, ranks, here=on is None)
    _, planning_s = planned.cost, time.perf_counter() - began_s  # the step is played here, too
    for table in (_model_table(planned), _tier_table(planned), _channel_table(planned)):
        console.print(table)
        console.print()
    for line in cost_lines(planned, tokens):
        print_line(console, line)
    print_line(console, f"planned in {planning_s:.2g} s, without reading a weight")
    if best and output is not None:
        _write_best(found, named, output, path)
        print_line(console, f"wrote {output}; train with: infinity train {output}")
    if not best:
        _show_changes(planned, console)


def _show_changes(planned: DryRun, console: Console) -> None:
    for title, found in (("to fit", ways_to_fit(planned)), ("to be faster", changes(planned))):
        rows = [
            (what, f"{run.tokens_per_s:,.0f}", gain(run, planned), run.cost.bottleneck) for what, run in found
        ]
        if rows:
            console.print()
            console.print(make_table([title, "tokens/s", "gain", "bottleneck then"], rows))


def _show_best(found: Best, console: Console) -> None:
    rows = []
    for each in found.effects:  # a line for each key
        to, was = (written(keys).replace(" ", "\n") for keys in (each.keys, each.was))
        rows.append((to, was, each.without))
    if rows:
        table = make_table(["changed to", "from", "without this change"], rows)
        table.columns[-1].no_wrap = False  # keys stay whole on a narrow terminal
        console.print(table)
    else:
        print_line(console, "nothing is changed: no candidate is faster than the recipe as written")
    print_line(
        console,
        f"best of {found.tried}: {found.planned.tokens_per_s:,.0f} tokens/s; as written: {found.as_written}",
    )
    console.print()


def _write_best(found: Best, named: Collection[str], output: Path, path: str) -> None:
    """Write the recipe, with the keys that were named and those that differ from their defaults."""
    planned = found.planned
    rate, where = f"{planned.tokens_per_s:,.0f} tokens/s", planned.machine.nodes.name
    lines = [
        f"# Found by infinity plan {path} --best for {where}: {rate}. As written: {found.as_written}.",
        *(f"# {written(each.keys)}: without, {each.without}" for each in found.effects),
        planned.recipe.to_yaml(named),
    ]
    with library_errors(RecipeError, f"--output {output}"):
        write_file(output, "\n".join(lines))


@quiet_libraries()
def predict(recipe: Recipe, ranks: int, budgets: Mapping[str, int | None], dtype: Dtype) -> PredictedStep:
    """Predict the steps of a run on this machine, which is measured; takes some seconds.

    ``dtype`` is the one that the run had: measured again, ``auto`` may be another one.
    """
    memory = recipe.memory
    policy = memory.activations if recipe.train.schedule == "layer" else memory.policy
    host, device = budgets.get("host") or memory.host, memory.device or budgets.get("device")
    memory = replace(memory, host=host, device=device, activations=policy)
    machine = probe(measurable(memory.nvme))
    built = replace(recipe, train=replace(recipe.train, dtype=dtype))
    planned = dry_run(replace(built, memory=memory), machine, ranks, here=True, built=built)
    best, cost = next(iter(changes(planned)), None), planned.cost
    advice = None if best is None else f"{best.what}: {gain(best.planned, planned)} tokens/s"
    return PredictedStep(
        step_s=cost.step_s, nbytes_read=cost.nbytes.get("NVMe read", 0),
        nbytes_written=cost.nbytes.get("NVMe write", 0), bottleneck=cost.bottleneck, advice=advice,
    )  # fmt: skip


def _model_table(run: DryRun) -> Table:
    recipe, ranks = run.recipe, run.model.ranks
    trained = sum(unit.params for unit in run.units if unit.trainable)
    parts = f"{count(run.params)} parameters"
    parts += f", {count(trained)} trained" if trained < run.params else ""
    each = f"{len(recipe.adapters)} adapters x " if recipe.adapters else ""
    step = (
        f"{ranks} rank{'s' if ranks > 1 else ''}, {run.model.dtype}, {each}{recipe.train.accumulate} x "
        f"{recipe.tokens:,} tokens a rank"
        f"{', through each block together' * run.layered}, activations: {run.policy}"
    )
    rows = [
        ("model", f"{recipe.model.path or 'a new GPT'}: {parts}, in {len(run.units)} units"),
        ("machine", describe_machine(run.machine)),
        ("step", step),
        *(("note", note) for note in run.model.notes),
        *[("note", "planned as without train.stages, so with the weights of all blocks")]
        * recipe.train.stages,
    ]
    table = make_table(["", ""], rows)
    table.show_header = False
    table.columns[0].style = "bold"
    table.columns[1].no_wrap = False
    return table


def _tier_table(run: DryRun) -> Table:
    machine = run.machine
    on_nvme, on_host = ([u for u in run.units if u.on_nvme is each] for each in (True, False))
    resident = sum(unit.resident_nbytes for unit in on_host)
    budget = _size(run.recipe.memory.device or run.division.total)
    least_nbytes = run.peak_nbytes  # of activations, however they are planned
    if run.policy == "plan":
        least_nbytes = PlanSearch(run.profile, run.channels()).smallest_budget()
    columns = ["tier", "units", "parameters", "needed", "least", "budget", "there"]
    rows = [
        (
            "device", "", "",
            f"{_size(run.division.total)} + {_size(run.peak_nbytes)} of activations",
            f"{_size(run.division.least)} + {_size(least_nbytes)}",
            budget if run.policy == "plan" else f"{budget} + activations",
            _size(run.device_nbytes),
        ),
        (
            "host", f"{len(on_host)}", count(sum(u.params for u in on_host)),
            f"{_size(resident)} of states", _size(run.least_host_nbytes()), _size(run.host_nbytes),
            _size(machine.host.memory // run.local),
        ),
        (
            "NVMe", f"{len(on_nvme)}", count(sum(u.params for u in on_nvme)),
            _size(run.disk_nbytes() // run.local), "", "",
            _size(machine.drives.per_node * machine.drives.memory // run.local),
        ),
    ]  # fmt: skip
    return make_table(columns, rows, title="each rank")


def _channel_table(planned: DryRun) -> Table:
    cost, rows = planned.cost, []
    for name, busy_s in sorted(cost.busy_s.items(), key=lambda each: -each[1]):
        if busy_s:
            shown = name + ("  <- bottleneck" if name == cost.bottleneck else "")
            moved = f"{cost.nbytes[name]:,}" if name in cost.nbytes else ""
            rows.append((shown, moved, seconds(busy_s), f"{busy_s / cost.step_s:.0%}"))
    return make_table(["channel", "bytes a step", "busy", "of the step"], rows, title="each rank, each step")


def cost_lines(run: DryRun, tokens: float | None = None) -> Iterator[str]:
    """Yield lines about time, energy and the drives."""
    cost = run.cost
    if missing := list(run.missing()):
        yield f"does not fit: it lacks {', '.join(missing)}; the times are those of a machine that has it"
    yield (
        f"a step takes {seconds(cost.step_s)}: {run.tokens_per_s:,.0f} tokens/s, "
        f"{run.flops_per_s / 1e12:.3g} Tflop/s a rank, MFU {run.mfu:.1%}; "
        f"{cost.busy_s.get(COMPUTE, 0.0) / cost.step_s:.0%} of the ideal step (all states in device memory)"
    )
    waits = ", ".join(f"{cause} {seconds(s)}" for cause, s in cost.stall_s.items() if s > 0.005 * cost.step_s)
    yield f"compute waits for: {waits or 'nothing'}; the bottleneck is {cost.bottleneck}"
    if there := run.division.on_device:
        yield (
            f"{len(there)} of {len(run.units)} units have their states in device memory, "
            f"{format_nbytes(run.division.states)}, and are updated there"
        )
    if run.spilled_nbytes:
        each = "micro-batch" if run.micro_batches > 1 else "step"
        yield (
            f"{format_nbytes(run.spilled_nbytes)} of gradients wait on NVMe in each {each}; "
            f"{'memory.host' if run.machine.on_accelerator else 'memory.device'} is too small for them"
        )
    if run.passing is not None and run.passing.nbytes:
        yield run.passing.describe()
    nodes, devices, drives = run.machine.nodes, run.machine.devices, run.machine.drives
    steps = run.recipe.train.steps
    total = tokens or run.tokens * (steps or 1)
    total_s = total / run.tokens_per_s
    line = f"{count(total)} tokens take {seconds(total_s)}"
    if steps is None and not tokens:
        line = f"a step takes {seconds(total_s)}; --tokens says what train.epochs="
        line += f"{run.recipe.train.epochs:g} take"
    if watts := (devices.per_node * devices.watts + run.machine.host.watts) * nodes.count:
        line += f", {watts * total_s / 3.6e6:,.3g} kWh"
    if nodes.price_per_h is not None:
        line += f", at a cost of {nodes.price_per_h * nodes.count * total_s / 3600:,.4g}"
    yield line
    yield from _beside(run)
    if written := run.written_per_day():
        last = run.drives_last_s()
        per_day = written / max(1, drives.per_node) / drives.memory
        life = f"; the drives last {seconds(last)}" if last is not None else ""
        yield (
            f"{format_nbytes(written)} are written to a node's drives a day, {per_day:.2g} drive writes per "
            f"day{life}"
        )


def _beside(run: DryRun) -> Iterator[str]:
    """Yield what evaluations and a reference take, which is no part of a step."""
    train, trained_nbytes = run.recipe.train, sum(unit.nbytes for unit in run.units if unit.trainable)
    if train.keep_best is not None:
        room = format_nbytes(3 * trained_nbytes)
        yield f"the best models take up to {room} in {run.recipe.run.dir} (train.keep_best)"
    if run.recipe.optim.rule.averages:
        room = format_nbytes(trained_nbytes)
        yield f"an evaluation of the average takes {room} more, of memory.host or the drives (optim.ema)"
    if OBJECTIVES[train.task].reference:
        yield "the reference is one forward pass over the data before the first step; steps have none"


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
    for limit, name in ((_YEAR_S, "years"), (DAY_S, "days"), (3600.0, "h"), (120.0, "min")):
        if time_s >= limit:
            return f"{time_s / (60.0 if name == 'min' else limit):.3g} {name}"
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1e3 * time_s:.3g} ms"


def _size(nbytes: float) -> str:
    return format_nbytes(nbytes) if nbytes else "0"
