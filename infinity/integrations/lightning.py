"""Provides ``LightningStrategy``: Lightning's Trainer for models that are built under ``infinity.Init``."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from infinity.api.init import Init, is_served, no_sync
from infinity.api.optimizer import Optimizer
from infinity.api.portable import load_checkpoint, save_checkpoint
from infinity.core.errors import StateError
from infinity.engine.runtime import runtime_of
from infinity.integrations.accelerate import STATE_FOLDER, scaled

#: What Lightning itself knows of a checkpoint, beside the states of the model.
_LOOPS = "loops.ckpt"


class LightningStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains a ``LightningModule`` whose model is sharded and stored by this package.

    As in::

        trainer = lightning.Trainer(strategy=infinity.LightningStrategy(recipe), gradient_clip_val=1.0)

    What ``configure_model`` builds is built under ``Init(recipe)``; ``configure_optimizers`` returns an
    ``infinity.AdamW``, which needs ``max_grad_norm`` if the Trainer clips. Checkpoints are directories: a
    portable checkpoint of what is trained, with its moments, and Lightning's own state.

    Args:
        recipe: Budgets, dtype and directories, as for :class:`infinity.Init`; None: the module makes its
            own ``Init``.
        kwargs: Of Lightning's ``DDPStrategy``, such as ``timeout``.
    """

    def __init__(self, recipe: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._recipe, self._own_precision = recipe, _OwnPrecision()
        self._state: Path | None = None  # of the checkpoint that is being loaded

    @property
    def precision_plugin(self) -> Precision:
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) is not Precision:
            raise StateError(
                f"precision={getattr(plugin, 'precision', plugin)!r} of Lightning's Trainer: the model "
                "computes in train.dtype of its recipe; leave precision out"
            )

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        module = self.lightning_module
        if self._recipe is None or (module is not None and is_served(module)):
            yield
        else:
            with Init(self._recipe, device=self.root_device):
                yield

    def setup(self, trainer: lightning.Trainer) -> None:
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def block_backward_sync(self) -> AbstractContextManager[None]:
        return no_sync(self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        runtime, out = runtime_of(self.lightning_module), Path(filepath)
        if runtime.values.within_step:  # Lightning would lose them, too
            if self.is_global_zero:
                runtime.say(f"no checkpoint {out.name} between the micro-batches of a step")
            return
        whole = out.with_name(f".saving-{out.name}")
        if self.is_global_zero:
            shutil.rmtree(whole, ignore_errors=True)
        save_checkpoint(self.lightning_module, self._optimizer(), whole / STATE_FOLDER, trained_only=True)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, whole / _LOOPS, storage_options=storage_options)
            shutil.rmtree(out, ignore_errors=True)
            whole.rename(out)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(checkpoint_path)
        if not (folder / STATE_FOLDER).is_dir():
            raise StateError(
                f"{folder} has no {STATE_FOLDER}: it was not written by infinity.LightningStrategy. Load the "
                "model's weights with infinity.from_pretrained or load_state_dict"
            )
        self._state = folder / STATE_FOLDER
        found: dict[str, Any] = super().load_checkpoint(folder / _LOOPS, weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._state is not None:
            load_checkpoint(self.lightning_module, self._optimizer(), self._state, trained_only=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: the state came with the model's."""

    def _optimizer(self) -> Optimizer | None:
        return next((each for each in self.optimizers if isinstance(each, Optimizer)), None)


class _OwnPrecision(Precision):  # type: ignore[misc]
    """Lets an ``infinity.AdamW`` scale the loss and clip."""

    _skipped = False  # training_step returned None for all micro-batches of the step

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        def closed() -> Any:
            loss = closure()
            self._skipped = own and loss is None
            if self._skipped and optimizer.runtime.values.within_step:
                raise StateError(
                    "training_step returned None for the last micro-batch of a step, whose earlier ones have "
                    "gradients: these are complete with a backward pass only. Return the loss times 0, in "
                    "place of None"
                )
            return loss

        own = isinstance(optimizer, Optimizer) and model.automatic_optimization
        return super().optimizer_step(optimizer, model, closed, **kwargs)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        optimizers = module.trainer.strategy.optimizers
        own = [each for each in optimizers if isinstance(each, Optimizer)]
        return scaled(super().pre_backward(tensor, module), own)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if isinstance(optimizer, Optimizer):
            if not self._skipped:
                optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        if isinstance(optimizer, Optimizer):
            raise StateError("gradient_clip_algorithm='value': infinity clips by the norm")
        super().clip_grad_by_value(optimizer, clip_val)
