"""Conversion of tensors to arrays and back: bitwise equal, and without copies where the memory layout allows it."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import all_dtypes

from hpctrain.checkpoint.format.layout import STORAGE
from hpctrain.checkpoint.states import check_storable, dtype_name, fill, from_numpy, is_finite, to_numpy, torch_dtype
from hpctrain.errors import CheckpointError


@pytest.mark.parametrize("name", STORAGE)
def test_bits_survive_both_conversions(name: str) -> None:
    array = all_dtypes()[name]
    tensor = from_numpy(array, name)
    assert dtype_name(tensor) == name and tensor.dtype == torch_dtype(name)
    assert to_numpy(tensor).dtype == STORAGE[name]
    assert to_numpy(tensor).tobytes() == array.tobytes()
    assert to_numpy(tensor.reshape(-1)[1]).shape == ()
    assert to_numpy(tensor[:0]).shape == (0, *tensor.shape[1:])


def test_bfloat16_bits_are_the_upper_half_of_float32() -> None:
    assert to_numpy(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_contiguous_host_memory_is_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert to_numpy(tensor).ctypes.data == tensor.data_ptr()
    assert to_numpy(tensor.requires_grad_() if dtype.is_floating_point else tensor).ctypes.data == tensor.data_ptr()


def test_filling_keeps_memory_and_strides() -> None:
    array = all_dtypes()["float32"]
    for tensor in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2]):
        pointer, strides = tensor.data_ptr(), tensor.stride()
        fill(tensor, lambda out: out.__setitem__(..., array))
        assert to_numpy(tensor).tobytes() == array.tobytes()
        assert (tensor.data_ptr(), tensor.stride()) == (pointer, strides)


def test_tensors_that_cannot_be_stored_are_named() -> None:
    with pytest.raises(CheckpointError, match="w is a torch.sparse_coo tensor"):
        check_storable(torch.eye(2).to_sparse(), "w")
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        check_storable(torch.empty(2, device="meta"), "w")
    with pytest.raises(CheckpointError, match="w has the dtype complex64"):
        check_storable(torch.zeros(2, dtype=torch.complex64), "w")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_is_finite_checks_every_element(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor), "a sum that overflows is no element"
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor[500] = bad
        assert not is_finite(tensor)
    tensor[0], tensor[500] = float("inf"), float("-inf")
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype)) and is_finite(torch.ones(2, dtype=torch.int8))
