"""Promise 1 for activations: wherever they wait, and whether they are computed again, the same bits."""

import pytest

from infinity.activations import tensor_cache
from infinity.activations.controller import METERED
from tests.helpers import models, zoo
from tests.helpers.reference import Rule
from tests.helpers.training import assert_bitwise, reference, streaming, train

POLICIES = ("offload", "recompute", "plan")
#: Recomputed and planned in the fast suite, too.
FEW = ("llama", "t5", "mixtral", "gpt")


def steps_of(policy):
    """A plan comes after some passes."""
    return METERED + 2 if policy == "plan" else 4


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch):
    """Tiny models have tiny activations."""
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)


CASES = [
    pytest.param(name, policy, marks=[] if policy == "offload" or name in FEW else pytest.mark.slow)
    for name in (*zoo.NAMES, "gpt")
    for policy in POLICIES
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_activations_that_leave_memory_come_back_to_the_bit(tmp_path, name, policy):
    factory, batch = zoo.build(name, seed=1)
    dtype = "fp32" if name == "whisper" else "bf16"
    assert_exact(factory, batch, streaming(tmp_path, f"memory.activations={policy}"), policy, dtype=dtype)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_dtypes(tmp_path, policy, dtype):
    factory, batch = models.build("llama", seed=2)
    assert_exact(factory, batch, streaming(tmp_path, f"memory.activations={policy}"), policy, dtype=dtype)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ["threads", "libaio"])
def test_dropout_and_micro_batches(tmp_path, policy, engine):
    factory, batch = models.build("gpt2", seed=3, dropout=0.1)
    overrides = streaming(tmp_path, f"memory.activations={policy}", f"memory.engine={engine}")
    assert_exact(factory, batch, overrides, policy, accumulate=3, rule=Rule(max_grad_norm=None))


def assert_exact(factory, batch, overrides, policy, **options):
    options["steps"] = steps_of(policy)
    assert_bitwise(train(factory, batch, overrides, **options), reference(factory, batch, **options))
