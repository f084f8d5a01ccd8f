"""Micro-batches add up in any budget: sums that find no room wait elsewhere, with the same bits."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

import infinity
from infinity import BudgetError
from infinity.core.config import SettingError
from infinity.core.nbytes import Transfer, rounded_sum
from infinity.device.memory import CountingPool, HostPool, Pool
from infinity.engine.accumulation import Gradient, Sums
from infinity.engine.runtime import runtime_of
from tests.engine.test_device_budget import Nest, wide_batch
from tests.helpers import models, training
from tests.helpers.cases import examples
from tests.helpers.launch import run_ranks
from tests.helpers.lockstep import seeded
from tests.helpers.reference import Rule
from tests.helpers.training import UNTILED, Trained, assert_bitwise, reference, streaming, train

MODELS: dict[str, Any] = {name: models.build(name, seed=3) for name in ("llama", "gpt2", "t5")}
MODELS["nest"] = seeded(Nest), wide_batch  # many units whose gradients are open at one time
KIB = 2**10


def rule_of(clips: bool) -> Rule:
    return Rule(max_grad_norm=1.0 if clips else None, lr=1e-2)


def least(name: str, clips: bool, where: list[str], dtype: str = "bf16") -> tuple[int, int]:
    """The smallest budget in which micro-batches add up, and what all gradients take (bytes)."""
    nbytes = KIB
    for _ in range(2):  # of the optimizer, and then of the first no_sync
        model = training.build(MODELS[name][0], dtype, [*where, f"memory.device={nbytes}"])
        gradients = rounded_sum(unit.nbytes for unit in runtime_of(model).units)
        try:
            training.optimizer_for(model, rule_of(clips))
            infinity.no_sync(model).__enter__()
        except BudgetError as error:
            nbytes = int(re.search(r"\((\d+) bytes\)", str(error))[1])
        infinity.close(model)
    return nbytes, gradients


@given(data=st.data())
@examples(16, deadline=None, phases=[Phase.generate])  # to shrink takes minutes
def test_micro_batches_add_up_in_any_budget_bitwise_and_within_it(data, tmp_path_factory):
    name, clips = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(["bf16", "fp32"] if name != "nest" else ["bf16"]))
    policy = data.draw(st.sampled_from(["keep", "recompute"] if name != "nest" else ["keep"]))
    versions = data.draw(st.sampled_from([1, 2]))
    more = [f"memory.activations={policy}", f"memory.versions={versions}", UNTILED]
    where = streaming(tmp_path_factory.mktemp("nvme"), *more)
    smallest, gradients = least(name, clips, where, dtype)
    budget = smallest + int(data.draw(st.sampled_from([0, 0.2, 0.5, 0.8, 1.5])) * gradients)
    how = {"accumulate": data.draw(st.integers(1, 5)), "rule": rule_of(clips), "dtype": dtype, "steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "patience_s", 1.0)
        ours = train(*MODELS[name], [*where, f"memory.device={budget}"], **how)
    assert_bitwise(ours, reference(*MODELS[name], **how))
    assert max(each.peak_nbytes["device"] for each in ours.reports) <= budget


class Deep(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(x).float().square().mean())


@pytest.mark.parametrize("kib", [300, 340])
def test_sums_leave_when_a_longer_micro_batch_leaves_them_no_room(tmp_path, monkeypatch, kib):
    def batch(step: int, *ranks: int) -> dict[str, torch.Tensor]:
        count = 40 if step == 4 else 4
        return {"x": torch.randn(count, 64, generator=torch.Generator().manual_seed(step))}

    where = streaming(tmp_path, "memory.activations=plan", UNTILED, f"memory.device={kib}KiB")
    how: dict[str, Any] = {"accumulate": 3, "rule": rule_of(False), "steps": 2, "dtype": "fp32"}
    monkeypatch.setattr(Pool, "patience_s", 1.0)
    ours = train(seeded(Deep), batch, where, **how)
    assert_bitwise(ours, reference(seeded(Deep), batch, **how))
    assert max(each.peak_nbytes["device"] for each in ours.reports) <= kib * KIB
    assert ours.reports[1].spilled_nbytes > ours.reports[0].spilled_nbytes == 0


def on_two_ranks(folder: str) -> list[tuple[int, list[Trained]]]:
    found, where = [], streaming(folder, UNTILED)
    for name, clips, accumulate in (("llama", True, 3), ("nest", False, 2)):
        smallest, _ = least(name, clips, where)
        how = {"accumulate": accumulate, "rule": rule_of(clips), "steps": 2}
        ours = [
            train(
                *MODELS[name], [*where, f"memory.device={nbytes}"], **how,
                rank=torch.distributed.get_rank(), world=2,
            )
            for nbytes in (smallest, smallest + 32 * KIB, 64 * KIB**2)
        ]  # fmt: skip
        found.append((smallest, ours))
    return found


@pytest.mark.slow
def test_on_two_ranks_sums_of_shards_wait_elsewhere_too(tmp_path):
    for found in run_ranks(on_two_ranks, 2, str(tmp_path)):
        for smallest, (tight, roomier, ample) in found:
            assert_bitwise(tight, ample)
            assert_bitwise(roomier, ample)
            assert max(each.peak_nbytes["device"] for each in tight.reports) <= smallest
            assert tight.reports[-1].spilled_nbytes > ample.reports[-1].spilled_nbytes == 0


class SlowReads:
    """Stored gradients, all zero; a read ends when the test says so; ``waited_for``: somebody waits."""

    def __init__(self) -> None:
        self.reads: list[Transfer] = []
        self.waited_for = threading.Event()

    def write(self, *_: Any) -> Transfer:
        written = Transfer()
        written.finish()
        return written

    def read(self, *_: Any) -> Transfer:
        waited_for = self.waited_for

        class Read(Transfer):
            def wait(self) -> None:
                waited_for.set()
                super().wait()

        self.reads.append(Read())
        return self.reads[-1]


def sums_away(count: int) -> tuple[Sums, SlowReads, CountingPool, list[Any]]:
    """Sums of ``count`` units, all of which have left a device with room for two pages."""
    stored, pool = SlowReads(), CountingPool(HostPool(2 * 4 * KIB), lambda _, wait: wait())
    units: list[Any] = [SimpleNamespace(index=i, name=f"layers.{i}") for i in range(count)]
    sums = Sums(pool, None, stored, None)  # type: ignore[arg-type]
    sums.leaving, sums.ahead = frozenset(range(count)), True
    for unit in units:
        lease = pool.lease(4 * KIB, who=unit.name)
        sums.put(unit, Gradient(lease, torch.float32, bytearray(b"\1")))
    return sums, stored, pool, units


def test_a_sum_that_comes_for_a_reduction_keeps_its_memory_while_others_find_no_room():
    sums, stored, pool, [unit] = sums_away(1)
    sums.expect(unit)
    with ThreadPoolExecutor(2) as threads:
        taken = threads.submit(sums.take, unit)  # as the thread of collectives
        assert stored.waited_for.wait(10)
        reclaimed = threads.submit(pool.reclaim[0])  # as the training thread, which finds no room
        stored.reads[0].finish()
        reclaimed.result(10)
        total = taken.result(10)
    assert total is not None
    assert len(total.flat) == KIB  # a lease that was released raises
    assert pool.leased_nbytes == 4 * KIB


def test_a_sum_that_came_ahead_gives_its_memory_back_and_comes_again():
    sums, stored, pool, [first, second] = sums_away(2)
    sums.expect_next([first, second])
    stored.reads[0].finish()
    assert pool.leased_nbytes == 4 * KIB
    with pool.lease(2 * 4 * KIB, who="another"):
        assert pool.leased_nbytes == 2 * 4 * KIB
    sums.expect_next([first, second])
    for read in stored.reads:
        read.finish()
    assert [len(total.flat) for total in [sums.take(first)] if total is not None] == [KIB]
    assert len(stored.reads) == 2
    sums.expect_next([first, second])
    sums.clear()
    stored.reads[-1].finish()
    assert pool.leased_nbytes == 4 * KIB  # the one that was taken


def test_sums_are_divided_again_when_no_reduction_takes_or_puts_one(tmp_path):
    """Else a sum could leave between the look for it and the taking, and would be lost."""
    model = training.build(MODELS["llama"][0], "bf16", [*streaming(tmp_path, UNTILED)])
    optimizer = training.optimizer_for(model, rule_of(False))
    reduction, ended = Transfer(), list[bool]()
    runtime_of(model).executor().updates.announce(reduction)
    divide = Sums.divide

    def seen(*args: Any, **more: Any) -> None:
        ended.append(reduction.done())
        divide(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "divide", seen)
        threading.Timer(0.2, reduction.finish).start()
        infinity.no_sync(model).__enter__()  # the first one divides again
    assert ended == [True]
    optimizer.close()


def test_a_sum_that_could_not_be_written_is_an_error_of_the_next_micro_batch_and_can_be_forgotten(tmp_path):
    where = streaming(tmp_path, UNTILED)
    smallest, _ = least("llama", False, where)
    factory, batches = MODELS["llama"]
    model = training.build(factory, "bf16", [*where, f"memory.device={smallest}"])
    optimizer = training.optimizer_for(model, rule_of(False))
    engine = runtime_of(model).tiers.store.engine
    failed = Transfer()
    failed.finish(OSError(28, "No space left on device"))
    with infinity.no_sync(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "write", lambda *_: failed)
        model(**batches(0)).loss.backward()
        with pytest.raises(OSError, match="No space"):
            model(**batches(1)).loss.backward()
    optimizer.zero_grad()
    plain = reference(*MODELS["llama"], steps=1, accumulate=2, rule=rule_of(False))
    losses = []
    with infinity.no_sync(model):
        losses.append(model(**batches(0)).loss)
        losses[0].backward()
    losses.append(model(**batches(1)).loss)
    losses[1].backward()
    optimizer.step()
    assert [loss.item() for loss in losses] == plain.losses
    for weight, mine in infinity.state_dict(model).items():
        assert torch.equal(mine, plain.weights[weight])
    optimizer.close()


@pytest.mark.parametrize("count", [0, 1.5, "2"])
def test_a_number_of_micro_batches_is_whole_and_above_zero(count):
    with pytest.raises(SettingError, match="micro_batches"), infinity.no_sync(torch.nn.Linear(1, 1), count):
        pass
