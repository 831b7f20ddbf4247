"""State that the checkpoint benchmark saves: a given size, equal on all ranks, every value compared."""

from __future__ import annotations

import pytest
import torch
from saving.state import LEAST, MOMENTS, difference, make, shape_of

from hpctrain.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize("nbytes", [MIB, 3 * MIB, 16 * MIB, 64 * MIB, 512 * MIB, 8192 * MIB])
def test_parameters_and_moments_take_the_requested_bytes(nbytes: int) -> None:
    shape = shape_of(nbytes)
    short = nbytes - 12 * shape.parameters
    assert 0 <= short < 12 * (2 * shape.width + 1)  # one more token would exceed the size
    assert shape.vocab_size >= 1 and shape.width == 64 * shape.layers


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match=f"of {LEAST - 1} bytes is too small to measure: at least {LEAST}"):
        shape_of(LEAST - 1)


def test_a_state_has_everything_in_float32_and_its_moments_are_not_zero() -> None:
    state = make(MIB)
    assert state.nbytes == 12 * state.model.config.parameters
    names = [name for name, _ in state.tensors()]
    assert len(set(names)) == len(names) == 3 * len(list(state.model.parameters()))
    assert {name.rpartition("/")[2] for name in names if name.startswith("optimizer/")} == set(MOMENTS)
    assert all(tensor.dtype == torch.float32 and bool(tensor.any()) for _, tensor in state.tensors())


def test_only_equal_seeds_make_equal_values() -> None:
    assert difference(make(MIB), make(MIB)) == ""
    assert difference(make(MIB, seed=1), make(MIB)) == "model/embedding.token.weight is not what was saved"


def test_one_wrong_value_is_named() -> None:
    state, other = make(MIB), make(MIB)
    name, tensor = list(state.tensors())[-1]
    tensor.view(-1)[-1] += 1e-6
    assert difference(state, other) == f"{name} is not what was saved"


def test_overwritten_values_are_restored_through_state_dicts() -> None:
    state, target = make(MIB), make(MIB, seed=1)
    target.spoil()
    assert all(bool((tensor == -1).all()) for _, tensor in target.tensors())
    target.take(state.dicts())
    assert difference(target, state) == ""
