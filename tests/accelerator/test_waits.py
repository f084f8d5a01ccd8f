"""How often the host waits for the device: a figure with a bound, by place."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accelerator.harness import Scenario, train
from tests.accelerator.process import needs_simulator
from tests.accelerator.scenarios import FAST, SLOW
from tests.accelerator.simulator import Wait
from tests.helpers.launch import run_ranks

#: Where the user's program waits: its batches, its ``loss.item()``, and the model's own code.
OF_THE_USER = ("accelerator/", "helpers/", "transformers/", "integrations/")
#: Threads on which forward and backward run; torch's own have no name but this.
COMPUTE = ("MainThread", "Dummy-")
#: Where ``step()`` reads the norms of all gradients that stayed on the device, once.
OF_THE_STEP = "engine/gradients.py GradientPath.read_norms"
#: Waits per unit and step on other threads, at most: for the gradient of an update, its norm, the weights.
PER_UNIT = 3
#: More of them in a step, where other work delays a thread and a pool has no room: for a copy that ends.
LATE = 2


def count(scenario: Scenario, folder: str) -> tuple[Counter[Wait], int]:
    """Waits of one step in the middle of training, and the number of units."""
    import torch

    from infinity.engine.runtime import runtime_of
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    waits, n_units = [], []
    for steps in (2, 3):  # what building, the last values and closing take is in both
        simulator.reset("lazy", int(os.environ["RANK"]))
        train(
            replace(scenario, steps=steps),
            folder,
            lambda step, model, optimizer: n_units.append(len(runtime_of(model).units)),
        )
        waits.append(simulator.waits)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return waits[1] - waits[0], n_units[0]


def check(scenario: Scenario, folder: Path) -> None:
    needs_simulator()
    for waits, n_units in run_ranks(count, scenario.world, scenario, str(folder), group=False):
        ours = Counter({w: n for w, n in waits.items() if not w.place.startswith(OF_THE_USER)})
        assert waits.total() > ours.total()  # the user's .item() was counted
        of_compute = {w.place: n for w, n in ours.items() if w.thread.startswith(COMPUTE)}
        assert of_compute.pop(OF_THE_STEP, 0) <= 1
        assert of_compute == {}
        if "memory.activations=offload" not in scenario.more:
            assert ours.total() <= PER_UNIT * n_units * scenario.accumulate + LATE, ours


def test_no_thread_that_computes_waits_for_the_device_between_steps(tmp_path: Path):
    check(SLOW["llama on nvme, clipped"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "two ranks, accumulated",
        "gpt2 with activations stored",
        "t5 in host memory, clipped",
        "llama, one version",
        "quantized base",
        "on the device, clipped",
        "on the device in part",
        "two ranks on the device",
    ],
)
def test_no_thread_that_computes_waits_for_the_device_wherever_states_are(tmp_path: Path, name: str):
    check({**FAST, **SLOW}[name], tmp_path)
