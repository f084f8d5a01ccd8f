"""Logits in slices: the losses and gradients of whole ones within rounding, and never another number."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.activations import logits
from infinity.activations.logits import LogitSlices, PendingLogits, find_head
from infinity.activations.profiler import MemoryMeter
from infinity.core.errors import StateError
from tests.helpers import zoo
from tests.helpers.models import HIDDEN

#: fp32: a sum over slices, and products of fewer rows, round differently.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class Head:
    """Counts the rows of each call of a model's head, and stands for the parts of a runtime."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[int] = []
        self.version = 0
        head = find_head(model)
        assert head is not None
        self._own, head.forward = head.forward, self._count
        self.slices = LogitSlices(lambda module: contextlib.nullcontext(), lambda module: self.version)
        self.slices.decide("slices", lambda: None)

    def _count(self, hidden: Tensor) -> Tensor:
        if self.slices.computing:
            self.rows.append(hidden.shape[:-1].numel())
        logits: Tensor = self._own(hidden)
        return logits


def outcome(model: nn.Module, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: tuple[Tensor, dict[str, Tensor]], plain: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=0)
    assert ours[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        torch.testing.assert_close(ours[1][name], grad, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    factory, batch = zoo.build(name, 0)
    return factory(), batch(0)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "t5", "bert", "qwen3", "gemma2", "phi", "gpt_neox", "mixtral"]
)
def test_the_loss_and_all_gradients_are_those_of_whole_logits_within_rounding(name: str) -> None:
    model, batch = built(name)
    plain = outcome(model, model(**batch).loss)
    head = Head(model)
    with head.slices.opened(model):
        loss = model(**batch).loss
    assert_close(outcome(model, loss), plain)
    rows = batch["labels"].numel()
    assert sum(head.rows) == 2 * rows  # and again in backward
    assert max(head.rows) == HIDDEN // 4 < rows


def test_slices_of_a_small_head_are_larger_than_what_a_heap_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "LEAST_SLICE_NBYTES", 36 * 2**20)
    assert logits.rows_of(torch.empty(2, 4096, 64), 32_000) * 32_000 * 4 > 2**25
    assert logits.rows_of(torch.empty(2, 4096, 4096), 128_256) == 1024


# --- what is done to logits --------------------------------------------------------------------------


class Tail(nn.Module):
    """A head and what a loss makes of its logits."""

    def __init__(self, loss: Any, tokens: int = 24, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(width, vocabulary)
        self.loss = loss
        self.hidden = nn.Parameter(torch.randn(2, tokens // 2, width))
        self.labels = torch.randint(vocabulary, (2, tokens // 2))
        self.labels[0, ::3] = -100

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self) -> Any:
        return self.loss(self.lm_head(self.hidden), self.labels)


def rows(logits: Tensor) -> Tensor:
    return logits.view(-1, logits.size(-1))


IN_SLICES = {
    "mean": lambda logits, labels: F.cross_entropy(rows(logits), labels.view(-1)),
    "sum": lambda logits, labels: F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
    ) / 7,
    "each": lambda logits, labels: (
        F.cross_entropy(rows(logits), labels.view(-1), reduction="none") * torch.arange(24)
    ).sum(),
    "another ignored": lambda logits, labels: F.cross_entropy(
        rows(logits), labels.view(-1).clamp(0), ignore_index=0
    ),
    "shifted": lambda logits, labels: F.cross_entropy(
        rows(logits[..., :-1, :].contiguous()), labels[:, 1:].reshape(-1)
    ),
    "scaled": lambda logits, labels: F.cross_entropy(
        rows(3 * torch.tanh(logits / 3.5) * 2).to(torch.float32), labels.view(-1)
    ),
    "a module's": lambda logits, labels: nn.CrossEntropyLoss()(
        logits.reshape((24, 50)).to(logits.device), labels.view(-1)
    ),
    "nothing counts": lambda logits, labels: F.cross_entropy(
        rows(logits), torch.full_like(labels, -100).view(-1), reduction="sum"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_SLICES)
def test_what_models_do_before_their_loss_is_done_to_slices(name: str) -> None:
    model = Tail(IN_SLICES[name])
    plain = outcome(model, model())
    head = Head(model)
    with head.slices.opened(model):
        loss = model()
    assert_close(outcome(model, loss), plain)
    assert max(head.rows) == 4


def blanked(logits: Tensor, labels: Tensor) -> Tensor:
    """Writes to logits in place, after a cast that must not see it."""
    cast, flat = logits.double(), rows(logits)
    logits[:, :, 7] = -1e4
    return F.cross_entropy(flat, labels.view(-1)) + cast[..., 7].sum() + logits[..., 7].mean()


WHOLE = {
    "smoothed": lambda logits, labels: F.cross_entropy(rows(logits), labels.view(-1), label_smoothing=0.1),
    "weighed": lambda logits, labels: F.cross_entropy(
        rows(logits), labels.view(-1), weight=torch.arange(50.0)
    ),
    "images": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "soft targets": lambda logits, labels: F.cross_entropy(rows(logits), torch.full((24, 50), 0.02)),
    "a norm": lambda logits, labels: F.cross_entropy(rows(logits), labels.view(-1)) + logits.square().mean(),
    "one class": lambda logits, labels: F.cross_entropy(logits[..., 1:].flatten(0, 1), labels.view(-1) - 1),
    "one class, and dots": lambda logits, labels: F.cross_entropy(
        logits[:, :, 1:, ...].flatten(0, 1), labels.view(-1) - 1
    ),
    "written": blanked,
    "another dimension": lambda logits, labels: F.cross_entropy(
        logits.view(-1, 25), labels.view(-1).clamp(0, 24).repeat_interleave(2)
    ),
    "double": lambda logits, labels: logits.softmax(-1)[..., 3].sum(),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_what_a_hook_does_to_logits_is_done_once(kind: str) -> None:
    model = Tail(IN_SLICES["mean"])

    def doubled(module: nn.Module, args: Any, *output: Tensor) -> Any:
        return 2 * output[0] if output else (2 * args[0],)

    getattr(model.lm_head, f"register_{kind}_hook")(doubled)
    plain = outcome(model, model())
    with Head(model).slices.opened(model):
        loss = model()
    assert_close(outcome(model, loss), plain)


@pytest.mark.parametrize("name", WHOLE)
def test_whatever_else_asks_for_logits_gets_them_whole_and_to_the_bit(name: str) -> None:
    model = Tail(WHOLE[name])
    if name.startswith("one class"):
        model.labels.clamp_(1)
    plain = outcome(model, model())
    head = Head(model)
    with head.slices.opened(model):
        loss = model()
    ours = outcome(model, loss)
    if name == "a norm":  # whose other half came first, in slices
        assert_close(ours, plain)
        return
    assert head.rows == [24]
    assert torch.equal(ours[0], plain[0])
    assert all(torch.equal(ours[1][name], grad) for name, grad in plain[1].items())


def test_bf16_logits_round_a_row_as_whole_ones_do() -> None:
    model = Tail(lambda logits, labels: F.cross_entropy(rows(logits), labels.view(-1), reduction="none"))
    model.bfloat16()
    plain, head = model(), Head(model)
    with head.slices.opened(model):
        torch.testing.assert_close(model(), plain, rtol=2**-7, atol=0)
    model.loss = IN_SLICES["mean"]
    with head.slices.opened(model):
        loss = model()
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(
        loss.float(), plain.float().sum() / (model.labels != -100).sum(), rtol=2**-7, atol=0
    )


def test_autocast_is_that_of_the_call() -> None:
    model = Tail(lambda logits, labels: logits)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model()
        head = Head(model)
        with head.slices.opened(model):
            logits = model()
    assert logits.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(logits + 0, plain)


def test_logits_are_read_after_the_forward_as_those_that_were_computed() -> None:
    model = Tail(lambda logits, labels: logits)
    plain, head = model(), Head(model)
    with head.slices.opened(model):
        logits, other = model(), model()
    assert type(logits) is PendingLogits
    assert logits.shape == plain.shape
    assert logits.requires_grad
    assert not head.rows
    with torch.no_grad():
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
    (ours,), (wanted,) = (torch.autograd.grad(each.square().sum(), model.hidden) for each in (logits, plain))
    assert torch.equal(ours, wanted)
    head.version = 1  # the weights were updated
    assert torch.equal(logits + 0, plain)
    with pytest.raises(StateError, match=r"updated\. Read them, and call backward\(\), before step\(\)"):
        other.sum()


def test_what_inference_mode_reads_first_can_be_trained_on() -> None:
    model = Tail(lambda logits, labels: logits)
    plain, head = model(), Head(model)
    labels = model.labels.view(-1)
    with head.slices.opened(model):
        logits, other = model(), model()
    with torch.inference_mode():
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        loss = F.cross_entropy(other[:, :-1].reshape(-1, 50), model.labels[:, 1:].reshape(-1))
    assert loss.item() == pytest.approx(IN_SLICES["shifted"](plain, model.labels).item())
    assert_close(
        outcome(model, F.cross_entropy(rows(logits), labels)),
        outcome(model, F.cross_entropy(rows(plain), labels)),
    )


def test_a_backward_after_the_update_is_refused() -> None:
    model = Tail(IN_SLICES["mean"])
    head = Head(model)
    with head.slices.opened(model):
        loss = model()
    head.version = 1
    with pytest.raises(StateError, match="updated"):
        loss.backward()


def test_a_hidden_state_that_was_written_is_an_error() -> None:
    model = Tail(lambda logits, labels: logits)
    hidden = model.hidden * 1
    with Head(model).slices.opened(model):
        logits = model.lm_head(hidden)
    hidden.zero_()
    with pytest.raises(StateError, match="modified in place"):
        logits.sum()


@pytest.mark.parametrize("ask", ["retain_grad", "register_hook"])
def test_a_gradient_that_is_asked_of_logits_is_there_or_refused(ask: str) -> None:
    model = Tail(lambda logits, labels: logits)
    plain, head, asked = model(), Head(model), []
    given = [asked.append] * (ask == "register_hook")
    with head.slices.opened(model):
        early, late = model(), model()
    for each in (plain, early):
        getattr(each, ask)(*given)
        F.cross_entropy(rows(each), model.labels.view(-1)).backward()
        if ask == "retain_grad":
            asked.append(each.grad)
    assert torch.equal(*asked)
    with torch.no_grad():
        F.cross_entropy(rows(late), model.labels.view(-1))  # nothing is trained on it
    late.float().register_hook(asked.append)
    with head.slices.opened(model):
        late = model()
    loss = F.cross_entropy(rows(late), model.labels.view(-1))
    for each in (late, late.float()):
        with pytest.raises(StateError, match=rf"{ask} .*in slices.*memory\.logits=whole"):
            getattr(each, ask)(*given)
        with pytest.raises(StateError, match=r"grad .*in slices.*memory\.logits=whole.*retain_grad"):
            torch.autograd.grad(loss, each, materialize_grads=True)
        with pytest.raises(StateError, match=r"backward .*in slices.*memory\.logits=whole.*retain_grad"):
            loss.backward(inputs=[each])
    with head.slices.opened(model):
        late = model()
    late.sum().backward(inputs=[late])  # it was read, so it is whole
    assert torch.equal(late.grad, torch.ones(late.shape))


@pytest.mark.slow
def test_a_compiled_loss_is_computed_in_slices() -> None:
    model = Tail(lambda logits, labels: logits)
    head, loss = Head(model), lambda logits: IN_SLICES["mean"](logits, model.labels)
    with head.slices.opened(model):
        logits, other = model(), model()
    plain = outcome(model, loss(other))
    rows, ours = [*head.rows], outcome(model, torch.compile(loss, backend="eager")(logits))
    assert torch.equal(ours[0], plain[0])
    assert all(torch.equal(ours[1][name], grad) for name, grad in plain[1].items())
    assert head.rows == 2 * rows


class Squares(torch.autograd.Function):
    """A function of autograd's own, which no subclass of Tensor is asked about."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)


def test_a_function_that_would_lose_the_gradient_is_refused() -> None:
    model = Tail(lambda logits, labels: Squares.apply(logits))
    with Head(model).slices.opened(model):
        loss = model()
    with pytest.raises(StateError, match=r"memory\.logits=whole"):
        loss.backward()


# --- which logits ------------------------------------------------------------------------------------


def pending(model: nn.Module, slices: LogitSlices) -> bool:
    with slices.opened(model):
        return type(model.lm_head(model.hidden)) is PendingLogits


def test_logits_are_pending_in_training_or_where_they_do_not_fit() -> None:
    model = Tail(None)
    slices = Head(model).slices
    assert pending(model, slices)
    with torch.no_grad():
        assert pending(model, slices)  # 24 rows are several slices
        model.hidden.data = model.hidden.data[:, :2]
        assert not pending(model, slices)  # a token of generation
    with torch.inference_mode():
        assert not pending(model, slices)
    needed = 4 * 50 * 4  # logits in fp32
    for trains, least in (
        (False, 2 * needed),
        (True, 3 * needed),
    ):  # log-softmax; backward
        for room, wanted in ((least, False), (least - 1, True), (None, False)):
            slices.decide("auto", lambda room=room: room)
            with torch.set_grad_enabled(trains):
                assert pending(model, slices) is wanted
    slices.decide("whole", lambda: 1)
    assert not pending(model, slices)
    del model.lm_head.forward  # the count's
    assert "forward" not in vars(model.lm_head)


def test_heads_that_slices_would_change_are_computed_whole() -> None:
    model = Tail(None)
    model.lm_head.dropout = nn.Dropout(0.1)
    assert not pending(model, Head(model).slices)
    model.eval()
    assert pending(model, Head(model).slices)
    for hook in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        handle = getattr(model.lm_head, f"register_{hook}_hook")(lambda *args: None)
        assert not pending(model, Head(model).slices)
        handle.remove()
    assert pending(model, Head(model).slices)
    compiled = Tail(None)
    compiled._compiled_call_impl = lambda: None
    assert find_head(compiled) is None
    assert find_head(nn.Linear(2, 2)) is None


# --- memory ------------------------------------------------------------------------------------------


def peak_nbytes(model: nn.Module) -> int:
    model.zero_grad()
    with MemoryMeter() as meter:
        model().backward()
    return meter.peak_nbytes()


@pytest.mark.slow
def test_a_vocabulary_of_256_k_takes_a_few_times_its_weights_whatever_the_number_of_tokens() -> None:
    model = Tail(IN_SLICES["mean"], tokens=64, width=16, vocabulary=2**18)
    weight_nbytes = 4 * model.lm_head.weight.numel()
    whole = peak_nbytes(model)
    assert whole > 8 * weight_nbytes  # logits, log-softmax and a gradient are 4 times the weight each
    with Head(model).slices.opened(model):
        in_slices = peak_nbytes(model)
    # Two gradients of the weight, whose sum it will be; logits of 4 rows are a fourth of it, and so is each
    # thing that the loss makes of them.
    assert in_slices < 3.25 * weight_nbytes
