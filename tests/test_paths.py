"""Ranks on different paths train as one process that computes each rank's gradient, absent ones as zero.

The reference adds gradients in the order of ranks, divides by their number, and adds micro-batches. Ranks
that use the whole of a unit, in one order, give it to the bit. Others add later, the same in every place.
"""

import contextlib
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.helpers.cases import examples, few
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming

WIDTH, PARTS = 32, 6
FREE, CLIPPED = Rule(max_grad_norm=None), Rule()
#: What a micro-batch runs: numbers of parts, in order; negative: below a checkpoint.
Path = tuple[int, ...]


class Parts(nn.Module):
    """Parts that a path names run one after another: branches, early exits, other orders."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(PARTS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, path: Path) -> SimpleNamespace:
        x = self.first(x)
        for number in path:
            part = self.parts[abs(number) - 1]
            branch = checkpoint(part, x, use_reentrant=False) if number < 0 else part(x)
            x = x + torch.tanh(branch)
        return SimpleNamespace(loss=self.last(x).square().mean())


@dataclass(frozen=True)
class Program:
    """What every rank does: by step, rank and micro-batch."""

    world: int
    steps: tuple[tuple[tuple[Path, ...], ...], ...]
    place: str = "nvme"
    rule: Rule = CLIPPED
    frozen: tuple[int, ...] = ()
    unit_nbytes: int = 1  # each module is a unit
    evaluates: int | None = None  # the rank that runs the first part after each step
    exact: bool = True  # sums are in the order of the reference

    def batch(self, step: int, rank: int, micro: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
        return {"x": torch.randn(3, WIDTH, generator=generator), "path": self.steps[step][rank][micro]}


def parts(program: Program) -> Any:
    torch.manual_seed(1)
    model = Parts().train()
    for number in program.frozen:
        model.parts[number - 1].requires_grad_(False)
    return model


def placed(program: Program, folder: str) -> list[str]:
    tight = f"memory.device={80 * program.world}KiB"
    more = {"host": [], "nvme": [], "tight": [tight], "one version": ["memory.versions=1"]}
    where = ["memory.host=64MiB"] if program.place == "host" else streaming(folder)
    return [*where, *more[program.place]]


def train(program: Program, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    rank, norms = int(os.environ["RANK"]), []
    with small_units(program.unit_nbytes), infinity.Init(recipe("fp32", placed(program, folder))):
        model = parts(program)
    for number in program.frozen:
        model.parts[number - 1].requires_grad_(False)
    optimizer = optimizer_for(model, program.rule)
    with contextlib.closing(optimizer):
        for step, ranks in enumerate(program.steps):
            for micro in range(len(ranks[rank])):
                last = micro == len(ranks[rank]) - 1
                with contextlib.nullcontext() if last else infinity.no_sync(model):
                    model(**program.batch(step, rank, micro)).loss.backward()
            optimizer.step()
            norms.append(optimizer.grad_norm or 0.0)
            if program.evaluates == rank:
                with torch.no_grad():
                    model(torch.ones(1, WIDTH), path=(1, 1))
        weights = infinity.state_dict(model, every_rank=True)
    return weights, norms


def expected(program: Program) -> tuple[dict[str, Tensor], list[float]]:
    plain, norms = Reference(parts(program), torch.float32, program.rule), []
    for step, ranks in enumerate(program.steps):
        total: dict[str, Tensor] = {}
        for micro in range(max(map(len, ranks))):
            means: dict[str, Tensor] = {}
            for rank in range(program.world):
                if micro < len(ranks[rank]):
                    plain.backward(program.batch(step, rank, micro))
                for name, p in plain.parameters.items():
                    if p.grad is not None:
                        means[name] = means[name] + p.grad if name in means else p.grad
                        p.grad = None
            for name, mean in means.items():
                mean = mean / program.world
                total[name] = total[name] + mean if name in total else mean
        for name, grad in total.items():
            plain.parameters[name].grad = grad
        norms.append(plain.finish([]).grad_norm if total else norms[-1] if norms else 0.0)
    return {name: p.detach() for name, p in plain.parameters.items()}, norms


def play(programs: list[Program], folder: str) -> list[Any]:
    return [train(program, folder) for program in programs]


def check(programs: list[Program], folder: Any) -> None:
    others = [replace(each, place="host" if each.place != "host" else "nvme") for each in programs]
    ranks = run_ranks(play, programs[0].world, [*programs, *others], str(folder))
    for number, program in enumerate(programs):
        weights, norms = expected(program)
        for rank in ranks:
            (mine, ours), elsewhere = rank[number], rank[number + len(programs)]
            assert ours == pytest.approx(norms, rel=1e-9 if program.exact else 1e-4), program
            for name, weight in weights.items():
                assert torch.equal(mine[name], elsewhere[0][name]), (name, program)
                exact = torch.equal(mine[name], weight)
                close = not program.exact and torch.allclose(mine[name], weight, rtol=1e-3, atol=1e-4)
                assert exact or close, (name, program)


IMAGES = ((((1, 2, 3),), ((3,),)), (((3,),), ((1, 2, 3),)), (((3,),), ((3,),)), (((3, 4),), ((3,),)))
MICRO = ((((1,), (2,)), ((1,),)), (((1,),), ((1,), (1, 2), (3,))), (((1,),), ((1,),)), (((1,),), ((2,), ())))


def test_ranks_that_use_other_modules_or_more_micro_batches_train_as_one_process(tmp_path):
    programs = [
        Program(2, steps, place, rule, evaluates=evaluates)
        for steps, place, rule, evaluates in (
            (IMAGES, "nvme", CLIPPED, None), (IMAGES, "host", FREE, 0), (IMAGES, "nvme", FREE, None),
            (MICRO, "nvme", CLIPPED, 1), (MICRO, "nvme", FREE, None), (MICRO, "host", CLIPPED, None),
        )
    ]  # fmt: skip
    check(programs, tmp_path)


HARD = (
    Program(2, (((), ((1,),)), (((1, -2), (3,)), ()), (((-1,),), ((-2, 1),))), "tight", FREE),
    Program(2, ((((1, 2),), ((2, 1),)), (((2, 1, 2),), ((4, 4),))), "one version", CLIPPED),
    Program(2, ((((1, -2, 3),), ((-2,), ())),) * 2, "nvme", FREE, frozen=(2,)),
    Program(2, IMAGES, "nvme", FREE, unit_nbytes=6000),
    Program(2, MICRO, "tight", FREE, unit_nbytes=6000, frozen=(2,), exact=False),
)
FOUR = (
    Program(
        4, ((((1, 2),), ((2,),), ((3,), (1,)), ()), (((1,),), ((-1,),), ((2, 1),), ((1,),))), "nvme", FREE
    ),
    Program(4, ((((1,),), ((2,),), ((3,),), ((4,),)),) * 3, "host", CLIPPED),
)


def test_steps_without_a_batch_other_orders_and_parts_of_units_are_right(tmp_path):
    nothing = [Program(2, (((), ()),), "host", FREE), Program(2, (((), ((),)),), "host", FREE)]
    check([*HARD, *nothing], tmp_path)


def test_four_ranks_add_in_the_order_of_ranks(tmp_path):
    check([*FOUR], tmp_path)


def evaluate(counts: tuple[int, int]) -> list[Any]:
    """Evaluate so many batches on each rank, with averages and with weights, between and after steps."""
    rank, out = int(os.environ["RANK"]), list[Any]()
    with small_units(1), infinity.Init(recipe("fp32", ["memory.host=64MiB"])):
        model = parts(Program(2, ()))
    optimizer = infinity.AdamW(model, lr=1e-2, ema=0.5)
    program = Program(2, ((((1, 2, 3),), ((1, 2, 3),)),) * 3)
    for step in range(3):
        model(**program.batch(step, rank, 0)).loss.backward()
        optimizer.step()
        for context in (infinity.ema(model), torch.no_grad()):
            with context:
                losses = [float(model(torch.ones(2, WIDTH), path=(2, 3)).loss) for _ in range(counts[rank])]
            assert len({*losses}) == 1
            out.append(losses[0])
    optimizer.close()
    return out


def test_ranks_that_evaluate_more_batches_get_the_weights_of_their_place():
    for alike, longer in run_ranks(several, 2, (evaluate, (1, 1)), (evaluate, (1, 4))):
        assert alike == longer
        assert alike[-2] != alike[-1]


@st.composite
def programs(draw: st.DrawFn, world: int) -> Program:
    path = st.lists(st.sampled_from([*range(-PARTS, 0), *range(1, PARTS + 1)]), max_size=4).map(tuple)
    if exact := draw(st.booleans()):
        path = path.map(lambda each: tuple(sorted(each, key=abs)))
    micros = st.lists(path, max_size=3).map(tuple)
    steps = draw(st.lists(st.tuples(*[micros] * world), min_size=1, max_size=4))
    if draw(st.booleans()):  # steps that are known, before one that is not
        steps = steps[:1] * 3 + steps[1:]
    return Program(
        world, tuple(steps), draw(st.sampled_from(["host", "nvme", "tight", "one version"])),
        draw(st.sampled_from([FREE, CLIPPED])), draw(st.sampled_from([(), (1,), (2, 5)])),
        1 if exact else draw(st.sampled_from([1, 6000])), draw(st.sampled_from([None, 0, 1])), exact,
    )  # fmt: skip


@pytest.mark.parametrize("world", few((), (2, 4)))
@examples(8, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_random_programs_are_right_and_end(tmp_path_factory, world, data):
    drawn = data.draw(st.lists(programs(world), min_size=6, max_size=6))
    check(drawn, tmp_path_factory.mktemp("paths"))
