"""Loading shows bytes, speed and the time left: continuously in a bar, every ten seconds in plain lines."""

import io

from rich.console import Console

from infinity.observe.progress import LoadClock, ProgressDisplay

MIB = 2**20


class Clock:
    """A time that moves when it is told to."""

    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


def test_a_line_has_bytes_speed_and_the_time_left():
    clock = Clock()
    load = LoadClock(clock)
    assert load.describe(0, 100 * MIB) == "loading 0 B of 100 MiB"
    clock.now_s += 2
    assert load.describe(20 * MIB, 100 * MIB) == "loading 20 MiB of 100 MiB  10 MiB/s  8 s left"
    clock.now_s += 8
    assert load.describe(100 * MIB, 100 * MIB) == "loading 100 MiB of 100 MiB  10 MiB/s  0 s left"


def test_plain_lines_come_every_ten_seconds_and_at_the_end_of_a_long_load():
    clock = Clock()
    load = LoadClock(clock)
    due = []
    for second in range(26):
        clock.now_s = 50.0 + second
        if load.due(second, 25):
            due.append(second)
    assert due == [10, 20, 25]


def test_a_short_load_prints_no_plain_lines():
    clock = Clock()
    load = LoadClock(clock)
    assert not any(load.due(done, 4) for done in range(5))


def test_the_bar_shows_a_load():
    out = io.StringIO()
    display = ProgressDisplay(3, console=Console(file=out, force_terminal=True, width=100))
    display.loading(3 * MIB, 4 * MIB)
    display.close()
    assert "loading 3 MiB of 4 MiB" in out.getvalue()
