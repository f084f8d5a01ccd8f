"""The CUDA path: placement never changes numbers there either. Runs where an accelerator is at hand."""

import pytest
import torch

import infinity
from infinity.activations import tensor_cache
from tests.helpers import models
from tests.helpers.reference import Rule
from tests.helpers.training import reference, streaming, train

pytestmark = pytest.mark.gpu


def on_gpu(batch):
    """The same batches, on the accelerator."""

    def moved(*args):
        return {key: value.cuda() for key, value in batch(*args).items()}

    return moved


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_placements_give_the_same_bits_on_the_accelerator(tmp_path, name, clip):
    factory, batch = models.build(name, seed=1)
    rule = Rule(max_grad_norm=clip)
    places = (
        ["memory.host=1GiB"],
        streaming(tmp_path, "memory.host=4MiB", "memory.engine=threads"),
        streaming(tmp_path, "memory.host=4MiB", "memory.versions=1"),
    )
    runs = [train(factory, on_gpu(batch), place, rule=rule, steps=8) for place in places]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.weights[k], v) for k, v in runs[0].weights.items())


def test_the_accelerator_is_within_rounding_of_the_plain_loop_on_the_cpu(tmp_path):
    factory, batch = models.build("llama", seed=2)
    plain = reference(factory, batch, dtype="fp32", steps=8)
    ours = train(factory, on_gpu(batch), streaming(tmp_path, "memory.host=4MiB"), dtype="fp32", steps=8)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", ["offload", "recompute", "plan"])
def test_activations_that_leave_the_accelerator_come_back_to_the_bit(tmp_path, monkeypatch, name, policy):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)
    factory, batch = models.build(name, seed=3, dropout=0.1 if name == "gpt2" else 0.0)
    place = streaming(tmp_path, "memory.host=4MiB", "memory.engine=threads")
    kept = train(factory, on_gpu(batch), place, steps=8)
    ours = train(factory, on_gpu(batch), [*place, f"memory.activations={policy}"], steps=8)
    assert ours.losses == kept.losses
    assert all(torch.equal(ours.weights[k], v) for k, v in kept.weights.items())


def test_activations_of_a_plain_model_wait_in_pinned_memory_or_on_nvme(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)
    factory, batch = models.build("llama", seed=4)
    model, given = factory().cuda(), on_gpu(batch)(0)
    losses = []
    for policy in ("keep", "offload"):
        with infinity.offload_activations(model, policy=policy, nvme=tmp_path, host="64MiB") as served:
            loss = model(**given).loss
            loss.backward()
            losses.append([loss.item(), *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
    assert served.cache.stats.nbytes_loaded > 0
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1:], losses[1][1:], strict=True))
