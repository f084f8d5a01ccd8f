"""Made-up profiles of steps: transformer-like ones, and random ones for property tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from infinity.core.plan import (
    ActivationPlan,
    BlockCall,
    CodedForm,
    Hardware,
    Kind,
    Operator,
    Outcome,
    Phase,
    Profile,
    SlotKey,
    SlotUse,
    StorageUse,
    Traffic,
)
from infinity.planner import search
from infinity.planner.simulator import StepTimeline, play

MIB = 1 << 20


class Tape:
    """Records a forward, operator by operator; :meth:`finish` adds its backward and the update."""

    def __init__(self) -> None:
        self._operators: list[Operator] = []
        self._storages: list[StorageUse] = []
        self._saved: list[tuple[int, ...]] = []  # by each operator of forward
        self._packed: dict[int, tuple[SlotKey, int]] = {}  # storage -> key, operator
        self._blocks: list[tuple[str, int, int, int]] = []  # name, region, first operator, first after it
        self._region = 0
        self._ordinal = 0

    def given(self, nbytes: int, kind: Kind = Kind.INPUT) -> int:
        """A storage that was there before the step."""
        return self._store(f"{kind}.{len(self._storages)}", nbytes, kind, 0)

    def run(
        self,
        name: str,
        time_s: float,
        reads: Sequence[int],
        nbytes: int,
        *,
        saves: Sequence[int] = (),
        saves_output: bool = False,
    ) -> int:
        """An operator that makes one storage of ``nbytes``; the storages that autograd keeps of it."""
        at = len(self._operators)
        made = self._store(f"{name}.{at}", nbytes, Kind.WORKING, at)
        self._operators.append(Operator(name, time_s, tuple(reads), (made,), Phase.FORWARD, self._region))
        saved = (*saves, *((made,) if saves_output else ()))
        self._saved.append(saved)
        for storage in saved:
            if storage not in self._packed:
                self._packed[storage] = SlotKey(self._region, self._ordinal), at
                self._ordinal += 1
        return made

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """What runs inside is one call of a block."""
        first = len(self._operators)
        self._next_region()
        yield
        self._blocks.append((name, self._region, first, len(self._operators)))
        self._next_region()

    def finish(
        self, *, backward: float = 2.0, update_s: float = 0.0, held: Sequence[int] = (), slack_s: float = 0.0
    ) -> Profile:
        """The whole step: every operator's backward takes ``backward`` times as long as its forward."""
        forward = len(self._operators)
        gradient = None
        for at in reversed(range(forward)):
            operator = self._operators[at]
            nbytes = max((self._storages[s].nbytes for s in operator.inputs), default=0)
            made = self._store(f"gradient.{at}", nbytes, Kind.WORKING, len(self._operators))
            reads = (*self._saved[at], *(() if gradient is None else (gradient,)))
            self._operators.append(
                Operator(
                    f"{operator.name}_backward",
                    backward * operator.time_s,
                    reads,
                    (made,),
                    Phase.BACKWARD,
                    -1,
                )
            )
            gradient = made
        self._operators.append(Operator("update", update_s, (), (), Phase.UPDATE, -1))
        self._set_lives()
        step_s = sum(operator.time_s for operator in self._operators) + slack_s
        slots = tuple(self._slot(storage, forward, held) for storage in self._packed)
        blocks = tuple(self._block(*block, forward) for block in self._blocks)
        return Profile(step_s, tuple(self._operators), tuple(self._storages), slots, blocks)

    def _store(self, name: str, nbytes: int, kind: Kind, born: int) -> int:
        self._storages.append(StorageUse(name, nbytes, kind, born, born))
        return len(self._storages) - 1

    def _next_region(self) -> None:
        self._region += 1
        self._ordinal = 0

    def _set_lives(self) -> None:
        last = {s: at for at, o in enumerate(self._operators) for s in (*o.inputs, *o.outputs)}
        end = len(self._operators) - 1
        for s, storage in enumerate(self._storages):
            made_here = storage.kind is Kind.WORKING
            kind = Kind.ACTIVATION if made_here and s in self._packed else storage.kind
            dies = last.get(s, storage.born) if made_here else end
            self._storages[s] = replace(storage, kind=kind, dies=dies)

    def _slot(self, storage: int, forward: int, held: Sequence[int]) -> SlotUse:
        key, packed_at = self._packed[storage]
        uses = [
            at for at, o in enumerate(self._operators) if o.phase is Phase.BACKWARD and storage in o.inputs
        ]
        was_there = self._storages[storage].kind is not Kind.ACTIVATION
        nbytes = self._storages[storage].nbytes
        return SlotUse(key, storage, nbytes, packed_at, uses[0], uses[-1], storage in held or was_there)

    def _block(self, name: str, region: int, first: int, end: int, forward: int) -> BlockCall:
        made = {s for o in self._operators[first:end] for s in o.outputs}
        read = dict.fromkeys(s for o in self._operators[first:end] for s in o.inputs)
        weights = {s for s, storage in enumerate(self._storages) if storage.kind is Kind.WEIGHT}
        inputs = tuple(s for s in read if s not in made and s not in weights)
        return BlockCall(name, region, (first, end), (2 * forward - end, 2 * forward - first), inputs)


def transformer(
    layers: int = 4,
    *,
    hidden_nbytes: int = 4 * MIB,
    slots: int = 6,
    layer_s: float = 0.02,
    logits_nbytes: int = 16 * MIB,
    weight_nbytes: int = 0,
    update_s: float = 0.01,
) -> Profile:
    """A step of a decoder: embedding, ``layers`` blocks, a norm, logits and a loss.

    Each block reads the residual stream (``hidden_nbytes``, saved), makes ``slots - 1`` storages that
    autograd saves, the middle one four times as big as the others (the feed-forward part), and as many
    working storages. A layer's forward takes ``layer_s``, its backward twice that. With ``weight_nbytes``,
    units bring each layer's weights from NVMe in forward and in backward, and its update there and back.
    """
    tape = Tape()
    tokens = tape.given(4096)
    weights = [tape.given(weight_nbytes, Kind.WEIGHT) for _ in range(layers)]
    x = tape.run("embedding", layer_s / 20, [tokens], hidden_nbytes, saves=[tokens])
    part_s = layer_s / (2 * slots)
    for layer in range(layers):
        with tape.block(f"layers.{layer}"):
            made = tape.run("norm", part_s, [x], hidden_nbytes, saves=[x], saves_output=True)
            for i in range(1, slots - 1):
                nbytes = hidden_nbytes * (4 if i == slots // 2 else 1)
                working = tape.run("matmul", part_s, [made, weights[layer]], nbytes)
                made = tape.run("gelu", part_s, [working], nbytes, saves_output=True)
            working = tape.run("matmul", part_s, [made, weights[layer]], hidden_nbytes)
            x = tape.run("add", part_s, [x, working], hidden_nbytes)
    normed = tape.run("norm", part_s, [x], hidden_nbytes, saves=[x], saves_output=True)
    logits = tape.run("matmul", part_s, [normed], logits_nbytes, saves_output=True)
    tape.run("loss", part_s, [logits, tokens], 4)
    profile = tape.finish(update_s=update_s)
    if not weight_nbytes:
        return profile
    return replace(profile, traffic=tuple(_traffic(profile, weight_nbytes)))


def _traffic(profile: Profile, nbytes: int) -> Iterator[Traffic]:
    for block in profile.blocks:
        yield Traffic(max(block.forward[0] - 1, 0), nbytes, 0)
    for block in reversed(profile.blocks):
        yield Traffic(block.backward[0], nbytes, 0)
        yield Traffic(block.backward[1] - 1, 5 * nbytes, 6 * nbytes)


def hardware(
    gib_per_s: float = 4.0, *, mixed: float | None = None, host: float = 12.0, host_nbytes: int = 0
) -> Hardware:
    """Channels of ``gib_per_s`` each way, in GiB/s; ``mixed`` is their sum if not given."""
    gib = float(1 << 30)
    both = 2 * gib_per_s if mixed is None else mixed
    return Hardware(gib_per_s * gib, gib_per_s * gib, both * gib, host * gib, 20e-6, host_nbytes)


def budget_between(profile: Profile, channels: Hardware, share: float) -> int:
    """Bytes between the smallest budget that a plan keeps (0) and the peak of keeping everything (1)."""
    least = smallest_budget(profile, channels)
    most = play(profile, ActivationPlan("keep"), channels).peak_nbytes
    return least + int(share * (most - least))


@st.composite
def random_profiles(draw: st.DrawFn) -> Profile:
    """Any small graph: blocks and what lies between, re-used and held storages, operators without time."""
    tape = Tape()
    live = [tape.given(draw(st.integers(0, 64)) * 1024, Kind.INPUT)]
    for region in range(draw(st.integers(1, 5))):
        lengths = draw(st.integers(1, 4))
        if region % 2 or draw(st.booleans()):
            with tape.block(f"blocks.{region}"):
                _run_some(draw, tape, live, lengths)
        else:
            _run_some(draw, tape, live, lengths)
    held = [s for s in live if draw(st.integers(0, 9)) == 0]
    slack_s = draw(st.sampled_from([0.0, 0.001]))
    made = tape.finish(backward=draw(st.sampled_from([0.5, 2.0])), held=held, slack_s=slack_s)
    return replace(made, slots=tuple(replace(slot, coded=draw(_forms(slot.nbytes))) for slot in made.slots))


def _forms(nbytes: int) -> st.SearchStrategy[CodedForm | None]:
    """What a codec makes of a storage, if anything."""
    time_s, part = st.sampled_from([0.0, 1e-5, 1e-3]), st.sampled_from([32, 2])
    name = st.sampled_from(["bits", "zeros"])
    exact = st.builds(lambda c, n, e, d: CodedForm(c, nbytes // n, e, d), name, part, time_s, time_s)
    return st.none() | exact


def _run_some(draw: st.DrawFn, tape: Tape, live: list[int], operators: int) -> None:
    for _ in range(operators):
        reads = sorted({live[-1], *draw(st.lists(st.sampled_from(live), max_size=2))})
        saves = [storage for storage in reads if draw(st.booleans())]
        nbytes = draw(st.integers(0, 64)) * 1024
        time_s = draw(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]))
        live.append(tape.run("op", time_s, reads, nbytes, saves=saves, saves_output=draw(st.booleans())))


@st.composite
def random_hardware(draw: st.DrawFn) -> Hardware:
    """Channels from useless to endless beside the profiles above; with and without room on the host."""
    rate = st.sampled_from([1e6, 1e8, 1e9, 1e12])
    read, write = draw(rate), draw(rate)
    mixed = draw(st.sampled_from([read + write, max(read, write), min(read, write)]))
    host_nbytes = draw(st.sampled_from([0, 100 * 1024, 1 << 30]))
    latency_s = draw(st.sampled_from([0.0, 1e-5]))
    per_byte_s = draw(st.sampled_from([0.0, 0.1 / (read + write)]))
    per_move_s = draw(st.sampled_from([0.0, 1e-4]))
    return Hardware(read, write, mixed, draw(rate), latency_s, host_nbytes, per_byte_s, 0.0, per_move_s)


def smallest_budget(profile: Profile, channels: Hardware) -> int:
    """The smallest budget that a plan keeps, however slowly."""
    return search.PlanSearch(profile, channels).smallest_budget()


def plan_of_whole_blocks(profile: Profile, channels: Hardware, capacity_nbytes: int) -> ActivationPlan:
    """The plan whose recomputed blocks run all of their operators again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "kept_levels", lambda index, order: ())
        return search.plan(profile, channels, capacity_nbytes)


def play_in_detail(
    profile: Profile, plan: ActivationPlan, channels: Hardware
) -> tuple[Outcome, StepTimeline]:
    """What a plan costs, with what happens when."""
    timeline = StepTimeline()
    return play(profile, plan, channels, timeline), timeline
