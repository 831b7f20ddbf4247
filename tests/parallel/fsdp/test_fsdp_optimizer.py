"""Callbacks around updates of shards, whichever optimizer makes them; other optimizers are not affected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel import hooks as update_hooks
from hpctrain.parallel.hooks import OptimizerHooks


class Watched:
    """Shards that represent a model's parameters, and a record of the callbacks around their updates."""

    def __init__(self, log: list[str], name: str) -> None:
        self.name = name
        self.old = {f"{name}.{part}": nn.Parameter(torch.ones(4)) for part in ("weight", "bias")}
        self.shards = [nn.Parameter(torch.ones(2)) for _ in self.old]
        for parameter in [*self.old.values(), *self.shards]:
            parameter.grad = torch.ones_like(parameter)
        replaced = {part: weakref.ref(old) for part, old in self.old.items()}
        before, after = (lambda _: log.append(f"{name} before")), (lambda _: log.append(f"{name} after"))
        self.owners = OptimizerHooks(self.shards, replaced, (), before, after)
        self.hooks = self.owners.attach()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def watched(log: list[str]) -> Iterator[Watched]:
    made = Watched(log, "one")
    yield made
    made.hooks.remove()


@pytest.fixture
def other(log: list[str]) -> Iterator[Watched]:
    made = Watched(log, "two")
    yield made
    made.hooks.remove()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


class Telling(torch.optim.SGD):
    """Optimizer that records when the update itself is made."""

    def __init__(self, log: list[str], parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.log = log

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.log.append("update")


def test_callbacks_run_before_and_after_an_update(watched: Watched, log: list[str]) -> None:
    owners = OptimizerHooks(
        watched.shards, {}, ("Telling",), lambda _: log.append("before"), lambda _: log.append("after")
    )
    watched.hooks.remove()
    hooks = owners.attach()
    Telling(log, watched.shards).step()
    hooks.remove()
    assert log == ["before", "update", "after"]
    Telling(log, watched.shards).step()
    assert log == ["before", "update", "after", "update"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_callbacks_run_for_an_optimizer_of_some_of_the_shards(watched: Watched, log: list[str], kind: Any) -> None:
    optimizer = kind([parameter(), watched.shards[1]], lr=0.1)
    optimizer.step()
    assert log == ["one before", "one after"]
    assert watched.owners.check(optimizer)


def test_optimizers_of_other_models_are_not_affected(watched: Watched, log: list[str]) -> None:
    own = parameter()
    optimizers = [torch.optim.SGD([own], lr=0.1), torch.optim.Adafactor([own]), torch.optim.LBFGS([own])]
    for optimizer in optimizers:
        optimizer.step(lambda: torch.zeros(()))
        assert not watched.owners.check(optimizer)
    assert log == [] and not torch.equal(own.detach(), torch.ones(3))


def test_two_models_have_separate_callbacks(watched: Watched, other: Watched, log: list[str]) -> None:
    torch.optim.SGD(watched.shards, lr=0.1).step()
    torch.optim.SGD(other.shards, lr=0.1).step()
    assert log == ["one before", "one after", "two before", "two after"]
    log.clear()
    torch.optim.SGD([*watched.shards, *other.shards], lr=0.1).step()
    assert sorted(log[:2]) == ["one before", "two before"] and sorted(log[2:]) == ["one after", "two after"]


def test_a_group_that_is_added_later_is_recognised(watched: Watched, log: list[str]) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.step()
    assert log == [] and not watched.owners.check(optimizer)
    optimizer.add_param_group({"params": [watched.shards[0]], "lr": 0.5})
    optimizer.step()
    assert log == ["one before", "one after"] and watched.owners.check(optimizer)
    optimizer.add_param_group({"params": [watched.old["one.bias"]]})
    with pytest.raises(UsageError, match="parameter one.bias"):
        optimizer.step()


def test_the_old_parameters_are_freed_and_not_confused_with_new_ones(watched: Watched, log: list[str]) -> None:
    witness = weakref.ref(watched.old["one.weight"])
    watched.old.clear()
    gc.collect()
    assert witness() is None
    # New objects have the addresses of the old ones, but are different objects.
    torch.optim.SGD([parameter() for _ in range(100)], lr=0.1).step()
    assert log == []


def test_a_freed_model_gets_no_callbacks(log: list[str]) -> None:
    gone = Watched(log, "gone")
    optimizer = torch.optim.SGD(gone.shards, lr=0.1)
    del gone
    gc.collect()
    optimizer.step()
    assert log == [] and all(hooks.owner() is not None for hooks in update_hooks._hooks)
