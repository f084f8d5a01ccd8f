"""A checkpoint is quantized once, in bounded memory, and serves as the frozen base of adapters."""

import itertools
import json
import logging
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.api import init as api
from infinity.checkpoint import codecs, quantize
from infinity.checkpoint.directory import Checkpoint
from infinity.cli import main
from infinity.core.config import SettingError
from infinity.core.errors import CheckpointError, DiskError, RecipeError
from tests.checkpoint.test_load_parity import load
from tests.helpers import families, models, quantized, zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.shards.test_mapped import held, loaded, mapped, train, train_plain

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

WEIGHTS = "model.safetensors"
#: The largest relative error of normal weights in each form.
ERRORS = {"fp8": 0.03, "int8": 0.01, "mxfp4": 0.14, "nvfp4": 0.12, "nf4": 0.11}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr(quantized, "BLOCK", 128)


def save(directory: Path, name: str = "deepseek_v3") -> Path:
    make = models.build if name == "llama" else zoo.build
    make(name, 5)[0]().bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("form", quantize.FORMS)
def test_linear_layers_and_experts_have_the_nearest_numbers_and_all_else_its_bits(tmp_path, form):
    before = load_file(save(tmp_path / "plain") / WEIGHTS)
    result = infinity.quantize(tmp_path / "plain", tmp_path / "out", form)
    after, values = load_file(tmp_path / "out" / WEIGHTS), quantized.stands_for(tmp_path / "out")
    fits = {"mxfp4": 32, "nvfp4": 16}.get(form, 1)
    linear = {key for key in before if key.endswith("_proj.weight") or "kv_a_proj" in key}
    assert values.keys() == {key for key in linear if before[key].shape[1] % fits == 0} != set()
    errors = {
        key: float((value.float() - before[key].float()).norm() / before[key].float().norm())
        for key, value in values.items()
    }
    assert result.weights == len(errors)
    assert result.largest_error == pytest.approx(max(errors.values()), rel=1e-4)
    assert max(errors.values()) < ERRORS[form]
    rest = before.keys() - values.keys()
    assert all(same_bits(before[key], after[key]) for key in rest)
    assert any("mlp.gate.weight" in key for key in rest)
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "out"}
    shutil.copyfile(tmp_path / "out/config.json", tmp_path / "plain/config.json")
    with pytest.raises(CheckpointError, match=r"plain is quantized already \(.*leave nf4 out"):
        infinity.quantize(tmp_path / "plain", tmp_path / "again", "nf4")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_router_that_is_a_linear_layer_stays_as_it_is(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_dense_layers": 1}
    config = transformers.AfmoeConfig(vocab_size=97, num_experts=16, num_experts_per_tok=2, **sizes, **heads)
    model = transformers.AfmoeForCausalLM(config).bfloat16()
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    routers = {f"{name}.weight" for name in linear if name.endswith("router.gate")}
    model.save_pretrained(tmp_path / "plain")
    infinity.quantize(tmp_path / "plain", tmp_path / "out", "nf4")
    before, after = (load_file(tmp_path / each / WEIGHTS) for each in ("plain", "out"))
    values = quantized.stands_for(tmp_path / "out")
    assert routers
    assert all(same_bits(before[key], after[key]) for key in routers)
    assert any(".experts." in key for key in values)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert {f"{name}.weight" for name in config["llm_int8_skip_modules"]} == routers | {"lm_head.weight"}


def test_transformers_reads_what_is_quantized_to_fp8(tmp_path):
    save(tmp_path / "plain", "qwen3")
    infinity.quantize(tmp_path / "plain", tmp_path / "out", "fp8")
    values = quantized.stands_for(tmp_path / "out")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(state[key], value) for key, value in values.items())


@pytest.mark.parametrize(("form", "name"), [("nf4", "deepseek_v3"), ("fp8", "llama")])
def test_adapters_train_on_it_as_with_plain_pytorch_and_peft_on_its_values(tmp_path, form, name):
    plain, targets = save(tmp_path / "plain", name), ["q_b_proj", "o_proj"] if name != "llama" else None
    with loaded(plain, tmp_path / "nvme", "memory.device=1MiB", stored_as=form) as model:
        assert mapped(model)
        assert any(unit.stored for unit in mapped(model))
        assert model.config.name_or_path == str(plain)
        losses = train(model, targets=targets)
    [base] = (tmp_path / "nvme/bases").iterdir()
    assert base.name.startswith(f"plain-{form}-")
    target = quantized.without_quantization(base, quantized.stands_for(base), tmp_path / "values")
    expected = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert losses == train_plain(expected, targets)


FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi",
    "gpt_neox",
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "gpt-oss",
    "Llama 4",
)
FAST = [("llama", "mxfp4"), ("phi", "int8"), ("mixtral", "nvfp4"), ("gpt-oss", "nf4"), ("gemma2", "fp8")]
FAST += [("Llama 4", form) for form in ("fp8", "nvfp4", "mxfp4")]


@pytest.mark.parametrize(("name", "form"), few(FAST, itertools.product(FAMILIES, quantize.FORMS)))
def test_each_family_has_the_values_of_its_stored_form(tmp_path, name, form):
    plain = tmp_path / "plain"
    if name in families.FAMILIES:
        families.write(name, "bf16", plain)
    else:
        save(plain, name)
    with loaded(plain, tmp_path / "nvme", "memory.device=1MiB", stored_as=form) as model:
        weights = infinity.state_dict(model)
        assert any(unit.stored for unit in mapped(model))
    [base] = (tmp_path / "nvme/bases").iterdir()
    values = quantized.stands_for(base)
    assert any("experts" in key for key in values) == (
        name in ("mixtral", "qwen2_moe", "deepseek_v3") or (name in families.IN_ONE_TENSOR and form != "int8")
    )
    target = quantized.without_quantization(base, values, tmp_path / "values")
    expected = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).state_dict()
    assert weights.keys() == expected.keys()
    assert [key for key in weights if not torch.equal(weights[key], expected[key])] == []


def test_it_is_encoded_once_and_again_for_other_weights(tmp_path, monkeypatch, caplog):
    plain, where = save(tmp_path / "plain", "llama"), ["memory.device=1MiB"]
    progress = []

    def run():
        caplog.clear()
        progress.clear()
        how = {"stored_as": "nf4", "on_progress": lambda *given: progress.append(given)}
        with (
            caplog.at_level(logging.INFO, "infinity"),
            loaded(plain, tmp_path / "nvme", *where, **how) as model,
        ):
            assert not held(model)
        return caplog.text, sorted((tmp_path / "nvme/bases").iterdir())

    text, [base] = run()
    assert f"was quantized once, into {base}, for this run and later ones: 21 weights in NF4" in text
    with Checkpoint(base) as made:
        total = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in made.values())
    encoded = [given for given in progress if given[0] == "quantizing"]
    assert encoded == sorted(encoded)
    assert encoded[-1] == ("quantizing", total, total)
    assert len(encoded) > 21
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(codecs, "encode_4bit", lambda *_, **__: pytest.fail("it was encoded again"))
        text, found = run()
    assert found == [base]
    assert {what for what, _, _ in progress} == {"loading"}
    assert "as an earlier run left it" in text
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.iterdir()}
    models.build("llama", 6)[0]().bfloat16().save_pretrained(plain)
    assert len(run()[1]) == 2


def test_a_run_that_another_one_overtakes_reads_what_that_has_left(tmp_path, monkeypatch, caplog):
    plain, write = save(tmp_path / "plain", "llama"), api.quantize_checkpoint

    def overtaken(*given):
        write(*given)
        return write(*given)

    monkeypatch.setattr(api, "quantize_checkpoint", overtaken)
    with (
        caplog.at_level(logging.INFO, "infinity"),
        loaded(plain, tmp_path / "nvme", "memory.device=1MiB", stored_as="nf4") as model,
    ):
        assert mapped(model)
    assert "as another run has just left it" in caplog.text
    assert len(list((tmp_path / "nvme/bases").iterdir())) == 1


def ranks_quantize(folder: str, rank: int = 0, world: int = 1) -> list[float]:
    transformers.utils.logging.set_verbosity_error()
    with loaded(
        Path(folder) / "plain", Path(folder) / "nvme", "memory.device=1MiB", stored_as="nf4"
    ) as model:
        return train(model, steps=1, rank=rank, world=world, targets=["q_b_proj", "o_proj"])


def test_two_ranks_share_the_work_and_write_the_same_bytes(tmp_path):
    save(tmp_path / "plain")
    infinity.quantize(tmp_path / "plain", tmp_path / "out", "nf4")
    run_ranks(ranks_quantize, 2, str(tmp_path))
    [base] = (tmp_path / "nvme/bases").iterdir()
    assert (base / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


def test_a_piece_of_a_matrix_is_encoded_at_a_time(tmp_path, monkeypatch):
    sizes = {"hidden_size": 640, "intermediate_size": 640, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    whole, seen = codecs._nearest, []

    def nearest(values, *args, **how):
        seen.append(values.numel())
        return whole(values, *args, **how)

    monkeypatch.setattr(codecs, "_nearest", nearest)
    for form in quantize.FORMS:
        infinity.quantize(tmp_path / "plain", tmp_path / form, form)
    assert max(seen) <= 2**18 < 640 * 640


def test_what_cannot_be_quantized_is_refused_before_anything_is_written(tmp_path):
    plain = save(tmp_path / "plain", "llama")

    def refused(what, *places, error=CheckpointError, **options):
        with pytest.raises(error, match=what):
            load(plain, ["memory.host=64MiB", *places], **options)

    refused("wanted fp8, int8, mxfp4", f"memory.nvme=[{tmp_path}/nvme]", stored_as="int4", frozen=True)
    refused(r"memory\.nvme: got .*wanted a directory", error=SettingError, stored_as="nf4", frozen=True)
    refused("stored_as=nf4 is for a base that is not trained: add frozen=True", stored_as="nf4")
    with pytest.raises(CheckpointError, match="got 'q4_0'"):
        infinity.quantize(plain, tmp_path / "out", "q4_0")
    with pytest.raises(CheckpointError, match="nowhere"):
        infinity.quantize(tmp_path / "nowhere", tmp_path / "out", "nf4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    with pytest.raises(CheckpointError, match="full exists and is not empty"):
        infinity.quantize(plain, tmp_path / "full", "nf4")
    for overrides in (["model.stored_as=nf4", f"model.path={plain}", "memory.nvme=[a]"],
                      ["model.stored_as=nf4", f"model.path={plain}", "lora.rank=4"]):  # fmt: skip
        with pytest.raises(RecipeError, match=r"model\.stored_as .*null without adapters"):
            infinity.load_recipe(overrides=overrides)
    with pytest.raises(RecipeError, match=r"model\.stored_as"):
        infinity.load_recipe(overrides=["model.stored_as=int4", f"model.path={plain}"])
    config = json.loads((plain / "config.json").read_text()) | {"num_hidden_layers": 0}
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no linear layer that nf4 has whole blocks for"):
        infinity.quantize(plain, tmp_path / "out", "nf4")
    assert {path.name for path in tmp_path.iterdir()} <= {"plain", "full", "nvme"}


@pytest.mark.parametrize("family", families.IN_ONE_TENSOR)
@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nvfp4", "nf4"])
def test_experts_in_one_tensor_have_the_nearest_numbers_an_expert_at_a_time(tmp_path, family, form):
    families.write(family, "bf16", tmp_path / "plain")
    before = load_file(tmp_path / "plain" / WEIGHTS)
    result = infinity.quantize(tmp_path / "plain", tmp_path / "out", form)
    values, after = quantized.stands_for(tmp_path / "out"), load_file(tmp_path / "out" / WEIGHTS)
    experts = {key for key in before if before[key].ndim == 3}
    assert {key for key in values if "experts." in key} == experts != set()
    linear = {key for key in before if key.endswith("_proj.weight")}
    assert values.keys() == (experts if form == "mxfp4" else experts | linear)
    for key in before.keys() - values.keys():
        assert same_bits(before[key], after[key]), key
    errors = {
        key: float((value.float() - before[key].float()).norm() / before[key].float().norm())
        for key, value in values.items()
    }
    assert result.weights == len(errors)
    assert result.largest_error == pytest.approx(max(errors.values()), rel=1e-4)
    assert max(errors.values()) < ERRORS[form]
    assert "stay as they are" not in str(result)


def test_experts_that_stay_as_they_are_and_the_smallest_values_are_said_and_kept(tmp_path):
    config = transformers.GptOssConfig(**quantized._GPT_OSS)
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "oss")
    result = infinity.quantize(tmp_path / "oss", tmp_path / "out", "int8")
    assert "4 weights (" in str(result)
    assert "stay as they are: there is no form for experts in one tensor" in str(result)
    weight = torch.full((4, 16), 1e-37)
    scales, whole = torch.zeros(4, 1).to(torch.float8_e4m3fn), torch.zeros(1)
    codes, found, whole = codecs.encode_e2m1(weight, torch.zeros(4, 8).byte(), scales, whole, divides=True)
    values = codecs.decode_e2m1(0, codes, found, whole, divides=True)
    torch.testing.assert_close(values, weight, rtol=0.2, atol=0)


def test_a_value_without_a_number_and_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    plain, free = save(tmp_path / "plain", "llama"), shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free(path)._replace(free=1000))
        with pytest.raises(DiskError, match="making room"):
            infinity.quantize(plain, tmp_path / "out", "nf4")
    model = load(plain, ["memory.host=64MiB"])
    with infinity.gathered([model.model.layers[1].mlp.up_proj.weight], modify=True):
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    infinity.export(model, tmp_path / "nan")
    infinity.close(model)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight cannot be quantized .*NaN"):
        infinity.quantize(tmp_path / "nan", tmp_path / "out", "fp8")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "nan"}


def test_the_command_says_how_far_the_weights_are(tmp_path, capsys):
    save(tmp_path / "plain", "llama")
    assert main(["quantize", str(tmp_path / "plain"), str(tmp_path / "out"), "--as", "nf4"]) == 0
    assert "out: 21 weights in NF4 of bitsandbytes, relative error 0.09" in capsys.readouterr().out
    assert main(["quantize", str(tmp_path / "plain"), str(tmp_path / "out"), "--as", "nf4"]) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_it_is_shown_how_far_quantizing_and_merging_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("infinity.observe.metrics.LINES_EVERY_S", 0.0)
    plain, out = save(tmp_path / "plain", "llama"), tmp_path / "out"
    seen = list[tuple[str, int, int]]()
    infinity.quantize(plain, out, "nf4", on_progress=lambda *each: seen.append(each))
    assert {what for what, _, _ in seen} == {"quantizing"}
    done, every = [at for _, at, _ in seen], {nbytes for _, _, nbytes in seen}
    assert done == sorted(done)
    assert every == {done[-1]}
    shutil.rmtree(out)
    assert main(["quantize", str(plain), str(out), "--as", "nf4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("quantizing ") == len(seen)
    assert said.out.startswith(f"{out}: 21 weights")
    model = AutoModelForCausalLM.from_pretrained(plain)
    peft.get_peft_model(model, peft.LoraConfig(r=2)).save_pretrained(tmp_path / "adapters")
    merge = ["export", str(tmp_path / "adapters"), str(tmp_path / "merged"), "--merge", "--base", str(plain)]
    assert main(merge) == 0
    *_, last = (line for line in capsys.readouterr().err.splitlines() if line.startswith("writing "))
    assert last.split()[1:3] == last.split()[4:6]  # all of all
