"""Play a rank of a rehearsal: run a model's passes whenever told to, and say what they took.

``python -m hpctrain.estimate.rehearsal_rank`` reads a ``Part`` from its standard input, pickled, then a line for every
time, and answers each with a line of JSON. It ends with its input.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.estimate.facts import Facts, facts_of
from hpctrain.estimate.time_layers import CPU, real_copy
from hpctrain.parallel.objective import Objective, loss_named
from hpctrain.train.settings import Settings

READY = "ready"


@dataclass(frozen=True)
class Part:
    """Hold what a rank plays: the passes of these settings' model on so many samples."""

    settings: Settings
    samples: int
    threads: int
    dtype: torch.dtype | None  # of autocast


class Player:
    """Hold a model with memory, and a batch."""

    def __init__(self, facts: Facts, part: Part) -> None:
        torch.set_num_threads(part.threads)
        self.model = real_copy(facts.model)
        self.inputs, self.targets = (_filled(spec.of(part.samples, CPU)) for spec in (facts.inputs, facts.targets))
        self.objective = Objective(loss_named(part.settings.train.loss), part.dtype)
        self.optimizer = _optimizer(self.model)

    def play(self) -> tuple[float, float]:
        """Make a step; return the seconds of its forward and of its backward pass."""
        start = time.perf_counter()
        with self.objective.computing(CPU):
            outputs = self.model(self.inputs)
        loss = self.objective.compare(outputs, self.targets)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        # Between a run's passes the update goes through all of its memory, and gradients stay where they are.
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        return middle - start, end - middle


def main() -> None:
    """Play until nobody says more."""
    part: Part = pickle.load(sys.stdin.buffer)  # of the process that started this one
    player = Player(facts_of(part.settings), part)
    answer = sys.stdout
    sys.stdout = sys.stderr  # what a model prints is no answer
    print(READY, file=answer, flush=True)
    for _ in sys.stdin.buffer:
        print(json.dumps(player.play()), file=answer, flush=True)


def _filled(values: Tensor) -> Tensor:
    """Return small numbers by chance in the place of floating-point ones; classes and tokens stay zero."""
    return values.normal_() if values.is_floating_point() else values


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, lr=0.0, fused=True) if trained else None


if __name__ == "__main__":
    main()
