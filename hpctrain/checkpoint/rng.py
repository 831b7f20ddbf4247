"""Capture and restore of the random number generators of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.states import from_numpy, to_numpy
from hpctrain.errors import CheckpointError
from hpctrain.util.text import printable, shorten


def capture_rng() -> dict[str, Any]:
    """Return the RNG states of torch, of NumPy's global generator and of Python.

    The state of torch's current GPU is included if a GPU is in use.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": to_numpy(torch.get_rng_state()).copy(),
        "python": [version, list(words), gauss],
        "numpy": _numpy_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = to_numpy(torch.cuda.get_rng_state()).copy()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore captured RNG states; a generator without a captured state is not changed."""
    try:
        setters = [make(state[name]) for name, make in _CHECKED.items() if name in state]
        for set_one in setters:
            set_one()
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(state["cuda"]))
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
        reason = shorten(printable(error), 120)
        raise CheckpointError(f"the state of the random number generators does not fit: {reason}") from error


# Each state is first set on a separate generator: an index beyond the state's end makes NumPy read
# other memory.


def _torch(saved: Any) -> Callable[[], object]:
    state = _bytes(saved)
    torch.Generator().set_state(state)
    return lambda: torch.set_rng_state(state)


def _python(saved: Any) -> Callable[[], object]:
    version, words, gauss = saved
    state = (version, tuple(words), gauss)
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("gauss of python is no number")
    random.Random().setstate(state)
    return lambda: random.setstate(state)


def _numpy(saved: Any) -> Callable[[], object]:
    key, position = np.array(saved["key"], dtype=np.uint32), saved["position"]
    if saved["kind"] != "MT19937" or key.shape != (_WORDS,) or type(position) is not int:
        raise ValueError(f"numpy: expected MT19937 with {_WORDS} words")
    if not 0 <= position <= _WORDS or saved["has_gauss"] not in (0, 1) or not isinstance(saved["gauss"], (int, float)):
        raise ValueError(f"numpy: expected a position from 0 to {_WORDS}")
    state = (saved["kind"], key, position, saved["has_gauss"], float(saved["gauss"]))
    return lambda: np.random.set_state(state)


def _bytes(saved: Any) -> torch.Tensor:
    if not isinstance(saved, np.ndarray) or saved.dtype != np.uint8 or saved.ndim != 1:
        raise ValueError("expected an array of bytes")
    return from_numpy(saved, "uint8")


_WORDS = 624
_CHECKED = {"torch": _torch, "python": _python, "numpy": _numpy}


def _numpy_state() -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "kind": str(kind),
        "key": np.asarray(key).tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }
