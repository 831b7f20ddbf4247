"""Fake tensors, simulated ranks, and the tracker of tensor memory: live bytes and their peak.

Note: storages. Views share one storage. It counts once, from the operation that returns it until
the last tensor that uses it is freed. Workspace that a kernel allocates and frees before it returns
is not seen.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hpctrain.comm.communicator import Communicator
from hpctrain.forecast.run import Group
from hpctrain.parallel.objective import Compare, cross_entropy, loss_named
from hpctrain.parallel.tensor.plan import apply, check, choose
from hpctrain.parallel.tensor.plan_source import plan_of
from hpctrain.parallel.tensor.sharding import TensorSplit

Record = Callable[[str, Tensor, Group], None]
Allocate = Callable[[int, torch.dtype, int], Tensor]

_READ = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
_EXCLUDED: set[int] = set()  # storages that are never counted
_COMPLETED = SimpleNamespace(done=lambda: True, wait=lambda: None)  # handle of an operation


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory tracker: counts the bytes of all storages that operations of the ``with`` block allocate.

    ``fake`` tensors hold no values: a scalar that is read from one is 0, and a boolean mask selects
    all elements.
    """

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._fake = fake
        self._known: dict[int, int] = {}  # bytes of live storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._fake and func is _READ:
            return 0
        masked = self._fake and func is _INDEX and len(args[1]) == 1 and args[1][0].dtype is torch.bool
        result = args[0].flatten(0, args[1][0].ndim - 1).clone() if masked else func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                self._record(one, counts=True)
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that existed before."""
        for one in tensors:
            self._record(one, counts=False)

    def start_peak(self) -> int:
        """Reset the peak to the live bytes, and return these."""
        self.peak = self.live
        return self.live

    def is_live(self, key: int) -> bool:
        return key in self._known

    def bytes_of(self, key: int) -> int:
        """Return the bytes of the storage with this ``key``; 0 if it was freed or is not counted."""
        return self._known.get(key, 0)

    def _record(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in _EXCLUDED:
            return
        self._known[key] = nbytes = storage.nbytes() if counts else 0
        weakref.finalize(storage, self._forget, key).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def exclude(tensor: Tensor) -> Tensor:
    """Exclude a tensor's memory from all memory trackers; return the tensor."""
    storage = tensor.untyped_storage()
    _EXCLUDED.add(storage._cdata)
    weakref.finalize(storage, _EXCLUDED.discard, storage._cdata).atexit = False
    return tensor


def storage_key(tensor: Tensor) -> int:
    """Return the key of a tensor's storage, unique while the storage is live."""
    return int(tensor.untyped_storage()._cdata)


# Execution of models on fake tensors, and on simulated ranks ----------------------------------------------------------
#
# Fake tensors have shapes, dtypes and lifetimes, but no memory. They report the CPU as their device,
# so that torch selects the CPU kernels (fused attention, autocast). One thing differs on a GPU: its
# fused attention applies dropout itself, while the CPU materializes the attention matrix for it.


class RecordingCommunicator:
    """Communicator of one rank of a group that performs no communication and passes each operation to ``record``.

    ``record(operation, tensor, group)`` gets the whole tensor of a collective, and ``allocate(numel, dtype, sharing)``
    returns memory that ``sharing`` ranks share. All ranks of a node share memory if there are several on each. The
    rank is the second one, so that its number among the ranks of its node differs from the number of its node. By
    these numbers ``split`` recognises the ranks of the node, and those with the same position on other nodes.
    """

    oversubscribed = False

    def __init__(self, group: Group, record: Record, allocate: Allocate) -> None:
        self.group, self._record, self._allocate = group, record, allocate
        self.size, self.nodes, self.local_size, self.uniform = group.size, group.nodes, group.local, group.uniform
        self.rank = min(1, group.size - 1)
        self.node, self.local_rank = (0, self.rank) if group.local > 1 else (self.rank, 0)
        self.shares_memory = group.shares_memory

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingCommunicator:
        return self

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory of the communicator; as an array, it contains ones."""
        made = self._allocate(numel, dtype, 1)
        vars(made)["numpy"] = lambda: np.ones(numel, np.uint8)
        return made

    def common(self, numel: int, dtype: torch.dtype = torch.float32, *, must_share: bool = False) -> Tensor:
        """Return memory that the ranks of the node share."""
        return self._allocate(numel, dtype, self.local_size if self.shares_memory else 1)

    def has_space(self, nbytes: int) -> bool:
        return True

    def split(self, color: int, key: int | None = None) -> RecordingCommunicator:
        """Return the ranks of this node, or those with this rank's position on each node."""
        local = self.local_size
        part = Group(local, 1, local) if color == self.node else Group(self.nodes, self.nodes, 1)
        assert color in (self.node, self.local_rank)
        return RecordingCommunicator(part, self._record, self._allocate)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self._note("broadcast", tensor)
        return tensor

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0) -> Tensor:
        return out

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return one object: those of all ranks are equal to it."""
        return [value]

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        self._note("all_reduce", tensor)
        return _COMPLETED if async_op else tensor

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        self._note("reduce_scatter", tensor)
        return _COMPLETED if async_op else out

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        self._note("all_gather", out)
        return out

    @contextmanager
    def bucket(self) -> Iterator[RecordingCommunicator]:
        yield self

    def _note(self, operation: str, tensor: Tensor) -> None:
        if self.size > 1:
            self._record(operation, tensor, self.group)


class FakeCommunicator(RecordingCommunicator):
    """Communicator of rank 0 of ``size`` ranks on a node, for code that splits a model's matrices.

    ``requested_bytes`` counts the bytes of memory that were requested.
    """

    def __init__(self, size: int, record: Record = lambda *args: None) -> None:
        super().__init__(Group(size, 1, size), record, self._fake)
        self.rank = self.local_rank = 0
        self.shares_memory = True
        self.requested_bytes = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, which are equal to this one."""
        return [value] * self.size

    def _fake(self, numel: int, dtype: torch.dtype, sharing: int) -> Tensor:
        """Return memory that a ``MemoryTracker`` does not count as an allocation of the pass."""
        self.requested_bytes += numel * dtype.itemsize
        with torch.utils._python_dispatch._disable_current_modes():
            blank = torch.empty(numel, dtype=dtype, device="meta")
        return exclude(to_fake(blank))


def split_tensors(
    model: nn.Module, ranks: FakeCommunicator, patterns: tuple[str, ...], *, sequence: bool
) -> TensorSplit:
    """Split a model, in place, over the ranks of a tensor group; raises ``UsageError`` if that is not possible."""
    plan = plan_of(model, patterns)
    check(choose(model, plan), ranks.size)
    return apply(model, cast(Communicator, ranks), plan, sequence=sequence)


def comparison(loss: str, split: TensorSplit | None) -> tuple[Compare, AbstractContextManager[None]]:
    """Return the loss function, and the context in which outputs are computed: vocabulary-parallel where possible."""
    compare = loss_named(loss)
    if split is None or not split.has_head or compare is not cross_entropy:
        return compare, nullcontext()
    return split.cross_entropy, split.split_outputs()


class _GpuAttention(TorchFunctionMode):
    """Function mode that disables dropout in attention, so that the CPU does not materialize the attention matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p")
            kwargs = {**dict(zip(names, args)), **(kwargs or {}), "dropout_p": 0.0}
            args = args[len(names) :]
        return func(*args, **(kwargs or {}))


_MODES: list[Any] = []


@contextmanager
def fake_mode(device: str = "cpu") -> Iterator[None]:
    """Create fake tensors in the ``with`` block, which computes like ``device``; leave torch's generators unchanged."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = nullcontext() if device == "cpu" else _GpuAttention()
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode, attention:
        _MODES.append(mode)
        try:
            yield
        finally:
            _MODES.pop()


def to_fake(tensor: Tensor) -> Tensor:
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
    module: nn.Module, memo: dict[int, Any], dtype: torch.dtype | None, skipped: Collection[int] = ()
) -> nn.Module:
    """Copy a module without the ``skipped`` parameters (by id), which belong to modules that others replace."""
    for parameter in module.parameters():
        if id(parameter) in memo or id(parameter) in skipped:
            continue
        target = dtype if dtype and parameter.dtype is torch.float32 else parameter.dtype
        made = nn.Parameter(to_fake(torch.empty(parameter.shape, dtype=target, device="meta")), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for buffer in module.buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = to_fake(buffer)
    return copy.deepcopy(module, memo)
