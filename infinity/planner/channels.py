"""Channels between device memory, host memory and NVMe, and their rates.

[Note: reads beside writes]
When an NVMe drive reads and writes at once, both together move ``mixed_bytes_per_s``, half each as far as
they can. A byte that is written therefore costs the reads of the same time what they lose while it moves.
"""

from enum import IntEnum

from infinity.core.plan import Hardware, Place


class Channel(IntEnum):
    """One direction of one link."""

    NVME_WRITE = 0
    NVME_READ = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3

    @property
    def label(self) -> str:
        """Name in tables and pictures."""
        return ("NVMe write", "NVMe read", "device to host", "host to device")[self]


#: The channel by which a storage goes to a place, and the one by which it comes back.
STORE = {Place.NVME: Channel.NVME_WRITE, Place.HOST: Channel.DEVICE_TO_HOST}
LOAD = {Place.NVME: Channel.NVME_READ, Place.HOST: Channel.HOST_TO_DEVICE}

#: Share of its speed that compute keeps beside transfers, at least.
LEAST_SPEED = 0.1


def mixed_rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes per second of reads and of writes while both are busy; see [Note: reads beside writes]."""
    half = hardware.mixed_bytes_per_s / 2
    write = min(hardware.write_bytes_per_s, half)
    read = min(hardware.read_bytes_per_s, hardware.mixed_bytes_per_s - write)
    return read, min(hardware.write_bytes_per_s, hardware.mixed_bytes_per_s - read)


def delay_s_per_byte(hardware: Hardware) -> float:
    """Seconds by which each byte that moves delays compute, bounded so that compute never stands still."""
    read, write = mixed_rates(hardware)
    most = max(read + write, hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    most += 2 * hardware.host_bytes_per_s if hardware.host_nbytes else 0.0
    return min(hardware.compute_s_per_byte, (1 - LEAST_SPEED) / most if most else 0.0)
