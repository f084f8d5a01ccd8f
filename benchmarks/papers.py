"""The tables of the papers beside what the planner says for their hardware.

    python benchmarks/papers.py [--quick] [--json FILE]

Nothing is trained. Models are the built-in GPT with 12 x hidden^2 parameters a layer, all layers of it. Where
a figure is not met, a line under the table says why, with a figure that follows if the reason is taken away.

Sources: ZeRO-Infinity (arXiv:2104.07857): figures 2a, 2b, 3, 5 and 6, table 1; TeraIO (arXiv:2506.06472);
SSDTrain (arXiv:2408.10013); SuperOffload (arXiv:2509.21271).
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from report import Claim, print_table, write_json

from infinity.core.errors import BudgetError
from infinity.predict.dry_run import DryRun, Layout, dry_run, model_for
from infinity.predict.machines import HEADER_S, load_machine
from infinity.predict.play import play_step
from infinity.predict.step import COMPUTE, StepCost
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe

TIB, GIB, K = 2**40, 2**30, 1024
#: Figures within these shares of the papers' are met.
MEMORY, THROUGHPUT = 0.02, 0.15
#: ZeRO-Infinity, figure 2a: parameters (T), layers, hidden, heads; states (TB), weights and activations (GB).
FIGURE_2A = [
    (0.1, 80, 10 * K, 128, 1.83, 1.95, 1.63),
    (0.5, 100, 20 * K, 160, 9.16, 6.25, 2.50),
    (1, 128, 25 * K, 256, 18.31, 9.77, 3.56),
    (10, 195, 64 * K, 512, 182.81, 64, 8),
    (101, 315, 160 * K, 1024, 1845.70, 400, 18),
]


@dataclass(frozen=True)
class Planned:
    """A planned step.

    Attributes:
        lacks: What does not fit; the step was then planned on a device with more memory.
    """

    run: DryRun
    cost: StepCost
    lacks: str = ""

    @property
    def flops(self) -> float:
        """Of a step on one rank, with recomputation, as ZeRO-Infinity counts them."""
        return float(self.run.trace.flops.sum())

    @property
    def tflops(self) -> float:
        """Tflop/s of one rank."""
        return self.flops / self.cost.step_s / 1e12

    @property
    def serial_tflops(self) -> float:
        """Likewise if nothing ran beside anything else."""
        return self.flops / sum(self.cost.busy_s.values()) / 1e12

    @property
    def needs(self) -> str:
        """GiB that units and activations take of a device."""
        return f"{self.run.division.total / GIB:.0f} + {self.run.trace.peak_nbytes / GIB:.0f}"

    @property
    def ideal(self) -> float:
        """Share of the step with all states in device memory."""
        return self.cost.busy_s[COMPUTE] / self.cost.step_s


def recipe_of(
    layers: int, hidden: int, heads: int, batch: int, *more: str, seq: int = 1024, home: str = "nvme"
) -> Recipe:
    """Return the recipe of a GPT of ``layers`` layers, whose states are all on NVMe or all in host memory."""
    return load_recipe(None, [
        f"model.n_layers={layers}", f"model.d_model={hidden}", f"model.n_heads={heads}",
        f"model.seq_len={seq}", f"train.batch_size={batch}", "train.dtype=fp16",
        "memory.activations=recompute", "memory.nvme=[nvme]",
        f"memory.resident={str(home == 'host').lower()}", *more,
    ])  # fmt: skip


#: The last plan of each model and number of ranks: it is recorded once.
_PLANNED: dict[tuple[int, ...], DryRun] = {}


@cache
def plan(
    on: str, ranks: int, layers: int, hidden: int, heads: int, batch: int, *more: str,
    hardware: tuple[str, ...] = (), seq: int = 1024, home: str = "nvme",
) -> Planned:  # fmt: skip
    """Plan the GPT of :func:`recipe_of`."""
    recipe = recipe_of(layers, hidden, heads, batch, *more, seq=seq, home=home)
    machine, lacks, model = load_machine(on, hardware).with_ranks(ranks), "", (ranks, layers, hidden, heads)
    try:
        run = dry_run(recipe, machine, ranks, _PLANNED.get(model))
    except BudgetError as error:
        lacks = str(error).partition(". ")[0]
        roomy = load_machine(on, (*hardware, "devices.memory=4TiB", "host.memory=64TiB"))
        run = dry_run(recipe, roomy.with_ranks(ranks), ranks)
    _PLANNED[model] = run
    need, device = run.division.total + run.trace.peak_nbytes, machine.devices.memory or 0
    if not lacks and need > device:
        lacks = f"{need / GIB:.0f} GiB of device memory"
    return Planned(run, play_step(run.trace, run.setup), lacks)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()
) -> None:
    """Print a table, and under it what there is to say about rows."""
    print(f"\n{title}\n")
    print_table(columns, [[str(cell) for cell in row] for row in rows])
    for at, note in enumerate(notes):
        print("" if at else "\n", end="")
        print(textwrap.fill(note, 110, initial_indent="- ", subsequent_indent="  "))


def off(planned: float, paper: float) -> str:
    return f"{100 * (planned / paper - 1):+.1f}%"


def met(planned: float, paper: float, within: float = THROUGHPUT) -> bool:
    return abs(planned / paper - 1) < within


def memory(quick: bool) -> Iterator[Claim]:
    """Figure 2a: bytes of model states, and working memory."""
    rows = []
    for size, layers, hidden, heads, states, weights, activations in FIGURE_2A[: 2 if quick else None]:
        recipe, machine = recipe_of(layers, hidden, heads, 4), load_machine("dgx-2").with_ranks(16)
        units = Layout(model_for(recipe, machine, 16), recipe, machine).placed
        params = sum(unit.params for unit in units)
        ours = 20 * params / TIB
        operator = 16 * hidden**2 / GIB
        block = 4 * 1024 * (16 * hidden + 2 * heads * 1024) / GIB
        versions = 12 * params / TIB
        largest = max(unit.nbytes for unit in units) / GIB
        rows.append([
            f"{size} T", f"{states:,.2f}", f"{ours:,.2f}", off(ours, states), f"{versions:,.2f}",
            weights, f"{operator:.3g}", off(operator, weights), f"{2 * largest:.3g}",
            activations, f"{block:.3g}", off(block, activations),
        ])  # fmt: skip
        for name, value, paper, digits in (
            ("states, TB", ours, states, ",.2f"),
            ("largest operator, GB", operator, weights, ".3g"),
            ("activations of a block, GB", block, activations, ".3g"),
        ):
            yield Claim(
                f"{size} T, {name}",
                float(format(value, digits).replace(",", "")),
                paper,
                "",
                met(value, paper, MEMORY),
            )
    hd = (1.95 * GIB / 16) ** 0.5 / K
    notes = [
        (
            "0.1 T, operator: the paper's 1.95 is not 4 hd x 4 hd bytes, as its other rows are; for that hd "
            f"would be {hd:.1f} K."
        ),
        (
            "Our unit + grad: the feed-forward layer of the built-in GPT is gated. Its unit has 8 hd^2 "
            "parameters, or those of a tile; two bytes each, and as much for the gradient."
        ),
    ]
    table(
        "ZeRO-Infinity, figure 2a: memory (TB = TiB and GB = GiB, as the paper counts)",
        ["model", "states TB", "20 B/param", "off", "ours, 12 B", "operator GB", "16 hd^2", "off",
         "our unit + grad", "block GB", "formula", "off"],
        rows, notes,
    )  # fmt: skip


#: Table 1: nodes, parameters, hidden, layers, heads, batch per GPU, home, Tflop/s per GPU in the text.
TABLE_1 = [
    (1, "10 B", 4 * K, 50, 16, 8, "host", 40),
    (1, "50 B", 8 * K, 62, 32, 26, "host", 40),
    (1, "100 B", 8 * K, 125, 32, 24, "nvme", 40),
    (32, "1 T", 25 * K, 128, 256, 5, "host", 49),
    (32, "5 T", 48 * K, 174, 512, 3, "nvme", 49),
    (32, "10 T", 64 * K, 200, 512, 2, "nvme", 43),
    (32, "20 T", 88 * K, 205, 1024, 1, "nvme", 34),
]


def throughput(quick: bool) -> Iterator[Claim]:
    """Figures 5a and 6a: Tflop/s per GPU."""
    rows, notes, large = [], [], []
    for nodes, size, hidden, layers, heads, batch, home, paper in TABLE_1[: 2 if quick else None]:
        found = plan("dgx-2", 16 * nodes, layers, hidden, heads, batch, home=home)
        lower = nodes == 1
        name = f"{size}, {nodes} node{'s' if nodes > 1 else ''}"
        rows.append([
            name, home, batch, f"{'>' if lower else ''}{paper}", f"{found.tflops:.1f}",
            off(found.tflops, paper), found.cost.bottleneck, f"{found.ideal:.0%}",
            f"{found.serial_tflops:.1f}", found.needs, "no" if found.lacks else "yes",
        ])  # fmt: skip
        if not met(found.tflops, paper) and not lower:
            notes.append(f"{name}: {why(found, paper)}.")
        if found.lacks:
            large.append(found)
        holds = found.tflops > (1 - THROUGHPUT) * paper if lower else met(found.tflops, paper)
        yield Claim(f"Tflop/s, {name}{', at least' if lower else ''}", found.tflops, paper, "Tflop/s", holds)
    table(
        "ZeRO-Infinity, table 1 and figures 5 and 6: Tflop/s per V100 (of one node the text says: over 40)",
        ["model", "states", "batch", "paper", "planned", "off", "bottleneck", "of ideal", "serial",
         "GiB of 32", "fits"],
        rows,
        [
            "Serial: Tflop/s if nothing ran beside anything else. GiB: of units + activations.",
            *notes,
            *([relief(large)] if large else []),
        ],
    )  # fmt: skip


def why(found: Planned, paper: float) -> str:
    """Why a throughput is not met, with what follows if the reason is taken away."""
    cost, serial = found.cost, found.serial_tflops
    busy = f"{cost.bottleneck} {'are' if cost.bottleneck == 'links' else 'is'} busy for"
    share = cost.busy_s[cost.bottleneck] / cost.step_s
    if found.tflops > paper:
        between = f"the paper's figure lies between the plan's and {serial:.0f}, with nothing overlapped"
        above = f"with nothing overlapped it would be {serial:.0f} still"
        return f"{busy} {share:.0%} of the step; " + (between if serial < paper else above)
    return f"{busy} {share:.0%} of the step"


def relief(found: Sequence[Planned]) -> str:
    """What would make room in plans that do not fit, and what that costs."""
    inputs = [
        2 * f.run.recipe.model.n_layers * f.run.trace.tokens * f.run.recipe.model.d_model for f in found
    ]
    shares = [
        2 * nbytes / f.run.rates.channels.host_bytes_per_s / f.cost.step_s
        for nbytes, f in zip(inputs, found, strict=True)
    ]
    return (
        "What does not fit is planned as if it did. Of the activations, inputs of blocks are "
        f"{min(inputs) / GIB:.0f} to {max(inputs) / GIB:.0f} GiB: memory.activations=plan sends them to host "
        f"memory and back, which takes {min(shares):.1%} to {max(shares):.0%} of a step beside compute. "
        "Weights that a device can hold with their gradient and update are not in tiles, and a block that is "
        "recomputed has all of its weights there: smaller tiles (partition.tile=1GiB) leave more room."
    )


def scaling(quick: bool) -> Iterator[Claim]:
    """Figure 5b: 1 T from 4 to 32 nodes."""
    rows, each, notes = [], [], []
    for nodes in (4,) if quick else (4, 8, 16, 32):
        found = plan("dgx-2", 16 * nodes, 128, 25 * K, 256, 5)
        each.append(found)
        rows.append([
            nodes, 16 * nodes, 44 if nodes == 4 else "", f"{found.tflops:.1f}",
            f"{found.tflops * 16 * nodes / 1e3:.2f}", found.cost.bottleneck, f"{found.ideal:.0%}",
            f"{found.serial_tflops:.1f}",
        ])  # fmt: skip
    first, last = each[0], each[-1]
    if not met(first.tflops, 44):
        notes.append(f"4 nodes: {why(first, 44)}.")
    yield Claim("Tflop/s per GPU, 1 T on 4 nodes", first.tflops, 44, "Tflop/s", met(first.tflops, 44))
    if len(each) > 1:
        grows = last.serial_tflops / first.serial_tflops
        notes.append(
            f"Superlinear in the paper, since each rank's part of the states shrinks: from 4 to 32 nodes the "
            f"plan's figure changes by {off(last.tflops, first.tflops)}, as there is little left that is not "
            f"overlapped; with nothing overlapped it would by {off(last.serial_tflops, first.serial_tflops)}."
        )
        yield Claim("weak scaling of 1 T, nothing overlapped, 32 nodes / 4 nodes", grows, 1.0, "x", grows > 1)
    table(
        "ZeRO-Infinity, figure 5b: weak scaling of 1 T (the paper: superlinear)",
        ["nodes", "GPUs", "paper", "Tflop/s a GPU", "Pflop/s", "bottleneck", "of ideal", "serial"],
        rows,
        notes,
    )


def efficiency(quick: bool) -> Iterator[Claim]:
    """Figure 3: efficiency by the bandwidth between weights and device."""
    rows, ratios = [], []
    for bandwidth in (70,) if quick else (10, 30, 70, 200):
        for batch in (1, 4):
            hardware = (
                f"links.node_host_bytes_per_s={bandwidth}e9", f"links.host_bytes_per_s={bandwidth}e9",
                "host.memory=64TiB", "host.bytes_per_s=1e15", "host.core_bytes_per_s=1e15",
            )  # fmt: skip
            found = plan("dgx-2", 1, 40, 8 * K, 64, batch, hardware=hardware, home="host")
            intensity = 1024 * batch
            formula = intensity * bandwidth * 1e9 / (intensity * bandwidth * 1e9 + 70e12)
            ratios.append(found.ideal / formula)
            rows.append([bandwidth, batch, f"{formula:.0%}", f"{found.ideal:.0%}"])
    least = min(ratios)
    yield Claim(
        "efficiency / the paper's formula, which overlaps nothing, at least", least, 1.0, "x", least > 0.97
    )
    table(
        "ZeRO-Infinity, figure 3a: efficiency by bandwidth to weights and gradients in host memory, one V100",
        ["GB/s", "batch", "paper's formula", "planned, overlapped"], rows,
    )  # fmt: skip


def future(quick: bool) -> Iterator[Claim]:
    """Table 3: 512 devices that are 10 and 100 times as fast; to record their model takes minutes."""
    rows, each, notes = [], [], []
    for times in () if quick else (1, 10, 100):
        hardware = (
            f"devices.fp16_flops_per_s={125e12 * times}", f"devices.memory_bytes_per_s={900e9 * times}",
            f"devices.operator_s={5e-6 / times}", f"links.host_bytes_per_s={3e9 * times}",
            f"links.node_host_bytes_per_s={48e9 * times}", f"links.device_bytes_per_s={70e9 * times}",
            f"links.network_bytes_per_s={1120e9 * times}", f"drives.read_bytes_per_s={6e9 * times}",
            f"drives.write_bytes_per_s={6e9 * times}", f"host.bytes_per_s={256e9 * times}",
            f"host.core_bytes_per_s={8e9 * times}",
        )  # fmt: skip
        found = plan("dgx-2", 512, 200, 64 * K, 512, 2, hardware=hardware, home="host")
        each.append(found.ideal)
        rows.append([f"{times} x V100", f"{found.tflops:,.1f}", f"{found.ideal:.0%}", found.cost.bottleneck])
        reductions = found.run.micro_batches * sum(unit.trainable for unit in found.run.units)
        share = 511 * HEADER_S * reductions / found.cost.step_s
        notes.append(
            f"{times} x V100: 512 ranks agree on {reductions:,} reductions, {1e6 * HEADER_S:.0f} us each for "
            f"every other rank at any speed: {share:.0%} of the step"
        )
    if quick:
        return
    kept = min(each) / each[0]
    yield Claim(
        "efficiency on 10 and 100 times faster devices / on V100, at least", kept, 0.95, "x", kept > 0.95
    )
    table(
        "ZeRO-Infinity, table 3: 512 future devices, slow memory 3, 30, 300 GB/s per device (10 T)",
        ["device", "Tflop/s", "of ideal", "bottleneck"], rows, notes,
    )  # fmt: skip


def others(quick: bool) -> Iterator[Claim]:
    """TeraIO, SSDTrain and SuperOffload."""
    rows, notes = [], []
    # 2 H100, 4 drives each, 16 GB/s per device and direction
    two = (
        "drives.per_node=8",
        "drives.read_bytes_per_s=4e9",
        "drives.write_bytes_per_s=4e9",
        "drives.mixed_bytes_per_s=6e9",
    )
    for name, layers, hidden, heads, paper in (
        ("8 B", 32, 4 * K, 32, 0.95), ("70 B", 80, 8 * K, 64, 0.597),
    )[: 1 if quick else None]:  # fmt: skip
        shares = {}
        for batch in (8, 32):
            found = plan("hgx-h100", 2, layers, hidden, heads, batch, hardware=two, seq=2048)
            shares[batch] = found.ideal
            rows.append([
                f"TeraIO {name}, 2 H100, batch {batch}", "share of ideal", f"{paper:.0%}",
                f"{found.ideal:.0%}", found.cost.bottleneck,
            ])  # fmt: skip
        notes.append(
            f"TeraIO {name}: compute grows with the batch, which the text of the paper lacks, and "
            f"transfers do not. At {shares[8] / 8:.1%} of the ideal for each sequence of 2,048 tokens, "
            f"{paper:.0%} is a batch of {8 * paper / shares[8]:.0f}."
        )
        best = max(shares.values())
        yield Claim(
            f"TeraIO {name}: share of the ideal step, at least",
            best,
            paper,
            "",
            best >= (1 - THROUGHPUT) * paper,
        )
    # SSDTrain: what a step saves leaves within half of it, and the drives last three years
    layers, hidden, batch = 40, 16 * K, 16
    found = plan(
        "dgx-a100",
        8,
        layers,
        hidden,
        128,
        batch,
        "memory.activations=keep",
        hardware=("devices.memory=4TiB",),
    )
    saved = sum(slot.nbytes for slot in found.run.profile.slots if slot.key.region % 2)
    each = saved / (layers * found.run.trace.tokens * hidden)
    bandwidth = saved / (found.cost.busy_s[COMPUTE] / 2)
    # 12.8 TB, 50 drive writes a day for 5 years; sequential writes wear 2.5 times less
    endurance = 4 * 12.8e12 * 50 * 5 * 365.25 * 2.5
    life_years = endurance / saved * found.cost.step_s / (365.25 * 86_400)
    figures = f"{bandwidth / 1e9:.1f}, {life_years:.1f}"
    rows.append(["SSDTrain, A100, 4 x D7-P5810", "GB/s, years", "<= 12.1, > 3", figures, ""])
    notes.append(
        f"SSDTrain: a layer of the built-in GPT saves {each:.0f} bytes for each token and hidden element. Of "
        f"Megatron's GPT, without the matrix of attention, they are 34 (arXiv:2205.05198, section 4.1): "
        f"{bandwidth * 34 / each / 1e9:.1f} GB/s."
    )
    yield Claim(
        "SSDTrain: write bandwidth per A100, at most", bandwidth / 1e9, 12.1, "GB/s",
        bandwidth <= (1 + THROUGHPUT) * 12.1e9,
    )  # fmt: skip
    yield Claim("SSDTrain: life of four drives, at least", life_years, 3, "years", life_years > 3)
    if not quick:
        found = plan("gh200", 1, 44, 3 * K, 24, 8, "optim.max_grad_norm=null", home="host", seq=2048)
        rows.append(
            ["SuperOffload 5 B, GH200", "Tflop/s", "239", f"{found.tflops:.0f}", found.cost.bottleneck]
        )
        devices = found.run.machine.devices
        peak = (devices.fp16_flops_per_s or 0) / 1e12
        model = found.run.trace.model_flops / found.cost.step_s / 1e12
        notes.append(
            f"SuperOffload: 239 is {239 / peak:.0%} of the device's {peak:.0f} Tflop/s. Plain PyTorch "
            "with all states on an H100 reached 27 % with 1.2 B parameters (gpu.md), without recomputation: "
            f"{0.27 * peak:.0f}. The plan takes {devices.efficiency:.0%} for large products "
            f"and nothing for launches and casts: {model:.0f}, or {found.tflops:.0f} with recomputation."
        )
        yield Claim("SuperOffload 5 B: Tflop/s", found.tflops, 239, "Tflop/s", met(found.tflops, 239))
    table("TeraIO, SSDTrain, SuperOffload", ["what", "figure", "paper", "planned", "bottleneck"], rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a row or two of each table")
    parser.add_argument("--json", type=Path, help="write claims")
    args = parser.parse_args()
    claims = [
        claim
        for part in (memory, throughput, scaling, efficiency, future, others)
        for claim in part(args.quick)
    ]
    print()
    print_table(
        ["claim", "planned", "paper", "holds"],
        [
            [claim.claim, f"{claim.value:,.4g}", f"{claim.target:,.6g}", "yes" if claim.holds else "NO"]
            for claim in claims
        ],
    )
    if args.json is not None:
        write_json(args.json, claims)


if __name__ == "__main__":
    main()
