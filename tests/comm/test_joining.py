"""Ranks that torchrun starts again meet each other, not those of the start before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from infinity.comm.ranks import _store_of_this_start
from tests.helpers.limits import HANG_S

TIMEOUT = timedelta(seconds=HANG_S)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a launcher, which outlives the ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def start(world_size: int) -> list[PrefixStore]:
    with ThreadPoolExecutor(world_size) as ranks:
        joined = [ranks.submit(_store_of_this_start, rank, world_size, TIMEOUT) for rank in range(world_size)]
        return [each.result() for each in joined]


def test_each_start_has_keys_of_its_own(launcher: TCPStore) -> None:
    for number in ("first", "second"):
        stores = start(3)
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", number)
        assert [store.get("address") for store in stores] == [number.encode()] * 3


def test_a_rank_that_does_not_come_is_named(launcher: TCPStore) -> None:
    start(2)  # what rank 1 of the start before asked is still there
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come"):
        _store_of_this_start(0, 3, timedelta(seconds=1))
