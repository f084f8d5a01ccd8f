"""A trained model takes the stored form of its checkpoint again; what did not change keeps its bits."""

import errno
import json
import math
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import infinity
from infinity.app.export import publish_run
from infinity.app.runs import write_recipe
from infinity.checkpoint import codecs, quantize
from infinity.checkpoint.writer import OutputFile, RangeWriter
from infinity.core.errors import CheckpointError, DiskError
from infinity.recipes.loading import load_recipe
from tests.checkpoint.test_export import fail_writes
from tests.checkpoint.test_load_parity import load, train
from tests.helpers import quantized, zoo
from tests.helpers.cases import few
from tests.helpers.limits import file_limit
from tests.helpers.training import streaming

HOST = ["memory.host=64MiB"]
WEIGHTS = "model.safetensors"


def layout(file):
    """Keys, dtypes, shapes and places of a file."""
    data = file.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


def change(model, names, factor=1.01):
    """Multiply the weights whose names have one of ``names`` in them."""
    for name, param in model.named_parameters():
        if any(each in name for each in names):
            with infinity.gathered([param], modify=True):
                param.mul_(factor)


def rewrite(directory, **tensors):
    """Replace tensors of a checkpoint, or add some."""
    save_file(load_file(directory / WEIGHTS) | tensors, directory / WEIGHTS, metadata={"format": "pt"})


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bf16") for kind in quantized.KINDS), ("qwen3_fp8", "fp16"), ("gptq", "fp32")],
)
def test_a_model_that_was_not_changed_gives_the_same_files(written, tmp_path, kind, dtype, monkeypatch):
    """Nothing of it is encoded at all."""
    directory, values, _ = written(kind)
    for name in [name for name in vars(codecs) if name.startswith("encode_")]:
        monkeypatch.setattr(codecs, name, lambda *_, **__: pytest.fail("a weight was encoded"))
    model = load(directory, HOST, dtype)
    result = infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()
    assert (result.weights, result.mean_error, result.largest_error) == (len(values), 0, 0)
    assert str(result).endswith("relative error 0 in the mean")
    assert {path.name for path in tmp_path.iterdir()} == {kind, "out"}
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "out", directory))
    assert ours["quantization_config"] == theirs["quantization_config"]
    assert ours["dtype"] == theirs["dtype"]


#: One of each way to store values; that each kind is written as it was read, all kinds show above.
FEW = ("qwen3_fp8", "gpt_oss", "kimi_k2", "nvfp4", "mixed", "nf4", "llm_int8")


@pytest.mark.parametrize("kind", few(FEW, [kind for kind in quantized.KINDS if kind not in quantized.CHOSEN]))
def test_a_trained_model_is_quantized_again_and_the_error_is_what_it_says(written, tmp_path, kind):
    directory, before, _ = written(kind)
    _, batch = zoo.build("llama", 3)
    model = load(directory, streaming(tmp_path / "nvme"))
    close, infinity_close = [], infinity.close
    try:
        with pytest.MonkeyPatch.context() as patch:  # training ends, and the model stays
            patch.setattr(infinity.optim.Optimizer, "close", lambda self: close.append(self))
            train(model, batch, steps=2)
        result = infinity.export(model, tmp_path / "out", stored_as=directory)
        infinity.export(model, tmp_path / "bf16")
    finally:
        infinity_close(model)
    out = tmp_path / "out"
    assert layout(out / WEIGHTS) == layout(directory / WEIGHTS)
    plain, after = load_file(tmp_path / "bf16" / WEIGHTS), quantized.stands_for(out)
    errors = {}
    for key, value in after.items():
        wanted = torch.where(plain[key] == before[key].bfloat16(), before[key].float(), plain[key].float())
        errors[key] = float((value.float() - wanted).double().norm() / wanted.double().norm())
    assert any(errors.values())
    assert (result.weights, result.worst) == (len(errors), max(errors, key=errors.get))
    assert result.largest_error == pytest.approx(max(errors.values()), rel=1e-4)
    assert result.mean_error == pytest.approx(sum(errors.values()) / len(errors), rel=1e-4)
    assert result.largest_error < (0.04 if kind in ("deepseek_v3", "qwen3_fp8", "llm_int8") else 0.2)
    assert f"{result.largest_error:.2g} at most, of {result.worst}" in str(result)
    rest = {
        key: tensor for key, tensor in load_file(out / WEIGHTS).items() if key in plain.keys() - after.keys()
    }
    assert rest
    assert all(same_bits(tensor, plain[key].to(tensor.dtype)) for key, tensor in rest.items())

    ours = load(out, HOST, "fp32")
    found = infinity.state_dict(ours)
    infinity.close(ours)
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if kind == "gpt_oss" else {}
    if kind not in quantized.KNOWN:  # transformers needs another package for it
        expected = load_plain(out, after, tmp_path / "decoded")
    else:
        expected = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **options).state_dict()
    # (transformers leaves what is not quantized in bf16)
    assert all(same_bits(found[name], value.float()) for name, value in expected.items())


def load_plain(directory, values, target):
    """The state that transformers loads of the values for which a checkpoint stands."""
    quantized.without_quantization(directory, values, target)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("kind", ["qwen3_fp8", "gpt_oss"])
def test_weights_that_training_left_alone_keep_their_bytes_beside_others(written, tmp_path, kind):
    directory, _, _ = written(kind)
    model = load(directory, HOST)
    change(model, ["layers.1."])
    infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    before, after = load_file(directory / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    changed = {key for key, tensor in before.items() if not same_bits(tensor, after[key])}
    assert changed
    assert all(".layers.1." in key for key in changed)


def test_tensors_that_are_not_quantized_keep_their_dtype_and_what_bf16_would_lose(written, tmp_path):
    directory, _, _ = written("qwen3_fp8")
    norm = torch.randn(load_file(directory / WEIGHTS)["model.norm.weight"].shape)
    rewrite(directory, **{"model.norm.weight": norm})
    model = load(directory, HOST)
    infinity.export(model, tmp_path / "out", stored_as=directory)
    assert same_bits(load_file(tmp_path / "out" / WEIGHTS)["model.norm.weight"], norm)
    with infinity.gathered([model.model.norm.weight], modify=True):
        model.model.norm.weight[3] = 7.0
    infinity.export(model, tmp_path / "changed", stored_as=directory)
    infinity.close(model)
    norm[3] = 7.0
    assert same_bits(load_file(tmp_path / "changed" / WEIGHTS)["model.norm.weight"], norm)


def test_files_and_index_are_those_of_the_checkpoint(written, tmp_path):
    directory, _, _ = written("qwen3_fp8")
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = {key: f"model-{1 + number % 3}.safetensors" for number, key in enumerate(tensors)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == name}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    model = load(directory, HOST)
    result = infinity.export(model, tmp_path / "out", stored_as=directory, max_shard_nbytes=20_000)
    infinity.close(model)
    for path in directory.glob("model*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert kept == {path.name for path in directory.iterdir()}
    assert result.copied == 0


def test_a_tied_head_is_written_twice_and_what_the_model_lacks_is_copied(written, tmp_path):
    directory, _, _ = written("qwen3_fp8")
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    before = load_file(directory / WEIGHTS)
    further = {"model.mtp.norm.weight": torch.randn(5), "model.mtp.proj.weight": torch.randn(3, 2).half()}
    rewrite(directory, **{"lm_head.weight": before["model.embed_tokens.weight"]}, **further)
    model = load(directory, HOST, ignore=["model.mtp.*"])
    change(model, ["embed_tokens"], 2.0)
    result = infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    after = load_file(tmp_path / "out" / WEIGHTS)
    twice = before["model.embed_tokens.weight"] * 2
    assert same_bits(after["lm_head.weight"], twice)
    assert same_bits(after["model.embed_tokens.weight"], twice)
    assert all(same_bits(after[key], tensor) for key, tensor in further.items())
    assert result.copied == 2
    assert "; 2 tensors of the checkpoint are copied" in str(result)


@pytest.mark.parametrize("kind", ["fp8", "packed"])
def test_parts_of_blocks_at_the_edge_and_zero_points_are_encoded(tmp_path, kind):
    zoo.build("llama", 5)[0]().save_pretrained(tmp_path / "llama")
    directory = tmp_path / "llama"
    if kind == "packed":
        quantized.packed(directory, only="_proj", zeros=True)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "BLOCK", 7)
            quantized.fp8(directory)
    model = load(directory, HOST)
    infinity.export(model, tmp_path / "same", stored_as=directory)
    assert (tmp_path / "same" / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()
    change(model, ["_proj"], -1.7)
    result = infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert 0 < result.mean_error < (0.03 if kind == "fp8" else 0.12)


def test_a_block_that_is_said_to_be_larger_than_its_matrix_takes_no_more_memory(tmp_path):
    zoo.build("llama", 5)[0]().save_pretrained(tmp_path / "llama")
    directory = tmp_path / "llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "BLOCK", 128)
        quantized.fp8(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [2**70, 2**40]
    (directory / "config.json").write_text(json.dumps(config))
    model = load(directory, HOST)
    change(model, ["_proj"], -1.7)
    result = infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert 0 < result.mean_error < 0.05


def test_what_a_run_kept_in_bf16_takes_the_stored_form_too(written, tmp_path, monkeypatch):
    """Without a model: also of weights that another program trained or merged."""
    directory, _, _ = written("deepseek_v3")
    model = load(directory, HOST)
    change(model, ["layers.0."])
    live = infinity.export(model, tmp_path / "live", stored_as=directory, tokenizer=tokenizer(tmp_path))
    infinity.export(model, tmp_path / "run/model", tokenizer=tokenizer(tmp_path))
    infinity.close(model)
    write_recipe(load_recipe(overrides=[f"model.path={directory}"]), tmp_path / "run")
    (tmp_path / "run/summary.json").write_text("{}")  # it is finished
    published = publish_run(tmp_path / "run", tmp_path / "out", stored=True)
    assert published == f"the model of {tmp_path / 'run'} ({live})"
    for path in (tmp_path / "live").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "run/model" / WEIGHTS).exists()
    free = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path)._replace(free=1000))
    with pytest.raises(DiskError, match="making room"):
        publish_run(tmp_path / "run", tmp_path / "full", stored=True)
    assert not list(tmp_path.glob("*full*"))


def tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    return folder / "tokenizer.json"


# --- what is refused ------------------------------------------------------------------------------


def test_a_form_that_does_not_fit_is_refused_before_anything_is_written(written, tmp_path, monkeypatch):
    directory, _, _ = written("qwen3_fp8")
    model = load(directory, HOST)
    monkeypatch.setattr(RangeWriter, "write", lambda *args: pytest.fail("a value was written"))

    def refused(what, source=directory):
        with pytest.raises(CheckpointError, match=what):
            infinity.export(model, tmp_path / "out", stored_as=source)
        assert not list(tmp_path.glob("*out*"))

    refused("No such file", tmp_path / "nowhere")
    bare = tmp_path / "bare"
    shutil.copytree(directory, bare)
    config = json.loads((bare / "config.json").read_text())
    for change_config, what in (
        ({"quantization_config": None}, "bare is not quantized .* leave stored_as out"),
        ({"quantization_config": {"quant_method": "aqlm"}}, 'quant_method is "aqlm"'),
    ):
        (bare / "config.json").write_text(json.dumps(config | change_config))
        refused(what, bare)
    tensors = load_file(directory / WEIGHTS)
    rewrite(directory, **{"model.norm.weight": tensors["model.norm.weight"][:4].clone()})
    refused(r"model.norm.weight has shape \(\d+,\), there \(4,\)\. Export it without")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / WEIGHTS)
    refused("model.norm.weight is not in the checkpoint")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("mine")
    with pytest.raises(CheckpointError, match="out exists and is not empty"):
        infinity.export(model, tmp_path / "out", stored_as=written("qwen3_fp8")[0])
    infinity.close(model)


WITHOUT_A_NUMBER = [
    *((kind, value, "NaN") for kind in ("qwen3_fp8", "gpt_oss", "gptq") for value in (math.nan, math.inf)),
    *(
        (kind, 1.0, "it was trained, and numbers of this form are chosen with data.* export")
        for kind in ("gptq", "awq")
    ),
]


@pytest.mark.parametrize(("kind", "value", "why"), WITHOUT_A_NUMBER)
def test_a_value_without_a_number_is_refused_and_its_weight_named(written, tmp_path, kind, value, why):
    directory, _, _ = written(kind)
    model = load(directory, HOST)
    name = "mlp.experts.down_proj" if kind == "gpt_oss" else "self_attn.q_proj.weight"
    param = model.get_parameter(f"model.layers.1.{name}")
    with infinity.gathered([param], modify=True):
        param.view(-1)[17] = value
    with pytest.raises(CheckpointError, match=rf"layers\.1\.{name} cannot be quantized as .*{why}"):
        infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert {path.name for path in tmp_path.iterdir()} <= {kind, "plain"}


def test_what_is_not_quantized_must_be_finite_too_also_in_the_checkpoints_dtype(written, tmp_path):
    directory, _, _ = written("qwen3_fp8")
    norm = load_file(directory / WEIGHTS)["model.norm.weight"].half()
    norm[4] = float("-inf")  # is the checkpoint's own, and stays
    rewrite(directory, **{"model.norm.weight": norm})
    model = load(directory, HOST)
    infinity.export(model, tmp_path / "same", stored_as=directory)
    for value in (float("nan"), 1e30):
        with infinity.gathered([model.model.norm.weight], modify=True):
            model.model.norm.weight[3] = value
        with pytest.raises(
            CheckpointError, match=r"^model\.norm\.weight: a value is NaN or infinite.*float16"
        ):
            infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert same_bits(load_file(tmp_path / "same" / WEIGHTS)["model.norm.weight"], norm)
    assert {path.name for path in tmp_path.iterdir()} == {"qwen3_fp8", "same"}


def test_an_index_that_was_not_read_is_not_published(written, tmp_path):
    directory, _, _ = written("qwen3_fp8")
    (tmp_path / "mine").write_text("secret")
    (directory / "model.safetensors.index.json").symlink_to(tmp_path / "mine")
    model = load(directory, HOST)
    infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert not (tmp_path / "out/model.safetensors.index.json").exists()


def test_weights_in_bf16_that_cannot_be_removed_are_not_published(written, tmp_path, monkeypatch):
    directory, _, _ = written("qwen3_fp8")
    model = load(directory, HOST)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert not any("plain" in str(path) for path in (tmp_path / "out").rglob("*"))


def test_files_are_closed_when_no_thread_writes_to_them_any_more(written, tmp_path, monkeypatch):
    directory, _, _ = written("qwen3_fp8")
    model, put, close = load(directory, HOST), OutputFile.put, OutputFile.close
    change(model, ["layers.1.self_attn.v_proj"], float("nan"))
    closed, found = threading.Event(), []

    def put_slowly(self, *args):
        if "plain" not in str(self.path):
            found.append(closed.wait(0.02))
        put(self, *args)

    def closing(self):
        if "plain" not in str(self.path):
            closed.set()
        close(self)

    monkeypatch.setattr(OutputFile, "put", put_slowly)
    monkeypatch.setattr(OutputFile, "close", closing)
    with pytest.raises(CheckpointError, match="NaN"):
        infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert found
    assert not any(found)


def fill_disk(patch, fails):
    """Let there be no room for an export at all, its values in bf16, its quantized ones, or its configs."""
    full, free, write = OSError(errno.ENOSPC, ""), shutil.disk_usage, quantize._write_tensors

    def write_to_full_disk(*args):
        fail_writes(patch, full, after=0)
        return write(*args)

    def refuse(*args, **how):
        raise full

    if fails == "room":
        patch.setattr(shutil, "disk_usage", lambda path: free(path)._replace(free=1000))
    elif fails == "plain":
        fail_writes(patch, full, after=1)
    elif fails == "form":
        patch.setattr(quantize, "_write_tensors", write_to_full_disk)
    elif fails == "configs":
        patch.setattr(Path, "write_text", refuse)


@pytest.mark.parametrize("fails", ["room", "size", "plain", "form", "configs"])
def test_a_full_disk_leaves_nothing_and_the_model_unharmed(written, tmp_path, fails, monkeypatch):
    directory, _, _ = written("deepseek_v3")
    model = load(directory, HOST)
    with monkeypatch.context() as patch, file_limit(20_000 if fails == "size" else 2**40):
        fill_disk(patch, fails)
        with pytest.raises(DiskError) as raised:
            infinity.export(model, tmp_path / "out", stored_as=directory)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert [path.name for path in tmp_path.iterdir()] == ["deepseek_v3"]
    infinity.export(model, tmp_path / "out", stored_as=directory)
    infinity.close(model)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()
