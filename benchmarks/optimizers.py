"""Every update rule beside AdamW: bytes, speed of an update, of a step with all states on NVMe, and loss.

Tables, each from one run in turns:

1. Bytes per parameter that an update on NVMe reads and writes (weight and state, bf16), and elements per
   second on the CPU beside torch's fused optimizer with its casts, where it has one, and beside a copy of as
   many bytes.
2. Seconds of a step of 134 M parameters, all on NVMe, its bytes, and their rate beside what fio reaches
   at the same mix: near 1 the drive binds. With Muon, beside torch's in memory.
3. The last training loss of the quickstart, and its held-out loss, after some steps.
4. ``infinity plan`` for a GPT of 70 B on 8 H100 with drives.

A rule may have another master: ``adamw+kahan``, ``adamw+bf16-stochastic`` (losses: ``--loss-dtype bf16``).

    python benchmarks/optimizers.py [--quick] [--json FILE] [--rules adamw,adamw8bit] [--parts update,step]
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import fio
import llama
import papers
import processes
import torch
from options import Options, folder_on
from processes import Measured
from report import Claim, print_claims, print_table
from update import in_turns
from worker import Job, Phase

from infinity.core.nbytes import aligned
from infinity.device.machine import DTYPES
from infinity.optim.rules import HostRule, find_rule
from infinity.optim.state import store_master

RULES = (
    "adamw", "adamw+kahan", "adamw+bf16-stochastic", "adamw8bit", "adamw8bit+bf16-stochastic", "adamw4bit",
    "adam", "lion", "sgd", "schedulefree", "adafactor", "muon", "apollo", "apollo-mini", "galore",
    "soap",
)  # fmt: skip
PARTS = ("update", "step", "loss", "plan")
FUSED = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
DTYPE = torch.bfloat16
#: Learning rates as a multiple of the quickstart's for AdamW, and what else a rule is given.
TRAINED = {
    "lion": ["optim.lr=1e-4", "optim.betas=[0.9,0.99]"],
    "sgd": ["optim.lr=0.1", "optim.weight_decay=0", "optim.options={momentum: 0.9}"],
    "schedulefree": ["optim.lr=3e-3", "optim.schedule=constant"],
    "adafactor": ["optim.lr=3e-3"],
    "muon": ["optim.lr=3e-3"],
    "apollo": ["optim.lr=3e-3"],
    "apollo-mini": ["optim.lr=3e-3"],
    "galore": ["optim.lr=3e-3"],
    "soap": ["optim.lr=1e-3"],
}


def chosen(name: str) -> list[str]:
    """What a recipe says of a rule, and after a plus of its master (``kahan``) or rank (``rank=32``)."""
    rule, _, variant = name.partition("+")
    key, _, value = variant.partition("=")
    more = f"optim.options={{{key}: {value}}}" if value else f"optim.master={variant}"
    return [f"optim.name={rule}", *([more] if variant else [])]


def ours(name: str, numel: int) -> Callable[[], None]:
    """An update in place by a rule, as of shards that stay in host memory."""
    rule, layout = find_rule(name), find_rule(name).layout(DTYPE)
    placed = HostRule(rule, DTYPE, threads=torch.get_num_threads())
    weight, state = torch.empty(numel, dtype=DTYPE), layout.complete((), numel)
    store_master(layout, torch.randn(numel), weight, state)
    grad, hyper = torch.randn(numel).to(DTYPE), rule.hyper({**rule.defaults, "lr": 1e-5}, step=10)
    return lambda: placed.update(weight, grad, state, weight, hyper)


def theirs(name: str, numel: int) -> Callable[[], None]:
    """Fused torch optimizer on fp32 masters, with the casts from and to bf16."""
    master = torch.nn.Parameter(torch.randn(numel))
    weight, grad = master.detach().to(DTYPE), torch.randn(numel).to(DTYPE)
    master.grad = torch.zeros(numel)
    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = FUSED[name]([master], lr=1e-5, fused=True, **options)

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return step


def copy(name: str, numel: int) -> Callable[[], None]:
    """A copy that reads half of the bytes of an update in place, and writes half."""
    touched = 2 * find_rule(name).layout(DTYPE).bytes_per_element + DTYPE.itemsize
    source, target = torch.ones(2, int(numel * touched) // 2, dtype=torch.uint8)
    return lambda: target.copy_(source)


def updates(names: list[str], quick: bool) -> list[Claim]:
    numel = aligned(2_000_000 if quick else 32_000_000, 2**18)
    rows, claims, own = [], [], find_rule("adamw").layout(DTYPE).bytes_per_element
    for name in names:
        if not find_rule(name).in_one_pass:  # a rule of matrices has no update of elements alone
            continue
        contenders = {"ours": ours(name, numel), "copy": copy(name, numel)}
        if name in FUSED:
            contenders["fused"] = theirs(name, numel)
        took = in_turns(contenders, 3 if quick else 15)
        rates = {who: numel / s / 1e6 for who, s in took.items()}
        nbytes = find_rule(name).layout(DTYPE).bytes_per_element
        fused = (
            [f"{rates['fused']:.0f}", f"{rates['ours'] / rates['fused']:.2f}"] if name in FUSED else ["", ""]
        )
        share = rates["ours"] / rates["copy"]
        rows.append(
            [name, f"{nbytes:.2f}", f"{nbytes / own:.2f}", f"{rates['ours']:.0f}", *fused, f"{share:.2f}"]
        )
        claims.append(Claim.at_least(f"{name}: an update / a copy of its bytes", share, 0.9, "x"))
        if name == "adamw8bit":
            claims.append(Claim.at_most("adamw8bit: bytes each way / AdamW's", nbytes / own, 0.55, "x"))
    columns = ["rule", "bytes each way", "/ adamw", "M/s", "fused M/s", "/ fused", "/ copy"]
    print(f"\nAn update of {numel / 1e6:.0f} M elements, bf16, {torch.get_num_threads()} threads")
    print_table(columns, rows)
    return claims


def steps(
    names: list[str], quick: bool, root: Path, rounds: int, tokens: list[int], count: int, dtype: str
) -> list[Claim]:
    shape = llama.TINY if quick else llama.MEDIUM
    found = dict[tuple[str, int], Measured]()
    with folder_on(root, "optimizers") as folder:
        if fio.available():
            fio.prepare(folder, 2**30)
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else names[::-1]:
                print(f"{name}, turn {turn + 1}", file=sys.stderr, flush=True)
                device = int(1.7 * DTYPES[dtype].itemsize * shape.numel) + 96 * 2**20
                where = [
                    f"memory.nvme=[{folder}]", "memory.host=160MiB", "memory.resident=false",
                    f"memory.device={device}", "memory.activations=keep", f"run.dir={folder / 'runs'}",
                    *chosen(name),
                ]  # fmt: skip
                job = Job(
                    way="infinity", shape=shape.as_dict(), phases=[asdict(Phase(each)) for each in tokens],
                    warmup=min(3, count), steps=count, folder=str(folder), overrides=where, clip=None,
                    dtype=dtype,
                )  # fmt: skip
                jobs = {name: job}
                if name == "muon":
                    jobs["muon of torch, in memory"] = replace(job, way="plain muon", overrides=[])
                for who, way in jobs.items():
                    for each, ranks in zip(tokens, processes.run(way, 1), strict=True):
                        found.setdefault((who, each), Measured()).add(ranks)
        fio_s = {key: _fio_s(folder, each) for key, each in found.items()}
    rows, claims = [], []
    for (name, each), measured in found.items():
        base = found.get(("adamw", each), measured)
        ratio = measured.median_s / base.median_s
        moved = [f"{measured.read / 1e9:.2f}", f"{measured.written / 1e9:.2f}"]
        moved.append(f"{fio_s[name, each] / measured.median_s:.2f}")
        rows.append([name, str(each), f"{measured.median_s:.2f}", f"{ratio:.2f}", *moved])
        if name == "adamw8bit" and each == 512:
            claims.append(Claim.at_most("adamw8bit: a step of 512 tokens / AdamW's", ratio, 0.75, "x"))
    print(f"\nA step of {shape.name}, {dtype}, all on NVMe")
    print_table(["rule", "tokens", "step s", "/ adamw", "read GB", "written GB", "rate / fio's"], rows)
    return claims


def _fio_s(folder: Path, step: Measured) -> float:
    """Return the time in which fio moves a step's bytes (s); NaN: there is no fio."""
    if not fio.available() or not step.read:
        return float("nan")
    rate = fio.mixed_bytes_per_s(folder, step.read, step.written, seconds=3)
    return (step.read + step.written) / rate


def losses(
    names: list[str], quick: bool, root: Path, batch: int, seeds: list[int], dtype: str
) -> list[Claim]:
    found: dict[str, tuple[float, float]] = {}
    count = 20 if quick else 300
    with folder_on(root, "optimizers") as folder:
        for name in names:
            each = [_loss(name, folder, count, batch, seed, dtype) for seed in seeds]
            found[name] = tuple(sum(column) / len(seeds) for column in zip(*each, strict=True))  # type: ignore[assignment]
    base = found.get("adamw", found[names[0]])
    rows = [
        [name, f"{last:.4f}", f"{last / base[0] - 1:+.2%}", f"{held:.4f}", f"{held / base[1] - 1:+.2%}"]
        for name, (last, held) in found.items()
    ]
    print(f"\nThe quickstart after {count} steps of {batch} x 256 tokens, {dtype}, seeds {seeds}")
    print_table(["rule", "loss (mean of 20 steps)", "to adamw", "held-out loss", "to adamw"], rows)
    if "adamw8bit" not in found:
        return []
    apart = abs(found["adamw8bit"][1] / base[1] - 1)
    return [Claim.at_most("adamw8bit: held-out loss apart from AdamW's", apart, 0.005)]


def _loss(name: str, folder: Path, count: int, batch: int, seed: int, dtype: str) -> tuple[float, float]:
    """Return the mean training loss of the last 20 steps of the quickstart, and its held-out loss."""
    given = [
        f"train.steps={count}", f"run.dir={folder / f'{name}-{seed}'}", f"train.eval_every={count}",
        f"train.dtype={dtype}", "memory.nvme=[]", "memory.host=1GiB", "memory.resident=true",
        f"run.seed={seed}", f"data.seed={seed}", f"train.batch_size={batch}", "train.threads=1",
        *chosen(name), *TRAINED.get(name.partition("+")[0], []),
    ]  # fmt: skip
    command = [sys.executable, "-m", "infinity", "train", "configs/quickstart.yaml", *given]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [metrics] = (folder / f"{name}-{seed}").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    last = [each["loss"] for each in lines if each["kind"] == "step"][-20:]
    held = [each["loss"] for each in lines if each["kind"] == "evaluation"][-1]
    print(f"{name}, seed {seed}: {sum(last) / len(last):.4f}, held out {held:.4f}", file=sys.stderr)
    return sum(last) / len(last), held


def plans(names: list[str], quick: bool) -> list[Claim]:
    """A GPT of 80 layers of 8,192 (4 if ``quick``), all on NVMe, 2,048 tokens on each of 8 GPUs."""
    rows, layers, steps_s, params = [], (4 if quick else 80), {}, 0
    for name in names:
        planned = papers.plan("hgx-h100", 8, layers, 8192, 64, 1, *chosen(name), "train.dtype=bf16", seq=2048)
        cost, params = planned.cost, planned.run.params
        steps_s[name] = cost.step_s
        ratio = cost.step_s / steps_s.get("adamw", cost.step_s)
        rows.append([name, f"{cost.step_s:.2f}", f"{ratio:.2f}", planned.lacks or cost.bottleneck])
    print(
        f"\ninfinity plan: a GPT of {params / 1e9:.1f} B on hgx-h100, all on NVMe, 2,048 tokens on each GPU"
    )
    print_table(["rule", "step s", "/ adamw", "bottleneck"], rows)
    return []


def main() -> None:
    parser = Options(__doc__, "small sizes, one round", rounds=2, every="every rule in steps")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", default="512,2048", help="of a step")
    parser.add_argument("--steps", type=int, default=4, help="that are timed, of each rule, size and round")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step of the quickstart")
    parser.add_argument("--seeds", default="0", help="of the quickstart's runs")
    parser.add_argument("--loss-dtype", default="fp32", help="of the quickstart; bf16 has other masters")
    options = parser.parse(None, rounds=1)
    seeds = [*map(int, options.seeds.split(","))]
    names, parts, claims = options.rules.split(","), options.parts.split(","), list[Claim]()
    if "update" in parts:
        claims += updates(names, options.quick)
    if "step" in parts:
        claims += steps(
            names,
            options.quick,
            options.nvme,
            options.rounds,
            [*map(int, options.tokens.split(","))],
            options.steps,
            options.dtype,
        )
    if "loss" in parts:
        claims += losses(names, options.quick, options.nvme, options.batch, seeds, options.loss_dtype)
    if "plan" in parts:
        claims += plans(names, options.quick)
    print_claims(claims, options.json, wanted="")


if __name__ == "__main__":
    main()
