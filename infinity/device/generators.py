"""States of the random generators of a process: torch's on the CPU and the device, Python's and numpy's."""

import random
from typing import Any

import numpy as np
import torch

from infinity.device.accelerator import generator_state, set_generator_state


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states as tensors, numbers and text."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }
    if device.type != "cpu":
        states["device"] = generator_state(device)
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`generator_states` returned; the device's only on a device that has a generator."""
    torch.set_rng_state(states["cpu"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if device.type != "cpu" and "device" in states:
        set_generator_state(states["device"], device)
