"""Plans of the steps that were measured on a GPU, as the page says."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaConfig

from infinity.predict.plan_recipe import show_recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KEYS = (
    "model.seq_len=2048", "train.batch_size=4", "train.accumulate=1", "train.dtype=bf16",
    "memory.activations=recompute", "memory.host=104GiB",
)  # fmt: skip
#: Hidden and inner size, and layers, of the models of ``benchmarks/gpu.py``.
SHAPES = {"1.2B": (2048, 5504, 21), "3B": (3072, 8192, 25)}
ROW = re.compile(r"\| (\S+) \| `([^`]*)` \| ([\d.]+) \| ([\d.]+) \|")
ROWS = ROW.findall((RESULTS / "gpu.md").read_text("utf-8"))
#: How far a plan may be from what was measured.
WITHIN = {"memory.nvme=[] lora.rank=16 memory.device=6GiB": 0.15}


def planned_s(model: str, keys: str, folder: Path) -> float:
    hidden, inner, layers = SHAPES[model]
    LlamaConfig(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, max_position_embeddings=2048, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    out = io.StringIO()
    overrides = [*KEYS, f"model.path={folder}", *keys.split()]
    recipe, machine = str(ROOT / "configs" / "finetune.yaml"), str(RESULTS / "gpu_machine.yaml")
    show_recipe(recipe, overrides, Console(file=out, width=200), on=machine)
    [(value, unit)] = re.findall(r"a step takes ([\d.]+) (ms|s):", out.getvalue())
    return float(value) / (1000 if unit == "ms" else 1)


@pytest.mark.parametrize(
    ("model", "keys", "measured", "page"),
    [ROWS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in ROWS[1:])],
)
def test_a_plan_is_within_a_tenth_of_what_was_measured_on_a_gpu(
    tmp_path: Path, model: str, keys: str, measured: str, page: str
) -> None:
    planned = planned_s(model, keys, tmp_path)
    assert planned == pytest.approx(float(page), rel=0.01)
    assert planned == pytest.approx(float(measured), rel=WITHIN.get(keys, 0.1))


def test_the_page_has_a_row_for_each_way() -> None:
    assert len(ROWS) == 7
    text = (RESULTS / "gpu.md").read_text("utf-8")
    assert all(text.count(f" {measured} |") > 1 for _, _, measured, _ in ROWS)  # in the tables above, too
