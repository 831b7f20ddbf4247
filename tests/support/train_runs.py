"""Whole training runs of one project in this process, under any strategy, on any of this world's ranks."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import quiet_watchdog
from support.corpus import make_project, plain_losses
from support.nodes import in_pairs, one_per_node
from support.shards import Variant, communicator
from support.training_fixtures import metrics_of

from hpctrain.cluster.launcher import detect
from hpctrain.train.config import load
from hpctrain.train.control import stop_request
from hpctrain.train.job import Job
from hpctrain.train.recipe import train

VARIANTS = {
    "ddp": Variant("ddp"),
    "zero1": Variant("zero1"),
    "zero2": Variant("zero2"),
    "fsdp": Variant("fsdp"),
    "zero2_alone": Variant("zero2", one_per_node),
    "fsdp_alone": Variant("fsdp", one_per_node),
    "hybrid": Variant("fsdp", in_pairs, "node"),
}
SPLIT = ("zero1", "zero2", "fsdp", "fsdp_alone")
# Parameters in memory that the ranks share; whole on each rank; gathered on demand.
ONE_OF_EACH = ("fsdp", "zero2_alone", "fsdp_alone")
_PLAIN: dict[tuple[Path, int, int], list[float]] = {}


def shared_project(comm: Any, folder: Path) -> Path:
    """Let rank 0 make the project; return its folder on all ranks."""
    error: Exception | None = None
    if comm.rank == 0:
        try:
            make_project(folder)
        except Exception as caught:
            error = caught
    comm.barrier()
    if error:
        raise error
    return Path(comm.broadcast_object(str(folder)))


class Legs:
    """Successive calls of ``hpctrain train`` in the project's folder."""

    def __init__(self, comm: Any, project: Path, patch: pytest.MonkeyPatch) -> None:
        self.comm, self.project = comm, project
        self.on_wrap: Callable[[torch.nn.Module], object] = lambda model: None  # called with the model of each leg
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(project)
        patch.syspath_prepend(str(project))
        patch.delitem(sys.modules, "bytes_model", raising=False)
        import bytes_model  # type: ignore[import-not-found]

        self.model: Any = bytes_model.Model
        self.make: Any = bytes_model.make

    def plain(self, steps: int, batch: int = 12) -> list[float]:
        """Return the losses of a plain loop in one process."""
        key = self.project, steps, batch
        if key not in _PLAIN:
            _PLAIN[key] = plain_losses(self.project, self.make, steps, batch)
        return _PLAIN[key]

    def __call__(self, name: str, folder: str, *words: str, ranks: int | None = None) -> list[dict[str, Any]]:
        """Train under a variant of ``VARIANTS`` on the first ``ranks``; return the metrics rows on all ranks."""
        part = self.comm.split(int(self.comm.rank < (ranks or self.comm.size)))
        try:
            if self.comm.rank < (ranks or self.comm.size):
                self._train(part, VARIANTS[name], [*words, f"run.folder={folder}"])
        finally:
            self.comm.barrier()
            part.free()
        return metrics_of(self.project / folder)

    def _train(self, comm: Any, variant: Variant, words: list[str]) -> None:
        with communicator(comm, variant) as own:

            on_wrap = self.on_wrap

            class Observed(Job):
                """Job that reports the model that it gets."""

                def wrap(self, model: Any, *args: Any, **options: Any) -> Any:
                    on_wrap(model)
                    return super().wrap(model, *args, **options)

            def init(**options: Any) -> Job:
                shape = (options[each] for each in ("parallel", "offload", "asynchronous"))
                return Observed(own, torch.device("cpu"), detect(), quiet_watchdog(), *shape)

            torch.set_num_threads(1)
            stop_request.signal = None  # each leg behaves like a new process
            strategy = [f"parallel.data={variant.data}", f"parallel.shard_within={variant.within}"]
            train(load("tiny.toml", [*strategy, *words]), init=init)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """Return the loss of every step."""
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def signalling(last: int) -> Callable[[torch.nn.Module], object]:
    """Return a function for ``Legs.on_wrap``: SIGUSR1 arrives in training pass number ``last``, so the run stops."""
    count = 0

    def before_pass(model: torch.nn.Module, args: Any) -> None:
        nonlocal count
        count += model.training
        if count == last:
            signal.raise_signal(signal.SIGUSR1)

    return lambda model: model.register_forward_pre_hook(before_pass)


def poisoning(passes: tuple[int, ...]) -> Callable[[torch.nn.Module], object]:
    """Return a function for ``Legs.on_wrap``: the embedding's gradient is NaN in some training passes, from 1."""
    count = 0

    def after_pass(embedding: torch.nn.Module, args: Any, found: torch.Tensor) -> None:
        nonlocal count
        count += embedding.training
        if embedding.training and count in passes:
            found.register_hook(lambda gradient: gradient * math.nan)

    def register(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(after_pass)

    return register
