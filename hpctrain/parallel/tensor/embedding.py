"""Embedding split by rows over the tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor import moves
from hpctrain.parallel.tensor.cross_entropy import check_tokens
from hpctrain.parallel.tensor.layers import Parallel, check_enough
from hpctrain.parallel.tensor.pieces import bounds


class ParallelEmbedding(Parallel, nn.Embedding):
    """Embedding of which each rank holds some rows; other rows count as zeros, and the ranks' results are summed.

    The slices may be unequal. A token outside the vocabulary raises ``UsageError`` on the CPU,
    where checking needs no device synchronisation.
    """

    plain = nn.Embedding
    dims = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        comm: Communicator,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._check_sizes(self, comm.size)
        self.weight.data = self.cut(comm, "weight", self.weight.data)
        self._set(comm)

    @classmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None:
        check_enough(module.num_embeddings, size, "rows")
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name) not in (None, False):
                raise UsageError(f"an embedding with {name} cannot be split", everywhere=True)

    def _whole(self) -> nn.Module:
        weight = self.weight
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device=weight.device, dtype=weight.dtype
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map tokens ``[...]`` to ``[..., embedding_dim]``."""
        if input.device.type == "cpu":
            check_tokens(input, self.num_embeddings, "token")
        begin, end = bounds(self.num_embeddings, self._comm.rank, self._comm.size)
        missing = (input < begin) | (input >= end)
        rows = F.embedding((input - begin).masked_fill(missing, 0), self.weight)
        rows = rows.masked_fill(missing.unsqueeze(-1), 0)
        if self.padding_idx is not None and begin <= self.padding_idx < end:
            fixed = self.weight.detach()[self.padding_idx - begin]  # a row that gets no gradient
            rows = torch.where((input == self.padding_idx).unsqueeze(-1), fixed, rows)
        return moves.reduce(rows, self._comm)
