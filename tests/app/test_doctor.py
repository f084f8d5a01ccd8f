"""``infinity doctor``: what each rank has, what is wrong and where, and that nothing hangs."""

import json
import os
import time
from pathlib import Path

import pytest

import infinity
from infinity.app import doctor
from infinity.cli import main
from infinity.nvme.probe import Speed
from tests.helpers.launch import run_ranks

FAST = Speed(3e9, 2e9, both_bytes_per_s=2e9, engine="threads")


def settings(folder: Path, *more: str) -> list[str]:
    (folder / "text.txt").write_text("to be or not to be\n" * 100)
    return [f"data.files=[{folder}/text.txt]", f"memory.nvme=[{folder}/nvme]", "train.threads=1", *more]


def test_a_machine_that_can_train_is_described_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *settings(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [rank] = found["ranks"]
    drive = rank["facts"][f"{tmp_path}/nvme"]
    assert found["ok"]
    assert not rank["wrong"]
    assert drive["read_bytes_per_s"] > 0
    assert drive["free_nbytes"] > 0
    assert drive["engine"]
    assert drive["O_DIRECT"] in ("yes", "no")
    assert rank["facts"]["software"]["infinity"] == infinity.__version__
    assert rank["facts"]["memory"]["host_nbytes"] >= rank["facts"]["memory"]["free_for_a_rank_nbytes"] > 0
    assert rank["facts"]["memory"]["shared_by_ranks"] == "yes"  # on Linux
    assert rank["facts"]["inputs"] == {"model": "a new one", "data_files": 1}
    assert {"cores", "threads"} <= rank["facts"]["threads"].keys()
    assert "open_files" in rank["facts"]["limits"]
    assert [*tmp_path.glob("**/.probe*")] == []


def test_all_that_would_end_a_run_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "measure", lambda *args, **options: FAST)
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    wrong = (
        f"memory.nvme=[{tmp_path}/file,{tmp_path}/open]", "memory.host=900TiB", "model.path=/no/such/model",
        "train.device=cuda:7",
    )  # fmt: skip
    assert main(["doctor", *settings(tmp_path, *wrong)]) == 1
    told = capsys.readouterr().out
    for what in ("/file", "chmod o-w", "Lower memory.host", "/no/such/model", "no cuda"):
        assert any(what in line for line in told.splitlines() if line.startswith("wrong: ")), (what, told)
    assert "a run would fail" in told


def test_a_check_that_blocks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "measure", lambda *args, **options: time.sleep(60))
    recipe = infinity.load_recipe(None, settings(tmp_path))
    found = doctor.Examination(recipe, doctor.launched()).run(patience_s=2.0)
    assert [each for each in found.wrong if f"{tmp_path}/nvme: the check did not end in 2 s" in each]


def on_a_rank(folder: Path, ranks: int, faults: bool) -> int:
    """The doctor on one of ``ranks``, which leaves what it prints in a file; with faults on 1 and 2."""
    import rich.console

    rank = int(os.environ["RANK"])
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    drive = folder / "nvme"
    doctor.measure = lambda *args, **options: FAST
    if faults and rank == 1:
        infinity.__version__ = "0.0.1"
        drive = folder / "file"
    if faults and rank == 2:
        clock = time.time
        doctor.time.time = lambda: clock() - 5.0
    recipe = infinity.load_recipe(None, settings(folder, f"memory.nvme=[{drive}]"))
    with (folder / f"told.{rank}").open("w") as file:
        console = rich.console.Console(file=file, width=200)
        return doctor.doctor(recipe, console, patience_s=5.0, as_json=False)


def test_ranks_on_which_something_is_missing_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_ranks(on_a_rank, 3, tmp_path, 3, True, group=False) == [1, 1, 1]
    told, *others = ((tmp_path / f"told.{rank}").read_text() for rank in range(3))
    wrong = [line for line in told.splitlines() if line.startswith("wrong: ")]
    assert others == ["", ""]
    assert [line[:10] for line in wrong] == ["wrong: 1 ("] * 2, told
    assert f"{tmp_path}/file" in told
    assert "has infinity 0.0.1" in told
    assert "note: 2 (" in told
    assert "its clock is 5 s late beside rank 0's" in told
    assert "0-2 (" in told  # what all have is said once


def test_ranks_that_agree_are_well(tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, tmp_path, 2, False, group=False) == [0, 0]
    assert "nothing is wrong" in (tmp_path / "told.0").read_text()


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert run_ranks(on_a_rank, 2, tmp_path, 3, False, group=False) == [1, 1]
    assert time.monotonic() - began_s < 60
    assert "wrong: 2 (an unknown machine): did not come in 5 s" in (tmp_path / "told.0").read_text()


def alone(folder: Path) -> int:
    """Rank 1, whose rank 0 never comes."""
    os.environ["RANK"] = "1"
    code = on_a_rank(folder, 2, False)
    os.environ["RANK"] = "0"
    return code


def test_a_rank_without_rank_0_says_so_itself(tmp_path: Path) -> None:
    assert run_ranks(alone, 1, tmp_path, group=False) == [1]
    assert "rank 1 did not meet the others at 127.0.0.1:" in (tmp_path / "told.1").read_text()
