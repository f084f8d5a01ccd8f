"""What a recipe leaves to ``auto``: planned only where that gains, kept by the run, and never in its way."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import infinity
from infinity.app.loop import Loop
from infinity.app.runs import interrupted_run
from infinity.app.train import train
from infinity.core.errors import RecipeError
from infinity.core.plan import CHOICE, Choice
from infinity.device.machine import total_host_nbytes
from infinity.predict import auto
from infinity.predict.auto import choose, is_worth_it
from infinity.predict.machines import load_machine
from infinity.predict.plan_run import show_plan
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe

CPU = torch.device("cpu")
#: Weights that are read again for each micro-batch, from drives that are slow beside compute.
STREAMS = [
    "model.n_layers=4", "model.d_model=64", "model.n_heads=2", "model.seq_len=16", "train.batch_size=1",
    "train.accumulate=4", "train.dtype=bf16", "train.threads=1", "memory.host=8MiB", "memory.resident=false",
    "memory.device=1302528", "memory.activations=recompute", "optim.max_grad_norm=null",
]  # fmt: skip
SLOW = ["drives.read_bytes_per_s=1e7", "drives.write_bytes_per_s=1e7", "drives.mixed_bytes_per_s=1e7"]


@pytest.fixture
def slow_drives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """This machine has slow drives, and any plan is worth it; returns a list with an item per measurement."""
    measured: list[int] = []

    def probe(directories: Any) -> Any:
        measured.append(1)
        of_host = f"host.memory={total_host_nbytes()}"
        return load_machine("vm-2core", [*SLOW, of_host, f"drives.per_node={len(directories)}"])

    monkeypatch.setattr(auto, "probe", probe)
    monkeypatch.setattr(auto, "_PLAN_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return measured


def given(*overrides: str) -> Recipe:
    return load_recipe(None, [*STREAMS, "memory.nvme=[nvme]", *overrides])


def run_of(folder: Path, *overrides: str) -> Recipe:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    more = [
        "run.dir=runs", "run.name=one", "observe.progress=false", "data.files=text.txt", "data.cache=tokens",
        "train.steps=3", "train.eval_every=null", "memory.nvme=[nvme]",
    ]  # fmt: skip
    return load_recipe(None, [*STREAMS, *more, *overrides])


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def test_a_run_takes_the_faster_schedule_says_what_it_gains_and_keeps_it(
    slow_drives: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_of(tmp_path, "observe.progress=true", "train.steps=1"))
    [line] = [each for each in capsys.readouterr().err.splitlines() if each.startswith("auto: train")]
    assert "train.schedule=layer" in line
    assert "times as many as without this" in line
    assert load_recipe(tmp_path / "runs/one/recipe.yaml").train.schedule == "layer"
    console = Console(width=300)
    with console.capture() as shown:
        show_plan("runs/one", None, console)
    assert line in shown.get()


def test_a_model_that_cannot_run_as_chosen_is_told_how_to_do_without(
    slow_drives: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Loop, batches: Any) -> float:
        raise ValueError("shapes differ")

    monkeypatch.setattr(Loop, "_step", fails)
    with pytest.raises(ValueError, match="shapes differ") as caught:
        train(run_of(tmp_path))
    assert "train.schedule=step" in caught.value.__notes__[-1]
    with pytest.raises(ValueError, match="shapes differ") as caught:
        train(run_of(tmp_path, "run.name=step", "train.schedule=step"))
    assert not any("auto chose" in note for note in getattr(caught.value, "__notes__", []))


def test_a_micro_batch_of_a_mixture_has_the_activations_of_the_experts_that_a_token_uses(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    recipe, found = load_recipe(None, [f"model.path={tmp_path}"]), []
    for more in (
        {"intermediate_size": 16 * 5},
        {
            "intermediate_size": 1024,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
        },
        {"intermediate_size": 16, "num_experts_per_tok": 5},  # as Mixtral has it
    ):
        (tmp_path / "config.json").write_text(json.dumps(sizes | more))
        found.append(auto._sizes(recipe))
    assert found[0] is not None
    assert found[0] == found[1] == found[2]


class _StopError(Exception):
    pass


def test_a_run_that_goes_on_keeps_its_choice_and_its_numbers_whatever_a_plan_would_choose_now(
    slow_drives: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_of(tmp_path, "run.name=named", "train.schedule=layer"))
    step = Loop._step

    def stops(self: Loop, batches: Any) -> float:
        if self.step == 3:
            raise _StopError
        return step(self, batches)

    monkeypatch.setattr(Loop, "_step", stops)
    with pytest.raises(_StopError):
        train(run_of(tmp_path))
    monkeypatch.setattr(Loop, "_step", step)
    monkeypatch.setattr(auto, "find_best", _never)
    with pytest.raises(RecipeError, match=r"train.schedule was 'layer', is 'step'"):
        train(run_of(tmp_path, "train.schedule=step"))
    assert interrupted_run("runs/one").train.schedule == "layer"
    train(run_of(tmp_path))
    assert losses(tmp_path / "runs/one") == losses(tmp_path / "runs/named")
    assert load_recipe(tmp_path / "runs/one/recipe.yaml").train.schedule == "layer"


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing is planned here")


def test_what_the_recipe_names_is_not_chosen(slow_drives: list[int]) -> None:
    found = choose(given("train.schedule=step"), 1, CPU)
    assert found is None or "train.schedule" not in found.values
    named = "train.schedule=step", "memory.activations=keep", "memory.updates=host", "partition.tile=never"
    assert choose(given(*named, "memory.device=8MiB"), 1, CPU) is None


def test_the_choice_and_the_machine_are_cached_while_nothing_that_they_follow_from_changes(
    slow_drives: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = auto._free(CPU)  # other processes of the machine may take some meanwhile
    monkeypatch.setattr(auto, "_free", lambda device: free)
    first = choose(given(), 1, CPU)
    assert first is not None
    assert choose(given("memory.host=2MiB"), 1, CPU) is not None
    assert slow_drives == [1]  # the machine is the same
    find_best = auto.find_best
    monkeypatch.setattr(auto, "find_best", _never)
    again = choose(given("train.steps=7", "optim.lr=1e-3", "run.name=other"), 1, CPU)
    assert again is not None
    assert again.values == first.values
    assert again.line == f"{first.line} by an earlier run"
    monkeypatch.setattr(auto, "find_best", find_best)
    monkeypatch.setattr(auto, "_free", lambda device: (first.host_nbytes // 2, 0))
    less = choose(given(), 1, CPU)
    assert less is not None
    assert "earlier" not in less.line  # it is planned anew


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"values": {"run.dir": "/x"}, "line": "x"}', b'{"values": 3, "line": "x"}',
     b'{"values": {"train.schedule": "never"}, "line": "x"}', b'{"values": {}, "line": "\\u001b[2J"}',
     b"\xff", b"[" * 10_000],
    ids=range(9),
)  # fmt: skip
def test_a_file_that_holds_no_choice_of_this_recipe_is_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / CHOICE).write_bytes(damage)
    found = Choice.read(tmp_path / CHOICE)
    assert found is None or not auto._holds(found, given(), (1, 1))


def test_a_damaged_cache_is_planned_over(slow_drives: list[int], tmp_path: Path) -> None:
    files = tmp_path / "cache/infinity/plans"
    first = choose(given(), 1, CPU)
    for file in files.iterdir():
        file.write_bytes(b"")
    again = choose(given(), 1, CPU)
    assert first is not None
    assert again is not None
    assert again.values == first.values
    assert "earlier" not in again.line
    assert slow_drives == [1, 1]


@pytest.mark.parametrize("changed", ["optim.name=sgd", "optim.ema=0.9", "memory.host=9MiB"])
def test_a_choice_for_other_states_is_another_one(changed: str) -> None:
    assert auto._followed(given(changed), 1, CPU) != auto._followed(given(), 1, CPU)
    assert auto._followed(given("optim.lr=1e-5"), 1, CPU) == auto._followed(given(), 1, CPU)


def test_without_a_cache_each_run_plans(
    slow_drives: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        found = choose(given(), 1, CPU)
        assert found is not None
        assert found.values == {"train.schedule": "layer"}
    assert slow_drives == [1, 1]


def _fails() -> None:
    raise ZeroDivisionError("of a library")


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("probe", lambda *given: _fails(), "of a library"),
        ("find_best", lambda *given, **more: _fails(), "of a library"),
        ("LIMIT_S", -1.0, "it takes longer than -1 s"),
    ],
    ids=["a machine that cannot be measured", "a plan that fails", "a plan that takes too long"],
)
def test_a_plan_never_makes_training_fail(
    slow_drives: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: Any, why: str
) -> None:
    monkeypatch.setattr(auto, name, what)
    train(run_of(tmp_path, "train.steps=1"))
    found = Choice.read(tmp_path / "runs/one" / CHOICE)
    assert found is not None
    assert found == Choice({}, f"auto: no plan ({why}); goes on without one")
    assert load_recipe(tmp_path / "runs/one/recipe.yaml").train.schedule == "step"


LARGE = ["model.d_model=4096", "model.n_layers=32", "model.n_heads=32"]


@pytest.mark.parametrize(
    ("overrides", "worth"),
    [
        (["memory.resident=auto", "memory.host=1GiB"], False),  # everything fits
        (["train.accumulate=1"], False),  # nothing is read twice
        (["train.steps=2"], False),  # two steps take less than a plan
        (["train.steps=1000000"], True),
        ([*LARGE, "train.steps=10"], True),
        ([*LARGE, "train.steps=10", "train.accumulate=1"], False),
        ([*LARGE, "train.accumulate=1", "train.batch_size=4096", "model.seq_len=4096"], True),  # activations
    ],
)
def test_a_plan_is_made_where_it_could_gain_more_than_it_takes(overrides: list[str], worth: bool) -> None:
    assert is_worth_it(given(*overrides), CPU) is worth


def test_a_relative_cache_directory_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auto._cached("name") == tmp_path / ".cache/infinity/plans/name"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_cache_that_another_user_could_write_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = auto._cached("name")
    assert path is not None
    os.chown(path.parent, 12345, 12345)
    assert auto._cached("name") is None


def test_ranks_of_several_nodes_go_on_without_a_plan(
    slow_drives: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choose(given(), 2, CPU)
    assert found is not None
    assert "network between nodes" in found.line
    assert not found.values


def test_null_is_another_way_to_leave_activations_open() -> None:
    assert load_recipe(None, ["memory.activations=null"]) == load_recipe()
    assert infinity.load_recipe().memory.activations == "auto"
