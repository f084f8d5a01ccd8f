"""Promises 4 and 6 for activations under ``Init``: typed errors on every rank, and no hang."""

import contextlib
import errno
import time
from pathlib import Path

import pytest

from infinity.activations import tensor_cache
from infinity.core.errors import DiskError, InfinityError, PeerError
from infinity.shards import storage
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.faulty import Fault, breakable
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import assert_bitwise, build, optimizer_for, reference, streaming, train

#: What ends sooner has not waited for ``partition.timeout_s`` (s).
SOON_S = 150


def broken_step(folder: str, on: str, guilty: bool) -> tuple[str, str, float]:
    """Train until this rank's, or another one's, disk fails: the error's class and text, and seconds."""
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tensor_cache.LEAST_NBYTES = 4096
    factory, batch = models.build("gpt", seed=0)
    began_s = time.monotonic()
    with breakable() as engines:
        settings = streaming(Path(folder), "memory.activations=offload", "partition.timeout_s=200")
        model = build(factory, "fp32", settings)
        optimizer = optimizer_for(model, Rule())
        try:
            with contextlib.closing(optimizer):
                for step in range(6):
                    if guilty and step == 2:
                        count = engines[0].writes if on == "write" else engines[0].reads
                        engines[0].faults = (
                            Fault(on=on, nth=count + 1, errno=errno.ENOSPC if on == "write" else errno.EIO),
                        )
                    model(**batch(step, rank, world)).loss.backward()
                    optimizer.step()
                optimizer.synchronize()
        except InfinityError as error:
            return type(error).__name__, str(error), time.monotonic() - began_s
    return "", "", time.monotonic() - began_s


@pytest.mark.parametrize("on", ["write", "read"])
def test_a_disk_error_ends_the_step_of_one_rank_with_its_path(tmp_path, on):
    kind, message, _ = broken_step(str(tmp_path), on, True)
    assert kind == DiskError.__name__
    assert "faulty.bin" in message
    assert not list(tmp_path.rglob("*.bin"))


def on_two_ranks(folder: str, on: str) -> tuple[str, str, float]:
    import torch.distributed as dist

    return broken_step(folder, on, dist.get_rank() == 1)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["write", "read"])
def test_a_disk_error_of_one_rank_ends_the_other_with_a_peer_error(tmp_path, on):
    other, guilty = run_ranks(on_two_ranks, 2, str(tmp_path), on)
    assert guilty[0] == DiskError.__name__, guilty
    assert other[0] == PeerError.__name__, other
    assert max(other[2], guilty[2]) < SOON_S


def stored_on_two_ranks(folder: str) -> tuple[list[float], int]:
    import torch.distributed as dist

    tensor_cache.LEAST_NBYTES = 512
    factory, batch = models.build("gpt", seed=0)
    settings = streaming(Path(folder), "memory.activations=offload")
    out = train(
        factory, batch, settings, dtype="fp32", steps=3, rank=dist.get_rank(), world=dist.get_world_size()
    )
    return out.losses, len(out.weights)


@pytest.mark.slow
def test_two_ranks_store_their_activations(tmp_path):
    def kept(folder: Path) -> list:
        return run_ranks(stored_on_two_ranks, 2, str(folder))

    first, second = kept(tmp_path / "a"), kept(tmp_path / "b")
    assert first == second


@pytest.mark.parametrize("policy", few(("offload",), ("offload", "recompute")))
def test_a_slow_disk_changes_no_bit(tmp_path, policy):
    factory, batch = models.build("gpt2", seed=3, dropout=0.1)
    with breakable() as engines:
        make = storage.make_engine

        def slow(*args):
            engine = make(*args)
            engine.delay_s = 0.002
            return engine

        storage.make_engine = slow
        ours = train(factory, batch, streaming(tmp_path, f"memory.activations={policy}"), steps=2)
    assert engines
    assert_bitwise(ours, reference(factory, batch, steps=2))
