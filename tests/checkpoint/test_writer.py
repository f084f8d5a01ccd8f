"""Files that are written piece by piece are what safetensors reads; errors of the drive are never silent."""

import errno
import os
import pickle
import re
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open

from infinity.checkpoint.writer import (
    OutputFile,
    RangeWriter,
    TensorSpec,
    WriteError,
    create_files,
    plan_file,
    plan_files,
)
from infinity.core.errors import CheckpointError, DiskError
from tests.helpers.cases import examples

#: Types whose values numpy and torch both compare; 8-bit floats are compared as bytes.
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip

keys = st.text(string.ascii_letters + string.digits + '._/"\\ äß日', min_size=1, max_size=20)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tensors = st.dictionaries(keys, st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=8)


def filled(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """Random bytes of the specs' types and shapes."""
    values = {}
    for spec in specs:
        raw = torch.randint(2 if spec.dtype is torch.bool else 256, (spec.nbytes,), dtype=torch.uint8)
        values[spec.key] = raw.view(spec.dtype).view(spec.shape)
    return values


def write(folder: Path, plan: Any, pieces: list[tuple[str, int, torch.Tensor]]) -> Path:
    """Write flat pieces: key, first element, values."""
    create_files(folder, [plan])
    file = OutputFile(folder / plan.name)
    try:
        with RangeWriter() as writer:
            for key, start, values in pieces:
                writer.write(file, plan.starts[key] + start * values.itemsize, values)
            writer.flush()
            assert writer.nbytes == plan.nbytes - len(plan.header)
    finally:
        file.close()
    return folder / plan.name


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_holds(path: Path, values: dict[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(values)
        assert file.metadata() == {"format": "pt"}
        for key, value in values.items():
            got = file.get_tensor(key)
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            assert torch.equal(raw(got), raw(value)), key


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensors, cuts=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_any_names_types_and_shapes_come_back_from_safetensors(
    tmp_path_factory: pytest.TempPathFactory, tensors: Any, cuts: int, seed: int
) -> None:
    torch.manual_seed(seed)
    specs = [TensorSpec(key, *what) for key, what in tensors.items()]
    values = filled(specs)
    pieces = []
    for key, value in values.items():
        flat = value.reshape(-1)
        bounds = [len(flat) * i // cuts for i in range(cuts + 1)]
        pieces += [(key, a, flat[a:b]) for a, b in pairwise(bounds)]
    order = torch.randperm(len(pieces)).tolist()
    folder = tmp_path_factory.mktemp("file")
    path = write(folder, plan_file("any.safetensors", specs), [pieces[i] for i in order])
    assert_holds(path, values)


@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through it"])
def test_runs_of_many_blocks_at_odd_places_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    sizes = [1, 4095, 4096, 4097, 12288, 17 * 2**20 + 4099, 8192]  # a write has up to 4 MiB
    specs = [TensorSpec(f"t{i}", torch.uint8, (n,)) for i, n in enumerate(sizes)]
    values = filled(specs)
    halves = [
        (key, at, part)
        for key, value in values.items()
        for at, part in ((0, value[: len(value) // 3]), (len(value) // 3, value[len(value) // 3 :]))
    ]
    assert_holds(write(tmp_path, plan_file("f.safetensors", specs), halves), values)
    backwards = tmp_path / "backwards"
    backwards.mkdir()
    assert_holds(write(backwards, plan_file("f.safetensors", specs), halves[::-1]), values)


def test_values_may_be_overwritten_as_soon_as_they_were_handed_over(tmp_path: Path) -> None:
    spec = TensorSpec("t", torch.int32, (5000,))
    plan = plan_file("f.safetensors", [spec])
    create_files(tmp_path, [plan])
    file = OutputFile(tmp_path / plan.name)
    with RangeWriter() as writer:
        values = torch.empty(1000, dtype=torch.int32)
        for i in range(5):
            values.fill_(i)
            writer.write(file, plan.starts["t"] + 4000 * i, values)
        writer.flush()
    file.close()
    assert_holds(tmp_path / plan.name, {"t": torch.arange(5).repeat_interleave(1000).int()})


def test_every_tensor_begins_on_a_multiple_of_its_items_size() -> None:
    specs = [TensorSpec("a", torch.int8, (3,)), TensorSpec("b", torch.float64, (1,)),
             TensorSpec("c", torch.bfloat16, (5,)), TensorSpec("d", torch.float32, (1,))]  # fmt: skip
    plan = plan_file("f", specs)
    assert all(plan.starts[spec.key] % spec.dtype.itemsize == 0 for spec in specs)
    assert sorted(plan.starts, key=plan.starts.__getitem__) == ["b", "d", "c", "a"]


def test_files_keep_to_the_size_asked_for_and_a_larger_tensor_has_one_to_itself() -> None:
    sizes = [30, 30, 50, 200, 10, 90, 1]
    specs = [TensorSpec(f"t{i}", torch.uint8, (n,)) for i, n in enumerate(sizes)]
    files = plan_files(specs, 100)
    assert [list(file.starts) for file in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"], ["t6"]]
    assert files[0].name == "model-00001-of-00005.safetensors"
    assert files[-1].name == "model-00005-of-00005.safetensors"
    [one] = plan_files(specs, 10**6)
    assert one.name == "model.safetensors"


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ([TensorSpec("t", torch.int8, (1,)), TensorSpec("t", torch.int8, (1,))], "t: two tensors"),
        ([TensorSpec("__metadata__", torch.int8, (1,))], "__metadata__: two tensors"),
        ([TensorSpec("t", torch.complex128, (1,))], "safetensors cannot hold torch.complex128"),
    ],
)
def test_what_the_format_cannot_hold_is_an_error_of_the_plan(specs: list[TensorSpec], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        plan_file("f", specs)


def test_a_write_that_fails_surfaces_at_check_and_flush_with_place_and_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_file("f.safetensors", [TensorSpec("t", torch.uint8, (40_000,))])
    create_files(tmp_path, [plan])
    file = OutputFile(tmp_path / plan.name)
    real, calls = os.pwrite, []

    def full(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data[: max(1, len(data) // 2)], offset)  # and short before

    monkeypatch.setattr(os, "pwrite", full)
    with RangeWriter() as writer:
        writer.write(file, plan.starts["t"], torch.zeros(40_000, dtype=torch.uint8))
        with pytest.raises(DiskError, match=r"No space left on device \(ENOSPC\); \d+ bytes free") as raised:
            writer.flush()
        with pytest.raises(WriteError):
            writer.check()
        before = len(calls)
        writer.write(file, plan.starts["t"], torch.zeros(40_000, dtype=torch.uint8))
        assert len(calls) <= before + 3  # what was on its way; the rest is dropped
    file.close()
    error = raised.value
    assert (error.errno, error.path) == (errno.ENOSPC, str(tmp_path / "f.safetensors"))
    assert error.nbytes > 0
    again = pickle.loads(pickle.dumps(error))
    texts = [re.sub(r"\d+ bytes free", "", str(each)) for each in (again, error)]  # another process may write
    assert (type(again), texts[0], again.offset) == (WriteError, texts[1], error.offset)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 4096 // 2 * 4096)], at)
    )
    specs = [TensorSpec("t", torch.uint8, (100_003,))]
    values = filled(specs)
    flat = [("t", 0, values["t"])]
    assert_holds(write(tmp_path, plan_file("f.safetensors", specs), flat), values)


def test_a_file_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    plan = plan_file("f.safetensors", [TensorSpec("t", torch.uint8, (1,))])
    with pytest.raises(DiskError, match="No such file"):
        create_files(tmp_path / "none", [plan])
    with pytest.raises(DiskError, match="No such file"):
        OutputFile(tmp_path / "f.safetensors")
