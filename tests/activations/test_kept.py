"""Operators of recomputed blocks whose outputs stay: plain PyTorch's bits, and nothing that is stale."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import infinity
from infinity.activations import tensor_cache
from infinity.activations.controller import METERED
from infinity.activations.profiler import MemoryMeter, Profiler
from infinity.activations.recompute import KeptOperators, KeptOutputs
from infinity.activations.tensor_cache import ActivationPolicy, uniform
from infinity.core.plan import ActivationPlan, Hardware, Place
from infinity.engine import runtime as runtime_module
from infinity.planner import lifetimes, search
from infinity.recipes.models import GPT, GPTConfig
from tests.activations.stage import Stage, assert_same, kept
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, assert_bitwise, build, optimizer_for, reference, streaming

WIDTH, MOST = 32, 1 << 40
Inner = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner, self.runs = inner, 0
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.inner(self, x).tanh()


class Model(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([Block(inner) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def keeps(**nbytes: int) -> ActivationPolicy:
    """Recompute both blocks, and keep the first operators of these names, with so many bytes."""
    names = {(f"aten.{name}.default", 0): size for name, size in nbytes.items()}
    operators = {region: KeptOperators(names) for region in (1, 3)}
    return replace(uniform(Place.KEEP, recompute=True), kept=operators)


def lookups(stage: Stage, inner: Inner, policy: ActivationPolicy, monkeypatch, passes: int = 1) -> list[bool]:
    """Whether each operator that was looked for was found, in passes that have plain PyTorch's gradients."""
    ours, theirs = Model(inner), Model(inner)
    found: list[bool] = []
    find = KeptOutputs.find

    def noted(self: KeptOutputs, key: tuple[str, int], form: object) -> object:
        made = find(self, key, form)
        found.append(made is not None)
        return made

    monkeypatch.setattr(KeptOutputs, "find", noted)
    for run in range(passes):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(run))
        torch.manual_seed(run)
        theirs(x).backward()
        after = torch.get_rng_state()
        torch.manual_seed(run)
        with stage.forward(ours, policy):
            loss = ours(x)
        loss.backward()
        del loss
        assert torch.equal(torch.get_rng_state(), after)
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
        stage.assert_empty()
    return found


def product(block: Block, x: Tensor) -> Tensor:
    return x @ block.weight


def test_what_stays_does_not_run_again(stage, monkeypatch):
    assert lookups(stage, product, keeps(mm=16 * WIDTH * 4), monkeypatch, 2) == [True] * 4


def test_an_operator_that_made_more_than_was_planned_runs_again_with_all_of_its_block(stage, monkeypatch):
    def twice(block, x):
        return (x @ block.weight).sigmoid() @ block.weight

    assert lookups(stage, twice, keeps(sigmoid=MOST, mm=16 * WIDTH * 4 - 1), monkeypatch) == [False] * 4


def by_count(made):
    made.view(-1)[::2].mul_(2)


def uncounted(made):
    made.data.add_(1.0)


def past_torch(made):
    made.detach().numpy()[:, 0] += 1


@pytest.mark.parametrize("write", [by_count, uncounted, past_torch])
def test_what_is_written_later_is_a_copy_of_what_stays(stage, monkeypatch, write):
    def written(block, x):
        made = x.view(2, 8, WIDTH) @ block.weight  # an alias of mm's output whose writes it does not count
        wave = (made * 2).sin()
        write(made)
        return (made + wave).view(16, WIDTH)

    assert lookups(stage, written, keeps(mm=MOST), monkeypatch, 2) == [True] * 4


def test_what_a_block_returns_may_be_written_by_its_caller(stage, monkeypatch):
    def returned(block, x):
        made = x.view(2, 8, WIDTH) @ block.weight
        return made, (made * 2).sin()

    def forward(model, x):
        for layer in model.layers:
            made, wave = layer(x)
            x = (made.add_(1.0) + wave).view(16, WIDTH)
        return x.square().sum()

    monkeypatch.setattr(Block, "forward", lambda self, x: self.inner(self, x))
    monkeypatch.setattr(Model, "forward", forward)
    assert lookups(stage, returned, keeps(mm=MOST), monkeypatch) == [True] * 2


@pytest.mark.parametrize("place", [Place.KEEP, Place.NVME])
def test_a_graph_that_is_read_twice_is_right_both_times_though_recomputation_writes(
    stage, monkeypatch, place
):
    def written(block, x):
        made = x.view(2, 8, WIDTH) @ block.weight
        wave = (made * 2).sin()
        made.data.add_(1.0)
        return (made + wave).view(16, WIDTH)

    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 1)
    model, x, twice = Model(written), torch.randn(16, WIDTH), []
    policy = replace(keeps(mm=MOST), place=lambda key: place)
    for stays in (False, True):
        with stage.forward(model, policy) if stays else nullcontext():
            loss = model(x)
        for again in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=again)
            twice.append([p.grad for p in model.parameters()])
    for grads in twice[1:]:
        assert_same(grads, twice[0])
    assert [operators.used for operators in policy.kept.values()] == [2, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_arguments_without_strides_of_their_own_are_no_error(stage, monkeypatch, kind):
    def inner(block, x):
        if kind == "sparse":
            return torch.mm(torch.eye(16).to_sparse(), x @ block.weight)
        nested = torch.nested.nested_tensor([x[:5].detach(), x[5:].detach()])
        return x @ block.weight + nested.to_padded_tensor(0.0).sum()

    lookups(stage, inner, kept(Place.KEEP), monkeypatch)


def test_an_operator_before_which_others_ran_is_not_taken_for_the_one_that_was_kept(stage, monkeypatch):
    def other_path(block, x):
        if block.runs % 2:  # forward, not recomputation
            torch.mm(x.detach() + 1, block.weight.detach())
        return x @ block.weight

    found = lookups(stage, other_path, keeps(mm=MOST), monkeypatch)
    assert found == [False, False]


def test_a_cast_is_not_taken_for_that_of_another_tensor(stage, monkeypatch):
    def forward(model, x):
        x = torch.cat([x, x + 1]) / 8
        with torch.autocast("cpu", torch.bfloat16):
            for layer in model.layers:  # autocast remembers its weight's cast, but not in backward
                x = layer(x + (x @ layer.weight).mean())
        return x.float().square().sum()

    monkeypatch.setattr(Model, "forward", forward)
    policy = keeps(_to_copy=MOST, mm=MOST)
    assert any(lookups(stage, product, policy, monkeypatch, 2))


def test_what_has_gaps_is_compared_with_what_it_was(stage, monkeypatch):
    with torch.library._scoped_library("infinity_test", "DEF") as library:
        library.define("every_other(Tensor x) -> Tensor")
        library.impl("every_other", lambda x: torch.stack([x, x], -1)[..., 0], "CPU")

        def written(block, x):
            made = torch.ops.infinity_test.every_other((x * 2).detach())
            wave = made.sin()
            made.detach().numpy()[8:] += 1  # beyond the first half of its storage
            return (x @ block.weight) * (made + wave)

        names = {("infinity_test.every_other.default", 0): MOST}
        policy = replace(keeps(), kept={region: KeptOperators(names) for region in (1, 3)})
        assert not any(lookups(stage, written, policy, monkeypatch, 2))


def test_an_operator_that_draws_is_made_again_though_it_does_not_say_so(stage, monkeypatch):
    with torch.library._scoped_library("infinity_test", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor")
        library.impl("noise", lambda x: torch.rand(x.shape), "CPU")

        def noisy(block, x):
            noise = torch.ops.infinity_test.noise(x.detach())
            return torch.dropout(x @ block.weight, 0.5, train=True) * noise

        names = {("infinity_test.noise.default", 0): MOST}
        policy = replace(keeps(), kept={region: KeptOperators(names) for region in (1, 3)})
        assert not any(lookups(stage, noisy, policy, monkeypatch))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("place", [Place.KEEP, Place.NVME])
def test_attention_stays_where_it_drops_nothing(stage, monkeypatch, dropout, place):
    def attention(block, x):
        q, k, v = (
            part.view(1, 4, 4, WIDTH) for part in (x, x @ block.weight, torch.dropout(x, 0.1, train=True))
        )
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).view(16, WIDTH)

    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 1)
    assert any(lookups(stage, attention, kept(place), monkeypatch))


def test_a_block_that_keeps_nothing_is_not_watched(stage):
    modes = []

    def look(block, x):
        modes.append(len(_get_current_dispatch_mode_stack()))
        return x @ block.weight

    policy = keeps(mm=MOST)
    del policy.kept[1]
    model = Model(look)
    with stage.forward(model, policy):
        loss = model(torch.randn(4, WIDTH))
    loss.backward()
    assert modes == [0, 1, 1, 0]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_function_inside_runs_as_compiled(stage, monkeypatch):
    def doubled(module, inputs):  # a compiler whose code is not what it was given
        return lambda *args: [each * 2 for each in module(*args)]

    def made(x, weight):
        return (x @ weight).sin()

    compiled = torch.compile(made, backend=doubled)
    x = torch.randn(4, WIDTH)
    assert torch.equal(compiled(x, torch.eye(WIDTH)), x.sin() * 2)
    lookups(stage, lambda block, x: compiled(x, block.weight), keeps(mm=MOST), monkeypatch, 2)


def factory():
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=96, seq_len=32, n_layers=6, d_model=64, n_heads=2)).train()


def batch(step, rank=0, world=1):
    tokens = torch.randint(96, (8, 33), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


@pytest.mark.thorough
def test_a_plan_without_a_drive_keeps_operators_and_its_peak_and_changes_no_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 8 * 2**10)
    monkeypatch.setattr(runtime_module, "measure_hardware", lambda *args: Hardware(0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(lifetimes, "WATCHED_S", 0.0)  # these operators take no longer than that

    def half_way(plans: search.PlanSearch) -> ActivationPlan:
        """Half of what keeping everything takes beyond the least."""
        made = plans.fastest((plans.smallest_budget() + plans.keep.outcome.peak_nbytes) // 2)
        return replace(made, capacity_nbytes=None)

    monkeypatch.setattr(search.PlanSearch, "without_slowdown", half_way)
    trained, count = Trained(), METERED + 2
    model = build(factory, "bf16", streaming(tmp_path, "memory.activations=plan", "memory.codec=never"))
    optimizer = optimizer_for(model, Rule())
    try:
        for step in range(count):
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            trained.losses.append(loss.item())
            trained.norms.append(optimizer.grad_norm)
        trained.weights = infinity.state_dict(model)
        activations = optimizer.runtime.activations
    finally:
        optimizer.close()
    plan = activations.planning.plan
    assert plan.recomputed
    assert plan.kept
    operators = activations.cache.planned.kept
    assert sum(each.used for each in operators.values()) == len(plan.kept) * (count - METERED + 1)
    # Which operators stay depends on measured times; of some choices the peak is a little above its plan.
    assert activations.metered_nbytes <= 1.03 * activations.planning.predicted.peak_nbytes
    # Where operators stay, what a block saves and its copies count together for longer than they are there.
    assert activations.metered_nbytes >= 0.9 * activations.planning.predicted.peak_nbytes
    assert_bitwise(trained, reference(factory, batch, steps=count))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("mode", [Profiler, MemoryMeter])
def test_what_is_compiled_is_compiled_again_after_it_was_measured(mode):
    compiled = torch.compile(lambda x: x.sin(), backend=lambda module, inputs: lambda x: (x.sin() * 2,))
    x = torch.randn(4)
    for _ in range(2):
        assert torch.equal(compiled(x), x.sin() * 2)
        with mode():
            assert torch.equal(compiled(x), x.sin())
    assert torch.equal(compiled(x), x.sin() * 2)


@pytest.mark.parametrize("what", ["block", "part", "nothing"])
def test_a_block_with_compiled_code_runs_again_as_a_whole(stage, monkeypatch, what):
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    model = Model(lambda block, x: block.part(x))
    for block in model.layers:
        block.part = Inner(WIDTH, WIDTH)
        made = {"block": block, "part": block.part}.get(what)
        if made is not None:
            made._compiled_call_impl = made._call_impl
    policy = kept(Place.KEEP)
    operators = [policy.kept.get(region) for region in (1, 3)]
    monkeypatch.setattr(policy.kept, "get", lambda region: operators[region // 2])
    stage.cache.profiler = profiler = Profiler(model.parameters())
    with profiler, stage.forward(model, policy):
        loss = model(torch.randn(4, WIDTH))
        loss.backward()
    profile = profiler.finish()
    stage.cache.profiler = None
    del loss
    stays = [o.may_stay for o in profile.operators if o.name == "aten.addmm.default" and o.region > 0]
    assert stays == [what == "nothing"] * 2
    assert [each.used > 0 for each in operators] == [what == "nothing"] * 2
