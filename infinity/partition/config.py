"""Settings of the partition over ranks."""

from dataclasses import dataclass
from typing import Literal

from infinity.core.config import SettingError, Valid, check, setting
from infinity.core.nbytes import parse_nbytes


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
    tile: str = setting(
        "auto",
        "gather weights of experts, linear layers and embeddings in tiles; auto: where memory.device cannot "
        "hold them whole; never; or a size such as 64MiB: all that are larger, in tiles of that size",
    )
    timeout_s: float = setting(
        300.0,
        "a rank that is silent for this long ends the run (s)",
        valid=Valid(least=0.1, most=10**7),
        numeric=False,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.tile not in ("auto", "never"):
            try:
                valid = self.tile_nbytes > 0
            except ValueError:
                valid = False
            if not valid:
                raise SettingError("tile", self.tile, "auto, never, or a size such as 64MiB")

    @property
    def tile_nbytes(self) -> int:
        """The size of ``tile``, where it is one."""
        return parse_nbytes(self.tile)
