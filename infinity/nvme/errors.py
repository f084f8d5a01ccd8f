"""What goes wrong with directories and records, and what is only slower: errors and warnings of nvme."""

import errno as errno_names
import os
from pathlib import Path

from infinity.core.errors import DiskError, InfinityError


class BufferedIOWarning(UserWarning):
    """A file system refuses O_DIRECT: bytes go through the page cache, which costs speed and memory."""


class EngineWarning(UserWarning):
    """The fastest engine cannot be used here; the line says why and what to do."""


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


class BaseWarning(UserWarning):
    """A frozen base that runs share was damaged; the line says what was done about it."""


class DamagedBaseError(InfinityError, OSError):
    """The file of a frozen base is not what was sealed."""

    def __init__(self, path: Path | str, what: str) -> None:
        self.path, self.what = str(path), what
        super().__init__(errno_names.EIO, f"the frozen base is damaged: {what}", self.path)


class CorruptRecordError(InfinityError, OSError):
    """A commit record is there, but is not what was written."""
