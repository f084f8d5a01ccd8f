"""Operators are written down without values, and timed once for each that differs."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infinity.app import operators
from infinity.app.operators import Operation, OperatorTimes

CPU = torch.device("cpu")


def matmul(rows: int) -> Operation:
    made = Operation.of(torch.ops.aten.mm.default, (torch.ones(rows, 8), torch.ones(8, 4).t().t()), {})
    assert made is not None
    return made


def test_calls_that_differ_in_values_alone_are_one() -> None:
    left, right = torch.rand(16, 8), torch.rand(8, 4)
    made = Operation.of(torch.ops.aten.mm.default, (left, right), {})
    assert made == matmul(16)
    assert hash(made) == hash(matmul(16))
    assert made != matmul(17)
    assert made != Operation.of(torch.ops.aten.mm.default, (left, torch.rand(4, 8).t()), {})  # strides


def test_each_operator_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Operation] = []
    monkeypatch.setattr(
        operators, "_time_s", lambda operation, device, clock: timed.append(operation) or 0.25
    )
    times = OperatorTimes(CPU, 1)
    times.measure([matmul(16), None, matmul(16), matmul(17)])
    times.measure([matmul(17)])
    assert timed == [matmul(16), matmul(17)]
    assert times.of(matmul(17)) == 0.25
    assert math.isnan(times.of(None))


def test_operators_run_on_tensors_of_their_sizes_and_those_that_look_at_values_have_no_time() -> None:
    times = OperatorTimes(CPU, 1)
    given = torch.zeros(4, 8), torch.zeros(3, dtype=torch.int64)
    embedding = Operation.of(torch.ops.aten.embedding.default, given, {})
    made = Operation.of(torch.ops.aten.zeros.default, ([4, 8],), {"dtype": torch.float32, "device": CPU})
    refused = Operation.of(torch.ops.aten.linalg_cholesky.default, (torch.ones(3, 3),), {})  # not definite
    times.measure([embedding, made, refused, matmul(16)])
    assert all(times.of(each) > 0 for each in (embedding, made, matmul(16)))
    assert math.isnan(times.of(refused))
    assert (
        Operation.of(torch.ops.aten.mm.default, (torch.ones(2, 2).to_sparse(), torch.ones(2, 2)), {}) is None
    )


def test_operators_run_on_real_tensors_also_while_a_model_of_fake_ones_is_recorded() -> None:
    ran: list[type] = []
    func = torch.ops.aten.mm.default
    operation = matmul(16)._replace(func=lambda *args: ran.append(type(func(*args))))
    times = OperatorTimes(CPU, 1)
    with FakeTensorMode():
        times.measure([operation])
    assert set(ran) == {torch.Tensor}
