"""Memory over operators, inactive periods, and keys of recomputed blocks, counted by hand."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.plan import Kind, Operator, Phase, Profile, SlotKey, StorageUse
from infinity.planner.lifetimes import lifetimes_of, memory, operator_times
from tests.helpers.cases import examples
from tests.helpers.profiles import Tape, random_profiles, transformer

FORWARD = Phase.FORWARD


def three_operators() -> Profile:
    """A weight that the outer two operators read, and a storage that the last one reads again."""
    operators = (
        Operator("first", 1.0, (0,), (1,), FORWARD, 0),
        Operator("second", 2.0, (), (2,), FORWARD, 0),
        Operator("third", 1.0, (0, 1), (), FORWARD, 0),
    )
    storages = (
        StorageUse("weight", 7, Kind.WEIGHT, 0, 2),
        StorageUse("saved", 10, Kind.ACTIVATION, 0, 2),
        StorageUse("working", 100, Kind.WORKING, 1, 1),
    )
    return Profile(4.0, operators, storages, (), ())


def test_memory_counts_what_the_step_makes_from_birth_to_death() -> None:
    assert memory(three_operators()).tolist() == [10, 110, 10]


@given(random_profiles())
@examples(50)
def test_no_operator_uses_a_storage_inside_its_inactive_period(profile: Profile) -> None:
    storages = {slot.key: slot.storage for slot in profile.slots}
    for period in lifetimes_of(profile).periods:
        for operator in profile.operators[period.begin : period.end]:
            assert storages[period.key] not in (*operator.inputs, *operator.outputs)


@given(random_profiles())
@examples(50)
def test_memory_is_the_sum_of_what_is_alive(profile: Profile) -> None:
    alive = [
        sum(
            s.nbytes
            for s in profile.storages
            if s.kind in (Kind.ACTIVATION, Kind.WORKING) and s.born <= at <= s.dies
        )
        for at in range(len(profile.operators))
    ]
    assert memory(profile).tolist() == alive


def test_what_lies_between_operators_is_spread_over_them() -> None:
    profile = replace(three_operators(), step_s=8.0)
    assert np.allclose(operator_times(profile), [2.0, 4.0, 2.0])


# --- recomputed blocks ---------------------------------------------------------------------------


def chain() -> Tape:
    """Two blocks of two operators; each saves its input (10 bytes), a middle one (20) and nothing else."""
    tape = Tape()
    x = tape.given(1)
    x = tape.run("embedding", 1.0, [x], 10)
    for layer in range(2):
        with tape.block(f"layers.{layer}"):
            middle = tape.run("up", 1.0, [x], 20, saves=[x], saves_output=True)
            x = tape.run("down", 2.0, [middle], 10)
    tape.run("loss", 1.0, [x], 1, saves=[x])
    return tape


def test_nothing_recomputed_is_the_profile_itself() -> None:
    profile = chain().finish()
    lifetimes = lifetimes_of(profile)
    assert lifetimes.memory.tolist() == memory(profile).tolist()
    assert [saved.key for saved in lifetimes.periods] == [(4, 0), (3, 0), (3, 1), (1, 0), (1, 1)]
    assert not lifetimes.recomputations


def test_a_recomputed_block_keeps_its_input_drops_the_rest_and_pays_its_forward_again() -> None:
    profile = chain().finish()
    kept, again = lifetimes_of(profile), lifetimes_of(profile, frozenset({1}))
    block = profile.blocks[0]
    at = block.backward[0]
    assert again.times[at : at + 2].tolist() == [1.0, 2.0]
    assert again.operators[at : at + 3].tolist() == [at, at, at]
    # The middle one (20 bytes) is away after its last use in forward, until the block runs again.
    away = slice(block.forward[1], at)
    assert (kept.memory[away] - again.memory[away]).tolist() == [20] * (at - block.forward[1])
    assert again.memory[at + 2 :].tolist() == kept.memory[at:].tolist()
    # While it runs again: input and middle one, the gradient that waits, and at last the output once more.
    assert again.memory[at : at + 2].tolist() == [10 + 20 + 10, 10 + 20 + 10 + 10]
    assert SlotKey(1, 0) in {saved.key for saved in again.periods}
    assert SlotKey(1, 1) not in {saved.key for saved in again.periods}


def test_the_input_of_a_recomputed_block_is_needed_when_it_runs_again_not_later() -> None:
    profile = chain().finish()
    saved = {s.key: s for s in lifetimes_of(profile, frozenset({1})).periods}
    assert saved[SlotKey(1, 0)].end == profile.blocks[0].backward[0]


def test_an_input_that_nobody_else_saves_is_held_for_the_recomputation() -> None:
    tape = Tape()
    x = tape.run("embedding", 1.0, [tape.given(1)], 10)
    with tape.block("block"):
        doubled = tape.run("double", 1.0, [x], 10)  # saves nothing
        x = tape.run("up", 1.0, [doubled], 20, saves_output=True)
    tape.run("loss", 1.0, [x], 1, saves=[x])
    profile = tape.finish()
    kept, again = lifetimes_of(profile), lifetimes_of(profile, frozenset({1}))
    assert SlotKey(1, 0) in {saved.key for saved in again.periods}
    begins = profile.blocks[0].backward[0]
    assert again.memory[begins - 1] - kept.memory[begins - 1] == 10


def test_where_a_recomputed_block_moves_a_storage_to_a_later_region_its_keys_are_not_used() -> None:
    tape = Tape()
    x = tape.given(1)
    for layer in range(2):
        with tape.block(f"layers.{layer}"):
            hidden = tape.run("linear", 1.0, [x], 10, saves=[x])
            x = tape.run("relu", 1.0, [hidden], 10, saves_output=True)  # saved here, and by the next linear
    tape.run("loss", 1.0, [x], 1, saves=[x])
    profile = tape.finish()
    assert any(saved.key.region == 3 and saved.can_leave for saved in lifetimes_of(profile).periods)
    moved = [s for s in lifetimes_of(profile, frozenset({1})).periods if s.key.region == 3]
    assert not any(saved.can_leave or saved.is_named for saved in moved)
    # If the later block is computed again as well, the storage is its first input.
    both = {s.key: s for s in lifetimes_of(profile, frozenset({1, 3})).periods}
    assert both[SlotKey(3, 0)].can_leave


def test_what_a_recomputed_block_drops_is_kept_for_a_later_one_whose_input_it_is() -> None:
    tape = Tape()
    x = tape.given(1)
    with tape.block("layers.0"):
        x = tape.run("relu", 1.0, [x], 10, saves_output=True)
    with tape.block("layers.1"):
        x = tape.run("double", 1.0, [x], 1)  # saves nothing
    tape.run("loss", 1.0, [x], 1, saves=[x])
    profile = tape.finish()
    kept, again = lifetimes_of(profile), lifetimes_of(profile, frozenset({1, 3}))
    later = next(each for each in again.recomputations if each.block.region == 3)
    assert again.memory[: later.begin].tolist() == kept.memory[: later.begin].tolist()
    assert next(saved.end for saved in again.periods if saved.key == SlotKey(3, 0)) == later.begin


def test_a_storage_that_other_code_holds_cannot_leave() -> None:
    for is_held in (False, True):
        tape = Tape()
        x = tape.run("embedding", 1.0, [tape.given(1)], 10, saves_output=True)
        tape.run("loss", 1.0, [x], 1)
        profile = tape.finish(held=[x] if is_held else [])
        assert [saved.can_leave for saved in lifetimes_of(profile).periods] == [not is_held]


@given(random_profiles(), st.data())
@examples(100)
def test_keys_are_distinct_and_needs_are_in_order_for_any_recomputation(
    profile: Profile, data: st.DataObject
) -> None:
    regions = [block.region for block in profile.blocks]
    lifetimes = lifetimes_of(profile, frozenset(r for r in regions if data.draw(st.booleans())))
    named = [saved.key for saved in lifetimes.periods if saved.is_named]
    assert len(set(named)) == len(named)
    needs = [saved.end for saved in lifetimes.periods]
    assert needs == sorted(needs)
    assert (lifetimes.memory >= 0).all()
    assert all(saved.packed_at < saved.end for saved in lifetimes.periods if saved.can_leave)


def test_a_transformers_recomputation_frees_all_but_the_residual_stream() -> None:
    profile = transformer(6, hidden_nbytes=100, slots=6, logits_nbytes=0)
    again = lifetimes_of(profile, frozenset(block.region for block in profile.blocks))
    ends = profile.blocks[-1].forward[1]
    assert again.memory[ends] == 6 * 100 + 2 * 100  # inputs; the last output and its norm
