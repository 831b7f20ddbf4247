"""Gradients of one parameter group during one backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.parallel.fsdp.carrier import Ticket
from hpctrain.parallel.fsdp.piece import Piece


@dataclass(eq=False)
class Flow:
    """Reduction of the gradients of one parameter group: their unsharded buffer, its state, and the reduced slice."""

    piece: Piece
    number: int  # index among the parameter groups
    first: int  # index of the group's first parameter among the parameters of all groups
    dtype: torch.dtype  # dtype of the gradients in communication
    # indices within the group of the parameters whose gradient has been computed
    arrived: set[int] = field(default_factory=set)
    # those of ``arrived`` whose gradient is not yet copied to the flat buffer
    waiting: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    ticket: Ticket | None = None
    target: Tensor | None = None  # output of the reduce-scatter: the slice of this rank
    _views: list[Tensor] = field(default_factory=list)
    _slice: Tensor | None = None  # this rank's slice of the gradients; its memory is reused in each step

    @property
    def nbytes(self) -> int:
        """Return the size of the unsharded gradients in bytes."""
        return self.piece.layout.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Return whether the gradients of all parameters of the group have been computed."""
        return len(self.arrived) == len(self.piece.members)

    def open(self, memory: Tensor) -> None:
        """Use ``memory``, given as bytes, as the buffer of the unsharded gradients."""
        layout, end = self.piece.layout, 0
        self.flat, self._views = memory.view(self.dtype), []
        for member, place, numel in zip(self.piece.members, layout.places, layout.numels):
            self.flat[end:place].zero_()  # padding is reduced too, and must stay finite
            end = place + numel
            self._views.append(self.flat[place:end].view(member.shape))
        self.flat[end:].zero_()

    def put(self, number: int, share: float) -> None:
        """Write ``share`` x a parameter's gradient to its place in the buffer in one pass, then release the gradient.

        Writes zeros if the parameter has no gradient. A share of 0 writes zeros even if the
        gradient is infinite or NaN.
        """
        whole, view = self.piece.members[number].whole, self._views[number]
        if whole.grad is None or share == 0:
            view.zero_()
        else:
            torch.mul(whole.grad, share, out=view)
        whole.grad = None

    def aim(self) -> Tensor:
        """Return the buffer for this rank's slice: the one of the last step, or a new one if they accumulate there."""
        piece = self.piece
        if self._slice is None:
            self._slice = torch.zeros_like(piece.own)
        adds = any(member.shard.grad is not None for member in piece.members)
        if adds or self.dtype is not piece.own.dtype:
            self.target = torch.empty(piece.layout.share, dtype=self.dtype, device=piece.own.device)
        else:
            self.target = self._slice
        return self.target

    def land(self) -> None:
        """Process this rank's slice, which ``target`` holds or will hold after enqueued work; does nothing here."""

    def close(self) -> None:
        """Release the buffer of the unsharded gradients."""
        self.flat, self._views = None, []

    def hand_out(self, used: list[bool]) -> None:
        """Assign the reduced gradients to the shards.

        ``used`` marks the parameters that have a gradient on any rank. The others keep the gradient
        that they had, as in a backward pass without sharding.
        """
        assert self._slice is not None and self.target is not None
        for member, wanted in zip(self.piece.members, used):
            begin, end = member.held.offset, member.held.offset + member.held.numel
            if not wanted:
                continue
            new, shard = self.target[begin:end].view(member.shard.shape), member.shard
            if shard.grad is not None:
                shard.grad.add_(new)
                continue
            kept = self._slice[begin:end].view(shard.shape)
            shard.grad = kept if self.target is self._slice else kept.copy_(new)
        self.target = None
        self.arrived.clear()
