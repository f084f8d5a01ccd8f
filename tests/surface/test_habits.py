"""Habits from other loops: each works as in plain PyTorch, or a sentence says what to write."""

import contextlib
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import infinity
from infinity import CheckpointError, StateError
from infinity.engine.runtime import runtime_of
from infinity.optim.rules import find_rule
from tests.helpers import models, training
from tests.helpers.cases import few
from tests.helpers.lockstep import BOTH, NVME, TINY_UNIT, WIDTH, Lockstep, Toy, batch, lockstep, seeded, toy
from tests.helpers.lockstep import place as where
from tests.helpers.reference import Reference, Rule


def goes_on(pair: Lockstep) -> None:
    """What was refused left nothing behind: both loops still agree, to the bit."""
    pair.optimizer.zero_grad()
    pair.step(2)
    pair.check()


# --- optimizers ----------------------------------------------------------------------------------


OTHERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "one-by-one": lambda params: torch.optim.AdamW(params, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "lbfgs": lambda params: torch.optim.LBFGS(params),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    "transformers": lambda params: transformers.optimization.Adafactor(params),
}


@NVME
def test_another_optimizer_is_refused_at_its_step_before_it_writes(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        for make in OTHERS.values():
            other = make(list(pair.model.parameters()))
            pair.backward(1)
            with pytest.raises(StateError, match=r"write optimizer = infinity.AdamW\(model, lr=...\)"):
                other.step()
            goes_on(pair)


@NVME
def test_a_step_by_hand_is_refused(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.backward(1)
        bias = pair.model.last.bias
        with pytest.raises(StateError, match=r"not another optimizer"), torch.no_grad():
            bias -= 0.1 * bias.grad
        goes_on(pair)


def test_optimizers_of_other_models_are_left_alone(tmp_path):
    with lockstep("host", tmp_path) as pair:
        plain = Toy()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(**batch(1)).loss.backward()
        optimizer.step()
        goes_on(pair)


def test_a_second_adamw_takes_the_place_of_the_first_which_says_so(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        second = infinity.AdamW(pair.model, params=[{"params": pair.model.last.parameters()}])
        pair.backward(1)
        with pytest.raises(StateError, match=r"a model has one.*params=\[\.\.\.\]"):
            pair.optimizer.step()
        second.step()


def test_what_is_unfrozen_and_in_no_group_is_an_error_and_trains_when_it_is_added(tmp_path):
    with lockstep("nvme", tmp_path, rule=Rule(max_grad_norm=None)) as pair:
        pair.require_grad("blocks.1", train=False)
        pair.optimizer = training.optimizer_for(pair.model, pair.rule)
        pair.step(2)
        pair.require_grad("blocks.1", train=True)
        pair.backward(1)
        with pytest.raises(StateError, match=r"blocks\.1\..* frozen when .*optimizer\.add_param_group"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        added = list(pair.model.blocks[1].parameters())
        pair.optimizer.add_param_group({"params": [p for p in added if p.ndim > 1], "weight_decay": 0.1})
        pair.optimizer.add_param_group({"params": [p for p in added if p.ndim < 2], "weight_decay": 0.0})
        pair.step(2)
        pair.check()


@pytest.mark.parametrize("wrong", [lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: None])
def test_parameters_in_place_of_the_model_are_an_error_that_says_what_to_write(wrong):
    with pytest.raises(TypeError, match=r"infinity.AdamW\(model, lr=...\)"):
        infinity.AdamW(wrong(nn.Linear(2, 2)))


@pytest.mark.parametrize("place", ["host", "nvme", "one-version"])
def test_another_adamw_or_a_state_between_backward_and_step_is_refused(tmp_path, place):
    with lockstep(place, tmp_path, rule=Rule(max_grad_norm=None)) as pair:
        pair.step()
        state = pair.optimizer.state_dict()
        for accumulates in (False, True):
            with infinity.no_sync(pair.model) if accumulates else contextlib.nullcontext():
                pair.backward(2)
            for clip in (None, 1.0):
                with pytest.raises(StateError, match=r"after step\(\), or after optimizer.zero_grad\(\)"):
                    infinity.AdamW(pair.model, max_grad_norm=clip)
            with pytest.raises(StateError, match=r"after step\(\), or after optimizer.zero_grad\(\)"):
                pair.optimizer.load_state_dict(state)
            goes_on(pair)


@NVME
def test_the_first_optimizer_gets_the_gradients_from_before_it(tmp_path, place):
    rule = Rule(max_grad_norm=None)
    with training.small_units(TINY_UNIT), infinity.Init(training.recipe("bf16", where(place, tmp_path))):
        model = toy()
    try:
        model(**batch(1)).loss.backward()
        optimizer, plain = training.optimizer_for(model, rule), Reference(toy(), torch.bfloat16, rule)
        for number in (1, 2):
            if number == 2:
                model(**batch(2)).loss.backward()
            optimizer.step()
            plain.step([batch(number)])
        weights = infinity.state_dict(model)
        assert all(torch.equal(weights[name], param) for name, param in plain.parameters.items())
    finally:
        infinity.close(model)


# --- hyperparameters -----------------------------------------------------------------------------


IMPOSSIBLE = [
    {"lr": -1}, {"lr": float("nan")}, {"lr": float("inf")}, {"lr": "1e-3"}, {"lr": True}, {"lr": None},
    {"lr": torch.tensor([1.0, 2.0])}, {"betas": (2, 3)}, {"betas": (0.9,)}, {"betas": 0.9},
    {"betas": (0.9, 1)}, {"betas": (-0.1, 0.9)}, {"betas": ("0.9", 0.9)}, {"eps": -1e-8},
    {"eps": float("nan")}, {"weight_decay": -0.1}, {"weight_decay": float("nan")}, {"weight_decay": False},
]  # fmt: skip
OTHER_RULES = [{"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": False}]


def test_impossible_hyperparameters_are_refused_wherever_they_are_given(tmp_path):
    with lockstep("host", tmp_path) as pair:
        params = list(pair.model.parameters())
        for wrong in IMPOSSIBLE:
            [name] = wrong
            with pytest.raises(ValueError, match=rf"^{name}: got .*; wanted "):
                infinity.AdamW(pair.model, **wrong)
        for wrong in [*IMPOSSIBLE, *OTHER_RULES]:
            [name] = wrong
            with pytest.raises(ValueError, match=rf"^{name}: got .*; wanted "):
                infinity.AdamW(pair.model, params=[{"params": params, **wrong}])
            state = pair.optimizer.state_dict()
            state["param_groups"][0].update(wrong)
            with pytest.raises(ValueError, match=rf"^{name}: got .*; wanted "):
                pair.optimizer.load_state_dict(state)
        decoupled = {"decoupled_weight_decay": True}
        with pytest.raises(ValueError, match=r"^decoupled_weight_decay: got True; wanted False, as in torch"):
            find_rule("adam").check_numbers(
                {"lr": 1, "betas": (0.9, 0.99), "eps": 0, "weight_decay": 1, **decoupled}
            )
        for norm in (-1.0, 0, float("nan"), "1", True):
            with pytest.raises(ValueError, match=r"max_grad_norm: got .*; wanted a number > 0, or None"):
                infinity.AdamW(pair.model, max_grad_norm=norm)
        goes_on(pair)


def test_a_group_that_is_refused_is_not_added(tmp_path):
    with lockstep("host", tmp_path) as pair:
        held = pair.optimizer.param_groups.pop(1)["params"]
        with pytest.raises(ValueError, match="lr: got -1"):
            pair.optimizer.add_param_group({"params": held, "lr": -1})
        with pytest.raises(
            StateError, match=r"shape \(3, 2\) in a parameter group is not one of this model's"
        ):
            pair.optimizer.add_param_group({"params": nn.Linear(2, 3).parameters()})
        pair.optimizer.add_param_group({"params": held, "weight_decay": 0.0})
        goes_on(pair)


def test_tensors_and_numpy_numbers_are_hyperparameters(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        for group in pair.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        scheduler = torch.optim.lr_scheduler.LambdaLR(pair.optimizer, lambda step: 0.5**step)
        for step in range(3):
            pair.step(lr=pair.rule.lr * 0.5**step)
            scheduler.step()
        pair.check()
        import numpy

        infinity.AdamW(pair.model, lr=numpy.float32(0.1), eps=0, betas=[0.9, torch.tensor(0.5)])
        infinity.AdamW(pair.model, lr=torch.tensor(0.1), max_grad_norm=float("inf"))


# --- the state of torch's AdamW ------------------------------------------------------------------


def _trained_by_torch(make=torch.optim.AdamW, groups=None, **options):
    torch.manual_seed(1)
    model = Toy().bfloat16()
    optimizer = make(model.parameters() if groups is None else groups(model), **options)
    model(**batch(1)).loss.backward()
    optimizer.step()
    return model, optimizer.state_dict()


@BOTH
def test_the_state_of_torchs_adamw_is_loaded(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        model, state = _trained_by_torch()
        pair.model.load_state_dict(model.state_dict())
        params = list(pair.model.parameters())
        optimizer = infinity.AdamW(pair.model, params=[{"params": params}])
        optimizer.load_state_dict(state)
        assert optimizer.steps == 1
        assert optimizer.param_groups[0]["weight_decay"] == 0.01  # theirs
        loaded, weights = optimizer.state_dict()["state"], list(model.parameters())
        for i, weight in enumerate(weights):
            assert float(loaded[i]["step"]) == 1
            assert torch.equal(loaded[i]["master"].bfloat16(), weight)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(loaded[i][name], state["state"][i][name].float())
        pair.backward(2)
        optimizer.step()
        assert optimizer.steps == 2


@NVME
def test_a_state_of_torchs_adamw_lacks_what_got_no_gradient(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step(2)
        _, state = _trained_by_torch()
        del state["state"][3]
        optimizer = infinity.AdamW(pair.model, params=[{"params": list(pair.model.parameters())}])
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["state"]
        assert [float(loaded[i]["step"]) for i in (2, 3)] == [1, 0]
        assert not loaded[3]["exp_avg"].any()
        assert not loaded[3]["exp_avg_sq"].any()


def test_a_state_with_frozen_parameters_in_the_groups_is_loaded(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        params = list(pair.model.parameters())
        params[0].requires_grad_(False)
        optimizer = infinity.AdamW(pair.model, params=[{"params": params}])
        pair.backward(1)
        optimizer.step()
        state = optimizer.state_dict()
        assert 0 not in state["state"]
        optimizer.load_state_dict(state)
        assert optimizer.steps == 1


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        (lambda: _trained_by_torch(groups=lambda m: [{"params": [*m.blocks.parameters()]}]),
         r"groups of \[18\] parameters, this optimizer of \[24\].*params=\[\{"),
        (lambda: _trained_by_torch(torch.optim.SGD, momentum=0.9, lr=0.1), "groups have no betas, eps"),
        (lambda: _trained_by_torch(torch.optim.Adamax), "of parameter 0: exp_avg_sq is missing"),
        (lambda: _trained_by_torch(groups=lambda m: [*m.parameters()][::-1]), "exp_avg has shape .*; wanted"),
    ],
)  # fmt: skip
def test_the_state_of_another_optimizer_is_an_error_before_anything_is_loaded(tmp_path, trained, message):
    with lockstep("host", tmp_path) as pair:
        optimizer = infinity.AdamW(pair.model, params=[{"params": list(pair.model.parameters())}])
        before = optimizer.state_dict()["state"]
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(trained()[1])
        after = optimizer.state_dict()["state"]
        assert all(torch.equal(before[i][name], after[i][name]) for i in before for name in before[i])


# --- casts, writes and wrappers ------------------------------------------------------------------


CASTS = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float32),
    "of-a-submodule": lambda m: m.blocks[1].float(),
    "to-empty": lambda m: m.to_empty(device="cpu"),
    "by-hand": lambda m: [setattr(p, "data", p.data.half()) for p in m.parameters()],
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()), m.parameters()
    ),
}


@NVME
@pytest.mark.parametrize("when", few(("new", "backward"), ("new", "backward", "stepped")))
def test_a_cast_is_refused_in_the_call_itself_and_undone(tmp_path, place, when):
    with lockstep(place, tmp_path) as pair:
        for cast in CASTS.values():
            if when == "backward":
                pair.backward(7)
            with pytest.raises(StateError, match=r"train\.dtype.*gathered\(params, modify=True\)"):
                cast(pair.model)
            assert pair.model.offset.dtype == torch.float32
            if when != "new":
                pair.optimizer.zero_grad()
                pair.step()
        goes_on(pair)


@NVME
def test_sharing_the_memory_of_weights_is_refused(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        with torch.no_grad():
            pair.model(**batch(1))
        assert pair.model.last.weight.isfinite().all()  # its unit is in memory now
        with pytest.raises(StateError, match=r"moved by model.share_memory\(\).*build it again"):
            pair.model.share_memory()
        with pytest.raises(StateError, match="build it again"):
            pair.step(2)


@BOTH
def test_data_that_was_replaced_by_hand_is_refused_once_and_undone(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        for name in ("weight", "bias"):
            getattr(pair.model.last, name).data = torch.zeros_like(pair.plain.model.last.get_parameter(name))
        with pytest.raises(StateError, match=r"last\.\w+: its data was replaced"):
            pair.model(**batch(2))
        goes_on(pair)


@BOTH
def test_data_that_was_replaced_by_hand_is_not_read_by_name(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        pair.model.last.bias.data = torch.zeros(4, dtype=torch.bfloat16)
        with pytest.raises(StateError, match=r"last\.bias: its data was replaced"):
            pair.model.last.bias.sum()
        goes_on(pair)


def test_a_released_weight_that_was_zeroed_is_refused_and_undone(tmp_path):
    with lockstep("nvme", tmp_path) as pair:
        pair.step()
        dict(pair.model.named_parameters())["last.bias"].data.zero_()
        with pytest.raises(StateError, match=r"last.bias: its data was replaced outside"):
            pair.model(**batch(2))
        goes_on(pair)


@pytest.mark.parametrize(("place", "cast"), [("nvme", "half"), ("host", "bfloat16"), ("nvme", "float")])
def test_a_cast_while_the_model_is_built_rounds_as_in_plain_pytorch(tmp_path, place, cast):
    def make():
        model = Toy()
        getattr(model.blocks[0], cast)()
        getattr(model, cast)()
        dtypes = {p.dtype for m in model.modules() for p in (*m._parameters.values(),) if p is not None}
        for name, _ in list(model.named_parameters()):  # each unit is stored again
            model.get_parameter(name)
        assert dtypes == {p.dtype for p in model.parameters()}
        assert len(dtypes) == 1
        return model

    with lockstep(place, tmp_path, seeded(make)) as pair:
        pair.step(2)
        pair.check()


@NVME
def test_distributed_data_parallel_is_refused_before_it_writes(tmp_path, place):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with lockstep(place, tmp_path) as pair:
            with pytest.raises(StateError, match=r"DistributedDataParallel around.*use the model as it is"):
                nn.parallel.DistributedDataParallel(pair.model)
            goes_on(pair)
    finally:
        dist.destroy_process_group()


def test_the_plain_trainer_is_told_to_be_made_to_stream(tmp_path):
    factory, batches = models.build("llama", seed=1)
    rows = [{key: value[0] for key, value in batches(i).items()} for i in range(4)]
    settings = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    for ours in (True, False):
        model = training.build(factory, "fp32", ["memory.host=256MiB"])
        optimizer = infinity.AdamW(model, lr=1e-3) if ours else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = transformers.Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, None))
        with pytest.raises(StateError, match=r"infinity\.AdamW.*infinity\.trainer\(Trainer\)"):
            trainer.train()
        infinity.close(model)


def _parametrized(how):
    def make():
        model = Toy()
        how(model)
        return model

    return make


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


REPARAMETRIZED = {
    "spectral": (lambda m: parametrizations.spectral_norm(m.last), "fp32"),
    "spectral-old": (lambda m: nn.utils.spectral_norm(m.last), "fp32"),
    "pruned": (lambda m: prune.l1_unstructured(m.last, "weight", 0.3), "bf16"),
    "own": (lambda m: parametrize.register_parametrization(m.blocks[0].up, "weight", Doubled()), "bf16"),
}


@NVME
@pytest.mark.parametrize("name", REPARAMETRIZED)
def test_a_weight_that_is_reparametrized_inside_init_trains_bitwise(tmp_path, place, name):
    how, dtype = REPARAMETRIZED[name]
    with lockstep(place, tmp_path, seeded(_parametrized(how)), dtype=dtype) as pair:
        pair.step(3)
        pair.check()


@BOTH
def test_functional_calls_give_the_plain_models_values_and_leave_the_model_whole(tmp_path, place):
    with lockstep(place, tmp_path) as pair:
        pair.step()
        values = pair.model.state_dict()
        mine, plain = (
            torch.func.functional_call(model, values, kwargs=batch(3)).loss
            for model in (pair.model, pair.plain.model)
        )
        assert torch.equal(mine, plain)
        x = torch.randn(3, 5, WIDTH, dtype=torch.bfloat16)
        with torch.no_grad():
            mine, plain = (torch.vmap(m.blocks[0])(x) for m in (pair.model, pair.plain.model))
        assert torch.equal(mine, plain)
        goes_on(pair)
        slopes = [
            torch.func.grad(
                lambda w, model=model: torch.func.functional_call(model, w, kwargs=batch(3)).loss  # type: ignore[misc]
            )
            for model in (pair.model, pair.plain.model)
        ]
        if place == "host":  # nothing comes and goes, so nothing of autograd's is in other hands
            mine, plain = (slope(values) for slope in slopes)
            assert all(torch.equal(mine[name], plain[name]) for name in plain)
        else:
            with pytest.raises(
                RuntimeError, match="don't yet support saved tensor hooks"
            ):  # torch's own words
                slopes[0](values)
        goes_on(pair)


# --- blocks of construction ----------------------------------------------------------------------


@NVME
def test_gathered_inside_the_block_of_its_model_is_refused(tmp_path, place):
    with lockstep(place, tmp_path) as other:
        with training.small_units(TINY_UNIT), infinity.Init(training.recipe("bf16", [])):
            model = Toy()
            for param in (model.blocks[0].up.weight, model.last.bias):  # of a closed unit and of the open one
                refused = pytest.raises(StateError, match=r"inside the infinity\.Init block")
                with refused, infinity.gathered(param, modify=True):
                    pass
            with infinity.gathered(other.model), torch.no_grad():
                model.last.bias.copy_(other.model.last.bias)
        mine, theirs = (infinity.state_dict(each)["last.bias"] for each in (model, other.model))
        assert torch.equal(mine, theirs)
        infinity.close(model)


def test_a_block_in_a_block_is_refused_and_the_outer_one_goes_on():
    with infinity.Init(training.recipe("bf16", [])):
        first = nn.Linear(2, 2)
        with pytest.raises(StateError, match=r"inside another one.*one after the other"):
            infinity.Init(training.recipe("bf16", [])).__enter__()
        with pytest.raises(StateError, match=r"from_pretrained opens a block of its own: call it outside"):
            infinity.from_pretrained("anything")
        model = nn.Sequential(first, nn.Linear(2, 2))
    with infinity.Init(training.recipe("bf16", [])):
        other = nn.Linear(2, 2)
    assert len(infinity.AdamW(model).param_groups[0]["params"]) == 2
    infinity.close(model)
    infinity.close(other)


def test_something_else_in_place_of_a_recipe_is_an_error():
    for wrong in ("recipe.yaml", {"memory": {}}, 3):
        with pytest.raises(TypeError, match=r"infinity.Init\(infinity.load_recipe\('recipe.yaml'\)\)"):
            infinity.Init(wrong)


def test_what_is_dropped_inside_the_block_is_not_stored():
    with training.small_units(), infinity.Init(training.recipe("bf16", [])):
        nn.Linear(64, 64)
        model = Toy()
    held = sum(segment.numel for _, segment in runtime_of(model).units.segments())
    assert held == sum(param.numel() for param in model.parameters())
    infinity.close(model)


def test_from_pretrained_of_transformers_inside_the_block_is_refused_at_its_first_parameter(tmp_path):
    factory, _ = models.build("llama", seed=1)
    factory().save_pretrained(tmp_path)
    before = nn.Module.__init__
    for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with (
            pytest.raises(StateError, match=r"meta device.*infinity.from_pretrained\(directory, recipe\)"),
            infinity.Init(training.recipe("bf16", [])),
        ):
            cls.from_pretrained(tmp_path)
    assert nn.Module.__init__ is before


# --- changes of a finished model -----------------------------------------------------------------


def _with(batches, token):
    """``batches`` in which ``token``, that the model did not know, appears."""

    def changed(number):
        made = dict(batches(number))
        made["input_ids"] = made["input_ids"].clone()
        made["input_ids"][0, 0] = token
        return made

    return changed


@pytest.mark.parametrize(
    ("name", "size", "place"),
    few(
        (("llama", 90, "nvme"), ("gpt2", 105, "nvme")),
        [("llama", 105, "host"), ("llama", 90, "nvme"), ("gpt2", 105, "nvme"), ("bert", 105, "nvme")],
    ),
)
def test_embeddings_resized_inside_the_block_train_bitwise(tmp_path, name, size, place):
    factory, batches = models.build(name, seed=1)

    def resized():
        model = factory()
        model.resize_token_embeddings(size)
        return model

    def known(number):
        return {key: value.clamp(max=size - 1) for key, value in _with(batches, size - 1)(number).items()}

    with lockstep(place, tmp_path, resized, batches=known) as pair:
        assert pair.model.get_input_embeddings().weight.shape[0] == size
        pair.step(2)
        pair.check()


@pytest.mark.parametrize(("name", "place"), [("llama", "host"), ("gpt2", "nvme")])
def test_embeddings_resized_after_the_block_are_refused_and_undone(tmp_path, name, place):
    factory, batches = models.build(name, seed=1)
    with lockstep(place, tmp_path, factory, batches=batches) as pair:
        with pytest.raises(StateError, match=r"has \(97, 32\) again.*`with infinity.Init\(model\)`"):
            pair.model.resize_token_embeddings(105)
        pair.model.config.vocab_size = 97
        goes_on(pair)


@BOTH
def test_a_finished_model_is_changed_in_a_block_of_its_own(tmp_path, place):
    factory, batches = models.build("llama", seed=1)
    overrides = training.streaming(tmp_path) if place == "nvme" else ["memory.host=256MiB"]
    model, plain = training.build(factory, "bf16", overrides), factory()
    assert model.get_input_embeddings().weight.shape == (97, 32)  # as people do, before they resize
    with torch.no_grad():
        model(**batches(0))
    with training.small_units(TINY_UNIT), infinity.Init(model):
        _add_to(model)
    _add_to(plain)
    known, rule = _with(batches, 104), training.Rule()
    optimizer, loop = training.optimizer_for(model, rule), Reference(plain, torch.bfloat16, rule)
    for step in range(3):
        loss = model(**known(step)).loss
        loss.backward()
        optimizer.step()
        assert torch.equal(loss, loop.step([known(step)]).losses[0])
    weights = infinity.state_dict(model)
    assert all(torch.equal(weights[name], param) for name, param in loop.parameters.items())
    with pytest.raises(StateError, match="has its optimizer"):
        infinity.Init(model).__enter__()
    optimizer.close()


def test_a_model_with_a_layer_schedule_is_not_changed_any_more(tmp_path):
    factory, _ = models.build("llama", seed=1)
    model = training.build(factory, "fp32", training.streaming(tmp_path))
    infinity.layer_schedule(model, 2)
    with pytest.raises(StateError, match="has its optimizer or a layer schedule"):
        infinity.Init(model).__enter__()
    infinity.close(model)


def test_a_weight_of_another_model_that_was_written_outside_ends_the_step_before_it_commits(tmp_path):
    with infinity.Init(training.recipe("fp32", training.streaming(tmp_path))):
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = infinity.AdamW(one, params=[*one.parameters(), *other.parameters()])
    (one(torch.ones(2, 8)) + other(torch.ones(2, 8))).sum().backward()
    other.weight.data = torch.zeros(8, 8)
    with pytest.raises(StateError, match="weight"):
        optimizer.step()
    assert optimizer.steps == 0
    infinity.close(one)


@BOTH
def test_a_backward_of_a_forward_from_before_a_model_was_changed_says_so(tmp_path, place):
    overrides = training.streaming(tmp_path) if place == "nvme" else ["memory.host=256MiB"]
    frozen = training.build(lambda: nn.Linear(8, 8).requires_grad_(False), "fp32", overrides)
    before = frozen(torch.ones(2, 8, requires_grad=True)).sum()
    with infinity.Init(frozen):
        frozen.new = nn.Linear(8, 8)
    with pytest.raises(StateError, match=r"changed inside .* run the forward again"):
        before.backward()
    frozen(torch.ones(2, 8, requires_grad=True)).sum().backward()
    infinity.close(frozen)


def _add_to(model):
    torch.manual_seed(7)
    model.lm_head = nn.Linear(32, 97)
    model.resize_token_embeddings(105)


@pytest.mark.parametrize(
    ("place", "first"),
    few(
        (("host", "optimizer"), ("nvme", "tie")),
        [("host", "optimizer"), ("nvme", "tie"), ("nvme", "optimizer")],
    ),
)
def test_weights_tied_by_hand_after_the_block_train_bitwise(tmp_path, place, first):
    factory, batches = models.build("llama", seed=1)
    overrides = training.streaming(tmp_path) if place == "nvme" else ["memory.host=256MiB"]
    model, plain, rule = training.build(factory, "bf16", overrides), factory(), training.Rule()
    if first == "optimizer":
        optimizer = training.optimizer_for(model, rule)
    for each in (model, plain):
        each.lm_head.weight = each.model.embed_tokens.weight
    if first == "tie":
        optimizer = training.optimizer_for(model, rule)
    loop = Reference(plain, torch.bfloat16, rule)
    for step in range(3):
        loss = model(**batches(step)).loss
        loss.backward()
        optimizer.step()
        outcome = loop.step([batches(step)])
        assert torch.equal(loss, outcome.losses[0])
        assert abs(optimizer.grad_norm - outcome.grad_norm) <= 1e-12 * outcome.grad_norm
    weights = infinity.state_dict(model)
    assert all(torch.equal(weights[name], param) for name, param in loop.parameters.items())
    optimizer.close()


@NVME
def test_tie_weights_after_the_block_changes_nothing(tmp_path, place):
    factory, batches = models.build("gpt2", seed=1)
    with lockstep(place, tmp_path, factory, batches=batches) as pair:
        pair.model.tie_weights()
        goes_on(pair)


# --- from_pretrained -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"torch_dtype": torch.bfloat16}, "train.dtype=bf16"),
        ({"dtype": "auto"}, "train.dtype=bf16"),
        ({"device_map": "auto"}, "memory.device, memory.host and memory.nvme"),
        ({"load_in_8bit": True}, "bf16, fp16 or fp32"),
        ({"quantization_config": object()}, "frozen=True and infinity.add_lora"),
        ({"trust_remote_code": True}, "no code of a checkpoint"),
        ({"revision": "main"}, "nothing is downloaded"),
    ],
)
def test_arguments_of_transformers_say_what_to_write(tmp_path, argument, message):
    [name] = argument
    with pytest.raises(CheckpointError, match=f"has no {name}: .*{message}"):
        infinity.from_pretrained(tmp_path, **argument)


def test_a_hub_name_is_an_error_without_network(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with pytest.raises(CheckpointError, match=r"No such file or directory.*hf download NAME --local-dir"):
        infinity.from_pretrained("meta-llama/Llama-3.1-8B")


@NVME
def test_a_pretrained_model_gets_new_tokens_and_a_new_head(tmp_path, place):
    factory, batches = models.build("llama", seed=1)
    source = factory()
    source.save_pretrained(tmp_path / "model")
    overrides = training.streaming(tmp_path) if place == "nvme" else ["memory.host=256MiB"]
    with training.small_units(TINY_UNIT):
        model = infinity.from_pretrained(tmp_path / "model", training.recipe("fp32", overrides))
        with infinity.Init(model):
            model.resize_token_embeddings(105, mean_resizing=False)
            torch.nn.init.zeros_(model.lm_head.weight)
    weights = infinity.state_dict(model)
    assert torch.equal(weights["model.embed_tokens.weight"][:97], source.model.embed_tokens.weight)
    assert weights["lm_head.weight"].shape == (105, 32)
    assert not weights["lm_head.weight"].any()
    optimizer = infinity.AdamW(model)
    model(**_with(batches, 104)(1)).loss.backward()
    optimizer.step()
    assert infinity.state_dict(model)["lm_head.weight"].any()
    optimizer.close()
