"""Tiny quantized checkpoints, written here, and their values by references of our own.

A writer takes a directory of ``save_pretrained``, quantizes what the format quantizes, and returns the values
that it then stands for, by key, as plain numpy computes them from the format's documentation.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import models, zoo

Values = dict[str, Tensor]

BLOCK = 8
GROUP = 8


def fp8(directory: Path) -> Values:
    """As DeepSeek-V3, Kimi-K2 and Qwen3-FP8: e4m3, an fp32 scale for each block."""
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key in _projections(tensors):
        tensors |= _fp8(key, tensors[key])
        values[key] = fp8_values(tensors[key], tensors[f"{key}_scale_inv"], BLOCK)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write(directory, tensors, config | {"weight_block_size": [BLOCK, BLOCK]})
    return values


def _fp8(key: str, weight: Tensor) -> Values:
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) * 0.01 + 0.001
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return {key: (weight.float() / whole).to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}


def fp8_values(stored: Tensor, scales: Tensor, block: int) -> Tensor:
    rows, columns = (np.arange(n) // block for n in stored.shape)
    return torch.from_numpy(stored.float().numpy() * scales.float().numpy()[rows][:, columns])


def mxfp4(directory: Path) -> Values:
    """As gpt-oss: experts in blocks of 32 values with one exponent, and transposed."""
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values[key] = mxfp4_values(blocks, scales)
    _write(directory, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """OCP Microscaling: sign, two bits of exponent (bias 1), one of mantissa; times 2 ** (scale - 127)."""
    experts, outputs, groups, _ = blocks.shape
    codes = np.empty((experts, outputs, groups, 32), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = blocks.numpy() & 15, blocks.numpy() >> 4
    exponent, mantissa = codes >> 1 & 3, codes & 1
    sizes = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    signed = np.where(codes & 8, -sizes, sizes).astype(np.float32)
    values = np.ldexp(signed, scales.numpy().astype(np.int32)[..., None] - 127)
    return torch.from_numpy(values.reshape(experts, outputs, -1).transpose(0, 2, 1).copy())


def packed(directory: Path, *, only: str = ".experts.", zeros: bool = False) -> Values:
    """As Kimi-K2-Thinking: INT4 groups of compressed-tensors along each row of the experts."""
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key in [key for key in _projections(tensors) if only in key]:
        rows, columns = tensors.pop(key).shape
        name = key.removesuffix("weight")
        whole = torch.randint(0, 16, (rows, columns))
        scales = (torch.rand(rows, columns // GROUP) * 0.02 + 0.001).bfloat16()
        points = (
            torch.randint(0, 16, (rows, columns // GROUP)) if zeros else torch.full_like(scales, 8).long()
        )
        tensors |= {
            f"{name}weight_packed": words(whole),
            f"{name}weight_scale": scales,
            f"{name}weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            tensors[f"{name}weight_zero_point"] = words(points.T).T.contiguous()
        values[key] = int4_values(
            whole, points.repeat_interleave(GROUP, 1), scales.repeat_interleave(GROUP, 1)
        )
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": not zeros}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    _write(directory, tensors, config)
    return values


def gptq(directory: Path) -> Values:
    """As GPTQ in its first format: INT4 down each column, zero points less one, groups by ``g_idx``."""
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key in _projections(tensors):
        rows, columns = tensors.pop(key).shape
        name, count = key.removesuffix("weight"), columns // GROUP
        whole, points = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (count, rows))
        scales = (torch.rand(count, rows) * 0.02 + 0.001).half()
        order = torch.arange(columns).flip(0) // GROUP  # as desc_act=true writes it
        tensors |= {
            f"{name}qweight": words(whole.T).T.contiguous(),
            f"{name}qzeros": words(points) - 0x11111111,  # as one number: 0 borrows from the next
            f"{name}scales": scales,
            f"{name}g_idx": order.int(),
        }
        values[key] = int4_values(whole, points[order], scales[order]).T.contiguous()
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
    _write(directory, tensors, config)
    return values


def int4_values(whole: Tensor, points: Tensor, scales: Tensor) -> Tensor:
    """The product in the scales' dtype, as bf16 and fp16 hardware rounds it: fp32, rounded once."""
    return ((whole - points).float() * scales.float()).to(scales.dtype)


#: Name of the model, and the writer, by what the checkpoint is like.
KINDS: dict[str, tuple[str, Callable[[Path], Values]]] = {
    "deepseek_v3": ("deepseek_v3", fp8),
    "qwen3_fp8": ("qwen3", fp8),
    "gpt_oss": ("gpt_oss", mxfp4),
    "kimi_k2": ("deepseek_v3", packed),
    "gptq": ("llama", gptq),
}


def write(kind: str, directory: Path) -> Values:
    """Write a checkpoint of ``kind``; what its quantized weights stand for, by key."""
    name, quantize = KINDS[kind]
    torch.manual_seed(5)
    if name == "gpt_oss":
        model: Any = transformers.GptOssForCausalLM(transformers.GptOssConfig(**_GPT_OSS))
    else:
        model = zoo.build(name, 5)[0]()
    model.save_pretrained(directory)
    if kind == "kimi_k2":  # as its config.json says, of which transformers knows the architecture only
        path = directory / "config.json"
        code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2", "auto_map": code})
        )
    return quantize(directory)


_GPT_OSS: dict[str, Any] = {
    "vocab_size": models.VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "output_router_logits": False, "use_cache": False,
}  # fmt: skip


def stands_for(directory: Path) -> Values:
    """The values that the quantized weights of a checkpoint stand for, by key; of any of the formats here."""
    stored, values = load_file(directory / "model.safetensors"), {}
    for key, tensor in stored.items():
        name = key.rpartition(".")[0] + "."
        if f"{key}_scale_inv" in stored:
            values[key] = fp8_values(tensor, stored[f"{key}_scale_inv"], BLOCK)
        elif key.endswith("_blocks"):
            key = key.removesuffix("_blocks")
            values[key] = mxfp4_values(tensor, stored[f"{key}_scales"])
        elif key.endswith("weight_packed"):
            rows, columns = stored[f"{name}weight_shape"].tolist()
            scales, points = stored[f"{name}weight_scale"], torch.full((rows, 1), 8)
            if f"{name}weight_zero_point" in stored:
                points = unwords(stored[f"{name}weight_zero_point"].T).T[:rows].repeat_interleave(GROUP, 1)
            whole = unwords(tensor)[:, :columns]
            values[f"{name}weight"] = int4_values(whole, points, scales.repeat_interleave(GROUP, 1))
        elif key.endswith("qweight"):
            scales, order = stored[f"{name}scales"], stored[f"{name}g_idx"].long()
            points = unwords(stored[f"{name}qzeros"] + 0x11111111)
            whole = unwords(tensor.T).T
            values[f"{name}weight"] = int4_values(whole, points[order], scales[order]).T.contiguous()
    return values


def without_quantization(directory: Path, values: Values, target: Path) -> Path:
    """The same checkpoint with the values that the quantized weights stand for, in ``target``."""
    stored = load_file(directory / "model.safetensors")
    of_values = tuple(key.removesuffix("weight") for key in values)
    tensors = {
        key: tensor for key, tensor in stored.items() if key.endswith("bias") or not key.startswith(of_values)
    } | values
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    (target / "config.json").write_text(json.dumps(config))
    return target


def _projections(tensors: Values) -> Iterator[str]:
    return iter([key for key in tensors if key.endswith("_proj.weight") or "kv_a_proj" in key])


def words(values: Tensor) -> Tensor:
    """Whole numbers of four bits, eight in an int32 along a row, the first in the lowest bits."""
    rows, columns = values.shape
    out = np.zeros((rows, -(-columns // 8)), np.uint32)
    for j in range(columns):
        out[:, j // 8] |= values[:, j].numpy().astype(np.uint32) << np.uint32(4 * (j % 8))
    return torch.from_numpy(out.view(np.int32))


def unwords(packed: Tensor) -> Tensor:
    """The whole numbers that :func:`words` has put into words."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    numbers = packed.numpy().copy().view(np.uint32)[..., None] >> shifts & 15
    return torch.from_numpy(numbers.reshape(len(packed), -1).astype(np.int64))


def _write(directory: Path, tensors: Values, quantization: dict[str, Any]) -> None:
    others = {
        key: t.bfloat16() if t.dtype == torch.float32 and "scale" not in key else t
        for key, t in tensors.items()
    }
    save_file(others, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
