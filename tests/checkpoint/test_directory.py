"""Files are checked before they are believed: an index names files beside it, a header what follows it."""

import json
import os
import shutil
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from infinity.checkpoint.directory import DTYPES, Checkpoint, TensorFile, read_json_object
from infinity.core.errors import CheckpointError
from tests.helpers.cases import examples

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
    assert open_files() <= before  # threads of other tests may end meanwhile


# --- safetensors files ---------------------------------------------------------------------


def write(path, header, data=b"", *, claim=None):
    """A file with ``header`` (an object, or raw bytes), whose length is given as ``claim``."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if claim is None else claim) + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused_file(path):
    with pytest.raises(CheckpointError) as raised:
        TensorFile(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


VALUES = {
    "float": torch.randn(3, 5),
    "half": torch.randn(7).half(),
    "brain": torch.randn(2, 2, 2).bfloat16(),
    "double": torch.randn(4).double(),
    "eighth": torch.randn(6).to(torch.float8_e4m3fn),
    "whole": torch.arange(5),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
}


def test_every_range_of_every_tensor_is_what_safetensors_reads(tmp_path):
    save_file(VALUES, tmp_path / "a.safetensors", metadata={"format": "pt"})
    plain = load_file(tmp_path / "a.safetensors")
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        assert file.tensors.keys() == plain.keys()
        for name, place in file.tensors.items():
            flat = plain[name].reshape(-1)
            assert (place.shape, place.dtype) == (plain[name].shape, plain[name].dtype)
            for start, stop in ((0, len(flat)), (1, len(flat)), (len(flat) // 2, len(flat))):
                same = torch.empty(max(0, stop - start), dtype=flat.dtype)
                cast = torch.empty(max(0, stop - start))
                place.fill(start, same)
                place.fill(start, cast)
                assert torch.equal(same.view(torch.uint8), flat[start:stop].contiguous().view(torch.uint8))
                assert torch.equal(cast, flat[start:stop].float())


def test_casts_are_made_in_pieces_and_bytes_are_counted(tmp_path):
    values = torch.randn(2**19 + 3).bfloat16()
    save_file({"x": values}, tmp_path / "a.safetensors")
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        out = torch.empty(2**19 + 1)
        file.tensors["x"].fill(1, out)
        assert torch.equal(out, values[1:-1].float())
        assert file.nbytes_read == 2 * len(out)


def test_symbolic_links_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "blobs" / "4f2a")
    (tmp_path / "a.safetensors").symlink_to("blobs/4f2a")
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        assert set(file.tensors) == {"x"}


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        ({"x": entry(offsets=(0, 8))}, b"", "not fully covered"),
        ({"x": entry(offsets=(0, 8))}, bytes(7), "not fully covered"),
        ({"x": entry(offsets=(0, 8))}, bytes(9), "not fully covered"),
        ({"x": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `x`"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `y`"),
        ({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20), "invalid offset for tensor `y`"),
        ({"x": entry(offsets=(0, 2**62))}, bytes(8), "invalid shape, data type, or offset"),
        ({"x": entry(shape=(2**62,), offsets=(0, 2**64))}, bytes(8), "invalid JSON"),
        ({"x": entry(shape=(2**61,), offsets=(0, 2**63 - 4))}, bytes(8), "overflow"),
        ({"x": entry(shape=(0, 2**63), offsets=(0, 0))}, b"", "Overflow"),
        ({"x": entry(shape=(0, 2**70), offsets=(0, 0))}, b"", "invalid JSON"),
        ({"x": entry(offsets=(8, 0))}, bytes(8), "invalid offset"),
        ({"x": entry(offsets=(-8, 0))}, bytes(8), "invalid JSON"),
        ({"x": entry(shape=(-2,))}, bytes(8), "invalid JSON"),
        ({"x": entry(shape=(True, 2))}, bytes(8), "invalid JSON"),
        ({"x": entry(shape=(2.0,))}, bytes(8), "invalid JSON"),
        ({"x": entry(dtype="F4", offsets=(0, 1))}, bytes(1), "known are"),
        ({"x": entry(dtype="F5")}, bytes(8), "unknown variant `F5`"),
        ({"x": entry(dtype=["F32"])}, bytes(8), "invalid JSON"),
        ({"x": 1}, b"", "invalid JSON"),
        ({"__metadata__": {"a": 1}}, b"", "invalid JSON"),
        ({"__metadata__": []}, b"", "invalid JSON"),
        ([], b"", "invalid JSON"),
        (b"", b"", "invalid JSON"),
        (b"{", b"", "invalid JSON"),
        (b"\xff\xfe{}", b"", "invalid UTF-8"),
        (b'{"x": NaN}', b"", "invalid JSON"),
        (b"[" * 100_000, b"", "invalid JSON"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused_and_named(tmp_path, header, data, what):
    assert what in refused_file(write(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("claim", [2**64 - 1, 2**40, 3])
def test_a_header_longer_than_the_file_is_refused_without_reading_it(tmp_path, claim):
    refused_file(write(tmp_path / "a.safetensors", b"{}", claim=claim))


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_a_file_without_room_for_a_header_is_refused_file(tmp_path, nbytes):
    (tmp_path / "a").write_bytes(bytes(nbytes))
    assert f"{nbytes} bytes" in refused_file(tmp_path / "a")


def test_what_is_not_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused_file(tmp_path / "pipe")
    assert "not a regular file" in refused_file(tmp_path)
    assert "No such file" in refused_file(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json_object(tmp_path / "pipe")


def test_a_file_that_was_cut_while_it_was_open_is_an_error_with_offset_and_bytes(tmp_path):
    save_file({"x": torch.ones(100)}, tmp_path / "a.safetensors")
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        os.truncate(tmp_path / "a.safetensors", file.tensors["x"].offset + 40)
        with pytest.raises(CheckpointError, match=r"wanted 400 bytes .* got 40"):
            file.tensors["x"].fill(0, torch.empty(100))


def test_short_reads_are_continued_and_errors_of_the_disk_are_told(tmp_path, monkeypatch):
    values = torch.randn(100)
    save_file({"x": values}, tmp_path / "a.safetensors")
    read = os.preadv
    with closing(TensorFile(tmp_path / "a.safetensors")) as file:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:13]], at))
        out = torch.empty(100)
        file.tensors["x"].fill(0, out)
        assert torch.equal(out, values)

        def broken(fd, buffers, at):
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            file.tensors["x"].fill(0, out)


def test_no_file_stays_open_after_a_refused_header(tmp_path):
    before = open_files()
    for _ in range(5):
        refused_file(write(tmp_path / "a", b"{"))
    assert open_files() <= before  # threads of other tests may end meanwhile


def test_safetensors_go_before_pickled_weights(sharded):
    (sharded / "pytorch_model.bin").write_bytes(b"never read")
    with Checkpoint(sharded) as checkpoint:
        assert len(checkpoint.files) > 1


def test_pickled_weights_are_not_opened(tmp_path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"never read")
    assert "holds pickled weights (pytorch_model-00001-of-00002.bin)" in refused(tmp_path)


# --- fuzz ----------------------------------------------------------------------------------

names = st.sampled_from([*FILES, "../secret.safetensors", "/tmp/x.safetensors", "none.safetensors", "secret"])
maps = st.dictionaries(st.sampled_from("abcdz"), names | st.text(max_size=12) | st.integers(), max_size=5)
indexes = st.fixed_dictionaries(
    {}, optional={"weight_map": maps | st.text(max_size=3), "metadata": st.integers()}
)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", ""]) | json_values,
        "shape": st.lists(st.integers(-1, 4) | st.integers(2**60, 2**70), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40) | st.integers(2**60, 2**70), max_size=3) | json_values,
    },
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4)
FUZZ = examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(path):
    """Opens and reads, or is refused: nothing else."""
    try:
        with closing(TensorFile(path)) as file:
            for place in file.tensors.values():
                place.fill(0, torch.empty(place.shape.numel(), dtype=place.dtype))
    except CheckpointError:
        pass


@FUZZ
@given(header=headers, data=st.binary(max_size=40))
def test_no_header_does_harm(tmp_path, header, data):
    survives(write(tmp_path / "fuzz", header, data))


@FUZZ
@given(raw=st.binary(max_size=60))
def test_no_bytes_do_harm(tmp_path, raw):
    (tmp_path / "fuzz").write_bytes(raw)
    survives(tmp_path / "fuzz")


@FUZZ
@given(at=st.integers(0, 300), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_no_damaged_byte_does_harm(tmp_path, at, byte, cut):
    save_file({"x": torch.ones(4), "y": torch.arange(3)}, tmp_path / "fuzz")
    raw = bytearray((tmp_path / "fuzz").read_bytes())
    raw[at % len(raw)] = byte
    (tmp_path / "fuzz").write_bytes(raw[: len(raw) - cut % len(raw)])
    survives(tmp_path / "fuzz")
