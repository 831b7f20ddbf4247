"""Every operation of a process group, by dtype, reduction, layout and size, against plain torch and against gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _make_nccl_premul_sum

pytestmark = [pytest.mark.ranks(2, 3, 4)]

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
GLOO = [torch.uint8, torch.int8, torch.int32, torch.int64, *FLOATS]  # dtypes that gloo reduces

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "part": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
    "channels_last": lambda tensor: tensor.view(1, *tensor.shape, 1).to(memory_format=torch.channels_last),
    "scalar": lambda tensor: tensor.reshape(-1)[:1].view(()),
    "empty": lambda tensor: tensor[:0],
    "leaf": lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor,
}


def given(rank: int, dtype: torch.dtype, rows: int = 3, columns: int = 4) -> Tensor:
    """Return numbers from 0 to 3, whose sums and products are exact in every dtype."""
    numbers = (torch.arange(rows * columns) * 7 + 5 * rank) % 4
    values = (numbers + 1j * numbers.flip(0)).to(dtype) if dtype.is_complex else numbers.to(dtype)
    return values.view(rows, columns)


def layouts(rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the same numbers in every layout."""
    for name, arranged in SHAPES.items():
        yield name, arranged(given(rank, dtype))
    yield "many", given(rank, dtype, 300, 251)


def all_given(world: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Yield this rank's tensor in every layout, and those of all ranks."""
    rows = [dict(layouts(rank, dtype)) for rank in range(world.size())]
    for name, own in layouts(world.rank(), dtype):
        yield name, own, [row[name].detach() for row in rows]


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and elements."""
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found.detach(), expected)


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor of a dtype that torch can compare, with the same bits if an element is one byte."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


REDUCTIONS: dict[str, tuple[Sequence[torch.dtype], Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": (DTYPES, torch.add),
    "PRODUCT": ([torch.bool, *INTEGERS, *FLOATS], torch.mul),
    "MIN": ([torch.bool, *INTEGERS, *FLOATS], torch.minimum),
    "MAX": ([torch.bool, *INTEGERS, *FLOATS], torch.maximum),
    "BAND": ([torch.bool, *INTEGERS], torch.bitwise_and),
    "BOR": ([torch.bool, *INTEGERS], torch.bitwise_or),
    "BXOR": ([torch.bool, *INTEGERS], torch.bitwise_xor),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce(world: Any, name: str, async_op: bool) -> None:
    dtypes, combine = REDUCTIONS[name]
    for dtype in dtypes:
        for layout, tensor, others in all_given(world, dtype):
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=async_op)
            assert (work is not None) is async_op and (work is None or work.wait())
            assert same(tensor, reduce(combine, others)), (dtype, layout)


def test_products_of_complex_numbers(world: Any) -> None:
    for dtype in COMPLEX:
        for layout, tensor, others in all_given(world, dtype):
            world.allreduce([tensor], dist.ReduceOp.PRODUCT).wait()  # dist.all_reduce refuses it for every back end
            assert same(tensor, reduce(torch.mul, others)), (dtype, layout)


def test_averages_and_premultiplied_sums(world: Any) -> None:
    size = world.size()
    for dtype in [*INTEGERS, *FLOATS, *COMPLEX]:
        for layout, tensor, others in all_given(world, dtype):
            total = reduce(torch.add, others)
            averaged = total / size if dtype in (*FLOATS, *COMPLEX) else total // size
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            torch.testing.assert_close(tensor.detach(), averaged.to(dtype), msg=f"{dtype} {layout}")
    for dtype in [*FLOATS, *COMPLEX]:
        for layout, tensor, others in all_given(world, dtype):
            dist.all_reduce(tensor, _make_nccl_premul_sum(2.0))
            assert same(tensor, reduce(torch.add, others) * 2), (dtype, layout)


@pytest.mark.parametrize("name", ["SUM", "MAX", "AVG"])
def test_reduce_to_every_root(world: Any, name: str) -> None:
    for root in range(world.size()):
        for dtype in (torch.int16, torch.bfloat16, torch.float32):
            for layout, tensor, others in all_given(world, dtype):
                before = tensor.detach().clone()
                dist.reduce(tensor, root, getattr(dist.ReduceOp, name))
                combine = torch.maximum if name == "MAX" else torch.add
                expected = reduce(combine, [other.double() for other in others])
                expected = expected / world.size() if name == "AVG" else expected
                expected = (expected.trunc() if not dtype.is_floating_point else expected).to(dtype)
                wanted = expected if world.rank() == root else before
                torch.testing.assert_close(tensor.detach(), wanted, msg=f"{dtype} {layout}")


def test_broadcast_from_every_root(world: Any) -> None:
    for root in range(world.size()):
        for dtype in [*DTYPES, torch.float8_e4m3fn, torch.uint16]:
            for layout, tensor, others in all_given(world, dtype):
                if layout != "leaf":
                    dist.broadcast(tensor, root)
                    assert same(bits(tensor), bits(others[root])), (dtype, layout)


def test_the_root_broadcasts_an_expanded_tensor(world: Any) -> None:
    tensor = torch.tensor([[5.0]]).expand(3, 4) if world.rank() == 0 else torch.zeros(3, 4)
    dist.broadcast(tensor, 0)
    assert same(tensor, torch.full((3, 4), 5.0))
    with pytest.raises(RuntimeError, match=r"cannot be written: several elements are at one place"):
        dist.all_reduce(torch.tensor([[5.0]]).expand(3, 4))
    tensor = torch.ones(3, 4)
    dist.all_reduce(tensor)  # the refused call has sent nothing
    assert same(tensor, torch.full((3, 4), float(world.size())))


def test_all_gather(world: Any) -> None:
    for dtype in DTYPES:
        for layout, tensor, others in all_given(world, dtype):
            outputs = [SHAPES.get(layout, SHAPES["contiguous"])(torch.zeros_like(given(0, dtype))) for _ in others]
            outputs = [torch.zeros_like(other) for other in others] if layout in ("many", "leaf") else outputs
            dist.all_gather(outputs, tensor)
            for output, other in zip(outputs, others, strict=True):
                assert same(output, other), (dtype, layout)
            if tensor.dim():
                whole = torch.empty(len(others) * tensor.shape[0], *tensor.shape[1:], dtype=dtype)
                dist.all_gather_into_tensor(whole, tensor)
                assert same(whole, torch.cat(others)), (dtype, layout)


def test_all_gather_of_different_sizes(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for dtype in (torch.int64, torch.bfloat16, torch.complex64):
        outputs = [torch.empty(3 * other, 2, dtype=dtype) for other in range(size)]
        dist.all_gather(outputs, given(rank, dtype, 3 * rank, 2))
        for other, output in enumerate(outputs):
            assert same(output, given(other, dtype, 3 * other, 2))


def test_gather_and_scatter(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for root in range(size):
        for dtype in DTYPES:
            for layout, tensor, others in all_given(world, dtype):
                outputs = [torch.zeros_like(other) for other in others] if rank == root else None
                dist.gather(tensor, outputs, root)
                assert outputs is None or all(same(one, other) for one, other in zip(outputs, others, strict=True))
                output = torch.zeros_like(others[rank])
                dist.scatter(output, others if rank == root else None, root)
                assert same(output, others[rank]), (dtype, layout)


def test_reduce_scatter(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for dtype in DTYPES:
        for columns in (1, 5, 20000):
            wholes = [given(other, dtype, size, columns) for other in range(size)]
            total = reduce(torch.add, wholes)
            output = torch.empty(1, columns, dtype=dtype)
            dist.reduce_scatter_tensor(output, wholes[rank])
            assert same(output, total[rank : rank + 1]), (dtype, columns)
            strided = torch.empty(columns, 2, dtype=dtype)[:, 0]
            dist.reduce_scatter(strided, list(wholes[rank].unbind()))
            assert same(strided, total[rank])
    # Tensors of different sizes within the list, and reductions of other kinds.
    inputs = [given(rank, torch.float32, 2 + other, 3) for other in range(size)]
    output = torch.empty(2 + rank, 3)
    dist.reduce_scatter(output, inputs, dist.ReduceOp.MAX)
    assert same(output, reduce(torch.maximum, [given(other, torch.float32, 2 + rank, 3) for other in range(size)]))
    output, whole = torch.empty(3), given(rank, torch.float32, size, 3)
    dist.reduce_scatter_tensor(output, whole, _make_nccl_premul_sum(0.5))
    assert same(output, reduce(torch.add, [given(other, torch.float32, size, 3) for other in range(size)])[rank] / 2)
    assert same(whole, given(rank, torch.float32, size, 3))  # the input is unchanged


def test_all_to_all(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for dtype in DTYPES:
        tensor, output = given(rank, dtype, 2 * size, 3), torch.empty(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(output, tensor)
        assert same(output, torch.cat([given(other, dtype, 2 * size, 3).chunk(size)[rank] for other in range(size)]))
        sent, received = [rank + to for to in range(size)], [source + rank for source in range(size)]
        tensor, output = given(rank, dtype, sum(sent), 3), torch.empty(sum(received), 3, dtype=dtype)
        dist.all_to_all_single(output, tensor, received, sent)
        parts = [
            torch.split(
                given(other, dtype, sum(other + to for to in range(size)), 3), [other + to for to in range(size)]
            )
            for other in range(size)
        ]
        assert same(output, torch.cat([part[rank] for part in parts])), dtype
        outputs = [torch.empty(other + rank, 2, dtype=dtype).t().contiguous().t() for other in range(size)]
        dist.all_to_all(outputs, [given(rank, dtype, rank + to, 2) for to in range(size)])
        for other in range(size):
            assert same(outputs[other], given(other, dtype, other + rank, 2))


def test_equal_splits_on_one_rank_only(world: Any) -> None:
    rank, size = world.rank(), world.size()
    sent = [[1] * size] + [[1] + [other] * (size - 1) for other in range(1, size)]
    received = [sent[source][rank] for source in range(size)]
    tensor, output = given(rank, torch.int32, sum(sent[rank]), 1), torch.empty(sum(received), 1, dtype=torch.int32)
    dist.all_to_all_single(output, tensor, received, sent[rank])
    parts = [torch.split(given(other, torch.int32, sum(sent[other]), 1), sent[other])[rank] for other in range(size)]
    assert same(output, torch.cat(parts))


def test_sparse_sums(world: Any) -> None:
    rank, size = world.rank(), world.size()

    def sparse(rank: int, values: Tensor) -> Tensor:
        indices = torch.tensor([[rank, 3, 3]])
        return torch.sparse_coo_tensor(indices, values, (6, *values.shape[1:]), check_invariants=True)

    for values in (torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, 2, dtype=torch.float64), torch.tensor([1, 2, 3])):
        tensor = sparse(rank, values)
        dist.all_reduce(tensor)
        assert tensor.is_coalesced()
        assert torch.equal(tensor.to_dense(), sum(sparse(other, values).to_dense() for other in range(size)))
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (6,), check_invariants=True)
    tensor = empty if rank else sparse(0, torch.tensor([1.0, 2.0, 4.0]))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), torch.tensor([1.0, 0, 0, 6, 0, 0]))
    with pytest.raises(RuntimeError, match="sparse_coo tensors are reduced by sum"):
        dist.all_reduce(sparse(rank, torch.ones(3)), dist.ReduceOp.MAX)


def test_conjugated_views(world: Any) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert tensor.is_conj()
    world.broadcast([tensor], 0).wait()
    assert torch.equal(tensor, torch.tensor([1 - 2j, 3 + 1j]))
    world.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.tensor([1 - 2j, 3 + 1j]) * world.size())
    outputs = [torch.empty(2, dtype=torch.complex64) for _ in range(world.size())]
    world.allgather([outputs], [tensor]).wait()
    assert all(torch.equal(output, tensor) for output in outputs)


def test_inference_tensors(world: Any) -> None:
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.full((1000,), 1.0, dtype=dtype)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor[::2], async_op=True).wait()
            assert tensor[0] == world.size() ** 2 and tensor[1] == world.size()
    # Temporary memory from inference mode serves later calls outside of it.
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((1000,), 1.0, dtype=dtype, requires_grad=True)
        dist.all_reduce(tensor)
        assert tensor[0] == world.size()


def test_objects(world: Any) -> None:
    rank, size = world.rank(), world.size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in found] == list(range(size)) and len(found[-1]["text"]) == (size - 1) * 1000
    items = [rank, ("from", rank)]
    dist.broadcast_object_list(items, size - 1)
    assert items == [size - 1, ("from", size - 1)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object([rank] * rank, gathered, 0)
    assert gathered is None or gathered == [[other] * other for other in range(size)]
    own: list[Any] = [None]
    dist.scatter_object_list(own, [{other} for other in range(size)] if rank == 0 else None, 0)
    assert own == [{rank}]


def test_torch_finds_the_back_end_of_a_device(world: Any) -> None:
    """torch 2.14 asks it before batches of messages, and every version when a program sets a timeout."""
    own = torch.full((3,), float(world.rank()))
    received = [torch.empty(3) for _ in range(world.size())]
    others = [rank for rank in range(world.size()) if rank != world.rank()]
    operations = [dist.P2POp(dist.isend, own, rank) for rank in others]
    operations += [dist.P2POp(dist.irecv, received[rank], rank) for rank in others]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert all(torch.equal(received[rank], torch.full((3,), float(rank))) for rank in others)
    with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
        set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout")  # noqa: B009
        set_timeout(timedelta(seconds=60), world)


def outcome(call: Callable[[], Any]) -> str:
    """Return the kind of outcome of a call."""
    try:
        call()
    except (RuntimeError, ValueError):
        return "error"
    return "done"


def test_gloo_agrees(world: Any, gloo: Any) -> None:
    for name in REDUCTIONS:
        for dtype in GLOO:
            op, ours, theirs = getattr(dist.ReduceOp, name), given(world.rank(), dtype), given(world.rank(), dtype)
            found = outcome(lambda: dist.all_reduce(ours, op)), outcome(lambda: dist.all_reduce(theirs, op, group=gloo))
            assert found[0] == found[1], (name, dtype)
            assert torch.equal(ours, theirs), (name, dtype)


def test_gloo_agrees_on_sums_of_fractions(world: Any, gloo: Any) -> None:
    for dtype, accuracy in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        for length in (1, 1000, 300_000):
            torch.manual_seed(world.rank())
            ours = torch.randn(length, dtype=dtype)
            theirs = ours.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            if world.size() == 2:  # one addition, in any order
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=accuracy * 10 * world.size())


REFUSED: dict[str, Callable[[Any], Any]] = {
    "all_gather: another size": lambda group: group.allgather([[torch.zeros(3)] * group.size()], [torch.zeros(2)]),
    "all_gather: another dtype": lambda group: group.allgather(
        [[torch.zeros(2)] * group.size()], [torch.zeros(2).int()]
    ),
    "all_gather: too few": lambda group: group.allgather([[torch.zeros(2)]], [torch.zeros(2)]),
    "into_tensor": lambda group: group.all_gather_single(torch.zeros(3), torch.zeros(2)),
    "reduce_scatter": lambda group: group.reduce_scatter_single(torch.zeros(3), torch.zeros(2)),
    "reduce_scatter: too few": lambda group: group.reduce_scatter([torch.zeros(3)], [[torch.zeros(3)]]),
    "all_to_all: splits": lambda group: group.alltoall_base(torch.zeros(3), torch.zeros(3), [1], [2]),
    "all_to_all: rows": lambda group: group.alltoall_base(torch.zeros(25), torch.zeros(25), [], []),
    "band of floats": lambda group: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND),
    "max of complex numbers": lambda group: group.allreduce([torch.zeros(3, dtype=torch.cfloat)], dist.ReduceOp.MAX),
    "two tensors": lambda group: group.allreduce([torch.zeros(3), torch.zeros(3)]),
    "root": lambda group: group.broadcast([torch.zeros(3)], 77),
    "tag": lambda group: group.send([torch.zeros(3)], 0, 2**31),
    "mixed dtypes": lambda group: group.allreduce_coalesced([torch.zeros(3), torch.zeros(3).int()]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_any_message(world: Any, name: str) -> None:
    if name == "all_to_all: rows" and 25 % world.size() == 0:
        pytest.fail("the case needs a number of rows that the ranks cannot share")
    with pytest.raises((RuntimeError, ValueError)):
        REFUSED[name](world)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == world.size()
