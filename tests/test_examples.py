"""Every example is a complete program: it runs as a reader would run it, and its loss falls."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"  loss ([0-9.]+)", done.stdout)]
    assert losses[-1] < falls_to * losses[0], done.stdout


@pytest.mark.parametrize("launcher", [pytest.param("python", marks=pytest.mark.slow), "torchrun"])
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
