"""Errors keep their family and say what was wanted, where, and what to turn."""

import errno
import logging
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from infinity.core import errors


@pytest.mark.parametrize(
    ("cls", "family"),
    [
        (errors.RecipeError, ValueError), (errors.BudgetError, ValueError), (errors.StateError, RuntimeError),
        (errors.DivergenceError, RuntimeError), (errors.PeerError, RuntimeError),
        (errors.LockedError, OSError),
        (errors.CheckpointError, ValueError),
        (errors.DiskError, OSError),
    ],
)  # fmt: skip
def test_code_that_catches_the_family_keeps_working(cls, family):
    assert issubclass(cls, family)
    assert issubclass(cls, errors.InfinityError)


def test_a_disk_error_has_path_offset_bytes_errno_and_free_space(tmp_path):
    path = tmp_path / "rank0.bin"
    error = errors.DiskError(errno.EIO, "read", path, offset=8192, nbytes=4096, moved=512)
    assert (error.errno, error.path, error.offset, error.nbytes) == (errno.EIO, str(path), 8192, 4096)
    assert error.filename == str(path)
    for part in ("read of 4096 bytes at offset 8192", "after 512 bytes", "EIO", "bytes free", str(path)):
        assert part in str(error)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "may write"),
        (errno.EIO, "dmesg"),
    ],
)
def test_the_advice_fits_the_error(tmp_path, number, advice):
    assert advice in str(errors.DiskError(number, "write", tmp_path / "x", offset=0, nbytes=1))


def test_an_error_about_a_directory_that_is_gone_can_still_be_told(tmp_path):
    error = errors.DiskError(errno.ENOENT, "write", tmp_path / "gone" / "x", offset=0, nbytes=1)
    assert "free space unknown" in str(error)


def test_errors_travel_between_processes(tmp_path):
    error = errors.DiskError(errno.EIO, "read", tmp_path / "x", offset=1, nbytes=2, moved=1)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.path, copy.offset, copy.nbytes) == (str(error), error.path, 1, 2)
    directory = errors.DirectoryError(errno.EROFS, "making it", tmp_path)
    copy = pickle.loads(pickle.dumps(directory))
    assert (type(copy), str(copy), copy.path) == (errors.DirectoryError, str(directory), str(tmp_path))
    assert errors.copied(directory) is not directory


def test_a_thread_that_ends_its_quiet_leaves_that_of_others():
    before, level = [*warnings.filters], logging.root.manager.disable
    first, second = errors.quiet_libraries(), errors.quiet_libraries()
    with ThreadPoolExecutor(1) as other:
        other.submit(first.__enter__).result()
        second.__enter__()
        other.submit(first.__exit__, None, None, None).result()
        warnings.warn("an error in tests", FutureWarning, stacklevel=1)
        assert logging.root.manager.disable == logging.CRITICAL
        second.__exit__(None, None, None)
    assert (warnings.filters, logging.root.manager.disable) == (before, level)
