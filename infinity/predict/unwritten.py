"""Makes the checkpoint that a config.json alone speaks of: headers, and holes for values.

[Note: which form]
A published ``quantization_config`` is known if it is of a form that :func:`infinity.quantize` writes, or INT4
or INT8 of compressed-tensors, GPTQ or AWQ, with the same tensors for every matrix that it does not leave out;
then a frozen base is planned by its stored bytes.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.api.saved import saved_tensors
from infinity.checkpoint.model import build_model, read_config
from infinity.checkpoint.quantize import FORMS, WITH_EXPERTS, published, template
from infinity.checkpoint.writer import create_files, plan_files

#: What tells the forms that are written from each other, and from others.
_TELLS = (
    "quant_method", "format", "quant_algo", "weight_block_size", "load_in_4bit", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
)  # fmt: skip


def form_of(quantization: Mapping[str, Any]) -> Any:
    """Return the form that a ``quantization_config`` speaks of, for :func:`template`; None: it is unknown."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return _written(quantization) or _published(quantization)
    return None


def _published(given: Mapping[str, Any]) -> Any:
    method, left = given.get("quant_method"), given.get("ignore") or given.get("modules_to_not_convert") or ()
    if method == "compressed-tensors" and given.get("format") == "pack-quantized":
        [group] = given["config_groups"].values()
        weights, size = group["weights"], int(group["weights"].get("group_size") or 0)
        said = {**given, "sym": weights.get("symmetric", True)}
        return published("pack-quantized", said, int(weights["num_bits"]), max(0, size), left)
    if method in ("gptq", "awq"):
        return published(method, given, int(given.get("bits", 4)), max(0, int(given["group_size"])), left)
    return None


def _written(given: Mapping[str, Any]) -> str | None:
    rows = [(name, form.config) for forms in (FORMS, WITH_EXPERTS) for name, form in forms.items()]
    alike = (
        name for name, said in rows if all((said.get(k) or None) == (given.get(k) or None) for k in _TELLS)
    )
    return next(alike, None)


@contextmanager
def unwritten(path: Path, form: Any) -> Iterator[Path]:
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
