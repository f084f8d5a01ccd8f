"""Builds the parts of one rank and connects them to one model; with :mod:`infinity.engine.executor` all of them.

[Note: when something fails]
An error surfaces where somebody waits: for a disk, a peer, a buffer. Those who do not wait must learn of
it, too. So whoever sees an error that ends the run here (a collective, the update pipeline, ``close``
on the way out of an exception) calls :meth:`Runtime.fail`: other ranks are told beside the collectives,
and nobody here waits any longer for a buffer that will not come back.
"""

import contextlib
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infinity.activations.activations import Activations
from infinity.activations.cache import TensorCache
from infinity.activations.channels import measure_hardware, open_shelves
from infinity.app.recipe import Recipe
from infinity.comm.collectives import Collectives
from infinity.comm.machine import agree, decide, free_host_nbytes, join_ranks
from infinity.core import budget
from infinity.core.config import SettingError
from infinity.core.errors import PeerError, StateError
from infinity.core.plan import Hardware
from infinity.core.tier import Tier
from infinity.engine.device_budget import Beside
from infinity.engine.executor import Connection
from infinity.engine.full_values import Values, watch
from infinity.engine.hooks import dress
from infinity.engine.registry import opened, served
from infinity.nvme.run_directory import leftovers_line, new_run_id
from infinity.observe.listener import Listener
from infinity.observe.stalls import Stalls
from infinity.observe.timeline import Timeline
from infinity.optim.rules import prepare
from infinity.partition.builder import UnitBuilder
from infinity.partition.init_context import Construction
from infinity.partition.parameters import serve
from infinity.partition.unit import Unit
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Runtime:
    """Everything that serves the models of one ``Init`` on this rank."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.dtype = DTYPES[recipe.train.dtype]
        self.device = join_ranks(recipe.partition.timeout_s)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        prepare(self.dtype, self.reduce_dtype if self.world_size > 1 else self.dtype)
        self.stack = contextlib.ExitStack()
        self.timeline = Timeline(enabled=recipe.observe.timeline)
        self.stalls = Stalls(self.timeline)
        self.values = Values(self)
        self.connection: Connection | None = None
        self.on_division: list[Callable[[], None]] = []  # called when the device budget was divided anew
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
        host_nbytes = self.least(memory.host or free_host_nbytes() // 2, "memory.host")
        self.storage = Storage(memory, host_nbytes, self.dtype, on_gpu=self.on_gpu)
        self.stack.callback(self.storage.close)
        self.storage.open_files(self.run_id, self.rank, self.timeline)
        self.tiers = Tiers(self.storage, self.gather_exact)
        self.activations = self._make_activations()
        self.stack.callback(self.activations.close)

    def _make_activations(self) -> Activations:
        memory, storage = self.recipe.memory, self.storage
        shelves = open_shelves(
            self.device, storage.host_pool, self.piece_nbytes, storage.volume, storage.engine
        )
        if memory.activations == "offload" and not shelves:
            wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
            raise SettingError("memory.activations", "offload", wanted)
        cache = TensorCache(self.device, shelves, lambda wait: self.stalls("activation", wait))
        recomputed = self.recipe.train.schedule == "layer"  # by itself: little is left to plan
        policy = memory.activations or ("keep" if memory.device is None or recomputed else "plan")
        return Activations(
            cache, policy, self._hardware, Beside(self),
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
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def units(self) -> list[Unit]:
        return self.construction.builder.units

    def connected(self, *, clips: bool | None = None) -> Connection:
        """What serves the units; made now if it was not, or not for updates that clip, or do not.

        Args:
            clips: Whether gradients are clipped; None: as they are, or as without an optimizer.

        Raises:
            BudgetError: ``memory.device`` is too small; the message has the arithmetic.
        """
        before = self.connection
        if before is None or clips not in (None, before.clips):
            if before is not None:
                before.close()
            hooks = None if before is None else before.hooks
            self.connection = Connection(self, clips=clips is not False, hooks=hooks)
        assert self.connection is not None
        return self.connection

    # --- what parts ask ----------------------------------------------------------------------

    def leaves(self) -> Mapping[nn.Module, tuple[Unit, ...]]:
        """Modules whose units are gathered as one: one rank alone need not."""
        return self.construction.builder.leaves if self.world_size > 1 else {}

    def streams(self, unit: Unit) -> bool:
        """With one rank and no accelerator, a unit in host memory is its own flat buffer."""
        return unit.home is Tier.NVME or self.world_size > 1 or self.on_gpu

    @property
    def piece_nbytes(self) -> int:
        """What one buffer takes through which shards go to an accelerator."""
        return budget.piece_nbytes(self.storage.host_nbytes - self.storage.resident_nbytes)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are added over ranks."""
        return torch.float32 if self.recipe.partition.reduce_dtype == "fp32" else self.dtype

    def least(self, value: int, where: str) -> int:
        """The least ``value`` of all ranks, which must decide alike."""
        return value if self.collectives is None else self.collectives.least([value], where)[0]

    def gather_exact(self, unit: Unit, shard: Tensor) -> Tensor:
        """Full values on the CPU, ``(numel,)``, from every rank's ``shard``; every rank must call."""
        if self.collectives is None:
            return shard
        full = torch.empty(unit.numel, dtype=shard.dtype)
        unit.shard_of(full).copy_(shard)
        full = full.to(self.device)
        self.collectives.gather(unit.index, unit.name, full, lambda: None).wait()
        return full.cpu()

    # --- what modules call -------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.construction.active:
            if self.values.loading is not None:
                self.values.end_load()
            self.connected().hooks.enter(module, args)

    def _leave(self, module: nn.Module, output: object) -> None:
        if self.connection is not None:
            self.connection.hooks.leave(module, output)

    def _touch(self, param: nn.Parameter) -> None:
        if self.construction.active:
            self.construction.touch(param)
        else:
            self.connected().hooks.touch(param)

    def _deep_copy(self, param: nn.Parameter) -> nn.Parameter:
        if self.construction.active:
            return self.construction.plain_copy(param)
        raise StateError(
            "copy.deepcopy of a model whose parameters are sharded: the copy would hold every weight in this "
            "process's memory. Build a second model under its own infinity.Init and load "
            "model.state_dict() into it"
        )

    # --- the step ----------------------------------------------------------------------------

    def step(self, max_grad_norm: float | None) -> float | None:
        """Commit the gradients of this step: their global norm, or None when there were none."""
        self.values.end_load()
        return self.connected().step(max_grad_norm)

    def peak_nbytes(self) -> dict[str, int]:
        """The most that each tier held at one time (bytes)."""
        storage = self.storage
        peaks = {"device": self.connected().device_pool.peak_nbytes, "host": storage.host_pool.peak_nbytes}
        return peaks | ({"nvme": storage.volume.peak_nbytes} if storage.volume else {})

    def budgets(self) -> dict[str, int | None]:
        device_nbytes = self.connected().division.total
        budgets: dict[str, int | None] = {"device": device_nbytes, "host": self.storage.host_nbytes}
        return budgets | ({"nvme": None} if self.storage.volume else {})

    def forget_step(self) -> None:
        """``zero_grad()`` without ``step()``."""
        if self.connection is not None:
            self.connection.backward.reset()

    def synchronize(self) -> None:
        """Block until every update has landed."""
        if self.connection is not None:
            self.connection.updates.drain()

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
        pools = [self.connection.device_pool] if self.connection is not None else []
        for pool in (*pools, *([] if storage is None else [storage.host_pool])):
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
                if self.connection is not None:
                    self.connection.updates.abandon(error)
            elif self.connection is not None:
                with contextlib.suppress(Exception):  # it has surfaced, or nobody waits for it any more
                    self.connection.updates.drain()  # gathers in flight wait for updates
        self.stack.close()
