"""Plans for models of up to a trillion parameters on every shipped hardware file: one page, with a picture.

    python benchmarks/plans.py [--quick] [--page FILE.md] [--json FILE]
    python benchmarks/plans.py --best [--quick] [--page FILE.md] [--json FILE]

The second form prints what ``infinity plan --best`` finds, a minute or more for each row. It goes on with the
rows that the JSON file lacks.

Nothing is trained, downloaded or read: each model is its ``config.json``, written here from its published
sizes. The figures of the machines are those of datasheets, see ``configs/hardware``; nothing was measured
on them.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Claim, print_table, write_json

from infinity.core.errors import BudgetError, quiet_libraries
from infinity.core.nbytes import format_nbytes
from infinity.predict.best import SPLIT, find_best, written
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import load_machine
from infinity.predict.plan_recipe import count, seconds
from infinity.recipes.loading import load_recipe, named_keys

HARDWARE = ("dgx-2", "dgx-a100", "hgx-h100", "hgx-h200", "gh200", "desktop-4090", "vm-2core")
#: What planning a trillion parameters may take (s, bytes).
MOST_S, MOST_NBYTES = 30.0, 2 * 2**30

_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 131072,
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Kimi-K2": {
        **_DEEPSEEK, "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK, "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    },
    "Qwen3-235B-A22B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    "Llama-3 405B": {
        **_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "Llama-3 70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}  # fmt: skip
#: Adapters of attention alone.
_ATTENTION = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
#: What is planned: its name, its model, and what its recipe says beyond the common part.
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Kimi-K2, LoRA of rank 16", "Kimi-K2", ("lora.rank=16", f"lora.target_modules=[{_ATTENTION}]")),
    ("Kimi-K2, full", "Kimi-K2", ()),
    ("DeepSeek-V3, full", "DeepSeek-V3", ()),
    ("Llama-3 405B, full", "Llama-3 405B", ()),
    ("Llama-3 70B, full", "Llama-3 70B", ("train.batch_size=4",)),
)
#: Clipping keeps all gradients until the step ends, so it is off.
COMMON = (
    "model.seq_len=4096", "train.batch_size=1", "memory.activations=recompute", "memory.nvme=[nvme]",
    "optim.max_grad_norm=null", "train.dtype=bf16",
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """One model on one machine.

    Attributes:
        planned: None: it cannot be planned, for the reason in ``missing``.
        missing: What it takes beyond what the machine has; empty: it fits.
        planning_s: Of one core; of a model that was planned for as many ranks before, without its record.
    """

    name: str
    machine: str
    planned: DryRun | None
    missing: str
    planning_s: float


#: Plans of the model that was planned last, by ranks.
_PLANNED: dict[int, DryRun] = {}


def plan(name: str, model: str, overrides: Sequence[str], on: str, folder: Path) -> Page:
    """Plan one model on one machine."""
    path = folder / model.replace(" ", "-")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[model]))
    recipe = load_recipe(None, [f"model.path={path}", *COMMON, *overrides])
    machine, began_s = load_machine(on), time.process_time()
    try:
        like = _PLANNED.get(machine.devices_in_all)
        planned = dry_run(recipe, machine, like=like)
        _PLANNED[machine.devices_in_all] = planned
        assert planned.cost.step_s > 0  # the step is played here, too
    except BudgetError as error:
        return Page(name, on, None, str(error), time.process_time() - began_s)
    planning_s = time.process_time() - began_s
    return Page(name, on, planned, "; ".join(planned.missing()), planning_s)


_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
}  # fmt: skip
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
    }}},
}  # fmt: skip
_ADAPTERS = ("lora.rank=16", f"lora.target_modules=[{_ATTENTION}]")
_ADAPTERS_2048 = (*_ADAPTERS, "model.seq_len=2048")
_QWEN = "Qwen3-235B-A22B"
_QWEN_ADAPTERS = ("lora.rank=16", "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]")
_AS_ROUNDPIPE = (*_QWEN_ADAPTERS, "model.seq_len=2048")
_SUMS_AS_WELL = (*_AS_ROUNDPIPE, "train.dtype=fp16", "train.accumulate_dtype=fp16")
_DENSE = (
    "model.n_layers=128", "model.d_model=25600", "model.n_heads=256", "model.seq_len=1024", "train.dtype=fp16"
)  # fmt: skip
#: What ``--best`` is asked for: name, model (None: the built-in GPT), overrides, machine, tokens of a step.
BEST: tuple[tuple[str, str | None, tuple[str, ...], str, int], ...] = (
    ("DeepSeek-V3 in FP8, LoRA of rank 16", "DeepSeek-V3", _ADAPTERS, "desktop-4090-64g", 8192),
    ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", _ADAPTERS, "desktop-4090-64g", 8192),
    ("GPT of 1 T, as ZeRO-Infinity's, full", None, _DENSE, "dgx-2", 524_288),
    ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", (*_ADAPTERS, "train.dtype=fp16"), "dgx-2", 524_288),
    ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", _ADAPTERS, "hgx-h100", 524_288),
    ("DeepSeek-V3 in FP8, LoRA of rank 16", "DeepSeek-V3", _ADAPTERS, "desktop-4090", 8192),
    ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", _ADAPTERS, "desktop-4090", 8192),
    ("Kimi-K2-Thinking in INT4, LoRA of rank 16", "Kimi-K2", _ADAPTERS, "desktop-4090-64g", 8192),
    ("Qwen3-235B-A22B, LoRA of rank 16", _QWEN, _QWEN_ADAPTERS, "desktop-4090-64g", 32_768),
    ("Qwen3-235B-A22B, LoRA of rank 16", _QWEN, _AS_ROUNDPIPE, "server-4090-800g", 131_072),
    ("Qwen3-235B-A22B, LoRA of rank 16, sums in fp16", _QWEN, _SUMS_AS_WELL, "server-4090-800g", 131_072),
    ("Qwen3-235B-A22B, LoRA of rank 16", _QWEN, _AS_ROUNDPIPE, "desktop-4090-64g", 131_072),
    ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", _ADAPTERS_2048, "desktop-4090-64g", 131_072),
    ("Kimi-K2, full", "Kimi-K2", ("train.dtype=fp16",), "dgx-2", 524_288),
    ("Kimi-K2, full", "Kimi-K2", (), "hgx-h100", 524_288),
    ("Llama-3 70B, full", "Llama-3 70B", ("train.dtype=fp16",), "dgx-2", 524_288),
    ("Llama-3 405B, full", "Llama-3 405B", ("train.dtype=fp16",), "dgx-2", 524_288),
    ("Llama-3 70B, full", "Llama-3 70B", (), "desktop-4090", 32_768),
    ("Llama-3 405B, full", "Llama-3 405B", (), "gh200", 32_768),
    ("Llama-3 405B, full", "Llama-3 405B", (), "desktop-4090", 32_768),
    ("DeepSeek-V3, full", "DeepSeek-V3", (), "gh200", 32_768),
    ("DeepSeek-V3, full", "DeepSeek-V3", (), "desktop-4090", 32_768),
    ("Kimi-K2, full", "Kimi-K2", (), "dgx-a100", 524_288),
    ("Kimi-K2, full", "Kimi-K2", (), "hgx-h200", 524_288),
    ("Kimi-K2, full", "Kimi-K2", (), "gh200", 32_768),
    ("Kimi-K2, full", "Kimi-K2", (), "desktop-4090", 32_768),
    *(
        (name, model, overrides, "vm-2core", 8192)
        for name, model, overrides in (
            ("Llama-3 70B, full", "Llama-3 70B", ()),
            ("Llama-3 405B, full", "Llama-3 405B", ()),
            ("DeepSeek-V3, full", "DeepSeek-V3", ()),
            ("Kimi-K2, full", "Kimi-K2", ()),
            ("Kimi-K2 in FP8, LoRA of rank 16", "Kimi-K2", _ADAPTERS),
        )
    ),
)  # fmt: skip
#: The recipe of all of them: configs/finetune.yaml, whose batch gives way.
FINETUNE = str(Path(__file__).parents[1] / "configs/finetune.yaml")
BEST_COLUMNS = (
    "model",
    "machine",
    "tokens a step",
    "as written",
    "best, tokens/s",
    "Tflop/s a rank",
    "changed, or lacks",
)


def best_row(
    name: str, model: str | None, overrides: Sequence[str], on: str, tokens: int, folder: Path
) -> list[str]:
    """What ``infinity plan configs/finetune.yaml --best --tokens-per-step N`` finds."""
    if model is None:
        of_model, path = ("memory.nvme=[nvme]", "train.batch_size=1"), None
    else:
        own, path = folder / f"{name} {model}".replace(" ", "-").replace(",", ""), FINETUNE
        own.mkdir(exist_ok=True)
        quantized = next((each for form, each in (("FP8", _FP8), ("INT4", _INT4)) if form in name), None)
        config = CONFIGS[model] | ({"quantization_config": quantized} if quantized else {})
        (own / "config.json").write_text(json.dumps(config))
        of_model = (f"model.path={own}",)
    given = [*of_model, *overrides]
    machine, began_s = load_machine(on), time.process_time()
    recipe = load_recipe(path, given)
    fixed = named_keys(path, given) - SPLIT
    start = [name, on, f"{tokens:,}"]
    try:
        found = find_best(recipe, machine, None, fixed, tokens=tokens)
    except BudgetError as error:
        return [*start, "", "does not fit", "", str(error).replace("|", "/")]
    planned, took_s = found.planned, time.process_time() - began_s
    changes = "; ".join(f"{written(effect.keys)} ({effect.without})" for effect in found.effects)
    print(f"{name} on {on}: {took_s:.0f} s of one core", flush=True)
    rate = f"{planned.flops_per_s / 1e12:.3g}"
    return [*start, found.as_written, rounded(planned.tokens_per_s), rate, changes]


def best_rows(file: Path | None, most: int) -> list[list[str]]:
    """Return the rows of ``BEST``; those that ``file`` has are not planned again."""
    rows: dict[str, list[str]] = {}
    if file is not None and file.exists():
        rows = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        for each in BEST[:most]:
            key = " ".join([each[0], *each[2], each[3], str(each[4])])
            if key not in rows:
                rows[key] = best_row(*each, Path(folder))
                if file is not None:
                    file.write_text(json.dumps(rows, indent=1) + "\n")
    return list(rows.values())


# --- the page ----------------------------------------------------------------------------------------


def sentence(message: str) -> str:
    """The first sentence of an error, without the ways out."""
    return message.partition(". ")[0].replace("|", "/")


def rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def row(page: Page) -> list[str]:
    planned = page.planned
    if planned is None:
        return [page.machine, "no", sentence(page.missing), *[""] * 8]
    run, cost = planned, planned.cost
    last = planned.drives_last_s()
    return [
        page.machine,
        "no" if page.missing else "yes",
        f"lacks {page.missing}" if page.missing else "",
        f"{format_nbytes(run.division.total)} + {format_nbytes(run.trace.peak_nbytes)}",
        format_nbytes(run.host_nbytes * run.local),
        format_nbytes(planned.disk_nbytes()) if planned.disk_nbytes() else "0",
        seconds(cost.step_s),
        rounded(planned.tokens_per_s),
        f"{planned.mfu:.1%}",
        cost.bottleneck,
        "" if last is None else seconds(last),
    ]


COLUMNS = (
    "machine", "fits", "why not", "device: units + activations", "host, a node", "drives, a node", "step",
    "tokens/s", "MFU", "bottleneck", "drives last",
)  # fmt: skip


PAGE = """\
# Plans for large models

What `infinity plan` says for models of up to a trillion parameters on each shipped hardware file.
**The figures of the machines are those of datasheets** ([hardware files](../../infinity/predict/hardware)):
nothing was measured on them, and nothing was trained. Models are their `config.json`; no weight was read.

    python benchmarks/plans.py --page benchmarks/results/{page}

In a step each rank takes one sequence of 4,096 tokens, of the 70B model four. Blocks are recomputed,
gradients are not clipped, weights are bf16 with exact fp32 Adam (V100 of the DGX-2 multiply bf16 no faster
than fp32); one node, with a rank on each device. Memory of a device is what units and activations take on one
rank. Where a model does not fit, the page says what is missing; times, where there are any, are those of a
machine that has it. Weights that a device cannot hold are computed in tiles; each token chooses all experts
equally likely.
Recipes are as written; what `--best` makes fit, or which part to buy, is in [plans_best.md](plans_best.md).

{largest}

![tokens per second by model and machine]({picture})
"""


def write_page(path: Path, pages: Sequence[Page], largest: str) -> None:
    """Write the page as Markdown, beside its picture."""
    picture = path.with_suffix(".png").name
    lines = [PAGE.format(page=path.name, picture=picture, largest=largest).rstrip()]
    for name in dict.fromkeys(page.name for page in pages):
        own = [page for page in pages if page.name == name]
        some = next((page.planned for page in own if page.planned is not None), None)
        title = name if some is None else f"{name}: {count(some.params)} parameters"
        lines += ["", f"## {title}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row(page)) + " |" for page in own]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


BEST_PAGE = """\
# What `infinity plan --best` finds for large models

    python benchmarks/plans.py --best --page benchmarks/results/{page} --json benchmarks/results/{json}

Each row is `infinity plan configs/finetune.yaml model.path=DIR --on MACHINE --best --tokens-per-step N`, with
the model's published `config.json` alone; of the GPT without the recipe's file. A row takes a minute or two
of one core; rows that the JSON file has are not planned again. Figures of the machines are those of
[datasheets](../../infinity/predict/hardware): nothing was trained or measured on them.
In brackets: what a step would be without the change. Rows of `BEST` in the script that are missing here
have not been planned yet: the command above goes on with them.
These rows are of November 2026. But for those on server-4090-800g they were planned before the clock let
updates in host memory lag into the next forward pass, as they do beside an accelerator, and before it
counted, of rows that are looked up or inserted, those rows and not their whole table: steps with states in
host memory, and those of mixtures that are bound by compute, may be shorter.

For Qwen3-235B-A22B at 131,072 tokens a step RoundPipe reports 480 tokens/s on one of eight RTX 4090 (its
README), with all weights in 800 GB of host memory: that is server-4090-800g, and not desktop-4090-64g, which
reads most weights from two drives. RoundPipe has adapters of rank 32 on all linear layers, experts among
them, and adds products in fp16. On server-4090-800g compute binds, not the link or the drives: products, with
sums in fp32, take 155 s of a step at the assumed 132 Tflop/s, and operators that are bound by device memory
most of the rest; the link takes 41 s and the drives 27 s, beside it. Products alone would allow 840 tokens/s.
"""


def write_best(path: Path, rows: Sequence[Sequence[str]]) -> None:
    json_name = path.with_suffix(".json").name
    lines = [BEST_PAGE.format(page=path.name, json=json_name), "| " + " | ".join(BEST_COLUMNS) + " |"]
    lines += ["|" + "---|" * len(BEST_COLUMNS), *("| " + " | ".join(row) + " |" for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(path: Path, pages: Sequence[Page]) -> None:
    """Draw tokens per second by model and machine; what does not fit is pale."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(page.name for page in pages))
    figure = Figure(figsize=(11, 1.2 + 1.35 * len(names)), layout="constrained")
    for at, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, at + 1)
        own = [page for page in pages if page.name == name]
        rates = [0.0 if page.planned is None else page.planned.tokens_per_s for page in own]
        for y, (page, rate) in enumerate(zip(own, rates, strict=True)):
            if page.planned is None:
                axes.text(1, y, " cannot be planned: see the page", va="center", color="#777777", fontsize=7)
                continue
            axes.barh(y, rate, color="#b8bcc4" if page.missing else "#2f6db5")
            words = f" {rounded(rate)}, bound by {page.planned.cost.bottleneck}"
            axes.text(
                max(rate, 1.0), y, words + (", does not fit" if page.missing else ""), va="center", fontsize=7
            )
        axes.set_yticks(range(len(own)), labels=[page.machine for page in own], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(1, 1e5)
        axes.set_title(name, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens per second, predicted from datasheets")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the largest model on one machine")
    parser.add_argument("--best", action="store_true", help="what infinity plan --best finds")
    parser.add_argument("--page", type=Path, help="write a page and its picture")
    parser.add_argument("--json", type=Path, help="write claims")
    args = parser.parse_args()
    runs, machines = (RUNS[:1], HARDWARE[3:4]) if args.quick else (RUNS, HARDWARE)
    if args.best:
        rows = best_rows(args.json, 1 if args.quick else len(BEST))
        print_table(BEST_COLUMNS, rows)
        if args.page is not None:
            write_best(args.page, rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        pages = [plan(*run, on, Path(folder)) for run in runs for on in machines]
    # ru_maxrss is in KiB on Linux
    peak_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = max(pages, key=lambda page: page.planning_s)
    print_table(COLUMNS[:2] + COLUMNS[3:], [row(page)[:2] + row(page)[3:] for page in pages])
    for page in pages:
        if page.missing:
            print(f"{page.name} on {page.machine}: {page.missing}")
    largest = (
        f"The slowest of these {len(pages)} plans took {slowest.planning_s:.0f} s of one core "
        f"({slowest.name} on {slowest.machine}); all of them, in one process, at most "
        f"{format_nbytes(peak_nbytes)} of memory."
    )
    print(f"\n{largest}")
    claims = [
        Claim("a plan takes, of one core", slowest.planning_s, MOST_S, "s", slowest.planning_s <= MOST_S),
        Claim(
            "memory of planning", peak_nbytes / 2**30, MOST_NBYTES / 2**30, "GiB", peak_nbytes <= MOST_NBYTES
        ),
    ]
    if args.page is not None:
        write_page(args.page, pages, largest)
        draw(args.page.with_suffix(".png"), pages)
    if args.json is not None:
        write_json(args.json, claims)
    if not all(claim.holds for claim in claims):
        sys.exit("planning took longer, or more memory, than it may")


if __name__ == "__main__":
    main()
