"""Keep whole parameters in memory, and bring them up to date once after each change.

Note: shards that the node maps. Where ranks share memory, the whole parameters lie there once for all ranks of the
node, and a rank's shards are its slices of them, which its optimizer updates in place. Then the gathering of all
parameters is one meeting and no copy; between nodes only what other nodes own is fetched, each rank its part. Two
meetings keep readers and writers apart: one before an update, as another rank may still compute with the old values,
and one before the next pass. Where no memory is shared, each rank has the whole parameters for itself (ZeRO 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.fsdp.carrier import Lane, Ticket
from hpctrain.parallel.fsdp.piece import Piece


class Resident:
    """Gather all pieces when they are stale (a ``Form``)."""

    def __init__(self, pieces: Sequence[Piece], comm: Communicator, lane: Lane, *, mapped: bool) -> None:
        self._pieces, self._comm, self._lane = pieces, comm, lane
        self._mapped = mapped
        self._stale, self._frozen_stale = True, True
        self._tickets: list[Ticket] = []
        self._near = self._fence = None
        if mapped:
            self._near = comm if comm.nodes == 1 else comm.split(comm.node)
            self._fence = self._near.common(64 * self._near.size, torch.uint8, must_share=True)

    def mark(self, *, frozen: bool = False) -> None:
        """Take note that shards have changed, maybe those of frozen parameters too."""
        self._stale, self._frozen_stale = True, self._frozen_stale or frozen
        if self._lane.beside and not frozen:
            self._start()  # beside whatever the caller does between two steps

    def meet(self) -> None:
        """Wait until nobody on the node computes with the parameters any more, where they are shared.

        A gathering that is under way has to end first: it writes where an update is about to write.
        """
        self._settle()
        if self._near is not None and self._fence is not None:
            self._near.all_gather(self._fence, self._fence.chunk(self._near.size)[self._near.rank])

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Bring the whole parameters up to date and show them; a call by all ranks."""
        self._gather()
        self._show(whole=True)

    def end_forward(self, *, keeps: bool) -> None:
        """Show shards again."""
        self._show(whole=False)

    def begin_backward(self, *, reduces: bool) -> None:
        """Show whole parameters, for activations that are computed again."""
        self._show(whole=True)

    def end_backward(self) -> None:
        """Show shards again."""
        self._show(whole=False)

    def settle(self, world: Communicator) -> None:
        """Do nothing: no order has to be agreed on."""

    def summon(self) -> None:
        """Bring all parameters up to date and show them whole; a call by all ranks."""
        self._gather()
        self._show(whole=True)

    def dismiss(self) -> None:
        """Show shards again."""
        self._show(whole=False)

    def stand_in(self, *, backward: bool) -> None:
        """Do in a pass what concerns the other ranks."""
        self._gather()

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Do nothing: all parameters are whole in all passes."""
        return []

    # How --------------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Bring the whole parameters up to date, and order what is computed next behind it."""
        if self._stale:
            self._start()
        self._settle()

    def _settle(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()

    def _start(self) -> None:
        pieces = [piece for piece in self._pieces if piece.trained or self._frozen_stale]
        self._stale = self._frozen_stale = False
        if self._mapped and self._comm.nodes == 1:
            for piece in pieces:
                piece.contribute()
            self.meet()
        else:
            self._tickets += [self._lane.run(piece.gather) for piece in pieces]

    def _show(self, *, whole: bool) -> None:
        for piece in self._pieces:
            piece.show_whole() if whole else piece.show_shards()
