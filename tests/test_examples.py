"""Every example is a complete program: it runs as a reader would run it, and its loss falls."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import start_ranks
from tests.helpers.limits import HANG_S

ROOT = Path(__file__).parent.parent
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run(launcher: str, name: str, nvme: Path, falls_to: float = 0.8) -> None:
    command = [*LAUNCHERS[launcher], str(ROOT / "examples" / name), "--steps", "16"]
    done = subprocess.run(
        [*command, "--nvme", str(nvme)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert_loss_falls(done.stdout, falls_to)


def assert_loss_falls(output: str, falls_to: float) -> None:
    losses = [float(loss) for loss in re.findall(r"  loss ([0-9.]+)", output)]
    assert losses[-1] < falls_to * losses[0], output


def run_on_this_rank(name: str, nvme: str) -> None:
    sys.argv = [name, "--steps", "6", "--nvme", nvme]
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_the_plain_loop_trains_on_two_ranks(tmp_path: Path) -> None:
    """In ranks that import nothing anew; :mod:`tests.test_launch_nodes` has a launch by torchrun."""
    with start_ranks(run_on_this_rank, 2, "plain_loop.py", str(tmp_path), group=False) as ranks:
        ends = ranks.wait()
    for end in ends:
        assert end.exit_code == 0, end
    assert_loss_falls(ends[0].traceback, falls_to=0.8)  # what it printed


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_plain_loop_trains(launcher: str, tmp_path: Path) -> None:
    run(launcher, "plain_loop.py", tmp_path)


@pytest.mark.slow  # tests/surface/test_integrations.py runs them in every suite, and compares their losses
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["accelerate_loop.py", "trainer_loop.py", "lightning_loop.py"])
def test_the_loop_trains_inside_other_frameworks(name: str, launcher: str, tmp_path: Path) -> None:
    run(launcher, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_adapters_learn_and_are_saved(launcher: str, tmp_path: Path) -> None:
    run(launcher, "lora_loop.py", tmp_path / "nvme", falls_to=0.97)


def test_every_example_is_run_here() -> None:
    tests = Path(__file__).parent.glob("test_example*.py")
    run = {name for test in tests for name in re.findall(r'"(\w+\.py)"', test.read_text())}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} <= run
