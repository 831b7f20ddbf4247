"""Hooks around every update of a run's optimizers: detection of NaN and infinity before it, step count after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain import trace
from hpctrain.checkpoint.states import Stateful
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import NonFiniteError, RankFailedError, SettingsError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.clip import element_values
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.model_agreement import trainable
from hpctrain.parallel.reproducible.ddp import ReproducibleDataParallel
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.sync_batchnorm import local_statistics
from hpctrain.plain_tensors import on_shards
from hpctrain.train.corruption import CorruptionMonitor, Record
from hpctrain.train.first_step import FirstStepChecks
from hpctrain.train.health import has_majority
from hpctrain.train.replicas import ReplicaChecks
from hpctrain.train.state import TrainState
from hpctrain.train.state_copy import StateCopy
from hpctrain.train.step_times import StepTimes

if TYPE_CHECKING:
    from hpctrain.train.options import RunOptions
    from hpctrain.train.recovery.sections import Recovery

T = TypeVar("T")
Policy = Literal["abort", "skip", "rollback"]
MOST_SKIPS = 10  # consecutive skipped updates after which the run fails
MOST_ROLLBACKS = 3


def check_policy(strategy: Strategy, policy: Policy) -> None:
    """Raise ``SettingsError`` for a policy that needs all ranks together if the ranks are asynchronous."""
    if strategy.asynchronous and policy == "rollback":
        raise SettingsError(
            "on_nonfinite = 'rollback': asynchronous workers cannot roll back together; allowed are abort, skip",
            everywhere=True,
        )


class Health:
    """Monitor of the gradients before every update; after a reduction, all ranks make the same decision.

    ``norm`` is the global norm of the current step's gradients, once it has been computed.
    ``replay`` recomputes the current step's gradients; with it, the rank with the first bad value
    can be named. ``verified`` calls a function that measures, between two comparisons of the replicas.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, comm: Communicator, policy: Policy) -> None:
        self.model = model
        self.strategy = strategy
        # Asynchronous ranks decide alone.
        self.comm = Communicator(SingleTransport()) if strategy.asynchronous else comm
        self._first = comm.rank if strategy.asynchronous else 0  # rank of the job that is rank 0 of self.comm
        self.policy = policy
        self.norm: Tensor | None = None
        self.skipped = 0  # consecutive
        self.rollbacks = 0
        self.wants_rollback = False
        self.replay: Callable[[], object] | None = None
        # Returns whether a memory error explains a value that is not finite. Collective.
        self.suspect: Callable[[], bool] = lambda: False
        self.verified: Callable[[Callable[[], float]], float] = lambda measure: measure()
        self._buffers: list[Tensor] = []

    def begin_step(self) -> None:
        """Clear the last norm; save buffers that a forward pass with NaN would corrupt beyond its own step."""
        self.norm = None
        if self.policy == "skip":
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]

    @on_shards
    def before_update(self, step: int) -> None:
        """Allow the update, or turn it into a no-op, or raise ``NonFiniteError`` on all ranks."""
        norm = self.norm if self.norm is not None else self.strategy.clip_grad_norm(float("inf"))
        self.norm = norm
        if bool(torch.isfinite(norm)):
            self.skipped = 0
            return
        if self.suspect():
            self.strategy.gradients.drop()
            return
        where = self.find()
        self.strategy.gradients.drop()  # an optimizer does not change parameters without a gradient
        self._decide(f"gradient norm is {float(norm)} in step {step}: {where}")

    @on_shards
    def find(self) -> str:
        """Return a message with the rank and the name of the first value that is not finite. Collective.

        The reduction has mixed the gradients of the ranks, so each rank recomputes the step alone.
        """
        if self.replay is None:
            reduced = ((name, each.grad) for name, each in trainable(self.model) if each.grad is not None)
            everywhere = self.comm.all_gather_object(next(self._broken("averaged gradient", reduced), None))
            return next(filter(None, everywhere), "the sum over its elements overflows")
        self._compute_again(self.replay)
        found = next(self._broken("gradient", self.strategy.gradients.local()), None)
        for rank, text in enumerate(self.comm.all_gather_object(found), self._first):
            if text:
                return f"on rank {rank} {text}"
        return "finite on each rank, but the sum over the ranks overflows"

    def _compute_again(self, replay: Callable[[], object]) -> None:
        self.strategy.gradients.drop()
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.device("cuda", torch.cuda.current_device())] if on_device else []
        # Later results must not depend on whether this check ran.
        with self.strategy.no_sync(), local_statistics(self.model), torch.random.fork_rng(devices):
            replay()

    def _broken(self, kind: str, gradients: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                yield f"the parameter {name} is not finite"
        for name, gradient in gradients:
            if not bool(torch.isfinite(element_values(gradient)).all()):
                yield f"the {kind} of {name} is not finite"

    def _decide(self, what: str) -> None:
        everywhere = not self.strategy.asynchronous
        if self.policy == "abort":
            raise NonFiniteError(f"{what}; see on_nonfinite for alternatives", everywhere=everywhere)
        if self.policy == "skip":
            for buffer, before in zip(self.model.buffers(), self._buffers):
                buffer.copy_(before)
            self.skipped += 1
            if self.skipped > MOST_SKIPS:
                raise NonFiniteError(f"{what}; {MOST_SKIPS} updates in a row were skipped", everywhere=everywhere)
            if self.comm.rank == 0:
                logger.warning("%s; skipping this update", what)
            return
        self.rollbacks += 1
        if self.rollbacks > MOST_ROLLBACKS:
            raise NonFiniteError(f"{what}; rolled back {MOST_ROLLBACKS} times already", everywhere=True)
        self.wants_rollback = True
        if self.comm.rank == 0:
            logger.warning("%s; rolling back to the last checkpoint and skipping these samples", what)


# Steps that a GradScaler skips: they end a step of the run, as its updates do -----------------------------------------


def watch_scalers(optimizers: Sequence[torch.optim.Optimizer], note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` whenever a GradScaler has handled a step of these optimizers; return a function that ends this.

    If a scaler finds infinities, it does not call the optimizer, so no optimizer hook runs.
    """
    kind: Any = torch.amp.GradScaler
    original = kind.step
    watched = {id(optimizer) for optimizer in optimizers}

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, optimizer, *args, **kwargs)
        if id(optimizer) in watched:
            note()
        return result

    def unwatch() -> None:
        if kind.step is step:
            kind.step = original

    kind.step = step
    return unwatch


# Hooks around every update --------------------------------------------------------------------------------------------


class UpdateHooks:
    """Hooks on the optimizers of a run; ``healths`` and ``strategies`` have the keys of the models.

    ``checks`` inspects the first update of this start unless it is disabled.
    """

    def __init__(
        self,
        comm: Communicator,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        strategies: Mapping[str, Strategy],
        policy: Policy,
    ) -> None:
        self._optimizers, self.strategies = optimizers, strategies
        self._models_of_optimizer = {key: _models_of(one, models) for key, one in optimizers.items()}
        for key, one in optimizers.items():
            for held in self._models_of_optimizer[key] or list(models):
                strategies[held].check_optimizer(one)
        for strategy in strategies.values():
            check_policy(strategy, policy)
        self.healths = {key: Health(one, strategies[key], comm, policy) for key, one in models.items()}
        self.replicas = ReplicaChecks(comm, models, strategies)
        self.checks: FirstStepChecks | None = None  # for the first update, until it is done
        self.corruption: CorruptionMonitor | None = None
        self.recovery: Recovery | None = None  # if the run continues when other ranks have died
        self._handles: list[RemovableHandle] = []
        self._unwatch: Callable[[], None] = lambda: None
        self._began = self._waited = 0.0
        self.times = StepTimes(list(models.values()))

    def watch_memory(self, state: TrainState, options: RunOptions, record: Record, loader: Iterable[Any]) -> None:
        """Let updates be preceded by a comparison of the replicas, if the options request it."""
        self.corruption = corruption_monitor(state, options, record, loader)
        for health in self.healths.values():
            health.verified = self.verified
            if self.corruption is not None:
                health.suspect = self.corruption.explains_nonfinite

    def compare_replicas(self, when: str) -> None:
        """Repair what has changed since the last step, then compare the parameters. Collective, before a checkpoint."""
        if self.corruption is not None:
            self.corruption.repair_now()
        self.replicas.compare(when)

    def verified(self, measure: Callable[[], T], *, again: bool = True) -> T:
        """Return what ``measure`` returns; measure ``again`` if a memory error was found afterwards. Collective."""
        with self.times.counted("evaluation"):
            if self.corruption is None:
                return measure()
            self.corruption.repair_now()
            result = measure()
            return measure() if self.corruption.repair_now() and again else result

    def attach(self, begin: Callable[[], int], note: Callable[[], None]) -> None:
        """Attach the hooks: ``begin`` is called before each update and returns its number, ``note`` after it."""
        for key, optimizer in self._optimizers.items():
            healths = [self.healths[name] for name in self._models_of_optimizer[key]]
            self._handles += [
                optimizer.register_step_pre_hook(partial(self._before, healths, begin)),
                optimizer.register_step_post_hook(lambda *_: self._after(note)),
            ]
        self._unwatch = watch_scalers(list(self._optimizers.values()), note)
        self.times.attach()
        if self.checks is not None:
            self.checks.attach()

    def end_checks(self) -> None:
        """Make no further checks of the first step: other ranks have died, perhaps between two of them."""
        if self.checks is not None:
            self.checks.close()
            self.checks = None

    def detach(self) -> None:
        self._unwatch()
        for handle in self._handles:
            handle.remove()
        self.times.detach()
        self.end_checks()

    @property
    def _is_rank_local(self) -> bool:
        """Whether a strategy makes the current update by itself, without the other ranks."""
        return any(strategy.updates_itself for strategy in self.strategies.values())

    @on_shards
    def _before(
        self,
        healths: Sequence[Health],
        begin: Callable[[], int],
        optimizer: torch.optim.Optimizer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if self._is_rank_local:
            return
        step = begin()
        self._began, self._waited = time.monotonic(), waiting.total
        if self.corruption is not None and self.corruption.before_update():
            for strategy in self.strategies.values():
                strategy.gradients.drop()  # an optimizer does not change parameters without a gradient
            return
        try:
            self._inspect(healths, step)
            self._check_ranks()  # a collective of the inspection may have failed, and then has not raised
            if self.recovery is not None:
                self.recovery.begin_update(has_closure=_has_closure(args, kwargs))
        except Exception as error:
            self._contain(error)
        self._began, self._waited = time.monotonic(), waiting.total

    def _inspect(self, healths: Sequence[Health], step: int) -> None:
        """Check the gradients, and in the first step more, before an update. Collective."""
        self._check_ranks()
        if self.checks is not None:
            self.checks.before_update()
        for health in healths:
            health.before_update(step)

    def _check_ranks(self) -> None:
        """Raise ``RankFailedError`` if the step will be repeated because a rank has died."""
        if self.recovery is not None and self.recovery.failed:
            raise RankFailedError("another rank has died")

    def _contain(self, error: Exception) -> None:
        """Make no update in a step that will be repeated because a rank has died; raise other errors."""
        if self.recovery is None:
            raise error
        if self.recovery.failed and not isinstance(error, RankFailedError):  # it follows from that
            error = RankFailedError("another rank has died")
        self.recovery.contain(error)
        for strategy in self.strategies.values():
            strategy.gradients.drop()

    @on_shards
    def _after(self, note: Callable[[], None]) -> None:
        if self._is_rank_local:
            return
        note()
        ended = time.monotonic()
        self.times.add("optimizer", ended - self._began - (waiting.total - self._waited))
        trace.add("optimizer", self._began, ended)
        repeats = self.corruption is not None and self.corruption.found
        repeats |= self.recovery is not None and self.recovery.failed
        if self.checks is not None and not repeats:
            try:
                self.replicas.compare("after the first update", first=True)
                self.replicas.warn_of_buffers()
            except RankFailedError:
                if self.recovery is None:
                    raise
            self.checks = None
        if self.recovery is not None:
            self.recovery.end_update()


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step has got a function that computes the loss again; ``args`` begin with the optimizer."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _models_of(optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]) -> list[str]:
    """Return the keys of the models whose parameters an optimizer has."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [key for key, model in models.items() if any(id(one) in held for one in model.parameters())]


def corruption_monitor(
    state: TrainState, options: RunOptions, record: Record, loader: Iterable[Any]
) -> CorruptionMonitor | None:
    """Return the monitor of a run; None if it is not wanted, or if there is only one replica.

    Raises ``UsageError`` on all ranks for a strategy without replicas, and for a loader that cannot
    be started again.
    """
    every, policy = options.fingerprint_every, options.on_corruption
    if not every:
        return None
    for strategy in state.strategies.values():
        if not isinstance(strategy, (DataParallel, ReproducibleDataParallel)):
            raise UsageError(
                f"fingerprint_every = {every} with {type(strategy).__name__}: the ranks do not hold equal states, so "
                'nothing can be compared; allowed is parallel.data = "ddp" without pipelines, tensor '
                "parallelism and offload; or set it to 0",
                everywhere=True,
            )
    if policy == "repair" and isinstance(loader, Iterator) and not isinstance(loader, Stateful):
        raise UsageError(
            f"fingerprint_every = {every} with a loader that can be read only once ({type(loader).__name__}): steps "
            'cannot be repeated; pass a DataLoader or a list, or on_corruption="stop"',
            everywhere=True,
        )
    if state.comm.size == 1:
        logger.warning("fingerprint_every = %d: one rank has no replica to compare with; nothing is checked", every)
        return None
    memory = None
    if policy == "repair":
        optimizers = list(state.optimizers.values())
        one = len(optimizers) == 1 and not isinstance(optimizers[0], torch.optim.LBFGS)  # update per step
        memory = StateCopy(state, weights=not (one and has_majority(every, state.comm.size)))
    return CorruptionMonitor(state, every, policy, record, memory)
