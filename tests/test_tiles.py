"""Parameters in tiles: never gathered whole, and the bits of those that are."""

import contextlib
import copy
import os
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import StateError
from infinity.activations import logits
from infinity.core.errors import DiskError
from infinity.engine.runtime import runtime_of
from infinity.partition.tiles import TiledWeight, compute_in_tiles
from infinity.planner.prefetch_plan import Kind
from infinity.shards.tiers import Tiers
from tests.helpers import models, quantized, zoo
from tests.helpers.cases import few
from tests.helpers.faulty import Fault, breakable
from tests.helpers.launch import run_ranks
from tests.helpers.limits import collected
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import (
    assert_bitwise,
    build,
    optimizer_for,
    recipe,
    reference,
    small_units,
    streaming,
    train,
)
from tests.shards.test_mapped import adapted, loaded, mapped, save
from tests.shards.test_mapped import train as adapters
from tests.shards.test_resume import same

#: Tiles of one or two experts of the tiny models; their heads and embeddings are smaller.
TILED = {"bf16": "partition.tile=7KiB", "fp32": "partition.tile=14KiB"}


def tiles_of(model: nn.Module) -> dict[str, int]:
    """The number of tiles of each parameter that has some."""
    units = runtime_of(model).units
    found = {name: len(units.places(param)) for name, param in model.named_parameters()}
    return {name: count for name, count in found.items() if count > 1}


def eager(model: Any) -> None:
    model.set_experts_implementation("eager")


def recompute(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def recompute_reentrant(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def freeze_experts(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)


# --- experts -----------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"dtype": "bf16"},
    "qwen2_moe": {"dtype": "fp32", "accumulate": 2},
    "deepseek_v3": {"dtype": "bf16", "change": recompute, "rule": Rule(max_grad_norm=None)},
    "mixtral eager": {"dtype": "fp32", "change": eager},
    "mixtral reentrant": {"dtype": "fp32", "change": recompute_reentrant},
    "qwen2_moe frozen": {"dtype": "bf16", "change": freeze_experts},
}


@pytest.mark.parametrize("case", [pytest.param("mixtral", marks=pytest.mark.slow), *list(CASES)[1:]])
def test_experts_in_tiles_give_the_plain_loops_bits(tmp_path, case):
    factory, batch = zoo.build(case.split()[0], seed=4)
    options = {"steps": 3, **CASES[case]}
    plain = reference(factory, batch, **options)
    tiled = TILED[options["dtype"]]
    assert_bitwise(train(factory, batch, streaming(tmp_path, tiled), **options), plain)
    assert_bitwise(train(factory, batch, ["memory.host=1GiB", tiled], **options), plain)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_rules_of_matrices_have_the_bits_of_whole_experts(tmp_path, name):
    """Experts in tiles are whole matrices; only a matrix in tiles of its rows is refused."""
    factory, batch = zoo.build("mixtral", seed=4)
    how: dict[str, Any] = {"dtype": "fp32", "steps": 3, "rule": Rule(name=name, lr=1e-2, numbers=())}
    whole, tiled = (
        train(factory, batch, streaming(tmp_path, tile), **how)
        for tile in ("partition.tile=never", TILED["fp32"])
    )
    assert whole.losses == tiled.losses
    assert [name for name in whole.weights if not torch.equal(whole.weights[name], tiled.weights[name])] == []


def test_tiles_that_stay_in_host_memory_may_follow_tiles_that_come_and_go(tmp_path, monkeypatch):
    place = Tiers.place

    def place_some(self, unit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "resident_nbytes", 2**40 if unit.index % 3 == 2 else 0)
            place(self, unit)

    monkeypatch.setattr(Tiers, "place", place_some)
    factory, batch = zoo.build("qwen2_moe", seed=4)
    places = streaming(tmp_path, TILED["fp32"], "memory.host=64MiB")
    ours = train(factory, batch, places, dtype="fp32", steps=2)
    assert_bitwise(ours, reference(factory, batch, dtype="fp32", steps=2))


def route_by_rank(model: Any) -> None:
    """Let each rank use experts that the other one does not, and none of them the last one."""
    rank = int(os.environ["RANK"])
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: _chosen(out, {rank, rank + 1}))


CASES_OF_RANKS = {
    **{case: CASES[case] for case in ("qwen2_moe", "deepseek_v3", "qwen2_moe frozen")},
    "qwen2_moe routed": {"dtype": "bf16", "change": route_by_rank, "accumulate": 2},
}


def ranks_in_tiles(folder: str, cases: list[str]) -> list[list[tuple[Any, ...]]]:
    """Losses, norms and weights of a rank, with whole experts and with tiles, by case."""
    rank = int(os.environ["RANK"])
    found = []
    for case in cases:
        given = CASES_OF_RANKS[case]
        factory, batch = zoo.build(case.split()[0], seed=4)
        options = {**given, "steps": 3}
        trained = [
            train(factory, batch, streaming(folder, tile), rank=rank, world=2, **options)
            for tile in ("partition.tile=never", TILED[options["dtype"]])
        ]
        found.append([(each.losses, each.norms, each.weights) for each in trained])
    return found


@pytest.mark.parametrize(
    "cases",
    [
        ["qwen2_moe routed"],
        pytest.param(["deepseek_v3", "qwen2_moe", "qwen2_moe frozen"], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_in_tiles_give_the_bits_of_whole_experts(tmp_path, cases):
    for found in run_ranks(ranks_in_tiles, 2, str(tmp_path), cases):
        for whole, tiled in found:
            assert tiled[0] == whole[0]
            assert tiled[1] == pytest.approx(whole[1], rel=1e-12)
            assert [name for name in whole[2] if not torch.equal(whole[2][name], tiled[2][name])] == []


def one_by_one(folder: str) -> str:
    """What a rank is told whose experts run in a loop."""
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model = build(factory, "bf16", streaming(folder, TILED["bf16"]))
    eager(model)
    with pytest.raises(StateError) as raised:
        model(**batch(0))
    infinity.close(model)
    return str(raised.value)


def test_several_ranks_refuse_experts_one_by_one_and_say_what_can_be(tmp_path):
    for text in run_ranks(one_by_one, 2, str(tmp_path)):
        assert "grouped_mm implementation, or eager with one rank" in text
        assert "partition.tile=never" in text


WAYS: dict[str, tuple[str, ...]] = {
    "layers": (),
    "recomputed": ("memory.activations=recompute",),
    "offloaded": ("memory.activations=offload",),
    "planned": ("memory.activations=plan", "memory.device=3MiB"),
}


def losses_by(way: str, folder: Any, tile: str, change: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model = build(factory, "bf16", streaming(folder, tile, *WAYS[way]))
    change(model)
    optimizer, losses = optimizer_for(model, Rule(max_grad_norm=None)), []
    runs: Any = infinity.layer_schedule(model, micro_batches=2) if way == "layers" else model
    for step in range(4):
        loss = runs(**batch(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = infinity.state_dict(model)
    infinity.close(model)
    return losses, weights


CHANGES = {"trained": lambda model: None, "frozen": freeze_experts}
#: Recomputed blocks are among the cases above.
FEW = (("layers", "frozen"), ("planned", "trained"))


@pytest.mark.parametrize(
    ("way", "change"),
    [
        pytest.param(way, CHANGES[name], id=f"{name}-{way}", marks=mark)
        for way in WAYS
        for name in CHANGES
        for mark in [[] if (way, name) in FEW else pytest.mark.slow]
    ],
)
def test_activations_and_schedules_of_tiles_are_those_of_whole_experts(tmp_path, way, change):
    whole, weights = losses_by(way, tmp_path, "partition.tile=never", change)
    tiled, same = losses_by(way, tmp_path, TILED["bf16"], change)
    assert tiled == whole
    assert [name for name in weights if not torch.equal(weights[name], same[name])] == []


def test_an_operator_that_reads_a_tiled_parameter_as_a_whole_is_refused_by_name(tmp_path):
    factory, _ = zoo.build("qwen2_moe", seed=4)
    model: Any = build(factory, "bf16", streaming(tmp_path, TILED["bf16"]))
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(StateError, match=r"abs on model\.layers\.0\.mlp\.experts\.gate_up_proj, .* tiles"):
        experts.gate_up_proj.abs()
    with pytest.raises(StateError, match="indexing on"):
        experts.gate_up_proj[torch.tensor([0, 1])]
    assert experts.gate_up_proj.shape == (4, 48, 32)
    with infinity.gathered([experts.gate_up_proj], modify=True):
        experts.gate_up_proj.mul_(2)
        doubled = experts.gate_up_proj.detach().clone()
    assert torch.equal(infinity.state_dict(model)["model.layers.0.mlp.experts.gate_up_proj"], doubled)
    infinity.close(model)


def test_a_model_in_tiles_that_is_dropped_is_collected(tmp_path):
    model, optimizer, batch = in_tiles(tmp_path, "7KiB")
    model(**batch(0)).loss.backward()
    optimizer.step()
    dropped = weakref.ref(model), weakref.ref(runtime_of(model))
    del model, optimizer
    assert collected(*dropped)


@pytest.mark.parametrize("tile", ["0", "some", "-1MiB"])
def test_a_wrong_size_of_tiles_is_refused(tile):
    with pytest.raises(infinity.RecipeError, match="auto, never, or a size such as 64MiB"):
        infinity.load_recipe(overrides=[f"partition.tile={tile}"])


# --- linear layers, heads and embeddings -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt", lambda model: None),
        ("llama", recompute),
        pytest.param("llama", lambda model: None, marks=pytest.mark.slow),
    ],
)
def test_linear_layers_in_tiles_give_the_plain_outputs_and_gradients_within_rounding(tmp_path, name, change):
    factory, batch = models.build(name, seed=4)
    options = {"dtype": "fp32", "steps": 4, "change": change}
    plain = reference(factory, batch, **options)
    ours = train(factory, batch, streaming(tmp_path, "partition.tile=3KiB"), **options)
    assert ours.losses[0] == plain.losses[0]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    for key, weight in plain.weights.items():
        assert torch.allclose(ours.weights[key], weight, rtol=1e-3, atol=2e-4), key


WIDTH = 2048


class Wide(nn.Module):
    """Two layers, each larger than the device; tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(512, 64, padding_idx=3)
        self.up = nn.Linear(64, WIDTH)
        self.down = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.rows(tokens)
        return (hidden + self.down(torch.tanh(self.up(hidden)))).square().mean()


@pytest.mark.parametrize("clip", few((1.0,), (1.0, None)))
def test_a_linear_layer_larger_than_the_device_trains(tmp_path, clip):
    def tokens(step: int) -> torch.Tensor:
        return torch.randint(512, (4, 8), generator=torch.Generator().manual_seed(step))

    device_nbytes, rule = 2 * 2**17, Rule(max_grad_norm=clip)
    torch.manual_seed(1)
    plain, loop = [], Reference(Wide(), torch.float32, rule)
    for step in range(3):
        loss = loop.model(tokens(step))
        loss.backward()
        plain.append(loss.item())
        loop.finish([loss])
    torch.manual_seed(1)
    model = build(Wide, "fp32", streaming(tmp_path, f"memory.device={device_nbytes}", "memory.host=768KiB"))
    assert {name.partition(".")[0] for name in tiles_of(model)} == {"rows", "up", "down"}
    assert model.up.weight.nbytes > device_nbytes
    optimizer, runtime, losses = optimizer_for(model, rule), runtime_of(model), []
    for step in range(3):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == plain[0]
    assert losses == pytest.approx(plain, rel=1e-5)
    assert runtime.peak_nbytes()["device"] <= device_nbytes
    infinity.close(model)


@pytest.fixture
def wide(tmp_path):
    torch.manual_seed(1)
    model = build(Wide, "fp32", streaming(tmp_path, "partition.tile=32KiB"))
    yield model
    infinity.close(model)


CASTS: dict[str, Any] = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.float16),
    "type": lambda model: model.type(torch.float16),
    "one": lambda model: model.down.weight.to(torch.float16),
    "to meta": lambda model: model.to("meta"),
    "one to meta": lambda model: model.down.weight.to(device="meta"),
}


@pytest.mark.parametrize("how", CASTS)
def test_a_cast_of_a_model_in_tiles_is_refused_and_leaves_no_whole_parameter(wide, how):
    with pytest.raises(StateError, match=r"train\.dtype"):
        CASTS[how](wide)
    assert {(p.dtype, p.untyped_storage().nbytes()) for p in wide.parameters()} == {(torch.float32, 4)}
    assert wide.float() is wide.cpu() is wide
    assert {p.untyped_storage().nbytes() for p in wide.parameters()} == {4}


def test_dtype_and_device_of_a_tiled_parameter_may_be_asked_for(wide):
    weight = wide.down.weight
    for made in (
        torch.zeros(2).half().to(weight),
        torch.zeros(2).half().type_as(weight),
        weight.new_zeros(2),
    ):
        assert type(made) is torch.Tensor
        assert made.dtype is torch.float32
        assert made.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_tiled_parameter_is_neither_copied_nor_pickled(wide, copying):
    with pytest.raises(StateError, match=r"(copy|pickling) on down\.weight"):
        copying(wide.down.weight)


REPLACEMENTS: dict[str, Any] = {
    "data": lambda param: setattr(param, "data", torch.zeros(param.shape)),
    "shape": lambda param: setattr(param, "data", param.data[1:]),
    "fill": lambda param: param.data.zero_(),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_what_is_written_to_a_tiled_parameter_outside_gathered_is_not_lost_in_silence(wide, how):
    tokens = torch.arange(8).view(1, 8)
    before = wide(tokens).item()
    REPLACEMENTS[how](wide.down.weight)
    with pytest.raises(StateError, match=r"down\.weight: its data was"):
        wide(tokens)
    assert wide(tokens).item() == before


def test_a_tiled_parameter_is_whole_in_all_of_nested_blocks(wide):
    weight = wide.down.weight
    with infinity.gathered([weight]):
        with infinity.gathered([weight], modify=True):
            weight.fill_(3)
        assert weight.min() == 3
    with infinity.gathered([weight], modify=True):
        with infinity.gathered([weight]):
            assert weight.max() == 3
        weight.fill_(6)
        assert infinity.state_dict(wide)["down.weight"].unique().tolist() == [6]
        assert wide.state_dict()["down.weight"].unique().tolist() == [6]
    assert infinity.state_dict(wide)["down.weight"].unique().tolist() == [6]


def test_an_embedding_in_tiles_that_is_resized_stays_in_tiles(wide):
    with infinity.Init(wide):
        wide.rows.weight.data = torch.cat([wide.rows.weight.data, torch.ones(64, 64)])
    assert tiles_of(wide)["rows.weight"] == 5
    assert torch.equal(infinity.state_dict(wide)["rows.weight"][512:], torch.ones(64, 64))
    wide(torch.tensor([[520, 0]])).backward()
    optimizer_for(wide, Rule()).step()


WHOLE: dict[str, Any] = {
    "cat": lambda model: torch.cat([model.down.weight, torch.zeros(1, WIDTH)]),
    "grad": lambda model: torch.autograd.grad(model(torch.zeros(1, 8).long()), [model.down.weight]),
    "register_hook": lambda model: model.down.weight.register_hook(torch.zeros_like),
    "register_post_accumulate_grad_hook": lambda model: model.down.weight.register_post_accumulate_grad_hook(
        lambda param: None
    ),
}


@pytest.mark.parametrize("how", WHOLE)
def test_what_would_read_a_placeholder_or_never_see_a_gradient_is_refused(wide, how):
    with pytest.raises(StateError, match=rf"{how} on down\.weight, .* tiles"):
        WHOLE[how](wide)


def test_backward_of_a_tiled_parameter_alone_gives_the_plain_gradient_and_no_other(tmp_path):
    tokens = torch.arange(32).view(4, 8)
    torch.manual_seed(1)
    loop = Reference(Wide(), torch.float32, Rule())
    loss = loop.model(tokens)
    loss.backward(inputs=[loop.model.down.weight])
    loop.finish([loss])
    torch.manual_seed(1)
    model = build(Wide, "fp32", streaming(tmp_path, "partition.tile=128KiB"))
    assert tiles_of(model)["down.weight"] == 4
    optimizer = optimizer_for(model, Rule())
    model(tokens).backward(inputs=[model.down.weight])
    assert {name for name, param in model.named_parameters() if param.grad is not None} == {"down.weight"}
    optimizer.step()
    ours = infinity.state_dict(model)
    assert all(torch.equal(ours[name], param) for name, param in loop.parameters.items())
    infinity.close(model)


def test_a_hook_from_before_a_parameter_is_tiled_is_refused(tmp_path):
    def factory() -> nn.Module:
        model = Wide()
        model.down.weight.register_hook(torch.zeros_like)
        return model

    with pytest.raises(StateError, match=r"register_hook on down\.weight, .* partition\.tile=never"):
        build(factory, "fp32", streaming(tmp_path, "partition.tile=32KiB"))


def test_a_hook_on_values_that_are_gathered_is_refused_until_it_is_removed(wide):
    weight = wide.down.weight
    with pytest.raises(StateError, match=r"register_hook on down\.weight"), infinity.gathered(weight):
        handle = weight.register_hook(torch.zeros_like)
    wide(torch.arange(8).view(1, 8)).backward()
    handle.remove()
    with infinity.gathered(wide.down.weight):
        assert wide.down.weight.isfinite().all()


def test_tiles_are_read_in_a_transformed_function(wide):
    x = torch.randn(2, 3, 64)
    assert torch.equal(torch.func.vmap(wide.up)(x), wide.up(x))


def test_another_optimizer_of_tiled_parameters_alone_is_refused(wide):
    wide(torch.arange(8).view(1, 8)).backward()
    with pytest.raises(StateError, match=r"SGD\.step"):
        torch.optim.SGD([wide.down.weight], lr=1.0).step()


def test_an_embedding_that_scales_gradients_by_frequency_is_gathered_whole(tmp_path):
    def factory() -> nn.Module:
        return nn.Embedding(4096, 64, scale_grad_by_freq=True)

    model = build(factory, "fp32", streaming(tmp_path, "partition.tile=64KiB", "memory.host=64MiB"))
    assert tiles_of(model) == {}
    assert model(torch.tensor([1])).shape == (1, 64)
    infinity.close(model)


class Block(nn.Module):
    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 32)
        self.up = nn.Linear(32, 512, bias=False)
        self.down = nn.Linear(512, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.a(x))))


class Recomputed(nn.Module):
    """Its tied head is kept through the whole backward pass, if there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(60, 64), nn.Linear(64, 60, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.rows.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).logsumexp(-1).mean()


def test_tiles_of_recomputed_blocks_stay_within_the_window(tmp_path, monkeypatch):
    places = [f"memory.nvme=[{tmp_path}]", "memory.host=300KiB", "memory.resident=false"]
    model = build(Recomputed, "fp32", [*places, "partition.tile=16KiB", "memory.device=80KiB"])
    optimizer = optimizer_for(model, Rule(max_grad_norm=None))
    prefetcher, most = runtime_of(model).executor().prefetcher, [0]
    start = prefetcher.mover.start
    monkeypatch.setattr(
        prefetcher.mover, "start",
        lambda unit: (most.append(prefetcher.residents.nbytes), start(unit))[1],
    )  # fmt: skip
    for step in range(3):
        model(torch.arange(step, step + 32).view(4, 8)).backward()
        optimizer.step()
    assert max(most) == prefetcher.residents.capacity_nbytes == 48 * 2**10
    infinity.close(model)


# --- what no batch is routed to ----------------------------------------------------------------------


def route_to(model: Any, experts: set[int]) -> None:
    """Let every token go to two of ``experts``."""
    for layer in model.model.layers:
        with infinity.gathered([layer.mlp.gate.weight], modify=True):
            weight = layer.mlp.gate.weight
            weight.zero_()
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: _chosen(out, experts))


def _chosen(out: Any, experts: set[int]) -> Any:
    first, second = sorted(experts)[:2]
    logits, weights, index = out
    return logits, weights, torch.tensor([first, second]).expand_as(index)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_tile_without_tokens_is_not_read_and_has_a_gradient_of_zeros_if_it_is_trained(tmp_path, frozen):
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model = build(factory, "bf16", streaming(tmp_path, "partition.tile=2KiB"))
    if frozen:
        freeze_experts(model)
    optimizer, runtime = optimizer_for(model, Rule(max_grad_norm=None)), runtime_of(model)
    route_to(model, {1, 2})
    started = []
    mover = runtime.executor().mover
    start = mover.start
    mover.start = lambda index: (started.append(index), start(index))[1]
    before = {name: value.clone() for name, value in infinity.state_dict(model).items()}
    started.clear()
    routed = [unit for unit in runtime.units if unit.routed]
    assert len(routed) == 2 * 2 * 4  # layers, parameters, experts
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        runtime.synchronize()
        report = optimizer.report()
        assert (report.tiles, report.tiles_used) == (16, 8)
    rows = {runtime.units[index].segments[0].rows.start for index in started if runtime.units[index].routed}
    assert rows == {1, 2}
    after = infinity.state_dict(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changed = [not torch.equal(a, b) for a, b in zip(after[name], before[name], strict=True)]
    assert changed == [False] * 4 if frozen else changed == [True] * 4  # decay acts on all
    infinity.close(model)


# --- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "gpt_oss" else pytest.mark.slow) for kind in quantized.KINDS],
)
def test_adapters_on_a_base_in_tiles_train_as_on_a_whole_one(tmp_path, kind):
    transformers.utils.logging.set_verbosity_error()
    quantized.write(kind, tmp_path / kind)
    routed = kind in ("deepseek_v3", "kimi_k2", "mixed") or kind.startswith("gpt_oss")
    found = []
    for tile in ("never", "7KiB"):
        with loaded(
            tmp_path / kind, tmp_path / "nvme", "memory.device=1MiB", f"partition.tile={tile}"
        ) as model:
            runtime = runtime_of(model)
            assert mapped(model) == list(runtime.units)
            assert any(unit.routed and unit.stored for unit in runtime.units) == (tile != "never" and routed)
            found.append((adapters(model), infinity.state_dict(model)))
    (whole, weights), (tiled, loaded_weights) = found
    if routed:
        assert tiled == whole
    assert [name for name in weights if not torch.equal(weights[name], loaded_weights[name])] == []


def test_logits_of_a_frozen_head_larger_than_the_device_are_computed_in_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(logits, "LEAST_SLICE_NBYTES", 1)
    source, losses, rows = save(tmp_path / "checkpoint"), {}, list[int]()
    linear = TiledWeight.linear

    def noted(weight, inputs, bias=None):
        rows.extend([inputs.shape[:-1].numel()] * ("lm_head" in weight.name))
        return linear(weight, inputs, bias)

    monkeypatch.setattr(TiledWeight, "linear", noted)
    for mode in ("whole", "slices"):
        sizes = ("memory.device=24KiB", "partition.tile=1KiB")
        with loaded(source, tmp_path / mode, *sizes, f"memory.logits={mode}") as model:
            head = runtime_of(model).units.places(model.lm_head.weight)
            assert sum(unit.nbytes for unit, _ in head) > 24 * 2**10
            model = adapted(model, targets=["q_proj"])
            optimizer, schedule = optimizer_for(model, Rule()), infinity.layer_schedule(model, 2)
            losses[mode] = []
            for step in range(2):
                loss = schedule(**models.build("llama", 1)[1](step, 0, 1)).loss
                loss.backward()
                optimizer.step()
                losses[mode].append(loss.item())
        assert {*rows} == ({24} if mode == "whole" else {8})
        rows.clear()
    assert losses["slices"] == pytest.approx(losses["whole"], rel=1e-6)


def test_what_is_written_to_a_quantized_tile_is_not_decoded_anew(tmp_path):
    transformers.utils.logging.set_verbosity_error()
    quantized.write("gpt_oss", tmp_path / "source")
    name, places = "model.layers.0.mlp.experts.down_proj", ("memory.device=1MiB", "partition.tile=7KiB")
    with loaded(tmp_path / "source", tmp_path / "nvme", *places) as model:
        [param] = [param for key, param in model.named_parameters() if key == name]
        tiles, ids = runtime_of(model).units.places(param), torch.arange(16).view(1, -1)
        assert all(unit.stored for unit, _ in tiles)
        for _ in range(2):
            with torch.no_grad():
                before = model(input_ids=ids).logits
            wanted = 2 * infinity.state_dict(model)[name]
            with infinity.gathered([param], modify=True):
                param.mul_(2)
            for _ in range(2):
                assert torch.equal(infinity.state_dict(model)[name], wanted)
                with torch.no_grad():
                    assert not torch.equal(model(input_ids=ids).logits, before)
        assert not any(unit.stored for unit, _ in tiles)


@pytest.mark.parametrize("kind", few(("gpt_oss",), ("gpt_oss", "plain")))
def test_a_model_whose_weights_could_not_be_read_says_so_and_reads_them_when_it_is_used_next(tmp_path, kind):
    transformers.utils.logging.set_verbosity_error()
    places = ("memory.device=1MiB", "partition.tile=7KiB")
    if kind == "gpt_oss":
        quantized.write(kind, tmp_path / "source")
    else:
        zoo_model, _ = zoo.build("qwen2_moe", seed=4)
        zoo_model().save_pretrained(tmp_path / "source")
    ids, failed = torch.arange(16).view(1, -1), 0
    with (
        breakable() as engines,
        loaded(tmp_path / "source", tmp_path / "nvme", *places) as model,
        torch.no_grad(),
    ):
        wanted, [engine], executor = model(input_ids=ids).logits, engines, runtime_of(model).executor()
        for later in range(1, 30, 2):
            executor.prefetcher.forget()
            engine.faults = (Fault(on="read", nth=engine.reads + later),)
            try:
                model(input_ids=ids)
                executor.prefetcher.forget()  # what was fetched for the next pass
            except DiskError:
                failed += 1
            engine.faults = ()
            assert torch.equal(model(input_ids=ids).logits, wanted)
        executor.prefetcher.forget()
        assert executor.device_pool.leased_nbytes == 0
        assert not any(executor.prefetcher.residents.pins.values())
    assert failed > 5


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_read_outside_a_call_leaves_the_step_its_plan_also_if_it_fails(tmp_path, tiled, fails):
    torch.manual_seed(1)
    with breakable() as engines:
        model = build(Wide, "fp32", streaming(tmp_path, "partition.tile=32KiB"))
    optimizer = optimizer_for(model, Rule())
    with contextlib.closing(optimizer):
        prefetcher, loss = runtime_of(model).executor().prefetcher, model(torch.arange(8))
        prefetcher.forget()
        engines[0].faults = (Fault(on="read", nth=engines[0].reads + 1),) * fails
        with pytest.raises(DiskError) if fails else contextlib.nullcontext():
            nn.functional.linear(torch.ones(WIDTH), model.down.weight) if tiled else model.up.bias.sum()
        engines[0].faults = ()
        loss.backward()
        optimizer.step()
        assert {event.kind for event in prefetcher.training.plan.events} == set(Kind)


def test_a_tiled_parameter_of_a_plan_stays_where_it_is():
    param = nn.Parameter(torch.empty(2, 3, device="meta"))
    compute_in_tiles(param, TiledWeight([], None, None))  # type: ignore[arg-type]
    assert param.to(torch.float32) is param.to("meta") is param


def small_state(model: nn.Module, optimizer: Any) -> Any:
    return infinity.state_dict(model), optimizer.state_dict()["state"]


def in_tiles(nvme: Any, tile: str, *more: str) -> tuple[Any, Any, Any]:
    factory, batch = zoo.build("qwen2_moe", seed=4)
    model = build(factory, "bf16", streaming(nvme, f"partition.tile={tile}", *more))
    return model, optimizer_for(model, Rule()), batch


def test_states_in_tiles_are_saved_loaded_and_exported_by_the_models_own_names(tmp_path):
    transformers.utils.logging.set_verbosity_error()
    model, optimizer, batch = in_tiles(tmp_path / "a", "7KiB")
    assert tiles_of(model)
    plain = dict(zoo.build("qwen2_moe", seed=4)[0]().named_parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.items()}
    for step in range(2):
        model(**batch(step)).loss.backward()
        optimizer.step()
    weights, state = small_state(model, optimizer)
    infinity.save_checkpoint(model, optimizer, tmp_path / "portable")
    infinity.export(model, tmp_path / "model")
    losses = [model(**batch(9)).loss.item()]
    infinity.close(model)
    exported = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    assert [name for name in weights if not torch.equal(weights[name], exported[name])] == []
    for tile in ("never", "4KiB"):
        model, optimizer, _ = in_tiles(tmp_path / "b", tile)
        infinity.load_checkpoint(model, optimizer, tmp_path / "portable")
        same(small_state(model, optimizer), (weights, state))
        infinity.close(model)
        model, optimizer, _ = in_tiles(tmp_path / "b", tile)
        model.load_state_dict(weights)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        same(small_state(model, optimizer), (weights, state))
        assert model(**batch(9)).loss.item() == losses[0] or tile == "4KiB"
        infinity.close(model)
        with small_units():
            model = infinity.from_pretrained(
                tmp_path / "model", recipe("bf16", streaming(tmp_path / "b", f"partition.tile={tile}"))
            )
        loaded = infinity.state_dict(model)
        assert [name for name in weights if not torch.equal(weights[name], loaded[name])] == []
        infinity.close(model)


@pytest.mark.parametrize(
    ("before", "after"),
    few(
        (("7KiB", "3KiB"), ("never", "7KiB")),
        [("7KiB", "7KiB"), ("7KiB", "3KiB"), ("never", "7KiB"), ("7KiB", "never")],
    ),
)
def test_a_run_goes_on_in_other_tiles(tmp_path, before, after):
    model, optimizer, batch = in_tiles(tmp_path, before, "run.name=mine")
    infinity.resume(model, optimizer)
    for step in range(2):
        model(**batch(step)).loss.backward()
        optimizer.step()
    was = small_state(model, optimizer)
    infinity.close(model, keep=True)
    model, optimizer, batch = in_tiles(tmp_path, after, "run.name=mine")
    assert infinity.resume(model, optimizer) == 2
    same(small_state(model, optimizer), was)
    for step in range(2, 4):
        model(**batch(step)).loss.backward()
        optimizer.step()
    was = small_state(model, optimizer)
    infinity.close(model, keep=True)
    model, optimizer, batch = in_tiles(tmp_path, before, "run.name=mine")
    assert infinity.resume(model, optimizer) == 4
    same(small_state(model, optimizer), was)
    infinity.close(model)
