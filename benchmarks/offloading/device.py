"""Measurements on a GPU: steps with and without offload, and the largest model within a share of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import summary
from offloading import plot
from offloading.largest import CAP, largest
from offloading.streams import busy, profile, timeline
from offloading.training import BOTH, HERE, OFFLOAD, OPTIMIZER, Training

STEPS, WARMUP = 10, 3


def measure(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the figures, and the plots of a step's concurrent work."""
    device = torch.device("cuda", 0)
    steps: dict[str, Any] = {}
    pictures: list[Path] = []
    for name, offload in ((HERE, None), (OFFLOAD, OPTIMIZER)):
        training = Training(BOTH, offload, device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = summary(training.timed(STEPS, WARMUP))
        peak = torch.cuda.max_memory_allocated(device)
        line = timeline(profile(training))
        steps[name] = {
            "seconds": seconds,
            "tflop_per_second": BOTH.flop / seconds["median"] / 1e12,
            "peak_bytes": peak,
            "busy_seconds": busy(line),
            "losses": training.losses,
        }
        part = path.with_name(f"{path.name}-{name.replace(' ', '-')}")
        title = f"A step, {name}: {BOTH.config.parameters / 1e9:.1f} billion parameters"
        pictures += plot.draw_streams(title, line, part)
        training.close()
        del training
    result = {
        "gpu": torch.cuda.get_device_name(device),
        "parameters": BOTH.config.parameters,
        "steps": steps,
        "memory_fraction": CAP,
        "largest": largest(),
    }
    return result, pictures
