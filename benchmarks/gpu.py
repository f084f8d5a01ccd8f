"""Everything that only a machine with an accelerator can tell, in one page: ``make gpu``.

Writes versions, hardware, bandwidths, the results of the tests that need an accelerator, and the speed of
training against plain PyTorch, peft, and FSDP2 with its states in host memory. What fails is on the page,
too, and the rest goes on. Where time on a GPU comes in pieces, ``--minutes 9`` stops in time, and the same
command goes on from there, with the same commit, on a machine of the same kind that has the files of
``--nvme``.

    python benchmarks/gpu.py [--quick] [--out FILE] [--nvme DIRECTORY] [--only machine,training] [--minutes 9]
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import llama
import processes
import torch
from worker import Job, Phase

from infinity.device.accelerator import memory_nbytes, name_of, synchronize
from infinity.device.machine import free_host_nbytes, rank_threads, total_host_nbytes, usable_cores
from infinity.nvme.probe import measure
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import measure_rates

ROOT = Path(__file__).resolve().parents[1]
#: bf16 without sparsity, by a part of the device's name (flop/s): what MFU is a share of.
PEAKS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12, "MI300X": 1307e12, "MI250X": 192e12,
}  # fmt: skip
#: Share of free memory that states may take; the rest is for activations and buffers.
SHARE = 0.7
SIZES = (0.13e9, 0.35e9, 1.2e9, 3e9, 7e9, 13e9, 30e9)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        rows: Of a table, the first its head; none: there is only text.
    """

    title: str
    text: str = ""
    rows: Sequence[Sequence[str]] = ()


@dataclass(slots=True)
class Found:
    """What later sections need of earlier ones."""

    device: torch.device
    folder: Path
    quick: bool
    peak_flops_per_s: float = 0.0
    sections: list[Section] = field(default_factory=list)
    show: Callable[[Section], object] = lambda section: None  # a section that has only begun
    measured: "Measured" = field(default_factory=lambda: Measured())


class OutOfTimeError(Exception):
    """The next figure might not be there in time."""


@dataclass(slots=True)
class Measured:
    """Figures by name, those of earlier calls, too.

    Attributes:
        file: Where they are kept; None: nowhere.
        of: What they belong to: figures of another machine or commit are dropped.
        seconds: In which this call may begin to measure.
    """

    file: Path | None = None
    of: str = ""
    seconds: float = math.inf
    figures: dict[str, list[str]] = field(default_factory=dict)
    longest_s: float = 0.0
    _began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            self.figures = kept["figures"] if kept["of"] == self.of else {}

    def once(self, name: str, make: Callable[[], list[str]]) -> list[str]:
        """Return a row that an earlier call measured, or make it; one that failed is made again."""
        if name not in self.figures:
            began_s = time.monotonic()
            if began_s + self.longest_s > self._began_s + self.seconds:
                raise OutOfTimeError
            row = make()
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            if went_wrong([Section("", rows=[row])]):
                return row
            self.figures[name] = row
            if self.file is not None:
                kept = {"of": self.of, "figures": self.figures}
                self.file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return self.figures[name]


# --- the page --------------------------------------------------------------------------------


def page(sections: Sequence[Section]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# Measured on an accelerator",
        "",
        "Written by `make gpu` (`benchmarks/gpu.py`), which anybody with a GPU can run. Compare rows of one",
        "page with each other only.",
    ]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        if section.rows:
            head, *body = section.rows
            lines += [_row(head), _row(["---"] * len(head)), *map(_row, body)]
        if section.rows and section.text:
            lines.append("")
        if section.text:
            lines.append(section.text)
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def attempt(title: str, make: Callable[[], Section]) -> Section:
    """Return the section that ``make`` makes, or one that says how it failed."""
    print(f"== {title}", file=sys.stderr, flush=True)
    try:
        return make()
    except OutOfTimeError:
        raise
    except Exception as error:
        return Section(title, f"Failed: `{type(error).__name__}: {str(error).strip()[-1500:]}`")


def went_wrong(sections: Sequence[Section]) -> bool:
    """Return whether something on the page failed."""
    cells = [cell for section in sections for row in section.rows for cell in row]
    texts = [section.text for section in sections]
    return any(re.search(r"\b([Ff]ailed|FAILED|ERROR|errors?)\b", each) for each in [*cells, *texts])


# --- machine and bandwidths ------------------------------------------------------------------


def machine(found: Found) -> Section:
    """Versions and hardware."""
    device, rows = found.device, [["what", "which"]]
    if device.type != "cpu":
        free, total = memory_nbytes(device)
        rows.append(["accelerators", f"{torch.accelerator.device_count()} x {name_of(device)}"])
        rows.append(["memory of one", f"{_gb(total)}, {_gb(free)} free"])
    rows += [
        ["processor", f"{_processor()}, {usable_cores()} cores"],
        ["host memory", f"{_gb(total_host_nbytes())}, {_gb(free_host_nbytes())} free"],
        ["drive", f"{found.folder}, {_gb(shutil.disk_usage(found.folder).free)} free"],
        ["system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"],
        ["torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"],
        ["infinity", f"{metadata.version('infinity-offload')} ({_commit()})"],
    ]
    for package in ("transformers", "numba", "kvikio-cu12", "kvikio-cu13"):
        try:
            rows.append([package, metadata.version(package)])
        except metadata.PackageNotFoundError:
            continue
    return Section("Machine", f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", rows)


def bandwidths(found: Found) -> Section:
    """What the machine's channels and units reach."""
    device, mib = found.device, 2**20
    nbytes, size = (4 * mib, 256) if found.quick else (256 * mib, 8192)
    rows = [["channel", "measured"]]
    here = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for what, target, source in (("host to device", there, here), ("device to host", here, there)):
        seconds = _best_s(device, lambda t=target, s=source: t.copy_(s, non_blocking=True))
        rows.append([f"{what}, pinned", f"{nbytes / seconds / 1e9:.1f} GB/s"])
    copy = torch.empty_like(there)
    seconds = _best_s(device, lambda: copy.copy_(there))
    rows.append(["device memory, read and written", f"{2 * nbytes / seconds / 1e9:.0f} GB/s"])
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(size, size, dtype=dtype, device=device)
        flops_per_s = 2 * size**3 / _best_s(device, lambda a=a: torch.mm(a, a))
        rows.append(
            [f"matrices of {size}, {dtype}".replace("torch.", ""), f"{flops_per_s / 1e12:.1f} Tflop/s"]
        )
        found.peak_flops_per_s = max(found.peak_flops_per_s, flops_per_s)
    speed = measure(found.folder, (16 if found.quick else 512) * mib)
    rows.append(["drive, read", f"{speed.read_bytes_per_s / 1e9:.2f} GB/s"])
    rows.append(["drive, write", f"{speed.write_bytes_per_s / 1e9:.2f} GB/s"])
    if device.type != "cpu":
        rows.append(["drive by GPUDirect Storage, read / write", _gds(found)])
        rates = measure_rates(ADAMW, torch.bfloat16, device, rank_threads())
        for where, rate in zip(("CPU", "accelerator and back"), rates, strict=True):
            rows.append(
                [f"update of states in host memory on the {where}", f"{rate / 1e6:.0f} M parameters/s"]
            )
    return Section("Bandwidths", rows=rows)


def _gds(found: Found) -> str:
    try:
        speed = measure(found.folder, 256 * 2**20, allocated_on=found.device)
    except Exception as error:
        return f"not here: {str(error).splitlines()[0][:120]}"
    return f"{speed.read_bytes_per_s / 1e9:.2f} / {speed.write_bytes_per_s / 1e9:.2f} GB/s"


def _best_s(device: torch.device, call: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(5):
        synchronize(device)
        began_s = time.perf_counter()
        call()
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


# --- tests -----------------------------------------------------------------------------------


def suites(found: Found, paths: Sequence[str] = ("tests",)) -> Section:
    """Run the tests that need an accelerator, and those of the accelerator's path."""
    several = ["-n", str(max(1, min(8, usable_cores() // 2)))] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "600", "-p", "no:cacheprovider", *several]
    runs = [("marked gpu", [*command, "-m", "gpu", *paths])]
    if (ROOT / "tests" / "accelerator").is_dir() and not found.quick:
        runs.append(("tests/accelerator", [*command, "-m", "not slow", "tests/accelerator"]))
    rows, failures = [["tests", "result"]], list[str]()
    for what, each in runs:

        def run(what: str = what, command: Sequence[str] = each) -> list[str]:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = ended.stdout.strip().splitlines() or ["no output"]
            failures.extend(line for line in lines if re.match(r"(FAILED|ERROR) ", line))
            return [what, lines[-1].strip("= ")]

        rows.append(found.measured.once(what, run))
    text = "```text\n" + "\n".join(failures) + "\n```" if failures else ""
    return Section("Tests", text, rows)


# --- training --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table.

    Attributes:
        nbytes: Of each kind of memory that a parameter takes.
    """

    title: str
    way: str
    nbytes: Mapping[str, float]
    overrides: tuple[str, ...] = ()


WAYS = (
    # bf16 weight and gradient, fp32 master, moments and gradient
    Way("plain PyTorch, all on the device", "plain", {"device": 20}),
    # fp32 weight, gradient and moments
    Way("FSDP2, states in host memory", "fsdp2", {"host": 16}),
    # 12 bytes of states, and a gradient that waits for the norm
    Way("infinity, states where there is room", "infinity", {"host": 15}),
    Way("infinity, states in host memory", "infinity", {"host": 15}, ("memory.device=3GiB",)),
    # two versions; the gradient waits in host memory, half of which is for chunks of updates
    Way("infinity, all states on NVMe", "infinity", {"drive": 24, "host": 5}, ("memory.resident=false",)),
)


HEAD = ["model", "way", "step s", "tokens/s", "MFU", "device GB", "host GB", "made s"]
#: Adapters, and device memory in which a base of 3 B parameters has no room.
RANK, LITTLE = 16, "memory.device=6GiB"
ADAPTED = (
    Way("peft, all on the device", "plain", {}),
    Way("infinity, base where there is room", "infinity", {}),
    Way("infinity, base in host memory", "infinity", {}, (LITTLE,)),
)


def training(found: Found) -> Section:
    """Steps of the largest model that plain PyTorch holds, in every way, and of the largest of each way."""
    rooms = {
        "device": free_host_nbytes() if found.device.type == "cpu" else memory_nbytes(found.device)[0],
        "host": free_host_nbytes(),
        "drive": shutil.disk_usage(found.folder).free,
    }
    most = {way.title: largest(rooms, way.nbytes, found.quick) for way in WAYS}
    common = most[WAYS[0].title]
    peak, whose = peak_of(found)
    note = (
        "MFU: 6 flops for each parameter and token, and attention's, without what is recomputed, of "
        f"{peak / 1e12:.3g} Tflop/s ({whose}). bf16 and exact fp32 AdamW, clipped; blocks are recomputed. "
        "One device; AdamW of plain PyTorch and FSDP2 is the fused one."
    )
    rows = [HEAD]
    same = [(way, min(common, most[way.title])) for way in WAYS]
    larger = [(way, most[way.title]) for way in WAYS if most[way.title] > common]
    # A drive takes longest.
    for way, numel in sorted([*same, *larger], key=lambda each: "drive" in each[0].nbytes):
        if numel:
            rows.append(_trained(found, way, numel, rooms["host"]))
            found.show(Section("Training", note, rows))
    return Section("Training", note, rows)


def adapters(found: Found) -> Section:
    """Steps of adapters on a frozen base in bf16, beside peft's on the device."""
    rooms = {"device": 0.5 * memory_nbytes(found.device)[0] if found.device.type != "cpu" else math.inf}
    numel = largest(rooms | {"host": free_host_nbytes()}, {"device": 6, "host": 4}, found.quick)
    rows = [HEAD]
    note = (
        f"Adapters of rank {RANK} on all linear layers, otherwise as in training. MFU: 4 flops for each "
        "parameter and token, and attention's, without what is recomputed."
    )
    for way in ADAPTED:
        rows.append(_trained(found, way, min(numel, 3e9), free_host_nbytes(), lora=RANK))
        found.show(Section("Adapters", note, rows))
    return Section("Adapters", note, rows)


def largest(rooms: Mapping[str, float], nbytes: Mapping[str, float], quick: bool) -> float:
    """Return the largest of the sizes whose states fit everywhere; 0: none does."""
    if quick:
        return llama.TINY.numel
    fitting = (
        size for size in SIZES if all(size * each <= SHARE * rooms[where] for where, each in nbytes.items())
    )
    return max(fitting, default=0)


def mfu(
    shape: llama.Shape, tokens: int, length: int, step_s: float, peak_flops_per_s: float, each: int = 6
) -> float:
    """Return the share of the peak at which the model's flops were done, ``each`` a parameter and token."""
    flops = each * shape.numel * tokens + 12 * shape.layers * shape.hidden * length * tokens
    return flops / step_s / peak_flops_per_s


def peak_of(found: Found) -> tuple[float, str]:
    """Return the flop/s that MFU is a share of, and whose word that is."""
    if found.device.type != "cpu":
        name = name_of(found.device)
        for part, flops_per_s in PEAKS.items():
            if part in name:
                return flops_per_s, f"{part}, by its vendor"
    return found.peak_flops_per_s or float("nan"), "measured above, as the vendor's figure is not known here"


def _trained(found: Found, way: Way, numel: float, host_nbytes: int, lora: int = 0) -> list[str]:
    tokens, length, steps = (256, 128, 2) if found.quick else (8192, 2048, 3)
    shape = llama.TINY if found.quick else llama.shape_near(numel)
    print(f"{shape.name}: {way.title}", file=sys.stderr, flush=True)
    on_cpu = found.device.type == "cpu"

    def row(folder: str) -> list[str]:
        overrides = [f"run.dir={folder}/runs", "memory.activations=keep", *way.overrides]
        overrides.append(f"memory.host={int(0.85 * host_nbytes)}")
        if "drive" in way.nbytes:
            overrides.append(f"memory.nvme=[{folder}]")
        if on_cpu and LITTLE in overrides:
            overrides.remove(LITTLE)
        job = Job(
            way=way.way, shape=shape.as_dict(), phases=[asdict(Phase(tokens))], warmup=4, steps=steps,
            folder=folder, overrides=overrides if way.way == "infinity" else [], length=length, lora=lora,
            dtype="fp32" if on_cpu else "bf16", device=str(found.device),
        )  # fmt: skip
        measured = processes.Measured()
        try:
            [ranks] = processes.run(job)
        except RuntimeError as error:
            why = str(error).strip().splitlines()[-1][:160]
            return [shape.name, way.title, f"failed: {why}", "", "", "", "", ""]
        measured.add(ranks)
        step_s = measured.median_s
        share = mfu(shape, tokens, length, step_s, peak_of(found)[0], 4 if lora else 6)
        memory = [f"{ranks[0]['peak_device'] / 1e9:.1f}", f"{measured.peak_rss / 1e9:.1f}"]
        figures = [f"{step_s:.3f}", f"{tokens / step_s:,.0f}", f"{share:.1%}", *memory]
        return [shape.name, way.title, *figures, f"{measured.made_s:.1f}"]

    with tempfile.TemporaryDirectory(prefix="gpu-", dir=found.folder) as folder:
        return found.measured.once(f"{shape.name}: {way.title}", lambda: row(folder))


# --- the command -----------------------------------------------------------------------------


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.0f} GB"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "not a git checkout"


SECTIONS = {
    "machine": machine, "bandwidths": bandwidths, "tests": suites, "adapters": adapters,
    "training": training,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether everything runs")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.md", help="the page"
    )
    parser.add_argument("--nvme", type=Path, default=Path("runs"), help="directory on the drive")
    parser.add_argument("--minutes", type=float, default=math.inf, help="in which this call ends")
    parser.add_argument("--again", action="store_true", help="drop what earlier calls measured")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to make")
    parser.add_argument(
        "--device", help="where to compute; cpu tries this script out; default: the accelerator"
    )
    options = parser.parse_args(argv)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if options.device is None and accelerator is None:
        print(
            f"make gpu: no accelerator here, as torch {torch.__version__} sees it: nothing was run. Install "
            "a build of torch for yours (https://pytorch.org/get-started), or look at its driver",
            file=sys.stderr,
        )
        return 1
    options.nvme.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device) if options.device else torch.device(accelerator.type, 0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    file = options.nvme.resolve() / "gpu.json"
    if options.again:
        file.unlink(missing_ok=True)
    of = f"{name_of(device)}, torch {torch.__version__}, {_commit()}{', quick' if options.quick else ''}"
    measured = Measured(file, of, 60 * options.minutes)
    found = Found(device, options.nvme.resolve(), options.quick, measured=measured)

    def show(*more: Section) -> None:
        options.out.write_text(page([*found.sections, *more]), encoding="utf-8")

    found.show = show  # each time: what is there stays
    try:
        for name in options.only.split(","):
            section = attempt(name.capitalize(), lambda make=SECTIONS[name]: make(found))
            found.sections.append(section)
            show()
    except OutOfTimeError:
        print(f"stopped after {options.minutes:g} minutes; the same command goes on", file=sys.stderr)
        return 75  # EX_TEMPFAIL: try again
    print(options.out.read_text(encoding="utf-8"))
    print(f"written: {os.path.relpath(options.out)}", file=sys.stderr)
    return int(went_wrong(found.sections))


if __name__ == "__main__":
    sys.exit(main())
