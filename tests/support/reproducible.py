"""Training by microbatches in one process, by torch, hashlib and fractions, as docs/reproducible.md defines it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from support.tree_sums import tree_sum
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, MICROBATCH, STEPS, NORM = 24, 3, 8, 0.5
SEED = 1

# A program of the user: every strategy in turn, in one process per rank. Rank 0 prints what the test compares.
PROGRAM = """
import sys
import hpctrain, torch
from support.reproducible import BATCH, MICROBATCH, NORM, SEED, STEPS, dataset, loss_of, make_model
from support.reproducible import printed
from torch.utils.data import DataLoader

job = hpctrain.init(device="cpu")
for name in sys.argv[2:]:
    torch.manual_seed(SEED)
    model = make_model()
    job.wrap(model, hpctrain.ParallelSettings(data=name, reproducible=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    options = {"steps": STEPS, "microbatch": MICROBATCH, "checkpoints": f"{sys.argv[1]}/{name}{job.size}"}
    losses, norms = [], []
    with job.run(model, optimizer, loader, **options) as run:
        for step, batch in run:
            loss = run.backward(batch, lambda part: loss_of(model, part))
            norms.append(float(run.clip(NORM)))
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            losses.append(float(loss))
        found = run.evaluate(DataLoader(dataset(), batch_size=10), lambda part: loss_of(model, part))
    tensors = job.state_dict(model)
    if job.rank == 0:
        print(printed(name, losses, norms, found, tensors), flush=True)
"""


def make_model() -> nn.Sequential:
    """Return a network with batch norm and dropout, whose layers do not fill cache lines."""
    return nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 33), nn.Dropout(0.3), nn.Tanh(),
        nn.Linear(33, 3),
    )  # fmt: skip


def dataset() -> TensorDataset:
    """Return 70 samples: the last batch of an epoch has a microbatch of one sample."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(70, 2, 6, generator=generator), torch.randint(0, 3, (70,), generator=generator))


def loss_of(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part[0]), part[1])


def printed(name: str, losses: list[float], norms: list[float], found: float, tensors: dict[str, Tensor]) -> str:
    """Return one line with all bits."""
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(key.encode() + tensor.detach().contiguous().numpy().tobytes())
    numbers = [one.hex() for one in (*losses, *norms, found)]
    return f"{name} {digest.hexdigest()} {' '.join(numbers)}"


def seed_of(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *(number % 2**63 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def parts_of(batch: Any) -> list[Any]:
    samples = len(batch[0])
    return [[one[begin : begin + MICROBATCH].clone() for one in batch] for begin in range(0, samples, MICROBATCH)]


def exact_norm(gradients: list[Tensor]) -> Tensor:
    total = sum(Fraction(value) ** 2 for gradient in gradients for value in gradient.flatten().tolist())
    return torch.tensor(math.sqrt(total), dtype=torch.float64).float()


def plain(name: str, compute: Callable[[nn.Module, Any], Tensor] = loss_of) -> str:
    """Train in one process; return the line that the program prints."""
    torch.manual_seed(SEED)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    losses: list[float] = []
    norms: list[float] = []
    while len(losses) < STEPS:
        for batch in loader:
            outer = torch.get_rng_state()
            found, gradients = [], []
            for index, part in enumerate(parts_of(batch)):
                torch.manual_seed(seed_of(SEED, len(losses), 0, index, 0))
                loss = compute(model, part) * (len(part[0]) / len(batch[0]))
                model.zero_grad()
                loss.backward()
                found.append(float(loss.detach()))
                gradients.append([one.grad for one in model.parameters() if one.grad is not None])
            for parameter, leaves in zip(model.parameters(), zip(*gradients)):
                parameter.grad = tree_sum(list(leaves))
            present = [one.grad for one in model.parameters() if one.grad is not None]
            norms.append(float(total := exact_norm(present)))
            factor = torch.clamp(NORM / (total + 1e-6), max=1.0)
            for gradient in present:
                gradient.mul_(factor)
            optimizer.step()
            losses.append(float(torch.tensor(math.fsum(found))))
            torch.set_rng_state(outer)
            if len(losses) == STEPS:
                break
    model.eval()
    with torch.no_grad():
        parts = [part for batch in DataLoader(dataset(), batch_size=10) for part in parts_of(batch)]
        total = math.fsum(float(loss_of(model, part)) * len(part[0]) for part in parts) / len(dataset())
    return printed(name, losses, norms, total, dict(model.state_dict()))
