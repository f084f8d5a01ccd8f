"""What people ask of a released model outside training fits the window of a tight budget."""

import torch
from torch import nn

import infinity
from tests.helpers.training import build, streaming


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(24)])


def test_printing_a_model_needs_no_more_than_the_window(tmp_path):
    model = build(tower, "bf16", streaming(tmp_path, "memory.device=100KiB"))
    optimizer = infinity.AdamW(model)
    try:
        assert "in_features=64" in repr(model)  # asks every layer for its bias
        model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        report = optimizer.report()
        assert report.peak_nbytes["device"] <= optimizer.budgets["device"]
    finally:
        infinity.close(model)


def test_a_checkpoint_between_steps_changes_no_plan(tmp_path):
    model = build(tower, "bf16", streaming(tmp_path, "memory.device=200KiB"))
    optimizer = infinity.AdamW(model)
    try:
        for step in range(4):
            model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            assert optimizer.report().on_demand == 0, step
            infinity.state_dict(model)
    finally:
        infinity.close(model)


def test_a_model_that_does_not_fit_does_not_disturb_another(tmp_path):
    too_large = build(tower, "bf16", streaming(tmp_path, "memory.device=1KiB"))
    model = build(tower, "bf16", streaming(tmp_path))
    try:
        with infinity.gathered(model):
            assert not any(torch.isnan(p).any() for p in model.parameters())
    finally:
        infinity.close(model)
        infinity.close(too_large)
