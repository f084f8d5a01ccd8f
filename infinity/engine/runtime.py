"""Owns the parts of one rank that serve the models of one ``Init``, from the first module to ``close``.

[Note: when something fails]
An error surfaces at a wait for a disk, a peer or a buffer, and threads and ranks that wait for something else
must learn of it. So the part that meets an error which ends the run (a collective, the update pipeline,
``close`` on the way out of an exception) calls :meth:`Runtime.fail`: other ranks are told beside the
collectives, and nothing here waits any longer for a buffer that will not come back.

[Note: how a runtime ends]
By ``close``; with the interpreter; when model and optimizer are collected; and at once in a forked child: see
:mod:`infinity.core.process`. Modules and runtime hold each other, and are collected when nothing else leads
to them. So threads, and hooks of tensors, which torch keeps where the collector cannot look, know the runtime
weakly. After the end parameters are placeholders, and every use of model or optimizer raises
:class:`StateError`.
"""

import atexit
import contextlib
import gc
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.activations.codecs import coding_of
from infinity.activations.controller import Activations
from infinity.activations.store import measure_hardware, open_stores
from infinity.activations.tensor_cache import TensorCache
from infinity.comm.ranks import Ranks, agree, all_ranks_or_raise, join_ranks, open_ranks
from infinity.core.config import SettingError
from infinity.core.errors import BEGIN_ANEW, DiskError, PeerError, StateError
from infinity.core.lifecycle import UnitState
from infinity.core.plan import Hardware, Place
from infinity.core.process import OwnedStack, close_collected, uninterrupted, weakly
from infinity.device.accelerator import bound_kernels, heap_line, memory_nbytes
from infinity.device.machine import DTYPES, accumulate_in_fp16, bind_to_node, choose_dtype, free_host_nbytes
from infinity.device.memory import Pool
from infinity.engine.device_budget import check_memory
from infinity.engine.executor import EngineConfig, StepExecutor, reduction_dtype
from infinity.engine.full_values import FullValues
from infinity.engine.hooks import register_forward_hooks
from infinity.nvme.run_directory import leftovers_line, new_run_id
from infinity.observe.timeline import MessageBuffer, Timeline
from infinity.optim.rule import Rule
from infinity.optim.rules import find_rule, prepare
from infinity.partition.builder import CutSizes, UnitBuilder
from infinity.partition.init_context import Construction, install_parameter_dict
from infinity.partition.tiles import TiledWeight, compute_in_tiles, used_after
from infinity.partition.unit import Unit, UnitIndex
from infinity.shards.journal import Resume
from infinity.shards.records import Records, restore
from infinity.shards.saved import SavedRun
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers


class Runtime:
    """Owns the parts of one rank that serve the models of one ``Init``."""

    def __init__(self, config: EngineConfig, mesh: Any = None) -> None:
        if open_runtimes:  # a cell of a notebook that runs again, perhaps: what it had before is garbage
            gc.collect()
        close_collected()  # and gives its memory and files back before this one looks for its own
        self.config = config  # later with the dtype that was chosen where it says auto
        self.stack = OwnedStack()
        self.stack.close_with(self)
        self._sections_broken = uninterrupted.broken
        self._ended = ""  # why nothing can be asked of it any more
        self.timeline = Timeline(enabled=config.timeline)
        self.say = MessageBuffer()
        self.notes: list[str] = []  # on what is done otherwise on this machine; rank 0's are shown
        self.saves: list[Any] = []  # the last portable checkpoint
        self._executor: StepExecutor | None = None
        device = join_ranks(config.partition.timeout_s, config.device)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        name = config.run_name  # which a caller may know on rank 0 only
        resume = None if name is None else config.resume
        self.run_id, resume = agree((name or new_run_id(), resume), world_size)
        self.ranks = Ranks(0, 1, device)  # until the others are met
        open_runtimes.add(self)
        try:
            self._build(device, resume, mesh)
        except BaseException:
            self.close()
            raise

    def _build(self, device: torch.device, resume: Resume | None, mesh: Any) -> None:
        memory, partition, rule = self.config.memory, self.config.partition, find_rule(self.config.rule)
        give_up: Any = weakly(self._give_up)
        self.ranks = ranks = open_ranks(
            device, partition.timeout_s, give_up, partition.ranks_per_node, shares=memory.shared, mesh=mesh
        )
        if ranks.collectives is not None:
            self.stack.callback(ranks.collectives.close)
        bound_kernels()  # before the first product
        chosen, line = choose_dtype(
            self.config.dtype, device, lambda x: ranks.least(round(1000 * x), "train.dtype") / 1000
        )
        self.config = replace(self.config, dtype=chosen)
        self._accumulate(device)
        reduction = reduction_dtype(self.config, self.dtype)
        self._prepare(rule)
        if line:
            self.note(line)
        if ranks.note:
            self.note(ranks.note)
        if ranks.rank == 0 and (line := leftovers_line(memory.nvme, self.run_id)):
            self.say(line)
        if ranks.on_accelerator and memory.numa == "auto" and (line := bind_to_node(device, memory.nvme)):
            self.note(line)
        check_memory(memory, ranks)
        host_nbytes = ranks.least(memory.host or free_host_nbytes() // 2, "memory.host")
        self.storage = Storage(memory, host_nbytes, self.dtype, device, rule)
        self.stack.callback(self.storage.stack.close)
        everyone = replace(ranks, everywhere=True)
        self.storage.open_files(
            self.run_id, everyone, resume, self.timeline, self.config.durability, self.note
        )
        self.tiers = Tiers(self.storage, ranks, reduction)
        self.tiers.pending = self.storage.saved is not None
        if ranks.memory is not None:
            self.stack.callback(ranks.memory.close)  # before the pool that lends it
        self.stack.callback(self.tiers.unpin)
        self.stack.callback(_close_all_of, self.saves)
        self.activations = self._make_activations()
        for store in self.activations.cache.stores.values():
            self.stack.callback(store.close)
        nbytes = memory.device or (memory_nbytes(device)[1] if ranks.on_accelerator else None)
        least = None if nbytes is None else ranks.least(nbytes, "memory.device")
        sizes = CutSizes.of(partition.tile, least, ranks.world_size, on_accelerator=ranks.on_accelerator)
        self.construction = Construction(
            lambda close: UnitBuilder(
                self.dtype, *ranks.share, close, partition.leaf, sizes=sizes
            ),
            self.tiers, self._serve, device, self._compute_in_tiles,
        )  # fmt: skip
        self.units.parts.mesh, self.units.parts.staged = mesh, ranks.of_stages is not None
        self.values = FullValues(self.tiers, self.construction, self.executor)

    def _compute_in_tiles(self, param: nn.Parameter) -> None:
        places, several = self.units.places(param), self.ranks.world_size > 1
        using: Any = weakly(self._using_tile)  # parameters do not keep the runtime alive
        unite: Any = weakly(self._unite)
        compute_in_tiles(param, TiledWeight(places, using, unite, used_after(self.units, places), several))

    def _using_tile(self, unit: Unit, following: Sequence[Unit]) -> contextlib.AbstractContextManager[None]:
        return self.executor().hooks.using_tile(unit, following)

    def _unite(self, hit: Sequence[bool]) -> Sequence[bool]:
        if self.ranks.collectives is None:
            return hit
        return [bool(x) for x in self.ranks.collectives.exchange("any", hit, "tiles of experts").amax(0)]

    def _accumulate(self, device: torch.device) -> None:
        """Let products add up as the recipe says, which torch can be told for the whole process only."""
        wanted = self.config.accumulate_dtype
        for other in (each.config for each in open_runtimes if each is not self):
            if other.dtype == self.config.dtype == "fp16" and other.accumulate_dtype != wanted:
                like = f"{other.accumulate_dtype}, as of the fp16 model that is open beside this one"
                raise SettingError("train.accumulate_dtype", wanted, like)
        if wanted == "fp16":
            least = partial(self.ranks.least, where="train.accumulate_dtype")
            self.stack.callback(accumulate_in_fp16(device, lambda gain: least(round(100 * gain)) / 100))

    def note(self, line: str) -> None:
        self.notes.append(line)
        if self.ranks.rank == 0:
            self.say(line)

    def _make_activations(self) -> Activations:
        memory, storage, device = self.config.memory, self.storage, self.ranks.device
        stores = open_stores(device, storage.host_pool, storage.piece_nbytes, storage.volume, storage.engine)
        if memory.activations == "offload" and not stores.keys() - {Place.CODED}:
            wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
            raise SettingError("memory.activations", "offload", wanted)
        cache = TensorCache(device, stores, partial(self.timeline.stall, "activation"))
        policy = memory.policy
        if self.config.layer_schedule and memory.activations in ("auto", "recompute"):
            policy = "keep"  # it recomputes by itself: little is left to plan
        if policy != "keep" or memory.codec != "auto":
            step: Any = weakly(self._step)
            cache.coding = coding_of(memory.codec, policy, step, self.ranks.share[0], self.note)
        if policy != "keep" and device.type == "cpu" and (line := heap_line()):
            self.note(line)
        decide = partial(self.ranks.decide, where="the plan for activations")

        def hardware() -> Hardware:
            pool = self.storage.host_pool  # through `self` the graph of a loss keeps what its backward needs
            room = pool.capacity_nbytes - pool.peak_nbytes
            return measure_hardware(device, memory.nvme, room, memory.engine == "gds")

        units = None if storage.store is None else storage.store.engine
        return Activations(cache, policy, hardware, decide=decide, units=units)

    def _step(self) -> int:
        """Return how many steps have been committed, also by the run that this one resumes."""
        return 0 if self._executor is None else self._executor.updates.records.steps

    def _serve(self, module: nn.Module) -> Callable[[nn.Module], None]:
        served[module] = weakref.ref(self)
        install_parameter_dict(module, self)
        handles = register_forward_hooks(module, self._enter, self._leave)
        handles += self.values.register_hooks(module)

        def take_out(module: nn.Module) -> None:
            del served[module]
            module.__dict__["_parameters"] = dict(module._parameters)
            for handle in handles:
                handle.remove()

        return take_out

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]  # type: ignore[index]  # auto has been chosen

    @property
    def units(self) -> UnitIndex:
        return self.construction.builder.units

    @property
    def started(self) -> bool:
        """Return whether the model ran or has an optimizer, so that its units are in use."""
        return self._executor is not None

    def _prepare(self, rule: Rule) -> None:
        if self.ranks.mesh and not rule.in_one_pass:
            wanted = "a rule that updates elements one by one, such as adamw, with a mesh of ranks"
            raise SettingError("optim.name", rule.name, wanted)
        reduction = reduction_dtype(self.config, self.dtype)
        prepare(rule, self.dtype, reduction if self.ranks.world_size > 1 else self.dtype)

    def use_rule(self, rule: Rule) -> None:
        """Let another rule update this model, which has not trained yet; a StateError says that it has."""
        was = self.storage.rule
        if (type(rule), rule.name) == (type(was), was.name):
            return
        if self.started or any(unit.home.trains for unit in self.units):
            raise StateError(
                f"{rule.name}: this model has states of {was.name}, or ran already: make its optimizer "
                f"before, or name it in the recipe (optim.name={rule.name})"
            )
        self.storage.use(rule)
        self._prepare(rule)

    def executor(self, *, clips: bool | None = None) -> StepExecutor:
        """Return the executor, made if there is none; ``clips``: whether gradients are clipped, if told."""
        self.check_open()
        if clips is None:
            self.check_resumed()
        if self._executor is None:
            with uninterrupted:
                if clips is None:  # it has no optimizer, which would have settled them
                    planned = self.activations.policy in ("plan", "offload")
                    self.tiers.settle(self.units, movable=True, planned=planned, trains=False)
                self._executor = StepExecutor(
                    self.construction, self.tiers, self.activations, self.config, self.timeline,
                    clips=clips is not False, on_failure=weakly(self.fail),
                )  # fmt: skip
                self.stack.callback(self._executor.stack.close)
        elif clips is not None:
            with uninterrupted:
                self._executor.clip(clips)
        return self._executor

    def reopen(self) -> None:
        """Prepare for another ``Init`` block, in which the model is changed."""
        if not self.at_rest():
            raise StateError(
                "infinity.Init of a model that has its optimizer or a layer schedule, or ran with gradients: "
                "add modules and resize embeddings before that"
            )

    def at_rest(self) -> bool:
        """End what a run without gradients left; return whether units and their homes may change."""
        executor = self._executor
        if executor is None:
            return True
        if executor.updates.hypers.groups or executor.hooks.recorded or executor.blocks is not None:
            return False
        executor.retire()
        for unit in self.units:
            if unit.state is UnitState.GATHERED:  # in host memory, its parameters views of its shard
                unit.detach()
                unit.lifecycle.move(UnitState.ON_HOST)
        self._executor = None
        return True

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.construction.active:
            with uninterrupted:
                if self.values.loading is not None:
                    self.values.end_load()
                self.executor().hooks.enter(module, args)

    def _leave(self, module: nn.Module, output: object) -> None:
        if self._executor is not None:
            with uninterrupted:
                self._executor.hooks.leave(module, output)

    def touch(self, param: nn.Parameter, siblings: Mapping[str, nn.Parameter | None]) -> None:
        if self.construction.active:
            self.construction.touch(param, siblings)
        elif not self.resuming:  # else it has no values yet, and may be frozen, or given to the optimizer
            with uninterrupted:
                self.executor().hooks.touch(param)

    def check(self, param: nn.Parameter) -> None:
        if self.construction.active:
            self.construction.check(param)
        else:
            for unit, segment in self.units.places(param):
                unit.restore_place(segment)

    def deep_copy(self, param: nn.Parameter) -> nn.Parameter:
        if self.construction.active:
            return self.construction.deep_copy(param)
        raise StateError(
            "copy.deepcopy of a model whose parameters are sharded: the copy would hold every weight in "
            "memory. Build a second model under its own infinity.Init and load model.state_dict() into it"
        )

    def peak_nbytes(self) -> dict[str, int]:
        storage, executor = self.storage, self.executor()
        pools = {"device": executor.device_pools, "host": [storage.host_pool, *(executor.host or ())]}
        peaks = {tier: sum(pool.peak_nbytes for pool in each) for tier, each in pools.items()}
        return peaks | ({"nvme": storage.volume.peak_nbytes} if storage.volume else {})

    def forget_step(self) -> None:
        """Drop the gradients of this step, for ``zero_grad()`` without ``step()``."""
        self.check_open()
        if self._executor is not None:
            with uninterrupted:
                self._executor.hooks.abort_backward()
                if self._executor.gradients.received and self.ranks.collectives is not None:
                    self.ranks.collectives.check(0, "zero_grad()")  # no rank has more of them
                self._executor.gradients.reset()

    def synchronize(self) -> None:
        self.check_open()
        if self._executor is not None:
            self._executor.updates.drain()

    def resume(self) -> SavedRun | None:
        """Restore the states of the interrupted run; None: there is none. Every rank must call."""
        self.check_open()
        saved = self.storage.saved
        self.storage.keep = True  # unless it is closed: then the run is over
        if saved is None or not self.tiers.pending:
            return None
        if self._executor is None or not self._executor.updates.hypers.groups:
            raise StateError("infinity.resume(model, optimizer) before the model has an infinity.AdamW")
        records, hypers = self._executor.updates.records, self._executor.updates.hypers
        hypers.begin_step()
        try:
            with all_ranks_or_raise(self.ranks, "resuming the run"):
                adopted, discard = restore(saved, self.units, self.tiers, hypers.way, self.note)
                self.tiers.settle(self.units)
        except BaseException:
            self.tiers.pending = True  # so closing the model keeps what another start can go on with
            raise
        finally:
            hypers.end_step()
        records.take_over(saved, self.ranks.rank, adopted, discard)
        return saved

    @property
    def resuming(self) -> bool:
        """Return whether the states of an interrupted run will come, by :meth:`resume`."""
        return self.tiers.pending and self.storage.saved is not None

    def check_resumed(self) -> None:
        if self.resuming and self.storage.saved is not None:
            raise StateError(
                f"the run {self.run_id} was interrupted after step {self.storage.saved.step}: call "
                f"step = infinity.resume(model, optimizer) before anything else; {BEGIN_ANEW}"
            )

    def check_between_steps(self) -> None:
        """Raise a StateError inside a step, or before the states of an interrupted run are back."""
        self.check_resumed()
        if self.started:
            self.values.check_step_over()

    @property
    def records(self) -> Records:
        return self.executor().updates.records

    def meet(self) -> None:
        """Wait until every rank has built its model; raise unless all are the same."""
        if self.ranks.collectives is not None:
            units = [(u.home.tier.name, [(s.offset, *s.shape) for s in u.segments]) for u in self.units]
            numel = sum(segment.numel for _, segment in self.units.segments())
            where = f"of the model: {len(units)} units, {numel} parameters"
            self.ranks.collectives.check(zlib.crc32(repr(units).encode()), where)

    def fail(self, error: BaseException) -> None:
        """Tell other ranks, and all that waits here, that this rank cannot go on. Any thread may call."""
        self._give_up(error)
        if self.ranks.collectives is not None:
            self.ranks.collectives.peers.tell(error)

    def _give_up(self, error: BaseException) -> None:
        for pool in self._pools():
            pool.fail(error)

    def peer_error(self, what: str, error: RuntimeError) -> PeerError:
        """Return the error for a collective of the caller's that failed; names the rank at fault."""
        if self.ranks.collectives is None:
            return PeerError(f"{what}: {error}")
        return self.ranks.collectives.peers.explained(what, error)

    def check_open(self) -> None:
        """Raise if the runtime has ended, or a second Ctrl-C interrupted a section that must be whole."""
        if self._ended:
            raise StateError(self._ended)
        if uninterrupted.broken != self._sections_broken:
            recorded = self._executor.updates.records.recorded if self._executor is not None else None
            left = (
                "its weights since it was built or saved are lost (those of a run with a name and "
                "directories in memory.nvme are not)"
                if recorded is None
                else f"infinity.resume then goes on after its last committed step ({recorded})"
            )
            raise StateError(_INTERRUPTED.format(self.named(), left))

    def close(self, error: BaseException | None = None, *, keep: bool = False) -> None:
        """Give back files, memory and threads. May be called twice.

        Other ranks learn of the ``error`` that ended the run (None: the one that is being handled, if any),
        and the files of a run that can go on stay. With ``keep`` they stay in any case; without an error
        raise if the last step could not be kept.
        """
        lost: Exception | None = None
        if not self._ended:
            error = error or sys.exception()
            doubtful = uninterrupted.broken != self._sections_broken
            try:
                lost = self._settle(error or (KeyboardInterrupt() if doubtful else None), keep)
                if hasattr(self, "tiers"):  # it may have failed while it was built
                    self.storage.keep = keep or _is_failure(error) or self.tiers.pending
            finally:
                self.end(_CLOSED.format(self.named()))
        _close_all_of(self.saves)
        self.stack.close()
        for pool in self._pools():
            pool.unmap_leased()
        open_runtimes.discard(self)
        if lost is not None:
            lost.add_note("the last step is not kept; infinity.resume goes on from the commit before it")
            raise lost

    def _settle(self, error: BaseException | None, keep: bool) -> Exception | None:
        """Wait for what is in flight and, to ``keep``, the last commit; return why a step is not kept."""
        lost: Exception | None = None
        updates = None if self._executor is None else self._executor.updates
        if updates is not None and self.ranks.collectives is not None and not _is_failure(error):
            self.ranks.collectives.leave()
        if error is not None and _is_failure(error):
            if isinstance(error, KeyboardInterrupt | SystemExit) and updates is not None:
                updates.records.land_commit(_LANDING_S)
            self.fail(error)
            if updates is not None and updates.pipeline is not None:
                updates.pipeline.abandon(error)
        elif updates is not None:
            try:
                if keep:
                    updates.records.end_commit()
                updates.drain()  # gathers in flight wait for updates
            except Exception as raised:  # it has surfaced, or nothing waits for it any more
                lost = raised if keep and isinstance(raised, DiskError) else None
        if hasattr(self, "activations"):  # it may have failed while it was built
            self.activations.close()
        return lost

    def end(self, why: str) -> None:
        """Make every later use raise ``why``; the weights are gone."""
        self._ended = self._ended or why
        if self._executor is not None:
            self._executor.hooks.end(why)
        if hasattr(self, "values"):
            for unit in self.units:
                unit.drop()

    def named(self) -> str:
        roots = self.construction.roots if hasattr(self, "construction") else []
        return ", ".join(type(root).__name__ for root in roots) or "a model"

    def _pools(self) -> list[Pool]:
        executor = self._executor
        pools: list[Pool] = [] if executor is None else [*executor.device_pools, *(executor.host or ())]
        return [*pools, self.storage.host_pool] if hasattr(self, "storage") else pools


def _close_all_of(saves: Iterable[Any]) -> None:
    for save in saves:
        save.close()


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


#: How long the last commit may take to land after a signal (s).
_LANDING_S = 10.0

_CLOSED = (
    "{} was closed (infinity.close or optimizer.close): its weights, files and threads are gone. Save or "
    "export a model before it is closed; to go on, build it again under infinity.Init"
)
_INTERRUPTED = (
    "a second Ctrl-C interrupted this package's own bookkeeping, so that what it knows of {} may be wrong. "
    "Build the model again, after infinity.close(model, keep=True); {}"
)
_FORKED = (
    "{} belongs to process {}. This process, {}, was forked from it and has neither its weights nor its "
    "threads. Use the model there, and give forked workers plain tensors; a worker that needs a model of "
    "its own builds one under infinity.Init"
)


#: By module that was built under ``Init``. The module's hooks hold the runtime.
served: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()
#: Those that were not closed.
open_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def runtimes() -> set[Runtime]:
    return {runtime for ref in served.values() if (runtime := ref()) is not None}


def runtime_of(model: nn.Module, *, ended: bool = False) -> Runtime:
    """Return the runtime that serves ``model``, or one that it wraps; ``ended``: also if that has ended."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"wanted the model, an nn.Module; got {type(model).__name__}: write infinity.AdamW(model, "
            "lr=...), with the model in place of model.parameters(); parameter groups go into params=[...]"
        )
    for module in model.modules():
        runtime = served[module]() if module in served else None
        if runtime is not None:
            if not ended:
                runtime.check_open()
            return runtime
    how = "write `with infinity.Init(recipe): model = ...`"
    raise StateError(f"{type(model).__name__} was not built under infinity.Init; {how}")


def _close_all() -> None:
    """Close all runtimes at exit, so that no thread and no files of a run stay behind."""
    for runtime in list(open_runtimes):
        with contextlib.suppress(Exception):
            # what ended the program, if it was an exception
            keep = hasattr(runtime, "storage") and runtime.storage.keep
            runtime.close(getattr(sys, "last_value", None), keep=keep)
    close_collected(at_exit=True)


def _disown_all() -> None:
    """In a forked child, which has neither threads nor memory, leave every model to the parent."""
    for runtime in list(open_runtimes):
        runtime.end(_FORKED.format(runtime.named(), os.getppid(), os.getpid()))
    open_runtimes.clear()


# Before the pools of concurrent.futures close, which updates in flight use: atexit would be too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_disown_all)
