"""Hardware files: those that are shipped, and ``infinity probe``, which writes one of this machine."""

import difflib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from infinity.core.errors import RecipeError
from infinity.core.files import is_file, user_path, write_file
from infinity.core.nbytes import format_nbytes
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
    """Names of the hardware files that are shipped."""
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
    """Measure this machine in some seconds: what computes, host memory, and the drives of ``directories``.

    Raises:
        DirectoryError: A directory cannot be written.
        DiskError: A file system is full, or a drive reports an error.
    """
    import torch

    from infinity.comm.ranks import measure_exchange
    from infinity.device.machine import total_host_nbytes, usable_cores
    from infinity.nvme.probe import measure

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
            devices, links = _accelerators(device)
        rates: dict[str, Any] = {
            name: _flops_per_s(getattr(torch, dtype), device) for name, dtype in _DTYPES.items()
        }
    finally:
        torch.set_num_threads(threads)
    drives = DrivesConfig()
    if directories:
        speeds = [measure(Path(directory), both=True) for directory in directories]
        free = [_free_nbytes(Path(directory)) for directory in directories]
        n = len(speeds)
        drives = DrivesConfig(
            per_node=n,
            name=", ".join(map(str, directories)),
            memory=min(free),
            read_bytes_per_s=_rounded(sum(speed.read_bytes_per_s for speed in speeds) / n),
            write_bytes_per_s=_rounded(sum(speed.write_bytes_per_s for speed in speeds) / n),
            mixed_bytes_per_s=_rounded(
                sum(speed.both_bytes_per_s or speed.mixed_bytes_per_s for speed in speeds) / n
            ),
            core_s_per_byte=_rounded(sum(speed.processor_s_per_byte for speed in speeds) / n),
        )
    host = HostConfig(
        cores=cores, memory=total_host_nbytes(), bytes_per_s=_rounded(host_bytes_per_s),
        core_bytes_per_s=_rounded(_update_bytes_per_s()),
    )  # fmt: skip
    return Machine(
        nodes=NodesConfig(name="this machine"), devices=replace(devices, **rates), links=links, host=host,
        drives=drives,
    )  # fmt: skip


_DTYPES = {"bf16_flops_per_s": "bfloat16", "fp16_flops_per_s": "float16", "fp32_flops_per_s": "float32"}


def write_machine(machine: Machine, path: Path) -> None:
    """Write a hardware file, which :func:`load_machine` reads back to an equal machine."""
    import yaml  # type: ignore[import-untyped]

    given: dict[str, Any] = asdict(machine)
    text = "".join(
        f"{section}:\n" + "".join(f"  {key}: {_text(value, yaml)}\n" for key, value in values.items())
        for section, values in given.items()
    )
    made = time.strftime("%Y-%m-%d")
    write_file(path, f"# Measured by infinity probe on {made}; see docs/planning.md.\n{text}")


def describe_machine(machine: Machine) -> str:
    """Return a line about what computes, the memory and the drives."""
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


def _text(value: Any, yaml: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("...\n").strip()


def _rounded(number: float) -> float:
    """Three digits: a measurement has no more."""
    return float(f"{number:.3g}")


def _flops_per_s(dtype: Any, device: Any) -> float:
    """Flops per second of matrix products, the best of a few; slow dtypes are measured at small sizes."""
    from infinity.device.machine import multiply_s

    best = 0.0
    for size in _SIZES:  # on a busy machine a small product takes milliseconds, whatever it computes
        if best and 2 * size**3 / best > _MOST_S:
            break
        best = max(best, 2 * size**3 / min(multiply_s(dtype, size, device) for _ in range(_TRIES)))
    return _rounded(best)


def _copy_bytes_per_s(device: Any) -> float:
    """Bytes read and written per second by large copies."""
    import torch

    from infinity.device.accelerator import synchronize

    source = torch.ones(_COPIED_NBYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_TRIES + 1):
        synchronize(device)
        began_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _COPIED_NBYTES / best_s


def _update_bytes_per_s() -> float:
    """Bytes that one core reads and writes per second in an update: of weights, gradient and state."""
    import torch

    from infinity.optim.rules import IDLE, HostRule, default_rule

    dtype = torch.bfloat16
    arithmetic = default_rule()
    rule, hyper = HostRule(arithmetic, dtype, threads=1), arithmetic.hyper(IDLE)
    layout = rule.layout
    weight, grad = (torch.zeros(_UPDATED_NUMEL, dtype=dtype, device="cpu") for _ in range(2))
    memory = torch.zeros(layout.state_nbytes(_UPDATED_NUMEL), dtype=torch.uint8, device="cpu")
    state = layout.views(memory, _UPDATED_NUMEL)
    best_s = float("inf")
    for _ in range(_TRIES + 1):  # the first compiles
        began_s = time.perf_counter()
        rule.update(weight, grad, state, weight, hyper)
        best_s = min(best_s, time.perf_counter() - began_s)
    moved = 2 * (layout.weight_nbytes(1) + layout.state_nbytes(1)) + dtype.itemsize
    return _UPDATED_NUMEL * moved / best_s


def _accelerators(device: Any) -> tuple[DevicesConfig, LinksConfig]:
    import torch

    from infinity.activations.store import measure_hardware
    from infinity.device.accelerator import memory_nbytes, name_of

    link = measure_hardware(device, (), 0).host_bytes_per_s
    devices = DevicesConfig(
        per_node=torch.accelerator.device_count(),
        name=name_of(device),
        memory=memory_nbytes(device)[1],
        memory_bytes_per_s=_rounded(_copy_bytes_per_s(device)),
        efficiency=0.95,  # the figures are reached ones
    )
    return devices, LinksConfig(host_bytes_per_s=_rounded(link))


def _free_nbytes(directory: Path) -> int:
    import shutil

    return shutil.disk_usage(directory).free
