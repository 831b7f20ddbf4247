"""Recovery of a run from the death of ranks: the others continue in the same processes (``run.on_failure = "shrink"``).

All ranks make the same collective calls of a run in the same order. Each such call is a section with a
number. A section that ends with the death of another rank is repeated with the ranks that are left. One
rank may have completed a section that another has not. The first then hands over its result, so no rank
goes back by more than the step in progress. The body of the program's loop and the exchange at its end
are one section. To repeat it, every rank restores the copy of the state that it took before. If a node has
died with shards that no other node has, all ranks go back to an earlier copy instead, of which other
nodes have the shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.comm.tolerant import TolerantCommunicator, continue_with
from hpctrain.comm.transport.waiting import interruption, waiting
from hpctrain.errors import CommunicationError, RankFailedError
from hpctrain.log import logger, renumber
from hpctrain.parallel.incomplete_replicas import leave_incomplete, losses
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.recovery.replicas import Replicas, Standing
from hpctrain.train.state_copy import StateCopy
from hpctrain.util.text import counted, format_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.parallel.fsdp.partner_copies import PartnerCopies
    from hpctrain.parallel.fsdp.shard_copies import ShardCopies
    from hpctrain.train.job import Job

T = TypeVar("T")
POSITION = ("rank", "size", "local_rank", "local_size", "node", "nodes")  # attributes of a job and its communicator
KEPT = 16  # results of completed sections that a rank keeps, for ranks that are behind


class StepRepeatsError(Exception):
    """The state before the current step has been restored: the run yields the step again."""


@dataclass(frozen=True)
class Progressed:
    """Progress of a rank: its section, and if it is within a step, the section in which the step began.

    ``repeats``: the rank is within a step, or about to begin one, and can go back to an earlier one.
    ``standing``: whether it holds the state before the step, or that after its update.
    """

    section: int
    step_began: int | None
    repeats: bool = False
    standing: Standing = "before"


def agreed_section(everyone: Sequence[Progressed]) -> int:
    """Return the last section that all ranks must have completed: the rank that is ahead of all has completed it."""
    ahead = max(everyone, key=lambda position: position.section)
    return ahead.section - 1 if ahead.step_began is None else ahead.step_began


def join_ranks(job: Job, ranks: MPI.Intracomm) -> None:
    """Let a job continue with the ranks of an mpi4py communicator, numbered anew. Collective over them."""
    continue_with(job.comm, ranks)
    for name in POSITION:
        setattr(job, name, getattr(job.comm, name))
    job.guard.rejoin(job.comm.transport)
    renumber(job.rank)


class Recovery:
    """Sections of a run, which are repeated with fewer ranks when others have died.

    ``copy`` is of the state before each step, without shards, of which ``shards`` are copies.
    ``strategies`` are those of the run. ``record`` gets the facts of each recovery on every rank.
    ``join`` lets the job continue with the ranks of an mpi4py communicator.
    """

    def __init__(
        self,
        job: Job,
        copy: StateCopy,
        shards: ShardCopies | None,
        strategies: Sequence[Strategy],
        record: Callable[[Mapping[str, Any]], None],
        join: Callable[[Job, Any], None] = join_ranks,
    ) -> None:
        assert job.guard.detector is not None
        self._job, self._copy, self._shards, self._record, self._join = job, copy, shards, record, join
        self._strategies = strategies
        self._detector = job.guard.detector
        self._detector.continues = True
        self.rejoin: list[Callable[[], object]] = []  # called after a recovery, in this order. Collective
        self.partner: PartnerCopies | None = None  # copies on other nodes, if they are wanted
        self.replicas: Replicas | None = None  # if each rank holds the whole state
        self.logs_alike = False  # whether all ranks log the same values
        self.lost_ranks = 0  # ranks that have died between the update of this step and its exchange
        self.went_back = False  # whether the last recovery has restored an earlier step than the one in progress
        self.stale = False  # whether the loader must be started again, because its batches are for other ranks
        self._section = 0
        self._results: dict[int, Any] = {}  # of completed sections
        self._handed: dict[int, Any] = {}  # results of sections that another rank has completed
        self._step_began: int | None = None  # section in which the current step began, within a step
        self._prepares = False  # whether a step is about to begin
        self._left: list[int] = []  # ranks that have ended because their replica was incomplete
        self._began = 0.0  # when the recovery began whose step has not ended yet
        self._batches = 0  # batches of the current step that have begun
        self._accumulates = False  # whether a step has had several batches

    @property
    def comms(self) -> list[TolerantCommunicator]:
        """The communicators of the strategies, and those that they have split from them."""
        own = [one.comm for one in self._strategies if isinstance(one.comm, TolerantCommunicator)]
        return [each for comm in own for each in comm.with_parts()]

    @property
    def _calls(self) -> int:
        """The number of collectives that strategies have begun in bodies of the loop."""
        return sum(comm.calls for comm in self.comms)

    # Sections ---------------------------------------------------------------------------------------------------------

    def section(self, call: Callable[[], T]) -> T:
        """Return what a collective call returns; repeat it with fewer ranks if others have died meanwhile.

        Raises ``StepRepeatsError`` instead if gradients of the current step are lost with them.
        """
        self._section += 1
        return self._complete(call)

    def prepare_step(self) -> None:
        """Copy shards that have changed other than in a step, and to other nodes if that is due. Collective.

        To be called before the ranks divide a batch. Raises ``StepRepeatsError`` if they have gone back.
        """
        self._prepares = True
        try:
            self.renew_copies()
            if self.partner is not None:
                self._advance(self.partner)
                if self.partner.due:
                    self.section(self.partner.take)
        finally:
            self._prepares = False

    def renew_copies(self) -> None:
        """Copy shards that have changed other than in a step. Collective."""
        if self._shards is not None and self._shards.outdated:
            take = self._shards.take
            self.section(lambda: take(self._section))

    def _advance(self, partner: PartnerCopies) -> None:
        try:
            partner.advance()
        except Exception as error:
            if not _is_failure(error):  # which the next section handles
                raise

    def begin_step(self) -> None:
        """Note the state before a step, and copy what would be lost. The first call is collective."""
        if self.replicas is not None:
            self.replicas.begin_step()
        self._copy.take()
        self._step_began, self._batches = self._section, 0

    def begin_body(self) -> None:
        """Let the body of the loop run: from here on, failures are not raised in collectives of strategies."""
        for comm in self.comms:
            comm.tolerates = True
        self._batches += 1
        self._accumulates |= self._batches > 1
        self.lost_ranks = 0

    def begin_update(self, *, has_closure: bool) -> None:
        """Note that an optimizer is about to step."""
        if self.replicas is not None:
            self.replicas.begin_update(has_closure=has_closure)

    def end_update(self) -> None:
        """Note that an optimizer has stepped."""
        if self.replicas is not None:
            self.replicas.end_update(self._calls)

    def end_body(self, exchange: Callable[[], T], *, updated: bool) -> T:
        """Return what the exchange at the end of the body returns. Raises ``StepRepeatsError`` if it has failed.

        Shards are copied before it, if parameters were ``updated``.
        """
        if self.replicas is not None:
            self.replicas.end_body(self._calls, failed=any(comm.failed for comm in self.comms))
        for comm in self.comms:
            comm.tolerates = False
        self._section += 1
        if self._shards is None:
            return self._complete(exchange)
        take = self._shards.take

        def complete() -> T:
            take(self._section, updated=updated)
            return exchange()

        return self._complete(complete)

    def end_step(self) -> None:
        """Note that a step is complete: it will not be repeated."""
        self._step_began = None
        if self.replicas is not None:
            self.replicas.end_step()
        if self._began:
            if self._job.rank == 0:
                text = "step %d is the first after the failure, %s after it was detected"
                logger.info(text, self._copy.step + 1, format_seconds(time.monotonic() - self._began))
            self._began = 0.0

    @property
    def failed(self) -> bool:
        """Whether another rank has died since the last recovery, as far as this rank knows."""
        return bool(interruption.reason) or any(comm.failed for comm in self.comms)

    def contain(self, error: Exception) -> None:
        """Mark the current step as failed; raise the error if it does not mean the death of a rank in the body."""
        if not (isinstance(error, RankFailedError) and any(comm.tolerates for comm in self.comms)):
            raise error
        for comm in self.comms:
            comm.failed = True

    def _complete(self, call: Callable[[], T]) -> T:
        while self._section not in self._handed:
            try:
                if self.failed:
                    raise RankFailedError(interruption.reason or "another rank has died")
                result = call()
                break
            except Exception as error:
                if not _is_failure(error):
                    raise
                self._recover()
        else:
            result = self._handed.pop(self._section)
        self._results[self._section] = result
        self._results.pop(self._section - KEPT, None)
        return result

    # Recovery ---------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Continue with the ranks that live; restore the state before the step if it must be repeated. Collective."""
        began, before = time.monotonic(), self._copy.step
        self._began, self.went_back = self._began or began, False
        lost: list[int] = []
        with waiting("recovery"):
            while True:
                try:
                    self._job.guard.end_with_others()
                    comm, more = self._detector.survivors()
                    lost += more
                    with self._recorded(comm, lost, before + 1):
                        repeats = self._continue(comm)
                    break
                except Exception as error:
                    if not _is_failure(error):  # one more rank has died
                        raise
        self.stale = True
        self._tell(lost, time.monotonic() - began, before, repeats=repeats)
        if repeats:
            raise StepRepeatsError

    def _recorded(self, comm: MPI.Intracomm, lost: Sequence[int], step: int) -> AbstractContextManager[None]:
        """Record why the job ends, should the ranks that are left die in the ``with`` block.

        Open MPI 5.0 crashes in a rank that creates a communicator while another one of its ranks dies.
        """
        record = self._job.guard.failure_record
        if record is None or comm.Get_rank():
            return nullcontext()
        why = f"{self._detector.describe(lost)}, and the other ranks died while they recovered"
        return record.unless_completed(why, step)

    def _continue(self, comm: MPI.Intracomm) -> bool:
        """Make all parts of the run work with the ranks of a communicator; return whether the step is repeated."""
        size = self._job.size
        if left := leave_incomplete(comm, self._detector, self._strategies):
            self._left += left
            raise RankFailedError("ranks of incomplete replicas have left")
        self._join(self._job, comm)
        for each in self.comms:
            each.failed = each.tolerates = False
        within = self._step_began is not None
        standing = self.replicas.standing if within and self.replicas is not None else "before"
        own = Progressed(self._section, self._step_began, self._prepares or within, standing)
        everyone: list[Progressed] = self._job.comm.all_gather_object(own)
        agreed = agreed_section(everyone)
        repeats = own.step_began == agreed
        self._hand_over(everyone, agreed, repeats=repeats)
        if self.replicas is not None and all(each.step_began == agreed for each in everyone):
            repeats = self.replicas.go_back([each.standing for each in everyone], self._job.comm)
            if not repeats and not self.logs_alike:
                self.lost_ranks += size - self._job.size
        if repeats:
            self._copy.restore(together=False)
            self._section = agreed
        for strategy in self._strategies:
            strategy.rejoin()
        if self._shards is not None:
            if self.partner is not None:
                self.partner.forget()
            can = self.partner is not None and all(each.repeats for each in everyone)
            if self._shards.restore(agreed, self.partner.go_back if self.partner and can else lambda: False):
                repeats = self.went_back = True
                self._section, self._step_began = agreed, None
                self._results.clear()
                self._handed.clear()
        for call in self.rejoin:
            call()
        return repeats

    def _hand_over(self, everyone: Sequence[Progressed], agreed: int, *, repeats: bool) -> None:
        """Give the ranks that are behind the results of the sections that they have not completed. Collective."""
        behind = [each.section for each in everyone if each.section <= agreed and each.step_began != agreed]
        if not behind:
            return
        ahead = max(each.section for each in everyone)
        root = next(rank for rank, each in enumerate(everyone) if each.section == ahead)
        missing = range(min(behind), agreed + 1)
        results = {number: self._results[number] for number in missing if number in self._results}
        results = self._job.comm.broadcast_object(results, root)
        if not repeats and self._section <= agreed:
            lacking = [number for number in range(self._section, agreed + 1) if number not in results]
            if lacking:
                raise CommunicationError(f"rank {self._job.rank} is too far behind the other ranks to continue")
            self._handed = {number: results[number] for number in range(self._section, agreed + 1)}

    def _tell(self, lost: Sequence[int], seconds: float, before: int, *, repeats: bool) -> None:
        """Log and record a recovery; ``before`` is the number of steps before it."""
        step, back = before + 1, before - self._copy.present_step if self.went_back else 0
        left, self._left = self._left, []
        hosts = [self._detector.hosts[rank] for rank in lost]
        facts = {"ranks": list(lost), "hosts": hosts, "step": step, "seconds": round(seconds, 3)}
        facts |= {"left": left} if left else {}
        self._record({**facts, "repeated_steps": back + int(repeats), "ranks_left": self._job.size})
        if self._job.rank == 0:
            logger.warning(
                "%s in step %d: %s after %s%s",
                losses(self._detector.describe, lost, left),
                step,
                f"{counted(self._job.size, 'rank')} continue" if self._job.size > 1 else "1 rank continues",
                format_seconds(seconds),
                _repetition(back, step, self._job.size) if repeats else "",
            )
            if repeats and self._accumulates:
                logger.warning(
                    "%s of step %d come again: a loop whose own count of batches decides when to update goes wrong, "
                    "such as enumerate(run); run.batch and run.last do not",
                    counted(self._batches, "batch"),
                    step,
                )


def _repetition(back: int, step: int, ranks: int) -> str:
    """Return the end of the message about a recovery after which steps are repeated; ``back``: completed ones."""
    if back:
        return f", from step {step - back} on, of which other nodes had the shards"
    return ", which repeat the step" if ranks > 1 else ""


def _is_failure(error: Exception) -> bool:
    """Return whether an error means that another rank has died."""
    return isinstance(error, RankFailedError) or waiting.translate(error, "") is not None
