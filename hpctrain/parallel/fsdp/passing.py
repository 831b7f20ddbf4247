"""Unsharding on demand (ZeRO 3): units are gathered before they compute and freed afterwards, forward and backward.

Note: the states of a unit in a step. A unit is gathered before its forward pass and freed after it.
It is gathered again when the backward pass reaches its outputs. It is freed when the gradients of
its inputs and of its parameters have been computed (see ``unit_hooks``). The model's own unit stays
unsharded from the forward pass to the end of the backward pass. On a device with streams, the next
units are gathered while one computes: at most ``prefetch`` of them, because each one takes memory.
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
    """Reducer of gradients, group by group, in the order of a plan."""

    def hurry(self, number: int) -> None:
        """Reduce the groups up to ``number``, with zeros for gradients that this rank does not compute."""


@dataclass(eq=False)
class Station:
    """State of one unit: its parameter groups, and whether they are unsharded."""

    number: int
    name: str
    module: nn.Module
    pieces: list[Piece]
    tickets: list[Ticket] = field(default_factory=list)  # handles of its all-gathers until they have been waited for
    gathered: bool = False
    shown: bool = False

    def show(self) -> None:
        """Wait for the all-gathers of the unit, and register its unsharded parameters in the module."""
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if not self.shown:
            self.shown = True
            for piece in self.pieces:
                piece.show_whole()

    def hide(self) -> None:
        """Register the shards in the module."""
        if self.shown:
            self.shown = False
            for piece in self.pieces:
                piece.show_shards()

    def release(self) -> None:
        """Reshard the unit: free the memory of its unsharded parameters."""
        self.hide()
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if self.gathered:
            self.gathered = False
            for piece in self.pieces:
                piece.free()


class Passing:
    """Residency (``Form``) that unshards as few units at a time as the passes allow.

    All ranks gather units in the same order (see ``order``). The first of ``stations`` is the
    model's own unit.
    """

    def __init__(self, stations: Sequence[Station], comm: Communicator, lane: Lane, prefetch: int) -> None:
        self._stations, self._comm, self._lane = stations, comm, lane
        self._depth = prefetch if lane.beside else 0
        self._plan: Plan | None = None
        self._walk: Walk | None = None
        self._record: Plan | None = None  # recorded in the first forward and backward pass
        self._going_back = False
        self._hooks: list[UnitHooks] = []
        self.reducer: Reducer | None = None
        self.idle = False  # while all units are unsharded at once, the hooks of units have no effect

    def mark(self, *, frozen: bool = False) -> None:
        """Do nothing: units are gathered again for each pass, and are never stale."""

    def meet(self) -> None:
        """Do nothing: no other rank computes with this rank's memory."""

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Register the hooks that unshard and reshard units as the model runs."""
        self._hooks = [UnitHooks(self, station, begins) for station in self._stations[1:]]
        return [handle for unit in self._hooks for handle in unit.attach()]

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; ``records``: learn its order of collectives, if that is unknown."""
        self._record = Plan([], []) if records and self._plan is None else None
        self._walk = Walk(self._plan.forward) if self._plan else None
        self.need(self._stations[0])

    def end_forward(self, *, keeps: bool) -> None:
        """Execute the rest of the plan; free the model's own unit unless ``keeps``: a backward pass may follow."""
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
        """Execute the rest of the plan, and free all units."""
        self._do_the_rest()
        for station in self._stations:
            self.release(station)
        for unit in self._hooks:
            unit.end()
        self._going_back = False

    def settle(self, world: Communicator) -> None:
        """Make all ranks use the order that rank 0 has recorded. Collective, at the end of a pass."""
        if self._plan is None and (plan := world.broadcast_object(self._record)) is not None:
            self._plan = Plan(plan.forward, hastened(plan.backward, self._depth))
        self._record = None

    def stand_in(self, *, backward: bool) -> None:
        """Take part in the collectives of a pass without computing."""
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
        """Unshard all units at once. Collective."""
        self._walk = self._record = None
        for station in self._stations:
            self.need(station)
        self.idle = True

    def dismiss(self) -> None:
        """Reshard all units."""
        self.idle = False
        for station in self._stations:
            self.release(station)

    # Units ------------------------------------------------------------------------------------------------------------

    @property
    def going_back(self) -> bool:
        """Return whether a backward pass is in progress."""
        return self._going_back

    def need(self, station: Station) -> None:
        """Unshard a unit for the computation that follows."""
        if not station.gathered or station.tickets:
            self._want(("gather", station.number))
        station.show()

    def release(self, station: Station) -> None:
        """Reshard a unit."""
        station.release()

    # Reductions (a ``Watcher``) ---------------------------------------------------------------------------------------

    def reducing(self, piece: int) -> None:
        """Execute the actions that the plan lists before a reduction that is about to start."""
        for action in self._walk.before(("reduce", piece)) if self._walk is not None else []:
            self._do(action)

    def complete(self, piece: int) -> None:
        """Record that all gradients of a group have been computed."""
        if self._record is not None:
            self._record.backward.append(("reduce", piece))

    # Internals --------------------------------------------------------------------------------------------------------

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
            return [action]  # the first pass did not use it; now all ranks do
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
        """Free a unit that was gathered only because other ranks need it."""
        if action[0] == "gather" and not self._stations[action[1]].shown:
            self._stations[action[1]].release()

    def _do_the_rest(self) -> None:
        walk, self._walk = self._walk, None
        for action in walk.rest() if walk is not None else []:
            self._do(action)
            self._pass_by(action)
