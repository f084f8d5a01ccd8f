"""What a run keeps of its plan for activations, and how it reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.core.errors import RecipeError
from infinity.core.plan import (
    PLAN,
    ActivationPlan,
    Hardware,
    Phase,
    Place,
    Planning,
    Profile,
    SlotKey,
    count_blocks,
)
from infinity.planner.lifetimes import operator_times
from infinity.planner.search import plan as make_plan
from infinity.planner.search import simple_plan
from infinity.planner.simulator import play
from infinity.predict.plan_run import plan_rows
from tests.helpers.profiles import hardware, smallest_budget, transformer


def planning_for(profile: Profile, channels: Hardware, budget_nbytes: int | None = None) -> Planning:
    plan = make_plan(profile, channels, budget_nbytes)
    kept, predicted = (play(profile, each, channels) for each in (ActivationPlan("keep"), plan))
    return Planning(profile, channels, plan, kept, predicted, 0.25)


def test_what_is_kept_is_read_back_equal(tmp_path: Path) -> None:
    planning = planning_for(transformer(layers=3), hardware(1.0))
    planning.save(tmp_path / "activations")
    assert Planning.load(tmp_path / "activations") == planning
    measured = replace(planning, measured=planning.kept)
    measured.save(tmp_path / "activations")
    assert Planning.load(tmp_path / "activations") == measured


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}'])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    planning_for(transformer(layers=1), hardware()).save(tmp_path)
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(RecipeError, match=PLAN):
        Planning.load(tmp_path)


@pytest.mark.parametrize(("record", "key"), [("plan", "waits"), ("plan", "places"), ("profile", "slots")])
def test_a_record_without_a_key_is_an_error_that_names_it(tmp_path: Path, record: str, key: str) -> None:
    planning_for(transformer(layers=1), hardware()).save(tmp_path)
    given = json.loads((tmp_path / PLAN).read_text())
    del given[record][key]
    (tmp_path / PLAN).write_text(json.dumps(given))
    with pytest.raises(RecipeError, match=rf"{PLAN}: wanted a plan.*'{key}'"):
        Planning.load(tmp_path)


def test_a_plan_of_another_release_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    planning_for(transformer(layers=1), hardware()).save(tmp_path)
    given = json.loads((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(json.dumps({**given, "version": 1}))
    with pytest.raises(RecipeError, match=r"plan.json: another release .* or train again for a new plan"):
        Planning.load(tmp_path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    planning_for(transformer(layers=1), hardware()).save(tmp_path)
    (tmp_path / PLAN).unlink()
    with pytest.raises(RecipeError, match=PLAN):
        Planning.load(tmp_path)


def test_a_plan_is_told_in_blocks_peak_and_time() -> None:
    planning = planning_for(transformer(layers=4), hardware(4.0))
    assert planning.describe() == (
        "activations: 4 of 4 blocks to NVMe: peak 188 MiB -> 48 MiB, predicted 0.252 s a micro-batch"
    )


def test_each_block_has_one_fate() -> None:
    profile = transformer(layers=5)
    regions = [block.region for block in profile.blocks]
    places = {
        SlotKey(regions[0], 0): Place.NVME,
        SlotKey(regions[0], 1): Place.HOST,  # a block on both is one to NVMe
        SlotKey(regions[1], 0): Place.HOST,
        SlotKey(regions[2], 0): Place.NVME,  # the input of a recomputed block
        SlotKey(0, 0): Place.NVME,  # outside blocks
    }
    plan = ActivationPlan("plan", places, recomputed=frozenset([regions[2]]))
    assert count_blocks(profile, plan) == "1 of 5 blocks to NVMe, 1 to host memory, 1 recomputed, 2 kept"
    assert count_blocks(profile, ActivationPlan("keep")) == "5 of 5 blocks kept"
    assert count_blocks(transformer(layers=0), ActivationPlan("keep")) == "no blocks"


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute", "plan"])
def test_rows_account_for_every_saved_byte_and_every_second_but_the_update(policy: str) -> None:
    profile, channels = transformer(layers=4, update_s=0.5), hardware(1.0)
    if policy == "plan":
        made = make_plan(profile, channels, smallest_budget(profile, channels))
    else:
        made = simple_plan(policy, profile, channels)
    rows = plan_rows(profile, made)
    assert [row.name for row in rows] == [
        "before the blocks", *(f"layers.{i}" for i in range(4)), "after the blocks",
    ]  # fmt: skip
    assert sum(row.saved_nbytes for row in rows) == sum(slot.nbytes for slot in profile.slots)
    for row in rows:
        parts = (row.kept_nbytes, row.host_nbytes, row.nvme_nbytes, row.recomputed_nbytes)
        assert sum(parts) == row.saved_nbytes
    assert any(row.recomputed_nbytes for row in rows) is (policy == "recompute")
    update_s = operator_times(profile)[[o.phase is Phase.UPDATE for o in profile.operators]].sum()
    total_s = sum(row.forward_s + row.backward_s for row in rows)
    assert total_s == pytest.approx(profile.step_s - update_s)
    assert rows[1].backward_s == pytest.approx(2 * rows[1].forward_s)


def test_a_model_without_blocks_has_rows_too() -> None:
    profile = transformer(layers=0)
    rows = plan_rows(profile, ActivationPlan("keep"))
    assert [row.name for row in rows] == ["before the blocks", "after the blocks"]
    assert sum(row.saved_nbytes for row in rows) == sum(slot.nbytes for slot in profile.slots)
