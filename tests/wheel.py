"""Builds the package and trains with it as a user would: an empty environment, no checkout in sight.

python tests/wheel.py

Builds the source distribution, from it the wheel, looks at what they hold, installs the wheel into a new
virtual environment (torch first, by the version that constraints.txt names), and trains the quickstart's
recipe for three steps in a folder of its own.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 3


def run(*command: str | Path, cwd: Path, **options: bool) -> str:
    """Run a command without this checkout's paths; its output, where it is captured."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, text=True, check=False, **options
    )
    if done.returncode != 0:
        raise SystemExit(f"wheel: {command[0]} ended with {done.returncode}\n{done.stderr or ''}")
    return done.stdout or ""


def check_contents(sdist: Path, wheel: Path) -> None:
    """The wheel holds the package and nothing else; the sdist what the wheel is built from."""
    inside = zipfile.ZipFile(wheel).namelist()
    files = (path for path in (ROOT / "infinity").rglob("*") if path.suffix in (".py", ".yaml"))
    ours = {path.relative_to(ROOT).as_posix() for path in files}
    missing = (ours | {"infinity/py.typed"}) - set(inside)
    foreign = [name for name in inside if name.split("/")[0] != "infinity" and ".dist-info/" not in name]
    if missing or foreign:
        raise SystemExit(f"wheel: missing {sorted(missing)}, does not belong there: {foreign}")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    if missing := (ours | {"pyproject.toml", "README.md", "LICENSE"}) - sources:
        raise SystemExit(f"sdist: missing {sorted(missing)}")


def main() -> None:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder, capture_output=True)
        [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
        check_contents(sdist, wheel)
        say(f"built {wheel.name} and {sdist.name}")

        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        constraints = ROOT / "constraints.txt"
        [torch] = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "-c", constraints]
        run(*pip, torch, cwd=folder)
        run(*pip, wheel, cwd=folder)
        say("installed it, and what it depends on, into an empty environment")

        where = run(
            python, "-c", "import infinity; print(infinity.__file__)", cwd=folder, capture_output=True
        )
        if not Path(where.strip()).is_relative_to(folder / "venv"):
            raise SystemExit(f"wheel: infinity was imported from {where}")
        command = folder / "venv/bin/infinity"
        run(command, "recipe", cwd=folder, capture_output=True)
        (folder / "quickstart.yaml").write_bytes((ROOT / "configs/quickstart.yaml").read_bytes())
        torchrun = [folder / "venv/bin/torchrun", "--nproc-per-node", "2", "-m", "infinity", "train"]
        run(*torchrun, "quickstart.yaml", f"train.steps={STEPS}", cwd=folder)
        [metrics] = (folder / "runs").glob("*/metrics.jsonl")
        if metrics.read_text().count("grad_norm") != STEPS:
            raise SystemExit(f"wheel: it did not train {STEPS} steps\n{metrics.read_text()}")
        say("trained with it")


if __name__ == "__main__":
    main()
