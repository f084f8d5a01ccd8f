"""What a run shows and keeps of itself."""

from dataclasses import dataclass

from infinity.core.config import check, setting


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Views of a run; all are written by rank 0."""

    metrics: bool = setting(True, "write metrics.jsonl, one line a step")
    tensorboard: bool = setting(False, "write TensorBoard events (extra: tensorboard)")
    progress: bool = setting(True, "show progress and the closing summary")
    timeline: bool = setting(False, "write timeline.json, for Perfetto and chrome://tracing")

    def __post_init__(self) -> None:
        check(self)
