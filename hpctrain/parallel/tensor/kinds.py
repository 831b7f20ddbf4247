"""Kinds of split that a tensor plan can assign to a module, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.functional import degrees
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel, SharedHeads
from hpctrain.parallel.tensor.vocabulary import ParallelEmbedding

KINDS = {
    "column": "a linear layer, split by its outputs, which stay split",
    "row": "a linear layer, split by its inputs; outputs are summed",
    "heads": "column, by whole attention heads; of fewer key and value heads than ranks each rank computes one",
    "embedding": "an embedding, split by its rows",
    "vocabulary": "a linear layer, split by its outputs, which are gathered where no split loss takes them",
    "scatter": "with sequence parallelism: sequences are split after this module",
    "gather": "with sequence parallelism: sequences are whole again from this module on",
    "replicated": "whole on all ranks, applied to split features; gradients are summed over the ranks",
    "whole": "left as it is",
}
_CLASSES: dict[str, type[Parallel]] = {
    "column": ColumnParallel,
    "row": RowParallel,
    "heads": ColumnParallel,
    "embedding": ParallelEmbedding,
    "vocabulary": ColumnParallel,
}
# Attribute names in attention modules: heads, key and value heads, width of a head, query heads per key head.
_COUNTS = ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads")
_SHARED_COUNTS = ("num_kv_heads", "n_kv_heads", "kv_heads", "n_kv_head", "num_key_value_heads")
_WIDTHS = ("head_width", "head_dim", "head_size", "d_head")
_REPEATS = ("num_key_value_groups", "n_rep")


@dataclass
class PlanEntry:
    """Split of one module as the plan says; ``counters`` are the new values of its parent's head counts."""

    name: str
    module: nn.Module
    parent: nn.Module | None
    kind: str
    pattern: str
    options: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    shares_heads: bool = False  # whether several ranks compute the same head

    def __str__(self) -> str:
        return f"{self.name} ({self.pattern}={self.kind})"

    @property
    def parallel_class(self) -> type[Parallel]:
        """Return the class that the module gets."""
        return SharedHeads if self.shares_heads else _CLASSES[self.kind]

    def check(self, size: int, entries: Sequence[PlanEntry] = ()) -> None:
        """Raise ``UsageError`` if ``size`` ranks cannot share the module; ``entries`` are those of all modules."""
        if self.kind == "vocabulary":
            self.options["gathers"] = True
        try:
            if isinstance(self.module, Parallel):
                raise UsageError("it is split already")
            if isinstance(self.parent, nn.MultiheadAttention):
                raise UsageError("nn.MultiheadAttention takes its weight and never calls it: split layers of your own")
            if self.module._parameters.get("weight") is None:
                raise UsageError("its weight is computed (a parametrization), not a parameter")
            if self.kind == "heads":
                self._check_heads(size, [each for each in entries if each.parent is self.parent and each is not self])
            self.parallel_class.check(self.module, size, **self.options)
        except UsageError as error:
            raise UsageError(f"tensor plan {self.pattern}={self.kind}: module {self.name}: {error}", everywhere=True)

    def _check_heads(self, size: int, entries: Sequence[PlanEntry]) -> None:
        ColumnParallel.check(self.module, 1)
        counts = {name: count for name in _COUNTS if (count := self._of_parent((name,))) is not None}
        kv_counts = {name: count for name in _SHARED_COUNTS if (count := self._of_parent((name,))) is not None}
        own = self.count_heads()
        others = [each for each in entries if each.kind == "heads" and isinstance(each.module, nn.Linear)]
        query_heads = max([own, *counts.values(), *(each._heads_or_none() for each in others)])
        if own < query_heads and size % own == 0 and size > own and query_heads % size == 0:
            self.shares_heads, self.options = True, {"heads": own}
        for heads in {query_heads if self.shares_heads else own, *counts.values()}:
            if heads % size:
                more = (
                    "" if own == query_heads else f", and multiples of {own} that divide the {query_heads} query heads"
                )
                raise UsageError(
                    f"{heads} heads cannot be split over {size} tensor ranks: tensor degrees that divide them are "
                    f"{degrees(heads)}{more}"
                )
        self.counters = {name: count // size for name, count in counts.items()}
        if own < query_heads:
            self.counters |= {name: max(1, count // size) for name, count in kv_counts.items()}
            repeats = (query_heads // size) // max(1, own // size)
            self.counters |= {name: repeats for name in _REPEATS if self._of_parent((name,)) == query_heads // own}
        elif any(count == own for count in kv_counts.values()):  # as many key heads as query heads
            self.counters |= {name: count // size for name, count in kv_counts.items()}

    def count_heads(self) -> int:
        """Return the number of heads of the outputs: from the parent's count, or from its width of a head."""
        width, counted = self._of_parent(_WIDTHS), self._of_parent(_COUNTS)
        if width is None and counted is None:
            raise UsageError(
                f"how many heads there are must stand in its parent: as {_alternatives(_COUNTS)}, or the width of one "
                f"as {_alternatives(_WIDTHS)}"
            )
        module = cast(nn.Linear, self.module)
        inputs, outputs = module.in_features, module.out_features
        kv_counts = self._of_parent(_SHARED_COUNTS)
        if kv_counts is not None and counted is not None and kv_counts < counted:
            # Queries or, with fewer heads of the same width, keys or values.
            width = width or (inputs // counted if inputs % counted == 0 else None)
            if width is not None and outputs == kv_counts * width:
                return kv_counts
        if counted is not None and outputs % (counted * (width or 1)) == 0:
            return counted
        if width is None:
            raise UsageError(f"{outputs} outputs are no whole number of {counted} heads")
        # If the outputs are a multiple of the inputs (such as query, key and value in one layer), count the
        # heads of the inputs. Otherwise count the outputs: heads of one kind, perhaps fewer.
        shared = inputs if outputs % inputs == 0 else outputs
        if shared % width:
            raise UsageError(f"{shared} features are no whole number of heads of width {width}")
        return shared // width

    def _heads_or_none(self) -> int:
        try:
            return self.count_heads()
        except UsageError:
            return 0  # its own check reports the reason

    def _of_parent(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            value = getattr(self.parent, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None


def _alternatives(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"
