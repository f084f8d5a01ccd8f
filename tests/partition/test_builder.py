"""Where units end."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from infinity.core.errors import StateError
from infinity.partition import builder
from infinity.partition.builder import CutSizes, UnitBuilder
from infinity.partition.init_context import Construction, ServedParameters, install_parameter_dict
from infinity.partition.unit import is_placeholder
from tests.helpers import models

CPU = torch.device("cpu")


class MemoryMasters:
    """Exact values of every unit, in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}

    def put(self, unit, master) -> None:
        self.values[unit.index] = master(0, unit.numel).clone()

    def get(self, unit) -> torch.Tensor:
        return self.values[unit.index]


class Build:
    """A model built in shards, and its exact values as a state dict."""

    def __init__(
        self, factory, *, target: int = 8000, world_size: int = 1, dtype=torch.bfloat16, sizes=None
    ) -> None:
        self.masters = MemoryMasters()
        before, builder.TARGET_SHARD_NBYTES = builder.TARGET_SHARD_NBYTES, target
        try:
            construction = Construction(
                lambda close: UnitBuilder(dtype, 0, world_size, close, sizes=sizes),
                self.masters,
                self._serve,
                CPU,
            )
            self.construction = construction
            with construction:
                self.model = factory()
        finally:
            builder.TARGET_SHARD_NBYTES = before
        self.units = construction.builder.units

    def _serve(self, module) -> Callable[[nn.Module], None]:
        install_parameter_dict(module, self.construction)
        return lambda module: None

    def exact(self) -> dict[str, torch.Tensor]:
        values = {}
        for unit in self.units:
            for s in unit.segments:
                values[id(s.param)] = self.masters.values[unit.index][s.offset : s.stop].view(s.shape)
        return {name: values[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}

    def names(self) -> list[list[str]]:
        return [[s.name for s in unit.segments] for unit in self.units]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(32)


def blocks_of(names: list[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("blocks.")}


@pytest.mark.parametrize("target", [1, 4000, 10_000, 16_500, 17_500, 20_000])
def test_a_unit_holds_parts_of_one_block_from_the_second_block_on(target):
    names = Build(Stack, target=target).names()
    for unit in names:
        later = blocks_of(unit) - {"blocks.0"}
        assert len(later) <= 1
        assert not (later and "blocks.0" in blocks_of(unit))


@pytest.mark.parametrize("ranks", [1, 2, 16, 64, 512])
def test_units_are_as_large_as_drives_like_and_no_larger_than_half_of_the_memory_has_room_for(ranks):
    copies = 4 if ranks == 1 else 6  # two in flight, a gradient and its update; two reductions
    before = CutSizes.of("auto", None, ranks)
    for device in (2**30, 32 * 2**30, 80 * 2**30, 2**44):
        sizes = CutSizes.of("auto", device, ranks)
        least = builder.LEAST_SHARD_NBYTES * ranks
        assert least <= sizes.full_nbytes <= before.full_nbytes == builder.TARGET_SHARD_NBYTES * ranks
        if copies * before.full_nbytes <= device // 2:
            assert sizes.full_nbytes == before.full_nbytes
        else:
            assert sizes.full_nbytes == sizes.most_nbytes == max(least, device // 2 // copies)


class Packed(nn.Module):
    """Experts as transformers packs them."""

    is_transposed, _apply_gate = False, None

    def __init__(self, experts: int, numel: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.down_proj = nn.Parameter(torch.empty(experts, numel // 1024, 1024, device="meta"))


@pytest.mark.parametrize(
    ("mebibytes", "ranks", "on_accelerator", "experts"),
    [(4, 1, False, 1), (1, 1, False, 2), (4, 2, False, 8), (4, 1, True, 16), (1, 1, True, 64)],
)
def test_a_tile_is_one_expert_where_one_rank_computes_on_the_host(mebibytes, ranks, on_accelerator, experts):
    sizes = CutSizes.of("auto", 2**30, ranks, on_accelerator=on_accelerator)
    module = Packed(512, mebibytes * 2**19)
    assert sizes.rows(module, module.down_proj, 2) == experts
    given = CutSizes.of("8MiB", 2**30, ranks, on_accelerator=on_accelerator)
    assert given.rows(module, module.down_proj, 2) == 8 // mebibytes


@pytest.mark.parametrize("most", [7, 21, 64])
@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")])
def test_tiles_of_all_weights_of_experts_end_at_the_same_experts(names, most):
    """A tile of the smaller one could hold one expert more than two of the larger one."""
    module = Packed(128, 2**10)
    for name, rows in zip(names, (2, 1), strict=True):
        setattr(module, name, nn.Parameter(torch.empty(128, rows, 1024, device="meta")))
    sizes = CutSizes.of(f"{most * 4096 + 2048}B", 2**30, 1)
    found = [sizes.rows(module, getattr(module, name), 2) for name in names]
    assert found == [most, 2 * most if most < 64 else 0]  # 0: it is not tiled


def test_a_large_parameter_begins_a_unit_where_memory_holds_no_larger_one():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.parts = nn.ModuleList([nn.Linear(32, 64, bias=False) for _ in range(5)])
            self.whole = nn.Linear(32, 1024, bias=False)

    def parameters(most):
        return [len(names) for names in Build(Wide, sizes=CutSizes(10_000, most)).names()]

    assert parameters(2**40) == [2 + 3, 3]
    assert parameters(10_000) == [2 + 2, 2, 1, 1]  # the last one alone takes more


def test_every_parameter_is_in_one_unit():
    build = Build(Stack)
    places = [id(s.param) for unit in build.units for s in unit.segments]
    assert sorted(places) == sorted(id(p) for p in build.model.parameters())


def test_small_newcomers_join_a_full_unit():
    names = Build(Stack, target=8000).names()
    assert all(any("weight" in name and "norm" not in name for name in unit) for unit in names[:-1])


def test_tied_weights_are_in_one_unit():
    def tied():
        model = nn.ModuleList([nn.Embedding(50, 32), Stack(2), nn.Linear(32, 50, bias=False)])
        model[2].weight = model[0].weight
        return model

    build = Build(tied)
    assert build.model[0].weight is build.model[2].weight
    assert sum(s.param is build.model[0].weight for unit in build.units for s in unit.segments) == 1


def test_replaced_parameters_that_wait_in_the_open_unit_are_dropped():
    def replaced():
        model = nn.Linear(8, 8)
        model.weight = nn.Parameter(torch.ones(8, 8))
        return model

    build = Build(replaced, target=2**20)
    assert torch.equal(build.exact()["weight"], torch.ones(8, 8))
    assert sum(len(unit.segments) for unit in build.units) == 2


def test_a_llama_has_units_of_attention_and_of_mlp():
    factory, _ = models.build("llama", seed=0)
    names = Build(factory, target=5000).names()
    parts = [{n.split(".")[3] for n in unit if ".layers." in n and "norm" not in n} for unit in names]
    assert all(part <= {"self_attn"} or part <= {"mlp"} for part in parts), names
    assert sum(part == {"mlp"} for part in parts) >= 3


@pytest.mark.parametrize("name", models.NAMES)
def test_units_are_the_same_every_time(name):
    factory, _ = models.build(name, seed=0)
    assert Build(factory).names() == Build(factory).names()


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("target", [1, 8000, 2**24])
def test_initialisation_is_bitwise_the_plain_models(name, target):
    factory, _ = models.build(name, seed=3)
    plain = dict(factory().named_parameters(remove_duplicate=False))
    exact = Build(factory, target=target).exact()
    assert exact.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(exact[key], value), key


def test_every_parameter_is_released_in_the_compute_dtype_at_the_end():
    build = Build(Stack)
    for param in build.model.parameters():
        assert param.dtype == torch.bfloat16
        assert is_placeholder(param.data)
    assert all(isinstance(m._parameters, ServedParameters) for m in build.model.modules())


# --- what is patched ------------------------------------------------------------------------------


def inits() -> dict[type, object]:
    found, pending = {}, [nn.Module]
    while pending:
        cls = pending.pop()
        if cls not in found:
            found[cls] = vars(cls).get("__init__")
            pending += type.__subclasses__(cls)
    return found


def test_nothing_stays_patched():
    before = inits()
    Build(Stack)
    after = inits()
    assert all(after[cls] is init for cls, init in before.items())


def test_nothing_stays_patched_after_an_error():
    before = inits()

    def fails():
        Stack()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Build(fails)
    after = inits()
    assert all(after[cls] is init for cls, init in before.items())


def test_classes_that_are_defined_inside_are_cut_too():
    def factory():
        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.arange(64.0).view(8, 8))

        return nn.ModuleList([Late(), Late()])

    build = Build(factory, target=1)
    assert len(build.units) == 2
    assert torch.equal(build.exact()["1.weight"], torch.arange(64.0).view(8, 8))
    assert not hasattr(type(build.model[0]).__init__, "__wrapped__")


def test_a_subclass_that_calls_super_is_one_module_and_may_go_on_afterwards():
    class Wide(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.scale = nn.Parameter(torch.full((8,), 3.0))
            self.weight.data.mul_(0)

    build = Build(lambda: nn.Sequential(Wide(), Wide()), target=1)
    assert torch.equal(build.exact()["1.scale"], torch.full((8,), 3.0))
    assert not build.exact()["0.weight"].any()


def test_an_init_that_raises_and_is_caught_leaves_the_rest_whole():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            raise ZeroDivisionError

    def factory():
        model = Stack(1)
        try:
            model.extra = Fails()
        except ZeroDivisionError:
            model.extra = nn.Linear(4, 4)
        return model

    build = Build(factory)
    placed = {id(s.param) for unit in build.units for s in unit.segments}
    assert {id(p) for p in build.model.parameters()} <= placed
    assert build.construction.roots == [build.model]


def test_writes_to_a_closed_unit_by_name_are_stored():
    def factory():
        model = Stack(3)
        model.blocks[0].up.weight.data.fill_(7)
        nn.init.zeros_(model.blocks[1].up.bias)
        return model

    exact = Build(factory, target=1).exact()
    assert (exact["blocks.0.up.weight"] == 7).all()
    assert (exact["blocks.1.up.bias"] == 0).all()


class Several(nn.Module):
    """Parameters of one module in units of their own; more than stay materialized for their own sake."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        for i in range(count):
            setattr(self, f"p{i}", nn.Parameter(torch.full((40, 40), float(i))))


def test_parameters_of_one_module_may_all_be_read_before_the_first_is_written():
    def factory():
        model = nn.ModuleList([Several(), Several()])
        held = [getattr(model[0], f"p{i}") for i in range(6)]
        for i, param in enumerate(held):
            assert (param == i).all()
            param.data.add_(0.5)
        return model

    build = Build(factory, target=1600)
    assert len(build.units) == 12
    assert 4 * 1600 < 6 * 40 * 40 * 4
    assert all((build.exact()[f"0.p{i}"] == i + 0.5).all() for i in range(6))
    assert all((build.exact()[f"1.p{i}"] == i).all() for i in range(6))


def test_a_parameter_may_be_read_before_another_module_is_asked_for_what_is_written_to_it():
    def factory():
        model = Stack(3)
        target, source = model.blocks[0].norm.weight.data, model.blocks[2].norm.bias
        target.copy_(source + 7)
        return model

    assert (Build(factory, target=4000).exact()["blocks.0.norm.weight"] == 7).all()


def test_units_that_were_materialised_are_stored_when_a_few_others_are():
    def factory():
        model = nn.ModuleList([Several(1) for _ in range(8)])
        most = 0
        for module in model:
            module.p0.data.add_(1)
            most = max(most, sum(not is_placeholder(p.data) for p in model.parameters()))
        assert most <= 3  # two of those that closed, and the last one, which is open
        return model

    exact = Build(factory, target=1600).exact()
    assert all((values == 1).all() for values in exact.values())


@pytest.mark.parametrize(("width", "layers", "target"), [(64, 2, 8000), (1024, 2, 16 * 2**20)])
def test_xlnet_of_any_width_is_built_as_without_infinity(width, layers, target):
    from transformers import XLNetConfig, XLNetModel

    def factory():
        torch.manual_seed(0)
        return XLNetModel(XLNetConfig(vocab_size=64, d_model=width, n_head=2, n_layer=layers, d_inner=width))

    build, plain = Build(factory, target=target, dtype=torch.float32), factory()
    attention = [p for n, p in build.model.named_parameters() if "rel_attn" in n]
    assert len(build.units.holding(attention)) > layers  # one module's parameters in several units
    exact = build.exact()
    for name, value in plain.named_parameters():
        assert torch.equal(exact[name], value), name


def test_the_meta_device_is_refused():
    with pytest.raises(StateError, match="meta device"):
        Build(lambda: nn.Linear(4, 4, device="meta"))
