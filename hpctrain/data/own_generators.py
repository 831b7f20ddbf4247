"""Generators that a program's samplers own: of torch, NumPy and Python, with states as tensors of bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import CheckpointError

# Bit generators of NumPy, with the index in their state and its largest value: a larger one reads other memory.
_KNOWN: dict[str, tuple[str, int]] = {
    "PCG64": ("", 0),
    "PCG64DXSM": ("", 0),
    "SFC64": ("", 0),
    "MT19937": ("pos", 624),
    "Philox": ("buffer_pos", 4),
}


class Generator(Protocol):
    """Generator whose state is a tensor of bytes."""

    def get_state(self) -> Tensor: ...

    def set_state(self, new_state: Tensor) -> Any: ...


def own_generator(found: object) -> Generator | None:
    """Return an object as a generator; None if it is none, or one whose state cannot be saved."""
    if isinstance(found, torch.Generator):
        return found
    if isinstance(found, np.random.Generator) and type(found.bit_generator).__name__ in _KNOWN:
        return _AsJson(lambda: found.bit_generator.state, lambda state: _set_bits(found.bit_generator, state))
    if isinstance(found, np.random.RandomState):
        return _AsJson(lambda: found.get_state(legacy=False), lambda state: found.set_state(_checked(state)))
    if type(found) is random.Random:
        return _AsJson(found.getstate, lambda state: found.setstate((state[0], tuple(state[1]), state[2])))
    return None


class _AsJson:
    """Generator whose state is plain values, as JSON."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put

    def get_state(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(self._get(), default=_plain).encode()), dtype=torch.uint8)

    def set_state(self, new_state: Tensor) -> None:
        """Set a state. Raises ``CheckpointError`` for one of another kind of generator."""
        try:
            self._put(json.loads(new_state.numpy().tobytes()))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"the state of a sampler's generator does not fit: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"a {type(value).__name__} in the state of a generator")


def _checked(state: Mapping[str, Any]) -> Any:
    """Return the state of a bit generator after checking the index in it; lists become arrays."""
    name, largest = _KNOWN[state["bit_generator"]]
    inner = dict(state["state"])
    if name:
        index = inner[name] if name in inner else state[name]
        if type(index) is not int or not 0 <= index <= largest:
            raise ValueError(f"{name} = {index} is not from 0 to {largest}")
    arrays = {
        key: np.array(value, np.uint32 if key == "key" and name == "pos" else np.uint64)
        for key, value in inner.items()
        if isinstance(value, list)
    }
    if name == "pos" and arrays["key"].shape != (largest,):
        raise ValueError(f"key has the shape {arrays['key'].shape}")
    return {**state, "state": {**inner, **arrays}}


def _set_bits(generator: Any, state: Mapping[str, Any]) -> None:
    found = _checked(state)
    if isinstance(found.get("buffer"), list):
        found["buffer"] = np.array(found["buffer"], np.uint64)
    generator.state = found
