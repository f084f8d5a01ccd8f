"""Graphs of every shape: what runs twice, never, in another order, or raises on the way."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import StateError
from infinity.engine.runtime import runtime_of
from tests.helpers import training
from tests.helpers.cases import few
from tests.helpers.lockstep import BOTH, NVME, WIDTH, Block, Toy, batch, lockstep, seeded, toy
from tests.helpers.lockstep import place as lockstep_place
from tests.helpers.reference import Reference, Rule

CLIP = pytest.mark.parametrize("clip", [1.0, None])


class Twice(Toy):
    """Every block runs twice, and the last projection is used by hand as well."""

    def hidden(self, x):
        x = super().hidden(x)
        for block in self.blocks:
            x = block(x)
        return x + torch.tanh(x @ self.last.weight.t()) @ self.last.weight


class Unused(Toy):
    """Holds parameters that no forward reads: a whole block, and one beside used ones."""

    def __init__(self):
        super().__init__()
        self.spare = Block()
        self.never = nn.Parameter(torch.ones(WIDTH))


class Dropping(Toy):
    """Blocks that come and go: which ones depends on the batch."""

    def hidden(self, x):
        skipped = int(x.abs().sum() * 1000) % len(self.blocks)
        x = self.first(x.to(self.gain.dtype)) * self.gain + self.shift
        order = [b for i, b in enumerate(self.blocks) if i != skipped]
        for block in order if skipped else reversed(order):
            x = block(x)
        return x + self.offset.to(x.dtype)


class Shared(nn.Module):
    """Modules that share a module, and modules that share a weight, tied inside __init__."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.block = Block()
        self.again = self.block
        self.back = nn.Linear(6, WIDTH)
        self.back.weight = self.first.weight
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        x = x.to(self.first.weight.dtype)
        h = self.again(self.block(self.first(x)) + self.back(x))
        return SimpleNamespace(loss=nn.functional.mse_loss(self.last(h).float(), y))


class Recurrent(Toy):
    """Every block runs twice, and is recomputed in backward."""

    reentrant = False

    def hidden(self, x):
        x = self.first(x.to(self.gain.dtype)) * self.gain + self.shift
        for block in [*self.blocks, *self.blocks]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x + self.offset.to(x.dtype)


class Encoder(nn.Module):
    """torch's own encoder: layers deep-copied inside construction, attention with fused weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=WIDTH, vdim=WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        h = self.encoder(self.first(x.to(self.first.weight.dtype))[None])
        h = h + self.attend(h, h, h)[0]
        return SimpleNamespace(loss=nn.functional.mse_loss(self.last(h[0]).float(), y))


class Lists(nn.Module):
    """Parameters in lists and dictionaries, and embeddings with a padding row."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ParameterList([nn.Parameter(torch.randn(6, WIDTH) / 3) for _ in range(3)])
        self.more = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": torch.randn(WIDTH)})
        self.rows = nn.Embedding(7, WIDTH, padding_idx=0)
        self.last = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, y):
        h = sum(x.to(way.dtype) @ way for way in self.ways) * self.more["a"] + self.more["b"]
        h = h + self.rows(x.abs().sum(1).long() % 7)
        return SimpleNamespace(loss=nn.functional.mse_loss(self.last(h).float(), y))


def _inside():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x, y):
            return SimpleNamespace(
                loss=nn.functional.mse_loss(self.inner(x.to(self.inner.weight.dtype)).float(), y)
            )

    return Inner()


GRAPHS = {
    "parameters-used-twice": Twice, "unused-parameters": Unused, "a-graph-that-changes": Dropping,
    "shared-modules-and-weights": Shared, "transformer-encoder": Encoder, "lists-of-parameters": Lists,
    "a-class-defined-inside-init": _inside,
}  # fmt: skip


#: Each graph where weights come and go, some in memory, too.
FEW = (
    *((name, "nvme", (1.0, None)[number % 2]) for number, name in enumerate(GRAPHS)),
    ("unused-parameters", "host", 1.0),
    ("shared-modules-and-weights", "host", None),
)


@pytest.mark.parametrize(
    ("name", "place", "clip"), few(FEW, itertools.product(GRAPHS, ("host", "nvme"), (1.0, None)))
)
def test_graphs_train_bitwise_as_in_the_plain_loop(tmp_path, name, place, clip):
    with lockstep(place, tmp_path, seeded(GRAPHS[name]), rule=Rule(max_grad_norm=clip)) as pair:
        for step in range(5):
            torch.manual_seed(step)  # dropout
            mine = pair.backward(step)
            pair.optimizer.step()
            torch.manual_seed(step)
            pair.number = step
            pair.follow(mine, number=step or None)
        pair.check()


@BOTH
@CLIP
def test_two_forwards_before_one_backward(tmp_path, place, clip):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=clip)) as pair:
        pair.step()
        (pair.model(**batch(10)).loss + pair.model(**batch(11)).loss).backward()
        pair.optimizer.step()
        (pair.plain.model(**batch(10)).loss + pair.plain.model(**batch(11)).loss).backward()
        pair.plain.step([])
        pair.step(2)
        pair.check()


@NVME
def test_forwards_first_and_backwards_after(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        losses = [pair.model(**batch(10)).loss, pair.model(**batch(11)).loss]
        with infinity.no_sync(pair.model):
            losses[0].backward()
        losses[1].backward()
        pair.optimizer.step()
        pair.plain.step([batch(10), batch(11)])
        pair.step(2)
        pair.check()


@NVME
def test_a_graph_kept_for_a_second_backward(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        loss = pair.model(**batch(10)).loss
        with infinity.no_sync(pair.model):
            loss.backward(retain_graph=True)
        loss.backward()
        pair.optimizer.step()
        plain = pair.plain.model(**batch(10)).loss
        plain.backward(retain_graph=True)
        plain.backward()
        pair.plain.step([])
        pair.step(2)
        pair.check()


@NVME
def test_backward_of_a_graph_from_before_the_step_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        old = pair.model(**batch(9)).loss
        pair.step()
        # Where weights stay in their place autograd refuses, as in plain PyTorch.
        with pytest.raises(RuntimeError, match=r"updated after the forward|modified by an inplace operation"):
            old.backward()
        pair.step(2)
        pair.check()


@NVME
def test_autograd_grad_with_respect_to_inputs(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        grads = []
        for model in (pair.model, pair.plain.model):
            x = batch(10)["x"].requires_grad_()
            grads.append(torch.autograd.grad(model(x, batch(10)["y"]).loss, x)[0])
        assert torch.equal(*grads)
        assert grads[0].isfinite().all()
        pair.step(2)
        pair.check()


@NVME
def test_autograd_grad_with_respect_to_parameters(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        grads = [
            torch.autograd.grad(model(**batch(10)).loss, list(model.parameters()))
            for model in (pair.model, pair.plain.model)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        pair.step(2)
        pair.check()


@BOTH
def test_autograd_grad_between_backward_and_step(tmp_path, place):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=None)) as pair:
        pair.step()
        loss = pair.backward(2)
        x = batch(10)["x"].requires_grad_()
        mine = torch.autograd.grad(pair.model(x, batch(10)["y"]).loss, x)[0]
        plain = torch.autograd.grad(pair.plain.model(x, batch(10)["y"]).loss, x)[0]
        assert torch.equal(mine, plain)
        pair.optimizer.step()
        pair.follow(loss, number=2)
        pair.check()


@NVME
@CLIP
def test_autograd_grad_with_respect_to_parameters_leaves_the_gradients_that_wait_for_step(
    tmp_path, place, clip
):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=clip)) as pair:
        for number in (0, 10):
            slopes = []
            for model in (pair.model, pair.plain.model):
                last = list(model.last.parameters())
                with infinity.no_sync(pair.model):
                    model(**batch(number)).loss.backward()
                loss = model(**batch(number + 1)).loss
                slopes += torch.autograd.grad(loss, last, retain_graph=True)
                loss.backward()
                slopes += torch.autograd.grad(model(**batch(number + 2)).loss, last)
            assert all(torch.equal(a, b) for a, b in zip(slopes[:4], slopes[4:], strict=True))
            pair.optimizer.step()
            pair.plain.finish([])
        pair.check()


@NVME
def test_an_autograd_grad_that_raises_brings_back_no_gradient_that_is_dropped(tmp_path, place):
    with lockstep(place, tmp_path, seeded(Failing)) as pair:
        last = [*pair.model.last.parameters()]
        for then in (pair.optimizer.synchronize, pair.optimizer.zero_grad):
            with infinity.no_sync(pair.model):
                pair.model(**batch(0)).loss.backward()
            pair.model.where = "backward"
            with pytest.raises(ArithmeticError, match="backward"):
                torch.autograd.grad(pair.model(**batch(1)).loss, [*last, *pair.model.first.parameters()])
            pair.model.where = ""
            then()
            with torch.no_grad():
                pair.model(**batch(2))  # what the pass left behind is seen to
            assert all((param.grad is None) is (then == pair.optimizer.zero_grad) for param in last)
        pair.step(2)
        pair.check()


@NVME
@CLIP
def test_a_gradient_penalty_differentiates_twice(tmp_path, place, clip):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=clip)) as pair:
        for number in range(3):
            for model in (pair.model, pair.plain.model):
                x = batch(number)["x"].requires_grad_()
                loss = model(x, batch(number)["y"]).loss
                [slope] = torch.autograd.grad(loss, x, create_graph=True)
                (loss + slope.square().sum()).backward()
            pair.optimizer.step()
            pair.plain.step([])
        pair.check()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("backward fails")


class Failing(Toy):
    """Fails where it is told to."""

    where = ""

    def hidden(self, x):
        x = self.first(x.to(self.gain.dtype)) * self.gain + self.shift
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.where == "backward" and i == 1:
                x = _Fails.apply(x)
            if self.where == "forward" and i == 1:
                raise ArithmeticError("forward fails")
        return x + self.offset.to(x.dtype)


@pytest.mark.parametrize(
    ("place", "clip", "where", "then"),
    few(
        (
            ("nvme", 1.0, "forward", "nothing"),
            ("nvme", None, "forward", "step"),
            ("host", None, "forward", "zero_grad"),
            ("nvme", None, "backward", "nothing"),
            ("host", 1.0, "backward", "step"),
            ("nvme", 1.0, "backward", "zero_grad"),
            ("nvme", None, "backward", "zero_grad"),
        ),
        itertools.product(
            ("host", "nvme"), (1.0, None), ("forward", "backward"), ("nothing", "step", "zero_grad")
        ),
    ),
)
def test_a_pass_that_raises_leaves_nothing_behind(tmp_path, place, clip, where, then):
    with lockstep(place, tmp_path, seeded(Failing), rule=Rule(max_grad_norm=clip)) as pair:
        pair.step(2)
        pair.model.where = where
        with pytest.raises(ArithmeticError, match=where):
            pair.backward(50)
        pair.model.where = ""
        if then == "step" and where == "backward":
            with pytest.raises(StateError, match=r"step\(\): the last backward pass failed"):
                pair.optimizer.step()
        elif then != "nothing":
            getattr(pair.optimizer, then)()
        pair.step(2)
        pair.check()


@BOTH
@pytest.mark.parametrize("clip", few((None,), (None, 1.0)))
def test_calls_that_share_weights_are_recomputed_without_reentrance_or_refused(tmp_path, place, clip):
    """A reentrant recomputation has a backward pass of its own, after which its weights are complete."""
    with lockstep(place, tmp_path, seeded(Recurrent), rule=Rule(max_grad_norm=clip)) as pair:
        pair.step(2)
        pair.model.reentrant = True
        with pytest.raises(StateError, match=r"blocks\.2\..* got a gradient after .*use_reentrant=False"):
            pair.backward(50)
        pair.model.reentrant = False
        pair.step(2)
        pair.check()


@NVME
@pytest.mark.parametrize("then", few(("zero_grad",), ("nothing", "zero_grad")))
def test_a_backward_after_one_that_raised_is_the_step(tmp_path, place, then):
    with lockstep(place, tmp_path, seeded(Failing)) as pair:
        pair.step(2)
        pair.model.where = "backward"
        failing = pair.model(**batch(50)).loss
        pair.model.where = ""
        pair.number += 1
        loss = pair.model(**batch(pair.number)).loss
        with pytest.raises(ArithmeticError, match="backward"):
            failing.backward()
        if then == "zero_grad":
            pair.optimizer.zero_grad()
        loss.backward()
        pair.optimizer.step()
        pair.follow(loss.detach())
        pair.step(2)
        pair.check()


@NVME
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(tmp_path, place, mode):
    with lockstep(place, tmp_path, seeded(Encoder), rule=Rule(max_grad_norm=None)) as pair:
        for step in range(1, 4):
            torch.manual_seed(step)
            mine = pair.backward(step)
            for model in (pair.model, pair.plain.model):
                model.eval()
            with mode():  # also between backward and step
                assert torch.equal(pair.model(**batch(9)).loss, pair.plain.model(**batch(9)).loss)
            for model in (pair.model, pair.plain.model):
                model.train()
            pair.optimizer.step()
            torch.manual_seed(step)
            pair.follow(mine, number=step)
            with mode():
                assert pair.model(**batch(9)).loss.isfinite()
        pair.check()


@NVME
def test_evaluation_before_a_step_is_dropped_uses_committed_weights_and_leaves_them(tmp_path, place):
    """The unit that the evaluation uses first stays while it is updated, like others."""

    def evaluate():
        with torch.no_grad():
            assert torch.equal(pair.model(**batch(9)).loss, pair.plain.model(**batch(9)).loss)

    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=None)) as pair:
        pair.step()
        evaluate()
        pair.model(**batch(8)).loss.backward()
        evaluate()
        pair.optimizer.zero_grad()
        evaluate()
        pair.step(2)
        pair.check()


def end_by_ctrl_c(model, register, mode):
    """Call a model in which Ctrl-C comes where ``register`` puts a hook."""

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = register(interrupt)
    with pytest.raises(KeyboardInterrupt), mode():
        model(**batch(7))
    handle.remove()


@NVME
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_forward_that_ctrl_c_ends_leaves_nothing_behind(tmp_path, place, mode):
    """The cell of a notebook that is interrupted, and runs again."""
    with lockstep(place, tmp_path) as pair:
        pair.step(2)

        end_by_ctrl_c(pair.model, pair.model.blocks[1].register_forward_hook, mode)
        for step in range(3, 6):
            loss = pair.backward(step)
            repr(pair.model)  # asks for every bias
            pair.optimizer.step()
            pair.follow(loss, number=step)
            pair.check()


@NVME
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_calls_inside_one_that_ctrl_c_ended_keep_no_unit(tmp_path, place, mode):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)

        end_by_ctrl_c(pair.model, pair.model.blocks[1].up.register_forward_pre_hook, mode)
        with torch.no_grad():
            pair.model(**batch(8))
        assert not any(runtime_of(pair.model).executor().prefetcher.residents.pins.values())
        pair.step(2)
        pair.check()


@NVME
def test_backward_after_an_evaluation_that_ctrl_c_ended_belongs_to_the_training_pass(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        prefetcher, running = runtime_of(pair.model).executor().prefetcher, []

        loss = pair.model(**batch(3)).loss
        end_by_ctrl_c(pair.model, pair.model.blocks[1].register_forward_hook, torch.no_grad)
        pair.model.gain.register_hook(lambda grad: running.append(prefetcher.running))
        pair.optimizer.scale(loss).backward()
        assert running == [prefetcher.training]
        pair.optimizer.step()
        pair.follow(loss.detach(), number=3)
        pair.check()


@BOTH
def test_a_backward_that_ctrl_c_ends_leaves_no_gradient_behind(tmp_path, place):
    interrupts = []

    def interrupt(_):
        if interrupts:
            raise interrupts.pop()

    with lockstep(place, tmp_path) as pair:
        pair.model.last.weight.register_post_accumulate_grad_hook(interrupt)
        pair.step()
        interrupts.append(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.backward(7)
        pair.step(2)  # without zero_grad
        pair.check()


class Tail(Toy):
    """Backward comes to a parameter before it reads any weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> SimpleNamespace:
        out = self.last(self.hidden(x)) + self.tail
        return SimpleNamespace(loss=nn.functional.mse_loss(out.float(), y), out=out)


@BOTH
@pytest.mark.parametrize("interrupted", ["tail", "last.weight"])
def test_a_backward_that_ctrl_c_ends_can_be_run_again(tmp_path, place, interrupted):
    interrupts = [KeyboardInterrupt]

    def interrupt(_):
        if interrupts:
            raise interrupts.pop()

    with lockstep(place, tmp_path, seeded(Tail)) as pair:
        dict(pair.model.named_parameters())[interrupted].register_post_accumulate_grad_hook(interrupt)
        loss = pair.model(**batch(1)).loss
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.scale(loss).backward(retain_graph=True)
        pair.optimizer.scale(loss).backward()
        pair.optimizer.step()
        pair.follow(loss.detach(), number=1)
        pair.check()


@BOTH
def test_a_model_that_is_built_under_inference_mode_trains(tmp_path, place):
    def written() -> nn.Module:
        with torch.no_grad():
            model = toy()
            model.first.weight.mul_(0.5)
        return model

    def without_no_grad() -> nn.Module:  # inference mode has it
        model = toy()
        model.first.weight.mul_(0.5)
        return model

    with torch.inference_mode():
        model = training.build(without_no_grad, "bf16", lockstep_place(place, tmp_path))
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    plain = Reference(written(), torch.bfloat16, Rule())
    optimizer = training.optimizer_for(model, Rule())
    for step in range(3):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        assert torch.equal(loss.detach(), plain.step([batch(step)]).losses[0])
    optimizer.close()


@NVME
def test_submodules_can_be_called_alone(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(pair.model.blocks[1](x), pair.plain.model.blocks[1](x))
        for model in (pair.model, pair.plain.model):
            model.blocks[2](model.blocks[0](x)).square().mean().backward()
        pair.optimizer.step()
        pair.plain.step([])
        pair.step(2)
        pair.check()
