"""Provides ``torch.optim.Optimizer``s whose updates run beside training: ``AdamW``, and one of each rule."""

import fnmatch
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler

from infinity.api.lora import adapters_of, parameters_by_adapter
from infinity.core.config import SettingError, Valid
from infinity.core.errors import StateError, library_errors
from infinity.core.process import uninterrupted
from infinity.device.accelerator import generator_states, set_generator_states
from infinity.engine.executor import StepExecutor
from infinity.engine.runtime import runtime_of
from infinity.observe.metrics import StepReport
from infinity.observe.timeline import Timeline
from infinity.optim.dictionaries import NAMES, RULE, Parameter, fitted
from infinity.optim.rule import EMA, Rule, is_number
from infinity.optim.rules import LossScaler, find_rule
from infinity.partition.unit import Segment
from infinity.shards.pipeline import check_group

#: Largest buffer of which a first copy is kept (bytes).
_SMALL_NBYTES = 2**20


def _is_late(each: Stateful) -> bool:
    """Return whether ``each`` changes after the optimizer's step, so that its state is taken later."""
    wrapped = getattr(each, "scheduler", each) if hasattr(each, "step_with_optimizer") else each
    return isinstance(wrapped, LRScheduler) or getattr(each, "steps_after_optimizer", False) is True


class Optimizer(torch.optim.Optimizer):
    """An update rule on the exact fp32 weights of a model that was built under ``infinity.Init``.

    ``param_groups``, learning-rate schedulers and ``zero_grad`` behave as with any torch optimizer, and a
    parameter that no rank used in a step is left alone: its weight, its moments and its step count.

    Args:
        model: Built under ``infinity.Init``, whole or wrapped.
        rule: Its name (``lion``), or an object of a subclass of :class:`infinity.optim.Rule`. Before the
            first step of the model it may be another than ``optim.name`` of the recipe.
        numbers: Of the rule, such as ``lr``; vectors (biases, norms) do not decay.
        ema: Keep an exponential moving average of the weights with this decay, such as 0.999, for
            ``infinity.export(model, out, ema=True)``: as torch's ``AveragedModel`` after each step.
        groups: By patterns of names, with ``|`` between several (``"*.bias|*norm*"``), numbers of the
            parameters whose names match; of several patterns that match, the last one counts.
        max_grad_norm: Clip the global norm of the gradients to this value, above 0; None: do not clip, so
            that gradients need not wait until ``step()``, in memory or on NVMe. Of several adapters it may be
            a map from names to values.
        params: Parameter groups as torch takes them, in place of one for matrices and one for vectors (of
            each adapter, where the model has several). Groups with the same value of a key ``adapter`` are
            clipped by their own norm, and skipped by themselves.
        follow: Objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a torchdata loader), by
            names of your choice. In a named run with ``memory.nvme`` their states are committed with each
            step, as learning rates, buffers and generators are, and :func:`infinity.resume` restores them.
            The state of a scheduler, or of an object whose attribute ``steps_after_optimizer`` is True, is
            taken when the next forward pass begins.

    Raises:
        StateError: The model, or a trainable parameter of it, was made outside ``infinity.Init``.
        ValueError: A number is out of range, or not the rule's; names it, and what is accepted.
    """

    def __init__(
        self, model: nn.Module, rule: str | Rule, *,
        max_grad_norm: float | Mapping[str, float | None] | None = None,
        params: Iterable[dict[str, Any]] | None = None, ema: float | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None, follow: Mapping[str, Stateful] | None = None,
        **numbers: Any,
    ) -> None:  # fmt: skip
        self.runtime, chosen = runtime_of(model), find_rule(rule).sized(numbers)
        if ema is not None:
            chosen, numbers[EMA] = chosen if EMA in chosen.defaults else chosen.averaged, ema
        chosen = chosen.with_master(self.runtime.storage.rule.master)  # weights are kept so already
        self.max_grad_norm, self.model, self._made_groups = max_grad_norm, model, False
        self._check_parameters()
        made_groups = params is None  # else the caller, who may leave parameters out
        defaults = {**chosen.defaults, **chosen.check_names(numbers)}
        if params is None:
            params = _groups(model, chosen, defaults, groups or {})
        elif groups:
            raise SettingError("groups", groups, "parameter groups either as params or by patterns")
        with uninterrupted:
            movable = self.runtime.at_rest()
            self.runtime.use_rule(chosen)
        super().__init__(params, defaults)
        self._check_limits()
        self._made_groups = made_groups
        fp16 = self.runtime.dtype is torch.float16
        if fp16 and len(self._parties) > 1:
            raise StateError(
                "several adapters in fp16, where each would need a loss scale: set train.dtype=bf16 or fp32"
            )
        self.scaler = LossScaler(self.runtime.config.loss_scale) if fp16 else None
        with uninterrupted:
            planned = self.runtime.activations.policy in ("plan", "offload")
            self.runtime.tiers.settle(self.runtime.units, movable=movable, planned=planned)
            if not movable:
                self.runtime.values.clear_optimizer_fields()
            self._connect()
        #: Identity and version of buffers, with a copy if small: batch norm writes its means uncounted.
        self._unwritten = {
            name: (id(each), each._version, each.detach().clone() if each.nbytes <= _SMALL_NBYTES else None)
            for name, each in model.named_buffers()
        }
        self._norms: dict[Any, float] = {}  # of the last step, by the key ``adapter`` of groups
        #: Norms of gradients that clip_grad_norm_ has completed, and what they are clipped to.
        self._clipped: tuple[dict[Any, float], dict[Any, float]] | None = None
        self.steps = self.skips = 0  # calls of step() that updated, and that did not
        self._followed: dict[str, Stateful] = {}
        self.follow(**(follow or {}))
        self._reported = self._totals()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as in torch, and check its numbers and parameters."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            check_group(self.rule, group, self._places)
            for param in group["params"]:
                if param.requires_grad and not self._places(param):
                    raise StateError(
                        f"a parameter of shape {tuple(param.shape)} in a parameter group is not one of this "
                        "model's that were made under infinity.Init, so no tier holds it"
                    )
            if hasattr(self, "steps"):  # else the first groups are being added
                self._hold_sums()
        except BaseException:
            del self.param_groups[-1]
            raise

    @property
    def rule(self) -> Rule:
        """Return the rule by which the model is updated."""
        return self.runtime.storage.rule

    @property
    def _parties(self) -> set[Any]:
        """Return the values of the groups' key ``adapter``; None: they have none."""
        return {group.get("adapter") for group in self.param_groups}

    @property
    def _limits(self) -> Mapping[Any, float | None]:
        """Return what the norm of each party is clipped to."""
        limit = self.max_grad_norm
        return limit if isinstance(limit, Mapping) else dict.fromkeys(self._parties, limit)

    def _check_limits(self) -> None:
        for limit in self._limits.values():
            if limit not in (None, math.inf) and not is_number(limit, Valid(above=0)):
                raise SettingError("max_grad_norm", limit, "a number > 0, or None: never clip")
        if self._limits.keys() != self._parties:
            names = ", ".join(sorted(map(str, self._parties)))
            raise SettingError("max_grad_norm", self.max_grad_norm, f"a value for each adapter: {names}")

    def _connect(self) -> None:
        executor = self._hold_sums()
        executor.updates.hypers.groups, executor.updates.hypers.scaler = self.param_groups, self.scaler
        executor.updates.hypers.look()
        executor.updates.stored_gradients.place(executor.budget.spilled, executor.updates.ready)

    def _hold_sums(self) -> StepExecutor:
        executor = self.runtime.executor(clips=any(limit is not None for limit in self._limits.values()))
        executor.updates.hypers.sums.hold(self.param_groups, self.runtime.storage.host_pool)
        return executor

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(
            "copy.deepcopy of an optimizer, whose states are in the tiers of one model: keep state_dict(), "
            "and give it to load_state_dict() of another model's optimizer"
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale in fp16 training, and ``loss`` itself in other dtypes."""
        if self.scaler is None:
            return loss
        self.scaler.scaled = True
        return loss * self.scaler.scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit this step: every rank must call. SettingError: a number of a group is wrong.

        A gradient that is not finite, on any rank, skips the step on every rank: weights and state stay as
        they are, ``skipped`` is True and ``grad_norm`` says inf or nan. DiskError: a transfer of this step
        failed; the committed step is unharmed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with uninterrupted:
            executor = self.runtime.executor()
            for group in self.param_groups:  # numbers may have been set since
                executor.updates.hypers.check(group)
            norms, limits = self._clipped or (self._complete_gradients(), self._limits)
            self._clipped = None
            if norms is not None:
                executor.commit(norms, limits)
                self._norms = norms
                self.steps += not self.skipped
                self.skips += self.skipped
                if self.scaler is not None:
                    self.scaler.update(self.skipped)
                self.runtime.records.record(self._small_state)
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Complete this step's gradients, and let ``step()`` clip them to ``max_norm``, as torch's function.

        ``max_norm`` takes the place of ``max_grad_norm`` in this step; each of several adapters is clipped by
        its own norm. Of several calls the least norm counts. Every rank must call, after the last backward
        pass of the step.

        Returns:
            ``()``, their global norm over all ranks before this clipping, without the loss scale.

        Raises:
            StateError: No gradients wait for ``step()``; or ``max_norm`` is finite, and the optimizer has no
                ``max_grad_norm``, so that updates did not wait for the norm.
            ValueError: ``max_norm`` is no number above 0.
        """
        if not is_number(max_norm, Valid(above=0)) and max_norm != math.inf:
            raise SettingError("max_norm", max_norm, "a number > 0, or inf: only return the norm")
        if None in self._limits.values() and max_norm != math.inf:
            raise StateError(
                f"clip_grad_norm_({max_norm:g}): this optimizer was made without max_grad_norm, so "
                f"updates began before the norm was known: make it with max_grad_norm={max_norm:g}"
            )
        with uninterrupted:
            norms, before = self._clipped or (self._complete_gradients(), {})
            if norms is None:
                raise StateError(
                    "clip_grad_norm_ before the last backward pass of a step: call it right before step()"
                )
            so_far = {party: min(norm, before.get(party, math.inf)) for party, norm in norms.items()}
            self._clipped = norms, {party: min(max_norm, before.get(party, math.inf)) for party in norms}
        return torch.tensor(math.hypot(*so_far.values()), device="cpu")

    def _complete_gradients(self) -> dict[Any, float] | None:
        """Return the norms of this step's gradients when all have come; None: there are none."""
        executor = self.runtime.executor()
        if executor.updates.hypers.groups is not self.param_groups:
            raise StateError(
                "another optimizer was made for this model after this one: a model has one. For other "
                "hyperparameters of some parameters give it parameter groups, params=[...]"
            )
        synced = executor.gradients.completions.synced
        if synced or self.runtime.ranks.world_size > 1:  # others may have gradients
            has_loss = synced and self.runtime.units.parts.has_loss
            if self.scaler is not None and has_loss and not self.scaler.scaled:
                raise StateError(
                    "fp16 needs its loss scaled: write optimizer.scale(loss).backward(), or set train.dtype"
                )
            self._check_parameters()
            self.runtime.tiers.settle(self.runtime.units)
        self.runtime.values.end_load()
        return executor.reduce()

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped, because a gradient was not finite."""
        return bool(self._norms) and not any(map(math.isfinite, self._norms.values()))

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first step."""
        return math.hypot(*self._norms.values()) if self._norms else None

    @property
    def grad_norms(self) -> dict[str, float]:
        """That of each of several adapters; one that is inf or nan skipped its adapter's step."""
        return {name: norm for name, norm in self._norms.items() if name is not None}

    def follow(self, **more: Stateful) -> None:
        """Follow more objects, such as schedulers, which need the optimizer first; before the first step."""
        if self.steps:
            raise StateError("follow after the first step: what it committed lacks the new objects")
        for name, each in more.items():
            if not isinstance(each, Stateful):
                raise TypeError(
                    f"follow[{name!r}]: wanted an object with state_dict() and load_state_dict(); got "
                    f"{type(each).__name__}"
                )
            if name in self._followed:
                raise StateError(f"follow[{name!r}] is followed already: give this object another name")
            self._followed[name] = each

    def _small_state(self) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
        """Return the small state of a step, and a function that returns the rest in the next forward.

        By then learning-rate schedulers have stepped; without any there is no rest.
        """
        late = {name: each for name, each in self._followed.items() if _is_late(each)}
        follow = {name: each.state_dict() for name, each in self._followed.items() if name not in late}
        generators = generator_states(self.runtime.ranks.device)
        state: dict[str, Any] = {"generators": generators, "buffers": self._written_buffers()}
        state["adapters"] = dict(adapters_of(self.model).generators)
        state |= {"follow": follow, "steps": self.steps, "skips": self.skips, "rule": self.rule.name}
        sums, params = self.runtime.executor().updates.hypers.sums, self._params()
        state["kept"] = {self._name_of(p): [*sums.was[id(p)][0]] for p in params if id(p) in sums.was}
        state["sums"] = {self._name_of(p): sums.own(p) for p in params if sums.owners.get(id(p))}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()

        def rest() -> dict[str, Any]:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
            return {"late": {name: each.state_dict() for name, each in late.items()}, "param_groups": groups}

        return (state, rest) if late else (state | rest(), None)

    @property
    def sums(self) -> dict[int, dict[str, Tensor]]:
        """Copies of what the rule keeps of matrices rather than of elements, by index of the parameter.

        On several ranks every one must call, and rank 0 gets the values.
        """
        sums = self._hold_sums().updates.hypers.sums
        return {i: sums.whole(p) for i, p in enumerate(self._params()) if sums.owners.get(id(p))}

    def load_sums(self, found: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace :attr:`sums`, given by ``id`` of the parameter; others begin at zero."""
        sums = self._hold_sums().updates.hypers.sums
        sums.load({key: [(range(len(sums.owners.get(key, ()))), each)] for key, each in found.items()})

    def _written_buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers that were written since the optimizer was made."""
        written = {}
        for name, each in self.model.named_buffers():
            address, version, copy = self._unwritten.get(name, (0, 0, None))
            same = (address, version) == (id(each), each._version)
            if not same or (copy is not None and not torch.equal(each, copy)):
                self._unwritten.pop(name, None)
                written[name] = each.detach().to("cpu", copy=True)
        return written

    def load_committed(self, state: dict[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> None:
        """Restore the small state of a commit, for :func:`infinity.resume`; ``others`` have sums, too."""
        groups, followed = state["param_groups"], {**state["follow"], **state["late"]}
        if state.get("rule", self.rule.name) != self.rule.name:  # which has numbers of its own
            state, others = {**state, "sums": {}}, ()
            groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
            for name, each in self._followed.items():
                if _is_late(each) and name in followed:  # its lists are of these parameter groups
                    own = getattr(each, "scheduler", each).state_dict().items()
                    followed[name] = followed[name] | {k: v for k, v in own if isinstance(v, list)}
        if len(groups) != len(self.param_groups):
            raise StateError(
                f"the interrupted run has {len(groups)} parameter groups, this optimizer "
                f"{len(self.param_groups)}: make it as before"
            )
        self._check_loaded(groups)
        if followed.keys() != self._followed.keys():
            names = [", ".join(sorted(each)) or "nothing" for each in (followed, self._followed)]
            raise StateError(
                f"the interrupted run committed the states of {names[0]}; this one follows {names[1]}: give "
                "AdamW the same names in follow={...}"
            )
        for name, each in self._followed.items():
            with library_errors(StateError, f"the committed state of follow[{name!r}] cannot be loaded"):
                each.load_state_dict(followed[name])
        buffers = dict(self.model.named_buffers())
        for name, values in state["buffers"].items():
            if name not in buffers or buffers[name].shape != values.shape:
                raise StateError(
                    f"the interrupted run has a buffer {name} of shape {tuple(values.shape)}, "
                    "which this model has not: build it as before"
                )
            buffers[name].copy_(values)
        set_generator_states(state["generators"], self.runtime.ranks.device)
        adapters_of(self.model).generators |= state.get("adapters", {})  # older versions did not write them
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)
        ids = {self._name_of(param): id(param) for param in self._params()}
        parts = dict[int | None, list[Any]]()
        for name, part in (each for of in (state, *others) for each in of["sums"].items()):
            parts.setdefault(ids.get(name), []).append(part)
        self._hold_sums().updates.hypers.sums.load(parts)
        self.steps, self.skips = state["steps"], state.get("skips", 0)
        if self.scaler is not None and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this step, and the updates that they started."""
        self.runtime.forget_step()
        self._clipped = None
        for param in self._params():
            param.grad = None

    def _totals(self) -> tuple[float, dict[str, float], int, int, int, int]:
        engine, collectives = self.runtime.storage.engine, self.runtime.ranks.collectives
        read, written = (engine.nbytes_read, engine.nbytes_written) if engine else (0, 0)
        crossed = collectives.nodes.nbytes_crossed if collectives else 0
        commits = self.runtime.storage.commits
        copied = commits.copies.nbytes if commits and commits.copies else 0
        return time.perf_counter(), dict(self.runtime.timeline.stall_s), read, written, crossed, copied

    def report(self, *, loss: float | None = None, tokens: int = 0) -> StepReport:
        """Return the figures of everything since the last report; call it once after every step."""
        began_s, stalled, read_before, written_before, crossed_before, copied_before = self._reported
        self._reported = now_s, stalls, read, written, crossed, copied = self._totals()
        executor = self.runtime.executor()
        figures, speculation = executor.figures, executor.updates.speculation
        planned_read, planned_written = figures.planned or (None, None)
        return StepReport(
            step=self.steps, loss=loss, lr=float(self.param_groups[0]["lr"]), grad_norm=self.grad_norm,
            skipped=self.skipped, step_s=now_s - began_s, tokens=tokens,
            stall_s={cause: s - stalled.get(cause, 0.0) for cause, s in stalls.items()},
            nbytes_read=read - read_before, nbytes_written=written - written_before,
            nbytes_crossed=crossed - crossed_before, nbytes_copied=copied - copied_before,
            planned_nbytes_read=planned_read, planned_nbytes_written=planned_written,
            on_demand=figures.on_demand, speculated=speculation.started, rolled_back=speculation.rolled_back,
            spilled_nbytes=executor.updates.stored_gradients.nbytes, tiles=len(executor.prefetcher.routed),
            tiles_used=figures.tiles_used, peak_nbytes=self.runtime.peak_nbytes(),
        )  # fmt: skip

    @property
    def budgets(self) -> dict[str, int | None]:
        """Return the bytes that each tier may take; None: only the disk limits it."""
        storage, device_nbytes = self.runtime.storage, self.runtime.executor().budget.division.total
        nvme = {"nvme": None} if storage.volume else {}
        return {"device": device_nbytes, "host": storage.host_nbytes, **nvme}

    @property
    def timeline(self) -> Timeline:
        """Return the spans of compute and transfers; empty unless the recipe sets ``observe.timeline``."""
        return self.runtime.timeline

    def synchronize(self) -> None:
        """Block until every update that was started has landed on its tier."""
        self.runtime.synchronize()

    def close(self) -> None:
        """Wait for updates in flight, then give back files, memory and threads."""
        self.runtime.close()

    def state_dict(self) -> dict[str, Any]:
        """Return moments, exact weights and step counts, gathered on the CPU of rank 0; every rank must call.

        The layout is torch's: ``state[i]`` belongs to the i-th parameter of ``param_groups``; it is empty on
        other ranks.
        """
        packed = super().state_dict()
        fields = self.runtime.values.optimizer_fields()
        numbered = {i: fields[id(p)] for i, p in enumerate(self._params()) if id(p) in fields}
        sums = self.sums
        packed["state"] = {i: each | sums.get(i, {}) for i, each in numbered.items()}
        packed |= {RULE: self.rule.name, NAMES: [self._name_of(param) for param in self._params()]}
        if self.scaler is not None:
            packed["loss_scaler"] = self.scaler.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what rank 0's :meth:`state_dict` returned; every rank must call with it.

        The state of the same rule of ``torch.optim``, bitsandbytes, transformers (Adafactor) or schedulefree
        with the same parameter groups is accepted, too; exact weights, which it lacks, stay as they are. An
        average that it lacks begins with the weights. Of another rule's dictionary, moments carry over where
        this rule needs no others.
        """
        self.runtime.values.check_step_over()
        params, described = self._params(), list[Parameter]()
        for group in self.param_groups:
            for param in group["params"]:
                name, way = self._name_of(param), self.rule.way(group, 0, param.shape)
                described.append(Parameter(name, param.shape, param.requires_grad, way))

        @functools.cache
        def exact() -> dict[int, dict[str, Tensor]]:
            if self.runtime.ranks.world_size > 1:
                raise StateError(
                    "a state of schedulefree needs exact weights on one rank: load it there, and go on from "
                    "its infinity.save_checkpoint"
                )
            return self.runtime.values.optimizer_fields()

        groups, state, note = fitted(
            self.rule, state_dict, described, super().state_dict()["param_groups"],
            lambda i: exact()[id(params[i])]["master"],
        )  # fmt: skip
        fields = {id(p): state[i] for i, p in enumerate(params) if i in state}
        sums = self.runtime.executor().updates.hypers.sums
        for own, group in zip(self.param_groups, groups, strict=True):
            check_group(self.rule, {**group, "params": own["params"]}, self._places)
            for segment in (each for param in own["params"] for each in self._places(param)):
                sums.check(group, segment, loads=True)
        if self.scaler is not None and "loss_scaler" in state_dict:
            with library_errors(StateError, "the loss_scaler of the state cannot be loaded"):
                LossScaler(1.0).load_state_dict(state_dict["loss_scaler"])
        with uninterrupted:
            sums.was.clear()  # states come with the numbers
            super().load_state_dict({"state": {}, "param_groups": [*groups]})
            self._connect()
            self.load_sums(fields)
            self.runtime.values.load_optimizer_fields(fields)
            if self.scaler is not None and "loss_scaler" in state_dict:
                self.scaler.load_state_dict(state_dict["loss_scaler"])
            self._go_on_from(max((int(each["step"]) for each in fields.values()), default=0))
        if note is not None:
            self.runtime.note(note)

    def restart(self, numbers: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Continue after ``steps`` steps, whose states are restored, with hyperparameters of each group."""
        self._check_loaded(numbers)
        for group, found in zip(self.param_groups, numbers, strict=True):
            group.update(found)
        self._go_on_from(steps)

    def _check_loaded(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        for group, found in zip(self.param_groups, numbers, strict=True):
            self.runtime.executor().updates.hypers.check({**group, **found})

    def _go_on_from(self, steps: int) -> None:
        self.steps = self.runtime.records.steps = steps
        self.runtime.records.reload(self._small_state)

    def _name_of(self, param: nn.Parameter) -> str:
        places = self._places(param)
        return places[0].whole_name if places else ""

    def _places(self, param: nn.Parameter) -> list[Segment]:
        return [segment for _, segment in self.runtime.units.places(param)]

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_parameters(self) -> None:
        """Raise if weights were replaced, or a trainable parameter is in no unit or no default group."""
        for unit in self.runtime.units:  # of all models of the Init: the step is theirs
            unit.check_data(unit.segments)
        grouped = {id(param) for param in self._params()} if self._made_groups else set()
        # model.parameters() would look at each parameter, and at all of them by name
        for param in (each for m in self.model.modules() for each in dict.values(m._parameters)):
            if param is None:
                continue
            places = self.runtime.units.places(param)
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


def _groups(
    model: nn.Module, rule: Rule, defaults: Mapping[str, Any], patterns: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return parameter groups: of each adapter, parameters whose numbers are the same; matrices first."""
    decays = "weight_decay" in rule.defaults
    own_numbers = rule.numbers_of(model)
    names = {id(param): name for name, param in model.named_parameters()}
    unmatched, groups = dict(patterns), dict[tuple[Any, ...], dict[str, Any]]()
    by_adapter = parameters_by_adapter(model)  # each of several has its own groups
    parties = by_adapter if len(by_adapter) > 1 else {None: model.parameters()}
    for adapter, params in parties.items():
        own: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        for param in sorted((p for p in params if p.requires_grad), key=lambda each: each.ndim < 2):
            matrix, name = param.ndim >= 2, names[id(param)]
            numbers = own | ({"weight_decay": defaults["weight_decay"] if matrix else 0.0} if decays else {})
            numbers |= own_numbers(name, param)
            for pattern, given in patterns.items():
                if any(fnmatch.fnmatchcase(name, each) for each in pattern.split("|")):
                    numbers |= rule.check_names(given)
                    unmatched.pop(pattern, None)
            group = groups.setdefault((matrix, *sorted(numbers.items())), {"params": [], **numbers})
            group["params"].append(param)
    if unmatched:
        wanted = f"a pattern of trained parameters, such as {', '.join([*names.values()][:3])}"
        raise SettingError("optim.groups", next(iter(unmatched)), wanted)
    return list(groups.values())


class AdamW(Optimizer):
    """AdamW: ``lr``, ``betas``, ``eps`` and ``weight_decay`` are as in ``torch.optim.AdamW``."""

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.01, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)


def optimizer_of(rule: Rule) -> Callable[..., Optimizer]:
    """Return the class of a rule's optimizers, whose arguments are the model and the rule's numbers."""

    class OfRule(Optimizer):
        def __init__(self, model: nn.Module, *numbers: Any, **options: Any) -> None:
            given = dict(zip(rule.defaults, numbers, strict=False))
            super().__init__(model, rule, **given, **options)

    OfRule.__name__ = OfRule.__qualname__ = type(rule).__name__.removesuffix("Rule")
    OfRule.__doc__ = f"{type(rule).__doc__}\n\nArguments as of :class:`Optimizer`; numbers: {rule.defaults}."
    return OfRule
