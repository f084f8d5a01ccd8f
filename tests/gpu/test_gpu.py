"""Training on a real accelerator: the scenarios of ``tests/accelerator``, simulated everywhere, and what only
a real one has: the kernels of its maker, its collectives, its driver.
"""

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.comm import ranks as ranks_module
from infinity.comm.collectives import Collectives
from infinity.core.errors import BudgetError
from infinity.device.memory import HostBuffer
from tests.accelerator.harness import HOST, Scenario, batch_of, digest, here, in_memory, train
from tests.accelerator.scenarios import ALL
from tests.helpers import models
from tests.helpers.launch import run_ranks
from tests.helpers.training import build, optimizer_for, reference, streaming

pytestmark = [
    pytest.mark.gpu,
    # Kernels compile on a thread, and `warnings.catch_warnings` there undoes what others ignore meanwhile.
    pytest.mark.filterwarnings("ignore"),
]

GDS = ("memory.nvme=[{folder}]", "memory.host=4MiB", "memory.resident=false", "memory.engine=gds")
#: What needs the drive's own way to the accelerator.
DIRECT = {
    "gds": Scenario(place=GDS, clip=1.0),
    "gds, activations stored": Scenario(
        model="gpt2", place=GDS, more=("memory.activations=offload",), clip=1.0
    ),
    "gds, in little memory": Scenario(place=GDS, more=("memory.device=192KiB",)),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add in the same order each time, as far as torch has them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def make_deterministic() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)


def train_both(scenario: Scenario, folder: str) -> tuple[str, str]:
    """On each rank: digests of the scenario, and of the same training with all in memory."""
    make_deterministic()
    if scenario.world > torch.accelerator.device_count():
        share_a_device()
    ours, plain = (digest(train(each, folder)) for each in (scenario, in_memory(scenario)))
    if dist.is_initialized():
        dist.destroy_process_group()
    return ours, plain


def share_a_device() -> None:
    """Let ranks have the same accelerator; gloo copies its bytes, as NCCL takes one rank for each."""
    ranks_module.hardware_id = lambda device: ""
    dist.get_default_backend_for_device = lambda device: "gloo"


def check(scenario: Scenario, folder: Path) -> None:
    if scenario.world == 1:
        ranks = [train_both(scenario, str(folder))]
    else:
        ranks = run_ranks(train_both, scenario.world, scenario, str(folder), group=False)
    for ours, plain in ranks:
        assert ours == plain


@pytest.mark.parametrize("name", ALL)
def test_placement_never_changes_a_bit_on_the_accelerator(tmp_path: Path, name: str):
    check(ALL[name], tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="needs kvikio")
@pytest.mark.parametrize("name", DIRECT)
def test_what_comes_straight_from_the_drive_changes_no_bit(tmp_path: Path, name: str):
    check(DIRECT[name], tmp_path)


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_training_from_nvme_is_bitwise_plain_pytorch_on_the_accelerator(
    tmp_path: Path, model: str, dtype: str
):
    scenario = Scenario(model=model, dtype=dtype, more=("memory.device=192KiB",), steps=4)
    factory = models.build(model, seed=1)[0]
    plain = reference(
        lambda: factory().to(here()), lambda number: batch_of(scenario, number),
        dtype=dtype, steps=scenario.steps, rule=scenario.rule,
    )  # fmt: skip
    ours = train(scenario, str(tmp_path))
    assert ours.losses == plain.losses
    for name, weight in plain.weights.items():
        assert torch.equal(ours.weights[name].cpu(), weight.cpu()), name


def test_the_accelerator_is_within_rounding_of_the_plain_loop_on_the_cpu(tmp_path: Path):
    scenario = Scenario(dtype="fp32", steps=8, clip=1.0)
    plain = reference(*models.build("llama", seed=1), dtype="fp32", steps=8, rule=scenario.rule)
    assert here().type != "cpu"
    assert train(scenario, str(tmp_path)).losses == pytest.approx(plain.losses, rel=1e-3)


def losses_compiled(overrides: list[str]) -> list[float]:
    scenario = Scenario(clip=1.0)
    torch.manual_seed(7)
    model = build(models.build("llama", seed=1)[0], "bf16", overrides)
    optimizer = optimizer_for(model, scenario.rule)
    compiled, losses = torch.compile(model), []
    for step in range(4):
        loss = compiled(**batch_of(scenario, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.close()
    torch._dynamo.reset()
    return losses


def test_a_compiled_model_trains_from_nvme_as_it_does_in_memory(tmp_path: Path):
    plain = train(Scenario(place=HOST, clip=1.0, steps=4), str(tmp_path)).losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler: tensor cores, processes of its own
        in_memory_ = losses_compiled([*HOST])
        assert losses_compiled(streaming(tmp_path, "memory.device=192KiB")) == in_memory_
    assert in_memory_ == pytest.approx(plain, rel=2e-2)


def collect(device: str) -> tuple[list[float], list[float]]:
    """What the accelerator's own collectives give where there is one rank."""
    there = torch.device(device, 0)
    torch.accelerator.set_device_index(0)
    dist.init_process_group(
        ranks_module.backend_of(there),
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    collectives = Collectives(there, 60)
    full = torch.arange(8, dtype=torch.bfloat16, device=there)
    gathered = collectives.gather(0, "unit 0", lambda: full).value()
    spare, out = torch.empty_like(full), torch.empty(8, device=there)
    pending = collectives.reduce(0, "unit 0", lambda: (full, spare, out), b"\1", lambda used, ends: None)
    pending.wait()
    result = gathered.tolist(), out.tolist()
    collectives.close()
    dist.destroy_process_group()
    return result


def test_the_accelerators_own_collectives_take_what_they_are_given():
    assert run_ranks(collect, 1, here().type, group=False) == [(list(range(8)), list(range(8)))]


def test_a_model_that_is_dropped_leaves_no_memory_locked(tmp_path: Path):
    for _ in range(3):
        model = build(models.build("llama", seed=1)[0], "bf16", streaming(tmp_path))
        model(**batch_of(Scenario(), 0)).loss.backward()
        del model
        gc.collect()
    train(Scenario(), str(tmp_path))


def test_memory_that_cannot_be_locked_is_an_error_and_nothing_after_it():
    buffer = HostBuffer(4096, here())
    with pytest.raises(BudgetError, match="could not page-lock 4 KiB of host memory"):
        buffer.lock()
    assert torch.ones(3, device=here()).sum().item() == 3
    buffer.close()
    again = HostBuffer(4096, here())
    assert again.tensor.is_pinned()
    again.close()
