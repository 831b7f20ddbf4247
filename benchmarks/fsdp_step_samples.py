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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from harness.memory import ROLLUP, fields_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from hpctrain.errors import UsageError
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

if TYPE_CHECKING:
    from fsdp_step import Candidate

PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, REST = "parameters", "gradients", "states", "activations", "rest"
KINDS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS)

Extent = tuple[str, int, int]  # device and inode of a shared object, with begin and end in it

_MAPS = Path("/proc/self/maps")


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
        fields = fields_of(ROLLUP.read_text() if text is None else text)
        return Resident(fields["Pss_Anon"], fields["Pss_Shmem"])
    except (OSError, KeyError) as error:
        raise UsageError(f"memory cannot be measured here: {ROLLUP} with Pss_Anon is needed (linux 5.9)") from error


class SharedMap:
    """Mapping from addresses to shared memory objects, by the lines of proc(5)'s maps."""

    def __init__(self, text: str | None = None) -> None:
        self._regions: list[tuple[int, int, str, int]] = []  # begin, end, object, offset in it
        for line in (_MAPS.read_text() if text is None else text).splitlines():
            addresses, permissions, offset, device, inode = line.split()[:5]
            if permissions[3] == "s":
                begin, end = (int(word, 16) for word in addresses.split("-"))
                self._regions.append((begin, end, f"{device} {inode}", int(offset, 16)))
        self._regions.sort()

    def find(self, address: int, nbytes: int) -> Extent | None:
        """Return the extent of a shared object at an address; None for private memory."""
        place = bisect_right(self._regions, address, key=itemgetter(0)) - 1
        if place < 0 or address >= self._regions[place][1]:
            return None
        begin, _, key, offset = self._regions[place]
        start = address - begin + offset
        return key, start, start + nbytes


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
    for group in _groups(model):
        for one in group.fsdp_params:
            yield one._sharded_param_data, one.all_gather_outputs, getattr(one, "_unsharded_param", None)


def fsdp_gradients(model: nn.Module) -> Iterator[Any]:
    """Yield its gradient tensors: shards, unsharded gradients, and those in reduction."""
    for group in _groups(model):
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            yield one.sharded_param.grad, getattr(whole, "grad", None), one.unsharded_accumulated_grad
    for group in _groups(model):
        yield [getattr(state, "reduce_scatter_input", None) for state in group.comm_ctx.reduce_scatter_states]


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


class CandidateTensors:
    """Query of a candidate's memory at a moment."""

    def __init__(self, candidate: Candidate, buckets: Buckets) -> None:
        self._candidate, self._buckets, self._memory = candidate, buckets, SharedMap()

    def now(self, fresh: Iterable[Tensor], saved: Iterable[Tensor]) -> dict[str, TensorMemory]:
        """Return the memory of each kind; ``fresh`` gradients are not stored yet, ``saved`` tensors are autograd's."""
        states = list(self._candidate.optimizer.state.values())
        kinds = ([*self._parameters()], [*self._gradients(), *fresh], states, list(saved))
        claimed: set[int] = set()
        return {kind: self._claim(tensors(nest), claimed) for kind, nest in zip(KINDS, kinds)}

    def _claim(self, found: Iterable[Tensor], claimed: set[int]) -> TensorMemory:
        """Return the memory of tensors, without storages that are already claimed."""
        private, shared = 0, []
        for tensor in found:
            if not tensor.numel():
                continue  # it has no address, and its storage belongs to others
            storage = tensor.untyped_storage()  # empty if it was freed
            extent = self._memory.find(*_stretch(tensor))
            if extent is not None:
                shared.append(extent)
            elif storage.data_ptr() not in claimed:
                claimed.add(storage.data_ptr())
                private += storage.nbytes()
        return TensorMemory(private, tuple(shared))

    def _parameters(self) -> Iterator[Any]:
        yield from self._candidate.model.parameters()
        yield from fsdp_parameters(self._candidate.model)
        if isinstance(self._candidate.strategy, ShardedDataParallel):
            for group in self._candidate.strategy.components.groups:
                yield group.flat, group.shard_data

    def _gradients(self) -> Iterator[Any]:
        strategy = self._candidate.strategy
        yield [parameter.grad for parameter in self._candidate.model.parameters()]
        yield from fsdp_gradients(self._candidate.model)
        yield self._buckets.found
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
    for leaf in tree_leaves(nest):
        if isinstance(leaf, Tensor):
            yield getattr(leaf, "_local_tensor", leaf)


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


class MemorySampler(ExitStack):
    """Sampling of a candidate's steps for the duration of a ``with`` block, whose hooks end with it."""

    def __init__(self, candidate: Candidate, buckets: Buckets) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self._model = candidate.model
        self._holdings = CandidateTensors(candidate, buckets)
        self._saved: WeakSet[Saved] = WeakSet()
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        for module in self._model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self.callback(module.register_forward_pre_hook(self._before).remove)
                self.callback(module.register_forward_hook(self._after).remove)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor))
        return self

    def sample(self, moment: str, fresh: Iterable[Tensor] = ()) -> None:
        """Take a sample; ``fresh`` are gradients that were just computed."""
        saved = [one.tensor for one in self._saved]
        self.samples.append(Sample(moment, resident(), self._holdings.now(fresh, saved)))

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.add(saved)
        return saved

    def _before(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known.add(id(parameter))
                hook = parameter.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self.callback(hook.remove)
        self.sample("forward")

    def _after(self, module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _: self.sample("backward"))  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        self.sample("gradient", [gradient])
