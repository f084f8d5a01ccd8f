"""``AdamW``: a ``torch.optim.Optimizer`` whose updates run beside training."""

import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler

from infinity.core.config import SettingError, Valid
from infinity.core.errors import StateError, library_errors
from infinity.core.process import uninterrupted
from infinity.core.transfer import TransferEngine
from infinity.device.accelerator import generator_states, set_generator_states
from infinity.engine.runtime import Runtime, runtime_of
from infinity.observe.metrics import Stalls, StepReport
from infinity.observe.timeline import Timeline
from infinity.optim.norm import LossScaler

#: Of buffers up to this size a first copy is kept (bytes).
_SMALL_NBYTES = 2**20


class Followed:
    """Random generators, buffers, and what an optimizer was asked to follow.

    Learning-rate schedulers are stepped after the optimizer, so their state is taken late: when the next
    forward pass begins.

    Args:
        model: Buffers of the model that are written while it trains (running means) belong to the state.
        device: The device on which the model computes.
        follow: By name.
    """

    def __init__(self, model: nn.Module, device: torch.device, follow: Mapping[str, Stateful]) -> None:
        self._model, self._device = model, device
        self._now: dict[str, Stateful] = {}
        self._late: dict[str, Stateful] = {}
        self._unwritten = {name: _Buffer(each) for name, each in self._buffers().items()}
        self.add(follow)

    def add(self, follow: Mapping[str, Stateful]) -> None:
        """Follow more objects.

        Raises:
            StateError: A name is taken.
            TypeError: An object has no state.
        """
        for name, each in follow.items():
            if not isinstance(each, Stateful):
                raise TypeError(
                    f"follow[{name!r}]: wanted an object with state_dict() and load_state_dict(); got "
                    f"{type(each).__name__}"
                )
            if name in self._now or name in self._late:
                raise StateError(f"follow[{name!r}] is followed already: give this object another name")
            (self._late if _is_scheduler(each) else self._now)[name] = each

    @property
    def is_late(self) -> bool:
        """Return whether something is stepped after the optimizer."""
        return bool(self._late)

    def state(self) -> dict[str, Any]:
        """Return what belongs to the step, without the schedulers."""
        written = {}
        for name, each in self._buffers().items():
            if name not in self._unwritten or self._unwritten[name].written(each):
                self._unwritten.pop(name, None)
                written[name] = each.detach().to("cpu", copy=True)
        follow = {name: each.state_dict() for name, each in self._now.items()}
        return {"generators": generator_states(self._device), "buffers": written, "follow": follow}

    def late_state(self) -> dict[str, Any]:
        """Return the states of the schedulers."""
        return {"late": {name: each.state_dict() for name, each in self._late.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` and :meth:`late_state` returned.

        Raises:
            StateError: Something else was followed, or a buffer has another shape.
        """
        saved, followed = {**state["follow"], **state.get("late", {})}, {**self._now, **self._late}
        if saved.keys() != followed.keys():
            raise StateError(
                f"the interrupted run committed the states of {_names(saved)}; this one follows "
                f"{_names(followed)}: give AdamW the same names in follow={{...}}"
            )
        for name, each in followed.items():
            with library_errors(StateError, f"the committed state of follow[{name!r}] cannot be loaded"):
                each.load_state_dict(saved[name])
        buffers = self._buffers()
        for name, values in state["buffers"].items():
            if name not in buffers or buffers[name].shape != values.shape:
                raise StateError(
                    f"the interrupted run has a buffer {name} of shape {tuple(values.shape)}, "
                    "which this model has not: build it as before"
                )
            buffers[name].copy_(values)
        set_generator_states(state["generators"], self._device)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._model.named_buffers())


class _Buffer:
    """A buffer as it was first.

    Batch norm writes its running means without torch counting it, so small buffers are compared, too.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._mark = id(buffer), buffer._version
        self._copy = buffer.detach().clone() if buffer.nbytes <= _SMALL_NBYTES else None

    def written(self, buffer: Tensor) -> bool:
        if self._mark != (id(buffer), buffer._version):
            return True
        return self._copy is not None and not torch.equal(buffer, self._copy)


def _is_scheduler(each: Stateful) -> bool:
    """Return whether it is a scheduler of learning rates, or Accelerate's wrapper of one."""
    wrapped = getattr(each, "scheduler", each) if hasattr(each, "step_with_optimizer") else each
    return isinstance(wrapped, LRScheduler)


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class AdamW(torch.optim.Optimizer):
    """AdamW on the exact fp32 weights of a model that was built under ``infinity.Init``.

    ``param_groups``, learning-rate schedulers and ``zero_grad`` behave as with any torch optimizer, and a
    parameter that no rank used in a step is left alone: its weight, its moments and its step count.
    Unless ``params`` says otherwise, matrices decay and vectors (biases, norms) do not.

    Args:
        model: Built under ``infinity.Init``, whole or wrapped.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Clip the global norm of the gradients to this value, above 0; None: do not clip, so
            that gradients need not wait until ``step()``, in memory or on NVMe.
        params: Parameter groups as torch takes them, in place of the default two.
        follow: Objects whose state belongs to the run, by names of your choice: anything with ``state_dict``
            and ``load_state_dict`` (a scheduler, a torchdata loader). With a named run (``run.name``) and
            directories in ``memory.nvme`` it is committed with each step, as the learning rates, buffers and
            random generators are, and :func:`infinity.resume` restores it.

    Raises:
        StateError: The model, or a trainable parameter of it, was made outside ``infinity.Init``.
        TypeError: ``model`` is not a module (``model.parameters()``, say).
        ValueError: A number is out of range; names it, and what is accepted.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.01, *, max_grad_norm: float | None = None,
        params: Iterable[dict[str, Any]] | None = None, follow: Mapping[str, Stateful] | None = None,
    ) -> None:  # fmt: skip
        self.runtime: Runtime = runtime_of(model)
        if max_grad_norm not in (None, math.inf) and not _is_number(max_grad_norm, Valid(above=0)):
            raise SettingError("max_grad_norm", max_grad_norm, "a number > 0, or None: never clip")
        self.max_grad_norm = max_grad_norm
        self.model = model
        self._made_groups = False
        self._check_parameters()
        groups = list(params) if params is not None else _default_groups(model, weight_decay)
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made_groups = params is None  # else the caller's, who may leave parameters out
        with uninterrupted:
            self.runtime.tiers.settle(self.runtime.units, movable=not self.runtime.started)
            if self.runtime.started:
                self.runtime.values.clear_optimizer_fields()
            self._connect()
        self._followed = Followed(model, self.runtime.ranks.device, follow or {})
        self.scaler = LossScaler(self.runtime.config.loss_scale) if self._fp16 else None
        self._scaled = False
        #: Global norm of the last step's gradients before clipping; None before the first step.
        self.grad_norm: float | None = None
        #: Whether the last step was skipped, because a gradient was not finite.
        self.skipped = False
        self.steps = 0
        self._report_mark = self._mark()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as in torch, after its numbers and parameters were checked."""
        super().add_param_group(param_group)
        try:
            _check_numbers(self.param_groups[-1])
            for param in self.param_groups[-1]["params"]:
                if param.requires_grad and not self.runtime.units.places(param):
                    raise StateError(
                        f"a parameter of shape {tuple(param.shape)} in a parameter group is not one of this "
                        "model's that were made under infinity.Init, so no tier holds it"
                    )
        except BaseException:
            del self.param_groups[-1]
            raise

    def _connect(self) -> None:
        executor = self.runtime.executor(clips=self.max_grad_norm is not None)
        executor.updates.hypers.groups = self.param_groups
        executor.place_gradients()

    # --- the loop ----------------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale in fp16 training, and ``loss`` itself in other dtypes."""
        if self.scaler is None:
            return loss
        self._scaled = True
        self.runtime.executor().updates.hypers.loss_scale = self.scaler.scale
        return loss * self.scaler.scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit this step: every rank must call.

        A gradient that is not finite, on any rank, skips the step on every rank: weights and state stay
        as they are, ``skipped`` is True and ``grad_norm`` says inf or nan.

        Raises:
            DiskError: A transfer of this step failed; the committed step is unharmed.
        """
        if self.runtime.executor().updates.hypers.groups is not self.param_groups:
            raise StateError(
                "another infinity.AdamW was made for this model after this one: a model has one. For other "
                "hyperparameters of some parameters give it parameter groups, params=[...]"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with uninterrupted:
            norm = self._reduce()
            if norm is not None:
                self._commit(norm)
        return loss

    def _reduce(self) -> float | None:
        synced = self.runtime.executor().gradients.completions.synced
        if self.scaler is not None and not self._scaled and synced:
            raise StateError("fp16 needs its loss scaled: write optimizer.scale(loss).backward()")
        if synced:
            self._check_parameters()
            self.runtime.tiers.settle(self.runtime.units)
        self.runtime.values.end_load()
        return self.runtime.executor().reduce()

    def _commit(self, norm: float) -> None:
        self.runtime.executor().commit(norm, self.max_grad_norm)
        self.grad_norm = norm
        self.skipped = norm in (float("inf"), float("-inf")) or norm != norm
        self.steps += not self.skipped
        if self.scaler is not None:
            self.scaler.update(self.skipped)
        self._scaled = False
        if self.runtime.records.unrecorded:
            self.runtime.records.record(*self._small_state())

    def follow(self, **more: Stateful) -> None:
        """Follow more objects, such as schedulers, which need the optimizer first; before the first step.

        Raises:
            StateError: A name is taken, or a step was made.
        """
        if self.steps:
            raise StateError("AdamW.follow after the first step: what it committed lacks the new objects")
        self._followed.add(more)

    def _small_state(self) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
        """The small state, and what gives its rest when schedulers have set the next learning rates."""
        state = {**self._followed.state(), "steps": self.steps}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        late = self._late_state if self._followed.is_late else None
        return {**state, **self._groups()} if late is None else state, late

    def _late_state(self) -> dict[str, Any]:
        return {**self._followed.late_state(), **self._groups()}

    def _groups(self) -> dict[str, Any]:
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ]
        }

    def load_committed(self, state: dict[str, Any]) -> None:
        """Put back the small state of a commit, for :func:`infinity.resume`.

        Raises:
            StateError: This optimizer has other parameter groups, or follows something else.
        """
        if len(state["param_groups"]) != len(self.param_groups):
            raise StateError(
                f"the interrupted run has {len(state['param_groups'])} parameter groups, this optimizer "
                f"{len(self.param_groups)}: make it as before"
            )
        self._followed.load(state)
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        self.steps = state["steps"]
        if self.scaler is not None and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this step, and the updates that they started."""
        self.runtime.forget_step()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def _mark(self) -> "_Mark":
        return _Mark(self.runtime.stalls, self.runtime.storage.engine)

    def report(self, *, loss: float | None = None, tokens: int = 0) -> StepReport:
        """Return the figures of everything since the last report; call it once after every step."""
        before, now = self._report_mark, self._mark()
        self._report_mark = now
        runtime, executor = self.runtime, self.runtime.executor()
        figures, speculation = executor.figures, executor.updates.speculation
        planned = figures.planned
        return StepReport(
            step=self.steps, loss=loss, lr=float(self.param_groups[0]["lr"]), grad_norm=self.grad_norm,
            skipped=self.skipped, step_s=now.time_s - before.time_s, tokens=tokens,
            stall_s={cause: s - before.stalls.get(cause, 0.0) for cause, s in now.stalls.items()},
            nbytes_read=now.read - before.read, nbytes_written=now.written - before.written,
            planned_nbytes_read=planned[0] if planned else None,
            planned_nbytes_written=planned[1] if planned else None,
            on_demand=figures.on_demand, speculated=speculation.started,
            rolled_back=speculation.rolled_back,
            spilled_nbytes=executor.updates.stored_gradients.nbytes, tiles=len(executor.prefetcher.routed),
            tiles_used=figures.tiles_used, peak_nbytes=runtime.peak_nbytes(),
        )  # fmt: skip

    @property
    def budgets(self) -> dict[str, int | None]:
        """The bytes that each tier may take; None where the disk is the only limit."""
        return self.runtime.budgets()

    @property
    def timeline(self) -> Timeline:
        """Spans of compute and transfers; empty unless the recipe says ``observe.timeline``."""
        return self.runtime.stalls.timeline

    def synchronize(self) -> None:
        """Block until every update that was started has landed on its tier."""
        self.runtime.synchronize()

    def close(self) -> None:
        """Wait for updates in flight, then give back files, memory and threads."""
        self.runtime.close()

    # --- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return moments, exact weights and step counts of every parameter, gathered on the CPU of rank 0.

        The layout is torch's: ``state[i]`` belongs to the i-th parameter of ``param_groups``. Every rank
        must call; ranks other than 0 get empty ``state``.
        """
        packed = super().state_dict()
        order = [id(p) for group in self.param_groups for p in group["params"]]
        fields = self.runtime.values.optimizer_fields()
        packed["state"] = {i: fields[key] for i, key in enumerate(order) if key in fields}
        if self.scaler is not None:
            packed["loss_scaler"] = self.scaler.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; every rank must call with the full state.

        The state of ``torch.optim.AdamW`` with the same parameter groups is accepted, too. It has no exact
        weights, so these stay as they are.
        """
        self.runtime.values.check_step_over()
        params = [p for group in self.param_groups for p in group["params"]]
        state = dict(state_dict["state"])
        _check_groups(state_dict["param_groups"], self.param_groups)
        _, *moments = self.runtime.tiers.layout.full_names
        missing = [i for i, p in enumerate(params) if p.requires_grad and i not in state]
        if state and not any("master" in each for each in state.values()):
            for i in missing:  # torch's AdamW begins a state with the first gradient
                zeros = torch.zeros(params[i].shape, device="cpu")
                state[i] = {"step": 0, **dict.fromkeys(moments, zeros)}
        elif missing:
            raise StateError(
                f"optimizer state has no entry for {len(missing)} of {len(params)} parameters "
                f"(first: {missing[0]}); every rank must load the dictionary that rank 0 saved"
            )
        for i, param in enumerate(params):
            if i in state:
                _check_state(i, param, state[i], moments)
        with uninterrupted:
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
            self._connect()
            fields = {id(p): state[i] for i, p in enumerate(params) if i in state}
            self.runtime.values.load_optimizer_fields(fields)
            if self.scaler is not None and "loss_scaler" in state_dict:
                self.scaler.load_state_dict(state_dict["loss_scaler"])
            self._go_on_from(max((int(each["step"]) for each in fields.values()), default=0))

    def restart(self, numbers: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Go on after ``steps`` steps, with hyperparameters of each group; the state is in place."""
        for group, found in zip(self.param_groups, numbers, strict=True):
            _check_numbers({**group, **found})
        for group, found in zip(self.param_groups, numbers, strict=True):
            group.update(found)
        self._go_on_from(steps)

    def _go_on_from(self, steps: int) -> None:
        records = self.runtime.records
        self.steps = records.steps = steps
        records.reload(*self._small_state())

    # --- checks ------------------------------------------------------------------------------

    @property
    def _fp16(self) -> bool:
        return self.runtime.dtype is torch.float16

    def _check_parameters(self) -> None:
        """Every trainable parameter is in a unit and, where the groups are the default ones, in a group."""
        groups = self.param_groups if self._made_groups else []
        grouped = {id(p) for group in groups for p in group["params"]}
        for param in _parameters_of(self.model):
            places = self.runtime.units.places(param)
            for unit, segment in places:
                unit.check_data(segment)
            if param.requires_grad and not places:
                named = {id(each): name for name, each in self.model.named_parameters()}
                name = named.get(id(param), f"a parameter of shape {tuple(param.shape)}")
                raise StateError(
                    f"{name} was made outside infinity.Init, so no tier holds it. Add or replace modules "
                    "inside `with infinity.Init(recipe)` or, of a finished model, `with "
                    "infinity.Init(model)`; or freeze it with requires_grad_(False)"
                )
            if param.requires_grad and self._made_groups and id(param) not in grouped:
                raise StateError(
                    f"{places[0][1].whole_name} is trained, but was frozen when the optimizer was made: it "
                    "is in no parameter group and would not change: call optimizer.add_param_group where "
                    "you unfreeze it, or make the optimizer with params=[...], which have all that will be "
                    "trained; optimizer.zero_grad() discards this step"
                )


def _parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield those of all modules as they are, without names and without a check of each."""
    modules, seen = [model], {model}
    while modules:
        module = modules.pop()
        yield from (param for param in dict.values(module._parameters) if param is not None)
        found = [each for each in module._modules.values() if each is not None and each not in seen]
        modules += found
        seen.update(found)


class _Mark:
    """Running totals at one moment."""

    def __init__(self, stalls: Stalls, engine: TransferEngine | None) -> None:
        self.time_s = time.perf_counter()
        self.stalls = dict(stalls.seconds)
        self.read = engine.nbytes_read if engine else 0
        self.written = engine.nbytes_written if engine else 0


#: Valid numbers of a parameter group, as torch has them.
_NUMBERS = dict.fromkeys(("lr", "eps", "weight_decay"), Valid(least=0, below=math.inf))
_BETA = Valid(least=0, below=1)


def _is_number(value: Any, valid: Valid) -> bool:
    """Return whether ``value`` is a number in a range (no bool, no text), or a tensor of one such element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return type(value) is not bool and isinstance(value, numbers.Real) and valid.accepts(value)


def _check_groups(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Raise unless the parameter groups of a saved dictionary are AdamW's, and like an optimizer's own."""
    theirs, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if theirs != ours:
        raise StateError(
            f"the state has parameter groups of {theirs} parameters, this optimizer of {ours} (matrices, "
            "which decay, and vectors); for the state of torch.optim.AdamW(model.parameters()) make it "
            'with params=[{"params": list(model.parameters())}]'
        )
    for group in saved:
        if lacking := {"lr", "betas", "eps", "weight_decay"} - group.keys():
            raise StateError(
                f"the state is not AdamW's: its parameter groups have no {', '.join(sorted(lacking))}"
            )
        _check_numbers(group)


def _check_numbers(group: dict[str, Any]) -> None:
    """Raise if a parameter group has impossible hyperparameters, or those of another rule."""
    for name, valid in _NUMBERS.items():
        if not _is_number(group[name], valid):
            raise SettingError(name, group[name], f"a number {valid}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or [_is_number(b, _BETA) for b in betas] != [True, True]:
        raise SettingError("betas", betas, f"two numbers {_BETA}")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise SettingError(name, group[name], "False: infinity.AdamW is plain AdamW")
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise SettingError(
            "decoupled_weight_decay", False, "True, as in torch.optim.AdamW, or no weight_decay"
        )


def _check_state(i: int, param: nn.Parameter, state: dict[str, Any], moments: Sequence[str]) -> None:
    """Raise unless ``state`` is AdamW's state of ``param``, the i-th of the optimizer."""
    for name in moments:
        shape = tuple(state[name].shape) if name in state else None
        if shape != tuple(param.shape):
            got = "is missing" if shape is None else f"has shape {shape}"
            raise StateError(
                f"optimizer state of parameter {i}: {name} {got}; wanted {tuple(param.shape)}, from AdamW on "
                "the same parameters in the same order"
            )


def _default_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
