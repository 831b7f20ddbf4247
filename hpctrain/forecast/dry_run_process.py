"""Process of a dry run: runs a model's passes on request and reports their times.

Run with ``python -m``, the module reads a pickled ``DryRunTask`` from its standard input, then one line
per step. It answers each line with a line of JSON, and ends at the end of its input.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.forecast.facts import ModelFacts, facts_of
from hpctrain.forecast.time_layers import CPU, real_copy
from hpctrain.parallel.objective import Objective, loss_named
from hpctrain.train.config import Settings

READY = "ready"


@dataclass(frozen=True)
class DryRunTask:
    """Work of a process: passes of the settings' model on ``samples`` samples."""

    settings: Settings
    samples: int
    threads: int
    dtype: torch.dtype | None  # of autocast


class StepRunner:
    """Model with allocated memory, and a batch."""

    def __init__(self, facts: ModelFacts, task: DryRunTask) -> None:
        torch.set_num_threads(task.threads)
        self.model = real_copy(facts.model)
        self.inputs, self.targets = (_filled(spec.of(task.samples, CPU)) for spec in (facts.inputs, facts.targets))
        self.objective = Objective(loss_named(task.settings.train.loss), task.dtype)
        self.optimizer = _optimizer(self.model)

    def run_step(self) -> tuple[float, float]:
        """Run a step; return the seconds of its forward and of its backward pass."""
        start = time.perf_counter()
        with self.objective.computing(CPU):
            outputs = self.model(self.inputs)
        loss = self.objective.compare(outputs, self.targets)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        # As in a run, the optimizer step between the passes touches all of the memory, and
        # gradients stay allocated.
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        return middle - start, end - middle


def main() -> None:
    """Answer requests until the end of the input."""
    task: DryRunTask = pickle.load(sys.stdin.buffer)  # sent by the parent process
    runner = StepRunner(facts_of(task.settings), task)
    answer = sys.stdout
    sys.stdout = sys.stderr  # keep a model's prints out of the answers
    print(READY, file=answer, flush=True)
    for _ in sys.stdin.buffer:
        print(json.dumps(runner.run_step()), file=answer, flush=True)


def _filled(values: Tensor) -> Tensor:
    """Fill floating-point values with small random numbers; class indices and tokens stay zero."""
    return values.normal_() if values.is_floating_point() else values


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, lr=0.0, fused=True) if trained else None


if __name__ == "__main__":
    main()
