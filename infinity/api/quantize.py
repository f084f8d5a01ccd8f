"""Quantizes checkpoints: for other programs, or as the frozen base of runs, once for all of them."""

from pathlib import Path
from typing import Any

from infinity.checkpoint.load import OnProgress
from infinity.checkpoint.quantize import fingerprint, quantize_checkpoint, template
from infinity.checkpoint.requantize import Requantized
from infinity.comm.ranks import ALONE, agree, all_ranks_or_raise
from infinity.core.config import SettingError
from infinity.core.errors import InfinityError
from infinity.core.files import own_directory, shared_directory, user_path
from infinity.engine.runtime import Runtime

#: The folder of quantized bases in the first directory of ``memory.nvme``.
_FOLDER = "bases"


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


def quantized_base(
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
        own = root / _FOLDER / f"{source.name}-{form}-{fingerprint(source, like)}"
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
