"""From budgets and the model to sizes: the arithmetic, and the errors that show it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.core import budget
from infinity.core.budget import Sharing, UnitSizes, chunk_numel, divide_device, settled_nbytes, spread
from infinity.core.errors import BudgetError
from infinity.core.nbytes import rounded

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
        on_nvme=(on_nvme := streams and draw(st.booleans())), trainable=(trainable := draw(st.booleans())),
        waits=(waits := trainable and draw(st.booleans())), spills=waits and on_nvme and draw(st.booleans()),
    )  # fmt: skip


models = st.lists(unit_sizes(), min_size=1, max_size=12)


def least(units, early: bool, world_size: int) -> int:
    """The smallest budget, as the error tells it."""
    with pytest.raises(BudgetError) as raised:
        divide_device(
            -1, 0, units, Sharing(early=early, world_size=world_size)
        )  # without streams 0 may be enough
    return int(re.search(r"\((\d+) bytes\)", str(raised.value))[1])


@given(models, st.booleans(), st.sampled_from([1, 4]))
def test_what_the_error_says_is_needed_is_enough_and_no_less(units, early, world_size):
    needed = least(units, early, world_size)
    assert divide_device(needed, 0, units, Sharing(early=early, world_size=world_size)).total == needed
    with pytest.raises(BudgetError):
        divide_device(needed - 1, 0, units, Sharing(early=early, world_size=world_size))


def test_an_error_says_which_budget_is_too_small():
    small = {
        "memory.device": lambda: divide_device(1, 0, [LAYER], Sharing(early=False, world_size=1)),
        "memory.host": lambda: chunk_numel(1, 2, 14, 2**20),
    }
    for part, divide in small.items():
        with pytest.raises(BudgetError, match=part) as raised:
            divide()
        assert raised.value.part == part


@given(
    models, st.booleans(), st.sampled_from([1, 4]), st.lists(st.integers(0, 2**33), min_size=2, max_size=2)
)
def test_a_larger_budget_never_gives_less(units, early, world_size, more):
    needed = least(units, early, world_size)
    small, large = (
        divide_device(needed + n, 0, units, Sharing(early=early, world_size=world_size)) for n in sorted(more)
    )
    assert small.hold_weights <= large.hold_weights
    if small.hold_weights == large.hold_weights:
        assert small.window <= large.window
    assert small.window <= small.total


@given(models, st.booleans(), st.sampled_from([1, 4]), st.integers(0, 2**33))
def test_the_window_holds_two_of_the_largest_and_leaves_what_gradients_need(units, early, world_size, more):
    needed = least(units, early, world_size)
    division = divide_device(needed + more, 0, units, Sharing(early=early, world_size=world_size))
    assert division.least == needed
    largest = max((rounded(u.full) for u in units if u.streams), default=0)
    held = sum(rounded(u.shard_grad) for i, u in enumerate(units) if u.waits and i not in division.spilled)
    working = max((rounded(u.full) for u in units if u.trainable), default=0)
    assert division.window >= 2 * largest
    assert division.total - division.window >= held + 2 * working


@given(models, st.booleans(), st.integers(0, 2**36), st.sampled_from([1, 4]))
def test_a_derived_budget_is_enough_and_stays_under_the_ceiling_where_it_can(
    units, early, ceiling, world_size
):
    needed = least(units, early, world_size)
    total = divide_device(None, ceiling, units, Sharing(early=early, world_size=world_size)).total
    assert needed <= total <= max(needed, ceiling)


def test_the_device_budget_in_numbers():
    held = replace(LAYER, on_nvme=False)
    units = [held, replace(held, name="layers.1"), replace(held, name="layers.2", full=8 * MIB)]
    at_once = [replace(unit, waits=False) for unit in units]
    gradients, working, window = 12 * MIB, 2 * 8 * MIB, 2 * 8 * MIB
    assert least(units, early=False, world_size=1) == gradients + working + window
    assert least(at_once, early=True, world_size=1) == working + window  # no gradient waits
    assert least(units, early=True, world_size=1) == gradients + working + window  # micro-batches
    assert least(units, early=False, world_size=2) == gradients + 4 * 8 * MIB + window
    units = [replace(unit, on_nvme=True) for unit in units]
    # clipping: weights are held for the update only if all of them fit beside the rest
    tight = divide_device(44 * MIB + 11 * MIB, 0, units, Sharing(early=False, world_size=1))
    assert (tight.hold_weights, tight.window) == (False, window + 11 * MIB)
    roomy = divide_device(44 * MIB + 13 * MIB, 0, units, Sharing(early=False, world_size=1))
    assert (roomy.hold_weights, roomy.window) == (True, window + MIB)


def test_frozen_units_need_a_window_and_neither_gradients_nor_updates():
    frozen = replace(LAYER, name="experts", full=20 * MIB, stored=9 * MIB, trainable=False, waits=False)
    adapter = replace(LAYER, name="adapters", full=2 * MIB, shard_grad=2 * MIB)
    window = 2 * (20 + 10) * MIB
    assert least([frozen] * 3, early=True, world_size=1) == window
    assert least([frozen, adapter, frozen], early=False, world_size=1) == window + 3 * 2 * MIB
    assert least([frozen, adapter, frozen], early=False, world_size=2) == window + 5 * 2 * MIB
    experts = [frozen, replace(adapter, waits=False), frozen]
    made = divide_device(None, 0, experts, Sharing(early=True, world_size=2, together=[(0, 1, 2)]))
    assert made.least == (30 + 2 + 30 + 30) * MIB + max(4 * 2, 2 + 3 * 2) * MIB
    with pytest.raises(BudgetError) as raised:
        divide_device(1, 0, [frozen, adapter], Sharing(early=False, world_size=1))
    assert (
        "4 MiB for the gradient and update of the largest unit that is trained (adapters, 2 MiB), 60 MiB "
        in (str(raised.value))
    )
    assert "for two units in flight (experts, 20 MiB). Raise" in str(raised.value)
    with pytest.raises(BudgetError) as raised:
        divide_device(1, 0, [frozen], Sharing(early=False, world_size=1))
    assert "update" not in str(raised.value)


def test_units_in_use_at_one_time_have_room_and_one_of_them_is_decoded():
    units = [replace(LAYER, name=f"layers.{i}", stored=MIB, trainable=False, waits=False) for i in range(6)]
    units[5] = replace(units[5], streams=False)
    made = divide_device(None, 0, units, Sharing(early=True, world_size=1, in_use=[(0, 1)]))
    assert made.least == 2 * 5 * MIB
    in_use = [(1, 2), (0, 1, 2, 3, 5), (4, 5)]
    made = divide_device(None, 0, units, Sharing(early=True, world_size=1, in_use=in_use))
    assert made.least == made.window == (4 * 4 + 1) * MIB
    with pytest.raises(BudgetError, match=r"17 MiB for units in use at one time"):
        divide_device(made.least - 1, 0, units, Sharing(early=True, world_size=1, in_use=in_use))


def test_gradients_of_units_on_nvme_spill_where_memory_is_short_and_no_more_than_must():
    units = [replace(LAYER, name=f"layers.{i}", spills=True) for i in range(5)]
    units[1] = replace(units[1], spills=False, on_nvme=False)
    fixed = 4 * MIB + 2 * 4 * MIB + 2 * 4 * MIB  # the gradient that stays, working memory and window

    def spilled(total: int | None, ceiling: int = 0, **options: int) -> tuple[int, ...]:
        made = divide_device(total, ceiling, units, Sharing(early=False, world_size=1), **options)
        assert made.least == fixed
        assert made.total >= fixed
        if made.spilled:
            assert (made.window, made.hold_weights, made.lag) == (8 * MIB, False, 0)
        return made.spilled

    assert spilled(fixed + 16 * MIB) == ()
    # The first units keep theirs, beside room for one that comes while one is written.
    assert spilled(fixed + 16 * MIB - 4096) == (3, 4)
    assert spilled(fixed + 8 * MIB) == (2, 3, 4) == spilled(fixed + 11 * MIB)
    assert spilled(fixed) == (0, 2, 3, 4) == spilled(fixed + 4 * MIB)
    with pytest.raises(BudgetError, match=rf"at least 20 MiB \({fixed} bytes\)"):
        spilled(fixed - 4096)
    # A derived budget keeps within its ceiling, or takes what may be taken of planned activations.
    assert spilled(None, fixed + 12 * MIB) == (3, 4)
    assert spilled(None, fixed + 12 * MIB, spill_above=fixed + 16 * MIB) == ()
    assert spilled(None, fixed + 12 * MIB, spill_above=fixed + 15 * MIB) == (3, 4)
    # Gradients of other sizes: the largest that fit stay.
    units[2] = replace(units[2], shard_grad=10 * MIB)
    assert spilled(fixed + 10 * MIB + 10 * MIB) == (0, 3, 4)


@given(models, st.sampled_from([1, 4]), st.integers(0, 2**33), st.integers(0, 2**33))
def test_spilled_gradients_may_spill_and_are_needed(units, world_size, more, ceiling):
    needed = least(units, False, world_size)
    made = divide_device(needed + more, ceiling, units, Sharing(early=False, world_size=world_size))
    assert all(units[i].spills for i in made.spilled)
    assert sorted(set(made.spilled)) == list(made.spilled)
    spilling = sum(rounded(u.shard_grad) for u in units if u.spills)
    assert bool(made.spilled) == (more < spilling)


def test_a_block_of_a_layer_schedule_has_its_window_before_gradients_that_could_spill():
    units = [replace(LAYER, name=f"layers.{i}", spills=True) for i in range(5)]
    total = (2 + 2 + 4) * 4 * MIB
    made = divide_device(total, 0, units, Sharing(early=False, world_size=1))
    assert (made.window, made.spilled) == (8 * MIB, (3, 4))
    made = divide_device(total, 0, units, Sharing(early=False, world_size=1, block=20 * MIB))
    assert (made.window, made.spilled) == (20 * MIB, (0, 1, 2, 3, 4))
    with pytest.raises(BudgetError, match=r"28 MiB for all micro-batches in one block"):
        divide_device(total, 0, units, Sharing(early=False, world_size=1, block=28 * MIB))


def test_the_error_names_every_part_and_what_to_turn():
    unit = replace(LAYER, name="layers.7", on_nvme=False)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [unit] * 3, Sharing(early=False, world_size=1))
    text = str(raised.value)
    parts = (
        "is 1 MiB", "at least 28 MiB", "12 MiB of gradients that wait for step()",
        "8 MiB for the gradient and update",
        "layers.7, 4 MiB", "8 MiB for two units", "Raise memory.device",
    )  # fmt: skip
    for part in parts:
        assert part in text
    with pytest.raises(BudgetError, match=r"or set memory\.resident=false"):
        divide_device(1 * MIB, 0, [unit, replace(LAYER, waits=False)], Sharing(early=False, world_size=1))
    unit = replace(unit, on_nvme=True)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [replace(unit, waits=False)], Sharing(early=True, world_size=1))
    assert str(raised.value).endswith("Raise memory.device")


def test_a_unit_that_one_parameter_fills_is_explained_by_its_name_and_size():
    unit = replace(LAYER, parameter="layers.0.experts.down_proj", parameter_nbytes=3 * MIB)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [unit], Sharing(early=True, world_size=1))
    assert "layers.0.experts.down_proj alone takes 3 MiB, and is gathered whole" in str(raised.value)
    with pytest.raises(BudgetError) as raised:
        divide_device(1 * MIB, 0, [replace(unit, parameter_nbytes=MIB)], Sharing(early=True, world_size=1))
    assert "alone" not in str(raised.value)


@st.composite
def beside_an_accelerator(draw, early: bool) -> list[UnitSizes]:
    """Units whose gradients wait in host memory, for ``step`` or for their update."""
    spills = draw(st.booleans())
    return [
        replace(
            unit, streams=True, waits=False, waits_in_host=unit.trainable and not (early and unit.on_nvme),
            spills=spills and unit.trainable and unit.on_nvme and not early,
        )
        for unit in draw(models)
    ]  # fmt: skip


@given(
    st.data(), st.booleans(), st.booleans(), st.integers(0, 2**34), st.integers(0, 100), st.integers(0, 100)
)
def test_the_host_budget_beside_an_accelerator_holds_what_waits_or_says_what_does(
    data, early, resident, total, share_of_chunks, share_of_residents
):
    """Of any budget chunks take at most what storage gives them, and residents half of the rest."""
    units = data.draw(beside_an_accelerator(early))
    beside = sum(rounded(u.shard_grad) for u in units if u.trainable and not u.on_nvme)

    def divide(total: int) -> tuple[budget.HostBudget, int]:
        chunks = total // (4 if resident else 2) * share_of_chunks // 100
        residents = (total - chunks) // 2 * share_of_residents // 100 if resident else 0
        residents = max(0, residents - beside)  # a unit is a resident with its gradient
        found = budget.divide_host(total, residents, chunks, units, resident=resident)
        return found, total - residents - chunks

    if not resident and beside:
        spills = any(u.spills for u in units) and not early
        units = [
            replace(u, on_nvme=True, waits_in_host=u.trainable and not early, spills=u.trainable and spills)
            for u in units
        ]
        beside = 0
    total = max(total, 4 * beside)
    try:
        found, free = divide(total)
    except BudgetError as error:
        enough = int(re.search(r"\((\d+) bytes\) are enough", str(error))[1])
        assert enough > total
        found, free = divide(enough)
    waiting = sum(
        rounded(u.shard_grad) for i, u in enumerate(units) if u.waits_in_host and i not in found.spilled
    )
    assert all(units[i].spills for i in found.spilled)
    passing = max((rounded(units[i].shard_grad) for i in found.spilled), default=0)
    updated = [u for u in units if u.trainable and u.on_nvme]
    largest = max((rounded(u.shard_grad) for u in updated), default=0)
    assert found.gradients >= (beside + largest if early else waiting + passing)
    assert found.gradients + found.weights + found.staging <= free
    assert rounded(found.piece) + found.stays <= found.staging
    assert bool(found.piece) == any(u.on_nvme for u in units)


def test_the_host_budget_beside_an_accelerator_in_numbers():
    unit = replace(LAYER, waits=False, waits_in_host=True)
    units = [
        unit,
        replace(unit, name="layers.1"),
        replace(unit, on_nvme=False),
        replace(unit, trainable=False),
    ]
    units[-1] = replace(units[-1], waits_in_host=False)
    gradients, piece = 12 * MIB, budget.LEAST_PIECE_NBYTES

    def divide(total: int, **options: bool) -> budget.HostBudget:
        return budget.divide_host(total, 20 * MIB, 8 * MIB, units, **{"resident": True} | options)

    least = divide(28 * MIB + gradients + piece)
    assert least == budget.HostBudget(gradients, 0, piece, piece, 0)
    with pytest.raises(BudgetError) as raised:
        divide(28 * MIB + gradients + piece - 4096)
    for part in (
        "units in host memory take 24 MiB", "chunks of updates 8 MiB",
        "8 MiB of gradients that wait for step(), and 64 KiB for weights on their way", "raise memory.host",
    ):  # fmt: skip
        assert part in str(raised.value)
    roomy = divide(28 * MIB + gradients + piece + 200 * MIB)
    assert roomy == budget.HostBudget(gradients, 8 * MIB, 16 * MIB + 8 * MIB, 4 * MIB, 8 * MIB)
    units[:2] = [replace(each, spills=True) for each in units[:2]]  # where they do not fit, they spill
    assert divide(28 * MIB + gradients + piece) == least
    assert divide(28 * MIB + gradients + piece - 4096).spilled == (0, 1)
    assert divide(28 * MIB + 8 * MIB + piece).gradients == 8 * MIB  # of a resident, and one on its way
    with pytest.raises(BudgetError, match=r"4 MiB for the gradient of layers\.0, 4 MiB, and 64 KiB for"):
        divide(28 * MIB + 8 * MIB + piece - 4096)
    units[:2] = [replace(each, waits_in_host=False, spills=False) for each in units[:2]]  # inside backward
    assert divide(28 * MIB + 8 * MIB + piece).gradients == 8 * MIB
    with pytest.raises(BudgetError, match=r"4 MiB for the gradient of layers\.0, 4 MiB") as raised:
        divide(28 * MIB)
    assert "max_grad_norm" not in str(raised.value)


def test_gradients_that_wait_in_host_memory_take_no_device_memory():
    units = [replace(LAYER, waits=False, waits_in_host=True)] * 3
    sharing = Sharing(early=False, world_size=1, in_host=True, accumulates=True)
    division = divide_device(16 * MIB, 0, units, sharing)
    assert (division.least, division.lag) == (16 * MIB, 0)
    accumulating = [replace(unit, waits=True) for unit in units]  # they leave for host memory
    made = divide_device(16 * MIB, 0, accumulating, sharing)
    assert (made.least, made.spilled, made.ahead) == (16 * MIB, (0, 1, 2), False)
    made = divide_device(24 * MIB, 0, accumulating, sharing)
    assert (made.least, made.spilled, made.ahead) == (16 * MIB, (1, 2), True)
    assert divide_device(28 * MIB, 0, accumulating, sharing).spilled == ()


def test_gradients_that_have_yet_to_leave_an_accelerator_take_up_to_half_of_what_is_left():
    units = [replace(LAYER, name=f"layers.{i}", waits=False, waits_in_host=True) for i in range(6)]
    sharing = Sharing(early=False, world_size=1, in_host=True)
    least = divide_device(16 * MIB, 0, units, sharing)
    for more, lag in ((0, 0), (8 * MIB, 4 * MIB), (64 * MIB, 6 * (4 * MIB // 3))):  # a third of each
        made = divide_device(16 * MIB + more, 0, units, sharing)
        assert (made.lag, made.window) == (lag, least.window + more - lag)


def test_sums_of_micro_batches_come_back_beside_the_reduction_of_several_ranks():
    units = [replace(LAYER, name=f"layers.{i}", spills=True) for i in range(4)]
    sharing = Sharing(early=True, world_size=2, accumulates=True)
    fixed = 4 * 4 * MIB + 2 * 4 * MIB  # working memory and window
    made = divide_device(fixed + 4 * MIB, 0, units, sharing)
    assert (made.least, made.spilled, made.ahead) == (fixed + 4 * MIB, (0, 1, 2, 3), False)
    assert divide_device(fixed + 16 * MIB, 0, units, sharing).spilled == ()
    with pytest.raises(BudgetError, match=rf"at least 28 MiB \({fixed + 4 * MIB} bytes\)"):
        divide_device(fixed, 0, units, sharing)


@given(st.integers(0, 2**36))
def test_pieces_for_an_accelerator_are_blocks_that_fit_together(staging):
    nbytes = budget.piece_nbytes(staging)
    assert nbytes % 4096 == 0
    assert nbytes == 4096 or budget.STAGED_PIECES * nbytes <= staging


def test_a_model_without_parameters_needs_nothing():
    assert divide_device(1, 0, [], Sharing(early=True, world_size=1)).window >= 0


@given(st.integers(0, 2**36), st.sampled_from([6, 10, 12, 14]), st.integers(1, 64))
def test_staged_chunks_fit_and_are_as_large_as_they_may_be(staging, itemsize, most):
    most *= QUANTUM
    if staging < budget.STAGED_CHUNKS * rounded(QUANTUM * itemsize):
        with pytest.raises(BudgetError, match=r"Raise memory\.host"):
            chunk_numel(staging, 1, itemsize, most)
        return
    numel = chunk_numel(staging, 1, itemsize, most)
    assert numel % QUANTUM == 0
    assert 0 < numel <= most
    assert budget.STAGED_CHUNKS * rounded(numel * itemsize) <= staging
    larger = numel + QUANTUM
    assert larger > most or budget.STAGED_CHUNKS * rounded(larger * itemsize) > staging


@given(st.integers(2**17, 2**34), st.integers(0, 2**30), st.sampled_from([6, 10, 12, 14]))
def test_more_staging_never_gives_smaller_chunks(staging, more, itemsize):
    assert chunk_numel(staging, 1, itemsize, 2**22) <= chunk_numel(staging + more, 1, itemsize, 2**22)


@given(st.integers(0, 2**34))
def test_pools_round_up_to_blocks_and_large_buffers_to_grains(nbytes):
    grain = 2 * MIB if nbytes >= 2 * MIB else 4096
    assert rounded(nbytes) % grain == 0
    assert 0 <= rounded(nbytes) - nbytes < grain


@given(st.integers(0, 2**20), st.sampled_from([6, 10, 12, 14]), st.sampled_from([1, 2, 4]))
def test_the_host_budget_that_the_error_names_is_the_least_for_staging(host, itemsize, share):
    try:
        chunk_numel(host, share, itemsize, 2**22)
    except BudgetError as error:
        named = int(re.search(r"\((\d+) bytes\) or more", str(error))[1])
        assert named > host
        assert chunk_numel(named, share, itemsize, 2**22) == QUANTUM
        with pytest.raises(BudgetError):
            chunk_numel(named - 1, share, itemsize, 2**22)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(0, 6000))
def test_what_is_spread_fits_and_is_everywhere_in_proportion(sizes, room):
    chosen = list(spread(sizes, room))
    assert sum(sizes[i] for i in chosen) <= room
    share = min(room, sum(sizes)) / sum(sizes)
    for end in range(len(sizes)):
        so_far = sum(sizes[i] for i in chosen if i < end)
        assert share * sum(sizes[:end]) - so_far < max(sizes)
    assert room < sum(sizes) or chosen == list(range(len(sizes)))


def test_shards_stay_in_most_of_the_host_budget_where_little_trains():
    room = 800 * MIB
    assert settled_nbytes(room, gradients=0, weights=0) == 700 * MIB
    assert settled_nbytes(room, gradients=50 * MIB, weights=50 * MIB) == 500 * MIB
    assert settled_nbytes(room, gradients=1000 * MIB, weights=1000 * MIB) == 400 * MIB
