"""What a machine offers is found out, and what it lacks is done without, with one line."""

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.app.runs import RECIPE
from infinity.app.train import train
from infinity.core.nbytes import parse_nbytes
from infinity.device import machine
from infinity.device.machine import (
    choose_dtype,
    free_host_nbytes,
    missing_huge_pages,
    usable_cores,
)
from infinity.engine.runtime import runtime_of
from infinity.nvme.engines.libaio_engine import LibaioEngine
from infinity.observe.metrics import summary_rows
from infinity.observe.timeline import MessageBuffer
from infinity.recipes.loading import load_recipe
from tests.helpers.engines import hide_libaio
from tests.helpers.launch import run_ranks
from tests.helpers.limits import HANG_S

CPU = torch.device("cpu")
GIB = 2**30

# --- memory and cores ----------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def of(free: str) -> dict[str, str]:
    """A machine with so much memory free."""
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {parse_nbytes(free) // 1024} kB"}


V2_MOUNT = {
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
}
V1_MOUNT = "35 30 0:30 {} /sys/fs/cgroup/{} rw,nosuid shared:15 - cgroup cgroup rw,{}"


def v2_memory(limit: str, used: int, inactive_file: int, folder: str = "") -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}memory"
    stat = f"anon 1\nfile {used}\nactive_file 77\ninactive_file {inactive_file}"
    return {f"{at}.max": limit, f"{at}.current": str(used), f"{at}.stat": stat}


def v1_memory(limit: int, used: int, inactive_file: int, folder: str = "") -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}memory"
    stat = f"inactive_file 5\ntotal_inactive_file {inactive_file}"
    return {f"{at}.limit_in_bytes": str(limit), f"{at}.usage_in_bytes": str(used), f"{at}.stat": stat}


def test_without_limits_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    root = write(tmp_path, of("20GiB"))
    assert free_host_nbytes(root) == 20 * GIB
    root = write(tmp_path, V2_MOUNT | {"proc/self/cgroup": "0::/app"} | v2_memory("max", GIB, 0, "app/"))
    assert free_host_nbytes(root) == 20 * GIB


def test_a_machine_without_proc_still_says_what_is_free(tmp_path: Path) -> None:
    assert 0 < free_host_nbytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_free_memory_is_what_the_container_has_but_for_idle_page_cache(tmp_path: Path) -> None:
    files = of("20GiB") | V2_MOUNT | {"proc/self/cgroup": "0::/"} | v2_memory(str(4 * GIB), 3 * GIB, GIB)
    assert free_host_nbytes(write(tmp_path, files)) == 4 * GIB - 3 * GIB + GIB


def test_the_tightest_group_above_counts_and_so_does_the_soft_limit(tmp_path: Path) -> None:
    files = of("20GiB") | V2_MOUNT | {"proc/self/cgroup": "0::/slice/job"}
    files |= v2_memory(str(16 * GIB), GIB, 0, "slice/job/") | v2_memory(str(8 * GIB), 6 * GIB, 0, "slice/")
    root = write(tmp_path, files)
    assert free_host_nbytes(root) == 2 * GIB
    write(root, {"sys/fs/cgroup/slice/job/memory.high": str(2 * GIB)})
    assert free_host_nbytes(root) == GIB


@pytest.mark.parametrize(
    ("mounted", "path", "folder"),
    [("/", "/docker/abc", "docker/abc/"), ("/docker/abc", "/docker/abc", ""), ("/", "/../other", "")],
    ids=["on the host", "a container sees its own group at the top", "outside of what is mounted"],
)
def test_the_first_version_of_control_groups_is_read_too(
    tmp_path: Path, mounted: str, path: str, folder: str
) -> None:
    files = of("20GiB") | v1_memory(6 * GIB, 5 * GIB, GIB // 2, folder) | {
        "proc/self/cgroup": f"9:cpu,cpuacct:/\n4:memory:{path}\n0::/",
        "proc/self/mountinfo": V1_MOUNT.format(mounted, "memory", "memory"),
    }  # fmt: skip
    assert free_host_nbytes(write(tmp_path, files)) == GIB + GIB // 2


def test_a_group_beyond_its_limit_has_nothing_free(tmp_path: Path) -> None:
    files = of("20GiB") | V2_MOUNT | {"proc/self/cgroup": "0::/"} | v2_memory(str(GIB), GIB + 4096, 0)
    assert free_host_nbytes(write(tmp_path, files)) == 0


def test_ranks_of_a_machine_share_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_host_nbytes(write(tmp_path, of("20GiB"))) == 5 * GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "9900000 100000"}, 8),
    ],
)
def test_a_quota_of_processor_time_counts_in_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = write(tmp_path, V2_MOUNT | {"proc/self/cgroup": "0::/"} | files)
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("150000", 2), ("-1", 8)])
def test_so_does_a_quota_of_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/job",
        "proc/self/mountinfo": V1_MOUNT.format("/", "cpu", "cpuacct,cpu"),
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(write(tmp_path, files)) == cores


def test_a_machine_says_that_it_has_no_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = "sys/kernel/mm/transparent_hugepage/enabled"
    assert missing_huge_pages(write(tmp_path, {setting: "always [madvise] never"})) == ""
    assert "enabled is never" in missing_huge_pages(write(tmp_path, {setting: "always madvise [never]"}))
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert "MADV_HUGEPAGE" in missing_huge_pages(write(tmp_path, {setting: "[always] madvise never"}))


# --- the dtype -----------------------------------------------------------------------------------

MEASURE = machine.measure_dtype.__wrapped__


def compare_dtype(name: str, device: torch.device, multiply_s: Callable[..., float]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "multiply_s", multiply_s)
        return MEASURE(name, device)


def clock(
    bf16: float, fp32: float, *, fp16: float | None = None, first: float = 0.0
) -> tuple[Callable[..., float], list[int]]:
    """Products at these GFLOP/s, the first of each kind ``first`` seconds longer; and their sizes."""
    of = {torch.float32: fp32, torch.bfloat16: bf16, torch.float16: bf16 if fp16 is None else fp16}
    sizes: list[int] = []
    seen: set[Any] = set()

    def multiply_s(dtype: torch.dtype, size: int, device: torch.device) -> float:
        sizes.append(size)
        extra = 0.0 if (dtype, size) in seen else first
        seen.add((dtype, size))
        return 2 * size**3 / 1e9 / of[dtype] + extra

    return multiply_s, sizes


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the GFLOP/s of 16 bits and of fp32 on this rank."""

    def at(bf16: float, fp32: float, fp16: float | None = None) -> None:
        multiply_s, _ = clock(bf16, fp32, fp16=fp16)
        monkeypatch.setattr(
            machine, "measure_dtype", lambda name, device: compare_dtype(name, device, multiply_s)
        )

    return at


@pytest.mark.parametrize(
    ("bf16", "fp32", "chosen"), [(1, 65, "fp32"), (300, 90, "bf16"), (80, 90, "bf16"), (30, 90, "fp32")]
)
def test_auto_computes_in_bf16_where_that_is_about_as_fast_as_fp32(
    speeds: Any, bf16: float, fp32: float, chosen: str
) -> None:
    speeds(bf16, fp32)
    figures = f"this CPU multiplies bf16 at {bf16} GFLOP/s and fp32 at {fp32}"
    assert choose_dtype("auto", CPU, lambda ratio: ratio) == (chosen, f"dtype: {chosen} ({figures})")


def test_auto_computes_in_fp16_where_that_alone_is_at_least_twice_as_fast_as_fp32(speeds: Any) -> None:
    speeds(1, 65, fp16=260)
    line = "dtype: fp16 (this CPU multiplies fp16 at 260 GFLOP/s and fp32 at 65)"
    assert choose_dtype("auto", CPU, lambda ratio: ratio) == ("fp16", line)
    speeds(1, 65, fp16=100)
    assert choose_dtype("auto", CPU, lambda ratio: ratio)[0] == "fp32"
    speeds(300, 90, fp16=900)
    assert choose_dtype("auto", CPU, lambda ratio: ratio)[0] == "bf16"
    others = iter((0.1, 3.0))  # the other ranks are V100, this one is newer
    assert choose_dtype("auto", CPU, lambda ratio: min(ratio, next(others)))[0] == "fp16"


def test_one_slow_rank_makes_all_of_them_compute_in_fp32(speeds: Any) -> None:
    speeds(300, 90)
    chosen, line = choose_dtype("auto", CPU, lambda ratio: min(ratio, 0.02))
    assert chosen == "fp32"
    assert line == "dtype: fp32 (another rank multiplies bf16 at 0.02 times the speed of fp32)"


def test_an_explicit_dtype_is_obeyed_and_what_it_costs_is_said(speeds: Any) -> None:
    def unasked(ratio: float) -> float:
        raise AssertionError("an explicit dtype needs no other rank")

    speeds(1, 65)
    for dtype in ("bf16", "fp16"):
        wanted = (
            f"train.dtype={dtype} is slow here: this CPU multiplies {dtype} at 1 GFLOP/s and fp32 at 65; "
            "train.dtype=fp32 is 65 times as fast"
        )
        assert choose_dtype(dtype, CPU, unasked) == (dtype, wanted)
    assert choose_dtype("fp32", CPU, unasked) == ("fp32", "")
    speeds(100, 65)
    assert choose_dtype("bf16", CPU, unasked) == ("bf16", "")


def test_a_dtype_that_is_fifty_times_slower_is_tried_on_small_matrices_only() -> None:
    multiply_s, sizes = clock(1.3, 65)
    assert compare_dtype("bf16", CPU, multiply_s).ratio == pytest.approx(0.02)
    assert set(sizes) == {128}
    assert len(sizes) * 2 * 128**3 / 1.3e9 < 0.03  # all of them, if each were slow
    multiply_s, sizes = clock(130, 65)
    assert compare_dtype("bf16", CPU, multiply_s).ratio == pytest.approx(2)
    assert set(sizes) == {128, 256}


def test_the_first_product_in_which_kernels_are_made_does_not_count() -> None:
    multiply_s, _ = clock(130, 65, first=1.0)
    assert compare_dtype("bf16", CPU, multiply_s).ratio == pytest.approx(2)


def test_the_probe_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    speed = machine.measure_dtype.__wrapped__("bf16", CPU)
    assert torch.get_num_threads() == before
    assert min(speed.flops_per_s, speed.fp32_flops_per_s) > 0


def of_run(folder: str, *overrides: str) -> Any:
    (Path(folder) / "text.txt").write_text("the quick brown fox\n" * 200, encoding="utf-8")
    small = [
        f"run.dir={folder}/runs", "run.name=one", "observe.progress=false", f"data.files={folder}/text.txt",
        f"data.cache={folder}/tokens", "model.n_layers=1", "model.d_model=16", "model.n_heads=2",
        "train.steps=2", "model.seq_len=16", "train.threads=1", "train.eval_every=null",
        f"memory.nvme={folder}/nvme", "memory.host=64MiB",
    ]  # fmt: skip
    return load_recipe(overrides=[*small, *overrides])


def auto_of_two_ranks(folder: str) -> tuple[str, list[str], str]:
    """One rank's CPU is slow at bf16: what both compute in, and what rank 0 keeps of it."""
    rank = int(os.environ["RANK"])
    multiply_s, _ = clock(90 if rank == 0 else 1, 60)
    built: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure_dtype", lambda name, device: compare_dtype(name, device, multiply_s))
        optimizer, init = infinity.optim.Optimizer, infinity.optim.Optimizer.__init__
        patch.setattr(
            optimizer, "__init__", lambda self, *a, **k: (init(self, *a, **k), built.append(self))[0]
        )
        summary = train(of_run(f"{folder}"))
    runtime = built[0].runtime
    kept = "" if summary is None else load_recipe(Path(summary.folder) / RECIPE).train.dtype
    return str(runtime.dtype), list(runtime.notes if summary is None else summary.notes), kept


def test_ranks_compute_in_one_dtype_and_the_run_keeps_it(tmp_path: Path) -> None:
    first, second = run_ranks(auto_of_two_ranks, 2, str(tmp_path))
    assert (first[0], second[0]) == ("torch.float32", "torch.float32")
    assert first[1][0] == "dtype: fp32 (another rank multiplies bf16 at 0.017 times the speed of fp32)"
    assert second[1][0] == "dtype: fp32 (this CPU multiplies bf16 at 1 GFLOP/s and fp32 at 60)"
    assert first[2] == "fp32"


SLOW_AT_BF16 = """
import sys, torch, infinity
with infinity.Init(infinity.load_recipe(overrides=["memory.host=16MiB"])) as init:
    torch.nn.Linear(4, 4)
print(init.runtime.config.dtype, *init.runtime.notes)
"""


@pytest.mark.slow  # a new interpreter; make bare runs much more without it
def test_a_processor_without_avx512_computes_in_fp32() -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-W", "error", "-c", SLOW_AT_BF16]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.startswith("fp32 dtype: fp32 (this CPU multiplies bf16 at "), done.stdout + done.stderr


# --- what is done otherwise is said once ---------------------------------------------------------


def test_a_machine_that_lacks_everything_trains_the_same_bits_and_says_each_thing_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summaries = [train(of_run(str(tmp_path), "train.dtype=fp32", "memory.resident=false"))]
    hide_libaio(monkeypatch)
    monkeypatch.setattr("infinity.shards.storage.missing_huge_pages", lambda: "no huge pages")
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "no O_DIRECT", path)
        return opened(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    more = ("run.name=two", "train.dtype=fp32", "memory.resident=false", "observe.progress=true")
    summaries.append(train(of_run(str(tmp_path), *more)))
    plain, bare = (summary for summary in summaries if summary is not None)
    assert plain.last_loss == bare.last_loss
    assert [words for words in ("no O_DIRECT", "no huge pages") if words in "\n".join(bare.notes)] == [
        "no O_DIRECT",
        "no huge pages",
    ]
    said = capsys.readouterr()
    for note in bare.notes:
        assert said.err.count(note) == 1
    assert ("machine", bare.notes[0]) in summary_rows(bare)


def test_what_no_display_shows_is_logged_and_never_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_libaio(monkeypatch)
    recipe = load_recipe(overrides=[f"memory.nvme={tmp_path}", "memory.host=16MiB", "train.dtype=fp32"])
    with caplog.at_level(logging.INFO, "infinity"):
        with infinity.Init(recipe):
            model = torch.nn.Linear(4, 4)
        assert [record.levelname for record in caplog.records if "no libaio" in record.message] == ["INFO"]
        assert runtime_of(model).notes == [r.message for r in caplog.records if "libaio" in r.message]
        infinity.close(model)


def test_a_display_that_comes_late_shows_what_was_said_before() -> None:
    listener, shown = MessageBuffer(), list[str]()
    listener("early")
    listener.attach(shown.append)
    listener("late")
    assert shown == ["early", "late"]


def test_an_engine_that_was_asked_for_and_cannot_be_used_is_an_error_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_libaio(monkeypatch)
    recipe = load_recipe(overrides=[f"memory.nvme={tmp_path}", "memory.host=16MiB", "memory.engine=libaio"])
    with pytest.raises(
        infinity.RecipeError, match=r"memory\.engine: got 'libaio'; wanted auto, or threads: .*so\.1"
    ):
        infinity.Init(recipe)


def test_a_kernel_that_gives_no_requests_is_served_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used_up(self: LibaioEngine, volume: Any) -> None:
        raise BlockingIOError(11, "io_queue_init")

    monkeypatch.setattr(LibaioEngine, "__init__", used_up)
    recipe = load_recipe(overrides=[f"memory.nvme={tmp_path}", "memory.host=16MiB", "train.dtype=fp32"])
    with infinity.Init(recipe) as init:
        model = torch.nn.Linear(4, 4)
    assert any("raise fs.aio-max-nr" in note for note in init.runtime.notes)
    assert init.runtime.storage.engine is not None
    assert init.runtime.storage.engine.name == "threads"
    infinity.close(model)
