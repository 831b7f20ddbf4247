"""Name what can become of a module, and check whether it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.embedding import ParallelEmbedding
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel
from hpctrain.parallel.tensor.pieces import degrees

KINDS = {
    "column": "a linear layer, split by its outputs, which stay split",
    "row": "a linear layer, split by its inputs; outputs are summed",
    "heads": "column, by whole attention heads",
    "embedding": "an embedding, split by its rows",
    "vocabulary": "a linear layer, split by its outputs, which are gathered where no split loss takes them",
    "scatter": "with sequence parallelism: sequences are split behind this module",
    "gather": "with sequence parallelism: sequences are whole again from this module on",
    "whole": "left as it is",
}
_CLASSES: dict[str, type[Parallel]] = {
    "column": ColumnParallel,
    "row": RowParallel,
    "heads": ColumnParallel,
    "embedding": ParallelEmbedding,
    "vocabulary": ColumnParallel,
}
_COUNTS, _WIDTHS = ("num_heads", "heads"), ("head_width", "head_dim")  # what attention modules call them


@dataclass
class Change:
    """Say what a module becomes; ``counters`` are attributes of its parent that count whole heads."""

    name: str
    module: nn.Module
    parent: nn.Module | None
    kind: str
    pattern: str
    options: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def become(self) -> type[Parallel]:
        """Return the class that the module gets."""
        return _CLASSES[self.kind]

    def check(self, size: int) -> None:
        """Raise ``UsageError`` where the module cannot be split over ``size`` ranks."""
        if self.kind == "vocabulary":
            self.options["gathers"] = True
        try:
            if isinstance(self.module, Parallel):
                raise UsageError("it is split already")
            if isinstance(self.parent, nn.MultiheadAttention):
                raise UsageError(
                    "nn.MultiheadAttention takes its weight and never calls it: split layers of your own"
                )
            if self.module._parameters.get("weight") is None:
                raise UsageError("its weight is computed (a parametrization), not a parameter")
            if self.kind == "heads":
                self._check_heads(size)
            self.become.check(self.module, size, **self.options)
        except UsageError as error:
            raise UsageError(f"tensor plan {self.pattern}={self.kind}: module {self.name}: {error}", everywhere=True)

    def _check_heads(self, size: int) -> None:
        ColumnParallel.check(self.module, 1)
        self.counters = {name: count for name in _COUNTS if (count := self._of_parent((name,))) is not None}
        for heads in {self.count_heads(), *self.counters.values()}:
            if heads % size:
                raise UsageError(
                    f"{heads} heads cannot be split over {size} tensor ranks: tensor degrees that divide them are "
                    f"{degrees(heads)}"
                )

    def count_heads(self) -> int:
        """Return how many heads the outputs are: as the parent counts them, or by the width of one that it knows."""
        width, counted = self._of_parent(_WIDTHS), self._of_parent(_COUNTS)
        if width is None and counted is None:
            raise UsageError(
                f"how many heads there are must stand in its parent: as {' or '.join(_COUNTS)}, or the width of one as "
                + " or ".join(_WIDTHS)
            )
        module = cast(nn.Linear, self.module)
        inputs, outputs = module.in_features, module.out_features
        if counted is not None and outputs % (counted * (width or 1)) == 0:
            return counted
        if width is None:
            raise UsageError(f"{outputs} outputs are no whole number of {counted} heads")
        # As many as the inputs, or some times as many (query, key and value); else heads of one kind, perhaps fewer.
        shared = inputs if outputs % inputs == 0 else outputs
        if shared % width:
            raise UsageError(f"{shared} features are no whole number of heads of width {width}")
        return shared // width

    def _of_parent(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            value = getattr(self.parent, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None
