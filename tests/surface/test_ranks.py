"""Weights in and out on two ranks: rank 0 gets them, or every rank when asked; a model that is changed."""

import pytest
import torch
from torch import nn

import infinity
from infinity import StateError
from tests.helpers import models, training
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Reference, Rule


def _save_and_load(directory):
    factory, batch = models.build("gpt2", seed=1)
    overrides = training.streaming(directory)
    model = training.build(factory, "bf16", overrides)
    rank = torch.distributed.get_rank()
    optimizer = infinity.AdamW(model, max_grad_norm=1.0)
    for step in range(2):
        model(**batch(step, rank, 2)).loss.backward()
        optimizer.step()
    mine, everywhere = model.state_dict(), infinity.state_dict(model, every_rank=True)
    state = optimizer.state_dict()
    model.save_pretrained(f"{directory}/saved", is_main_process=rank == 0)
    torch.distributed.barrier()
    saved = type(model).from_pretrained(f"{directory}/saved", dtype=torch.bfloat16)
    same = all(torch.equal(p, everywhere[n]) for n, p in saved.named_parameters())
    tied = everywhere["lm_head.weight"] is everywhere["transformer.wte.weight"]
    for values in everywhere.values():
        values.add_(1)  # rank 0's values count
        values.add_(rank)
    model.load_state_dict(everywhere)
    loaded = infinity.state_dict(model, every_rank=True)
    model(**batch(5, rank, 2)).loss.backward()
    optimizer.step()
    infinity.close(model)
    return {
        "names": len(mine), "states": len(state["state"]), "same": same, "tied": tied,
        "norm": optimizer.grad_norm,
        "loaded": {n: v.float().double().sum().item() for n, v in loaded.items()},
        "written": {n: v.float().double().sum().item() for n, v in everywhere.items()},
    }  # fmt: skip


def test_two_ranks_gather_save_and_load(tmp_path):
    first, second = run_ranks(_save_and_load, 2, str(tmp_path))
    assert first["names"] > 0
    assert second["names"] == 0
    assert first["states"] > 0
    assert second["states"] == 0
    for result in (first, second):
        assert result["same"]
        assert result["tied"]
        assert result["loaded"] == first["written"]
        assert result["norm"] == first["norm"]


def _change_the_finished_model(model):
    torch.manual_seed(7)
    model.lm_head = nn.Linear(models.HIDDEN, models.VOCABULARY)
    model.resize_token_embeddings(models.VOCABULARY + 8)


def _train_a_changed_model(directory):
    factory, batch = models.build("llama", seed=1)
    model = training.build(factory, "bf16", training.streaming(directory))
    with training.small_units(), infinity.Init(model):
        _change_the_finished_model(model)
    optimizer = training.optimizer_for(model, Rule())
    losses = []
    for step in range(3):
        loss = model(**batch(step)).loss  # the same on both ranks, so the mean is what one has
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with pytest.raises(StateError, match=r"train\.dtype"):
        model.half()
    weights = infinity.state_dict(model, every_rank=True)
    infinity.close(model)
    return losses, weights


def test_two_ranks_train_a_model_that_was_changed_when_it_was_finished(tmp_path):
    factory, batch = models.build("llama", seed=1)
    plain = factory()
    _change_the_finished_model(plain)
    loop = Reference(plain, torch.bfloat16, Rule())
    expected = [loop.step([batch(step)]).losses[0].item() for step in range(3)]
    for losses, weights in run_ranks(_train_a_changed_model, 2, str(tmp_path)):
        assert losses == expected
        assert all(torch.equal(weights[name], param) for name, param in loop.parameters.items())
