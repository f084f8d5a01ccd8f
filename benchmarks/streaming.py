"""Time to the first step: tokens made while training (``data.streaming``), beside all tokens before it.

    python benchmarks/streaming.py [--quick] [--json FILE] [--megabytes 64]

Chats in JSONL, a tiny Llama, one step, each way in a fresh process with an empty cache of tokens; imports do
not count. ``datasets`` reads the same file with ``streaming=True``, renders and tokenizes a row at a time,
and shuffles a buffer of as many rows as ``data.shuffle_buffer`` has; plain transformers takes the step. It
trains on all tokens: nothing finds those of the assistant.
"""

import itertools
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import torch
from checkpoint_worker import import_all
from options import Options, folder_on, say
from report import Claim, print_claims, print_table

WAYS = {
    "whole": "all tokens before the first step",
    "streamed": "data.streaming",
    "datasets": "datasets, streaming=True, plain transformers",
}
ROWS, LENGTH = 8, 512  # of a step
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does; paths are of a directory and a file."""

    way: str
    folder: str
    file: str


def sources() -> Iterator[str]:
    """Yield the text of Python's own library, a file at a time, without end."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return (file.read_text("utf-8") for file in itertools.cycle(files))


def write_data(path: Path, nbytes: int) -> int:
    """Write chats, a dozen lines of source as the answer to what is before them; return their number."""
    written = count = 0
    with path.open("w", encoding="utf-8") as file:
        for text in sources():
            lines = text.splitlines()
            for at in range(0, len(lines) - 16, 16):
                question, answer = ("\n".join(lines[a:b]) for a, b in ((at, at + 4), (at + 4, at + 16)))
                turns = [("user", f"{question} {count}"), ("assistant", answer)]
                row = {"messages": [{"role": role, "content": content} for role, content in turns]}
                written += file.write(json.dumps(row) + "\n")
                count += 1
                if written >= nbytes:
                    return count
    raise AssertionError("sources end")


def write_model(folder: Path) -> None:
    """Save a tiny Llama with a tokenizer of 8,192 tokens, made of Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=special, show_progress=False)
    library.train_from_iterator(itertools.islice(sources(), 50), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE,
        additional_special_tokens=special[2:],
    ).save_pretrained(folder)  # fmt: skip
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=library.get_vocab_size(), eos_token_id=1, max_position_embeddings=LENGTH,
        )
    ).save_pretrained(folder)  # fmt: skip


def train_ours(job: Job) -> None:
    import infinity
    from infinity.app.train import train

    folder = Path(job.folder)
    how = [
        f"model.path={folder / 'model'}", f"data.files=[{job.file}]", "data.eval_fraction=0",
        f"data.streaming={str(job.way == 'streamed').lower()}", f"data.cache={folder / job.way}",
        "data.packing=true", f"model.seq_len={LENGTH}", f"train.batch_size={ROWS}", "train.steps=1",
        "train.dtype=fp32", "train.schedule=step", "run.save=false", f"run.dir={folder / 'runs'}",
        f"run.name={job.way}", "observe.progress=false",
    ]  # fmt: skip
    train(infinity.load_recipe(overrides=how))


def train_plain(job: Job, rows: int) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(f"{job.folder}/model", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{job.folder}/model")
    optimizer = torch.optim.AdamW(model.parameters())

    def tokenized(row: Any) -> Any:
        return tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)

    data = load_dataset("json", data_files=job.file, split="train", streaming=True)
    stream = iter(data.map(tokenized, remove_columns=["messages"]).shuffle(seed=0, buffer_size=rows))
    batch = tokenizer.pad([*itertools.islice(stream, ROWS)], return_tensors="pt")
    batch = {name: values[:, :LENGTH] for name, values in batch.items() if name != "token_type_ids"}
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()


def work(job: Job) -> list[dict[str, Any]]:
    """One process of a round."""
    import_all()
    if job.way == "datasets":
        import datasets  # noqa: F401
    with open(job.file, "rb") as file:  # as many rows as our buffer has
        rows = file.read(2**23).count(b"\n")
    began, cpu_s = time.perf_counter(), time.process_time()
    if job.way == "datasets":
        train_plain(job, rows)
    else:
        train_ours(job)
    return [{"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}]


def main(argv: list[str] | None = None) -> None:
    parser = Options(__doc__, "16 MB", dtype=False)
    parser.add_argument("--megabytes", type=int, default=64, help="of JSONL")
    options = parser.parse(argv, megabytes=16)
    found, cpu_s = dict[str, float](), dict[str, float]()
    with folder_on(options.nvme, "streaming") as root:
        file = root / "chats.jsonl"
        count = write_data(file, options.megabytes * 10**6)
        write_model(root / "model")
        for way in WAYS:
            say(WAYS[way])
            [[rank]] = processes.run(Job(way, str(root), str(file)), worker=Path(__file__))
            found[way], cpu_s[way] = rank["seconds"], rank["cpu_s"]
    print(f"{options.megabytes} MB of JSONL, {count:,} chats")
    print_table(
        ["way", "s to the first step", "/ all before", "CPU s of this process"],
        [
            [WAYS[way], f"{s:.1f}", f"{s / found['whole']:.2f}", f"{cpu_s[way]:.1f}"]
            for way, s in found.items()
        ],
    )
    text = "seconds to the first step with data.streaming / "
    claims = [
        Claim.at_most(f"{text}all tokens before", found["streamed"] / found["whole"], 0.5, "x"),
    ]
    print_claims(claims, options.json)


if __name__ == "__main__":
    processes.serve(Job, work, main)
