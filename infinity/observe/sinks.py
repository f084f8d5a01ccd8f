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
from pathlib import Path
from typing import Any, NamedTuple

from infinity.core.config import Config, option
from infinity.core.errors import InfinityError, first_line, optional_package
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


class Writer(NamedTuple):
    """Says what a package does with scalars of a step, by name, with a text of a step, and at the end."""

    put: Callable[[int, Mapping[str, float]], object]
    write: Callable[[int, str, str], object]
    end: Callable[[], object]


class Sink(View):
    """View that hands scalars and samples to a package.

    Args:
        key: Its name in ``observe``, as an extra and in the run's folder.
        folder: The run's, whose name is the run's there.
        after: Steps after this one are made again; -1: the run begins.
        settings: The recipe by key, such as ``train.steps``.
        say: Gets a line for people if the sink fails.
    """

    def __init__(
        self, key: str, folder: Path, *, after: int = -1, settings: Mapping[str, Any] | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:  # fmt: skip
        self.folder, self.after, self.settings = folder, after, settings or {}
        self._key, self._say, self._writer = key, say, Writer(*[lambda *given: None] * 3)
        module, begin = SINKS[key]
        package = optional_package(module, key, InfinityError, f"observe.{key} needs a package")
        self._try(lambda: setattr(self, "_writer", begin(package, self)))

    def step(self, report: StepReport | Evaluation) -> None:
        scalars = {name: float(each) for name, each in scalars_of(report).items() if each is not None}
        self._try(self._writer.put, report.step, scalars)

    def evaluated(self, found: Evaluation) -> None:
        self.step(found)

    def sampled(self, sample: Sample) -> None:
        name = "/".join(filter(None, ("samples", sample.adapter, str(sample.number))))
        self._try(self._writer.write, sample.step, name, str(sample))

    def close(self) -> None:
        self._try(self._writer.end)

    def number(self, make: Callable[[], str]) -> str:
        """Return the number of the run, which ``make`` returns when it begins."""
        path = self.folder / f"{self._key}.id"
        if self.after >= 0 and path.exists():
            return read_file(path, _MOST_NBYTES).decode().strip()
        number = make()
        write_file(path, f"{number}\n")
        return number

    def _try(self, do: Callable[..., object], *given: Any) -> None:
        """Call ``do``; if that fails, never call anything again: see [Note: a sink harms nothing]."""
        try:
            do(*given)
        except Exception as error:
            self._writer = Writer(*[lambda *given: None] * 3)
            self._say(
                f"WARNING: observe.{self._key} failed, training goes on without it: {first_line(error)}"
            )


def _tensorboard(package: Any, run: Sink) -> Writer:
    """Write events into the folder ``tensorboard`` of the run's."""
    events = package.SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.after + 1)

    def put(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            events.add_scalar(name, value, step)
        events.flush()

    return Writer(put, lambda step, name, text: events.add_text(name, text, step), events.close)


def _wandb(package: Any, run: Sink) -> Writer:
    """Log to Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE=offline`` and the like are its own."""
    logged = package.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT), name=run.folder.name,
        id=run.number(lambda: secrets.token_hex(8)), resume="allow", dir=str(run.folder),
        config=dict(run.settings),
    )  # fmt: skip
    return Writer(
        lambda step, scalars: logged.log(dict(scalars), step=step),
        lambda step, name, text: logged.log({name: text}, step=step),
        logged.finish,
    )


def _mlflow(package: Any, run: Sink) -> Writer:
    """Log to MLflow; ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are its own."""
    client, name = package.MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)

    def made() -> str:
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        number: str = client.create_run(experiment, run_name=run.folder.name).info.run_id
        for key, value in run.settings.items():
            client.log_param(number, key, value)
        return number

    def put(step: int, scalars: Mapping[str, float]) -> None:
        now_ms, metric = int(1000 * time.time()), package.entities.Metric
        client.log_batch(number, [metric(name, value, now_ms, step) for name, value in scalars.items()])

    number = run.number(made)
    client.update_run(number, status="RUNNING")
    return Writer(
        put,
        lambda step, name, text: client.log_text(number, text, f"{name}/step-{step}.txt"),
        lambda: client.set_terminated(number),
    )


#: The module of each sink, by its key in ``observe``, and what begins a run there, or goes on with it.
SINKS: dict[str, tuple[str, Callable[[Any, Sink], Writer]]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
}


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
