"""Runs of programs with a loop of their own: a stopped and resumed run equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import CheckpointError, LockError, UsageError
from hpctrain.integrations.program_run import ProgramRun
from hpctrain.train.control import stop_request
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.receipt.write import read_receipt

pytestmark = [pytest.mark.ranks(2), pytest.mark.limit(120), pytest.mark.usefixtures("group")]
STEPS = 6
MESHES: dict[str, Any] = {}  # torch keeps the groups of a mesh until the end


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=MESHES.setdefault("data", init_device_mesh("cpu", (2,))))
    return model


def split(model: nn.Module) -> nn.Module:
    mesh = MESHES.setdefault("tensor", init_device_mesh("cpu", (2,)))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "tensor": split,
}


class Program:
    """Program with a loop of its own; ``losses`` are those of the steps that it has made, by step."""

    def __init__(self, form: str = "ddp") -> None:
        self.model = FORMS[form](plain())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.losses: dict[int, float] = {}
        rank = dist.get_rank() if form != "tensor" else 0
        torch.manual_seed(5 + rank)  # of dropout

    def train(self, folder: Path, before_end: Callable[[int], None] = lambda step: None, **options: Any) -> None:
        with ProgramRun(folder, self.model, self.optimizer, **options) as run:
            for step in range(run.step, STEPS):
                loss = self.model(torch.randn(4, 8)).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                before_end(step + 1)
                self.losses[step + 1] = loss.item()
                run.end_step(loss=loss)

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def kill(step: int, now: int) -> None:
    if now == step and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: Path, *words: Any, program: Program | None = None, **options: Any) -> Program:
    """Return a program that has left with the exit code of a stopped one."""
    program = program or Program()
    with pytest.raises(LeavingTogether) as left:
        program.train(folder, *words, **options)
    assert left.value.code == 75
    return program


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = [
        (getattr(a, "to_local", lambda a=a: a)(), getattr(b, "to_local", lambda b=b: b)()) for a, b in zip(one, other)
    ]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("form", list(FORMS))
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(folder: Path, comm: Any, form: str) -> None:
    whole = Program(form)
    whole.train(folder / "whole")
    first = stopped(folder / "parts", partial(kill, 3), program=Program(form))
    stop_request.signal = None  # the second part is another process in reality
    second = Program(form)
    second.train(folder / "parts")
    assert {**first.losses, **second.losses} == whole.losses and list(second.losses) == [4, 5, 6]
    assert same(second.weights(), whole.weights())
    if comm.rank == 0:
        assert [row["loss"] for row in rows(folder / "parts")] == [row["loss"] for row in rows(folder / "whole")]
        attempts = read_receipt(folder / "parts")["attempts"]
        assert [one["status"] for one in attempts] == ["stopped", "finished"]
        assert attempts[0]["reason"] in ("SIGTERM", "a signal to another rank")


def test_stop_file_ends_the_program(folder: Path, comm: Any) -> None:
    def stop(step: int) -> None:
        if comm.rank == 0 and step == 1:
            (folder / "a" / "STOP").touch()

    assert list(stopped(folder / "a", stop).losses) == [1]


def test_save_file_writes_a_checkpoint_and_is_removed(folder: Path, comm: Any) -> None:
    def save(step: int) -> None:
        if comm.rank == 0 and step == 1:
            (folder / "a" / "SAVE").touch()

    Program().train(folder / "a", save, keep=9)
    comm.barrier()
    names = sorted(each.name for each in (folder / "a" / "checkpoints").iterdir())
    assert names == ["step_00000001.h5", "step_00000006.h5"] and not (folder / "a" / "SAVE").exists()


def test_walltime_ends_the_program(folder: Path) -> None:
    assert list(stopped(folder / "a", walltime="10m", margin=601.0).losses) == [1]


def test_periodic_checkpoints_are_rotated_and_background_ones_complete(folder: Path, comm: Any) -> None:
    Program().train(folder / "a", every=2, keep=2)
    Program().train(folder / "b", every=2, keep=2, background=True)
    comm.barrier()
    for name in ("a", "b"):
        assert sorted(each.name for each in (folder / name / "checkpoints").iterdir()) == [
            "step_00000004.h5",
            "step_00000006.h5",
        ]


def test_folder_of_another_kind_of_program_is_refused(folder: Path) -> None:
    Program().train(folder / "a")
    with pytest.raises(CheckpointError, match="is the run of a loop of its own, and this program is a Trainer: take"):
        Program().train(folder / "a", kind="a Trainer")


def test_folder_that_is_in_use_is_refused(folder: Path, comm: Any) -> None:
    program = Program()
    with ProgramRun(folder / "a", program.model, program.optimizer):
        with pytest.raises(LockError):
            Program().train(folder / "a")


def test_wrong_calls_have_one_clear_error(folder: Path) -> None:
    program = Program()
    with pytest.raises(UsageError, match="option 'evry' of this run.*every"):
        ProgramRun(folder / "a", program.model, program.optimizer, evry=3)
    with pytest.raises(UsageError, match="a step before the run was opened"):
        ProgramRun(folder / "a", program.model, program.optimizer).end_step(loss=1.0)
    with pytest.raises(UsageError, match="1 parameter|parameter 0"):
        ProgramRun(folder / "a", program.model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with ProgramRun(folder / "a", program.model, program.optimizer) as run:
        with pytest.raises(UsageError, match="is open: open it once"):
            run.open()


def test_fsdp1_is_refused(folder: Path) -> None:
    model = FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match="sharded by FSDP1.*shard it by FSDP2"):
        ProgramRun(folder / "a", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_that_log_different_names_are_told(folder: Path, comm: Any) -> None:
    program = Program()
    with pytest.raises(UsageError, match="the ranks log different names in step 1"):
        with ProgramRun(folder / "a", program.model, program.optimizer) as run:
            run.end_step(**{f"loss{comm.rank}": 1.0})
