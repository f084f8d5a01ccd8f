"""Losses of tasks, from the formulas of their papers, and sums and means over examples and documents."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.data.sequences import Batch
from infinity.recipes.models import GPT, GPTConfig
from infinity.recipes.objectives import OBJECTIVES, Documents, Objective, TaskLoss

TRAIN = SimpleNamespace(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)


def given(values: Any, *, labels: Any = (0, 0, 0), reference: Any = None, used: Any = (1, 1, 1)) -> Documents:
    values = torch.tensor(values, dtype=torch.float64)
    reference = torch.zeros_like(values) if reference is None else torch.tensor(reference).double()
    return Documents(
        values, torch.tensor(used).double(), torch.tensor(labels), reference, lambda value: value
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def losses_of(task: str, documents: Documents) -> tuple[Tensor, Any]:
    losses = OBJECTIVES[task].losses
    assert losses is not None
    return losses(documents, TRAIN)


def test_dpo_prefers_what_the_reference_does_not_prefer_as_much() -> None:
    policy, reference = [(-3.0, -5.0), (-4.0, -2.0), (-1.0, -1.0)], [(-4.0, -4.0), (-4.0, -2.0), (-2.0, -5.0)]
    losses, metrics = losses_of("dpo", given(policy, reference=reference))
    margins = [0.3 * ((c - rc) - (r - rr)) for (c, r), (rc, rr) in zip(policy, reference)]
    assert losses.tolist() == pytest.approx([-math.log(sigmoid(margin)) for margin in margins])
    assert metrics["rewards/chosen"].tolist() == pytest.approx([0.3, 0.0, 0.3])
    assert metrics["rewards/rejected"].tolist() == pytest.approx([-0.3, 0.0, 1.2])
    assert metrics["rewards/margins"].tolist() == pytest.approx(margins)
    assert metrics["rewards/accuracies"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("moved", [1.0, -1.0], ids=["farther", "nearer"])
def test_kto_weighs_what_moved_against_how_far_the_model_has(moved: float) -> None:
    ratios, mismatched = [1.0, -0.5, 2.0], [moved, moved / 2, 100.0]
    documents = given([*zip(ratios, mismatched)], labels=[1, 0, 1], used=[1, 1, 0])
    losses, metrics = losses_of("kto", documents)
    distance = max(0.0, (moved + moved / 2) / 2)
    wanted = [1.5 * (1 - sigmoid(0.3 * (1.0 - distance))), 0.5 * (1 - sigmoid(0.3 * (distance + 0.5)))]
    assert losses[:2].tolist() == pytest.approx(wanted)
    assert metrics["kl"][0].item() == pytest.approx(distance)
    assert metrics["rewards/chosen"].nan_to_num(-9).tolist() == pytest.approx([0.3, -9, 0.6])
    assert metrics["rewards/rejected"].nan_to_num(-9).tolist() == pytest.approx([-9, -0.15, -9])


def test_the_mismatched_completion_of_kto_has_no_gradient() -> None:
    documents = given([(1.0, 2.0), (0.5, 1.0), (2.0, 3.0)], labels=[1, 0, 1])
    documents.values.requires_grad_()
    losses_of("kto", documents)[0].sum().backward()
    grad = documents.values.grad
    assert grad is not None
    assert (grad[:, 0] != 0).all()
    assert (grad[:, 1] == 0).all()


def test_a_reward_model_scores_the_chosen_higher() -> None:
    losses, metrics = losses_of("reward", given([[[2.0], [1.0]], [[0.0], [0.5]], [[1.0], [1.0]]]))
    assert losses.tolist() == pytest.approx([-math.log(sigmoid(margin)) for margin in (1.0, -0.5, 0.0)])
    assert metrics["accuracy"].tolist() == [1, 0, 0]
    assert metrics["margin"].tolist() == [1.0, -0.5, 0.0]


def test_a_classifier_predicts_labels() -> None:
    losses, metrics = losses_of(
        "classify", given([[[2.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]], labels=[0, 1, 1])
    )
    wanted = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))]
    assert losses.tolist() == pytest.approx(wanted)
    assert metrics["accuracy"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("task", OBJECTIVES)
def test_metrics_have_the_names_that_a_recipe_may_give(task: str) -> None:
    objective = OBJECTIVES[task]
    names = objective.metric_names(TRAIN)
    assert (names == []) == (not objective.data.documents)
    assert len(names) == len(set(names))


def model_of(seq_len: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=32, seq_len=seq_len, n_layers=1, d_model=16, n_heads=2))


def test_documents_of_packed_rows_have_the_log_probabilities_that_they_have_alone() -> None:
    model, torch_rows = model_of(12), torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 32, (length,), generator=torch_rows) for length in (5, 4, 4)]
    tokens, targets = torch.zeros(2, 12, dtype=torch.int64), torch.full((2, 12), -100)
    positions, segments = torch.arange(12).expand(2, 12).clone(), torch.zeros(2, 12, dtype=torch.int64)
    places = [(0, 0, 0), (0, 4, 1), (1, 0, 0)]  # row, first token and number in the row of each
    for document, (row, first, number) in zip(documents, places):
        size = len(document) - 1
        tokens[row, first : first + size], targets[row, first : first + size] = document[:-1], document[1:]
        positions[row, first : first + size] = torch.arange(size)
        positions[row, first + size :] = torch.arange(12 - first - size)
        segments[row, first : first + size] = number
    labels = torch.tensor([[1, 0], [1, -1]])
    batch = Batch(tokens, targets, positions, segments=segments, labels=labels, reference=torch.zeros(2, 2))
    loss = TaskLoss(model, OBJECTIVES["dpo"], TRAIN, packed=True)
    found, _ = loss.documents(batch)
    for document, (row, _, number) in zip(documents, places):
        logits = model(document[None, :-1]).logits[0]
        alone = -F.cross_entropy(logits.float(), document[1:], reduction="sum")
        assert found[row, number].item() == pytest.approx(alone.item(), rel=1e-5)
    assert found[1, 1] == 0


def test_padding_counts_in_no_loss_and_no_metric() -> None:
    model = model_of(4)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    segments, positions = torch.tensor([[0, 0, 1, 1]] * 2), torch.tensor([[0, 1, 0, 1]] * 2)
    how: dict[str, Any] = {"segments": segments, "reference": torch.zeros(2, 2)}
    loss = TaskLoss(model, OBJECTIVES["dpo"], TRAIN, packed=True)
    both = Batch(tokens, tokens, positions, labels=torch.tensor([[0, 0], [-1, -1]]), **how)
    total = loss(both)
    (count,) = {int(seen[1]) for seen in loss.metrics().values()}
    first = {name: each[:1] for name, each in both._asdict().items() if isinstance(each, Tensor)}
    assert total.item() == pytest.approx(loss(Batch(**first)).item(), rel=1e-6)
    assert count == 1


def test_the_metrics_of_micro_batches_add_up() -> None:
    def losses(documents: Documents, train: Any) -> tuple[Tensor, Any]:
        some = torch.where(documents.labels > 0, documents.labels.double(), torch.nan)
        return documents.values.sum(1), {"labels": some}

    loss = TaskLoss(model_of(4), Objective(example="-", data=OBJECTIVES["dpo"].data, losses=losses), TRAIN,
                    packed=False)  # fmt: skip
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for label in (0, 3, 5):
        loss(Batch(tokens, tokens, labels=torch.tensor([[label], [0]]), reference=torch.zeros(2, 1)))
    assert loss.metrics()["labels"].tolist() == [8, 2]
