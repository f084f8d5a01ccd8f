"""``infinity report``: one page about a run, complete in a real browser and without a network."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infinity.app.report import Curves, describe, write_report
from infinity.cli import main
from infinity.core.errors import RecipeError
from infinity.observe.metrics import Evaluation, MetricsFile, StepReport
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe

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
    metrics = MetricsFile(folder / "metrics.jsonl")
    for number in range(1, STEPS + 1):
        metrics.step(step(number))
        if number % 10 == 0:
            figures = {"rewards/margins": 1.0, "code/rewards/margins": 2.0, "code/loss": 0.5}
            metrics.evaluated(Evaluation(number, 0.6 / number, metrics=figures, per_token=False))
    metrics.close()
    if finished:
        summary: dict[str, Any] = {
            "world_size": 2, "step_s": 0.5, "nbytes_read": 2**20, "nbytes_written": 2**19,
            "planned_nbytes_read": 2**20, "planned_nbytes_written": 2**20,
            "budgets": {"device": 2**21, "host": 2**21, "nvme": None},
            "predicted": {
                "step_s": 0.4, "nbytes_read": 1, "nbytes_written": 1, "bottleneck": "NVMe read",
                "advice": "a second drive",
            },
            "notes": ["the machine is <small>"],
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder, recipe


def test_a_page_has_everything_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "mine")
    page = write_report(folder).read_text("utf-8")
    assert "<title>mine</title>" in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not a page
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(", page)
    assert "</script><b>" not in page  # of the recipe
    (data,) = re.findall(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    found = json.loads(data)
    assert (found["state"], len(found["charts"])) == ("finished", 7)
    loss, margins = found["charts"][:2]
    assert [(each["name"], len(each["points"])) for each in loss["series"]] == [
        ("training", 40), ("held-out", 4), ("code", 4),
    ]  # fmt: skip
    assert [each["name"] for each in margins["series"]] == ["training", "held-out", "code"]
    assert found["memory"][1] == {"tier": "host", "peak": 3 * 2**20, "budget": 2**21}
    assert found["time"] == [["computing", pytest.approx(15.996)], ["waiting: read", pytest.approx(4.0)]]
    assert found["plan"][0] == ["a step", "0.4 s", "0.5 s", "+25.0%"]
    assert found["plan"][2] == ["written in a step", "1 MiB", "512 KiB", "-50.0%"]
    assert found["advice"] == "Bound by NVMe read. To be faster: a second drive."


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
    assert found.stdout.count("<path") >= 10
    assert "infinity " in found.stdout.partition("<footer>")[2]  # the last thing that is drawn
    for text in (
        "Where the time went",
        "waiting: read",
        "The plan beside what was measured",
        "&lt;small&gt;",
    ):
        assert text in found.stdout
    (shown,) = re.findall(r"<title>(\d+)</title>", found.stdout)
    assert int(shown) <= max(width, 500)  # nothing is wider than the window


def test_the_last_samples_are_on_the_page(tmp_path: Path) -> None:
    folder, recipe = run(tmp_path / "mine")
    chat = [{"role": "user", "content": "and then?"}]
    given = [{"step": each, "prompt": "once", "text": "upon <a> time"} for each in range(100)]
    given += [{"step": 100, "prompt": chat, "text": "x" * 9000, "adapter": "fox"}]
    (folder / "samples.jsonl").write_text("\n".join([*map(json.dumps, given), '{"step": 101, "pr']))
    found = describe(folder, recipe)["samples"]
    assert len(found) == 60
    assert found[0] == {"step": 41, "prompt": "once", "text": "upon <a> time"}
    assert (found[-1]["prompt"], len(found[-1]["text"])) == ("fox: and then?", 4000)
    assert "upon <a>" not in write_report(folder).read_text()  # no markup of a sample's


def test_a_run_that_is_not_finished_has_a_page(tmp_path: Path) -> None:
    folder, recipe = run(tmp_path / "mine", finished=False)
    found = describe(folder, recipe)
    assert (found["state"], found["plan"], found["notes"]) == ("interrupted", [], [])
    assert found["memory"][0] == {"tier": "device", "peak": 2**20, "budget": None}


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    folder, recipe = run(tmp_path / "mine", finished=False)
    (folder / "metrics.jsonl").unlink()
    found = describe(folder, recipe)
    assert (found["tiles"], found["memory"], found["time"]) == ([], [], [])
    write_report(folder)


def test_a_long_run_has_curves_of_bounded_length_with_the_same_mean() -> None:
    curves, count = Curves(), 20_000
    for number in range(1, count + 1):
        curves.add("loss", number, float(number))
    points = curves["loss"]
    assert 1000 < len(points) <= 3000
    assert points[-1][0] == count
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    assert sum(value for _, value in points) / len(points) == pytest.approx(count / 2, rel=1e-2)


def test_the_command_writes_the_page_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run(tmp_path / "mine")
    main(["report", str(folder)])
    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()
    assert capsys.readouterr().out.splitlines()[0] == f"wrote {folder / 'report.html'}"
    with pytest.raises(RecipeError, match=r"--output .*: wanted a file's path, in a folder that exists"):
        write_report(folder, tmp_path / "none" / "page.html")
    with pytest.raises(RecipeError, match=r"/proc/report\.html cannot be written"):
        write_report(folder, "/proc/report.html")
    with pytest.raises(RecipeError, match=r"wanted the folder of a run"):
        write_report(tmp_path / "none")
