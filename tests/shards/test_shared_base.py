"""Runs with one frozen base keep one copy of it on NVMe: the same bits, none written twice, none trusted."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import infinity
import infinity.shards.storage
from infinity.core.errors import DiskError
from infinity.core.lifecycle import Tier
from infinity.engine.runtime import runtime_of
from infinity.nvme.run_directory import find_leftovers, find_unused_bases
from tests.helpers import models
from tests.helpers.faulty import Fault, FaultyEngine
from tests.helpers.launch import run_ranks, several
from tests.helpers.limits import file_limit
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoint")


def save(directory: Path, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    models.build("llama", seed)[0]().to(dtype).save_pretrained(directory)
    return directory


def load(checkpoint: Path, nvme: Any, *more: str, dtype: str = "bf16", **options: Any) -> Any:
    """The frozen model of a checkpoint, on NVMe."""
    options = {"frozen": True} | options
    with small_units():
        return infinity.from_pretrained(checkpoint, recipe(dtype, streaming(nvme, *more)), **options)


@contextlib.contextmanager
def loaded(*args: Any, **options: Any):
    model = load(*args, **options)
    try:
        yield model
    finally:
        infinity.close(model)


@contextlib.contextmanager
def healed(checkpoint: Path, nvme: Path, message: str, *more: str):
    """The same, with a line about a damaged base in the log, which shows it where nobody listens."""
    lines, handler = list[str](), logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("infinity")
    log.addHandler(handler)
    try:
        model = load(checkpoint, nvme, *more)
    finally:
        log.removeHandler(handler)
    assert re.search(message, "\n".join(lines))
    try:
        yield model
    finally:
        infinity.close(model)


def train(model: Any, steps: int = 3, *, rank: int = 0, world: int = 1) -> list[float]:
    """Losses of adapters that are trained on ``model``."""
    _, batch = models.build("llama", 1)
    torch.manual_seed(5)
    with small_units():
        adapted = infinity.add_lora(model, rank=4, alpha=8.0).train()
    optimizer, losses = optimizer_for(adapted, Rule()), []
    for step in range(steps):
        loss = adapted(**batch(step, rank, world)).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def written_nbytes(model: Any) -> int:
    engine: Any = runtime_of(model).tiers.engine
    return engine.nbytes_written


def said(model: Any) -> str:
    lines: list[str] = []
    runtime_of(model).say.attach(lines.append)
    return "\n".join(lines)


def base_of(nvme: Path) -> Path:
    """The only file of the only base below ``nvme``."""
    [path] = nvme.glob("base-*/*.base")
    return path


def flip(path: Path, offset: int = 5000) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    path.chmod(0o400)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in infinity.state_dict(model).items()}


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


# --- one copy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_second_run_writes_no_byte_of_the_base_and_trains_the_same_bits(tmp_path, checkpoint, dtype):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, tmp_path / "alone", dtype=dtype, frozen=False) as model:
        alone, losses = written_nbytes(model), train(model)
    with loaded(checkpoint, nvme, dtype=dtype) as model:
        assert written_nbytes(model) == alone
        path = base_of(nvme)
        assert f"rm -r {path.parent}" in said(model)
        assert train(model) == losses
    inode, used = path.stat().st_ino, path.stat().st_blocks
    with loaded(checkpoint, nvme, dtype=dtype) as model:
        runtime = runtime_of(model)
        engine: Any = runtime.tiers.engine
        assert (engine.nbytes_read, engine.nbytes_written) == (alone, 0)
        assert base_of(nvme) == path
        assert "none written" in said(model)
        assert runtime.storage.volume.allocated_nbytes == alone
        assert runtime.storage.host_pool.peak_nbytes <= runtime.storage.host_nbytes
        assert train(model) == losses
        assert written_nbytes(model) > 0  # adapters
    assert (path.stat().st_ino, path.stat().st_blocks) == (inode, used)
    assert used * 512 < 1.2 * alone + 32768


def test_nothing_is_frozen_or_shared_unless_it_is_asked_for(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme", frozen=False) as model:
        assert all(param.requires_grad for param in model.parameters())
    assert list((tmp_path / "nvme").iterdir()) == []
    with loaded(checkpoint, tmp_path / "nvme") as model:
        assert not any(param.requires_grad for param in model.parameters())


def test_runs_at_the_same_time_share_one_copy(tmp_path, checkpoint):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as first, loaded(checkpoint, nvme) as second:
        assert written_nbytes(second) == 0
        base = base_of(nvme).stat()
        disk = sum(path.stat().st_blocks * 512 for path in nvme.rglob("*") if path.is_file())
        assert disk - base.st_blocks * 512 < 0.1 * base.st_size
        assert find_unused_bases(nvme) == []
        assert train(first) == train(second)
    assert find_unused_bases(nvme) == [base_of(nvme).parent]


def test_a_base_is_striped_over_all_drives(tmp_path, checkpoint):
    drives = f"memory.nvme=[{tmp_path / 'one'},{tmp_path / 'two'}]"
    with loaded(checkpoint, tmp_path, drives) as model:
        losses = train(model)
    paths = [base_of(tmp_path / "one"), base_of(tmp_path / "two")]
    assert min(path.stat().st_size for path in paths) > 8192
    with loaded(checkpoint, tmp_path, drives) as model:
        assert written_nbytes(model) == 0
        assert train(model) == losses
    flip(paths[1])
    with healed(checkpoint, tmp_path, "SHA-256", drives) as model:
        assert train(model) == losses
    assert not any(path.exists() for path in paths)


def test_a_checkpoint_in_the_compute_dtype_takes_the_bytes_of_its_weights(tmp_path):
    checkpoint = save(tmp_path / "checkpoint", dtype=torch.bfloat16)
    for _ in range(2):
        with loaded(checkpoint, tmp_path / "nvme") as model:
            numel = sum(unit.numel for unit in runtime_of(model).units)
            assert runtime_of(model).storage.volume.allocated_nbytes == 2 * numel


# --- which base ----------------------------------------------------------------------------------


def test_another_dtype_division_or_content_is_another_base(tmp_path, checkpoint):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as model:
        first = weights_of(model)
    with loaded(checkpoint, nvme, dtype="fp32") as model:
        assert written_nbytes(model) > 0
    with loaded(checkpoint, nvme, "memory.host=400KiB") as model:  # other chunks
        assert written_nbytes(model) > 0
    saved = (checkpoint / "model.safetensors").read_bytes()
    save(tmp_path / "other", seed=2)
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert len(saved) == len(other)
    before = (checkpoint / "model.safetensors").stat()
    (checkpoint / "model.safetensors").write_bytes(other)  # in place: the same inode, name and size,
    os.utime(checkpoint / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))  # and time
    with loaded(checkpoint, nvme) as model:
        assert written_nbytes(model) > 0
        second = weights_of(model)
    with loaded(tmp_path / "other", tmp_path / "plain", frozen=False) as model:
        assert_same(second, weights_of(model))
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    assert len(list(nvme.glob("base-*"))) == 4


def test_pickled_weights_are_shared_too(tmp_path, checkpoint):
    model, _ = models.build("llama", 1)
    torch.save(model().state_dict(), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    for written in (True, False):
        with loaded(checkpoint, tmp_path / "nvme") as model:
            assert (written_nbytes(model) > 0) == written


def test_a_link_to_the_same_files_is_the_same_base(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme"):
        pass
    (tmp_path / "links").mkdir()
    for path in checkpoint.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    with loaded(tmp_path / "links", tmp_path / "nvme") as model:
        assert written_nbytes(model) == 0


def test_a_checkpoint_that_changes_while_it_is_read_is_not_shared(tmp_path, checkpoint):
    def touch(done: int, total: int) -> None:
        os.utime(checkpoint / "model.safetensors")

    with loaded(checkpoint, tmp_path / "nvme", on_progress=touch) as model:
        assert "changed while they were read" in said(model)
        assert len(train(model)) == 3
    assert list((tmp_path / "nvme").iterdir()) == []


def test_what_the_checkpoint_lacks_is_trained_and_in_no_base(tmp_path, checkpoint):
    options = {"auto_class": AutoModelForSequenceClassification, "new": ["score.*"], "ignore": ["lm_head.*"]}
    for seed in (1, 2):
        torch.manual_seed(seed)
        with loaded(checkpoint, tmp_path / "nvme", **options) as model:
            trained = {name for name, param in model.named_parameters() if param.requires_grad}
            assert trained == {"score.weight"}
            with infinity.gathered(model.score.weight):
                drawn = model.score.weight.detach().clone()
            unit = next(u for u in runtime_of(model).units if "score.weight" in [s.name for s in u.segments])
            assert written_nbytes(model) >= unit.shard_nbytes
    torch.manual_seed(1)
    with loaded(checkpoint, tmp_path / "nvme", **options) as model, infinity.gathered(model.score.weight):
        assert not torch.equal(model.score.weight, drawn)


@pytest.mark.parametrize("first", ["less", "more"])
def test_a_run_with_other_budgets_takes_from_the_base_what_it_needs(tmp_path, checkpoint, first):
    budgets = {"less": [], "more": ["memory.host=400KiB", "memory.resident=true"]}  # with the same chunks
    with loaded(checkpoint, tmp_path / "alone", frozen=False) as model:
        losses, whole = train(model), nbytes_of_a_load(checkpoint, tmp_path / "whole")
    with loaded(checkpoint, tmp_path / "nvme", *budgets.pop(first)) as model:
        written = written_nbytes(model)
        assert (written < whole) == (first == "more")
        assert train(model) == losses
    before = base_of(tmp_path / "nvme").stat()
    [other] = budgets.values()
    with loaded(checkpoint, tmp_path / "nvme", *other) as model:
        homes = {unit.home for unit in runtime_of(model).units}
        assert homes == ({Tier.NVME} if first == "more" else {Tier.HOST, Tier.NVME})
        assert written_nbytes(model) == whole - written
        assert train(model) == losses
    after = base_of(tmp_path / "nvme").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


def nbytes_of_a_load(checkpoint: Path, nvme: Path) -> int:
    with loaded(checkpoint, nvme) as model:
        return written_nbytes(model)


# --- damage --------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {"flipped": (flip, r"is damaged \(unit 0 .*another SHA-256"), "cut": (cut, "does not end as a base")}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_base_is_named_never_trained_with_and_made_anew(tmp_path, checkpoint, damage, message):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as model:
        losses = train(model)
    damage(base_of(nvme))
    with healed(checkpoint, nvme, message) as model:
        assert written_nbytes(model) > 0
        assert train(model) == losses
    with loaded(checkpoint, nvme) as model:
        assert train(model) == losses
    with loaded(checkpoint, nvme) as model:
        assert written_nbytes(model) == 0
        assert train(model) == losses


def test_only_what_is_damaged_is_read_from_the_checkpoint_again(tmp_path, checkpoint):
    with loaded(checkpoint, tmp_path / "nvme") as model:
        units = runtime_of(model).units
        whole, first = written_nbytes(model), 4 * units[0].numel
        flip(base_of(tmp_path / "nvme"))
        with healed(checkpoint, tmp_path / "nvme", "unit 0") as second:
            assert written_nbytes(second) == first < whole / 2
        assert not list((tmp_path / "nvme").glob("base-*"))
        train(model)  # who had it open reads on


def test_a_chunk_that_cannot_be_read_is_as_good_as_damaged(tmp_path, checkpoint, monkeypatch):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as model:
        losses = train(model)
    make = infinity.shards.storage.make_engine
    broken = Fault(on="read", nth=2)
    monkeypatch.setattr(
        infinity.shards.storage, "make_engine", lambda *args: FaultyEngine(make(*args), broken)
    )
    with healed(checkpoint, nvme, r"cannot be read .*EIO") as model:
        assert written_nbytes(model) > 0
        assert train(model) == losses
    assert not list(nvme.glob("base-*"))


# --- what is written later -----------------------------------------------------------------------


def half_frozen(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name)


def thaw(checkpoint: Path, nvme: Path, dtype: str, *, frozen: bool) -> tuple[list[float], Any]:
    """Losses and weights of a model that is frozen in part for two steps, and trained for two."""
    _, batch = models.build("llama", 1)
    with loaded(checkpoint, nvme, "memory.device=1MiB", dtype=dtype, frozen=frozen) as model:
        half_frozen(model.train())
        optimizer = infinity.AdamW(model, lr=1e-2, params=[{"params": list(model.parameters())}])
        losses = []
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            loss = model(**batch(step)).loss
            optimizer.scale(loss).backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weights_of(model)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_thawed_trains_as_ever_and_leaves_the_base_as_it_is(tmp_path, checkpoint, dtype):
    losses, weights = thaw(checkpoint, tmp_path / "alone", dtype, frozen=False)
    for _ in range(2):
        again, same = thaw(checkpoint, tmp_path / "nvme", dtype, frozen=True)
        data = base_of(tmp_path / "nvme").read_bytes()
        assert again == losses
        assert_same(same, weights)
    assert base_of(tmp_path / "nvme").read_bytes() == data


def test_weights_that_are_written_are_the_runs_own(tmp_path, checkpoint):
    nvme = tmp_path / "nvme"
    with loaded(checkpoint, nvme) as model:
        before = weights_of(model)
        with loaded(checkpoint, nvme) as other:
            name, param = next(iter(other.named_parameters()))
            with infinity.gathered(param, modify=True):
                param.mul_(2)
            other.load_state_dict(weights_of(other))
            changed = weights_of(other)
            assert torch.equal(changed.pop(name), 2 * before[name])
            assert_same(changed, {key: value for key, value in before.items() if key != name})
        assert_same(weights_of(model), before)
    with loaded(checkpoint, nvme) as model:
        assert written_nbytes(model) == 0
        assert_same(weights_of(model), before)


# --- crashes, full disks, ranks ------------------------------------------------------------------


def test_a_full_disk_is_a_typed_error_and_leaves_no_base(tmp_path, checkpoint):
    nvme = tmp_path / "nvme"
    with file_limit(65536), pytest.raises(DiskError, match="make room"):
        load(checkpoint, nvme)
    assert [path for path in nvme.rglob("*") if path.is_file()] == []
    with loaded(checkpoint, nvme) as model:
        assert len(train(model)) == 3
    assert base_of(nvme).exists()


#: Loads a base, and is killed by the n-th call of a function.
_KILLED = """
import os, signal, sys
from pathlib import Path
from infinity.nvme.base import BaseFiles
from tests.shards.test_shared_base import load

checkpoint, name, nth, *drives = sys.argv[1:]
owner = Path if name == "rename" else BaseFiles
original, calls = getattr(owner, name), []

def call(*args):
    calls.append(name)
    if len(calls) == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

setattr(owner, name, call)
load(Path(checkpoint), drives[0], f"memory.nvme=[{','.join(drives)}]")
"""


@pytest.mark.slow
def test_who_is_killed_while_a_base_is_written_leaves_nothing_half(tmp_path, checkpoint):
    killed = []
    for name, nth in (("heartbeat", 3), ("rename", 2)):
        drives = [tmp_path / name / "one", tmp_path / name / "two"]
        command = [sys.executable, "-c", _KILLED, str(checkpoint), name, str(nth), *map(str, drives)]
        killed.append((subprocess.Popen(command), drives))
    for process, drives in killed:
        assert process.wait(timeout=120) == -signal.SIGKILL
        assert not list(drives[0].glob("base-*/*.base"))
        assert len(find_leftovers(drives[0])) == 1
        for written in (True, False):
            with loaded(checkpoint, tmp_path, f"memory.nvme=[{drives[0]},{drives[1]}]") as model:
                assert (written_nbytes(model) > 0) == written
                assert len(train(model)) == 3


def start_two_runs(checkpoint: str, nvme: str) -> int:
    """Load as if there were no other rank; returns the bytes that were written."""
    names = [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE")) or "MASTER" in name]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name)
        with loaded(Path(checkpoint), nvme) as model:
            return written_nbytes(model)


def start_one_run(checkpoint: str, nvme: str) -> list[tuple[list[float], int]]:
    """Losses and bytes written by this rank in two runs of all ranks, one after the other."""
    out = []
    for _ in range(2):
        with loaded(Path(checkpoint), nvme) as model:
            written = written_nbytes(model)
            out.append((train(model, rank=int(os.environ["RANK"]), world=2), written))
    return out


def test_runs_that_start_at_the_same_time_write_one_copy_and_each_rank_its_own_part(tmp_path, checkpoint):
    two, one = tmp_path / "two", tmp_path / "one"
    checks = ((start_two_runs, str(checkpoint), str(two)), (start_one_run, str(checkpoint), str(one)))
    ranks = run_ranks(several, 2, *checks, group=False)
    assert sorted(written > 0 for written, _ in ranks) == [False, True]
    assert base_of(two).name == "rank0-of-1.1-of-1.base"
    for _, (first, second) in ranks:
        assert first[0] == second[0]
        assert first[1] > 0
        assert second[1] == 0
    names = sorted(path.name for path in one.glob("base-*/*"))
    assert names == ["rank0-of-2.1-of-1.base", "rank1-of-2.1-of-1.base"]
