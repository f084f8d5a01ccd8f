"""Journals of commits, for tests: what they hold, and what a drive or a hand does to them."""

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infinity.shards.journal import CommitRecord, UnitRecord, read_journal


def units_in(*versions: int) -> list[UnitRecord]:
    """Return records of units without parameters or places, in these versions."""
    return [UnitRecord(8, [], (), [], version) for version in versions]


def journals(folder: Path) -> list[Path]:
    """Return the journals below ``folder``, in order."""
    return sorted(folder.rglob("rank*.commits"))


def records(folder: Path) -> list[CommitRecord]:
    """Return the commits that are whole in all journals below ``folder``, the oldest first."""
    found = [record for path in journals(folder) for record in read_journal(path).commits.values()]
    return sorted(found, key=lambda record: record.step)


def newest(folder: Path) -> CommitRecord:
    return records(folder)[-1]


def run_sql(path: Path, sql: str, *values: Any) -> list[Any]:
    """Change or ask a journal by hand."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(sql, values).fetchall()


@contextlib.contextmanager
def ended_in_the_transaction(error: BaseException) -> Iterator[None]:
    """Each journal that is opened in this context raises ``error`` where it deletes old commits."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql.startswith("DELETE"):
                raise error
            return super().execute(sql, *values)

    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(connect, factory=Connection))
        yield


def without_commits(path: Path) -> None:
    """Leave a journal as it was before its first commit."""
    run_sql(path, "DELETE FROM commits")
    path.with_name(f"{path.name}-head").unlink()
