"""Finds the fastest recipe that fits a machine, and single changes that make a plan faster or make it fit.

[Note: what may change]
Keys of :data:`FREE`, which say in what order micro-batches come, where states, activations and updates are,
and in what pieces weights travel. A step takes the same sequences. Keys that the recipe names stay; only if
nothing fits with them they may change, too. What no key can mend, one part of the machine may.

[Note: one record for all candidates]
To record a step on fake tensors takes most of the time of a plan. So a candidate with more sequences in a
micro-batch is planned from the record of the smallest one, scaled, and one with another ``memory.device``
from units that were cut for the first. The best is planned anew, from its own record and units, and must fit;
else the next one is. What single changes gain follows from the scaled records.

[Note: each order is mended by itself]
A schedule with what it does with activations is an order. Each has needs of its own: one fits with a single
version on drives, another, much faster, needs tiles, too. So an order that does not fit gets one change after
the other, as long as it may still be faster than what fits.

[Note: bounds]
A candidate that cannot be faster than the best one so far (:meth:`DryRun.least_s`) is not played.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, RecipeError, StateError
from infinity.core.nbytes import parse_nbytes
from infinity.planner.passing import share_of_free
from infinity.predict.dry_run import DEVICE_MEMORY, DRIVES, HOST_MEMORY, DryRun, dry_run, model_for
from infinity.predict.machines import Machine
from infinity.predict.model import ModelWithoutValues
from infinity.recipes.recipe import Recipe, with_values

#: Errors that say that there is no plan: no room; no blocks for a layer schedule, no drives to store on.
_NO_PLAN = BudgetError, StateError, SettingError
#: A change is shown if it makes a step faster by at least this share.
LEAST_GAIN = 0.01

#: Keys of a recipe and of a hardware file, with new values.
Keys = Mapping[str, int | str | None]
#: Keys that may change: see [Note: what may change].
SPLIT = frozenset({"train.batch_size", "train.accumulate"})
#: Those that change together, first those that matter most.
_TOGETHER = (
    ("train.schedule", "memory.activations"), ("train.batch_size", "train.accumulate"), ("partition.tile",),
    ("train.group",), ("memory.device",), ("memory.host",), ("memory.versions",), ("memory.resident",),
    ("memory.updates",),
)  # fmt: skip
FREE = frozenset(key for group in _TOGETHER for key in group)
#: Where a sentence of an error ends.
_SENTENCE = re.compile(r"\. (?=[A-Z])")
#: Sizes of tiles that are tried where larger ones do not fit.
_TILES = ("1GiB", "256MiB", "64MiB")
#: Activations that are not recomputed are looked at if they could make a step faster by this share.
_WORTH_A_RECORD = 0.05
#: The most that train.batch_size and train.accumulate may be.
_MOST = 10**6
#: A candidate gets so many other budgets for its units.
_BUDGETS = 2


class Candidate(NamedTuple):
    """Pairs changed keys of a recipe or a machine with their plan, or the error that there is none."""

    keys: Keys
    planned: DryRun | None
    lacks: Mapping[str, int]  # bytes, by part of the machine; 0: not known
    error: str = ""


class Change(NamedTuple):
    """Pairs a change, in words, with the plan that has it."""

    what: str
    planned: DryRun


def attempt(keys: Keys, plan: Callable[[], DryRun]) -> Candidate:
    """Return ``keys`` with what ``plan`` returns, or with the error that there is none."""
    try:
        planned = plan()
    except BudgetError as error:
        lacks = HOST_MEMORY if error.part == "memory.host" else DEVICE_MEMORY
        return Candidate(keys, None, {lacks: 0}, str(error))
    except (StateError, SettingError) as error:  # no blocks for a layer schedule, no drives to store on
        return Candidate(keys, None, {"": 0}, str(error))
    return Candidate(keys, planned, planned.lacks())


def gain(run: DryRun, planned: DryRun) -> str:
    return f"{run.tokens_per_s / planned.tokens_per_s - 1:+.0%}"


def ranked(
    planned: DryRun, rows: Iterable[tuple[str, Keys]], fits: Callable[[DryRun], bool], least: float = 0.0
) -> list[Change]:
    """Return the changes whose plan fits and has more than ``least`` tokens per second, the fastest first."""
    found = []
    for what, keys in rows:
        try:
            run = planned.changed(*with_keys(planned.recipe, planned.machine, keys))
        except _NO_PLAN:
            continue
        # What a bound rules out is not played.
        if fits(run) and run.tokens / run.least_s() > least and run.tokens_per_s > least:
            found.append(Change(what, run))
    return sorted(found, key=lambda change: -change.planned.tokens_per_s)


def changes(planned: DryRun) -> list[Change]:
    """Return changes that make the plan better, the best first."""
    rows = ((f"{what} ({written(keys)})", keys) for what, keys in _faster(planned))
    most, least = max(0, planned.over_nbytes()), (1 + LEAST_GAIN) * planned.tokens_per_s
    return ranked(planned, rows, lambda run: run.over_nbytes() <= most, least)


def ways_to_fit(planned: DryRun) -> list[Change]:
    """Return changes that make a plan fit, the fastest first; several together where no single one does."""
    single = list(_smaller(planned))
    together = {key: value for keys in single for key, value in keys.items()}
    for tried in (single, [together] if len(single) > 1 else []):
        rows = ((written(keys), keys) for keys in tried)
        if found := ranked(planned, rows, lambda run: run.over_nbytes() <= 0 and not run.lacks()):
            return found
    return []


def with_keys(recipe: Recipe, machine: Machine, keys: Keys) -> tuple[Recipe, Machine]:
    """Return a recipe and a machine with other values of ``keys``."""
    of_recipe = {key: value for key, value in keys.items() if hasattr(recipe, key.partition(".")[0])}
    of_machine = {key: value for key, value in keys.items() if key not in of_recipe}
    return with_values(recipe, of_recipe), with_values(machine, of_machine)


def written(keys: Keys) -> str:
    found = []
    for key, value in keys.items():
        text = "null" if value is None else str(value)
        if key in ("memory.host", "memory.device", "host.memory") and isinstance(value, int):
            units = ((2**30, "GiB"), (2**20, "MiB"))
            text = next((f"{value // unit}{name}" for unit, name in units if value % unit == 0), text)
        found.append(f"{key}={text}")
    return " ".join(found)


def whole(nbytes: int) -> int:
    """Return the next smaller size that a person writes: whole GiB, or MiB if it is small."""
    unit = 2**30 if nbytes >= 2**33 else 2**20 if nbytes >= 2**20 else 1
    return nbytes // unit * unit


def _faster(run: DryRun) -> Iterator[tuple[str, Keys]]:
    recipe, machine, drives = run.recipe, run.machine, run.machine.drives
    memory, train = recipe.memory, recipe.train
    if memory.nvme and drives.per_node:
        for more in sorted({1, drives.per_node}):
            what = "one more drive in each node" if more == 1 else f"{more} more drives in each node"
            what += f", {more * drives.price:,.0f} a node" if drives.price else ""
            yield what, {"drives.per_node": drives.per_node + more}
    if memory.nvme and memory.resident and any(unit.on_nvme for unit in run.units):
        half = machine.host.memory // run.local // 2
        if run.host_nbytes < half:
            yield "half of the host memory", {"memory.host": whole(half)}
        host = whole(2 * max(half, run.host_nbytes))
        yield "twice the host memory", {"host.memory": 2 * machine.host.memory, "memory.host": host}
    if machine.on_accelerator and memory.device is None and 4 * run.division.total < 3 * run.device_nbytes:
        # Planned activations have a part of it; others are beside it.
        beside = 0 if memory.activations in ("auto", "plan") and not run.layered else run.peak_nbytes
        most = whole(max(run.division.total, run.device_nbytes - beside))
        yield "all of the device's memory", {"memory.device": most}
    yield "a larger batch", {"train.batch_size": 2 * train.batch_size}
    yield "more micro-batches a step", {"train.accumulate": 2 * train.accumulate}
    if recipe.micro_batches > 1 and train.schedule != "layer":
        layers: Keys = {"memory.activations": "auto", "train.schedule": "layer"}
        yield "weights read once for all micro-batches", layers
    if recipe.optim.max_grad_norm is not None:
        yield "no clipping", {"optim.max_grad_norm": None}
    if run.model.ranks > 1 and recipe.partition.reduce_dtype == "fp32" and run.model.dtype != "fp32":
        yield "gradients added in the compute dtype", {"partition.reduce_dtype": "compute"}


def _smaller(planned: DryRun) -> Iterator[Keys]:
    recipe, machine = planned.recipe, planned.machine
    memory, train = recipe.memory, recipe.train
    lacks = planned.lacks()
    if DEVICE_MEMORY in lacks or (not machine.on_accelerator and HOST_MEMORY in lacks):
        if planned.policy not in ("recompute", "plan"):
            yield {"memory.activations": "recompute"}
        if planned.layered and planned.group > 1 and planned.model.has_experts:
            yield {"train.group": max(1, planned.group // 4)}
        if not planned.layered:
            share = 1 if machine.on_accelerator else 2  # beside the cores there are states in host memory
            yield {"memory.activations": "plan", "memory.device": whole(planned.device_nbytes // share)}
        if train.batch_size > 1:
            yield {"train.batch_size": train.batch_size // 2}
        elif recipe.model.seq_len > 1:
            yield {"model.seq_len": recipe.model.seq_len // 2}
    if HOST_MEMORY in lacks and memory.nvme:
        yield {"memory.host": whole(machine.host.memory // planned.local // 2)}
    if DRIVES in lacks and memory.versions == 2:
        yield {"memory.versions": 1}
    if DRIVES in lacks and machine.drives.per_node:
        yield {"drives.per_node": -(-planned.disk_nbytes() // machine.drives.memory)}


class Effect(NamedTuple):
    """Says what a step would be without one of the changes."""

    keys: Keys  # the change
    was: Keys
    without: str  # for people


class Best(NamedTuple):
    """Holds the fastest recipe that fits, planned, beside what was written."""

    planned: DryRun
    as_written: str  # for people: what the recipe as written takes, or lacks
    effects: tuple[Effect, ...]
    tried: int  # candidates
    before: DryRun | None = None  # the recipe as written; None: it does not fit


def find_best(
    recipe: Recipe, machine: Machine, ranks: int | None, fixed: Collection[str], *,
    tokens: int | None = None, here: bool = False, say: Callable[[str], None] = lambda text: None,
    fixed_stay: bool = False,
) -> Best:  # fmt: skip
    """Return the fastest recipe for a machine that has the values of ``recipe`` for the keys ``fixed``.

    Args:
        tokens: Tokens of a step on all ranks; None: as many as ``recipe`` has.
        ranks: None: one for each device. ``here``: as for :func:`dry_run`.
        say: Is told what is tried.
        fixed_stay: If nothing fits with the ``fixed`` keys, that is an error; effects are not looked for.

    Raises:
        RecipeError: No number of sequences has as many tokens, or they are too many, or the fixed keys give
            another number.
        BudgetError: Nothing fits; names the part of the machine that would have to be larger.
        CheckpointError: As :func:`dry_run`.
    """
    if ranks is not None:
        machine = machine.with_ranks(ranks)
    ranks = ranks or machine.devices_in_all
    sequences = _sequences(recipe)
    if tokens is not None:
        least = ranks // recipe.train.sequence_ranks * recipe.model.seq_len * len(recipe.tasks)
        if tokens % least:
            of = f" of each of {len(recipe.adapters)} adapters" if recipe.adapters else ""
            near = max(1, round(tokens / least)) * least
            raise RecipeError(
                f"--tokens-per-step {tokens}: {ranks} ranks take whole sequences of {recipe.model.seq_len} "
                f"tokens (model.seq_len){of}, {least} together; wanted a multiple of that, such as {near}"
            )
        sequences = tokens // least
    fixed, recipe = FREE & frozenset(fixed) - recipe.left_open, recipe.as_without_plan()
    return _Search(recipe, machine, ranks, fixed, sequences, here, say).run(fixed_stay=fixed_stay)


class _Search:
    """Tries candidates; see the module's notes."""

    def __init__(
        self, recipe: Recipe, machine: Machine, ranks: int, fixed: frozenset[str], sequences: int, here: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.recipe, self.machine, self.ranks, self.here = recipe, machine, ranks, here
        self.fixed, self.sequences, self.say = fixed, sequences, say
        small = [size for size in range(1, min(math.isqrt(sequences), _MOST) + 1) if sequences % size == 0]
        sizes = sorted({*small, *(sequences // size for size in small)})
        self._divisors = [size for size in sizes if max(size, sequences // size) <= _MOST]
        if not self._divisors:
            raise RecipeError(
                f"{sequences} sequences a rank and step cannot be divided into micro-batches: "
                f"train.batch_size and train.accumulate are {_MOST} at most"
            )
        self._models: dict[str, ModelWithoutValues] = {}  # by size of tiles
        self._tried: dict[str, Candidate] = {}
        self._fitting: list[DryRun] = []  # played ones
        if not self._splits():
            given = " and ".join(f"{key}={recipe.value(key)}" for key in sorted(SPLIT & fixed))
            raise RecipeError(f"{given}: wanted values that give {sequences} sequences a rank and step")

    def run(self, *, fixed_stay: bool = False) -> Best:
        as_written = self._try({})
        if _sequences(self.recipe) == self.sequences and not as_written.lacks:
            self._offer({})
        found, tried = self._look(), 0
        if found is None and self.fixed and not fixed_stay:  # nothing fits as it is named
            tried = len(self._tried)
            self.fixed = frozenset()
            self._tried.clear()  # they are scaled from another record
            found = self._look()
        if found is None:
            raise BudgetError(self._what_to_buy())
        effects = () if fixed_stay else tuple(self._effects(self._changes(found.recipe), found))
        before = None if as_written.lacks else as_written.planned
        return Best(found, _said(as_written, found.tokens), effects, tried + len(self._tried), before)

    def _splits(self) -> list[tuple[int, int]]:
        """Return sequences of a micro-batch with the number of micro-batches, the smallest first."""
        n, train = self.sequences, self.recipe.train
        return [
            (size, count)
            for size, count in ((size, n // size) for size in self._divisors)
            if ("train.batch_size" not in self.fixed or size == train.batch_size)
            and ("train.accumulate" not in self.fixed or count == train.accumulate)
        ]

    def _orders(self) -> Iterator[Keys]:
        """Yield schedules with what they do with activations, the most promising first."""
        memory, train = self.recipe.memory, self.recipe.train
        free = "memory.activations" not in self.fixed
        if ("train.schedule" not in self.fixed or train.schedule == "layer") and (
            free or memory.activations != "plan"
        ):  # it recomputes by itself, and lets what blocks return leave as far as it must
            yield {"train.schedule": "layer", "memory.activations": "auto" if free else memory.activations}
        if "train.schedule" in self.fixed and train.schedule == "layer":
            return
        for policy in ("recompute", "keep", "plan") if free else (memory.activations,):
            order: dict[str, int | str | None] = {"train.schedule": "step", "memory.activations": policy}
            if policy == "plan" and "memory.device" not in self.fixed:
                order["memory.device"] = self._most_of_device
            yield order

    def _look(self) -> DryRun | None:
        """Try all orders, each with the changes that it needs; see [Note: each order is mended by itself].

        Returns the plan of the fastest, from its own record; None: nothing fits.
        """
        orders: list[tuple[Keys, Keys]] = [(order, {}) for order in self._orders()]
        while orders:
            for order, more in orders:
                nearest = self._try_splits({**more, **order}) if self._is_worth_it(order) else None
                while nearest is not None and (another := self._smaller(nearest, more)):
                    more = {**more, **another}
                    nearest = self._try_splits({**more, **order})
            if self._fitting:
                self._refine()
            if (found := self._verified()) is not None:
                return found
            lacking = min((each for each in self._tried.values() if each.lacks), key=_distance)
            orders = [
                (order, {**more, **another})
                for order, more in orders
                if (another := self._smaller(lacking, more))
            ]
        return None

    def _try_splits(self, keys: Keys) -> Candidate | None:
        """Try as many sequences in a micro-batch as fit; if none do, return what is nearest to it."""
        splits = self._splits()
        if keys["train.schedule"] == "layer":  # of one micro-batch it is the ordinary one
            splits = [(size, count) for size, count in splits if count * len(self.recipe.tasks) > 1]

        def offer(index: int) -> Candidate:
            size, count = splits[index]
            return self._offer({**keys, "train.batch_size": size, "train.accumulate": count})

        low, high = 0, len(splits) - 1
        if splits and offer(0).lacks:  # one micro-batch, for which no gradients wait, may fit nevertheless
            nearest = min(offer(0), offer(high), key=_distance)
            return nearest if nearest.lacks else None
        while low < high:  # the largest that fits; those on the way are candidates, too
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if offer(middle).lacks else (middle, high)
        return None

    def _offer(self, keys: Keys) -> Candidate:
        """Try a candidate, with what makes room for it; one that fits, and may be the best, is played."""
        tried = self._with_room(keys, self._try)
        planned = tried.planned
        if planned is None or tried.lacks or planned in self._fitting:
            return tried
        if planned.least_s() < (1 - LEAST_GAIN) * self._best_s:
            self._fitting.append(planned)
            self._fitting.sort(key=self._time_s)
        return tried

    def _time_s(self, planned: DryRun) -> float:
        """Return a step's time to sort by: what was written stays, unless another gains ``LEAST_GAIN``."""
        return planned.cost.step_s * (1 if self._changes(planned.recipe) else 1 - LEAST_GAIN)

    def _with_room(self, keys: Keys, plan: Callable[[Keys], Candidate]) -> Candidate:
        """Return what ``plan`` returns, with smaller groups of micro-batches if memory is short."""
        tried = self._with_budget(keys, plan)
        while group := self._smaller_group(tried):
            tried = self._with_budget({**keys, "train.group": group}, plan)
        return tried

    def _smaller_group(self, tried: Candidate) -> int | None:
        planned, short = tried.planned, self._short(tried)
        if planned is None or short not in tried.lacks or planned.group == 1 or "train.group" in self.fixed:
            return None
        if not (planned.layered and planned.model.has_experts):
            return None
        count = planned.recipe.train.accumulate
        share = (planned.device_nbytes - planned.division.least) / planned.peak_nbytes
        most = max(1, min(planned.group // 2, int(planned.group * share)))
        return -(-count // -(-count // most))  # as many in each

    def _short(self, tried: Candidate) -> str:
        return HOST_MEMORY if not self.machine.on_accelerator and tried.planned else DEVICE_MEMORY

    def _with_budget(self, keys: Keys, plan: Callable[[Keys], Candidate]) -> Candidate:
        """Return what ``plan`` returns, with another budget for units if memory is short."""
        tried = plan(keys)
        for _ in range(_BUDGETS):
            left = self._left_for_units(tried)
            may_help = "memory.device" not in self.fixed and self._short(tried) in tried.lacks
            if not may_help or left in (None, keys.get("memory.device")):
                break
            keys = {**keys, "memory.device": left}
            tried = plan(keys)
        return tried

    @property
    def _best_s(self) -> float:
        return self._fitting[0].cost.step_s if self._fitting else float("inf")

    def _try(self, keys: Keys) -> Candidate:
        changed = {key: value for key, value in keys.items() if value != self.recipe.value(key)}
        keeps = changed.get("memory.activations") == "keep" and self.recipe.memory.activations == "auto"
        if keeps and keys.get("memory.device", self.recipe.memory.device) is None:
            del changed["memory.activations"]  # that is what auto stands for
        name = written(dict(sorted(changed.items())))
        if name not in self._tried:
            self.say(f"trying {name or 'the recipe as written'}")
            self._tried[name] = attempt(changed, partial(self._estimate, changed))
        return self._tried[name]

    def _estimate(self, keys: Keys) -> DryRun:
        recipe = with_values(self.recipe, keys)
        memory, layered = recipe.memory, recipe.train.schedule == "layer"
        by_plan = memory.activations == "auto" and memory.device is not None and not layered
        by_plan |= memory.activations in ("plan", "offload")  # from activations of their true size
        smallest = None if by_plan else self._splits()[0][0]  # whose record others are scaled from
        return DryRun(self._model(recipe), recipe, self.machine, smallest)

    def _model(self, recipe: Recipe) -> ModelWithoutValues:
        tile = recipe.partition.tile
        if tile not in self._models:
            built = with_values(self.recipe, {"partition.tile": tile})
            like = next(iter(self._models.values()), None)
            self._models[tile] = model_for(built, self.machine, self.ranks, like, here=self.here)
        return self._models[tile]

    def _left_for_units(self, tried: Candidate) -> int | None:
        """Return the device memory that activations leave to units; None: there is none, or they are planned.

        Where a budget was too small for units, what they take is not known yet: they get most of the device.
        """
        machine, planned = self.machine, tried.planned
        if planned is None:
            return None if tried.keys.get("memory.device") else self._most_of_device
        if planned.policy == "plan":
            return None
        left, before = planned.device_nbytes - planned.peak_nbytes, planned.division.total
        if planned.layered and left < before:  # a share of what units give goes to what waits between blocks
            left -= (before - left) // (share_of_free(together=planned.model.has_experts) - 1)
        if not machine.on_accelerator:  # states are there, too
            left -= sum(unit.resident_nbytes for unit in planned.units if not unit.on_nvme)
        return whole(left) if left > 0 else None

    @property
    def _most_of_device(self) -> int:
        """Return three quarters of what computes has, half of it beside states in host memory."""
        machine = self.machine
        if machine.on_accelerator:
            return whole((machine.devices.memory or 0) * 3 // 4)
        return whole(machine.host.memory * machine.nodes.count // self.ranks // 2)

    @property
    def _most_of_host(self) -> int:
        """Return the host memory that a rank beside an accelerator may be given; 0: what there is stays."""
        machine, memory = self.machine, self.recipe.memory
        if "memory.host" in self.fixed or memory.host or not (memory.nvme and machine.on_accelerator):
            return 0
        return whole(machine.host.memory * machine.nodes.count * 7 // 8 // self.ranks)

    def _is_worth_it(self, order: Keys) -> bool:
        """Return whether an order that recomputes nothing could be faster than what was found."""
        policy = order["memory.activations"]
        if order["train.schedule"] == "layer" or policy in ("recompute", "auto"):
            return True
        if not self._fitting:  # what keeps all takes more than what did not fit
            return policy != "keep" or "memory.activations" in self.fixed
        best = self._fitting[0]
        kept = replace(best.trace, flops=best.trace.flops * best.trace.model_flops / best.trace.flops.sum())
        return best.least_s(kept.times_s(best.rates).sum(), passes=2) < (1 - _WORTH_A_RECORD) * self._best_s

    def _refine(self) -> None:
        """Try what is left to change of the best one."""
        best, free = self._fitting[0], FREE - self.fixed
        if self._most_of_host > best.host_nbytes and any(unit.on_nvme for unit in best.units):
            self._offer({**self._changes(best.recipe), "memory.host": self._most_of_host})
            best = self._fitting[0]
        keys = self._changes(best.recipe)
        if "memory.device" in free and best.policy != "plan":
            left = self._left_for_units(Candidate(keys, best, {}))
            if left is not None and left > best.division.total:
                policy = best.recipe.memory.activations if best.layered else best.policy
                self._offer({**keys, "memory.activations": policy, "memory.device": left})
        if "memory.updates" in free and best.division.on_device:
            self._offer({**keys, "memory.updates": "host"})

    def _smaller(self, nearest: Candidate, more: Keys) -> Keys:
        """Return another change, beside ``more``, with which an order may fit; none: there is none.

        If something fits, an order is mended only as long as it may be faster.
        """
        planned, memory, lacks = nearest.planned, self.recipe.memory, nearest.lacks
        if self._fitting and (planned is None or planned.least_s() >= (1 - LEAST_GAIN) * self._best_s):
            return {}
        now = str(more.get("partition.tile", self.recipe.partition.tile))
        most = math.inf if now in ("auto", "never") else parse_nbytes(now)
        rows: list[tuple[str, bool, Keys]] = [
            (DRIVES, memory.versions == 2, {"memory.versions": 1}),
            (HOST_MEMORY, self._most_of_host > 0, {"memory.host": self._most_of_host}),
            (HOST_MEMORY, bool(memory.resident and memory.nvme), {"memory.resident": False}),
            *((DEVICE_MEMORY, parse_nbytes(tile) < most, {"partition.tile": tile}) for tile in _TILES),
        ]
        possible = (keys for part, helps, keys in rows if part in lacks and helps)
        new = (keys for keys in possible if keys.items() - more.items() and not keys.keys() & self.fixed)
        return next(new, {})

    def _verified(self) -> DryRun | None:
        """Return the plan of the fastest candidate that fits by a record of its own; None: none does."""
        while True:
            if not self._fitting:  # or those that a bound left out
                fit = [each.planned for each in self._tried.values() if each.planned and not each.lacks]
                fit = [each for each in fit if _sequences(each.recipe) == self.sequences]
                self._fitting = sorted(fit, key=lambda each: each.cost.step_s)
            if not self._fitting:
                return None
            estimate = self._fitting.pop(0)
            name, keys = next((n, each.keys) for n, each in self._tried.items() if each.planned is estimate)
            self.say(f"checking {name or 'the recipe as written'}")
            tried = self._with_room(keys, partial(self._by_own_record, estimate))
            if not tried.lacks:
                return tried.planned
            self._tried[name] = tried

    def _by_own_record(self, estimate: DryRun, keys: Keys) -> Candidate:
        recipe = with_values(self.recipe, keys)
        return attempt(keys, partial(dry_run, recipe, self.machine, None, estimate, here=self.here))

    def _changes(self, recipe: Recipe) -> dict[str, int | str | None]:
        """Return what differs in ``recipe`` from what was written."""
        return {key: recipe.value(key) for key in sorted(FREE) if recipe.value(key) != self.recipe.value(key)}

    def _effects(self, keys: Keys, best: DryRun) -> Iterator[Effect]:
        """Yield each change, with what a step would take without it."""
        estimate = self._try(keys).planned or best
        for group in _TOGETHER:
            mine = {key: keys[key] for key in group if key in keys}
            if not mine:
                continue
            without = self._try({key: value for key, value in keys.items() if key not in mine})
            said = _said(without, best.tokens, estimate.tokens_per_s)
            yield Effect(mine, {key: self.recipe.value(key) for key in mine}, said)

    def _what_to_buy(self) -> str:
        nearest = min((each for each in self._tried.values() if each.lacks), key=_distance)
        machine, what = self.machine, written(nearest.keys) or "the recipe as written"
        if nearest.planned is None:
            return f"nothing that may change makes it fit {machine.nodes.name}: {nearest.error}"
        missing = ", ".join(nearest.planned.missing())
        parts = {
            DEVICE_MEMORY: ("devices.memory", machine.devices.memory or 0),
            HOST_MEMORY: ("host.memory", machine.host.memory),
            DRIVES: ("drives.per_node", 0),
        }
        wanted = []
        for part, nbytes in nearest.lacks.items():
            key, there = parts[part]
            drives = -(-nearest.planned.disk_nbytes() // machine.drives.memory)
            wanted.append(f"{key}={drives if part == DRIVES else f'{-(-(there + nbytes) // 2**30)}GiB'}")
        return (
            f"nothing that may change makes it fit {machine.nodes.name}; nearest is {what}, which lacks "
            f"{missing}: it fits with {' and '.join(wanted)}"
        )


def _distance(tried: Candidate) -> tuple[bool, int, int]:
    """Return how far a candidate is from fitting: the number of parts that it lacks, and of how much."""
    return tried.planned is None, len(tried.lacks), sum(tried.lacks.values())


def _sequences(recipe: Recipe) -> int:
    """Return the sequences of a rank and step."""
    return recipe.train.batch_size * recipe.train.accumulate


def _said(tried: Candidate, tokens: int, than: float | None = None) -> str:
    """Return the tokens per second of a candidate, also as a share beyond ``than``; or why it does not fit.

    A step of another number of tokens than ``tokens`` is said.
    """
    if tried.planned is None:
        return f"{'cannot run' if '' in tried.lacks else 'does not fit'}: {_SENTENCE.split(tried.error)[0]}"
    at = "" if tried.planned.tokens == tokens else f" at {tried.planned.tokens:,} tokens a step"
    if tried.lacks:
        return f"does not fit: lacks {', '.join(tried.planned.missing())}{at}"
    rate = tried.planned.tokens_per_s
    return f"{rate:,.0f} tokens/s{at}" if than is None else f"{rate / than - 1:+.0%} tokens/s{at}"
