"""An average of the weights beside any rule: that of torch's AveragedModel, exported, on any ranks."""

import itertools
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import infinity
from infinity.app.export import publish_run
from infinity.app.train import train
from infinity.cli import main
from tests.app.test_goes_on import interrupt as interrupt_run
from tests.app.test_goes_on import metrics
from tests.app.test_goes_on import recipe as recipe_of
from tests.app.test_goes_on import same as alike
from tests.helpers import families, models
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.training import build, recipe, small_units
from tests.shards.test_resume import interrupt, run, same, state

DECAY, STEPS = 0.8, 4
RULES = ("adam", "adamw", "adamw8bit", "lion", "sgd")


def place(folder: Path | str, name: str, *more: str) -> list[str]:
    if name == "host":
        return ["memory.host=64MiB", *more]
    return [f"memory.nvme=[{folder}]", "memory.host=128MiB", "memory.resident=false", *more]


class Averages:
    """Those of torch, of the weights that a model of ours has after each step."""

    def __init__(self, plain: nn.Module) -> None:
        self.plain = plain
        self.kept = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def update(self, model: nn.Module) -> None:
        self.plain.load_state_dict(infinity.state_dict(model, every_rank=True))
        self.kept.update_parameters(self.plain)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.kept.module.state_dict())


def exported(model: Any, out: Path, **how: Any) -> dict[str, Tensor]:
    infinity.export(model, out, ema=True, **how)
    return {k: v for path in sorted(out.glob("*.safetensors")) for k, v in load_file(path).items()}


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        if name in got:  # a tied one is written once
            torch.testing.assert_close(got[name], value.to(got[name].dtype), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "where"), few([("adamw", "host"), ("lion", "nvme")], itertools.product(RULES, ("host", "nvme")))
)
def test_the_export_is_torchs_average_and_training_is_as_without(tmp_path, name, where):
    factory, batch = models.build("gpt", seed=3)
    ends = []
    for ema in (None, DECAY):
        model = build(factory, "fp32", place(tmp_path / "nvme", where))
        optimizer = infinity.optim.Optimizer(model, name, lr=1e-2, max_grad_norm=1.0, ema=ema)
        averages, losses = Averages(factory()), list[float]()
        for step in range(STEPS):
            losses += run(model, optimizer, batch, [step])
            averages.update(model)
        ends.append((losses, infinity.state_dict(model)))
        if ema is not None:
            got = exported(model, tmp_path / "out")
            assert run(model, optimizer, batch, [STEPS])  # the model trains on
        infinity.close(model)
    (losses, weights), (theirs, others) = ends
    assert losses == theirs
    assert all(torch.equal(others[key], value) for key, value in weights.items())
    wanted = averages.weights()
    assert set(got) <= set(wanted)
    assert len(got) > 5
    close(got, wanted)
    assert any(not torch.equal(got[key], weights[key]) for key in got)


def test_weights_that_are_converted_and_bf16_are_averaged_too(tmp_path):
    families.write("Mixtral", "bf16", tmp_path / "base")
    places = place(tmp_path / "nvme", "nvme")
    with small_units():
        model = infinity.from_pretrained(tmp_path / "base", recipe("bf16", places)).train()
    optimizer = infinity.AdamW(model, lr=1e-2, ema=DECAY)
    masters: list[dict[int, Tensor]] = []
    for step in range(STEPS):
        run(model, optimizer, families.batch, [step])
        fields = optimizer.state_dict()["state"]
        masters.append({i: each["master"] for i, each in fields.items()})
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    exported(model, tmp_path / "out")
    infinity.close(model)
    with torch.no_grad():
        got = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
        for i, name in enumerate(order):
            average = masters[0][i]
            for master in masters[1:]:
                average = average.lerp(master[i], 1 - DECAY)
            torch.testing.assert_close(got[name].float(), average, rtol=2**-8, atol=1e-6)


def test_a_killed_run_goes_on_with_its_average(tmp_path):
    factory, batch = models.build("gpt", seed=3)
    given = place(tmp_path / "nvme", "nvme", "run.name=mine")

    def start() -> tuple[Any, Any]:
        model = build(factory, "bf16", given)
        return model, infinity.optim.AdamW8bit(model, lr=1e-2, ema=DECAY)

    model, optimizer = start()
    run(model, optimizer, batch, range(4))
    final, wanted = state(model, optimizer), exported(model, tmp_path / "whole")
    infinity.close(model)
    model, optimizer = start()
    run(model, optimizer, batch, range(2))
    interrupt(model)
    model, optimizer = start()
    assert infinity.resume(model, optimizer) == 2
    run(model, optimizer, batch, range(2, 4))
    same(state(model, optimizer), final)
    got = exported(model, tmp_path / "out")
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    infinity.save_checkpoint(model, optimizer, tmp_path / "saved")
    infinity.close(model)
    model = build(factory, "bf16", [])
    optimizer = infinity.optim.AdamW8bit(model, ema=DECAY)
    assert infinity.load_checkpoint(model, optimizer, tmp_path / "saved") == 4
    got = exported(model, tmp_path / "portable")
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    infinity.close(model)


@pytest.mark.parametrize("way", ["dict", "checkpoint"])
def test_an_average_that_a_state_lacks_begins_with_the_weights(tmp_path, way):
    factory, batch = models.build("gpt", seed=3)
    model = build(factory, "fp32", [])
    optimizer = infinity.AdamW(model, lr=1e-2)
    run(model, optimizer, batch, range(2))
    infinity.save_checkpoint(model, optimizer, tmp_path / "saved")
    saved, weights = optimizer.state_dict(), infinity.state_dict(model)
    infinity.close(model)
    model = build(factory, "fp32", [])
    optimizer = infinity.AdamW(model, lr=1e-2, ema=DECAY)
    if way == "dict":
        optimizer.load_state_dict(saved)
    else:
        assert infinity.load_checkpoint(model, optimizer, tmp_path / "saved") == 2
    first = exported(model, tmp_path / "first")
    assert all(torch.equal(value, weights[key]) for key, value in first.items())
    run(model, optimizer, batch, [2])
    after = infinity.state_dict(model)
    wanted = {key: weights[key].lerp(after[key], 1 - DECAY) for key in first}
    close(exported(model, tmp_path / "second"), wanted)
    infinity.close(model)


def on_ranks(folder: str) -> bool:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    factory, batch = models.build("gpt", seed=3)
    model = build(factory, "fp32", place(folder, "nvme"))
    optimizer = infinity.AdamW(model, lr=1e-2, ema=DECAY)
    averages = Averages(factory())
    for step in range(3):
        model(**batch(step, rank, world)).loss.backward()
        optimizer.step()
        averages.update(model)
    close(exported(model, Path(folder) / "out"), averages.weights())
    before = infinity.state_dict(model, every_rank=True)
    with infinity.ema(model):
        close(infinity.state_dict(model, every_rank=True), averages.weights())
    assert alike(infinity.state_dict(model, every_rank=True), before)
    infinity.close(model)
    return True


def test_two_ranks_export_the_average(tmp_path):
    assert run_ranks(on_ranks, 2, str(tmp_path)) == [True, True]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_averaged_saved_and_merged(tmp_path):
    families.write("Llama 3", "bf16", tmp_path / "base", torch.float32)
    places = place(tmp_path / "nvme", "nvme")
    model = infinity.from_pretrained(tmp_path / "base", recipe("fp32", places), frozen=True).train()
    model = infinity.add_lora(model, rank=2)
    optimizer = infinity.AdamW(model, lr=1e-2, ema=DECAY)
    average: dict[str, Tensor] = {}
    for step in range(STEPS):
        run(model, optimizer, families.batch, [step])
        weights = {k: v for k, v in infinity.state_dict(model).items() if "lora_" in k}
        average = {k: average[k].lerp(v, 1 - DECAY) if average else v for k, v in weights.items()}
    infinity.save_lora(model, tmp_path / "adapters", ema=True)
    infinity.save_lora(model, tmp_path / "last")
    with infinity.ema(model):
        infinity.save_lora(model, tmp_path / "inside")
    merged = exported(model, tmp_path / "merged", merge=True)
    infinity.close(model)
    got = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    last = load_file(tmp_path / "last" / "adapter_model.safetensors")
    assert len(got) == len(average) > 0
    assert alike(load_file(tmp_path / "inside" / "adapter_model.safetensors"), got)
    close(got, {key.replace(".default", ""): value for key, value in average.items()})
    assert not any(torch.equal(got[key], last[key]) for key in got)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapters"
    ).merge_and_unload()
    close(merged, theirs.state_dict())


def test_a_recipe_keeps_an_average_which_is_exported_after_the_run_and_before(tmp_path, capsys):
    more = ("optim.ema=0.9", "optim.schedule=constant", "train.eval_every=null", "run.save=true")
    for name in "ab":
        (tmp_path / name).mkdir()
    train(recipe_of(tmp_path / "a", *more, "train.steps=3"))
    finished = tmp_path / "a/runs/one"
    assert main(["export", str(finished), str(tmp_path / "out"), "--ema"]) == 0
    assert "the average of the model of" in capsys.readouterr().out
    interrupt_run(tmp_path / "b", *more, step=4)
    publish_run(tmp_path / "b/runs/one", tmp_path / "early", ema=True)
    publish_run(finished, tmp_path / "last")
    late, early, last = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "early", "last")
    )
    assert all(torch.equal(late[key], early[key]) for key in late)
    assert any(not torch.equal(late[key], last[key]) for key in late)


def test_evaluations_and_the_best_model_are_of_the_average(tmp_path):
    more = ("optim.schedule=constant", "train.steps=2", "train.eval_every=2", "run.save=true")
    for name, ema in (("plain", ()), ("averaged", ("optim.ema=0.9", "train.keep_best=loss"))):
        (tmp_path / name).mkdir()
        train(recipe_of(tmp_path / name, *more, *ema))
    folder = tmp_path / "averaged/runs/one"
    publish_run(folder, tmp_path / "best", best=True)
    publish_run(folder, tmp_path / "average", ema=True)
    best, average = (load_file(tmp_path / name / "model.safetensors") for name in ("best", "average"))
    assert alike(best, average)
    *plain, last = metrics(tmp_path / "plain")
    *averaged, of_average = metrics(tmp_path / "averaged")
    assert averaged == plain
    assert of_average["loss"] != last["loss"]


def test_what_cannot_be_averaged_is_said(tmp_path, capsys):
    factory, batch = models.build("gpt", seed=3)
    model = build(factory, "bf16", [])
    with pytest.raises(infinity.RecipeError, match=r"ema.*got 1.*>= 0 and < 1"):
        infinity.AdamW(model, ema=1)
    optimizer = infinity.AdamW(model)
    run(model, optimizer, batch, [0])
    with pytest.raises(infinity.StateError, match=r"keeps no average.*ema=0\.999"):
        infinity.export(model, tmp_path / "out", ema=True)
    leased = optimizer.runtime.storage.host_pool.leased_nbytes
    with pytest.raises(infinity.StateError, match=r"keeps no average.*ema=0\.999"), infinity.ema(model):
        pass
    assert optimizer.runtime.storage.host_pool.leased_nbytes == leased
    run(model, optimizer, batch, [1])
    assert not (tmp_path / "out").exists()
    infinity.close(model)
    (tmp_path / "run").mkdir()
    with pytest.raises(infinity.CheckpointError, match=r"keeps no average.*optim\.ema"):
        publish_run(tmp_path / "run", tmp_path / "out", ema=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--ema", "--best"]) != 0
    assert "--ema is without --best" in capsys.readouterr().err


def loss_of(model: Any, batch: Any) -> float:
    with torch.no_grad():
        return float(model(**batch(9)).loss)


@pytest.mark.parametrize(
    "more",
    [
        ["memory.host=64MiB"],
        ["memory.host=128MiB", "memory.nvme=[{}]", "optim.ema=0.8"],
        ["memory.host=128MiB", "memory.resident=false", "memory.nvme=[{}]", "run.name=mine"],
    ],
    ids=["host", "both", "nvme"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_context_evaluates_the_average_and_is_undone_bitwise(tmp_path, monkeypatch, more, dtype):
    factory, batch = models.build("gpt", seed=3)
    given = [each.format(tmp_path / "nvme") for each in more]
    model = build(factory, dtype, given)
    optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0, ema=DECAY)
    pool = optimizer.runtime.storage.host_pool
    if len(more) == 3 and "run.name=mine" not in more:  # no room for weights beside their averages
        lease = pool.try_lease
        monkeypatch.setattr(
            pool, "try_lease", lambda n, who: None if who.startswith("weights of") else lease(n, who=who)
        )
    losses = run(model, optimizer, batch, range(2))
    average, before, last = exported(model, tmp_path / "out"), state(model, optimizer), loss_of(model, batch)
    leased = pool.leased_nbytes
    with infinity.ema(model):
        inside, weights = loss_of(model, batch), infinity.state_dict(model)
        infinity.export(model, tmp_path / "inside")
        with pytest.raises(infinity.StateError, match=r"train.*after the block"), torch.enable_grad():
            model(**batch(0))
        for refused in (optimizer.state_dict, lambda: model.load_state_dict(weights)):
            with pytest.raises(infinity.StateError, match="after the block"):
                refused()
        with pytest.raises(infinity.StateError, match="after the block"), infinity.ema(model):
            pass
    assert pool.leased_nbytes == leased
    assert loss_of(model, batch) == last != inside
    same(state(model, optimizer), before)
    got = load_file(tmp_path / "inside/model.safetensors")
    for key, value in average.items():
        assert torch.equal(got[key], value)
        assert torch.equal(weights[key], value)
    losses += run(model, optimizer, batch, range(2, 4))
    end = state(model, optimizer)
    infinity.close(model)
    model = build(factory, dtype, [])
    optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0, ema=DECAY)
    assert run(model, optimizer, batch, range(4)) == losses
    same(state(model, optimizer), end)
    infinity.close(model)
    plain = factory()
    plain.load_state_dict({k: v.float() for k, v in weights.items()})
    if dtype == "fp32":
        assert loss_of(plain, batch) == pytest.approx(inside, rel=1e-5)
