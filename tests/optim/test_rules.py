"""One update, the same bits however it is computed."""

import os
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from infinity.optim.layout import StateLayout
from infinity.optim.master import master_of, split
from infinity.optim.rules import AdamWRule, Hyper

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.3)


class Shard:
    """Random weights, gradient and state of ``numel`` elements, with edges of the number range."""

    def __init__(self, dtype: torch.dtype, numel: int, grad_dtype: torch.dtype | None = None, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        size = torch.logspace(-30, 3, numel)[torch.randperm(numel, generator=random)]
        master = torch.randn(numel, generator=random) * size
        master[: numel // 8] = 0.0
        self.layout = StateLayout.of(dtype)
        self.weight = master.to(dtype)
        self.grad = (torch.randn(numel, generator=random) * size.flip(0)).to(grad_dtype or dtype)
        fields = {
            "master": master,
            "exp_avg": torch.randn(numel, generator=random) * size,
            "exp_avg_sq": torch.rand(numel, generator=random) * size,
        }
        if dtype == torch.bfloat16:
            self.weight, fields["remainder_high"], fields["remainder_low"] = split(master)
        self.state = tuple(fields[field.name].clone() for field in self.layout.fields)

    def copy(self) -> "Shard":
        other = object.__new__(Shard)
        other.layout, other.grad, other.weight = self.layout, self.grad, self.weight.clone()
        other.state = tuple(field.clone() for field in self.state)
        return other

    def bits(self) -> list[bytes]:
        return [t.view(torch.uint8).numpy().tobytes() for t in (self.weight, *self.state)]

    def update(self, rule: AdamWRule, hyper: Tensor, start: int = 0, stop: int | None = None) -> "Shard":
        part = slice(start, stop)
        state = tuple(field[part] for field in self.state)
        rule.update(self.weight[part], self.grad[part], state, self.weight[part], hyper)
        return self


def reference(shard: Shard, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW in float64: master, exp_avg, exp_avg_sq."""
    g = shard.grad.double() * hyper.grad_scale
    m, v = (field.double() for field in shard.state[-2:])
    p = master_of(shard.layout, shard.weight, shard.state).double() * (1 - hyper.lr * hyper.weight_decay)
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    root = (v / (1 - hyper.beta2**hyper.step)).sqrt()
    return p - hyper.lr * m / (1 - hyper.beta1**hyper.step) / (root + hyper.eps), m, v


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_adamw(dtype):
    shard = Shard(dtype, 4096)
    wanted = reference(shard, HYPER)
    shard.update(AdamWRule(dtype, compiled=False), HYPER.tensor())
    got = (master_of(shard.layout, shard.weight, shard.state), *shard.state[-2:])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-12)


def test_it_follows_torch_adamw_over_many_steps():
    parameter = torch.nn.Parameter(torch.randn(512))
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    weight, state = parameter.detach().clone(), (torch.zeros(512), torch.zeros(512))
    rule = AdamWRule(torch.float32, compiled=False)
    for step in range(1, 21):
        parameter.grad = torch.randn(512)
        theirs.step()
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, step=step)
        rule.update(weight, parameter.grad, state, weight, hyper.tensor())
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [*zip(DTYPES, DTYPES, strict=True), *((dtype, torch.float32) for dtype in DTYPES[:2])],
)
def test_compiled_and_eager_give_the_same_bits(dtype, grad_dtype):
    shard = Shard(dtype, 100_003, grad_dtype)
    hyper = HYPER.tensor()
    eager = shard.copy().update(AdamWRule(dtype, compiled=False), hyper)
    assert shard.copy().update(AdamWRule(dtype, threads=1), hyper).bits() == eager.bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    shard = Shard(dtype, 50_001)
    hyper = HYPER.tensor()
    results = [shard.copy().update(AdamWRule(dtype, threads=n), hyper).bits() for n in (1, 2, 3)]
    assert results[0] == results[1] == results[2]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(1, 5000),
    cuts=st.lists(st.integers(0, 5000), max_size=5),
    compiled=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_slicing_gives_the_same_bits(dtype, numel, cuts, compiled, seed):
    shard = Shard(dtype, numel, seed=seed)
    hyper = HYPER.tensor()
    whole = shard.copy().update(AdamWRule(dtype, compiled=False), hyper)
    rule = AdamWRule(dtype, threads=1, compiled=compiled)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for start, stop in pairwise(edges):
        shard.update(rule, hyper, start, stop)
    assert shard.bits() == whole.bits()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_or_into_another_buffer_of_the_same_storage_gives_the_same_bits(dtype, compiled):
    rule, hyper, numel = AdamWRule(dtype, threads=1, compiled=compiled), HYPER.tensor(), 4096
    shard = Shard(dtype, numel)
    in_place = shard.copy().update(rule, hyper)
    layout = shard.layout
    buffer = torch.empty(layout.state_nbytes(numel) + layout.weight_nbytes(numel), dtype=torch.uint8)
    state = layout.views(buffer[: layout.state_nbytes(numel)], numel)
    out = buffer[layout.state_nbytes(numel) :].view(dtype)
    for field, value in zip(state, shard.state, strict=True):
        field.copy_(value)
    rule.update(shard.weight, shard.grad, state, out, hyper)
    assert [t.view(torch.uint8).numpy().tobytes() for t in (out, *state)] == in_place.bits()


def test_new_numbers_and_sizes_compile_nothing_again():
    rule = AdamWRule(torch.bfloat16, threads=1)
    rule.prepare()
    before = counters["stats"]["unique_graphs"]
    for numel, step in ((1, 1), (2, 2), (17, 3), (4096, 4), (5000, 5)):
        Shard(torch.bfloat16, numel).update(rule, Hyper(lr=step * 1e-3, step=step).tensor())
    with torch.inference_mode():
        Shard(torch.bfloat16, 64).update(rule, HYPER.tensor())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    Shard(torch.bfloat16, 64).update(rule, HYPER.tensor())
    torch.set_num_threads(threads)
    assert counters["stats"]["unique_graphs"] == before


def test_many_threads_that_need_it_at_once_compile_it_once():
    said: list[str] = []
    rules = [AdamWRule(torch.float16, threads=5, on_compile=said.append) for _ in range(4)]
    shards = [Shard(torch.float16, 300) for _ in rules]
    threads = [
        threading.Thread(target=shard.update, args=(rule, HYPER.tensor()))
        for shard, rule in zip(shards, rules, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["compiling adamw update (once; cached afterwards)"]
    assert all(shard.bits() == shards[0].bits() for shard in shards)


NO_COMPILER = """
import warnings, torch
from infinity.optim.compiled import CompilerWarning
from infinity.optim.rules import AdamWRule, Hyper
rule = AdamWRule(torch.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        weight, state = torch.ones(100), (torch.zeros(100), torch.zeros(100))
        rule.update(weight, torch.ones(100), state, weight, Hyper(lr=0.5).tensor())
ours = [w for w in caught if issubclass(w.category, CompilerWarning)]
assert len(ours) == 1, caught
assert "install g++" in str(ours[0].message)
assert torch.allclose(weight, torch.full((100,), 0.5)), weight
"""


def test_without_a_compiler_it_runs_eagerly_and_says_so_once(tmp_path):
    env = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_source_serves_cuda(dtype):
    shard, wanted = Shard(dtype, 100_003), Shard(dtype, 100_003)
    wanted.update(AdamWRule(dtype, compiled=False), HYPER.tensor())
    weight, grad = shard.weight.cuda(), shard.grad.cuda()
    state = tuple(field.cuda() for field in shard.state)
    AdamWRule(dtype).update(weight, grad, state, weight, HYPER.tensor("cuda"))
    got = master_of(shard.layout, weight.cpu(), tuple(field.cpu() for field in state))
    torch.testing.assert_close(
        got, master_of(wanted.layout, wanted.weight, wanted.state), rtol=1e-5, atol=1e-7
    )


def test_a_reset_of_the_compiler_by_someone_else_changes_nothing() -> None:
    layout = StateLayout.of(torch.bfloat16)
    n, results = 4096, []
    rule = AdamWRule(torch.bfloat16)
    for reset in (False, True):
        buffer = torch.zeros(layout.weight_nbytes(n) + layout.state_nbytes(n), dtype=torch.uint8)
        weight = buffer[: layout.weight_nbytes(n)].view(torch.bfloat16)
        state = layout.views(buffer[layout.weight_nbytes(n) :], n)
        grad = torch.linspace(-1, 1, n, dtype=torch.bfloat16)
        if reset:
            torch._dynamo.reset()
        rule.update(weight, grad, state, weight, Hyper(lr=0.1).tensor())
        results.append(buffer)
    assert torch.equal(*results)


def test_after_a_reset_an_update_in_place_is_no_rule_for_those_that_follow() -> None:
    rule, eager = AdamWRule(torch.bfloat16), AdamWRule(torch.bfloat16, compiled=False)
    first = Shard(torch.bfloat16, 4096)
    first.update(rule, HYPER.tensor())
    torch._dynamo.reset()
    in_place = Shard(torch.bfloat16, 4096)
    rule.update(in_place.weight, in_place.grad, in_place.state, in_place.weight, HYPER.tensor())
    results = []
    for each in (rule, eager):
        apart, out = Shard(torch.bfloat16, 4096), torch.zeros(4096, dtype=torch.bfloat16)
        each.update(apart.weight, apart.grad, apart.state, out, HYPER.tensor())
        results.append(out)
    assert torch.equal(*results)
