"""One rank's directories of a run: what an interrupted run left there, and which files stay at the end."""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.comm.ranks import Ranks
from infinity.core.config import MemoryConfig
from infinity.core.errors import BEGIN_ANEW, StateError
from infinity.nvme.run_directory import RunDirectory, finished_path
from infinity.shards.config import Resume
from infinity.shards.journal import Journal, RankFiles
from infinity.shards.saved import SavedRun, clear, find_saved


class RunFiles:
    """Finds the last commit of an interrupted run, or begins a run, in each directory of ``memory.nvme``.

    Args:
        resume: Whether an interrupted run of this id goes on; None: the id is new, and no process will look
            for it again.
        stack: Gives the directories back, last of all that it closes.
        synced: Commits survive a power cut.
        note: Gets a line for people about each thing that the machine lacks.

    Attributes:
        saved: The last commit of an interrupted run, with which this one goes on.
        journal: Of the commits of this rank; None: no process will look for them.
        paths: Of the data files, one on each drive.
        keep: Leave the files on disk at the end, if a process can go on with the run.

    Raises:
        DiskError: A directory cannot be written.
        StateError: The run cannot go on; says why.
    """

    def __init__(
        self, memory: MemoryConfig, run_id: str, ranks: Ranks, resume: Resume | None,
        stack: contextlib.ExitStack, *, synced: bool, note: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._looked = False  # for a commit: from then on files without one may go
        self._unused = ""  # what files of this run begin with that are of no use before it has a commit
        self.saved: SavedRun | None = None
        self.journal: Journal | None = None
        self.keep = False
        directories = []
        for root in memory.nvme:
            directories.append(RunDirectory(Path(root), run_id, ranks.rank))
            stack.callback(self._end_directory, directories[-1], ranks.world_size)
        stack.callback(self._finish, directories)
        folders = [directory.path for directory in directories]
        files = RankFiles(ranks.rank)
        if resume is not None:
            self.saved, files = self._look_for_commit(folders, ranks, resume, note, versions=memory.versions)
            for folder in folders:
                finished_path(folder, ranks.rank).unlink(missing_ok=True)  # of a run before
        self._looked, self.keep = True, self.saved is not None
        own = None if self.saved is None else self.saved.own
        # It comes before the data files: those without a journal are of a run that has it elsewhere.
        if resume is not None:
            self.journal = Journal(folders[0] if own is None else own.journal.parent, files, synced=synced)
            stack.callback(self.journal.close)
        named = [directory.file(files.data(drive)) for drive, directory in enumerate(directories)]
        self.paths: Sequence[Path] = named if own is None else own.data
        if own is None and self.saved is not None:
            self._unused = f"rank{ranks.rank}-{files.generation}"

    def _look_for_commit(
        self, folders: list[Path], ranks: Ranks, resume: Resume, note: Callable[[str], object], *,
        versions: int,
    ) -> tuple[SavedRun | None, RankFiles]:  # fmt: skip
        """Return the last commit, and the names of this rank's files; remove what belongs to no commit."""
        where = ", ".join(map(str, folders))
        saved = None if resume == "never" else find_saved(folders, ranks, note)
        if saved is None:
            self._looked = True
            if resume == "must":
                raise StateError(
                    f"run.resume=must, but there is no commit in {where}; run.resume=auto begins a new run "
                    "there"
                )
            clear(folders, ranks)
            return None, RankFiles(ranks.rank, run=ranks.least(secrets.randbits(48), "the run's number"))
        if versions == 1:
            raise StateError(
                f"an interrupted run is in {where}, which memory.versions=1 would write over: set "
                f"memory.versions=2 to go on; {BEGIN_ANEW}"
            )
        clear(folders, ranks, keep=(saved.generation,))
        return saved, RankFiles(ranks.rank, saved.generation + (saved.own is None), saved.run)

    @property
    def _has_commit(self) -> bool:
        return self.journal is not None and self.journal.any

    def _finish(self, directories: list[RunDirectory]) -> None:
        """Say in every directory that the run is over, before the first file goes."""
        if self._looked and (self.saved is not None or self._has_commit) and not self.keep:
            for directory in directories:
                directory.finish()

    def _end_directory(self, directory: RunDirectory, world_size: int) -> None:
        committed = self.saved is not None or self._has_commit
        if not self._looked and directory.is_empty():
            directory.remove()  # this process made it
        elif not self._looked or (self.keep and committed):
            if self._unused and not self._has_commit:
                for path in directory.path.glob(f"{self._unused}[-.]*"):
                    path.unlink(missing_ok=True)
            directory.leave()
        elif committed:
            directory.remove_finished(world_size)
        else:
            directory.remove()
