"""Follow the gradients of one piece through one backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.parallel.fsdp.carrier import Ticket
from hpctrain.parallel.fsdp.piece import Piece


@dataclass(eq=False)
class Flow:
    """Hold the whole gradients of a piece while they come and until they are reduced."""

    piece: Piece
    number: int  # among the pieces
    first: int  # the number of its first member among those of all pieces
    dtype: torch.dtype  # that the gradients travel in
    arrived: set[int] = field(default_factory=set)  # numbers of members within the piece
    waiting: set[int] = field(default_factory=set)  # of these, those whose gradient has no place yet
    flat: Tensor | None = None
    ticket: Ticket | None = None
    target: Tensor | None = None  # what this rank's slice is reduced into
    _views: list[Tensor] = field(default_factory=list)
    _slice: Tensor | None = None  # this rank's gradients; their memory is kept from step to step

    @property
    def nbytes(self) -> int:
        """Return the memory that whole gradients need."""
        return self.piece.layout.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Tell whether all gradients have come."""
        return len(self.arrived) == len(self.piece.members)

    def open(self, memory: Tensor) -> None:
        """Take memory, as bytes, for the whole gradients."""
        layout, end = self.piece.layout, 0
        self.flat, self._views = memory.view(self.dtype), []
        for member, place, numel in zip(self.piece.members, layout.places, layout.numels):
            self.flat[end:place].zero_()  # padding is reduced too, and must stay finite
            end = place + numel
            self._views.append(self.flat[place:end].view(member.shape))
        self.flat[end:].zero_()

    def put(self, number: int, share: float) -> None:
        """Write ``share`` x a member's gradient to its place, in one pass, and let go of it; zeros if it has none.

        A share of 0 writes zeros, whatever the gradient is: it may be infinite or NaN.
        """
        whole, view = self.piece.members[number].whole, self._views[number]
        if whole.grad is None or share == 0:
            view.zero_()
        else:
            torch.mul(whole.grad, share, out=view)
        whole.grad = None

    def aim(self) -> Tensor:
        """Return memory for this rank's slice: that of the last step, unless gradients are to add up there."""
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
        """Take note that ``target`` holds, or is about to hold, this rank's slice, reduced."""

    def close(self) -> None:
        """Let go of the whole gradients."""
        self.flat, self._views = None, []

    def hand_out(self, used: list[bool]) -> None:
        """Give the shards their gradients; one that nobody ``used`` keeps what it had, as in a plain backward pass."""
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
