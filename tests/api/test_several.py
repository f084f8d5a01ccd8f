"""Several adapters on one base in one run: each is trained to the bit as if it were alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity import RecipeError, StateError, add_lora, save_lora
from infinity.api.lora import parameters_by_adapter
from infinity.core.config import SettingError
from infinity.engine.runtime import runtime_of
from tests.api import test_expert_lora as experts
from tests.api.test_lora import closing, overrides
from tests.helpers import models, training
from tests.helpers.training import small_units

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

#: Settings of each adapter: other ranks, layers and dropout; and its learning rate.
ADAPTERS: dict[str, tuple[dict[str, Any], float]] = {
    "french": ({"rank": 4, "dropout": 0.3}, 1e-2),
    "code": ({"rank": 8, "alpha": 4.0, "target_modules": ["q_proj", "down_proj"], "dropout": 0.1}, 5e-2),
    "law": ({"rank": 2, "modules_to_save": ["norm"]}, 1e-2),
}
MICRO_BATCHES, STEPS = 2, 2


def with_adapters(folder: Path, place: str, names: tuple[str, ...], dtype: str = "bf16", *more: str) -> Any:
    factory, _ = models.build("llama", seed=1)
    with small_units():
        with infinity.Init(training.recipe(dtype, overrides(place, folder, *more))):
            model = factory()
        for name in names:
            torch.manual_seed(5)
            model = add_lora(model, name=name, **ADAPTERS[name][0])
    return model


def optimizer_of(model: Any, clip: float | None) -> infinity.AdamW:
    """The optimizer of a run, in which each adapter has a learning rate of its own."""
    groups = [
        {"params": params, "lr": ADAPTERS[name][1], "adapter": name}
        for name, params in parameters_by_adapter(model).items()
    ]
    return infinity.AdamW(model, params=groups, max_grad_norm=clip)


def batches_of(name: str, step: int) -> list[dict[str, Any]]:
    _, batch = models.build("llama", seed=7 + [*ADAPTERS].index(name))
    return [batch(MICRO_BATCHES * step + micro) for micro in range(MICRO_BATCHES)]


def train_in_steps(model: Any, clip: float | None, **spoiled: int) -> dict[str, list[Any]]:
    """Train all adapters of ``model``; returns the losses of each. ``spoiled``: steps with a loss of inf."""
    names, out = [*model.peft_config], {}
    optimizer = optimizer_of(model, clip)
    for step in range(STEPS):
        left = len(names) * MICRO_BATCHES
        for name in names:
            for batch in batches_of(name, step):
                left -= 1
                with infinity.adapter(model, name):
                    loss = model(**batch).loss
                    factor = math.inf if spoiled.get(name) == step else 1.0
                    with infinity.no_sync(model) if left else torch.enable_grad():
                        (loss * factor).backward()
                out.setdefault(name, []).append(loss.item())
        optimizer.step()
        for name in names:
            out[name].append(optimizer.grad_norms[name])
    return out


def train_by_layers(model: Any, clip: float | None) -> dict[str, list[Any]]:
    names, out = [*model.peft_config], {}
    optimizer = optimizer_of(model, clip)
    slices = [name for name in names for _ in range(MICRO_BATCHES)]
    scheduled = infinity.layer_schedule(model, len(slices), adapters=slices)
    for step in range(STEPS):
        parts = [batch for name in names for batch in batches_of(name, step)]
        losses = scheduled(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]}).losses
        losses.sum().backward()
        optimizer.step()
        for name, loss in zip(slices, losses.tolist(), strict=True):
            out.setdefault(name, []).append(loss)
        for name in names:
            out[name].append(optimizer.grad_norms[name])
    return out


def weights_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    every = infinity.state_dict(model)
    return {key: value for key, value in every.items() if name in key.split(".")}


def alone(folder: Path, name: str, train: Any, clip: float | None, **how: Any) -> tuple[Any, Any]:
    with closing(with_adapters(folder, "host", (name,))) as model:
        return train(model, clip, **how)[name], weights_of(model, name)


@pytest.mark.parametrize(
    ("train", "place", "clip", "more"),
    [
        pytest.param(
            train_in_steps, "adapters", 0.5, ("memory.activations=recompute",), marks=pytest.mark.slow
        ),
        (train_by_layers, "nvme", 0.5, ("train.schedule=layer",)),
        pytest.param(train_in_steps, "nvme", None, (), marks=pytest.mark.slow),
    ],
)
def test_each_adapter_is_trained_to_the_bit_as_if_it_were_alone(
    tmp_path: Path, train: Any, place: str, clip: float | None, more: tuple[str, ...]
) -> None:
    names = (*ADAPTERS,) if clip is None else ("french", "code")
    with closing(with_adapters(tmp_path / "all", place, names, "bf16", *more)) as model:
        losses = train(model, clip)
        weights = {name: weights_of(model, name) for name in names}
    for name in names:
        want, want_weights = alone(tmp_path / name, name, train, clip)
        assert losses[name] == want
        assert weights[name].keys() == want_weights.keys()
        for key, value in want_weights.items():
            assert torch.equal(weights[name][key], value), key
    assert len({tuple(each) for each in losses.values()}) == len(names)


#: On all experts, with other ranks; and on layers alone.
ON_EXPERTS: dict[str, dict[str, Any]] = {
    "rough": {"rank": 8},
    "plain": {"rank": 2, "target_modules": ["o_proj"]},
    "fine": {"rank": 4, "init": "gaussian"},
}


def train_experts(folder: Path, names: Sequence[str], *more: str) -> dict[str, Any]:
    """Train adapters of a mixture of experts; returns the losses, norms and saved values of each."""
    by_layers = "train.schedule=layer" in more
    with small_units():
        with infinity.Init(training.recipe("fp32", training.streaming(folder, *more))):
            model: Any = experts.make("Qwen3Moe")
        for name in names:
            torch.manual_seed(5)
            model = add_lora(model, name=name, **ON_EXPERTS[name])
    found: dict[str, Any] = {name: [] for name in names}
    slices = [name for name in names for _ in range(MICRO_BATCHES)]
    with closing(model):
        groups = [group for name in names for group in infinity.lora_groups(model, lr=1e-2, name=name)]
        optimizer = infinity.AdamW(model, params=groups, max_grad_norm=dict.fromkeys(names, 0.5))
        scheduled = infinity.layer_schedule(model, len(slices), adapters=slices) if by_layers else None
        for step in range(STEPS):
            parts = [experts.batch(7 * step + [*ON_EXPERTS].index(name)) for name in slices]
            if scheduled is not None:
                losses = scheduled(
                    **{key: torch.cat([part[key] for part in parts]) for key in parts[0]}
                ).losses
                losses.sum().backward()
            for left, name, part in zip(range(len(parts))[::-1], slices, parts) if not by_layers else ():
                with infinity.adapter(model, name), infinity.no_sync(model) if left else torch.enable_grad():
                    loss = model(**part).loss
                    loss.backward()
                found[name].append(loss.item())
            optimizer.step()
            for name, loss in zip(slices, losses.tolist()) if by_layers else ():
                found[name].append(loss)
            for name in names:
                found[name].append(optimizer.grad_norms[name])
        save_lora(model, folder / "saved")
    for name in names:
        found[name].append(load_file(folder / "saved" / name / "adapter_model.safetensors"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("train.schedule=layer", "partition.tile=4KiB", "memory.device=1MiB"),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("train.schedule=layer",), marks=pytest.mark.slow),
        pytest.param(("partition.tile=4KiB", "memory.device=1MiB"), marks=pytest.mark.slow),
    ],
)
def test_adapters_of_packed_experts_are_trained_as_if_each_were_alone(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    together = train_experts(tmp_path / "all", [*ON_EXPERTS], *more)
    for name in ON_EXPERTS:
        *figures, values = train_experts(tmp_path / name, [name], *more)[name]
        *ours, saved = together[name]
        assert ours == figures
        assert saved.keys() == values.keys()
        assert all(torch.equal(saved[key], value) for key, value in values.items())
        assert any("experts" in key for key in saved) is (name != "plain")


def test_adapters_of_other_packed_parameters_are_refused_with_their_names(tmp_path: Path) -> None:
    with small_units(), infinity.Init(training.recipe("fp32", training.streaming(tmp_path))):
        model: Any = experts.make("Qwen3Moe")
    model = add_lora(model, name="all", rank=2)
    with (
        closing(model),
        pytest.raises(RecipeError, match=r"adapter 'one' is on .*down_proj, adapter 'all' on"),
    ):
        add_lora(model, name="one", rank=2, target_modules=["down_proj"])


def test_an_adapter_whose_gradient_is_not_finite_is_skipped_without_the_others(tmp_path: Path) -> None:
    spoiled = {"code": 1}
    with closing(with_adapters(tmp_path / "all", "nvme", ("french", "code"))) as model:
        losses = train_in_steps(model, 0.5, **spoiled)
        weights = {name: weights_of(model, name) for name in losses}
    for name in losses:
        want, want_weights = alone(tmp_path / name, name, train_in_steps, 0.5, **spoiled)
        assert losses[name] == pytest.approx(want, abs=0, rel=0, nan_ok=True)
        assert all(torch.equal(weights[name][key], value) for key, value in want_weights.items())
    assert not math.isfinite(losses["code"][-1])


def test_all_adapters_are_saved_as_peft_would_save_each_and_go_on_from_there(tmp_path: Path) -> None:
    factory, batch = models.build("llama", seed=1)
    names = ("french", "law")
    with closing(with_adapters(tmp_path / "all", "nvme", names, "fp32")) as model:
        train_in_steps(model, None)
        save_lora(model, tmp_path / "saved")
        save_lora(model, tmp_path / "law", name="law")
        weights = {name: weights_of(model, name) for name in names}
        model.eval()
        with torch.no_grad():
            ours = {}
            for name in names:
                with infinity.adapter(model, name):
                    ours[name] = model(**batch(0)).logits
            base = model(**batch(0)).logits
    for name in names:
        plain: Any = peft.PeftModel.from_pretrained(factory(), str(tmp_path / "saved" / name)).eval()
        assert torch.equal(plain(**batch(0)).logits, ours[name])
        assert not torch.equal(base, ours[name])
    assert torch.equal(factory().eval()(**batch(0)).logits, base)  # outside of a block
    saved = [(tmp_path / each / "adapter_model.safetensors").read_bytes() for each in ("saved/law", "law")]
    assert saved[0] == saved[1]
    with small_units(), infinity.Init(training.recipe("fp32", overrides("nvme", tmp_path / "again"))):
        again = factory()
    with closing(again), small_units():
        for name in names:
            again = add_lora(again, name=name, adapter=tmp_path / "saved" / name)
        for name in names:
            got = weights_of(again, name)
            assert all(torch.equal(value, got[key]) for key, value in weights[name].items())


def test_what_cannot_be_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with closing(with_adapters(tmp_path, "host", ("french", "law"))) as model:
        with pytest.raises(StateError, match="has an adapter 'law' already"):
            add_lora(model, name="law")
        with pytest.raises(StateError, match="give it what the first call returned"):
            add_lora(model.get_base_model(), name="more")
        with pytest.raises(SettingError, match="wanted a name of letters"):
            add_lora(model, name="a.b")
        for name in ("mlp", "lora_A"):  # of which peft would save nothing
            with pytest.raises(SettingError, match=f"name: got '{name}'; wanted .* no part of a name in "):
                add_lora(model, name=name)
        with pytest.raises(StateError, match="no adapter 'cod'; it has 'french', 'law'"):
            infinity.adapter(model, "cod").__enter__()
        with (
            pytest.raises(StateError, match="inside a block of adapter 'law'"),
            infinity.adapter(model, "law"),
            infinity.adapter(model, "french"),
        ):
            pass
        with pytest.raises(ValueError, match="got 1 names; wanted one for each of 2 slices"):
            infinity.layer_schedule(model, 2, adapters=["law"])
        with pytest.raises(infinity.CheckpointError, match="merge adds one: name it"):
            infinity.export(model, tmp_path / "merged", merge=True)
        assert not (tmp_path / "merged").exists()
        assert runtime_of(model).units


def test_what_peft_chooses_adapters_by_is_refused_where_blocks_choose(tmp_path: Path) -> None:
    with closing(with_adapters(tmp_path, "host", ("french", "code", "law"))) as model:
        for choose in (lambda: model.set_adapter("code"), model.disable_adapter):
            with pytest.raises(StateError, match=r"with infinity\.adapter\(model, name\)"):
                choose()
        with pytest.raises(StateError, match=r"no adapter \['code'\]"):
            infinity.adapter(model, ["code"]).__enter__()  # type: ignore[arg-type]


def test_adapters_of_embeddings_are_refused_where_all_micro_batches_meet(tmp_path: Path) -> None:
    factory, batch = models.build("llama", seed=1)
    with small_units():
        with infinity.Init(training.recipe("fp32", overrides("host", tmp_path))):
            model: Any = factory()
        model = add_lora(model, name="a", rank=2, target_modules=["q_proj"])
        model = add_lora(model, name="b", rank=2, modules_to_save=["embed_tokens"])
    with closing(model):
        infinity.AdamW(model)
        scheduled = infinity.layer_schedule(model, 2, adapters=["a", "b"])
        with pytest.raises(StateError, match="runs before the blocks, on all micro-batches at once"):
            scheduled(**batch(0))


def test_adapters_that_peft_made_itself_are_an_error_that_says_how_to_make_them(tmp_path: Path) -> None:
    factory, _ = models.build("llama", seed=3)
    with infinity.Init(training.recipe("fp32", ["memory.host=64MiB"])):
        model = factory()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name in ("default", "other"):
        with pytest.raises(
            StateError, match=r"adapters default of peft\.get_peft_model: give add_lora the model"
        ):
            infinity.add_lora(adapted, name=name)
    infinity.close(model)


def test_each_adapter_names_the_base_and_is_merged_into_it_though_none_was_saved(tmp_path: Path) -> None:
    factory, _ = models.build("llama", seed=3)
    plain: Any = factory()
    plain.save_pretrained(base := tmp_path / "base")
    model: Any = infinity.from_pretrained(base, training.recipe("fp32", ["memory.host=64MiB"]), frozen=True)
    for name in ("one", "two"):
        model = add_lora(model, name=name, rank=2, target_modules=["q_proj"])
    with closing(model):
        for name in ("one", "two"):  # new adapters change nothing
            infinity.export(model, out := tmp_path / name, merge=True, adapter=name)
            got, wanted = (load_file(each / "model.safetensors") for each in (out, base))
            assert all(torch.equal(got[key], wanted[key]) for key in wanted)
