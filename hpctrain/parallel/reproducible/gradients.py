"""Gradients of a step's microbatches: taken from the backward passes, added, and reduced over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import ALIGN, assign_buckets
from hpctrain.parallel.reproducible.tree import HALF, LocalSums, share_of_rank
from hpctrain.parallel.reproducible.tree_reduce import ReducedBlock, TreeReduce

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.param_group import GroupReduction
    from hpctrain.parallel.strategy import Strategy

MOST_BYTES, LEAST_BYTES = 2**24, 2**18  # of a block of gradients that is reduced at a time, on all ranks and on one

HOOKS_REFUSED = "under parallel.reproducible = true it would be called for each microbatch"  # on parameters

Sums = Sequence[Mapping[str, Tensor]]  # gradients by name, one mapping per node of the tree that this rank computes


def plain_backward() -> UsageError:
    """Return the error for a backward pass that is not divided into microbatches."""
    return UsageError(
        "loss.backward() under parallel.reproducible = true: its sums would depend on the number of ranks; allowed is "
        "run.backward(batch, compute), which divides the batch into microbatches; compute(part) returns the loss",
        everywhere=True,
    )


class MicrobatchGradients:
    """Gradients of one model in the microbatches of a step; ``reproducible`` strategies provide and receive them."""

    def __init__(self, strategy: ReproducibleStrategy, reduction: TreeReduce) -> None:
        self._strategy, self._reduction = strategy, reduction
        self._sums, self._begin, self._end = LocalSums(0), 0, 0
        self._adds_alone = True

    @contextmanager
    def step(self, microbatches: int) -> Iterator[None]:
        """Compute this rank's microbatches in the ``with`` block; its end reduces the gradients. Collective."""
        self._sums = LocalSums(microbatches)
        comm = self._reduction.comm
        self._begin, self._end = share_of_rank(microbatches, comm.rank, comm.size)
        self._adds_alone = any(one.dtype in HALF for _, one in self._strategy.computed_with())
        with self._strategy.local_passes():
            yield
        self._strategy.reduce_sums(self._sums.sums, self._reduction, microbatches)
        self._sums = LocalSums(0)

    def take(self, microbatch: int) -> None:
        """Take the gradients of a microbatch, so that the next backward pass starts without any.

        Those of a left leaf stay, if this rank computes its sibling, to which autograd then adds them
        while they are in cache; not those of 16 bits, which are added in float32.
        """
        pairs = not self._adds_alone
        if pairs and microbatch % 2 == 0 and microbatch + 1 < self._end:
            return
        begin = microbatch - 1 if pairs and microbatch % 2 and microbatch > self._begin else microbatch
        found: dict[str, Tensor] = {}
        for name, parameter in self._strategy.computed_with():
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise UsageError(f"parameter {name} got a sparse gradient: only dense ones can be reduced")
            found[name], parameter.grad = parameter.grad, None
        self._sums.add((begin, microbatch + 1), found)


class ReproducibleStrategy(ABC):
    """Interface of strategies whose gradients are added in the order of the microbatches."""

    @abstractmethod
    def local_passes(self) -> AbstractContextManager[None]:
        """Return a context of passes that communicate nothing and leave gradients on this rank. Collective."""

    @abstractmethod
    def computed_with(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return, by name, the parameters that passes compute with; backward passes leave gradients there."""

    @abstractmethod
    def reduce_sums(self, sums: Sums, reduction: TreeReduce, microbatches: int) -> None:
        """Leave the sum over all ranks in the parameters of the model. Collective."""


@contextmanager
def local_passes(strategies: Iterable[Strategy]) -> Iterator[None]:
    """Make passes without communication in the ``with`` block, where strategies are reproducible. Collective."""
    with ExitStack() as stack:
        for strategy in strategies:
            if isinstance(strategy, ReproducibleStrategy):
                stack.enter_context(strategy.local_passes())
        yield


# Reductions -----------------------------------------------------------------------------------------------------------


def used_anywhere(names: Sequence[str], sums: Sums, reduction: TreeReduce) -> set[str]:
    """Return the names of the parameters that have a gradient on any rank. Collective."""
    flags = torch.tensor([any(name in each for each in sums) for name in names], dtype=torch.uint8)
    reduction.comm.all_reduce(flags, "max")
    return {name for name, flag in zip(names, flags.tolist()) if flag}


@torch.no_grad()
def reduce_whole(named: Sequence[tuple[str, nn.Parameter]], sums: Sums, reduction: TreeReduce, count: int) -> None:
    """Set ``grad`` of parameters that every rank holds in full; ``count`` is the number of microbatches. Collective."""
    used = used_anywhere([name for name, _ in named], sums, reduction)
    dtypes: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(named):
        if name in used:
            dtypes.setdefault(sum_dtype(parameter.dtype), []).append((name, parameter))
    limit = max(min(MOST_BYTES // reduction.comm.size, MOST_BYTES // 4), LEAST_BYTES)
    blocks = [
        _block(dtype, [members[number] for number in numbers], sums, reduction.comm.size)
        for dtype, members in dtypes.items()
        for numbers in assign_buckets(
            [one.numel() * dtype.itemsize for _, one in members], range(len(members)), limit, limit
        )
    ]
    reduction.all_reduce(blocks, count)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a parameter are added."""
    return torch.float32 if dtype in HALF else dtype


def _block(dtype: torch.dtype, members: Sequence[tuple[str, nn.Parameter]], sums: Sums, ranks: int) -> ReducedBlock:
    align = ALIGN // dtype.itemsize
    offsets, end = [], 0
    for _, parameter in members:
        offsets.append(end)
        end += -(-parameter.numel() // align) * align
    numel = -(-max(end, 1) // (ranks * align)) * ranks * align

    def take(memory: Tensor) -> None:
        for (name, parameter), offset in zip(members, offsets):
            total = memory[offset : offset + parameter.numel()].view(parameter.shape)
            if parameter.grad is not None:
                parameter.grad.add_(total).add_(0.0)
                continue
            own = next((each[name] for each in sums if name in each), None)  # its memory is no longer needed
            if own is not None and own.dtype is parameter.dtype:
                parameter.grad = torch.add(total, 0.0, out=own)
            else:
                parameter.grad = (total + 0.0).to(parameter.dtype)

    places = [(name, offset, parameter.shape) for (name, parameter), offset in zip(members, offsets)]
    return ReducedBlock(numel, dtype, partial(write_sum, sums, places), take)


def write_sum(sums: Sums, places: Sequence[tuple[str, int, torch.Size]], index: int, memory: Tensor) -> None:
    """Write one of this rank's sums into flat memory; ``places`` are names, offsets and shapes."""
    for name, offset, shape in places:
        view = memory[offset : offset + shape.numel()].view(shape)
        if name in sums[index]:
            view.copy_(sums[index][name])
        else:
            view.zero_()


@torch.no_grad()
def reduce_shards(reductions: Sequence[GroupReduction], sums: Sums, reduction: TreeReduce, count: int) -> None:
    """Set the gradients of the shards of parameter groups. Collective."""
    names = [member.name for each in reductions for member in each.group.members]
    used = used_anywhere(names, sums, reduction)
    reduction.reduce_scatter([_shard_block(each, sums) for each in reductions], count)
    for each in reductions:
        each.assign_gradients([member.name in used for member in each.group.members])
        each.close()


def _shard_block(group_reduction: GroupReduction, sums: Sums) -> ReducedBlock:
    group = group_reduction.group

    def take(memory: Tensor) -> None:
        group_reduction.flat = memory  # the target of a single rank that offloads
        target = group_reduction.allocate_target()
        torch.add(memory, 0.0, out=target)
        group_reduction.after_reduce()

    places = [(each.name, offset, each.shape) for each, offset in zip(group.members, group.layout.offsets)]
    return ReducedBlock(group.layout.numel, group_reduction.dtype, partial(write_sum, sums, places), take)
