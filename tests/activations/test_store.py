"""Stores: every byte there and back at the same place of a block, and all room given back."""

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.activations.store import DirectStore, copying, directly_moved_nbytes
from infinity.core.errors import DiskError
from infinity.core.nbytes import BLOCK_NBYTES
from tests.activations.stage import Stage
from tests.helpers.cases import examples
from tests.helpers.faulty import Fault
from tests.helpers.limits import comes_true


@given(nbytes=st.one_of(st.integers(1, 40_000), st.integers(-2, 2).map(lambda n: 4 * BLOCK_NBYTES + n)))
@examples(30)
def test_every_size_comes_back_to_the_byte_at_the_same_place_of_a_block(tmp_path_factory, nbytes):
    stage = Stage(tmp_path_factory.mktemp("store"))
    try:
        tensor = torch.randint(256, (nbytes,), dtype=torch.uint8)
        stored = stage.store.reserve(tensor.untyped_storage(), "test")
        stored.store(tensor.untyped_storage()).wait()
        loading = stored.load()
        loading.transfer.wait()
        back = torch.empty(0, dtype=torch.uint8).set_(loading.storage)[loading.offset_nbytes :][:nbytes]
        assert torch.equal(back, tensor)
        assert back.data_ptr() % BLOCK_NBYTES == tensor.data_ptr() % BLOCK_NBYTES
        stored.free()
        stored.free()
        assert comes_true(lambda: stage.volume.allocated_nbytes == 0)  # when the load's thread is done, too
    finally:
        stage.close()


@pytest.mark.parametrize("nbytes", [3 * BLOCK_NBYTES, 3 * BLOCK_NBYTES + 100, 100])
def test_as_many_bytes_move_wherever_a_tensor_lies(tmp_path, nbytes):
    """An allocator gives other addresses in each step, and a plan's bytes are exact."""
    stage, memory = Stage(tmp_path), mmap.mmap(-1, 8 * BLOCK_NBYTES)
    for offset in (0, 64, BLOCK_NBYTES // 2, BLOCK_NBYTES - 64):
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).fill_(offset % 251)
        stored = stage.store.reserve(tensor.untyped_storage(), "test")
        assert stage.volume.allocated_nbytes == directly_moved_nbytes(nbytes)
        stored.store(tensor.untyped_storage()).wait()
        loading = stored.load()
        loading.transfer.wait()
        back = torch.empty(0, dtype=torch.uint8).set_(loading.storage)[loading.offset_nbytes :][:nbytes]
        assert torch.equal(back, tensor)
        stored.free()
    stage.close()


@pytest.mark.parametrize("nbytes", [1, 8191, 8192, 8193, 3 * 8192, 40_001])
@pytest.mark.parametrize("kind", ["disk", "host"])
def test_staged_in_pieces(tmp_path, kind, nbytes):
    stage = Stage(tmp_path, kind)
    tensor = torch.randint(256, (nbytes,), dtype=torch.uint8)
    stored = stage.store.reserve(tensor.untyped_storage(), "test")
    stored.store(tensor.untyped_storage()).wait()
    loading = stored.load()
    loading.transfer.wait()
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(loading.storage), tensor)
    assert stage.pool.peak_nbytes < 8192 * 8 + nbytes * (kind == "host")
    stored.free()
    stage.assert_empty()
    stage.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("on", ["write", "read"])
def test_a_piece_that_fails_gives_back_every_lease(tmp_path, on, nth):
    stage = Stage(tmp_path, "disk")
    stage.engine.faults = (Fault(on=on, nth=nth),)
    tensor = torch.randint(256, (40_001,), dtype=torch.uint8)
    stored = stage.store.reserve(tensor.untyped_storage(), "test")
    if on == "read":
        stored.store(tensor.untyped_storage()).wait()
    with pytest.raises(DiskError):
        (stored.load().transfer if on == "read" else stored.store(tensor.untyped_storage())).wait()
    stored.free()
    stage.assert_empty()
    stage.close()


def test_room_is_given_back_only_when_nothing_is_in_flight(stage):
    stage.engine.hold()
    tensor = torch.zeros(40_000, dtype=torch.uint8)
    stored = stage.store.reserve(tensor.untyped_storage(), "test")
    transfer = stored.store(tensor.untyped_storage())
    stored.free()
    assert stage.volume.allocated_nbytes > 0
    stage.engine.let_go()
    transfer.wait()
    stage.engine.close()
    assert stage.volume.allocated_nbytes == 0


def test_direct_stores_close_nothing_of_others(stage):
    DirectStore(stage.volume, stage.engine).close()
    stage.volume.free(stage.volume.allocate(BLOCK_NBYTES, what="still open"))


def test_a_device_that_fails_ends_the_copies_that_wait_for_it(tmp_path, monkeypatch):
    def fail(device):
        raise RuntimeError("the device")

    stage = Stage(tmp_path, "host")
    stored = stage.store.reserve(torch.empty(5000, dtype=torch.uint8).untyped_storage(), "test")
    monkeypatch.setattr("infinity.device.accelerator.record", fail)
    for transfer in copying(stage.store.threads[0], lambda: None, None, torch.device("cpu")):
        assert comes_true(transfer.done)
        with pytest.raises(RuntimeError, match="the device"):
            transfer.wait()
    stored.free()
    stage.close()
