"""Samples of a candidate's memory in a step: what its tensors hold, and what Linux reports for this process.

Note: when memory peaks. In forward, activations grow layer by layer. In backward, each layer's
gradients are computed while those of later layers are still reduced, and its activations are freed.
Therefore a sample is taken at three moments: when a layer is about to run, with its parameters
unsharded; when the gradient of its output is ready; and when a parameter's gradient is ready but
not yet stored. The tensors that autograd saves for the backward pass go through
``saved_tensors_hooks``; a weak reference shows when autograd frees them, node by node.

This module reads private attributes of the strategies, their flat buffers, as those are the
measured memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

if TYPE_CHECKING:
    from fsdp_step import Candidate

PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, REST = "parameters", "gradients", "states", "activations", "rest"
KINDS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS)

Extent = tuple[str, int, int]  # device and inode of a shared object, with begin and end in it

_ROLLUP, _MAPS = Path("/proc/self/smaps_rollup"), Path("/proc/self/maps")


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process: private memory, and its part of shared memory.

    A page that several processes have mapped counts in equal parts for them (proc(5): Pss), so that
    ranks add up. Mapped files, such as programs and libraries, are excluded: their part depends on
    other processes of the machine.
    """

    private: int
    shared: int

    @property
    def total(self) -> int:
        """Return the sum of both."""
        return self.private + self.shared


def resident(text: str | None = None) -> Resident:
    """Return the resident memory of this process now."""
    try:
        lines = (_ROLLUP.read_text() if text is None else text).splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines[1:])
    if not {"Pss_Anon", "Pss_Shmem"} <= fields.keys():
        raise UsageError(f"memory cannot be measured here: {_ROLLUP} with Pss_Anon is needed (linux 5.9)")
    return Resident(*(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem")))


@dataclass(frozen=True)
class Region:
    """Part of a shared object that is mapped into this process."""

    begin: int
    end: int
    key: str
    offset: int


class SharedMap:
    """Mapping from addresses to shared memory objects."""

    def __init__(self, text: str | None = None) -> None:
        regions = map(_region, (_MAPS.read_text() if text is None else text).splitlines())
        self._regions = sorted((one for one in regions if one is not None), key=lambda one: one.begin)
        self._begins = [one.begin for one in self._regions]

    def find(self, address: int, nbytes: int) -> Extent | None:
        """Return the extent of a shared object at an address; None for private memory."""
        place = bisect_right(self._begins, address) - 1
        if place < 0 or address >= self._regions[place].end:
            return None
        one = self._regions[place]
        start = address - one.begin + one.offset
        return one.key, start, start + nbytes


def _region(line: str) -> Region | None:
    """Return the region of a line of proc(5)'s maps if it is shared."""
    addresses, permissions, offset, device, inode = line.split()[:5]
    if permissions[3] != "s":
        return None
    begin, end = (int(word, 16) for word in addresses.split("-"))
    return Region(begin, end, f"{device} {inode}", int(offset, 16))


def union(extents: Iterable[Extent]) -> list[Extent]:
    """Return the union of extents, each byte once."""
    found: list[Extent] = []
    for key, begin, end in sorted(extents):
        if found and found[-1][0] == key and begin <= found[-1][2]:
            found[-1] = key, found[-1][1], max(end, found[-1][2])
        else:
            found.append((key, begin, end))
    return found


def size(extents: Sequence[Extent]) -> int:
    """Return the bytes of extents that do not overlap."""
    return sum(end - begin for _, begin, end in extents)


def release_freed_memory() -> None:
    """Let the C library return freed memory to the system if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Tensors that torch's strategies hold ---------------------------------------------------------------------------------


class Buckets:
    """Recorder of the buckets of torch's DDP, which are visible only to a communication hook."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[int, Tensor] = {}
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # Torch checks the annotations of a hook, and rejects string annotations; a lambda has
            # none.
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.found[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter tensors of ``fully_shard``: shards, and unsharded parameters while they exist."""
    for one in _each(model):
        yield one._sharded_param_data
        yield one.all_gather_outputs
        yield getattr(one, "_unsharded_param", None)


def fsdp_gradients(model: nn.Module) -> Iterator[Any]:
    """Yield its gradient tensors: shards, unsharded gradients, and those in reduction."""
    for one in _each(model):
        whole = getattr(one, "_unsharded_param", None)
        yield one.sharded_param.grad
        yield None if whole is None else whole.grad
        yield one.unsharded_accumulated_grad
    for group in _groups(model):
        yield [getattr(state, "reduce_scatter_input", None) for state in group.comm_ctx.reduce_scatter_states]


def _each(model: nn.Module) -> Iterator[Any]:
    for group in _groups(model):
        yield from group.fsdp_params


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if state._fsdp_param_group is not None:
                yield state._fsdp_param_group


# Tensors that a candidate holds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorMemory:
    """Memory of some tensors: private bytes, and extents of memory that ranks share."""

    private: int = 0
    shared: tuple[Extent, ...] = ()


@dataclass
class CandidateTensors:
    """Query of a candidate's memory at a moment."""

    candidate: Candidate
    buckets: Buckets
    memory: SharedMap = field(default_factory=SharedMap)

    def now(self, fresh: Iterable[Tensor], saved: Iterable[Tensor]) -> dict[str, TensorMemory]:
        """Return the memory of each kind; ``fresh`` gradients are not stored yet, ``saved`` tensors are autograd's."""
        kinds: Mapping[str, Iterable[Any]] = {
            PARAMETERS: self._parameters(),
            GRADIENTS: [*self._gradients(), *fresh],
            STATES: self.candidate.optimizer.state.values(),
            ACTIVATIONS: saved,
        }
        claimed: set[int] = set()
        return {kind: self._claim(tensors(kinds[kind]), claimed) for kind in KINDS}

    def _claim(self, found: Iterable[Tensor], claimed: set[int]) -> TensorMemory:
        """Return the memory of tensors, without storages that are already claimed."""
        private, shared = 0, []
        for tensor in found:
            if not tensor.numel():
                continue  # it has no address, and its storage belongs to others
            storage = tensor.untyped_storage()  # empty if it was freed
            extent = self.memory.find(*_stretch(tensor))
            if extent is not None:
                shared.append(extent)
            elif storage.data_ptr() not in claimed:
                claimed.add(storage.data_ptr())
                private += storage.nbytes()
        return TensorMemory(private, tuple(shared))

    def _parameters(self) -> Iterator[Any]:
        yield list(self.candidate.model.parameters())
        yield list(fsdp_parameters(self.candidate.model))
        if isinstance(self.candidate.strategy, ShardedDataParallel):
            for group in self.candidate.strategy.components.groups:
                yield group.flat, group.shard_data

    def _gradients(self) -> Iterator[Any]:
        yield [parameter.grad for parameter in self.candidate.model.parameters()]
        yield list(fsdp_gradients(self.candidate.model))
        yield self.buckets.found
        strategy = self.candidate.strategy
        if isinstance(strategy, DataParallel):
            yield getattr(strategy, "_memory", None)
        if isinstance(strategy, ShardedDataParallel):
            reduction = strategy.components.reduction
            yield reduction.memory
            for each in reduction.reductions:
                yield each.flat, each.target, each._slice
            for member in strategy.components.members:
                yield member.unsharded.grad, member.shard.grad


def tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers; of a distributed tensor, its local part."""
    if isinstance(nest, Tensor):
        yield getattr(nest, "_local_tensor", nest)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors(value)
    elif isinstance(nest, Iterable) and not isinstance(nest, (str, bytes)):
        for value in nest:
            yield from tensors(value)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return the address and length of a tensor's memory: its whole storage if it is not contiguous."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


# Samples --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Memory of a rank at one moment of a step."""

    moment: str
    resident: Resident
    held: dict[str, TensorMemory]


class Saved:
    """Wrapper that autograd saves in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MemorySampler:
    """Sampling of a candidate's steps for the duration of a ``with`` block."""

    def __init__(self, candidate: Candidate, buckets: Buckets) -> None:
        self.samples: list[Sample] = []
        self._model = candidate.model
        self._holdings = CandidateTensors(candidate, buckets)
        self._saved: WeakSet[Saved] = WeakSet()
        self._handles: list[RemovableHandle] = []
        self._known: set[int] = set()
        self._saving: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        for module in self._model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._handles.append(module.register_forward_pre_hook(self._before))
                self._handles.append(module.register_forward_hook(self._after))
        self._saving.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saving.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def sample(self, moment: str, fresh: Iterable[Tensor] = ()) -> None:
        """Take a sample; ``fresh`` are gradients that were just computed."""
        saved = [one.tensor for one in self._saved]
        self.samples.append(Sample(moment, resident(), self._holdings.now(fresh, saved)))

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.add(saved)
        return saved

    @staticmethod
    def _unpack(saved: Saved) -> Tensor:
        return saved.tensor

    def _before(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known.add(id(parameter))
                self._handles.append(parameter.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]
        self.sample("forward")

    def _after(self, module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _: self.sample("backward"))  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        self.sample("gradient", [gradient])
