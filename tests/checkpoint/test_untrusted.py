"""A checkpoint chooses neither code nor the network, and no sizes that no model has."""

import json
import os
import socket

import pytest
import torch
import transformers
from transformers import modeling_utils
from transformers.integrations import hub_kernels

import infinity
from infinity.checkpoint.model import check_counts, offline, read_config, restrict
from infinity.core.errors import CheckpointError
from tests.helpers import zoo
from tests.helpers.training import recipe

KERNEL = "kernels-community/x"


@pytest.fixture
def reached(monkeypatch):
    """What was asked of the network, and of the hub's kernels, which are installed here."""
    asked = []

    def refuse(*args, **_):
        asked.append(args)
        raise OSError("nothing is to be reached")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", refuse, raising=False)
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    return asked


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory of a tiny model, and what its config.json says."""
    directory = tmp_path_factory.mktemp("llama")
    zoo.build("llama", 3)[0]().save_pretrained(directory)
    return directory, json.loads((directory / "config.json").read_text())


def load(llama, changes, **options):
    """Load the model with another config.json, and give it back."""
    directory, usual = llama
    (directory / "config.json").write_text(json.dumps(usual | changes))
    model = infinity.from_pretrained(directory, recipe("fp32", ["memory.host=1MiB"]), **options)
    infinity.close(model)
    return model


def refused(llama, changes, **options):
    with pytest.raises(CheckpointError) as raised:
        load(llama, changes, **options)
    return str(raised.value)


# --- code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named",
    [
        {"attn_implementation": KERNEL}, {"_attn_implementation": KERNEL},
        {"attn_implementation": {"": KERNEL}}, {"attn_implementation": f"{KERNEL}@main:function"},
        {"attn_implementation": f"paged|{KERNEL}"}, {"attn_implementation": [KERNEL]},
        {"attn_implementation": "flash_attention_2"}, {"attn_implementation": "flash_attention_3"},
        {"experts_implementation": KERNEL}, {"experts_implementation": "sonicmoe"},
        {"_experts_implementation": "deepgemm"},
    ],
)  # fmt: skip
def test_a_kernel_of_the_hub_is_refused_before_it_is_looked_for(llama, reached, named):
    message = refused(llama, named)
    assert "config.json" in message
    assert "known are eager" in message
    assert not reached


def test_the_kernel_would_be_looked_for_without_us(llama, reached):
    directory, usual = llama
    (directory / "config.json").write_text(json.dumps(usual | {"attn_implementation": KERNEL}))
    with pytest.raises(Exception, match="nothing is to be reached"):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    assert reached == [(KERNEL,)]


LLAVA = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model"},
}  # fmt: skip


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_configs_inside_a_config_name_no_kernels_either(tmp_path, reached, key, part):
    (tmp_path / "config.json").write_text(json.dumps(LLAVA | {part: LLAVA[part] | {key: KERNEL}}))
    inside = getattr(read_config(tmp_path), part)  # transformers lets the outer config's stand for all
    assert (inside._attn_implementation, inside._experts_implementation) == (None, None)
    (tmp_path / "config.json").write_text(json.dumps(LLAVA | {key: {part: KERNEL}}))
    with pytest.raises(CheckpointError, match=r"config.json: (attn|experts)_implementation is .*kernels-"):
        read_config(tmp_path)
    assert not reached


def test_a_config_in_any_place_of_a_config_names_no_kernels(tmp_path):
    config = transformers.LlamaConfig()
    config.parts = [{"deep": transformers.LlamaConfig(attn_implementation=KERNEL, auto_map={})}]
    with pytest.raises(CheckpointError, match=KERNEL):
        restrict(config, tmp_path)
    config.parts[0]["deep"]._attn_implementation = "eager"
    restrict(config, tmp_path)
    assert not hasattr(config.parts[0]["deep"], "auto_map")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_torch_and_transformers_have_may_be_named(llama, reached, attention):
    assert load(llama, {"attn_implementation": attention}).config._attn_implementation == attention
    named = load(llama, {"attn_implementation": KERNEL}, attn_implementation=attention)
    assert named.config._attn_implementation == attention
    assert not reached


def test_an_attention_that_the_program_registered_may_be_named(llama, reached, monkeypatch):
    mine = transformers.AttentionInterface()["sdpa"]
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "mine", mine)
    assert load(llama, {}, attn_implementation="mine").config._attn_implementation == "mine"


@pytest.mark.parametrize("where", ["evil", "evil/repository--evil"])
@pytest.mark.parametrize("others", [{}, {"trust_remote_code": True}])
def test_code_beside_the_weights_never_runs(llama, reached, where, others):
    trap = llama[0] / "trap"
    (llama[0] / "evil.py").write_text(f"open({str(trap)!r}, 'w')")
    auto_map = {"auto_map": {"AutoConfig": f"{where}.C", "AutoModelForCausalLM": f"{where}.M"}}
    model = load(llama, auto_map | others)  # transformers has a class of its own
    assert not hasattr(model.config, "auto_map")
    assert "auto_map), which infinity does not run" in refused(llama, auto_map | {"model_type": "theirs"})
    assert not trap.exists()
    assert not reached


def test_a_generation_config_brings_no_code(llama, reached):
    given = {"custom_generate": "evil/repository", "trust_remote_code": True}
    (llama[0] / "generation_config.json").write_text(json.dumps(given))
    try:
        load(llama, {})
    finally:
        (llama[0] / "generation_config.json").unlink()
    assert not reached


def test_models_that_ask_for_a_kernel_by_themselves_get_none_while_they_are_built(reached):
    with offline(), pytest.raises(ImportError, match="which infinity does not load"):
        hub_kernels.get_kernel("kernels-community/yoso", version=1)
    assert not reached
    with pytest.raises(OSError, match="nothing is to be reached"):
        hub_kernels.get_kernel("kernels-community/yoso", version=1)


def test_the_hub_is_off_inside_and_as_it_was_afterwards(reached, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with offline():
        with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
            huggingface_hub.HfApi().model_info("some/model")
        with offline():
            pass
        assert huggingface_hub.is_offline_mode()
    assert not reached
    assert not huggingface_hub.is_offline_mode()


# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
def test_a_count_that_no_model_has_is_refused_before_a_config_is_made(llama, key):
    assert f"{key} is 1000000000; wanted at most" in refused(llama, {key: 10**9})
    assert f"{key} is 1000000000" in refused(llama, {"text_config": {"model_type": "llama", key: 10**9}})


def test_sizes_that_are_no_counts_may_be_large(tmp_path):
    usual = {"vocab_size_per_layer_input": 262_144, "max_position_embeddings": 10**7, "rope_theta": 10**9}
    check_counts(usual, tmp_path)
    with pytest.raises(CheckpointError, match=r"depths is 1000001"):
        check_counts({"backbone_config": {"depths": [2, 1_000_001]}}, tmp_path)


# --- files that are none -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "socket"])
def test_what_is_no_file_is_refused_at_once(tmp_path, llama, name, kind):
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(llama[1]))
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    with pytest.raises(CheckpointError, match=rf"{name}.*(not a regular file|No such device)"):
        infinity.from_pretrained(tmp_path, recipe("fp32", ["memory.host=1MiB"]))


def test_values_stay_what_they_were(llama):
    """The checks read a config and change nothing else of it."""
    directory, usual = llama
    (directory / "config.json").write_text(json.dumps(usual))
    assert read_config(directory).to_dict() == transformers.AutoConfig.from_pretrained(directory).to_dict()
    assert torch.get_default_dtype() is torch.float32
