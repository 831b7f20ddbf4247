"""Conversion between torch tensors and NumPy arrays, without a copy if the memory allows it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hpctrain.checkpoint.file.layout import STORAGE, Array, storage_of
from hpctrain.errors import CheckpointError


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the torch name of the element type: ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch element type for a name in the layout's table."""
    storage_of(name, "a tensor")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise ``CheckpointError`` unless the tensor is dense, has memory, and has a supported element type."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is a {tensor.layout} tensor: a checkpoint holds dense ones")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values")
    storage_of(dtype_name(tensor), name)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return the elements as a C-contiguous array of the storage type; a view of a tensor contiguous on the host."""
    plain = tensor.detach().to("cpu").contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    return plain.numpy().view(STORAGE[dtype_name(tensor)])


def flat(tensor: torch.Tensor, begin: int, end: int) -> Array:
    """Return a range of elements in C order, in the storage type; a view of a tensor contiguous on the host."""
    return to_numpy(tensor.detach().contiguous().view(-1)[begin:end])


def fill(tensor: torch.Tensor, read_into: Callable[[Array], None]) -> None:
    """Fill the tensor in place by ``read_into``: directly if it is contiguous on the host, else through a host copy."""
    target = tensor.detach()
    if target.device.type == "cpu" and target.is_contiguous():
        read_into(to_numpy(target))
        return
    staged = torch.empty(target.shape, dtype=target.dtype)
    read_into(to_numpy(staged))
    target.copy_(staged)


def from_numpy(array: Array, dtype: str) -> torch.Tensor:
    """Return a new tensor with the values of a stored array."""
    tensor = torch.empty(array.shape, dtype=torch_dtype(dtype))
    np.copyto(to_numpy(tensor), array)
    return tensor


def copy_flat(tensor: torch.Tensor, begin: int, end: int, out: Array) -> None:
    """Copy a range of elements, in C order, to host memory; the tensor may be on a GPU."""
    target = torch.from_numpy(out.view(np.uint8)).view(tensor.dtype)
    target.copy_(tensor.detach().contiguous().view(-1)[begin:end])


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite; one pass without extra memory as long as the sum is finite."""
    if not tensor.is_floating_point():
        return True
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    total = tensor.detach().sum(dtype=torch.float32 if narrow else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor.detach()).all())
