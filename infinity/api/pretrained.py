"""Provides ``from_pretrained``, which streams a Hugging Face checkpoint into a model under ``Init``."""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from infinity.api.init import Init
from infinity.checkpoint.directory import Checkpoint, readable
from infinity.checkpoint.load import CheckpointValues, OnProgress
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.quantized import decode_checkpoint, read_quantization
from infinity.core.errors import CheckpointError
from infinity.core.nbytes import format_nbytes
from infinity.engine.config import EngineConfig, HasEngineConfig
from infinity.engine.runtime import Runtime
from infinity.nvme.volume import open_sealed
from infinity.shards.base import BaseHome, FrozenBase

_LOCAL = "nothing is downloaded: give a local directory, such as `hf download NAME --local-dir DIR` makes"
#: Advice for each argument of transformers' from_pretrained that infinity does not have.
_ELSEWHERE = {
    name: advice
    for names, advice in {
        "dtype torch_dtype": "the recipe says it: train.dtype=bf16",
        "device_map max_memory offload_folder offload_state_dict": (
            "the recipe's budgets place the weights: memory.device, memory.host and memory.nvme"
        ),
        "tp_plan": "start the script with torchrun: ranks share every weight",
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
    path: str | Path,
    recipe: EngineConfig | HasEngineConfig | None = None,
    *,
    auto_class: Any = None,
    new: Sequence[str] = (),
    ignore: Sequence[str] = (),
    frozen: bool = False,
    on_progress: OnProgress | None = None,
    **config_overrides: Any,
) -> Any:
    """Load the model of a Hugging Face directory, its weights streamed from the files into this rank's tiers.

    Every rank must call. Each reads its own slices of each weight, so a file's bytes are read once per
    machine; beside its budgets it needs host memory for one chunk. The weights become exact fp32 masters of
    the recipe's compute dtype, whatever the dtype of the files; weights in FP8, MXFP4 or INT4 are decoded as
    they are read. Parameters that the model freezes when it is built stay frozen. No code of the directory
    runs.

    With ``frozen``, the checkpoint is the base for adapters (``add_lora``). Weights that do not fit host
    memory are then read from its own files at each use, in their stored form: nothing is copied, and any
    number of runs share the files. This needs a directory in ``memory.nvme``. Weights that cannot be read in
    place are copied into the run's own files; a line says how much, and why.

    Args:
        path: A directory with ``config.json`` and safetensors files (or, slower, pickled weights).
        auto_class: Builds the model: a class such as ``AutoModelForSequenceClassification`` or
            ``BertForMaskedLM``; None: the one that ``config.json`` names, else ``AutoModelForCausalLM``.
        new: Patterns (``classifier.*``) of parameters that the model initializes itself where the checkpoint
            lacks them or has them in another shape.
        ignore: Patterns of keys of the checkpoint that the model does not have.
        frozen: Freeze the parameters that the checkpoint has, and leave them where they lie.
        on_progress: Called with the bytes that this rank has read, and all that it will.
        config_overrides: Replace values of ``config.json``: ``attn_implementation="eager"``.

    Returns:
        The model in evaluation mode, as transformers gives it: call ``train()`` before training.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model (lists every missing, unknown
            and wrongly shaped key); or an argument belongs elsewhere, such as in the recipe.
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
    """
    for name in config_overrides:
        if name in _ELSEWHERE:
            raise CheckpointError(f"infinity.from_pretrained has no {name}: {_ELSEWHERE[name]}")
    values = partial(CheckpointValues, new=new, ignore=ignore, on_progress=on_progress)
    return _load(Path(path), recipe, auto_class, config_overrides, values, frozen).eval()


def _load(
    path: Path, recipe: EngineConfig | HasEngineConfig | None, auto_class: Any,
    config_overrides: dict[str, Any], make_values: Callable[[Checkpoint], CheckpointValues], frozen: bool,
) -> Any:  # fmt: skip
    with contextlib.ExitStack() as files:
        with Init(recipe) as init:
            runtime = init.runtime
            if not path.exists():
                raise CheckpointError(f"{path}: No such file or directory; {_LOCAL}")
            config = read_config(path, config_overrides)
            checkpoint = files.enter_context(Checkpoint(path))
            quantization, lines = read_quantization(path), list[str]()
            if quantization is not None:
                decoded = decode_checkpoint(checkpoint, quantization, runtime.dtype if frozen else None)
                compute = str(runtime.dtype).removeprefix("torch.")
                lines.append(
                    f"{decoded} weights of {path} are decoded from {quantization}; exports have them in "
                    f"{compute}, not quantized; stored_as, or infinity export --stored, quantizes them again"
                )
            values = make_values(checkpoint)
            runtime.construction.late = values
            model = build_model(config, auto_class, runtime.dtype, len(checkpoint))
            values.prepare(model)
            base = _open_base(checkpoint, values, runtime) if frozen else None
            if base is not None:
                files.pop_all()  # it closes them
        runtime.construction.late = runtime.tiers.base = None
        if frozen:
            values.freeze(runtime.units)
        lines = values.notes() + lines + ([] if base is None else _describe_base(base, path, runtime))
        for line in lines if runtime.ranks.rank == 0 else ():
            runtime.say(line)
    return model


def _open_base(checkpoint: Checkpoint, loading: CheckpointValues, runtime: Runtime) -> FrozenBase | None:
    """Let units that find no room in host memory read the checkpoint's files; None: it has none to read."""
    storage, tiers = runtime.storage, runtime.tiers
    if storage.volume is None or not checkpoint.files:
        return None
    with contextlib.ExitStack() as opened:
        files = []
        for file in checkpoint.files:
            with readable(file.path):
                files.append(open_sealed(file.path, file.fd))
            opened.callback(os.close, files[-1].fd)
        first = storage.volume.add_sealed(files)
        opened.pop_all()  # the volume closes them
    base = FrozenBase(storage, first, [file.nbytes for file in files], loading)
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
