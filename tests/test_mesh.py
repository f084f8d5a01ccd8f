"""Models that are divided by tensor parallelism over a mesh of ranks train as plain ones do, to the bit."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.activations import tensor_cache as cache
from infinity.activations.controller import METERED
from infinity.core.config import SettingError
from infinity.core.errors import InfinityError, LaunchError, StateError
from infinity.engine.runtime import runtime_of
from tests.helpers import models
from tests.helpers.launch import ROOT, run_ranks, several
from tests.helpers.reference import Rule, adamw_, compute_weight
from tests.helpers.training import DTYPES, optimizer_for, recipe, small_units, streaming
from tests.test_docs import blocks_of

STEPS = 3
FREE = Rule(max_grad_norm=None)
COLUMNS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]


def mesh_of(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def divide(model: nn.Module, tp: Any) -> None:
    """Divide a Llama's blocks by columns and rows, its embedding by columns; norms and head not."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    plan["model.embed_tokens"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, tp, plan)


class Lines(nn.Module):
    """A residual stream of which a rank has a part of each sequence: gradients of norms add up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())
        return type("Output", (), {"loss": loss})


def lines() -> tuple[Any, Any]:
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {"tokens": torch.randint(64, (4, 8), generator=generator)}

    return models.seeded(Lines, batch, 1)


def divide_lines(model: nn.Module, tp: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norms.*": SequenceParallel(use_local_output=True),
        "ups.*": ColwiseParallel(input_layouts=Shard(1)),
        "downs.*": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize(model, tp, plan)


def recomputed(model: nn.Module, tp: Any) -> None:
    divide(model, tp)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


#: What makes a model and its batches, what divides it, and micro-batches of a step.
SCENARIOS: dict[str, tuple[Callable[[], tuple[Any, Any]], Callable[[nn.Module, Any], None], int]] = {
    "llama": (functools.partial(models.build, "llama", seed=1), divide, 1),
    "recomputed": (functools.partial(models.build, "llama", seed=1), recomputed, 1),
    "accumulated": (functools.partial(models.build, "llama", seed=1), divide, 2),
    "lines": (lines, divide_lines, 1),
}


def train(
    mesh: Any, dtype: str, overrides: list[str], rule: Rule, steps: int = STEPS, name: str = "llama",
    **how: Any,
) -> dict[str, Any]:  # fmt: skip
    make, apply, accumulate = SCENARIOS[name]
    factory, batch = make()
    with small_units(), infinity.Init(recipe(dtype, overrides), mesh=mesh):
        model = factory()
        apply(model, mesh["tp"])
    optimizer = optimizer_for(model, rule)
    first = infinity.resume(model, optimizer) if how.get("resumes") else 0
    if "load" in how:
        first = infinity.load_checkpoint(model, optimizer, how["load"])
    losses, norms = [], []
    for step in range(first, steps):
        for micro in range(accumulate):
            with contextlib.nullcontext() if micro == accumulate - 1 else infinity.no_sync(model):
                given = batch(accumulate * step + micro, mesh.get_local_rank("dp"), mesh.size(0))
                loss = model(**given).loss
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        norms.append(optimizer.grad_norm)
    with infinity.gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if "save" in how:
        infinity.save_checkpoint(model, optimizer, how["save"])
    infinity.close(model, keep=how.get("keep", False))
    return {"losses": losses, "norms": norms, "weights": weights, "first": first}


def taken_mean(param: Any, dp: Any) -> Tensor:
    """Return the mean over ``dp`` of a gradient, added in fp32 in the order of ranks, and take it away."""
    grad, param.grad = param.grad, None
    if hasattr(grad, "placements"):
        grad = grad.redistribute(placements=param.placements).to_local()
    every = [torch.empty_like(grad) for _ in range(dp.size())]
    dist.all_gather(every, grad.contiguous(), group=dp.get_group())
    mean = every[0].float()
    for other in every[1:]:
        mean += other.float()
    return mean / dp.size()


def local_of(param: Any) -> Tensor:
    return getattr(param, "_local_tensor", param).detach()


class Plain:
    """The same model and mesh in plain PyTorch: gradients are added in the order of ranks, in fp32."""

    def __init__(self, mesh: Any, dtype: str, rule: Rule, name: str) -> None:
        make, apply, self.accumulate = SCENARIOS[name]
        factory, self.batch = make()
        self.model, self.mesh, self.rule, self.dtype = factory(), mesh, rule, DTYPES[dtype]
        apply(self.model, mesh["tp"])
        self.masters = {n: local_of(p).float().clone() for n, p in self.model.named_parameters()}
        for name, p in [*self.model.named_parameters()]:  # buffers stay in fp32
            new = nn.Parameter(p.detach().to(self.dtype))
            local_of(new).copy_(compute_weight(self.masters[name], self.dtype))
            for owner in self.model.modules():  # several, if it is tied
                owner._parameters.update({own: new for own, each in owner._parameters.items() if each is p})
        self.params = dict(self.model.named_parameters())
        self.m, self.v = ({n: torch.zeros_like(w) for n, w in self.masters.items()} for _ in range(2))

    def train(self, steps: int) -> dict[str, Any]:
        import torch.distributed as dist

        losses, norms = [], []
        dp, tp = self.mesh["dp"], self.mesh["tp"]
        for step in range(steps):
            for micro in range(self.accumulate):
                given = self.batch(self.accumulate * step + micro, dp.get_local_rank(), dp.size())
                loss = self.model(**given).loss
                loss.backward()
                losses.append(loss.item())
            grads = {name: taken_mean(p, self.mesh["dp"]) for name, p in self.params.items()}
            squares = [g.double().square().sum() for n, g in grads.items() if self._counts(self.params[n])]
            total = sum(squares, torch.zeros((), dtype=torch.float64))
            dist.all_reduce(total, group=tp.get_group())
            norms.append(math.sqrt(float(total)))
            self._update(grads, norms[-1], step)
        weights = {n: local_of(p).clone() for n, p in self.params.items()}
        return {"losses": losses, "norms": norms, "weights": weights}

    def _counts(self, param: Any) -> bool:
        divided = any(each.is_shard() for each in getattr(param, "placements", ()))
        return divided or self.mesh.get_local_rank("tp") == 0

    def _update(self, grads: dict[str, Tensor], norm: float, step: int) -> None:
        limit = self.rule.max_grad_norm
        factor = torch.tensor(1.0 if limit is None else min(1.0, limit / (norm + 1e-6)), dtype=torch.float32)
        for name, p in self.params.items():
            decay = self.rule.weight_decay if p.ndim >= 2 else 0.0
            state = self.masters[name], self.m[name], self.v[name], grads[name] * factor
            adamw_(*state, step + 1, self.rule.lr, decay, self.rule)
            local_of(p).copy_(compute_weight(self.masters[name], self.dtype))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["losses"] == theirs["losses"]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, weight in theirs["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


def places(folder: str) -> dict[str, list[str]]:
    return {
        "host": ["memory.host=64MiB"],
        "nvme": streaming(folder),
        "tight": streaming(folder, "memory.device=600KiB"),
        "part": [f"memory.nvme=[{folder}]", "memory.host=600KiB"],
        **{p: streaming(folder, f"memory.activations={p}") for p in ("offload", "recompute", "plan")},
    }


#: Name of the scenario, dtype and place.
Case = tuple[str, str, str]


def check_parity(sizes: tuple[int, int], folder: str, played: dict[Case, Rule]) -> list[dict[str, Tensor]]:
    """Compare each case with plain torch; return the weights that ranks along tp have alike."""
    mesh, theirs, alike = mesh_of(*sizes), dict[Any, Any](), []
    cache.LEAST_NBYTES = 512  # tiny models have tiny activations
    for (name, dtype, place), rule in played.items():
        steps, key = METERED + 2 if place == "plan" else STEPS, (name, dtype, place == "plan", rule)
        if key not in theirs:
            plain = Plain(mesh, dtype, rule, name)
            theirs[key] = plain.train(steps), plain
        result, plain = theirs[key]
        ours = train(mesh, dtype, places(folder)[place], rule, steps, name)
        compare(ours, result)
        whole = [n for n, p in plain.params.items() if local_of(p).shape == p.shape]
        assert len(whole) > 2
        alike.append({n: ours["weights"][n] for n in whole})
    return alike


def play(world: int, sizes: tuple[int, int], folder: str, played: dict[Case, Rule]) -> None:
    first, *others = run_ranks(check_parity, world, sizes, folder, played)
    for other in others:  # along dp all weights are alike, along tp those that are not divided
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


def test_a_model_divided_over_two_ranks_trains_to_the_bit_as_plain_torch_does(tmp_path):
    played = {
        ("llama", "fp32", "host"): Rule(), ("llama", "bf16", "tight"): FREE,
        ("llama", "bf16", "offload"): Rule(), ("llama", "bf16", "plan"): Rule(),
        ("llama", "bf16", "recompute"): FREE, ("recomputed", "bf16", "nvme"): Rule(),
        ("accumulated", "fp32", "part"): Rule(),
        ("lines", "fp32", "tight"): Rule(), ("lines", "bf16", "host"): FREE,
    }  # fmt: skip
    play(2, (1, 2), str(tmp_path), played)


def test_four_ranks_in_a_mesh_train_to_the_bit_as_plain_torch_does(tmp_path):
    played = {
        ("llama", "fp32", "nvme"): Rule(), ("llama", "bf16", "tight"): Rule(),
        ("llama", "bf16", "host"): FREE, ("lines", "bf16", "nvme"): Rule(),
    }  # fmt: skip
    play(4, (2, 2), str(tmp_path), played)


def test_two_ranks_with_batches_of_their_own_in_a_mesh_are_as_without_it(tmp_path):
    play(2, (2, 1), str(tmp_path), {("llama", "bf16", "nvme"): Rule()})


def whole_values(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a portable checkpoint, as torch reads it in one process."""
    import torch.distributed.checkpoint as dcp

    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in found.items()
        if hasattr(each, "size")
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def of_four_heads() -> tuple[Any, Any]:
    """A Llama that four ranks can divide, and its batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(hidden_size=32, intermediate_size=80, num_hidden_layers=2, vocab_size=100, **heads)
    _, batch = models.build("llama", seed=1)
    return models.seeded(lambda: LlamaForCausalLM(config), lambda generator: {}, 1)[0], batch


SCENARIOS["heads"] = of_four_heads, divide, 1


def run_in(sizes: tuple[int, int] | None, how: dict[str, Any]) -> dict[str, Any] | None:
    if sizes is None:
        return train_alone(**how)
    return train(mesh_of(*sizes), "bf16", streaming(how.pop("folder")), Rule(), name="heads", **how)


def train_alone(folder: str, load: str, save: str, steps: int) -> None:
    factory, _ = of_four_heads()
    with small_units(), infinity.Init(recipe("bf16", streaming(folder))):
        model = factory()
    optimizer = optimizer_for(model, Rule())
    assert infinity.load_checkpoint(model, optimizer, load) == steps
    infinity.save_checkpoint(model, optimizer, save)
    infinity.close(model)


def test_a_portable_checkpoint_has_whole_tensors_and_moves_between_meshes(tmp_path):
    files, steps = str(tmp_path / "files"), 2
    way = [(4, (2, 2)), (2, (1, 2)), (1, None), (2, (2, 1)), (4, (1, 4)), (4, (4, 1))]
    for number, (world, sizes) in enumerate(way):
        how = {"load": str(tmp_path / f"{number - 1}")} if number else {}
        how |= {"folder": files, "steps": steps, "save": str(tmp_path / f"{number}")}
        first = run_ranks(run_in, world, sizes, how)[0]
        if number == 0:
            began = first
    values = whole_values(str(tmp_path / "0"))
    for number in range(1, len(way)):
        others = whole_values(str(tmp_path / f"{number}"))
        assert values.keys() == others.keys()
        assert all(torch.equal(value, others[key]) for key, value in values.items()), way[number]
    for name, weight in began["weights"].items():
        whole = compute_weight(values[name], torch.bfloat16)
        assert torch.equal(weight, whole[tuple(slice(n) for n in weight.shape)]), name
    assert values["model.layers.0.mlp.down_proj.weight"].shape == (32, 80)
    assert values["optimizer.state.model.layers.0.mlp.down_proj.weight.exp_avg"].abs().sum() > 0


def named(folder: str) -> list[str]:
    return [f"memory.nvme=[{folder}]", "memory.host=64MiB", "run.name=divided"]


def resume_in_mesh(sizes: tuple[int, int], folder: str) -> None:
    whole = train(mesh_of(*sizes), "bf16", named(f"{folder}/whole"), Rule(), 4)
    halves = [
        train(mesh_of(*sizes), "bf16", named(folder), Rule(), n, keep=n < 4, resumes=n == 4) for n in (2, 4)
    ]
    assert [half["first"] for half in halves] == [0, 2]
    assert halves[0]["losses"] + halves[1]["losses"] == whole["losses"]
    assert all(torch.equal(weight, halves[1]["weights"][name]) for name, weight in whole["weights"].items())


def resume_in_another(sizes: tuple[int, int], folder: str) -> None:
    train(mesh_of(*sizes), "bf16", named(folder), Rule(), 2, keep=True)
    with pytest.raises(InfinityError, match="mesh of dp=2, tp=2, this one in dp=4, tp=1"):
        train(mesh_of(4, 1), "bf16", named(folder), Rule(), 4, resumes=True)


def test_an_interrupted_run_in_a_mesh_goes_on_to_the_bit_and_in_no_other_mesh(tmp_path):
    calls = (resume_in_mesh, (2, 2), str(tmp_path / "a")), (resume_in_another, (2, 2), str(tmp_path / "b"))
    run_ranks(several, 4, *calls)


def run_script(folder: str) -> None:
    [block] = [b for b in blocks_of(ROOT / "docs" / "training_loops.md") if "parallelize_module(" in b.text]
    os.chdir(folder)
    exec(compile(block.text, "<docs>", "exec"), {})


def test_the_script_of_the_docs_runs(tmp_path):
    run_ranks(run_script, 2, str(tmp_path))
    assert whole_values(str(tmp_path / "checkpoint"))["model.layers.1.mlp.down_proj.weight"].shape == (
        64,
        128,
    )


def refuse(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, base = mesh_of(1, 2), ["memory.host=64MiB"]
    for override in (
        "train.stages=true",
        "memory.shared=always",
        "partition.ranks_per_node=1",
        "optim.name=muon",
    ):
        more = ["train.schedule=layer"] if "stages" in override else []
        with pytest.raises(SettingError, match=f"{override.partition('=')[0]}.*with a mesh"):
            infinity.Init(recipe("fp32", [*base, *more, override]), mesh=mesh)
    with pytest.raises(LaunchError, match="a dimension 'dp'"):
        infinity.Init(recipe("fp32", base), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with pytest.raises(LaunchError, match="no DeviceMesh: wanted all 2 ranks"):
        infinity.Init(recipe("fp32", base), mesh=(1, 2))
    for width, over, match in (
        (33, mesh["tp"], "divides evenly"),
        (32, mesh["dp"], "give parallelize_module"),
    ):
        with pytest.raises(StateError, match=match), infinity.Init(recipe("fp32", base), mesh=mesh):
            parallelize_module(nn.Sequential(nn.Linear(16, width)), over, {"0": ColwiseParallel()})
    tiles = recipe("fp32", [*base, "partition.tile=1KiB"])
    with pytest.raises(StateError, match=r"partition\.tile=never"), infinity.Init(tiles, mesh=mesh):
        parallelize_module(nn.Sequential(nn.Linear(64, 64)), mesh["tp"], {"0": ColwiseParallel()})
    with infinity.Init(recipe("fp32", base), mesh=mesh):
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        with pytest.raises(StateError, match="divided already"):
            model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(32, 16), mesh["tp"], [Shard(1)]))
    optimizer = infinity.AdamW(model, lr=0.1)
    for ask in (optimizer.state_dict, lambda: infinity.export(model, folder)):
        with pytest.raises(StateError, match=r"infinity\.save_checkpoint"):
            ask()
    with pytest.raises(SettingError, match="with a mesh"):
        infinity.SequenceRanks(model, 2)
    with pytest.raises(StateError, match="mesh=mesh"):
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
    infinity.close(model)


def test_what_does_not_go_together_with_a_mesh_is_an_error_that_says_what_does(tmp_path):
    run_ranks(refuse, 2, str(tmp_path / "export"))


def find_traps() -> None:
    """What would train wrongly in silence is an error, and a whole state loads into a divided model."""
    mesh, base = mesh_of(1, 2), ["memory.host=64MiB"]
    rank, (factory, batch) = torch.distributed.get_rank(), models.build("llama", seed=1)
    with small_units(), infinity.Init(recipe("bf16", base), mesh=mesh):
        model = factory()
        divide(model, mesh["tp"])
    optimizer = optimizer_for(model, Rule())
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
    model(**batch(3 + rank)).loss.backward()
    with pytest.raises(StateError, match=r"same batch have other gradients.*got other batches"):
        optimizer.step()
    optimizer.zero_grad()
    model(**batch(3)).loss.backward()
    optimizer.step()
    torch.manual_seed(9)
    whole = {k: torch.randn_like(v) for k, v in factory().state_dict().items()}
    model.load_state_dict(whole)
    check_parts(model, whole, rank)
    infinity.close(model)
    with small_units(), infinity.Init(recipe("bf16", base), mesh=mesh):
        model = factory()
        divide(model, mesh["tp"])
        model.load_state_dict(whole)
    check_parts(model, whole, rank)
    infinity.close(model)
    with (  # noqa: PT012
        pytest.raises(StateError, match=r"^model\.layers\.1\.mlp\.down_proj\.weight was initialized after"),
        small_units(), infinity.Init(recipe("bf16", base), mesh=mesh),
    ):  # fmt: skip
        model = factory()
        divide(model, mesh["tp"])
        torch.manual_seed(4)
        model.model.layers[1].mlp.down_proj.reset_parameters()
    with (
        pytest.raises(StateError, match=r"^0\.weight is a DTensor over"),
        infinity.Init(recipe("fp32", base), mesh=mesh),
    ):
        divide_columns(nn.Sequential(nn.Linear(16, 32)), mesh["dp"])


def check_parts(model: nn.Module, whole: dict[str, Tensor], rank: int) -> None:
    with infinity.gathered(model):
        for name, param in model.named_parameters():
            cut = [dim for dim, size in enumerate(param.shape) if size != whole[name].shape[dim]]
            part = whole[name].chunk(2, cut[0])[rank] if cut else whole[name]
            rounded = part.to(param.dtype), compute_weight(part, param.dtype)  # as torch does, and as we do
            assert any(torch.equal(param, each) for each in rounded), name


def test_what_would_train_wrongly_in_silence_in_a_mesh_is_an_error():
    run_ranks(find_traps, 2)


def write_in_mesh() -> None:
    """Write what each rank has, and see it on all ranks along dp; a frozen parameter stays frozen."""
    mesh = mesh_of(2, 2)
    with infinity.Init(recipe("fp32", ["memory.host=64MiB"]), mesh=mesh):
        model = nn.Sequential(nn.Linear(16, 32, bias=False)).requires_grad_(False)
        divide_columns(model, mesh["tp"])
    with infinity.gathered(model, modify=True):
        assert model[0].weight.shape == (32, 16)
        next(model.parameters()).fill_(float(torch.distributed.get_rank()))
    with infinity.gathered(model):
        assert next(model.parameters()).eq(mesh.get_local_rank("tp")).all()
    assert not next(model.parameters()).requires_grad
    infinity.close(model)


def divide_columns(model: nn.Module, tp: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, tp, {"0": ColwiseParallel()})


def test_what_one_rank_writes_of_its_part_the_others_along_dp_get():
    run_ranks(write_in_mesh, 4)


def train_tied(folder: str) -> list[list[tuple[float, float | None]]]:
    """A vocabulary that is divided, of an embedding and a head that are one, with a mesh and without."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    numbers = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    config = LlamaConfig(**numbers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    figures = []
    for mesh in (None, mesh_of(1, 2)):
        torch.manual_seed(3)
        with small_units(), infinity.Init(recipe("fp32", streaming(folder)), mesh=mesh):
            model = LlamaForCausalLM(config)
            if mesh is not None:
                parallelize_module(model, mesh["tp"], plan)
        optimizer, run = optimizer_for(model, Rule()), []
        for step in range(STEPS):
            tokens = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            run.append((loss.item(), optimizer.grad_norm))
        infinity.close(model)
        figures.append(run)
    return figures


def test_a_divided_vocabulary_with_tied_weights_trains_as_one_rank_does_to_rounding(tmp_path):
    whole, divided = run_ranks(train_tied, 2, str(tmp_path))[0]
    for one, other in zip(whole, divided, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def slow_commits(folder: str) -> list[tuple[float, float]]:
    """When the first update of each step begins here, and the commit of the step before has landed."""
    rank, mesh, (factory, batch) = torch.distributed.get_rank(), mesh_of(1, 2), models.build("llama", seed=1)
    with small_units(), infinity.Init(recipe("bf16", streaming(folder, "run.name=slow")), mesh=mesh):
        model = factory()
        divide(model, mesh["tp"])
    optimizer, steps = optimizer_for(model, FREE), []
    records = runtime_of(model).records
    assert records.commits is not None
    wait, place = records.commits.wait, records.next_place
    landed, begun = list[float](), list[float]()

    def slow() -> None:
        wait()
        time.sleep(0.3 * rank)
        landed.append(time.monotonic())

    def noted(unit: Any) -> int:
        begun.append(time.monotonic())
        return place(unit)

    records.commits.wait, records.next_place = slow, noted
    for step in range(4):
        landed.clear()
        begun.clear()
        model(**batch(step)).loss.backward()
        optimizer.step()
        steps.append((begun[0], landed[0]))
    infinity.close(model)
    return steps


def test_no_rank_of_a_mesh_updates_before_all_have_recorded_the_step_before(tmp_path):
    ranks = run_ranks(slow_commits, 2, str(tmp_path))
    for step in (2, 3):  # which follow a known order
        begun, landed = zip(*(each[step] for each in ranks), strict=True)
        assert min(begun) > max(landed)
