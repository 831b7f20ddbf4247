"""Slices of a split model: of its parameters, for checkpoints, and losses of split logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.meta_init import materialise
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel
from hpctrain.parallel.tensor.partial_gradients import PartialGradients
from hpctrain.parallel.tensor.vocabulary import IGNORED, cross_entropy
from hpctrain.shard import Shard, Split, WholeStates


@dataclass(frozen=True)
class SlicePosition:
    """Shape of a whole tensor, and the parts of one of its dims that this rank holds, one after the other."""

    shape: tuple[int, ...]
    dim: int
    spans: tuple[tuple[int, int], ...]  # begin and end of each part

    def whole_shards(self, shard: Shard) -> Iterator[Shard]:
        """Yield the boxes of the whole tensor that a box of this rank's slice consists of."""
        dim, begin_of_shard, offset = self.dim, shard.start[self.dim], 0
        for begin, end in self.spans:
            first = max(begin_of_shard, offset)
            count = min(begin_of_shard + shard.extent[dim], offset + end - begin) - first
            if count > 0 or len(self.spans) == 1:
                yield replace(
                    shard,
                    shape=self.shape,
                    start=_with(shard.start, dim, begin + first - offset),
                    extent=_with(shard.extent, dim, count),
                    tensor=(
                        shard.tensor.narrow(dim, first - begin_of_shard, count) if len(self.spans) > 1 else shard.tensor
                    ),
                )
            offset += end - begin


def _with(lengths: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*lengths[:dim], value, *lengths[dim + 1 :])


def slice_positions(
    model: nn.Module, comm: Communicator, cuts: Mapping[nn.Module, type[Parallel]]
) -> dict[str, SlicePosition]:
    """Return the positions of this rank's slices by names of ``state_dict``; ``cuts`` are the classes of modules."""
    positions = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in cuts:
            continue
        for attribute, dim in cuts[module].dims.items():
            parameter = module._parameters.get(attribute)
            if parameter is not None:
                spans = tuple(cuts[module].spans(parameter.shape[dim], comm))
                positions[f"{path}.{attribute}"] = SlicePosition(tuple(parameter.shape), dim, spans)
    return positions


@torch.no_grad()
def slice_parameters(
    model: nn.Module,
    comm: Communicator,
    cuts: Mapping[nn.Module, Callable[[str, Tensor], Tensor]],
    device: torch.device,
) -> None:
    """Replace parameters by their slices; the parameter objects stay, because modules may share them.

    ``cuts`` returns the slice of a module's parameter by its name. The values are those of rank 0. Collective.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            comm.broadcast(tensor)
    cut: set[nn.Parameter] = set()
    for module, cutting in cuts.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and parameter not in cut:
                parameter.data = cutting(name, parameter.data)
                cut.add(parameter)
    materialise(model, device, cuts)


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """Model that is split over the ranks of ``comm``: ``modules`` by name, ``positions`` by names of ``state_dict``.

    It is the ``Split`` of a model whose data axis splits as ``inner``, or not at all.
    """

    comm: Communicator
    modules: Mapping[str, Parallel]
    positions: Mapping[str, SlicePosition]
    heads: Sequence[ColumnParallel]  # layers whose outputs are the vocabulary
    partial_gradients: PartialGradients | None = None
    inner: Split | None = None

    def is_split(self, name: str) -> bool:
        """Return whether this rank holds only a slice of a tensor; other tensors are equal on all tensor ranks."""
        return name in self.positions

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        """Return this rank's shards of a tensor, or of an optimizer state of its shape, in the whole tensor."""
        shards = [Shard.whole(name, tensor)] if self.inner is None else self.inner.shards(name, tensor)
        position = self.positions.get(name)
        if position is None:
            return shards
        return [whole for each in shards for whole in position.whole_shards(each)]

    def holds_state(self, optimizer: torch.optim.Optimizer, name: str) -> bool | None:
        return self.inner.holds_state(optimizer, name) if isinstance(self.inner, WholeStates) else None

    def compose(self, inner: Split | None) -> Split:
        """Return the split of tensors whose local slice is itself split by ``inner``."""
        return replace(self, inner=inner)

    # Losses of split logits -------------------------------------------------------------------------------------------

    @property
    def has_head(self) -> bool:
        """Return whether this rank's part of the model ends in logits that can stay split."""
        return bool(self.heads)

    @contextmanager
    def split_outputs(self) -> Iterator[None]:
        """Leave logits split for the ``with`` block, for ``cross_entropy``."""
        before = {head: head.gathers for head in self.heads}
        for head in before:
            head.gathers = False
        try:
            yield
        finally:
            for head, gathers in before.items():
                head.gathers = gathers

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
        """Return the mean loss, in float32, of split logits ``[..., slice of the vocabulary]``."""
        sizes = {head.out_features for head in self.heads}
        if len(sizes) != 1:
            raise UsageError(
                "a loss of split logits needs a head of kind vocabulary in the plan, and one size of vocabulary, "
                f"not {sorted(sizes) or 'none'}",
                everywhere=True,
            )
        return cross_entropy(logits, targets, sizes.pop(), self.comm, ignore_index=ignore_index)

    # Backward passes in two parts -------------------------------------------------------------------------------------

    def separate_backward(self) -> None:
        """Make gradients of inputs and of weights separately computable, without repeated work."""
        for module in self.modules.values():
            module.overlaps = False  # type: ignore[assignment]
