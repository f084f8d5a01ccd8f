"""What people do to a model and its parameters after construction."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity import StateError
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.lockstep import BOTH, NVME, WIDTH, Block, Toy, batch, lockstep, place, seeded

CASTS = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to-dtype": lambda m: m.to(torch.float32),
    "of-a-submodule": lambda m: m.blocks[1].half(),
    "p-data": lambda m: setattr(m.last.bias, "data", torch.zeros(4, dtype=torch.bfloat16)),
}


def _then(*calls):
    for call in calls:
        call()


# --- casts and moves -----------------------------------------------------------------------------


@NVME
def test_moving_to_the_device_where_it_is_changes_nothing(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for _ in range(2):
            assert pair.model.to("cpu") is pair.model
            assert pair.model.cpu() is pair.model
            pair.model.to(torch.bfloat16)  # the dtype that it has; its fp32 buffer becomes bf16, as in torch
            pair.plain.model.to(torch.bfloat16)
            pair.step()
        pair.check()


@NVME
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("stepped", [False, True])
def test_changing_the_dtype_or_the_data_is_an_error_before_any_number(tmp_path, place, cast, stepped):
    with lockstep(place, tmp_path) as pair:
        if stepped:
            pair.step()
        with pytest.raises(StateError, match=r"train.dtype|loss in place"):
            _then(lambda: CASTS[cast](pair.model), lambda: pair.model(**batch(1)))


@BOTH
@pytest.mark.parametrize("use", ["optimizer", "state_dict", "gathered", "step"])
def test_changing_the_dtype_is_an_error_at_whatever_is_next(tmp_path, place, use):
    with lockstep(place, tmp_path) as pair:
        if use == "step":
            pair.backward(1)
        then = {
            "optimizer": lambda: infinity.AdamW(pair.model), "state_dict": pair.model.state_dict,
            "step": pair.optimizer.step, "gathered": infinity.gathered(pair.model).__enter__,
        }[use]  # fmt: skip
        with pytest.raises(StateError, match=r"train.dtype|loss in place"):
            _then(pair.model.half, then)


# --- gradients -----------------------------------------------------------------------------------


READS = {
    "norm": lambda p: p.grad.norm(),
    "data": lambda p: p.grad.data.norm(),
    "detach": lambda p: p.grad.detach().sum(),
    "cpu": lambda p: p.grad.cpu().sum(),
    "numpy": lambda p: p.grad.numpy(),
    "item": lambda p: p.grad[0].item(),
    "mul": lambda p: p.grad.mul_(0.5),
    "add": lambda p: torch.zeros(4) + p.grad,
    "copy": lambda p: torch.zeros(4).copy_(p.grad),
    "zero": lambda p: p.grad.zero_(),
    "transposed": lambda p: p.grad.T.sum(),
    "isfinite": lambda p: torch.isfinite(p.grad).all(),
    "list": lambda p: p.grad.tolist(),
    "stack": lambda p: torch.stack([p.grad, p.grad]),
    "bool": lambda p: bool(p.grad.sum()),
    "data-set": lambda p: setattr(p.grad, "data", torch.zeros(4)),
}


@NVME
def test_the_values_of_a_gradient_are_an_error_its_shape_is_not(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        bias = pair.model.last.bias
        assert bias.grad is None
        pair.backward(1)
        assert bias.grad.shape == (4,)
        assert bias.grad.dtype == torch.bfloat16
        assert bias.grad.numel() == 4
        assert bias.grad.device == bias.device
        assert bias.grad.is_sparse is False
        assert "ReleasedGradient" in repr(bias.grad)
        for read in READS.values():
            with pytest.raises(StateError, match=re.escape("optimizer.grad_norm")):
                read(bias)


@NVME
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_torchs_clipping_is_an_error_that_names_max_grad_norm(tmp_path, place, foreach, clip):
    with lockstep(place, tmp_path) as pair:
        pair.backward(1)
        with pytest.raises(StateError, match="max_grad_norm"):
            clip(pair.model.parameters(), 1.0, foreach=foreach)


def test_torchs_grad_scaler_is_an_error(tmp_path):
    for dtype in ("fp16", "bf16"):
        with lockstep("host", tmp_path, dtype=dtype) as pair:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(pair.model(**batch(1)).loss).backward()
            with pytest.raises((StateError, ValueError)):
                scaler.step(pair.optimizer)


# --- replacing modules and parameters ------------------------------------------------------------


class Headed(Toy):
    """Its head is replaced before training, as when a pretrained model gets a new task."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WIDTH, 4)


def _replaced_inside():
    model = Toy()
    model.last = nn.Linear(WIDTH, 4)
    model.blocks[1] = Block()
    model.blocks.append(Block())
    return model


@NVME
@pytest.mark.parametrize("make", [Headed, _replaced_inside])
def test_replacing_a_submodule_inside_init_works(tmp_path, place, make):
    with lockstep(place, tmp_path, seeded(make)) as pair:
        pair.step(3)
        pair.check()


@NVME
def test_replacing_a_submodule_outside_init_is_an_error_at_the_optimizer(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.model.last = nn.Linear(WIDTH, 4, dtype=torch.bfloat16)
        with pytest.raises(StateError, match=r"last.weight was made outside infinity.Init"):
            infinity.AdamW(pair.model)


@NVME
def test_replacing_a_submodule_after_the_optimizer_is_an_error_at_the_next_step(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        pair.model.last = nn.Linear(WIDTH, 4, dtype=torch.bfloat16)
        with pytest.raises(StateError, match=r"last.weight was made outside infinity.Init"):
            pair.step()


@NVME
def test_replacing_a_parameter_after_the_optimizer_is_an_error_at_the_next_step(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.model.blocks[0].up.bias = nn.Parameter(torch.zeros(2 * WIDTH, dtype=torch.bfloat16))
        with pytest.raises(StateError, match=r"blocks.0.up.bias was made outside infinity.Init"):
            pair.step()


@BOTH
def test_a_frozen_module_from_outside_works(tmp_path, place):
    class Frozen(Toy):
        def hidden(self, x):
            return self.adapt(super().hidden(x)) if hasattr(self, "adapt") else super().hidden(x)

    with lockstep(place, tmp_path, seeded(Frozen)) as pair:
        adapt = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        pair.model.adapt = pair.plain.model.adapt = adapt
        pair.step(3)


# --- hooks ---------------------------------------------------------------------------------------


def _observe(model, seen):
    """Every kind of hook, each writing down what it sees, weights among it."""
    block = model.blocks[1]
    values = lambda *tensors: [t.detach().double().sum().item() for t in tensors]  # noqa: E731
    block.register_forward_pre_hook(lambda m, args: seen.append(("pre", values(args[0], m.up.weight))))
    block.register_forward_pre_hook(lambda m, args: seen.append(("first", values(m.up.bias))), prepend=True)
    block.register_forward_hook(lambda m, args, out: seen.append(("post", values(out, m.norm.weight))))
    block.up.register_forward_hook(lambda m, args, out: out * 2)
    model.register_forward_hook(lambda m, args, out: seen.append(("root", values(out.loss, m.last.weight))))
    block.up.register_full_backward_hook(lambda m, gi, go: seen.append(("back", values(*gi, *go, m.weight))))
    block.up.register_full_backward_pre_hook(lambda m, go: seen.append(("backpre", values(*go))))
    model.gain.register_hook(lambda grad: seen.append(("gain", values(grad))))
    model.last.bias.register_hook(lambda grad: grad * 2)


@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_fire_with_the_right_values(tmp_path, place, when):
    with lockstep(place, tmp_path) as pair:
        pair.step(2 if when == "after" else 0)
        seen = [], []
        for model, events in zip((pair.model, pair.plain.model), seen, strict=True):
            _observe(model, events)
        pair.step(3)
        assert len(seen[0]) == 21
        assert seen[0] == seen[1]
        pair.check()


@NVME
def test_weight_norm_of_torch_trains_bitwise(tmp_path, place):
    def make():
        model = Toy()
        nn.utils.parametrizations.weight_norm(model.last)
        return model

    with lockstep(place, tmp_path, seeded(make)) as pair:
        pair.step(3)
        pair.check()


# --- compiled blocks -----------------------------------------------------------------------------


def _compile_blocks(model, backend):
    for block in model.blocks[1:]:  # beside one that is not
        block.compile(backend=backend)


def _wrap_blocks(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


def _compile_all(model, backend):
    model.compile(backend=backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, at graph breaks
@pytest.mark.parametrize(
    "place",
    [pytest.param("host", marks=pytest.mark.slow), "nvme"],  # there weights leave between the calls
)
@pytest.mark.parametrize(
    ("how", "backend"),
    [
        (_compile_blocks, "eager"),
        pytest.param(_compile_blocks, "aot_eager", marks=pytest.mark.slow),
        pytest.param(_wrap_blocks, "eager", marks=pytest.mark.slow),
        pytest.param(_compile_all, "eager", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_train_as_the_plain_ones(tmp_path, place, how, backend):
    torch._dynamo.reset()
    with lockstep(place, tmp_path) as pair:
        pair.step()
        how(pair.model, backend)
        for _ in range(3):
            pair.number += 1
            loss = pair.backward(pair.number)
            pair.optimizer.step()
            pair.follow(loss)
        with torch.no_grad():
            assert torch.equal(pair.model(**batch(9)).loss, pair.plain.model(**batch(9)).loss)


# --- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(("gpt2", "t5"), ("llama", "gpt2", "t5")))
@NVME
def test_generation_between_steps_gives_the_plain_models_tokens(tmp_path, name, place):
    factory, batches = models.build(name, seed=1)
    with lockstep(place, tmp_path, factory, batches=batches) as pair:
        for _ in range(2):
            pair.step()
            prompt = batches(3)["input_ids"][:2, :5]
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
            texts = []
            for model in (pair.model, pair.plain.model):
                model.eval()
                texts.append(
                    model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
                )
                model.train()
            assert torch.equal(*texts)
        pair.step()
        pair.check()


def test_a_model_that_was_not_built_under_init_is_an_error():
    for use in (
        infinity.AdamW,
        infinity.state_dict,
        infinity.close,
        lambda m: infinity.no_sync(m).__enter__(),
    ):
        with pytest.raises(StateError, match=re.escape("with infinity.Init(recipe): model = ...")):
            use(nn.Linear(2, 2))


def test_inference_without_an_optimizer(tmp_path):
    for where in ("host", "nvme"):
        model = training.build(seeded(Toy), "bf16", place(where, tmp_path))
        plain = seeded(Toy)()
        for param in plain.parameters():
            param.data = param.data.bfloat16()
        with torch.no_grad():
            mine: SimpleNamespace = model(**batch(1))
        assert mine.out.isfinite().all()
        assert mine.loss.isfinite()
        infinity.close(model)
