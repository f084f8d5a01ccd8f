"""Tiny quantized checkpoints, written here, and their values by references of our own.

A writer takes a directory of ``save_pretrained``, quantizes what the format quantizes, and returns the values
that it then stands for, by key, as plain numpy computes them from the format's documentation.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
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
    for key in [*_projections(tensors), *_experts(tensors)]:
        tensors |= _fp8(key, tensors[key])
        values[key] = fp8_values(tensors[key], tensors[f"{key}_scale_inv"], BLOCK)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write(directory, tensors, config | {"weight_block_size": [BLOCK, BLOCK]})
    return values


def _fp8(key: str, weight: Tensor) -> Values:
    *experts, rows, columns = weight.shape
    scales = torch.rand(*experts, -(-rows // BLOCK), -(-columns // BLOCK)) * 0.01 + 0.001
    whole = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :columns]
    return {key: (weight.float() / whole).to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}


def fp8_values(stored: Tensor, scales: Tensor, block: int) -> Tensor:
    rows, columns = (np.arange(n) // block for n in stored.shape[-2:])
    return torch.from_numpy(stored.float().numpy() * scales.float().numpy()[..., rows, :][..., columns])


def mxfp4(directory: Path) -> Values:
    """As gpt-oss: experts in blocks of 32 values with one exponent, and transposed."""
    tensors, values = load_file(directory / "model.safetensors"), {}
    for key in _experts(tensors):
        experts, inputs, outputs = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values[key] = mxfp4_values(blocks, scales)
    _write(directory, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values


def _nibbles(pairs: Tensor, *, high_first: bool = False) -> Any:
    halves = [pairs.numpy() & 15, pairs.numpy() >> 4]
    return np.stack(halves[::-1] if high_first else halves, -1).reshape(*pairs.shape[:-1], -1)


def e2m1(pairs: Tensor) -> Any:
    """OCP Microscaling: sign, two bits of exponent (bias 1), one of mantissa; low halves of bytes first."""
    codes = _nibbles(pairs)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    sizes = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    return np.where(codes & 8, -sizes, sizes).astype(np.float32)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of e2m1 times 2 ** (scale - 127)."""
    experts, outputs, _, _ = blocks.shape
    signed = e2m1(blocks)
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


def nvfp4(directory: Path) -> Values:
    """As compressed-tensors: e2m1 pairs, an e4m3 scale for 16 of them, divided by one for the matrix."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        rows, columns = tensors.pop(key).shape
        tensors |= {
            f"{key}_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
            f"{key}_scale": (torch.rand(rows, columns // 16) * 300 + 1).to(torch.float8_e4m3fn),
            f"{key}_global_scale": torch.rand(1) * 9000 + 5000,
            f"{key.removesuffix('weight')}input_global_scale": torch.rand(1),
        }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}}
    _write(directory, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    return stands_for(directory)


def mxfp4_rows(directory: Path) -> Values:
    """As compressed-tensors: e2m1 pairs, an exponent for 32 of them."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        rows, columns = tensors.pop(key).shape
        tensors |= {
            f"{key}_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
            f"{key}_scale": torch.randint(118, 124, (rows, columns // 32), dtype=torch.uint8),
        }
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}}
    _write(directory, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    return stands_for(directory)


def modelopt_experts(directory: Path, *, form: str = "NVFP4") -> Values:
    """As ModelOpt writes models with transposed experts in one tensor (Llama 4): pairs along inputs."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        rows, columns = tensors[key].shape
        tensors[key] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{key}_scale"] = (torch.rand(rows, columns // 16) * 300 + 1).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_2"] = torch.rand(()) * 1e-4 + 1e-4
    for key in _experts(tensors):
        experts, inputs, outputs = tensors[key].shape
        if form == "FP8":
            tensors[key] = (torch.randn(experts, inputs, outputs) * 100).to(torch.float8_e4m3fn)
            tensors[f"{key}_weight_scale"] = torch.rand(()) * 0.001 + 0.001
        else:
            tensors[key] = torch.randint(0, 256, (experts, inputs // 2, outputs), dtype=torch.uint8)
            scales = torch.rand(experts, inputs // 16, outputs) * 300 + 1
            tensors[f"{key}_weight_scale"] = scales.to(torch.float8_e4m3fn)
            tensors[f"{key}_weight_scale_2"] = torch.rand(()) * 1e-4 + 1e-4
        tensors[f"{key}_input_scale"] = torch.rand(())
    algorithm = "MIXED_PRECISION" if form == "FP8" else "NVFP4"
    _write(directory, tensors, {"quant_method": "modelopt", "quant_algo": algorithm})
    return stands_for(directory)


def modelopt(directory: Path) -> Values:
    """As ModelOpt's mixed precision: attention in FP8 with one scale, the others in NVFP4."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        (rows, columns), name = tensors[key].shape, key.removesuffix("weight")
        if ".self_attn." in key:
            tensors[key] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale"] = torch.rand(()) * 0.001 + 0.001
            tensors[f"{name}k_scale"] = torch.rand(())
        else:
            tensors[key] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            tensors[f"{key}_scale"] = (torch.rand(rows, columns // 16) * 300 + 1).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_2"] = torch.rand(()) * 1e-4 + 1e-4
        tensors[f"{name}input_scale"] = torch.rand(())
    _write(directory, tensors, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    return stands_for(directory)


def mixed(directory: Path) -> Values:
    """As compressed-tensors with several groups: FP8 rows, INT4 experts, INT8 rows, and MXFP4."""
    packed(directory)
    tensors = load_file(directory / "model.safetensors")
    for key in [key for key in _projections(tensors) if key.endswith("weight")]:
        rows, columns = tensors[key].shape
        if ".self_attn." in key:
            tensors[key] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale"] = (torch.rand(rows, 1) * 0.001 + 0.001).bfloat16()
        elif columns % 32:
            tensors[key] = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
            tensors[f"{key}_scale"] = (torch.rand(rows, 1) * 0.001 + 0.001).bfloat16()
        else:
            del tensors[key]
            tensors[f"{key}_packed"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            scales = torch.randint(118, 124, (rows, columns // 32), dtype=torch.uint8)
            tensors[f"{key}_scale"] = scales
    fp = {"type": "float", "strategy": "channel", "num_bits": 8}
    whole = {"type": "int", "strategy": "group", "num_bits": 4, "group_size": GROUP}
    groups = {
        "fp8": {"weights": fp, "format": "float-quantized"},
        "int4": {"weights": whole, "format": "pack-quantized"},
        "int8": {"weights": whole | {"num_bits": 8, "strategy": "channel"}, "format": "int-quantized"},
        "fp4": {"weights": fp | {"num_bits": 4, "group_size": 32}, "format": "mxfp4-pack-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    _write(directory, tensors, config | {"ignore": ["lm_head"]})
    return stands_for(directory)


#: Which output each of the eight numbers in a word is of, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(directory: Path) -> Values:
    """As AutoAWQ for GEMM: INT4 along each row of the transposed matrix, in the order of its kernels."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        rows, columns = tensors.pop(key).shape
        name, count = key.removesuffix("weight"), columns // GROUP
        for ending, numbers in (("qweight", columns), ("qzeros", count)):
            whole = torch.randint(0, 16, (numbers, rows // 8, 8))
            tensors[f"{name}{ending}"] = words(whole[..., AWQ_ORDER].flatten(1))
        tensors[f"{name}scales"] = (torch.rand(count, rows) * 0.02 + 0.001).half()
    _write(directory, tensors, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True})
    return stands_for(directory)


def nf4(directory: Path) -> Values:
    """As transformers saves bitsandbytes' NF4, with quantized scales and without."""
    tensors = load_file(directory / "model.safetensors")
    for key in [*_projections(tensors), *_experts(tensors)]:
        shape, numel = list(tensors[key].shape), tensors[key].numel()
        blocks = numel // 64
        said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
        tensors[key] = torch.randint(0, 256, (numel // 2, 1), dtype=torch.uint8)
        tensors[f"{key}.absmax"] = torch.rand(blocks) * 0.1 + 0.01
        tensors[f"{key}.quant_map"] = torch.from_numpy(NF4.copy())
        if "v_proj" not in key:
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0612}
            tensors[f"{key}.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            tensors[f"{key}.nested_absmax"] = torch.rand(-(-blocks // 256)) * 0.01 + 0.01
            tensors[f"{key}.nested_quant_map"] = torch.linspace(-1, 1, 256)
        state = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        tensors[f"{key}.quant_state.bitsandbytes__nf4"] = state
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    _write(directory, tensors, config | {"load_in_8bit": False})
    return stands_for(directory)


#: The sixteen values of bitsandbytes' NF4, as its documentation lists them.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def llm_int8(directory: Path) -> Values:
    """As transformers saves bitsandbytes' LLM.int8: the largest size of each row beside its numbers."""
    tensors = load_file(directory / "model.safetensors")
    for key in _projections(tensors):
        name = key.removesuffix("weight")
        tensors[key] = torch.randint(-127, 128, tensors[key].shape, dtype=torch.int8)
        tensors[f"{name}SCB"] = torch.rand(len(tensors[key])) * 0.1 + 0.01
        tensors[f"{name}weight_format"] = torch.tensor(0, dtype=torch.uint8)
    _write(directory, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False})
    return stands_for(directory)


#: Name of the model, and the writer, by what the checkpoint is like.
KINDS: dict[str, tuple[str, Callable[[Path], Values]]] = {
    "deepseek_v3": ("deepseek_v3", fp8),
    "qwen3_fp8": ("qwen3", fp8),
    "gpt_oss": ("gpt_oss", mxfp4),
    "gpt_oss_fp8": ("gpt_oss", fp8),
    "gpt_oss_nvfp4": ("gpt_oss", modelopt_experts),
    "gpt_oss_modelopt": ("gpt_oss", partial(modelopt_experts, form="FP8")),
    "kimi_k2": ("deepseek_v3", packed),
    "gptq": ("llama", gptq),
    "nvfp4": ("qwen3", nvfp4),
    "modelopt": ("llama", modelopt),
    "mixed": ("deepseek_v3", mixed),
    "awq": ("llama", awq),
    "nf4": ("llama", nf4),
    "llm_int8": ("qwen3", llm_int8),
}
#: Those whose numbers are chosen with data, and those that transformers reads without other packages.
CHOSEN, KNOWN = ("gptq", "awq"), ("deepseek_v3", "qwen3_fp8", "gpt_oss")


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
        elif f"{key}_weight_scale" in stored:
            values[key] = experts_values(stored, key)
        elif key.endswith("_blocks"):
            key = key.removesuffix("_blocks")
            values[key] = mxfp4_values(tensor, stored[f"{key}_scales"])
        elif key.endswith(".absmax"):
            values[key.removesuffix(".absmax")] = _4bit_values(stored, key.removesuffix(".absmax"))
        elif key.endswith("SCB"):
            sizes = stored[f"{name}weight"].numpy().astype(np.float32) * tensor.numpy()[:, None]
            values[f"{name}weight"] = torch.from_numpy(sizes * np.float32(7.874015718698502e-3))
        elif tensor.dtype == torch.uint8 and f"{name}weight_scale" in stored and tensor.ndim == 2:
            if key.endswith(("weight_packed", "weight")):
                values[f"{name}weight"] = _e2m1_rows(stored, key, name)
        elif key.endswith("weight") and f"{key}_scale" in stored:
            products = tensor.float().numpy() * stored[f"{key}_scale"].float().numpy()
            values[key] = torch.from_numpy(products).to(stored[f"{key}_scale"].dtype)
        elif key.endswith("weight_packed"):
            rows, columns = stored[f"{name}weight_shape"].tolist()
            scales, points = stored[f"{name}weight_scale"], torch.full((rows, 1), 8)
            if f"{name}weight_zero_point" in stored:
                points = unwords(stored[f"{name}weight_zero_point"].T).T[:rows].repeat_interleave(GROUP, 1)
            whole = unwords(tensor)[:, :columns]
            values[f"{name}weight"] = int4_values(whole, points, scales.repeat_interleave(GROUP, 1))
        elif key.endswith("qweight") and f"{name}g_idx" not in stored:
            whole, points, scales = (
                _awq_numbers(tensor),
                _awq_numbers(stored[f"{name}qzeros"]),
                stored[f"{name}scales"],
            )
            by = len(whole) // len(points)
            values[f"{name}weight"] = int4_values(
                whole, points.repeat_interleave(by, 0), scales.repeat_interleave(by, 0)
            ).T.contiguous()
        elif key.endswith("qweight"):
            scales, order = stored[f"{name}scales"], stored[f"{name}g_idx"].long()
            points = unwords(stored[f"{name}qzeros"] + 0x11111111)
            whole = unwords(tensor.T).T
            values[f"{name}weight"] = int4_values(whole, points[order], scales[order]).T.contiguous()
    return values


def experts_values(stored: Values, key: str) -> Tensor:
    """Experts of ModelOpt: e4m3 times its scale, or e2m1 along dimension 1 (or 2) times both scales."""
    numbers, scales = stored[key], stored[f"{key}_weight_scale"].float().numpy()
    if numbers.dtype != torch.uint8:
        return torch.from_numpy(numbers.float().numpy() * scales)
    down = scales.shape[2] == numbers.shape[2]
    along = numbers.transpose(1, 2).contiguous() if down else numbers
    whole = stored[f"{key}_weight_scale_2"].numpy().reshape(-1, 1, 1)
    factors = (scales.transpose(0, 2, 1) if down else scales) * whole
    values = e2m1(along).reshape(*factors.shape, 16) * factors[..., None]
    values = values.reshape(*factors.shape[:2], -1)
    return torch.from_numpy(values.transpose(0, 2, 1).copy() if down else values)


def _e2m1_rows(stored: Values, key: str, name: str) -> Tensor:
    """e2m1 times the scale of its group and, as each library has it, that of the matrix, in fp32."""
    scales, numbers = stored[f"{name}weight_scale"], e2m1(stored[key])
    if scales.dtype == torch.uint8:
        factors = np.ldexp(np.float32(1), scales.numpy().astype(np.int32) - 127)
    elif f"{name}weight_global_scale" in stored:
        factors = scales.float().numpy() / stored[f"{name}weight_global_scale"].numpy()
    else:
        factors = scales.float().numpy() * stored[f"{name}weight_scale_2"].numpy()
    values = numbers.reshape(*scales.shape, -1) * factors[..., None]
    return torch.from_numpy(values.reshape(numbers.shape)).to(
        torch.bfloat16 if scales.dtype == torch.uint8 else torch.float32
    )


def _4bit_values(stored: Values, key: str) -> Tensor:
    """bitsandbytes: a number of a table times the largest size of its block, in fp32, then in its dtype."""
    [state] = [each for name, each in stored.items() if name.startswith(f"{key}.quant_state")]
    said, sizes = json.loads(bytes(state.tolist())), stored[f"{key}.absmax"].numpy()
    if f"{key}.nested_absmax" in stored:
        second = stored[f"{key}.nested_absmax"].numpy().repeat(said["nested_blocksize"])[: len(sizes)]
        table = stored[f"{key}.nested_quant_map"].numpy()
        sizes = table[sizes] * second + np.float32(said["nested_offset"])
    codes = _nibbles(stored[key].reshape(-1), high_first=True)
    values = NF4[codes].reshape(len(sizes), -1) * sizes[:, None]
    return torch.from_numpy(values.reshape(said["shape"])).to(getattr(torch, said["dtype"]))


def _awq_numbers(packed: Tensor) -> Tensor:
    numbers = unwords(packed).view(len(packed), -1, 8)
    return numbers[..., np.argsort(AWQ_ORDER)].flatten(1)


def without_quantization(directory: Path, values: Values, target: Path) -> Path:
    """The same checkpoint with the values that the quantized weights stand for, in ``target``."""
    stored = load_file(directory / "model.safetensors")
    of_values = tuple(key.removesuffix("weight") for key in values)
    tensors = {
        key: tensor for key, tensor in stored.items() if key.endswith("bias") or not key.startswith(of_values)
    } | {key: value.contiguous() for key, value in values.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    (target / "config.json").write_text(json.dumps(config))
    return target


def _projections(tensors: Values) -> Iterator[str]:
    """Keys of linear layers, those of experts among them, but for the head and routers."""
    ends = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return iter([key for key in tensors if key.endswith(ends) or "kv_a_proj" in key])


def _experts(tensors: Values) -> list[str]:
    """Keys of tensors with a weight of all experts."""
    return [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]


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
        key: t.bfloat16()
        if t.dtype == torch.float32 and not any(x in key for x in ("scale", "absmax", "quant_map", "SCB"))
        else t
        for key, t in tensors.items()
    }
    save_file(others, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
