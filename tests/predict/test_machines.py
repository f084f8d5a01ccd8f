"""Hardware files: the shipped ones, those that ``infinity probe`` writes, and their errors."""

import os
from pathlib import Path

import pytest
import torch

from infinity.cli import main
from infinity.core.errors import RecipeError
from infinity.optim.rules import find_rule
from infinity.predict import machines
from infinity.predict.machines import load_machine, machine_names, probe, rank_rates

ROOT = Path(__file__).parents[2]


def test_every_shipped_file_is_a_machine_and_lies_in_configs_too() -> None:
    names = machine_names()
    assert names == [
        "desktop-4090", "desktop-4090-64g", "dgx-2", "dgx-a100", "gh200", "hgx-h100", "hgx-h200",
        "server-4090-800g", "vm-2core",
    ]  # fmt: skip
    assert sorted(path.stem for path in (ROOT / "configs/hardware").glob("*.yaml")) == names
    for name in names:
        machine = load_machine(name)
        rates = rank_rates(machine, machine.devices_in_all, machine.choose_dtype())
        assert 1e9 < rates.flops_per_s < 1e15
        assert 1e8 < rates.channels.read_bytes_per_s < 1e11
        assert rates.channels.mixed_bytes_per_s <= (
            rates.channels.read_bytes_per_s + rates.channels.write_bytes_per_s
        )


def test_auto_is_fp16_where_the_device_has_no_bf16_and_as_it_would_be_on_the_device_itself() -> None:
    chosen = {name: load_machine(name).choose_dtype() for name in machine_names()}
    assert chosen.pop("dgx-2") == "fp16"  # V100
    assert set(chosen.values()) == {"bf16"}
    slow = ["devices.bf16_flops_per_s=null", "devices.fp16_flops_per_s=100e12"]
    assert load_machine("desktop-4090", slow).choose_dtype() == "fp32"  # 1.2 times fp32's speed


def test_ranks_share_what_a_node_has() -> None:
    machine = load_machine("dgx-2")
    rates = rank_rates(machine, 16, "fp16")
    assert rates.flops_per_s == pytest.approx(70e12)
    assert rates.channels.read_bytes_per_s == pytest.approx(1.6e9)  # ZeRO-Infinity, figure 2b
    assert rates.channels.host_bytes_per_s == pytest.approx(3.0e9)
    alone = rank_rates(machine.with_ranks(1), 1, "fp16")
    assert alone.channels.read_bytes_per_s == pytest.approx(25.6e9)
    assert alone.links_bytes_per_s == float("inf")


def test_each_byte_of_a_gather_and_a_reduction_crosses_the_border_of_a_node_once() -> None:
    machine = load_machine("hgx-h100").with_ranks(64)
    assert machine.nodes.count == 8
    rates = rank_rates(machine, 64, "bf16")
    within, across = 7 / 8 / machine.links.device_bytes_per_s, 56 / 64 / 400e9
    assert rates.links_bytes_per_s == pytest.approx(1 / (within + across))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("hgx-h10", [], "did you mean hgx-h100"),
        ("nowhere/x.yaml", [], "shipped are desktop-4090, desktop-4090-64g, dgx-2"),
        ("dgx-2", ["drives.per_nod=3"], "drives.per_nod .*unknown key; did you mean drives.per_node"),
        ("dgx-2", ["drives.per_node=-3"], "drives.per_node .*got -3; wanted int, 0 to 1,000,000"),
        ("dgx-2", ["devices.memory=null"], "devices.memory .*wanted a size"),
        ("dgx-2", ["links.host_bytes_per_s=null"], "links.host_bytes_per_s .*since devices.per_node"),
        ("gh200", ["links.network_bytes_per_s=null", "nodes.count=2"], "since nodes.count is above 1"),
    ],
)
def test_errors_name_the_key_and_what_is_valid(name: str, overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_machine(name, overrides)


def test_probe_writes_a_file_that_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    assert main(["probe", str(tmp_path), "--output", str(file)]) == 0
    assert "this machine: " in capsys.readouterr().out
    machine = load_machine(str(file))
    assert machine.drives.per_node == 1
    assert machine.drives.read_bytes_per_s > 0
    assert machine.host.cores <= (os.cpu_count() or 1)
    assert machine.devices.fp32_flops_per_s > 0
    assert [path.name for path in tmp_path.iterdir()] == ["here.yaml"]


def test_probe_without_a_directory_measures_no_drive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 0
    assert "this machine: " in capsys.readouterr().out


@pytest.mark.parametrize("output", ["", "missing/here.yaml"])
def test_probe_names_a_path_that_cannot_be_a_file_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert main(["probe", str(tmp_path), "--output", str(tmp_path / output)]) != 0
    found = capsys.readouterr()
    assert "wanted a file's path, in a folder that exists" in found.err
    assert "this machine: " not in found.out
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("rate", "most"), [(1e11, 1024), (1e9, 256)])
def test_a_busy_machine_is_not_taken_for_a_slow_one(
    monkeypatch: pytest.MonkeyPatch, rate: float, most: int
) -> None:
    sizes: list[int] = []

    def multiply_s(dtype: torch.dtype, size: int, device: torch.device) -> float:
        sizes.append(size)
        return 8e-3 + 2 * size**3 / rate

    monkeypatch.setattr("infinity.predict.machines.multiply_s", multiply_s)
    monkeypatch.setattr("infinity.predict.machines.usable_cores", lambda: 1)
    found = probe([]).devices.bf16_flops_per_s
    assert found is not None
    assert 0.7 * rate < found <= rate
    assert max(sizes) == most


def test_ranks_that_cannot_exchange_bytes_end_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_copy_bytes_per_s", "_flops_per_s"):
        monkeypatch.setattr(machines, name, lambda *args: 1e9)
    monkeypatch.setattr(machines, "_update_rates", lambda: (1e9, 1e9))
    monkeypatch.setattr("infinity.predict.machines.usable_cores", lambda: 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert probe([]).links.device_bytes_per_s is None


def test_8_bit_values_take_the_time_of_cores() -> None:
    """Beside the time of the bytes, of which there are fewer; other forms take that of their bytes."""
    host, times = load_machine("vm-2core").host, {}
    for name in ("adamw", "lion", "adamw8bit"):
        state = find_rule(name).layout(torch.bfloat16)
        nbytes = 2 * state.bytes_per_element + 2
        times[name] = nbytes / host.update_bytes_per_s(state)
        rates = rank_rates(load_machine("vm-2core"), 1, "bf16", state=state)
        assert rates.background_bytes_per_s == host.update_bytes_per_s(state)
        assert rates.update_bytes_per_s <= 2 * rates.background_bytes_per_s
    assert times["adamw"] == pytest.approx(26 / host.core_bytes_per_s)
    assert times["lion"] == pytest.approx(18 / host.core_bytes_per_s)
    assert times["adamw8bit"] == pytest.approx(
        (2 * (4 + 2 + 1 / 32) + 2) / host.core_bytes_per_s + 2 / host.core_codes_per_s
    )
