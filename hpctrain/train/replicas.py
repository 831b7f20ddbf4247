"""Comparison of replicas: parameters, optimizer states and buffers that must have the same bits on several ranks.

A tensor's bits are summed as integers, in one pass over memory. One changed bit always changes the
sum. 64-bit words are summed at the speed of memory.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import CorruptionError, MismatchError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.first_step import flat_elements, model_name

_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes; the widest is summed fastest
_PIECE = 2**20  # elements that a rank sends at once
Sums = dict[str, int]  # by name of the tensor


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> Sums:
    """Return the sum of the bits of each tensor. Copies of a tensor have equal sums, whatever their address."""
    found: Sums = {}
    singles: dict[tuple[torch.device, torch.dtype], list[str]] = {}  # of one element, such as counts of steps
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 1 and not tensor.is_complex():
            singles.setdefault((tensor.device, tensor.dtype), []).append(name)
        else:
            sums.setdefault(tensor.device, {})[name] = _sum_of_bits(tensor)
    for (_, dtype), names in singles.items():
        bits = torch.stack([tensors[name].detach().reshape(()) for name in names]).view(_WIDTHS[dtype.itemsize])
        found |= zip(names, bits.tolist())
    for own in sums.values():  # one transfer per device
        found |= zip(own, torch.stack(list(own.values())).tolist())
    return {name: found[name] for name in tensors}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements as integers, a scalar on the tensor's own device."""
    simple = tensor.is_contiguous() and not tensor.is_complex()
    flat = tensor.detach().view(-1) if simple else flat_elements(tensor)
    width = next(width for width in _WIDTHS if flat.nbytes % width == 0)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()  # a view as wider integers must begin at a multiple of their size
    return flat.view(_WIDTHS[width]).sum(dtype=torch.int64)


def parameters_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all models, by names for messages."""
    return {
        f"parameter {name}{f' of {model_name(key)}' if key else ''}": parameter
        for key, model in models.items()
        for name, parameter in model.named_parameters()
    }


def replicated(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the parameters of all models and the tensors of all optimizer states, by names for messages."""
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in parameters_of(models).items()}
    names = {id(parameter): name for model in models.values() for name, parameter in model.named_parameters()}
    for key, optimizer in optimizers.items():
        of = f" of optimizer {key!r}" if key else ""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            for entry, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{entry} of {names.get(id(parameter), f'parameter {number}')}{of}"] = value
    return found


class Differences:
    """Tensors whose replicas differ; ``everyone`` has the host and the sums of each rank."""

    def __init__(self, everyone: list[tuple[str, Sums]]) -> None:
        self.hosts = [host for host, _ in everyone]
        self._sums = [sums for _, sums in everyone]
        names = dict.fromkeys(name for sums in self._sums for name in sums)
        self.names = [name for name in names if len({sums.get(name) for sums in self._sums}) > 1]

    def holders(self, name: str, value: int | None) -> list[int]:
        """Return the ranks whose tensor has this sum."""
        return [rank for rank, sums in enumerate(self._sums) if sums.get(name) == value]

    @cached_property
    def majorities(self) -> Sums:
        """Return by name the sum that more than half of the ranks have; a name without one is left out."""
        found: Sums = {}
        for name in self.names:
            value, votes = Counter(sums.get(name) for sums in self._sums).most_common(1)[0]
            if value is not None and 2 * votes > len(self._sums):
                found[name] = value
        return found

    @property
    def deviating(self) -> list[tuple[int, str]]:
        """Return the ranks that differ from the majority, each with the tensor; empty if a tensor has no majority."""
        if len(self.majorities) < len(self.names):
            return []
        return [
            (rank, name)
            for name in self.names
            for rank in range(len(self.hosts))
            if rank not in self.holders(name, self.majorities[name])
        ]

    def place(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"


def compare_replicas(comm: Communicator, sums: Sums) -> Differences | None:
    """Compare the sums of tensors that must be equal on all ranks; None if they are equal. Collective.

    The ranks exchange 8 bytes twice; all sums are exchanged only if these differ.
    """
    combined = sum(value * (2 * number + 1) for number, value in enumerate(sums.values())) % 2**64
    signed = combined - 2**64 if combined >= 2**63 else combined
    both = torch.tensor([signed, -1 - signed])  # the complement: the most negative number has no negative
    comm.all_reduce(both, "max")
    highest, complement = both.tolist()
    if highest == -1 - complement:
        return None
    return Differences(comm.all_gather_object((socket.gethostname(), sums)))


@torch.no_grad()
def majority_of_elements(comm: Communicator, tensor: Tensor) -> Tensor | None:
    """Return the tensor with the bits that more than half of the ranks have, for each element. Collective.

    None if an element has no majority.
    """
    bits = bits_of(tensor).reshape(-1)
    found = bits.clone()
    for begin in range(0, bits.numel(), _PIECE):
        piece = slice(begin, begin + _PIECE)
        everyone = torch.stack(comm.all_gather_object(bits[piece].cpu()))
        found[piece] = everyone.mode(0).values.to(found.device)
        votes = (everyone == found[piece].cpu()).sum(0)
        if bool((2 * votes <= comm.size).any()):
            return None
    return found.view(tensor.dtype).reshape(tensor.shape)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an integer."""
    return tensor.contiguous().view(_WIDTHS[tensor.element_size()])


# Parameters and buffers of a run, compared at its first update and at checkpoints -------------------------------------


class ReplicaChecks:
    """Comparison of the replicas of parameters and buffers; models and strategies have the same keys."""

    def __init__(self, comm: Communicator, models: Mapping[str, nn.Module], strategies: Mapping[str, Strategy]) -> None:
        self._comm, self._models, self._strategies = comm, models, strategies
        # Asynchronous ranks must not wait for each other, and each has its own parameters.
        self._compares = not any(strategy.asynchronous for strategy in strategies.values())

    def compare(self, when: str, *, first: bool = False) -> None:
        """Compare parameters that are replicated on several ranks; ``when`` is for the message. Collective.

        Raises ``CorruptionError`` on all ranks if any bit differs; after the ``first`` update
        ``MismatchError``, because then it is the program that makes different updates.
        """
        if not self._compares:
            return
        differences = [self._difference(key, model, when) for key, model in self._models.items()]
        own = next((each for each in differences if each), "")
        found = next((each for each in self._comm.all_gather_object(own) if each), "")
        if found:
            if first:
                raise MismatchError(found, everywhere=True)
            raise CorruptionError(
                f"{found}; or a bit has changed by itself: health.fingerprint_every finds and repairs that under ddp",
                everywhere=True,
            )

    def warn_of_buffers(self) -> None:
        """Warn of buffers that differ between data ranks after the first step. Collective."""
        if not self._compares:
            return
        for key, model in self._models.items():
            named = dict(model.named_modules(remove_duplicate=False))
            sums = bit_sums(
                {
                    name: buffer
                    for name, buffer in model.named_buffers()
                    if not isinstance(named[name.rpartition(".")[0]], _BatchNorm)
                }
            )
            data = self._strategies[key].data
            everyone = data.all_gather_object(sums)
            own = [name for name in sums if any(other.get(name) != sums[name] for other in everyone)]
            differ = list(dict.fromkeys(name for names in self._comm.all_gather_object(own) for name in names))
            if differ and self._comm.rank == 0:
                logger.warning(
                    "buffers %s%s of %s after the first step: each data rank has different values, from its own "
                    "samples or random numbers, and those of rank 0 are kept; one process would compute them from all "
                    "samples; average them over the ranks in the model's forward (comm.all_reduce), or use batch norms",
                    ", ".join(differ[:4]),
                    ", ..." if len(differ) > 4 else "",
                    model_name(key),
                )

    def _difference(self, key: str, model: nn.Module, when: str) -> str:
        """Return a message about the first parameter whose replicas differ; empty if all are equal."""
        copies = self._strategies[key].copies
        if copies is None or copies.size == 1:
            return ""
        everyone = copies.all_gather_object((self._comm.rank, bit_sums(dict(model.named_parameters()))))
        first, expected = everyone[0]
        for name in expected:
            for rank, other in everyone:
                if other.get(name) != expected[name]:
                    return (
                        f"parameter {name} of {model_name(key)} {when}: rank {rank} holds other values than rank "
                        f"{first}; data-parallel ranks must make the same update; look for values computed from one "
                        "rank's samples or random numbers (clipping, noise, a learning rate, values set by hand)"
                    )
        return ""
