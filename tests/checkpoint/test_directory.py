"""A directory's index names files beside it and nothing else; every key is in one of them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from infinity.checkpoint.directory import Checkpoint
from infinity.core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
#: Two files, one of three tensors and one of one.
FILES = {
    "model-00001-of-00002.safetensors": {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.randn(2).half(),
    },
    "model-00002-of-00002.safetensors": {"d": torch.randn(6)},
}
MAP = {key: name for name, tensors in FILES.items() for key in tensors}


@pytest.fixture
def sharded(tmp_path):
    for name, tensors in FILES.items():
        save_file(tensors, tmp_path / name)
    write_index(tmp_path, MAP)
    return tmp_path


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values(checkpoint):
    out = {}
    for key, stored in checkpoint.items():
        out[key] = torch.empty(stored.shape, dtype=stored.dtype)
        stored.fill(0, out[key].view(-1))
    return out


def refused(directory):
    with pytest.raises(CheckpointError) as raised:
        Checkpoint(directory)
    return str(raised.value)


def assert_holds(directory, tensors):
    with Checkpoint(directory) as checkpoint:
        found = values(checkpoint)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


def test_the_files_of_an_index_are_one_checkpoint(sharded):
    assert_holds(sharded, {key: value for tensors in FILES.values() for key, value in tensors.items()})


def test_one_file_is_a_checkpoint_and_goes_before_an_index(sharded):
    save_file({"x": torch.ones(2)}, sharded / "model.safetensors")
    assert_holds(sharded, {"x": torch.ones(2)})


def test_files_and_index_may_be_links_to_elsewhere(sharded, tmp_path_factory):
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert_holds(snapshot, {key: value for tensors in FILES.values() for key, value in tensors.items()})


def test_keys_that_the_index_forgot_count_as_transformers_counts_them(sharded):
    write_index(sharded, {key: name for key, name in MAP.items() if key != "b"})
    with Checkpoint(sharded) as checkpoint:
        assert set(checkpoint) == set(MAP)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", ".", "", "model.bin",
        "a\\model.safetensors", "model\0.safetensors", None, 3, ["model.safetensors"],
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_beside_the_index_is_refused_before_anything_is_opened(sharded, name, opened):
    write_index(sharded, MAP | {"e": name})
    assert "names the file" in refused(sharded)
    assert opened() == {sharded / INDEX}


@pytest.fixture
def opened(monkeypatch):
    """``opened()``: the files that were opened since it was asked last."""
    paths, real = [], os.open

    def spy(path, *args, **kwargs):
        paths.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)

    def take():
        taken = set(paths)
        paths.clear()
        return taken

    return take


def test_a_key_that_its_file_does_not_hold_is_an_error_that_names_it(sharded):
    write_index(sharded, MAP | {"lost": "model-00002-of-00002.safetensors"})
    assert "does not hold what" in (message := refused(sharded))
    assert "lost" in message


def test_a_key_in_two_files_is_an_error_that_names_it(sharded):
    save_file({"d": torch.randn(6), "a": torch.ones(1)}, sharded / "model-00002-of-00002.safetensors")
    assert "another file holds, too: a" in refused(sharded)


def test_a_missing_file_is_an_error_that_names_it(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: No such file" in refused(sharded)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": 1}']
)
def test_an_index_without_a_map_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refused(tmp_path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path):
    assert "model.safetensors.index.json" in refused(tmp_path)
    assert "not a directory" in refused(tmp_path / "none")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open_after_a_refusal_and_after_close(sharded):
    before = open_files()
    Checkpoint(sharded).close()
    write_index(sharded, MAP | {"lost": "model-00002-of-00002.safetensors"})
    refused(sharded)
    assert open_files() == before


# --- pickled weights -----------------------------------------------------------------------


def test_pickled_weights_are_read_with_the_restricted_unpickler(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(4), "turned": torch.randn(4, 3).t()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_holds(tmp_path, tensors)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.pickled


def test_pickled_weights_in_several_files(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-2.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_holds(tmp_path, {"a": torch.ones(2), "b": torch.zeros(3)})


def test_safetensors_go_before_pickled_weights(sharded):
    (sharded / "pytorch_model.bin").write_bytes(b"never read")
    with Checkpoint(sharded) as checkpoint:
        assert not checkpoint.pickled


class Hostile:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_pickled_weights_never_runs(tmp_path, zipped):
    trap = tmp_path / "trap"
    torch.save({"a": Hostile(trap)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "Convert it" in refused(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("content", [pickle.dumps({"a": 1}), b"", b"PK\x03\x04", b"\x80\x04."])
def test_what_torch_did_not_save_is_refused_with_advice(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert "Convert it" in refused(tmp_path)


def test_a_pickle_of_other_things_is_refused_with_advice(tmp_path):
    torch.save({"a": torch.ones(2), "step": 3}, tmp_path / "pytorch_model.bin")
    assert "not a dictionary of tensors" in refused(tmp_path)


# --- fuzz ----------------------------------------------------------------------------------

names = st.sampled_from([*FILES, "../secret.safetensors", "/tmp/x.safetensors", "none.safetensors", "secret"])
maps = st.dictionaries(st.sampled_from("abcdz"), names | st.text(max_size=12) | st.integers(), max_size=5)
indexes = st.fixed_dictionaries(
    {}, optional={"weight_map": maps | st.text(max_size=3), "metadata": st.integers()}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=indexes.map(json.dumps) | st.text(max_size=20))
def test_no_index_does_harm_or_opens_what_it_could_not_rightly_name(sharded, opened, index):
    save_file({"s": torch.ones(1)}, sharded.parent / "secret.safetensors")
    (sharded / INDEX).write_text(index)
    opened()
    try:
        with Checkpoint(sharded) as checkpoint:
            values(checkpoint)
    except CheckpointError:
        pass
    for path in opened():
        assert path.parent == sharded
        assert path.name == INDEX or path.suffix == ".safetensors"


def test_a_copy_without_its_links_says_which_file_is_missing(sharded, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    shutil.copy(sharded / INDEX, copy)
    (copy / "model-00001-of-00002.safetensors").symlink_to(copy / "gone")
    assert "model-00001-of-00002.safetensors" in refused(copy)
