"""A recipe's model without values: built on the meta device, cut by the runtime's builder, then faked."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.api.lora import make_adapters
from infinity.checkpoint.conversions import Part
from infinity.checkpoint.directory import Checkpoint, read_json_object
from infinity.checkpoint.directory import Stored as StoredTensor
from infinity.checkpoint.load import CheckpointValues, make_part
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.quantized import decode_checkpoint, read_quantization
from infinity.core.plan import ActivationPlan
from infinity.partition.builder import CutSizes, UnitBuilder
from infinity.partition.init_context import Construction
from infinity.partition.unit import StoredForm, Unit, UnitIndex
from infinity.predict.operators import OperatorTimes
from infinity.predict.recording import Batch, Record
from infinity.predict.recording import record as record_micro_batch
from infinity.recipes.models.gpt import GPT
from infinity.recipes.recipe import Recipe
from infinity.shards.base import BaseFiles

#: Tensors that a checkpoint without weights is taken to have.
_UNKNOWN_TENSORS = 100_000


class _NoMasters:
    """Takes no values, and gives shapes; see :class:`infinity.partition.init_context.Masters`."""

    def put(self, unit: Unit, master: object) -> None:
        pass

    def get(self, unit: Unit) -> Tensor:
        return torch.empty(unit.numel, device="meta")


class _Traffic(TorchDispatchMode):
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
    """Costs of decoding, counted from the operators that decode tensors without values.

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
            with _Traffic() as traffic:
                make_part(part, out, view)
        return traffic.nbytes, traffic.operators


class _NoValues:
    """Values never come; see :class:`infinity.partition.init_context.LateValues`.

    Attributes:
        base: Says what the checkpoint of a frozen base has for the model; None: it is another one.
        sizes: Sizes of the checkpoint's files (bytes).
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

    def read_nbytes(self, unit: Unit, piece_nbytes: int, buffer_nbytes: int) -> int:
        """Return what a fetch of a unit in ``mapped`` reads, in pieces of so many bytes of weights."""
        key = unit.index, piece_nbytes, buffer_nbytes
        if key not in self._read:
            assert self.base is not None
            self._read[key] = BaseFiles(self.base, self.sizes, buffer_nbytes).read_nbytes(unit, piece_nbytes)
        return self._read[key]

    def counts(self, unit: Unit) -> bool:
        return False

    def fill(self, units: UnitIndex, masters: object) -> None:
        base, self._new = self.base if self._new else None, False  # adapters come later, with nothing in it
        for unit in () if base is None else units:
            assert base is not None
            if base.why_not_mapped(unit):
                continue
            files = BaseFiles(base, self.sizes)
            step = files.stored(unit)
            if step is None:
                self.mapped.add(unit.index)
            else:
                form = files.form(unit, step, lambda stored, flat: None)
                self.stored[unit.index] = form, step.shard(unit.rank, unit.world_size).nbytes
                for device, on_accelerator in (("meta", True), ("cpu", False)):
                    self._decode[unit.index, on_accelerator] = self._decoding[device].of(base, unit)


class ModelWithoutValues:
    """A recipe's model on the meta device, cut into units.

    Attributes:
        module: The model, with adapters if the recipe has them.
        notes: Lines for people about what is taken for granted.
        values: Know what of the model travels in its stored form.
        sizes: The largest units and tiles.
        times: Times of operators on this machine; None: another machine is planned for.
    """

    def __init__(
        self, recipe: Recipe, ranks: int, dtype: torch.dtype, sizes: CutSizes, times: OperatorTimes | None
    ) -> None:
        self.notes: list[str] = []
        self.times = times
        self.sizes, self._dtype = sizes, dtype
        self._mode, self._is_fake = FakeTensorMode(allow_non_fake_inputs=False), False
        self.values = _NoValues(self._mode)
        self.construction = Construction(
            lambda close: UnitBuilder(
                dtype, 0, ranks, close, recipe.partition.leaf, sizes=sizes, without_values=True
            ),
            _NoMasters(),
            lambda module: lambda module: None,
            torch.device("meta"),
        )
        with torch.device("meta"):
            if recipe.model.path is None:
                with self.construction:
                    self.module: Any = GPT(recipe.model)
            else:
                self.construction.late = self.values
                with self.construction:
                    self.module = self._of_checkpoint(Path(recipe.model.path), recipe, dtype)
            if recipe.lora.rank is not None:
                self.module.requires_grad_(False)
                settings = asdict(recipe.lora)
                self.module = make_adapters(self.module, self.construction, **settings)
        self.units = self.construction.builder.units
        self.leaves = self.construction.builder.leaves if ranks > 1 else {}
        self.module.train()
        if any(unit.routed for unit in self.units):
            self.notes.append("experts are computed in tiles: planned as if each step used all of them")
        self._records: dict[object, Record] = {}

    @property
    def of_leaves(self) -> frozenset[int]:
        """Indices of units that are gathered as parts of a leaf."""
        return frozenset(unit.index for leaf in self.leaves.values() for unit in leaf)

    def record(self, batch: Batch, plan: ActivationPlan) -> Record:
        """Record a micro-batch of :meth:`faked`'s model, once for the blocks that ``plan`` recomputes."""
        everything = plan.policy == "recompute" and not plan.recomputed
        key = batch, everything, plan.recomputed
        if key not in self._records:
            self._records[key] = record_micro_batch(
                self.module, self.units, self.leaves, self._dtype, batch,
                lambda region: everything or region in plan.recomputed,
            )  # fmt: skip
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
            yield self.module

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
        for module in self.module.modules():
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
    given = read_json_object(path / "config.json").get("quantization_config")
    return None if not isinstance(given, dict) else str(given.get("quant_method", "by its config"))
