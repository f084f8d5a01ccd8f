"""Builds the parts and connects them to one model: the only place that knows all of them.

[Note: when something fails]
An error surfaces where somebody waits: for a disk, a peer, a buffer. Those who do not wait must learn of
it, too. So whoever sees an error that ends the run here (a collective, the update pipeline, ``close``
on the way out of an exception) calls :meth:`Runtime.fail`: other ranks are told beside the collectives,
and nobody here waits any longer for a buffer that will not come back.
"""

import contextlib
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infinity import budget
from infinity.activation.cache import TensorCache
from infinity.activations import Activations
from infinity.backward import Backward
from infinity.channels import measure_hardware, open_shelves
from infinity.core.config import SettingError
from infinity.core.errors import PeerError, StateError
from infinity.core.lifecycle import UnitState
from infinity.core.plan import Hardware
from infinity.core.tier import Tier
from infinity.core.transfer import Transfer
from infinity.division import Beside, Division
from infinity.hooks import Hooks, dress
from infinity.machine import agree, decide, free_host_nbytes, join_ranks
from infinity.nvme.pool import BufferPool, DevicePool, HostPool
from infinity.nvme.run_directory import leftovers_line, new_run_id
from infinity.observe.listener import Listener
from infinity.observe.stalls import CountingPool, Stalls
from infinity.observe.timed import TimedRule
from infinity.observe.timeline import Timeline
from infinity.optim.norm import clip_coefficient
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.rules import AdamWRule
from infinity.partition.builder import UnitBuilder
from infinity.partition.collectives import Collectives
from infinity.partition.init_context import Construction
from infinity.partition.mover import UnitMover
from infinity.partition.parameters import serve
from infinity.partition.staging import Staging
from infinity.partition.unit import Unit
from infinity.prefetch.prefetcher import Prefetcher
from infinity.recipe import Recipe
from infinity.registry import opened, served
from infinity.storage import Storage
from infinity.tiers import Tiers
from infinity.updates import Updates
from infinity.values import Values, watch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Runtime:
    """Everything that serves the models of one ``Init`` on this rank."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.dtype = DTYPES[recipe.train.dtype]
        self.device = join_ranks(recipe.partition.timeout_s)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.stack = contextlib.ExitStack()
        self.timeline = Timeline(enabled=recipe.observe.timeline)
        self.stalls = Stalls(self.timeline)
        self.values = Values(self)
        self.hooks: Hooks | None = None
        self.prefetcher: Prefetcher
        self.updates: Updates
        self._parts: contextlib.ExitStack
        self.on_division: list[Callable[[], None]] = []  # called when the device budget was divided anew
        self.on_demand = 0
        self.planned: tuple[int, int] | None = None  # bytes read and written by the last step's plan
        self._update_mark = (0, 0)
        self.say = Listener()
        self._failure: BaseException | None = None
        self.collectives: Collectives | None = None
        self.storage: Storage
        self.run_id = agree(recipe.run.name or new_run_id(), self.world_size)
        opened.add(self)
        try:
            self._build_tiers()
        except BaseException:
            self.close()
            raise
        self.construction = Construction(
            lambda close: UnitBuilder(self.dtype, self.rank, self.world_size, close, recipe.partition.leaf),
            self.tiers,
            self._serve,
            self.device,
        )

    # --- building ----------------------------------------------------------------------------

    def _build_tiers(self) -> None:
        memory = self.recipe.memory
        if self.world_size > 1:
            self.collectives = Collectives(self.device, self.recipe.partition.timeout_s, self._give_up)
            self.stack.callback(self.collectives.close)
        if self.rank == 0 and (line := leftovers_line(memory.nvme)):
            self.say(line)
        host_nbytes = self._least(memory.host or free_host_nbytes() // 2, "memory.host")
        self.storage = Storage(memory, host_nbytes, self.dtype, on_gpu=self.device.type != "cpu")
        self.stack.callback(self.storage.close)
        self.storage.open_files(self.run_id, self.rank, self.timeline)
        self.tiers = Tiers(self.storage, self.gather_exact)
        self.activations = self._make_activations()
        self.stack.callback(self.activations.close)

    def _make_activations(self) -> Activations:
        memory, storage = self.recipe.memory, self.storage
        shelves = open_shelves(
            self.device, storage.host_pool, self._piece_nbytes, storage.volume, storage.engine
        )
        if memory.activations == "offload" and not shelves:
            wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
            raise SettingError("memory.activations", "offload", wanted)
        cache = TensorCache(self.device, shelves, lambda wait: self.stalls("activation", wait))
        recomputed = self.recipe.train.schedule == "layer"  # by itself: little is left to plan
        policy = memory.activations or ("keep" if memory.device is None or recomputed else "plan")
        return Activations(
            cache, policy, self._hardware, Beside(self, self._divide_beside),
            self._decide, storage.units_engine,
        )  # fmt: skip

    def _decide(self, make: Callable[[], str]) -> str:
        """The plan for activations that rank 0 makes."""
        if self.collectives is None:
            return make()
        return decide(make, self.rank, partial(self.collectives.share, where="the plan for activations"))

    def _hardware(self) -> Hardware:
        room = self.storage.host_nbytes - self.storage.host_pool.peak_nbytes
        return measure_hardware(self.device, self.recipe.memory.nvme, room)

    def _serve(self, module: nn.Module) -> None:
        served[module] = self
        serve(module, self._touch, self._deep_copy)
        dress(module, self._enter, self._leave)
        watch(module, self.values)

    @property
    def units(self) -> list[Unit]:
        return self.construction.builder.units

    def connected(self) -> Hooks:
        """The hooks; the parts are connected first, as for inference, if no optimizer came before."""
        if self.hooks is None:
            self._connect(clips=True)
        assert self.hooks is not None
        return self.hooks

    def connect_optimizer(self, groups: list[dict[str, Any]], *, clips: bool) -> None:
        """Connect an optimizer's parameter groups; sizes the device budget for it.

        Raises:
            BudgetError: ``memory.device`` is too small; the message has the arithmetic.
        """
        if self.hooks is None or self._clips != clips:
            self._connect(clips)
        self.updates.groups = groups

    def _connect(self, clips: bool) -> None:
        """Size the device budget and connect mover, prefetcher, gradients and updates."""
        if self.hooks is not None:
            self.prefetcher.forget()
            self._parts.close()
        self._clips = clips
        self._parts = self.stack.enter_context(contextlib.ExitStack())
        on_gpu = self.device.type != "cpu"
        early = not clips and self.recipe.memory.versions == 2
        host = self.storage.host_pool if on_gpu else None
        staging = None if host is None else Staging(host, self._piece_nbytes)
        ceiling = self._least(self._device_ceiling(), "memory.device")
        self._dividing = Division(self, ceiling, early=early)
        self.device_pool: BufferPool
        if on_gpu:
            self.device_pool = DevicePool(self.division.total, self.device)
        else:
            self.device_pool = HostPool(self.division.total, key="memory.device")
        self._parts.callback(self.device_pool.close)
        pool = CountingPool(self.device_pool, self.stalls)
        self.mover = UnitMover(self.units, self, pool, staging, self.collectives, self.stalls)
        self._parts.callback(self.mover.close)
        streaming = {u.index: budget.rounded(u.nbytes) for u in self.units if self.streams(u)}
        can_stay = {u.index for u in self.units if u.home is Tier.NVME and self._fits_staging(u)}
        self.prefetcher = Prefetcher(self.mover, streaming, self.division.window, can_stay)
        self._make_updates(early)
        self.backward = Backward(
            self.units, pool, host, self.mover, self.updates,
            self.collectives, self.reduce_dtype, self._divide_again, hold_weights=self.division.hold_weights,
        )  # fmt: skip
        self._hook_up()

    def _hook_up(self) -> None:
        if self.hooks is None:
            self.hooks = Hooks(self.prefetcher, self.backward, self.mover.attached, self.activations)
        hooks = self.backward.hooks = self.hooks
        hooks.prefetcher, hooks.sink, hooks.attached = self.prefetcher, self.backward, self.mover.attached
        hooks.learn(self.units, self.leaves())
        for unit in self.units:
            if not self.streams(unit):
                if not unit.gathered:
                    unit.lifecycle.move(UnitState.GATHERED)
                    unit.attach(self.tiers.residents[unit.index].weight)
                assert unit.flat is not None
                self.mover.attached[unit.flat.untyped_storage().data_ptr()] = unit

    def _make_updates(self, early: bool) -> None:
        config = self.recipe.optim
        on_compile = self.say if self.rank == 0 else None
        rule = AdamWRule(
            self.dtype, threads=torch.get_num_threads(), compiled=config.compile, on_compile=on_compile
        )
        storage, pipeline, commits = self.storage, None, self.storage.open_commits()
        if commits is not None:
            self._parts.callback(commits.close)
        if storage.units_engine is not None:
            background = AdamWRule(self.dtype, compiled=config.compile, on_compile=on_compile)
            timed: Any = TimedRule(background, self.timeline) if self.timeline.enabled else background
            pipeline = UpdatePipeline(
                storage.units_engine, storage.host_pool, storage.layout, timed, depth=storage.staged_chunks()
            )
            self._parts.callback(pipeline.close)
        self.updates = Updates(
            self.tiers, rule, pipeline, early=early,
            next_use=lambda index: self.prefetcher.first_use(index),
            order_of_gradients=lambda: self.prefetcher.order_of_gradients(), units=self.units,
            commits=commits, on_failure=self.fail,
        )  # fmt: skip

    @property
    def division(self) -> budget.DeviceBudget:
        """How the device budget is divided now."""
        return self._dividing.budget

    def accumulate(self) -> None:
        """Gradients will wait for later micro-batches.

        Raises:
            BudgetError: ``memory.device`` cannot hold all of them; the message has the arithmetic.
        """
        self.connected()
        self._divide_again(accumulates=True)

    def _divide_again(self, *, accumulates: bool = False) -> None:
        """Before a forward: make room for gradients that did not wait until now."""
        if self._dividing.again(accumulates=accumulates):
            self.tiers.settle(self.units)  # what was thawed gets its moments
            self._apply_division()

    def _divide_beside(self, activations_nbytes: int) -> None:
        """A plan for activations was made: units have the rest, on all ranks alike."""
        self._dividing.beside(-self._least(-activations_nbytes, "memory.device"))
        self._apply_division()

    def _apply_division(self) -> None:
        self.device_pool.capacity_nbytes = self.division.total
        self.backward.hold_weights = self.division.hold_weights
        self.prefetcher.resize(self.division.window)
        for make_room in self.on_division:
            make_room()

    def leaves(self) -> Mapping[nn.Module, tuple[Unit, ...]]:
        """Modules whose units are gathered as one: one rank alone need not."""
        return self.construction.builder.leaves if self.world_size > 1 else {}

    def streams(self, unit: Unit) -> bool:
        """With one rank and no accelerator, a unit in host memory is its own flat buffer."""
        return unit.home is Tier.NVME or self.world_size > 1 or self.device.type != "cpu"

    def _fits_staging(self, unit: Unit) -> bool:
        """On an accelerator, a unit that stays has a copy of its shard in pinned host memory."""
        return self.device.type == "cpu" or unit.shard_nbytes <= self._piece_nbytes

    @property
    def _piece_nbytes(self) -> int:
        """What one buffer takes through which shards go to an accelerator."""
        return budget.piece_nbytes(self.storage.host_nbytes - self.storage.resident_nbytes)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are added over ranks."""
        return torch.float32 if self.recipe.partition.reduce_dtype == "fp32" else self.dtype

    def _device_ceiling(self) -> int:
        if self.device.type != "cpu":
            return torch.cuda.mem_get_info(self.device)[0] // 2
        return free_host_nbytes() // 2

    # --- what modules call -------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.construction.active:
            if self.values.loading is not None:
                self.values.end_load()
            self.connected().enter(module, args)

    def _leave(self, module: nn.Module, output: object) -> None:
        if self.hooks is not None:
            self.hooks.leave(module, output)

    def _touch(self, param: nn.Parameter) -> None:
        if self.construction.active:
            self.construction.touch(param)
        else:
            self.connected().touch(param)

    def _deep_copy(self, param: nn.Parameter) -> nn.Parameter:
        if self.construction.active:
            return self.construction.plain_copy(param)
        raise StateError(
            "copy.deepcopy of a model whose parameters are sharded: the copy would hold every weight in this "
            "process's memory. Build a second model under its own infinity.Init and load "
            "model.state_dict() into it"
        )

    # --- what the mover asks -----------------------------------------------------------------

    def fetch(self, unit: Unit, memory: memoryview, start: int = 0) -> Transfer:
        return self.updates.fetch(unit, memory, start)

    def resident(self, unit: Unit) -> Tensor | None:
        resident = self.tiers.residents.get(unit.index)
        return None if resident is None else resident.weight

    def fetch_waits_for(self, unit: Unit) -> str:
        return self.updates.fetch_waits_for(unit)

    def updated_in_place(self, unit: Unit) -> Callable[[], object]:
        return self.updates.updated_in_place(unit)

    def leave_in_peace(self, unit: Unit) -> None:
        self.backward.finish()  # its gradient may still be on its way to the update
        self.updates.leave_in_peace(unit)

    def gather_exact(self, unit: Unit, shard: Tensor) -> Tensor:
        if self.collectives is None:
            return shard
        full = torch.empty(unit.numel, dtype=shard.dtype)
        unit.shard_of(full).copy_(shard)
        full = full.to(self.device)
        self.collectives.gather(unit.index, unit.name, full, lambda: None).wait()
        return full.cpu()

    # --- the step ----------------------------------------------------------------------------

    def step(self, max_grad_norm: float | None) -> float | None:
        """Commit the gradients of this step: their global norm, or None when there were none."""
        self.values.end_load()
        self.connected().let_go()
        self.stalls("collective", self.backward.finish)
        if not self.backward.synced:
            self._count_step()
            return None
        self.connected().check_gradients()
        total = self.updates.total_sum_of_squares()
        if self.collectives is not None:
            [total] = self.collectives.sum([total], "the gradient norm")
        norm = math.sqrt(total) / self.updates.loss_scale if math.isfinite(total) else total
        if math.isfinite(norm):
            updated = list(self.updates.ready)
            self.updates.commit(1.0 if max_grad_norm is None else clip_coefficient(norm, max_grad_norm))
            # copies fetched after the unit's gradients were complete
            self.prefetcher.forget(set(updated) - self.prefetcher.staying)
        self._count_step()
        self.backward.reset()
        self._conclude_pass()
        return norm

    def _count_step(self) -> None:
        """From now on collectives belong to the next step: a rank that is a step behind is found."""
        if self.collectives is not None:
            self.collectives.step += 1

    def _conclude_pass(self) -> None:
        """Keep the figures of the pass that ended; begin the next."""
        self.activations.end_step()
        read, written = self.updates.planned_read, self.updates.planned_written
        fetched = self.prefetcher.planned
        self.on_demand = self.prefetcher.on_demand
        self.planned = None
        if fetched is not None:
            on_nvme = (self.units[i] for i in fetched if self.units[i].home is Tier.NVME)
            read_weights = sum(unit.shard_nbytes for unit in on_nvme)
            before = self._update_mark
            self.planned = (read_weights + read - before[0], written - before[1])
        self._update_mark = (read, written)
        self.prefetcher.end_training_pass()

    def peak_nbytes(self) -> dict[str, int]:
        """The most that each tier held at one time (bytes)."""
        storage = self.storage
        peaks = {"device": self.device_pool.peak_nbytes, "host": storage.host_pool.peak_nbytes}
        return peaks | ({"nvme": storage.volume.peak_nbytes} if storage.volume else {})

    def budgets(self) -> dict[str, int | None]:
        budgets: dict[str, int | None] = {"device": self.division.total, "host": self.storage.host_nbytes}
        return budgets | ({"nvme": None} if self.storage.volume else {})

    def forget_step(self) -> None:
        """``zero_grad()`` without ``step()``."""
        if self.hooks is not None:
            self.backward.reset()

    def synchronize(self) -> None:
        """Block until every update has landed."""
        if self.hooks is not None:
            self.updates.drain()

    # --- the end ----------------------------------------------------------------------------

    def meet(self) -> None:
        """Return when every rank has built its model, and all are the same.

        Raises:
            DivergenceError: They are not.
            PeerError: Another rank failed while it built its own.
        """
        if self.collectives is not None:
            units = [(unit.home.name, [(s.offset, *s.shape) for s in unit.segments]) for unit in self.units]
            numel = sum(segment.numel for unit in self.units for segment in unit.segments)
            where = f"of the model: {len(units)} units, {numel} parameters"
            self.collectives.check(zlib.crc32(repr(units).encode()), where)

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others, and everyone here who waits; any thread."""
        self._give_up(error)
        if self.collectives is not None:
            self.collectives.fail(error)

    def _give_up(self, error: BaseException) -> None:
        """Nobody here may wait for a buffer that will not come back."""
        self._failure = self._failure or error
        storage = getattr(self, "storage", None)  # this may happen while it is built
        for pool in (getattr(self, "device_pool", None), storage and storage.host_pool):
            if pool is not None:
                pool.fail(self._failure)

    def peer_error(self, what: str, error: RuntimeError) -> PeerError:
        """Why a collective of the caller's own did not end: ``error``, with the rank at fault."""
        if self.collectives is None:
            return PeerError(f"{what}: {error}")
        return self.collectives.peer_error(what, error)

    def close(self) -> None:
        """Give back files, memory and threads. May be called twice.

        On the way out of an exception the other ranks learn of it.
        """
        if self in opened:
            opened.discard(self)
            error = sys.exception() or getattr(sys, "last_value", None)
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                self.fail(error)
                if self.hooks is not None:
                    self.updates.abandon(error)
            elif self.hooks is not None:
                with contextlib.suppress(Exception):  # it has surfaced, or nobody waits for it any more
                    self.updates.drain()  # gathers in flight wait for updates
        self.stack.close()

    def _least(self, value: int, where: str) -> int:
        """The least ``value`` of all ranks, which must decide alike."""
        return value if self.collectives is None else self.collectives.least([value], where)[0]
