"""The update rule's numbers."""

from dataclasses import dataclass
from typing import Literal

from infinity.core.config import Valid, check, setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and its loss scale."""

    lr: float = setting(3e-4, "peak learning rate", valid=Valid(least=0, most=10**6))
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the first and second moment", valid=Valid(least=0, below=1)
    )
    eps: float = setting(1e-8, "added to the root of the second moment", valid=Valid(least=1e-30, most=1))
    weight_decay: float = setting(0.1, "decoupled weight decay", valid=Valid(least=0, most=10**6))
    max_grad_norm: float | None = setting(
        1.0, "clip the global gradient norm to this; null: never clip", valid=Valid(least=1e-30, most=1e30)
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant",
        "learning rate after warm-up, until train.steps",
        valid=Valid(choices=("constant", "cosine", "linear")),
    )
    warmup_steps: int = setting(0, "steps in which the rate rises from 0", valid=Valid(least=0, most=10**9))
    min_lr_ratio: float = setting(
        0.1, "where cosine and linear end, as a share of lr", valid=Valid(least=0, most=1)
    )
    loss_scale: float = setting(
        2.0**16, "first loss scale of fp16 training; it then adapts", valid=Valid(least=1, most=2**32)
    )

    def __post_init__(self) -> None:
        check(self)
