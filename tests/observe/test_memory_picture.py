"""The picture of memory over a step."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from infinity.observe.memory_picture import draw_memory

KEPT = ((0.0, 0), (0.1, 2 << 30), (0.4, 0))
PLANNED = ((0.0, 0), (0.1, 1 << 30), (0.5, 0))
LANES = {
    "NVMe write": ((0.1, 0.2, "1.0"), (0.2, 0.3, "units")),
    "NVMe read": ((0.3, 0.4, "1.0"),),
    "stall": (),
}


def test_a_picture_shows_memory_and_what_the_channels_move(tmp_path: Path) -> None:
    draw_memory(tmp_path / "step.svg", KEPT, PLANNED, LANES, capacity_nbytes=1 << 30, title="One step")
    text = (tmp_path / "step.svg").read_text()
    for words in (
        "One step",
        "everything kept: at most 2 GiB, 400 ms",
        "with the plan: at most 1 GiB, 500 ms",
        "budget",
        "NVMe write",
        "NVMe read",
        "time of the step (ms)",
    ):
        assert f"<!-- {words}" in text or f"<!--  {words}" in text
    assert "<!-- stall" not in text  # nothing stalls


def test_a_picture_needs_neither_budget_nor_transfers(tmp_path: Path) -> None:
    draw_memory(tmp_path / "step.png", KEPT, KEPT, {})
    draw_memory(tmp_path / "empty.png", (), (), {})
    for name in ("step.png", "empty.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
