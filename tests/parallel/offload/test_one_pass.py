"""Update in one pass, compared bit for bit with torch's own step and separate passes."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.offload.one_pass import OnePass

SHAPES = [(257, 33), (16,), (1,), (1000, 7), (5, 3, 2), (4096,), (31,)]  # tails of all kinds
SLICE_BYTES = 4 * 1024  # so that some are cut, and others are combined
STEPS = 4

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adam_like(kind: Any, **options: Any) -> Make:
    return lambda groups: kind(groups, lr=0.01, **options)


OPTIMIZERS: dict[str, Make] = {
    "adamw fused": adam_like(torch.optim.AdamW, fused=True),
    "adamw": adam_like(torch.optim.AdamW),
    "adamw foreach maximize": adam_like(torch.optim.AdamW, foreach=True, maximize=True),
    "adamw fused amsgrad": adam_like(torch.optim.AdamW, fused=True, amsgrad=True),
    "adamw tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True),
    "adamw other": adam_like(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6),
    "adam fused": adam_like(torch.optim.Adam, fused=True, maximize=True),
    "adam amsgrad": adam_like(torch.optim.Adam, amsgrad=True),
    "sgd": adam_like(torch.optim.SGD),
    "sgd momentum": adam_like(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "sgd nesterov fused": adam_like(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
    "sgd nesterov foreach": adam_like(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": adam_like(torch.optim.RMSprop, momentum=0.5),
    "adagrad": adam_like(torch.optim.Adagrad),
    "adagrad fused": adam_like(torch.optim.Adagrad, fused=True),
    "adamax": adam_like(torch.optim.Adamax),
}


class Pair:
    """Two equal optimizers, one for torch and one for the pass; weight decay on parameters of two or more dims."""

    def __init__(self, make: Make, slice_bytes: int = SLICE_BYTES, threads: int | None = 2) -> None:
        torch.manual_seed(0)
        self.theirs = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.ours = [nn.Parameter(parameter.detach().clone()) for parameter in self.theirs]
        self.torch, self.own = (make(groups(parameters)) for parameters in (self.theirs, self.ours))
        self.one_pass = OnePass(self.own, slice_bytes, threads)
        self.draw = torch.Generator().manual_seed(1)

    def gradients(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(shape, generator=self.draw).to(dtype) for shape in SHAPES]

    def step(self, scale: float = 1.0, dtype: torch.dtype = torch.float32, target: torch.dtype | None = None) -> None:
        gradients = self.gradients(dtype)
        for parameter, gradient in zip(self.theirs, gradients):
            parameter.grad = gradient.clone().float().mul_(scale)
        self.torch.step()
        copies = [None if target is None else torch.empty(shape, dtype=target) for shape in SHAPES]
        order = list(reversed(range(len(SHAPES))))  # as the host optimizer may have them
        chosen = [[one[number] for number in order] for one in (self.ours, gradients, copies)]
        self.one_pass.step(chosen[0], chosen[1], scale, chosen[2] if target else ())
        for mine, copied in zip(self.ours, copies):
            assert copied is None or copied.equal(mine.detach().to(target))

    def check(self) -> None:
        assert all(one.equal(two) for one, two in zip(self.theirs, self.ours))
        theirs, ours = self.torch.state_dict(), self.own.state_dict()
        assert theirs["param_groups"] == ours["param_groups"]
        assert theirs["state"].keys() == ours["state"].keys()
        for number, state in theirs["state"].items():
            assert list(state) == list(ours["state"][number])
            for name, value in state.items():
                mine = ours["state"][number][name]
                assert value == mine if value is None else value.equal(mine) and value.dtype is mine.dtype, name


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_of_a_pass_have_the_bits_of_torch(name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    for number in range(STEPS):
        pair.step(scale=1.0 if number == 2 else 0.37, target=torch.bfloat16 if number % 2 else torch.float32)
        pair.check()
        for group in (*pair.torch.param_groups, *pair.own.param_groups):  # as a schedule does
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.7)
            else:
                group["lr"] *= 0.7
    assert all(parameter.grad is None for parameter in pair.ours)


@pytest.mark.parametrize("name", ["adamw fused", "sgd momentum", "rmsprop"])
def test_gradients_in_bfloat16_are_converted_to_float32(name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    for scale in (1.0, 0.37, 1.0):
        pair.step(scale, torch.bfloat16, torch.bfloat16)
    pair.check()


@pytest.mark.parametrize("slice_bytes, threads", [(1, 1), (64, 2), (1 << 20, 2), (2000, 3)])
def test_slices_and_threads_change_no_bit(slice_bytes: int, threads: int) -> None:
    pair = Pair(OPTIMIZERS["adamw fused"], slice_bytes, threads)
    for _ in range(3):
        pair.step(0.5)
    pair.check()
    assert pair.one_pass.elements == 2 * sum(parameter.numel() for parameter in pair.ours)  # the first is torch's own
    assert pair.one_pass.seconds > 0


def test_updating_parameters_one_by_one_equals_updating_all_at_once() -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    for _ in range(STEPS):
        gradients = pair.gradients()
        for parameter, gradient in zip(pair.theirs, gradients):
            parameter.grad = gradient.clone()
        pair.torch.step()
        for first in range(0, len(SHAPES), 3):
            pair.one_pass.step(pair.ours[first : first + 3], gradients[first : first + 3])
    pair.check()


def test_states_can_be_exchanged_with_torch_in_both_directions() -> None:
    pair = Pair(OPTIMIZERS["adamw fused"])
    pair.step()
    pair.step()
    theirs, ours = copy.deepcopy(pair.torch.state_dict()), copy.deepcopy(pair.own.state_dict())
    pair.torch.load_state_dict(ours)
    pair.own.load_state_dict(theirs)
    pair.step(0.3)
    pair.check()


def test_given_earlier_options_take_precedence() -> None:
    pair = Pair(OPTIMIZERS["adamw fused"])
    pair.step()
    for name in ("first", "second"):  # by slices, and then by the optimizer's own step
        said = pair.one_pass.options()
        gradients = pair.gradients()
        for parameter, gradient in zip(pair.theirs, gradients):
            parameter.grad = gradient.clone()
        pair.torch.step()
        for optimizer in (pair.torch, pair.own):
            optimizer.param_groups[0]["lr"] = 5.0
        pair.one_pass.step(pair.ours, gradients, options=said)
        pair.check()


def test_parameters_that_cannot_be_sliced_are_also_updated() -> None:
    """Update parameters of float64, and gradients that are not contiguous."""
    for dtype, transposed in ((torch.float64, False), (torch.float32, True)):
        theirs = nn.Parameter(torch.randn(6, 4, dtype=dtype))
        ours = nn.Parameter(theirs.detach().clone())
        optimizer, own = (torch.optim.AdamW([one], fused=True) for one in (theirs, ours))
        one_pass, copied = OnePass(own), torch.empty(6, 4)
        for _ in range(3):
            gradient = torch.randn(4, 6, dtype=dtype).t() if transposed else torch.randn(6, 4, dtype=dtype)
            theirs.grad = gradient.clone(memory_format=torch.contiguous_format) * 0.5
            optimizer.step()
            one_pass.step([ours], [gradient], 0.5, [copied])
            assert ours.equal(theirs) and copied.equal(theirs.detach().float())
        assert one_pass.elements == 0


class Counting(torch.optim.AdamW):
    """Optimizer defined by a user."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])
                    self.state[parameter]["last"] = parameter.grad.clone()


def test_a_users_optimizer_makes_its_own_update_without_concurrency() -> None:
    pair = Pair(adam_like(Counting))
    for _ in range(2):
        pair.step(0.5)
    assert all(one.equal(two) for one, two in zip(pair.theirs, pair.ours))
    assert all(pair.own.state[parameter]["last"].shape == parameter.shape for parameter in pair.ours)
    assert not pair.one_pass.runs_concurrently and Pair(OPTIMIZERS["rmsprop"]).one_pass.runs_concurrently


def test_hooks_gradients_and_groups_are_unchanged() -> None:
    pair = Pair(OPTIMIZERS["rmsprop"])
    called: list[str] = []
    pair.own.register_step_pre_hook(lambda *_: called.append("before"))
    waiting = [torch.ones(shape) for shape in SHAPES]
    before = pair.own.param_groups[0]["params"]
    for parameter, gradient in zip(pair.ours, waiting):
        parameter.grad = gradient
    pair.one_pass.step(pair.ours[:2], pair.gradients()[:2])
    assert all(parameter.grad is gradient for parameter, gradient in zip(pair.ours, waiting))
    assert not called and pair.own.param_groups[0]["params"] is before
    assert set(pair.own.state) == set(pair.ours[:2])


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    with pytest.raises(UsageError, match=r"a parameter of shape \[257, 33\] is not in the optimizer"):
        pair.one_pass.step(pair.theirs[:1], pair.gradients()[:1])


def test_support_for_slices_is_known_from_the_second_update_on() -> None:
    for name, sliced in (("adamw fused", True), ("sgd momentum", True), ("rmsprop", False)):
        pair = Pair(OPTIMIZERS[name])
        assert not any(pair.one_pass.slices(parameter) for parameter in pair.ours)
        pair.step()
        assert {pair.one_pass.slices(parameter) for parameter in pair.ours} == {sliced}


def test_optimizers_are_recognized_after_torch_compile() -> None:
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    wrapped = getattr(torch.optim.AdamW, "_init_group")
    assert hasattr(wrapped, "__wrapped__")  # torch.compile wraps it in every optimizer
    for name in ("adamw fused", "sgd momentum"):
        pair = Pair(OPTIMIZERS[name])
        pair.step()
        assert all(pair.one_pass.slices(parameter) for parameter in pair.ours)


def test_memory_of_a_forgotten_parameter_is_freed() -> None:
    pair = Pair(OPTIMIZERS["adamw fused"])
    pair.step()
    memory = np.zeros(SHAPES[0], dtype=np.float32)
    lives = weakref.ref(memory)
    state = pair.own.state[pair.ours[0]]
    state["exp_avg"] = torch.from_numpy(memory).copy_(state["exp_avg"])
    del memory
    pair.step()
    pair.check()
    state["exp_avg"] = state["exp_avg"].clone()  # as if moved elsewhere
    assert lives() is not None
    pair.one_pass.forget(pair.ours[0])
    assert lives() is None
    pair.step()
    pair.check()


def test_threads_of_the_pass_are_few_and_shared() -> None:
    pairs = [Pair(OPTIMIZERS["adamw fused"], 64) for _ in range(3)]
    for pair in pairs:
        pair.step()
        pair.step()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hpctrain-slices")]
    assert names.count("hpctrain-slices-1") <= 2  # one for each number of threads above one in these tests
