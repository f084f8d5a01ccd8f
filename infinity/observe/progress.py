"""Progress of a run for the user: a bar in a terminal, plain lines elsewhere."""

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.core.nbytes import format_nbytes
from infinity.observe.metrics import StepReport, perplexity

#: Messages that no display shows go here; see them with ``logging.basicConfig(level=logging.INFO)``.
log = logging.getLogger("infinity")


class MessageBuffer:
    """Forwards messages to a display; until one is attached, logs and collects them."""

    def __init__(self) -> None:
        self._show: Callable[[str], object] | None = None
        self._pending: list[str] = []

    def __call__(self, text: str) -> None:
        if self._show is None:
            log.info("%s", text)
            self._pending.append(text)
        else:
            self._show(text)

    def attach(self, show: Callable[[str], object]) -> None:
        """Forward all messages to ``show``, earlier ones first."""
        self._show = show
        pending, self._pending = self._pending, []
        for text in pending:
            show(text)


#: Seconds between plain lines while a checkpoint is loaded.
LINES_EVERY_S = 10.0


class LoadClock:
    """Formats the progress of loading a checkpoint; its time starts at the first call.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._logged_s = 0.0

    def describe(self, done_nbytes: int, total_nbytes: int) -> str:
        """Return a line such as ``loading 1.5 GiB of 8 GiB  700 MiB/s  9 s left``."""
        elapsed_s = self._elapsed_s()
        parts = [f"loading {format_nbytes(done_nbytes)} of {format_nbytes(total_nbytes)}"]
        if elapsed_s > 0 and done_nbytes:
            parts.append(f"{format_nbytes(done_nbytes / elapsed_s)}/s")
            parts.append(f"{(total_nbytes - done_nbytes) * elapsed_s / done_nbytes:.0f} s left")
        return "  ".join(parts)

    def due(self, done_nbytes: int, total_nbytes: int) -> bool:
        """Return True every ten seconds, and at the end of a load that took longer than that."""
        elapsed_s = self._elapsed_s()
        last = done_nbytes >= total_nbytes and self._logged_s > 0
        if not last and elapsed_s - self._logged_s < LINES_EVERY_S:
            return False
        self._logged_s = 0.0 if last else elapsed_s
        return True

    def _elapsed_s(self) -> float:
        if self._start_s is None:
            self._start_s = self._clock()
        return self._clock() - self._start_s


class ProgressDisplay:
    """View that shows every step (terminal), or every ``log_every``-th and the last (plain lines).

    Args:
        steps: Number of steps of the run.
        console: Default: standard error, so that standard output is free for results.
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
        """Show how much of its weights this rank has loaded."""
        text = self._load.describe(done_nbytes, total_nbytes)
        if self._bar:
            self._bar.update(self._task, description=escape(text))
        elif self._load.due(done_nbytes, total_nbytes):
            self.log(text)

    def step(self, report: StepReport) -> None:
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=escape(describe(report)))
        elif report.step % self._log_every == 0 or report.step == self._steps:
            self.log(f"step {report.step}/{self._steps}  {describe(report)}")

    def evaluated(self, step: int, loss: float) -> None:
        self.log(f"step {step}/{self._steps}  held-out loss {loss:.4f}  perplexity {perplexity(loss):,.2f}")

    def log(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def describe(report: StepReport) -> str:
    """Return a step's figures in one line; bytes and stalls are this rank's, the loss is all ranks'."""
    parts = ["loss -" if report.loss is None else f"loss {report.loss:.4f}"]
    parts.append(f"{report.tokens_per_s:,.0f} tokens/s")
    stall_s = sum(report.stall_s.values())
    cause = "" if report.bottleneck == "compute" else f" ({report.bottleneck})"
    parts.append(f"stall {stall_s:.2f} s{cause}")
    if report.nbytes_read or report.nbytes_written:
        parts.append(f"read {format_nbytes(report.nbytes_read)} wrote {format_nbytes(report.nbytes_written)}")
    parts += [f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in report.peak_nbytes.items() if nbytes]
    if report.on_demand:
        parts.append(f"{report.on_demand} on demand")
    if report.rolled_back and not report.skipped:
        parts.append("clipped: updates rolled back")
    if report.skipped:
        parts.append("skipped: gradients are not finite")
    return "  ".join(parts)
