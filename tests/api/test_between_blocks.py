"""Promises of the layer schedule about what blocks return: it may leave memory, and no number changes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.activations import tensor_cache
from infinity.activations.profiler import MemoryMeter
from infinity.core.errors import DiskError, StateError
from infinity.engine.executor import StepExecutor
from infinity.engine.schedule import LayerSchedule
from infinity.planner.passing import ON_THEIR_WAY, Rooms
from infinity.recipes.models import GPT, GPTConfig
from tests.api.test_layer_schedule import reference_by_layer, train_by_layer, whole
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.faulty import Fault, breakable
from tests.helpers.launch import run_ranks
from tests.helpers.models import HIDDEN, SEQUENCES_PER_STEP
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, assert_bitwise, build, optimizer_for, streaming

FREE = Rule(max_grad_norm=None)
#: With so many tokens what a block returns is several whole blocks of a drive, which alone move.
SEQUENCE = 48
#: What a block of a tiny model in bf16 returns for a micro-batch (bytes).
NBYTES = 2 * SEQUENCES_PER_STEP * SEQUENCE * HIDDEN
OFFLOAD = "memory.activations=offload"


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "LEAST_NBYTES", 512)
    monkeypatch.setattr(models, "SEQUENCE", SEQUENCE)


def give(monkeypatch: pytest.MonkeyPatch, micro_batches: int | None) -> None:
    """Let so many micro-batches of what blocks return stay, beside those on their way."""
    room = None if micro_batches is None else (micro_batches + ON_THEIR_WAY) * NBYTES
    monkeypatch.setattr(StepExecutor, "rooms_between_blocks", lambda self, together: Rooms(room, 0, True))


@contextlib.contextmanager
def layered(
    folder: Path, name: str, micro_batches: int, *more: str, factory: Any = None, dtype: str = "bf16"
) -> Iterator[tuple[Any, Any, Any]]:
    """A model on NVMe with its schedule and its optimizer."""
    make, _ = models.build(name, seed=0)
    model = build(factory or make, dtype, streaming(folder, *more))
    with contextlib.closing(optimizer_for(model, FREE)) as optimizer:
        yield infinity.layer_schedule(model, micro_batches), optimizer, model


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dropout"), few((("gpt", 0.0),), [("gpt2", 0.1), ("llama", 0.0), ("gpt", 0.0), ("bert", 0.1)])
)
def test_no_number_changes_wherever_what_blocks_return_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dropout: float
) -> None:
    plain = reference_by_layer(name, micro_batches=4, rule=FREE, dropout=dropout, steps=3)

    def trained(*more: str) -> Any:
        settings = streaming(tmp_path, *more)
        return train_by_layer(name, settings, micro_batches=4, rule=FREE, dropout=dropout, steps=3)

    assert_bitwise(trained(OFFLOAD), plain)
    for staying in (2, 6, None):  # some between two blocks, all of those and some for backward, all
        give(monkeypatch, staying)
        assert_bitwise(trained(), plain)


def test_an_encoder_and_a_decoder_train_as_in_memory(tmp_path: Path) -> None:
    """Blocks of T5 hand on a bias of positions, which has all rows, too."""
    plain = reference_by_layer("t5", micro_batches=2, rule=FREE, steps=2)
    ours = train_by_layer("t5", streaming(tmp_path, OFFLOAD), micro_batches=2, rule=FREE, steps=2)
    assert_bitwise(ours, plain)


def on_two_ranks(folder: str, *more: str) -> Any:
    tensor_cache.LEAST_NBYTES, models.SEQUENCE = 512, SEQUENCE
    return train_by_layer("llama", streaming(folder, *more), micro_batches=2, rule=FREE, steps=3)


def test_two_ranks_train_alike_wherever_what_blocks_return_waits(tmp_path: Path) -> None:
    stored = run_ranks(on_two_ranks, 2, str(tmp_path / "a"), OFFLOAD)
    kept = run_ranks(on_two_ranks, 2, str(tmp_path / "b"))
    for ours, theirs in zip(stored, kept, strict=True):
        assert_bitwise(ours, theirs)


class Skipping(nn.Module):
    """Blocks with operators of the model's own between them, which read what earlier blocks returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)) for _ in range(3)
        )
        self.head = nn.Linear(HIDDEN, models.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        first = self.blocks[0](self.embedding(input_ids))
        second = self.blocks[1](first * 0.5)
        hidden = self.blocks[2](second + first) + second
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())
        return type("Output", (), {"loss": loss})()


def test_a_model_that_reads_what_blocks_returned_gets_their_values_and_gradients(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return Skipping()

    batch = models.build("llama", seed=0)[1]
    plain, ordinary = Reference(make(), DTYPES["fp32"], FREE), make()
    plain.model = LayerSchedule(plain.model, 2)
    with layered(tmp_path, "gpt", 2, OFFLOAD, factory=make, dtype="fp32") as (scheduled, optimizer, _):
        for step in range(3):
            given = whole(batch, step, 2)
            loss = scheduled(**given).loss
            loss.backward()
            optimizer.step()
            assert loss.item() == plain.step([given]).losses[0].item()
            if step == 0:
                assert loss.item() == pytest.approx(ordinary(**given).loss.item(), rel=1e-6)


class Between(Skipping):
    """Blocks, after the first of which, or after the embedding, the model does ``write`` with what it got."""

    def __init__(self, write: Callable[[Any], Any], after: str = "block") -> None:
        torch.manual_seed(5)
        super().__init__()
        self.write, self.after = write, after

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embedding(input_ids)
        if self.after == "embedding":
            self.write(hidden)
        hidden = self.blocks[0](hidden)
        if self.after == "block":
            self.write(hidden)
        hidden = self.blocks[2](self.blocks[1](hidden))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())
        return type("Output", (), {"loss": loss})()


def _assign(hidden: Tensor) -> None:
    hidden.data = hidden * 2


WRITES = {
    "mul": lambda hidden: hidden.mul_(2),
    "rows": lambda hidden: hidden[:, 0].zero_(),
    "item": lambda hidden: hidden.__setitem__((slice(None), 0), 0.0),
    "view": lambda hidden: hidden.view(-1).add_(1),
    "add": lambda hidden: hidden.__iadd__(1.0),
    "relu": lambda hidden: nn.functional.relu(hidden, inplace=True),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_model_writes_in_place_between_blocks_counts(write: str, micro_batches: int) -> None:
    given = whole(models.build("llama", seed=0)[1], 0, micro_batches)
    plain, model = Between(WRITES[write]), Between(WRITES[write])
    losses = []
    for index in range(micro_batches):
        part = {key: value.chunk(micro_batches)[index] for key, value in given.items()}
        losses.append(plain(**part).loss)
        (losses[-1] / micro_batches).backward()
    scheduled = LayerSchedule(model, micro_batches)(**given)
    scheduled.loss.backward()
    torch.testing.assert_close(scheduled.losses, torch.stack(losses))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("write", "after", "error"),
    [
        (_assign, "block", "is assigned"),
        (WRITES["mul"], "embedding", "what Embedding returned is written in place"),
    ],
)
def test_writes_that_would_be_lost_are_errors(
    write: Callable[[Any], Any], after: str, error: str, micro_batches: int
) -> None:
    model = Between(write, after)
    model.embedding.requires_grad_(False)  # so that autograd does not see the write
    with pytest.raises(StateError, match=error):
        LayerSchedule(model, micro_batches)(**whole(models.build("llama", seed=0)[1], 0, micro_batches))


# --- memory and bytes --------------------------------------------------------------------------------


def peaks(folder: Path, layers: int, micro_batches: int, *more: str) -> tuple[int, int]:
    """The most bytes of a step's own tensors at one time, and of what waits between blocks."""

    def factory() -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig(vocab_size=97, seq_len=64, n_layers=layers, d_model=64, n_heads=2))

    with layered(folder, "gpt", micro_batches, *more, factory=factory) as (scheduled, optimizer, model):
        stats = optimizer.runtime.activations.cache.stats
        tokens = torch.arange(micro_batches * 64).view(micro_batches, 64) % 97
        with MemoryMeter() as meter:
            scheduled(tokens=tokens, targets=tokens).loss.backward()
        gradients = [param.grad for param in model.parameters() if type(param.grad) is Tensor]
        return meter.peak_nbytes(without=gradients), stats.peak_nbytes


@pytest.mark.slow
def test_memory_does_not_grow_with_blocks_and_hardly_with_micro_batches(tmp_path: Path) -> None:
    value = 2 * 64 * 64
    one, waiting = peaks(tmp_path, 2, 4, OFFLOAD)
    assert waiting <= 10 * value
    more_blocks, waiting = peaks(tmp_path, 5, 4, OFFLOAD)
    assert more_blocks <= one + 2 * value
    assert waiting <= 10 * value
    more_slices, waiting = peaks(tmp_path, 2, 16, OFFLOAD)
    assert waiting <= 10 * value + 12 * value  # the embedding's output, which is whole
    assert more_slices <= one + 2 * 12 * value
    kept, _ = peaks(tmp_path, 5, 4)
    assert kept > more_blocks + 3 * 4 * value


@pytest.mark.parametrize("staying", few([2], [0, 2, 6]))
def test_bytes_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staying: int) -> None:
    give(monkeypatch, staying)
    slices, batch = 4, models.build("llama", seed=0)[1]
    with layered(tmp_path, "llama", slices) as (scheduled, optimizer, _):
        stats = optimizer.runtime.activations.cache.stats
        for step in range(2):
            scheduled(**whole(batch, step, slices)).loss.backward()
            optimizer.step()
        values = len(scheduled.blocks.modules) * slices
        held, kept = min(staying, slices), max(0, staying - slices)
        away = values - kept
        gradients = len(scheduled.blocks.modules) * (slices - held)
        assert stats.nbytes_stored == 2 * NBYTES * (away + gradients)
        handed = away - away * held // slices if held < slices else 0
        assert stats.nbytes_loaded <= 2 * NBYTES * (away + handed + gradients)


def test_stored_values_give_their_room_back_when_backward_has_used_them(tmp_path: Path) -> None:
    batch = models.build("llama", seed=0)[1]
    with layered(tmp_path, "llama", 2, OFFLOAD) as (scheduled, optimizer, _):
        cache, used = optimizer.runtime.activations.cache, [optimizer.runtime.storage.volume.peak_nbytes]
        for step in range(4):
            losses = scheduled(**whole(batch, step, 2))  # which is held on to
            losses.loss.backward()
            cache.stats.free_dropped()
            assert cache.stats.resident_nbytes == 0
            optimizer.step()
            used.append(optimizer.runtime.storage.volume.peak_nbytes)
        assert used[-1] < 2 * used[2] - used[0]  # what stayed of a step would need as much again


class Pair(nn.Module):
    """A block that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + torch.tanh(self.linear(rest)), rest + hidden


class Pairs(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = rest = self.embedding(input_ids)
        for block in self.blocks:
            hidden, rest = block(hidden, rest)
        loss = nn.functional.cross_entropy(self.head(hidden + rest).flatten(0, 1).float(), labels.flatten())
        return type("Output", (), {"loss": loss})()


def test_all_values_that_a_block_returns_come_back_ahead_of_their_use(tmp_path: Path) -> None:
    slices, batch = 8, models.build("llama", seed=0)[1]
    with layered(tmp_path, "gpt", slices, OFFLOAD, factory=Pairs, dtype="fp32") as (scheduled, optimizer, _):
        stats = optimizer.runtime.activations.cache.stats
        scheduled(**whole(batch, 0, slices)).loss.backward()
        optimizer.step()
        assert 0 < stats.on_demand <= 2 * slices  # of 64 values and 64 gradients


# --- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["write", "read"])
def test_a_disk_that_fails_ends_the_step_with_its_error(tmp_path: Path, on: Any) -> None:
    batch = models.build("gpt", seed=0)[1]

    def steps(*numbers: int) -> None:
        for step in numbers:
            scheduled(**whole(batch, step, 2)).loss.backward()
            optimizer.step()
        optimizer.synchronize()

    with breakable() as engines, layered(tmp_path, "gpt", 2, OFFLOAD) as (scheduled, optimizer, _):
        steps(0)
        started = engines[0].writes if on == "write" else engines[0].reads
        engines[0].faults = (Fault(on=on, nth=started + 4, forever=True),)
        with pytest.raises(DiskError, match=r"faulty\.bin"):
            steps(1, 2)


class Twice(torch.autograd.Function):
    """An operator that torch does not announce to subclasses of tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Bypassing(Skipping):
    """Blocks with such an operator between them."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = Twice.apply(self.blocks[0](self.embedding(input_ids)))  # type: ignore[no-untyped-call]
        return type("Output", (), {"loss": self.blocks[2](self.blocks[1](hidden)).sum()})()


def test_a_function_that_would_lose_the_gradient_of_a_block_is_an_error() -> None:
    scheduled = LayerSchedule(Bypassing(), 2)
    given = whole(models.build("llama", seed=0)[1], 0, 2)
    with pytest.raises(StateError, match="does not announce to it"):
        scheduled(**given).loss.backward()


class Writing(nn.Module):
    """A block that writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) + 1
        hidden.mul_(2)
        return out


def test_a_block_that_writes_its_input_is_an_error_that_names_it(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model: Any = Skipping()
        model.blocks[1] = Writing()
        model.forward = lambda input_ids, labels: type("Output", (), {
            "loss": model.blocks[2](model.blocks[1](model.blocks[0](model.embedding(input_ids)))).sum()
        })()  # fmt: skip
        return model

    given = whole(models.build("llama", seed=0)[1], 0, 2)
    with (
        layered(tmp_path, "gpt", 2, OFFLOAD, factory=make) as (scheduled, _, _),
        pytest.raises(StateError, match="Writing takes or returns is written in place"),
    ):
        scheduled(**given)
