"""``make gpu`` writes a page by itself, and says clearly where there is nothing to run on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.scripts import script


@pytest.fixture
def gpu() -> Iterator[Any]:
    with script("gpu") as module:
        yield module


def found(gpu: Any, folder: Path) -> Any:
    return gpu.Found(torch.device("cpu"), folder, True)


def test_where_there_is_no_accelerator_one_line_says_so_and_nothing_is_written(
    gpu, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert gpu.main(["--out", str(tmp_path / "gpu.md"), "--nvme", str(tmp_path / "drive")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("make gpu: no accelerator here, as torch")
    assert said.err.count("\n") == 1
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_the_page_has_machine_and_bandwidths(gpu, tmp_path, capsys):
    out = tmp_path / "results" / "gpu.md"
    arguments = ["--device", "cpu", "--quick", "--nvme", str(tmp_path), "--out", str(out)]
    assert gpu.main([*arguments, "--only", "machine,bandwidths"]) == 0
    text = out.read_text()
    assert text in capsys.readouterr().out
    assert text.startswith("# Measured on an accelerator\n")
    for part in (
        f"| torch | {torch.__version__}",
        "| host to device, pinned | ",
        "| drive, write | ",
        "Tflop/s |",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {3}


def test_what_fails_is_on_the_page_and_the_rest_goes_on(gpu, tmp_path, monkeypatch, capsys):
    def broken(found: Any) -> Any:
        raise RuntimeError("the driver | went away")

    monkeypatch.setitem(gpu.SECTIONS, "bandwidths", broken)
    out = tmp_path / "gpu.md"
    options = ["--device", "cpu", "--quick", "--nvme", str(tmp_path), "--out", str(out)]
    assert gpu.main([*options, "--only", "bandwidths,machine"]) == 1
    assert "## Bandwidths\n\nFailed: `RuntimeError: the driver | went away`" in out.read_text()
    assert "## Machine" in out.read_text()


@pytest.mark.slow
def test_results_of_tests_are_told_with_those_that_failed(gpu, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert False\n"
    )
    section = gpu.suites(found(gpu, tmp_path), [str(tmp_path / "test_two.py")])
    [_, (what, result)] = section.rows
    assert what == "marked gpu"
    assert "1 failed, 1 passed" in result or "2 skipped" in result  # skipped where there is no accelerator
    assert ("test_bad" in section.text) == gpu.went_wrong([section])


def test_each_way_trains_the_largest_model_that_it_holds(gpu, tmp_path, monkeypatch):
    jobs = []

    def run(job: Any) -> Any:
        jobs.append(job)
        if job.way == "fsdp2":
            raise RuntimeError("fsdp2 ended with 1:\nTraceback\nOutOfMemoryError: no memory")
        rank = {"step_s": [2.0], "peak_rss": 5e9, "losses": [1.0], "made_s": 1.0, "moved": {}, "reports": []}
        return [[rank | {"peak_device": 7e9}]]

    monkeypatch.setattr(gpu.processes, "run", run)
    monkeypatch.setattr(gpu, "free_host_nbytes", lambda: 100e9)
    state = found(gpu, tmp_path)
    state.peak_flops_per_s = 1e12
    section = gpu.training(state)
    head, *rows = section.rows
    assert [len(row) for row in rows] == [len(head)] * 5
    assert rows[1][2] == "failed: OutOfMemoryError: no memory"
    assert rows[4][2:4] == ["2.000", "128"]
    assert rows[4][5:] == ["7.0", "5.0", "1.0"]
    assert [job.way for job in jobs] == ["plain", "fsdp2", *["infinity"] * 3]
    assert any(each.startswith("memory.nvme=") for each in jobs[4].overrides)
    assert gpu.went_wrong([section])


def test_the_largest_model_fits_every_kind_of_memory_and_mfu_counts_the_models_flops(gpu):
    rooms = {"device": 80e9, "host": 100e9, "drive": 1e12}
    sizes = [gpu.largest(rooms, way.nbytes, False) for way in gpu.WAYS]
    assert sizes == [1.2e9, 3e9, 3e9, 3e9, 13e9]
    assert gpu.largest({"device": 1e9}, {"device": 20}, False) == 0
    shape = gpu.llama.TINY
    flops = 6 * shape.numel * 1000 + 12 * shape.layers * shape.hidden * 100 * 1000
    assert gpu.mfu(shape, 1000, 100, 2.0, flops) == pytest.approx(0.5)


def test_a_call_that_stops_in_time_is_gone_on_with(gpu, tmp_path):
    def made(lasts_s: float = 0, of: str = "this commit") -> list[str]:
        measured, names = gpu.Measured(tmp_path / "gpu.json", of, 60), list[str]()

        def make(name: str) -> list[str]:
            names.append(name)
            measured.longest_s = lasts_s
            return [name, "failed: no memory" if name == "b" else "1.0"]

        for name in ("a", "b", "c"):
            try:
                measured.once(name, lambda name=name: make(name))
            except gpu.OutOfTimeError:
                return [*names, "stopped"]
        return names

    assert made(lasts_s=61) == ["a", "stopped"]
    assert made() == ["b", "c"]
    assert made() == ["b"]  # that failed
    assert made(of="another commit") == ["a", "b", "c"]


def test_adapters_are_trained_beside_those_of_peft(gpu, tmp_path, monkeypatch):
    jobs = []
    rank = {"step_s": [2.0], "peak_rss": 5e9, "losses": [], "made_s": 1.0, "moved": {}, "reports": []}

    def run(job: Any) -> Any:
        jobs.append(job)
        return [[rank | {"peak_device": 7e9}]]

    monkeypatch.setattr(gpu.processes, "run", run)
    _, *rows = gpu.adapters(found(gpu, tmp_path)).rows
    assert [row[1].split(",")[0] for row in rows] == ["peft", "infinity", "infinity"]
    assert [job.way for job in jobs] == ["plain", "infinity", "infinity"]
    assert all(job.lora for job in jobs)
