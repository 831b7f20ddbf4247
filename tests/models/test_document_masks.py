"""GPT with document masks: documents of a window do not affect each other, and compute as in windows of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.errors import SettingsError, UsageError
from hpctrain.models import GPT, GPTConfig, ModelSettings, generate
from hpctrain.models.build import build
from hpctrain.models.gpt import Attention
from hpctrain.parallel.recompute import recompute

SEPARATOR, CONTEXT = 3, 24
SHAPE: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, "vocab_size": 40}
FORMS = ["eager", "aot_eager"]
WINDOW = "aaaaaaaa|bbbbbbb|ccccccc"  # a separator ends each document
WINDOWS = {
    "three documents": WINDOW,
    "an empty document": "aaaaa||ccccccccccccccccc",
    "one document": "a" * 24,
    "a separator at the end": "aaaaaaaaaa|bbbbbbbbbbbb|",
    "a separator at the beginning": "|bbbbbbbbbbbbbbbbbbbbbbb",
    "separators only": "|" * 24,
}


def _model(dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, "separator": SEPARATOR, **options})).to(dtype)
    for parameter in model.parameters():  # larger than initial weights, so that attention is far from uniform
        nn.init.normal_(parameter, std=0.2)
    return model


def _call(model: nn.Module, form: str) -> Callable[..., Tensor]:
    if form == "eager":
        return model
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(model, backend=form, fullgraph=True)
    return compiled


def _window(text: str = WINDOW, seed: int = 0) -> Tensor:
    """Return two windows with random tokens for the letters of the text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SEPARATOR + 1, SHAPE["vocab_size"], (2, len(text)), generator=generator)
    tokens[:, [place for place, letter in enumerate(text) if letter == "|"]] = SEPARATOR
    return tokens


def _attention(model: GPT) -> Attention:
    attention = model.get_submodule("blocks.0.attention")
    assert isinstance(attention, Attention)
    return attention


def _lengths(text: str) -> list[int]:
    return [len(document) for document in text.replace("|", "| ").split(" ") if document]


def _alone(model: GPT, tokens: Tensor, text: str = WINDOW) -> Tensor:
    """Return the logits of each document in a window of its own, by a model without masks and with the same weights."""
    plain = _without_masks(model)
    return torch.cat([plain(piece) for piece in torch.split(tokens, _lengths(text), dim=1)], dim=1)


def _without_masks(model: GPT) -> GPT:
    plain = GPT(GPTConfig(**SHAPE)).to(model.head.weight.dtype)
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_no_effect_on_other_documents(dtype: torch.dtype, form: str) -> None:
    model = _model(dtype)
    call = _call(model, form)
    tokens, changed = _window(), _window()
    changed[:, :8] = _window(seed=1)[:, :8]
    gradients, logits = [], []
    for window in (tokens, changed):
        model.zero_grad()
        result = call(window)
        loss = F.cross_entropy(result[:, 9:].flatten(0, 1).float(), window[:, 9:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        logits.append(result.detach())
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert torch.equal(logits[0][:, 9:], logits[1][:, 9:]) and not torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert len(gradients[0]) == len(list(model.parameters()))
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


def test_gradients_do_not_reach_other_documents() -> None:
    model = _model()
    inputs: list[Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, result: inputs.append(result))
    (gradient,) = torch.autograd.grad(model(_window())[:, 9:17].square().sum(), inputs)
    assert (gradient[:, :9] == 0).all() and (gradient[:, 17:] == 0).all() and (gradient[:, 9:17] != 0).any(-1).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", WINDOWS.values(), ids=WINDOWS.keys())
def test_documents_compute_as_in_windows_of_their_own(text: str, form: str) -> None:
    model, tokens = _model(torch.float64), _window(text)
    torch.testing.assert_close(_call(model, form)(tokens), _alone(model, tokens, text))


def test_documents_of_bfloat16_and_autocast_are_close_to_those_of_float32() -> None:
    model, tokens = _model(), _window()
    expected = _alone(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
    assert (found.float() - expected).abs().max() < 0.03 * expected.abs().max()
    assert (model.bfloat16()(tokens).float() - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_those_of_documents_alone(again: bool) -> None:
    model, tokens = _model(torch.float64), _window()
    reference = _without_masks(model)
    pieces = [reference(piece) for piece in torch.split(tokens, _lengths(WINDOW), dim=1)]
    torch.cat(pieces, dim=1).square().mean().backward()  # type: ignore[no-untyped-call]
    if again:
        recompute(model.blocks)
    model(tokens).square().mean().backward()
    for one, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_window_of_one_document_computes_as_without_masks() -> None:
    model, tokens = _model(torch.float64), _window("a" * 15)
    torch.testing.assert_close(model(tokens), _without_masks(model)(tokens))


def test_dropout_draws_for_masked_attention() -> None:
    model = _model(dropout=0.5)
    assert not torch.equal(model(_window()), model(_window()))
    model.eval()
    assert torch.equal(model(_window()), model(_window()))


def test_a_generated_document_begins_anew_after_a_separator() -> None:
    model = _model(torch.float64)
    first = torch.tensor([9, 10, 11, SEPARATOR, 20, 21])
    found = generate(model, first, 4, temperature=0)
    assert found[6:].tolist() == generate(model, first[4:], 4, temperature=0)[2:].tolist()


def test_a_block_needs_the_tokens() -> None:
    model = _model()
    x = model.embedding(_window())
    with pytest.raises(UsageError, match=r"needs the tokens of the window: call block\(x, tokens\)"):
        model.blocks[0](x)
    assert torch.equal(model.blocks[0](x, _window()), model.blocks[0](x, tokens=_window()))


def test_a_model_without_a_separator_has_no_masks() -> None:
    plain, tokens = _model(separator=None), _window()
    x = plain.embedding(tokens)
    assert torch.equal(plain.blocks[0](x), plain.blocks[0](x, tokens))
    assert not torch.equal(plain(tokens), _model()(tokens))
    masked, unmasked = (_attention(each).flops_beside_weights() for each in (_model(), plain))
    assert masked == 2 * unmasked


# Construction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [-1, 40, True, 1.0, "0"])
def test_wrong_separators_are_refused(separator: Any) -> None:
    with pytest.raises(SettingsError, match="gpt with separator = .*: allowed are None and the tokens 0 to 39"):
        GPTConfig(**SHAPE, separator=separator)


def takes_separator(width: int = 8, separator: int | None = None) -> nn.Module:
    """Return a module that keeps the separator, as a factory of a user would."""
    module = nn.Linear(width, width)
    module.separator = separator  # type: ignore[assignment]
    return module


def takes_anything(**options: Any) -> nn.Module:
    """Return a module that ignores its options."""
    return nn.Linear(1, 1)


def test_models_of_data_with_a_separator() -> None:
    model = build(ModelSettings(width=16, heads=2), vocab_size=256, separator=7)
    assert isinstance(model, GPT) and model.config.separator == 7
    without = build(ModelSettings(width=16, heads=2), vocab_size=256)
    assert isinstance(without, GPT) and without.config.separator is None
    own = ModelSettings(factory=f"{__name__}:takes_separator")
    assert build(own, vocab_size=256, separator=7).separator == 7 and build(own, vocab_size=256).separator is None


@pytest.mark.parametrize(
    "settings, said",
    [
        (ModelSettings("mlp"), "model mlp reads no tokens; allowed are models of the GPT family"),
        (ModelSettings("convnet"), "model convnet reads no tokens"),
        (ModelSettings(factory=f"{__name__}:takes_anything"), r"has no parameter separator \(it has options\)"),
        (
            ModelSettings(factory=f"{__name__}:takes_separator", options={"separator": 1}),
            "model.options.separator = 1 with data.document_masks = true",
        ),
    ],
)
def test_models_without_documents_are_refused(settings: ModelSettings, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as found:
        build(settings, vocab_size=256, separator=0)
    assert found.value.exit_code == 2
