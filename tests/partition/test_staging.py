"""Shards that are larger than the memory they go through."""

import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import DiskError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece, Transfer
from infinity.partition.mover import Staging
from tests.helpers.cases import examples
from tests.helpers.fakes import FakeEngine, FakePool

B = BLOCK_NBYTES


class Shard:
    """A shard on a fake disk, and where it is uploaded to."""

    def __init__(self, engine: FakeEngine, blocks: int) -> None:
        self.engine, self.nbytes = engine, blocks * B
        self.extent = engine.extent(self.nbytes)
        self.content = random.Random(blocks).randbytes(self.nbytes)
        engine.put(self.extent, self.content)
        self.out = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.uploads: list[int] = []

    def fetch(self, memory, start):
        [piece] = self.extent.pieces
        part = Extent((Piece(piece.file, piece.offset + start, memory.nbytes),))
        return self.engine.read(part, memory)

    def upload(self, piece, start):
        self.uploads.append(len(piece))
        self.out[start : start + len(piece)] = piece

    def arrived(self) -> bool:
        return bytes(self.out.numpy()) == self.content


@examples(30)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12))
def test_every_byte_arrives_once_within_the_pool(blocks, piece, room):
    engine, pool = FakeEngine(), FakePool(max(room, piece) * B)
    shard = Shard(engine, blocks)
    Staging(pool, piece * B).bring(shard.nbytes, "a shard", shard.fetch, shard.upload)()
    assert shard.arrived()
    assert engine.nbytes_read == shard.nbytes
    assert pool.leased_nbytes == 0
    assert pool.peak_nbytes <= min(2 * piece, max(room, piece)) * B
    assert shard.uploads == [min(piece, blocks - at) * B for at in range(0, blocks, piece)]
    engine.close()


def test_the_next_piece_is_read_while_one_is_uploaded():
    engine, pool = FakeEngine(), FakePool(4 * B)
    shard, seen = Shard(engine, 6), []

    def upload(piece, start):
        seen.append(engine.log[-1][2] - shard.extent.pieces[0].offset > start)
        shard.upload(piece, start)

    Staging(pool, 2 * B).bring(shard.nbytes, "a shard", shard.fetch, upload)()
    assert seen == [True, True, False]
    engine.close()


def test_a_shard_that_found_no_buffer_is_not_overtaken_into_a_circle():
    engine, pool = FakeEngine(), FakePool(2 * B)
    other = pool.lease(B, who="an update")
    staging, shards = Staging(pool, 2 * B), [Shard(engine, 2), Shard(engine, 1), Shard(engine, 1)]
    ready = [staging.bring(s.nbytes, "a shard", s.fetch, s.upload) for s in shards]
    assert pool.leased_nbytes == B  # the second would fit, but the first could not follow then
    threading.Timer(0.1, other.release).start()
    for each in ready:
        each()
    assert all(shard.arrived() for shard in shards)
    later = Shard(engine, 2)
    bring = staging.bring(later.nbytes, "a shard", later.fetch, later.upload)
    assert pool.leased_nbytes == 2 * B  # again ahead of its turn
    bring()
    engine.close()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_read_that_fails_surfaces_and_leaves_no_buffer_behind(number):
    engine, pool = FakeEngine(fail_read=number), FakePool(4 * B)
    shard = Shard(engine, 6)
    with pytest.raises(DiskError):
        Staging(pool, 2 * B).bring(shard.nbytes, "a shard", shard.fetch, shard.upload)()
    assert pool.leased_nbytes == 0
    engine.close()


def test_a_failed_upload_waits_for_the_read_beside_it():
    engine, pool = FakeEngine(), FakePool(4 * B)
    shard = Shard(engine, 6)
    engine.hold(lambda action, number: number == 1)

    def upload(piece, start):
        threading.Timer(0.05, engine.let_go).start()
        raise RuntimeError("the accelerator is gone")

    with pytest.raises(RuntimeError, match="the accelerator is gone"):
        Staging(pool, 2 * B).bring(shard.nbytes, "a shard", shard.fetch, upload)()
    assert engine.in_flight == 0
    assert pool.leased_nbytes == 0
    engine.close()


def test_an_upload_that_waits_for_its_update_lets_others_go_first_and_has_its_turn_among_them():
    staging, updated, gate, went = Staging(FakePool(B), B), Transfer(), threading.Event(), list[int]()
    first = staging.upload(lambda: went.append(0), updated)
    staging.upload(lambda: went.append(1))()
    held = staging.upload(gate.wait)
    last = staging.upload(lambda: went.append(2))
    updated.finish()
    gate.set()
    for wait in (held, first, last):
        wait()
    staging.uploads.close()
    assert went == [1, 0, 2]
