"""Puts a rank on the NUMA node of its accelerator.

Threads that run on the node's cores allocate and page-lock memory there: Linux takes a page from the node of
the thread that touches it first, and a driver touches what it locks. So cores are all that has to be chosen,
before threads and pools are made.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from infinity.device.accelerator import pci_address
from infinity.device.machine import local_ranks, read, share_of_cores

_ROOT, _NODES = Path("/"), "sys/devices/system/node/node[0-9]*"


def bind(device: torch.device, directories: Iterable[str], root: Path = _ROOT) -> str:
    """Let all threads of this process run on the node of ``device``; return a line for people, or none.

    Nothing changes where there is one node, where the device's is unknown, or where its cores are fewer than
    the shares of its ranks (one rank has all cores). ``directories`` on drives of other nodes are named.
    """
    nodes = {_number(each.name[4:]): each for each in root.glob(_NODES)}
    node = node_of_device(device, root)
    there = nodes[node].glob("cpu[0-9]*") if node in nodes else ()
    cores = {_number(each.name[3:]) for each in there} & os.sched_getaffinity(0)
    visible = range(min(local_ranks(), torch.accelerator.device_count()))
    ranks = sum(node_of_device(torch.device(device.type, index), root) == node for index in visible)
    if len(nodes) < 2 or len(cores) < max(1, ranks) * share_of_cores():
        return ""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            allowed = os.sched_getaffinity(int(task.name)) & cores  # a thread may have been put on a few
            os.sched_setaffinity(int(task.name), allowed or cores)
    far = [each for each in directories if _node_of_drive(each, root) in nodes.keys() - {node}]
    line = f"{device} is on NUMA node {node}: its rank runs on the {len(cores)} cores there"
    return f"{line}; drives of other nodes: {', '.join(far)}" if far else line


def count_nodes(root: Path = _ROOT) -> int:
    return len([*root.glob(_NODES)])


def node_of_device(device: torch.device, root: Path = _ROOT) -> int:
    """Return the node of an accelerator; -1: unknown."""
    return _number(read(root / "sys/bus/pci/devices" / pci_address(device) / "numa_node"))


def _node_of_drive(directory: str, root: Path) -> int:
    """Return the node of the drive that holds ``directory``; -1: unknown."""
    path = Path(directory)
    existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    number = existing.stat().st_dev
    drive = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return _number(next(filter(None, (read(each / "numa_node") for each in (drive, *drive.parents))), ""))


def _number(text: str) -> int:
    return int(text) if text.removeprefix("-").isdigit() else -1
