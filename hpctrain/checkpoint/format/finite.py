"""Values that a tensor of a checkpoint may have: NaN and infinity in a model must not reach a file.

A writer process checks bytes here with NumPy, because it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.format import layout
from hpctrain.errors import NonFiniteError

_STEP = 1 << 18  # elements checked at a time: they fit into the cache of a core

# Whether all values are finite, and whether none is NaN.
_Found = tuple[bool, bool]


class Allowed(Enum):
    """Values that a tensor may have. Infinity in a buffer may be intended (an attention mask), NaN never is."""

    ANY = "any"
    INFINITE = "infinite"
    FINITE = "finite"

    @classmethod
    def in_tensor(cls, path: str, parameters: Collection[str]) -> Allowed:
        """Return what the tensor at a path may contain; ``parameters`` are the paths of the parameters."""
        if path in parameters or path.startswith(f"{layout.WORKERS}/"):
            return cls.FINITE
        return cls.INFINITE if path.startswith(f"{layout.MODEL}/") else cls.ANY

    def error(self, path: str) -> NonFiniteError:
        """Return the error for a tensor with other values."""
        name = path.removeprefix(f"{layout.MODEL}/")
        if self is Allowed.INFINITE:
            return NonFiniteError(f"the buffer {name} holds NaN: it must not reach a checkpoint")
        what = path if name == path else f"the parameter {name}"
        return NonFiniteError(f"{what} is not finite: it must not reach a checkpoint")

    def check(self, path: str, dtype: str, data: memoryview) -> None:
        """Raise ``NonFiniteError`` if bytes of the tensor at a path have other values; ``dtype`` is the torch name."""
        examine = _EXAMINE.get(dtype)
        if self is Allowed.ANY or examine is None:
            return
        values = np.frombuffer(data, dtype=layout.STORAGE[dtype])
        for begin in range(0, len(values), _STEP):
            finite, no_nan = examine(values[begin : begin + _STEP])
            if not (no_nan if self is Allowed.INFINITE else finite):
                raise self.error(path)


def _by_sum(values: npt.NDArray[np.generic]) -> _Found:
    """Examine values of a type in which NumPy computes: a finite sum has finite terms only."""
    with np.errstate(all="ignore"):
        if np.isfinite(np.add.reduce(values)):
            return True, True
    return bool(np.isfinite(values).all()), not bool(np.isnan(values).any())


def _by_bits(infinity: int) -> Callable[[npt.NDArray[np.generic]], _Found]:
    """Return the function that examines the bits of 16-bit floats; ``infinity`` are those of infinity."""

    def examine(values: npt.NDArray[np.generic]) -> _Found:
        largest = int((values.view(np.uint16) & 0x7FFF).max(initial=0))
        return largest < infinity, largest <= infinity

    return examine


_EXAMINE: Mapping[str, Callable[[npt.NDArray[np.generic]], _Found]] = {
    "float64": _by_sum,
    "float32": _by_sum,
    "float16": _by_bits(0x7C00),
    "bfloat16": _by_bits(0x7F80),
}
