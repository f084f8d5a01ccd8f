"""Checkpoints of transformers are read into models that are divided over a mesh of ranks, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import CheckpointError, StateError
from tests.helpers import models
from tests.helpers.launch import run_ranks, several
from tests.helpers.reference import Rule
from tests.helpers.training import optimizer_for, recipe, small_units, streaming
from tests.test_mesh import SCENARIOS, Plain, compare, mesh_of

WIDTHS = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 100}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def save(kind: str, folder: Path, dtype: torch.dtype) -> None:
    """Write a tiny checkpoint: untied Llama, or Qwen3, which is tied and has norms of heads."""
    import transformers

    tied, name = kind == "Qwen3", f"{kind}Config"
    config = getattr(transformers, name)(**WIDTHS, **HEADS, tie_word_embeddings=tied)
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)  # norms, too, are no longer ones
    model.to(dtype).save_pretrained(folder)


def whole(folder: str) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def auto(model: nn.Module, tp: Any) -> None:
    """What ``tp_plan="auto"`` stands for, in plain torch."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel import parallelize_module as divide

    columns = [f"self_attn.{each}_proj" for each in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    if type(model).__name__.startswith("Qwen3"):
        norms = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {f"model.layers.*.self_attn.{each}_norm": norms for each in "qk"}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    divide(model, tp, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def load_and_train(sizes: tuple[int, int], folder: str, dtype: str, place: list[str]) -> None:
    mesh, rule, (_, batch) = mesh_of(*sizes), Rule(), models.build("llama", seed=1)
    SCENARIOS["loaded"] = (lambda: (lambda: whole(folder), batch)), auto, 1
    theirs = Plain(mesh, dtype, rule, "loaded").train(3)
    with small_units():
        model = infinity.from_pretrained(folder, recipe(dtype, place), mesh=mesh, tp_plan="auto").train()
    optimizer, losses, norms = optimizer_for(model, rule), [], []
    for step in range(3):
        loss = model(**batch(step, mesh.get_local_rank("dp"), mesh.size(0))).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(optimizer.grad_norm)
    with torch.no_grad():
        assert model.eval()(**batch(0)).loss.isfinite()
    with infinity.gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    infinity.close(model)
    compare({"losses": losses, "norms": norms, "weights": weights}, theirs)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_a_checkpoint_is_read_into_a_divided_model_that_trains_as_plain_torch_does(tmp_path, sizes):
    calls = []
    for kind, stored, dtype in (
        ("Llama", torch.bfloat16, "bf16"), ("Qwen3", torch.float32, "bf16"), ("Qwen3", torch.float32, "fp32"),
    ):  # fmt: skip
        folder, files = tmp_path / f"{kind}-{stored}", tmp_path / f"{kind}{dtype}"
        if not folder.exists():
            save(kind, folder, stored)
        place = ["memory.host=64MiB"] if kind == "Llama" else streaming(files)
        calls.append((load_and_train, sizes, str(folder), dtype, place))
    run_ranks(several, sizes[0] * sizes[1], *calls)


def as_transformers(folder: str) -> None:
    """The gradients of ``tp_plan="auto"`` are those of transformers' own tensor parallelism."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mesh, given = mesh_of(1, 2), models.build("llama", seed=1)[1](0)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2)
    ).train()
    theirs_loss = theirs(**given).loss
    theirs_loss.backward()
    gradients = {}
    with small_units():
        model = infinity.from_pretrained(
            folder, recipe("fp32", ["memory.host=64MiB"]), mesh=mesh, tp_plan="auto"
        ).train()
    optimizer = infinity.AdamW(model, lr=1e-3)
    infinity.on_gradient(model, lambda name, grad: gradients.update({name: grad.clone()}))
    loss = model(**given).loss
    loss.backward()
    optimizer.step()
    assert loss.item() == theirs_loss.item()
    for name, param in theirs.named_parameters():
        grad = param.grad
        local = (
            grad.redistribute(placements=param.placements).to_local() if hasattr(grad, "placements") else grad
        )
        assert torch.equal(gradients[name], local.flatten()), name
    infinity.close(model)


def compiled(folder: str) -> None:
    """Blocks that are compiled, as torchtitan compiles them, and whole models train to the bit as others."""
    runs, (_, batch) = [], models.build("llama", seed=1)
    for compiles in ("nothing", "blocks", "all"):
        where = recipe("fp32", ["memory.host=64MiB"])
        model = infinity.from_pretrained(folder, where, mesh=mesh_of(1, 2), tp_plan="auto").train()
        optimizer, losses = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0), []
        for module in {"nothing": [], "blocks": model.model.layers, "all": [model]}[compiles]:
            module.compile(backend="eager")
        for step in range(3):
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), optimizer.grad_norm))
        infinity.close(model)
        runs.append(losses)
    assert runs[0] == runs[1] == runs[2]


def test_the_plan_auto_gives_the_gradients_of_transformers(tmp_path):
    save("Llama", tmp_path, torch.float32)
    run_ranks(several, 2, (as_transformers, str(tmp_path)), (compiled, str(tmp_path)))


def refuse(folder: str) -> None:
    mesh, base = mesh_of(1, 2), recipe("fp32", ["memory.host=64MiB"])
    with pytest.raises(CheckpointError, match="add mesh="):
        infinity.from_pretrained(folder, base, tp_plan="auto")
    for plan, match in (
        ({"lm_head": "diagonal"}, "no styles.*diagonal"), ({}, "wanted a plan"),
        ("automatic", "wanted 'auto'"),
        ({"lm_head": "colwise", "model.*.mlp.down": "rowwise"}, r"no modules model.\*.mlp.down$"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=match):
            infinity.from_pretrained(folder, base, mesh=mesh, tp_plan=plan)
    from transformers import LlamaForSequenceClassification as Classifier

    how: dict[str, Any] = {"auto_class": Classifier, "new": ["score*"], "ignore": ["lm_head*"], "mesh": mesh}
    with pytest.raises(CheckpointError, match=r"score\.weight is divided over ranks"):
        infinity.from_pretrained(folder, base, tp_plan={"score": "colwise"}, **how)
    model = infinity.from_pretrained(folder, base, tp_plan={"model.layers.*.mlp.up_proj": "colwise"}, **how)
    with infinity.gathered(model):
        assert model.score.weight.shape == (2, 32)
        assert model.score.weight.abs().sum() > 0
        assert dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"].shape == (40, 32)
    infinity.close(model)


def other_labels(folder: str) -> None:
    """A divided embedding and head add up what ranks give them, so that all gradients are alike."""
    mesh, (_, batch) = mesh_of(1, 2), models.build("llama", seed=1)
    how: dict[str, Any] = {"mesh": mesh, "tp_plan": "auto"}
    model = infinity.from_pretrained(folder, recipe("fp32", ["memory.host=64MiB"]), **how).train()
    optimizer, given = infinity.AdamW(model, lr=1e-3), batch(0)
    with torch.no_grad():
        model(**batch(mesh.get_local_rank("tp")))
    model(**given).loss.backward()
    optimizer.step()
    given["labels"][0, : 1 + mesh.get_local_rank("tp")] = -100
    model(**given).loss.backward()
    with pytest.raises(StateError, match="got other batches: the tokens, labels"):
        optimizer.step()
    infinity.close(model)


def by_function(folder: str, files: str) -> None:
    """A function of the user's divides; a base that stays frozen is read, in its parts, into own files."""
    mesh, given = mesh_of(1, 2), recipe("bf16", streaming(files))
    how: dict[str, Any] = {"mesh": mesh, "tp_plan": lambda model, mesh: auto(model, mesh["tp"])}
    model = infinity.from_pretrained(folder, given, frozen=True, **how)
    plain = whole(folder)
    auto(plain, mesh["tp"])
    with infinity.gathered(model):
        for name, param in model.named_parameters():
            local = getattr(plain.get_parameter(name), "_local_tensor", plain.get_parameter(name))
            assert torch.equal(param, local.to(torch.bfloat16)), name
            assert not param.requires_grad
    infinity.close(model)


def test_what_divides_may_be_a_function_and_what_does_not_go_together_is_an_error(tmp_path):
    save("Llama", tmp_path / "a", torch.bfloat16)
    run_ranks(
        several,
        2,
        (refuse, str(tmp_path / "a")),
        (other_labels, str(tmp_path / "a")),
        (by_function, str(tmp_path / "a"), str(tmp_path / "b")),
    )
