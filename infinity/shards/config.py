"""Settings of commits."""

from dataclasses import dataclass
from typing import Literal

from infinity.core.config import Valid, check, setting

#: Whether a run that was interrupted goes on.
Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True, kw_only=True)
class DurabilityConfig:
    """Commits of steps: what they survive, and how often one is recorded."""

    survives: Literal["process", "power"] = setting(
        "process",
        "what a committed step survives; process: any kill; power: a power cut, too, for a sync of the "
        "drives in every step",
        valid=Valid(choices=("process", "power")),
        numeric=False,
    )

    every: int | None = setting(
        None,
        "steps from one recorded commit to the next; null: 1 if all states live on NVMe, else as many as "
        "keep the cost of writing those in host memory below 3.5 % of the time",
        valid=Valid(least=1, most=10**9),
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)
