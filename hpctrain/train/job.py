"""Handle of a job, as returned by ``hpctrain.init``: this rank's position, models, runs and evaluation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hpctrain import faults
from hpctrain.cluster.launcher import Launch
from hpctrain.cluster.nodes import REQUESTED, SPARES, requested_range, spare_nodes
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tolerant import TolerantCommunicator
from hpctrain.errors import UsageError
from hpctrain.faults.spec import VARIABLE
from hpctrain.log import logger
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, asynchronous_settings
from hpctrain.parallel.compiled import compile_in_place, forget_graphs, plain_module
from hpctrain.parallel.config import ParallelSettings, parallel_settings, shape_of
from hpctrain.parallel.guard.guard import protect, unprotect
from hpctrain.parallel.offload.config import OffloadSettings, offload_settings
from hpctrain.parallel.strategy import Strategy, consensus_view
from hpctrain.parallel.wrap import attach
from hpctrain.plain_tensors import on_shards
from hpctrain.stage.local import staged_summary
from hpctrain.train.async_control import check_call
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.failure_policy import survives
from hpctrain.train.process import ALLOCATOR, defer_compiler
from hpctrain.train.watchdog import Watchdog
from hpctrain.util.text import format_bytes

if TYPE_CHECKING:
    from hpctrain.checkpoint.pretrained import LoadedWeights
    from hpctrain.checkpoint.states import Stateful
    from hpctrain.data.job_loader import JobLoader
    from hpctrain.train.evaluation import Evaluation, Measure
    from hpctrain.train.run import Run

M = TypeVar("M", bound=nn.Module)


class Job:
    """This rank's position in the job, and the operations of all ranks together.

    Usable as ``with hpctrain.init() as job``. Without ``with``, the job ends with the process.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        launch: Launch,
        guard: Watchdog,
        parallel: ParallelSettings = ParallelSettings(),
        offload: OffloadSettings = OffloadSettings(),
        asynchronous: AsynchronousSettings = AsynchronousSettings(),
        resources: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.comm = comm
        self.device = device
        self.launch = launch
        self.guard = guard
        self.parallel, self.offload, self.asynchronous = parallel, offload, asynchronous
        self.server = asynchronous  # the former name
        self.resources = resources  # of all ranks: number of cpus and gpus
        self.rank, self.size = comm.rank, comm.size
        self.local_rank, self.local_size = comm.local_rank, comm.local_size
        self.node, self.nodes = comm.node, comm.nodes
        self.strategies: dict[int, Strategy] = {}
        self._wrapped_by: dict[int, str] = {}  # summaries of the strategies
        self._evaluation: Evaluation | None = None

    def wrap(
        self,
        model: M,
        parallel: ParallelSettings | Mapping[str, Any] | str | None = None,
        *,
        example: Any = None,
        offload: OffloadSettings | Mapping[str, Any] | None = None,
        asynchronous: AsynchronousSettings | Mapping[str, Any] | None = None,
        server: AsynchronousSettings | Mapping[str, Any] | None = None,
    ) -> M:
        """Move a model to this rank's device and attach a strategy to it; return the same model. Collective.

        Names in ``state_dict`` do not change. All ranks get the parameters and buffers of rank 0. A
        model on the meta device gets its memory and its values here. Freeze parameters before this
        call and create the optimizer after it: strategies that shard parameters replace them.

        ``parallel`` is the name of a strategy (``"fsdp"``), a dict of settings or a
        ``ParallelSettings``. By default, the settings of ``hpctrain.init`` apply, as for
        ``offload`` and ``asynchronous``. ``offload`` tells which tensors are stored in host memory.
        ``asynchronous`` tells how workers with their own replicas (``parallel.data = "easgd"``)
        exchange parameters; ``server`` is its former name. ``example`` is an example input of the
        model, for pipelines (``parallel.partition = "time"``): a microbatch as a tensor, a tuple of
        positional or a dict of keyword arguments, or a ``DataLoader``, whose first batch is used.
        Raises ``MismatchError`` if the ranks have different models, ``SettingsError`` if the
        strategy does not support the offloading.
        """
        chosen = agreed(
            self.comm,
            lambda: (
                self.parallel if parallel is None else parallel_settings(parallel),
                self.offload if offload is None else offload_settings(offload),
                (
                    self.asynchronous
                    if asynchronous is None and server is None
                    else asynchronous_settings(asynchronous, server)
                ),
            ),
        )
        inner = compile_in_place(model)
        shown = agreed(self.comm, lambda: self._inputs_of(example, inner, chosen[0]))
        ALLOCATOR.start()
        strategy = attach(
            inner, self._comm_for(chosen[0], chosen[1]), chosen[0], self.device, shown, chosen[1], chosen[2]
        )
        protect(strategy)
        defer_compiler()  # which is to skip the hooks, in processes without hpctrain.init, too
        forget_graphs()
        self.comm.twin()  # created here by all ranks: a later call by one rank alone is then detected
        self.strategies[id(inner)] = strategy
        self._wrapped_by[id(inner)] = chosen[0].summary
        return model

    def _comm_for(self, parallel: ParallelSettings, offload: OffloadSettings) -> Communicator:
        """Return the communicator of a strategy: its own if the job may continue without dead ranks. Collective."""
        if self.guard.detector is None or not survives(parallel, offload):
            return self.comm
        return TolerantCommunicator.beside(self.comm)

    def _inputs_of(self, example: Any, model: nn.Module, settings: ParallelSettings) -> Any:
        if example is None:
            return None  # without loading h5py, which only runs need
        from hpctrain.train.loader_feed import example_inputs

        return example_inputs(example, model, settings, self.comm.size)

    def strategy(self, model: nn.Module) -> Strategy:
        """Return the strategy that ``wrap`` attached to a model."""
        try:
            return self.strategies[id(plain_module(model))]
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
        """Return a run in the folder ``checkpoints``: iterate over it for ``(step, batch)``; see ``Run``. Collective.

        When entered by ``with``, the run locks the folder, resumes from the newest valid checkpoint
        there, writes metrics and checkpoints, and saves when it ends or on request. ``model`` and
        ``optimizer`` may be dicts of several, whose keys name them in checkpoints. A ``DataLoader``
        is split: its batch is the batch of all data ranks (``split=False``: every rank reads all of
        it). ``states`` contains other objects with a state, by name: averages of weights,
        generators, tensors. torch's learning-rate schedulers are found automatically. ``config`` is
        text to store with the checkpoints, ``provenance`` facts to record in them. ``options`` are
        the fields of ``RunOptions``.
        """
        from hpctrain.train.options import check_arguments, run_options
        from hpctrain.train.run import Run

        named = {"states": states, "config": config, "provenance": provenance}
        check_arguments(model, optimizer, loader, checkpoints=checkpoints, **named)
        run = Run(
            self,
            model,
            optimizer,
            loader,
            folder=checkpoints,
            options=run_options(options),
            states=states,
            config=config,
            provenance=provenance,
        )
        if os.environ.get(VARIABLE):
            faults.install(run)
        return run

    def loader(
        self,
        dataset: Any,
        *,
        batch: int,
        shuffle: bool = True,
        epochs: int | None = None,
        workers: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        lengths: Any = None,
        most: int | None = None,
        **options: Any,
    ) -> JobLoader:
        """Return a ``DataLoader`` whose batches have ``batch`` samples over all ranks.

        ``dataset`` is any torch ``Dataset``, or a dataset opened by ``hpctrain.data``. The order of
        the samples depends on ``seed`` and the epoch alone, so a run resumes at any position
        without drawing the earlier indices. ``epochs`` is the number of passes of a run that has
        neither ``steps`` nor ``run.epochs``. ``workers`` is ``num_workers``; ``options`` are those
        of ``torch.utils.data.DataLoader``. With ``lengths``, the size of each sample, batches have
        samples of similar sizes; with ``most``, they are as large as fit into this size when padded,
        but at most ``batch``. If it is iterated over outside of a run, it yields this rank's share of
        each batch.
        """
        from hpctrain.data.job_loader import job_loader

        data = self.data
        return job_loader(
            dataset,
            rank=data[0],
            parts=data[1],
            batch=batch,
            shuffle=shuffle,
            epochs=epochs,
            workers=workers,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            lengths=lengths,
            most=most,
            **options,
        )

    @property
    def data(self) -> tuple[int, int]:
        """This rank's index among the data ranks, which share the samples of a batch, and their number."""
        if self.strategies:
            data = next(iter(self.strategies.values())).data
            return data.rank, data.size
        shape = shape_of(self.parallel, self.size)
        return shape.coordinate("data", self.rank), shape.data

    def evaluate(self, what: Any, compute: Measure | None = None) -> Any:
        """Measure over all ranks, in evaluation mode and without gradients; return means. Collective.

        ``evaluate(loader, compute)`` splits the batches of a ``DataLoader`` over the ranks and
        calls ``compute(batch)`` for each share. ``compute`` returns a mean over the samples, a pair
        of a sum and its divisor, or a dict of these. Sums and counts are added over batches and
        ranks. ``evaluate(function)`` calls a function that makes the measurement itself and returns
        one of these. Every rank gets the same result.

        Wrapped models are in evaluation mode during the call, with the buffers (statistics of batch
        norms) of the first data rank. A ``DataLoader`` draws from torch's generator the same numbers as in a
        plain loop, also inside a run's loop over its batches.
        """
        from hpctrain.train.evaluation import Evaluation

        if self._evaluation is None:
            self._evaluation = Evaluation(self.comm, self.strategies)
        check_call(self.comm, self.strategies.values(), "job.evaluate")
        return self._evaluation(what, compute)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a ``with`` block in which backward passes leave gradients on this rank; a later one reduces them.

        All ranks must divide the batches of one update in the same way.
        """
        return self.strategy(model).no_sync()

    @on_shards
    def average_gradients(self, model: nn.Module) -> None:
        """Average over the ranks the gradients that the program has set itself (``parameter.grad = ...``). Collective.

        Gradients of ``loss.backward()`` are already averaged. ``parallel.data = "ddp"`` only.
        """
        self.strategy(model).average_gradients()

    def unshard(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a ``with`` block in which a sharded model has unsharded parameters. Collective.

        Changes made in the block are discarded unless ``write`` is set. With ``write``, those of
        rank 0 are kept.
        """
        return self.strategy(model).unshard(write=write)

    @on_shards
    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's unsharded tensors on the host of every rank, for any data-parallel strategy. Collective.

        A tensor with several names (tied weights) is one tensor there, as in a plain model. With
        pipelines and tensor parallelism, each rank gets the tensors of its own part only:
        ``hpctrain checkpoint export`` writes the whole model from a checkpoint.
        """
        strategy = self.strategy(model)
        check_call(self.comm, self.strategies.values(), "job.state_dict")
        compile_in_place(model)  # submodules may have been compiled after wrap
        with consensus_view(strategy), strategy.unshard():
            return _copied_to_host(strategy.model.state_dict())

    @on_shards
    def load_pretrained(self, model: nn.Module, folder: str | Path, *, skip: Sequence[str] = ()) -> LoadedWeights:
        """Fill a model from the safetensors files of a Hugging Face folder; every rank reads its own part. Collective.

        The model may be wrapped, by any strategy, or not. Names and shapes are those of its
        ``state_dict``; values are converted to its dtypes. Tied weights need one of their names. Names that
        match a pattern in ``skip`` (``"score.*"``) keep their values. Returns the number of tensors, and
        the bytes that this rank has read. Raises ``CheckpointError`` with a table of all differences
        before anything is changed.
        """
        from hpctrain.checkpoint.pretrained import load_weights

        inner = compile_in_place(model)
        strategy, began = self.strategies.get(id(inner)), time.monotonic()
        split = None if strategy is None else strategy.split
        found = load_weights(folder, inner, comm=self.comm, split=split, skip=skip)
        if strategy is not None:
            strategy.refresh()
        if self.rank == 0:
            text = "loaded %d tensors of %s: %s read by rank 0, in %.1f s"
            logger.info(text, found.tensors, folder, format_bytes(found.bytes_read, 1), time.monotonic() - began)
        return found

    @on_shards
    def close(self) -> None:
        """Stop the failure detection and detach the strategies from their models. Collective."""
        self.guard.close()
        for strategy in self.strategies.values():
            unprotect(strategy)
            strategy.detach()
        self.strategies.clear()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or isinstance(error, LeavingTogether):
            self.close()

    def describe(self) -> Mapping[str, Any]:
        """Return this rank's position in the job as plain values."""
        names = ("rank", "size", "local_rank", "local_size", "node", "nodes")
        position = {name: getattr(self, name) for name in names}
        return {**position, "device": str(self.device), "launcher": self.launch.kind}

    def circumstances(self) -> Mapping[str, Any]:
        """Return strategies, cores and GPUs of all ranks, id, scheduler and nodes of the job, what it has staged."""
        launch, requested = self.launch, requested_range(os.environ.get(REQUESTED))
        found = {"job_id": launch.job_id, "scheduler": launch.scheduler, "restart_count": launch.restart_count}
        found["staged"] = staged_summary()
        found["parallel"] = "; ".join(dict.fromkeys(self._wrapped_by.values())) or None
        found["requested_nodes"] = requested if launch.job_id else None
        found["spare_nodes"] = spare_nodes(os.environ.get(SPARES)) if launch.job_id else None
        return {**self.resources, **{name: value for name, value in found.items() if value is not None}}


def _copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors in host memory; names of the same tensor share a copy."""
    copies: dict[Any, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if same not in copies:
            copies[same] = tensor.detach().to("cpu", copy=True)
        found[name] = copies[same]
    return found
