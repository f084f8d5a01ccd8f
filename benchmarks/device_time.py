"""What an accelerator does during a step: computes, copies in each direction, or waits; and for what.

    python benchmarks/device_time.py [--size 3e9] [--tokens 8192] [--trace FILE] [OVERRIDE ...]

Profiles one step of infinity with the recipe's overrides and prints, for each phase of the step, the time in
which the accelerator computes, in which only its link is busy, and in which it does nothing at all.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama
import torch
import worker
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

Interval = tuple[float, float]  # seconds since the step began


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds of a part of a step.

    Attributes:
        computes: Some kernel runs.
        to_device, to_host: The link moves bytes, whether or not kernels run.
        copies_only: The link moves bytes and no kernel runs.
        idle: Neither.
    """

    phase: str
    wall: float
    computes: float
    to_device: float
    to_host: float
    copies_only: float
    idle: float

    def __str__(self) -> str:
        figures = self.wall, self.computes, self.to_device, self.to_host, self.copies_only, self.idle
        return f"{self.phase:10}" + "".join(f"{1e3 * each:11.1f}" for each in figures)


HEAD = f"{'phase, ms':10}" + "".join(
    f"{each:>11}" for each in ("wall", "computes", "to device", "to host", "only link", "idle")
)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def inside(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """Return the seconds of a union between ``begin`` and ``end``."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals)


def device_times(step: Callable[[], object], trace: Path | None = None) -> list[DeviceTime]:
    """Return what the accelerator does in each phase of ``step``, and in all of it.

    A phase is a range of ``torch.profiler.record_function`` whose name begins with "phase ".
    """
    with profile(activities=supported_activities()) as seen:
        step()
        torch.accelerator.synchronize()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    found: dict[str, list[Interval]] = {"kernel": [], "HtoD": [], "DtoH": []}
    phases: list[tuple[str, Interval]] = []
    for event in seen.events():
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.device_type == DeviceType.CPU:
            if event.name.startswith("phase "):
                phases.append((event.name.removeprefix("phase "), span))
        elif not event.is_user_annotation:
            kind = next((each for each in ("HtoD", "DtoH") if each in event.name), "kernel")
            found[kind].append(span)
    kernels, to_device, to_host = (merged(found[kind]) for kind in ("kernel", "HtoD", "DtoH"))
    all_ = merged([*kernels, *to_device, *to_host])
    begins = sorted(begin for _, (begin, _) in phases)
    last = max(end for _, end in all_)
    ends = [*begins[1:], last]  # a phase lasts until the next one begins
    spans = [(name, (b, ends[begins.index(b)])) for name, (b, _) in sorted(phases, key=lambda each: each[1])]
    rows = []
    for name, (begin, end) in [*spans, ("step", (begins[0], last))]:
        computes, busy = inside(kernels, begin, end), inside(all_, begin, end)
        rows.append(
            DeviceTime(
                name,
                end - begin,
                computes,
                inside(to_device, begin, end),
                inside(to_host, begin, end),
                busy - computes,
                end - begin - busy,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=float, default=3e9, help="parameters, about")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3, help="before the one that is profiled")
    parser.add_argument("--way", default="infinity", choices=list(worker.WAYS))
    parser.add_argument("--trace", type=Path, help="a trace for chrome://tracing")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("device_time.py: no accelerator here")
    shape = llama.shape_near(options.size)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=".") as folder:
        overrides = [f"run.dir={folder}/runs", "memory.activations=keep", *options.overrides]
        job = worker.Job(
            way=options.way, shape=shape.as_dict(), phases=[], warmup=0, steps=0, folder=folder,
            overrides=overrides, length=2048, device=f"{device.type}:0",
        )  # fmt: skip
        began_s = time.perf_counter()
        way = worker.WAYS[options.way](shape, job)
        print(f"{shape.name}, {options.way}: made in {time.perf_counter() - began_s:.1f} s", flush=True)
        batches = (llama.batch(shape, options.tokens, at, 0, 1, 2048) for at in itertools.count())

        def step() -> None:
            way.step({key: value.to(job.device) for key, value in next(batches).items()})

        for _ in range(options.steps):
            began_s = time.perf_counter()
            step()
            torch.accelerator.synchronize()
            print(f"step {time.perf_counter() - began_s:.3f} s", flush=True)
        print(HEAD)
        for row in device_times(step, options.trace):
            print(row)
        way.close()


if __name__ == "__main__":
    main()
