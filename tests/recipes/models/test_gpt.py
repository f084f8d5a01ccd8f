"""The decoder: causal, deterministic, as large as it says, the same with recomputation."""

import math

import pytest
import torch

from infinity.recipes.models import GPT, GPTConfig, Rotary

SMALL = GPTConfig(vocab_size=17, seq_len=12, n_layers=2, d_model=16, n_heads=2, d_ff=24)
TIED = GPTConfig(vocab_size=17, seq_len=12, n_layers=2, d_model=16, n_heads=2, tied=True)


def build(config: GPTConfig = SMALL, *, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def some_tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(17, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_it_has_the_parameters_that_its_config_counts(config: GPTConfig) -> None:
    assert sum(parameter.numel() for parameter in build(config).parameters()) == config.numel


def test_weights_are_the_seeds() -> None:
    one, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_no_token_sees_a_later_one(config: GPTConfig) -> None:
    model, tokens = build(config), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    before, after = model(tokens).logits, model(changed).logits
    assert before.shape == (3, 12, 17)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_the_loss_is_the_mean_cross_entropy_of_the_targets() -> None:
    model, tokens = build(), some_tokens()
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    logits, loss = model(tokens, targets)
    picked = logits.log_softmax(-1)[:, :-1].gather(2, targets[:, :-1, None])
    torch.testing.assert_close(loss, -picked.mean())
    assert abs(loss.item() - math.log(17)) < 0.2  # first weights know nothing
    assert model(tokens).loss is None


def test_every_parameter_gets_a_gradient_and_training_lowers_the_loss() -> None:
    model, tokens = build(), some_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = Rotary(8, 6)
    q, k = torch.randn(6), torch.randn(6)
    turned_q, turned_k = rotary(q.expand(1, 1, 8, 6))[0, 0], rotary(k.expand(1, 1, 8, 6))[0, 0]
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[3, 1], scores[7, 5])
    torch.testing.assert_close(scores[0, 0], q @ k)
    assert not torch.isclose(scores[3, 1], scores[3, 2])


def packed(*lengths: int) -> torch.Tensor:
    """The places of tokens in documents of these lengths, one after the other."""
    return torch.cat([torch.arange(length) for length in lengths])


def test_documents_of_one_sequence_are_as_if_they_were_alone() -> None:
    model, tokens = build(), some_tokens()
    positions = torch.stack([packed(5, 3, 4), packed(1, 11), packed(12)])
    together = model(tokens, positions=positions).logits
    for row, parts in enumerate(([5, 3, 4], [1, 11], [12])):
        alone = [model(part[None]).logits[0] for part in tokens[row].split(parts)]
        torch.testing.assert_close(together[row], torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_no_gradient_crosses_from_one_document_to_another() -> None:
    model, tokens = build(), torch.arange(12)[None] % 17
    targets = torch.full_like(tokens, -100)
    targets[0, 6:] = tokens[0, :6]
    model(tokens, targets, packed(6, 6)[None]).loss.backward()
    seen = model.embedding.weight.grad.abs().sum(dim=1) > 0
    assert seen.nonzero().flatten().tolist() == list(range(6, 12))


def test_positions_of_one_document_change_no_bit() -> None:
    model, tokens = build(), some_tokens()
    assert torch.equal(model(tokens, positions=packed(12).expand(3, 12)).logits, model(tokens).logits)


def test_bf16_runs_in_bf16_with_a_loss_in_fp32() -> None:
    logits, loss = build().to(torch.bfloat16)(some_tokens(), some_tokens())
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


def test_a_sequence_longer_than_the_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="13 tokens; the model takes at most 12"):
        build()(some_tokens(13))
