"""A process reuses the memory that torch frees, so what activations do not take is not resident either."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import infinity
from infinity.device import accelerator
from infinity.device.accelerator import heap_line, restart_with_tunables, tunables
from infinity.recipes.models import GPT, GPTConfig
from tests.helpers.launch import ROOT
from tests.helpers.limits import HANG_S

OFF = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
ORDER = ["train", "recipe.yaml"]


@pytest.fixture
def old_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.setattr(accelerator, "DEVICE_FILES", ())
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What the process was replaced by."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "infinity", *ORDER])
    return calls


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, OFF),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, f"glibc.malloc.arena_max=2:{OFF}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, None),  # the user's own choice
    ],
)
def test_an_older_glibc_is_told_not_to_cache_remainders(old_glibc, given, wanted):
    assert tunables(given) == wanted


@pytest.mark.parametrize("version", ["glibc 2.39", "glibc 3.0", "", None])
def test_other_c_libraries_are_left_as_they_are(old_glibc, monkeypatch, started, version):
    monkeypatch.setattr(os, "confstr", lambda name: version)
    assert tunables({}) is None
    assert not heap_line()
    restart_with_tunables("/bin/infinity", ORDER)
    assert not started


def test_a_c_library_without_a_version_is_left_as_it_is(monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    assert tunables({}) is None


def test_the_same_process_is_started_again_and_once_only(old_glibc, monkeypatch, started):
    restart_with_tunables("/lib/infinity/__main__.py", ORDER)
    [(program, arguments, environment)] = started
    assert (program, arguments) == (sys.executable, [sys.executable, "-u", "-m", "infinity", *ORDER])
    assert environment == {**os.environ, "GLIBC_TUNABLES": OFF}
    monkeypatch.setenv("GLIBC_TUNABLES", OFF)
    restart_with_tunables("/lib/infinity/__main__.py", ORDER)
    assert len(started) == 1


def test_another_program_that_calls_the_command_is_not_started_again(old_glibc, monkeypatch, started):
    restart_with_tunables("/home/notebook.py", ORDER)
    restart_with_tunables("/bin/infinity", [*ORDER, "run.name=mine"])  # not what python was started with
    monkeypatch.setattr(accelerator, "DEVICE_FILES", (os.devnull,))
    restart_with_tunables("/bin/infinity", ORDER)
    assert not started


def test_a_loop_of_ones_own_is_told_what_to_set(old_glibc, monkeypatch, tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    with caplog.at_level("INFO", "infinity"), infinity.offload_activations(model, nvme=tmp_path):
        pass
    assert f"start Python with GLIBC_TUNABLES={OFF}" in caplog.text
    caplog.clear()
    monkeypatch.setenv("GLIBC_TUNABLES", OFF)
    with caplog.at_level("INFO", "infinity"), infinity.offload_activations(model, nvme=tmp_path):
        pass
    assert "GLIBC_TUNABLES" not in caplog.text


MANY_SHAPES = """
import sys, torch
from infinity.device.accelerator import bound_kernels

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

bound_kernels() if sys.argv[1] == "bounded" else None
torch.set_num_threads(1)
weight, rows = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(400, 256, dtype=torch.bfloat16)
torch.nn.functional.linear(rows, weight)
before = rss()
for count in range(1, 400):
    torch.nn.functional.linear(rows[:count], weight)
print(rss() - before)
"""


@pytest.mark.slow
def test_products_of_many_shapes_leave_few_kernels_in_memory():
    def grown(how):
        environment = {name: value for name, value in os.environ.items() if "ONEDNN" not in name}
        run = subprocess.run(
            [sys.executable, "-c", MANY_SHAPES, how], cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True, timeout=HANG_S,
        )  # fmt: skip
        return int(run.stdout)

    unbounded = grown("unbounded")
    if unbounded < 60 * 2**20:
        pytest.skip("nothing is compiled for this CPU")
    assert grown("bounded") < 0.8 * unbounded


def holes_given_back() -> int:
    """Make holes in the heap, and return how many bytes of them go back."""

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    large, small = [], []  # torch's, of less than what glibc maps apart
    for _ in range(1500):
        large.append(torch.ones(100 * 2**10, dtype=torch.uint8))
        small.append(torch.ones(64, dtype=torch.uint8))
    large.clear()
    before = rss()
    accelerator.trim_heap()
    assert sum(map(torch.sum, small)) == 64 * len(small)
    return before - rss()


@pytest.mark.skipif((accelerator.glibc_version() or (0,)) < (2, 33), reason="another C library")
def test_holes_in_the_heap_are_given_back():
    # A process that was refused memory once, as this one may have been, allocates elsewhere from then on.
    script = f"from {__name__} import holes_given_back; print(holes_given_back())"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert int(ended.stdout) > 50 * 2**20


# --- the memory of a process -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(accelerator.glibc_version() is None, reason="another C library")
def test_what_activations_do_not_take_is_not_resident_either(tmp_path):
    """Peaks of two processes, kept and offloaded; what differs is what was stored."""
    (kept, _), (offloaded, stored) = grown(tmp_path)
    assert kept - offloaded > 0.65 * stored  # under glibc 2.36 0.4 without the setting, 0.8 with it


def grown(folder):
    """By how much training grows a process, and what it stores in a step, kept and offloaded (bytes)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if (wanted := tunables(environment)) is not None:
        environment["GLIBC_TUNABLES"] = wanted
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=HANG_S,
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines()]


def peak_nbytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def train(policy, folder, steps=2):
    torch.set_num_threads(1)
    model = GPT(GPTConfig(vocab_size=96, seq_len=256, n_layers=16, d_model=128, n_heads=2)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = peak_nbytes()
    with infinity.offload_activations(model, policy=policy, nvme=folder) as activations:
        queue, put = activations.cache.queue, activations.cache.queue.put

        def waiting(slot, store):  # a slow drive is waited for
            number = put(slot, store)
            queue.wait_below(8 * 2**20)
            return number

        queue.put = waiting
        for _ in range(steps):
            tokens = torch.randint(96, (4, 257))
            model(tokens=tokens[:, :-1], targets=tokens[:, 1:].contiguous()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stored = activations.cache.stats.nbytes_stored // steps
    print(json.dumps([peak_nbytes() - before, stored]), flush=True)


if __name__ == "__main__":
    for policy in ("keep", "offload"):  # in a fork each: imports are paid for once
        process = multiprocessing.get_context("fork").Process(target=train, args=(policy, sys.argv[1]))
        process.start()
        process.join()
        assert process.exitcode == 0
