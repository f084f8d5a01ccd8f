"""Where updates run: on the CPU, or on the accelerator, as the recipe says or as is measured."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from infinity.comm.ranks import Ranks
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.lifecycle import Tier
from infinity.device.threads import background_threads, rank_threads
from infinity.nvme.probe import measure
from infinity.optim.rules import DeviceRule, HostRule, Rule, UpdateRule, measure_rates

#: Measuring, and memory for pieces, are worth it where the device budget is so much larger.
_LEAST_SHARE = 8
#: The accelerator computes the model beside, and its link carries weights: it must be so much faster.
_WORTH = 1.1
#: Cores that launch kernels and move bytes while others update.
_FEEDING_THREADS = 2
#: Units in host memory that are updated at one time beside an accelerator.
_CALLERS = 4


def make_rules(rule: UpdateRule, memory: MemoryConfig, ranks: Ranks, dtype: torch.dtype) -> dict[Tier, Rule]:
    """Return where ``rule`` updates units of each home.

    Raises:
        SettingError: ``memory.updates=device`` without an accelerator.
        DiskError: A drive cannot be measured.
    """
    # Units on NVMe are updated beside training.
    threads, callers = {Tier.HOST: rank_threads(), Tier.NVME: background_threads()}, 1
    if ranks.on_accelerator:  # all are, on all cores but those that feed the accelerator
        threads = dict.fromkeys(threads, max(1, rank_threads() - _FEEDING_THREADS))
        callers = min(_CALLERS, threads[Tier.HOST])
    rules: dict[Tier, Rule] = {
        Tier.HOST: HostRule(rule, dtype, threads=threads[Tier.HOST], callers=callers),
        Tier.NVME: HostRule(rule, dtype, threads=threads[Tier.NVME]),
    }
    if not ranks.on_accelerator:
        if memory.updates == "device":
            raise SettingError("memory.updates", "device", "auto or host: there is no accelerator here")
        return rules
    for home in [Tier.HOST, Tier.NVME] if memory.nvme else [Tier.HOST]:
        there = DeviceRule(rule, dtype, ranks.device)
        large = memory.device is None or memory.device >= _LEAST_SHARE * there.nbytes
        if memory.updates == "device" or (
            memory.updates == "auto" and large and _is_faster(there, threads[home], memory, home)
        ):
            rules[home] = there
    return rules


def device_nbytes(rules: Iterable[Rule], ranks: Ranks) -> int:
    """Return what rules take of an accelerator's memory, the most of any rank. Every rank must call."""
    if not ranks.on_accelerator:
        return 0
    nbytes = sum(rule.nbytes for rule in rules if isinstance(rule, DeviceRule))
    return -ranks.least(-nbytes, "memory.updates")


def is_faster(cpu: float, device: float, drive: float = math.inf) -> bool:
    """Return whether a unit's update is faster on the accelerator.

    The slowest part of the pipeline (drive, rule) sets the pace: a rule that waits for the drive gains
    nothing. Gradients arrive in host memory, and new weights leave it, wherever the update runs.

    Args:
        cpu: Elements of a shard in a second, in one pass over host memory on the CPU.
        device: The same, with the way of weights, gradients and states to the accelerator and back.
        drive: The same, reading and writing the state on NVMe.

    Source: SuperOffload (arXiv:2509.21271), placement by the rates of the link and of the CPU.
    """
    return min(device, drive) > _WORTH * min(cpu, drive)


def _is_faster(there: DeviceRule, threads: int, memory: MemoryConfig, home: Tier) -> bool:
    """Measure whether a unit of this home is updated faster on the accelerator."""
    layout = there.layout
    cpu, device = measure_rates(there.rule, layout.dtype, there.device, threads)
    if home is Tier.HOST or not is_faster(cpu, device):
        return is_faster(cpu, device)
    speeds = [measure(Path(directory)).mixed_bytes_per_s for directory in memory.nvme]
    return is_faster(cpu, device, sum(speeds) / (2 * layout.nbytes(1)))  # read and written
