"""Conformance suite of strategies: what the training loop, checkpoints and programs rely on.

A strategy is a row of the table in ``tests/parallel/test_strategies.py``. Numbers are compared with a plain loop in one
process that uses torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from support.meshes import BATCH, MAX_NORM, optimizer_of, samples, small_gpt
from support.nodes import NodeOfRank, on_nodes
from support.replicas import hooked_modules
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.clip import element_values
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.strategy import SplitStrategy, Strategy
from hpctrain.parallel.wrap import attach
from hpctrain.plain_tensors import plain_tensors

STEPS = 3
LOSS = Objective(cross_entropy)


@dataclass(frozen=True)
class Row:
    """A strategy in the table: its settings, and the number of ranks of which it needs a multiple.

    ``nodes`` places the ranks on simulated nodes.
    """

    parallel: dict[str, Any]
    offload: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    nodes: NodeOfRank | None = None

    def attach(self, comm: Any, model: nn.Module) -> Strategy:
        """Attach the strategy to a model. Collective."""
        return attach(model, comm, ParallelSettings(**self.parallel), offload=OffloadSettings(**self.offload))


@dataclass
class Reference:
    """Results of the plain loop, by step: losses, norms of the gradients, gradients and weights after the update."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


@cache
def reference() -> Reference:
    """Train in a plain loop on the whole batch."""
    model = small_gpt()
    optimizer = optimizer_of(model)
    found = Reference()
    for step in range(STEPS):
        inputs, targets = samples(step)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        found.losses.append(loss.item())
        named = model.named_parameters()
        found.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        found.weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


def own_samples(strategy: Strategy, step: int) -> tuple[Tensor, Tensor]:
    """Return this data rank's samples of a step."""
    data = strategy.data
    inputs, targets = (tensor.chunk(data.size)[data.rank] for tensor in samples(step))
    return inputs, targets


def passes(strategy: Strategy, step: int) -> float:
    """Leave the gradients of a global batch in the parameters; return its loss. Collective."""
    inputs, targets = own_samples(strategy, step)
    loss = strategy.forward_backward(inputs, targets, LOSS).reshape(1).clone()
    strategy.data.all_reduce(loss, "average")
    return loss.item()


def whole_state(strategy: Strategy, comm: Any) -> dict[str, Tensor]:
    """Return the global tensors of the model. Collective."""
    strategy.drain()
    return whole(strategy, comm, strategy.model.state_dict())


def whole_gradients(strategy: Strategy, comm: Any) -> dict[str, Tensor]:
    """Return the global averaged gradients. Collective."""
    return whole(strategy, comm, dict(strategy.reduced_gradients()))


def check_gradients(strategy: Strategy, comm: Any) -> None:
    """Compare the global averaged gradients with those of the plain loop in its first step. Collective."""
    torch.testing.assert_close(whole_gradients(strategy, comm), reference().gradients[0], rtol=1e-4, atol=1e-6)


def whole(strategy: Strategy, comm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return global tensors, put together from the boxes of all ranks by ``split``. Collective.

    Every element must be held by some rank, and ranks that hold the same element must agree on its bits.
    """
    own = {}
    with plain_tensors():
        for name, tensor in tensors.items():
            if strategy.split is None:
                own[name] = [(tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach().clone())]
            else:
                boxes = strategy.split.shards(name, tensor.detach())
                own[name] = [(box.shape, box.start, box.tensor.detach().reshape(box.extent).clone()) for box in boxes]
    found: dict[str, Tensor] = {}
    for held in comm.all_gather_object(own):
        for name, boxes in held.items():
            for shape, start, values in boxes:
                whole = found.setdefault(name, torch.full(shape, torch.nan))
                target = whole[tuple(slice(first, first + size) for first, size in zip(start, values.shape))]
                known = ~target.isnan()
                assert torch.equal(target[known], values[known]), f"ranks hold different values of {name}"
                target.copy_(values)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


class StrategySuite:
    """Tests that every synchronous strategy must pass; ``rows`` is the table."""

    rows: dict[str, Row]

    @pytest.fixture
    def attached(self, name: str, own: Any) -> Iterator[tuple[Strategy, nn.Module, Any]]:
        """Attach the strategy of a row to a small model."""
        row = self.rows[name]
        if own.size % row.ranks:
            pytest.skip(f"{name} needs a multiple of {row.ranks} ranks")
        model = small_gpt()
        comm = own if row.nodes is None or own.size == 1 else on_nodes(own, row.nodes)
        yield row.attach(comm, model), model, comm

    def test_training_equals_a_plain_loop(self, attached: Any) -> None:
        strategy, model, comm = attached
        optimizer = optimizer_of(model)
        strategy.check_optimizer(optimizer)
        wanted = reference()
        for step in range(STEPS):
            assert passes(strategy, step) == pytest.approx(wanted.losses[step], rel=1e-5)
            assert float(strategy.clip_grad_norm(MAX_NORM)) == pytest.approx(wanted.norms[step], rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(whole_state(strategy, comm), wanted.weights[-1], rtol=2e-4, atol=2e-5)

    def test_names_are_those_of_the_plain_model(self, attached: Any) -> None:
        strategy, model, comm = attached
        names = set().union(*(set(held) for held in comm.all_gather_object(list(model.state_dict()))))
        assert names == set(small_gpt().state_dict())

    def test_initial_weights_are_those_of_rank_0(self, name: str, own: Any) -> None:
        row = self.rows[name]
        if own.size % row.ranks:
            pytest.skip(f"{name} needs a multiple of {row.ranks} ranks")
        strategy = row.attach(own, small_gpt(seed=own.rank))
        torch.testing.assert_close(whole_state(strategy, own), dict(small_gpt().state_dict()), rtol=0, atol=0)

    def test_a_norm_below_the_limit_changes_no_gradient(self, attached: Any) -> None:
        strategy, _, _ = attached
        passes(strategy, 0)
        before = {name: element_values(gradient).clone() for name, gradient in strategy.reduced_gradients()}
        assert float(strategy.clip_grad_norm(float("inf"))) == pytest.approx(reference().norms[0], rel=1e-4)
        after = {name: element_values(gradient) for name, gradient in strategy.reduced_gradients()}
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_scaled_gradients_have_a_scaled_norm(self, attached: Any) -> None:
        strategy, _, _ = attached
        passes(strategy, 0)
        strategy.gradients.scale(torch.tensor(0.25))
        assert float(strategy.clip_grad_norm(float("inf"))) == pytest.approx(reference().norms[0] / 4, rel=1e-4)

    @pytest.mark.parametrize("local", [True, False], ids=["local", "reduced"])
    def test_gradients_of_accumulated_passes_add_up(self, attached: Any, local: bool) -> None:
        strategy, model, comm = attached
        if strategy.pipe is not None and not local:
            pytest.skip("a pipeline reduces only the last pass")
        inputs, targets = own_samples(strategy, 0)
        half = len(inputs) // 2
        for to_none in (False, True):
            with strategy.no_sync() if local else nullcontext():
                strategy.forward_backward(inputs[:half], targets[:half], LOSS, weight=0.5)
            strategy.forward_backward(inputs[half:], targets[half:], LOSS, weight=0.5)
            check_gradients(strategy, comm)
            model.zero_grad(set_to_none=to_none)

    def test_dropped_gradients_leave_nothing(self, attached: Any) -> None:
        strategy, _, comm = attached
        passes(strategy, 0)
        strategy.gradients.drop()
        assert not list(strategy.reduced_gradients())
        passes(strategy, 0)
        check_gradients(strategy, comm)

    def test_measured_loss_leaves_no_gradient(self, attached: Any) -> None:
        strategy, _, _ = attached
        inputs, targets = own_samples(strategy, 0)
        loss = strategy.measure(inputs, targets, LOSS).reshape(1).clone()
        strategy.data.all_reduce(loss, "average")
        assert loss.item() == pytest.approx(reference().losses[0], rel=1e-5)
        assert not list(strategy.reduced_gradients())

    def test_ranks_without_samples_join_a_step(self, attached: Any) -> None:
        strategy, _, comm = attached
        if strategy.data.size == 1:
            pytest.skip("the only data rank has all samples")
        data = strategy.data
        passes(strategy, 0)  # strategies that gather units learn their order in the first step
        for empty in (data.size - 1, 0):
            strategy.gradients.drop()
            inputs, targets = (tensor.chunk(data.size - 1) for tensor in samples(0))
            number = data.rank - (data.rank > empty)
            strategy.set_sample_weight(data.size * len(inputs[number]) / BATCH if data.rank != empty else 0.0)
            if data.rank != empty:
                strategy.forward_backward(inputs[number], targets[number], LOSS)
            else:
                strategy.join_empty()
            check_gradients(strategy, comm)

    def test_unsharded_parameters_have_their_whole_shapes(self, attached: Any) -> None:
        strategy, model, _ = attached
        shapes = {name: _whole_shape(strategy, name) for name, _ in model.named_parameters()}
        with strategy.unshard():
            for name, parameter in model.named_parameters():
                assert shapes[name] in (None, tuple(parameter.shape)) or strategy.place
        for name, parameter in model.named_parameters():
            assert _whole_shape(strategy, name) == shapes[name]

    @pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
    def test_invalid_sample_weights_are_refused(self, attached: Any, weight: float) -> None:
        strategy, _, _ = attached
        with pytest.raises(UsageError, match="^invalid sample weight: .*; allowed is a finite number of at least 0; "):
            strategy.set_sample_weight(weight)

    def test_a_detached_model_keeps_no_hook(self, name: str, attached: Any) -> None:
        strategy, model, _ = attached
        passes(strategy, 0)
        strategy.detach()
        if "tensor" not in self.rows[name].parallel:  # split layers stay split, and need the hooks of their regions
            assert not hooked_modules(model)


def _whole_shape(strategy: Strategy, name: str) -> tuple[int, ...] | None:
    return strategy.whole_shape(name) if isinstance(strategy, SplitStrategy) else None
