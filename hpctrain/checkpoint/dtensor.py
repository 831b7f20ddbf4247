"""Tensor subclasses in checkpoints: the boxes of a ``DTensor``, and states that consist of other tensors.

FSDP2 and tensor parallelism of torch keep parameters and optimizer states as DTensors. Their file
is that of an unsplit model: names, shapes and dtypes are those of the whole tensors.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard, dtype_name


def is_dtensor(value: torch.Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``; torch's module is not imported for this."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dtensor_boxes(path: str, value: Any) -> list[Shard]:
    """Return the boxes of a ``DTensor`` that this rank holds, named ``path``.

    A dimension that is sharded over two axes of the mesh, as by FSDP2 on top of tensor parallelism,
    may be several boxes. Raises ``UsageError`` for a tensor whose ranks hold terms of a sum.
    """
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    local = value.detach().to_local()
    runs = [_runs(value, path, dim) for dim in range(len(shape))]
    boxes = []
    for parts in itertools.product(*runs):
        part = local
        for dim, (_, place, count) in enumerate(parts):
            part = part.narrow(dim, place, count)
        start, extent = tuple(run[0] for run in parts), tuple(run[2] for run in parts)
        boxes.append(Shard(path, shape, dtype, start, extent, part))
    return boxes


def _runs(value: Any, path: str, dim: int) -> list[tuple[int, int, int]]:
    """Return ``(start in the whole, start in this rank's part, length)`` of each contiguous run along a dimension."""
    mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank is not part of the mesh
    indices = torch.arange(value.shape[dim]).view([-1 if each == dim else 1 for each in range(value.ndim)])
    for axis, placement in enumerate(value.placements):
        if placement.is_partial():
            raise UsageError(
                f"{path}: the ranks hold terms of a sum ({placement}), not a tensor: redistribute it, "
                "or give the model's parameters"
            )
        if placement.is_replicate() or placement.dim % value.ndim != dim:
            continue
        parts, _ = placement._split_tensor(indices, mesh.size(axis), with_padding=False, contiguous=True)
        indices = parts[coordinate[axis]]
    indices = indices.flatten()
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, len(indices)]
    return [(int(indices[low]), low, high - low) for low, high in zip(bounds, bounds[1:]) if high > low]


# Tensors that consist of other tensors (quantised states of torchao) --------------------------------------------------

SUBCLASS = "class of tensors"  # key of the plain value that describes such a tensor
_CONTEXT, _PARTS, _DTYPE = "context", "tensors", "dtype"


def inner_tensors(value: torch.Tensor, where: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Return a plain description of a tensor, and the tensors that it consists of; None for an ordinary tensor.

    Raises ``CheckpointError``, which names ``where``, for a description that a file cannot contain.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or is_dtensor(value) or not hasattr(kind, "__tensor_flatten__"):
        return None
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    items = list(context) if isinstance(context, (list, tuple)) else context
    described = [_plain_item(item, where) for item in items] if isinstance(items, list) else _plain_item(items, where)
    plain = {SUBCLASS: f"{kind.__module__}:{kind.__qualname__}", _CONTEXT: described, _PARTS: list(names)}
    return plain, {name: getattr(value, name) for name in names}


def from_inner_tensors(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of ``inner_tensors``. Its class must be imported: the optimizer's package does that.

    Raises ``CheckpointError`` for an unknown class, or one that does not accept the tensors.
    """
    module, _, name = str(plain[SUBCLASS]).partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.Tensor) or not hasattr(kind, "__tensor_unflatten__"):
        raise CheckpointError(f"a state is a tensor of the class {name} of {module}, which is not imported here")
    context = plain.get(_CONTEXT)
    items = [_item(one) for one in context] if isinstance(context, list) else _item(context)
    try:
        value = kind.__tensor_unflatten__(dict(tensors), items, None, None)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        raise CheckpointError(f"a state of the class {name} of {module}: {type(error).__name__}: {error}") from error
    assert isinstance(value, torch.Tensor)
    return value


def _plain_item(item: Any, where: str) -> Any:
    if isinstance(item, torch.dtype):
        return {_DTYPE: dtype_name(item)}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise CheckpointError(f"{where} is described by a value of type {type(item).__name__}: a checkpoint cannot hold it")


def _item(value: Any) -> Any:
    if not isinstance(value, dict) or _DTYPE not in value:
        return value
    dtype = getattr(torch, str(value[_DTYPE]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a state has the dtype {str(value[_DTYPE])[:40]!r}, which torch does not know")
    return dtype
