"""Optimizers that need whole parameters: their owners update them as one process does, and have all of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.shards import VARIANTS, communicator
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.sharding import lay_out
from hpctrain.parallel.whole_updates import assign_owners
from hpctrain.parallel.wrap import attach

STEPS, SAMPLES, WIDTH = 5, 12, 6


class Model(nn.Module):
    """Matrices of several shapes, an embedding, vectors, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, WIDTH)
        self.first = nn.Linear(WIDTH, 11)
        self.norm = nn.LayerNorm(11)
        self.second = nn.Linear(11, 5, bias=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch]`` of integers to ``[batch, 5]``."""
        return self.second(torch.tanh(self.norm(self.first(self.embed(x)))))  # type: ignore[no-any-return]


class Shampoo(torch.optim.Optimizer):
    """Preconditioner of each dim of a gradient, as in Shampoo without exponents, and momentum of vectors."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"])
        return loss

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None and gradient.shape == parameter.shape  # it is not skipped if it has none
        state["step"] = state.get("step", 0) + 1
        for dim, size in enumerate(gradient.shape):
            rows = gradient.transpose(0, dim).reshape(size, -1)
            statistics = state.setdefault(f"statistics.{dim}", torch.eye(size, dtype=gradient.dtype))
            statistics += rows @ rows.T
            gradient = torch.linalg.solve(statistics, rows).reshape(gradient.transpose(0, dim).shape).transpose(0, dim)
        parameter.sub_(gradient, alpha=lr)


class Nested(torch.optim.Adafactor):
    """Optimizer whose step calls that of its base class, which runs all hooks again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)
        return loss


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if each.ndim != 2 or "embed" in name]


def _used(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if name != "unused"]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(_matrices(model), lr=0.1), torch.optim.AdamW(_others(model), lr=0.01)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": _matrices(model), "lr": 0.1}, {"params": _others(model), "weight_decay": 0.1}]
    return [torch.optim.Adafactor(groups)]


def shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Shampoo(_used(model))]


def nested(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Nested(_used(model))]


OPTIMIZERS = [muon, adafactor, shampoo, nested]
NAMES = ("Shampoo", "Nested")
STRATEGIES = [
    *(pytest.param(name, marks=pytest.mark.ranks(2, 3)) for name in ("zero1", "zero2", "fsdp", "fsdp_alone")),
    pytest.param("hybrid", marks=pytest.mark.ranks(4)),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (SAMPLES,), generator=generator), torch.randn(SAMPLES, 5, generator=generator).double()


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def alone(make: Callable[[nn.Module], list[torch.optim.Optimizer]], size: int) -> tuple[Any, ...]:
    """Train in one process with the mean of the gradients of ``size`` parts; return losses, weights, optimizers."""
    model = Model()
    optimizers, losses = make(model), []
    for step in range(STEPS):
        parts = zip(*(each.chunk(size) for each in batch(step)))
        losses.append(0.0)
        for inputs, targets in parts:
            loss = _loss(model, inputs, targets) / size
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model, optimizers


def states(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> Iterator[tuple[str, Any]]:
    for number, optimizer in enumerate(optimizers):
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{number} {name} {key}", value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_updates_equal_those_of_one_process(comm: Any, name: str, make: Any) -> None:
    expected, plain, plain_optimizers = alone(make, comm.size)
    with communicator(comm, VARIANTS[name]) as own:
        model = Model()
        strategy: Any = attach(model, own, VARIANTS[name].settings(whole_parameters=NAMES))
        optimizers = make(model)
        losses = []
        for step in range(STEPS):
            loss = _loss(model, *(each.chunk(own.size)[own.rank] for each in batch(step)))
            loss.backward()
            strategy.clip_grad_norm(0.5)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(own.all_reduce(loss.detach(), "average").item())
        assert losses == pytest.approx(expected, rel=1e-12)
        with strategy.unshard():
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        for key, value in plain.state_dict().items():
            assert torch.allclose(weights[key], value, rtol=1e-9, atol=1e-12), key
        whole = [one for one in optimizers if not isinstance(one, torch.optim.AdamW)]
        _check_states(own, strategy, dict(states(whole, model)), dict(states(plain_optimizers[: len(whole)], plain)))
        strategy.detach()


def _check_states(own: Any, strategy: Any, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that each whole state exists on one rank of a replica, and that the ranks have similar amounts."""
    group = strategy.norm_groups()[0]
    everyone = group.all_gather_object(found)
    names = [name for each in everyone for name in each]
    assert sorted(names) == sorted(expected)  # none exists twice
    sizes = [sum(value.numel() for value in each.values() if isinstance(value, Tensor)) for each in everyone]
    assert max(sizes) < sum(sizes)  # no rank has all of them
    together = {name: value for each in everyone for name, value in each.items()}
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert together[name].shape == value.shape
            assert torch.allclose(together[name], value, rtol=1e-9, atol=1e-12), name
        else:
            assert together[name] == value


def test_owners_have_similar_numbers_of_elements() -> None:
    numels = [12, 3, 48, 48, 12, 7, 36]
    assert assign_owners(numels, [0, 0]) == [1, 1, 0, 1, 1, 1, 0]
    for ranks in (1, 2, 3, 5, 16):
        owners = assign_owners(numels, [0] * ranks)
        loads = [sum(n for n, owner in zip(numels, owners) if owner == rank) for rank in range(ranks)]
        assert sum(loads) == sum(numels) and max(loads) <= sum(numels) / ranks + max(numels)
    assert assign_owners([5, 4], [3, 100, 0]) == [2, 0]  # the later ones respect the earlier ones


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_holders_of_a_parameter_are_the_ranks_whose_ranges_are_not_empty(ranks: int) -> None:
    layout = lay_out([5, 0, 100, 1, 33], ranks, 4)
    for number in range(5):
        expected = [
            (rank, held.begin, held.end)
            for rank in range(ranks)
            if (held := layout.held(rank)[number]).begin < held.end
        ]
        assert list(layout.holders(number)) == expected


def _trained(comm: Any, make: Any, **settings: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = Model()
    strategy = attach(model, comm, VARIANTS["fsdp"].settings(whole_parameters=NAMES, **settings))
    optimizer = make(model)[0]
    _loss(model, *batch(comm.rank)).backward()
    return model, strategy, optimizer


@pytest.mark.ranks(2)
def test_a_closure_computes_the_gradients_before_they_are_exchanged(own: Any) -> None:
    weights = []
    for closes in (False, True):
        model, strategy, optimizer = _trained(own, shampoo)
        if closes:
            optimizer.zero_grad()

        def closure(model: nn.Module = model) -> Tensor:
            loss = _loss(model, *batch(own.rank))
            loss.backward()
            return loss

        returned: Any = optimizer.step(closure) if closes else optimizer.step()
        assert (returned is not None) is closes
        with strategy.unshard():
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
        strategy.detach()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.ranks(2)
def test_hooks_of_the_program_see_shards_and_gradients_stay(own: Any) -> None:
    model, strategy, optimizer = _trained(own, adafactor)
    shapes = {name: (each.shape, each.grad is None) for name, each in model.named_parameters()}
    seen = []

    def look(*_: Any) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        assert len(held) == len(shapes)
        seen.append({name: (each.shape, each.grad is None) for name, each in model.named_parameters()})

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    optimizer.step()
    assert seen == [shapes, shapes]
    strategy.detach()


@pytest.mark.ranks(2)
def test_an_update_that_fails_is_undone_at_the_next_pass(own: Any) -> None:
    model, strategy, optimizer = _trained(own, shampoo)
    before = {name: each.shape for name, each in model.named_parameters()}
    update, optimizer.update = optimizer.update, None  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.update = update  # type: ignore[attr-defined]
    _loss(model, *batch(own.rank)).backward()
    assert {name: each.shape for name, each in model.named_parameters()} == before
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == len(before) - 1
    strategy.detach()


@pytest.mark.ranks(2)
def test_optimizers_that_differ_between_ranks_are_refused(own: Any) -> None:
    model, strategy, _ = _trained(own, shampoo)
    held = _used(model)
    with pytest.raises(UsageError, match="optimizer Shampoo holds other parameters on some ranks"):
        Shampoo(held[own.rank :]).step()
    early = Shampoo(held)
    for parameter in held:
        early.state[parameter]["sum"] = torch.zeros_like(parameter)
    with pytest.raises(UsageError, match="optimizer Shampoo has states of parameter .* before its first step"):
        early.step()
    strategy.detach()


@pytest.mark.ranks(2)
def test_parameters_added_later_do_not_move_earlier_ones(own: Any) -> None:
    model = Model()
    strategy = attach(model, own, VARIANTS["zero1"].settings(whole_parameters=NAMES))
    optimizer = Shampoo([model.first.weight])
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [model.second.weight, model.embed.weight]})
        _loss(model, *batch(own.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = own.all_gather_object([optimizer.state.get(each, {}).get("step") for each in model.parameters()])
    assert sorted(filter(None, sum(counts, []))) == [2, 2, 3]
    strategy.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_matrices_that_the_tensor_axis_splits_are_refused(own: Any, data: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    settings = ParallelSettings(data=data, tensor=2, tensor_plan=("0=column", "2=row"))
    strategy = attach(model, own, settings)
    optimizer = torch.optim.Muon([model.get_parameter("0.weight")])
    for call in (optimizer.step, lambda: strategy.check_optimizer(optimizer)):
        with pytest.raises(UsageError, match="optimizer Muon of parameter 0.weight, which parallel.tensor = 2 splits"):
            call()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    strategy.detach()
