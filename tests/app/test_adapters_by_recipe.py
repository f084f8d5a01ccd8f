"""Several adapters on one base by a recipe: each is trained to the bit as a run of it alone trains it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from infinity.app.export import publish_run
from infinity.app.loop import BatchLoss
from infinity.app.train import train
from infinity.cli import main
from infinity.core.errors import InfinityError, RecipeError, StateError
from infinity.observe.metrics import Summary
from infinity.partition import builder
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import load_machine
from infinity.predict.plan_recipe import show_recipe
from infinity.recipes.loading import load_recipe
from infinity.recipes.recipe import Recipe
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.runs import small_units

__all__ = ["small_units"]  # a fixture
pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

STEPS = 5
#: Each has its own data (that of the second ends in the fourth step), layers, dropout, rates and clipping.
ADAPTERS = """
adapters:
  fox:
    lora: {rank: 4, dropout: 0.2}
    optim: {schedule: cosine, warmup_steps: 2}
  poem:
    data: {files: [poem.txt], seed: 3, eval_fraction: 0.3}
    lora: {rank: 2, target_modules: [q_proj, down_proj], modules_to_save: [norm], lr_ratio: 4}
    optim: {lr: 5e-2, max_grad_norm: null, weight_decay: 0.0}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and text."""
    folder = tmp_path_factory.mktemp("place")
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "fox.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (folder / "poem.txt").write_text("shall I compare thee to a summer's day, thou art more lovely\n" * 6)
    return folder


def recipe(place: Path, folder: Path, *overrides: str, text: str = ADAPTERS) -> Recipe:
    (folder / "recipe.yaml").write_text(text.replace("poem.txt", str(place / "poem.txt")))
    return load_recipe(
        folder / "recipe.yaml",
        [
            f"run.dir={folder}/runs", "run.name=all", "observe.progress=false", f"model.path={place}/base",
            f"data.files={place}/fox.txt", "data.tokenizer=bytes", f"data.cache={folder}/tokens",
            "data.eval_fraction=0.1", f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB",
            "durability.every=1", "model.seq_len=16", f"train.steps={STEPS}", "train.batch_size=1",
            "train.accumulate=4", "train.eval_every=2", "train.threads=1", "train.dtype=fp32",
            "train.schedule=step", "optim.lr=1e-2", *overrides,
        ],
    )  # fmt: skip


def alone(of: Recipe, name: str) -> Recipe:
    given = of.alone(name)
    return replace(given, run=replace(given.run, name=name))


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def figures(lines: list[dict[str, Any]], name: str = "") -> list[Any]:
    """What each step and evaluation did, to one of several adapters or to the only one."""
    found: list[Any] = []
    for line in lines:
        own = line["adapters"][name] if name else line
        if line["kind"] == "evaluation":
            own = own if name else own["loss"]
        else:
            own = {key: own[key] for key in ("loss", "lr", "grad_norm", "skipped", "tokens")}
        found.append((line["step"], own))
    return found


def require_same(saved: Path, wanted: Path) -> None:
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (saved, wanted))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    configs = [json.loads((each / "adapter_config.json").read_text()) for each in (saved, wanted)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("schedule", few(["layer"], ["step", "layer"]))
def test_each_adapter_of_a_run_is_bitwise_that_of_a_run_alone(
    place: Path, tmp_path: Path, schedule: str
) -> None:
    of = recipe(place, tmp_path, f"train.schedule={schedule}")
    summary = train(of)
    assert summary is not None
    lines = metrics(tmp_path, "all")
    for name in of.adapters:
        by_itself = train(alone(of, name))
        assert by_itself is not None
        require_same(tmp_path / "runs/all/adapters" / name, tmp_path / "runs" / name / "adapters")
        assert figures(lines, name) == figures(metrics(tmp_path, name))
        assert summary.adapters[name].last_held_out == by_itself.last_held_out
        assert summary.adapters[name].first_loss == by_itself.first_loss
    steps = [line for line in lines if line["kind"] == "step"]
    for line in steps:
        each = line["adapters"]
        assert line["tokens"] == sum(one["tokens"] for one in each.values()) == 2 * 4 * 16
        assert line["loss"] == pytest.approx(sum(one["loss"] for one in each.values()) / 2)
    assert len({line["adapters"]["fox"]["lr"] for line in steps}) > 2
    assert {line["adapters"]["poem"]["lr"] for line in steps} == {5e-2}


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(recipe(place, folder))
    return folder


def interrupt(of: Recipe, step: int, micro: int) -> None:
    """Train until the forward of a micro-batch (from 1) in a step has run."""
    calls, done = 0, BatchLoss.sum

    def counted(self: BatchLoss, batch: Any) -> Any:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == (step - 1) * of.micro_batches + micro and torch.is_grad_enabled():
            raise KeyboardInterrupt
        return done(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchLoss, "sum", counted)
        with pytest.raises(KeyboardInterrupt):
            train(of)


@pytest.mark.parametrize("micro", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_a_run_that_is_interrupted_within_either_adapter_goes_on_bitwise(
    place: Path, tmp_path: Path, whole: Path, micro: int
) -> None:
    of = recipe(place, tmp_path)
    interrupt(of, 4, micro)
    kept = tmp_path / "kept"
    publish_run(tmp_path / "runs/all", kept)  # of the third step
    publish_run(tmp_path / "runs/all", tmp_path / "poem", adapter="poem")
    require_same(tmp_path / "poem", kept / "poem")
    train(replace(of, train=replace(of.train, steps=STEPS)))
    for name in of.adapters:
        saved = tmp_path / "runs/all/adapters" / name
        require_same(saved, whole / "runs/all/adapters" / name)
        values = load_file(kept / name / "adapter_model.safetensors")
        assert not all(torch.equal(values[k], v) for k, v in load_file(saved / VALUES).items())
        assert figures(metrics(tmp_path, "all"), name) == figures(metrics(whole, "all"), name)


VALUES = "adapter_model.safetensors"


def test_a_run_goes_on_only_with_the_adapters_and_settings_that_it_had(place: Path, tmp_path: Path) -> None:
    interrupt(recipe(place, tmp_path), 3, 1)
    with pytest.raises(RecipeError, match=r"adapters\.poem\.optim\.lr was 0\.05, is 0\.06"):
        train(recipe(place, tmp_path, "adapters.poem.optim.lr=6e-2"))
    with pytest.raises(RecipeError, match="adapters were fox, poem, are fox, poem, more"):
        train(recipe(place, tmp_path, "adapters.more.lora.rank=4"))
    with pytest.raises(RecipeError, match="adapters were fox, poem, are poem"):
        train(replace(recipe(place, tmp_path), adapters={"poem": {"lora": {"rank": 2}}}))


def train_on_ranks(of: Recipe) -> Summary | None:
    builder.TARGET_SHARD_NBYTES = 8000
    return train(of)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["step", "layer"])
def test_on_two_ranks_each_adapter_is_bitwise_that_of_a_run_alone(
    place: Path, tmp_path: Path, schedule: str
) -> None:
    of = recipe(place, tmp_path, f"train.schedule={schedule}", "train.accumulate=2")
    run_ranks(train_on_ranks, 2, of)
    for name in of.adapters:
        run_ranks(train_on_ranks, 2, alone(of, name))
        require_same(tmp_path / "runs/all/adapters" / name, tmp_path / "runs" / name / "adapters")
        assert figures(metrics(tmp_path, "all"), name) == figures(metrics(tmp_path, name))


def test_adapters_are_exported_together_and_one_by_one_and_peft_loads_each(
    place: Path, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(whole / "runs/all")
    assert main(["export", run, str(tmp_path / "all")]) == 0
    assert main(["export", run, str(tmp_path / "poem"), "--adapter", "poem"]) == 0
    assert "exported the adapter poem of" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["fox", "poem"]
    require_same(tmp_path / "poem", tmp_path / "all/poem")
    assert main(["export", run, str(tmp_path / "merged"), "--merge", "--adapter", "poem"]) == 0
    saved = [str(tmp_path / each) for each in ("all", "from-saved")]
    assert main(["export", *saved, "--merge", "--adapter", "poem"]) == 0
    of_run, of_saved = (load_file(tmp_path / each / "model.safetensors") for each in ("merged", "from-saved"))
    assert all(torch.equal(of_saved[key], value) for key, value in of_run.items())
    tokens, logits = torch.arange(24)[None], {}
    for name in ("fox", "poem"):
        base = LlamaForCausalLM.from_pretrained(place / "base")
        adapted: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "all" / name)).eval()
        logits[name] = adapted(tokens).logits.detach()
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    torch.testing.assert_close(merged, logits["poem"])
    assert not torch.equal(logits["fox"], logits["poem"])
    with pytest.raises(RecipeError, match=r"no 'pome'; there are: fox, poem"):
        publish_run(run, tmp_path / "x", adapter="pome")
    with pytest.raises(RecipeError, match=r"--merge takes one of the adapters fox, poem: add --adapter NAME"):
        publish_run(run, tmp_path / "x", merge=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_saved_adapters_one_of_which_was_moved_meanwhile(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    """A run keeps what its adapters begin with, since it reads their configs when it goes on."""
    given = tmp_path / "given"
    publish_run(whole / "runs/all", given)
    text = f"adapters:\n  fox: {{lora: {{adapter: {given}/fox}}}}\n  new: {{lora: {{rank: 2}}}}\n"
    of = recipe(place, tmp_path, text=text)
    interrupt(of, 3, 1)
    given.rename(tmp_path / "moved")
    train(of)
    (tmp_path / "moved").rename(given)
    train(replace(of, run=replace(of.run, name="again")))
    for name in of.adapters:
        require_same(tmp_path / "runs/all/adapters" / name, tmp_path / "runs/again/adapters" / name)


@pytest.mark.slow
def test_rows_of_the_embedding_are_trained_by_the_adapters_that_have_them(
    place: Path, tmp_path: Path
) -> None:
    rows = ("[]", "[101, 97]", "[97]")
    text = "".join(
        f"  {name}: {{lora: {{rank: 2, target_modules: [q_proj], trainable_token_indices: {each}}}}}\n"
        for name, each in zip("abc", rows, strict=True)
    )
    of = recipe(place, tmp_path, text=f"adapters:\n{text}")
    train(of)
    for name in of.adapters:
        train(alone(of, name))
        require_same(tmp_path / "runs/all/adapters" / name, tmp_path / "runs" / name / "adapters")
    shapes = [
        [tuple(value.shape) for key, value in load_file(saved / VALUES).items() if "embed_tokens" in key]
        for saved in (tmp_path / "runs/all/adapters" / name for name in "abc")
    ]
    assert shapes == [[], [(2, 32)], [(1, 32)]]


def test_errors_of_one_adapter_say_which(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InfinityError) as raised:
        train(recipe(place, tmp_path, "adapters.fox.data.files=[none.txt]"))
    assert raised.value.__notes__ == ["it is about the data of adapter fox (adapters.fox.data)"]
    with pytest.raises(StateError, match="several adapters in fp16"):
        train(recipe(place, tmp_path, "train.dtype=fp16"))


@pytest.mark.slow
def test_a_plan_has_the_states_the_updates_and_the_tokens_of_all_adapters(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of states on NVMe a step writes what the plan says, and reads no more than that."""
    on_nvme = "memory.resident=false", "memory.host=32MiB", "train.eval_every=null"
    of, machine = recipe(place, tmp_path, *on_nvme), load_machine("desktop-4090", ["devices.per_node=0"])
    planned, each = dry_run(of, machine), [dry_run(of.alone(name), machine) for name in of.adapters]

    def trained(run: DryRun) -> int:
        return sum(unit.params for unit in run.units if unit.trainable)

    assert trained(planned) == sum(map(trained, each))
    assert planned.tokens == sum(run.tokens for run in each) == 2 * 4 * 16
    summary = train(of)
    assert summary is not None
    assert summary.planned_nbytes_read is not None
    assert planned.cost.nbytes["NVMe write"] == summary.planned_nbytes_written
    assert 1 <= planned.cost.nbytes["NVMe read"] / summary.planned_nbytes_read < 1.25
    (tmp_path / "plan.yaml").write_text(of.to_yaml())
    show_recipe(str(tmp_path / "plan.yaml"), [], Console(width=400), on="desktop-4090")
    assert "2 adapters x 4 x 16 tokens a rank" in capsys.readouterr().out
