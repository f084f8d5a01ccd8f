"""Provides ``infinity.export``: a trained model as a Hugging Face directory, streamed: plan, write, publish.

[Note: which rank writes what]
A saved tensor that is made of parameters' own values is written by each rank in the part that its shards
hold: nothing is gathered. Tensors that transformers computes are gathered with those that it computes them
from, converted on every rank, and each writes an equal part. Rank 0 writes the rest: headers, buffers,
configs, the tokenizer. So every rank must see the directory's file system. What may be refused (room,
configs, tokenizer) comes first.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from infinity.api import saved
from infinity.api.adapters import rows_of_owners, saved_names
from infinity.api.lora import DEFAULT, check_adapter, placeholders_in_state_dict
from infinity.api.saved import MAX_SHARD_NBYTES, MergedModel, convert, saved_tensors, write_companions
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.load import OnProgress, Part, cut, named_targets
from infinity.checkpoint.quantize import Requantized, export_stored
from infinity.checkpoint.writer import Publication, TensorSpec, check_room, new_directory, plan_files, writing
from infinity.comm.ranks import all_ranks_or_raise
from infinity.core.errors import CheckpointError, listed, quiet_libraries
from infinity.core.files import user_path
from infinity.core.nbytes import Transfer, stream
from infinity.core.process import UninterruptedExit, uninterrupted
from infinity.device.memory import Lease
from infinity.engine.runtime import Runtime, runtime_of
from infinity.partition.unit import Unit, UnitIndex
from infinity.shards.homes import HostHome
from infinity.shards.storage import chunk_places

#: Chunks of weights that are read at a time.
_READ_AHEAD = 8


def export(
    model: nn.Module, out: str | Path, *, max_shard_nbytes: int = MAX_SHARD_NBYTES, tokenizer: Any = None,
    stored_as: str | Path | None = None, merge: bool = False, adapter: str | None = None, ema: bool = False,
    on_progress: OnProgress | None = None,
) -> Requantized | None:  # fmt: skip
    """Write ``model`` to a new Hugging Face directory, from which ``from_pretrained`` loads it.

    Weights are in the compute dtype, bitwise those of ``model.state_dict()``. The directory appears when it
    is whole; an export that fails or is killed leaves nothing under its name. Beside a few staging buffers,
    memory holds only weights that transformers converts together. Every rank must call.

    Args:
        model: Of transformers, or with a dataclass as its config, if any; then keys are ``state_dict``'s.
        out: On a file system that all ranks see; new, or empty; rank 0's value is used.
        max_shard_nbytes: The most bytes of values in one file; a larger tensor has a file to itself.
        tokenizer: A directory whose tokenizer's files are copied, a ``tokenizer.json``, or an object with
            ``save_pretrained``; rank 0's value is used.
        stored_as: The quantized checkpoint that the model was loaded from. Weights are quantized again, into
            the same files, keys, dtypes and ``quantization_config``; unchanged ones keep their bytes. This
            needs room for the compute dtype, too, until ``out`` is complete.
        merge: Write the base with the adapters of ``model`` merged into its weights: these are streamed from
            the checkpoint that was loaded, and adapters are added in fp32, a block of rows at a time.
        adapter: With ``merge``, the name of the one that is merged, if the model has several.
        ema: Write the average of the weights that the optimizer keeps (its ``ema``) in place of the weights.
        on_progress: Called with "writing" or "quantizing", the bytes that this rank has done, and all.

    Returns:
        With ``stored_as``, what quantization changed; its ``str`` is one line.

    Raises:
        CheckpointError: ``out`` is not free, there is no tokenizer, or the model cannot be saved or does not
            fit the stored form.
        DiskError: A drive failed or is full; says where, and what is free.
        PeerError: Another rank failed; says which and why.
        StateError: ``ema``, but the optimizer keeps no average.
    """
    runtime, out = runtime_of(model), user_path(out, "out")
    how: dict[str, Any] = {"max_shard_nbytes": max_shard_nbytes, "on_progress": on_progress}
    like = None if stored_as is None else user_path(stored_as, "stored_as")
    if merge:
        return _merge(model, runtime, out, adapter, ema, stored_as=like, tokenizer=tokenizer, **how)
    if like is None:
        _write(model, runtime, out, ema=ema, tokenizer=tokenizer, **how)
        return None

    @contextlib.contextmanager
    def values() -> Iterator[Checkpoint]:
        with Publication(out, runtime.ranks) as hidden:  # is never published
            _write(model, runtime, plain := hidden.path / "plain", ema=ema, **how)
            with all_ranks_or_raise(runtime.ranks, f"opening {plain}"):
                found = Checkpoint(plain)
            with found:
                yield found

    tensors = {item.spec.key: item.spec for item in saved_tensors(model, dict(named_targets(model)))}
    prepare = partial(write_companions, model, tokenizer)
    return export_stored(like, out, tensors, values(), prepare, ranks=runtime.ranks, on_progress=on_progress)


def stream_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of all that :func:`export` writes, for a server that takes new weights.

    As vLLM's ``load_weights`` and SGLang's ``update_weights_from_tensor`` take them: keys of the checkpoint,
    experts one by one, in the compute dtype, on the device. One unit is gathered at a time. A value that is
    not one piece of it takes memory beside the budgets; so do tensors that transformers computes from others,
    which are gathered together. A value is valid until the next one is asked for. Every rank must iterate to
    the end, and gets all of them.

    Raises:
        CheckpointError: The model has adapters: servers load what :func:`infinity.save_lora` writes.
        StateError: There are gradients of a step that is not over.
    """
    runtime = runtime_of(model)
    runtime.check_between_steps()
    named, device = dict(named_targets(model)), runtime.ranks.device
    plan = plan_export(model, named, runtime.units)
    wanted = {spec.key: spec for spec in plan.specs}
    begun: dict[str, tuple[Tensor, int]] = {}  # flat values of which some have come, and how many have not

    def taken(flat: Tensor, parts: Iterable[Part[str]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what is whole with the elements of ``flat``."""
        for at, key, first, numel in parts:
            spec, value, left = wanted[key], flat[at : at + numel], 0
            if numel < spec.numel:
                whole = torch.empty(0 if key in begun else spec.numel, dtype=spec.dtype, device=device)
                whole, left = begun.pop(key, (whole, spec.numel))
                whole[first : first + numel] = value
                value, left = whole, left - numel
            if left:
                begun[key] = value, left
            else:
                yield key, value.view(spec.shape)

    apart = {spec.key for specs in plan.converted.values() for spec in specs}
    for spec in plan.specs:
        if not spec.numel and spec.key not in apart:  # no buffer has a part of it
            yield spec.key, torch.empty(spec.shape, dtype=spec.dtype, device=device)
    for tensor in plan.whole:
        yield from taken(tensor.detach().reshape(-1), plan.places[id(tensor)])
    for unit in runtime.units:
        if parts := plan.parts(unit, 0, unit.numel):
            with UninterruptedExit() as held:
                with uninterrupted:
                    held.enter_context(runtime.values.full(unit, modify=False))
                assert unit.flat is not None
                yield from taken(unit.flat, parts)
    for group in plan.converted.items():
        with _converted(model, named, runtime, *group, device=device) as found:
            yield from found.items()


def _merge(
    model: Any, runtime: Runtime, out: Path, adapter: str | None, ema: bool, **how: Any
) -> Requantized | None:
    """Write the base of ``model`` with an adapter merged; that is written beside ``out`` meanwhile."""
    ranks = runtime.ranks
    with all_ranks_or_raise(ranks, f"merging adapters into {out}"):
        if not hasattr(model, "peft_config"):
            raise CheckpointError(f"{type(model).__name__} has no adapters to merge: export it without merge")
        if adapter is None and len(model.peft_config) > 1:
            names = ", ".join(map(repr, model.peft_config))
            raise CheckpointError(f"the model has the adapters {names}; merge adds one: name it, adapter=...")
        name = adapter or next(iter(model.peft_config))
        if adapter is not None:
            check_adapter(model, adapter)
        named, plain = model.peft_config[name].base_model_name_or_path, model.get_base_model()
        base = Path(named or "")  # "" is the working directory, which may be a checkpoint of another model
        if not named or not (base / "config.json").is_file():
            found = f"{named} is no directory with config.json" if named else "the adapters name none"
            raise CheckpointError(
                f"merge needs the checkpoint that the base was loaded from: {found}. Load "
                "the base with infinity.from_pretrained, or save adapters alone (save_lora)"
            )
    with Publication(out, ranks) as place:  # is never published
        with all_ranks_or_raise(ranks, f"writing adapters beside {out}"):
            save_lora(model, folder := place.path / "adapters", name=name, ema=ema)
        with all_ranks_or_raise(ranks, f"opening {base}"):
            merged = MergedModel(base, folder, runtime.dtype, plain.config, type(plain))
        with merged:
            merged.model.generation_config = getattr(plain, "generation_config", None)
            return saved.merge(merged, out, ranks=ranks, **how)


def save_lora(
    model: Any, directory: str | Path, *, per_expert: bool = False, name: str | None = None,
    ema: bool = False,
) -> None:  # fmt: skip
    """Save the adapters that :func:`add_lora` made, for ``peft.PeftModel.from_pretrained``; all must call.

    The adapter called ``name`` is saved; None: all, and those with a name each in a directory of that name
    inside ``directory``, which must not exist, or be empty; it appears on rank 0, whole or not at all. One
    unit of adapters is gathered at a time. With ``per_expert`` adapters of packed experts are those of one
    layer for each expert, as vLLM and SGLang load them, and alphas of single layers are a factor of their
    values; a CheckpointError says that checkpoints of this kind of model have no such layers. With ``ema``
    they are the average that the optimizer keeps. DiskError: a drive failed or is full, on every rank.
    """
    out, known = user_path(directory, "directory"), [*getattr(model, "peft_config", ())]
    if not known:
        raise CheckpointError(
            f"{type(model).__name__} is no model that add_lora returned, so it has no adapters to save; "
            "infinity.export saves all weights"
        )
    if name is not None:
        check_adapter(model, name)
    alone = name is not None or known == [DEFAULT]
    runtime_of(model).units.parts.check_none("save_lora", divided=True)
    ranks = runtime_of(model).ranks
    with contextlib.ExitStack() as stack:
        with all_ranks_or_raise(ranks, f"making {out}"):
            place = stack.enter_context(Publication(out)) if ranks.rank == 0 else None
        for each in known if name is None else [name]:
            values = _gathered(model, each, ema)
            with all_ranks_or_raise(ranks, f"writing adapters to {out}"):
                if place is not None:
                    folder = place.path if alone else place.path / each
                    with writing(f"writing adapters to {folder}", folder):
                        folder.mkdir(exist_ok=True)
                        _write_lora(model, values, folder, each, per_expert=per_expert)
        with all_ranks_or_raise(ranks, f"publishing {out}"):
            if place is not None:
                place.publish()


def _gathered(model: Any, adapter: str, ema: bool) -> dict[str, Tensor]:
    """Return what is saved with an adapter, on the CPU of rank 0, by full name; every rank must call."""
    from infinity.api.expert_lora import factors_of

    runtime, factors = runtime_of(model), factors_of(model)
    with placeholders_in_state_dict(model):
        wanted = {id(tensor) for tensor in saved_names(model, adapter).values()}
    named = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    values = {name: b.detach().cpu() for name, b in model.named_buffers() if id(b) in wanted}
    for unit in runtime.units:
        ends = {id(s.whole) for s in unit.segments if s.is_last}
        inside = {name: param for name, param in named.items() if id(param) in ends}
        if not inside:
            continue
        units = runtime.units.holding(inside.values())
        with runtime.values.averaged(units, ema=ema), runtime.values.gathered(inside.values(), modify=False):
            for name, param in inside.items():
                factor, value = factors.get(id(param)), runtime.values.whole(param)
                if runtime.ranks.rank == runtime.ranks.first:
                    values[name] = (value if factor is None else factor.as_matrix(value)).cpu().clone()
    return values


def _write_lora(model: Any, values: dict[str, Tensor], folder: Path, name: str, *, per_expert: bool) -> None:
    """Write one adapter in peft's format, with a card that names its base, into ``folder``."""
    from huggingface_hub import ModelCard

    with placeholders_in_state_dict(model), rows_of_owners(model, name), quiet_libraries():
        how = {"save_embedding_layers": False, "selected_adapters": [name]}
        model.save_pretrained(str(folder), state_dict=values, **how)
    if (inside := folder / name).is_dir():  # where peft writes adapters of other names than its default
        for path in inside.iterdir():
            path.replace(folder / path.name)
        inside.rmdir()
    if per_expert:
        saved.split_experts(folder, folder, model.get_base_model().config)
    card = ModelCard.load(folder / "README.md")  # peft's form, whose text is replaced
    base = model.peft_config[name].base_model_name_or_path or "the model that they were trained on"
    card.text = _CARD.format(base=base, dtype=runtime_of(model).dtype)
    card.save(folder / "README.md")


_CARD = """
# Adapters of {base}

They change that model and no other. With transformers and peft:

    base = AutoModelForCausalLM.from_pretrained("{base}", dtype={dtype})
    model = PeftModel.from_pretrained(base, "the directory of this file")
"""


def check_room_for(model: nn.Module, folder: Path, copies: int = 1) -> None:
    """Raise a DiskError if ``folder`` has no room for as many copies as :func:`export` writes."""
    nbytes = copies * sum(p.numel() * p.itemsize for p in model.parameters())
    check_room(folder, nbytes, f"finding room for the trained model in {folder}")


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Holds the tensors of a directory in order, and where their values come from; the same on every rank."""

    specs: Sequence[TensorSpec]
    #: By id of a tensor of the model, where its elements go that are written unchanged: to elements from
    #: ``offset`` on of that called ``source``; in order.
    places: Mapping[int, list[Part[str]]]
    whole: Sequence[Tensor]  # those of ``places`` that are in no unit: every rank has them
    #: Names of tensors that are converted together, and the results.
    converted: Mapping[frozenset[str], list[TensorSpec]]

    def parts(self, unit: Unit, start: int, stop: int) -> list[Part[str]]:
        """Return where elements ``[start, stop)`` of the flat buffer go, counted from ``start``."""
        return [
            part._replace(start=low - start + part.start)
            for segment, low, first, numel in unit.within(start, stop)
            if id(segment.whole) in self.places
            for part in cut(self.places[id(segment.whole)], first, numel)
        ]


def plan_export(model: nn.Module, named: Mapping[str, Tensor], units: UnitIndex) -> ExportPlan:
    """Plan a directory of ``model``, in the order in which its values come from the drive.

    ``named`` are its tensors by its own names; those that no unit of ``units`` has are whole on every rank.
    """
    units.parts.check_none("an export")

    def end(name: str) -> tuple[int, str, int]:
        tiles: Any = units.places(cast(Any, named[name]))
        return (tiles[-1][0].index, "", tiles[-1][1].offset) if tiles else (-1, name, 0)

    saved = sorted(saved_tensors(model, named), key=lambda item: max(map(end, item.sources)))
    places: dict[int, list[Part[str]]] = {}
    converted: dict[frozenset[str], list[TensorSpec]] = {}
    for item in saved:
        if item.parts is None:
            converted.setdefault(item.sources, []).append(item.spec)
        for at, name, first, numel in item.parts or ():
            places.setdefault(id(named[name]), []).append(Part(first, item.spec.key, at, numel))
    for each in places.values():
        each.sort(key=lambda part: part.start)
    loose = {id(each): each for each in named.values() if not units.places(cast(Any, each))}
    whole = [each for key, each in loose.items() if key in places]
    return ExportPlan([item.spec for item in saved], places, whole, converted)


def _write(
    model: nn.Module, runtime: Runtime, out: Path, *, max_shard_nbytes: int, tokenizer: Any = None, ema: bool,
    on_progress: OnProgress | None,
) -> None:  # fmt: skip
    """Write ``model`` to ``out``; every rank must call."""
    ranks = runtime.ranks
    with all_ranks_or_raise(ranks, f"planning {out}"):
        named = dict(named_targets(model))
        plan = plan_export(model, named, runtime.units)
        files = plan_files(plan.specs, max_shard_nbytes)
    prepare = partial(write_companions, model, tokenizer)
    with new_directory(files, out, ranks, prepare, on_progress=on_progress) as put:
        with all_ranks_or_raise(ranks, f"writing {out}"):
            for tensor in plan.whole if ranks.rank == 0 else ():
                values = tensor.detach().cpu().contiguous().reshape(-1)
                for at, key, first, numel in plan.places[id(tensor)]:
                    put(key, first, values[at : at + numel])
        # Of averages, which take the place of weights, there is room for those of one unit.
        apart = itertools.groupby(runtime.units, lambda unit: unit.index if ema and unit.home.trains else -1)
        for units in (list(group) for _, group in apart):
            with runtime.values.averaged(units, ema=ema), all_ranks_or_raise(ranks, f"writing {out}"):
                for unit, start, values in _read_weights(runtime, plan, units):
                    for at, key, first, numel in plan.parts(unit, start, start + len(values)):
                        put(key, first, values[at : at + numel])
        for group in plan.converted.items():
            sources: list[Any] = [named[name] for name in sorted(group[0])]
            units = runtime.units.holding(sources)
            with (
                runtime.values.averaged(units, ema=ema),
                all_ranks_or_raise(ranks, f"converting {listed(sorted(group[0]), 2)}"),
                _converted(model, named, runtime, *group, device=torch.device("cpu")) as found,
            ):
                for key, value in found.items():
                    flat = value.contiguous().reshape(-1)
                    first, stop = (len(flat) * (ranks.rank + n) // ranks.world_size for n in (0, 1))
                    put(key, first, flat[first:stop])


def _read_weights(
    runtime: Runtime, plan: ExportPlan, units: Iterable[Unit]
) -> Iterator[tuple[Unit, int, Tensor]]:
    """Yield this rank's newest weights that are written unchanged, from the drive chunk by chunk, ascending.

    Each is a unit, the first element in its flat buffer, and values on the CPU, valid until the next one.
    """
    tiers = runtime.tiers
    runtime.synchronize()  # when all ranks can agree on its error

    def read(chunk: tuple[Unit, int, int], lease: Lease) -> Transfer:
        unit, begin, nbytes = chunk
        return unit.home.read_weight(lease.memory[:nbytes], begin * unit.dtype.itemsize)

    for resident, group in itertools.groupby(units, lambda unit: isinstance(unit.home, HostHome)):
        if resident:
            for unit in group:
                tiers.at_home(unit)
                assert isinstance(unit.home, HostHome)
                if plan.parts(unit, unit.shard_start, unit.shard_start + unit.shard_numel):
                    yield unit, unit.shard_start, unit.home.weight
            continue
        chunks = [
            (unit, begin, numel * unit.dtype.itemsize)
            for unit in group
            for begin, numel in chunk_places(unit.shard_numel, tiers.store.chunk_numel)
            if plan.parts(unit, unit.shard_start + begin, unit.shard_start + begin + numel)
        ]
        size = max((nbytes for _, _, nbytes in chunks), default=0)
        with contextlib.ExitStack() as held:
            leases = (tiers.storage.host_pool.lease(size, who="exporting") for _ in chunks[:_READ_AHEAD])
            buffers = [held.enter_context(lease) for lease in leases]
            reading = held.enter_context(contextlib.closing(stream(chunks, buffers, read)))
            for (unit, begin, nbytes), lease in reading:
                yield unit, unit.shard_start + begin, lease.tensor[:nbytes].view(unit.dtype)


@contextlib.contextmanager
def _converted(
    model: nn.Module, named: Mapping[str, Tensor], runtime: Runtime, names: Iterable[str],
    specs: Sequence[TensorSpec], *, device: torch.device,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Yield what transformers makes of the tensors ``names``, gathered together, on a device."""
    tensors: dict[str, Any] = {name: named[name] for name in sorted(names)}
    with runtime.values.gathered(tensors.values(), modify=False):
        yield convert(model, {name: each.detach().to(device) for name, each in tensors.items()}, specs)
