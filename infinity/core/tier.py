"""Where bytes are."""

from enum import Enum


class Tier(Enum):
    """A kind of memory, from nearest to the arithmetic to farthest from it."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
