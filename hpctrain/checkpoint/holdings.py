"""Say what a rank holds of a training run, and let the ranks learn from each other what all of them hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint import content
from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.source import Source, described
from hpctrain.checkpoint.named import Models
from hpctrain.checkpoint.optimizer import OptimizerState, capture
from hpctrain.checkpoint.tensors import is_finite
from hpctrain.errors import CheckpointError, NonFiniteError
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator


@dataclass(frozen=True)
class Description:
    """Tell other ranks what one holds: the boxes of its tensors, and the optimizer without its tensors."""

    boxes: list[Shard]
    optimizers: dict[str, OptimizerState]


@dataclass(frozen=True)
class Holdings:
    """Hold the sources of this rank: of the model, then of the optimizer, then of what is its own alone."""

    sources: list[Source]
    optimizers: dict[str, OptimizerState]  # by key
    parameters: frozenset[str]  # paths; what is not among them is a buffer

    @classmethod
    def of(
        cls,
        models: Models,
        optimizers: Mapping[str, torch.optim.Optimizer],
        own: Mapping[str, torch.Tensor] = MappingProxyType({}),
        rank: int = 0,
    ) -> Holdings:
        """Return what this rank holds, ``own`` being what no other does; no tensor is copied."""
        shards = models.shards()
        states = {key: capture(models, key, optimizer) for key, optimizer in optimizers.items()}
        for state in states.values():
            shards += state.shards
        shards += [Shard.whole(own_path(rank, name), one) for name, one in own.items()]
        return cls(content.shard_sources(shards), states, frozenset(models.parameter_paths()))

    def check_finite(self) -> None:
        """Keep NaN and infinity out; an infinite buffer may be meant (an attention mask), a NaN never is.

        Raises ``NonFiniteError`` for anything that this rank holds of the model, whether it writes that or not.
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

    def description(self) -> Description:
        """Return what other ranks need to know."""
        told = {key: OptimizerState(one.kind, [], one.values, one.groups) for key, one in self.optimizers.items()}
        return Description([described(source) for source in self.sources], told)


def worker_group(rank: int) -> str:
    """Return where lies what a rank holds alone."""
    return f"{layout.WORKERS}/{rank}"


def own_path(rank: int, name: str) -> str:
    """Return the path of a tensor that a rank holds alone; the name of one of several models begins with its key."""
    path = worker_group(rank)
    for part in name.split("/", 1):
        path = layout.child(path, part)
    return path


def exchange(comm: Communicator, own: Description, *more: Any) -> tuple[bytes, list[Description]]:
    """Return a digest of all boxes of all ranks, and the descriptions; a call by all ranks.

    Where all ranks hold the same, which is the rule, no more than digests travel. ``more`` must be equal everywhere.
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


def joined(everyone: Sequence[Description]) -> dict[str, OptimizerState]:
    """Return the optimizers of all ranks by key: parameters of each group in the order in which ranks name them."""
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
