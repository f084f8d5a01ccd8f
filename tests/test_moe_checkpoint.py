"""The checkpoint that ``benchmarks/moe.py`` writes in streams is one that libraries read; it never stays."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open

import infinity
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.forms import decode_checkpoint, read_quantization
from infinity.engine.runtime import runtime_of
from tests.helpers.scripts import script
from tests.helpers.training import recipe


@pytest.fixture
def moe() -> Iterator[Any]:
    with script("moe") as module:
        yield module


def test_it_has_the_layout_and_the_values_of_a_quantized_model_and_trains(moe, tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "FILE_NBYTES", 6 * 10**5)
    shape = moe.Shape(
        2, hidden=128, heads=2, kv_heads=1, head_dim=64, experts=4, per_token=2, inner=192, vocabulary=500
    )
    moe.write_checkpoint(shape, tmp_path / "source")
    files = sorted((tmp_path / "source").glob("*.safetensors"))
    assert len(files) > 1
    found = 0
    for path in files:
        with safe_open(path, "pt") as file:  # refuses gaps, and tensors that overlap
            names = file.keys()
            found += sum(file.get_tensor(name).nbytes for name in names)
    assert found == shape.nbytes
    checkpoint = Checkpoint(tmp_path / "source")
    decode_checkpoint(checkpoint, read_quantization(tmp_path / "source"))
    weight = torch.empty(192 * 128)
    checkpoint["model.layers.1.mlp.experts.3.up_proj.weight"].fill(0, weight)
    assert 0.01 < weight.std() < 0.04
    checkpoint.close()
    places = [f"memory.nvme=[{tmp_path / 'nvme'}]", "memory.resident=false", "partition.tile=64KiB"]
    model = infinity.from_pretrained(tmp_path / "source", recipe("bf16", places), frozen=True).train()
    model = infinity.add_lora(model, rank=2, target_modules=["q_proj"])
    optimizer = infinity.AdamW(model, lr=1e-3)
    ids = torch.arange(16).view(1, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert any(unit.routed and unit.stored for unit in runtime_of(model).units)
    assert "decode" in optimizer.report().stall_s
    infinity.close(model)


def test_a_drive_without_room_is_refused_before_anything_is_written(moe, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(moe.shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(SystemExit):
        moe.main(["--nvme", str(tmp_path)])
    assert "1.0 GB free. The checkpoint takes 31." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
