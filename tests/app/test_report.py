"""``infinity report``: one page about a run, complete in a real browser and without a network."""

import json
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import numpy as np
import pytest

from infinity.app.report import averaged, charts_of, rows_of, write_report
from infinity.cli import main
from infinity.core.errors import RecipeError
from infinity.core.plan import Outcome
from infinity.observe.metrics import (
    ActivationSummary,
    Evaluation,
    MetricsFile,
    PredictedStep,
    StepReport,
    SummaryBuilder,
    read_metrics,
)
from infinity.observe.sinks import scalars_of
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe

pytest.importorskip("matplotlib")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STEPS = 40


def step(number: int) -> StepReport:
    return StepReport(
        step=number, loss=0.7 / number, lr=1e-3, grad_norm=1.0, skipped=False, step_s=0.5, tokens=1000,
        stall_s={"read": 0.1, "update": 0.0001}, nbytes_read=2**20, nbytes_written=2**19,
        planned_nbytes_read=2**20, planned_nbytes_written=2**19,
        peak_nbytes={"device": 2**20, "host": 3 * 2**20, "nvme": 0}, metrics={"rewards/margins": number / 9},
    )  # fmt: skip


def run(folder: Path, *, finished: bool = True) -> tuple[Path, Recipe]:
    """Write the folder of a run of some steps."""
    folder.mkdir()
    recipe = load_recipe(
        overrides=[
            "train.task=dpo", f"train.steps={STEPS}", "data.eval_sets={code: [code.jsonl]}",
            "data.files=['</script><b>.jsonl']",
        ]
    )  # fmt: skip
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    metrics, totals = MetricsFile(folder / "metrics.jsonl"), SummaryBuilder()
    for number in range(1, STEPS + 1):
        lines: list[StepReport | Evaluation] = [step(number)]
        if number % 10 == 0:
            figures = {"rewards/margins": 1.0, "code/rewards/margins": 2.0, "code/loss": 0.5}
            lines.append(Evaluation(number, 0.6 / number, metrics=figures, per_token=False))
        for line in lines:
            metrics.take(line)
            totals.take(line)
    metrics.close()
    if finished:
        cost = Outcome(0.4, 0.1, 0.0, 2**20, 0, 0, 0)
        totals.result(
            folder=folder, world_size=2, budgets={"device": 2**21, "host": 2**21, "nvme": None},
            predicted=PredictedStep(
                step_s=0.4, nbytes_read=1, nbytes_written=1, bottleneck="NVMe read", advice="a second drive"
            ),
            activations=ActivationSummary(
                policy="plan", nbytes_stored=0, nbytes_loaded=0, stall_s=0.0, saved_peak_nbytes=1,
                plan="all kept", planning_s=0.1, predicted=cost, measured=cost,
            ),
            notes=["the machine is <small>"],
        ).write(folder / "summary.json")  # fmt: skip
    return folder, recipe


def curves(folder: Path) -> dict[str, "array[float]"]:
    found: dict[str, array[float]] = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        for name, value in scalars_of(line).items():
            found.setdefault(name, array("d")).extend((line.step, value or 0.0))
    return found


def test_a_page_has_everything_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "mine")
    page = write_report(folder).read_text("utf-8")
    assert "<title>mine</title>" in page
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # they name no page
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= names
    assert not re.search(r"<(script|link|img|iframe)|src=|@import|url\((?!#)", page)
    assert "</script><b>" not in page  # of the recipe
    assert page.count("<svg") == 7
    for text in ("finished", "code, held-out", "planned read", "a second drive",
                 "measured +25%", "peak 1 MiB (+0.0%)", "3 MiB (budget 2 MiB)", "read 4.00 s",
                 "&lt;small&gt;", "on 2 ranks", "task: dpo", "patience: null"):  # fmt: skip
        assert text in page, text


def test_losses_and_metrics_of_each_set_share_a_chart_with_those_of_training(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "mine")
    found = charts_of(curves(folder), {"code"})
    assert [*found] == [
        "loss", "learning rate", "norm of the gradient", "tokens per second", "seconds of a step",
        "bytes that a rank moves in a step", "rewards/margins",
    ]  # fmt: skip
    loss = {"training": 40, "held-out": 4, "code, held-out": 4}
    assert {name: len(points) for name, points in found["loss"].items()} == loss
    assert [*found["rewards/margins"]] == [*loss]
    assert [*found["bytes that a rank moves in a step"]] == [
        "read", "written", "planned read", "planned written",
    ]  # fmt: skip
    assert found["loss"]["held-out"].tolist() == [[at, pytest.approx(0.6 / at)] for at in (10, 20, 30, 40)]


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desktop"])
def test_a_browser_draws_the_whole_page(width: int, tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "mine")
    page = write_report(folder)
    measure = "<script>document.title = document.documentElement.scrollWidth</script>"
    page.write_text(page.read_text("utf-8").replace("</body>", f"{measure}</body>"))
    assert BROWSER is not None
    found = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
            f"--window-size={max(width, 500)},900", "--virtual-time-budget=3000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.stdout.count("<svg") == 7, found.stderr[-2000:]
    assert "infinity " in found.stdout.partition("<footer>")[2]  # the last thing that is drawn
    (shown,) = re.findall(r"<title>(\d+)</title>", found.stdout)
    assert int(shown) <= max(width, 500)  # nothing is wider than the window


def test_the_last_samples_are_on_the_page(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "mine")
    chat = [{"role": "user", "content": "and then?"}]
    given = [{"step": each, "prompt": "once", "text": "upon <a> time"} for each in range(100)]
    given += [{"step": 100, "prompt": chat, "text": "x" * 9000, "adapter": "fox"}]
    (folder / "samples.jsonl").write_text("\n".join([*map(json.dumps, given), '{"step": 101, "pr']))
    page = write_report(folder).read_text("utf-8")
    rows = re.findall(r"<tr><td>step (\d+)</td><td>([^<]*)</td><td>([^<]*)</td>", page)
    assert len(rows) == 60
    assert rows[-1] == ("41", "once", "upon &lt;a&gt; time")
    assert (rows[0][1], len(rows[0][2])) == ("fox: and then?", 4000)


def test_a_run_that_is_not_finished_has_a_page(tmp_path: Path) -> None:
    folder, recipe = run(tmp_path / "mine", finished=False)
    totals = SummaryBuilder()
    for line in read_metrics(folder / "metrics.jsonl"):
        totals.take(line)
    assert ("peak device", "1 MiB (no budget)") in rows_of(folder, totals, recipe)
    assert "interrupted" in write_report(folder).read_text("utf-8")
    (folder / "summary.json").write_text('{"steps": 3}')  # of another version
    assert ("peak device", "1 MiB (no budget)") in rows_of(folder, totals, recipe)


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    folder, recipe = run(tmp_path / "mine", finished=False)
    (folder / "metrics.jsonl").unlink()
    assert rows_of(folder, SummaryBuilder(), recipe) == []
    write_report(folder)


def test_a_long_curve_has_few_points_with_the_same_mean() -> None:
    count = 20_000
    points = averaged(np.stack([np.arange(count), np.arange(count)], axis=1).astype(float), 1500)
    assert 1000 < len(points) <= 1500
    assert (np.diff(points[:, 0]) > 0).all()
    assert points.mean() == pytest.approx(count / 2, rel=1e-2)


def test_the_command_writes_the_page_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run(tmp_path / "mine")
    main(["report", str(folder)])
    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()
    assert capsys.readouterr().out.splitlines()[0] == f"wrote {folder / 'report.html'}"
    assert main(["report", str(folder), "--output", str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html: wanted a file's path, in a folder that exists" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"/proc/report\.html cannot be written"):
        write_report(folder, Path("/proc/report.html"))
    with pytest.raises(RecipeError, match=r"wanted the folder of a run"):
        write_report(tmp_path / "none")
