"""The whole fine-tune of examples/finetune.py: each training helps, and transformers finds the same."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "finetune.py"
SEQ_LEN = 256
MODULE = '''
class A:
    def f(self, x):
        """Give x back.

        More.
        """
        return x

def undocumented():
    return 1

def nothing_but_words():
    """Nothing follows this."""
'''
#: peft asks transformers for a property under a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chats(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def summary(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())


@torch.no_grad()
def plain_perplexity(model: Any, tokenizer: Any, path: Path) -> float:
    """Of the answers alone, chat by chat, with nothing of ours."""
    total, count = 0.0, 0
    for chat in chats(path):
        asked = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(chat)["input_ids"][: SEQ_LEN + 1]
        if len(whole) > len(asked):
            ids = torch.tensor([whole])
            logits = model(ids).logits[0, len(asked) - 1 : -1].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(asked) :], reduction="sum"))
            count += len(whole) - len(asked)
    return math.exp(total / count)


def assert_it_learned(folder: Path, falls_to: dict[str, float]) -> None:
    for name, share in falls_to.items():
        figures = summary(folder, name)
        assert figures["last_perplexity"] < share * figures["first_perplexity"], name
    assert summary(folder, "lora")["first_perplexity"] == summary(folder, "full")["first_perplexity"]


def assert_transformers_agrees(folder: Path) -> None:
    """What was exported is what was measured: before, after, and with adapters."""
    test, tokenizer = folder / "test.jsonl", AutoTokenizer.from_pretrained(folder / "full")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    full = AutoModelForCausalLM.from_pretrained(folder / "full")
    before, after = (summary(folder, "full")[f"{which}_perplexity"] for which in ("first", "last"))
    assert plain_perplexity(base, tokenizer, test) == pytest.approx(before, rel=0.02)
    assert plain_perplexity(full, tokenizer, test) == pytest.approx(after, rel=0.02)
    adapted = peft.PeftModel.from_pretrained(base, folder / "lora")
    after = summary(folder, "lora")["last_perplexity"]
    assert plain_perplexity(adapted, tokenizer, test) == pytest.approx(after, rel=0.02)


@pytest.mark.slow
def test_a_small_fine_tune_learns_and_transformers_loads_its_result(tmp_path, threads, capsys):
    example = runpy.run_path(str(EXAMPLE))
    folder = tmp_path / "made"
    half = ["train.batch_size=4", "train.eval_batches=48"]  # in every step; all of the test's text and chats
    example["main"](folder, example["SMALL"], ["train.threads=1", *half])
    assert_it_learned(folder, {"base": 0.65, "full": 0.95, "lora": 0.995})
    assert_transformers_agrees(folder)
    table = capsys.readouterr().out.splitlines()[-3:]
    for line, name in zip(table, ("base", "full", "lora"), strict=True):
        assert line.endswith(f"{summary(folder, name)['last_perplexity']:,.1f}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_fine_tune_as_a_reader_runs_it_learns_to_answer(tmp_path):
    folder = tmp_path / "made"
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), "train.threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_it_learned(folder, {"base": 0.08, "full": 0.5, "lora": 0.7})
    assert_transformers_agrees(folder)
    assert len(chats(folder / "train.jsonl")) > 2000


def test_a_chat_is_a_function_without_its_docstring_and_the_docstring(tmp_path):
    example = runpy.run_path(str(EXAMPLE))
    source = tmp_path / "module.py"
    source.write_text(MODULE)
    example["write_chats"](tmp_path / "chats.jsonl", [source, source])
    assert chats(tmp_path / "chats.jsonl") == [
        [
            {"role": "user", "content": "def f(self, x):\n    return x"},
            {"role": "assistant", "content": "Give x back."},
        ]
    ]
