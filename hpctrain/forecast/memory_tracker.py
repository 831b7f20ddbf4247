"""Tracking of tensor memory while operations run, on real or fake tensors: live bytes and their peak.

Note: storages. Views share one storage. It counts once, from the operation that returns it until
the last tensor that uses it is freed. Workspace that a kernel allocates and frees before it returns
is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_READ = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
_APART: set[int] = set()  # storages that are never counted


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
                self._note(one, counts=True)
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that existed before."""
        for one in tensors:
            self._note(one, counts=False)

    def start_peak(self) -> int:
        """Reset the peak to the live bytes, and return these."""
        self.peak = self.live
        return self.live

    def holds(self, key: int) -> bool:
        """Return whether the storage with this ``key`` is live."""
        return key in self._known

    def bytes_of(self, key: int) -> int:
        """Return the bytes of the storage with this ``key``; 0 if it was freed or is not counted."""
        return self._known.get(key, 0)

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in _APART:
            return
        self._known[key] = nbytes = storage.nbytes() if counts else 0
        weakref.finalize(storage, self._forget, key).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def set_apart(tensor: Tensor) -> Tensor:
    """Exclude a tensor's memory from all memory trackers; return the tensor."""
    storage = tensor.untyped_storage()
    _APART.add(storage._cdata)
    weakref.finalize(storage, _APART.discard, storage._cdata).atexit = False
    return tensor


def key_of(tensor: Tensor) -> int:
    """Return the key of a tensor's storage, unique while the storage is live."""
    return int(tensor.untyped_storage()._cdata)
