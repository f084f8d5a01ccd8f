"""Portable checkpoints: bitwise round trips with plain models and FSDP2, both ways."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import infinity
from infinity.api import portable
from infinity.core.errors import CheckpointError
from infinity.engine.runtime import runtime_of
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several
from tests.helpers.training import build, recipe, streaming

PLACES = {"memory": ["memory.host=64MiB"], "nvme": None}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Small(nn.Module):
    """A tied weight, frozen ones, buffers, and parameters with one, no and odd numbers of elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(50, 17)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(17, 17), nn.LayerNorm(17)) for _ in range(4)))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(17))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.randn(3, 5, 7))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.head = nn.Linear(17, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens)).flatten(0, 1) * self.scale + self.empty.sum()
        self.seen += 1
        self.mean.lerp_(torch.arange(17.0), 0.1)  # the same on every rank
        return nn.functional.cross_entropy(self.head(x).float(), tokens.flatten())


class Shardable(Small):
    """The same for FSDP2, which takes no scalars and trains no parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.empty.requires_grad_(False)


def steps_of(model: nn.Module, optimizer: Any, count: int, rank: int = 0) -> None:
    for step in range(count):
        tokens = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(10 * rank + step))
        loss = model(tokens)
        (optimizer.scale(loss) if isinstance(optimizer, infinity.AdamW) else loss).backward()
        optimizer.step()
        if not isinstance(optimizer, infinity.AdamW):
            optimizer.zero_grad()


def sharded(
    dtype: str, place: str, tmp_path: Path, factory: type[nn.Module] = Small
) -> tuple[nn.Module, infinity.AdamW]:
    overrides = PLACES[place] or streaming(tmp_path / "nvme")
    model = build(factory, dtype, [*overrides, "optim.loss_scale=256"])
    return model, infinity.AdamW(model, lr=0.01, params=groups_of(model))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def plain() -> tuple[nn.Module, torch.optim.AdamW]:
    model = Small()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, torch.optim.AdamW(groups_of(model), lr=1.0)


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Exact weights, buffers, moments and step counts by name, of a model of either kind."""
    found: dict[str, Any] = {}
    if isinstance(optimizer, infinity.AdamW):
        found |= {name: buffer.clone() for name, buffer in infinity.state_dict(model).items()}
        found |= exact_weights(model)
    else:
        found |= full({name: value.clone() for name, value in model.state_dict().items()})
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    for i, state in optimizer.state_dict()["state"].items():
        if not state["step"]:  # a plain optimizer begins a state with the first gradient
            assert not any(full(state)[moment].any() for moment in ("exp_avg", "exp_avg_sq"))
            continue
        for key, value in full(state).items():
            if key != "master":
                found[f"{order[i]} {key}"] = torch.as_tensor(value)
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[f"{names[id(param)]} numbers"] = [group[k] for k in ("lr", "betas", "eps", "weight_decay")]
    return found


def exact_weights(model: nn.Module) -> dict[str, Tensor]:
    runtime = runtime_of(model)
    runtime.synchronize()
    names = dict(model.named_parameters(remove_duplicate=False))
    fulls = {unit.index: runtime.tiers.get(unit) for unit in runtime.units}
    places = {name: runtime.units.find(param) for name, param in names.items()}
    return {n: fulls[u.index][s.offset : s.stop].view(s.shape).clone() for n, (u, s) in places.items()}


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v.float() for k, v in state_of(model, optimizer).items() if " " not in k}


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        other = theirs[key]
        if isinstance(value, Tensor):
            assert torch.equal(value.float(), other.float()), key
        else:
            assert list(value) == list(other), key


def load_plain(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, flat: bool) -> None:
    """As the users of FSDP2 and torchtitan do."""
    options = FLAT if flat else None
    weights = get_model_state_dict(model)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(weights | state, checkpoint_id=path)
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


@pytest.mark.parametrize(
    ("dtype", "place"),
    few(
        (("bf16", "memory"), ("fp16", "nvme"), ("fp32", "nvme")),
        itertools.product(("bf16", "fp16", "fp32"), PLACES),
    ),
)
def test_a_plain_model_takes_weights_and_state(
    dtype: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "BOX_NUMEL", 100)
    model, optimizer = sharded(dtype, place, tmp_path)
    steps_of(model, optimizer, 3)
    infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    wanted = state_of(model, optimizer)
    steps_of(model, optimizer, 1)  # the model goes on
    infinity.close(model)
    for flat in (True, False):
        twin, its_optimizer = plain()
        load_plain(twin, its_optimizer, tmp_path / "out", flat=flat)
        assert_same(state_of(twin, its_optimizer), wanted)


@pytest.mark.parametrize(
    ("layout", "place"),
    few(
        (("titan", "nvme"), ("tutorial", "memory"), ("weights", "nvme")),
        itertools.product(("titan", "tutorial", "weights"), PLACES),
    ),
)
def test_a_model_takes_what_a_plain_one_saved(layout: str, place: str, tmp_path: Path) -> None:
    theirs, its_optimizer = plain()
    theirs.load_state_dict(Small().state_dict())
    its_optimizer.param_groups[1]["lr"] = 0.3
    steps_of(theirs, its_optimizer, 3)
    save_plain(theirs, its_optimizer, tmp_path / "out", layout)
    wanted = state_of(theirs, its_optimizer)
    for dtype in ("bf16", "fp16", "fp32"):
        model, optimizer = sharded(dtype, place, tmp_path)
        steps_of(model, optimizer, 1)
        done = infinity.load_checkpoint(model, optimizer, tmp_path / "out")
        if layout == "weights":
            assert done == optimizer.steps == 0
            assert_same(weights_of(model, optimizer), weights_of(theirs, its_optimizer))
            assert not any(v.any() for k, v in state_of(model, optimizer).items() if " exp_avg" in k)
        else:
            assert done == optimizer.steps == 3
            assert_same(state_of(model, optimizer), wanted)
        steps_of(model, optimizer, 1)
        infinity.close(model)


def save_plain(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, layout: str) -> None:
    weights = get_model_state_dict(model)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {
        "titan": weights | {"optimizer": flat, "train_state": {"step": torch.tensor(3)}},
        "tutorial": {"app": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}},
        "weights": {"model": weights},
    }[layout]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def test_what_is_saved_is_what_is_loaded_in_other_places_and_dtypes(tmp_path: Path) -> None:
    model, optimizer = sharded("bf16", "nvme", tmp_path)
    steps_of(model, optimizer, 2)
    infinity.save_checkpoint(model, optimizer, tmp_path / "out")
    wanted = state_of(model, optimizer)
    infinity.close(model)
    for dtype, place in (("bf16", "memory"), ("fp32", "nvme")):
        other, its_optimizer = sharded(dtype, place, tmp_path)
        assert infinity.load_checkpoint(other, its_optimizer, tmp_path / "out") == 2
        assert_same(state_of(other, its_optimizer), wanted)
        infinity.close(other)


@pytest.mark.parametrize("head", ["other", "shorter", "neither"])
def test_two_weights_are_no_tied_one(tmp_path: Path, head: str) -> None:
    state = Small().state_dict()
    weight = state["embedding.weight"].clone()
    weight[49, 16] = torch.nextafter(weight[49, 16], torch.tensor(9.0))
    state["head.weight"] = {"other": weight, "shorter": weight[:40], "neither": torch.ones(3)}[head]
    if head == "neither":
        state["embedding.weight"] = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "out")
    model, optimizer = sharded("fp32", "memory", tmp_path)
    before = weights_of(model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        infinity.load_checkpoint(model, optimizer, tmp_path / "out")
    differ = "embedding.weight and head.weight differ, and are one (tied) tensor of the model"
    assert (differ in str(raised.value)) is (head != "neither")  # a size that does not fit is not read
    assert ("embedding.weight has shape (3,), the model (50, 17)" in str(raised.value)) is (head == "neither")
    assert_same(weights_of(model, optimizer), before)
    infinity.close(model)


def test_a_weight_that_was_tied_while_the_model_was_built_is_none_of_another_model(tmp_path: Path) -> None:
    states = []
    for seed in (1, 2):
        factory, batch = models.build("t5", seed=seed)  # both stacks make an embedding, and share a third
        with infinity.Init(recipe("fp32", ["memory.host=64MiB"])):
            model = factory()
        optimizer = infinity.AdamW(model, lr=0.01)
        model(**batch(seed)).loss.backward()
        optimizer.step()
        if seed == 1:
            infinity.save_checkpoint(model, optimizer, tmp_path / "out")
        else:
            assert infinity.load_checkpoint(model, optimizer, tmp_path / "out") == 1
        states.append(state_of(model, optimizer))
        infinity.close(model)
    assert_same(*states)


def test_a_run_that_is_loaded_goes_on_bitwise(tmp_path: Path) -> None:
    ends = []
    for save in (True, False):
        model, optimizer = sharded("fp16", "nvme", tmp_path)
        if save:
            steps_of(model, optimizer, 2)
            infinity.save_checkpoint(model, optimizer, tmp_path / "out")
        else:
            infinity.load_checkpoint(model, optimizer, tmp_path / "out")
        steps_of(model, optimizer, 3)
        ends.append((state_of(model, optimizer), optimizer.scaler.state_dict()))
        infinity.close(model)
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


# --- FSDP2, two ranks ----------------------------------------------------------------------------


def fsdp() -> tuple[nn.Module, torch.optim.AdamW]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Shardable()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(groups_of(model), lr=0.01)


def to_fsdp(folder: str) -> Any:
    """Save from both ranks; FSDP2 loads."""
    model, optimizer = sharded("bf16", "nvme", Path(folder), Shardable)
    steps_of(model, optimizer, 3, rank=dist.get_rank())
    infinity.save_checkpoint(model, optimizer, Path(folder, "ours"))
    wanted = state_of(model, optimizer)
    infinity.close(model)
    for flat in (True, False):
        theirs, its_optimizer = fsdp()
        load_plain(theirs, its_optimizer, Path(folder, "ours"), flat=flat)
        found = state_of(theirs, its_optimizer)
        if dist.get_rank() == 0:
            assert_same(found, wanted)
    return wanted


def from_fsdp(folder: str) -> Any:
    """FSDP2 saves from both ranks; load on both."""
    theirs, its_optimizer = fsdp()
    steps_of(theirs, its_optimizer, 3, rank=dist.get_rank())
    save_plain(theirs, its_optimizer, Path(folder, "theirs"), "titan")
    wanted = state_of(theirs, its_optimizer)
    load_and_compare(folder, "theirs", wanted)
    return wanted


def load_and_compare(folder: str, name: str, wanted: dict[str, Any]) -> None:
    model, optimizer = sharded("bf16", "nvme", Path(folder), Shardable)
    infinity.load_checkpoint(model, optimizer, Path(folder, name))
    found = state_of(model, optimizer)
    infinity.close(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert_same(found, wanted)


def test_fsdp2_and_any_number_of_ranks_both_ways(tmp_path: Path) -> None:
    model, optimizer = sharded("fp32", "memory", tmp_path, Shardable)
    steps_of(model, optimizer, 2)
    infinity.save_checkpoint(model, optimizer, tmp_path / "one")
    one = state_of(model, optimizer)
    infinity.close(model)
    calls = (
        (to_fsdp, str(tmp_path)),
        (from_fsdp, str(tmp_path)),
        (load_and_compare, str(tmp_path), "one", one),
    )
    [[ours, theirs, _], _] = run_ranks(several, 2, *calls)
    load_and_compare(str(tmp_path), "ours", ours)  # on one rank
    load_and_compare(str(tmp_path), "theirs", theirs)
