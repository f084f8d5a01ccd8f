"""What becomes of activations: the peak of a step and its time for keep, offload, recompute and plan.

Plain PyTorch models under ``infinity.offload_activations``. Each row runs in processes of its own, and rows
take turns in rounds. Beside them stands the step that keeps everything while ``fio`` moves, at the same rate,
the bytes that offload moves: on a machine without an accelerator I/O takes its share of the cores. A peak
is what operators make and still holds at one time, as counted; weights, gradients and states are left out.

    python benchmarks/activations.py [--quick] [--json FILE] [--models llama,bert,t5] [--nvme DIR]
"""

import argparse
import contextlib
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fio
import processes
import torch
from report import Claim, print_table, write_json
from torch import Tensor, nn

from infinity.activations import METERED, PROFILED

#: Steps before a plan is there, one of them profiled, and its first two are over, one of them metered.
WARMUP = METERED + 1
BESIDE = "keep, fio beside"
AS_RECOMPUTE = "plan, recompute's peak"
TARGET_PEAK, TARGET_TIME, TARGET_PREDICTED, TARGET_BOUND = 0.53, 1.03, 0.10, 1.05


@dataclass(frozen=True, slots=True)
class Job:
    """One policy on one model.

    Attributes:
        way: The policy.
        budget_nbytes: For ``plan``.
        moves: Bytes per second that fio reads and writes beside it; None: no fio.
    """

    way: str
    model: str
    rows: int
    length: int
    layers: int
    hidden: int
    vocabulary: int
    steps: int
    folder: str
    budget_nbytes: int | None = None
    moves: tuple[float, float] | None = None


@dataclass(slots=True)
class Row:
    """A policy's figures over all rounds."""

    step_s: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> None:
        self.step_s += found["step_s"]
        self.last = found

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def peak(self) -> int:
        return int(self.last["peak_nbytes"])


# --- one process -------------------------------------------------------------------------------------


def make(job: Job) -> nn.Module:
    """The model in bf16, unmodified."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    heads, inner = job.hidden // 64, 4 * job.hidden
    if job.model == "llama":
        config: Any = LlamaConfig(
            vocab_size=job.vocabulary, hidden_size=job.hidden, intermediate_size=inner * 2 // 3 // 64 * 64,
            num_hidden_layers=job.layers, num_attention_heads=heads, use_cache=False,
        )  # fmt: skip
        model: nn.Module = LlamaForCausalLM(config)
    elif job.model == "bert":
        config = BertConfig(
            vocab_size=job.vocabulary, hidden_size=job.hidden, intermediate_size=inner,
            num_hidden_layers=job.layers, num_attention_heads=heads, max_position_embeddings=job.length,
        )  # fmt: skip
        model = BertForMaskedLM(config)
    else:
        config = T5Config(
            vocab_size=job.vocabulary, d_model=job.hidden, d_kv=64, d_ff=inner, num_layers=job.layers // 2,
            num_heads=heads, use_cache=False, decoder_start_token_id=0,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
    return model.to(torch.bfloat16).train()


def batch(job: Job, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(job.vocabulary, (job.rows, job.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def capacity_of(planning: Any) -> int:
    """The budget of a plan; without one, what it needs."""
    return int(planning.plan.capacity_nbytes or planning.predicted.peak_nbytes)


def work(job: Job, out: str) -> None:
    """Run the steps, then one more whose peak is counted; write the figures."""
    import infinity
    from infinity.observe.memory_meter import MemoryMeter
    from infinity.planner.bound import bound

    model = make(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step_s: list[float] = []
    losses: list[float] = []

    def step(number: int) -> float:
        torch.manual_seed(number)
        began = time.perf_counter()
        loss = model(**batch(job, number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return time.perf_counter() - began

    load = contextlib.nullcontext() if job.moves is None else fio.beside(Path(job.folder), *job.moves)
    with (
        load as moved,
        infinity.offload_activations(model, job.budget_nbytes, policy=job.way, nvme=job.folder) as served,
    ):
        warming_s = [step(number) for number in range(WARMUP)]
        ledger = served.cache.ledger
        before = ledger.nbytes_stored, ledger.nbytes_loaded
        step_s += [step(WARMUP + number) for number in range(job.steps)]
        stored = (ledger.nbytes_stored - before[0]) // job.steps
        loaded = (ledger.nbytes_loaded - before[1]) // job.steps
        with MemoryMeter() as meter:
            model(**batch(job, 0)).loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        planning = served.planning
    figures = {
        "step_s": step_s, "peak_nbytes": meter.peak_nbytes(without=grads), "losses": losses,
        "stored": stored, "loaded": loaded, "moved": moved,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted": asdict(planning.predicted) if planning else None,
        "planning_s": planning.planning_s if planning else 0.0,
        "profiled_s": warming_s[PROFILED] - (planning.planning_s if planning else 0.0),
        "bound_s": bound(planning.profile, planning.hardware, capacity_of(planning)) if planning else 0.0,
        "recomputed": len(planning.plan.recomputed) if planning else 0,
    }  # fmt: skip
    Path(f"{out}.0").write_text(json.dumps([figures]))


# --- all of them -------------------------------------------------------------------------------------


class Bench:
    """Every policy on one model."""

    def __init__(self, job: Job, rounds: int) -> None:
        self.job, self.rounds = job, rounds
        self.rows: dict[str, Row] = {}

    def run(self) -> None:
        for _ in range(self.rounds):
            self.measure("keep", "keep")
            self.measure("recompute", "recompute")
            self.measure("offload", "offload")
            offload = self.rows["offload"]
            rates = offload.last["loaded"] / offload.median_s, offload.last["stored"] / offload.median_s
            if fio.available():
                self.measure(BESIDE, "keep", moves=rates)
            self.measure("plan, no budget", "plan")
            self.measure("plan, 53 %", "plan", int(TARGET_PEAK * self.rows["keep"].peak))
            self.measure(AS_RECOMPUTE, "plan", self.rows["recompute"].peak)

    def measure(
        self, title: str, way: str, budget: int | None = None, moves: tuple[float, float] | None = None
    ) -> None:
        print(f"{self.job.model}: {title}", file=sys.stderr, flush=True)
        given = asdict(self.job) | {"way": way, "budget_nbytes": budget, "moves": moves}
        [[found]] = processes.run(Job(**given), worker=Path(__file__))
        self.rows.setdefault(title, Row()).add(found)
        losses = self.rows["keep"].last["losses"]
        if found["losses"] != losses:
            raise SystemExit(f"{title}: losses {found['losses']} are not those of keep, {losses}")

    def table(self) -> list[list[str]]:
        keep = self.rows["keep"]
        return [
            [
                self.job.model, title, f"{row.peak / 1e6:.0f}", f"{row.peak / keep.peak:.2f}",
                f"{row.median_s:.2f}", f"{row.median_s / keep.median_s:.3f}",
                f"{row.last['stored'] / 1e6:.0f}", f"{row.last['recomputed']}",
                *_predicted(row), f"{row.last['peak_rss'] / 1e9:.2f}",
            ]
            for title, row in self.rows.items()
        ]  # fmt: skip

    def claims(self) -> list[Claim]:
        rows, name = self.rows, self.job.model
        beside = max(rows[title].median_s for title in ("keep", BESIDE) if title in rows)
        best, small, recompute = rows["plan, 53 %"], rows[AS_RECOMPUTE], rows["recompute"]
        claims = [
            _at_most(f"{name}: peak of plan / keep", best.peak / rows["keep"].peak, TARGET_PEAK),
            _at_most(f"{name}: step of plan / keep beside fio", best.median_s / beside, TARGET_TIME),
            _at_most(
                f"{name}: step of offload / keep beside fio", rows["offload"].median_s / beside, TARGET_TIME
            ),
            _at_most(f"{name}: peak of {AS_RECOMPUTE} / recompute", small.peak / recompute.peak, 1.0),
            _at_most(f"{name}: step of {AS_RECOMPUTE} / recompute", small.median_s / recompute.median_s, 1.0),
        ]
        for title in ("plan, no budget", "plan, 53 %", AS_RECOMPUTE):
            row = rows[title]
            said = row.last["predicted"]
            off_s, off_peak = said["step_s"] / row.median_s - 1, said["peak_nbytes"] / row.peak - 1
            claims += [
                _at_most(f"{name}: {title}: predicted step off by", abs(off_s), TARGET_PREDICTED),
                _at_most(f"{name}: {title}: predicted peak off by", abs(off_peak), TARGET_PREDICTED),
                _at_most(
                    f"{name}: {title}: predicted step / linear program's bound",
                    said["step_s"] / row.last["bound_s"],
                    TARGET_BOUND,
                ),
            ]
        return claims


def _predicted(row: Row) -> list[str]:
    said = row.last["predicted"]
    if said is None:
        return ["", "", "", "", ""]
    return [
        *(f"{said['step_s']:.2f}", f"{row.last['bound_s']:.2f}", f"{said['peak_nbytes'] / 1e6:.0f}"),
        *(f"{row.last['profiled_s'] / row.median_s:.2f}", f"{row.last['planning_s']:.2f}"),
    ]


def _at_most(claim: str, value: float, target: float) -> Claim:
    return Claim(claim=claim, value=value, target=target, unit="", holds=value <= target)


COLUMNS = [
    *("model", "activations", "peak MB", "/ keep", "step s", "/ keep", "stored MB", "recomputed"),
    *("predicted s", "bound s", "predicted MB", "profiled / step", "planning s", "peak RSS GB"),
]


def options_of(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, one round: some minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims there")
    parser.add_argument("--models", default="llama,bert,t5")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every policy")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round")
    parser.add_argument("--nvme", type=Path, default=Path("runs"), help="directory on the drive")
    options = parser.parse_args(argv)
    if options.quick:
        options.hidden, options.layers, options.rows, options.length = 512, 6, 2, 256
        options.vocabulary, options.rounds, options.steps = 1_000, 1, 2
    return options


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    options.nvme.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="activations-", dir=options.nvme.resolve()))
    claims: list[Claim] = []
    try:
        if fio.available():
            fio.prepare(folder)
        else:
            print("fio is missing (apt-get install fio): no step beside it", file=sys.stderr)
        for name in options.models.split(","):
            job = Job(
                "keep", name, options.rows, options.length, options.layers, options.hidden,
                options.vocabulary, options.steps,
                str(folder),
            )  # fmt: skip
            bench = Bench(job, options.rounds)
            bench.run()
            claims += show(bench)
            if options.json:
                write_json(options.json, claims)
    finally:
        shutil.rmtree(folder)


def show(bench: Bench) -> list[Claim]:
    """Print a model's rows and claims, which may be hours before the last one's."""
    print_table(COLUMNS, bench.table())
    claims = bench.claims()
    for claim in claims:
        mark = "holds" if claim.holds else "MISSED"
        print(f"{mark:7} {claim.claim}: {claim.value:.3f} (target: at most {claim.target:g})", flush=True)
    return claims


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        given = json.loads(sys.argv[1])
        work(Job(**given | {"moves": given["moves"] and tuple(given["moves"])}), sys.argv[2])
    else:
        main()
