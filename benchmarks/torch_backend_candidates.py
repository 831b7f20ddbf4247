"""Candidates of the benchmark of torch.distributed: collectives on its groups, and on hpctrain's communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from communication_candidates import ROOT, Call, Candidate, Operation, Setting, result_of, share
from torch import Tensor

from hpctrain.comm.communicator import Communicator


class Name(StrEnum):
    """Candidates."""

    GLOO = "gloo"
    OURS = "hpctrain"
    EMPTY = "hpctrain, comm.empty"
    COMMUNICATOR = "hpctrain communicator"  # called without torch.distributed


GLOO_EVERY = 2  # one of so many rounds, because it takes several times as long as the others


@dataclass(frozen=True)
class Groups:
    """Groups of all ranks: torch's gloo, and ours with its communicator."""

    gloo: Any
    ours: Any
    setting: Setting  # of a communicator that no group uses: barriers between the turns
    memory: Setting  # of the communicator of our group, which provides its node memory

    @classmethod
    def create(cls, comm: Communicator) -> Groups:
        """Return the groups; torch.distributed is initialized with ours. Collective."""
        ours: Any = dist.group.WORLD
        cpu, dtype = torch.device("cpu"), torch.float32
        gloo = dist.new_group(backend="gloo")
        return cls(gloo, ours, Setting(comm, cpu, dtype), Setting(ours.comm, cpu, dtype))


def _reduce_scatter(group: Any, first: Tensor, second: Tensor, own: Tensor) -> Call:
    # PyTorch 2.13 renamed this and the next one.
    call: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(call, second, first, group=group)


def _all_gather(group: Any, first: Tensor, second: Tensor, own: Tensor) -> Call:
    call: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return partial(call, first, own, group=group)


# Collectives by name: functions of the group, the whole tensor, the second tensor and this rank's share of the first.
CALLS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Call]] = {
    "all_reduce": lambda group, first, second, own: partial(dist.all_reduce, first, group=group),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": lambda group, first, second, own: partial(dist.broadcast, first, ROOT, group=group),
}


def candidates(groups: Groups, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield the candidates of an operation. Collective."""
    setting = groups.setting
    yield _candidate(setting, operation, Name.GLOO, groups.gloo, setting.plain(numel), every=GLOO_EVERY)
    yield _candidate(setting, operation, Name.OURS, groups.ours, setting.plain(numel))
    if operation.name == "all_reduce":
        yield _candidate(setting, operation, Name.EMPTY, groups.ours, groups.memory.shared("group", numel))
        tensor = setting.plain(numel)
        call = partial(setting.comm.all_reduce, tensor, "sum")
        yield Candidate(Name.COMMUNICATOR, call, [tensor], tensor, needed=True)


def _candidate(
    setting: Setting, operation: Operation, name: str, group: Any, first: Tensor, every: int = 1
) -> Candidate:
    second = setting.plain(operation.second(first.numel(), setting.size))
    call = CALLS[operation.name](group, first, second, share(first, setting.rank, setting.size))
    result = result_of(setting, operation, [first, second], second)
    return Candidate(name, call, [first, second], result, every, needed=True)
