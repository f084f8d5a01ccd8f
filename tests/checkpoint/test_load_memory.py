"""Loading needs memory for a chunk, however large the model: measured on a process of its own."""

import re
from pathlib import Path

import pytest
import torch

import infinity
from infinity.device import machine
from infinity.engine.runtime import runtime_of
from infinity.optim.elementwise import ADAMW
from infinity.optim.rules import prepare
from tests.helpers.launch import run_ranks
from tests.helpers.training import recipe

MIB = 2**20
#: What each rank may lease, all streaming (bytes).
HOST = 48 * MIB
#: Temporaries of a chunk, modules of 12 blocks, and what the allocator keeps of both (bytes).
AROUND = 80 * MIB


def resident_nbytes(what):
    """This process's memory, now (``VmRSS``) or at most (``VmHWM``)."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def save(directory):
    """A Llama of 197 M parameters: 0.8 GB in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
            num_attention_heads=16, num_key_value_heads=8,
        )
    )  # fmt: skip
    model.save_pretrained(directory, max_shard_size="200MB")
    return sum(p.numel() for p in model.parameters())


def load(directory, nvme):
    """What loading adds to a process that has imported everything, and what its pool leased (bytes)."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    prepare(ADAMW, torch.bfloat16, torch.float32)  # numba and the code that it makes are no part of a load
    for each in list(machine._compiling.values()):
        each.join()
    overrides = [f"memory.nvme=[{nvme}]", f"memory.host={HOST}", "memory.resident=false"]
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    model = infinity.from_pretrained(directory, recipe("bf16", overrides))
    added = resident_nbytes("VmHWM") - before
    leased = runtime_of(model).storage.host_pool.peak_nbytes
    norm = infinity.state_dict(model.model.norm, every_rank=True)["weight"]
    infinity.close(model)
    return added, leased, bool(torch.equal(norm, torch.ones_like(norm)))


@pytest.mark.slow
def test_host_memory_during_a_load_is_the_budget_and_not_the_model(tmp_path):
    numel = run_ranks(save, 1, tmp_path / "model", group=False)[0]
    for world in (1, 2):
        for added, leased, right in run_ranks(load, world, tmp_path / "model", tmp_path / "nvme"):
            assert right
            assert leased <= HOST
            assert added <= HOST + AROUND
            assert added < 4 * numel / 4
