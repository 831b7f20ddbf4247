"""Memory errors (silent data corruption) of a run: found by comparing replicas, repaired, and recorded.

Under ``parallel.data = "ddp"`` all ranks must hold the same bits. With at least three ranks that
compare before every update, a deviating rank gets the tensors of the majority, and the step is
repeated: its gradients, which may be wrong, have not been used yet. Otherwise there is no majority,
or an error has already spread through the averaged gradients. The run then goes back to a copy in
memory from the last step at whose end all replicas agreed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import CorruptionError
from hpctrain.log import logger
from hpctrain.train.health import OnCorruption
from hpctrain.train.replicas import (
    Differences,
    Sums,
    bit_sums,
    bits_of,
    compare_replicas,
    majority_of_elements,
    parameters_of,
    replicated,
)
from hpctrain.train.state import TrainState
from hpctrain.train.state_copy import StateCopy
from hpctrain.util.text import counted

MOST_REPAIRS = 3  # of one step
Record = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class _Suspect:
    """Tensors of this rank that differ from those of another, of which it is unknown which is wrong."""

    step: int  # at whose end they had these values
    found_in: int
    tensors: dict[str, Tensor]
    differences: Differences


class CorruptionMonitor:
    """Comparison of all replicas every few steps, and repair; ``record`` gets the facts of each error.

    ``memory`` is the copy from which steps are repeated; without weights in it, the majority decides.
    ``before_update`` and ``end_step`` are collective, and return the same on all ranks.
    """

    def __init__(
        self, state: TrainState, every: int, policy: OnCorruption, record: Record, memory: StateCopy | None
    ) -> None:
        self._state, self._every, self._policy, self._record = state, every, policy, record
        self._comm: Communicator = state.comm
        self._copy = memory
        self.votes = memory is not None and not memory.weights
        self._compared, self.found = False, False  # in this step
        self._settled = False  # whether no step has begun since all replicas were equal
        self._number = 0  # of the step in which an error is found
        self._agreed: Sums = {}  # sums of the tensors when all replicas were equal
        self._copied: Sums = {}  # those of the copy
        self._copy_due = True
        self._repaired, self._repairs = -1, 0  # the last step that was repaired, and how often
        self._suspect: _Suspect | None = None
        self._named: set[str] = set()  # tensors of the errors of this step
        self._last = ""  # what was found last
        self._right_tensors: dict[str, Tensor] = {}  # after a repair, until the step is repeated

    # Within a step ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Copy the state from which this step, and those that follow, can be repeated. Collective."""
        if self._copy is not None and (self.votes or self._copy_due):
            self._copy.take()
            self._copied, self._copy_due = self._agreed, False
        self._settled, self._number = False, self._state.step + 1

    def before_update(self) -> bool:
        """Return whether the update must not be made, because the gradients come from wrong parameters."""
        if self._every == 1 and not self._compared:
            self._compared = True
            self.found = self._find_and_repair() if self.votes else self._find(self._state.step)
            self._settled = False  # an update follows
        return self.found

    def explains_nonfinite(self) -> bool:
        """Return whether the replicas differ, when a gradient is not finite: then no update may be made either."""
        if not self.votes and not self.found:
            self.found = self._find(self._state.step)
            self._settled = False
        return self.found

    def end_step(self, step: int, *, forced: bool, left: bool) -> bool:
        """Compare if it is due or ``forced``; return whether the run has gone back to an earlier step.

        Raises ``CorruptionError`` if it must go back and the program has ``left`` its loop.
        """
        compared, found = self._compared, self.found
        self._compared = self.found = False
        self._name_suspect(step)
        if self.votes:
            if not compared:
                found = self._find_and_repair()  # a GradScaler has skipped the update
            elif forced and not found:
                self._find_and_repair(repeats=False)  # the gradients of this step were right
        elif not found and (forced or step % self._every == 0 and (self._copy is not None or not compared)):
            found = self._find(step)
        if found:
            self._go_back(left)
        return found

    # Between steps ----------------------------------------------------------------------------------------------------

    def repair_now(self) -> bool:
        """Repair tensors that have changed since the replicas were equal, without a step; return whether any had.

        Before checkpoints and around evaluations. Collective. No effect within a step whose error can
        only be repaired by repeating it.
        """
        after_update = self.votes and self._compared
        if self.found or not (self._settled or after_update):
            return False
        if not self._settled:
            return self._find_and_repair(repeats=False)
        differences = self._compare()
        if differences is None:
            return False
        self._copy_right(differences, self._agreed)
        return True

    def confirm(self, step: int) -> bool:
        """Compare after a step, unless its end has done so; return whether the run has gone back. Collective."""
        if self.votes:
            self._find_and_repair(repeats=False)  # no gradient has been computed since the update
            return False
        found = not self._copy_due and self._find(step)
        if found:
            self._go_back(left=False)
        return found

    # Finding and repairing --------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return replicated(self._state.models, self._state.optimizers)

    def _compare(self) -> Differences | None:
        """Compare the replicas. Raises ``CorruptionError`` on all ranks if differences must end the run."""
        sums = bit_sums(self._tensors())
        differences = compare_replicas(self._comm, sums)
        if differences is None:
            self._note_moving(sums)
            self._agreed, self._copy_due, self._settled = sums, True, True
            return None
        self._repairs = self._repairs + 1 if self._number == self._repaired else 1
        self._repaired, self._named = self._number, set()
        self._last = f"{differences.names[0]} differs between the ranks"
        if self._policy == "stop":
            raise self._error(differences, 'the run ends, because health.on_corruption = "stop"')
        if self._repairs > MOST_REPAIRS:
            raise self._error(
                differences,
                f"the step was repeated {MOST_REPAIRS} times; either the node is defective, or ranks make different "
                "updates (values from one rank's samples or random numbers)",
            )
        return differences

    def _find_and_repair(self, *, repeats: bool = True) -> bool:
        """Compare; let the ranks that deviate copy the tensors of the majority. Return whether any deviated.

        ``repeats``: the step will be repeated.
        """
        differences = self._compare()
        if differences is None:
            return False
        if differences.deviating:
            self._copy_from(differences, differences.majorities)
            for rank, name in differences.deviating:
                self._note(differences, [rank], name, "majority")
        else:
            self._copy_elements(differences)
        if repeats:  # the rest of the loop's body may change weights, and will run again
            self._right_tensors = {name: each.clone() for name, each in self._tensors().items()}
        return True

    @torch.no_grad()
    def _copy_elements(self, differences: Differences) -> None:
        """Repair tensors that several ranks have wrong in different elements, by a majority for each element."""
        tensors = self._tensors()
        for name in differences.names:
            right = majority_of_elements(self._comm, tensors[name])
            if right is None:
                raise self._error(
                    differences,
                    "no value has a majority, so it cannot be repaired; perhaps ranks make different updates (values "
                    "from one rank's samples or random numbers)",
                )
            own = not torch.equal(bits_of(right), bits_of(tensors[name]))
            wrong = [rank for rank, each in enumerate(self._comm.all_gather_object(own)) if each]
            tensors[name].copy_(right)
            for rank in wrong:
                self._note(differences, [rank], name, "majority")

    def _find(self, step: int) -> bool:
        """Compare the tensors of the end of a step; return whether they differ, and find out which rank is wrong."""
        differences = self._compare()
        if differences is None:
            return False
        for rank, name in differences.deviating:
            self._note(differences, [rank], name, "replay")
        if not differences.deviating:
            tensors = self._tensors()
            held = {name: tensors[name].clone() for name in differences.names if name in tensors}
            self._suspect = _Suspect(step, self._number, held, differences)
        return True

    def _note_moving(self, sums: Sums) -> None:
        """Let the copy have the parameters that change though no optimizer has them, such as averages of weights."""
        if not self.votes or self._copy is None or not self._agreed:
            return
        groups = [group for optimizer in self._state.optimizers.values() for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in parameters_of(self._state.models).items():
            if id(parameter) not in updated and sums[name] != self._agreed.get(name):
                self._copy.moving.add(id(parameter))

    @torch.no_grad()
    def _copy_from(self, differences: Differences, right: Sums) -> None:
        """Copy each tensor that differs from the first rank whose tensor has the right sum."""
        tensors = self._tensors()
        for name in differences.names:
            data = tensors[name].contiguous()
            self._comm.broadcast(data, differences.holders(name, right[name])[0])
            tensors[name].copy_(data)

    def _go_back(self, left: bool) -> None:
        """Restore the copy. Raises ``CorruptionError`` on all ranks if the program cannot repeat the steps."""
        assert self._copy is not None
        if left:
            raise CorruptionError(
                f"memory error in step {self._number}, in which the program left its loop by break: the step cannot be "
                f"repeated; {self._last}; start again: the run continues from its last checkpoint",
                everywhere=True,
            )
        if self.votes:
            self._restore_right_tensors()
            self._copy.restore()
            return
        self._copy.restore()
        differences = compare_replicas(self._comm, bit_sums(self._tensors()))
        if differences is not None:  # the copy of a rank has changed, or was taken after a change
            self._copy_right(differences, self._copied)
        self._name_suspect(self._state.step)

    def _copy_right(self, differences: Differences, agreed: Sums) -> None:
        """Repair tensors whose right sum is known from a time when all replicas were ``agreed``."""
        right = {name: self._right(differences, name, agreed) for name in differences.names}
        self._copy_from(differences, right)
        for name in differences.names:
            wrong = [rank for rank in range(self._comm.size) if rank not in differences.holders(name, right[name])]
            if self._suspect is not None and self._suspect.tensors.pop(name, None) is not None:
                self._note(differences, wrong, name, "replay")
            elif name not in self._named:
                self._note(differences, wrong, name, "copy")

    @torch.no_grad()
    def _restore_right_tensors(self) -> None:
        tensors, right, self._right_tensors = self._tensors(), self._right_tensors, {}
        for name, tensor in tensors.items():
            if name in right:
                tensor.copy_(right[name])

    def _right(self, differences: Differences, name: str, agreed: Sums) -> int:
        """Return the sum that all replicas had, if a rank still has it, else that of the majority."""
        value = agreed.get(name)
        found = value if differences.holders(name, value) else differences.majorities.get(name)
        if found is None:
            raise self._error(differences, "no rank has the value that it had before, so it cannot be repaired")
        return found

    # Which of two ranks is wrong --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _name_suspect(self, step: int) -> None:
        """Once the steps have been repeated, name the rank whose earlier tensor differs from the present one."""
        suspect = self._suspect
        if suspect is None or step != suspect.step:
            return
        self._suspect, tensors = None, self._tensors()
        for name, before in suspect.tensors.items():
            distances = self._comm.all_gather_object(self._distance(before, tensors[name]))
            wrong = [rank for rank, distance in enumerate(distances) if distance == max(distances)]
            self._note(suspect.differences, wrong, name, "replay", suspect.found_in)

    def _distance(self, before: Tensor, now: Tensor) -> float:
        """Return how far an earlier tensor is from the repeated one, in the elements that differ between ranks."""
        first = before.contiguous().clone()
        self._comm.broadcast(first, 0)
        differ = (bits_of(first) != bits_of(before)).to(torch.int32)
        self._comm.all_reduce(differ, "max")
        distances = (before.double() - now.double()).abs().nan_to_num(math.inf, math.inf)
        return float(distances[differ.bool()].max())

    # Messages and records ---------------------------------------------------------------------------------------------

    def _note(self, differences: Differences, ranks: Sequence[int], name: str, repair: str, step: int = 0) -> None:
        """Log and record that a tensor of one rank, or of one of several ranks, was wrong."""
        step = step or self._number
        places = " or ".join(differences.place(rank) for rank in ranks)
        only = ranks[0] if len(ranks) == 1 else None
        self._last = f"{name} of {places} was wrong"
        self._named.add(name)
        if self._comm.rank == 0:
            logger.warning("memory error in step %d: %s; %s", step, self._last, _REPAIRS[repair])
        host = None if only is None else differences.hosts[only]
        self._record({"step": step, "rank": only, "host": host, "tensor": name, "repair": repair})

    def _error(self, differences: Differences, what: str) -> CorruptionError:
        """Return the error that ends the run, on all ranks."""
        name = differences.names[0]
        others = len(differences.names) - 1
        more = f" (and {counted(others, 'more tensor')})" if others else ""
        wrong = [differences.place(rank) for rank, each in differences.deviating if each == name]
        where = f"{name} of {', '.join(wrong)} differs from that of the other ranks"
        if not wrong:
            where = f"{name} differs between {' and '.join(map(differences.place, range(min(self._comm.size, 4))))}"
        return CorruptionError(
            f"memory error in step {self._number}: {where}{more}; {what}; a new start continues from the last "
            "checkpoint",
            everywhere=True,
        )


_REPAIRS = {
    "majority": "it has got the tensor of the other ranks",
    "replay": "the steps since the last comparison are repeated",
    "copy": "it has got the tensor of another rank",
}
