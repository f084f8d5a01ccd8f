"""A recipe's model without values: its units, its budgets and one recorded micro-batch.

[Note: nothing is read and nothing computed]
The model is built on the meta device, from ``config.json`` alone, and cut by the runtime's own builder. One
micro-batch then runs on fake tensors, which have shapes and no memory: torch's own operators say what they
would make, the runtime's own hooks and prefetcher what units they use. So the trace is that of the runtime,
whatever the model does. A model whose forward depends on values (experts in a Python loop) cannot.
"""

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from infinity.activations.blocks import recomputable_blocks, tracked
from infinity.activations.profiler import Profiler
from infinity.activations.tensor_cache import LEAST_NBYTES, PassRecord
from infinity.api.lora import make_adapters
from infinity.app.models.causal import CausalLoss
from infinity.app.models.gpt import GPT
from infinity.app.recipe import Recipe
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.load import CheckpointValues
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.quantized import decode_checkpoint, read_quantization
from infinity.comm.ranks import Ranks
from infinity.core.budget import STAGED_CHUNKS, DeviceBudget, piece_nbytes, rounded
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, CheckpointError, library_errors
from infinity.core.lifecycle import Tier
from infinity.core.plan import ActivationPlan, Place
from infinity.core.profile import Phase, Profile, SlotKey
from infinity.device.machine import DTYPES
from infinity.engine.config import EngineConfig
from infinity.engine.device_budget import UnitBudget
from infinity.engine.executor import reduction_dtype
from infinity.engine.hooks import Hooks, register_forward_hooks
from infinity.partition.builder import UnitBuilder
from infinity.partition.init_context import Construction, install_parameter_dict
from infinity.partition.prefetcher import BackwardPins, Prefetcher
from infinity.partition.unit import Segment, StoredForm, Unit, UnitIndex
from infinity.planner.clock import StepSetup
from infinity.planner.machines import Dtype, Machine, RankRates, rank_rates
from infinity.planner.policies import POLICIES
from infinity.planner.prefetch_plan import Event
from infinity.planner.simulator import play
from infinity.planner.step import StepTrace, Stored, StoredShape, UnitShape, choose_homes
from infinity.shards.mapped import stored_step
from infinity.shards.storage import Storage
from infinity.shards.tiers import Tiers

#: Device memory that the runtime's context and libraries take beside budgets (bytes).
CONTEXT_NBYTES = 2**30
#: Tensors that a checkpoint without weights is taken to have.
_UNKNOWN_TENSORS = 100_000
_MOMENTS_ITEMSIZE = 8
#: Operators that read a few rows of their first argument.
_LOOKUPS = {"aten.embedding.default", "aten.index_select.default"}


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
            return dry_run(recipe, machine, self.ranks)
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
    def micro_batches(self) -> int:
        """Times that a step goes through the trace; a layer schedule takes all micro-batches at once."""
        train = self.recipe.train
        return 1 if train.schedule == "layer" else train.accumulate

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)


def dry_run(recipe: Recipe, machine: Machine, ranks: int) -> DryRun:
    """Build and record the model of ``recipe`` on one of ``ranks`` ranks of ``machine``.

    Raises:
        BudgetError: A budget is too small; the message has the arithmetic.
        CheckpointError: ``model.path`` holds no model that can be built, or its forward depends on values.
    """
    dtype = machine.choose_dtype() if recipe.train.dtype == "auto" else recipe.train.dtype
    made = _Model(recipe, ranks, DTYPES[dtype])
    return _Planner(recipe, machine, ranks, dtype, made).result()


# --- the model ---------------------------------------------------------------------------------------


class _NoMasters:
    """Takes no values, and gives shapes; see :class:`infinity.partition.init_context.Masters`."""

    def put(self, unit: Unit, master: object) -> None:
        pass

    def get(self, unit: Unit) -> Tensor:
        return torch.empty(unit.numel, device="meta")


class _NoValues:
    """Values never come; see :class:`infinity.partition.init_context.LateValues`.

    Attributes:
        base: Says what a quantized checkpoint has for the model; None: it is another one.
        sizes: Of its files (bytes).
        stored: Units that travel in its form, by index, and what a rank reads of each.
    """

    def __init__(self) -> None:
        self.base: CheckpointValues | None = None
        self.sizes: Sequence[int] = ()
        self.stored: dict[int, tuple[StoredForm, int]] = {}

    def counts(self, unit: Unit) -> bool:
        return False

    def fill(self, units: UnitIndex, masters: object) -> None:
        base, self.base = self.base, None
        for unit in () if base is None else units:
            assert base is not None
            scratch_nbytes = 0 if base.why_not_mapped(unit) else base.scratch_nbytes(unit)
            if scratch_nbytes:
                step = stored_step(unit, base, 0, self.sizes)
                shard_nbytes = step.shard_nbytes(unit.world_size)
                nbytes = shard_nbytes * unit.world_size
                form = StoredForm(nbytes, shard_nbytes, scratch_nbytes, lambda stored, flat: None)
                self.stored[unit.index] = form, step.shard(unit.rank, unit.world_size).nbytes


class _Model:
    """A recipe's model on the meta device, cut into units.

    Attributes:
        model: With adapters, if the recipe has them.
        notes: Lines for people about what is taken for granted.
        values: Know what of the model travels in its stored form.
    """

    def __init__(self, recipe: Recipe, ranks: int, dtype: torch.dtype) -> None:
        self.notes: list[str] = []
        self.values = _NoValues()
        self._mode, self._is_fake = FakeTensorMode(allow_non_fake_inputs=False), False
        self.construction = Construction(
            lambda close: UnitBuilder(dtype, 0, ranks, close, recipe.partition.leaf, without_values=True),
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
                self.model = make_adapters(self.model, self.construction, ranks, **settings)
        self.units = self.construction.builder.units
        self.leaves = self.construction.builder.leaves if ranks > 1 else {}
        self.model.train()

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
            if quantized is not None and recipe.lora.rank is not None and recipe.memory.nvme:
                self._find_stored(model, stored, recipe, dtype)
            else:
                self._note_quantized(quantized, dtype)
        return model

    def _note_quantized(self, quantized: str | None, dtype: torch.dtype) -> None:
        if quantized is not None:
            self.notes.append(
                f"the checkpoint is quantized ({quantized}): planned as if its weights were {dtype}"
            )

    def _find_stored(self, model: Any, checkpoint: Checkpoint, recipe: Recipe, dtype: torch.dtype) -> None:
        """Note what a frozen base is made of, from the headers of its files."""
        quantization = read_quantization(checkpoint.path)
        assert quantization is not None
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
            fakes[id(param)] = segment.param
        for module in self.model.modules():
            own = {n: p if p is None else fakes.get(id(p), p) for n, p in module._parameters.items()}
            module.__dict__["_parameters"] = own
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        self.units.replace(list(self.units))
        del before


def _quantization(path: Path) -> str | None:
    from infinity.checkpoint.directory import read_json_object

    given = read_json_object(path / "config.json").get("quantization_config")
    return None if not isinstance(given, dict) else str(given.get("quant_method", "by its config"))


# --- one micro-batch ---------------------------------------------------------------------------------


class _Mover:
    """Moves nothing; see :class:`infinity.partition.prefetcher.Mover`."""

    def start(self, unit: int) -> None:
        pass

    def finish(self, unit: int) -> None:
        pass

    def release(self, unit: int) -> None:
        pass


class _Kept:
    """Stands in autograd's graph for a saved tensor: of ``unit``, or of slot ``key``."""

    __slots__ = ("key", "tensor", "unit")

    def __init__(self, tensor: Tensor, unit: Unit | None = None, key: SlotKey | None = None) -> None:
        self.tensor, self.unit, self.key = tensor, unit, key


class _Recomputes:
    """Keeps every slot; recomputes the blocks of a plan."""

    def __init__(self, plan: ActivationPlan, blocks: int) -> None:
        self._regions = set(plan.recomputed)
        self._all = plan.policy == "recompute" and not plan.recomputed

    def place(self, key: SlotKey) -> Place:
        return Place.KEEP

    def recomputes(self, region: int) -> bool:
        return self._all or region in self._regions

    def loads(self, after: SlotKey | None) -> None:
        return None


class _Roofline(Profiler):  # type: ignore[no-untyped-call]
    """Profiles fake operators: flops and bytes by operator, in place of seconds.

    Args:
        position: Returns the number of events so far.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype, position: Any) -> None:
        super().__init__(weights=weights)
        self._dtype, self._position = dtype, position
        self.rows: list[tuple[int, float, float, bool]] = []
        self.regions_flops: dict[int, float] = {}
        self.seconds: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked several times for each operator
            return args[0].fake_device
        before = len(self._recorded.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self._recorded.calls) > before:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if str(func) in _LOOKUPS:
            given = given[1:] + tensors
        nbytes = sum(each.numel() * each.itemsize for each in (*tensors, *given))
        flops = _flops(func, args, kwargs, result)
        floats = [each for each in given if each.is_floating_point()]
        fp32 = bool(floats) and all(each.dtype == torch.float32 for each in floats)
        if flops and self._recorded.phase is Phase.FORWARD:
            region = self._recorded.region
            self.regions_flops[region] = self.regions_flops.get(region, 0.0) + flops
        self.rows.append((self._position(), flops, float(nbytes), fp32 and self._dtype != torch.float32))

    def _seconds(self) -> list[float]:
        return self.seconds

    def peak_nbytes(self) -> int:
        """The most bytes of the step's own storages at one time."""
        changes: dict[int, int] = {}
        for life in self._recorded.storages.lives:
            if life.kind.value in ("working", "activation", "gradient"):
                changes[life.born] = changes.get(life.born, 0) + life.nbytes
                if life.died is not None:
                    changes[life.died] = changes.get(life.died, 0) - life.nbytes
        there = most = 0
        for at in sorted(changes):
            there += changes[at]
            most = max(most, there)
        return most


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    name = str(func)
    if "_scaled_dot_product_flash_attention_for_cpu" in name:
        query, key, value = args[1:4] if "backward" in name else args[:3]
        b, h, s, d = query.shape
        pairs = float(b * h * s * key.shape[2])
        return (5 if "backward" in name else 2) * pairs * float(d + value.shape[3])
    if name.startswith("aten._grouped_mm"):
        (rows, inner), columns = args[0].shape[-2:], args[1].shape[-1]
        # tokens x experts' matrices; or, of gradients, columns of both for each expert: the same flops
        return 2.0 * float(rows) * float(inner) * float(columns)
    count = flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


class _Cache:
    """Stands for the tensor cache: notes what is packed and unpacked, and keeps everything.

    Attributes:
        packs: Events before each slot is packed, and its bytes; ``asks`` likewise before it is asked for.
    """

    def __init__(self, profiler: _Roofline, record: PassRecord, position: Any, exempt: set[int]) -> None:
        self.profiler, self.record, self._position, self._exempt = profiler, record, position, exempt
        self.packs: dict[SlotKey, tuple[int, int]] = {}
        self.asks: dict[SlotKey, int] = {}
        self.backward_at = 0
        self._keys: dict[int, tuple[weakref.ref[Any], SlotKey]] = {}
        self._backward = -1

    def pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_NBYTES or storage._cdata in self._exempt:
            return _Kept(tensor)
        known = self._keys.get(storage._cdata)
        if known is None or known[0]() is not storage:
            key = self.record.next_key()
            self._keys[storage._cdata] = weakref.ref(storage), key
            self.profiler.packed(key, tensor)
            self.packs[key] = self._position(), storage.nbytes()
        else:
            key = known[1]
        return _Kept(tensor, key=key)

    def unpack(self, kept: _Kept) -> Tensor:
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward, self.backward_at = backward, self._position()
            self.profiler.backward_begins()
        if kept.key is not None:
            self.profiler.unpacked(kept.key)
            self.asks.setdefault(kept.key, self._position())
        return kept.tensor


class _Completions:
    """Stands for :class:`infinity.engine.gradients.Gradients`: notes when gradients begin and end."""

    def __init__(
        self, units: UnitIndex, leaves: frozenset[int], prefetcher: Prefetcher, pins: BackwardPins
    ) -> None:
        self._units, self._leaves, self._prefetcher, self._pins = units, leaves, prefetcher, pins
        self._fired: dict[int, set[int]] = {}
        self._delivered: set[int] = set()
        self.begun: list[tuple[int, int]] = []
        self.completed: list[tuple[int, int]] = []
        self.syncing, self.synced = True, False

    def receive(self, unit: Unit, segment: Segment, grad: Tensor) -> None:
        fired = self._fired.setdefault(unit.index, set())
        if not fired:
            self.begun.append((self._prefetcher.training.position, unit.index))
        fired.add(segment.index)
        in_part = len(unit.trainable) < len(unit.segments)
        if (
            len(fired) == len(unit.trainable)
            and unit.index not in self._leaves
            and not (in_part and self._pins.recomputed(unit.index))
        ):
            self._complete(unit)

    def complete_together(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.trainable and unit.index not in self._delivered:
                self._complete(unit)

    def end_backward(self) -> None:
        for unit in self._units:
            if unit.trainable and unit.index not in self._delivered:
                self._complete(unit)

    def abort_backward(self) -> None:
        pass

    def _complete(self, unit: Unit) -> None:
        self._delivered.add(unit.index)
        self.completed.append((self._prefetcher.training.position, unit.index))
        if self._prefetcher.streams(unit.index):
            self._pins.forget(unit.index)
            self._prefetcher.done(unit.index)


class _Activations:
    """Opens a forward pass, as :class:`infinity.activations.controller.Activations` does."""

    def __init__(self, cache: _Cache) -> None:
        self.cache = cache

    def open(self, model: nn.Module) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(tracked(recomputable_blocks(model), cast(Any, self.cache)))
        return stack


class _RecordedHooks(Hooks):
    """The runtime's hooks on fake tensors, whose storages have no addresses."""

    by_storage: dict[int, Unit]

    def _check_attached(self, unit: Unit, segment: Segment) -> None:
        """Do nothing: fake parameters view no buffer."""

    def pack(self, tensor: Tensor) -> Any:
        unit = self.by_storage.get(tensor.untyped_storage()._cdata)
        return cast(Any, self.activations.cache).pack(tensor) if unit is None else _Kept(tensor, unit)

    def unpack(self, packed: Any) -> Tensor:
        cache = cast(Any, self.activations.cache)
        if packed.unit is None:
            return cast(Tensor, cache.unpack(packed))
        self._enter_backward()
        if self.prefetcher.streams(packed.unit.index):
            self._use_in_backward(packed.unit)
        return cast(Tensor, packed.tensor)

    def _hook_parameters(self) -> None:
        for _, segment in self.units.segments():
            if segment.param.requires_grad:
                segment.param.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]

    def _take_gradient(self, param: nn.Parameter) -> None:
        place = self.units.find(param)
        assert place is not None
        unit, segment = place
        self._enter_backward()
        self._move_to(self._leaf_of.get(unit.index, ()))
        grad, param.grad = param.grad, None
        if grad is not None:
            self.gradients.receive(unit, segment, grad)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One run: its trace, its profile, and where slots are packed and asked for."""

    trace: StepTrace
    profile: Profile
    cache: _Cache


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
        self.rates = rank_rates(machine, ranks, dtype)
        self.reduce_dtype = reduction_dtype(EngineConfig(partition=recipe.partition), DTYPES[dtype])
        self.tiers = Tiers(self.storage, self._ranks, self.reduce_dtype)
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
                stored=StoredShape(unit.stored.nbytes, unit.stored.shard_nbytes, stored[unit.index][1])
                if unit.stored is not None
                else None,
            )
            for unit in self.made.units
        ]
        placed = choose_homes(
            shapes, self.storage.resident_nbytes, drives=bool(self.recipe.memory.nvme),
            alone_on_cpu=self._ranks.alone_on_cpu,
        )  # fmt: skip
        for unit, shape in zip(self.made.units, placed, strict=True):
            unit.home = Tier.NVME if shape.on_nvme else Tier.HOST
        return placed

    def _divide(self) -> UnitBudget:
        memory, clips = self.recipe.memory, self.recipe.optim.max_grad_norm is not None
        made = UnitBudget(
            self.made.units, self.made.leaves, self._ranks, self.tiers, memory.device, self.free_nbytes // 2,
            shared=self.policy == "plan", early=not clips and memory.versions == 2, updates_nbytes=0,
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
                if self.budget.device_nbytes is not None and policy == "plan":
                    peak = play(profile, plan, self._channels()).peak_nbytes
                    self.budget.divide_beside(peak)
                if plan.recomputed:
                    recorded = self._record(model, plan)
        trace = recorded.trace
        if plan.places:
            trace = self._with_stored(trace, recorded.cache, plan)
        if self.recipe.train.schedule == "layer":  # each block takes all micro-batches before the next
            peak = trace.peak_nbytes
            trace = replace(trace.scaled(self.recipe.train.accumulate), peak_nbytes=peak)
        return self.result_of(trace, profile, plan)

    def result_of(self, trace: StepTrace, profile: Profile, plan: ActivationPlan) -> DryRun:
        """Return the dry run with this trace."""
        division = self.budget.division
        staged = rounded(self.storage.chunk_numel * (self._itemsize()))
        room = 0
        if not self.machine.on_accelerator:
            room = self.host_nbytes - sum(u.resident_nbytes for u in self.units if not u.on_nvme)
        return DryRun(
            recipe=self.recipe, machine=self.machine, ranks=self.ranks, dtype=self.dtype, rates=self.rates,
            units=self.units, trace=trace, division=division, host_nbytes=self.host_nbytes,
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

    def _record(self, model: Any, plan: ActivationPlan) -> _Recorded:
        recipe, made = self.recipe, self.made
        streaming = {unit.index: unit.gathered_nbytes for unit, s in zip(made.units, self.units) if s.streams}
        prefetcher = Prefetcher(_Mover(), streaming, self.budget.division.window)
        pins = BackwardPins(prefetcher)
        position = partial(_position, prefetcher)
        weights = [segment.param for _, segment in made.units.segments()]
        profiler = _Roofline(weights, DTYPES[self.dtype], position)
        exempt = {
            each.untyped_storage()._cdata
            for each in (*weights, *(buffer for buffer in model.buffers() if buffer is not None))
        }
        blocks = recomputable_blocks(model)
        cache = _Cache(profiler, PassRecord(cast(Any, _Recomputes(plan, len(blocks)))), position, exempt)
        hooks = _RecordedHooks(made.units, made.leaves, cast(Any, _Activations(cache)))
        hooks.by_storage = {
            segment.param.untyped_storage()._cdata: unit for unit, segment in made.units.segments()
        }
        leaf_units = frozenset(unit.index for leaf in made.leaves.values() for unit in leaf)
        gradients = _Completions(made.units, leaf_units, prefetcher, pins)
        hooks.connect(prefetcher, pins, cast(Any, gradients), {}, lambda: None)
        hooks.logits.decide(recipe.memory.logits, self._pass_nbytes)
        batch, length = recipe.train.batch_size, recipe.model.seq_len
        with _hooked(model, hooks):
            loss = CausalLoss(model)
            tokens = torch.zeros((batch, length), dtype=torch.int64, device="cpu")
            targets = torch.zeros_like(tokens)
            with profiler, library_errors(CheckpointError, _WHY):
                value = loss(tokens, targets)
                value.backward()  # type: ignore[no-untyped-call]
            del value
        positions, flops, nbytes, fp32 = (np.array(column) for column in zip(*profiler.rows, strict=True))
        again = sum(
            flops for region, flops in profiler.regions_flops.items()
            if region % 2 and cache.record.policy.recomputes(region)
        )  # fmt: skip
        trace = StepTrace(
            events=tuple(Event(*event) for event in prefetcher.training.trace),
            begun=tuple(gradients.begun),
            completed=tuple(gradients.completed),
            position=positions, flops=flops, nbytes=nbytes, fp32=fp32,
            model_flops=float(flops.sum()) - again,
            tokens=batch * length,
            peak_nbytes=profiler.peak_nbytes(),
        )  # fmt: skip
        rate = np.where(fp32, self.rates.fp32_flops_per_s, self.rates.flops_per_s)
        each = np.maximum(flops / rate, nbytes / self.rates.memory_bytes_per_s)
        profiler.seconds = np.maximum(each, self.rates.operator_s).tolist()
        profile = profiler.finish().at_pace(sum(profiler.seconds))
        gc.collect()
        return _Recorded(trace, profile, cache)

    def _with_stored(self, trace: StepTrace, cache: _Cache, plan: ActivationPlan) -> StepTrace:
        after = {load.slot: load.after for load in plan.loads}
        stored = []
        for key, place in plan.places.items():
            if place is Place.KEEP or key not in cache.packs or key not in cache.asks:
                continue
            packed_at, nbytes = cache.packs[key]
            tied = after.get(key, key)
            load_at = cache.backward_at if tied is None else cache.asks.get(tied, cache.backward_at)
            stored.append(Stored(nbytes, packed_at, load_at, cache.asks[key], place is Place.NVME))
        return replace(trace, stored=tuple(stored))


_WHY = "the model cannot be planned without values, since what its forward does depends on them"


def _position(prefetcher: Prefetcher) -> int:
    return prefetcher.training.position


@contextmanager
def _hooked(model: nn.Module, hooks: Hooks) -> Iterator[None]:
    """Inside, modules tell ``hooks`` what they use."""
    before = {module: dict(module._parameters) for module in model.modules()}
    handles = []
    for module in model.modules():
        install_parameter_dict(module, lambda param, siblings: hooks.touch(param), _never, lambda param: None)
        handles += register_forward_hooks(module, hooks.enter, hooks.leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, own in before.items():
            module.__dict__["_parameters"] = own


def _never(param: nn.Parameter) -> nn.Parameter:
    raise CheckpointError("a model that copies its parameters while it runs cannot be planned")
