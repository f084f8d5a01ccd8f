"""Training loops of every kind go on bitwise from whatever step they are interrupted after.

A loop runs to its end, and what a kill after each step would leave on disk is copied on the way. Each copy is
gone on with, and must end as the loop did.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import infinity
from infinity.core.errors import StateError
from infinity.shards.journal import Journal
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.crashes import PLACES, Loader, Net
from tests.helpers.training import build, recipe, small_units

STEPS = 5


class Loop:
    """One process of a run; a subclass says in what its loop differs from the plain one."""

    place, dtype, clip, steps = "nvme", "fp32", None, STEPS
    more: tuple[str, ...] = ()

    def __init__(self, nvme: Path, seed: int) -> None:
        self.nvme = nvme
        torch.manual_seed(seed)
        self.model = self.build()
        self.loader = Loader(0, 1)
        self.optimizer = infinity.AdamW(
            self.model, lr=0.01, params=self.groups(), max_grad_norm=self.clip, follow={"loader": self.loader}
        )
        self.prepare()
        self.start = infinity.resume(self.model, self.optimizer)
        self.losses: dict[int, str] = {}

    def build(self) -> nn.Module:
        return build(self.make, self.dtype, self.settings())

    def settings(self) -> list[str]:
        return [f"memory.nvme=[{self.nvme}]", *PLACES[self.place], "run.name=mine", *self.more]

    def make(self) -> nn.Module:
        return Net()

    def groups(self) -> list[dict[str, Any]] | None:
        return None

    def prepare(self) -> None:
        """What a script does before it resumes."""

    def loss(self) -> torch.Tensor:
        return self.model(self.loader.next())

    def step(self, step: int) -> torch.Tensor:
        loss = self.loss()
        self.optimizer.scale(loss).backward()
        self.optimizer.step()
        return loss

    def run(self, copies: Path | None = None) -> tuple[dict[int, str], Any, Any]:
        """Train to the end; losses, weights and states."""
        while self.optimizer.steps < self.steps:
            step = self.optimizer.steps
            self.losses[step] = self.step(step).item().hex()
            if copies is not None:
                self.optimizer.synchronize()
                shutil.copytree(self.nvme, copies / str(self.loader.position))
        weights, states = infinity.state_dict(self.model), self.optimizer.state_dict()
        infinity.close(self.model)
        return self.losses, weights, states


class WithScheduler(Loop):
    def prepare(self) -> None:
        self.scheduler = self.schedule()
        self.optimizer.follow(scheduler=self.scheduler)

    def step(self, step: int) -> torch.Tensor:
        loss = super().step(step)
        self.scheduler.step()
        return loss


class Lambda(WithScheduler):
    def schedule(self) -> Any:
        return lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.7**step)


class OneCycle(WithScheduler):
    place = "host"

    def schedule(self) -> Any:
        return lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.02, total_steps=STEPS + 1)


class Plateau(WithScheduler):
    def schedule(self) -> Any:
        return lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5, threshold=1.0)

    def step(self, step: int) -> torch.Tensor:
        loss = Loop.step(self, step)
        self.scheduler.step(loss.item())
        return loss


class Accumulating(Loop):
    place, clip = "both", 0.3

    def step(self, step: int) -> torch.Tensor:
        with infinity.no_sync(self.model):
            self.loss().backward()
        return super().step(step)


class Thawing(Loop):
    """Blocks are frozen at first, and others later."""

    place = "both"

    def prepare(self) -> None:
        self.freeze(0)

    def freeze(self, step: int) -> None:
        for number, block in enumerate(self.model.blocks):
            block.requires_grad_(number <= step)
        self.model.blocks[2][0].bias.requires_grad_(False)  # as an attribute, before its values are there

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.model.parameters())}]

    def step(self, step: int) -> torch.Tensor:
        self.freeze(step)
        return super().step(step)


class Frozen(Thawing):
    place = "nvme"

    def freeze(self, step: int) -> None:
        self.model.blocks[1].requires_grad_(False)


class Written(Loop):
    """Weights are written in place in the middle, and states loaded."""

    place = "both"

    def step(self, step: int) -> torch.Tensor:
        if step == 2:
            with infinity.gathered(self.model, modify=True), torch.no_grad():
                self.model.embed.weight.mul_(0.5)
        if step == 3:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.model.load_state_dict(infinity.state_dict(self.model))
        return super().step(step)


class Forgetful(Loop):
    """Steps are thrown away, raise, or have no gradient."""

    def step(self, step: int) -> torch.Tensor:
        if step == 1:
            self.model(torch.ones(4, 9, dtype=torch.long)).backward()
            self.optimizer.zero_grad()
        if step == 2:
            with pytest.raises(KeyboardInterrupt):
                self.interrupted()
            self.optimizer.zero_grad()
        return super().step(step)

    def interrupted(self) -> None:
        self.model(torch.ones(4, 9, dtype=torch.long)).backward()
        raise KeyboardInterrupt


class Forgetting(Forgetful):
    place, clip = "host", 0.5


class Choosy(Loop):
    """A block is not used in every step; learning rates are set by hand."""

    def groups(self) -> list[dict[str, Any]]:
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        return [{"params": vectors, "lr": 0.1, "name": "vectors"}, {"params": matrices, "betas": (0.5, 0.9)}]

    def step(self, step: int) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        skipped = self.model.blocks[step % 3]
        handle = skipped.register_forward_hook(lambda module, args, output: output.detach())
        try:
            return super().step(step)
        finally:
            handle.remove()


class Unused(Loop):
    place = "both"

    def make(self) -> nn.Module:
        return Sparse()


class Sparse(Net):
    """A block of three is used in turn."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        x = x + self.blocks[int(tokens[0, 0]) % 3](x)
        logits = self.norm(x.flatten(0, 1)) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Resized(Loop):
    """A model of transformers, tied, whose embedding is resized in a second block."""

    def build(self) -> nn.Module:
        factory, _ = models.build("gpt2", seed=1, dropout=0.1)
        with small_units(), infinity.Init(recipe(self.dtype, self.settings())):
            model = factory()
        with small_units(), infinity.Init(model):
            model.resize_token_embeddings(110)
        return model

    def loss(self) -> torch.Tensor:
        tokens = self.loader.next()
        return self.model(input_ids=tokens, labels=tokens).loss


class Overflows(Resized):
    """Gradients overflow in some iterations, which are skipped."""

    dtype = "fp16"

    def step(self, step: int) -> torch.Tensor:
        grows = self.loader.position in (1, 3, 4)
        loss = self.loss()
        self.optimizer.scale(loss * (1e6 if grows else 1.0)).backward()
        self.optimizer.step()
        assert self.optimizer.skipped == grows
        return loss


class Durable(Loop):
    more = ("durability.survives=power",)


class Rare(Loop):
    """Some steps are recorded."""

    more = ("durability.every=2",)


class RareHost(Rare):
    place = "host"


class RareHostChoosy(Choosy):
    """A unit in host memory is updated in a step that is not recorded, and not used in the one that is."""

    place, more = "host", ("durability.every=2",)


LOOPS = [
    Loop, Lambda, OneCycle, Plateau, Overflows, Accumulating, Thawing, Frozen, Written, Forgetful, Forgetting,
    Choosy, Unused, Resized, Durable, Rare, RareHost,
    RareHostChoosy,
]  # fmt: skip


#: Of loops that differ in the place only, and of those that other tests kill, no step in the fast suite.
#: Nor of Unused, whose parameters tests/test_unused.py leaves out, and Plateau, which is another scheduler.
ALIKE = (Loop, Lambda, OneCycle, Plateau, Frozen, Forgetting, Unused, Resized, Durable, Rare, RareHost)


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        pytest.param(kind, first, marks=[pytest.mark.slow] if kind in ALIKE or first == 0 else [])
        for kind in LOOPS
        for first in (2, 0)
    ],
    ids=lambda each: getattr(each, "__name__", f"from {each}"),
)
def test_a_loop_goes_on_bitwise_after_every_step(tmp_path, kind, first):
    """Those after the step ``first``, every second one."""
    (tmp_path / "copies").mkdir()
    losses, weights, states = kind(tmp_path / "nvme", 1).run(tmp_path / "copies")
    starts = set()
    for number, copy in enumerate(sorted((tmp_path / "copies").iterdir())[first::2]):
        loop = kind(copy, 2 + number)
        starts.add(loop.start)
        if loop.start == 0:  # nothing was recorded: another seed gives another run
            infinity.close(loop.model)
            continue
        again = loop.run()
        assert again[0].items() <= losses.items(), (copy, loop.start)
        same(again[1], weights)
        same(again[2], states)
    assert max(starts) >= STEPS - 1


class WrittenLate(Lambda):
    """Weights in host memory are written in place before the scheduler's state is taken."""

    place, copy = "host", None

    def loss(self) -> torch.Tensor:
        loss = super().loss()
        if self.copy is not None and self.optimizer.steps == 2:
            self.optimizer.synchronize()
            shutil.copytree(self.nvme, self.copy)
        return loss

    def step(self, step: int) -> torch.Tensor:
        loss = super().step(step)
        with infinity.gathered(self.model, modify=True), torch.no_grad():
            self.model.embed.weight.mul_(0.5)
        return loss


def test_what_is_written_before_the_record_belongs_to_it(tmp_path):
    loop = WrittenLate(tmp_path / "nvme", 1)
    loop.copy = tmp_path / "copy"
    losses, weights, states = loop.run()
    loop = WrittenLate(tmp_path / "copy", 2)
    assert loop.start == 2
    again = loop.run()
    assert again[0].items() <= losses.items()
    same(again[1], weights)
    same(again[2], states)


def test_the_last_step_before_close_is_kept_with_a_scheduler(tmp_path):
    loop = Lambda(tmp_path, 1)
    for step in range(2):
        loop.step(step)
    infinity.close(loop.model, keep=True)
    loop = Lambda(tmp_path, 2)
    assert loop.start == 2
    assert loop.scheduler.last_epoch == 2
    infinity.close(loop.model)


def test_a_step_whose_small_state_is_missing_is_not_recorded(tmp_path):
    def fails():
        raise ValueError("once")

    loop = Loop(tmp_path, 1)
    loop.step(0)
    loop.loader.state_dict = fails
    with pytest.raises(ValueError, match="once"):
        loop.step(1)
    del loop.loader.state_dict
    with pytest.raises(StateError, match=r"before step 2 was recorded.*infinity.resume"):
        loop.loss()
    infinity.close(loop.model, keep=True)
    loop = Loop(tmp_path, 2)
    assert loop.start == 1
    infinity.close(loop.model)


class RareChoosy(Choosy):
    """Units are used in some steps, and not every step is recorded."""

    more = (*Choosy.more, "durability.every=2")


class WrittenBetween(Rare):
    """Weights are written in place after a step that was not recorded."""

    place, more, steps = "host", ("durability.every=3",), 6

    def step(self, step: int) -> torch.Tensor:
        if step == 4:
            with infinity.gathered(self.model, modify=True), torch.no_grad():
                self.model.embed.weight.mul_(0.5)
        return super().step(step)


def test_the_step_after_a_write_between_records_is_recorded(tmp_path):
    (tmp_path / "copies").mkdir()
    losses, weights, states = WrittenBetween(tmp_path / "nvme", 1).run(tmp_path / "copies")
    loop = WrittenBetween(tmp_path / "copies" / "5", 2)
    assert loop.start == 5
    again = loop.run()
    assert again[0].items() <= losses.items()
    same(again[1], weights)
    same(again[2], states)


def test_a_state_that_is_loaded_midway_is_recorded_with_its_learning_rates(tmp_path):
    loop = Loop(tmp_path, 1)
    for step in range(2):
        loop.step(step)
    state = loop.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    loop.loss()  # the step is recorded
    loop.optimizer.zero_grad()
    loop.optimizer.load_state_dict(state)
    loop.loss()  # it is again
    infinity.close(loop.model, keep=True)
    loop = Loop(tmp_path, 2)
    assert loop.start == 2
    assert loop.optimizer.param_groups[0]["lr"] == 0.125
    infinity.close(loop.model)


class Raises(Loop):
    """Weights are being written when an error comes, after which the loop goes on."""

    def step(self, step: int) -> torch.Tensor:
        loss = super().step(step)
        with contextlib.suppress(ValueError), infinity.gathered(self.model, modify=True):
            self.model.embed.weight.data.mul_(0)
            self.model.norm.weight.mul_(0)
            raise ValueError
        return loss


@pytest.mark.parametrize("place", few(("both",), ("nvme", "both")))
def test_weights_are_as_they_were_if_the_block_that_writes_them_raises(tmp_path, monkeypatch, place):
    monkeypatch.setattr(Loop, "place", place)
    wanted = Loop(tmp_path / "one", 1).run()
    (tmp_path / "copies").mkdir()
    found = Raises(tmp_path / "two", 1).run(tmp_path / "copies")
    assert found[0] == wanted[0]
    same(found[1], wanted[1])
    same(found[2], wanted[2])
    loop = Loop(tmp_path / "copies/3", 2)
    assert loop.start in (2, 3)
    same(loop.run()[1], wanted[1])


def test_a_record_waits_for_updates_of_steps_without_one(tmp_path, monkeypatch):
    waited = []

    def add(commits, record, landing):
        updating = {unit.home.updating for unit in loop.optimizer.runtime.units}
        waited.append(updating - {None} <= {*landing})
        return plain(commits, record, landing)

    plain = Journal.add
    monkeypatch.setattr(Journal, "add", add)
    loop = RareChoosy(tmp_path, 1)
    loop.run()
    assert len(waited) > 1
    assert all(waited)


def same(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}/{number}")
    else:
        assert ours == theirs, where


def test_a_loop_by_numbers_goes_on_behind_steps_that_were_skipped(tmp_path):
    batches = [torch.full((2, 8), float(number + 1)) for number in range(5)]
    batches[1][0, 0] = torch.inf  # its gradients are not finite

    def lives(nvme: Path, *ends: int) -> tuple[list[int], torch.Tensor]:
        starts, weight = [], torch.empty(0)
        for end in ends:
            torch.manual_seed(0)
            model = build(lambda: nn.Linear(8, 8), "fp32", [f"memory.nvme=[{nvme}]", "run.name=mine"])
            optimizer = infinity.AdamW(model, lr=0.1)
            starts.append(infinity.resume(model, optimizer))
            for batch in batches[starts[-1] : end]:
                model(batch).square().sum().backward()
                optimizer.step()
            with infinity.gathered(model):
                weight = model.weight.detach().clone()
            infinity.close(model, keep=end < len(batches))
        return starts, weight

    (_, whole), (starts, parts) = lives(tmp_path / "a", 5), lives(tmp_path / "b", 3, 5)
    assert starts == [0, 3]
    assert torch.equal(whole, parts)
