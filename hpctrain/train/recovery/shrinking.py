"""Parts of a run that depend on the number of ranks, and that are renewed when ranks have died."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from hpctrain.checkpoint.retention import remove_leftovers
from hpctrain.comm.tolerant import release_former
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.strategy import SplitStrategy, Strategy
from hpctrain.train.failure_policy import check_launch, check_options, why_not
from hpctrain.train.feed import Feed
from hpctrain.train.metrics import Progress
from hpctrain.train.receipt.write import FailureRecord
from hpctrain.train.recovery.replicas import Replicas
from hpctrain.train.recovery.sections import Recovery
from hpctrain.train.state_copy import StateCopy

if TYPE_CHECKING:
    import torch

    from hpctrain.parallel.fsdp.partner_copies import PartnerCopies
    from hpctrain.parallel.fsdp.shard_copies import ShardCopies
    from hpctrain.train.checkpointing import RunCheckpoints
    from hpctrain.train.control import StopSaveFlags
    from hpctrain.train.job import Job
    from hpctrain.train.microbatches import ReproducibleBackward
    from hpctrain.train.options import RunOptions
    from hpctrain.train.run_folder import RunFolder
    from hpctrain.train.state import TrainState
    from hpctrain.train.steps import Steps
    from hpctrain.train.updates import UpdateHooks


class Shrinking:
    """Parts of a run that depend on the number of ranks. The constructor checks that it can continue with fewer.

    Raises ``LaunchError`` or ``UsageError`` on all ranks if it cannot.
    """

    def __init__(
        self,
        job: Job,
        options: RunOptions,
        strategies: Mapping[str, Strategy],
        feed: Feed,
        microbatches: ReproducibleBackward | None,
    ) -> None:
        self._job, self._options, self._strategies, self._feed = job, options, strategies, feed
        self._microbatches = microbatches
        self.wanted = options.on_failure == "shrink" and job.size > 1
        if options.replicate and job.size == 1:
            raise UsageError(
                f"a run with replicate = {options.replicate} on one rank: no other rank can hold a copy; set it to 0",
                everywhere=True,
            )
        if self.wanted:
            self._check()

    def _check(self) -> None:
        from mpi4py import MPI

        check_launch(reports=self._job.guard.detector is not None, library=MPI.Get_library_version())
        check_options(
            self._options,
            splits=self._feed.follows_ranks,
            loader=self._feed.loader,
            lacks="" if all(each.continues for each in self._strategies.values()) else self._reason(),
            on_gpu=self._job.device.type != "cpu",
        )

    def _reason(self) -> str:
        """Return the setting with which a strategy of the run cannot continue with fewer ranks."""
        settings = [getattr(each, "settings", None) for each in self._strategies.values() if not each.continues]
        known = [each for each in settings if isinstance(each, ParallelSettings)]
        reasons = (why_not(each, self._job.offload) for each in (*known, self._job.parallel))
        return next(filter(None, reasons), "these strategies")

    def start(
        self,
        state: TrainState,
        steps: Steps,
        updates: UpdateHooks,
        checkpoints: RunCheckpoints,
        stops: StopSaveFlags,
        run_folder: RunFolder,
    ) -> None:
        """From now on, continue without ranks that die, if that is wanted. Collective."""
        if not self.wanted:
            return
        job, strategies = self._job, list(self._strategies.values())
        shards = self._shard_copies(state.optimizers)
        rest = StateCopy(state, weights=True, elsewhere=() if shards is None else shards.parameters)
        recovery = Recovery(job, rest, shards, strategies, run_folder.recovered)
        recovery.partner = self._partner_copies(state, shards)
        recovery.logs_alike = self._microbatches is not None
        if not any(isinstance(one, SplitStrategy) for one in strategies):
            recovery.replicas = Replicas(state, rest)
        run_folder.share_holder(job.comm)

        recovery.rejoin += [self._divide, steps.rejoin, updates.end_checks]
        recovery.rejoin += [partial(self._keep_records, state, steps, stops, run_folder), checkpoints.rejoin]
        recovery.rejoin += [partial(self._forget_records, recovery, state, steps, run_folder, checkpoints)]
        recovery.rejoin += [partial(release_former, job.comm)]
        steps.recovery = updates.recovery = recovery
        self._feed.collective = recovery.section

    def _shard_copies(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> ShardCopies | None:
        """Return the copies of shards; None if there are none."""
        if not any(isinstance(one, SplitStrategy) for one in self._strategies.values()):
            return None
        from hpctrain.parallel.fsdp.shard_copies import ShardCopies
        from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

        sharded = [one for one in self._strategies.values() if isinstance(one, ShardedDataParallel)]
        if not sharded:
            return None
        return ShardCopies(self._job.comm, sharded, optimizers)

    def _partner_copies(self, state: TrainState, shards: ShardCopies | None) -> PartnerCopies | None:
        """Return the copies on other nodes; None if they are not wanted, or not needed. Collective."""
        every, comm = self._options.replicate, self._job.comm
        if not every:
            return None
        if shards is None or comm.nodes == 1:
            if comm.rank == 0:
                why = "every rank holds the whole state" if shards is None else "all ranks are on one node"
                logger.info("replicate = %d has no effect: %s", every, why)
            return None
        from hpctrain.parallel.fsdp.partner_copies import PartnerCopies

        rest = partial(StateCopy, state, weights=True, elsewhere=shards.parameters)
        return PartnerCopies(comm, shards, rest, lambda: (self._feed.epoch, state.step), every)

    def _forget_records(
        self,
        recovery: Recovery,
        state: TrainState,
        steps: Steps,
        run_folder: RunFolder,
        checkpoints: RunCheckpoints,
    ) -> None:
        """Drop the records of completed steps that will be repeated."""
        if recovery.went_back:
            steps.drop_after(state.step)
            checkpoints.committed = min(checkpoints.committed, state.step)
            run_folder.rewind(state.step)

    def _keep_records(self, state: TrainState, steps: Steps, stops: StopSaveFlags, run_folder: RunFolder) -> None:
        """Let the first of the ranks that are left keep the records, if it does not yet. Collective."""
        job = self._job
        job.guard.failure_record = FailureRecord(run_folder.folder, job.rank)
        if job.rank == 0 and run_folder.take_over(state.step, steps.latest):
            stops.take_over()
            if steps.progress is not None:
                steps.progress.close()
                steps.progress = Progress(state.step, self._options.steps, state.tokens, shown=True)
        if job.rank == 0:
            remove_leftovers(state.folder)  # of a checkpoint in progress
        run_folder.share_holder(job.comm)

    def _divide(self) -> None:
        """Divide the batches over the ranks that are left."""
        data = next(iter(self._strategies.values())).data
        self._feed.rejoin(data)
        if self._microbatches is not None:
            self._microbatches.rejoin()
        else:
            self._feed.streams.coordinates = (data.rank, *self._feed.streams.coordinates[1:])
