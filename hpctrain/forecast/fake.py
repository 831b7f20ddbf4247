"""Execution of models on fake tensors, and on simulated ranks.

Fake tensors have shapes, dtypes and lifetimes, but no memory. They report the CPU as their device,
so that torch selects the CPU kernels (fused attention, autocast). One thing differs on a GPU: its
fused attention applies dropout itself, while the CPU materializes the attention matrix for it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpctrain.forecast.memory_tracker import set_apart


class FakeRanks:
    """Fake communicator of ``size`` ranks for code that splits a model: it is rank 0, and collectives do nothing.

    ``taken`` counts the bytes of memory that were requested.
    """

    shares_memory = True
    oversubscribed = False
    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeRanks:
        return self

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory that ``Ledger`` does not count as an allocation of the pass."""
        self.taken += numel * dtype.itemsize
        with torch.utils._python_dispatch._disable_current_modes():
            blank = torch.empty(numel, dtype=dtype, device="meta")
        return set_apart(faked(blank))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value unchanged."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, which are equal to this one."""
        return [value] * self.size

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Return the tensor, or a completed handle."""
        return _Done() if async_op else tensor

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Return the output shard, or a completed handle."""
        return _Done() if async_op else out

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Return the gathered tensor."""
        return out

    @contextmanager
    def bucket(self) -> Iterator[FakeRanks]:
        """Return a bucket that reduces several tensors together."""
        yield self


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _AttentionOfGPUs(TorchFunctionMode):
    """Function mode that disables dropout in attention, so that the CPU does not materialize the attention matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p")
            kwargs = {**dict(zip(names, args)), **(kwargs or {}), "dropout_p": 0.0}
            args = args[len(names) :]
        return func(*args, **(kwargs or {}))


_MODES: list[Any] = []


@contextmanager
def faking(device: str = "cpu") -> Iterator[None]:
    """Create fake tensors in the ``with`` block, which computes like ``device``; leave torch's generators unchanged."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(mode)
        if device != "cpu":
            stack.enter_context(_AttentionOfGPUs())
        _MODES.append(mode)
        stack.callback(_MODES.pop)
        yield


def faked(tensor: Tensor) -> Tensor:
    """Return a fake copy of a tensor on the meta device; other dispatch modes do not see its creation."""
    with torch.utils._python_dispatch._disable_current_modes(), _MODES[-1]:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fake_copy(
    model: nn.Module, dtype: torch.dtype | None = None, same: Mapping[nn.Module, nn.Module] | None = None
) -> nn.Module:
    """Return a copy of a model on fake tensors; ``dtype`` replaces float32 as the dtype of parameters.

    ``same`` maps modules to an equal module, which replaces them in the copy.
    """
    same = same or {}
    memo: dict[int, Any] = {}
    for first in dict.fromkeys(same.values()):
        memo[id(first)] = _on_fakes(first, memo, dtype)
    for other, first in same.items():
        memo[id(other)] = memo[id(first)]
    return _on_fakes(model, memo, dtype, {id(one) for other in same for one in other.parameters()})


def _on_fakes(
    module: nn.Module, memo: dict[int, Any], dtype: torch.dtype | None, spare: Collection[int] = ()
) -> nn.Module:
    """Copy a module without the ``spare`` parameters (by id), which belong to modules that another module replaces."""
    for parameter in module.parameters():
        if id(parameter) in memo or id(parameter) in spare:
            continue
        wanted = dtype if dtype and parameter.dtype is torch.float32 else parameter.dtype
        made = nn.Parameter(faked(torch.empty(parameter.shape, dtype=wanted, device="meta")), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for buffer in module.buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = faked(buffer)
    return copy.deepcopy(module, memo)
