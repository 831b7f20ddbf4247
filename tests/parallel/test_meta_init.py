"""Models on the meta device: materialised with the values of a model built with memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import EACH_MODEL, MAKERS, made
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.meta_init import check_initialisable, initial_values, is_meta, make_buffers, materialise

CPU = torch.device("cpu")


def assert_same_state(one: nn.Module, two: nn.Module) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@EACH_MODEL
def test_the_bits_equal_those_of_a_model_built_with_memory(make: Callable[[], Any]) -> None:
    plain, late = made(make), made(make, "meta")
    assert is_meta(late) and not is_meta(plain)
    names = [name for name, _ in late.named_parameters(remove_duplicate=False)]
    materialise(late, CPU)
    assert not is_meta(late)
    assert_same_state(late, plain)
    assert [name for name, _ in late.named_parameters(remove_duplicate=False)] == names
    assert len(list(late.parameters())) == len(list(plain.parameters()))  # tied parameters are still one tensor


def test_tied_weights_stay_one_tensor_and_its_owners_keep_their_objects() -> None:
    model = made(MAKERS["tied gpt"], "meta")
    held = model.head.weight
    materialise(model, CPU)
    assert model.head.weight is model.embedding.token.weight is held
    assert not held.is_meta and isinstance(held, nn.Parameter) and held.is_leaf


def test_the_first_owner_determines_tied_weights_that_differ() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def initialise(self, name: str, module: nn.Module) -> None:
            """Fill each layer with a different number."""
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, {"first": 1, "second": 2}[name])

    model = made(Tied, "meta")
    materialise(model, CPU)
    assert model.second.weight is model.first.weight and bool((model.first.weight == 1).all())


def test_modules_of_torch_are_initialised_by_reset_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.LayerNorm(4)))

    model = made(make, "meta")
    materialise(model, CPU)
    # The values are those of the same calls on modules in memory, in the same order.
    plain = made(make)
    torch.manual_seed(9)
    for module in (plain[2][0], plain[1], plain[0]):
        module.reset_parameters()
    again = made(make, "meta")
    torch.manual_seed(9)
    materialise(again, CPU)
    assert_same_state(again, plain)
    assert model[1].running_var.tolist() == [1] * 4 and model[1].running_mean.tolist() == [0] * 4
    assert int(model[1].num_batches_tracked) == 0


def test_multihead_attention_is_initialised_by_its_private_reset() -> None:
    model = made(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), "meta")
    materialise(model, CPU)
    attention = model.self_attn
    assert bool((attention.in_proj_bias == 0).all()) and bool((attention.out_proj.bias == 0).all())
    bound = (6 / (8 + 24)) ** 0.5  # Xavier's, of the projection of 8 to 3 x 8
    assert 0.5 * bound < float(attention.in_proj_weight.detach().abs().max()) <= bound
    assert model(torch.randn(3, 2, 8)).isfinite().all()


class Stubborn(nn.Module):
    """Module with a parameter, or a buffer, and no method to initialise it."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("table", torch.ones(3))
        else:
            self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
def test_modules_that_cannot_be_initialised_are_named(buffer: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Stubborn(buffer)))

    check_initialisable(made(make))  # in memory it needs no initialisation
    model = made(make, "meta")
    for attempt in (lambda: check_initialisable(model), lambda: materialise(model, CPU)):
        with pytest.raises(UsageError) as error:
            attempt()
        assert str(error.value) == (
            "module 1.1 of class Stubborn is on the meta device and has no reset_parameters() to draw its values: "
            "write one, or give the model initialise(name, module)"
        )
        assert error.value.everywhere
    assert all(parameter.is_meta for parameter in model.parameters()), "something was drawn before all was checked"
    with pytest.raises(UsageError, match="module of the whole model of class Stubborn is on the meta device"):
        check_initialisable(made(lambda: Stubborn(buffer), "meta"))


def test_the_model_may_initialise_modules_that_cannot_do_so() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Stubborn()
            self.seen: list[str] = []

        def initialise(self, name: str, module: nn.Module) -> None:
            """Fill what can be filled."""
            self.seen.append(name)
            if isinstance(module, Stubborn):
                nn.init.constant_(module.scale, 7)

    model = made(Drawing, "meta")
    materialise(model, CPU)
    assert model.inside.scale.tolist() == [7, 7, 7] and "inside" in model.seen


def test_buffers_get_memory_and_keep_dtype_and_persistence() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(3))
        model.register_buffer("steps", torch.zeros(2, dtype=torch.int64), persistent=False)
        model.register_buffer("nothing", None)
        return model

    model = made(make, "meta")
    make_buffers(model, CPU)
    assert [(name, tensor.dtype, tensor.device) for name, tensor in model.named_buffers()] == [
        ("steps", torch.int64, CPU),
        ("0.running_mean", torch.float32, CPU),
        ("0.running_var", torch.float32, CPU),
        ("0.num_batches_tracked", torch.int64, CPU),
    ]
    assert "steps" not in model.state_dict() and model.nothing is None


def test_a_model_in_memory_is_unchanged() -> None:
    model = made(MAKERS["mlp"])
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    torch.manual_seed(77)
    materialise(model, CPU)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


def test_drawing_gives_memory_only_for_its_duration() -> None:
    model = made(MAKERS["gpt"], "meta")
    plain = made(MAKERS["gpt"])
    module = model.get_submodule("blocks.1.attention.qkv")
    values = initial_values(model, "blocks.1.attention.qkv", module, CPU)
    assert list(values) == ["weight", "bias"]
    for attribute, value in values.items():
        assert torch.equal(value, plain.get_parameter(f"blocks.1.attention.qkv.{attribute}"))
        assert not value.requires_grad
    assert is_meta(module) and all(isinstance(each, nn.Parameter) for each in module.parameters())
    assert initial_values(model, "blocks", model.blocks, CPU) == {}


def test_drawing_frees_its_memory_after_an_error() -> None:
    class Failing(nn.Linear):
        def reset_parameters(self) -> None:
            """Fail unless on the meta device."""
            if not self.weight.is_meta:
                raise ValueError("no entropy")

    model = made(lambda: Failing(2, 2), "meta")
    before = dict(model.named_parameters(recurse=False))
    with pytest.raises(ValueError, match="no entropy"):
        initial_values(model, "", model, CPU)
    assert all(getattr(model, name) is parameter for name, parameter in before.items())


def test_parameters_keep_requires_grad_and_dtype() -> None:
    def make() -> nn.Module:
        model = nn.Linear(3, 3, dtype=torch.float64)
        model.bias.requires_grad_(False)
        return model

    model = made(make, "meta")
    materialise(model, CPU)
    parameters: list[Tensor] = list(model.parameters())
    assert [each.dtype for each in parameters] == [torch.float64] * 2
    assert [each.requires_grad for each in parameters] == [True, False]
