"""From budgets and the model to sizes: the arithmetic, and the errors that show it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core import budget
from infinity.core.budget import UnitSizes, check_gradients_fit_host, chunk_numel, divide_device, rounded
from infinity.core.errors import BudgetError

MIB = 2**20
QUANTUM = 2048
LAYER = UnitSizes(
    "layers.0", 4 * MIB, 4 * MIB, 4 * MIB, streams=True, on_nvme=True, trainable=True, waits=True
)


@st.composite
def unit_sizes(draw, index: int = 0) -> UnitSizes:
    full = 4096 * draw(st.integers(1, 8000))
    streams = draw(st.booleans())
    return UnitSizes(
        name=f"layers.{index}", full=full, shard_grad=full, shard_weight=full, streams=streams,
        on_nvme=streams and draw(st.booleans()), trainable=(trainable := draw(st.booleans())),
        waits=trainable and draw(st.booleans()),
    )  # fmt: skip


models = st.lists(unit_sizes(), min_size=1, max_size=12)


def least(units, early: bool, world_size: int) -> int:
    """The smallest budget, as the error tells it."""
    with pytest.raises(BudgetError) as raised:
        divide_device(1, 0, units, early=early, world_size=world_size)
    return int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])


@given(models, st.booleans(), st.sampled_from([1, 4]))
def test_what_the_error_says_is_needed_is_enough_and_no_less(units, early, world_size):
    needed = least(units, early, world_size)
    assert divide_device(needed, 0, units, early=early, world_size=world_size).total == needed
    with pytest.raises(BudgetError):
        divide_device(needed - 1, 0, units, early=early, world_size=world_size)


@given(
    models, st.booleans(), st.sampled_from([1, 4]), st.lists(st.integers(0, 2**33), min_size=2, max_size=2)
)
def test_a_larger_budget_never_gives_less(units, early, world_size, more):
    needed = least(units, early, world_size)
    small, large = (
        divide_device(needed + n, 0, units, early=early, world_size=world_size) for n in sorted(more)
    )
    assert small.hold_weights <= large.hold_weights
    if small.hold_weights == large.hold_weights:
        assert small.window <= large.window
    assert small.window <= small.total


@given(models, st.booleans(), st.sampled_from([1, 4]), st.integers(0, 2**33))
def test_the_window_holds_two_of_the_largest_and_leaves_what_gradients_need(units, early, world_size, more):
    needed = least(units, early, world_size)
    division = divide_device(needed + more, 0, units, early=early, world_size=world_size)
    largest = max((rounded(u.full) for u in units if u.streams), default=0)
    held = sum(rounded(u.shard_grad) for u in units if u.waits)
    working = max(rounded(u.full) for u in units)
    assert division.window >= 2 * largest
    assert division.total - division.window >= held + 2 * working


@given(models, st.booleans(), st.integers(0, 2**36), st.sampled_from([1, 4]))
def test_a_derived_budget_is_enough_and_stays_under_the_ceiling_where_it_can(
    units, early, ceiling, world_size
):
    needed = least(units, early, world_size)
    total = divide_device(None, ceiling, units, early=early, world_size=world_size).total
    assert needed <= total <= max(needed, ceiling)


def test_the_device_budget_in_numbers():
    units = [LAYER, replace(LAYER, name="layers.1"), replace(LAYER, name="layers.2", full=8 * MIB)]
    at_once = [replace(unit, waits=False) for unit in units]
    gradients, working, window = 12 * MIB, 2 * 8 * MIB, 2 * 8 * MIB
    assert least(units, early=False, world_size=1) == gradients + working + window
    assert least(at_once, early=True, world_size=1) == working + window  # no gradient waits
    assert least(units, early=True, world_size=1) == gradients + working + window  # micro-batches
    assert least(units, early=False, world_size=2) == gradients + 4 * 8 * MIB + window
    # clipping: weights are held for the update only if all of them fit beside the rest
    tight = divide_device(44 * MIB + 11 * MIB, 0, units, early=False, world_size=1)
    assert (tight.hold_weights, tight.window) == (False, window + 11 * MIB)
    roomy = divide_device(44 * MIB + 13 * MIB, 0, units, early=False, world_size=1)
    assert (roomy.hold_weights, roomy.window) == (True, window + MIB)


def test_the_error_names_every_part_and_what_to_turn():
    unit = replace(LAYER, name="layers.7")
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [unit] * 3, early=False, world_size=1)
    text = str(raised.value)
    parts = (
        "is 1 MiB", "at least 28 MiB", "12 MiB of gradients that wait for step()",
        "8 MiB for the gradient and update",
        "layers.7, 4 MiB", "8 MiB for two units", "Raise memory.device", "max_grad_norm=null",
    )  # fmt: skip
    for part in parts:
        assert part in text
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [unit], early=True, world_size=1)
    assert "4 MiB of gradients that wait for the last micro-batch" in str(raised.value)
    assert "train.schedule=layer" in str(raised.value)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [replace(unit, waits=False)], early=True, world_size=1)
    assert str(raised.value).endswith("Raise memory.device")


def test_a_unit_that_one_parameter_fills_is_explained_by_its_name_and_size():
    unit = replace(LAYER, parameter="layers.0.experts.down_proj", parameter_nbytes=3 * MIB)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [unit], early=True, world_size=1)
    assert "layers.0.experts.down_proj alone takes 3 MiB: one operator reads it whole" in str(raised.value)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [replace(unit, parameter_nbytes=MIB)], early=True, world_size=1)
    assert "alone" not in str(raised.value)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 200))
def test_a_gradient_goes_to_an_accelerators_update_through_host_memory(grad, chunk, staging):
    small = replace(LAYER, shard_grad=4096)
    units = [small, replace(LAYER, name="layers.9", shard_grad=grad * 4096), replace(small, trainable=False)]
    if (grad + chunk) <= staging:
        check_gradients_fit_host(staging * 4096, chunk * 4096, units)
        return
    with pytest.raises(BudgetError, match=r"layers\.\d.*Raise memory\.host by") as raised:
        check_gradients_fit_host(staging * 4096, chunk * 4096, units)
    missing = int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])
    check_gradients_fit_host(staging * 4096 + missing, chunk * 4096, units)


@given(st.integers(0, 2**36))
def test_pieces_for_an_accelerator_are_blocks_that_fit_together(staging):
    nbytes = budget.piece_nbytes(staging)
    assert nbytes % 4096 == 0
    assert nbytes == 4096 or budget.STAGED_PIECES * nbytes <= staging


def test_a_model_without_parameters_needs_nothing():
    assert divide_device(1, 0, [], early=True, world_size=1).window >= 0


@given(st.integers(0, 2**36), st.sampled_from([6, 10, 12, 14]), st.integers(1, 64))
def test_staged_chunks_fit_and_are_as_large_as_they_may_be(staging, itemsize, most):
    most *= QUANTUM
    if staging < budget.STAGED_CHUNKS * rounded(QUANTUM * itemsize):
        with pytest.raises(BudgetError, match=r"Raise memory\.host"):
            chunk_numel(staging, itemsize, most)
        return
    numel = chunk_numel(staging, itemsize, most)
    assert numel % QUANTUM == 0
    assert 0 < numel <= most
    assert budget.STAGED_CHUNKS * rounded(numel * itemsize) <= staging
    larger = numel + QUANTUM
    assert larger > most or budget.STAGED_CHUNKS * rounded(larger * itemsize) > staging


@given(st.integers(2**17, 2**34), st.integers(0, 2**30), st.sampled_from([6, 10, 12, 14]))
def test_more_staging_never_gives_smaller_chunks(staging, more, itemsize):
    assert chunk_numel(staging, itemsize, 2**22) <= chunk_numel(staging + more, itemsize, 2**22)


@given(st.integers(0, 2**34))
def test_pools_round_up_to_blocks_and_large_buffers_to_grains(nbytes):
    grain = 2 * MIB if nbytes >= 2 * MIB else 4096
    assert rounded(nbytes) % grain == 0
    assert 0 <= rounded(nbytes) - nbytes < grain
