"""Slices of a split model for checkpoints, and losses of split logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel
from hpctrain.parallel.tensor.partial_gradients import PartialGradients
from hpctrain.parallel.tensor.vocabulary import IGNORED, cross_entropy
from hpctrain.shard import Shard, Split


@dataclass(frozen=True)
class SlicePosition:
    """Shape of a whole tensor, and the offset of this rank's slice in it."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


class TensorSplit:
    """Model that is split over the ranks of ``comm``: ``modules`` by name, ``positions`` by names of ``state_dict``.

    It is the ``Split`` of a model that is not split otherwise. ``compose`` composes it with the split
    of the data axis.
    """

    def __init__(
        self,
        comm: Communicator,
        modules: Mapping[str, Parallel],
        positions: Mapping[str, SlicePosition],
        heads: Mapping[str, ColumnParallel],
        partial_gradients: PartialGradients | None = None,
    ) -> None:
        self.comm = comm
        self.partial_gradients = partial_gradients
        self.modules = dict(modules)
        self.positions = dict(positions)
        self._heads = dict(heads)  # layers whose outputs are the vocabulary

    def is_split(self, name: str) -> bool:
        """Return whether this rank holds only a slice of a tensor; other tensors are equal on all tensor ranks."""
        return name in self.positions

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        """Return this rank's shard of a tensor, or of an optimizer state of its shape."""
        return [self._shifted(name, Shard.whole(name, tensor))]

    def compose(self, inner: Split | None) -> Split:
        """Return the split of tensors whose local slice is itself split by ``inner``."""
        return self if inner is None else _Composed(self, inner)

    def _shifted(self, name: str, shard: Shard) -> Shard:
        position = self.positions.get(name)
        if position is None:
            return shard
        start = tuple(outer + inner for outer, inner in zip(position.start, shard.start))
        return replace(shard, shape=position.shape, start=start)

    # Losses of split logits -------------------------------------------------------------------------------------------

    @property
    def has_head(self) -> bool:
        """Return whether this rank's part of the model ends in logits that can stay split."""
        return bool(self._heads)

    @contextmanager
    def split_outputs(self) -> Iterator[None]:
        """Leave logits split for the ``with`` block, for ``cross_entropy``."""
        before = {head: head.gathers for head in self._heads.values()}
        for head in before:
            head.gathers = False
        try:
            yield
        finally:
            for head, gathers in before.items():
                head.gathers = gathers

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
        """Return the mean loss, in float32, of split logits ``[..., slice of the vocabulary]``."""
        sizes = {head.out_features for head in self._heads.values()}
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


class _Composed:
    """``Split`` of slices that are split again."""

    def __init__(self, outer: TensorSplit, inner: Split) -> None:
        self._outer, self._inner = outer, inner

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        """Return shards with offsets in the whole tensor."""
        return [self._outer._shifted(name, shard) for shard in self._inner.shards(name, tensor)]
