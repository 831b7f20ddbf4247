"""Execution of a schedule on the chunks of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.channels import ChunkChannels
from hpctrain.parallel.pipeline.executor import StepExecutor
from hpctrain.parallel.pipeline.layers import MicrobatchCall, find_layers
from hpctrain.parallel.pipeline.schedules import Action, ActionKind, Schedule
from hpctrain.parallel.pipeline.stage import make_chunks

CPU = torch.device("cpu")


def test_a_step_after_a_failed_one_has_only_its_own_weight_gradients(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    chunks = {0: make_chunks(find_layers(model), [range(2)])[0]}
    actions = tuple(Action(ActionKind(word[0]), 0, int(word[1])) for word in ("F0", "I0", "F1", "I1", "W0", "W1"))
    schedule = Schedule("by hand", 1, 1, 2, (actions,))
    channels = ChunkChannels(comm, schedule, [], CPU)
    inputs = torch.randn(2, 5, 3)

    def step(fails: bool) -> None:
        def loss(outputs: Tensor, target: Tensor) -> Tensor:
            if fails and bool(target):
                raise KeyError("the second microbatch")
            return outputs.square().mean()

        calls = [MicrobatchCall((each,)) for each in inputs]
        parts = list(torch.arange(2))
        StepExecutor(chunks, 1, CPU, None, [], schedule, channels, calls, parts, Objective(loss), 1.0).run(0)

    with pytest.raises(KeyError):
        step(fails=True)
    model.zero_grad()
    step(fails=False)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(inputs.flatten(0, 1)).square().mean().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
