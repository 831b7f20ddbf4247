"""Models with parameters split over the ranks, and whole tensors assembled from the shards for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.nodes import NodeOfRank, in_pairs, on_nodes, one_per_node
from support.replicas import assert_same, backward, gradients, share, vectors
from torch import Tensor, nn

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel


@dataclass(frozen=True)
class Variant:
    """A strategy and the nodes it runs on; ``None`` for the real nodes."""

    data: Any
    node_of_rank: NodeOfRank | None = None
    within: Any = "world"

    def settings(self, **more: Any) -> ParallelSettings:
        return ParallelSettings(data=self.data, shard_within=self.within, **more)


# In memory that the ranks share, in memory of each rank, and on several nodes.
VARIANTS = {
    "zero1": Variant("zero1"),
    "zero2": Variant("zero2"),
    "fsdp": Variant("fsdp"),
    "zero1_alone": Variant("zero1", one_per_node),
    "zero2_alone": Variant("zero2", one_per_node),
    "fsdp_alone": Variant("fsdp", one_per_node),
    "fsdp_in_pairs": Variant("fsdp", in_pairs),
    "hybrid": Variant("fsdp", in_pairs, "node"),
    "hybrid_alone": Variant("fsdp", one_per_node, "node"),
}
FEW = ("zero1", "fsdp", "fsdp_alone", "hybrid")


def fits(name: str, size: int) -> bool:
    """Return whether a variant differs from others on so many ranks: a pair is one node, replicas need equal nodes."""
    variant = VARIANTS[name]
    return variant.node_of_rank is not in_pairs or size > 2 and (variant.within == "world" or size % 2 == 0)


@contextmanager
def communicator(comm: Any, variant: Variant) -> Iterator[Any]:
    """Yield a communicator of the same ranks for one variant, and free its memory."""
    own = comm.split(0) if variant.node_of_rank is None else on_nodes(comm, variant.node_of_rank)
    yield own
    own.free()


def shard(model: nn.Module, comm: Any, variant: Variant, **more: Any) -> ShardedDataParallel:
    """Attach a variant's strategy."""
    return ShardedDataParallel(model, comm, variant.settings(**more))


def put_together(comm: Any, strategy: ShardedDataParallel, parts: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return whole tensors of all ranks' parts, by name; None if no rank has one. No element may occur twice."""
    boxes = {
        name: (
            None
            if part is None
            else [(box.shape, box.start, box.extent, box.tensor.clone()) for box in strategy.split.shards(name, part)]
        )
        for name, part in parts.items()
    }
    everyone = comm.all_gather_object(boxes)
    whole: dict[str, Any] = {}
    for name in boxes:
        found = [each[name] for each in everyone]
        assert len({part is None for part in found}) == 1, f"{name} is None on some ranks only"
        whole[name] = None if found[0] is None else _joined([box for part in found for box in part])
    return whole


def _joined(boxes: list[Any]) -> Tensor:
    shape = boxes[0][0]
    if 0 in shape:
        return torch.empty(shape)
    whole, count = torch.empty(shape, dtype=boxes[0][3].dtype), torch.zeros(shape, dtype=torch.int64)
    for _, start, extent, tensor in boxes:
        where = tuple(slice(begin, begin + size) for begin, size in zip(start, extent))
        whole[where] = tensor
        count[where] += 1
    # Replicas of the model hold the same boxes; otherwise each element is held exactly once.
    assert bool((count == count.flatten()[0]).all()) and int(count.flatten()[0]) >= 1
    return whole


def whole_gradients(comm: Any, model: nn.Module, strategy: ShardedDataParallel) -> dict[str, Any]:
    """Return the whole gradients of all parameters, assembled from all ranks."""
    return put_together(comm, strategy, {name: parameter.grad for name, parameter in model.named_parameters()})


def check_steps(
    comm: Any,
    strategy: ShardedDataParallel,
    plain: nn.Module,
    steps: int = 3,
    passes: Callable[[nn.Module, tuple[Tensor, Tensor]], None] = backward,
    batches: Callable[[int], tuple[Tensor, Tensor]] = vectors,
    **tolerance: float,
) -> None:
    """Compare the gradients of steps with those of one process on whole batches; each step makes a small update."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (strategy.model, plain)]
    for step in range(steps):
        whole = batches(step)
        passes(strategy.model, (share(whole[0], comm), share(whole[1], comm)))
        passes(plain, whole)
        assert_same(whole_gradients(comm, strategy.model, strategy), gradients(plain), **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def whole_weights(model: nn.Module, strategy: ShardedDataParallel) -> dict[str, Tensor]:
    """Return the whole state of a model."""
    with strategy.unshard():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(
    model: nn.Module,
    batches: Any,
    compare: Callable[..., Tensor],
    steps: int,
    *,
    clip: Callable[[], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> list[float]:
    """Train on ``batches(step)``; return the losses."""
    made = optimizer(model.parameters(), **options)
    losses = []
    for step in range(steps):
        inputs, targets = batches(step)
        loss = compare(model(inputs), targets)
        loss.backward()
        if clip is not None:
            clip()
        made.step()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return losses
