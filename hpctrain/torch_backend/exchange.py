"""Collectives of a process group on tensors of any layout, over a communicator, which takes flat contiguous ones.

Elements are exchanged in logical order, so that ranks may have different memory layouts
(channels_last on one, contiguous on another).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hpctrain.errors import CommunicationError
from hpctrain.torch_backend.arguments import Reduction

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class TensorExchange:
    """Collectives of one group."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size

    # Reductions -------------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Reduction) -> None:
        """Reduce over all ranks, in place."""
        if tensor.is_contiguous() and op.is_plain(tensor) and not tensor.is_conj() and not tensor.is_inference():
            self._comm.all_reduce(tensor, op.name)
            return
        if tensor.layout is torch.sparse_coo:
            self._sum_sparse(tensor)
            return
        flat = packed(tensor, written=True)
        self._all_reduce_flat(flat, op)
        unpack(flat, tensor)

    def _all_reduce_flat(self, flat: Tensor, op: Reduction) -> None:
        op.premultiply(flat)
        self._comm.all_reduce(_real(flat, op), op.of_communicator(flat))
        op.finish(flat, self._size)

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Reduction) -> None:
        """Reduce several tensors of one dtype over all ranks, in place, as one."""
        flat = torch.cat([packed(tensor, written=True) for tensor in tensors])
        self._all_reduce_flat(flat, op)
        spread(flat, tensors)

    def reduce(self, tensor: Tensor, op: Reduction, root: int) -> None:
        """Reduce into the root's tensor; other ranks' tensors are unchanged."""
        is_root = self._rank == root
        flat = packed(tensor, written=is_root)
        if op.factor is not None and not is_root:
            flat = flat.clone()
        op.premultiply(flat)
        self._comm.reduce(_real(flat, op), op.of_communicator(flat), root)
        if is_root:
            op.finish(flat, self._size)
            unpack(flat, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> None:
        """Reduce over all ranks; store slice ``rank`` of the flat result."""
        source = packed(tensor)
        if op.factor is not None:
            source = source.clone()
            op.premultiply(source)
        flat = packed(output, written=True)
        self._comm.reduce_scatter(_real(flat, op), _real(source, op), op.of_communicator(flat))
        op.finish(flat, self._size)
        unpack(flat, output)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Reduction) -> None:
        """Reduce lists of tensors over all ranks; store tensor ``rank``. Sizes may differ within a list."""
        if len({tensor.numel() for tensor in tensors}) == 1:
            self.reduce_scatter(output, torch.cat([packed(tensor) for tensor in tensors]), op)
            return
        for root, tensor in enumerate(tensors):
            part = packed(tensor).clone()
            self.reduce(part, op, root)
            if root == self._rank:
                unpack(part, output)

    def _sum_sparse(self, tensor: Tensor) -> None:
        """Sum sparse tensors over all ranks, in place; the result is coalesced."""
        own = tensor.detach().coalesce()
        counts = self._comm.all_gather_object((own.values().shape[0], own.shape, own.sparse_dim(), own.dtype))
        kinds = {tuple(kind) for _, *kind in counts}
        if len(kinds) > 1:
            raise CommunicationError(f"all_reduce of sparse tensors: the ranks have different tensors: {kinds}")
        rows = [count for count, *_ in counts]
        indices = self._gather_rows(own.indices().t().contiguous(), rows)
        values = self._gather_rows(own.values().contiguous(), rows)
        with torch.no_grad():
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce())

    def _gather_rows(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        width = tensor.shape[1:].numel()
        self._gather_uneven(whole.view(-1), tensor.view(-1), [count * width for count in rows])
        return whole

    # Copies -----------------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks."""
        is_root = self._rank == root
        flat = packed(tensor, written=not is_root)
        self._comm.broadcast(flat, root)
        if not is_root:
            unpack(flat, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Store the tensors of all ranks, in rank order, in one tensor."""
        flat = packed(output, written=True)
        self._comm.all_gather(flat, packed(tensor))
        unpack(flat, output)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Store the tensor of each rank in a list; sizes may differ between ranks."""
        sizes = [output.numel() for output in outputs]
        own = packed(tensor)
        whole = own.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            self._comm.all_gather(whole, own)
        else:
            self._gather_uneven(whole, own, sizes)
        spread(whole, outputs)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int) -> None:
        """Store the tensor of each rank in a list of the root."""
        own = packed(tensor)
        if outputs is None:
            self._comm.gather(None, own, root)
            return
        whole = own.new_empty(own.numel() * self._size)
        self._comm.gather(whole, own, root)
        spread(whole, outputs)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, root: int) -> None:
        """Store tensor ``rank`` of the root's list."""
        whole = None if tensors is None else torch.cat([packed(tensor) for tensor in tensors])
        flat = packed(output, written=True)
        self._comm.scatter(flat, whole, root)
        unpack(flat, output)

    def all_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send ``sent[r]`` elements of a tensor to each rank r, and store the received ones."""
        flat = packed(output, written=True)
        self._all_to_all(flat, packed(tensor), received, sent)
        unpack(flat, output)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send one tensor to each rank and store the received ones."""
        source = torch.cat([packed(tensor) for tensor in tensors])
        whole = source.new_empty(sum(output.numel() for output in outputs))
        self._all_to_all(whole, source, [each.numel() for each in outputs], [each.numel() for each in tensors])
        spread(whole, outputs)

    def _gather_uneven(self, whole: Tensor, own: Tensor, sizes: Sequence[int]) -> None:
        """Gather flat shares of different sizes: each rank sends its own to all others."""
        self._all_to_all(whole, own.repeat(self._size), sizes, [own.numel()] * self._size)

    def _all_to_all(self, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        # Sizes may differ on other ranks only, so all ranks must use the form that takes any sizes.
        if output.is_cuda:
            target = torch.empty_like(output, device="cpu")
            self._comm.transport.all_to_all(target, source.cpu(), sent, received)
            output.copy_(target)
        else:
            self._comm.transport.all_to_all(output, source, sent, received)


# Layouts --------------------------------------------------------------------------------------------------------------


def packed(tensor: Tensor, *, written: bool = False) -> Tensor:
    """Return a tensor's elements as a flat contiguous tensor: the same memory if possible, else a copy.

    ``written`` refuses a tensor that has several elements at one place, such as an expanded one.
    """
    plain = _ordinary(tensor)
    if plain.layout is not torch.strided:
        raise CommunicationError(f"a tensor of {plain.layout} cannot be exchanged: allowed are dense tensors")
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    if written and any(stride == 0 and length > 1 for stride, length in zip(plain.stride(), plain.shape)):
        raise CommunicationError(
            f"a tensor of shape {tuple(plain.shape)} and strides {plain.stride()} cannot be written: several elements "
            "are at one place; pass a copy (contiguous())"
        )
    return plain.resolve_conj().resolve_neg().contiguous().view(-1)


def unpack(flat: Tensor, tensor: Tensor) -> None:
    """Copy elements back to the tensor that was packed, if they are a copy."""
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        plain = _ordinary(tensor)
        plain.copy_(flat.view(plain.shape))


def spread(whole: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor to tensors of any layout."""
    for output, part in zip(outputs, torch.split(whole, [output.numel() for output in outputs])):
        unpack(part, output)


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, of which autograd knows nothing."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias: Tensor = from_dlpack(tensor)
    return alias


def _real(flat: Tensor, op: Reduction) -> Tensor:
    """Return a complex tensor as real numbers where the reduction treats both parts alike: MPI adds those."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() and op.name in ("sum", "average") else flat
