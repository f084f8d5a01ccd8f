"""The layer schedule in plain PyTorch: the numbers of a loop over micro-batches, in another order."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.core.errors import StateError
from infinity.engine.schedule import Blocks, LayerSchedule
from tests.helpers import models
from tests.helpers.cases import few


def slices(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{key: value.chunk(count)[index] for key, value in batch.items()} for index in range(count)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def one_by_one(
    model: nn.Module, batch: dict[str, Tensor], count: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the ordinary schedule."""
    losses = []
    for part in slices(batch, count):
        loss = model(**part).loss
        (loss / count).backward()
        losses.append(loss.item())
    return losses, gradients(model)


def by_layer(
    model: nn.Module, batch: dict[str, Tensor], count: int, group: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    losses = LayerSchedule(model, count, group=group)(**batch)
    losses.loss.backward()
    return losses.losses.tolist(), gradients(model)


def assert_same(
    ours: tuple[list[float], dict[str, Tensor]], plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Losses to the bit; gradients, which are added in another order, to fp32's rounding."""
    assert ours[0] == plain[0]
    assert ours[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        assert (ours[1][name] - grad).abs().max() <= 1e-5 * max(1e-2, float(grad.abs().max())), name


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def gpt_tied() -> nn.Module:
    from infinity.recipes.models import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=models.VOCABULARY, seq_len=12, n_layers=2, d_model=32, n_heads=4, tied=True)
    )


MORE = {"mixtral": (mixtral, "llama"), "qwen2": (qwen2, "llama"), "gpt tied": (gpt_tied, "gpt")}


def model_and_batch(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    if name in MORE:
        make, like = MORE[name]
        return make(), models.build(like, seed=1)[1](0)
    factory, batch = models.build(name, seed=1)
    return factory(), batch(0)


NAMES = (*models.NAMES, *MORE)


@pytest.mark.parametrize(
    ("name", "count"),
    few(
        [("llama", 1), *((name, 2 + 2 * (i % 2)) for i, name in enumerate(NAMES))],
        itertools.product(NAMES, (1, 2, 4)),
    ),
)
def test_losses_and_gradients_are_those_of_micro_batches_one_by_one(name: str, count: int) -> None:
    model, batch = model_and_batch(name)
    assert_same(by_layer(model, batch, count), one_by_one(model, batch, count))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_caches_of_keys_are_left_out(name: str) -> None:
    model, batch = model_and_batch(name)
    plain = one_by_one(model, batch, 2)
    model.config.use_cache = True
    assert_same(by_layer(model, batch, 2), plain)


def test_masks_and_positions_go_with_their_rows() -> None:
    model, batch = model_and_batch("llama")
    lengths = torch.tensor([12, 7, 3, 9])
    batch["attention_mask"] = (torch.arange(12) < lengths[:, None]).long()
    batch["position_ids"] = torch.stack([torch.arange(12) % (row + 3) for row in range(4)])
    assert_same(by_layer(model, batch, 4), one_by_one(model, batch, 4))


def test_dropout_is_drawn_again_as_it_was_in_forward() -> None:
    factory, batch = models.build("gpt2", seed=1, dropout=0.2)
    model, values = factory().double(), batch(0)

    def exact(input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(input_ids=input_ids).logits.flatten(0, 1), labels.flatten())

    scheduled = LayerSchedule(model, 2, exact)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss() -> Tensor:
        torch.manual_seed(5)
        return scheduled(**values).loss

    def move(distance: float) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += distance * direction[name]

    loss().backward()
    slope = sum(float((grad * direction[name]).sum()) for name, grad in gradients(model).items())
    step = 1e-5
    move(step)
    above = loss().item()
    move(-2 * step)
    below = loss().item()
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)


def test_two_forwards_may_come_before_their_backwards() -> None:
    factory, batch = models.build("llama", seed=1)
    model = factory()
    scheduled = LayerSchedule(model, 2)
    first, second = scheduled(**batch(0)), scheduled(**batch(1))
    (first.loss + second.loss).backward()
    together = gradients(model)
    for step in (0, 1):
        scheduled(**batch(step)).loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(together[name], grad, rtol=1e-4, atol=1e-7)


def test_without_gradients_the_losses_are_the_same() -> None:
    model, batch = model_and_batch("llama")
    with torch.no_grad():
        losses = LayerSchedule(model, 2)(**batch)
    assert losses.losses.tolist() == one_by_one(model, batch, 2)[0]
    assert not losses.loss.requires_grad


def test_a_loss_of_ones_own_sees_one_slice_at_a_time() -> None:
    model, batch = model_and_batch("llama")
    rows = []

    def summed(input_ids: Tensor, labels: Tensor) -> Tensor:
        output = model(input_ids=input_ids).logits  # the whole batch's forward ends in here
        rows.append(len(output))
        return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")

    ours = LayerSchedule(model, 2, summed)(**batch)
    assert rows == [2, 2]
    wanted = summed(**batch)
    assert ours.losses.sum().item() == pytest.approx(wanted.item(), rel=1e-6)


# --- order and memory --------------------------------------------------------------------------------


def test_every_slice_goes_through_a_block_before_the_next_forward_and_backward() -> None:
    model, batch = model_and_batch("gpt")
    seen: list[str] = []

    def note(event: str) -> Any:
        return lambda *_: seen.append(event)

    for number, block in enumerate(model.blocks):
        block.attention.register_forward_hook(note(f"+{number}"))
        block.attention.out.register_full_backward_hook(note(f"-{number}"))
    LayerSchedule(model, 4)(**batch).loss.backward()
    forward = [f"+{number}" for number in range(3) for _ in range(4)]
    backward = [each for number in (2, 1, 0) for _ in range(4) for each in (f"+{number}", f"-{number}")]
    assert seen == forward + backward


class Logits(TorchDispatchMode):
    """The most elements of any tensor with a column for each word, but for the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            weights = (models.HIDDEN, models.VOCABULARY)
            if isinstance(leaf, Tensor) and leaf.shape[-1:] == weights[-1:] and leaf.shape != weights:
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt"])
def test_logits_of_the_whole_batch_never_exist(name: str) -> None:
    model, batch = model_and_batch(name)
    model.requires_grad_(False)
    model.get_parameter(next(n for n, p in model.named_parameters() if p.ndim == 1)).requires_grad_()
    rows, length = next(iter(batch.values())).shape
    with Logits() as logits:
        LayerSchedule(model, 4)(**batch).loss.backward()
    assert logits.numel == rows // 4 * length * models.VOCABULARY


def test_forward_keeps_inputs_of_blocks_and_nothing_inside_them() -> None:
    model, batch = model_and_batch("gpt")
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses = LayerSchedule(model, 4)(**batch)
    rows, length = batch["tokens"].shape
    hidden = 4 * rows * length * models.HIDDEN
    tokens = 2 * 8 * rows * length
    assert sum(kept.values()) <= 4 * hidden + tokens  # three blocks' inputs, and the tail's
    losses.loss.backward()


def test_what_a_step_kept_is_free_when_its_losses_are() -> None:
    model, batch = model_and_batch("llama")
    kept: list[weakref.ref[Tensor]] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    scheduled = LayerSchedule(model, 2)
    gc.disable()
    try:
        losses = scheduled(**batch)
        losses.loss.backward()
        del losses
        assert kept[0]() is None
        losses = scheduled(**batch)
        assert kept[1]() is not None
        del losses
        assert kept[1]() is None
    finally:
        gc.enable()


# --- what cannot be scheduled ------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks of one's own, given as functions of the block's number and its input."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def test_the_blocks_that_were_found_are_named() -> None:
    assert repr(LayerSchedule(mixtral(), 2)) == (
        "LayerSchedule(2 micro-batches through each of model.layers, 2 x MixtralDecoderLayer)"
    )
    assert Blocks.of(models.build("t5", seed=0)[0]()).name == "decoder.block"


def test_a_model_without_blocks_is_an_error_that_names_it() -> None:
    with pytest.raises(StateError, match=r"Sequential has no nn\.ModuleList"):
        LayerSchedule(nn.Sequential(nn.Linear(4, 4)), 2)
    with pytest.raises(ValueError, match="micro_batches: got 0; wanted at least 1"):
        LayerSchedule(mixtral(), 0)


def test_blocks_that_do_not_run_one_after_another_are_an_error() -> None:
    backwards = Stack(lambda self, x: self.blocks[0](self.blocks[2](x)))
    with pytest.raises(StateError, match="the last one ran, and 2 before it did not"):
        LayerSchedule(backwards, 2)(torch.ones(4, 4))
    skipping = Stack(lambda self, x: self.blocks[1](self.blocks[0](x)))
    with pytest.raises(StateError, match="without a call of the last one"):
        LayerSchedule(skipping, 2, lambda x: skipping(x).sum())(torch.ones(4, 4))


def test_a_block_whose_output_cannot_be_joined_is_an_error() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.sum()

    def run(self: Stack, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.sum()

    model = Stack(run)
    model.blocks = nn.ModuleList(Counts(4, 4) for _ in range(2))
    with pytest.raises(StateError, match=r"Counts returned a tensor of shape \(\), which differs"):
        LayerSchedule(model, 2, model)(torch.arange(16.0).view(4, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.activation_checkpointing_enable(), "gradient_checkpointing on"),
        (lambda model: setattr(model.config, "output_router_logits", True), "output_router_logits is on"),
    ],
)
def test_what_would_be_computed_wrongly_is_an_error(change: Any, message: str) -> None:
    model, batch = model_and_batch("mixtral")
    change(model)
    with pytest.raises(StateError, match=message):
        LayerSchedule(model, 2)(**batch)


def test_a_batch_that_cannot_be_cut_is_an_error() -> None:
    model, batch = model_and_batch("llama")
    with pytest.raises(ValueError, match="a batch of 4 rows; wanted a multiple of micro_batches = 3"):
        LayerSchedule(model, 3)(**batch)
    square = {key: value[:, :4] for key, value in batch.items()}
    with pytest.raises(ValueError, match="4 rows of 4 tokens"):
        LayerSchedule(model, 2)(**square, position_ids=torch.arange(4).expand(4, 4))
    assert_same(by_layer(model, square, 2), one_by_one(model, square, 2))


def test_a_model_without_a_loss_is_an_error_and_is_left_as_it_was() -> None:
    model, batch = model_and_batch("llama")
    before = list(model.modules())
    with pytest.raises(StateError, match="without a loss"):
        LayerSchedule(model, 2)(input_ids=batch["input_ids"])
    with pytest.raises(StateError, match=r"the loss of a slice is a tensor of shape \(2, 12, 97\)"):
        LayerSchedule(model, 2, lambda **given: model(**given).logits)(**batch)
    assert list(model.modules()) == before
