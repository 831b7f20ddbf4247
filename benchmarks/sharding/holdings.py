"""Tensors that a candidate holds, and their memory, each byte once.

This module reads private attributes of the strategies, their flat buffers, as those are the
measured memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharding import peers
from sharding.addresses import Extent, SharedMap
from sharding.candidates import Candidate
from sharding.names import ACTIVATIONS, GRADIENTS, KINDS, PARAMETERS, STATES
from torch import Tensor

from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel


@dataclass(frozen=True)
class Held:
    """Memory of some tensors: private bytes, and extents of memory that ranks share."""

    private: int = 0
    shared: tuple[Extent, ...] = ()


@dataclass
class Holdings:
    """Query of a candidate's memory at a moment."""

    candidate: Candidate
    buckets: peers.Buckets
    memory: SharedMap = field(default_factory=SharedMap)

    def now(self, fresh: Iterable[Tensor], saved: Iterable[Tensor]) -> dict[str, Held]:
        """Return the memory of each kind; ``fresh`` gradients are not stored yet, ``saved`` tensors are autograd's."""
        kinds: Mapping[str, Iterable[Any]] = {
            PARAMETERS: self._parameters(),
            GRADIENTS: [*self._gradients(), *fresh],
            STATES: self.candidate.optimizer.state.values(),
            ACTIVATIONS: saved,
        }
        claimed: set[int] = set()
        return {kind: self._claim(tensors(kinds[kind]), claimed) for kind in KINDS}

    def _claim(self, found: Iterable[Tensor], claimed: set[int]) -> Held:
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
        return Held(private, tuple(shared))

    def _parameters(self) -> Iterator[Any]:
        yield list(self.candidate.model.parameters())
        yield list(peers.fsdp_parameters(self.candidate.model))
        if isinstance(self.candidate.strategy, ShardedDataParallel):
            for group in self.candidate.strategy.components.groups:
                yield group.flat, group.shard_data

    def _gradients(self) -> Iterator[Any]:
        yield [parameter.grad for parameter in self.candidate.model.parameters()]
        yield list(peers.fsdp_gradients(self.candidate.model))
        yield self.buckets.found
        strategy = self.candidate.strategy
        if isinstance(strategy, DataParallel):
            yield getattr(strategy, "_memory", None)
        if isinstance(strategy, ShardedDataParallel):
            reduction = strategy.components.reduction
            yield getattr(reduction._buffers, "_memory", None)
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
