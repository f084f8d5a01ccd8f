"""Directories of torch.distributed.checkpoint are read by ranges, and nothing in them is believed."""

import dataclasses
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from infinity.checkpoint import distcp
from infinity.checkpoint.directory import ReadableFile
from infinity.checkpoint.distcp import DistributedCheckpoint
from infinity.core.errors import CheckpointError
from infinity.core.nbytes import Box
from tests.helpers.cases import examples


def save(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that this is one process
        dcp.save(state, checkpoint_id=path)
    return path


def read(checkpoint: DistributedCheckpoint, key: str, start: int = 0, stop: int | None = None) -> Tensor:
    stored = checkpoint[key]
    out = torch.empty((stored.shape.numel() if stop is None else stop) - start, dtype=stored.dtype)
    stored.fill(start, out)
    return out


def test_all_that_torch_saves_is_read(tmp_path: Path) -> None:
    state = {
        "matrix": torch.randn(7, 5), "bf16": torch.randn(3, 4).bfloat16(), "half": torch.randn(5).half(),
        "double": torch.randn(2, 2).double(), "scalar": torch.tensor(3), "bool": torch.tensor([True, False]),
        "transposed": torch.randn(6, 4).t(), "part": torch.randn(10, 10)[2:5, 1:8], "none": torch.empty(0, 3),
        "strided": torch.randn(9)[::2],
    }  # fmt: skip
    objects = {"number": 1.5, "pair": (1, "a"), "many": ["a", "b"], "nothing": None}
    with DistributedCheckpoint(save(tmp_path / "out", state | objects)) as checkpoint:
        assert set(checkpoint) == set(state)
        for key, value in state.items():
            assert (checkpoint[key].shape, checkpoint[key].dtype) == (value.shape, value.dtype)
            assert torch.equal(read(checkpoint, key), value.reshape(-1))
        assert {key: checkpoint.value(key) for key in checkpoint.objects} == objects


@pytest.mark.parametrize(("option", "value"), [("compute_crc32", False), ("storage_alignment", 4096)])
def test_options_of_torchs_writer_are_read(option: str, value: Any, tmp_path: Path) -> None:
    small = torch.ones(3, 4).to(torch.float8_e4m3fn)
    state = {"t": torch.randn(7, 5), "view": torch.randn(9, 4)[2:7].t(), "small": small}
    with config.patch({f"save.{option}": value}):
        path = save(tmp_path / "out", state | {"number": 1.5})
    with DistributedCheckpoint(path) as checkpoint:
        for key, tensor in state.items():
            assert torch.equal(read(checkpoint, key).float(), tensor.reshape(-1).float())
        assert checkpoint.value("number") == 1.5


# --- directories by hand -------------------------------------------------------------------------


def record(value: Any) -> bytes:
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def part_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))].clone()


def write(path: Path, tensors: dict[str, tuple[Tensor, list[Box]]], **objects: Any) -> Path:
    """Write tensors in these parts, and other values."""
    path.mkdir()
    metadata, storage, data = {}, {}, b""
    for key, (tensor, parts) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in parts]
        metadata[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
        for number, box in enumerate(parts):
            raw = record(part_of(tensor, box))
            storage[MetadataIndex(key, box.offsets, number)] = _StorageInfo("d.distcp", len(data), len(raw))
            data += raw
    for key, value in objects.items():
        metadata[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo("d.distcp", len(data), len(record(value)))
        data += record(value)
    (path / "d.distcp").write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(metadata, storage_data=storage)))
    return path


@st.composite
def _cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and a division of it into boxes by a grid."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size), max_size=2)) | {0, size})
        spans = list(pairwise(cuts))
        boxes = [Box((*b.offsets, a), (*b.sizes, z - a)) for b in boxes for a, z in spans]
    return shape, draw(st.permutations(boxes))


@examples(50)
@given(cut=_cut(), data=st.data())
def test_any_range_is_read_whatever_the_parts_are(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape, parts = cut
    tensor = torch.randn(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    path = write(tmp_path_factory.mktemp("cut") / "out", {"t": (tensor, parts)})
    with DistributedCheckpoint(path) as checkpoint:
        assert torch.equal(read(checkpoint, "t", start, stop), tensor.reshape(-1)[start:stop])
        wide = torch.empty(stop - start, dtype=torch.float64)
        checkpoint["t"].fill(start, wide)
        assert torch.equal(wide, tensor.reshape(-1)[start:stop].double())


def test_only_the_bytes_of_a_range_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ReadableFile] = []
    monkeypatch.setattr(distcp, "ReadableFile", lambda path: opened.append(ReadableFile(path)) or opened[-1])
    tensor = torch.randn(1000, 100)
    path = write(tmp_path / "out", {"t": (tensor, [Box((0, 0), (1000, 100))])})
    with DistributedCheckpoint(path) as checkpoint:
        read(checkpoint, "t", 50_000, 50_100)
        assert [file.nbytes_read for file in opened] == [400]


# --- hostile and damaged ones --------------------------------------------------------------------


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


WHOLE = [Box((0, 0), (4, 3))]


def good(path: Path) -> Path:
    return write(path / "out", {"t": (torch.randn(4, 3), WHOLE)}, number=1.5)


def edit(path: Path, change: Callable[[Metadata], Any]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def set_info(**fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, **fields)

    return change


def set_chunks(*boxes: Box) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["t"]
        entry.chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]
        [(_, info), *_] = metadata.storage_data.items()
        metadata.storage_data |= {MetadataIndex("t", b.offsets): info for b in boxes}

    return change


def set_entry(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["t"]).update(fields)


#: Whose text would have 2^60 numbers.
NESTED: Any = (1,)
for _ in range(60):
    NESTED = NESTED, NESTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "planner_data", Evil(Path("made"))), r"refused.*mkdir, which is no class"),
        (set_info(relative_path="../out/d.distcp"), "names the file '../out/d.distcp'; wanted one that lies"),
        (set_info(relative_path="/dev/zero"), "names the file '/dev/zero'"),
        (set_info(relative_path=".."), r"names the file '\.\.'"),
        (set_info(relative_path="absent"), "absent: No such file or directory"),
        (set_info(relative_path="pipe"), "pipe: not a regular file"),
        (set_info(relative_path=3), "is not as torch.distributed.checkpoint writes it"),
        (set_info(offset=10**9), "bytes; the metadata names .* at 1000000000. The checkpoint is damaged"),
        (set_info(offset=-1), "at -1"),
        (set_info(length=2**62), "names 4611686018427387904 bytes"),
        (set_info(length="1"), "names '1' bytes"),
        (set_info(transform_descriptors=["zip"]), "is compressed or encrypted: save without extensions"),
        (set_chunks(), "hold 0 of 12 elements"),
        (set_chunks(Box((0, 0), (3, 3))), "hold 9 of 12 elements"),
        (set_chunks(Box((1, 0), (4, 3))), r"outside its shape \(4, 3\)"),
        (set_chunks(Box((0,), (12,))), "another number of dimensions"),
        (set_entry(size=(4, -3)), "wanted sizes or offsets"),
        (set_entry(size=None), "has dtype"),
        (set_entry(size=NESTED), "wanted sizes or offsets"),
        (set_info(length=NESTED), "names .* bytes at"),
        (set_entry(chunks=None), "is not as torch.distributed.checkpoint writes it"),
        (set_entry(properties=3), "is not as torch.distributed.checkpoint writes it"),
        (lambda m: setattr(m, "storage_data", None), "is not as torch.distributed.checkpoint writes it"),
        (lambda m: m.storage_data.clear(), "is not as torch.distributed.checkpoint writes it"),
        (lambda m: setattr(m, "state_dict_metadata", []), "is not as torch.distributed.checkpoint writes it"),
    ],
)  # fmt: skip
def test_a_metadata_that_says_what_cannot_be_is_refused(
    change: Callable[[Metadata], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = good(tmp_path)
    os.mkfifo(path / "pipe")
    edit(path, change)
    with pytest.raises(CheckpointError, match=message):
        DistributedCheckpoint(path)
    assert {each.name for each in tmp_path.iterdir()} == {"out"}


def test_a_metadata_changes_no_class_that_it_names(tmp_path: Path) -> None:
    path = good(tmp_path)
    # pathlib.PosixPath, of which the attribute "unlink" is set to a type.
    build = b"cpathlib\nPosixPath\n(N(dS'unlink'\nctorch\nfloat32\nstb."
    (path / ".metadata").write_bytes(build)
    with pytest.raises(CheckpointError):
        DistributedCheckpoint(path)
    assert callable(Path.unlink)
    assert "unlink" not in vars(type(path))


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    for name in ("empty", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "text/.metadata").write_text("hello")
    for name, what in (("absent", "no such directory"), ("empty", r"no \.metadata"), ("text", "is refused")):
        with pytest.raises(CheckpointError, match=what):
            DistributedCheckpoint(tmp_path / name)


def repacked(raw: bytes, change: Callable[[str, bytes], bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    """A record with other members, at most as long as before."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", how) as new:
        for name in old.namelist():
            if not name.startswith("archive/.data"):
                new.writestr(name, change(name, old.read(name)))
    return out.getvalue()


def replaced(member: str, by: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, raw: by if name == f"archive/{member}" else raw


def pickled(value: Any) -> bytes:
    with zipfile.ZipFile(io.BytesIO(record(value))) as archive:
        return archive.read("archive/data.pkl")


T = torch.randn(4, 3)
SAME = b"\x80\x02)" + b"q\x01h\x01\x86" * 60 + b"."


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (repacked(record(T), replaced("data.pkl", pickle.dumps(Evil(Path("made")), 2))), "mkdir"),
        (repacked(record(T), replaced("data.pkl", pickle.dumps((1,), 2))), "it holds tuple"),
        (repacked(record(T), replaced("data.pkl", pickled(T.t().clone()))), r"of shape \(4, 3\)"),
        (repacked(record(T), replaced("data.pkl", pickled(T.double()))), "wanted torch.float32"),
        (repacked(record(T), replaced("byteorder", b"big")), "in the other order"),
        (record(torch.randn(40)[3:15].view(4, 3).t().contiguous().t())[:500], "damaged"),
        (repacked(record(T), replaced("data.pkl", SAME)), "it holds tuple, wanted torch.float32"),
        (record(T).replace(b"K\x04K\x03", b"K\x03K\x04", 1), r"of shape \(4, 3\)"),
        (b"x" * 3000, "is damaged: .*zip archive"),
        (b"", "is damaged"),
    ],
    ids=range(10),  # archives have the time in them
)  # fmt: skip
def test_a_record_that_is_not_what_the_metadata_says_is_refused(
    raw: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = good(tmp_path)
    (path / "d.distcp").write_bytes(raw)
    edit(path, set_info(offset=0, length=len(raw)))
    with DistributedCheckpoint(path) as checkpoint, pytest.raises(CheckpointError, match=message):
        read(checkpoint, "t")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("value", [Evil(Path("made")), Path, {"a": Evil(Path("made"))}])
def test_a_value_that_would_run_code_is_refused(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "out", {}, evil=value)
    with (
        DistributedCheckpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match="evil is no plain value"),
    ):
        checkpoint.value("evil")
    assert not (tmp_path / "made").exists()


def test_parts_that_overlap_are_noticed(tmp_path: Path) -> None:
    half = [Box((0, 0), (2, 3)), Box((1, 0), (2, 3))]
    path = write(tmp_path / "out", {"t": (T, half)})
    with (
        DistributedCheckpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match="t: its parts overlap, and leave elements out"),
    ):
        read(checkpoint, "t", 0, 6)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = good(tmp_path)
    with DistributedCheckpoint(path) as checkpoint:
        os.truncate(path / "d.distcp", 700)
        with pytest.raises(CheckpointError):
            read(checkpoint, "t")


@examples(100)
@given(data=st.data())
def test_bytes_that_were_changed_give_an_error_or_values_and_nothing_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = good(tmp_path_factory.mktemp("flip"))
    file = path / data.draw(st.sampled_from([".metadata", "d.distcp"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    try:
        with DistributedCheckpoint(path) as checkpoint:
            for key in checkpoint:
                if math.prod(checkpoint[key].shape) < 1000:
                    read(checkpoint, key)
            for key in checkpoint.objects:
                checkpoint.value(key)
    except CheckpointError:
        pass
