"""Embedding tables of a model: parameters with sparse gradients, of which a pass reads only some rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import trainable

Lookups = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Table:
    """Weight of one or several ``nn.Embedding(sparse=True)`` or ``nn.EmbeddingBag(sparse=True)``."""

    name: str
    parameter: nn.Parameter
    modules: tuple[nn.Module, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and their width."""
        rows, width = self.parameter.shape
        return rows, width

    def group_in(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the index of the optimizer's parameter group that contains the table."""
        groups = enumerate(optimizer.param_groups)
        return next(number for number, group in groups if any(one is self.parameter for one in group["params"]))

    def coalesce(self) -> Tensor | None:
        """Sum duplicate rows of the gradient and return it; None without a gradient."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if not gradient.is_sparse:
            raise UsageError(
                f"the parameter {self.name} got a dense gradient: a table with sparse=True may only be used for "
                "lookups; remove sparse=True"
            )
        self.parameter.grad = gradient.coalesce()
        return self.parameter.grad

    def gradient(self) -> Tensor | None:
        """Remove the gradient from the parameter; return it in host memory with each row once, None without one."""
        gradient = self.coalesce()
        self.parameter.grad = None
        return None if gradient is None else gradient.detach().cpu()


def rows_of(gradient: Tensor) -> Tensor:
    """Return the row indices of a table's gradient, in order."""
    return gradient.indices()[0]


def by_rows(rows: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse gradient with these rows, each once and in order."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True)


def find_tables(model: nn.Module) -> list[Table]:
    """Return the tables that are trained. Raises ``UsageError`` for a table that its own forward passes change."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    tables = []
    for name, parameter in trainable(model):
        modules = users[parameter]
        if all(isinstance(module, Lookups) and module.sparse for module in modules):
            tables.append(Table(name, parameter, tuple(modules)))
    for table in tables:
        if any(module.max_norm is not None for module in table.modules):
            raise UsageError(
                f"the embedding of {table.name} has max_norm, by which passes change rows: a server stores only "
                "updates; remove max_norm",
                everywhere=True,
            )
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    if tables and not checks.is_enabled():
        checks.disable()  # the default; torch warns unless a program has chosen explicitly
    return tables
