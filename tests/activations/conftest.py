"""A cache with files of its own, and slots as small as tiny tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.activations import tensor_cache
from tests.activations.stage import Stage


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture(params=["direct", "disk", "host"])
def any_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, request.param)
    yield stage
    stage.close()
