"""Generation of tokens: they follow the model's distribution, and the model is unchanged afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT, generate
from hpctrain.models.settings import GPTConfig


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(8)
    made = GPT(GPTConfig(layers=1, heads=2, width=8, context=6, vocab_size=7, dropout=0.5, tied=False))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    return made


def test_greedy_tokens_are_the_likeliest_also_beyond_the_context(model: GPT) -> None:
    prompt = torch.tensor([1, 2, 3])
    tokens = generate(model, prompt, 20, temperature=0)
    assert len(set(tokens[10:].tolist())) > 2  # a model that repeats itself would not reveal a wrong window
    assert tokens.shape == (23,) and torch.equal(tokens[:3], prompt)
    model.eval()
    for end in range(3, 23):
        assert tokens[end] == model(tokens[None, max(0, end - 6) : end])[0, -1].argmax()


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (2.0, 3), (1.0, 100)])
def test_sampled_tokens_follow_the_distribution(model: GPT, temperature: float, top_k: int | None) -> None:
    prompt = torch.tensor([[4, 5]]).expand(40_000, 2)
    generator = torch.Generator().manual_seed(1)
    tokens = generate(model, prompt, 1, temperature=temperature, top_k=top_k, generator=generator)
    logits = model.eval()(prompt[:1])[0, -1].detach() / temperature
    if top_k is not None and top_k < 7:
        logits[logits < logits.sort(descending=True).values[top_k - 1]] = -torch.inf
    seen = torch.bincount(tokens[:, 2], minlength=7) / len(tokens)
    torch.testing.assert_close(seen, logits.softmax(0), atol=0.01, rtol=0)


def test_a_generator_makes_tokens_reproducible_and_rows_are_independent(model: GPT) -> None:
    prompt = torch.tensor([[1, 2], [3, 4]])
    first, second = (generate(model, prompt, 10, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first[:, :2], prompt)


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_is_restored_also_after_an_error(model: GPT, training: bool) -> None:
    model.train(training)
    assert not generate(model, torch.tensor([1]), 2).requires_grad
    assert model.training is training
    with pytest.raises(IndexError):
        generate(model, torch.tensor([99]), 2)
    assert model.training is training and model.blocks[0].training is training


@pytest.mark.parametrize("wrong", [{"count": -1}, {"temperature": -1.0}, {"top_k": 0}, {"prompt": torch.tensor([])}])
def test_invalid_arguments_are_refused(model: GPT, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot generate"):
        generate(model, **{"prompt": torch.tensor([1]), "count": 1, **wrong})
