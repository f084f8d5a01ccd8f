"""Promises of ``train.stages``: the documented order of sums, one rank's weights, and no hang."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.core.errors import StateError
from infinity.engine.schedule import LayerSchedule
from tests.api.test_layer_schedule import CLIPPED, FREE, train_by_layer, whole
from tests.helpers import models
from tests.helpers.launch import RanksError, mark, run_ranks, start_ranks
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, Trained, assert_bitwise, build, optimizer_for, streaming

STEPS = 3
LAYER, STAGED = "train.schedule=layer", "train.stages=true"
HOST = ["memory.host=1GiB", LAYER, STAGED]


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(
    name: str, micro_batches: int, dtype: str, rule: Rule, overrides: list[str], frozen: str = "",
    steps: int = STEPS,
) -> Trained:  # fmt: skip
    return train_by_layer(
        name, overrides, micro_batches=micro_batches, dtype=dtype, rule=rule, steps=steps, frozen=frozen
    )


class Summed:
    """A parameter whose gradient is in fp32, as sums over ranks are."""

    def __init__(self, param: Tensor) -> None:
        self.param, self.grad, self.ndim, self.device = param, None, param.ndim, param.device

    data = property(lambda self: self.param.data, lambda self, value: setattr(self.param, "data", value))


def in_memory(
    name: str, micro_batches: int, dtype: str, rule: Rule, world: int, frozen: str = ""
) -> list[Trained]:
    """One process: blocks see the micro-batches of all ranks, the last rank's first; all else each rank's."""
    factory, batch = models.build(name, seed=3)
    loop = Reference(factory(), DTYPES[dtype], rule)
    for each in loop.model.get_submodule(frozen).parameters() if frozen else ():
        each.requires_grad_(False)
    params, out = dict(loop.parameters), [Trained() for _ in range(world)]
    loop.parameters = {name: Summed(param) for name, param in params.items()}  # type: ignore[misc]
    blocks = LayerSchedule(loop.model, 1).blocks
    inside = {id(param) for block in blocks.modules for param in block.parameters()}

    def grads(batch: dict[str, Tensor], slices: int, parts: int) -> tuple[list[float], dict[str, Any]]:
        losses = LayerSchedule(loop.model, slices)(**batch).losses
        (losses.mean() / parts).backward()
        found = {name: param.grad for name, param in params.items()}
        for param in params.values():
            param.grad = None
        return losses.tolist(), found

    for step in range(STEPS):
        each = [whole(batch, step, micro_batches, rank, world) for rank in range(world)]
        joined = {key: torch.cat([each[rank][key] for rank in reversed(range(world))]) for key in each[0]}
        together = grads(joined, world * micro_batches, 1)[1]
        apart = [grads(given, micro_batches, 1) for given in each]
        for name, param in params.items():
            if together[name] is None:
                continue
            if id(param) in inside:
                loop.parameters[name].grad = together[name].float()
            else:
                parts = [found[name].float() for _, found in apart]
                loop.parameters[name].grad = sum(parts[1:], parts[0]) / world
        norm = loop.finish([]).grad_norm
        for trained, (losses, _) in zip(out, apart, strict=True):
            trained.losses += losses
            trained.norms.append(norm)
    for trained in out:
        trained.weights = {name: param.detach() for name, param in params.items()}
    return out


@pytest.mark.parametrize(
    ("name", "world", "micro_batches", "dtype", "rule", "frozen"),
    [
        ("llama", 2, 2, "bf16", CLIPPED, ""),
        pytest.param("gpt2", 4, 2, "bf16", FREE, "", marks=pytest.mark.slow),
        pytest.param("llama", 4, 4, "fp32", CLIPPED, "model.embed_tokens", marks=pytest.mark.slow),
        pytest.param("llama", 2, 2, "fp32", FREE, "model.layers.1", marks=pytest.mark.slow),
        pytest.param("gpt", 2, 2, "bf16", CLIPPED, "", marks=pytest.mark.slow),
        pytest.param("bert", 4, 2, "fp32", FREE, "", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_added_from_the_first_rank_to_the_last_and_each_ranks_last_micro_batch_first(
    name: str, world: int, micro_batches: int, dtype: str, rule: Rule, frozen: str
) -> None:
    found = run_ranks(train, world, name, micro_batches, dtype, rule, HOST, frozen)
    for one, plain in zip(found, in_memory(name, micro_batches, dtype, rule, world, frozen), strict=True):
        assert_bitwise(one, plain)


def two_ways(*arguments: Any) -> tuple[Trained, Trained]:
    return train(*arguments, [*HOST]), train(*arguments, HOST[:2])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_of_one_micro_batch_a_rank_give_the_bits_of_the_layer_schedule(world: int) -> None:
    for staged, plain in run_ranks(two_ways, world, "llama", 1, "fp32", CLIPPED):
        assert_bitwise(staged, plain)


# --- what goes from rank to rank ---------------------------------------------------------------------


def counted(name: str, micro_batches: int) -> tuple[list[int], int]:
    """Return the blocks that a rank ran in a step, how often, and the bytes that it sent."""
    factory, batch = models.build(name, seed=3)
    model = build(factory, "bf16", HOST)
    ran = list[int]()
    with contextlib.closing(optimizer_for(model, FREE)) as optimizer:
        scheduled: Any = infinity.layer_schedule(model, micro_batches)
        for number, block in enumerate(scheduled.blocks.modules):
            block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
        scheduled(**whole(batch, 0, micro_batches, *place())).loss.backward()
        optimizer.step()
        return ran, scheduled.stages.messages.nbytes_sent


def test_a_rank_runs_its_blocks_only_and_each_value_and_gradient_crosses_once() -> None:
    world, micro_batches = 2, 2
    found = run_ranks(counted, world, "llama", micro_batches)
    shape = models.build("llama", seed=3)[1](0, 0, world)["input_ids"].shape
    value = shape.numel() * models.HIDDEN * 2
    for rank, (ran, nbytes) in enumerate(found):
        blocks = range(rank, 3, world)
        assert ran == [*[b for b in blocks for _ in range(world * micro_batches)]] + [
            b for b in reversed(blocks) for _ in range(world * micro_batches)
        ]
        # Of 3 blocks rank 0 has the first and the last. A value goes on, and its gradient comes back:
        # between blocks 0, 1 and 2 all of them; to and from rank 0 those of rank 1's embedding and head.
        ways = (2 * world * micro_batches) + 2 * micro_batches
        assert nbytes == ways * value, rank


# --- what differs between ranks ----------------------------------------------------------------------


def uneven(lengths: list[int], rows: list[int], micro: list[int]) -> list[float]:
    rank, _ = place()
    factory, _ = models.build("llama", seed=3)
    model = build(factory, "fp32", HOST)
    torch.manual_seed(rank)
    ids = torch.randint(0, models.VOCABULARY, (rows[rank] * micro[rank], lengths[rank]))
    with contextlib.closing(optimizer_for(model, FREE)) as optimizer:
        scheduled = infinity.layer_schedule(model, micro[rank])
        found = scheduled(input_ids=ids, labels=ids)
        found.loss.backward()
        optimizer.step()
        plain = [float(model(input_ids=part, labels=part).loss) for part in ids.chunk(micro[rank])]
        return [float(found.losses.sum()), *plain, *scheduled(input_ids=ids, labels=ids).losses.tolist()]


def test_ranks_may_have_other_lengths_and_rows() -> None:
    for _, *losses in run_ranks(uneven, 2, [8, 12], [1, 3], [2, 2]):
        assert losses[:2] == losses[2:]


def test_other_numbers_of_micro_batches_are_an_error_on_every_rank() -> None:
    with pytest.raises(RanksError, match=r"ranks have different micro_batches: .*1.*2"):
        run_ranks(uneven, 2, [8, 8], [1, 1], [1, 2])


# --- refused -----------------------------------------------------------------------------------------


def refused(folder: str) -> list[str]:
    rank, _ = place()

    def of(name: str, overrides: list[str]) -> str:
        model = build(models.build(name, seed=3)[0], "bf16", overrides)
        with contextlib.closing(optimizer_for(model, FREE)):
            try:
                infinity.layer_schedule(model, 2)
            except StateError as error:
                return str(error)
        return ""

    factory, batch = models.build("llama", seed=3)
    model = build(factory, "bf16", HOST)
    said = [
        of("t5", HOST),
        of("llama", streaming(folder, LAYER, STAGED)),
        of("llama", [*HOST, "memory.shared=never"]),
    ]
    with contextlib.closing(optimizer_for(model, FREE)):
        infinity.layer_schedule(model, 2)
        try:
            model(**batch(0, rank, 2)).loss.backward()
        except StateError as error:
            said.append(str(error))
    return said


def test_what_stages_do_not_support_is_an_error_that_says_so(tmp_path: Path) -> None:
    for encoder, nvme, apart, called in run_ranks(refused, 2, str(tmp_path)):
        assert "an encoder beside the decoder" in encoder
        assert "outside of host memory that all ranks share" in nvme
        assert "outside of host memory that all ranks share" in apart
        assert "call what infinity.layer_schedule returned" in called


# --- interruptions -----------------------------------------------------------------------------------


def in_two_parts(folder: str, first: int, last: int) -> Trained:
    factory, batch = models.build("llama", seed=3)
    where = [f"memory.nvme=[{folder}]", "run.name=staged", "memory.host=1GiB", LAYER, STAGED]
    model, out = build(factory, "bf16", where), Trained()
    optimizer = optimizer_for(model, CLIPPED)
    assert infinity.resume(model, optimizer) == first
    scheduled = infinity.layer_schedule(model, 2)
    for step in range(first, last):
        losses = scheduled(**whole(batch, step, 2, *place()))
        losses.loss.backward()
        optimizer.step()
        out.losses += losses.losses.tolist()
        out.norms.append(optimizer.grad_norm)
    out.weights = infinity.state_dict(model, every_rank=True)
    infinity.close(model, keep=True)
    return out


def test_a_run_in_stages_goes_on_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole_run = run_ranks(in_two_parts, 2, str(tmp_path / "a"), 0, 4)
    run_ranks(in_two_parts, 2, str(tmp_path / "b"), 0, 2)
    for one, other in zip(run_ranks(in_two_parts, 2, str(tmp_path / "b"), 2, 4), whole_run, strict=True):
        assert one.losses == other.losses[4:]
        assert_bitwise(Trained(other.losses, other.norms, one.weights), other)


def endless() -> None:
    factory, batch = models.build("llama", seed=3)
    model = build(factory, "bf16", HOST)
    optimizer = optimizer_for(model, CLIPPED)
    scheduled = infinity.layer_schedule(model, 2)
    for step in range(10**6):
        scheduled(**whole(batch, step % 4, 2, *place())).loss.backward()
        optimizer.step()
        if step == 2:
            mark("there")


def test_a_rank_that_dies_in_a_stage_ends_the_others() -> None:
    with start_ranks(endless, 2) as ranks:
        for rank in range(2):
            ranks.reached("there", rank)
        ranks.kill(0, signal.SIGKILL)
        _, other = ranks.wait()
    assert not other.hung, other
    assert other.error_type == "PeerError", other
