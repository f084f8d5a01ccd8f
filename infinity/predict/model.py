"""Builds a recipe's model without values: on the meta device, cut by the runtime's builder, then faked.

[Note: which form]
A published ``quantization_config`` is known if it is of a form that :func:`infinity.quantize` writes, or INT4
or INT8 of compressed-tensors, GPTQ or AWQ, with the same tensors for every matrix that it does not leave out;
then a frozen base is planned by its stored bytes.
"""

import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.activations.profiler import tensors_in
from infinity.activations.recompute import Choice
from infinity.api.lora import DEFAULT, follow, make_adapters, parameters_by_adapter
from infinity.api.saved import saved_tensors
from infinity.checkpoint.directory import Checkpoint, read_json_object
from infinity.checkpoint.directory import Stored as StoredTensor
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.load import CheckpointValues, Part, make_part
from infinity.checkpoint.model import build_model, is_ours, read_config
from infinity.checkpoint.quantize import FORMS, WITH_EXPERTS, published, template
from infinity.checkpoint.writer import create_files, plan_files
from infinity.core.plan import ActivationPlan, Hardware, Profile
from infinity.device.machine import DTYPES, Dtype
from infinity.engine.expert_blocks import ExpertBlock
from infinity.engine.schedule import Blocks
from infinity.partition.builder import CutSizes, UnitBuilder
from infinity.partition.init_context import Construction
from infinity.partition.unit import StoredForm, Unit, UnitIndex
from infinity.planner.search import plan as make_plan
from infinity.predict.operators import OperatorTimes
from infinity.predict.recording import Batch, Record, no_collection, play
from infinity.predict.repeats import record
from infinity.predict.step import StepTrace
from infinity.recipes.models import GPT
from infinity.recipes.objectives import loaded_as
from infinity.recipes.recipe import Recipe
from infinity.shards.base import BaseFiles

_IN_TILES = "experts are computed in tiles: planned as if all were equally likely for each token"
#: What tells the forms that are written from each other, and from others.
_TELLS = (
    "quant_method", "format", "quant_algo", "weight_block_size", "load_in_4bit", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
)  # fmt: skip


class _FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on tensors without values; torch's own knows grouped products of bf16 alone."""

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs or {})
        return _grouped_product(*args, **(kwargs or {}))


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: object = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    groups = [len(a)] if a.dim() == 3 else [] if offs is None else [len(offs)]
    groups = groups if a.dim() == b.dim() else []  # else rows of one belong to matrices of the other
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


class _Traffic(TorchDispatchMode):
    """Counts operators, but views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.prim.device.default:
            self.nbytes += sum(each.numel() * each.itemsize for each in tensors_in((args, kwargs, result)))
            self.operators += 1
        return result


class _NoValues:
    """Provides the sizes of values that never come; see :class:`infinity.partition.init_context.LateValues`.

    ``mode`` makes fake tensors on the CPU, where tables replace some operators that decode; None: an
    accelerator decodes.
    """

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self.base: CheckpointValues | None = None  # says what the checkpoint of a frozen base has
        self.sizes: Sequence[int] = ()  # of its files (bytes)
        #: Of units in stored form: the form, bytes that a rank reads, bytes and operators of decoding.
        self.stored: dict[int, tuple[StoredForm, int, int, int]] = {}
        #: Units that are read where they lie, and not quantized, and whether nothing is beside their weights.
        self.mapped: dict[int, bool] = {}
        self._mode, self._new = mode, True
        self.read_nbytes = functools.cache(self._read_nbytes)
        self._decoding: dict[tuple[Any, ...], tuple[int, int]] = {}  # of equal parts

    def _read_nbytes(self, unit: Unit, piece_nbytes: int, buffer_nbytes: int) -> int:
        """Return the bytes that a fetch of a unit in ``mapped`` reads, by pieces of ``piece_nbytes``."""
        assert self.base is not None
        return BaseFiles(self.base, self.sizes, buffer_nbytes).read_nbytes(unit, piece_nbytes)

    def counts(self, unit: Unit) -> bool:
        return False

    def fill(self, units: UnitIndex, masters: object) -> None:
        base, self._new = self.base if self._new else None, False  # adapters come later, with nothing in it
        if base is None:
            return
        files = BaseFiles(base, self.sizes)
        for unit in units:
            if base.why_not_mapped(unit):
                continue
            step = files.stored(unit)
            if step is None:
                self.mapped[unit.index] = base.is_exact(unit)
                continue
            form = files.form(unit, step, lambda stored, flat: None)
            read_nbytes, nbytes, operators = step.shard(unit.rank, unit.world_size).nbytes, 0, 0
            for _, part in base.parts(unit, 0, unit.numel):
                source = part.source
                key = type(source), source.shape, source.dtype, part.offset, part.numel, unit.dtype
                if key not in self._decoding:
                    self._decoding[key] = self._count(part, unit.dtype)
                nbytes, operators = nbytes + self._decoding[key][0], operators + self._decoding[key][1]
            self.stored[unit.index] = form, read_nbytes, nbytes, operators

    def _count(self, part: Part[StoredTensor], dtype: torch.dtype) -> tuple[int, int]:
        """Return bytes read and written to decode a part, and its operators, from a run without values."""
        device = "meta" if self._mode is None else "cpu"

        def view(file: object, offset: int, nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        with self._mode or nullcontext():
            out = torch.empty(part.numel, dtype=dtype, device=device)
            with _Traffic() as traffic:
                make_part(part, out, view)
        return traffic.nbytes, traffic.operators


def _largest(by_adapter: Mapping[str, Sequence[nn.Parameter]]) -> str:
    return max(by_adapter, key=lambda name: sum(param.numel() for param in by_adapter[name]))


class ModelWithoutValues:
    """Builds a recipe's model on the meta device, with its adapters if there are any, cut into units.

    Args:
        times: Times of operators on this machine; None: another machine is planned for.
        like: The same model in units of other sizes, whose checkpoint need not be looked at again.
    """

    def __init__(
        self, recipe: Recipe, ranks: int, dtype: Dtype, sizes: CutSizes, times: OperatorTimes | None, *,
        on_accelerator: bool, like: "ModelWithoutValues | None" = None,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []  # for people, about what is taken for granted
        self.key: tuple[object, CutSizes] = (), sizes  # what the model follows from, and its units
        self.ranks, self.dtype, self.times = ranks, dtype, times
        self._mode, self._is_fake = _FakeTensors(allow_non_fake_inputs=False), False
        self.values = _NoValues(None if on_accelerator else self._mode)
        self._made: dict[object, Any] = {}  # records and their traces, by what they follow from
        masters: Any = SimpleNamespace(
            put=lambda unit, master: None, get=lambda unit: torch.empty(unit.numel, device="meta")
        )
        construction = Construction(
            lambda close: UnitBuilder(
                DTYPES[dtype], 0, ranks, close, recipe.partition.leaf, sizes=sizes, without_values=True
            ),
            masters,
            lambda module: lambda module: None,
            torch.device("meta"),
        )
        path = None if recipe.model.path is None else Path(recipe.model.path)
        again = like is not None and like.values.base is not None
        stored_as = nullcontext() if again else self._stored_as(path, recipe.model.stored_as)
        with no_collection(), stored_as as stored, torch.device("meta"):
            construction.late = None if path is None else self.values
            with construction:
                if path is None:
                    self.module: Any = GPT(recipe.model)
                else:
                    self.module = self._of_checkpoint(path, stored or path, recipe, like if again else None)
            if recipe.trains_adapters:
                self.module.requires_grad_(False)
                for name, task in recipe.tasks.items():
                    self.module = make_adapters(self.module, construction, task.lora, name or DEFAULT)
                # Of several the largest is used; in a plan each of their micro-batches is like its.
                follow(self.module, Choice(_largest(parameters_by_adapter(self.module))))
        self.units = construction.builder.units
        self.leaves = construction.builder.leaves if ranks > 1 else {}
        self.module.train()
        if any(unit.routed for unit in self.units) and _IN_TILES not in self.notes:
            self.notes.append(_IN_TILES)

    @property
    def of_others(self) -> frozenset[int]:
        """Return the units of adapters other than the one that is used."""
        found = parameters_by_adapter(self.module)
        used = _largest(found) if found else None
        others = {id(param) for name in found if name != used for param in found[name]}
        trained = ((unit.index, {id(each.whole) for each in unit.trainable}) for unit in self.units)
        return frozenset(index for index, ids in trained if ids and ids <= others)

    @functools.cached_property
    def expert_blocks(self) -> Mapping[nn.Module, ExpertBlock]:
        """Blocks with packed experts, which take all micro-batches together in a layer schedule."""
        blocks = Blocks.of(self.module).modules
        return {block: run for block in blocks if (run := ExpertBlock.of(block, lambda tile: 1.0))}

    @property
    def has_experts(self) -> bool:
        return bool(self.expert_blocks)

    def record(self, batch: Batch, plan: ActivationPlan) -> Record:
        """Record a micro-batch of :meth:`faked`'s model, once for the blocks that ``plan`` recomputes."""
        everything = plan.policy == "recompute" and not plan.recomputed
        key = batch, everything, plan.recomputed
        if key not in self._made:
            self._made[key] = record(
                self.module, self.units, self.leaves, DTYPES[self.dtype], batch,
                lambda region: everything or region in plan.recomputed,
            )  # fmt: skip
        return cast(Record, self._made[key])

    def trace(self, record: Record, streaming: Mapping[int, int], window_nbytes: int) -> StepTrace:
        """Return the trace of a record with units that stream (bytes) through a window."""
        key = id(record), tuple(streaming.items()), window_nbytes
        if key not in self._made:
            of_leaves = frozenset(unit.index for leaf in self.leaves.values() for unit in leaf)
            self._made[key] = play(record, self.units, of_leaves, streaming, window_nbytes)
        return cast(StepTrace, self._made[key])

    def profile(self, record: Record, times: tuple[float, ...]) -> Profile:
        if (key := (id(record), times)) not in self._made:
            self._made[key] = record.recorded.profile(times, 0.0)
        return cast(Profile, self._made[key])

    def planned(
        self, profile: Profile, hardware: Hardware, capacity_nbytes: int | None, like: ActivationPlan | None
    ) -> ActivationPlan:
        """Return the plan for one of its profiles; it is searched once, near ``like`` if that is given."""
        key: tuple[object, ...] = id(profile), hardware, capacity_nbytes
        if like is not None and key not in self._made:
            key = *key, like.recomputed, tuple(like.kept)
        if key not in self._made:
            self._made[key] = make_plan(profile, hardware, capacity_nbytes, like)
        return cast(ActivationPlan, self._made[key])

    @contextmanager
    def _stored_as(self, path: Path | None, form: Any) -> Iterator[Path | None]:
        """Make a directory as the run will read it, without values; None: it reads ``path`` itself."""
        has_weights = path is not None and any(path.glob("*.safetensors"))
        if path is not None and not has_weights and not is_ours(path) and form is None:
            given = read_json_object(path / "config.json").get("quantization_config")
            form = _form_of(given) if isinstance(given, dict) else None
        if path is None or form is None:
            yield None
        else:
            with (template if has_weights else _unwritten)(path, form) as folder:
                if not has_weights:
                    self.notes.append(f"{path} holds no weights: planned as if it had them in {form}")
                yield folder

    def _of_checkpoint(
        self, path: Path, stored_in: Path, recipe: Recipe, like: "ModelWithoutValues | None"
    ) -> Any:
        """Build the model of ``path``; its frozen weights are read from files like those in ``stored_in``.

        ``like`` has found the sources of its values before.
        """
        given = None if is_ours(path) else read_json_object(path / "config.json").get("quantization_config")
        how, dtype = loaded_as(recipe.train.task, recipe.model), DTYPES[self.dtype]
        auto_class, new, ignore = (how.pop(key, None) for key in ("auto_class", "new", "ignore"))
        config = read_config(path, how | ({"quantization_config": None} if isinstance(given, dict) else {}))
        model = build_model(config, auto_class, dtype)
        if like is not None and like.values.base is not None:
            self.notes += like.notes
            self.values.sizes = like.values.sizes
            self.values.base = like.values.base.again(model)
            return model
        if not any(stored_in.glob("*.safetensors")):
            self.notes.append(f"{path} holds no weights: planned from its config.json")
        else:
            with Checkpoint(stored_in) as stored:
                if recipe.trains_adapters and recipe.memory.nvme and stored.files:
                    # The headers of its files say what a frozen base is made of.
                    quantization = read_quantization(stored_in)
                    if quantization is not None:
                        decode_checkpoint(stored, quantization, dtype)
                    self.values.base = CheckpointValues(stored, new, ignore)
                    self.values.base.prepare(model)
                    self.values.sizes = [os.fstat(file.fd).st_size for file in stored.files]
        if isinstance(given, dict) and self.values.base is None:
            method = given.get("quant_method", "by its config")
            note = f"the checkpoint is quantized ({method}): planned as if its weights were {dtype}"
            self.notes.insert(0, note)
        return model

    @contextmanager
    def faked(self) -> Iterator[None]:
        """Allow fake tensors in the context; the first time, parameters and buffers become fake."""
        with self._mode:
            if not self._is_fake:
                self._fake()
            yield

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


def _form_of(given: Mapping[str, Any]) -> Any:
    """Return the form that a ``quantization_config`` speaks of, for :func:`template`; None: it is unknown."""
    for name, form in (*FORMS.items(), *WITH_EXPERTS.items()):
        if all((form.config.get(key) or None) == (given.get(key) or None) for key in _TELLS):
            return name
    method, left = given.get("quant_method"), given.get("ignore") or given.get("modules_to_not_convert") or ()
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        if method == "compressed-tensors" and given.get("format") == "pack-quantized":
            [group] = given["config_groups"].values()
            weights, size = group["weights"], int(group["weights"].get("group_size") or 0)
            said = {**given, "sym": weights.get("symmetric", True)}
            return published("pack-quantized", said, int(weights["num_bits"]), max(0, size), left)
        if method in ("gptq", "awq"):
            return published(method, given, int(given.get("bits", 4)), max(0, int(given["group_size"])), left)
    return None


@contextmanager
def _unwritten(path: Path, form: Any) -> Iterator[Path]:
    """Make the directory that ``path``, a config.json without weights, would be in ``form``.

    It holds no values, and goes with the context. Raises a CheckpointError as
    :func:`infinity.checkpoint.quantize.template`.
    """
    with tempfile.TemporaryDirectory(prefix="infinity-") as folder:
        plain = Path(folder)
        with torch.device("meta"):
            model = build_model(read_config(path, {"quantization_config": None}), None, torch.bfloat16)
        dtype = getattr(model.config, "dtype", None) or torch.bfloat16
        saved = saved_tensors(model, model.state_dict(keep_vars=True))
        specs = [replace(each.spec, dtype=dtype) for each in saved]
        create_files(plain, plan_files(specs), {})
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with template(plain, form) as made:
            yield made
