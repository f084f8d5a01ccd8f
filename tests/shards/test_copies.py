"""``durability.copies=2``: a node that is lost with its drives loses no commit."""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import DiskError, StateError
from infinity.core.nbytes import Piece
from infinity.engine.runtime import runtime_of
from infinity.shards import copies
from infinity.shards.saved import _Entry, _moves, write_piece
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, start_ranks
from tests.helpers.limits import file_limit
from tests.helpers.reference import Rule
from tests.shards.test_resume import PLACES, start

STEPS = 6


def digest(model: Any, optimizer: Any) -> str:
    """Of all weights and states; on every rank, which all call."""
    weights, states = infinity.state_dict(model, every_rank=True), optimizer.state_dict()["state"]
    found = hashlib.sha256()
    for name, each in sorted({**weights, **{str(key): each for key, each in states.items()}}.items()):
        tensors = each.items() if isinstance(each, dict) else [("", each)]
        for key, tensor in tensors:
            found.update(f"{name} {key}".encode())
            if isinstance(tensor, torch.Tensor):
                found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def given_on(folder: Path, place: str, per_node: int, name: str, *more: str) -> list[str]:
    node = int(os.environ["RANK"]) // per_node
    nodes = [f"partition.ranks_per_node={per_node}", "durability.copies=2", f"run.name={name}"]
    return [f"memory.nvme=[{folder}/node{node}]", *PLACES[place], *nodes, *more]


def train(given: list[str], steps: int, on_step: Any = lambda step: None) -> dict[str, Any]:
    """What a run finds, and what it makes of it: by step, the losses and digests from there on."""
    model, optimizer, batch = start("llama", "bf16", given, Rule())
    begin = infinity.resume(model, optimizer)
    found: dict[str, Any] = {"begin": begin, "losses": [], "digests": [digest(model, optimizer)]}
    copied = 0
    for step in range(begin, steps):
        loss = model(**batch(10 * step + int(os.environ["RANK"]))).loss
        loss.backward()
        optimizer.step()
        found["losses"].append(loss.item())
        copied += optimizer.report().nbytes_copied
        on_step(step + 1)
        found["digests"].append(digest(model, optimizer))
    found["copied"] = copied
    optimizer.close()
    return found


def be_killed(folder: str, place: str, per_node: int, at: int) -> None:
    """Train without an interruption, then train again, until all ranks are killed in a step."""
    path = Path(folder)
    whole = train(given_on(path, place, per_node, "whole"), STEPS)
    (path / f"whole.{os.environ['RANK']}").write_text(json.dumps(whole))

    def kill(step: int) -> None:
        if step == at:
            time.sleep(0.05 * int(os.environ["RANK"]))
            os.kill(os.getpid(), signal.SIGKILL)

    train(given_on(path, place, per_node, "mine"), STEPS, kill)


def go_on(folder: str, place: str, per_node: int, *more: str) -> dict[str, Any]:
    return train(given_on(Path(folder), place, per_node, "mine", *more), STEPS)


@pytest.mark.parametrize(
    ("place", "ranks", "per_node", "left"),
    few(
        [("nvme", 2, 1, 2)],
        [("nvme", 2, 1, 2), ("both", 4, 2, 4), ("nvme", 2, 1, 1), ("host", 4, 2, 2), ("nvme", 3, 1, 2)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_loses_nothing(
    tmp_path: Path, place: str, ranks: int, per_node: int, left: int, lost: int
) -> None:
    """With as many ranks, one node's directories empty, or on the nodes that are left."""
    at = 3
    with start_ranks(be_killed, ranks, str(tmp_path), place, per_node, at) as running:
        ends = running.wait()
    assert all(end.exit_code == -signal.SIGKILL for end in ends), "\n".join(map(str, ends))
    whole = [json.loads((tmp_path / f"whole.{rank}").read_text()) for rank in range(ranks)]
    assert all(each["copied"] > 0 for each in whole)
    assert list((tmp_path / "node0").glob("whole/*")) == []  # a run that ends leaves nothing
    shutil.rmtree(tmp_path / f"node{lost}")
    if left < ranks:  # those that are left have the numbers from 0 on
        rest = [tmp_path / f"node{node}" for node in range(ranks // per_node) if node != lost]
        for node, path in enumerate(rest):
            path.rename(tmp_path / f"left{node}")
        for node in range(len(rest)):
            (tmp_path / f"left{node}").rename(tmp_path / f"node{node}")
    found = run_ranks(go_on, left, str(tmp_path), place, per_node)
    for rank, each in enumerate(found):
        begin = each["begin"]
        assert at - 1 <= begin <= at
        assert each["digests"][0] == whole[rank]["digests"][begin]
        if left == ranks:
            assert each["losses"] == whole[rank]["losses"][begin:]
            assert each["digests"] == whole[rank]["digests"][begin:]
    assert not list(tmp_path.glob("node*/*/*"))


def entries(*found: tuple[int, int, str], generation: int = 1, size: int = 2) -> list[_Entry]:
    return [_Entry(generation, size, step, rank, kind, "", step) for rank, step, kind in found]


def test_what_a_node_lacks_is_brought_from_one_that_has_it_whole() -> None:
    first = entries((0, 4, "rank"), (0, 5, "rank"), (1, 5, "copy"), (1, 6, "copy"))
    assert _moves([first, []], 1) == [(first[2], 0, 1)]  # the newest step that both have
    assert _moves([first, entries((1, 5, "rank"), (0, 5, "copy"))], 1) == []
    assert [(move.entry.kind, move.source, move.to) for move in _moves([first], 1)] == [("copy", 0, 0)]
    older = [*first, *entries((0, 7, "rank"), generation=2, size=3)]  # nobody has the rest of it
    assert _moves([older, []], 1) == [(first[2], 0, 1)]
    behind = entries((1, 4, "rank"), (0, 5, "copy"))  # of rank 1 the copy is a step ahead
    assert _moves([[*first, *entries((1, 4, "copy"))], behind], 1) == []


def test_a_rank_whose_files_and_copy_are_lost_is_named() -> None:
    with pytest.raises(StateError, match="of ranks 1 of the interrupted run neither"):
        _moves([entries((0, 5, "rank"), (2, 5, "copy"), size=3), []], 1)
    assert _moves([entries((0, 5, "rank")), []], 1) == []  # it had no copies: others tell of that
    # Killed in its first commit, of which one rank's copy is there already: it begins anew.
    assert _moves([[], entries((0, 1, "copy"))], 1) == []


def one_node(folder: str) -> tuple[bool, list[str]]:
    given = [f"memory.nvme=[{folder}]", *PLACES["nvme"], "durability.copies=2", "run.name=mine"]
    model, optimizer, _ = start("llama", "bf16", given, Rule())
    runtime = runtime_of(model)
    assert runtime is not None
    found = runtime.storage.commits.copies is None, list(runtime.notes)
    optimizer.close()
    return found


def test_a_single_node_says_that_it_has_no_other_place(tmp_path: Path) -> None:
    alone, notes = one_node(str(tmp_path))
    assert alone
    assert any("there is one node" in note for note in notes)


def leave(folder: str, copies: int) -> list[str]:
    """Go on for two steps, keep the files, and say which of them are copies."""
    given = given_on(Path(folder), "nvme", 1, "mine", f"durability.copies={copies}")
    model, optimizer, batch = start("llama", "bf16", given, Rule())
    begin = infinity.resume(model, optimizer)
    for step in range(begin, begin + 2):
        model(**batch(step)).loss.backward()
        optimizer.step()
    infinity.close(model, keep=True)
    return sorted(path.name for path in Path(folder).glob("node*/mine/copy*.commits"))


def test_a_run_that_goes_on_without_copies_leaves_no_old_ones(tmp_path: Path) -> None:
    """They would win over nothing, and be taken where the newer commits of all ranks are lost."""
    assert run_ranks(leave, 2, str(tmp_path), 2)[0] == ["copy0-1.commits", "copy1-1.commits"]
    assert run_ranks(leave, 2, str(tmp_path), 1)[0] == []


def test_a_part_that_a_full_drive_takes_half_of_is_an_error(tmp_path: Path) -> None:
    """Else zeros would lie in the rest of a version that was brought from another node."""
    path, part = tmp_path / "rank0-1-0.bin", Piece(0, 4096, 8192)
    with open(path, "wb") as file, file_limit(8192), pytest.raises(DiskError, match="after 4096 bytes"):
        write_piece(file.fileno(), path, part, memoryview(bytes(8192)))


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def test_strangers_at_the_port_of_copies_achieve_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(copies, "_GREETING_S", 0.2)
    token, harm = b"t" * 32, pickle.dumps(("begin", Bomb(tmp_path / "harm")))
    message = len(harm).to_bytes(8) + harm
    server = socket.create_server(("127.0.0.1", 0), backlog=9)
    keeper = copies._Keeper(server, token, [tmp_path], synced=False)
    with contextlib.ExitStack() as stack:
        stack.callback(keeper.close)

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(server.getsockname(), timeout=20))

        connect().close()  # as a port scanner does
        silent, junk, late = connect(), connect(), connect()
        junk.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        late.sendall(message)
        rank = connect()
        rank.sendall(token)
        copies._send(rank, ("give_up", "retire"))
        assert copies._received(rank) is True
        assert silent.recv(1) == b""
        assert not [*tmp_path.iterdir()]
