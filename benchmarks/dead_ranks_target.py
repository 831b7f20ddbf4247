"""Job for the benchmark of dead ranks: a model of 70,000 parameters, or a GPT for the cost, with ``on_failure``.

    mpiexec -n 4 python benchmarks/dead_ranks_target.py KIND FOLDER STEPS ON_FAILURE

Each rank writes its process id into FOLDER.pids when its first step has ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpctrain
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

KINDS = ("plain", "batch norm", "dropout", "reproducible", "zero1", "fsdp", "reproducible fsdp", "pipe", "tensor")
COSTS = ("cost", "cost fsdp")  # a GPT with 10.9 million parameters, eight sequences of 128 tokens per rank and step
REPLICATE = "cost fsdp with replicate"  # the same, every rank on a simulated node of its own
EVERY = 10  # steps between copies on other nodes
CONTEXT, VOCABULARY, SEQUENCES = 128, 256, 8
SAMPLES, BATCH, WIDTH = 480, 48, 256


def model_of(kind: str) -> nn.Module:
    if kind.startswith("cost"):
        return build(ModelSettings(name="gpt-mini", context=CONTEXT), vocab_size=VOCABULARY)
    between = {"batch norm": nn.BatchNorm1d(WIDTH), "dropout": nn.Dropout(0.2)}.get(kind, nn.Identity())
    return nn.Sequential(
        nn.Linear(32, WIDTH), between, nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)
    )


def data_of(kind: str, ranks: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    if kind.startswith("cost"):
        tokens = torch.randint(VOCABULARY, (16 * SEQUENCES * ranks, CONTEXT + 1), generator=draw)
        return DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), batch_size=SEQUENCES * ranks)
    inputs, classes = torch.randn(SAMPLES, 32, generator=draw), torch.randint(0, 4, (SAMPLES,), generator=draw)
    return DataLoader(TensorDataset(inputs, classes), batch_size=BATCH, shuffle=True)


def simulate_nodes() -> None:
    """Let every rank be on a node of its own: ranks then share no memory, except for their copies."""
    from hpctrain.comm.transport.mpi import MpiTransport

    def split_node(self: MpiTransport) -> MpiTransport:
        alone = self.split(self.rank, 0)
        assert isinstance(alone, MpiTransport)
        return alone

    MpiTransport.split_node = split_node  # type: ignore[method-assign]


def main(kind: str, folder: Path, steps: int, on_failure: str) -> None:
    if kind == REPLICATE:
        simulate_nodes()
    data, reproducible = next((one for one in ("zero1", "fsdp") if one in kind), "ddp"), "reproducible" in kind
    parallel: dict[str, Any] = {"data": data, "reproducible": reproducible}
    parallel |= {"pipe": 2} if kind == "pipe" else {}
    parallel |= {"tensor": 2, "tensor_plan": ("3=column", "5=row")} if kind == "tensor" else {}
    job = hpctrain.init(device="cpu", parallel=parallel)
    torch.manual_seed(0)
    model = job.wrap(model_of(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note = folder.with_name(f"{folder.name}.pids") / str(job.rank)
    options: dict[str, Any] = {"steps": steps, "every": steps if kind.startswith("cost") else 10}
    options |= {"on_failure": on_failure, "replicate": EVERY if kind == REPLICATE and on_failure == "shrink" else 0}

    def loss_of(part: tuple[torch.Tensor, ...]) -> torch.Tensor:
        outputs = model(part[0])
        return cross_entropy(outputs.flatten(0, -2), part[1].flatten())

    with job.run(model, optimizer, data_of(kind, job.size), checkpoints=str(folder), **options) as run:
        for step, batch in run:
            if reproducible or kind == "pipe":
                loss = run.backward(tuple(batch), loss_of)
            else:
                loss = loss_of(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if step == 1:
                note.parent.mkdir(exist_ok=True)
                note.with_suffix(".new").write_text(str(os.getpid()))
                note.with_suffix(".new").replace(note)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
