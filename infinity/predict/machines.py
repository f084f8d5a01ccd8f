"""Describes the hardware that a plan is made for: loaded from a file, or measured (``infinity probe``).

Figures are those of one direction. The rates of one rank follow from them by symmetry: every rank has a
device of its own, and an equal share of its node's host memory, cores, drives and network.
"""

import difflib
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from infinity.activations.store import measure_hardware
from infinity.comm.ranks import measure_exchange
from infinity.core.config import Config, SettingError, Valid, setting
from infinity.core.errors import RecipeError
from infinity.core.files import is_file, user_path, write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import Hardware
from infinity.device.accelerator import least_s, memory_nbytes, name_of, reaches_others
from infinity.device.machine import (
    DTYPES,
    FP16_SUMS_GAIN,
    Dtype,
    auto_dtype,
    fp16_sums_gain,
    multiply_s,
    total_host_nbytes,
    usable_cores,
)
from infinity.nvme.probe import measure
from infinity.optim.elementwise import ADAMW, ADAMW_8BIT
from infinity.optim.rule import Rule
from infinity.optim.rules import HostRule
from infinity.optim.state import Quantized, StateLayout
from infinity.planner.lifetimes import MOVED_S
from infinity.recipes.loading import load_sections

_RATE = Valid(least=1.0, most=1e18)
_COUNT = Valid(least=0, most=10**6)
_PRICE = Valid(0, 10**7)
#: Time from submitting a transfer to its first byte; of a collective, for its launch; of the header by which
#: ranks agree on one, for each rank beside this one (s).
LATENCY_S, COLLECTIVE_S, HEADER_S = 1e-4, 5e-5, 2.5e-5


@dataclass(frozen=True, kw_only=True)
class NodesConfig(Config):
    """Describes the machine as a whole."""

    name: str = setting("this machine", "name in tables")
    count: int = setting(1, "nodes", Valid(1, 10**5))
    price_per_h: float | None = setting(None, "cost of an hour of one node; null: not known", _PRICE)


@dataclass(frozen=True, kw_only=True)
class DevicesConfig(Config):
    """Describes the accelerators of a node; without any, cores compute and the device tier is host memory."""

    per_node: int = setting(0, "accelerators in a node; 0: the cores compute", _COUNT)
    name: str = setting("cores", "what computes")
    memory: int | None = setting(None, "memory of each; null: host memory", Valid(1, 2**60), nbytes=True)
    memory_bytes_per_s: float | None = setting(None, "bandwidth of that; null: that of host memory", _RATE)
    bf16_flops_per_s: float | None = setting(None, "of dense products; null: emulated", _RATE)
    fp16_flops_per_s: float | None = setting(None, "likewise of fp16", _RATE)
    fp16_sums_flops_per_s: float | None = setting(None, "of fp16 summed in fp16; null: no faster", _RATE)
    fp32_flops_per_s: float = setting(1e11, "likewise of fp32", _RATE)
    efficiency: float = setting(0.6, "share of those that large products reach", Valid(above=0, most=1))
    operator_s: float = setting(5e-6, "least time of an operator (s)", Valid(0, 1))
    watts: float = setting(0.0, "power of each, busy; 0: not known", Valid(0, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_node and self.memory is None:
            raise SettingError("memory", None, "a size, since devices.per_node is not 0")

    def flops_per_s(self, dtype: Dtype, sums: str = "fp32") -> float:
        """Return the flops per second of a model's matrix products in ``dtype``; emulated dtypes are slow.

        Raises:
            SettingError: ``sums``, in which products add up, is fp16, and this is no faster.
        """
        given: float | None = getattr(self, f"{dtype}_flops_per_s")
        if sums == "fp16":
            given = self.fp16_sums_flops_per_s
            if given is None or dtype != "fp16":
                raise SettingError("train.accumulate_dtype", sums, f"fp32: on {self.name} fp16 is no faster")
        return self.efficiency * (given or self.fp32_flops_per_s / 10)


@dataclass(frozen=True, kw_only=True)
class LinksConfig(Config):
    """Describes links; rates are one-way."""

    host_bytes_per_s: float | None = setting(None, "a device to host memory; null: no accelerator", _RATE)
    node_host_bytes_per_s: float | None = setting(
        None, "all devices of a node to host memory; null: no limit", _RATE
    )
    #: From each device, or rank on the cores, to the others of its node.
    device_bytes_per_s: float | None = setting(None, "to others of its node; null: by host memory", _RATE)
    core_s_per_byte: float | None = setting(
        None, "time of cores per byte sent; null: one core's", Valid(0, 1)
    )
    network_bytes_per_s: float | None = setting(None, "between a node and the others; null: one node", _RATE)


@dataclass(frozen=True, kw_only=True)
class HostConfig(Config):
    """Describes the cores and memory of a node."""

    cores: int = setting(1, "cores of a node", Valid(1, 10**5))
    memory: int = setting(2**30, "host memory of a node", Valid(1, 2**60), nbytes=True)
    bytes_per_s: float = setting(1e10, "bandwidth of that memory", _RATE)
    core_bytes_per_s: float = setting(8e9, "what an optimizer's update moves on one core", _RATE)
    core_codes_per_s: float = setting(2e9, "8-bit values that it decodes and encodes on one core", _RATE)
    watts: float = setting(0.0, "power of a node without its devices; 0: not known", _PRICE)

    def update_bytes_per_s(self, layout: StateLayout) -> float:
        """Return what one core moves per second in updates with such a state, and their gradients."""
        nbytes, codes = _updated(layout)
        return nbytes / (nbytes / self.core_bytes_per_s + codes / self.core_codes_per_s)


@dataclass(frozen=True, kw_only=True)
class DrivesConfig(Config):
    """Describes the NVMe drives of a node; all figures are of one drive."""

    per_node: int = setting(0, "drives in a node", _COUNT)
    name: str = setting("NVMe", "name in tables")
    memory: int = setting(2**40, "capacity", Valid(1, 2**60), nbytes=True)
    read_bytes_per_s: float = setting(1e9, "reads alone", _RATE)
    write_bytes_per_s: float = setting(1e9, "writes alone, sustained", _RATE)
    mixed_bytes_per_s: float | None = setting(None, "both together; null: the mean of both", _RATE)
    written_bytes: float | None = setting(None, "endurance (TBW x 1e12); null: not known", _RATE)
    price: float | None = setting(None, "price", _PRICE)
    core_s_per_byte: float = setting(0.0, "time of a core per byte, if cores compute (s)", Valid(0, 1))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Holds all sections of a hardware file."""

    nodes: NodesConfig = field(default_factory=NodesConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    host: HostConfig = field(default_factory=HostConfig)
    drives: DrivesConfig = field(default_factory=DrivesConfig)

    def __post_init__(self) -> None:
        if self.devices.per_node and self.links.host_bytes_per_s is None:
            raise SettingError(
                "links.host_bytes_per_s", None, "bytes per second, since devices.per_node is not 0"
            )
        if self.nodes.count > 1 and self.links.network_bytes_per_s is None:
            raise SettingError(
                "links.network_bytes_per_s", None, "bytes per second, since nodes.count is above 1"
            )

    @property
    def on_accelerator(self) -> bool:
        return self.devices.per_node > 0

    @property
    def peers(self) -> bool:
        """Return whether there are accelerators that reach each other's memory, not by host memory."""
        return self.on_accelerator and self.links.device_bytes_per_s is not None

    @property
    def devices_in_all(self) -> int:
        """Return the number of devices of all nodes; 1 where the cores compute."""
        return max(1, self.devices.per_node) * self.nodes.count

    def choose_dtype(self) -> Dtype:
        """Return the dtype that ``train.dtype=auto`` stands for."""
        devices = self.devices
        given = {"bf16": devices.bf16_flops_per_s, "fp16": devices.fp16_flops_per_s}
        return auto_dtype(lambda name: (given[name] or 0.0) / devices.fp32_flops_per_s)

    def with_ranks(self, ranks: int) -> "Machine":
        """Return the same machine with as many nodes as ``ranks`` take, and no idle device.

        Raises:
            SettingError: Ranks do not fill nodes.
        """
        each = self.devices.per_node or ranks
        if ranks > each and ranks % each:
            raise SettingError("ranks", ranks, f"a number up to {each}, or a multiple of it: whole nodes")
        devices = replace(self.devices, per_node=min(ranks, each)) if self.on_accelerator else self.devices
        return replace(self, nodes=replace(self.nodes, count=max(1, ranks // each)), devices=devices)


@dataclass(frozen=True, slots=True)
class RankRates:
    """Holds the rates of the channels and the compute of one rank."""

    channels: Hardware  # its share of the drives, and its link to host memory
    links_bytes_per_s: float  # full values and gradients of a unit; infinite with one rank
    update_bytes_per_s: float  # what updates of shards read and write, on all cores
    background_bytes_per_s: float  # the same beside compute, where that needs the cores, too
    decode_bytes_per_s: float  # what operators that decode stored weights read and write
    flops_per_s: float  # of matrix products in the compute dtype
    fp32_flops_per_s: float
    memory_bytes_per_s: float  # what other operators read and write
    operator_s: float  # the least time of one
    by_host: bool = False  # collectives take the link of ``channels`` to host memory
    link_threads: float = 1.0  # that a collective keeps busy, without an accelerator
    cores: float = 0.0  # less than 1 where ranks are more than cores; 0: an accelerator computes
    threads: float = 0.0  # that compute on them

    @property
    def background_threads(self) -> int:
        """Return the threads of updates and of all else that runs beside compute on the cores."""
        return max(1, int(self.threads) // 2)


def rank_rates(
    machine: Machine, ranks: int, dtype: Dtype, threads: int | None = None,
    state: StateLayout | None = None, sums: str = "fp32",
) -> RankRates:  # fmt: skip
    """Return the rates of one of ``ranks`` that compute in ``dtype``, on a thread for each core if None.

    ``state`` is what updates of weights have beside them; None: that of AdamW. Products add up in ``sums``.
    """
    devices, links, host, drives = machine.devices, machine.links, machine.host, machine.drives
    local = max(1, ranks // machine.nodes.count)
    link = links.host_bytes_per_s or 0.0
    if links.node_host_bytes_per_s is not None:
        link = min(link, links.node_host_bytes_per_s / local)
    cores = host.cores / local
    used = max(1.0, cores) if machine.on_accelerator or threads is None else min(float(threads), host.cores)
    share = 1.0 if machine.on_accelerator else used / host.cores  # of what computes, while cores are free
    mixed = drives.mixed_bytes_per_s or (drives.read_bytes_per_s + drives.write_bytes_per_s) / 2
    channels = Hardware(
        read_bytes_per_s=drives.per_node * drives.read_bytes_per_s / local,
        write_bytes_per_s=drives.per_node * drives.write_bytes_per_s / local,
        mixed_bytes_per_s=drives.per_node * mixed / local,
        host_bytes_per_s=link,
        latency_s=LATENCY_S,
        compute_s_per_byte=0.0 if machine.on_accelerator else drives.core_s_per_byte,
        compute_s_per_move=0.0 if machine.on_accelerator else MOVED_S,
    )
    between = links.device_bytes_per_s or (link if machine.on_accelerator else host.bytes_per_s / 8)
    if not machine.on_accelerator:
        between *= min(1.0, 2 / local)  # it is measured, or assumed, between two
    # Of a unit's bytes, each rank has the others'. Each crosses a node's border once, and moves within a node
    # then or before: both steps after each other.
    crossing = (ranks - local) / ranks / (links.network_bytes_per_s or math.inf)
    links_s_per_byte = crossing + (local - 1) / local / between
    of_memory, own = host.bytes_per_s / local, min(used, cores)
    background = own if machine.on_accelerator else max(1, int(used) // 2)
    updated = host.update_bytes_per_s(state or ADAMW.layout(DTYPES[dtype]))
    return RankRates(
        channels=channels,
        links_bytes_per_s=1 / links_s_per_byte if ranks > 1 else math.inf,
        update_bytes_per_s=min(of_memory, own * updated),
        background_bytes_per_s=min(of_memory, background * updated),
        decode_bytes_per_s=devices.memory_bytes_per_s or min(of_memory, used * host.core_bytes_per_s),
        flops_per_s=share * devices.flops_per_s(dtype, sums),
        fp32_flops_per_s=share * devices.flops_per_s("fp32"),
        memory_bytes_per_s=share * (devices.memory_bytes_per_s or host.bytes_per_s),
        operator_s=devices.operator_s,
        by_host=machine.on_accelerator and not machine.peers,
        link_threads=1.0 if links.core_s_per_byte is None else links.core_s_per_byte * between,
        cores=0.0 if machine.on_accelerator else cores,
        threads=0.0 if machine.on_accelerator else used,
    )


SHIPPED = Path(__file__).parent / "hardware"
#: Rows and columns of the matrices, and bytes of the copies, that :func:`probe` times.
_SIZES, _COPIED_NBYTES, _TRIES = (128, 256, 512, 1024), 64 * 2**20, 3
#: Elements of an update that is timed: more than caches hold.
_UPDATED_NUMEL = 2**22
#: How long a product may take (s).
_MOST_S = 0.25


def machine_names() -> list[str]:
    """Return the names of the hardware files that are shipped."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_machine(name: str, overrides: Sequence[str] = ()) -> Machine:
    """Load a hardware file.

    Args:
        name: A shipped one's name, such as ``hgx-h100``, or a path.
        overrides: Changes, as in ``drives.per_node=4``.

    Raises:
        RecipeError: There is none, or it has an unknown key or an invalid value; names the nearest valid one.
    """
    if name in machine_names():
        return load_sections(Machine, SHIPPED / f"{name}.yaml", overrides)
    path = user_path(name, "--on")
    if not is_file(path):
        near = difflib.get_close_matches(name, machine_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(machine_names())}"
        raise RecipeError(f"--on {name}: no such file, and no hardware file of that name is shipped; {hint}")
    return load_sections(Machine, path, overrides)


def probe(directories: Sequence[str | Path]) -> Machine:
    """Measure this machine in some seconds: compute, host memory, and the drives of ``directories``.

    Raises:
        DirectoryError: A directory cannot be written.
        DiskError: A file system is full, or a drive reports an error.
    """
    cores, device = usable_cores(), torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        host_bytes_per_s = 2 * _copy_bytes_per_s(device, device)
        core_bytes_per_s, core_codes_per_s = map(_rounded, _update_rates())
        devices, links = DevicesConfig(name=f"{cores} cores", efficiency=0.8), LinksConfig()
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None and cores > 1:
            with suppress(RuntimeError):  # no network that gloo finds: through host memory
                bytes_per_s, core_s_per_byte = map(_rounded, measure_exchange())
                links = LinksConfig(device_bytes_per_s=bytes_per_s, core_s_per_byte=core_s_per_byte)
        if found is not None:
            device = torch.device(found.type, torch.accelerator.current_device_index())
            other = torch.device(found.type, (device.index + 1) % torch.accelerator.device_count())
            reaches = other != device and reaches_others(device)
            links = LinksConfig(
                host_bytes_per_s=_rounded(measure_hardware(device, (), 0).host_bytes_per_s),
                device_bytes_per_s=_rounded(_copy_bytes_per_s(device, other)) if reaches else None,
            )
            devices = DevicesConfig(
                per_node=torch.accelerator.device_count(),
                name=name_of(device),
                memory=memory_nbytes(device)[1],
                memory_bytes_per_s=_rounded(2 * _copy_bytes_per_s(device, device)),
                efficiency=0.95,  # the figures are reached ones
            )
        rates: dict[str, Any] = {
            f"{name}_flops_per_s": _flops_per_s(DTYPES[name], device) for name in ("bf16", "fp16", "fp32")
        }
        if (gain := fp16_sums_gain(device)) >= FP16_SUMS_GAIN:
            rates["fp16_sums_flops_per_s"] = _rounded(gain * rates["fp16_flops_per_s"])
        devices = replace(devices, **rates)
    finally:
        torch.set_num_threads(threads)
    return Machine(
        nodes=NodesConfig(name="this machine"),
        devices=devices,
        links=links,
        host=HostConfig(
            cores=cores, memory=total_host_nbytes(), bytes_per_s=_rounded(host_bytes_per_s),
            core_bytes_per_s=core_bytes_per_s, core_codes_per_s=core_codes_per_s,
        ),
        drives=_drives([Path(each) for each in directories]) if directories else DrivesConfig(),
    )  # fmt: skip


def measurable(directories: Sequence[str]) -> list[Path]:
    """Return the directories, or the nearest existing ones above them."""
    found = []
    for each in directories:
        path = Path(each).absolute()
        path = next(above for above in (path, *path.parents) if above.is_dir())
        if not os.access(path, os.W_OK):
            raise RecipeError(
                f"memory.nvme: {path} cannot be written, so its drive cannot be measured; give a directory "
                "that this user may write, or plan for other hardware with --on"
            )
        found.append(path)
    return found


def _drives(directories: Sequence[Path]) -> DrivesConfig:
    speeds, n = [measure(each, both=True) for each in directories], len(directories)
    mixed = sum(each.both_bytes_per_s or each.mixed_bytes_per_s for each in speeds)
    return DrivesConfig(
        per_node=n,
        name=", ".join(map(str, directories)),
        memory=min(shutil.disk_usage(each).free for each in directories),
        read_bytes_per_s=_rounded(sum(each.read_bytes_per_s for each in speeds) / n),
        write_bytes_per_s=_rounded(sum(each.write_bytes_per_s for each in speeds) / n),
        mixed_bytes_per_s=_rounded(mixed / n),
        core_s_per_byte=_rounded(sum(each.processor_s_per_byte for each in speeds) / n),
    )


def write_machine(machine: Machine, path: Path) -> None:
    """Write a hardware file, which :func:`load_machine` reads back to an equal machine."""
    lines = [f"# Measured by infinity probe on {time.strftime('%Y-%m-%d')}; see docs/planning.md."]
    for section, values in asdict(machine).items():
        lines.append(f"{section}:")
        for key, value in values.items():
            text = yaml.safe_dump(value, width=10**6).removesuffix("...\n").strip()
            lines.append(f"  {key}: " + (f"{value:.6g}" if isinstance(value, float) else text))
    write_file(path, "\n".join([*lines, ""]))


def describe_machine(machine: Machine) -> str:
    """Return a line about compute, memory and drives."""
    devices, host, drives = machine.devices, machine.host, machine.drives
    what = f"{devices.per_node} x {devices.name}" if devices.per_node else devices.name
    nodes = f"{machine.nodes.count} nodes of " if machine.nodes.count > 1 else ""
    many = "s" if drives.per_node > 1 else ""
    disks = (
        f"{drives.per_node} drive{many} ({drives.name}, {drives.read_bytes_per_s / 1e9:.3g} GB/s read, "
        f"{drives.write_bytes_per_s / 1e9:.3g} GB/s written each)"
    )
    return (
        f"{machine.nodes.name}: {nodes}{what}, {format_nbytes(host.memory)} of host memory, "
        f"{host.cores} cores, " + (disks if drives.per_node else "no drives")
    )


def _rounded(number: float) -> float:
    """Round to three digits, since a measurement has no more."""
    return float(f"{number:.3g}")


def _flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Return flops per second of matrix products, the best of a few; slow dtypes use small matrices."""
    best = 0.0
    for size in _SIZES:  # on a busy machine a small product takes milliseconds, whatever it computes
        if best and 2 * size**3 / best > _MOST_S:
            break
        best = max(best, 2 * size**3 / min(multiply_s(dtype, size, device) for _ in range(_TRIES)))
    return _rounded(best)


def _copy_bytes_per_s(device: torch.device, other: torch.device) -> float:
    """Return how many bytes are copied per second from a device's memory to another's, or to its own."""
    source = torch.ones(_COPIED_NBYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=other)
    return _COPIED_NBYTES / least_s(lambda: target.copy_(source), device, _TRIES + 1)


def _updated(layout: StateLayout) -> tuple[float, int]:
    """Return the bytes that an update of an element reads and writes, and its 8-bit values."""
    codes = sum(isinstance(moment.form, Quantized) for moment in layout.moments)
    return 2 * layout.bytes_per_element + layout.dtype.itemsize, codes


def _update_rates() -> tuple[float, float]:
    """Return the bytes that one core moves per second in updates, and the 8-bit values that it converts."""
    nbytes, _ = _updated(ADAMW.layout(torch.bfloat16))
    core_bytes_per_s = nbytes / _update_s(ADAMW)
    nbytes, codes = _updated(ADAMW_8BIT.layout(torch.bfloat16))
    converting_s = _update_s(ADAMW_8BIT) - nbytes / core_bytes_per_s
    return core_bytes_per_s, codes / max(converting_s, 1e-12)


def _update_s(arithmetic: Rule) -> float:
    """Return the time of one core for an update of one element (s)."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    rule, hyper = HostRule(arithmetic, dtype, threads=1), arithmetic.hyper(arithmetic.idle)
    layout = rule.layout
    weight, grad = (torch.zeros(_UPDATED_NUMEL, dtype=dtype, device=device) for _ in range(2))
    memory = torch.zeros(layout.state_nbytes(_UPDATED_NUMEL), dtype=torch.uint8, device=device)
    state = layout.views(memory, _UPDATED_NUMEL)
    update_s = least_s(lambda: rule.update(weight, grad, state, weight, hyper), device, _TRIES + 1)
    return update_s / _UPDATED_NUMEL
