"""Rules of whole matrices: Muon is torch's to rounding, with the same bits in every place, on any ranks."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, RecipeError, StateError
from infinity.core.nbytes import rounded
from infinity.engine.runtime import open_runtimes, runtime_of
from infinity.optim.matrix import MatrixRule, embedded_in, owners
from infinity.optim.rule import Place
from infinity.optim.rules import HostRule, find_rule
from infinity.optim.state import Moment, master_of, store_master
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several
from tests.helpers.training import small_units

VOCABULARY, HIDDEN = 80, 48


class Block(nn.Module):
    """A norm, a bias, a wide, a tall and a square matrix, and packed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down, self.mix = nn.Linear(3 * HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.Parameter(0.1 * torch.randn(3, 16, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.down(torch.relu(self.up(self.norm(x)))))
        return x + sum((torch.tanh(x @ each.T) @ each for each in self.experts), start=0 * x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(x[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
        )


def batch(number: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(number))


def place(folder: Path | str, where: str) -> list[str]:
    if where == "host":
        return ["memory.host=64MiB"]
    return [f"memory.nvme=[{folder}]", "memory.host=96MiB", "memory.resident=false", "run.name=mine"]


def begin(
    folder: Path | str, where: str, *, dtype: str = "fp32", clip: float | None = None,
    more: tuple[str, ...] = (), name: str = "muon", **numbers: Any,
) -> tuple[nn.Module, Any]:  # fmt: skip
    recipe = infinity.load_recipe(overrides=[*place(folder, where), f"train.dtype={dtype}", *more])
    with small_units(), infinity.Init(recipe):
        model = Net()
    return model, infinity.optim.Optimizer(model, name, max_grad_norm=clip, **{"lr": 0.02, **numbers})


def run(model: nn.Module, optimizer: Any, steps: range, micro: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for part in range(micro):
            loss = model(batch(micro * step + part))
            if part < micro - 1:
                with infinity.no_sync(model):
                    optimizer.scale(loss).backward()
            else:
                optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights, and moments and exact weights, by name."""
    found = dict(infinity.state_dict(model))
    for number, fields in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": torch.as_tensor(value) for name, value in fields.items()}
    return {name: value.clone() for name, value in found.items()}


def trained(*args: Any, steps: int = 3, micro: int = 1, **options: Any) -> dict[str, Tensor]:
    model, optimizer = begin(*args, **options)
    try:
        losses = run(model, optimizer, range(steps), micro)
        return {**state(model, optimizer), "losses": torch.tensor(losses)}
    finally:
        optimizer.close()


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Theirs:
    """``torch.optim.Muon`` for the matrices of blocks, of each expert, ``torch.optim.AdamW`` for all else."""

    def __init__(self, model: nn.Module, **numbers: Any) -> None:
        blocks = {name: p for name, p in model.named_parameters() if "blocks" in name and p.ndim > 1}
        self.own = {id(p): [each.clone() for each in p.detach()] for p in blocks.values() if p.ndim == 3}
        flat = [each for p in blocks.values() for each in self.own.get(id(p), [p])]
        self.blocks, parameters = (
            blocks,
            [nn.Parameter(each) if type(each) is Tensor else each for each in flat],
        )
        others = [p for p in model.parameters() if all(p is not each for each in blocks.values())]
        decay = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in others]
        self.parameters = parameters
        self.muon = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, **numbers)
        self.adamw = torch.optim.AdamW(decay, lr=0.02)

    def step(self) -> None:
        found = iter(self.parameters)
        for p in self.blocks.values():
            assert p.grad is not None
            for grad in p.grad if p.ndim == 3 else [p.grad]:
                next(found).grad = grad.clone()
        self.muon.step()
        self.adamw.step()
        found = iter(self.parameters)
        with torch.no_grad():
            for p in self.blocks.values():
                for mine in p if p.ndim == 3 else [p]:
                    mine.copy_(next(found))


@pytest.mark.parametrize(
    ("numbers", "theirs"),
    [
        ({}, {}),
        ({"match_rms_adamw": True}, {"adjust_lr_fn": "match_rms_adamw"}),
        ({"nesterov": False}, {"nesterov": False}),
    ],
)
def test_a_step_is_torchs_own_to_rounding(tmp_path, numbers, theirs):
    plain, (model, optimizer) = Net(), begin(tmp_path, "host", **numbers)
    reference = Theirs(plain, **theirs)
    for number in range(2):  # later ones drift apart: a gradient in the last place turns a bit of bfloat16
        plain.zero_grad()
        plain(batch(number)).backward()
        reference.step()
        run(model, optimizer, range(number, number + 1))
        ours = infinity.state_dict(model)
        for name, wanted in plain.state_dict().items():
            length = 0.02 * (0.2 * 12 if "match_rms_adamw" in numbers else 1.8)
            if number == 0:
                assert (ours[name] - wanted).abs().max() < 0.02 * length, name
            assert (ours[name] - wanted).abs().mean() < (1e-3 + 4e-3 * number) * length, name
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_pass_is_its_plain_arithmetic_bitwise_compiled_or_by_torch(dtype):
    rule, n = find_rule("muon"), 3000
    placed, layout = HostRule(rule, dtype), rule.layout(dtype)
    group = {**rule.defaults, "lr": 0.1, "shape": (8, 2), "back": 4.0}
    generator = torch.Generator().manual_seed(1)
    master, momentum = torch.randn(n, generator=generator), torch.zeros(n)
    weight, fields = torch.empty(n, dtype=dtype), layout.complete((), n)
    store_master(layout, master, weight, fields)
    by_torch = [each.clone() for each in (weight, *fields)]
    for step in range(1, 4):
        grad = torch.randn(n, generator=generator).to(dtype)
        first = rule.first.hyper(group, step=step, grad_scale=0.5)
        last = rule.last.hyper(group, step=step)
        toward, decay, rate = torch.tensor(1 - 0.95), torch.tensor(1 - 0.1 * 0.1), torch.tensor(0.1 * 2.0)
        g = grad.float() * 0.5
        momentum = momentum + toward * (g - momentum)
        direction = ((momentum + toward * (g - momentum)) * 4).to(dtype)
        master = master * decay - rate * direction.float()
        for values, update in (
            ([weight, *fields], lambda own, *args: placed.update(*args, own)),
            (by_torch, lambda own, w, g, s, o, h: own.update_by_torch(
                w, g, layout.select(s, own.layout(w.dtype)), o, h)),
        ):  # fmt: skip
            given = grad.clone()
            update(rule.first, given, given, tuple(values[1:]), given, first)
            assert torch.equal(given, direction)
            update(rule.last, values[0], given, tuple(values[1:]), values[0], last)
            assert torch.equal(master_of(layout, values[0], tuple(values[1:])), master)
            assert torch.equal(layout.load_moments(tuple(values[1:]), len(momentum))[0], momentum)
    assert rule.first.loop(dtype) is not None
    assert rule.last.loop(dtype) is not None


@pytest.mark.parametrize(
    ("dtype", "clip", "micro"),
    few(
        [("fp32", None, 1), ("bf16", 0.5, 2)],
        [(d, c, m) for d in ("fp32", "bf16", "fp16") for c in (None, 0.5) for m in (1, 2)],
    ),
)
def test_every_place_gives_the_same_bits(tmp_path, dtype, clip, micro):
    how: dict[str, Any] = {"dtype": dtype, "clip": clip, "micro": micro}
    host, nvme = (trained(tmp_path, where, **how) for where in ("host", "nvme"))
    assert same(host, nvme)
    one = trained(tmp_path, "nvme", more=("memory.versions=1",), **how)
    assert same(host, one)


@pytest.mark.parametrize("master", few(("bf16-stochastic",), ("bf16-stochastic", "kahan")))
def test_weights_of_another_master_have_the_same_bits_in_every_place(tmp_path, master):
    how: dict[str, Any] = {"dtype": "bf16", "clip": 0.5}
    host, nvme = (
        trained(tmp_path, where, more=(f"optim.master={master}",), **how) for where in ("host", "nvme")
    )
    assert same(host, nvme)
    assert not same(host, trained(tmp_path, "host", **how))


def play(folder: str, cases: list[tuple[str, str, float | None, str]]) -> list[dict[str, Tensor]]:
    return [trained(folder, where, dtype=d, clip=c, name=name) for where, d, c, name in cases]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (
            2,
            [
                ("host", "fp32", 0.5, "muon"),
                ("nvme", "fp32", None, "muon"),
                ("nvme", "fp32", 0.5, "adafactor"),
                ("nvme", "fp32", 0.5, "galore+rank=4"),
            ],
        ),
        pytest.param(
            4,
            [(w, d, c, "muon") for w in ("host", "nvme") for d in ("fp32", "bf16") for c in (None, 0.5)]
            + [
                (w, "fp32", c, n)
                for w in ("host", "nvme")
                for c in (None, 0.5)
                for n in ("adafactor", "schedulefree", "adamw8bit", "apollo+rank=4", "apollo-mini", "soap")
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_with_equal_gradients_train_as_one(tmp_path, ranks, cases):
    one, several = (run_ranks(play, n, str(tmp_path / str(n)), cases) for n in (1, ranks))
    for number in range(len(cases)):
        assert same(one[0][number], several[0][number])


def held_nbytes(model: nn.Module) -> int:
    return runtime_of(model).storage.host_pool.held["sums of matrices"]


def go_on(folder: str, name: str, last: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of the steps after the last commit, states, and bytes of what this rank keeps of matrices."""
    model, optimizer = begin(folder, "nvme", clip=0.5, name=name)
    losses = run(model, optimizer, range(infinity.resume(model, optimizer), last))
    found, held = state(model, optimizer), held_nbytes(model)
    aside = sum(nbytes for key, nbytes in runtime_of(model).tiers.taken.items() if key < 0)
    assert held <= rounded(aside)
    optimizer.synchronize()
    infinity.close(model, keep=True)
    return losses, found, held


KEEP = few(["galore+rank=4"], ["adafactor", "apollo+rank=4", "galore+rank=4", "soap"])


@pytest.mark.parametrize("name", KEEP)
def test_what_is_kept_of_matrices_is_with_its_owner_and_goes_on_with_other_ranks(tmp_path, name):
    [(losses, final, whole)] = run_ranks(go_on, 1, str(tmp_path / "plain"), name, 5)
    went: list[float] = []
    for ranks, last in ((1, 1), (2, 3), (4, 4), (1, 5)):
        done = run_ranks(go_on, ranks, str(tmp_path / "moved"), name, last)
        went += done[0][0]
        held = [each for _, _, each in done]
        assert max(held) < 1.5 * whole / ranks
    assert went == losses
    assert same(done[0][1], final)


def thaw(folder: str, steps: int, when: str) -> dict[str, Tensor]:
    """States after so many steps; a group has more parameters from the third on, or before it goes on."""
    recipe = infinity.load_recipe(overrides=[*place(folder, "nvme"), "train.dtype=fp32"])
    with small_units(), infinity.Init(recipe):
        model = Net()
    more, *groups = ([*model.parameters()][part] for part in (slice(2), slice(2, 9), slice(9, None)))
    groups[0] += more if when == "made" else []
    params = [{"params": groups[0]}, {"params": groups[1], "lr": 0.01}]
    optimizer = infinity.optim.Adafactor(model, lr=0.02, params=params)
    optimizer.param_groups[0]["params"] += more if when == "appended" else []
    start = infinity.resume(model, optimizer)
    run(model, optimizer, range(start, 2))
    optimizer.param_groups[0]["params"] += more if when == "later" else []
    run(model, optimizer, range(max(2, start), steps))
    found = state(model, optimizer)
    optimizer.synchronize()
    infinity.close(model, keep=True)
    return found


def thaw_otherwise(folder: str) -> None:
    with pytest.raises(StateError, match="same parameters in the same order"):
        thaw(folder, 4, "made")


def test_what_is_kept_of_parameters_that_came_later_goes_on_or_is_missed(tmp_path):
    plain = thaw(str(tmp_path / "plain"), 5, "later")
    thaw(str(tmp_path / "one"), 3, "later")
    assert same(plain, thaw(str(tmp_path / "one"), 5, "appended"))
    two = str(tmp_path / "two")
    run_ranks(several, 2, (thaw, two, 3, "later"), (thaw_otherwise, two))


def save(folder: str, name: str) -> dict[str, Tensor]:
    model, optimizer = begin(folder, "host", name=name)
    run(model, optimizer, range(2))
    found, kept = state(model, optimizer), [optimizer.state_dict()]
    infinity.save_checkpoint(model, optimizer, Path(folder) / "saved")
    torch.distributed.broadcast_object_list(kept)
    run(model, optimizer, range(2, 3))
    optimizer.load_state_dict(kept[0])
    again = state(model, optimizer)
    assert torch.distributed.get_rank() or same(found, again)
    optimizer.close()
    return found


@pytest.mark.parametrize("name", KEEP)
def test_what_owners_keep_is_whole_in_dictionaries_and_portable_checkpoints(tmp_path, name):
    found = run_ranks(save, 2, str(tmp_path), name)[0]
    model, optimizer = begin(tmp_path, "host", name=name)
    infinity.load_checkpoint(model, optimizer, tmp_path / "saved")
    assert same(found, state(model, optimizer))
    optimizer.close()


def test_a_killed_run_goes_on_bitwise(tmp_path):
    model, optimizer = begin(tmp_path, "nvme", dtype="bf16", clip=1.0)
    losses, final = run(model, optimizer, range(4)), state(model, optimizer)
    infinity.close(model)
    model, optimizer = begin(tmp_path, "nvme", dtype="bf16", clip=1.0)
    assert run(model, optimizer, range(2)) == losses[:2]
    optimizer.synchronize()
    infinity.close(model, keep=True)
    model, optimizer = begin(tmp_path, "nvme", dtype="bf16", clip=1.0)
    assert infinity.resume(model, optimizer) == 2
    assert run(model, optimizer, range(2, 4)) == losses[2:]
    assert same(state(model, optimizer), final)
    infinity.close(model)


def test_states_in_host_memory_without_moments_are_committed_again_and_again(tmp_path):
    how: dict[str, Any] = {"name": "adafactor", "more": ("memory.resident=true", "durability.every=1")}
    losses = trained(tmp_path, "host", name="adafactor", steps=6)["losses"].tolist()
    model, optimizer = begin(tmp_path, "nvme", **how)
    assert run(model, optimizer, range(5)) == losses[:5]
    optimizer.synchronize()
    infinity.close(model, keep=True)
    model, optimizer = begin(tmp_path, "nvme", **how)
    assert infinity.resume(model, optimizer) == 5
    assert run(model, optimizer, range(5, 6)) == losses[5:]
    infinity.close(model)


@pytest.mark.parametrize(
    "name", few(["muon", "galore+rank=4"], ["muon", "adafactor", "apollo+rank=4", "galore+rank=4", "soap"])
)
def test_a_portable_checkpoint_and_a_state_dict_go_on_bitwise(tmp_path, name):
    how: dict[str, Any] = {"dtype": "bf16", "clip": 1.0, "name": name}
    model, optimizer = begin(tmp_path, "nvme", **how)
    run(model, optimizer, range(2))
    infinity.save_checkpoint(model, optimizer, tmp_path / "saved")
    saved = optimizer.state_dict()
    losses, final = run(model, optimizer, range(2, 4)), state(model, optimizer)
    infinity.close(model)
    for way in ("checkpoint", "dictionary"):
        model, optimizer = begin(tmp_path, "host", **how)
        if way == "checkpoint":
            assert infinity.load_checkpoint(model, optimizer, tmp_path / "saved") == 2
        else:
            optimizer.load_state_dict(saved)
        assert run(model, optimizer, range(2, 4)) == losses
        assert same(state(model, optimizer), final)
        infinity.close(model)


def test_chunks_with_only_matrices_do_not_move_second_moments(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.shards.storage.CHUNK_NUMEL", 4096)
    ours, moved = {}, {}
    for name in ("muon", "adamw"):
        model, optimizer = begin(tmp_path / name, "nvme", dtype="bf16", name=name)
        assert runtime_of(model).storage.chunk_numel == 4096
        run(model, optimizer, range(3))
        optimizer.synchronize()
        report = optimizer.report()
        assert (report.planned_nbytes_read, report.planned_nbytes_written) != (None, None)
        moved[name] = report.nbytes_written
        ours[name] = state(model, optimizer)
        infinity.close(model)
    assert moved["muon"] < 0.9 * moved["adamw"]  # a third of the chunks has both
    host = trained(tmp_path, "host", dtype="bf16")
    assert same(host, {**ours["muon"], "losses": host["losses"]})


@pytest.mark.slow
def test_adapters_have_the_same_bits_in_every_place_and_a_state_comes_back(tmp_path):
    found = []
    for where in ("host", "nvme"):
        recipe = infinity.load_recipe(overrides=[*place(tmp_path, where), "train.dtype=bf16"])
        with small_units(), infinity.Init(recipe):
            model = Net()
        model = infinity.add_lora(model, rank=4)
        optimizer = infinity.optim.Muon(model, lr=0.02, max_grad_norm=1.0)
        assert any(group["matrix"] for group in optimizer.param_groups)
        run(model, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        run(model, optimizer, range(2, 4))
        found.append(state(model, optimizer))
        optimizer.close()
    assert same(*found)


class Averaged(MatrixRule):
    """The user's own: a mean of gradients, of which each row gets the length 1."""

    name = "rows"
    matrix_moments = (Moment("mean"),)
    defaults: Mapping[str, Any] = {"lr": 1e-3, "beta": 0.9}

    def direction_numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        return (1 - group["beta"],)

    @staticmethod
    def direction(grad: Any, mean: Any, toward: Any) -> tuple[Any, ...]:
        mean = mean + toward * (grad - mean)
        return mean, mean

    def transform(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return matrix.float() / (matrix.float().norm(dim=1, keepdim=True) + 1e-8)


def test_the_users_own_has_everything(tmp_path):
    rule, more = find_rule("rows"), ("memory.host=256MiB",)
    assert [moment.name for moment in rule.moments] == ["mean", "exp_avg", "exp_avg_sq"]
    model, optimizer = begin(tmp_path, "nvme", name="rows", weight_decay=0.0, more=more)
    before = infinity.state_dict(model)["blocks.0.mix.weight"].clone()
    run(model, optimizer, range(1))
    moved = infinity.state_dict(model)["blocks.0.mix.weight"] - before
    torch.testing.assert_close(moved.norm(dim=1), torch.full((HIDDEN,), 0.02), rtol=1e-4, atol=1e-6)
    optimizer.close()
    assert same(*(trained(tmp_path, where, name="rows", clip=0.3, more=more) for where in ("host", "nvme")))


def test_what_is_a_matrix_and_what_is_not(tmp_path):
    model, optimizer = begin(
        tmp_path, "host", groups={"*mix.weight": {"matrix": False}, "*up.weight": {"parts": 3}}
    )
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    matrices = {
        name
        for name, group in found.items()
        if optimizer.rule.takes(group, dict(model.named_parameters())[name].shape)
    }
    assert matrices == {
        f"blocks.{n}.{name}" for n in (0, 1) for name in ("up.weight", "down.weight", "experts")
    }
    places = optimizer.rule.way(found["blocks.0.up.weight"], 256, (3 * HIDDEN, HIDDEN)).matrices
    assert [(p.start, p.rows, p.columns) for p in places] == [
        (256 + n * HIDDEN**2, HIDDEN, HIDDEN) for n in range(3)
    ]
    assert len(optimizer.rule.way(found["blocks.0.experts"], 0, (3, 16, HIDDEN)).matrices) == 3
    assert optimizer.rule.way(found["head.weight"], 0, (VOCABULARY, HIDDEN)).first is None
    optimizer.close()


def test_blocks_have_matrices_where_they_are_as_wide_as_there_are_tokens():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(HIDDEN, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.heads = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    model = Wide()
    embedded = embedded_in(model)
    found = {name for name, p in model.named_parameters() if p.ndim == 2 and not embedded(name, p)}
    assert found == {f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("up", "down", "mix")}


def test_a_transform_that_returns_another_shape_is_refused():
    class Turned(Averaged):
        name = "turned"

        def transform(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
            return matrix.T

    [matrix] = Turned().way({"matrix": True, "parts": 1}, 0, (2, 3)).matrices
    with pytest.raises(
        StateError, match=r"turned: transform\(\) of a matrix of shape \(2, 3\) returned \(3, 2"
    ):
        matrix.transform(torch.ones(2, 3))


def test_recipes_say_true_and_false_of_matrices():
    keys = ["optim.groups={'*mix*': {matrix: false, parts: 3}}", "optim.options={nesterov: false}"]
    optim = infinity.load_recipe(overrides=["optim.name=muon", *keys]).optim
    assert optim.groups == {"*mix*": {"matrix": False, "parts": 3.0}}
    assert optim.numbers["nesterov"] is False
    with pytest.raises(RecipeError, match=r"float \| true \| false"):
        infinity.load_recipe(overrides=["optim.options={nesterov: no way}"])


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (
            "optim.options={momentom: 0.9}",
            r"optim\.options .*got {'momentom': 0\.9}; .*did you mean momentum",
        ),
        ("optim.options={ns_steps: 2.5}", r"got {'ns_steps': 2\.5}; wanted a whole number"),
        ("optim.groups={'*x*': {nesterof: 1}}", r"optim\.groups .*{'\*x\*': {'nesterof': 1\.0}.* nesterov"),
        ("optim.groups={'*x*': {nesterov: 0.5}}", r"{'\*x\*': {'nesterov': 0\.5}}; wanted true or false"),
        ("optim.name=muonn", r"optim\.name .*got 'muonn'; .*did you mean muon"),
    ],
)
def test_a_wrong_number_is_found_when_the_recipe_is_read(keys, wanted):
    with pytest.raises(RecipeError, match=wanted):
        infinity.load_recipe(overrides=["optim.name=muon", keys])


@pytest.mark.parametrize("dtype", few(["bf16"], ["bf16", "fp32"]))
def test_an_average_beside_matrices_is_the_plain_one_in_every_place(tmp_path, dtype):
    found, weights, named = [], list[dict[str, Tensor]](), ("optim.name=muon", "optim.ema=0.5")
    for where in ("host", "nvme"):
        model, optimizer = begin(tmp_path, where, dtype=dtype, ema=0.5, more=named)
        average = {}
        for step in range(3):
            run(model, optimizer, range(step, step + 1))
            weights.append(state(model, optimizer))
            masters = {k: v for k, v in weights[-1].items() if k.endswith(".master")}
            average = {k: v if step == 0 else v + 0.5 * (average[k] - v) for k, v in masters.items()}
        for name, values in average.items():
            kept = weights[-1][name] + weights[-1][name.replace("master", "ema_offset")]
            torch.testing.assert_close(kept, values, rtol=1e-5, atol=1e-6)
        found.append(weights[-1])
        optimizer.close()
    assert same(*found)
    plain = trained(tmp_path, "host", dtype=dtype)
    assert all(torch.equal(found[0][name], plain[name]) for name in plain if name != "losses")


def test_a_group_that_comes_later_is_checked(tmp_path):
    model, optimizer = begin(tmp_path, "host")
    weight = model.blocks[0].up.weight
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not weight]
    with pytest.raises(SettingError, match=r"divides the rows of blocks\.0\.up"):
        optimizer.add_param_group({"params": [weight], "parts": 5})
    with pytest.raises(SettingError, match="divides the rows of conv, 4"):
        optimizer.rule.check_place({"matrix": True, "parts": 3}, "conv", (4, 1, 3, 3), tiled=False)
    optimizer.close()


def test_parts_are_matrices_of_their_own(tmp_path):
    """Three parts of a fused weight move as three weights would."""
    whole, parts = (
        trained(tmp_path, "host", steps=1, groups={"*up.weight": {"parts": n}})["blocks.0.up.weight"]
        for n in (1, 3)
    )
    assert not torch.equal(whole, parts)
    moved = parts - Net().state_dict()["blocks.0.up.weight"] * (1 - 0.02 * 0.1)
    for part in moved.chunk(3):  # each is nearly orthogonal
        assert (torch.linalg.svdvals(part / 0.02) < 1.3).all()


@pytest.mark.parametrize(
    ("more", "numbers", "wanted"),
    [
        (("partition.tile=4KiB",), {}, r"blocks.0.up.weight, which is in tiles .*partition.tile=never"),
        (
            (),
            {"groups": {"*up.weight": {"parts": 5}}},
            r"parts: got 5; wanted a whole number that divides the rows",
        ),
        ((), {"momentum": -1.0}, "momentum"),
        ((), {"ns_steps": 2.5}, "ns_steps: got 2.5; wanted a whole number"),
        ((), {"ns_steps": 0}, "ns_steps: got 0; wanted a whole number >= 1"),
        ((), {"momentum": 1.0}, "momentum: got 1.0; wanted a number >= 0 and < 1"),
        ((), {"name": "adafactor", "clip_threshold": 0.0}, "clip_threshold: got 0.0; wanted a number > 0"),
        ((), {"name": "schedulefree", "warmup_steps": 2.5}, "warmup_steps: got 2.5; wanted a whole number"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, more, numbers, wanted):
    try:
        with pytest.raises(RecipeError, match=wanted):
            begin(tmp_path, "nvme", more=more, **numbers)
    finally:
        for runtime in list(open_runtimes):
            runtime.close()


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_sums_over_rows_and_columns_are_in_the_host_budget(tmp_path, where):
    model, optimizer = begin(tmp_path, where, name="adafactor", more=("optim.name=adafactor",))
    storage, tiers = runtime_of(model).storage, runtime_of(model).tiers
    shapes = [shape for p in model.parameters() for shape in optimizer.rule.sums(p.shape).values()]
    nbytes = 4 * sum(map(math.prod, shapes))
    assert storage.host_pool.held["sums of matrices"] == rounded(nbytes)
    assert sum(each for index, each in tiers.taken.items() if index < 0) == nbytes
    assert all(each.is_contiguous() for kept in optimizer.sums.values() for each in kept.values())
    run(model, optimizer, range(1))
    assert all(bool(each.any()) for kept in optimizer.sums.values() for each in kept.values())
    infinity.close(model)


def test_owners_have_even_work():
    places, loads = [Place(0, n, n, torch.sign) for n in (8, 4, 4, 4, 4, 2, 2)], list[int]()
    found = owners(places, 2, loads)
    assert found[0] == 0
    assert set(found[1:5]) == {1}
    for _ in range(9):
        owners(places[:1], 2, loads)  # one matrix at a time goes around
    assert max(loads) - min(loads) <= 8**3


def test_sums_of_a_group_that_comes_later_are_in_the_host_budget(tmp_path, monkeypatch):
    overrides = [*place(tmp_path, "host"), "train.dtype=fp32", "optim.name=adafactor"]
    with small_units(), infinity.Init(infinity.load_recipe(overrides=overrides)):
        model = Net()
    params = list(model.parameters())
    optimizer = infinity.optim.Adafactor(model, lr=0.02, params=[{"params": params[:-1]}])
    pool = runtime_of(model).storage.host_pool
    before = pool.held["sums of matrices"]

    def refuse(nbytes: int, *, who: str) -> None:
        raise BudgetError(f"no room for {who}", "memory.host")

    with monkeypatch.context() as patch:  # nothing is left of it
        patch.setattr(pool, "lease", refuse)
        with pytest.raises(BudgetError, match="no room for sums of matrices"):
            optimizer.add_param_group({"params": params[-1:]})
    optimizer.add_param_group({"params": params[-1:]})
    shapes = optimizer.rule.sums(params[-1].shape).values()
    assert pool.held["sums of matrices"] == before + rounded(4 * sum(map(math.prod, shapes)))
    run(model, optimizer, range(2))
    ours = infinity.state_dict(model)
    optimizer.close()
    whole = trained(tmp_path, "host", steps=2, name="adafactor", more=("optim.name=adafactor",))
    assert all(torch.equal(values, whole[name]) for name, values in ours.items())


def test_room_is_set_aside_for_sums_of_what_is_trained(tmp_path):
    """Of a frozen base, which SOAP would need twice the memory for, there are none."""
    with (
        small_units(),
        infinity.Init(infinity.load_recipe(overrides=["optim.name=soap", "memory.host=32MiB"])),
    ):
        model = Net()
    model = infinity.add_lora(model, rank=4)
    optimizer = infinity.optim.SOAP(model)
    trained = [p.shape for p in model.parameters() if p.requires_grad]
    nbytes = 4 * sum(math.prod(of) for each in trained for of in optimizer.rule.sums(each).values())
    assert sum(each for index, each in runtime_of(model).tiers.taken.items() if index < 0) == nbytes
    run(model, optimizer, range(2))
    optimizer.close()


def test_an_average_and_another_master_beside_a_projection(tmp_path):
    keys = ["optim.name=galore", "optim.options={rank: 4}"]
    for more, wanted in ((["optim.ema=0.5"], "+ema"), (["optim.master=kahan"], "+kahan")):
        given = {"ema": 0.5} if wanted == "+ema" else {}
        found = []
        for where in ("host", "nvme"):
            overrides = [*place(tmp_path, where), "train.dtype=bf16", *keys, *more]
            with small_units(), infinity.Init(infinity.load_recipe(overrides=overrides)):
                model = Net()
            optimizer = infinity.optim.GaLore(model, lr=0.02, rank=4, **given)
            assert optimizer.rule.name == runtime_of(model).config.rule == f"galore+rank=4{wanted}"
            run(model, optimizer, range(2))
            found.append(state(model, optimizer))
            optimizer.close()
        assert same(*found)


@pytest.mark.parametrize("name", ["adafactor", "apollo+rank=1", "galore+rank=1", "soap", "muon"])
def test_parameters_of_no_dimension_or_no_element_are_trained(tmp_path, name):
    none = (0,) if "rank" in name else (0, 5)

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(none))

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * self.scale + self.none.sum()

    with small_units(), infinity.Init(infinity.load_recipe(overrides=place(tmp_path, "host"))):
        model = Scaled()
    optimizer = infinity.optim.Optimizer(model, name, lr=0.02)
    run(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    run(model, optimizer, range(2, 3))
    assert infinity.state_dict(model)["scale"] != 1
    optimizer.close()


def test_a_copy_of_an_optimizer_is_refused(tmp_path):
    _, optimizer = begin(tmp_path, "host")
    with pytest.raises(StateError, match=r"copy\.deepcopy of an optimizer.*load_state_dict"):
        copy.deepcopy(optimizer)
    optimizer.close()
