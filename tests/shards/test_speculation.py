"""Updates that start before the norm is known give the numbers of those that start after it, to the bit."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import infinity
from infinity.comm.collectives import Pending
from infinity.core.errors import StateError
from infinity.core.lifecycle import Tier
from infinity.optim.rules import HostRule
from infinity.shards import storage
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.faulty import FaultyEngine
from tests.helpers.launch import run_ranks
from tests.helpers.lockstep import Lockstep, Toy, batch, seeded
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, small_units, streaming
from tests.test_bytes import settled

#: Norms that no gradient of these models reaches, or that all exceed.
FREE, CLIPPED = 1e6, 1e-3
#: In Lockstep a few units fit; "roomy" lets all stay where they are updated; "part" has both tiers.
PLACES = ("nvme", "roomy", "part", "one-version")


@contextlib.contextmanager
def lockstep(place: str, directory: Any, dtype: str = "bf16", **options: Any) -> Iterator[Lockstep]:
    more = {"one-version": ["memory.versions=1"], "part": ["memory.resident=true", "memory.host=232KiB"]}
    overrides = streaming(directory, *more.get(place, []))
    pair = Lockstep(overrides, dtype=dtype, rule=Rule(max_grad_norm=FREE), roomy=place == "roomy", **options)
    try:
        homes = {unit.home.tier for unit in pair.optimizer.runtime.units}
        assert homes == ({Tier.HOST, Tier.NVME} if place == "part" else {Tier.NVME})
        yield pair
    finally:
        pair.optimizer.close()


def limit(pair: Lockstep, max_grad_norm: float) -> None:
    """What the next step clips to."""
    pair.optimizer.max_grad_norm = max_grad_norm
    pair.plain.rule = dataclasses.replace(pair.plain.rule, max_grad_norm=max_grad_norm)


class Poisoned(Toy):
    """Makes gradients that are not finite, but for the units that backward comes to first."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> Any:
        handle = self.blocks[1].register_full_backward_hook(lambda module, into, out: (into[0] * factor,))
        try:
            return super().forward(x, y)
        finally:
            handle.remove()


def poisoned(number: int) -> dict[str, Any]:
    """Batches of which every seventh makes such gradients."""
    return batch(number) | {"factor": 1.0 if number % 7 else float("inf")}


POISONED: dict[str, Any] = {"factory": seeded(Poisoned), "batches": poisoned}


def play(pair: Lockstep, moves: str) -> list[tuple[int, int]]:
    """Train both by ``moves``, one step each; how many updates were speculated, and rolled back.

    A dot is a step that is not clipped, ``c`` one that is. Before ``step()`` a clipped one may run without
    gradients (``i``), read weights (``r``) or change the learning rate (``l``; ``L``: not clipped); ``a``
    accumulates micro-batches, ``z`` drops the gradients first.
    """
    out, group = [], pair.optimizer.param_groups[0]
    for move in moves:
        limit(pair, FREE if move in ".Lz" else CLIPPED)
        pair.number += 1
        given = [pair.batches(pair.number)]
        losses = []
        if move == "a":
            with infinity.no_sync(pair.model):
                losses.append(pair.backward(pair.number))
            pair.number += 1
            given.append(pair.batches(pair.number))
        losses.append(pair.backward(pair.number))
        if move == "z":
            pair.optimizer.zero_grad()
            losses = [pair.backward(pair.number)]
        if move == "i":
            with torch.no_grad():
                pair.model(**batch(99))
        if move == "r":
            infinity.state_dict(pair.model)
        lr = 2e-3 if move in "lL" else None
        before = [g["lr"] for g in pair.optimizer.param_groups]
        for group in pair.optimizer.param_groups if lr else ():
            group["lr"] = lr
        pair.optimizer.step()
        for group, value in zip(pair.optimizer.param_groups, before, strict=True):
            group["lr"] = value
        outcome = pair.plain.step(given, lr=lr)
        assert [float(loss) for loss in losses] == [float(loss) for loss in outcome.losses]
        assert pair.optimizer.skipped == outcome.skipped
        report = pair.optimizer.report()
        out.append((report.speculated, report.rolled_back))
    return out


def on_nvme(pair: Lockstep) -> int:
    return sum(unit.home.tier is Tier.NVME for unit in pair.optimizer.runtime.units)


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", few(("roomy", "part"), PLACES))
def test_it_gives_the_plain_loops_bits_pauses_where_steps_are_clipped_and_resumes_by_itself(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        n = on_nvme(pair) if place != "one-version" else 0
        right, wrong, paused = (n, 0), (n, n), (0, 0)
        assert play(pair, "...") == [right] * 3  # none is clipped
        pair.check()
        assert play(pair, "ccccc") == [wrong, wrong, *[paused] * 3]  # all are
        pair.check()
        assert play(pair, "....c.c") == [paused, paused, right, right, wrong, right, wrong]  # some are
        pair.check()


# --- the same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "dtype"),
    few(
        (("nvme", "bf16"), ("roomy", "fp16"), ("part", "bf16")),
        [("nvme", "bf16"), ("nvme", "fp16"), ("nvme", "fp32"), ("roomy", "fp16"), ("part", "bf16")],
    ),
)
def test_steps_with_gradients_that_are_not_finite_are_forgotten(tmp_path, place, dtype):
    with lockstep(place, tmp_path, dtype, **POISONED) as pair:
        seen = play(pair, "..c.c......c..")
        assert pair.plain.steps <= 12  # fp16 overflows at first by itself
        for speculated, rolled_back in (seen[6], seen[13]):
            assert 0 < speculated == rolled_back < on_nvme(pair) + (place == "part")
        pair.check()


@pytest.mark.parametrize("place", few(("part",), PLACES))
def test_whatever_happens_between_backward_and_a_step_that_is_clipped(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        play(pair, "...")
        for move in "irlLaz":
            speculated, rolled_back = play(pair, f"..{move}.")[2]
            if place != "one-version":
                assert (speculated, rolled_back) == (on_nvme(pair), 0 if move == "z" else on_nvme(pair)), move
            pair.check()


def test_clipping_with_an_optimizer_that_was_made_without_it_says_what_to_do(tmp_path):
    pair = Lockstep(streaming(tmp_path), rule=Rule(max_grad_norm=None))
    with contextlib.closing(pair.optimizer):
        pair.step(2)
        pair.backward(3)
        pair.optimizer.max_grad_norm = CLIPPED
        with pytest.raises(StateError, match="made without it"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.optimizer.max_grad_norm = None
        pair.step(2)
        pair.check()


def test_a_learning_rate_that_changes_in_every_step_pauses_speculation(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        assert play(pair, "LLLLLL")[2:] == [(0, 0)] * 4
        pair.check()


@pytest.mark.parametrize("place", few(("nvme",), ("nvme", "roomy")))
def test_parts_that_are_frozen_now_and_then(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for part, train in [("blocks.1", False), ("blocks.1.up", True), ("last.bias", False), ("", True)]:
            pair.require_grad(part, train)
            play(pair, "..c.")
        pair.check()


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [[], ["memory.device=900KiB"]], ids=["roomy", "tight"])
def test_bytes_are_the_planned_ones_also_where_updates_are_rolled_back(tmp_path, room):
    factory, batches = models.build("gpt", seed=0)
    model = build(factory, "bf16", streaming(tmp_path, *room))
    optimizer = optimizer_for(model, Rule(max_grad_norm=FREE))
    with contextlib.closing(optimizer):
        planned, rolled_back, before = [], 0, (0, 0)
        for step, move in enumerate("....c.cc.."):
            if step == 3:
                before = settled(optimizer.runtime)
            optimizer.max_grad_norm = CLIPPED if move == "c" else FREE
            model(**batches(step)).loss.backward()
            optimizer.step()
            report = optimizer.report()
            rolled_back += report.rolled_back
            if step >= 3:
                planned.append((report.planned_nbytes_read, report.planned_nbytes_written))
        moved = [b - a for a, b in zip(before, settled(optimizer.runtime), strict=True)]
        assert rolled_back
        assert moved == [sum(each) for each in zip(*planned, strict=True)]


# --- delays ------------------------------------------------------------------------------------------


class JitteryEngine(FaultyEngine):
    """Every other transfer is late, some by milliseconds."""

    @property
    def delay_s(self) -> float:
        return random.choice([0.0, 0.0, 0.0005, 0.003])

    @delay_s.setter
    def delay_s(self, value: float) -> None:
        pass


@contextlib.contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Random delays of transfers, updates and collectives."""

    def late(call: Any) -> Any:
        @functools.wraps(call)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(random.choice([0.0, 0.0, 0.0005, 0.002]))
            return call(*args, **kwargs)

        return delayed

    random.seed(seed + int(os.environ.get("RANK", "0")))
    make = storage.make_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "make_engine", lambda *args: JitteryEngine(make(*args)))
        patch.setattr(HostRule, "update", late(HostRule.update))
        patch.setattr(Pending, "finish", late(Pending.finish))
        yield


def random_moves(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices(".cirlLaz", weights=[14, 4, 1, 1, 1, 1, 1, 1], k=count))


@pytest.mark.parametrize("seed", few((1,), range(60)))
def test_random_delays_and_steps_of_all_kinds_give_the_same_bits(tmp_path, seed):
    place, dtype = PLACES[seed % 3], ("bf16", "fp16")[seed % 2]
    with jitter(seed), lockstep(place, tmp_path, dtype, **POISONED) as pair:
        seen = play(pair, "..c" + random_moves(seed, 15))
        assert any(speculated and not rolled_back for speculated, rolled_back in seen)
        assert any(rolled_back for _, rolled_back in seen)
        pair.check()


# --- with ranks, adapters and by layer: against the same without speculation ---------------------------


def digest(model: Any, losses: list[float]) -> str:
    out = hashlib.sha256(repr(losses).encode())
    for name, weight in infinity.state_dict(model, every_rank=True).items():
        out.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def trained(kind: str, folder: str, moves: str, *overrides: str) -> tuple[str, int, int]:
    """A digest of losses and weights; updates that were speculated, and rolled back."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    factory, batches = models.build("llama", seed=3)
    settings = streaming(folder, f"memory.device={900 if world > 1 else 700}KiB", *overrides)
    if kind == "lora":
        with small_units():
            model = infinity.add_lora(build(factory, "bf16", settings), rank=4, alpha=8.0)
    else:
        model = build(factory, "bf16", settings)
    optimizer = optimizer_for(model, Rule(max_grad_norm=FREE))
    with contextlib.closing(optimizer):
        forward = infinity.layer_schedule(model, 2) if kind == "layer" else model
        losses, speculated, rolled_back = [], 0, 0
        for step, move in enumerate(moves):
            optimizer.max_grad_norm = CLIPPED if move in "ca" else FREE
            given = batches(step, rank, world)
            if move == "a" and kind != "layer":
                with infinity.no_sync(model):
                    model(**batches(step + 100, rank, world)).loss.backward()
            loss = forward(**given).loss
            loss.backward()
            losses.append(loss.item())
            if move == "z":
                optimizer.zero_grad()
                continue
            optimizer.step()
            report = optimizer.report()
            speculated, rolled_back = speculated + report.speculated, rolled_back + report.rolled_back
        return digest(model, losses), speculated, rolled_back


def compared(kind: str, folder: str, moves: str) -> None:
    """Without speculation, and with it, and with delays."""
    late, _, _ = trained(kind, folder, moves, "memory.versions=1")
    with jitter(1):
        early, speculated, rolled_back = trained(kind, folder, moves)
    assert early == late
    assert speculated > rolled_back > 0


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", few(("lora",), ("lora", "layer")))
def test_adapters_and_the_layer_schedule_give_the_same_bits(tmp_path, kind):
    torch.manual_seed(0)
    compared(kind, str(tmp_path), "..c.z." if kind == "layer" else "..ca.z.")


def two_ranks(folder: str) -> None:
    compared("whole", folder, "..ca.z.")


def test_two_ranks_give_the_same_bits(tmp_path):
    run_ranks(two_ranks, 2, str(tmp_path))
