"""Be what ``hpctrain.init`` returns: this rank's place in the job, and the two things to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.cluster.launcher import Launch
from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.attach import attach
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.settings import ParallelSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.guard import Guard
from hpctrain.train.leaving import LeavingTogether

if TYPE_CHECKING:
    from hpctrain.train.session import Run
    from hpctrain.train.state import Stateful


class Job:
    """Hold ``rank``, ``size``, ``local_rank``, ``local_size``, ``node`` (numbers), ``device`` and ``comm``.

    Usable as ``with hpctrain.init() as job``; without it, the job ends with the process.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        launch: Launch,
        guard: Guard,
        parallel: ParallelSettings = ParallelSettings(),
        offload: OffloadSettings = OffloadSettings(),
        server: ServerSettings = ServerSettings(),
        resources: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.comm = comm
        self.device = device
        self.launch = launch
        self.guard = guard
        self.parallel, self.offload, self.server = parallel, offload, server
        self.resources = resources  # of all ranks: how many cpus, and gpus
        self.rank, self.size = comm.rank, comm.size
        self.local_rank, self.local_size = comm.local_rank, comm.local_size
        self.node, self.nodes = comm.node, comm.nodes
        self.strategies: dict[int, Strategy] = {}

    def wrap(
        self,
        model: nn.Module,
        parallel: ParallelSettings | None = None,
        *,
        example: Tensor | None = None,
        offload: OffloadSettings | None = None,
        server: ServerSettings | None = None,
    ) -> nn.Module:
        """Move a model to this rank's device and attach the strategy of the settings; return the same model.

        Names in ``state_dict`` do not change. Parameters and buffers of rank 0 are given to all ranks. A model on the
        meta device gets its memory and its values here. Make the optimizer afterwards: strategies that split parameters
        put others in their places. ``example`` are some inputs, for ``parallel.partition = "time"``; ``offload`` says
        what lives in the host's memory, ``server`` how workers with replicas of their own (``parallel.data = "easgd"``)
        exchange what they have learnt. Raises ``MismatchError`` where the ranks hold different models,
        ``SettingsError`` where a strategy cannot do with what is offloaded.
        """
        self.strategies[id(model)] = attach(
            model,
            self.comm,
            parallel or self.parallel,
            self.device,
            example,
            offload or self.offload,
            server or self.server,
        )
        return model

    def strategy(self, model: nn.Module) -> Strategy:
        """Return the strategy that ``wrap`` attached to a model."""
        try:
            return self.strategies[id(model)]
        except KeyError:
            raise UsageError("this model has no strategy: call job.wrap(model) first", everywhere=True) from None

    def run(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        loader: Iterable[Any],
        *,
        checkpoints: str,
        states: Mapping[str, Stateful] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        """Return a run in the folder ``checkpoints``: iterate it for ``(step, batch)``; see ``train.session.Run``.

        Entered with ``with``, it locks the folder, resumes from the newest valid checkpoint there, writes metrics and
        checkpoints, and saves when it ends or is told to. ``options`` are the fields of ``train.options.RunOptions``:
        how many ``steps``, a checkpoint ``every`` so many, how many of them to ``keep``, and so on.
        """
        from hpctrain.train.options import RunOptions
        from hpctrain.train.session import Run

        return Run(
            self,
            model,
            optimizer,
            loader,
            folder=checkpoints,
            options=RunOptions(**options),
            states=states,
            config=config,
            provenance=provenance,
        )

    def close(self) -> None:
        """Stop watching the job and give back what it holds; a call by all ranks."""
        self.guard.close()
        for strategy in self.strategies.values():
            strategy.detach()
        self.strategies.clear()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or isinstance(error, LeavingTogether):
            self.close()

    def describe(self) -> Mapping[str, Any]:
        """Return this rank's place as plain values."""
        return {
            "rank": self.rank,
            "size": self.size,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node": self.node,
            "nodes": self.nodes,
            "device": str(self.device),
            "launcher": self.launch.kind,
        }

    def circumstances(self) -> Mapping[str, Any]:
        """Return the batch job, as far as there is one, and what it gave to all ranks together."""
        launch = self.launch
        found = {"job_id": launch.job_id, "scheduler": launch.scheduler, "restart_count": launch.restart_count}
        return {**self.resources, **{name: value for name, value in found.items() if value is not None}}
