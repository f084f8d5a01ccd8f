"""Tensors from one rank to another, in the order in which they were sent, beside the collectives.

[Note: a pair has two ways] Each way between two ranks has a process group of its own, on which only one of
them sends. So what goes one way never waits behind what comes the other way, on an accelerator's stream
either, and a message needs no tag: both ranks count. A message is a broadcast in that group, since gloo's own
sends cannot be watched: a wait for one that ends early closes the connection.

Who sends does not wait: what was sent stays in memory until it has arrived.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.comm.collectives import Collectives


class Messages:
    """Sends tensors from rank to rank; one that a rank sends to itself is the one that it receives.

    For one thread at a time.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.rank, self._collectives = collectives.rank, collectives
        self._groups: dict[tuple[int, int], Any] = {}
        self._here = deque[Tensor]()
        self._sent = deque[tuple[Any, Any, Tensor]]()  # that may not have arrived
        self.nbytes_sent = 0  # to other ranks, since the beginning

    @classmethod
    def of(cls, collectives: Collectives, ways: Iterable[tuple[int, int]]) -> "Messages":
        """Return those of ``collectives``, with these ``ways`` (from, to); every rank must call."""
        messages = collectives.messages = collectives.messages or cls(collectives)
        for source, to in sorted({*ways} - messages._groups.keys()):
            if source != to:
                messages._groups[source, to] = collectives.apart([source, to])
        return messages

    def send(self, to: int, tensor: Tensor) -> None:
        """Send ``tensor``, which must not be written any more."""
        if to == self.rank:
            self._here.append(tensor)
            return
        flat, group = tensor.contiguous().view(-1).view(torch.uint8), self._groups[self.rank, to]
        work = dist.broadcast(flat, src=self.rank, group=group, async_op=True)
        self._sent.append((work, group, flat))
        self.nbytes_sent += flat.nbytes
        while self._sent and self._sent[0][0].is_completed():
            self._collectives.end_apart(*self._sent.popleft()[:2], f"what rank {self.rank} sent to others")

    def receive(self, source: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next tensor from ``source``; blocks the thread or, on an accelerator, its stream."""
        if source == self.rank:
            return self._here.popleft()
        got, group = torch.empty(shape, dtype=dtype, device=device), self._groups[source, self.rank]
        flat = got.view(-1).view(torch.uint8)
        work = dist.broadcast(flat, src=source, group=group, async_op=True)
        self._collectives.end_apart(work, group, f"what rank {source} sends to rank {self.rank}")
        return got
