"""Linear layers with several results in one matrix, and layers with a transposed weight (Conv1D), split over ranks.

A fused layer computes queries, keys and values, or a gate and values, one after the other. Each
rank holds a slice of each, so its slice of the weight has several parts of the whole one.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel


class FusedQKV(ColumnParallel):
    """Column-parallel layer that computes all queries, then all keys, then all values."""

    parts = 3


class FusedGate(ColumnParallel):
    """Column-parallel layer that computes a gate, then the values that it multiplies."""

    parts = 2


class Conv1D(nn.Module):
    """Linear layer of the transformers library with weight ``[nx, nf]``, as GPT-2 has it; here for its attributes."""

    nx: int
    nf: int


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a Conv1D of the transformers library, by its class and attributes."""
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return named and all(isinstance(getattr(module, name, None), int) for name in ("nx", "nf"))


class _Conv1DParallel(Parallel):
    """Mixin of split layers with a transposed weight; ``in_features`` and ``out_features`` are those of the whole."""

    torch_class: type[nn.Module] = Conv1D
    weight: Tensor

    @classmethod
    def check(cls, module: Any, size: int, **options: Any) -> None:
        if module.bias is None or tuple(module.weight.shape) != (module.nx, module.nf):
            raise UsageError("a Conv1D needs a weight [nx, nf] and a bias to be split", everywhere=True)
        cls._check_sizes(_Sizes(module.nx, module.nf), size, **options)

    @classmethod
    def adopt(cls, module: Any, comm: Communicator, **options: Any) -> Self:
        module.in_features, module.out_features = module.nx, module.nf
        return super().adopt(module, comm, **options)

    @property
    def matrix(self) -> Tensor:
        return self.weight.t()


class _Sizes:
    """Sizes of a Conv1D under the names of ``nn.Linear``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.in_features, self.out_features = inputs, outputs


class Conv1DColumn(_Conv1DParallel, ColumnParallel):
    """Column-parallel Conv1D."""

    dims = {"weight": 1, "bias": 0}


class Conv1DQKV(Conv1DColumn):
    """Column-parallel Conv1D that computes all queries, then all keys, then all values."""

    parts = 3


class Conv1DRow(_Conv1DParallel, RowParallel):
    """Row-parallel Conv1D; the bias is whole on all ranks."""

    dims = {"weight": 0}


CONV1D_CLASSES: dict[str, type[Parallel]] = {"column": Conv1DColumn, "row": Conv1DRow, "qkv": Conv1DQKV}
