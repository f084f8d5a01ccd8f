"""A recipe's model without values: its units, its budgets and one recorded micro-batch.

[Note: nothing is read and nothing computed]
The model is built on the meta device, from ``config.json`` alone, and cut by the runtime's own builder. One
micro-batch then runs on fake tensors, which have shapes and no memory: torch's own operators say what they
would make, the runtime's own hooks and prefetcher what units they use. So the trace is that of the runtime,
whatever the model does. A model whose forward depends on values (experts in a Python loop) cannot. Of blocks
that are alike a few run: see :mod:`infinity.app.repeats`.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.activations.logits import Mode, find_head, least_nbytes
from infinity.activations.store import directly_moved_nbytes
from infinity.api.lora import make_adapters
from infinity.app.models.gpt import GPT
from infinity.app.operators import Candidate, OperatorTimes
from infinity.app.recipe import Recipe
from infinity.app.recording import Played, Record, Subject
from infinity.app.recording import play as play_record
from infinity.app.repeats import record_model
from infinity.checkpoint.conversions import Part
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.directory import Stored as StoredTensor
from infinity.checkpoint.load import CheckpointValues, make_part
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.quantized import decode_checkpoint, read_quantization
from infinity.comm.ranks import Ranks
from infinity.core.budget import STAGED_CHUNKS, DeviceBudget, left_for_states, piece_nbytes, rounded
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError
from infinity.core.extent import aligned
from infinity.core.lifecycle import Tier
from infinity.core.plan import ActivationPlan, Place
from infinity.core.profile import Profile
from infinity.device.machine import DTYPES
from infinity.engine.config import EngineConfig
from infinity.engine.device_budget import UnitBudget, UnitsInUse
from infinity.engine.executor import reduction_dtype
from infinity.partition.builder import CutSizes, UnitBuilder
from infinity.partition.init_context import Construction
from infinity.partition.unit import StoredForm, Unit, UnitIndex
from infinity.planner.clock import StepSetup
from infinity.planner.machines import Dtype, Machine, RankRates, rank_rates
from infinity.planner.policies import POLICIES
from infinity.planner.simulator import play
from infinity.planner.step import StepTrace, Stored, StoredShape, UnitShape, choose_homes
from infinity.shards.mapped import BaseBuffers, stored_step
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

#: Device memory that the runtime's context and libraries take beside budgets (bytes).
CONTEXT_NBYTES = 2**30
#: Tensors that a checkpoint without weights is taken to have.
_UNKNOWN_TENSORS = 100_000
_MOMENTS_ITEMSIZE = 8


@dataclass(frozen=True)
class DryRun:
    """All that a plan is made from.

    Attributes:
        units: With their homes.
        division: Of the device budget.
        resident_nbytes: Host memory that shards may take, of ``host_nbytes``.
        chunk_numel: Elements that an update stages at one time; ``staged_chunks`` of them.
        reduce_itemsize: Bytes per element of a reduced gradient.
        spilled: Units whose gradients wait on NVMe.
        policy: What happens to activations; ``activations`` is the plan that follows.
        notes: Lines for people about what the plan takes for granted.
    """

    recipe: Recipe
    machine: Machine
    ranks: int
    dtype: Dtype
    rates: RankRates
    units: tuple[UnitShape, ...]
    trace: StepTrace
    division: DeviceBudget
    host_nbytes: int
    resident_nbytes: int
    chunk_numel: int
    staged_chunks: int
    device_nbytes: int
    reduce_itemsize: int
    spilled: frozenset[int]
    policy: str
    profile: Profile
    activations: ActivationPlan
    notes: Sequence[str]
    _model: "_Model"

    def changed(
        self, *, recipe: Recipe | None = None, machine: Machine | None = None, trace: StepTrace | None = None
    ) -> "DryRun":
        """Return the same model under another recipe or on another machine.

        Args:
            recipe: With the same model and policy for activations.
            machine: With as many devices.
            trace: That of the recipe; None: recorded anew if other units stream, else the same.

        Raises:
            BudgetError: A budget is too small for it.
        """
        recipe, machine = recipe or self.recipe, machine or self.machine
        planner = _Planner(recipe, machine, self.ranks, self.dtype, self._model)
        if [unit.streams for unit in planner.units] != [unit.streams for unit in self.units]:
            return planner.result()
        planner.divide_beside(self.profile, self.activations)
        return planner.result_of(trace or self.trace, self.profile, self.activations)

    def least_host_nbytes(self) -> int:
        """The least ``memory.host`` with which the model can be trained."""
        if not self.recipe.memory.nvme:
            kept = sum(unit.resident_nbytes for unit in self.units)
            return 2 * kept if self.machine.on_accelerator else kept
        low, high = 0, self.host_nbytes
        while high - low > max(4096, high // 256):
            middle = (low + high) // 2
            memory = replace(self.recipe.memory, host=max(1, middle), resident=False)
            try:
                recipe = replace(self.recipe, memory=memory)
                _Planner(recipe, self.machine, self.ranks, self.dtype, self._model)
            except BudgetError:
                low = middle
            else:
                high = middle
        return high

    @property
    def setup(self) -> StepSetup:
        """What the clock needs besides the trace."""
        memory = self.recipe.memory
        piece = piece_nbytes(self.host_nbytes - self.resident_nbytes)
        return StepSetup(
            units=self.units, rates=self.rates, division=self.division, ranks=self.ranks,
            on_accelerator=self.machine.on_accelerator,
            micro_batches=self.micro_batches, early=memory.versions == 2,
            clips=self.recipe.optim.max_grad_norm is not None, chunk_numel=self.chunk_numel,
            staged_chunks=self.staged_chunks, piece_nbytes=piece if self.machine.on_accelerator else None,
            reduce_itemsize=self.reduce_itemsize, spilled=self.spilled,
        )  # fmt: skip

    @property
    def spilled_nbytes(self) -> int:
        """Bytes of gradients that wait on NVMe in each step."""
        return sum(self.units[index].shard_numel for index in self.spilled) * self.reduce_itemsize

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of activations that are on NVMe when backward begins."""
        return sum(aligned(each.nbytes) for each in self.trace.stored if each.on_nvme)

    @property
    def micro_batches(self) -> int:
        """Times that a step goes through the trace; a layer schedule takes all micro-batches at once."""
        train = self.recipe.train
        return 1 if train.schedule == "layer" else train.accumulate

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)


def dry_run(
    recipe: Recipe, machine: Machine, ranks: int, like: DryRun | None = None, *, here: bool = False,
    built: Recipe | None = None,
) -> DryRun:  # fmt: skip
    """Build and record the model of ``recipe`` on one of ``ranks`` ranks of ``machine``.

    Args:
        here: It is this machine: operators are timed.
        built: With the budgets of which the sizes of units follow, where ``recipe`` has those that were
            derived later; None: ``recipe``.
        like: If it has the same model, on as many ranks, that is not built and recorded again.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built, or its forward depends on values.
    """
    return _planner(recipe, machine, ranks, like, here, built or recipe).result()


def shapes_of(recipe: Recipe, machine: Machine, ranks: int) -> tuple[UnitShape, ...]:
    """Return the units of :func:`dry_run`, without recording a step.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built.
    """
    return _planner(recipe, machine, ranks, None, False, recipe).read_where_they_lie()


def _planner(
    recipe: Recipe, machine: Machine, ranks: int, like: DryRun | None, here: bool, built: Recipe
) -> "_Planner":
    dtype = machine.choose_dtype() if recipe.train.dtype == "auto" else recipe.train.dtype
    made, sizes = None, _cut_sizes(built, machine, ranks)
    if like is not None and (like.ranks, like.dtype, like.machine.on_accelerator) == (
        ranks, dtype, machine.on_accelerator
    ):  # fmt: skip
        same = ("model", "lora", "partition")
        alike = all(getattr(recipe, part) == getattr(like.recipe, part) for part in same)
        if alike and sizes == like._model.sizes:
            made = like._model
    if made is None:
        local = max(1, ranks // machine.nodes.count)
        times = OperatorTimes.of_rank(local, recipe.train.threads) if here else None
        made = _Model(recipe, machine, ranks, DTYPES[dtype], sizes, times)
    return _Planner(recipe, machine, ranks, dtype, made)


def _cut_sizes(recipe: Recipe, machine: Machine, ranks: int) -> CutSizes:
    nbytes = recipe.memory.device
    if nbytes is None and machine.on_accelerator:
        nbytes = machine.devices.memory
    return CutSizes.of(recipe.partition.tile, nbytes, ranks, on_accelerator=machine.on_accelerator)


# --- the model ---------------------------------------------------------------------------------------


class _NoMasters:
    """Takes no values, and gives shapes; see :class:`infinity.partition.init_context.Masters`."""

    def put(self, unit: Unit, master: object) -> None:
        pass

    def get(self, unit: Unit) -> Tensor:
        return torch.empty(unit.numel, device="meta")


class _Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, and the operators; views are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.prim.device.default:
            leaves = tree_leaves((args, kwargs, result))
            self.nbytes += sum(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))
            self.operators += 1
        return result


class DecodingCosts:
    """What decoding costs, by the operators that do it on tensors without values.

    Args:
        device: Whose: on the CPU tables take the place of some operators.
        mode: Makes fake tensors on the CPU.
    """

    def __init__(self, device: Literal["meta", "cpu"], mode: FakeTensorMode) -> None:
        self._device, self._mode = device, mode
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def of(self, values: CheckpointValues, unit: Unit) -> tuple[int, int]:
        """Bytes that decoding a unit reads and writes, and operators of it."""
        nbytes = operators = 0
        for _, part in values.parts(unit, 0, unit.numel):
            source = part.source
            key = type(source), source.shape, source.dtype, part.offset, part.numel, unit.dtype
            if key not in self._known:
                self._known[key] = self._count(part, unit.dtype)
            nbytes, operators = nbytes + self._known[key][0], operators + self._known[key][1]
        return nbytes, operators

    def _count(self, part: Part[StoredTensor], dtype: torch.dtype) -> tuple[int, int]:
        def view(file: object, offset: int, nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

        with self._mode if self._device == "cpu" else nullcontext():
            out = torch.empty(part.numel, dtype=dtype, device=self._device)
            with _Moved() as moved:
                make_part(part, out, view)
        return moved.nbytes, moved.operators


class _NoValues:
    """Values never come; see :class:`infinity.partition.init_context.LateValues`.

    Attributes:
        base: Says what the checkpoint of a frozen base has for the model; None: it is another one.
        sizes: Of its files (bytes).
        mapped: Units that can be read where they lie and are not quantized.
        stored: Units that travel in its form, by index, and what a rank reads of each.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.base: CheckpointValues | None = None
        self.sizes: Sequence[int] = ()
        self.stored: dict[int, tuple[StoredForm, int]] = {}
        self.mapped: set[int] = set()
        self._new = True
        self._read: dict[tuple[int, int, int], int] = {}
        self._decoding = {"meta": DecodingCosts("meta", mode), "cpu": DecodingCosts("cpu", mode)}
        self._decode: dict[tuple[int, bool], tuple[int, int]] = {}

    def decoding(self, unit: int, *, on_accelerator: bool) -> tuple[int, int]:
        """Bytes that decoding a unit reads and writes, and operators of it."""
        return self._decode[unit, on_accelerator]

    def read_nbytes(self, unit: Unit, piece_nbytes: int, buffers: BaseBuffers) -> int:
        """What a fetch of a unit in ``mapped`` reads, in pieces of so many bytes of weights."""
        key = unit.index, piece_nbytes, buffers.nbytes
        if key not in self._read:
            assert self.base is not None
            self._read[key] = buffers.read_nbytes(unit, self.base, piece_nbytes, self.sizes)
        return self._read[key]

    def counts(self, unit: Unit) -> bool:
        return False

    def fill(self, units: UnitIndex, masters: object) -> None:
        base, self._new = self.base if self._new else None, False  # adapters come later, with nothing in it
        for unit in () if base is None else units:
            assert base is not None
            if base.why_not_mapped(unit):
                continue
            scratch_nbytes = base.scratch_nbytes(unit)
            if not scratch_nbytes:
                self.mapped.add(unit.index)
            else:
                step = stored_step(unit, base, 0, self.sizes)
                shard_nbytes = step.shard_nbytes(unit.world_size)
                nbytes = shard_nbytes * unit.world_size
                form = StoredForm(nbytes, shard_nbytes, scratch_nbytes, lambda stored, flat: None)
                self.stored[unit.index] = form, step.shard(unit.rank, unit.world_size).nbytes
                for device, on_accelerator in (("meta", True), ("cpu", False)):
                    self._decode[unit.index, on_accelerator] = self._decoding[device].of(base, unit)


class _Model:
    """A recipe's model on the meta device, cut into units.

    Attributes:
        model: With adapters, if the recipe has them.
        notes: Lines for people about what is taken for granted.
        values: Know what of the model travels in its stored form.
        sizes: How large its units and tiles are.
        times: Of operators on this machine; None: another one is planned for.
    """

    def __init__(
        self, recipe: Recipe, machine: Machine, ranks: int, dtype: torch.dtype, sizes: CutSizes,
        times: OperatorTimes | None,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self.times = times
        self.sizes = sizes
        self._mode, self._is_fake = FakeTensorMode(allow_non_fake_inputs=False), False
        self.values = _NoValues(self._mode)
        self.construction = Construction(
            lambda close: UnitBuilder(
                dtype,
                0,
                ranks,
                close,
                recipe.partition.leaf,
                sizes=sizes,
                without_values=True,
            ),
            _NoMasters(),
            lambda module: lambda module: None,
            torch.device("meta"),
        )
        with torch.device("meta"):
            if recipe.model.path is None:
                with self.construction:
                    self.model: Any = GPT(recipe.model)
            else:
                self.construction.late = self.values
                with self.construction:
                    self.model = self._of_checkpoint(Path(recipe.model.path), recipe, dtype)
            if recipe.lora.rank is not None:
                self.model.requires_grad_(False)
                settings = asdict(recipe.lora)
                self.model = make_adapters(self.model, self.construction, **settings)
        self.units = self.construction.builder.units
        self.leaves = self.construction.builder.leaves if ranks > 1 else {}
        self.model.train()
        if any(unit.routed for unit in self.units):
            self.notes.append("experts are computed in tiles: planned as if each step used all of them")
        self._records: dict[object, Record] = {}

    def record(self, subject: Subject, plan: ActivationPlan) -> Record:
        """Record a micro-batch of :meth:`faked`'s model, once for the blocks that ``plan`` recomputes."""
        everything = plan.policy == "recompute" and not plan.recomputed
        key = subject.tokens, subject.logits, subject.packing, everything, plan.recomputed
        if key not in self._records:
            self._records[key] = record_model(subject, lambda region: everything or region in plan.recomputed)
        return self._records[key]

    def _of_checkpoint(self, path: Path, recipe: Recipe, dtype: torch.dtype) -> Any:
        overrides: dict[str, Any] = {}
        quantized = None if is_ours(path) else _quantization(path)
        if quantized is not None:
            overrides["quantization_config"] = None
        config = read_config(path, overrides)
        if not any(path.glob("*.safetensors")):
            self._note_quantized(quantized, dtype)
            self.notes.append(f"{path} holds no weights: planned from its config.json")
            return build_model(config, None, dtype, _UNKNOWN_TENSORS)
        with Checkpoint(path) as stored:
            model = build_model(config, None, dtype, len(stored))
            if recipe.lora.rank is not None and recipe.memory.nvme and stored.files:
                self._find_base(model, stored, recipe, dtype)
            else:
                self._note_quantized(quantized, dtype)
        return model

    def _note_quantized(self, quantized: str | None, dtype: torch.dtype) -> None:
        if quantized is not None:
            self.notes.append(
                f"the checkpoint is quantized ({quantized}): planned as if its weights were {dtype}"
            )

    def _find_base(self, model: Any, checkpoint: Checkpoint, recipe: Recipe, dtype: torch.dtype) -> None:
        """Note what a frozen base is made of, from the headers of its files."""
        quantization = read_quantization(checkpoint.path)
        if quantization is not None:
            decode_checkpoint(checkpoint, quantization, dtype)
        base = CheckpointValues(checkpoint, recipe.model.new, recipe.model.ignore)
        base.prepare(model)
        self.values.base, self.values.sizes = base, [os.fstat(f.fd).st_size for f in checkpoint.files]

    @contextmanager
    def faked(self) -> Iterator[Any]:
        """Inside, the model's parameters and buffers are fake tensors; the first time they become so."""
        with self._mode:
            if not self._is_fake:
                self._fake()
            yield self.model

    def _fake(self) -> None:
        self._is_fake = True
        before = [segment.param for _, segment in self.units.segments()]  # as long as ids are compared
        fakes: dict[int, nn.Parameter] = {}
        for unit, segment in self.units.segments():
            param = segment.param
            segment.param = nn.Parameter(
                torch.empty(param.shape, dtype=unit.dtype, device="cpu"), param.requires_grad
            )
            if segment.whole is param:
                segment.whole = fakes[id(param)] = segment.param
        for module in self.model.modules():
            own = {n: p if p is None else fakes.get(id(p), p) for n, p in module._parameters.items()}
            module.__dict__["_parameters"] = own
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        self.units.replace(list(self.units))
        if self.values.base is not None:
            self.values.base.follow(fakes)
        del before


def _quantization(path: Path) -> str | None:
    from infinity.checkpoint.directory import read_json_object

    given = read_json_object(path / "config.json").get("quantization_config")
    return None if not isinstance(given, dict) else str(given.get("quant_method", "by its config"))


# --- budgets and the record --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One micro-batch: its trace and its profile, and its slots as the prefetcher's events place them."""

    trace: StepTrace
    profile: Profile
    played: Played


class _Planner:
    """Divides budgets and records, as the runtime does.

    It has more attributes than other classes: what each step of the division finds, and the next one needs.
    """

    def __init__(self, recipe: Recipe, machine: Machine, ranks: int, dtype: Dtype, made: _Model) -> None:
        self.recipe, self.machine, self.ranks, self.dtype, self.made = recipe, machine, ranks, dtype, made
        memory, local = recipe.memory, max(1, ranks // machine.nodes.count)
        device = torch.device("cuda" if machine.on_accelerator else "cpu")
        self._ranks = Ranks(0, ranks, device)
        self.host_nbytes = memory.host or machine.host.memory // local // 2
        self.storage = Storage(memory, self.host_nbytes, DTYPES[dtype], device)
        self.storage.close()  # only its arithmetic is wanted
        self.free_nbytes = (machine.devices.memory or 0) - CONTEXT_NBYTES
        if not machine.on_accelerator:
            self.free_nbytes = machine.host.memory // local
        layered = recipe.train.schedule == "layer"
        self.policy = memory.activations or ("keep" if memory.device is None or layered else "plan")
        if layered:
            self.policy = "recompute"
        self.rates = rank_rates(machine, ranks, dtype, recipe.train.threads)
        self.reduce_dtype = reduction_dtype(EngineConfig(partition=recipe.partition), DTYPES[dtype])
        self.tiers = Tiers(self.storage, self._ranks, self.reduce_dtype)
        self._buffers = BaseBuffers.within(self.host_nbytes)
        self.units = self._place_units()
        self.budget = self._divide()

    def _place_units(self) -> tuple[UnitShape, ...]:
        layout = self.storage.layout
        stored = self.made.values.stored if self.recipe.memory.nvme else {}
        for unit in self.made.units:
            unit.stored = stored[unit.index][0] if unit.index in stored else None
        shapes = [
            UnitShape(
                name=unit.name,
                shard_numel=unit.shard_numel,
                nbytes=unit.nbytes,
                weight_nbytes=layout.weight_nbytes(unit.shard_numel),
                state_nbytes=layout.state_nbytes(unit.shard_numel),
                moments_nbytes=_MOMENTS_ITEMSIZE * unit.shard_numel,
                host_gradient_nbytes=self.tiers.gradient_nbytes(unit) if self._ranks.on_accelerator else 0,
                params=sum(segment.numel for segment in unit.segments),
                trainable=bool(unit.trainable),
                stored=self._stored_shape(unit),
            )
            for unit in self.made.units
        ]
        resident_nbytes = self.storage.resident_nbytes
        if self._has_base:
            resident_nbytes = max(0, resident_nbytes - self._buffers.all_nbytes)
        placed = choose_homes(
            shapes, resident_nbytes, drives=bool(self.recipe.memory.nvme),
            alone_on_cpu=self._ranks.alone_on_cpu,
        )  # fmt: skip
        for unit, shape in zip(self.made.units, placed, strict=True):
            unit.home = Tier.NVME if shape.on_nvme else Tier.HOST
        return placed

    @property
    def _has_base(self) -> bool:
        return self.made.values.base is not None and bool(self.recipe.memory.nvme)

    def read_where_they_lie(self) -> tuple[UnitShape, ...]:
        """The units, and what is read of those that lie in a checkpoint."""
        values, host = self.made.values, self.budget.host
        if not self._has_base:
            return self.units
        found = list(self.units)
        for index in values.mapped:
            unit = self.made.units[index]
            if unit.home is Tier.NVME and not unit.trainable:
                piece = unit.shard_nbytes if host is None else min(unit.shard_nbytes, host.piece)
                found[index] = replace(
                    found[index], base_nbytes=values.read_nbytes(unit, piece, self._buffers)
                )
        return tuple(found)

    def _stored_shape(self, unit: Unit) -> StoredShape | None:
        form, values = unit.stored, self.made.values
        if form is None:
            return None
        decode = values.decoding(unit.index, on_accelerator=self.machine.on_accelerator)
        return StoredShape(form.nbytes, form.shard_nbytes, values.stored[unit.index][1], *decode)

    def _divide(self) -> UnitBudget:
        memory, clips = self.recipe.memory, self.recipe.optim.max_grad_norm is not None
        layered = self.recipe.train.schedule == "layer"  # its window is for whole blocks
        recomputes = self.policy in ("recompute", "plan") and not layered
        in_use = UnitsInUse([self.made.model], self.made.units, recomputes=recomputes)
        made = UnitBudget(
            self.made.units, self.made.leaves, in_use, self._ranks, self.tiers, memory.device,
            self.free_nbytes // 2,
            shared=self.policy == "plan", early=not clips and memory.versions == 2, updates_nbytes=0,
            states=memory.updates != "host",
        )  # fmt: skip
        if self.recipe.train.accumulate > 1 and self.recipe.train.schedule == "step":
            made.divide_again(accumulates=True)
        return made

    def result(self) -> DryRun:
        made = self.made
        policy, plan = self.policy, ActivationPlan("keep")
        if policy == "recompute":
            plan = ActivationPlan("recompute")
        with made.faked() as model:
            recorded = self._record(model, plan)
            profile = recorded.profile
            if policy in ("plan", "offload"):
                plan = self._choose(profile)
                self.divide_beside(profile, plan)
                if plan.recomputed:
                    recorded = self._record(model, plan)
        trace = recorded.trace
        if plan.places:
            peak = play(profile, plan, self._channels()).peak_nbytes  # without what has left
            trace = replace(self._with_stored(trace, recorded.played, plan), peak_nbytes=peak)
        if self.recipe.train.schedule == "layer":  # each block takes all micro-batches before the next
            peak = trace.peak_nbytes
            trace = replace(trace.scaled(self.recipe.train.accumulate), peak_nbytes=peak)
        return self.result_of(trace, profile, plan)

    def divide_beside(self, profile: Profile, plan: ActivationPlan) -> None:
        """Give units what planned activations leave of ``memory.device``."""
        if self.budget.device_nbytes is not None and self.policy == "plan":
            self.budget.divide_beside(play(profile, plan, self._channels()).peak_nbytes)

    def result_of(self, trace: StepTrace, profile: Profile, plan: ActivationPlan) -> DryRun:
        """Return the dry run with this trace."""
        if self.budget.asks_what_a_step_leaves:
            left = self.free_nbytes - self.budget.division.total - trace.peak_nbytes
            self.budget.divide_after_step(left_for_states(left, self.free_nbytes, trace.peak_nbytes))
        division = self.budget.division
        staged = rounded(self.storage.chunk_numel * (self._itemsize()))
        room = 0
        if not self.machine.on_accelerator:
            room = self.host_nbytes - sum(u.resident_nbytes for u in self.units if not u.on_nvme)
        return DryRun(
            recipe=self.recipe, machine=self.machine, ranks=self.ranks, dtype=self.dtype, rates=self.rates,
            units=self.read_where_they_lie(), trace=trace, division=division, host_nbytes=self.host_nbytes,
            resident_nbytes=self.storage.resident_nbytes, chunk_numel=self.storage.chunk_numel,
            staged_chunks=max(STAGED_CHUNKS, room // staged), device_nbytes=self.free_nbytes,
            reduce_itemsize=self.reduce_dtype.itemsize if self.ranks > 1 else DTYPES[self.dtype].itemsize,
            spilled=self.budget.spilled, policy=self.policy, profile=profile, activations=plan,
            notes=self.made.notes,
            _model=self.made,
        )  # fmt: skip

    def _itemsize(self) -> int:
        layout = self.storage.layout
        return layout.weight_nbytes(1) + layout.state_nbytes(1)

    def _channels(self) -> Any:
        given = self.rates.channels
        if not self.recipe.memory.nvme:
            given = replace(given, read_bytes_per_s=0.0, write_bytes_per_s=0.0, mixed_bytes_per_s=0.0)
        host = max(0, self.host_nbytes - self.storage.resident_nbytes) if self.machine.on_accelerator else 0
        return replace(given, host_nbytes=host)

    def _choose(self, profile: Profile) -> ActivationPlan:
        """The plan that the runtime would make from this profile."""
        hardware = self._channels()
        if self.policy == "offload":
            if not self.recipe.memory.nvme:
                wanted = "keep, recompute or plan; or a directory in memory.nvme to store activations in"
                raise SettingError("memory.activations", "offload", wanted)
            return POLICIES["offload"](profile, hardware, None)
        capacities: Sequence[int | None] = [None]
        if self.budget.device_nbytes is not None:
            totals = dict.fromkeys((self.budget.division.total, self.budget.division.least))
            capacities = [self.budget.device_nbytes - total for total in totals]
        refused: BudgetError | None = None
        for capacity in capacities:
            try:
                return POLICIES["plan"](profile, hardware, capacity)
            except BudgetError as error:
                refused = error
        assert refused is not None
        raise refused

    def _pass_nbytes(self) -> int:
        """Return what a pass may take beside units, as the runtime's executor does."""
        if self.policy != "plan" or self.budget.device_nbytes is None:
            return self.free_nbytes
        return self.budget.device_nbytes - self.budget.division.least

    def _logits(self, model: Any, rows: int) -> Mode:
        """Return how the logits of a micro-batch are computed, where the recipe leaves it to memory."""
        mode, head = self.recipe.memory.logits, find_head(model)
        if mode != "auto" or head is None:
            return mode
        width = cast(int, head.out_features)
        fit = least_nbytes(rows, width, DTYPES[self.dtype].itemsize) <= self._pass_nbytes()
        return "whole" if fit else "slices"

    def _record(self, model: Any, plan: ActivationPlan) -> _Recorded:
        recipe, made = self.recipe, self.made
        tokens = recipe.train.batch_size, recipe.model.seq_len
        subject = Subject(
            model=model, units=made.units, leaves=made.leaves, dtype=DTYPES[self.dtype],
            nbytes={u.index: u.gathered_nbytes for u, s in zip(made.units, self.units) if s.streams},
            window_nbytes=self.budget.division.window, tokens=tokens,
            logits=self._logits(model, math.prod(tokens)), packing=recipe.data.packing,
        )  # fmt: skip
        recorded = made.record(subject, plan)
        played = play_record(recorded, subject)
        rows = recorded.rows
        flops, nbytes = (np.array(column, dtype=float) for column in zip(*(row[:2] for row in rows)))
        fp32 = np.array([row.fp32 for row in rows], dtype=bool)
        trace = StepTrace(
            events=played.events, begun=played.begun, completed=played.completed,
            position=played.position, flops=flops, nbytes=nbytes, fp32=fp32,
            model_flops=float(flops.sum()) - recorded.again_flops,
            tokens=recipe.train.batch_size * recipe.model.seq_len,
            peak_nbytes=recorded.peak_nbytes(),
        )  # fmt: skip
        if made.times is not None:
            operations, expected_s = [row.operation for row in rows], trace.operator_s(self.rates).tolist()
            made.times.measure(map(Candidate, operations, expected_s, nbytes.tolist()))
            trace = replace(trace, measured_s=np.array([made.times.of(each) for each in operations]))
        seconds = trace.operator_s(self.rates).tolist()
        return _Recorded(trace, recorded.profiled.profile(seconds, 0.0), played)

    def _with_stored(self, trace: StepTrace, played: Played, plan: ActivationPlan) -> StepTrace:
        after = {load.slot: load.after for load in plan.loads}
        stored = []
        for key, place in plan.places.items():
            if place is Place.KEEP or key not in played.packs or key not in played.asks:
                continue
            packed_at, nbytes = played.packs[key]
            if place is Place.NVME and not self.machine.on_accelerator:
                nbytes = directly_moved_nbytes(nbytes)
            tied = after.get(key, key)
            load_at = played.backward_at if tied is None else played.asks.get(tied, played.backward_at)
            stored.append(Stored(nbytes, packed_at, load_at, played.asks[key], place is Place.NVME))
        return replace(trace, stored=tuple(stored))
