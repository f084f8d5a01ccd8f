"""Stages of ``torch.distributed.pipelining`` train as in plain PyTorch with the same schedule, to the bit."""

import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.core.config import SettingError
from infinity.core.errors import PeerError, StateError
from infinity.engine.runtime import runtime_of
from tests.helpers.launch import ROOT, mark, run_ranks, several, start_ranks
from tests.helpers.reference import Rule, adamw_, compute_weight
from tests.helpers.training import DTYPES, optimizer_for, recipe, small_units, streaming
from tests.test_docs import blocks_of
from tests.test_mesh import local_of, taken_mean, whole_values

WIDTHS = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4, "vocab_size": 96}
MICRO, ROWS, LENGTH, STEPS = 4, 2, 12, 3
NAMES = ("pp", "dp", "tp")


class Stage(nn.Module):
    """The layers of one stage of a Llama, under the names that they have in the whole model."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        config = LlamaConfig(**WIDTHS, num_attention_heads=4, num_key_value_heads=2)
        config._attn_implementation = "sdpa"
        each, inner = WIDTHS["num_hidden_layers"] // count, nn.Module()
        if stage == 0:
            inner.embed_tokens = nn.Embedding(WIDTHS["vocab_size"], WIDTHS["hidden_size"])
        layers = range(stage * each, (stage + 1) * each)
        inner.layers = nn.ModuleDict({str(n): llama.LlamaDecoderLayer(config, n) for n in layers})
        inner.rotary_emb = llama.LlamaRotaryEmbedding(config)
        if stage == count - 1:
            inner.norm = llama.LlamaRMSNorm(WIDTHS["hidden_size"])
            self.lm_head = nn.Linear(WIDTHS["hidden_size"], WIDTHS["vocab_size"], bias=False)
        self.model = inner

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.model, "embed_tokens"):
            x = self.model.embed_tokens(x)
        places = self.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=places)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


def build(mesh: Any) -> Stage:
    torch.manual_seed(7 + mesh.get_local_rank("pp"))
    return Stage(mesh.get_local_rank("pp"), mesh.size(0))


def divide(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"model.layers.*.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    parallelize_module(model, mesh["tp"], plan | {"model.layers.*.mlp.down_proj": RowwiseParallel()})


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    given = logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    return functional.cross_entropy(*given) / MICRO


def tokens_of(step: int, dp: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dp)
    return torch.randint(WIDTHS["vocab_size"], (MICRO * ROWS, LENGTH), generator=generator)


def schedule_of(
    model: nn.Module, mesh: Any, kind: str, scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> Any:
    from torch.distributed import pipelining

    place, count = mesh.get_local_rank("pp"), mesh.size(0)
    stage = pipelining.PipelineStage(model, place, count, torch.device("cpu"), group=mesh["pp"].get_group())
    how: dict[str, Any] = {"loss_fn": lambda *given: scale(loss_of(*given)), "scale_grads": False}
    return getattr(pipelining, kind)(stage, MICRO, **how)


def run(schedule: Any, mesh: Any, step: int) -> list[float]:
    """Run one step's micro-batches; return the losses on the last stage."""
    tokens, losses = tokens_of(step, mesh.get_local_rank("dp")), list[Tensor]()
    first, last = mesh.get_local_rank("pp") == 0, mesh.get_local_rank("pp") == mesh.size(0) - 1
    schedule.step(*([tokens] if first else []), **({"target": tokens, "losses": losses} if last else {}))
    return [loss.item() for loss in losses]


def train(
    mesh: Any, kind: str, dtype: str, overrides: list[str], rule: Rule, first: int = 0, **how: Any
) -> dict[str, Any]:
    with small_units(), infinity.Init(recipe(dtype, overrides), mesh=mesh):
        model = build(mesh)
        divide(model, mesh)
    optimizer, losses, norms = optimizer_for(model, rule), [], []
    if "load" in how:
        assert infinity.load_checkpoint(model, optimizer, how["load"]) == first
    first = infinity.resume(model, optimizer) if "resumes" in how else first
    schedule = schedule_of(model, mesh, kind)
    for step in range(first, first + how["more"] if "more" in how else how.get("steps", STEPS)):
        with infinity.no_sync(model, micro_batches=MICRO):
            losses += run(schedule, mesh, step)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    if "save" in how:
        infinity.save_checkpoint(model, optimizer, how["save"])
    with infinity.gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    infinity.close(model, keep=how.get("keep", False))
    return {"losses": losses, "norms": norms, "weights": weights, "first": first}


def plain(mesh: Any, kind: str, dtype: str, rule: Rule) -> dict[str, Any]:
    """The same in plain PyTorch; each micro-batch is reduced in the order of ranks, and sums are in fp32."""
    import torch.distributed as dist

    model = build(mesh)
    divide(model, mesh)
    masters = {n: local_of(p).float().clone() for n, p in model.named_parameters()}
    for name, p in [*model.named_parameters()]:
        new = nn.Parameter(p.detach().to(DTYPES[dtype]))
        local_of(new).copy_(compute_weight(masters[name], DTYPES[dtype]))
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._parameters[own] = new
    params, dp = dict(model.named_parameters()), mesh["dp"]
    sums = {n: torch.zeros_like(w) for n, w in masters.items()}

    def add(name: str, param: Any) -> None:
        sums[name] += taken_mean(param, dp)

    for name, param in params.items():
        param.register_post_accumulate_grad_hook(lambda p, name=name: add(name, p))
    m, v = ({n: torch.zeros_like(w) for n, w in masters.items()} for _ in range(2))
    schedule, losses, norms = schedule_of(model, mesh, kind), [], []
    for step in range(STEPS):
        losses += run(schedule, mesh, step)
        own = [n for n, p in params.items() if hasattr(p, "placements") or mesh.get_local_rank("tp") == 0]
        total = sum((sums[n].double().square().sum() for n in own), torch.zeros((), dtype=torch.float64))
        total /= dp.size()
        dist.all_reduce(total)
        norms.append(math.sqrt(float(total)))
        limit = rule.max_grad_norm
        coefficient = 1.0 if limit is None else min(1.0, limit / (norms[-1] + 1e-6))
        factor = torch.tensor(coefficient, dtype=torch.float32)
        for name, p in params.items():
            decay = rule.weight_decay if p.ndim >= 2 else 0.0
            adamw_(masters[name], m[name], v[name], sums[name] * factor, step + 1, rule.lr, decay, rule)
            with torch.no_grad():
                local_of(p).copy_(compute_weight(masters[name], DTYPES[dtype]))
            sums[name].zero_()
    return {"losses": losses, "norms": norms, "weights": {n: local_of(p).clone() for n, p in params.items()}}


def mesh_of(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)


def check_parity(sizes: tuple[int, ...], kind: str, dtype: str, overrides: list[str], rule: Rule) -> None:
    mesh = mesh_of(*sizes)
    theirs = plain(mesh, kind, dtype, rule)
    ours = train(mesh, kind, dtype, overrides, rule)
    assert ours["losses"] == theirs["losses"]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12)
    for name, weight in theirs["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


HOST = ["memory.host=64MiB"]


def test_two_stages_train_to_the_bit_as_plain_torch_does(tmp_path):
    run_ranks(
        several, 2,
        (check_parity, (2, 1, 1), "Schedule1F1B", "fp32", HOST, Rule()),
        (check_parity, (2, 1, 1), "ScheduleGPipe", "bf16", streaming(str(tmp_path)), Rule()),
        (check_parity, (2, 1, 1), "Schedule1F1B", "bf16", HOST, Rule(max_grad_norm=None)),
    )  # fmt: skip


def test_four_ranks_with_stages_and_batches_or_parts_of_their_own_train_to_the_bit(tmp_path):
    run_ranks(
        several, 4,
        (check_parity, (2, 2, 1), "Schedule1F1B", "bf16", streaming(str(tmp_path)), Rule()),
        (check_parity, (2, 1, 2), "ScheduleGPipe", "bf16", HOST, Rule()),
        (check_parity, (4, 1, 1), "Schedule1F1B", "fp32", HOST, Rule(max_grad_norm=None)),
    )  # fmt: skip


def go_on(sizes: tuple[int, ...], whole: str, half: str, end: str, folder: str) -> None:
    """Save at the end, and in the middle unless it is there; go on from the middle, and save again."""
    if whole:
        train(mesh_of(*sizes), "Schedule1F1B", "bf16", HOST, Rule(), save=whole)
        train(mesh_of(*sizes), "Schedule1F1B", "bf16", HOST, Rule(), save=half, steps=2)
    train(mesh_of(*sizes), "Schedule1F1B", "bf16", streaming(folder), Rule(), 2, load=half, save=end)


def load_whole(folder: str, again: str) -> None:
    """One rank loads what stages saved, as a model of one stage, and saves it."""
    torch.manual_seed(0)
    with small_units(), infinity.Init(recipe("bf16", HOST)):
        model = Stage(0, 1)
    optimizer = optimizer_for(model, Rule())
    assert infinity.load_checkpoint(model, optimizer, folder) == STEPS
    infinity.save_checkpoint(model, optimizer, again)
    infinity.close(model)


def test_a_portable_checkpoint_of_stages_goes_on_in_other_meshes(tmp_path):
    whole, half, *ends = (str(tmp_path / name) for name in ("whole", "half", "a", "b", "c"))
    run_ranks(go_on, 2, (2, 1, 1), whole, half, ends[0], str(tmp_path / "files"))
    values = whole_values(whole)
    assert {f"model.layers.{n}.mlp.down_proj.weight" for n in range(4)} < values.keys()
    again = whole_values(ends[0])
    assert values.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in values.items())
    run_ranks(go_on, 4, (2, 1, 2), "", half, ends[1], str(tmp_path / "files"))
    for key, value in whole_values(ends[1]).items():  # other sums, in bf16
        assert torch.allclose(value, values[key], rtol=0.05, atol=5e-3), key
    run_ranks(load_whole, 1, whole, ends[2])
    alone = whole_values(ends[2])
    assert all(torch.equal(value, alone[key]) for key, value in values.items())


def refuse(folder: str) -> None:
    mesh = mesh_of(2, 1, 1)
    with pytest.raises(SettingError, match=r"durability\.copies.*with a mesh"):
        infinity.Init(recipe("fp32", named(folder, "durability.copies=2")), mesh=mesh)
    with infinity.Init(recipe("fp32", HOST), mesh=mesh):
        model = build(mesh)
    optimizer = optimizer_for(model, Rule())
    with pytest.raises(StateError, match=r"infinity\.save_checkpoint"):
        optimizer.state_dict()
    schedule = schedule_of(model, mesh, "Schedule1F1B")
    with pytest.raises(StateError, match="fewer backward passes"), infinity.no_sync(model, micro_batches=5):
        run(schedule, mesh, 0)
    optimizer.zero_grad()
    with infinity.no_sync(model, micro_batches=MICRO):
        run(schedule, mesh, 0)
    optimizer.step()
    assert optimizer.grad_norm > 0
    infinity.close(model)


def train_in_fp16(limit: float | None, where: list[str]) -> None:
    """The last stage scales its loss, by a power of two that the weights do not depend on."""
    mesh, weights = mesh_of(2, 1, 1), []
    for first in (2.0**10, 2.0**8):
        with infinity.Init(recipe("fp16", [*where, f"optim.loss_scale={first}"]), mesh=mesh):
            model = build(mesh)
        optimizer = optimizer_for(model, Rule(max_grad_norm=limit))
        schedule = schedule_of(model, mesh, "Schedule1F1B", optimizer.scale)
        for step in range(2):
            with infinity.no_sync(model, micro_batches=MICRO):
                run(schedule, mesh, step)
            optimizer.step()
            assert 0 < optimizer.grad_norm < 10
        with infinity.gathered(model):
            weights.append([p.detach().clone() for p in model.parameters()])
        infinity.close(model)
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=2e-3)


def fail_in_one() -> None:
    """A stage that fails ends the other one, which waits for it at ``step()``."""
    mesh = mesh_of(2, 1, 1)
    with infinity.Init(recipe("fp32", HOST), mesh=mesh):
        model = build(mesh)
    optimizer = optimizer_for(model, Rule())
    with infinity.no_sync(model, micro_batches=MICRO):
        run(schedule_of(model, mesh, "Schedule1F1B"), mesh, 0)
    if mesh.get_local_rank("pp") == 1:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            infinity.close(model)
    else:
        with pytest.raises(PeerError, match=r"rank 1 .*ZeroDivisionError"):
            optimizer.step()
        infinity.close(model)


def test_what_does_not_go_together_with_stages_is_an_error_and_a_stage_that_fails_ends_all(tmp_path):
    run_ranks(several, 2, (refuse, str(tmp_path)), (fail_in_one,))


def run_script(folder: str) -> None:
    [block] = [b for b in blocks_of(ROOT / "docs" / "training_loops.md") if "PipelineStage" in b.text]
    os.chdir(folder)
    exec(compile(block.text, "<docs>", "exec"), {})


def test_fp16_trains_in_all_stages_by_the_scale_of_the_last_one(tmp_path):
    run_ranks(several, 2, (train_in_fp16, 1.0, HOST), (train_in_fp16, None, streaming(str(tmp_path))))


def test_the_script_of_the_docs_runs(tmp_path):
    run_ranks(run_script, 2, str(tmp_path))
    values = whole_values(str(tmp_path / "checkpoint"))
    assert {
        "model.embed_tokens.weight",
        "model.layers.3.mlp.up_proj.weight",
        "lm_head.weight",
    } < values.keys()


def named(folder: str, *more: str) -> list[str]:
    return [f"memory.nvme=[{folder}]", "run.name=stages", *more]


def resume_stages(sizes: tuple[int, ...], folder: str, more: list[str]) -> None:
    mesh, how = mesh_of(*sizes), ("Schedule1F1B", "bf16")
    whole = train(mesh, *how, named(f"{folder}/whole", *more), Rule(), steps=5)
    halves = [
        train(mesh, *how, named(folder, *more), Rule(), steps=n, keep=n < 5, resumes=True) for n in (3, 5)
    ]
    assert [half["first"] for half in halves] == [0, 3]
    assert halves[0]["losses"] + halves[1]["losses"] == whole["losses"]
    assert halves[0]["norms"] + halves[1]["norms"] == whole["norms"]
    assert all(torch.equal(weight, halves[1]["weights"][name]) for name, weight in whole["weights"].items())


def test_an_interrupted_run_of_stages_goes_on_to_the_bit(tmp_path):
    on_nvme = ["memory.host=200KiB", "memory.resident=false"]
    run_ranks(
        several, 2,
        (resume_stages, (2, 1, 1), str(tmp_path / "a"), ["memory.host=64MiB", "durability.every=1"]),
        (resume_stages, (2, 1, 1), str(tmp_path / "b"), on_nvme),
    )  # fmt: skip
    run_ranks(resume_stages, 4, (2, 2, 1), str(tmp_path / "c"), on_nvme)


def slow_commits(folder: str) -> list[tuple[float, float]]:
    """When the first update of each step begins here, and the commit of the step before has landed."""
    mesh, on_nvme = mesh_of(2, 1, 1), ["memory.host=200KiB", "memory.resident=false"]
    with small_units(), infinity.Init(recipe("bf16", named(folder, *on_nvme)), mesh=mesh):
        model = build(mesh)
    optimizer, steps = optimizer_for(model, Rule(max_grad_norm=None)), []
    schedule = schedule_of(model, mesh, "ScheduleGPipe")  # the last stage waits for no backward
    infinity.resume(model, optimizer)
    records = runtime_of(model).records
    assert records.commits is not None
    append, place = records.commits.append, records.next_place
    landed, begun = list[float](), list[float]()

    def slow(*args: Any) -> None:
        time.sleep(1.5 * (mesh.get_local_rank("pp") == 0))  # the last stage updates first
        append(*args)
        landed.append(time.monotonic())

    def noted(unit: Any) -> int:
        begun.append(time.monotonic())
        return place(unit)

    records.commits.append, records.next_place = slow, noted
    for step in range(4):
        begun.clear()
        with infinity.no_sync(model, micro_batches=MICRO):
            run(schedule, mesh, step)
        optimizer.step()
        steps.append((begun[0], landed[step - 1] if step else 0.0))
    infinity.close(model)
    return steps


def test_no_stage_updates_before_all_have_recorded_the_step_before(tmp_path):
    ranks = run_ranks(slow_commits, 2, str(tmp_path))
    for step in (1, 2, 3):
        begun, landed = zip(*(each[step] for each in ranks), strict=True)
        assert min(begun) > max(landed)


def train_until_killed(folder: str) -> None:
    on_nvme = ["memory.host=200KiB", "memory.resident=false"]
    with small_units(), infinity.Init(recipe("bf16", named(folder, *on_nvme)), mesh=mesh_of(2, 1, 1)):
        model = build(mesh := mesh_of(2, 1, 1))
        divide(model, mesh)
    optimizer = optimizer_for(model, Rule())
    schedule = schedule_of(model, mesh, "Schedule1F1B")
    first = infinity.resume(model, optimizer)
    for step in range(first, 10_000):
        with infinity.no_sync(model, micro_batches=MICRO):
            run(schedule, mesh, step)
        optimizer.step()
        mark(f"step{step - first}")


def test_stages_that_are_killed_at_random_moments_go_on_to_the_bit(tmp_path):
    generator = random.Random(3)
    for _ in range(3):
        with start_ranks(train_until_killed, 2, str(tmp_path / "a")) as ranks:
            ranks.reached("step1", 0)
            time.sleep(0.2 * generator.random())
            for rank in generator.sample(range(2), 2):
                ranks.kill(rank)
    on_nvme = ["memory.host=200KiB", "memory.resident=false"]
    how: tuple[Any, ...] = ("Schedule1F1B", "bf16")
    first, last = run_ranks(finish_killed, 2, str(tmp_path), on_nvme, how)
    assert first == last
    assert first >= 3


def finish_killed(folder: str, more: list[str], how: tuple[Any, ...]) -> int:
    """Go on after the kill to two more steps, and compare with a run that was not killed."""
    mesh = mesh_of(2, 1, 1)
    ours = train(mesh, *how, named(f"{folder}/a", *more), Rule(), resumes=True, more=2)
    theirs = train(mesh, *how, named(f"{folder}/b", *more), Rule(), steps=ours["first"] + 2)
    assert all(torch.equal(weight, ours["weights"][name]) for name, weight in theirs["weights"].items())
    first: int = ours["first"]
    return first
