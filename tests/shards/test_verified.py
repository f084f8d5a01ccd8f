"""``memory.verify`` and ``infinity verify``: damaged blocks are found before they are used, and no others."""

import contextlib
import copy
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.activations import tensor_cache
from infinity.cli import main
from infinity.core.config import MemoryConfig, SettingError
from infinity.core.errors import DamagedDataError, StateError
from infinity.core.nbytes import BLOCK_NBYTES, Extent, Piece
from infinity.device.memory import HostPool
from infinity.engine.runtime import runtime_of
from infinity.nvme.engines import make_engine
from infinity.nvme.volume import Space, Volume
from infinity.shards.verified import VerifiedEngine, sums_of, verify
from tests.helpers.cases import few
from tests.helpers.crashes import PLACES
from tests.helpers.journals import journals, run_sql
from tests.helpers.launch import run_ranks
from tests.helpers.limits import comes_true
from tests.helpers.training import build

TOKENS = (torch.arange(36).reshape(4, 9) % 61).repeat(16, 1)  # activations of more than a block
VERIFY = "memory.verify=true"


def layers(width: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width)


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(nn.Sequential(*layers(width)) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        logits = self.norm(x) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    folder, steps: int, *more: str, place: str = "nvme", keep: bool = True, dtype: str = "bf16"
) -> list[str]:
    """Go on with a run up to ``steps``; the losses."""
    torch.manual_seed(3)
    model = build(Mlp, dtype, [f"memory.nvme=[{folder}]", *PLACES[place], "run.name=mine", *more])
    try:
        optimizer = infinity.AdamW(model, lr=0.01)
        losses = []
        for step in range(infinity.resume(model, optimizer), steps):
            if step == 1:
                with infinity.gathered([model.norm.bias], modify=True):
                    model.norm.bias.add_(0.5)
            losses.append(one_step(model, optimizer))
        return losses
    finally:
        infinity.close(model, keep=keep)


def one_step(model, optimizer) -> str:
    loss = model(TOKENS)
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def steps(model, optimizer) -> None:
    for _ in range(3):
        one_step(model, optimizer)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
        os.fsync(file.fileno())


def places_of(run: Path) -> list[tuple[Path, int, int]]:
    """File, offset and bytes of each committed piece."""
    from infinity.comm.ranks import Ranks
    from infinity.shards.saved import find_saved

    saved = find_saved([run], Ranks(0, 1, torch.device("cpu")), lambda line: None)
    return [
        (rank.data[piece.file], piece.offset, piece.nbytes)
        for rank in saved.ranks.values()
        for _, piece in rank.committed()
    ]


# --- sums and the engine ---------------------------------------------------------------------------


def test_a_sum_knows_its_bytes_its_place_and_its_file():
    block = bytearray(torch.randint(0, 256, (BLOCK_NBYTES,), dtype=torch.uint8).numpy().tobytes())
    [whole] = sums_of(memoryview(block), 1, 7)
    for at in range(BLOCK_NBYTES):
        block[at] ^= 0x80
        assert sums_of(memoryview(block), 1, 7)[0] != whole, at
        block[at] ^= 0x80
    for at in range(3, BLOCK_NBYTES // 2, 4):  # two sign bits, in one lane
        for other in (at, at + 256):
            block[other] ^= 0x80
        block[-1] ^= 0x80
        assert sums_of(memoryview(block), 1, 7)[0] != whole, at
        block[-1] ^= 0x80
        for other in (at, at + 256):
            block[other] ^= 0x80
    assert {*sums_of(memoryview(block), 1, 8), *sums_of(memoryview(block), 2, 7)}.isdisjoint({whole})
    zeros = sums_of(memoryview(bytearray(1000 * BLOCK_NBYTES)), 0, 0)
    assert len({*zeros.tolist()}) == 1000
    assert zeros.all()


@pytest.fixture(params=["libaio", "threads"])
def engine(request, tmp_path):
    with contextlib.ExitStack() as stack:
        volume = Volume([tmp_path / "a.bin", tmp_path / "b.bin"])
        stack.callback(volume.close)
        engine = VerifiedEngine(make_engine(request.param, volume), volume)
        engine.add(0, rank=0, drives=2)
        stack.callback(engine.close)
        pool = stack.enter_context(contextlib.closing(HostPool(2**25)))
        engine.volume, engine.lease = volume, lambda nbytes: pool.lease(nbytes, who="test")
        yield engine


def then(transfer, seen: list[bool]) -> None:
    """Called when the transfer has ended: it knows how."""
    with pytest.raises(DamagedDataError):
        transfer.wait()
    seen.append(transfer.done())


def test_every_damaged_block_is_found_by_the_read_of_it(engine):
    extent = engine.volume.allocate(8 * 2**20, what="test")
    assert len(extent.pieces) == 2
    with engine.lease(extent.nbytes) as lease:
        lease.tensor.copy_(torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8))
        written = lease.tensor.clone()
        engine.write(extent, lease.memory).wait()
        lease.tensor.zero_()
        engine.read(extent, lease.memory).wait()
        assert torch.equal(lease.tensor, written)
        for piece in extent.pieces:
            path = engine.volume.path(piece.file)
            for offset in (
                piece.offset,
                piece.offset + piece.nbytes - 1,
                piece.offset + 5 * BLOCK_NBYTES + 17,
            ):
                flip(path, offset)
                ended = engine.read(extent, lease.memory)
                seen: list[bool] = []
                ended.then(partial(then, ended, seen))
                with pytest.raises(DamagedDataError, match="infinity verify RUN") as caught:
                    ended.wait()
                assert (caught.value.path, caught.value.nbytes) == (str(path), BLOCK_NBYTES)
                assert caught.value.offset == offset // BLOCK_NBYTES * BLOCK_NBYTES
                assert comes_true(lambda seen=seen: seen == [True])  # called where the read ends, beside us
                block = Extent((Piece(piece.file, caught.value.offset, BLOCK_NBYTES),))
                with pytest.raises(DamagedDataError):
                    engine.read(block, lease.memory[:BLOCK_NBYTES]).wait()
                others = Extent((Piece(piece.file, piece.offset + BLOCK_NBYTES, BLOCK_NBYTES),))
                engine.read(others, lease.memory[:BLOCK_NBYTES]).wait()
                flip(path, offset)
        engine.read(extent, lease.memory).wait()


def test_blocks_that_changed_places_and_writes_that_were_lost_are_found(engine):
    extent = engine.volume.allocate(2 * BLOCK_NBYTES, what="test")
    [piece] = extent.pieces
    path = engine.volume.path(piece.file)
    with engine.lease(extent.nbytes) as lease:
        lease.tensor[:BLOCK_NBYTES].fill_(1)
        lease.tensor[BLOCK_NBYTES:].fill_(2)
        engine.write(extent, lease.memory).wait()
        with open(path, "r+b", buffering=0) as file:
            before = os.pread(file.fileno(), extent.nbytes, piece.offset)
            os.pwrite(file.fileno(), before[BLOCK_NBYTES:] + before[:BLOCK_NBYTES], piece.offset)
        with pytest.raises(DamagedDataError) as caught:
            engine.read(extent, lease.memory).wait()
        assert caught.value.nbytes == extent.nbytes
        lease.tensor.fill_(3)
        engine.write(extent, lease.memory).wait()
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), before, piece.offset)  # as if the last write had not reached the drive
        with pytest.raises(DamagedDataError):
            engine.read(extent, lease.memory).wait()


def test_recycled_extents_and_zeros_are_no_damage(engine):
    with engine.lease(4 * BLOCK_NBYTES) as lease:
        for fill in range(5):
            extent = engine.volume.allocate(4 * BLOCK_NBYTES, what="test", zeroed=fill % 2 == 1)
            if fill % 2:
                engine.read(extent, lease.memory).wait()
                assert not lease.tensor.any()
            lease.tensor.fill_(fill + 1)
            engine.write(extent, lease.memory).wait()
            engine.read(extent, lease.memory).wait()
            engine.volume.free(extent)
        extent = engine.volume.allocate(4 * BLOCK_NBYTES, what="test", zeroed=True)
        flip(engine.volume.path(extent.pieces[0].file), extent.pieces[0].offset)
        with pytest.raises(DamagedDataError):
            engine.read(extent, lease.memory).wait()


def test_a_failed_request_is_the_engines_own_error(engine):
    extent = engine.volume.allocate(BLOCK_NBYTES, what="test")
    os.truncate(engine.volume.path(extent.pieces[0].file), 0)
    with engine.lease(BLOCK_NBYTES) as lease, pytest.raises(OSError, match="read of") as caught:
        engine.read(extent, lease.memory).wait()
    assert not isinstance(caught.value, DamagedDataError)


def test_the_error_can_be_copied():
    error = DamagedDataError("/mnt/a.bin", offset=8192, nbytes=4096)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (other.path, other.offset, other.nbytes, str(other)) == (error.path, 8192, 4096, str(error))


def test_a_fresh_range_of_a_file_that_was_found_reads_as_zeros(tmp_path):
    """What lay behind the last committed extent, such as activations, is there still."""
    volume = Volume([tmp_path / "a.bin"])
    volume.allocate(BLOCK_NBYTES, what="committed")
    volume.close()
    (tmp_path / "a.bin").write_bytes(b"x" * 64 * BLOCK_NBYTES)
    volume = Volume([tmp_path / "a.bin"], found=[Space.of([(0, BLOCK_NBYTES)])])
    [piece] = volume.allocate(16 * BLOCK_NBYTES, what="moments", zeroed=True).pieces
    assert volume.allocated_nbytes == volume.peak_nbytes == 17 * BLOCK_NBYTES
    volume.close()
    assert not any((tmp_path / "a.bin").read_bytes()[piece.offset :][: piece.nbytes])


# --- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", few(("both",), PLACES))
def test_checked_runs_have_the_same_bits_and_no_false_alarm(tmp_path, place, monkeypatch):
    """Partial reads, writes in place, residents, activations beside units, commits and resumes."""
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)  # as if these activations were large
    offload = "memory.activations=offload"
    plain = train(tmp_path / "a", 5, place=place, keep=False)
    checked = train(tmp_path / "b", 2, VERIFY, offload, place=place)
    checked += train(tmp_path / "b", 3, VERIFY, offload, place="nvme")
    checked += train(tmp_path / "b", 4, VERIFY, place="both")
    [check], damage = verify([tmp_path / "b" / "mine"])
    assert (check.damage, damage, check.step) == ([], [], 4)
    assert check.checked_nbytes == check.nbytes > 0
    checked += train(tmp_path / "b", 5, VERIFY, offload, place=place, keep=False)
    assert checked == plain
    assert not list(tmp_path.glob("?/*"))


def test_without_it_nothing_more_is_written(tmp_path):
    train(tmp_path, 2)
    assert all(not run_sql(path, "SELECT * FROM blobs WHERE kind >= 0") for path in journals(tmp_path))
    [check], _ = verify([tmp_path / "mine"])
    assert check.nbytes > 0 == check.checked_nbytes
    with pytest.raises(SettingError, match="gds"):
        MemoryConfig(verify=True, engine="gds")


def test_sums_begin_with_the_run_that_goes_on(tmp_path, caplog):
    train(tmp_path, 2)
    with caplog.at_level("INFO", "infinity"):
        train(tmp_path, 3, VERIFY)
    assert any("kept no sums" in line for line in caplog.messages)
    [check], _ = verify([tmp_path / "mine"])
    assert check.checked_nbytes == check.nbytes
    flip(*places_of(tmp_path / "mine")[0][:2])
    with pytest.raises(DamagedDataError):
        train(tmp_path, 5, VERIFY)


@pytest.mark.parametrize("part", few(("exact",), ("weight", "exact", "moments")))
def test_training_ends_at_the_first_read_of_a_flipped_byte(tmp_path, part):
    torch.manual_seed(3)
    given = [f"memory.nvme=[{tmp_path}]", "memory.host=500KiB", "memory.resident=false", VERIFY]
    given += ["memory.device=300KiB", "run.name=mine"]  # not all weights stay
    model = build(partial(Mlp, 128), "bf16", given)
    optimizer = infinity.AdamW(model, lr=0.01)
    try:
        assert infinity.resume(model, optimizer) == 0
        steps(model, optimizer)
        runtime = runtime_of(model)
        optimizer.state_dict()  # waits for the updates
        tiers, volume = runtime.tiers, runtime.storage.volume
        for unit in runtime.units:
            for chunk in tiers.trained_disk(unit).committed.chunks:
                for piece in getattr(chunk, part).pieces:
                    flip(volume.path(piece.file), piece.offset + piece.nbytes - 5)
        with pytest.raises(DamagedDataError, match=r"rank0-1-0\.bin: 4096 bytes from offset"):
            steps(model, optimizer)
    finally:
        infinity.close(model)


def test_stored_activations_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)
    given = [f"memory.nvme=[{tmp_path}]", *PLACES["host"], "memory.activations=offload", VERIFY]
    model = build(Mlp, "bf16", given)
    optimizer = infinity.AdamW(model, lr=0.01)
    model(TOKENS).backward()
    optimizer.step()
    loss = model(TOKENS)
    runtime_of(model).activations.cache.queue.wait_below(0)  # what is still in memory is not read
    [path] = tmp_path.rglob("rank0*.bin")
    for block in range(0, runtime_of(model).storage.volume.peak_nbytes, BLOCK_NBYTES):
        flip(path, block)
    with pytest.raises(DamagedDataError):
        loss.backward()
    infinity.close(model)


# --- what an interrupted run keeps -----------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    train(folder, 3, VERIFY, place="nvme")
    return folder / "mine"


@pytest.fixture
def run(kept, tmp_path) -> Path:
    shutil.copytree(kept, tmp_path / "mine")
    return tmp_path / "mine"


def test_each_committed_extent_is_checked_by_infinity_verify(run, capsys):
    pieces = places_of(run)
    for number, (path, offset, nbytes) in enumerate(pieces):
        flip(path, offset + (number * 997) % nbytes)
    [check], _ = verify([run])
    assert len(check.damage) == min(len(pieces), 20 + (len(pieces) > 20))
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr()
    assert f"{path}: 4096 bytes from offset" in printed.out
    assert "(the unit of embed.weight)" in printed.out
    assert "damaged places. Go on from a copy" in printed.err
    for number, (path, offset, nbytes) in enumerate(pieces):
        flip(path, offset + (number * 997) % nbytes)
    assert main(["verify", str(run)]) == 0
    assert "rank 0, step 3: records, and" in capsys.readouterr().out


def test_a_runs_folder_is_enough(run, tmp_path, capsys):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    given = infinity.load_recipe(overrides=[f"memory.nvme=[{run.parent}]", "run.name=mine"])
    (folder / "recipe.yaml").write_text(given.to_yaml())
    assert main(["verify", str(folder)]) == 0
    assert "no damage" in capsys.readouterr().out
    (folder / "summary.json").write_text("{}")
    assert main(["verify", str(folder)]) == 1
    assert "it is finished" in capsys.readouterr().err


def test_a_resume_reads_no_damaged_extent(run):
    for path, offset, nbytes in places_of(run):
        flip(path, offset + nbytes - 1)
    with pytest.raises(DamagedDataError):
        train(run.parent, 5, VERIFY)  # in its extents
    with pytest.raises(DamagedDataError):
        train(run.parent, 5, VERIFY, place="host")  # read into memory


def test_damaged_sums_are_named(run):
    [journal] = journals(run)
    run_sql(journal, "UPDATE blobs SET body = zeroblob(length(body)) WHERE kind >= 0")
    [check], _ = verify([run])
    assert journal.name in check.damage[0]
    with pytest.raises(StateError, match=rf"{journal.name}: the sums of step .*memory\.verify=false"):
        train(run.parent, 4, VERIFY)
    assert len(train(run.parent, 4)) == 1


def test_what_has_no_commit_or_is_in_use_cannot_be_verified(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert "there is no commit in" in capsys.readouterr().err
    model = build(Mlp, "fp32", [f"memory.nvme=[{tmp_path}]", *PLACES["nvme"], "run.name=mine"])
    assert main(["verify", str(tmp_path / "mine")]) == 1
    assert "is in use by" in capsys.readouterr().err
    infinity.close(model)


def train_on_ranks(folder: str, steps: int) -> list[str]:
    return train(folder, steps, VERIFY)


def test_another_number_of_ranks_reads_what_was_checked(tmp_path):
    run_ranks(train_on_ranks, 2, str(tmp_path), 2)
    checks, _ = verify([tmp_path / "mine"])
    assert [check.rank for check in checks] == [0, 1]
    assert all(check.checked_nbytes == check.nbytes > 0 and not check.damage for check in checks)
    shutil.copytree(tmp_path / "mine", tmp_path / "copy" / "mine")
    train(tmp_path, 4, VERIFY)
    [check], _ = verify([tmp_path / "mine"])
    assert check.checked_nbytes == check.nbytes
    for path, offset, _ in places_of(tmp_path / "copy" / "mine"):
        if path.name.startswith("rank1"):
            flip(path, offset)
    with pytest.raises(DamagedDataError, match=r"rank1-1-0\.bin"):
        train(tmp_path / "copy", 4, VERIFY)
