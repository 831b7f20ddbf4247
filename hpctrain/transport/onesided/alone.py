"""Remote memory of a world of one rank, which accesses its own memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.transport.onesided.exposed import Exposed, Operation, RowOperation


class ExposedAlone(Exposed):
    """Remote memory of one rank, without MPI."""

    name = "alone"
    rank = 0

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        self.lengths, self.dtype = list(lengths), dtype
        self._memory = torch.zeros(lengths[0], dtype=dtype)
        self._words = [0] * words

    def view(self, rank: int) -> Tensor | None:
        """Return the memory."""
        return self._memory

    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        """Add to a counter, and return its previous value."""
        before = self._words[word]
        self._words[word] += amount
        return before

    def barrier(self) -> None:
        """Return immediately: there is no other rank."""

    def free(self) -> None:
        """Release the memory."""
        self._memory = torch.empty(0, dtype=self.dtype)

    def _carry(self, operation: Operation, rank: int, values: Tensor, start: int) -> None:
        raise CommunicationError("a world of one rank has no other node")

    def _carry_rows(self, operation: RowOperation, rank: int, values: Tensor, rows: Tensor, start: int) -> None:
        raise CommunicationError("a world of one rank has no other node")
