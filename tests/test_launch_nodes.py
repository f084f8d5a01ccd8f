"""The agents of ``torchrun`` on two nodes that are one host, and one process without it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.cli import main
from tests.helpers.launch import ROOT, free_port, run_ranks
from tests.helpers.limits import HANG_S

#: A tiny run that streams.
SETTINGS = (
    "memory.host=1MiB", "memory.resident=false", "model.n_layers=2", "model.d_model=32", "model.n_heads=2",
    "model.seq_len=16", "train.batch_size=2", "train.eval_batches=2",
    "observe.tensorboard=false",
)  # fmt: skip


def settings(tmp_path: Path, *more: str) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train: {steps: 4, eval_every: 2}\n")
    places = (f"data.files=[{text}]", f"data.cache={tmp_path}/tokens", f"run.dir={tmp_path}/runs")
    return ["train", str(recipe), *SETTINGS, *places, f"memory.nvme=[{tmp_path}/nvme]", *more]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def start_nodes(*arguments: list[str]) -> list[subprocess.Popen[str]]:
    """A launcher per node, each with its own arguments."""
    port = str(free_port())
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *common]
    return [start([*torchrun, "--node-rank", str(i), "-m", "infinity", *arguments[i]]) for i in range(2)]


def end(processes: list[subprocess.Popen[str]], timeout_s: float = HANG_S) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; nothing outlives this."""
    out = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout_s)
            out.append((process.returncode, output, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return out


def check_files(tmp_path: Path, world_size: int) -> dict[str, Any]:
    """What a run leaves: its folder, and nothing on NVMe."""
    [folder] = (tmp_path / "runs").iterdir()
    assert {"recipe.yaml", "metrics.jsonl", "summary.json"} <= {path.name for path in folder.iterdir()}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in steps if "grad_norm" in line]) == 4
    assert not list((tmp_path / "nvme").iterdir())
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["world_size"] == world_size
    assert summary["planned_nbytes_written"] > 0
    return summary


def run_node(port: int, words: list[str], folder: Path) -> None:
    """What ``torchrun`` does on a node, but for its worker's imports: the worker is a fork of it."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    node = int(os.environ["RANK"])
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node, "timeout": int(HANG_S)}, run_id="none", max_restarts=0,
        start_method="fork", monitor_interval=0.05,
    )  # fmt: skip
    words = [*words, f"memory.nvme=[{folder}/nvme/{node}]"]
    elastic_launch(config, run_worker)(words, folder / f"output.{node}")


def run_worker(words: list[str], output: Path) -> None:
    with output.open("w") as out, contextlib.redirect_stdout(out):
        assert main(words) == 0


def test_two_nodes_train_as_one_run_each_on_its_own_drives(tmp_path):
    run_ranks(run_node, 2, free_port(), settings(tmp_path), tmp_path, group=False)
    for node in range(2):
        (tmp_path / f"nvme/{node}").rmdir()  # is there, and empty
    output, other_output = ((tmp_path / f"output.{node}").read_text() for node in range(2))
    summary = check_files(tmp_path, 2)
    assert "tokens/s" in output
    assert Path(summary["folder"]).name in output
    assert not other_output  # rank 0 speaks


def test_one_process_trains_without_a_launcher(tmp_path, capsys):
    """In this process: tests/app/test_cli.py starts ``python -m infinity`` as one of its own."""
    threads = torch.get_num_threads()
    assert main(settings(tmp_path, "train.threads=1")) == 0
    torch.set_num_threads(threads)
    check_files(tmp_path, 1)
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow  # tests/test_faults.py has it within one node
def test_an_error_on_one_node_ends_both_and_each_says_why(tmp_path):
    file = tmp_path / "file"
    file.touch()
    nodes = start_nodes(settings(tmp_path), settings(tmp_path, f"memory.nvme=[{file}]"))
    (code, _, errors), (guilty_code, _, guilty_errors) = end(nodes)
    assert (code, guilty_code) == (1, 1)
    assert "infinity: rank 1: DirectoryError" in guilty_errors
    assert "give memory.nvme a directory on a local drive" in guilty_errors
    assert "infinity: rank 0: PeerError" in errors
    assert "rank 1 failed with DirectoryError" in errors
    assert not list(tmp_path.glob("nvme/*/*"))
