"""Policies of other systems for activations, each by the rule of its paper.

From a profile, a machine and a budget for memory each makes a :class:`Choice`: the step that runs (the given
one, or one that replays operators, see ``replay.py``) and a plan for what it saves. All are played by the
clock that plays our plans, on its terms: transfers queue in order, and stores that a budget needs are waited
for. A policy without a budget ignores it. What a paper stores in host memory goes there if the machine has
any beside the device, else to the drive.

What the rules lose or gain here:

- No algorithms of convolutions to choose from, so vDNN's dynamic policy chooses only what is stored.
- The order of operators is given, and memory does not fragment, so SwapAdvisor searches for storages only.
- Heavy layers are convolutions; in a model without them, products of matrices and attention.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, isqrt
from typing import NamedTuple

import numpy as np
from checkmate import checkmate
from replay import coded, droppable, replayed

from infinity.core.errors import BudgetError
from infinity.core.plan import ActivationPlan, Hardware, Load, Phase, Place, Profile, SlotKey, StoreWait
from infinity.planner.lifetimes import InactivePeriod, Lifetimes, Places, least_memory, lifetimes_of
from infinity.planner.search import Candidate, PlanSearch, budget_error, simple_plan, within
from infinity.planner.simulator import play


class Choice(NamedTuple):
    """What a policy chose: the step that runs, and the plan for what it saves."""

    profile: Profile
    plan: ActivationPlan


Policy = Callable[[Profile, Hardware, int], Choice]


class CannotError(Exception):
    """The policy has no rule for this model or budget, and says why."""


def link(hardware: Hardware) -> Place:
    """The place to which a policy that knows one other memory moves."""
    return Place.HOST if hardware.host_nbytes and hardware.host_bytes_per_s else Place.NVME


def is_heavy(profile: Profile) -> Callable[[str], bool]:
    """Whether an operator of this name is a layer whose computation may hide a transfer."""
    convolves = any("convolution" in operator.name for operator in profile.operators)
    names = ("convolution",) if convolves else ("mm", "attention")
    return lambda name: any(each in name for each in names)


def leaving(lifetimes: Lifetimes) -> list[int]:
    """Indices of the storages that can leave and free memory, in the order of packing."""
    found = [i for i, period in enumerate(lifetimes.periods) if period.is_worth_storing]
    return sorted(found, key=lambda i: lifetimes.periods[i].key)


def with_starts(
    name: str, lifetimes: Lifetimes, places: Places, starts: Mapping[int, float]
) -> ActivationPlan:
    """Return a plan whose loads start when backward asks for something, at or before given positions."""
    periods = lifetimes.periods
    triggers: dict[int, SlotKey | None] = {p.end: p.key for p in reversed(periods) if p.is_named}
    triggers[lifetimes.backward] = None
    asks, loads = sorted(triggers), []
    for index in sorted(places):
        period = periods[index]
        at = min(max(starts.get(index, period.end), lifetimes.backward), period.end)
        loads.append(Load(triggers[asks[max(0, bisect_right(asks, at) - 1)]], period.key))
    return ActivationPlan(name, {periods[i].key: place for i, place in sorted(places.items())}, tuple(loads))


def fitted(
    profile: Profile, lifetimes: Lifetimes, plan: ActivationPlan, hardware: Hardware, capacity: int
) -> Choice:
    """Let stores be waited for where the budget needs it."""
    return Choice(profile, within(lifetimes, plan, hardware, capacity).plan)


def eagerly(lifetimes: Lifetimes, places: Places, capacity: int) -> dict[int, float]:
    """Start each load when backward asks for something, as early as memory allows, in the order of need."""
    memory, starts = least_memory(lifetimes, places), {}
    asks = sorted({lifetimes.backward, *(period.end for period in lifetimes.periods if period.is_named)})
    for index in sorted(places):
        period, nbytes = lifetimes.periods[index], lifetimes.periods[index].nbytes + lifetimes.padding_nbytes
        begin = max(lifetimes.backward, period.begin)
        full = np.flatnonzero(memory[begin : period.end] + nbytes > capacity)
        wanted = min(begin + (int(full[-1]) + 1 if len(full) else 0), period.end)
        starts[index] = start = asks[bisect_left(asks, wanted)]
        memory[start : period.end] += nbytes
    return starts


def just_before(lifetimes: Lifetimes, places: Places, heavy: Sequence[int] = ()) -> dict[int, float]:
    """Start each load when backward comes to the layer (of ``heavy``) before the one that needs it."""
    asks = sorted({*heavy} or {period.end for period in lifetimes.periods})
    return {i: asks[max(0, bisect_right(asks, lifetimes.periods[i].end - 1) - 1)] for i in places}


# --- vDNN, SuperNeurons, SwapAdvisor, Capuchin: device and host ----------------------------------------


def vdnn_all(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Let the input of every layer leave before the next begins: vDNN (Rhu et al., MICRO 2016)."""
    return _vdnn("vDNN all", profile, hardware, lambda period, name: True)


def vdnn_conv(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Let only the inputs of heavy layers leave (vDNN)."""
    heavy = is_heavy(profile)
    return _vdnn("vDNN conv", profile, hardware, lambda period, name: heavy(name))


def vdnn_dynamic(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Choose the first that fits of nothing, inputs of heavy layers and all inputs leaving (vDNN)."""
    for choose in (keep, vdnn_conv, vdnn_all):
        choice = choose(profile, hardware, capacity)
        if play(*choice, hardware).peak_nbytes <= capacity:
            break
    return choice


def _vdnn(
    name: str, profile: Profile, hardware: Hardware, leaves: Callable[[InactivePeriod, str], bool]
) -> Choice:
    lifetimes = lifetimes_of(profile)
    readers: dict[SlotKey, str] = {}
    storages = {slot.key: slot.storage for slot in profile.slots}
    for operator in profile.operators:
        if operator.phase is Phase.FORWARD:
            for key, storage in storages.items():
                if storage in operator.inputs:
                    readers[key] = readers.get(key, "") + " " + operator.name
    periods = lifetimes.periods
    chosen = [i for i in leaving(lifetimes) if leaves(periods[i], readers.get(periods[i].key, ""))]
    places = dict.fromkeys(chosen, link(hardware))
    plan = with_starts(name, lifetimes, places, just_before(lifetimes, places))
    # The next layer begins when what left during this one is away.
    packed = sorted((p.packed_at, p.key) for p in periods if p.is_named)
    waits = []
    for index in chosen:
        after = bisect_right(packed, (periods[index].packed_at, SlotKey(1 << 60, 0)))
        if after < len(packed) and packed[after][0] < lifetimes.backward:
            waits.append(StoreWait(packed[after][1], False, periods[index].key))
    return Choice(profile, replace(plan, waits=tuple(waits)))


def superneurons(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """SuperNeurons (Wang et al., PPoPP 2018): outputs of heavy layers are checkpoints, the rest is replayed.

    Where autograd saves no output of such a layer, its input is the checkpoint. A segment between checkpoints
    that is no larger than the largest layer is replayed once and kept, a larger one for each layer that asks.
    Checkpoints leave, the least recently used first, only until memory fits; each comes back during the
    backward of the heavy layer before.
    """
    heavy, slots = is_heavy(profile), droppable(profile)
    forward = [operator for operator in profile.operators if operator.phase is Phase.FORWARD]
    checkpoints = {
        s
        for operator in forward
        if heavy(operator.name)
        for s in (operator.outputs if slots.keys() & {*operator.outputs} else operator.inputs)
    }
    sizes = [use.nbytes for use in profile.storages]
    largest = max(sum(sizes[s] for s in {*o.inputs, *o.outputs} if s in slots) for o in forward)
    segments: list[list[int]] = [[]]
    for slot in sorted(profile.slots, key=lambda slot: slot.packed_at):
        if slot.storage in checkpoints:
            segments.append([])
        elif slot.storage in slots:
            segments[-1].append(slot.storage)
    stay = [s for segment in segments if sum(sizes[s] for s in segment) <= largest for s in segment]
    step = replayed(profile, [s for s in slots if s not in checkpoints], stay)
    lifetimes = lifetimes_of(step)
    places: dict[int, Place] = {}
    waiting = leaving(lifetimes)
    asks = [lifetimes.periods[i].end for i in waiting]
    while (least := least_memory(lifetimes, places)).max() > capacity and waiting:
        places[waiting.pop(0)] = link(hardware)
    plan = with_starts("SuperNeurons", lifetimes, places, just_before(lifetimes, places, asks))
    return fitted(step, lifetimes, plan, hardware, max(capacity, int(least.max())))


#: Plans that SwapAdvisor's search plays: individuals of a generation, and generations.
INDIVIDUALS, GENERATIONS = 6, 5


def swapadvisor(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """SwapAdvisor (Huang et al., ASPLOS 2020): a genetic search, each plan judged by the simulator.

    Given who may leave, swapping is by its rule: the storage needed last leaves first, and comes back as
    early as memory allows. The search is for who may leave, from everybody and from random halves; an
    individual above the budget counts as slower than all that keep it.
    """
    lifetimes, chance = lifetimes_of(profile), random.Random(0)
    everybody = leaving(lifetimes)

    def grow(genes: Sequence[bool]) -> Choice:
        allowed = [i for i, gene in zip(everybody, genes) if gene]
        places: dict[int, Place] = {}
        memory, periods = lifetimes.memory.copy(), lifetimes.periods
        while allowed and memory.max() > capacity:
            at = int(memory.argmax())
            there = [i for i in allowed if periods[i].begin <= at < periods[i].end]
            if not there:
                memory[at] = 0
                continue
            victim = max(there, key=lambda i: periods[i].end)
            allowed.remove(victim)
            places[victim] = link(hardware)
            memory[periods[victim].begin : periods[victim].end] -= periods[victim].nbytes
        plan = with_starts("SwapAdvisor", lifetimes, places, eagerly(lifetimes, places, capacity))
        return fitted(profile, lifetimes, plan, hardware, capacity)

    def worth(genes: Sequence[bool]) -> tuple[bool, float]:
        outcome = play(*grow(genes), hardware)
        over = outcome.peak_nbytes > capacity
        return over, outcome.peak_nbytes if over else outcome.step_s

    shares = [1.0, *(0.5 + 0.5 * chance.random() for _ in range(INDIVIDUALS - 1))]
    alive = [[chance.random() < share for _ in everybody] for share in shares]
    judged = sorted((worth(genes), genes) for genes in alive)
    for _ in range(GENERATIONS):
        parents = [genes for _, genes in judged[: INDIVIDUALS // 2]]
        children = []
        for _ in range(INDIVIDUALS // 2):
            one, other = chance.sample(parents, 2)
            mixed = [chance.choice(pair) for pair in zip(one, other)]
            children.append([gene != (chance.random() < 0.02) for gene in mixed])
        judged = sorted([*judged, *((worth(genes), genes) for genes in children)])[:INDIVIDUALS]
    return grow(judged[0][1])


def capuchin(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Capuchin (Peng et al., ASPLOS 2020): per storage, swap or recompute, by measured accesses.

    Of the storages that are away at the peak, those with the largest free time (from the end of the swap-out
    to the latest beginning of the swap-in) are swapped. When that is used up, the one whose swap exposes the
    least, or whose replay frees the most bytes per second, whichever costs less. A load starts a swap's time
    before its access, and earlier where it was late in the step before (three steps of feedback).
    """
    first, where = lifetimes_of(profile), link(hardware)
    rate = hardware.host_bytes_per_s if where is Place.HOST else min(
        hardware.read_bytes_per_s, hardware.write_bytes_per_s
    )  # fmt: skip
    until, over = first.until_s, first.memory > capacity
    slots = {slot.key: slot for slot in droppable(profile).values()}
    makes_s: dict[int, float] = {}
    for k, operator in enumerate(profile.operators):
        if operator.phase is Phase.FORWARD:
            for s in operator.outputs:
                makes_s[s] = makes_s.get(s, 0.0) + first.until_s[k + 1] - first.until_s[k]
    free_s = {
        i: until[p.end] - until[p.begin] - 2 * p.nbytes / rate
        for i, p in enumerate(first.periods)
        if p.is_worth_storing and over[p.begin : p.end].any()
    }
    swapped: list[SlotKey] = []
    dropped: set[int] = set()
    waiting = sorted(free_s, key=lambda i: -free_s[i])
    step, lifetimes = profile, first
    while True:
        places = {i: where for i, period in enumerate(lifetimes.periods) if period.key in swapped}
        least = least_memory(lifetimes, places)
        if least.max() <= capacity or not waiting:
            break
        index = waiting[0]
        by_worth = sorted(
            (i for i in waiting if first.periods[i].key in slots),
            key=lambda i: makes_s[slots[first.periods[i].key].storage] / first.periods[i].nbytes,
        )
        key = first.periods[index].key
        if free_s[index] < 0 and by_worth:
            again = slots[first.periods[by_worth[0]].key].storage
            if (
                makes_s[again] / first.periods[by_worth[0]].nbytes
                < -free_s[index] / first.periods[index].nbytes
            ):
                waiting.remove(by_worth[0])
                dropped.add(again)
                step = replayed(profile, dropped)
                lifetimes = lifetimes_of(step)
                continue
        waiting.remove(index)
        swapped.append(key)
    early, choices = dict.fromkeys(places, 1.0), []
    for _ in range(3):
        starts = {
            i: bisect_right(lifetimes.until_s, lifetimes.until_s[p.end] - early[i] * p.nbytes / rate) - 1
            for i, p in ((i, lifetimes.periods[i]) for i in places)
        }
        late = eagerly(lifetimes, places, capacity)  # where there is no room, a load comes later
        starts = {i: max(start, late[i]) for i, start in starts.items()}
        plan = with_starts("Capuchin", lifetimes, places, starts)
        choices.append(fitted(step, lifetimes, plan, hardware, max(capacity, int(least.max()))))
        early = {i: factor + 0.5 for i, factor in early.items()}
    return min(choices, key=lambda choice: play(*choice, hardware).step_s)


# --- FlashNeuron, G10, TERAIO: device and drive --------------------------------------------------------


def flashneuron(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """FlashNeuron (Bae et al., FAST 2021): storages from the first on, until memory fits; to the drive."""
    return _flashneuron("FlashNeuron", profile, hardware, capacity, 1.0)


#: What compression leaves of outputs of ReLU, dropout and pooling, half of which are zero, as CSR.
SPARSE_SHARE = 0.55


def flashneuron_coded(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """FlashNeuron with compression: if the first choice is late, what is compressible leaves first."""
    return _flashneuron("FlashNeuron, coded", profile, hardware, capacity, SPARSE_SHARE)


def _flashneuron(name: str, profile: Profile, hardware: Hardware, capacity: int, share: float) -> Choice:
    sparse = ("relu", "dropout", "max_pool", "threshold")
    storages = {slot.key: slot.storage for slot in profile.slots}
    makers = {s: o.name for o in profile.operators if o.phase is Phase.FORWARD for s in o.outputs}

    def choose(step: Profile, first: Iterable[SlotKey]) -> Choice:
        lifetimes = lifetimes_of(step)
        order = {key: number for number, key in enumerate(first)}
        waiting = sorted(leaving(lifetimes), key=lambda i: order.get(lifetimes.periods[i].key, len(order)))
        places: dict[int, Place] = {}
        while (least := least_memory(lifetimes, places)).max() > capacity and waiting:
            places[waiting.pop(0)] = Place.NVME
        room = max(capacity, int(least.max()))
        plan = with_starts(name, lifetimes, places, eagerly(lifetimes, places, room))
        return fitted(step, lifetimes, plan, hardware, room)

    linear = choose(profile, ())
    if share == 1.0:
        return linear
    packable = [k for k in linear.plan.places if any(each in makers.get(storages[k], "") for each in sparse)]
    all_packable = [k for k in storages if any(each in makers.get(storages[k], "") for each in sparse)]
    kept_s = play(profile, ActivationPlan("keep"), hardware).step_s
    if play(*linear, hardware).step_s <= kept_s * 1.001 or not all_packable:
        return linear
    tried = [
        choose(coded(profile, {storages[k]: share for k in keys}), keys) for keys in (packable, all_packable)
    ]
    return min((linear, *tried), key=lambda choice: play(*choice, hardware).step_s)


class _Timeline:
    """The seconds of each position that a channel has not given away."""

    def __init__(self, times: np.ndarray, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self._free = times.copy()

    def end_of(self, begin: int, nbytes: int) -> int | None:
        """Return the position after which ``nbytes`` from ``begin`` on have moved; None: never."""
        room = np.cumsum(self._free[begin:])
        at = int(np.searchsorted(room, nbytes / self.rate - 1e-12))
        return begin + at + 1 if at < len(room) else None

    def begin_of(self, end: int, nbytes: int) -> int | None:
        """Return the position at which ``nbytes`` must begin to be there before ``end``; None: never."""
        room = np.cumsum(self._free[:end][::-1])
        at = int(np.searchsorted(room, nbytes / self.rate - 1e-12))
        return end - at - 1 if at < len(room) else None

    def book(self, begin: int, end: int, nbytes: int, *, early: bool) -> None:
        left = nbytes / self.rate
        for at in range(begin, end) if early else range(end - 1, begin - 1, -1):
            taken = min(left, float(self._free[at]))
            self._free[at] -= taken
            left -= taken


def teraio(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """TERAIO (Yuan et al., NeurIPS 2025), algorithm 1: the most benefit per cost, valued anew each time."""
    return _by_benefit("TERAIO", profile, hardware, capacity, eager=False)


def g10(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """G10 (Zhang et al., MICRO 2023): the same benefit per cost; loads start as early as memory allows."""
    return _by_benefit("G10", profile, hardware, capacity, eager=True)


@dataclass(frozen=True, slots=True)
class _Move:
    score: float
    index: int
    place: Place
    away: tuple[int, int]  # positions of its absence


def _by_benefit(name: str, profile: Profile, hardware: Hardware, capacity: int, *, eager: bool) -> Choice:
    """Choose inactive periods until memory fits: bytes x seconds of pressure relieved, by seconds moved.

    The drive comes first; host memory, as long as there is some, where the drive is saturated: a transfer
    would take twice its time. When nothing can move in time, what frees the most for longest goes anyway,
    and compute waits.
    """
    lifetimes = lifetimes_of(profile)
    memory, times, periods = lifetimes.memory.copy(), lifetimes.times, lifetimes.periods
    rates = {Place.NVME: (hardware.write_bytes_per_s, hardware.read_bytes_per_s)}
    if hardware.host_nbytes:
        rates[Place.HOST] = (hardware.host_bytes_per_s, hardware.host_bytes_per_s)
    channels = {place: tuple(_Timeline(times, r) for r in both) for place, both in rates.items()}
    most = {Place.NVME: float("inf"), Place.HOST: float(hardware.host_nbytes)}
    room = {place: most[place] for place in rates}
    places: dict[int, Place] = {}
    starts: dict[int, float] = {}
    waiting = leaving(lifetimes)

    def move(index: int, pressure: np.ndarray) -> _Move | None:
        period, found = periods[index], []
        for place, (out, back) in channels.items():
            end = out.end_of(period.packed_at + 1, period.nbytes)
            begin = back.begin_of(period.end, period.nbytes)
            if end is None or begin is None or room[place] < period.nbytes:
                continue
            away = max(end, period.begin), begin
            if away[0] < away[1]:
                relieved = period.nbytes * float(pressure[away[1]] - pressure[away[0]])
                cost_s = period.nbytes / out.rate + period.nbytes / back.rate
                found.append(_Move(relieved / cost_s, index, place, away))
                if (
                    lifetimes.until_s[end] - lifetimes.until_s[period.packed_at + 1]
                    < 2 * period.nbytes / out.rate
                ):
                    break  # the drive is not saturated
        return max(found, key=lambda each: each.score, default=None)

    while memory.max() > capacity and waiting:
        pressure = np.concatenate(([0.0], np.cumsum(times * (memory > capacity))))
        moves = [found for i in waiting if (found := move(i, pressure)) is not None and found.score > 0]
        if not moves:
            break
        best = max(moves, key=lambda each: each.score)
        period, (out, back) = periods[best.index], channels[best.place]
        out.book(period.packed_at + 1, best.away[0], period.nbytes, early=True)
        back.book(best.away[1], period.end, period.nbytes, early=False)
        memory[slice(*best.away)] -= period.nbytes
        waiting.remove(best.index)
        places[best.index], starts[best.index] = best.place, best.away[1]
        room[best.place] -= period.nbytes
    waiting.sort(key=lambda i: periods[i].nbytes * (periods[i].begin - periods[i].end))
    while least_memory(lifetimes, places).max() > capacity and waiting:
        index = waiting.pop(0)
        places[index] = max(room, key=lambda place: (room[place] >= periods[index].nbytes, rates[place][0]))
        room[places[index]] -= periods[index].nbytes
        starts[index] = periods[index].end
    early = eagerly(lifetimes, places, capacity)
    starts = early if eager else {i: max(start, early[i]) for i, start in starts.items()}
    plan = with_starts(name, lifetimes, places, starts)
    return fitted(profile, lifetimes, plan, hardware, capacity)


# --- Chen, selective checkpointing: recomputation ------------------------------------------------------


def chen(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Chen et al. (arXiv:1604.06174): checkpoints at every square root of the number of blocks.

    Backward replays one segment of blocks after the other; the last one, which it needs at once, is kept.
    """
    blocks = sorted(profile.blocks, key=lambda block: block.region)
    if len(blocks) < 2:
        raise CannotError("the model has no blocks")
    length = ceil(len(blocks) / isqrt(len(blocks)))
    starts = [blocks[at] for at in range(0, len(blocks), length)]
    checkpoints = {s for block in starts for s in block.inputs}
    inside = range(starts[0].region, starts[-1].region)
    slots = droppable(profile)
    # What all blocks read (masks, positions) was made before them and stays.
    dropped = [s for s, slot in slots.items() if slot.key.region in inside and s not in checkpoints]
    return Choice(replayed(profile, dropped), ActivationPlan("Chen"))


def selective(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Replay what the core of attention makes: selective recomputation (Korthikanti et al., MLSys 2023)."""
    core = ("softmax", "bmm", "attention", "dropout")
    makers = {s: o.name for o in profile.operators if o.phase is Phase.FORWARD for s in o.outputs}
    regions = {block.region for block in profile.blocks}
    dropped = [
        s
        for s, slot in droppable(profile).items()
        if slot.key.region in regions and any(each in makers[s] for each in core)
    ]
    if not any("attention" in makers[s] or "softmax" in makers[s] for s in dropped):
        raise CannotError("the model has no attention")
    return Choice(replayed(profile, dropped), ActivationPlan("selective"))


# --- what the runtime runs -----------------------------------------------------------------------------


def keep(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Everything stays."""
    return Choice(profile, ActivationPlan("keep"))


def recompute(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Every block is recomputed (``torch.utils.checkpoint``)."""
    return Choice(profile, simple_plan("recompute", profile, hardware))


def offload(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Everything but the last block leaves to the drive."""
    return Choice(profile, simple_plan("offload", profile, hardware))


def ssdtrain(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """SSDTrain (Wu et al., DAC 2025): the first blocks, as many as leave and return without a wait."""
    return Choice(profile, simple_plan("adaptive", profile, hardware))


class _Ladder(PlanSearch):
    """Our search, which climbs each rung once for all budgets."""

    def __init__(self, profile: Profile, hardware: Hardware) -> None:
        super().__init__(profile, hardware)
        self._of_rung: dict[int, Candidate | None] = {}

    def _best(self, rung: int) -> Candidate | None:
        if rung not in self._of_rung:
            self._of_rung[rung] = super()._best(rung)
        return self._of_rung[rung]


_ladder = cache(_Ladder)


def ours(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """The plan of this project for the budget: that of ``infinity.planner.search.plan``."""
    search = _ladder(profile, hardware)
    if search.keep.outcome.peak_nbytes <= capacity:
        return Choice(profile, replace(search.keep.plan, capacity_nbytes=capacity))
    if search.smallest_budget() > capacity:
        raise budget_error(profile, hardware, capacity)
    return Choice(profile, search.fastest(capacity))


@cache
def cheapest(profile: Profile) -> tuple[int, ...]:
    """Return the storages that a replay can make, by the seconds that it takes for each byte."""

    def s_per_byte(s: int) -> float:
        return (replayed(profile, [s]).step_s - profile.step_s) / max(1, profile.storages[s].nbytes)

    return tuple(sorted(droppable(profile), key=s_per_byte))


def ours_replaying(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Let a step replay what is cheapest to make again, and plan the rest as ours: the best of some shares.

    The runtime cannot replay single operators yet: this says what that would bring.
    """
    best, best_s = ours(profile, hardware, capacity), float("inf")
    order = cheapest(profile)
    for share in (0.0, 0.2, 0.4):
        step = replayed(profile, order[: int(share * len(order))]) if share else profile
        with suppress(BudgetError):
            choice = ours(step, hardware, capacity)
            if (step_s := play(*choice, hardware).step_s) < best_s:
                best, best_s = choice, step_s
    return best


def checkmate_plan(profile: Profile, hardware: Hardware, capacity: int) -> Choice:
    """Replay as little as the budget allows: Checkmate (Jain et al., MLSys 2020); see ``checkmate.py``."""
    step = checkmate(profile, capacity)
    if step is None:
        raise CannotError("no schedule keeps the budget")
    return Choice(step, ActivationPlan("Checkmate"))


OURS, REPLAYING = "ours", "ours + replays"
#: The policies by name; those of the second group choose for a budget.
UNBUDGETED: Mapping[str, Policy] = {
    "keep all": keep, "recompute blocks": recompute, "offload": offload, "vDNN all": vdnn_all,
    "vDNN conv": vdnn_conv, "Chen": chen, "selective": selective, "SSDTrain": ssdtrain,
}  # fmt: skip
BUDGETED: Mapping[str, Policy] = {
    "vDNN dynamic": vdnn_dynamic, "SuperNeurons": superneurons, "SwapAdvisor": swapadvisor,
    "Capuchin": capuchin, "FlashNeuron": flashneuron, "FlashNeuron, coded": flashneuron_coded,
    "G10": g10, "TERAIO": teraio, "Checkmate": checkmate_plan, REPLAYING: ours_replaying, OURS: ours,
}  # fmt: skip
