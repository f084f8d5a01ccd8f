"""Weights in and out on two ranks: rank 0 gets them, or every rank when asked."""

import torch

import infinity
from tests.helpers import models, training
from tests.helpers.launch import run_ranks


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
    first, second = run_ranks(_save_and_load, 2, str(tmp_path), timeout_s=25)
    assert first["names"] > 0
    assert second["names"] == 0
    assert first["states"] > 0
    assert second["states"] == 0
    for result in (first, second):
        assert result["same"]
        assert result["tied"]
        assert result["loaded"] == first["written"]
        assert result["norm"] == first["norm"]
