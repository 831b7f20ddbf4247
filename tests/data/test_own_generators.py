"""Generators that samplers own: their states, restored, give the same numbers; others are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data.own_generators import own_generator
from hpctrain.errors import CheckpointError

BITS = ["PCG64", "PCG64DXSM", "SFC64", "MT19937", "Philox"]


def numbers(one: Any) -> list[float]:
    if isinstance(one, torch.Generator):
        return [float(each) for each in torch.rand(7, generator=one)]
    draw: Callable[[], float] = one.gauss if isinstance(one, random.Random) else one.standard_normal
    return [draw(0, 1) if isinstance(one, random.Random) else draw() for _ in range(7)]  # type: ignore[call-arg]


def made(kind: str) -> Any:
    if kind in BITS:
        return np.random.Generator(getattr(np.random, kind)(5))
    return {"torch": torch.Generator, "legacy": lambda: np.random.RandomState(5), "Python": lambda: random.Random(5)}[
        kind
    ]()


@pytest.mark.parametrize("kind", [*BITS, "torch", "legacy", "Python"])
def test_a_restored_state_gives_the_same_numbers(kind: str) -> None:
    one, other = made(kind), made(kind)
    numbers(one)
    found, target = own_generator(one), own_generator(other)
    assert found is not None and target is not None
    state = found.get_state()
    expected = numbers(one)
    target.set_state(state)
    assert numbers(other) == expected


@pytest.mark.parametrize("other", [None, 3, np.random, random, random.SystemRandom()])
def test_other_objects_are_no_generators(other: object) -> None:
    assert own_generator(other) is None


@pytest.mark.parametrize(
    "kind, change",
    [
        ("MT19937", {"state": {"key": [0] * 624, "pos": 700}}),
        ("MT19937", {"state": {"key": [0] * 3, "pos": 0}}),
        ("Philox", {"buffer_pos": 9}),
        ("PCG64", {"bit_generator": "SFC64"}),
        ("legacy", {"state": {"key": [0] * 624, "pos": -1}}),
        ("PCG64", {"state": 4}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(kind: str, change: dict[str, Any]) -> None:
    generator = own_generator(made(kind))
    assert generator is not None
    state = {**json.loads(generator.get_state().numpy().tobytes()), **change}
    with pytest.raises(CheckpointError, match="state of a sampler's generator does not fit"):
        generator.set_state(torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8))
