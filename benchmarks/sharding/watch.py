"""Sampling of a candidate's memory during a step: before each layer, at each gradient, at the end of each pass.

Note: when memory peaks. In forward, activations grow layer by layer. In backward, each layer's
gradients are computed while those of later layers are still reduced, and its activations are freed.
Therefore a sample is taken at three moments: when a layer is about to run, with its parameters
unsharded; when the gradient of its output is ready; and when a parameter's gradient is ready but
not yet stored. The tensors that autograd saves for the backward pass go through
``saved_tensors_hooks``; a weak reference shows when autograd frees them, node by node.
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
    """Memory of a rank at one moment of a step."""

    moment: str
    resident: Resident
    held: dict[str, Held]


class Saved:
    """Wrapper that autograd saves in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Sampling of a candidate's steps for the duration of a ``with`` block."""

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
        """Take a sample; ``fresh`` are gradients that were just computed."""
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
