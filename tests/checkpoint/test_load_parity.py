"""A model streamed from a directory trains as after plain ``from_pretrained``, to the bit."""

import itertools

import pytest
import torch

import infinity
from infinity.checkpoint.directory import Checkpoint
from tests.helpers import zoo
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks, several, start_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import (
    Trained,
    assert_bitwise,
    optimizer_for,
    recipe,
    reference,
    small_units,
    streaming,
)

STEPS = 3
#: Files in bf16, in several shards, or both.
KINDS = {
    "t5": {"max_shard_size": "40KB"},
    "qwen2": {"dtype": torch.bfloat16},
    "phi": {"max_shard_size": "30KB", "dtype": torch.bfloat16},
    "mixtral": {"max_shard_size": "60KB"},
    "deepseek_v3": {"max_shard_size": "40KB", "dtype": torch.bfloat16},
    "whisper": {"dtype": torch.float16},
}


def train(model, batch, *, steps=STEPS, rank=0, world=1):
    """The plain loop over a model that is already there."""
    optimizer = optimizer_for(model.train(), Rule())
    out = Trained()
    try:
        for step in range(steps):
            loss = model(**batch(step, rank, world)).loss
            loss.backward()
            optimizer.step()
            out.losses.append(loss.item())
            out.norms.append(optimizer.grad_norm)
        out.weights = infinity.state_dict(model, every_rank=True)
    finally:
        optimizer.close()
    return out


def load(directory, overrides, dtype="bf16", **options):
    with small_units():
        return infinity.from_pretrained(directory, recipe(dtype, overrides), **options)


#: Each kind of model and of files; those that the others resemble are long tests.
FEW = ("phi", "mixtral", "whisper")


@pytest.mark.parametrize("name", few(FEW, zoo.NAMES))
def test_a_loaded_model_trains_as_plain_from_pretrained_to_the_bit(saved, tmp_path, name):
    directory, plain, batch = saved(name, **KINDS.get(name, {}))
    dtype = "fp32" if name == "whisper" else "bf16"  # its batches are fp32, and it does not cast them
    expected = reference(plain, batch, dtype=dtype, steps=STEPS)
    ours = train(load(directory, streaming(tmp_path / "nvme"), dtype), batch)
    assert_bitwise(ours, expected)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    few(
        (("fp16", torch.float32), ("fp32", torch.bfloat16)),
        itertools.product(("fp32", "fp16"), (torch.float32, torch.bfloat16)),
    ),
)
def test_any_stored_dtype_becomes_exact_masters_of_any_compute_dtype(saved, dtype, stored):
    directory, plain, _ = saved("llama", dtype=stored)
    model = load(directory, ["memory.host=64MiB"], dtype)
    optimizer = optimizer_for(model, Rule())
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    optimizer.close()
    exact = {name: state[i]["master"] for i, name in enumerate(order)}
    expected = dict(plain().named_parameters())
    assert exact.keys() == expected.keys()
    assert all(torch.equal(exact[name], p.detach()) for name, p in expected.items())


def load_and_train(directory, nvme, name):
    """On each rank: losses, the weights at first, and the bytes that it read."""
    read = []
    before = Checkpoint.close

    def close(self):
        read.append(sum(file.nbytes_read for file in self.files))
        before(self)

    Checkpoint.close = close
    try:
        _, batch = zoo.build(name, 3)
        rank = torch.distributed.get_rank()
        model = load(directory, streaming(nvme), "fp32")
    finally:
        Checkpoint.close = before
    start = {key: value.clone() for key, value in infinity.state_dict(model, every_rank=True).items()}
    trained = train(model, batch, rank=rank, world=2)
    return trained.losses, start, read[0]


@pytest.mark.parametrize("names", [["mixtral"], pytest.param(["llama"], marks=pytest.mark.slow)], ids=str)
def test_two_ranks_load_the_plain_weights_and_read_each_byte_once(saved, tmp_path, names):
    checkpoints = {name: saved(name, max_shard_size="60KB") for name in names}
    calls = [(load_and_train, checkpoints[name][0], tmp_path / "nvme", name) for name in names]
    results = run_ranks(several, 2, *calls)
    for i, name in enumerate(names):
        _, plain, batch = checkpoints[name]
        expected = reference(plain, batch, dtype="fp32", steps=STEPS)
        losses, weights, nbytes = zip(*(result[i] for result in results), strict=True)
        for key, value in plain().state_dict().items():
            assert all(torch.equal(start[key], value) for start in weights), key
        mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
        assert mean == pytest.approx(expected.losses, rel=1e-4)
        assert sum(nbytes) == sum(p.numel() * 4 for p in plain().parameters())


def load_elsewhere(directory, nvme):
    """Rank 1 has no such directory."""
    rank = torch.distributed.get_rank()
    load(directory / "gone" if rank else directory, streaming(nvme))


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_cannot_read_ends_all_ranks_and_says_why(saved, tmp_path):
    directory, _, _ = saved("llama")
    with start_ranks(load_elsewhere, 2, directory, tmp_path / "nvme") as ranks:
        ends = ranks.wait()
    assert [end.error_type for end in ends] == ["PeerError", "CheckpointError"]
    assert not any(end.hung for end in ends)
    assert "gone" in ends[0].message
