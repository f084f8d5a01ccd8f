"""Two lines around a plain PyTorch loop: the same bits, typed errors, and every file given back."""

import contextlib
import copy
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.activations import tensor_cache
from infinity.activations.controller import METERED
from infinity.api import offload_activations as offloading
from infinity.core.errors import ChangedFileError, DiskError, InfinityError, StateError
from tests.activations.stage import assert_same, live_slots
from tests.activations.test_nested import Model, batch
from tests.helpers import models
from tests.helpers.faulty import Fault, FaultyEngine
from tests.helpers.limits import collected, file_limit
from tests.helpers.training import build, streaming

MANUAL = ["keep", "offload", "recompute"]


def loop(model: nn.Module, steps: int = 3, seed: int = 0) -> list[Tensor]:
    """A plain loop; losses and weights."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(batch(seed + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *[p.detach() for p in model.parameters()], *model.buffers()]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def engines(monkeypatch) -> list[FaultyEngine]:
    """Those that are made."""
    made, make = [], offloading.make_engine

    def faulty(name, volume, *note):
        made.append(FaultyEngine(make(name, volume, *note)))
        made[-1].volume = volume
        return made[-1]

    monkeypatch.setattr(offloading, "make_engine", faulty)
    return made


@pytest.mark.parametrize("policy", [*MANUAL, "plan"])
def test_losses_weights_and_buffers_are_those_of_the_plain_loop(tmp_path, policy):
    model = Model(dropout=0.1, norm=True)
    plain = loop(copy.deepcopy(model), steps=METERED)
    with infinity.offload_activations(model, policy=policy, nvme=tmp_path) as activations:
        ours = loop(model, steps=METERED)
    assert_same(ours, plain)
    assert (activations.cache.stats.nbytes_stored > 0) == (policy in ("offload", "plan"))
    assert not files(tmp_path)


def test_a_directory_in_the_home_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with infinity.offload_activations(Model(), policy="offload", nvme="~/drive"):
        assert files(tmp_path / "drive")
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_two_models_one_inside_the_other(tmp_path):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.layers = Model(norm=True), Model().layers

        def forward(self, x: Tensor) -> Tensor:
            loss = self.inner(x)
            for layer in self.layers:
                x = layer(x)
            return loss * x.square().mean()

    for outer_policy in MANUAL:
        for inner_policy in MANUAL:
            model = Both()
            plain = loop(copy.deepcopy(model), steps=2)
            with (
                infinity.offload_activations(model, policy=outer_policy, nvme=tmp_path),
                infinity.offload_activations(model.inner, policy=inner_policy, nvme=tmp_path),
            ):
                assert_same(loop(model, steps=2), plain)
    assert not files(tmp_path)


def test_two_models_in_one_loss(tmp_path):
    first, second = Model(dropout=0.1), Model(norm=True)

    def step(first, second):
        torch.manual_seed(0)
        loss = first(batch(0)) * second(batch(1)) + first(batch(2))
        loss.backward()
        return [p.grad for p in (*first.parameters(), *second.parameters())]

    plain = step(copy.deepcopy(first), copy.deepcopy(second))
    with (
        infinity.offload_activations(first, policy="offload", nvme=tmp_path) as one,
        infinity.offload_activations(second, policy="offload", nvme=tmp_path) as two,
    ):
        assert_same(step(first, second), plain)
    assert min(one.cache.stats.nbytes_stored, two.cache.stats.nbytes_stored) > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_gives_back_files_hooks_and_memory(tmp_path, error):
    model = Model()
    hooks = [len(model._forward_hooks), len(model._forward_pre_hooks)]
    before = live_slots()

    def left():
        with infinity.offload_activations(model, policy="offload", nvme=tmp_path):
            model(batch(0))
            assert files(tmp_path)
            raise error

    with pytest.raises(error):
        left()
    assert not files(tmp_path)
    assert [len(model._forward_hooks), len(model._forward_pre_hooks)] == hooks
    assert collected(*live_slots() - before)


def test_an_interrupted_forward_does_not_reach_into_the_next_one(tmp_path):
    model = Model()

    def interrupt(module, args):
        raise KeyboardInterrupt

    plain, other = loop(copy.deepcopy(model)), copy.deepcopy(model)
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path) as activations:
        handle = model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        handle.remove()
        stored = activations.cache.stats.nbytes_stored
        assert_same(loop(model), plain)
        assert activations.cache.stats.nbytes_stored > stored
        assert activations.cache.record is None
        stored = activations.cache.stats.nbytes_stored
        other(batch(0)).backward()
        assert activations.cache.stats.nbytes_stored == stored


def test_a_model_on_which_nobody_calls_backward(tmp_path, engines):
    model = Model()
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path) as activations:
        for seed in range(5):
            model(batch(seed))
            with torch.no_grad():
                model(batch(seed))
        cache = activations.cache
        cache.queue.drain()
        cache.stats.free_dropped()
        assert cache.stats.resident_nbytes == 0
        assert engines[0].volume.allocated_nbytes == 0
        assert cache.stats.nbytes_loaded == 0


def test_a_graph_that_outlives_the_context_can_be_dropped(tmp_path):
    model, before = Model(), live_slots()
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path):
        loss = model(batch(0))
        loss.backward(retain_graph=True)
    kept = live_slots() - before
    assert not collected(*kept, patience_s=0)
    del loss
    assert collected(*kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_compiled_blocks_and_models(tmp_path, what, policy):
    def compiled(model):
        for module in model.layers if what == "blocks" else [model]:
            module.compile(backend="aot_eager")
        return model

    model = Model()
    plain = loop(compiled(copy.deepcopy(model)), steps=2)
    compiled(model)
    before = [layer._compiled_call_impl for layer in model.layers]
    with infinity.offload_activations(model, policy=policy, nvme=tmp_path) as activations:
        assert_same(loop(model, steps=2), plain)
    assert (activations.cache.stats.nbytes_stored > 0) == (policy == "offload")
    assert [layer._compiled_call_impl for layer in model.layers] == before
    torch.compiler.reset()


def test_a_model_without_blocks_is_stored_whole(tmp_path):
    model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24), nn.Tanh(), nn.Flatten(0))
    inputs = batch(0)
    model(inputs).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path) as activations:
        model(inputs).sum().backward()
    assert_same([p.grad for p in model.parameters()], plain)
    assert activations.cache.stats.nbytes_stored > 0


@pytest.fixture
def one_rank(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", MANUAL)
def test_a_model_that_ddp_wraps(tmp_path, one_rank, policy):
    model = Model(dropout=0.1)
    plain = loop(copy.deepcopy(model))
    wrapped = nn.parallel.DistributedDataParallel(model)
    with infinity.offload_activations(wrapped, policy=policy, nvme=tmp_path / "nvme"):
        assert_same(loop(wrapped), plain)
    assert not files(tmp_path / "nvme")


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "offlaod"}, r"policy.*offlaod.*keep.*offload.*recompute.*plan"),
        ({"budget": "6 elephants"}, r"6 elephants"),
        ({"host": "-3"}, r"-3"),
        ({"budget": -1}, r"-1"),
    ],
    ids=["policy", "budget", "host", "negative"],
)
def test_a_wrong_value_is_named_with_what_is_valid(tmp_path, options, message):
    with (
        pytest.raises(ValueError, match=message),
        infinity.offload_activations(Model(), nvme=tmp_path, **options),
    ):
        pass
    assert not files(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InfinityError, match="file") as caught,
        infinity.offload_activations(Model(), policy="offload", nvme=tmp_path / "file"),
    ):
        pass
    assert isinstance(caught.value, OSError)


def test_a_model_of_init_is_told_to_use_its_recipe(tmp_path):
    factory, _ = models.build("gpt", seed=0)
    model = build(factory, "fp32", streaming(tmp_path))
    optimizer = infinity.AdamW(model)
    with (
        contextlib.closing(optimizer),
        pytest.raises(StateError, match=r"memory\.activations"),
        infinity.offload_activations(model, nvme=tmp_path),
    ):
        pass


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["write", "read"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_error_is_raised_in_the_step_and_the_step_can_be_repeated(
    tmp_path, engines, monkeypatch, on, nth
):
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 8192)  # a whole block at least
    model = Model(dropout=0.1)
    plain = loop(copy.deepcopy(model))
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path) as activations:

        def step():
            torch.manual_seed(2)
            loss = model(batch(0))
            if on == "read":
                activations.cache.queue.wait_below(0)
            loss.backward()

        for _ in range(2):
            count = engines[0].reads if on == "read" else engines[0].writes
            engines[0].faults = (Fault(on=on, nth=count + nth, forever=True),)
            with pytest.raises(DiskError) as caught:
                step()
            assert (caught.value.path, caught.value.offset) == ("faulty.bin", 0)
            assert caught.value.nbytes > 0
            del caught
        engines[0].faults = ()
        model.zero_grad()
        assert_same(loop(model), plain)
        activations.cache.queue.drain()
        activations.cache.stats.free_dropped()
        assert activations.cache.stats.resident_nbytes == 0


def test_a_full_disk_is_raised_and_the_step_can_be_repeated_when_there_is_room(tmp_path):
    model = Model()
    plain = loop(copy.deepcopy(model))
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path):
        with file_limit(8192), pytest.raises(DiskError, match="larger file system") as caught:
            model(batch(0))
        assert os.path.dirname(caught.value.path).startswith(str(tmp_path))
        del caught
        assert_same(loop(model), plain)


def test_a_slow_disk_is_no_error(tmp_path, engines):
    model = Model()
    plain = loop(copy.deepcopy(model))
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path) as activations:
        engines[0].hold()
        stats = activations.cache.stats
        assert_same(loop(model), plain)
        assert stats.forwarded > 0
        engines[0].let_go()


def test_a_file_that_another_program_cut_ends_the_step_in_which_it_happened(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity.offload_activations(model, policy="offload", nvme=tmp_path):
        model(batch(0)).backward()
        optimizer.step()
        [path] = [path for path in files(tmp_path) if path.suffix == ".bin"]
        model(batch(1)).backward()
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(ChangedFileError, match=rf"{path} was cut"):
            optimizer.step()
    assert not files(tmp_path)
