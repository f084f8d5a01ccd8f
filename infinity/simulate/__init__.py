"""Plays a plan on a clock. No torch."""

from infinity.simulate.player import bounded, play, play_in_detail
from infinity.simulate.timeline import Interval, Sample, Timeline

__all__ = ["Interval", "Sample", "Timeline", "bounded", "play", "play_in_detail"]
