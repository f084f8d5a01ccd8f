"""``from_pretrained``: a Hugging Face checkpoint directory as a model under ``Init``, streamed."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.api.init import Init
from infinity.checkpoint.directory import Checkpoint, stamp_files
from infinity.checkpoint.load import CheckpointValues, OnProgress
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.quantized import decode_checkpoint, read_quantization
from infinity.comm.ranks import Ranks
from infinity.core.errors import CheckpointError
from infinity.engine.config import EngineConfig, HasEngineConfig
from infinity.shards.shared_base import SharedBase
from infinity.shards.storage import Storage

_DTYPE = "the recipe says it: train.dtype=bf16"
_PLACE = "the recipe's budgets place the weights: memory.device, memory.host and memory.nvme"
_WHOLE = (
    "training needs weights in bf16, fp16 or fp32, and decodes a quantized checkpoint by itself; a base that "
    "stays as it is takes 2 bytes per parameter on memory.nvme: frozen=True and infinity.add_lora"
)
_LOCAL = "nothing is downloaded: give a local directory, such as `hf download NAME --local-dir DIR` makes"
#: Arguments of transformers' from_pretrained, and what to write in place of each.
_ELSEWHERE = {
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "device_map": _PLACE,
    "max_memory": _PLACE,
    "offload_folder": _PLACE,
    "offload_state_dict": _PLACE,
    "tp_plan": "start the script with torchrun: ranks share every weight",
    "load_in_8bit": _WHOLE,
    "load_in_4bit": _WHOLE,
    "quantization_config": _WHOLE,
    "low_cpu_mem_usage": "leave it out: weights are always streamed",
    "ignore_mismatched_sizes": "name the parameters in new=[...], as in new=['classifier.*']",
    "state_dict": "call model.load_state_dict() afterwards",
    "local_files_only": "leave it out: nothing is ever downloaded",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    **dict.fromkeys(
        ("revision", "token", "use_auth_token", "cache_dir", "force_download", "subfolder"), _LOCAL
    ),
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
    """The model in a directory, its weights streamed from the files into this rank's tiers.

    Every rank must call. Each reads its own slices of each weight, so a file's bytes are read once per
    machine, and needs host memory for a chunk beside its budgets, however large the model. The weights
    become exact fp32 masters of the recipe's compute dtype, whatever the dtype of the files; weights in FP8,
    MXFP4 or INT4 are decoded as they are read (see :mod:`infinity.checkpoint.quantized`). Parameters that
    the model freezes when it is built stay frozen. No code of the directory's runs.

    With ``frozen``, what the checkpoint gives is not trained: the base for adapters (``add_lora``). What of
    it lies on NVMe is kept once for all runs of the checkpoint that have this dtype and as many ranks: the
    first writes it, the others read it and compare it with its hashes. It stays when they end; a line says
    where.

    Args:
        path: A directory with ``config.json`` and safetensors files (or, slower, pickled weights).
        recipe: Budgets, dtype and directories, as for :class:`infinity.Init`.
        auto_class: Builds the model: a class such as ``AutoModelForSequenceClassification`` or
            ``BertForMaskedLM``; None: the one that ``config.json`` names, else ``AutoModelForCausalLM``.
        new: Patterns (``classifier.*``) of parameters that the model initialises itself where the
            checkpoint lacks them or has them in another shape.
        ignore: Patterns of keys of the checkpoint that the model does not have.
        frozen: Freeze the parameters that the checkpoint has, and share their bytes on NVMe.
        on_progress: Called with the bytes that this rank has read, and all that it will.
        config_overrides: Replace values of ``config.json``: ``attn_implementation="eager"``.

    Returns:
        The model in evaluation mode, as transformers gives it: call ``train()`` before training.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model (lists every missing,
            unknown and wrongly shaped key); or an argument is one of transformers' that has another place.
        BudgetError: A budget is too small for the model; the message has the arithmetic.
        DiskError: A directory cannot be written, or its file system is full.
    """
    for name in config_overrides:
        if name in _ELSEWHERE:
            raise CheckpointError(f"infinity.from_pretrained has no {name}: {_ELSEWHERE[name]}")
    path = Path(path)
    with contextlib.ExitStack() as files:
        with Init(recipe) as init:
            runtime = init.runtime
            if not path.exists():
                raise CheckpointError(f"{path}: No such file or directory; {_LOCAL}")
            config = read_config(path, config_overrides)
            base = None
            if frozen:  # looks at files that are not open yet
                base = _shared_base(path, config, runtime.storage, runtime.ranks)
            checkpoint = files.enter_context(Checkpoint(path))
            quantization, decoded = read_quantization(path), 0
            if quantization is not None:
                dtype = runtime.dtype if frozen else torch.float32
                decoded = decode_checkpoint(checkpoint, quantization, dtype)
            loading = CheckpointValues(checkpoint, new, ignore, on_progress)
            runtime.construction.late = loading
            if base is not None:
                loading.sharing, runtime.tiers.shared_base = base.sharing, base
            model = build_model(config, auto_class, runtime.dtype, len(checkpoint))
            loading.prepare(model)
        runtime.construction.late = runtime.tiers.shared_base = None  # they and their files have served
        notes = loading.notes()
        if quantization is not None:
            notes.append(
                f"{decoded} weights of {path} were decoded from {quantization}; exports have them in "
                f"{str(runtime.dtype).removeprefix('torch.')}, not quantized"
            )
        if base is not None:
            loading.freeze(runtime.units)
            notes += base.notes()
        for line in notes if runtime.ranks.rank == 0 else ():
            runtime.say(line)
    return model.eval()


def _shared_base(path: Path, config: Any, storage: Storage, ranks: Ranks) -> SharedBase:
    """The place of the frozen base of the checkpoint in ``path``, which is not read yet."""
    import transformers

    settings = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    made_by = json.dumps([transformers.__version__, torch.__version__, settings], sort_keys=True, default=str)
    return SharedBase(storage, lambda: stamp_files(path) + made_by, ranks.rank, ranks.world_size)
