"""The arithmetic of reductions against NumPy: the order of the ranks, blocks, and 16-bit floats."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.reductions import DTYPES, ops_of, reduced, same_bits, values

from hpctrain.collectives.reduction import BLOCK, Reducer, average_scale, carrier_op, check_op
from hpctrain.errors import CommunicationError

LENGTHS = (0, 1, 63, BLOCK - 1, BLOCK, 2 * BLOCK + 17)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduces_in_rank_order(dtype: torch.dtype, ranks: int) -> None:
    reducer = Reducer()
    for numel, op in product(LENGTHS[:4], ops_of(dtype)):
        pieces = [values(rank, numel, dtype) for rank in range(ranks)]
        out = torch.empty(numel, dtype=dtype)
        reducer.reduce_into(out, pieces, op, average_scale(op, ranks))
        assert same_bits(out, reduced(pieces, op)), (numel, op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_leave_no_seam(dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        pieces = [values(rank, numel, dtype) for rank in range(3)]
        out = torch.empty(numel, dtype=dtype)
        Reducer().reduce_into(out, pieces, "sum")
        assert same_bits(out, reduced(pieces, "sum"))


def test_a_piece_may_be_the_result() -> None:
    for ranks in (2, 3):
        for position in range(ranks):
            pieces = [values(rank, 100, torch.bfloat16) for rank in range(ranks)]
            wanted = reduced(pieces, "sum")
            Reducer().reduce_into(pieces[position], pieces, "sum")
            assert same_bits(pieces[position], wanted)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    # In bfloat16 256 + 1 is 256 again, so that rounding after every step would lose all the ones.
    pieces = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    out = torch.empty(3, dtype=torch.bfloat16)
    Reducer().reduce_into(out, pieces, "sum")
    assert out.tolist() == [260.0] * 3


def test_average_of_large_sixteen_bit_floats_does_not_overflow() -> None:
    pieces = [torch.full((3,), 60000.0, dtype=torch.float16) for _ in range(4)]
    out = torch.empty(3, dtype=torch.float16)
    Reducer().reduce_into(out, pieces, "average", average_scale("average", 4))
    assert torch.equal(out, pieces[0])


def test_not_a_number_stays_whichever_rank_has_it() -> None:
    for op in ("sum", "average", "min", "max", "product"):
        for rank in range(3):
            pieces = [torch.ones(2) for _ in range(3)]
            pieces[rank][1] = torch.nan
            out = torch.empty(2)
            Reducer().reduce_into(out, pieces, op)
            assert out.isnan().tolist() == [False, True]


def test_scratch_is_kept() -> None:
    reducer = Reducer()
    assert reducer.scratch(torch.bfloat16, 7).data_ptr() == reducer.scratch(torch.float32, BLOCK).data_ptr()
    assert reducer.scratch(torch.float16, 7).dtype is torch.float32
    assert reducer.scratch(torch.int8, 7).shape == (7,)


def test_only_an_average_is_scaled_and_travels_as_a_sum() -> None:
    assert {op: (carrier_op(op), average_scale(op, 4)) for op in ("sum", "average", "min", "max", "product")} == {
        "sum": ("sum", None),
        "average": ("sum", 0.25),
        "min": ("min", None),
        "max": ("max", None),
        "product": ("product", None),
    }


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(CommunicationError, match="^unknown reduction 'mean': known are sum, average, min, max,"):
        check_op("mean", torch.float32)
    with pytest.raises(CommunicationError, match="^average of torch.int32 is not defined; use sum$"):
        check_op("average", torch.int32)
    for dtype in DTYPES:
        for op in ops_of(dtype):
            check_op(op, dtype)
