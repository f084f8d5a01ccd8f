"""Systems that divide a model over devices, by the formulas of their papers: bytes of each device, and time.

    python benchmarks/divided.py [--quick] [--on hgx-h100] [--params 70e9]

P parameters in bf16 with Adam in fp32 (2 bytes of weight, 2 of gradient, 12 of states), N devices of one
node, blocks recomputed (4 x 2 P operations a token). A row's time is its compute with its bubble, or its
slowest channel if that is longer, and what its rule leaves after both. Formulas are those of the papers, so a
row says what a rule moves, not what a release of the system does.

Sources: ZeRO (arXiv:1910.02054), ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857), GPipe
(arXiv:1811.06965), PipeDream-2BW and 1F1B (arXiv:2006.09503), and the survey's row for pipelines. Harmony
(VLDB 2022), Mobius (ASPLOS 2023) and RoundPipe (arXiv:2604.27085) are known here from abstracts: weights in
host memory go up once for each pass over all micro-batches, gradients down once; RoundPipe has no bubble.
"""

import argparse
from dataclasses import dataclass, replace

from report import print_table

from infinity.predict.machines import Machine, load_machine

LAYERS, HIDDEN, TOKENS = 80, 8192, 4096
#: Micro-batches of a step for each device: of data parallelism, and of a pipeline for each of its stages.
MICRO = 4


@dataclass(frozen=True)
class System:
    """What one device of ``N`` holds and moves in a step, in bytes.

    Attributes:
        bubble: Time without work by the time of the work.
        after_s: Seconds that nothing hides.
    """

    name: str
    device: float
    host: float = 0.0
    links: float = 0.0
    up_and_down: float = 0.0
    drive: float = 0.0
    bubble: float = 0.0
    after_s: float = 0.0
    formula: str = ""


def systems(params: float, devices: int, machine: Machine) -> list[System]:
    """Return the systems, for a step of ``MICRO`` micro-batches a device."""
    p, n, layer = params, devices, params / LAYERS
    checkpoints = 2.0 * TOKENS * HIDDEN * LAYERS  # of a micro-batch in all blocks
    pipe, micros = checkpoints / n, MICRO * n
    sent = 2.0 * 2 * TOKENS * HIDDEN * micros  # of a stage, both ways
    bubble = (n - 1) / micros
    # What the host's cores read and write of states, gradients and weights after backward.
    update_s = (12 + 12 + 2 + 2) * p / n / (machine.host.bytes_per_s / n)
    shown = (12 + 2) * p / n
    once, again = 2 * p / n, MICRO * 2 * p  # gathered or reduced in each micro-batch
    up = 2 * once + once  # weights up in forward and backward, gradients down
    data = [
        System("data parallel", 16 * p, links=4 * p, formula="16 P; all-reduce of 2 P"),
        System("ZeRO-1", 4 * p + 12 * p / n, links=4 * p, formula="4 P + 12 P / N"),
        System("ZeRO-2", 2 * p + 14 * p / n, links=2 * p + again, formula="2 P + 14 P / N"),
        System("ZeRO-3", 16 * p / n + 4 * layer, links=3 * again, formula="16 P / N; 3 x 2 P a micro-batch"),
        System(
            *("ZeRO-Offload", 2 * p + 2 * layer, shown, 2 * p + again, once * (1 + MICRO)),
            after_s=update_s,
            formula="2 P; updates on the host after backward",
        ),
        System(
            *("ZeRO-Infinity", 4 * layer, 4 * layer, 3 * again, up * MICRO, 38 * p / n),
            formula="20 P / N read, 18 P / N written",
        ),
    ]
    kept = [replace(system, device=system.device + checkpoints) for system in data]
    pipes = [
        System("GPipe", 16 * p / n + micros * pipe, links=sent, bubble=bubble, formula="16 P / N"),
        System("1F1B", 16 * p / n + n * pipe, links=sent, bubble=bubble, formula="16 P / N; N inputs"),
        System("PipeDream-2BW", 18 * p / n + n * pipe, links=sent, formula="18 P / N; no flush"),
    ]
    hosted = [
        System(*(name, 4 * layer + inputs * pipe, 16 * p / n, sent, up, 0.0, idle, after), formula=formula)
        for name, inputs, idle, after, formula in (
            ("Harmony", micros, bubble, update_s, "16 P / N on the host; grouped by layers"),
            ("Mobius", n, bubble, update_s, "16 P / N on the host; stages in turn"),
            ("RoundPipe", n, 0.0, 0.0, "16 P / N on the host; stages to whoever is free"),
        )
    ]
    own = System(
        *("infinity", 4 * layer + MICRO * checkpoints, 4 * layer, 6 * p, up, 26 * p / n),
        formula="14 P / N read, 12 P / N written; layer schedule",
    )
    return [*kept, *pipes, *hosted, own]


def step_s(system: System, params: float, devices: int, machine: Machine) -> tuple[float, str]:
    """Return the seconds of a step, and what binds it."""
    flops = machine.devices.flops_per_s(machine.choose_dtype())
    links, drives = machine.links, machine.drives
    mixed = drives.mixed_bytes_per_s or (drives.read_bytes_per_s + drives.write_bytes_per_s) / 2
    times = {
        "compute": 8 * params * TOKENS * MICRO / flops * (1 + system.bubble),
        "links": system.links / (links.device_bytes_per_s or links.host_bytes_per_s or 1.0),
        "host link": system.up_and_down / (links.host_bytes_per_s or 1.0),
        "drives": system.drive / (mixed * max(1, drives.per_node) / devices),
    }
    binds = max(times, key=lambda name: times[name])
    return times[binds] + system.after_s, binds


def rows(params: float, machine: Machine) -> list[list[str]]:
    devices = machine.devices.per_node
    found = []
    for system in systems(params, devices, machine):
        seconds, binds = step_s(system, params, devices, machine)
        fits = "yes" if system.device <= (machine.devices.memory or 0) else "no"
        moved = (system.host, system.links, system.up_and_down, system.drive)
        sizes = [f"{nbytes / 1e9:.1f}" if nbytes else "" for nbytes in moved]
        found.append(
            [system.name, f"{system.device / 1e9:.1f}", fits, *sizes, f"{seconds:.1f}", binds, system.formula]
        )
    return found


COLUMNS = (
    *("system", "device GB", "fits", "host GB", "links GB", "host link GB", "drive GB", "step s"),
    *("bound by", "formula"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--on", default="hgx-h100", help="a hardware file")
    parser.add_argument("--params", type=float, default=70e9)
    options = parser.parse_args()
    machine = load_machine(options.on)
    print(f"{options.params / 1e9:.0f} B parameters on {machine.nodes.name}: bytes of one device in a step")
    print_table(COLUMNS, rows(options.params, machine))


if __name__ == "__main__":
    main()
