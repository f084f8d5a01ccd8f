"""Describes the hardware that a plan is made for: nodes, devices, links, host memory, drives.

Figures are those of one direction. The rates of one rank follow from them by symmetry: every rank has a
device of its own, and an equal share of its node's host memory, cores, drives and network.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from infinity.core.config import Config, SettingError, Valid, setting
from infinity.core.plan import Hardware

Dtype = Literal["bf16", "fp16", "fp32"]

_RATE = Valid(least=1.0, most=1e18)
_COUNT = Valid(least=0, most=10**6)
#: A dtype of 16 bits is chosen for ``train.dtype=auto`` where it is multiplied at this share of fp32's speed.
_FAST = 0.7
#: Time from submitting a transfer to its first byte; of a collective, for its header and launch (s).
LATENCY_S, COLLECTIVE_S = 1e-4, 5e-5


@dataclass(frozen=True, kw_only=True)
class NodesConfig(Config):
    """Describes the machine as a whole."""

    name: str = setting("this machine", "name in tables")
    count: int = setting(1, "nodes", Valid(1, 10**5))
    price_per_h: float | None = setting(
        None, "what an hour of one node costs; null: not known", Valid(0, 10**7)
    )


@dataclass(frozen=True, kw_only=True)
class DevicesConfig(Config):
    """Describes the accelerators of a node; without any, cores compute and the device tier is host memory."""

    per_node: int = setting(0, "accelerators in a node; 0: the cores compute", _COUNT)
    name: str = setting("cores", "what computes")
    memory: int | None = setting(None, "memory of each; null: host memory", Valid(1, 2**60), nbytes=True)
    memory_bytes_per_s: float | None = setting(
        None, "bandwidth of that memory; null: that of host memory", _RATE
    )
    bf16_flops_per_s: float | None = setting(
        None, "of dense bf16 matrix products, each device or all cores; null: emulated", _RATE
    )
    fp16_flops_per_s: float | None = setting(None, "likewise of fp16", _RATE)
    fp32_flops_per_s: float = setting(1e11, "likewise of fp32", _RATE)
    efficiency: float = setting(
        0.6, "share of those that large matrix products of a model reach", Valid(above=0, most=1)
    )
    operator_s: float = setting(5e-6, "least time of an operator (s)", Valid(0, 1))
    watts: float = setting(0.0, "power of each, busy; 0: not known", Valid(0, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_node and self.memory is None:
            raise SettingError("memory", None, "a size, since devices.per_node is not 0")

    def flops_per_s(self, dtype: Dtype) -> float:
        """Return the flops per second of a model's matrix products in ``dtype``; emulated dtypes are slow."""
        given: float | None = getattr(self, f"{dtype}_flops_per_s")
        return self.efficiency * (given or self.fp32_flops_per_s / 10)


@dataclass(frozen=True, kw_only=True)
class LinksConfig(Config):
    """Describes links from devices to host memory, to each other, and between nodes; rates are one-way."""

    host_bytes_per_s: float | None = setting(
        None, "between each device and host memory; null: no accelerator", _RATE
    )
    node_host_bytes_per_s: float | None = setting(
        None, "between all devices of a node and host memory; null: no further limit", _RATE
    )
    device_bytes_per_s: float | None = setting(
        None,
        "from each device, or rank on the cores, to the others of its node; null: through host memory",
        _RATE,
    )
    core_s_per_byte: float | None = setting(
        None,
        "time of cores that each byte costs which a rank on the cores sends (s); null: of one, all the time",
        Valid(0, 1),
    )
    network_bytes_per_s: float | None = setting(None, "between a node and the others; null: one node", _RATE)


@dataclass(frozen=True, kw_only=True)
class HostConfig(Config):
    """Describes the cores and memory of a node."""

    cores: int = setting(1, "cores of a node", Valid(1, 10**5))
    memory: int = setting(2**30, "host memory of a node", Valid(1, 2**60), nbytes=True)
    bytes_per_s: float = setting(1e10, "bandwidth of that memory", _RATE)
    core_bytes_per_s: float = setting(
        8e9, "bytes that one core reads and writes in an optimizer's update", _RATE
    )
    watts: float = setting(0.0, "power of a node without its devices; 0: not known", Valid(0, 10**7))


@dataclass(frozen=True, kw_only=True)
class DrivesConfig(Config):
    """Describes the NVMe drives of a node; all figures are of one drive."""

    per_node: int = setting(0, "drives in a node", _COUNT)
    name: str = setting("NVMe", "name in tables")
    memory: int = setting(2**40, "capacity", Valid(1, 2**60), nbytes=True)
    read_bytes_per_s: float = setting(1e9, "reads alone", _RATE)
    write_bytes_per_s: float = setting(1e9, "writes alone, sustained", _RATE)
    mixed_bytes_per_s: float | None = setting(
        None, "reads and writes together; null: the mean of both", _RATE
    )
    written_bytes: float | None = setting(
        None, "endurance: bytes that may be written (TBW x 1e12); null: not known", _RATE
    )
    price: float | None = setting(None, "price", Valid(0, 10**7))
    core_s_per_byte: float = setting(
        0.0, "time of a core that each byte costs (s); counts where the cores compute", Valid(0, 1)
    )


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
    def devices_in_all(self) -> int:
        """Return the number of devices of all nodes; 1 where the cores compute."""
        return max(1, self.devices.per_node) * self.nodes.count

    def choose_dtype(self) -> Dtype:
        """Return the dtype that ``train.dtype=auto`` stands for."""
        bf16 = self.devices.bf16_flops_per_s or 0.0
        return "bf16" if bf16 >= _FAST * self.devices.fp32_flops_per_s else "fp32"

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
    gather_bytes_per_s: float  # full values of a unit; infinite with one rank
    reduce_bytes_per_s: float  # full gradients, by all-to-all
    update_bytes_per_s: float  # what updates of shards read and write, on all cores
    background_bytes_per_s: float  # the same beside compute, where that needs the cores, too
    decode_bytes_per_s: float  # what operators that decode stored weights read and write
    flops_per_s: float  # of matrix products in the compute dtype
    fp32_flops_per_s: float
    memory_bytes_per_s: float  # what other operators read and write
    operator_s: float  # the least time of one
    link_threads: float = 1.0  # that a collective keeps busy, without an accelerator
    cores: float = 0.0  # less than 1 where ranks are more than cores; 0: an accelerator computes
    threads: float = 0.0  # that compute on them

    @property
    def background_threads(self) -> int:
        """Return the threads of updates and of all else that runs beside compute on the cores."""
        return max(1, int(self.threads) // 2)


def rank_rates(machine: Machine, ranks: int, dtype: Dtype, threads: int | None = None) -> RankRates:
    """Return the rates of one of ``ranks`` that compute in ``dtype``, on a thread for each core if None."""
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
    )
    between = links.device_bytes_per_s or (link if machine.on_accelerator else host.bytes_per_s / 8)
    if not machine.on_accelerator:
        between *= min(1.0, 2 / local)  # it is measured, or assumed, between two
    gather = reduce = float("inf")
    if ranks > 1:
        away = (ranks - 1) / ranks  # of a unit's bytes, each rank has the others'
        gather = reduce = between / away
        if machine.nodes.count > 1:
            assert links.network_bytes_per_s is not None
            # A ring crosses each node's border once; in an all-to-all every rank sends to every other node.
            gather = min(gather, links.network_bytes_per_s / away)
            crossing = local * (ranks - local) / ranks
            reduce = min(reduce, links.network_bytes_per_s / crossing)
    of_memory, own = host.bytes_per_s / local, min(used, cores)
    background = own if machine.on_accelerator else max(1, int(used) // 2)
    return RankRates(
        channels=channels,
        gather_bytes_per_s=gather,
        reduce_bytes_per_s=reduce,
        update_bytes_per_s=min(of_memory, own * host.core_bytes_per_s),
        background_bytes_per_s=min(of_memory, background * host.core_bytes_per_s),
        decode_bytes_per_s=devices.memory_bytes_per_s or min(of_memory, used * host.core_bytes_per_s),
        flops_per_s=share * devices.flops_per_s(dtype),
        fp32_flops_per_s=share * devices.flops_per_s("fp32"),
        memory_bytes_per_s=share * (devices.memory_bytes_per_s or host.bytes_per_s),
        operator_s=devices.operator_s,
        link_threads=1.0 if links.core_s_per_byte is None else links.core_s_per_byte * between,
        cores=0.0 if machine.on_accelerator else cores,
        threads=0.0 if machine.on_accelerator else used,
    )
