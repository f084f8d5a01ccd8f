"""A quantized checkpoint is decoded once, exactly, and trains as the checkpoint that it stands for."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.checkpoint import codecs
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.core.errors import CheckpointError
from tests.checkpoint.test_load_parity import load, train
from tests.helpers import quantized, zoo
from tests.helpers.cases import few
from tests.helpers.training import assert_bitwise, reference, streaming

E4M3 = torch.ones(4, 2).to(torch.float8_e4m3fn)
STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [3, 7]}
STATE = torch.frombuffer(bytearray(json.dumps(STATE).encode()), dtype=torch.uint8)


def decoded(directory):
    checkpoint = Checkpoint(directory)
    decode_checkpoint(checkpoint, read_quantization(directory))
    return checkpoint


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_quantization(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_any_range_of_a_quantized_weight_has_its_values(written, kind):
    directory, values, _ = written(kind)
    stored = load_file(directory / "model.safetensors")
    with decoded(directory) as checkpoint:
        assert values.keys() <= checkpoint.keys()
        assert all(key in stored for key in checkpoint.keys() - values.keys())
        for key, expected in values.items():
            tensor = checkpoint[key]
            assert tensor.shape == expected.shape
            assert tensor.dtype in (torch.float32, expected.dtype, torch.bfloat16)
            for _ in range(6):
                start, stop = sorted(torch.randint(0, expected.numel() + 1, (2,)).tolist())
                out = torch.empty(stop - start)
                tensor.fill(start, out)
                assert torch.equal(out, expected.reshape(-1)[start:stop].float()), (key, start, stop)


def test_zero_points_of_packed_groups_are_read_with_their_rows(written, tmp_path):
    zoo.build("llama", 5)[0]().save_pretrained(tmp_path / "llama")
    values = quantized.packed(tmp_path / "llama", only="_proj", zeros=True)
    with decoded(tmp_path / "llama") as checkpoint:
        for key, expected in values.items():
            for start in (0, 7 * expected.shape[1] + 3):
                out = torch.empty(expected.numel() - start)
                checkpoint[key].fill(start, out)
                assert torch.equal(out, expected.reshape(-1)[start:].float())


@pytest.mark.parametrize("kind", few(("qwen3_fp8", "gpt_oss"), quantized.KINDS))
def test_a_quantized_checkpoint_trains_as_the_one_that_it_stands_for(written, tmp_path, kind):
    directory, _, plain = written(kind)
    _, batch = zoo.build("llama", 3)
    expected = reference(plain, batch, dtype="bf16", steps=3)
    ours = train(load(directory, streaming(tmp_path / "nvme")), batch, steps=3)
    assert_bitwise(ours, expected)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gptq"])
def test_what_is_not_trained_has_the_values_that_transformers_loads_in_the_compute_dtype(written, kind):
    directory, _, plain = written(kind)
    model = load(directory, ["memory.host=64MiB"], frozen=True)
    weights = infinity.state_dict(model)
    infinity.close(model)
    expected = plain().bfloat16().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_the_loop_of_a_cpu_decodes_every_fp8_value_to_the_bits_of_torch(tmp_path, dtype, scales):
    codes = torch.arange(300 * 200, dtype=torch.int32).to(torch.uint8)  # every code, NaN too, in every block
    stored = codes.view(torch.float8_e4m3fn).view(300, 200)
    factors = (torch.rand(3, 2) * torch.tensor([[1e-30, 1.0], [1e-3, 3e4], [0.0, 1e36]])).to(scales)
    tensors = {"a.weight": stored, "a.weight_scale_inv": factors}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fp8}))
    checkpoint = Checkpoint(tmp_path)
    decode_checkpoint(checkpoint, read_quantization(tmp_path), dtype)
    content = torch.frombuffer(bytearray((tmp_path / "model.safetensors").read_bytes()), dtype=torch.uint8)

    def view(file, offset, nbytes):
        return content.narrow(0, offset, nbytes)

    expected = codecs.decode_fp8(0, stored, factors, block=(128, 128)).to(dtype)
    for first, last in ((0, 300), (0, 128), (130, 299), (127, 129)):
        out = torch.empty((last - first) * 200, dtype=dtype)
        checkpoint["a.weight"].fill(first * 200, out, view)
        wanted = expected[first:last].flatten()
        assert torch.equal(out.isnan(), wanted.isnan())  # torch writes some as 0x7fc0, and some as 0xffff
        assert torch.equal(out.nan_to_num(7).view(torch.uint8), wanted.nan_to_num(7).view(torch.uint8))
    checkpoint.close()


@pytest.mark.parametrize("kind", ["qwen3_fp8", "gpt_oss"])
def test_it_is_exported_in_bf16_without_quantization_and_the_run_says_so(written, tmp_path, caplog, kind):
    directory, values, plain = written(kind)
    with caplog.at_level(logging.INFO, "infinity"):
        model = load(directory, ["memory.host=64MiB"])
    assert f"{len(values)} weights of {directory} are decoded from" in caplog.text
    assert "exports have them in bfloat16, not quantized" in caplog.text
    infinity.export(model, tmp_path / "out")
    infinity.close(model)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    expected = plain().bfloat16().state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_quantization_that_only_modelopts_own_file_declares_is_found(written, tmp_path):
    directory, values, _ = written("modelopt")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    said = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    said = {"quant_algo": said["quant_algo"], "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    ours = {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": said}
    (directory / "hf_quant_config.json").write_text(json.dumps(ours))
    model = load(directory, ["memory.host=64MiB"])
    weights = infinity.state_dict(model)
    infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert all(torch.equal(weights[key], value.bfloat16()) for key, value in values.items())
    for name in ("model.safetensors", "hf_quant_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    ours["quantization"]["quant_algo"] = "W4A8_AWQ"
    (directory / "hf_quant_config.json").write_text(json.dumps(ours))
    with pytest.raises(CheckpointError, match=r'hf_quant_config\.json: quant_algo is "W4A8_AWQ"'):
        read_quantization(directory)
    for said, what in (([3], "hf_quant_config"), ("FP8", "hf_quant_config"), ({}, None), (None, None)):
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
        if what is None:
            assert read_quantization(directory) is None
        else:
            with pytest.raises(CheckpointError, match=what):
                read_quantization(directory)


def test_a_weight_whose_inputs_are_scaled_is_refused_since_no_plain_model_has_it(written):
    directory, _, _ = written("modelopt")
    key = "model.layers.0.mlp.up_proj.pre_quant_scale"
    rewrite(directory, lambda tensors: tensors.update({key: torch.ones(32)}))
    with pytest.raises(CheckpointError, match="pre_quant_scale: got a factor of inputs"):
        decoded(directory)


def test_decoding_holds_a_part_of_a_tensor_only(tmp_path, monkeypatch):
    seen = []
    whole = codecs.decode_fp8

    def decode(first, codes, *scales, **block):
        seen.append(codes.numel())
        return whole(first, codes, *scales, **block)

    monkeypatch.setattr(codecs, "decode_fp8", decode)
    weight = torch.randn(3000, 300).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.ones(24, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with decoded(tmp_path) as checkpoint:
        out = torch.empty(weight.numel())
        checkpoint["a.weight"].fill(0, out)
    assert torch.equal(out.view(weight.shape), weight.float())
    assert max(seen) <= 2**18 < weight.numel()


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("qwen3_fp8", {"quant_method": "aqlm"}, 'quant_method is "aqlm"'),
        ("qwen3_fp8", {"weight_block_size": [0, 8]}, "positive whole number"),
        ("qwen3_fp8", {"weight_block_size": [8]}, r"weight_block_size is \[8\]; wanted rows and columns"),
        ("qwen3_fp8", {"weight_block_size": [7, 8]}, r"one for each block of \(7, 8\) of a weight of shape"),
        ("qwen3_fp8", {"weight_block_size": None}, None),  # the file's own blocks count
        ("qwen3_fp8", {"quant_method": "gptq", "bits": 4}, "no tensor ends with qweight"),
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("kimi_k2", {"format": "mxfp6-pack-quantized"}, "format is mxfp6"),
        ("kimi_k2", {"config_groups": 3}, "quantization_config"),
        (
            "kimi_k2",
            {"config_groups": {"a": {}}},
            "quantization_config in config.json: 'weights' is unknown, or",
        ),
        ("nvfp4", {"transform_config": {"config_groups": {}}}, r"rotated \(transform_config"),
        ("nvfp4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("modelopt", {"quant_algo": "NVFP4_SVD"}, 'quant_algo is "NVFP4_SVD"'),
        ("awq", {"version": "gemv"}, 'version is "gemv" with 4 bits; wanted gemm with 4'),
        ("awq", {"bits": 8}, "with 8 bits"),
        ("nf4", {"load_in_8bit": True}, "either load_in_4bit or load_in_8bit"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'; wanted nf4"),
    ],
)
def test_a_format_that_cannot_be_decoded_is_refused_and_named(written, kind, changes, what):
    directory, _, _ = written(kind)
    change_quantization(directory, **changes)
    if what is None:
        infinity.close(load(directory, ["memory.host=64MiB"]))
        return
    with pytest.raises(CheckpointError, match=what):
        load(directory, ["memory.host=64MiB"])


@pytest.mark.parametrize(
    ("kind", "ending", "becomes", "what"),
    [
        ("qwen3_fp8", "weight_scale_inv", None, "no tensor ends with _scale_inv"),
        ("qwen3_fp8", "weight_scale_inv", torch.ones(5, 7), r"got shape \(5, 7\); wanted one number, or"),
        ("qwen3_fp8", "weight_scale_inv", torch.ones(2).long(), "wanted float32"),
        ("gpt_oss", "_scales", None, r"_scales is missing; wanted uint8 of shape \(4, 32, 2\)"),
        ("gpt_oss", "_scales", torch.ones(1, 1, 1, dtype=torch.uint8), r"wanted uint8 of shape \(4"),
        ("kimi_k2", "weight_scale", torch.ones(1, 2), r"\(1, 2\); wanted .* of shape \(32, 3\)"),
        ("kimi_k2", "weight_shape", torch.tensor([32, 25]), r"got \[32, 25\]; wanted 32 rows, in 3 words"),
        ("kimi_k2", "down_proj.weight_scale", torch.ones(32, 0), r"wanted .* of shape \(32, 3\)"),
        ("gptq", "g_idx", None, "g_idx is missing; wanted int64 or int32"),
        (
            "gptq",
            "down_proj.g_idx",
            torch.full((80,), 99, dtype=torch.int32),
            "got groups 99 to 99; wanted some of the 10 of",
        ),
        ("nvfp4", "weight_global_scale", None, "weight_global_scale is missing; wanted float32"),
        ("nvfp4", "weight_scale", None, "weight_scale is missing; wanted float8_e4m3fn"),
        ("nvfp4", "q_proj.weight_scale", E4M3[:3], r"\(3, 2\); wanted 32 rows of one for each 16 of"),
        ("nvfp4", "weight_global_scale", torch.ones(2), r"of shape \(2,\); wanted float32 of shape"),
        ("modelopt", "weight_scale", None, "weight_scale is missing; wanted float"),
        ("modelopt", "weight_scale_2", torch.ones(1).half(), "wanted float32"),
        ("mixed", "down_proj.weight_scale", torch.ones(7, 1).bfloat16(), r"of shape \(32, 3\)"),
        ("awq", "scales", torch.ones(5, 32).half(), r"\(10, 4\); wanted int32 of shape \(5, 4\)"),
        ("awq", "qzeros", None, r"qzeros is missing; wanted int32 of shape \(10, 4\)"),
        ("nf4", "quant_state.bitsandbytes__nf4", None, "__nf4 is missing; wanted uint8"),
        ("nf4", "quant_state.bitsandbytes__nf4", STATE[:-3], "wanted JSON of a few lines"),
        ("nf4", "quant_state.bitsandbytes__nf4", STATE, "a shape of whole blocks"),
        ("nf4", "quant_state.bitsandbytes__nf4", STATE[:1].repeat(2**17), "JSON of a few lines"),
        ("nf4", "nested_absmax", None, r"got uint8 of shape \(40,\); wanted float32 of shape \(40,\)"),
        ("nf4", "nested_quant_map", torch.ones(255), r"\(255,\); wanted float32 of shape \(256,\)"),
        ("llm_int8", "SCB", torch.ones(3), r"\(3,\); wanted float32 of shape \(32,\)"),
        ("llm_int8", "SCB", None, "no tensor ends with .absmax or SCB"),
        ("llm_int8", "weight_format", torch.ones((), dtype=torch.uint8), "in the order of a kernel"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused_and_named(written, kind, ending, becomes, what):
    directory, _, _ = written(kind)

    def change(tensors):
        for key in [key for key in tensors if key.endswith(ending)]:
            del tensors[key]
            if becomes is not None:
                tensors[key] = becomes.clone()

    rewrite(directory, change)
    with pytest.raises(CheckpointError, match=what):
        load(directory, ["memory.host=64MiB"])
