"""Take and set the state of the random number generators of this process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.tensors import from_numpy, to_numpy
from hpctrain.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """Return the states of torch (and of its current GPU, if one is in use), NumPy's global generator and Python's."""
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
    """Set the generators to captured states; one whose state is not there is left alone."""
    try:
        if "torch" in state:
            torch.set_rng_state(from_numpy(state["torch"], "uint8"))
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words), gauss))
        if "numpy" in state:
            saved = state["numpy"]
            key = np.array(saved["key"], dtype=np.uint32)
            np.random.set_state((saved["kind"], key, saved["position"], saved["has_gauss"], saved["gauss"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(from_numpy(state["cuda"], "uint8"))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the state of the random number generators does not fit: {error}") from error


def _numpy_state() -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "kind": str(kind),
        "key": np.asarray(key).tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }
