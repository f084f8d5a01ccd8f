"""Makes Trainers of transformers, TRL and others train models that were built under ``infinity.Init``.

[Note: what a Trainer keeps]
Its loop, data, losses, logs, evaluation and callbacks. The model is not wrapped; the optimizer that its
arguments describe is one of infinity's on the same parameter groups; what is saved is written unit by
unit.

[Note: a checkpoint of a Trainer]
``checkpoint-N`` has the model, as ``infinity.export`` or ``infinity.save_lora`` writes it; beside it the
Trainer's own state, generators and scheduler, and in ``training_state`` the exact weights and moments of what
is trained, for any number of ranks.

[Note: commits of a Trainer]
A run with a name and ``memory.nvme`` commits each step, with the state of the Trainer. ``train()`` goes on
from the last committed step where that is later than the checkpoint that it is given.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import new_class
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import check_target_module_exists
from transformers.training_args import OptimizerNames

from infinity.activations.recompute import patched
from infinity.api.export import export, save_lora
from infinity.api.init import ema, from_pretrained, is_served, no_sync, resume
from infinity.api.lora import add_lora
from infinity.api.optimizer import AdamW, Optimizer
from infinity.api.portable import load_checkpoint
from infinity.core.config import SettingError
from infinity.core.errors import StateError
from infinity.device.accelerator import generator_states, set_generator_states
from infinity.engine.runtime import runtime_of
from infinity.integrations.accelerate import STATE_FOLDER, Accelerator, replace_checkpoint
from infinity.optim.matrix import MATRIX
from infinity.optim.rule import Rule
from infinity.optim.rules import known_rule

#: Files of transformers in a checkpoint.
_STATE, _SCHEDULER, _ARGUMENTS = "trainer_state.json", "scheduler.pt", "training_args.bin"
#: What ``optim_args`` of APOLLO and GaLore say by words.
_MEANT: Mapping[str, Mapping[str, Any]] = {
    "proj=random": {}, "proj_type=std": {}, "scale_type=channel": {"per_tensor": False},
    "scale_type=tensor": {"per_tensor": True},
}  # fmt: skip
#: Arguments of torch's optimizers: those that change no number, and those that must be False.
_SPEED, _VARIANTS = {"fused", "foreach"}, {"amsgrad", "maximize"}
#: Packages whose classes of optimizers do what the rules of the same names do.
_PACKAGES = "infinity", "torch", "transformers", "bitsandbytes", "torchao"
#: Arguments in which a subclass gives parameter groups of its own.
_GROUPS = {"params", "optimizer_dict"}


def trainer(cls: Any) -> Any:
    """Return ``transformers.Trainer``, or a subclass, made to train models of ``infinity.Init``.

    Arguments mean what they mean to ``cls``::

        trainer = infinity.trainer(SFTTrainer)(model, args, train_dataset=...)
        trainer.train()

    Without ``optimizers`` it makes that of infinity which ``optim`` names, with ``learning_rate``,
    ``adam_*``, ``weight_decay``, ``optim_args`` and ``max_grad_norm`` of the arguments. Checkpoints hold the
    optimizer's state, exactly, and ``train(resume_from_checkpoint=...)`` goes on bitwise; a run with a name
    goes on from its last step. TRL's ``peft_config`` gives the model adapters, and a reference model that TRL
    would load is read where its checkpoint lies.

    Raises:
        TypeError: ``cls`` is no Trainer.
    """
    if not (isinstance(cls, type) and issubclass(cls, transformers.Trainer)):
        raise TypeError(f"infinity.trainer: wanted transformers.Trainer or a subclass; got {cls!r}")
    if issubclass(cls, StreamingTrainer):
        return cls
    described = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return new_class(cls.__name__, (StreamingTrainer, cls), exec_body=lambda space: space.update(described))


class Progress:
    """Commits with each step what a Trainer knows of it: its state, with callbacks, and its scheduler."""

    steps_after_optimizer = True

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.found: dict[str, Any] = {}  # in the commit that the run goes on from

    def state_dict(self) -> dict[str, Any]:
        owner = self._owner
        callbacks: dict[str, Any] = {}
        for each in [*owner.callback_handler.callbacks, owner.control]:
            if callable(getattr(each, "state", None)):
                callbacks.setdefault(type(each).__name__, []).append(each.state())
        one = {name: states[0] if len(states) == 1 else states for name, states in callbacks.items()}
        state = asdict(owner.state) | {"stateful_callbacks": one}
        return {"state": json.dumps(state), "scheduler": owner.lr_scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = dict(state)


class StreamingTrainer(transformers.Trainer):  # type: ignore[misc]
    """Overrides what a Trainer does with its model and its files; see :func:`trainer`."""

    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._progress: Progress | None = None  # which the optimizer follows
        self._commit: dict[str, Any] = {}  # what train() goes on from; empty: a checkpoint, or nothing
        with self._in_place_of_copies(kwargs.get("model", args[0] if args else None)):
            super().__init__(*args, **kwargs)
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ValueError(
                "load_best_model_at_end with save_only_model: the best weights come from the checkpoint's "
                "exact state; leave save_only_model out"
            )

    @contextmanager
    def _in_place_of_copies(self, model: Any) -> Iterator[None]:
        """Let TRL add adapters to a model that is served, and read a reference where its checkpoint lies."""
        with ExitStack() as stack:
            if hasattr(model, "peft_config") and is_served(model):
                stack.enter_context(patched(model, "add_adapter", _refuse_copies))
            for module in {sys.modules[each.__module__] for each in type(self).__mro__}:
                for name, own in (("get_peft_model", _adapted), ("create_model_from_path", _reference)):
                    if module.__name__ != __name__ and hasattr(module, name):
                        stack.enter_context(patched(module, name, partial(own, self, getattr(module, name))))
            yield

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        for name in ("deepspeed", "fsdp"):
            if getattr(args, name, None):
                raise ValueError(
                    f"{name}={getattr(args, name)!r}: infinity shards the model itself; leave it out"
                )
        if args.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True: a checkpoint is one directory, on a file system that every rank "
                "sees; leave it out"
            )
        if self.model is not None:  # else model_init makes it
            self._take_model(self.model)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.take_over()

    def _take_model(self, model: nn.Module) -> None:
        """Let the Trainer use one device for ``model``; raise a StateError if it cannot train it."""
        if not is_served(model):
            raise StateError(
                "infinity.trainer: wanted a model of infinity.Init or infinity.from_pretrained; got a "
                f"{type(model).__name__} made without them: build it there, or use the Trainer's own class"
            )
        args, device = self.args, runtime_of(model).ranks.device
        if device.type != args.device.type:
            raise StateError(
                f"the model computes on {device}, the Trainer on {args.device}: use_cpu="
                f"{device.type == 'cpu'} in its arguments, or Init(recipe, device={args.device.type!r})"
            )
        args._n_gpu = min(1, args.n_gpu)  # no DataParallel

    def call_model_init(self, trial: Any = None) -> Any:
        """Build the model, after the one before it, if any, has given back its memory and files."""
        if self.model is not None:
            runtime_of(self.model, ended=True).close(keep=True)
            self._progress = None
        model = super().call_model_init(trial)
        self._take_model(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if not is_served(model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is not None:
            return super().create_optimizer(model)
        given = self.optimizer_cls_and_kwargs
        with patched(self.args, "optim", OptimizerNames.ADAMW_TORCH):  # whose numbers are those of all
            kind, settings = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        groups = {name: value for name, value in settings.items() if name in _GROUPS}
        if wrong := sorted(name for name in _VARIANTS if settings.get(name)):
            raise ValueError(f"{wrong[0]} in the optimizer's arguments: no rule of infinity has it")
        numbers = {k: value for k, value in settings.items() if k not in _SPEED | _VARIANTS | _GROUPS}
        if given is None and kind is torch.optim.AdamW:
            rule = _rule_of(getattr(self.args.optim, "value", self.args.optim))
            numbers = {name: value for name, value in numbers.items() if name in rule.defaults}
            if "warmup_steps" in rule.defaults:
                numbers["warmup_steps"] = _warmup_steps(self.args)
            if "betas" not in rule.defaults:
                numbers.pop("eps", None)  # Adafactor's is another number
            numbers |= _numbers_of(rule, self.args.optim_args)
        else:
            module = kind.__module__
            rule = _rule_of(f"{module.rpartition('.')[0] or module}.{getattr(kind, '__name__', kind)}")
        self.optimizer_cls_and_kwargs = self._of_groups(rule, numbers), groups
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given  # the next model needs its own

    def _of_groups(self, rule: Rule, numbers: Mapping[str, Any]) -> Any:
        """Return what makes, of parameter groups, the optimizer of ``rule``."""
        model, clip, targets = self.model, self.args.max_grad_norm or None, self._targets()
        make: Any = AdamW if rule.name == "adamw" else partial(Optimizer, rule=rule)

        class OfGroups(torch.optim.Optimizer):  # the Trainer wants a class, and gives it groups only
            def __new__(cls, groups: Any) -> Any:
                if targets is not None and MATRIX in rule.defaults:
                    groups = [
                        {**group, "params": params, MATRIX: matrix}
                        for group in groups
                        for matrix in (True, False)
                        if (params := [each for each in group["params"] if (id(each) in targets) == matrix])
                    ]
                return make(model, params=groups, max_grad_norm=clip, **numbers)

        return OfGroups

    def _targets(self) -> set[int] | None:
        """Return which weights are those of ``optim_target_modules``; None: it names none."""
        wanted = self.args.optim_target_modules
        if wanted is None:
            return None
        every = isinstance(wanted, str) and wanted.replace("_", "-") == "all-linear"
        weights = dict(self.model.named_parameters(remove_duplicate=False))  # a module would fetch its own
        found = {
            id(weights.get(f"{name}.weight"))
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and (every or check_target_module_exists(wanted, name))
        }
        if not found:
            raise ValueError(f"optim_target_modules={wanted!r}: the model has no such linear layer")
        return found

    @property
    def _own(self) -> Optimizer:
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(found, Optimizer):
            raise StateError(
                f"the Trainer's optimizer is {type(found).__module__}.{type(found).__name__}: pass an "
                "infinity.AdamW or one of infinity.optim, or none"
            )
        return found

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Accumulate until the Trainer steps, also what an epoch of unknown length leaves over at its end."""
        with nullcontext() if self.accelerator.sync_gradients else no_sync(model):
            return super().training_step(model, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average of the weights where the optimizer keeps one, as a run does."""
        averages = self.optimizer is not None and self._own.rule.averages
        with ema(self.model) if averages else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_checkpoint(Path(self.args.output_dir))
            if resume_from_checkpoint is None and runtime_of(self.model).config.run_name is None:
                raise ValueError(
                    f"resume_from_checkpoint=True: no whole checkpoint in {self.args.output_dir}, and the "
                    "model's run has no name (run.name in its recipe)"
                )
        elif resume_from_checkpoint and not Path(resume_from_checkpoint, _STATE).is_file():
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r}: wanted a directory that a Trainer "
                f"wrote; there is no {_STATE} in it"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None,
        trial: Any = None, ignore_keys_for_eval: Any = None,
    ) -> Any:  # fmt: skip
        self.create_optimizer()
        if self._progress is not None:  # an exception may have ended the last train() within a step
            self._own.zero_grad()
        self._commit = self._last_commit()
        with tempfile.TemporaryDirectory() as folder:
            if self._commit:
                Path(folder, _STATE).write_text(self._commit["state"], encoding="utf-8")
                if _step_of(folder) < _step_of(resume_from_checkpoint):
                    self._commit = {}
            return super()._inner_training_loop(
                batch_size,
                args,
                folder if self._commit else resume_from_checkpoint,
                trial,
                ignore_keys_for_eval,
            )

    def _last_commit(self) -> dict[str, Any]:
        """Return what the run that the recipe names has committed last, whose states are back then."""
        if self._own.steps or self._progress is not None:
            return {}
        self._progress = Progress(self)
        self._own.follow(trainer=self._progress)
        if not resume(self.model, self._own):
            return {}
        return self._progress.found | {"generators": generator_states(self._own.runtime.ranks.device)}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._commit:
            scheduler = self._commit["scheduler"]
        else:
            folder = Path(checkpoint, STATE_FOLDER)
            if not folder.is_dir():
                raise StateError(
                    f"{checkpoint} has no {STATE_FOLDER}: it was written with save_only_model=True, or by "
                    "another Trainer, and holds no state to go on from. Load the model from it instead"
                )
            load_checkpoint(self.model, self._own, folder, trained_only=True)
            scheduler = torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        for group, lr in zip(self._own.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # which making the scheduler has changed

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._commit:
            set_generator_states(self._commit["generators"], self._own.runtime.ranks.device)
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint, STATE_FOLDER)
        load_checkpoint(self.model, self._own, best, trained_only=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        whole = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", _STATE)
        if self.args.should_save:
            whole.unlink(missing_ok=True)  # of a checkpoint that is replaced: it is not whole until its end
        runtime = self._own.runtime
        if runtime.values.within_step:
            runtime.say(f"{whole.parent.name}: what the epoch left over, less than a step, is dropped")
            self._own.zero_grad()
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        replace_checkpoint(self.model, self._own, Path(output_dir, STATE_FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        out = Path(output_dir if output_dir is not None else self.args.output_dir)
        collator = getattr(self.data_collator, "tokenizer", None)
        tokenizer = collator if self.processing_class is None else self.processing_class
        whole = out / ".saving"  # which is free; ``out`` may have other files of the Trainer
        if self.args.should_save:
            shutil.rmtree(whole, ignore_errors=True)
            out.mkdir(parents=True, exist_ok=True)
        if hasattr(self.model, "peft_config"):
            save_lora(self.model, whole)
        else:
            export(self.model, whole, tokenizer=tokenizer)
        if self.args.should_save:
            for each in whole.iterdir():
                if each.is_dir():
                    shutil.rmtree(out / each.name, ignore_errors=True)
                each.replace(out / each.name)
            whole.rmdir()
            if tokenizer is not None and hasattr(self.model, "peft_config"):
                tokenizer.save_pretrained(out)
            torch.save(self.args, out / _ARGUMENTS)


def _rule_of(name: str) -> Rule:
    """Return the rule of an optimizer that the Trainer, or torch, calls ``name``."""
    try:
        if "." in name and name.partition(".")[0] not in _PACKAGES:
            wanted = f"a class of {', '.join(_PACKAGES)}: the step of another would not be called"
            raise SettingError("optim.name", name, wanted)
        return known_rule(name)
    except SettingError as error:
        raise ValueError(
            f"optim={name!r}: wanted {error.wanted}; or optimizers=(infinity.optim.Lion(model, lr=...), None)"
        ) from error


def _warmup_steps(args: Any) -> int:
    """Return the steps in which the rate of a rule rises that has no schedule."""
    if 0 < args.warmup_steps < 1 and args.max_steps <= 0:
        raise ValueError(
            f"warmup_steps={args.warmup_steps} with optim='schedule_free_adamw', a share of "
            "steps whose number is not known yet: wanted a number of steps, or max_steps above 0"
        )
    return int(args.get_warmup_steps(args.max_steps))


def _numbers_of(rule: Rule, text: str | None) -> dict[str, Any]:
    """Return the numbers of a rule that ``optim_args`` has."""
    found: dict[str, Any] = {}
    for each in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = each.partition("=")
        try:
            found |= _MEANT[each] if each in _MEANT else {name: json.loads(value.lower())}
        except json.JSONDecodeError as error:
            raise ValueError(f"optim_args: wanted numbers, as in momentum=0.9; got {each!r}") from error
    rule.check_numbers({**rule.defaults, **rule.check_names(found)})
    if rule.name == "apollo" and "scale" in found:
        found["scale"] = math.sqrt(found["scale"])  # as the authors' code has it
    return found


def _step_of(checkpoint: Any) -> int:
    if checkpoint is None:
        return 0
    return int(json.loads(Path(checkpoint, _STATE).read_text(encoding="utf-8"))["global_step"])


def _last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint in ``folder`` that was written to its end; None: there is none."""
    found = [each for each in folder.glob("checkpoint-*") if (each / _STATE).is_file()]
    numbers = {int(number): each for each in found if (number := each.name.rpartition("-")[2]).isdecimal()}
    return str(numbers[max(numbers)]) if numbers else None


def _refuse_copies(name: str, *args: Any) -> None:
    raise StateError(
        f"the Trainer would copy the model's adapters as {name!r}, for a reference: give it peft_config=... "
        "in place of a model with adapters (their reference is the base), or a ref_model=..."
    )


def _adapted(owner: Any, own: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Give ``model`` adapters, in place of ``peft.get_peft_model``."""
    return add_lora(model, config) if is_served(model) else own(model, config, *args, **kwargs)


def _reference(owner: Any, own: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Return a frozen model that reads the checkpoint which the trained one came from."""
    if not is_served(getattr(owner, "model", None) or nn.Module()):
        return own(path, *args, **kwargs)
    if not Path(path).is_dir():
        raise StateError(
            f"a reference model is wanted, and the trained one came from no directory ({path!r}): load it "
            "with infinity.from_pretrained, or pass ref_model=..."
        )
    config = replace(runtime_of(owner.model).config, run_name=None, resume="auto")
    return from_pretrained(path, config, frozen=True, auto_class=type(owner.model))
