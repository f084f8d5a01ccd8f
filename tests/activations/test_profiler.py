"""The profiler and the meter: memory of a step, counted by hand and compared."""

import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.activations.profiler import MemoryMeter, Profiler
from infinity.core.plan import Kind, Phase, Profile, SlotKey, StorageUse
from infinity.recipes.models import GPT, GPTConfig
from tests.helpers import models

OWN = (Kind.ACTIVATION, Kind.WORKING)


class Cache:
    """The marks of a tensor cache that keeps what autograd saves, or that moves it away and back."""

    def __init__(self, profiler: Profiler, blocks: Sequence[nn.Module] = (), *, moves: bool = False) -> None:
        self.profiler, self.moves = profiler, moves
        self.region, self.numbers = 0, Counter[int]()
        self.keys = weakref.WeakKeyDictionary[Any, SlotKey]()
        self.away: dict[SlotKey, Any] = {}
        for region, block in zip(itertools.count(1, 2), blocks):
            block.register_forward_pre_hook(functools.partial(self.enter, region))
            block.register_forward_hook(functools.partial(self.leave, region))

    def enter(self, region: int, block: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.region = region
            self.profiler.enter_region(region, type(block).__name__)

    def leave(self, region: int, block: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.profiler.leave_region(region, [a for a in args if isinstance(a, Tensor)])
            self.region = region + 1

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return None, tensor
        if storage not in self.keys:
            self.keys[storage] = SlotKey(self.region, self.numbers[self.region])
            self.numbers[self.region] += 1
        key = self.keys[storage]
        self.profiler.packed(key, tensor)
        if not self.moves:
            return key, tensor
        with self.profiler.paused():
            if key not in self.away:
                self.away[key] = storage.clone()
        return key, (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def unpack(self, packed: Any) -> Tensor:
        key, tensor = packed
        if key is not None:
            if self.moves:
                dtype, *view = tensor
                with self.profiler.paused():
                    tensor = torch.empty(0, dtype=dtype).set_(self.away[key], *view)
            self.profiler.unpacked(key, tensor)
        return tensor

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def profiled(
    model: nn.Module, blocks: list[nn.Module], *inputs: Any, moves: bool = False, **more: Any
) -> Profile:
    """One micro-batch of ``model``, whose output's sum (or whose loss) is trained."""
    profiler = Profiler(model.parameters())
    cache = Cache(profiler, blocks, moves=moves)
    with profiler:
        with cache.saving():
            output = model(*inputs, **more)
            loss = output.sum() if isinstance(output, Tensor) else output.loss
            del output
        profiler.backward_begins()
        loss.backward()
        profiler.update_begins()
    return profiler.finish()


def memory(profile: Profile) -> list[int]:
    """Bytes of the step's own storages while each operator runs."""
    return [
        sum(s.nbytes for s in profile.storages if s.kind in OWN and s.born <= k <= s.dies)
        for k in range(len(profile.operators))
    ]


def biggest(profile: Profile, kind: Kind) -> list[StorageUse]:
    return [s for s in profile.storages if s.kind is kind and s.nbytes > 64]


class MLP(nn.Module):
    """Two layers: (64, 32) -> (64, 128) -> (64, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


ROW = 64 * 4  # bytes of one column of a batch of 64, fp32


def test_the_peak_of_an_mlp_is_what_one_counts_by_hand() -> None:
    profile = profiled(MLP(), [], torch.randn(64, 32))
    # Forward's peak: up's output and relu's. Backward's: relu's output, which autograd saves, the gradient
    # of it and the gradient of up's output; those of the weights are the user's, not the step's.
    assert max(memory(profile)) == pytest.approx(3 * 128 * ROW, abs=64)
    assert [s.nbytes for s in biggest(profile, Kind.ACTIVATION)] == [128 * ROW]
    assert sum(s.nbytes for s in biggest(profile, Kind.GRADIENT)) == 2 * 32 * 128 * 4
    assert sum(s.nbytes for s in biggest(profile, Kind.WEIGHT)) == 2 * 32 * 128 * 4
    assert [s.nbytes for s in biggest(profile, Kind.INPUT)] == [32 * ROW]


def test_the_slot_of_an_mlp_lives_from_its_relu_to_the_backward_of_its_relu() -> None:
    profile = profiled(MLP(), [], torch.randn(64, 32))
    names = [operator.name for operator in profile.operators]
    (hidden,) = [slot for slot in profile.slots if not slot.held]
    assert names[hidden.packed_at] == "aten.relu.default"
    assert names[hidden.unpacked_at] == "aten.mm.default"  # the gradient of down's weight
    assert names[hidden.released_at] == "aten.threshold_backward.default"
    storage = profile.storages[hidden.storage]
    assert (storage.born, storage.dies) == (hidden.packed_at, hidden.released_at)
    (given,) = [slot for slot in profile.slots if slot.held]
    assert profile.storages[given.storage].kind is Kind.INPUT


def test_a_step_that_moves_its_activations_has_the_profile_of_one_that_keeps_them() -> None:
    def shape(profile: Profile) -> Any:
        operators = [(o.name, o.inputs, o.outputs, o.phase, o.region) for o in profile.operators]
        return operators, profile.storages, profile.slots, profile.blocks

    factory, batch = models.build("gpt", seed=0)
    profiles = []
    for moves in (False, True):
        model = factory()
        profiles.append(profiled(model, list(model.blocks), moves=moves, **batch(0)))
    assert shape(profiles[0]) == shape(profiles[1])


def test_views_share_a_storage_and_are_no_operators() -> None:
    with (profiler := Profiler()):
        whole = torch.ones(8, 4)
        half = whole.view(4, 8)[:2].t()
        total = half.sum()
    profile = profiler.finish()
    assert [o.name for o in profile.operators] == ["aten.ones.default", "aten.sum.default"]
    assert profile.operators[1].inputs == profile.operators[0].outputs
    assert profile.storages[profile.operators[0].outputs[0]].nbytes == 8 * 4 * 4
    assert total == 16


def test_an_operator_in_place_reads_and_writes_its_storage() -> None:
    with (profiler := Profiler()):
        x = torch.ones(8)
        x[:4].mul_(2)
        torch.add(x, 1, out=(y := torch.empty(8)))
        torch._foreach_add_([x, y], 1.0)
    operators = profiler.finish().operators
    assert [(o.name, o.inputs, o.outputs) for o in operators] == [
        ("aten.ones.default", (), (0,)),
        ("aten.mul_.Tensor", (0,), (0,)),
        ("aten.empty.memory_format", (), (1,)),
        ("aten.add.out", (0,), (1,)),
        ("aten._foreach_add_.Scalar", (0, 1), (0, 1)),
    ]


def test_a_storage_dies_when_its_memory_is_given_back_also_when_the_address_is_used_again() -> None:
    with (profiler := Profiler()):
        for _ in range(20):
            x = torch.ones(1000)
            x.add_(1)
            del x
    storages = profiler.finish().storages
    assert [(s.born, s.dies) for s in storages] == [(2 * i, 2 * i + 1) for i in range(20)]


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_a_transformer_has_as_many_blocks_as_layers(name: str) -> None:
    factory, batch = models.build(name, seed=0, dropout=0.1)
    model = factory()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = list(max(lists, key=len))
    profile = profiled(model, blocks, **batch(0))
    assert [block.region for block in profile.blocks] == [2 * i + 1 for i in range(len(blocks))]
    for block, following in itertools.pairwise(profile.blocks):
        assert block.forward[0] < block.forward[1] <= following.forward[0]
        assert following.backward[0] < following.backward[1] <= block.backward[0]
    for block in profile.blocks:
        own = [slot for slot in profile.slots if slot.key.region == block.region]
        assert own
        assert all(block.forward[0] - 1 <= slot.packed_at < block.forward[1] for slot in own)
        phases = {operator.phase for operator in profile.operators[slice(*block.backward)]}
        assert phases == {Phase.BACKWARD}
        assert {o.region for o in profile.operators[slice(*block.forward)]} == {block.region}
    first, second = profile.blocks[:2]
    assert second.inputs[0] in {s for o in profile.operators[slice(*first.forward)] for s in o.outputs}


def test_what_a_user_still_holds_is_held() -> None:
    kept = []

    class Holds(MLP):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.relu(self.up(x)))
            return self.down(kept[-1])

    for moves in (False, True):
        profile = profiled(Holds(), [], torch.randn(64, 32), moves=moves)
        assert [slot.held for slot in profile.slots if slot.nbytes == 128 * ROW] == [True]


def test_a_checkpointed_forward_saves_its_input_alone() -> None:
    model = GPT(GPTConfig(vocab_size=97, seq_len=12, n_layers=3, d_model=32, n_heads=4))
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    plain = GPT(GPTConfig(vocab_size=97, seq_len=12, n_layers=3, d_model=32, n_heads=4))
    batch = models.build("gpt", seed=0)[1](0)
    recomputed = profiled(model, list(model.blocks), **batch)
    kept = profiled(plain, list(plain.blocks), **batch)
    assert len(recomputed.operators) > len(kept.operators)
    assert sum(s.nbytes for s in recomputed.slots) < sum(s.nbytes for s in kept.slots) / 2
    assert max(memory(recomputed)) < max(memory(kept))


def test_both_kinds_of_checkpoint_and_no_grad_forwards_are_recorded() -> None:
    linear = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for reentrant in (True, False):
        with (profiler := Profiler(linear.parameters())):
            x = torch.randn(4, 8, requires_grad=True)
            with torch.no_grad():
                linear(x)
            y = checkpoint(linear, x, use_reentrant=reentrant).sum()
            profiler.backward_begins()
            y.backward()
        names = [o.name for o in profiler.finish().operators if o.phase is Phase.BACKWARD]
        assert names.count("aten.addmm.default") == (2 if reentrant else 1)  # the other stops early
        assert names.count("aten.mm.default") == 4


def test_the_update_is_a_phase() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with (profiler := Profiler(model.parameters())):
        loss = model(torch.randn(64, 32)).sum()
        profiler.backward_begins()
        loss.backward()
        profiler.update_begins()
        optimizer.step()
        optimizer.zero_grad()
    profile = profiler.finish()
    updates = [o for o in profile.operators if o.phase is Phase.UPDATE]
    touched = {profile.storages[i].kind for o in updates for i in (*o.inputs, *o.outputs)}
    assert {Kind.WEIGHT, Kind.GRADIENT} <= touched
    assert len(biggest(profile, Kind.GRADIENT)) == 2


def test_operators_never_take_longer_than_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    later_s, clock = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later_s[0])
    began_s = time.perf_counter()
    with (profiler := Profiler()):
        torch.randn(200, 200) @ torch.randn(200, 200)
        with profiler.paused():
            later_s[0] = 0.2
            torch.ones(3)
    measured, given = profiler.finish(), profiler.finish().at_pace(1e-6)
    took_s = time.perf_counter() - began_s
    assert sum(o.time_s for o in measured.operators) <= measured.step_s <= took_s - 0.2
    assert [o.name for o in measured.operators] == ["aten.randn.default"] * 2 + ["aten.mm.default"]
    assert given.step_s == pytest.approx(1e-6)
    assert sum(o.time_s for o in given.operators) == pytest.approx(1e-6)


def test_profiling_changes_no_number() -> None:
    factory, batch = models.build("gpt2", seed=0, dropout=0.1)
    gradients = []
    for profiler in (contextlib.nullcontext(), Profiler()):
        model = factory()
        torch.manual_seed(1)
        with profiler:
            model(**batch(0)).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.slow
def test_profiling_a_100_m_model_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    config = GPTConfig(vocab_size=8192, seq_len=256, n_layers=12, d_model=768, n_heads=12)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (2, config.seq_len))

    def step(profiler: Any) -> float:
        start_s = time.process_time()  # a busy machine leaves it as it is, more or less
        with profiler:
            cache = Cache(profiler) if isinstance(profiler, Profiler) else None
            with cache.saving() if cache else contextlib.nullcontext():
                loss = model(tokens, tokens).loss
            if cache:
                profiler.backward_begins()
            loss.backward()
        model.zero_grad()
        return time.process_time() - start_s

    step(contextlib.nullcontext())
    pairs = [(step(contextlib.nullcontext()), step(profiler := Profiler())) for _ in range(5)]
    plain_s, profiled_s = (min(times) for times in zip(*pairs))
    profile = profiler.finish()
    with capsys.disabled():
        print(
            f"\n{config.numel / 1e6:.0f} M parameters, {len(profile.operators)} operators; processor time: "
            f"plain {plain_s:.3f} s, profiled {profiled_s:.3f} s (ratio {profiled_s / plain_s:.3f}), "
            f"step_s by the profile {profile.step_s:.3f} s"
        )
    assert profiled_s < 1.25 * plain_s


# --- the memory meter ------------------------------------------------------------------------------

KIB = 1024


def kib(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_lives_at_one_time():
    with MemoryMeter() as meter:
        first = kib(10)
        second = kib(20)
        del first
        third = kib(5)
        del second
        fourth = kib(8)
    assert meter.peak_nbytes() == 30 * KIB
    assert third.numel() + fourth.numel() < 30 * KIB


def test_what_was_there_before_views_and_writes_in_place_are_not_counted():
    before = kib(100)
    with MemoryMeter() as meter:
        views = [before[1:], before.view(10, -1), before.detach()]
        before.add_(1)
        made = kib(7)
        more = [made.view(7, -1).t(), made.add_(1)]
    assert (len(views), len(more)) == (3, 2)
    assert meter.peak_nbytes() == 7 * KIB


def test_a_storage_that_is_left_out_counts_for_nothing():
    with MemoryMeter() as meter:
        gradient = kib(50)
        working = kib(3)
        del working
        other = kib(2)
    assert meter.peak_nbytes() == 53 * KIB
    assert meter.peak_nbytes(without=[gradient[5:]]) == 3 * KIB
    assert meter.peak_nbytes(without=[gradient, other]) == 3 * KIB
    assert meter.peak_nbytes(without=[kib(1)]) == 53 * KIB


def test_addresses_that_are_used_again_are_new_storages():
    with MemoryMeter() as meter:
        for _ in range(50):
            kib(4)
        held = kib(4)
    assert meter.peak_nbytes() == 4 * KIB
    assert meter.peak_nbytes(without=[held]) == 4 * KIB


def test_a_step_costs_what_its_graph_and_its_gradients_take():
    weight = torch.zeros(16, 16, requires_grad=True)
    inputs = torch.zeros(32, 16)
    with MemoryMeter() as meter:
        hidden = inputs @ weight  # 2 KiB, kept by sigmoid's result only
        loss = hidden.sigmoid().sum()
        del hidden
        loss.backward()
    # Product and sigmoid; then sigmoid, its gradient and the weight's gradient (1 KiB).
    assert 4 * KIB <= meter.peak_nbytes() <= 4 * KIB + 1 * KIB + 64
    assert meter.peak_nbytes(without=[weight.grad]) <= meter.peak_nbytes()


def test_storages_that_go_on_other_threads_and_by_the_garbage_collector_are_counted_off():
    with MemoryMeter() as meter:
        handed = [kib(10)]
        thread = threading.Thread(target=handed.clear)
        thread.start()
        thread.join()
        ring: list = [kib(10)]
        ring.append(ring)
        del ring
        gc.collect()
        kib(10)
    assert meter.peak_nbytes() == 10 * KIB


def test_sparse_and_empty_results_do_no_harm():
    with MemoryMeter() as meter:
        torch.eye(4).to_sparse()
        torch.empty(0)
    assert meter.peak_nbytes() >= 64
