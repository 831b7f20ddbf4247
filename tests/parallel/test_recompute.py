"""Recomputation of activations: it changes memory and no result."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.replicas import assert_same, gradients, make_gpt, token_loss, tokens, weights
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT, Block
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.recompute import recompute

WIDTH = 6


class Part(nn.Module):
    """Layer with a tensor by position and one by name, and dropout of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0, *, other: Tensor | None = None) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        self.runs += 1
        x = self.dropout(torch.tanh(self.norm(self.linear(x)) * scale))
        return x if other is None else x + self.dropout(other)


class Parts(nn.Module):
    """Model of two parts with the same second input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = Part()
        self.second = Part()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        return self.second(self.first(x, 0.5), other=x)  # type: ignore[no-any-return]


def make_dropping_gpt() -> nn.Module:
    torch.manual_seed(7)
    return GPT(GPTConfig(vocab_size=31, context=8, layers=2, heads=2, width=16, dropout=0.2, tied=True))


def gpt_loss(model: nn.Module) -> Tensor:
    inputs, targets = tokens()
    return token_loss(model(inputs), targets)


def parts_loss(model: nn.Module) -> Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3))
    return model(x).square().sum()  # type: ignore[no-any-return]


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], type[nn.Module]]
CASES: list[Case] = [(make_dropping_gpt, gpt_loss, Block), (make_gpt, gpt_loss, GPT), (Parts, parts_loss, Part)]


def of(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 3) -> tuple[list[float], Any]:
    """Return losses and last gradients, and the next random numbers of the generator."""
    torch.manual_seed(11)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return [*losses, torch.rand(()).item()], gradients(model)


def saved_bytes(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    """Return the bytes that the forward pass saves for the backward pass besides parameters."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model)
    assert value.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("make, loss, kind", CASES)
def test_losses_gradients_and_statistics_have_the_same_bits(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], kind: type[nn.Module]
) -> None:
    plain, again = make(), make()
    recompute(of(again, kind))
    losses, wanted = trained(plain, loss)
    found, got = trained(again, loss)
    assert found == losses
    assert_same(got, wanted, rtol=0, atol=0)
    assert_same(weights(again), weights(plain), rtol=0, atol=0)  # with the running statistics of batch norms


@pytest.mark.parametrize("make, loss, kind", CASES)
def test_less_memory_is_saved_for_backward(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], kind: type[nn.Module]
) -> None:
    model = make()
    before = saved_bytes(model, loss)
    undo = recompute(of(model, kind))
    assert saved_bytes(model, loss) < before / 2
    undo()
    assert saved_bytes(model, loss) == before


def test_forward_runs_twice_in_training_and_once_elsewhere() -> None:
    model = Parts()
    recompute([model.first])
    parts_loss(model).backward()
    assert (model.first.runs, model.second.runs) == (2, 1)
    with torch.no_grad():
        parts_loss(model)
    model.eval()
    parts_loss(model).backward()
    assert model.first.runs == 4


def test_hooks_are_not_run_again() -> None:
    model, calls = Parts(), []
    recompute([model.first])
    model.first.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.first.register_forward_hook(lambda module, args, result: calls.append("after"))
    model.first.linear.register_forward_hook(lambda module, args, result: calls.append("inside"))
    parts_loss(model).backward()
    assert calls == ["before", "inside", "after", "inside"]


def test_a_module_named_twice_recomputes_once() -> None:
    model = Parts()
    undo = recompute([model.first, model.first])
    kind = type(model.first)
    later = recompute([model.first])
    assert type(model.first) is kind
    parts_loss(model).backward()
    assert model.first.runs == 2
    later()  # the model is unchanged
    parts_loss(model).backward()
    assert model.first.runs == 4
    undo()
    undo()
    parts_loss(model).backward()
    assert model.first.runs == 5 and type(model.first) is Part


def test_nested_modules_may_both_recompute() -> None:
    plain, again = make_dropping_gpt(), make_dropping_gpt()
    recompute([again, *of(again, Block)])
    assert trained(again, gpt_loss)[0] == trained(plain, gpt_loss)[0]
    assert saved_bytes(again, gpt_loss) < saved_bytes(plain, gpt_loss) / 10


def test_names_and_class_names_are_unchanged() -> None:
    model = Parts()
    names = list(model.state_dict()), [name for name, _ in model.named_modules()], repr(model)
    recompute([model.first])
    assert names == (list(model.state_dict()), [name for name, _ in model.named_modules()], repr(model))
    assert isinstance(model.first, Part) and type(model.first).__name__ == "Part"
    assert type(model.first).__qualname__ == Part.__qualname__ and type(model.first).__module__ == __name__


def by_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
def test_copies_recompute_with_their_own_modules(copied: Callable[[nn.Module], Any]) -> None:
    model, plain = Parts(), Parts()
    recompute([model.first])
    twin = copied(model.first)
    twin.linear = nn.Linear(WIDTH, WIDTH, bias=False)
    x = torch.ones(2, WIDTH)
    twin(x).sum().backward()
    assert (twin.runs, model.first.runs) == (2, 0)
    assert twin.linear.weight.grad is not None and model.first.linear.weight.grad is None
    assert type(twin) is type(model.first) is not Part
    assert_same(weights(plain), weights(model))


def test_modules_with_a_replaced_forward_are_refused_unchanged() -> None:
    model = Parts()
    model.second.forward = model.second.forward  # type: ignore[method-assign]
    wanted = "^a module of class Part cannot recompute, as its forward is not its class's: compile or replace it later$"
    with pytest.raises(UsageError, match=wanted) as error:
        recompute([model.first, model.second])
    assert error.value.everywhere and type(model.first) is Part
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    for module in (compiled, torch.jit.script(nn.Linear(2, 2))):
        with pytest.raises(UsageError, match="cannot recompute"):
            recompute([module])


@pytest.mark.gpu
def test_generators_of_the_gpu_are_restored() -> None:
    results = []
    for again in (False, True):
        model = Parts().cuda()
        if again:
            recompute(of(model, Part))
        torch.manual_seed(11)
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)).cuda()
        model.first(x, other=x).sum().backward()
        model.second(x=x, other=x).sum().backward()  # all by name
        results.append((gradients(model), torch.rand((), device="cuda")))
    assert_same(results[1][0], results[0][0], rtol=0, atol=0)
    assert results[1][1] == results[0][1]
