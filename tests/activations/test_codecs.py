"""Codecs of saved storages: every bit pattern comes back, or, with less precision, what they promise."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import infinity
from infinity.activations.codecs import CODECS, Code, Coding
from infinity.activations.tensor_cache import uniform
from infinity.core.config import LOSSY_CODECS, SettingError
from infinity.core.errors import DiskError, StateError
from infinity.core.lifecycle import SlotState
from infinity.core.plan import Hardware, Place, SlotKey
from tests.activations.stage import Stage, assert_same, gradients
from tests.helpers.faulty import Fault

FAST = Hardware(1e9, 1e9, 1e9, 0.0)
EXACT = sorted(CODECS.keys() - LOSSY_CODECS)
DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
KEY = SlotKey(1, 0)


def through(code: Code, piece: Tensor) -> tuple[int, Tensor]:
    """Bytes of the code of some bytes, and what comes back of them."""
    out, back = torch.full_like(piece, 0xA5), torch.full_like(piece, 0x5A)
    nbytes = code.put(piece, out)
    code.get(out[:nbytes].clone(), back)
    return nbytes, back


def patterns(seed: int, kind: str, nbytes: int) -> Tensor:
    """Bytes: any; of two words; mostly zeros; floats, also NaN, -0.0, subnormal and infinite ones."""
    random = np.random.default_rng(seed)
    words = random.integers(0, 2**32, nbytes // 4 + 1, dtype=np.uint32)
    if kind == "two":
        words = words[random.integers(0, min(2, len(words)), len(words))]
    elif kind == "zeros":
        words *= random.random(len(words)) < 0.2
    elif kind == "floats":
        words = random.standard_normal(len(words)).astype(np.float32).view(np.uint32)
        odd = np.array([0x7FC00001, 0xFF800123, 0x80000000, 1, 0x7F800000, 0x807FFFFF, 0], np.uint32)
        words[random.integers(0, len(words), 9)] = odd[random.integers(0, len(odd), 9)]
    return torch.from_numpy(words.view(np.uint8)[:nbytes].copy())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["any", "two", "zeros", "floats"]),
    st.integers(0, 3) | st.integers(250, 9000) | st.sampled_from([2048, 4096, 16384]),
    st.sampled_from(DTYPES),
    st.sampled_from(EXACT),
)
def test_every_bit_pattern_comes_back(
    seed: int, kind: str, nbytes: int, dtype: torch.dtype, name: str
) -> None:
    if CODECS[name](dtype):
        piece = patterns(seed, kind, nbytes)
        coded, back = through(Code(name, dtype), piece)
        assert coded <= nbytes
        assert torch.equal(back, piece)


@pytest.mark.parametrize(
    ("name", "values", "most"),
    [
        ("bits", lambda x: x > 0, 1 / 8 + 0.01),
        ("bits", lambda x: (x > -1) / 0.9, 1 / 32 + 0.01),
        ("zeros", torch.relu, 0.5 + 1 / 32 + 0.03),
    ],
)
def test_what_each_exact_codec_is_for_gets_as_small_as_it_promises(
    name: str, values: Any, most: float
) -> None:
    made = values(torch.randn(2**15, generator=torch.Generator().manual_seed(0)))
    piece = made.view(torch.uint8).flatten()
    assert through(Code(name, made.dtype), piece)[0] <= most * len(piece)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8.25), ("2bit", 2.5)])
def test_less_precision_takes_so_many_bits_and_is_off_by_no_more_than_a_step(
    name: str, bits: float, dtype: torch.dtype
) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = 0
    x[4] *= 1e-4
    coded, back = through(Code(name, dtype, 7), x.view(torch.uint8).flatten())
    assert coded <= x.numel() * bits / 8
    off, rows = (back.view(dtype).view_as(x).float() - x.float()).abs(), x.float()
    most = rows.abs().amax(1, keepdim=True)
    step = {
        "int8": most / 127 / 2,
        "2bit": (rows.amax(1) - rows.amin(1))[:, None] / 3,
    }[name]
    assert bool((off <= step * 1.001 + most * torch.finfo(dtype).eps + 1e-37).all())


def test_2_bits_are_right_on_average_the_same_for_a_seed_and_in_any_pieces() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    rounds = [through(Code("2bit", x.dtype, seed), x.view(torch.uint8))[1] for seed in range(2000)]
    values = torch.stack([each.view(torch.float32) for each in rounds])
    step = (x.view(4, 256).amax(1) - x.view(4, 256).amin(1)) / 3
    # The mean of n is within 5 of its standard deviations, each at most half a step.
    assert bool(((values.mean(0) - x).abs().view(4, 256) <= 5 * step[:, None] / 2 / 2000**0.5).all())
    assert torch.equal(through(Code("2bit", x.dtype, 9), x.view(torch.uint8))[1], rounds[9])
    assert not torch.equal(rounds[8], rounds[9])
    halves = [through(Code("2bit", x.dtype, 9), half)[1] for half in x.view(torch.uint8).split(2048)]
    assert torch.equal(torch.cat(halves), rounds[9])


@pytest.mark.parametrize("name", LOSSY_CODECS)
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_stay_as_they_are(name: str, odd: float) -> None:
    x = torch.randn(512)
    x[300] = odd
    _, back = through(Code(name, x.dtype), x.view(torch.uint8))
    assert torch.equal(back, x.view(torch.uint8))


# --- in a tensor cache ---------------------------------------------------------------------------


class Block(nn.Module):
    """ReLU, dropout, views of one storage, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 128), nn.Linear(128, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.dropout(torch.relu(self.up(x)), 0.1, self.training)
        left, right = wide.chunk(2, dim=-1)
        return self.norm(x + self.down(torch.cat([left * right.cos(), right], -1)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(32, 32), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def losses(
    folder: Path, steps: int, *, first: int = 0, model: nn.Module | None = None, **how: Any
) -> tuple[list[float], Any]:
    """Of a plain loop, and what served it; without ``how`` nothing does."""
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def step(number: int) -> None:
        torch.manual_seed(number)
        loss = model(torch.randn(64, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())

    if not how:
        for number in range(first, first + steps):
            step(number)
        return found, None
    with infinity.offload_activations(model, nvme=folder, first_step=first, **how) as activations:
        for number in range(first, first + steps):
            step(number)
    return found, activations


@pytest.mark.parametrize("place", [Place.CODED, Place.CODED_NVME])
@pytest.mark.parametrize("codec", EXACT)
def test_gradients_are_the_same_bits_through_each_exact_codec(stage: Stage, place: Place, codec: str) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(x @ w)
        wide = nn.functional.dropout(y, 0.5)
        return (wide.t() @ y + y[:, ::2].exp().sum()).cos().sum()

    stage.cache.coding = Coding("auto", lambda: 0, 0, print)
    codecs = dict.fromkeys((SlotKey(0, number) for number in range(20)), codec)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(1)
    plain = gradients(loss, [x, w])
    leaves = [each.detach().clone().requires_grad_() for each in (x, w)]
    torch.manual_seed(1)
    with stage.forward(policy=uniform(place.as_coded(False), codecs=codecs)):
        value = loss(*leaves)
    stage.all_stored()
    value.backward()
    assert_same([leaf.grad for leaf in leaves], plain)
    del value
    stage.assert_empty()


@pytest.mark.parametrize("codec", ["int8", "2bit"])
def test_where_a_storage_that_loses_precision_waits_changes_no_number(tmp_path: Path, codec: str) -> None:
    stored, activations = losses(tmp_path, 9, policy="offload", codec=codec)
    assert stored != losses(tmp_path, 9)[0]
    for budget in (None, "400KiB"):
        planned, planning = losses(tmp_path, 9, policy="plan", codec=codec, budget=budget)
        assert planned == stored
        assert {Place.CODED, Place.CODED_NVME} & {*planning.planning.plan.places.values()}
        assert not planning.planning.plan.recomputed
    assert not activations.cache.stats.resident_nbytes


def test_a_loop_that_resumes_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole, _ = losses(tmp_path, 4, policy="offload", codec="2bit")
    torch.manual_seed(0)
    model = Model()
    begun, _ = losses(tmp_path, 2, model=model, policy="offload", codec="2bit")
    resumed, _ = losses(tmp_path, 2, first=2, model=model, policy="offload", codec="2bit")
    assert begun + resumed == whole


def test_only_what_gradients_flow_through_loses_precision() -> None:
    packed: list[tuple[Tensor, bool]] = []
    coding = Coding("2bit", lambda: 0, 0, print)

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor, coding.code(KEY, tensor, None) is not None))
        return tensor

    linear, norm, table = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(4, 8)
    mask = torch.zeros(1, 1, 4, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        x = table(torch.arange(4))
        y = nn.functional.dropout(torch.relu(linear(norm(x))), 0.5)
        y = nn.functional.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None], mask)
        y.masked_fill(y > 0, 0.0)[..., torch.tensor([1, 2])].sum()
    for tensor, loses in packed:
        weight = tensor.is_leaf or tuple(tensor.shape) == (8, 8)
        wanted = tensor.is_floating_point() and tensor.requires_grad and not weight
        assert loses == wanted, (tensor.shape, tensor.dtype, tensor.grad_fn)
    assert {loses for _, loses in packed} == {False, True}


def test_a_part_of_a_weight_in_another_dtype_is_a_weight() -> None:
    experts = nn.Parameter(torch.randn(4, 8, 8))
    parts = [experts[1], experts[1:3], experts.unbind()[2], experts.chunk(2)[1], experts.split([1, 3])[1]]
    coding = Coding("int8", lambda: 0, 0, lambda line: None)
    for part in parts:
        for weight in (part.bfloat16(), part.bfloat16().transpose(-1, -2), part.contiguous().half()):
            assert coding.code(KEY, weight, None) is None, weight.grad_fn
        assert coding.code(KEY, part * 2, None) is not None


def test_only_masks_and_noise_get_the_one_codec_whose_length_a_plan_counts_on() -> None:
    x = torch.ones(256, 256)
    noise, mask, two = nn.functional.dropout(x), torch.zeros(2**18, dtype=torch.bool), torch.arange(2**16) % 2
    coding = Coding("auto", lambda: 0, 0, lambda line: None)
    coding.begin_pass(measures=True)
    forms = [coding.measure(KEY, tensor) for tensor in (noise, mask, x, x.clone().requires_grad_(), two)]
    assert [form is not None and form.codec == "bits" for form in forms] == [True, True, False, False, False]


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_the_largest_values_stay_finite(name: str) -> None:
    x = torch.tensor([1.0, -1.0]).repeat(256) * torch.finfo(torch.float32).max
    assert bool(through(Code(name, x.dtype), x.view(torch.uint8))[1].view(x.dtype).isfinite().all())


def test_the_error_of_each_block_is_said_in_one_line() -> None:
    lines: list[str] = []
    coding = Coding("int8", lambda: 0, 0, lines.append)
    coding.begin_pass(measures=True)
    for region in (1, 3, 2):
        tensor = torch.randn(64, 64, requires_grad=True).exp()
        form = coding.measure(SlotKey(region, 0), tensor)
        assert form is not None
        assert (form.codec, form.exact) == ("int8", False)
        assert abs(form.nbytes / tensor.nbytes - 8.125 / 32) < 0.01
    coding.end_pass(lambda: FAST)
    (line,) = lines
    assert line.startswith("memory.codec=int8: relative error of each block: 0.0")
    assert len(line.split(": ")[-1].split()) == 2


def test_a_view_in_another_dtype_of_what_loses_precision_is_exact(stage: Stage) -> None:
    stage.cache.coding = Coding("2bit", lambda: 0, 0, print)
    x, w = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    with stage.forward():
        values = (x * 1.0).exp()  # saves what it made, with less precision
        bits = values.detach().view(torch.int32)
        product = w * bits  # saves them as they are
    wanted = bits.float()
    stage.all_stored()
    product.sum().backward()
    assert torch.equal(w.grad, wanted)


@pytest.mark.parametrize("failed", [1, 2])
def test_what_loses_precision_is_not_read_as_it_was_though_a_store_failed(stage: Stage, failed: int) -> None:
    stage.cache.coding = Coding("2bit", lambda: 0, 0, print)
    stage.cache.queue.most_nbytes = 1  # one after the other
    stage.engine.faults = (Fault(on="write", nth=failed),)
    stage.engine.hold()
    x = torch.randn(256, 256, requires_grad=True)
    with stage.forward():
        loss = (x * 1.0).exp().exp().exp().sum()
    stage.engine.let_go()
    with pytest.raises(DiskError):
        loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="run the forward pass again"):
        loss.backward()
    assert x.grad is None
    del loss
    stage.engine.faults = ()
    with stage.forward():
        loss = (x * 1.0).exp().sum()
    loss.backward()
    assert x.grad is not None
    del loss
    stage.assert_empty()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"policy": "keep", "codec": "int8"}, SettingError),
        ({"policy": "recompute", "codec": "2bit"}, SettingError),
        ({"policy": "plan", "codec": "zstd"}, ValueError),
    ],
)
def test_a_codec_that_cannot_be_used_is_an_error_that_says_what_can(
    tmp_path: Path, how: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"codec: got '.*'; wanted (auto \| never|auto or never)"):
        losses(tmp_path, 1, **how)


def test_a_wait_for_stores_does_not_end_between_two_of_them(stage: Stage, monkeypatch: Any) -> None:
    queue = stage.cache.queue
    start: Callable[[], None] = queue._start
    queue.most_nbytes = 1

    def start_late() -> None:
        time.sleep(0.02)
        start()

    monkeypatch.setattr(queue, "_start", start_late)
    x = torch.randn(64, 64, requires_grad=True)
    with stage.forward() as record:
        y = x
        for _ in range(4):
            y = y.exp()
    slot = record.slots[record.packed[-1]]
    queue.wait_until(lambda: slot.state is SlotState.STORED)
    assert slot.state is SlotState.STORED
