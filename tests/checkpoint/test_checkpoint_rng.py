"""Random number generators: after a restore they continue without a gap."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.errors import CheckpointError


def draw() -> tuple[object, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue_after_a_restore() -> None:
    random.gauss(0, 1), np.random.randn()  # both store a second number for the next call
    state = capture_rng()
    expected = draw()
    assert draw() != expected
    restore_rng(state)
    assert draw() == expected


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_rng({"torch": np.zeros(3, dtype=np.uint8)})
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_rng({"python": [3, [1], None]})
    restore_rng({})
