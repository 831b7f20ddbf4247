"""GPT model: the same logits as a plain function written from the paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT, generate
from hpctrain.models.settings import GPTConfig

CONFIG = GPTConfig(layers=3, heads=4, width=24, context=16, vocab_size=50, tied=False)


def _model(config: GPTConfig = CONFIG, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config).double()
    for parameter in model.parameters():  # away from 0 and 1, so that no bias or gain remains untested
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * gain + bias


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _plain(weights: dict[str, Tensor], tokens: Tensor, heads: int, layers: int) -> Tensor:
    """Compute GPT-2's logits with einsum and explicit masks, from a dictionary of weights."""
    length = tokens.shape[1]
    x = weights["embedding.token.weight"][tokens] + weights["embedding.position.weight"][:length]
    width = x.shape[-1] // heads
    future = torch.ones(length, length).triu(1).bool()
    for layer in range(layers):
        w = {key.removeprefix(f"blocks.{layer}."): value for key, value in weights.items()}
        y = _norm(x, w["norm1.weight"], w["norm1.bias"])
        mixed = []
        for head in range(heads):
            rows = slice(3 * width * head, 3 * width * (head + 1))
            q, k, v = (y @ w["attention.qkv.weight"][rows].T + w["attention.qkv.bias"][rows]).split(width, dim=-1)
            scores = torch.einsum("bic,bjc->bij", q, k) / math.sqrt(width)
            mixed.append(torch.einsum("bij,bjc->bic", scores.masked_fill(future, -math.inf).softmax(-1), v))
        x = x + torch.cat(mixed, -1) @ w["attention.project.weight"].T + w["attention.project.bias"]
        y = _norm(x, w["norm2.weight"], w["norm2.bias"])
        x = x + _gelu(y @ w["mlp.fc.weight"].T + w["mlp.fc.bias"]) @ w["mlp.project.weight"].T + w["mlp.project.bias"]
    return _norm(x, weights["norm.weight"], weights["norm.bias"]) @ weights["head.weight"].T


@pytest.mark.parametrize("length", [1, 7, 16])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_a_plain_function(length: int, tied: bool) -> None:
    model = _model(GPTConfig(layers=3, heads=4, width=24, context=16, vocab_size=50, tied=tied))
    tokens = torch.randint(50, (2, length))
    torch.testing.assert_close(model(tokens), _plain(dict(model.state_dict()), tokens, heads=4, layers=3))


def test_attention_is_causal() -> None:
    model = _model()
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 50
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:9].all() and not same[9:].any()


def test_weights_are_initialised_as_in_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=8, heads=4, width=256, context=128, vocab_size=1000, tied=False))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            expected = 0.02 / 4 if "project" in name else 0.02  # 4 = sqrt(2 * 8)
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_a_tied_head_on_another_rank_equals_the_embedding() -> None:
    torch.manual_seed(1)
    config = GPTConfig(layers=1, heads=1, width=8, context=4, vocab_size=11, tied=True)
    with torch.device("meta"):
        stage = GPT(config)
    stage.head = torch.nn.Linear(8, 11, bias=False)
    stage.initialise("head", stage.head)
    assert torch.equal(stage.head.weight, GPT(config).embedding.token.weight)


def test_depth_changes_only_the_scale_of_residual_projections() -> None:
    torch.manual_seed(1)
    shallow, deep = (GPT(GPTConfig(layers=n, heads=4, width=24, context=16, vocab_size=50)) for n in (2, 8))
    for name, parameter in shallow.named_parameters():
        factor = 2 if name.endswith("project.weight") else 1
        torch.testing.assert_close(parameter, factor * deep.get_parameter(name))


def test_dropout_acts_only_in_training() -> None:
    model = _model(GPTConfig(layers=2, heads=2, width=24, context=16, vocab_size=50, dropout=0.5))
    tokens = torch.randint(50, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="a sequence of 17 tokens is longer than the model's context of 16"):
        _model()(torch.zeros(1, 17, dtype=torch.int64))


# Generation of tokens: they follow the model's distribution, and the model is unchanged afterwards --------------------


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
