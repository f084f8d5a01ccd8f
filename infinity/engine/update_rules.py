"""Where updates run: on the CPU, or on the accelerator, as the recipe says or as is measured."""

from collections.abc import Iterable
from pathlib import Path

import torch

from infinity.comm.ranks import Ranks
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.lifecycle import Tier
from infinity.device.threads import background_threads, rank_threads
from infinity.nvme.probe import measure
from infinity.optim.rule import UpdateRule
from infinity.optim.rules import DeviceRule, HostRule, Rule, measure_rates
from infinity.planner.updates import UpdateRates, updates_on_device

#: Measuring, and memory for pieces, are worth it where the device budget is so much larger.
_LEAST_SHARE = 8
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
            memory.updates == "auto"
            and large
            and _is_faster(rule, dtype, ranks.device, threads[home], memory, home)
        ):
            rules[home] = there
    return rules


def device_nbytes(rules: Iterable[Rule], ranks: Ranks) -> int:
    """Return what rules take of an accelerator's memory, the most of any rank. Every rank must call."""
    if not ranks.on_accelerator:
        return 0
    nbytes = sum(rule.nbytes for rule in rules if isinstance(rule, DeviceRule))
    return -ranks.least(-nbytes, "memory.updates")


def _is_faster(
    rule: UpdateRule,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    memory: MemoryConfig,
    home: Tier,
) -> bool:
    """Measure whether a unit of this home is updated faster on the accelerator."""
    cpu, there = measure_rates(rule, dtype, device, threads)
    rates = UpdateRates(cpu=cpu, device=there)
    if home is Tier.NVME and updates_on_device(rates):
        layout = rule.layout(dtype)
        nbytes = 2 * (layout.weight_nbytes(1) + layout.state_nbytes(1))  # read and written
        speeds = [measure(Path(directory)).mixed_bytes_per_s for directory in memory.nvme]
        rates = UpdateRates(cpu=cpu, device=there, drive=sum(speeds) / nbytes)
    return updates_on_device(rates)
