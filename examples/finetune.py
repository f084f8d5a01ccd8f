"""A whole fine-tune: a small Llama reads Python's own library, then learns to say what a function does.

    python examples/finetune.py                                # minutes on 2 cores; all in runs/finetune
    python examples/finetune.py memory.nvme=[/mnt/nvme0]       # any keys of a recipe, for every training
    python examples/finetune.py --small --folder runs/small    # seconds: the same commands on next to nothing

A chat shows a function without its docstring, and the docstring's first paragraph is the answer. No training
sees text or chats of the packages in ``Scale.held_out``: perplexity is measured there. Chats, a tokenizer and
random weights are written first. Then ``infinity train`` and ``infinity export`` make the base of them, tune
all of its weights, and tune adapters of it.
"""

import argparse
import ast
import json
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from infinity.cli import main as infinity

RECIPE = Path(__file__).parent.parent / "configs" / "finetune.yaml"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
ASKED = "def locked(self):"  # of asyncio's Lock
END, ROLES = "<|end|>", ("<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of everything; every step has 2,048 tokens."""

    text: str = "stdlib"
    held_out: tuple[str, ...] = ("asyncio", "http", "json", "logging")
    vocab_size: int = 4096
    width: int = 256
    layers: int = 4
    heads: int = 4
    base_steps: int = 280
    tuning_steps: int = 80


SMALL = Scale(
    text=f"{LIBRARY}/a*.py",
    held_out=("asyncio",),
    vocab_size=512,
    width=32,
    layers=2,
    heads=2,
    base_steps=26,
    tuning_steps=16,
)


def main(folder: Path, scale: Scale, overrides: Sequence[str]) -> None:
    """Make everything in ``folder``, which must not exist; ``overrides`` are for every training."""
    folder.mkdir(parents=True)
    held_out = [f"{LIBRARY / package}/*.py" for package in scale.held_out]
    apart = [path for pattern in held_out for path in sources(pattern)]
    known = [path for path in sources(scale.text) if path not in apart]
    write_chats(folder / "train.jsonl", known)
    write_chats(folder / "test.jsonl", apart)
    write_random_model(folder / "random", known, scale)

    everywhere = [
        "model.seq_len=256", "train.batch_size=8", "train.accumulate=1", "memory.activations=keep",
        "train.eval_every=100", "train.eval_batches=24",
        "memory.host=64MiB", "memory.resident=false", f"memory.nvme=[{folder}/nvme]",
        f"data.cache={folder}/tokens", f"run.dir={folder}/runs", "train.log_every=20", *overrides,
    ]  # fmt: skip
    run("train", RECIPE, "run.name=base", f"model.path={folder}/random", f"data.files=[{scale.text}]",
        f"data.eval_files=[{','.join(held_out)}]", "data.packing=null", "optim.lr=2e-3",
        f"train.steps={scale.base_steps}", *everywhere)  # fmt: skip
    run("export", folder / "runs" / "base", folder / "base")

    tuning = [
        f"model.path={folder}/base", f"data.files=[{folder}/train.jsonl]",
        f"data.eval_files=[{folder}/test.jsonl]", f"train.steps={scale.tuning_steps}", *everywhere,
    ]  # fmt: skip
    run("train", RECIPE, "run.name=full", "optim.lr=1e-3", *tuning)
    run("export", folder / "runs" / "full", folder / "full")
    run("train", RECIPE, "run.name=lora", "lora.rank=8", "optim.lr=5e-3", *tuning)
    run("export", folder / "runs" / "lora", folder / "lora")

    show_answers(folder)
    show_perplexity(folder)


def sources(text: str) -> list[Path]:
    """The files that ``data.files=[text]`` stands for: a pattern, or ``stdlib``, which has no tests."""
    if text != "stdlib":
        return sorted(Path("/").glob(text.lstrip("/")))
    apart = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(path for path in LIBRARY.rglob("*.py") if not apart & {*path.relative_to(LIBRARY).parts})


def write_chats(path: Path, files: Iterable[Path]) -> None:
    """A chat for every function of ``files`` with a short docstring, each once."""
    chats = dict.fromkeys(pair for file in files for pair in functions(file.read_text("utf-8")))
    with path.open("w", encoding="utf-8") as out:
        for function, summary in chats:
            asked, answered = {"role": "user", "content": function}, {"role": "assistant", "content": summary}
            out.write(json.dumps({"messages": [asked, answered]}) + "\n")
    print(f"{len(chats):,} chats in {path}")


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Functions of ``source``, their first lines without the docstring, and its first paragraph."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            summary = (ast.get_docstring(node) or "").split("\n\n")[0]
            if 10 <= len(summary) <= 200:
                docstring, following = node.body[:2]
                head = lines[node.lineno - 1 : docstring.lineno - 1]
                body = lines[following.lineno - 1 : node.end_lineno][:8]
                yield textwrap.dedent("\n".join([*head, *body])), summary


def write_random_model(directory: Path, files: Iterable[Path], scale: Scale) -> None:
    """A tokenizer that has read ``files``, and a Llama that has not learned anything."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=scale.vocab_size,
        special_tokens=[END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator((file.read_text("utf-8") for file in files), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token=END, extra_special_tokens=list(ROLES), chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(directory)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=scale.vocab_size,
        hidden_size=scale.width,
        intermediate_size=8 * scale.width // 3,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    print(f"{sum(p.numel() for p in model.parameters()):,} random weights in {directory}")


def run(*words: object) -> None:
    """``infinity`` with these arguments, as in a shell."""
    print("\n$ infinity", *words, flush=True)
    begin = time.perf_counter()
    if status := infinity([str(word) for word in words]):
        raise SystemExit(status)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


def show_answers(folder: Path) -> None:
    """What each model says to a question that it has not seen."""
    chats = [
        json.loads(line)["messages"]
        for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    chat = next(chat for chat in chats if chat[0]["content"].startswith(ASKED))
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    print(f"\n{chat[0]['content']}\n")
    print(f"{'its author':>12}: {chat[1]['content']}")
    print(f"{'base':>12}: {answer(base, folder / 'base', chat[:1])}")
    full = AutoModelForCausalLM.from_pretrained(folder / "full")
    print(f"{'full':>12}: {answer(full, folder / 'full', chat[:1])}")
    lora = peft.PeftModel.from_pretrained(base, folder / "lora")
    print(f"{'LoRA':>12}: {answer(lora, folder / 'base', chat[:1])}")


def answer(model: Any, tokenizer_path: Path, messages: list[dict[str, str]]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**asked, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    said: str = tokenizer.decode(out[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def show_perplexity(folder: Path) -> None:
    """Held-out perplexity before and after each training."""
    print(f"\n{'held-out perplexity':<28} {'before':>10} {'after':>10}")
    rows = [("text, from random weights", "base"), ("answers, all weights tuned", "full")]
    for what, name in [*rows, ("answers, LoRA adapters tuned", "lora")]:
        figures = json.loads((folder / "runs" / name / "summary.json").read_text(encoding="utf-8"))
        print(f"{what:<28} {figures['first_perplexity']:>10,.1f} {figures['last_perplexity']:>10,.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="next to nothing of everything")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"), help="a new one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for infinity train")
    options = parser.parse_args()
    main(options.folder.absolute(), SMALL if options.small else Scale(), options.overrides)
