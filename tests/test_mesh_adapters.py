"""Adapters on models that are divided over a mesh of ranks train as on one rank, to rounding."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.core.errors import StateError
from tests.helpers import models
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming
from tests.test_mesh import mesh_of
from tests.test_mesh_pretrained import save
from tests.test_stages import MICRO, Stage, build, divide, run, schedule_of
from tests.test_stages import mesh_of as stages_of

HOST, STEPS = ["memory.host=64MiB"], 4
SETTINGS: dict[str, Any] = {"rank": 4, "target_modules": "all-linear", "alpha": 16}


def adapted(folder: str, mesh: Any, where: list[str], dtype: str = "fp32", **settings: Any) -> Any:
    how = {} if mesh is None else {"mesh": mesh, "tp_plan": "auto"}
    with small_units():
        model = infinity.from_pretrained(folder, recipe(dtype, where), frozen=True, **how).train()
    torch.manual_seed(3)
    return infinity.add_lora(model, **(settings or SETTINGS))


def train(
    folder: str, mesh: Any, where: list[str], out: str = "", steps: int = STEPS, **how: Any
) -> list[tuple[float, float | None]]:
    model = adapted(folder, mesh, where, **how.get("settings", {}))
    optimizer, (_, batch) = optimizer_for(model, Rule(lr=1e-2)), models.build("llama", seed=1)
    first = infinity.resume(model, optimizer) if "resumes" in how else 0
    if "load" in how:
        first = infinity.load_checkpoint(model, optimizer, how["load"])
    figures = []
    for step in range(first, steps):
        dp = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh.size(0))
        loss = model(**batch(step, *dp)).loss
        loss.backward()
        optimizer.step()
        figures.append((loss.item(), optimizer.grad_norm))
    if out:
        infinity.save_lora(model, out)
    if "merged" in how:
        infinity.export(model, f"{out}/merged", merge=True)
    if "save" in how:
        infinity.save_checkpoint(model, optimizer, how["save"])
    infinity.close(model, keep=how.get("keep", False))
    return figures


def as_alone(folder: str, out: str, where: list[str]) -> None:
    """Two ranks that share a batch train what one rank trains."""
    alone, divided = (
        train(folder, each, where, f"{out}/{each is None}", merged=True) for each in (None, mesh_of(1, 2))
    )
    for one, other in zip(alone, divided, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    torch.distributed.barrier()
    one, other = (load_file(f"{out}/{which}/adapter_model.safetensors") for which in (True, False))
    assert one.keys() == other.keys()
    assert len(one) == 2 * 2 * 7
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=1e-3, atol=1e-5), key
        assert "lora_B" not in key or value.abs().sum() > 0
    one, other, base = (
        load_file(f"{each}/model.safetensors")
        for each in (f"{out}/True/merged", f"{out}/False/merged", folder)
    )
    for key, value in base.items():
        assert torch.allclose(one[key], other[key], rtol=1e-3, atol=1e-5), key
        assert "_proj" not in key or not torch.allclose(one[key], value, rtol=1e-3, atol=1e-5), key


def goes_on(folder: str, out: str, sizes: tuple[int, int]) -> None:
    """Saved adapters, a named run and a portable checkpoint are gone on with."""
    mesh = mesh_of(*sizes)
    whole = train(folder, mesh, HOST, f"{out}/whole", save=f"{out}/checkpoint", steps=2)
    model = adapted(folder, mesh, HOST, adapter=f"{out}/whole")
    infinity.save_lora(model, f"{out}/again")
    infinity.close(model)
    torch.distributed.barrier()
    one, other = (load_file(f"{out}/{each}/adapter_model.safetensors") for each in ("whole", "again"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    rest = train(folder, mesh, HOST, load=f"{out}/checkpoint")
    named = [f"memory.nvme=[{out}/files]", *HOST, "run.name=adapters"]
    halves = [
        *train(folder, mesh, named, steps=2, keep=True, resumes=True),
        *train(folder, mesh, named, resumes=True),
    ]
    assert halves == [*whole, *rest]


def test_adapters_on_a_divided_model_are_those_of_one_rank_to_rounding_and_go_on(tmp_path):
    save("Llama", tmp_path / "llama", torch.float32)
    folder = str(tmp_path / "llama")
    run_ranks(
        several, 2,
        (as_alone, folder, str(tmp_path / "host"), HOST),
        (as_alone, folder, str(tmp_path / "nvme"), streaming(str(tmp_path / "a"))),
        (goes_on, folder, str(tmp_path / "on"), (1, 2)),
    )  # fmt: skip


def test_adapters_train_and_go_on_in_a_mesh_of_four_ranks(tmp_path):
    save("Llama", tmp_path / "llama", torch.float32)
    run_ranks(goes_on, 4, str(tmp_path / "llama"), str(tmp_path), (2, 2))


def refuse(folder: str) -> None:
    import peft

    mesh = mesh_of(1, 2)
    for wrong in ({"dora": True}, {"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(StateError, match="of what is divided over the ranks of a mesh"):
            adapted(folder, mesh, HOST, **{"rank": 4, "target_modules": ["q_proj"], **wrong})
    model = infinity.from_pretrained(folder, recipe("fp32", HOST), mesh=mesh, tp_plan="auto", frozen=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    with pytest.raises(StateError, match=r"infinity\.add_lora\(model, config\)"), infinity.Init(model):
        peft.get_peft_model(model, config)


def whole_state(folder: str) -> None:
    """A divided model's state_dict has whole tensors, on rank 0 or on all, as before it was divided."""
    mesh = mesh_of(1, 2)
    models_of = []
    for how in ({}, {"mesh": mesh, "tp_plan": "auto"}):
        model = infinity.from_pretrained(folder, recipe("fp32", HOST), **how)
        models_of.append(infinity.state_dict(model, every_rank=True))
        assert bool(infinity.state_dict(model)) or torch.distributed.get_rank() > 0
        infinity.close(model)
    whole, divided = models_of
    assert whole.keys() == divided.keys()
    assert all(torch.equal(value, divided[key]) for key, value in whole.items())


def too_many(folder: str) -> None:
    mesh = mesh_of(1, 4)
    with pytest.raises(StateError, match=r"k_proj has 2 heads, and is divided over 4 ranks: give 'tp'"):
        infinity.from_pretrained(folder, recipe("fp32", HOST), mesh=mesh, tp_plan="auto")


def test_what_adapters_on_a_divided_model_cannot_do_is_an_error_that_says_what_can(tmp_path):
    save("Llama", tmp_path / "llama", torch.float32)
    folder = str(tmp_path / "llama")
    run_ranks(several, 2, (refuse, folder), (whole_state, folder))
    run_ranks(too_many, 4, folder)


STAGED = {"rank": 4, "target_modules": ["q_proj", "up_proj", "down_proj"]}


def train_stages(checkpoint: str) -> None:
    """Each stage has adapters of its own, of which one layer is divided, too."""
    mesh = stages_of(2, 1, 1)
    with small_units(), infinity.Init(recipe("fp32", HOST), mesh=mesh):
        model = build(mesh)
        divide(model, mesh)
    model = infinity.add_lora(model, **STAGED)
    optimizer = optimizer_for(model, Rule(lr=1e-2))
    schedule = schedule_of(model, mesh, "Schedule1F1B")
    for step in range(3):
        with infinity.no_sync(model, micro_batches=MICRO):
            run(schedule, mesh, step)
        optimizer.step()
    assert len(infinity.state_dict(model)) > 0
    with pytest.raises(StateError, match=r"save_lora of a model.*infinity\.save_checkpoint"):
        infinity.save_lora(model, f"{checkpoint}-adapters")
    infinity.save_checkpoint(model, optimizer, checkpoint)
    infinity.close(model)


def load_whole(checkpoint: str, out: str) -> None:
    with small_units(), infinity.Init(recipe("fp32", HOST)):
        model = Stage(0, 1)
    model = infinity.add_lora(model, **STAGED)
    optimizer = optimizer_for(model, Rule(lr=1e-2))
    assert infinity.load_checkpoint(model, optimizer, checkpoint) == 3
    infinity.save_lora(model, out)
    infinity.close(model)


def test_adapters_of_all_stages_of_a_pipeline_are_in_one_checkpoint(tmp_path):
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "adapters")
    run_ranks(train_stages, 2, checkpoint)
    run_ranks(load_whole, 1, checkpoint, out)
    values = load_file(f"{out}/adapter_model.safetensors")
    assert len(values) == 4 * 3 * 2
    assert all(value.abs().sum() > 0 for value in values.values())
