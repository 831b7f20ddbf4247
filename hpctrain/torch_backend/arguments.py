"""Arguments of a process group's operations, as torch passes them: reductions, roots and tensors, checked."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.shard import dtype_name
from hpctrain.torch_backend.work import NO_TIMEOUT

_Op: Any = dist.ReduceOp.RedOpType  # its members have no stubs
_NAMES = {
    _Op.SUM: "sum",
    _Op.AVG: "average",
    _Op.PRODUCT: "product",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.BAND: "band",
    _Op.BOR: "bor",
    _Op.BXOR: "bxor",
}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_DTYPES = {
    "sum": (torch.bool, *_INTEGERS, *_FLOATS, *_COMPLEX),
    "product": (torch.bool, *_INTEGERS, *_FLOATS, *_COMPLEX),
    "average": (*_INTEGERS, *_FLOATS, *_COMPLEX),
    "premultiplied sum": (*_FLOATS, *_COMPLEX),
    "min": (torch.bool, *_INTEGERS, *_FLOATS),
    "max": (torch.bool, *_INTEGERS, *_FLOATS),
    "band": (torch.bool, *_INTEGERS),
    "bor": (torch.bool, *_INTEGERS),
    "bxor": (torch.bool, *_INTEGERS),
}


class Reduction:
    """Reduction of torch: the name of the communicator's, and the factor of a premultiplied sum."""

    __slots__ = ("name", "factor", "_dtypes")

    def __init__(self, name: str, factor: Any = None) -> None:
        self.name = name
        self.factor = factor
        self._dtypes = frozenset(_DTYPES["premultiplied sum" if factor is not None else name])

    def check(self, tensor: Tensor) -> None:
        """Raise ``CommunicationError`` if tensors of this layout and dtype have no such reduction."""
        if tensor.dtype not in self._dtypes:
            allowed = ", ".join(sorted(dtype_name(dtype) for dtype in self._dtypes))
            raise CommunicationError(f"{self} of {tensor.dtype} is not defined; it takes {allowed}")
        if tensor.layout is not torch.strided and (tensor.layout is not torch.sparse_coo or str(self) != "sum"):
            raise CommunicationError(f"{self} of {tensor.layout} is not defined; sparse_coo tensors are reduced by sum")

    def __str__(self) -> str:
        return self.name if self.factor is None else "premultiplied sum"

    def is_plain(self, tensor: Tensor) -> bool:
        """Return whether the communicator has this reduction for the dtype of a tensor."""
        return self.factor is None and not (self.name == "average" and not tensor.is_floating_point())

    def premultiply(self, flat: Tensor) -> None:
        """Multiply by the factor of a premultiplied sum."""
        if self.factor is not None:
            flat.mul_(self.factor)

    def of_communicator(self, flat: Tensor) -> str:
        """Return the communicator's reduction: integers and complex numbers have no average there."""
        return "sum" if self.name == "average" and not flat.is_floating_point() else self.name

    def finish(self, flat: Tensor, size: int) -> None:
        """Divide a sum that is the communicator's part of an average; integers are rounded towards zero."""
        if self.name == "average" and not flat.is_floating_point():
            flat.div_(size, rounding_mode=None if flat.is_complex() else "trunc")


_REDUCTIONS = {op: Reduction(name) for op, name in _NAMES.items()}


def reduction(op: Any) -> Reduction:
    """Return a reduction of torch by its ``ReduceOp``."""
    kind = getattr(op, "op", op)
    known = _REDUCTIONS.get(kind)
    if known is not None:
        return known
    if kind == _Op.PREMUL_SUM:
        return Reduction("sum", op.__getstate__()[1])
    allowed = ", ".join(each.name for each in (*_NAMES, _Op.PREMUL_SUM))
    raise CommunicationError(f"unknown reduction {op}: allowed are {allowed}")


# Options of a call ----------------------------------------------------------------------------------------------------


_SUM = dist.ReduceOp(dist.ReduceOp.SUM)


def only(items: Any) -> Any:
    """Return the only element of a list: the lists of c10d have one entry per device of a rank, always one here."""
    if isinstance(items, (list, tuple)):
        if len(items) != 1:
            raise ValueError(f"expected one tensor per rank, got {len(items)}")
        return items[0]
    return items


def rows(items: Any) -> list[Tensor]:
    """Return a list of tensors that torch passes as the only element of a list, or as it is."""
    found = only(items) if items and isinstance(items[0], (list, tuple)) else items
    return list(found)


def reduction_of(options: Any) -> Reduction:
    """Return the reduction of a call: torch passes options, a ``ReduceOp``, or nothing for a sum."""
    return reduction(_SUM if options is None else getattr(options, "reduceOp", options))


def root_of(options: Any, size: int) -> int:
    """Return the root of a call: torch passes options, or a rank."""
    root = 0 if options is None else getattr(options, "rootRank", options)
    if not isinstance(root, int) or not 0 <= root < size:
        raise ValueError(f"invalid root rank {root}: allowed are 0 to {size - 1}")
    return root


def seconds_of(options: Any, default: timedelta) -> float:
    """Return the timeout of a call in seconds: torch passes one in the options, or a mark for the group's."""
    timeout = getattr(options, "timeout", None)
    return (default if timeout is None or timeout <= NO_TIMEOUT else timeout).total_seconds()


# Checks, in the thread of the caller and before any communication -----------------------------------------------------


def check_same_dtype(what: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of different dtypes or devices, and an empty list."""
    if not tensors:
        raise ValueError(f"{what}: requires a non-empty list of tensors")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"{what}: the tensors must have one dtype and device, not {names}")


def check_one_per_rank(what: str, tensors: Sequence[Tensor], size: int) -> None:
    """Refuse a list that has not one tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what}: got {len(tensors)} tensors for {size} ranks: one is needed for each rank")


def check_shares(what: str, share: Tensor, whole: Tensor, size: int) -> None:
    """Refuse a tensor that has not ``size`` times the elements of another one, or another dtype."""
    if share.dtype != whole.dtype or share.numel() * size != whole.numel():
        raise ValueError(
            f"{what} over {size} ranks: {whole.numel()} elements of {whole.dtype} are not {size} times "
            f"{share.numel()} elements of {share.dtype}"
        )


def check_equal_sizes(what: str, tensors: Sequence[Tensor], numel: int) -> None:
    """Refuse tensors that have not a number of elements."""
    if any(tensor.numel() != numel for tensor in tensors):
        sizes = [tensor.numel() for tensor in tensors]
        raise ValueError(f"{what}: every tensor must have {numel} elements, not {sizes}")


def elements_per_rank(tensor: Tensor, counts: Sequence[int], size: int) -> list[int]:
    """Return the number of a tensor's elements for each rank, from numbers of rows; without any, equal ones."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not counts:
        if length % size:
            raise ValueError(f"all_to_all: {length} rows cannot be divided equally among {size} ranks")
        return [tensor.numel() // size] * size
    if len(counts) != size or sum(counts) != length or min(counts) < 0:
        raise ValueError(f"all_to_all: split sizes {list(counts)} must be {size} numbers whose sum is {length}")
    width = tensor.shape[1:].numel() if tensor.dim() else 1
    return [count * width for count in counts]


def check_reduction(op: Reduction, tensors: Sequence[Tensor]) -> None:
    """Refuse a reduction that a tensor does not have."""
    for tensor in tensors:
        op.check(tensor)


def described(tensors: Sequence[Tensor]) -> str:
    """Return the dtypes of tensors as text, for operations in which shapes may differ between ranks."""
    return ", ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors}))
