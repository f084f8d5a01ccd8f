"""A rank runs next to its accelerator, as sysfs tells; on other machines nothing changes."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity.device import accelerator, machine

DEVICE = torch.device("cuda", 1)
#: Nodes, on a machine with four cores, of the devices at these addresses.
ADDRESSES = ("0000:17:00.0", "0001:65:00.0")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Cores that threads were given; four cores for two ranks, each with a device."""
    given: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: given.update({task: cores}))
    monkeypatch.setattr(machine, "local_ranks", lambda: 2)
    monkeypatch.setattr(machine, "share_of_cores", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    properties = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0),
        SimpleNamespace(pci_domain_id=1, pci_bus_id=0x65, pci_device_id=0),
    ]
    module = SimpleNamespace(get_device_properties=lambda device: properties[device.index])
    monkeypatch.setattr(accelerator, "_module", lambda device: module)
    return given


def tree(root: Path, nodes: list[str], devices: tuple[int, int], drive: int | None = None) -> Path:
    """Write sysfs: the cores of nodes, the nodes of both devices, and that of this folder's drive."""
    for node, text in enumerate(nodes):
        first, last = map(int, text.split("-"))
        for core in range(first, last + 1):
            (root / f"sys/devices/system/node/node{node}/cpu{core}").mkdir(parents=True)
    addresses = zip(ADDRESSES, devices, strict=True)
    files = {f"sys/bus/pci/devices/{address}/numa_node": str(node) for address, node in addresses}
    if drive is not None:
        number = root.stat().st_dev
        files["sys/devices/pci0/nvme0/numa_node"] = str(drive)
        files["sys/devices/pci0/nvme0/nvme0n1/size"] = "1"
        (root / "sys/dev/block").mkdir(parents=True)
        link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        link.symlink_to(root / "sys/devices/pci0/nvme0/nvme0n1")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_all_threads_of_a_rank_run_on_the_node_of_its_device(tmp_path, cores):
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    line = machine.bind_to_node(DEVICE, [], tree(tmp_path, ["0-1", "2-3"], (0, 1)))
    ends.set()
    other.join()
    assert line == "cuda:1 is on NUMA node 1: its rank runs on the 2 cores there"
    assert {os.getpid(), other.native_id} <= cores.keys()
    assert all(each == {2, 3} for each in cores.values())


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [
        (["0-3"], (0, 0)),  # one node
        ([], (0, 0)),  # no sysfs
        (["0-1", "2-3"], (-1, -1)),  # firmware that tells nothing
        (["0-1", "2-3"], (1, 1)),  # both ranks on one node, whose cores are fewer than theirs
        (["0-3", "4-7"], (0, 1)),  # cores that this process may not use
    ],
)
def test_where_nothing_is_won_nothing_changes(tmp_path, cores, nodes, devices):
    assert machine.bind_to_node(DEVICE, [str(tmp_path)], tree(tmp_path, nodes, devices, drive=0)) == ""
    assert not cores


def test_a_device_that_tells_no_address_changes_nothing(tmp_path, cores, monkeypatch):
    monkeypatch.setattr(accelerator, "_module", lambda device: SimpleNamespace())
    assert machine.bind_to_node(DEVICE, [], tree(tmp_path, ["0-1", "2-3"], (0, 1))) == ""
    assert not cores


@pytest.mark.parametrize(("drive", "named"), [(0, True), (1, False), (-1, False)])
def test_drives_of_other_nodes_are_named(tmp_path, cores, drive, named):
    line = machine.bind_to_node(DEVICE, [f"{tmp_path}/later"], tree(tmp_path, ["0-1", "2-3"], (0, 1), drive))
    assert line.endswith(f"; drives of other nodes: {tmp_path}/later") == named


def test_a_rank_that_has_the_machine_to_itself_keeps_all_cores(tmp_path, cores, monkeypatch):
    monkeypatch.setattr(machine, "local_ranks", lambda: 1)
    monkeypatch.setattr(machine, "share_of_cores", lambda: 4)
    assert machine.bind_to_node(DEVICE, [], tree(tmp_path, ["0-1", "2-3"], (0, 1))) == ""


def test_this_machine_is_read_without_error():
    assert isinstance(machine.share_of_cores(), int)
    assert machine.bind_to_node(torch.device("cpu"), [os.curdir]) == ""
