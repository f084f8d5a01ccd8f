"""Nothing in a safetensors header is believed before it was checked."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from infinity.checkpoint import tensor_file
from infinity.checkpoint.tensor_file import DTYPES, TensorFile, read_json_object
from infinity.core.errors import CheckpointError


def write(path, header, data=b"", *, claim=None):
    """A file with ``header`` (an object, or raw bytes), whose length is given as ``claim``."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if claim is None else claim) + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path):
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
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.entries.keys() == plain.keys()
        for name, place in file.entries.items():
            flat = plain[name].reshape(-1)
            assert (place.shape, place.dtype) == (plain[name].shape, plain[name].dtype)
            for start, stop in ((0, len(flat)), (1, len(flat)), (len(flat) // 2, len(flat))):
                same = torch.empty(max(0, stop - start), dtype=flat.dtype)
                cast = torch.empty(max(0, stop - start))
                file.fill(place, start, same)
                file.fill(place, start, cast)
                assert torch.equal(same.view(torch.uint8), flat[start:stop].contiguous().view(torch.uint8))
                assert torch.equal(cast, flat[start:stop].float())


def test_casts_are_made_in_pieces_and_bytes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_PIECE_NUMEL", 3)
    values = torch.randn(10).bfloat16()
    save_file({"x": values}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        out = torch.empty(8)
        file.fill(file.entries["x"], 1, out)
        assert torch.equal(out, values[1:9].float())
        assert file.nbytes_read == 16


def test_symbolic_links_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "blobs" / "4f2a")
    (tmp_path / "a.safetensors").symlink_to("blobs/4f2a")
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert set(file.entries) == {"x"}


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        ({"x": entry(offsets=(0, 8))}, b"", "cut off"),
        ({"x": entry(offsets=(0, 8))}, bytes(7), "cut off"),
        ({"x": entry(offsets=(0, 8))}, bytes(9), "nothing may follow"),
        ({"x": entry(offsets=(4, 12))}, bytes(12), "gap"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
        ({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20), "gap"),
        ({"x": entry(offsets=(0, 2**62))}, bytes(8), "takes 8 bytes"),
        ({"x": entry(shape=(2**62,), offsets=(0, 2**64))}, bytes(8), "not a begin and an end"),
        ({"x": entry(shape=(2**61,), offsets=(0, 2**63 - 4))}, bytes(8), "takes"),
        ({"x": entry(shape=(0, 2**70), offsets=(0, 0))}, b"", "not a list of sizes"),
        ({"x": entry(shape=(1,) * 1000)}, bytes(8), "not a list of sizes"),
        ({"x": entry(offsets=(8, 0))}, bytes(8), "not a begin and an end"),
        ({"x": entry(offsets=(-8, 0))}, bytes(8), "not a begin and an end"),
        ({"x": entry(shape=(-2,))}, bytes(8), "not a list of sizes"),
        ({"x": entry(shape=(True, 2))}, bytes(8), "not a list of sizes"),
        ({"x": entry(shape=(2.0,))}, bytes(8), "not a list of sizes"),
        ({"x": entry(dtype="F4")}, bytes(8), "known are"),
        ({"x": entry(dtype=["F32"])}, bytes(8), "known are"),
        ({"x": entry() | {"extra": 1}}, bytes(8), "wanted dtype, shape and data_offsets"),
        ({"x": 1}, b"", "wanted dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ({"__metadata__": []}, b"", "__metadata__"),
        ([], b"", "not a JSON object"),
        (b"", b"", "not a JSON object"),
        (b"{", b"", "not a JSON object"),
        (b"\xff\xfe{}", b"", "not a JSON object"),
        (b'{"x": NaN}', b"", "not a JSON object"),
        (b"[" * 100_000, b"", "not a JSON object"),
        (b'{"x": {}, "x": {}}', b"", "twice"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused_and_named(tmp_path, header, data, what):
    assert what in refused(write(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("claim", [2**64 - 1, 2**40, 3])
def test_a_header_longer_than_the_file_is_refused_without_reading_it(tmp_path, claim):
    refused(write(tmp_path / "a.safetensors", b"{}", claim=claim))


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_a_file_without_room_for_a_header_is_refused(tmp_path, nbytes):
    (tmp_path / "a").write_bytes(bytes(nbytes))
    assert f"{nbytes} bytes" in refused(tmp_path / "a")


def test_what_is_not_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json_object(tmp_path / "pipe")


def test_a_file_that_was_cut_while_it_was_open_is_an_error_with_offset_and_bytes(tmp_path):
    save_file({"x": torch.ones(100)}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        os.truncate(tmp_path / "a.safetensors", file.entries["x"].offset + 40)
        with pytest.raises(CheckpointError, match=r"wanted 400 bytes .* got 40"):
            file.fill(file.entries["x"], 0, torch.empty(100))


def test_short_reads_are_continued_and_errors_of_the_disk_are_told(tmp_path, monkeypatch):
    values = torch.randn(100)
    save_file({"x": values}, tmp_path / "a.safetensors")
    read = os.preadv
    with TensorFile(tmp_path / "a.safetensors") as file:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:13]], at))
        out = torch.empty(100)
        file.fill(file.entries["x"], 0, out)
        assert torch.equal(out, values)

        def broken(fd, buffers, at):
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            file.fill(file.entries["x"], 0, out)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open_after_a_refusal(tmp_path):
    before = open_files()
    for _ in range(5):
        refused(write(tmp_path / "a", b"{"))
    assert open_files() == before


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
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(path):
    """Opens and reads, or is refused: nothing else."""
    try:
        with TensorFile(path) as file:
            for place in file.entries.values():
                file.fill(place, 0, torch.empty(place.shape.numel(), dtype=place.dtype))
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
