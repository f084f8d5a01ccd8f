"""Every policy for activations on the same clock: models x machines x policies x five budgets.

    OMP_NUM_THREADS=1 python benchmarks/policies.py [--quick] [--page FILE.md] [--json FILE] [--models llama]
    OMP_NUM_THREADS=1 python benchmarks/policies.py --real [--models llama,bert,vit] [--page FILE.md]

Models are profiled once, in real steps on this machine; their profiles stay in ``--profiles``. Rows that the
JSON file has, of the same budget, are not played again. The policies, each by the rule of its paper, are in
``rivals.py``. The second form runs, in real steps that take turns, what the runtime can run
(``memory.activations``: keep, recompute, offload, plan) beside the clock's figures.

[Note: machines]
``drive`` is this machine as measured: NVMe, and a core that I/O takes a share of. The other two have the
proportions of an accelerator, in units of the step: ``link`` has host memory for all that a step saves, and
a link that moves that in the time of forward; ``scarce`` has host memory for half of it. The drives of both
move a quarter of what the link does. A policy that fills more host memory than there is has not kept it.

[Note: who is compared with us]
Our plan has, for each row, the peak that the row reached as its budget. A row that replays single operators
or moves fewer bytes by a code does what the bound, which is one of whole blocks, does not know, and may be
below it: such rows are compared apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from activations import Job, Row, Trainer
from bound import bound
from options import Options, folder_on, say
from replay import steadied
from report import Claim, print_claims, print_table
from rivals import BUDGETED, OURS, REPLAYING, UNBUDGETED, CannotError, Choice, ours, recompute
from turns import Actor

from infinity.core.errors import BudgetError
from infinity.core.plan import PLAN, ActivationPlan, Hardware, Outcome, Phase, Planning, Profile
from infinity.planner.search import RUNGS, PlanSearch, simple_plan
from infinity.planner.simulator import play

#: Rows, length, layers, hidden size of each model; see ``activations.py``. A narrower one would measure the
#: Python between its operators: starting and reading a move takes as long as several of them.
SHAPES = {
    "llama": (2, 256, 6, 768),
    "bert": (2, 256, 6, 768),
    "vit": (4, 196, 6, 768),
    "moe": (2, 256, 6, 256),
    "resnet": (8, 96, 16, 512),
}
QUICK = "llama"
VOCABULARY = 4000
AT_RECOMPUTE, AT_47 = "recompute's peak", "47 %"
#: Peaks that differ by less count as equal.
NEARLY = 0.98
MOST_SLOWER, MOST_GAP, OF_RECOMPUTE, OF_KEEP = 1.02, 0.03, 0.70, 1.03


def profiled(model: str, profiles: Path, dtype: str) -> Planning:
    """Return what a model's step was profiled as; profile it if that has not been done."""
    folder = profiles / model
    if not (folder / PLAN).exists():
        say(f"{model}: profiling")
        with folder_on(profiles, model) as scratch:
            actor = Actor(Trainer, job(model, "plan", dtype, scratch))
            actor.call("profile", str(folder))
            actor.close()
    return Planning.load(folder)


def job(model: str, way: str, dtype: str, folder: Path) -> Job:
    rows, length, layers, hidden = SHAPES[model]
    return Job(way, model, rows, length, layers, hidden, VOCABULARY, str(folder), dtype)


def machines(profile: Profile, measured: Hardware) -> dict[str, Hardware]:
    """Return the machines by name; see [Note: machines]."""
    saved = sum(slot.nbytes for slot in profile.slots if not slot.held)
    forward_s = sum(o.time_s for o in profile.operators if o.phase is Phase.FORWARD)
    link = saved / forward_s
    drive = link / 4
    linked = Hardware(drive, drive, 2 * drive, link, measured.latency_s, 2 * saved)
    return {"drive": measured, "link": linked, "scarce": replace(linked, host_nbytes=saved // 2)}


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy for one budget, as played."""

    model: str
    machine: str
    policy: str
    budget: str  # which of the five; empty: the policy has none
    budget_nbytes: int
    peak_nbytes: int
    step_s: float
    over_keep: float  # its step by that of keeping everything
    replay_s: float  # of single operators, part of the step
    written: int  # bytes to the drive in a step
    read: int
    host_nbytes: int
    keeps: bool  # within the budget, and within the host's memory
    gap: float | None  # its step by the bound, less 1, at its budget (of those that keep one) or its peak
    ours_over: float | None  # our step, with this peak as budget, by its step
    note: str = ""

    @property
    def written_a_day(self) -> float:
        """Bytes that a day of such steps writes to the drive: its wear."""
        return self.written / self.step_s * 86_400 if self.step_s else 0.0


class Setting:
    """One model on one machine."""

    def __init__(self, model: str, machine: str, profile: Profile, hardware: Hardware) -> None:
        self.model, self.machine, self.profile, self.hardware = model, machine, profile, hardware
        self.kept = play(profile, ActivationPlan("keep"), hardware)
        self.least = PlanSearch(profile, hardware).smallest_budget()
        self.recomputed = play(*recompute(profile, hardware, 0), hardware)
        most = self.kept.peak_nbytes
        named = {
            "least": self.least, AT_RECOMPUTE: self.recomputed.peak_nbytes, AT_47: int(0.47 * most),
            "65 %": int(0.65 * most), "85 %": int(0.85 * most),
        }  # fmt: skip
        self.budgets = {name: max(nbytes, self.least) for name, nbytes in named.items()}
        self.bound_s = cache(lambda nbytes: bound(profile, hardware, nbytes))
        self._ours: dict[int, Outcome] = {}

    def ours(self, nbytes: int) -> Outcome | None:
        """Play our plan for a budget; None: it keeps none so small. Those of a rung have the same plan."""
        if nbytes < NEARLY * self.least:
            return None
        nbytes = max(nbytes, self.least)
        most = max(self.kept.peak_nbytes, self.least + 1)
        rung = max(0, min(RUNGS, (nbytes - self.least) * RUNGS // (most - self.least)))
        if rung not in self._ours or nbytes >= self.kept.peak_nbytes:
            self._ours[rung] = play(*ours(self.profile, self.hardware, nbytes), self.hardware)
        return self._ours[rung]

    def rows(self, known: Sequence[Figures] = ()) -> Iterator[Figures]:
        """Play all policies but those of ``known`` rows."""
        there = {(row.policy, row.budget_nbytes, row.budget): row for row in known}
        asked = [(name, "", self.kept.peak_nbytes) for name in UNBUDGETED]
        asked += [(name, budget, nbytes) for budget, nbytes in self.budgets.items() for name in BUDGETED]

        for name, budget, nbytes in asked:
            policy = (UNBUDGETED if not budget else BUDGETED)[name]
            yield there.get((name, nbytes, budget)) or self._row(name, budget, nbytes, policy)

    def _row(self, name: str, budget: str, nbytes: int, policy: Any) -> Figures:
        try:
            choice: Choice = policy(self.profile, self.hardware, nbytes)
        except (CannotError, BudgetError) as error:
            return Figures(
                self.model, self.machine, name, budget, nbytes, *(0, 0.0, 0.0, 0.0, 0, 0, 0), False,
                None, None, str(error),
            )  # fmt: skip
        outcome = play(*choice, self.hardware)
        fits = not budget or outcome.peak_nbytes <= nbytes
        there = outcome.host_peak_nbytes <= self.hardware.host_nbytes
        mine = self.ours(outcome.peak_nbytes)
        at = nbytes if fits and budget else outcome.peak_nbytes
        try:
            gap = outcome.step_s / self.bound_s(at) - 1
        except BudgetError:
            gap = None
        notes = [] if there else ["more host memory than there is"]
        notes += [] if fits else ["over the budget"]
        notes += ["no plan of ours keeps its peak"] if mine is None else []
        return Figures(
            self.model, self.machine, name, budget, nbytes, outcome.peak_nbytes, outcome.step_s,
            outcome.step_s / self.kept.step_s, max(0.0, choice.profile.step_s - self.profile.step_s),
            outcome.nbytes_stored, outcome.nbytes_loaded, outcome.host_peak_nbytes, fits and there, gap,
            None if mine is None else mine.step_s / outcome.step_s, "; ".join(notes),
        )  # fmt: skip

    def claims(self, rows: Sequence[Figures]) -> list[Claim]:
        where, limit = f"{self.model}, {self.machine}", self.hardware.host_nbytes
        rivals = [
            row
            for row in rows
            if row.policy not in (OURS, REPLAYING) and row.peak_nbytes and row.host_nbytes <= limit
        ]
        compared = [row for row in rivals if row.ours_over is not None]
        below = [row.policy for row in rivals if row.ours_over is None]
        claims = []
        for words, some in (
            ("moves or recomputes blocks", [row for row in compared if not _beyond(row)]),
            ("replays operators or codes bytes", [row for row in compared if _beyond(row)]),
        ):
            worst = max(some, key=lambda row: row.ours_over or 0.0)
            at = f"{worst.policy} at {worst.peak_nbytes / self.kept.peak_nbytes:.0%} of keep's peak"
            claims.append(
                Claim.at_most(
                    f"{where}: our step / the best that {words} ({at})", worst.ours_over or 0.0, MOST_SLOWER
                )
            )
        mine = [row for row in rows if row.policy == OURS and row.gap is not None]
        worst = max(mine, key=lambda row: row.gap or 0.0)
        at_recompute, at_47 = (
            next(row.step_s for row in mine if row.budget == budget) for budget in (AT_RECOMPUTE, AT_47)
        )
        floor = self.kept.step_s / self.recomputed.step_s
        return [
            *claims,
            Claim.at_most(f"{where}: rows with a peak below ours {sorted(set(below)) or ''}", len(below), 0),
            Claim.at_most(f"{where}: our gap to the bound (at {worst.budget})", worst.gap or 0.0, MOST_GAP),
            Claim.at_most(
                f"{where}: our step at recompute's peak / recompute's (keep's is {floor:.3f})",
                at_recompute / self.recomputed.step_s, OF_RECOMPUTE,
            ),
            Claim.at_most(
                f"{where}: our step at 47 % of keep's peak / keep's", at_47 / self.kept.step_s, OF_KEEP
            ),
        ]  # fmt: skip


def _beyond(row: Figures) -> bool:
    """Return whether the row does what our plans cannot say."""
    return row.replay_s > 0 or row.policy == "FlashNeuron, coded"


# --- tables, a page and a picture ----------------------------------------------------------------------

COLUMNS = ("policy", "peak MB", "/ keep", "step / keep", "replays", "host MB", "written MB", "TB a day",
           "gap", "ours / it", "")  # fmt: skip


def cells(row: Figures, kept: int) -> list[str]:
    if not row.peak_nbytes:
        return [row.policy, *[""] * 9, f"cannot: {row.note}"]
    return [
        row.policy, f"{row.peak_nbytes / 1e6:.1f}", f"{row.peak_nbytes / kept:.2f}", f"{row.over_keep:.3f}",
        f"{row.replay_s / row.step_s:.1%}" if row.replay_s else "", f"{row.host_nbytes / 1e6:.0f}",
        f"{row.written / 1e6:.0f}", f"{row.written_a_day / 1e12:.1f}",
        "" if row.gap is None else f"{row.gap:+.1%}",
        "" if row.ours_over is None else f"{row.ours_over:.3f}", row.note,
    ]  # fmt: skip


def matrix(setting: Setting, rows: Sequence[Figures]) -> list[list[str]]:
    """Return for each policy its step by keep's for each budget; what is in brackets has not kept it."""
    found = []
    for policy in BUDGETED:
        line = [policy]
        for budget in setting.budgets:
            row = next(row for row in rows if (row.policy, row.budget) == (policy, budget))
            text = f"{row.over_keep:.3f}" if row.peak_nbytes else "cannot"
            line.append(text if row.keeps or not row.peak_nbytes else f"({text})")
        found.append(line)
    return found


def marked(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def said(claims: Sequence[Claim]) -> list[str]:
    return [
        f"{'holds' if each.holds else 'MISSED':7} {each.claim}: {each.value:.3f} (at most {each.target:g})"
        for each in claims
    ]


PAGE = """\
# Policies for activations, on one clock

    OMP_NUM_THREADS=1 python benchmarks/policies.py --page benchmarks/results/{page} \\
        --json benchmarks/results/{json}

What each system's rule would do with the same step, played by the simulator that plays our plans: an
estimate of the rules, not of the systems, which run on other hardware with other kernels. Models are small
and were profiled in fp32 in real steps of one thread on this machine, which others used meanwhile: an
operator's time is the median of those of its name and sizes.

{notes}

Steps are divided by that of keeping everything. `gap` is to the lower bound of `benchmarks/bound.py`, at the
budget if it is kept, else at the row's own peak; `ours / it` our step by the row's, with the row's peak as
our budget. Bytes are those of one step, `TB a day` what a day of such steps writes to the drive. What is in
brackets is over the budget, or fills more host memory than there is. Rows with `replays` recompute single
operators. Ours may leave some of a recomputed block's operators out; the bound is one of whole blocks, which
such a row may be below.
Policies, their sources and what their rules lose or gain here: `benchmarks/rivals.py`.

![step by peak, for each policy]({picture})
"""


def page(path: Path, found: Mapping[Setting, Sequence[Figures]], claims: Sequence[Claim]) -> None:
    notes = (__doc__ or "").partition("[Note: machines]\n")[2].partition("\n\n")[0].replace("``", "`")
    names = {
        "page": path.name,
        "json": path.with_suffix(".json").name,
        "picture": path.with_suffix(".png").name,
    }
    lines = [PAGE.format(notes=notes, **names).rstrip(), "", "## Claims", "", "```"]
    lines += said(claims)
    lines.append("```")
    for setting, rows in found.items():
        sizes = ", ".join(f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in setting.budgets.items())
        kept = f"Keep all: peak {setting.kept.peak_nbytes / 1e6:.1f} MB, {setting.kept.step_s:.3f} s."
        lines += ["", f"## {setting.model}, {setting.machine}", "", f"{kept} Budgets: {sizes}.", ""]
        lines += marked(["step / keep", *setting.budgets], matrix(setting, rows))
        lines += ["", f"Without a budget, and for {AT_47}:", ""]
        some = [row for row in rows if row.budget in ("", AT_47)]
        lines += marked(COLUMNS, [cells(row, setting.kept.peak_nbytes) for row in some])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def draw(path: Path, found: Mapping[Setting, Sequence[Figures]]) -> None:
    """Draw step by peak: a curve for each policy with a budget, a point for each without."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(setting.model for setting in found))
    names = list(dict.fromkeys(setting.machine for setting in found))
    figure = Figure(figsize=(4.6 * len(names), 2.9 * len(models) + 0.6), layout="constrained")
    grid = figure.subplots(len(models), len(names), squeeze=False, sharex=True)
    for setting, rows in found.items():
        axes = grid[models.index(setting.model)][names.index(setting.machine)]
        kept = setting.kept.peak_nbytes
        points = {
            name: sorted(
                (r.peak_nbytes / kept, r.over_keep) for r in rows if r.policy == name and r.peak_nbytes
            )
            for name in (*BUDGETED, *UNBUDGETED)
        }
        for number, name in enumerate(BUDGETED):
            style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1, "zorder": 2}
            style |= {"color": "black", "linewidth": 2, "zorder": 3} if name == OURS else {}
            axes.plot(*_columns(points[name]), label=name, marker="o", markersize=3, **style)
        for number, name in enumerate(UNBUDGETED):
            mark = "osv^Dp*X"[number]
            axes.plot(*_columns(points[name]), mark, label=name, color=f"C{number}", markersize=5)
        axes.set_title(f"{setting.model}, {setting.machine}", fontsize=9, loc="left")
        axes.set_xlim(0, 1.03)
        axes.set_ylim(0.97, 1.8)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("peak / keep's", fontsize=9)
    figure.supylabel("step / keep's", fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)


# --- real steps ----------------------------------------------------------------------------------------


def real(model: str, options: Any, folder: Path) -> tuple[list[list[str]], list[Claim]]:
    """Train under what the runtime runs, in turns; return rows beside the clock's figures, and claims."""
    given = job(model, "keep", options.dtype, folder)
    rows: dict[str, Row] = {}

    def begin(title: str, way: str, budget: int | None = None) -> None:
        say(f"{model}: {title}")
        actor = Actor(Trainer, replace(given, way=way, budget_nbytes=budget))
        rows[title] = Row(actor, actor.call("warm"))

    for way in ("keep", "recompute", "offload"):
        begin(way, way)
    begin(f"plan, {AT_47}", "plan", int(0.47 * rows["keep"].peak))
    begin(f"plan, {AT_RECOMPUTE}", "plan", rows["recompute"].peak)
    plans: dict[str, Planning] = {}
    for title in (f"plan, {AT_47}", f"plan, {AT_RECOMPUTE}"):
        rows[title].actor.call("saved", str(folder / title))
        plans[title] = Planning.load(folder / title)
    planning = plans[f"plan, {AT_47}"]
    for number in range(options.rounds):
        turns = list(rows.values())
        for row in turns[number % len(turns) :] + turns[: number % len(turns)]:
            row.turns.append(row.actor.call("turn", options.steps, None))
    losses = {title: row.actor.call("losses") for title, row in rows.items()}
    for title, row in rows.items():
        if losses[title] != losses["keep"][: len(losses[title])]:
            raise SystemExit(f"{model}, {title}: its losses are not those of keep")
        row.actor.close()
    keep = rows["keep"]
    table, claims = [], []
    for title, row in rows.items():
        clock = row.figures["predicted"]
        if clock is None:
            plan = simple_plan(title, planning.profile, planning.hardware)
            clock = asdict(play(planning.profile, plan, planning.hardware))
        kept_s = plans.get(title, planning).kept.step_s  # of the same process: paces differ
        over, peak = clock["step_s"] / kept_s, clock["peak_nbytes"]
        table.append(
            [
                model, title, f"{row.peak / 1e6:.1f}", f"{peak / 1e6:.1f}", f"{row.median_s:.3f}",
                f"{row.over(keep):.3f}", f"{over:.3f}", f"{row.figures['stored'] / 1e6:.0f}",
                f"{clock['nbytes_stored'] / 1e6:.0f}",
            ]
        )  # fmt: skip
    at_47, again = rows[f"plan, {AT_47}"], rows[f"plan, {AT_RECOMPUTE}"]
    floor = keep.over(rows["recompute"])
    claims = [
        Claim.at_most(f"{model}, real: step of plan at 47 % / keep", at_47.over(keep), OF_KEEP),
        Claim.at_most(
            f"{model}, real: step of plan at recompute's peak / recompute (keep's is {floor:.3f})",
            again.over(rows["recompute"]), OF_RECOMPUTE,
        ),
        Claim.at_most(f"{model}, real: peak of plan / 47 % of keep's", at_47.peak / (0.47 * keep.peak), 1.0),
    ]  # fmt: skip
    return table, claims


REAL_COLUMNS = (
    "model",
    "memory.activations",
    "peak MB",
    "clock",
    "step s",
    "/ keep",
    "clock",
    "stored MB",
    "clock",
)


REAL_PAGE = """\
# What the runtime runs, beside the clock

    OMP_NUM_THREADS=1 python benchmarks/policies.py --real --models llama,bert,vit --dtype fp32 --rounds 4

Real steps that take turns, on a machine that others used meanwhile: compare ratios, not seconds. `clock` is
what the simulator says of the same step, profiled in the process of the plan for 47 % of keep's peak, or, of
plans, what each predicted for itself. Losses of all rows are equal bit by bit.
"""


def run_real(options: Any) -> None:
    lines, claims = [], []
    for model in options.models.split(","):
        with folder_on(options.nvme, "policies") as folder:
            table, more = real(model, options, folder)
        print_table(REAL_COLUMNS, table)
        lines += table
        claims += more
    print_claims(claims, options.json, digits=".3f")
    if options.page:
        text = "\n".join([REAL_PAGE, *marked(REAL_COLUMNS, lines), "", "```", *said(claims), "```"])
        options.page.write_text(text + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "one model, one machine: a minute", rounds=5)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--machines", default="drive,link,scarce")
    parser.add_argument("--profiles", type=Path, default=Path("runs/policies"), help="folder for profiles")
    parser.add_argument("--page", type=Path, help="write a page, and a picture beside it")
    parser.add_argument("--real", action="store_true", help="train with what the runtime runs")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn")
    options = parser.parse(argv, models=QUICK, machines="drive", rounds=2)
    if options.real:
        run_real(options)
        return
    found: dict[Setting, list[Figures]] = {}
    known = []
    if options.json and options.json.exists():
        known = [Figures(*row) for row in json.loads(options.json.read_text())["rows"]]
    claims: list[Claim] = []
    for model in options.models.split(","):
        planning = profiled(model, options.profiles, options.dtype)
        profile = steadied(planning.profile)
        for name, hardware in machines(profile, planning.hardware).items():
            if name not in options.machines.split(","):
                continue
            say(f"{model}, {name}: {len(UNBUDGETED) + 5 * len(BUDGETED)} rows")
            setting = Setting(model, name, profile, hardware)
            found[setting] = rows = list(
                setting.rows([r for r in known if (r.model, r.machine) == (model, name)])
            )
            print(f"\n{model}, {name}: step by keep's, for each budget")
            print_table(["policy", *setting.budgets], matrix(setting, rows))
            some = [row for row in rows if row.budget in ("", AT_47)]
            print_table(COLUMNS, [cells(row, setting.kept.peak_nbytes) for row in some])
            claims += setting.claims(rows)
            print_claims(claims[-6:], digits=".3f")
            write(options, found, claims)


def as_json(claims: Sequence[Claim], rows: Sequence[Figures]) -> str:
    """Return claims as records, and rows as lists of values, one a line."""

    def rounded(row: Figures) -> list[Any]:
        return [round(value, 6) if isinstance(value, float) else value for value in asdict(row).values()]

    lines = ",\n".join(json.dumps(rounded(row)) for row in rows)
    names = json.dumps([field.name for field in fields(Figures)])
    made = json.dumps([asdict(claim) for claim in claims], indent=1)
    return f'{{"claims": {made},\n"columns": {names},\n"rows": [\n{lines}\n]}}\n'


def write(options: Any, found: Mapping[Setting, Sequence[Figures]], claims: Sequence[Claim]) -> None:
    """Write what there is so far: the page, its picture and the rows."""
    if options.json:
        options.json.write_text(as_json(claims, [row for rows in found.values() for row in rows]))
    if options.page:
        page(options.page, found, claims)
        draw(options.page.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
