"""Rules of low rank and SOAP are their papers' own, written plainly, to rounding; what cannot be is said."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.core.config import SettingError
from infinity.optim.matrix import _random
from infinity.optim.rules import OptimConfig, find_rule


class Adam:
    """Adam's direction, of moments in double precision."""

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas, self.m, self.v, self.t = betas, 0.0, 0.0, 0

    def __call__(self, grad: Tensor) -> Tensor:
        (b1, b2), self.t = self.betas, self.t + 1
        self.m = b1 * self.m + (1 - b1) * grad
        self.v = b2 * self.v + (1 - b2) * grad**2
        return self.m / (1 - b1**self.t) / ((self.v / (1 - b2**self.t)).sqrt() + 1e-8)


def apollo(group: dict[str, Any]) -> Callable[[Tensor, int], Tensor]:
    """Algorithm 1 of arXiv:2412.05270, with the norm-growth limiter, for rows <= columns."""
    adam, norms = Adam(group["betas"]), [0.0]

    def step(grad: Tensor, t: int) -> Tensor:
        seed = group["seed"] + (t - 1) // group["update_proj_gap"]
        low = _random(group["rank"], len(grad), seed).double() @ grad
        moved = adam(low)
        if group["per_tensor"]:
            made = grad * (moved.norm() / low.norm()) * group["scale"]
        else:
            made = grad @ torch.diag(moved.norm(dim=0) / low.norm(dim=0)) * group["scale"]
        if norms[-1] and made.norm() > group["growth"] * norms[-1]:
            made = made / made.norm() * group["growth"] * norms[-1]
        norms.append(float(made.norm()))
        return made

    return step


def galore(group: dict[str, Any]) -> Callable[[Tensor, int], Tensor]:
    """Algorithm 2 of arXiv:2403.03507, for rows <= columns; a new vector has the old one's sign."""
    adam, projector = Adam(group["betas"]), [torch.zeros(())]

    def step(grad: Tensor, t: int) -> Tensor:
        if (t - 1) % group["update_proj_gap"] == 0:
            new = torch.linalg.svd(grad, full_matrices=False)[0][:, : group["rank"]]
            signs = torch.where((new * projector[0]).sum(0) < 0, -1.0, 1.0)
            projector[0] = new * signs
        return group["scale"] * projector[0] @ adam(projector[0].T @ grad)

    return step


def soap(group: dict[str, Any]) -> Callable[[Tensor, int], Tensor]:
    """Algorithm 3 of arXiv:2409.11321; the first gradient only begins L and R, as in its authors' code."""
    (b1, b2), most, kept = group["betas"], group["max_precond_dim"], dict[str, Any]()

    def step(grad: Tensor, t: int) -> Tensor:
        made = torch.zeros_like(grad)
        if t == 1:
            kept.update(l=(1 - b2) * grad @ grad.T, r=(1 - b2) * grad.T @ grad, m=0.0, v=0.0)
            kept.update({q: torch.linalg.eigh(kept[q[1]])[1].flip(1) for q in ("ql", "qr")})
            for q, numel in zip(("ql", "qr"), grad.shape, strict=True):
                kept[q] = kept[q] if numel <= most else torch.eye(numel).double()
            return made
        ql, qr = kept["ql"], kept["qr"]
        kept["m"] = b1 * kept["m"] + (1 - b1) * grad
        kept["v"] = b2 * kept["v"] + (1 - b2) * (ql.T @ grad @ qr) ** 2
        mean, square = kept["m"] / (1 - b1 ** (t - 1)), kept["v"] / (1 - b2 ** (t - 1))
        made = ql @ (ql.T @ mean @ qr / (square.sqrt() + 1e-8)) @ qr.T
        for side, q, each in (("l", "ql", grad @ grad.T), ("r", "qr", grad.T @ grad)):
            kept[side] = b2 * kept[side] + (1 - b2) * each
            if (t - 1) % group["precondition_frequency"] == 0 and len(each) <= most:
                kept[q] = torch.linalg.qr(kept[side] @ kept[q])[0]
        return made

    return step


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "apollo": (apollo, {"rank": 5, "update_proj_gap": 7}),
    "apollo-mini": (apollo, {"update_proj_gap": 7, "seed": 3}),
    "galore": (galore, {"rank": 4, "update_proj_gap": 7}),
    # A side that is longer than the other has eigenvalues of 0, whose vectors are any.
    "soap": (soap, {"precondition_frequency": 4, "max_precond_dim": 8}),
}


def gradients(shape: tuple[int, ...], count: int) -> list[Tensor]:
    """Gradients whose singular values are told apart, so that their vectors are no matter of rounding."""
    generator = torch.Generator().manual_seed(1)
    short = min(shape[-2:])
    vectors = [torch.linalg.qr(torch.randn(n, short, generator=generator))[0] for n in shape[-2:]]
    scales = torch.diag(2.0 ** -torch.arange(short))
    made = []
    for _ in range(count):
        noise = 0.05 * torch.randn(shape, generator=generator)
        made.append(vectors[0] @ scales @ vectors[1].T + noise)
    return made


def moved(rule: Any, group: dict[str, Any], shape: tuple[int, ...], grads: list[Tensor]) -> list[Tensor]:
    """The updates of a parameter, as training makes them."""
    sums = {name: torch.zeros(*of) for name, of in rule.sums(shape, group).items()}
    found = []
    for step, grad in enumerate(grads, 1):
        packed = math.prod(shape[:-2])
        kept = {name: each.view(packed, *each.shape[len(shape[:-2]) :]) for name, each in sums.items()}
        way = rule.way(
            group, 0, shape, lambda n, step=step, kept=kept: (step, {k: v[n] for k, v in kept.items()}, None)
        )
        made = torch.empty(grad.numel())
        for place in way.matrices:
            part = slice(place.start, place.stop)
            made[part] = place.transform(grad.view(-1)[part].view(place.rows, place.columns)).reshape(-1)
        found.append(made.view(shape))
    return found


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (2, 6, 10), (2, 8, 8)])
@pytest.mark.parametrize("name", PAPERS)
def test_twenty_steps_are_those_of_the_paper_to_rounding(name, shape):
    paper, numbers = PAPERS[name]
    rule = find_rule(name).sized(numbers)
    group = {**rule.defaults, **numbers}
    grads = gradients(shape, 20)
    ours = moved(rule, group, shape, grads)
    for n in range(math.prod(shape[:-2])):
        theirs, turn = paper(group), shape[-2] > shape[-1] and name != "soap"
        for step, (grad, made) in enumerate(zip(grads, ours, strict=True), 1):
            one, mine = (each.view(-1, *shape[-2:])[n] for each in (grad, made))
            wanted = theirs((one.T if turn else one).double(), step)
            wanted = wanted.T if turn else wanted
            assert (mine - wanted).norm() <= 1e-4 * wanted.norm(), (name, step)


@pytest.mark.parametrize("name", PAPERS)
def test_vectors_and_what_a_group_says_is_no_matrix_are_adamws(name):
    rule = find_rule(name)
    for shape, matrix in (((7,), True), ((3, 4), False)):
        group = {**rule.defaults, "matrix": matrix}
        assert rule.sums(shape, group) == {"exp_avg": shape, "exp_avg_sq": shape}
        generator, adam = torch.Generator().manual_seed(2), Adam(group["betas"])
        grads = [torch.randn(shape, generator=generator) for _ in range(5)]
        for grad, made in zip(grads, moved(rule, group, shape, grads), strict=True):
            torch.testing.assert_close(made.double(), adam(grad.double()), rtol=1e-5, atol=1e-6)


def test_a_matrix_without_a_gradient_does_not_move():
    for name, (_, numbers) in PAPERS.items():
        rule = find_rule(name).sized(numbers)
        for made in moved(rule, {**rule.defaults, **numbers}, (6, 10), [torch.zeros(6, 10)] * 3):
            assert not made.any(), name


@pytest.mark.parametrize("scale", [1e-22, 1e22])
def test_singular_vectors_do_not_depend_on_the_size_of_a_gradient(scale):
    rule, [grad] = find_rule("galore").sized({"rank": 4}), gradients((6, 10), 1)
    found = []
    for each in (grad, scale * grad):
        sums = {name: torch.zeros(*of) for name, of in rule.sums((6, 10)).items()}
        rule.remade(each, rule.defaults, 1, sums)
        found.append(sums["projector"])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_gradients_with_rows_of_zeros_have_eigenvectors(share):
    """As those of an embedding: in fp32 LAPACK does not converge with all of these."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(shape, generator=generator) for shape in ((256, 30), (30, 256)))
    grad = 1e-3 * (one @ two) * (torch.rand(256, 1, generator=generator) > share)
    for name, numbers in (("galore", {"rank": 128}), ("soap", {})):
        rule = find_rule(name).sized(numbers)
        sums = {kept: torch.zeros(*of) for kept, of in rule.sums((256, 256)).items()}
        rule.remade(grad, rule.defaults, 1, sums)
        vectors = sums["projector" if name == "galore" else "left_vectors"]
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(vectors.size(1)), rtol=0, atol=1e-5)


def test_a_side_that_is_too_long_for_soap_is_not_turned():
    rule = find_rule("soap").sized({"max_precond_dim": 8})
    assert rule.name == "soap+max_precond_dim=8"
    assert [*rule.sums((6, 10))] == ["exp_avg", "exp_avg_sq", "left", "left_vectors"]
    group, grads = dict(rule.defaults), gradients((6, 10), 3)
    assert all(made.any() for made in moved(rule, group, (6, 10), grads)[1:])


@pytest.mark.parametrize("name", PAPERS)
def test_convolutions_over_sequences_are_adamws(name):
    """As they have three dimensions, like packed experts."""
    convolutions = nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 3), nn.Conv2d(4, 6, 3)
    model = nn.Sequential(*convolutions, nn.Linear(4, 4))
    numbers = find_rule(name).numbers_of(model)
    own = [numbers("", each.weight) for each in model]
    assert own == [{"matrix": False}, {"matrix": False}, {}, {}]


def test_sizes_are_in_the_name_of_a_rule():
    rule = OptimConfig(name="galore", options={"rank": 16.0, "scale": 0.5}, ema=0.9).rule
    assert rule.name == "galore+rank=16+ema"
    assert find_rule(rule.name).sums((32, 64)) == rule.sums((32, 64)) == {
        "projector": (32, 16), "exp_avg": (16, 64), "exp_avg_sq": (16, 64),
    }  # fmt: skip
    assert rule.sized({"rank": 8}).name == "galore+rank=8+ema"
    assert rule.sized({"rank": 16}) is rule
    assert find_rule("galore").sized({"rank": 2.5}).name == "galore"  # which check_numbers refuses


@pytest.mark.parametrize(
    ("name", "changed", "shape", "wanted"),
    [
        ("galore", {}, (64, 256), r"rank: got 128; wanted at most 64, the shorter side of w, or matrix: fa"),
        ("apollo", {"rank": 64}, (256, 256), r"rank: got 64; wanted 128, as all parameters have"),
        ("soap", {}, None, r"w, which is in tiles of rows, .* set partition\.tile=never$"),
        ("galore", {"rank": 0}, (1, 1), "rank: got 0; wanted a whole number >= 1"),
        ("apollo", {"rank": 1.5}, (1, 1), "rank: got 1.5; wanted a whole number"),
        ("galore", {"update_proj_gap": 0}, (1, 1), "update_proj_gap: got 0; wanted a whole number >= 1"),
        ("soap", {"precondition_frequency": 0}, (1, 1), "precondition_frequency: got 0; wanted a whole nu"),
        ("soap", {"max_precond_dim": 0}, (1, 1), "max_precond_dim: got 0; wanted a whole number >= 1"),
        ("apollo", {"seed": 2**70}, (1, 1), "seed: got .*; wanted a whole number 0 to 2"),
    ],
)
def test_what_cannot_be_is_said(name, changed, shape, wanted):
    rule = find_rule(name)
    group = {**rule.defaults, **changed}

    def check() -> None:
        rule.check_numbers(group)
        rule.check_place(group, "w", shape or (4, 4), tiled=shape is None)

    with pytest.raises(SettingError, match=wanted):
        check()
    rule.check_place({**rule.defaults, "matrix": False}, "w", (2, 3), tiled=False)
