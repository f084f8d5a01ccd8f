"""Sinks of scalars: what they get, how a run that goes on continues them, and that they harm nothing."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infinity.core.errors import InfinityError
from infinity.observe.metrics import Evaluation, Sample, StepReport
from infinity.observe.sinks import SINKS, Sink

REPORT = StepReport(
    step=2, loss=3.25, lr=1e-3, grad_norm=0.5, skipped=False, step_s=2.0, tokens=4096,
    stall_s={"read": 0.25}, peak_nbytes={"nvme": 2**30}, metrics={"accuracy": 0.75},
)  # fmt: skip
SAMPLE = Sample(2, [{"role": "user", "content": "What?"}], "That.", adapter="french", number=2)
#: Of other packages, and of those that they import.
IGNORED = pytest.mark.filterwarnings("ignore")


@IGNORED
def test_tensorboard_drops_what_a_run_goes_on_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, loss in ((-1, 5.0), (2, 4.0), (-1, 3.0)):
        board = Sink("tensorboard", tmp_path, after=after)
        for step in range(max(after, 0) + 1, max(after, 0) + 4):
            board.step(replace(REPORT, step=step, loss=loss))
        board.close()
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        shown = [(event.step, event.value) for event in events.Scalars("loss/train")]
        wanted = {
            2: [(1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0), (5, 4.0)],
            -1: [(1, loss), (2, loss), (3, loss)],
        }
        assert shown == wanted[after]


@IGNORED
def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Sink("tensorboard", tmp_path)
    board.step(REPORT)
    board.evaluated(Evaluation(2, 3.5, metrics={"code/loss": 3.0}))
    board.sampled(SAMPLE)
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert values["loss/train"] == 3.25
    assert values["loss/held_out"] == 3.5
    assert values["perplexity/held_out"] == pytest.approx(math.exp(3.5))
    assert values["stall_s/read"] == 0.25
    assert values["peak_bytes/nvme"] == 2**30
    assert values["metrics/train/accuracy"] == 0.75
    assert values["metrics/held_out/code/loss"] == 3.0
    (written,) = events.Tensors("samples/french/2/text_summary")
    assert written.tensor_proto.string_val == [str(SAMPLE).encode()]


@IGNORED
def test_wandb_gets_the_scalars_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    for after in (-1, 2):
        sink = Sink("wandb", tmp_path, after=after, settings={"train.steps": 3}, say=said.append)
        sink.step(replace(REPORT, step=3 if after > 0 else 2))
        sink.sampled(SAMPLE._replace(step=3 if after > 0 else 2))
        sink.close()
    assert said == []
    number = (tmp_path / "wandb.id").read_text().strip()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {each.name.rpartition("-")[2] for each in folders} == {number}  # the second goes on with the first
    assert all([*each.glob("*.wandb")] for each in folders)


@IGNORED
def test_mlflow_gets_the_scalars_and_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else it wants a database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    said: list[str] = []
    (tmp_path / "mine").mkdir()
    for after, step in ((-1, 2), (2, 3)):
        how: Any = {"after": after, "settings": {"train.steps": 3}, "say": said.append}
        sink = Sink("mlflow", tmp_path / "mine", **how)
        sink.step(replace(REPORT, step=step, loss=1.0 / step))
        sink.sampled(SAMPLE._replace(step=step))
        sink.close()
    assert said == []
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("infinity").experiment_id])
    found = client.get_metric_history(run.info.run_id, "loss/train")
    assert sorted((each.step, each.value) for each in found) == [(2, 0.5), (3, pytest.approx(1 / 3))]
    assert run.data.params == {"train.steps": "3"}
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    written = client.list_artifacts(run.info.run_id, "samples/french/2")
    assert [Path(each.path).name for each in written] == ["step-2.txt", "step-3.txt"]


class Failing(ModuleType):
    """A package of a sink that fails when scalars come."""

    def init(self, **how: Any) -> Any:
        def log(scalars: Any, step: int) -> None:
            raise ConnectionError("no route to host\nmore")

        return type("Run", (), {"log": staticmethod(log), "finish": staticmethod(lambda: 1 / 0)})


def test_a_sink_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Failing("wandb"))
    said: list[str] = []
    sink = Sink("wandb", tmp_path, say=said.append)
    for _ in range(3):
        sink.step(REPORT)
    sink.close()
    assert said == ["WARNING: observe.wandb failed, training goes on without it: no route to host"]


@pytest.mark.parametrize("key", SINKS)
def test_a_package_that_is_missing_is_an_error_before_training(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, SINKS[key][0], None)
    wanted = rf"observe\.{key} needs a package: pip install 'infinity-offload\[{key}\]'"
    with pytest.raises(InfinityError, match=wanted):
        Sink(key, tmp_path)
