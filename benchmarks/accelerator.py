"""The step of one accelerator over its limit, for eight shapes of machine: real threads, simulated durations.

    python benchmarks/accelerator.py [--quick] [--json FILE] [--picture FILE.png] [--only NAME] [--seconds 2]

A model trains on the simulated accelerator of ``tests/accelerator``, whose kernels, copies, updates on cores
and requests to drives last as long as a machine of that shape would take (``tests/accelerator/pace.py``). The
limit is the largest of what compute, the link each way, the cores and the drives take for what they do in
the step. Shapes are ratios: of each resource the seconds that it is busy, beside the largest one's. Losses
and weights are compared bit by bit with those of a run that nothing paces.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from options import Options, say
from report import Claim, print_claims, print_table

HOST = ("memory.host=1GiB", "memory.device=12MiB")
NVME = ("memory.nvme=[{folder}]", "memory.host=32MiB", "memory.device=12MiB", "memory.resident=false",
        "memory.engine=threads")  # fmt: skip
WIDTH, BLOCKS, TOKENS, WARM, STEPS = 128, 32, 16, 3, 2
MOST = 1.10


@dataclass(frozen=True)
class Shape:
    """Seconds that each resource takes, as shares of the longest: compute, link each way, cores, drives."""

    name: str
    place: tuple[str, ...]
    compute: float
    link: float
    cores: float
    drives: float = 0.0


SHAPES = (
    Shape("compute binds", HOST, 1.0, 0.3, 0.2),
    Shape("compute and link", HOST, 1.0, 1.0, 0.2),
    Shape("link binds", HOST, 0.4, 1.0, 0.2),
    Shape("cores bind", HOST, 0.4, 0.3, 1.0),
    Shape("all but drives", HOST, 1.0, 1.0, 1.0),
    Shape("drives, compute binds", NVME, 1.0, 0.3, 0.2, 0.5),
    Shape("drives and compute", NVME, 1.0, 0.3, 0.2, 1.0),
    Shape("drives bind", NVME, 0.4, 0.3, 0.2, 1.0),
)


def settle(runtime: Any) -> None:
    """Wait until nothing of a step is under way: updates, and the uploads that follow them."""
    runtime.synchronize()
    runtime.executor().mover.staging.wait_for_uploads()


def train(shape: Shape, seconds: float, folder: str) -> dict[str, Any]:
    """Train on the simulated accelerator; ``seconds`` of the longest resource, 0: nothing lasts."""
    import torch
    from torch import nn

    import infinity
    from tests.accelerator import device, pace
    from tests.accelerator.simulator import Schedule
    from tests.helpers import training

    simulator = device.start()
    eager: Schedule = "eager"
    simulator.reset(eager)
    simulator._check = lambda *_: None  # races are the tests' concern, and take the host's time
    paced = pace.Pace()
    pace.install(paced)
    torch.manual_seed(3)
    on = torch.device("sim", 0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    overrides = [each.format(folder=folder) for each in shape.place]
    with training.small_units(), infinity.Init(training.recipe("bf16", overrides)):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = infinity.AdamW(model, lr=1e-3)
    sha, times, spans, done = hashlib.sha256(), list[float](), list[Any](), {}
    for step in range(WARM + 1 + STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().to(on)
        if step == WARM and seconds:
            rates = {pace.COMPUTE: shape.compute, pace.UP: shape.link, pace.DOWN: shape.link,
                     pace.CORES: shape.cores, pace.READ: shape.drives, pace.WRITE: shape.drives}  # fmt: skip
            paced.rates = {
                name: done[name] / (share * seconds)
                for name, share in rates.items()
                if share and done.get(name)
            }
        if step == WARM - 1:  # of this step is counted all that it does, and nothing else
            settle(optimizer.runtime)
        if not times:
            paced.clear()
        began_s = time.perf_counter()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM - 1:
            settle(optimizer.runtime)
            done = dict(paced.done)
        if step > WARM:
            times.append(time.perf_counter() - began_s)
            spans.append((began_s, began_s + times[-1]))
        sha.update(repr(loss.item()).encode())
    began_s, ended_s = spans[0][0], spans[-1][1]
    busy = {name: sum(max(0.0, min(b, ended_s) - max(a, began_s)) for a, b in each) / STEPS
            for name, each in paced.busy.items()}  # fmt: skip
    timeline = {name: [(a - began_s, b - began_s) for a, b in each] for name, each in paced.busy.items()}
    for name, values in sorted(infinity.state_dict(model).items()):
        sha.update(name.encode() + values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    optimizer.close()
    return {"step_s": (ended_s - began_s) / STEPS, "busy_s": busy, "bits": sha.hexdigest(),
            "timeline": timeline, "spans": [(a - began_s, b - began_s) for a, b in spans]}  # fmt: skip


def run(shape: Shape, seconds: float) -> dict[str, Any]:
    """Train in a process of its own."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        given = json.dumps([asdict(shape), seconds, folder, str(out)])
        command = [sys.executable, __file__, given]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"})
        return dict(json.loads(out.read_text(encoding="utf-8")))


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw when each resource is busy in one step of each shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.5 * len(found) + 0.5), layout="constrained")
    for axes, (name, each) in zip(
        figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True
    ):
        rows = [key for key, spans in each["timeline"].items() if spans]
        for row, key in enumerate(rows):
            axes.broken_barh(
                [(a, b - a) for a, b in each["timeline"][key]], (row - 0.4, 0.8), color=f"C{row}"
            )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlim(0, each["spans"][min(1, len(each["spans"]) - 1)][1])
        for _, end in each["spans"]:
            axes.axvline(end, color="black", linewidth=0.8)
        limit_s = max(each["busy_s"].values())
        axes.set_title(f"{name}: {each['step_s'] / limit_s:.2f} of the limit", fontsize=9, loc="left")
    axes.set_xlabel("seconds of two steps; lines: their ends")
    figure.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> None:
    options = Options(__doc__, "two shapes, short steps", dtype=False)
    options.add_argument("--seconds", type=float, default=4.0, help="of a step at its limit")
    options.add_argument("--only", default="", help="shapes whose name begins so")
    options.add_argument("--picture", type=Path, help="a PNG of when each resource is busy")
    given = options.parse(argv, seconds=0.5)
    shapes = [each for each in SHAPES if each.name.startswith(given.only)]
    shapes = shapes[:1] + shapes[-1:] if given.quick else shapes
    found, rows, claims, bits = dict[str, Any](), [], list[Claim](), dict[Any, str]()
    for shape in shapes:
        bits.setdefault(shape.place, run(shape, 0.0)["bits"])
        found[shape.name] = each = run(shape, given.seconds)
        if each["bits"] != bits[shape.place]:
            raise RuntimeError(f"{shape.name}: losses or weights differ from those that nothing paces")
        limit_s = max(each["busy_s"].values())
        ratio = each["step_s"] / limit_s
        rows.append([shape.name, *(f"{s:.2f}" if s else "" for s in each["busy_s"].values()),
                     f"{limit_s:.2f}", f"{each['step_s']:.2f}", f"{ratio:.2f}x"])  # fmt: skip
        say(" ".join(rows[-1]))
        claims.append(Claim.at_most(f"{shape.name}: step over its limit", ratio, MOST))
    assert len({*bits.values()}) == 1
    print_table(["shape", *found[shapes[0].name]["busy_s"], "limit (s)", "step (s)", "ratio"], rows)
    if given.picture:
        draw(found, given.picture)
    print_claims(claims, given.json and Path(given.json))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("["):
        shape, seconds, folder, out = json.loads(sys.argv[1])
        Path(out).write_text(json.dumps(train(Shape(**shape), seconds, folder)), encoding="utf-8")
        os._exit(0)  # as forks of the tests end: the simulated device goes with its process
    else:
        main()
