"""Settings of the engine: budgets, directories and dtypes of one ``Init``."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from infinity.core.config import MemoryConfig
from infinity.partition.builder import PartitionConfig
from infinity.shards.journal import DurabilityConfig, Resume

Dtype = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds the settings of one ``Init``.

    Attributes:
        partition: The way in which ranks share the model.
        durability: The failures that a committed step survives.
        dtype: Compute dtype of the weights; auto: bf16 where every rank multiplies it fast, else fp32.
        device: This rank's, such as ``cuda:1``; None: the accelerator with its number on the machine, if any.
        loss_scale: First loss scale of fp16 training.
        run_name: Names the run's directories on NVMe; None: a new id.
        resume: Whether an interrupted run of that name goes on; must: it is an error if there is none.
        timeline: Record when everything moves and computes.
        layer_schedule: All micro-batches go through a block before the next, which recomputes blocks.
    """

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    dtype: Dtype = "auto"
    device: str | None = None
    loss_scale: float = 2.0**16
    run_name: str | None = None
    resume: Resume = "auto"
    timeline: bool = False
    layer_schedule: bool = False


class HasEngineConfig(Protocol):
    """Describes a larger configuration that contains the engine's, such as a recipe."""

    @property
    def engine(self) -> EngineConfig: ...


def engine_config(config: EngineConfig | HasEngineConfig | None) -> EngineConfig:
    """Return the engine's part of ``config``; None stands for the defaults."""
    found = EngineConfig() if config is None else getattr(config, "engine", config)
    if not isinstance(found, EngineConfig):
        raise TypeError(
            f"wanted a recipe; got {type(config).__name__}: write "
            "infinity.Init(infinity.load_recipe('recipe.yaml'))"
        )
    return found
