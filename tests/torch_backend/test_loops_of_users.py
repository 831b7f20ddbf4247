"""A user's loop under torch's DDP and FSDP2 on three ranks equals the same loop in one process, in double precision.

Three ranks, because an average over them is no power of two; the program uses public names only. A
compiled DDP takes its second step only if the compiler leaves the methods of the group alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import Finished, JobStarter

# The part of each rank is a third of every batch; the arguments are the kinds of training.
PROGRAM = """
import contextlib, json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def train(kind, steps=5, parts=2):
    rank, size = (0, 1) if kind == "alone" else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(1)
    model = inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    elif kind.startswith("fsdp"):
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    call = torch.compile(model, backend="aot_eager") if kind.endswith("compiled") else model
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(parts):
            generator = torch.Generator().manual_seed(10 * step + part)
            inputs = torch.randn(6, 8, generator=generator, dtype=torch.float64).chunk(size)[rank]
            waits = kind == "ddp" and part + 1 < parts
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = (call(inputs) - inputs[:, :4].sin()).square().mean() / parts
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(inner.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if size > 1:
            dist.all_reduce(total)
        found += [total.item() / size, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
    weights = [(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten() for each in inner.parameters()]
    return found + torch.cat(weights).tolist()

dist.init_process_group("hpctrain")
lines = {kind: train(kind) for kind in ("alone", *sys.argv[1:])}
if dist.get_rank() == 0:
    print("RESULT", json.dumps(lines))
dist.destroy_process_group()
"""


def result(job: Finished) -> dict[str, list[float]]:
    assert job.returncode == 0, str(job)
    line = next(line for line in job.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, list[float]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.limit(150)
@pytest.mark.parametrize(
    ("debug", "kinds"),
    [
        ("OFF", ["ddp", "fsdp2", "ddp compiled"]),
        pytest.param("DETAIL", ["ddp", "fsdp2", "ddp compiled", "fsdp2 compiled"], marks=pytest.mark.long),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_process(
    launch: JobStarter, tmp_path: Path, debug: str, kinds: list[str]
) -> None:
    path = tmp_path / "loops.py"
    path.write_text(PROGRAM)
    found = result(launch(3, path, *kinds, timeout=120, env={"TORCH_DISTRIBUTED_DEBUG": debug}))
    expected = found.pop("alone")
    assert list(found) == kinds and len(expected) == 10 + 484  # per step, a loss and a norm; then the weights
    for kind, values in found.items():
        assert values == pytest.approx(expected, rel=1e-11, abs=1e-13), kind
