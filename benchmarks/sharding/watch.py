"""Look at a candidate's memory at every turn of a step: before each layer, at each gradient, at the end of each pass.

Note: when memory peaks. Forward, activations grow layer by layer; backward, each layer's gradients come while those of
the layers before are reduced and its activations go. So a look is taken when a layer is about to run, whose parameters
are whole then, when the gradient of what it returned has come, and when a gradient of a parameter has come that is
nobody's yet. What autograd keeps for the backward pass it hands to ``saved_tensors_hooks``; it lets go of it node by
node, which a weak reference sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from sharding.addresses import Resident, resident
from sharding.candidates import Candidate
from sharding.holdings import Held, Holdings
from sharding.peers import Buckets
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Sample:
    """Hold what a rank had in memory at one moment of a step."""

    moment: str
    resident: Resident
    held: dict[str, Held]


class Saved:
    """Be what autograd keeps in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Take samples of a candidate's steps, for the length of a ``with`` block."""

    def __init__(self, candidate: Candidate, buckets: Buckets) -> None:
        self.samples: list[Sample] = []
        self._model = candidate.model
        self._holdings = Holdings(candidate, buckets)
        self._saved: WeakSet[Saved] = WeakSet()
        self._handles: list[RemovableHandle] = []
        self._known: set[int] = set()
        self._saving: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        for module in self._model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._handles.append(module.register_forward_pre_hook(self._before))
                self._handles.append(module.register_forward_hook(self._after))
        self._saving.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saving.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def look(self, moment: str, fresh: Iterable[Tensor] = ()) -> None:
        """Take a sample; ``fresh`` are gradients that have just come."""
        saved = [one.tensor for one in self._saved]
        self.samples.append(Sample(moment, resident(), self._holdings.now(fresh, saved)))

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.add(saved)
        return saved

    @staticmethod
    def _unpack(saved: Saved) -> Tensor:
        return saved.tensor

    def _before(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known.add(id(parameter))
                self._handles.append(parameter.register_hook(self._come))  # type: ignore[no-untyped-call]
        self.look("forward")

    def _after(self, module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _: self.look("backward"))  # type: ignore[no-untyped-call]

    def _come(self, gradient: Tensor) -> None:
        self.look("gradient", [gradient])
