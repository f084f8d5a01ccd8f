"""What goes wrong with directories and records: errors of nvme."""

import errno as errno_names
import os
from pathlib import Path

from infinity.core.errors import DiskError, InfinityError


class DirectoryError(DiskError):
    """A directory cannot be used for a run."""

    def __init__(self, errno: int, action: str, path: Path | str) -> None:
        self.path, self.offset, self.nbytes = str(path), 0, 0
        name = errno_names.errorcode.get(errno, str(errno))
        text = (
            f"{action} failed: {os.strerror(errno)} ({name}); "
            "give memory.nvme a directory on a local drive that this user may write"
        )
        OSError.__init__(self, errno, text, self.path)


class DamagedBaseError(InfinityError, OSError):
    """The file of a frozen base is not what was sealed."""

    def __init__(self, path: Path | str, what: str) -> None:
        self.path, self.what = str(path), what
        super().__init__(errno_names.EIO, f"the frozen base is damaged: {what}", self.path)


class CorruptRecordError(InfinityError, OSError):
    """A commit record is there, but is not what was written."""
