"""How often a commit is recorded whose states in host memory must be written."""

import pytest

from infinity.shards import records
from infinity.shards.records import CommitInterval


@pytest.mark.parametrize(
    ("beside_s", "every"), [(10.0, 1), (10.3, 1), (10.5, 2), (11.0, 3), (20.0, 29), (9.0, 1)]
)
def test_commits_cost_at_most_a_thirtieth_of_the_time(monkeypatch, beside_s, every):
    now = [0.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    interval = CommitInterval(None)
    interval.every = 2
    step = 0
    while interval.measured is None:
        step += 1
        now[0] += beside_s if (step - 1) % interval.every == 0 and step > 1 else 10.0
        interval.step(recorded=step % interval.every == 0)
        assert step < 20
    assert interval.measured == every
    assert (beside_s - 10) / every <= 0.035 * 10
