"""Find the tensors that a candidate holds, and the memory under them, each byte once.

Strategies are asked for what nobody but them needs to know, their flat memory: that is what is measured here.
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
    """Hold the memory of some tensors: bytes of the process's own, and extents of what ranks share."""

    private: int = 0
    shared: tuple[Extent, ...] = ()


@dataclass
class Holdings:
    """Tell what a candidate holds at a moment."""

    candidate: Candidate
    buckets: peers.Buckets
    memory: SharedMap = field(default_factory=SharedMap)

    def now(self, fresh: Iterable[Tensor], saved: Iterable[Tensor]) -> dict[str, Held]:
        """Return the memory of each kind; ``fresh`` gradients are nobody's yet, ``saved`` tensors are autograd's."""
        kinds: Mapping[str, Iterable[Any]] = {
            PARAMETERS: self._parameters(),
            GRADIENTS: [*self._gradients(), *fresh],
            STATES: self.candidate.optimizer.state.values(),
            ACTIVATIONS: saved,
        }
        claimed: set[int] = set()
        return {kind: self._claim(tensors(kinds[kind]), claimed) for kind in KINDS}

    def _claim(self, found: Iterable[Tensor], claimed: set[int]) -> Held:
        """Return the memory under tensors, but for storages that are claimed already."""
        private, shared = 0, []
        for tensor in found:
            if not tensor.numel():
                continue  # it has no address, and its storage is others'
            storage = tensor.untyped_storage()  # of no bytes where it was given back
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
            for piece in self.candidate.strategy._parts.pieces:
                yield piece.flat, piece.own

    def _gradients(self) -> Iterator[Any]:
        yield [parameter.grad for parameter in self.candidate.model.parameters()]
        yield list(peers.fsdp_gradients(self.candidate.model))
        yield self.buckets.found
        strategy = self.candidate.strategy
        if isinstance(strategy, DataParallel):
            yield getattr(strategy, "_memory", None)
        if isinstance(strategy, ShardedDataParallel):
            reduction = strategy._parts.reduction
            yield getattr(reduction._room, "_memory", None)
            for flow in reduction.flows:
                yield flow.flat, flow.target, flow._slice
            for member in strategy._parts.members:
                yield member.whole.grad, member.shard.grad


def tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers; of one that is distributed, the part that lies here."""
    if isinstance(nest, Tensor):
        yield getattr(nest, "_local_tensor", nest)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors(value)
    elif isinstance(nest, Iterable) and not isinstance(nest, (str, bytes)):
        for value in nest:
            yield from tensors(value)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return the address and length of a tensor's memory: all of its storage where it has gaps."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
