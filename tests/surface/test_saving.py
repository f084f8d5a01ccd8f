"""Weights in and out: state_dict, load_state_dict, save_pretrained, gathered."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import infinity
from infinity import StateError
from infinity.engine.runtime import runtime_of
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.lockstep import BOTH, NVME, PLACES, WIDTH, Block, Toy, batch, lockstep, seeded


class Tied(Toy):
    """The last projection shares its weight with a block's."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(WIDTH, WIDTH)
        self.forth = nn.Linear(WIDTH, WIDTH, bias=False)
        self.forth.weight = self.back.weight

    def hidden(self, x):
        return self.forth(self.back(super().hidden(x)))


def _same(mine, plain):
    assert list(mine) == list(plain)
    for name, value in plain.items():
        assert torch.equal(mine[name], value), name
        assert mine[name].dtype == value.dtype
        assert mine[name].device.type == "cpu"


@BOTH
def test_state_dict_gives_the_full_values_of_the_plain_model(tmp_path, place):
    with lockstep(place, tmp_path, seeded(Tied)) as pair:
        for _ in range(2):
            _same(pair.model.state_dict(), pair.plain.model.state_dict())
            _same(infinity.state_dict(pair.model, every_rank=True), pair.plain.model.state_dict())
            pair.step(2)
        pair.backward(9)  # also between backward and step
        _same(pair.model.state_dict(), pair.plain.model.state_dict())


@NVME
def test_state_dict_of_a_submodule_gives_its_full_values(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        _same(pair.model.blocks.state_dict(), pair.plain.model.blocks.state_dict())
        _same(pair.model.last.state_dict(), pair.plain.model.last.state_dict())
        prefixed = pair.model.last.state_dict(prefix="model.last.")
        assert list(prefixed) == ["model.last.weight", "model.last.bias"]


@NVME
def test_tied_weights_are_one_tensor_in_a_state_dict_and_dictionaries_share_nothing(tmp_path, place):
    with lockstep(place, tmp_path, seeded(Tied)) as pair:
        first, second = pair.model.state_dict(), pair.model.state_dict()
        assert first["back.weight"] is first["forth.weight"]
        assert first["back.weight"] is not second["back.weight"]
        first["back.weight"].zero_()
        assert torch.equal(second["back.weight"], pair.plain.model.back.weight)
        pair.step(2)
        pair.check()


@NVME
def test_state_dict_with_keep_vars_gives_parameters(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        values = pair.model.state_dict(keep_vars=True)
        assert isinstance(values["last.weight"], nn.Parameter)
        assert torch.equal(values["last.weight"], pair.plain.model.last.weight)


@NVME
def test_a_saved_state_dict_is_loaded_by_the_plain_model(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        file = io.BytesIO()
        torch.save(pair.model.state_dict(), file)
        file.seek(0)
        plain = Toy().bfloat16()
        plain.load_state_dict(torch.load(file))
        _same(plain.state_dict() | {"offset": pair.plain.model.offset}, pair.plain.model.state_dict())


def _load_plain(loop, values):
    """What loading means for the exact weights: where a weight did not change, they stay."""
    for name, param in loop.parameters.items():
        kept = values[name] == param.detach()
        loop.masters[name] = torch.where(kept, loop.masters[name], values[name].float())
        param.data = values[name].clone()


@pytest.mark.parametrize("place", PLACES)
def test_load_state_dict_writes_the_weights_that_training_continues_from(tmp_path, place):
    with lockstep(place, tmp_path, seeded(Tied)) as pair:
        pair.step(2)
        values = {n: v.clone() for n, v in pair.model.state_dict().items()}
        values["blocks.1.up.weight"][:5] += 1
        values["gain"] += 1
        values["back.weight"] *= 2
        values["forth.weight"] = values["back.weight"]
        assert str(pair.model.load_state_dict(values)) == "<All keys matched successfully>"
        _load_plain(pair.plain, values)
        pair.check()
        pair.step(3)
        pair.check()


@BOTH
def test_load_state_dict_of_a_submodule_and_of_other_dtypes(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        other = {n: torch.randn_like(v.float()) for n, v in pair.plain.model.blocks[1].state_dict().items()}
        pair.model.blocks[1].load_state_dict(other)
        rounded = {f"blocks.1.{n}": v.bfloat16() for n, v in other.items()}
        _load_plain(pair.plain, {n: p.detach() for n, p in pair.plain.parameters.items()} | rounded)
        pair.step(2)
        pair.check()


@NVME
def test_load_state_dict_with_wrong_keys_or_shapes_is_torchs_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        values = pair.model.state_dict()
        missing = {n: v for n, v in values.items() if n != "last.bias"}
        with pytest.raises(RuntimeError, match=r"Missing key.*last.bias"):
            pair.model.load_state_dict(missing)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
            pair.model.load_state_dict(values | {"extra": torch.zeros(2)})
        with pytest.raises(RuntimeError, match="size mismatch for gain"):
            pair.model.load_state_dict(values | {"gain": torch.zeros(2)})
        assert pair.model.load_state_dict(missing, strict=False).missing_keys == ["last.bias"]
        pair.step(2)
        pair.check()


@NVME
def test_load_state_dict_with_assign_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        with pytest.raises(StateError, match="assign=True"):
            pair.model.load_state_dict(pair.model.state_dict(), assign=True)
        pair.step(2)
        pair.check()


@NVME
def test_load_state_dict_between_backward_and_step_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        values = pair.model.state_dict()
        pair.backward(1)
        with pytest.raises(StateError, match="zero_grad"):
            pair.model.load_state_dict(values)
        pair.optimizer.zero_grad()
        pair.step(2)
        pair.check()


@NVME
def test_a_load_that_is_interrupted_leaves_nothing_open(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        values = pair.model.state_dict()
        broken = pair.model.blocks[1].register_load_state_dict_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.model.load_state_dict(values)
        broken.remove()
        pair.model.load_state_dict(values)
        pair.step(2)
        pair.check()


@pytest.mark.parametrize("name", few(("gpt2", "t5"), ("llama", "gpt2", "t5")))
@NVME
def test_save_pretrained_then_from_pretrained_gives_the_same_bits(tmp_path, name, place):
    factory, batches = models.build(name, seed=1)
    with lockstep(place, tmp_path / "run", factory, batches=batches) as pair:
        pair.step(2)
        pair.model.save_pretrained(tmp_path / "saved")
        again, info = type(pair.model).from_pretrained(
            tmp_path / "saved", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        plain = dict(pair.plain.model.named_parameters())
        assert all(torch.equal(p, plain[n]) for n, p in again.named_parameters())
        assert len(list(again.parameters())) == len(plain)
        pair.step()
        pair.check()


@NVME
def test_counting_parameters_and_bytes_gives_the_full_models_numbers(tmp_path, place):
    factory, batches = models.build("gpt2", seed=1)
    with lockstep(place, tmp_path, factory, batches=batches) as pair:
        for _ in range(2):
            plain, model = pair.plain.model, pair.model
            assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
            assert model.num_parameters() == plain.num_parameters()
            assert model.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)
            assert model.get_memory_footprint() == plain.get_memory_footprint()
            for (name, p), (same, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert (name, p.shape, p.dtype, p.device) == (same, q.shape, q.dtype, q.device)
                assert (p.ndim, p.requires_grad, p.is_leaf) == (q.ndim, q.requires_grad, q.is_leaf)
            pair.step()


@pytest.mark.parametrize("place", PLACES)
def test_gathered_gives_full_values_for_reading(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for _ in range(2):
            with infinity.gathered(pair.model):
                for mine, plain in zip(pair.model.parameters(), pair.plain.model.parameters(), strict=True):
                    assert torch.equal(mine, plain)
            with infinity.gathered([pair.model.gain, pair.model.last.weight]):
                assert torch.equal(pair.model.gain, pair.plain.model.gain)
            with infinity.gathered(pair.model.last.bias):
                assert torch.equal(pair.model.last.bias, pair.plain.model.last.bias)
            pair.step()
        pair.check()


@pytest.mark.parametrize("place", PLACES)
def test_gathered_with_modify_writes_what_training_continues_from(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        with infinity.gathered(pair.model.blocks[1], modify=True):
            pair.model.blocks[1].up.weight[3:7].mul_(2)
            nn.init.zeros_(pair.model.blocks[1].norm.bias)
        values = {n: p.detach().clone() for n, p in pair.plain.parameters.items()}
        values["blocks.1.up.weight"][3:7].mul_(2)
        values["blocks.1.norm.bias"].zero_()
        _load_plain(pair.plain, values)
        pair.check()
        pair.step(2)
        pair.check()


@NVME
def test_gathered_with_modify_inside_a_step_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        loss = pair.model(**batch(1)).loss
        with infinity.gathered(pair.model, modify=True):
            pair.model.gain.add_(1)
        with pytest.raises(RuntimeError, match=r"updated after the forward|modified by an inplace"):
            loss.backward()
        pair.backward(2)
        with pytest.raises(StateError, match="zero_grad"), infinity.gathered(pair.model, modify=True):
            pass


def test_an_error_inside_gathered_leaves_the_step_its_plan_after_a_read_outside_a_call(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        pair.step(2)
        prefetcher = runtime_of(pair.model).executor().prefetcher
        prefetcher.training.follow(None)
        pair.model.last.bias.sum()
        with pytest.raises(ZeroDivisionError), infinity.gathered(pair.model.blocks[1], modify=True):
            raise ZeroDivisionError
        pair.step()
        assert prefetcher.training.plan is not None
        pair.check()


@BOTH
def test_an_error_inside_gathered_writes_nothing_and_leaves_the_model_usable(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        with pytest.raises(ZeroDivisionError), infinity.gathered(pair.model):
            raise ZeroDivisionError
        pair.step(2)
        pair.check()


@NVME
def test_reading_a_weight_by_its_name_gives_its_value(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for _ in range(2):
            for mine, plain in zip(pair.model.blocks, pair.plain.model.blocks, strict=True):
                assert torch.equal(mine.up.weight, plain.up.weight)
            assert pair.model.gain.item() == pair.plain.model.gain.item()
            pair.step()
        pair.check()


@NVME
@pytest.mark.parametrize("then", ["forward", "step", "state_dict", "gathered"])
def test_writing_a_weight_outside_gathered_is_an_error(tmp_path, place, then):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        if then == "step":
            pair.backward(2)
        nn.init.zeros_(pair.model.blocks[1].up.weight)
        use = {
            "forward": lambda: pair.model(**batch(3)), "step": pair.optimizer.step,
            "state_dict": pair.model.state_dict, "gathered": infinity.gathered(pair.model).__enter__,
        }[then]  # fmt: skip
        with pytest.raises(StateError, match=r"blocks.1.up.weight was written outside.*gathered"):
            use()


@NVME
def test_writing_in_gathered_without_modify_is_an_error(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        with pytest.raises(StateError, match="modify=True"), infinity.gathered(pair.model.last):
            pair.model.last.weight.zero_()


@NVME
@pytest.mark.parametrize(
    "copies", [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())]
)
def test_copying_or_pickling_the_model_is_an_error_that_names_state_dict(tmp_path, place, copies):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        for module in (pair.model, pair.model.blocks[1]):
            with pytest.raises(StateError, match="state_dict"):
                copies(module)
        pair.step(2)
        pair.check()


def test_state_dict_inside_the_init_block_gives_the_values(tmp_path):
    from tests.helpers import training

    with infinity.Init(training.recipe("bf16", [])):
        torch.manual_seed(0)
        block = Block()
        values = block.state_dict()
    torch.manual_seed(0)
    assert all(torch.equal(v, values[n]) for n, v in Block().state_dict().items())
    infinity.close(block)
