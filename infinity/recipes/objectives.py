"""The tasks of ``infinity train``: what a batch holds, and its loss from what the model returns.

[Note: examples and documents]
An example of ``sft`` and ``pretrain`` is a token. That of another task is one document, or two that are
compared, and its loss follows from a number of each document: the log-probability of the tokens that count,
or the score that the model's head gives it.

[Note: the reference of dpo and kto]
It is the model before its first step, with adapters their base. Its log-probabilities are computed once,
before training, and kept in the run's folder: no second model takes memory, and a step reads the weights as
often as one of ``sft`` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.activations.recompute import in_backward
from infinity.checkpoint.model import read_config
from infinity.data.sequences import Batch
from infinity.data.tokens import JUDGED, LABELLED, PAIRS, SCORED_PAIRS, TEXTS, Kind
from infinity.recipes.models import CausalLoss, ModelConfig

Metrics = Mapping[str, Tensor]


class Documents(NamedTuple):
    """What is known of a micro-batch's examples, each of which has ``d`` documents."""

    values: Tensor  # log-probabilities, (examples, d); or scores of labels, (examples, d, labels)
    used: Tensor  # 0 for an example that is padding, (examples,)
    labels: Tensor  # of each first document, (examples,)
    reference: Tensor  # log-probabilities of the reference, (examples, d)
    over_ranks: Callable[[Tensor], Tensor]  # the mean of each value over all ranks, which all call

    @property
    def ratios(self) -> tuple[Tensor, ...]:
        """Return the log of the ratio of model to reference, of each document of the examples."""
        return (self.values - self.reference).unbind(1)


def dpo(given: Documents, train: Any) -> tuple[Tensor, Metrics]:
    """Prefer the chosen of two completions (arXiv:2305.18290, equation 7)."""
    chosen, rejected = given.ratios
    margins = train.beta * (chosen - rejected)
    return -F.logsigmoid(margins), {
        "rewards/chosen": train.beta * chosen,
        "rewards/rejected": train.beta * rejected,
        "rewards/accuracies": (margins > 0).float(),
        "rewards/margins": margins,
    }


def kto(given: Documents, train: Any) -> tuple[Tensor, Metrics]:
    """Make a completion likelier, or less likely, by its label (arXiv:2402.01306, equation 7).

    The second document, another example's completion of the same prompt, estimates how far the model is from
    the reference; it has no gradient.
    """
    ratio, mismatched = given.ratios
    sums = torch.stack([(mismatched.detach() * given.used).sum(), given.used.sum()])
    distance, examples = given.over_ranks(sums)  # packed rows hold unequally many examples
    distance = (distance / examples).clamp(min=0)
    desirable = given.labels > 0
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, train.desirable_weight, train.undesirable_weight)
    rewards, nothing = train.beta * ratio, torch.full_like(ratio, torch.nan)
    return weight * (1 - torch.sigmoid(train.beta * sign * (ratio - distance))), {
        "rewards/chosen": torch.where(desirable, rewards, nothing),
        "rewards/rejected": torch.where(desirable, nothing, rewards),
        "kl": distance.expand_as(ratio),
    }


def reward(given: Documents, train: Any) -> tuple[Tensor, Metrics]:
    """Score the chosen of two completions higher (Bradley and Terry)."""
    chosen, rejected = given.values.squeeze(-1).unbind(1)
    margin = chosen - rejected
    return -F.logsigmoid(margin), {
        "accuracy": (margin > 0).float(),
        "margin": margin,
        "mean_reward": (chosen + rejected) / 2,
    }


def classify(given: Documents, train: Any) -> tuple[Tensor, Metrics]:
    """Predict the label of a text."""
    scores = given.values.squeeze(1)
    loss = F.cross_entropy(scores, given.labels, reduction="none")
    return loss, {"accuracy": (scores.argmax(-1) == given.labels).float()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A task: what its examples are, what the model must have, and their losses."""

    example: str  # in text for people
    data: Kind = TEXTS
    reference: bool = False  # its log-probabilities are needed, too
    #: Gives each example's loss and metrics, ``(examples,)``; NaN is left out of a metric's mean.
    losses: Callable[[Documents, Any], tuple[Tensor, Metrics]] | None = None

    def metric_names(self, train: Any) -> list[str]:
        """Return the names of the metrics beside the loss."""
        if self.losses is None:
            return []
        shape = (1, self.data.documents, *[1] * self.data.whole)
        values, one = torch.zeros(shape, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
        return [*self.losses(Documents(values, one, one, values, lambda value: value), train)[1]]

    @property
    def head(self) -> bool:
        """Return whether the model scores whole documents, in place of next tokens."""
        return self.data.whole


#: The values of ``train.task``.
OBJECTIVES = {
    "sft": Objective(example="token"),
    "pretrain": Objective(example="token", data=TEXTS._replace(all_tokens=True)),
    "dpo": Objective(example="pair", data=PAIRS, reference=True, losses=dpo),
    "kto": Objective(example="completion", data=JUDGED, reference=True, losses=kto),
    "reward": Objective(example="pair", data=SCORED_PAIRS, losses=reward),
    "classify": Objective(example="text", data=LABELLED, losses=classify),
}


#: Parameters that a checkpoint of another task lacks, or has, where the model scores documents.
_NEW_IN_HEADS = ("score.*", "classifier.*", "pre_classifier.*", "*pooler.*")
_NOT_IN_HEADS = ("lm_head.*", "embed_out.*", "cls.*", "vocab_*")


def loaded_as(task: str, model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of :func:`infinity.from_pretrained` by which ``model.path`` is that of a task."""
    if not OBJECTIVES[task].head:
        return {"new": model.new, "ignore": model.ignore}
    from transformers import AutoModelForSequenceClassification

    config = read_config(Path(str(model.path)))
    ends = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    tokens = [each[0] if isinstance(each, list) and each else each for each in ends]
    return {
        "auto_class": AutoModelForSequenceClassification,
        "new": (*model.new, *_NEW_IN_HEADS), "ignore": (*model.ignore, *_NOT_IN_HEADS),
        "num_labels": 1 if task == "reward" else model.num_labels or config.num_labels,
        "pad_token_id": next((each for each in tokens if type(each) is int), 0),
    }  # fmt: skip


class TaskLoss:
    """Loss of a micro-batch, summed over its examples; their metrics are added up: see :meth:`metrics`.

    ``train`` has the settings of the section of that name; ``packed`` sequences hold several documents.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, train: Any, *, packed: bool,
        over_ranks: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:  # fmt: skip
        self._model, self._objective, self._train = model, objective, train
        self._causal = None if objective.head else CausalLoss(model, packed=packed)
        self._over_ranks = over_ranks
        self._seen: dict[str, Tensor] = {}

    def __call__(self, batch: Batch) -> Tensor:
        data, losses_of = self._objective.data, self._objective.losses
        if losses_of is None:
            assert self._causal is not None
            return self._causal(batch.tokens, batch.targets, batch.positions, batch.mask)
        values, balance = self.documents(batch)
        count = data.documents
        assert batch.labels is not None
        assert batch.reference is not None
        labels = batch.labels.reshape(-1, count)
        used = (labels[:, 0] >= 0).to(values.dtype)
        given = Documents(
            values.reshape(-1, count, *values.shape[2:]), used, labels[:, 0].clamp(min=0),
            batch.reference.reshape(-1, count), self._over_ranks,
        )  # fmt: skip
        losses, metrics = losses_of(given, self._train)
        if not in_backward():  # of a layer schedule, which computes the loss again there
            for name, value in metrics.items():
                value, counts = value.detach(), used * ~value.isnan()
                seen = torch.stack([(value.nan_to_num() * counts).sum(), counts.sum()])
                self._seen[name] = self._seen[name] + seen if name in self._seen else seen
        return (losses * used).sum() + balance * used.sum()

    def metrics(self) -> dict[str, Tensor]:
        """Return sum and count of each metric, on the CPU, since this was last called."""
        found, self._seen = self._seen, {}
        return {name: seen.cpu() for name, seen in found.items()}

    def documents(self, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Return a value of each document in each row, ``(rows, documents)``, and the loss of routers.

        Of a head they are scores of labels, ``(rows, 1, labels)``.
        """
        if self._causal is None:
            # padding is known by its token where a model looks for the last one that is none
            output = self._model(input_ids=batch.tokens, attention_mask=batch.mask)
            return output.logits.float().unsqueeze(1), 0.0
        each, balance = self._causal.log_probs(batch.tokens, batch.targets, batch.positions, batch.mask)
        if batch.segments is None:
            return each.sum(1, keepdim=True), balance
        assert batch.labels is not None
        return torch.zeros_like(batch.labels, dtype=each.dtype).scatter_add(1, batch.segments, each), balance
