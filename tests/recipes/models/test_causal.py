"""The loop's loss of any causal model: summed over what counts, documents apart, others refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.core.errors import RecipeError
from infinity.recipes.models import CausalLoss
from tests.helpers.models import VOCABULARY, build

LENGTHS = ((5, 3, 4), (1, 11), (12,))


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


def some_tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))


def causal(name: str, attention: str = "sdpa") -> nn.Module:
    model: Any = build(name, seed=0)[0]()
    if name != "gpt":
        model.set_attn_implementation(attention)
    return model.eval()


def tiny(config_name: str, model_name: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_keeps_packed_documents_apart(name: str, attention: str) -> None:
    model, tokens = causal(name, attention), some_tokens()
    together = model(input_ids=tokens, position_ids=positions(), use_cache=False).logits
    for row, lengths in enumerate(LENGTHS):
        alone = [
            model(input_ids=part[None], use_cache=False).logits[0] for part in tokens[row].split(lengths)
        ]
        torch.testing.assert_close(together[row], torch.cat(alone), rtol=1e-5, atol=1e-6)
    mixed = model(input_ids=tokens, use_cache=False).logits
    assert not torch.allclose(mixed[0], together[0], atol=1e-3)


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_the_loss_of_packed_documents_is_the_sum_of_theirs(name: str) -> None:
    loss, tokens = CausalLoss(causal(name), packed=True), some_tokens()
    targets = tokens.roll(-1, dims=1)
    targets[:, ::3] = -100
    together = loss(tokens, targets, positions())
    alone = [
        loss(part[None], target[None])
        for row, lengths in enumerate(LENGTHS)
        for part, target in zip(tokens[row].split(lengths), targets[row].split(lengths))
    ]
    torch.testing.assert_close(together, torch.stack(alone).sum())


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_filling_changes_no_loss(name: str) -> None:
    loss, tokens = CausalLoss(causal(name)), some_tokens()
    targets = tokens.roll(-1, dims=1)
    targets[:, 7:] = -100
    mask = (torch.arange(12) < 7).long().expand(3, 12)
    filled = loss(tokens.where(mask.bool(), 0), targets, None, mask)
    torch.testing.assert_close(filled, loss(tokens[:, :7], targets[:, :7]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_the_models_own_loss_where_all_counts(name: str) -> None:
    model, tokens = causal(name), some_tokens()
    own = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(CausalLoss(model)(tokens, targets) / 33, own)


def test_a_batch_without_targets_has_a_loss_of_nothing_and_gradients_of_nothing() -> None:
    model, tokens = causal("llama"), some_tokens()
    loss = CausalLoss(model)(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in model.parameters())


def test_the_loss_that_balances_experts_is_added_in_training_only() -> None:
    model = tiny(
        "MixtralConfig", "MixtralForCausalLM", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    tokens, loss = some_tokens(), CausalLoss(model)
    own = model.train()(input_ids=tokens, labels=tokens, use_cache=False)
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(loss(tokens, targets) / 33, own.loss)
    without = loss(tokens, targets) / 33 - 0.5 * own.aux_loss
    model.eval()
    torch.testing.assert_close(loss(tokens, targets) / 33, without)


class Adapted(nn.Module):
    """What peft puts around a model: it passes on every argument."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> nn.Module:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


def test_a_model_within_adapters_is_called_as_without() -> None:
    model, tokens = causal("llama"), some_tokens()
    plain = CausalLoss(model, packed=True)(tokens, tokens, positions())
    assert torch.equal(CausalLoss(Adapted(model), packed=True)(tokens, tokens, positions()), plain)


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_models_that_do_not_predict_next_tokens_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.path: \w+ does not predict next tokens"):
        CausalLoss(build(name, seed=0)[0]())
    with pytest.raises(RecipeError, match="Linear does not predict"):
        CausalLoss(nn.Linear(1, 1))


def test_a_bert_with_a_head_for_next_tokens_is_refused_unless_it_is_a_decoder() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(RecipeError, match="BertLMHeadModel does not predict"):
        CausalLoss(tiny("BertConfig", "BertLMHeadModel", **sizes, intermediate_size=8))
    CausalLoss(tiny("BertConfig", "BertLMHeadModel", **sizes, intermediate_size=8, is_decoder=True))


def test_models_that_mix_documents_take_them_one_by_one_only() -> None:
    mamba = tiny("MambaConfig", "MambaForCausalLM", vocab_size=9, hidden_size=8, num_hidden_layers=1)
    old = tiny("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    for model in (mamba, old):
        with pytest.raises(RecipeError, match=r"cannot separate the documents .* set data\.packing=false"):
            CausalLoss(model, packed=True)
        tokens = torch.arange(6)[None]
        assert torch.isfinite(CausalLoss(model)(tokens, tokens, None, torch.ones_like(tokens)))


@pytest.mark.parametrize("name", ["OPT", "Afmoe"])
def test_masks_that_do_not_separate_documents_are_refused_when_they_are_made(name: str) -> None:
    model = tiny(
        f"{name}Config", f"{name}ForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    tokens = some_tokens()
    with pytest.raises(RecipeError, match="ForCausalLM does not separate documents by their positions"):
        CausalLoss(model, packed=True)(tokens, tokens, positions())
    assert torch.isfinite(CausalLoss(model)(tokens, tokens))


def test_a_model_that_names_no_cache_keeps_none_and_separates_documents() -> None:
    model = tiny(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=1, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    tokens, loss = some_tokens(), CausalLoss(model, packed=True)
    parts = zip(tokens, LENGTHS)
    alone = [loss(part[None], part[None]) for row, lengths in parts for part in row.split(lengths)]
    torch.testing.assert_close(loss(tokens, tokens, positions()), torch.stack(alone).sum())


def test_attention_that_cannot_tell_documents_in_batches_is_refused() -> None:
    model: Any = causal("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(RecipeError, match="LlamaForCausalLM with flash_attention_2 attention"):
        CausalLoss(model, packed=True)
