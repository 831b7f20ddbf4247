"""Find NCCL through CuPy, and say what it calls torch's dtypes and operations (``nccl.h``)."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.errors import CommunicationError

BYTES = 1  # ncclUint8: what is only moved, moves as bytes

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
# A bool is a byte that is 0 or 1, so that these give what torch gives: its sum is "any".
_BOOL_OPS = {"sum": 2, "max": 2, "min": 3, "product": 3}
_MOVES_WITH_SEND = 2700
_AVERAGES = 21000


def op_code(dtype: torch.dtype, op: str, version: int) -> int | None:
    """Return NCCL's number of an operation where it gives what torch would give, else None.

    16-bit floats are left out because NCCL rounds to 16 bits after every rank, minimum and maximum of floats because it
    drops NaN, 16-bit integers because it does not know them.
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
    """Return why NCCL cannot be used on this rank; an empty text where it can."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    try:
        _checked()
    except CommunicationError as error:
        return str(error)
    return ""


def load() -> Any:
    """Return CuPy's module of NCCL; raise ``CommunicationError`` with what to install where there is none."""
    return _checked()


def _checked() -> Any:
    # torch is loaded already, and with it the libnccl that it brings: CuPy then finds that one by its name.
    try:
        from cupy.cuda import nccl
    except Exception as error:  # CuPy built for another CUDA fails in many ways, and none of them is ours
        raise CommunicationError(f"NCCL needs CuPy (pip install hpctrain[cuda]): {error}") from error
    if not getattr(nccl, "available", False):
        raise CommunicationError("CuPy has no NCCL: install nvidia-nccl-cu12, or CuPy's own with cupyx.tools")
    version = int(nccl.get_version())
    if version < _MOVES_WITH_SEND:
        raise CommunicationError(f"NCCL {version} cannot send from rank to rank: 2.7 or newer is needed")
    return nccl
