"""Optimizer states move to given memory, keep their values, and stay there."""

from __future__ import annotations

import copy
import gc

import torch
from torch import Tensor, nn

from hpctrain.parallel.offload.memory import PlacedStates


class Shelf:
    """Allocator that recognises its own memory."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.given.append(torch.full((numel,), float("nan"), dtype=dtype))
        return self.given[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() == one.data_ptr() for one in self.given)


def trained(steps: int = 1) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (1,), (7,))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    for number in range(steps):
        step(parameters, optimizer, number)
    return parameters, optimizer


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, number + 0.5)
    optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a) for a, b in pairs)


def test_states_move_with_their_values_and_are_updated_where_they_are() -> None:
    (parameters, optimizer), (others, plain) = trained(), trained()
    shelf, before = Shelf(), values(optimizer)
    states = PlacedStates(optimizer, parameters[:2], shelf)  # noqa: F841 (a reference keeps its hook)
    assert same(values(optimizer), before) and len(shelf.given) == 4
    for parameter in parameters:
        state = optimizer.state[parameter]
        moved = parameter is not parameters[2]
        assert shelf.holds(state["exp_avg"]) is moved and shelf.holds(state["exp_avg_sq"]) is moved
        assert not shelf.holds(state["step"]) and state["exp_avg"].shape == parameter.shape
    step(parameters, optimizer, 1)
    step(others, plain, 1)
    assert same(values(optimizer), values(plain)) and shelf.holds(optimizer.state[parameters[0]]["exp_avg"])


def test_states_stay_in_their_memory_when_others_are_loaded() -> None:
    parameters, optimizer = trained(0)
    shelf = Shelf()
    states = PlacedStates(optimizer, parameters, shelf)
    assert not shelf.given
    step(parameters, optimizer, 0)
    states.drain(parameters[:1])
    assert len(shelf.given) == 2
    states.drain()
    assert len(shelf.given) == 6
    _, plain = trained(3)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert len(shelf.given) == 6 and same(values(optimizer), values(plain))
    assert all(shelf.holds(optimizer.state[parameter]["exp_avg"]) for parameter in parameters)
    del states
    gc.collect()
    optimizer.load_state_dict(plain.state_dict())
    assert not shelf.holds(optimizer.state[parameters[0]]["exp_avg"])


def test_states_loaded_before_the_first_update_are_also_moved() -> None:
    parameters, optimizer = trained(0)
    _, plain = trained(2)
    shelf = Shelf()
    states = PlacedStates(optimizer, parameters, shelf)
    optimizer.load_state_dict(plain.state_dict())
    assert len(shelf.given) == 6 and same(values(optimizer), values(plain)) and states is not None
