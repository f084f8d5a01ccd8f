"""The same bytes are one slot; what autograd saves comes back to the bit, or fails as in plain PyTorch."""

import weakref

import numpy
import pytest
import torch
from torch import Tensor, nn

from infinity.activations.profiler import is_plain, storages_of
from infinity.activations.tensor_cache import KeptTensor, planned, uniform
from infinity.core.plan import ActivationPlan, Load, Place, SlotKey
from tests.activations.stage import STORE, assert_parity, cached_gradients, gradients
from tests.helpers.limits import comes_true

N = 64


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (N, N)), dtype=dtype).requires_grad_()


# --- one storage, one slot -----------------------------------------------------------------------


def test_views_transposes_and_dtype_views_share_one_slot(stage):
    x = torch.randn(N, N)
    with stage.forward():
        views = [x, x.t(), x[3:], x.view(torch.int32), x.view(-1)[1::2], x.detach(), x.expand(2, N, N)]
        packed = [stage.cache.pack(view) for view in views]
    assert len({id(p.slot) for p in packed}) == 1
    stage.all_stored()
    assert stage.cache.stats.nbytes_stored == x.nbytes
    wanted = [view.clone() for view in views]
    strides = [(view.stride(), view.dtype, view.storage_offset()) for view in views]
    del x, views
    back = [stage.cache.unpack(p) for p in packed]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back, wanted, strict=True))
    assert [(b.stride(), b.dtype) for b in back] == [(s, d) for s, d, _ in strides]


def test_the_address_of_a_freed_storage_is_another_slot_when_it_is_used_again(stage):
    addresses, packed = set(), []
    with stage.forward():
        for value in range(20):
            x = torch.full((N, N), float(value))
            addresses.add(x.untyped_storage()._cdata)
            packed.append(stage.cache.pack(x))
            stage.all_stored()
            del x
    assert len(addresses) < 20, "no address was used again: this test shows nothing"
    assert len({id(p.slot) for p in packed}) == 20
    for value, p in enumerate(packed):
        assert stage.cache.unpack(p).eq(value).all()


def test_a_write_makes_another_slot_and_the_older_one_cannot_be_read(stage):
    x = torch.zeros(N, N)
    with stage.forward():
        before = stage.cache.pack(x)
        x.add_(1)
        after = stage.cache.pack(x)
    stage.all_stored()
    assert before.slot is not after.slot
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*float32 \[64, 64\]"):
        stage.cache.unpack(before)
    assert stage.cache.unpack(after).eq(1).all()


def test_a_stored_storage_is_freed_and_its_handle_holds_nothing(any_stage):
    x = torch.randn(N, N) @ torch.randn(N, N)
    alive = weakref.ref(x.untyped_storage())
    with any_stage.forward():
        packed = any_stage.cache.pack(x)
    any_stage.all_stored()
    del x
    assert comes_true(lambda: alive() is None)  # a thread may hold it for the end of a call
    del packed
    any_stage.assert_empty()


def test_a_store_that_is_cancelled_holds_nothing(stage):
    stage.engine.hold()
    stage.cache.queue.most_nbytes = 1
    x, y = torch.randn(N, N), torch.randn(N, N)
    with stage.forward():
        first, second = stage.cache.pack(x), stage.cache.pack(y)
    stage.cache.queue.cancel(second.slot)
    alive = weakref.ref(y.untyped_storage())
    del y, second
    assert comes_true(lambda: alive() is None)
    assert torch.equal(stage.cache.unpack(first), x)
    stage.engine.let_go()
    del first
    stage.assert_empty()


# --- what passes through -------------------------------------------------------------------------


def test_parameters_buffers_their_views_and_transposes_pass_through(stage):
    model = nn.BatchNorm1d(N * N)
    model.matrix = nn.Parameter(torch.randn(N, N))
    with stage.forward(model):
        for tensor in (model.matrix, model.matrix.t(), model.matrix[1:], model.weight, model.running_mean):
            assert type(stage.cache.pack(tensor)) is KeptTensor
    assert set(storages_of(model.parameters())) <= set(stage.cache.exempt)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.from_numpy(numpy.ones((N, N), dtype=numpy.float32)),
        torch.frombuffer(bytearray(N * N * 4), dtype=torch.float32),
        torch.zeros(()),
        torch.zeros(0, N),
        torch.zeros(5, dtype=torch.bool),
        torch.ones(N, N).to_sparse(),
        torch.randn(N, N, dtype=torch.complex64).conj(),
        torch.randn(N, N, dtype=torch.complex64).conj().imag,
        torch.randn(1000, N, N)[3],
        torch.empty(N, N, device="meta"),
    ],
    ids=["numpy", "buffer", "scalar", "empty", "small", "sparse", "conj", "neg", "a row of much", "meta"],
)
def test_what_is_not_worth_it_or_not_plain_memory_stays_where_it_is(stage, tensor):
    with stage.forward():
        packed = stage.cache.pack(tensor)
    assert type(packed) is KeptTensor
    back = stage.cache.unpack(packed)
    assert back.shape == tensor.shape
    assert back.is_meta or torch.equal(
        back.to_dense() if back.is_sparse else back, tensor.to_dense() if tensor.is_sparse else tensor
    )
    stage.assert_empty()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_where_they_are(stage):
    tensor = torch.nested.nested_tensor([torch.ones(N, N), torch.ones(N, 1)])
    assert not is_plain(tensor)
    with stage.forward():
        packed = stage.cache.pack(tensor)
    assert stage.cache.unpack(packed).is_nested
    tensor.add_(tensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.cache.unpack(packed)


def test_subclasses_stay_where_they_are(stage):
    class Mine(Tensor):
        pass

    with stage.forward():
        packed = stage.cache.pack(torch.ones(N, N).as_subclass(Mine))
    assert type(packed) is KeptTensor
    assert type(stage.cache.unpack(packed)) is Mine


def test_outside_a_pass_everything_is_kept(stage):
    assert type(stage.cache.pack(torch.ones(N, N))) is KeptTensor


def test_inference_tensors_are_refused_as_in_plain_pytorch(stage):
    with torch.inference_mode():
        x = torch.ones(N, N)
    with stage.forward(), pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        leaf() * x
    stage.assert_empty()


# --- every kind of tensor, against plain PyTorch -------------------------------------------------


def _expanded(x: Tensor) -> Tensor:
    return (x[:, :1].exp().expand(N, N) * x).sum()


def _transposed(x: Tensor) -> Tensor:
    y = x.exp()
    return (y @ y.t() @ y[:, ::2] @ y[1::2].t()[:32]).sum()


def _aliased(x: Tensor) -> Tensor:
    y = x.sin()
    return (y * y.detach() * y.data.cos()).sum()


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    z = y.view(-1)
    z[::2].mul_(3)
    y.t().relu_()
    return (y * z.view(N, N).sigmoid()).sum()


def _slices(x: Tensor) -> Tensor:
    a, b = (x * 3).chunk(2)
    q, k, v = x.sin().split([10, 20, 34], dim=1)
    return (a * b).sum() + (q.sum() * k.exp() @ v[:20]).sum()


def _indexed(x: Tensor) -> Tensor:
    where = torch.arange(N).flip(0)
    return (x[where] * x.gather(0, where.expand(N, N).contiguous())).masked_fill(x > 0, 2).prod(0).sum()


def _complex(x: Tensor) -> Tensor:
    z = torch.complex(x, x.sin())
    return (z * z.conj() * (z.conj().imag + 1)).abs().sum()


def _halves(x: Tensor) -> Tensor:
    return (x.bfloat16() @ x.bfloat16().t()).float().logsumexp(0).sum()


def _odd(x: Tensor) -> Tensor:
    y = torch.cat([x.flatten(), x.flatten()[:7]])
    return (y.exp() * y[5:].exp().sum()).sum()


OPERATIONS = [_expanded, _transposed, _aliased, _in_place, _slices, _indexed, _complex, _halves, _odd]


@pytest.mark.parametrize("loss", OPERATIONS, ids=lambda f: f.__name__.strip("_"))
def test_gradients_are_those_of_plain_pytorch_to_the_bit(any_stage, loss):
    assert_parity(any_stage, loss, leaf())


def _after_saving(x: Tensor) -> Tensor:
    y = x.exp()
    out = y.sum()
    y.add_(1)
    return out


def _view_after_saving(x: Tensor) -> Tensor:
    y = x.sin() * 2
    out = (y * y).sum()
    y[0].zero_()
    return out


def _detached_after_saving(x: Tensor) -> Tensor:
    y = x.exp()
    y.detach().zero_()
    return y.sum()


def _leaf_after_saving(x: Tensor) -> Tensor:
    out = (x * x).sum()
    with torch.no_grad():
        x.mul_(2)
    return out


@pytest.mark.parametrize(
    "loss",
    [_after_saving, _view_after_saving, _detached_after_saving, _leaf_after_saving],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_was_written_in_place_fails_as_in_plain_pytorch(stage, loss):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(loss, [leaf()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cached_gradients(stage, loss, [leaf()])


def test_a_write_that_torch_does_not_count_is_seen_as_in_plain_pytorch_while_the_tensor_lives(stage):
    def loss(x: Tensor) -> Tensor:
        y = x.exp()
        stage.all_stored()
        y.data.mul_(2)
        held.append(y)
        return (y * 1).sum()

    held: list[Tensor] = []
    assert_parity(stage, loss, leaf())


def test_writes_of_every_alias_are_counted(stage):
    x = torch.zeros(N, N)
    with stage.forward():
        packed, view = stage.cache.pack(x), x[3:].detach()
    packed.check()
    x.data.add_(1)  # has a count of its own, as in plain PyTorch
    packed.check()
    view.add_(1)
    with pytest.raises(RuntimeError, match=r"at version 1; wanted version 0"):
        packed.check()


# --- policies ------------------------------------------------------------------------------------


def test_a_plan_is_played_as_it_says():
    first, second, third = SlotKey(0, 0), SlotKey(1, 0), SlotKey(2, 0)
    plan = ActivationPlan(
        "plan",
        {second: Place.NVME, third: Place.HOST},
        (Load(None, third), Load(third, second)),
        frozenset({1}),
    )
    policy = planned(plan)
    assert [policy.place(key) for key in (first, second, third)] == [Place.KEEP, Place.NVME, Place.HOST]
    assert [policy.recomputes(region) for region in range(3)] == [False, True, False]
    assert policy.loads == {None: [third], third: [second]}


def test_one_rule_for_all_spares_what_backward_begins_with():
    policy = uniform(Place.NVME, recompute=True, last=3)
    assert policy.place(SlotKey(2, 9)) is Place.NVME
    assert policy.place(SlotKey(3, 0)) is Place.KEEP
    assert policy.loads is None
    assert uniform(Place.NVME, last=-1).place(SlotKey(0, 0)) is Place.NVME


def test_the_last_block_is_not_recomputed_for_nothing():
    policy = uniform(Place.KEEP, recompute=True, last=3)
    assert [policy.recomputes(region) for region in (1, 3, 5)] == [True, False, False]


@pytest.mark.parametrize(
    "policy",
    [STORE, planned(ActivationPlan("plan", {SlotKey(0, 0): Place.NVME}, capacity_nbytes=1))],
    ids=["uniform", "planned"],
)
def test_a_pass_reads_a_slot_that_only_an_earlier_pass_packed(stage, policy):
    stage.engine.delay_s = 0.02  # it is still being stored
    x = torch.randn(4096, requires_grad=True)
    with stage.forward(policy=policy):
        first = x.sin().sum()
    with stage.forward(policy=policy):
        second = x.cos().sum()
    (second + first).backward()
    assert torch.equal(x.grad, x.detach().cos() - x.detach().sin())
    del first, second
    stage.assert_empty()
