"""Runs the training steps of one model: builds the parts that serve its units, and drives a step.

Also the settings of one ``Init``, and the choice of where updates run.
"""

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from infinity.activations.controller import ActivationBudget, Activations
from infinity.comm.collectives import Server
from infinity.comm.ranks import Ranks
from infinity.core import budget
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.errors import BudgetError, StateError
from infinity.core.lifecycle import Tier, UnitState
from infinity.core.nbytes import rounded
from infinity.core.plan import Hardware, Place, Profile
from infinity.core.process import weakly
from infinity.device.accelerator import cached_nbytes, memory_nbytes
from infinity.device.machine import background_threads, free_host_nbytes, rank_threads, total_host_nbytes
from infinity.device.memory import CountingPool, DevicePool, HostPool, Pool
from infinity.engine.device_budget import UnitBudget
from infinity.engine.gradients import GradientPath, Gradients, HostPools
from infinity.engine.hooks import Hooks
from infinity.nvme.probe import measure
from infinity.observe.timeline import TimedRule, Timeline
from infinity.optim.rule import Rule
from infinity.optim.rules import (
    CHUNK_PIECE_NUMEL,
    SHARD_PIECE_NUMEL,
    DeviceRule,
    HostRule,
    PlacedRule,
    ResidentRules,
    clip_coefficient,
    measure_rates,
)
from infinity.partition.builder import PartitionConfig
from infinity.partition.init_context import Construction
from infinity.partition.mover import KeptSlices, Staging, UnitMover
from infinity.partition.prefetcher import Prefetcher
from infinity.partition.unit import Unit
from infinity.planner.passing import Rooms
from infinity.planner.search import device_error
from infinity.shards.homes import DeviceShards, HostHome
from infinity.shards.journal import DurabilityConfig, Resume
from infinity.shards.pipeline import UpdatePipeline
from infinity.shards.tiers import Tiers
from infinity.shards.updates import Updates

Dtype = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds the settings of one ``Init``."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    dtype: Dtype = "auto"  # of compute; auto: bf16 where every rank multiplies it fast, else fp32
    accumulate_dtype: Literal["fp32", "fp16"] = "fp32"  # in which products of fp16 add up
    device: str | None = None  # such as ``cuda:1``; None: the accelerator with the rank's number, if any
    rule: str = "adamw"  # by which an optimizer will update; see infinity.optim.rules.find_rule
    loss_scale: float = 2.0**16  # the first one of fp16 training
    run_name: str | None = None  # names the run's directories on NVMe; None: a new id
    resume: Resume = "auto"  # whether an interrupted run of that name goes on; must: there has to be one
    timeline: bool = False  # records when everything moves and computes
    layer_schedule: bool = False  # all micro-batches go through a block before the next
    stages: bool = False  # whose ranks compute blocks in turn


def engine_config(config: Any) -> EngineConfig:
    """Return the engine's part of a recipe, or ``config`` itself; None stands for the defaults."""
    found = EngineConfig() if config is None else getattr(config, "engine", config)
    if not isinstance(found, EngineConfig):
        raise TypeError(
            f"wanted a recipe; got {type(config).__name__}: write "
            "infinity.Init(infinity.load_recipe('recipe.yaml'))"
        )
    return found


def check_mesh(config: EngineConfig) -> None:
    """Raise a SettingError for a setting that does not go together with a mesh of ranks."""
    per_node, shared, copies = config.partition.ranks_per_node, config.memory.shared, config.durability.copies
    for key, value, allowed in (
        ("train.stages", config.stages, (False,)), ("memory.shared", shared, ("auto", "never")),
        ("durability.copies", copies, (1,)), ("partition.ranks_per_node", per_node, (None,)),
    ):  # fmt: skip
        if value not in allowed:
            raise SettingError(key, value, f"{' or '.join(map(str, allowed))}, with a mesh of ranks")


@dataclass(slots=True)
class PassFigures:
    """Holds time and bytes of the passes of a step."""

    on_demand: int = 0  # uses that no plan foresaw
    tiles_used: int = 0  # tiles of experts that were used, of those that come and go
    planned: tuple[int, int] | None = None  # bytes that were to be read and to be written; None: no plan
    moved: tuple[int, int] = (0, 0)  # bytes that updates and records were to move since the beginning


class StepExecutor(ActivationBudget):
    """Runs the training steps of one model, and divides its budgets again when more is known.

    Gradients that are clipped (``clips``) are kept until ``step()``; a model that runs before it has an
    optimizer is divided for as if they were. ``on_failure`` is called with the error of an update, on the
    pipeline's thread.
    """

    def __init__(
        self, construction: Construction, tiers: Tiers, activations: Activations, config: EngineConfig,
        timeline: Timeline, *, clips: bool, on_failure: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.units, self.tiers, self.activations = construction.builder.units, tiers, activations
        self.timeline = timeline
        self.figures = PassFigures()  # of the last step
        self.blocks: tuple[Sequence[set[int]], Sequence[set[int]], str] | None = None
        storage, ranks = tiers.storage, tiers.ranks
        self.units.parts.watch(construction.roots)
        # One rank alone need not gather what is in a leaf as one.
        leaves = construction.builder.leaves if ranks.world_size > 1 else {}
        rules = make_rules(storage.rule, config.memory, ranks, storage.layout.dtype)
        device, there = ranks.device, ranks.on_accelerator
        ceiling_nbytes = (memory_nbytes(device)[0] if there else free_host_nbytes()) // 2
        with contextlib.ExitStack() as stack:
            self.budget = UnitBudget(
                self.units, leaves, construction.roots, tiers, ranks.least(ceiling_nbytes, "memory.device"),
                policy=activations.policy, clips=clips,
                updates_nbytes=device_nbytes(chain(*rules.values()), ranks),
            )  # fmt: skip
            tiers.on_device = self.host = None
            if there:
                tiers.on_device = DeviceShards(storage.layout, device)
                stack.callback(tiers.on_device.close)
                self.host = HostPools(*(HostPool(0, device=device) for _ in HostPools._fields))
                for each in self.host:
                    stack.callback(each.close)
                self._resize_host_pools()
            pipeline = self._make_pipeline(rules[Tier.NVME], stack)
            resident = ResidentRules(rules[Tier.HOST], beside=there)
            stack.callback(resident.close)
            self.updates = Updates(
                tiers, resident, pipeline, self.units, clips=clips, every=config.durability.every,
                on_failure=on_failure,
            )  # fmt: skip
            self.updates.stored_gradients.chosen = self.budget.spilled  # an optimizer makes room for them
            nbytes = self.budget.pool_nbytes
            pool = DevicePool(nbytes, device) if there else HostPool(nbytes, key="memory.device")
            self.device_pool: Pool = pool
            stack.callback(self.device_pool.close)
            self._serve(leaves, config, stack)
            activations.budget = self
            total_nbytes = memory_nbytes(device)[1] if there else total_host_nbytes()
            self.hooks.logits.decide(config.memory.logits, lambda: self._pass_nbytes(total_nbytes))
            self.stack = stack.pop_all()  # refers to no module

    def _make_pipeline(
        self, rules: Sequence[PlacedRule], stack: contextlib.ExitStack
    ) -> UpdatePipeline | None:
        """Return what updates shards on NVMe, by the one of ``rules``; None: there is no NVMe."""
        storage, timeline = self.tiers.storage, self.timeline
        if storage.store is None:
            return None
        [background] = rules
        timed: Any = TimedRule(background, timeline) if timeline.enabled else background
        pipeline = UpdatePipeline(
            storage.store.engine, storage.host_pool, storage.layout, timed, depth=storage.staged_chunks()
        )
        stack.callback(pipeline.close)
        return pipeline

    def _serve(
        self, leaves: Mapping[nn.Module, tuple[Unit, ...]], config: EngineConfig,
        stack: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        """Make the parts that bring weights and take gradients, and connect them to the hooks."""
        ranks, pool, staging = self.tiers.ranks, CountingPool(self.device_pool, self.timeline.stall), None
        if self.host is not None and self.budget.host is not None:
            staging = Staging(self.host.staging, self.budget.host.piece, ranks.device)
            if ranks.memory is not None:
                ranks.memory.wait_for_reads = staging.wait_for_uploads
                stack.callback(setattr, ranks.memory, "wait_for_reads", lambda: None)
        kept, storage, nodes = None, self.tiers.storage, ranks.nodes
        if config.partition.gather == "auto" and nodes > 1:
            kept = KeptSlices(
                self.units, storage.host_pool, nodes,
                lambda: ranks.least(self.tiers.spare_nbytes(self.units), "partition.gather"),
            )  # fmt: skip
        self.mover = UnitMover(
            self.units, pool, staging, ranks.collectives, self.timeline.stall, self.updates.wait_until_unused,
            kept,
        )  # fmt: skip
        stack.callback(self.mover.close)
        streaming = [unit for unit in self.units if self.tiers.streams(unit)]
        self.prefetcher = Prefetcher(
            self.mover, {unit.index: unit.gathered_nbytes for unit in streaming}, self.budget.division.window,
            self._can_stay(), self.updates.order, routed=[unit.index for unit in streaming if unit.routed],
        )  # fmt: skip
        path = GradientPath(self.mover, self.updates, pool, self.host)
        stack.callback(path.close)
        if ranks.collectives is not None:
            shard: Any = weakly(self.mover.shard)
            ranks.collectives.serve(Server(shard, weakly(path.take_slice)))
        of_leaves = frozenset(unit.index for leaf in leaves.values() for unit in leaf)
        self.gradients = Gradients(self.units, of_leaves, self.prefetcher, path)
        self.gradients.hold_weights = self.budget.hold_weights
        self.hooks = Hooks(
            self.units, leaves, self.activations, self.prefetcher, self.gradients.pins, self.gradients,
            self._begin_forward,
        )  # fmt: skip
        self.gradients.accumulation.arrived = weakly(self.hooks.take_gradient)
        for unit in set(self.units).difference(streaming):  # its parameters view its home, which is whole
            if unit.state is not UnitState.GATHERED:
                unit.lifecycle.move(UnitState.GATHERED)
                assert isinstance(unit.home, HostHome)
                unit.attach(unit.home.leases[0].whole.view(unit.dtype))
            assert unit.flat is not None
            self.mover.attached[unit.flat.untyped_storage().data_ptr()] = unit

    def clip(self, clips: bool) -> None:
        """Divide the budgets again if clipping changed; while a step has gradients, do nothing."""
        if clips != self.updates.speculation.clips and not self.gradients.received:
            self.hooks.release_unscoped_units()
            self.budget.clip(clips)
            self.updates.speculation.clips = clips
            self._apply_division()

    def divide_again(self, *, accumulates: bool) -> None:
        """Divide the device budget again between two steps, for more waiting gradients, and for states."""
        if self.budget.divide_again(accumulates=accumulates):
            self.prefetcher.forget()  # units that travel in a stored form will not do so any more
            self.tiers.settle(self.units)  # units that were thawed get their moments
            self._apply_division()
        chosen, on_device = frozenset(self.budget.division.on_device), self.tiers.on_device
        if on_device is not None and not self.gradients.received:
            self._bring_home(on_device, but=chosen)
            if chosen != on_device.chosen:
                on_device.chosen = chosen
                on_device.pool.resize(self.budget.states_nbytes)

    def _bring_home(self, on_device: DeviceShards, but: frozenset[int] = frozenset()) -> None:
        indices = on_device.elsewhere(but)
        self.prefetcher.forget(indices)  # copies of them may still be asked of the device
        for index in indices:
            self.tiers.at_home(self.units[index])
            on_device.leave(index)
        if indices:
            self.tiers.ranks.wait_for_writes("shards that came home")

    def hold_blocks(self, blocks: Sequence[set[int]], tiles: Sequence[set[int]], described: str) -> None:
        """Keep any one of ``blocks`` gathered while micro-batches go through it; its tiles, if they fit."""
        before = self.budget.division
        window_nbytes = self.budget.window_for(blocks, described)
        self.blocks = blocks, tiles, described
        if self.budget.division is not before:
            self._apply_division()
        self.prefetcher.hold_blocks(window_nbytes, tiles)

    def share_of_part(self, tile: Unit) -> float:
        """Return the share of the room for a part of a block's experts that ``tile`` takes.

        Tiles of the next part come meanwhile, into as much again.
        """
        room = self.prefetcher.room
        return room.stored.get(tile.index, 0) / max(1, room.part_nbytes)

    def rooms_between_blocks(self, *, together: bool) -> Rooms:
        """Return the room for what blocks return in a layer schedule, while units have their budgets.

        ``together``: blocks take all micro-batches at once.
        """
        stores, given = self.activations.cache.stores, self.tiers.storage.memory.activations
        policy = "plan" if self.activations.policy == "plan" else given
        device, host_pool = self.tiers.ranks.device, self.tiers.storage.host_pool
        pools = list[Pool](self.device_pools)
        if self.tiers.ranks.on_accelerator:
            free = memory_nbytes(device)[0] + cached_nbytes(device)
        else:
            free, pools = free_host_nbytes(), [*pools, host_pool]
        free -= sum(pool.capacity_nbytes - pool.leased_nbytes - pool.kept_nbytes for pool in pools)
        host = host_pool.capacity_nbytes - host_pool.peak_nbytes if Place.HOST in stores else 0
        return Rooms.within(policy, free, host, nvme=Place.NVME in stores, together=together)

    def _begin_forward(self) -> None:
        self.tiers.check_exact(self.units)
        self.updates.records.end_commit()  # what was stepped after the optimizer, a learning rate
        self.divide_again(accumulates=False)
        self.updates.expect()

    def _apply_division(self) -> None:
        # The last reductions of a micro-batch take and put sums, on their threads.
        self.timeline.stall("collective", self.updates.wait_for_gradients)
        division, sums = self.budget.division, self.gradients.path.sums
        self.updates.stored_gradients.place(self.budget.spilled, {*self.updates.ready, *sums.away})
        self._resize_host_pools()
        sums.divide(division.spilled, self.units, ahead=division.ahead)
        self.device_pool.resize(self.budget.pool_nbytes)
        if self.mover.staging is not None and self.budget.host is not None:
            self.mover.staging.piece_nbytes = self.budget.host.piece
        self.gradients.hold_weights = self.budget.hold_weights
        self.prefetcher.can_stay = self._can_stay()
        self.prefetcher.resize(division.window)
        if self.blocks is not None:
            self.hold_blocks(*self.blocks)

    @property
    def device_pools(self) -> list[Pool]:
        on_device = self.tiers.on_device
        return [self.device_pool] if on_device is None else [self.device_pool, on_device.pool]

    def _resize_host_pools(self) -> None:
        """Give each part of the host budget its bytes; residents, chunks and activations have the rest."""
        division, storage = self.budget.host, self.tiers.storage
        if division is None or self.host is None:
            return
        parts = division.gradients, division.weights, division.staging
        storage.host_pool.resize(storage.host_nbytes - sum(parts))
        for pool, nbytes in zip(self.host, parts, strict=True):
            pool.resize(nbytes)

    def _can_stay(self) -> set[int]:
        """Return units that may be updated in place; with an accelerator they have a copy in host memory."""
        fitting, left = set(), math.inf if self.budget.host is None else self.budget.host.stays
        for unit in self.units:  # those that a forward needs first
            if unit.home.tier is Tier.NVME and rounded(unit.shard_nbytes) <= left:
                left -= rounded(unit.shard_nbytes)
                fitting.add(unit.index)
        return fitting

    def capacities(self) -> Sequence[int | None]:
        """Return ``memory.device`` less what units have, and less the least that they need (bytes)."""
        nbytes, division = self.budget.device_nbytes, self.budget.division
        totals = dict.fromkeys((division.total, division.least))
        return [None] if nbytes is None else [nbytes - total for total in totals]

    def _pass_nbytes(self, total_nbytes: int) -> int:
        """Return the bytes that a pass may take of a device's ``total_nbytes``."""
        if self.activations.policy == "plan" and (planned := self.capacities()[-1]) is not None:
            return planned
        return total_nbytes - self.budget.division.states

    def settle(self, capacity_nbytes: int | None, kept_nbytes: int) -> None:
        if capacity_nbytes is not None:
            self.budget.divide_beside(-self.tiers.ranks.least(-kept_nbytes, "memory.device"))
            self._apply_division()

    def refuse(self, profile: Profile, hardware: Hardware) -> BudgetError:
        assert self.budget.device_nbytes is not None
        least, logits = self.budget.division.least, self.hooks.logits.chosen
        return device_error(profile, hardware, self.budget.device_nbytes, least, logits)

    def reduce(self) -> dict[Any, float] | None:
        """Return the global norm of this step's gradients, and wait for them; None: there were none.

        Parameter groups with a key ``adapter`` have a norm for each of its values, all others one for None.
        """
        if self.tiers.storage.volume is not None:
            self.tiers.storage.volume.check()  # raises if another program changed a file of this run
        self.hooks.release_unscoped_units()
        self.gradients.take_unseen()
        self.timeline.stall("collective", self.updates.wait_for_gradients)
        self._check_complete()
        path, hypers, synced = self.gradients.path, self.updates.hypers, self.gradients.completions.synced
        parts = self.units.parts
        if self.tiers.ranks.collectives is not None:  # this rank may have used nothing
            self.updates.records.wait_for_commit()
        squares: dict[Any, list[float]] = {}

        def values() -> list[float]:
            path.finish_parts()
            path.read_norms()
            squares.clear()
            for index in sorted(self.updates.ready):  # the same on all ranks
                pending = self.updates.ready[index]
                squares.setdefault(hypers.party(pending.used), []).append(pending.sum_of_squares)
            sums = (math.fsum(squares.get(party, ())) for party in hypers.parties)
            return [float(synced), parts.squares, float(parts.inputs), *sums]

        everyone = self.tiers.ranks.each(values, 3 + len(hypers.parties), "the gradient norm")
        any_synced, _, _, *totals = (float(each.sum()) for each in everyone.T)
        if not any_synced:
            self._count_step()
            return None
        if parts.mesh is not None:
            parts.check_alike(everyone[:, 1], everyone[:, 2])
        self.prefetcher.forget(self.prefetcher.staying & path.sums.in_parts.keys())  # updated elsewhere
        return {
            party: math.sqrt(total) / hypers.loss_scale if math.isfinite(total) else total
            for party, total in zip(hypers.parties, totals, strict=True)
            if party in (squares or {None})
        }

    def _check_complete(self) -> None:
        """Raise if there are gradients of this step, which no backward pass has completed, or were some."""
        why, completions = "", self.gradients.completions
        if completions.lost:
            why = "a backward pass failed, and the gradients of those before it in this step were dropped"
        elif self.hooks.backward is not None and not completions.synced:
            why = "the last backward pass failed, so what it and those before it left is no gradient"
        elif completions.accumulated:
            why = "every backward pass was inside infinity.no_sync(model): run the last one outside it"
        if why:
            raise StateError(
                f"step(): {why}. Nothing was updated; optimizer.zero_grad() drops the gradients of this step"
            )

    def commit(self, norms: Mapping[Any, float], limits: Mapping[Any, float | None]) -> None:
        """Commit the step of each party whose norm is finite, with gradients clipped to its limit."""
        updates, staying = self.updates, self.prefetcher.staying
        scales = {k: clip_coefficient(v, limits.get(k)) for k, v in norms.items() if math.isfinite(v)}
        if scales and len(scales) < len(norms):
            skipped = {
                i for i, each in updates.ready.items() if updates.hypers.party(each.used) not in scales
            }
            updates.drop(skipped)
            self.prefetcher.forget(staying & skipped)
        updated = set(updates.ready)
        if scales:
            self._choose_interval(updated)
            if not updates.validate(min(scales.values())):
                self.timeline.stall("update", updates.roll_back)
            if updates.stored_gradients.chosen:
                self.timeline.stall("write", updates.land_held)
            updates.commit(scales)
            if not self.tiers.ranks.on_accelerator:  # where uploads of the units wait for them
                wait = partial(self.tiers.ranks.wait_for_writes, "updates of weights")
                self.timeline.stall("collective", wait)
            # copies fetched after the unit's gradients were complete
            self.prefetcher.forget(updated - staying)
        self._count_step()
        self.gradients.reset(committed=bool(scales))
        self.activations.end_step()
        if self.budget.asks_what_a_step_leaves:
            device, pool = self.tiers.ranks.device, self.device_pool
            free, total = memory_nbytes(device)
            free -= pool.capacity_nbytes - pool.leased_nbytes - pool.kept_nbytes  # which it may still take
            left = budget.left_for_states(free, total, cached_nbytes(device))
            self.budget.divide_after_step(self.tiers.ranks.least(left, "memory.device"))
            self._apply_division()
        self._conclude_pass()
        order = self.updates.order  # the states of others would be read ahead in vain
        order.gradients = tuple(unit for unit in order.gradients if unit in updated)

    def _choose_interval(self, updated: Container[int]) -> None:
        records, interval = self.updates.records, self.updates.records.interval
        if interval.chosen or records.commits is None:
            return
        ranks = replace(self.tiers.ranks, everywhere=True)  # all stages record the same steps
        if interval.every == 1:  # the first step
            stores = -ranks.least(-records.stores_residents(updated), "durability.every")
            wanted = interval.wanted or (2 if stores else 1)
            if wanted > 1:  # units on NVMe have a third place then
                room = self.tiers.add_versions(self.units)
                wanted = wanted if ranks.least(room, "durability.every") else 1
            interval.every = wanted
            interval.chosen = interval.wanted is not None or wanted == 1
        elif (measured := interval.measured) is not None:
            records.commits.wait()  # on all ranks: this step may be recorded next
            interval.every = -ranks.least(-measured, "durability.every")
            interval.chosen = True

    def _count_step(self) -> None:
        """Tag collectives from now on with the next step's number, to find a rank that is a step behind."""
        if self.tiers.ranks.collectives is not None:
            self.tiers.ranks.collectives.step += 1

    def _conclude_pass(self) -> None:
        planned, training = self.updates.records.planned, self.prefetcher.training
        before, moved = self.figures.moved, (planned["read"], planned["write"])
        self.figures = PassFigures(training.on_demand, len(self.prefetcher.tiles.used), moved=moved)
        server = None if self.tiers.ranks.collectives is None else self.tiers.ranks.collectives.server
        served = 0
        if server is not None:
            served, server.served = server.served, 0
        if training.fetched is not None and not served:
            staging = self.mover.staging
            piece_nbytes = None if staging is None else staging.piece_nbytes
            weights = sum(self.units[index].home.fetched_nbytes(piece_nbytes) for index in training.fetched)
            self.figures.planned = weights + moved[0] - before[0], moved[1] - before[1]
        self.prefetcher.end_training_pass()

    def retire(self) -> None:
        """Release all that this executor holds, since the model changes and gets another one."""
        self.hooks.release_unscoped_units()
        self.hooks.end(_CHANGED)
        self.prefetcher.forget()
        self.updates.stored_gradients.place(frozenset(), ())
        if self.tiers.on_device is not None:
            self._bring_home(self.tiers.on_device)
        self.stack.close()


_CHANGED = (
    "the model was changed inside `with infinity.Init(model)` since this forward pass: run the forward "
    "again, and then its backward"
)


def reduction_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.partition.reduce_dtype == "fp32" else dtype


#: Measuring, and memory for pieces, are worth it where the device budget is so much larger.
_LEAST_SHARE = 8
#: The accelerator computes the model beside, and its link carries weights: it must be so much faster.
_WORTH = 1.1
#: Of the CPU and the accelerator, who is so much slower updates no unit in host memory: the next step would
#: wait for the units that it has begun.
_SLOWEST = 4
#: Cores that launch kernels and move bytes while others update.
_FEEDING_THREADS = 2
#: Units in host memory that are updated at one time beside an accelerator.
_CALLERS = 4


def make_rules(
    rule: Rule, memory: MemoryConfig, ranks: Ranks, dtype: torch.dtype
) -> dict[Tier, Sequence[PlacedRule]]:
    """Return what updates units, side by side, for each tier of home that they have; measures the drives."""
    # Units on NVMe are updated beside training.
    threads, callers = {Tier.HOST: rank_threads(), Tier.NVME: background_threads()}, 1
    if ranks.on_accelerator:  # all are, on all cores but those that feed the accelerator
        threads = dict.fromkeys(threads, max(1, rank_threads() - _FEEDING_THREADS))
        callers = min(_CALLERS, threads[Tier.HOST])
    each = threads[Tier.HOST] // callers  # more than cores would keep who launches kernels waiting
    rules: dict[Tier, Sequence[PlacedRule]] = {
        Tier.HOST: [HostRule(rule, dtype, threads=each, callers=callers)] * callers,
        Tier.NVME: [HostRule(rule, dtype, threads=threads[Tier.NVME])],
    }
    if not ranks.on_accelerator:
        if memory.updates == "device":
            raise SettingError("memory.updates", "device", "auto or host: there is no accelerator here")
        return rules
    for home in [Tier.HOST, Tier.NVME] if memory.nvme else [Tier.HOST]:
        numel = SHARD_PIECE_NUMEL if home is Tier.HOST else CHUNK_PIECE_NUMEL
        there = DeviceRule(rule, dtype, ranks.device, numel)
        if memory.updates == "device":
            rules[home] = [there]
        elif memory.updates == "auto" and (
            memory.device is None or memory.device >= _LEAST_SHARE * there.nbytes
        ):
            cpu, device = measure_rates(rule, there.layout.dtype, there.device, threads[home])
            if home is Tier.HOST:
                here = rules[home] if cpu * _SLOWEST >= device else []
                rules[home] = [*here, there] if device * _SLOWEST >= cpu else here
            elif is_faster(cpu, device):
                speeds = [measure(Path(directory)).mixed_bytes_per_s for directory in memory.nvme]
                drive = sum(speeds) / (2 * there.layout.bytes_per_element)  # read and written
                if is_faster(cpu, device, drive):
                    rules[home] = [there]
    return rules


def device_nbytes(rules: Iterable[PlacedRule], ranks: Ranks) -> int:
    """Return the accelerator memory that rules take (bytes): the most of any rank."""
    if not ranks.on_accelerator:
        return 0
    nbytes = sum(rule.nbytes for rule in rules if isinstance(rule, DeviceRule))
    return -ranks.least(-nbytes, "memory.updates")


def is_faster(cpu: float, device: float, drive: float = math.inf) -> bool:
    """Return whether a unit's update is faster on the accelerator, if it does not wait for the drive.

    The arguments are elements of a shard in a second: in one pass over host memory on the CPU, on the
    ``device`` with the way there and back, and read from the ``drive`` and written.

    Source: SuperOffload (arXiv:2509.21271), placement by the rates of the link and of the CPU.
    """
    return min(device, drive) > _WORTH * min(cpu, drive)
