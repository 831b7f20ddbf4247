"""Hooks around a module's forward pass, and at the begin and the end of its backward pass."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.parallel.hooks import after_backward, around_forward, before_backward, cast, differentiable


@pytest.fixture
def log() -> list[str]:
    return []


class Told(torch.autograd.Function):
    """Identity that records when backward passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(ctx.name)
        return gradient, None, None


def told(x: Tensor, log: list[str], name: str) -> Tensor:
    result: Tensor = Told.apply(x, log, name)
    return result


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_tensors_are_found_in_nested_values() -> None:
    one, two, three = leaf(), leaf(), leaf()
    nest = ({"a": one, "b": [torch.ones(1), 5, None]}, (two, OrderedDict(x=three)), "text")
    assert [id(each) for each in differentiable(nest)] == [id(one), id(two), id(three)]
    assert differentiable(None) == differentiable(torch.ones(1)) == differentiable([]) == []


def test_the_backward_hook_precedes_the_backward_of_inner_modules(log: list[str]) -> None:
    x = leaf()
    inside = told(x, log, "inside")
    before_backward({"out": [inside]}, lambda: log.append("came"))
    told(inside, log, "after").sum().backward()
    assert log == ["after", "came", "inside"]


@pytest.mark.parametrize("used", [[0, 2], [2]], ids=["all", "one"])
def test_the_backward_hook_runs_once_for_several_results(log: list[str], used: list[int]) -> None:
    x = leaf()
    results = [told(x, log, "0"), torch.ones(3), told(x, log, "2")]
    before_backward(results, lambda: log.append("came"))
    torch.stack([results[number] for number in used]).sum().backward()
    assert log[0] == "came" and sorted(log[1:]) == [str(number) for number in used]


def test_the_backward_hook_does_not_run_without_gradients(log: list[str]) -> None:
    before_backward([torch.ones(2), None, 3], lambda: log.append("came"))
    after_backward([torch.ones(2), None, 3], lambda: log.append("left"))
    assert log == []


def test_the_end_hook_runs_after_the_gradients_of_all_inputs(log: list[str]) -> None:
    one, two = told(leaf(), log, "before one"), told(leaf(), log, "before two")
    after_backward(((one, torch.ones(3)), {"y": two}), lambda: log.append("left"))
    product = told(one * told(two, log, "inside"), log, "end")
    product.sum().backward()
    assert log.index("left") > log.index("inside") > log.index("end")
    assert log.count("left") == 1 and sorted(log[-2:]) != ["end", "left"]


def test_the_end_hook_does_not_wait_for_inputs_without_gradients(log: list[str]) -> None:
    one, two = leaf(), leaf()
    after_backward([one, two], lambda: log.append("left"))
    (told(one, log, "inside") * 2).sum().backward()
    assert log == ["inside", "left"]


# Forward --------------------------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """Module that adds two values, or raises an error."""

    def forward(self, one: Tensor, *, two: Tensor, fail: bool = False) -> dict[str, Tensor]:
        """Return the sum by name."""
        if fail:
            raise ValueError("refused")
        return {"sum": one + two}


def test_hooks_run_before_and_after_a_module(log: list[str]) -> None:
    module = Adds()
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda module, args: log.append("user's"))
    module.register_forward_hook(lambda module, args, result: log.append("user's after"))
    handles = around_forward(
        module,
        lambda args, kwargs: log.append("before"),
        lambda args, kwargs, result: seen.append((args, kwargs, result)),
    )
    one, two = torch.ones(1), torch.ones(1)
    result = module(one, two=two)
    assert log == ["before", "user's", "user's after"]  # before existing hooks: these see whole parameters, too
    assert [(args, kwargs) for args, kwargs, _ in seen] == [((one,), {"two": two})] and seen[0][2] is result
    for handle in handles:
        handle.remove()
    module(one, two=two)
    assert len(seen) == 1 and log.count("before") == 1


def test_arguments_may_be_replaced() -> None:
    module = Adds()
    around_forward(module, lambda args, kwargs: ((args[0] * 10,), {"two": kwargs["two"] * 100}), lambda *_: None)
    assert module(torch.ones(1), two=torch.ones(1))["sum"].item() == 110


def test_the_end_hook_runs_after_a_failed_forward_pass(log: list[str]) -> None:
    module, seen = Adds(), []
    around_forward(module, lambda args, kwargs: log.append("before"), lambda args, kwargs, result: seen.append(result))
    with pytest.raises(ValueError, match="refused"):
        module(torch.ones(1), two=torch.ones(1), fail=True)
    assert log == ["before"] and seen == [None]


# Casting --------------------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """Object that is not a nested container."""

    x: Tensor


def test_only_floating_point_tensors_are_cast() -> None:
    held = Plain(torch.ones(1))
    values = ([torch.ones(2), torch.ones(2, dtype=torch.float64)], {"n": torch.ones(2, dtype=torch.int64), "p": held})
    found = cast((values, {"flag": True, "none": None, "mask": torch.tensor([True])}), torch.bfloat16)
    floats, others = found[0]
    assert [each.dtype for each in floats] == [torch.bfloat16] * 2
    assert others["n"].dtype is torch.int64 and others["p"] is held and held.x.dtype is torch.float32
    assert found[1]["flag"] is True and found[1]["none"] is None and found[1]["mask"].dtype is torch.bool


def test_gradients_flow_back_through_a_cast() -> None:
    x = leaf()
    (cast([x], torch.bfloat16)[0] * 2).sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32 and x.grad.tolist() == [2, 2, 2]
