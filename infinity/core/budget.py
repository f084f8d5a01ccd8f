"""From budgets and the model to every size: pure arithmetic, and the errors that show it.

[Note: the device budget]
Three things share it. *Held gradients* wait: until ``step`` all of them when a global norm must be
known first, otherwise those of units in host memory; until the last micro-batch, under ``no_sync``,
all of them. *The backlog* is what waits for its update:
gradient and weights of units whose update has started. *The window* is what the prefetcher fills
with the nearest future. The backlog lets updates lag into the next forward, so it gets what it can
use; the window gets the rest, and at least two of the largest units, or those that are in use at one
time: of modules inside each other, or of a block that is recomputed. Frozen units take their part of the
window only: they have no gradient and no update.

[Note: gradients that spill]
Where memory is too small for all gradients that wait for ``step``, those of some units on NVMe wait there: as
few bytes as possible. They pass through memory one after the other, as those of early updates do. Of units
alike the first of the model keep theirs in memory: backward comes to them last, with little time to write.

[Note: the host budget beside an accelerator]
Updates run in host memory, so on an accelerator gradients wait for ``step``, and for their updates, there.
They share it with residents (each with room for its own gradient), chunks of updates, shards on their way
to the accelerator, and weights that are kept for their update. Each has memory of its own: a gradient that
waited for memory of shards, which wait for updates, which wait for gradients, would wait for ever.

[Note: states on an accelerator]
What the device budget has beyond all of that, and beyond a window for all weights, holds the states of
units whose home is host memory, as many as fit: they are updated there, and their gradients wait there. All
gain the same per byte. The first of the model come first: backward comes to them last, and the next forward
needs them first.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from infinity.core.errors import BudgetError
from infinity.core.extent import BLOCK_NBYTES, aligned
from infinity.core.nbytes import format_nbytes

#: Chunks of the update that are staged at one time: being read, updated and written.
STAGED_CHUNKS = 4
#: Pieces of shards on their way to an accelerator that fit into what staging has.
STAGED_PIECES = 4
#: The least that a piece needs, where its shard is larger (bytes).
LEAST_PIECE_NBYTES = 64 * 2**10
#: Size of a huge page (bytes).
HUGE_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of one unit on this rank."""

    name: str
    full: int  # the flat buffer; a full gradient takes the same
    shard_grad: int  # the reduced gradient
    shard_weight: int
    streams: bool  # its full values come and go
    on_nvme: bool
    trainable: bool
    waits: bool  # its gradient, in device memory, for ``step`` or for the last micro-batch
    waits_in_host: bool = False  # its gradient, in host memory, for ``step``
    spills: bool = False  # its gradient waits for nothing but ``step``, so it may wait on NVMe
    parameter: str = ""  # the largest
    parameter_nbytes: int = 0
    stored: int = 0  # what the flat buffer is decoded from
    states: int = 0  # weights and states on this rank, if they may be in device memory
    lingers: bool = False  # its full gradient, until backward ends

    @property
    def gathered(self) -> int:
        """What a pool takes for its full values and what they are decoded from."""
        return rounded(self.full) + rounded(self.stored)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A division of the device budget (bytes).

    Attributes:
        early: Gradients need not wait for ``step()``: an update inside backward is done with them.
        lag: Beside the window: early updates may lag by as much, and need not.
        least: The smallest total that would do.
        spilled: Positions of units whose gradients wait on NVMe: see [Note: gradients that spill].
        on_device: Positions of units whose states are in device memory: see [Note: states on an accelerator].
        states: What these states take, with their updates.
    """

    total: int
    window: int
    hold_weights: bool
    early: bool
    lag: int
    least: int
    spilled: tuple[int, ...] = ()
    on_device: tuple[int, ...] = ()
    states: int = 0


def chunk_numel(host_nbytes: int, share: int, itemsize: int, most: int) -> int:
    """Elements of a chunk such that :data:`STAGED_CHUNKS` of them fit a part of the host budget.

    Args:
        host_nbytes: The host budget, of which staging may take one in ``share``.
        itemsize: Bytes of weight and state per element.
        most: Upper bound (elements).

    Raises:
        BudgetError: Not even the smallest chunks fit.
    """
    quantum, staging_nbytes = 2048, host_nbytes // share
    nbytes = staging_nbytes // STAGED_CHUNKS
    n = whole_pages(nbytes) // itemsize // quantum * quantum
    if n == 0:
        least = STAGED_CHUNKS * rounded(quantum * itemsize)
        raise BudgetError(
            f"memory.host is {format_nbytes(host_nbytes)}, which leaves {format_nbytes(staging_nbytes)} for "
            f"staging; updates alone need {STAGED_CHUNKS} chunks of {format_nbytes(quantum * itemsize)} = "
            f"{format_nbytes(least)}. Raise memory.host to {format_nbytes(share * least)} "
            f"({share * least} bytes) or more"
        )
    return min(n, most)


def piece_nbytes(staging_nbytes: int) -> int:
    """Return the bytes of one of :data:`STAGED_PIECES` buffers through which shards go to an accelerator.

    Args:
        staging_nbytes: What shards in host memory leave of the host budget.
    """
    return max(BLOCK_NBYTES, staging_nbytes // STAGED_PIECES // BLOCK_NBYTES * BLOCK_NBYTES)


@dataclass(frozen=True, slots=True)
class HostBudget:
    """A division of the host budget beside an accelerator: see the note (bytes).

    Attributes:
        gradients: Of gradients from backward to their updates.
        weights: Of weights that updates start from; an update reads those that do not fit.
        staging: Of shards on their way to the accelerator, and of weights that stay.
        piece: The most that one shard on its way takes at one time.
        stays: What weights that stay may take of ``staging``.
        spilled: Positions of units whose gradients wait on NVMe: see [Note: gradients that spill].
    """

    gradients: int
    weights: int
    staging: int
    piece: int
    stays: int
    spilled: tuple[int, ...] = ()


def _choose_spilled(units: Sequence[UnitSizes], room: int) -> tuple[int, ...]:
    """Return positions of units whose gradients wait on NVMe: see [Note: gradients that spill].

    Args:
        room: Memory for the gradients of the others that might (bytes).
    """
    spilled = []
    for place in sorted((i for i, u in enumerate(units) if u.spills), key=lambda i: -units[i].shard_grad):
        nbytes = rounded(units[place].shard_grad)
        if nbytes <= room:
            room -= nbytes
        else:
            spilled.append(place)
    return tuple(sorted(spilled))


def divide_host(
    total: int, residents: int, chunks: int, units: Sequence[UnitSizes], *, early: bool, resident: bool
) -> HostBudget:
    """Divide ``memory.host`` beside an accelerator.

    Args:
        total: The budget.
        residents: What units in host memory take, beside their gradients.
        chunks: What updates take for the chunks that are staged.
        units: All units.
        early: Whether an update inside backward is done with its gradient.
        resident: Whether units take what a larger budget would give.

    Raises:
        BudgetError: Too small; says what is needed and why.
    """
    updated = [u for u in units if u.trainable and u.on_nvme]
    beside = rounded_sum(u.shard_grad for u in units if u.trainable and not u.on_nvme)
    waiting = rounded_sum(u.shard_grad for u in updated if u.waits_in_host)
    passing = max((rounded(u.shard_grad) for u in updated if not u.waits_in_host), default=0)
    shard = max((rounded(u.shard_weight) for u in units if u.on_nvme), default=0)
    piece = min(shard, LEAST_PIECE_NBYTES)
    free = total - residents - beside - chunks
    spilled: tuple[int, ...] = ()
    if free < waiting + passing + piece:
        waiting -= rounded_sum(u.shard_grad for u in units if u.spills)
        passing = max((rounded(u.shard_grad) for u in units if u.spills), default=passing)
        # Weights on their way, and a gradient that comes while one is written, have their room first. Below
        # they get a quarter and a half of what is left.
        wished = 4 * (STAGED_PIECES * shard - piece) + 2 * passing
        spilled = _choose_spilled(units, free - waiting - passing - piece - wished)
        on_nvme = frozenset(spilled)
        waiting += rounded_sum(u.shard_grad for i, u in enumerate(units) if u.spills and i not in on_nvme)
    needed = waiting + passing + piece
    spare = free - needed
    if spare < 0:
        # Of a larger budget chunks take a quarter, or half without residents, and those half of the rest.
        enough = aligned(-(-8 * needed // 3) if resident else 2 * needed)
        parts, why = [f"{format_nbytes(piece)} for weights on their way"], ""
        if passing:
            largest = max(updated, key=lambda u: u.shard_grad)
            parts.insert(0, f"{format_nbytes(passing)} for the gradient of {_described(largest)}")
            why = _indivisible(largest)
        if waiting:
            parts.insert(0, f"{format_nbytes(waiting)} of gradients that wait for step()")
        raise BudgetError(
            f"memory.host is {format_nbytes(total)}, of which units in host memory take "
            f"{format_nbytes(residents + beside)} and chunks of updates {format_nbytes(chunks)}. Beside an "
            f"accelerator {format_nbytes(needed)} more are required: {', and '.join(parts)}. "
            f"{format_nbytes(enough)} ({enough} bytes) are enough: raise memory.host, or share the model "
            f"over more ranks{why}"
        )
    spare //= 2  # the rest is for activations, and exact values that are read or written

    def take(wish: int) -> int:
        nonlocal spare
        taken = max(0, min(spare, wish))
        spare -= taken
        return taken

    all_weights = rounded_sum(u.shard_weight for u in updated)
    all_gradients = rounded_sum(u.shard_grad for u in updated)
    staging = piece + take(min(STAGED_PIECES * shard - piece, spare // 2))
    passing += take(passing) if spilled else 0
    weights = take(all_weights if waiting else min(all_weights, spare // 2))
    gradients = beside + waiting + passing + (0 if waiting else take(all_gradients - passing))  # they may lag
    stays = take(all_weights)
    piece = max(piece, min(shard, whole_pages(staging // STAGED_PIECES)))
    return HostBudget(gradients, weights, staging + stays, piece, stays, spilled)


def divide_device(
    total: int | None, ceiling: int, units: Sequence[UnitSizes], *, early: bool, world_size: int,
    together: Sequence[Sequence[int]] = (), in_use: Iterable[Collection[int]] = (), in_host: bool = False,
    updates: int = 0, decoding: int = 0, spill_above: int | None = None, block: int = 0,
) -> DeviceBudget:  # fmt: skip
    """Divide ``memory.device``, or choose it when it is None.

    Args:
        total: The budget that the user gave.
        ceiling: What a derived budget may be at most.
        units: All units.
        early: Whether an update inside backward is done with its gradient.
        world_size: Ranks.
        together: Positions of units that are gathered as one.
        in_use: Positions of units that are in use at one time.
        in_host: Gradients wait for ``step`` and for updates elsewhere: see :func:`divide_host`.
        updates: What updates on an accelerator take.
        decoding: What decoding stored weights on an accelerator takes.
        spill_above: Gradients spill if they would make a derived budget larger than this; None: ``ceiling``.
        block: What a window for all micro-batches in one block takes.

    Raises:
        BudgetError: Too small; says what is needed and why.
    """
    streaming = [u for u in units if u.streams]
    waits = [u for u in units if u.waits]
    largest = max((rounded(u.full) for u in units if u.trainable), default=0)
    grad = rounded_sum(u.shard_grad for u in waits)
    # beside held gradients: a full gradient, the reduction's second buffer, one update's weights
    leaf = max(
        (rounded_sum(units[i].full for i in group if units[i].trainable) for group in together), default=0
    )
    working = max(largest * (2 if world_size == 1 else 4), leaf + 3 * largest if leaf else 0)
    working += rounded_sum(u.full for u in units if u.lingers)
    flight = max((u.gathered for u in streaming), default=0)
    windows = {
        "two units in flight": 2 * flight,
        "units that are gathered as one": max(
            (sum(units[i].gathered for i in group) + flight for group in together), default=0
        ),
        "units in use at one time": max(
            (_in_use_nbytes([units[i] for i in each]) for each in in_use), default=0
        ),
        "all micro-batches in one block (the ordinary schedule needs less)": block,
    }
    window_least = max(windows.values())
    needed = grad + working + window_least + updates + decoding
    may_spill = [] if in_host else [rounded(u.shard_grad) for u in units if u.spills]
    least, bound = needed - sum(may_spill), ceiling if total is None else total
    spilled: tuple[int, ...] = ()
    if may_spill and needed > (bound if spill_above is None else spill_above):
        # One that comes while one is written has its room before those that stay.
        spilled = _choose_spilled(units, bound - least - max(may_spill))
        freed = rounded_sum(units[i].shard_grad for i in spilled)
        grad, needed = grad - freed, needed - freed
        waits = [u for i, u in enumerate(units) if u.waits and i not in spilled]
    backlog_all = rounded_sum(
        u.shard_weight + (0 if u.waits else u.shard_grad)
        for u in streaming
        if u.on_nvme and u.trainable and not in_host
    )
    window_all = sum(u.gathered for u in streaming)
    wish = needed + backlog_all + min(window_all, 4 * window_least)
    if total is None:
        total = max(needed, min(wish, ceiling))
    if total < needed:
        biggest = max(units, key=lambda u: u.full)
        trained = max((u for u in units if u.trainable), key=lambda u: u.full, default=None)
        parts = [
            f"{format_nbytes(grad)} of gradients that wait for {_occasion(waits, in_host)}",
            f"{format_nbytes(window_least)} for {max(windows, key=lambda name: windows[name])}"
            + (f" ({_described(biggest)})" if biggest is not trained else ""),
        ]
        if trained is not None:
            of = f"the gradient and update of the largest unit that is trained ({_described(trained)})"
            parts.insert(1, f"{format_nbytes(working)} for {of}")
        if updates:
            parts.append(f"{format_nbytes(updates)} for updates (memory.updates=host: none)")
        if decoding:
            parts.append(f"{format_nbytes(decoding)} for decoding quantized weights")
        raise BudgetError(
            f"memory.device is {format_nbytes(total)}; at least {format_nbytes(needed)} ({needed} bytes) "
            f"is required: {', '.join(parts)}. Raise memory.device"
            + _way_out(waits, units, in_host)
            + _indivisible(biggest)
        )
    if spilled:  # what is left, less than one gradient more, lets gradients lag
        return DeviceBudget(total, window_least, False, early, 0, least, spilled)
    spare = total - needed
    hold = early or spare >= backlog_all
    backlog = min(spare, backlog_all) if hold else 0
    return DeviceBudget(total, window_least + spare - backlog, hold, early, backlog if early else 0, least)


def place_states(made: DeviceBudget, bound: int, units: Sequence[UnitSizes], scratch: int) -> DeviceBudget:
    """Give states of units what a division leaves of device memory: see [Note: states on an accelerator].

    Args:
        made: The division.
        bound: What its total may become.
        units: Those that were divided for.
        scratch: What updates of such states take.
    """
    all_weights = sum(u.gathered for u in units if u.streams)
    window, others = min(made.window, all_weights), made.total - made.window
    room, states, gradients = bound - others - window - scratch, 0, 0
    chosen = []
    for place, unit in enumerate(units):
        gradient = 0 if unit.waits else rounded(unit.shard_grad)
        if unit.states and states + gradients + unit.states + gradient <= room:
            states, gradients = states + unit.states, gradients + gradient
            chosen.append(place)
    if not chosen:
        return made
    states += scratch
    window = bound - others - states - gradients
    if made.total < bound:  # it was derived, and need not become that large
        window = min(window, max(made.window, all_weights))
    total = others + states + gradients + window
    return replace(made, total=total, window=window, on_device=tuple(chosen), states=states)


def left_for_states(free: int, total: int, used: int) -> int:
    """Return what states may take of memory that a step has left ``free``: a part stays for other batches.

    Args:
        total: All memory of the device.
        used: What that step's activations took, which is not in ``free``: later ones may be twice as large.
    """
    return max(0, free - max(total // 16, used))


def rounded(nbytes: int) -> int:
    """Return the bytes that a pool takes for a buffer of ``nbytes``: whole pages, huge ones from 2 MiB on."""
    return aligned(nbytes, HUGE_NBYTES if nbytes >= HUGE_NBYTES else BLOCK_NBYTES)


def whole_pages(nbytes: int) -> int:
    """Return the largest buffer that takes no more than ``nbytes`` of a pool."""
    grain = HUGE_NBYTES if nbytes >= HUGE_NBYTES else BLOCK_NBYTES
    return nbytes // grain * grain


def rounded_sum(sizes: Iterable[int]) -> int:
    return sum(rounded(nbytes) for nbytes in sizes)


def _in_use_nbytes(units: Sequence[UnitSizes]) -> int:
    """What units in use at one time take of the pool: they come one by one, so one is being decoded."""
    streaming = [u for u in units if u.streams]
    return rounded_sum(u.full for u in streaming) + max((rounded(u.stored) for u in streaming), default=0)


def _occasion(waits: Sequence[UnitSizes], in_host: bool) -> str:
    return "the last micro-batch (no_sync)" if _accumulate(waits, in_host) else "step()"


def _way_out(waits: Sequence[UnitSizes], units: Sequence[UnitSizes], in_host: bool) -> str:
    """Return what lets gradients wait less, beside a larger budget."""
    if _accumulate(waits, in_host):
        return ", or take a step's micro-batches together: train.schedule=layer, infinity.layer_schedule"
    if waits and any(u.on_nvme for u in units):
        return ", or set memory.resident=false: gradients of units on NVMe can wait there"
    return ""


def _accumulate(waits: Sequence[UnitSizes], in_host: bool) -> bool:
    """Gradients wait for the micro-batches that follow, where they wait in device memory at all."""
    return any(in_host or (u.on_nvme and not u.spills) for u in waits)


def _described(unit: UnitSizes) -> str:
    return f"{unit.name}, {format_nbytes(unit.full)}"


def _indivisible(unit: UnitSizes) -> str:
    """Why a unit is as large as it is, where one parameter makes it so."""
    if unit.parameter_nbytes <= unit.full / 2:
        return ""
    return (
        f". {unit.parameter} alone takes {format_nbytes(unit.parameter_nbytes)}, and is gathered whole; "
        "weights of linear layers, embeddings and packed experts are gathered in tiles with "
        "partition.tile=64MiB or another size"
    )
