"""Training on a real accelerator: the scenarios of ``tests/accelerator``, simulated everywhere."""

from pathlib import Path

import pytest
import torch

from tests.accelerator.harness import Scenario, digest, here, in_memory, train
from tests.accelerator.scenarios import FAST, SLOW
from tests.helpers import models
from tests.helpers.launch import run_ranks
from tests.helpers.training import reference

pytestmark = pytest.mark.gpu

EVERY = {**FAST, **SLOW}


def train_both(scenario: Scenario, folder: str) -> tuple[str, str]:
    """On each rank: digests of the scenario, and of the same training with all in memory."""
    ours, plain = (digest(train(each, folder)) for each in (scenario, in_memory(scenario)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return ours, plain


@pytest.mark.parametrize("name", EVERY)
def test_placement_never_changes_a_bit_on_the_accelerator(tmp_path: Path, name: str):
    scenario = EVERY[name]
    if scenario.world > torch.accelerator.device_count():
        pytest.skip(f"needs {scenario.world} accelerators")
    if scenario.world == 1:
        ranks = [train_both(scenario, str(tmp_path))]
    else:
        ranks = run_ranks(train_both, scenario.world, scenario, str(tmp_path), group=False)
    for ours, plain in ranks:
        assert ours == plain


def test_the_accelerator_is_within_rounding_of_the_plain_loop_on_the_cpu(tmp_path: Path):
    scenario = Scenario(dtype="fp32", steps=8, clip=1.0)
    plain = reference(*models.build("llama", seed=1), dtype="fp32", steps=8, rule=scenario.rule)
    assert here().type != "cpu"
    assert train(scenario, str(tmp_path)).losses == pytest.approx(plain.losses, rel=1e-3)
