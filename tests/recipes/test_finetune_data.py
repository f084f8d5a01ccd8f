"""Fine-tuning on chats: the loss on any number of ranks, evaluation, and a complete run."""

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import infinity
from infinity.app.loop import Loop
from infinity.app.train import train
from infinity.comm.ranks import rank, world_size
from infinity.data.opening import Data, open_data
from infinity.data.sequences import Batch, BatchShape
from infinity.observe.metrics import Evaluation, StepReport, View
from infinity.recipes.loading import load_recipe
from infinity.recipes.models import GPT
from infinity.recipes.recipe import Recipe
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.models import VOCABULARY, build
from tests.helpers.reference import Reference, Rule
from tests.helpers.tokenizers import write_tokenizer
from tests.helpers.training import DTYPES, small_units

SEQ_LEN = 48


def write_chats(path: Path, count: int = 60) -> Path:
    """Chats whose answers are of very different lengths: rows have 2 to 40 targets that count."""
    with path.open("w") as file:
        for i in range(count):
            answer = "ab" * (1 + i * i % 19)
            messages = [{"role": "user", "content": "go" * (i % 4)}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def recipe(folder: Path, *overrides: str) -> Recipe:
    small = [
        f"run.dir={folder}/runs", "run.name=one", "observe.progress=false", f"data.cache={folder}/tokens",
        f"data.files={folder}/chat.jsonl", "data.eval_fraction=0.3", f"model.seq_len={SEQ_LEN}",
        "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "train.dtype=fp32", "train.threads=1",
        "train.steps=4", "train.batch_size=4", "train.eval_every=2", "optim.lr=1e-2",
    ]  # fmt: skip
    return load_recipe(overrides=[*small, *overrides])


def figures(folder: Path, key: str = "loss", kind: str = "step") -> list[float]:
    lines = map(json.loads, (folder / "runs/one/metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if line["kind"] == kind]


def shape(of: Recipe) -> BatchShape:
    return BatchShape(seq_len=SEQ_LEN, batch_size=of.train.batch_size, rank=rank(), world_size=world_size())


def plain_losses(of: Recipe, batches: list[Batch]) -> tuple[float, int]:
    """The untrained model's cross-entropy, added up over what counts, and how many those are."""
    torch.manual_seed(of.run.seed)
    model, total, count = GPT(of.model), 0.0, 0
    for batch in batches:
        logits = model(batch.tokens, positions=batch.positions).logits.detach()
        total += float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"))
        count += int((batch.targets >= 0).sum())
    return total, count


def test_the_loss_is_the_mean_over_all_targets_of_the_step(tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl")
    whole = recipe(tmp_path)
    first = next(open_data(whole.data, shape(whole), vocab_size=256).train)
    counts = (first.targets >= 0).sum(dim=1)
    assert counts.max() > 1.5 * counts.min()  # a mean of means would be another number
    train(whole)
    losses = figures(tmp_path)
    total, count = plain_losses(whole, [first])
    assert losses[0] == pytest.approx(total / count, rel=1e-5)
    train(
        recipe(
            tmp_path, "run.dir=" + str(tmp_path / "parts/runs"), "train.batch_size=1", "train.accumulate=4"
        )
    )
    assert figures(tmp_path / "parts") == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_layer_schedule_learns_the_same_from_chats(tmp_path: Path, packing: str) -> None:
    write_chats(tmp_path / "chat.jsonl")
    parts = ["train.batch_size=1", "train.accumulate=4", f"data.packing={packing}"]
    train(recipe(tmp_path, *parts))
    train(recipe(tmp_path, *parts, "train.schedule=layer", f"run.dir={tmp_path}/layer/runs"))
    assert figures(tmp_path / "layer") == pytest.approx(figures(tmp_path), rel=1e-4)


def two_ranks(folder: str) -> None:
    train(recipe(Path(folder), f"run.dir={folder}/two/runs", "train.batch_size=1", "train.accumulate=2"))


def test_two_ranks_learn_and_evaluate_as_one(tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl")
    train(recipe(tmp_path, "train.batch_size=2", "train.accumulate=2"))
    alone = figures(tmp_path), figures(tmp_path, kind="evaluation")
    run_ranks(two_ranks, 2, str(tmp_path), group=False)
    # The first two micro-batches of two rows are the same four rows as two of one row on each rank.
    assert figures(tmp_path / "two") == pytest.approx(alone[0], rel=1e-4)
    assert figures(tmp_path / "two", kind="evaluation") == pytest.approx(alone[1], rel=1e-4)


def test_perplexity_weighs_every_held_out_token_the_same(tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl")
    still = recipe(tmp_path, "optim.lr=1e-30", "optim.weight_decay=0", "train.batch_size=1")
    held_out = open_data(still.data, shape(still), vocab_size=256).evaluated[""]
    assert held_out is not None
    summary = train(still)
    total, count = plain_losses(still, list(held_out.batches(still.train.eval_batches)))
    assert figures(tmp_path, kind="evaluation") == pytest.approx([total / count] * 2, rel=1e-5)
    assert figures(tmp_path, "perplexity", "evaluation")[0] == pytest.approx(
        math.exp(total / count), rel=1e-4
    )
    assert summary is not None
    assert summary.last_perplexity == pytest.approx(math.exp(total / count), rel=1e-4)


def test_evaluating_before_the_first_step_changes_no_step(tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl")
    nvme = [f"memory.nvme=[{tmp_path}/nvme]", "memory.host=2MiB", "memory.resident=false"]
    train(recipe(tmp_path, *nvme))
    losses, held_out = figures(tmp_path), figures(tmp_path, kind="evaluation")
    before = recipe(tmp_path, "train.eval_first=true", f"run.dir={tmp_path}/before/runs", *nvme)
    summary = train(before)
    assert figures(tmp_path / "before") == losses
    assert figures(tmp_path / "before", "step", "evaluation") == [0, 2, 4]
    assert figures(tmp_path / "before", kind="evaluation")[1:] == held_out
    assert summary is not None
    assert summary.steps_off_plan == 0
    assert summary.first_held_out == pytest.approx(math.log(256), rel=0.01)


def test_throughput_counts_tokens_without_padding(tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl")
    single = recipe(tmp_path, "data.packing=false", "train.accumulate=2")
    loader = open_data(single.data, shape(single), vocab_size=256).train
    train(single)
    tokens = [sum(int(next(loader).mask.sum()) for _ in range(2)) for _ in range(4)]
    assert figures(tmp_path, "tokens") == tokens


@dataclass(slots=True)
class Seen:
    """View that collects the losses."""

    losses: list[float | None] = field(default_factory=list)

    def step(self, report: StepReport) -> None:
        self.losses.append(report.loss)

    def evaluated(self, found: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass


def chats_for_llama(folder: Path, *overrides: str) -> tuple[Recipe, Data]:
    """Data in the words of a template, whose tokens a tiny Llama does not all know by number."""
    write_chats(folder / "chat.jsonl")
    of = recipe(folder, "train.eval_every=null", "train.batch_size=2", "train.accumulate=2", *overrides)
    data = open_data(of.data, shape(of), vocab_size=256)
    return of, data


def known(batch: Batch) -> Batch:
    """Bytes as tokens of the tiny model, which has fewer."""
    targets = batch.targets.where(batch.targets < 0, batch.targets % VOCABULARY)
    return batch._replace(tokens=batch.tokens % VOCABULARY, targets=targets)


@pytest.mark.parametrize(
    ("dtype", "packing"),
    few((("fp32", "false"), ("bf16", "true")), itertools.product(("fp32", "bf16"), ("true", "false"))),
)
def test_a_llama_on_packed_chats_equals_the_plain_loop_bitwise(
    tmp_path: Path, dtype: str, packing: str
) -> None:
    of, data = chats_for_llama(tmp_path, f"train.dtype={dtype}", f"data.packing={packing}")
    batches = [known(next(data.train)) for _ in range(of.train.steps * 2)]
    factory, _ = build("llama", seed=0)
    with small_units(), infinity.Init(of):
        model = factory()
    optim = of.optim
    rule = Rule(**optim.numbers, max_grad_norm=optim.max_grad_norm)
    optimizer = infinity.AdamW(
        model, lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay,
        max_grad_norm=rule.max_grad_norm,
    )  # fmt: skip
    seen = Seen()
    try:
        Loop(of, model, optimizer, {"": replace(data, train=iter(batches), evaluated={})}, View(seen)).run()
    finally:
        optimizer.close()
    plain, losses = Reference(factory(), DTYPES[dtype], rule), []
    for step in range(of.train.steps):
        both = batches[2 * step : 2 * step + 2]
        count = sum(batch.target_count for batch in both)
        found = plain.step([arguments(batch, count) for batch in both])
        losses.append(float(sum(found.losses, torch.zeros(()))))
    assert seen.losses == losses
    assert losses[-1] < losses[0]


def arguments(batch: Batch, count: int) -> dict[str, Any]:
    """Of transformers' own loss, which divides by the number that it is told."""
    named = {
        "input_ids": batch.tokens, "position_ids": batch.positions, "attention_mask": batch.mask,
        "labels": batch.targets, "shift_labels": batch.targets, "num_items_in_batch": count,
    }  # fmt: skip
    return {key: value for key, value in named.items() if value is not None}


def test_a_model_directory_is_fine_tuned_on_chats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = build("llama", seed=0)[0]()
    model.resize_token_embeddings(264)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    write_chats(tmp_path / "chat.jsonl")
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write("not a chat\n")
    wanted = load_recipe(
        "configs/finetune.yaml",
        [
            f"model.path={tmp_path}/model", f"data.files=[{tmp_path}/chat.jsonl]", "model.seq_len=64",
            "data.skip_malformed=true", f"data.cache={tmp_path}/tokens", f"run.dir={tmp_path}/runs",
            "run.name=one", f"memory.nvme=[{tmp_path}/nvme]", "memory.host=64MiB", "optim.lr=1e-2",
            "train.steps=12", "train.accumulate=2", "train.eval_every=3", "train.threads=1",
            "optim.warmup_steps=0", "run.save=false",
        ],
    )  # fmt: skip
    summary = train(wanted)
    said = capfd.readouterr()
    assert "skipped 1 malformed rows" in said.err
    assert "training data: 57 documents in" in said.err
    assert summary is not None
    assert summary.last_perplexity < 0.7 * summary.first_perplexity
    assert f"{summary.first_perplexity:,.2f} -> {summary.last_perplexity:,.2f}" in said.out
