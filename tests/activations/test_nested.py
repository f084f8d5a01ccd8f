"""Whatever people do around a forward and a backward pass, the bits are those of plain PyTorch."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.activations.tensor_cache import planned, uniform
from infinity.core.plan import ActivationPlan, Load, Place
from tests.activations.stage import assert_same, kept, live_slots

WIDTH = 24
POLICIES = {
    "store": uniform(Place.NVME),
    "recompute": uniform(Place.KEEP, recompute=True),
    "both": uniform(Place.NVME, recompute=True),
    "recompute nothing": kept(Place.KEEP),
    "store what is not recomputed": kept(Place.NVME),
}


class Block(nn.Module):
    def __init__(self, kind: str = "", dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind:
            return x + checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(torch.relu(self.first(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList([Block(**options) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))


def state_of(model: nn.Module) -> list[Tensor | None]:
    return [*[p.grad for p in model.parameters()], *model.buffers()]


@pytest.fixture(params=list(POLICIES))
def policy(request):
    return POLICIES[request.param]


def compare(stage, policy, model, step) -> None:
    """``step(model, forward)`` with and without the cache: gradients, buffers, and what it returns."""
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)

    def cached(*args, on=None):
        with stage.forward(on or ours, policy):
            value = (on or ours)(*args)
        stage.all_stored()
        return value

    torch.manual_seed(1)
    theirs = step(plain, lambda *args, on=None: (on or plain)(*args))
    torch.manual_seed(1)
    mine = step(ours, cached)
    assert_same(state_of(ours), state_of(plain))
    assert torch.equal(mine.detach(), theirs.detach())
    del mine
    stage.assert_empty()


@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_the_models_own_checkpointing(stage, policy, kind):
    def step(model, forward):
        loss = forward(batch(0).requires_grad_())
        loss.backward()
        return loss

    compare(stage, policy, Model(kind=kind, dropout=0.1), step)


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"norm": True}], ids=["dropout", "batch norm"])
def test_generators_and_running_statistics_are_as_without_recomputation(stage, policy, options):
    def step(model, forward):
        for seed in range(3):
            loss = forward(batch(seed))
            loss.backward()
        return torch.rand(3) + loss.detach()

    compare(stage, policy, Model(**options), step)


def test_interleaved_passes(stage, policy):
    def step(model, forward):
        first, second, third = forward(batch(0)), forward(batch(1)), forward(batch(2))
        second.backward()
        first.backward()
        return third

    compare(stage, policy, Model(dropout=0.1), step)


def test_a_pass_is_loaded_as_it_was_stored_whatever_is_planned_since(stage):
    """Its loads are those of its own policy: none is left to be asked for at the last moment."""
    model = Model()
    with stage.forward(model, uniform(Place.NVME)) as record:
        first = model(batch(0))
    keys = list(record.packed)
    begins = ActivationPlan("plan", dict.fromkeys(keys, Place.NVME), tuple(Load(None, key) for key in keys))
    with stage.forward(model, planned(begins)):
        second = model(batch(1))
    with stage.forward(model, planned(ActivationPlan("keep"))):
        third = model(batch(2))
    stage.all_stored()
    second.backward()
    assert stage.cache.stats.on_demand == 0
    (first + third).backward()
    assert stage.cache.stats.nbytes_loaded > 0
    del first, second, third, record
    stage.assert_empty()


def test_a_graph_that_is_kept_is_read_again(stage, policy):
    def step(model, forward):
        loss = forward(batch(0))
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(stage, policy, Model(), step)


def test_a_gradient_of_gradients(stage):
    def step(model, forward):
        x = batch(0).requires_grad_()
        loss = forward(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        stage.all_stored()
        (loss + grad.square().sum()).backward()
        return grad

    compare(stage, POLICIES["store"], Model(), step)


def test_a_gradient_penalty_inside_the_forward(stage):
    class Penalised(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            loss = super().forward(x)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + grad.square().sum()

    def step(model, forward):
        loss = forward(batch(0))
        loss.backward()
        return loss

    compare(stage, POLICIES["store"], Penalised(), step)


def test_a_model_that_is_called_twice_in_one_loss_and_evaluated_in_between(stage, policy):
    def step(model, forward):
        left = forward(batch(0))
        with torch.no_grad():
            seen = forward(batch(5)) + model.eval()(batch(6))
        model.train()
        right = forward(batch(1))
        (left * right + left).backward()
        return seen + right

    compare(stage, policy, Model(), step)


def test_autocast(stage, policy):
    def step(model, forward):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(batch(0))
        loss.backward()
        return loss

    compare(stage, policy, Model(), step)


class Cubed(torch.autograd.Function):
    """Saves an input, an output and something in between; one output has no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor):
        square, sign = x * x, x.sign()
        out = square * x * factor
        ctx.save_for_backward(x, square, out, factor)
        ctx.mark_non_differentiable(sign)
        return out, sign

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        x, square, out, factor = ctx.saved_tensors
        return 3 * grad * square * factor + 0 * x, (grad * out / factor).sum_to_size(factor.shape)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.factor = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, sign = Cubed.apply(layer(x), self.factor)
            x = (x * sign).tanh()
        return x.sum()


def test_custom_autograd_functions(stage, policy):
    def step(model, forward):
        loss = forward(batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(stage, policy, Custom(), step)


# --- steps that are left half-way ----------------------------------------------------------------


class Broken(Model):
    """Raises ``error`` after the second block, or in its backward."""

    def __init__(self, error: type[BaseException], where: str) -> None:
        super().__init__()
        self.error, self.where, self.broken = error, where, True

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and self.broken and self.where == "forward":
                raise self.error("broken")
            if number == 1 and self.broken:
                x.register_hook(self.hook)
        return x.square().mean()

    def hook(self, grad: Tensor) -> None:
        raise self.error("broken")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_is_left_half_way_leaves_nothing_and_can_be_repeated(stage, policy, where, error):
    model = Broken(error, where)
    forwards = [layer.forward for layer in model.layers]

    def broken_step():
        with stage.forward(model, policy):
            loss = model(batch(0))
        loss.backward()

    for _ in range(2):
        with pytest.raises(error, match="broken"):
            broken_step()
        model.zero_grad()
    assert [layer.forward for layer in model.layers] == forwards
    assert not any("forward" in layer.__dict__ for layer in model.layers)
    stage.assert_empty()
    model.broken = False

    def step(model, forward):
        loss = forward(batch(0))
        loss.backward()
        return loss

    compare(stage, policy, model, step)


def test_a_graph_that_is_dropped_leaves_nothing(stage, policy):
    model = Model()
    for _ in range(3):
        with stage.forward(model, policy):
            model(batch(0))
    stage.assert_empty()


def test_steps_leave_no_slot_and_need_no_garbage_collector(stage, policy, request):
    model, before = Model(), live_slots()
    gc.disable()
    request.addfinalizer(gc.enable)
    for seed in range(6):
        with stage.forward(model, policy):
            loss = model(batch(seed))
        loss.backward()
        del loss
        stage.assert_empty()
    assert not any(ref() for ref in live_slots() - before)


def test_reading_a_graph_outside_a_backward_pass_is_no_pass(stage):
    with stage.forward():
        y = batch(0).requires_grad_().exp()
    stage.all_stored()
    assert torch.equal(y.grad_fn._saved_result, y)


# --- caches of keys and values -------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    from tests.helpers import models

    factory, make = models.build("llama", seed=4)
    return factory(), make(0)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_fresh_cache_of_keys_and_values(stage, policy, llama, use_cache):
    model, inputs = llama

    def step(model, forward):
        loss = forward(inputs["input_ids"], None, None, None, None, inputs["labels"], use_cache).loss
        loss.backward()
        return loss

    compare(stage, policy, model, step)


def test_a_prefix_in_a_cache_is_not_lost(stage, policy, llama):
    from transformers import DynamicCache

    model, inputs = llama
    model = copy.deepcopy(model)
    shape = (inputs["input_ids"].shape[0], 2, 3, 8)
    model.prefix = nn.ParameterList([torch.randn(shape) for _ in range(2 * len(model.model.layers))])

    def step(model, forward):
        past = DynamicCache(config=model.config)
        for layer in range(len(model.model.layers)):
            past.update(model.prefix[2 * layer], model.prefix[2 * layer + 1], layer)
        loss = forward(inputs["input_ids"], None, None, past, None, inputs["labels"]).loss
        loss.backward()
        return loss

    compare(stage, policy, model, step)
