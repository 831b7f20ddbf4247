"""Local state of a rank for a checkpoint, and the exchange of its description with the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint import content
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.source import Source, described
from hpctrain.checkpoint.names import Models
from hpctrain.checkpoint.optimizer import OptimizerState, capture
from hpctrain.checkpoint.states import is_finite
from hpctrain.errors import CheckpointError, NonFiniteError
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


@dataclass(frozen=True)
class StateDescription:
    """Description of a rank's local state: the boxes of its tensors, and the optimizers without their tensors."""

    boxes: list[Shard]
    optimizers: dict[str, OptimizerState]


@dataclass(frozen=True)
class Holdings:
    """Local state of this rank: sources of the model, then of the optimizers, then of its rank-local tensors."""

    sources: list[Source]
    optimizers: dict[str, OptimizerState]  # by key
    parameters: frozenset[str]  # paths of parameters; other paths are buffers

    @classmethod
    def of(
        cls,
        models: Models,
        optimizers: Mapping[str, torch.optim.Optimizer],
        own: Mapping[str, torch.Tensor] = MappingProxyType({}),
        rank: int = 0,
    ) -> Holdings:
        """Return the local state of this rank; ``own`` are rank-local tensors. No tensor is copied."""
        shards = models.shards()
        states = {key: capture(models, key, optimizer) for key, optimizer in optimizers.items()}
        for state in states.values():
            shards += state.shards
        shards += [Shard.whole(own_path(rank, name), one) for name, one in own.items()]
        return cls(content.shard_sources(shards), states, frozenset(models.parameter_paths()))

    def check_finite(self) -> None:
        """Refuse NaN and infinity. Only infinity in a buffer may be intended (an attention mask), NaN never is.

        Raises ``NonFiniteError`` for any part of the model on this rank, including parts that
        another rank writes.
        """
        for box in (source.box for source in self.sources):
            if box.name.startswith(f"{layout.WORKERS}/") and not is_finite(box.tensor):
                raise NonFiniteError(f"{box.name} is not finite: it must not reach a checkpoint")
            if not box.name.startswith(f"{layout.MODEL}/") or is_finite(box.tensor):
                continue
            name = box.name.removeprefix(f"{layout.MODEL}/")
            if box.name in self.parameters:
                raise NonFiniteError(f"the parameter {name} is not finite: it must not reach a checkpoint")
            if bool(torch.isnan(box.tensor).any()):
                raise NonFiniteError(f"the buffer {name} holds NaN: it must not reach a checkpoint")

    def description(self) -> StateDescription:
        """Return the description that other ranks need."""
        told = {key: OptimizerState(one.kind, [], one.values, one.groups) for key, one in self.optimizers.items()}
        return StateDescription([described(source) for source in self.sources], told)


def worker_group(rank: int) -> str:
    """Return the group of a rank's rank-local tensors."""
    return f"{layout.WORKERS}/{rank}"


def own_path(rank: int, name: str) -> str:
    """Return the path of a rank-local tensor. With several models, its name begins with the key of the model."""
    path = worker_group(rank)
    for part in name.split("/", 1):
        path = layout.child(path, part)
    return path


def exchange(comm: Communicator, own: StateDescription, *more: Any) -> tuple[bytes, list[StateDescription]]:
    """Return a digest of the boxes of all ranks, and all descriptions. Collective.

    If all ranks describe the same state, which is the rule, only digests are sent. ``more`` must be
    equal on all ranks.
    """
    boxes, state = (hashlib.sha256(repr(part).encode()).digest() for part in (own.boxes, own.optimizers))
    digests = comm.all_gather_object((boxes, state, more))
    for rank, (_, _, other) in enumerate(digests):
        if other != digests[0][2]:
            raise CheckpointError(
                f"rank 0 was given {', '.join(map(str, digests[0][2]))} and rank {rank} {', '.join(map(str, other))}: "
                "all ranks must write the same checkpoint",
                everywhere=True,
            )
    whole = hashlib.sha256(b"".join(each[0] for each in digests)).digest()
    if all(each == digests[0] for each in digests):
        return whole, [own] * comm.size
    return whole, comm.all_gather_object(own)


def joined(everyone: Sequence[StateDescription]) -> dict[str, OptimizerState]:
    """Return the optimizers of all ranks by key; a group's parameters are in the order in which ranks name them."""
    if all(each is everyone[0] for each in everyone):
        return everyone[0].optimizers
    keys = list(dict.fromkeys(key for each in everyone for key in each.optimizers))
    return {key: _joined(key, [each.optimizers.get(key) for each in everyone]) for key in keys}


def _joined(key: str, states: Sequence[OptimizerState | None]) -> OptimizerState:
    found = [(rank, state) for rank, state in enumerate(states) if state is not None]
    known, what = [state for _, state in found], f"the optimizer {key}".rstrip()
    for rank, state in found:
        if (state.kind, len(state.groups)) != (known[0].kind, len(known[0].groups)):
            raise CheckpointError(
                f"{what} is {known[0].kind} with {len(known[0].groups)} groups on rank {found[0][0]} "
                f"and {state.kind} with {len(state.groups)} on rank {rank}"
            )
    values: dict[str, dict[str, Any]] = {}
    groups = [{**group, "params": []} for group in known[0].groups]
    for state in known:
        values |= state.values
        for group, more in zip(groups, state.groups):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
    return OptimizerState(known[0].kind, [], values, groups)
