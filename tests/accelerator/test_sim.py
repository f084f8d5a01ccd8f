"""The simulated accelerator itself: it finds the races of small programs, and none where there is none."""

import functools
import signal

import pytest
import torch
from torch import nn

from tests.accelerator import device
from tests.accelerator.device import host_register, host_unregister, simulator
from tests.accelerator.process import needs_simulator, simulated
from tests.accelerator.simulator import Schedule
from tests.helpers.launch import start_ranks

SCHEDULES: list[tuple[Schedule, int]] = [
    ("eager", 0),
    ("lazy", 0),
    ("random", 1),
    ("random", 2),
    ("random", 3),
]


def races_of(program, schedule: Schedule = "eager", seed: int = 0) -> list[str]:
    simulator.reset(schedule, seed)
    program()
    torch.accelerator.synchronize()
    return list(simulator.races)


# --- races ---------------------------------------------------------------------------------------


def a_kernel_reads_what_another_stream_writes(wait: bool) -> None:
    x = torch.zeros(100, device="sim")
    side = torch.Stream("sim")
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    if wait:
        torch.accelerator.current_stream().wait_stream(side)
    (y * 2).sum()


def a_copy_to_the_host_is_read_before_it_has_ended(wait: bool) -> None:
    x, here = torch.ones(100, device="sim"), torch.zeros(100).pin_memory()
    here.copy_(x, non_blocking=True)
    if wait:
        torch.accelerator.synchronize()
    simulator.host_access("the host", reads=[device.span(here)])


def a_pinned_buffer_is_filled_again_while_it_is_copied(wait: bool) -> None:
    here, there = torch.ones(100).pin_memory(), torch.zeros(100, device="sim")
    there.copy_(here, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    if wait:
        event.synchronize()
    simulator.host_access("a drive", writes=[device.span(here)])


def a_drive_still_writes_what_is_copied(wait: bool) -> None:
    here, there = torch.ones(100).pin_memory(), torch.zeros(100, device="sim")
    torch.accelerator.synchronize()
    reading = simulator.flight("a drive's read", writes=[device.span(here)])
    if wait:
        simulator.landed(reading)
    there.copy_(here, non_blocking=True)
    torch.accelerator.synchronize()
    simulator.landed(reading)


def a_tensor_is_freed_while_another_stream_reads_it(wait: bool) -> None:
    x = torch.zeros(100, device="sim")
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x + 1
    if wait:
        x.record_stream(side)
    del x
    torch.ones(100, device="sim")


def a_fresh_tensor_is_written_by_a_stream_that_does_not_wait_for_its_allocator(wait: bool) -> None:
    old = torch.zeros(100, device="sim")
    old + 1
    del old
    side, fresh = torch.Stream("sim"), torch.empty(100, device="sim")
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        fresh.fill_(1)


def an_event_that_was_recorded_too_early(wait: bool) -> None:
    x, side = torch.zeros(100, device="sim"), torch.Stream("sim")
    event = torch.accelerator.current_stream().record_event()
    x.add_(1)
    if wait:
        event.record()
    side.wait_event(event)
    with side:
        x.clone()


PROGRAMS = [
    a_kernel_reads_what_another_stream_writes, a_copy_to_the_host_is_read_before_it_has_ended,
    a_pinned_buffer_is_filled_again_while_it_is_copied, a_drive_still_writes_what_is_copied,
    a_tensor_is_freed_while_another_stream_reads_it,
    a_fresh_tensor_is_written_by_a_stream_that_does_not_wait_for_its_allocator,
    an_event_that_was_recorded_too_early,
]  # fmt: skip


@simulated
def test_a_missing_wait_is_a_race_under_every_schedule_and_the_wait_ends_it():
    for program in PROGRAMS:
        for schedule, seed in SCHEDULES:
            assert races_of(functools.partial(program, wait=False), schedule, seed), (
                program.__name__,
                schedule,
            )
            assert races_of(functools.partial(program, wait=True), schedule, seed) == [], (
                program.__name__,
                schedule,
            )


@simulated
def test_a_race_names_both_accesses_their_streams_and_places():
    [race] = races_of(lambda: a_pinned_buffer_is_filled_again_while_it_is_copied(wait=False))
    first, second = race.split("\n")
    assert first.startswith("host to device on stream 0 reads (accelerator/test_sim.py:")
    assert second.strip().startswith("and then a drive on the host writes (accelerator/test_sim.py:")
    assert "MainThread" in race


@simulated
def test_streams_of_two_devices_and_transitive_waits_are_followed():
    def program() -> None:
        x = torch.ones(100, device="sim:0")
        y = x.to("sim:1")  # orders both devices' current streams
        first, second = torch.Stream("sim:1"), torch.Stream("sim:1")
        first.wait_stream(torch.accelerator.current_stream("sim:1"))
        second.wait_stream(first)
        with second:
            y.add_(1)
        torch.accelerator.current_stream("sim:1").wait_stream(second)
        assert y.to("sim:0").sum().item() == 200

    for schedule, seed in SCHEDULES:
        assert races_of(program, schedule, seed) == []


@simulated
def test_threads_that_hand_over_by_events_do_not_race_and_without_them_do():
    from concurrent.futures import ThreadPoolExecutor

    def program(wait: bool) -> None:
        x = torch.zeros(100, device="sim")
        given = torch.accelerator.current_stream().record_event()
        stream = torch.Stream("sim")

        def work() -> torch.Event:
            with stream:
                if wait:
                    stream.wait_event(given)
                x.add_(1)
                return stream.record_event()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work).result()
        torch.accelerator.current_stream().wait_event(done)
        assert x.sum().item() == 100 or not wait

    for schedule, seed in SCHEDULES:
        assert races_of(lambda: program(True), schedule, seed) == []
        assert races_of(lambda: program(False), schedule, seed)


# --- schedules -----------------------------------------------------------------------------------


@simulated
def test_lazy_runs_nothing_before_somebody_waits_and_keeps_the_order_of_waits():
    simulator.reset("lazy")
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    x = torch.zeros(10, device="sim")
    event = main.record_event()
    with side:
        y = torch.full((10,), 2.0, device="sim")
    assert not event.query()  # asking makes progress
    assert event.query()
    assert not side.query()
    main.wait_stream(side)
    x.add_(y)
    assert x.sum().item() == 20


@simulated
def test_a_missing_wait_changes_numbers_under_lazy_and_not_under_eager():
    def numbers(schedule: Schedule) -> float:
        simulator.reset(schedule)
        here, there = torch.ones(100).pin_memory(), torch.zeros(100, device="sim")
        torch.accelerator.synchronize()
        there.copy_(here, non_blocking=True)
        here.fill_(7)
        return there.sum().item()

    assert numbers("eager") == 100
    assert numbers("lazy") == 700


@simulated
def test_an_operator_gives_the_cpus_bits_under_every_schedule():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    given = torch.randn(8, 16)
    plain(given).square().mean().backward()
    for schedule, seed in SCHEDULES:
        simulator.reset(schedule, seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        model.load_state_dict(plain.state_dict())
        model.to("sim")
        model(given.to("sim")).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(ours.grad.cpu(), theirs.grad), schedule
        assert simulator.races == []


@simulated
def test_random_numbers_are_drawn_in_the_order_of_calls_and_have_a_state():
    drawn = []
    for schedule, seed in SCHEDULES:
        simulator.reset(schedule, seed)
        torch.manual_seed(3)
        a = torch.randn(5, device="sim")
        state = torch.sim.get_rng_state()
        with torch.Stream("sim"):
            b = torch.rand(5, device="sim")
        torch.accelerator.synchronize()
        torch.sim.set_rng_state(state)
        assert torch.equal(torch.rand(5, device="sim").cpu(), b.cpu())
        own = torch.Generator(device="sim").manual_seed(9)
        c = torch.randn(5, device="sim", generator=own)
        d = nn.functional.dropout(torch.ones(64, device="sim"))
        drawn.append([t.tolist() for t in (a, b, c, d)])
    assert all(each == drawn[0] for each in drawn)
    assert len(set(map(str, drawn[0]))) == 4


# --- memory --------------------------------------------------------------------------------------


@simulated
def test_memory_is_reused_by_its_stream_at_once_and_by_others_never():
    simulator.reset("lazy")
    x = torch.empty(1000, device="sim")
    address = x.data_ptr()
    del x
    with torch.Stream("sim"):
        other = torch.empty(1000, device="sim")
    assert other.data_ptr() != address
    assert torch.empty(1000, device="sim").data_ptr() == address


@simulated
def test_a_recorded_block_waits_for_its_stream():
    simulator.reset("lazy")
    side = torch.Stream("sim")
    x = torch.zeros(1000, device="sim")
    address = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x + 1
    x.record_stream(side)
    del x
    assert torch.empty(1000, device="sim").data_ptr() != address
    side.synchronize()
    torch.zeros(1, device="sim")  # the allocator looks at its events
    assert torch.empty(1000, device="sim").data_ptr() == address
    assert simulator.races == []


@simulated
def test_fresh_memory_is_poisoned():
    for schedule, seed in SCHEDULES:
        simulator.reset(schedule, seed)
        assert torch.empty(100, device="sim").isnan().all().item()
        x = torch.ones(100, device="sim")
        del x
        assert torch.empty(100, device="sim").isnan().all().item()


@simulated
def test_memory_is_counted():
    begin = torch.accelerator.memory_allocated()
    free, total = torch.accelerator.get_memory_info()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == begin + (1 << 20)
    assert torch.accelerator.get_memory_info() == (free - (1 << 20), total)
    del x
    assert torch.accelerator.memory_allocated() == begin
    assert torch.accelerator.max_memory_allocated() == begin + (1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="device 0 has"):
        torch.empty(total + 1, dtype=torch.uint8, device="sim")


@simulated
def test_memory_that_waits_for_other_streams_is_waited_for_before_there_is_none():
    simulator.reset("lazy")
    side, most = torch.Stream("sim"), int(device.DEVICE_NBYTES * 0.6)
    for _ in range(3):
        x = torch.empty(most, dtype=torch.uint8, device="sim")
        x[:100].zero_()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x[:100] + 1
        x.record_stream(side)
        del x
    assert simulator.races == []


def touch_device_memory() -> None:
    import ctypes

    device.start()
    ctypes.memset(torch.zeros(10, device="sim").data_ptr(), 0, 1)


def test_the_host_cannot_touch_device_memory_and_the_fault_shows_where():
    needs_simulator()
    with start_ranks(touch_device_memory, 1, group=False) as ranks:
        [end] = ranks.wait()
    assert end.exit_code == -signal.SIGSEGV
    assert "in touch_device_memory" in end.traceback


@simulated
def test_host_memory_is_pinned_by_the_allocator_or_registered_as_with_cuda():
    assert torch.ones(3).pin_memory().is_pinned()
    x = torch.ones(5000)
    assert not x.is_pinned()
    assert host_register(x.data_ptr(), 4 * 5000) == 0
    assert x.is_pinned()
    assert host_register(x.data_ptr() + 100, 8) != 0  # already
    assert host_unregister(x.data_ptr()) == 0
    assert host_unregister(x.data_ptr()) != 0
    assert not x.is_pinned()


@simulated
def test_memory_that_is_unregistered_while_it_is_copied_is_told():
    for wait in (False, True):
        simulator.reset("lazy")
        x, there = torch.ones(5000), torch.zeros(5000, device="sim")
        assert torch.sim.host_register(x.data_ptr(), 4 * 5000) == 0
        there.copy_(x, non_blocking=True)
        if wait:
            torch.accelerator.synchronize()
        torch.sim.host_unregister(x.data_ptr())
        assert bool(simulator.early) is not wait
        torch.accelerator.synchronize()


# --- time, waits, threads --------------------------------------------------------------------------


@simulated
def test_events_have_times_in_the_order_of_their_streams():
    for schedule, seed in SCHEDULES:
        simulator.reset(schedule, seed)
        events = [torch.Event("sim", enable_timing=True) for _ in range(3)]
        x = torch.ones(256, 256, device="sim")
        events[0].record()
        y = x @ x
        events[1].record()
        side = torch.Stream("sim")
        side.wait_event(events[1])
        with side:
            y @ x
        events[2].record(side)
        torch.accelerator.synchronize()
        assert events[0].elapsed_time(events[1]) > 0
        assert events[1].elapsed_time(events[2]) > 0


@simulated
def test_waits_of_the_host_are_counted_by_place():
    simulator.reset("lazy")
    x = torch.ones(10, device="sim")
    torch.ones(10).pin_memory().to("sim", non_blocking=True)
    assert not simulator.waits
    x.sum().item()
    x.cpu()
    torch.ones(10).to("sim")
    torch.accelerator.current_stream().synchronize()
    [(wait, count)] = simulator.waits.items()
    assert (wait.place.split(" ")[0], wait.thread, count) == ("accelerator/test_sim.py", "MainThread", 4)


@simulated
def test_hooks_run_on_autograds_thread_and_its_kernels_on_the_streams_of_forward():
    import threading

    def program() -> None:
        x = torch.ones(10, device="sim", requires_grad=True)
        side = torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        streams, threads = [], []
        y.register_hook(lambda grad: streams.append(torch.accelerator.current_stream()))
        x.register_hook(lambda grad: threads.append(threading.get_ident()))
        torch.accelerator.current_stream().wait_stream(side)
        y.sum().backward()
        assert streams == [side]
        assert threads != [threading.get_ident()]
        assert x.grad.tolist() == [2.0] * 10

    for schedule, seed in SCHEDULES:
        assert races_of(program, schedule, seed) == []


@simulated
def test_autocast_computes_in_its_dtype():
    a, b = torch.ones(4, 4, device="sim"), torch.ones(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = a @ b
        assert product.dtype == torch.bfloat16
        assert torch.softmax(product, -1).dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert (a @ b).dtype == torch.float32
    assert (a @ b).dtype == torch.float32


@simulated
def test_mixed_devices_are_refused_as_cuda_refuses_them():
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.ones(3, device="sim") + torch.ones(3)
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")
    assert (torch.ones(3, device="sim") * torch.tensor(2.0)).sum().item() == 6


@simulated
def test_a_parameter_moves_to_the_device_as_with_cuda():
    param = nn.Parameter(torch.ones(3))
    param.data = torch.zeros(3, device="sim")
    assert param.device.type == "sim"
    assert nn.Linear(2, 2).to("sim").weight.device == torch.device("sim", 0)
