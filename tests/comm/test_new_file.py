"""The file of memory that ranks share."""

import os

import pytest

from infinity.comm.shared import NodeMemory


def test_a_file_that_cannot_be_as_large_as_memory_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: made.append(create(name)) or made[-1])

    def fails(file: int, nbytes: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", fails)
    assert not NodeMemory.works()
    [file] = made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
