"""Saves and loads directories of ``torch.distributed.checkpoint``, when called or regularly during a run."""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import nn

from infinity.api.adamw import AdamW
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.checkpoint.export import Series
from infinity.checkpoint.portable import Contents, PortableSave, PortableValues
from infinity.comm.ranks import all_ranks_or_raise
from infinity.core.config import Config, SettingError, Valid, option, setting
from infinity.core.errors import BudgetError, CheckpointError, DiskError, PeerError, StateError
from infinity.core.files import user_path
from infinity.engine.runtime import Runtime, runtime_of


def save_checkpoint(
    model: nn.Module, optimizer: AdamW | None, path: str | Path, *, background: bool = False
) -> PortableSave:
    """Write weights, moments and hyperparameters to a new directory of ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads it on any number of ranks, into FSDP2, torchtitan or a plain
    model: exact fp32 weights under the model's own names, and the state of ``torch.optim.AdamW`` as
    ``{"optimizer": get_optimizer_state_dict(...)}``, with or without ``flatten_optimizer_state_dict``.

    Streamed: beside a few buffers, memory holds a part of one unit. The directory appears when it is whole; a
    save that fails or is killed leaves nothing under its name, and training can go on. Every rank must call,
    between two steps, and ``path`` lies on a file system that all see.

    With ``background`` it returns when all is planned. A thread of each rank then writes the present states
    while training goes on, and the directory appears in ``wait()`` of the returned object, which raises the
    errors below. Every rank must call that between two later steps, before the next save and before the model
    is closed; ``done`` says whether this rank has written its part.

    Args:
        optimizer: None: only weights are saved.
        path: Must not exist, or be empty; rank 0's value is used.

    Raises:
        CheckpointError: ``path`` is not free.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
        StateError: There are gradients of a step that is not over, another save has not ended, or the states
            of an interrupted run are not in their places yet: call :func:`infinity.resume` first.
    """
    save = begin_save(model, optimizer, path, background=background)
    if not background:
        save.wait()
    return save


def begin_save(
    model: nn.Module, optimizer: AdamW | None, path: str | Path, *, background: bool,
    then: Callable[[], object] = lambda: None,
) -> PortableSave:  # fmt: skip
    """Begin :func:`save_checkpoint`; ``then`` is called on rank 0 when it is published."""
    runtime = _between_steps(model, settled=not background)
    tiers, ranks = runtime.tiers, runtime.ranks
    if not all(save.ended for save in runtime.saves):
        raise StateError("a checkpoint is being saved in the background: call wait() of it before the next")
    extra: dict[tuple[str | int, ...], Any] = {}
    if optimizer is not None and optimizer.scaler is not None:
        extra = {("loss_scaler", key): value for key, value in optimizer.scaler.state_dict().items()}
    groups = () if optimizer is None else optimizer.param_groups
    plan = partial(Contents, model, runtime.units, groups, extra, tiers.layout.full_names[1:])
    save = PortableSave(user_path(path, "path"), ranks, plan)
    runtime.saves[:] = [save]
    if not background:
        save.start(tiers.chunk_fields, then=then)
        return save
    try:
        with all_ranks_or_raise(ranks, f"keeping the states for {save.out}"):
            snapshot = runtime.records.snapshot()
    except BaseException:
        tiers.unpin()
        save.close()
        raise
    save.start(lambda unit: snapshot.read(unit.index), beside=True, end=tiers.unpin, then=then)
    return save


def load_checkpoint(model: nn.Module, optimizer: AdamW | None, path: str | Path) -> int:
    """Load weights and the optimizer's state from a directory of ``torch.distributed.checkpoint``.

    Written by :func:`save_checkpoint`, or by ``torch.distributed.checkpoint.save`` from FSDP2, torchtitan or
    a plain model with the same names of parameters, on any number of ranks. Streamed: each rank reads its own
    ranges of elements, chunk by chunk. No code of the directory runs. Every rank must call, before training.

    Args:
        optimizer: Moments and step counts that the checkpoint lacks become zero. None: only weights are
            loaded.

    Returns:
        How many steps the optimizer had done; 0 if the checkpoint has no state of an optimizer.

    Raises:
        CheckpointError: It is damaged, or does not fit; lists every missing, unknown and wrongly shaped key.
        DiskError: A drive failed or is full.
        StateError: There are gradients of a step that is not over, or the states of an interrupted run are
            not in their places yet: call :func:`infinity.resume` first.
    """
    runtime = _between_steps(model)
    if runtime.started:
        runtime.executor().prefetcher.forget()
    where = user_path(path, "path")
    groups = () if optimizer is None else optimizer.param_groups
    with all_ranks_or_raise(runtime.ranks, f"loading {where}"), DistributedCheckpoint(where) as checkpoint:
        values = PortableValues(checkpoint, model, runtime.units, groups, runtime.tiers.layout.full_names[1:])
        for unit in filter(values.holds, runtime.units):
            runtime.tiers.put(unit, partial(values.field, unit, 0), partial(values.moments, unit))
            unit.updates += 1
            for segment in unit.segments:
                segment.steps = values.steps.get(id(segment.whole), 0)
        values.fill_whole()
        if optimizer is not None:
            scaler = {key: values.extra("loss_scaler", key) for key in ("scale", "good_steps")}
            if optimizer.scaler is not None and None not in scaler.values():
                optimizer.scaler.load_state_dict(scaler)
            optimizer.restart(values.numbers, max(values.steps.values(), default=0))
    return max(values.steps.values(), default=0)


def _between_steps(model: nn.Module, *, settled: bool = True) -> Runtime:
    """Return the model's runtime, or raise a StateError inside a step or before a resume.

    ``settled``: wait until the states of the last step are in their places, too.
    """
    runtime = runtime_of(model)
    runtime.check_resumed()
    if runtime.started:
        runtime.values.check_step_over()
    if settled:
        runtime.synchronize()
    return runtime


#: The folder of checkpoints in the run's folder.
CHECKPOINTS_FOLDER = "checkpoints"
#: The part of a run's time that saving may take with ``every: auto``.
AUTO_SHARE = 0.035
#: The speed that is expected of the first save of ``every: auto``.
_ASSUMED_BYTES_PER_S = 500e6
#: Bytes of an exact weight and two moments, fp32.
_NBYTES_PER_PARAMETER = 12
#: The least cost of a save beside training, as a part of its time.
_LEAST_COST = 0.1
#: How many of the last steps without a save give the usual time of a step.
_SEEN_STEPS = 32
#: Errors of a save after which training can go on.
_NO_HARM = DiskError, PeerError, CheckpointError, BudgetError
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(steps?|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """Holds the distance between two checkpoints: steps, or seconds, or (neither) whatever costs little."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Settings of portable checkpoints: which one a run starts from, and when it saves."""

    load: str | None = setting(
        None,
        "directory of torch.distributed.checkpoint from which a new run starts: weights, moments and step "
        "counts; null: none",
        path=True,
    )
    every: str | None = option(
        None,
        'time between portable checkpoints: "500 steps", 30min, 2h, 90s; auto: as often as costs at most '
        "3.5 % of the time; null: none",
    )
    keep: int = option(2, "portable checkpoints that stay, the newest", Valid(1, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval()

    def interval(self) -> Interval | None:
        """Return the interval that ``every`` names, or None; raises a SettingError if it is invalid."""
        if self.every is None or self.every == "auto":
            return None if self.every is None else Interval()
        found = _EVERY.fullmatch(self.every.strip())
        number = float(found[1]) if found else 0.0
        if found is None or not number or (found[2].startswith("step") and not number.is_integer()):
            raise SettingError("every", self.every, 'auto, or such as "500 steps", 30min, 2h, 90s')
        if found[2].startswith("step"):
            return Interval(steps=int(number))
        return Interval(seconds=number * _SECONDS[found[2]])


class Checkpoints:
    """Saves a model beside training when that is due, one checkpoint at a time.

    A save that fails leaves earlier ones as they are, and training goes on.

    Args:
        folder: The run's, which begins after ``step``.
        steps: The last step; after it a checkpoint is due, unless ``every`` is auto.
        agree: Returns the mean of a number over all ranks, so that they decide alike.
        say: Gets a line for people about each checkpoint; on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, model: Any, optimizer: Any, folder: Path, *, step: int, steps: int,
        agree: Callable[[float], float], say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._steps = model, optimizer, steps
        self._agree, self._say = agree, say
        self._interval = config.interval() or Interval()
        self._leads = optimizer.runtime.ranks.rank == 0
        self._series = Series(folder / CHECKPOINTS_FOLDER, "step", config.keep)
        if self._leads:
            self._series.remove_leftovers()
        numel = sum(p.numel() for p in model.parameters())
        self._pace = Pace(_NBYTES_PER_PARAMETER * numel / _ASSUMED_BYTES_PER_S, time.monotonic())
        self._saving: PortableSave | None = None  # one that has not ended
        self._last = step  # after which a save began
        self._failed = 0

    def after(self, step: int, step_s: float) -> bool:
        """Begin a checkpoint if one is due, and end one that is written; return whether that took time.

        Every rank must call.
        """
        saving, ends = self._saving, step == self._steps
        self._pace.step(step_s, saving=saving is not None)
        acted = saving is not None and self._go_on(saving, wait=ends)
        if (saving is None or saving.ended) and self._is_due(step):
            acted, saving, self._last = True, None, step
            self._pace.begin(time.monotonic())
            path, then = self._series.path(step), partial(self._series.publish, step)
            with self._waiting():
                saving = begin_save(self._model, self._optimizer, path, background=True, then=then)
            if saving is not None and ends:
                self._go_on(saving, wait=True)
        self._saving = None if saving is None or saving.ended else saving
        return acted

    def _go_on(self, saving: PortableSave, *, wait: bool) -> bool:
        """Advance a checkpoint if all ranks are ready, or told to ``wait``; return whether that took time."""
        if wait and self._interval == Interval():
            saving.close()  # waiting would take more than its share
            return True
        if not wait and self._agree(float(saving.done)) < 1:
            return False
        failed = self._failed
        with self._waiting():
            if wait:
                saving.wait()
            else:
                saving.advance()
        if saving.ended and self._failed == failed:
            took_s = self._pace.end(time.monotonic())
            self._say(f"checkpoint after step {self._last} in {took_s:.1f} s beside training: {saving.out}")
        return True

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as waiting; a harmless error ends the checkpoint, not the training."""
        began_s = time.monotonic()
        try:
            yield
        except _NO_HARM as error:
            self._pace.end(time.monotonic())
            self._failed += 1
            notes, begin = self._optimizer.runtime.notes, "WARNING: no checkpoint after step"
            line = f"{begin} {self._last}, training goes on: {error}"
            self._say(line)
            if self._failed > 1:
                line = f"{begin} {self._last} and {self._failed - 1} others before, training goes on: {error}"
            notes[:] = [note for note in notes if not note.startswith(begin)] + [line]  # for the summary
        else:
            self._pace.waited(time.monotonic() - began_s)

    def _is_due(self, step: int) -> bool:
        every, last = self._interval.steps, step == self._steps
        if every is not None and step // every == self._last // every and not last:
            return False
        now_s, seconds = time.monotonic(), self._interval.seconds  # by rank 0's clock
        if self._interval == Interval():
            is_time = not last and self._pace.allows(AUTO_SHARE, now_s)
        else:
            is_time = last or seconds is None or now_s - self._pace.last_s >= seconds
        wanted = self._leads and not self._series.path(step).exists() and is_time
        return self._agree(float(wanted)) > 0


class Pace:
    """Measures what saving has cost so far. All times are of one clock that never jumps (s).

    A save costs what the steps beside it take longer than others do, and what training waits for it, but at
    least a tenth of the time that it takes: drives wear out, and times vary.

    Source: CheckFreq (FAST '21): the frequency follows from the measured cost, so that it is bounded.
    """

    def __init__(self, expected_s: float, now_s: float) -> None:
        self._begun_s = self.last_s = now_s  # when the run, and the last save, began
        self._expected_s, self._spent_s = expected_s, 0.0
        self._without_s = deque[float](maxlen=_SEEN_STEPS)  # the last steps that no save was beside
        self._beside_s: list[float] = []
        self._waited_s = 0.0

    def step(self, step_s: float, *, saving: bool) -> None:
        (self._beside_s if saving else self._without_s).append(step_s)

    def begin(self, now_s: float) -> None:
        self.last_s, self._waited_s = now_s, 0.0
        self._beside_s.clear()

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def end(self, now_s: float) -> float:
        """Record the end of a save, whose cost is expected of the next one; return how long it took."""
        took_s = now_s - self.last_s
        usual_s = median(self._without_s) if self._without_s else 0.0
        slower_s = sum(self._beside_s) - usual_s * len(self._beside_s)
        self._expected_s = max(slower_s + self._waited_s, _LEAST_COST * took_s)
        self._spent_s += self._expected_s
        return took_s

    def allows(self, share: float, now_s: float) -> bool:
        """Return whether all saves, with one that begins now, cost at most ``share`` of the time."""
        spent_s = self._spent_s + self._expected_s
        return spent_s <= share * (now_s - self._begun_s + self._expected_s)
