"""Plans as tables: every byte that is told, and no column without one."""

import io

from rich.console import Console

from infinity.core.plan import Outcome
from infinity.observe.plan_table import PlanRow, Way, plan_table, ways_table

KIB = 1024
ROWS = [
    PlanRow("layers.0", 0.01, 0.02, 8 * KIB, 2 * KIB, 0, 6 * KIB),
    PlanRow("layers.1", 0.01, 0.02, 8 * KIB, 1 * KIB, 0, 0),
]
OUTCOME = Outcome(1.5, 0.25, 0.0, 4 * KIB, 0, 3 * KIB, 2 * KIB)


def lines(table: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_what_neither_stays_nor_is_stored_is_recomputed() -> None:
    assert [row.recomputed_nbytes for row in ROWS] == [0, 7 * KIB]


def test_a_plan_has_a_line_for_each_block_and_no_empty_column() -> None:
    head, first, second = lines(plan_table(ROWS))
    assert head == "block forward ms backward ms saved kept to NVMe recomputed"  # nothing to host
    assert first == "layers.0 10.0 20.0 8 KiB 2 KiB 6 KiB"
    assert second == "layers.1 10.0 20.0 8 KiB 1 KiB 7 KiB"


def test_ways_stand_beside_each_other_also_where_one_is_not_possible() -> None:
    head, plan, other = lines(ways_table([Way("the plan", OUTCOME), Way("other", None, "not possible")]))
    assert head == "step s stall s recompute s peak stored loaded"
    assert plan == "the plan 1.500 0.250 4 KiB 3 KiB 2 KiB"
    assert other == "other not possible"
    on_host = Outcome(1.5, 0.25, 0.0, 4 * KIB, 5 * KIB, 0, 0)
    head, _, plan = lines(ways_table([Way("the plan", OUTCOME), Way("host", on_host)]))
    assert head.endswith("host peak")
    assert plan == "host 1.500 0.250 4 KiB 5 KiB"
