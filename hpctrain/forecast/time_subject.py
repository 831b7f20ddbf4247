"""Preparation of a model for operation counting: unsplit, or as one of several simulated tensor ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.forecast.facts import Facts, Layer
from hpctrain.forecast.fake import FakeRanks, fake_copy, faked, faking
from hpctrain.forecast.time_tally import Noted, Work
from hpctrain.parallel.objective import cross_entropy, loss_named
from hpctrain.parallel.settings import ParallelSettings
from hpctrain.parallel.tensor.plan import apply, check, choose, plan_of


@dataclass(frozen=True, eq=False)
class Subject:
    """Layers on tensors without memory, and the functions to run them with."""

    layers: Sequence[Layer]
    compare: Callable[[Tensor, Tensor], Tensor]
    make: Callable[[Tensor], Tensor]  # converts a tensor on the meta device to one that the layers accept
    noted: Noted


@contextmanager
def subject(facts: Facts, loss: str, dtype: torch.dtype | None, parallel: ParallelSettings) -> Iterator[Subject]:
    """Provide a model's layers for the ``with`` block, with floating-point parameters in ``dtype``.

    Raises ``UsageError`` if the model cannot be split over that number of tensor ranks.
    """
    noted = Noted()
    if parallel.tensor == 1:
        model = facts.model if dtype is None else copy.deepcopy(facts.model).to(dtype)
        yield Subject(_layers(facts, model), loss_named(loss), _same, noted)
        return
    with ExitStack() as stack:
        stack.enter_context(faking())
        model = fake_copy(facts.model, dtype)
        ranks = _Listening(parallel.tensor, noted)
        plan = plan_of(model, parallel.tensor_plan)
        check(choose(model, plan), parallel.tensor)
        split = apply(model, cast(Communicator, ranks), plan, sequence=parallel.sequence)
        compare = loss_named(loss)
        if split.has_head and compare is cross_entropy:
            compare = split.cross_entropy
            stack.enter_context(split.split_outputs())
        yield Subject(_layers(facts, model), compare, faked, noted)


def _layers(facts: Facts, model: nn.Module) -> list[Layer]:
    """Return the layers of a copy that correspond to those of the facts; other layers are kept unchanged."""
    names = {id(module): name for name, module in facts.model.named_modules()}
    inside = dict(model.named_modules())
    return [
        Layer(layer.name, inside[names[id(layer.module)]] if id(layer.module) in names else layer.module, layer.kind)
        for layer in facts.layers
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Listening(FakeRanks):
    """Fake communicator that records the tensor-parallel communication."""

    def __init__(self, size: int, noted: Noted) -> None:
        super().__init__(size)
        self._noted = noted

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Record an all-reduce."""
        self._noted.add(Work(reduced=float(tensor.nbytes), reductions=1))
        return super().all_reduce(tensor, op, async_op=async_op)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Record a reduce-scatter."""
        self._noted.add(Work(moved=float(tensor.nbytes), moves=1))
        return super().reduce_scatter(out, tensor, op, async_op=async_op)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Record an all-gather."""
        self._noted.add(Work(moved=float(out.nbytes), moves=1))
        return super().all_gather(out, tensor)
