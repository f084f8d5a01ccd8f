"""``infinity.trainer``: what a Trainer logs, saves and goes on from is what it is without infinity."""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import infinity
from infinity.engine.runtime import runtime_of
from tests.helpers.launch import run_ranks

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    attention_dropout=0.1,
)  # fmt: skip
FOUND = "loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step"
#: What other packages warn their own callers of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    drawn = torch.randint(CONFIG.vocab_size, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(out: Path, **more: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(out), **(usual | more))


def recipe(folder: Path, *more: str) -> infinity.Recipe:
    return infinity.load_recipe(
        overrides=["train.dtype=fp32", f"memory.nvme=[{folder / 'drive'}]", "memory.host=64MiB", *more]
    )


def make(folder: Path, *overrides: str, name: str = "ours", **more: Any) -> Any:
    torch.manual_seed(0)
    with infinity.Init(recipe(folder, *overrides)):
        model = LlamaForCausalLM(CONFIG)
    settings = arguments(folder / name, **more)
    return infinity.trainer(Trainer)(model, settings, train_dataset=rows(14), eval_dataset=rows(4, 1))


def make_plain(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    settings = arguments(folder / "plain", **more)
    return Trainer(LlamaForCausalLM(CONFIG), settings, train_dataset=rows(14), eval_dataset=rows(4, 1))


def logged(trainer: Any) -> list[dict[str, float]]:
    return [
        {name: value for name, value in entry.items() if name in FOUND} for entry in trainer.state.log_history
    ]


def assert_near(found: Any, wanted: Any) -> None:
    assert len(logged(found)) == len(logged(wanted)) > 6
    for ours, theirs in zip(logged(found), logged(wanted), strict=True):
        assert ours == pytest.approx(theirs, abs=5e-6)


@pytest.fixture
def closed() -> Iterator[Callable[[Any], Any]]:
    """Close the models of trainers in the end."""
    made: list[Any] = []
    yield lambda trainer: made.append(trainer) or trainer
    for trainer in made:
        infinity.close(trainer.model)


def test_losses_and_checkpoints_are_those_without_infinity(tmp_path: Path, closed: Any):
    plain = make_plain(tmp_path)
    plain.train()
    ours = closed(make(tmp_path))
    ours.train()
    assert_near(ours, plain)  # with dropout, accumulation, clipping, a warm-up and evaluation
    folder = tmp_path / "ours/checkpoint-4"
    saved = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, value in LlamaForCausalLM.from_pretrained(tmp_path / "plain/checkpoint-4").state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5)
    (tmp_path / "again").mkdir()
    shutil.copytree(folder, tmp_path / "again/checkpoint-4")
    (tmp_path / "again/checkpoint-5").mkdir()  # a save that was killed
    again = closed(make(tmp_path, name="again"))
    again.train(resume_from_checkpoint=True)
    assert logged(again) == logged(ours)
    weights = ours.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.model.state_dict().items())


class Interrupt(TrainerCallback):
    """Ends the training before a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_run_with_a_name_goes_on_from_its_last_step(tmp_path: Path, closed: Any):
    whole = closed(make(tmp_path))
    whole.train()
    for step in (1, 5):  # before the first checkpoint, and after the last one
        first = make(tmp_path, "run.name=mine", name="named")
        first.add_callback(Interrupt(step))
        with pytest.raises(KeyboardInterrupt):
            first.train(resume_from_checkpoint=step > 1 or None)
        infinity.close(first.model, keep=True)
    last = closed(make(tmp_path, "run.name=mine", name="named"))
    last.train()
    assert logged(last) == logged(whole)


def test_the_best_model_is_loaded_in_the_end(tmp_path: Path, closed: Any):
    more: dict[str, Any] = {
        "load_best_model_at_end": True, "learning_rate": 0.3, "eval_steps": 2, "max_steps": 12,
        "eval_on_start": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1,
    }  # fmt: skip
    found = []
    for build in (make_plain, make):
        trainer = build(tmp_path, **more)
        trainer.add_callback(EarlyStoppingCallback(2))
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        output = trainer.predict(rows(4, 2))
        found.append(
            (best, trainer.state.global_step, output.metrics["test_loss"], *output.predictions.shape)
        )
        trainer.save_model()
        kept = {each.name for each in Path(trainer.args.output_dir).iterdir()}
        assert {"model.safetensors", "config.json", "training_args.bin", best} <= kept
    closed(trainer)
    assert found[0][1] < 12
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_a_second_call_of_train_goes_on_with_the_optimizers_state(tmp_path: Path, closed: Any):
    found = []
    for build in (make_plain, make):
        trainer = build(tmp_path, save_strategy="no")
        trainer.train()
        trainer.train()
        found.append(trainer)
    assert_near(closed(found[1]), found[0])


def test_adapters_are_saved_and_go_on(tmp_path: Path, closed: Any):
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")

    def trainer(name: str) -> Any:
        base = infinity.from_pretrained(tmp_path / "base", recipe(tmp_path), frozen=True)
        torch.manual_seed(1)
        model = infinity.add_lora(base, config)
        settings = arguments(tmp_path / name, gradient_checkpointing=True)
        return infinity.trainer(Trainer)(model, settings, train_dataset=rows(14), eval_dataset=rows(4, 1))

    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(1)
    settings = arguments(tmp_path / "plain", gradient_checkpointing=True)
    plain = Trainer(get_peft_model(base, config), settings, train_dataset=rows(14), eval_dataset=rows(4, 1))
    plain.train()
    ours = closed(trainer("ours"))
    ours.train()
    assert_near(ours, plain)
    folder = tmp_path / "ours/checkpoint-4"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {each.name for each in folder.iterdir()}
    state = FileSystemReader(folder / "training_state").read_metadata().state_dict_metadata
    weights = [name for name in state if name.endswith(".weight")]
    assert weights
    assert all("lora_" in name for name in weights)  # none of the base
    again = closed(trainer("again"))
    again.train(resume_from_checkpoint=str(folder))
    assert logged(again) == logged(ours)


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"optim": "rmsprop"}, ValueError, r"optim='rmsprop': wanted one of .*or optimizers="),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, ValueError, r"did you mean momentum"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, ValueError, r"as in momentum=0.9; got 'momentum=m"),
        (
            {"optim": "galore_adamw", "optim_args": "rank=4", "optim_target_modules": ["no"]},
            ValueError, r"optim_target_modules=\['no'\]: the model has no such linear layer",
        ),
        ({"save_on_each_node": True}, ValueError, "a file system that every rank sees"),
        ({"bf16": True}, infinity.StateError, "the model computes in float32: build it with train.dtype"),
        (
            {"load_best_model_at_end": True, "save_only_model": True, "eval_steps": 2},
            ValueError, r"leave save_only_model out",
        ),
        ({"optim": "apollo_adamw", "optim_args": "scale=-1"}, ValueError, "scale: got -1; wanted a number"),
        ({"optim": "sgd", "optim_args": "momentum=null"}, ValueError, "momentum: got None; wanted"),
        (
            {"optim": "schedule_free_adamw", "warmup_steps": 0.5, "max_steps": -1},
            ValueError, r"warmup_steps=0.5 .*wanted a number of steps, or max_steps above 0",
        ),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_what_is_refused(more: Any, error: Any, says: str, tmp_path: Path):
    with pytest.raises(error, match=says):
        make(tmp_path, **more).train()


@pytest.mark.parametrize(
    ("optim", "args"),
    [("sgd", "momentum=0.9, nesterov=True"), ("adafactor", None), ("adamw_torch_fused", None)],
)
def test_an_optimizer_by_its_name_is_that_of_torch_or_transformers(
    optim: str, args: str | None, tmp_path: Path, closed: Any
):
    settings = {"optim": optim, "optim_args": args}
    ours = closed(make(tmp_path, **settings))
    ours.train()
    plain = make_plain(tmp_path, **settings)
    plain.train()
    assert_near(ours, plain)


@pytest.mark.parametrize(
    ("optim", "args", "rule", "numbers"),
    [
        ("paged_adamw_8bit", None, "adamw8bit", {"betas": (0.8, 0.999), "lr": 3e-3}),
        ("lion_32bit", None, "lion", {"betas": (0.8, 0.999), "weight_decay": 0.1}),
        ("schedule_free_adamw", None, "schedulefree", {"warmup_steps": 1}),
        (
            "apollo_adamw", "proj=random, rank=2, scale=128.0, scale_type=tensor", "apollo-rank=2",
            {"per_tensor": True, "scale": math.sqrt(128), "matrix": True},
        ),
        ("galore_adamw_layerwise", "rank=2, update_proj_gap=5", "galore-rank=2", {"update_proj_gap": 5}),
    ],
)  # fmt: skip
def test_an_optimizer_by_its_name_has_the_numbers_of_the_arguments(
    optim: str, args: str | None, rule: str, numbers: dict[str, Any], tmp_path: Path, closed: Any,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    names = {"lr_scheduler_type": "constant", "adam_beta1": 0.8, "optim_target_modules": ["q_proj", "v_proj"]}
    trainer = closed(make(tmp_path, optim=optim, optim_args=args, max_steps=2, warmup_steps=0.4, **names))
    with monkeypatch.context() as patch:
        patch.setattr(runtime_of(trainer.model), "touch", pytest.fail)  # nothing is fetched
        trainer.create_optimizer()
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.rule.name == rule.replace("-rank", "+rank")
    assert numbers.items() <= optimizer.param_groups[0].items()
    if "rank" in rule:
        matrices = [each for group in optimizer.param_groups if group["matrix"] for each in group["params"]]
        assert len(matrices) == 2 * CONFIG.num_hidden_layers


class SGD(torch.optim.SGD):
    """An optimizer of a training script, which has its own step."""


def test_an_optimizer_of_the_script_is_not_taken_for_that_of_its_name(tmp_path: Path, closed: Any):
    trainer = closed(make(tmp_path))
    for given in (SGD, partial(torch.optim.SGD, momentum=0.9)):
        trainer.optimizer_cls_and_kwargs = given, {"lr": 1e-3}
        with pytest.raises(ValueError, match=r"wanted a class of infinity, torch, .*; or optimizers="):
            trainer.create_optimizer()
    trainer.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}
    assert trainer.create_optimizer().param_groups[0]["momentum"] == 0.9


def test_generation_for_metrics_is_that_without_infinity(tmp_path: Path, closed: Any):
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    data = [{name: each[1:9].clone() for name, each in row.items()} for row in rows(8)]
    found = []
    for name, kind in (("ours", infinity.trainer(Seq2SeqTrainer)), ("plain", Seq2SeqTrainer)):
        torch.manual_seed(0)
        with infinity.Init(recipe(tmp_path)) if name == "ours" else nullcontext():
            model = T5ForConditionalGeneration(config)
        settings = Seq2SeqTrainingArguments(
            str(tmp_path / name), max_steps=2, predict_with_generate=True, generation_max_length=8,
            eval_strategy="steps", eval_steps=1, logging_steps=1, report_to="none", disable_tqdm=True,
            use_cpu=True, save_strategy="no",
        )  # fmt: skip
        given = {"compute_metrics": lambda both: {"sum": float(both.predictions.sum())}}
        trainer = kind(model, settings, train_dataset=data, eval_dataset=data[:4], **given)
        trainer.train()
        found.append((trainer, trainer.predict(data[:4]).predictions.tolist()))
        with pytest.raises(OSError, match=r"offline|reach|connect"):
            trainer.push_to_hub()
    (ours, texts), (plain, wanted) = found
    assert texts == wanted
    for own, theirs in zip(closed(ours).state.log_history, plain.state.log_history, strict=True):
        assert own.get("eval_sum") == theirs.get("eval_sum")
        assert own.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-6)


def test_a_rule_of_averages_is_evaluated_by_them(tmp_path: Path, closed: Any):
    torch.manual_seed(0)
    with infinity.Init(recipe(tmp_path)):
        model = LlamaForCausalLM(CONFIG)
    optimizer = infinity.optim.ScheduleFree(model, lr=3e-3, max_grad_norm=0.5)
    given = {"train_dataset": rows(14), "eval_dataset": rows(4, 1), "optimizers": (optimizer, None)}
    settings = arguments(tmp_path / "free", lr_scheduler_type="constant", warmup_steps=0, max_steps=3)
    ours = closed(infinity.trainer(Trainer)(model, settings, **given))
    ours.train()
    model.eval()
    batches = [{name: each[None] for name, each in row.items()} for row in rows(4, 1)]
    with infinity.ema(model):
        wanted = sum(model(**batch).loss.item() for batch in batches) / 4
    with torch.no_grad():
        other = sum(model(**batch).loss.item() for batch in batches) / 4
    assert logged(ours)[-2]["eval_loss"] == pytest.approx(wanted, abs=1e-6)
    assert abs(other - wanted) > 1e-5


def test_a_model_that_is_not_served_is_refused_at_once(tmp_path: Path):
    with pytest.raises(infinity.StateError, match="got a LlamaForCausalLM made without them"):
        infinity.trainer(Trainer)(LlamaForCausalLM(CONFIG), arguments(tmp_path))


def test_what_there_is_not_to_go_on_from(tmp_path: Path, closed: Any):
    trainer = closed(make(tmp_path, save_only_model=True))
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*ours, and the model's run has no name"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"'.*gone': wanted a directory that a Trainer wrote; there is"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "gone"))
    trainer.train()
    other = closed(make(tmp_path))
    with pytest.raises(infinity.StateError, match="has no training_state: it was written with save_only"):
        other.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))


class Endless(IterableDataset[dict[str, Tensor]]):
    """Rows whose number the Trainer does not know: seven micro-batches, one more than three steps."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows(14))


@pytest.mark.parametrize("saves", ["no", "epoch"])
def test_an_epoch_of_unknown_length_may_leave_micro_batches_over(saves: str, tmp_path: Path, closed: Any):
    """They count in the next step, as without infinity; a checkpoint drops them, as it does there."""
    ours = closed(make(tmp_path, save_strategy=saves, eval_strategy="no"))
    ours.train_dataset = Endless()
    ours.train()
    if saves == "no":
        plain = make_plain(tmp_path, save_strategy=saves, eval_strategy="no")
        plain.train_dataset = Endless()
        plain.train()
        assert_near(ours, plain)
    else:
        assert (tmp_path / "ours/checkpoint-3/trainer_state.json").is_file()
        assert ours.state.global_step == 6


def test_train_after_an_interrupt_within_a_step(tmp_path: Path, closed: Any):
    """Gradients of the step that was not over are dropped, as a Trainer drops them."""
    trainer = closed(make(tmp_path))
    step, calls = trainer.accelerator.backward, []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        calls.append(0)
        if len(calls) == 3:  # the first of two micro-batches
            raise KeyboardInterrupt

    trainer.accelerator.backward = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_checkpoint_is_not_whole_while_it_is_replaced(tmp_path: Path, closed: Any):
    closed(make(tmp_path)).train()
    folder = tmp_path / "ours"
    assert (folder / "checkpoint-2/trainer_state.json").is_file()
    second = closed(make(tmp_path))

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    second._save_optimizer_and_scheduler = killed
    with pytest.raises(KeyboardInterrupt):
        second.train()
    assert not (folder / "checkpoint-2/trainer_state.json").is_file()
    assert (folder / "checkpoint-4/trainer_state.json").is_file()


def test_a_model_that_the_trainer_makes(tmp_path: Path, closed: Any):
    made = []

    def build() -> Any:
        with infinity.Init(recipe(tmp_path, "run.name=mine")):  # one at a time
            made.append(LlamaForCausalLM(CONFIG))
        return made[-1]

    settings = arguments(tmp_path / "out", save_strategy="no", eval_strategy="no")
    trainer = closed(infinity.trainer(Trainer)(model_init=build, args=settings, train_dataset=rows(14)))
    trainer.train()
    assert trainer.state.global_step == 6
    assert trainer.model is made[1]


def test_steps_that_were_skipped_count_when_a_run_goes_on(tmp_path: Path, closed: Any):
    """The last step of the run is later than the checkpoint, though fewer steps were taken."""
    first = make(tmp_path, "run.name=mine", eval_strategy="no", save_steps=3)
    first.add_callback(Interrupt(5))
    finite = first.compute_loss
    first.compute_loss = lambda *args, **more: (
        finite(*args, **more) * (math.nan if first.state.global_step < 2 else 1)
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first._own.steps == 3
    infinity.close(first.model, keep=True)
    again = closed(make(tmp_path, "run.name=mine", eval_strategy="no", save_steps=3))
    begun: list[int] = []

    class Begins(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    again.add_callback(Begins())
    again.train(resume_from_checkpoint=True)
    assert begun == [4, 5]  # the state of a step is whole when the next one begins


@pytest.mark.slow
def test_a_compiled_model_logs_the_same(tmp_path: Path, closed: Any):
    more = {"torch_compile_backend": "eager", "eval_strategy": "no", "save_strategy": "no"}
    ours = closed(make(tmp_path, **more))
    ours.train()
    assert ours.model._compiled_call_impl is not None
    torch._dynamo.reset()
    plain = make_plain(tmp_path, eval_strategy="no", save_strategy="no")
    plain.train()
    assert_near(ours, plain)


def test_only_trainers_can_be_made_to_stream():
    with pytest.raises(TypeError, match=r"wanted transformers.Trainer or a subclass; got 3"):
        infinity.trainer(3)

    class Mine(Trainer):
        """A user's own."""

    made = infinity.trainer(Mine)
    assert issubclass(made, Mine)
    assert made.__doc__ == Mine.__doc__
    assert infinity.trainer(made) is made


def accelerated(folder: Path, *, restore: bool) -> list[float]:
    """Six micro-batches of a loop with Accelerate; the last four after its state was saved, or loaded."""
    torch.manual_seed(0)
    accelerator = infinity.Accelerator(gradient_accumulation_steps=2, cpu=True)
    with infinity.Init(recipe(folder)):
        model = LlamaForCausalLM(CONFIG)
    optimizer = infinity.AdamW(model, lr=3e-3, max_grad_norm=1.0)
    served, prepared = accelerator.prepare(model, optimizer)
    losses = []
    batches = torch.stack([row["input_ids"] for row in rows(12)]).split(2)
    for number, batch in enumerate(batches):
        if restore and number < 2:
            continue
        if restore and number == 2:
            accelerator.load_state(str(folder / "state"))
        with accelerator.accumulate(served):
            loss = served(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(served.parameters(), 0.5)
                losses.append(float(norm))
            prepared.step()
            prepared.zero_grad()
        losses.append(float(loss))
        if number == 1 and not restore:
            accelerator.save_state(str(folder / "state"))
    infinity.close(model)
    return losses


def test_accelerate_saves_and_loads_its_state(tmp_path: Path):
    whole = accelerated(tmp_path, restore=False)
    assert accelerated(tmp_path, restore=True) == whole[3:]


def short_epochs(folder: Path | None) -> list[float]:
    """Two epochs of seven micro-batches, two to a step, of Accelerate's loop; None: without infinity."""
    torch.manual_seed(0)
    accelerator = (infinity.Accelerator if folder else Accelerator)(gradient_accumulation_steps=2, cpu=True)
    if folder is None:
        model = LlamaForCausalLM(CONFIG)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    else:
        with infinity.Init(recipe(folder)):
            model = LlamaForCausalLM(CONFIG)
        optimizer = infinity.AdamW(model, lr=3e-3, weight_decay=0.0)
    loader = torch.utils.data.DataLoader([row["input_ids"] for row in rows(14)], batch_size=2)
    served, prepared, batches = accelerator.prepare(model.eval(), optimizer, loader)
    losses = []
    for batch in itertools.chain(batches, batches):
        with accelerator.accumulate(served):
            loss = served(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
        losses.append(float(loss))
    if folder is not None:
        infinity.close(model)
    return losses


def test_the_last_step_of_accelerates_epoch_may_have_fewer_micro_batches(tmp_path: Path):
    assert short_epochs(tmp_path) == pytest.approx(short_epochs(None), abs=5e-6)


def test_accelerate_replaces_a_state_and_refuses_what_it_would_leave_out(tmp_path: Path):
    accelerator = infinity.Accelerator(cpu=True)
    models = []
    for dtype in ("fp32", "fp16", "fp16"):
        with infinity.Init(recipe(tmp_path, f"train.dtype={dtype}")):
            models.append(LlamaForCausalLM(CONFIG))
    optimizers = [infinity.AdamW(model, max_grad_norm=1.0) for model in models]
    accelerator.prepare(models[0], optimizers[0])
    batch = torch.stack([row["input_ids"] for row in rows(2)])
    accelerator.backward(models[0](input_ids=batch, labels=batch).loss)
    beside = nn.Linear(2, 2)
    with pytest.raises(infinity.StateError, match=r"clip_grad_norm_: .* call it once for each model"):
        accelerator.clip_grad_norm_([*models[0].parameters(), *beside.parameters()], 1.0)
    with pytest.raises(infinity.StateError, match="infinity clips by the norm"):
        accelerator.clip_grad_value_(models[0].parameters(), 1.0)
    optimizers[0].step()
    for _ in range(2):
        accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    accelerator.prepare(*models[1:], *optimizers[1:])
    with pytest.raises(infinity.StateError, match="2 models in fp16, each with its own loss scale"):
        accelerator.backward(torch.ones(()))
    for model in models:
        infinity.close(model)


def on_a_rank(folder: str, ours: bool) -> list[dict[str, float]]:
    build = make if ours else make_plain
    trainer = build(Path(folder), ddp_backend="gloo")
    trainer.train()
    found = logged(trainer)
    if ours:
        infinity.close(trainer.model)
    return found


@pytest.mark.slow
def test_two_ranks_log_what_ddp_logs(tmp_path: Path):
    ours, plain = (run_ranks(on_a_rank, 2, str(tmp_path), each, group=False) for each in (True, False))
    for own, theirs in zip(ours, plain, strict=True):
        for found, wanted in zip(own, theirs, strict=True):
            assert found == pytest.approx(wanted, abs=5e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_evaluations_in_bf16_are_those_of_a_model_that_computes_in_it(
    dtype: str, tmp_path: Path, closed: Any
):
    trainer = closed(make(tmp_path, f"train.dtype={dtype}", bf16_full_eval=True, eval_strategy="no"))
    if dtype == "fp32":
        with pytest.raises(infinity.StateError, match=r"Choose the dtype with train\.dtype in the recipe"):
            trainer.evaluate()
    else:
        first = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] != first


@pytest.mark.parametrize("plus", [False, True], ids=["saved modules", "lora+"])
def test_saved_modules_and_rates_of_lora_plus_are_those_without_infinity(
    plus: bool, tmp_path: Path, closed: Any
):
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian",
        modules_to_save=None if plus else ["lm_head"],
    )  # fmt: skip
    base = infinity.from_pretrained(tmp_path / "base", recipe(tmp_path), frozen=True)
    torch.manual_seed(1)
    ours = infinity.add_lora(base, config)
    torch.manual_seed(1)
    theirs = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), config)
    optimizers: list[Any] = [None, None]
    if plus:
        rates: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}
        groups = infinity.lora_groups(ours, lr=1e-4, lr_ratio=16)
        optimizers[0] = infinity.AdamW(ours, params=groups, max_grad_norm=0.5, weight_decay=0.0, **rates)
        optimizers[1] = create_loraplus_optimizer(theirs, torch.optim.AdamW, loraplus_lr_ratio=16, **rates)
    found = []
    for kind, model, optimizer in zip((infinity.trainer(Trainer), Trainer), (ours, theirs), optimizers):
        settings = arguments(tmp_path / kind.__name__, weight_decay=0.0)
        how = {"train_dataset": rows(14), "eval_dataset": rows(4, 1), "optimizers": (optimizer, None)}
        found.append(kind(model, settings, **how))
        found[-1].train()
    assert_near(closed(found[0]), found[1])
    saved = load_file(Path(found[0].args.output_dir) / "checkpoint-6/adapter_model.safetensors")
    assert any("lm_head" in name for name in saved) != plus


def on_ranks(folder: str, name: str, accumulate: int, resume: bool) -> list[dict[str, float]]:
    settings = {"gradient_accumulation_steps": accumulate, "ddp_backend": "gloo", "eval_strategy": "no"}
    trainer = make(Path(folder), name=name, max_steps=3, save_steps=1, **settings)
    trainer.model.config.attention_dropout = 0.0
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    trainer.train(resume_from_checkpoint=resume or None)
    infinity.close(trainer.model)
    return logged(trainer)


@pytest.mark.slow
def test_two_ranks_go_on_as_one(tmp_path: Path):
    whole = run_ranks(on_ranks, 1, str(tmp_path), "one", 2, False, group=False)[0]
    run_ranks(on_ranks, 2, str(tmp_path), "two", 1, False, group=False)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"two/checkpoint-{step}")
    [found] = run_ranks(on_ranks, 1, str(tmp_path), "two", 2, True, group=False)
    for ours, wanted in zip(found, whole, strict=True):
        wanted["epoch"] = ours["epoch"]  # of two ranks an epoch is filled up to whole batches
        assert ours == pytest.approx(wanted, abs=5e-6)
