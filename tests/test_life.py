"""A process owns what it opens: children leave it alone, garbage costs nothing, what is closed says so."""

import contextlib
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import DiskError, StateError
from infinity.core.process import OwnedStack, close_collected, weakly
from infinity.device import machine
from infinity.engine.runtime import Runtime, runtime_of
from infinity.shards.pipeline import UpdatePipeline
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.forks import ROOT, SEEDS, Fork, Job
from tests.helpers.launch import mark, run_ranks, start_ranks
from tests.helpers.limits import HANG_S, collected, comes_true, hang, limit
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for, streaming


def trained(folder: Path, *more: str, steps: int = 2, in_host: bool = False) -> Any:
    """A model and its optimizer after a few steps, whose last updates are in flight."""
    factory, batch = models.build("gpt", seed=0)
    model = build(factory, "bf16", [*more] if in_host else streaming(folder, *more))
    optimizer = optimizer_for(model, Rule(max_grad_norm=None))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for step in range(steps):
        model(**batch(step, rank, world)).loss.backward()
        optimizer.step()
    return model, optimizer, lambda step: batch(step, rank, world)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


# --- forked children -----------------------------------------------------------------------------


def forked(what: Callable[[], object]) -> int:
    """The exit code of a forked child that calls ``what`` and goes on to its interpreter's end.

    Raises:
        TimeoutError: It did not end.
    """
    pid, statuses = os.fork(), list[int]()
    if pid == 0:
        what()
        sys.exit(0)

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses.extend([status] if found else [])
        return bool(found)

    if comes_true(ended, HANG_S / 2):
        return os.waitstatus_to_exitcode(statuses[0])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"the child hung: {what}")


def fail() -> None:
    raise LookupError("of the child")


def children(argument: str) -> int:
    """A program that trains, and forks in between; leaves what it saw beside its files."""
    folder = Path(argument) / "nvme"
    model, optimizer, batch = trained(folder)
    model(**batch(2)).loss.backward()
    before = files_in(folder)

    def use_all() -> None:
        nonlocal model, optimizer
        for call in (lambda: model(**batch(3)), optimizer.step, optimizer.state_dict, model.state_dict):
            with pytest.raises(StateError, match=f"belongs to process {os.getppid()}"):
                call()
        assert all(bool(p.isnan().all()) for p in model.parameters())
        optimizer.close()
        infinity.close(model)
        del model, optimizer
        gc.collect()
        model, optimizer, _ = trained(folder / "child")  # a child may have one of its own
        optimizer.close()

    codes = [forked(use_all), forked(fail)]
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    loading = iter(loader)
    seen = len(list(loading))
    codes += [worker.exitcode for worker in loading._workers]  # negative: it did not end by itself
    same = files_in(folder) == before
    optimizer.step()
    model(**batch(3)).loss.backward()
    optimizer.step()
    optimizer.close()
    figures = {"codes": codes, "seen": seen, "same": same, "left": files_in(folder)}
    Path(argument, "result.json").write_text(json.dumps(figures))
    return 0


def test_forked_children_neither_wait_nor_remove_and_the_parent_goes_on(tmp_path):
    job = Job(
        module=__name__, function=children.__name__, argument=str(tmp_path), path=[str(ROOT), *sys.path],
        environment={**os.environ, "OMP_NUM_THREADS": "1"}, log=str(tmp_path / "log"),
    )  # fmt: skip
    assert Fork(job, SEEDS[0]).wait() == 0, (tmp_path / "log").read_text()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["codes"] == [0, 1, 0, 0]
    assert result["same"]
    assert result["left"] == []
    assert result["seen"] == 8


def children_of_ranks(folder: str) -> int:
    model, optimizer, batch = trained(Path(folder))
    model(**batch(2)).loss.backward()
    with contextlib.closing(optimizer):
        code = forked(optimizer.close)
        optimizer.step()
        model(**batch(3)).loss.backward()
        optimizer.step()
    return code


def test_children_of_ranks_end_and_tell_other_ranks_nothing(tmp_path):
    codes = run_ranks(children_of_ranks, 2, str(tmp_path), to_the_end=True)
    assert codes == [1, 1]  # the helper's word for an exit
    assert files_in(tmp_path) == []


# --- the rank that keeps torch's store ------------------------------------------------------------


def wait_for_rank_0(folder: str) -> None:
    model, optimizer, batch = trained(Path(folder), "partition.timeout_s=200")
    mark("there")
    with contextlib.closing(optimizer):
        for step in range(2, 1000):
            if os.environ["RANK"] == "0":
                hang()
            model(**batch(step)).loss.backward()
            optimizer.step()


def test_a_killed_rank_0_without_a_launcher_is_a_typed_error(tmp_path):
    with start_ranks(wait_for_rank_0, 2, str(tmp_path), group=False) as ranks:
        for rank in range(2):
            ranks.reached("there", rank)
        ranks.kill(0)
        _, other = ranks.wait(timeout_s=150)
    assert other.error_type == "PeerError", other
    assert "rank 0 or its launcher, ended" in other.message
    assert "frame #" not in other.traceback, "torch's C++ stack"


# --- what is closed says so ----------------------------------------------------------------------


def enter(context: Any) -> None:
    with context:
        pass


#: What may be asked of a model and its optimizer; ``loss`` has a graph whose backward has not run.
USES: dict[str, Callable[[Any, Any, Any, Path], object]] = {
    "forward": lambda model, optimizer, loss, out: model(**models.build("gpt", seed=0)[1](1)),
    "a submodule's forward": lambda model, optimizer, loss, out: model.blocks[0](torch.zeros(1, 4, 32)),
    "backward": lambda model, optimizer, loss, out: loss.backward(),
    "step": lambda model, optimizer, loss, out: optimizer.step(),
    "zero_grad": lambda model, optimizer, loss, out: optimizer.zero_grad(),
    "synchronize": lambda model, optimizer, loss, out: optimizer.synchronize(),
    "report": lambda model, optimizer, loss, out: optimizer.report(),
    "the optimizer's state_dict": lambda model, optimizer, loss, out: optimizer.state_dict(),
    "its load_state_dict": lambda model, optimizer, loss, out: optimizer.load_state_dict(
        {"state": dict.fromkeys(range(99)), "param_groups": optimizer.param_groups}
    ),
    "another optimizer": lambda model, optimizer, loss, out: infinity.AdamW(model),
    "state_dict": lambda model, optimizer, loss, out: model.state_dict(),
    "infinity.state_dict": lambda model, optimizer, loss, out: infinity.state_dict(model),
    "load_state_dict": lambda model, optimizer, loss, out: model.load_state_dict({}, strict=False),
    "export": lambda model, optimizer, loss, out: infinity.export(model, out),
    "no_sync": lambda model, optimizer, loss, out: enter(infinity.no_sync(model)),
    "gathered": lambda model, optimizer, loss, out: enter(infinity.gathered(model)),
    "a parameter by name": lambda model, optimizer, loss, out: model.embedding.weight,
}


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_everything_that_is_closed_says_so_at_once(tmp_path, place):
    model, optimizer, batch = trained(tmp_path, in_host=place == "host")
    loss = model(**batch(2)).loss
    optimizer.close()
    optimizer.close()
    infinity.close(model)
    for what, use in USES.items():
        with pytest.raises(StateError) as caught:
            use(model, optimizer, loss, tmp_path / "out")
        assert "GPT was closed" in str(caught.value), what
    assert not (tmp_path / "out").exists()
    assert all(bool(p.isnan().all()) for p in model.parameters())
    assert files_in(tmp_path) == []


def test_a_model_that_is_closed_inside_gathered_stores_nothing(tmp_path):
    model, optimizer, _ = trained(tmp_path)
    with pytest.raises(StateError, match="GPT was closed"), infinity.gathered(model, modify=True):
        optimizer.close()


def list_failures(patch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that end a runtime from now on."""
    fail, failures = Runtime.fail, list[BaseException]()

    def failing(runtime: Runtime, error: BaseException) -> None:
        failures.append(error)
        fail(runtime, error)

    patch.setattr(Runtime, "fail", failing)
    return failures


def test_an_unrelated_traceback_does_not_make_close_abandon_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_value", KeyError("of an earlier cell"), raising=False)
    model, optimizer, batch = trained(tmp_path)
    ended: list[BaseException | None] = []
    failures = list_failures(monkeypatch)
    monkeypatch.setattr(UpdatePipeline, "abandon", lambda self, error: ended.append(error))
    model(**batch(2)).loss.backward()
    optimizer.step()
    optimizer.close()
    assert ended == []
    assert failures == []


def test_close_on_the_way_out_of_an_exception_ends_updates_with_it(tmp_path, monkeypatch):
    failures = list_failures(monkeypatch)
    _, optimizer, _ = trained(tmp_path)
    with pytest.raises(LookupError), contextlib.closing(optimizer):
        fail()
    assert {type(error) for error in failures} == {LookupError}


# --- what is dropped costs nothing ---------------------------------------------------------------


def held(folder: Path, *dropped: "weakref.ref[Any]") -> tuple[set[threading.Thread], int, list[str]]:
    """Threads, descriptors and files, once what was ``dropped`` is closed."""
    assert collected(*dropped)
    close_collected()
    for each in list(machine._compiling.values()):  # threads of the process, which its first model starts
        each.join()
    return set(threading.enumerate()), descriptors(), files_in(folder)


def assert_nothing_more(
    folder: Path, before: tuple[set[threading.Thread], int, list[str]], *dropped: "weakref.ref[Any]"
) -> None:
    """Nothing is held that was not ``before``; what tests before this one left may have ended since."""
    threads, descriptors, files = held(folder, *dropped)
    assert threads <= before[0]
    assert descriptors <= before[1]
    assert files == before[2]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def remove_directory_of(optimizer: infinity.AdamW) -> None:
    optimizer.synchronize()
    shutil.rmtree(optimizer.runtime.storage.volume.path(0).parent)
    with pytest.raises(DiskError, match="removed"):
        optimizer.step()


HOW = ["closed", "dropped", "dropped in backward", "dropped with its loss alive", "dropped after an error"]


OFFLOAD = ("memory.activations=offload",)
FEW = [((), HOW[0]), (OFFLOAD, HOW[1]), ((), HOW[2]), (OFFLOAD, HOW[3]), ((), HOW[4])]


@pytest.mark.parametrize(("settings", "how"), few(FEW, itertools.product(((), OFFLOAD), HOW)))
def test_a_model_that_is_not_held_any_more_costs_nothing(tmp_path, how, settings):
    with OwnedStack() as stack:
        stack.close_with(held)  # the thread that closes is there
    before = held(tmp_path)
    model, optimizer, batch = trained(tmp_path, *settings)
    loss = model(**batch(2)).loss
    if how != "dropped":
        loss.backward()
    refs = [weakref.ref(each) for each in (model, model.blocks[0], optimizer, optimizer.runtime)]
    if how == "dropped after an error":
        loss = remove_directory_of(optimizer)
    if how == "closed":
        optimizer.close()
    if how != "dropped with its loss alive":
        loss = None
    del model, optimizer, batch
    assert_nothing_more(tmp_path, before, *refs)
    assert loss is None or torch.isfinite(loss)


def test_a_graph_keeps_what_its_backward_needs(tmp_path):
    model, optimizer, batch = trained(tmp_path)
    loss, runtime = model(**batch(2)).loss, weakref.ref(optimizer.runtime)
    del model, optimizer
    gc.collect()
    loss.backward()
    assert runtime() is not None
    del loss
    assert collected(runtime)


def test_modules_of_no_model_are_left_alone(tmp_path):
    with infinity.Init(infinity.load_recipe(overrides=streaming(tmp_path))):
        criterion, model = torch.nn.CrossEntropyLoss(), torch.nn.Sequential(torch.nn.Linear(8, 8))
        activation, late = torch.nn.ReLU(), torch.nn.Linear(8, 8)
        model.extend([activation, late])
    assert type(criterion._parameters) is type(activation._parameters) is dict
    assert not criterion._forward_hooks
    assert not criterion._forward_pre_hooks
    assert type(late._parameters) is not dict
    runtime = weakref.ref(runtime_of(model))
    del model, late
    assert collected(runtime)  # though the loss function lives


def test_weakly_calls_a_method_only_while_its_object_lives():
    class Counter:
        count = 0

        def add(self, number: int) -> int:
            self.count += number
            return self.count

    counter = Counter()
    add = weakly(counter.add)
    assert add(2) == 2
    assert add(number=3) == 5
    del counter
    assert add(1) is None


# --- limits ----------------------------------------------------------------------------------------


def test_too_few_descriptors_are_an_error_that_says_so_and_leave_nothing(tmp_path):
    model, optimizer, _ = trained(tmp_path / "nvme")
    infinity.export(model, tmp_path / "unlimited")  # what it imports is there from now on
    optimizer.close()
    model = optimizer = None
    before, errors = held(tmp_path / "nvme"), []
    used = {int(each.name) for each in Path("/proc/self/fd").iterdir()}  # other tests' may be anywhere
    free = [number for number in range(1024) if number not in used]
    for more in range(16):
        try:
            with limit(resource.RLIMIT_NOFILE, free[more]):  # so many are free below it
                model, optimizer, _ = trained(tmp_path / "nvme")
                infinity.export(model, tmp_path / "out")
                optimizer.close()
        except infinity.InfinityError as error:
            errors.append(str(error))
        else:
            break
        model = optimizer = None
        torch.ones(1, requires_grad=True).sum().backward()  # torch holds what a failed one left till the next
        assert_nothing_more(tmp_path / "nvme", before)
    assert len(errors) > 2
    assert (tmp_path / "out" / "config.json").exists()
    assert all("Too many open files" in error for error in errors)
    assert any("ulimit -n" in error for error in errors)


def cells(how: str) -> tuple[int, int]:
    """MiB of memory, and threads and descriptors, that the last 15 of 20 runs of a cell have cost."""
    figures = []
    for number in range(1, 21):
        with infinity.Init(infinity.load_recipe(overrides=["memory.host=64MiB", "train.dtype=bf16"])):
            model = torch.nn.Sequential(torch.nn.Linear(1024, 1024))  # 14 MiB with its states
        optimizer = infinity.AdamW(model, lr=1e-3)
        loss = model(torch.ones(1, 1024, dtype=torch.bfloat16)).sum()
        loss.backward()
        optimizer.step()
        if how == "closed":
            optimizer.close()
        if number in (5, 20):
            close_collected()
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            [rss] = [int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")]
            figures.append((rss, threading.active_count() + descriptors()))
    return figures[1][0] - figures[0][0], figures[1][1] - figures[0][1]


@pytest.mark.parametrize("how", few(("dropped",), ("closed", "dropped")))
def test_a_cell_that_runs_again_and_again_costs_nothing(how):
    [(grown_mib, more)] = run_ranks(cells, 1, how, group=False)
    assert more <= 0
    assert grown_mib < 60  # 15 models have 210
