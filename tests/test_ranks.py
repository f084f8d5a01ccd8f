"""Promise 1 on several ranks: placement never changes numbers, and sharding only rounds them.

One start of the ranks plays every case of a model; a case is compared by a digest of its bits.
"""

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.activations import tensor_cache as cache
from infinity.activations.controller import METERED
from tests.helpers import models
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import Trained, reference, streaming, train

STEPS = 3
CLIPPED, FREE = Rule(), Rule(max_grad_norm=None)
ACTIVATIONS = ("offload", "recompute", "plan")


def placements(folder: str) -> dict[str, list[str]]:
    return {
        "host": ["memory.host=1GiB"],
        "nvme": streaming(folder),
        "part": [f"memory.nvme=[{folder}]", "memory.host=600KiB"],
        "tight": streaming(folder, "memory.device=600KiB"),
        "striped": [f"memory.nvme=[{folder}/a,{folder}/b]", "memory.host=200KiB", "memory.engine=threads"],
        "one-version": streaming(folder, "memory.versions=1"),
        **{policy: streaming(folder, f"memory.activations={policy}") for policy in ACTIVATIONS},
    }


def recompute(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


#: What is trained: name, and the arguments of ``train``. Within a case every placement gives the same bits.
CASES: dict[str, dict[str, Any]] = {
    "clip": {"rule": CLIPPED},
    "free": {"rule": FREE},
    "accumulate": {"rule": CLIPPED, "accumulate": 2},
    "accumulate free": {"rule": FREE, "accumulate": 2},
    "recompute": {"rule": FREE, "change": recompute},
    "fp32": {"rule": CLIPPED, "dtype": "fp32"},
    "activations": {"rule": CLIPPED, "steps": METERED + 2},
}
ALL = ("host", "nvme", "part", "tight", "striped", "one-version")
FEW = ("host", "nvme", "tight")
#: Which placements each case is played in.
PLAYED = {
    "two": {"free": ("host", "tight")},
    "few": {  # of llama: most cases in two placements, every placement but plans in one case
        "clip": ("host", "striped", "offload"), "free": ("part", "one-version"),
        "accumulate": ("nvme", "tight"), "recompute": ("nvme", "tight"), "fp32": ("host", "recompute"),
    },
    "llama": {
        "clip": ALL, "free": (*ALL, "offload"), "activations": ("nvme", *ACTIVATIONS),
        "accumulate": FEW, "accumulate free": FEW, "recompute": FEW, "fp32": FEW,
    },
    "gpt2": {
        "clip": (*FEW, "offload"), "free": ("host", "nvme"), "accumulate": ("host", "nvme"),
        "fp32": ("nvme",),
    },
    "t5": {"clip": FEW, "free": ("host", "nvme"), "fp32": ("nvme",), "activations": ("nvme", *ACTIVATIONS)},
}  # fmt: skip


def digest(trained: Trained) -> str:
    """Of every bit of the losses, the norms and the final weights."""
    sha = hashlib.sha256(repr((trained.losses, trained.norms)).encode())
    for name in sorted(trained.weights):
        sha.update(name.encode() + trained.weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def play(name: str, folder: str, played: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Every case in each of its placements: digests, and figures of the last placement."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    factory, batch = models.build(name, seed=1)
    cache.LEAST_NBYTES = 512  # tiny models have tiny activations
    out: dict[str, Any] = {}
    for case, places in played.items():
        digests = {}
        for place in places:
            options = {"steps": STEPS, **CASES[case], "rank": rank, "world": world}
            trained = train(factory, batch, placements(folder)[place], **options)
            digests[place] = digest(trained)
        weights = {key: w.float() for key, w in trained.weights.items()} if rank == 0 else {}
        out[case] = digests, trained.losses, trained.norms, weights
    return out


def check(name: str, folder: Path, world: int, played: dict[str, tuple[str, ...]]) -> None:
    ranks = run_ranks(play, world, name, str(folder), played)
    for case, places in played.items():
        for rank in ranks:
            digests = rank[case][0]
            assert dict.fromkeys(places, digests[places[0]]) == digests, case
        assert all(rank[case][2] == ranks[0][case][2] for rank in ranks), case  # one global norm
        assert not list(folder.rglob("*.bin"))
        check_rounding(name, case, ranks)


def check_rounding(name: str, case: str, ranks: list[dict[str, Any]]) -> None:
    """The ranks' mean is the plain loop's on the whole batch, but for rounding."""
    options = {"steps": STEPS, **CASES[case]}
    plain = reference(*models.build(name, seed=1), **options)
    exact = options.get("dtype") == "fp32"
    losses = [sum(each) / len(ranks) for each in zip(*(rank[case][1] for rank in ranks), strict=True)]
    assert losses == pytest.approx(plain.losses, rel=1e-4 if exact else 0.03), case
    compared = len(plain.norms) if exact else 1  # in bf16 one rounding of a gradient changes all that follow
    assert ranks[0][case][2][:compared] == pytest.approx(
        plain.norms[:compared], rel=1e-3 if exact else 0.02
    ), case
    weights = ranks[0][case][3]
    difference = sum(float((weights[key] - w.float()).square().sum()) for key, w in plain.weights.items())
    norm = sum(float(w.float().square().sum()) for w in plain.weights.values())
    assert math.sqrt(difference / norm) < (1e-3 if exact else 0.05), case


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two", marks=pytest.mark.always),
        "few",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt2", "t5")),
    ],
)
def test_two_ranks_give_the_same_bits_in_every_placement(tmp_path, name):
    check("llama" if name in ("two", "few") else name, tmp_path, 2, PLAYED[name])


@pytest.mark.slow
def test_four_ranks_give_the_same_bits_in_every_placement(tmp_path):
    check(
        "gpt2",
        tmp_path,
        4,
        {"clip": ("host", "nvme", "striped"), "free": ("host", "nvme"), "fp32": ("nvme",)},
    )
