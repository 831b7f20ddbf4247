"""Reads of the table rows that a forward pass needs, before the lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.asynchronous.tables.table import Table

Read = Callable[[int, Tensor], Tensor]  # returns the rows of the table with that index, in host memory


class Lookup:
    """Hooks that read table rows into a model, each once per step, so that all passes of a step see the same values."""

    def __init__(self, tables: Sequence[Table], read: Read) -> None:
        self._tables, self._read = tables, read
        self._known = [torch.zeros(table.shape[0], dtype=torch.bool) for table in tables]
        self._brought: list[tuple[Tensor, Tensor]] = []  # marks of valid rows per read, to be cleared
        self._all = False
        self._handles: list[RemovableHandle] = []
        for number, table in enumerate(tables):
            for module in table.modules:
                self._handles.append(module.register_forward_pre_hook(self._hook(number), with_kwargs=True))

    def forget(self) -> None:
        """Begin a step: rows read before are outdated."""
        for known, rows in self._brought:
            known[rows] = False
        self._brought.clear()
        self._all = False

    def know_all(self) -> None:
        """Record that whole tables have been read."""
        self._all = True

    def _hook(self, number: int) -> Callable[..., None]:
        def before(_: nn.Module, words: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._bring(number, words[0] if words else named["input"])

        return before

    def _bring(self, number: int, indices: Tensor) -> None:
        table, known = self._tables[number], self._known[number]
        rows = torch.unique(indices.detach()).cpu().long()  # sorted
        if self._all or not rows.numel() or rows[0] < 0 or rows[-1] >= table.shape[0]:
            return  # torch reports indices that are out of range
        rows = rows[~known[rows]]
        if not rows.numel():
            return
        known[rows] = True
        self._brought.append((known, rows))
        values = table.parameter.data
        values.index_copy_(0, rows.to(values.device), self._read(number, rows).to(values.device))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
