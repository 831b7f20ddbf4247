"""Torch functions by what they do with the elements of a tensor: which of them a part of a parameter allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Element-wise functions whose operators are not tagged as such, or have other names.
ELEMENTWISE = frozenset(
    "add and copy_ detach detach_ div eq fill_ float half double bfloat16 floor_divide floordiv ge gt iadd iand imul "
    "int invert ior ipow isub itruediv le long lt masked_fill_ mod mul ne neg nextafter or pos pow radd rdiv rfloordiv "
    "rmod rmul rpow rsub rtruediv sub to truediv type type_as xor zero_ bool constant_ ones_ zeros_".split()
)
# Functions that return the same elements in another order or memory, or new memory of the same
# shape.
MOVES = frozenset(
    "T H mT mH data grad real imag as_strided cat chunk concat concatenate contiguous cpu cuda empty_like flatten "
    "full_like getitem index_select narrow new_empty new_full new_ones new_tensor new_zeros ones_like permute "
    "pin_memory rand_like randn_like randint_like ravel reshape select slice split squeeze stack swapaxes t "
    "transpose unbind unflatten unsqueeze view view_as expand expand_as reshape_as zeros_like requires_grad_ to_dense "
    "resolve_conj resolve_neg __setitem__ setitem hsplit vsplit dsplit tensor_split".split()
)
# Functions that return no element values: only tensors among their results are marked.
_METADATA = frozenset(
    "as_subclass backward data_ptr dim ndimension element_size get_device hash has_names is_coalesced is_complex "
    "is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size "
    "is_set_to is_shared is_signed len nelement numel record_stream register_hook register_post_accumulate_grad_hook "
    "repr retain_grad share_memory_ size storage storage_offset storage_type stride str format typed_storage "
    "untyped_storage dir is_tensor is_storage contains iter result_type can_cast promote_types retains_grad "
    "_is_view _make_subclass".split()
)
# Functions that select elements by position, which differs between a part and the whole.
BY_POSITION = frozenset(
    "getitem setitem select narrow slice chunk split unbind hsplit vsplit dsplit tensor_split iter len diagonal tril "
    "triu index_select index_fill_ index_add_ index_copy_ take gather scatter_".split()
)
REDUCES_TOO = frozenset({"max", "min"})  # element-wise only with a second tensor
FILLS = frozenset(
    "normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_ trunc_normal_".split()
)
PRODUCTS = frozenset("matmul mm mv bmm addmm addmv dot einsum bilinear linear embedding conv1d conv2d conv3d".split())
_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max")


def name_of(func: Any) -> str:
    """Return the name of a function; for a property access, the name of the property."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", ""))
    return name.strip("_") if name.startswith("__") and name not in ("__set__", "__delete__") else name


@cache
def is_elementwise(name: str) -> bool:
    """Return whether a function works element by element, or only moves elements."""
    if name in ELEMENTWISE or name in MOVES or name in _METADATA:
        return True
    if name.startswith("_foreach_"):
        return name not in _FOREACH_REDUCTIONS
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes a tensor in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__") or name == "__setitem__"
    return name.endswith("_") or "out" in kwargs
