"""Loading shows bytes, speed and the time left: continuously in a bar, every ten seconds in plain lines."""

import io

from rich.console import Console

from infinity.observe.metrics import ProgressDisplay

MIB = 2**20


class Clock:
    """A time that moves when it is told to."""

    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


def logged(total: int, *done: tuple[float, int]) -> list[str]:
    """Return the plain lines of a load of which so many bytes are there after so many seconds."""
    clock, out = Clock(), io.StringIO()
    display = ProgressDisplay(3, console=Console(file=out, width=200), clock=clock)
    for second, nbytes in done:
        clock.now_s = 50.0 + second
        display.progress("loading", nbytes, total)
    return out.getvalue().splitlines()


def test_a_line_has_bytes_speed_and_the_time_left():
    assert logged(100 * MIB, (0, 0), (10, 20 * MIB), (50, 100 * MIB)) == [
        "loading 20 MiB of 100 MiB  2 MiB/s  40 s left",
        "loading 100 MiB of 100 MiB  2 MiB/s  0 s left",
    ]


def test_plain_lines_come_every_ten_seconds_and_at_the_end_of_a_long_load():
    lines = logged(25 * MIB, *((second, second * MIB) for second in range(26)))
    assert [line.split()[1] for line in lines] == ["10", "20", "25"]


def test_a_short_load_prints_no_plain_lines():
    assert logged(4, *((done, done) for done in range(5))) == []


def test_what_follows_another_one_has_a_time_of_its_own():
    clock, out = Clock(), io.StringIO()
    display = ProgressDisplay(3, console=Console(file=out, width=200), clock=clock)
    for what, begins in (("quantizing", 50.0), ("loading", 90.0)):
        for second in (0, 20):
            clock.now_s = begins + second
            display.progress(what, second * MIB, 40 * MIB)
    assert out.getvalue().splitlines() == [
        f"{what} 20 MiB of 40 MiB  1 MiB/s  20 s left" for what in ("quantizing", "loading")
    ]


def test_the_bar_shows_a_load():
    out = io.StringIO()
    display = ProgressDisplay(3, console=Console(file=out, force_terminal=True, width=100))
    display.progress("loading", 3 * MIB, 4 * MIB)
    display.close()
    assert "loading 3 MiB of 4 MiB" in out.getvalue()
