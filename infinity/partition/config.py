"""Settings of the partition over ranks."""

from dataclasses import dataclass
from typing import Literal

from infinity.core.config import Valid, check, setting


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Collectives between ranks."""

    reduce_dtype: Literal["fp32", "compute"] = setting(
        "fp32",
        "dtype in which gradients are summed over ranks; compute: half the bytes, more rounding",
        valid=Valid(choices=("fp32", "compute")),
    )
    leaf: tuple[str, ...] = setting(
        (),
        "classes gathered as one: ranks may use different parts of them; lists of experts are found",
        numeric=False,
    )
    timeout_s: float = setting(
        300.0,
        "a rank that is silent for this long ends the run (s)",
        valid=Valid(least=0.1, most=10**7),
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)
