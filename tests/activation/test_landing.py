"""Memory that loads fill: lent once at a time, and again as soon as nobody looks at it."""

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.activation.landing import LEAST_NBYTES, Landings
from infinity.core.extent import aligned
from infinity.nvme.buffers import HostBuffer

MIB = 2**20


class Made:
    """Makes memory, and knows what was closed."""

    def __init__(self) -> None:
        self.made: list[HostBuffer] = []
        self.closed: list[HostBuffer] = []

    def __call__(self, nbytes: int) -> HostBuffer:
        buffer = HostBuffer(aligned(nbytes), pin=False)
        close = buffer.close
        buffer.close = lambda: (self.closed.append(buffer), close())  # type: ignore[method-assign]
        self.made.append(buffer)
        return buffer


def tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_memory_is_lent_again_when_the_last_view_of_it_is_gone():
    made = Made()
    landings = Landings(made)
    storage = landings.take(3 * MIB)
    address, view = storage.data_ptr(), tensor_on(storage)[5:9]
    del storage
    assert landings.take(3 * MIB).data_ptr() != address
    view.fill_(7)
    other = landings.take(3 * MIB)
    other.fill_(0)
    assert view.tolist() == [7] * 4
    del view
    assert landings.take(3 * MIB).data_ptr() == address
    assert len(made.made) == 2
    assert not made.closed


def test_small_loads_land_in_the_allocators_memory():
    made = Made()
    storage = Landings(made).take(LEAST_NBYTES - 1)
    assert storage.nbytes() == LEAST_NBYTES - 1
    assert not made.made


def test_memory_of_another_size_is_not_wasted_on_a_load():
    made = Made()
    landings = Landings(made)
    del_me = landings.take(16 * MIB)
    del del_me
    storage = landings.take(4 * MIB)
    assert storage.nbytes() == 4 * MIB
    assert len(made.made) == 2


def test_what_waits_for_a_load_is_bounded_and_the_oldest_goes_first():
    made = Made()
    landings = Landings(made, idle_nbytes=8 * MIB)
    lent = [landings.take(4 * MIB) for _ in range(4)]
    while lent:
        del lent[0]
    landings.take(64 * MIB)
    assert made.closed == made.made[:2]
    landings.clear()
    assert set(made.closed) == set(made.made)


def test_the_last_view_may_go_inside_the_lock():
    """The garbage collector may run anywhere."""
    landings = Landings(Made())
    ring: list = []
    ring += [landings.take(4 * MIB), ring]
    del ring
    with landings._lock:
        gc.collect()
    assert len(landings._returned) == 1


@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 9 * MIB)), max_size=30))
@settings(max_examples=25, deadline=None)
def test_nobody_ever_writes_into_what_is_lent(moves):
    landings, lent = Landings(Made(), idle_nbytes=8 * MIB), []
    for number, (takes, which, nbytes) in enumerate(moves):
        if takes or not lent:
            tensor = tensor_on(landings.take(nbytes))
            assert tensor.numel() >= nbytes
            tensor[:nbytes:4096] = number
            lent.append((number, tensor[:nbytes:4096]))
        else:
            del lent[which % len(lent)]
        for wrote, there in lent:
            assert bool((there == wrote).all())
