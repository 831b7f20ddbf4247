"""Initial weights: they follow from the seed and a module's name alone, also for a module initialised by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import EACH_MODEL, MAKERS, made
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.errors import UsageError
from hpctrain.models.weights import draw_weights, fill, generator_for, initialise_as_torch


def same(one: nn.Module, two: nn.Module) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values())]


# Seeds ----------------------------------------------------------------------------------------------------------------


def test_a_generator_is_determined_by_seed_and_name() -> None:
    def numbers(seed: int, name: str) -> list[int]:
        torch.manual_seed(seed)
        return torch.randint(2**31, (4,), generator=generator_for(name)).tolist()

    assert numbers(1, "head") == numbers(1, "head")
    assert len({tuple(numbers(seed, name)) for seed in (1, 2, 11) for name in ("head", "1head", "body", "")}) == 12


@EACH_MODEL
def test_only_the_seed_determines_the_weights(make: Callable[[], Any]) -> None:
    one, two, other = made(make), made(make), made(make, seed=6)
    torch.manual_seed(5)
    torch.randn(100)
    assert all(same(one, two)) and all(same(one, make()))
    drawn = [name for name, parameter in one.named_parameters() if len(parameter.unique()) > 1]
    assert drawn and not any(torch.equal(one.get_parameter(name), other.get_parameter(name)) for name in drawn)


@EACH_MODEL
def test_torchs_global_generator_is_not_used(make: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


@EACH_MODEL
def test_no_two_modules_have_the_same_weights(make: Callable[[], Any]) -> None:
    drawn = [p.flatten()[:4] for p in made(make).parameters() if p.ndim > 1]
    assert len({tuple(piece.tolist()) for piece in drawn}) == len(drawn) > 2


# A single module ------------------------------------------------------------------------------------------------------


class OnlyMeta(TorchDispatchMode):
    """Mode in which an operation fails that has a result in memory: values are drawn on the host."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, (tuple, list)) else [found]
        assert all(one.is_meta for one in results if isinstance(one, torch.Tensor)), func
        return found


@EACH_MODEL
def test_on_meta_no_memory_is_allocated_and_no_number_is_drawn(make: Callable[[], Any]) -> None:
    with OnlyMeta() as mode:
        model = made(make, device="meta")
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        for name, module in model.named_modules():
            model.initialise(name, module)
    assert mode.calls
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [parameter.shape for parameter in model.parameters()] == [p.shape for p in made(make).parameters()]


@EACH_MODEL
@pytest.mark.parametrize("step", [1, -1])
def test_modules_materialised_later_have_the_weights_of_the_whole_model(make: Callable[[], Any], step: int) -> None:
    whole, late = made(make), made(make, device="meta")
    for name, module in list(late.named_modules())[::step]:
        if any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            for tensor in module.state_dict().values():
                tensor.fill_(9)
        late.initialise(name, module)
    assert all(same(whole, late)) and len(late.state_dict()) == len(whole.state_dict())


@EACH_MODEL
def test_initialising_one_module_changes_no_other(make: Callable[[], Any]) -> None:
    whole, part = made(make), made(make)
    name = next(name for name, module in part.named_modules() if isinstance(module, nn.Linear))
    for parameter in part.parameters():
        nn.init.constant_(parameter, 9)
    part.initialise(name, part.get_submodule(name))
    for key, parameter in part.named_parameters():
        expected = whole.get_parameter(key) if key.startswith(name + ".") else torch.full_like(parameter, 9)
        assert torch.equal(parameter, expected), key


@EACH_MODEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_dtype_changes_only_the_rounding(make: Callable[[], Any], dtype: torch.dtype) -> None:
    whole, other = made(make).to(dtype), made(make, device="meta").to(dtype).to_empty(device="cpu")
    for name, module in other.named_modules():
        other.initialise(name, module)
    assert all(same(whole, other)) and {p.dtype for p in other.parameters()} == {dtype}


def test_a_strided_tensor_gets_the_same_numbers() -> None:
    strided, plain = torch.zeros(40, 30).t(), torch.zeros(30, 40)
    for tensor in (strided, plain):
        generator = generator_for("x")
        fill(tensor, lambda host: host.normal_(generator=generator))
    assert torch.equal(strided, plain) and plain.std() > 0.9


def test_weights_shared_by_two_modules_are_drawn_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    names: list[str] = []
    draw_weights(model, lambda name, module: names.append(name))
    assert names == ["0"]


# Distributions --------------------------------------------------------------------------------------------------------


def spread(tensor: Tensor) -> tuple[float, float, float]:
    return tensor.mean().item(), tensor.std().item(), tensor.abs().max().item()


@pytest.mark.parametrize(
    "module",
    [nn.Linear(50, 4000), nn.Conv2d(6, 9000, 3), nn.Conv2d(6, 9000, (3, 1), groups=3)],
    ids=["linear", "conv", "groups"],
)
def test_layers_are_distributed_as_in_torch(module: nn.Linear | nn.Conv2d) -> None:
    torch.manual_seed(0)
    module.reset_parameters()
    theirs = [spread(parameter) for parameter in module.parameters()]
    before = [parameter.detach().clone() for parameter in module.parameters()]
    initialise_as_torch("layer", module)
    for parameter, expected, old in zip(module.parameters(), theirs, before):
        assert not torch.isclose(parameter, old, rtol=1e-4).float().mean() > 0.01
        assert spread(parameter) == pytest.approx(expected, rel=0.05, abs=0.01)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.BatchNorm2d(8)], ids=["layer", "batch"])
def test_norms_are_reset(norm: nn.Module) -> None:
    for tensor in norm.state_dict().values():
        tensor.fill_(7)
    initialise_as_torch("norm", norm)
    fresh = type(norm)(8)
    assert all(same(norm, fresh)) and all(parameter.requires_grad for parameter in norm.parameters())


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_module_of_an_unknown_kind_is_refused(name: str) -> None:
    model = made(MAKERS[name])
    with pytest.raises(UsageError, match="module 'extra' is a PReLU, whose weights this model does not know"):
        model.initialise("extra", nn.PReLU())
    model.initialise("extra", nn.ReLU())
