"""Provides ``Accelerator``: Hugging Face Accelerate for models that were built under ``infinity.Init``.

[Note: what Accelerate keeps]
Data loaders, accumulation, trackers and processes are Accelerate's. Models and optimizers of this package are
returned as they are: they shard weights, reduce gradients and scale losses themselves. Other models and
optimizers are prepared as ever.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import Tensor, nn

from infinity.api.init import is_served, no_sync
from infinity.api.optimizer import Optimizer
from infinity.api.portable import load_checkpoint, save_checkpoint
from infinity.core.errors import StateError
from infinity.core.files import user_path
from infinity.engine.runtime import runtime_of

#: The portable checkpoint in a directory of ``save_state``, and in one of the Trainer.
STATE_FOLDER = "training_state"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def scaled(loss: Tensor, optimizers: Iterable[Optimizer]) -> Tensor:
    """Return ``loss`` times the loss scale of the one of ``optimizers`` that has one."""
    scaling = [each for each in optimizers if each.scaler is not None]
    if len(scaling) > 1:
        raise StateError(
            f"{len(scaling)} models in fp16, each with its own loss scale, and one loss: write "
            "optimizer.scale(loss).backward() with the optimizer of its model, or set train.dtype=bf16"
        )
    return scaling[0].scale(loss) if scaling else loss


def replace_checkpoint(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Write what is trained to ``folder``, in place of what it holds; every rank must call."""
    if runtime_of(model).ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    save_checkpoint(model, optimizer, folder, trained_only=True)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that also takes models of ``infinity.Init`` and their ``infinity.AdamW``.

    ``clip_grad_norm_`` needs an optimizer with ``max_grad_norm``. ``mixed_precision`` may name the dtype that
    the model computes in anyway. ``save_state`` writes a portable checkpoint, and never holds the model.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_over()

    def take_over(self) -> None:
        """Leave casts and the loss scale to models and optimizers."""
        self.scaler, self.native_amp = None, False

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_served(model):
            return super().prepare_model(model, *args, **kwargs)
        computes = runtime_of(model).dtype
        if _DTYPES.get(self.mixed_precision, computes) is not computes:
            raise StateError(
                f"mixed_precision={self.mixed_precision} ({self.mixed_precision}=True of a Trainer), and the "
                f"model computes in {str(computes).removeprefix('torch.')}: build it with "
                f"train.dtype={self.mixed_precision} in its recipe, or leave mixed precision out"
            )
        plugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO and model not in self._models:
            model.compile(**plugin.to_kwargs())  # in its place: the model is not wrapped
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, Optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = Prepared(optimizer, device_placement=False)
        self._optimizers.append(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(scaled(loss, self._own()), **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the global norm, and let ``step()`` clip to ``max_norm``; see ``AdamW.clip_grad_norm_``."""
        given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for optimizer in self._own():
            own = sum(bool(optimizer.runtime.units.places(param)) for param in given)
            if own:
                if own < len(given):
                    raise StateError(
                        f"clip_grad_norm_: {own} of the {len(given)} parameters are of one infinity.AdamW, "
                        "and a model is clipped by its own norm: call it once for each model"
                    )
                if norm_type != 2:
                    raise StateError(
                        f"clip_grad_norm_ with norm_type={norm_type}: infinity clips by the 2-norm"
                    )
                return optimizer.clip_grad_norm_(max_norm)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(each.runtime.units.places(param) for each in self._own() for param in given):
            raise StateError("clip_grad_value_: infinity clips by the norm, clip_grad_norm_")
        super().clip_grad_value_(given, clip_value)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return no_sync(model) if is_served(model) else super().no_sync(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        return model.state_dict() if is_served(model) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        output_dir = None if output_dir is None else str(user_path(output_dir, "output_dir"))
        with self._without_own() as models:
            out: str = super().save_state(output_dir, *args, **kwargs)
        for number, (model, optimizer) in enumerate(models):
            replace_checkpoint(model, optimizer, Path(out) / f"{STATE_FOLDER}_{number}")
        return out

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        with self._without_own() as models:
            super().load_state(input_dir, *args, **kwargs)
        if input_dir is None:  # then it was the last one
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda each: int(each.name.rpartition("_")[2])))
        folder = user_path(input_dir, "input_dir")
        for number, (model, optimizer) in enumerate(models):
            load_checkpoint(model, optimizer, folder / f"{STATE_FOLDER}_{number}", trained_only=True)

    def _own(self) -> list[Optimizer]:
        return [each.optimizer for each in self._optimizers if isinstance(each, Prepared)]

    @contextmanager
    def _without_own(self) -> Iterator[list[tuple[nn.Module, Optimizer | None]]]:
        """Hide models and optimizers of this package; yield each of the models with its optimizer."""
        models, optimizers = self._models, self._optimizers
        by_runtime = {id(optimizer.runtime): optimizer for optimizer in self._own()}
        served = [model for model in models if is_served(model)]
        self._models = [model for model in models if not is_served(model)]
        self._optimizers = [each for each in optimizers if not isinstance(each, Prepared)]
        try:
            yield [(model, by_runtime.get(id(runtime_of(model)))) for model in served]
        finally:
            self._models, self._optimizers = models, optimizers


class Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """An ``infinity.AdamW`` that steps after the last micro-batch only, as Accelerate lets optimizers do."""

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.skipped)
