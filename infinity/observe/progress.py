"""Progress of a run for the user: a bar in a terminal, plain lines elsewhere."""

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.core.nbytes import format_nbytes
from infinity.observe.metrics import StepReport, View, perplexity

#: Logger of messages that no display shows; to see them: ``logging.basicConfig(level=logging.INFO)``.
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
        while self._pending:
            show(self._pending.pop(0))


#: Seconds between plain lines while a checkpoint is loaded.
LINES_EVERY_S = 10.0


class ProgressDisplay(View):
    """View that shows every step (in a terminal), or every ``log_every``-th and the last (plain lines)."""

    def __init__(
        self,
        steps: int,
        *,
        log_every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._log_every, self._clock = steps, log_every, clock
        self._console = console or Console(stderr=True)  # standard output is free for results
        self._load_began_s: float | None = None
        self._load_logged_s = 0.0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
            text = TextColumn("{task.description}")
            self._bar = Progress(*columns, text, console=self._console, refresh_per_second=2)
            self._task = self._bar.add_task("recording the first step", total=steps)
            self._bar.start()

    def loading(self, done_nbytes: int, total_nbytes: int) -> None:
        now_s = self._clock()
        if self._load_began_s is None:
            self._load_began_s = self._load_logged_s = now_s
        elapsed_s = now_s - self._load_began_s
        text = f"loading {format_nbytes(done_nbytes)} of {format_nbytes(total_nbytes)}"
        if elapsed_s > 0 and done_nbytes:
            text += f"  {format_nbytes(done_nbytes / elapsed_s)}/s"
            text += f"  {(total_nbytes - done_nbytes) * elapsed_s / done_nbytes:.0f} s left"
        is_end_of_long = done_nbytes >= total_nbytes and self._load_logged_s > self._load_began_s
        if self._bar:
            self._bar.update(self._task, description=escape(text))
        elif is_end_of_long or now_s - self._load_logged_s >= LINES_EVERY_S:
            self._load_logged_s = now_s
            self.log(text)

    def step(self, report: StepReport) -> None:
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=escape(describe(report)))
        elif report.step % self._log_every == 0 or report.step == self._steps:
            self.log(f"step {report.step}/{self._steps}  {describe(report)}")

    def evaluated(self, step: int, loss: float) -> None:
        self.log(f"step {step}/{self._steps}  held-out loss {loss:.4f}  perplexity {perplexity(loss):,.2f}")

    def log(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # above the bar

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def describe(report: StepReport) -> str:
    """Return a step's figures in one line; bytes and stalls are this rank's, the loss all ranks'."""
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
