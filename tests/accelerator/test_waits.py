"""How often the host waits for the device, by place: a figure with a bound."""

from collections import Counter
from pathlib import Path

from tests.accelerator.harness import Run, Scenario, simulate

#: Waits of the user's program: its batches, its ``loss.item()``, and the model's own.
OF_THE_USER = ("accelerator/", "helpers/", "transformers/", "utils/", "integrations/")
#: Threads on which forward and backward run: a wait there is time that nothing is computed.
COMPUTE = ("MainThread", "Dummy-")


def waits_of(run: Run) -> Counter[str]:
    """Waits of the product on the threads that compute, by place."""
    found: Counter[str] = Counter()
    for wait, count in run.waits.items():
        if wait.thread.startswith(COMPUTE) and not wait.place.startswith(OF_THE_USER):
            found[wait.place] += count
    return found


def per_step(scenario: Scenario, folder: Path) -> Counter[str]:
    """How many more waits a longer run has, by place: what building and closing take is left out."""
    from dataclasses import replace

    counts = []
    for steps in (2, 4):
        ranks = simulate(replace(scenario, steps=steps), folder / str(steps), [("lazy", 0)])
        counts.append(sum((waits_of(run) for runs in ranks for run in runs), Counter()))
    return counts[1] - counts[0]
