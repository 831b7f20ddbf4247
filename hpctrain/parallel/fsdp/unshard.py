"""Unsharding on demand (ZeRO 3): units are gathered before they compute and freed afterwards, forward and backward.

Note: the states of a unit in a step. A unit is gathered before its forward pass and freed after it.
It is gathered again when the backward pass reaches its outputs. It is freed when the gradients of
its inputs and of its parameters have been computed (see ``UnitState``). The model's own unit stays
unsharded from the forward pass to the end of the backward pass. On a device with streams, the next
units are gathered while one computes: at most ``prefetch`` of them, because each one takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import CommStream, StreamWork
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.collectives import GradReduction, Residency
from hpctrain.parallel.fsdp.param_group import ParamGroup
from hpctrain.parallel.hooks import after_backward, after_gradient, around_forward, before_backward
from hpctrain.plain_tensors import on_shards

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.setup import ShardingPlan

# Units: their parameters, and the hooks that unshard and reshard them -------------------------------------------------
#
# Note: when a unit may be freed in the backward pass. When the gradients of the unit's inputs have
# been computed, everything on the path from its outputs to its inputs has been computed. Other paths
# may still lead to gradients of the unit's own parameters. Therefore those gradients must have been
# computed too, at least for the parameters that received one in the last pass. A unit whose inputs
# require no gradient is freed at the end of the pass.


class UnitState:
    """State of one unit: its parameter groups, whether they are unsharded, and what a backward pass has computed."""

    def __init__(self, number: int, name: str, module: nn.Module, groups: list[ParamGroup]) -> None:
        self.number, self.name, self.module, self.groups = number, name, module, groups
        self.handles: list[StreamWork] = []  # of its all-gathers until they have been waited for
        self.gathered = self.unsharded = False
        self._trained = [member for group in groups if group.trained for member in group.members]
        # parameters that received a gradient in the last pass
        self._expected = {member.name for member in self._trained}
        self._received: set[str] = set()
        self._inputs_done = False

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers of the unit, and register its unsharded parameters in the module."""
        self._wait()
        if not self.unsharded:
            self.unsharded = True
            for group in self.groups:
                group.to_unsharded()

    def to_sharded(self) -> None:
        """Register the shards in the module."""
        if self.unsharded:
            self.unsharded = False
            for group in self.groups:
                group.to_sharded()

    def reshard(self) -> None:
        """Reshard the unit: free the memory of its unsharded parameters."""
        self.to_sharded()
        self._wait()
        if self.gathered:
            self.gathered = False
            for group in self.groups:
                group.free()

    def end_backward(self) -> None:
        """End a backward pass."""
        self.reshard()
        if self._received:
            self._expected, self._received = self._received, set()
        self._inputs_done = False

    def forget(self) -> None:
        """Forget a pass that was not completed."""
        self.handles.clear()
        self.gathered = self.unsharded = self._inputs_done = False
        self._expected, self._received = {member.name for member in self._trained}, set()

    def _wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    # Hooks ------------------------------------------------------------------------------------------------------------

    def register_hooks(self, residency: UnshardOnDemand, on_backward: Callable[[], None]) -> list[RemovableHandle]:
        """Register hooks on the unit's module and parameters, and on the gradients of its outputs and inputs."""
        self._residency, self._on_backward = residency, on_backward
        handles = around_forward(self.module, self._before, self._after)
        for member in self._trained:
            handles.append(after_gradient(member.unsharded, self._after_gradient, member.name))
        return handles

    @on_shards
    def _before(self, args: Any, kwargs: Any) -> None:
        if self._residency.idle:
            return
        self._residency.unshard_unit(self)
        if torch.is_grad_enabled() and not self._residency.in_backward:
            after_backward((args, kwargs), self._after_inputs)

    @on_shards
    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        # The recomputation of activations does not end the unit's backward pass.
        if self._residency.idle or self._residency.in_backward:
            return
        if torch.is_grad_enabled():
            before_backward(result, self._begin_backward)
        self.reshard()

    @on_shards
    def _begin_backward(self) -> None:
        self._on_backward()
        self._inputs_done = False
        self._residency.unshard_unit(self)

    @on_shards
    def _after_inputs(self) -> None:
        self._inputs_done = True
        self._reshard_if_done()

    @on_shards
    def _after_gradient(self, name: str, _: Tensor) -> None:
        self._received.add(name)
        if self._inputs_done:
            self._reshard_if_done()

    def _reshard_if_done(self) -> None:
        if self._received >= self._expected:
            self.reshard()


# Recorded order of gathers and reductions in a pass, the same on all ranks --------------------------------------------
#
# Note: why an order is needed. A collective deadlocks if one rank does not enter it. A rank that
# skips a unit (because it has no sample, or takes another branch) would not enter the unit's
# collectives. Therefore the first pass records what it gathers and reduces, and all ranks follow the
# record of rank 0. A rank that needs an action first executes all actions before it.


# A collective action: gather the unit, or reduce the parameter group, of this index.
Action = tuple[Literal["gather", "reduce"], int]


@dataclass(frozen=True)
class PassPlan:
    """Actions of a forward pass, and of the backward pass that follows it."""

    forward: list[Action]
    backward: list[Action]

    def contains(self, action: Action) -> bool:
        """Return whether an action is part of either pass."""
        return action in self.forward or action in self.backward

    def without_reductions(self) -> PassPlan:
        """Return the plan of a pass whose gradients are not reduced."""
        return PassPlan(self.forward, [action for action in self.backward if action[0] == "gather"])


def hoist_gathers(actions: Sequence[Action], prefetch: int) -> list[Action]:
    """Move every gather before the ``prefetch`` reductions that precede it, so that it is complete in time."""
    hoisted: list[Action] = []
    for action in actions:
        position = len(hoisted)
        if action[0] == "gather":
            for _ in range(prefetch):
                reductions = [index for index in range(position) if hoisted[index][0] == "reduce"]
                position = reductions[-1] if reductions else position
        hoisted.insert(position, action)
    return hoisted


class PlanCursor:
    """Position of a rank in a list of actions: those that it has executed, and those that it has requested."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._executed = 0  # number of actions that have been executed
        self._requested = 0  # number of actions up to the last one that was requested

    def advance_to(self, action: Action) -> list[Action] | None:
        """Return the actions still to be executed up to ``action``, inclusive; None if it does not occur any more."""
        for position in range(self._requested, len(self._actions)):
            if self._actions[position] == action:
                self._requested = position + 1
                return self._advance(position + 1)
        return None

    def actions_before(self, action: Action) -> list[Action]:
        """Return the actions still to be executed before one that is being executed, possibly ahead of its position."""
        if action not in self._actions[self._executed :]:
            return []
        return self._advance(self._actions.index(action, self._executed) + 1)[:-1]

    def next_gathers(self, prefetch: int) -> list[Action]:
        """Return the next gathers, as long as at most ``prefetch`` units are gathered that were not requested yet."""
        position = self._executed
        unrequested = sum(kind == "gather" for kind, _ in self._actions[self._requested : position])
        while position < len(self._actions) and self._actions[position][0] == "gather" and unrequested < prefetch:
            position, unrequested = position + 1, unrequested + 1
        return self._advance(position)

    def _advance(self, position: int) -> list[Action]:
        due = list(self._actions[self._executed : position])
        self._executed = max(self._executed, position)
        return due

    def remaining(self) -> list[Action]:
        """Return all actions still to be executed."""
        self._requested = len(self._actions)
        return self._advance(len(self._actions))


# Residency that unshards on demand ------------------------------------------------------------------------------------


class UnshardOnDemand(Residency):
    """Residency that unshards as few units at a time as the passes allow.

    Units are gathered again for each pass, so they are never stale, and no other rank computes with
    this rank's memory. All ranks gather units in the same order (see ``PassPlan``). The first of
    ``units`` is the model's own unit.
    """

    def __init__(self, units: Sequence[UnitState], comm: Communicator, stream: CommStream, prefetch: int) -> None:
        self.units, self._comm, self._stream = units, comm, stream
        self._prefetch = prefetch if stream.asynchronous else 0
        self._plan: PassPlan | None = None
        self._cursor: PlanCursor | None = None
        self._record: PassPlan | None = None  # recorded in the first forward and backward pass
        self.in_backward = False  # whether a backward pass is in progress
        self.reducer: GradReduction | None = None
        self.idle = False  # while all units are unsharded at once, the hooks of units have no effect

    def register_hooks(self, on_backward: Callable[[], None]) -> list[RemovableHandle]:
        return [handle for unit in self.units[1:] for handle in unit.register_hooks(self, on_backward)]

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass; ``records``: learn its order of collectives, if that is unknown."""
        self._record = PassPlan([], []) if records and self._plan is None else None
        self._cursor = PlanCursor(self._plan.forward) if self._plan else None
        self.unshard_unit(self.units[0])

    def end_forward(self, *, needs_backward: bool) -> None:
        """Execute the rest of the plan; free the model's own unit unless a backward pass may follow."""
        self._execute_remaining()
        self.units[0].to_sharded()
        if not needs_backward:
            self.units[0].reshard()

    def begin_backward(self, *, reduces: bool) -> None:
        self.in_backward = True
        if self._plan is not None:
            plan = self._plan if reduces else self._plan.without_reductions()
            self._cursor = PlanCursor(plan.backward)
        self.unshard_unit(self.units[0])

    def end_backward(self) -> None:
        """Execute the rest of the plan, and free all units."""
        self._execute_remaining()
        for unit in self.units:
            unit.end_backward()
        self.in_backward = False

    def agree_on_order(self, world: Communicator) -> None:
        """Make all ranks use the order that rank 0 has recorded. Collective, at the end of a pass."""
        if self._plan is None and (plan := world.broadcast_object(self._record)) is not None:
            self._plan = PassPlan(plan.forward, hoist_gathers(plan.backward, self._prefetch))
        self._record = None

    def rejoin(self, plan: ShardingPlan) -> None:
        """As above; the order is that of the first rank, because others may lack it."""
        self._plan = plan.world.broadcast_object(self._plan)
        self._cursor = self._record = None
        self.in_backward = self.idle = False
        for unit in self.units:
            unit.forget()

    def join_pass(self, *, backward: bool) -> None:
        if self._plan is None:
            raise UsageError(
                f"rank {self._comm.rank} has no sample, but the first step needs some of every rank, because it shows "
                "in which order units are gathered: make the batch larger"
            )
        self._cursor = PlanCursor(self._plan.forward)
        self._execute_remaining()
        if backward:
            self._cursor = PlanCursor(self._plan.backward)
            self._execute_remaining()

    def unshard(self) -> None:
        self._cursor = self._record = None
        for unit in self.units:
            self.unshard_unit(unit)
        self.idle = True

    def reshard(self) -> None:
        self.idle = False
        for unit in self.units:
            unit.reshard()

    # Units ------------------------------------------------------------------------------------------------------------

    def unshard_unit(self, unit: UnitState) -> None:
        """Unshard a unit for the computation that follows."""
        if not unit.gathered or unit.handles:
            self._request(("gather", unit.number))
        unit.wait_for_unshard()

    # Reductions (a ``ReductionObserver``) -----------------------------------------------------------------------------

    def before_reduction(self, number: int) -> None:
        """Execute the actions that the plan lists before a reduction that is about to start."""
        for action in self._cursor.actions_before(("reduce", number)) if self._cursor is not None else []:
            self._execute(action)

    def group_complete(self, number: int) -> None:
        """Record that all gradients of a group have been computed."""
        if self._record is not None:
            self._record.backward.append(("reduce", number))

    # Internals --------------------------------------------------------------------------------------------------------

    def _request(self, action: Action) -> None:
        if self._cursor is None:
            if self._record is not None:
                (self._record.backward if self.in_backward else self._record.forward).append(action)
            self._execute(action)
            return
        for other in self._due(self._cursor, action):
            self._execute(other)
            if other != action:
                self._reshard_unused(other)
        for other in self._cursor.next_gathers(self._prefetch):
            self._execute(other)

    def _due(self, cursor: PlanCursor, action: Action) -> list[Action]:
        due = cursor.advance_to(action)
        if due is not None:
            return due
        if self._plan is not None and not self._plan.contains(action):
            return [action]  # the first pass did not use it; now all ranks do
        name = self.units[action[1]].name
        raise UsageError(
            f"{f'unit {name}' if name else 'the model'} runs more often, or in another order, than in the first step, "
            "whose order all ranks keep to: let units run in one order, make one unit of what changes places, and "
            "checkpoint activations with use_reentrant=False"
        )

    def _execute(self, action: Action) -> None:
        kind, number = action
        if kind == "gather":
            self._gather(self.units[number])
        elif self.reducer is not None:
            self.reducer.reduce_up_to(number)

    def _gather(self, unit: UnitState) -> None:
        if unit.gathered:
            return
        unit.gathered = True
        for group in unit.groups:
            group.allocate()
            unit.handles.append(self._stream.run(group.gather))

    def _reshard_unused(self, action: Action) -> None:
        """Free a unit that was gathered only because other ranks need it."""
        if action[0] == "gather" and not self.units[action[1]].unsharded:
            self.units[action[1]].reshard()

    def _execute_remaining(self) -> None:
        cursor, self._cursor = self._cursor, None
        for action in cursor.remaining() if cursor is not None else []:
            self._execute(action)
            self._reshard_unused(action)
