"""What ``infinity.from_pretrained`` accepts is what transformers accepts, and what does not fit is listed."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import infinity
from infinity.checkpoint.load import Converted
from infinity.core.errors import CheckpointError, InfinityError
from infinity.engine.runtime import runtime_of
from tests.helpers import zoo
from tests.helpers.cases import few
from tests.helpers.training import recipe, small_units, streaming


@pytest.fixture
def load(tmp_path):
    """``load(directory, ...)``: as :func:`infinity.from_pretrained`, on NVMe; closed at the end."""
    loaded = []

    def call(directory, *, dtype="fp32", **options):
        with small_units():
            model = infinity.from_pretrained(
                directory, recipe(dtype, streaming(tmp_path / "nvme")), **options
            )
        loaded.append(model)
        return model

    yield call
    for model in loaded:
        infinity.close(model)


def rewrite(directory, change):
    """Let ``change`` edit the checkpoint's tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(load, directory, **options):
    with pytest.raises(CheckpointError) as raised:
        load(directory, **options)
    return str(raised.value)


def assert_equal(ours, plain):
    """The same values under the same names, buffers that no file holds included."""
    weights = infinity.state_dict(ours)
    expected = plain.state_dict()
    assert weights.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(weights[key], expected[key])] == []
    mine, theirs = dict(ours.named_buffers()), dict(plain.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in theirs)


# --- what does not fit ---------------------------------------------------------------------


def test_every_missing_unknown_and_wrongly_shaped_key_is_listed_with_what_to_do(saved, load):
    directory, _, _ = saved("llama")

    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["surplus.weight"] = torch.ones(3)
        tensors["lm_head.weight"] = torch.ones(5, 32)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(80, 32, dtype=torch.int8)

    rewrite(directory, damage)
    message = refused(load, directory)
    for part in (
        "missing from the checkpoint (2):", "model.norm.weight", "model.layers.1.mlp.up_proj.weight",
        "unknown to the model (1):", "surplus.weight", "wrong (2):", "shape (5, 32), the model (97, 32)",
        "torch.int8, wanted floating point", "auto_class", "new=[...]", "ignore=[...]", "LlamaForCausalLM",
        str(directory),
    ):  # fmt: skip
        assert part in message, part


def test_of_very_many_unknown_keys_some_are_listed_and_the_others_counted(saved, load):
    directory, _, _ = saved("llama")
    rewrite(directory, lambda tensors: tensors.update({f"x.{i}": torch.ones(1) for i in range(60)}))
    message = refused(load, directory)
    assert message.count("\n  x.") == 50
    assert "unknown to the model (60):" in message
    assert "\n  ... and 10 more\n" in message


def test_a_refused_checkpoint_leaves_no_files_behind(saved, load, tmp_path):
    directory, _, _ = saved("llama")
    rewrite(directory, lambda tensors: tensors.pop("model.norm.weight"))
    refused(load, directory)
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []


def test_unknown_keys_may_be_left_out(saved, load):
    directory, plain, _ = saved("llama")
    expected = plain()
    rewrite(directory, lambda tensors: tensors.update({"extra.a": torch.ones(2), "extra.b": torch.ones(2)}))
    assert "unknown to the model (1):\n  extra.b" in refused(load, directory, ignore=["extra.a"])
    assert_equal(load(directory, ignore=["extra.*"]), expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "none_such"}, "none_such"),
        ({"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}, "config.json"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"num_attention_heads": "four"}, "config.json"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(saved, load, changes, what):
    directory, _, _ = saved("llama")
    (directory / "code.py").write_text("raise SystemExit('code of the checkpoint ran')")
    change_config(directory, **changes)
    assert what in refused(load, directory)


@pytest.mark.parametrize("content", [None, "", "[]", "{", "{}"])
def test_a_directory_without_a_config_is_refused(saved, load, content):
    directory, _, _ = saved("llama")
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_text(content)
    assert "config.json" in refused(load, directory)


def test_a_wrong_path_and_a_wrong_class_are_refused(saved, load, tmp_path):
    assert "No such file" in refused(load, tmp_path / "none")
    directory, _, _ = saved("vit")
    change_config(directory, architectures=None)
    assert "ViTConfig" in refused(load, directory)


# --- config and class ----------------------------------------------------------------------


def test_overrides_change_the_config_and_unknown_ones_are_refused(saved, load):
    directory, _, _ = saved("llama")
    model = load(directory, attn_implementation="eager", use_cache=True, dtype="bf16")
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache
    assert model.config.dtype == model.dtype == torch.bfloat16
    assert "LlamaConfig has no width" in refused(load, directory, width=3)


def test_the_class_is_the_configs_or_a_causal_model_or_the_callers(saved, load):
    directory, _, _ = saved("llama")
    assert type(load(directory)) is transformers.LlamaForCausalLM
    change_config(directory, architectures=None)
    assert type(load(directory)) is transformers.LlamaForCausalLM
    assert type(load(directory, auto_class=transformers.LlamaForCausalLM)) is transformers.LlamaForCausalLM
    base = load(directory, auto_class=transformers.AutoModel, ignore=["lm_head.weight"])
    assert type(base) is transformers.LlamaModel


def test_the_model_is_in_evaluation_mode_and_knows_its_generation_config(saved, load):
    directory, _, _ = saved("gpt2")
    settings = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(settings | {"top_k": 7, "do_sample": True}))
    model = load(directory)
    assert not model.training
    assert model.generation_config.top_k == 7
    assert model.name_or_path == str(directory)


def test_the_programs_default_dtype_and_random_numbers_are_left_alone(saved, load):
    directory, plain, _ = saved("llama")
    expected = plain()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load(directory)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(model, expected)


# --- keys as transformers understands them ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "body", "head"),
    [
        ("llama", transformers.LlamaModel, transformers.LlamaForCausalLM),
        ("bert", transformers.BertModel, transformers.BertForMaskedLM),
    ],
)
def test_a_base_model_loads_under_a_head_and_a_headed_model_as_its_base(
    saved, load, tmp_path, name, body, head
):
    directory, _, _ = saved(name)
    expected = body.from_pretrained(directory, dtype=torch.float32)
    absent = [key for key, _ in expected.named_parameters() if "pooler" in key]
    ours = load(directory, auto_class=body, new=absent, ignore=["lm_head.*", "cls.*"])
    weights = infinity.state_dict(ours)
    assert all(torch.equal(weights[k], v) for k, v in expected.state_dict().items() if k not in absent)
    expected.save_pretrained(tmp_path / "body")
    again = load(tmp_path / "body", auto_class=head, new=["lm_head.*", "cls.*"], ignore=["*pooler.*"])
    weights = infinity.state_dict(again)
    prefix = head.base_model_prefix
    shared = {f"{prefix}.{k}": v for k, v in expected.state_dict().items() if k not in absent}
    assert all(torch.equal(weights[k], v) for k, v in shared.items())


def test_a_tied_weight_is_read_under_any_of_its_names(saved, load):
    directory, plain, _ = saved("gpt2")
    expected = plain()

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    rewrite(directory, rename)
    model = load(directory)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_equal(model, expected)


def test_a_tied_weight_that_is_stored_twice_must_be_twice_the_same(saved, load):
    directory, plain, _ = saved("gpt2")
    expected = plain()
    rewrite(
        directory,
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}),
    )
    assert_equal(load(directory), expected)
    rewrite(directory, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1))
    assert "tie_word_embeddings=False" in refused(load, directory)
    untied = load(directory, tie_word_embeddings=False)
    weights = infinity.state_dict(untied)
    assert torch.equal(
        weights["lm_head.weight"], load_file(directory / "model.safetensors")["lm_head.weight"]
    )
    assert not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])


def test_tied_weights_take_no_second_place(saved, load):
    for name in ("t5", "gpt2", "qwen3"):
        directory, plain, _ = saved(name)
        model = load(directory)
        placed = sum(s.numel for unit in runtime_of(model).units for s in unit.segments)
        assert placed == sum(p.numel() for p in plain().parameters())


def test_keys_that_a_model_ignores_are_no_error(saved, load):
    directory, plain, _ = saved("llama")
    expected = plain()
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    rewrite(directory, lambda tensors: tensors.update(old))
    assert_equal(load(directory), expected)


def test_old_names_of_norms_are_understood(saved, load):
    directory, plain, _ = saved("bert")
    expected = plain()

    def age(tensors):
        for key in [key for key in tensors if "LayerNorm" in key]:
            old = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[old] = tensors.pop(key)

    rewrite(directory, age)
    assert_equal(load(directory), expected)


def test_experts_are_read_expert_by_expert_and_one_that_is_missing_is_named(saved, load):
    directory, plain, _ = saved("mixtral")
    stored = load_file(directory / "model.safetensors")
    assert any(".experts.3." in key for key in stored)
    assert_equal(load(directory), plain())
    lost = next(key for key in stored if "layers.1" in key and ".experts.3." in key)
    rewrite(directory, lambda tensors: tensors.pop(lost))
    assert "model.layers.1.mlp.experts" in refused(load, directory)


@pytest.mark.parametrize("name", few(("deepseek_v3",), ("mixtral", "qwen2_moe", "deepseek_v3")))
def test_what_cannot_be_traced_is_converted_whole_to_the_same_values(saved, load, monkeypatch, name):
    directory, plain, _ = saved(name)
    monkeypatch.setattr("infinity.checkpoint.load.MOST_PARTS", 1)
    filled, real = set(), Converted.fill
    monkeypatch.setattr(Converted, "fill", lambda self, *args: filled.add(self._name) or real(self, *args))
    assert_equal(load(directory), plain())
    assert any("experts.gate_up_proj" in converted for converted in filled)


def test_saving_knows_the_conversions_that_loading_used(saved, load):
    directory, plain, _ = saved("mixtral")
    model = load(directory)
    used = [repr(each) for each in plain()._weight_conversions]
    assert [repr(each) for each in model._weight_conversions] == used != []


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_pickled_weights_are_refused_with_the_line_that_converts_them(saved, load, name):
    directory, plain, _ = saved(name)
    expected = plain()
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model.bin\)") as refused:
        load(directory)
    exec(str(refused.value).partition("beside them: ")[2], {"DIR": str(directory)})  # what it says to do
    assert_equal(load(directory), expected)


# --- what the checkpoint lacks -----------------------------------------------------------------


@pytest.mark.parametrize("name", few(("bert", "mamba"), ("bert", "llama", "gpt2", "t5", "mamba")))
def test_a_new_head_is_drawn_as_transformers_draws_it(saved, load, tmp_path, name):
    directory, _, _ = saved(name)
    if name == "mamba":
        rewrite(directory, lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.1." in key])
        cls, new, ignore = transformers.MambaForCausalLM, ["*layers.1.*"], []
    else:
        cls = AutoModelForSequenceClassification
        new, ignore = (
            ["score.*", "classifier.*", "classification_head.*", "bert.pooler.*"],
            ["lm_head.*", "cls.*"],
        )
    torch.manual_seed(9)
    expected = cls.from_pretrained(directory, dtype=torch.float32)
    after = torch.get_rng_state()
    torch.manual_seed(9)
    model = load(directory, auto_class=cls, new=new, ignore=ignore)
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(model, expected)
    said = []
    runtime_of(model).say.attach(said.append)
    assert any("initialized, as the checkpoint lacks them" in line for line in said)


def test_a_head_of_another_size_is_new_when_the_caller_says_so(saved, load):
    directory, _, _ = saved("vit")
    assert "classifier.weight: the checkpoint has shape (4, 32), the model (9, 32)" in refused(
        load, directory, num_labels=9
    )
    torch.manual_seed(9)
    cls = transformers.ViTForImageClassification
    options = {"num_labels": 9, "ignore_mismatched_sizes": True}
    expected = cls.from_pretrained(directory, dtype=torch.float32, **options)
    torch.manual_seed(9)
    assert_equal(load(directory, num_labels=9, new=["classifier.*"]), expected)


def test_nothing_stays_hung_on_parameters_and_modules(saved, load):
    model = load(saved("llama")[0])
    assert not any("_is_hf_initialized" in vars(p) for p in model.parameters())
    assert not any("_is_hf_initialized" in vars(module) for module in model.modules())


# --- memory and progress -----------------------------------------------------------------------


def test_progress_ends_with_every_byte_of_the_checkpoint(saved, load):
    directory, _, _ = saved("llama", dtype=torch.bfloat16)
    seen = []
    load(directory, on_progress=lambda what, done, total: seen.append((done, total)))
    stored = load_file(directory / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) >= len(zoo.NAMES) // 2


def test_values_are_asked_for_once_and_never_more_than_a_chunk_at_a_time(saved, load, monkeypatch):
    directory, _, _ = saved("llama")
    from infinity.checkpoint.load import CheckpointValues

    ranges, real = [], CheckpointValues.master

    def spy(self, unit, start, stop):
        ranges.append((unit.index, start, stop))
        return real(self, unit, start, stop)

    monkeypatch.setattr(CheckpointValues, "master", spy)
    model = load(directory)
    runtime = runtime_of(model)
    assert max(stop - start for _, start, stop in ranges) <= runtime.storage.chunk_numel
    assert runtime.storage.host_pool.peak_nbytes <= runtime.storage.host_nbytes
    asked = sorted(ranges)
    for unit in runtime.units:
        mine = [(start, stop) for index, start, stop in asked if index == unit.index]
        assert [mine[0][0], *(stop for _, stop in mine)] == [*(start for start, _ in mine), unit.numel]


def test_a_model_with_tight_budgets_says_which(saved):
    directory, _, _ = saved("llama")
    with pytest.raises(infinity.BudgetError, match=r"memory\.host"):
        infinity.from_pretrained(directory, recipe("bf16", ["memory.host=4KiB"]))


@pytest.mark.parametrize("stored", few((torch.bfloat16,), (torch.float32, torch.bfloat16)))
def test_what_is_drawn_is_exact_beside_what_is_read(saved, tmp_path, stored):
    directory, plain, _ = saved("llama", dtype=stored)
    expected = plain().model.embed_tokens.weight
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    torch.manual_seed(9)
    drawn = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).lm_head.weight
    torch.manual_seed(9)
    with small_units():
        model = infinity.from_pretrained(
            directory, recipe("bf16", streaming(tmp_path / "nvme")), new=["lm_head.weight"]
        )
    optimizer = infinity.AdamW(model)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    masters = {id(p): optimizer.state_dict()["state"][i]["master"] for i, p in enumerate(order)}
    assert torch.equal(masters[id(model.lm_head.weight)], drawn.detach())
    assert torch.equal(masters[id(model.model.embed_tokens.weight)], expected.detach())
    optimizer.close()


def test_adapters_in_place_of_a_model_name_their_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    with pytest.raises(CheckpointError, match=r"adapters of the/base, not a model"):
        infinity.from_pretrained(tmp_path, recipe("bf16", []))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"new": "lm_head*"}, r"new: got 'lm_head\*'; wanted a list of patterns"),
        ({"ignore": [3]}, r"ignore: got \[3\]; wanted a list of patterns"),
        ({"path": 3}, "path '3': expected str, bytes or os.PathLike object, not int"),
        ({"frozen": True, "stored_as": ["nf4"]}, r"stored_as: got \['nf4'\]; wanted fp8, int8"),
    ],
)
def test_an_argument_of_another_type_is_named_with_what_was_wanted(saved, load, given, message):
    directory, _, _ = saved("llama")
    given = dict(given)
    with pytest.raises(InfinityError, match=message):
        load(given.pop("path", directory), **given)


@pytest.mark.parametrize("size", ["5GB", 0, True])
def test_the_size_of_a_file_is_a_count_of_bytes(saved, load, tmp_path, size):
    directory, _, _ = saved("llama")
    with pytest.raises(CheckpointError, match=f"max_shard_nbytes: got {size!r}; wanted a count of bytes"):
        infinity.export(load(directory), tmp_path / "out", max_shard_nbytes=size)
    assert not (tmp_path / "out").exists()
