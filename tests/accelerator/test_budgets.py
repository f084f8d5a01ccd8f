"""Beside an accelerator gradients wait in host memory or on NVMe, and a small budget is enough."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import BudgetError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from tests.helpers import models, quantized, training
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for

harness = pytest.importorskip("tests.accelerator.harness")

PLACE = ("memory.nvme=[{folder}]", "memory.engine=threads")
#: Chunks of updates fit it, and little else.
SMALL = 200 * 1024


def enough(folder: str, resident: str) -> tuple[int, int, int]:
    """A small budget, units whose gradients wait on NVMe with it, and all that live there."""
    from tests.accelerator import device

    device.start().reset("eager", 0)
    host = SMALL * (2 if resident == "true" else 1)
    for _ in range(2):
        where = [each.format(folder=folder) for each in PLACE]
        where += [f"memory.host={host}", f"memory.resident={resident}"]
        model = training.build(models.build("llama", seed=1)[0], "fp32", where)
        try:
            optimizer_for(model, Rule())
            division = runtime_of(model).executor().budget.host
            assert division is not None
            units = [unit.home.tier for unit in runtime_of(model).units]
            parts = division.gradients + division.weights + division.staging
            assert runtime_of(model).storage.host_pool.capacity_nbytes + parts == host
            break
        except BudgetError as error:
            host = int(re.search(r"\((\d+) bytes\) are enough", str(error))[1])
        finally:
            infinity.close(model)
    return host, len(division.spilled), units.count(Tier.NVME)


def trained(place: tuple[str, ...], folder: Path, schedule: str = "eager", **options: Any) -> str:
    """A digest of all bits of a run there."""
    scenario = harness.Scenario(place=place, dtype="fp32", **{"clip": 1.0, "steps": 2, **options})
    [[run]] = harness.simulate(scenario, folder, [(schedule, 1)])
    assert run.faults == []
    digest: str = run.digest
    return digest


@pytest.mark.slow
def test_gradients_that_do_not_fit_host_memory_wait_on_nvme_and_change_no_bit(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(host, spilled, units)] = run_ranks(enough, 1, str(tmp_path), "false", group=False)
    assert (host, spilled) == (SMALL, units)
    assert units > 2
    small = (*PLACE, f"memory.host={host}", "memory.resident=false")
    large = (*PLACE, "memory.host=64MiB", "memory.resident=false")
    options = {"clip": 1e-3, "steps": 3}  # updates are rolled back, then held
    assert trained(small, tmp_path, "random", **options) == trained(large, tmp_path, **options)


@pytest.mark.slow
def test_units_that_stay_in_host_memory_have_room_for_their_gradients(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(host, _, _)] = run_ranks(enough, 1, str(tmp_path), "true", group=False)
    small = (*PLACE, f"memory.host={host}")
    assert trained(small, tmp_path) == trained(("memory.host=64MiB",), tmp_path)


def decoding(folder: str) -> list[tuple[str, bool, int, int]]:
    """Of quantized weights: whether the device decodes them as the CPU does, what that takes, and may."""
    from infinity.checkpoint import forms
    from infinity.checkpoint import quantized as pieces
    from infinity.checkpoint.directory import Checkpoint
    from tests.accelerator import device

    device.start().reset("eager", 0)
    pieces._DEVICE_PIECE_NUMEL = 2**11  # less than a weight
    found = []
    for kind in (*quantized.KINDS, "packed"):
        path = Path(folder) / kind
        if kind == "packed":
            models.build("llama", seed=1)[0]().save_pretrained(path)
            quantized.packed(path, only="_proj", zeros=True)
        else:
            quantized.write(kind, path)
        with Checkpoint(path) as checkpoint:
            forms.decode_checkpoint(checkpoint, forms.read_quantization(path), torch.bfloat16)
            content = (path / "model.safetensors").read_bytes()
            stored = torch.frombuffer(bytearray(content), dtype=torch.uint8).to("sim")

            def view(file: object, offset: int, nbytes: int, stored: torch.Tensor = stored) -> torch.Tensor:
                return stored[offset : offset + nbytes]

            weights = [(key, each) for key, each in checkpoint.items() if isinstance(each, forms.Decoded)]
            for key, tensor in weights[:4]:
                expected = torch.empty(tensor.shape.numel(), dtype=torch.bfloat16)
                tensor.fill(0, expected)
                out = torch.empty_like(expected, device="sim")
                torch.accelerator.synchronize()
                torch.accelerator.reset_peak_memory_stats()
                before = torch.accelerator.memory_allocated()
                tensor.fill(0, out, view)
                taken = torch.accelerator.max_memory_allocated() - before
                found.append(
                    (f"{kind} {key}", torch.equal(out.cpu(), expected), taken, tensor.scratch_nbytes)
                )
    return found


def test_decoding_gives_the_same_bits_in_the_memory_that_is_set_aside_for_it(tmp_path: Path) -> None:
    harness.needs_simulator()
    [found] = run_ranks(decoding, 1, str(tmp_path), group=False)
    assert len(found) > 8
    for key, same, taken, most in found:
        assert same, key
        assert 0 < taken <= most, key


def on_quantized_base(folder: str) -> tuple[str, list[str], list[str]]:
    """Why a ``memory.device`` is too small; digests with what is said to be enough, and with more."""
    from tests.accelerator import device, observe

    simulator = device.start()
    observe.install()
    simulator.reset("eager", 0)
    scenario = harness.Scenario(base="qwen3_fp8", lora=4, steps=2)
    with pytest.raises(BudgetError) as raised:
        harness.train(replace(scenario, more=("memory.device=64KiB",)), folder)
    told = str(raised.value)
    digests, races = [], []
    for enough in (re.search(r"at least [\d.]+ \w+ \((\d+) bytes\)", told)[1], "64MiB"):
        simulator.reset("eager", 0)
        digests.append(
            harness.digest(harness.train(replace(scenario, more=(f"memory.device={enough}",)), folder))
        )
        races += simulator.races
    return told, digests, races


@pytest.mark.slow
def test_a_budget_has_room_for_both_forms_of_a_unit_and_for_decoding(tmp_path: Path) -> None:
    harness.needs_simulator()
    [(told, digests, races)] = run_ranks(on_quantized_base, 1, str(tmp_path), group=False)
    assert "for decoding quantized weights" in told
    assert digests[0] == digests[1]
    assert races == []


def thawed(folder: str) -> list[list[float]]:
    """Losses of a quantized base that is thawed: on NVMe from the first, and in host memory until then."""
    from tests.accelerator import device

    simulator, found = device.start(), []
    for resident in ("false", "true"):
        simulator.reset("eager", 0)
        more = (f"memory.resident={resident}", "memory.host=16MiB", "memory.device=8MiB")
        scenario = harness.Scenario(base="qwen3_fp8", lora=4, steps=2, clip=1.0, more=more)

        def thaw(step: int, model: torch.nn.Module, optimizer: Any, resident: str = resident) -> None:
            if step == 0:
                held = [unit for unit in runtime_of(model).units if unit.home.stored_form is not None]
                assert bool(held) is (resident == "true")
            else:
                frozen = [p for p in model.parameters() if not p.requires_grad]
                model.requires_grad_(True)
                optimizer.add_param_group({"params": frozen})

        found.append(harness.train(scenario, folder, thaw).losses)
    return found


@pytest.mark.slow
def test_a_base_that_is_thawed_in_host_memory_has_room_for_its_new_home(tmp_path: Path) -> None:
    harness.needs_simulator()
    [[on_nvme, in_host]] = run_ranks(thawed, 1, str(tmp_path), group=False)
    assert on_nvme == in_host
