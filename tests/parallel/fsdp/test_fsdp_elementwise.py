"""Elementwise optimizers, which update a slice like the whole: found by trying all of torch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import ELEMENTWISE, updates_whole

SHAPE, STEPS = (6, 35), 6
CUTS = [1, 53, 140]  # offsets within 210 elements, not at ends of rows
ALL = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
OTHERS = [kind for kind in ALL if kind not in ELEMENTWISE]
REFUSALS = {"Muon": "only supports 2D parameters", "SparseAdam": "does not support dense gradients"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.1}, {}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {}],
    "AdamW": [{"amsgrad": True}, {"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9, "weight_decay": 0.1}, {}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}, {}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}, {}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}],
    "ASGD": [{"t0": 2, "lambd": 0.1}],
}
VARIANTS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CASES = [
    (kind, options, variant)
    for kind in ELEMENTWISE
    for options in OPTIONS.get(kind.__name__, [{}])
    for variant in VARIANTS
    if set(variant) <= set(inspect.signature(kind).parameters)
]


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) or "plain"


def cut(tensor: Tensor) -> list[Tensor]:
    return [group.clone() for group in tensor.reshape(-1).tensor_split(CUTS)]


def update(kind: Any, tensors: list[Tensor], gradients: list[list[Tensor]], options: dict[str, Any]) -> Tensor:
    """Return the parameters, flat, after steps with given gradients."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizer = kind(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step(lambda: torch.tensor(0.0)) if kind is torch.optim.LBFGS else optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def whole_and_slices(kind: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the results of the same gradients for a matrix, and for separate slices of it."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(SHAPE, generator=generator)
    gradients = [torch.randn(SHAPE, generator=generator) * 10 ** (step - 2) for step in range(STEPS)]
    whole = update(kind, [start], [[gradient] for gradient in gradients], options)
    assert not torch.equal(whole, start.reshape(-1))
    parts = [update(kind, [group], [[cut(g)[n]] for g in gradients], options) for n, group in enumerate(cut(start))]
    return whole, torch.cat(parts)


@pytest.mark.parametrize("kind, options, variant", CASES, ids=name_of)
def test_known_optimizers_update_slices_like_the_whole(
    kind: Any, options: dict[str, Any], variant: dict[str, bool]
) -> None:
    whole, slices = whole_and_slices(kind, {**options, **variant})
    nothing = torch.empty(0)  # small parameters leave some ranks without an element of them
    update(kind, [nothing], [[nothing]] * 2, {**options, **variant})
    torch.testing.assert_close(slices, whole, rtol=1e-6, atol=1e-6)
    assert variant.get("fused") or torch.equal(slices, whole)  # vectorised code may round the last elements differently


@pytest.mark.parametrize("kind", OTHERS, ids=name_of)
def test_other_optimizers_of_torch_fail_or_differ(kind: Any) -> None:
    if kind.__name__ in REFUSALS:
        with pytest.raises((RuntimeError, ValueError), match=REFUSALS[kind.__name__]):
            whole_and_slices(kind, {})
    else:
        whole, slices = whole_and_slices(kind, {})
        assert (whole - slices).abs().max() > 1e-4


def test_all_of_torchs_optimizers_are_tried() -> None:
    assert {"Adafactor", "Muon", "LBFGS", "SparseAdam"} == {kind.__name__ for kind in OTHERS}
    assert set(ELEMENTWISE) < set(ALL)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=name_of)
def test_known_optimizers_are_accepted_before_and_after_use(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(1))])
    assert not updates_whole(optimizer)
    optimizer.step()
    assert not updates_whole(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps the instance's step
    assert not updates_whole(optimizer)


@pytest.mark.parametrize("kind", OTHERS, ids=name_of)
def test_other_optimizers_get_whole_parameters_or_are_refused_by_name(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    message = (
        f"^optimizer {kind.__name__} cannot be used .*: its? .*; allowed are ASGD, .*, Muon; use parallel.data = 'ddp'"
    )
    for trusted in ((), ("Other", kind.__name__)):  # no declaration makes it right
        if kind.__name__ in ("Adafactor", "Muon"):
            assert updates_whole(optimizer, trusted)
            continue
        with pytest.raises(UsageError, match=message) as error:
            updates_whole(optimizer, trusted, trusted)
        assert error.value.everywhere and "parallel.elementwise" not in str(error.value)


def test_unknown_optimizers_are_refused_by_name() -> None:
    class Shampoo(torch.optim.Optimizer):
        """Optimizer that is not torch's."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing."""

    optimizer = Shampoo([nn.Parameter(torch.zeros(2, 2))], {})
    with pytest.raises(
        UsageError, match="^optimizer Shampoo .* add 'Shampoo' to parallel.elementwise if .* or to para"
    ):
        updates_whole(optimizer)
    assert not updates_whole(optimizer, ["Other", "Shampoo"])
    assert updates_whole(optimizer, [], ["Shampoo"])


def test_subclasses_are_accepted_if_they_inherit_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch wraps a class's step at the first construction of that class, which has not happened here.
    monkeypatch.setattr(torch.optim.NAdam, "step", inspect.unwrap(torch.optim.NAdam.step))

    class Renamed(torch.optim.NAdam):
        """NAdam under another name."""

    class Own(torch.optim.NAdam):
        def step(self, closure: Any = None) -> None:
            """Do nothing."""

    class Below(Own):
        """Optimizer that inherits the step above."""

    for _ in range(2):
        updates_whole(Renamed([nn.Parameter(torch.zeros(1))]))
        for kind in (Own, Below):
            with pytest.raises(UsageError, match=f"^optimizer {kind.__name__} "):
                updates_whole(kind([nn.Parameter(torch.zeros(1))]))
        updates_whole(Own([nn.Parameter(torch.zeros(1))]), ["Own"])
    with pytest.raises(UsageError, match="^optimizer Below "):
        updates_whole(Below([nn.Parameter(torch.zeros(1))]), ["Own"])
