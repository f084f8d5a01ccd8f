"""What becomes of activations: the peak of a step and its time for keep, offload, recompute and plan.

Plain PyTorch models under ``infinity.offload_activations``, each policy in a process of its own. All of them
are in memory at once and take turns of some steps, and a ratio is the median of those of the rounds. Among
the turns is the step that keeps everything while ``fio`` moves, at the same rate, the bytes that offload
moves: on a machine without an accelerator I/O takes its share of the cores. A peak is what operators make
and still holds at one time, as counted; weights, gradients and states are left out.

With ``--codecs`` the rows are offload and plan with each codec instead. T5 has ReLU and dropout.

    python benchmarks/activations.py [--quick] [--json FILE] [--models llama,bert,t5] [--nvme DIR]
                                     [--codecs never,auto,int8,2bit]
"""

import contextlib
import math
import os
import resource
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import fio
import torch
from bound import bound
from options import Options, folder_on
from report import Claim, print_claims, print_table, write_json
from torch import Tensor, nn
from turns import Actor

from infinity.activations.controller import METERED, PROFILED
from infinity.device.accelerator import tunables
from infinity.device.machine import DTYPES

#: Steps before a plan is there, one of them profiled, and its first two are over, one of them metered.
WARMUP = METERED + 1
#: Steps after those, with which a prediction is compared: the machine is as fast as when it was made.
FRESH = 3
BESIDE = "keep, fio beside"
#: Pixels of a side of ViT's patches.
PATCH = 16
AS_RECOMPUTE = "plan, recompute's peak"
LOSSY = ("int8", "2bit")
TARGET_PEAK, TARGET_TIME, TARGET_PREDICTED, TARGET_BOUND = 0.53, 1.03, 0.10, 1.05


@dataclass(frozen=True, slots=True)
class Job:
    """One policy on one model.

    Attributes:
        way: The policy.
        budget_nbytes: For ``plan``.
    """

    way: str
    model: str
    rows: int
    length: int
    layers: int
    hidden: int
    vocabulary: int
    folder: str
    dtype: str
    budget_nbytes: int | None = None
    codec: str = "auto"


@dataclass(slots=True)
class Row:
    """A policy and its figures.

    Attributes:
        actor: Its process.
        figures: What it said when it was warm.
        turns: Seconds of the steps of each turn.
        moves: Whether fio moves bytes meanwhile.
    """

    actor: Actor
    figures: dict[str, Any]
    turns: list[list[float]] = field(default_factory=list)
    moves: bool = False

    @property
    def median_s(self) -> float:
        return statistics.median(step_s for turn in self.turns for step_s in turn)

    @property
    def peak(self) -> int:
        return int(self.figures["peak_nbytes"])

    def over(self, other: "Row") -> float:
        """Its steps over those of ``other``: the median of the rounds."""
        pairs = zip(self.turns, other.turns, strict=True)
        return statistics.median(sum(ours) / sum(theirs) for ours, theirs in pairs)


# --- one process -------------------------------------------------------------------------------------


def make(job: Job) -> nn.Module:
    """The model in the job's dtype, unmodified."""
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
    elif job.model in ("vit", "moe", "resnet"):
        model = _make_more(job)
    else:
        config = T5Config(
            vocab_size=job.vocabulary, d_model=job.hidden, d_kv=64, d_ff=inner, num_layers=job.layers // 2,
            num_heads=heads, use_cache=False, decoder_start_token_id=0,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
    return model.to(DTYPES[job.dtype]).train()


def _make_more(job: Job) -> nn.Module:
    """A classifier of images (of ``length`` patches, or of ``length`` pixels a side), or a mixture."""
    from transformers import (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    heads, inner = max(1, job.hidden // 64), 4 * job.hidden
    if job.model == "vit":
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=job.hidden, intermediate_size=inner, num_hidden_layers=job.layers,
                num_attention_heads=heads, image_size=side(job), patch_size=PATCH, num_labels=10,
            )
        )  # fmt: skip
    if job.model == "resnet":
        return ResNetForImageClassification(
            ResNetConfig(
                embedding_size=job.hidden // 8, hidden_sizes=[job.hidden >> n for n in (2, 1, 0)],
                depths=[job.layers // 4, job.layers // 2, job.layers // 4], num_labels=10,
            )
        )  # fmt: skip
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=job.vocabulary, hidden_size=job.hidden, intermediate_size=inner, use_cache=False,
            moe_intermediate_size=job.hidden, num_experts=8, num_experts_per_tok=2, head_dim=64,
            num_hidden_layers=job.layers, num_attention_heads=heads, num_key_value_heads=heads,
        )
    )  # fmt: skip


def side(job: Job) -> int:
    """Pixels of a side of an image with as many patches as a sequence has tokens, or of ResNet's."""
    return job.length if job.model == "resnet" else PATCH * math.isqrt(job.length)


def batch(job: Job, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if job.model in ("vit", "resnet"):
        pixels = torch.randn(job.rows, 3, side(job), side(job), generator=generator).to(DTYPES[job.dtype])
        return {"pixel_values": pixels, "labels": torch.randint(10, (job.rows,), generator=generator)}
    ids = torch.randint(job.vocabulary, (job.rows, job.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def capacity_of(planning: Any) -> int:
    """The budget of a plan; without one, what it needs."""
    return int(planning.plan.capacity_nbytes or planning.predicted.peak_nbytes)


class Trainer:
    """Trains one model under one policy."""

    def __init__(self, job: Job) -> None:
        self._job, self._folder = job, Path(job.folder)
        self._losses: list[float] = []

    def __enter__(self) -> "Trainer":
        import infinity

        job = self._job
        self._model = make(job)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._serving = infinity.offload_activations(
            self._model, job.budget_nbytes, policy=job.way, nvme=job.folder, codec=job.codec
        )
        self._served = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def warm(self) -> dict[str, Any]:
        """Steps until a plan has been made, and some under it: what they took, and the peak of one."""
        from infinity.activations.profiler import MemoryMeter

        warming_s = [self._step() for _ in range(WARMUP)]
        stats, planning = self._served.cache.stats, self._served.planning
        before = stats.nbytes_stored, stats.nbytes_loaded
        fresh_s = [self._step() for _ in range(FRESH)]
        stored, loaded = stats.nbytes_stored - before[0], stats.nbytes_loaded - before[1]
        with MemoryMeter() as meter:
            self._model(**batch(self._job, 0)).loss.backward()
        peak = meter.peak_nbytes(without=[p.grad for p in self._model.parameters() if p.grad is not None])
        self._optimizer.zero_grad()
        planning_s = planning.planning_s if planning else 0.0
        return {
            "step_s": statistics.median(fresh_s), "peak_nbytes": peak,
            "stored": stored // FRESH, "loaded": loaded // FRESH,
            "predicted": asdict(planning.predicted) if planning else None, "planning_s": planning_s,
            "profiled_s": warming_s[PROFILED] - planning_s,
            "bound_s": bound(planning.profile, planning.hardware, capacity_of(planning)) if planning else 0.0,
            "recomputed": len(planning.plan.recomputed) if planning else 0,
        }  # fmt: skip

    def profile(self, folder: str) -> None:
        """Step until a plan has been made (policy ``plan``), and write it with its profile."""
        for _ in range(WARMUP):
            self._step()
        self.saved(folder)

    def saved(self, folder: str) -> None:
        """Write the plan and its profile."""
        self._served.planning.save(Path(folder))

    def turn(self, steps: int, moves: tuple[float, float] | None) -> list[float]:
        """Seconds of each of some steps, beside the bytes per second that fio reads and writes."""
        load = contextlib.nullcontext() if moves is None else fio.beside(self._folder, *moves)
        with load:
            self._step()  # after another one's turn, caches are cold
            return [self._step() for _ in range(steps)]

    def losses(self) -> list[float]:
        """Of every step."""
        return self._losses

    def peak_rss(self) -> int:
        """Of the process (bytes)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _step(self) -> float:
        number = len(self._losses)
        torch.manual_seed(number)
        began = time.perf_counter()
        loss = self._model(**batch(self._job, number)).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())
        return time.perf_counter() - began


# --- all of them -------------------------------------------------------------------------------------


class Bench:
    """Every policy on one model."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: dict[str, Row] = {}

    def run(self, rounds: int, steps: int) -> None:
        """Let all policies take their turns, in another order every round."""
        for way in ("keep", "recompute", "offload"):
            self._begin(way, way)
        if fio.available():
            keep = self.rows["keep"]
            self.rows[BESIDE] = Row(keep.actor, keep.figures, moves=True)
        self._begin("plan, no budget", "plan")
        self._begin("plan, 53 %", "plan", int(TARGET_PEAK * self.rows["keep"].peak))
        self._begin(AS_RECOMPUTE, "plan", self.rows["recompute"].peak)
        self._take_turns(rounds, steps)

    def _take_turns(self, rounds: int, steps: int) -> None:
        rows = list(self.rows.values())
        for number in range(rounds):
            print(f"{self.job.model}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            first = number % len(rows)
            for row in rows[first:] + rows[:first]:
                row.turns.append(row.actor.call("turn", steps, self._rates() if row.moves else None))
        self._end()

    def run_codecs(self, codecs: list[str], rounds: int, steps: int) -> None:
        """Let offload and plan with each codec, in their turns, stand beside keep."""
        self._begin("keep", "keep")
        for codec in codecs:
            self._begin(f"offload, {codec}", "offload", codec=codec)
        for codec in codecs:
            self._begin(f"plan, 53 %, {codec}", "plan", int(TARGET_PEAK * self.rows["keep"].peak), codec)
        self._take_turns(rounds, steps)

    def _begin(self, title: str, way: str, budget: int | None = None, codec: str = "never") -> None:
        print(f"{self.job.model}: {title}", file=sys.stderr, flush=True)
        codec = codec if way in ("offload", "plan") else "never"
        actor = Actor(Trainer, replace(self.job, way=way, budget_nbytes=budget, codec=codec))
        self.rows[title] = Row(actor, actor.call("warm"))

    def _rates(self) -> tuple[float, float]:
        """Bytes per second that offload reads and writes."""
        offload = self.rows["offload"]
        step_s = offload.median_s if offload.turns else offload.figures["step_s"]
        return offload.figures["loaded"] / step_s, offload.figures["stored"] / step_s

    def _end(self) -> None:
        keep = self.rows["keep"]
        wanted = keep.actor.call("losses")
        for title, row in self.rows.items():
            losses = row.actor.call("losses")
            if title.endswith(LOSSY):
                away = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, wanted, strict=False))
                print(f"{self.job.model}: {title}: losses are up to {away:.2g} off", file=sys.stderr)
            elif losses != wanted[: len(losses)]:
                raise SystemExit(f"{title}: losses {losses} are not those of keep, {wanted}")
            row.figures["peak_rss"] = row.actor.call("peak_rss")
        for actor in {row.actor for row in self.rows.values()}:
            actor.close()

    def table(self) -> list[list[str]]:
        keep = self.rows["keep"]
        return [
            [
                self.job.model, title, f"{row.peak / 1e6:.0f}", f"{row.peak / keep.peak:.2f}",
                f"{row.median_s:.2f}", f"{row.over(keep):.3f}",
                f"{row.figures['stored'] / 1e6:.0f}", f"{row.figures['recomputed']}",
                *_predicted(row), f"{row.figures['peak_rss'] / 1e9:.2f}",
            ]
            for title, row in self.rows.items()
        ]  # fmt: skip

    def claims(self) -> list[Claim]:
        rows, name = self.rows, self.job.model
        beside = rows.get(BESIDE, rows["keep"])
        best, small, recompute = rows["plan, 53 %"], rows[AS_RECOMPUTE], rows["recompute"]
        claims = [
            Claim.at_most(f"{name}: peak of plan / keep", best.peak / rows["keep"].peak, TARGET_PEAK),
            Claim.at_most(f"{name}: step of plan / keep beside fio", best.over(beside), TARGET_TIME),
            Claim.at_most(
                f"{name}: step of offload / keep beside fio", rows["offload"].over(beside), TARGET_TIME
            ),
            Claim.at_most(f"{name}: peak of {AS_RECOMPUTE} / recompute", small.peak / recompute.peak, 1.0),
            Claim.at_most(f"{name}: step of {AS_RECOMPUTE} / recompute", small.over(recompute), 1.0),
        ]
        for title in ("plan, no budget", "plan, 53 %", AS_RECOMPUTE):
            row = rows[title]
            said = row.figures["predicted"]
            off_s, off_peak = said["step_s"] / row.figures["step_s"] - 1, said["peak_nbytes"] / row.peak - 1
            claims += [
                Claim.at_most(f"{name}: {title}: predicted step off by", abs(off_s), TARGET_PREDICTED),
                Claim.at_most(f"{name}: {title}: predicted peak off by", abs(off_peak), TARGET_PREDICTED),
                Claim.at_most(
                    f"{name}: {title}: predicted step / linear program's bound",
                    said["step_s"] / row.figures["bound_s"],
                    TARGET_BOUND,
                ),
            ]
        return claims


def _predicted(row: Row) -> list[str]:
    found, said = row.figures, row.figures["predicted"]
    if said is None:
        return [""] * 6
    return [
        *(f"{found['step_s']:.2f}", f"{said['step_s']:.2f}", f"{found['bound_s']:.2f}"),
        *(f"{said['peak_nbytes'] / 1e6:.0f}", f"{found['profiled_s'] / found['step_s']:.2f}"),
        f"{found['planning_s']:.2f}",
    ]


def print_rates() -> None:
    """What each codec makes of what it is for, and its GB/s on one core, beside a copy of the same memory."""
    from infinity.activations.codecs import Code

    def rate(tensor: Tensor, call: Callable[[], object]) -> str:
        return f"{tensor.nbytes / min(timeit.repeat(call, number=1, repeat=15)) / 1e9:.1f}"

    x, y, rows = torch.randn(2**18), torch.randn(2**19), []
    for name, what, values in (
        ("bits", "mask, bool", torch.randn(2**20) > -1.3),
        ("bits", "noise of dropout, fp32", (x > -1.3) / 0.9),
        ("zeros", "ReLU, fp32", x.relu()),
        ("zeros", "ReLU, bf16", y.relu().bfloat16()),
        *((name, "fp32", x) for name in LOSSY),
    ):
        piece, code = values.view(torch.uint8).flatten(), Code(name, values.dtype)
        out, back = torch.empty_like(piece), torch.empty_like(piece)
        there = out[: code.put(piece, out)]
        calls = partial(code.put, piece, out), partial(code.get, there, back), partial(back.copy_, piece)
        rows.append([name, what, f"{len(there) / len(piece):.3f}", *(rate(piece, call) for call in calls)])
    print_table(["codec", "of", "bytes", "encode GB/s", "decode GB/s", "copy GB/s"], rows)


COLUMNS = [
    *("model", "activations", "peak MB", "/ keep", "step s", "/ keep", "stored MB", "recomputed"),
    *("first s", "predicted s", "bound s", "predicted MB", "profiled / step", "planning s", "peak RSS GB"),
]


def options_of(argv: list[str] | None) -> Any:
    parser = Options(__doc__, "small models, one round: some minutes", rounds=5, every="every policy")
    parser.add_argument("--models", default="llama,bert,t5")
    parser.add_argument("--codecs", default="", help="such as never,auto,int8,2bit")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn")
    return parser.parse(argv, hidden=512, layers=6, rows=2, length=256, vocabulary=1_000, rounds=3, steps=2)


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    if (wanted := tunables(os.environ)) is not None:  # as infinity train; it begins with the next process
        os.environ["GLIBC_TUNABLES"] = wanted
    if options.codecs:
        print_rates()
    claims: list[Claim] = []
    with folder_on(options.nvme, "activations") as folder:
        if fio.available():
            fio.prepare(folder)
        else:
            print("fio is missing (apt-get install fio): no step beside it", file=sys.stderr)
        for name in options.models.split(","):
            job = Job(
                "keep", name, options.rows, options.length, options.layers, options.hidden,
                options.vocabulary, str(folder), options.dtype,
            )  # fmt: skip
            bench = Bench(job)
            if options.codecs:
                bench.run_codecs(options.codecs.split(","), options.rounds, options.steps)
                print_table(COLUMNS, bench.table())
                continue
            bench.run(options.rounds, options.steps)
            claims += show(bench)
            if options.json:
                write_json(options.json, claims)


def show(bench: Bench) -> list[Claim]:
    """Print a model's rows and claims, which may be hours before the last one's."""
    print_table(COLUMNS, bench.table())
    claims = bench.claims()
    print_claims(claims, digits=".3f")
    return claims


if __name__ == "__main__":
    main()
