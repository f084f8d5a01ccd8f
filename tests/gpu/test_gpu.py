"""The CUDA path: placement never changes numbers there either. Runs where an accelerator is at hand."""

import pytest
import torch

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
