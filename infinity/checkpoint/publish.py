"""A directory that appears whole or not at all.

[Note: where it is made]
Everything is written into a hidden sibling, ``.NAME.xxxxxxxx.part``, brought to the drive, and renamed.
The process that makes it holds a lock on the sibling itself: see :mod:`infinity.core.files`. So what a killed
export left behind is recognized, and removed by the next one to the same place.
"""

import errno as errno_names
import glob
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.writer import writing
from infinity.core.errors import CheckpointError
from infinity.core.files import open_locked, sync

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY

#: What makes up a tokenizer or processor in a directory of a Hugging Face model, as patterns of names.
#: Code (``*.py``) is not among them.
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json",
    "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.spm", "*.tiktoken", "bpe.codes",
    "normalizer.json", "chat_template*.json", "chat_template*.jinja", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class Publication:
    """The directory ``out`` while it is made; a context manager that leaves nothing half done.

    Args:
        out: Must not exist, or be empty.
        token: Makes the sibling's name unlike any other's.

    Raises:
        CheckpointError: ``out`` is not free.
        WriteError: The directory above it cannot be written.
    """

    def __init__(self, out: Path, token: str) -> None:
        self.out, self.path = out, partial_path(out, token)
        self._lock = -1
        check_free(out)
        with writing(f"making a directory beside {out}", self.path):
            out.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        try:
            with suppress(OSError):  # a file system without locks: what is left behind stays there
                self._lock = open_locked(self.path, _DIRECTORY)
            with writing(f"looking for what a killed export left beside {out}", self.path):
                _remove_leftovers(out.parent, glob.escape(out.name))
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Bring everything to the drive, then let ``out`` appear.

        Raises:
            CheckpointError: Something has appeared there meanwhile.
            WriteError: The drive refuses.
        """
        with writing(f"publishing {self.out}", self.path):
            for path in [*self.path.rglob("*"), self.path]:
                sync(path)
            try:
                self.path.rename(self.out)
            except OSError as error:
                if error.errno in (errno_names.ENOTEMPTY, errno_names.EEXIST, errno_names.ENOTDIR):
                    check_free(self.out)
                raise
            sync(self.out.parent)

    def close(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Series:
    """Numbered directories that are published one after the other, of which the newest stay.

    ``latest`` is a symbolic link to the newest one, replaced in one step.

    Args:
        folder: Where they are.
        name: What they are called, before the number.
        keep: How many stay.
    """

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self._name, self._keep = folder, name, keep

    def path(self, number: int) -> Path:
        """The directory of this number."""
        return self.folder / f"{self._name}-{number}"

    def publish(self, number: int) -> None:
        """Let ``latest`` be this directory, which is complete, and remove those that are too many.

        Raises:
            WriteError: The file system refuses.
        """
        latest = self.folder / "latest"
        with writing(f"writing {latest}", latest):
            self.remove_leftovers()
            draft = self.folder / ".latest.new"
            draft.unlink(missing_ok=True)
            draft.symlink_to(self.path(number).name)
            draft.replace(latest)
            sync(self.folder)
            others = sorted(set(self._numbers()) - {number})
            for old in others[: max(0, len(others) - self._keep + 1)]:
                removed = partial_path(self.path(old), "old")
                self.path(old).rename(removed)  # first, so that none is there in part
                shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left of others that they made or removed."""
        _remove_leftovers(self.folder, f"{glob.escape(self._name)}-*")

    def _numbers(self) -> list[int]:
        found = (path.name.removeprefix(f"{self._name}-") for path in self.folder.glob(f"{self._name}-*"))
        return [int(number) for number in found if number.isdecimal()]


def partial_path(out: Path, token: str) -> Path:
    """Where ``out`` is made."""
    return out.parent / f".{out.name}.{token}.part"


def check_free(out: Path) -> None:
    """Raise unless a directory can appear at ``out`` without replacing anything.

    Raises:
        CheckpointError: Something is there.
    """
    link = out.is_symlink()  # also to an empty directory: what is renamed does not replace a link
    if not link and out.is_dir() and not any(out.iterdir()):
        return
    if link or out.exists():
        what = "is a symbolic link" if link else "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"{out} exists and {what}; wanted a new directory: name another")


def publish_directory(source: Path, out: Path, token: str) -> None:
    """Publish a saved model at ``source`` as ``out``, too.

    Weights become hard links where the file system allows it, and copies elsewhere; small files are
    copied, so that they may be edited.

    Raises:
        CheckpointError: ``source`` holds no whole model, or ``out`` is not free.
        WriteError: The drive refuses.
    """
    _check_whole(source)
    with Publication(out, token) as publication:
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            target = publication.path / path.relative_to(source)
            with writing(f"writing {target}", target):
                target.parent.mkdir(exist_ok=True)
                if path.suffix != ".safetensors" or not _linked(path, target):
                    shutil.copyfile(path, target)
        publication.publish()


def tokenizer_files(source: Path) -> list[Path]:
    """The files in ``source`` that belong to a tokenizer or processor; ``source`` itself if it is a file."""
    if source.is_file():
        return [source]
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy a tokenizer's files without running anything of it.

    Args:
        source: A directory, or a ``tokenizer.json``.

    Raises:
        CheckpointError: There are none.
        WriteError: The drive refuses.
    """
    files = tokenizer_files(source)
    if not files:
        raise CheckpointError(
            f"{source} holds no tokenizer; wanted a directory with tokenizer.json or the like, or such a file"
        )
    for path in files:
        target = out / ("tokenizer.json" if path == source else path.relative_to(source))
        with writing(f"writing {target}", target):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _check_whole(source: Path) -> None:
    adapter = (source / "adapter_config.json").is_file()
    for name in ("adapter_model.safetensors",) if adapter else ("config.json",):
        if not (source / name).is_file():
            raise CheckpointError(f"{source} holds no {name}, so it is no saved model")
    if not adapter:
        Checkpoint(source).close()  # every file is there, and as long as it says


def _linked(path: Path, target: Path) -> bool:
    """Whether ``target`` is now another name of the file at ``path``."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        return False  # another file system, or one without hard links
    return True


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed exports to names of this pattern left; those that still run hold their locks."""
    for path in folder.glob(f".{pattern}.*.part"):
        with suppress(OSError):
            lock = open_locked(path, _DIRECTORY, patience_s=0)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
