"""From budgets and the model to every size: pure arithmetic, and the errors that show it.

[Note: the device budget]
Three things share it. *Held gradients* wait: until ``step`` all of them when a global norm must be known
first, otherwise those of units in host memory; until the last micro-batch, under ``no_sync``, all of them.
*The backlog*, gradient and weights of units whose update has started, lets updates lag into the next forward;
beside an accelerator it is gradients that have yet to leave it, which the link goes on with in that forward.
*The window*, which the prefetcher fills, is the rest: at least two of the largest units, or all in use.

[Note: gradients that spill]
Where memory is too small for all gradients that wait for ``step``, those of some units on NVMe wait there: as
few bytes as possible. Of equal units the first of the model keep theirs in memory: backward comes to them
last, with little time to write. Sums of micro-batches do the same until the next one adds to them; beside an
accelerator those of any unit leave its memory for host memory, and from there for NVMe.

[Note: the host budget beside an accelerator]
On an accelerator gradients wait in host memory, beside residents (each with room for its own gradient),
chunks of updates, shards on their way, and weights kept for their update. Each has memory of its own, so that
none waits for memory of another that waits for it.

[Note: what trains is known]
While a model is built residents get half of that budget. Where little trains (adapters) the rest needs less,
and more residents are spread over the model: while some are computed, others are read. An eighth stays for
shards on their way and activations that leave, or half where a plan decides which do.

[Note: states on an accelerator]
What the device budget has beyond all of that, and a window for all weights, holds states of units whose home
is host memory, the model's first ones first: they are updated there, and their gradients wait there.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from infinity.core.errors import BudgetError
from infinity.core.nbytes import BLOCK_NBYTES, aligned, format_nbytes, rounded, rounded_sum, whole_pages

#: Chunks of the update that are staged at one time: being read, updated and written.
STAGED_CHUNKS = 4
#: Pieces of shards on their way to an accelerator that fit into what staging has.
STAGED_PIECES = 4
#: The least that a piece needs, where its shard is larger (bytes).
LEAST_PIECE_NBYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Gives the bytes of one unit on this rank."""

    name: str
    full: int  # the flat buffer; a full gradient takes the same
    shard_grad: int  # the reduced gradient
    shard_weight: int
    streams: bool  # its full values come and go, or its gradient borrows of the window beside others
    on_nvme: bool
    trainable: bool
    waits: bool  # its gradient, in device memory, for ``step`` or for the last micro-batch
    waits_in_host: bool = False  # its gradient, in host memory, for ``step``
    spills: bool = False  # it may wait on NVMe
    parameter: str = ""  # the largest
    parameter_nbytes: int = 0
    stored: int = 0  # what the flat buffer is decoded from
    states: int = 0  # weights and states on this rank, if they may be in device memory
    lingers: bool = False  # its full gradient, until backward ends

    @property
    def gathered(self) -> int:
        """Return what a pool takes for the unit's full values and what they are decoded from."""
        return rounded(self.full) + rounded(self.stored)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Records a division of the device budget (bytes)."""

    total: int
    window: int
    hold_weights: bool
    early: bool  # gradients need not wait for ``step()``: an update inside backward is done with them
    lag: int  # room beside the window: early updates may lag by as much, and need not
    least: int  # the smallest total that would do
    spilled: tuple[int, ...] = ()  # positions of units whose gradients leave: see the note
    ahead: bool = False  # one of them may come back while another one leaves
    on_device: tuple[int, ...] = ()  # positions of units: see [Note: states on an accelerator]
    states: int = 0  # what these states take, with their updates


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Records a division of the host budget (bytes): see [Note: the host budget beside an accelerator]."""

    gradients: int  # from backward to their updates
    weights: int  # that updates start from; an update reads those that do not fit
    staging: int  # for shards on their way to the accelerator, and weights that stay
    piece: int  # the most that one shard on its way takes at one time
    stays: int  # the part of ``staging`` that weights may take while they stay
    spilled: tuple[int, ...] = ()  # positions of units: see [Note: gradients that spill]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Says how one model's units share the device budget (positions of units, and bytes)."""

    early: bool  # an update inside backward is done with its gradient
    world_size: int
    together: Sequence[Sequence[int]] = ()  # units that are gathered as one
    in_use: Collection[Collection[int]] = ()  # units that are in use at one time
    in_host: bool = False  # gradients wait for ``step`` and for updates elsewhere: see :func:`divide_host`
    accumulates: bool = False  # gradients of micro-batches add up
    updates: int = 0
    decoding: int = 0
    block: int = 0  # of a window for all micro-batches in one block


#: Chunks that are not small are a whole number of these, of which every field of any rule is whole blocks.
_CHUNKS_NUMEL = 2**18


def chunk_numel(host_nbytes: int, share: int, itemsize: float, most: int, quantum: int = 2048) -> int:
    """Return a chunk's elements, at ``most``, so that :data:`STAGED_CHUNKS` of them fit the host budget.

    Staging may take one part in ``share`` of ``host_nbytes``, the host budget; ``itemsize`` is the bytes of
    weight and state per element, of which ``quantum`` are whole blocks.
    """
    staging_nbytes, nbytes = host_nbytes // share, round(quantum * itemsize)
    n = whole_pages(staging_nbytes // STAGED_CHUNKS) // nbytes * quantum
    if n == 0:
        least = STAGED_CHUNKS * rounded(nbytes)
        raise BudgetError(
            f"memory.host is {format_nbytes(host_nbytes)}, which leaves {format_nbytes(staging_nbytes)} for "
            f"staging; updates alone need {STAGED_CHUNKS} chunks of {format_nbytes(nbytes)} = "
            f"{format_nbytes(least)}. Raise memory.host to {format_nbytes(share * least)} "
            f"({share * least} bytes) or more",
            "memory.host",
        )
    return min(n if n < _CHUNKS_NUMEL else n // _CHUNKS_NUMEL * _CHUNKS_NUMEL, most)


def piece_nbytes(staging_nbytes: int) -> int:
    """Return the bytes of one of :data:`STAGED_PIECES` buffers, of what host memory leaves to staging."""
    return max(BLOCK_NBYTES, staging_nbytes // STAGED_PIECES // BLOCK_NBYTES * BLOCK_NBYTES)


def settled_nbytes(room: int, gradients: int, weights: int) -> int:
    """Return the part of ``room`` for residents beside an accelerator: see [Note: what trains is known].

    ``room`` is the host budget without chunks of updates, ``gradients`` and ``weights`` those of all that
    trains.
    """
    rest = max(room // 8, 2 * (2 * gradients + weights))
    return room - min(room // 2, rest)


def spread(sizes: Sequence[int], room: int) -> Iterator[int]:
    """Yield positions of items that fit ``room`` (bytes) together, evenly over all."""
    total, carried = max(1, sum(sizes)), 0
    for place, nbytes in enumerate(sizes):
        carried += min(room, total) * nbytes
        if carried >= total * nbytes:
            carried -= total * nbytes
            yield place


def _choose_spilled(gradients: Mapping[int, int], room: int) -> tuple[int, ...]:
    """Return positions of ``gradients`` (bytes) that spill; the others that might have ``room`` (bytes)."""
    spilled = []
    for place in sorted(gradients, key=lambda place: -gradients[place]):
        if gradients[place] <= room:
            room -= gradients[place]
        else:
            spilled.append(place)
    return tuple(sorted(spilled))


def _listed(parts: Iterable[tuple[int, str]], between: str) -> str:
    return between.join(f"{format_nbytes(nbytes)} {text}" for nbytes, text in parts if nbytes)


def divide_host(
    total: int, residents: int, chunks: int, units: Sequence[UnitSizes], *, resident: bool
) -> HostBudget:
    """Divide ``memory.host`` beside an accelerator.

    ``residents`` are the bytes of units in host memory, without gradients; ``chunks`` those of update chunks.
    ``resident``: units take what a larger budget would give.
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
        may_spill = {i: rounded(u.shard_grad) for i, u in enumerate(units) if u.spills and u.waits_in_host}
        waiting -= sum(may_spill.values())
        passing = max(may_spill.values(), default=passing)
        # Weights on their way, and a gradient that comes while one is written, have their room first. Below
        # they get a quarter and a half of what is left.
        wished = 4 * (STAGED_PIECES * shard - piece) + 2 * passing
        spilled = _choose_spilled(may_spill, free - waiting - passing - piece - wished)
        waiting += sum(may_spill.values()) - sum(may_spill[place] for place in spilled)
    if free < (needed := waiting + passing + piece):
        raise _host_too_small(
            total, total - free - chunks, chunks, (waiting, passing, piece), units, resident
        )
    spare = (free - needed) // 2  # the rest: activations, and exact values that are read

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
    lag = 0 if waiting else take(all_gradients - passing)
    stays = take(all_weights)
    piece = max(piece, min(shard, whole_pages(staging // STAGED_PIECES)))
    return HostBudget(beside + waiting + passing + lag, weights, staging + stays, piece, stays, spilled)


def _host_too_small(
    total: int, in_host: int, chunks: int, more: Sequence[int], units: Sequence[UnitSizes], resident: bool
) -> BudgetError:
    updated = (u for u in units if u.trainable and u.on_nvme)
    largest = max(updated, key=lambda u: u.shard_grad, default=None)
    described = "" if largest is None else f"{largest.name}, {format_nbytes(largest.full)}"
    texts = (
        "of gradients that wait for step()",
        f"for the gradient of {described}",
        "for weights on their way",
    )
    # Of a larger budget chunks take a quarter, or half without residents, and those half of the rest.
    enough = aligned(-(-8 * sum(more) // 3) if resident else 2 * sum(more))
    return BudgetError(
        f"memory.host is {format_nbytes(total)}, of which units in host memory take "
        f"{format_nbytes(in_host)} and chunks of updates {format_nbytes(chunks)}. Beside an accelerator "
        f"{format_nbytes(sum(more))} more are required: {_listed(zip(more, texts), ', and ')}. "
        f"{format_nbytes(enough)} ({enough} bytes) are enough: raise memory.host, or share the model "
        f"over more ranks{_indivisible(largest) if largest and more[1] else ''}",
        "memory.host",
    )


def divide_device(
    total: int | None, ceiling: int, units: Sequence[UnitSizes], sharing: Sharing,
    spill_above: int | None = None,
) -> DeviceBudget:  # fmt: skip
    """Divide ``memory.device``, or choose it when it is None.

    A derived budget is at most ``ceiling``; gradients spill if they would make it larger than ``spill_above``
    (None: ``ceiling``).
    """
    waits, early, several = [u for u in units if u.waits], sharing.early, sharing.world_size > 1
    working = _working_nbytes(units, sharing)
    windows = _windows(units, sharing)
    window_least = max(windows.values())
    grad = rounded_sum(u.shard_grad for u in waits)
    needed = grad + working + window_least + sharing.updates + sharing.decoding
    leaves = (i for i, u in enumerate(units) if u.waits and (u.spills or sharing.in_host))
    may_spill = {i: rounded(units[i].shard_grad) for i in leaves}
    most = max(may_spill.values(), default=0)
    # Several ranks add a reduced gradient to the sum, which comes back beside it.
    back = most if sharing.accumulates and several else 0
    least, bound = needed - sum(may_spill.values()) + back, ceiling if total is None else total
    spilled: tuple[int, ...] = ()
    if may_spill and needed > (bound if spill_above is None else spill_above):
        # One that comes while one is written has its room before those that stay.
        spilled = _choose_spilled(may_spill, bound - least - most)
        freed = sum(may_spill[place] for place in spilled)
        grad, needed, working = grad - freed, needed - freed + back, working + back
        waits = [u for i, u in enumerate(units) if u.waits and i not in spilled]
    if sharing.in_host:  # as many gradients as leave in a forward, a third of a step
        backlog_all = sum(rounded(u.shard_grad) // 3 for u in units if u.trainable and not u.waits)
    else:
        lag = (u for u in units if u.streams and u.on_nvme and u.trainable)
        backlog_all = rounded_sum(u.shard_weight + (0 if u.waits else u.shard_grad) for u in lag)
    if total is None:
        window_all = sum(u.gathered for u in units if u.streams)
        total = max(needed, min(needed + backlog_all + min(window_all, 4 * window_least), ceiling))
    if total < needed:
        texts = [
            "of gradients that wait for step()",
            "for the gradient and update of the largest unit that is trained",
            f"for {max(windows, key=lambda name: windows[name])}",
            "for updates (memory.updates=host: none)",
            "for decoding quantized weights",
        ]
        parts = list(zip([grad, working, window_least, sharing.updates, sharing.decoding], texts))
        raise _too_small(total, parts, units, waits)
    if spilled:  # what is left, less than one gradient more, lets gradients lag, or come back ahead
        return DeviceBudget(total, window_least, False, early, 0, least, spilled, total - needed >= most)
    spare = total - needed
    if sharing.in_host:
        backlog, hold = min(spare // 2, backlog_all), True
        return DeviceBudget(total, window_least + spare - backlog, hold, early, backlog, least)
    hold = early or spare >= backlog_all
    backlog = min(spare, backlog_all) if hold else 0
    return DeviceBudget(total, window_least + spare - backlog, hold, early, backlog if early else 0, least)


def _too_small(
    total: int, parts: list[tuple[int, str]], units: Sequence[UnitSizes], waits: Sequence[UnitSizes]
) -> BudgetError:
    biggest = max(units, key=lambda u: u.full)
    trained = max((u for u in units if u.trainable), key=lambda u: u.full, default=None)
    for at, unit in ((1, trained), (2, None if biggest is trained else biggest)):
        if unit is not None:
            parts[at] = parts[at][0], f"{parts[at][1]} ({unit.name}, {format_nbytes(unit.full)})"
    way_out = ""
    if waits and any(u.on_nvme for u in units):
        way_out = ", or set memory.resident=false: gradients of units on NVMe can wait there"
    needed = sum(nbytes for nbytes, _ in parts)
    return BudgetError(
        f"memory.device is {format_nbytes(total)}; at least {format_nbytes(needed)} ({needed} bytes) "
        f"is required: {_listed(parts, ', ')}. Raise memory.device{way_out}{_indivisible(biggest)}",
        "memory.device",
    )


def _working_nbytes(units: Sequence[UnitSizes], sharing: Sharing) -> int:
    """Return room beside held gradients: a full one, the reduction's second buffer, an update's weights."""
    largest = max((rounded(u.full) for u in units if u.trainable), default=0)
    leaf = max(
        (rounded_sum(units[i].full for i in each if units[i].trainable) for each in sharing.together),
        default=0,
    )
    working = max(largest * (2 if sharing.world_size == 1 else 4), leaf + 3 * largest if leaf else 0)
    return working + rounded_sum(u.full for u in units if u.lingers)


def _windows(units: Sequence[UnitSizes], sharing: Sharing) -> dict[str, int]:
    """Return windows, the largest of which is required, each with its reason."""
    flight = max((u.gathered for u in units if u.streams), default=0)
    leaves = (sum(units[i].gathered for i in group) + flight for group in sharing.together)
    nested = 0
    for each in sharing.in_use:  # they come one by one, so one is being decoded
        streaming = [units[i] for i in each if units[i].streams]
        decoded = max((rounded(u.stored) for u in streaming), default=0)
        nested = max(nested, rounded_sum(u.full for u in streaming) + decoded)
    return {
        "two units in flight": 2 * flight,
        "units that are gathered as one": max(leaves, default=0),
        "units in use at one time": nested,
        "all micro-batches in one block (the ordinary schedule needs less)": sharing.block,
    }


def _indivisible(unit: UnitSizes) -> str:
    """Return why a unit is as large as it is, if one parameter makes it so."""
    if unit.parameter_nbytes <= unit.full / 2:
        return ""
    return (
        f". {unit.parameter} alone takes {format_nbytes(unit.parameter_nbytes)}, and is gathered whole; "
        "weights of linear layers, embeddings and packed experts are gathered in tiles with "
        "partition.tile=64MiB or another size"
    )


def place_states(made: DeviceBudget, bound: int, units: Sequence[UnitSizes], scratch: int) -> DeviceBudget:
    """Give states of units what a division leaves of ``bound``, less the ``scratch`` bytes of updates."""
    if made.spilled:  # gradients come first
        return made
    all_weights = sum(u.gathered for u in units if u.streams)
    window, others = min(made.window, all_weights), made.total - made.window
    room, states, gradients, lag = bound - others - window - scratch, 0, 0, made.lag
    chosen = []
    for place, unit in enumerate(units):
        gradient = 0 if unit.waits else rounded(unit.shard_grad)
        left = max(0, lag - gradient // 3)  # it does not leave
        if unit.states and states + gradients + unit.states + gradient <= room + made.lag - left:
            states, gradients, lag = states + unit.states, gradients + gradient, left
            chosen.append(place)
    if not chosen:
        return made
    states += scratch
    others -= made.lag - lag
    window = bound - others - states - gradients
    if made.total < bound:  # it was derived, and need not become that large
        window = min(window, max(made.window, all_weights))
    total = others + states + gradients + window
    return replace(made, total=total, window=window, lag=lag, on_device=tuple(chosen), states=states)


def left_for_states(free: int, total: int, used: int) -> int:
    """Return what states may take of ``free`` memory beside a step that ``used`` some for activations."""
    return max(0, free - max(total // 16, used))  # those of later batches may be twice as large
