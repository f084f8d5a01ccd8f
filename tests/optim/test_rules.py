"""One update, the same bits however it is computed."""

import importlib
import importlib.util
import os
import re
import threading
import warnings
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from torch import Tensor

from infinity.optim import kernels
from infinity.optim.elementwise import ADAMW
from infinity.optim.formula import root_in_float64
from infinity.optim.rules import HostRule, prepare, sum_of_squares
from infinity.optim.state import master_of, split, store_master
from tests.helpers.cases import examples
from tests.helpers.launch import run_ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP, SCALE = 3, 0.3
HYPER = ADAMW.hyper(GROUP, step=STEP, grad_scale=SCALE)


class Shard:
    """Random weights, gradient and state of ``numel`` elements, with edges of the number range."""

    def __init__(self, dtype: torch.dtype, numel: int, grad_dtype: torch.dtype | None = None, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        size = torch.logspace(-30, 3, numel)[torch.randperm(numel, generator=random)]
        master = torch.randn(numel, generator=random) * size
        master[: numel // 8] = 0.0
        self.layout = ADAMW.layout(dtype)
        self.weight = master.to(dtype)
        self.grad = (torch.randn(numel, generator=random) * size.flip(0)).to(grad_dtype or dtype)
        fields = {
            "master": master,
            "exp_avg": torch.randn(numel, generator=random) * size,
            "exp_avg_sq": torch.rand(numel, generator=random) * size,
        }
        if dtype == torch.bfloat16:
            self.weight, fields["remainder"] = split(master)
        self.state = tuple(fields[field.name].clone() for field in self.layout.fields)

    def copy(self) -> "Shard":
        other = object.__new__(Shard)
        other.layout, other.grad, other.weight = self.layout, self.grad, self.weight.clone()
        other.state = tuple(field.clone() for field in self.state)
        return other

    def bits(self) -> list[bytes]:
        return [t.view(torch.uint8).numpy().tobytes() for t in (self.weight, *self.state)]

    def update(self, rule: HostRule, hyper: Tensor, start: int = 0, stop: int | None = None) -> "Shard":
        part = slice(start, stop)
        state = tuple(field[part] for field in self.state)
        rule.update(self.weight[part], self.grad[part], state, self.weight[part], hyper)
        return self

    def update_by_torch(self, hyper: Tensor) -> "Shard":
        ADAMW.update_by_torch(self.weight, self.grad, self.state, self.weight, hyper)
        return self


def reference(shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW in float64: master, exp_avg, exp_avg_sq."""
    lr, eps, (beta1, beta2) = GROUP["lr"], GROUP["eps"], GROUP["betas"]
    g = shard.grad.double() * SCALE
    m, v = (field.double() for field in shard.state[-2:])
    p = master_of(shard.layout, shard.weight, shard.state).double() * (1 - lr * GROUP["weight_decay"])
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    root = (v / (1 - beta2**STEP)).sqrt()
    return p - lr * m / (1 - beta1**STEP) / (root + eps), m, v


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_adamw(dtype):
    shard = Shard(dtype, 4096)
    wanted = reference(shard)
    shard.update(HostRule(ADAMW, dtype), HYPER)
    got = (master_of(shard.layout, shard.weight, shard.state), *shard.state[-2:])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-12)


def test_it_follows_torch_adamw_over_many_steps():
    parameter = torch.nn.Parameter(torch.randn(512))
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    weight, state = parameter.detach().clone(), (torch.zeros(512), torch.zeros(512))
    rule = HostRule(ADAMW, torch.float32)
    for step in range(1, 21):
        parameter.grad = torch.randn(512)
        theirs.step()
        rule.update(weight, parameter.grad, state, weight, ADAMW.hyper(GROUP, step=step))
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


def by_numpy(shard: Shard) -> tuple[np.ndarray, ...]:
    """Master, both moments and weight (as an integer) after the update, by numpy's elementwise float32."""
    decay, toward, beta2, fresh, rate, correction, eps, scale, _ = HYPER.numpy()
    exp_avg, exp_avg_sq = (field.numpy() for field in shard.state[-2:])
    with np.errstate(all="ignore"):
        g = shard.grad.to(torch.float32).numpy() * scale
        m = exp_avg + toward * (g - exp_avg)
        v = exp_avg_sq * beta2 + fresh * (g * g)
        p = exact(shard) * decay
        p = p - rate * (m / (np.sqrt(v) / correction + eps))
        bits = p.view(np.uint32)
        if shard.layout.dtype == torch.bfloat16:
            return p, m, v, ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16)
        return p, m, v, p.astype(np.float16).view(np.uint16) if shard.layout.dtype == torch.float16 else bits


def exact(shard: Shard) -> np.ndarray:
    """The fp32 masters, by the formula of the split."""
    if shard.layout.dtype != torch.bfloat16:
        return (shard.state[0] if shard.layout.dtype == torch.float16 else shard.weight).numpy()
    upper = shard.weight.view(torch.int16).numpy().astype(np.int32) << 16
    return (upper + shard.state[0].numpy()).view(np.float32)


#: Zeros, denormals, ties and edges of both 16-bit types, the largest numbers, infinities and NaN.
SPECIAL = [
    0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-14, 2.0**-25, 3 * 2.0**-25, 2.0**-24 * 1.5, -(2.0**-24),
    1 + 2.0**-8, 1 + 2.0**-9, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504.0, 65519.9, 65520.0, 1e30, 3.4028235e38,
    float("inf"), -float("inf"), float("nan"),
]  # fmt: skip
PAIRS = [*zip(DTYPES, DTYPES, strict=True), *((dtype, torch.float32) for dtype in DTYPES[:2])]


@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
def test_a_million_elements_and_the_special_values_are_as_numpy_has_them(dtype, grad_dtype):
    shard, special = Shard(dtype, 1_000_003, grad_dtype), torch.tensor(SPECIAL)
    masters, grads = special.repeat_interleave(len(special)), special.repeat(len(special))
    part = slice(7, 7 + len(masters))
    store_master(shard.layout, masters, shard.weight[part], tuple(f[part] for f in shard.state))
    shard.grad[part] = grads.to(grad_dtype)
    shard.state[-2][part], shard.state[-1][part] = grads.flip(0), grads.flip(0).abs()
    *floats, weight = by_numpy(shard)
    by_torch = shard.copy().update_by_torch(HYPER)
    for got in (shard.update(HostRule(ADAMW, dtype), HYPER), by_torch):
        ours = (exact(got), got.state[-2].numpy(), got.state[-1].numpy())
        for mine, wanted in zip(ours, floats, strict=True):
            nan = np.isnan(mine) & np.isnan(wanted)  # whatever their payload
            assert ((mine.view(np.uint32) == wanted.view(np.uint32)) | nan).all()
        nan = np.isnan(floats[0])
        assert (kernels.array(got.weight).view(weight.dtype) == weight)[~nan].all()
        assert got.weight.isnan().numpy()[nan].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    shard = Shard(dtype, 300_001)
    results = [shard.copy().update(HostRule(ADAMW, dtype, threads=n), HYPER).bits() for n in (1, 2, 3, 7)]
    assert all(result == results[0] for result in results)


@examples(40)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(1, 5000),
    cuts=st.lists(st.integers(0, 5000), max_size=5),
    seed=st.integers(0, 5),
)
def test_any_slicing_gives_the_same_bits(dtype, numel, cuts, seed):
    shard = Shard(dtype, numel, seed=seed)
    whole = shard.copy().update_by_torch(HYPER)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for start, stop in pairwise(edges):
        shard.update(HostRule(ADAMW, dtype), HYPER, start, stop)
    assert shard.bits() == whole.bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_or_into_another_buffer_of_the_same_storage_gives_the_same_bits(dtype):
    rule, hyper, numel = HostRule(ADAMW, dtype), HYPER, 4096
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


def check_by_torch(numel: int = 200_003, step: int = 1) -> None:
    results = []
    for update in (HostRule(ADAMW, torch.bfloat16, threads=2).update, ADAMW.update_by_torch):
        state = tuple(torch.zeros(numel, dtype=f.dtype) for f in ADAMW.layout(torch.bfloat16).fields)
        weight, grad = torch.ones(numel).bfloat16(), torch.linspace(-1, 1, numel).bfloat16()
        update(weight, grad, state, weight, ADAMW.hyper({**ADAMW.idle, "lr": step / 8}, step=step))
        results.append(weight)
    assert torch.equal(*results)


def check_in_a_child() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: on purpose
        child = os.fork()
    if not child:
        check_by_torch()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def cache_in(folder: str) -> None:
    """In a process of its own: kernels choose the directory of their code when they are made."""
    numba.config.CACHE_DIR = folder
    importlib.reload(kernels)


def busy(folder: str) -> tuple[int, int]:
    """Of the one version that was compiled: from the cache, and in all. Every warning is an error."""
    cache_in(folder)
    with warnings.catch_warnings(action="error"):
        prepare(ADAMW, torch.bfloat16, torch.bfloat16)
        check_in_a_child()
        failed: list[object] = []
        threading.excepthook = failed.append
        threads = [threading.Thread(target=check_by_torch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        for step, numel in enumerate((1, 2, 17, 4096, 5000, 200_000), start=1):
            check_by_torch(numel, step)
        with torch.inference_mode():
            check_by_torch(64)
        check_in_a_child()
    return versions()


def versions() -> tuple[int, int]:
    stats = ADAMW.loop(torch.bfloat16).stats
    return len(stats.cache_hits), sum([*stats.cache_hits.values(), *stats.cache_misses.values()])


def updated_later(folder: str) -> tuple[int, int]:
    cache_in(folder)
    check_by_torch(64)
    return versions()


@pytest.mark.slow
def test_threads_ranks_and_children_that_need_it_at_once_compile_it_once_each(tmp_path):
    alone = {"group": False, "imported": False}  # ranks have loaded the package's loops
    assert {*run_ranks(busy, 2, str(tmp_path), **alone)} <= {(0, 1), (1, 1)}
    assert any(tmp_path.rglob("kernels.update-*.nbc"))
    assert run_ranks(updated_later, 1, str(tmp_path), **alone) == [(1, 1)]


def summed_anew() -> bool:
    """Whether newly made kernels work; and whether their code came from the cache."""
    spec = importlib.util.spec_from_file_location("kernels_anew", kernels.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    sums = np.zeros((1, 4))
    anew.squares(np.full((1, 3, 4), 2, np.float32), sums)
    assert (sums == 12).all()
    return bool(anew.squares.stats.cache_hits)


def test_the_code_is_cached_on_disk_and_damaged_files_are_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert not summed_anew()
    assert summed_anew()
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:-20])
    assert not summed_anew()


@pytest.mark.parametrize("broken", [("os.makedirs", "tempfile.TemporaryFile"), ("os.replace",)])
def test_where_nothing_can_be_written_it_is_compiled(tmp_path, monkeypatch, broken):
    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    for function in broken:
        monkeypatch.setattr(function, fail)
    assert not summed_anew()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_a_home_it_is_compiled_and_no_directory_is_made_in_place_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserWideCacheLocator")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert not summed_anew()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("triple", "features", "converts"),
    [
        ("x86_64-unknown-linux-gnu", "+avx,+f16c", True),
        ("x86_64-unknown-linux-gnu", "+sse4.2,-f16c", False),
        ("aarch64-unknown-linux-gnu", "", True),
    ],
)
def test_a_cpu_without_instructions_for_float16_updates_and_sums_by_torch(
    monkeypatch, triple, features, converts
):
    codegen = SimpleNamespace(magic_tuple=lambda: (triple, "a-cpu", features))
    fake = SimpleNamespace(target_context=SimpleNamespace(codegen=lambda: codegen))
    shard = Shard(torch.float16, 20_000)
    wanted, norm = shard.copy().update_by_torch(HYPER), sum_of_squares(shard.grad)
    called: list[object] = []
    run = kernels.run
    monkeypatch.setattr(kernels, "cpu_target", fake)
    kernels.converts_half.cache_clear()
    monkeypatch.setattr(kernels, "run", lambda *args, **kw: (called.append(args), run(*args, **kw)))
    assert kernels.converts_half() == converts
    assert shard.update(HostRule(ADAMW, torch.float16), HYPER).bits() == wanted.bits()
    assert sum_of_squares(shard.grad) == norm
    assert bool(called) == converts
    kernels.converts_half.cache_clear()


def assembly(loop: Any, triple: str, cpu: str) -> str:
    """What LLVM makes of a compiled loop for another processor."""
    (code,) = loop.inspect_llvm().values()
    code = re.sub(r"target (triple|datalayout) = .*", "", code)
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module = llvm.parse_assembly(code)
    module.triple, module.data_layout = triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def look_at_machine_code(folder: str) -> None:
    numba.config.OPT = type(numba.config.OPT)(0)  # code that LLVM has not seen
    cpu_target.target_context.init()  # else it has what this process's parent compiled for itself
    rtsys._init = False
    cache_in(folder)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    loops = []
    for dtype in DTYPES:
        weight = torch.empty(0, dtype=dtype)
        state = tuple(torch.empty(0, dtype=field.dtype) for field in ADAMW.layout(dtype).fields)
        HostRule(ADAMW, dtype).update(weight, weight, state, weight, ADAMW.hyper(ADAMW.idle))
        loops.append((ADAMW.loop(dtype), "root"))
    sum_of_squares(torch.zeros(1))
    loops.append((kernels.squares, "product"))
    wanted = {
        "root": {"aarch64": r"fsqrt\tv\d+\.4s", "x86_64": r"vsqrtps\t.*ymm"},
        "product": {"aarch64": r"fmul\tv\d+\.2d", "x86_64": r"vmulpd\t.*ymm"},
    }
    for arch, cpu in (("aarch64", "neoverse-n1"), ("x86_64", "haswell")):
        for loop, kind in loops:
            code = assembly(loop, f"{arch}-unknown-linux-gnu", cpu)
            assert re.search(wanted[kind][arch], code), (arch, loop)
            assert not re.search(r"\tv?fn?m(add|sub|la|ls)", code), (arch, loop)
            assert "hfsf2" not in code, (arch, loop)
            assert "sfhf2" not in code, (arch, loop)


def test_machine_code_is_vectors_without_fused_multiply_add_on_x86_and_arm(tmp_path):
    run_ranks(look_at_machine_code, 1, str(tmp_path), group=False, imported=False)


def test_a_root_in_float64_is_the_correctly_rounded_one():
    """What accelerators take that do not round as IEEE 754 wants it: any float32 that is not negative."""
    bits = torch.cat(
        [torch.randint(0, 0x7F800001, (2**18,), dtype=torch.int32), torch.arange(2**12, dtype=torch.int32)]
    )
    values = bits.view(torch.float32)
    wanted = torch.from_numpy(np.sqrt(values.numpy()))
    assert torch.equal(root_in_float64(values), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_form_serves_cuda(dtype):
    shard, wanted = Shard(dtype, 100_003), Shard(dtype, 100_003)
    wanted.update(HostRule(ADAMW, dtype), HYPER)
    weight, grad = shard.weight.cuda(), shard.grad.cuda()
    state = tuple(field.cuda() for field in shard.state)
    HostRule(ADAMW, dtype).update(weight, grad, state, weight, HYPER.cuda())
    got = master_of(shard.layout, weight.cpu(), tuple(field.cpu() for field in state))
    assert torch.equal(got, master_of(wanted.layout, wanted.weight, wanted.state))
