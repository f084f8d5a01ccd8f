"""How the training loop asks a model for its loss: our decoder, or any causal one of Hugging Face.

The loss is the sum over the targets that count, not their mean: micro-batches and ranks have
different numbers of them, and a mean of means weighs the same token here more than there. The loop
divides once, by the number in the whole step.
"""

import inspect
import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from infinity.app.models.gpt import GPT
from infinity.core.errors import RecipeError

#: Attention of transformers whose masks keep packed documents apart, whatever the batch size.
_PACKING_ATTENTION = ("sdpa", "eager", "flex_attention")


class CausalLoss:
    """Calls a model with tokens and gives the sum of the cross-entropy.

    Args:
        model: A GPT, or a causal model of transformers, with adapters or without.
        packed: Sequences will hold several documents, which must not see each other.

    Raises:
        RecipeError: The model does not predict next tokens, or it cannot keep documents apart.
    """

    def __init__(self, model: nn.Module, *, packed: bool = False) -> None:
        self._model = model
        unwrap: Any = getattr(model, "get_base_model", None)  # adapters of peft stand around it
        base: Any = unwrap() if unwrap else model
        self._ours = isinstance(base, GPT)
        self._accepted = _arguments(base)
        if not self._ours:
            require_causal(type(base), getattr(base, "config", None))
            if packed:
                _require_separation(base, self._accepted)
        self._aux_share = float(getattr(getattr(base, "config", None), "router_aux_loss_coef", 0.0) or 0.0)

    def __call__(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The cross-entropy, fp32, summed over the targets that are not -100; each is ``(b, s)``.

        In training, the loss that balances experts (where the model's config asks for it) is added in its
        configured share, as many times as targets count.

        Args:
            positions: Of each token in its document; None: a sequence is one document.
            mask: 0 where a sequence is filled up.
        """
        output = self._model(**self._inputs(tokens, positions, mask))
        logits = output.logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        balance = getattr(output, "aux_loss", None)
        if balance is not None and self._aux_share and self._model.training:
            loss = loss + self._aux_share * balance * (targets >= 0).sum()
        return loss

    def _inputs(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
        if self._ours:
            return {"tokens": tokens, "positions": positions}
        # A cache of keys is of no use in training, and transformers looks for documents only without one.
        given = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        return {name: value for name, value in given.items() if value is not None and name in self._accepted}


def _arguments(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def require_causal(cls: Any, config: Any) -> None:
    """A model of class ``cls`` (None: there is none for it) and ``config`` predicts next tokens.

    Raises:
        RecipeError: It does not; names it.
    """
    can_generate = getattr(cls, "can_generate", None)
    causal = config is not None and can_generate is not None and can_generate()
    if causal and not getattr(config, "is_encoder_decoder", False) and not _is_encoder(config):
        return
    raise RecipeError(
        f"model.path: {(cls or type(config)).__name__} does not predict the next token of a text, which is "
        "all that infinity train can teach; write a loop of your own around it, with "
        "infinity.from_pretrained and infinity.AdamW"
    )


def _is_encoder(config: Any) -> bool:
    """A kind of BERT that was not told to be a decoder: its tokens see those that follow."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)


def _require_separation(model: Any, accepted: frozenset[str]) -> None:
    """``model`` keeps documents apart by their positions, as transformers' own masks do."""
    kind, attention = type(model).__name__, model.config._attn_implementation
    stateful = any(getattr(each, "_is_stateful", False) for each in model.modules())
    if stateful or "position_ids" not in accepted or not _makes_masks(model):
        what = f"{kind} cannot keep the documents of one sequence apart"
    elif attention not in _PACKING_ATTENTION:
        what = f"{kind} with {attention} attention keeps documents apart only one sequence at a time"
    else:
        return
    raise RecipeError(
        f"data.packing: {what}; set data.packing=false, for one document per sequence, "
        f"or use a model with {', '.join(_PACKING_ATTENTION)} attention"
    )


def _makes_masks(model: nn.Module) -> bool:
    """Some part of ``model`` is written with transformers' function that finds packed documents."""
    modules = {sys.modules[cls.__module__] for each in model.modules() for cls in type(each).__mro__}
    return any(hasattr(module, "create_causal_mask") for module in modules)
