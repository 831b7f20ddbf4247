"""Arithmetic of reductions compared with NumPy: order of ranks, blocks, and 16-bit floats."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support.reductions import DTYPES, ops_of, reduced, same_bits, values

from hpctrain.comm.reduction import BLOCK, Reducer, average_scale, check_op, partial_dtype, transport_op
from hpctrain.errors import CommunicationError

LENGTHS = (0, 1, 63, BLOCK - 1, BLOCK, 2 * BLOCK + 17)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduces_in_rank_order_block_by_block(dtype: torch.dtype, ranks: int) -> None:
    reducer = Reducer()
    for numel, op in (*product(LENGTHS[:4], ops_of(dtype)), *((numel, "sum") for numel in LENGTHS[4:])):
        pieces = [values(rank, numel, dtype) for rank in range(ranks)]
        out = torch.empty(numel, dtype=dtype)
        reducer.reduce_into(out, pieces, op, average_scale(op, ranks))
        assert same_bits(out, reduced(pieces, op)), (numel, op)


def test_an_input_may_be_the_output() -> None:
    for ranks in (2, 3):
        for position in range(ranks):
            pieces = [values(rank, 100, torch.bfloat16) for rank in range(ranks)]
            wanted = reduced(pieces, "sum")
            Reducer().reduce_into(pieces[position], pieces, "sum")
            assert same_bits(pieces[position], wanted)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    # In bfloat16 256 + 1 is 256 again: rounding after every step would lose all the ones.
    pieces = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    out = torch.empty(3, dtype=torch.bfloat16)
    Reducer().reduce_into(out, pieces, "sum")
    assert out.tolist() == [260.0] * 3


def test_the_scratch_buffer_is_reused() -> None:
    reducer = Reducer()
    assert reducer.scratch(torch.bfloat16, 7).data_ptr() == reducer.scratch(torch.float32, BLOCK).data_ptr()
    assert reducer.scratch(torch.float16, 7).dtype is torch.float32
    assert reducer.scratch(torch.int8, 7).shape == (7,)


def test_an_average_is_reduced_as_a_sum_and_then_scaled() -> None:
    assert {op: (transport_op(op), average_scale(op, 4)) for op in ("sum", "average", "min", "max", "product")} == {
        "sum": ("sum", None),
        "average": ("sum", 0.25),
        "min": ("min", None),
        "max": ("max", None),
        "product": ("product", None),
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_bits_are_combined_as_numpy_does(dtype: torch.dtype) -> None:
    for op, step in (("band", np.bitwise_and), ("bor", np.bitwise_or), ("bxor", np.bitwise_xor)):
        check_op(op, dtype)
        pieces = [torch.randint(0, 2 if dtype is torch.bool else 100, (300,)).to(dtype) for _ in range(3)]
        out = torch.empty(300, dtype=dtype)
        Reducer().reduce_into(out, pieces, op)
        assert same_bits(out, torch.from_numpy(step(step(pieces[0].numpy(), pieces[1].numpy()), pieces[2].numpy())))


def test_partial_results_of_sixteen_bit_floats_are_float32_if_they_would_be_rounded() -> None:
    wide = {op: partial_dtype(torch.bfloat16, op) for op in ("sum", "average", "product", "min", "max")}
    assert [op for op, dtype in wide.items() if dtype is torch.float32] == ["sum", "average", "product"]
    assert wide["min"] is torch.bfloat16 and partial_dtype(torch.float64, "sum") is torch.float64


def test_combining_keeps_the_order_and_the_wide_type() -> None:
    reducer, narrow = Reducer(), torch.full((BLOCK + 3,), 1.0, dtype=torch.bfloat16)
    wide = torch.full((BLOCK + 3,), 256.0)
    reducer.combine(wide, wide, narrow, "sum")
    reducer.combine(wide, narrow, wide, "sum")
    assert wide.eq(258).all()
    reducer.finish(narrow, wide, "average", 2)
    assert narrow.eq(129).all()
    same = torch.tensor([4.0])
    reducer.finish(same, same, "sum", 2)
    assert same.item() == 4
    reducer.finish(same, same, "average", 2)
    assert same.item() == 2


def test_bitwise_reductions_of_floats_are_refused() -> None:
    with pytest.raises(CommunicationError, match="^band of torch.float32 is not defined; bitwise .* and bool$"):
        check_op("band", torch.float32)


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(CommunicationError, match="^unknown reduction 'mean': known are .*, product, band, bor, bxor$"):
        check_op("mean", torch.float32)
    with pytest.raises(CommunicationError, match="^average of torch.int32 is not defined; use sum$"):
        check_op("average", torch.int32)
    for dtype in DTYPES:
        for op in ops_of(dtype):
            check_op(op, dtype)
