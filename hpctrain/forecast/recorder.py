"""Recorder of what a strategy does in a simulated step: its calls, its memory, and what exists while modules run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.forecast.run import META, Group

NEVER = 2.0  # more than a whole pass
PASSES = ("forward", "backward")  # phases of a pass


@dataclass
class Call:
    """Operation of a communicator: the bytes of its whole tensor, and its moment as a part of the pass, from 0 to 1."""

    operation: str
    nbytes: int
    group: Group
    phase: str  # forward, backward, clip, update
    number: int  # of the pass
    issued: float
    needed: float = NEVER  # when the computation first uses the result; NEVER: at the end of the pass


@dataclass(frozen=True)
class Transient:
    """Bytes that exist while a module runs: unsharded parameters, and buffers of the strategy."""

    unsharded: int = 0
    buffers: int = 0


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that replaces kernels, records the strategy's memory, and receives the calls of communicators."""

    def __init__(self, parameter_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = max(parameter_bytes, 1)
        self.calls: list[Call] = []
        self.phase, self.number, self.progress = "", 0, 0.0
        self._gathers: dict[int, Call] = {}  # by the storage of the result
        self.live: dict[int, weakref.ref[Any]] = {}  # storages of the strategy
        self._foreign: dict[int, weakref.ref[Any]] = {}  # storages of the model's passes
        self.of_communicator: dict[int, int] = {}  # ranks that share each storage
        self.of_parameters: set[int] = set()
        self._kept: frozenset[int] = frozenset()  # storages that exist between two steps
        self.transients: dict[str, dict[str, Transient]] = {"forward": {}, "backward": {}}
        self.unsharded_at_loss = 0
        self._module = ""  # that began last
        self._bytes = self._peak = self._between = 0  # of storages by their first size: now, at most, between steps
        self._computing = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and the wrapper would double the time of an operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind_of(func)
        if kind == "in place":
            return args[0]
        if kind == "out":
            return kwargs["out"]
        if kind == "read":
            return 0
        if kind == "norm":
            return torch.empty((), dtype=args[0].dtype, device=META)
        if kwargs and (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": META}
        result = func(*args, **(kwargs or {}))
        if kind != "view" and isinstance(result, Tensor):  # autograd clones gradients
            self._note(result, self._foreign if self._computing or kind == "clone" else self.live)
        return result

    def _note(self, tensor: Tensor, owner: dict[int, weakref.ref[Any]]) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if owner is self.live else 0
        if key in self.live or key in self._foreign:
            return

        def forget(_: Any) -> None:
            self._bytes -= nbytes
            owner.pop(key, None)

        owner[key] = weakref.ref(storage, forget)
        self._bytes += nbytes
        self._peak = max(self._peak, self._bytes)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Exclude tensors of the ``with`` block, which the model allocates, not the strategy."""
        self._computing = True
        try:
            yield
        finally:
            self._computing = False

    def nbytes(self, key: int) -> int:
        """Return the present bytes of a storage of the strategy."""
        storage = self.live[key]() if key in self.live else None
        return storage.nbytes() if storage is not None else 0

    def begin_recording(self) -> None:
        """Record from now on; what exists is kept between steps."""
        self.calls.clear()
        self.transients = {"forward": {}, "backward": {}}
        self._kept = frozenset(key for key in self.live if self.nbytes(key))
        self._between = self._peak = self._bytes

    def begin(self, phase: str, number: int = 0) -> None:
        """Begin a pass, the clipping, or the update."""
        self._end_module()
        if phase == "backward":
            self.unsharded_at_loss = self._unsharded()
        self.phase, self.number, self.progress = phase, number, 0.0

    def begin_module(self, name: str, parameters: Sequence[Tensor | None]) -> None:
        """Record what is unsharded as a module begins to compute, and that it needs its parameters."""
        keys = {one.untyped_storage()._cdata for one in parameters if one is not None}
        self.of_parameters |= keys
        for key in keys & self._gathers.keys():
            self._gathers.pop(key).needed = self.progress
        self._end_module()
        self._module = name
        self._enlarge(Transient(self._unsharded()))

    def _unsharded(self) -> int:
        """Return the bytes of parameters that are unsharded only now; between two steps their storages have 0 bytes."""
        return sum(self.nbytes(key) for key in self.of_parameters - self._kept) if self._kept else 0

    def _end_module(self) -> None:
        """Record the peak of the buffers since the last module began: they are filled by hooks after its passes."""
        self._enlarge(Transient(0, self._peak - self._between))
        self._peak = self._bytes

    def _enlarge(self, found: Transient) -> None:
        if self.phase in self.transients:
            before = self.transients[self.phase].get(self._module, Transient())
            most = Transient(max(before.unsharded, found.unsharded), max(before.buffers, found.buffers))
            self.transients[self.phase][self._module] = most

    def end_module(self, parameters: Sequence[Tensor | None]) -> None:
        """Record that a module has computed; its parameters' bytes represent its share of the pass."""
        self.progress += sum(one.nbytes for one in parameters if one is not None) / self._whole

    def communicate(self, operation: str, tensor: Tensor, group: Group) -> None:
        now = min(self.progress, 1.0)
        waits = self.phase == "forward" and operation != "all_gather"
        call = Call(operation, tensor.nbytes, group, self.phase, self.number, now, now if waits else NEVER)
        self.calls.append(call)
        if operation == "all_gather":
            self._gathers[tensor.untyped_storage()._cdata] = call

    def allocate(self, numel: int, dtype: torch.dtype, shared_by: int) -> Tensor:
        made = torch.empty(numel, dtype=dtype, device=META)
        self.of_communicator[made.untyped_storage()._cdata] = shared_by
        return made


@cache
def _kind_of(func: Any) -> str:
    """Return how the recorder replaces an operator."""
    name, schema = func._overloadpacket.__name__, func._schema
    if any(argument.name == "out" for argument in schema.arguments):
        return "out"
    if schema.is_mutable and name.endswith("_"):
        return "in place"
    special = {"_local_scalar_dense": "read", "linalg_vector_norm": "norm", "clone": "clone"}
    return "view" if name in ("view", "slice") else special.get(name, "other")
