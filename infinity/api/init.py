"""Builds, quantizes and loads models, and reads, changes and closes them between steps."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from infinity.activations.recompute import patched
from infinity.api import optimizer as own
from infinity.api.lora import adapter, check_adapter, check_adapters
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.checkpoint.load import CheckpointValues, OnProgress
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.quantize import Requantized, fingerprint, quantize_checkpoint, template
from infinity.comm.ranks import ALONE, agree, all_ranks_or_raise
from infinity.core.config import SettingError
from infinity.core.errors import CheckpointError, InfinityError, StateError, library_errors
from infinity.core.files import own_directory, shared_directory, user_path
from infinity.core.nbytes import format_nbytes
from infinity.core.process import UninterruptedExit, uninterrupted, weakly
from infinity.engine.executor import check_mesh, engine_config
from infinity.engine.gradients import OnGradient
from infinity.engine.runtime import Runtime, open_runtimes, runtime_of, runtimes, served
from infinity.engine.schedule import LayerSchedule, Loss
from infinity.engine.stages import StagedSchedule
from infinity.nvme.volume import open_sealed
from infinity.partition.divided import parallelize
from infinity.shards.base import BaseHome, FrozenBase
from infinity.shards.journal import unpack


def is_served(model: nn.Module) -> bool:
    """Return whether ``model``, or a model that it wraps, was built under ``infinity.Init``."""
    return any(module in served for module in model.modules())


def _refuse_other_optimizers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before another optimizer writes to a parameter that a unit holds."""
    if not open_runtimes or hasattr(optimizer, "runtime"):
        return
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if any(runtime.units.places(param) for runtime in open_runtimes):
            raise StateError(
                f"{type(optimizer).__name__}.step() on parameters that were made under infinity.Init, whose "
                "gradients and states are sharded: write optimizer = infinity.AdamW(model, lr=...)"
            )


def _refuse_wrappers(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise before a wrapper that copies or reduces parameters itself writes to those that a unit holds."""
    kinds = ("DistributedDataParallel", "DeepSpeedEngine")
    if type(wrapper).__name__ in kinds and module is not None and is_served(module):
        raise StateError(
            f"{type(wrapper).__name__} around a model that was built under infinity.Init, which shards "
            "weights and reduces gradients itself: use the model as it is (with Accelerate, the Trainer or "
            "Lightning as in examples/)"
        )


# Public hooks of torch, for all optimizers and modules: nothing is patched.
register_optimizer_step_pre_hook(_refuse_other_optimizers)
register_module_module_registration_hook(_refuse_wrappers)


def resume(model: nn.Module, optimizer: "own.Optimizer") -> int:
    """Restore the last committed step of the run that the recipe names, and return where its loop goes on.

    That is the number of the optimizer's ``step()`` calls until then, skipped ones, too; 0: a new run.

    Weights, optimizer states, learning rates, loss scale, buffers, random generators, and what the optimizer
    follows, become bitwise those of that step. Every rank must call, once, before the first forward pass. The
    recipe needs ``run.name`` and ``memory.nvme``; ranks, budgets and directories may be others than before.
    The files of the run stay on disk until ``infinity.close(model)`` says that it is over.

    Raises:
        StateError: The model, or what the optimizer follows, differs from the interrupted run's.
        DiskError: States cannot be read.
    """
    runtime = runtime_of(model)
    if not isinstance(optimizer, own.Optimizer) or optimizer.runtime is not runtime:
        raise StateError(
            "infinity.resume(model, optimizer): wanted the model's optimizer, such as infinity.AdamW"
        )
    saved = runtime.resume()
    if saved is None:
        return 0
    others = () if saved.own is not None else saved.ranks.values()
    of_others = [unpack(each.record.state) for each in others]
    optimizer.load_committed(unpack(saved.state(runtime.ranks.rank)), of_others)
    return saved.step + optimizer.skips


class Init:
    """Context manager that shards and stores parameters as they are created.

    Every rank must build the same model with the same seed. With several, torch.distributed is initialized
    from the variables of torchrun, srun or mpirun unless it is already. An error in the block closes the
    model.

    Args:
        recipe: Budgets, dtype and directories: a recipe, or the
            :class:`~infinity.engine.executor.EngineConfig` that it contains. Or a model of an earlier
            ``Init`` or ``from_pretrained`` without an optimizer, which modules that are added to it, or
            embeddings that are resized, in the block then join.
        device: The device of this rank, such as ``"cpu"`` or ``"cuda:1"``; None: as the recipe says.
        mesh: A ``DeviceMesh`` of all ranks, with names. Ranks along ``dp`` share weights and have batches of
            their own; along ``pp`` each builds the module of its stage. Ranks along others have the same
            batches, and ``parallelize_module`` may divide the model over them, in the block.

    Raises:
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
        LaunchError: There is no such device, or none for this rank; or the mesh has no ``dp``.
        SettingError: A setting does not go together with a mesh; says which does.
    """

    divide: Callable[[nn.Module], None] | None = None  # divides a model that has no values yet

    def __init__(
        self, recipe: Any = None, *, device: str | torch.device | None = None, mesh: Any = None
    ) -> None:
        if isinstance(recipe, nn.Module):
            self.runtime = runtime_of(recipe)
            return
        config = engine_config(recipe)
        if mesh is not None:
            check_mesh(config)
        self.runtime = Runtime(config if device is None else replace(config, device=str(device)), mesh)

    def __enter__(self) -> "Init":
        self.runtime.reopen()
        try:
            self.runtime.construction.__enter__()
        except StateError:
            if not self.runtime.units:  # nothing was built: no one else will close it
                self.runtime.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.runtime.close)
            self.runtime.construction.__exit__(*exc)
            if exc[1] is None:
                for root in self.runtime.construction.roots:
                    check_adapters(root, self.runtime.units.parts)
                self.runtime.meet()
                stack.pop_all()


#: The folder of quantized bases in the first directory of ``memory.nvme``.
_BASES = "bases"
_LOCAL = "nothing is downloaded: give a local directory, such as `hf download NAME --local-dir DIR` makes"
#: Advice for each argument of transformers' from_pretrained that infinity does not have.
_ELSEWHERE = {
    name: advice
    for names, advice in {
        "dtype torch_dtype": "the recipe says it: train.dtype=bf16",
        "device_map max_memory offload_folder offload_state_dict": (
            "the recipe's budgets place the weights: memory.device, memory.host and memory.nvme"
        ),
        "load_in_8bit load_in_4bit quantization_config": (
            "training needs weights in bf16, fp16 or fp32, and decodes a quantized checkpoint by itself; a "
            "base that stays as it is takes 2 bytes per parameter on memory.nvme: frozen=True and "
            "infinity.add_lora"
        ),
        "low_cpu_mem_usage": "leave it out: weights are always streamed",
        "ignore_mismatched_sizes": "name the parameters in new=[...], as in new=['classifier.*']",
        "state_dict": "call model.load_state_dict() afterwards",
        "local_files_only": "leave it out: nothing is ever downloaded",
        "trust_remote_code": "leave it out: no code of a checkpoint is run",
        "revision token use_auth_token cache_dir force_download subfolder": _LOCAL,
    }.items()
    for name in names.split()
}


def from_pretrained(
    path: str | Path, recipe: Any = None, *, auto_class: Any = None,
    new: Sequence[str] = (), ignore: Sequence[str] = (), frozen: bool = False, stored_as: str | None = None,
    mesh: Any = None, tp_plan: Any = None, on_progress: OnProgress | None = None, **config_overrides: Any,
) -> Any:  # fmt: skip
    """Load the model of a Hugging Face directory, its weights streamed from the files into this rank's tiers.

    Every rank must call, and reads its own slices of each weight; beside its budgets it needs host memory for
    one chunk. The weights become exact fp32 masters of the recipe's compute dtype, whatever the dtype of the
    files (also quantized ones). Parameters that the model freezes when it is built stay frozen. No code of
    the directory runs. The model is in evaluation mode, as transformers gives it.

    With ``frozen``, the checkpoint is the base for adapters (``add_lora``). Weights that do not fit host
    memory are then read from its own files at each use, in their stored form: nothing is copied, and any
    number of runs share the files. This needs a directory in ``memory.nvme``. Weights that cannot be read in
    place are copied into the run's own files; a line says how much, and why.

    Args:
        path: A directory with ``config.json`` and safetensors files.
        auto_class: Builds the model: a class such as ``AutoModelForSequenceClassification`` or
            ``BertForMaskedLM``; None: the one that ``config.json`` names, else ``AutoModelForCausalLM``.
        new: Patterns (``classifier.*``) of parameters that the model initializes itself where the checkpoint
            lacks them or has them in another shape.
        ignore: Patterns of keys of the checkpoint that the model does not have.
        frozen: Freeze the parameters that the checkpoint has, and leave them where they lie.
        stored_as: With ``frozen``, the form in which linear layers are kept: fp8, int8, mxfp4, nvfp4 or nf4
            (:func:`infinity.quantize`). They are encoded once, into a directory in ``memory.nvme`` that later
            runs find; a line says how far they are from the checkpoint's.
        mesh: As in :class:`Init`.
        tp_plan: How the model is divided over the mesh: ``"auto"``, as transformers would; a style for each
            module; or a function of model and mesh that calls ``parallelize_module``. None: not at all.
        on_progress: Called with "quantizing" or "loading", the bytes that this rank has done, and all.
        config_overrides: Replace values of ``config.json``: ``attn_implementation="eager"``.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model (lists every missing, unknown
            and wrongly shaped key); or an argument belongs elsewhere, such as in the recipe.
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
    """
    for name in config_overrides:
        if name in _ELSEWHERE:
            raise CheckpointError(f"infinity.from_pretrained has no {name}: {_ELSEWHERE[name]}")
    if stored_as is not None and not frozen:
        raise CheckpointError(f"stored_as={stored_as} is for a base that is not trained: add frozen=True")
    if tp_plan is not None and mesh is None:
        raise CheckpointError("tp_plan divides a model over a mesh: add mesh=init_device_mesh(...)")
    values = partial(CheckpointValues, new=new, ignore=ignore, on_progress=on_progress)
    init, given = Init(recipe, mesh=mesh), user_path(path, "path")
    init.divide = None if tp_plan is None else partial(parallelize, mesh=mesh, plan=tp_plan)
    how = {"auto_class": auto_class, "config_overrides": config_overrides, "on_progress": on_progress}
    source, lines = _source(given, stored_as, init.runtime, **how)
    model = _load(source, init, auto_class, config_overrides, values, frozen, lines).eval()
    if hasattr(model.config, "name_or_path"):  # of transformers
        model.config.name_or_path = str(given.absolute())  # adapters name it, wherever they are used
    return model


def quantize(
    path: str | Path, out: str | Path, form: str, *, auto_class: Any = None,
    on_progress: OnProgress | None = None,
) -> Requantized:  # fmt: skip
    """Write a Hugging Face checkpoint to a new directory, its linear layers and experts quantized.

    The directory is one of the form's own library: fp8 as DeepSeek-V3's, int8, mxfp4 and nvfp4 as
    compressed-tensors writes them, nf4 as transformers saves bitsandbytes'. Numbers are the nearest, with the
    scales of the form's own rule. Embeddings, norms, routers and the head stay as they are, as does what the
    form has no whole blocks for. Memory holds a piece of a matrix at a time (of nvfp4 a whole one).

    Args:
        path: A directory with plain weights, and a model of transformers.
        out: New, or empty.
        form: fp8, int8, mxfp4, nvfp4 or nf4.
        auto_class: As in :func:`infinity.from_pretrained`.
        on_progress: Called with "quantizing", the bytes that are written, and all.

    Returns:
        What quantization changed; its ``str`` is one line.

    Raises:
        CheckpointError: ``path`` is quantized or damaged, ``form`` is unknown, or ``out`` is not free.
        DiskError: A drive failed or is full.
    """
    source = user_path(path, "path")
    with template(source, form, auto_class=auto_class) as like:
        return quantize_checkpoint(source, like, user_path(out, "out"), ALONE, on_progress)


def _quantized_base(
    source: Path, form: str, runtime: Runtime, *, on_progress: OnProgress | None, **how: Any
) -> tuple[Path, str]:
    """Return a directory with ``source`` in ``form``, made unless an earlier run has, and a line about it.

    It lies in the first directory of ``memory.nvme``, which all ranks must see. Every rank must call.
    """
    ranks, nvme = runtime.ranks, runtime.config.memory.nvme
    if not nvme:
        raise SettingError("memory.nvme", nvme, f"a directory for the weights in {form} (model.stored_as)")
    with template(source, form, **how) as like:
        root = user_path(nvme[0], "memory.nvme")
        own = root / _BASES / f"{source.name}-{form}-{fingerprint(source, like)}"
        out = agree(own, ranks.world_size, f"naming {own}")
        with all_ranks_or_raise(ranks, f"making {out.parent}"):
            if ranks.rank == 0:
                shared_directory(root)
                own_directory(out.parent)
        if agree(out.is_dir(), ranks.world_size, f"looking for {out}"):
            return out, f"{source} is read as {form}, as an earlier run left it in {out}"
        try:
            result = quantize_checkpoint(source, like, out, ranks, on_progress)
        except InfinityError:
            if not out.is_dir():
                raise
            return out, f"{source} is read as {form}, as another run has just left it in {out}"
    return out, f"{source} was quantized once, into {out}, for this run and later ones: {result}"


def _source(path: Path, stored_as: str | None, runtime: Runtime, **how: Any) -> tuple[Path, list[str]]:
    """Return the directory that is read for ``path``, and lines about it; an error closes the model."""
    with contextlib.ExitStack() as stack:
        stack.callback(runtime.close)
        runtime.construction.check_alone()
        if not path.exists():
            raise CheckpointError(f"{path}: No such file or directory; {_LOCAL}")
        lines = list[str]()
        if stored_as is not None:
            path, line = _quantized_base(path, stored_as, runtime, **how)
            lines.append(line)
        stack.pop_all()
    return path, lines


def _load(
    path: Path, init: Init, auto_class: Any,
    config_overrides: dict[str, Any], make_values: Callable[[Checkpoint], CheckpointValues], frozen: bool,
    lines: list[str],
) -> Any:  # fmt: skip
    with contextlib.ExitStack() as files:
        with init:
            runtime = init.runtime
            config = read_config(path, config_overrides)
            checkpoint = files.enter_context(Checkpoint(path))
            quantization = read_quantization(path)
            if quantization is not None:
                decoded = decode_checkpoint(checkpoint, quantization, runtime.dtype if frozen else None)
                line = f"{decoded} weights of {path} are decoded from {quantization}"
                if frozen:
                    line += ", in which they stay, where they are used"
                else:
                    line += (
                        f"; exports have them in {str(runtime.dtype).removeprefix('torch.')}, not quantized; "
                        "stored_as, or infinity export --stored, quantizes them again"
                    )
                lines = lines or [line]
            values = make_values(checkpoint)
            runtime.construction.late = values
            model = build_model(config, auto_class, runtime.dtype)
            values.prepare(model)
            if init.divide is not None:
                init.divide(model)
            base = _open_base(checkpoint, values, runtime) if frozen else None
            if base is not None:
                files.pop_all()  # it closes them
        runtime.construction.late = runtime.tiers.base = None
        for _, segment in runtime.units.segments() if frozen else ():
            if values.stored(segment.whole) is not None:
                segment.whole.requires_grad_(False)
        values.compile_ahead(runtime.units, runtime.say)
        lines = values.notes() + lines + ([] if base is None else _describe_base(base, path, runtime))
        for line in lines if runtime.ranks.rank == 0 else ():
            runtime.say(line)
    return model


def _open_base(checkpoint: Checkpoint, values: CheckpointValues, runtime: Runtime) -> FrozenBase | None:
    """Let units that find no room in host memory read the checkpoint's files; None: it has none to read."""
    storage, tiers = runtime.storage, runtime.tiers
    if storage.volume is None or not checkpoint.files:
        return None
    with contextlib.ExitStack() as opened:
        files = []
        for file in checkpoint.files:
            with library_errors(CheckpointError, str(file.path)):
                files.append(open_sealed(file.path, file.fd))
            opened.callback(os.close, files[-1].fd)
        first = storage.volume.add_sealed(files)
        opened.pop_all()  # the volume closes them
    base = FrozenBase(storage, first, [file.nbytes for file in files], values)
    storage.stack.callback(base.close)
    tiers.base_files = {file.path.name: file.sample() for file in checkpoint.files}
    tiers.base, tiers.resident_nbytes = base, max(0, tiers.resident_nbytes - base.buffers_nbytes)
    return base


def _describe_base(base: FrozenBase, path: Path, runtime: Runtime) -> list[str]:
    """Return lines for people about what is read in place; close a base that has no unit."""
    homes, lines = [u.home for u in runtime.units if isinstance(u.home, BaseHome)], []
    if homes:
        nbytes = sum(home.fetched_nbytes(None) for home in homes)
        in_host = sum(home.stored_form.nbytes for home in homes if home.stored_form is not None)
        lines.append(
            f"the frozen base is read where it lies, {format_nbytes(nbytes)} per rank and pass"
            + (f"; {format_nbytes(in_host)} are in host memory, as they are stored" if in_host else "")
            + f": keep {path} as it is while runs use it"
        )
    else:
        runtime.tiers.resident_nbytes += base.buffers_nbytes
        base.close()
    own = [unit for unit in runtime.units if unit.name in base.own]
    if own:
        nbytes = sum(unit.shard_nbytes for unit in own)
        lines.append(
            f"{format_nbytes(nbytes)} per rank of the frozen base lie in this run's own files, as "
            f"{base.own[own[0].name]}" + (f" (and {len(own) - 1} more units)" if own[1:] else "")
        )
    return lines


@contextlib.contextmanager
def no_sync(model: nn.Module, micro_batches: int | None = None) -> Iterator[None]:
    """Context manager that accumulates gradients; the first backward pass after it completes them.

    With ``micro_batches``, the last of so many backward passes in the block does, as where a schedule of
    ``torch.distributed.pipelining`` runs them.

    Raises:
        BudgetError: Gradients that wait for later micro-batches fit nowhere; the message has the arithmetic.
        SettingError: ``micro_batches`` is no whole number above 0.
    """
    if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
        raise SettingError("micro_batches", micro_batches, "a whole number above 0")
    executor = runtime_of(model).executor()
    with uninterrupted:
        executor.divide_again(accumulates=True)
    completions = executor.gradients.completions
    following = (micro_batches or 1) - 1
    with patched(completions, "syncing", micro_batches == 1), patched(completions, "awaited", following):
        yield
        if micro_batches is not None and not completions.synced:
            raise StateError(f"no_sync: fewer backward passes came than micro_batches={micro_batches}")
        executor.hooks.abort_backward()
        executor.gradients.take_unseen()


def on_gradient(model: nn.Module, fn: OnGradient) -> RemovableHandle:
    """Call ``fn(name, gradient)`` for each trained parameter in each step, when its gradient is complete.

    As for norms and histograms of gradients::

        norms = {}
        handle = infinity.on_gradient(model, lambda name, grad: norms.update({name: grad.norm().item()}))

    The gradient is that of all micro-batches, averaged over ranks, before clipping, and times the loss scale
    in fp16. ``fn`` gets its elements in this rank's shard, ``(n,)``, if there are any: with one rank all of
    them, in their order. A parameter in tiles comes tile by tile, with its rows in the name. Elements are on
    the device, not to be written, and valid until ``fn`` returns. It runs beside backward, on any thread, one
    call at a time; what it raises ends the step.

    Returns:
        A handle, whose ``remove()`` ends it.

    Raises:
        StateError: The model has no ``infinity.AdamW``.
    """
    runtime = runtime_of(model)
    if not runtime.started:
        raise StateError("infinity.on_gradient before the model has its optimizer: make infinity.AdamW first")
    watchers = runtime.executor().gradients.path.watchers
    handle = RemovableHandle(watchers)
    watchers[handle.id] = fn
    return handle


@contextlib.contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False
) -> Iterator[None]:
    """Context manager in which parameters hold their full values; every rank must enter it.

    Args:
        params: A module (all its parameters), a parameter, or several.
        modify: Values that were written are stored at the end; with several ranks, rank 0's.

    Raises:
        StateError: ``modify`` while gradients of a step wait for ``step()``; or inside the model's ``Init``.
    """
    several = params.parameters() if isinstance(params, nn.Module) else params
    listed = [several] if isinstance(several, nn.Parameter) else list(several)
    if any(runtime.construction.is_building(listed) for runtime in runtimes()):
        raise StateError(
            "infinity.gathered inside the infinity.Init block of its model, where parameters are whole when "
            "they are asked for: write to them as in plain PyTorch, with the same values on every rank; or "
            "call infinity.gathered after the block"
        )
    served = [runtime for runtime in runtimes() if runtime.units.holding(listed)]
    with UninterruptedExit() as stack:
        for runtime in served:
            stack.enter_context(runtime.values.gathered(listed, modify))
        yield


@contextlib.contextmanager
def ema(model: nn.Module) -> Iterator[None]:
    """Context manager in which weights are the averages that the optimizer keeps (its ``ema``).

    As to evaluate them, to generate and to export; gradients are off. Afterwards all is as before, bitwise.
    Every rank must enter it, between two steps. It reads weights and states once, and takes a place on NVMe,
    or in host memory, for a second copy of the weights in the compute dtype.

    Raises:
        StateError: The optimizer keeps no average; or, in the block, what would train or save states.
        BudgetError: ``memory.host`` has no room for a second copy of the weights, and there is no NVMe.
    """
    runtime = runtime_of(model)
    with runtime.values.averaged(runtime.units), torch.no_grad():
        yield


def state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Any]:
    """Return ``model.state_dict()`` with full values on rank 0, or on every rank; every rank must call."""
    with patched(runtime_of(model).values, "every_rank", every_rank):
        return model.state_dict()


def close(model: nn.Module, *, keep: bool = False) -> None:
    """Release the files, memory and threads that serve ``model``; its weights are lost.

    Waits for updates in flight, needs no other rank, and may be called after any error, and twice. On the way
    out of an exception, or with ``keep``, the files of a named run stay on disk after its first step, for
    :func:`infinity.resume`. DiskError: with ``keep``, not on the way out of an exception, the last step could
    not be kept, or an error of that step was caught before.
    """
    runtime_of(model, ended=True).close(keep=keep)


def layer_schedule(
    model: nn.Module, micro_batches: int, loss: Loss | None = None, adapters: Sequence[str] | None = None,
    group: int | None = None,
) -> LayerSchedule:  # fmt: skip
    """Wrap ``model`` so that a step reads every weight at most twice, however many micro-batches it has.

    All micro-batches of a step go through a block before the next block is read. Packed experts run once for
    all of them; tiles of other parameters are read for each micro-batch, unless they stay in memory::

        scheduled = infinity.layer_schedule(model, micro_batches=8)  # once, after the optimizer
        for batch in loader:  # of 8 micro-batches, row after row
            scheduled(**batch).loss.backward()
            optimizer.step()

    Give ``train.schedule=layer`` to ``Init``, too, if ``memory.device`` is set: activations are otherwise
    planned as for the ordinary schedule, and what blocks return stays in device memory.

    Args:
        model: Built under ``Init``; its blocks are the largest ``nn.ModuleList``.
        micro_batches: Slices of each batch.
        loss: The loss of one slice, given its part of the arguments; by default the model's own ``loss``.
        adapters: For each slice the name of the adapter that it trains, of several on one base, all of which
            one reading of the base serves; None: the model has at most one.
        group: Micro-batches that go through packed experts together, all of whose activations in a block are
            in memory at one time; None: all. ``memory.device`` then holds the experts of a block.

    Raises:
        BudgetError: ``memory.device`` cannot keep a block while the micro-batches go through it.
        StateError: No blocks were found, or there is no such adapter.
        ValueError: ``adapters`` has not one name for each slice.
    """
    runtime = runtime_of(model)
    executor = runtime.executor()
    rooms: Any = weakly(executor.rooms_between_blocks)
    share: Any = weakly(executor.share_of_part)
    names = adapters or ()
    if adapters is not None and len(names) != micro_batches:
        raise ValueError(f"adapters: got {len(names)} names; wanted one for each of {micro_batches} slices")
    for name in set(names):
        check_adapter(model, name)

    how: dict[str, Any] = {} if adapters is None else {"turns": names, "within": partial(adapter, model)}
    cache = runtime.activations.cache
    staged = runtime.config.stages and runtime.ranks.world_size > 1
    kind: Any = partial(StagedSchedule, executor) if staged else LayerSchedule
    schedule: LayerSchedule = kind(model, micro_batches, loss, cache, rooms, share, group=group, **how)
    groups = schedule.group < micro_batches // max(1, len({*names}))
    executor.hold_blocks(*schedule.blocks.held(runtime.units, schedule.expert_blocks, groups=groups))
    return schedule
