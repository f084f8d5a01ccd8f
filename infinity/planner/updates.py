"""Where an update runs: on the CPU, or on the accelerator, from what was measured."""

from dataclasses import dataclass

#: The accelerator computes the model beside, and its link carries weights: it must be so much faster.
_WORTH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """Elements of a shard in a second.

    Gradients arrive in host memory, and new weights leave it, wherever the update runs. A cast costs nothing
    of its own: on either side it is a part of the one pass over the state, and the link carries the compute
    dtype.

    Attributes:
        cpu: The rule in one pass over host memory, on the CPU.
        device: The same, with the way of weights, gradients and states to the accelerator and back.
        drive: Reading and writing the state on NVMe; None: it is in host memory.
    """

    cpu: float
    device: float
    drive: float | None = None


def updates_on_device(rates: UpdateRates) -> bool:
    """Return whether a unit's update is faster on the accelerator.

    The slowest part of the pipeline (drive, rule) sets the pace: a rule that waits for the drive gains
    nothing.

    Source: SuperOffload (arXiv:2509.21271), placement by the rates of the link and of the CPU.
    """
    pace = float("inf") if rates.drive is None else rates.drive
    return min(rates.device, pace) > _WORTH * min(rates.cpu, pace)
