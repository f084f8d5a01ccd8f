"""Promise 1 for activations: wherever they wait, and whether they are computed again, the same bits."""

import contextlib
import functools
from dataclasses import replace

import pytest

from infinity.activations import controller, tensor_cache
from infinity.activations.controller import METERED
from tests.activations.test_kept_models import Randomly
from tests.helpers import models, zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import assert_bitwise, reference, streaming, train

POLICIES = ("offload", "recompute", "plan")
#: In the fast suite: each kind of model, and each policy with several of them.
FEW = {
    "offload": ("t5", "vit", "deepseek_v3"),
    "recompute": ("llama",),
    "plan": ("mixtral",),
}


def steps_of(policy):
    """A plan comes after some passes."""
    return METERED + 2 if policy == "plan" else 4


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch):
    """Tiny models have tiny activations."""
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)


NAMES = (*zoo.NAMES, "gpt")
CASES = [(name, policy) for name in NAMES for policy in POLICIES]


@pytest.mark.parametrize(("name", "policy"), few([case for case in CASES if case[0] in FEW[case[1]]], CASES))
def test_activations_that_leave_memory_come_back_to_the_bit(tmp_path, name, policy):
    overrides = streaming(tmp_path, f"memory.activations={policy}")
    steps, dtype = steps_of(policy), "fp32" if name == "whisper" else "bf16"
    ours = train(*zoo.build(name, seed=1), overrides, steps=steps, dtype=dtype)
    assert_bitwise(ours, plain(name, steps, dtype))


@functools.cache
def plain(name, steps, dtype):
    """The plain loop of a model, once for the policies that take as many steps."""
    return reference(*zoo.build(name, seed=1), steps=steps, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "policy"),
    few([("fp32", "recompute")], [(d, p) for d in ("fp16", "fp32") for p in POLICIES]),
)
def test_dtypes(tmp_path, policy, dtype):
    options = {"steps": steps_of(policy), "dtype": dtype}
    ours = train(
        *models.build("llama", seed=2), streaming(tmp_path, f"memory.activations={policy}"), **options
    )
    assert_bitwise(ours, reference(*models.build("llama", seed=2), **options))


@pytest.mark.parametrize(
    ("engine", "policy"),
    few(
        [("libaio", "offload")],
        [(e, p) for e in ("threads", "libaio") for p in POLICIES],
    ),
)
def test_dropout_and_micro_batches(tmp_path, policy, engine):
    """Each micro-batch is a pass: a plan comes in the third step."""
    options = {"steps": 4, "accumulate": 3, "rule": Rule(max_grad_norm=None)}
    overrides = streaming(tmp_path, f"memory.activations={policy}", f"memory.engine={engine}")
    ours = train(*models.build("gpt2", seed=3, dropout=0.1), overrides, **options)
    assert_bitwise(ours, reference(*models.build("gpt2", seed=3, dropout=0.1), **options))


@contextlib.contextmanager
def operators_kept(share):
    """With ``memory.activations=recompute``, by chance such a share of operators does not run again."""
    with pytest.MonkeyPatch.context() as patch:
        kept, made = Randomly(1, share), controller.uniform
        patch.setattr(
            controller, "uniform", lambda *args, **kwargs: replace(made(*args, **kwargs), kept=kept)
        )
        patch.setattr(tensor_cache, "LEAST_NBYTES", 512)
        yield kept


@pytest.mark.parametrize(
    ("name", "share"), few([("mixtral", 0.5)], [(name, share) for name in NAMES for share in (0.5, 1.0)])
)
def test_operators_that_do_not_run_again_change_no_bit_of_a_run(tmp_path, name, share):
    dtype = "fp32" if name == "whisper" else "bf16"
    with operators_kept(share) as kept:
        ours = train(
            *zoo.build(name, seed=1),
            streaming(tmp_path, "memory.activations=recompute"),
            steps=4,
            dtype=dtype,
        )
    assert kept.used
    assert_bitwise(ours, plain(name, 4, dtype))


def trained_on_a_rank(folder, share):
    overrides = streaming(folder, "memory.activations=recompute")
    options = {"steps": 4, "accumulate": 2, "rule": Rule(max_grad_norm=1.0)}
    with operators_kept(share) as kept:
        return train(*models.build("gpt2", seed=3, dropout=0.1), overrides, **options), kept.used


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_operators_that_do_not_run_again_change_no_bit_of_two_ranks(tmp_path, share):
    found = run_ranks(trained_on_a_rank, 2, tmp_path, share)
    for (kept, used), (whole, none) in zip(found, run_ranks(trained_on_a_rank, 2, tmp_path / "whole", 0.0)):
        assert used
        assert not none
        assert_bitwise(kept, whole)
