"""Every rule: its forms give the bits of a plain reference, and its source says what it computes."""

import contextlib
import ctypes
import importlib
import itertools
import math
import operator
import random
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from infinity.core.config import SettingError
from infinity.optim import formula, kernels
from infinity.optim.formula import Formula, elementwise_source, root, sign, where
from infinity.optim.rule import RULES, Rule
from infinity.optim.rules import HostRule, find_rule
from infinity.optim.state import (
    BLOCK_NUMEL,
    KAHAN,
    STOCHASTIC,
    Quantized,
    master_of,
    stochastic,
    store_master,
)  # fmt: skip
from tests.helpers import reference
from tests.helpers.cases import few
from tests.helpers.reference import compute_weight

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUMEL, STEPS = 3001, 20

#: By case: the rule, a group of it, its plain reference, and torch's own class.
CASES: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "adam": (
        "adam", {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, reference.adam_,
        torch.optim.Adam,
    ),
    "adamw8bit": (
        "adamw8bit", {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        reference.adamw8bit_, None,
    ),
    "adamw4bit": (
        "adamw4bit", {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        reference.adamw4bit_, None,
    ),
    "lion": ("lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}, reference.lion_, None),
    "schedulefree": (
        "schedulefree",
        {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 5},
        reference.schedulefree_, None,
    ),
    "sgd": (
        "sgd", {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        reference.sgd_, torch.optim.SGD,
    ),
    "momentum": (
        "sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "nesterov": False},
        reference.sgd_, torch.optim.SGD,
    ),
    "nesterov": (
        "sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
        reference.sgd_, torch.optim.SGD,
    ),
}  # fmt: skip


def gradient(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)).to(dtype)


def trained(rule: Rule, group: dict[str, Any], dtype: torch.dtype, *, by_torch: bool) -> list[Tensor]:
    """Weights, exact masters and moments after some steps, updated in three slices."""
    layout, placed = rule.layout(dtype), HostRule(rule, dtype)
    weight, state = torch.empty(NUMEL, dtype=dtype), layout.complete((), NUMEL)
    store_master(layout, gradient(0, torch.float32), weight, state)
    for step in range(1, STEPS + 1):
        hyper, grad = rule.hyper(group, step=step, grad_scale=0.7), gradient(step, dtype)
        for start, stop in ((0, 256), (256, 2816), (2816, NUMEL)):  # whole blocks
            part = weight[start:stop], grad[start:stop], layout.part(state, start, stop), weight[start:stop]
            (rule.update_by_torch if by_torch else placed.update)(*part, hyper)
    return [weight, master_of(layout, weight, state), *layout.load_moments(state, NUMEL)]


@pytest.mark.parametrize(
    ("case", "dtype"), few([*zip(CASES, [*DTYPES[1:], *DTYPES * 3])], itertools.product(CASES, DTYPES))
)
def test_every_form_gives_the_bits_of_the_plain_reference(case, dtype):
    name, group, plain, _ = CASES[case]
    rule = RULES[name]
    p, *moments = gradient(0, torch.float32), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(1, STEPS + 1):
        plain(p, *moments, gradient(step, dtype).float() * torch.tensor(0.7), step, group)
    wanted = [compute_weight(p, dtype), p, *moments[: len(rule.moments)]]
    assert rule.loop(dtype) is not None
    for by_torch in (False, True):
        for got, plainly in zip(trained(rule, group, dtype, by_torch=by_torch), wanted, strict=True):
            assert torch.equal(got, plainly)


def hashed(master: Tensor, step: int) -> Tensor:
    """Bfloat16 of fp32 values, rounded up as often as what is cut says, by a hash of value and step."""
    bits, given = master.numpy().view(np.uint32).astype(np.uint64), np.float32(step).view(np.uint32)
    mixed = bits ^ (int(given) * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    up = bits + ((mixed ^ (mixed >> np.uint64(16))) & np.uint64(0xFFFF))
    return torch.from_numpy((up >> np.uint64(16)).astype(np.uint16).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("case", ["adamw8bit", "lion", "momentum"])
@pytest.mark.parametrize(
    ("master", "dtype"), [(KAHAN, torch.bfloat16), (KAHAN, torch.float16), (STOCHASTIC, torch.bfloat16)]
)
def test_every_form_of_a_master_gives_the_bits_of_the_plain_reference(case, master, dtype):
    name, group, plain, _ = CASES[case]
    rule = RULES[name].with_master(master)
    weight = gradient(0, torch.float32).to(dtype)
    lost = (gradient(0, torch.float32) - weight.float()).to(dtype)
    moments = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    for step in range(1, STEPS + 1):
        p = weight.float() + lost.float() if master == KAHAN else weight.float()
        plain(p, *moments, gradient(step, dtype).float() * torch.tensor(0.7), step, group)
        for _ in range(2):  # the sum of the two is split again: it may be half a step from the weight
            weight = p.to(dtype) if master == KAHAN else hashed(p, step)
            lost = (p - weight.float()).to(dtype)
            p = weight.float() + lost.float() if master == KAHAN else p
    p = weight.float() + lost.float() if master == KAHAN else weight.float()
    assert rule.loop(dtype) is not None
    for by_torch in (False, True):
        got = trained(rule, group, dtype, by_torch=by_torch)
        wanted = [weight, p, *moments[: len(rule.moments)]]
        assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))


def test_stochastic_rounding_is_right_on_average_and_keeps_what_has_no_rounding():
    master = torch.linspace(1, 2, 2**12)
    rounded = [stochastic(master, torch.tensor(float(step))).float() for step in range(1, 401)]
    ulp, error = 2.0**-7, torch.stack(rounded) - master
    assert error.abs().max() < ulp
    assert abs(float(error.mean())) < 3 * ulp / 2 / (400 * 2**12) ** 0.5 + 1e-6
    assert float(error.mean(0).abs().max()) < 5 * ulp / 2 / 400**0.5  # of each value, over steps
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")])
    assert torch.equal(stochastic(special, torch.tensor(3.0)).float(), special)
    assert bool(stochastic(torch.tensor([float("nan")]), torch.tensor(1.0)).isnan().all())


def test_a_master_that_cannot_be_is_an_error():
    with pytest.raises(SettingError, match=r"optim\.master.* wanted exact for weights of torch\.float32"):
        RULES["lion"].with_master(KAHAN).layout(torch.float32)
    with pytest.raises(SettingError, match=r"wanted exact or kahan for weights of torch\.float16"):
        RULES["muon"].with_master(STOCHASTIC).layout(torch.float16)
    with pytest.raises(SettingError, match=r"optim\.master: got .*; wanted exact or kahan beside an average"):
        RULES["adamw"].averaged.with_master(STOCHASTIC)


#: Rules beside which an average can be kept.
OTHERS = [case for case in CASES if not RULES[CASES[case][0]].averages]


@pytest.mark.parametrize(
    ("case", "dtype"), few([*zip(OTHERS, DTYPES * 3)], itertools.product(OTHERS, DTYPES))
)
def test_an_average_is_the_plain_one_bitwise_and_that_of_torch_to_rounding(case, dtype):
    name, group, plain, _ = CASES[case]
    rule, decay = RULES[name].averaged, 0.9
    assert find_rule(rule.name).name == rule.name
    p, *moments, offset = gradient(0, torch.float32), *torch.zeros(3, NUMEL)
    theirs, multi_avg = torch.empty(0), get_ema_multi_avg_fn(decay)
    for step in range(1, STEPS + 1):
        before = p.clone()
        plain(p, *moments, gradient(step, dtype).float() * torch.tensor(0.7), step, group)
        offset = offset + (before - p)
        offset = offset - torch.tensor(1.0 if step == 1 else 1 - decay) * offset
        if step == 1:
            theirs = p.clone()
        else:
            multi_avg([theirs], [p], step)
    wanted = [compute_weight(p, dtype), p, *moments[: len(rule.moments) - 1], offset]
    assert rule.loop(dtype) is not None
    for by_torch in (False, True):
        got = trained(rule, {**group, "ema": decay}, dtype, by_torch=by_torch)
        assert all(torch.equal(each, plainly) for each, plainly in zip(got, wanted, strict=True))
    torch.testing.assert_close(p + offset, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][3]])
def test_it_follows_torchs_own(case):
    name, group, _, theirs = CASES[case]
    parameter = torch.nn.Parameter(gradient(0, torch.float32))
    optimizer = theirs([parameter], **group)
    for step in range(1, STEPS + 1):
        parameter.grad = gradient(step, torch.float32) * 0.7
        optimizer.step()
    weight, *_ = trained(RULES[name], group, torch.float32, by_torch=False)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("warmup", "decay", "beta"), [(0, 0.0, 0.9), (7, 0.1, 0.9), (3, 0.1, 0.5)])
def test_schedule_free_is_the_papers_algorithm_to_rounding(warmup, decay, beta):
    """Algorithm 1 of arXiv:2405.15682 with three sequences, in float64; and its authors' code, if here."""
    rule, lr, steps = RULES["schedulefree"], 0.01, 30
    group = {
        "lr": lr, "betas": (beta, 0.99), "eps": 1e-8, "weight_decay": decay, "warmup_steps": warmup,
    }  # fmt: skip
    y = z = x = gradient(0, torch.float32).double()
    v, weights, ours = torch.zeros_like(y), 0.0, [y.float(), torch.zeros(NUMEL), torch.zeros(NUMEL)]
    theirs = torch.nn.Parameter(y.float())
    package = None
    with contextlib.suppress(ImportError):
        package = importlib.import_module("schedulefree").AdamWScheduleFree([theirs], foreach=False, **group)
    for step in range(1, steps + 1):
        g = gradient(step, torch.float32)
        ours = [*rule.update(ours[0], g, *ours[1:], *rule.hyper(group, step=step)[:-2])]
        rate = lr * min(1, step / warmup) if warmup else lr
        v = 0.99 * v + 0.01 * g.double() ** 2
        z = z - rate * (g / ((v / (1 - 0.99**step)).sqrt() + 1e-8) + decay * y)
        weights += rate**2
        x = x + rate**2 / weights * (z - x)
        y = (1 - beta) * z + beta * x
        if package is not None:
            package.train()
            theirs.grad = g.clone()
            package.step()
    torch.testing.assert_close(ours[0].double(), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((ours[0] + ours[2]).double(), x, rtol=1e-5, atol=1e-5)
    if package is not None:
        torch.testing.assert_close(theirs.detach(), ours[0], rtol=1e-5, atol=1e-5)
        package.eval()
        torch.testing.assert_close(theirs.detach(), ours[0] + ours[2], rtol=1e-5, atol=1e-5)


HOST = """
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define asm(...)
static thread_local struct { int x; } blockIdx, blockDim, threadIdx;
static float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
static int __float_as_int(float f) { int x; memcpy(&x, &f, 4); return x; }
static std::mutex mutex;
static std::condition_variable all_here;
static int here = 0, turn = 0, words[BLOCK];
static void __syncthreads()
{
    std::unique_lock<std::mutex> lock(mutex);
    int mine = turn;
    if (++here == BLOCK) { here = 0; turn++; all_here.notify_all(); }
    else all_here.wait(lock, [=] { return turn != mine; });
}
static int __reduce_max_sync(unsigned, int word)
{
    words[threadIdx.x] = word;
    __syncthreads();
    const int first = threadIdx.x / 32 * 32;
    for (int i = first; i < first + 32; i++) word = word < words[i] ? words[i] : word;
    __syncthreads();
    return word;
}
static void atomicMax(int *most, int word)
{
    std::lock_guard<std::mutex> lock(mutex);
    *most = *most < word ? word : *most;
}
SOURCE
extern "C" void all(CALLED, int n)
{
    std::vector<std::thread> threads;
    for (int thread = 0; thread < BLOCK; thread++) threads.emplace_back([=] {
        for (int i = 0; i < (n + BLOCK - 1) / BLOCK; i++) {
            blockIdx.x = i, blockDim.x = BLOCK, threadIdx.x = thread;
            update(GIVEN, n);
        }
    });
    for (auto &each : threads) each.join();
}
"""


PLAIN = ["adamw", "adam", "adamw8bit", "adamw4bit", "lion", "schedulefree", "sgd", "adamw+ema", "sgd+ema"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [("adamw8bit", torch.bfloat16), ("schedulefree", torch.float32), ("adamw8bit+kahan", torch.bfloat16)],
        [
            *itertools.product(PLAIN, [torch.bfloat16, torch.float32]),
            ("adamw8bit+kahan", torch.bfloat16), ("adamw+bf16-stochastic", torch.bfloat16),
        ],
    ),
)  # fmt: skip
def test_the_source_for_cuda_computes_the_same_bits(tmp_path, name, dtype):
    """Compiled for the host, a thread for each of a block's, without fused multiply-adds."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    rule, layout, numel = find_rule(name), find_rule(name).layout(dtype), 1001
    assert rule.formula is not None
    source = elementwise_source(rule.formula, layout, dtype)
    taken = source.partition("void update(")[2].partition(", int n)")[0]
    names = ", ".join(each.split()[-1].lstrip("*") for each in taken.split(","))
    blocks = {moment.form.block for moment in layout.moments if isinstance(moment.form, Quantized)}
    text = HOST.replace("SOURCE", source).replace("CALLED", taken).replace("GIVEN", names)
    (tmp_path / "kernel.cpp").write_text(text.replace("BLOCK", str(*blocks or [1])))
    out = tmp_path / "kernel.so"
    flags = ["-O1", "-std=c++17", "-pthread", "-ffp-contract=off", "-shared", "-fPIC"]
    command = ["g++", *flags, "-o", str(out), str(tmp_path / "kernel.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    results = []
    for way in ("cuda", "cpu"):
        weight, state = torch.empty(numel, dtype=dtype), layout.complete((), numel)
        store_master(layout, gradient(0, torch.float32)[:numel], weight, state)
        moments = [gradient(2 + n, torch.float32)[:numel].abs() for n in range(len(rule.moments))]
        layout.store_moments(state, moments)
        for step in (3, 4):
            hyper = rule.hyper({**rule.defaults, "lr": 0.1, "weight_decay": 0.1}, step=step, grad_scale=0.7)
            grad = gradient(step, dtype)[:numel].clone()
            grad[300:600] = 0
            if way == "cpu":
                HostRule(rule, dtype).update(weight, grad, state, weight, hyper)
            else:
                pointers = [ctypes.c_void_p(each.data_ptr()) for each in (weight, grad, *state)]
                ctypes.CDLL(str(out)).all(*pointers, *hyper.view(torch.int32).tolist(), numel)
        results.append([weight, *state])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit"])
def test_threads_share_no_block_of_quantized_moments(name):
    """Slices of 65,600 elements would end within blocks of 256, and of 128."""
    rule, numel, results = find_rule(name), 3 * 65_600, []
    layout, hyper = rule.layout(torch.bfloat16), rule.hyper(rule.defaults, step=2)
    for threads in (1, 3):
        weight, state = torch.zeros(numel, dtype=layout.dtype), layout.complete((), numel)
        for step in (1, 2):
            grad = torch.randn(numel, generator=torch.Generator().manual_seed(step)).exp()
            HostRule(rule, layout.dtype, threads=threads).update(weight, grad, state, weight, hyper)
        results.append([weight, *state])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def exponential(weight, grad):
    return (weight.exp(),)


def that_looks(weight, grad):
    return (weight if grad > 0 else -weight,)


def without_end(weight, grad):
    return (weight * math.inf,)


def with_all(weight, grad, m, lr):
    """Every operation that is compiled."""
    for _ in range(2):
        m = -m * 0.1 + grad
    m -= 2 * lr
    sign = formula.sign(m)  # a name of what it is compiled with, and one that C++ reserves
    new = where(m >= 0.5, root(m * m), sign)
    return weight - lr * new, m


def test_every_operation_is_as_torch_has_it():
    read = Formula.of(with_all, 4)
    assert read is not None
    space = {**vars(kernels), "root": np.sqrt, "f32": np.float32}
    exec(read.python("compiled"), space)
    w, g, m = (gradient(n, torch.float32) for n in range(3))
    wanted = with_all(w, g, m, torch.tensor(0.3))
    for i in range(100):
        got = space["compiled"](*(each.numpy()[i] for each in (w, g, m)), np.float32(0.3))
        assert [float(each) for each in got] == [float(each[i]) for each in wanted]
    assert "f32(0.10000000149011612)" in read.cuda("step")


def test_what_is_no_arithmetic_of_one_element_is_left_to_torch():
    assert [Formula.of(each, 2) for each in (exponential, that_looks, without_end)] == [None] * 3
    assert float(sign(torch.tensor(float("nan")))) == 0


@pytest.mark.parametrize(
    "direction",
    [
        lambda g, m: g * random.random(),
        lambda g, m: g if isinstance(g, Tensor) else m,
        lambda g, m: (g > 0) + (m > 0),  # to torch 1 and 1 is 1
        lambda g, m: g * torch.tensor([0.1], dtype=torch.float64),
        lambda g, m: g * 1e39,
        lambda g, m: operator.iadd(m, g),
    ],
    ids=["random", "type", "comparisons", "float64", "infinite", "in place"],
)
def test_what_a_trace_does_not_tell_is_left_to_torch(direction: Any):
    assert Formula.of(lambda w, g, m: (w - direction(g, m), m), 3) is None


def test_constants_of_closures_and_loops_are_traced():
    rates = [0.1, 0.2]

    def made(w: Tensor, g: Tensor) -> tuple[Tensor]:
        for rate in rates:
            w = w - rate * g
        return (w,)

    read = Formula.of(made, 2)
    assert read is not None
    assert "f32(0.20000000298023224)" in read.python("compiled")


def dynamic_map(signed: bool) -> Tensor:
    """The table of dynamic quantization: decimal exponents, then linear fractions (arXiv:2110.02861)."""
    values = [0.0, 1.0]
    for digit in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (digit + (0 if signed else 1)) + 1)
        middle = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (digit - 6)).tolist()
        values += middle + ([-each for each in middle] if signed else [])
    return torch.tensor(sorted(values))


def dynamically(values: Tensor, signed: bool) -> Tensor:
    """What dynamic quantization in blocks of as many elements makes of ``values``."""
    table, blocks = dynamic_map(signed), values.view(-1, BLOCK_NUMEL)
    biggest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    return (table[torch.bucketize(blocks / biggest, (table[1:] + table[:-1]) / 2)] * biggest).view(-1)


def stored(values: Tensor, signed: bool) -> Tensor:
    form, n = Quantized(signed=signed), len(values)
    fields = [torch.empty(f.numel(n), dtype=f.dtype) for f in form.fields("x")]
    form.store(values, fields)
    again = [torch.empty_like(each) for each in fields]
    form.store(form.load(fields, n), again)  # as a checkpoint does, which has fp32
    assert all(torch.equal(one, two) for one, two in zip(fields, again, strict=True))
    return form.load(fields, n)


#: Mean absolute and relative errors that bitsandbytes' tests of its quantization allow; docs/optimizers.md.
ALLOWED = {"normal": (0.011, 0.018), "uniform": (0.0035, 0.015), "uniform, unsigned": (0.00175, 0.012)}


def test_errors_of_quantized_moments_beside_dynamic_quantization():
    normal = torch.randn(2**18, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(2**18, generator=torch.Generator().manual_seed(1))
    for name, values, signed in (
        ("normal", normal, True), ("squares", normal * normal, False), ("uniform", uniform, True),
        ("uniform, unsigned", uniform, False),
    ):  # fmt: skip
        found = []
        for quantized in (stored, dynamically):
            error = (quantized(values, signed) - values).abs()
            relative = error / (values.abs() + 1e-8)
            found.append((float(error.mean()), float(relative.mean())))
        ours, theirs = found
        if name in ALLOWED:  # the table is theirs
            assert theirs[0] < ALLOWED[name][0]
            assert theirs[1] < ALLOWED[name][1]
        if "uniform" not in name:
            assert ours[0] < min(1.06 * theirs[0], 0.0092)
            assert ours[1] < min(theirs[1], 0.0134)
        else:  # coarser near the largest value
            assert ours[0] < 1.7 * theirs[0]
            assert ours[1] < ALLOWED[name][1]


@pytest.mark.parametrize(("spread", "least"), few([(1.0, 5.0)], [(0.0, 0.85), (0.5, 1.2), (1.0, 5.0)]))
def test_weights_stay_nearer_to_those_of_fp32_moments_than_by_dynamic_quantization(spread, least):
    """50 steps of Adam whose gradients differ by powers of ten within a block, by ``spread`` on average."""

    def trained(*store: Any) -> Tensor:
        given = torch.Generator().manual_seed(3)
        weight, *moments = torch.randn(2**15, generator=given) * 0.1, torch.zeros(2**15), torch.zeros(2**15)
        sizes = 0.01 * 10 ** (spread * torch.randn(2**15, generator=given))
        for step in range(1, STEPS + 31):
            grad, rule = torch.randn(2**15, generator=given) * sizes, RULES["adam"]
            weight, *moments = rule.update(weight, grad, *moments, *rule.hyper(rule.defaults, step=step)[:-2])
            moments = [each(moment) for each, moment in zip(store, moments, strict=True)]
        return weight

    exact = trained(lambda m: m, lambda v: v)
    ours = trained(lambda m: stored(m, True), lambda v: stored(v, False))
    theirs = trained(lambda m: dynamically(m, True), lambda v: dynamically(v, False))
    apart = [float((each - exact).abs().mean() / exact.abs().mean()) for each in (ours, theirs)]
    assert apart[0] < 0.02
    assert least * apart[0] < apart[1]


SPECIAL = [0.0, -0.0, 1e-45, 1e-38, -1e-20, 1.0, -1.0, 3.4e38, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(["adamw8bit"], DTYPES), ("adamw4bit", torch.float32)]
)
def test_quantized_forms_give_the_same_bits_of_any_values(name, dtype):
    rule, n = RULES[name], 256 * len(SPECIAL) + 101
    layout, results = rule.layout(dtype), []
    for by_torch in (True, False):
        spread = torch.Generator().manual_seed(5)
        weight, state = torch.ones(n, dtype=dtype), layout.complete((), n)
        store_master(layout, torch.randn(n, generator=spread), weight, state)
        for step in range(1, 4):
            grad = torch.randn(n, generator=spread) * 10.0 ** (5 * torch.randn(n, generator=spread))
            grad[torch.randperm(n // 4, generator=spread)[: len(SPECIAL)]] = torch.tensor(SPECIAL)
            hyper = rule.hyper(rule.defaults, step=step)
            update = rule.update_by_torch if by_torch else HostRule(rule, dtype, threads=2).update
            update(weight, grad.to(dtype), state, weight, hyper)
        results.append([weight, *state])
    masters = [master_of(layout, weight, tuple(state)) for weight, *state in results]
    assert 0 < masters[0].isnan().sum() < n
    for one, two in zip(
        *([master, *layout.load_moments(result[1:], n)] for master, result in zip(masters, results))
    ):
        assert torch.equal(one.nan_to_num(7), two.nan_to_num(7))  # whatever the payload of a NaN


def test_a_second_moment_above_zero_stays_so():
    form, values = Quantized(signed=False), torch.tensor([1.0, 1e-30, 0.0, 1e-45])
    fields = [torch.empty(f.numel(4), dtype=f.dtype) for f in form.fields("x")]
    form.store(values, fields)
    assert (form.load(fields, 4) > 0).tolist() == [True, True, False, True]
