"""Pipelines of models in the form of Hugging Face's, which are cut at their repeated blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hugging_face_models import BLOCKS, GPT2, Llama, batch, made, plain, trained
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import CallArguments
from hpctrain.parallel.pipeline.layers import ArgumentBinder, find_layers, run_layers
from hpctrain.parallel.wrap import attach

CLOSE = 1e-9  # in float64; the sum over microbatches has another order
LOSSES = 1e-6  # a pipeline sums the losses of its microbatches in float32


@pytest.mark.parametrize("name", ["llama", "tied llama", "gpt2"])
def test_layers_one_after_the_other_compute_what_forward_does(name: str) -> None:
    model = made(name)
    layers = find_layers(model)
    inputs, _ = batch(0)
    result = run_layers(layers, ArgumentBinder(model, layers).bind(CallArguments((), inputs)))
    assert torch.equal(result["logits"], model(**inputs)["logits"])
    assert len(layers) == BLOCKS + 2 and all("forward" not in vars(module) for module in model.modules())


def test_every_module_is_in_the_layer_that_runs_it() -> None:
    model = Llama()
    layers = find_layers(model)
    held = {layer.name: [name for name, _ in layer.module.named_children()] for layer in layers}
    assert held["model.embed_tokens"] == ["model.embed_tokens", "model.rotary", "model.drop"]
    assert held["model.norm"] == ["model.norm", "lm_head"]
    assert [layer.name for layer in layers[1:-1]] == [f"model.layers.{number}" for number in range(BLOCKS)]
    assert model.config.use_cache is False


def test_arguments_that_are_the_same_for_all_blocks_are_sent_once() -> None:
    model = made("llama")
    layers = find_layers(model)
    inputs, _ = batch(0)
    call = ArgumentBinder(model, layers).bind(CallArguments((), inputs))
    state = call.call_first(layers[0])
    assert len(state["tensors"]) == 3 and len(state["calls"]) == BLOCKS  # the mask, and two factors of positions


class Backwards(GPT2):
    """Model that calls its blocks in another order."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        hidden_states = self.wte(input_ids)
        for block in reversed(list(self.h)):
            hidden_states = block(hidden_states)[0]
        return {"logits": self.lm_head(hidden_states)}


class Residual(GPT2):
    """Model whose head also gets the embeddings."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        hidden_states = embedded = self.wte(input_ids)
        for block in self.h:
            hidden_states = block(hidden_states)[0]
        return {"logits": self.lm_head(hidden_states + embedded)}


class Two(GPT2):
    """Model with an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def test_models_with_several_lists_of_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="class Two cannot be cut into stages: .* several lists of blocks, h, other"):
        find_layers(Two())


def test_blocks_in_another_order_are_refused() -> None:
    with pytest.raises(UsageError, match=r"calls the blocks of h in the order \[2\]; allowed are all of them"):
        find_layers(Backwards())


def test_a_model_without_dummy_inputs_needs_layers() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    with pytest.raises(UsageError, match="a model of class Own cannot be cut into stages: write a method layers"):
        find_layers(Own())


@pytest.mark.ranks(2)
def test_what_goes_around_the_blocks_is_an_error(own: Any) -> None:
    torch.manual_seed(1)
    model = Residual().double()
    strategy: Any = attach(model, own, ParallelSettings(pipe=2))
    with pytest.raises(UsageError, match=r"layers\(\) of Residual does not compute what its forward\(\) computes"):
        with torch.no_grad():
            model(**batch(0)[0])
    strategy.detach()


SETTINGS = [
    pytest.param({"pipe": 2}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipe": 2, "schedule": "zb-h1"}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipe": 2, "recompute": True, "partition": "model.layers.1"}, marks=pytest.mark.ranks(2)),
    pytest.param({"pipe": 2, "data": "fsdp"}, marks=pytest.mark.ranks(4)),
    pytest.param({"pipe": 2, "tensor": 2}, marks=pytest.mark.ranks(4)),
]


@pytest.mark.few(6)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "tied llama", "llama"])
def test_training_equals_a_plain_loop(own: Any, shared_tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """The weights are those that one process loads from the checkpoint of the ranks."""
    if name == "gpt2" and "partition" in settings:
        settings = settings | {"partition": "h.1"}
    losses, norms, weights = trained(own, name, ParallelSettings(**settings), shared_tmp_path / "a.h5")
    wanted_losses, wanted_norms, wanted = plain(name)
    assert losses == pytest.approx(wanted_losses, rel=LOSSES) and norms == pytest.approx(wanted_norms, rel=CLOSE)
    assert weights.keys() == wanted.keys() and losses[0] != losses[-1]
    for key, value in weights.items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=CLOSE, msg=key)


@pytest.mark.ranks(2)
def test_a_stage_holds_its_blocks_only(own: Any) -> None:
    model = made("llama")
    strategy: Any = attach(model, own, ParallelSettings(pipe=2, partition="model.layers.1"))
    held = {name for name, _ in model.named_parameters()}
    assert any(".layers.0." in name for name in held) == (own.rank == 0)
    assert ("lm_head.weight" in held) == (own.rank == 1) and ("model.embed_tokens.weight" in held) == (own.rank == 0)
    with torch.no_grad():
        inputs, _ = batch(0)
        torch.testing.assert_close(model(**inputs)["logits"], made("llama")(**inputs)["logits"])
    strategy.detach()


@pytest.mark.ranks(2)
def test_measured_times_are_refused(own: Any) -> None:
    with pytest.raises(UsageError, match="parallel.partition = 'time': layers of a model that is cut at its blocks"):
        attach(made("llama"), own, ParallelSettings(pipe=2, partition="time"), example=batch(0)[0])
