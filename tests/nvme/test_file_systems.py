"""File systems that people have: overlay, loop-mounted ext4, read-only ones, and ones that go away.

They are mounted in a process of its own, which sees them alone, and go with it; without the privilege to
mount, the tests are skipped.
"""

import contextlib
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.bare import NotHereError, _unshare_mounts
from tests.helpers import models
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming

#: What became of a run: a digest of its weights, or the classes of its error and the message; what it left.
Outcome = tuple[str, tuple[str, ...], list[str]]


def outcome(folder: Path, meanwhile: Callable[[], object] = lambda: None) -> Outcome:
    """Train in ``folder``, where something happens ``meanwhile``."""
    factory, batch = models.build("gpt", seed=0)
    found, kinds = "", ()
    try:
        model = build(factory, "bf16", streaming(folder))
        with contextlib.closing(optimizer_for(model, Rule(max_grad_norm=None))) as optimizer:
            for step in range(6):
                if step == 3:
                    optimizer.synchronize()
                    meanwhile()
                model(**batch(step)).loss.backward()
                optimizer.step()
            optimizer.synchronize()
            weights = infinity.state_dict(model).values()
            found = hashlib.sha256(
                b"".join(w.view(torch.uint8).numpy().tobytes() for w in weights)
            ).hexdigest()
    except Exception as error:
        found, kinds = str(error), tuple(kind.__name__ for kind in type(error).__mro__)
    return found, kinds, [path.name for path in folder.rglob("*") if path.name != "lost+found"]


def mount(*words: Any) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def overlay(base: Path) -> Outcome:
    lower, upper, work, merged = (base / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        path.mkdir()
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", merged)
    return outcome(merged)


def ext4(base: Path) -> Outcome:
    image, folder = base / "image", base / "ext4"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    mount("-o", "loop", image, folder)
    return outcome(folder)


def read_only(base: Path) -> Outcome:
    folder = base / "read-only"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", folder)
    return outcome(folder)


def unmounted(base: Path) -> Outcome:
    folder = base / "unmounted"
    folder.mkdir()
    mount("-t", "tmpfs", "tmpfs", folder)
    return outcome(folder, lambda: subprocess.run(["umount", "-l", str(folder)], check=True))


def removed(base: Path) -> Outcome:
    folder = base / "removed"
    folder.mkdir()
    return outcome(folder, lambda: shutil.rmtree(next(folder.iterdir())))


def plain(base: Path) -> Outcome:
    folder = base / "plain"
    folder.mkdir()
    return outcome(folder)


CASES = (plain, removed, overlay, ext4, read_only, unmounted)


def play(folder: str) -> dict[str, Outcome | str]:
    """Every case; a text says why one could not be played."""
    outcomes: dict[str, Outcome | str] = {}
    refused = ""
    try:
        _unshare_mounts()
    except (NotHereError, OSError) as error:
        refused = f"no mounts of its own: {error}"
    for case in CASES:
        try:
            outcomes[case.__name__] = (
                refused if refused and case not in (plain, removed) else case(Path(folder))
            )
        except (OSError, subprocess.CalledProcessError) as error:
            outcomes[case.__name__] = f"cannot be mounted here: {error}"
    return outcomes


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome | str]:
    return run_ranks(play, 1, str(tmp_path_factory.mktemp("mounts")), group=False)[0]


def of(played: dict[str, Outcome | str], name: str) -> Outcome:
    found = played[name]
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("name", ["overlay", "ext4"])
def test_the_same_bits_on_every_file_system(played, name):
    assert of(played, name) == of(played, "plain")
    assert not of(played, name)[2]


def test_a_read_only_file_system_is_an_error_that_names_the_directory(played):
    message, kinds, _ = of(played, "read_only")
    assert "DirectoryError" in kinds
    assert "EROFS" in message
    assert "memory.nvme" in message


@pytest.mark.parametrize("name", ["removed", "unmounted"])
def test_a_directory_that_goes_away_is_an_error_that_names_it(played, name):
    message, kinds, left = of(played, name)
    assert "DiskError" in kinds, message
    assert f"/{name}/" in message
    assert "removed" in message
    assert not left
