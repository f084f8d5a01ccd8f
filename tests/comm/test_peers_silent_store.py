"""A store of torch.distributed whose process is stopped: torch waits for its answer without end."""

import threading
import time

import pytest

from infinity.comm import peers


class Stopped:
    """A store that answers until it is stopped."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()

    def add(self, key: str, amount: int) -> int:
        self.answers.wait()
        return 0

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return False


def test_a_store_whose_process_is_stopped_holds_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Stopped()
    monkeypatch.setattr(peers, "_own_store", lambda: store)
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(peers, "BEAT_S", 0.01)
    rank = peers.Peers(1, 2, lambda told, failed: None)
    store.answers.clear()
    time.sleep(0.1)  # the thread beats, and waits for an answer
    said: list[str] = []
    asks = threading.Thread(target=lambda: said.append(rank.explain()), daemon=True)
    asks.start()
    asks.join(10.0)
    rank.tell("left", failed=True)
    rank.close()
    store.answers.set()
    assert len(said) == 1
    assert "stopped" in said[0]
