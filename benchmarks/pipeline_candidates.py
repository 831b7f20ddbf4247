"""Candidates of the pipeline benchmark: gradients of a batch by one rank alone, hpctrain's pipeline, and torch's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.models import GPT, GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance
from hpctrain.parallel.wrap import attach

MANY, FEW = 8, 4  # microbatches


class Name(StrEnum):
    """Candidates."""

    ALONE = "one rank alone"
    NAIVE = "hpctrain naive"
    GPIPE = "hpctrain gpipe"
    ONE_F_ONE_B = "hpctrain 1f1b"
    INTERLEAVED = "hpctrain interleaved"
    ZERO_BUBBLE = "hpctrain zb-h1"
    FEW_ONE_F_ONE_B = "hpctrain 1f1b m=4"
    FEW_ZERO_BUBBLE = "hpctrain zb-h1 m=4"
    TORCH_GPIPE = "torch GPipe + gloo"
    TORCH_ONE_F_ONE_B = "torch 1F1B + gloo"


# Schedule and microbatches of hpctrain's candidates.
OURS: dict[str, tuple[Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1"], int]] = {
    Name.NAIVE: ("naive", MANY),
    Name.GPIPE: ("gpipe", MANY),
    Name.ONE_F_ONE_B: ("1f1b", MANY),
    Name.INTERLEAVED: ("interleaved", MANY),
    Name.ZERO_BUBBLE: ("zb-h1", MANY),
    Name.FEW_ONE_F_ONE_B: ("1f1b", FEW),
    Name.FEW_ZERO_BUBBLE: ("zb-h1", FEW),
}
TORCH: dict[str, str] = {Name.TORCH_GPIPE: "ScheduleGPipe", Name.TORCH_ONE_F_ONE_B: "Schedule1F1B"}
# The words on the command line.
WORDS = {
    "alone": Name.ALONE,
    **{name.removeprefix("hpctrain ").replace(" m=", "-"): name for name in OURS},
    "torch-gpipe": Name.TORCH_GPIPE,
    "torch-1f1b": Name.TORCH_ONE_F_ONE_B,
}
BYTES = 256


@dataclass(frozen=True)
class Task:
    """Shape of the model and of its sequences; head and embedding are untied, as in torch's stages."""

    width: int = 384
    layers: int = 8
    heads: int = 6
    context: int = 128

    def model(self) -> GPT:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        shape = {"width": self.width, "layers": self.layers, "heads": self.heads, "context": self.context}
        return GPT(GPTConfig(**shape, vocab_size=BYTES, tied=False))

    def batch(self, number: int, microbatches: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, one sequence per microbatch; a smaller batch is the beginning of a larger one."""
        generator = torch.Generator().manual_seed(number)
        tokens = [torch.randint(0, BYTES, (self.context + 1,), generator=generator) for _ in range(microbatches)]
        both = torch.stack(tokens)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def cuts(self, parts: int) -> list[list[str]]:
        """Return the names of the layers of each part, by hpctrain's default partition."""
        layers = find_layers(self.model())
        return [[layers[number].name for number in cut] for cut in balance(layers, parts)]


FULL, SMALL = Task(), Task(width=32, layers=4, heads=2, context=16)


class Candidate(ABC):
    """Candidate of the benchmark; all ranks construct it and call its ``step`` together."""

    def __init__(self, model: nn.Module, microbatches: int = MANY) -> None:
        self.model, self.microbatches = model, microbatches  # the part of the model on this rank

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Compute the gradients of the parameters; return the loss on ranks that know it, else None."""


class Alone(Candidate):
    """Computation of all microbatches on the first rank, one after the other, while the others wait."""

    def __init__(self, task: Task, comm: Communicator, microbatches: int = MANY) -> None:
        self.rests = comm.rank > 0
        super().__init__(nn.Identity() if self.rests else task.model(), microbatches)

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        if self.rests:
            return None
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches)):
            loss = cross_entropy(self.model(x), y) / self.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total.item()


class Ours(Candidate):
    """Pipeline of hpctrain over all ranks."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        schedule, microbatches = OURS[name]
        super().__init__(task.model(), microbatches)
        settings = ParallelSettings(pipe=comm.size, schedule=schedule, microbatches=microbatches)
        self._strategy, self._objective = attach(self.model, comm, settings), Objective(cross_entropy)

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        return self._strategy.forward_backward(inputs, targets, self._objective).item()


class Torch(Candidate):
    """Pipeline of torch with the same layers on the same ranks."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        from torch.distributed import pipelining

        whole = task.model()
        super().__init__(nn.Sequential(*(whole.get_submodule(one) for one in task.cuts(comm.size)[comm.rank])))
        self._first, self._last = comm.rank == 0, comm.rank == comm.size - 1
        stage = pipelining.PipelineStage(self.model, comm.rank, comm.size, torch.device("cpu"))
        # Dividing the loss has no cost; by default torch scales every gradient in the end.
        self._schedule = getattr(pipelining, TORCH[name])(stage, MANY, loss_fn=self._share, scale_grads=False)

    def _share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) / MANY

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        given = (inputs,) if self._first else ()
        if not self._last:
            self._schedule.step(*given)
            return None
        losses: list[Tensor] = []
        self._schedule.step(*given, target=targets, losses=losses)
        return torch.stack(losses).sum().item()


def make(name: str, task: Task, comm: Communicator) -> Candidate:
    """Return a candidate. Collective."""
    return (
        Alone(task, comm) if name == Name.ALONE else Ours(name, task, comm) if name in OURS else Torch(name, task, comm)
    )
