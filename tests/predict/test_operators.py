"""Operators are written down without values, and timed once for each that differs."""

import itertools
import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infinity.predict import operators
from infinity.predict.operators import COLD, Operation, OperatorTimes, Touches, times_of_rank

CPU = torch.device("cpu")


def matmul(rows: int) -> Operation:
    made = Operation.of(torch.ops.aten.mm.default, (torch.ones(rows, 8), torch.ones(8, 4).t().t()), {})
    assert made is not None
    return made


def calls(*operations: Operation | None) -> list[tuple[Operation | None, float, float]]:
    return [(each, 1e-6, 1e3) for each in operations]


def test_calls_that_differ_in_values_alone_are_one() -> None:
    left, right = torch.rand(16, 8), torch.rand(8, 4)
    made = Operation.of(torch.ops.aten.mm.default, (left, right), {})
    assert made == matmul(16)
    assert hash(made) == hash(matmul(16))
    assert made != matmul(17)
    assert made != Operation.of(torch.ops.aten.mm.default, (left, torch.rand(4, 8).t()), {})  # strides


def test_each_operator_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Operation] = []
    monkeypatch.setattr(Operation, "time_s", lambda self, *args: timed.append(self) or 0.25)
    times = OperatorTimes(CPU, 1)
    times.measure(calls(matmul(16), None, matmul(16), matmul(17)))
    rounds = len(timed) // 2
    assert timed == [matmul(16), matmul(17)] * rounds
    times.measure(calls(matmul(17)))
    assert len(timed) == 2 * rounds
    assert times.of(matmul(17)) == 0.25
    assert math.isnan(times.of(None))


def test_what_was_timed_holds_for_all_plans_of_a_process() -> None:
    assert times_of_rank(1, 1) is times_of_rank(2, 1)


def test_operators_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Operation] = []

    def time_s(operation: Operation, *args: object) -> float:
        ran.append(operation)
        number = ran.count(operation)
        return 90.0 if number == 1 else 100.0 * (operation == matmul(17)) + number

    monkeypatch.setattr(Operation, "time_s", time_s)
    times = OperatorTimes(CPU, 1)
    times.measure(calls(matmul(16), matmul(17)))
    rounds = len(ran) // 2
    assert rounds > 2
    assert ran == [matmul(16), matmul(17)] * rounds
    middle = statistics.median(range(2, rounds + 1))
    assert (times.of(matmul(16)), times.of(matmul(17))) == (middle, 100.0 + middle)


def test_the_age_of_an_argument_is_what_was_touched_since_its_last_use() -> None:
    touches, mib = Touches(), 2**20
    left, right, other = (torch.zeros(n * mib, dtype=torch.uint8) for n in (1, 2, 13))
    assert touches.age(left) == COLD
    touches.note([left])
    assert touches.age(left[5:]) == 2**14  # a view of it; the least age
    touches.note([right])
    assert touches.age(left) == 4 * mib  # the nearest of a few above
    touches.note([other])
    assert touches.age(left) == touches.age(right) == 16 * mib
    touches.note([other] * 2)
    assert touches.age(left) == COLD
    made = Operation.of(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}, touches.age)
    assert made == Operation.of(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})


def test_arguments_become_as_old_as_they_are_the_oldest_first() -> None:
    touched: list[tuple[str, int]] = []

    class Other:
        def __len__(self) -> int:
            return COLD

        def __getitem__(self, part: slice) -> "Other":
            touched.append(("others", part.stop))
            return self

        def add_(self, _: int) -> None: ...

        def new_empty(self, _: int) -> "Other":
            return self

        def set_(self, storage: torch.UntypedStorage) -> "Other":
            touched.append(("argument", storage.nbytes()))
            return self

    ages = {1: 2**14, 2: COLD, 3: 2**20, 4: 2**14}  # by the elements of an argument
    given = tuple(torch.zeros(numel) for numel in ages)
    operation = Operation.of(lambda *args: None, given, {}, lambda tensor: ages[tensor.numel()])
    assert operation is not None
    operation.time_s(CPU, time.perf_counter, Other())  # type: ignore[arg-type]
    assert touched == [
        ("others", COLD - 2**20), ("argument", 12), ("others", 2**20 - 2**14), ("argument", 4), ("others", 0),
        ("argument", 16), ("others", 2**14),
    ]  # fmt: skip


def test_operators_run_on_tensors_of_their_sizes_and_those_that_look_at_values_have_no_time() -> None:
    times = OperatorTimes(CPU, 1)
    given = torch.zeros(4, 8), torch.zeros(3, dtype=torch.int64)
    embedding = Operation.of(torch.ops.aten.embedding.default, given, {})
    made = Operation.of(torch.ops.aten.zeros.default, ([4, 8],), {"dtype": torch.float32, "device": CPU})
    refused = Operation.of(torch.ops.aten.linalg_cholesky.default, (torch.ones(3, 3),), {})  # not definite
    times.measure(calls(embedding, made, refused, matmul(16)))
    assert all(times.of(each) > 0 for each in (embedding, made, matmul(16)))
    assert math.isnan(times.of(refused))
    assert (
        Operation.of(torch.ops.aten.mm.default, (torch.ones(2, 2).to_sparse(), torch.ones(2, 2)), {}) is None
    )


def test_operators_run_on_real_tensors_also_while_a_model_of_fake_ones_is_recorded() -> None:
    ran: list[type] = []
    func = torch.ops.aten.mm.default
    operation = replace(matmul(16), func=lambda *args: ran.append(type(func(*args))))
    times = OperatorTimes(CPU, 1)
    with FakeTensorMode():
        times.measure(calls(operation))
    assert set(ran) == {torch.Tensor}


def test_what_takes_long_or_much_memory_is_left_to_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Operation] = []
    monkeypatch.setattr(Operation, "time_s", lambda self, *args: timed.append(self) or 0.25)
    times = OperatorTimes(CPU, 1)
    large = Operation.of(torch.ops.aten.zeros.default, ([2**40],), {})  # its arguments are small
    times.measure([(matmul(16), 100.0, 1e3), (large, 1e-6, 2.0**42), *calls(matmul(17))])
    assert set(timed) == {matmul(17)}
    assert math.isnan(times.of(matmul(16)))
    assert math.isnan(times.of(large))


def test_an_operator_whose_turn_did_not_come_is_timed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operation, "time_s", lambda self, *args: 0.25)
    times = OperatorTimes(CPU, 1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", itertools.count(step=1000.0).__next__)  # each look is too late
        times.measure(calls(matmul(16)))
    assert math.isnan(times.of(matmul(16)))
    times.measure(calls(matmul(16)))
    assert times.of(matmul(16)) == 0.25


def test_what_an_operator_raises_ends_no_plan() -> None:
    def refuse(*args: object) -> None:
        raise ValueError

    operation, times = replace(matmul(16), func=refuse), OperatorTimes(CPU, 1)
    times.measure(calls(operation))
    assert math.isnan(times.of(operation))


def test_timing_draws_no_random_numbers() -> None:
    drawn = Operation.of(torch.ops.aten.bernoulli.p, (torch.zeros(8), 0.5), {})
    before = torch.get_rng_state()
    times = OperatorTimes(CPU, 1)
    times.measure(calls(drawn))
    assert times.of(drawn) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_are_no_more_than_cores() -> None:
    threads: list[int] = []
    operation = replace(matmul(16), func=lambda *args: threads.append(torch.get_num_threads()))
    times_of_rank(1, 10**6).measure(calls(operation))
    assert 1 <= max(threads) <= operators.usable_cores()
