"""Parameters without a gradient are left alone, to the bit, as torch's optimizers leave them.

Their weights, their moments and their step counts stay; on several ranks those that no rank used.
"""

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.helpers import lockstep as locked
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several
from tests.helpers.lockstep import PLACES, WIDTH, Block, Lockstep, lockstep, seeded
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import build, optimizer_for, streaming
from tests.test_bytes import settled

FREE, CLIPPED = Rule(max_grad_norm=None), Rule()


class Padded(nn.Module):
    """A parameter without elements, as MobileBERT has one, before another that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.empty, self.weight])


class Experts(nn.Module):
    """One expert works on a batch: a leaf where there are several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return torch.relu(self.experts[expert](x)).view(-1, 3, WIDTH).sum(1)


class Parts(nn.Module):
    """A model of which every batch uses other parts: a branch, blocks, experts, a vector of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(6, WIDTH)
        self.image = nn.Sequential(nn.Linear(6, WIDTH), Block())
        self.padded = Padded()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mixture = Experts()
        self.last = nn.Linear(WIDTH, 4)
        self.sometimes = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(WIDTH, 2))

    def forward(self, x: Tensor, y: Tensor, image: bool, drop: int, expert: int) -> SimpleNamespace:
        x = x.to(self.last.weight.dtype)
        h = self.text(x)
        if image:
            h = (h + self.image(x)) * self.sometimes
        h = self.padded(h)
        for i, block in enumerate(self.blocks):
            if i != drop:
                h = block(h)
        out = self.last(h + self.mixture(h, expert))
        return SimpleNamespace(loss=nn.functional.mse_loss(out.float(), y), out=out)


def batch(number: int, rank: int = 0) -> dict[str, Any]:
    """Images in every second batch, a block dropped in most; experts 0 to 2, by number and rank."""
    choices = {"image": number % 2 == 0, "drop": number % 4, "expert": (number // 2 + rank) % 3}
    return locked.batch(10 * number + rank) | choices


def text_only(number: int, rank: int = 0) -> dict[str, Any]:
    return batch(number, rank) | {"image": False, "drop": 1, "expert": rank}


WAYS = [*((where, rule, "bf16") for where in PLACES for rule in (FREE, CLIPPED)), ("nvme", CLIPPED, "fp16")]


@pytest.mark.parametrize(("where", "rule", "dtype"), few((WAYS[1], WAYS[2], WAYS[-1]), WAYS))
def test_what_a_step_does_not_use_stays_as_it_is(tmp_path, where, rule, dtype):
    with lockstep(where, tmp_path, seeded(Parts), dtype=dtype, rule=rule, batches=batch) as pair:
        pair.step(9)
        pair.check()
        counts = pair.plain.counts
        assert counts["never"] == 0 < counts["image.0.weight"] < counts["text.weight"] == pair.plain.steps


@pytest.mark.parametrize(
    ("where", "rule"),
    few(
        (("host", CLIPPED), ("nvme", FREE)),
        [(where, rule) for where in ("host", "nvme") for rule in (FREE, CLIPPED)],
    ),
)
def test_what_one_micro_batch_used_is_updated(tmp_path, where, rule):
    with lockstep(where, tmp_path, seeded(Parts), rule=rule, batches=batch) as pair:
        for step in range(4):
            with infinity.no_sync(pair.model):
                pair.backward(2 * step)
            pair.backward(2 * step + 1)
            pair.optimizer.step()
            pair.plain.step([batch(2 * step), batch(2 * step + 1)])
        pair.check()


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_that_are_dropped_count_no_step(tmp_path, where):
    with lockstep(where, tmp_path, seeded(Parts), rule=FREE, batches=batch) as pair:
        pair.step(2)
        pair.backward(50)
        pair.optimizer.zero_grad()
        pair.step(3)
        pair.check()


class Ignored(Parts):
    """With images another block runs, on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.end = Block(), Block()

    def forward(self, x: Tensor, y: Tensor, image: bool, drop: int, expert: int) -> SimpleNamespace:
        if image:
            self.aside(self.text(x.to(self.last.weight.dtype)))
        return super().forward(x, y, False, drop, expert)


@pytest.mark.parametrize("rule", few((FREE,), (FREE, CLIPPED)))
def test_a_unit_that_stays_in_memory_without_an_update_has_its_weights_in_the_next_step(tmp_path, rule):
    model = build(seeded(Ignored), "bf16", streaming(tmp_path))  # room for all
    optimizer, loop = optimizer_for(model, rule), Reference(seeded(Ignored)(), torch.bfloat16, rule)
    runtime: Any = optimizer.runtime
    [aside] = runtime.units.holding(model.aside.parameters())
    assert len(aside.segments) == len(list(model.aside.parameters()))
    prefetcher = runtime.executor().prefetcher
    for step in range(6):
        loss = model(**text_only(step) | {"image": True}).loss
        loss.backward()
        assert step not in (3, 4) or aside.index in prefetcher.staying
        if step == 4:
            optimizer.zero_grad()
            loss = model(**text_only(step)).loss  # does not run it
            loss.backward()
        assert prefetcher.staying <= prefetcher.residents.present.keys()
        optimizer.step()
        assert [loss.item()] == [each.item() for each in loop.step([text_only(step)]).losses]
    weights = infinity.state_dict(model)
    optimizer.close()
    assert all(torch.equal(weights[name], p) for name, p in loop.parameters.items())


@pytest.mark.parametrize("where", few(("one-version",), PLACES))
def test_what_is_frozen_for_some_steps_keeps_its_moments_and_its_count(tmp_path, where):
    with lockstep(where, tmp_path, seeded(Parts), rule=FREE, batches=batch) as pair:
        pair.step(3)
        for train in (False, True):
            for model in (pair.model, pair.plain.model):
                model.blocks.requires_grad_(train)
                model.last.bias.requires_grad_(train)
            pair.step(3)
            pair.check()


@pytest.mark.parametrize("where", few(("nvme",), ("host", "nvme")))
def test_step_counts_are_saved_and_loaded_also_of_what_is_frozen_now(tmp_path, where):
    with lockstep(where, tmp_path / "a", seeded(Parts), batches=batch) as pair:
        pair.step(3)
        pair.model.blocks.requires_grad_(False)
        weights, state = pair.model.state_dict(), pair.optimizer.state_dict()
        pair.model.blocks.requires_grad_(True)
        with lockstep(where, tmp_path / "b", seeded(Parts), batches=batch) as other:
            other.backward(77)
            other.optimizer.step()
            other.model.load_state_dict(weights)
            other.optimizer.load_state_dict(state)
            other.plain, other.number = pair.plain, pair.number
            other.check()
            other.step(3)
            other.check()
            assert other.optimizer.steps == 6


def bytes_of_steps(pair: Lockstep, steps: int) -> tuple[int, int, int, int]:
    """Bytes read and written by ``steps`` steps, and what was planned."""
    runtime: Any = pair.optimizer.runtime
    before, planned = settled(runtime), [0, 0]
    for _ in range(steps):
        pair.step()
        report = pair.optimizer.report()
        planned[0] += report.planned_nbytes_read
        planned[1] += report.planned_nbytes_written
    after = settled(runtime)
    return after[0] - before[0], after[1] - before[1], *planned


@pytest.mark.parametrize("rule", few((CLIPPED,), (FREE, CLIPPED)))
def test_units_that_a_step_does_not_use_move_no_bytes(tmp_path, rule):
    with lockstep("nvme", tmp_path, seeded(Parts), rule=rule, batches=text_only) as pair:
        pair.step(3)
        read, written, planned_read, planned_written = bytes_of_steps(pair, 3)
        used = {name for name, count in pair.plain.counts.items() if count}
        units = [u for u in pair.optimizer.runtime.units if any(s.name in used for s in u.segments)]
        assert len(units) < len(pair.optimizer.runtime.units) - 4
        assert (read, written) == (planned_read, planned_written)
        assert written == 3 * 12 * sum(unit.shard_numel for unit in units)
        pair.check()


# --- two ranks -------------------------------------------------------------------------------------


def mean_over_ranks(loop: Reference, numbers: range) -> None:
    """A step of the plain loop with the gradients' mean over two ranks; None on a rank counts as zero."""
    total: dict[str, Tensor] = {}
    for number in numbers:
        both: list[dict[str, Tensor]] = []
        for rank in range(2):
            loop.backward(batch(number, rank))
            both.append({name: p.grad for name, p in loop.parameters.items() if p.grad is not None})
            for p in loop.parameters.values():
                p.grad = None
        for name in both[0].keys() | both[1].keys():
            zero = torch.zeros_like(loop.masters[name])
            mean = (both[0].get(name, zero) + both[1].get(name, zero)) / 2
            total[name] = total[name] + mean if name in total else mean
    for name, grad in total.items():
        loop.parameters[name].grad = grad
    loop.finish([])


def wrong_on_two_ranks(rule: Rule, where: list[str], accumulate: int) -> list[str]:
    """Train a few steps on this rank; names of parameters that are not the plain loop's."""
    rank = int(os.environ["RANK"])
    model = build(seeded(Parts), "fp32", where)
    optimizer, loop = optimizer_for(model, rule), Reference(seeded(Parts)(), torch.float32, rule)
    for step in range(3):
        numbers = range(accumulate * step, accumulate * (step + 1))
        for number in numbers:
            with contextlib.nullcontext() if number == numbers[-1] else infinity.no_sync(model):
                model(**batch(number, rank)).loss.backward()
        optimizer.step()
        mean_over_ranks(loop, numbers)
    state = optimizer.state_dict()["state"]
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    wrong = []
    for i, fields in state.items():
        name = order[i]
        plain = loop.masters[name], loop.m[name], loop.v[name]
        mine = fields["master"], fields["exp_avg"], fields["exp_avg_sq"]
        if not all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True)):
            wrong.append(name)
    counts = {s.name: s.steps for _, s in optimizer.runtime.units.segments()}
    optimizer.close()
    assert counts["mixture.experts.3.weight"] == 0 < counts["mixture.experts.1.weight"]
    return wrong + [name for name, count in counts.items() if count != loop.counts[name]]


def bytes_on_two_ranks(folder: str) -> tuple[Any, ...]:
    rank = int(os.environ["RANK"])
    model = build(seeded(Parts), "fp32", streaming(folder))
    optimizer = optimizer_for(model, FREE)
    runtime: Any = optimizer.runtime
    planned = [0, 0]
    for step in range(5):
        if step == 3:
            before = settled(runtime)
        model(**text_only(step, rank)).loss.backward()
        optimizer.step()
        report = optimizer.report()
        if step >= 3:
            planned[0] += report.planned_nbytes_read
            planned[1] += report.planned_nbytes_written
    after = settled(runtime)
    used = [unit for unit in runtime.units if unit.updates]
    optimizer.close()
    moved = after[0] - before[0], after[1] - before[1]
    return moved, tuple(planned), len(runtime.units) - len(used), sum(unit.shard_numel for unit in used)


def test_two_ranks_agree_on_the_parameters_that_none_used(tmp_path):
    folder = str(tmp_path)
    ranks = run_ranks(
        several, 2, (wrong_on_two_ranks, FREE, streaming(folder), 2),
        (wrong_on_two_ranks, CLIPPED, ["memory.host=256MiB"], 1), (bytes_on_two_ranks, folder),
    )  # fmt: skip
    for accumulated, clipped, (moved, planned, unused, numel) in ranks:
        assert accumulated == clipped == []
        assert moved == planned
        assert unused
        assert moved[1] == 2 * 12 * numel
