"""A packed corpus, a user's model, a config, and a plain loop to compare with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

CONTEXT = 16

MODEL = '''
import os, signal, time, torch

class Model(torch.nn.Module):
    """Predict the next byte from the last ones; ends its process in a step that the environment names."""

    def __init__(self, width, dropout):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.mix = torch.nn.GRU(width, width, batch_first=True)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(width, 256)
        self.passes = 0

    def forward(self, tokens):
        if self.training:
            self.passes += 1
            if self.passes == int(os.environ.get("KILL_AT", 0)) and os.environ.get("KILL_RANK") == rank():
                print("killed at", time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.passes == int(os.environ.get("SIGNAL_AT", 0)) and rank() == "0":
                os.kill(launcher(), signal.SIGUSR1)
        return self.head(self.dropout(self.mix(self.embedding(tokens))[0]))

def make(width=8, dropout=0.0):
    return Model(width, dropout)

def rank():
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")

def launcher():
    """Return the outermost process that carries this job's mark: the launcher itself."""
    mark = "HPCTRAIN_TEST_JOB=" + os.environ["HPCTRAIN_TEST_JOB"]
    found = pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/environ") as file:
            if mark not in file.read():
                break
        found = pid
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return found
'''

CONFIG = f"""
[data]
files = ["corpus.h5"]
validation_samples = 8
[model]
factory = "bytes_model:make"
context = {CONTEXT}
options = {{ width = 8, dropout = 0.0 }}
[train]
batch = 12
seed = 3
clip = 0.5
evaluate_every = 0
[optimizer]
learning_rate = 0.01
warmup = 4
"""


def make_project(folder: Path) -> Path:
    """Pack a corpus and write the model and the config into a folder; return the config's path."""
    from hpctrain.data.pack import pack

    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text("".join(f"{number} times {n} is {number * n}\n" for n in range(20)))
    pack([texts], folder / "corpus.h5", validation_fraction=0.2, progress=False)
    (folder / "bytes_model.py").write_text(MODEL)
    config = folder / "tiny.toml"
    config.write_text(CONFIG)
    return config


def plain_losses(
    folder: Path, make: Any, steps: int, batch: int = 12, seed: int = 3, optimizer: Any = None, compare: Any = None
) -> list[float]:
    """Train in one process by torch, NumPy and h5py alone, according to the config; return the losses.

    ``optimizer`` makes another optimizer from two groups; ``compare`` is another loss of outputs and targets.
    """
    with h5py.File(folder / "corpus.h5") as file:
        tokens = torch.from_numpy(file["train/tokens"][()].astype(np.int64))
    samples = (len(tokens) - 1) // CONTEXT
    epochs = -(-steps * batch // samples)
    permutations = [np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples) for epoch in range(epochs)]
    order = np.concatenate(permutations)

    torch.manual_seed(seed)
    model = make()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if optimizer is None:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    else:
        optimizer = optimizer([{"params": group["params"]} for group in groups])
    compare = compare or (lambda out, targets: torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()))
    losses = []
    for step in range(1, steps + 1):
        chosen = order[(step - 1) * batch : step * batch]
        windows = torch.stack([tokens[index * CONTEXT : index * CONTEXT + CONTEXT + 1] for index in chosen])
        outputs = model(windows[:, :-1])
        loss = compare(outputs, windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _rate(step: int, steps: int, peak: float = 0.01, warmup: int = 4, final: float = 0.1) -> float:
    if step <= warmup:
        return peak * step / warmup
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2)
