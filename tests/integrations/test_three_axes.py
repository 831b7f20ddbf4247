"""Pipeline x FSDP2 x tensor parallelism of torch: stopped and resumed, on other axes too, as in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpctrain import checkpoint
from hpctrain.integrations.program_run import ProgramRun
from hpctrain.train.control import stop_request
from hpctrain.train.exit import LeavingTogether

pytestmark = [pytest.mark.ranks(4), pytest.mark.limit(180), pytest.mark.usefixtures("group")]
SHAPES = {"pipe x data": (2, 2, 1), "pipe x tensor": (2, 1, 2), "data x tensor": (1, 2, 2)}
WORDS, WIDTH, LAYERS, BATCH, LENGTH, STEPS, STOP = 16, 8, 4, 8, 5, 6, 3
MESHES: dict[tuple[int, ...], Any] = {}  # torch keeps the groups of a mesh until the end


class Block(nn.Module):
    """Residual block with a norm that tensor parallelism does not split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        residual: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(values))))
        return values + residual


class Language(nn.Module):
    """Model whose stages keep the names of the whole one: a stage has no embedding, no head, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, values: Tensor) -> Tensor:
        values = values if self.embed is None else self.embed(values)
        for layer in self.layers.values():
            values = layer(values)
        return values if self.head is None else self.head(values)


def whole_model(seed: int = 1) -> Language:
    torch.manual_seed(seed)
    return Language()


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    share = words.chunk(parts)[part]
    return share[:, :-1], share[:, 1:]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Program:
    """Program with its own loop on a mesh; ``losses`` are those of the steps that it has made, by step."""

    def __init__(self, axes: str, seed: int = 1) -> None:
        shape = SHAPES[axes]
        if shape not in MESHES:
            MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "data", "tensor"))
        mesh = self.mesh = MESHES[shape]
        stage, stages = mesh.get_local_rank("pipe"), mesh["pipe"].size()
        self.model = whole_model(seed)
        self.first, self.last = stage == 0, stage == stages - 1
        own = range(LAYERS)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
        for name in set(self.model.layers) - set(map(str, own)):
            del self.model.layers[name]
        self.model.embed = self.model.embed if self.first else None
        self.model.head = self.model.head if self.last else None
        for block in self.model.layers.values():
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        fully_shard(self.model, mesh=mesh["data"])
        group = mesh.get_group("pipe")
        self.stage = PipelineStage(self.model, stage, stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(self.stage, n_microbatches=2, loss_fn=cross_entropy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.losses: dict[int, float] = {}

    def step(self, step: int) -> Tensor:
        data = self.mesh["data"]
        inputs, target = batch(step, data.get_local_rank(), data.size())
        losses: list[Tensor] = []
        arguments = (inputs,) if self.first else ()
        self.schedule.step(*arguments, target=target if self.last else None, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if self.last else torch.zeros(())
        dist.all_reduce(loss, group=self.mesh.get_group("pipe"))
        return loss

    def train(self, folder: Path, stop: int = 0) -> None:
        with ProgramRun(folder, self.model, self.optimizer, every=2) as run:
            for step in range(run.step + 1, STEPS + 1):
                loss = self.step(step)
                if step == stop and dist.get_rank() == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                run.end_step(loss=loss)
                self.losses[step] = run.state.logged["loss"]

    def parameters(self) -> dict[str, Tensor]:
        found: dict[str, Any] = dict(self.model.named_parameters())
        return {name: value.full_tensor().detach() for name, value in found.items()}


def plain(steps: int = STEPS) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Return losses and parameters of a loop in one process, without parallelism."""
    model, losses = whole_model(), dict[int, float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        inputs, target = batch(step)
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def stopped(axes: str, folder: Path) -> Program:
    program = Program(axes)
    with pytest.raises(LeavingTogether) as leaving:
        program.train(folder, stop=STOP)
    assert leaving.value.code == 75 and list(program.losses) == list(range(1, STOP))
    stop_request.signal = None
    return program


def close_to(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axes", SHAPES)
def test_stopped_program_resumes_exactly_and_equals_one_process(comm: Any, folder: Path, axes: str) -> None:
    whole = Program(axes)
    whole.train(folder / "whole")
    losses, parameters = plain()
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    close_to(whole.parameters(), parameters)

    stopped(axes, folder / "parts")
    again = Program(axes, seed=2)
    again.train(folder / "parts")
    assert again.losses == {step: whole.losses[step] for step in range(STOP + 1, STEPS + 1)}
    expected = whole.parameters()
    assert all(torch.equal(value, expected[name]) for name, value in again.parameters().items())

    # One process reads the file, under the names of the whole model.
    model = whole_model(seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = checkpoint.load(folder / f"parts/checkpoints/step_{STEPS:08d}.h5", model=model, optimizer=optimizer)
    assert loaded.step == STEPS
    found = {name: value.detach() for name, value in model.named_parameters()}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {name.split(".")[1] for name in found if "layers" in name} == {"0", "1", "2", "3"}


@pytest.mark.filterwarnings("ignore")
def test_program_resumes_on_other_axes(comm: Any, folder: Path) -> None:
    stopped("pipe x data", folder)
    again = Program("data x tensor", seed=2)
    again.train(folder)
    losses, parameters = plain()
    assert again.losses == pytest.approx({step: losses[step] for step in range(STOP + 1, STEPS + 1)}, rel=1e-5)
    close_to(again.parameters(), parameters)
