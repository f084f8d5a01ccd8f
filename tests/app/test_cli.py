"""The command line: what it prints, and the exit code of every way to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.app import train as train_module
from infinity.cli import main
from infinity.core.errors import BudgetError, InfinityError
from infinity.device import accelerator
from infinity.device.accelerator import tunables
from infinity.predict import plan_recipe
from infinity.predict.machines import load_machine
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe, recipe_table
from tests.helpers.forks import SEEDS, Fork, Job
from tests.helpers.limits import comes_true, hang
from tests.helpers.profiles import hardware, transformer
from tests.planner.test_planning import planning_for

ROOT = Path(__file__).parents[2]


def hang_instead_of_training(may_close: str) -> int:
    """What a fork runs: the command line, whose training hangs, and closes when there is such a file."""

    def wait(recipe: Recipe) -> None:
        try:
            os.write(1, b"begun\n")  # at once: a signal comes as soon as the word is there
            hang()
        finally:
            print("closing", flush=True)
            comes_true(Path(may_close).exists)
            print("closed", flush=True)

    train_module.train = wait
    return main(["train", "configs/quickstart.yaml"])


def write(tmp_path: Path, text: str = "train: {steps: 3}") -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_train_gets_the_file_with_the_overrides_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []
    monkeypatch.setattr(train_module, "train", seen.append)
    assert main(["train", write(tmp_path), "memory.nvme=[/a,/b]", "train.batch_size=2"]) == 0
    assert seen == [load_recipe(None, ["train.steps=3", "memory.nvme=[/a,/b]", "train.batch_size=2"])]


def test_an_error_is_one_message_with_the_rank_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(recipe: Recipe) -> None:
        raise BudgetError("memory.host=1MiB; at least 3 MiB is required")

    monkeypatch.setattr(train_module, "train", refuse)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("INFINITY_TRACEBACK", raising=False)
    assert main(["train", write(tmp_path)]) == 1
    message = "BudgetError: memory.host=1MiB; at least 3 MiB is required\n"
    assert capsys.readouterr().err == f"infinity: {message}"
    monkeypatch.setenv("RANK", "3")
    assert main(["train", write(tmp_path)]) == 1
    assert capsys.readouterr().err == f"infinity: rank 3: {message}"
    monkeypatch.setenv("INFINITY_TRACEBACK", "1")
    with pytest.raises(BudgetError):
        main(["train", write(tmp_path)])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the run's files are closed"),
        (InfinityError("the drive is full"), 1, "InfinityError: the drive is full"),
    ],
    ids=["Ctrl-C", "error"],
)
def test_what_interrupts_a_run_is_followed_by_how_to_go_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def stop(recipe: Recipe) -> None:
        error.add_note("step 3 is kept")
        raise error

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("INFINITY_TRACEBACK", raising=False)
    monkeypatch.setattr(train_module, "train", stop)
    assert main(["train", write(tmp_path)]) == code
    assert capsys.readouterr().err == f"infinity: {said}\nstep 3 is kept\n"

    def stop_while_closing(recipe: Recipe) -> None:
        try:
            stop(recipe)
        finally:
            raise KeyboardInterrupt

    error.__notes__.clear()
    monkeypatch.setattr(train_module, "train", stop_while_closing)
    assert main(["train", write(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("files are closed\nstep 3 is kept\n")


def test_a_wrong_recipe_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "train: {stepz: 3}")
    assert main(["train", path]) == 1
    assert f"train.stepz in {path}: unknown key; did you mean train.steps?" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "none.yaml")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_overrides_may_stand_before_and_after_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infinity.predict import plan_recipe

    seen: list[list[str]] = []
    monkeypatch.setattr(plan_recipe, "show_recipe", lambda path, given, *rest, **options: seen.append(given))
    given = ["train.steps=3", "memory.host=1GiB", "train.batch_size=2"]
    assert main(["train", write(tmp_path), given[0], "--dry-run", given[1], "--on", "gh200", given[2]]) == 0
    assert main(["plan", write(tmp_path), "--on", "gh200", *given]) == 0
    assert seen == [given, given]
    assert main(["plan", str(tmp_path / "none.yaml"), "--on", "gh200"]) == 1
    assert "none.yaml: no such file; key=value, --on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [[], ["train"], ["fly"], ["train", "recipe.yaml", "a.b=1", "--fly"], ["export", "a", "b", "c=1"]],
)
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "usage: infinity" in capsys.readouterr().err


def test_the_recipe_command_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == 0
    text = capsys.readouterr().out
    for row in recipe_table():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{row.key} ")]
        assert row.meaning in line
        assert row.type in line


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith("infinity ")


@pytest.mark.slow
def test_python_dash_m_is_the_same_command_with_the_allocator_that_it_wants(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nprint(os.environ.get('GLIBC_TUNABLES'), file=sys.stderr)\n"
    )
    environment = {**os.environ, "RANK": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environment.pop("GLIBC_TUNABLES", None)
    run = subprocess.run(
        [sys.executable, "-m", "infinity", "train", "none.yaml"],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    *starts, error = run.stderr.splitlines()
    assert error.startswith("infinity: rank 1: RecipeError: none.yaml: No such file")
    wanted = tunables({})
    if any(map(os.path.exists, accelerator.DEVICE_FILES)) or wanted is None:
        assert starts == ["None"]
    else:
        assert starts == ["None", wanted]


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        pytest.param([signal.SIGINT], 130, marks=pytest.mark.slow),
        ([signal.SIGTERM], 143),
        pytest.param([signal.SIGHUP], 129, marks=pytest.mark.slow),  # the terminal was closed
        ([signal.SIGUSR1], os.EX_TEMPFAIL),  # a scheduler's: start it again
        ([signal.SIGINT, signal.SIGTERM], 130),  # a launcher's, after Ctrl-C, while files are closed
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP", "SIGUSR1", "both"],
)
def test_a_signal_closes_files_and_is_the_exit_code(
    tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    log = tmp_path / "log"
    log.touch()
    process = Fork(
        Job(
            module=__name__, function="hang_instead_of_training", argument=str(tmp_path / "may close"),
            environment=dict(os.environ), path=[str(ROOT), *filter(None, sys.path)], log=str(log),
        ),
        SEEDS[0],
    )  # fmt: skip

    def wait_for(line: str) -> None:
        comes_true(lambda: line in log.read_text().splitlines() or process.poll() is not None)
        assert line in log.read_text().splitlines()

    wait_for("begun")
    process.send_signal(signals[0])
    wait_for("closing")
    for number in signals[1:]:
        process.send_signal(number)
        time.sleep(0.1)  # it does nothing, whenever it comes
    (tmp_path / "may close").touch()
    assert process.wait() == code, log.read_text()
    said = "interrupted" if code == 130 else f"stopped by {signals[0].name}"
    assert log.read_text() == f"begun\nclosing\nclosed\ninfinity: {said}; the run's files are closed\n"


def test_a_closed_terminal_stops_nothing_under_nohup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_module, "train", lambda recipe: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["train", write(tmp_path)]) == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert main(["train", write(tmp_path)]) == 129
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capsys.readouterr().err == "infinity: stopped by SIGHUP; the run's files are closed\n"


def test_no_command_reaches_the_hub_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "USE_HUB_KERNELS"):
        monkeypatch.setenv(name, {"USE_HUB_KERNELS": "1"}.get(name, "0"))
    assert main(["recipe"]) == 0
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["USE_HUB_KERNELS"]) == ("1", "0")


#: Arguments that are no path, no number, or no text.
ODD = [
    "", "\0", "x" * 300, "x/" * 2500, "~nosuchuser", "loop", "none", "/", "..", "file", "/dev/null", "\udcff",
    "\ud800", "-", "--", "-1", "1e400", "9" * 400, "9" * 5000, "{}", "*", "=", "a=b", "train.steps=",
]  # fmt: skip
COMMANDS: list[list[str]] = [
    ["{}"], ["train", "{}"], ["train", "recipe.yaml", "{}"], ["train", "recipe.yaml", "{}=3"],
    ["train", "recipe.yaml", "train.steps={}"], ["train", "recipe.yaml", "run.name={}", "train.steps=0"],
    ["plan", "{}"], ["plan", "run", "--budget={}"], ["export", "{}", "out"], ["export", "run", "{}"],
    ["resume", "{}"], ["resume", "run", "{}=3"], ["runs", "{}"], ["runs", ".", "--remove", "{}", "--yes"],
    ["recipe", "{}"], ["plan", "recipe.yaml", "--on={}"], ["plan", "recipe.yaml", "--on=gh200", "--ranks={}"],
    ["plan", "recipe.yaml", "--on=gh200", "--tokens={}"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_any_argument_is_a_run_or_one_message_and_an_exit_code(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_module, "train", lambda recipe: None)
    monkeypatch.delenv("INFINITY_TRACEBACK", raising=False)
    write(tmp_path)
    if "--tokens={}" in command:  # each of the same plan
        planned = plan_recipe.dry_run(load_recipe("recipe.yaml"), load_machine("gh200"))
        monkeypatch.setattr(plan_recipe, "dry_run", lambda *args, **options: planned)
        monkeypatch.setattr(plan_recipe, "changes", lambda planned: iter(()))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("x")
    for odd in ODD:
        try:
            code = main([part.format(odd) if part != "{}" else odd for part in command])
        except SystemExit as end:
            code = int(end.code or 0)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert len(error) < 9000
        if code:
            assert code in (1, 2), odd
            assert error.count("infinity: ") == 1 if code == 1 else "usage: infinity" in error


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("given", ["--ranks=0", "--ranks=-3", "--tokens=-5", "--tokens=0.5", "--tokens=nan"])
def test_a_plan_is_for_one_rank_and_one_token_at_least(
    command: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, number = given.partition("=")
    with pytest.raises(SystemExit) as raised:
        main([*command, "recipe.yaml", given])
    assert raised.value.code == 2
    assert f"argument {name}: got {number}; wanted a number >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", "3", '{"plan": 3}', "[" * 100_000, "\0", "{}" * 9]
)
def test_a_damaged_plan_is_an_error_that_names_its_file(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "activations"
    planning_for(transformer(layers=1), hardware(1.0)).save(folder)
    (folder / "plan.json").write_text(content)
    assert main(["plan", str(tmp_path)]) == 1
    assert "plan.json: " in capsys.readouterr().err


def write_to_a_closed_pipe(argument: str) -> int:
    """As a process of its own: the command, whose output nobody reads."""
    read, write_end = os.pipe()
    os.close(read)
    os.dup2(write_end, 1)
    os.close(write_end)
    sys.stdout = os.fdopen(1, "w")  # the log's could be sought in
    return main(["recipe"])


def test_a_pipe_that_was_read_enough_of_is_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    process = Fork(
        Job(
            module=__name__, function="write_to_a_closed_pipe", argument="", environment=dict(os.environ),
            path=[str(ROOT), *filter(None, sys.path)], log=str(log),
        ),
        seed=1,
    )  # fmt: skip
    assert (process.wait(), log.read_text()) == (1, "")
