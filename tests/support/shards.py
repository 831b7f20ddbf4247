"""Models with parameters split over the ranks, and whole tensors assembled from the shards for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.nodes import Placing, alone, in_pairs, placed
from torch import Tensor, nn

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel


@dataclass(frozen=True)
class Form:
    """A strategy and the nodes it runs on; ``None`` for the real nodes."""

    data: Any
    placing: Placing | None = None
    within: Any = "world"

    def settings(self, **more: Any) -> ParallelSettings:
        return ParallelSettings(data=self.data, shard_within=self.within, **more)


# In memory that the ranks share, in memory of each rank, and on several nodes.
FORMS = {
    "zero1": Form("zero1"),
    "zero2": Form("zero2"),
    "fsdp": Form("fsdp"),
    "zero1_alone": Form("zero1", alone),
    "zero2_alone": Form("zero2", alone),
    "fsdp_alone": Form("fsdp", alone),
    "fsdp_in_pairs": Form("fsdp", in_pairs),
    "hybrid": Form("fsdp", in_pairs, "node"),
    "hybrid_alone": Form("fsdp", alone, "node"),
}
FEW = ("zero1", "fsdp", "fsdp_alone", "hybrid")


def fits(name: str, size: int) -> bool:
    """Return whether this form differs from others on so many ranks: a pair is one node, replicas need equal nodes."""
    form = FORMS[name]
    return form.placing is not in_pairs or size > 2 and (form.within == "world" or size % 2 == 0)


@contextmanager
def communicator(comm: Any, form: Form) -> Iterator[Any]:
    """Yield a communicator of the same ranks for one form, and free its memory."""
    own = comm.split(0) if form.placing is None else placed(comm, form.placing)
    yield own
    own.free()


def shard(model: nn.Module, comm: Any, form: Form, **more: Any) -> ShardedDataParallel:
    """Attach a form's strategy."""
    return ShardedDataParallel(model, comm, form.settings(**more))


def put_together(comm: Any, strategy: ShardedDataParallel, pieces: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return whole tensors of all ranks' pieces, by name; None if no rank has one. No element may occur twice."""
    boxes = {
        name: None if piece is None else [(box.shape, box.start, box.extent, box.tensor.clone()) for box in
                                          strategy.split.shards(name, piece)]
        for name, piece in pieces.items()
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
