"""Next-token loss of the built-in GPT or any causal model of transformers.

The loss is a sum over targets, not a mean: micro-batches and ranks have different numbers of targets, so a
mean of means would weigh tokens differently. The training loop divides by the number in the step.
"""

import inspect
import sys
from dataclasses import dataclass, fields
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from infinity.core.config import SettingError, setting
from infinity.core.errors import RecipeError
from infinity.recipes.models.gpt import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GPTConfig):
    """A new GPT, or the model of a Hugging Face checkpoint directory."""

    path: str | None = setting(
        None, "directory of a Hugging Face checkpoint to fine-tune; null: a new GPT of these sizes", path=True
    )
    new: tuple[str, ...] = setting(
        (), "patterns of parameters that the checkpoint lacks, such as a new head: classifier.*"
    )
    ignore: tuple[str, ...] = setting(
        (), "patterns of checkpoint keys to ignore, which the model does not have"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("", "???"):  # OmegaConf's mark of a mandatory value
            raise SettingError(
                "path", self.path, "the directory of a checkpoint, as in model.path=DIR; or null"
            )
        for each in fields(GPTConfig):
            value = getattr(self, each.name)
            if self.path is not None and each.name != "seq_len" and value != each.default:
                raise SettingError(
                    each.name, value, "no value together with model.path, whose config.json has the sizes"
                )
        if self.path is None and (self.new or self.ignore):
            raise SettingError(
                "path", None, "the directory of a checkpoint, since model.new or model.ignore is set"
            )


#: Attention implementations of transformers whose masks separate packed documents at any batch size.
_PACKING_ATTENTION = ("sdpa", "eager", "flex_attention")


class CausalLoss:
    """Summed cross-entropy of a model's next-token predictions.

    The model is a GPT, or a causal model of transformers, with or without adapters. ``packed`` sequences hold
    several documents, which must not attend to each other; RecipeError: the model cannot separate them.
    """

    def __init__(self, model: nn.Module, *, packed: bool = False) -> None:
        self._model = model
        unwrap: Any = getattr(model, "get_base_model", None)  # peft wraps the model
        base: Any = unwrap() if unwrap else model
        self._is_gpt = isinstance(base, GPT)
        self._accepted = frozenset(inspect.signature(base.forward).parameters)
        if not self._is_gpt:
            require_causal(type(base), getattr(base, "config", None))
            if packed:
                _require_separation(base, self._accepted)
        self._aux_share = float(getattr(getattr(base, "config", None), "router_aux_loss_coef", 0.0) or 0.0)

    def __call__(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the cross-entropy in fp32, summed over targets other than -100; arguments are ``(b, s)``.

        In training, the auxiliary loss of a mixture of experts is added with its configured weight (if the
        model's config asks for it), multiplied by the number of targets. ``positions`` are those of tokens in
        their documents; None: every sequence is one document. The mask is 0 for padding.
        """
        given: dict[str, Any] = {"tokens": tokens, "positions": positions}
        if not self._is_gpt:
            # Training needs no cache of keys, and transformers separates packed documents only without one.
            names = "input_ids", "position_ids", "attention_mask", "use_cache"
            known = zip(names, (tokens, positions, mask, False))
            given = {name: x for name, x in known if x is not None and name in self._accepted}
        output = self._model(**given)
        logits = output.logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        balance = getattr(output, "aux_loss", None)
        if balance is not None and self._aux_share and self._model.training:
            loss = loss + self._aux_share * balance * (targets >= 0).sum()
        return loss


def require_causal(cls: Any, config: Any) -> None:
    """Refuse a model of class ``cls`` (None: unknown) with ``config`` that does not predict next tokens."""
    can_generate = getattr(cls, "can_generate", None)
    causal = config is not None and can_generate is not None and can_generate()
    if causal and not getattr(config, "is_encoder_decoder", False):
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        # BERT-like models have bidirectional attention, unless they are configured as decoders
        is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if not is_encoder or getattr(config, "is_decoder", True):
            return
    raise RecipeError(
        f"model.path: {(cls or type(config)).__name__} does not predict next tokens, as infinity train "
        "requires; train it in your own loop, with infinity.from_pretrained and infinity.AdamW"
    )


def _require_separation(model: Any, accepted: frozenset[str]) -> None:
    """Refuse a model that does not separate packed documents by positions, as transformers' masks do."""
    kind, attention = type(model).__name__, model.config._attn_implementation
    stateful = any(getattr(each, "_is_stateful", False) for each in model.modules())
    modules = {sys.modules[cls.__module__] for each in model.modules() for cls in type(each).__mro__}
    makes_masks = any(hasattr(module, "create_causal_mask") for module in modules)
    if stateful or "position_ids" not in accepted or not makes_masks:
        what = f"{kind} cannot separate the documents of a packed sequence"
    elif attention not in _PACKING_ATTENTION:
        what = f"{kind} with {attention} attention separates documents only at batch size 1"
    else:
        return
    raise RecipeError(
        f"data.packing: {what}; set data.packing=false (one document per sequence) "
        f"or use a model with {', '.join(_PACKING_ATTENTION)} attention"
    )
