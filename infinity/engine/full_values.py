"""Reads and writes full values of parameters: ``gathered``, state dictionaries of model and optimizer.

Everything here works unit by unit, so it needs one unit of memory beside what it returns. Every rank
must take part, because full values are gathered from all of them.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.comm.ranks import all_ranks_or_raise
from infinity.core.errors import BudgetError, InfinityError, StateError
from infinity.core.nbytes import format_nbytes, rounded
from infinity.core.process import UninterruptedExit, uninterrupted
from infinity.engine.executor import StepExecutor
from infinity.partition.init_context import Construction
from infinity.partition.mover import Stored
from infinity.partition.tiles import TiledParameter, compute_in_tiles, compute_whole
from infinity.partition.unit import Unit
from infinity.shards.tiers import Tiers


class FullValues:
    """Reads and writes the full values of one model's parameters.

    ``executor`` returns what runs the model, and makes it if there is none. With ``every_rank`` every rank,
    not only rank 0, gets the values of ``state_dict()``.
    """

    def __init__(
        self, tiers: Tiers, construction: Construction, executor: Callable[[], StepExecutor]
    ) -> None:
        self.units, self.ranks, self.tiers = construction.builder.units, tiers.ranks, tiers
        self.construction, self._executor = construction, executor
        self.every_rank = False
        self._writable = 0  # units in host memory that a block may write now
        self.loading: contextlib.ExitStack | None = None  # of the module that load_state_dict fills now
        self._destination: weakref.ref[Any] | None = None  # the dictionary that is being filled, and what
        self._exported: dict[int, Tensor | None] = {}  # went into it, by id of the parameter

    @contextlib.contextmanager
    def gathered(self, params: Iterable[nn.Parameter], modify: bool) -> Iterator[None]:
        units = self.units.holding(params)
        if modify:
            updates = self._executor().updates
            updates.wait_for_gradients()  # those that are on the way from other ranks
            for unit in units:
                if unit.index in updates.ready:
                    raise StateError(
                        f"{unit.name} has gradients of a step that is not over; write weights after step(), "
                        "or drop the gradients with optimizer.zero_grad() first"
                    )
            updates.drain()  # an update in flight would write over them
            updates.records.land_residents()  # whose memory the block writes
        tiled = {id(s.whole): s.whole for unit in units for s in unit.segments if s.is_tile}
        with UninterruptedExit() as stack:
            with uninterrupted:
                for unit in units:
                    if not any(segment.is_tile for segment in unit.segments):
                        stack.enter_context(self.full(unit, modify))
                for param in tiled.values():
                    stack.enter_context(self._full_tiles(param, modify))
            yield

    @contextlib.contextmanager
    def _full_tiles(self, param: nn.Parameter, modify: bool) -> Iterator[None]:
        """Hold the full values of a parameter in tiles, or use those of an outer block."""
        placeholder, outer = param.data, type(param) is nn.Parameter
        try:
            if not outer:
                param.data = self._joined(param, param.device)
                compute_whole(param)
            with torch.no_grad():
                yield
            self._executor()  # raises if the model was closed meanwhile
            for unit, segment in self.units.places(param) if modify else ():
                rows = segment.rows
                with self.full(unit, modify=True):
                    segment.param.copy_(param[rows.start : rows.stop])
        finally:
            if not outer:
                param.data = placeholder
                compute_in_tiles(param)

    def _joined(self, param: nn.Parameter, device: torch.device) -> Tensor:
        places = self.units.places(param)
        values = torch.empty(places[0][1].whole_shape, dtype=places[0][0].dtype, device=device)
        for unit, segment in places:
            with self.full(unit, modify=False):
                values[segment.rows.start : segment.rows.stop].copy_(segment.param)
        return values

    @contextlib.contextmanager
    def full(self, unit: Unit, modify: bool) -> Iterator[None]:
        """Hold the full values of a unit; what the block wrote is dropped if it raises.

        What it may write of a unit in host memory is copied before, in that budget; BudgetError: there is no
        room beside copies of other units.
        """
        with contextlib.ExitStack() as copies:
            yield from self._full(unit, modify, copies)

    def _full(self, unit: Unit, modify: bool, copies: contextlib.ExitStack) -> Iterator[None]:
        executor, before, stored = self._executor(), None, False
        prefetcher = executor.prefetcher
        if streams := prefetcher.streams(unit.index):
            with prefetcher.visiting():
                prefetcher.use(unit.index, ())
        home: Tensor | None = None  # the memory of all ranks, where each writes to a copy of its own
        try:
            assert unit.flat is not None
            unit.check_data(unit.segments)
            shared = not streams and self.ranks.memory is not None
            if modify and shared and executor.hooks.unit_of(unit.flat) is unit:  # else an outer block's copy
                home = unit.flat
                unit.attach(self._copy(home, unit, copies))
            if modify:
                shard = unit.shard_of(unit.flat)
                before = shard.clone() if streams else self._copy(shard, unit, copies)
                self._writable += not streams
                copies.callback(self._end_write, not streams)
            with torch.no_grad():
                yield
            self._executor()  # raises if the model was closed meanwhile
            if before is not None:
                self._store(unit, unit.flat, before)
            unit.check_data(unit.segments)
            stored = True
        finally:
            undone = modify and not stored and unit.flat is not None
            if undone and before is not None:
                assert unit.flat is not None
                unit.allow_writes()
                if not streams and home is None:
                    unit.shard_of(unit.flat).copy_(before)
            if home is not None and unit.flat is not None:
                unit.attach(home)
            if streams and unit.lease is not None:  # else the model was closed meanwhile
                if undone:  # it is fetched again
                    executor.hooks.release_unscoped_units()
                with prefetcher.visiting():
                    prefetcher.unpin(unit.index)
                if modify:
                    prefetcher.residents.release([Stored(unit.index)])
                if undone:
                    prefetcher.forget([unit.index])

    def _copy(self, values: Tensor, unit: Unit, copies: contextlib.ExitStack) -> Tensor:
        storage = self.tiers.storage
        pool, chunk_nbytes = storage.host_pool, storage.chunk_nbytes if storage.memory.nvme else 0
        lease, nbytes = None, values.nbytes
        if pool.leased_nbytes + rounded(nbytes) + chunk_nbytes <= pool.capacity_nbytes:  # to be stored by
            lease = pool.try_lease(nbytes, who=f"a copy of {unit.name} while it may be written")
        if lease is None and self._writable:  # one unit alone may be beside the budget
            raise BudgetError(
                f"no room for a copy of {unit.name} ({format_nbytes(nbytes)}) while a block may write it "
                f"and {self._writable} other units: write fewer parameters, or raise {pool.key}",
                pool.key,
            )
        if lease is None:
            return values.clone()
        return copies.enter_context(lease).tensor.view(values.dtype).copy_(values)

    def _end_write(self, count: int) -> None:
        self._writable -= count

    def _store(self, unit: Unit, flat: Tensor, before: Tensor) -> None:
        if self.ranks.collectives is not None:
            values = flat.cpu()
            self.ranks.collectives.broadcast(values, unit.index, unit.name)
            flat.copy_(values)
        self.tiers.set_weights(unit, unit.shard_of(flat).cpu(), before.cpu())
        unit.renew()
        unit.allow_writes()
        self.ranks.wait_for_writes(unit.name)

    @property
    def within_step(self) -> bool:
        """Return whether there are gradients of a step that is not over."""
        return bool(self._executor().gradients.received)

    def check_step_over(self) -> None:
        if self.within_step:
            raise StateError(
                "the model has gradients of a step that is not over: save a checkpoint, or load or make an "
                "optimizer, after step(), or after optimizer.zero_grad(), which drops the gradients"
            )

    def register_hooks(self, module: nn.Module) -> list[RemovableHandle]:
        """Let a module's ``state_dict`` and ``load_state_dict`` see full values."""
        # Functions, which copy.deepcopy of a module shares; with bound methods it would clone the runtime.
        return [
            module.register_state_dict_post_hook(lambda *args: self._export(*args)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(lambda *args: self._begin_load(*args)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(lambda *_: self.end_load()),  # type: ignore[no-untyped-call]
        ]

    def _export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put full values on the CPU in place of placeholders; ranks other than 0 get no entry."""
        if self._destination is None or self._destination() is not state_dict:
            exported: dict[int, Tensor | None] = {}  # goes with the dictionary
            self._destination = weakref.ref(state_dict, lambda _: exported.clear())
            self._exported = exported
        for name, param in module._parameters.items():
            key = prefix + name
            if param is None or key not in state_dict or not self.units.places(param):
                continue
            if id(param) not in self._exported:  # a tied weight is one tensor under two names
                self._exported[id(param)] = self._full_value(param)
            value = self._exported[id(param)]
            if value is None:
                del state_dict[key]
            else:
                keeps_vars = isinstance(state_dict[key], nn.Parameter)
                state_dict[key] = nn.Parameter(value, param.requires_grad) if keeps_vars else value

    def _full_value(self, param: nn.Parameter) -> Tensor | None:
        wanted = self.every_rank or self.ranks.rank == self.ranks.first
        if self.construction.active:
            self.construction.touch(param)
            return param.detach().clone()
        if isinstance(param, TiledParameter):  # one that `gathered` holds whole is none
            values = self._joined(param, torch.device("cpu"))
            return values if wanted else None
        with self.gathered([param], modify=False):
            value = self.whole(param)
            return value.to("cpu", copy=True) if wanted else None

    def whole(self, param: nn.Parameter) -> Tensor:
        """Return the whole value of a gathered parameter, which may be divided; every rank must call."""
        part = self.units.parts.get(id(param))
        return param.detach() if part is None else part.whole(param.detach())

    def _begin_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Prepare for ``load_state_dict``, which is about to copy into this module's own parameters."""
        self.end_load()  # of the parent: its own parameters come before its children's
        if metadata.get("assign_to_params_buffers", False):
            raise StateError(
                "load_state_dict(assign=True) would replace sharded parameters by whole ones. Load with "
                "assign=False, which copies into them, unit by unit"
            )
        building = self.construction.active
        for name, param in dict.items(module._parameters):
            part, value = self.units.parts.get(id(param)), state.get(prefix + name)
            if part is not None and value is not None:  # ``state`` is a copy that torch made
                state[prefix + name] = part.of_whole(value, join=building)
                part.digests.clear()  # it may be written
        if not building:
            own = [p for p in module._parameters.values() if p is not None]
            with uninterrupted, contextlib.ExitStack() as stack:
                stack.enter_context(self.gathered(own, modify=True))
                self.loading = stack.pop_all()

    def end_load(self) -> None:
        """Store what ``load_state_dict`` copied, also if it raised midway."""
        if self.loading is not None:
            with uninterrupted:
                stack, self.loading = self.loading, None
                stack.close()

    def optimizer_fields(self) -> dict[int, dict[str, Tensor]]:
        """Return counts, exact weights and moments by parameter ``id``, on rank 0; every rank must call."""
        self.units.parts.check_none("the optimizer's state_dict")
        self._executor().updates.drain()
        out: dict[int, dict[str, Tensor]] = {}
        for unit in self.units:
            trained = [s for s in unit.segments if s.whole.requires_grad or s.steps]
            if not trained:
                continue
            shards = self.tiers.shard_fields(unit)
            fulls = [self.tiers.gather(unit, shard) for shard in shards]
            for s in trained if self.ranks.rank == 0 else ():
                fields = out.setdefault(id(s.whole), {"step": torch.tensor(float(s.steps), device="cpu")})
                for name, full in zip(self.tiers.layout.full_names, fulls, strict=True):
                    if s.first == 0:
                        fields[name] = torch.empty(s.whole_shape, dtype=full.dtype, device="cpu")
                    fields[name].view(-1)[s.first : s.first + s.numel] = full[s.offset : s.stop]
        return out

    @contextlib.contextmanager
    def averaged(self, units: Iterable[Unit], *, ema: bool = True) -> Iterator[None]:
        """Hold averages in the place of weights of ``units``; every rank must enter, between two steps.

        Unless ``ema``: hold the weights.
        """
        if not ema:
            yield
            return
        self.check_step_over()
        self.tiers.check_averages(self.units)
        updates, trained = self._executor().updates, [unit for unit in units if unit.home.trains]
        updates.drain()
        updates.records.land_residents()  # whose memory is written
        self.ranks.least(1, "averages of weights")  # no rank uses the weights any more
        with self._ending_together(), UninterruptedExit() as stack:
            with uninterrupted, all_ranks_or_raise(self.ranks, "putting averages in the place of weights"):
                self._change(trained)
                stack.callback(self._change, trained)
                for unit in trained:
                    stack.callback(self.tiers.put_average(unit))
                stack.callback(self._change, trained)
                self._change(trained)
            with self._ending_together():  # no rank uses the averages any more
                yield

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Wait for other ranks at the end of the block, also if it raises: they read what is written next."""
        try:
            yield
        except Exception:
            if self.ranks.memory is not None or not self.ranks.on_accelerator:
                with contextlib.suppress(InfinityError):  # another rank has ended: this one's own error tells
                    self.ranks.least(1, "averages of weights")
            raise
        self.ranks.least(1, "averages of weights")

    def _change(self, units: Iterable[Unit]) -> None:
        """Take note that weights of units are written, or will be: copies of them are stale."""
        executor = self._executor()
        executor.hooks.release_unscoped_units()
        executor.prefetcher.forget()
        if self.ranks.collectives is not None and self.ranks.collectives.server is not None:
            self.ranks.collectives.server.changes += 1
        for unit in units:
            unit.renew()
            unit.allow_writes()

    def clear_optimizer_fields(self) -> None:
        """Set moments and step counts to zero, as in a new optimizer; exact weights stay."""
        if self._executor().updates.hypers.groups:
            self.check_step_over()
        trained = [unit for unit in self.units if any(segment.steps for segment in unit.segments)]
        if trained:
            self._executor().updates.drain()
            self._executor().prefetcher.forget()  # copies of them may still be asked of the device
        for unit in trained:
            exact, *moments = self.tiers.shard_fields(unit)
            self.tiers.set_shard_fields(unit, (exact, *map(torch.zeros_like, moments)))
            for segment in unit.segments:
                segment.steps = 0

    def load_optimizer_fields(self, fields: dict[int, dict[str, Tensor]]) -> None:
        """Replace step counts, moments and, where given, exact weights; the model's weights follow."""
        self.units.parts.check_none("loading the optimizer's state_dict")
        self._executor().updates.drain()
        self._executor().prefetcher.forget()
        self.ranks.wait_for_writes("the optimizer's state")  # nor does a rank read any more
        for unit in self.units:
            given = [s for s in unit.segments if id(s.whole) in fields]
            if not given:
                continue
            shards, low = self.tiers.shard_fields(unit), unit.shard_start
            for s in given:
                s.steps = int(fields[id(s.whole)]["step"])
            for s, start, first, numel in unit.within(low, low + unit.shard_numel):
                saved = fields.get(id(s.whole), {})
                for shard, key in zip(shards, self.tiers.layout.full_names, strict=True):
                    if key in saved:  # torch.optim.AdamW has no exact weight beside the model's
                        values = saved[key].reshape(-1)[first : first + numel]
                        shard[start - low :][:numel].copy_(values)
            self.tiers.set_shard_fields(unit, shards)
            unit.renew()
        self.ranks.wait_for_writes("the optimizer's state")
