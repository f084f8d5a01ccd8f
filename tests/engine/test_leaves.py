"""Experts that some ranks use and others do not: the same gathers everywhere, and the numbers of one rank."""

import math
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.errors import BudgetError, RecipeError, StateError
from infinity.core.lifecycle import Tier
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, recipe, reference, streaming, train

WIDTH, EXPERTS, VOCABULARY = 32, 4, 64
FREE, CLIPPED = Rule(max_grad_norm=None), Rule()


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class SparseMoE(nn.Module):
    """Each token goes to one expert, which its number says, so that a batch decides who is used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.gate(x).sigmoid()
        out = torch.zeros_like(x)
        for number in (tokens % EXPERTS).unique().tolist():
            chosen = (tokens % EXPERTS == number).unsqueeze(-1)
            out = out + torch.where(chosen, self.experts[number](x) * weights[..., number : number + 1], 0)
        return out


class Blend(SparseMoE):
    """The same under a name that says nothing."""


class Block(nn.Module):
    mixture: type[SparseMoE] = SparseMoE

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = self.mixture()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.after(self.mlp(self.before(x), tokens))


class BlendBlock(Block):
    mixture = Blend


class Model(nn.Module):
    block: type[Block] = Block

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Output:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, tokens, use_reentrant=False) if self.recompute else block(x, tokens)
        logits = self.head(x[:, :-1]).float()
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


class BlendModel(Model):
    block = BlendBlock


def factory(recompute: bool = False, kind: type[Model] = Model) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return kind(recompute).train()

    return make


def batch(step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Two sequences; the first uses two experts, the second another one, which changes from step to step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY // EXPERTS, (2, 9), generator=generator) * EXPERTS
    tokens[0, ::2] += (step + 1) % EXPERTS
    tokens[1] += (step + 2) % EXPERTS
    share = 2 // world
    return {"tokens": tokens[rank * share : (rank + 1) * share]}


def freeze_first_experts(model: Any) -> None:
    for block in model.blocks:
        block.mlp.experts[0].requires_grad_(False)


CASES: dict[str, dict[str, Any]] = {
    "free": {"rule": FREE},
    "clipped": {"rule": CLIPPED},
    "accumulate": {"rule": FREE, "accumulate": 2},
    "frozen": {"rule": FREE, "change": freeze_first_experts},
}


#: A case, and whether its blocks are recomputed.
ALL = tuple((case, recompute) for case in CASES for recompute in (False, True))
FEW = (("clipped", True), ("accumulate", False), ("frozen", True))
STEPS = 3


def play(folder: str, played: tuple[tuple[str, bool], ...]) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out = {}
    for case, recompute in played:
        trained = train(
            factory(recompute), batch, streaming(folder), rank=rank, world=world, dtype="fp32", steps=STEPS,
            **CASES[case],
        )  # fmt: skip
        out[case, recompute] = trained.losses, trained.norms, trained.weights
        assert not trained.reports[-1].on_demand, "who is used changes nothing"
    return out


def accumulate_in_one_graph(folder: str) -> dict[str, Tensor]:
    """Two forwards, one backward: each leaf ran twice before its gradients come."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build(factory(), "fp32", streaming(folder))
    optimizer = optimizer_for(model, FREE)
    for step in range(3):
        losses = [model(**batch(2 * step + i, rank, world)).loss for i in range(2)]
        (losses[0] + losses[1]).backward()
        optimizer.step()
    weights = infinity.state_dict(model, every_rank=True)
    optimizer.close()
    return weights


def differentiate_with_respect_to_inputs(folder: str) -> dict[str, Tensor]:
    """Of leaves that it goes through, ``torch.autograd.grad`` completes nothing."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model: Any = build(factory(), "fp32", streaming(folder))
    optimizer = optimizer_for(model, FREE)
    inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for step in range(STEPS):
        loss = model(**batch(step, rank, world)).loss
        torch.autograd.grad(loss, inputs.pop(), retain_graph=True)
        loss.backward()
        optimizer.step()
    weights = infinity.state_dict(model, every_rank=True)
    optimizer.close()
    return weights


def use_outside(folder: str) -> str:
    """A weight of a leaf is read before it, too, so that its gradient comes after the leaf's."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model: Any = build(factory(), "fp32", streaming(folder))
    optimizer = optimizer_for(model, FREE)
    expert = model.blocks[1].mlp.experts[0].up
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + expert.weight.sum(), args[1]))
    with pytest.raises(StateError) as caught:
        model(**batch(0, rank, world)).loss.backward()
    optimizer.close()
    return str(caught.value)


def without_leaf(folder: str) -> list[dict[str, Tensor]]:
    """Weights with a leaf, whose units all ranks use, and without: who does not use an expert serves it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make, more = factory(kind=BlendModel), {"dtype": "fp32", "steps": 3, "rank": rank, "world": world}
    return [
        train(make, batch, streaming(folder, *leaf), **more).weights
        for leaf in (["partition.leaf=[Blend]"], [])
    ]


def too_small(folder: str) -> str:
    model = build(factory(), "fp32", streaming(folder, "memory.device=1KiB"))
    with pytest.raises(BudgetError) as caught:
        optimizer_for(model, FREE)
    infinity.close(model)
    return str(caught.value)


def difference(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    squares = sum(float((mine[key].float() - w.float()).square().sum()) for key, w in plain.items())
    return math.sqrt(squares / sum(float(w.float().square().sum()) for w in plain.values()))


@pytest.mark.parametrize(
    "played", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few cases", "all cases"]
)
def test_ranks_that_use_different_experts_train_as_one_rank_does(tmp_path, played):
    folder = str(tmp_path)
    results = run_ranks(
        several, 2, (play, folder, played), (accumulate_in_one_graph, folder), (too_small, folder),
        (differentiate_with_respect_to_inputs, folder), (use_outside, folder),
    )  # fmt: skip
    for case, recompute in played:
        plain = reference(factory(recompute), batch, dtype="fp32", steps=STEPS, **CASES[case])
        first, second = (rank[0][case, recompute] for rank in results)
        losses = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
        assert losses == pytest.approx(plain.losses, rel=1e-4), case
        assert first[1] == pytest.approx(plain.norms, rel=1e-3), case
        assert difference(first[2], plain.weights) < 1e-3, case
    twice = reference(factory(), batch, dtype="fp32", steps=3, accumulate=2, rule=FREE)
    assert difference(results[0][1], twice.weights) < 0.05  # the sum of two losses, not their mean
    assert "units that are gathered as one" in results[0][2]
    plain = reference(factory(), batch, dtype="fp32", steps=STEPS, rule=FREE)
    assert difference(results[0][3], plain.weights) < 1e-3
    for rank in results:
        assert re.search(r"experts\.0\.up\.weight got a gradient after .*partition\.leaf", rank[4])


def test_a_leaf_changes_no_number(tmp_path):
    for leaf, none in run_ranks(without_leaf, 2, str(tmp_path)):
        assert all(torch.equal(none[name], weight) for name, weight in leaf.items())


def test_one_rank_reads_only_the_experts_that_it_uses(tmp_path):
    model = build(factory(), "fp32", streaming(tmp_path))
    optimizer = optimizer_for(model, FREE)
    runtime: Any = optimizer.runtime
    assert all(unit.home.tier is Tier.NVME for unit in runtime.units)
    model(**batch(0))
    used = {event.unit for event in runtime.executor().prefetcher.training.trace}
    assert len(used) < len(runtime.units)
    optimizer.close()


def test_a_leaf_has_units_of_its_own(tmp_path):
    model: Any = build(factory(), "fp32", streaming(tmp_path))
    leaves = infinity.engine.runtime.runtime_of(model).construction.builder.leaves
    assert {type(module) for module in leaves} == {SparseMoE}
    for module, units in leaves.items():
        assert len(units) > 1
        held = {id(s.param) for unit in units for s in unit.segments}
        assert held == {id(p) for p in module.parameters()}
    infinity.close(model)


def test_a_leaf_that_no_module_is_names_the_nearest_class(tmp_path):
    with pytest.raises(RecipeError, match="'SparseMoe' was built; did you mean 'SparseMoE'"):
        build(factory(), "fp32", streaming(tmp_path, "partition.leaf=[SparseMoe]"))
    assert recipe("fp32", []).partition.leaf == ()
