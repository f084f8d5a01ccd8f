"""Drives are measured once, and only where there is a choice."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.core.errors import DirectoryError
from infinity.nvme import probe
from infinity.nvme.probe import Speed, measure, stripe_weights


def test_a_drive_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    speed = measure(tmp_path, 4 * 2**20)
    assert speed.read_bytes_per_s > 0
    assert speed.write_bytes_per_s > 0
    assert speed.both_bytes_per_s is None  # a run at its start does not ask for it
    both = measure(tmp_path, 4 * 2**20, both=True).both_bytes_per_s
    assert both is not None
    assert both > 0
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_its_file_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".probe-{os.getpid()}-{threading.get_ident()}").symlink_to(victim)
    names: list[str] = []
    make = probe.Volume
    monkeypatch.setattr(probe, "Volume", lambda paths: names.append(paths[0].name) or make(paths))
    for _ in range(2):
        measure(tmp_path, 2**20)
    assert victim.read_text() == "precious"
    assert len({name.removeprefix(".probe-") for name in names if len(name) >= 16}) == 2


@contextmanager
def on_drives(devices: dict[Path, int]) -> Iterator[None]:
    """Directories on drives with these device numbers, which no drive has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", lambda path: SimpleNamespace(st_dev=devices[path]))
        yield


def test_shares_follow_the_speed_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    speeds = {fast: Speed(3e9, 3e9), slow: Speed(1e9, 1e9)}
    monkeypatch.setattr(probe, "measure", speeds.__getitem__)
    with on_drives({fast: -1, slow: -2}):
        assert stripe_weights([fast, slow]) == pytest.approx([0.75, 0.25])


def test_one_directory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "measure", lambda directory: pytest.fail("measured"))
    assert stripe_weights([tmp_path]) == [1.0]


def test_directories_of_one_drive_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []
    monkeypatch.setattr(probe, "measure", lambda path: (measured.append(path), Speed(2e9, 1e9))[1])
    with on_drives({tmp_path / "a": -3, tmp_path / "b": -3}):
        assert stripe_weights([tmp_path / "a", tmp_path / "b"]) == [0.5, 0.5]
    assert len(measured) == 1


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError):
        measure(tmp_path / "file", 2**20)
