"""Loads the hardware files that are shipped, and measures this machine to write one (``infinity probe``)."""

import difflib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from infinity.activations.store import measure_hardware
from infinity.comm.ranks import measure_exchange
from infinity.core.errors import RecipeError
from infinity.core.files import is_file, user_path, write_file
from infinity.core.nbytes import format_nbytes
from infinity.device.accelerator import memory_nbytes, name_of, synchronize
from infinity.device.machine import DTYPES, multiply_s, total_host_nbytes, usable_cores
from infinity.nvme.probe import measure
from infinity.optim.rules import IDLE, HostRule, default_rule
from infinity.planner.machines import (
    DevicesConfig,
    DrivesConfig,
    HostConfig,
    LinksConfig,
    Machine,
    NodesConfig,
)
from infinity.recipes.recipe import load_sections

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
        host_bytes_per_s = _copy_bytes_per_s(device)
        devices, links = DevicesConfig(name=f"{cores} cores", efficiency=0.8), LinksConfig()
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None and cores > 1:
            with suppress(RuntimeError):  # no network that gloo finds: through host memory
                bytes_per_s, core_s_per_byte = map(_rounded, measure_exchange())
                links = LinksConfig(device_bytes_per_s=bytes_per_s, core_s_per_byte=core_s_per_byte)
        if found is not None:
            device = torch.device(found.type, torch.accelerator.current_device_index())
            links = LinksConfig(host_bytes_per_s=_rounded(measure_hardware(device, (), 0).host_bytes_per_s))
            devices = DevicesConfig(
                per_node=torch.accelerator.device_count(),
                name=name_of(device),
                memory=memory_nbytes(device)[1],
                memory_bytes_per_s=_rounded(_copy_bytes_per_s(device)),
                efficiency=0.95,  # the figures are reached ones
            )
        rates: dict[str, Any] = {
            f"{name}_flops_per_s": _flops_per_s(DTYPES[name], device) for name in ("bf16", "fp16", "fp32")
        }
        devices = replace(devices, **rates)
    finally:
        torch.set_num_threads(threads)
    return Machine(
        nodes=NodesConfig(name="this machine"),
        devices=devices,
        links=links,
        host=HostConfig(
            cores=cores, memory=total_host_nbytes(), bytes_per_s=_rounded(host_bytes_per_s),
            core_bytes_per_s=_rounded(_update_bytes_per_s()),
        ),
        drives=_drives([Path(each) for each in directories]) if directories else DrivesConfig(),
    )  # fmt: skip


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


def _copy_bytes_per_s(device: torch.device) -> float:
    source = torch.ones(_COPIED_NBYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_NBYTES / _best_s(lambda: target.copy_(source), device)


def _update_bytes_per_s() -> float:
    """Return the bytes that one core reads and writes per second in an update of weights and state."""
    dtype, device, arithmetic = torch.bfloat16, torch.device("cpu"), default_rule()
    rule, hyper = HostRule(arithmetic, dtype, threads=1), arithmetic.hyper(IDLE)
    layout = rule.layout
    weight, grad = (torch.zeros(_UPDATED_NUMEL, dtype=dtype, device=device) for _ in range(2))
    memory = torch.zeros(layout.state_nbytes(_UPDATED_NUMEL), dtype=torch.uint8, device=device)
    state = layout.views(memory, _UPDATED_NUMEL)
    best_s = _best_s(lambda: rule.update(weight, grad, state, weight, hyper), device)
    moved = 2 * (layout.weight_nbytes(1) + layout.state_nbytes(1)) + dtype.itemsize
    return _UPDATED_NUMEL * moved / best_s


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of some runs; the first one may compile."""
    times_s = []
    for _ in range(_TRIES + 1):
        synchronize(device)
        began_s = time.perf_counter()
        run()
        synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)
