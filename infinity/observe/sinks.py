"""Settings of views; sinks of a run's scalars and samples: TensorBoard, Weights & Biases, and MLflow.

[Note: a sink harms nothing]
Only rank 0 has sinks. A package that is missing is an error before training; whatever fails later, such as a
network, is said once, and the run goes on without that sink.

[Note: a sink of a run that goes on]
It goes on under the number that the first process wrote into the run's folder. Steps that are made again
replace those before (TensorBoard), are left out (Weights & Biases), or appear twice with the same values
(MLflow).
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from infinity.core.config import Config, option
from infinity.core.errors import InfinityError, first_line
from infinity.core.files import read_file, write_file
from infinity.observe.metrics import Evaluation, Sample, StepReport, View, perplexity

#: The project, or experiment, of runs for which the environment names none.
_PROJECT = "infinity"
#: The most bytes of a file with a run's number.
_MOST_NBYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Config):
    """Views of a run; all are written by rank 0."""

    metrics: bool = option(True, "write metrics.jsonl, one line per step")
    tensorboard: bool = option(False, "write TensorBoard events (extra: tensorboard)")
    wandb: bool = option(False, "log to Weights & Biases, also with WANDB_MODE=offline (extra: wandb)")
    mlflow: bool = option(False, "log to MLflow, to MLFLOW_TRACKING_URI (extra: mlflow)")
    progress: bool = option(True, "show progress and the final summary")
    timeline: bool = option(False, "write timeline.json, for Perfetto and chrome://tracing")


class Sink(View):
    """View that hands scalars, by name, to a package.

    Args:
        folder: The run's, whose name is the run's there.
        after: Steps after this one are made again; -1: the run begins.
        settings: The recipe by key, such as ``train.steps``.
        say: Gets a line for people if the sink fails.
    """

    #: Its name in ``observe``, as an extra and in the run's folder; and the module that is imported.
    key: ClassVar[str]
    module: ClassVar[str]

    def __init__(
        self, folder: Path, *, after: int = -1, settings: Mapping[str, Any] | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:  # fmt: skip
        self._folder, self._after, self._say, self._failed = folder, after, say, False
        try:
            package = import_module(self.module)
        except ImportError as error:
            raise InfinityError(
                f"observe.{self.key} needs a package: pip install 'infinity-offload[{self.key}]'"
            ) from error
        self._try(self.begin, package, settings or {})

    def step(self, report: StepReport | Evaluation) -> None:
        scalars = {name: float(each) for name, each in scalars_of(report).items() if each is not None}
        self._try(self.put, report.step, scalars)

    def evaluated(self, found: Evaluation) -> None:
        self.step(found)

    def sampled(self, sample: Sample) -> None:
        name = "/".join(filter(None, ("samples", sample.adapter, str(sample.number))))
        self._try(self.write, sample.step, name, str(sample))

    def close(self) -> None:
        self._try(self.end)

    def begin(self, package: Any, settings: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it."""
        raise NotImplementedError

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add scalars of a step."""
        raise NotImplementedError

    def write(self, step: int, name: str, text: str) -> None:
        """Add a text of a step."""
        raise NotImplementedError

    def end(self) -> None:
        """End the run, after all scalars have arrived."""
        raise NotImplementedError

    def number(self, make: Callable[[], str]) -> str:
        """Return the number of the run, which ``make`` returns when it begins."""
        path = self._folder / f"{self.key}.id"
        if self._after >= 0 and path.exists():
            return read_file(path, _MOST_NBYTES).decode().strip()
        number = make()
        write_file(path, f"{number}\n")
        return number

    def _try(self, do: Callable[..., object], *given: Any) -> None:
        """Call ``do``; if that fails, now or earlier, do nothing: see [Note: a sink harms nothing]."""
        if self._failed:
            return
        try:
            do(*given)
        except Exception as error:
            self._failed = True
            self._say(f"WARNING: observe.{self.key} failed, training goes on without it: {first_line(error)}")


class TensorBoard(Sink):
    """Writes events into the folder ``tensorboard`` of the run's."""

    key, module = "tensorboard", "torch.utils.tensorboard"

    def begin(self, package: Any, settings: Mapping[str, Any]) -> None:
        folder = str(self._folder / "tensorboard")
        self._writer = package.SummaryWriter(folder, purge_step=self._after + 1)

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def end(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """Logs to Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE=offline`` and the like are its own."""

    key, module = "wandb", "wandb"

    def begin(self, package: Any, settings: Mapping[str, Any]) -> None:
        self._run = package.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=self._folder.name,
            id=self.number(lambda: secrets.token_hex(8)), resume="allow", dir=str(self._folder),
            config=dict(settings),
        )  # fmt: skip

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def write(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def end(self) -> None:
        self._run.finish()


class MLflow(Sink):
    """Logs to MLflow; ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are its own."""

    key, module = "mlflow", "mlflow"

    def begin(self, package: Any, settings: Mapping[str, Any]) -> None:
        self._metric = package.entities.Metric
        self._client = package.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)

        def made() -> str:
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            number: str = self._client.create_run(experiment, run_name=self._folder.name).info.run_id
            for key, value in settings.items():
                self._client.log_param(number, key, value)
            return number

        self._number = self.number(made)
        self._client.update_run(self._number, status="RUNNING")

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self._metric(name, value, now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._number, metrics=metrics)

    def write(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._number, text, f"{name}/step-{step}.txt")

    def end(self) -> None:
        self._client.set_terminated(self._number)


#: Every sink, by its key in ``observe``.
SINKS: dict[str, type[Sink]] = {each.key: each for each in (TensorBoard, WeightsAndBiases, MLflow)}


def scalars_of(line: StepReport | Evaluation) -> dict[str, float | None]:
    """Return the figures of a step or an evaluation by the names that sinks and the report have for them."""
    scalars: dict[str, float | None] = {}
    if isinstance(line, Evaluation):
        for name, loss in {"": line.loss, **line.adapters}.items():
            end = f"/{name}" if name else ""
            scalars[f"loss/held_out{end}"] = loss
            if line.per_token:
                scalars[f"perplexity/held_out{end}"] = perplexity(loss)
        return scalars | {f"metrics/held_out/{name}": value for name, value in line.metrics.items()}
    scalars = {
        "loss/train": line.loss,
        "optimizer/lr": line.lr,
        "optimizer/grad_norm": line.grad_norm,
        "speed/tokens_per_s": line.tokens_per_s,
        "speed/step_s": line.step_s,
        "bytes/read": line.nbytes_read,
        "bytes/written": line.nbytes_written,
        "bytes/crossed": line.nbytes_crossed,
        "bytes/copied": line.nbytes_copied,
        "bytes/planned_read": line.planned_nbytes_read,
        "bytes/planned_written": line.planned_nbytes_written,
        **{f"stall_s/{cause}": waited_s for cause, waited_s in line.stall_s.items()},
        **{f"peak_bytes/{tier}": nbytes for tier, nbytes in line.peak_nbytes.items()},
        **{f"metrics/train/{name}": value for name, value in line.metrics.items()},
    }
    for name, each in line.adapters.items():
        scalars |= {f"loss/train/{name}": each.loss, f"optimizer/lr/{name}": each.lr}
        scalars[f"optimizer/grad_norm/{name}"] = each.grad_norm
    return scalars
