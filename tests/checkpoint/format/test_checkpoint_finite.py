"""Values that a checkpoint may contain: NumPy's verdict on bytes is that of torch on the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.errors import NonFiniteError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MANY = 3 * (1 << 18) + 7  # elements: several steps of the check, and a part of one


def check(allowed: Allowed, tensor: torch.Tensor, path: str = "/model/w") -> None:
    data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
    allowed.check(path, str(tensor.dtype).removeprefix("torch."), data)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, 1 << 18, MANY - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("-nan"), float("inf"), float("-inf")])
def test_one_value_among_many_is_found(dtype: torch.dtype, at: int, bad: float) -> None:
    tensor = torch.randn(MANY).to(dtype)
    check(Allowed.FINITE, tensor)
    tensor[at] = bad
    with pytest.raises(NonFiniteError, match="^the parameter w is not finite: it must not reach a checkpoint$"):
        check(Allowed.FINITE, tensor)
    if torch.isnan(tensor).any():
        with pytest.raises(NonFiniteError, match="^the buffer w holds NaN: it must not reach a checkpoint$"):
            check(Allowed.INFINITE, tensor)
    else:
        check(Allowed.INFINITE, tensor)
    check(Allowed.ANY, tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_opposite_infinities_are_infinite_and_not_nan(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, float("inf"), float("-inf")], dtype=dtype)
    check(Allowed.INFINITE, tensor)
    with pytest.raises(NonFiniteError):
        check(Allowed.FINITE, tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_smallest_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum overflows."""
    limits = torch.finfo(dtype)
    tensor = torch.tensor([limits.max, limits.max, limits.max, limits.smallest_normal, -0.0], dtype=dtype)
    check(Allowed.FINITE, tensor)
    check(Allowed.FINITE, -tensor)


def test_every_16_bit_float_is_judged_as_by_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
        finite = [every[torch.isfinite(every)], every[~torch.isnan(every)]]
        check(Allowed.FINITE, finite[0])
        check(Allowed.INFINITE, finite[1])
        for one in every[torch.isnan(every)][::37]:
            with pytest.raises(NonFiniteError):
                check(Allowed.INFINITE, one.reshape(1))
        for one in every[~torch.isfinite(every)][::37]:
            with pytest.raises(NonFiniteError):
                check(Allowed.FINITE, one.reshape(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_other_types_have_no_such_values(dtype: torch.dtype) -> None:
    check(Allowed.FINITE, torch.ones(9, dtype=dtype))


def test_a_tensor_without_elements_is_finite() -> None:
    for dtype in FLOATS:
        check(Allowed.FINITE, torch.empty(0, dtype=dtype))


def test_what_a_tensor_may_contain_follows_from_its_path() -> None:
    parameters = {"/model/w", "/model/key/w"}
    found = {path: Allowed.in_tensor(path, parameters) for path in ("/model/w", "/model/key/w", "/model/mask")}
    assert found == {"/model/w": Allowed.FINITE, "/model/key/w": Allowed.FINITE, "/model/mask": Allowed.INFINITE}
    assert Allowed.in_tensor("/workers/1/w", parameters) is Allowed.FINITE
    assert Allowed.in_tensor("/optimizer/w/exp_avg", parameters) is Allowed.ANY
    text = "^/workers/1/w is not finite: it must not reach a checkpoint$"
    with pytest.raises(NonFiniteError, match=text):
        check(Allowed.FINITE, torch.tensor([float("nan")]), "/workers/1/w")
