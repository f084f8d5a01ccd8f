"""Progress of a run: a bar with figures in a terminal, plain lines elsewhere."""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.core.nbytes import format_nbytes
from infinity.observe.events import StepReport, perplexity
from infinity.observe.loading import LoadClock


class ProgressDisplay:
    """Shows every step (terminal) or every ``log_every``-th and the last (plain lines).

    Args:
        steps: Of the whole run.
        console: Where; standard error by default, so that standard output stays for results.
    """

    def __init__(self, steps: int, *, log_every: int = 1, console: Console | None = None) -> None:
        self._steps, self._log_every = steps, log_every
        self._console = console or Console(stderr=True)
        self._load = LoadClock()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (
                BarColumn(20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=2)
            self._task = self._bar.add_task("recording the first step", total=steps)
            self._bar.start()

    def loading(self, done_nbytes: int, total_nbytes: int) -> None:
        """This rank has loaded so many bytes of its weights."""
        text = self._load.describe(done_nbytes, total_nbytes)
        if self._bar:
            self._bar.update(self._task, description=escape(text))
        elif self._load.due(done_nbytes, total_nbytes):
            self._say(text)

    def step(self, report: StepReport) -> None:
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=escape(describe(report)))
        elif report.step % self._log_every == 0 or report.step == self._steps:
            self._say(f"step {report.step}/{self._steps}  {describe(report)}")

    def evaluated(self, step: int, loss: float) -> None:
        self._say(f"step {step}/{self._steps}  held-out loss {loss:.4f}  perplexity {perplexity(loss):,.2f}")

    def say(self, line: str) -> None:
        """A line of its own above the bar."""
        self._say(line)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe(report: StepReport) -> str:
    """A step's figures in one line; bytes and stall are this rank's, the loss is every rank's."""
    parts = ["loss -" if report.loss is None else f"loss {report.loss:.4f}"]
    parts.append(f"{report.tokens_per_s:,.0f} tok/s")
    stall_s = sum(report.stall_s.values())
    cause = "" if report.bottleneck == "compute" else f" ({report.bottleneck})"
    parts.append(f"stall {stall_s:.2f} s{cause}")
    if report.nbytes_read or report.nbytes_written:
        parts.append(f"read {format_nbytes(report.nbytes_read)} wrote {format_nbytes(report.nbytes_written)}")
    parts += [f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in report.peak_nbytes.items() if nbytes]
    if report.on_demand:
        parts.append(f"{report.on_demand} on demand")
    if report.skipped:
        parts.append("skipped: gradients are not finite")
    return "  ".join(parts)
