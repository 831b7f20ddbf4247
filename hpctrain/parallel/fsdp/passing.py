"""Gather a unit's parameters before it computes and free them afterwards, forward and backward (ZeRO 3).

Note: a unit's life in a step. Gathered before its forward pass, freed after it; gathered again when backward comes to
what it returned, freed when backward has left what it was given and its gradients have come (``unit_hooks`` says when).
The model's own unit stays from the forward to the end of the backward pass. On a device with streams the next units are
gathered while one computes: at most ``prefetch`` of them, as each takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.carrier import Lane, Ticket
from hpctrain.parallel.fsdp.order import Action, Plan, Walk, hastened
from hpctrain.parallel.fsdp.piece import Piece
from hpctrain.parallel.fsdp.unit_hooks import UnitHooks


class Reducer(Protocol):
    """Reduce pieces of gradients that are due in the order of a plan."""

    def hurry(self, number: int) -> None:
        """Reduce up to a piece, with zeros for what nobody computes here."""


@dataclass(eq=False)
class Station:
    """Be one unit: its pieces, and whether they are whole now."""

    number: int
    name: str
    module: nn.Module
    pieces: list[Piece]
    tickets: list[Ticket] = field(default_factory=list)  # of its gathering, as long as nobody has waited for it
    gathered: bool = False
    shown: bool = False

    def show(self) -> None:
        """Let the module see whole parameters, which have come."""
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if not self.shown:
            self.shown = True
            for piece in self.pieces:
                piece.show_whole()

    def hide(self) -> None:
        """Let the module see shards."""
        if self.shown:
            self.shown = False
            for piece in self.pieces:
                piece.show_shards()

    def release(self) -> None:
        """Give the memory of whole parameters back."""
        self.hide()
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if self.gathered:
            self.gathered = False
            for piece in self.pieces:
                piece.free()


class Passing:
    """Keep as few units whole as the passes allow (a ``Form``); every rank follows one order (see ``order``).

    The first of ``stations`` is the model's own unit.
    """

    def __init__(self, stations: Sequence[Station], comm: Communicator, lane: Lane, prefetch: int) -> None:
        self._stations, self._comm, self._lane = stations, comm, lane
        self._depth = prefetch if lane.beside else 0
        self._plan: Plan | None = None
        self._walk: Walk | None = None
        self._record: Plan | None = None  # of the first pass that goes forward and back
        self._going_back = False
        self._hooks: list[UnitHooks] = []
        self.reducer: Reducer | None = None
        self.idle = False  # while all units are summoned, those that run change nothing

    def mark(self, *, frozen: bool = False) -> None:
        """Do nothing: what is gathered anew for each pass is never stale."""

    def meet(self) -> None:
        """Do nothing: nobody else computes with this rank's memory."""

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Let units be gathered and freed as the model runs."""
        self._hooks = [UnitHooks(self, station, begins) for station in self._stations[1:]]
        return [handle for unit in self._hooks for handle in unit.attach()]

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; with ``records`` its order is to be learned, if it is not known."""
        self._record = Plan([], []) if records and self._plan is None else None
        self._walk = Walk(self._plan.forward) if self._plan else None
        self.need(self._stations[0])

    def end_forward(self, *, keeps: bool) -> None:
        """Do with the others what only they needed, and free the model's own unit unless it ``keeps`` for backward."""
        self._do_the_rest()
        self._stations[0].hide()
        if not keeps:
            self.release(self._stations[0])

    def begin_backward(self, *, reduces: bool) -> None:
        """Begin a backward pass."""
        self._going_back = True
        if self._plan is not None:
            plan = self._plan if reduces else self._plan.without_reductions()
            self._walk = Walk(plan.backward)
        self.need(self._stations[0])

    def end_backward(self) -> None:
        """Do with the others what only they needed, and free everything."""
        self._do_the_rest()
        for station in self._stations:
            self.release(station)
        for unit in self._hooks:
            unit.end()
        self._going_back = False

    def settle(self, world: Communicator) -> None:
        """Let all ranks keep to the order that rank 0 has seen; a call by all ranks at the end of a pass."""
        if self._plan is None and (plan := world.broadcast_object(self._record)) is not None:
            self._plan = Plan(plan.forward, hastened(plan.backward, self._depth))
        self._record = None

    def stand_in(self, *, backward: bool) -> None:
        """Do in a pass what concerns the other ranks."""
        if self._plan is None:
            raise UsageError(
                f"rank {self._comm.rank} has no sample, but the first step needs some of every rank, because it shows "
                "in which order units are gathered: make the batch larger"
            )
        self._walk = Walk(self._plan.forward)
        self._do_the_rest()
        if backward:
            self._walk = Walk(self._plan.backward)
            self._do_the_rest()

    def summon(self) -> None:
        """Gather all units and show them whole; a call by all ranks."""
        self._walk = self._record = None
        for station in self._stations:
            self.need(station)
        self.idle = True

    def dismiss(self) -> None:
        """Free all units."""
        self.idle = False
        for station in self._stations:
            self.release(station)

    # Units ------------------------------------------------------------------------------------------------------------

    @property
    def going_back(self) -> bool:
        """Tell whether a backward pass is under way."""
        return self._going_back

    def need(self, station: Station) -> None:
        """Let a unit be whole for what is computed next."""
        if not station.gathered or station.tickets:
            self._want(("gather", station.number))
        station.show()

    def release(self, station: Station) -> None:
        """Free a unit."""
        station.release()

    # Reductions (a ``Watcher``) ---------------------------------------------------------------------------------------

    def reducing(self, piece: int) -> None:
        """Do what comes before a reduction that is about to be done."""
        for action in self._walk.before(("reduce", piece)) if self._walk is not None else []:
            self._do(action)

    def complete(self, piece: int) -> None:
        """Take note that the gradients of a piece have come."""
        if self._record is not None:
            self._record.backward.append(("reduce", piece))

    # How --------------------------------------------------------------------------------------------------------------

    def _want(self, action: Action) -> None:
        if self._walk is None:
            if self._record is not None:
                (self._record.backward if self._going_back else self._record.forward).append(action)
            self._do(action)
            return
        for other in self._due(self._walk, action):
            self._do(other)
            if other != action:
                self._pass_by(other)
        for other in self._walk.ahead(self._depth):
            self._do(other)

    def _due(self, walk: Walk, action: Action) -> list[Action]:
        due = walk.until(action)
        if due is not None:
            return due
        if self._plan is not None and not self._plan.knows(action):
            return [action]  # nobody needed it in the first pass; now all ranks do
        name = self._stations[action[1]].name
        raise UsageError(
            f"{f'unit {name}' if name else 'the model'} runs more often, or in another order, than in the first step, "
            "whose order all ranks keep to: let units run in one order, make one unit of what changes places, and "
            "checkpoint activations with use_reentrant=False"
        )

    def _do(self, action: Action) -> None:
        kind, number = action
        if kind == "gather":
            self._gather(self._stations[number])
        elif self.reducer is not None:
            self.reducer.hurry(number)

    def _gather(self, station: Station) -> None:
        if station.gathered:
            return
        station.gathered = True
        for piece in station.pieces:
            piece.make_room()
            station.tickets.append(self._lane.run(piece.gather))

    def _pass_by(self, action: Action) -> None:
        """Free what was gathered only because others need it."""
        if action[0] == "gather" and not self._stations[action[1]].shown:
            self._stations[action[1]].release()

    def _do_the_rest(self) -> None:
        walk, self._walk = self._walk, None
        for action in walk.rest() if walk is not None else []:
            self._do(action)
            self._pass_by(action)
