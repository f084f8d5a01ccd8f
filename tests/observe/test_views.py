"""Every view shows the same figures: the file, the progress line, the summary, TensorBoard."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infinity.observe.metrics import (
    Evaluation,
    HeldOutFigures,
    MetricsFile,
    ProgressDisplay,
    StepReport,
    Summary,
    SummaryBuilder,
    describe,
    last_step,
    read_metrics,
    show_summary,
    summary_rows,
)

REPORT = StepReport(
    step=2,
    loss=3.25,
    lr=1e-3,
    grad_norm=0.5,
    skipped=False,
    step_s=2.0,
    tokens=4096,
    stall_s={"read": 0.25, "update": 0.05},
    nbytes_read=14 * 2**20,
    nbytes_written=12 * 2**20,
    planned_nbytes_read=14 * 2**20,
    planned_nbytes_written=12 * 2**20,
    peak_nbytes={"device": 0, "host": 2**28, "nvme": 2**30},
)
RECORDED = replace(
    REPORT, step=1, step_s=9.0, loss=5.5, planned_nbytes_read=None, planned_nbytes_written=None
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_a_line_on_disk_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.step(REPORT)
    (line,) = lines(path)  # before close: a killed run keeps it
    assert line["kind"] == "step"
    assert (line["loss"], line["tokens_per_s"], line["bottleneck"]) == (3.25, 2048.0, "read")
    assert line["stall_s"] == {"read": 0.25, "update": 0.05}
    assert line["peak_nbytes"] == REPORT.peak_nbytes
    metrics.evaluated(Evaluation(2, 3.5))
    metrics.close()
    end = {"kind": "evaluation", "step": 2, "loss": 3.5, "adapters": {}, "metrics": {}, "per_token": True}
    end |= {"perplexity": math.exp(3.5)}
    assert lines(path)[1] == end


def test_lines_are_valid_json_even_if_a_gradient_is_not_finite(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.step(replace(REPORT, grad_norm=float("inf"), loss=float("nan"), skipped=True))
    metrics.close()
    (line,) = lines(tmp_path / "m.jsonl")
    assert (line["grad_norm"], line["loss"], line["skipped"]) == (None, None, True)


def test_a_second_writer_adds_and_never_truncates(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = MetricsFile(tmp_path / "m.jsonl")
        metrics.step(REPORT)
        metrics.close()
    assert len(lines(tmp_path / "m.jsonl")) == 2


def interrupted(path: Path) -> list[str]:
    """Write the metrics of a run that was killed while it wrote those of step 3; return its lines."""
    metrics = MetricsFile(path)
    metrics.evaluated(Evaluation(0, 6.0))
    metrics.step(RECORDED)
    metrics.step(REPORT)
    metrics.evaluated(Evaluation(2, 3.5))
    metrics.step(replace(REPORT, step=3))
    metrics.close()
    path.write_text(path.read_text()[:-20])
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(("after", "kept"), [(-1, 0), (0, 1), (1, 2), (2, 4), (3, 4), (9, 4)])
def test_a_run_that_goes_on_cuts_the_lines_of_later_steps_and_a_torn_one(
    tmp_path: Path, after: int, kept: int
) -> None:
    path = tmp_path / "m.jsonl"
    before = interrupted(path)
    metrics = MetricsFile(path, after=after)
    assert path.read_text() == "".join(before[:kept])
    metrics.step(replace(REPORT, step=after + 1))
    metrics.close()
    assert [line["step"] for line in lines(path)][kept:] == [after + 1]


def test_metrics_are_read_back_as_they_were_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert (list(read_metrics(path, 9)), last_step(path)) == ([], 0)
    interrupted(path)
    read = list(read_metrics(path, 2))
    assert read == [Evaluation(0, 6.0), RECORDED, REPORT, Evaluation(2, 3.5)]
    assert last_step(path) == 2
    path.write_text("{}\n[]\n3\nnull\n" + path.read_text())
    assert list(read_metrics(path, 2)) == []  # they end before what is no line of theirs


def test_a_summary_says_from_which_step_on_it_knows_the_figures(tmp_path: Path) -> None:
    builder = SummaryBuilder()
    builder.step(replace(REPORT, step=8))
    builder.step(replace(REPORT, step=9))
    summary = builder.result(folder=tmp_path, world_size=1, budgets={})
    assert (summary.first_step, summary.steps) == (8, 2)
    assert dict(summary_rows(summary))["steps"] == "2 after step 7 on 1 rank"


def test_a_progress_line_has_loss_speed_stall_with_cause_and_bytes() -> None:
    assert describe(REPORT) == (
        "loss 3.2500  2,048 tokens/s  stall 0.30 s (read)  read 14 MiB wrote 12 MiB  host 256 MiB  nvme 1 GiB"
    )
    assert describe(replace(REPORT, on_demand=2, skipped=True)).endswith(
        "2 on demand  skipped: gradients are not finite"
    )
    assert describe(replace(REPORT, speculated=9, rolled_back=9)).endswith("  clipped: updates rolled back")


def shown(steps: list[StepReport], *, terminal: bool, log_every: int = 1) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    display = ProgressDisplay(5, log_every=log_every, console=console)
    for report in steps:
        display.step(report)
    display.evaluated(Evaluation(5, 3.5))
    display.close()
    return console.file.getvalue()


def test_without_a_terminal_progress_is_a_plain_line_every_few_steps() -> None:
    text = shown([replace(REPORT, step=step) for step in range(1, 6)], terminal=False, log_every=2)
    assert [line.split("  ")[0] for line in text.splitlines()] == ["step 2/5", "step 4/5"] + ["step 5/5"] * 2
    assert text.splitlines()[-1] == "step 5/5  held-out loss 3.5000  perplexity 33.12"
    assert "\x1b" not in text


def test_in_a_terminal_progress_is_one_bar() -> None:
    text = shown([REPORT], terminal=True)
    assert "2/5" in text
    assert "loss 3.2500" in text


def summarize(steps: list[StepReport], held_out: tuple[float, ...] = ()) -> Summary:
    builder = SummaryBuilder()
    for report in steps:
        builder.step(report)
    for step, loss in enumerate(held_out):
        builder.evaluated(Evaluation(step, loss))
    return builder.result(
        folder=Path("runs/[a]"), world_size=2, budgets={"host": 2**28, "nvme": None, "device": None}
    )


def test_bytes_are_compared_with_the_plans_of_the_same_steps() -> None:
    """Where every second step is recorded, as that one writes what lies in host memory."""
    light = replace(REPORT, nbytes_written=8192, planned_nbytes_written=8192)
    heavy = replace(REPORT, nbytes_written=294_912, planned_nbytes_written=294_912)
    for steps in ([light, heavy, light, light, heavy], [heavy, light, heavy, light]):
        summary = summarize([RECORDED, *steps])
        assert summary.nbytes_written == summary.planned_nbytes_written < 294_912


def test_a_summary_counts_planned_steps_and_adds_up_all() -> None:
    off = replace(REPORT, step=3, nbytes_read=1, on_demand=2, peak_nbytes={"host": 5}, loss=3.0, step_s=4.0)
    summary = summarize([RECORDED, REPORT, REPORT, off], held_out=(4.0, 3.75, 3.5))
    assert summary.steps == 4
    assert summary.tokens_per_s == 2048.0  # the recorded step's 9 s are not the run's speed
    assert summary.steps_off_plan == 1
    assert summary.steps_rolled_back == 0
    assert summary.nbytes_read == summary.planned_nbytes_read == 14 * 2**20
    assert summary.peak_nbytes["host"] == 2**28
    assert summary.stall_s == {"read": 1.0, "update": 0.2}
    assert summary.stall_share == pytest.approx(1.2 / 17)
    assert summary.bottleneck == "read"
    assert (summary.first_loss, summary.last_loss) == (5.5, 3.0)
    assert (summary.first_held_out, summary.last_held_out) == (4.0, 3.5)
    assert (summary.first_perplexity, summary.last_perplexity) == (math.exp(4.0), math.exp(3.5))


def test_a_run_that_waits_less_than_5_percent_is_bound_by_compute() -> None:
    assert summarize([replace(REPORT, stall_s={"read": 0.09})]).bottleneck == "compute"
    assert summarize([replace(REPORT, stall_s={"read": 0.11})]).bottleneck == "read"
    assert summarize([replace(REPORT, stall_s={})]).bottleneck == "compute"


def test_the_summary_shows_bytes_beside_the_plan_and_peaks_beside_budgets() -> None:
    rows = dict(summary_rows(summarize([RECORDED, REPORT], held_out=(4.0, 3.5))))
    assert rows["read per step"] == "14,680,064 bytes per rank (planned 14,680,064)"
    assert rows["written per step"] == "12,582,912 bytes per rank (planned 12,582,912)"
    assert rows["peak host"] == "256 MiB (budget 256 MiB)"
    assert rows["peak nvme"] == "1 GiB (no budget)"
    assert rows["held-out loss"] == "4.0000 -> 3.5000"
    assert rows["held-out perplexity"] == "54.60 -> 33.12"
    assert rows["stall"] == "5.5% of the time (read 0.50 s, update 0.10 s)"
    assert rows["files"] == "runs/[a]"


def test_the_summary_counts_steps_that_were_clipped_after_their_updates_had_started() -> None:
    clipped = replace(REPORT, speculated=3, rolled_back=3)
    rows = dict(summary_rows(summarize([REPORT, clipped, clipped, replace(clipped, skipped=True)])))
    assert rows["speculation"] == "steps redone with clipped gradients: 2"
    assert "speculation" not in dict(summary_rows(summarize([REPORT])))


def test_the_summary_says_how_many_bytes_of_gradients_wait_on_nvme() -> None:
    rows = dict(summary_rows(summarize([REPORT, replace(REPORT, spilled_nbytes=2_097_152)])))
    assert rows["gradients"] == "2,097,152 bytes wait on NVMe in each step"
    assert "gradients" not in dict(summary_rows(summarize([REPORT])))


def test_the_summary_says_how_many_tiles_of_experts_were_used() -> None:
    report = replace(REPORT, tiles=16, tiles_used=9)
    rows = dict(summary_rows(summarize([report, replace(report, tiles_used=5)])))
    assert rows["experts"] == "7 of 16 tiles used in a step"
    assert "experts" not in dict(summary_rows(summarize([REPORT])))


def test_the_summary_of_a_run_without_a_plan_has_bytes_alone() -> None:
    rows = dict(summary_rows(summarize([replace(RECORDED, nbytes_written=4096)] * 9)))  # commits, for example
    assert rows["written per step"] == "4,096 bytes per rank"
    resident = replace(RECORDED, nbytes_read=0, nbytes_written=0)
    assert dict(summary_rows(summarize([resident] * 9)))["read per step"] == "0 bytes per rank"


def test_the_summary_is_printed_as_it_is_and_written_as_json(tmp_path: Path) -> None:
    summary = summarize([REPORT])
    console = Console(file=io.StringIO(), width=120)
    show_summary(summary, console)
    assert "runs/[a]" in console.file.getvalue()
    summary.write(tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["peak_nbytes"] == REPORT.peak_nbytes
    assert found["budgets"]["nvme"] is None


def test_a_run_without_steps_has_a_summary() -> None:
    rows = dict(summary_rows(summarize([])))
    assert rows["loss"] == rows["held-out loss"] == rows["held-out perplexity"] == "-"


def test_a_perplexity_beyond_floats_is_infinite_and_its_line_still_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.evaluated(Evaluation(1, 1e4))
    metrics.close()
    assert lines(tmp_path / "m.jsonl") == [
        {
            "kind": "evaluation",
            "step": 1,
            "loss": 1e4,
            "adapters": {},
            "metrics": {},
            "per_token": True,
            "perplexity": None,
        }
    ]


def test_an_evaluation_has_the_losses_of_adapters_and_of_sets_by_their_names() -> None:
    parts = [
        HeldOutFigures("poem", "", 1.0, 1, {"accuracy": 0.5}),
        HeldOutFigures("poem", "code", 3.0, 3, {"accuracy": 1.0}),
        HeldOutFigures("prose", "code", 5.0, 4, {}),
    ]
    found = Evaluation.of(7, parts)
    assert (found.step, found.loss) == (7, pytest.approx(30 / 8))
    assert found.adapters == {"poem": pytest.approx(10 / 4), "prose": 5.0}
    accuracies = {"poem/accuracy": 0.5, "poem/code/accuracy": 1.0}
    assert found.metrics == accuracies | {"code/loss": pytest.approx(29 / 7)}
    assert found.figures.keys() == {"loss", "poem/loss", "prose/loss", *found.metrics}
