"""Search for the largest model that trains within a share of a GPU's memory, with one subprocess per trial."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from offloading.training import EVERYTHING, HERE, OFFLOAD, Shape, Training

CAP = 0.1  # share of the GPU's memory
STEPS = 2  # the second one has the optimizer's states from its beginning
SHAPE = Shape(layers=1, width=3072, heads=24, batch=1)
LONGEST = 600.0  # seconds that a trial may take
PROGRAM = Path(__file__).resolve().parents[1] / "offload.py"


def most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` that fits, if all numbers below it fit, too; 0 if 1 does not fit."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(limit: int = 512) -> dict[str, int]:
    """Return the number of parameters of the deepest GPT that trains, with and without offload."""
    found = {}
    for name in (HERE, OFFLOAD):
        layers = most(lambda count, name=name: _try_apart(name, count), limit)  # type: ignore[misc]
        found[name] = replace(SHAPE, layers=layers).config.parameters if layers else 0
    return found


def _try_apart(name: str, layers: int) -> bool:
    command = [sys.executable, str(PROGRAM), "--try", json.dumps({"name": name, "layers": layers})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    print(f"{name}, {layers} layers: {'trains' if done.returncode == 0 else 'does not fit'}", file=sys.stderr)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"a trial ended with exit code {done.returncode}:\n{done.stderr}")
    return done.returncode == 0


def try_it(text: str) -> int:
    """Train a model of the given depth within the share of memory; return 0, or 1 if the memory did not suffice."""
    wanted = json.loads(text)
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(CAP, device)
    shape = replace(SHAPE, layers=wanted["layers"])
    try:
        Training(shape, EVERYTHING if wanted["name"] == OFFLOAD else None, device).timed(STEPS, 0)
    except torch.cuda.OutOfMemoryError:
        return 1
    return 0
