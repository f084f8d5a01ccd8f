"""A store of torch.distributed whose process is stopped: torch waits for its answer without end."""

import json
import threading
import time

import pytest

from infinity.comm import peers


class Stopped:
    """A store that answers until it is stopped."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.told: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        self.told.append(value)

    def add(self, key: str, amount: int) -> int:
        self.answers.wait()
        return 0

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return False


@pytest.mark.parametrize("beat_s", [0.01, 60.0], ids=["its own thread asks first", "others ask first"])
def test_a_store_whose_process_is_stopped_holds_no_rank(
    monkeypatch: pytest.MonkeyPatch, beat_s: float
) -> None:
    store = Stopped()
    monkeypatch.setattr(peers, "_own_store", lambda: store)
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(peers, "BEAT_S", beat_s)
    rank = peers.Peers(1, 2, lambda told, failed: None)
    store.answers.clear()
    time.sleep(0.1)  # with the short beat its thread waits for an answer
    said: list[str] = []

    def leave() -> None:
        said.append(rank.explain())
        rank.tell("left", failed=True)
        rank.close()
        said.append("closed")

    leaves = threading.Thread(target=leave, daemon=True)
    leaves.start()
    leaves.join(10.0)
    store.answers.set()
    assert said[1:] == ["closed"]
    assert "stopped" in said[0]


def test_what_a_rank_said_to_a_stopped_store_is_there_when_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Stopped()
    monkeypatch.setattr(peers, "_own_store", lambda: store)
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.1)
    rank = peers.Peers(1, 2, lambda told, failed: None)
    store.answers.clear()
    says = threading.Thread(target=rank.tell, args=["left"], kwargs={"failed": True}, daemon=True)
    says.start()
    says.join(10.0)
    assert not says.is_alive()
    store.answers.set()
    rank.close()
    rank._thread.join(10.0)
    assert [json.loads(value)["end"] for value in store.told] == ["", "left"]
