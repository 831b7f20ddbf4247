"""Access to NCCL through CuPy, and NCCL's codes of torch's dtypes and operations (``nccl.h``)."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.errors import CommunicationError

BYTES = 1  # ncclUint8: operations without arithmetic treat tensors as bytes

DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "average": 4}
# A bool is a byte that is 0 or 1. These operations give the same result as in torch: its sum is
# "any".
_BOOL_OPS = {"sum": 2, "max": 2, "min": 3, "product": 3}
_MOVES_WITH_SEND = 2700
_AVERAGES = 21000


def op_code(dtype: torch.dtype, op: str, version: int) -> int | None:
    """Return NCCL's code of an operation if its result equals torch's, else None.

    Excluded are 16-bit floats (NCCL rounds to 16 bits after every rank), minimum and maximum of
    floats (NCCL drops NaN), and 16-bit integers (NCCL does not support them).
    """
    if dtype is torch.bool:
        return _BOOL_OPS.get(op)
    if dtype not in DTYPES or dtype in (torch.float16, torch.bfloat16):
        return None
    if dtype.is_floating_point:
        known = op in ("sum", "product") or op == "average" and version >= _AVERAGES
    else:
        known = op in ("sum", "product", "min", "max")
    return _OPS[op] if known else None


def why_missing() -> str:
    """Return why NCCL cannot be used on this rank; an empty text if it can."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    try:
        _checked()
    except CommunicationError as error:
        return str(error)
    return ""


def load() -> Any:
    """Return CuPy's NCCL module; raise ``CommunicationError`` with an installation hint if it is missing."""
    return _checked()


def _checked() -> Any:
    # torch has already loaded its own libnccl, so CuPy finds that library by name.
    try:
        from cupy.cuda import nccl
    except Exception as error:  # CuPy built for another CUDA version fails in many ways, with exceptions of any type
        raise CommunicationError(f"NCCL needs CuPy (pip install hpctrain[cuda]): {error}") from error
    if not getattr(nccl, "available", False):
        raise CommunicationError("CuPy has no NCCL: install nvidia-nccl-cu12, or CuPy's own with cupyx.tools")
    version = int(nccl.get_version())
    if version < _MOVES_WITH_SEND:
        raise CommunicationError(f"NCCL {version} cannot send from rank to rank: 2.7 or newer is needed")
    return nccl
