"""Saves and loads an activation plan with all that it was made from, for ``infinity plan``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infinity.core.errors import RecipeError
from infinity.core.files import read_file, write_file
from infinity.core.nbytes import format_nbytes
from infinity.core.plan import MOST_NBYTES, ActivationPlan, Hardware, Outcome, Phase, Place, Profile
from infinity.planner.lifetimes import lifetimes_of, operator_times

#: Names of the files in a run's folder.
FOLDER = "activations"
PROFILE, PLAN, MEASURED = "profile.json", "plan.json", "measured.json"


@dataclass(frozen=True, slots=True)
class Planning:
    """Holds a plan with the profile and the hardware that it was made from, and its predicted cost."""

    profile: Profile
    hardware: Hardware
    plan: ActivationPlan
    kept: Outcome  # predicted if everything is kept
    predicted: Outcome  # of the plan
    planning_s: float  # time that planning took

    def save(self, folder: Path) -> None:
        """Write ``profile.json`` and ``plan.json`` into ``folder``."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.profile.save(folder / PROFILE)
        given = {
            "plan": json.loads(self.plan.to_json()),
            "hardware": asdict(self.hardware),
            "kept": asdict(self.kept),
            "predicted": asdict(self.predicted),
            "planning_s": self.planning_s,
        }
        write_file(folder / PLAN, json.dumps(given))

    @classmethod
    def load(cls, folder: Path) -> "Planning":
        """Read what :meth:`save` wrote.

        Raises:
            RecipeError: A file is missing, or was not written by :meth:`save`.
        """
        profile, given = Profile.load(folder / PROFILE), _read(folder / PLAN)
        try:
            return cls(
                profile,
                Hardware(**given["hardware"]),
                ActivationPlan.from_json(json.dumps(given["plan"])),
                Outcome(**given["kept"]),
                Outcome(**given["predicted"]),
                float(given["planning_s"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecipeError(f"{folder / PLAN}: not a plan that infinity wrote: {error}") from error

    def describe(self) -> str:
        counts = count_blocks(self.profile, self.plan)
        peaks = " -> ".join(format_nbytes(outcome.peak_nbytes) for outcome in (self.kept, self.predicted))
        return f"activations: {counts}: peak {peaks}, predicted {self.predicted.step_s:.3g} s a micro-batch"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Holds a block's times and bytes under a plan."""

    name: str
    forward_s: float
    backward_s: float
    saved_nbytes: int  # what autograd saves if everything is kept
    kept_nbytes: int
    host_nbytes: int
    nvme_nbytes: int

    @property
    def recomputed_nbytes(self) -> int:
        """Return the bytes that are dropped and recomputed."""
        return max(0, self.saved_nbytes - self.kept_nbytes - self.host_nbytes - self.nvme_nbytes)


def count_blocks(profile: Profile, plan: ActivationPlan) -> str:
    """Return in words how many blocks a plan treats in which way; with any byte stored: as stored."""
    regions = {block.region for block in profile.blocks}
    recomputed = regions & plan.recomputed
    placed = [(key.region, place) for key, place in plan.places.items() if key.region in regions - recomputed]
    nvme = {region for region, place in placed if place is Place.NVME}
    host = {region for region, place in placed if place is Place.HOST} - nvme
    counts = {"to NVMe": len(nvme), "to host memory": len(host), "recomputed": len(recomputed)}
    counts["kept"] = len(regions) - sum(counts.values())
    parts = [(count, words) for words, count in counts.items() if count]
    if not parts:
        return "no blocks"
    (first, words), rest = parts[0], parts[1:]
    named = f"{first} of {len(regions)} block{'s' if len(regions) > 1 else ''} {words}"
    return ", ".join([named, *(f"{count} {words}" for count, words in rest)])


def save_measured(folder: Path, predicted: Outcome, measured: Outcome) -> None:
    """Write ``measured.json``: the measured cost of the plan in ``folder``, beside the predicted one."""
    given = {"predicted": asdict(predicted), "measured": asdict(measured)}
    write_file(folder / MEASURED, json.dumps(given, indent=2) + "\n")


def load_measured(folder: Path) -> Outcome | None:
    """Return the measured cost of the plan in ``folder``; None: the run did not get that far.

    Raises:
        RecipeError: The file was not written by :func:`save_measured`.
    """
    if not (folder / MEASURED).exists():
        return None
    try:
        return Outcome(**_read(folder / MEASURED)["measured"])
    except (LookupError, TypeError) as error:
        raise RecipeError(f"{folder / MEASURED}: not what infinity wrote: {error}") from error


def plan_rows(profile: Profile, plan: ActivationPlan) -> list[PlanRow]:
    """Return time and bytes of each block in forward order, between two rows for operators outside blocks.

    Times add up to the profile's step without its update. Operators between two blocks are in the last row.
    """
    blocks = sorted(profile.blocks, key=lambda block: block.region)
    names = ["before the blocks", *(block.name for block in blocks), "after the blocks"]
    numbers = np.arange(len(profile.operators))
    row_of_operator = np.full(len(numbers), len(names) - 1)
    if blocks:
        row_of_operator[(numbers < blocks[0].forward[0]) | (numbers >= blocks[0].backward[1])] = 0
    row_of_region = {0: 0}
    for row, block in enumerate(blocks, start=1):
        row_of_operator[slice(*block.forward)] = row_of_operator[slice(*block.backward)] = row
        row_of_region[block.region] = row
    phases, times_s = np.array([each.phase for each in profile.operators]), operator_times(profile)
    forward_s, backward_s = (
        np.bincount(row_of_operator, times_s * (phases == phase), len(names)).tolist()
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    saved = [0] * len(names)
    for slot in profile.slots:
        saved[row_of_region.get(slot.key.region, -1)] += slot.nbytes
    by_place = {place: [0] * len(names) for place in Place}
    for period in lifetimes_of(profile, plan.recomputed).periods:
        by_place[plan.place(period.key)][row_of_region.get(period.key.region, -1)] += period.nbytes
    placed = (by_place[place] for place in (Place.KEEP, Place.HOST, Place.NVME))
    rows = list(map(PlanRow, names, forward_s, backward_s, saved, *placed))
    return rows if blocks else [rows[0], rows[-1]]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_file(path, MOST_NBYTES)))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; wanted a plan that a run of infinity kept") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not what infinity wrote: {error}") from error
