"""One step of the real strategy of the data axis on tensors without memory: its communication, and the memory it owns.

The strategy is attached to a model with the same parameters, units and layers, whose modules compute
nothing: each returns its input, and gradients of its parameters in the backward pass. A recording
communicator performs no communication. It records each operation with its bytes, its group, and the
part of the pass that had been computed when it was called. Memory is that of all tensors that the
strategy keeps between two steps, and of those that it allocates in the passes. Forecasts of memory
and time follow from this record, so that they repeat no strategy's formulas.

Note: devices. Host allocations are made on the meta device. For a GPU, the strategy itself runs on
the meta device, on which it communicates asynchronously as on a GPU. Memory of the communicator is
host memory.

Note: speed. A step of 1,200 parameters in 800 buckets takes about 0.4 s. Kernels are therefore not
called (on the meta device some of them run in Python), and results are cached. Forward and backward
passes of the layers themselves are measured elsewhere (``pass_memory``, ``work``): they do not depend
on the strategy, and equal layers run only once there.

Not run this way are asynchronous strategies (threads that access remote memory), CPU offload (threads
with native kernels) and messages of a pipeline (several ranks): formulas describe them, in
``memory`` and ``time_communication``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.forecast.fake_tensors import RecordingCommunicator
from hpctrain.forecast.recorder import Call, StepRecorder, Transient
from hpctrain.forecast.run import META, Group, ParameterFacts
from hpctrain.parallel.asynchronous.config import PER_WORKER_UPDATES
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.strategy import Strategy, SyncStrategy
from hpctrain.parallel.wrap import attach

CPU = torch.device("cpu")
MOST_PASSES = 3  # passes of a step that are run; those between the first and the last are equal


@dataclass(frozen=True)
class Task:
    """Model and strategy to simulate: the parameters, units and layers of the model, and the group of the rank."""

    parameters: tuple[ParameterFacts, ...]  # of the rank, before data-parallel sharding
    modules: tuple[tuple[str, bool], ...]  # names in the order of execution; whether each is a unit
    settings: ParallelSettings
    group: Group
    on_cpu: bool
    passes: int = 1  # per step
    in_parts: bool = False  # parts of the model run separately, as the chunks of a pipeline do
    buffers: tuple[int, ...] = ()  # bytes of each buffer
    sharded: bool = False  # even on a single rank, as for CPU offload

    def renamed(self) -> tuple[Task, dict[str, str]]:
        """Return the task with short names by position, and the new name of each module."""
        names = [name for name, _ in self.modules]
        first = {
            name: (min(index for index, other in enumerate(names) if f"{other}.".startswith(f"{name}.")), len(name))
            for name in names
        }
        renamed = {"": ""}

        def around(name: str) -> str:
            while name not in renamed:
                name = name.rpartition(".")[0]
            return renamed[name]

        modules = []
        for index, (name, is_unit) in enumerate(sorted(self.modules, key=lambda one: first[one[0]])):
            renamed[name] = f"{around(name.rpartition('.')[0])}.{index}".removeprefix(".")
            modules.append((renamed[name], is_unit))
        parameters = tuple(
            replace(one, name=f"{around(one.name.rpartition('.')[0])}.p{index}".removeprefix("."))
            for index, one in enumerate(self.parameters)
        )
        return replace(self, parameters=parameters, modules=tuple(modules)), renamed


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one category that a rank keeps between two steps; ``shared_by`` ranks of its node share them."""

    category: str
    nbytes: int
    on_host: bool = False
    shared_by: int = 1


@dataclass(frozen=True)
class GroupBytes:
    """Sizes in bytes of one parameter group: unsharded in the compute dtype, and the shards of a rank."""

    trained: bool
    whole: int
    shard: int  # in the dtype of the optimizer step
    narrow_shard: int  # in the compute dtype


@dataclass(frozen=True)
class StrategyRecord:
    """Record of a strategy's step."""

    calls: tuple[Call, ...]
    owned: tuple[MemoryItem, ...]
    forward: dict[str, Transient]  # by module
    backward: dict[str, Transient]
    unsharded_at_loss: int  # bytes of parameters that stay unsharded between the passes
    groups: tuple[GroupBytes, ...]  # of a sharded strategy
    trained_bytes: int  # of the parameters that the optimizer updates
    keeps_gradients: bool  # whether gradients stay in the tensors of autograd until the optimizer step


@lru_cache(maxsize=256)
def simulate(task: Task) -> StrategyRecord:
    """Return the record of a task; tasks that differ only in names are run once."""
    renamed, names = task.renamed()
    record = _simulate(renamed)
    forward, backward = (
        {name: found[new] for name, new in names.items() if new in found} for found in (record.forward, record.backward)
    )
    return replace(record, forward=forward, backward=backward)


# Model without computation --------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Module that returns its input; its backward pass returns gradients without values."""

    def __init__(self, name: str, recorder: StepRecorder) -> None:
        super().__init__()
        self.name, self.recorder = name, recorder

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after all modules inside."""
        held = list(self._parameters.values())
        self.recorder.begin_module(self.name, held)
        x = _Identity.apply(self, x, *held)  # type: ignore[no-untyped-call]
        self.recorder.end_module(held)
        for child in self._modules.values():
            assert child is not None
            x = child(x)
        return x

    def initialise(self, name: str, module: nn.Module) -> None:
        """Do nothing: values are not needed."""


class _Unit(_Layer):
    """Module that strategies gather as a unit."""


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return a view of ``x``."""
        ctx.layer, ctx.parameters = layer, parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recorder: StepRecorder = ctx.layer.recorder
        recorder.begin_module(ctx.layer.name, ctx.parameters)
        with recorder.computing():
            found = [torch.empty_like(one) if one.requires_grad else None for one in ctx.parameters]
        recorder.end_module(ctx.parameters)
        return None, gradients[0], *found


def _model_of(task: Task, recorder: StepRecorder) -> nn.Module:
    """Return a model of the task's modules and parameters."""
    modules: dict[str, _Layer] = {"": _Unit("", recorder)}
    for name, is_unit in task.modules:
        parent, _, own = name.rpartition(".")
        modules[name] = modules[parent]._modules[own] = (_Unit if is_unit else _Layer)(name, recorder)
    for one in task.parameters:
        parent, _, own = one.name.rpartition(".")
        memory = torch.empty(one.numel, dtype=one.dtype, device=META)
        modules[parent]._parameters[own] = nn.Parameter(memory, requires_grad=one.trained)
    for index, count in enumerate(task.buffers):
        modules[""].register_buffer(f"buffer{index}", torch.empty(count, dtype=torch.uint8, device=META))
    return modules[""]


class _NoUpdate(torch.optim.SGD):
    """Optimizer whose steps do nothing but run the hooks of a strategy."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


# Simulation -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _simulate(task: Task) -> StrategyRecord:
    recorder = StepRecorder(sum(one.nbytes for one in task.parameters))
    divides = task.group.size > 1 or task.settings.mixed_precision != "none" or task.sharded
    if task.settings.data in PER_WORKER_UPDATES or not divides or not any(one.trained for one in task.parameters):
        return _whole(task)
    with recorder:
        model = _model_of(task, recorder)
        comm = RecordingCommunicator(task.group, recorder.communicate, recorder.allocate)
        make = ShardedDataParallel if task.sharded else attach
        settings = replace(task.settings, units=(_Unit.__name__,), elementwise=(_NoUpdate.__name__,))
        strategy: Strategy = make(model, cast(Communicator, comm), settings, CPU if task.on_cpu else META)
        optimizer = _NoUpdate(model.parameters(), lr=0.0)
        _run_step(task, strategy, optimizer, recorder)  # the order of collectives is fixed after the first step
        recorder.begin_recording()
        gradients = _run_step(task, strategy, optimizer, recorder)
        record = _record_of(task, strategy, recorder, gradients)
        strategy.detach()
    return record


def _whole(task: Task) -> StrategyRecord:
    """Return the record of a rank that runs the plain model, as it shares nothing, or works asynchronously."""
    parameters = MemoryItem("parameters", sum(one.nbytes for one in task.parameters))
    owned = (parameters, MemoryItem("buffers", sum(task.buffers)))
    trained = sum(one.nbytes for one in task.parameters if one.trained)
    return StrategyRecord((), owned, {}, {}, 0, (), trained, keeps_gradients=True)


def _run_step(task: Task, strategy: Strategy, optimizer: torch.optim.Optimizer, recorder: StepRecorder) -> list[int]:
    """Run a step as ``train.recipe.Stepper`` does; return the storages of the gradients at the optimizer step."""
    for number in range(task.passes):
        syncs = number == task.passes - 1 or strategy.reduces_early and not task.in_parts
        recorder.begin("forward", number)
        parts = cast(SyncStrategy, strategy).deferred_reduction(reduces=syncs) if task.in_parts else nullcontext()
        with nullcontext() if syncs else strategy.no_sync(), parts:
            with recorder.computing():
                x = torch.empty(1, device=META)
            outputs = strategy.model(x)
            recorder.begin("backward", number)
            outputs.sum().backward()
    recorder.begin("clip")
    strategy.clip_grad_norm(1.0)
    recorder.begin("update")
    optimizer.step()
    found = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    keys = [one.untyped_storage()._cdata for one in found]
    optimizer.zero_grad()
    return keys


def _record_of(task: Task, strategy: Strategy, recorder: StepRecorder, gradients: Sequence[int]) -> StrategyRecord:
    """Return the record of what a strategy owns between steps, and of what it did in the last one."""
    # On a GPU, gradients in the communicator's memory are copies of those on the device.
    on_host = set() if task.on_cpu else recorder.of_communicator.keys()
    in_place = {key for key in gradients if recorder.nbytes(key) and key not in on_host}
    parameters = recorder.of_parameters | {one.untyped_storage()._cdata for one in strategy.model.parameters()}
    owned = []
    for key in list(recorder.live):
        category = "parameters" if key in parameters else "gradients" if key in in_place else "buffers"
        shared_by = recorder.of_communicator.get(key)
        owned.append(MemoryItem(category, recorder.nbytes(key), shared_by is not None, shared_by or 1))
    groups = tuple(
        GroupBytes(
            one.trained,
            one.layout.numel * one.flat.itemsize,
            one.layout.slice_numel * one.shard_data.itemsize,
            one.layout.slice_numel * one.flat.itemsize,
        )
        for one in (strategy.components.groups if isinstance(strategy, ShardedDataParallel) else ())
    )
    trained = sum(one.nbytes for one in strategy.model.parameters() if one.requires_grad)
    return StrategyRecord(
        tuple(recorder.calls),
        _summed(owned),
        recorder.transients["forward"],
        recorder.transients["backward"],
        recorder.unsharded_at_loss,
        groups,
        sum(one.shard for one in groups if one.trained) if groups else trained,
        keeps_gradients=any(key not in in_place for key in gradients),
    )


def _summed(owned: Sequence[MemoryItem]) -> tuple[MemoryItem, ...]:
    """Return the sums of what is alike."""
    sums: Counter[MemoryItem] = Counter()
    for one in owned:
        sums[replace(one, nbytes=0)] += one.nbytes
    return tuple(replace(kind, nbytes=nbytes) for kind, nbytes in sums.items())
