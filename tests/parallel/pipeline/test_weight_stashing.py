"""PipeDream: gradients of the weights that the forward pass used, as in a plain simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.meshes import BATCH, Trained, samples, small_gpt
from torch import Tensor, nn

from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance
from hpctrain.parallel.pipeline.schedules import ActionKind, make
from hpctrain.parallel.wrap import attach

STEPS = 4


def versions(stages: int) -> list[list[int]]:
    """Return the number of updates before the forward pass of each microbatch, per stage."""
    schedule = make("pipedream", stages, BATCH)
    found = []
    for actions in schedule.actions:
        updates, seen = 0, []
        for action in actions:
            updates += action.kind is ActionKind.UPDATE
            if action.kind is ActionKind.FORWARD:
                seen.append(updates)
        found.append(seen)
    return found


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, which unlike Adam does not amplify the rounding of zero gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def simulated(stages: int, max_norm: float, seed: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process with the weights that each stage would use; one microbatch after the other."""
    model = small_gpt(seed, tied=False)
    layers = find_layers(model)
    row = [nn.Sequential(*(layers[number].module for number in part)) for part in balance(layers, stages)]
    optimizers = [momentum(stage) for stage in row]
    losses = []
    for step in range(STEPS):
        history = [[_values(stage)] for stage in row]
        total = 0.0
        for number, (inputs, targets) in enumerate(zip(*(part.chunk(BATCH) for part in samples(step)))):
            now = [_values(stage) for stage in row]
            for stage, versions_of, seen in zip(row, history, versions(len(row))):
                _set(stage, versions_of[seen[number]])
            loss = cross_entropy(nn.Sequential(*row)(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item() / BATCH
            for stage, values, optimizer, past in zip(row, now, optimizers, history):
                _set(stage, values)
                torch.nn.utils.clip_grad_norm_(stage.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                past.append(_values(stage))
        losses.append(total)
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _values(stage: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in stage.parameters()]


def _set(stage: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(stage.parameters(), values):
        parameter.data.copy_(value)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("max_norm", [float("inf"), 0.5])
def test_training_equals_a_simulation_of_the_weight_versions(own: Any, max_norm: float) -> None:
    trained = Trained.of(own, ParallelSettings(pipe=own.size, schedule="pipedream"), tied=False)
    trained.optimizer = momentum(trained.model)
    trained.strategy.check_optimizer(trained.optimizer)
    objective = Objective(cross_entropy, max_norm=max_norm)
    losses = []
    for step in range(STEPS):
        losses.append(trained.strategy.forward_backward(*samples(step), objective).item())
        trained.strategy.clip_grad_norm(max_norm)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    expected, weights = simulated(own.size, max_norm)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, tensor in trained.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


def test_the_first_stage_computes_with_older_weights_than_the_last() -> None:
    for stages in (2, 3, 4):
        seen = versions(stages)
        assert seen[-1] == list(range(BATCH))
        assert seen[0] == [max(0, number - stages + 1) for number in range(BATCH)]


@pytest.mark.ranks(4)
def test_replicas_of_stages_average_the_gradients_of_every_microbatch(own: Any) -> None:
    """Two pipelines with the same samples give the results of one."""
    settings = ParallelSettings(pipe=2, schedule="pipedream")
    pair = own.split(own.rank % 2)
    one, two = (Trained.of(comm, settings, tied=False) for comm in (pair, own))
    for step in range(STEPS):
        losses = [
            trained.strategy.forward_backward(*samples(step), Objective(cross_entropy)).item() for trained in (one, two)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for trained in (one, two):
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    pair.free()


@pytest.mark.ranks(2)
def test_unsupported_uses_are_refused(own: Any) -> None:
    with pytest.raises(SettingsError, match="embedding.token.weight = head.weight is on several stages"):
        Trained.of(own, ParallelSettings(pipe=2, schedule="pipedream"))
    strategy = attach(small_gpt(tied=False), own, ParallelSettings(pipe=2, schedule="pipedream"))
    with pytest.raises(UsageError, match="pass it the optimizer"):
        strategy.forward_backward(*samples(0), Objective(cross_entropy))
