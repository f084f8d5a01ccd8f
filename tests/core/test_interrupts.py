"""Signals in a section: each is held back to its end, none is lost."""

import signal
from collections.abc import Iterator

import pytest

from infinity.core.process import uninterrupted


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Signals whose handlers were called; that of SIGINT raises."""
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    before, found = [signal.getsignal(number) for number in numbers], list[int]()

    def note(number: int, _: object) -> None:
        found.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, note)
    yield found
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_two_signals_in_a_section_are_both_handled_at_its_end(came: list[int]) -> None:
    def section() -> None:
        with uninterrupted, uninterrupted:
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            assert came == []

    with pytest.raises(KeyboardInterrupt):
        section()
    assert came == [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
    with uninterrupted:
        pass
    assert len(came) == 3


def test_a_signal_outside_a_section_is_handled_at_once(came: list[int]) -> None:
    with uninterrupted:
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIGINT]
