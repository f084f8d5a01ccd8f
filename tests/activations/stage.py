"""A tensor cache on its own, with real files; and the same computation with it and without it."""

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.activations.controller import recomputable_blocks, tracked
from infinity.activations.profiler import storages_of
from infinity.activations.recompute import KeptOperators
from infinity.activations.store import DirectStore, StagedStore, open_stores
from infinity.activations.tensor_cache import (
    ActivationPolicy,
    PassRecord,
    Slot,
    TensorCache,
    uniform,
)
from infinity.core.plan import Place
from infinity.device.memory import HostPool
from infinity.nvme.engines import ThreadsEngine
from infinity.nvme.volume import Volume
from tests.helpers.faulty import FaultyEngine
from tests.helpers.limits import HANG_S, comes_true

CPU = torch.device("cpu")
STORE = uniform(Place.NVME)


class _All(dict[Any, int]):
    """Has anything, endlessly large."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> int:
        return 1 << 60


class KeepsAll(dict[int, KeptOperators]):
    """For each block: all of its operators' outputs stay, but for those that have to run again."""

    def get(self, region: int, default: object = None) -> KeptOperators:
        made = KeptOperators({})
        made.names, made.nbytes = _All(), _All()
        return made


def kept(place: Place) -> ActivationPolicy:
    """All blocks are recomputed, and nothing of them runs again; what stays is in ``place``."""
    return replace(uniform(place, recompute=True), kept=KeepsAll())


class Stage:
    """A cache, its files, and what counts what it holds.

    Args:
        folder: For the files.
        kind: ``direct``, ``disk`` (staged through host memory, in pieces) or ``host``.
    """

    def __init__(self, folder: Path, kind: str = "direct") -> None:
        self.volume = Volume([folder / "a.bin"])
        self.engine = FaultyEngine(ThreadsEngine(self.volume, threads=2))
        self.pool = HostPool(2**24)
        self.pool.patience_s = HANG_S
        if kind == "direct":
            made: Any = DirectStore(self.volume, self.engine)
        elif kind == "disk":
            made = StagedStore(CPU, self.pool, self.volume, self.engine, piece_nbytes=8192)
        else:
            made = StagedStore(CPU, self.pool)
        self.store = made
        self.records: list[PassRecord] = []  # of all passes
        stores = open_stores(CPU, self.pool, 8192, self.volume, self.engine)
        stores |= {Place.NVME: made, Place.HOST: made}
        self.cache = TensorCache(CPU, stores, lambda wait: wait())

    @contextmanager
    def forward(self, model: torch.nn.Module | None = None, policy: ActivationPolicy = STORE):
        """One recorded pass."""
        cache = self.cache
        if model is not None:
            cache.exempt = storages_of([*model.parameters(), *model.buffers()])
        cache.record = PassRecord(policy)
        self.records.append(cache.record)
        try:
            with (
                tracked(recomputable_blocks(model) if model is not None else [], cache),
                torch.autograd.graph.saved_tensors_hooks(cache.pack, cache.unpack),
            ):
                yield cache.record
        finally:
            cache.record = None

    def all_stored(self) -> None:
        """Return when everything has been stored."""
        self.cache.queue.wait_below(0)

    def assert_empty(self) -> None:
        """Nothing is left of any step; no garbage collection was needed."""
        self.cache.queue.drain()
        self.cache.stats.free_dropped()
        comes_true(lambda: not self.volume.allocated_nbytes + self.pool.leased_nbytes)  # loads without a wait
        assert self.cache.stats.resident_nbytes == 0
        assert self.volume.allocated_nbytes == 0
        assert self.pool.leased_nbytes == 0
        assert not any(len(record.slots) for record in self.records)

    def close(self) -> None:
        self.cache.close()
        self.engine.close()
        self.volume.close()
        self.pool.close()


def live_slots() -> set["weakref.ref[Slot]"]:
    """All slots of this process; some may be of tests before this one, and go at any moment."""
    return {weakref.ref(thing) for thing in gc.get_objects() if type(thing) is Slot}


def gradients(loss: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    """Of ``loss(*inputs)``, in plain PyTorch."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    loss(*leaves).backward()
    return [leaf.grad for leaf in leaves]


def cached_gradients(stage: Stage, loss: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    """The same, with everything stored before backward begins."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with stage.forward():
        value = loss(*leaves)
    stage.all_stored()
    value.backward()
    return [leaf.grad for leaf in leaves]


def assert_same(ours: list[Tensor | None], plain: list[Tensor | None]) -> None:
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert (mine is None) == (theirs is None), number
        if theirs is not None:
            assert torch.equal(mine, theirs), number


def assert_parity(stage: Stage, loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The same gradients to the bit, something was stored, and nothing is left."""
    stored = stage.cache.stats.nbytes_stored
    assert_same(cached_gradients(stage, loss, list(inputs)), gradients(loss, list(inputs)))
    assert stage.cache.stats.nbytes_stored > stored
    stage.assert_empty()
