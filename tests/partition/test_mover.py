"""The mover with a disk and a pool of plain memory."""

import threading

import pytest
import torch
from torch import nn

from infinity.core.errors import DiskError, StateError
from infinity.core.lifecycle import Tier, UnitState
from infinity.core.nbytes import Transfer, rounded
from infinity.partition.mover import Staging, Stored, UnitMover
from infinity.partition.unit import Home, StoredForm, Unit, is_placeholder, layout, placeholder
from tests.helpers.fakes import FakeEngine, FakeLease, FakePool


class FakeShards:
    """Shards whose fetches end when the test says so."""

    def __init__(self) -> None:
        self.fetches: list[tuple[int, memoryview, Transfer]] = []
        self.residents: dict[int, FakeLease] = {}
        self.update = lambda: None
        self.unused = threading.Event()

    def wait_until_unused(self, unit):
        self.unused.set()

    def fetch(self, unit, memory, start=0):
        self.fetches.append((unit.index, memory, Transfer()))
        return self.fetches[-1][2]

    def arrive(self, value: float = 1.0, error: Exception | None = None) -> None:
        """The oldest fetch ends."""
        _, memory, ticket = self.fetches.pop(0)
        torch.frombuffer(memory, dtype=torch.bfloat16).fill_(value)
        ticket.finish(error)


class FakeHome(Home):
    """The home of a unit whose shard is one of those."""

    def __init__(self, shards: FakeShards, unit: Unit, tier: Tier = Tier.NVME) -> None:
        super().__init__(tier)
        self.shards, self.unit = shards, unit

    @property
    def lease(self) -> FakeLease | None:
        return self.shards.residents.get(self.unit.index)

    def fetch(self, memory: memoryview, start: int = 0) -> Transfer:
        return self.shards.fetch(self.unit, memory, start)

    def updated_in_place(self):
        return self.shards.update


def make_mover(units, shards, pool, staging=None, collectives=None, waits=lambda cause, wait: wait()):
    for unit in units:
        unit.move_to(FakeHome(shards, unit))
    return UnitMover(units, pool, staging, collectives, waits, shards.wait_until_unused)


def make_unit(index: int = 0) -> Unit:
    params = [(f"layers.{index}.{n}", nn.Parameter(torch.empty(s))) for n, s in (("w", (8, 8)), ("b", (8,)))]
    unit = Unit(index, layout(params), torch.bfloat16, 0, 1)
    unit.rename({})
    for s in unit.segments:
        s.param.data = placeholder(s.shape, unit.dtype, s.param.device)
    return unit


@pytest.fixture
def parts():
    units, shards, pool, causes = [make_unit(0), make_unit(1)], FakeShards(), FakePool(2**20), []

    def waits(cause, wait):
        causes.append(cause)
        wait()

    return make_mover(units, shards, pool, waits=waits), units, shards, pool, causes


def test_starting_waits_for_nothing_and_finishing_for_the_fetch(parts):
    mover, units, shards, pool, causes = parts
    mover.start(0)
    assert units[0].state is UnitState.FETCHING
    assert pool.leased_nbytes == units[0].nbytes
    assert all(is_placeholder(s.param.data) for s in units[0].segments)
    shards.arrive(3.0)
    mover.finish(0)
    assert units[0].state is UnitState.GATHERED
    assert all((s.param == 3).all() for s in units[0].segments)
    assert mover.attached == {units[0].flat.untyped_storage().data_ptr(): units[0]}
    assert causes == ["read"]


def test_the_shard_is_read_straight_into_the_flat_buffer(parts):
    mover, units, shards, _, _ = parts
    mover.start(0)
    address = torch.frombuffer(shards.fetches[0][1], dtype=torch.uint8).data_ptr()
    shards.arrive()
    mover.finish(0)
    assert units[0].flat.data_ptr() == address


def test_finishing_twice_is_finishing_once(parts):
    mover, _, shards, _, causes = parts
    mover.start(0)
    shards.arrive()
    mover.finish(0)
    mover.finish(0)
    assert causes == ["read"]


def test_a_release_gives_everything_back(parts):
    mover, units, shards, pool, _ = parts
    mover.start(0)
    shards.arrive()
    mover.finish(0)
    mover.release(0)
    assert units[0].state is UnitState.ON_NVME
    assert all(is_placeholder(s.param.data) for s in units[0].segments)
    assert (pool.leased_nbytes, mover.attached) == (0, {})
    mover.release(0)


def test_a_release_in_flight_waits_until_nobody_writes_into_the_buffer(parts):
    mover, units, shards, pool, _ = parts
    mover.start(0)
    shards.arrive()
    mover.release(0)
    assert units[0].state is UnitState.ON_NVME
    assert pool.leased_nbytes == 0


def test_what_is_taken_stays_leased_until_its_taker_gives_it_back(parts):
    mover, units, shards, pool, _ = parts
    mover.start(0)
    shards.arrive(2.0)
    mover.finish(0)
    lease = mover.take(0)
    assert units[0].flat is None
    assert pool.leased_nbytes == units[0].nbytes
    assert (lease.tensor.view(torch.bfloat16) == 2).all()
    lease.release()
    assert pool.leased_nbytes == 0


def test_a_shard_in_host_memory_is_copied_and_goes_back_home(parts):
    mover, units, shards, _, _ = parts
    units[0].move_to(FakeHome(shards, units[0], Tier.HOST))
    shards.residents[0] = FakePool(2**20).lease(units[0].shard_nbytes, who="a shard")
    shards.residents[0].tensor.view(torch.bfloat16).fill_(5)
    mover.start(0)
    assert units[0].state is UnitState.UPLOADING
    mover.finish(0)
    assert (units[0].segments[0].param == 5).all()
    mover.release(0)
    assert units[0].state is UnitState.ON_HOST


def test_an_error_of_the_disk_surfaces_at_finish(parts):
    mover, units, shards, _, _ = parts
    mover.start(0)
    shards.arrive(error=DiskError(5, "read", "/fake", offset=0, nbytes=1))
    with pytest.raises(DiskError):
        mover.finish(0)
    assert units[0].state is not UnitState.GATHERED


def test_a_unit_that_could_not_be_read_says_so_until_it_is_read_again(parts):
    mover, units, shards, pool, _ = parts
    mover.start(0)
    shards.arrive(error=DiskError(5, "read", "/fake", offset=0, nbytes=1))
    for _ in range(2):
        with pytest.raises(DiskError, match="/fake"):
            mover.finish(0)
    mover.release(0)
    assert pool.leased_nbytes == 0
    mover.start(0)
    shards.arrive()
    mover.finish(0)
    assert units[0].state is UnitState.GATHERED


@pytest.mark.parametrize("begin", ["start", "decode", "start_stored"])
@pytest.mark.parametrize("used", [False, True])
def test_a_unit_that_could_not_be_read_gives_all_back_and_is_read_again(parts, begin, used):
    mover, units, shards, pool, _ = parts
    if begin != "start":
        decoded_from_bytes(units[0])

    def start() -> None:
        mover.start(0) if begin == "start" else mover.start(Stored(0))
        if begin == "decode":
            mover.start(0)

    def release() -> None:
        for item in [*[0] * (begin != "start_stored"), *[Stored(0)] * (begin != "start")]:
            try:
                mover.release(item)
            except DiskError as error:
                errors.append(str(error))

    errors: list[str] = []
    start()
    shards.arrive(error=DiskError(5, "read", "/fake", offset=0, nbytes=1))
    if used and begin != "start_stored":
        with pytest.raises(DiskError, match="/fake"):
            mover.finish(0)
        errors.append("/fake")
    release()
    assert len(errors) == 1, "the error surfaces once"
    assert "/fake" in errors.pop()
    assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, 0)
    start()
    shards.arrive()
    if begin == "start_stored":
        mover.start(0)
        begin = "decode"
    mover.finish(0)
    assert units[0].state is UnitState.GATHERED
    release()
    assert not errors
    assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, 0)
    mover.close()


def test_a_tile_that_was_to_be_decoded_ahead_and_could_not_be_read_says_so_when_it_is_used(parts):
    mover, units, shards, pool, _ = parts
    decoded_from_bytes(units[0])
    mover.start(Stored(0))
    shards.arrive(error=DiskError(5, "read", "/fake", offset=0, nbytes=1))
    mover.start(0)
    with pytest.raises(DiskError, match="/fake"):
        mover.release(0)
    assert pool.leased_nbytes == units[0].stored.nbytes
    mover.start(0)
    with pytest.raises(DiskError, match="/fake"):
        mover.finish(0)
    mover.release(0)
    mover.release(Stored(0))
    assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, 0)
    mover.close()


def test_a_unit_is_not_started_twice(parts):
    mover, units, _, _, _ = parts
    mover.start(0)
    with pytest.raises(StateError, match="FETCHING -> FETCHING"):
        mover.start(0)
    assert units[1].state is UnitState.ON_NVME


def decoded_from_bytes(unit: Unit) -> list[int]:
    """Let a unit travel in a quarter of its bytes; return the sizes of what is decoded."""
    decoded = []

    def decode(stored, flat):
        decoded.append(stored.nbytes)
        flat.copy_(stored.view(torch.int8).repeat(flat.numel() // stored.numel()))

    unit.stored = StoredForm(unit.nbytes // 4, unit.nbytes // 4, 0, decode)
    return decoded


def test_what_is_stored_in_another_form_is_fetched_so_and_decoded_before_it_is_used(parts):
    mover, units, shards, pool, causes = parts
    decoded = decoded_from_bytes(units[0])
    mover.start(0)
    assert units[0].state is UnitState.FETCHING
    assert pool.leased_nbytes == units[0].nbytes + units[0].stored.nbytes
    _, memory, ticket = shards.fetches.pop()
    assert memory.nbytes == units[0].stored.shard_nbytes
    assert decoded == []
    torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    ticket.finish()
    mover.finish(0)
    assert (units[0].segments[0].param == 7).all()
    assert (decoded, causes) == ([units[0].stored.nbytes], ["read", "decode"])
    assert pool.leased_nbytes == units[0].nbytes
    mover.release(0)
    assert pool.leased_nbytes == 0
    mover.close()


def test_the_stored_form_in_host_memory_is_decoded_from_there(parts):
    mover, units, shards, pool, _ = parts
    decoded = decoded_from_bytes(units[0])
    units[0].move_to(FakeHome(shards, units[0], Tier.HOST))
    shards.residents[0] = FakePool(2**20).lease(units[0].stored.shard_nbytes, who="a shard")
    shards.residents[0].tensor.fill_(5)
    mover.start(0)
    assert pool.leased_nbytes == units[0].nbytes
    mover.finish(0)
    assert (units[0].segments[0].param == 5).all()
    mover.release(0)
    mover.start(0)
    mover.finish(0)
    assert len(decoded) == 2
    mover.release(0)
    assert units[0].state is UnitState.ON_HOST
    mover.close()


def test_an_error_of_the_disk_gives_the_stored_form_back(parts):
    mover, units, shards, pool, _ = parts
    decoded = decoded_from_bytes(units[0])
    mover.start(0)
    shards.fetches.pop()[2].finish(DiskError(5, "read", "/fake", offset=0, nbytes=1))
    with pytest.raises(DiskError):
        mover.finish(0)
    assert decoded == []
    assert pool.leased_nbytes == units[0].nbytes
    mover.close()


class ShardsOnDisk(FakeShards):
    """A shard whose pieces are read when they are asked for."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.engine, self.content = FakeEngine(), content

    def fetch(self, unit, memory, start=0):
        extent = self.engine.extent(memory.nbytes)
        self.engine.put(extent, self.content[start : start + memory.nbytes])
        return self.engine.read(extent, memory)


def test_a_shard_larger_than_host_memory_reaches_an_accelerator_in_pieces():
    weight = nn.Parameter(torch.empty(100, 1024))
    unit = Unit(0, layout([("experts", weight)]), torch.bfloat16, 0, 1)
    weight.data = placeholder(weight.shape, unit.dtype, weight.device)
    values = torch.randn(unit.numel).bfloat16()
    shards = ShardsOnDisk(bytes(values.view(torch.uint8).numpy()))
    device, host = FakePool(unit.nbytes), FakePool(unit.nbytes // 8)
    mover = make_mover([unit], shards, device, Staging(host, 8192))
    mover.start(0)
    mover.finish(0)
    assert torch.equal(weight.data.flatten(), values[: weight.numel()])
    assert host.peak_nbytes == 2 * 8192
    assert host.leased_nbytes == 0
    assert shards.engine.nbytes_read == unit.shard_nbytes
    mover.release(0)
    mover.close()
    shards.engine.close()


@pytest.fixture
def staged():
    """A unit of 2's beside an accelerator, as far as a machine without one has its threads."""
    unit = make_unit(0)
    values = torch.full((unit.numel,), 2.0, dtype=torch.bfloat16)
    shards = ShardsOnDisk(bytes(values.view(torch.uint8).numpy()))
    device, host = FakePool(unit.nbytes), FakePool(2 * unit.nbytes)
    mover = make_mover([unit], shards, device, Staging(host, 8192))
    yield mover, unit, shards, device, host
    mover.close()
    shards.engine.close()
    assert (device.leased_nbytes, host.leased_nbytes) == (0, 0)


def test_beside_an_accelerator_a_unit_that_stays_is_updated_in_host_memory_and_comes_back(staged):
    mover, unit, shards, device, host = staged
    mover.start(0)
    mover.finish(0)
    weights = mover.stay(0)()
    assert (weights == 2).all()
    assert (device.leased_nbytes, host.leased_nbytes) == (unit.nbytes, unit.nbytes)
    shards.update = lambda: weights.fill_(3)
    mover.start(0)
    mover.finish(0)
    assert (unit.segments[0].param == 3).all()
    assert host.leased_nbytes == 0
    mover.release(0)


def test_a_unit_that_stays_gives_all_back_when_it_is_released_after_its_update(staged):
    mover, unit, shards, device, host = staged
    mover.start(0)
    mover.finish(0)
    mover.stay(0)
    mover.release(0)
    assert shards.unused.is_set()
    assert (unit.state, device.leased_nbytes, host.leased_nbytes) == (UnitState.ON_NVME, 0, 0)


class FailedPeer:
    """Another rank that fails in each gather, and may write on."""

    def gather(self, index, name, bring, kept=None):
        failed = Transfer()
        failed.finish(ConnectionError("a peer"))
        return failed


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_memory_that_a_failed_peer_may_write_to_is_never_lent_again(stored, used):
    unit, pool = make_unit(0), FakePool(2**20)
    mover = make_mover([unit], FakeShards(), pool, collectives=FailedPeer())
    if stored:
        decoded_from_bytes(unit)
    mover.start(0)
    leased_nbytes = unit.nbytes + (unit.stored.nbytes if stored else 0)
    with pytest.raises(ConnectionError):
        (mover.finish if used else mover.release)(0)
    mover.release(0)
    assert (unit.state, pool.leased_nbytes) == (UnitState.ON_NVME, leased_nbytes)
    mover.close()


def test_beside_an_accelerator_a_shard_in_host_memory_is_uploaded_after_its_update(staged):
    mover, unit, shards, _, _ = staged
    unit.move_to(FakeHome(shards, unit, Tier.HOST))
    shard = shards.residents[0] = FakePool(2**20).lease(unit.shard_nbytes, who="a shard")
    shards.update = lambda: shard.tensor.view(torch.bfloat16).fill_(4)
    mover.start(0)
    mover.finish(0)
    assert (unit.segments[0].param == 4).all()
    mover.release(0)


def test_weights_that_are_kept_for_an_update_are_copied_out(staged):
    mover, unit, _, _, host = staged
    mover.start(0)
    mover.finish(0)
    full, shard = mover.take(0), host.lease(unit.shard_nbytes, who="weights")
    mover.copy_to_host(unit, full, shard)
    full.release()
    assert (shard.tensor.view(torch.bfloat16) == 2).all()
    shard.release()


def test_stored_bytes_that_came_first_are_decoded_as_often_as_they_are_used(parts):
    mover, units, shards, pool, causes = parts
    decoded = decoded_from_bytes(units[0])
    assert (mover.stored_nbytes(0), mover.stored_nbytes(1)) == (rounded(units[0].stored.nbytes), 0)
    mover.start(Stored(0))
    assert units[0].state is UnitState.FETCHING
    assert pool.leased_nbytes == units[0].stored.nbytes
    mover.start(0)
    _, memory, ticket = shards.fetches.pop()
    torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    ticket.finish()
    for times in (1, 2):
        mover.finish(0)
        assert (units[0].segments[0].param == 7).all()
        assert pool.leased_nbytes == units[0].nbytes + units[0].stored.nbytes
        mover.release(0)
        assert all(is_placeholder(s.param.data) for s in units[0].segments)
        assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, units[0].stored.nbytes)
        assert (len(decoded), shards.fetches) == (times, [])
        if times == 1:
            mover.start(0)
    mover.release(Stored(0))
    assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, 0)
    assert causes == 2 * ["read", "decode"]
    mover.close()


@pytest.mark.parametrize("decodes", [False, True])
def test_a_release_waits_for_stored_bytes_that_are_on_their_way(parts, decodes):
    mover, units, shards, pool, _ = parts
    decoded_from_bytes(units[0])
    mover.start(Stored(0))
    if decodes:
        mover.start(0)
    timer = threading.Timer(0.05, shards.arrive)
    timer.start()
    if decodes:
        mover.release(0)
    mover.release(Stored(0))
    assert shards.fetches == []
    assert (units[0].state, pool.leased_nbytes) == (UnitState.ON_NVME, 0)
    mover.close()


def test_stored_bytes_in_host_memory_stay_there(parts):
    mover, units, shards, pool, _ = parts
    decoded_from_bytes(units[0])
    units[0].move_to(FakeHome(shards, units[0], Tier.HOST))
    host = FakePool(2**20)
    shards.residents[0] = host.lease(units[0].stored.shard_nbytes, who="a shard")
    shards.residents[0].tensor.fill_(5)
    mover.start(Stored(0))
    assert pool.leased_nbytes == 0
    for _ in range(2):
        mover.start(0)
        mover.finish(0)
        assert (units[0].segments[0].param == 5).all()
        mover.release(0)
        assert units[0].state is UnitState.ON_HOST
    mover.release(Stored(0))
    assert host.leased_nbytes == units[0].stored.shard_nbytes
    assert (shards.residents[0].tensor == 5).all()
    mover.close()
